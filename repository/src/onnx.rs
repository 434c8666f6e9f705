//! What an ONNX file says about its model: the names, types and shapes of its inputs and outputs, which complete what
//! `config.pbtxt` leaves out, and its operators.
//!
//! Only some fields of `ModelProto` are declared ([`proto`]); the decoder passes over all others. Weights stay where
//! they were read.

use std::{collections::BTreeSet, fmt, fs, path::Path};

use prost::{Message, bytes::Bytes};

use crate::{error::RepositoryError, tensor::DataType};
use proto::{DimensionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto};

pub mod proto;

/// Reads a file. It has a graph.
///
/// # Errors
/// If it cannot be read, or is no model.
pub fn read(file: &Path) -> Result<ModelProto, RepositoryError> {
    let wrong = |cause: &dyn fmt::Display| RepositoryError(format!("{}: {cause}", file.display()));
    let bytes = fs::read(file).map_err(|error| wrong(&error))?;
    let model = ModelProto::decode(Bytes::from(bytes))
        .map_err(|error| wrong(&format_args!("found no ONNX model ({error}), expected one")))?;
    match model.graph {
        Some(_) => Ok(model),
        None => Err(wrong(&"found no graph, expected an ONNX model")),
    }
}

/// What a file of this model has in it.
#[must_use]
pub fn encode(model: &ModelProto) -> Vec<u8> {
    model.encode_to_vec()
}

/// A file's inputs and outputs.
#[derive(Debug, PartialEq)]
pub struct Signature {
    /// Without those that only name weights, as old files list them.
    pub inputs: Vec<Value>,
    /// As the file lists them.
    pub outputs: Vec<Value>,
}

/// An input or an output.
#[derive(Debug, PartialEq)]
pub struct Value {
    /// As the file names it.
    pub name: String,
    /// `None` for types that the protocol lacks.
    pub datatype: Option<DataType>,
    /// With the batch dimension; `None` if the file does not tell.
    pub shape: Option<Vec<Dimension>>,
    /// Of an output with a map for each row (`ZipMap` of `ai.onnx.ml`), which clients see as a tensor: the keys, one
    /// for each of a row's elements.
    pub keys: Option<Vec<String>>,
}

/// A dimension.
#[derive(Debug, Clone, PartialEq)]
pub enum Dimension {
    /// This length.
    Fixed(usize),
    /// Any length; with the file's name for it, or none.
    Symbolic(String),
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => length.fmt(f),
            Self::Symbolic(name) if name.is_empty() => f.write_str("?"),
            Self::Symbolic(name) => name.fmt(f),
        }
    }
}

impl Signature {
    /// Reads a file.
    ///
    /// # Errors
    /// As [`read`].
    pub(crate) fn read(file: &Path) -> Result<Self, RepositoryError> {
        Ok(Self::of(&read(file)?.graph.unwrap_or_default()))
    }

    /// That of a graph.
    #[must_use]
    pub fn of(graph: &GraphProto) -> Self {
        let weights: BTreeSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
        let inputs = graph.input.iter().filter(|input| !weights.contains(input.name.as_str()));
        let outputs = graph.output.iter().map(|output| match keys(graph, &output.name) {
            Some(keys) => Value::of_maps(&output.name, keys),
            None => Value::new(output),
        });
        Self { inputs: inputs.map(Value::new).collect(), outputs: outputs.collect() }
    }

    /// Whether the first dimension of every tensor is the batch: it is symbolic, and of one name in all of them, or of
    /// none; of one input at least the file says so. Rows that have a name of their own are those of one request: a
    /// graph may compute each of them from all. `generated` inputs do not count. An output without a shape is checked
    /// when the model is loaded.
    pub(crate) fn is_batched(&self, generated: &[String]) -> bool {
        let inputs = || self.inputs.iter().filter(|input| !generated.contains(&input.name));
        let Some(rows) = inputs().find_map(|input| input.shape.as_ref()).map(|shape| shape.first()) else {
            return false;
        };
        // Maps have no shape of their own in a file, but one for each row.
        let is_rows =
            |value: &Value| value.keys.is_some() || value.shape.as_ref().is_none_or(|shape| shape.first() == rows);
        let is_named = |name: &str| {
            let name = name.to_ascii_lowercase();
            name.contains("batch") || ["", "b", "bs", "n"].contains(&name.as_str())
        };
        matches!(rows, Some(Dimension::Symbolic(name)) if is_named(name)) && inputs().chain(&self.outputs).all(is_rows)
    }

    /// Whether every input has a first dimension of any length.
    pub(crate) fn has_free_rows(&self) -> bool {
        let is_free = |value: &Value| matches!(value.shape.as_deref(), Some([Dimension::Symbolic(_), ..]));
        !self.inputs.is_empty() && self.inputs.iter().all(is_free)
    }
}

impl Value {
    fn new(info: &ValueInfoProto) -> Self {
        let tensor = info.r#type.as_ref().and_then(|kind| kind.tensor_type.as_ref());
        let dimension = |dim: &DimensionProto| match dim.dim_value.map(usize::try_from) {
            Some(Ok(length)) if dim.dim_param.is_empty() => Dimension::Fixed(length),
            _ => Dimension::Symbolic(name_of(&dim.dim_param).to_owned()),
        };
        let shape = tensor.and_then(|tensor| tensor.shape.as_ref());
        Self {
            name: info.name.clone(),
            datatype: tensor.and_then(|tensor| datatype(tensor.elem_type)),
            shape: shape.map(|shape| shape.dim.iter().map(dimension).collect()),
            keys: None,
        }
    }

    /// A map for each row.
    fn of_maps(name: &str, keys: Vec<String>) -> Self {
        let shape = vec![Dimension::Symbolic(String::new()), Dimension::Fixed(keys.len())];
        Self { name: name.to_owned(), datatype: Some(DataType::Fp32), shape: Some(shape), keys: Some(keys) }
    }

    /// The dimensions of one task: all, or those without the first, which is the batch; -1 for any length.
    ///
    /// # Errors
    /// What the file says instead of a shape.
    pub(crate) fn task_dims(&self, is_batched: bool) -> Result<Vec<i64>, String> {
        let dims = self.shape.as_ref().and_then(|shape| shape.get(usize::from(is_batched)..));
        let length = |dimension: &Dimension| match dimension {
            Dimension::Fixed(length) => *length as i64,
            Dimension::Symbolic(_) => -1,
        };
        dims.map(|dims| dims.iter().map(length).collect()).ok_or_else(|| self.shown_shape())
    }

    pub(crate) fn shown_shape(&self) -> String {
        let Some(shape) = &self.shape else { return "unknown".to_owned() };
        let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
        format!("[{}]", dims.join(", "))
    }
}

/// The keys of the maps that an output has, if `ZipMap` makes it.
fn keys(graph: &GraphProto, output: &str) -> Option<Vec<String>> {
    let zips = |node: &&NodeProto| {
        node.op_type == "ZipMap" && node.domain == "ai.onnx.ml" && node.output.iter().any(|name| name == output)
    };
    let node = graph.node.iter().find(zips)?;
    let named = |name: &str| node.attribute.iter().find(|attribute| attribute.name == name);
    let strings = named("classlabels_strings").map(|found| &found.strings[..]).unwrap_or_default();
    let strings = strings.iter().map(|key| String::from_utf8_lossy(key).into_owned());
    let numbers = named("classlabels_int64s").map(|found| &found.ints[..]).unwrap_or_default();
    Some(strings.chain(numbers.iter().map(ToString::to_string)).collect()).filter(|keys: &Vec<_>| !keys.is_empty())
}

/// The name of a length: some exporters write a question mark for none.
#[must_use]
pub fn name_of(symbol: &str) -> &str {
    if symbol == "?" { "" } else { symbol }
}

/// That of `TensorProto.DataType`, if the protocol has it.
#[must_use]
pub fn datatype(elem_type: i32) -> Option<DataType> {
    Some(match elem_type {
        1 => DataType::Fp32,
        2 => DataType::Uint8,
        3 => DataType::Int8,
        4 => DataType::Uint16,
        5 => DataType::Int16,
        6 => DataType::Int32,
        7 => DataType::Int64,
        8 => DataType::Bytes,
        9 => DataType::Bool,
        10 => DataType::Fp16,
        11 => DataType::Fp64,
        12 => DataType::Uint32,
        13 => DataType::Uint64,
        16 => DataType::Bf16,
        _ => return None,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{
        proto::{AttributeProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto},
        *,
    };

    /// A model without nodes; the dimension -1 is called `N`, others below 0 have no name.
    pub(crate) fn file(inputs: &[(&str, i32, &[i64])], outputs: &[(&str, i32, &[i64])], weights: &[&str]) -> Vec<u8> {
        let dimension = |&length: &i64| DimensionProto {
            dim_value: Some(length).filter(|&length| length >= 0),
            dim_param: if length == -1 { "N".to_owned() } else { String::new() },
        };
        let value = |&(name, elem_type, dims): &(&str, i32, &[i64])| {
            let shape = Some(TensorShapeProto { dim: dims.iter().map(dimension).collect() });
            let kind = TypeProto { tensor_type: Some(TensorTypeProto { elem_type, shape }), ..TypeProto::default() };
            ValueInfoProto { name: name.to_owned(), r#type: Some(kind) }
        };
        let graph = GraphProto {
            initializer: weights
                .iter()
                .map(|&name| TensorProto { name: name.to_owned(), ..TensorProto::default() })
                .collect(),
            input: inputs.iter().map(value).collect(),
            output: outputs.iter().map(value).collect(),
            ..GraphProto::default()
        };
        ModelProto { graph: Some(graph), ..ModelProto::default() }.encode_to_vec()
    }

    fn read(bytes: &[u8]) -> Result<Signature, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let prefix = format!("{}: ", file.path().display());
        Signature::read(file.path()).map_err(|error| error.to_string().replace(&prefix, ""))
    }

    #[test]
    fn the_digits_are_read_from_a_real_file() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits/1/model.onnx");
        let signature = Signature::read(&file).unwrap();
        let value = |name: &str, length| Value {
            name: name.to_owned(),
            datatype: Some(DataType::Fp32),
            shape: Some(vec![Dimension::Symbolic("N".to_owned()), Dimension::Fixed(length)]),
            keys: None,
        };
        assert_eq!(
            signature,
            Signature { inputs: vec![value("image", 64)], outputs: vec![value("probabilities", 10)] }
        );
        assert_eq!((signature.is_batched(&[]), signature.inputs[0].task_dims(true)), (true, Ok(vec![64])));
    }

    #[test]
    fn weights_are_no_inputs_and_batches_are_first_dimensions() {
        let of = |dims: &[i64]| read(&file(&[("x", 7, dims), ("w", 1, &[3, 3])], &[], &["w"])).unwrap();
        let signature = of(&[-1, 3, 2]);
        assert_eq!((signature.inputs.len(), signature.inputs[0].datatype), (1, Some(DataType::Int64)));
        assert_eq!(signature.inputs[0].task_dims(true), Ok(vec![3, 2]));
        assert_eq!(
            [&[-2, 3][..], &[-1], &[1, 3], &[4], &[]].map(|dims| of(dims).is_batched(&[])),
            [true, true, false, false, false]
        );
        assert_eq!(of(&[1, 3]).inputs[0].task_dims(false), Ok(vec![1, 3]));
        assert_eq!((of(&[-1]).inputs[0].task_dims(true), of(&[]).inputs[0].task_dims(false)), (Ok(vec![]), Ok(vec![])));
        assert_eq!(of(&[-1, -2, 3, -1]).inputs[0].task_dims(true), Ok(vec![-1, 3, -1]));
        let datatype = |elem_type| read(&file(&[("x", elem_type, &[-1, 1])], &[], &[])).unwrap().inputs[0].datatype;
        assert_eq!([8, 14, 16, 17].map(datatype), [Some(DataType::Bytes), None, Some(DataType::Bf16), None]);
    }

    #[test]
    fn maps_are_rows_with_an_element_for_each_key() {
        let zipped = |attribute: AttributeProto, domain: &str| {
            let node = NodeProto {
                op_type: "ZipMap".to_owned(),
                domain: domain.to_owned(),
                output: vec!["y".to_owned()],
                attribute: vec![attribute],
                ..NodeProto::default()
            };
            let output = ValueInfoProto { name: "y".to_owned(), r#type: None };
            let graph = GraphProto { node: vec![node], output: vec![output], ..GraphProto::default() };
            Signature::of(&graph).outputs.remove(0)
        };
        let (name, ints) = ("classlabels_int64s".to_owned(), vec![3, -1]);
        let numbers = AttributeProto { name, ints, ..AttributeProto::default() };
        let (name, strings) = ("classlabels_strings".to_owned(), vec![Bytes::from_static(b"a"); 3]);
        let texts = AttributeProto { name, strings, ..AttributeProto::default() };
        let found = zipped(numbers.clone(), "ai.onnx.ml");
        assert_eq!((found.datatype, found.task_dims(true)), (Some(DataType::Fp32), Ok(vec![2])));
        assert_eq!(found.keys.unwrap(), ["3", "-1"]);
        assert_eq!(zipped(texts, "ai.onnx.ml").keys.unwrap(), ["a"; 3]);
        assert_eq!(zipped(numbers, "").keys, None, "another operator of that name");
        assert_eq!(zipped(AttributeProto::default(), "ai.onnx.ml").keys, None);
    }

    #[test]
    fn rows_with_a_name_of_their_own_are_no_batch() {
        let is_batched = |name: &str| {
            let symbol = DimensionProto { dim_value: None, dim_param: name.to_owned() };
            let shape = Some(TensorShapeProto { dim: vec![symbol] });
            let kind = TypeProto { tensor_type: Some(TensorTypeProto { elem_type: 1, shape }), ..TypeProto::default() };
            let value = ValueInfoProto { name: "x".to_owned(), r#type: Some(kind) };
            let graph = GraphProto { input: vec![value.clone()], output: vec![value], ..GraphProto::default() };
            Signature::of(&graph).is_batched(&[])
        };
        assert!(["", "?", "N", "b", "batch_size", "BatchSize", "DynamicBatch.0"].into_iter().all(is_batched));
        assert!(!["D", "num_atoms", "rows", "time"].into_iter().any(is_batched));
    }

    #[test]
    fn no_file_panics() {
        assert_eq!(read(b""), Err("found no graph, expected an ONNX model".to_owned()));
        assert!(read(b"not a model").unwrap_err().starts_with("found no ONNX model ("));
        let whole = file(&[("x", 1, &[-1, 3])], &[("y", 1, &[-1, 2])], &["w"]);
        for length in 0..whole.len() {
            if let Err(error) = read(&whole[..length]) {
                assert!(!error.contains('\n'), "{error}");
            }
        }
    }
}
