//! A ModelThread with its way to the RankThread as one planner. The way is a trait: in place, when one thread carries
//! the messages itself, or mailboxes to a RankThread on another core. What is on either side of it is the same.

use std::collections::{BTreeSet, VecDeque};

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_scheduler::LearnedAverages};

use crate::{
    dynamic::{DynamicTimes, KnownTimes},
    mailbox::{FromRankThread, ModelEnd},
    messages::{Background, Candidate, GpuUpdate, NetworkBudget, Price, Traffic},
    model_thread::{ModelThread, Output},
    planner::{Planner, PlannerOutput, Released},
    policy::Policy,
    rank_thread::RankThread,
    task::{GpuMemory, LoadEnd, ModelConfig, Task, Weights},
};

/// A ModelThread's way to the RankThread.
pub trait RankSide: Send {
    /// A model's newest candidate.
    fn post_candidate(&mut self, now: Timestamp, model: ModelId, candidate: Option<Candidate>);
    /// What waits of a model without an objective.
    fn post_background(&mut self, model: ModelId, background: Option<Background>);
    /// What became of a GPU.
    fn post_gpu(&mut self, gpu: GpuId, update: GpuUpdate);
    /// All that was to be posted for now has been.
    fn settle(&mut self, now: Timestamp);
    /// What GPU time is worth to a model.
    fn price(&self, model: ModelId) -> Price;
    /// What the RankThread says.
    fn poll(&mut self) -> Option<FromRankThread>;
    /// Whether [`Self::poll`] has something to yield that another thread has posted.
    fn has_mail(&self) -> bool;
    /// When [`Self::settle`] must be called at the latest.
    fn poll_timeout(&self) -> Option<Timestamp>;
    /// What the network costs a model.
    fn handle_budget(&mut self, model: ModelId, budget: NetworkBudget);
    /// What a model's weights take.
    fn handle_weights(&mut self, model: ModelId, weights: Weights);
    /// A GPU that is free from `free_at` on and hosts `models`.
    fn handle_gpu_joined(&mut self, free_at: Timestamp, gpu: GpuId, models: Vec<ModelId>, memory: Option<GpuMemory>);
    /// Whether a model is in the host memory of a GPU's machine.
    fn handle_host_memory(&mut self, gpu: GpuId, model: ModelId, is_there: bool);
    /// A GPU left.
    fn handle_gpu_left(&mut self, gpu: GpuId);
}

/// On the same thread.
impl RankSide for RankThread {
    fn post_candidate(&mut self, now: Timestamp, model: ModelId, candidate: Option<Candidate>) {
        self.handle_candidate(now, model, candidate);
    }

    fn post_background(&mut self, model: ModelId, background: Option<Background>) {
        self.handle_background(model, background);
    }

    fn post_gpu(&mut self, gpu: GpuId, update: GpuUpdate) {
        self.handle_gpu(gpu, update);
    }

    fn settle(&mut self, now: Timestamp) {
        self.handle_timeout(now);
    }

    fn price(&self, model: ModelId) -> Price {
        Self::price(self, model)
    }

    fn poll(&mut self) -> Option<FromRankThread> {
        // Prices are asked for where they are needed.
        while self.poll_price().is_some() {}
        self.poll_message().map(|(_, message)| message)
    }

    fn has_mail(&self) -> bool {
        false
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        Self::poll_timeout(self)
    }

    fn handle_budget(&mut self, model: ModelId, budget: NetworkBudget) {
        self.handle_model_budget(model, budget);
    }

    fn handle_weights(&mut self, model: ModelId, weights: Weights) {
        Self::handle_weights(self, model, weights);
    }

    fn handle_gpu_joined(&mut self, free_at: Timestamp, gpu: GpuId, models: Vec<ModelId>, memory: Option<GpuMemory>) {
        Self::handle_gpu_joined(self, free_at, gpu, models, memory);
    }

    fn handle_host_memory(&mut self, gpu: GpuId, model: ModelId, is_there: bool) {
        Self::handle_host_memory(self, gpu, model, is_there);
    }

    fn handle_gpu_left(&mut self, gpu: GpuId) {
        let _ = Self::handle_gpu_left(self, gpu);
    }
}

/// On another thread, which control tells of GPUs and budgets itself.
impl RankSide for ModelEnd {
    fn post_candidate(&mut self, _now: Timestamp, model: ModelId, candidate: Option<Candidate>) {
        Self::post_candidate(self, model, candidate);
    }

    fn post_background(&mut self, model: ModelId, background: Option<Background>) {
        Self::post_background(self, model, background);
    }

    fn post_gpu(&mut self, gpu: GpuId, update: GpuUpdate) {
        Self::post_gpu(self, gpu, update);
    }

    fn settle(&mut self, _now: Timestamp) {
        self.flush();
    }

    fn price(&self, model: ModelId) -> Price {
        Self::price(self, model)
    }

    fn poll(&mut self) -> Option<FromRankThread> {
        Self::poll(self)
    }

    fn has_mail(&self) -> bool {
        Self::has_mail(self)
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        None
    }

    fn handle_budget(&mut self, _model: ModelId, _budget: NetworkBudget) {}

    fn handle_weights(&mut self, _model: ModelId, _weights: Weights) {}

    fn handle_gpu_joined(&mut self, _: Timestamp, _: GpuId, _: Vec<ModelId>, _: Option<GpuMemory>) {}

    fn handle_host_memory(&mut self, _gpu: GpuId, _model: ModelId, _is_there: bool) {}

    fn handle_gpu_left(&mut self, _gpu: GpuId) {}
}

/// Any policy of windows (`policy::BatchPolicy`).
#[derive(Debug)]
pub struct Matchmaker<P, R> {
    models: ModelThread<P>,
    rank: R,
    /// A grant may name a GPU that has left while the grant was under way.
    gpus: BTreeSet<GpuId>,
    outputs: VecDeque<PlannerOutput<P>>,
    released: VecDeque<Released<P>>,
}

impl<P> Matchmaker<P, RankThread> {
    /// Without models and GPUs, all on one thread.
    ///
    /// # Panics
    /// If the policy has no windows (as [`ModelThread::new`]).
    #[must_use]
    pub fn in_place(budget: NetworkBudget, policy: Policy) -> Self {
        Self::new(budget, policy, RankThread::new(budget))
    }
}

impl<P, R> Matchmaker<P, R> {
    /// Without models and GPUs.
    ///
    /// # Panics
    /// If the policy has no windows (as [`ModelThread::new`]).
    #[must_use]
    pub fn new(budget: NetworkBudget, policy: Policy, rank: R) -> Self {
        let (outputs, released) = (VecDeque::new(), VecDeque::new());
        Self { models: ModelThread::new(budget, policy), rank, gpus: BTreeSet::new(), outputs, released }
    }
}

impl<P: Send, R: RankSide> Planner<P> for Matchmaker<P, R> {
    fn handle_model(&mut self, now: Timestamp, id: ModelId, config: ModelConfig) {
        if let Some(budget) = config.budget {
            self.rank.handle_budget(id, budget);
        }
        self.rank.handle_weights(id, config.weights);
        self.models.handle_model(now, id, config);
    }

    fn handle_gpu_profile(&mut self, id: ModelId, gpu: GpuId, profile: Option<LatencyProfile>) {
        self.models.handle_gpu_profile(id, gpu, profile);
    }

    fn handle_unhosted(&mut self, now: Timestamp, id: ModelId) {
        self.models.handle_unhosted(now, id);
    }

    fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>) {
        self.models.handle_price(id, self.rank.price(id));
        self.models.handle_submit(now, id, task);
    }

    fn handle_cancel(&mut self, now: Timestamp, id: ModelId, task: TaskId) {
        self.models.handle_cancel(now, id, task);
    }

    fn handle_owner_left(&mut self, now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool) {
        self.models.handle_owner_left(now, is_owned);
    }

    fn handle_gpu_joined(&mut self, free_at: Timestamp, gpu: GpuId, models: Vec<ModelId>, memory: Option<GpuMemory>) {
        self.gpus.insert(gpu);
        self.rank.handle_gpu_joined(free_at, gpu, models, memory);
    }

    fn handle_host_memory(&mut self, gpu: GpuId, model: ModelId, is_there: bool) {
        self.rank.handle_host_memory(gpu, model, is_there);
    }

    fn handle_gpu_left(&mut self, _now: Timestamp, gpu: GpuId) {
        self.gpus.remove(&gpu);
        self.models.handle_gpu_left(gpu);
        self.rank.handle_gpu_left(gpu);
    }

    fn handle_finished(&mut self, gpu: GpuId, finished_at: Timestamp) {
        self.rank.post_gpu(gpu, GpuUpdate::Finished { finished_at });
    }

    fn handle_loaded(&mut self, _now: Timestamp, gpu: GpuId, model: ModelId, end: LoadEnd) {
        self.rank.post_gpu(gpu, GpuUpdate::Loaded { model, end });
    }

    fn handle_alone(&mut self, now: Timestamp, id: ModelId, of: (u8, u32), alone: Span) {
        self.models.handle_alone(now, id, of, alone);
    }

    fn handle_executed(&mut self, now: Timestamp, id: ModelId, gpu: GpuId, tasks: &[(u8, u32)], took: Span) {
        self.models.handle_executed(now, id, gpu, tasks, took);
    }

    fn handle_samples(&mut self, now: Timestamp, id: ModelId, samples: DynamicTimes) {
        self.models.handle_samples(now, id, samples);
    }

    fn wants_samples(&self) -> bool {
        self.models.wants_samples()
    }

    fn tables_made(&self, id: ModelId) -> u64 {
        self.models.tables_made(id)
    }

    fn request_times(&self, id: ModelId) -> Option<KnownTimes> {
        self.models.request_times(id)
    }

    /// Carries messages until neither side has any left.
    fn handle_timeout(&mut self, now: Timestamp) {
        while let Some(id) = self.models.next_due(now) {
            self.models.handle_price(id, self.rank.price(id));
            self.models.handle_due(now, id);
        }
        loop {
            while let Some(output) = self.models.poll_output() {
                match output {
                    Output::Candidate(model, candidate) => self.rank.post_candidate(now, model, candidate),
                    Output::Background(model, background) => self.rank.post_background(model, background),
                    Output::Gpu(gpu, update) => self.rank.post_gpu(gpu, update),
                    Output::Batch(batch) => self.outputs.push_back(PlannerOutput::Batch(batch)),
                    Output::Dropped { model, task, reason } => {
                        self.outputs.push_back(PlannerOutput::Dropped { model, task, reason });
                    }
                }
            }
            // A candidate may be schedulable as soon as it is known.
            self.rank.settle(now);
            let mut is_silent = true;
            while let Some(message) = self.rank.poll() {
                match message {
                    FromRankThread::Grant(grant) if self.gpus.contains(&grant.gpu) => {
                        self.models.handle_price(grant.model, self.rank.price(grant.model));
                        self.models.handle_grant(now, grant);
                    }
                    FromRankThread::Grant(grant) => self.models.handle_void_grant(now, grant),
                    FromRankThread::Whereabouts(model, whereabouts) => {
                        self.models.handle_whereabouts(now, model, whereabouts);
                    }
                    FromRankThread::Unload { gpu, .. } | FromRankThread::Load { gpu, .. }
                        if !self.gpus.contains(&gpu) => {}
                    FromRankThread::Unload { gpu, model } => {
                        self.outputs.push_back(PlannerOutput::Unload { gpu, model });
                    }
                    FromRankThread::Load { gpu, model, earliest, latest, takes } => {
                        self.outputs.push_back(PlannerOutput::Load { gpu, model, earliest, latest, takes });
                    }
                    FromRankThread::Release(model) => {
                        let averages = self.models.learned(model);
                        let (tasks, samples) = self.models.release(model);
                        self.released.push_back(Released { model, tasks, averages, samples });
                    }
                }
                is_silent = false;
            }
            if is_silent {
                return;
            }
        }
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        match (self.models.poll_timeout(), self.rank.poll_timeout()) {
            (Some(models_at), Some(rank_at)) => Some(models_at.min(rank_at)),
            (models_at, rank_at) => models_at.or(rank_at),
        }
    }

    fn has_mail(&self) -> bool {
        self.rank.has_mail()
    }

    fn poll_released(&mut self) -> Option<Released<P>> {
        self.released.pop_front()
    }

    fn learned(&self, id: ModelId) -> Option<LearnedAverages> {
        self.models.learned(id)
    }

    fn handle_learned(&mut self, now: Timestamp, id: ModelId, learned: &LearnedAverages) {
        self.models.handle_learned(now, id, learned);
    }

    fn poll_output(&mut self) -> Option<PlannerOutput<P>> {
        self.outputs.pop_front()
    }

    fn traffic(&self, now: Timestamp, id: ModelId) -> Option<Traffic> {
        self.models.traffic(now, id)
    }

    fn is_cold(&self, id: ModelId) -> bool {
        self.models.is_cold(id)
    }

    fn queue_length(&self, id: ModelId) -> usize {
        self.models.queue_length(id)
    }

    fn queue_length_of(&self, id: ModelId, priority: u8) -> usize {
        self.models.queue_length_of(id, priority)
    }
}
