//! Measures l(b). The estimate is what nine runs in ten stay within; the scheduler re-estimates it from results.

use proto::{LatencyProfile, Span};
use transport::Clock;

use crate::{
    executor::{Executor, ExecutorError},
    staging::ModelShape,
};

/// Runs of each measured batch size, if they are quick. The first of all warms caches up and is not counted.
const RUNS_MAX: usize = 30;
/// Runs of each measured batch size, however slow.
const RUNS_MIN: usize = 3;
/// Time for the runs of one batch size beyond the least.
const RUNS_SPAN: Span = Span::from_millis(50);
/// The share of runs that the estimate covers.
const QUANTILE: f64 = 0.9;

/// Warms `executor` up and measures l(b) for every batch size; an emulated GPU says what it is.
pub(super) fn measure(
    clock: Clock,
    shape: ModelShape,
    executor: &dyn Executor,
) -> Result<LatencyProfile, ExecutorError> {
    if let Some(profile) = executor.emulated_profile() {
        return Ok(profile.clone());
    }
    let sizes = measured_sizes(shape.batch_max);
    let mut points = Vec::new();
    for &batch in &sizes {
        points.push((batch, time_batch(clock, shape, executor, batch)?));
    }
    Ok(LatencyProfile::from_table(interpolate(&points)).expect("positive and monotone by construction"))
}

/// 1, 2, 3, 4, 6, 8, 12, 16, ...: powers of two, the middles between them, and the largest.
fn measured_sizes(batch_max: usize) -> Vec<usize> {
    let powers = (0..usize::BITS).map(|power| 1usize << power).take_while(|&size| size <= batch_max);
    let mut sizes: Vec<usize> = powers.flat_map(|power| [power, power + power / 2]).collect();
    sizes.push(batch_max);
    sizes.retain(|&size| size <= batch_max);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn time_batch(clock: Clock, shape: ModelShape, executor: &dyn Executor, batch: usize) -> Result<Span, ExecutorError> {
    let inputs = vec![0; batch * shape.input_bytes];
    let mut outputs = vec![0; batch * shape.output_bytes];
    executor.execute(&inputs, &mut outputs)?;
    let started_at = clock.now();
    let mut spans = Vec::new();
    while spans.len() < RUNS_MIN || (spans.len() < RUNS_MAX && clock.now() - started_at < RUNS_SPAN) {
        let before = clock.now();
        executor.execute(&inputs, &mut outputs)?;
        spans.push(clock.now() - before);
    }
    spans.sort_unstable();
    Ok(spans[((spans.len() - 1) as f64 * QUANTILE) as usize].max(Span(1)))
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
        assert_eq!(measured_sizes(1), [1]);
        assert_eq!(measured_sizes(20), [1, 2, 3, 4, 6, 8, 12, 16, 20]);
    }

    #[test]
    fn an_outlier_raises_what_follows_and_gaps_are_filled() {
        let points = [(1, Span(10)), (2, Span(8)), (4, Span(30)), (8, Span(50))];
        assert_eq!(interpolate(&points), [10, 10, 20, 30, 35, 40, 45, 50].map(Span));
    }
}
