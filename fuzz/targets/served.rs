//! The models that hostile requests are sent to.

use std::{fs, path::PathBuf, sync::LazyLock};

use frontend::InferError;
use gateway::{
    protocol::{InferRequest, Placed, Prepared, Resolved, resolve},
    regions::Regions,
};
use repository::Model;

const NUMBERS: &str = r#"
    backend: "emulated"
    max_batch_size: 4
    input [
        { name: "a" data_type: TYPE_FP32 dims: [ 2 ] },
        { name: "b" data_type: TYPE_UINT8 dims: [ 3, 1 ] }
    ]
    output [ { name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] } ]
    parameters { key: "slo_ms" value: { string_value: "25" } }
    parameters { key: "alpha_ms" value: { string_value: "1" } }
    parameters { key: "beta_ms" value: { string_value: "5" } }
"#;

/// A folder for one model, which lives as long as the process.
pub fn folder() -> PathBuf {
    let folder = tempfile::tempdir().unwrap().keep().join("model");
    fs::create_dir_all(folder.join("1")).unwrap();
    folder
}

/// Takes up to four rows of two FP32 and three UINT8.
#[allow(dead_code)]
pub static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let folder = folder();
    fs::write(folder.join("config.pbtxt"), NUMBERS).unwrap();
    let model = repository::load_model(&folder).unwrap();
    fs::remove_dir_all(folder.parent().unwrap()).unwrap();
    model
});

/// Resolves a request and reads it.
#[allow(dead_code)]
pub fn prepare(request: InferRequest) -> Result<Prepared, InferError> {
    let Resolved { inputs, terms } = resolve(&MODEL, request, None, &Regions::new("/nonexistent"))?;
    let read = inputs.placed.into_iter().map(Placed::read).collect::<Result<_, _>>()?;
    terms.with(&MODEL, 0, read)
}

/// What is accepted has exactly the bytes that the model takes; what is not is told in one line.
#[allow(dead_code)]
pub fn check(outcome: Result<Prepared, InferError>) {
    match outcome {
        Ok(request) => {
            let rows = request.checked.rows;
            assert!((1..=4).contains(&rows));
            let bytes: Vec<_> = request.checked.inputs.iter().map(frontend::rope::Rope::len).collect();
            assert_eq!(bytes, [rows * 8, rows * 3]);
        }
        Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
    }
}
