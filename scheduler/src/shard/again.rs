//! Tasks that a backend was given and has not answered: their frontends are asked, and what has no answer runs again.

use super::*;

impl Shard {
    /// Asks the frontends that are still there about tasks of a backend.
    pub(super) fn doubt(
        &mut self,
        (backend, link): (BackendId, LinkId),
        is_given_back: bool,
        mut tasks: Vec<RunningTask>,
    ) {
        tasks.retain(|task| self.frontends.contains_key(&task.id.frontend()));
        for (frontend, question) in self.fences.ask((backend, link), is_given_back, tasks) {
            self.outputs.push_back(ShardOutput::ToFrontend(frontend, question));
        }
    }

    /// A backend gave back tasks, and their frontend has said that they have no answer.
    pub(super) fn on_given_back(
        &mut self,
        now: Timestamp,
        (frontend, backend): (FrontendId, BackendId),
        tasks: Vec<RunningTask>,
    ) {
        let in_use = self.gpus.values().map(|gpu| gpu.backend).collect();
        let until = self.given_back.until(now, (frontend, backend), &in_use);
        for task in tasks {
            let until = until.min(self.last_chance(&task));
            if until <= now {
                self.on_unanswered(now, task);
            } else {
                self.given_back.set_aside(until, task);
            }
        }
    }

    /// What has waited for as long as it should is planned again.
    pub(super) fn plan_again(&mut self, now: Timestamp) {
        while let Some(task) = self.given_back.take_due(now) {
            self.on_unanswered(now, task);
        }
    }

    /// When a task must be planned at the latest; at once, if its model is another thread's.
    fn last_chance(&self, task: &RunningTask) -> Timestamp {
        let Some(entry) = self.models.get(&task.model) else { return Timestamp::PAST };
        task.deadline - (entry.budget.delay(1) + entry.budget.jitter + self.estimates.profile(task.model).latency(1))
    }

    /// A task's backend was fenced before it answered: run it again if there is time, with a new attempt number, so
    /// that whatever the lost backend still does cannot be taken for the answer.
    pub(super) fn on_unanswered(&mut self, now: Timestamp, task: RunningTask) {
        let attempt = (task.attempt + 1) % ImmediateData::ATTEMPTS;
        let RunningTask { id, model, deadline, priority, application, losses, slot, .. } = task;
        let is_served = self.frontends.get(&id.frontend()).is_some_and(|frontend| frontend.is_served);
        let (length, payload) = (slot.input_bytes, Ride { attempt, losses, slot });
        let task = Task { id, deadline, priority, application, length, payload };
        let Some(entry) = self.models.get(&model) else {
            // What its number meant here is not known any more.
            return self.forward(model, Forwarded::Task(task, Application::NONE));
        };
        let soonest_end = now + entry.budget.delay(1) + self.estimates.profile(model).latency(1);
        if soonest_end > deadline || losses >= LOSSES_MAX || entry.hosted.is_err() || !is_served {
            // What an earlier primary had may only have come too late.
            let reason =
                if losses == 0 && soonest_end > deadline { DropReason::Deadline } else { DropReason::BackendLost };
            return self.drop_task(id, reason);
        }
        self.planner.handle_submit(now, model, task);
    }
}
