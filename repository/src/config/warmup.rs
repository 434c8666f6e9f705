//! `model_warmup`: requests that a model has run before it is ready (Triton model_config.proto, `ModelWarmup`).

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use prost_reflect::{DynamicMessage, MapKey, Value};

use super::Configuration;
use crate::{
    config::file::{get, text},
    error::RepositoryError,
    model::Model,
    tensor::{DataType, Tensor},
};

/// Samples of one model, at most.
const SAMPLES_MAX: usize = 64;
/// Runs of all samples of one model together, at most.
const RUNS_MAX: usize = 10_000;

/// A request that a model is to run, so many times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warmup {
    /// As the configuration calls it.
    pub name: String,
    /// Rows of the request: at least 1, and no more than an execution takes.
    pub rows: usize,
    /// At least 1.
    pub runs: usize,
    /// What each of the model's inputs is, in their order.
    pub inputs: Vec<WarmupInput>,
}

/// An input of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmupInput {
    /// Its shape, the batch dimension left out: one that requests may have.
    pub shape: Vec<usize>,
    /// What it is filled with.
    pub data: WarmupData,
}

/// What an input is filled with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WarmupData {
    /// Zeros.
    Zero,
    /// Whatever; each byte is at random.
    Random,
    /// The bytes of all rows, from this file.
    File(PathBuf),
}

impl WarmupInput {
    /// Bytes of one row's elements; of strings the least, which are empty ones.
    #[must_use]
    pub fn row_bytes(&self, tensor: &Tensor) -> usize {
        self.shape.iter().product::<usize>() * tensor.datatype.bytes()
    }

    /// The elements of so many rows of `tensor`; random ones by `random`, but for strings, which are empty.
    ///
    /// # Errors
    /// If the file does not hold just these.
    pub fn bytes(
        &self,
        tensor: &Tensor,
        rows: usize,
        mut random: impl FnMut() -> u8,
    ) -> Result<Vec<u8>, RepositoryError> {
        let bytes = self.row_bytes(tensor) * rows;
        let WarmupData::File(path) = &self.data else {
            let is_random = self.data == WarmupData::Random && tensor.datatype != DataType::Bytes;
            return Ok((0..bytes).map(|_| if is_random { random() } else { 0 }).collect());
        };
        let wrong = |found: &dyn fmt::Display| {
            let expected = format!("{bytes}, {rows} rows of input \"{}\"", tensor.name);
            RepositoryError(format!("{}: found {found} bytes, expected {expected}", path.display()))
        };
        let length = fs::metadata(path).map_err(|error| RepositoryError(format!("{}: {error}", path.display())))?.len();
        if length != bytes as u64 {
            return Err(wrong(&length));
        }
        let read = fs::read(path).map_err(|error| RepositoryError(format!("{}: {error}", path.display())))?;
        if read.len() == bytes { Ok(read) } else { Err(wrong(&read.len())) }
    }
}

impl Configuration {
    /// What `model`, whose configuration this is, and whose folder is `folder`, is to run before it is ready.
    ///
    /// # Errors
    /// What is wrong with a sample, by its name.
    pub fn warmup(&self, model: &Model, folder: &Path) -> Result<Vec<Warmup>, RepositoryError> {
        let samples = get(&self.message, "model_warmup");
        let samples = samples.as_list().unwrap_or_default();
        if samples.len() > SAMPLES_MAX {
            let found = samples.len();
            return Err(RepositoryError(format!(
                "model_warmup: found {found} samples, expected at most {SAMPLES_MAX}"
            )));
        }
        let samples = samples.iter().filter_map(Value::as_message);
        let samples: Vec<Warmup> =
            samples.map(|message| Sample { message, model, folder }.read()).collect::<Result<_, _>>()?;
        let runs: usize = samples.iter().map(|sample| sample.runs).sum();
        if runs > RUNS_MAX {
            return Err(RepositoryError(format!("model_warmup: found {runs} runs, expected at most {RUNS_MAX}")));
        }
        Ok(samples)
    }
}

/// One sample as it is written, and whose.
struct Sample<'a> {
    message: &'a DynamicMessage,
    model: &'a Model,
    folder: &'a Path,
}

impl Sample<'_> {
    fn read(&self) -> Result<Warmup, RepositoryError> {
        let number = |key: &str| get(self.message, key).as_u32().unwrap_or_default() as usize;
        let (rows, rows_max) = (number("batch_size").max(1), self.model.max_batch);
        if rows > rows_max {
            return Err(self.wrong("batch_size", rows, format_args!("at most {rows_max}")));
        }
        let given = get(self.message, "inputs");
        let given = given.as_map().expect("the schema says map");
        let is_unknown = |key: &&MapKey| self.model.inputs.iter().all(|input| Some(&input.name[..]) != key.as_str());
        if let Some(unknown) = given.keys().find(is_unknown) {
            let known: Vec<&str> = self.model.inputs.iter().map(|input| &input.name[..]).collect();
            let found = format!("\"{}\"", unknown.as_str().unwrap_or_default());
            return Err(self.wrong("inputs", found, format_args!("the model's: {}", known.join(", "))));
        }
        let read = |input: &Tensor| match given.get(&MapKey::String(input.name.clone())) {
            Some(Value::Message(found)) => self.read_input(input, found),
            _ => Err(self.wrong("inputs", format_args!("no \"{}\"", input.name), "all inputs of the model")),
        };
        let inputs = self.model.inputs.iter().map(read).collect::<Result<_, _>>()?;
        Ok(Warmup { name: text(self.message, "name"), rows, runs: number("count").max(1), inputs })
    }

    fn read_input(&self, input: &Tensor, found: &DynamicMessage) -> Result<WarmupInput, RepositoryError> {
        let key = |key: &str| format!("inputs \"{}\".{key}", input.name);
        let number = get(found, "data_type").as_enum_number().unwrap_or_default();
        let spelled =
            crate::config::file::data_types().and_then(|types| Some(types.get_value(number)?.name().to_owned()));
        let expected = format!("TYPE_{}", input.datatype);
        if spelled.as_ref() != Some(&expected) {
            return Err(self.wrong(&key("data_type"), spelled.unwrap_or_else(|| number.to_string()), expected));
        }
        let dims = crate::config::file::dims(found, "dims");
        let shape: Option<Vec<usize>> = dims.iter().map(|&dim| usize::try_from(dim).ok()).collect();
        let Some(shape) = shape.filter(|shape| input.accepts(shape)) else {
            return Err(self.wrong(&key("dims"), format!("{dims:?}"), format!("{:?}", input.shape)));
        };
        let data = read_data(found, self.folder);
        let data = data.map_err(|(found, expected)| self.wrong(&key("input_data_file"), found, expected))?;
        if matches!(data, WarmupData::File(_)) && input.datatype == DataType::Bytes {
            return Err(self.wrong(&key("input_data_file"), "a file", "zero_data or random_data: empty strings"));
        }
        Ok(WarmupInput { shape, data })
    }

    fn wrong(&self, key: &str, found: impl fmt::Display, expected: impl fmt::Display) -> RepositoryError {
        let (folder, name) = (self.folder.display(), text(self.message, "name"));
        RepositoryError(format!("{folder}: model_warmup \"{name}\": {key}: found {found}, expected {expected}"))
    }
}

/// What an input is filled with; or what was found, and what was expected, of its file.
fn read_data(input: &DynamicMessage, folder: &Path) -> Result<WarmupData, (String, String)> {
    if input.has_field_by_name("random_data") {
        return Ok(WarmupData::Random);
    }
    if !input.has_field_by_name("input_data_file") {
        return Ok(WarmupData::Zero);
    }
    let file = text(input, "input_data_file");
    let path = folder.join("warmup").join(&file);
    if !crate::folders::is_plain(&file) || !path.is_file() {
        return Err((format!("\"{file}\""), "the name of a file in the model's folder \"warmup\"".to_owned()));
    }
    Ok(WarmupData::File(path))
}
