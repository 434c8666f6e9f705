//! One version of a model, with what runs it.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use proto::{LatencyProfile, Span};
use serde::{Deserialize, Serialize};

use crate::{
    batching::Batching,
    cell,
    config::{Configuration, QueuePolicies},
    ensemble::Ensemble,
    image::ImagePipeline,
    program::Program,
    store::Held,
    tensor::Tensor,
};

/// The executor that runs ONNX models.
pub(crate) const ONNX: &str = "onnx";

/// The same on a GPU.
pub(crate) const CUDA: &str = "cuda";

/// ONNX Runtime, if `parameters: executor` names it. As `backend` it is Triton's word for any ONNX model.
pub(crate) const ONNXRUNTIME: &str = "onnxruntime";

/// Programs that speak the protocol themselves.
pub(crate) const PROCESS: &str = "process";

/// Models in Python, Triton's name for them.
pub(crate) const PYTHON: &str = "python";

/// Graphs of models, Triton's name for them.
pub(crate) const ENSEMBLE: &str = "ensemble";

/// What configurations and profiles call what computes an ONNX model.
pub(crate) fn onnx_name(processor: Processor) -> &'static str {
    match processor {
        Processor::Cpu | Processor::Auto => ONNX,
        Processor::Cuda => CUDA,
        Processor::Onnxruntime => ONNXRUNTIME,
    }
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
    /// Class labels of each output: those of its label file, or the keys of its maps; none of the others.
    pub labels: Vec<Vec<String>>,
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

impl Model {
    /// The name of what runs it.
    #[must_use]
    pub fn executor_name(&self) -> &'static str {
        match self.executor {
            Executor::Emulated { .. } => "emulated",
            Executor::Onnx { wanted, .. } => wanted.processor.map_or(ONNX, onnx_name),
            Executor::Process { .. } => "process",
            Executor::Ensemble(_) => ENSEMBLE,
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

/// What runs a model (`backend` or `parameters: executor` of the configuration).
#[derive(Debug, Clone, PartialEq)]
pub enum Executor {
    /// Waits exactly l(b), or what its requests take ([`Configuration::unequal_times`]), then gives an output derived
    /// from every byte of its input.
    Emulated {
        /// l(b).
        profile: LatencyProfile,
    },
    /// The embedded engine on the CPU, our own kernels on GPUs, or ONNX Runtime.
    Onnx {
        /// The model file.
        file: PathBuf,
        /// What becomes of tasks of unequal sizes.
        batching: Batching,
        /// l(b) where it was measured ahead of time ([`crate::profile`]), and what computed it then.
        profile: Option<(Processor, LatencyProfile)>,
        /// What its configuration says of where and how it runs.
        wanted: Wanted,
    },
    /// A program of its own (docs/process.md).
    Process {
        /// Which.
        program: Program,
        /// l(b), where it was measured ahead of time ([`crate::profile`]).
        profile: Option<LatencyProfile>,
    },
    /// Other models, which frontends ask one after another: no backend runs it.
    Ensemble(Arc<Ensemble>),
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
    /// ONNX Runtime where it is found, else the embedded engine.
    #[default]
    Auto,
    /// The host's, by the embedded engine.
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
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => CUDA,
            Self::Onnxruntime => ONNXRUNTIME,
        })
    }
}

impl FromStr for Processor {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Auto, Self::Cpu, Self::Cuda, Self::Onnxruntime]
            .into_iter()
            .find(|processor| processor.to_string() == text)
            .ok_or("expected auto, cpu, cuda or onnxruntime")
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
