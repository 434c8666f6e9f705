//! Orloj (2022), Algorithm 1: whenever a GPU is idle it is given a batch of the requests with the highest scores, which
//! follow from the distributions of what batches take ([`crate::lanes`], where a model has one lane here).
//!
//! Orloj runs one model on one GPU. With several models the one whose batch has the earliest deadline goes first; all
//! GPUs that host it take from the same queues. Nothing is planned ahead, since nobody knows when a batch ends, and no
//! batch is rejected for starting late. A model whose times are constant is one whose distribution has one step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_frontend::DropReason};

use crate::{
    dynamic::KnownTimes,
    gpu_work::GpuWork,
    lanes::{Lanes, Rules},
    messages::NetworkBudget,
    planner::{Planner, PlannerOutput},
    task::{Batch, FAR, GpuMemory, LoadEnd, ModelConfig, Task},
    task_queue::Queued,
};

/// The planner.
#[derive(Debug)]
pub(super) struct Orloj<P> {
    rules: Rules,
    budget: NetworkBudget,
    /// By model id.
    models: Vec<Option<Lanes<P>>>,
    gpus: BTreeMap<GpuId, Gpu>,
    decided_at: Timestamp,
    outputs: VecDeque<PlannerOutput<P>>,
}

#[derive(Debug)]
struct Gpu {
    models: BTreeSet<ModelId>,
    work: GpuWork,
}

impl<P> Orloj<P> {
    /// `rate` is b, for a millisecond: how likely a request that is not chosen now is chosen later.
    pub(super) fn new(budget: NetworkBudget, rate: f64) -> Self {
        Self {
            rules: Rules { rate, has_lanes: false },
            budget,
            models: Vec::new(),
            gpus: BTreeMap::new(),
            decided_at: Timestamp::PAST,
            outputs: VecDeque::new(),
        }
    }

    fn model(&mut self, id: ModelId) -> Option<&mut Lanes<P>> {
        self.models.get_mut(id.0 as usize).and_then(Option::as_mut)
    }

    fn drop_task(&mut self, model: ModelId, (key, payload): (Queued, P), reason: DropReason) {
        self.outputs.push_back(PlannerOutput::Dropped { model, task: key.with(payload), reason });
    }

    /// Gives an idle GPU a batch; false if none is idle or none has one.
    fn give_work(&mut self, now: Timestamp) -> bool {
        let idle = self.gpus.iter().filter(|(_, gpu)| gpu.work.is_empty() && gpu.work.free_at() <= now);
        let choice_of = |(&gpu, state): (&GpuId, &Gpu)| {
            let choice = |&id: &ModelId| {
                let model = self.models.get(id.0 as usize).and_then(Option::as_ref)?;
                let choice = model.choice(now)?;
                Some((choice.deadline, id, choice))
            };
            state.models.iter().filter_map(choice).min().map(|(_, id, choice)| (gpu, id, choice))
        };
        let Some((gpu, id, choice)) = idle.filter_map(choice_of).next() else { return false };
        let model = self.model(id).expect("it has a choice");
        // Whoever runs it is idle, and when it ends nobody knows.
        let taken = model.take_batch(now, choice, (id, gpu), (now, Timestamp::PAST));
        let batch = Batch { latest: Timestamp::NEVER, ..taken };
        self.gpus.get_mut(&gpu).expect("it is idle").work.push(batch.exec_at, batch.execution);
        self.outputs.push_back(PlannerOutput::Batch(batch));
        true
    }
}

impl<P: Send> Planner<P> for Orloj<P> {
    fn handle_model(&mut self, now: Timestamp, id: ModelId, config: ModelConfig) {
        let (budget, rules) = (config.budget.unwrap_or(self.budget), self.rules);
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, || None);
        }
        match &mut self.models[id.0 as usize] {
            Some(model) => model.handle_config(now, config, budget),
            absent => *absent = Some(Lanes::new(now, rules, config, budget)),
        }
    }

    /// A request is in queues before its GPU is known, so all go by the slowest.
    fn handle_gpu_profile(&mut self, _id: ModelId, _gpu: GpuId, _profile: Option<LatencyProfile>) {}

    fn handle_alone(&mut self, now: Timestamp, id: ModelId, of: (u8, u32), alone: Span) {
        if let Some(model) = self.model(id) {
            model.handle_alone(now, of, alone);
        }
    }

    fn handle_executed(&mut self, now: Timestamp, id: ModelId, gpu: GpuId, tasks: &[(u8, u32)], took: Span) {
        // Who has left is not kept in mind.
        if let (true, Some(model)) = (self.gpus.contains_key(&gpu), self.model(id)) {
            model.handle_executed(now, gpu, tasks, took);
        }
    }

    fn wants_samples(&self) -> bool {
        true
    }

    fn tables_made(&self, id: ModelId) -> u64 {
        self.models.get(id.0 as usize).and_then(Option::as_ref).map_or(0, Lanes::tables_made)
    }

    fn request_times(&self, id: ModelId) -> Option<KnownTimes> {
        self.models.get(id.0 as usize)?.as_ref()?.request_times()
    }

    fn handle_unhosted(&mut self, _now: Timestamp, id: ModelId) {
        for task in self.model(id).map_or(Vec::new(), Lanes::drain) {
            self.drop_task(id, task, DropReason::NoBackend);
        }
    }

    fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>) {
        let (mut key, payload) = Queued::of(now, task);
        key.deadline = key.deadline.min(now + FAR);
        match self.model(id) {
            None => self.drop_task(id, (key, payload), DropReason::NoBackend),
            Some(model) if model.is_full() => self.drop_task(id, (key, payload), DropReason::QueueFull),
            Some(model) => model.push(now, key, payload),
        }
    }

    fn handle_cancel(&mut self, _now: Timestamp, id: ModelId, task: TaskId) {
        if let Some(task) = self.model(id).and_then(|model| model.remove(task)) {
            self.drop_task(id, task, DropReason::Cancelled);
        }
    }

    fn handle_owner_left(&mut self, _now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool) {
        for model in self.models.iter_mut().flatten() {
            model.retain(|key| !is_owned(key.id));
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
        self.models.iter_mut().flatten().for_each(|model| model.remove_gpu(gpu));
    }

    fn handle_finished(&mut self, gpu: GpuId, finished_at: Timestamp) {
        if let Some(gpu) = self.gpus.get_mut(&gpu) {
            gpu.work.handle_finished(finished_at);
        }
    }

    fn handle_loaded(&mut self, _now: Timestamp, _gpu: GpuId, _model: ModelId, _end: LoadEnd) {}

    fn handle_timeout(&mut self, now: Timestamp) {
        self.decided_at = now;
        self.models.iter_mut().flatten().for_each(|model| model.reset_base(now));
        for id in (0..self.models.len() as u32).map(ModelId) {
            let Some(model) = self.model(id).filter(|model| model.len() > 0) else { continue };
            for task in model.handle_timeout(now, now) {
                self.drop_task(id, task, DropReason::Deadline);
            }
        }
        while self.give_work(now) {}
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        let waits = || self.models.iter().flatten().filter(|model| model.len() > 0);
        let expires = waits().filter_map(Lanes::first_expiry);
        // One that is idle and was offered all there is waits for more.
        let frees = self.gpus.values().filter(|gpu| gpu.work.is_empty()).map(|gpu| gpu.work.free_at());
        let frees = frees.filter(|&at| at > self.decided_at && waits().next().is_some());
        expires.chain(frees).min()
    }

    fn poll_output(&mut self) -> Option<PlannerOutput<P>> {
        self.outputs.pop_front()
    }

    fn queue_length(&self, id: ModelId) -> usize {
        self.models.get(id.0 as usize).and_then(Option::as_ref).map_or(0, Lanes::len)
    }
}

#[cfg(test)]
mod tests;
