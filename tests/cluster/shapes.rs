//! Tensors whose size requests choose, through every process: strings and numbers come back as they went, many sizes at
//! once, and what does not fit leaves the others.

use serde_json::{Value, json};

use super::*;

const CONFIG: &str = r#"
    backend: "emulated"
    max_batch_size: 8
    input [ { name: "s" data_type: TYPE_STRING dims: [ -1 ] }, { name: "n" data_type: TYPE_INT32 dims: [ -1, 2 ] } ]
    output [ { name: "t" data_type: TYPE_STRING dims: [ -1 ] }, { name: "m" data_type: TYPE_INT32 dims: [ -1, 2 ] } ]
    parameters { key: "slo_ms" value: { string_value: "30000" } }
    parameters { key: "alpha_ms" value: { string_value: "1" } }
    parameters { key: "beta_ms" value: { string_value: "3" } }
    parameters { key: "max_bytes" value: { string_value: "2000" } }
"#;

/// A request of so many rows with strings and numbers of its own, and the data of its answer.
fn request(number: usize) -> (Value, [Value; 2]) {
    let (rows, strings, length) = (1 + number % 3, number % 5, number % 17);
    let text: Vec<String> = (0..rows * strings).map(|at| format!("{number}\u{fc}\"{}", "x".repeat(at * 7))).collect();
    let numbers: Vec<usize> = (0..rows * length * 2).map(|at| number * 1000 + at).collect();
    let (text, numbers) = (json!(text), json!(numbers));
    let inputs = json!([
        { "name": "s", "datatype": "BYTES", "shape": [rows, strings], "data": text },
        { "name": "n", "datatype": "INT32", "shape": [rows, length, 2], "data": numbers },
    ]);
    (json!({ "inputs": inputs }), [text, numbers])
}

fn ask(address: SocketAddr, body: &Value) -> (u16, Value) {
    exchange(address, "POST", "/v2/models/echo/infer", &body.to_string())
}

#[test]
fn tensors_of_any_size_come_back_as_they_went() {
    let repository = tempfile::tempdir().unwrap();
    std::fs::create_dir(repository.path().join("echo")).unwrap();
    std::fs::write(repository.path().join("echo/config.pbtxt"), CONFIG).unwrap();
    let up = Up::start(1, "echo", &[1, 2], &format!("{EAGER}repository = '{}'", repository.path().display()));
    let address = up.http[0];
    thread::scope(|scope| {
        for client in 0..8 {
            scope.spawn(move || {
                for number in (0..200).skip(client).step_by(8) {
                    let (body, expected) = request(number);
                    let (status, answer) = ask(address, &body);
                    assert_eq!(status, 200, "{number}: {answer}");
                    for (index, expected) in expected.iter().enumerate() {
                        assert_eq!(answer["outputs"][index]["data"], *expected, "{number}");
                        assert_eq!(answer["outputs"][index]["shape"], body["inputs"][index]["shape"], "{number}");
                    }
                    let mut large = body;
                    large["inputs"][1]["shape"] = json!([1, 300, 2]);
                    let (status, answer) = ask(address, &large);
                    let error = answer["error"].as_str().unwrap();
                    assert!(status == 400 && error.contains("expected [n, -1, 2]"), "{error}");
                }
            });
        }
    });
}
