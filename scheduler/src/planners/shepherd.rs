//! Shepherd's Flex (NSDI 2023), as Symphony's section 2.2 describes it: whenever a GPU is free it is given the largest
//! batch of any model, and a running batch is killed for one that is at least three times as large.
//!
//! A killed batch is lost work; its tasks queue again and are dropped once they cannot be on time. Backends cannot kill
//! a batch, so this policy runs in simulation only.

use proto::Span;

use super::central;
use crate::policy::{Gathered, View, whole_batch};

/// How much larger a batch must be to replace a running one (Symphony, section 2.2).
const PREEMPTION_FACTOR: usize = 3;

#[derive(Debug)]
pub(super) struct Shepherd;

impl central::Rule for Shepherd {
    fn ahead(&self) -> Span {
        Span::ZERO
    }

    /// The largest batch from any head on; of two the one that skips fewer.
    fn gather(&self, view: &View<'_>) -> Gathered {
        // From one head to the next the tasks behind it get fewer and those that fit more: the largest batch is where
        // the two meet, or just before.
        let whole = whole_batch(view, view.profile.max_batch());
        let before = whole.skip.saturating_sub(1);
        let size = view.longest_batch(before);
        if size >= whole.size { Gathered { skip: before, size } } else { whole }
    }

    fn rank(&self, _view: &View<'_>, batch: Gathered) -> i64 {
        -(batch.size as i64)
    }

    fn preemption_factor(&self) -> Option<usize> {
        Some(PREEMPTION_FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use crate::{planners::testing::Bench, policy::Policy};

    /// l(b) = b + 5 ms.
    #[test]
    fn a_batch_three_times_as_large_replaces_the_one_that_runs() {
        let mut bench = Bench::new(Policy::Shepherd, 1, 1);
        bench.submit(0.0, 0, 12.0);
        assert_eq!(bench.decide(0.0), ["model 0 on GPU 0 at 0: [0]"]);
        bench.submit(1.0, 0, 13.0);
        bench.submit(1.0, 0, 13.0);
        assert_eq!(bench.decide(1.0), [""; 0]);
        bench.submit(2.0, 0, 14.0);
        assert_eq!(bench.decide(2.0), ["preempt GPU 0", "model 0 on GPU 0 at 2: [1, 2, 3]"]);
        // The killed batch is reported, and its task comes back.
        bench.finished(0, 2.0);
        bench.submit_again(2.0, 0, 0, 12.0);
        assert_eq!(bench.decide(2.0), [""; 0]);
        assert_eq!(bench.decide(6.001), ["dropped [0]: Deadline"]);
    }

    #[test]
    fn the_smallest_running_batch_is_replaced() {
        let mut bench = Bench::new(Policy::Shepherd, 2, 1);
        bench.submit(0.0, 0, 20.0);
        bench.submit(0.0, 0, 20.0);
        bench.decide(0.0);
        bench.submit(1.0, 0, 20.0);
        bench.decide(1.0);
        for _ in 0..3 {
            bench.submit(5.0, 0, 20.0);
        }
        assert_eq!(bench.decide(5.0), ["preempt GPU 1", "model 0 on GPU 1 at 5: [3, 4, 5]"]);
    }

    #[test]
    fn the_largest_batch_of_any_model_and_head_goes_first() {
        let mut bench = Bench::new(Policy::Shepherd, 1, 2);
        bench.submit(0.0, 0, 6.5);
        bench.submit(0.0, 1, 7.0);
        bench.submit(0.0, 1, 9.0);
        bench.submit(0.0, 1, 9.0);
        // From model 1's first task two fit, from its second both of the rest: of equal sizes the one that skips none.
        assert_eq!(bench.decide(0.0), ["model 1 on GPU 0 at 0: [1, 2]"]);
    }
}
