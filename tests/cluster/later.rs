//! Models that come while a cluster runs, which has never seen any as large.

use std::{fs, os::unix::fs::symlink, path::Path};

use serde_json::{Value, json};

use super::*;

fn post(address: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    try_exchange(address, "POST", &format!("/v2/{path}"), &body.to_string()).unwrap()
}

#[test]
fn an_empty_repository_waits_for_models_of_any_size() {
    let repository = tempfile::tempdir().unwrap();
    let up = Up::start(1, "", &[1], &format!("repository = {:?}\npolicy = 'eager'", repository.path()));
    // Of the second one a batch has inputs of 9.6 MB.
    for (name, input, datatype, shape) in
        [("digits", "image", "FP32", vec![1, 64]), ("resnet50", "image", "UINT8", vec![1, 3, 224, 224])]
    {
        let folder = fs::canonicalize(Path::new("models").join(name)).unwrap();
        symlink(folder, repository.path().join(name)).unwrap();
        // Its backend may have yet to join.
        let load = || post(up.http[0], &format!("repository/models/{name}/load"), &json!({})).0 == 200;
        eventually("a load", load);
        let data = vec![0; shape.iter().product()];
        let input = json!({ "name": input, "datatype": datatype, "shape": shape, "data": data });
        let body = json!({ "inputs": [input], "parameters": { "timeout": 60_000_000 } });
        let (status, text) = post(up.http[0], &format!("models/{name}/infer"), &body);
        assert_eq!(status, 200, "{name}: {text}");
    }
}
