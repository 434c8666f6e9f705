//! Where the elements of a request's inputs are. Each input is looked at once, and all that can be checked is checked
//! then. Each is read once, when all others were found right, too: what is wrong costs nothing.

use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
    request::{Place, Places},
    rope::Rope,
};
use repository::{DataType, Model, Tensor, elements as elements_of};
use serde_json::Value;

use super::{InputData, Parameters, RequestInput, elements};
use crate::regions::{Part, RegionSpan, Regions};

/// Bytes of the name of a region of shared memory.
const REGION_BYTES_MAX: usize = 255;

/// An input that stands for a tensor of its model.
#[derive(Debug)]
pub struct Placed {
    /// Which.
    pub place: Place,
    /// Where its elements are.
    pub elements: Elements,
}

/// Where an input's elements are.
#[derive(Debug)]
pub enum Elements {
    /// Here, in row-major order, little-endian.
    Bytes(Rope),
    /// In JSON.
    Json(JsonElements),
    /// In shared memory.
    Region(Part),
}

/// The pictures that a request has instead of a tensor.
#[derive(Debug)]
pub struct Pictures {
    /// Of what becomes of them.
    pub place: Place,
    /// One for each row.
    pub pictures: Vec<Rope>,
}

/// The inputs of a request, of which nothing has been read.
#[derive(Debug, Default)]
pub struct Inputs {
    /// In the order of the request.
    pub placed: Vec<Placed>,
    /// Beside them.
    pub pictures: Option<Pictures>,
}

impl Inputs {
    /// Finds out where the elements of a request's inputs are.
    ///
    /// # Errors
    /// [`InferError::Invalid`], which names the field, what was found and what was expected.
    pub(super) fn resolve(model: &Model, inputs: Vec<RequestInput>, regions: &Regions) -> Result<Self, InferError> {
        let mut places = Places::of(model);
        let mut resolved = Self::default();
        for input in inputs {
            if let Some(tensor) = pictured(model, &input) {
                let pictures = pictures(&input, model.rows_max)?;
                if region_span(&input.parameters, &field(&input.name))?.is_some() {
                    return Err(not_in_one_place(&input.name, "both"));
                }
                let shape = model.shape_of(&tensor.shape, pictures.len());
                let place = places.take(&tensor.name, tensor.datatype.name(), shape)?;
                resolved.pictures = Some(Pictures { place, pictures });
                continue;
            }
            let RequestInput { name, datatype, shape, parameters, data } = input;
            let place = places.take(&name, &datatype, shape)?;
            let tensor = &model.inputs[place.input];
            let elements = match (data, region_span(&parameters, &field(&name))?) {
                (Some(InputData::Bytes(bytes)), None) => Elements::Bytes(bytes),
                (Some(InputData::Json(json)), None) => Elements::Json(JsonElements::of(tensor, &place, json)),
                (None, Some(span)) => Elements::Region(part(model, &place, span, regions)?),
                (Some(_), Some(_)) => return Err(not_in_one_place(&name, "both")),
                (None, None) => return Err(not_in_one_place(&name, "neither")),
            };
            resolved.placed.push(Placed { place, elements });
        }
        places.check_complete()?;
        Ok(resolved)
    }

    /// The shared memory that elements are in.
    pub(super) fn parts(&self) -> Vec<Part> {
        let part = |placed: &Placed| match &placed.elements {
            Elements::Region(part) => Some(part.clone()),
            Elements::Bytes(_) | Elements::Json(_) => None,
        };
        self.placed.iter().filter_map(part).collect()
    }
}

impl Placed {
    /// Bytes that are copied or read one by one when its elements are read.
    #[must_use]
    pub fn unread_bytes(&self) -> usize {
        match &self.elements {
            Elements::Bytes(_) => 0,
            Elements::Json(json) => json.json.len(),
            Elements::Region(part) => part.span().bytes as usize,
        }
    }

    /// Bytes that its elements take up at most when they are read, besides what they are read from.
    #[must_use]
    pub fn read_bytes_max(&self) -> usize {
        match &self.elements {
            Elements::Bytes(_) => 0,
            Elements::Json(json) => elements::read_bytes_max(json.datatype, json.elements, json.json.len()),
            Elements::Region(part) => part.span().bytes as usize,
        }
    }

    /// Its elements as bytes.
    ///
    /// # Errors
    /// If they are not what the tensor has, or not there any more.
    pub fn read(self) -> Result<(Place, Rope), InferError> {
        let bytes = match self.elements {
            Elements::Bytes(bytes) => bytes,
            Elements::Json(json) => json.read()?.into(),
            Elements::Region(part) => part.read()?.into(),
        };
        Ok((self.place, bytes))
    }
}

/// Elements in JSON, with all that it takes to read them on any thread.
#[derive(Debug)]
pub struct JsonElements {
    /// The input, for messages.
    field: String,
    datatype: DataType,
    elements: usize,
    json: Bytes,
}

impl JsonElements {
    fn of(tensor: &Tensor, place: &Place, json: Bytes) -> Self {
        let elements = elements_of(&place.shape).unwrap_or(usize::MAX);
        Self { field: field(&tensor.name), datatype: tensor.datatype, elements, json }
    }

    fn read(&self) -> Result<Vec<u8>, InferError> {
        let Self { field, datatype, elements, json } = self;
        elements::read_json(*datatype, *elements, json)
            .map_err(|cause| InferError::Invalid(format!("{field}.data: {cause}")))
    }
}

fn field(name: &str) -> String {
    format!("inputs['{}']", excerpt(name))
}

fn not_in_one_place(name: &str, found: &str) -> InferError {
    invalid(&format!("{}.data", field(name)), found, "either data or parameters that say where it is")
}

/// The tensor that an input of BYTES has pictures for, if it is one that its model's image pipeline makes.
fn pictured<'m>(model: &'m Model, input: &RequestInput) -> Option<&'m Tensor> {
    let tensor = &model.inputs[model.image.as_ref()?.input];
    (input.name == tensor.name && input.datatype == "BYTES").then_some(tensor)
}

/// The pictures of an input of BYTES: strings with their length before them, one for each row.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn pictures(input: &RequestInput, rows_max: usize) -> Result<Vec<Rope>, InferError> {
    let field = field(&input.name);
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

/// What a request names of a region, if a tensor can have so many bytes.
fn part(model: &Model, place: &Place, span: RegionSpan, regions: &Regions) -> Result<Part, InferError> {
    let tensor = &model.inputs[place.input];
    if tensor.datatype == DataType::Bytes {
        let most = (place.rows * tensor.bytes()) as u64;
        if span.bytes > most {
            let key = format!("{}.parameters.shared_memory_byte_size", field(&tensor.name));
            return Err(invalid(&key, span.bytes, format_args!("at most {most} (parameters: max_bytes)")));
        }
        return regions.part(span);
    }
    let expected = elements_of(&place.shape).unwrap_or(0) * tensor.datatype.bytes();
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

/// Shared memory that a tensor's parameters name, if they do.
pub(super) fn region_span(parameters: &Parameters, field: &str) -> Result<Option<RegionSpan>, InferError> {
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
