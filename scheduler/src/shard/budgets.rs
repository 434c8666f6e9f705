//! What the network costs models: as it was measured, the planner plans with it.

use super::{plans::Done, *};

impl Shard {
    /// A plan has travelled, and mostly its inputs: also if it missed its window for that. Whatever a backend says,
    /// nothing took longer than it is since the plan was sent.
    pub(super) fn on_network_seen(
        &mut self,
        now: Timestamp,
        done: &Done,
        outcome: PlanOutcome,
        (arrived_at, fetched_at): (Timestamp, Timestamp),
    ) {
        let Some((sent_at, _)) = done.sent else { return };
        let fetched_at = match outcome {
            PlanOutcome::Abandoned { .. } => return,
            // No input had come by then.
            PlanOutcome::WindowMissed { rejected_at } if fetched_at <= arrived_at => rejected_at,
            PlanOutcome::WindowMissed { .. } | PlanOutcome::Executed { .. } => fetched_at,
        };
        let seen = |span: Span| span.clamp(Span::ZERO, now - sent_at);
        if self.ctrl.handle_seen(now, seen(arrived_at - sent_at)) {
            self.on_budgets(now);
        }
        // What failed was not read, and what frontends have yet to decode the network does not wait for.
        if !done.failed.is_empty() || done.is_guarded {
            return;
        }
        let data = seen(fetched_at - arrived_at) / done.size as i64;
        if self.models.get_mut(&done.model).is_some_and(|entry| entry.data.handle_seen(now, data)) {
            self.on_budget(now, done.model);
        }
    }

    /// A task has an input of so many bytes.
    pub(super) fn on_input(&mut self, now: Timestamp, model: ModelId, bytes: u32) {
        let Some(entry) = self.models.get_mut(&model) else { return };
        if entry.inputs.handle_input(now, bytes) {
            entry.data.set_configured(entry.inputs.read_time());
            self.on_budget(now, model);
        }
    }

    /// When a task's execution must have ended for its answer to come by `deadline`; `NEVER` if it has none. A task
    /// that a slower network than the configured one leaves no time may still be lucky: it is planned as if the network
    /// were that one.
    pub(super) fn latest_end(&self, now: Timestamp, model: ModelId, deadline: Timestamp) -> Timestamp {
        if deadline == Timestamp::NEVER {
            return deadline;
        }
        let mut ends_by = deadline - self.resp;
        if let Some(entry) = self.models.get(&model) {
            let planned = entry.budget.delay(1);
            let allowed =
                NetworkBudget { ctrl: self.ctrl.allowed(), data_per_task: entry.data.allowed(), ..entry.budget };
            if ends_by < now + planned + self.estimates.profile(model).latency(1) {
                ends_by = deadline - self.resp.min(self.config.resp) + (planned - allowed.delay(1));
            }
        }
        ends_by.clamp(now - DEADLINE_MAX, now + DEADLINE_MAX)
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
