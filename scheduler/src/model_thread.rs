//! Step 4, Step 6.
//! A ModelThread owns many models; for each it keeps the queue and the candidate batch, and makes the
//! batch final when a GPU is granted (Symphony, section 4.2 and Figure 18).
//!
//! A task enters by `handle_submit` and leaves exactly once: in a [`Batch`], or dropped with a reason. The candidate
//! is drawn up anew whenever the queue changes, and when it has become too large for the time that is left. Nothing
//! here knows of other models or of GPUs; that is the RankThread's.
//!
//! Under `downbeat` a dynamic model has lanes instead of a queue and windows (`model_thread/dynamic.rs`).

use std::collections::VecDeque;

use proto::{
    GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_frontend::DropReason,
    scheduler_to_scheduler::LearnedAverages,
};

use crate::{
    dynamic::DynamicTimes,
    indexed_heap::IndexedHeap,
    messages::{Background, Candidate, GpuUpdate, Grant, NetworkBudget, Price, Traffic, Whereabouts},
    model_times::{ModelTimes, Times},
    policy::{BatchPolicy, Gathered, Granted, Policy, View},
    priorities,
    task::{Batch, ModelConfig, Task},
    task_queue::{Queued, TaskQueue},
};

mod background;
mod dynamic;

use background::{Usual, Waiting};
use dynamic::Dynamic;

/// A batch that is held back is looked at again after so long at the soonest: prices are as old.
const LOOK_AGAIN: Span = Span::from_millis(20);

/// What a ModelThread wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output<P> {
    /// To the RankThread: the model's candidate is now this one. Several changes between two polls are one output.
    Candidate(ModelId, Option<Candidate>),
    /// The same of tasks that have no objective.
    Background(ModelId, Option<Background>),
    /// To the RankThread: the answer to a grant.
    Gpu(GpuId, GpuUpdate),
    /// To the backend.
    Batch(Batch<P>),
    /// To the task's frontend: it ended without having run.
    Dropped {
        /// The model.
        model: ModelId,
        /// The task.
        task: Task<P>,
        /// Why.
        reason: DropReason,
    },
}

/// A shard of models. `P` is the tasks' payload.
#[derive(Debug)]
pub struct ModelThread<P> {
    budget: NetworkBudget,
    policy: Policy,
    /// By model id; `None` for models of other shards.
    models: Vec<Option<Box<Model<P>>>>,
    /// By model id: when its candidate, or a task that was passed over, can no longer be met.
    expiries: IndexedHeap,
    /// Models whose candidate changed since it was last polled; each at most once.
    changed: VecDeque<ModelId>,
    /// The same of what waits without an objective.
    changed_background: VecDeque<ModelId>,
    outputs: VecDeque<Output<P>>,
}

#[derive(Debug)]
struct Model<P> {
    times: ModelTimes,
    jitter: Span,
    /// What GPU time is worth, as last heard of.
    price: Price,
    queue: TaskQueue<P>,
    /// Of a dynamic model, whose queue is empty: what it has instead.
    dynamic: Option<Box<Dynamic<P>>>,
    /// Tasks that have no objective, oldest first.
    background: Waiting<P>,
    policy: Box<dyn BatchPolicy>,
    usual: Usual,
    candidate: Option<Candidate>,
    /// Since when the candidate is schedulable, or will be.
    due_at: Timestamp,
    /// Until when priorities count, since a task was lost.
    contended_until: Timestamp,
    grants_seen: u32,
    is_changed: bool,
    whereabouts: Whereabouts,
}

impl<P> Model<P> {
    /// Whether some tasks must give way to others.
    fn is_contended(&self, now: Timestamp) -> bool {
        now < self.contended_until && self.queue.has_priorities()
    }

    /// The next batch: the policy's, unless some tasks must give way.
    fn gather(&self, view: &View<'_>) -> Gathered {
        let by_policy = self.policy.gather(view);
        if self.is_contended(view.now) { priorities::lead(view, by_policy) } else { by_policy }
    }

    /// A task that was queued cannot be met.
    fn on_lost(&mut self, now: Timestamp, key: &Queued) {
        self.policy.handle_lost(key);
        self.contended_until = self.contended_until.max(now + (key.deadline - key.queued_at));
    }

    /// The first instant at which `deadline` is missed even if a batch of `size` were granted an idle GPU then.
    fn expiry(&self, deadline: Timestamp, size: usize) -> Timestamp {
        let Times { profile, lead_times } = self.times.common();
        let lead_time = match self.whereabouts {
            Whereabouts::Arriving(at) if at + profile.latency(size) > deadline => return Timestamp::PAST,
            Whereabouts::Cold { load, from } if from + load + profile.latency(size) > deadline => {
                return Timestamp::PAST;
            }
            Whereabouts::Here | Whereabouts::Arriving(_) => lead_times[size - 1],
            Whereabouts::Cold { load, .. } => lead_times[size - 1].max(load + profile.latency(size)),
        };
        deadline - lead_time + Span(1)
    }

    /// Takes out all that waits: first what has an objective, nearest deadline first.
    fn drain(&mut self) -> Vec<(Queued, P)> {
        let mut tasks = self.dynamic.as_mut().map_or_else(Vec::new, |dynamic| dynamic.lanes.drain());
        tasks.extend(std::iter::from_fn(|| self.queue.pop().or_else(|| self.background.queue.pop())));
        tasks
    }

    /// Takes out the task named `id`.
    fn remove(&mut self, id: TaskId) -> Option<(Queued, P)> {
        let of_lanes = self.dynamic.as_mut().and_then(|dynamic| dynamic.lanes.remove(id));
        of_lanes.or_else(|| self.queue.remove(id)).or_else(|| self.background.queue.remove(id))
    }

    /// Keeps only tasks with an objective that `keep` wants. True if any was thrown away.
    fn retain(&mut self, keep: impl Fn(&Queued) -> bool) -> bool {
        match &mut self.dynamic {
            Some(dynamic) => dynamic.lanes.retain(keep),
            None => self.queue.retain(keep),
        }
    }

    /// Why a task is dropped that cannot be met.
    fn drop_reason(&self) -> DropReason {
        if self.whereabouts == Whereabouts::Here { DropReason::Deadline } else { DropReason::ColdStart }
    }
}

impl<P> ModelThread<P> {
    /// A shard without models.
    ///
    /// # Panics
    /// Once a model comes, if the policy has no windows and so is a planner of its own ([`Policy::planner`]).
    #[must_use]
    pub fn new(budget: NetworkBudget, policy: Policy) -> Self {
        Self {
            budget,
            policy,
            models: Vec::new(),
            expiries: IndexedHeap::default(),
            changed: VecDeque::new(),
            changed_background: VecDeque::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Takes a model in, or gives one that is already here a new profile (re-estimated, or of a new backend).
    /// `grants_seen` goes on where it was for a model that comes back.
    pub fn handle_model(&mut self, now: Timestamp, id: ModelId, config: ModelConfig) {
        let budget = config.budget.unwrap_or(self.budget);
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, || None);
        }
        let model = self.models[id.0 as usize].get_or_insert_with(|| {
            Box::new(Model {
                times: ModelTimes::new(config.profile.clone(), budget),
                jitter: budget.jitter,
                price: Price::default(),
                queue: TaskQueue::new(config.queue_max),
                dynamic: None,
                background: Waiting::new(config.queue_max),
                policy: self.policy.of_model(config.gpu_price).instantiate(),
                usual: Usual::default(),
                candidate: None,
                due_at: Timestamp::NEVER,
                contended_until: Timestamp::PAST,
                grants_seen: 0,
                is_changed: false,
                whereabouts: Whereabouts::Here,
            })
        });
        model.times.set_common(config.profile.clone(), budget);
        self.set_dynamic(now, id, (config, budget));
        self.update_candidate(now, id);
        self.update_background(id);
    }

    /// Where a model's weights are.
    pub fn handle_whereabouts(&mut self, now: Timestamp, id: ModelId, whereabouts: Whereabouts) {
        if let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) {
            model.whereabouts = whereabouts;
            self.update_candidate(now, id);
        }
    }

    /// Whether a model's weights are in no GPU's memory.
    #[must_use]
    pub fn is_cold(&self, id: ModelId) -> bool {
        let model = self.models.get(id.0 as usize).and_then(Option::as_ref);
        model.is_some_and(|model| model.whereabouts != Whereabouts::Here)
    }

    /// What a model takes on one GPU, if that is less than what it takes on all; a model that is not here has no GPUs.
    pub fn handle_gpu_profile(&mut self, id: ModelId, gpu: GpuId, profile: Option<LatencyProfile>) {
        if let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) {
            model.times.set_own(gpu, profile);
        }
    }

    /// Forgets what was known of a GPU. A scan: GPUs leave rarely.
    pub fn handle_gpu_left(&mut self, gpu: GpuId) {
        for model in self.models.iter_mut().flatten() {
            model.times.set_own(gpu, None);
            if let Some(dynamic) = &mut model.dynamic {
                dynamic.lanes.remove_gpu(gpu);
            }
        }
    }

    /// No GPU hosts the model any more: all that waits is dropped. The model stays known, so that grants under way
    /// are still counted and returned.
    pub fn handle_unhosted(&mut self, now: Timestamp, id: ModelId) {
        let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) else { return };
        for (key, payload) in model.drain() {
            self.outputs.push_back(dropped(id, key, payload, DropReason::NoBackend));
        }
        self.update_candidate(now, id);
        self.update_background(id);
    }

    /// Queues a task (Figure 18, `schedule`). It is dropped at once if its model is not here. If the queue is full, the
    /// least important task is; of equally important ones the one that comes.
    pub fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>) {
        let (key, payload) = Queued::of(now, task);
        let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            self.outputs.push_back(dropped(id, key, payload, DropReason::NoBackend));
            return;
        };
        let has_objective = key.deadline != Timestamp::NEVER;
        if has_objective && model.dynamic.is_some() {
            return self.on_submit_to_lanes(now, id, (key, payload));
        }
        if has_objective {
            model.policy.handle_arrived(now);
        }
        let queue = if has_objective { &mut model.queue } else { &mut model.background.queue };
        if let Err(payload) = queue.push(key, payload) {
            let Some((least, its_payload)) = queue.take_below(key.priority) else {
                return self.outputs.push_back(dropped(id, key, payload, DropReason::QueueFull));
            };
            assert!(queue.push(key, payload).is_ok(), "one has just left");
            self.outputs.push_back(dropped(id, least, its_payload, DropReason::QueueFull));
        }
        if has_objective { self.update_candidate(now, id) } else { self.update_background(id) }
    }

    /// Drops a task that still waits. Nothing happens if it does not: it has left already.
    pub fn handle_cancel(&mut self, now: Timestamp, id: ModelId, task: TaskId) {
        let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) else { return };
        if let Some((key, payload)) = model.remove(task) {
            self.outputs.push_back(dropped(id, key, payload, DropReason::Cancelled));
            self.update_candidate(now, id);
            self.update_background(id);
        }
    }

    /// Forgets all waiting tasks whose owner is gone; nobody is told. A scan of everything: owners leave rarely.
    pub fn handle_owner_left(&mut self, now: Timestamp, is_owned: impl Fn(TaskId) -> bool) {
        for index in 0..self.models.len() {
            let Some(model) = &mut self.models[index] else { continue };
            if model.retain(|key| !is_owned(key.id)) {
                self.update_candidate(now, ModelId(index as u32));
            }
            let Some(model) = &mut self.models[index] else { continue };
            if model.background.queue.retain(|key| !is_owned(key.id)) {
                self.update_background(ModelId(index as u32));
            }
        }
    }

    /// Makes the batch final for a granted GPU (Figure 18, `granted_gpu`). The GPU goes back if no batch can use it:
    /// all tasks have left, or so many that the rest is not due yet and would keep the GPU waiting. Whether a batch is
    /// due is a question of all GPUs; on one that is faster than others it may then be a larger one.
    pub fn handle_grant(&mut self, now: Timestamp, grant: Grant) {
        if let Some(until) = grant.background_until {
            return self.on_background_grant(now, grant, until);
        }
        let Some(model) = self.models.get_mut(grant.model.0 as usize).and_then(Option::as_mut) else {
            self.outputs.push_back(Output::Gpu(grant.gpu, GpuUpdate::Returned));
            return;
        };
        model.grants_seen = model.grants_seen.wrapping_add(1);
        if model.dynamic.is_some() {
            return self.on_grant_to_lanes(now, grant);
        }
        let is_contended = model.is_contended(now);
        let Model { times, queue, policy, due_at, jitter, price, .. } = &mut **model;
        let (queue, due_at, terms) = (queue.keys(), *due_at, (*jitter, *price));
        let gather = |policy: &dyn BatchPolicy, view: &View<'_>| {
            let by_policy = policy.gather(view);
            (by_policy, if is_contended { priorities::lead(view, by_policy) } else { by_policy })
        };
        let mut view = view((now, grant.free_at), queue, times.common(), terms);
        let (mut by_policy, mut batch) = gather(&**policy, &view);
        let opens_at = |batch| match grant.is_open {
            true => policy.ready_at(&view, batch, policy.traffic(&view).as_ref()),
            false => policy.opens_at(&view, batch),
        };
        let is_due = batch.size > 0 && opens_at(batch) <= view.earliest_start(batch.size);
        if is_due {
            if let Some(own) = times.own(grant.gpu) {
                view = View { profile: &own.profile, lead_times: &own.lead_times, ..view };
                (by_policy, batch) = gather(&**policy, &view);
            }
            let start = view.earliest_start(batch.size);
            policy.handle_granted(&view, batch, Granted { start, waited: start - due_at, gpus: grant.gpus });
            let given_up = by_policy.skip.min(batch.skip);
            self.on_final_batch(now, grant, (given_up, batch), (due_at, start));
        } else {
            self.outputs.push_back(Output::Gpu(grant.gpu, GpuUpdate::Returned));
        }
        self.models[grant.model.0 as usize].as_mut().expect("just used").due_at = Timestamp::NEVER;
        self.update_candidate(now, grant.model);
    }

    /// A grant for a GPU that has left meanwhile: nobody runs a batch there.
    pub fn handle_void_grant(&mut self, now: Timestamp, grant: Grant) {
        self.outputs.push_back(Output::Gpu(grant.gpu, GpuUpdate::Returned));
        let Some(model) = self.models.get_mut(grant.model.0 as usize).and_then(Option::as_mut) else { return };
        if grant.background_until.is_some() {
            model.background.grants_seen = model.background.grants_seen.wrapping_add(1);
            self.update_background(grant.model);
        } else {
            model.grants_seen = model.grants_seen.wrapping_add(1);
            self.update_candidate(now, grant.model);
        }
    }

    /// Forgets a model, which another ModelThread owns from now on. Yields what waits for it, nearest deadline first,
    /// and, if it is dynamic, what is known of its requests.
    pub fn release(&mut self, id: ModelId) -> (Vec<Task<P>>, Option<DynamicTimes>) {
        let Some(mut model) = self.models.get_mut(id.0 as usize).and_then(Option::take) else {
            return (Vec::new(), None);
        };
        self.expiries.remove(id.0);
        self.changed.retain(|&changed| changed != id);
        self.changed_background.retain(|&changed| changed != id);
        let tasks = model.drain().into_iter().map(|(key, payload)| key.with(payload)).collect();
        (tasks, model.dynamic.and_then(|dynamic| dynamic.lanes.into_samples()))
    }

    /// What a model's policy has learned.
    #[must_use]
    pub fn learned(&self, id: ModelId) -> Option<LearnedAverages> {
        self.models.get(id.0 as usize)?.as_ref()?.policy.learned()
    }

    /// What is asked of a model, if its batches are sized by a price.
    #[must_use]
    pub fn traffic(&self, now: Timestamp, id: ModelId) -> Option<Traffic> {
        let model = self.models.get(id.0 as usize)?.as_ref().filter(|model| model.dynamic.is_none())?;
        let Model { times, queue, jitter, price, policy, .. } = &**model;
        policy.usual_traffic(&view((now, Timestamp::PAST), queue.keys(), times.common(), (*jitter, *price)))
    }

    /// What a model's policy had learned elsewhere.
    pub fn handle_learned(&mut self, now: Timestamp, id: ModelId, learned: &LearnedAverages) {
        if let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) {
            model.policy.handle_learned(now, learned);
            self.update_candidate(now, id);
        }
    }

    /// What GPU time is worth to a model from now on. Its candidate is drawn up by that when it is the next time.
    pub fn handle_price(&mut self, id: ModelId, price: Price) {
        if let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) {
            model.price = price;
        }
    }

    /// The next model whose candidate is to be drawn up anew by [`Self::handle_timeout`].
    #[must_use]
    pub fn next_due(&self, now: Timestamp) -> Option<ModelId> {
        self.expiries.peek().filter(|&(at, _)| at <= now).map(|(_, id)| ModelId(id))
    }

    /// Draws up anew the candidate of a model that is due.
    pub fn handle_due(&mut self, now: Timestamp, id: ModelId) {
        self.update_candidate(now, id);
    }

    /// Draws up anew every candidate that can no longer be met.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        while let Some(id) = self.next_due(now) {
            self.handle_due(now, id);
        }
    }

    /// When `handle_timeout` must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.expiries.peek().map(|(at, _)| at)
    }

    /// The next thing that is to be done.
    pub fn poll_output(&mut self) -> Option<Output<P>> {
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        if let Some(id) = self.changed.pop_front() {
            let model = self.models[id.0 as usize].as_mut().expect("only known models change");
            model.is_changed = false;
            return Some(Output::Candidate(id, model.candidate));
        }
        self.poll_background()
    }

    /// Tasks of a model that wait.
    #[must_use]
    pub fn queue_length(&self, id: ModelId) -> usize {
        let model = self.models.get(id.0 as usize).and_then(Option::as_ref);
        let in_lanes = |model: &Model<P>| model.dynamic.as_ref().map_or(0, |dynamic| dynamic.lanes.len());
        let queued = |model: &Model<P>| model.queue.keys().len() + model.background.queue.keys().len();
        model.map_or(0, |model| queued(model) + in_lanes(model))
    }

    /// Those of one priority.
    #[must_use]
    pub fn queue_length_of(&self, id: ModelId, priority: u8) -> usize {
        let model = self.models.get(id.0 as usize).and_then(Option::as_ref);
        let in_lanes = |model: &Model<P>| model.dynamic.as_ref().map_or(0, |it| it.lanes.length_of(priority));
        let queued = |model: &Model<P>| model.queue.length_of(priority) + model.background.queue.length_of(priority);
        model.map_or(0, |model| queued(model) + in_lanes(model))
    }

    /// Heads that gave way and were not given up wait for another chance.
    fn on_final_batch(
        &mut self,
        now: Timestamp,
        grant: Grant,
        (given_up, batch): (usize, Gathered),
        (due_at, exec_at): (Timestamp, Timestamp),
    ) {
        let model = self.models[grant.model.0 as usize].as_mut().expect("the grant's model is known");
        let is_contended = model.is_contended(now);
        for _ in 0..given_up {
            let (key, payload) = model.queue.pop().expect("gathered from this queue");
            model.on_lost(now, &key);
            self.outputs.push_back(dropped(grant.model, key, payload, DropReason::Deadline));
        }
        let tasks: Vec<_> = if is_contended {
            model.queue.take_best(batch.skip - given_up, batch.size)
        } else {
            (0..batch.size).map(|_| model.queue.pop().expect("gathered from this queue")).collect()
        };
        let latency = model.times.of(grant.gpu).profile.latency(batch.size);
        let latest = tasks[0].0.deadline - latency;
        model.usual.handle_planned(tasks.len(), latest - tasks[0].0.queued_at);
        let update = GpuUpdate::Planned { exec_at, free_at: exec_at + latency, is_certain: true };
        let Grant { model, gpu, timer_at, .. } = grant;
        let batch = Batch { model, gpu, due_at, timer_at, exec_at, latest, execution: latency, tasks };
        self.outputs.push_back(Output::Batch(batch));
        self.outputs.push_back(Output::Gpu(grant.gpu, update));
    }

    /// Symphony, Algorithm 1, `UpdateCandidate`; Figure 18, `update_candidate`.
    fn update_candidate(&mut self, now: Timestamp, id: ModelId) {
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        if model.dynamic.is_some() {
            return self.update_lanes(now, id);
        }
        let mut head_expiry = None;
        while let Some(head) = model.queue.keys().front() {
            let expiry = model.expiry(head.deadline, 1);
            if expiry > now {
                head_expiry = Some(expiry);
                break;
            }
            let (key, payload) = model.queue.pop().expect("the queue has a head");
            model.on_lost(now, &key);
            let reason = model.drop_reason();
            self.outputs.push_back(dropped(id, key, payload, reason));
        }
        let times = model.times.common();
        let ready_at = model.whereabouts.ready_at(now);
        let view = view((now, ready_at), model.queue.keys(), times, (model.jitter, model.price));
        let batch = model.gather(&view);
        debug_assert!(batch.size == 0 || view.earliest_end(batch.size) <= view.queue[batch.skip].deadline);
        let candidate = (batch.size > 0).then(|| {
            let latest = view.queue[batch.skip].deadline - view.profile.latency(batch.size);
            let traffic = model.policy.traffic(&view);
            let exec_at = model.policy.ready_at(&view, batch, traffic.as_ref());
            let anywhere_at = model.policy.opens_at(&view, batch);
            let grown = batch.size.max(model.usual.size(view.profile.max_batch()));
            let longer = view.profile.latency(grown) - view.profile.latency(batch.size);
            Candidate {
                size: batch.size as u32,
                exec_at,
                anywhere_at,
                latest,
                due_at: latest - model.policy.urgency(),
                grants_seen: model.grants_seen,
                expected_at: exec_at - longer,
                patience: model.usual.patience.min(latest - view.queue[batch.skip].queued_at),
                traffic,
            }
        });
        // One that is held back is drawn up again once it has waited twice as long, as prices fall.
        let held_since = view.queue.front().map_or(now, |head| head.queued_at);
        let is_held = |candidate: &Candidate| candidate.traffic.is_some() && candidate.exec_at > now;
        let again_at = candidate.filter(is_held).map(|_| now + (now - held_since).max(LOOK_AGAIN));
        match head_expiry {
            None => self.expiries.remove(id.0),
            Some(expiry) if batch.size == 0 => self.expiries.set(id.0, expiry),
            Some(expiry) => {
                let of_batch = model.expiry(model.queue.keys()[batch.skip].deadline, batch.size);
                self.expiries.set(id.0, expiry.min(of_batch).min(again_at.unwrap_or(Timestamp::NEVER)));
            }
        }
        let opens_at = candidate.map_or(Timestamp::NEVER, |candidate| candidate.exec_at.max(now));
        // A window that is open stays open since it opened.
        if opens_at > now || model.due_at > now {
            model.due_at = opens_at;
        }
        self.set_candidate(id, candidate);
    }

    /// The RankThread is to be told, if it is another one than before.
    fn set_candidate(&mut self, id: ModelId, candidate: Option<Candidate>) {
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        if model.candidate != candidate {
            model.candidate = candidate;
            if !std::mem::replace(&mut model.is_changed, true) {
                self.changed.push_back(id);
            }
        }
    }
}

fn view<'a>(
    (now, free_at): (Timestamp, Timestamp),
    queue: &'a VecDeque<Queued>,
    Times { profile, lead_times }: &'a Times,
    (jitter, price): (Span, Price),
) -> View<'a> {
    View { now, free_at, queue, profile, lead_times, jitter, price }
}

fn dropped<P>(model: ModelId, key: Queued, payload: P, reason: DropReason) -> Output<P> {
    Output::Dropped { model, task: key.with(payload), reason }
}

#[cfg(test)]
mod tests;
