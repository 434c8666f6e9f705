//! A planner under test: times are milliseconds, outputs are text. All models have l(b) = b + 5 ms and up to 64 tasks
//! in a batch, all GPUs host all models, the network costs nothing.

use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};

use crate::{
    messages::NetworkBudget,
    planner::{Planner, PlannerOutput},
    policy::Policy,
    task::{GpuMemory, LoadEnd, ModelConfig, Task, Weights},
};

pub(crate) struct Bench {
    pub planner: Box<dyn Planner<()>>,
    tasks: u64,
}

fn at(ms: f64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis_f64(ms)
}

impl Bench {
    pub(crate) fn new(policy: Policy, gpus: u32, models: u32) -> Self {
        Self::with_memory(policy, gpus, models, None)
    }

    /// Each GPU has room for so many models at once, and a load takes 8 ms, or 58 from disk.
    pub(crate) fn paged(policy: Policy, gpus: u32, models: u32, room: u32) -> Self {
        Self::with_memory(policy, gpus, models, Some(GpuMemory::empty(7 * room)))
    }

    /// The same with one GPU that has some models in memory from the start; the first one stays there.
    pub(crate) fn pinned(policy: Policy, models: u32, room: u32, resident: &[u32]) -> Self {
        let resident: Vec<_> = resident.iter().copied().map(ModelId).collect();
        let pinned = resident[..1].to_vec();
        Self::with_memory(policy, 1, models, Some(GpuMemory { resident, pinned, ..GpuMemory::empty(7 * room) }))
    }

    fn with_memory(policy: Policy, gpus: u32, models: u32, memory: Option<GpuMemory>) -> Self {
        let mut planner = policy.planner(NetworkBudget::default());
        let paged = Weights { pages: 7, load: Span::from_millis(8), read: Span::from_millis(50) };
        let weights = memory.as_ref().map_or(Weights::default(), |_| paged);
        for id in (0..models).map(ModelId) {
            let profile = LatencyProfile::linear(1.0, 5.0, 64).unwrap();
            planner.handle_model(at(0.0), id, ModelConfig { weights, ..ModelConfig::new(profile, 1000) });
        }
        for gpu in (0..gpus).map(GpuId) {
            planner.handle_gpu_joined(at(0.0), gpu, (0..models).map(ModelId).collect(), memory.clone());
        }
        Self { planner, tasks: 0 }
    }

    pub(crate) fn loaded(&mut self, now: f64, gpu: u32, model: u32, is_loaded: bool) {
        let end = LoadEnd { finished_at: at(now), is_loaded };
        self.planner.handle_loaded(at(now), GpuId(gpu), ModelId(model), end);
    }

    pub(crate) fn host_memory(&mut self, gpu: u32, model: u32, is_there: bool) {
        self.planner.handle_host_memory(GpuId(gpu), ModelId(model), is_there);
    }

    /// Tasks are numbered from 0.
    pub(crate) fn submit(&mut self, now: f64, model: u32, deadline: f64) {
        self.submit_again(now, model, self.tasks, deadline);
        self.tasks += 1;
    }

    pub(crate) fn submit_again(&mut self, now: f64, model: u32, task: u64, deadline: f64) {
        let task =
            Task { id: TaskId(task), deadline: at(deadline), priority: 0, application: 0, length: 0, payload: () };
        self.planner.handle_submit(at(now), ModelId(model), task);
    }

    pub(crate) fn finished(&mut self, gpu: u32, finished_at: f64) {
        self.planner.handle_finished(GpuId(gpu), at(finished_at));
    }

    pub(crate) fn timeout(&self) -> Option<f64> {
        self.planner.poll_timeout().map(|at| (at - Timestamp::ZERO).as_millis_f64())
    }

    pub(crate) fn decide(&mut self, now: f64) -> Vec<String> {
        self.planner.handle_timeout(at(now));
        let text = |output| match output {
            PlannerOutput::Batch(batch) => {
                let tasks: Vec<_> = batch.tasks.iter().map(|(key, ())| key.id.0).collect();
                let exec_at = (batch.exec_at - Timestamp::ZERO).as_millis_f64();
                format!("model {} on GPU {} at {exec_at}: {tasks:?}", batch.model.0, batch.gpu.0)
            }
            PlannerOutput::Load { gpu, model, earliest, .. } => {
                let earliest = (earliest - Timestamp::ZERO).as_millis_f64();
                format!("load model {} into GPU {} at {earliest}", model.0, gpu.0)
            }
            PlannerOutput::Unload { gpu, model } => format!("unload model {} from GPU {}", model.0, gpu.0),
            PlannerOutput::Preempt(gpu) => format!("preempt GPU {}", gpu.0),
            PlannerOutput::Dropped { task, reason, .. } => format!("dropped [{}]: {reason:?}", task.id.0),
        };
        std::iter::from_fn(|| self.planner.poll_output()).map(text).collect()
    }
}
