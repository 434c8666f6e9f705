//! Our own policy. It defers as Symphony does, with three changes that keep a cluster at the edge of its capacity from
//! falling into late starts that make small batches that make late starts. docs/policy.md tells what each is worth.
//!
//! They come from the staggered execution of Symphony's section 3.3: a batch of b tasks is gathered while `b - 1` more
//! arrive after its head, and then runs for l(b); both must fit the head's time. What is needed is measured: the gap
//! between tasks that are served, and N, the GPUs that the model keeps busy.
//!
//! 1. *Heads are given up early* if they would keep the batch below its target, nearly the largest b that can be
//!    gathered and run in time: a backlog is shed at once, and what follows is on time and in large batches again. Only
//!    clients that ask for another SLO than most, and lose more than these already, are spared.
//! 2. *The window opens earlier* while candidates have to wait for GPUs, by a part of the time for gathering. Where
//!    waits are rare but happen (bursts), GPUs are idle at other times, and starting earlier costs little; where most
//!    candidates wait, GPUs are scarce, and starting much earlier would make batches smaller; but where a few GPUs
//!    serve many models, a batch gathers while it waits its turn, and loses nothing by queueing early. A task that was
//!    lost has waited too. A model that never waits is deferred in full, so that GPUs that are not needed stay idle.
//! 3. *Models that lose more tasks go first.* By the nearest `latest` alone, a model whose tasks have long hardly loses
//!    any, while those in a hurry lose more than 1 %. So batches have their turn the earlier the more their model has
//!    lost, which keeps all models' losses alike.

use proto::{Span, Timestamp};

use super::{
    BatchPolicy, Gathered, Granted, View, frontrun, give_up_heads, longest_prefix,
    losses::{Losses, slo},
};
use crate::task_queue::Queued;

/// Weight of the newest batch in each average, once there were as many: they look back on about fifty.
const AVERAGE_WEIGHT: f64 = 0.02;
/// The part of its time that the target batch takes; the rest absorbs that arrivals are random.
const TARGET_PART: f64 = 0.89;
/// The slack never falls below this part of the gathering time while candidates wait.
const SLACK_PART_MIN: f64 = 0.15;
/// Slack is given in full from this part of waiting candidates on, and in proportion below.
const WAITED_PART_ENOUGH: f64 = 0.05;
/// A model that keeps less than one GPU busy gets a slack of so many times the time in which some GPU frees.
const SLACK_TURNS: f64 = 10.0;
/// A wait shorter than this part of the SLO is none.
const WAIT_PART_MIN: f64 = 0.001;
/// So much earlier has a model its turn for each per cent of its tasks that it loses. It is a time, not a part of the
/// SLO: what helps a model is how many others it passes.
const URGENCY_OF_PERCENT: Span = Span::from_millis(20);
/// What a model loses above this is not held against the others: perhaps its objective cannot be met.
const LOST_PERCENT_MAX: f64 = 10.0;

/// What was learned of one model.
#[derive(Debug, Default)]
pub(super) struct Downbeat {
    /// `None` before its first batch.
    averages: Option<Averages>,
    losses: Losses,
}

#[derive(Debug)]
struct Averages {
    /// Batches seen; the first ones weigh alike.
    batches: u32,
    last_start: Timestamp,
    /// From one batch's start to the next one's, in nanoseconds; longer ones count as an SLO.
    interval_ns: f64,
    /// Tasks in a batch.
    size: f64,
    /// l(b), in nanoseconds.
    execution_ns: f64,
    /// Batches that waited for a GPU after their window had opened, of all.
    waited_part: f64,
    /// GPUs that host the model.
    hosts: u32,
}

impl Averages {
    /// How much earlier than at the frontrun moment the window opens.
    fn slack(&self, slo: Span) -> Span {
        let gpus = self.execution_ns / self.interval_ns.max(1.0);
        // Symphony, equation 1: a batch runs for `SLO N / (N + 1)` and is gathered in what is left.
        let gathering_ns = slo.as_nanos() as f64 / (gpus + 1.0);
        // If all GPUs run such batches, one of them frees every `l(b) / hosts`.
        let turn_ns = self.execution_ns / f64::from(self.hosts.max(1));
        let queueing = (SLACK_TURNS * turn_ns / gathering_ns).min(1.0 - gpus);
        let part = (1.0 - self.waited_part).powi(2).max(SLACK_PART_MIN).max(queueing);
        Span((gathering_ns * part * (self.waited_part / WAITED_PART_ENOUGH).min(1.0)) as i64)
    }

    /// No head must stand in the way of one more task in a batch of `size`: it is at its target.
    fn is_enough(&self, view: &View<'_>, size: usize, slo: Span) -> bool {
        let Some(&lead) = view.lead_times.get(size) else { return true };
        let gathering_ns = size as f64 * self.interval_ns / self.size;
        gathering_ns + lead.as_nanos() as f64 > slo.as_nanos() as f64 * TARGET_PART
    }
}

impl BatchPolicy for Downbeat {
    fn gather(&self, view: &View<'_>) -> Gathered {
        let first = longest_prefix(view);
        let (Some(averages), true) = (&self.averages, first.size > 0) else { return first };
        let head = &view.queue[first.skip];
        if self.losses.is_worse_off(head) {
            return first;
        }
        let (waiting, slo) = (view.queue.len(), slo(head));
        // Deadlines ascend, so once a head leaves enough room all later ones do; the last task alone always does.
        give_up_heads(view, first, |skip| {
            let size = view.longest_batch(skip);
            size == waiting - skip || averages.is_enough(view, size, slo)
        })
    }

    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        let slack = self.averages.as_ref().map_or(Span::ZERO, |averages| averages.slack(slo(&view.queue[batch.skip])));
        frontrun(view, batch) - slack
    }

    fn urgency(&self) -> Span {
        let lost_percent = (100.0 * self.losses.worst()).min(LOST_PERCENT_MAX);
        Span((URGENCY_OF_PERCENT.as_nanos() as f64 * lost_percent) as i64)
    }

    fn handle_lost(&mut self, task: &Queued) {
        self.losses.handle_lost(task);
        if let Some(averages) = &mut self.averages {
            // Its batch has waited in vain.
            averages.waited_part += AVERAGE_WEIGHT / averages.size.max(1.0) * (1.0 - averages.waited_part);
        }
    }

    fn handle_granted(&mut self, view: &View<'_>, batch: Gathered, granted: Granted) {
        let Granted { start, waited, gpus: hosts } = granted;
        self.losses.handle_served(view.queue.range(batch.skip..batch.skip + batch.size));
        let slo_ns = slo(&view.queue[batch.skip]).as_nanos() as f64;
        let size = batch.size as f64;
        let execution_ns = view.profile.latency(batch.size).as_nanos() as f64;
        let has_waited = f64::from(u8::from(waited.as_nanos() as f64 > slo_ns * WAIT_PART_MIN));
        let Some(averages) = &mut self.averages else {
            let (interval_ns, waited_part) = (slo_ns, WAITED_PART_ENOUGH);
            let first = Averages { batches: 1, last_start: start, interval_ns, size, execution_ns, waited_part, hosts };
            self.averages = Some(first);
            return;
        };
        averages.batches = averages.batches.saturating_add(1);
        let weight = (1.0 / f64::from(averages.batches)).max(AVERAGE_WEIGHT);
        let interval_ns = ((start - averages.last_start).as_nanos() as f64).clamp(0.0, slo_ns);
        (averages.last_start, averages.hosts) = (start, hosts);
        averages.interval_ns += weight * (interval_ns - averages.interval_ns);
        averages.size += weight * (size - averages.size);
        averages.execution_ns += weight * (execution_ns - averages.execution_ns);
        averages.waited_part += weight * (has_waited - averages.waited_part);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use proto::{LatencyProfile, TaskId};

    use super::*;

    fn averages(gpus: f64, waited_part: f64) -> Averages {
        let execution_ns = 1000.0 * gpus;
        Averages {
            batches: 1,
            last_start: Timestamp(0),
            interval_ns: 1000.0,
            size: 1.0,
            execution_ns,
            waited_part,
            hosts: 8,
        }
    }

    #[test]
    fn slack_follows_waits() {
        let of =
            |hosts, gpus, waited_part| Averages { hosts, ..averages(gpus, waited_part) }.slack(Span(1000)).as_nanos();
        let slack = |gpus, waited_part| of(8, gpus, waited_part);
        assert_eq!(slack(1.0, 0.0), 0);
        assert_eq!(slack(1.0, 0.025), (500.0 * 0.975f64.powi(2) / 2.0) as i64);
        assert_eq!(slack(1.0, 0.5), 125);
        assert_eq!(slack(4.0, 0.5), 50);
        assert_eq!(slack(1.0, 1.0), 75);
        // A quarter of a GPU, executions of 250 ns, 800 ns to gather: some GPU frees every 2.5 ns of 100, or it is the one.
        assert_eq!((of(100, 0.25, 1.0), of(25, 0.25, 1.0), of(1, 0.25, 1.0)), (120, 120, 600));
        // In between ten such times count; and nobody waits: no slack.
        assert_eq!((of(10, 0.25, 1.0), of(10, 0.25, 0.0)), (250, 0));
    }

    #[test]
    fn learns_how_many_gpus_are_busy_and_how_many_candidates_wait() {
        let profile = LatencyProfile::from_table(vec![Span(400_000)]).unwrap();
        let queue = VecDeque::from([Queued {
            id: TaskId(0),
            deadline: Timestamp(1_000_000),
            queued_at: Timestamp(0),
            priority: 0,
        }]);
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
            let granted = Granted { start: Timestamp(batch * 100_000), waited, gpus: 8 };
            policy.handle_granted(&view, Gathered { skip: 0, size: 1 }, granted);
        }
        let averages = policy.averages.unwrap();
        assert!((averages.execution_ns / averages.interval_ns - 4.0).abs() < 0.01, "{averages:?}");
        assert!((averages.waited_part - 0.25).abs() < 0.02, "{averages:?}");
    }

    proptest! {
        /// The oracle tries one head after the other.
        #[test]
        fn gives_up_as_few_heads_as_make_room_for_the_target(
            deadlines in proptest::collection::vec(0i64..60, 0..30),
            gap_ns in 0.1f64..20.0,
        ) {
            let profile = LatencyProfile::from_table((1..=12).map(|batch| Span(2 * batch + 6)).collect()).unwrap();
            let lead_times: Vec<_> = (1..=12).map(|batch| profile.latency(batch)).collect();
            let mut deadlines = deadlines;
            deadlines.sort_unstable();
            let key = |(id, &at)| Queued { id: TaskId(id), deadline: Timestamp(at), queued_at: Timestamp(at - 50), priority: 0 };
            let queue: VecDeque<_> = (0..).zip(&deadlines).map(key).collect();
            let view = View {
                now: Timestamp(0),
                free_at: Timestamp::PAST,
                queue: &queue,
                profile: &profile,
                lead_times: &lead_times, jitter: Span::ZERO };
            let averages = Averages { interval_ns: 4.0 * gap_ns, size: 4.0, ..averages(1.0, 0.0) };
            // The largest batch that is gathered and runs in 89 % of the 50 ns that each task was given.
            let fits = |&size: &usize| (size - 1) as f64 * gap_ns + lead_times[size - 1].as_nanos() as f64 <= 0.89 * 50.0;
            let target = (1..=12).take_while(fits).last().unwrap_or(0);
            let possible = (0..queue.len()).filter(|&skip| view.longest_batch(skip) > 0);
            let expected = possible
                .map(|skip| (skip, view.longest_batch(skip)))
                .find(|&(skip, size)| size >= target.min(queue.len() - skip))
                .map_or((queue.len(), 0), |found| found);
            let found = Downbeat { averages: Some(averages), losses: Losses::default() }.gather(&view);
            prop_assert_eq!((found.skip, found.size), expected);
        }
    }

    #[test]
    fn urgency_grows_with_losses_up_to_a_limit() {
        let task = Queued { id: TaskId(0), deadline: Timestamp(10_100), queued_at: Timestamp(100), priority: 0 };
        let mut policy = Downbeat::default();
        assert_eq!(policy.urgency(), Span::ZERO);
        // One of a hundred is lost, for long.
        for _ in 0..1000 {
            policy.losses.handle_served([task; 99].iter());
            policy.handle_lost(&task);
        }
        let urgency = policy.urgency();
        assert!(URGENCY_OF_PERCENT * 19 / 20 < urgency && urgency < URGENCY_OF_PERCENT * 21 / 20, "{urgency:?}");
        for _ in 0..10_000 {
            policy.handle_lost(&task);
        }
        assert_eq!(policy.urgency(), URGENCY_OF_PERCENT * 10);
    }
}
