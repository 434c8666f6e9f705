//! tract as what computes a graph. It is optimised once with a symbolic batch dimension, so every batch size runs the
//! same kernels, and a task's output does not depend on which others it was batched with (but for rounding). Where
//! tract cannot compute a file's shapes with a symbol it is optimised for one task, and the tasks of a batch run one
//! after another.

use std::sync::{PoisonError, RwLock};

use tract_onnx::{prelude::*, tract_core::plan::SimplePlan};

use super::{Engine, Output, Source, Turn, binding::Binding, dimensions, output_ports, output_ports_for};
use crate::error::ExecutorError;

/// The optimised graph, with the weights.
type Graph = Arc<SimplePlan<TypedFact, Box<dyn TypedOp>>>;

/// How it is run.
#[derive(Clone)]
struct Plan {
    graph: Graph,
    /// It is for one task: those of a batch run one after another.
    is_for_one: bool,
}

/// A batch that shows which outputs have a row for each task.
const ROWS_SHOWN: usize = 3;

/// A graph.
pub(super) struct Tract {
    /// `None` while its weights are not needed.
    plan: RwLock<Option<Plan>>,
}

impl Tract {
    /// # Errors
    /// If the file cannot be read, uses an operator that tract lacks, or does not fit the configuration.
    pub(super) fn load(source: &Source) -> Result<(Self, Binding), ExecutorError> {
        let (plan, binding) = read(source)?;
        Ok((Self { plan: RwLock::new(Some(plan)) }, binding))
    }

    fn plan(&self) -> TractResult<Plan> {
        let plan = self.plan.read().unwrap_or_else(PoisonError::into_inner);
        plan.clone().ok_or_else(|| TractError::msg("its weights are not in memory"))
    }
}

impl Engine for Tract {
    fn run(
        &self,
        turn: &Turn,
        inputs: Vec<Tensor>,
        take: &mut dyn FnMut(&[Output<'_>]) -> TractResult<()>,
    ) -> TractResult<()> {
        let plan = self.plan()?;
        // What has begun cannot be ended.
        let results = turn.run(|| (), || plan.run(inputs))?;
        take(&results.iter().map(|result| Output::of(result)).collect::<TractResult<Vec<_>>>()?)
    }

    fn release(&self) {
        *self.plan.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn read(&self, source: &Source) -> Result<(), ExecutorError> {
        // Whoever needs it, too, waits here.
        let mut plan = self.plan.write().unwrap_or_else(PoisonError::into_inner);
        if plan.is_none() {
            *plan = Some(read(source)?.0);
        }
        Ok(())
    }
}

impl Plan {
    fn run(&self, inputs: Vec<Tensor>) -> TractResult<TVec<TValue>> {
        if !self.is_for_one {
            return self.graph.run(inputs.into_iter().map(Tensor::into_tvalue).collect());
        }
        let batch = inputs.first().map_or(0, |input| input.shape()[0]);
        let row = |task: usize| -> TractResult<TVec<TValue>> {
            let inputs = inputs.iter().map(|input| Ok(input.slice(0, task, task + 1)?.into_tvalue()));
            self.graph.run(inputs.collect::<TractResult<_>>()?)
        };
        let rows = (0..batch).map(row).collect::<TractResult<Vec<_>>>()?;
        let outputs = self.graph.model().outputs.len();
        let stack = |output: usize| {
            let rows: Vec<&Tensor> = rows.iter().map(|row| &*row[output]).collect();
            Ok(Tensor::stack_tensors(0, &rows)?.into_tvalue())
        };
        (0..outputs).map(stack).collect()
    }
}

/// Reads and optimises it. It is what it was.
fn read(source: &Source) -> Result<(Plan, Binding), ExecutorError> {
    let Source { model, batching, .. } = source;
    let refused = |cause: TractError| source.refused(&cause);
    let (graph, mut binding, is_for_one) = match source.typed() {
        Ok((graph, binding)) => (graph, binding, false),
        Err(cause) if source.may_have_one_size() => {
            source.decluttered_for(ROWS_SHOWN).map_err(|_| refused(cause))?;
            let (graph, binding) = source.typed_for(1).map_err(refused)?;
            (graph, binding, true)
        }
        Err(cause) => return Err(refused(cause)),
    };
    let graph = optimised(graph).map_err(refused)?;
    let ports = match is_for_one {
        true => output_ports_for(1, graph.model(), model),
        false => output_ports(graph.model(), model),
    };
    binding.bind_parts(&ports.map_err(refused)?, model, batching).map_err(refused)?;
    source.check_stamp()?;
    Ok((Plan { graph, is_for_one }, binding))
}

fn optimised(mut graph: TypedModel) -> TractResult<Graph> {
    dimensions::keep_numbers(&mut graph)?;
    graph.into_decluttered()?.into_optimized()?.into_runnable()
}
