//! Weights on their way into GPUs' memory: what planners want of it goes to backends, and what became of it comes back.

use proto::{backend_to_scheduler::WeightsOutcome, weights::LOAD_MAX};

use super::*;
use crate::{history::Lane, task::LoadEnd};

impl Shard {
    /// Tells a GPU's backend something; nothing if it has left.
    pub(super) fn tell_gpu(&mut self, gpu: GpuId, message: SchedulerToBackend) {
        if let Some(&UsedGpu { backend, .. }) = self.gpus.get(&gpu) {
            self.outputs.push_back(ShardOutput::ToBackend(backend, message));
        }
    }

    /// A planner wants weights in a GPU's memory.
    pub(super) fn on_load(
        &mut self,
        gpu: GpuId,
        model: ModelId,
        (earliest, latest): (Timestamp, Timestamp),
        duration: Span,
    ) {
        if let Some(entry) = self.gpus.get_mut(&gpu) {
            entry.loads.insert(model, Predicted { duration, ends_at: earliest + duration });
        }
        self.tell_gpu(gpu, SchedulerToBackend::LoadWeights { gpu, model, earliest, latest });
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
        let Some(entry) = self.gpus.get_mut(&gpu).filter(|entry| entry.backend == backend) else { return };
        if entry.paged.binary_search(&model).is_err() {
            return;
        }
        if let WeightsOutcome::Loaded { started_at, finished_at, read } = outcome
            && let Some(predicted) = entry.loads.get(&model)
        {
            self.predictions.handle_ended(Action::Load, *predicted, finished_at - started_at, finished_at);
            if let Some(entry) = self.models.get(&model) {
                let copied = finished_at - started_at - read.clamp(Span::ZERO, LOAD_MAX);
                self.estimates.handle_loaded(model, entry.weights.load, copied);
            }
        }
        entry.loads.remove(&model);
        let lane = Lane { backend, gpu: entry.index };
        // What a backend says of its clock must not keep the way to its GPU from being free.
        let end = match outcome {
            WeightsOutcome::Loaded { finished_at, .. } => {
                LoadEnd { finished_at: finished_at.min(now), is_loaded: true }
            }
            WeightsOutcome::Failed { failed_at } => LoadEnd { finished_at: failed_at.min(now), is_loaded: false },
        };
        self.note_loaded(now, lane, model, outcome);
        self.follow_estimates(now);
        self.planner.handle_loaded(now, gpu, model, end);
    }
}
