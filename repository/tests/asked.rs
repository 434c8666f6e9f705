//! Configurations that the programs of their models complete. How programs are asked is said once for a process, so
//! this is one.

use std::{fs, path::Path};

use repository::{DataType, Question, Tensor};
use serde_json::{Value, json};

const TENSOR: &str = "{ name: \"x\" data_type: TYPE_FP32 dims: 4 }";

fn write(repository: &Path, name: &str, config: Option<&str>) {
    fs::create_dir_all(repository.join(name).join("1")).unwrap();
    fs::write(repository.join(name).join("1/model.py"), "").unwrap();
    if let Some(config) = config {
        fs::write(repository.join(name).join("config.pbtxt"), config).unwrap();
    }
}

/// What the model of that name says.
fn answer(question: &Question<'_>) -> Result<Value, String> {
    let told = serde_json::to_value(question.configuration).unwrap();
    assert_eq!((&told["name"], &told["backend"]), (&json!(question.name), &json!("python")));
    assert!(question.version == "1" && question.program.file().ends_with("1/model.py"));
    let x = json!({ "name": "x", "data_type": "TYPE_FP32", "dims": [4] });
    let text = json!({ "name": "text", "data_type": "TYPE_STRING", "dims": [-1] });
    match question.name {
        "bare" => {
            assert_eq!((&told["input"], &told["max_batch_size"]), (&json!([]), &json!(0)));
            Ok(json!({ "max_batch_size": 7, "input": [x], "output": [text], "name": "other", "backend": "onnx" }))
        }
        "half" => {
            assert_eq!(told["input"][0]["dims"], json!([]));
            Ok(json!({ "input": [x], "dynamic_batching": { "priority_levels": 3, "default_priority_level": 2 } }))
        }
        "silent" => Ok(json!({})),
        "odd" => Ok(json!([1])),
        "unknown" => Ok(json!({ "inputs": [x] })),
        "sequences" => Ok(json!({ "input": [{ "name": "x", "data_type": "TYPE_FP32", "dims": [0] }], "output": [x] })),
        "decoupled" => Ok(json!({ "model_transaction_policy": { "decoupled": true } })),
        other => Err(format!("{other} has no luck")),
    }
}

#[test]
fn what_a_configuration_lacks_its_program_is_asked_for() {
    let repository = tempfile::tempdir().unwrap();
    let load = || repository::load(repository.path()).unwrap();
    write(repository.path(), "bare", None);
    let refused = &load().refused[0].reason;
    assert!(refused.ends_with("and the model cannot say it: nothing here can start its program"), "{refused}");

    repository::ask_programs_with(answer);
    let whole = format!("input {TENSOR} output {TENSOR}");
    write(repository.path(), "whole", Some(&whole));
    let half = format!("max_batch_size: 2 input {{ name: \"x\" data_type: TYPE_FP32 }} output {TENSOR}");
    write(repository.path(), "half", Some(&half));
    for name in ["decoupled", "odd", "sequences", "silent", "unknown", "unlucky"] {
        write(repository.path(), name, None);
    }
    let found = load();
    let [bare, half, whole] = &found.models[..] else { panic!("{:?}", found.refused) };
    let x = [Tensor::new("x", DataType::Fp32, vec![4])];
    assert_eq!((&bare.name[..], bare.executor_name(), bare.rows_max, &bare.inputs[..]), ("bare", "process", 7, &x[..]));
    assert_eq!((bare.outputs[0].datatype, bare.outputs[0].dims().collect()), (DataType::Bytes, vec![-1]));
    let told = serde_json::to_value(&bare.configuration).unwrap();
    assert_eq!((&told["backend"], &told["max_batch_size"]), (&json!("python"), &json!(7)), "clients see the whole");
    assert_eq!((half.rows_max, &half.inputs[..], half.priorities.levels), (2, &x[..], 3));
    assert_eq!((whole.rows_max, &whole.inputs[..]), (1, &x[..]), "it lacks nothing, so nobody is asked");

    let cannot = "unlucky/1: its configuration has no input or output, or one without data_type or dims, and the model \
                  cannot say it: ";
    let expected = [
        ("decoupled", "model_transaction_policy.decoupled: found it, expected none"),
        ("odd", "expected a ModelConfig in JSON"),
        ("sequences", "input[0].dims: found 0, expected lengths above 0"),
        ("silent", "silent/1: input: found none, expected at least one tensor"),
        ("unknown", "inputs"),
        ("unlucky", &format!("{cannot}unlucky has no luck")),
    ];
    assert_eq!(found.refused.len(), expected.len());
    for (refused, (name, expected)) in found.refused.iter().zip(expected) {
        let reason = &refused.reason;
        assert!(refused.name == name && reason.contains(expected), "{name}: `{reason}`, `{expected}`");
        assert_eq!(reason.lines().count(), 1, "{reason}");
    }
}
