//! Step 1, Step 10 in REST: the body of an infer request, and that of its reply, with the binary tensor extension.
//!
//! A body is a JSON object; with the extension its length is in `Inference-Header-Content-Length` and the bytes of the
//! inputs that name a `binary_data_size` follow it, in the order of the inputs. Elements are little-endian.

use std::fmt::Write as _;

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
    rope::Rope,
    tasks::Reply,
};
use repository::Model;
use serde_json::json;

use super::{
    InferRequest, InputData, OutputChoice, OutputForm, Parameters, RequestInput, RequestedOutput, Tensors,
    classes::{Shown, shown},
    elements, region_parameters,
};
use read::{RawInput, RawOutput, read};

mod read;

/// A body's bytes.
#[derive(Debug)]
pub struct EncodedReply {
    /// The JSON object, then the binary outputs.
    pub body: Vec<u8>,
    /// Length of the JSON object, if binary outputs follow.
    pub header_length: Option<usize>,
}

/// A body's JSON object and the binary inputs that follow it. `header_length` is the value of
/// `Inference-Header-Content-Length`, if the client sent it.
///
/// # Errors
/// If the body is shorter.
pub fn split_body(mut body: Rope, header_length: Option<usize>) -> Result<(Rope, Rope), InferError> {
    let json_bytes = header_length.unwrap_or(body.len());
    if json_bytes > body.len() {
        return Err(invalid(
            "Inference-Header-Content-Length",
            json_bytes,
            format_args!("at most the length of the body, {}", body.len()),
        ));
    }
    let json = body.split_to(json_bytes);
    Ok((json, body))
}

/// Reads a body's two parts. Takes steps for its bytes, its pieces and its inputs, and no memory for what means
/// nothing.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn parse_request(json: &Bytes, mut binary: Rope, tensors: Tensors) -> Result<InferRequest, InferError> {
    let wrong = |error| InferError::Invalid(format!("the request is not a JSON object of this protocol: {error}"));
    let finite;
    let (raw, text) = match read(json, tensors) {
        Ok(raw) => (raw, &json[..]),
        Err(error) => {
            // Triton reads numbers that JSON lacks.
            finite = elements::finite(json).ok_or_else(|| wrong(error))?;
            (read(&finite, tensors).map_err(wrong)?, &finite[..])
        }
    };
    let mut inputs = Vec::with_capacity(raw.inputs.len());
    for RawInput { name, shape, datatype, parameters, data } in raw.inputs {
        let data = data.map(|data| {
            let at = data.get().as_ptr().addr() - text.as_ptr().addr();
            json.slice(at..at + data.get().len())
        });
        let data = input_data(&name, &parameters, data, &mut binary)?;
        inputs.push(RequestInput { name, datatype, shape, parameters, data });
    }
    if !binary.is_empty() {
        return Err(invalid("body", format_args!("{} bytes after the last binary input", binary.len()), "none"));
    }
    let outputs =
        raw.outputs.into_iter().map(|RawOutput { name, parameters }| RequestedOutput { name, parameters }).collect();
    Ok(InferRequest { id: raw.id, parameters: raw.parameters, inputs, outputs })
}

/// An input's data: in the JSON object, at the front of `binary`, or in neither.
fn input_data(
    name: &str,
    parameters: &Parameters,
    json: Option<Bytes>,
    binary: &mut Rope,
) -> Result<Option<InputData>, InferError> {
    let field = |rest: &str| format!("inputs['{}'].{rest}", excerpt(name));
    let Some(size) = parameters.get("binary_data_size") else { return Ok(json.map(InputData::Json)) };
    if json.is_some() {
        return Err(invalid(&field("data"), "both", "either data or parameters.binary_data_size"));
    }
    let size = size.as_u64().and_then(|size| usize::try_from(size).ok()).ok_or_else(|| {
        invalid(&field("parameters.binary_data_size"), excerpt(&size.to_string()), "a number of bytes")
    })?;
    if size > binary.len() {
        let left = format!("at most the {} bytes that the body has left", binary.len());
        return Err(invalid(&field("parameters.binary_data_size"), size, left));
    }
    Ok(Some(InputData::Bytes(binary.split_to(size))))
}

/// Writes a reply's body.
///
/// # Errors
/// If there is a string that JSON cannot hold, and the client did not ask for binary data.
pub fn encode_reply(
    model: &Model,
    (id, parameters): (Option<&str>, &Parameters),
    outputs: &[OutputChoice],
    reply: &Reply,
) -> Result<EncodedReply, InferError> {
    let mut json = String::with_capacity(256);
    json.push('{');
    if let Some(id) = id {
        write!(json, "\"id\":{},", quoted(id)).expect("writing into memory cannot fail");
    }
    let (name, version) = (quoted(&model.name), quoted(&model.version));
    write!(json, "\"model_name\":{name},\"model_version\":{version},").expect("writing into memory cannot fail");
    if !parameters.is_empty() {
        write!(json, "\"parameters\":{},", json!(parameters)).expect("writing into memory cannot fail");
    }
    json.push_str("\"outputs\":[");
    let mut binary = Vec::new();
    for (position, choice) in outputs.iter().enumerate() {
        let tensor = &model.outputs[choice.index];
        let Shown { datatype, shape, data } = shown(model, choice, reply);
        let comma = if position > 0 { "," } else { "" };
        let name = quoted(&tensor.name);
        write!(json, "{comma}{{\"name\":{name},\"datatype\":\"{datatype}\",\"shape\":{shape:?},")
            .expect("writing into memory cannot fail");
        match &choice.form {
            OutputForm::Binary => {
                write!(json, "\"parameters\":{{\"binary_data_size\":{}}}}}", data.len())
                    .expect("writing into memory cannot fail");
                binary.push(data);
            }
            OutputForm::Usual => {
                json.push_str("\"data\":[");
                elements::write_json(datatype, &data, &mut json)
                    .map_err(|cause| InferError::Invalid(format!("outputs['{}'].data: {cause}", tensor.name)))?;
                json.push_str("]}");
            }
            OutputForm::Region(part) => write!(json, "\"parameters\":{}}}", json!(region_parameters(part, data.len())))
                .expect("writing into memory cannot fail"),
        }
    }
    json.push_str("]}");
    let mut body = json.into_bytes();
    let header_length = (!binary.is_empty()).then_some(body.len());
    binary.iter().for_each(|data| body.extend_from_slice(data));
    Ok(EncodedReply { body, header_length })
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("text is representable in JSON")
}
