//! One model's folder: `config.pbtxt`, its version folders, its label file. What the configuration leaves out is
//! completed from the model's file (`completion`).

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::LazyLock,
};

mod accepted;
mod completion;
mod configuration;

pub use configuration::Configuration;
use miette::Diagnostic as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, EnumDescriptor, MapKey, MessageDescriptor, Value, text_format::ParseError,
};
use proto::{LatencyProfile, Span};

use crate::{
    DataType, Executor, ImagePipeline, Model, Priorities, RepositoryError, SLO_DEFAULT, SLO_MAX, Tensor, WeightsSize,
    emulated, folders, profile::StoredProfile,
};

/// `inference.ModelConfig`, as build.rs compiled it.
static MODEL_CONFIG: LazyLock<MessageDescriptor> = LazyLock::new(|| {
    DescriptorPool::decode(include_bytes!(concat!(env!("OUT_DIR"), "/model_config.bin")).as_slice())
        .expect("build.rs wrote it")
        .get_message_by_name("inference.ModelConfig")
        .expect("the schema declares it")
});

/// The largest weights that are believed, in megabytes.
const WEIGHTS_MB_MAX: f64 = 1e6;

/// The executor that runs ONNX models.
pub(crate) const ONNX: &str = "onnx";

/// Rows of a request, at most. They are tasks, so an execution need not take them all.
const ROWS_MAX: usize = 4_096;

/// Loads the model in `folder`. A model with a file needs no configuration.
pub(crate) fn load(folder: &Path) -> Result<Model, RepositoryError> {
    let path = folder.join("config.pbtxt");
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.map_err(|error| RepositoryError(format!("{}: {error}", path.display())))?,
    };
    let message = parse(&text).map_err(|cause| RepositoryError(format!("{}: {cause}", path.display())))?;
    let mut file = ConfigFile { folder, path: &path, message };
    file.check_fields()?;
    file.complete()?;
    file.model()
}

fn parse(text: &str) -> Result<DynamicMessage, String> {
    let text = with_colons(text);
    DynamicMessage::parse_text_format(MODEL_CONFIG.clone(), &text).map_err(|error| located(&error, &text))
}

/// Writes `input: [` for `input [`. The colon before a list of messages is optional in the text format and Triton's
/// own examples leave it out, but the parser wants it. A blank before the bracket gives its place, so that the
/// positions of errors stay what they are.
fn with_colons(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut chars = text.chars();
    // The last character that is neither a blank nor in a comment.
    let mut last = ' ';
    while let Some(c) = chars.next() {
        match c {
            '#' => {
                out.push(c);
                out.extend(chars.by_ref().take_while(|&c| c != '\n'));
                out.push('\n');
            }
            '"' | '\'' => {
                out.push(c);
                let mut escaped = false;
                for inner in chars.by_ref() {
                    out.push(inner);
                    if inner == c && !escaped {
                        break;
                    }
                    escaped = inner == '\\' && !escaped;
                }
            }
            '[' if last.is_ascii_alphanumeric() || last == '_' => {
                if out.ends_with([' ', '\t']) {
                    out.pop();
                }
                out.push_str(":[");
            }
            _ => out.push(c),
        }
        if c != '#' && !c.is_whitespace() {
            last = c;
        }
    }
    out
}

/// The parser's complaint with the line and column that it points at.
fn located(error: &ParseError, text: &str) -> String {
    let label = error.labels().and_then(|mut labels| labels.next());
    let Some(before) = label.and_then(|label| text.get(..label.offset())) else { return error.to_string() };
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    format!("line {line}, column {column}: {error}")
}

/// A parsed `config.pbtxt`.
struct ConfigFile<'a> {
    folder: &'a Path,
    path: &'a Path,
    message: DynamicMessage,
}

impl ConfigFile<'_> {
    fn model(&self) -> Result<Model, RepositoryError> {
        let name = self.name()?;
        let version = self.version()?;
        let (max_batch, rows_max, is_batched) = self.batches()?;
        let inputs = self.tensors("input")?;
        let outputs = self.tensors("output")?;
        let slo = match self.parameter("slo_ms") {
            Some(_) => Span::from_millis_f64(self.milliseconds("slo_ms")?),
            None => {
                tracing::info!("{}: slo_ms: found none, which means {SLO_DEFAULT}", self.path.display());
                SLO_DEFAULT
            }
        };
        let executor = self.executor(&version, max_batch, &outputs)?;
        if let Executor::Emulated { profile } | Executor::Onnx { profile: Some(profile), .. } = &executor
            && slo < profile.latency(1)
        {
            return Err(self.error("slo_ms", slo, format_args!("at least l(1) = {}", profile.latency(1))));
        }
        let weights = self.weights(&executor)?;
        let priorities = self.priorities()?;
        let labels = self.labels(&outputs[0])?;
        let image = self.parameter("image").map(|text| ImagePipeline::parse(&text, &inputs)).transpose();
        let image =
            image.map_err(|error| RepositoryError(format!("{}: parameter image: {error}", self.path.display())))?;
        let configuration = self.told(&name, slo);
        Ok(Model {
            name,
            version,
            inputs,
            outputs,
            max_batch,
            rows_max,
            is_batched,
            slo,
            priorities,
            weights,
            executor,
            labels,
            image,
            configuration,
        })
    }

    /// What clients are told: what was written, and what is in effect where nothing was.
    fn told(&self, name: &str, slo: Span) -> Configuration {
        let mut told = self.message.clone();
        told.set_field_by_name("name", Value::String(name.to_owned()));
        if self.executor_name() == "emulated" {
            told.set_field_by_name("backend", Value::String("emulated".to_owned()));
        }
        Configuration::completed(told, slo)
    }

    fn name(&self) -> Result<String, RepositoryError> {
        let folder = self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = text(&self.message, "name");
        if !name.is_empty() && name != folder {
            return Err(self.error(
                "name",
                format_args!("\"{name}\""),
                format_args!("the folder's name, \"{folder}\""),
            ));
        }
        Ok(folder)
    }

    /// The version folder with the highest number, of those that the version policy allows; "1" for an emulated model
    /// without any.
    fn version(&self) -> Result<String, RepositoryError> {
        let mut versions = Vec::new();
        for folder in folders(self.folder)? {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Ok(number) = name.parse::<u64>() {
                versions.push((number, name));
            }
        }
        let allowed = self.allowed_versions();
        let found =
            versions.clone().into_iter().filter(|(number, _)| allowed.as_ref().is_none_or(|a| a.contains(number)));
        match (found.max(), versions.is_empty()) {
            (Some((_, name)), _) => Ok(name),
            (None, false) => {
                let names: Vec<String> = versions.into_iter().map(|(_, name)| name).collect();
                let found = format_args!("none of the versions {:?}", allowed.unwrap_or_default());
                Err(self.error("version_policy.specific", found, format_args!("one of: {}", names.join(", "))))
            }
            (None, true) if self.executor_name() == "emulated" => Ok("1".to_owned()),
            (None, true) => Err(RepositoryError(format!(
                "{}: found no version folder, expected one whose name is a number, for example 1",
                self.folder.display()
            ))),
        }
    }

    /// Those that `version_policy` names, if it does: `latest` and `all` both allow the highest.
    fn allowed_versions(&self) -> Option<Vec<u64>> {
        let policy = get(&self.message, "version_policy");
        let policy = policy.as_message().expect("the schema says message");
        if policy.has_field_by_name("all") {
            tracing::info!("{}: version_policy: one version is served, the highest", self.path.display());
        }
        if !policy.has_field_by_name("specific") {
            return None;
        }
        let versions = get(get(policy, "specific").as_message().expect("the schema says message"), "versions");
        let versions = versions.as_list().unwrap_or_default().iter().map(|version| version.as_i64().unwrap_or(-1));
        Some(versions.filter_map(|version| u64::try_from(version).ok()).collect())
    }

    /// Tasks of an execution, rows of a request, and whether tensors have a dimension for them.
    fn batches(&self) -> Result<(usize, usize, bool), RepositoryError> {
        let found = get(&self.message, "max_batch_size").as_i32().unwrap_or_default();
        match usize::try_from(found) {
            Ok(0) => Ok((1, 1, false)),
            Ok(rows @ 1..=ROWS_MAX) => Ok((rows.min(LatencyProfile::MAX_BATCH), rows, true)),
            _ => Err(self.error("max_batch_size", found, format_args!("0 to {ROWS_MAX}"))),
        }
    }

    fn priorities(&self) -> Result<Priorities, RepositoryError> {
        let batching = get(&self.message, "dynamic_batching");
        let batching = batching.as_message().expect("the schema says message");
        let found = |key: &str| get(batching, key).as_u64().unwrap_or_default();
        let wrong = |key: &str, expected: &str| self.error(&format!("dynamic_batching.{key}"), found(key), expected);
        let levels = u8::try_from(found("priority_levels")).map_err(|_| wrong("priority_levels", "at most 255"))?;
        let default = u8::try_from(found("default_priority_level"))
            .ok()
            .filter(|&default| if levels == 0 { default == 0 } else { (1..=levels).contains(&default) });
        let expected = if levels == 0 { "0, as there are no priority_levels" } else { "1 to priority_levels" };
        let default = default.ok_or_else(|| wrong("default_priority_level", expected))?;
        Ok(Priorities { levels, default })
    }

    /// `input` or `output`.
    fn tensors(&self, key: &str) -> Result<Vec<Tensor>, RepositoryError> {
        let value = get(&self.message, key);
        let found = value.as_list().unwrap_or_default();
        if found.is_empty() {
            return Err(self.error(key, "none", "at least one tensor"));
        }
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut bytes = 0u32;
        for (index, item) in found.iter().enumerate() {
            let message = item.as_message().expect("the schema says message");
            let tensor = self.tensor(&format!("{key}[{index}]"), message)?;
            if tensors.iter().any(|other| other.name == tensor.name) {
                return Err(self.error(&format!("{key}[{index}].name"), &tensor.name, "a name that is used once"));
            }
            // A slot descriptor counts bytes in 32 bits.
            bytes = size_in_bytes(&tensor).and_then(|size| bytes.checked_add(size)).ok_or_else(|| {
                self.error(&format!("{key}[{index}].dims"), "4 GiB or more", "tensors of less than 4 GiB together")
            })?;
            tensors.push(tensor);
        }
        Ok(tensors)
    }

    fn tensor(&self, key: &str, message: &DynamicMessage) -> Result<Tensor, RepositoryError> {
        let name = text(message, "name");
        if name.is_empty() {
            return Err(self.error(&format!("{key}.name"), "none", "the name that clients use"));
        }
        let data_type = get(message, "data_type").as_enum_number().unwrap_or_default();
        let spelled = data_types()
            .and_then(|types| types.get_value(data_type).map(|value| value.name().to_owned()))
            .unwrap_or_else(|| data_type.to_string());
        let datatype = spelled.strip_prefix("TYPE_").and_then(DataType::from_name).ok_or_else(|| {
            self.error(&format!("{key}.data_type"), &spelled, "TYPE_BOOL, TYPE_[U]INT8 to 64, or TYPE_FP16 to 64")
        })?;
        let shape = dims(message, "dims")
            .into_iter()
            .map(|dim| usize::try_from(dim).ok().filter(|&dim| dim > 0).ok_or(dim))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|dim| self.error(&format!("{key}.dims"), dim, "dimensions that are fixed and above 0"))?;
        if shape.is_empty() {
            return Err(self.error(&format!("{key}.dims"), "none", "at least one dimension (the batch is not one)"));
        }
        Ok(Tensor { reshape: self.reshape(key, message, &shape)?, ..Tensor::new(name, datatype, shape) })
    }

    /// The shape that the model itself has instead of `shape`.
    fn reshape(
        &self,
        key: &str,
        message: &DynamicMessage,
        shape: &[usize],
    ) -> Result<Option<Vec<usize>>, RepositoryError> {
        if !message.has_field_by_name("reshape") {
            return Ok(None);
        }
        let found = dims(get(message, "reshape").as_message().expect("the schema says message"), "shape");
        let lengths: Option<Vec<usize>> = found.iter().map(|&length| usize::try_from(length).ok()).collect();
        let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length));
        match lengths.filter(|lengths| elements(lengths) == elements(shape)) {
            Some(lengths) => Ok(Some(lengths)),
            None => {
                let expected = format!("as many elements as dims {shape:?} have");
                Err(self.error(&format!("{key}.reshape.shape"), format_args!("{found:?}"), expected))
            }
        }
    }

    /// `parameters: executor`, or else `backend`, or else `platform`.
    fn executor_name(&self) -> String {
        let candidates = [self.parameter("executor"), Some(text(&self.message, "backend"))];
        candidates
            .into_iter()
            .flatten()
            .find(|name| !name.is_empty())
            .unwrap_or_else(|| text(&self.message, "platform"))
    }

    fn executor(&self, version: &str, max_batch: usize, outputs: &[Tensor]) -> Result<Executor, RepositoryError> {
        match self.executor_name().as_str() {
            "emulated" => {
                let digest = Tensor::new(emulated::OUTPUT, DataType::Uint64, vec![emulated::OUTPUT_ELEMENTS]);
                if outputs != [digest] {
                    let found = format!("\"{}\"", outputs[0].name);
                    return Err(self.error("output", found, "only \"digest\", TYPE_UINT64, dims [ 2 ], when emulated"));
                }
                let (alpha, beta) = (self.milliseconds("alpha_ms")?, self.milliseconds("beta_ms")?);
                let profile = LatencyProfile::linear(alpha, beta, max_batch)
                    .map_err(|error| RepositoryError(format!("{}: alpha_ms, beta_ms: {error}", self.path.display())))?;
                Ok(Executor::Emulated { profile })
            }
            ONNX | "onnxruntime" | "onnxruntime_onnx" => {
                let profile = StoredProfile::read(self.folder, ONNX, version, max_batch)?;
                Ok(Executor::Onnx { file: self.model_file(version)?, profile })
            }
            other => {
                Err(self.error("backend", format_args!("\"{other}\""), "\"onnxruntime\", \"onnx\" or \"emulated\""))
            }
        }
    }

    fn model_file(&self, version: &str) -> Result<PathBuf, RepositoryError> {
        let name = Some(text(&self.message, "default_model_filename")).filter(|name| !name.is_empty());
        let file = self.folder.join(version).join(name.as_deref().unwrap_or("model.onnx"));
        if !file.is_file() {
            return Err(RepositoryError(format!("{}: no such file, expected the model", file.display())));
        }
        Ok(file)
    }

    /// The labels of the first output, one a line, one for each of its elements.
    fn labels(&self, first: &Tensor) -> Result<Vec<String>, RepositoryError> {
        let output = get(&self.message, "output");
        let name = output.as_list().unwrap_or_default()[0].as_message().map(|o| text(o, "label_filename"));
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(Vec::new()) };
        let path = self.folder.join(name);
        let lines =
            fs::read_to_string(&path).map_err(|error| RepositoryError(format!("{}: {error}", path.display())))?;
        let labels: Vec<String> = lines.lines().map(str::trim).map(str::to_owned).collect();
        if labels.len() != first.elements() {
            return Err(RepositoryError(format!(
                "{}: found {} labels, expected {}, one for each element of output \"{}\"",
                path.display(),
                labels.len(),
                first.elements(),
                first.name
            )));
        }
        Ok(labels)
    }

    /// `parameters { key: "KEY" value: { string_value: ".." } }`.
    fn parameter(&self, key: &str) -> Option<String> {
        let parameters = get(&self.message, "parameters");
        let value = parameters.as_map()?.get(&MapKey::String(key.to_owned()))?;
        Some(text(value.as_message()?, "string_value"))
    }

    fn milliseconds(&self, key: &str) -> Result<f64, RepositoryError> {
        let expected = "milliseconds, above 0 and at most 600000, in parameters { key value { string_value } }";
        let Some(found) = self.parameter(key) else { return Err(self.error(key, "none", expected)) };
        match found.parse::<f64>() {
            Ok(ms) if ms > 0.0 && ms <= SLO_MAX.as_millis_f64() => Ok(ms),
            _ => Err(self.error(key, format_args!("\"{found}\""), expected)),
        }
    }

    fn weights(&self, executor: &Executor) -> Result<WeightsSize, RepositoryError> {
        let bytes = match (self.parameter("weights_mb"), executor) {
            (Some(found), _) => Some(self.weights_bytes(&found)?),
            (None, Executor::Onnx { file, .. }) => {
                let found = fs::metadata(file);
                let found = found.map_err(|error| RepositoryError(format!("{}: {error}", file.display())))?;
                Some(found.len().max(1))
            }
            (None, Executor::Emulated { .. }) => None,
        };
        let load =
            self.parameter("load_ms").map(|_| self.milliseconds("load_ms").map(Span::from_millis_f64)).transpose()?;
        if let (None, Some(load)) = (bytes, load) {
            return Err(self.error("load_ms", load, "weights_mb beside it"));
        }
        Ok(WeightsSize { bytes, load })
    }

    fn weights_bytes(&self, found: &str) -> Result<u64, RepositoryError> {
        match found.parse::<f64>() {
            Ok(mb) if mb > 0.0 && mb <= WEIGHTS_MB_MAX => Ok((mb * 1e6).ceil() as u64),
            _ => Err(self.error(
                "weights_mb",
                format_args!("\"{found}\""),
                format_args!("megabytes of 10^6 bytes, above 0 and at most {WEIGHTS_MB_MAX}"),
            )),
        }
    }

    fn error(&self, key: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> RepositoryError {
        RepositoryError(format!("{}: {key}: found {found}, expected {expected}", self.path.display()))
    }
}

fn get(message: &DynamicMessage, field: &str) -> Value {
    message.get_field_by_name(field).expect("the schema declares it").into_owned()
}

/// A list of lengths.
fn dims(message: &DynamicMessage, field: &str) -> Vec<i64> {
    get(message, field).as_list().unwrap_or_default().iter().filter_map(Value::as_i64).collect()
}

fn text(message: &DynamicMessage, field: &str) -> String {
    get(message, field).as_str().unwrap_or_default().to_owned()
}

/// Triton's names and numbers of types.
fn data_types() -> Option<EnumDescriptor> {
    MODEL_CONFIG.parent_pool().get_enum_by_name("inference.DataType")
}

fn size_in_bytes(tensor: &Tensor) -> Option<u32> {
    let elements = tensor.shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    u32::try_from(elements.checked_mul(tensor.datatype.bytes())?).ok()
}

#[cfg(test)]
mod tests;
