//! Step 1: Open Inference Protocol v2 without its wire: a request as any of its forms carries it is checked against its
//! model. `json` is the REST form, `messages` the gRPC form; both end here. No IO but reads of shared memory.

use std::mem;

use bytes::Bytes;
use proto::{Application, Span};
use repository::{DataType, ImagePipeline, Model, Tensor, elements};
use serde_json::{Map, Value, json};

use frontend::{
    InputTensor,
    error::{InferError, invalid},
    excerpt,
    request::{check, check_shape, known_input, slo_from_micros, unknown_name},
    rope::Rope,
    tasks::CheckedRequest,
};

pub(crate) use classes::check_classes;

use crate::regions::{Part, RegionSpan, Regions};

mod classes;
pub mod elements;
pub mod json;
pub mod messages;

/// The best classes that a picture is answered with.
const PICTURE_CLASSES: u32 = 3;

/// Bytes of a request's id, which comes back in the reply and is remembered.
pub const ID_BYTES_MAX: usize = 256;
/// Dimensions of a shape; no model has as many.
pub const DIMENSIONS_MAX: usize = 64;
/// Bytes of the name of a region of shared memory.
const REGION_BYTES_MAX: usize = 255;

/// The parameters that mean something, of a request or of one of its tensors. Others are not kept.
const KNOWN_PARAMETERS: [&str; 11] = [
    "timeout",
    "background",
    "priority",
    "application",
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
    /// `timeout`, `background`, `priority`, `application` and `binary_data_output`.
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
    /// Of those that are, where, and what has been read there, if that was done before ([`part_of_input`]).
    pub read: Option<(Part, Bytes)>,
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

/// Checks a request for `model`, which is at `index` of the model table. `within` bounds its objective: what the
/// client's own protocol leaves it.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn prepare(
    model: &Model,
    index: usize,
    mut request: InferRequest,
    within: Option<Span>,
    regions: &Regions,
) -> Result<Prepared, InferError> {
    let mut inputs = Vec::with_capacity(request.inputs.len().min(model.inputs.len()));
    let mut parts = Vec::new();
    for at in 0..request.inputs.len() {
        // Checked before its data is read, so that wrong data costs nothing.
        let (tensor, rows) = placed(model, &request.inputs, at)?;
        let input = &mut request.inputs[at];
        let data = input_data(model, (input, tensor, rows), regions, &mut parts)?;
        let (name, shape) = (tensor.name.clone(), mem::take(&mut input.shape));
        inputs.push(InputTensor { name, datatype: tensor.datatype, shape, data });
    }
    let terms = Terms::of(model, &request, within, regions)?;
    let (priority, application) = (terms.priority, terms.application);
    let checked = CheckedRequest { priority, application, ..check(model, index, inputs, terms.slo)? };
    Ok(Prepared { id: request.id, checked, outputs: terms.outputs, parts })
}

/// The same, before the data of its only input is there.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_ahead(
    model: &Model,
    index: usize,
    request: InferRequest,
    within: Option<Span>,
    regions: &Regions,
) -> Result<Prepared, InferError> {
    let (_, rows) = placed(model, &request.inputs, 0)?;
    let Terms { slo, priority, application, outputs } = Terms::of(model, &request, within, regions)?;
    let (inputs, waited, client) = (Vec::new(), Span::ZERO, None);
    let checked = CheckedRequest { model: index, rows, inputs, slo, waited, priority, application, client };
    Ok(Prepared { id: request.id, checked, outputs, parts: Vec::new() })
}

/// What a request says besides its inputs.
struct Terms {
    slo: Span,
    priority: u8,
    application: Application,
    outputs: Vec<OutputChoice>,
}

impl Terms {
    fn of(model: &Model, request: &InferRequest, within: Option<Span>, regions: &Regions) -> Result<Self, InferError> {
        let priority = model.priorities.of(priority(&request.parameters)?);
        let application = application(&request.parameters)?;
        let slo = match objective(&request.parameters)? {
            Some(Span::ENDLESS) => Span::ENDLESS,
            asked => model.queue.objective(priority, asked, model.slo),
        };
        // When a client without an objective hangs up is no objective.
        let slo = if slo == Span::ENDLESS { slo } else { within.map_or(slo, |within| slo.min(within)) };
        let outputs = output_choices(model, &request.parameters, &request.outputs, regions)?;
        Ok(Self { slo, priority, application, outputs })
    }
}

/// The tensor that an input stands for, and its rows; none stands for the same as one before it.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn placed<'m>(model: &'m Model, inputs: &[RequestInput], at: usize) -> Result<(&'m Tensor, usize), InferError> {
    let RequestInput { name, datatype, shape, .. } = &inputs[at];
    let tensor = known_input(model, name, datatype)?;
    // None of those before it is there twice, so they are not more than the model has.
    if inputs[..at].iter().any(|before| before.name == *name) {
        return Err(invalid("inputs", format_args!("'{}' twice", tensor.name), "each input once"));
    }
    Ok((tensor, check_shape(model, tensor, shape)?))
}

/// The pictures that a request has instead of a tensor.
#[derive(Debug)]
pub struct Pictures {
    /// What they become.
    pub pipeline: ImagePipeline,
    /// Which of the request's inputs they were.
    pub at: usize,
    /// One for each row.
    pub pictures: Vec<Rope>,
}

impl Pictures {
    /// Takes the pictures (an input of BYTES) out of a request, if its model has an image pipeline. What they become
    /// stands there instead, but for its data.
    ///
    /// # Errors
    /// As [`pictures`].
    pub fn take(model: &Model, request: &mut InferRequest) -> Result<Option<Self>, InferError> {
        let Some(pipeline) = &model.image else { return Ok(None) };
        let tensor = &model.inputs[pipeline.input];
        let is_picture = |input: &RequestInput| input.name == tensor.name && input.datatype == "BYTES";
        let Some(at) = request.inputs.iter().position(is_picture) else { return Ok(None) };
        let input = &mut request.inputs[at];
        let pictures = pictures(input, model.rows_max)?;
        input.shape = model.shape_of(&tensor.shape, pictures.len());
        input.datatype = tensor.datatype.name().to_owned();
        input.data = None;
        Ok(Some(Self { pipeline: pipeline.clone(), at, pictures }))
    }
}

/// The pictures of an input of BYTES: strings with their length before them, one for each row.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn pictures(input: &RequestInput, rows_max: usize) -> Result<Vec<Rope>, InferError> {
    let field = format!("inputs['{}']", excerpt(&input.name));
    let rows = match input.shape[..] {
        [rows] | [rows, 1] if (1..=rows_max).contains(&rows) => rows,
        ref shape => {
            let expected = format!("[n] or [n, 1] pictures with n from 1 to {rows_max}");
            return Err(invalid(&format!("{field}.shape"), excerpt(&format!("{shape:?}")), expected));
        }
    };
    let wrong = || invalid(&format!("{field}.data"), "others", format_args!("{rows} pictures, each after its length"));
    let Some(InputData::Bytes(data)) = &input.data else {
        return Err(invalid(&format!("{field}.data"), "none", "pictures as binary data"));
    };
    let mut rest = data.clone();
    let mut pictures = Vec::with_capacity(rows);
    while let Some(length) = rest.split_first_u32() {
        if pictures.len() == rows || length as usize > rest.len() {
            return Err(wrong());
        }
        pictures.push(rest.split_to(length as usize));
    }
    if pictures.len() != rows || !rest.is_empty() { Err(wrong()) } else { Ok(pictures) }
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
        read: None,
    };
    let classes = || [("classification".to_owned(), PICTURE_CLASSES.into())].into_iter().collect();
    let output = |output: &Tensor| RequestedOutput { name: output.name.clone(), parameters: classes() };
    let outputs = if model.labels.is_empty() { Vec::new() } else { vec![output(&model.outputs[0])] };
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
        read: None,
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

/// An input's bytes, in the order of its elements; what they came from if that is shared memory.
fn input_data(
    model: &Model,
    (input, tensor, rows): (&mut RequestInput, &Tensor, usize),
    regions: &Regions,
    parts: &mut Vec<Part>,
) -> Result<Rope, InferError> {
    let field = format!("inputs['{}']", tensor.name);
    let span = region_span(&input.parameters, &field)?;
    match (input.data.take(), span) {
        (Some(InputData::Bytes(bytes)), None) => Ok(bytes),
        (Some(InputData::Json(json)), None) => {
            let elements = elements(&input.shape).unwrap_or(usize::MAX);
            Ok(JsonElements::of(field, tensor, elements, json).read()?.into())
        }
        (None, Some(span)) => {
            let (part, bytes) = match input.read.take() {
                Some(read) => read,
                None => {
                    let part = part(model, (input, tensor, rows), span, regions)?;
                    let bytes = part.read()?;
                    (part, bytes)
                }
            };
            parts.push(part);
            Ok(bytes.into())
        }
        (data, _) => {
            let found = if data.is_some() { "both" } else { "neither" };
            Err(invalid(&format!("{field}.data"), found, "either data or parameters that say where it is"))
        }
    }
}

/// The shared memory that an input's elements are in, if they are: what reading takes may be much, and is another
/// thread's.
///
/// # Errors
/// As [`prepare`].
pub fn part_of_input(
    model: &Model,
    inputs: &[RequestInput],
    at: usize,
    regions: &Regions,
) -> Result<Option<Part>, InferError> {
    if inputs[at].data.is_some() {
        return Ok(None);
    }
    let (tensor, rows) = placed(model, inputs, at)?;
    let span = region_span(&inputs[at].parameters, &format!("inputs['{}']", tensor.name))?;
    span.map(|span| part(model, (&inputs[at], tensor, rows), span, regions)).transpose()
}

/// What a request names of a region, if a tensor can have so many bytes.
fn part(
    model: &Model,
    (input, tensor, rows): (&RequestInput, &Tensor, usize),
    span: RegionSpan,
    regions: &Regions,
) -> Result<Part, InferError> {
    if tensor.datatype == DataType::Bytes {
        let most = (rows * tensor.bytes()) as u64;
        if span.bytes > most {
            let key = format!("inputs['{}'].parameters.shared_memory_byte_size", tensor.name);
            return Err(invalid(&key, span.bytes, format_args!("at most {most} (parameters: max_bytes)")));
        }
        return regions.part(span);
    }
    let expected = elements(&input.shape).unwrap_or(0) * tensor.datatype.bytes();
    if span.bytes != expected as u64 {
        // As Triton says it.
        return Err(InferError::Invalid(format!(
            "input byte size mismatch for input '{}' for model '{}'. Expected {expected}, got {} \
             (shared_memory_byte_size)",
            tensor.name, model.name, span.bytes
        )));
    }
    regions.part(span)
}

/// Elements in JSON, with all that it takes to read them: that may take a while, on another thread.
#[derive(Debug)]
pub struct JsonElements {
    /// The input, for messages.
    field: String,
    datatype: DataType,
    elements: usize,
    json: Bytes,
}

impl JsonElements {
    fn of(field: String, tensor: &Tensor, elements: usize, json: Bytes) -> Self {
        Self { field, datatype: tensor.datatype, elements, json }
    }

    /// Those of an input, if they are in JSON.
    ///
    /// # Errors
    /// As [`placed`].
    pub fn of_input(model: &Model, inputs: &[RequestInput], at: usize) -> Result<Option<Self>, InferError> {
        let Some(InputData::Json(json)) = &inputs[at].data else { return Ok(None) };
        let (tensor, _) = placed(model, inputs, at)?;
        let elements = elements(&inputs[at].shape).unwrap_or(usize::MAX);
        Ok(Some(Self::of(format!("inputs['{}']", tensor.name), tensor, elements, json.clone())))
    }

    /// Bytes that they take up at most when they are read.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        elements::read_bytes_max(self.datatype, self.elements, self.json.len())
    }

    /// The elements as bytes.
    ///
    /// # Errors
    /// [`InferError::Invalid`], which names the field, what was found and what was expected.
    pub fn read(&self) -> Result<Vec<u8>, InferError> {
        let Self { field, datatype, elements, json } = self;
        elements::read_json(*datatype, *elements, json)
            .map_err(|cause| InferError::Invalid(format!("{field}.data: {cause}")))
    }
}

/// Shared memory that a tensor's parameters name, if they do.
fn region_span(parameters: &Parameters, field: &str) -> Result<Option<RegionSpan>, InferError> {
    let Some(region) = parameters.get("shared_memory_region") else { return Ok(None) };
    let wrong = |key: &str, found: Option<&Value>, expected: &str| {
        let found = found.map_or_else(|| "none".to_owned(), |found| excerpt(&found.to_string()));
        invalid(&format!("{field}.parameters.{key}"), found, expected)
    };
    let number = |key: &str, absent: Option<u64>| {
        let value = parameters.get(key);
        value.map_or(absent, Value::as_u64).ok_or_else(|| wrong(key, value, "a number of bytes"))
    };
    let name = region.as_str().filter(|name| name.len() <= REGION_BYTES_MAX);
    let name = name.ok_or_else(|| wrong("shared_memory_region", Some(region), "a region's name"))?;
    Ok(Some(RegionSpan {
        region: name.to_owned(),
        offset: number("shared_memory_offset", Some(0))?,
        bytes: number("shared_memory_byte_size", None)?,
    }))
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

/// The request's own latency objective, or that it has none; `None`: it is the model's to say.
fn objective(parameters: &Parameters) -> Result<Option<Span>, InferError> {
    let timeout = timeout(parameters)?;
    match parameters.get("background") {
        None | Some(Value::Bool(false)) => Ok(timeout),
        Some(Value::Bool(true)) if timeout.is_none() => Ok(Some(Span::ENDLESS)),
        Some(Value::Bool(true)) => Err(invalid("parameters.background", "true beside a timeout", "one of the two")),
        Some(other) => Err(invalid("parameters.background", excerpt(&other.to_string()), "true or false")),
    }
}

/// Triton's timeout; its 0 means that the client names none.
fn timeout(parameters: &Parameters) -> Result<Option<Span>, InferError> {
    match parameters.get("timeout") {
        None => Ok(None),
        Some(value) => match value.as_i64() {
            Some(0) => Ok(None),
            Some(micros) => slo_from_micros(micros).map(Some),
            None => Err(invalid("parameters.timeout", excerpt(&value.to_string()), "a whole number of microseconds")),
        },
    }
}

/// Triton's priority; 0, the model's default, if the client names none.
fn priority(parameters: &Parameters) -> Result<u64, InferError> {
    let Some(value) = parameters.get("priority") else { return Ok(0) };
    let expected = "0 (the model's default), or 1 (the highest) and up";
    value.as_u64().ok_or_else(|| invalid("parameters.priority", excerpt(&value.to_string()), expected))
}

/// What the client calls the workload that its request is of, if it is a name.
#[must_use]
pub fn application_name(parameters: &Parameters) -> Option<&str> {
    let name = parameters.get("application")?.as_str()?;
    (1..=Application::NAME_BYTES_MAX).contains(&name.len()).then_some(name)
}

/// The workload of that name.
fn application(parameters: &Parameters) -> Result<Application, InferError> {
    let Some(value) = parameters.get("application") else { return Ok(Application::NONE) };
    let expected = || format!("a name of 1 to {} bytes", Application::NAME_BYTES_MAX);
    let named = application_name(parameters)
        .ok_or_else(|| invalid("parameters.application", excerpt(&value.to_string()), expected()))?;
    Ok(Application::named(named))
}

fn output_choices(
    model: &Model,
    parameters: &Parameters,
    outputs: &[RequestedOutput],
    regions: &Regions,
) -> Result<Vec<OutputChoice>, InferError> {
    let binary = |parameters: &Parameters, key: &str, field: &str, default: bool| match parameters.get(key) {
        None => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(invalid(&format!("{field}parameters.{key}"), excerpt(&other.to_string()), "true or false")),
    };
    let form = |binary| if binary { OutputForm::Binary } else { OutputForm::Usual };
    let default = binary(parameters, "binary_data_output", "", false)?;
    if outputs.is_empty() {
        return Ok((0..model.outputs.len())
            .map(|index| OutputChoice { index, form: form(default), classes: 0 })
            .collect());
    }
    let mut choices: Vec<OutputChoice> = Vec::new();
    for output in outputs {
        let Some(index) = model.outputs.iter().position(|tensor| tensor.name == output.name) else {
            return Err(unknown_name("outputs", &output.name, &model.outputs));
        };
        let field = format!("outputs['{}']", output.name);
        if choices.iter().any(|choice| choice.index == index) {
            // As Triton says it.
            return Err(InferError::Invalid(format!("output '{}' already exists in request", output.name)));
        }
        let form = match region_span(&output.parameters, &field)? {
            Some(span) => OutputForm::Region(regions.part(span)?),
            None => form(binary(&output.parameters, "binary_data", &format!("{field}."), default)?),
        };
        let classes = class_count(&output.parameters, &field)?;
        if classes > 0 && model.outputs[index].datatype == DataType::Bytes {
            // As Triton says it.
            return Err(InferError::Invalid(format!(
                "class result not available for output due to unsupported type 'BYTES': \
                 {field}.parameters.classification: found {classes}, expected none: strings have no scores"
            )));
        }
        if classes > 0 && matches!(form, OutputForm::Region(_)) {
            let key = format!("{field}.parameters.classification");
            return Err(invalid(&key, "shared memory too", "one of both: classes have no fixed size"));
        }
        choices.push(OutputChoice { index, form, classes });
    }
    Ok(choices)
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

/// Triton's classification extension; its 0 means none.
fn class_count(parameters: &Parameters, field: &str) -> Result<usize, InferError> {
    let Some(value) = parameters.get("classification") else { return Ok(0) };
    value.as_u64().and_then(|count| usize::try_from(count).ok()).ok_or_else(|| {
        invalid(&format!("{field}.parameters.classification"), excerpt(&value.to_string()), "a number of classes")
    })
}

#[cfg(test)]
mod tests;
