//! Step 8 on the CPU: an ONNX model, run by tract. The graph is optimised once with a symbolic batch dimension, so
//! every batch size runs the same kernels, and a task's output does not depend on which others it was batched with (but
//! for rounding). A model without a batch dimension runs one task at a time.
//!
//! Lengths that requests choose are symbols, too ([`groups`]), and tasks of unequal ones run together as the model's
//! configuration says ([`runs`]).

use std::{
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
};

use proto::LatencyProfile;
use repository::{Batching, DataType, Model, Stamp, cell};
use tract_onnx::prelude::*;
use tract_onnx::tract_core::plan::SimplePlan;

use super::{Executor, ExecutorError, TaskError};
use binding::Binding;
use groups::AnyLength;
pub(super) use groups::{Group, Groups, Results, Rounding};

mod binding;
mod dimensions;
mod generated;
mod groups;
mod layout;
mod runs;
mod text;

/// The optimised graph, with the weights.
type Plan = Arc<SimplePlan<TypedFact, Box<dyn TypedOp>>>;

/// A loaded ONNX model.
pub struct Onnx {
    /// `None` while its weights are not needed.
    plan: RwLock<Option<Plan>>,
    source: Source,
    groups: Groups,
    /// Sizes of tensors differ between requests, or a run takes more than these.
    in_groups: bool,
}

impl Onnx {
    /// Loads the model `file`, whose inputs and outputs must bear the names that `model` configures, with a first
    /// dimension for the batch if it is to have one, and inputs that are made for each run as `batching` has them.
    ///
    /// # Errors
    /// If the file cannot be read, uses an operator that tract lacks, or does not fit the configuration.
    pub fn load(model: &Model, file: &Path, batching: &Batching) -> Result<Self, ExecutorError> {
        let source = Source::of(model, file, batching)?;
        let (plan, binding) = source.read()?;
        let plan = RwLock::new(Some(plan));
        let groups = Groups::new(model, batching, binding);
        let in_groups = cell::is_record(&groups.inputs) || cell::is_record(&groups.outputs) || !batching.is_plain();
        Ok(Self { plan, source, groups, in_groups })
    }

    fn plan(&self) -> TractResult<Plan> {
        let plan = self.plan.read().unwrap_or_else(PoisonError::into_inner);
        plan.clone().ok_or_else(|| TractError::msg("its weights are not in memory"))
    }

    /// One tensor of the whole batch, gathered from where it lies in each task's input.
    fn gather(&self, inputs: &[u8], index: usize, batch: usize) -> TractResult<TValue> {
        let tensor = &self.groups.inputs[index];
        let task_bytes = task_bytes(&self.groups.inputs);
        let offset = task_bytes_before(&self.groups.inputs, index);
        let mut gathered = Tensor::zero_dt(datum_type(tensor.datatype), &self.shape(tensor, batch))?;
        for (task, into) in gathered.as_bytes_mut().chunks_exact_mut(tensor.bytes()).enumerate() {
            let from = &inputs[task * task_bytes + offset..][..tensor.bytes()];
            into.copy_from_slice(from);
        }
        clean(tensor.datatype, gathered.as_bytes_mut());
        Ok(gathered.into())
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

    fn run(&self, inputs: &[u8], outputs: &mut [u8]) -> TractResult<()> {
        let batch = inputs.len() / task_bytes(&self.groups.inputs);
        let gathered = (0..self.groups.inputs.len()).map(|index| self.gather(inputs, index, batch));
        let results = self.plan()?.run(gathered.collect::<TractResult<TVec<_>>>()?)?;
        let answer_bytes = task_bytes(&self.groups.outputs);
        for (index, (tensor, result)) in self.groups.outputs.iter().zip(&results).enumerate() {
            let offset = task_bytes_before(&self.groups.outputs, index);
            if !self.is_shape(result.shape(), tensor, batch) {
                return Err(TractError::msg(format!(
                    "output {} has shape {:?}, config.pbtxt and the batch give {:?}",
                    tensor.name,
                    result.shape(),
                    self.shape(tensor, batch)
                )));
            }
            for (task, from) in result.as_bytes().chunks_exact(tensor.bytes()).enumerate() {
                outputs[task * answer_bytes + offset..][..tensor.bytes()].copy_from_slice(from);
            }
        }
        Ok(())
    }
}

impl Executor for Onnx {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        if self.in_groups {
            let mut run = |_: &Group<'_>, tensors: TVec<TValue>| -> TractResult<Results> {
                Ok(Results { outputs: self.plan()?.run(tensors)?, failed: Vec::new() })
            };
            return Ok(self.groups.execute((inputs, outputs), &AnyLength, &mut run));
        }
        let ran = self.run(inputs, outputs);
        ran.map(|()| Vec::new()).map_err(|cause| ExecutorError(format!("execution failed: {cause:#}")))
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        None
    }

    fn holds_weights(&self) -> bool {
        true
    }

    fn release(&self) {
        *self.plan.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn read(&self) -> Result<(), ExecutorError> {
        // Whoever needs it, too, waits here.
        let mut plan = self.plan.write().unwrap_or_else(PoisonError::into_inner);
        if plan.is_none() {
            *plan = Some(self.source.read()?.0);
        }
        Ok(())
    }
}

/// Where a model is read from, and what its files were like.
pub(super) struct Source {
    model: Model,
    batching: Batching,
    file: PathBuf,
    stamp: Stamp,
}

impl Source {
    pub(super) fn of(model: &Model, file: &Path, batching: &Batching) -> Result<Self, ExecutorError> {
        let (model, file, batching) = (model.clone(), file.to_owned(), batching.clone());
        // Weights may lie in files beside it.
        let folder = file.parent().unwrap_or(Path::new("."));
        let refused = |error| ExecutorError(format!("model {}: {}: {error}", model.name, file.display()));
        let stamp = Stamp::of(folder).map_err(refused)?;
        Ok(Self { model, batching, file, stamp })
    }

    /// Reads and optimises it. It is what it was.
    fn read(&self) -> Result<(Plan, Binding), ExecutorError> {
        let Self { model, batching, .. } = self;
        let refused = |cause: TractError| self.refused(&cause);
        let (mut graph, mut binding) = self.typed().map_err(refused)?;
        dimensions::keep_numbers(&mut graph).map_err(refused)?;
        let graph = graph.into_decluttered().and_then(|graph| graph.into_optimized()).map_err(refused)?;
        let plan = graph.into_runnable().map_err(refused)?;
        binding.bind_parts(plan.model(), model, batching).map_err(refused)?;
        self.check_stamp()?;
        Ok((plan, binding))
    }

    pub(super) fn is_batched(&self) -> bool {
        self.model.is_batched
    }

    /// The graph as it is before anything is known of what runs it, checked against the configuration, and what becomes
    /// of its tensors.
    pub(super) fn decluttered(&self) -> Result<(TypedModel, Groups), ExecutorError> {
        let Self { model, batching, .. } = self;
        let refused = |cause: TractError| self.refused(&cause);
        let (graph, mut binding) = self.typed().map_err(refused)?;
        let graph = graph.into_decluttered().map_err(refused)?;
        binding.bind_parts(&graph, model, batching).map_err(refused)?;
        self.check_stamp()?;
        Ok((graph, Groups::new(model, batching, binding)))
    }

    fn typed(&self) -> TractResult<(TypedModel, Binding)> {
        let mut graph = tract_onnx::onnx().model_for_path(&self.file)?;
        let binding = binding::bind(&mut graph, &self.model, &self.batching)?;
        let mut graph = graph.into_typed()?;
        dimensions::give_numbers(&mut graph)?;
        Ok((graph, binding))
    }

    fn check_stamp(&self) -> Result<(), ExecutorError> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        self.stamp.check(folder).map_err(|error| ExecutorError(error.to_string()))
    }

    pub(super) fn refused(&self, cause: &dyn std::fmt::Display) -> ExecutorError {
        ExecutorError(format!("model {}: {}: {cause:#}", self.model.name, self.file.display()))
    }
}

/// Clients choose these bytes, but a `bool` other than 0 or 1 is undefined.
fn clean(datatype: DataType, bytes: &mut [u8]) {
    if datatype == DataType::Bool {
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
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

pub(super) fn datum_type(datatype: DataType) -> DatumType {
    match datatype {
        DataType::Bool => DatumType::Bool,
        DataType::Uint8 => DatumType::U8,
        DataType::Uint16 => DatumType::U16,
        DataType::Uint32 => DatumType::U32,
        DataType::Uint64 => DatumType::U64,
        DataType::Int8 => DatumType::I8,
        DataType::Int16 => DatumType::I16,
        DataType::Int32 => DatumType::I32,
        DataType::Int64 => DatumType::I64,
        DataType::Fp16 => DatumType::F16,
        DataType::Fp32 => DatumType::F32,
        DataType::Fp64 => DatumType::F64,
        DataType::Bytes => DatumType::String,
    }
}

#[cfg(test)]
pub(super) mod tests;
