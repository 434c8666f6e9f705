//! ModelThread and RankThread as one planner: carries the messages between them in place, on one thread.

use std::collections::VecDeque;

use proto::{GpuId, LatencyProfile, ModelId, TaskId, Timestamp};

use crate::{
    messages::{GpuUpdate, NetworkBudget},
    model_thread::{ModelConfig, ModelThread, Output, Task},
    planner::{Planner, PlannerOutput},
    policy::Policy,
    rank_thread::RankThread,
};

/// Any policy of windows (`policy::BatchPolicy`).
#[derive(Debug)]
pub struct Matchmaker<P> {
    models: ModelThread<P>,
    rank: RankThread,
    outputs: VecDeque<PlannerOutput<P>>,
}

impl<P> Matchmaker<P> {
    /// Without models and GPUs.
    ///
    /// # Panics
    /// If the policy has no windows (as [`ModelThread::new`]).
    #[must_use]
    pub fn new(budget: NetworkBudget, policy: Policy) -> Self {
        Self { models: ModelThread::new(budget, policy), rank: RankThread::new(budget), outputs: VecDeque::new() }
    }
}

impl<P: Send> Planner<P> for Matchmaker<P> {
    fn handle_model(&mut self, now: Timestamp, id: ModelId, config: ModelConfig) {
        if let Some(budget) = config.budget {
            self.rank.handle_model_budget(id, budget);
        }
        self.models.handle_model(now, id, config);
    }

    fn handle_gpu_profile(&mut self, id: ModelId, gpu: GpuId, profile: Option<LatencyProfile>) {
        self.models.handle_gpu_profile(id, gpu, profile);
    }

    fn handle_unhosted(&mut self, now: Timestamp, id: ModelId) {
        self.models.handle_unhosted(now, id);
    }

    fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>) {
        self.models.handle_submit(now, id, task);
    }

    fn handle_cancel(&mut self, now: Timestamp, id: ModelId, task: TaskId) {
        self.models.handle_cancel(now, id, task);
    }

    fn handle_owner_left(&mut self, now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool) {
        self.models.handle_owner_left(now, is_owned);
    }

    fn handle_gpu_joined(&mut self, free_at: Timestamp, gpu: GpuId, models: Vec<ModelId>) {
        self.rank.handle_gpu_joined(free_at, gpu, models);
    }

    fn handle_gpu_left(&mut self, _now: Timestamp, gpu: GpuId) {
        self.models.handle_gpu_left(gpu);
        self.rank.handle_gpu_left(gpu);
    }

    fn handle_finished(&mut self, gpu: GpuId, finished_at: Timestamp) {
        self.rank.handle_gpu(gpu, GpuUpdate::Finished { finished_at });
    }

    /// Carries messages until neither thread has any left.
    fn handle_timeout(&mut self, now: Timestamp) {
        self.models.handle_timeout(now);
        loop {
            while let Some(output) = self.models.poll_output() {
                match output {
                    Output::Candidate(model, candidate) => self.rank.handle_candidate(now, model, candidate),
                    Output::Gpu(gpu, update) => self.rank.handle_gpu(gpu, update),
                    Output::Batch(batch) => self.outputs.push_back(PlannerOutput::Batch(batch)),
                    Output::Dropped { model, task, reason } => {
                        self.outputs.push_back(PlannerOutput::Dropped { model, task, reason });
                    }
                }
            }
            // A candidate may be schedulable as soon as it is known.
            self.rank.handle_timeout(now);
            let mut is_silent = true;
            while let Some(grant) = self.rank.poll_grant() {
                self.models.handle_grant(now, grant);
                is_silent = false;
            }
            if is_silent {
                return;
            }
        }
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        [self.models.poll_timeout(), self.rank.poll_timeout()].into_iter().flatten().min()
    }

    fn poll_output(&mut self) -> Option<PlannerOutput<P>> {
        self.outputs.pop_front()
    }

    fn queue_length(&self, id: ModelId) -> usize {
        self.models.queue_length(id)
    }
}
