//! Infer requests of the binary extension whose parts do not agree: sizes, shapes and header lengths that lie.
#![no_main]

mod served;

use arbitrary::Arbitrary;
use frontend::rope::Rope;
use gateway::protocol::{Tensors, json};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

#[derive(Debug, Arbitrary)]
struct Forged {
    inputs: Vec<Input>,
    outputs: Vec<u8>,
    timeout: Option<i64>,
    priority: Option<u8>,
    binary: Vec<u8>,
    /// How far the header length is off.
    off: i8,
}

#[derive(Debug, Arbitrary)]
struct Input {
    second: bool,
    datatype: u8,
    rows: u8,
    tail: Option<Vec<u64>>,
    size: Option<Size>,
    data: Option<Vec<i16>>,
    region: Option<u64>,
}

#[derive(Debug, Arbitrary)]
enum Size {
    /// As the model wants it for so many rows.
    Right(u8),
    Number(i64),
    Text(String),
}

impl Input {
    fn json(&self) -> Value {
        let (name, tail, row_bytes) = if self.second { ("b", vec![3, 1], 3) } else { ("a", vec![2], 8) };
        let datatype =
            [if self.second { "UINT8" } else { "FP32" }, "BYTES", "FP16", ""][usize::from(self.datatype % 7).min(3)];
        let shape: Vec<u64> = std::iter::once(self.rows.into()).chain(self.tail.clone().unwrap_or(tail)).collect();
        let mut parameters = Map::new();
        let size = self.size.as_ref().map(|size| match size {
            Size::Right(rows) => (u64::from(*rows) * row_bytes).into(),
            Size::Number(number) => (*number).into(),
            Size::Text(text) => text.clone().into(),
        });
        parameters.extend(size.map(|size| ("binary_data_size".to_owned(), size)));
        if let Some(bytes) = self.region {
            parameters.insert("shared_memory_region".to_owned(), "r".into());
            parameters.insert("shared_memory_byte_size".to_owned(), bytes.into());
        }
        let mut input = json!({ "name": name, "shape": shape, "datatype": datatype, "parameters": parameters });
        if let Some(data) = &self.data {
            input["data"] = json!(data);
        }
        input
    }
}

fuzz_target!(|forged: Forged| {
    let outputs: Vec<_> = forged
        .outputs
        .iter()
        .map(|choice| {
            let name = if choice & 1 == 0 { "digest" } else { "other" };
            json!({ "name": name, "parameters": { "binary_data": choice & 2 == 0, "classification": choice >> 2 } })
        })
        .collect();
    let mut parameters = Map::new();
    parameters.extend(forged.timeout.map(|timeout| ("timeout".to_owned(), timeout.into())));
    parameters.extend(forged.priority.map(|priority| ("priority".to_owned(), priority.into())));
    let inputs: Vec<_> = forged.inputs.iter().map(Input::json).collect();
    let header = json!({ "inputs": inputs, "outputs": outputs, "parameters": parameters }).to_string();
    let header_length = header.len().saturating_add_signed(forged.off.into());
    let mut body = Rope::from(header);
    body.push(forged.binary.into());
    served::check(json::split_body(body, Some(header_length)).and_then(|(json, binary)| {
        let request = json::parse_request(&json.joined(), binary, Tensors::of(&served::MODEL))?;
        served::prepare(request)
    }));
});
