//! One request and its answer, whichever way they travel.

use std::time::Duration;

use bytes::Bytes;

use super::{drive::Target, grpc, http, request::Input, server::Server};

/// Answers longer than this are errors.
pub const ANSWER_BYTES_MAX: usize = 16 << 20;
/// A connection that is not needed stays open this long.
pub const CONNECTION_IDLE_MAX: Duration = Duration::from_secs(30);

/// How tensors are written over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Encoding {
    /// As bytes behind the JSON: the protocol's binary extension.
    Binary,
    /// As numbers within the JSON, which every server understands.
    Json,
}

/// How requests travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// HTTP/1.1, on as many connections as are needed.
    Http(Encoding),
    /// gRPC, on one HTTP/2 connection.
    Grpc,
}

/// What became of a request.
#[derive(Debug)]
pub enum Outcome {
    /// An answer.
    Served {
        /// The first output, little-endian; `None` if the answer has not the protocol's form.
        output: Option<Bytes>,
        /// downbeat's header of that name.
        timing: Option<String>,
    },
    /// Refused or given up by the server, with its reason.
    Dropped(String),
    /// Anything else.
    Failed(String),
}

/// What the server says about a model's first input.
#[derive(Debug)]
pub struct InputShape {
    /// Its name.
    pub name: String,
    /// As the protocol spells it.
    pub datatype: String,
    /// With the batch dimension; -1 where any size will do.
    pub shape: Vec<i64>,
}

/// A client of one server.
pub enum Client {
    Http(http::Http),
    Grpc(grpc::Grpc),
}

/// The requests of one stream, ready to be sent.
pub enum Requests {
    Http(http::Requests),
    Grpc(grpc::Requests),
}

impl Client {
    /// Connects when the first request is sent.
    pub fn new(target: &Target) -> Self {
        match target.wire {
            Wire::Http(encoding) => Self::Http(http::Http::new(Server::new(target), encoding)),
            Wire::Grpc => Self::Grpc(grpc::Grpc::new(Server::new(target))),
        }
    }

    pub async fn first_input(&self, model: &str) -> Result<InputShape, String> {
        match self {
            Self::Http(http) => http.first_input(model).await,
            Self::Grpc(grpc) => grpc.first_input(model).await,
        }
    }

    pub fn prepare(&self, model: &str, inputs: &[Input]) -> Requests {
        match self {
            Self::Http(http) => Requests::Http(http.prepare(model, inputs)),
            Self::Grpc(grpc) => Requests::Grpc(grpc.prepare(model, inputs)),
        }
    }
}

impl Requests {
    /// Sends the request of that input and waits for its answer.
    pub async fn exchange(&self, index: usize) -> Outcome {
        match self {
            Self::Http(requests) => requests.exchange(index).await,
            Self::Grpc(requests) => requests.exchange(index).await,
        }
    }
}

/// The innermost cause says most: "connection refused" rather than "client error".
pub fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}
