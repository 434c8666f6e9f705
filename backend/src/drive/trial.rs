//! What becomes known of a model when its GPUs run it for the first time: how long its weights take to each of them,
//! and l(b). Both are those of the slowest GPU, as one profile is offered for all.

use proto::{LatencyProfile, Span, Weights};
use repository::{Model, SLO_MAX, cell};
use transport::{Clock, Region};

use super::{
    profile::{self, Effort, Measured},
    turns::Trials,
};
use crate::executor::{Executor as _, ExecutorError, OnGpus, TaskError};

/// What was found.
pub(super) struct Tried {
    /// What was measured of each batch size that GPUs are prepared for; nothing if they have no room for it now.
    pub(super) measured: Vec<Measured>,
    /// l(b): a step function, as batches between those sizes are rounded up.
    pub(super) profile: LatencyProfile,
    /// What it takes in GPUs' memory, if that is short.
    pub(super) weights: Weights,
}

/// Runs a model on all its GPUs. If their memory is short it leaves it again; otherwise it stays there for good.
///
/// # Errors
/// If it cannot be run.
pub(super) fn run(
    clock: Clock,
    model: &Model,
    on_gpus: &OnGpus,
    (weights, is_short): (Weights, bool),
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize),
) -> Result<Tried, ExecutorError> {
    let mut tried = Tried { measured: Vec::new(), profile: registered(model, on_gpus), weights };
    let mut load = Span(1);
    for gpu in on_gpus.gpus() {
        let hosted = on_gpus.on(gpu);
        let started_at = clock.now();
        match hosted.load() {
            Ok(()) => load = load.max(clock.now() - started_at),
            Err(cuda::GpuError::NoRoom { .. }) if is_short => {
                tracing::info!(gpu, model = model.name, "l(b) is that of registration: other models fill the memory");
                load = weights.load;
                tried.measured.clear();
                break;
            }
            Err(error) => return Err(ExecutorError(format!("model {} on GPU {gpu}: {error}", model.name))),
        }
        trials.go_to(gpu);
        let measured = measure(model, (on_gpus, gpu), (effort, trials), progress);
        if is_short {
            hosted.unload();
        }
        keep_slowest(&mut tried.measured, measured?);
    }
    if !tried.measured.is_empty() {
        tried.profile = steps(tried.measured.iter().map(|size| (size.batch, size.estimate)));
    }
    let read = weights.read;
    let short = Weights { pages: on_gpus.pages(), load: load.clamp(Span(1), SLO_MAX), read };
    tried.weights = if is_short { short } else { Weights::default() };
    Ok(tried)
}

/// Runs the model's batch sizes on one GPU, with the inputs' copies: batches that were planned late are as slow.
fn measure(
    model: &Model,
    (on_gpus, gpu): (&OnGpus, usize),
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Measured>, ExecutorError> {
    let once = |result: Result<Vec<TaskError>, ExecutorError>| profile::all_ran(result?);
    let sizes = on_gpus.sizes().iter();
    if !on_gpus.takes_inputs_ahead() {
        return on_gpus.try_records_on(gpu, |execute| {
            let sample = profile::sample(model, execute, trials)?;
            let measured = sizes.map(|&batch| {
                progress(batch);
                let (inputs, mut outputs) = (sample.repeat(batch), vec![0; batch * model.output_bytes()]);
                profile::time((effort, &mut *trials), batch, &mut || once(execute(&inputs, &mut outputs)))
            });
            measured.collect()
        });
    }
    let sample = cell::sample(&model.inputs, &model.outputs, 1);
    let largest = on_gpus.sizes().last().copied().unwrap_or(1);
    let bytes = largest * (model.input_bytes() + model.output_bytes());
    let region = Region::allocate(bytes).map_err(|error| ExecutorError(format!("memory for a batch: {error}")))?;
    region.write(0, &sample.repeat(largest));
    on_gpus.try_on(gpu, &region, |run_batch| {
        let measured = sizes.map(|&batch| {
            progress(batch);
            profile::time((effort, &mut *trials), batch, &mut || once(run_batch(batch)))
        });
        measured.collect()
    })
}

fn keep_slowest(slowest: &mut Vec<Measured>, measured: Vec<Measured>) {
    if slowest.is_empty() {
        *slowest = measured;
        return;
    }
    for (slowest, measured) in slowest.iter_mut().zip(measured) {
        if measured.estimate > slowest.estimate {
            *slowest = measured;
        }
    }
}

/// l(b) as the GPUs' own clocks had it when the model was registered, without what comes before and after.
fn registered(model: &Model, on_gpus: &OnGpus) -> LatencyProfile {
    let sizes = on_gpus.sizes().iter();
    let points: Vec<_> = sizes.map(|&batch| (batch, on_gpus.registered(batch, profile::QUANTILE))).collect();
    debug_assert_eq!(points.last().map(|point| point.0), Some(model.max_batch));
    steps(points.into_iter())
}

/// l(b) for every b: what the next of these sizes takes, and never less than a smaller one.
fn steps(points: impl Iterator<Item = (usize, Span)>) -> LatencyProfile {
    let mut table: Vec<Span> = Vec::new();
    for (batch, measured) in points {
        let reached = table.last().copied().unwrap_or(Span(1)).max(measured);
        table.resize(batch, reached);
    }
    LatencyProfile::from_table(table).expect("positive and monotone by construction")
}

/// How long a model's weights take from disk: as long as they are read now.
///
/// # Errors
/// If they cannot be read any more.
pub(super) fn time_read(clock: Clock, on_gpus: &OnGpus) -> Result<Span, ExecutorError> {
    on_gpus.release();
    let started_at = clock.now();
    on_gpus.read()?;
    Ok((clock.now() - started_at).clamp(Span(1), SLO_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_between_those_that_were_captured_take_as_long_as_the_next() {
        let profile = steps([(1, Span(10)), (2, Span(8)), (4, Span(30))].into_iter());
        let found: Vec<Span> = (1..=4).map(|batch| profile.latency(batch)).collect();
        assert_eq!(found, [10, 10, 30, 30].map(Span));
    }
}
