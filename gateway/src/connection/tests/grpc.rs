//! HTTP/2 and gRPC, spoken frame by frame.

use std::io::Write as _;

use bytes::{Buf as _, BufMut as _, BytesMut};
use flate2::{Compression, write::GzEncoder};
use h2::{
    RecvStream,
    client::{SendRequest, handshake},
};
use prost::Message;

use super::*;
use crate::api::{
    InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse, ModelReadyRequest, ModelReadyResponse,
    ModelStreamInferResponse, RepositoryModelLoadRequest, RepositoryModelUnloadRequest, ServerReadyRequest,
    ServerReadyResponse,
    health::{HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus},
    infer_parameter::ParameterChoice,
    model_infer_request::InferInputTensor,
    reflection::{
        ServerReflectionRequest, ServerReflectionResponse, server_reflection_request::MessageRequest,
        server_reflection_response::MessageResponse,
    },
};

/// A connection whose frames are moved by a task of its own.
pub(super) async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let (client, connection) = handshake(TcpStream::connect(address).await.unwrap()).await.unwrap();
    tokio::task::spawn_local(async move {
        let _ = connection.await;
    });
    client
}

pub(super) fn head(method: &str) -> hyper::http::request::Builder {
    Request::post(format!("http://h/inference.GRPCInferenceService/{method}"))
        .header("content-type", "application/grpc")
}

/// A message with the five bytes that go before it (gRPC over HTTP/2, "Length-Prefixed-Message").
pub(super) fn framed(is_compressed: bool, message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(u8::from(is_compressed));
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

/// What a call ended with: its `grpc-status`, its `grpc-message`, and the messages before.
pub(super) async fn finish(response: Response<RecvStream>) -> (u16, String, Vec<Bytes>) {
    assert_eq!(response.status(), 200, "{response:?}");
    let (head, mut body) = response.into_parts();
    let mut bytes = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece.unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        bytes.extend_from_slice(&piece);
    }
    // A failure without a message has its trailers as its head.
    let trailers = body.trailers().await.unwrap().unwrap_or(head.headers);
    let text = |name: &str| trailers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let mut messages = Vec::new();
    while bytes.has_remaining() {
        assert_eq!(bytes.get_u8(), 0, "no reply is compressed here");
        let length = bytes.get_u32() as usize;
        messages.push(bytes.split_to(length).freeze());
    }
    let message = percent_encoding::percent_decode_str(&text("grpc-message")).decode_utf8().unwrap().into_owned();
    (text("grpc-status").parse().unwrap(), message, messages)
}

pub(super) async fn call(
    client: &mut SendRequest<Bytes>,
    request: Request<()>,
    body: Bytes,
) -> (u16, String, Vec<Bytes>) {
    std::future::poll_fn(|context| client.poll_ready(context)).await.unwrap();
    let (response, mut stream) = client.send_request(request, false).unwrap();
    stream.send_data(body, true).unwrap();
    finish(response.await.unwrap()).await
}

pub(super) fn double(raw: &[u8]) -> ModelInferRequest {
    let rows = (raw.len() / 4) as i64;
    let input = InferInputTensor {
        name: "x".to_owned(),
        datatype: "UINT8".to_owned(),
        shape: vec![rows, 4],
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: "double".to_owned(),
        id: "q".to_owned(),
        inputs: vec![input],
        raw_input_contents: vec![Bytes::copy_from_slice(raw)],
        ..ModelInferRequest::default()
    }
}

pub(super) async fn infer(client: &mut SendRequest<Bytes>, message: &ModelInferRequest) -> (u16, String, Vec<Bytes>) {
    call(client, head("ModelInfer").body(()).unwrap(), framed(false, &message.encode_to_vec())).await
}

pub(super) async fn is_served_here(client: &mut SendRequest<Bytes>) {
    let (status, text, messages) = infer(client, &double(&[1, 2, 3, 4])).await;
    assert_eq!((status, messages.len()), (0, 1), "{text}");
    let response = ModelInferResponse::decode(messages[0].clone()).unwrap();
    assert_eq!((response.id.as_str(), &response.raw_output_contents[0][..]), ("q", &[2, 4, 6, 8][..]));
}

#[test]
fn rest_and_grpc_share_a_port_and_a_connection() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        is_served_here(&mut client).await;
        let (response, _) =
            client.send_request(Request::get("http://h/v2/health/ready").body(()).unwrap(), true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
        let post = Request::post(format!("http://h{INFER}")).body(()).unwrap();
        let (response, mut stream) = client.send_request(post, false).unwrap();
        stream.send_data(Bytes::from_static(GOOD.as_bytes()), true).unwrap();
        let mut response = response.await.unwrap();
        assert_eq!(response.status(), 200);
        let body = response.body_mut().data().await.unwrap().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["outputs"][0]["data"], json!([2, 4, 6, 8]));
        let ready = call(
            &mut client,
            head("ServerReady").body(()).unwrap(),
            framed(false, &ServerReadyRequest {}.encode_to_vec()),
        );
        let (status, _, messages) = ready.await;
        assert!(status == 0 && ServerReadyResponse::decode(messages[0].clone()).unwrap().ready);
    });
}

/// Its clients read neither plain gRPC nor our JSON: a status of HTTP is all that they understand.
#[test]
fn grpc_web_is_refused_and_suffixes_of_grpc_are_not() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        let message = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let ask = async |client: &mut SendRequest<Bytes>, content_type: &'static str| {
            let mut request = head("ModelInfer").body(()).unwrap();
            request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            let (response, mut stream) = client.send_request(request, false).unwrap();
            stream.send_data(message.clone(), true).unwrap();
            response.await.unwrap()
        };
        for found in ["application/grpc-web", "application/grpc-web-text", "application/grpc-web+proto"] {
            let mut response = ask(&mut client, found).await;
            assert_eq!(response.status(), 415, "{found}");
            let body = response.body_mut().data().await.unwrap().unwrap();
            let text = serde_json::from_slice::<Value>(&body).unwrap()["error"].to_string();
            assert!(text.contains(found) && text.contains("expected application/json, application/grpc"), "{text}");
        }
        for found in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"] {
            let (status, text, messages) = finish(ask(&mut client, found).await).await;
            assert_eq!((status, messages.len()), (0, 1), "{found}: {text}");
        }
        let unknown = ask(&mut client, "application/grpcs").await;
        assert_eq!(unknown.status(), 404, "no route of REST");
        is_served_here(&mut client).await;
    });
}

/// A call of a service that is not the protocol's own.
fn head_of(path: &str) -> Request<()> {
    Request::post(format!("http://h{path}")).header("content-type", "application/grpc").body(()).unwrap()
}

fn health_of(service: &str) -> Bytes {
    framed(false, &HealthCheckRequest { service: service.to_owned() }.encode_to_vec())
}

#[test]
fn health_is_told_in_grpcs_own_words() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        let mut check = async |service: &str| {
            let (status, text, messages) =
                call(&mut client, head_of("/grpc.health.v1.Health/Check"), health_of(service)).await;
            (status, messages.first().map(|found| HealthCheckResponse::decode(found.clone()).unwrap().status()), text)
        };
        for service in ["", "inference.GRPCInferenceService", "double"] {
            assert_eq!(check(service).await, (0, Some(ServingStatus::Serving), String::new()), "{service}");
        }
        let (status, _, text) = check("triple").await;
        assert!(status == 5 && text.contains("found 'triple'"), "{status} {text}");
        peer.tell_gpus(0);
        assert_eq!(check("double").await.1, Some(ServingStatus::NotServing));
    });
}

#[test]
fn who_watches_hears_of_each_change_and_of_the_end() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        let mut open = async |service: &str| {
            let (response, mut stream) = client.send_request(head_of("/grpc.health.v1.Health/Watch"), false).unwrap();
            stream.send_data(health_of(service), true).unwrap();
            response.await.unwrap()
        };
        let (mut known, unknown) = (open("double").await, open("triple").await);
        let first = known.body_mut().data().await.unwrap().unwrap();
        peer.tell_gpus(0);
        let second = known.body_mut().data().await.unwrap().unwrap();
        let expected = [(first, ServingStatus::Serving), (second, ServingStatus::NotServing)];
        for (found, expected) in expected {
            assert_eq!(HealthCheckResponse::decode(&found[5..]).unwrap().status(), expected);
        }
        peer.server.begin_drain();
        let (status, text, messages) = finish(unknown).await;
        let told: Vec<_> =
            messages.into_iter().map(|found| HealthCheckResponse::decode(found).unwrap().status()).collect();
        assert_eq!((status, &told[..]), (14, &[ServingStatus::ServiceUnknown][..]), "{text}");
        assert_eq!(finish(known).await.0, 14);
    });
}

#[test]
fn health_of_a_model_is_permitted_as_its_readiness_is() {
    let gate = super::secure::gate("operations = ['metadata', 'health'], models = ['dou*']");
    with_gate(gate, async |address, _| {
        let mut client = connect(address).await;
        for (service, token, expected) in
            [("", "", 0), ("double", "", 16), ("double", super::secure::TOKEN, 0), ("triple", super::secure::TOKEN, 7)]
        {
            for method in ["Check", "Watch"] {
                if method == "Watch" && expected == 0 {
                    continue;
                }
                let mut request = head_of(&format!("/grpc.health.v1.Health/{method}"));
                if !token.is_empty() {
                    let bearer = HeaderValue::try_from(format!("Bearer {token}")).unwrap();
                    request.headers_mut().insert("authorization", bearer);
                }
                let (status, text, _) = call(&mut client, request, health_of(service)).await;
                assert_eq!(status, expected, "{method} {service}: {text}");
            }
        }
    });
}

#[test]
fn descriptors_are_told_in_both_versions_of_reflection() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        let ask =
            |asked| ServerReflectionRequest { message_request: Some(asked), ..Default::default() }.encode_to_vec();
        let list = ask(MessageRequest::ListServices(String::new()));
        let find = ask(MessageRequest::FileContainingSymbol("inference.ModelInferRequest".to_owned()));
        for version in ["v1", "v1alpha"] {
            let request = head_of(&format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"));
            let both = [framed(false, &list), framed(false, &find)].concat().into();
            let (status, text, messages) = call(&mut client, request, both).await;
            assert_eq!((status, messages.len()), (0, 2), "{text}");
            let mut answers = messages
                .into_iter()
                .map(|found| ServerReflectionResponse::decode(found).unwrap().message_response.unwrap());
            assert!(matches!(answers.next(), Some(MessageResponse::ListServicesResponse(_))));
            assert!(matches!(answers.next(), Some(MessageResponse::FileDescriptorResponse(_))));
        }
        let long = ask(MessageRequest::FileByFilename("x".repeat(5000)));
        let request = head_of("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
        let (status, text, _) = call(&mut client, request, framed(false, &long)).await;
        assert!(status == 8 && text.contains("expected at most 4096"), "{status} {text}");
        is_served_here(&mut client).await;
    });
}

#[test]
fn a_model_that_is_not_there_is_not_ready() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        for (name, version, expected) in
            [("double", "", true), ("double", "1", true), ("double", "2", false), ("triple", "", false)]
        {
            let request = ModelReadyRequest { name: name.to_owned(), version: version.to_owned() };
            let body = framed(false, &request.encode_to_vec());
            let (status, text, messages) = call(&mut client, head("ModelReady").body(()).unwrap(), body).await;
            assert_eq!(status, 0, "{text}");
            assert_eq!(ModelReadyResponse::decode(messages[0].clone()).unwrap().ready, expected, "{name} {version}");
        }
    });
}

#[test]
fn raw_and_typed_contents_and_compressed_messages() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        let mut typed = double(&[1, 2, 3, 4]);
        typed.raw_input_contents.clear();
        let contents = InferTensorContents { uint_contents: vec![1, 2, 3, 4], ..InferTensorContents::default() };
        typed.inputs[0].contents = Some(contents);
        let (status, text, messages) = infer(&mut client, &typed).await;
        assert_eq!(status, 0, "{text}");
        let response = ModelInferResponse::decode(messages[0].clone()).unwrap();
        assert_eq!(response.raw_output_contents[0][..], [2, 4, 6, 8]);
        assert_eq!(
            (response.outputs[0].shape.as_slice(), response.outputs[0].datatype.as_str()),
            (&[1, 4][..], "UINT8")
        );

        let packed = gzip(&double(&[1, 2, 3, 4]).encode_to_vec());
        let request = head("ModelInfer").header("grpc-encoding", "gzip").body(()).unwrap();
        let (status, text, _) = call(&mut client, request, framed(true, &packed)).await;
        assert_eq!(status, 0, "{text}");
    });
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn errors_have_their_code_and_the_connection_goes_on() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        let changed = |change: &dyn Fn(&mut ModelInferRequest)| {
            let mut request = double(&[1, 2, 3, 4]);
            change(&mut request);
            (head("ModelInfer").body(()).unwrap(), framed(false, &request.encode_to_vec()))
        };
        let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
        let good = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let timeout = |text: &str| (head("ModelInfer").header("grpc-timeout", text).body(()).unwrap(), good.clone());
        let bomb = framed(true, &gzip(&[0; 1 << 20]));
        let packed = head("ModelInfer").header("grpc-encoding", "gzip").body(()).unwrap();
        let cases = [
            (
                changed(&|r| r.model_name = "triple".into()),
                5,
                "Request for unknown model: 'triple' is not found, expected one of: double",
            ),
            (changed(&|r| r.model_version = "2".into()), 5, "version 2 is not found, expected one of: 1"),
            (changed(&|r| r.inputs[0].shape = vec![1, -4]), 3, "inputs['x'].shape: found [1, -4]"),
            (changed(&|r| r.inputs[0].datatype = "FP32".into()), 3, "found 'FP32', expected 'UINT8'"),
            (changed(&|r| r.raw_input_contents.clear()), 3, "inputs['x'].data: found neither"),
            (
                changed(&|r| r.raw_input_contents.push(Bytes::new())),
                3,
                "raw_input_contents: found 2, expected at most 1",
            ),
            (
                changed(&|r| {
                    r.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(4999)));
                }),
                4,
                "expected at least 5.000 ms",
            ),
            (
                changed(&|r| {
                    r.parameters.insert("priority".into(), parameter(ParameterChoice::StringParam("high".into())));
                }),
                3,
                "parameters.priority: found \"high\"",
            ),
            (timeout("4m"), 4, "found 4.000 ms, expected at least 5.000 ms"),
            (timeout("soon"), 3, "grpc-timeout: found"),
            (timeout("123456789S"), 3, "grpc-timeout: found"),
            ((head("ModelTrain").body(()).unwrap(), good.clone()), 12, "expected a method of"),
            ((head("ModelInfer").body(()).unwrap(), framed(false, &[0xff; 9])), 13, "decode"),
            ((head("ModelInfer").body(()).unwrap(), framed(false, &[0; 5000])), 8, "body_bytes_max"),
            ((packed, bomb), 8, "found more decoded bytes, expected at most 4096 (body_bytes_max)"),
        ];
        for ((request, body), status, expected) in cases {
            let (found, text, _) = call(&mut client, request, body).await;
            assert!(
                found == status && text.contains(expected),
                "found {found} '{text}', expected {status} '{expected}'"
            );
            is_served_here(&mut client).await;
        }
        let fates = [
            (Fate::Drop(DropReason::Deadline), 4),
            (Fate::Drop(DropReason::QueueFull), 14),
            (Fate::Drop(DropReason::NoBackend), 14),
            (Fate::Answer(AnswerStatus::Failed, "out of memory"), 13),
        ];
        for (fate, status) in fates {
            peer.fates.borrow_mut().push_back(fate);
            assert_eq!(infer(&mut client, &double(&[1, 2, 3, 4])).await.0, status, "{fate:?}");
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_stream_answers_each_message_and_survives_errors() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        let (response, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        let mut unknown = double(&[1, 2, 3, 4]);
        (unknown.model_name, unknown.id) = ("triple".to_owned(), "bad".to_owned());
        for message in [double(&[1, 2, 3, 4]), unknown, double(&[5, 6, 7, 8, 1, 1, 1, 1])] {
            stream.send_data(framed(false, &message.encode_to_vec()), false).unwrap();
        }
        stream.send_data(Bytes::new(), true).unwrap();
        let (status, text, messages) = finish(response.await.unwrap()).await;
        assert_eq!((status, messages.len()), (0, 3), "{text}");
        let answers = messages.into_iter().map(|message| ModelStreamInferResponse::decode(message).unwrap());
        let [first, refused, last] = &answers.collect::<Vec<_>>()[..] else { panic!() };
        assert!(refused.error_message.contains("unknown model: 'triple'"), "{refused:?}");
        assert_eq!(refused.infer_response.as_ref().unwrap().id, "bad");
        let outputs =
            [first, last].map(|answer| answer.infer_response.as_ref().unwrap().raw_output_contents[0].to_vec());
        assert_eq!(outputs, [vec![2, 4, 6, 8], vec![10, 12, 14, 16, 2, 2, 2, 2]]);
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn a_stream_answers_in_the_order_of_its_requests() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        peer.fates.borrow_mut().push_back(Fate::Keep);
        let (response, mut stream) = client.send_request(head("ModelStreamInfer").body(()).unwrap(), false).unwrap();
        for id in ["a", "b", "c"] {
            let message = ModelInferRequest { id: id.to_owned(), ..double(&[1, 2, 3, 4]) };
            stream.send_data(framed(false, &message.encode_to_vec()), false).unwrap();
        }
        stream.send_data(Bytes::new(), true).unwrap();
        // The backend has answered the later ones before the first one ends.
        while peer.submitted.get().0 < 3 {
            tokio::task::yield_now().await;
        }
        peer.drop_kept();
        let (status, text, messages) = finish(response.await.unwrap()).await;
        let answers = messages.into_iter().map(|message| ModelStreamInferResponse::decode(message).unwrap());
        let heard: Vec<_> =
            answers.map(|answer| (answer.infer_response.unwrap().id, !answer.error_message.is_empty())).collect();
        let expected = [("a", true), ("b", false), ("c", false)].map(|(id, failed)| (id.to_owned(), failed));
        assert_eq!((status, &heard[..]), (0, &expected[..]), "{text}");
    });
}

#[test]
fn calls_that_are_cancelled_cancel_their_tasks() {
    with_server(limits(), async |address, peer| {
        let mut client = connect(address).await;
        for (method, cancelled) in [("ModelInfer", 1), ("ModelStreamInfer", 2)] {
            peer.fates.borrow_mut().push_back(Fate::Keep);
            let (response, mut stream) = client.send_request(head(method).body(()).unwrap(), false).unwrap();
            let is_unary = method == "ModelInfer";
            stream.send_data(framed(false, &double(&[1, 2, 3, 4]).encode_to_vec()), is_unary).unwrap();
            while peer.kept.borrow().len() < cancelled {
                tokio::task::yield_now().await;
            }
            stream.send_reset(h2::Reason::CANCEL);
            drop(response);
            while peer.cancelled.get() < cancelled {
                tokio::task::yield_now().await;
            }
            assert_eq!(peer.desk.with_core(Core::outstanding), 0);
            is_served_here(&mut client).await;
        }
    });
}

#[test]
fn a_connection_that_ends_cancels_all_its_tasks() {
    with_server(limits(), async |address, peer| {
        peer.fates.borrow_mut().extend([Fate::Keep; 3]);
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut client, connection) = handshake(stream).await.unwrap();
        let moved = tokio::task::spawn_local(connection);
        let mut open = Vec::new();
        for _ in 0..3 {
            let (response, mut stream) = client.send_request(head("ModelInfer").body(()).unwrap(), false).unwrap();
            stream.send_data(framed(false, &double(&[1, 2, 3, 4]).encode_to_vec()), true).unwrap();
            open.push(response);
        }
        while peer.kept.borrow().len() < 3 {
            tokio::task::yield_now().await;
        }
        moved.abort();
        while peer.cancelled.get() < 3 {
            tokio::task::yield_now().await;
        }
        assert_eq!(peer.desk.with_core(Core::outstanding), 0);
    });
}

#[test]
fn refusals_have_their_code_before_and_after_the_message() {
    with_gate(
        super::secure::gate("operations = ['infer'], models = ['dou*'], requests_per_second = 0.5, burst = 4"),
        async |address, _| {
            let mut client = connect(address).await;
            let good = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
            let mut other = double(&[1, 2, 3, 4]);
            other.model_name = "triple".to_owned();
            let other = framed(false, &other.encode_to_vec());
            let bearer = |method: &str, token: &str| {
                head(method).header("authorization", format!("Bearer {token}")).body(()).unwrap()
            };
            let known = super::secure::TOKEN;
            for (request, body, status, expected) in [
                (head("ModelInfer").body(()).unwrap(), &good, 16, "authorization: found no token, expected 'Bearer'"),
                (head("ModelStreamInfer").body(()).unwrap(), &good, 16, "authorization: found no token"),
                (bearer("ModelInfer", "wrong"), &good, 16, "authorization: found an unknown token"),
                (bearer("ModelInfer", known), &good, 0, ""),
                (bearer("ModelInfer", known), &other, 7, "token 'x' does not cover infer of model 'triple'"),
                (bearer("ServerMetadata", known), &good, 7, "token 'x' does not cover health"),
                (bearer("ModelInfer", known), &good, 0, ""),
                (bearer("ModelInfer", known), &good, 8, "exceeds its rate"),
            ] {
                let (found, text, _) = call(&mut client, request, body.clone()).await;
                assert!(
                    found == status && text.contains(expected),
                    "found {found} '{text}', expected {status} '{expected}'"
                );
            }
        },
    );
}

#[test]
fn each_message_of_a_stream_counts_and_is_permitted_by_itself() {
    with_gate(
        super::secure::gate("operations = ['infer'], models = ['double'], requests_per_second = 0.5, burst = 2"),
        async |address, _| {
            let mut client = connect(address).await;
            let request = head("ModelStreamInfer").header("authorization", format!("bearer {}", super::secure::TOKEN));
            let (response, mut stream) = client.send_request(request.body(()).unwrap(), false).unwrap();
            let mut other = double(&[1, 2, 3, 4]);
            other.model_name = "triple".to_owned();
            for message in [double(&[1, 2, 3, 4]), other, double(&[1, 2, 3, 4])] {
                stream.send_data(framed(false, &message.encode_to_vec()), false).unwrap();
            }
            stream.send_data(Bytes::new(), true).unwrap();
            let (status, text, messages) = finish(response.await.unwrap()).await;
            assert_eq!((status, messages.len()), (0, 3), "{text}");
            let answers = messages.into_iter().map(|message| ModelStreamInferResponse::decode(message).unwrap());
            let mut errors: Vec<String> = answers.map(|answer| answer.error_message).collect();
            errors.sort();
            assert!(errors[0].is_empty() && errors[1].contains("exceeds its rate"), "{errors:?}");
            assert!(errors[2].contains("does not cover infer of model 'triple'"), "{errors:?}");
        },
    );
}

#[test]
fn models_are_unloaded_and_loaded() {
    with_server(limits(), async |address, _| {
        let mut client = connect(address).await;
        let unload = |model_name: &str| {
            let request = RepositoryModelUnloadRequest { model_name: model_name.to_owned(), ..Default::default() };
            framed(false, &request.encode_to_vec())
        };
        let head_of = |method| head(method).body(()).unwrap();
        assert_eq!(call(&mut client, head_of("RepositoryModelUnload"), unload("double")).await.0, 0);
        let infer = framed(false, &double(&[1, 2, 3, 4]).encode_to_vec());
        let (status, message, _) = call(&mut client, head_of("ModelInfer"), infer.clone()).await;
        assert!(status == 14 && message.contains("has no available versions"), "{status} {message}");
        let (status, message, _) = call(&mut client, head_of("RepositoryModelUnload"), unload("triple")).await;
        assert_eq!((status, message.as_str()), (13, "failed to unload 'triple', there is no such folder"));
        let load = RepositoryModelLoadRequest { model_name: "double".to_owned(), ..Default::default() };
        let load = framed(false, &load.encode_to_vec());
        assert_eq!(call(&mut client, head_of("RepositoryModelLoad"), load).await.0, 0);
        assert_eq!(call(&mut client, head_of("ModelInfer"), infer).await.0, 0);
    });
}
