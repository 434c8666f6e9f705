//! Reads a model repository in Triton's layout (`<repo>/<model>/config.pbtxt`, `<repo>/<model>/<version>/model.onnx`):
//! what each model takes and gives, its latency objective, and what executes it. All three roles agree on it.
#![forbid(unsafe_code)]

mod batching;
pub mod cell;
mod config;
pub mod emulated;
mod image;
mod onnx;
pub mod profile;
mod stamp;
mod store;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
};

pub use batching::{BatchLengths, Batching, Generated, GeneratedKind};
use config::Written;
pub use config::{
    Configuration, Question, QueuePolicies, QueuePolicy, QueueTimeout, Warmup, WarmupData, WarmupInput,
    ask_programs_with,
};
pub use image::{Color, ImagePipeline, Layout};
use proto::{LatencyProfile, Span};
use serde::{Deserialize, Serialize};
pub use stamp::{Stamp, Stamps};
pub use store::{BroughtFile, FILES_MAX, Held, Source, Store};
use thiserror::Error;

/// The longest latency objective: a model's, and a request's own. Beyond it a number is a slip of the unit.
pub const SLO_MAX: Span = Span::from_millis(600_000);

/// Names that a message lists, when a name is none of them.
const LISTED_MAX: usize = 16;

/// Names, as a message lists what it expected: of thousands the first few, and how many more there are.
pub fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(LISTED_MAX);
    let first = names.take(LISTED_MAX).collect::<Vec<_>>().join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

/// One version of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The folder's name.
    pub name: String,
    /// The version folder's name: a number above 0.
    pub version: String,
    /// Inputs in the order in which they lie in a slot.
    pub inputs: Vec<Tensor>,
    /// Outputs in the order in which they lie in an answer.
    pub outputs: Vec<Tensor>,
    /// Tasks of an execution, at most: as many as a request's rows, up to what a latency profile holds; at least 1.
    pub max_batch: usize,
    /// Rows of a request, at most: `max_batch_size`, or 1 if that is 0.
    pub rows_max: usize,
    /// Whether tensors have a dimension for the rows before those of the configuration: `max_batch_size` is not 0.
    pub is_batched: bool,
    /// The latency objective of a request that names none (`parameters: slo_ms`); `ENDLESS` if there is none either.
    pub slo: Span,
    /// How its requests may differ in importance.
    pub priorities: Priorities,
    /// What they may expect while they wait.
    pub queue: QueuePolicies,
    /// What it takes in a GPU's memory.
    pub weights: WeightsSize,
    /// What runs it.
    pub executor: Executor,
    /// Class labels of the first output, if the configuration names a label file.
    pub labels: Vec<String>,
    /// How a picture becomes its input, if it takes pictures (`parameters: image`).
    pub image: Option<ImagePipeline>,
    /// What clients are told of all this.
    pub configuration: Configuration,
    /// The files that a load brought along, if it is read from these and not from the repository.
    pub files: Option<Held>,
}

/// What a model takes in a GPU's memory, where that is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightsSize {
    /// Bytes (`parameters: weights_mb`, 10^6 each, or else its file's); `None` if the model takes no memory worth
    /// counting.
    pub bytes: Option<u64>,
    /// From host memory to a GPU's (`parameters: load_ms`), if that does not follow from the bytes.
    pub load: Option<Span>,
}

/// The priorities that a model's requests may have (`dynamic_batching`); by default none but 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Priorities {
    /// `priority_levels`: they count from 1, the most important, to this.
    pub levels: u8,
    /// `default_priority_level`: of requests that name none; 0 if there are no levels.
    pub default: u8,
}

impl Priorities {
    /// The priority of a request whose parameter `priority` is `asked`: the default for 0, and for what is no level, as
    /// in Triton.
    #[must_use]
    pub fn of(self, asked: u64) -> u8 {
        u8::try_from(asked).ok().filter(|level| (1..=self.levels).contains(level)).unwrap_or(self.default)
    }
}

/// A tensor of one task: the batch dimension is not part of its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// As clients name it.
    pub name: String,
    /// Its element type.
    pub datatype: DataType,
    /// Its shape without the batch dimension, every dimension positive; of one that requests choose, the longest.
    pub shape: Vec<usize>,
    /// The shape that the model itself takes or gives instead, if that is another one with as many elements.
    pub reshape: Option<Vec<usize>>,
    /// What requests choose of it; it is a [`cell`] then. `None` if it has the same size in all of them.
    pub variable: Option<Variable>,
}

/// What differs from request to request of a tensor; nothing but its strings if `dims` is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Which dimensions of `shape` have the length that a request chooses, ascending (-1 in the configuration).
    pub dims: Vec<usize>,
    /// The same of `reshape`, in the same order.
    pub reshape_dims: Vec<usize>,
    /// Its elements have this many bytes at most.
    pub bytes_max: usize,
    /// Requests may leave it out.
    pub is_optional: bool,
}

impl Tensor {
    /// A tensor whose shape is the same for clients and for the model, and in all requests.
    #[must_use]
    pub fn new(name: impl Into<String>, datatype: DataType, shape: Vec<usize>) -> Self {
        Self { name: name.into(), datatype, shape, reshape: None, variable: None }
    }

    /// Its shape for the model itself, without the batch dimension; with the longest of what requests choose.
    #[must_use]
    pub fn model_shape(&self) -> &[usize] {
        self.reshape.as_deref().unwrap_or(&self.shape)
    }

    /// Which dimensions of [`Self::model_shape`] have the length that a request chooses, ascending.
    #[must_use]
    pub fn model_variable_dims(&self) -> &[usize] {
        match &self.variable {
            Some(variable) if self.reshape.is_some() => &variable.reshape_dims,
            Some(variable) => &variable.dims,
            None => &[],
        }
    }

    /// The shape that the model itself has where clients have `shape`, which [`Self::accepts`].
    #[must_use]
    pub fn model_shape_of(&self, shape: &[usize]) -> Vec<usize> {
        let (Some(reshape), Some(variable)) = (&self.reshape, &self.variable) else {
            return self.reshape.clone().unwrap_or_else(|| shape.to_vec());
        };
        let mut model_shape = reshape.clone();
        for (&at, &dim) in variable.reshape_dims.iter().zip(&variable.dims) {
            model_shape[at] = shape[dim];
        }
        model_shape
    }

    /// The shape that clients have where the model itself has `found`; the reverse of [`Self::model_shape_of`].
    /// Lengths of one do not matter: convolutions leave some at the end, and configurations name them or not. `None` if
    /// it is none of its shapes.
    #[must_use]
    pub fn client_shape_of(&self, found: &[usize]) -> Option<Vec<usize>> {
        let own = self.model_shape();
        if self.variable.is_none() {
            let lengths = |shape: &[usize]| shape.iter().copied().filter(|&length| length != 1).collect::<Vec<_>>();
            return (lengths(found) == lengths(own)).then(|| self.shape.clone());
        }
        let is_whole = found.len() >= own.len() && found[own.len()..].iter().all(|&length| length == 1);
        let found = &found[..own.len().min(found.len())];
        let mut shape = self.shape.clone();
        if let Some(variable) = &self.variable {
            let dims = self.model_variable_dims();
            variable.dims.iter().zip(dims).for_each(|(&dim, &at)| shape[dim] = found.get(at).copied().unwrap_or(0));
        }
        (is_whole && self.model_shape_of(&shape) == found && self.accepts(&shape)).then_some(shape)
    }

    /// Whether requests may choose this shape, the batch dimension left out.
    #[must_use]
    pub fn accepts(&self, shape: &[usize]) -> bool {
        let Some(variable) = &self.variable else { return self.shape == shape };
        let is_length = |(dim, (found, own)): (usize, (&usize, &usize))| {
            found == own || (found < own && variable.dims.contains(&dim))
        };
        shape.len() == self.shape.len()
            && shape.iter().zip(&self.shape).enumerate().all(is_length)
            && elements(shape).and_then(|elements| elements.checked_mul(self.datatype.bytes()))
                <= Some(variable.bytes_max)
            && elements(shape).is_some()
    }

    /// Its shape as the configuration has it: without the batch dimension, -1 for what requests choose.
    pub fn dims(&self) -> impl Iterator<Item = i64> {
        let is_variable = |dim: usize| self.variable.as_ref().is_some_and(|variable| variable.dims.contains(&dim));
        self.shape.iter().enumerate().map(move |(dim, &length)| if is_variable(dim) { -1 } else { length as i64 })
    }

    /// Whether requests may leave it out.
    #[must_use]
    pub fn is_optional(&self) -> bool {
        self.variable.as_ref().is_some_and(|variable| variable.is_optional)
    }

    /// Elements of one task's tensor, at most.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of one task's tensor; of a [`cell`], at most.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.variable {
            None => self.elements() * self.datatype.bytes(),
            Some(variable) => cell::HEAD_BYTES + self.shape.len() * cell::DIM_BYTES + variable.bytes_max,
        }
    }
}

/// Elements of a tensor of this shape; `None` if they cannot be counted.
#[must_use]
pub fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length))
}

impl Model {
    /// The name of what runs it.
    #[must_use]
    pub fn executor_name(&self) -> &'static str {
        match self.executor {
            Executor::Emulated { .. } => "emulated",
            Executor::Onnx { wanted, .. } => match wanted.processor {
                Some(Processor::Cuda) => config::CUDA,
                Some(Processor::Onnxruntime) => config::ONNXRUNTIME,
                Some(Processor::Cpu) | None => config::ONNX,
            },
            Executor::Process { .. } => "process",
        }
    }

    /// Where its versions lie, if `repository` is where it is read from without files that a load brought along.
    #[must_use]
    pub fn folder(&self, repository: &Path) -> PathBuf {
        let held = self.files.as_ref().map(Held::root);
        held.as_deref().unwrap_or(repository).join(&self.name)
    }

    /// A tensor's whole shape, of which this is one row's, as clients give and see it.
    #[must_use]
    pub fn shape_of(&self, shape: &[usize], rows: usize) -> Vec<usize> {
        self.is_batched.then_some(rows).into_iter().chain(shape.iter().copied()).collect()
    }

    /// Bytes of one task's inputs; of a [record](cell), at most.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        cell::bytes_max(&self.inputs)
    }
    /// Bytes of one task's outputs; of a [record](cell), at most.
    #[must_use]
    pub fn output_bytes(&self) -> usize {
        cell::bytes_max(&self.outputs)
    }
}

/// Element types of the Open Inference Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DataType {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    /// Strings of any bytes.
    Bytes,
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl DataType {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Fp32,
        Self::Fp64,
        Self::Bytes,
    ];

    /// As the Open Inference Protocol spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bytes => "BYTES",
        }
    }

    /// As Triton's configuration spells it (`DataType` of model_config.proto).
    #[must_use]
    pub fn config_name(self) -> String {
        format!("TYPE_{}", if self == Self::Bytes { "STRING" } else { self.name() })
    }

    /// The type of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name)
    }

    /// Bytes of one element; of a string the least, which are those of its length.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Uint16 | Self::Int16 | Self::Fp16 => 2,
            Self::Uint32 | Self::Int32 | Self::Fp32 | Self::Bytes => 4,
            Self::Uint64 | Self::Int64 | Self::Fp64 => 8,
        }
    }
}

/// What runs a model (`backend` or `parameters: executor` of the configuration).
#[derive(Debug, Clone, PartialEq)]
pub enum Executor {
    /// Waits exactly l(b), or what its requests take ([`Configuration::unequal_times`]), then gives an output derived
    /// from every byte of its input.
    Emulated {
        /// l(b).
        profile: LatencyProfile,
    },
    /// tract on the CPU, our own kernels on GPUs, or ONNX Runtime.
    Onnx {
        /// The model file.
        file: PathBuf,
        /// What becomes of tasks of unequal sizes.
        batching: Batching,
        /// l(b) where it was measured ahead of time ([`profile`]): by ONNX Runtime if `wanted` says so, else by tract.
        profile: Option<LatencyProfile>,
        /// What its configuration says of where and how it runs.
        wanted: Wanted,
    },
    /// A program of its own (docs/process.md).
    Process {
        /// Which.
        program: Program,
        /// l(b), where it was measured ahead of time ([`profile`]).
        profile: Option<LatencyProfile>,
    },
}

/// Where and how an ONNX model runs, as far as its configuration says so; otherwise as each backend is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wanted {
    /// `parameters: executor`.
    pub processor: Option<Processor>,
    /// `parameters: precision`.
    pub precision: Option<Precision>,
}

/// What computes an ONNX model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Processor {
    /// The host's, by tract.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// ONNX Runtime, as its library and the backend's configuration have it.
    Onnxruntime,
}

/// How numbers of type FP32 are multiplied on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As they are.
    Fp32,
    /// Rounded to TF32, summed in FP32: what ONNX Runtime and Triton do unless they are told otherwise.
    #[default]
    Tf32,
    /// Kept as FP16, summed in FP32.
    Fp16,
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => config::CUDA,
            Self::Onnxruntime => config::ONNXRUNTIME,
        })
    }
}

impl FromStr for Processor {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Cpu, Self::Cuda, Self::Onnxruntime]
            .into_iter()
            .find(|processor| processor.to_string() == text)
            .ok_or("expected cpu, cuda or onnxruntime")
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Fp16 => "fp16",
        })
    }
}

impl FromStr for Precision {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = [Self::Fp32, Self::Tf32, Self::Fp16];
        known.into_iter().find(|precision| precision.to_string() == text).ok_or("expected fp32, tf32 or fp16")
    }
}

/// A program that runs a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// How it is started.
    pub launch: Launch,
    /// The model's folder, in which it runs.
    pub folder: PathBuf,
    /// `instance_group`: processes of it that a backend had best have; at least 1.
    pub instances: usize,
    /// What it may use of the host.
    pub limits: ProgramLimits,
}

/// How a program is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launch {
    /// A model in Python (`backend: "python"`): a `TritonPythonModel`, or a `downbeat.Model`.
    Python {
        /// `parameters: python`.
        interpreter: String,
        /// The model's file.
        file: PathBuf,
    },
    /// It speaks the protocol itself (`backend: "process"`, `parameters: program`): its words, at least one.
    Program(Vec<String>),
}

/// What a program may use of the host; each a parameter of its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramLimits {
    /// `memory_mb`: addresses of each of its processes.
    pub memory_bytes: u64,
    /// `files_max`: open files of each of its processes.
    pub files: u64,
    /// `processes_max`: processes and threads, where the kernel counts them for the program alone.
    pub processes: u64,
    /// `network`: whether it may use the host's network.
    pub network: bool,
    /// `start_timeout_ms`: how long it may take until it is ready.
    pub start: Span,
}

/// Why a repository could not be read. One line: the file, the key, what was found, what was expected.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct RepositoryError(pub String);

/// What is in a repository, sorted by name and version.
#[derive(Debug, Default)]
pub struct Repository {
    /// Models that can be served: each version is one.
    pub models: Vec<Model>,
    /// Folders that hold no such model, and versions that are none.
    pub refused: Vec<Refused>,
}

/// A model that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The folder's name.
    pub name: String,
    /// The version that cannot be; empty if the whole model cannot.
    pub version: String,
    /// Why, in one line.
    pub reason: String,
}

impl Repository {
    /// All models.
    ///
    /// # Errors
    /// If any is refused.
    pub fn whole(self) -> Result<Vec<Model>, RepositoryError> {
        match self.refused.into_iter().next() {
            None => Ok(self.models),
            Some(Refused { reason, .. }) => Err(RepositoryError(reason)),
        }
    }

    /// As it is, each model that is refused with a line in the log; or with an error for the first of them, if that is
    /// wanted.
    ///
    /// # Errors
    /// If `strict` and any is refused.
    pub fn checked(self, strict: bool) -> Result<Self, RepositoryError> {
        if strict {
            return Ok(Self { models: self.whole()?, refused: Vec::new() });
        }
        for Refused { name, version, reason } in &self.refused {
            let version = if version.is_empty() { String::new() } else { format!(" version {version}") };
            tracing::warn!("model '{name}'{version} is not served: {reason}");
        }
        Ok(self)
    }
}

/// Reads all models of a repository. Files beside the model folders, and hidden folders, are ignored. A model whose
/// configuration is wrong does not keep the others from being read.
///
/// # Errors
/// If the folder cannot be read or holds no model folder.
pub fn load(repository: &Path) -> Result<Repository, RepositoryError> {
    let mut folders = folders(repository)?;
    if folders.is_empty() {
        return Err(RepositoryError(format!(
            "{}: found no model folder, expected <model>/config.pbtxt or <model>/1/model.onnx",
            repository.display()
        )));
    }
    folders.sort();
    let mut found = Repository::default();
    for folder in folders {
        match config::load(&folder, Written::InFolder) {
            Ok(versions) => {
                for version in versions {
                    match version {
                        Ok(model) => found.models.push(model),
                        Err(refused) => found.refused.push(refused),
                    }
                }
            }
            Err(RepositoryError(reason)) => {
                let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.refused.push(Refused { name, version: String::new(), reason });
            }
        }
    }
    Ok(found)
}

/// Reads the newest version of the model in one folder.
///
/// # Errors
/// If its configuration is wrong.
pub fn load_model(folder: &Path) -> Result<Model, RepositoryError> {
    let newest = config::load(folder, Written::InFolder)?.pop().expect("there is one, or an error");
    newest.map_err(|refused| RepositoryError(refused.reason))
}

/// Reads all versions of the model of that name that are to be served, ascending and at least one. The name and
/// `config`, a configuration in JSON instead of `config.pbtxt`, may come from a client, and so may what is at the
/// source.
///
/// # Errors
/// If it is not the name of a folder there, or its configuration is wrong, or one of its versions, or anything in its
/// folder changes meanwhile; or if files that a client brought are to be a program.
pub fn load_named(source: &Source, name: &str, config: Option<&str>) -> Result<Vec<Model>, RepositoryError> {
    let folder = folder_of(source.root(), name)?;
    let stamp = Stamp::of(&folder)?;
    let written = match config {
        None => Written::InFolder,
        Some(json) => Written::ByClient { json, brings_files: source.held().is_some() },
    };
    let versions = config::load(&folder, written)?.into_iter();
    // As Triton says it.
    let failed = |Refused { version, reason, .. }| {
        RepositoryError(format!("load failed for model '{name}': version {version}: {reason}"))
    };
    let with_files = |model: Model| Model { files: source.held().cloned(), ..model };
    let versions = versions.map(|version| version.map(with_files).map_err(failed)).collect::<Result<_, _>>()?;
    stamp.check(&folder)?;
    Ok(versions)
}

/// The folder of a model whose name may come from a client.
///
/// # Errors
/// If there is none of that name.
pub fn folder_of(repository: &Path, name: &str) -> Result<PathBuf, RepositoryError> {
    let folder = repository.join(name);
    if !is_plain(name) || !folder.is_dir() {
        return Err(RepositoryError(format!(
            "failed to poll from model repository: found no model '{name}', expected the name of a folder there"
        )));
    }
    Ok(folder)
}

/// Whether a name leads nowhere else than to what is called so, and is not hidden.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// The folders directly in `parent` whose names are not hidden.
fn folders(parent: &Path) -> Result<Vec<PathBuf>, RepositoryError> {
    let failed = |error| RepositoryError(format!("{}: cannot be listed: {error}", parent.display()));
    let mut folders = Vec::new();
    for entry in fs::read_dir(parent).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() && !is_hidden(&path) {
            folders.push(path);
        }
    }
    Ok(folders)
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_thousands_of_names_a_message_lists_the_first() {
        let names: Vec<String> = (0..4026).map(|number| format!("m{number:04}")).collect();
        let text = |count: usize| listed(names[..count].iter().map(String::as_str));
        assert_eq!((text(0), text(2)), (String::new(), "m0000, m0001".to_owned()));
        assert!(text(16).ends_with("m0014, m0015") && text(17).ends_with("m0014, m0015 and 1 more"));
        assert!(text(4026).ends_with("m0015 and 4010 more"));
    }
}
