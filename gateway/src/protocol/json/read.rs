//! A body's JSON object, read without trees: what means nothing is skipped, however it is nested, and what there is too
//! much of is refused before it is stored. Tensors are not even looked at.

use std::fmt;

use frontend::excerpt;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

use crate::protocol::{DIMENSIONS_MAX, Parameters, Tensors, check_id_bytes, known_parameter};

/// Bytes of a parameter's value. All that mean something are numbers, words and names.
const VALUE_BYTES_MAX: usize = 512;

/// The object, not checked yet.
#[derive(Debug)]
pub(super) struct RawRequest<'a> {
    pub id: Option<String>,
    pub parameters: Parameters,
    pub inputs: Vec<RawInput<'a>>,
    pub outputs: Vec<RawOutput>,
}

#[derive(Debug, Deserialize)]
pub(super) struct RawInput<'a> {
    pub name: String,
    #[serde(deserialize_with = "shape")]
    pub shape: Vec<usize>,
    pub datatype: String,
    #[serde(default, deserialize_with = "parameters")]
    pub parameters: Parameters,
    #[serde(borrow)]
    pub data: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
pub(super) struct RawOutput {
    pub name: String,
    #[serde(default, deserialize_with = "parameters")]
    pub parameters: Parameters,
}

/// Reads an object that names no more than these tensors.
pub(super) fn read(json: &[u8], tensors: Tensors) -> serde_json::Result<RawRequest<'_>> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let request = deserializer.deserialize_map(Request(tensors))?;
    deserializer.end()?;
    Ok(request)
}

struct Request(Tensors);

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Field {
    Id,
    Parameters,
    Inputs,
    Outputs,
    #[serde(other)]
    Other,
}

impl<'de> Visitor<'de> for Request {
    type Value = RawRequest<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `inputs`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawRequest<'de>, A::Error> {
        let (mut id, mut parameters, mut inputs, mut outputs) = (None, None, None, None);
        while let Some(field) = map.next_key()? {
            let is_first = match field {
                Field::Id => id.replace(map.next_value_seed(Id)?).is_none(),
                Field::Parameters => parameters.replace(map.next_value_seed(OrNull(ParametersSeed))?).is_none(),
                Field::Inputs => {
                    let list = List::new(self.0.inputs, "inputs", "the model's");
                    inputs.replace(map.next_value_seed(list)?).is_none()
                }
                Field::Outputs => {
                    let list = List::new(self.0.outputs, "outputs", "the model's");
                    outputs.replace(map.next_value_seed(OrNull(list))?).is_none()
                }
                Field::Other => map.next_value::<IgnoredAny>().map(|_| true)?,
            };
            if !is_first {
                return Err(A::Error::custom(
                    "found `id`, `parameters`, `inputs` or `outputs` twice, expected it once",
                ));
            }
        }
        Ok(RawRequest {
            id: id.flatten(),
            parameters: parameters.flatten().unwrap_or_default(),
            inputs: inputs.ok_or_else(|| A::Error::missing_field("inputs"))?,
            outputs: outputs.flatten().unwrap_or_default(),
        })
    }
}

/// What may be left out, and is also left out by a null.
struct OrNull<S>(S);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for OrNull<S> {
    type Value = Option<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de, S: DeserializeSeed<'de>> Visitor<'de> for OrNull<S> {
    type Value = Option<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or null")
    }

    fn visit_none<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        self.0.deserialize(deserializer).map(Some)
    }
}

/// What lists hold.
trait Element {
    /// Says, in Triton's words, that it is in the list already.
    fn repeated(&self, _list: &[Self]) -> Option<String>
    where
        Self: Sized,
    {
        None
    }
}

impl Element for usize {}
impl Element for RawInput<'_> {}
impl Element for RawOutput {
    fn repeated(&self, list: &[Self]) -> Option<String> {
        let is_there = list.iter().any(|other| other.name == self.name);
        is_there.then(|| format!("output '{}' already exists in request", excerpt(&self.name)))
    }
}

/// A list that is not longer than so.
struct List<T> {
    max: usize,
    field: &'static str,
    whose: &'static str,
    of: std::marker::PhantomData<T>,
}

impl<T> List<T> {
    fn new(max: usize, field: &'static str, whose: &'static str) -> Self {
        Self { max, field, whose, of: std::marker::PhantomData }
    }
}

impl<'de, T: Deserialize<'de> + Element> DeserializeSeed<'de> for List<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de> + Element> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}", self.field)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let Self { max, field, whose, .. } = self;
        let mut list = Vec::new();
        while let Some(next) = seq.next_element::<T>()? {
            if list.len() == max {
                let repeated = next.repeated(&list).map_or(String::new(), |repeated| format!(": {repeated}"));
                return Err(A::Error::custom(format_args!("{field}: found more than {whose} {max}{repeated}")));
            }
            list.push(next);
        }
        Ok(list)
    }
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    List::new(DIMENSIONS_MAX, "shape", "the most dimensions,").deserialize(deserializer)
}

/// A string that is not too long, or nothing.
struct Id;

impl<'de> DeserializeSeed<'de> for Id {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<String>, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Id {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string as `id`")
    }

    fn visit_none<E: Error>(self) -> Result<Option<String>, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<String>, D::Error> {
        deserializer.deserialize_str(self)
    }

    fn visit_str<E: Error>(self, id: &str) -> Result<Option<String>, E> {
        check_id_bytes(id.len()).map(|()| Some(id.to_owned())).map_err(E::custom)
    }
}

/// Those parameters that mean something.
struct ParametersSeed;

fn parameters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Parameters, D::Error> {
    OrNull(ParametersSeed).deserialize(deserializer).map(Option::unwrap_or_default)
}

impl<'de> DeserializeSeed<'de> for ParametersSeed {
    type Value = Parameters;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Parameters, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ParametersSeed {
    type Value = Parameters;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of parameters")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parameters, A::Error> {
        let mut parameters = Parameters::new();
        while let Some(name) = map.next_key_seed(Name)? {
            let Some(name) = name else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let text = map.next_value::<&RawValue>()?.get();
            if text.len() > VALUE_BYTES_MAX {
                let found = text.len();
                let wrong = format!("parameters.{name}: found {found} bytes, expected at most {VALUE_BYTES_MAX}");
                return Err(A::Error::custom(wrong));
            }
            parameters.insert(name.to_owned(), serde_json::from_str::<Value>(text).map_err(A::Error::custom)?);
        }
        Ok(parameters)
    }
}

/// A parameter's name, if it means something.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<&'static str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a parameter's name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Option<&'static str>, E> {
        Ok(known_parameter(name))
    }
}
