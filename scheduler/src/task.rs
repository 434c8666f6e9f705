//! What goes into planners, and what comes out: tasks, what must be known of a model, and final batches.

pub use proto::weights::{PAGE_BYTES, Weights};
use proto::{GpuId, LatencyProfile, ModelId, TaskId, Timestamp};

use crate::{messages::NetworkBudget, task_queue::Queued};

/// A task to run. The payload rides along untouched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task<P> {
    /// The task.
    pub id: TaskId,
    /// When it must have finished on the GPU: the client's deadline less what the way back costs.
    pub deadline: Timestamp,
    /// The smaller, the more important (`priorities`).
    pub priority: u8,
    /// Whatever its owner needs again when the task leaves.
    pub payload: P,
}

/// What a ModelThread must know of a model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// l(b).
    pub profile: LatencyProfile,
    /// Tasks that may wait; one more is refused at once.
    pub queue_max: usize,
    /// What the network costs this model, if that is not what it costs all; the RankThread is to be told the same.
    pub budget: Option<NetworkBudget>,
    /// What its weights take in the memory of GPUs that hold but a part of what they host.
    pub weights: Weights,
}

impl ModelConfig {
    /// Of a model without weights, with what the network costs all.
    #[must_use]
    pub fn new(profile: LatencyProfile, queue_max: usize) -> Self {
        Self { profile, queue_max, budget: None, weights: Weights::default() }
    }
}

/// A GPU whose memory holds a part of the models that it hosts: what is to be in it, loads and unloads decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMemory {
    /// For weights.
    pub pages: u32,
    /// Models whose weights are there.
    pub resident: Vec<ModelId>,
}

/// How a load ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadEnd {
    /// When it did: the way to the GPU is free again.
    pub finished_at: Timestamp,
    /// The weights are there; otherwise nothing of them is, and their pages are free.
    pub is_loaded: bool,
}

/// A final batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch<P> {
    /// The model.
    pub model: ModelId,
    /// The GPU that was granted.
    pub gpu: GpuId,
    /// Until when it was held back on purpose; from then on, if that was before the grant, it waited for a GPU.
    pub due_at: Timestamp,
    /// As [`Grant::timer_at`](crate::Grant::timer_at).
    pub timer_at: Timestamp,
    /// The earliest start.
    pub exec_at: Timestamp,
    /// The latest start: from then on its first task would be late.
    pub latest: Timestamp,
    /// The tasks with the instants they were queued at, nearest deadline first.
    pub tasks: Vec<(Queued, P)>,
}
