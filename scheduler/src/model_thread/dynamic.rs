//! Step 4, Step 6 of dynamic models under `downbeat` ([`crate::dynamic`]), which have lanes ([`crate::lanes`])
//! instead of a queue and windows.
//!
//! Nobody knows when a batch of theirs ends, so nothing is held back: the candidate is schedulable at once, until the
//! first task that could be in its batch cannot any more. It is taken from the lanes once more when a GPU is granted,
//! which is not granted again before it has reported that batch. Between models all is as with static ones: the
//! RankThread takes the candidate that is due first, and a model that loses more is due earlier.

use super::*;
use crate::{
    dynamic::KnownTimes,
    lanes::{Lanes, Outlook, Rules},
};

/// What a dynamic model has.
#[derive(Debug)]
pub(super) struct Dynamic<P> {
    /// Tasks with an objective.
    pub(super) lanes: Lanes<P>,
    /// What its batches hardly ever exceed.
    pub(super) longest: Times,
}

impl<P> Dynamic<P> {
    fn new(lanes: Lanes<P>, budget: &NetworkBudget) -> Self {
        Self { longest: Times::new(lanes.longest(), budget), lanes }
    }
}

impl<P> Model<P> {
    /// From a grant to the start of a batch of one.
    fn least_delay(&self) -> Span {
        let Times { profile, lead_times } = self.times.common();
        lead_times[0] - profile.latency(1)
    }

    /// When the GPU of a batch that is drawn up now is granted at the soonest.
    fn granted_at(&self, now: Timestamp) -> Timestamp {
        now.max(self.whereabouts.ready_at(now) - self.least_delay())
    }

    /// When a task is lost that can wait for a grant until just before `expires_at`.
    fn lost_at(&self, expires_at: Timestamp) -> Timestamp {
        match self.whereabouts {
            Whereabouts::Here | Whereabouts::Arriving(_) => expires_at,
            Whereabouts::Cold { load, .. } => expires_at - (load - self.least_delay()).max(Span::ZERO),
        }
    }
}

impl<P> ModelThread<P> {
    /// Whether tasks that run alone say what dynamic models' batches take.
    #[must_use]
    pub fn wants_samples(&self) -> bool {
        matches!(self.policy, Policy::Downbeat | Policy::DownbeatTuned(_))
    }

    /// A task of a dynamic model, of an application and a length, was executed alone.
    pub fn handle_alone(&mut self, now: Timestamp, id: ModelId, of: (u8, u32), alone: Span) {
        self.change_lanes(now, id, |lanes| lanes.handle_alone(now, of, alone));
    }

    /// A GPU executed a batch of a dynamic model's tasks, of these applications and lengths.
    pub fn handle_executed(&mut self, now: Timestamp, id: ModelId, gpu: GpuId, tasks: &[(u8, u32)], took: Span) {
        self.change_lanes(now, id, |lanes| lanes.handle_executed(now, gpu, tasks, took));
    }

    /// As [`Planner::tables_made`](crate::planner::Planner::tables_made).
    #[must_use]
    pub fn tables_made(&self, id: ModelId) -> u64 {
        self.lanes(id).map_or(0, Lanes::tables_made)
    }

    /// As [`Planner::request_times`](crate::planner::Planner::request_times).
    #[must_use]
    pub fn request_times(&self, id: ModelId) -> Option<KnownTimes> {
        self.lanes(id)?.request_times()
    }

    fn lanes(&self, id: ModelId) -> Option<&Lanes<P>> {
        Some(&self.models.get(id.0 as usize)?.as_ref()?.dynamic.as_ref()?.lanes)
    }

    /// What another ModelThread knew of a dynamic model's requests.
    pub fn handle_samples(&mut self, now: Timestamp, id: ModelId, samples: DynamicTimes) {
        let change = |lanes: &mut Lanes<P>| {
            lanes.handle_samples(now, samples);
            true
        };
        self.change_lanes(now, id, change);
    }

    /// If a change yields true, batches take another time than before.
    fn change_lanes(&mut self, now: Timestamp, id: ModelId, change: impl FnOnce(&mut Lanes<P>) -> bool) {
        let Some(model) = self.models.get_mut(id.0 as usize).and_then(Option::as_mut) else { return };
        let Some(dynamic) = &mut model.dynamic else { return };
        if change(&mut dynamic.lanes) {
            dynamic.longest = Times::new(dynamic.lanes.longest(), model.times.budget());
            self.update_candidate(now, id);
            self.update_background(id);
        }
    }

    /// A model that is dynamic has lanes, any other one a queue. What waits stays.
    pub(super) fn set_dynamic(&mut self, now: Timestamp, id: ModelId, (config, budget): (ModelConfig, NetworkBudget)) {
        let is_dynamic = self.wants_samples() && config.dynamic.is_some();
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        match model.dynamic.take() {
            Some(dynamic) if is_dynamic => {
                let mut lanes = dynamic.lanes;
                lanes.handle_config(now, config, budget);
                model.dynamic = Some(Box::new(Dynamic::new(lanes, &budget)));
            }
            None if is_dynamic => {
                let mut lanes = Lanes::new(now, Rules::LANES, config, budget);
                std::iter::from_fn(|| model.queue.pop()).for_each(|(key, payload)| lanes.push(now, key, payload));
                model.dynamic = Some(Box::new(Dynamic::new(lanes, &budget)));
                model.due_at = Timestamp::NEVER;
            }
            Some(mut dynamic) => {
                for (key, payload) in dynamic.lanes.drain() {
                    if let Err(payload) = model.queue.push(key, payload) {
                        self.outputs.push_back(dropped(id, key, payload, DropReason::QueueFull));
                    }
                }
            }
            None => {}
        }
    }

    /// Queues a task; the candidate is drawn up once all that comes now is there.
    pub(super) fn on_submit_to_lanes(&mut self, now: Timestamp, id: ModelId, (key, payload): (Queued, P)) {
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        let lanes = &mut model.dynamic.as_mut().expect("callers looked").lanes;
        if lanes.is_full() {
            let Some((least, its_payload)) = lanes.take_below(key.priority) else {
                return self.outputs.push_back(dropped(id, key, payload, DropReason::QueueFull));
            };
            self.outputs.push_back(dropped(id, least, its_payload, DropReason::QueueFull));
        }
        lanes.push(now, key, payload);
        self.expiries.set(id.0, now);
    }

    /// What is too late leaves, and the RankThread is to know of the batch that would be taken now.
    pub(super) fn update_lanes(&mut self, now: Timestamp, id: ModelId) {
        self.expire_lanes(now, id);
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        let lanes = &model.dynamic.as_ref().expect("callers looked").lanes;
        let outlook = lanes.choice(now).map(|choice| lanes.outlook(choice));
        let expires_at = lanes.first_expiry().into_iter().chain(outlook.map(|outlook| outlook.expires_at)).min();
        let candidate = outlook.map(|Outlook { size, execution, deadline, queued_at, expires_at }| {
            let Times { profile, lead_times } = model.times.common();
            let delay = lead_times[size - 1] - profile.latency(size);
            let latest = expires_at - Span(1) + delay;
            Candidate {
                size: size as u32,
                exec_at: Timestamp::PAST,
                anywhere_at: Timestamp::PAST,
                latest,
                due_at: deadline - execution - model.policy.urgency(),
                grants_seen: model.grants_seen,
                expected_at: Timestamp::PAST,
                patience: model.usual.patience.min(latest - queued_at),
                traffic: None,
            }
        });
        match expires_at {
            None => self.expiries.remove(id.0),
            Some(at) => self.expiries.set(id.0, model.lost_at(at)),
        }
        self.set_candidate(id, candidate);
    }

    fn expire_lanes(&mut self, now: Timestamp, id: ModelId) {
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        let (granted_at, reason) = (model.granted_at(now), model.drop_reason());
        let lanes = &mut model.dynamic.as_mut().expect("callers looked").lanes;
        lanes.reset_base(now);
        let tables = lanes.tables_made();
        let lost = lanes.handle_timeout(now, granted_at);
        let has_forgotten = lanes.tables_made() != tables;
        for (key, payload) in lost {
            model.on_lost(now, &key);
            self.outputs.push_back(dropped(id, key, payload, reason));
        }
        if has_forgotten {
            let dynamic = model.dynamic.as_mut().expect("callers looked");
            dynamic.longest = Times::new(dynamic.lanes.longest(), model.times.budget());
            self.update_background(id);
        }
    }

    /// A batch takes the GPU, or, if nothing waits any more, the GPU goes back.
    pub(super) fn on_grant_to_lanes(&mut self, now: Timestamp, grant: Grant) {
        let Grant { model: id, gpu, free_at, gpus, timer_at, .. } = grant;
        self.expire_lanes(now, id);
        let model = self.models[id.0 as usize].as_mut().expect("callers look the model up");
        let lanes = &mut model.dynamic.as_mut().expect("callers looked").lanes;
        let update = match lanes.choice(now) {
            None => GpuUpdate::Returned,
            Some(choice) => {
                let batch = lanes.take_batch(now, choice, (id, gpu), (timer_at, free_at));
                let Batch { exec_at, execution, .. } = batch;
                let queue: VecDeque<Queued> = batch.tasks.iter().map(|(key, _)| *key).collect();
                // The mean of all may be more than there was for one that is short.
                let patience = (queue[0].deadline - execution - queue[0].queued_at).max(Span::ZERO);
                model.usual.handle_planned(queue.len(), patience);
                let view = view((now, free_at), &queue, model.times.common(), (model.jitter, model.price));
                // Nothing waits on purpose, and what is learned of windows is of no use here; losses are.
                let all = Gathered { skip: 0, size: queue.len() };
                model.policy.handle_granted(&view, all, Granted { start: exec_at, waited: Span::ZERO, gpus });
                self.outputs.push_back(Output::Batch(batch));
                GpuUpdate::Planned { exec_at, free_at: exec_at + execution, is_certain: false }
            }
        };
        self.outputs.push_back(Output::Gpu(gpu, update));
        self.update_candidate(now, id);
    }
}

#[cfg(test)]
mod tests;
