//! rten as what computes a graph: the engine that is embedded. It runs a batch of any size on the thread that asks, or
//! rather on one of its own that belongs to that thread.
//!
//! It has four types of tensors. What else a file has it computes in one of these ([`values`]), and where that could
//! give other answers than the file's types do, the file is refused ([`check`]), as is what it is known to compute
//! wrong. A file that is for one task runs those of a batch one after another.

use std::sync::{Arc, PoisonError, RwLock};

use repository::{
    DataType,
    onnx::{self, Dimension, Signature, Value as Declared},
};
use rten::{Model, ModelOptions, NodeId, RunOptions, ThreadPool, ValueOrView};

use super::{
    binding::{Binding, Port, input_names},
    engine::{Engine, Output},
    source::{Source, one_line},
    tensor::{Length, Tensor},
    turns::Turn,
};
use crate::{error::ExecutorError, executor::panics};

mod check;
mod values;
mod weights;

use values::{ELSE, EMBEDDED};

/// What rten says of what it cannot do with any numbers.
const UNSUPPORTED: [&str; 6] = [
    "unsupported input",
    "unsupported output",
    "conversion error",
    "input must have",
    "Only inputs with",
    "is not broadcastable",
];

thread_local! {
    /// Each thread computes on one thread of its own, which has its priority and its cores.
    static THREAD: Arc<ThreadPool> = Arc::new(ThreadPool::with_num_threads(1));
}

/// A graph with its weights.
struct Graph {
    model: Model,
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
}

/// A model.
pub(super) struct Rten {
    /// `None` while its weights are not needed.
    graph: RwLock<Option<Arc<Graph>>>,
    /// Names of the inputs in the order of the binding, and the outputs in the configuration's.
    inputs: Vec<String>,
    outputs: Vec<(String, DataType)>,
    /// Tasks of a batch run one after another.
    is_for_one: bool,
}

impl Rten {
    /// # Errors
    /// If the file cannot be read, has what rten lacks or computes otherwise, or does not fit the configuration.
    pub(super) fn load(source: &Source) -> Result<(Self, Binding), ExecutorError> {
        let Source { model, batching, .. } = source;
        let refused = |cause: ExecutorError| source.refused(&cause);
        let file = onnx::read(&source.file).map_err(|error| {
            let name = &model.name;
            ExecutorError(format!("model {name}: {error}"))
        })?;
        check::check(&file).map_err(refused)?;
        let sides = [("input", &model.inputs), ("output", &model.outputs)].into_iter();
        let mut tensors = sides.flat_map(|(side, tensors)| tensors.iter().map(move |tensor| (side, tensor)));
        if let Some((side, tensor)) = tensors.find(|(_, tensor)| !values::TYPES.contains(&tensor.datatype)) {
            return Err(refused(values::lacks(&format!("{side} {}", tensor.name), tensor.datatype.name())));
        }
        let signature = Signature::of(file.graph.as_ref().unwrap_or(&onnx::proto::GraphProto::default()));
        drop(file);
        let is_fixed = source.is_batched() && make_rows_free(&signature);
        let ports = |values: &[Declared]| values.iter().map(|value| port(value, is_fixed)).collect::<Vec<_>>();
        let binding = source.bind(&ports(&signature.inputs), &ports(&signature.outputs)).map_err(refused)?;
        let inputs: Vec<String> = input_names(model, batching).into_iter().map(str::to_owned).collect();
        let outputs: Vec<_> = model.outputs.iter().map(|tensor| (tensor.name.clone(), tensor.datatype)).collect();
        let mut loaded = Self { graph: RwLock::new(None), inputs, outputs, is_for_one: is_fixed };
        let graph = Arc::new(loaded.open(source).map_err(refused)?);
        if !source.is_in_groups() {
            loaded.try_once(&graph, source).map_err(refused)?;
        }
        source.check_stamp()?;
        loaded.graph = RwLock::new(Some(graph));
        Ok((loaded, binding))
    }

    /// Reads the file and optimises it.
    fn open(&self, source: &Source) -> Result<Graph, ExecutorError> {
        let mut options = ModelOptions::with_all_ops();
        options.prepack_weights(true);
        let read = || weights::load(&mut options, &source.file);
        // Files are anybody's, also in what the library takes for granted.
        let cannot = |why: String| ExecutorError(format!("{why}, in {EMBEDDED}; {ELSE}"));
        let read = panics::catch(read).map_err(cannot)?.map_err(|error| cannot(one_line(&error)))?;
        let model = read.map_err(|error| cannot(one_line(&error)))?;
        let node = |name: &str| model.node_id(name).map_err(|error| ExecutorError(one_line(&error)));
        let inputs = self.inputs.iter().map(|name| node(name)).collect::<Result<_, _>>()?;
        let outputs = self.outputs.iter().map(|(name, _)| node(name)).collect::<Result<_, _>>()?;
        Ok(Graph { model, inputs, outputs })
    }

    /// Runs one task, to find out what is not supported. What fails for other reasons may be the sample's fault.
    ///
    /// # Errors
    /// If an operator or a type of one of its inputs is not.
    fn try_once(&self, graph: &Graph, source: &Source) -> Result<(), ExecutorError> {
        let row = source.is_batched().then_some(1);
        let inputs = source.model.inputs.iter().enumerate().map(|(index, tensor)| sample(tensor, index, row));
        match self.compute(graph, &inputs.collect::<Vec<_>>()) {
            Err(ExecutorError(reason)) if UNSUPPORTED.iter().any(|text| reason.contains(text)) => {
                Err(ExecutorError(format!("{reason}, in {EMBEDDED}; {ELSE}")))
            }
            _ => Ok(()),
        }
    }

    fn compute(&self, graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>, ExecutorError> {
        let named = self.inputs.iter().zip(inputs);
        let given = named.map(|(name, tensor)| values::value(name, tensor)).collect::<Result<Vec<_>, _>>()?;
        let thread = THREAD.with(Arc::clone);
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(&thread)));
        let given: Vec<(NodeId, ValueOrView<'_>)> = graph.inputs.iter().copied().zip(given).collect();
        let run = || panics::catch(|| graph.model.run(given, &graph.outputs, Some(options)));
        let results = thread.run(run).map_err(|text| ExecutorError(format!("it panicked: {text}")))?;
        let results = results.map_err(|error| ExecutorError(one_line(&error)))?;
        let outputs = self.outputs.iter().zip(results);
        outputs.map(|((name, datatype), result)| values::tensor(name, *datatype, result)).collect()
    }

    /// Each task for itself.
    fn compute_in_turn(&self, graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>, ExecutorError> {
        let batch = inputs.first().map_or(0, |input| input.shape[0]);
        let row = |task: usize| {
            let rows: Vec<Tensor> = inputs.iter().map(|input| input.row(task)).collect();
            self.compute(graph, &rows)
        };
        let rows = (0..batch).map(row).collect::<Result<Vec<_>, _>>()?;
        (0..self.outputs.len()).map(|output| Tensor::stack(rows.iter().map(|row| &row[output]))).collect()
    }
}

impl Engine for Rten {
    fn run(
        &self,
        turn: &Turn,
        inputs: &[Tensor],
        take: &mut dyn FnMut(&[Output<'_>]) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        let graph = self.graph.read().unwrap_or_else(PoisonError::into_inner).clone();
        let graph = graph.ok_or_else(|| ExecutorError("its weights are not in memory".to_owned()))?;
        let compute = || match self.is_for_one {
            true => self.compute_in_turn(&graph, inputs),
            false => self.compute(&graph, inputs),
        };
        // What has begun cannot be ended.
        let results = turn.run(|| (), compute)?;
        take(&results.iter().map(Output::of).collect::<Vec<_>>())
    }

    fn release(&self) {
        *self.graph.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn read(&self, source: &Source) -> Result<(), ExecutorError> {
        // Whoever needs it, too, waits here.
        let mut graph = self.graph.write().unwrap_or_else(PoisonError::into_inner);
        if graph.is_none() {
            let opened = self.open(source).map_err(|cause| source.refused(&cause))?;
            source.check_stamp()?;
            *graph = Some(Arc::new(opened));
        }
        Ok(())
    }
}

/// Whether a file is for one task, and says so by a first length of one for each tensor.
fn make_rows_free(signature: &Signature) -> bool {
    let is_one =
        |value: &Declared| value.shape.as_ref().is_some_and(|shape| shape.first() == Some(&Dimension::Fixed(1)));
    let is_free = |value: &Declared| {
        value.shape.as_ref().is_none_or(|shape| !matches!(shape.first(), Some(Dimension::Fixed(_)) | None))
    };
    signature.inputs.iter().all(is_one) && signature.outputs.iter().all(|value| is_one(value) || is_free(value))
}

/// What a file says of an input or an output; of a file for one task, as if it were for a batch.
fn port(value: &Declared, is_fixed: bool) -> Port {
    let length = |(at, length): (usize, &Dimension)| match length {
        Dimension::Fixed(_) if is_fixed && at == 0 => Some(Length::Named("1".to_owned())),
        Dimension::Fixed(length) => Some(Length::Fixed(*length)),
        Dimension::Symbolic(name) if name.is_empty() => None,
        Dimension::Symbolic(name) => Some(Length::Named(name.clone())),
    };
    let shape = value.shape.as_ref().map(|shape| shape.iter().enumerate().map(length).collect());
    Port { name: value.name.clone(), datatype: value.datatype, shape }
}

/// One of numbers that hardly any graph minds: 0 and 1 where they are whole.
fn sample(tensor: &repository::Tensor, index: usize, rows: Option<usize>) -> Tensor {
    let shape: Vec<usize> = rows.into_iter().chain(tensor.model_shape().iter().copied()).collect();
    let mut state = index as u32;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        f64::from(state >> 8) / f64::from(1 << 24)
    };
    let is_whole = !tensor.datatype.is_float();
    let numbers = (0..shape.iter().product()).map(|_| if is_whole { next().round() } else { next() });
    Tensor::of_numbers(tensor.datatype, &shape, &numbers.collect::<Vec<_>>())
}
