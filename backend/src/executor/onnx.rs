//! Step 8 on the CPU: an ONNX model, run by tract. The graph is optimised once with a symbolic batch dimension, so
//! every batch size runs the same kernels, and a task's output does not depend on which others it was batched with (but
//! for rounding). A model without a batch dimension runs one task at a time.
//!
//! Lengths that requests choose are symbols, too ([`groups`]).

use std::{
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
};

use proto::LatencyProfile;
use repository::{DataType, Model, Stamp, cell};
use tract_onnx::tract_core::{internal::DimLike, plan::SimplePlan};
use tract_onnx::{prelude::*, tract_hir::infer::Factoid};

use super::{Executor, ExecutorError, TaskError};

mod dimensions;
mod groups;
mod text;

/// The optimised graph, with the weights.
type Plan = Arc<SimplePlan<TypedFact, Box<dyn TypedOp>>>;

/// A loaded ONNX model.
pub struct Onnx {
    /// `None` while its weights are not needed.
    plan: RwLock<Option<Plan>>,
    source: Source,
    inputs: Vec<repository::Tensor>,
    outputs: Vec<repository::Tensor>,
    is_batched: bool,
    /// Sizes of tensors differ between requests.
    has_records: bool,
}

impl Onnx {
    /// Loads the model `file`, whose inputs and outputs must bear the names that `model` configures, with a first
    /// dimension for the batch if it is to have one.
    ///
    /// # Errors
    /// If the file cannot be read, uses an operator that tract lacks, or does not fit the configuration.
    pub fn load(model: &Model, file: &Path) -> Result<Self, ExecutorError> {
        let source = Source::of(model, file)?;
        let plan = RwLock::new(Some(source.read()?));
        let (inputs, outputs) = (model.inputs.clone(), model.outputs.clone());
        let has_records = cell::is_record(&inputs) || cell::is_record(&outputs);
        Ok(Self { plan, source, inputs, outputs, is_batched: model.is_batched, has_records })
    }

    fn plan(&self) -> TractResult<Plan> {
        let plan = self.plan.read().unwrap_or_else(PoisonError::into_inner);
        plan.clone().ok_or_else(|| TractError::msg("its weights are not in memory"))
    }

    /// One tensor of the whole batch, gathered from where it lies in each task's input.
    fn gather(&self, inputs: &[u8], index: usize, batch: usize) -> TractResult<TValue> {
        let tensor = &self.inputs[index];
        let task_bytes = task_bytes(&self.inputs);
        let offset = task_bytes_before(&self.inputs, index);
        let mut gathered = Tensor::zero_dt(datum_type(tensor.datatype), &self.shape(tensor, batch))?;
        for (task, into) in gathered.as_bytes_mut().chunks_exact_mut(tensor.bytes()).enumerate() {
            let from = &inputs[task * task_bytes + offset..][..tensor.bytes()];
            copy_elements(tensor.datatype, from, into);
        }
        Ok(gathered.into())
    }

    /// The shape of a tensor for the model.
    fn shape(&self, tensor: &repository::Tensor, batch: usize) -> Vec<usize> {
        self.is_batched.then_some(batch).into_iter().chain(tensor.model_shape().iter().copied()).collect()
    }

    /// Whether an output of this shape holds that of each task. Lengths of one do not matter: convolutions leave some
    /// at the end, and configurations name them or not.
    fn is_shape(&self, found: &[usize], tensor: &repository::Tensor, batch: usize) -> bool {
        let rest = match found {
            [first, rest @ ..] if self.is_batched && *first == batch => rest,
            _ if self.is_batched => return false,
            found => found,
        };
        lengths(rest).eq(lengths(tensor.model_shape()))
    }

    fn run(&self, inputs: &[u8], outputs: &mut [u8]) -> TractResult<()> {
        let batch = inputs.len() / task_bytes(&self.inputs);
        let gathered = (0..self.inputs.len()).map(|index| self.gather(inputs, index, batch));
        let results = self.plan()?.run(gathered.collect::<TractResult<TVec<_>>>()?)?;
        let answer_bytes = task_bytes(&self.outputs);
        for (index, (tensor, result)) in self.outputs.iter().zip(&results).enumerate() {
            let offset = task_bytes_before(&self.outputs, index);
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
        if self.has_records {
            return Ok(self.run_groups(inputs, outputs));
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
            *plan = Some(self.source.read()?);
        }
        Ok(())
    }
}

/// Where a model is read from, and what its files were like.
struct Source {
    model: Model,
    file: PathBuf,
    stamp: Stamp,
}

impl Source {
    fn of(model: &Model, file: &Path) -> Result<Self, ExecutorError> {
        let (model, file) = (model.clone(), file.to_owned());
        // Weights may lie in files beside it.
        let folder = file.parent().unwrap_or(Path::new("."));
        let refused = |error| ExecutorError(format!("model {}: {}: {error}", model.name, file.display()));
        let stamp = Stamp::of(folder).map_err(refused)?;
        Ok(Self { model, file, stamp })
    }

    /// Reads and optimises it. It is what it was.
    fn read(&self) -> Result<Plan, ExecutorError> {
        let Self { model, file, stamp } = self;
        let refused = |cause: TractError| ExecutorError(format!("model {}: {}: {cause:#}", model.name, file.display()));
        let mut graph = tract_onnx::onnx().model_for_path(file).map_err(refused)?;
        bind_inputs(&mut graph, model).map_err(refused)?;
        bind_outputs(&mut graph, model).map_err(refused)?;
        let mut graph = graph.into_typed().map_err(refused)?;
        dimensions::keep_numbers(&mut graph).map_err(refused)?;
        let graph = graph.into_decluttered().and_then(|graph| graph.into_optimized()).map_err(refused)?;
        let plan = graph.into_runnable().map_err(refused)?;
        check_outputs(plan.model(), model).map_err(refused)?;
        stamp.check(file.parent().unwrap_or(Path::new("."))).map_err(|error| ExecutorError(error.to_string()))?;
        Ok(plan)
    }
}

/// Puts the graph's inputs into the configuration's order, and gives them its types and shapes.
fn bind_inputs(graph: &mut InferenceModel, model: &Model) -> TractResult<()> {
    let found: Vec<String> = graph.inputs.iter().map(|outlet| graph.node(outlet.node).name.clone()).collect();
    let names: Vec<&str> = model.inputs.iter().map(|tensor| tensor.name.as_str()).collect();
    same_names("input", &names, &found)?;
    graph.set_input_names(&names)?;
    let batch = graph.symbols.sym("batch");
    for (index, tensor) in model.inputs.iter().enumerate() {
        let mut shape: TVec<TDim> = model.is_batched.then(|| batch.clone().into()).into_iter().collect();
        let before = shape.len();
        shape.extend(tensor.model_shape().iter().map(|&length| TDim::from(length)));
        for &dim in tensor.model_variable_dims() {
            shape[before + dim] = variable_length(graph, (index, tensor), before + dim)?;
        }
        graph.set_input_fact(index, InferenceFact::dt_shape(datum_type(tensor.datatype), shape))?;
    }
    Ok(())
}

/// What the file calls a length that requests choose, so that equal ones stay equal; a symbol of its own if it does not
/// say.
fn variable_length(
    graph: &InferenceModel,
    (index, tensor): (usize, &repository::Tensor),
    at: usize,
) -> TractResult<TDim> {
    let found = graph.input_fact(index)?.shape.dim(at).and_then(|length| length.concretize());
    match found {
        Some(length) if length.to_i64().is_ok() => Err(TractError::msg(format!(
            "config.pbtxt says -1 for dimension {at} of input {}, the file has {length}",
            tensor.name
        ))),
        Some(length) => Ok(length),
        None => Ok(graph.symbols.sym(&format!("{}_{at}", tensor.name)).into()),
    }
}

/// Puts the graph's outputs into the configuration's order, and drops those that it does not name.
fn bind_outputs(graph: &mut InferenceModel, model: &Model) -> TractResult<()> {
    let outlets = graph.outputs.clone();
    let found: Vec<String> = outlets.iter().map(|&o| graph.outlet_label(o).unwrap_or_default().to_owned()).collect();
    let position = |tensor: &repository::Tensor| {
        found.iter().position(|name| *name == tensor.name).ok_or_else(|| {
            TractError::msg(format!("config.pbtxt names output {}, the file has {}", tensor.name, found.join(", ")))
        })
    };
    let bound = model.outputs.iter().map(|tensor| Ok(outlets[position(tensor)?])).collect::<TractResult<Vec<_>>>()?;
    graph.select_output_outlets(&bound)
}

fn same_names(kind: &str, configured: &[&str], found: &[String]) -> TractResult<()> {
    let mut configured: Vec<&str> = configured.to_vec();
    let mut found: Vec<&str> = found.iter().map(String::as_str).collect();
    configured.sort_unstable();
    found.sort_unstable();
    if configured == found {
        return Ok(());
    }
    Err(TractError::msg(format!(
        "config.pbtxt names {kind}s {}, the file has {}",
        configured.join(", "),
        found.join(", ")
    )))
}

/// Types and shapes of the outputs follow from the graph; where they are known, they must be the configured ones.
fn check_outputs(graph: &TypedModel, model: &Model) -> TractResult<()> {
    for (index, tensor) in model.outputs.iter().enumerate() {
        let fact = graph.output_fact(index)?;
        let first = fact.shape.first().filter(|_| model.is_batched);
        let has_batch = !model.is_batched || first.is_some_and(|batch| batch.to_usize().is_err());
        let rest = fact.shape.iter().skip(usize::from(model.is_batched));
        let shape: Option<Vec<usize>> = rest.map(|length| length.to_usize().ok()).collect();
        let fits = fact.datum_type == datum_type(tensor.datatype)
            && has_batch
            && shape.is_none_or(|shape| tensor.client_shape_of(&shape).is_some());
        if !fits {
            let (batch, question) = match model.is_batched {
                true => ("batch, ", "; does the first dimension vary?"),
                false => ("", ""),
            };
            let dims: Vec<i64> = tensor.dims().collect();
            let shape =
                if tensor.reshape.is_some() { format!("{:?}", tensor.model_shape()) } else { format!("{dims:?}") };
            return Err(TractError::msg(format!(
                "output {} is {fact:?}, expected {:?} of shape [{batch}{shape}]{question}",
                tensor.name, tensor.datatype
            )));
        }
    }
    Ok(())
}

/// Copies elements as they came.
fn copy_elements(datatype: DataType, from: &[u8], into: &mut [u8]) {
    if datatype == DataType::Bool {
        // Clients choose these bytes, but a `bool` other than 0 or 1 is undefined.
        into.iter_mut().zip(from).for_each(|(into, from)| *into = u8::from(*from != 0));
    } else {
        into.copy_from_slice(from);
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

fn datum_type(datatype: DataType) -> DatumType {
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
mod tests;
