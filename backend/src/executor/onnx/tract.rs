//! tract as what computes a graph. It is optimised once with a symbolic batch dimension, so every batch size runs the
//! same kernels, and a task's output does not depend on which others it was batched with (but for rounding).

use std::sync::{PoisonError, RwLock};

use tract_onnx::{prelude::*, tract_core::plan::SimplePlan};

use super::{Engine, Output, Source, Turn, binding::Binding, dimensions, output_ports};
use crate::executor::ExecutorError;

/// The optimised graph, with the weights.
type Plan = Arc<SimplePlan<TypedFact, Box<dyn TypedOp>>>;

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
        let results = turn.run(|| (), || plan.run(inputs.into_iter().map(Tensor::into_tvalue).collect()))?;
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

/// Reads and optimises it. It is what it was.
fn read(source: &Source) -> Result<(Plan, Binding), ExecutorError> {
    let Source { model, batching, .. } = source;
    let refused = |cause: TractError| source.refused(&cause);
    let (mut graph, mut binding) = source.typed().map_err(refused)?;
    dimensions::keep_numbers(&mut graph).map_err(refused)?;
    let graph = graph.into_decluttered().and_then(|graph| graph.into_optimized()).map_err(refused)?;
    let plan = graph.into_runnable().map_err(refused)?;
    let ports = output_ports(plan.model(), model).map_err(refused)?;
    binding.bind_parts(&ports, model, batching).map_err(refused)?;
    source.check_stamp()?;
    Ok((plan, binding))
}
