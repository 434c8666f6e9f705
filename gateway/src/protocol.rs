//! Step 1: Open Inference Protocol v2 without its wire: a request as any of its forms carries it is checked against its
//! model. `json` is the REST form, `messages` the gRPC form; both end here. No IO but reads of shared memory.

use std::mem;

use bytes::Bytes;
use proto::Span;
use repository::{DataType, Model, Tensor, elements};
use serde_json::{Map, Value, json};

use frontend::{
    error::{InferError, invalid},
    rope::Rope,
    tasks::CheckedRequest,
};

pub(crate) use classes::check_classes;
pub use inputs::{Elements, Inputs, Pictures, Placed, pictures};
pub use terms::{Terms, application_name};

use crate::regions::{Part, Regions};

mod classes;
pub mod elements;
mod inputs;
pub mod json;
pub mod messages;
mod terms;

/// The best classes that a picture is answered with.
const PICTURE_CLASSES: u32 = 3;

/// Bytes of a request's id, which comes back in the reply and is remembered.
pub const ID_BYTES_MAX: usize = 256;
/// Dimensions of a shape; no model has as many.
pub const DIMENSIONS_MAX: usize = 64;
/// The parameters that mean something, of a request or of one of its tensors. Others are not kept.
const KNOWN_PARAMETERS: [&str; 13] = [
    "timeout",
    "background",
    "priority",
    "application",
    "allow_default",
    "context",
    "binary_data_output",
    "binary_data_size",
    "binary_data",
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
    "classification",
];

/// Parameters by name, of a request or of one of its tensors.
pub type Parameters = Map<String, Value>;

/// A request as a client gives it, not checked yet.
#[derive(Debug)]
pub struct InferRequest {
    /// Comes back in the reply.
    pub id: Option<String>,
    /// `timeout`, `background`, `priority`, `application`, `allow_default`, `context` and `binary_data_output`.
    pub parameters: Parameters,
    /// In any order.
    pub inputs: Vec<RequestInput>,
    /// The outputs that are wanted; all of them if none is named.
    pub outputs: Vec<RequestedOutput>,
}

/// How many tensors a request may name: no more than its model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensors {
    /// Of the model's inputs.
    pub inputs: usize,
    /// Of its outputs.
    pub outputs: usize,
}

/// One input of an [`InferRequest`].
#[derive(Debug)]
pub struct RequestInput {
    /// As the client says.
    pub name: String,
    /// As the client says.
    pub datatype: String,
    /// As the client says.
    pub shape: Vec<usize>,
    /// `shared_memory_region` and its fellows.
    pub parameters: Parameters,
    /// Where its elements are, unless they are in shared memory.
    pub data: Option<InputData>,
}

/// An input's elements.
#[derive(Debug)]
pub enum InputData {
    /// In row-major order, little-endian.
    Bytes(Rope),
    /// A JSON array, known to be well formed.
    Json(Bytes),
}

/// An output that a client names.
#[derive(Debug)]
pub struct RequestedOutput {
    /// As the client says.
    pub name: String,
    /// `binary_data`, `shared_memory_region` and its fellows.
    pub parameters: Parameters,
}

/// A request with what its reply needs to know.
#[derive(Debug)]
pub struct Prepared {
    /// Comes back in the reply.
    pub id: Option<String>,
    /// What the core needs.
    pub checked: CheckedRequest,
    /// Which outputs the client wants, in which form and order.
    pub outputs: Vec<OutputChoice>,
    /// Shared memory that its inputs came from.
    pub parts: Vec<Part>,
}

/// A request for an ensemble, with what its reply needs to know.
pub(crate) struct PreparedEnsemble {
    /// Comes back in the reply.
    pub(crate) id: Option<String>,
    /// What its steps need.
    pub(crate) request: ensembles::Request,
    /// Which outputs the client wants, in which form and order.
    pub(crate) outputs: Vec<OutputChoice>,
    /// Shared memory that its inputs came from.
    pub(crate) parts: Vec<Part>,
}

/// A request's id, the outputs that it wants, and the shared memory that its inputs came from.
pub(crate) type Wanted = (Option<String>, Vec<OutputChoice>, Vec<Part>);

/// An output that the client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChoice {
    /// Index among the model's outputs.
    pub index: usize,
    /// How the client wants it.
    pub form: OutputForm,
    /// How many of its best classes instead of its scores; 0 for the scores.
    pub classes: usize,
}

/// Where an output's elements go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputForm {
    /// Into the reply, in its usual form: numbers in JSON, raw bytes in gRPC.
    Usual,
    /// As bytes after the JSON object instead of numbers in it.
    Binary,
    /// Into shared memory of the client.
    Region(Part),
}

impl Tensors {
    /// Those of a model.
    #[must_use]
    pub fn of(model: &Model) -> Self {
        Self { inputs: model.inputs.len(), outputs: model.outputs.len() }
    }
}

/// A request of which all is checked but its elements, which have not been read.
#[derive(Debug)]
pub struct Resolved {
    /// Where its elements are.
    pub inputs: Inputs,
    /// What it says besides.
    pub terms: Terms,
}

/// Checks a request for a model, before any element of it is read: what is wrong costs nothing. `within` bounds its
/// objective: what the client's own protocol leaves it.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn resolve(
    model: &Model,
    mut request: InferRequest,
    within: Option<Span>,
    regions: &Regions,
) -> Result<Resolved, InferError> {
    let inputs = Inputs::resolve(model, mem::take(&mut request.inputs), regions)?;
    let terms = Terms::of(model, request, inputs.parts(), within, regions)?;
    Ok(Resolved { inputs, terms })
}

/// The request that a picture makes, sent as it is: its best classes are the answer where the model has labels.
pub(crate) fn picture_request(
    model: &Model,
    picture: Rope,
    parameters: Parameters,
) -> Result<InferRequest, InferError> {
    let Some(pipeline) = &model.image else {
        let expected = format!("application/json: model '{}' takes no pictures (parameters: image)", model.name);
        return Err(invalid("Content-Type", "an image", expected));
    };
    let mut data = Rope::from((picture.len() as u32).to_le_bytes().to_vec());
    data.append(picture);
    let input = RequestInput {
        name: model.inputs[pipeline.input].name.clone(),
        datatype: "BYTES".to_owned(),
        shape: vec![1],
        parameters: Parameters::new(),
        data: Some(InputData::Bytes(data)),
    };
    let classes = || [("classification".to_owned(), PICTURE_CLASSES.into())].into_iter().collect();
    let output = |output: &Tensor| RequestedOutput { name: output.name.clone(), parameters: classes() };
    let outputs =
        if model.labels.first().is_none_or(Vec::is_empty) { Vec::new() } else { vec![output(&model.outputs[0])] };
    Ok(InferRequest { id: None, parameters, inputs: vec![input], outputs })
}

/// The request that a body makes which is nothing but its model's one input, of one row. Outputs are as bytes, too.
///
/// # Errors
/// [`InferError::Invalid`], in the words of Triton's that clients know, if the model has several inputs.
pub(crate) fn raw_request(model: &Model, body: Rope, parameters: Parameters) -> Result<InferRequest, InferError> {
    let [tensor] = &model.inputs[..] else {
        return Err(InferError::Invalid(format!(
            "Raw request must only have 1 input (found 1) to be deduced but got {} inputs in '{}' model configuration",
            model.inputs.len(),
            model.name
        )));
    };
    let (shape, data) = raw_input(tensor, body)?;
    let input = RequestInput {
        name: tensor.name.clone(),
        datatype: tensor.datatype.name().to_owned(),
        shape: model.shape_of(&shape, 1),
        parameters: Parameters::new(),
        data: Some(InputData::Bytes(data)),
    };
    let parameters = parameters.into_iter().chain([("binary_data_output".to_owned(), true.into())]).collect();
    Ok(InferRequest { id: None, parameters, inputs: vec![input], outputs: Vec::new() })
}

/// The shape and the elements of a row that is a whole body: its bytes say how long one dimension is, and one string is
/// all of it. As Triton says it.
fn raw_input(tensor: &Tensor, body: Rope) -> Result<(Vec<usize>, Rope), InferError> {
    let (name, mut shape) = (&tensor.name, tensor.shape.clone());
    let variable: &[usize] = tensor.variable.as_ref().map_or(&[], |variable| &variable.dims);
    if tensor.datatype == DataType::Bytes {
        variable.iter().for_each(|&dim| shape[dim] = 1);
        if shape != [1] || !variable.is_empty() {
            return Err(InferError::Invalid(format!(
                "For BYTE datatype raw input '{name}', the model must have input shape [1]"
            )));
        }
        let mut string = Rope::from((body.len() as u32).to_le_bytes().to_vec());
        string.append(body);
        return Ok((shape, string));
    }
    match *variable {
        [] => {}
        [dim] => {
            shape[dim] = 1;
            let each = elements(&shape).unwrap_or(0) * tensor.datatype.bytes();
            shape[dim] = body.len().checked_div(each).unwrap_or(0);
        }
        _ => {
            return Err(InferError::Invalid(format!(
                "The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized \
                 dimension"
            )));
        }
    }
    Ok((shape, body))
}

/// What a reply says of an output of `written` bytes that lies there.
fn region_parameters(part: &Part, written: usize) -> Parameters {
    let span = part.span();
    let mut parameters = Parameters::new();
    parameters.insert("shared_memory_region".to_owned(), json!(span.region));
    parameters.insert("shared_memory_byte_size".to_owned(), json!(written));
    if span.offset > 0 {
        parameters.insert("shared_memory_offset".to_owned(), json!(span.offset));
    }
    parameters
}

/// The name that a parameter has here, if it means something.
fn known_parameter(name: &str) -> Option<&'static str> {
    KNOWN_PARAMETERS.into_iter().find(|known| *known == name)
}

/// Whether an id is not too long.
fn check_id_bytes(bytes: usize) -> Result<(), InferError> {
    if bytes > ID_BYTES_MAX {
        return Err(invalid("id", format_args!("{bytes} bytes"), format_args!("at most {ID_BYTES_MAX}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
