//! One model's folder: `config.pbtxt`, its version folders, its label file. What the configuration leaves out is
//! completed from the model's file (`completion`), or by the program that runs it (`asked`).

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

mod accepted;
mod asked;
mod batching;
mod completion;
mod configuration;
mod emulated;
mod ensemble;
mod file;
mod foreign;
mod misspelt;
mod program;
mod queue;
mod selection;
mod variable;
mod versions;
mod warmup;

pub use asked::{Question, ask_programs_with};
pub use configuration::Configuration;
pub use program::interpreter;
use prost_reflect::{DynamicMessage, Value};
use proto::{LatencyProfile, Span};
pub use queue::{QueuePolicies, QueuePolicy, QueueTimeout};
pub use warmup::{Warmup, WarmupData, WarmupInput};

use variable::Bounds;

use crate::{
    ImagePipeline, cell,
    config::file::{
        ConfigFile, MODEL_CONFIG, ONNX_FILE, data_types, get, is_onnx, json_says_batch, parse, parse_json, says_batch,
        text,
    },
    emulated::UnequalTimes,
    error::{Refused, RepositoryError},
    limits::WEIGHTS_MB_MAX,
    model::{
        CUDA, ENSEMBLE, Executor, Model, ONNX, ONNXRUNTIME, PROCESS, PYTHON, Precision, Priorities, Processor, Wanted,
        WeightsSize, onnx_name,
    },
    profile::StoredProfile,
    tensor::{DataType, Tensor, elements},
};

/// Rows of a request, at most. They are tasks, so an execution need not take them all.
const ROWS_MAX: usize = 4_096;

/// Where a model's configuration is from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Written<'a> {
    /// `config.pbtxt`, if there is one.
    InFolder,
    /// What a client says, in JSON, takes its place.
    ByClient {
        json: &'a str,
        /// All that is in the folder is from that client, too.
        brings_files: bool,
    },
}

/// Loads all versions of the model in `folder` that are to be served, ascending; at least one. A model with a file
/// needs no configuration. What is wrong with one version alone does not keep the others from being served.
pub(crate) fn load(folder: &Path, written: Written<'_>) -> Result<Vec<Result<Model, Refused>>, RepositoryError> {
    let path = folder.join("config.pbtxt");
    let own = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read.map_err(|error| error.to_string()),
    };
    // Editors on Windows begin files with it.
    let own = own.map(|text| text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text));
    let wrong = |path: &Path, cause: String| RepositoryError(format!("{}: {cause}", path.display()));
    let file = match written {
        Written::InFolder => {
            let text = own.map_err(|cause| wrong(&path, cause))?;
            let message = parse(&text).map_err(|cause| wrong(&path, cause))?;
            ConfigFile { says_batch: says_batch(&text), ..ConfigFile::new(folder, path, message, true) }
        }
        Written::ByClient { json, brings_files } => {
            let path = PathBuf::from("parameter config");
            let message = parse_json(json).map_err(|cause| wrong(&path, cause))?;
            let mut file = ConfigFile::new(folder, path, message, !brings_files);
            file.says_batch = json_says_batch(json);
            // One that cannot be read says nothing.
            let own = own.and_then(|text| parse(&text));
            let own = own.unwrap_or_else(|_| DynamicMessage::new(MODEL_CONFIG.clone()));
            file.keep_launch(&own)?;
            file.check_graph(&own)?;
            file
        }
    };
    file.check_fields()?;
    file.tell_misspelt();
    let name = file.name()?;
    let of_version = |version: String| {
        let mut file = file.of_version(version.clone());
        let model = file.complete().and_then(|()| file.model());
        model.map_err(|RepositoryError(reason)| Refused { name: name.clone(), version, reason })
    };
    Ok(file.versions()?.into_iter().map(of_version).collect())
}

impl ConfigFile<'_> {
    fn model(&self) -> Result<Model, RepositoryError> {
        let name = self.name()?;
        let version = self.version.clone();
        let (max_batch, rows_max, is_batched) = self.batches()?;
        let inputs = self.tensors("input")?;
        let outputs = self.tensors("output")?;
        let slo = match self.parameter("slo_ms") {
            Some(_) => Span::from_millis_f64(self.milliseconds("slo_ms")?),
            None => {
                let meaning = "requests without a timeout have no objective, and run when GPUs have nothing else to do";
                tracing::info!("{}: slo_ms: found none: {meaning}", self.path.display());
                Span::ENDLESS
            }
        };
        let times = self.unequal_times()?;
        let executor = self.executor((max_batch, is_batched), (&inputs, &outputs), times.as_ref())?;
        if let Executor::Emulated { profile }
        | Executor::Onnx { profile: Some((_, profile)), .. }
        | Executor::Process { profile: Some(profile), .. } = &executor
            && slo < profile.latency(1)
        {
            return Err(self.error("slo_ms", slo, format_args!("at least l(1) = {}", profile.latency(1))));
        }
        let weights = self.weights(&executor)?;
        let priorities = self.priorities()?;
        let queue = self.queue_policies(priorities.levels)?;
        // Members have levels of their own.
        let priorities = match executor {
            Executor::Ensemble(_) => Priorities { levels: u8::MAX, default: 0 },
            _ => priorities,
        };
        let labels = outputs.iter().enumerate().map(|(index, output)| self.labels(index, output));
        let labels = labels.collect::<Result<_, _>>()?;
        let image = self.parameter("image").map(|text| ImagePipeline::parse(&text, &inputs)).transpose();
        let image =
            image.map_err(|error| RepositoryError(format!("{}: parameter image: {error}", self.path.display())))?;
        let configuration = self.told(&name, slo).with_times(times);
        let model = Model {
            name,
            version,
            inputs,
            outputs,
            max_batch,
            rows_max,
            is_batched,
            slo,
            priorities,
            queue,
            weights,
            executor,
            labels,
            image,
            configuration,
            files: None,
        };
        model.configuration.warmup(&model, self.folder)?;
        Ok(model)
    }

    /// What clients are told: what was written, and what is in effect where nothing was.
    fn told(&self, name: &str, slo: Span) -> Configuration {
        Configuration::completed(self.told_message(name), slo)
    }

    fn told_message(&self, name: &str) -> DynamicMessage {
        let mut told = self.message.clone();
        told.set_field_by_name("name", Value::String(name.to_owned()));
        let executor = self.executor_name();
        if ["emulated", PROCESS, PYTHON].contains(&executor.as_str()) {
            told.set_field_by_name("backend", Value::String(executor));
        }
        told
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
        let bounds = self.bounds()?;
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut bytes = cell::ALIGNMENT as u32 + cell::HEAD_BYTES as u32;
        for (index, item) in found.iter().enumerate() {
            let message = item.as_message().expect("the schema says message");
            let tensor = self.tensor(&format!("{key}[{index}]"), message, bounds)?;
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

    fn tensor(&self, key: &str, message: &DynamicMessage, bounds: Bounds) -> Result<Tensor, RepositoryError> {
        let name = text(message, "name");
        if name.is_empty() {
            return Err(self.error(&format!("{key}.name"), "none", "the name that clients use"));
        }
        let datatype = self.datatype(key, message)?;
        self.shaped((key, message), (name, datatype), bounds)
    }

    /// `data_type` of a message.
    fn datatype(&self, key: &str, message: &DynamicMessage) -> Result<DataType, RepositoryError> {
        let data_type = get(message, "data_type").as_enum_number().unwrap_or_default();
        let spelled = data_types()
            .and_then(|types| types.get_value(data_type).map(|value| value.name().to_owned()))
            .unwrap_or_else(|| data_type.to_string());
        DataType::ALL.into_iter().find(|datatype| datatype.config_name() == spelled).ok_or_else(|| {
            let expected = "TYPE_BOOL, TYPE_[U]INT8 to 64, TYPE_FP16 to 64, TYPE_BF16, or TYPE_STRING";
            self.error(&format!("{key}.data_type"), &spelled, expected)
        })
    }

    fn executor(
        &self,
        (max_batch, is_batched): (usize, bool),
        (inputs, outputs): (&[Tensor], &[Tensor]),
        times: Option<&UnequalTimes>,
    ) -> Result<Executor, RepositoryError> {
        if !is_onnx(&self.executor_name()) {
            self.refuse_batching()?;
        }
        match self.executor_name().as_str() {
            "emulated" => {
                Ok(Executor::Emulated { profile: self.emulated_profile(max_batch, (inputs, outputs), times)? })
            }
            name if is_onnx(name) => {
                let wanted = self.wanted()?;
                let measured_on: &[Processor] = match wanted.processor {
                    Some(Processor::Cuda) => &[],
                    Some(Processor::Onnxruntime) => &[Processor::Onnxruntime],
                    Some(Processor::Cpu) => &[Processor::Cpu],
                    // Which it is each backend finds out.
                    Some(Processor::Auto) | None => &[Processor::Cpu, Processor::Onnxruntime],
                };
                let mut profile = None;
                if !measured_on.is_empty() {
                    let by = measured_on.iter().map(|&processor| (onnx_name(processor), processor));
                    let by: Vec<_> = by.collect();
                    profile = StoredProfile::read(self.folder, &by, &self.version, max_batch)?;
                }
                let batching = self.batching(is_batched, (inputs, outputs))?;
                Ok(Executor::Onnx { file: self.model_file(ONNX_FILE)?, batching, profile, wanted })
            }
            name @ (PROCESS | PYTHON) => {
                let profile = StoredProfile::read(self.folder, &[(PROCESS, ())], &self.version, max_batch)?;
                let profile = profile.map(|((), profile)| profile);
                Ok(Executor::Process { program: self.program(name)?, profile })
            }
            ENSEMBLE => Ok(Executor::Ensemble(Arc::new(self.ensemble(inputs, outputs)?))),
            other => {
                let expected =
                    "\"onnxruntime\", \"onnx\", \"python\", \"process\" or \"emulated\", or platform \"ensemble\"";
                Err(self.error("backend", format_args!("\"{other}\""), expected))
            }
        }
    }

    /// Where and how an ONNX model runs, whatever backends are configured for.
    fn wanted(&self) -> Result<Wanted, RepositoryError> {
        let processor = match self.parameter("executor").as_deref() {
            Some(ONNX) => Some(Processor::Cpu),
            Some(ONNXRUNTIME) => Some(Processor::Onnxruntime),
            _ if self.executor_name() == CUDA => Some(Processor::Cuda),
            _ => None,
        };
        let precision = self.parameter("precision").map(|found| {
            let wrong = |_| self.error("precision", format_args!("\"{found}\""), "\"fp32\", \"tf32\" or \"fp16\"");
            found.parse::<Precision>().map_err(wrong)
        });
        let precision = precision.transpose()?;
        Ok(Wanted { processor, precision })
    }

    fn model_file(&self, default: &str) -> Result<PathBuf, RepositoryError> {
        let name = Some(text(&self.message, "default_model_filename")).filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| default.to_owned());
        self.check_inside("default_model_filename", &name)?;
        let file = self.folder.join(&self.version).join(name);
        if !file.is_file() {
            let found = foreign::advice(&self.folder.join(&self.version));
            let found = found.map_or(String::new(), |found| format!("; {found}"));
            return Err(RepositoryError(format!("{}: no such file, expected the model{found}", file.display())));
        }
        Ok(file)
    }

    /// The labels of an output, one a line, for its elements in their order; without a file of them, its maps' keys.
    fn labels(&self, index: usize, tensor: &Tensor) -> Result<Vec<String>, RepositoryError> {
        let output = get(&self.message, "output");
        let name = output.as_list().unwrap_or_default()[index].as_message().map(|o| text(o, "label_filename"));
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Ok(self.keys.get(&tensor.name).cloned().unwrap_or_default());
        };
        self.check_inside(&format!("output[{index}].label_filename"), &name)?;
        let path = self.folder.join(name);
        let bytes = fs::read(&path).map_err(|error| RepositoryError(format!("{}: {error}", path.display())))?;
        let lines = String::from_utf8(bytes).unwrap_or_else(|error| latin_1(error.as_bytes()));
        let lines = lines.trim_start_matches('\u{feff}').lines();
        let labels: Vec<String> = lines.map(str::trim).map(str::to_owned).collect();
        // How many elements there are may be up to each request.
        if tensor.variable.is_none() && labels.len() != tensor.elements() {
            tracing::warn!(
                "{}: found {} labels, expected {}, one for each element of output \"{}\"; some have none",
                path.display(),
                labels.len(),
                tensor.elements(),
                tensor.name
            );
        }
        Ok(labels)
    }

    fn weights(&self, executor: &Executor) -> Result<WeightsSize, RepositoryError> {
        let bytes = match (self.parameter("weights_mb"), executor) {
            (Some(found), _) => Some(self.weights_bytes(&found)?),
            (None, Executor::Onnx { file, .. }) => {
                let found = fs::metadata(file);
                let found = found.map_err(|error| RepositoryError(format!("{}: {error}", file.display())))?;
                Some(found.len().max(1))
            }
            (None, Executor::Emulated { .. } | Executor::Process { .. } | Executor::Ensemble(_)) => None,
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
}

/// What is no UTF-8: each byte is the character of its number.
fn latin_1(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}

fn size_in_bytes(tensor: &Tensor) -> Option<u32> {
    if tensor.variable.is_none() {
        elements(&tensor.shape)?.checked_mul(tensor.datatype.bytes())?;
    }
    u32::try_from(tensor.bytes()).ok()
}

#[cfg(test)]
mod tests;
