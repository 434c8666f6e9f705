//! What becomes of tasks with an objective, model by model, for whoever advises how many GPUs are needed
//! ([`crate::advice`]). Counted where batches and tasks end anyhow; nothing is planned by it here.

use proto::{BackendId, ModelId, PlanId, Span, Timestamp, scheduler_to_frontend::DropReason};

use super::{Ride, Shard};
use crate::{advice::Served, task::Task};

impl Shard {
    /// A task left its queue without a batch. More GPUs could have saved it, unless nobody wanted it any more, or
    /// nobody hosts its model.
    pub(super) fn count_lost(&mut self, model: ModelId, task: &Task<Ride>, reason: DropReason) {
        let is_want = matches!(reason, DropReason::Deadline | DropReason::QueueFull | DropReason::ColdStart);
        if is_want
            && task.deadline != Timestamp::NEVER
            && let Some(entry) = self.models.get_mut(&model)
        {
            entry.served.lost += 1;
        }
    }

    /// A batch has run for so long, until then. A task is late if its client's deadline was over, whatever the way back
    /// takes.
    pub(super) fn count_served(
        &mut self,
        (backend, plan): (BackendId, PlanId),
        model: ModelId,
        (ended_at, execution): (Timestamp, Span),
    ) {
        let (in_time, late) = self.plans.in_time(backend, plan, ended_at - self.resp);
        if let Some(entry) = self.models.get_mut(&model).filter(|_| in_time + late > 0) {
            entry.served.in_time += in_time;
            entry.served.lost += late;
            entry.served.busy += execution.max(Span::ZERO);
        }
    }

    /// A backend has rejected a batch whose window was over, and with it what its tasks asked for.
    pub(super) fn count_rejected(&mut self, (backend, plan): (BackendId, PlanId), model: ModelId) {
        let (_, lost) = self.plans.in_time(backend, plan, Timestamp::NEVER);
        if let Some(entry) = self.models.get_mut(&model) {
            entry.served.lost += lost;
        }
    }

    /// What was counted since the last time, of each model that has anything to tell; what is asked for of those alone.
    pub(crate) fn take_served(&mut self, now: Timestamp) -> Vec<(ModelId, Served)> {
        let told = self.models.iter_mut().filter(|(_, entry)| !entry.served.is_none());
        let told = told.map(|(&model, entry)| {
            let traffic = self.planner.traffic(now, model);
            (model, Served { traffic, ..std::mem::take(&mut entry.served) })
        });
        told.collect()
    }
}
