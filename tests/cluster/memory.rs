//! More models than memory holds, through every process: what is in no GPU's memory is loaded when it is asked for,
//! from disk where host memory holds but a part, and thousands of models are usable.

use std::{fs, path::Path};

use serde_json::json;

use super::*;

const DIGITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/digits");
/// Clockwork's largest experiment has as many (section 6.3).
const MANY: usize = 4_026;
const EMULATED: &str = r#"
    backend: "emulated" max_batch_size: 16
    input [ { name: "x" data_type: TYPE_UINT8 dims: [ 4 ] } ] output [ { name: "y" data_type: TYPE_UINT8 dims: [ 4 ] } ]
    parameters { key: "slo_ms" value: { string_value: "30000" } }
    parameters { key: "alpha_ms" value: { string_value: "1" } }
    parameters { key: "beta_ms" value: { string_value: "5" } }
    parameters { key: "weights_mb" value: { string_value: "102.3" } }
"#;

/// A model that runs digits's file, whose weights are said to take a page.
fn digits(repository: &Path, name: &str) {
    fs::create_dir_all(repository.join(name).join("1")).unwrap();
    fs::copy(format!("{DIGITS}/1/model.onnx"), repository.join(name).join("1/model.onnx")).unwrap();
    let config = r#"
        backend: "onnx" max_batch_size: 8
        input [ { name: "image" data_type: TYPE_FP32 dims: [ 64 ] } ]
        output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 10 ] } ]
        parameters { key: "slo_ms" value: { string_value: "30000" } }
        parameters { key: "weights_mb" value: { string_value: "16" } }
    "#;
    fs::write(repository.join(name).join("config.pbtxt"), config).unwrap();
}

fn count(address: SocketAddr, name: &str) -> f64 {
    let metrics = load::metrics(address).unwrap();
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

#[test]
fn weights_are_read_from_disk_each_time_that_they_are_needed_again() {
    let repository = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c"] {
        digits(repository.path(), name);
    }
    // A page for each of the two memories.
    let backend = "[[backend]]\ngpus = 1\ngpu_memory_mb = 17\nhost_memory_mb = 17";
    let up = Up::start(1, "", &[], &format!("{EAGER}repository = '{}'\n{backend}", repository.path().display()));
    let address = up.http[0];
    let pixels: Vec<u8> = (0..64).map(|at| at % 17).collect();
    let input = json!({ "name": "image", "datatype": "FP32", "shape": [1, 64], "data": pixels });
    let body = json!({ "inputs": [input] }).to_string();
    let ask = |name: &str| exchange(address, "POST", &format!("/v2/models/{name}/infer"), &body);

    let (_, first) = ask("a");
    for name in ["b", "c", "a", "b", "c", "a"] {
        let (status, answer) = ask(name);
        assert_eq!((status, &answer["outputs"]), (200, &first["outputs"]), "{name}: {answer}");
    }
    eventually("the count of six loads from disk", || count(address, "downbeat_weights_disk_loads_total") >= 6.0);

    // What is no longer what it was is refused, and the others go on.
    fs::write(repository.path().join("b/1/model.onnx"), "something else").unwrap();
    let (status, answer) = ask("b");
    assert!(status != 200 && answer["error"].is_string(), "{status}: {answer}");
    for name in ["c", "a", "c"] {
        assert_eq!(ask(name).1["outputs"], first["outputs"], "{name}");
    }
    eventually("the count of a failed load", || count(address, "downbeat_weights_failed_total") >= 1.0);
}

#[test]
fn thousands_of_models_share_two_gpus() {
    let repository = tempfile::tempdir().unwrap();
    for number in 0..MANY {
        let folder = repository.path().join(format!("m{number}"));
        fs::create_dir(&folder).and_then(|()| fs::write(folder.join("config.pbtxt"), EMULATED)).unwrap();
    }
    let backend = "[[backend]]\ngpus = 2\ngpu_memory_mb = 2000";
    let up = Up::start(1, "", &[], &format!("{EAGER}repository = '{}'\n{backend}", repository.path().display()));
    let address = up.http[0];
    let asked = (0..MANY).step_by(100);
    let body = r#"{"inputs":[{"name":"x","datatype":"UINT8","shape":[1,4],"data":[1,2,3,4]}]}"#;
    for number in asked.clone() {
        let (status, answer) = exchange(address, "POST", &format!("/v2/models/m{number}/infer"), body);
        assert!(status == 200 && answer["outputs"][0]["data"] == json!([1, 2, 3, 4]), "{number}: {answer}");
    }
    let (_, index) = exchange(address, "POST", "/v2/repository/index", r#"{"ready":true}"#);
    assert_eq!(index.as_array().unwrap().len(), MANY);
    // What nobody has asked for takes no room in what is scraped.
    let metrics = load::metrics(address).unwrap();
    let named = |number: usize| metrics.contains(&format!("model=\"m{number}\""));
    assert!(asked.clone().all(named) && !asked.clone().any(|number| named(number + 1)));
    eventually("the count of loads", || count(address, "downbeat_weights_loads_total") >= asked.clone().count() as f64);
}
