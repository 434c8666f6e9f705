//! l(b) beyond l(1), of a model that is served already: its batches double, and each size runs while nothing else does.
//! Until then, and where a batch would take too long, batches are taken to last as long as those that were measured,
//! one after another. The scheduler re-estimates all of it from results.

use std::sync::{Arc, Weak};

use proto::{BatchCost, LatencyProfile, ModelId, Span};
use transport::Waker;

use super::{
    loader::Done,
    loading::{Means, remember},
    profile::{self, Effort, Measured},
    remembered::Costs,
    turns::Trials,
};
use crate::{config::Config, error::ExecutorError, executor::Loaded};

/// A size is not measured whose batch should take longer: no objective is met by it, and it would delay who comes.
const BATCH_MAX: Span = Span::from_millis(250);

/// What is known of l(b), and what runs next.
#[derive(Debug)]
pub(super) struct Sizes {
    batch_max: usize,
    /// l of what has been measured, l(1) first.
    points: Vec<(usize, Span)>,
    /// Runs of the next size; the first warms up.
    runs: Vec<Span>,
}

impl Sizes {
    /// With what has been measured, l(1) first.
    pub(super) fn new(points: Vec<(usize, Span)>, batch_max: usize) -> Self {
        Self { batch_max, points, runs: Vec::new() }
    }

    /// The batch to run next, and how long it should take at most; `None` once there is no more to be learned.
    pub(super) fn next(&self) -> Option<(usize, Span)> {
        let &(last, took) = self.points.last()?;
        let size = (last * 2).min(self.batch_max);
        let takes = self.runs.last().copied().unwrap_or(took * size as i64 / last as i64);
        (size > last && takes <= BATCH_MAX).then_some((size, takes))
    }

    /// It has run.
    pub(super) fn handle_ran(&mut self, took: Span) {
        let Some((size, _)) = self.next() else { return };
        self.runs.push(took);
        let effort = Effort::AT_START;
        let counted = &self.runs[effort.warm_up.min(self.runs.len())..];
        if effort.is_enough(counted.len(), counted.iter().copied().sum()) {
            self.points.push((size, Measured::of(size, counted.to_vec()).estimate));
            self.runs.clear();
        }
    }

    /// l(b).
    pub(super) fn profile(&self) -> LatencyProfile {
        let &(last, took) = self.points.last().expect("l(1) is one");
        let rest = (last < self.batch_max).then(|| (self.batch_max, took * self.batch_max as i64 / last as i64));
        profile::through(&self.points.iter().copied().chain(rest).collect::<Vec<_>>())
    }

    /// What a batch costs whose tasks are unequal, if its fixed part is known: by the largest that was measured.
    pub(super) fn cost(&self, known: Option<BatchCost>) -> Option<BatchCost> {
        let (&(_, longest), &largest) = (self.points.first()?, self.points.last()?);
        known.map(|cost| if largest.0 > 1 { profile::fit(cost.fixed, longest, largest) } else { cost })
    }
}

/// A model to be measured.
pub(super) struct Measure {
    /// Comes back with the result.
    pub(super) session: u64,
    /// Comes back with the result.
    pub(super) model: ModelId,
    /// What is hosted under it, for as long as it is.
    pub(super) loaded: Weak<Loaded>,
    /// Whom to wake when it has ended.
    pub(super) waker: Waker,
}

/// What came of a step.
pub(super) enum Step {
    /// One batch has run, or what follows is known now.
    Made,
    /// The GPUs are not idle.
    PutOff,
    /// That was the last one; `None` if the model has gone, or nothing could be learned.
    Over(Option<(LatencyProfile, Option<BatchCost>)>),
}

/// One that is being measured.
pub(super) struct Measuring {
    of: Measure,
    /// A task's input, once one is found that runs.
    sample: Option<Vec<u8>>,
    sizes: Option<Sizes>,
}

impl Measuring {
    pub(super) fn new(of: Measure) -> Self {
        Self { of, sample: None, sizes: None }
    }

    /// What its session is told, and whom to wake for that.
    pub(super) fn done(self, measured: Option<(LatencyProfile, Option<BatchCost>)>) -> (Done, Waker) {
        let Measure { session, model, loaded: of, waker } = self.of;
        (Done::Measured { session, model, of, measured }, waker)
    }

    /// Runs one batch, if it is its turn.
    pub(super) fn step(&mut self, means: &Means, config: &Config) -> Step {
        let Some(loaded) = self.of.loaded.upgrade() else { return Step::Over(None) };
        let mut trials = means.trials();
        trials.begin(&loaded.gpu_indexes);
        match self.run(&loaded, &mut trials) {
            Some(Ok(true)) => Step::Made,
            Some(Ok(false)) => Step::Over(self.end(&loaded, config)),
            Some(Err(error)) => {
                tracing::warn!(model = loaded.model.name, %error, "what larger batches take is learned from requests");
                Step::Over(self.end(&loaded, config))
            }
            None => Step::PutOff,
        }
    }

    /// Whether there was anything left to run; `None` if it was not its turn.
    fn run(&mut self, loaded: &Arc<Loaded>, trials: &mut Trials<'_>) -> Option<Result<bool, ExecutorError>> {
        let (model, executor) = (&loaded.model, loaded.executor.as_ref());
        let l_1 = loaded.profile.latency(1);
        let sizes = self.sizes.get_or_insert_with(|| Sizes::new(vec![(1, l_1)], loaded.profile.max_batch()));
        let Some((batch, takes)) = sizes.next() else { return Some(Ok(false)) };
        let execute = &mut |inputs: &[u8], outputs: &mut [u8]| executor.execute(inputs, outputs);
        let Some(sample) = &self.sample else {
            let found = trials.if_idle(l_1 * 2, |trials| profile::sample(model, execute, trials))?;
            return Some(found.map(|sample| self.sample = Some(sample)).map(|()| true));
        };
        let (inputs, mut outputs) = (sample.repeat(batch), vec![0; batch * model.output_bytes()]);
        let ran = trials
            .if_idle(takes, |trials| trials.run(Some(takes), || profile::run_once(execute, &inputs, &mut outputs)))?;
        Some(ran.map(|took| sizes.handle_ran(took)).map(|()| true))
    }

    fn end(&self, loaded: &Loaded, config: &Config) -> Option<(LatencyProfile, Option<BatchCost>)> {
        let sizes = self.sizes.as_ref()?;
        let (profile, cost) = (sizes.profile(), sizes.cost(loaded.cost));
        let (model, largest) = (&loaded.model, sizes.points.last()?);
        tracing::info!(model = model.name, size = largest.0, takes = %largest.1, "batches measured up to this size");
        remember(config, model, &Costs::new(&sizes.points, cost, loaded.executor.is_apart()));
        Some((profile, cost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    /// Measures a model whose batches take so long; yields the sizes that ran, and what is known in the end.
    fn measured(batch_max: usize, latency: impl Fn(usize) -> Span) -> (Vec<usize>, Sizes) {
        let mut sizes = Sizes::new(vec![(1, latency(1))], batch_max);
        let mut ran = Vec::new();
        while let Some((size, takes)) = sizes.next() {
            assert!(latency(size) <= takes || ran.last() == Some(&size), "no longer than its tasks one after another");
            ran.push(size);
            sizes.handle_ran(latency(size));
        }
        ran.dedup();
        (ran, sizes)
    }

    #[test]
    fn sizes_double_and_what_lies_between_is_interpolated() {
        let line = |size: usize| Span(MS * (5 + size as i64));
        let (ran, sizes) = measured(20, line);
        assert_eq!(ran, [2, 4, 8, 16, 20]);
        let profile = sizes.profile();
        assert_eq!(profile, LatencyProfile::from_table((1..=20).map(line).collect()).unwrap());
        let (ran, sizes) = measured(1, line);
        assert_eq!((ran.len(), sizes.profile().max_batch()), (0, 1));
    }

    #[test]
    fn what_takes_long_is_not_run_and_is_taken_to_last_as_long_as_its_parts() {
        let (ran, sizes) = measured(64, |size| Span(20 * MS * size as i64));
        assert_eq!(ran, [2, 4, 8], "16 would take 320 ms");
        assert_eq!(sizes.profile().latency(64), Span(20 * MS * 64));
        // Its parts took too long already.
        let (ran, _) = measured(64, |_| Span(BATCH_MAX.as_nanos() / 2 + 1));
        assert!(ran.is_empty());
    }

    #[test]
    fn the_cost_of_unequal_tasks_goes_through_the_largest_batch() {
        let (_, sizes) = measured(8, |size| Span(MS * (10 + 2 * size as i64)));
        let known = BatchCost { fixed: Span(4 * MS), per_task_ppm: BatchCost::PER_TASK_MAX };
        // Each further task adds 2 ms of the 8 beyond what is fixed.
        assert_eq!(sizes.cost(Some(known)), Some(BatchCost { fixed: Span(4 * MS), per_task_ppm: 250_000 }));
        assert_eq!(sizes.cost(None), None);
        let (_, one) = measured(1, |_| Span(MS));
        assert_eq!(one.cost(Some(known)), Some(known));
    }
}
