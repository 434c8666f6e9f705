//! Step 8 for an ONNX model, run on the CPU by the engine that is embedded ([`rten`]), or by ONNX Runtime's library.
//! What tasks have in common is the same for both: they are gathered, run as one batch by whichever engine, and each
//! gets its own part of the outputs. A model without a batch dimension runs one task at a time.
//!
//! Tasks whose requests chose unequal lengths run together as the model's configuration says ([`groups`], [`runs`]).

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use proto::LatencyProfile;
use repository::{Batching, Model};

use super::panics;
use crate::{
    config::onnxruntime::Sessions,
    error::{ExecutorError, TaskError},
    executor::{Executor, none_failed},
};
use binding::Binding;
use engine::Engine;
pub(super) use engine::Output;
use groups::AnyLength;
pub(super) use groups::{Group, Groups, Rounding, RunGroups, TakeResults};
pub(super) use source::Source;
use tensor::{Tensor, clean};
use turns::{Turn, Turns};

pub(super) mod binding;
mod engine;
mod generated;
mod groups;
mod layout;
pub(super) mod onnxruntime;
pub mod rows;
mod rten;
mod runs;
mod source;
mod spare;
pub(super) mod tensor;
mod text;
mod turns;

/// A loaded ONNX model.
pub struct Onnx {
    engine: Box<dyn Engine>,
    turns: Turns,
    source: Source,
    groups: Groups,
    /// Sizes of tensors differ between requests, or a run takes more than these.
    in_groups: bool,
    /// Tasks of a batch run one after another.
    is_apart: AtomicBool,
}

impl Onnx {
    /// Loads the model `file` for the embedded engine. Its inputs and outputs must bear the names that `model`
    /// configures, with a first dimension for the batch if it is to have one, and inputs made for each run as
    /// `batching` has them.
    ///
    /// # Errors
    /// If the file cannot be read, uses what that engine lacks, or does not fit the configuration.
    pub fn load(model: &Model, file: &Path, batching: &Batching) -> Result<Self, ExecutorError> {
        let source = Source::of(model, file, batching)?;
        let (engine, binding) = rten::Rten::load(&source)?;
        Ok(Self::of(source, Box::new(engine), binding))
    }

    /// The same for ONNX Runtime.
    ///
    /// # Errors
    /// If its library cannot be had, or refuses the file, or this does not fit the configuration.
    pub fn load_by_onnxruntime(
        model: &Model,
        (file, batching): (&Path, &Batching),
        sessions: &Sessions,
    ) -> Result<Self, ExecutorError> {
        let source = Source::of(model, file, batching)?;
        let (engine, binding) = onnxruntime::OnnxRuntime::load(&source, sessions)?;
        Ok(Self::of(source, Box::new(engine), binding))
    }

    fn of(source: Source, engine: Box<dyn Engine>, binding: Binding) -> Self {
        let groups = Groups::new(&source.model, &source.batching, binding);
        let in_groups = source.is_in_groups();
        Self { engine, turns: Turns::default(), source, groups, in_groups, is_apart: AtomicBool::new(false) }
    }

    /// One tensor of the whole batch, gathered from where it lies in each task's input.
    fn gather(&self, inputs: &[u8], index: usize, batch: usize) -> Tensor {
        let tensor = &self.groups.inputs[index];
        let task_bytes = task_bytes(&self.groups.inputs);
        let offset = task_bytes_before(&self.groups.inputs, index);
        let memory = spare::take(batch * tensor.bytes());
        let mut gathered = Tensor::in_memory(memory, tensor.datatype, &self.shape(tensor, batch));
        for (task, into) in gathered.bytes_mut().chunks_exact_mut(tensor.bytes()).enumerate() {
            let from = &inputs[task * task_bytes + offset..][..tensor.bytes()];
            into.copy_from_slice(from);
        }
        clean(tensor.datatype, gathered.bytes_mut());
        gathered
    }

    /// The shape of a tensor for the model.
    fn shape(&self, tensor: &repository::Tensor, batch: usize) -> Vec<usize> {
        self.groups.is_batched.then_some(batch).into_iter().chain(tensor.model_shape().iter().copied()).collect()
    }

    /// Whether an output of this shape holds that of each task. Lengths of one do not matter: convolutions leave some
    /// at the end, and configurations name them or not.
    fn is_shape(&self, found: &[usize], tensor: &repository::Tensor, batch: usize) -> bool {
        let rest = match found {
            [first, rest @ ..] if self.groups.is_batched && *first == batch => rest,
            _ if self.groups.is_batched => return false,
            found => found,
        };
        lengths(rest).eq(lengths(tensor.model_shape()))
    }

    fn run(&self, turn: &Turn, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError> {
        let batch = self.tasks(inputs);
        let gathered: Vec<Tensor> =
            (0..self.groups.inputs.len()).map(|index| self.gather(inputs, index, batch)).collect();
        let ran = self.engine.run(turn, &gathered, &mut |results| self.scatter(results, batch, outputs));
        spare::give(gathered);
        ran
    }

    /// Puts each task's part of each output where it belongs.
    fn scatter(&self, results: &[Output<'_>], batch: usize, outputs: &mut [u8]) -> Result<(), ExecutorError> {
        let answer_bytes = task_bytes(&self.groups.outputs);
        for (index, (tensor, result)) in self.groups.outputs.iter().zip(results).enumerate() {
            let offset = task_bytes_before(&self.groups.outputs, index);
            if !self.is_shape(&result.shape, tensor, batch) {
                return Err(ExecutorError(format!(
                    "output {} has shape {:?}, config.pbtxt and the batch give {:?}",
                    tensor.name,
                    result.shape,
                    self.shape(tensor, batch)
                )));
            }
            for (task, from) in result.numbers()?.chunks_exact(tensor.bytes()).enumerate() {
                outputs[task * answer_bytes + offset..][..tensor.bytes()].copy_from_slice(from);
            }
        }
        Ok(())
    }

    fn execute_on_any(
        &self,
        gpu: Option<usize>,
        inputs: &[u8],
        outputs: &mut [u8],
    ) -> Result<Vec<TaskError>, ExecutorError> {
        self.turns.take(gpu, |turn| {
            if self.in_groups {
                let mut run = InTurn { engine: self.engine.as_ref(), turn, how: self.how() };
                return Ok(self.groups.execute((inputs, outputs), &AnyLength, &mut run));
            }
            let mut failed = Vec::new();
            let tasks = self.tasks(inputs);
            let each = if self.is_apart() { 1 } else { tasks };
            let [input, output] = [&self.groups.inputs, &self.groups.outputs].map(|tensors| task_bytes(tensors));
            for place in (0..tasks).step_by(each.max(1)) {
                let run = (&inputs[place * input..][..each * input], &mut outputs[place * output..][..each * output]);
                self.run_in_halves(turn, place, run, &mut failed);
            }
            match failed.pop() {
                Some(TaskError { reason, .. }) if failed.len() + 1 == self.tasks(inputs) => Err(ExecutorError(reason)),
                last => Ok(failed.into_iter().chain(last).collect()),
            }
        })
    }

    fn how(&self) -> How {
        if self.is_apart() { How::Apart } else { How::InHalves }
    }

    fn tasks(&self, inputs: &[u8]) -> usize {
        inputs.len() / task_bytes(&self.groups.inputs)
    }

    /// Runs tasks, the first of which has this place in the batch; in halves if they fail, as one may be to blame.
    fn run_in_halves(
        &self,
        turn: &Turn,
        place: usize,
        (inputs, outputs): (&[u8], &mut [u8]),
        failed: &mut Vec<TaskError>,
    ) {
        let tasks = self.tasks(inputs);
        let run = || self.run(turn, inputs, &mut *outputs);
        // As in groups: what panics on what clients chose is no reason to distrust the executor.
        let ran = panics::catch(run).unwrap_or_else(|text| {
            let shapes: Vec<_> = self.groups.inputs.iter().map(|input| input.model_shape().to_vec()).collect();
            Err(groups::failed_on(&shapes, &text))
        });
        let Err(cause) = ran else { return };
        if tasks > 1 && !turn.is_over() {
            let first = tasks / 2;
            let inputs = inputs.split_at(first * task_bytes(&self.groups.inputs));
            let outputs = outputs.split_at_mut(first * task_bytes(&self.groups.outputs));
            self.run_in_halves(turn, place, (inputs.0, outputs.0), failed);
            self.run_in_halves(turn, place + first, (inputs.1, outputs.1), failed);
            return;
        }
        let reason = format!("execution failed: {cause}");
        failed.extend((place..place + tasks).map(|task| TaskError { task, reason: reason.clone() }));
    }
}

/// What becomes of the tasks of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// They run together, and in halves if they fail.
    InHalves,
    /// They run together, and fail together.
    Once,
    /// Each is a group of its own.
    Apart,
}

/// Groups of an execution.
struct InTurn<'a> {
    engine: &'a dyn Engine,
    turn: &'a Turn,
    how: How,
}

impl RunGroups for InTurn<'_> {
    fn run(&mut self, _: &Group<'_>, inputs: Vec<Tensor>, take: &mut TakeResults<'_>) -> Result<(), ExecutorError> {
        self.engine.run(self.turn, &inputs, &mut |outputs| take(outputs, &[]))
    }

    fn is_over(&self) -> bool {
        self.how == How::Once || self.turn.is_over()
    }

    fn are_apart(&self) -> bool {
        self.how == How::Apart
    }
}

impl Executor for Onnx {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute_on_any(None, inputs, outputs)
    }

    fn execute_on(&self, gpu: usize, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute_on_any(Some(gpu), inputs, outputs)
    }

    fn run_once(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError> {
        self.turns.take(None, |turn| {
            if !self.in_groups {
                return panics::catch(|| self.run(turn, inputs, outputs))
                    .unwrap_or_else(|text| Err(ExecutorError(format!("it panicked: {text}"))));
            }
            let mut run = InTurn { engine: self.engine.as_ref(), turn, how: How::Once };
            none_failed(self.groups.execute((inputs, outputs), &AnyLength, &mut run))
        })
    }

    fn run_apart(&self) {
        self.is_apart.store(true, Ordering::Relaxed);
    }

    fn is_apart(&self) -> bool {
        self.is_apart.load(Ordering::Relaxed)
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        None
    }

    fn interrupt(&self, gpu: usize) {
        self.turns.interrupt(gpu);
    }

    fn holds_weights(&self) -> bool {
        true
    }

    fn release(&self) {
        self.engine.release();
    }

    fn read(&self) -> Result<(), ExecutorError> {
        self.engine.read(&self.source)
    }
}

fn task_bytes(tensors: &[repository::Tensor]) -> usize {
    task_bytes_before(tensors, tensors.len())
}

fn task_bytes_before(tensors: &[repository::Tensor], index: usize) -> usize {
    tensors[..index].iter().map(repository::Tensor::bytes).sum()
}

/// Lengths above one, and zero.
fn lengths(shape: &[usize]) -> impl Iterator<Item = usize> {
    shape.iter().copied().filter(|&length| length != 1)
}

#[cfg(test)]
pub(super) mod tests;
