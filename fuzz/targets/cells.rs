//! Tensors whose size requests choose: requests of strings and lengths that lie become records or a reason, and
//! whatever bytes a peer has put where a record should be are read or refused.
#![no_main]

mod served;

use std::{fs, sync::LazyLock};

use arbitrary::Arbitrary;
use frontend::{InputTensor, rope::Rope};
use gateway::protocol::elements;
use libfuzzer_sys::fuzz_target;
use proto::Span;
use repository::{DataType, Model, cell};

const CONFIG: &str = r#"
    backend: "emulated"
    max_batch_size: 4
    input [
        { name: "text" data_type: TYPE_STRING dims: [ -1, 2 ] },
        { name: "ids" data_type: TYPE_INT16 dims: [ -1 ] },
        { name: "fixed" data_type: TYPE_UINT8 dims: [ 3 ] },
        { name: "mask" data_type: TYPE_BOOL dims: [ -1 ] optional: true }
    ]
    output [ { name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] } ]
    parameters { key: "max_dims" value: { string_value: "9" } }
    parameters { key: "max_bytes" value: { string_value: "300" } }
    parameters { key: "alpha_ms" value: { string_value: "1" } }
    parameters { key: "beta_ms" value: { string_value: "5" } }
"#;

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let folder = served::folder();
    fs::write(folder.join("config.pbtxt"), CONFIG).unwrap();
    let model = repository::load_model(&folder).unwrap();
    fs::remove_dir_all(folder.parent().unwrap()).unwrap();
    model
});

#[derive(Debug, Arbitrary)]
struct Forged {
    inputs: Vec<Input>,
    /// Where a record should be.
    record: Vec<u8>,
    /// Where elements in JSON should be.
    json: String,
}

#[derive(Debug, Arbitrary)]
struct Input {
    tensor: u8,
    shape: Vec<u8>,
    /// In these pieces.
    data: Vec<Vec<u8>>,
}

fuzz_target!(|forged: Forged| {
    let model = &*MODEL;
    let inputs = forged.inputs.into_iter().map(|Input { tensor, shape, data }| {
        let tensor = &model.inputs[usize::from(tensor) % model.inputs.len()];
        let mut rope = Rope::default();
        data.into_iter().for_each(|piece| rope.push(piece.into()));
        let shape = shape.into_iter().map(usize::from).collect();
        InputTensor { name: tensor.name.clone(), datatype: tensor.datatype, shape, data: rope }
    });
    match frontend::request::check(model, 0, inputs.collect(), Span::from_millis(20)) {
        Ok(checked) => {
            assert_eq!(checked.inputs.len(), checked.rows);
            for record in &checked.inputs {
                assert!(record.len() == checked.inputs[0].len() && record.len() <= model.input_bytes());
                cell::read(&model.inputs, &record.joined()).expect("what was checked can be read");
            }
        }
        Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
    }

    if let Some((record, rest)) = cell::split_first(&model.inputs, &forged.record) {
        assert_eq!(record.len() + rest.len(), forged.record.len());
        if let Ok(cells) = cell::read(&model.inputs, record) {
            let mut again = vec![0; model.input_bytes()];
            let bytes = cell::write(&model.inputs, &cells, &mut again).expect("what was read can be written");
            assert_eq!(cell::read(&model.inputs, &again[..bytes]).as_ref(), Ok(&cells));
        }
    }

    if serde_json::from_str::<serde_json::Value>(&forged.json).is_ok()
        && let Ok(bytes) = elements::read_json(DataType::Bytes, 2, forged.json.as_bytes())
    {
        assert!(bytes.len() <= elements::read_bytes_max(DataType::Bytes, 2, forged.json.len()));
        let mut json = "[".to_owned();
        elements::write_json(DataType::Bytes, &bytes, &mut json).expect("it came from text");
        assert_eq!(serde_json::from_str::<Vec<String>>(&(json + "]")).map_or(0, |strings| strings.len()), 2);
    }
});
