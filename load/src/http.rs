//! The protocol over HTTP/1.1: a pool of keep-alive connections, tensors as bytes behind the JSON (the protocol's
//! binary extension) or as numbers within it.

use bytes::Bytes;
use gateway::protocol::elements;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Request, StatusCode, Uri,
    header::{AUTHORIZATION, HeaderValue},
};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use repository::DataType;
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use crate::{
    answer::{ANSWER_BYTES_MAX, CONNECTION_IDLE_MAX, InputShape, Outcome, deepest},
    request::{Input, Tensor},
    server::Server,
    target::Encoding,
};

/// Length of the JSON before binary tensors, in requests and replies.
const JSON_LENGTH: &str = "inference-header-content-length";

/// A client of one server.
#[derive(Clone)]
pub(crate) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// `http://host:port` or `https://host:port`
    origin: String,
    authorization: Option<HeaderValue>,
    encoding: Encoding,
}

/// The requests of one stream, ready to be sent.
pub(crate) struct Requests {
    http: Http,
    bodies: Vec<Body>,
}

struct Body {
    uri: Uri,
    bytes: Bytes,
    /// Of the JSON before binary tensors.
    json_bytes: Option<usize>,
}

struct Answer {
    head: hyper::http::response::Parts,
    body: Bytes,
}

impl Http {
    pub(crate) fn new(server: Server, encoding: Encoding) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(CONNECTION_IDLE_MAX)
            .pool_timer(TokioTimer::new())
            .build(server.connector);
        Self { client, origin: server.origin, authorization: server.authorization, encoding }
    }

    /// Asks for the model's metadata.
    pub(crate) async fn inputs(&self, model: &str) -> Result<Vec<InputShape>, String> {
        #[derive(Deserialize)]
        struct Metadata {
            inputs: Vec<MetadataTensor>,
        }
        #[derive(Deserialize)]
        struct MetadataTensor {
            name: String,
            datatype: String,
            shape: Vec<i64>,
        }
        let request = Request::get(self.model_uri(model, "")).body(Full::default());
        let answer = self.request(request.expect("a valid URI makes a valid request")).await?;
        if answer.head.status != StatusCode::OK {
            return Err(format!("{}: {}", answer.head.status, answer.error_text()));
        }
        let metadata: Metadata = serde_json::from_slice(&answer.body).map_err(|error| error.to_string())?;
        let shape = |MetadataTensor { name, datatype, shape }| InputShape { name, datatype, shape };
        Ok(metadata.inputs.into_iter().map(shape).collect())
    }

    /// Whether the model is ready to be served.
    pub(crate) async fn is_ready(&self, model: &str) -> bool {
        let request = Request::get(self.model_uri(model, "/ready")).body(Full::default());
        let answer = self.request(request.expect("a valid URI makes a valid request")).await;
        answer.is_ok_and(|answer| answer.head.status == StatusCode::OK)
    }

    /// What the server tells of itself for Prometheus.
    pub(crate) async fn metrics(&self) -> Result<String, String> {
        let request = Request::get(format!("{}/metrics", self.origin)).body(Full::default());
        let answer = self.request(request.expect("a valid URI makes a valid request")).await?;
        String::from_utf8(answer.body.into()).map_err(|error| error.to_string())
    }

    pub(crate) fn prepare(&self, model: &str, inputs: &[Input]) -> Requests {
        let bodies = inputs.iter().map(|input| {
            let uri = self.model_uri(input.model.as_deref().unwrap_or(model), "/infer");
            match self.encoding {
                Encoding::Binary => binary_body(uri, input),
                Encoding::Json => json_body(uri, input),
            }
        });
        Requests { http: self.clone(), bodies: bodies.collect() }
    }

    async fn request(&self, mut request: Request<Full<Bytes>>) -> Result<Answer, String> {
        request.headers_mut().extend(self.authorization.clone().map(|value| (AUTHORIZATION, value)));
        let response = self.client.request(request).await.map_err(|error| deepest(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| deepest(&*error))?;
        Ok(Answer { head, body: body.to_bytes() })
    }

    fn model_uri(&self, model: &str, rest: &str) -> Uri {
        let escape = |byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        };
        let path: String = model.bytes().map(escape).collect();
        format!("{}/v2/models/{path}{rest}", self.origin).parse().expect("an escaped path makes a valid URI")
    }
}

impl Requests {
    pub(crate) async fn exchange(&self, index: usize) -> Outcome {
        let body = &self.bodies[index];
        let request = match body.json_bytes {
            Some(bytes) => Request::post(body.uri.clone())
                .header("content-type", "application/octet-stream")
                .header(JSON_LENGTH, bytes),
            None => Request::post(body.uri.clone()).header("content-type", "application/json"),
        };
        let request = request.body(Full::new(body.bytes.clone())).expect("valid parts make a valid request");
        let answer = match self.http.request(request).await {
            Ok(answer) => answer,
            Err(what) => return Outcome::Broken(what),
        };
        match answer.head.status {
            StatusCode::OK => {
                let timing = answer.head.headers.get("x-downbeat-timing");
                let timing = timing.and_then(|value| Some(value.to_str().ok()?.to_owned()));
                Outcome::Served { output: first_output(&answer), timing }
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                Outcome::Dropped(answer.error_text())
            }
            status => Outcome::Failed(format!("{status}: {}", answer.error_text())),
        }
    }
}

impl Answer {
    fn error_text(&self) -> String {
        let body: Option<serde_json::Value> = serde_json::from_slice(&self.body).ok();
        let text = body.as_ref().and_then(|body| body["error"].as_str());
        text.unwrap_or("no error text").to_owned()
    }
}

fn binary_body(uri: Uri, input: &Input) -> Body {
    let size = |tensor: &Tensor| format!("\"parameters\":{{\"binary_data_size\":{}}}", tensor.data.len());
    let header = request_json(input, size, true);
    let json_bytes = Some(header.len());
    let mut bytes = header.into_bytes();
    input.tensors.iter().for_each(|tensor| bytes.extend_from_slice(&tensor.data));
    Body { uri, bytes: bytes.into(), json_bytes }
}

fn json_body(uri: Uri, input: &Input) -> Body {
    let data = |tensor: &Tensor| {
        let mut data = String::from("\"data\":[");
        elements::write_json(tensor.datatype, &tensor.data, &mut data).expect("strings are made without a byte");
        data + "]"
    };
    Body { uri, bytes: request_json(input, data, false).into(), json_bytes: None }
}

/// The request's JSON, with `rest` in each of its inputs.
fn request_json(input: &Input, rest: impl Fn(&Tensor) -> String, is_binary: bool) -> String {
    let mut parameters = json!({});
    if is_binary {
        parameters["binary_data_output"] = json!(true);
    }
    if let Some(timeout_us) = input.timeout_us {
        parameters["timeout"] = json!(timeout_us);
    }
    let tensor = |tensor: &Tensor| {
        let (name, shape, rest) = (json!(tensor.name), json!(tensor.shape), rest(tensor));
        format!("{{\"name\":{name},\"datatype\":\"{}\",\"shape\":{shape},{rest}}}", tensor.datatype)
    };
    let tensors: Vec<String> = input.tensors.iter().map(tensor).collect();
    format!("{{\"parameters\":{parameters},\"inputs\":[{}]}}", tensors.join(","))
}

/// The first output as little-endian bytes, if the answer has the protocol's form.
fn first_output(answer: &Answer) -> Option<Bytes> {
    #[derive(Deserialize)]
    struct Response<'a> {
        #[serde(borrow)]
        outputs: Vec<Output<'a>>,
    }
    #[derive(Deserialize)]
    struct Output<'a> {
        datatype: String,
        shape: Vec<usize>,
        parameters: Option<Parameters>,
        #[serde(borrow)]
        data: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Parameters {
        binary_data_size: Option<usize>,
    }
    let json_bytes = match answer.head.headers.get(JSON_LENGTH) {
        Some(value) => value.to_str().ok()?.parse().ok()?,
        None => answer.body.len(),
    };
    let (json, binary) = answer.body.split_at_checked(json_bytes)?;
    let response: Response<'_> = serde_json::from_slice(json).ok()?;
    let output = response.outputs.into_iter().next()?;
    if let Some(size) = output.parameters.and_then(|parameters| parameters.binary_data_size) {
        return Some(answer.body.slice_ref(binary.get(..size)?));
    }
    let datatype = DataType::from_name(&output.datatype)?;
    let elements = output.shape.iter().try_fold(1, |product: usize, size| product.checked_mul(*size))?;
    elements::read_json(datatype, elements, output.data?.get().as_bytes()).ok().map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hyper::{Response, http::response};

    use super::*;
    use crate::{request::Expected, target::Target};

    fn answer(header: Option<usize>, body: &[u8]) -> Answer {
        let mut builder = Response::builder();
        if let Some(bytes) = header {
            builder = builder.header(JSON_LENGTH, bytes);
        }
        let (head, ()): (response::Parts, ()) = builder.body(()).unwrap().into_parts();
        Answer { head, body: Bytes::copy_from_slice(body) }
    }

    fn input() -> Input {
        let mut input = Input::new("i", DataType::Fp32, &[2], &[0, 0, 128, 63, 0, 0, 0, 0], Some(25.0), Expected::Any);
        input.tensors.extend(Input::new("j", DataType::Uint8, &[1], &[9], None, Expected::Any).tensors);
        input
    }

    #[test]
    fn model_names_are_escaped() {
        let target = Target::http("127.0.0.1:80".parse().unwrap(), Duration::from_secs(1), 1);
        let http = Http::new(Server::new(&target), Encoding::Json);
        assert_eq!(http.model_uri("a b/ü.1", "/infer").path(), "/v2/models/a%20b%2F%C3%BC.1/infer");
    }

    #[test]
    fn a_body_is_its_header_and_the_tensors_or_json_alone() {
        let Body { bytes, json_bytes, .. } = binary_body(Uri::default(), &input());
        let (header, data) = bytes.split_at(json_bytes.unwrap());
        let header: serde_json::Value = serde_json::from_slice(header).unwrap();
        assert_eq!(header["inputs"][0]["parameters"]["binary_data_size"], 8);
        assert_eq!(header["inputs"][1]["parameters"]["binary_data_size"], 1);
        assert_eq!(header["parameters"], json!({ "binary_data_output": true, "timeout": 25_000 }));
        assert_eq!(data, [0, 0, 128, 63, 0, 0, 0, 0, 9]);

        let Body { bytes, json_bytes, .. } = json_body(Uri::default(), &input());
        let body: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(json_bytes, None);
        let first = json!({ "name": "i", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 0.0] });
        let second = json!({ "name": "j", "datatype": "UINT8", "shape": [1, 1], "data": [9] });
        assert_eq!(body["inputs"], json!([first, second]));
    }

    #[test]
    fn outputs_are_read_in_both_forms_and_torn_ones_are_none() {
        let header =
            br#"{"outputs":[{"name":"o","datatype":"UINT8","shape":[1,2],"parameters":{"binary_data_size":2}}]}"#;
        let body = [&header[..], &[7, 8]].concat();
        assert_eq!(first_output(&answer(Some(header.len()), &body)).as_deref(), Some(&[7, 8][..]));
        assert_eq!(first_output(&answer(Some(header.len()), &body[..body.len() - 1])), None);
        assert_eq!(first_output(&answer(Some(body.len() + 1), &body)), None);
        let json = br#"{"outputs":[{"name":"o","datatype":"UINT16","shape":[1,2],"data":[[1,2]]}]}"#;
        assert_eq!(first_output(&answer(None, json)).as_deref(), Some(&[1, 0, 2, 0][..]));
        assert_eq!(first_output(&answer(None, br#"{"outputs":[]}"#)), None);
        let missing = br#"{"outputs":[{"name":"o","datatype":"UINT16","shape":[3],"data":[1,2]}]}"#;
        assert_eq!(first_output(&answer(None, missing)), None);
    }
}
