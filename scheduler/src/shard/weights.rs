//! Weights on their way into GPUs' memory: what planners want of it goes to backends, and what became of it comes back.

use proto::backend_to_scheduler::WeightsOutcome;

use super::*;
use crate::task::LoadEnd;

impl Shard {
    /// Tells a GPU's backend something; nothing if it has left.
    pub(super) fn tell_gpu(&mut self, gpu: GpuId, message: SchedulerToBackend) {
        if let Some(&UsedGpu { backend, .. }) = self.gpus.get(&gpu) {
            self.outputs.push_back(ShardOutput::ToBackend(backend, message));
        }
    }

    /// Weights are in a GPU's memory, or are not.
    pub(super) fn on_weights_loaded(
        &mut self,
        now: Timestamp,
        (backend, gpu): (BackendId, GpuId),
        model: ModelId,
        outcome: WeightsOutcome,
    ) {
        // It may have left meanwhile.
        let Some(entry) = self.gpus.get(&gpu).filter(|entry| entry.backend == backend) else { return };
        if entry.paged.binary_search(&model).is_err() {
            return;
        }
        // What a backend says of its clock must not keep the way to its GPU from being free.
        let end = match outcome {
            WeightsOutcome::Loaded { finished_at, .. } => {
                LoadEnd { finished_at: finished_at.min(now), is_loaded: true }
            }
            WeightsOutcome::Failed { failed_at } => LoadEnd { finished_at: failed_at.min(now), is_loaded: false },
        };
        self.planner.handle_loaded(now, gpu, model, end);
    }
}
