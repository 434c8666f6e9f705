//! Step 8: what runs a batch. An executor is loaded once for a model and shared by the GPUs that host it.
//!
//! Executors read no clock: whoever calls them measures them (`drive::profile`), or, if they only emulate a
//! GPU, keeps their time for them.

mod emulated;
pub mod gpus;
mod onnx;
mod panics;
pub mod process;

use std::{fmt, sync::Arc};

use proto::{BatchCost, LatencyProfile, Span};
use repository::{Model, Processor, Tensor, cell};
use thiserror::Error;

use crate::config::{Gpus, OnnxRuntime};

pub use emulated::Emulated;
pub use gpus::OnGpus;
pub use onnx::Onnx;
pub use panics::panic_is_caught;
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

    /// The same for a GPU of the backend that hosts the model, or the thread that stands for it, by its index in the
    /// configuration. Most executors run a batch wherever they are called.
    ///
    /// # Errors
    /// As [`Self::execute`].
    fn execute_on(&self, _gpu: usize, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute(inputs, outputs)
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

/// Runs a batch, as [`Executor::execute`].
pub type Execute<'a> = dyn FnMut(&[u8], &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> + 'a;

impl fmt::Debug for dyn Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an executor")
    }
}

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
            if model.files.is_some() {
                return Err(ExecutorError(format!("model {}: {BROUGHT}", model.name)));
            }
            let sessions = onnxruntime.sessions(gpus, gpu_indexes, wanted.precision.unwrap_or_default())?;
            Arc::new(Onnx::load_by_onnxruntime(model, (file, batching), &sessions)?)
        }
        repository::Executor::Onnx { file, batching, .. } => Arc::new(Onnx::load(model, file, batching)?),
        repository::Executor::Process { program, .. } => {
            Arc::new(Process::load(model, program, gpu_indexes.len(), programs)?)
        }
    })
}

/// A library that is not written in Rust reads files that an operator has chosen, and no others.
const BROUGHT: &str = "a client brought its files, expected executor \"onnx\" or \"cuda\", as \"onnxruntime\" runs \
                       only what the repository has";

/// Where ONNX Runtime's library is and what it was built for, for people; why it cannot be used otherwise.
///
/// # Errors
/// If it cannot be found or is too old.
pub fn onnxruntime_library(settings: &OnnxRuntime) -> Result<String, ExecutorError> {
    onnx::onnxruntime::library::describe(settings.library.as_deref())
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use repository::{BroughtFile, Store};

    use super::*;

    /// The digits, for ONNX Runtime.
    fn digits() -> Model {
        let models = repository::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")).unwrap().models;
        let mut model = models.into_iter().find(|model| model.name == "digits").unwrap();
        let repository::Executor::Onnx { wanted, .. } = &mut model.executor else { panic!("{:?}", model.executor) };
        wanted.processor = Some(Processor::Onnxruntime);
        model
    }

    fn refused(model: &Model) -> Option<String> {
        let on = (&[0][..], &Gpus::Count(1));
        load(model, on, &OnnxRuntime::default(), &Programs::default()).err().map(|error| error.to_string())
    }

    #[test]
    fn files_that_clients_brought_are_not_for_a_library() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let files = [BroughtFile { path: "1/model.onnx", bytes: b"any" }];
        let model = Model { files: Some(store.keep("digits", &files, 1 << 20).unwrap()), ..digits() };
        let error = refused(&model).unwrap();
        assert!(error.starts_with("model digits: a client brought its files, expected executor \"onnx\""), "{error}");
    }
}
