//! Step 8: what runs a batch. An executor is loaded once for a model and shared by the GPUs that host it.
//!
//! Executors read no clock: whoever calls them measures them (`drive::profile`), or, if they only emulate a
//! GPU, keeps their time for them.

mod batches;
mod emulated;
mod execute;
pub mod gpus;
mod loaded;
mod onnx;
mod panics;
pub mod process;

use std::{path::Path, sync::Arc};

use repository::{Model, Processor};

use crate::{
    config::{Gpus, OnnxRuntime},
    error::ExecutorError,
};

pub(crate) use batches::{few_sizes, tasks};
pub use emulated::Emulated;
pub(crate) use execute::none_failed;
pub use execute::{Execute, Executor};
pub use gpus::OnGpus;
pub use loaded::{Basis, Loaded};
pub use onnx::{
    Onnx,
    onnxruntime::{library::Library, places::python_package},
    rows,
};
pub use panics::panic_is_caught;
pub use process::{Metrics, Process, Programs};

/// Loads what runs `model` on these of a backend's GPUs, which are but threads of ours, or are left to ONNX Runtime;
/// for those that we use ourselves there is [`OnGpus::load`].
///
/// # Errors
/// If the model's file cannot be read or does not fit its configuration, its program does not start, or ONNX Runtime
/// cannot be had: says what to do.
pub fn load(
    model: &Model,
    (gpu_indexes, gpus): (&[u32], &Gpus),
    onnxruntime: &OnnxRuntime,
    programs: &Programs,
) -> Result<Arc<dyn Executor>, ExecutorError> {
    Ok(match &model.executor {
        repository::Executor::Emulated { profile } => Arc::new(Emulated::new(model, profile.clone())),
        repository::Executor::Onnx { file, batching, wanted, .. }
            if wanted.processor == Some(Processor::Onnxruntime) =>
        {
            let sessions = onnxruntime.sessions(gpus, gpu_indexes, wanted.precision.unwrap_or_default())?;
            Arc::new(Onnx::load_by_onnxruntime(model, (file, batching), &sessions)?)
        }
        repository::Executor::Onnx { file, batching, .. } => Arc::new(Onnx::load(model, file, batching)?),
        repository::Executor::Process { program, .. } => {
            // Lanes come behind the GPUs.
            let has_lanes = gpu_indexes.iter().all(|&index| index >= gpus.count());
            Arc::new(Process::load(model, program, (gpu_indexes.len(), has_lanes), programs)?)
        }
        repository::Executor::Ensemble(_) => {
            return Err(ExecutorError(format!(
                "{}: found an ensemble, expected a model: no backend runs it",
                model.name
            )));
        }
    })
}

/// ONNX Runtime's library, as `settings` name it, or as it is found on this host; also in the folder of a Python's
/// package, if there is one.
///
/// # Errors
/// If it cannot be found or used: what was looked at, and what brings it.
pub fn onnxruntime_library(settings: &OnnxRuntime, package: Option<&Path>) -> Result<Library, ExecutorError> {
    onnx::onnxruntime::library::find(settings, package)
}

/// A session of ONNX Runtime as this model gets one, alone: what the executor is measured beside (`bench/executors`).
///
/// # Errors
/// As [`load`].
pub fn onnxruntime_session(model: &Model, settings: &OnnxRuntime) -> Result<ort::session::Session, ExecutorError> {
    let repository::Executor::Onnx { file, batching, wanted, .. } = &model.executor else {
        return Err(ExecutorError(format!("model {}: expected an ONNX model", model.name)));
    };
    let sessions = settings.sessions(&Gpus::Count(1), &[0], wanted.precision.unwrap_or_default())?;
    onnx::onnxruntime::session(&onnx::Source::of(model, file, batching)?, &sessions)
}

/// What runs ONNX models that leave it open, where the backend leaves it open, too: ONNX Runtime where its library is
/// found, else the embedded engine. For people: which, and why.
#[must_use]
pub fn choose_engine(settings: &OnnxRuntime, package: Option<&Path>) -> (Processor, String) {
    engine_of(&onnxruntime_library(settings, package))
}

/// The same of what was found.
#[must_use]
pub fn engine_of(found: &Result<Library, ExecutorError>) -> (Processor, String) {
    match found {
        Ok(library) => (Processor::Onnxruntime, format!("ONNX Runtime, {library}")),
        Err(reason) => (Processor::Cpu, format!("the embedded engine, as {reason}")),
    }
}
