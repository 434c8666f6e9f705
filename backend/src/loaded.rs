//! A model that is ready to run, with what the scheduler is told of it.

use std::sync::Arc;

use proto::{BatchCost, LatencyProfile, Weights, backend_to_scheduler::ModelOffer};
use repository::Model;

use crate::{config::Claim, executor::Executor, staging::ModelShape};

/// A model that is ready to run.
#[derive(Clone)]
pub struct Loaded {
    /// As in the repository, with the executor that the configuration wants for it.
    pub model: Model,
    /// What staging must know of it.
    pub shape: ModelShape,
    /// The GPUs that host it; ascending, none twice.
    pub gpu_indexes: Vec<u32>,
    /// What runs its batches, on whichever GPU.
    pub executor: Arc<dyn Executor>,
    /// l(b).
    pub profile: LatencyProfile,
    /// What a batch takes, if requests choose how large they are.
    pub cost: Option<BatchCost>,
    /// What it takes in the memory of these GPUs, if that is short.
    pub weights: Weights,
    /// Whether it is there all the time.
    pub is_pinned: bool,
}

impl Loaded {
    /// What it claims of GPUs' memory.
    #[must_use]
    pub fn claim(&self) -> Claim<'_> {
        let Self { gpu_indexes, weights, is_pinned, .. } = self;
        Claim { gpu_indexes, pages: weights.pages, is_pinned: *is_pinned }
    }

    /// What the scheduler is told of it.
    #[must_use]
    pub fn offer(&self) -> ModelOffer {
        ModelOffer {
            name: self.model.name.clone(),
            version: self.model.version.clone(),
            profile: self.profile.clone(),
            input_bytes: u32::try_from(self.shape.input_bytes).unwrap_or(u32::MAX),
            gpu_indexes: self.gpu_indexes.clone(),
            weights: self.weights,
            cost: self.cost,
            queue_max: self.model.queue.requests_max(self.model.priorities.levels),
        }
    }
}
