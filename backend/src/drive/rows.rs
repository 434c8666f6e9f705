//! Whether tasks of a model's batches run together is settled before it serves any: rows that influence each other
//! ([`rows`]) run one after another, and so do those of which that cannot be found out.

use proto::Span;
use repository::Model;

use super::{profile, turns::Trials};
use crate::executor::{Executor, rows};

/// What it may take to find out: a start waits for it. Batches of what takes longer gain little.
const SPAN_MAX: Span = Span::from_millis(10_000);

/// Settles it for a model whose tasks take so long, if that is known: no sample of another one runs.
pub(super) fn settle(model: &Model, executor: &dyn Executor, l_1: Option<Span>, trials: &mut Trials<'_>) {
    let repository::Executor::Onnx { batching, .. } = &model.executor else { return };
    // Tasks that are joined have no rows: the file is told by its configuration where each ends.
    if batching.is_joined() || !model.is_batched || model.max_batch == 1 || executor.is_apart() {
        return;
    }
    if let Some(why) = why_apart(model, executor, l_1, trials) {
        tracing::warn!("model {}: rows of a batch run one after another: {why}", model.name);
        executor.run_apart();
    }
}

fn why_apart(model: &Model, executor: &dyn Executor, l_1: Option<Span>, trials: &mut Trials<'_>) -> Option<String> {
    let Some(l_1) = l_1 else { return Some("no sample runs, so nobody knows what they are together".to_owned()) };
    if l_1 * rows::TASKS > SPAN_MAX {
        return Some(format!("each takes {l_1}, and to compare them what they are together takes too long"));
    }
    let execute = &mut |inputs: &[u8], outputs: &mut [u8]| executor.execute(inputs, outputs);
    let sample = match profile::sample(model, execute, trials) {
        Ok(sample) => sample,
        Err(error) => return Some(error.to_string()),
    };
    let run: &mut rows::RunOnce<'_> = &mut |inputs, outputs| {
        let tasks = (outputs.len() / model.output_bytes().max(1)) as i64;
        trials.run(Some(l_1 * tasks), || executor.run_once(inputs, outputs)).map(drop)
    };
    rows::why_apart(model, &sample, run)
}
