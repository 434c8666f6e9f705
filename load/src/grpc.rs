//! The protocol over gRPC: requests share HTTP/2 connections, tensors are raw bytes.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use bytes::Bytes;
use gateway::api::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse,
    infer_parameter::ParameterChoice, model_infer_request::InferInputTensor,
};
use hyper::{Uri, http::uri::PathAndQuery};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tonic::{
    Code, Status,
    body::Body,
    client,
    metadata::{Ascii, MetadataValue},
};
use tonic_prost::ProstCodec;

use crate::{
    answer::{ANSWER_BYTES_MAX, InputShape, Outcome, deepest},
    request::{Input, Tensor},
    server::Server,
};

/// HTTP/2's own 64 KiB would make the server wait in the middle of every large output.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// Requests under way on one connection before another one is opened: servers bound their streams, many at 100, and
/// what is beyond the bound would wait here.
const STREAMS: usize = 100;
/// Connections at most; then they share what comes.
const CONNECTIONS_MAX: usize = 128;

/// A client of one server.
#[derive(Clone)]
pub(crate) struct Grpc {
    server: Rc<Server>,
    connections: Rc<RefCell<Vec<Connection>>>,
    authorization: Option<MetadataValue<Ascii>>,
}

#[derive(Clone)]
struct Connection {
    client: client::Grpc<Client<HttpsConnector<HttpConnector>, Body>>,
    /// Requests under way.
    streams: Rc<Cell<usize>>,
}

/// A request under way.
struct Stream(Rc<Cell<usize>>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.update(|streams| streams - 1);
    }
}

/// The requests of one stream, ready to be sent.
pub(crate) struct Requests {
    grpc: Grpc,
    messages: Vec<ModelInferRequest>,
}

impl Grpc {
    pub(crate) fn new(server: Server) -> Self {
        let authorization =
            server.authorization.as_ref().and_then(|value| MetadataValue::try_from(value.as_bytes()).ok());
        Self { server: Rc::new(server), connections: Rc::default(), authorization }
    }

    /// A connection for one more request: the first one that has room.
    fn connection(&self) -> (Connection, Stream) {
        let mut connections = self.connections.borrow_mut();
        let place = connections.iter().position(|connection| connection.streams.get() < STREAMS);
        let place = place.unwrap_or_else(|| {
            if connections.len() < CONNECTIONS_MAX {
                connections.push(self.connect());
                return connections.len() - 1;
            }
            let least = (0..connections.len()).min_by_key(|&place| connections[place].streams.get());
            least.expect("there are connections")
        });
        let connection = connections[place].clone();
        connection.streams.update(|streams| streams + 1);
        let stream = Stream(Rc::clone(&connection.streams));
        (connection, stream)
    }

    fn connect(&self) -> Connection {
        let client = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .build(self.server.connector.clone());
        let origin: Uri = self.server.origin.parse().expect("a checked authority makes a valid URI");
        let client = client::Grpc::with_origin(client, origin).max_decoding_message_size(ANSWER_BYTES_MAX);
        Connection { client, streams: Rc::default() }
    }

    /// Asks for the model's metadata.
    pub(crate) async fn inputs(&self, model: &str) -> Result<Vec<InputShape>, String> {
        let question = ModelMetadataRequest { name: model.to_owned(), ..ModelMetadataRequest::default() };
        let metadata: ModelMetadataResponse =
            self.call("ModelMetadata", question).await.map_err(|status| text(&status))?;
        let inputs = metadata.inputs.into_iter();
        Ok(inputs.map(|input| InputShape { name: input.name, datatype: input.datatype, shape: input.shape }).collect())
    }

    pub(crate) fn prepare(&self, model: &str, inputs: &[Input]) -> Requests {
        Requests {
            grpc: self.clone(),
            messages: inputs.iter().map(|input| message(input.model.as_deref().unwrap_or(model), input)).collect(),
        }
    }

    async fn call<Q, A>(&self, method: &str, message: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let path = PathAndQuery::try_from(format!("/inference.GRPCInferenceService/{method}"));
        let (Connection { mut client, .. }, _stream) = self.connection();
        client.ready().await.map_err(|error| Status::from_error(error.into()))?;
        let codec = ProstCodec::default();
        let path = path.expect("the name of a method makes a valid path");
        let mut request = tonic::Request::new(message);
        if let Some(value) = &self.authorization {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(client.unary(request, path, codec).await?.into_inner())
    }
}

impl Requests {
    pub(crate) async fn exchange(&self, index: usize) -> Outcome {
        let answer: Result<ModelInferResponse, Status> =
            self.grpc.call("ModelInfer", self.messages[index].clone()).await;
        match answer {
            Ok(answer) => Outcome::Served { output: answer.raw_output_contents.into_iter().next(), timing: None },
            // Without a source the server sent it; with one the connection broke.
            Err(status) if std::error::Error::source(&status).is_some() => Outcome::Broken(text(&status)),
            Err(status) => match status.code() {
                Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted => {
                    Outcome::Dropped(status.message().to_owned())
                }
                _ => Outcome::Failed(text(&status)),
            },
        }
    }
}

fn message(model: &str, input: &Input) -> ModelInferRequest {
    let timeout = |us| InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(us)) };
    let parameters: BTreeMap<String, InferParameter> =
        input.timeout_us.into_iter().map(|us| ("timeout".to_owned(), timeout(us))).collect();
    let head = |tensor: &Tensor| InferInputTensor {
        name: tensor.name.clone(),
        datatype: tensor.datatype.to_string(),
        shape: tensor.shape.clone(),
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: model.to_owned(),
        parameters,
        inputs: input.tensors.iter().map(head).collect(),
        raw_input_contents: input.tensors.iter().map(|tensor| Bytes::clone(&tensor.data)).collect(),
        ..ModelInferRequest::default()
    }
}

/// One line: the code's name, and what the server or the connection said.
fn text(status: &Status) -> String {
    let cause = std::error::Error::source(status).map(deepest);
    format!("{:?}: {}", status.code(), cause.as_deref().unwrap_or_else(|| status.message()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use repository::DataType;

    use super::*;
    use crate::{
        request::Expected,
        target::{Target, Wire},
    };

    #[test]
    fn another_connection_is_opened_where_one_has_as_many_streams_as_servers_allow() {
        let target = Target::http(([127, 0, 0, 1], 1).into(), Duration::ZERO, 1);
        let grpc = Grpc::new(Server::new(&Target { wire: Wire::Grpc, ..target }));
        let streams = |grpc: &Grpc| -> Vec<usize> {
            grpc.connections.borrow().iter().map(|connection| connection.streams.get()).collect()
        };
        let mut open: Vec<Stream> = (0..2 * STREAMS + 1).map(|_| grpc.connection().1).collect();
        assert_eq!(streams(&grpc), [STREAMS, STREAMS, 1]);
        open.drain(..2);
        open.push(grpc.connection().1);
        assert_eq!(streams(&grpc), [STREAMS - 1, STREAMS, 1]);
        open.extend((0..CONNECTIONS_MAX * STREAMS).map(|_| grpc.connection().1));
        let streams = streams(&grpc);
        assert_eq!((streams.len(), streams.iter().sum::<usize>()), (CONNECTIONS_MAX, open.len()));
        assert!(streams.iter().all(|&streams| streams <= STREAMS + 2));
    }

    #[test]
    fn a_message_holds_every_tensor_as_raw_bytes() {
        let mut input = Input::new("i", DataType::Uint8, &[3], &[1, 2, 3], Some(25.0), Expected::Any);
        input.tensors.extend(Input::new("j", DataType::Int16, &[1], &[4, 5], None, Expected::Any).tensors);
        let message = message("m", &input);
        let choice = message.parameters["timeout"].parameter_choice.clone();
        assert_eq!(choice, Some(ParameterChoice::Int64Param(25_000)));
        assert_eq!((&message.inputs[0].shape[..], &message.raw_input_contents[0][..]), (&[1, 3][..], &[1, 2, 3][..]));
        assert_eq!((&*message.inputs[1].name, &*message.inputs[1].datatype), ("j", "INT16"));
        assert_eq!(message.raw_input_contents[1..], [Bytes::from_static(&[4, 5])]);
    }
}
