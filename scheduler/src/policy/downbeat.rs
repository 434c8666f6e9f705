//! Our own policy. It defers as Symphony does, with three changes that keep a cluster at the edge of its capacity from
//! falling into late starts that make small batches that make late starts. docs/policy.md tells what each is worth.
//!
//! They come from the staggered execution of Symphony's section 3.3: a batch of b tasks is gathered while `b - 1` more
//! arrive after its head, and then runs for l(b); both must fit the head's time. What is needed is measured: the gap
//! between tasks that are served, and N, the GPUs that the model keeps busy.
//!
//! 1. *Heads are given up early* if they would keep the batch below its target, nearly the largest b that can be
//!    gathered and run in time: a backlog is shed at once, and what follows is on time and in large batches again. They
//!    are not if others hardly gain by it, nor if their clients ask for another SLO than most and lose more already.
//! 2. *The window opens earlier* while candidates have to wait for GPUs. Where waits are rare, GPUs are idle at other
//!    times, and starting earlier costs little. Where most candidates wait, it may be by what makes their tasks a
//!    little dearer, which is much for models that gain little by batching; where a few GPUs serve many models, a batch
//!    gathers while it waits its turn, and loses nothing by queueing early; and where tasks come in bursts nothing more
//!    comes after one. A task that was lost has waited too. A model that never waits is deferred in full, so that GPUs
//!    that are not needed stay idle.
//! 3. *Models that lose more tasks go first.* By the nearest `latest` alone, a model whose tasks have long hardly loses
//!    any, while those in a hurry lose more than 1 %. So batches have their turn the earlier the more their model has
//!    lost, which keeps all models' losses alike.

use std::mem;

use proto::{LatencyProfile, Span, Timestamp, scheduler_to_scheduler::LearnedAverages};

use super::{
    BatchPolicy, Gathered, Granted, Tuning, View, frontrun, give_up_heads, longest_prefix,
    losses::{Losses, slo},
};
use crate::task_queue::Queued;

/// No average of times that another scheduler tells is longer: a day.
const TOLD_NS_MAX: f64 = 24.0 * 3600.0 * 1e9;
/// Nor does it say that more tasks are lost for each batch.
const TOLD_LOST_MAX: f64 = 1e6;

/// What was learned of one model.
#[derive(Debug)]
pub(super) struct Downbeat {
    tuning: Tuning,
    /// `None` before its first batch.
    averages: Option<Averages>,
    losses: Losses,
}

impl Downbeat {
    pub(super) fn new(tuning: Tuning) -> Self {
        Self { tuning, averages: None, losses: Losses::default() }
    }
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
    /// Tasks that were lost before each batch, since the one before it.
    lost: f64,
    /// Those before the next one, so far.
    lost_now: f64,
    /// l(b), in nanoseconds.
    execution_ns: f64,
    /// Batches that waited for a GPU after their window had opened, of all.
    waited_part: f64,
    /// From the newest task's arrival to the grant of a batch, in nanoseconds.
    silence_ns: f64,
    /// What one more task adds to l(b), in nanoseconds; of the newest batch.
    task_ns: f64,
    /// GPUs that host the model; of the newest batch.
    hosts: u32,
}

impl Averages {
    /// What another one had learned, unless it cannot be.
    fn told(now: Timestamp, learned: &LearnedAverages) -> Option<Self> {
        let LearnedAverages {
            batches,
            interval_ns,
            size,
            execution_ns,
            waited_part,
            silence_ns,
            task_ns,
            hosts,
            lost,
            ..
        } = *learned;
        let times = [interval_ns, execution_ns, silence_ns, task_ns];
        let can_be = batches > 0
            && times.iter().all(|time| (0.0..=TOLD_NS_MAX).contains(time))
            && (1.0..=LatencyProfile::MAX_BATCH as f64).contains(&size)
            && (0.0..=TOLD_LOST_MAX).contains(&lost)
            && (0.0..=1.0).contains(&waited_part);
        can_be.then_some(Self {
            batches,
            last_start: now,
            interval_ns,
            size,
            lost,
            lost_now: 0.0,
            execution_ns,
            waited_part,
            silence_ns,
            task_ns,
            hosts,
        })
    }

    /// Between tasks that are served.
    fn gap_ns(&self) -> f64 {
        self.interval_ns / self.size
    }

    /// Tasks that would come within this time, as it went so far.
    fn joiners(&self, wait: Span) -> f64 {
        wait.as_nanos() as f64 / self.gap_ns().max(1.0)
    }

    /// If all GPUs that host the model run such batches, one of them frees so often.
    fn turn_ns(&self) -> f64 {
        self.execution_ns / f64::from(self.hosts.max(1))
    }

    /// The part of l(size) that does not grow with the size: what larger batches save.
    fn fixed_part(&self, size: f64) -> f64 {
        let fixed_ns = (self.execution_ns - self.task_ns * self.size).max(0.0);
        fixed_ns / (fixed_ns + self.task_ns * size)
    }

    /// The part of the tasks that is lost.
    fn lost_part(&self) -> f64 {
        self.lost / (self.lost + self.size)
    }

    /// How much earlier than at the frontrun moment the window opens.
    fn slack(&self, tuning: &Tuning, slo: Span) -> Span {
        let slo_ns = slo.as_nanos() as f64;
        let gpus = self.execution_ns / self.interval_ns.max(1.0);
        // Symphony, equation 1: a batch runs for `SLO N / (N + 1)` and is gathered in what is left.
        let gathering_ns = slo_ns / (gpus + 1.0);
        // A batch that starts earlier by t lacks `t / interval` of its tasks, whose share of what l(b) has in any case
        // the others bear.
        let cheap = (tuning.little * self.interval_ns / (self.fixed_part(self.size) * gathering_ns)).min(1.0);
        let rare_waits = tuning.rare_waits * (1.0 - self.waited_part).powi(2);
        // Beside such a slack one turn is a little.
        let queueing = (self.turn_ns() / tuning.little / gathering_ns).min(1.0 - gpus);
        let part = rare_waits.max(cheap).max(queueing);
        // Where tasks come at random, nothing has come for one gap; in a burst, a batch is of one.
        let after_burst = 1.0 - (self.gap_ns() / self.silence_ns.max(1.0)).min(1.0);
        let slack_ns = gathering_ns * part + slo_ns * after_burst;
        Span((slack_ns * (self.waited_part / tuning.little).min(1.0)) as i64)
    }

    /// No head must stand in the way of one more task in a batch of `size`: it is at its target.
    fn is_enough(&self, tuning: &Tuning, view: &View<'_>, size: usize, slo: Span) -> bool {
        let Some(&lead) = view.lead_times.get(size) else { return true };
        size as f64 * self.gap_ns() + lead.as_nanos() as f64 > slo.as_nanos() as f64 * (1.0 - tuning.spare)
    }

    /// What a batch is worth, in heads, of those that can be had instead of `first`, less the heads that it gives up.
    fn worth(&self, tuning: &Tuning, first: Gathered, batch: Gathered) -> f64 {
        // A head leaves a gap of time. Where several tasks fit into it, one for one is enough; and the more are lost
        // whatever is done, the less is lost with a head.
        let fit_per_head = (self.gap_ns() / self.task_ns.max(1.0)).min(1.0) * (1.0 - self.lost_part());
        let task = tuning.worth * self.fixed_part(first.size as f64);
        task * batch.size as f64 - fit_per_head * (batch.skip - first.skip) as f64
    }

    /// Takes in one more batch.
    fn handle_granted(&mut self, tuning: &Tuning, view: &View<'_>, batch: Gathered, granted: Granted) {
        let sample = Self::of(view, batch, granted);
        self.batches = self.batches.saturating_add(1);
        let weight = (1.0 / f64::from(self.batches)).max(tuning.batch_weight);
        let interval_ns = ((sample.last_start - self.last_start).as_nanos() as f64).clamp(0.0, sample.interval_ns);
        let follow = |average: &mut f64, value: f64| *average += weight * (value - *average);
        follow(&mut self.interval_ns, interval_ns);
        follow(&mut self.size, sample.size);
        follow(&mut self.lost, mem::take(&mut self.lost_now));
        follow(&mut self.execution_ns, sample.execution_ns);
        follow(&mut self.waited_part, sample.waited_part);
        follow(&mut self.silence_ns, sample.silence_ns);
        (self.last_start, self.task_ns, self.hosts) = (sample.last_start, sample.task_ns, sample.hosts);
    }

    /// What one batch shows, as if it came an SLO after the one before.
    fn of(view: &View<'_>, batch: Gathered, Granted { start, waited, gpus: hosts }: Granted) -> Self {
        let slo_ns = slo(&view.queue[batch.skip]).as_nanos() as f64;
        let (largest, latency) = (view.profile.max_batch(), |size| view.profile.latency(size).as_nanos() as f64);
        let tasks = view.queue.range(batch.skip..batch.skip + batch.size);
        // With one SLO the last of all that wait is the newest.
        let newest = tasks.chain(view.queue.back()).map(|task| task.queued_at).max().expect("batches have tasks");
        Self {
            batches: 1,
            last_start: start,
            interval_ns: slo_ns,
            size: batch.size as f64,
            lost: 0.0,
            lost_now: 0.0,
            execution_ns: latency(batch.size),
            // Timers are late by no more than the jitter: that is no wait.
            waited_part: f64::from(u8::from(waited > view.jitter)),
            // What comes later cannot join, however long the way to the GPU is.
            silence_ns: (view.now - newest).as_nanos() as f64,
            task_ns: (latency(largest) - latency(1)) / (largest.max(2) - 1) as f64,
            hosts,
        }
    }
}

impl BatchPolicy for Downbeat {
    fn gather(&self, view: &View<'_>) -> Gathered {
        let first = longest_prefix(view);
        let (Some(averages), true) = (&self.averages, first.size > 0) else { return first };
        let head = &view.queue[first.skip];
        let tuning = &self.tuning;
        if self.losses.is_worse_off(tuning, head) {
            return first;
        }
        let (waiting, slo) = (view.queue.len(), slo(head));
        // Deadlines ascend, so once a head leaves enough room all later ones do; the last task alone always does.
        let enough = give_up_heads(view, first, |skip| {
            let size = view.longest_batch(skip);
            size == waiting - skip || averages.is_enough(tuning, view, size, slo)
        });
        let better = |one: Gathered, other: Gathered| {
            let is_worth_it = averages.worth(tuning, first, other) >= averages.worth(tuning, first, one);
            if is_worth_it { other } else { one }
        };
        let chosen = better(first, enough);
        if averages.lost_part() <= tuning.little {
            return chosen;
        }
        // More comes than can be served, so heads are lost whatever is done: the next batch may as well be the one that
        // has room for all that are left, or that with one head more, which is often as large.
        let all = give_up_heads(view, first, |skip| view.longest_batch(skip) == waiting - skip);
        let skip = all.skip.saturating_sub(1).max(first.skip);
        better(better(chosen, all), Gathered { skip, size: view.longest_batch(skip) })
    }

    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        // How late timers, transfers and backends are is not known either until one batch of the model has run.
        let Some(averages) = &self.averages else { return Timestamp::PAST };
        // The way to the GPU is time that nothing is gathered in.
        let way = view.lead_times[batch.size - 1] - view.profile.latency(batch.size);
        let slo = (slo(&view.queue[batch.skip]) - way).max(Span::ZERO);
        let opens_at = frontrun(view, batch) - averages.slack(&self.tuning, slo);
        let is_rare = view.is_paged && averages.joiners(opens_at - view.now) < self.tuning.joiners;
        if is_rare { Timestamp::PAST } else { opens_at }
    }

    fn urgency(&self) -> Span {
        let lost_percent = 100.0 * self.losses.worst().min(self.tuning.little);
        Span::from_millis_f64(self.tuning.urgency_ms * lost_percent)
    }

    fn handle_lost(&mut self, task: &Queued) {
        self.losses.handle_lost(&self.tuning, task);
        if let Some(averages) = &mut self.averages {
            averages.lost_now += 1.0;
            // Its batch has waited in vain.
            let weight = self.tuning.batch_weight / averages.size.max(1.0);
            averages.waited_part += weight * (1.0 - averages.waited_part);
        }
    }

    fn handle_granted(&mut self, view: &View<'_>, batch: Gathered, granted: Granted) {
        let tuning = &self.tuning;
        self.losses.handle_served(tuning, view.queue.range(batch.skip..batch.skip + batch.size));
        match &mut self.averages {
            Some(averages) => averages.handle_granted(tuning, view, batch, granted),
            // Of what comes next nothing is known; it may have to wait.
            None => {
                let first = Averages::of(view, batch, granted);
                self.averages = Some(Averages { waited_part: tuning.little, silence_ns: 0.0, ..first });
            }
        }
    }

    fn learned(&self) -> Option<LearnedAverages> {
        let averages = self.averages.as_ref()?;
        let (slo_ns, hurried_part, classes) = self.losses.learned();
        Some(LearnedAverages {
            batches: averages.batches,
            interval_ns: averages.interval_ns,
            size: averages.size,
            execution_ns: averages.execution_ns,
            waited_part: averages.waited_part,
            silence_ns: averages.silence_ns,
            task_ns: averages.task_ns,
            hosts: averages.hosts,
            lost: averages.lost,
            slo_ns,
            hurried_part,
            classes,
        })
    }

    fn handle_learned(&mut self, now: Timestamp, learned: &LearnedAverages) {
        let LearnedAverages { slo_ns, hurried_part, classes, .. } = *learned;
        let losses = (0.0..=TOLD_NS_MAX).contains(&slo_ns).then(|| Losses::told(slo_ns, hurried_part, classes));
        if let Some((averages, losses)) = Averages::told(now, learned).zip(losses.flatten()) {
            *self = Self { tuning: self.tuning, averages: Some(averages), losses };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use proto::{LatencyProfile, TaskId};

    use super::*;

    /// l(b) hardly grows with b, so that batches are worth waiting for; a gap is 1000 ns.
    fn averages(gpus: f64, waited_part: f64) -> Averages {
        Averages {
            batches: 1,
            last_start: Timestamp(0),
            interval_ns: 1000.0,
            size: 1.0,
            lost: 0.0,
            lost_now: 0.0,
            execution_ns: 1000.0 * gpus,
            waited_part,
            silence_ns: 1000.0,
            task_ns: 0.0,
            hosts: 8,
        }
    }

    fn slack(averages: Averages) -> i64 {
        averages.slack(&Tuning::default(), Span(10_000)).as_nanos()
    }

    #[test]
    fn slack_follows_waits() {
        let of = |gpus, waited_part| slack(averages(gpus, waited_part));
        assert_eq!((of(1.0, 0.0), of(1.0, 0.025)), (0, (2500.0 * 0.975f64.powi(2) / 2.0) as i64));
        assert_eq!((of(1.0, 0.5), of(4.0, 0.5), of(1.0, 1.0)), (625, 250, 50));
    }

    #[test]
    fn a_batch_may_start_earlier_by_what_makes_its_tasks_a_little_dearer() {
        let of = |task_part| slack(Averages { task_ns: 1000.0 * task_part, ..averages(1.0, 1.0) });
        // 5 % fewer tasks; if half of l(b) is theirs, 10 % fewer; if all of it, batching is worth nothing.
        assert_eq!((of(0.0), of(0.5), of(1.0)), (50, 100, 5000));
    }

    #[test]
    fn models_that_share_gpus_queue_early() {
        let of = |hosts, waited_part| slack(Averages { hosts, interval_ns: 4000.0, ..averages(1.0, waited_part) });
        // A quarter of a GPU, executions of 1000 ns, 8000 to gather: some GPU frees every 10 ns of 100, or it is the
        // one.
        assert_eq!((of(100, 1.0), of(25, 1.0), of(1, 1.0)), (200, 800, 6000));
        // Nobody waits: no slack.
        assert_eq!((of(10, 1.0), of(10, 0.0)), (2000, 0));
    }

    #[test]
    fn nothing_is_waited_for_after_a_burst() {
        let of = |silence, waited_part| slack(Averages { silence_ns: 1000.0 * silence, ..averages(1.0, waited_part) });
        assert_eq!((of(0.0, 1.0), of(1.0, 1.0)), (50, 50));
        assert_eq!((of(2.0, 1.0), of(4.0, 1.0), of(1e6, 1.0)), (5050, 7550, 10_049));
        assert_eq!(of(9.0, 0.0), 0);
    }

    #[test]
    fn learns_how_many_gpus_are_busy_and_how_many_candidates_wait() {
        let profile = LatencyProfile::from_table(vec![Span(400_000)]).unwrap();
        let mut policy = Downbeat::new(Tuning::default());
        for batch in 0..1000 {
            let waited = if batch % 4 == 0 { Span(500_000) } else { Span(0) };
            let granted = Granted { start: Timestamp(batch * 100_000), waited, gpus: 8 };
            let queued_at = granted.start - Span(30_000);
            let queue = VecDeque::from([Queued {
                id: TaskId(0),
                deadline: queued_at + Span(1_000_000),
                queued_at,
                priority: 0,
                application: 0,
                length: 0,
            }]);
            let view = View {
                now: granted.start,
                free_at: Timestamp::PAST,
                queue: &queue,
                profile: &profile,
                lead_times: &[Span(400_000)],
                jitter: Span::ZERO,
                is_paged: false,
            };
            policy.handle_granted(&view, Gathered { skip: 0, size: 1 }, granted);
        }
        let averages = policy.averages.unwrap();
        assert!((averages.execution_ns / averages.interval_ns - 4.0).abs() < 0.01, "{averages:?}");
        assert!((averages.waited_part - 0.25).abs() < 0.02, "{averages:?}");
        // The first batch tells nothing of silence.
        assert!((averages.silence_ns - 30_000.0).abs() < 100.0, "{averages:?}");
    }

    /// l(b) = 6 + 2b ns.
    fn worth(first: Gathered, batch: Gathered, (gap_ns, lost): (f64, f64)) -> f64 {
        let fixed_part = 6.0 / (6.0 + 2.0 * first.size as f64);
        let head = (gap_ns / 2.0).min(1.0) * 4.0 / (4.0 + lost);
        6.0 * fixed_part * batch.size as f64 - head * (batch.skip - first.skip) as f64
    }

    proptest! {
        /// The oracle tries one head after the other.
        #[test]
        fn gives_up_as_few_heads_as_make_room_for_the_target(
            deadlines in proptest::collection::vec(0i64..60, 0..30),
            gap_ns in 0.1f64..20.0,
            is_overloaded: bool,
        ) {
            let profile = LatencyProfile::from_table((1..=12).map(|batch| Span(2 * batch + 6)).collect()).unwrap();
            let lead_times: Vec<_> = (1..=12).map(|batch| profile.latency(batch)).collect();
            let mut deadlines = deadlines;
            deadlines.sort_unstable();
            let key = |(id, &at)| {
                let (deadline, queued_at) = (Timestamp(at), Timestamp(at - 50));
                Queued { id: TaskId(id), deadline, queued_at, priority: 0, application: 0, length: 0 }
            };
            let queue: VecDeque<_> = (0..).zip(&deadlines).map(key).collect();
            let view = View {
                now: Timestamp(0),
                free_at: Timestamp::PAST,
                queue: &queue,
                profile: &profile,
                lead_times: &lead_times, jitter: Span::ZERO, is_paged: false };
            let lost = if is_overloaded { 0.3 } else { 0.1 };
            let averages = Averages {
                interval_ns: 4.0 * gap_ns,
                size: 4.0,
                lost,
                execution_ns: 14.0,
                task_ns: 2.0,
                ..averages(1.0, 0.0)
            };
            // The largest batch that is gathered and runs in the 50 ns that each task was given, less an eighth.
            let fits = |&size: &usize| (size - 1) as f64 * gap_ns + lead_times[size - 1].as_nanos() as f64 <= 43.75;
            let target = (1..=12).take_while(fits).last().unwrap_or(0);
            let batches: Vec<_> = (0..queue.len())
                .map(|skip| Gathered { skip, size: view.longest_batch(skip) })
                .filter(|batch| batch.size > 0)
                .collect();
            let is_all = |batch: &&Gathered| batch.size == queue.len() - batch.skip;
            let chosen = Downbeat { averages: Some(averages), ..Downbeat::new(Tuning::default()) }.gather(&view);
            let Some(&first) = batches.first() else {
                prop_assert_eq!(chosen, Gathered { skip: queue.len(), size: 0 });
                return Ok(());
            };
            let mut choices = vec![first];
            choices.extend(batches.iter().find(|batch| batch.size >= target || is_all(batch)));
            if is_overloaded {
                let all = batches.iter().position(|batch| is_all(&batch)).unwrap();
                choices.extend([batches[all], batches[all.saturating_sub(1)]]);
            }
            let most = choices.iter().map(|&batch| worth(first, batch, (gap_ns, lost))).fold(f64::MIN, f64::max);
            prop_assert!(choices.contains(&chosen), "{chosen:?} of {choices:?}");
            prop_assert!((worth(first, chosen, (gap_ns, lost)) - most).abs() < 1e-9, "{chosen:?} of {choices:?}");
        }
    }

    #[test]
    fn heads_are_not_given_up_for_little() {
        // l(b) = fixed + b tasks; a gap is 1000 ns.
        let averages = |fixed_ns, task_ns| Averages {
            size: 10.0,
            interval_ns: 10_000.0,
            execution_ns: fixed_ns + 10.0 * task_ns,
            task_ns,
            ..averages(1.0, 1.0)
        };
        let pays = |averages: &Averages, first: (usize, usize), enough: (usize, usize)| {
            let worth = |(skip, size)| {
                let first = Gathered { skip: first.0, size: first.1 };
                averages.worth(&Tuning::default(), first, Gathered { skip, size })
            };
            worth(enough) >= worth(first)
        };
        // More than half of l(8) is fixed, so a task is worth more than three heads.
        let usual = averages(5000.0, 500.0);
        assert!(pays(&usual, (1, 8), (4, 9)) && !pays(&usual, (1, 8), (5, 9)));
        assert!(!pays(&usual, (0, 8), (1, 7)), "the queue is too short for more");
        // Where a task takes five gaps, five times as many heads are worth one: here a fifth is fixed.
        let dense = averages(10_000.0, 5000.0);
        assert!(pays(&dense, (1, 8), (6, 9)) && !pays(&dense, (1, 8), (9, 9)));
        // Where batching saves hardly anything none is.
        let weak = averages(500.0, 5000.0);
        assert!(!pays(&weak, (1, 8), (2, 9)) && !pays(&weak, (1, 5), (2, 6)));
    }

    #[test]
    fn urgency_grows_with_losses_up_to_a_limit() {
        let task = Queued {
            id: TaskId(0),
            deadline: Timestamp(10_100),
            queued_at: Timestamp(100),
            priority: 0,
            application: 0,
            length: 0,
        };
        let mut policy = Downbeat::new(Tuning::default());
        assert_eq!(policy.urgency(), Span::ZERO);
        // One of a hundred is lost, for long.
        for _ in 0..1000 {
            policy.losses.handle_served(&Tuning::default(), [task; 99].iter());
            policy.handle_lost(&task);
        }
        let urgency = policy.urgency();
        assert!((urgency.as_millis_f64() - 20.0).abs() < 1.0, "{urgency:?}");
        for _ in 0..10_000 {
            policy.handle_lost(&task);
        }
        assert_eq!(policy.urgency(), Span::from_millis(100));
    }
}
