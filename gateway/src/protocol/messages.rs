//! Step 1, Step 10 in gRPC: the messages of an infer request and of its reply.
//!
//! Elements come in `raw_input_contents`, one for each input in order, or typed in each input's `contents`; never both.
//! Contents without an element are none: MLServer's client sends them beside raw ones.

use std::collections::BTreeMap;

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
    tasks::Reply,
};
use repository::{Model, cell::HEAD_BYTES};
use serde_json::Value;

use super::{
    InferRequest, InputData, OutputChoice, OutputForm, Parameters, RequestInput, RequestedOutput,
    classes::{Shown, shown},
    known_parameter, region_parameters,
};
use crate::api::{
    InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse, infer_parameter::ParameterChoice,
    model_infer_response::InferOutputTensor,
};

pub mod outline;

/// Reads a request; its model's name and version are the caller's to look at.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn parse_request(message: ModelInferRequest) -> Result<InferRequest, InferError> {
    let ModelInferRequest { model_name, id, parameters, inputs, outputs, raw_input_contents: raw, .. } = message;
    let in_body = inputs.iter().filter(|input| !input.parameters.contains_key("shared_memory_region")).count();
    let (is_raw, raw_count) = (!raw.is_empty(), raw.len());
    let mut raw = raw.into_iter();
    let mut read = Vec::with_capacity(inputs.len());
    for input in inputs {
        let field = |rest: &str| format!("inputs['{}'].{rest}", excerpt(&input.name));
        let shape: Result<Vec<usize>, _> = input.shape.iter().map(|&dim| usize::try_from(dim)).collect();
        let shape = shape
            .map_err(|_| invalid(&field("shape"), excerpt(&format!("{:?}", input.shape)), "no negative dimension"))?;
        let data = match &input.contents {
            Some(contents) if is_raw && *contents != InferTensorContents::default() => {
                // As Triton says it.
                return Err(InferError::Invalid(format!(
                    "contents field must not be specified when using raw_input_contents for '{}' for model '{}'",
                    excerpt(&input.name),
                    excerpt(&model_name)
                )));
            }
            Some(contents) if !is_raw => Some(
                contents_bytes(&input.datatype, contents)
                    .map_err(|cause| InferError::Invalid(format!("{}: {cause}", field("contents"))))?,
            ),
            _ if input.parameters.contains_key("shared_memory_region") => None,
            _ => raw.next(),
        };
        read.push(RequestInput {
            shape,
            parameters: to_values(input.parameters),
            data: data.map(|bytes| InputData::Bytes(bytes.into())),
            name: input.name,
            datatype: input.datatype,
        });
    }
    if is_raw && raw_count != in_body {
        return Err(invalid("raw_input_contents", raw_count, format_args!("{in_body}, one for each input")));
    }
    let outputs = outputs
        .into_iter()
        .map(|output| RequestedOutput { name: output.name, parameters: to_values(output.parameters) })
        .collect();
    let id = (!id.is_empty()).then_some(id);
    Ok(InferRequest { id, parameters: to_values(parameters), inputs: read, outputs })
}

/// Writes a reply. An output that went into shared memory keeps its place among the contents, empty.
#[must_use]
pub fn encode_reply(
    model: &Model,
    (id, parameters): (Option<&str>, &Parameters),
    outputs: &[OutputChoice],
    reply: &Reply,
) -> ModelInferResponse {
    let mut response = ModelInferResponse {
        model_name: model.name.clone(),
        model_version: model.version.clone(),
        id: id.unwrap_or_default().to_owned(),
        parameters: parameters.iter().map(|(key, value)| (key.clone(), to_parameter(value))).collect(),
        ..ModelInferResponse::default()
    };
    for choice in outputs {
        let Shown { datatype, shape, data } = shown(model, choice, reply);
        let (parameters, raw) = match &choice.form {
            OutputForm::Usual | OutputForm::Binary => (Parameters::new(), data),
            OutputForm::Region(part) => (region_parameters(part, data.len()), Bytes::new()),
        };
        response.outputs.push(InferOutputTensor {
            name: model.outputs[choice.index].name.clone(),
            datatype: datatype.name().to_owned(),
            shape: shape.iter().map(|&dim| dim as i64).collect(),
            parameters: parameters.into_iter().map(|(key, value)| (key, to_parameter(&value))).collect(),
            contents: None,
        });
        response.raw_output_contents.push(raw);
    }
    response
}

/// Typed contents as little-endian bytes.
fn contents_bytes(datatype: &str, contents: &InferTensorContents) -> Result<Bytes, String> {
    macro_rules! narrow {
        ($values:expr, $type:ty) => {{
            let mut bytes = Vec::with_capacity($values.len() * size_of::<$type>());
            for &value in &$values {
                let element = <$type>::try_from(value).map_err(|_| format!("found {value}, expected {datatype}"))?;
                bytes.extend_from_slice(&element.to_le_bytes());
            }
            Ok(bytes.into())
        }};
    }
    macro_rules! plain {
        ($values:expr) => {
            Ok($values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into())
        };
    }
    match datatype {
        "BOOL" => Ok(contents.bool_contents.iter().map(|&value| u8::from(value)).collect::<Vec<u8>>().into()),
        "INT8" => narrow!(contents.int_contents, i8),
        "INT16" => narrow!(contents.int_contents, i16),
        "INT32" => plain!(contents.int_contents),
        "INT64" => plain!(contents.int64_contents),
        "UINT8" => narrow!(contents.uint_contents, u8),
        "UINT16" => narrow!(contents.uint_contents, u16),
        "UINT32" => plain!(contents.uint_contents),
        "UINT64" => plain!(contents.uint64_contents),
        "FP32" => plain!(contents.fp32_contents),
        "FP64" => plain!(contents.fp64_contents),
        "BYTES" => {
            let strings = contents.bytes_contents.iter();
            let bytes: usize = strings.clone().map(|string| HEAD_BYTES + string.len()).sum();
            let mut joined = Vec::with_capacity(bytes);
            strings.for_each(|string| {
                joined.extend_from_slice(&(string.len() as u32).to_le_bytes());
                joined.extend_from_slice(string);
            });
            Ok(joined.into())
        }
        _ => Err(format!("found typed contents of '{}', expected raw_input_contents", excerpt(datatype))),
    }
}

fn to_values(parameters: BTreeMap<String, InferParameter>) -> Parameters {
    let value = |parameter: InferParameter| match parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(flag)) => flag.into(),
        Some(ParameterChoice::Int64Param(number)) => number.into(),
        Some(ParameterChoice::StringParam(text)) => text.into(),
        Some(ParameterChoice::DoubleParam(number)) => number.into(),
        Some(ParameterChoice::Uint64Param(number)) => number.into(),
        None => Value::Null,
    };
    let known = parameters.into_iter().filter(|(key, _)| known_parameter(key).is_some());
    known.map(|(key, parameter)| (key, value(parameter))).collect()
}

fn to_parameter(value: &Value) -> InferParameter {
    let choice = match value {
        Value::Bool(flag) => Some(ParameterChoice::BoolParam(*flag)),
        Value::String(text) => Some(ParameterChoice::StringParam(text.clone())),
        Value::Number(number) => {
            let whole = number.as_i64().map(ParameterChoice::Int64Param);
            whole.or_else(|| number.as_f64().map(ParameterChoice::DoubleParam))
        }
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    };
    InferParameter { parameter_choice: choice }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::model_infer_request::InferInputTensor;

    #[test]
    fn typed_contents_are_little_endian_and_in_range() {
        let contents = InferTensorContents {
            int_contents: vec![-1, 300],
            fp32_contents: vec![1.5],
            bool_contents: vec![true, false],
            bytes_contents: vec![Bytes::from_static(b"ab"), Bytes::new()],
            ..InferTensorContents::default()
        };
        let bytes = |datatype| contents_bytes(datatype, &contents).map(|bytes| bytes.to_vec());
        assert_eq!(bytes("INT16").unwrap(), [0xff, 0xff, 0x2c, 0x01]);
        assert_eq!(bytes("INT8").unwrap_err(), "found 300, expected INT8");
        assert_eq!(bytes("FP32").unwrap(), 1.5f32.to_le_bytes());
        assert_eq!(bytes("BOOL").unwrap(), [1, 0]);
        assert_eq!(bytes("BYTES").unwrap(), b"\x02\0\0\0ab\0\0\0\0");
        assert_eq!(bytes("FP16").unwrap_err(), "found typed contents of 'FP16', expected raw_input_contents");
    }

    #[test]
    fn contents_without_an_element_are_none_beside_raw_ones() {
        let input = |contents| InferInputTensor { contents: Some(contents), ..InferInputTensor::default() };
        let parse = |contents| {
            let raw_input_contents = vec![Bytes::from_static(&[7])];
            parse_request(ModelInferRequest { inputs: vec![input(contents)], raw_input_contents, ..Default::default() })
        };
        let request = parse(InferTensorContents::default()).unwrap();
        assert!(matches!(&request.inputs[0].data, Some(InputData::Bytes(bytes)) if bytes.joined()[..] == [7]));
        let both = parse(InferTensorContents { bool_contents: vec![true], ..Default::default() }).unwrap_err();
        assert!(both.to_string().starts_with("contents field must not be specified when using raw_input"), "{both}");
    }
}
