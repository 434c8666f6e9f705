//! Our own policy. It defers as Symphony does, with two changes that keep a model at the edge of its capacity from
//! falling into late starts that make small batches that make late starts.
//!
//! Both come from the staggered execution of Symphony's section 3.3: a model that keeps N GPUs busy runs best when
//! `(1 + 1/N) l(b) <= SLO` (equation 1), which leaves `SLO / (N + 1)` of a task's time for queueing. N is measured: the
//! execution time of recent batches over the time between them.
//!
//! 1. *Heads are given up early* if they would keep the batch below its target, nearly the largest b of equation 1:
//!    a backlog is shed at once, and what follows is on time and in large batches again.
//! 2. *The window opens earlier*, by a part of that queueing time, while candidates have to wait for GPUs. Where waits
//!    are rare but happen (bursts), GPUs are idle at other times, and starting earlier costs little; where most
//!    candidates wait, GPUs are scarce, and starting much earlier would make batches smaller. A model that never waits
//!    is deferred in full, so that GPUs that are not needed stay idle.

use proto::{Span, Timestamp};

use super::{BatchPolicy, Gathered, View, frontrun, longest_prefix};

/// Weight of the newest batch in each average: they look back on about fifty.
const AVERAGE_WEIGHT: f64 = 0.02;
/// The part of equation 1's execution time that the target batch takes; the rest absorbs that arrivals are random.
const TARGET_PART: f64 = 0.9;
/// The slack never falls below this part of the queueing time while candidates wait.
const SLACK_PART_MIN: f64 = 0.15;
/// Slack is given in full from this part of waiting candidates on, and in proportion below.
const WAITED_PART_ENOUGH: f64 = 0.05;
/// A wait shorter than this part of the SLO is none.
const WAIT_PART_MIN: f64 = 0.001;

/// What was learned of one model; `None` before its first batch.
#[derive(Debug, Default)]
pub(super) struct Downbeat {
    averages: Option<Averages>,
}

#[derive(Debug)]
struct Averages {
    last_start: Timestamp,
    /// From one batch's start to the next one's, in nanoseconds; longer ones count as an SLO.
    interval_ns: f64,
    /// l(b), in nanoseconds.
    execution_ns: f64,
    /// Batches that waited for a GPU after their window had opened, of all.
    waited_part: f64,
}

impl Averages {
    /// N: the GPUs that the model keeps busy.
    fn gpus(&self) -> f64 {
        self.execution_ns / self.interval_ns.max(1.0)
    }

    /// How much earlier than at the frontrun moment the window opens.
    fn slack(&self, slo: Span) -> Span {
        let queueing_ns = slo.as_nanos() as f64 / (self.gpus() + 1.0);
        let part = (1.0 - self.waited_part).powi(2).max(SLACK_PART_MIN);
        Span((queueing_ns * part * (self.waited_part / WAITED_PART_ENOUGH).min(1.0)) as i64)
    }

    /// The batch that heads must not stand in the way of.
    fn target(&self, view: &View<'_>, slo: Span) -> usize {
        let gpus = self.gpus();
        let within = Span((slo.as_nanos() as f64 * TARGET_PART * gpus / (gpus + 1.0)) as i64);
        view.lead_times.partition_point(|&lead| lead <= within)
    }
}

/// The time that a task's client gave it, less the way back.
fn slo(view: &View<'_>, index: usize) -> Span {
    view.queue[index].deadline - view.queue[index].queued_at
}

impl BatchPolicy for Downbeat {
    fn gather(&self, view: &View<'_>) -> Gathered {
        let first = longest_prefix(view);
        let (Some(averages), true) = (&self.averages, first.size > 0) else { return first };
        let waiting = view.queue.len();
        let target = averages.target(view, slo(view, first.skip));
        let is_enough = |skip: usize| view.longest_batch(skip) >= target.min(waiting - skip);
        if is_enough(first.skip) {
            return first;
        }
        // Deadlines ascend, so once a head leaves enough room all later ones do; the last task alone always does.
        let (mut short, mut enough) = (first.skip, waiting - 1);
        while enough - short > 1 {
            let middle = usize::midpoint(short, enough);
            if is_enough(middle) { enough = middle } else { short = middle }
        }
        Gathered { skip: enough, size: view.longest_batch(enough) }
    }

    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        let slack = self.averages.as_ref().map_or(Span::ZERO, |averages| averages.slack(slo(view, batch.skip)));
        frontrun(view, batch) - slack
    }

    fn handle_granted(&mut self, view: &View<'_>, batch: Gathered, start: Timestamp, waited: Span) {
        let slo_ns = slo(view, batch.skip).as_nanos() as f64;
        let execution_ns = view.profile.latency(batch.size).as_nanos() as f64;
        let has_waited = f64::from(u8::from(waited.as_nanos() as f64 > slo_ns * WAIT_PART_MIN));
        let Some(averages) = &mut self.averages else {
            let averages = Averages { last_start: start, interval_ns: slo_ns, execution_ns, waited_part: 0.0 };
            self.averages = Some(averages);
            return;
        };
        let interval_ns = ((start - averages.last_start).as_nanos() as f64).clamp(0.0, slo_ns);
        averages.last_start = start;
        averages.interval_ns += AVERAGE_WEIGHT * (interval_ns - averages.interval_ns);
        averages.execution_ns += AVERAGE_WEIGHT * (execution_ns - averages.execution_ns);
        averages.waited_part += AVERAGE_WEIGHT * (has_waited - averages.waited_part);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use proto::{LatencyProfile, TaskId};

    use super::*;
    use crate::task_queue::Queued;

    fn averages(gpus: f64, waited_part: f64) -> Averages {
        Averages { last_start: Timestamp(0), interval_ns: 1000.0, execution_ns: 1000.0 * gpus, waited_part }
    }

    #[test]
    fn slack_follows_waits() {
        let slack = |gpus, waited_part| averages(gpus, waited_part).slack(Span(1000)).as_nanos();
        assert_eq!(slack(1.0, 0.0), 0);
        assert_eq!(slack(1.0, 0.025), (500.0 * 0.975f64.powi(2) / 2.0) as i64);
        assert_eq!(slack(1.0, 0.5), 125);
        assert_eq!(slack(4.0, 0.5), 50);
        assert_eq!(slack(1.0, 1.0), 75);
    }

    #[test]
    fn learns_how_many_gpus_are_busy_and_how_many_candidates_wait() {
        let profile = LatencyProfile::from_table(vec![Span(400_000)]).unwrap();
        let queue = VecDeque::from([Queued { id: TaskId(0), deadline: Timestamp(1_000_000), queued_at: Timestamp(0) }]);
        let view = View {
            now: Timestamp(0),
            free_at: Timestamp::PAST,
            queue: &queue,
            profile: &profile,
            lead_times: &[Span(400_000)],
            jitter: Span::ZERO,
        };
        let mut policy = Downbeat::default();
        for batch in 0..1000 {
            let waited = if batch % 4 == 0 { Span(500_000) } else { Span(0) };
            policy.handle_granted(&view, Gathered { skip: 0, size: 1 }, Timestamp(batch * 100_000), waited);
        }
        let averages = policy.averages.unwrap();
        assert!((averages.gpus() - 4.0).abs() < 0.01, "{averages:?}");
        assert!((averages.waited_part - 0.25).abs() < 0.02, "{averages:?}");
    }

    proptest! {
        /// The oracle tries one head after the other.
        #[test]
        fn gives_up_as_few_heads_as_make_room_for_the_target(
            deadlines in proptest::collection::vec(0i64..60, 0..30),
            gpus in 0.1f64..20.0,
        ) {
            let profile = LatencyProfile::from_table((1..=12).map(|batch| Span(2 * batch + 6)).collect()).unwrap();
            let lead_times: Vec<_> = (1..=12).map(|batch| profile.latency(batch)).collect();
            let mut deadlines = deadlines;
            deadlines.sort_unstable();
            let key = |(id, &at)| Queued { id: TaskId(id), deadline: Timestamp(at), queued_at: Timestamp(at - 50) };
            let queue: VecDeque<_> = (0..).zip(&deadlines).map(key).collect();
            let view = View {
                now: Timestamp(0),
                free_at: Timestamp::PAST,
                queue: &queue,
                profile: &profile,
                lead_times: &lead_times, jitter: Span::ZERO };
            let averages = averages(gpus, 0.0);
            let target = averages.target(&view, Span(50));
            let possible = (0..queue.len()).filter(|&skip| view.longest_batch(skip) > 0);
            let expected = possible
                .map(|skip| (skip, view.longest_batch(skip)))
                .find(|&(skip, size)| size >= target.min(queue.len() - skip))
                .map_or((queue.len(), 0), |found| found);
            let found = Downbeat { averages: Some(averages) }.gather(&view);
            prop_assert_eq!((found.skip, found.size), expected);
        }
    }
}
