//! Step 8: what runs a batch. An executor is loaded once for a model and shared by the GPUs that host it.
//!
//! Executors read no clock: whoever calls them measures them (`drive::profile`), or, if they only emulate a
//! GPU, keeps their time for them.

mod emulated;
pub mod gpus;
mod onnx;
pub mod process;

use std::{fmt, sync::Arc};

use proto::LatencyProfile;
use repository::{Model, Tensor, cell};
use thiserror::Error;

pub use emulated::Emulated;
pub use gpus::OnGpus;
pub use onnx::Onnx;
pub use process::{Process, Programs};

/// Why an executor could not load a model or run a batch, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ExecutorError(pub String);

/// A task of a batch that has no output, though the others have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskError {
    /// Its place in the batch.
    pub task: usize,
    /// Why, in one line.
    pub reason: String,
}

/// Runs batches of one model.
pub trait Executor: Send + Sync {
    /// Runs a batch. `inputs` holds the tasks' inputs one after another, each with all its input tensors in the
    /// configuration's order: `model.input_bytes()` bytes each, or a record where their size is a request's choice
    /// ([`repository::cell`]). `outputs` has room of `model.output_bytes()` bytes for each task, one after another, and
    /// is filled in the same way; if the outputs are records, each begins at the front of its task's room.
    ///
    /// Records have the length that they say, and nothing else in them is to be trusted: [`cell::read`] checks it.
    ///
    /// Yields the tasks that have no output, ascending; mostly none.
    ///
    /// # Errors
    /// If the model cannot compute an output for any of them; `outputs` is meaningless then.
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError>;

    /// If the executor only emulates a GPU, the time that this GPU would take: the caller lets a batch of b last l(b).
    /// A real executor has none, and is measured.
    fn emulated_profile(&self) -> Option<&LatencyProfile>;

    /// The model on GPUs, if it runs there: batches that serve go from staging memory to these and back, and weights
    /// are copied there.
    fn on_gpus(&self) -> Option<&OnGpus> {
        None
    }

    /// Of the batches that run, that which has run for longest was given up. An executor that can end it does, so that
    /// [`Self::execute`] returns.
    fn interrupt(&self) {}

    /// Whether it has the model's weights in this process's memory, and can let them go.
    fn holds_weights(&self) -> bool {
        false
    }

    /// The model's weights are not needed any more until [`Self::read`].
    fn release(&self) {}

    /// Reads the model's weights from its file again, if they have been let go. Nothing happens where none are held.
    ///
    /// # Errors
    /// If the file cannot be read any more, or is another one.
    fn read(&self) -> Result<(), ExecutorError> {
        Ok(())
    }

    /// Whether a batch can be run now. Where that may be false, [`Self::execute`] fails at once until it is true again.
    fn is_up(&self) -> bool {
        true
    }
}

/// Runs a batch, as [`Executor::execute`].
pub type Execute<'a> = dyn FnMut(&[u8], &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> + 'a;

impl fmt::Debug for dyn Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an executor")
    }
}

/// Loads what runs `model` on so many GPUs that are but threads of ours; for real ones there is [`OnGpus::load`].
///
/// # Errors
/// If the model's file cannot be read or does not fit its configuration, or its program does not start.
pub fn load(model: &Model, gpus: usize, programs: &Programs) -> Result<Arc<dyn Executor>, ExecutorError> {
    Ok(match &model.executor {
        repository::Executor::Emulated { profile } => Arc::new(Emulated::new(model, profile.clone())),
        repository::Executor::Onnx { file, batching, .. } => Arc::new(Onnx::load(model, file, batching)?),
        repository::Executor::Process { program, .. } => Arc::new(Process::load(model, program, gpus, programs)?),
    })
}

/// 1, 2, 3, 4, 6, 8, 12, 16, ...: powers of two, the middles between them, and the largest.
pub(crate) fn few_sizes(batch_max: usize) -> Vec<usize> {
    let powers = (0..usize::BITS).map(|power| 1usize << power).take_while(|&size| size <= batch_max);
    let mut sizes: Vec<usize> = powers.flat_map(|power| [power, power + power / 2]).collect();
    sizes.push(batch_max);
    sizes.retain(|&size| size <= batch_max);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The inputs of each task of a batch, as [`Executor::execute`] gets them.
pub(crate) fn tasks<'a>(tensors: &[Tensor], mut inputs: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    std::iter::from_fn(move || {
        let (task, rest) = cell::split_first(tensors, inputs)?;
        inputs = rest;
        Some(task)
    })
}
