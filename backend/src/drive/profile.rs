//! Measures l(b). The estimate is what nine runs in ten stay within; the scheduler re-estimates it from results.

use proto::{BatchCost, LatencyProfile, Span};
use repository::{Model, cell};

use super::turns::Trials;
use crate::{
    error::{ExecutorError, TaskError},
    executor::{Execute, Executor, few_sizes, none_failed},
    limits::MEASURED_LENGTH,
};

mod by_length;

pub(super) use by_length::measure as measure_by_length;
pub use by_length::{ByLength, OfLength};

/// The share of runs that the estimate covers.
pub const QUANTILE: f64 = 0.9;
/// Runs of a batch size, however slow.
const RUNS_MIN: usize = 3;
/// How long dimensions are that requests choose: the next one if a model cannot be run with those before. Words, sides
/// of pictures, heights of lines of text, a second of speech.
const SAMPLE_LENGTHS: [usize; 13] = [MEASURED_LENGTH, 224, 320, 128, 64, 48, 32, 512, 640, 16_000, 576, 16, 1];
/// Others are tried for so long: a large picture may take seconds before it turns out to be none.
const SAMPLES_SPAN: Span = Span::from_millis(5_000);
/// Half the width of a normal distribution's central 95 %, in standard deviations.
const CONFIDENCE_95: f64 = 1.96;

/// How thorough a measurement is.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Every batch size, or few, with what lies between them interpolated.
    pub every_size: bool,
    /// Runs of a batch size that are not counted: caches and clocks of the processor warm up.
    pub warm_up: usize,
    /// Runs of a batch size, if they are quick.
    pub runs_max: usize,
    /// Time for the runs of one batch size, beyond the least.
    pub span: Span,
}

impl Effort {
    /// A backend that starts wants to serve soon.
    pub const AT_START: Self = Self { every_size: false, warm_up: 1, runs_max: 30, span: Span::from_millis(50) };

    /// The least that tells anything.
    pub(super) const BRIEF: Self = Self { every_size: false, warm_up: 0, runs_max: 3, span: Span::ZERO };

    /// Whether so many counted runs, which took so long together, tell enough.
    pub(super) fn is_enough(self, runs: usize, all: Span) -> bool {
        runs >= RUNS_MIN && (runs >= self.runs_max || all >= self.span)
    }

    /// What the runs of a batch size take together that takes so long.
    pub(super) fn takes(self, batch: Span) -> Span {
        batch * self.warm_up as i64 + (batch * RUNS_MIN as i64).max(self.span.min(batch * self.runs_max as i64))
    }
}

/// What was measured of one batch size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The size.
    pub batch: usize,
    /// Counted runs.
    pub runs: usize,
    /// The median.
    pub median: Span,
    /// What the share [`QUANTILE`] of all runs stays within: the estimate of l(b).
    pub estimate: Span,
    /// With 95 % confidence that quantile lies between these two, whatever the distribution (order statistics).
    pub confidence: (Span, Span),
}

impl Measured {
    pub(super) fn of(batch: usize, mut runs: Vec<Span>) -> Self {
        runs.sort_unstable();
        let count = runs.len() as f64;
        let at = |rank: f64| runs[(rank.max(0.0) as usize).min(runs.len() - 1)].max(Span(1));
        let deviation = CONFIDENCE_95 * (count * QUANTILE * (1.0 - QUANTILE)).sqrt();
        Self {
            batch,
            runs: runs.len(),
            median: at((count - 1.0) / 2.0),
            estimate: at((count - 1.0) * QUANTILE),
            confidence: (at(count * QUANTILE - deviation), at((count * QUANTILE + deviation).ceil())),
        }
    }
}

/// Measures batch sizes one after another; `progress` is told the size before it begins.
pub(super) fn measure(
    model: &Model,
    executor: &dyn Executor,
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Measured>, ExecutorError> {
    let sizes = if effort.every_size { (1..=model.max_batch).collect() } else { few_sizes(model.max_batch) };
    let execute: &mut Execute<'_> = &mut |inputs, outputs| executor.execute(inputs, outputs);
    let sample = sample(model, execute, trials)?;
    let measured = sizes.into_iter().map(|batch| {
        progress(batch);
        let tensors = (sample.repeat(batch), vec![0; batch * model.output_bytes()]);
        time_batch(execute, (effort, &mut *trials), tensors, batch)
    });
    measured.collect()
}

/// l(b) for every batch size: the estimates, never decreasing, linear in between.
pub(super) fn table(measured: &[Measured]) -> LatencyProfile {
    through(&measured.iter().map(|size| (size.batch, size.estimate)).collect::<Vec<_>>())
}

/// l(b) through what it is at some sizes, the largest among them.
pub(super) fn through(points: &[(usize, Span)]) -> LatencyProfile {
    LatencyProfile::from_table(interpolate(points)).expect("positive and monotone by construction")
}

/// Tasks of the batch that tells what further tasks add.
const COST_BATCH: usize = 8;

/// What a batch takes of a model whose requests choose how large they are; `None` of another one, and of one that
/// cannot run the smallest: c0 is what that takes alone, and c1 what each further one of the longest adds, as a part of
/// what it takes beyond c0 (Orloj, section 3.2, fits both). An emulated one says what it is.
pub(super) fn cost(model: &Model, executor: &dyn Executor, trials: &mut Trials<'_>) -> Option<BatchCost> {
    if executor.emulated_profile().is_some() {
        return executor.emulated_cost();
    }
    if !cell::is_record(&model.inputs) {
        return None;
    }
    match executor.on_gpus() {
        Some(on_gpus) => {
            let gpu = on_gpus.gpus().next()?;
            on_gpus.try_records_on(gpu, |execute| Ok(cost_of(model, execute, trials))).ok()?
        }
        None => cost_of(model, &mut |inputs, outputs| executor.execute(inputs, outputs), trials),
    }
}

fn cost_of(model: &Model, execute: &mut Execute<'_>, trials: &mut Trials<'_>) -> Option<BatchCost> {
    let longest = sample(model, execute, trials).ok()?;
    let smallest = cell::sample(&model.inputs, &model.outputs, 1);
    let batch = model.max_batch.min(COST_BATCH);
    let mut median = |inputs: Vec<u8>, batch: usize| {
        let outputs = vec![0; batch * model.output_bytes()];
        Some(time_batch(execute, (Effort::AT_START, &mut *trials), (inputs, outputs), batch).ok()?.median)
    };
    let least = median(smallest, 1)?;
    Some(fit(least, median(longest.clone(), 1)?, (batch, median(longest.repeat(batch), batch)?)))
}

/// Equation 3 through three points: the smallest task, the longest one, and a batch of such.
pub(super) fn fit(least: Span, longest: Span, (batch, together): (usize, Span)) -> BatchCost {
    let fixed = least.min(longest);
    let work = ((longest - fixed) * (batch as i64 - 1)).as_nanos() as f64;
    let part = if work > 0.0 { (together - longest).as_nanos() as f64 / work } else { 1.0 };
    let ppm = part * f64::from(BatchCost::PER_TASK_MAX);
    BatchCost { fixed, per_task_ppm: ppm.clamp(1.0, f64::from(BatchCost::PER_TASK_MAX)) as u32 }
}

/// l(b) until more is known: batches take no longer than their tasks one after another.
pub(super) fn in_turn(l_1: Span, max_batch: usize) -> LatencyProfile {
    let table = (1..=max_batch as i64).map(|batch| l_1 * batch).collect();
    LatencyProfile::from_table(table).expect("positive and monotone by construction")
}

/// What one task takes, measured; or why no sample could be run.
pub(super) fn first(
    model: &Model,
    executor: &dyn Executor,
    trials: &mut Trials<'_>,
) -> Result<(Vec<u8>, Span), ExecutorError> {
    let execute: &mut Execute<'_> = &mut |inputs, outputs| executor.execute(inputs, outputs);
    let sample = sample(model, execute, trials)?;
    let tensors = (sample.clone(), vec![0; model.output_bytes()]);
    let measured = time_batch(execute, (Effort::AT_START, trials), tensors, 1)?;
    Ok((sample, measured.estimate))
}

/// What a batch takes of such a model until more is known: c0 is what the shortest task takes, if it runs.
pub(super) fn first_cost(
    model: &Model,
    executor: &dyn Executor,
    l_1: Span,
    trials: &mut Trials<'_>,
) -> Option<BatchCost> {
    if executor.emulated_profile().is_some() {
        return executor.emulated_cost();
    }
    if !cell::is_record(&model.inputs) {
        return None;
    }
    let execute: &mut Execute<'_> = &mut |inputs, outputs| executor.execute(inputs, outputs);
    let shortest = cell::sample(&model.inputs, &model.outputs, 1);
    let tensors = (shortest, vec![0; model.output_bytes()]);
    let measured = time_batch(execute, (Effort::BRIEF, trials), tensors, 1);
    let fixed = measured.map_or(l_1, |measured| measured.median.min(l_1));
    Some(BatchCost { fixed, per_task_ppm: BatchCost::PER_TASK_MAX })
}

/// A task's input that the model can compute an output for: of the first of these lengths that it can, where requests
/// choose some.
pub(super) fn sample(
    model: &Model,
    execute: &mut Execute<'_>,
    trials: &mut Trials<'_>,
) -> Result<Vec<u8>, ExecutorError> {
    let has_records = cell::is_record(&model.inputs) || cell::is_record(&model.outputs);
    if !has_records {
        return Ok(cell::sample(&model.inputs, &model.outputs, MEASURED_LENGTH));
    }
    let (inputs, outputs) = (&model.inputs, &model.outputs);
    // Where tensors have no dimension for a batch, the first is mostly one.
    let each = SAMPLE_LENGTHS.iter().flat_map(|&length| [(1, length), (length, length)]);
    let each = each.skip(usize::from(model.is_batched)).step_by(if model.is_batched { 2 } else { 1 });
    let mut samples: Vec<Vec<u8>> = each.filter_map(|shape| cell::sample_of(inputs, outputs, shape)).collect();
    // What is shorter than all of these, or has outputs that are longer.
    samples.push(cell::sample(inputs, outputs, MEASURED_LENGTH));
    samples.dedup();
    let mut first_error = None;
    let ends_at = trials.now() + SAMPLES_SPAN;
    for sample in samples {
        if first_error.is_some() && trials.now() > ends_at {
            break;
        }
        let mut outputs = vec![0; model.output_bytes()];
        match trials.run(None, || run_once(execute, &sample, &mut outputs)) {
            Ok(_) => return Ok(sample),
            Err(error) => drop(first_error.get_or_insert(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| ExecutorError("there is no sample".to_owned())))
}

pub(super) fn run_once(execute: &mut Execute<'_>, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError> {
    all_ran(execute(inputs, outputs)?)
}

/// That no task of a sample has failed.
pub(super) fn all_ran(failed: Vec<TaskError>) -> Result<(), ExecutorError> {
    none_failed(failed).map_err(|error| ExecutorError(format!("a sample of zeros: {error}")))
}

fn time_batch(
    execute: &mut Execute<'_>,
    effort: (Effort, &mut Trials<'_>),
    (inputs, mut outputs): (Vec<u8>, Vec<u8>),
    batch: usize,
) -> Result<Measured, ExecutorError> {
    time(effort, batch, &mut || run_once(execute, &inputs, &mut outputs))
}

/// Runs a batch of this size again and again, each time in its turn.
pub(super) fn time(
    (effort, trials): (Effort, &mut Trials<'_>),
    batch: usize,
    execute: &mut dyn FnMut() -> Result<(), ExecutorError>,
) -> Result<Measured, ExecutorError> {
    let mut last = None;
    for _ in 0..effort.warm_up {
        last = Some(trials.run(last, &mut *execute)?);
    }
    let (mut runs, mut all) = (Vec::new(), Span::ZERO);
    while !effort.is_enough(runs.len(), all) {
        let took = trials.run(last, &mut *execute)?;
        (last, all) = (Some(took), all + took);
        runs.push(took);
    }
    Ok(Measured::of(batch, runs))
}

/// l(b) for every b from l at some: never decreasing, linear in between.
fn interpolate(points: &[(usize, Span)]) -> Vec<Span> {
    let mut table = Vec::new();
    let (mut last_batch, mut last) = (0, Span::ZERO);
    for &(batch, measured) in points {
        let reached = measured.max(last);
        let steps = (batch - last_batch) as i64;
        // Before the first measured size there is nothing to interpolate from.
        let from = if last_batch == 0 { reached } else { last };
        table.extend((1..=steps).map(|step| from + (reached - from) * step / steps));
        (last_batch, last) = (batch, reached);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_dense_where_batches_are_small() {
        assert_eq!(few_sizes(1), [1]);
        assert_eq!(few_sizes(20), [1, 2, 3, 4, 6, 8, 12, 16, 20]);
    }

    #[test]
    fn what_a_batch_of_unequal_tasks_takes_goes_through_what_was_measured() {
        let fitted = fit(Span(2_000), Span(12_000), (5, Span(32_000)));
        assert_eq!(fitted, BatchCost { fixed: Span(2_000), per_task_ppm: 500_000 });
        // Alone the longest is no slower: all of it is fixed.
        let flat = fit(Span(3_000), Span(2_000), (8, Span(2_000)));
        assert_eq!(flat, BatchCost { fixed: Span(2_000), per_task_ppm: BatchCost::PER_TASK_MAX });
        // One after another, and noise beyond that; or for nothing.
        assert_eq!(fit(Span(0), Span(10), (2, Span(25))).per_task_ppm, BatchCost::PER_TASK_MAX);
        assert_eq!(fit(Span(0), Span(10), (2, Span(9))).per_task_ppm, 1);
    }

    #[test]
    fn an_outlier_raises_what_follows_and_gaps_are_filled() {
        let points = [(1, Span(10)), (2, Span(8)), (4, Span(30)), (8, Span(50))];
        assert_eq!(interpolate(&points), [10, 10, 20, 30, 35, 40, 45, 50].map(Span));
    }

    #[test]
    fn the_confidence_narrows_with_the_runs() {
        let of = |runs: i64| Measured::of(1, (1..=runs).rev().map(|run| Span(run * 1_000_000 / runs)).collect());
        let few = of(10);
        assert_eq!((few.runs, few.median, few.estimate), (10, Span(500_000), Span(900_000)));
        assert!(few.confidence.0 <= few.estimate && few.estimate <= few.confidence.1, "{few:?}");
        let width = |measured: Measured| measured.confidence.1 - measured.confidence.0;
        // 1.96 * sqrt(0.9 * 0.1 / 1000) to both sides.
        let many = of(1000);
        assert!((Span(30_000)..Span(45_000)).contains(&width(many)), "{many:?}");
        assert!(width(many) < width(of(100)));
        assert_eq!(Measured::of(1, vec![Span(0)]).estimate, Span(1), "never nothing");
    }
}
