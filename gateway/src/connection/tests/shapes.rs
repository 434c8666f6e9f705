//! Tensors whose size requests choose, strings among them, over every way that they can take.

use repository::{Tensor, Variable};

use super::{grpc::infer as infer_grpc, *};
use crate::api::{InferTensorContents, ModelInferRequest, ModelInferResponse, model_infer_request::InferInputTensor};
use prost::Message as _;

/// Strings and numbers, which come back.
fn echo() -> repository::Model {
    let variable = |name: &str, datatype, longest: usize, bytes_max| {
        let variable = Variable { dims: vec![0], reshape_dims: vec![], bytes_max, is_optional: false, any_rank: false };
        Tensor { variable: Some(variable), ..tensor(name, datatype, &[longest]) }
    };
    let tensors = |names: [&str; 2]| {
        vec![variable(names[0], DataType::Bytes, 15, 60), variable(names[1], DataType::Int16, 9, 18)]
    };
    model("double", tensors(["s", "n"]), tensors(["t", "m"]))
}

fn with_echo<F: Future<Output = ()>>(test: impl FnOnce(SocketAddr, Rc<Peer>) -> F) {
    with_model(echo(), open_gate(limits()), None, test);
}

fn body(strings: &Value, shape: [usize; 2], numbers: &Value, length: [usize; 2]) -> Value {
    json!({ "inputs": [
        { "name": "s", "shape": shape, "datatype": "BYTES", "data": strings },
        { "name": "n", "shape": length, "datatype": "INT16", "data": numbers },
    ] })
}

async fn post(stream: &mut TcpStream, body: &Value) -> Heard {
    ask(stream, &post_of(INFER, "", body.to_string().as_bytes())).await
}

#[test]
fn strings_and_lengths_come_back_in_json() {
    with_echo(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        for (strings, shape, numbers, length) in [
            (json!(["a", "", "g\u{fc}n \\\"\u{1f600}", "]"]), [2, 2], json!([[1, 2, 3], [4, 5, 6]]), [2, 3]),
            (json!([]), [1, 0], json!([]), [1, 0]),
            (json!(["x".repeat(56)]), [1, 1], json!([1, 2, 3, 4, 5, 6, 7, 8, 9]), [1, 9]),
        ] {
            let heard = post(&mut stream, &body(&strings, shape, &numbers, length)).await;
            let flat: Vec<i64> =
                numbers.to_string().split(|c: char| !c.is_ascii_digit()).flat_map(str::parse).collect();
            let outputs = json!([
                { "name": "t", "datatype": "BYTES", "shape": shape, "data": strings },
                { "name": "m", "datatype": "INT16", "shape": length, "data": flat },
            ]);
            assert_eq!((heard.status, &heard.json()["outputs"]), (200, &outputs), "{heard:?}");
        }
    });
}

#[test]
fn what_does_not_fit_is_refused_with_what_was_found_and_expected() {
    with_echo(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let good = || body(&json!(["a"]), [1, 1], &json!([1]), [1, 1]);
        let cases = [
            (
                body(&json!(["a"]), [1, 1], &json!(vec![0; 10]), [1, 10]),
                "inputs['n'].shape: found [1, 10], expected [n, -1]",
            ),
            (body(&json!(["a"]), [1, 2], &json!([1]), [1, 1]), "inputs['s'].data: found 1 elements, expected 2"),
            (body(&json!(["a", 1]), [1, 2], &json!([1]), [1, 1]), "inputs['s'].data: found 1, expected strings"),
            (
                body(&json!(["x".repeat(57)]), [1, 1], &json!([1]), [1, 1]),
                "inputs['s'].data: found 61 bytes in a row, expected at most 60 (parameters: max_bytes)",
            ),
            (body(&json!(["a", "b"]), [2, 1], &json!([1]), [1, 1]), "inputs['n'].shape[0]: found 1, expected 2"),
            (body(&json!(["a"]), [1, 16], &json!([1]), [1, 1]), "inputs['s'].shape: found [1, 16], expected [n, -1]"),
            (body(&json!(["a"]), [8, usize::MAX], &json!([1]), [1, 1]), "causes total element count to exceed maximum"),
            (body(&json!(["a"]), [1, 1], &json!([1]), [1, usize::MAX]), "byte size overflow for input 'n'"),
        ];
        for (body, expected) in cases {
            let heard = post(&mut stream, &body).await;
            let error = heard.json()["error"].as_str().unwrap().to_owned();
            assert!(heard.status == 400 && error.contains(expected), "`{error}`, `{expected}`");
        }
        let mut missing = good();
        missing["inputs"].as_array_mut().unwrap().pop();
        let heard = post(&mut stream, &missing).await;
        assert!(heard.json()["error"].as_str().unwrap().contains("missing required input(s) ['n']"), "{heard:?}");
        let mut classes = good();
        classes["outputs"] = json!([{ "name": "t", "parameters": { "classification": 1 } }]);
        let heard = post(&mut stream, &classes).await;
        assert!(
            heard.json()["error"].as_str().unwrap().ends_with("expected none: strings have no scores"),
            "{heard:?}"
        );
        assert_eq!(post(&mut stream, &good()).await.status, 200);
    });
}

#[test]
fn binary_strings_say_their_lengths_and_those_that_lie_are_refused() {
    with_echo(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut infer = async |strings: &[u8], count: usize| {
            let size = |bytes| json!({ "binary_data_size": bytes });
            let header = json!({
                "inputs": [
                    { "name": "s", "shape": [1, count], "datatype": "BYTES", "parameters": size(strings.len()) },
                    { "name": "n", "shape": [1, 1], "datatype": "INT16", "parameters": size(2) },
                ],
                "parameters": { "binary_data_output": true },
            });
            let header = header.to_string();
            let length = format!("inference-header-content-length: {}\r\n", header.len());
            let body = [header.as_bytes(), strings, &[7, 0]].concat();
            ask(&mut stream, &post_of(INFER, &length, &body)).await
        };
        // Not UTF-8: JSON could not hold it.
        let strings = [&[1, 0, 0, 0, 0xff][..], &[0, 0, 0, 0]].concat();
        let heard = infer(&strings, 2).await;
        assert_eq!(heard.status, 200, "{heard:?}");
        let header: usize = heard.header("inference-header-content-length").unwrap().parse().unwrap();
        assert_eq!(heard.body[header..], [&strings[..], &[7, 0]].concat());
        for (strings, count, expected) in [
            (&strings[..], 1, "unexpected number of string elements 2 for inference input 's'"),
            (&strings[..], 3, "expected 3 string elements for inference input 's' for model 'double', got 2"),
            (&[9, 0, 0, 0, 1][..], 1, "expecting string of length 9 but only 1 bytes available"),
            (&[9, 0][..], 1, "incomplete string length indicator for inference input 's'"),
            (&[255; 4][..], 1, "expecting string of length 4294967295 but only 0 bytes available"),
        ] {
            let heard = infer(strings, count).await;
            let error = heard.json()["error"].as_str().unwrap().to_owned();
            assert!(heard.status == 400 && error.contains(expected), "`{error}`, `{expected}`");
        }
    });
}

#[test]
fn json_cannot_hold_every_string_and_says_so() {
    with_echo(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let inputs = json!([
            { "name": "s", "shape": [1, 1], "datatype": "BYTES", "parameters": { "binary_data_size": 5 } },
            { "name": "n", "shape": [1, 0], "datatype": "INT16", "data": [] },
        ]);
        let header = json!({ "inputs": inputs }).to_string();
        let length = format!("inference-header-content-length: {}\r\n", header.len());
        let body = [header.as_bytes(), &[1, 0, 0, 0, 0xff]].concat();
        let heard = ask(&mut stream, &post_of(INFER, &length, &body)).await;
        let error = heard.json()["error"].as_str().unwrap().to_owned();
        assert!(heard.status == 400 && error.contains("outputs['t'].data: found an element (0) that is not UTF-8"));
    });
}

#[test]
fn strings_lie_in_shared_memory_as_in_bodies() {
    with_echo(async |address, peer| {
        let folder = tempfile::tempdir().unwrap();
        let strings = b"\x02\0\0\0ab\x01\0\0\0c";
        std::fs::write(folder.path().join("shm"), [&strings[..], &[0; 29]].concat()).unwrap();
        *peer.server.service.regions.borrow_mut() = crate::regions::AllRegions::new(folder.path());
        let mut stream = TcpStream::connect(address).await.unwrap();
        let register = post_of("/v2/systemsharedmemory/region/r/register", "", br#"{"key":"/shm","byte_size":40}"#);
        assert_eq!(ask(&mut stream, &register).await.status, 200);
        let at = |offset: usize, bytes: usize| {
            let size = "shared_memory_byte_size";
            json!({ "shared_memory_region": "r", size: bytes, "shared_memory_offset": offset })
        };
        let infer = |bytes: usize, room: usize| {
            let inputs = json!([
                { "name": "s", "shape": [1, 2], "datatype": "BYTES", "parameters": at(0, bytes) },
                { "name": "n", "shape": [1, 1], "datatype": "INT16", "data": [5] },
            ]);
            json!({ "inputs": inputs, "outputs": [{ "name": "t", "parameters": at(20, room) }] })
        };
        let heard = post(&mut stream, &infer(11, 20)).await;
        assert_eq!(heard.status, 200, "{heard:?}");
        assert_eq!(heard.json()["outputs"][0]["parameters"]["shared_memory_byte_size"], 11);
        assert_eq!(std::fs::read(folder.path().join("shm")).unwrap()[20..31], strings[..]);
        for (bytes, room, expected) in
            [(10, 20, "expecting string of length 1 but only 0"), (11, 10, "at least the output's 11")]
        {
            let heard = post(&mut stream, &infer(bytes, room)).await;
            let error = heard.json()["error"].as_str().unwrap().to_owned();
            assert!(heard.status == 400 && error.contains(expected), "`{error}`, `{expected}`");
        }
    });
}

#[test]
fn grpc_takes_strings_typed_and_raw() {
    with_echo(async |address, _| {
        let mut client = grpc::connect(address).await;
        let input = |name: &str, datatype: &str, shape: &[i64], contents| InferInputTensor {
            name: name.into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
            contents,
            ..InferInputTensor::default()
        };
        let strings = InferTensorContents {
            bytes_contents: vec![bytes::Bytes::from_static(b"ab"), bytes::Bytes::from_static(&[0xff])],
            ..InferTensorContents::default()
        };
        let numbers = InferTensorContents { int_contents: vec![-1, 2, 3], ..InferTensorContents::default() };
        let message = |typed: bool, raw_input_contents: Vec<bytes::Bytes>| ModelInferRequest {
            model_name: "double".into(),
            inputs: vec![
                input("s", "BYTES", &[1, 2], typed.then(|| strings.clone())),
                input("n", "INT16", &[1, 3], typed.then(|| numbers.clone())),
            ],
            raw_input_contents,
            ..ModelInferRequest::default()
        };
        let raw: [&[u8]; 2] = [b"\x02\0\0\0ab\x01\0\0\0\xff", &[0xff, 0xff, 2, 0, 3, 0]];
        let raw = raw.map(bytes::Bytes::from_static).to_vec();
        for message in [message(true, vec![]), message(false, raw.clone())] {
            let (status, text, messages) = infer_grpc(&mut client, &message).await;
            assert_eq!(status, 0, "{text}");
            let response = ModelInferResponse::decode(messages[0].clone()).unwrap();
            assert_eq!(response.raw_output_contents, raw);
            let told: Vec<_> = response.outputs.iter().map(|o| (&o.datatype[..], &o.shape[..])).collect();
            assert_eq!(told, [("BYTES", &[1, 2][..]), ("INT16", &[1, 3])]);
        }
        let lies = message(false, vec![raw[0].slice(..9), raw[1].clone()]);
        let (status, text, _) = infer_grpc(&mut client, &lies).await;
        assert_eq!((status, text.contains("incomplete string length indicator")), (3, true), "{text}");
    });
}

#[test]
fn an_optional_input_may_be_left_out_and_others_are_missed_as_triton_says_it() {
    let optional = |name: &str| {
        let variable =
            Variable { dims: vec![], reshape_dims: vec![], bytes_max: 4, is_optional: true, any_rank: false };
        Tensor { variable: Some(variable), ..tensor(name, DataType::Uint8, &[4]) }
    };
    let both = |is_optional: bool| {
        let first = if is_optional { optional("a") } else { tensor("a", DataType::Uint8, &[4]) };
        model("double", vec![first, optional("b")], vec![optional("y")])
    };
    with_model(both(false), open_gate(limits()), None, async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let heard = post(&mut stream, &json!({ "inputs": [] })).await;
        let expected = "expected number of inputs between 1 and 2 but got 0 inputs for model 'double'. Got input(s) \
                        [], but missing required input(s) ['a']. Please provide all required input(s).";
        assert_eq!((heard.status, heard.json()["error"].as_str()), (400, Some(expected)));
    });
    with_model(both(true), open_gate(limits()), None, async |address, peer| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let input = json!({ "name": "b", "shape": [1, 4], "datatype": "UINT8", "data": [1, 2, 3, 4] });
        for inputs in [json!([]), json!([input])] {
            // The peer gives the record back, whose first tensor is the only one of an answer.
            peer.fates.borrow_mut().push_back(Fate::Answer(AnswerStatus::Failed, "as it should"));
            let heard = post(&mut stream, &json!({ "inputs": inputs })).await;
            assert!(heard.json()["error"].as_str().unwrap().contains("as it should"), "{heard:?}");
        }
        assert_eq!(peer.submitted.get().0, 2, "requests of one row");
    });
}

#[test]
fn metadata_tells_what_requests_choose() {
    with_echo(async |address, _| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let told = ask(&mut stream, &get_of("/v2/models/double")).await.json();
        assert_eq!(told["inputs"][0], json!({ "name": "s", "datatype": "BYTES", "shape": [-1, -1] }));
        assert_eq!(told["outputs"][1], json!({ "name": "m", "datatype": "INT16", "shape": [-1, -1] }));
    });
}

#[test]
fn a_raw_body_tells_its_length_by_its_bytes_or_is_one_string() {
    let of = |datatype, shape: &[usize], dims: Vec<usize>| {
        let variable = Variable { dims, reshape_dims: vec![], bytes_max: 60, is_optional: false, any_rank: false };
        Tensor { variable: Some(variable), ..tensor("x", datatype, shape) }
    };
    let ask_raw = |tensor: Tensor, body: &'static [u8]| {
        let outputs = vec![Tensor { name: "y".into(), ..tensor.clone() }];
        let heard = Rc::new(RefCell::new(None));
        let told = Rc::clone(&heard);
        with_model(model("double", vec![tensor], outputs), open_gate(limits()), None, async move |address, _| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let post = post_of(INFER, "inference-header-content-length: 0\r\n", body);
            *told.borrow_mut() = Some(ask(&mut stream, &post).await);
        });
        Rc::into_inner(heard).unwrap().into_inner().unwrap()
    };
    let answered = |heard: &Heard| {
        let header: usize = heard.header("inference-header-content-length").expect("an answer").parse().unwrap();
        let outputs: Value = serde_json::from_slice(&heard.body[..header]).unwrap();
        (outputs["outputs"][0]["shape"].clone(), heard.body[header..].to_vec())
    };
    let heard = ask_raw(of(DataType::Int16, &[9, 2], vec![0]), &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(answered(&heard), (json!([1, 2, 2]), vec![1, 2, 3, 4, 5, 6, 7, 8]));
    let heard = ask_raw(of(DataType::Bytes, &[1], vec![]), b"427");
    assert_eq!(answered(&heard), (json!([1, 1]), b"\x03\0\0\x00427".to_vec()));
    for (tensor, expected) in [
        (of(DataType::Int16, &[9, 9], vec![0, 1]), "can not be deduced because there are more than one variable-sized"),
        (of(DataType::Bytes, &[9], vec![0]), "For BYTE datatype raw input 'x', the model must have input shape [1]"),
    ] {
        let heard = ask_raw(tensor, b"4277");
        let error = heard.json()["error"].as_str().unwrap().to_owned();
        assert!(heard.status == 400 && error.contains(expected), "`{error}`, `{expected}`");
    }
}
