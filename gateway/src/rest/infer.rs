//! A request for inference in REST: a JSON object, which binary tensors may follow, one raw tensor, or a picture.

use frontend::{InferError, rope::Rope};
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderName, HeaderValue},
};
use repository::Model;
use serde_json::Value;

use super::{At, Failure, Reply, read_body};
use crate::{
    budget::Charge,
    conversation::{self, Opening, Question},
    pool::{AT_ONCE_BYTES_MAX, Pool},
    protocol::{self, InferRequest, Parameters, Tensors, json},
    server::{BodyMax, Caller},
    service::{Answer, Service, no_room, timing_text},
};

/// Length of the JSON object that binary tensors follow; 0 if the body is nothing but the one input.
const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
/// The number by which `/debug/requests/` explains the request.
const REQUEST: HeaderName = HeaderName::from_static("x-downbeat-request");
/// Where the request's time went; see [`timing_text`].
const TIMING: HeaderName = HeaderName::from_static("x-downbeat-timing");

/// Answers a request for inference that its client may make.
pub(super) async fn infer(caller: &Caller, at: At<'_>, request: Request<Incoming>) -> Result<Reply, Failure> {
    let service = &caller.server.service;
    let opening = Opening {
        model: Some(at.model),
        context: service.trace_context(request.headers()),
        began: service.desk.now(),
        within: None,
        is_one_of_many: false,
    };
    conversation::hold(caller, opening, async || Body::receive(caller, at, request).await).await
}

/// A body that was received.
struct Body<'a> {
    at: At<'a>,
    form: Form,
    bytes: Rope,
    charge: Charge,
}

/// What a body is.
enum Form {
    /// JSON of this length, then binary tensors; of all of it if there is none.
    Json(Option<usize>),
    /// Nothing but the model's one input, with these parameters beside it.
    Raw(Parameters),
    /// A picture.
    Picture(Parameters),
}

impl<'a> Body<'a> {
    async fn receive(caller: &Caller, at: At<'a>, request: Request<Incoming>) -> Result<Self, Failure> {
        let form = Form::of(&request)?;
        // Before anything else can be refused: a connection whose request was read to its end goes on.
        let (bytes, charge) = read_body(caller, request, BodyMax::infer(&caller.server.limits())).await?;
        Ok(Self { at, form, bytes, charge })
    }
}

impl Form {
    fn of(request: &Request<Incoming>) -> Result<Self, Failure> {
        let header_length = header_length(request)?;
        let query = || request.uri().query().map_or_else(Parameters::new, parameters_of);
        let content_type = request.headers().get(CONTENT_TYPE);
        Ok(match header_length {
            _ if content_type.is_some_and(|value| value.as_bytes().starts_with(b"image/")) => Self::Picture(query()),
            Some(0) => Self::Raw(query()),
            _ => Self::Json(header_length),
        })
    }
}

impl Question for Body<'_> {
    type Reply = Reply;
    type Refused = Failure;

    fn model_name(&self) -> Result<&str, Failure> {
        Ok(self.at.model)
    }

    fn model_version(&self) -> Result<Option<&str>, Failure> {
        Ok(self.at.version)
    }

    async fn decode(self, service: &Service, model: &Model) -> Result<(InferRequest, Charge), Failure> {
        let Self { at: _, form, bytes, charge } = self;
        let request = match form {
            Form::Picture(parameters) => protocol::picture_request(model, bytes, parameters)?,
            Form::Raw(parameters) => protocol::raw_request(model, bytes, parameters)?,
            Form::Json(length) => parse(&service.pool, model, bytes, length, &charge).await?,
        };
        Ok((request, charge))
    }

    fn encode(Answer { model, id, outputs, reply, parameters, number }: &Answer) -> Result<Reply, Failure> {
        let encoded = json::encode_reply(model, (id.as_deref(), parameters), outputs, reply)?;
        let is_binary = encoded.header_length.is_some();
        let content_type = if is_binary { "application/octet-stream" } else { "application/json" };
        let mut response = Response::new(Full::from(encoded.body));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.extend(encoded.header_length.map(|length| (HEADER_LENGTH, HeaderValue::from(length))));
        headers.insert(REQUEST, HeaderValue::from(*number));
        headers.extend(HeaderValue::try_from(timing_text(&reply.timing)).ok().map(|timing| (TIMING, timing)));
        Ok(response)
    }

    fn refused(error: InferError) -> Failure {
        error.into()
    }

    fn words(refused: &Failure) -> &str {
        &refused.message
    }
}

/// Reads a REST body, large ones in the pool. Numbers in it are not read yet.
async fn parse(
    pool: &Pool,
    model: &Model,
    body: Rope,
    header_length: Option<usize>,
    charge: &Charge,
) -> Result<InferRequest, InferError> {
    let (json, binary) = json::split_body(body, header_length)?;
    let tensors = Tensors::of(model);
    if json.len() <= AT_ONCE_BYTES_MAX {
        return json::parse_request(&json.joined(), binary, tensors);
    }
    if json.pieces().len() > 1 {
        // Once more in one piece.
        charge.grow(json.len()).map_err(no_room)?;
    }
    // Names, and what the parser remembers of strings and of nesting.
    let room = charge.beside(json.len()).map_err(no_room)?;
    let parse = move || {
        let _room = room;
        json::parse_request(&json.joined(), binary, tensors)
    };
    pool.run(charge, parse).await?
}

fn header_length(request: &Request<Incoming>) -> Result<Option<usize>, Failure> {
    let Some(value) = request.headers().get(HEADER_LENGTH) else { return Ok(None) };
    match value.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(length) => Ok(Some(length)),
        None => {
            let message = format!("Inference-Header-Content-Length: found {value:?}, expected a number of bytes");
            Err(Failure::closing(StatusCode::BAD_REQUEST, message))
        }
    }
}

/// The parameters that a query such as `timeout=20000&priority=1` sets: a picture or a raw tensor has no JSON around it
/// to hold them.
fn parameters_of(query: &str) -> Parameters {
    let value = |text: &str| match (text.parse::<i64>(), text.parse::<bool>()) {
        (Ok(number), _) => Value::from(number),
        (_, Ok(flag)) => Value::from(flag),
        _ => Value::from(text),
    };
    form_urlencoded::parse(query.as_bytes()).map(|(key, text)| (key.into_owned(), value(&text))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_query_is_decoded() {
        let found = parameters_of("timeout=20%3000&na%6De=a%26b+c&priority=%2B1&flag&background=true");
        let expected = json!({ "timeout": 20000, "name": "a&b c", "priority": 1, "flag": "", "background": true });
        assert_eq!(Value::from(found), expected);
    }
}
