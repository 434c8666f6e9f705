//! What goes into planners, and what comes out: tasks, what must be known of a model, and final batches.

pub use proto::weights::{PAGE_BYTES, Weights};
use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};

use crate::{dynamic::BatchCost, messages::NetworkBudget, predictions::Predicted, task_queue::Queued};

/// A task to run. The payload rides along untouched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task<P> {
    /// The task.
    pub id: TaskId,
    /// When it must have finished on the GPU: the client's deadline less what the way back costs. `NEVER` if it has no
    /// objective: it runs when a GPU has nothing else to do.
    pub deadline: Timestamp,
    /// The smaller, the more important (`priorities`).
    pub priority: u8,
    /// Of a dynamic model: the application that it is of, whose earlier tasks say what it may take ([`dynamic`]).
    ///
    /// [`dynamic`]: crate::dynamic
    pub application: u8,
    /// Of a dynamic model whose tasks choose how long they are: what its input takes up, in bytes. 0: that says
    /// nothing.
    pub length: u32,
    /// Whatever its owner needs again when the task leaves.
    pub payload: P,
}

/// What stands for the deadline of a task without an objective under the published policies, which know only tasks with
/// one: so long after it came that it gives way to all others.
pub(crate) const FAR: Span = Span::from_millis(24 * 3_600_000);

/// What a ModelThread must know of a model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// l(b).
    pub profile: LatencyProfile,
    /// Tasks that may wait, and as many without an objective; one more is refused at once.
    pub queue_max: usize,
    /// What the network costs this model, if that is not what it costs all; the RankThread is to be told the same.
    pub budget: Option<NetworkBudget>,
    /// What its weights take in the memory of GPUs that hold but a part of what they host.
    pub weights: Weights,
    /// If what a batch takes depends on its tasks; then l(b) is the mean.
    pub dynamic: Option<BatchCost>,
    /// What GPU time is worth to the model's owner, if that is not what it is worth to all; as the model comes.
    pub gpu_price: Option<f64>,
}

impl ModelConfig {
    /// Of a model without weights, with what the network costs all.
    #[must_use]
    pub fn new(profile: LatencyProfile, queue_max: usize) -> Self {
        Self { profile, queue_max, budget: None, weights: Weights::default(), dynamic: None, gpu_price: None }
    }
}

/// A GPU whose memory holds a part of the models that it hosts: what is to be in it, loads and unloads decide.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuMemory {
    /// For weights.
    pub pages: u32,
    /// Models whose weights are there.
    pub resident: Vec<ModelId>,
    /// Of these, those that stay there.
    pub pinned: Vec<ModelId>,
    /// Models that are not in its machine's host memory: their loads read them from disk first.
    pub on_disk: Vec<ModelId>,
}

impl GpuMemory {
    /// Empty, on a machine whose host memory holds all weights.
    #[must_use]
    pub fn empty(pages: u32) -> Self {
        Self { pages, ..Self::default() }
    }
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
    /// How long it is planned to run.
    pub execution: Span,
    /// The tasks with the instants they were queued at, nearest deadline first.
    pub tasks: Vec<(Queued, P)>,
}

impl<P> Batch<P> {
    /// What is planned of it.
    #[must_use]
    pub fn predicted(&self) -> Predicted {
        Predicted { duration: self.execution, ends_at: self.exec_at + self.execution }
    }
}
