//! What a message of gRPC's infer request holds, as its encoding tells (Protocol Buffers, "Encoding"), before any of it
//! is decoded: a message of 2 bytes for each input becomes one of 300 bytes for each. Linear in its fields, and stores
//! nothing.

use std::ops::Range;

use bytes::Bytes;
use frontend::error::{InferError, invalid};
use repository::Model;
use thiserror::Error;

use super::super::{DIMENSIONS_MAX, check_id_bytes};
use crate::api::{InferParameter, model_infer_request::InferInputTensor};

/// Parameters of a request, and of each of its tensors.
const PARAMETERS_MAX: usize = 64;
/// Bytes of a model's name, and of its version.
const TEXT_BYTES_MAX: usize = 1024;
/// What an entry of a map takes up besides its key and value, generously.
const ENTRY_BYTES: usize = 64;

/// Why a message has no outline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum OutlineError {
    /// It has more fields than are to be looked at now.
    #[error("it has more than {0} fields")]
    TooLong(usize),
    /// It is no message of this protocol.
    #[error("failed to decode Protobuf message: {0}")]
    Malformed(&'static str),
}

/// What a message holds.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Outline {
    model_name: Range<usize>,
    model_version: Range<usize>,
    id: Range<usize>,
    inputs: usize,
    outputs: usize,
    raw: usize,
    parameters: usize,
    /// The most that any input has.
    dimensions: usize,
    /// Of `raw_input_contents`, which are not copied when they are decoded.
    raw_bytes: usize,
    /// Of typed contents once they are decoded.
    contents_bytes: usize,
    bytes: usize,
}

/// Checks that a request to load a model has so many fields at most; fields of messages within it do not count.
///
/// # Errors
/// If it has more, or they do not follow each other to its end.
pub fn check_load(message: &[u8], fields_max: usize) -> Result<(), OutlineError> {
    let mut fields = Fields { message, at: 0, end: message.len(), left: fields_max, max: fields_max };
    while let Some(Field { number, value }) = fields.next()? {
        if (1..=3).contains(&number) {
            value.bytes()?;
        }
    }
    Ok(())
}

impl Outline {
    /// Looks at a message, at no more than so many fields of it.
    ///
    /// # Errors
    /// If there are more, or they do not follow each other to its end.
    pub fn of(message: &[u8], fields_max: usize) -> Result<Self, OutlineError> {
        let mut outline = Self { bytes: message.len(), ..Self::default() };
        let mut fields = Fields { message, at: 0, end: message.len(), left: fields_max, max: fields_max };
        while let Some(Field { number, value }) = fields.next()? {
            match number {
                1 => outline.model_name = value.bytes()?,
                2 => outline.model_version = value.bytes()?,
                3 => outline.id = value.bytes()?,
                4 => outline.take_parameter(&value)?,
                5 => {
                    outline.inputs += 1;
                    fields.inside(value.bytes()?, |fields| outline.take_input(fields))?;
                }
                6 => {
                    outline.outputs += 1;
                    fields.inside(value.bytes()?, |fields| outline.take_output(fields))?;
                }
                7 => {
                    outline.raw += 1;
                    outline.raw_bytes += value.bytes()?.len();
                }
                _ => {}
            }
        }
        Ok(outline)
    }

    fn take_input(&mut self, fields: &mut Fields<'_>) -> Result<(), OutlineError> {
        let mut dimensions = 0;
        while let Some(Field { number, value }) = fields.next()? {
            match number {
                // Each takes up a byte at least.
                3 => dimensions += value.packed(),
                4 => self.take_parameter(&value)?,
                5 => fields.inside(value.bytes()?, |fields| self.take_contents(fields))?,
                _ => {}
            }
        }
        self.dimensions = self.dimensions.max(dimensions);
        Ok(())
    }

    fn take_output(&mut self, fields: &mut Fields<'_>) -> Result<(), OutlineError> {
        while let Some(Field { number, value }) = fields.next()? {
            if number == 2 {
                self.take_parameter(&value)?;
            }
        }
        Ok(())
    }

    fn take_parameter(&mut self, value: &Value) -> Result<(), OutlineError> {
        value.bytes()?;
        self.parameters += 1;
        Ok(())
    }

    fn take_contents(&mut self, fields: &mut Fields<'_>) -> Result<(), OutlineError> {
        while let Some(Field { number, value }) = fields.next()? {
            self.contents_bytes += match (number, value) {
                // Booleans and varints: of a byte at least, for one, four or eight.
                (1, value) => value.packed(),
                (2 | 4, value) => value.packed() * size_of::<u32>(),
                (3 | 5, value) => value.packed() * size_of::<u64>(),
                (6 | 7, Value::Bytes(at)) => at.len(),
                (6 | 7, _) => size_of::<u64>(),
                (8, _) => size_of::<Bytes>(),
                _ => 0,
            };
        }
        Ok(())
    }

    /// The model's name.
    ///
    /// # Errors
    /// If it is no text.
    pub fn model_name<'a>(&self, message: &'a [u8]) -> Result<&'a str, OutlineError> {
        text(message, &self.model_name)
    }

    /// The model's version; empty if none is wanted.
    ///
    /// # Errors
    /// If it is no text.
    pub fn model_version<'a>(&self, message: &'a [u8]) -> Result<&'a str, OutlineError> {
        text(message, &self.model_version)
    }

    /// The request's id, if it is one that can be told.
    #[must_use]
    pub fn id<'a>(&self, message: &'a [u8]) -> &'a str {
        text(message, &self.id).ok().filter(|id| check_id_bytes(id.len()).is_ok()).unwrap_or_default()
    }

    /// Bytes that are copied or read one by one when the message is decoded.
    #[must_use]
    pub fn parsed_bytes(&self) -> usize {
        self.bytes - self.raw_bytes
    }

    /// Bytes that the decoded message takes up besides the encoded one, and what becomes of its typed contents: lists
    /// grow by doubling.
    #[must_use]
    pub fn decoded_bytes(&self) -> usize {
        let tensors = (self.inputs + self.outputs) * size_of::<InferInputTensor>();
        let entries = self.parameters * (size_of::<InferParameter>() + ENTRY_BYTES);
        self.parsed_bytes() + 2 * tensors + entries + self.raw * size_of::<Bytes>() + 3 * self.contents_bytes
    }

    /// Checks that it names no more than its model has.
    ///
    /// # Errors
    /// [`InferError::Invalid`], which names the field, what was found and what was expected.
    pub fn check(&self, model: &Model) -> Result<(), InferError> {
        let (inputs, outputs) = (model.inputs.len(), model.outputs.len());
        check_id_bytes(self.id.len())?;
        for (field, found, max) in [
            ("inputs", self.inputs, inputs),
            ("outputs", self.outputs, outputs),
            ("raw_input_contents", self.raw, inputs),
            ("inputs[].shape", self.dimensions, DIMENSIONS_MAX * size_of::<u64>()),
            ("parameters", self.parameters, PARAMETERS_MAX * (1 + inputs + outputs)),
        ] {
            if found > max {
                return Err(invalid(field, found, format_args!("at most {max}")));
            }
        }
        Ok(())
    }
}

fn text<'a>(message: &'a [u8], at: &Range<usize>) -> Result<&'a str, OutlineError> {
    if at.len() > TEXT_BYTES_MAX {
        return Err(OutlineError::Malformed("a name or version has more than 1024 bytes"));
    }
    str::from_utf8(&message[at.clone()]).map_err(|_| OutlineError::Malformed("a name or id is not UTF-8"))
}

struct Field {
    number: u64,
    value: Value,
}

/// A field's value; numbers do not matter.
enum Value {
    Number,
    Bytes(Range<usize>),
}

impl Value {
    /// Where its bytes are. A number there is refused: prost takes an entry of a map for bytes whatever its wire type
    /// is, and would find other fields in the rest of the message than those that were counted.
    fn bytes(&self) -> Result<Range<usize>, OutlineError> {
        match self {
            Self::Number => Err(OutlineError::Malformed("a field is a number, expected bytes")),
            Self::Bytes(at) => Ok(at.clone()),
        }
    }

    /// Elements of a repeated number at most: they may be packed.
    fn packed(&self) -> usize {
        match self {
            Self::Number => 1,
            Self::Bytes(at) => at.len(),
        }
    }
}

/// The fields of a message, or of one within it.
struct Fields<'a> {
    message: &'a [u8],
    at: usize,
    end: usize,
    left: usize,
    max: usize,
}

impl Fields<'_> {
    fn next(&mut self) -> Result<Option<Field>, OutlineError> {
        if self.at == self.end {
            return Ok(None);
        }
        self.left = self.left.checked_sub(1).ok_or(OutlineError::TooLong(self.max))?;
        let key = self.varint()?;
        let value = match key & 7 {
            0 => {
                self.varint()?;
                Value::Number
            }
            1 => self.skip(8).map(|_| Value::Number)?,
            2 => {
                let bytes = self.varint()?;
                Value::Bytes(self.skip(bytes)?)
            }
            5 => self.skip(4).map(|_| Value::Number)?,
            _ => return Err(OutlineError::Malformed("a field has a wire type that this protocol does not have")),
        };
        Ok(Some(Field { number: key >> 3, value }))
    }

    /// Goes through the fields of a message within this one.
    fn inside(
        &mut self,
        Range { start, end }: Range<usize>,
        take: impl FnOnce(&mut Self) -> Result<(), OutlineError>,
    ) -> Result<(), OutlineError> {
        let (at, outer_end) = (self.at, self.end);
        (self.at, self.end) = (start, end);
        take(self)?;
        (self.at, self.end) = (at, outer_end);
        Ok(())
    }

    fn varint(&mut self) -> Result<u64, OutlineError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.message[self.at..self.end].first().ok_or(OutlineError::Malformed("it is cut off"))?;
            self.at += 1;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(OutlineError::Malformed("a number has more than 64 bits"))
    }

    fn skip(&mut self, bytes: u64) -> Result<Range<usize>, OutlineError> {
        let left = self.end - self.at;
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= left);
        let start = self.at;
        self.at += bytes.ok_or(OutlineError::Malformed("it is cut off"))?;
        Ok(start..self.at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;
    use repository::DataType;

    use super::*;
    use crate::{
        api::{
            InferTensorContents, ModelInferRequest, ModelRepositoryParameter, RepositoryModelLoadRequest,
            infer_parameter::ParameterChoice, model_infer_request::InferRequestedOutputTensor,
        },
        testing::{model, tensor},
    };

    fn parameters(count: usize) -> std::collections::BTreeMap<String, InferParameter> {
        let value = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(-1)) };
        (0..count).map(|index| (index.to_string(), value.clone())).collect()
    }

    prop_compose! {
        fn input()(
            name in "[a-z]{0,9}", shape in proptest::collection::vec(any::<i64>(), 0..4), count in 0..3usize,
            ints in proptest::collection::vec(any::<i32>(), 0..9),
            doubles in proptest::collection::vec(any::<f64>(), 0..9),
        ) -> InferInputTensor {
            let contents = InferTensorContents {
                int_contents: ints,
                fp64_contents: doubles,
                bytes_contents: vec![Bytes::from_static(b"ab"); count],
                ..InferTensorContents::default()
            };
            let parameters = parameters(count);
            InferInputTensor { name, shape, parameters, contents: Some(contents), ..Default::default() }
        }
    }

    #[test]
    fn fields_are_counted_before_they_are_decoded() {
        let load = |count: usize| {
            let parameter = |index: usize| (index.to_string(), ModelRepositoryParameter::default());
            let parameters = (0..count).map(parameter).collect();
            RepositoryModelLoadRequest { parameters, ..Default::default() }.encode_to_vec()
        };
        assert_eq!((check_load(&[], 0), check_load(&load(9), 9)), (Ok(()), Ok(())));
        assert_eq!(check_load(&load(10), 9), Err(OutlineError::TooLong(9)));
        let cut_off = Err(OutlineError::Malformed("it is cut off"));
        assert_eq!(check_load(&load(2)[..4], 9), cut_off);
        assert_eq!(check_load(&[3 << 3 | 2, 0].repeat(30_000_000), 320), Err(OutlineError::TooLong(320)));
    }

    proptest! {
        #[test]
        fn an_outline_counts_what_decoding_finds(
            inputs in proptest::collection::vec(input(), 0..5),
            id in "[a-z]{0,9}",
            outputs in 0..4usize,
            count in 0..4usize,
            raw in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..4),
        ) {
            let output = InferRequestedOutputTensor { name: "o".into(), parameters: parameters(count) };
            let message = ModelInferRequest {
                model_name: "m".into(),
                model_version: "2".into(),
                id: id.clone(),
                parameters: parameters(count),
                inputs,
                outputs: vec![output; outputs],
                raw_input_contents: raw.into_iter().map(Bytes::from).collect(),
            };
            let bytes = message.encode_to_vec();
            let outline = Outline::of(&bytes, 10_000).unwrap();
            prop_assert_eq!((outline.model_name(&bytes), outline.model_version(&bytes)), (Ok("m"), Ok("2")));
            prop_assert_eq!(outline.id(&bytes), id);
            prop_assert_eq!(
                (outline.inputs, outline.outputs, outline.raw),
                (message.inputs.len(), message.outputs.len(), message.raw_input_contents.len())
            );
            let within: usize = message.inputs.iter().map(|input| input.parameters.len()).sum();
            prop_assert_eq!(outline.parameters, count + count * outputs + within);
            let dims = message.inputs.iter().map(|input| input.shape.len()).max().unwrap_or(0);
            prop_assert!((dims..=10 * dims).contains(&outline.dimensions));
            let contents = message.inputs.iter().filter_map(|input| input.contents.as_ref());
            let least: usize = contents.map(|all| {
                4 * all.int_contents.len() + 8 * all.fp64_contents.len() + size_of::<Bytes>() * all.bytes_contents.len()
            }).sum();
            prop_assert!(outline.contents_bytes >= least, "{} of {least}", outline.contents_bytes);
            let raw: usize = message.raw_input_contents.iter().map(Bytes::len).sum();
            prop_assert_eq!(outline.parsed_bytes(), bytes.len() - raw);
        }

        /// Fields of any number and wire type, some cut off: what decodes was counted, and was not called malformed.
        #[test]
        fn what_decodes_has_been_counted(fields in proptest::collection::vec(field(), 0..12)) {
            let bytes = fields.concat();
            let outline = Outline::of(&bytes, 1000);
            if let Ok(message) = ModelInferRequest::decode(&bytes[..]) {
                match outline {
                    Ok(outline) => prop_assert_eq!(
                        (outline.inputs, outline.outputs, outline.raw),
                        (message.inputs.len(), message.outputs.len(), message.raw_input_contents.len())
                    ),
                    // What prost takes and this does not.
                    Err(OutlineError::Malformed(why)) => {
                        prop_assert!(why.contains("wire type") || why.contains("is a number"), "{why}");
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                }
            }
        }
    }

    /// An encoded field.
    fn field() -> impl Strategy<Value = Vec<u8>> {
        let payload = proptest::collection::vec(0u8..80, 0..9);
        (1u8..9, prop_oneof![4 => Just(2u8), 1 => 0u8..6], payload).prop_map(|(number, wire_type, payload)| {
            let length = (wire_type == 2).then_some(payload.len() as u8);
            [number << 3 | wire_type].into_iter().chain(length).chain(payload).collect()
        })
    }

    #[test]
    fn nothing_hides_in_an_entry_of_a_map_that_is_a_number() {
        // Read as a number of 8 bytes, one field of 2,000 follows. prost reads an entry of none, two unknown numbers,
        // and a field that ends where the inputs begin.
        let number = [4 << 3 | 1, 0, 0x78, 0x80, 0, 0x78, 0, 7 << 3 | 2, 3];
        let raw = [7 << 3 | 2, 0xd0, 0x0f];
        let hidden = [&number[..], &raw, &[5 << 3 | 2, 0].repeat(1000)].concat();
        assert_eq!(ModelInferRequest::decode(&hidden[..]).map(|message| message.inputs.len()), Ok(1000));
        let refused = Err(OutlineError::Malformed("a field is a number, expected bytes"));
        assert_eq!(Outline::of(&hidden, 4096).map(|outline| outline.inputs), refused);
        assert_eq!(check_load(&[3 << 3, 0], 320), refused.map(|_| ()));
    }

    fn two() -> Model {
        let inputs = vec![tensor("a", DataType::Uint8, &[3]), tensor("b", DataType::Fp32, &[1])];
        model("two", inputs, vec![tensor("x", DataType::Uint8, &[2])])
    }

    #[test]
    fn three_million_empty_inputs_are_refused_for_what_they_are() {
        // Field 5, of no bytes.
        let message = [5 << 3 | 2, 0].repeat(3_500_000);
        assert_eq!(Outline::of(&message, 4096), Err(OutlineError::TooLong(4096)));
        let outline = Outline::of(&message, usize::MAX).unwrap();
        let error = outline.check(&two()).unwrap_err().to_string();
        assert_eq!(error, "inputs: found 3500000, expected at most 2");
    }

    #[test]
    fn each_kind_of_too_many_is_told() {
        let refused = |message: &ModelInferRequest| {
            let bytes = message.encode_to_vec();
            Outline::of(&bytes, usize::MAX).unwrap().check(&two()).unwrap_err().to_string()
        };
        let input = |parameters, shape| InferInputTensor { parameters, shape, ..InferInputTensor::default() };
        let outputs = vec![InferRequestedOutputTensor::default(); 2];
        let of = |input| ModelInferRequest { inputs: vec![input], ..Default::default() };
        let cases = [
            (ModelInferRequest { outputs, ..Default::default() }, "outputs: found 2, expected at most 1"),
            (
                ModelInferRequest { raw_input_contents: vec![Bytes::new(); 3], ..Default::default() },
                "raw_input_contents: found 3, expected at most 2",
            ),
            (of(input(parameters(1000), vec![])), "parameters: found 1000, expected at most 256"),
            (of(input(parameters(0), vec![1; 1000])), "inputs[].shape: found 1000, expected at most 512"),
            (
                ModelInferRequest { id: "x".repeat(300), ..Default::default() },
                "id: found 300 bytes, expected at most 256",
            ),
        ];
        for (message, expected) in cases {
            assert_eq!(refused(&message), expected);
        }
    }
}
