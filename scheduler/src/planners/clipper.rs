//! Clipper (NSDI 2017), sections 4.3 and 4.4: each replica of a model has a queue of its own and finds its largest
//! batch by additive increase and multiplicative decrease. The batch is as many tasks as there are, up to that; the
//! time that tasks have waited does not matter, and nothing is rejected for being late.
//!
//! Every GPU has a replica of each model that it holds. Clipper runs its containers side by side on a GPU; here they
//! take turns, and the time in which a replica waits for its turn counts as time to process its batch.

use std::collections::{BTreeMap, BTreeSet};

use proto::{GpuId, LatencyProfile, ModelId, Timestamp};

use super::replicas::{self, Outcome, Placement};
use crate::policy::{Gathered, View};

/// Added to the largest batch while latency is within the objective (section 4.3.1: a fixed amount).
const INCREASE: f64 = 1.0;
/// What is left of it when latency exceeds the objective (section 4.3.1: a back-off of 10 %).
const BACK_OFF: f64 = 0.9;

#[derive(Debug)]
pub(super) struct Clipper;

impl replicas::Rule for Clipper {
    fn plan(
        &mut self,
        _now: Timestamp,
        _profiles: &[Option<LatencyProfile>],
        hosts: &BTreeMap<GpuId, BTreeSet<ModelId>>,
    ) -> Vec<Placement> {
        let placement = |gpu, model| Placement { gpu, model, batch_max: None, weight: 1.0 };
        hosts.iter().flat_map(|(&gpu, models)| models.iter().map(move |&model| placement(gpu, model))).collect()
    }

    /// Only what nobody waits for any more is left out.
    fn gather(&self, view: &View<'_>, batch_max: usize) -> Gathered {
        let skip = view.queue.partition_point(|task| task.deadline < view.now);
        Gathered { skip, size: (view.queue.len() - skip).min(batch_max) }
    }

    fn latest(&self, _view: &View<'_>, _batch: Gathered) -> Timestamp {
        Timestamp::NEVER
    }

    /// A batch that was not full says nothing of larger ones.
    fn learn(&self, batch_max: f64, outcome: Outcome) -> f64 {
        if outcome.latency > outcome.objective {
            (batch_max * BACK_OFF).max(1.0)
        } else if outcome.was_full {
            (batch_max + INCREASE).min(LatencyProfile::MAX_BATCH as f64)
        } else {
            batch_max
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::Span;

    use super::{replicas::Rule, *};
    use crate::{planners::testing::Bench, policy::Policy};

    #[test]
    fn batches_grow_by_one_and_shrink_by_a_tenth() {
        let outcome = |was_full, latency, objective| Outcome {
            was_full,
            latency: Span::from_millis(latency),
            objective: Span::from_millis(objective),
        };
        assert_eq!(Clipper.learn(10.0, outcome(true, 20, 20)), 11.0);
        assert_eq!(Clipper.learn(10.0, outcome(false, 20, 20)), 10.0);
        assert_eq!(Clipper.learn(10.0, outcome(false, 21, 20)), 9.0);
        assert_eq!(Clipper.learn(1.0, outcome(true, 21, 20)), 1.0);
    }

    /// l(b) = b + 5 ms, an objective of 8 ms: l(3) is just within it.
    #[test]
    fn a_replica_takes_what_there_is_up_to_its_own_largest_batch() {
        let mut bench = Bench::new(Policy::Clipper, 2, 1);
        for _ in 0..8 {
            bench.submit(0.0, 0, 8.0);
        }
        // Tasks go to the two replicas in turn; each starts with batches of one.
        let first = ["model 0 on GPU 0 at 0: [0]", "model 0 on GPU 1 at 0: [1]"];
        assert_eq!(bench.decide(0.0), first);
        bench.finished(0, 6.0);
        bench.finished(1, 9.0);
        // GPU 0 was within the objective and grows, though all tasks will be late; GPU 1 was not.
        assert_eq!(bench.decide(6.0), ["model 0 on GPU 0 at 6: [2, 4]"]);
        for _ in 0..4 {
            bench.submit(9.0, 0, 17.0);
        }
        // What has expired by now is given up.
        assert_eq!(
            bench.decide(9.0),
            ["model 0 on GPU 1 at 9: [9]", "dropped [3]: Deadline", "dropped [5]: Deadline", "dropped [7]: Deadline"]
        );
    }
}
