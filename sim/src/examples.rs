//! The worked example of Symphony's section 3.3 (Figures 4 and 5): l(b) = b + 5, an SLO of 12 and three GPUs, requests
//! 0.75 apart; a time unit is a millisecond here. The tests hold these schedules to what the paper's text says of them,
//! `downbeat figures` draws them.

use std::path::Path;

use proto::{GpuId, Span, Timestamp};
use scheduler::Policy;

use crate::{Workload, arrivals::Arrivals, cluster::Cluster, trace::Event};

/// What happened to the requests, in time units.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Numbers of the requests that came.
    pub requests: Vec<i64>,
    /// In the order of their starts.
    pub batches: Vec<Slice>,
    /// Numbers of dropped requests.
    pub dropped: Vec<i64>,
}

/// A batch on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slice {
    /// Counted from 1, as in the paper.
    pub gpu: u32,
    /// Requests in it.
    pub size: u32,
    /// Its start.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// From one request to the next.
const GAP: Span = Span::from_micros(750);

/// When the i-th request, counted from 1, arrives in time units.
#[must_use]
pub fn arrival(i: i64) -> f64 {
    GAP.as_millis_f64() * (i - 1) as f64
}

/// The policies that are the paper's deferred scheduling, with either way to gather a batch (section 3.2). On these
/// requests they are the same: what one GPU reaches is a batch of one, which is the target, and no head is given up.
pub const DEFERRED: [Policy; 2] = [Policy::DeferredTarget, Policy::Deferred];

/// Figure 4: deferred scheduling staggers the GPUs. `policy` is one of [`DEFERRED`].
#[must_use]
pub fn figure_4(policy: Policy) -> Schedule {
    schedule(policy, 1..=48, [0.0; 3])
}

/// Figure 5a: eager scheduling after requests 13 to 15 are missing; until then the GPUs run the batches of Figure 4.
#[must_use]
pub fn figure_5a() -> Schedule {
    schedule(Policy::Eager, 16..=60, [11.25, 14.25, 17.25])
}

/// Figure 5b: deferred scheduling when requests 13 to 15 are missing. `policy` is one of [`DEFERRED`].
#[must_use]
pub fn figure_5b(policy: Policy) -> Schedule {
    schedule(policy, (1..=12).chain(16..=51), [0.0; 3])
}

/// Runs the requests of these numbers on GPUs that are free at the given instants.
fn schedule(policy: Policy, requests: impl Iterator<Item = i64>, free_at: [f64; 3]) -> Schedule {
    const WORKLOAD: &str = "gpus = 3\n[[model]]\nname = \"m\"\nalpha_ms = 1\nbeta_ms = 5\nslo_ms = 12\n";
    let workload = Workload::parse(WORKLOAD, "example", "example", Path::new(".")).expect("a constant workload");
    let (mut batches, mut dropped) = (Vec::new(), Vec::new());
    let units = |at: Timestamp| (at - Timestamp::ZERO).as_millis_f64();
    let mut observe = |event| match event {
        Event::Batch { gpu, size, started_at, finished_at, .. } => {
            batches.push(Slice { gpu: gpu + 1, size, start: units(started_at), end: units(finished_at) });
        }
        Event::Drop { arrived_at, .. } => {
            dropped.push((arrived_at - Timestamp::ZERO).as_nanos() / GAP.as_nanos() + 1);
        }
        Event::Killed { .. } => unreachable!("nothing is preempted and no GPU dies"),
        Event::Answer { .. } => {}
    };
    let measured = (Timestamp::ZERO, Timestamp::NEVER);
    let mut cluster = Cluster::new(&workload, (policy, 0), measured, &mut observe);
    for (gpu, at) in (0..).zip(free_at) {
        cluster.add_gpu(Timestamp::ZERO + Span::from_millis_f64(at), GpuId(gpu));
    }
    let requests: Vec<_> = requests.collect();
    let arrivals = requests.iter().map(|i| Timestamp::ZERO + Span(GAP.as_nanos() * (i - 1))).collect();
    cluster.run(Arrivals::listed(vec![arrivals]), &mut |_| ()).expect("deferred and eager keep the invariants");
    batches.sort_by(|one, other| one.start.total_cmp(&other.start));
    Schedule { requests, batches, dropped }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (start, GPU, size) of each batch.
    fn starts(schedule: &Schedule) -> Vec<(f64, u32, u32)> {
        schedule.batches.iter().map(|batch| (batch.start, batch.gpu, batch.size)).collect()
    }

    #[test]
    fn figure_4_deferred_scheduling_staggers_the_gpus() {
        for schedule in DEFERRED.map(figure_4) {
            // Batch n takes four requests when the last of them arrives, 3 time units after the one before. GPU 1 ends
            // its first batch at 11.25, the instant its second one is due: comparisons are inclusive.
            let expected: Vec<_> = (0u32..12).map(|n| (2.25 + 3.0 * f64::from(n), n % 3 + 1, 4)).collect();
            assert_eq!((starts(&schedule), &schedule.dropped), (expected, &vec![]));
            assert!(schedule.batches.iter().all(|batch| batch.end - batch.start == 9.0));
        }
    }

    #[test]
    fn figure_5a_eager_scheduling_does_not_recover_from_three_missing_requests() {
        let schedule = figure_5a();
        // GPU 1 takes R16 alone and is free again when GPU 3 is; of the two the smaller id goes first.
        assert_eq!(starts(&schedule)[..5], [(11.25, 1, 1), (14.25, 2, 4), (17.25, 1, 4), (18.0, 3, 1), (23.25, 2, 2)]);
        assert_eq!(schedule.dropped[..3], [35, 37, 38]);
    }

    #[test]
    fn figure_5b_deferred_scheduling_idles_and_recovers() {
        for schedule in DEFERRED.map(figure_5b) {
            let before = (0u32..3).map(|n| (2.25 + 3.0 * f64::from(n), n % 3 + 1, 4));
            let after = (0u32..9).map(|n| (13.5 + 3.0 * f64::from(n), n % 3 + 1, 4));
            assert_eq!((starts(&schedule), &schedule.dropped), (before.chain(after).collect(), &vec![]));
        }
    }
}
