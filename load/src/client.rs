//! A client of either wire: one enum, so that whoever sends does not care how requests travel.

use crate::{
    answer::{InputShape, Outcome},
    grpc, http,
    request::Input,
    server::Server,
    target::{Target, Wire},
};

/// A client of one server.
pub(crate) enum Client {
    Http(Box<http::Http>),
    Grpc(grpc::Grpc),
}

/// The requests of one stream, ready to be sent.
pub(crate) enum Requests {
    Http(Box<http::Requests>),
    Grpc(grpc::Requests),
}

impl Client {
    /// Connects when the first request is sent.
    pub(crate) fn new(target: &Target) -> Self {
        match target.wire {
            Wire::Http(encoding) => Self::Http(Box::new(http::Http::new(Server::new(target), encoding))),
            Wire::Grpc => Self::Grpc(grpc::Grpc::new(Server::new(target))),
        }
    }

    /// What the model takes: at least one input.
    pub(crate) async fn inputs(&self, model: &str) -> Result<Vec<InputShape>, String> {
        let inputs = match self {
            Self::Http(http) => http.inputs(model).await?,
            Self::Grpc(grpc) => grpc.inputs(model).await?,
        };
        if inputs.is_empty() { Err("its metadata names no input".to_owned()) } else { Ok(inputs) }
    }

    pub(crate) fn prepare(&self, model: &str, inputs: &[Input]) -> Requests {
        match self {
            Self::Http(http) => Requests::Http(Box::new(http.prepare(model, inputs))),
            Self::Grpc(grpc) => Requests::Grpc(grpc.prepare(model, inputs)),
        }
    }
}

impl Requests {
    /// Sends the request of that input and waits for its answer.
    pub(crate) async fn exchange(&self, index: usize) -> Outcome {
        match self {
            Self::Http(requests) => requests.exchange(index).await,
            Self::Grpc(requests) => requests.exchange(index).await,
        }
    }
}
