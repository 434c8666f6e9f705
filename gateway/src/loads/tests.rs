use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::budget::Budget;

fn read(json: &serde_json::Value) -> Result<Parameters, InferError> {
    Parameters::read(json.to_string().as_bytes())
}

fn asked(json: &serde_json::Value) -> Result<Asked, String> {
    let parameters = read(&json!({ "parameters": json })).unwrap();
    parameters.asked(ModelChange::Load, "m").map_err(|error| error.to_string())
}

fn file(path: &str, text: &str) -> (String, Bytes) {
    (path.to_owned(), Bytes::copy_from_slice(text.as_bytes()))
}

#[tokio::test]
async fn json_and_grpc_say_the_same() {
    let of_json = asked(&json!({ "config": "{}", "file:1/model.onnx": "b25l", "file:1/labels.txt": "" }));
    let grpc = [
        ("config", ParameterChoice::StringParam("{}".into())),
        ("file:1/labels.txt", ParameterChoice::BytesParam(Bytes::new())),
        ("file:1/model.onnx", ParameterChoice::BytesParam(Bytes::from_static(b"one"))),
    ];
    let grpc: BTreeMap<_, _> = grpc
        .map(|(name, choice)| (name.to_owned(), ModelRepositoryParameter { parameter_choice: Some(choice) }))
        .into();
    let mut of_json = of_json.unwrap();
    of_json.files.sort();
    assert_eq!(
        of_json,
        Asked {
            with_dependents: false,
            config: Some("{}".into()),
            weights: None,
            files: vec![file("1/labels.txt", ""), file("1/model.onnx", "one")]
        }
    );
    let of_grpc = Parameters::from(grpc).asked(ModelChange::Load, "m").unwrap();
    assert_eq!(of_grpc, of_json);
    // Both are the same files to everybody else.
    let folder = tempfile::tempdir().unwrap();
    let intake = Intake::new(Store::open(folder.path()).unwrap(), 100);
    let mut budget = Budget::new(100);
    let charge = budget.account("a client").charge();
    charge.grow(50).unwrap();
    let (first, _held) = of_grpc.brought("m", Some(&intake), Some(charge)).await.unwrap();
    assert_eq!(budget.held(), 0, "nothing is in memory while backends load them");
    let (second, held) = of_json.brought("m", Some(&intake), None).await.unwrap();
    let files = held.as_ref().map(Held::digest);
    assert!(files.is_some() && second == Some(Brought { config: "{}".into(), files }) && first == second);
}

#[tokio::test]
async fn files_that_cannot_be_used_are_refused_as_triton_says_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let intake = Intake::new(store, 4);
    let bring = async |json: serde_json::Value, intake: Option<&Intake>| {
        asked(&json)
            .unwrap()
            .brought("m", intake, None)
            .await
            .map(|(brought, _)| brought)
            .map_err(|error| error.to_string())
    };
    let with = |file: &str, text: &str| json!({ "config": "{}", file: text });
    let failed = "failed to load 'm', failed to poll from model repository: ";
    for (json, intake, expected) in [
        (with("file:1/a", "eA=="), None, "parameters: found file:1/a, expected no files: this frontend takes none"),
        (json!({ "file:1/a": "eA==" }), Some(&intake), "parameters: found file:1/a and no config, expected"),
        (with("file:../a", "eA=="), Some(&intake), "parameters: found \"file:../a\", expected file:<version>/<file>"),
        (with("file:1/a", "MTIzNDU="), Some(&intake), "files of 5 bytes: found 0 bytes of files that are served"),
    ] {
        let error = bring(json, intake).await.unwrap_err();
        assert!(error.starts_with(&format!("{failed}{expected}")) && error.lines().count() == 1, "{error}");
    }
    assert_eq!(bring(json!({}), None).await, Ok(None));
    let only_config = Some(Brought { config: "{}".into(), files: None });
    assert_eq!(bring(json!({ "config": "{}" }), None).await, Ok(only_config), "as without files");
    for (json, expected) in [
        (json!({ "file:1/a": "no base64" }), "parameters: found file:1/a, expected it with what is in the file"),
        (json!({ "file:1/a": 7 }), "parameters: found file:1/a, expected it with what is in the file"),
    ] {
        assert!(asked(&json).unwrap_err().starts_with(&format!("{failed}{expected}")));
    }
    for json in [json!(7), json!(null), json!(true), json!(-1.5), json!([[], {}]), json!({ "a": { "b": [1] } })] {
        let error = asked(&json!({ "config": json })).unwrap_err();
        assert_eq!(error, "config: found something else, expected a text: a model's configuration in JSON");
        let error = asked(&json!({ "other": json })).unwrap_err();
        assert_eq!(error, "parameters: found other, expected config, weights, or file:<version>/<file>");
    }
    let unload = |json| read(&json).unwrap().asked(ModelChange::Unload, "m").map_err(|error| error.to_string());
    assert!(unload(json!({ "parameters": { "unload_dependents": true } })).is_ok());
    let error = unload(json!({ "parameters": { "file:1/a": "eA==" } })).unwrap_err();
    assert_eq!(error, "parameters: found file:1/a, expected unload_dependents");
}

#[test]
fn other_weights_are_a_configuration_and_come_alone() {
    let told = |json: &serde_json::Value| {
        asked(json)?.with_weights(|weights| Ok(format!("with {weights}"))).map_err(|error| error.to_string())
    };
    assert_eq!(told(&json!({ "weights": "1,0" })).unwrap().config, Some("with 1,0".to_owned()));
    assert_eq!(told(&json!({})).unwrap().config, None, "what the repository says");
    assert!(told(&json!({ "weights": [1, 0] })).unwrap_err().starts_with("weights: found something else, expected a"));
    for besides in ["config", "file:1/a"] {
        let error = told(&json!({ "weights": "1,0", besides: "eA==" })).unwrap_err();
        assert_eq!(error, "weights: found it beside config or files, expected it alone");
    }
    let refused = asked(&json!({ "weights": "1" })).unwrap().with_weights(|_| Err(InferError::NotFound("m".into())));
    assert_eq!(refused, Err(InferError::NotFound("m".into())));
}

#[test]
fn bodies_are_objects_with_few_parameters() {
    assert_eq!(Parameters::read(b""), Ok(Parameters::default()));
    assert_eq!(read(&json!({ "other": [[{}], 1, null], "parameters": {} })), Ok(Parameters::default()));
    for body in ["[]", "7", "{", "{} x", r#"{ "parameters": [] }"#, r#"{ "parameters": 7 }"#, "\u{1}"] {
        let error = Parameters::read(body.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("body: ") && error.ends_with("expected a JSON object"), "{body}: {error}");
    }
    let many = |count: usize| {
        let parameters: serde_json::Map<_, _> = (0..count).map(|number| (number.to_string(), json!(null))).collect();
        read(&json!({ "parameters": parameters }))
    };
    assert!(many(PARAMETERS_MAX).is_ok());
    let error = many(PARAMETERS_MAX + 1).unwrap_err().to_string();
    assert!(error.starts_with(&format!("body: found more than {PARAMETERS_MAX} parameters")), "{error}");
}

proptest! {
    #[test]
    fn what_is_encoded_is_what_is_kept(bytes in proptest::collection::vec(any::<u8>(), 0..200), text in "\\PC{0,40}") {
        let encoded = BASE64_STANDARD.encode(&bytes);
        let Asked { files, config, .. } = asked(&json!({ "file:1/a": encoded, "config": text })).unwrap();
        prop_assert_eq!((files, config), (vec![("1/a".to_owned(), bytes.into())], Some(text)));
    }

    #[test]
    fn no_body_panics(body in "[\\[\\]{}:,\"a-z0-9. ]{0,60}") {
        if let Err(error) = Parameters::read(body.as_bytes()) {
            prop_assert_eq!(error.to_string().lines().count(), 1);
        }
    }
}
