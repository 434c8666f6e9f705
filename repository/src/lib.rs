//! Reads a model repository in Triton's layout (`<repo>/<model>/config.pbtxt`, `<repo>/<model>/<version>/model.onnx`):
//! what each model takes and gives, its latency objective, and what executes it. All three roles agree on it.
#![forbid(unsafe_code)]

mod config;
pub mod emulated;
mod image;
mod onnx;
pub mod profile;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

pub use config::Configuration;
pub use image::{Color, ImagePipeline, Layout};
use proto::{LatencyProfile, Span};
use thiserror::Error;

/// The longest latency objective: a model's, and a request's own. Beyond it a number is a slip of the unit.
pub const SLO_MAX: Span = Span::from_millis(600_000);

/// The latency objective of a model that has no `slo_ms`.
pub const SLO_DEFAULT: Span = Span::from_millis(100);

/// One version of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The folder's name.
    pub name: String,
    /// The version folder's name; the highest number is served.
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
    /// The latency objective of a request that names none (`parameters: slo_ms`).
    pub slo: Span,
    /// How its requests may differ in importance.
    pub priorities: Priorities,
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
    /// Its shape without the batch dimension, every dimension fixed and positive.
    pub shape: Vec<usize>,
    /// The shape that the model itself takes or gives instead, if that is another one with as many elements.
    pub reshape: Option<Vec<usize>>,
}

impl Tensor {
    /// A tensor whose shape is the same for clients and for the model.
    #[must_use]
    pub fn new(name: impl Into<String>, datatype: DataType, shape: Vec<usize>) -> Self {
        Self { name: name.into(), datatype, shape, reshape: None }
    }

    /// Its shape for the model itself, without the batch dimension.
    #[must_use]
    pub fn model_shape(&self) -> &[usize] {
        self.reshape.as_deref().unwrap_or(&self.shape)
    }

    /// Elements of one task's tensor.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
    /// Bytes of one task's tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.elements() * self.datatype.bytes()
    }
}

impl Model {
    /// The name of what runs it.
    #[must_use]
    pub fn executor_name(&self) -> &'static str {
        match self.executor {
            Executor::Emulated { .. } => "emulated",
            Executor::Onnx { .. } => config::ONNX,
        }
    }

    /// The whole shape of a tensor with so many rows, as clients give and see it.
    #[must_use]
    pub fn shape_of(&self, tensor: &Tensor, rows: usize) -> Vec<usize> {
        self.is_batched.then_some(rows).into_iter().chain(tensor.shape.iter().copied()).collect()
    }

    /// Bytes of one task's inputs.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.inputs.iter().map(Tensor::bytes).sum()
    }
    /// Bytes of one task's outputs.
    #[must_use]
    pub fn output_bytes(&self) -> usize {
        self.outputs.iter().map(Tensor::bytes).sum()
    }
}

/// Element types of the Open Inference Protocol that have a fixed size (BYTES has none).
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
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl DataType {
    /// All of them.
    pub const ALL: [Self; 12] = [
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
    ];

    /// As the Open Inference Protocol spells it; Triton's configuration puts `TYPE_` before it.
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
        }
    }

    /// The type of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name)
    }

    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Uint16 | Self::Int16 | Self::Fp16 => 2,
            Self::Uint32 | Self::Int32 | Self::Fp32 => 4,
            Self::Uint64 | Self::Int64 | Self::Fp64 => 8,
        }
    }
}

/// What runs a model (`backend` or `parameters: executor` of the configuration).
#[derive(Debug, Clone, PartialEq)]
pub enum Executor {
    /// Waits exactly l(b), then gives an output derived from every byte of its input.
    Emulated {
        /// l(b).
        profile: LatencyProfile,
    },
    /// tract, on the CPU.
    Onnx {
        /// The model file.
        file: PathBuf,
        /// l(b), where it was measured ahead of time ([`profile`]).
        profile: Option<LatencyProfile>,
    },
}

/// Why a repository could not be read. One line: the file, the key, what was found, what was expected.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct RepositoryError(pub String);

/// What is in a repository, sorted by name.
#[derive(Debug, Default)]
pub struct Repository {
    /// Models that can be served.
    pub models: Vec<Model>,
    /// Folders that hold no such model.
    pub refused: Vec<Refused>,
}

/// A model that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The folder's name.
    pub name: String,
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
        for Refused { name, reason } in &self.refused {
            tracing::warn!("model '{name}' is not served: {reason}");
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
        match config::load(&folder) {
            Ok(model) => found.models.push(model),
            Err(RepositoryError(reason)) => {
                let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.refused.push(Refused { name, reason });
            }
        }
    }
    Ok(found)
}

/// Reads the model in one folder.
///
/// # Errors
/// If its configuration is wrong.
pub fn load_model(folder: &Path) -> Result<Model, RepositoryError> {
    config::load(folder)
}

/// Reads the model of that name, which may come from a client.
///
/// # Errors
/// If it is not the name of a folder in the repository, or its configuration is wrong.
pub fn load_named(repository: &Path, name: &str) -> Result<Model, RepositoryError> {
    let is_plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    let folder = repository.join(name);
    if !is_plain || !folder.is_dir() {
        return Err(RepositoryError(format!(
            "failed to poll from model repository: found no model '{name}', expected the name of a folder there"
        )));
    }
    config::load(&folder)
}

/// The folders directly in `parent` whose names are not hidden.
fn folders(parent: &Path) -> Result<Vec<PathBuf>, RepositoryError> {
    let failed = |error| RepositoryError(format!("{}: cannot be listed: {error}", parent.display()));
    let mut folders = Vec::new();
    for entry in fs::read_dir(parent).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if path.is_dir() && !hidden {
            folders.push(path);
        }
    }
    Ok(folders)
}
