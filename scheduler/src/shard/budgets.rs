//! What the network costs models: as it was measured, the planner plans with it.

use super::*;

impl Shard {
    /// A plan and its inputs have travelled.
    pub(super) fn on_network_seen(&mut self, now: Timestamp, model: ModelId, (ctrl, data): (Span, Span)) {
        if self.ctrl.handle_seen(now, ctrl) {
            self.on_budgets(now);
        }
        if self.models.get_mut(&model).is_some_and(|entry| entry.data.handle_seen(now, data)) {
            self.on_budget(now, model);
        }
    }

    /// A batch was made so long after the timer for it was due.
    pub(super) fn on_late(&mut self, now: Timestamp, lateness: Span) {
        if self.lateness.handle_seen(now, lateness) {
            self.on_budgets(now);
        }
    }

    pub(super) fn on_budgets(&mut self, now: Timestamp) {
        for model in self.models.keys().copied().collect::<Vec<_>>() {
            self.on_budget(now, model);
        }
    }

    /// The planner is told what the network costs a model, and control, which tells the RankThread and frontends.
    pub(super) fn on_budget(&mut self, now: Timestamp, model: ModelId) {
        let Some(entry) = self.models.get_mut(&model) else { return };
        let budget = NetworkBudget {
            ctrl: self.ctrl.planned(),
            data_per_task: entry.data.planned(),
            jitter: self.lateness.planned(),
        };
        if entry.budget != budget {
            entry.budget = budget;
            self.plan_with(now, model);
        }
    }
}
