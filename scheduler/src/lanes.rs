//! What waits for one dynamic model ([`crate::dynamic`]), and which of it runs next (Orloj, Algorithm 1).
//!
//! Each batch size has a queue of the requests that it could still serve in time on average (`lanes/queue.rs`); a
//! request that has left the last one is given up. Of the sizes with enough requests that one is taken whose earliest
//! deadline is the latest, and the larger of two, which is how Algorithm 1 reads (lines 16 to 19). The text of section
//! 3.2 takes the earliest deadline instead, which mostly means one request at a time: of `orloj_three_modal` at 0.8,
//! 1.1 and 1.4 of the capacity it finished 0.75, 0.56 and 0.44 where this order finishes 0.87, 0.72 and 0.59 (200 s,
//! seed 1).
//!
//! **With lanes**, as `downbeat` plans (`model_thread/dynamic.rs`), requests that differ much do not share batches. A
//! batch is padded to its longest request, so a short one pays for a long one beside it. What that costs, and what a
//! batch of its own would cost instead, is known with the times of applications: those whose difference is worth more
//! than a batch's fixed cost have queues of their own, and distributions of what batches take there. Of lanes the one
//! goes first whose batch serves most for its time: requests by what they weigh (`lanes/losses.rs`), those of
//! applications that lose much more than others, over what the batch takes on average; and up to twice as much the
//! nearer the lane's earliest deadline is. So no application starves, as long ones do where short ones always go
//! first. A model whose requests are all alike has one lane, and so has every model under `orloj`, where all weigh
//! the same. Lanes are decided anew as times are learned. What is said of lanes of applications here is said of
//! classes then: where requests choose their lengths, these tell their times, too.

mod losses;
mod queue;

use std::collections::BTreeMap;

use losses::Losses;
use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use queue::{Entry, ScoreClock, SizeQueue};

use crate::{
    dynamic::{BatchCost, BatchTimes, Class, DynamicTimes, KnownTimes},
    messages::NetworkBudget,
    task::{Batch, ModelConfig},
    task_queue::Queued,
};

/// Exponents of scores count from an instant at most so far back (section 4.4: they overflow).
const BASE_MAX: f64 = 100.0;
/// After so many samples distributions, and with them all scores, are made anew; of a model that is new ...
pub(crate) const SAMPLES_A_TABLE: u64 = 64;
/// ... first after so many, and whenever there are twice as many.
const SAMPLES_AT_FIRST: u64 = 8;
/// Where many wait it takes one for so many of them: each table costs all of them new scores.
const WAITING_A_SAMPLE: u64 = 8;
/// However far deadlines are, a batch starts so soon or not at all: only who stands still for so long is later, and one
/// that hangs is to be noticed.
const WINDOW_MAX: Span = Span::from_millis(5_000);
/// What is known of requests that have no chance by it, and of which none has run for a while, is forgotten, as an
/// estimate of l(b) is: one that hung must not keep all that are like it from ever running again. The while is at most
/// this long ...
const FORGET_AFTER: Span = Span::from_millis(10_000);
/// ... and at least this long ...
const FORGET_AFTER_LEAST: Span = Span::from_millis(1_000);
/// ... and else so many times what they are thought to take: trials in vain cost a GPU a twentieth of its time.
const FORGET_AFTER_TIMES: i64 = 20;

/// What distinguishes the policies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rules {
    /// Orloj's b for a millisecond: how likely a request that is not chosen now is chosen later.
    pub rate: f64,
    /// Whether there may be several lanes, and lengths tell what requests take.
    pub has_lanes: bool,
}

impl Rules {
    /// Ours. b hardly matters (section 5.6).
    pub(crate) const LANES: Self = Self { rate: 1e-4, has_lanes: true };

    /// Orloj as published knows no lengths.
    fn times(self) -> fn(BatchCost) -> DynamicTimes {
        if self.has_lanes { DynamicTimes::by_length } else { DynamicTimes::new }
    }
}

/// The requests of a model.
#[derive(Debug)]
pub(crate) struct Lanes<P> {
    rules: Rules,
    clock: ScoreClock,
    config: ModelConfig,
    budget: NetworkBudget,
    dynamic: Option<DynamicTimes>,
    samples: u64,
    /// As of the last time that they changed what is planned with.
    samples_counted: u64,
    /// How often samples have changed what is planned with.
    tables: u64,
    /// When one of them ran last, or was first given up.
    ran_at: BTreeMap<Class, Timestamp>,
    /// By application, if there may be several lanes.
    losses: Losses,
    /// One, or several if there may be.
    lanes: Vec<Lane>,
    /// By key, until the task leaves.
    tasks: BTreeMap<u32, Waiting<P>>,
    next_key: u32,
    /// How many wait of each priority that any has.
    priorities: BTreeMap<u8, usize>,
}

/// Requests that share batches.
#[derive(Debug)]
struct Lane {
    /// None: those that are in no other.
    classes: Vec<Class>,
    /// Of each queue's size.
    times: Vec<BatchTimes>,
    queues: Vec<SizeQueue>,
}

/// A batch that could be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Choice {
    /// The earliest deadline of those that could be in it.
    pub deadline: Timestamp,
    lane: usize,
    queue: usize,
}

/// What is known of it before it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outlook {
    pub size: usize,
    /// How long it runs, on average.
    pub execution: Span,
    /// The earliest deadline of those that could be in it, and when that task was queued.
    pub deadline: Timestamp,
    pub queued_at: Timestamp,
    /// When the first of those that could be in it cannot any more, and another batch may be the one to take.
    pub expires_at: Timestamp,
}

#[derive(Debug)]
struct Waiting<P> {
    key: Queued,
    payload: P,
    lane: usize,
    /// Queues that it is in.
    queues: u32,
}

impl<P> Lanes<P> {
    /// Nothing waits, and nothing is known but what the model is.
    pub(crate) fn new(now: Timestamp, rules: Rules, config: ModelConfig, budget: NetworkBudget) -> Self {
        let mut lanes = Self {
            rules,
            clock: ScoreClock { rate: rules.rate, base: now },
            dynamic: config.dynamic.map(rules.times()),
            config,
            budget,
            samples: 0,
            samples_counted: 0,
            tables: 0,
            ran_at: BTreeMap::new(),
            losses: Losses::default(),
            lanes: Vec::new(),
            tasks: BTreeMap::new(),
            next_key: 0,
            priorities: BTreeMap::new(),
        };
        lanes.rebuild(now);
        lanes
    }

    /// The model is another one, or what is planned with.
    pub(crate) fn handle_config(&mut self, now: Timestamp, config: ModelConfig, budget: NetworkBudget) {
        let has_cost = self.config.dynamic == config.dynamic;
        // Where requests tell what batches take, l(b) does not.
        let is_known = self.dynamic.as_ref().is_some_and(|dynamic| !dynamic.is_empty());
        let has_times = self.config.profile.max_batch() == config.profile.max_batch()
            && (is_known || self.config.profile == config.profile);
        let is_same = has_cost && has_times && self.budget == budget;
        if !has_cost {
            match (&mut self.dynamic, config.dynamic) {
                // A backend has measured it anew; what requests took alone they took.
                (Some(dynamic), Some(cost)) => dynamic.handle_measured(cost),
                (dynamic, cost) => {
                    *dynamic = cost.map(self.rules.times());
                    (self.samples, self.samples_counted) = (0, 0);
                }
            }
        }
        (self.config, self.budget) = (config, budget);
        // All that wait would have new scores, which are what they were.
        if !is_same {
            self.rebuild(now);
        }
    }

    /// A task of an application and a length was executed alone. True if other distributions hold from now on.
    pub(crate) fn handle_alone(&mut self, now: Timestamp, (application, length): (u8, u32), alone: Span) -> bool {
        let Some(dynamic) = &mut self.dynamic else { return false };
        dynamic.handle_alone(application, length, alone);
        self.on_sampled(now)
    }

    /// A GPU executed a batch of tasks of these applications and lengths. True if other distributions hold from now on.
    pub(crate) fn handle_executed(&mut self, now: Timestamp, gpu: GpuId, tasks: &[(u8, u32)], took: Span) -> bool {
        let teaches = self.dynamic.as_mut().is_some_and(|dynamic| dynamic.handle_batch(gpu, tasks, took));
        teaches && self.on_sampled(now)
    }

    fn on_sampled(&mut self, now: Timestamp) -> bool {
        self.samples += 1;
        let is_new = (SAMPLES_AT_FIRST..=SAMPLES_A_TABLE).contains(&self.samples) && self.samples.is_power_of_two();
        let enough = SAMPLES_A_TABLE.max(self.tasks.len() as u64 / WAITING_A_SAMPLE);
        let is_due = is_new || self.samples - self.samples_counted >= enough;
        if is_due {
            self.samples_counted = self.samples;
            self.tables += 1;
            self.rebuild(now);
        }
        is_due
    }

    /// What another one knew of the model's requests, by the same rules.
    pub(crate) fn handle_samples(&mut self, now: Timestamp, mut samples: DynamicTimes) {
        let Some(cost) = self.config.dynamic else { return };
        samples.handle_moved(cost);
        self.dynamic = Some(samples);
        (self.samples, self.samples_counted) = (SAMPLES_A_TABLE, SAMPLES_A_TABLE);
        self.tables += 1;
        self.rebuild(now);
    }

    /// A GPU is gone.
    pub(crate) fn remove_gpu(&mut self, gpu: GpuId) {
        if let Some(dynamic) = &mut self.dynamic {
            dynamic.remove_gpu(gpu);
        }
    }

    /// How often samples have changed what is planned with.
    pub(crate) fn tables_made(&self) -> u64 {
        self.tables
    }

    /// What is known of the requests, if anything is to be.
    pub(crate) fn request_times(&self) -> Option<KnownTimes> {
        self.dynamic.as_ref().map(DynamicTimes::known_times)
    }

    /// What is known of them.
    pub(crate) fn into_samples(self) -> Option<DynamicTimes> {
        self.dynamic
    }

    /// Algorithm 1, lines 2 to 4.
    pub(crate) fn reset_base(&mut self, now: Timestamp) {
        if (now - self.clock.base).as_millis_f64() * self.clock.rate > BASE_MAX {
            self.clock.base = now;
            self.rebuild(now);
        }
    }

    /// Makes lanes, distributions and scores anew.
    fn rebuild(&mut self, now: Timestamp) {
        let profile = &self.config.profile;
        let max = profile.max_batch();
        let on_top = |size| self.budget.delay(size);
        if let Some(dynamic) = &mut self.dynamic {
            dynamic.settle();
        }
        let groups = match &self.dynamic {
            Some(dynamic) if self.rules.has_lanes => dynamic.groups(),
            Some(dynamic) => vec![dynamic.classes()],
            None => Vec::new(),
        };
        let groups = if groups.is_empty() { vec![Vec::new()] } else { groups };
        let sizes = sizes(max, groups.len() > 1);
        let lane = |classes: Vec<Class>| {
            let known = self.dynamic.as_ref().and_then(|dynamic| dynamic.batches(&classes, &sizes, on_top));
            let constant = |&size: &usize| BatchTimes::constant(profile.latency(size) + on_top(size));
            let times = known.unwrap_or_else(|| sizes.iter().map(constant).collect());
            Lane { classes, times, queues: Vec::new() }
        };
        self.lanes = groups.into_iter().map(lane).collect();
        let mut entries: Vec<Vec<Entry>> = vec![Vec::new(); self.lanes.len()];
        for (&key, waiting) in &mut self.tasks {
            let entry = entry(self.dynamic.as_ref(), key, &waiting.key);
            (waiting.lane, waiting.queues) = (lane_of(&self.lanes, entry.class), sizes.len() as u32);
            entries[waiting.lane].push(entry);
        }
        for (Lane { times, queues, .. }, entries) in self.lanes.iter_mut().zip(&entries) {
            let queue = |(&size, times)| SizeQueue::of(size, now, entries, times);
            *queues = sizes.iter().zip(&*times).map(queue).collect();
        }
    }

    /// What batches take at most, but for one in a hundred, by size; l(b) while nothing is known of the requests.
    pub(crate) fn longest(&self) -> LatencyProfile {
        let profile = &self.config.profile;
        let known = self.dynamic.as_ref().and_then(|dynamic| dynamic.longest(profile.max_batch()));
        known.and_then(|longest| LatencyProfile::from_table(longest).ok()).unwrap_or_else(|| profile.clone())
    }

    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.tasks.len() >= self.config.queue_max
    }

    /// Those of one priority.
    pub(crate) fn length_of(&self, priority: u8) -> usize {
        self.priorities.get(&priority).copied().unwrap_or(0)
    }

    /// Takes a task in; how many may wait is its callers' to bound ([`Self::is_full`]).
    pub(crate) fn push(&mut self, now: Timestamp, key: Queued, payload: P) {
        let name = self.next_key;
        self.next_key = self.next_key.wrapping_add(1);
        let (lane, queues) = insert(&mut self.lanes, now, entry(self.dynamic.as_ref(), name, &key));
        *self.priorities.entry(key.priority).or_default() += 1;
        self.tasks.insert(name, Waiting { key, payload, lane, queues });
    }

    fn take(&mut self, name: u32) -> Option<(Queued, P)> {
        let Waiting { key, payload, lane, .. } = self.tasks.remove(&name)?;
        self.lanes[lane].queues.iter_mut().for_each(|queue| queue.remove(name));
        self.uncount(key.priority);
        Some((key, payload))
    }

    fn uncount(&mut self, priority: u8) {
        let count = self.priorities.get_mut(&priority).expect("it was counted");
        *count -= 1;
        if *count == 0 {
            self.priorities.remove(&priority);
        }
    }

    /// Takes the task named `id` out. A scan: hang-ups are rare.
    pub(crate) fn remove(&mut self, id: TaskId) -> Option<(Queued, P)> {
        let name = self.tasks.iter().find(|(_, waiting)| waiting.key.id == id).map(|(&name, _)| name)?;
        self.take(name)
    }

    /// Takes out the least important task if it is less important than `priority`; the one with the farthest deadline.
    /// A scan where some are: for queues that are full.
    pub(crate) fn take_below(&mut self, priority: u8) -> Option<(Queued, P)> {
        let (&least, _) = self.priorities.last_key_value().filter(|&(&least, _)| least > priority)?;
        let its = self.tasks.iter().filter(|(_, waiting)| waiting.key.priority == least);
        let name = its.max_by_key(|&(&name, waiting)| (waiting.key.deadline, name)).map(|(&name, _)| name)?;
        self.take(name)
    }

    /// Keeps only tasks that `keep` wants. True if any was thrown away. A scan.
    pub(crate) fn retain(&mut self, keep: impl Fn(&Queued) -> bool) -> bool {
        let others = self.tasks.iter().filter(|(_, waiting)| !keep(&waiting.key));
        let others: Vec<u32> = others.map(|(&name, _)| name).collect();
        others.iter().filter_map(|&name| self.take(name)).count() > 0
    }

    /// Takes out all that waits, nearest deadline first.
    pub(crate) fn drain(&mut self) -> Vec<(Queued, P)> {
        let names: Vec<u32> = self.tasks.keys().copied().collect();
        let mut tasks: Vec<_> = names.into_iter().filter_map(|name| self.take(name)).collect();
        tasks.sort_by_key(|(key, _)| key.deadline);
        tasks
    }

    /// Algorithm 1, lines 5 to 14: scores follow the time, and what is too late leaves, if a batch that is granted at
    /// `granted_at`, now or later, is the first that it could be in. Yields who timed out.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp, granted_at: Timestamp) -> Vec<(Queued, P)> {
        let mut timed_out = self.expire(granted_at);
        let mut lost = Vec::new();
        // Each turn something is forgotten.
        while self.rules.has_lanes && !timed_out.is_empty() {
            let forgotten = self.forget_hopeless(now, &timed_out);
            for ((key, payload), is_tried_again) in timed_out.into_iter().zip(forgotten) {
                if is_tried_again {
                    self.push(now, key, payload);
                } else {
                    lost.push((key, payload));
                }
            }
            timed_out = self.expire(granted_at);
        }
        lost.extend(timed_out);
        for (key, _) in lost.iter().filter(|_| self.rules.has_lanes) {
            if self.alone(key) <= key.deadline - key.queued_at {
                self.losses.handle_ended(key.application, 1.0);
            }
        }
        lost
    }

    /// What a request takes alone on average, with the way of its plan and of its input.
    fn alone(&self, key: &Queued) -> Span {
        let class = class_of(self.dynamic.as_ref(), key);
        self.lanes[lane_of(&self.lanes, class)].times[0].of(class).mean
    }

    fn expire(&mut self, granted_at: Timestamp) -> Vec<(Queued, P)> {
        let mut timed_out = Vec::new();
        for queue in self.lanes.iter_mut().flat_map(|lane| &mut lane.queues) {
            while let Some(name) = queue.pop_expired(granted_at) {
                let waiting = self.tasks.get_mut(&name).expect("what is in a queue waits");
                waiting.queues -= 1;
                if waiting.queues == 0 {
                    timed_out.extend(self.tasks.remove(&name).map(|waiting| (waiting.key, waiting.payload)));
                }
            }
        }
        timed_out.iter().for_each(|(key, _)| self.uncount(key.priority));
        timed_out
    }

    /// Looks at tasks that are to be given up. Which of them are so by what is not believed any more.
    fn forget_hopeless(&mut self, now: Timestamp, given_up: &[(Queued, P)]) -> Vec<bool> {
        let Some(dynamic) = &mut self.dynamic else { return vec![false; given_up.len()] };
        let mut forgotten = Vec::new();
        let classes: Vec<Class> = given_up.iter().map(|(key, _)| dynamic.class(key.application, key.length)).collect();
        for ((key, _), &class) in given_up.iter().zip(&classes) {
            let Lane { times, .. } = &self.lanes[lane_of(&self.lanes, class)];
            let alone = times[0].of(class).mean;
            // From its arrival on.
            let is_hopeless = alone > key.deadline - key.queued_at;
            // l(b) was measured of requests of one length, and tells little of others.
            let patience = match dynamic.is_empty() {
                true => Span::ZERO,
                false => (alone * FORGET_AFTER_TIMES).clamp(FORGET_AFTER_LEAST, FORGET_AFTER),
            };
            if is_hopeless
                && dynamic.believes(class)
                && !forgotten.contains(&class)
                && now - *self.ran_at.entry(class).or_insert(now) >= patience
            {
                self.ran_at.remove(&class);
                forgotten.push(class);
            }
        }
        if !forgotten.is_empty() {
            forgotten.iter().for_each(|&class| dynamic.forget(class));
            (self.samples, self.samples_counted) = (0, 0);
            self.tables += 1;
            self.rebuild(now);
        }
        classes.iter().map(|class| forgotten.contains(class)).collect()
    }

    /// When the next request times out. One that is in no queue any more has left the first one last.
    pub(crate) fn first_expiry(&self) -> Option<Timestamp> {
        self.lanes.iter().filter_map(|lane| lane.queues.first()?.first_expiry()).min()
    }

    /// The batch to take: of each lane that of lines 15 to 19, of these the one that serves most for its time.
    pub(crate) fn choice(&self, now: Timestamp) -> Option<Choice> {
        let mut choices = (0..self.lanes.len()).filter_map(|lane| self.choice_of(lane));
        let first = choices.next()?;
        let mut best = (first, None);
        for choice in choices {
            let most = best.1.unwrap_or_else(|| self.worth(now, first));
            let worth = self.worth(now, choice);
            best = if worth > most { (choice, Some(worth)) } else { (best.0, Some(most)) };
        }
        Some(best.0)
    }

    fn choice_of(&self, lane: usize) -> Option<Choice> {
        let full = self.lanes[lane].queues.iter().enumerate().filter(|(_, queue)| queue.len() >= queue.size());
        let ranked = full.filter_map(|(index, queue)| Some((queue.earliest()?.0, queue.size(), index)));
        let (deadline, _, queue) = ranked.max()?;
        Some(Choice { deadline, lane, queue })
    }

    /// What a batch serves of requests by weight in a nanosecond, and up to twice that the nearer the instant is at
    /// which it must start, as a part of the time that its first request came with.
    fn worth(&self, now: Timestamp, Choice { deadline, lane, queue }: Choice) -> f64 {
        let Lane { times, queues, .. } = &self.lanes[lane];
        let (mean, queue) = (times[queue].mean, &queues[queue]);
        let (_, name) = queue.earliest().expect("the queue holds a batch");
        let slack = (deadline - now - mean).max(Span::ZERO).as_nanos() as f64;
        let given = (deadline - self.tasks[&name].key.queued_at).max(Span(1)).as_nanos() as f64;
        let weight = queue.size() as f64 * queue.mean_weight(|application| self.losses.weight(application));
        weight / mean.max(Span(1)).as_nanos() as f64 * (2.0 - (slack / given).min(1.0))
    }

    /// What is known of a batch that may be taken.
    pub(crate) fn outlook(&self, Choice { lane, queue, .. }: Choice) -> Outlook {
        let Lane { queues, times, .. } = &self.lanes[lane];
        let (queue, mean) = (&queues[queue], times[queue].mean);
        let (deadline, name) = queue.earliest().expect("the queue holds a batch");
        Outlook {
            size: queue.size(),
            execution: mean - self.budget.delay(queue.size()),
            deadline,
            queued_at: self.tasks[&name].key.queued_at,
            expires_at: queue.first_expiry().expect("the queue holds a batch"),
        }
    }

    /// Takes a batch for a GPU that is free at `free_at`: of those that could be in it the ones with the highest
    /// scores. It starts while any of them could still be in time, if it were among the shortest.
    pub(crate) fn take_batch(
        &mut self,
        now: Timestamp,
        choice: Choice,
        (model, gpu): (ModelId, GpuId),
        (timer_at, free_at): (Timestamp, Timestamp),
    ) -> Batch<P> {
        let Choice { lane, queue, .. } = choice;
        let size = self.lanes[lane].queues[queue].size();
        let Lane { queues, times, .. } = &mut self.lanes[lane];
        let weight = |application| if self.rules.has_lanes { self.losses.weight(application) } else { 1.0 };
        let names = queues[queue].best(now, &times[queue], self.clock, weight);
        let mut tasks: Vec<(Queued, P)> =
            names.into_iter().map(|name| self.take(name).expect("what is in a queue waits")).collect();
        if let Some(dynamic) = self.dynamic.as_ref().filter(|_| self.rules.has_lanes) {
            let classes = tasks.iter().map(|(key, _)| dynamic.class(key.application, key.length));
            self.ran_at.extend(classes.map(|class| (class, now)));
        }
        tasks.sort_by_key(|(key, _)| key.deadline);
        if let Some(dynamic) = &mut self.dynamic {
            dynamic.handle_granted(size);
        }
        let (times, delay) = (&self.lanes[lane].times[queue], self.budget.delay(size));
        let exec_at = (now + delay).max(free_at);
        let (execution, shortest) = (times.mean - delay, times.shortest() - delay);
        let (last, _) = tasks.last().expect("no size is 0");
        let latest = (last.deadline - shortest).clamp(exec_at, exec_at + WINDOW_MAX);
        for (key, _) in tasks.iter().filter(|_| self.rules.has_lanes) {
            let class = class_of(self.dynamic.as_ref(), key);
            self.losses.handle_ended(key.application, times.of(class).late(key.deadline - exec_at + delay));
        }
        // Nothing is held back.
        Batch { model, gpu, due_at: Timestamp::PAST, timer_at, exec_at, latest, execution, tasks }
    }

    /// Where exponents of scores count from, for tests.
    #[cfg(test)]
    pub(crate) fn base(&self) -> Timestamp {
        self.clock.base
    }
}

/// Of the queues of a lane: powers of two, as published, and the largest. Where requests that differ have lanes of
/// their own, what is half-way between them, too: 0.02 more of all requests of Orloj's settings are in time by it.
/// Where those of one lane differ much it is 0.03 fewer of a log-normal application's.
fn sizes(max: usize, are_alike: bool) -> Vec<usize> {
    let next = |&size: &usize| match size {
        1 => Some(2),
        _ if !are_alike => Some(2 * size),
        _ if size.is_power_of_two() => Some(size + size / 2),
        _ => Some(size / 3 * 4),
    };
    std::iter::successors(Some(1), next).take_while(|&size| size < max).chain([max]).collect()
}

fn class_of(dynamic: Option<&DynamicTimes>, key: &Queued) -> Class {
    dynamic.map_or(Class::ANY, |dynamic| dynamic.class(key.application, key.length))
}

fn entry(dynamic: Option<&DynamicTimes>, name: u32, key: &Queued) -> Entry {
    let &Queued { deadline, application, .. } = key;
    Entry { key: name, deadline, application, class: class_of(dynamic, key) }
}

/// There is one lane if nothing is known of any request.
fn lane_of(lanes: &[Lane], class: Class) -> usize {
    lanes.iter().position(|lane| lane.classes.contains(&class)).unwrap_or(0)
}

/// Into all queues of its lane: which that is, and how many they are.
fn insert(lanes: &mut [Lane], now: Timestamp, entry: Entry) -> (usize, u32) {
    let index = lane_of(lanes, entry.class);
    let Lane { queues, times, .. } = &mut lanes[index];
    for (queue, times) in queues.iter_mut().zip(times) {
        queue.insert(now, entry, times);
    }
    (index, queues.len() as u32)
}

#[cfg(test)]
mod tests;
