//! Step 4, Step 5, Step 6 for policies that look at all queues whenever a GPU can take work: Clockwork and Shepherd.
//!
//! Each model has one queue; a task without an objective has a deadline that is far off there. A GPU is offered a batch
//! of every model that waits, and the [`Rule`] says which comes first. A waiting task leaves in a batch, or when even
//! alone it would be late on an idle GPU. Nothing is held back: work waits only for GPUs, so the cost of a decision is
//! O(M log Q) for M models that wait, and few do.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    ops::Bound,
};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_frontend::DropReason};

use super::paging::{Demand, Paging};
use crate::{
    gpu_work::GpuWork,
    indexed_heap::IndexedHeap,
    messages::NetworkBudget,
    model_times::{ModelTimes, Times},
    planner::{Planner, PlannerOutput},
    policy::{Gathered, View},
    residency::Decision,
    task::{Batch, FAR, GpuMemory, LoadEnd, ModelConfig, Task},
    task_queue::{Queued, TaskQueue},
};

/// Batches of one GPU that its backend has not reported on. A rule gives work ahead of time in small amounts; this
/// bounds what goes to a backend that does not report.
const UNREPORTED_PLANS_MAX: usize = 16;

/// What distinguishes the policies.
pub(super) trait Rule: fmt::Debug + Send {
    /// A GPU is given work when it will be free so soon.
    fn ahead(&self) -> Span;

    /// A model's batch for a GPU, of 0 tasks if none could be on time. Heads that it skips go on waiting.
    fn gather(&self, view: &View<'_>) -> Gathered;

    /// Of the models' batches, the one with the smallest rank goes first.
    fn rank(&self, view: &View<'_>, batch: Gathered) -> i64;

    /// A running batch is killed for one that is so many times as large, if ever.
    fn preemption_factor(&self) -> Option<usize> {
        None
    }
}

/// A planner with a queue for each model.
#[derive(Debug)]
pub(super) struct Central<P, R> {
    rule: R,
    budget: NetworkBudget,
    /// By model id.
    models: Vec<Option<Model<P>>>,
    /// Models whose queue is not empty.
    waiting: BTreeSet<ModelId>,
    /// By model id: when its head can no longer be met.
    expiries: IndexedHeap,
    gpus: BTreeMap<GpuId, Gpu>,
    /// All GPUs by when they are free.
    by_free_at: BTreeSet<(Timestamp, GpuId)>,
    /// GPUs with one unreported batch, by its size.
    by_size: BTreeSet<(usize, GpuId)>,
    paging: Paging,
    decided_at: Timestamp,
    outputs: VecDeque<PlannerOutput<P>>,
}

#[derive(Debug)]
struct Model<P> {
    times: ModelTimes,
    queue: TaskQueue<P>,
}

impl<P> Model<P> {
    fn view<'a>(&'a self, now: Timestamp, free_at: Timestamp, times: &'a Times) -> View<'a> {
        let Times { profile, lead_times } = times;
        View {
            now,
            free_at,
            queue: self.queue.keys(),
            profile,
            lead_times,
            jitter: Span::ZERO,
            price: crate::Price::default(),
        }
    }
}

#[derive(Debug)]
struct Gpu {
    /// Those that it can run now.
    models: BTreeSet<ModelId>,
    work: GpuWork,
    /// The models of the batches in `work`.
    batches: VecDeque<ModelId>,
    /// Of the newest batch.
    size: usize,
}

impl<P, R: Rule> Central<P, R> {
    pub(super) fn new(budget: NetworkBudget, rule: R) -> Self {
        Self {
            rule,
            budget,
            models: Vec::new(),
            waiting: BTreeSet::new(),
            expiries: IndexedHeap::default(),
            gpus: BTreeMap::new(),
            by_free_at: BTreeSet::new(),
            by_size: BTreeSet::new(),
            paging: Paging::default(),
            decided_at: Timestamp::PAST,
            outputs: VecDeque::new(),
        }
    }

    fn model(&mut self, id: ModelId) -> Option<&mut Model<P>> {
        self.models.get_mut(id.0 as usize).and_then(Option::as_mut)
    }

    fn drop_task(&mut self, model: ModelId, (key, payload): (Queued, P), reason: DropReason) {
        self.outputs.push_back(PlannerOutput::Dropped { model, task: key.with(payload), reason });
    }

    /// The model's queue changed.
    fn on_queue_changed(&mut self, id: ModelId) {
        let model = self.models[id.0 as usize].as_ref().expect("callers hold a model");
        match model.queue.keys().front() {
            Some(head) => {
                self.expiries.set(id.0, head.deadline - model.times.common().lead_times[0] + Span(1));
                self.waiting.insert(id);
            }
            None => {
                self.expiries.remove(id.0);
                self.waiting.remove(&id);
            }
        }
    }

    fn change_gpu(&mut self, id: GpuId, change: impl FnOnce(&mut Gpu)) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        self.by_free_at.remove(&(gpu.work.free_at(), id));
        self.by_size.remove(&(gpu.size, id));
        change(gpu);
        self.by_free_at.insert((gpu.work.free_at(), id));
        if gpu.work.len() == 1 {
            self.by_size.insert((gpu.size, id));
        }
    }

    fn expire(&mut self, now: Timestamp) {
        while let Some((at, id)) = self.expiries.peek()
            && at <= now
        {
            self.expire_head(ModelId(id));
        }
        if !self.paging.is_idle() {
            self.expire_cold(now);
        }
    }

    fn expire_head(&mut self, id: ModelId) {
        let is_cold = self.paging.is_cold(id);
        let task = self.model(id).and_then(|model| model.queue.pop()).expect("only queues with a head expire");
        self.drop_task(id, task, if is_cold { DropReason::ColdStart } else { DropReason::Deadline });
        self.on_queue_changed(id);
    }

    /// What no load can serve in time, whatever else is done.
    fn expire_cold(&mut self, now: Timestamp) {
        for id in self.waiting.clone() {
            let Some(loaded_at) = self.paging.loadable_at(now, id) else { continue };
            let is_late = |model: &Model<P>| {
                let soonest_end = loaded_at + model.times.common().profile.latency(1);
                model.queue.keys().front().is_some_and(|head| head.deadline < soonest_end)
            };
            while self.model(id).is_some_and(|model| is_late(model)) {
                self.expire_head(id);
            }
        }
    }

    /// The best batch for a GPU that is free at `free_at`.
    fn choose(&self, now: Timestamp, gpu: GpuId, free_at: Timestamp) -> Option<(ModelId, Gathered)> {
        let offer = |&id: &ModelId| {
            let model = self.models[id.0 as usize].as_ref().expect("it waits");
            let view = model.view(now, free_at, model.times.of(gpu));
            let batch = self.rule.gather(&view);
            (batch.size > 0).then(|| (self.rule.rank(&view, batch), id, batch))
        };
        let hosted = self.waiting.iter().filter(|id| self.gpus[&gpu].models.contains(id));
        hosted.filter_map(offer).min_by_key(|&(rank, id, _)| (rank, id)).map(|(_, id, batch)| (id, batch))
    }

    /// Gives work to the GPU that frees first of those that can take some; false if none can.
    fn give_work(&mut self, now: Timestamp) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let soon = self.by_free_at.range(..=(now + self.rule.ahead(), GpuId(u32::MAX)));
        let found = soon
            .filter(|(_, id)| self.gpus[id].work.len() < UNREPORTED_PLANS_MAX)
            .find_map(|&(free_at, id)| self.choose(now, id, free_at).map(|(model, batch)| (id, free_at, model, batch)));
        let Some((gpu, free_at, model, batch)) = found else { return false };
        self.plan(now, gpu, free_at, model, batch);
        true
    }

    /// Kills the smallest running batch that a large enough one would replace; false if there is none.
    fn preempt(&mut self, now: Timestamp) -> bool {
        let Some(factor) = self.rule.preemption_factor() else { return false };
        if self.waiting.is_empty() {
            return false;
        }
        // Of what waits, on the slowest GPU; mostly that is too small for all, and none is looked at. What only a
        // faster one could run at that size kills nothing.
        let size_of = |id: &ModelId| {
            let model = self.models[id.0 as usize].as_ref().expect("it waits");
            self.rule.gather(&model.view(now, now, model.times.common())).size
        };
        let largest = self.waiting.iter().map(size_of).max().unwrap_or(0);
        let mut small = self.by_size.iter().take_while(|&&(size, _)| factor * size <= largest);
        let found = small.find_map(|&(size, id)| {
            let is_busy = self.gpus[&id].work.free_at() > now;
            let (model, batch) = self.choose(now, id, now).filter(|_| is_busy)?;
            (batch.size >= factor * size).then_some((id, model, batch))
        });
        let Some((id, model, batch)) = found else { return false };
        self.change_gpu(id, |gpu| gpu.work.handle_preempted(now));
        self.outputs.push_back(PlannerOutput::Preempt(id));
        self.plan(now, id, now, model, batch);
        true
    }

    fn plan(&mut self, now: Timestamp, gpu: GpuId, free_at: Timestamp, id: ModelId, batch: Gathered) {
        let model = self.models[id.0 as usize].as_mut().expect("callers chose it");
        let view = model.view(now, free_at, model.times.of(gpu));
        let (exec_at, execution) = (view.earliest_start(batch.size), view.profile.latency(batch.size));
        let tasks = model.queue.take(batch.skip..batch.skip + batch.size);
        // Clockwork, section 4.4: what cannot start in time is rejected rather than late.
        let latest = tasks[0].0.deadline - execution;
        self.outputs.push_back(PlannerOutput::Batch(Batch {
            model: id,
            gpu,
            // Nothing is held back.
            due_at: Timestamp::PAST,
            timer_at: now,
            exec_at,
            latest,
            execution,
            tasks,
        }));
        self.on_queue_changed(id);
        self.change_gpu(gpu, |gpu| {
            gpu.work.push(exec_at, execution);
            gpu.batches.push_back(id);
            gpu.size = batch.size;
        });
        self.paging.handle_planned(now, gpu, id);
    }

    /// What waits for each model, as far as weights go.
    fn demands(&self, now: Timestamp) -> Vec<Demand> {
        let demand = |&id: &ModelId| {
            let Model { times, queue } = self.models[id.0 as usize].as_ref().expect("it waits");
            let keys = queue.keys();
            let one = times.common().lead_times[0];
            let ready_at = self.paging.loadable_at(now, id).unwrap_or(now);
            let late = keys.partition_point(|key| ready_at + one > key.deadline);
            let execution = |tasks: usize| {
                let batch = tasks.clamp(1, times.common().profile.max_batch());
                times.common().profile.latency(batch) * tasks as i64 / batch as i64
            };
            Demand {
                model: id,
                all: execution(keys.len()),
                loadable: execution(keys.len() - late),
                deadline: keys.get(late).map_or(Timestamp::NEVER, |key| key.deadline),
            }
        };
        self.waiting.iter().map(demand).collect()
    }

    /// Gives links work.
    fn decide_loads(&mut self, now: Timestamp) {
        if self.waiting.is_empty() || !self.paging.is_open(now) {
            return;
        }
        let demands = self.demands(now);
        for decision in self.paging.decide(now, &demands) {
            match decision {
                Decision::Unload(gpu, model) => {
                    self.gpus.get_mut(&gpu).expect("its memory is here").models.remove(&model);
                    self.outputs.push_back(PlannerOutput::Unload { gpu, model });
                }
                Decision::Load { gpu, model, earliest, latest, takes } => {
                    self.outputs.push_back(PlannerOutput::Load { gpu, model, earliest, latest, takes });
                }
            }
        }
    }
}

impl<P: Send, R: Rule> Planner<P> for Central<P, R> {
    fn handle_model(&mut self, _now: Timestamp, id: ModelId, config: ModelConfig) {
        let budget = config.budget.unwrap_or(self.budget);
        self.paging.handle_weights(id, config.weights);
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, || None);
        }
        match &mut self.models[id.0 as usize] {
            Some(model) => model.times.set_common(config.profile, budget),
            absent => {
                let times = ModelTimes::new(config.profile, budget);
                *absent = Some(Model { times, queue: TaskQueue::new(config.queue_max) });
            }
        }
        self.on_queue_changed(id);
    }

    /// A GPU is offered what fits there; heads wait only as long as any GPU could serve them.
    fn handle_gpu_profile(&mut self, id: ModelId, gpu: GpuId, profile: Option<LatencyProfile>) {
        if let Some(model) = self.model(id) {
            model.times.set_own(gpu, profile);
        }
    }

    fn handle_unhosted(&mut self, _now: Timestamp, id: ModelId) {
        while let Some(task) = self.model(id).and_then(|model| model.queue.pop()) {
            self.drop_task(id, task, DropReason::NoBackend);
            self.on_queue_changed(id);
        }
    }

    fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>) {
        let deadline = task.deadline.min(now + FAR);
        let Task { id: task_id, priority, application, length, .. } = task;
        let key = Queued { id: task_id, deadline, queued_at: now, priority, application, length };
        let Some(model) = self.model(id) else {
            return self.drop_task(id, (key, task.payload), DropReason::NoBackend);
        };
        match model.queue.push(key, task.payload) {
            Ok(()) => self.on_queue_changed(id),
            Err(payload) => self.drop_task(id, (key, payload), DropReason::QueueFull),
        }
    }

    fn handle_cancel(&mut self, _now: Timestamp, id: ModelId, task: TaskId) {
        if let Some(task) = self.model(id).and_then(|model| model.queue.remove(task)) {
            self.drop_task(id, task, DropReason::Cancelled);
            self.on_queue_changed(id);
        }
    }

    fn handle_owner_left(&mut self, _now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool) {
        for id in self.waiting.clone() {
            self.model(id).expect("it waits").queue.retain(|key| !is_owned(key.id));
            self.on_queue_changed(id);
        }
    }

    fn handle_gpu_joined(&mut self, free_at: Timestamp, gpu: GpuId, models: Vec<ModelId>, memory: Option<GpuMemory>) {
        let models = match memory {
            Some(memory) => self.paging.handle_gpu_joined(free_at, gpu, models, &memory),
            None => models,
        };
        let (models, batches) = (models.into_iter().collect(), VecDeque::new());
        let member = Gpu { models, work: GpuWork::new(free_at), batches, size: 0 };
        assert!(self.gpus.insert(gpu, member).is_none(), "{gpu:?} joined twice");
        self.by_free_at.insert((free_at, gpu));
    }

    fn handle_gpu_left(&mut self, _now: Timestamp, id: GpuId) {
        for model in self.models.iter_mut().flatten() {
            model.times.set_own(id, None);
        }
        self.paging.handle_gpu_left(id);
        if let Some(gpu) = self.gpus.remove(&id) {
            self.by_free_at.remove(&(gpu.work.free_at(), id));
            self.by_size.remove(&(gpu.size, id));
        }
    }

    fn handle_finished(&mut self, gpu: GpuId, finished_at: Timestamp) {
        let mut model = None;
        self.change_gpu(gpu, |gpu| {
            gpu.work.handle_finished(finished_at);
            model = gpu.batches.pop_front();
        });
        if let Some(model) = model {
            self.paging.handle_batch_ended(gpu, model);
        }
    }

    fn handle_host_memory(&mut self, gpu: GpuId, model: ModelId, is_there: bool) {
        self.paging.handle_host_memory(gpu, model, is_there);
    }

    fn handle_loaded(&mut self, _now: Timestamp, gpu: GpuId, model: ModelId, end: LoadEnd) {
        if self.paging.handle_loaded(gpu, model, end) {
            self.gpus.get_mut(&gpu).expect("its memory is here").models.insert(model);
        }
    }

    fn handle_timeout(&mut self, now: Timestamp) {
        self.decided_at = now;
        self.expire(now);
        while self.give_work(now) || self.preempt(now) {}
        self.decide_loads(now);
    }

    /// GPUs that could take work at the last decision were offered all there is.
    fn poll_timeout(&self) -> Option<Timestamp> {
        let ahead = self.rule.ahead();
        let offered = Bound::Excluded((self.decided_at + ahead, GpuId(u32::MAX)));
        let frees = self.by_free_at.range((offered, Bound::Unbounded)).next().filter(|_| !self.waiting.is_empty());
        let expires = self.expiries.peek().map(|(at, _)| at);
        let links = self.paging.poll_timeout(self.decided_at).filter(|_| !self.waiting.is_empty());
        frees.map(|&(free_at, _)| free_at - ahead).into_iter().chain(expires).chain(links).min()
    }

    fn poll_output(&mut self) -> Option<PlannerOutput<P>> {
        self.outputs.pop_front()
    }

    fn is_cold(&self, id: ModelId) -> bool {
        self.paging.is_cold(id)
    }

    fn queue_length(&self, id: ModelId) -> usize {
        self.models.get(id.0 as usize).and_then(Option::as_ref).map_or(0, |model| model.queue.keys().len())
    }
}
