//! Files that a client's load brings along, through every process: all serve them, also who is started later, and they
//! go when nobody does.

use std::fs;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use super::*;

fn post(address: SocketAddr, path: &str, body: &Value) -> Option<(u16, Value)> {
    try_exchange(address, "POST", &format!("/v2/{path}"), &body.to_string())
}

/// Whether this version of `digits` is served at an address.
fn serves(address: SocketAddr, version: u32) -> bool {
    let input = json!({ "name": "image", "datatype": "FP32", "shape": [1, 64], "data": vec![0; 64] });
    let body = json!({ "inputs": [input], "parameters": { "timeout": 60_000_000 } });
    let answer = post(address, &format!("models/digits/versions/{version}/infer"), &body);
    answer.is_some_and(|(status, _)| status == 200)
}

/// Its graph takes a terabyte; an allocation that fails ends the process that it is in.
#[test]
fn a_file_that_ends_whoever_runs_it_is_refused_and_nobody_else_notices() {
    let up = Up::start(1, "digits", &[1], "load_files = true\npolicy = 'eager'");
    let backend = up.members["backend-0"];
    let file = BASE64_STANDARD.encode(fs::read("tests/cluster/takes_all_memory.onnx").unwrap());
    let config = json!({ "parameters": { "executor": { "string_value": "onnx" } } }).to_string();
    let load = json!({ "parameters": { "config": config, "file:9/model.onnx": file } });
    let (status, answer) = post(up.http[0], "repository/models/digits/load", &load).unwrap();
    let error = answer["error"].as_str().unwrap();
    assert!(
        status >= 400 && error.contains("version 9") && error.contains("was ended by signal 6 (SIGABRT)"),
        "{error}"
    );
    assert!(serves(up.http[0], 1), "what was served before still is");
    assert!(test_kill_process(backend).is_ok(), "by the same process");
}

#[test]
fn files_of_a_load_are_served_by_all_and_by_whoever_is_started_later() {
    let up = Up::start(2, "digits", &[1, 1], "load_files = true\npolicy = 'eager'");
    let [first, second] = up.http[..] else { panic!("two frontends") };
    let folder = up.schedulers[0].1.parent().unwrap().join("loaded");
    let kept = || fs::read_dir(&folder).unwrap().count() - 1;
    let model = BASE64_STANDARD.encode(fs::read("models/digits/1/model.onnx").unwrap());
    let load = json!({ "parameters": { "config": "{}", "file:7/model.onnx": model } });
    let (status, text) = post(first, "repository/models/digits/load", &load).unwrap();
    assert_eq!((status, kept()), (200, 1), "{text}");
    let is_ready = |version: u32| {
        let path = format!("/v2/models/digits/versions/{version}/ready");
        exchange(first, "GET", &path, "").0 == 200
    };
    assert!(is_ready(7) && !is_ready(1), "who is answered finds the other version in its place, as in Triton");
    eventually("an answer of both frontends", || serves(first, 7) && serves(second, 7));
    // For a moment, for those that frontends had sent there before they knew.
    eventually("the end of the repository's version", || !serves(first, 1));
    // Nobody is left who has loaded it but frontends.
    for backend in ["backend-0", "backend-1"] {
        kill_process(up.members[backend], Signal::KILL).unwrap();
    }
    eventually("an answer of new backends", || serves(first, 7) && serves(second, 7));
    kill_process(up.members["frontend-0"], Signal::KILL).unwrap();
    eventually("an answer of the new frontend", || serves(first, 7));
    assert_eq!(kept(), 1);
    let (status, text) = post(second, "repository/models/digits/unload", &json!({})).unwrap();
    assert_eq!(status, 200, "{text}");
    eventually("the end of the files", || kept() == 0);
    let (status, text) = post(second, "repository/models/digits/load", &json!({})).unwrap();
    assert_eq!(status, 200, "{text}");
    eventually("an answer of the repository's", || serves(first, 1) && serves(second, 1));
}
