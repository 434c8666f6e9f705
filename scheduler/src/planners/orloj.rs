//! Orloj (2022), Algorithm 1: whenever a GPU is idle it is given a batch of the requests with the highest scores, which
//! follow from the distributions of what batches take.
//!
//! Each batch size has a queue of the requests that it could still serve in time on average (`orloj/queue.rs`); a
//! request that has left the last one is given up. Of the sizes with enough requests that one is taken whose earliest
//! deadline is the latest, and the larger of two, which is how Algorithm 1 reads (lines 16 to 19). The text of section
//! 3.2 takes the earliest deadline instead, which mostly means one request at a time: of `orloj_three_modal` at 0.8,
//! 1.1 and 1.4 of the capacity it finished 0.75, 0.56 and 0.44 where this order finishes 0.87, 0.72 and 0.59 (200 s,
//!   seed 1).
//!
//! Orloj runs one model on one GPU. With several models the one whose batch has the earliest deadline goes first; all
//! GPUs that host it take from the same queues. Nothing is planned ahead, since nobody knows when a batch ends, and no
//! batch is rejected for starting late. A model whose times are constant is one whose distribution has one step.
//!
//! **With lanes** it is what `downbeat` is for dynamic models. A batch is padded to its longest request, so a short one
//! pays for a long one beside it. What that costs, and what a batch of its own would cost instead, is known with the
//! times of applications ([`crate::dynamic`]): those whose difference is worth more than a batch's fixed cost have
//! queues of their own, and distributions of what batches take there. Of lanes the one goes first whose earliest
//! deadline, and what its batch takes once more, is nearest: where something must be lost it is what takes long, as a
//! GPU serves several short ones meanwhile. A model whose requests are all alike has one lane, and is planned as
//! Orloj plans it. Lanes are decided anew as times are learned. What is said of applications here is said of classes
//! then: where requests choose their lengths, these tell their times, too.

mod hull;
mod queue;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_frontend::DropReason};
use queue::{Entry, ScoreClock, SizeQueue};

use crate::{
    dynamic::{BatchCost, BatchTimes, Class, DynamicTimes, KnownTimes},
    gpu_work::GpuWork,
    messages::NetworkBudget,
    planner::{Planner, PlannerOutput},
    task::{Batch, FAR, GpuMemory, LoadEnd, ModelConfig, Task},
    task_queue::Queued,
};

/// Exponents of scores count from an instant at most so far back (section 4.4: they overflow).
const BASE_MAX: f64 = 100.0;
/// After so many samples distributions, and with them all scores, are made anew.
const SAMPLES_A_TABLE: u64 = 64;

/// Orloj's b for a millisecond, with lanes (section 5.6: it hardly matters).
const LANES_RATE: f64 = 1e-4;
/// The weight of a batch in the mean of their sizes.
const BATCH_WEIGHT: f64 = 0.02;

/// The planner.
#[derive(Debug)]
pub(super) struct Orloj<P> {
    has_lanes: bool,
    clock: ScoreClock,
    budget: NetworkBudget,
    /// By model id.
    models: Vec<Option<Model<P>>>,
    gpus: BTreeMap<GpuId, Gpu>,
    decided_at: Timestamp,
    outputs: VecDeque<PlannerOutput<P>>,
}

#[derive(Debug)]
struct Gpu {
    models: BTreeSet<ModelId>,
    work: GpuWork,
}

#[derive(Debug)]
struct Model<P> {
    config: ModelConfig,
    budget: NetworkBudget,
    dynamic: Option<DynamicTimes>,
    has_lanes: bool,
    samples: u64,
    /// Mean size of its batches.
    batch_mean: f64,
    /// One, or several if there may be.
    lanes: Vec<Lane>,
    /// By key, until the task leaves.
    tasks: BTreeMap<u32, Waiting<P>>,
    next_key: u32,
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
struct Candidate {
    /// Of several the nearest goes first.
    rank: Timestamp,
    lane: usize,
    queue: usize,
}

#[derive(Debug)]
struct Waiting<P> {
    task: Task<P>,
    queued_at: Timestamp,
    lane: usize,
    /// Queues that it is in.
    queues: u32,
}

impl<P> Model<P> {
    fn new(config: ModelConfig, budget: NetworkBudget, has_lanes: bool) -> Self {
        let dynamic = config.dynamic.map(times(has_lanes));
        let (samples, batch_mean, lanes, tasks) = (0, 1.0, Vec::new(), BTreeMap::new());
        Self { config, budget, dynamic, has_lanes, samples, batch_mean, lanes, tasks, next_key: 0 }
    }

    /// Makes lanes, distributions and scores anew.
    fn rebuild(&mut self, now: Timestamp, clock: ScoreClock) {
        let profile = &self.config.profile;
        let max = profile.max_batch();
        let powers = std::iter::successors(Some(1), |size| Some(2 * size)).take_while(|&size| size < max);
        let sizes: Vec<usize> = powers.chain([max]).collect();
        let on_top = |size| self.budget.delay(size);
        if let Some(dynamic) = &mut self.dynamic {
            dynamic.settle();
        }
        let groups = match &self.dynamic {
            Some(dynamic) if self.has_lanes => dynamic.groups(self.batch_mean),
            Some(dynamic) => vec![dynamic.classes()],
            None => Vec::new(),
        };
        let lane = |classes: Vec<Class>| {
            let known = self.dynamic.as_ref().and_then(|dynamic| dynamic.batches(&classes, &sizes, on_top));
            let constant = |&size: &usize| BatchTimes::constant(profile.latency(size) + on_top(size));
            let times = known.unwrap_or_else(|| sizes.iter().map(constant).collect());
            Lane { classes, times, queues: sizes.iter().copied().map(SizeQueue::new).collect() }
        };
        // What nobody knows anything of goes with what is shortest.
        let groups = if groups.is_empty() { vec![Vec::new()] } else { groups };
        self.lanes = groups.into_iter().map(lane).collect();
        for (&key, waiting) in &mut self.tasks {
            let Task { deadline, application, length, .. } = waiting.task;
            let entry = Entry { key, deadline, class: class(self.dynamic.as_ref(), application, length) };
            (waiting.lane, waiting.queues) = insert(&mut self.lanes, now, entry, clock);
        }
    }

    fn on_sampled(&mut self, now: Timestamp, clock: ScoreClock) {
        self.samples += 1;
        if self.samples.is_multiple_of(SAMPLES_A_TABLE) {
            self.rebuild(now, clock);
        }
    }

    fn push(&mut self, now: Timestamp, task: Task<P>, clock: ScoreClock) {
        let key = self.next_key;
        self.next_key = self.next_key.wrapping_add(1);
        let class = class(self.dynamic.as_ref(), task.application, task.length);
        let entry = Entry { key, deadline: task.deadline, class };
        let (lane, queues) = insert(&mut self.lanes, now, entry, clock);
        self.tasks.insert(key, Waiting { task, queued_at: now, lane, queues });
    }

    fn remove(&mut self, key: u32) -> Option<Waiting<P>> {
        let waiting = self.tasks.remove(&key)?;
        self.lanes[waiting.lane].queues.iter_mut().for_each(|queue| queue.remove(key));
        Some(waiting)
    }

    /// Algorithm 1, lines 5 to 14: scores follow the time, and what is too late leaves. Yields who timed out.
    fn handle_timeout(&mut self, now: Timestamp, clock: ScoreClock) -> Vec<Waiting<P>> {
        let mut timed_out = Vec::new();
        let queues = self.lanes.iter_mut().flat_map(|lane| lane.queues.iter_mut().zip(&lane.times));
        for (queue, times) in queues {
            while let Some(key) = queue.pop_expired(now) {
                let waiting = self.tasks.get_mut(&key).expect("what is in a queue waits");
                waiting.queues -= 1;
                if waiting.queues == 0 {
                    timed_out.extend(self.tasks.remove(&key));
                }
            }
            queue.handle_timeout(now, times, clock);
        }
        timed_out
    }

    /// The batch to take: of each lane that of lines 15 to 19, of these the first.
    fn candidate(&self) -> Option<Candidate> {
        let of_lane = |(lane, Lane { queues, times, .. }): (usize, &Lane)| {
            let full = queues.iter().enumerate().filter(|(_, queue)| queue.len() >= queue.size());
            let ranked = full.filter_map(|(index, queue)| Some((queue.earliest_deadline()?, queue.size(), index)));
            let (deadline, _, queue) = ranked.max()?;
            let rank = if self.has_lanes { deadline + times[queue].mean } else { deadline };
            Some(Candidate { rank, lane, queue })
        };
        self.lanes.iter().enumerate().filter_map(of_lane).min()
    }

    fn pop_batch(
        &mut self,
        now: Timestamp,
        Candidate { lane, queue, .. }: Candidate,
        clock: ScoreClock,
    ) -> Vec<(Queued, P)> {
        let size = self.lanes[lane].queues[queue].size();
        let mut tasks = Vec::with_capacity(size);
        for _ in 0..size {
            let key = self.lanes[lane].queues[queue].top(now, clock).expect("the queue holds a batch");
            let Waiting { task, queued_at, .. } = self.remove(key).expect("what is in a queue waits");
            let Task { id, deadline, priority, application, length, payload } = task;
            tasks.push((Queued { id, deadline, queued_at, priority, application, length }, payload));
        }
        tasks.sort_by_key(|(key, _)| key.deadline);
        self.batch_mean += BATCH_WEIGHT * (size as f64 - self.batch_mean);
        tasks
    }
}

/// With lanes they are conditioned on lengths, which Orloj as published does not know.
fn times(has_lanes: bool) -> fn(BatchCost) -> DynamicTimes {
    if has_lanes { DynamicTimes::by_length } else { DynamicTimes::new }
}

fn class(dynamic: Option<&DynamicTimes>, application: u8, length: u32) -> Class {
    dynamic.map_or(Class::of(application), |dynamic| dynamic.class(application, length))
}

/// Into all queues of its lane: which that is, and how many they are.
fn insert(lanes: &mut [Lane], now: Timestamp, entry: Entry, clock: ScoreClock) -> (usize, u32) {
    let index = lanes.iter().position(|lane| lane.classes.contains(&entry.class)).unwrap_or(0);
    let Lane { queues, times, .. } = &mut lanes[index];
    for (queue, times) in queues.iter_mut().zip(times) {
        queue.insert(now, entry, times, clock);
    }
    (index, queues.len() as u32)
}

impl<P> Orloj<P> {
    /// As published. `rate` is b, for a millisecond: how likely a request that is not chosen now is chosen later.
    pub(super) fn new(budget: NetworkBudget, rate: f64) -> Self {
        Self {
            has_lanes: false,
            clock: ScoreClock { rate, base: Timestamp::ZERO },
            budget,
            models: Vec::new(),
            gpus: BTreeMap::new(),
            decided_at: Timestamp::PAST,
            outputs: VecDeque::new(),
        }
    }

    /// With lanes.
    pub(super) fn with_lanes(budget: NetworkBudget) -> Self {
        Self { has_lanes: true, ..Self::new(budget, LANES_RATE) }
    }

    fn model(&mut self, id: ModelId) -> Option<&mut Model<P>> {
        self.models.get_mut(id.0 as usize).and_then(Option::as_mut)
    }

    fn drop_task(&mut self, model: ModelId, task: Task<P>, reason: DropReason) {
        self.outputs.push_back(PlannerOutput::Dropped { model, task, reason });
    }

    /// Lines 2 to 4.
    fn reset_base(&mut self, now: Timestamp) {
        if (now - self.clock.base).as_millis_f64() * self.clock.rate > BASE_MAX {
            self.clock.base = now;
            let clock = self.clock;
            self.models.iter_mut().flatten().for_each(|model| model.rebuild(now, clock));
        }
    }

    /// Gives an idle GPU a batch; false if none is idle or none has one.
    fn give_work(&mut self, now: Timestamp) -> bool {
        let idle = self.gpus.iter().filter(|(_, gpu)| gpu.work.is_empty() && gpu.work.free_at() <= now);
        let candidate_of = |(&gpu, state): (&GpuId, &Gpu)| {
            let candidate = |&id: &ModelId| {
                let model = self.models.get(id.0 as usize).and_then(Option::as_ref)?;
                let candidate = model.candidate()?;
                Some((candidate.rank, id, candidate))
            };
            state.models.iter().filter_map(candidate).min().map(|(_, id, candidate)| (gpu, id, candidate))
        };
        let Some((gpu, id, candidate)) = idle.filter_map(candidate_of).next() else { return false };
        let clock = self.clock;
        let model = self.model(id).expect("it has a candidate");
        let tasks = model.pop_batch(now, candidate, clock);
        let mean = model.lanes[candidate.lane].times[candidate.queue].mean;
        let delay = model.budget.delay(tasks.len());
        let (exec_at, execution, latest) = (now + delay, mean - delay, Timestamp::NEVER);
        // Whoever runs it is idle, and when it ends nobody knows.
        let batch = Batch { model: id, gpu, due_at: Timestamp::PAST, timer_at: now, exec_at, latest, execution, tasks };
        self.outputs.push_back(PlannerOutput::Batch(batch));
        self.gpus.get_mut(&gpu).expect("it is idle").work.push(exec_at, execution);
        true
    }
}

impl<P: Send> Planner<P> for Orloj<P> {
    fn handle_model(&mut self, now: Timestamp, id: ModelId, config: ModelConfig) {
        let (budget, clock, has_lanes) = (config.budget.unwrap_or(self.budget), self.clock, self.has_lanes);
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, || None);
        }
        let model = self.models[id.0 as usize].get_or_insert_with(|| Model::new(config.clone(), budget, has_lanes));
        if model.config.dynamic != config.dynamic {
            match (&mut model.dynamic, config.dynamic) {
                // A backend has measured it anew; what requests took alone they took.
                (Some(dynamic), Some(cost)) => dynamic.handle_measured(cost),
                (dynamic, cost) => *dynamic = cost.map(times(has_lanes)),
            }
        }
        (model.config, model.budget) = (config, budget);
        model.rebuild(now, clock);
    }

    /// A request is in queues before its GPU is known, so all go by the slowest.
    fn handle_gpu_profile(&mut self, _id: ModelId, _gpu: GpuId, _profile: Option<LatencyProfile>) {}

    fn handle_alone(&mut self, now: Timestamp, id: ModelId, (application, length): (u8, u32), alone: Span) {
        let clock = self.clock;
        let Some(model) = self.model(id) else { return };
        let Some(dynamic) = &mut model.dynamic else { return };
        dynamic.handle_alone(application, length, alone);
        model.on_sampled(now, clock);
    }

    fn handle_executed(&mut self, now: Timestamp, id: ModelId, gpu: GpuId, tasks: &[(u8, u32)], took: Span) {
        let clock = self.clock;
        // Who has left is not kept in mind.
        if !self.gpus.contains_key(&gpu) {
            return;
        }
        let Some(model) = self.model(id) else { return };
        if model.dynamic.as_mut().is_some_and(|dynamic| dynamic.handle_batch(gpu, tasks, took)) {
            model.on_sampled(now, clock);
        }
    }

    fn wants_samples(&self) -> bool {
        true
    }

    fn tables_made(&self, id: ModelId) -> u64 {
        self.models.get(id.0 as usize).and_then(Option::as_ref).map_or(0, |model| model.samples / SAMPLES_A_TABLE)
    }

    fn request_times(&self, id: ModelId) -> Option<KnownTimes> {
        let model = self.models.get(id.0 as usize)?.as_ref()?;
        model.dynamic.as_ref().map(DynamicTimes::known_times)
    }

    fn handle_unhosted(&mut self, _now: Timestamp, id: ModelId) {
        let keys = self.model(id).map_or(Vec::new(), |model| model.tasks.keys().copied().collect());
        for key in keys {
            if let Some(waiting) = self.model(id).and_then(|model| model.remove(key)) {
                self.drop_task(id, waiting.task, DropReason::NoBackend);
            }
        }
    }

    fn handle_submit(&mut self, now: Timestamp, id: ModelId, mut task: Task<P>) {
        let clock = self.clock;
        task.deadline = task.deadline.min(now + FAR);
        match self.model(id) {
            None => self.drop_task(id, task, DropReason::NoBackend),
            Some(model) if model.tasks.len() >= model.config.queue_max => {
                self.drop_task(id, task, DropReason::QueueFull);
            }
            Some(model) => model.push(now, task, clock),
        }
    }

    fn handle_cancel(&mut self, _now: Timestamp, id: ModelId, task: TaskId) {
        let Some(model) = self.model(id) else { return };
        let key = model.tasks.iter().find(|(_, waiting)| waiting.task.id == task).map(|(&key, _)| key);
        if let Some(waiting) = key.and_then(|key| model.remove(key)) {
            self.drop_task(id, waiting.task, DropReason::Cancelled);
        }
    }

    fn handle_owner_left(&mut self, _now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool) {
        for model in self.models.iter_mut().flatten() {
            let owned = model.tasks.iter().filter(|(_, waiting)| is_owned(waiting.task.id));
            for key in owned.map(|(&key, _)| key).collect::<Vec<_>>() {
                model.remove(key);
            }
        }
    }

    /// What is not in memory at the start never is.
    fn handle_gpu_joined(
        &mut self,
        free_at: Timestamp,
        gpu: GpuId,
        mut models: Vec<ModelId>,
        memory: Option<GpuMemory>,
    ) {
        models.retain(|id| memory.as_ref().is_none_or(|memory| memory.resident.contains(id)));
        let member = Gpu { models: models.into_iter().collect(), work: GpuWork::new(free_at) };
        assert!(self.gpus.insert(gpu, member).is_none(), "{gpu:?} joined twice");
    }

    fn handle_gpu_left(&mut self, _now: Timestamp, gpu: GpuId) {
        self.gpus.remove(&gpu);
        let models = self.models.iter_mut().flatten();
        models.filter_map(|model| model.dynamic.as_mut()).for_each(|dynamic| dynamic.remove_gpu(gpu));
    }

    fn handle_finished(&mut self, gpu: GpuId, finished_at: Timestamp) {
        if let Some(gpu) = self.gpus.get_mut(&gpu) {
            gpu.work.handle_finished(finished_at);
        }
    }

    fn handle_loaded(&mut self, _now: Timestamp, _gpu: GpuId, _model: ModelId, _end: LoadEnd) {}

    fn handle_timeout(&mut self, now: Timestamp) {
        self.decided_at = now;
        self.reset_base(now);
        let clock = self.clock;
        for id in (0..self.models.len() as u32).map(ModelId) {
            let Some(model) = self.model(id).filter(|model| !model.tasks.is_empty()) else { continue };
            for waiting in model.handle_timeout(now, clock) {
                self.drop_task(id, waiting.task, DropReason::Deadline);
            }
        }
        while self.give_work(now) {}
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        let waits = || self.models.iter().flatten().filter(|model| !model.tasks.is_empty());
        // A request that is in no queue any more has left the first one last.
        let lanes = waits().flat_map(|model| &model.lanes);
        let expires = lanes.filter_map(|lane| lane.queues.first()?.first_expiry());
        // One that is idle and was offered all there is waits for more.
        let frees = self.gpus.values().filter(|gpu| gpu.work.is_empty()).map(|gpu| gpu.work.free_at());
        let frees = frees.filter(|&at| at > self.decided_at && waits().next().is_some());
        expires.chain(frees).min()
    }

    fn poll_output(&mut self) -> Option<PlannerOutput<P>> {
        self.outputs.pop_front()
    }

    fn queue_length(&self, id: ModelId) -> usize {
        self.models.get(id.0 as usize).and_then(Option::as_ref).map_or(0, |model| model.tasks.len())
    }
}

#[cfg(test)]
mod tests;
