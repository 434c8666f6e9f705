//! Symphony as its authors' scheduler runs it: as deferred, with heads given up for a target that follows the rate.
//!
//! A batch that runs for l(b) at a rate r keeps `n = r l(b) / b` GPUs busy, and one of n GPUs that run in turns frees
//! every `l(b) / n`. The target is the largest b with `l(b) (1 + 1 / n) <= SLO`: what a task may wait for that, and
//! then run. Until the rate has been measured it is the batch that a GPU of its own can run, `2 l(b) <= SLO`.

use std::collections::VecDeque;

use proto::{Span, Timestamp};

use super::{BatchPolicy, Gathered, View, frontrun, longest_prefix, whole_batch};

/// The rate is measured over intervals of this length.
const INTERVAL: Span = Span::from_millis(50);
/// It is the mean over so many: a second. The paper leaves that open.
const INTERVALS: usize = 20;

/// What was learned of one model.
#[derive(Debug)]
pub(super) struct Symphony {
    rate: RateMeter,
    /// The window is always open: the paper's eager, which gathers its batches in the same way.
    is_eager: bool,
}

impl Symphony {
    pub(super) fn new(is_eager: bool) -> Self {
        Self { rate: RateMeter::default(), is_eager }
    }

    /// The largest batch that n GPUs can run in turns within a budget.
    fn target(&self, view: &View<'_>, budget: Span) -> usize {
        let Some(gap_ns) = self.rate.gap_ns(view.now) else {
            return view.profile.largest_batch_within(budget / 2);
        };
        // l(b) / n is b gaps: both grow with b, so the largest that fits is found by halves.
        let fits = |batch: usize| {
            view.profile.latency(batch).as_nanos() as f64 + batch as f64 * gap_ns <= budget.as_nanos() as f64
        };
        let (mut fitting, mut too_large) = (0, view.profile.max_batch() + 1);
        while too_large - fitting > 1 {
            let middle = usize::midpoint(fitting, too_large);
            if fits(middle) { fitting = middle } else { too_large = middle }
        }
        fitting
    }
}

impl BatchPolicy for Symphony {
    fn handle_arrived(&mut self, now: Timestamp) {
        self.rate.handle_arrived(now);
    }

    fn gather(&self, view: &View<'_>) -> Gathered {
        let Some(head) = view.queue.front() else { return longest_prefix(view) };
        whole_batch(view, self.target(view, head.deadline - head.queued_at))
    }

    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        if self.is_eager { Timestamp::PAST } else { frontrun(view, batch) }
    }
}

/// Arrivals in the last intervals, each counted once it is over.
#[derive(Debug, Default)]
struct RateMeter {
    /// Of the intervals that are over, the newest last.
    counts: VecDeque<u32>,
    total: u32,
    /// When the interval began that is not over; `None` before the first arrival.
    since: Option<Timestamp>,
    count: u32,
}

impl RateMeter {
    fn handle_arrived(&mut self, now: Timestamp) {
        let since = *self.since.get_or_insert(now);
        let over = (now - since).as_nanos() / INTERVAL.as_nanos();
        // What is older than all that counts need not be gone through.
        for _ in 0..over.min(INTERVALS as i64 + 1) {
            if self.counts.len() == INTERVALS {
                self.total -= self.counts.pop_front().unwrap_or(0);
            }
            self.total += self.count;
            self.counts.push_back(std::mem::take(&mut self.count));
        }
        self.since = Some(since + INTERVAL * over);
        self.count += 1;
    }

    /// From one arrival to the next; `None` before an interval is over in which something came.
    fn gap_ns(&self, now: Timestamp) -> Option<f64> {
        let is_over = self.since.is_some_and(|since| now - since < INTERVAL * INTERVALS as i64);
        let span_ns = (INTERVAL.as_nanos() * self.counts.len() as i64) as f64;
        (is_over && self.total > 0).then(|| span_ns / f64::from(self.total))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::LatencyProfile;

    use super::*;
    use crate::{
        messages::{NetworkBudget, Price},
        task_queue::Queued,
    };

    /// The target after arrivals that each came so many nanoseconds after the one before.
    fn target(profile: &LatencyProfile, gap: Span, arrivals: i64, budget: Span) -> usize {
        let mut policy = Symphony::new(false);
        let mut now = Timestamp::ZERO;
        for _ in 0..arrivals {
            policy.handle_arrived(now);
            now += gap;
        }
        let lead_times = NetworkBudget::default().lead_times(profile);
        let queue: VecDeque<Queued> = VecDeque::new();
        let view = View {
            now,
            free_at: Timestamp::PAST,
            queue: &queue,
            profile,
            lead_times: &lead_times,
            jitter: Span::ZERO,
            price: Price::default(),
        };
        policy.target(&view, budget)
    }

    proptest! {
        /// The oracle is the rule as the paper's appendix has it: n follows b, and each b is tried.
        #[test]
        fn the_target_fits_the_gpus_that_the_rate_keeps_busy(
            rate_per_ms in 1i64..20,
            alpha_us in 10i64..2000,
            beta_us in 0i64..20_000,
            budget_ms in 5i64..100,
        ) {
            let profile = LatencyProfile::from_table(
                (1..=64).map(|batch| Span::from_micros(alpha_us * batch + beta_us)).collect(),
            ).unwrap();
            let fits = |&batch: &usize| {
                let latency_ms = profile.latency(batch).as_millis_f64();
                let gpus = rate_per_ms as f64 * latency_ms / batch as f64;
                latency_ms * (1.0 + 1.0 / gpus) <= budget_ms as f64
            };
            let expected = (1..=64).take_while(fits).count();
            // A whole number of gaps in each interval, so that the measured rate is exact.
            let gap = Span(1_000_000 / rate_per_ms);
            let found = target(&profile, gap, 300 * rate_per_ms, Span::from_millis(budget_ms));
            prop_assert!(found.abs_diff(expected) <= 1, "{found} and {expected}");
        }
    }

    #[test]
    fn before_the_first_interval_is_over_a_gpu_of_its_own_is_the_measure() {
        let profile = LatencyProfile::linear(1.0, 5.0, 64).unwrap();
        let of = |arrivals| target(&profile, Span::from_millis(1), arrivals, Span::from_millis(25));
        // 2 l(7) = 24; at 1,000 a second, l(10) + 10 = 25.
        assert_eq!((of(40), of(60)), (7, 10));
    }

    #[test]
    fn what_came_a_second_ago_does_not_count() {
        let mut rate = RateMeter::default();
        for at_ms in 0..100 {
            rate.handle_arrived(Timestamp::ZERO + Span::from_millis(at_ms));
        }
        let at = |ms| Timestamp::ZERO + Span::from_millis(ms);
        assert_eq!(rate.gap_ns(at(100)), Some(1e6));
        assert_eq!(rate.gap_ns(at(5000)), None, "nothing came for long");
        rate.handle_arrived(at(1_000_000));
        assert_eq!((rate.gap_ns(at(1_000_000)), rate.counts.len()), (None, INTERVALS));
    }
}
