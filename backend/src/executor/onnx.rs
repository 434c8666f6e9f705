//! Step 8 for an ONNX model, run by tract on the CPU ([`tract`]), or by ONNX Runtime's library. What tasks have in
//! common is the same for both: they are gathered, run as one batch by whichever engine, and each gets its own part of
//! the outputs. A model without a batch dimension runs one task at a time.
//!
//! Lengths that requests choose are symbols, too ([`groups`]), and tasks of unequal ones run together as the model's
//! configuration says ([`runs`]).

use std::path::{Path, PathBuf};

use proto::LatencyProfile;
use repository::{Batching, DataType, Model, Stamp, cell};
use tract_onnx::{prelude::*, tract_hir::infer::Factoid};

use super::panics;
use crate::{
    config::onnxruntime::Sessions,
    error::{ExecutorError, TaskError},
    executor::Executor,
};
use binding::{Binding, Port};
use groups::AnyLength;
pub(super) use groups::{Group, Groups, Rounding, RunGroups, TakeResults};
use turns::{Turn, Turns};

mod binding;
mod dimensions;
mod generated;
mod groups;
mod layout;
pub(super) mod onnxruntime;
mod runs;
mod text;
mod tract;
mod turns;

/// What computes a graph, with its weights.
trait Engine: Send + Sync {
    /// Runs the graph once. `inputs` are in the order of the binding. `take` gets the outputs, in the configuration's
    /// order, and is called once at most.
    fn run(
        &self,
        turn: &Turn,
        inputs: Vec<Tensor>,
        take: &mut dyn FnMut(&[Output<'_>]) -> TractResult<()>,
    ) -> TractResult<()>;

    /// See [`Executor::release`].
    fn release(&self);

    /// See [`Executor::read`].
    fn read(&self, source: &Source) -> Result<(), ExecutorError>;
}

/// An output of a graph that has run.
pub(super) struct Output<'a> {
    pub(super) shape: Vec<usize>,
    pub(super) elements: Elements<'a>,
}

pub(super) enum Elements<'a> {
    /// In row-major order, as they are in memory.
    Numbers(&'a [u8]),
    Strings(&'a [String]),
}

impl<'a> Output<'a> {
    /// One that tract has, or has room for.
    pub(super) fn of(result: &'a Tensor) -> TractResult<Self> {
        let elements = match result.datum_type() {
            DatumType::String => Elements::Strings(result.try_as_plain_ram()?.as_slice::<String>()?),
            _ => Elements::Numbers(result.as_bytes()),
        };
        Ok(Self { shape: result.shape().to_vec(), elements })
    }

    fn numbers(&self) -> TractResult<&'a [u8]> {
        match self.elements {
            Elements::Numbers(bytes) => Ok(bytes),
            Elements::Strings(_) => Err(TractError::msg("it has strings, expected numbers")),
        }
    }

    fn strings(&self) -> TractResult<&'a [String]> {
        match self.elements {
            Elements::Strings(strings) => Ok(strings),
            Elements::Numbers(_) => Err(TractError::msg("it has numbers, expected strings")),
        }
    }
}

/// A loaded ONNX model.
pub struct Onnx {
    engine: Box<dyn Engine>,
    turns: Turns,
    source: Source,
    groups: Groups,
    /// Sizes of tensors differ between requests, or a run takes more than these.
    in_groups: bool,
}

impl Onnx {
    /// Loads the model `file` for tract, whose inputs and outputs must bear the names that `model` configures, with a
    /// first dimension for the batch if it is to have one, and inputs made for each run as `batching` has them.
    ///
    /// # Errors
    /// If the file cannot be read, uses an operator that tract lacks, or does not fit the configuration.
    pub fn load(model: &Model, file: &Path, batching: &Batching) -> Result<Self, ExecutorError> {
        let source = Source::of(model, file, batching)?;
        let (engine, binding) = tract::Tract::load(&source)?;
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
        Self { engine, turns: Turns::default(), source, groups, in_groups }
    }

    /// One tensor of the whole batch, gathered from where it lies in each task's input.
    fn gather(&self, inputs: &[u8], index: usize, batch: usize) -> TractResult<Tensor> {
        let tensor = &self.groups.inputs[index];
        let task_bytes = task_bytes(&self.groups.inputs);
        let offset = task_bytes_before(&self.groups.inputs, index);
        let mut gathered = Tensor::zero_dt(datum_type(tensor.datatype), &self.shape(tensor, batch))?;
        for (task, into) in gathered.as_bytes_mut().chunks_exact_mut(tensor.bytes()).enumerate() {
            let from = &inputs[task * task_bytes + offset..][..tensor.bytes()];
            into.copy_from_slice(from);
        }
        clean(tensor.datatype, gathered.as_bytes_mut());
        Ok(gathered)
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

    fn run(&self, turn: &Turn, inputs: &[u8], outputs: &mut [u8]) -> TractResult<()> {
        let batch = self.tasks(inputs);
        let gathered = (0..self.groups.inputs.len()).map(|index| self.gather(inputs, index, batch));
        let gathered = gathered.collect::<TractResult<Vec<_>>>()?;
        self.engine.run(turn, gathered, &mut |results| self.scatter(results, batch, outputs))
    }

    /// Puts each task's part of each output where it belongs.
    fn scatter(&self, results: &[Output<'_>], batch: usize, outputs: &mut [u8]) -> TractResult<()> {
        let answer_bytes = task_bytes(&self.groups.outputs);
        for (index, (tensor, result)) in self.groups.outputs.iter().zip(results).enumerate() {
            let offset = task_bytes_before(&self.groups.outputs, index);
            if !self.is_shape(&result.shape, tensor, batch) {
                return Err(TractError::msg(format!(
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
                let mut run = InTurn { engine: self.engine.as_ref(), turn };
                return Ok(self.groups.execute((inputs, outputs), &AnyLength, &mut run));
            }
            let mut failed = Vec::new();
            self.run_in_halves(turn, 0, (inputs, &mut *outputs), &mut failed);
            match failed.pop() {
                Some(TaskError { reason, .. }) if failed.len() + 1 == self.tasks(inputs) => Err(ExecutorError(reason)),
                last => Ok(failed.into_iter().chain(last).collect()),
            }
        })
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
        let reason = format!("execution failed: {cause:#}");
        failed.extend((place..place + tasks).map(|task| TaskError { task, reason: reason.clone() }));
    }
}

/// Groups of an execution.
struct InTurn<'a> {
    engine: &'a dyn Engine,
    turn: &'a Turn,
}

impl RunGroups for InTurn<'_> {
    fn run(&mut self, _: &Group<'_>, inputs: Vec<Tensor>, take: &mut TakeResults<'_>) -> TractResult<()> {
        self.engine.run(self.turn, inputs, &mut |outputs| take(outputs, &[]))
    }

    fn is_over(&self) -> bool {
        self.turn.is_over()
    }
}

impl Executor for Onnx {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute_on_any(None, inputs, outputs)
    }

    fn execute_on(&self, gpu: usize, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute_on_any(Some(gpu), inputs, outputs)
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

/// Which lengths and types inputs have where a file says others than the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inputs {
    AsConfigured,
    AsInFile,
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
        let ports = output_ports(&graph, model).map_err(refused)?;
        binding.bind_parts(&ports, model, batching).map_err(refused)?;
        self.check_stamp()?;
        Ok((graph, Groups::new(model, batching, binding)))
    }

    /// The same of a model without lengths that requests choose, for batches of this size alone.
    pub(super) fn decluttered_for(&self, batch: usize) -> Result<TypedModel, ExecutorError> {
        let refused = |cause: TractError| self.refused(&cause);
        let (graph, mut binding) = self.typed_for(batch).map_err(refused)?;
        let graph = graph.into_decluttered().map_err(refused)?;
        let ports = output_ports_for(batch, &graph, &self.model).map_err(refused)?;
        binding.bind_parts(&ports, &self.model, &self.batching).map_err(refused)?;
        self.check_stamp()?;
        Ok(graph)
    }

    /// Whether there may be a graph for each size of batches where there is none for all: lengths that follow from a
    /// batch are numbers then, which tract can compute with as the file says.
    pub(super) fn may_have_one_size(&self) -> bool {
        self.is_batched() && !self.is_in_groups()
    }

    fn typed(&self) -> TractResult<(TypedModel, Binding)> {
        self.typed_as(None)
    }

    fn typed_for(&self, batch: usize) -> TractResult<(TypedModel, Binding)> {
        self.typed_as(Some(batch))
    }

    /// As [`Self::typed_noted`], and what keeps a file from being computed with is said in the configuration's words
    /// where that is what it says of inputs.
    fn typed_as(&self, batch: Option<usize>) -> TractResult<(TypedModel, Binding)> {
        self.typed_noted(batch, Inputs::AsConfigured).map_err(|cause| self.explained(batch, cause))
    }

    /// Configurations may say other lengths than a file's inputs have. Those are to blame if all goes well without.
    fn explained(&self, batch: Option<usize>, cause: TractError) -> TractError {
        let differences = tract_onnx::onnx().model_for_path(&self.file).and_then(|graph| {
            let (_, facts) = binding::bind(&input_ports(&graph)?, &graph.symbols, &self.model, &self.batching)?;
            let found =
                self.model.inputs.iter().zip(&facts).map(|(tensor, fact)| self.difference(&graph, tensor, fact));
            Ok(found.flatten().map(|difference| difference.text).collect::<Vec<_>>())
        });
        match differences {
            Ok(texts) if !texts.is_empty() && self.typed_noted(batch, Inputs::AsInFile).is_ok() => {
                TractError::msg(texts.join("; "))
            }
            _ => cause,
        }
    }

    /// What a file says of an input that is configured otherwise, but for those that are joined.
    fn difference(
        &self,
        graph: &InferenceModel,
        tensor: &repository::Tensor,
        fact: &binding::Fact,
    ) -> Option<binding::Difference> {
        let index = self.model.inputs.iter().position(|input| input.name == tensor.name)?;
        let ports = input_ports(graph).ok()?;
        let port = ports.iter().find(|port| port.name == tensor.name)?;
        let is_joined = self.batching.ragged[index];
        (!is_joined).then(|| binding::Difference::of(port, tensor, fact, self.model.is_batched)).flatten()
    }

    /// Files note what exporters took shapes between operators and of outputs to be, by names of their own or before a
    /// length was fixed. Where that contradicts what inputs are, inputs count: all others follow from these.
    fn typed_noted(&self, batch: Option<usize>, inputs: Inputs) -> TractResult<(TypedModel, Binding)> {
        self.typed_with(&tract_onnx::onnx(), batch, inputs).or_else(|contradicted| {
            let unnoted = tract_onnx::onnx().with_ignore_value_info(true).with_ignore_output_shapes(true);
            self.typed_with(&unnoted, batch, inputs).map_err(|_| contradicted)
        })
    }

    fn typed_with(
        &self,
        reader: &tract_onnx::Onnx,
        batch: Option<usize>,
        inputs: Inputs,
    ) -> TractResult<(TypedModel, Binding)> {
        let Self { model, batching, .. } = self;
        let mut graph = reader.model_for_path(&self.file)?;
        let (binding, mut facts) = binding::bind(&input_ports(&graph)?, &graph.symbols, model, batching)?;
        if inputs == Inputs::AsInFile {
            for (tensor, fact) in model.inputs.iter().zip(&mut facts) {
                if let Some(difference) = self.difference(&graph, tensor, fact) {
                    *fact = difference.in_file;
                }
            }
        }
        graph.set_input_names(binding::input_names(model, batching))?;
        for (index, (datum_type, mut shape)) in facts.into_iter().enumerate() {
            if let (Some(batch), true) = (batch, model.is_batched) {
                shape[0] = batch.into();
            }
            graph.set_input_fact(index, InferenceFact::dt_shape(datum_type, shape))?;
        }
        let outlets = graph.outputs.clone();
        let found = outlets.iter().map(|&outlet| graph.outlet_label(outlet).unwrap_or_default().to_owned());
        let places = binding::output_places(&found.collect::<Vec<_>>(), model)?;
        graph.select_output_outlets(&places.into_iter().map(|place| outlets[place]).collect::<Vec<_>>())?;
        let mut graph = graph.into_typed()?;
        dimensions::give_numbers(&mut graph)?;
        Ok((graph, binding))
    }

    /// Whether sizes of tensors differ between requests, or a run takes more than these.
    fn is_in_groups(&self) -> bool {
        let Self { model, batching, .. } = self;
        cell::is_record(&model.inputs) || cell::is_record(&model.outputs) || !batching.is_plain()
    }

    fn check_stamp(&self) -> Result<(), ExecutorError> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        self.stamp.check(folder).map_err(|error| ExecutorError(error.to_string()))
    }

    pub(super) fn refused(&self, cause: &dyn std::fmt::Display) -> ExecutorError {
        ExecutorError(format!("model {}: {}: {cause:#}", self.model.name, self.file.display()))
    }
}

/// What a file says of its inputs.
fn input_ports(graph: &InferenceModel) -> TractResult<Vec<Port>> {
    let port = |(index, outlet): (usize, &OutletId)| {
        let fact = graph.input_fact(index)?;
        let rank = fact.shape.rank().concretize().and_then(|rank| usize::try_from(rank).ok());
        let length = |at| fact.shape.dim(at).and_then(|length| length.concretize());
        Ok(Port {
            name: graph.node(outlet.node).name.clone(),
            datum_type: fact.datum_type.concretize(),
            shape: rank.map(|rank| (0..rank).map(length).collect()),
        })
    };
    graph.inputs.iter().enumerate().map(port).collect()
}

/// What follows of the outputs, which are in the configuration's order.
fn output_ports(graph: &TypedModel, model: &Model) -> TractResult<Vec<Port>> {
    let port = |(index, tensor): (usize, &repository::Tensor)| {
        let fact = graph.output_fact(index)?;
        let shape = Some(fact.shape.iter().cloned().map(Some).collect());
        Ok(Port { name: tensor.name.clone(), datum_type: Some(fact.datum_type), shape })
    };
    model.outputs.iter().enumerate().map(port).collect()
}

/// The same of a graph for batches of this size alone: what is so long in front is as long as a batch.
fn output_ports_for(batch: usize, graph: &TypedModel, model: &Model) -> TractResult<Vec<Port>> {
    let mut ports = output_ports(graph, model)?;
    for first in ports.iter_mut().filter_map(|port| port.shape.as_mut()?.first_mut()) {
        if first.as_ref().is_some_and(|first| *first == TDim::from(batch)) {
            *first = Some(graph.symbols.sym("batch").into());
        }
    }
    Ok(ports)
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
