//! Reads a model repository in Triton's layout (`<repo>/<model>/config.pbtxt`, `<repo>/<model>/<version>/model.onnx`):
//! what each model takes and gives, its latency objective, and what executes it. All three roles agree on it.
#![forbid(unsafe_code)]

mod batching;
pub mod cell;
mod config;
pub mod emulated;
mod ensemble;
mod error;
mod folders;
mod image;
mod limits;
mod load;
mod members;
mod model;
mod names;
mod nested;
pub mod onnx;
pub mod profile;
mod program;
mod selection;
mod stamp;
mod store;
mod tensor;

pub use batching::{BatchLengths, Batching, Generated, GeneratedKind};
pub use config::{
    Configuration, Question, QueuePolicies, QueuePolicy, QueueTimeout, Warmup, WarmupData, WarmupInput,
    ask_programs_with, interpreter,
};
pub use ensemble::{Ensemble, EnsembleStep, Nested, STEPS_MAX};
pub use error::{Refused, RepositoryError};
pub use folders::folder_of;
pub use image::{Color, ImagePipeline, Layout};
pub use limits::SLO_MAX;
pub use load::{Repository, load, load_model, load_named};
pub use model::{Executor, Model, Precision, Priorities, Processor, Wanted, WeightsSize};
pub use names::{listed, told};
pub use program::{Launch, Program, ProgramLimits};
pub use selection::{Agreement, Learning, Policy, Selection};
pub use stamp::{Stamp, Stamps};
pub use store::{BroughtFile, FILES_MAX, Held, Source, Store};
pub use tensor::{DataType, Tensor, Variable, elements};
