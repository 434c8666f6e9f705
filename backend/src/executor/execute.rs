//! What every executor can be asked.

use std::fmt;

use proto::{BatchCost, LatencyProfile, Span};

use super::OnGpus;
use crate::error::{ExecutorError, TaskError};

/// Runs batches of one model.
pub trait Executor: Send + Sync {
    /// Runs a batch. `inputs` holds the tasks' inputs one after another, each with all its input tensors in the
    /// configuration's order: `model.input_bytes()` bytes each, or a record where their size is a request's choice
    /// ([`repository::cell`]). `outputs` has room of `model.output_bytes()` bytes for each task, one after another, and
    /// is filled in the same way; if the outputs are records, each begins at the front of its task's room.
    ///
    /// Records have the length that they say, and nothing else in them is to be trusted: [`repository::cell::read`]
    /// checks it.
    ///
    /// Yields the tasks that have no output, ascending; mostly none.
    ///
    /// # Errors
    /// If the model cannot compute an output for any of them; `outputs` is meaningless then.
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError>;

    /// The same for a GPU of the backend that hosts the model, or the thread that stands for it, by its index in the
    /// configuration. Most executors run a batch wherever they are called.
    ///
    /// # Errors
    /// As [`Self::execute`].
    fn execute_on(&self, _gpu: usize, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute(inputs, outputs)
    }

    /// Runs a batch as [`Self::execute`], with all of its tasks together where it has no reason to deal them to several
    /// runs.
    ///
    /// # Errors
    /// If any task has no output.
    fn run_once(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError> {
        none_failed(self.execute(inputs, outputs)?)
    }

    /// From now on tasks of a batch run one after another, if it is ONNX's: its rows are not answered as each would be
    /// alone.
    fn run_apart(&self) {}

    /// Whether they do.
    fn is_apart(&self) -> bool {
        false
    }

    /// If the executor only emulates a GPU, the l(b) of this GPU. A real executor has none, and is measured.
    fn emulated_profile(&self) -> Option<&LatencyProfile>;

    /// If the executor only emulates a GPU, the time that this GPU would take for so many tasks with these inputs: the
    /// caller lets the batch last so long. l(b), unless tasks take unequal times.
    fn emulated_latency(&self, tasks: usize, _inputs: &[u8]) -> Option<Span> {
        self.emulated_profile().map(|profile| profile.latency(tasks))
    }

    /// What a batch takes, if the executor only emulates a GPU and tasks take unequal times there.
    fn emulated_cost(&self) -> Option<BatchCost> {
        None
    }

    /// Whether a batch may run beside one on each GPU that hosts the model; it may wait for one of these.
    fn runs_beside(&self) -> bool {
        true
    }

    /// The model on GPUs, if it runs there: batches that serve go from staging memory to these and back, and weights
    /// are copied there.
    fn on_gpus(&self) -> Option<&OnGpus> {
        None
    }

    /// Of the batches that run for this GPU, that which has run for longest was given up. An executor that can end it
    /// does, so that [`Self::execute_on`] returns.
    fn interrupt(&self, _gpu: usize) {}

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

/// That all tasks of a batch have an output.
///
/// # Errors
/// Why the first has none.
pub(crate) fn none_failed(failed: Vec<TaskError>) -> Result<(), ExecutorError> {
    failed.into_iter().next().map_or(Ok(()), |TaskError { reason, .. }| Err(ExecutorError(reason)))
}

/// Runs a batch, as [`Executor::execute`].
pub type Execute<'a> = dyn FnMut(&[u8], &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> + 'a;

impl fmt::Debug for dyn Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an executor")
    }
}
