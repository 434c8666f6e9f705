//! What executions teach about l(b). A backend measures a model once, when it loads it; afterwards clocks throttle and
//! neighbours share the device, and a plan that still trusts the offer is late with every batch.
//!
//! Clockwork (section 5) predicts each action by its last ten durations. Here what is kept of an execution is how long
//! it took against the offer at its batch size, so that rare sizes profit from frequent ones and the shape of the
//! offer stays (an estimate never decreases in b). A GPU's factor is the median of its last [`WINDOW`]: single outliers
//! are what windows and the network's jitter are for, what lasts is what is learned. The model's factor is that of its
//! slowest GPU, as a batch must fit its window on whichever GPU it gets; it follows when it is off by more than
//! [`TOLERANCE`], so that noise changes nothing.
//!
//! If a model does not run any more, perhaps since its estimate leaves no time to, the offer holds again after
//! [`FORGET_AFTER`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{GpuId, LatencyProfile, ModelId, Span, Timestamp};

use crate::indexed_heap::IndexedHeap;

/// Executions of a model on a GPU that count; fewer than that teach nothing yet.
const WINDOW: usize = 32;
/// What is learned is used once it is off by more than this part.
const TOLERANCE: f64 = 0.05;
/// Factors beyond are not believed: such a backend is to be looked at, or its offer was of another model.
const FACTOR_MIN: u32 = AS_OFFERED / 2;
const FACTOR_MAX: u32 = AS_OFFERED * 4;
/// Factors are in thousandths, so that they are ordered and one seed gives one history.
const AS_OFFERED: u32 = 1000;
/// A model without an execution for so long is taken to be as fast as offered.
const FORGET_AFTER: Span = Span::from_millis(10_000);

/// The profiles that the scheduler plans with.
#[derive(Debug)]
pub struct Estimates {
    is_on: bool,
    models: BTreeMap<ModelId, Estimate>,
    /// By model: when its offer holds again, if it does not.
    forgotten_at: IndexedHeap,
    changed: VecDeque<ModelId>,
}

/// Bounded by the GPUs that host the model.
#[derive(Debug)]
struct Estimate {
    offered: LatencyProfile,
    /// `offered` times `factor`.
    current: LatencyProfile,
    factor: u32,
    gpus: BTreeMap<GpuId, Window>,
    /// Of all GPUs with a full window; the last one is the slowest.
    medians: BTreeSet<(u32, GpuId)>,
}

/// The last factors of one GPU.
#[derive(Debug, Default)]
struct Window {
    factors: VecDeque<u32>,
    /// Once it is full.
    median: Option<u32>,
}

impl Window {
    fn push(&mut self, factor: u32) {
        if self.factors.len() == WINDOW {
            self.factors.pop_front();
        }
        self.factors.push_back(factor);
        if self.factors.len() == WINDOW {
            let mut sorted: [u32; WINDOW] = std::array::from_fn(|index| self.factors[index]);
            sorted.sort_unstable();
            self.median = Some(sorted[WINDOW / 2]);
        }
    }
}

impl Estimates {
    /// Without models. If it is not on, offers hold for ever.
    #[must_use]
    pub fn new(is_on: bool) -> Self {
        Self { is_on, models: BTreeMap::new(), forgotten_at: IndexedHeap::default(), changed: VecDeque::new() }
    }

    /// A model with a new offer: what was measured against the last one is gone.
    pub fn handle_model(&mut self, id: ModelId, offered: LatencyProfile) {
        self.forgotten_at.remove(id.0);
        let (gpus, medians) = (BTreeMap::new(), BTreeSet::new());
        self.models.insert(id, Estimate { current: offered.clone(), offered, factor: AS_OFFERED, gpus, medians });
        self.changed.push_back(id);
    }

    /// A GPU ran a batch of `size` for `execution`. One that is larger than the newest offer allows teaches nothing.
    ///
    /// # Panics
    /// If the model is not here.
    pub fn handle_executed(&mut self, now: Timestamp, id: ModelId, gpu: GpuId, size: usize, execution: Span) {
        let estimate = self.models.get_mut(&id).expect("only known models run");
        if !self.is_on || size > estimate.offered.max_batch() {
            return;
        }
        let offered_ns = estimate.offered.latency(size).as_nanos() as f64;
        let factor = (execution.as_nanos() as f64 / offered_ns * f64::from(AS_OFFERED)).round() as u32;
        let window = estimate.gpus.entry(gpu).or_default();
        let before = window.median;
        window.push(factor.clamp(FACTOR_MIN, FACTOR_MAX));
        if window.median != before {
            if let Some(median) = before {
                estimate.medians.remove(&(median, gpu));
            }
            estimate.medians.extend(window.median.map(|median| (median, gpu)));
        }
        if estimate.follow() {
            self.changed.push_back(id);
        }
        if estimate.factor == AS_OFFERED {
            self.forgotten_at.remove(id.0);
        } else {
            self.forgotten_at.set(id.0, now + FORGET_AFTER);
        }
    }

    /// A GPU is gone. Models that it was the slowest of follow with their next execution. A scan: GPUs leave rarely.
    pub fn handle_gpu_left(&mut self, gpu: GpuId) {
        for estimate in self.models.values_mut() {
            if let Some(median) = estimate.gpus.remove(&gpu).and_then(|window| window.median) {
                estimate.medians.remove(&(median, gpu));
            }
        }
    }

    /// Forgets what is too old.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        while let Some((at, id)) = self.forgotten_at.peek()
            && at <= now
        {
            let offered = self.models[&ModelId(id)].offered.clone();
            self.handle_model(ModelId(id), offered);
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.forgotten_at.peek().map(|(at, _)| at)
    }

    /// The next model whose profile is another one now.
    pub fn poll_changed(&mut self) -> Option<ModelId> {
        self.changed.pop_front()
    }

    /// What to plan a model with.
    ///
    /// # Panics
    /// If it is not here.
    #[must_use]
    pub fn profile(&self, id: ModelId) -> &LatencyProfile {
        &self.models[&id].current
    }
}

impl Estimate {
    /// True if the profile has changed.
    fn follow(&mut self) -> bool {
        let Some(&(slowest, _)) = self.medians.last() else { return false };
        let (slowest_part, part) = (f64::from(slowest), f64::from(self.factor));
        if slowest_part <= part * (1.0 + TOLERANCE) && part <= slowest_part * (1.0 + TOLERANCE) {
            return false;
        }
        self.factor = slowest;
        self.current = scaled(&self.offered, slowest);
        true
    }
}

/// A profile times a factor; as that is positive, the result does not decrease in b either.
fn scaled(profile: &LatencyProfile, factor: u32) -> LatencyProfile {
    let part = f64::from(factor) / f64::from(AS_OFFERED);
    let scale = |batch| Span(((profile.latency(batch).as_nanos() as f64 * part).round() as i64).clamp(1, i64::MAX - 1));
    LatencyProfile::from_table((1..=profile.max_batch()).map(scale).collect()).expect("as positive as it was")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODEL: ModelId = ModelId(3);

    fn offered() -> LatencyProfile {
        LatencyProfile::linear(1.0, 5.0, 8).unwrap()
    }

    fn estimates() -> Estimates {
        let mut estimates = Estimates::new(true);
        estimates.handle_model(MODEL, offered());
        assert_eq!(estimates.poll_changed(), Some(MODEL));
        estimates
    }

    /// `count` batches of all sizes on one GPU, each `factor` times as long as offered, from `now` on every 10 ms.
    fn execute(estimates: &mut Estimates, now: Timestamp, gpu: u32, factor: f64, count: usize) {
        for index in 0..count {
            let size = 1 + index % 8;
            let execution = Span::from_millis_f64(offered().latency(size).as_millis_f64() * factor);
            estimates.handle_executed(now + Span::from_millis(10) * index as i64, MODEL, GpuId(gpu), size, execution);
        }
    }

    #[test]
    fn what_lasts_is_learned_and_what_does_not_is_not() {
        let mut estimates = estimates();
        execute(&mut estimates, Timestamp(0), 0, 1.04, 1000);
        execute(&mut estimates, Timestamp(0), 0, 1.0, WINDOW);
        execute(&mut estimates, Timestamp(0), 0, 3.0, WINDOW / 2 - 1);
        assert_eq!(estimates.poll_changed(), None);
        execute(&mut estimates, Timestamp(0), 0, 1.2, WINDOW);
        assert_eq!(estimates.poll_changed(), Some(MODEL));
        assert_eq!(estimates.profile(MODEL), &LatencyProfile::linear(1.2, 6.0, 8).unwrap());
        execute(&mut estimates, Timestamp(0), 0, 0.9, WINDOW);
        assert_eq!(estimates.profile(MODEL), &LatencyProfile::linear(0.9, 4.5, 8).unwrap());
    }

    #[test]
    fn the_slowest_gpu_counts_until_it_leaves() {
        let mut estimates = estimates();
        for gpu in 0..4 {
            execute(&mut estimates, Timestamp(0), gpu, if gpu == 2 { 1.5 } else { 1.0 }, WINDOW);
        }
        assert_eq!(estimates.profile(MODEL).latency(1), Span::from_millis(9));
        estimates.handle_gpu_left(GpuId(2));
        execute(&mut estimates, Timestamp(0), 0, 1.0, 1);
        assert_eq!(estimates.profile(MODEL), &offered());
        assert_eq!(estimates.poll_timeout(), None);
    }

    #[test]
    fn an_estimate_that_leaves_no_time_to_run_is_forgotten() {
        let mut estimates = estimates();
        execute(&mut estimates, Timestamp(0), 0, 100.0, WINDOW);
        assert_eq!(estimates.profile(MODEL).latency(1), Span::from_millis(24), "four times at most");
        let last = Timestamp(0) + Span::from_millis(10) * (WINDOW as i64 - 1);
        assert_eq!(estimates.poll_timeout(), Some(last + FORGET_AFTER));
        estimates.handle_timeout(last + FORGET_AFTER);
        assert_eq!((estimates.profile(MODEL), estimates.poll_timeout()), (&offered(), None));
    }

    #[test]
    fn offers_hold_if_it_is_off_and_a_new_offer_starts_anew() {
        let mut off = Estimates::new(false);
        off.handle_model(MODEL, offered());
        execute(&mut off, Timestamp(0), 0, 2.0, 2 * WINDOW);
        assert_eq!(off.profile(MODEL), &offered());
        let mut on = estimates();
        execute(&mut on, Timestamp(0), 0, 2.0, WINDOW);
        let slower = LatencyProfile::linear(2.0, 10.0, 8).unwrap();
        on.handle_model(MODEL, slower.clone());
        execute(&mut on, Timestamp(0), 0, 2.0, WINDOW);
        assert_eq!(on.profile(MODEL), &slower);
    }

    proptest! {
        /// The oracle keeps all factors of each GPU and sorts them at every step.
        #[test]
        fn is_the_median_of_the_slowest_gpu(
            steps in proptest::collection::vec((0u32..3, 1usize..=8, -5_000i64..60_000, 0u32..50), 0..400),
        ) {
            let mut estimates = estimates();
            let mut oracle = BTreeMap::<u32, Vec<u32>>::new();
            let mut expected = AS_OFFERED;
            for (gpu, size, execution_us, leaves) in steps {
                if leaves == 0 {
                    estimates.handle_gpu_left(GpuId(gpu));
                    oracle.remove(&gpu);
                }
                let execution = Span::from_micros(execution_us);
                estimates.handle_executed(Timestamp(0), MODEL, GpuId(gpu), size, execution);
                let ratio = execution.as_nanos() as f64 / offered().latency(size).as_nanos() as f64;
                oracle.entry(gpu).or_default().push((ratio * 1000.0).round().clamp(500.0, 4000.0) as u32);
                let median = |factors: &Vec<u32>| {
                    let mut last = factors[factors.len().checked_sub(WINDOW)?..].to_vec();
                    last.sort_unstable();
                    Some(last[WINDOW / 2])
                };
                if let Some(slowest) = oracle.values().filter_map(median).max()
                    && (f64::from(slowest) > f64::from(expected) * 1.05 || f64::from(expected) > f64::from(slowest) * 1.05)
                {
                    expected = slowest;
                }
                prop_assert_eq!(estimates.profile(MODEL), &scaled(&offered(), expected));
                // Never decreasing, and so on.
                prop_assert!(estimates.profile(MODEL).clone().validated().is_ok());
            }
        }
    }
}
