//! What a request to load or unload a model gives: parameters, of which those of a load may be a configuration and the
//! files of a model (Triton's extension "model_repository"). In JSON files are base64, which is decoded as it is read:
//! nothing else of a body that may be large is kept.

use std::{collections::BTreeMap, fmt, sync::Arc};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use frontend::{
    error::{InferError, invalid},
    excerpt,
};
use proto::{Brought, frontend_to_scheduler::ModelChange};
use repository::{BroughtFile, FILES_MAX, Held, Store};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use tokio::sync::Semaphore;

use crate::{
    api::{ModelRepositoryParameter, model_repository_parameter::ParameterChoice},
    budget::Charge,
};

/// Parameters of a request: a file for each, and a few others.
pub const PARAMETERS_MAX: usize = FILES_MAX + 64;
/// What names a file.
const FILE: &str = "file:";

/// A parameter's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// A text.
    Text(String),
    /// What is in a file.
    File(Bytes),
    /// Yes or no.
    Flag(bool),
    /// Whatever no parameter is.
    Other,
}

/// The parameters of a request to load or unload a model.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parameters(Vec<(String, Given)>);

/// What a load or an unload asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Whether what an ensemble asks is to be unloaded with it.
    pub(crate) with_dependents: bool,
    /// A configuration (JSON) instead of the repository's.
    config: Option<String>,
    /// Those of an ensemble, instead of those that it has.
    weights: Option<String>,
    /// By path.
    files: Vec<(String, Bytes)>,
}

/// Where the files that loads bring along are kept, of a frontend that takes them.
#[derive(Debug)]
pub struct Intake {
    store: Store,
    /// Of all that is kept.
    bytes_max: u64,
    /// One load's files are written after another's: clients' loads are rare, and must not keep others from the disk.
    writing: Arc<Semaphore>,
}

impl Parameters {
    /// Reads the body of a REST request; nothing counts as an empty object.
    ///
    /// # Errors
    /// If it is no JSON object, or holds too much.
    pub fn read(body: &[u8]) -> Result<Self, InferError> {
        if body.is_empty() {
            return Ok(Self::default());
        }
        let body: Result<Body, _> = serde_json::from_slice(body);
        let wrong = |error| InferError::Invalid(format!("body: {error}; expected a JSON object"));
        body.map(|Body(parameters)| parameters).map_err(wrong)
    }

    /// What a change of a model asks for.
    ///
    /// # Errors
    /// If a parameter is not known, or is not what it should be.
    pub(crate) fn asked(self, to: ModelChange, model: &str) -> Result<Asked, InferError> {
        let mut asked = Asked::default();
        for (name, given) in self.0 {
            match (to, &name[..], given) {
                // As Triton calls the members of an ensemble.
                (ModelChange::Unload, "unload_dependents", given) => {
                    asked.with_dependents = given == Given::Flag(true);
                }
                (ModelChange::Unload, other, _) => {
                    return Err(invalid("parameters", excerpt(other), "unload_dependents"));
                }
                (ModelChange::Load, "config", Given::Text(config)) => asked.config = Some(config),
                (ModelChange::Load, "config", _) => {
                    return Err(invalid("config", "something else", "a text: a model's configuration in JSON"));
                }
                (ModelChange::Load, "weights", Given::Text(weights)) => asked.weights = Some(weights),
                (ModelChange::Load, "weights", _) => {
                    let expected = "a text: a number for each step of an ensemble, with commas between";
                    return Err(invalid("weights", "something else", expected));
                }
                (ModelChange::Load, other, given) => {
                    let wrong = || invalid("parameters", excerpt(other), "config, weights, or file:<version>/<file>");
                    let path = other.strip_prefix(FILE).ok_or_else(wrong)?;
                    let Given::File(bytes) = given else {
                        let expected = "with what is in the file: bytes in gRPC, base64 in JSON";
                        let found = excerpt(other);
                        return Err(refused(model, &format!("parameters: found {found}, expected it {expected}")));
                    };
                    asked.files.push((path.to_owned(), bytes));
                }
            }
        }
        Ok(asked)
    }
}

impl From<BTreeMap<String, ModelRepositoryParameter>> for Parameters {
    fn from(parameters: BTreeMap<String, ModelRepositoryParameter>) -> Self {
        let given = |parameter: ModelRepositoryParameter| match parameter.parameter_choice {
            Some(ParameterChoice::StringParam(text)) => Given::Text(text),
            Some(ParameterChoice::BytesParam(bytes)) => Given::File(bytes),
            Some(ParameterChoice::BoolParam(flag)) => Given::Flag(flag),
            _ => Given::Other,
        };
        Self(parameters.into_iter().map(|(name, parameter)| (name, given(parameter))).collect())
    }
}

impl Asked {
    /// If it asks for other weights alone, it asks for the configuration that these make.
    ///
    /// # Errors
    /// If they make none, or it asks for something else besides.
    pub(crate) fn with_weights(
        mut self,
        configuration: impl FnOnce(&str) -> Result<String, InferError>,
    ) -> Result<Self, InferError> {
        let Some(weights) = self.weights.take() else { return Ok(self) };
        if self.config.is_some() || !self.files.is_empty() {
            return Err(invalid("weights", "it beside config or files", "it alone"));
        }
        self.config = Some(configuration(&weights)?);
        Ok(self)
    }

    /// What backends are to be told, and what holds the files that it names. They are written beside the caller's
    /// thread; until then `charge` is for their bytes in memory.
    ///
    /// # Errors
    /// If files are not taken, or wrong, or come without a configuration, or find no room.
    pub(crate) async fn brought(
        self,
        model: &str,
        intake: Option<&Intake>,
        charge: Option<Charge>,
    ) -> Result<(Option<Brought>, Option<Held>), InferError> {
        let Self { config, files, .. } = self;
        let Some((first, _)) = files.first() else {
            return Ok((config.map(|config| Brought { config, files: None }), None));
        };
        let found = format!("parameters: found {}", excerpt(&format!("{FILE}{first}")));
        let intake = intake.ok_or_else(|| {
            let expected = "expected no files: this frontend takes none (load_files)";
            refused(model, &format!("{found}, {expected}"))
        })?;
        // As in Triton: it reminds of what the repository has not being used.
        let without = || refused(model, &format!("{found} and no config, expected the files' configuration with them"));
        let config = config.ok_or_else(without)?;
        let turn = Arc::clone(&intake.writing).acquire_owned().await.expect("it is never closed");
        let (store, bytes_max) = (intake.store.clone(), intake.bytes_max);
        let name = model.to_owned();
        let keep = move || {
            // Whether or not anybody still waits.
            let _held = (turn, charge);
            let files: Vec<_> = files.iter().map(|(path, bytes)| BroughtFile { path, bytes }).collect();
            store.keep(&name, &files, bytes_max)
        };
        let kept = tokio::task::spawn_blocking(keep).await.map_err(|error| refused(model, &error.to_string()))?;
        let held = kept.map_err(|error| refused(model, &error.to_string()))?;
        Ok((Some(Brought { config, files: Some(held.digest()) }), Some(held)))
    }
}

impl Intake {
    /// Keeps files in this store, together of so many bytes at most.
    #[must_use]
    pub fn new(store: Store, bytes_max: u64) -> Self {
        Self { store, bytes_max, writing: Arc::new(Semaphore::new(1)) }
    }
}

/// As Triton says it where it cannot use files.
fn refused(model: &str, reason: &str) -> InferError {
    let text = format!("failed to load '{}', failed to poll from model repository: {reason}", excerpt(model));
    InferError::ChangeFailed(text)
}

/// A body, of which nothing but the parameters matters.
struct Body(Parameters);

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BodyVisitor)
    }
}

struct BodyVisitor;

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut parameters = Parameters::default();
        while let Some(key) = map.next_key::<String>()? {
            match &key[..] {
                "parameters" => parameters = map.next_value()?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Body(parameters))
    }
}

impl<'de> Deserialize<'de> for Parameters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ParametersVisitor)
    }
}

struct ParametersVisitor;

impl<'de> Visitor<'de> for ParametersVisitor {
    type Value = Parameters;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("parameters, an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parameters, A::Error> {
        let mut parameters = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if parameters.len() >= PARAMETERS_MAX {
                return Err(Error::custom(format_args!("found more than {PARAMETERS_MAX} parameters")));
            }
            let given = map.next_value_seed(GivenVisitor { is_file: name.starts_with(FILE) })?;
            parameters.push((name, given));
        }
        Ok(Parameters(parameters))
    }
}

/// Reads a parameter's value, and keeps nothing of what is none.
struct GivenVisitor {
    is_file: bool,
}

impl<'de> DeserializeSeed<'de> for GivenVisitor {
    type Value = Given;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Given, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for GivenVisitor {
    type Value = Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a parameter")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Given, E> {
        Ok(match self.is_file {
            true => BASE64_STANDARD.decode(text).map_or(Given::Other, |bytes| Given::File(bytes.into())),
            false => Given::Text(text.to_owned()),
        })
    }

    fn visit_bool<E: Error>(self, flag: bool) -> Result<Given, E> {
        Ok(Given::Flag(flag))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Given, E> {
        Ok(Given::Other)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Given, E> {
        Ok(Given::Other)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Given, E> {
        Ok(Given::Other)
    }

    fn visit_unit<E: Error>(self) -> Result<Given, E> {
        Ok(Given::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Given, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Given::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Given, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Given::Other)
    }
}

#[cfg(test)]
mod tests;
