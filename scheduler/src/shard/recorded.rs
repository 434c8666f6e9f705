//! What is left for whoever looks at the last seconds ([`history`](crate::history)): batches and loads as they end, and
//! tasks as this thread drops them.

use proto::backend_to_scheduler::WeightsOutcome;

use super::*;
use crate::history::{Event, Lane};

impl Shard {
    /// What happens is left there from now on.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// A plan has ended.
    pub(super) fn note_done(&mut self, now: Timestamp, backend: BackendId, done: &Done, outcome: PlanOutcome) {
        let Some(recorder) = &mut self.recorder else { return };
        let (model, window, tasks) = (done.model, done.window, u32::try_from(done.tasks).unwrap_or(u32::MAX));
        let event = match outcome {
            PlanOutcome::Executed { started_at, finished_at } => {
                Event::Batch { model, tasks, window, started_at, finished_at }
            }
            PlanOutcome::WindowMissed { rejected_at: at } | PlanOutcome::Abandoned { abandoned_at: at } => {
                Event::Missed { model, tasks, window, at }
            }
        };
        recorder.note(now, Lane { backend, gpu: done.gpu_index }, event);
    }

    /// Weights are in a GPU's memory, or are not.
    pub(super) fn note_loaded(&mut self, now: Timestamp, lane: Lane, model: ModelId, outcome: WeightsOutcome) {
        if let (Some(recorder), WeightsOutcome::Loaded { started_at, finished_at, .. }) = (&mut self.recorder, outcome)
        {
            recorder.note(now, lane, Event::Load { model, started_at, finished_at });
        }
    }

    /// A task that no backend has is dropped.
    pub(super) fn refuse_task(&mut self, now: Timestamp, (model, task): (ModelId, TaskId), reason: DropReason) {
        if let Some(recorder) = &mut self.recorder {
            recorder.note_dropped(now, model, reason);
        }
        self.drop_task(task, reason);
    }
}
