//! Step 1: Open Inference Protocol v2, REST form with the binary tensor extension: a body becomes a checked request,
//! and a reply becomes a body. No IO.
//!
//! A body is a JSON object; with the extension its length is in `Inference-Header-Content-Length` and the bytes of the
//! inputs that name a `binary_data_size` follow it, in the order of the inputs. Elements are little-endian.

use std::fmt::Write as _;

use proto::Span;
use repository::{DataType, Model, SLO_MAX, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

use crate::{
    error::InferError,
    models::{ServedModel, excerpt},
    rope::Rope,
    tasks::{CheckedRequest, Reply},
};

mod elements;

/// A request with what its reply needs to know.
#[derive(Debug)]
pub struct InferRequest {
    /// Comes back in the reply.
    pub id: Option<String>,
    /// What the core needs.
    pub checked: CheckedRequest,
    /// Which outputs the client wants, in which form and order.
    pub outputs: Vec<OutputChoice>,
}

/// An output that the client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputChoice {
    /// Index among the model's outputs.
    pub index: usize,
    /// As bytes after the JSON object instead of numbers in it.
    pub binary: bool,
}

/// One input as a client gives it.
#[derive(Debug, Clone)]
pub struct InputTensor {
    /// As in the model's configuration.
    pub name: String,
    /// As in the model's configuration.
    pub datatype: DataType,
    /// The batch dimension, then the dimensions of the model's configuration.
    pub shape: Vec<usize>,
    /// Elements in row-major order, little-endian.
    pub data: Rope,
}

/// A body's bytes.
#[derive(Debug)]
pub struct EncodedReply {
    /// The JSON object, then the binary outputs.
    pub body: Vec<u8>,
    /// Length of the JSON object, if binary outputs follow.
    pub header_length: Option<usize>,
}

#[derive(Deserialize)]
struct RawRequest<'a> {
    id: Option<String>,
    #[serde(default)]
    parameters: Map<String, Value>,
    #[serde(borrow)]
    inputs: Vec<RawInput<'a>>,
    #[serde(default)]
    outputs: Vec<RawOutput>,
}

#[derive(Deserialize)]
struct RawInput<'a> {
    name: String,
    shape: Vec<usize>,
    datatype: String,
    #[serde(default)]
    parameters: Map<String, Value>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawOutput {
    name: String,
    #[serde(default)]
    parameters: Map<String, Value>,
}

/// Reads the body of an infer request for `model`, which is at `index` of the model table. `header_length` is the value
/// of `Inference-Header-Content-Length`, if the client sent it.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn parse_request(
    model: &Model,
    index: usize,
    body: &Rope,
    header_length: Option<usize>,
) -> Result<InferRequest, InferError> {
    let json_bytes = header_length.unwrap_or(body.len());
    if json_bytes > body.len() {
        return Err(invalid(
            "Inference-Header-Content-Length",
            json_bytes,
            format_args!("at most the length of the body, {}", body.len()),
        ));
    }
    let json = body.slice(0..json_bytes).joined();
    let raw: RawRequest<'_> = serde_json::from_slice(&json)
        .map_err(|error| InferError::Invalid(format!("the request is not a JSON object of this protocol: {error}")))?;
    let mut binary = body.slice(json_bytes..body.len());
    let mut inputs = Vec::with_capacity(raw.inputs.len().min(model.inputs.len()));
    for input in &raw.inputs {
        // Checked before its data is read, so that wrong data costs nothing.
        let tensor = known_input(model, &input.name, &input.datatype)?;
        check_shape(model, tensor, &input.shape)?;
        let data = input_data(input, tensor, &mut binary)?;
        let (name, shape) = (tensor.name.clone(), input.shape.clone());
        inputs.push(InputTensor { name, datatype: tensor.datatype, shape, data });
    }
    if !binary.is_empty() {
        return Err(invalid("body", format_args!("{} bytes after the last binary input", binary.len()), "none"));
    }
    let slo = timeout(&raw.parameters)?.unwrap_or(model.slo);
    let outputs = output_choices(model, &raw)?;
    Ok(InferRequest { id: raw.id, checked: check(model, index, inputs, slo)?, outputs })
}

/// Checks inputs against a model and puts them into its order.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn check(model: &Model, index: usize, inputs: Vec<InputTensor>, slo: Span) -> Result<CheckedRequest, InferError> {
    let mut ordered: Vec<Option<Rope>> = vec![None; model.inputs.len()];
    let mut rows = None;
    for input in inputs {
        let tensor = known_input(model, &input.name, input.datatype.name())?;
        let found = check_shape(model, tensor, &input.shape)?;
        if *rows.get_or_insert(found) != found {
            let expected = format!("{}, as in the inputs before", rows.unwrap_or_default());
            return Err(invalid(&format!("inputs['{}'].shape[0]", tensor.name), found, expected));
        }
        let expected = found * tensor.bytes();
        if input.data.len() != expected {
            let found = format!("{} bytes", input.data.len());
            let expected =
                format!("{expected} bytes ({} elements of {})", expected / tensor.datatype.bytes(), tensor.datatype);
            return Err(invalid(&format!("inputs['{}'].data", tensor.name), found, expected));
        }
        let place = model.inputs.iter().position(|other| other.name == tensor.name).expect("the tensor is the model's");
        if ordered[place].replace(input.data).is_some() {
            return Err(invalid("inputs", format_args!("'{}' twice", tensor.name), "each input once"));
        }
    }
    if let Some(missing) = ordered.iter().position(Option::is_none) {
        let expected = format!("input '{}' too", model.inputs[missing].name);
        return Err(invalid(
            "inputs",
            format_args!("{} of {}", ordered.iter().flatten().count(), ordered.len()),
            expected,
        ));
    }
    let rows = rows.expect("a model has at least one input");
    Ok(CheckedRequest { model: index, rows, inputs: ordered.into_iter().flatten().collect(), slo })
}

/// A latency objective in microseconds, as clients send it.
///
/// # Errors
/// If it is negative or longer than [`SLO_MAX`].
pub fn slo_from_micros(micros: i64) -> Result<Span, InferError> {
    let micros_max = SLO_MAX.0 / 1000;
    if !(1..=micros_max).contains(&micros) {
        let expected = format!("microseconds, above 0 and at most {micros_max}");
        return Err(invalid("parameters.timeout", micros, expected));
    }
    Ok(Span::from_micros(micros))
}

/// Writes a reply's body.
#[must_use]
pub fn encode_reply(model: &Model, id: Option<&str>, outputs: &[OutputChoice], reply: &Reply) -> EncodedReply {
    let mut json = String::from("{");
    if let Some(id) = id {
        write!(json, "\"id\":{},", json!(id)).expect("writing into memory cannot fail");
    }
    write!(json, "\"model_name\":{},\"model_version\":{},\"outputs\":[", json!(model.name), json!(model.version))
        .expect("writing into memory cannot fail");
    for (position, choice) in outputs.iter().enumerate() {
        let (tensor, data) = (&model.outputs[choice.index], &reply.outputs[choice.index]);
        let shape: Vec<usize> = [reply.rows].into_iter().chain(tensor.shape.iter().copied()).collect();
        let comma = if position > 0 { "," } else { "" };
        let (name, datatype) = (json!(tensor.name), tensor.datatype);
        write!(json, "{comma}{{\"name\":{name},\"datatype\":\"{datatype}\",\"shape\":{shape:?},")
            .expect("writing into memory cannot fail");
        if choice.binary {
            write!(json, "\"parameters\":{{\"binary_data_size\":{}}}}}", data.len())
                .expect("writing into memory cannot fail");
        } else {
            json.push_str("\"data\":[");
            elements::write_json(tensor.datatype, data, &mut json);
            json.push_str("]}");
        }
    }
    json.push_str("]}");
    let mut body = json.into_bytes();
    let binary: Vec<_> = outputs.iter().filter(|choice| choice.binary).collect();
    let header_length = (!binary.is_empty()).then_some(body.len());
    binary.iter().for_each(|choice| body.extend_from_slice(&reply.outputs[choice.index]));
    EncodedReply { body, header_length }
}

/// What `GET /v2` answers.
#[must_use]
pub fn server_metadata() -> Value {
    json!({ "name": "downbeat", "version": env!("CARGO_PKG_VERSION"), "extensions": ["binary_tensor_data"] })
}

/// What `GET /v2/models/{m}` answers.
#[must_use]
pub fn model_metadata(served: &ServedModel) -> Value {
    let tensors = |tensors: &[Tensor]| -> Vec<Value> {
        tensors
            .iter()
            .map(|tensor| {
                let shape: Vec<i64> = [-1].into_iter().chain(tensor.shape.iter().map(|&dim| dim as i64)).collect();
                json!({ "name": tensor.name, "datatype": tensor.datatype.name(), "shape": shape })
            })
            .collect()
    };
    let model = &served.model;
    let platform = match model.executor {
        repository::Executor::Emulated { .. } => "emulated",
        repository::Executor::Onnx { .. } => "onnxruntime_onnx",
    };
    json!({
        "name": model.name,
        "versions": [model.version],
        "platform": platform,
        "inputs": tensors(&model.inputs),
        "outputs": tensors(&model.outputs),
    })
}

fn known_input<'m>(model: &'m Model, name: &str, datatype: &str) -> Result<&'m Tensor, InferError> {
    let Some(tensor) = model.inputs.iter().find(|tensor| tensor.name == name) else {
        return Err(unknown_name("inputs", name, &model.inputs));
    };
    if datatype != tensor.datatype.name() {
        return Err(invalid(
            &format!("inputs['{name}'].datatype"),
            format_args!("'{}'", excerpt(datatype)),
            format_args!("'{}'", tensor.datatype),
        ));
    }
    Ok(tensor)
}

/// The rows of a shape `[rows, ..]`.
fn check_shape(model: &Model, tensor: &Tensor, shape: &[usize]) -> Result<usize, InferError> {
    match shape {
        [rows, rest @ ..] if rest == tensor.shape && (1..=model.max_batch).contains(rows) => Ok(*rows),
        _ => {
            let dims: String = tensor.shape.iter().map(|dim| format!(", {dim}")).collect();
            let expected = format!("[n{dims}] with n from 1 to {}", model.max_batch);
            Err(invalid(&format!("inputs['{}'].shape", tensor.name), excerpt(&format!("{shape:?}")), expected))
        }
    }
}

/// An input's bytes, from the JSON object or from the front of `binary`.
fn input_data(input: &RawInput<'_>, tensor: &Tensor, binary: &mut Rope) -> Result<Rope, InferError> {
    let field = |rest: &str| format!("inputs['{}'].{rest}", tensor.name);
    if input.parameters.contains_key("shared_memory_region") {
        return Err(invalid(&field("parameters.shared_memory_region"), "one", "none: send the data in the body"));
    }
    match (input.data, input.parameters.get("binary_data_size")) {
        (Some(json), None) => {
            let elements = input.shape[0] * tensor.elements();
            let bytes = elements::read_json(tensor.datatype, elements, json.get())
                .map_err(|cause| InferError::Invalid(format!("{}: {cause}", field("data"))))?;
            Ok(bytes.into())
        }
        (None, Some(size)) => {
            let size = size.as_u64().and_then(|size| usize::try_from(size).ok()).ok_or_else(|| {
                invalid(&field("parameters.binary_data_size"), excerpt(&size.to_string()), "a number of bytes")
            })?;
            if size > binary.len() {
                let left = format!("at most the {} bytes that the body has left", binary.len());
                return Err(invalid(&field("parameters.binary_data_size"), size, left));
            }
            let data = binary.slice(0..size);
            *binary = binary.slice(size..binary.len());
            Ok(data)
        }
        (data, _) => {
            let found = if data.is_some() { "both" } else { "neither" };
            Err(invalid(&field("data"), found, "either data or parameters.binary_data_size"))
        }
    }
}

/// The request's own latency objective. Triton's 0 means none.
fn timeout(parameters: &Map<String, Value>) -> Result<Option<Span>, InferError> {
    match parameters.get("timeout") {
        None => Ok(None),
        Some(value) => match value.as_i64() {
            Some(0) => Ok(None),
            Some(micros) => slo_from_micros(micros).map(Some),
            None => Err(invalid("parameters.timeout", excerpt(&value.to_string()), "a whole number of microseconds")),
        },
    }
}

fn output_choices(model: &Model, raw: &RawRequest<'_>) -> Result<Vec<OutputChoice>, InferError> {
    let flag = |parameters: &Map<String, Value>, key: &str, field: String, default: bool| match parameters.get(key) {
        None => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(invalid(&format!("{field}{key}"), excerpt(&other.to_string()), "true or false")),
    };
    let default = flag(&raw.parameters, "binary_data_output", "parameters.".to_owned(), false)?;
    if raw.outputs.is_empty() {
        return Ok((0..model.outputs.len()).map(|index| OutputChoice { index, binary: default }).collect());
    }
    let mut choices: Vec<OutputChoice> = Vec::new();
    for output in &raw.outputs {
        let Some(index) = model.outputs.iter().position(|tensor| tensor.name == output.name) else {
            return Err(unknown_name("outputs", &output.name, &model.outputs));
        };
        let field = format!("outputs['{}'].parameters.", output.name);
        if let Some(unsupported) =
            ["classification", "shared_memory_region"].into_iter().find(|key| output.parameters.contains_key(*key))
        {
            return Err(invalid(&format!("{field}{unsupported}"), "one", "none: it is not supported"));
        }
        if choices.iter().any(|choice| choice.index == index) {
            return Err(invalid("outputs", format_args!("'{}' twice", output.name), "each output once"));
        }
        choices.push(OutputChoice { index, binary: flag(&output.parameters, "binary_data", field, default)? });
    }
    Ok(choices)
}

fn unknown_name(field: &str, name: &str, known: &[Tensor]) -> InferError {
    let names: Vec<&str> = known.iter().map(|tensor| tensor.name.as_str()).collect();
    invalid(
        &format!("{field}[].name"),
        format_args!("'{}'", excerpt(name)),
        format_args!("one of: {}", names.join(", ")),
    )
}

fn invalid(field: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> InferError {
    InferError::Invalid(format!("{field}: found {found}, expected {expected}"))
}

#[cfg(test)]
mod tests;
