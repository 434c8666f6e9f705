//! Our own policy: a batch is held back only where that pays. docs/policy.md tells what each rule is worth.
//!
//! 1. *Batches are as large as the price of GPU time makes them* (`scheduler/src/pricing.rs`): small while GPUs are
//!    plenty, so that nobody waits, and as large as can be gathered where they are scarce. A batch starts early, on an
//!    open GPU, when it has so many tasks, or its head has waited for twice as long as they should have taken to come.
//!    Where GPUs are scarce it waits even then, if one more task would save much of their time, as long as it is likely
//!    enough to come before waiting has cost more. On any other GPU, and at the latest, it starts when one more task
//!    would not fit any more, as Symphony's do.
//! 2. *Heads are given up early* if they would keep the batch below its target, the largest b that can be gathered and
//!    run in time (Symphony, section 3.3): `(b - 1) gap + l(b)` and the time in which GPUs that run such batches free,
//!    all within the SLO. A backlog is shed at once, and what follows is on time and in large batches again. While GPUs
//!    are not scarce they are for no more than half a batch, and not at all if their clients ask for another SLO than
//!    most and lose more already.
//! 3. *Where GPUs are scarce short batches among long ones queue earlier*, and those of models that have no GPU of
//!    their own to keep busy: a GPU frees when a batch of others ends.
//! 4. *Models that lose more tasks go first.* By the nearest `latest` alone, a model whose tasks have long hardly loses
//!    any, while those in a hurry lose more than 1 %.

use proto::{LatencyProfile, Span, Timestamp, scheduler_to_scheduler::LearnedAverages};

use super::{
    BatchPolicy, Gathered, Granted, Tuning, View, frontrun, longest_prefix,
    losses::{Losses, slo},
    whole_batch,
};
use crate::{messages::Traffic, pricing::Load, task_queue::Queued};

/// No average of times that another scheduler tells is longer: a day.
const TOLD_NS_MAX: f64 = 24.0 * 3600.0 * 1e9;
/// A gap is not taken to be shorter than this part of the silence since the last arrival.
const SILENCE_PART: f64 = 3.0;
/// Batches of no more are not waited for.
const ALONE: f64 = 1.5;
/// From the first of these parts of lost tasks on the target leaves less time to spare, and none from the second on:
/// more is asked for than can be served, and GPUs are never idle.
const LOST_PARTS: [f64; 2] = [0.02, 0.08];
/// A batch queues earlier by so many of the intervals at which GPUs free: of what the batches of all take longer than
/// it does; and of all that they take if the model keeps less than one GPU busy.
const TURNS: f64 = 4.0;
const TURNS_OF_FEW: f64 = 8.0;
/// No more than this part of what the network leaves of an SLO is such an interval taken to be in what a target leaves
/// time for.
const INTERVAL_PART_MAX: f64 = 0.1;
/// A burst is over when nothing has come for so many gaps, fewer the burstier arrivals are. At random one pause in
/// 3,000 is as long.
const PAUSE: f64 = 8.0;
/// Arrivals are bursts if the next one is so many gaps away on average, whenever one looks: at random it is one.
const BURSTY: f64 = 1.5;
/// Where GPUs are scarce the time of one that is kept idle is worth this part of one's that runs: whoever waits next
/// may not have needed it.
const IDLE_PART: f64 = 0.3;
/// While GPUs are not scarce, and next to nothing is lost, heads are given up only for this part of the batch that is
/// worth gathering.
const SHED_PART: f64 = 0.5;

/// What was learned of one model.
#[derive(Debug)]
pub(super) struct Downbeat {
    tuning: Tuning,
    arrivals: Arrivals,
    /// GPUs that host the model, as of the newest batch.
    hosts: u32,
    losses: Losses,
}

/// How tasks come.
#[derive(Debug, Default)]
struct Arrivals {
    count: u32,
    last_at: Timestamp,
    /// The average over some; `count` of two or more.
    gap_ns: f64,
    /// The same of its square.
    square: f64,
}

impl Arrivals {
    fn handle(&mut self, tuning: &Tuning, now: Timestamp) {
        if self.count > 0 {
            let weight = (1.0 / f64::from(self.count)).max(tuning.gap_weight);
            let gap_ns = (now - self.last_at).as_nanos() as f64;
            self.gap_ns += weight * (gap_ns - self.gap_ns);
            self.square += weight * (gap_ns * gap_ns - self.square);
        }
        self.count = self.count.saturating_add(1);
        self.last_at = now;
    }

    /// How far away the next one is on average, in gaps, whenever one looks.
    fn gaps_away(&self) -> f64 {
        self.square / (2.0 * self.gap_ns * self.gap_ns)
    }

    /// For how long nothing comes when a burst is over; endless if there are no bursts.
    fn pause_ns(&self) -> f64 {
        let gaps_away = self.gaps_away();
        if gaps_away < BURSTY { f64::INFINITY } else { PAUSE * self.gap_ns / gaps_away }
    }

    /// For how long nothing comes until the next one is to be expected at fewer than `least` in a gap.
    ///
    /// Gamma's shape k says how bursty arrivals are, `gaps_away = (1 + 1/k) / 2`. After a silence of s gaps, which is
    /// the less promising the longer it is, `k + (1 - k) / (2 sqrt(s))` are to be expected in a gap: exactly as many at
    /// random (k of 1) and after long silences, and within a third of Gamma's hazard after a tenth of a gap to one.
    fn silence_ns(&self, least: f64) -> f64 {
        let shape = 1.0 / (2.0 * self.gaps_away() - 1.0).max(1.0);
        if least <= shape {
            return f64::INFINITY;
        }
        self.gap_ns * ((1.0 - shape) / (2.0 * (least - shape))).powi(2)
    }

    /// Between two of them; `None` if there was but one.
    fn gap_ns(&self, now: Timestamp) -> Option<f64> {
        let silence_ns = (now - self.last_at).as_nanos() as f64;
        (self.count > 1).then(|| self.gap_ns.max(silence_ns / SILENCE_PART).max(1.0))
    }
}

/// l(b) as a line: what does not grow with b, and what each task adds.
fn line(profile: &LatencyProfile) -> (Span, Span) {
    let (least, most) = (profile.latency(1), profile.latency(profile.max_batch()));
    let per_task = (most - least) / (profile.max_batch().max(2) - 1) as i64;
    ((least - per_task).max(Span::ZERO), per_task)
}

/// The way to a GPU and back. A GPU has at most two plans, of which one is under way while the other runs.
fn there_and_back(view: &View<'_>) -> Span {
    (view.lead_times[0] - view.profile.latency(1)) * 2
}

/// Whether plans are under way for longer than they run, so that GPUs cannot be kept busy by small batches.
fn is_far(view: &View<'_>) -> bool {
    there_and_back(view) > view.profile.latency(1)
}

/// As [`line`] between batches of one and of `target`, of what a batch keeps a GPU from others for: its run, or half of
/// that and of the way, where the way is longer.
fn occupation(view: &View<'_>, target: usize) -> (Span, Span) {
    let (fixed, per_task) = line(view.profile);
    if !is_far(view) {
        return (fixed, per_task);
    }
    let others = target.max(2) as i64 - 1;
    let kept = |run: Span| run.max((run + there_and_back(view)) / 2);
    let (least, most) = (kept(fixed + per_task), kept(fixed + per_task * (others + 1)));
    let each = (most - least) / others;
    (least - each, each)
}

impl Downbeat {
    pub(super) fn new(tuning: Tuning) -> Self {
        Self { tuning, arrivals: Arrivals::default(), hosts: 0, losses: Losses::default() }
    }

    /// The largest batch that can be run, unless it saves next to nothing.
    fn largest(&self, view: &View<'_>) -> usize {
        let (fixed, per_task) = line(view.profile);
        let worthwhile = fixed.as_nanos() as f64 / (self.tuning.saving * per_task.as_nanos() as f64);
        (view.profile.max_batch() as f64).min(worthwhile.ceil()).max(1.0) as usize
    }

    /// The largest batch that can be gathered and run within an SLO, unless it saves next to nothing.
    fn target(&self, view: &View<'_>, slo: Span) -> usize {
        let Some(gap_ns) = self.arrivals.gap_ns(view.now) else { return 1 };
        let largest = self.largest(view);
        let [some, many] = LOST_PARTS;
        let lost = self.losses.late_part();
        let spare = 1.0 - ((lost - some) / (many - some)).clamp(0.0, 1.0);
        let (reserve, slo_ns) = (self.tuning.reserve * spare, slo.as_nanos() as f64);
        let fits = |size: usize| {
            let gathered_ns = (size - 1) as f64 * gap_ns;
            let (lead, latency) = (view.lead_times[size - 1], view.profile.latency(size));
            // One of the GPUs that the model keeps busy frees as often as it fills a batch, but not faster than all do.
            let turn_ns = latency.as_nanos() as f64 / f64::from(self.hosts.max(1));
            let own_ns = slo_ns - (lead - latency).as_nanos() as f64;
            let interval_ns = turn_ns.max(size as f64 * gap_ns).min(INTERVAL_PART_MAX * own_ns.max(0.0));
            gathered_ns + lead.as_nanos() as f64 + reserve * interval_ns <= slo_ns
        };
        // What fits fits with fewer, too.
        let (mut fitting, mut too_large) = (1, largest + 1);
        while too_large - fitting > 1 {
            let middle = usize::midpoint(fitting, too_large);
            if fits(middle) { fitting = middle } else { too_large = middle }
        }
        fitting
    }

    /// What is asked for, by clients with this SLO.
    fn traffic_within(&self, view: &View<'_>, slo: Span) -> Option<Traffic> {
        let gap_ns = self.arrivals.gap_ns(view.now)?;
        let target = self.target(view, slo);
        let (fixed, per_task) = occupation(view, target);
        let thousandths = 1e3 * self.tuning.gpu_price;
        Some(Traffic {
            gap: Span(gap_ns as i64),
            arrived_at: self.arrivals.last_at,
            fixed,
            per_task,
            target: target as u32,
            // What is more than four million is as good as endless.
            gpu_price: thousandths.min(f64::from(Traffic::ENDLESS_PRICE)) as u32,
        })
    }

    /// How much earlier than at its frontrun moment a batch queues for GPUs where these are scarce.
    fn earlier(&self, view: &View<'_>, batch: Gathered) -> Span {
        let execution_ms = f64::from(view.price.execution_ms);
        if execution_ms <= 0.0 {
            return Span::ZERO;
        }
        let turn_ms = execution_ms / f64::from(self.hosts.max(1));
        let longer = (1.0 - view.profile.latency(batch.size).as_millis_f64() / execution_ms).max(0.0);
        // Symphony, equation 1: with N GPUs busy a batch is gathered for `SLO / (N + 1)`. It gathers while it waits.
        let slo = slo(&view.queue[batch.skip]);
        let target = self.target(view, slo);
        let gap_ns = self.arrivals.gap_ns(view.now).unwrap_or(f64::INFINITY);
        let gpus = view.profile.latency(target).as_nanos() as f64 / (target as f64 * gap_ns);
        let idle_ms = (1.0 - gpus).max(0.0) * slo.as_millis_f64() / (gpus + 1.0);
        Span::from_millis_f64((TURNS * longer * turn_ms).max((TURNS_OF_FEW * turn_ms).min(idle_ms)))
    }
}

impl BatchPolicy for Downbeat {
    fn handle_arrived(&mut self, now: Timestamp) {
        self.arrivals.handle(&self.tuning, now);
    }

    fn gather(&self, view: &View<'_>) -> Gathered {
        let first = longest_prefix(view);
        let Some(head) = view.queue.get(first.skip).filter(|_| first.size > 0) else { return first };
        // A batch of all that wait is whole, and so are most.
        if first.skip + first.size == view.queue.len() || self.losses.is_worse_off(&self.tuning, head) {
            return first;
        }
        let Some(traffic) = self.traffic_within(view, slo(head)) else { return first };
        let (price, target) = (f64::from(view.price.price), f64::from(traffic.target));
        if price.is_infinite() || self.losses.late_part() > LOST_PARTS[0] {
            return whole_batch(view, traffic.target as usize);
        }
        let size = Load::of(&traffic, view.now, 1.0).size(price).min(target);
        whole_batch(view, (SHED_PART * size).round().max(1.0) as usize)
    }

    fn opens_at(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        frontrun(view, batch) - self.earlier(view, batch)
    }

    fn ready_at(&self, view: &View<'_>, batch: Gathered, traffic: Option<&Traffic>) -> Timestamp {
        let Some(traffic) = traffic else { return Timestamp::PAST };
        let size = Load::of(traffic, view.now, 1.0).size(f64::from(view.price.price));
        let head = view.queue.front().expect("a gathered batch has a task");
        // All that wait count: when a GPU is granted fewer may fit, and it must not go back for that.
        if size <= ALONE {
            return Timestamp::PAST;
        }
        // Nothing is dearer than GPUs: whoever can join shall.
        if self.tuning.gpu_price.is_infinite() {
            return self.opens_at(view, batch);
        }
        let (waiting, gap_ns) = (view.queue.len(), traffic.gap.as_nanos() as f64);
        let mut silence_ns = self.arrivals.pause_ns();
        if waiting as f64 >= size - 0.5 {
            // One more task saves its part of what does not grow with b.
            let saved_ns = traffic.fixed.as_nanos() as f64 / waiting as f64;
            if view.price.price.is_finite()
                || waiting >= self.largest(view)
                || saved_ns < self.tuning.saving * view.profile.latency(waiting).as_nanos() as f64
            {
                return Timestamp::PAST;
            }
            silence_ns = silence_ns.min(self.arrivals.silence_ns(IDLE_PART * gap_ns / saved_ns));
        }
        let after = |ns: f64| Span(ns.min(TOLD_NS_MAX) as i64);
        let patience = after(2.0 * (size - 0.5) * gap_ns);
        self.opens_at(view, batch).min(head.queued_at + patience).min(self.arrivals.last_at + after(silence_ns))
    }

    fn traffic(&self, view: &View<'_>) -> Option<Traffic> {
        self.traffic_within(view, view.queue.front().map_or(Span::ZERO, slo))
    }

    fn usual_traffic(&self, view: &View<'_>) -> Option<Traffic> {
        self.traffic_within(view, self.losses.usual_slo())
    }

    fn urgency(&self) -> Span {
        let lost_percent = 100.0 * self.losses.worst().min(self.tuning.little);
        Span::from_millis_f64(self.tuning.urgency_ms * lost_percent)
    }

    fn handle_lost(&mut self, task: &Queued) {
        self.losses.handle_lost(&self.tuning, task);
    }

    fn handle_granted(&mut self, view: &View<'_>, batch: Gathered, granted: Granted) {
        self.losses.handle_served(&self.tuning, view.queue.range(batch.skip..batch.skip + batch.size));
        self.hosts = granted.gpus;
    }

    fn learned(&self) -> Option<LearnedAverages> {
        let Arrivals { count, gap_ns, .. } = self.arrivals;
        let (slo_ns, hurried_part, classes) = self.losses.learned();
        let told = LearnedAverages { arrivals: count, gap_ns, hosts: self.hosts, slo_ns, hurried_part, classes };
        (count > 1).then_some(told)
    }

    fn handle_learned(&mut self, now: Timestamp, learned: &LearnedAverages) {
        let &LearnedAverages { arrivals: count, gap_ns, hosts, slo_ns, hurried_part, classes } = learned;
        let can_be = count > 1 && [slo_ns, gap_ns].iter().all(|time| (0.0..=TOLD_NS_MAX).contains(time));
        if let Some(losses) = Losses::told(slo_ns, hurried_part, classes).filter(|_| can_be) {
            // As if they came at random.
            let arrivals = Arrivals { count, last_at: now, gap_ns, square: 2.0 * gap_ns * gap_ns };
            *self = Self { tuning: self.tuning, arrivals, hosts, losses };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use proto::TaskId;

    use super::*;
    use crate::messages::Price;

    const US: i64 = 1_000;

    fn task(queued_at: i64, slo: i64) -> Queued {
        let (deadline, queued_at) = (Timestamp(queued_at + slo), Timestamp(queued_at));
        Queued { id: TaskId(0), deadline, queued_at, priority: 0, application: 0, length: 0 }
    }

    /// Tasks came at a constant gap until now, and of late this part of them was lost.
    fn policy(now: Timestamp, gap: i64, hosts: u32, lost: f64) -> Downbeat {
        let mut policy = Downbeat::new(Tuning::default());
        for arrival in (0..300).rev() {
            policy.handle_arrived(now - Span(gap) * arrival);
        }
        policy.hosts = hosts;
        let task = task(0, 100);
        for number in 0..20_000 {
            if f64::from(number % 100) < 100.0 * lost {
                policy.handle_lost(&task);
            } else {
                policy.losses.handle_served(&policy.tuning, [task].iter());
            }
        }
        policy
    }

    fn view<'a>(
        now: Timestamp,
        queue: &'a VecDeque<Queued>,
        (profile, lead_times): (&'a LatencyProfile, &'a [Span]),
        price: f32,
    ) -> View<'a> {
        let price = Price { price, execution_ms: 0.0 };
        View { now, free_at: Timestamp::PAST, queue, profile, lead_times, jitter: Span::ZERO, price }
    }

    /// The rule of docs/policy.md, one size after another; times in nanoseconds.
    fn target(profile: &LatencyProfile, (gap, hosts, lost): (i64, u32, f64), slo: i64) -> usize {
        let latency = |size: usize| profile.latency(size).as_nanos() as f64;
        let task = (latency(profile.max_batch()) - latency(1)) / (profile.max_batch() - 1) as f64;
        let fixed = latency(1) - task;
        let reserve = if lost < 0.02 {
            1.1
        } else if lost > 0.08 {
            0.0
        } else {
            1.1 * (0.08 - lost) / 0.06
        };
        let mut largest = 1;
        for size in 2..=profile.max_batch() {
            let interval = (latency(size) / f64::from(hosts)).max(size as f64 * gap as f64).min(0.1 * slo as f64);
            let needs = (size - 1) as f64 * gap as f64 + latency(size) + reserve * interval;
            if needs <= slo as f64 && size as f64 <= (fixed / (0.03 * task)).ceil() {
                largest = size;
            }
        }
        largest
    }

    proptest! {
        #[test]
        fn gives_up_as_few_heads_as_make_room_for_the_target(
            ages in proptest::collection::vec(0i64..24_000, 0..30),
            (alpha, beta, gap) in (20i64..4_000, 0i64..9_000, 50i64..5_000),
            hosts in 1u32..20,
            lost in proptest::sample::select(vec![0.0, 0.05, 0.3]),
            price in 0.0f64..20.0,
        ) {
            let table = (1..=20).map(|size| Span((alpha * size + beta) * US)).collect();
            let profile = LatencyProfile::from_table(table).unwrap();
            let lead_times: Vec<_> = (1..=20).map(|size| profile.latency(size)).collect();
            let (now, slo) = (Timestamp(1_000_000 * US), 25_000 * US);
            let mut ages = ages;
            ages.sort_unstable_by(|one, other| other.cmp(one));
            let queue: VecDeque<_> = ages.iter().map(|age| task(now.0 - age * US, slo)).collect();
            let of = |price| view(now, &queue, (&profile, &lead_times), price);
            let policy = policy(now, gap * US, hosts, lost);
            let target = target(&profile, (gap * US, hosts, policy.losses.late_part()), slo);
            prop_assert!(policy.target(&of(0.0), Span(slo)).abs_diff(target) <= 1, "{target}");
            let target = policy.target(&of(0.0), Span(slo)) as f64;
            // Half of sqrt(x beta / (alpha + gap / 2)) while the price x is finite and little is lost.
            let worthwhile = (price * beta as f64 / (alpha as f64 + gap as f64 / 2.0)).sqrt().max(1.0);
            let half = if lost > 0.02 { target } else { 0.5 * target.min(worthwhile) };
            for (price, target) in [(f32::INFINITY, target), (price as f32, half)] {
                let view = of(price);
                let batches = (0..queue.len()).map(|skip| Gathered { skip, size: view.longest_batch(skip) });
                let whole = |batch: &Gathered, target: f64| {
                    batch.size > 0 && batch.size >= (target.round() as usize).min(queue.len() - batch.skip)
                };
                let none = Gathered { skip: queue.len(), size: 0 };
                // Gaps and prices are rounded on their way.
                let [most, least] = [1.001, 0.999].map(|by| {
                    batches.clone().find(|batch| whole(batch, target * by)).unwrap_or(none)
                });
                let gathered = policy.gather(&view);
                prop_assert!(gathered == most || gathered == least, "{price}: {gathered:?}, {most:?} {least:?}");
            }
        }
    }

    #[test]
    fn a_batch_is_held_back_for_what_its_price_makes_worthwhile() {
        // l(b) = b + 5 ms; 8 GPUs.
        let profile = LatencyProfile::linear(1.0, 5.0, 32).unwrap();
        let lead_times: Vec<_> = (1..=32).map(|size| profile.latency(size)).collect();
        let ms = |ms: i64| 1_000 * US * ms;
        let now = Timestamp(ms(1_000));
        let ready_of = |(gap, slo): (i64, i64), waiting: &[i64], price: f32| {
            let policy = policy(now, ms(gap), 8, 0.0);
            let queue: VecDeque<_> = waiting.iter().map(|&age| task(now.0 - ms(age), ms(slo))).collect();
            let view = view(now, &queue, (&profile, &lead_times), price);
            let batch = Gathered { skip: 0, size: waiting.len() };
            let ready_at = policy.ready_at(&view, batch, policy.traffic(&view).as_ref());
            assert!(ready_at <= policy.opens_at(&view, batch), "{waiting:?} {price}");
            ready_at.max(now) - now
        };
        let ready_in = |waiting: i64, price| ready_of((1, 40), &(0..waiting).rev().collect::<Vec<_>>(), price);
        // GPU time is worth nothing: nobody waits.
        assert_eq!(ready_in(1, 0.0), Span::ZERO);
        // sqrt(2.7 * 5 / 1.5) is 3: two and a half are enough, or twice their gaps.
        assert_eq!([1, 2, 3].map(|waiting| ready_in(waiting, 2.7)), [Span(ms(5)), Span(ms(4)), Span::ZERO]);
        // Where it is dearest the head waits until one more task would not fit, in 33 ms, or twice the gaps of a target
        // and a tenth have passed.
        let waits = ready_in(1, f32::INFINITY);
        assert!(waits > Span(ms(30)) && waits <= Span(ms(33)), "{waits:?}");
        // The target is 15, so that 16 are enough: another one would save 5 / 16 ms, less than 3 % of l(16).
        assert!(ready_in(15, f32::INFINITY) > Span::ZERO);
        assert_eq!(ready_in(16, f32::INFINITY), Span::ZERO);
        // With 25 ms it is 9. Beside 10 that came at once another one saves 3 % of l(10), beside 11 it does not.
        let waits = |of, waiting: usize| ready_of(of, &vec![0; waiting], f32::INFINITY) > Span::ZERO;
        assert_eq!([10, 11].map(|waiting| waits((1, 25), waiting)), [true, false]);
        // With a task every 2 ms and 30 ms it is 7. Beside 8 another one saves more than 0.3 of 2 ms, beside 9 less.
        assert_eq!([8, 9].map(|waiting| waits((2, 30), waiting)), [true, false]);
    }

    #[test]
    fn a_lone_request_is_never_held_back() {
        let profile = LatencyProfile::linear(1.0, 5.0, 256).unwrap();
        let lead_times: Vec<_> = (1..=256).map(|size| profile.latency(size)).collect();
        let slo = 20_000_000 * US;
        let first = Timestamp(1);
        let queue: VecDeque<_> = [task(first.0, slo)].into();
        let mut fresh = Downbeat::new(Tuning::default());
        fresh.handle_arrived(first);
        let view = view(first, &queue, (&profile, &lead_times), f32::INFINITY);
        let batch = Gathered { skip: 0, size: 1 };
        assert_eq!(fresh.ready_at(&view, batch, fresh.traffic(&view).as_ref()), Timestamp::PAST, "a new model's");
    }

    #[test]
    fn short_batches_among_long_ones_queue_earlier() {
        let profile = LatencyProfile::linear(1.0, 5.0, 32).unwrap();
        let lead_times: Vec<_> = (1..=32).map(|size| profile.latency(size)).collect();
        let now = Timestamp(1_000_000 * US);
        let queue: VecDeque<_> = [task(now.0, 40_000 * US)].into();
        let policy = policy(now, 1_000 * US, 4, 0.0);
        let opens_in = |execution_ms| {
            let mut view = view(now, &queue, (&profile, &lead_times), 0.0);
            view.price.execution_ms = execution_ms;
            policy.opens_at(&view, Gathered { skip: 0, size: 1 }) - now
        };
        // d - l(2); a mean of 10 ms is 4 more than l(1). The model has a GPU of its own to keep busy.
        assert_eq!([0.0, 6.0, 10.0].map(opens_in), [33, 33, 29].map(Span::from_millis));
    }

    #[test]
    fn gaps_follow_arrivals_and_silence() {
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.gap_ns(Timestamp(5)), None);
        for arrival in 0..1000 {
            arrivals.handle(&Tuning::default(), Timestamp(10 * arrival));
        }
        assert!((arrivals.gap_ns(Timestamp(9_990)).unwrap() - 10.0).abs() < 1e-6);
        assert_eq!(arrivals.gap_ns(Timestamp(9_990 + 300)), Some(100.0));
        // Equal gaps are no bursts, and as promising after any silence; ten at once and then a pause of a hundred are.
        assert_eq!(arrivals.pause_ns(), f64::INFINITY);
        assert_eq!([0.99, 1.01].map(|least| arrivals.silence_ns(least)), [f64::INFINITY, 0.0]);
        for arrival in 0..4000 {
            arrivals.handle(&Tuning::default(), Timestamp(20_000 + 100 * (arrival / 10)));
        }
        assert!((10.0..30.0).contains(&arrivals.pause_ns()), "{arrivals:?}");
    }

    /// Gamma's hazard by its definition, the density over what is still to come, by the midpoint rule.
    fn hazard(shape: f64, silence: f64) -> f64 {
        let density = |gaps: f64| gaps.powf(shape - 1.0) * (-shape * gaps).exp();
        let step = 1e-3;
        let rest: f64 = (0..40_000).map(|at| density(silence + (f64::from(at) + 0.5) * step) * step).sum();
        density(silence) / rest
    }

    #[test]
    fn the_longer_the_silence_the_less_is_to_be_expected() {
        for shape in [0.2, 0.3, 0.5, 0.7, 1.0] {
            let arrivals =
                Arrivals { count: 9, last_at: Timestamp(0), gap_ns: 1e6, square: 1e12 * (1.0 + 1.0 / shape) };
            for silence in [0.1, 0.3, 1.0] {
                let expected = shape + (1.0 - shape) / (2.0 * f64::sqrt(silence));
                assert!((expected / hazard(shape, silence) - 1.0).abs() < 0.34, "{shape} {silence}: {expected}");
                if shape < 1.0 {
                    let gaps = arrivals.silence_ns(expected) / 1e6;
                    assert!((gaps / silence - 1.0).abs() < 1e-6, "{shape} {silence}: {gaps}");
                }
            }
        }
    }

    #[test]
    fn urgency_grows_with_losses_up_to_a_limit() {
        let task = task(100, 10_000);
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
