//! Step 4, Step 5, Step 6 for policies without a central queue: Nexus and Clipper.
//!
//! Each model has replicas on some GPUs, each
//! with a queue of its own; a task is routed to one of them when it arrives, and GPUs serve their replicas in turn.
//!
//! A task without an objective is one whose deadline is far off.
//!
//! Where replicas are, how tasks are shared out among them and what forms a batch is the [`Rule`]'s. When the rule
//! draws up a new plan, waiting tasks are routed again; what GPUs were given stays.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    ops::Bound,
};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_frontend::DropReason};

use crate::{
    gpu_work::GpuWork,
    messages::NetworkBudget,
    model_times::{ModelTimes, Times},
    planner::{Planner, PlannerOutput},
    policy::{Gathered, View},
    task::{Batch, FAR, GpuMemory, LoadEnd, ModelConfig, Task},
    task_queue::{Queued, TaskQueue},
};

/// Batches of one GPU that its backend has not reported on: one runs and the inputs of the next are fetched.
const UNREPORTED_PLANS_MAX: usize = 2;

/// A replica of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Placement {
    pub gpu: GpuId,
    pub model: ModelId,
    /// The largest batch; what the replica had, or 1, if `None`.
    pub batch_max: Option<f64>,
    /// The part of its model's tasks that it gets, relative to other replicas.
    pub weight: f64,
}

/// What became of a replica's batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    /// No task more was allowed in it.
    pub was_full: bool,
    /// From when the replica could have started it to its end.
    pub latency: Span,
    /// The time that its first task was given.
    pub objective: Span,
}

/// What distinguishes the policies.
pub(super) trait Rule: fmt::Debug + Send {
    /// A task arrived that has so much time.
    fn handle_arrival(&mut self, _now: Timestamp, _model: ModelId, _objective: Span) {}

    /// When to draw up a new plan, if not only when GPUs come or go.
    fn poll_timeout(&self) -> Option<Timestamp> {
        None
    }

    /// Where replicas are to be. `profiles` is by model id, `hosts` what each GPU holds.
    fn plan(
        &mut self,
        now: Timestamp,
        profiles: &[Option<LatencyProfile>],
        hosts: &BTreeMap<GpuId, BTreeSet<ModelId>>,
    ) -> Vec<Placement>;

    /// A replica's next batch. Heads that it skips are dropped; of 0 tasks it must skip all.
    fn gather(&self, view: &View<'_>, batch_max: usize) -> Gathered;

    /// When a batch must have started.
    fn latest(&self, view: &View<'_>, batch: Gathered) -> Timestamp;

    /// The replica's largest batch from now on.
    fn learn(&self, batch_max: f64, _outcome: Outcome) -> f64 {
        batch_max
    }
}

/// A planner with a queue for each replica.
#[derive(Debug)]
pub(super) struct Replicas<P, R> {
    rule: R,
    budget: NetworkBudget,
    /// By model id.
    models: Vec<Option<Model>>,
    gpus: BTreeMap<GpuId, Gpu<P>>,
    /// By when a GPU can be given work, of those with tasks that wait.
    timers: BTreeSet<(Timestamp, GpuId)>,
    /// Models or GPUs came or went since the last plan.
    is_stale: bool,
    outputs: VecDeque<PlannerOutput<P>>,
}

#[derive(Debug)]
struct Model {
    times: ModelTimes,
    queue_max: usize,
    /// In all its replicas.
    queued: usize,
    routes: Vec<Route>,
}

#[derive(Debug)]
struct Route {
    gpu: GpuId,
    weight: f64,
    /// What it has been short of its share so far.
    credit: f64,
}

impl Model {
    /// The replica that is most short of its share, so that shares are kept with every few tasks.
    fn route(&mut self) -> Option<GpuId> {
        let sum: f64 = self.routes.iter().map(|route| route.weight).sum();
        for route in &mut self.routes {
            route.credit += route.weight;
        }
        let next =
            self.routes.iter_mut().reduce(|best, other| if other.credit > best.credit { other } else { best })?;
        next.credit -= sum;
        Some(next.gpu)
    }
}

#[derive(Debug)]
struct Gpu<P> {
    models: BTreeSet<ModelId>,
    work: GpuWork,
    /// Of the batches in `work`.
    sent: VecDeque<Sent>,
    replicas: BTreeMap<ModelId, Replica<P>>,
    /// Models whose replica's queue is not empty.
    waiting: BTreeSet<ModelId>,
    /// Whose turn it was last.
    turn: ModelId,
    timer: Option<Timestamp>,
}

#[derive(Debug)]
struct Replica<P> {
    queue: TaskQueue<P>,
    batch_max: f64,
    idle_since: Timestamp,
}

#[derive(Debug)]
struct Sent {
    model: ModelId,
    ready_at: Timestamp,
    was_full: bool,
    objective: Span,
}

impl<P, R: Rule> Replicas<P, R> {
    pub(super) fn new(budget: NetworkBudget, rule: R) -> Self {
        Self {
            rule,
            budget,
            models: Vec::new(),
            gpus: BTreeMap::new(),
            timers: BTreeSet::new(),
            is_stale: false,
            outputs: VecDeque::new(),
        }
    }

    fn drop_task(&mut self, model: ModelId, (key, payload): (Queued, P), reason: DropReason) {
        self.outputs.push_back(PlannerOutput::Dropped { model, task: key.with(payload), reason });
    }

    /// Puts a task into a replica's queue.
    fn enqueue(&mut self, id: ModelId, key: Queued, payload: P) {
        let model = self.models[id.0 as usize].as_mut().expect("callers looked it up");
        if model.queued >= model.queue_max {
            return self.drop_task(id, (key, payload), DropReason::QueueFull);
        }
        let Some(gpu_id) = model.route() else {
            return self.drop_task(id, (key, payload), DropReason::NoBackend);
        };
        model.queued += 1;
        let gpu = self.gpus.get_mut(&gpu_id).expect("routes lead to GPUs that are here");
        let queue = &mut gpu.replicas.get_mut(&id).expect("routes lead to replicas").queue;
        assert!(queue.push(key, payload).is_ok(), "its model's bound is checked above");
        if gpu.waiting.insert(id) {
            self.set_timer(gpu_id);
        }
    }

    /// Takes all waiting tasks out, in the order of models and deadlines.
    fn drain(&mut self) -> Vec<(ModelId, Queued, P)> {
        let mut tasks = Vec::new();
        for gpu in self.gpus.values_mut() {
            for id in std::mem::take(&mut gpu.waiting) {
                let queue = &mut gpu.replicas.get_mut(&id).expect("it waits").queue;
                let all = queue.take(0..queue.keys().len());
                self.models[id.0 as usize].as_mut().expect("it has replicas").queued -= all.len();
                tasks.extend(all.into_iter().map(|(key, payload)| (id, key, payload)));
            }
        }
        tasks.sort_by_key(|&(id, key, _)| (id, key.deadline, key.id.0));
        tasks
    }

    fn update_plan(&mut self, now: Timestamp) {
        if !self.is_stale && self.rule.poll_timeout().is_none_or(|at| at > now) {
            return;
        }
        self.is_stale = false;
        let profiles: Vec<_> =
            self.models.iter().map(|model| model.as_ref().map(|model| model.times.common().profile.clone())).collect();
        let hosts = self.gpus.iter().map(|(&id, gpu)| (id, gpu.models.clone())).collect();
        let placements = self.rule.plan(now, &profiles, &hosts);
        let waiting = self.drain();
        for model in self.models.iter_mut().flatten() {
            model.routes.clear();
        }
        for Placement { gpu: gpu_id, model: id, batch_max, weight } in placements {
            let model = self.models[id.0 as usize].as_mut().expect("only known models are placed");
            model.routes.push(Route { gpu: gpu_id, weight, credit: 0.0 });
            let gpu = self.gpus.get_mut(&gpu_id).expect("models are placed on GPUs that are here");
            let replica = gpu.replicas.entry(id).or_insert_with(|| Replica {
                queue: TaskQueue::new(model.queue_max),
                batch_max: 1.0,
                idle_since: now,
            });
            replica.batch_max = batch_max.unwrap_or(replica.batch_max);
        }
        for (id, key, payload) in waiting {
            self.enqueue(id, key, payload);
        }
        for gpu in self.gpus.keys().copied().collect::<Vec<_>>() {
            self.set_timer(gpu);
        }
    }

    fn set_timer(&mut self, id: GpuId) {
        let gpu = self.gpus.get_mut(&id).expect("callers hold a GPU");
        let heads = gpu.waiting.iter().filter_map(|model| gpu.replicas[model].queue.keys().front());
        let at = if gpu.waiting.is_empty() {
            None
        } else if gpu.work.len() < UNREPORTED_PLANS_MAX {
            Some(gpu.work.free_at() - self.budget.delay(1))
        } else {
            // Until the backend reports, tasks can only expire.
            heads.map(|head| head.deadline + Span(1)).min()
        };
        if let Some(old) = std::mem::replace(&mut gpu.timer, at) {
            self.timers.remove(&(old, id));
        }
        self.timers.extend(at.map(|at| (at, id)));
    }

    /// Gives a GPU the next batch, or drops what has expired while it cannot take one.
    fn serve(&mut self, now: Timestamp, id: GpuId) {
        let gpu = self.gpus.get_mut(&id).expect("only GPUs that are here have timers");
        if gpu.work.len() >= UNREPORTED_PLANS_MAX {
            return self.expire(now, id);
        }
        let after = gpu.waiting.range((Bound::Excluded(gpu.turn), Bound::Unbounded)).next();
        let Some(&model_id) = after.or_else(|| gpu.waiting.first()) else { return self.set_timer(id) };
        gpu.turn = model_id;
        let model = self.models[model_id.0 as usize].as_mut().expect("it has a replica");
        let replica = gpu.replicas.get_mut(&model_id).expect("it waits");
        let Times { profile, lead_times } = model.times.of(id);
        let free_at = gpu.work.free_at();
        let view = View {
            now,
            free_at,
            queue: replica.queue.keys(),
            profile,
            lead_times,
            jitter: Span::ZERO,
            price: crate::Price::default(),
        };
        let batch_max = (replica.batch_max as usize).clamp(1, profile.max_batch());
        let batch = self.rule.gather(&view, batch_max);
        let plan = (batch.size > 0).then(|| {
            let head = view.queue[batch.skip];
            let sent = Sent {
                model: model_id,
                ready_at: head.queued_at.max(replica.idle_since),
                was_full: batch.size == batch_max,
                objective: head.deadline - head.queued_at,
            };
            (view.earliest_start(batch.size), self.rule.latest(&view, batch), profile.latency(batch.size), sent)
        });
        let skipped = replica.queue.take(0..batch.skip);
        let tasks = replica.queue.take(0..batch.size);
        model.queued -= batch.skip + batch.size;
        if replica.queue.keys().is_empty() {
            gpu.waiting.remove(&model_id);
        }
        if let Some((exec_at, latest, execution, sent)) = plan {
            gpu.work.push(exec_at, execution);
            gpu.sent.push_back(sent);
            self.outputs.push_back(PlannerOutput::Batch(Batch {
                model: model_id,
                gpu: id,
                // Nothing is held back.
                due_at: Timestamp::PAST,
                timer_at: now,
                exec_at,
                latest,
                execution,
                tasks,
            }));
        }
        for task in skipped {
            self.drop_task(model_id, task, DropReason::Deadline);
        }
        self.set_timer(id);
    }

    fn expire(&mut self, now: Timestamp, id: GpuId) {
        let gpu = self.gpus.get_mut(&id).expect("callers hold a GPU");
        let mut expired = Vec::new();
        for model in gpu.waiting.clone() {
            let queue = &mut gpu.replicas.get_mut(&model).expect("it waits").queue;
            let count = queue.keys().partition_point(|key| key.deadline < now);
            expired.extend(queue.take(0..count).into_iter().map(|task| (model, task)));
            self.models[model.0 as usize].as_mut().expect("it has a replica").queued -= count;
            if queue.keys().is_empty() {
                gpu.waiting.remove(&model);
            }
        }
        for (model, task) in expired {
            self.drop_task(model, task, DropReason::Deadline);
        }
        self.set_timer(id);
    }

    /// Keeps only the waiting tasks of `model` that `keep` wants; yields the others.
    fn remove_tasks(&mut self, keep: &dyn Fn(ModelId, TaskId) -> bool) -> Vec<(ModelId, Queued, P)> {
        let (kept, removed): (Vec<_>, Vec<_>) = self.drain().into_iter().partition(|(id, key, _)| keep(*id, key.id));
        for (id, key, payload) in kept {
            self.enqueue(id, key, payload);
        }
        for gpu in self.gpus.keys().copied().collect::<Vec<_>>() {
            self.set_timer(gpu);
        }
        removed
    }
}

impl<P: Send, R: Rule> Planner<P> for Replicas<P, R> {
    fn handle_model(&mut self, _now: Timestamp, id: ModelId, config: ModelConfig) {
        let budget = config.budget.unwrap_or(self.budget);
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, || None);
        }
        match &mut self.models[id.0 as usize] {
            Some(model) => {
                model.times.set_common(config.profile, budget);
                model.queue_max = config.queue_max;
            }
            absent => {
                let (times, queue_max) = (ModelTimes::new(config.profile, budget), config.queue_max);
                *absent = Some(Model { times, queue_max, queued: 0, routes: Vec::new() });
            }
        }
        self.is_stale = true;
    }

    /// The plan goes by what fits every GPU; each batch by what fits its own.
    fn handle_gpu_profile(&mut self, id: ModelId, gpu: GpuId, profile: Option<LatencyProfile>) {
        if let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) {
            model.times.set_own(gpu, profile);
        }
    }

    fn handle_unhosted(&mut self, _now: Timestamp, id: ModelId) {
        for (model, key, payload) in self.remove_tasks(&|model, _| model != id) {
            self.drop_task(model, (key, payload), DropReason::NoBackend);
        }
    }

    fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>) {
        let deadline = task.deadline.min(now + FAR);
        let Task { id: task_id, priority, application, length, .. } = task;
        let key = Queued { id: task_id, deadline, queued_at: now, priority, application, length };
        if self.models.get(id.0 as usize).is_none_or(Option::is_none) {
            return self.drop_task(id, (key, task.payload), DropReason::NoBackend);
        }
        self.update_plan(now);
        self.rule.handle_arrival(now, id, deadline - now);
        self.enqueue(id, key, task.payload);
    }

    /// A scan of everything, as each of the following: hang-ups are rare.
    fn handle_cancel(&mut self, _now: Timestamp, id: ModelId, task: TaskId) {
        for (model, key, payload) in self.remove_tasks(&|model, other| (model, other) != (id, task)) {
            self.drop_task(model, (key, payload), DropReason::Cancelled);
        }
    }

    fn handle_owner_left(&mut self, _now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool) {
        self.remove_tasks(&|_, task| !is_owned(task));
    }

    /// A queue for each replica, for good: what is not in memory at the start never is.
    fn handle_gpu_joined(
        &mut self,
        free_at: Timestamp,
        gpu: GpuId,
        mut models: Vec<ModelId>,
        memory: Option<GpuMemory>,
    ) {
        models.retain(|id| memory.as_ref().is_none_or(|memory| memory.resident.contains(id)));
        let member = Gpu {
            models: models.into_iter().collect(),
            work: GpuWork::new(free_at),
            sent: VecDeque::new(),
            replicas: BTreeMap::new(),
            waiting: BTreeSet::new(),
            turn: ModelId(0),
            timer: None,
        };
        assert!(self.gpus.insert(gpu, member).is_none(), "{gpu:?} joined twice");
        self.is_stale = true;
    }

    fn handle_gpu_left(&mut self, now: Timestamp, id: GpuId) {
        // Its tasks are routed anew by the plan that does without it.
        let waiting = self.drain();
        for model in self.models.iter_mut().flatten() {
            model.times.set_own(id, None);
        }
        let Some(gpu) = self.gpus.remove(&id) else { return };
        if let Some(at) = gpu.timer {
            self.timers.remove(&(at, id));
        }
        self.is_stale = true;
        self.update_plan(now);
        for (model, key, payload) in waiting {
            self.enqueue(model, key, payload);
        }
    }

    fn handle_finished(&mut self, id: GpuId, finished_at: Timestamp) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.work.handle_finished(finished_at);
        if let Some(sent) = gpu.sent.pop_front()
            && let Some(replica) = gpu.replicas.get_mut(&sent.model)
        {
            replica.idle_since = finished_at;
            let latency = finished_at - sent.ready_at;
            let outcome = Outcome { was_full: sent.was_full, latency, objective: sent.objective };
            replica.batch_max = self.rule.learn(replica.batch_max, outcome);
        }
        self.set_timer(id);
    }

    fn handle_loaded(&mut self, _now: Timestamp, _gpu: GpuId, _model: ModelId, _end: LoadEnd) {}

    fn handle_timeout(&mut self, now: Timestamp) {
        self.update_plan(now);
        while let Some(&(at, gpu)) = self.timers.first()
            && at <= now
        {
            self.serve(now, gpu);
        }
    }

    /// A new plan is of use only to tasks: it waits for one.
    fn poll_timeout(&self) -> Option<Timestamp> {
        self.timers.first().map(|&(at, _)| at)
    }

    fn poll_output(&mut self) -> Option<PlannerOutput<P>> {
        self.outputs.pop_front()
    }

    fn queue_length(&self, id: ModelId) -> usize {
        self.models.get(id.0 as usize).and_then(Option::as_ref).map_or(0, |model| model.queued)
    }
}
