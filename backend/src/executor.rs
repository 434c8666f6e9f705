//! Step 8: what runs a batch. An executor is loaded once for a model and shared by the GPUs that host it.
//!
//! Executors read no clock: whoever calls them measures them (`drive::profile`), or, if they only emulate a
//! GPU, keeps their time for them.

mod emulated;
mod onnx;

use std::sync::Arc;

use proto::LatencyProfile;
use repository::Model;
use thiserror::Error;

pub use emulated::Emulated;
pub use onnx::Onnx;

/// Why an executor could not load a model or run a batch, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ExecutorError(pub String);

/// Runs batches of one model.
pub trait Executor: Send + Sync {
    /// Runs `inputs.len() / model.input_bytes()` tasks. `inputs` holds the tasks' inputs one after another, each with
    /// all its input tensors in the configuration's order; `outputs` is filled in the same way.
    ///
    /// # Errors
    /// If the model cannot compute an output for these inputs; `outputs` is meaningless then.
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError>;

    /// If the executor only emulates a GPU, the time that this GPU would take: the caller lets a batch of b last l(b).
    /// A real executor has none, and is measured.
    fn emulated_profile(&self) -> Option<&LatencyProfile>;
}

/// Loads what runs `model`.
///
/// # Errors
/// If the model's file cannot be read or does not fit its configuration.
pub fn load(model: &Model) -> Result<Arc<dyn Executor>, ExecutorError> {
    Ok(match &model.executor {
        repository::Executor::Emulated { profile } => Arc::new(Emulated::new(model, profile.clone())),
        repository::Executor::Onnx { file, .. } => Arc::new(Onnx::load(model, file)?),
    })
}
