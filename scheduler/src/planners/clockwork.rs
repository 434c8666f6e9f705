//! Clockwork (OSDI 2020), section 5.3 and appendix B: whenever a GPU has less than 5 ms of work, it is given the batch
//! that must start first.
//!
//! Clockwork's strategies are (request, batch size) pairs in one queue, ordered by their required start,
//! `deadline - l(b)`. A strategy is passed over if its model has too few requests for it, or enough for a larger one,
//! or if it cannot be on time behind the GPU's work. Of the requests of one model, in the order of deadlines, the k-th
//! has requests behind it for exactly one size that is neither too large nor too small; so a model's first eligible
//! strategy is found by a binary search over k instead of a walk through the queue of all strategies. Requests before
//! the k-th keep waiting, until the smallest strategy's required start has passed.
//!
//! Where GPUs hold but a part of their models, loads are decided by `paging.rs`. What actions take is told by
//! `estimates/rolling.rs`.

use proto::Span;

use super::central;
use crate::policy::{Gathered, View, whole_batch};

/// A worker is given work when it has less than this (section 5.3).
const LOOKAHEAD: Span = Span::from_millis(5);

#[derive(Debug)]
pub(super) struct Clockwork;

impl central::Rule for Clockwork {
    fn ahead(&self) -> Span {
        LOOKAHEAD
    }

    fn gather(&self, view: &View<'_>) -> Gathered {
        whole_batch(view, view.profile.max_batch())
    }

    /// Appendix B: strategies are ordered by required start.
    fn rank(&self, view: &View<'_>, batch: Gathered) -> i64 {
        (view.queue[batch.skip].deadline - view.profile.latency(batch.size)).as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use proto::ModelId;

    use crate::{planners::testing::Bench, policy::Policy};

    /// l(b) = b + 5 ms, one GPU.
    #[test]
    fn the_next_batch_is_given_5_ms_before_the_gpu_frees() {
        let mut bench = Bench::new(Policy::Clockwork, 1, 1);
        bench.submit(0.0, 0, 12.0);
        assert_eq!(bench.decide(0.0), ["model 0 on GPU 0 at 0: [0]"]);
        bench.submit(0.5, 0, 12.5);
        bench.submit(0.5, 0, 12.5);
        // It has 5.5 ms of work.
        assert_eq!(bench.decide(0.5), [""; 0]);
        assert_eq!(bench.timeout(), Some(1.0));
        // From 6 to 12.5 is no time for two. There are enough requests for a batch of two, so one of task 1 alone is
        // too small; task 2 has none behind it, and is on time.
        assert_eq!(bench.decide(1.0), ["model 0 on GPU 0 at 6: [2]"]);
        // Task 1 waits until not even an idle GPU would be in time.
        assert_eq!(bench.decide(6.5), [""; 0]);
        assert_eq!(bench.decide(6.501), ["dropped [1]: Deadline"]);
    }

    /// A load takes 8 ms; two tasks of one model want it more than one of another.
    #[test]
    fn the_model_that_waits_most_is_loaded_first_and_the_one_that_was_used_last_stays() {
        let mut bench = Bench::paged(Policy::Clockwork, 1, 3, 2);
        bench.submit(0.0, 0, 40.0);
        bench.submit(0.0, 1, 60.0);
        bench.submit(0.0, 1, 60.0);
        assert_eq!(bench.decide(0.0), ["load model 1 into GPU 0 at 0"]);
        assert_eq!(bench.timeout(), Some(3.0));
        assert_eq!(bench.decide(3.0), ["load model 0 into GPU 0 at 8"]);
        bench.loaded(8.0, 0, 1, true);
        assert_eq!(bench.decide(8.0), ["model 1 on GPU 0 at 8: [1, 2]"]);
        bench.loaded(16.0, 0, 0, true);
        assert_eq!(bench.decide(16.0), ["model 0 on GPU 0 at 16: [0]"]);
        bench.finished(0, 15.0);
        bench.finished(0, 22.0);
        bench.submit(30.0, 2, 80.0);
        assert_eq!(bench.decide(30.0), ["unload model 1 from GPU 0", "load model 2 into GPU 0 at 30"]);
        // No load would be in time.
        bench.submit(60.0, 1, 70.0);
        assert_eq!(bench.decide(60.0), ["dropped [4]: ColdStart"]);
    }

    /// A load takes 8 ms and the link has as much to do, so what must be loaded and run for 6 ms by 21 ms is refused.
    #[test]
    fn what_no_load_can_serve_behind_what_the_link_has_to_do_is_refused_at_once() {
        let mut bench = Bench::paged(Policy::Clockwork, 1, 3, 3);
        bench.submit(0.0, 0, 40.0);
        assert_eq!(bench.decide(0.0), ["load model 0 into GPU 0 at 0"]);
        bench.submit(0.0, 1, 21.0);
        bench.submit(0.0, 2, 22.0);
        assert!(bench.planner.is_cold(ModelId(0)) && bench.planner.is_cold(ModelId(1)));
        assert_eq!(bench.decide(0.0), ["dropped [1]: ColdStart"]);
        assert_eq!(bench.decide(3.0), ["load model 2 into GPU 0 at 8"]);
        bench.loaded(8.0, 0, 0, true);
        assert!(!bench.planner.is_cold(ModelId(0)) && bench.planner.is_cold(ModelId(1)));
    }

    #[test]
    fn the_earliest_required_start_goes_first_and_larger_batches_must_start_earlier() {
        let mut bench = Bench::new(Policy::Clockwork, 1, 2);
        // Required starts: model 0 at 30 - l(1) = 24, model 1 at 32 - l(3) = 24 - and a bit earlier.
        bench.submit(0.0, 0, 30.0);
        for _ in 0..3 {
            bench.submit(0.0, 1, 31.9);
        }
        assert_eq!(bench.decide(0.0), ["model 1 on GPU 0 at 0: [1, 2, 3]"]);
        assert_eq!(bench.decide(3.0), ["model 0 on GPU 0 at 8: [0]"]);
    }
}
