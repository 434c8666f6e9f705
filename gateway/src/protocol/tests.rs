use bytes::Bytes;
use frontend::{
    excerpt,
    tasks::{Reply, Timing},
};
use proptest::prelude::*;
use proto::{Application, BackendId, Timestamp, stages::AnswerStamps};
use repository::DataType;

use super::*;
use crate::testing::{model, tensor};

fn two_by_two() -> Model {
    let inputs = vec![tensor("a", DataType::Uint8, &[3]), tensor("b", DataType::Fp32, &[1])];
    model("two", inputs, vec![tensor("x", DataType::Uint8, &[2]), tensor("y", DataType::Int64, &[1])])
}

const JSON: &str = r#"{"id":"7","inputs":[
    {"name":"b","shape":[2,1],"datatype":"FP32","data":[1.5,[-2]]},
    {"name":"a","shape":[2,3],"datatype":"UINT8","data":[[1,2,3],[4,5,6]]}]}"#;

fn parse(json: &str, binary: &[u8]) -> Result<Prepared, InferError> {
    let mut body = Rope::from(json.to_owned());
    body.push(Bytes::copy_from_slice(binary));
    parse_body(&body, (!binary.is_empty()).then_some(json.len()))
}

/// Resolves a request and reads it.
fn prepare(
    model: &Model,
    index: usize,
    request: InferRequest,
    within: Option<Span>,
    regions: &Regions,
) -> Result<Prepared, InferError> {
    let Resolved { inputs, terms } = resolve(model, request, within, regions)?;
    let read = inputs.placed.into_iter().map(Placed::read).collect::<Result<_, _>>()?;
    terms.with(model, index, read)
}

fn parse_body(body: &Rope, header_length: Option<usize>) -> Result<Prepared, InferError> {
    let (json, binary) = json::split_body(body.clone(), header_length)?;
    let (model, regions) = (two_by_two(), Regions::new("/nonexistent"));
    prepare(&model, 4, json::parse_request(&json.joined(), binary, Tensors::of(&model))?, None, &regions)
}

fn inputs(request: &Prepared) -> Vec<Vec<u8>> {
    request.checked.inputs.iter().map(|input| input.joined().to_vec()).collect()
}

#[test]
fn json_inputs_come_out_in_the_order_of_the_model() {
    let request = parse(JSON, &[]).unwrap();
    let b = [1.5f32, -2.0].map(f32::to_le_bytes).as_flattened().to_vec();
    assert_eq!(inputs(&request), [vec![1, 2, 3, 4, 5, 6], b]);
    assert_eq!((request.id.as_deref(), request.checked.rows, request.checked.model), (Some("7"), 2, 4));
    assert_eq!(request.checked.slo, Span::from_millis(25), "the model's objective");
    let choice = |index| OutputChoice { index, form: OutputForm::Usual, classes: 0 };
    assert_eq!(request.outputs, [choice(0), choice(1)]);
}

#[test]
fn the_priority_is_the_clients_or_else_the_models() {
    let priority = |parameters: &str| {
        parse(&JSON.replace(r#""id":"7""#, &format!(r#""parameters":{{{parameters}}}"#)), &[]).unwrap().checked.priority
    };
    let found = ["", r#""priority":0"#, r#""priority":1"#, r#""priority":3"#, r#""priority":4"#].map(priority);
    assert_eq!(found, [2, 2, 1, 3, 2], "levels 1 to 3, 2 by default");
}

#[test]
fn the_application_is_known_by_its_name() {
    let application = |parameters: &str| {
        let json = JSON.replace(r#""id":"7""#, &format!(r#""parameters":{{{parameters}}}"#));
        parse(&json, &[]).unwrap().checked.application
    };
    let found = ["", r#""application":"chat""#, r#""application":"translation""#].map(application);
    assert_eq!(found, [Application::NONE, Application::named("chat"), Application::named("translation")]);
    assert_ne!(found[1], found[2]);
}

#[test]
fn binary_inputs_follow_the_json_in_the_order_of_the_request() {
    let json = r#"{"parameters":{"timeout":12000,"binary_data_output":true},"inputs":[
        {"name":"b","shape":[1,1],"datatype":"FP32","parameters":{"binary_data_size":4}},
        {"name":"a","shape":[1,3],"datatype":"UINT8","parameters":{"binary_data_size":3}}],
        "outputs":[{"name":"y"},{"name":"x","parameters":{"binary_data":false}}]}"#;
    let request = parse(json, &[0, 0, 128, 63, 7, 8, 9]).unwrap();
    assert_eq!(inputs(&request), [vec![7, 8, 9], vec![0, 0, 128, 63]]);
    assert_eq!(request.checked.slo, Span::from_millis(12));
    let choices = [
        OutputChoice { index: 1, form: OutputForm::Binary, classes: 0 },
        OutputChoice { index: 0, form: OutputForm::Usual, classes: 0 },
    ];
    assert_eq!(request.outputs, choices);
}

#[test]
fn errors_name_the_field_what_was_found_and_what_was_expected() {
    let wrong = |from: &str, to: &str| {
        assert!(JSON.contains(from), "{from}");
        parse(&JSON.replace(from, to), &[]).unwrap_err().to_string()
    };
    let cases = [
        (wrong(r#""b""#, r#""c""#), "inputs[].name: found 'c', expected one of: a, b"),
        (wrong("FP32", "FP64"), "inputs['b'].datatype: found 'FP64', expected 'FP32'"),
        (wrong("[2,3]", "[2,4]"), "inputs['a'].shape: found [2, 4], expected [n, 3] with n from 1 to 8"),
        (wrong("[2,3]", "[3]"), "inputs['a'].shape: found [3], expected [n, 3] with n from 1 to 8"),
        (wrong("[2,3]", "[]"), "inputs['a'].shape: found [], expected [n, 3] with n from 1 to 8"),
        (wrong("[2,3]", "[9,3]"), "inputs['a'].shape: found [9, 3], expected [n, 3] with n from 1 to 8"),
        (wrong("[2,3]", "[0,3]"), "inputs['a'].shape: found [0, 3], expected [n, 3] with n from 1 to 8"),
        (wrong("[2,3]", "[1,3]"), "inputs['a'].data: found more than the expected 3 elements"),
        (wrong("[2,1]", "[3,1]"), "inputs['b'].data: found 2 elements, expected 3"),
        (wrong("[2,1]", "[-2,1]"), "the request is not a JSON object of this protocol: invalid value"),
        (wrong(",5,6]", ",5,600]"), "inputs['a'].data: found 600, expected values of UINT8"),
        (wrong(r#""data":[1"#, r#""info":[1"#), "inputs['b'].data: found neither, expected either data or"),
        (
            wrong(r#""data":[1"#, r#""parameters":{"binary_data_size":8},"data":[1"#),
            "inputs['b'].data: found both, expected either data or",
        ),
        (
            wrong(r#""data":[1.5,[-2]]"#, r#""parameters":{"binary_data_size":8}"#),
            "inputs['b'].parameters.binary_data_size: found 8, expected at most the 0 bytes that the body has left",
        ),
        (
            wrong(r#""data":[1.5,[-2]]"#, r#""parameters":{"binary_data_size":-8}"#),
            "inputs['b'].parameters.binary_data_size: found -8, expected a number of bytes",
        ),
        (
            wrong(r#""id":"7""#, r#""parameters":{"timeout":5000,"background":true}"#),
            "parameters.background: found true beside a timeout, expected one of the two",
        ),
        (wrong(r#""id":"7""#, r#""parameters":{"background":1}"#), "parameters.background: found 1, expected true or"),
        (wrong(r#""id":"7""#, r#""parameters":{"timeout":-5}"#), "parameters.timeout: found -5, expected microseconds"),
        (wrong(r#""id":"7""#, r#""parameters":{"timeout":"5"}"#), "parameters.timeout: found \"5\", expected a whole"),
        (
            wrong(r#""id":"7""#, r#""parameters":{"timeout":9223372036854775807}"#),
            "parameters.timeout: found 9223372036854775807, expected microseconds, above 0 and at most 600000000",
        ),
        (wrong(r#""id":"7""#, r#""outputs":[{"name":"z"}]"#), "outputs[].name: found 'z', expected one of: x, y"),
        (wrong(r#""id":"7""#, r#""outputs":[{"name":"x"},{"name":"x"}]"#), "output 'x' already exists in request"),
        (
            wrong(r#""id":"7""#, r#""outputs":[{"name":"x","parameters":{"classification":"3"}}]"#),
            "outputs['x'].parameters.classification: found \"3\", expected a number of classes",
        ),
        (
            wrong(r#""id":"7""#, r#""parameters":{"priority":-1}"#),
            "parameters.priority: found -1, expected 0 (the model's default), or 1",
        ),
        (
            wrong(r#""id":"7""#, r#""parameters":{"application":""}"#),
            "parameters.application: found \"\", expected a name of 1 to 64 bytes",
        ),
        (
            wrong(r#""id":"7""#, r#""parameters":{"application":7}"#),
            "parameters.application: found 7, expected a name of 1 to 64 bytes",
        ),
        (
            wrong(r#""data":[1.5,[-2]]"#, r#""parameters":{"shared_memory_region":"r"}"#),
            "inputs['b'].parameters.shared_memory_byte_size: found none, expected a number of bytes",
        ),
        (
            wrong(
                r#""data":[1.5,[-2]]"#,
                r#""parameters":{"shared_memory_region":"r","shared_memory_byte_size":9000000000}"#,
            ),
            "input byte size mismatch for input 'b' for model 'two'. Expected 8, got 9000000000",
        ),
        (
            wrong(r#""data":[1.5,[-2]]"#, r#""parameters":{"shared_memory_region":"r","shared_memory_byte_size":8}"#),
            "Unable to find shared memory region: 'r'; expected a registered one",
        ),
        (
            wrong(r#""id":"7""#, r#""parameters":{"binary_data_output":1}"#),
            "parameters.binary_data_output: found 1, expected true or false",
        ),
        (wrong(r#"{"id""#, r#"["id""#), "the request is not a JSON object of this protocol"),
        (wrong("]}", "]"), "the request is not a JSON object of this protocol"),
    ];
    for (found, expected) in cases {
        assert!(found.starts_with(expected) && !found.contains('\n'), "found `{found}`, expected `{expected}`");
    }
}

#[test]
fn inputs_must_be_there_once_with_the_same_rows() {
    let of = |inputs: &str| parse(&format!("{{\"inputs\":[{inputs}]}}"), &[]).unwrap_err().to_string();
    let a = r#"{"name":"a","shape":[1,3],"datatype":"UINT8","data":[1,2,3]}"#;
    let b = r#"{"name":"b","shape":[2,1],"datatype":"FP32","data":[1,2]}"#;
    let missing = |got: &str, rest: &str| {
        let words = "Please provide all required input(s).";
        format!("expected 2 inputs but got {got}, but missing required input(s) [{rest}]. {words}")
    };
    assert_eq!(of(a), missing("1 inputs for model 'two'. Got input(s) ['a']", "'b'"));
    assert_eq!(of(""), missing("0 inputs for model 'two'. Got input(s) []", "'a','b'"));
    assert_eq!(of(&format!("{a},{a}")), "inputs: found 'a' twice, expected each input once");
    let error = of(&format!("{a},{b},{a}"));
    assert!(error.contains("inputs: found more than the model's 2"), "{error}");
    assert_eq!(of(&format!("{a},{b}")), "inputs['b'].shape[0]: found 2, expected 1, as in the inputs before");
}

#[test]
fn a_client_that_waits_less_has_a_shorter_objective_if_it_has_one() {
    let within_of = |json: String, millis| {
        let body = Rope::from(json);
        let (model, regions) = (two_by_two(), Regions::new("/nonexistent"));
        let (json, binary) = json::split_body(body, None).unwrap();
        let request = json::parse_request(&json.joined(), binary, Tensors::of(&model)).unwrap();
        prepare(&model, 4, request, Some(Span::from_millis(millis)), &regions).unwrap().checked.slo
    };
    let within = |millis| within_of(JSON.to_owned(), millis);
    assert_eq!((within(10), within(100)), (Span::from_millis(10), Span::from_millis(25)));
    let asks =
        |parameters: &str| within_of(JSON.replace(r#""id":"7""#, &format!(r#""parameters":{{{parameters}}}"#)), 10);
    assert_eq!(
        (asks(r#""background":true"#), asks(r#""background":true,"timeout":0"#)),
        (Span::ENDLESS, Span::ENDLESS)
    );
    assert_eq!(asks(r#""background":false,"timeout":5000"#), Span::from_millis(5));
}

#[test]
fn lying_lengths_are_named() {
    let body = Rope::from(JSON.to_owned());
    let error = parse_body(&body, Some(10_000)).unwrap_err().to_string();
    assert!(error.starts_with("Inference-Header-Content-Length: found 10000, expected at most the length"), "{error}");
    assert!(parse_body(&body, Some(20)).is_err());
    let error = parse(JSON, &[1, 2]).unwrap_err().to_string();
    assert_eq!(error, "body: found 2 bytes after the last binary input, expected none");
    let short = r#"{"inputs":[{"name":"a","shape":[1,3],"datatype":"UINT8","parameters":{"binary_data_size":2}},
        {"name":"b","shape":[1,1],"datatype":"FP32","data":[1]}]}"#;
    let error = parse(short, &[1, 2]).unwrap_err().to_string();
    assert_eq!(
        error,
        "input byte size mismatch for input 'a' for model 'two'. Expected 3, got 2 (expected 3 elements of UINT8)"
    );
}

fn reply() -> Reply {
    let timing = Timing {
        admitted_at: Timestamp(0),
        deadline: Timestamp(0),
        stamps: AnswerStamps::default(),
        answered_at: Timestamp(0),
        batch_size: 1,
        backend: BackendId(0),
        gpu: 0,
    };
    let y: Vec<u8> = [-1i64, 300].into_iter().flat_map(i64::to_le_bytes).collect();
    let outputs = vec![vec![1, 2, 3, 4].into(), y.into()];
    Reply { outputs, shapes: vec![], rows: 2, timing, batches: vec![timing], was_late: false }
}

#[test]
fn a_reply_has_the_outputs_that_were_chosen_in_their_order_and_form() {
    let choice = |index, form| OutputChoice { index, form, classes: 0 };
    let (usual, binary) = (OutputForm::Usual, OutputForm::Binary);
    let model = two_by_two();
    let encoded = json::encode_reply(
        &model,
        (Some("a\"b"), &Parameters::new()),
        &[choice(1, usual.clone()), choice(0, usual.clone())],
        &reply(),
    )
    .unwrap();
    let expected = r#"{"id":"a\"b","model_name":"two","model_version":"1","outputs":[
        {"name":"y","datatype":"INT64","shape":[2,1],"data":[-1,300]},
        {"name":"x","datatype":"UINT8","shape":[2,2],"data":[1,2,3,4]}]}"#;
    let value = |json: &[u8]| serde_json::from_slice::<Value>(json).unwrap();
    assert_eq!((value(&encoded.body), encoded.header_length), (value(expected.as_bytes()), None));

    let encoded =
        json::encode_reply(&model, (None, &Parameters::new()), &[choice(1, binary), choice(0, usual)], &reply())
            .unwrap();
    let (header, binary) = encoded.body.split_at(encoded.header_length.unwrap());
    let expected = r#"{"model_name":"two","model_version":"1","outputs":[
        {"name":"y","datatype":"INT64","shape":[2,1],"parameters":{"binary_data_size":16}},
        {"name":"x","datatype":"UINT8","shape":[2,2],"data":[1,2,3,4]}]}"#;
    assert_eq!((value(header), binary), (value(expected.as_bytes()), &reply().outputs[1][..]));
}

proptest! {
    /// A good body with any stretch replaced by any bytes, in any pieces, with any header length.
    #[test]
    fn no_bytes_panic(
        start in 0..JSON.len(),
        length in 0usize..40,
        junk in proptest::collection::vec(any::<u8>(), 0..20),
        header_length in proptest::option::of(0usize..400),
        cut: prop::sample::Index,
    ) {
        let end = (start + length).min(JSON.len());
        let bytes = [&JSON.as_bytes()[..start], &junk, &JSON.as_bytes()[end..]].concat();
        let cut = cut.index(bytes.len() + 1);
        let mut body = Rope::from(bytes[..cut].to_vec());
        body.push(bytes[cut..].to_vec().into());
        if let Err(error) = parse_body(&body, header_length) {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }

    #[test]
    fn no_json_text_panics(text in "[\\[\\]{}\"a-z:,0-9. -]{0,80}") {
        let _ = parse(&text, &[]);
    }
}

#[test]
fn an_output_may_be_shown_as_its_best_classes() {
    let mut model = two_by_two();
    model.labels = vec![vec!["cold".into(), "hot".into()]];
    let choices = |form| [OutputChoice { index: 0, form, classes: 1 }];
    let encoded =
        json::encode_reply(&model, (None, &Parameters::new()), &choices(OutputForm::Usual), &reply()).unwrap();
    let value: Value = serde_json::from_slice(&encoded.body).unwrap();
    let expected = serde_json::json!(["2:1:hot", "4:1:hot"]);
    assert_eq!((&value["outputs"][0]["data"], &value["outputs"][0]["datatype"]), (&expected, &"BYTES".into()));
    let encoded =
        json::encode_reply(&model, (None, &Parameters::new()), &choices(OutputForm::Binary), &reply()).unwrap();
    let binary = &encoded.body[encoded.header_length.unwrap()..];
    assert_eq!(binary, b"\x07\0\0\x002:1:hot\x07\0\0\x004:1:hot");
    let response = messages::encode_reply(&model, (None, &Parameters::new()), &choices(OutputForm::Usual), &reply());
    assert_eq!((&response.outputs[0].datatype[..], &response.outputs[0].shape[..]), ("BYTES", &[2, 1][..]));
    assert_eq!(response.raw_output_contents[0], binary);
}

#[test]
fn pictures_come_one_after_another_each_after_its_length() {
    let input = |shape: &[usize], data: &[u8]| RequestInput {
        name: "image".into(),
        datatype: "BYTES".into(),
        shape: shape.to_vec(),
        parameters: Parameters::new(),
        data: Some(InputData::Bytes(data.to_vec().into())),
    };
    let two = b"\x02\0\0\0ab\0\0\0\0";
    let found = pictures(&input(&[2, 1], two), 8).unwrap();
    assert_eq!(found.iter().map(Rope::joined).collect::<Vec<_>>(), [&b"ab"[..], b""]);
    assert_eq!(pictures(&input(&[2], two), 8).unwrap().len(), 2);
    let wrong: [(&[usize], &[u8]); 6] =
        [(&[1], two), (&[3], two), (&[2], &two[..9]), (&[1], b"\xff\xff\xff\xffab"), (&[9], two), (&[2, 2], two)];
    for (shape, data) in wrong {
        let error = pictures(&input(shape, data), 8).unwrap_err().to_string();
        assert!(error.starts_with("inputs['image']."), "{error}");
    }
}

#[test]
fn what_a_client_writes_stays_short_and_on_one_line() {
    assert_eq!(excerpt("UIN\n8\r\u{1b}[2J é"), "UIN\u{fffd}8\u{fffd}\u{fffd}[2J é");
    let long = "é".repeat(65);
    assert_eq!((excerpt(&long), excerpt(&long[2..])), ("é".repeat(64) + "...", "é".repeat(64)));
}

#[test]
fn what_means_nothing_is_skipped_and_what_is_too_much_is_refused() {
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let objects = format!("[{}{{}}]", "{},".repeat(100_000));
    let with = |extra: &str| parse(&JSON.replace(r#""id":"7""#, extra), &[]);
    for nothing in [
        format!(r#""parameters":{{"mine":{objects},"m\u0069ne":{deep}}}"#),
        format!(r#""mine":{deep},"id":null"#),
        format!(r#""parameters":{{{}"timeout":25000}}"#, r#""mine":{},"#.repeat(100_000)),
    ] {
        assert_eq!(with(&nothing).unwrap().checked.slo, Span::from_millis(25));
    }
    let long = "x".repeat(600);
    let cases = [
        (format!(r#""id":"{long}""#), "id: found 600 bytes, expected at most 256"),
        (format!(r#""parameters":{{"timeout":{objects}}}"#), "parameters.timeout: found"),
        (format!(r#""parameters":{{"timeout":"{long}"}}"#), "found 602 bytes, expected at most 512"),
        (r#""id":"7","id":"8""#.to_owned(), "twice, expected it once"),
        (
            format!(r#""outputs":[{}{{"name":"x"}}]"#, r#"{"name":"x"},"#.repeat(9)),
            "outputs: found more than the model's 2",
        ),
    ];
    for (extra, expected) in cases {
        let error = with(&extra).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "found `{error}`, expected `{expected}`");
    }
    let dims = JSON.replace("[2,3]", &format!("[{}1]", "1,".repeat(100)));
    assert!(parse(&dims, &[]).unwrap_err().to_string().contains("shape: found more than the most dimensions, 64"));
    assert_eq!(with(&format!(r#""id":"{}""#, &long[..256])).unwrap().id.unwrap().len(), 256);
}

#[test]
fn parts_of_a_body_in_a_million_pieces_are_found_without_going_through_them() {
    let inputs = |count: usize| {
        let input = r#"{"name":"a","shape":[1,3],"datatype":"UINT8","parameters":{"binary_data_size":0}}"#;
        Bytes::from(format!(r#"{{"inputs":[{}]}}"#, vec![input; count].join(",")))
    };
    let mut binary = Rope::default();
    (0..1_000_000).for_each(|_| binary.push(Bytes::from_static(b"x")));
    // A thousand times a million steps would take minutes.
    let tensors = Tensors { inputs: 1000, outputs: 1 };
    let error = json::parse_request(&inputs(1000), binary, tensors).unwrap_err().to_string();
    assert_eq!(error, "body: found 1000000 bytes after the last binary input, expected none");
}

#[test]
fn an_input_that_is_named_twice_is_not_read_twice() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("shm"), [7; 8]).unwrap();
    let mut regions = Regions::new(folder.path());
    regions.register("r", "shm", 0, 8).unwrap();
    let input = |name: &str| RequestInput {
        name: name.to_owned(),
        datatype: "UINT8".to_owned(),
        shape: vec![1, 3],
        parameters: [("shared_memory_region".into(), json!("r")), ("shared_memory_byte_size".into(), json!(3))]
            .into_iter()
            .collect(),
        data: None,
    };
    let prepared = |inputs| {
        let request = InferRequest { id: None, parameters: Parameters::new(), inputs, outputs: Vec::new() };
        prepare(&two_by_two(), 0, request, None, &regions).unwrap_err().to_string()
    };
    assert_eq!(prepared(vec![input("a"), input("a")]), "inputs: found 'a' twice, expected each input once");
    let mut long = input("a");
    long.parameters["shared_memory_region"] = json!("r".repeat(300));
    assert!(prepared(vec![long]).contains("shared_memory_region: found \"rrr"));
}

/// What is wrong costs nothing: no element is read of a request that another part of makes useless.
#[test]
fn all_is_checked_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shm");
    std::fs::write(&file, [7; 14]).unwrap();
    let mut regions = Regions::new(folder.path());
    regions.register("r", "shm", 0, 14).unwrap();
    let input = |name: &str, datatype: &str, shape: &[usize], (at, bytes): (usize, usize)| RequestInput {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.to_vec(),
        parameters: [
            ("shared_memory_region".into(), json!("r")),
            ("shared_memory_byte_size".into(), json!(bytes)),
            ("shared_memory_offset".into(), json!(at)),
        ]
        .into_iter()
        .collect(),
        data: None,
    };
    let model = two_by_two();
    let resolve = |inputs, parameters| {
        resolve(&model, InferRequest { id: None, parameters, inputs, outputs: Vec::new() }, None, &regions)
    };
    let (a, b) = (|| input("a", "UINT8", &[2, 3], (0, 6)), || input("b", "FP32", &[2, 1], (6, 8)));
    let Resolved { inputs, terms } = resolve(vec![a(), b()], Parameters::new()).unwrap();
    let told = |of: fn(&Placed) -> usize| inputs.placed.iter().map(of).collect::<Vec<_>>();
    assert_eq!([told(Placed::unread_bytes), told(Placed::read_bytes_max)], [[6, 8], [6, 8]]);
    std::fs::write(&file, [8; 14]).unwrap();
    let read = inputs.placed.into_iter().map(|placed| placed.read().unwrap()).collect();
    let prepared = terms.with(&model, 0, read).unwrap();
    let found: Vec<_> = prepared.checked.inputs.iter().map(|input| input.joined().to_vec()).collect();
    assert_eq!((found, prepared.parts.len()), (vec![vec![8; 6], vec![8; 8]], 2), "read once, when it was resolved");

    let numbers = |datatype: &str| RequestInput {
        data: Some(InputData::Json(Bytes::from_static(b"[\"no number\"]"))),
        parameters: Parameters::new(),
        ..input("b", datatype, &[2, 1], (0, 0))
    };
    let wrong = |inputs, parameters: Parameters| resolve(inputs, parameters).unwrap_err().to_string();
    let short = input("a", "UINT8", &[2, 3], (0, 5));
    assert!(wrong(vec![numbers("FP32"), short], Parameters::new()).contains("Expected 6, got 5"));
    let asks = [("timeout".to_owned(), json!("soon"))].into_iter().collect();
    assert!(wrong(vec![numbers("FP32"), a()], asks).contains("parameters.timeout: found \"soon\""));
    assert!(wrong(vec![numbers("FP64")], Parameters::new()).contains("expected 'FP32'"));
    assert!(wrong(vec![numbers("FP32")], Parameters::new()).contains("missing required input(s) ['a']"));
    let Resolved { inputs, .. } = resolve(vec![numbers("FP32"), a()], Parameters::new()).unwrap();
    let error = inputs.placed.into_iter().next().unwrap().read().unwrap_err().to_string();
    assert!(error.starts_with("inputs['b'].data: found"), "{error}");
}
