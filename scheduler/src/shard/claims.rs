//! What backends say that they have answered. A task ends here with that word, and at its frontend with the answer
//! itself; a frontend that is told of the word, a few times a second, misses an answer that was never written.

use std::collections::BTreeMap;

use proto::{
    BackendId, FrontendId, Span, TaskId, Timestamp,
    scheduler_to_frontend::{ANSWERED_TASKS_MAX, SchedulerToFrontend},
};

use super::plans::RunningTask;

/// How often frontends are told.
const TELL_INTERVAL: Span = Span::from_millis(250);

/// Tasks that their frontends have not been told of; at most [`ANSWERED_TASKS_MAX`] for each frontend and backend.
#[derive(Debug, Default)]
pub(super) struct Claims {
    tasks: BTreeMap<(FrontendId, BackendId), Vec<TaskId>>,
    /// When frontends are told, if there is anything to tell.
    tell_at: Timestamp,
}

impl Claims {
    /// A backend says that it has answered some tasks of one frontend that is here. Yields what is to be told at once,
    /// as there is more than fits a message.
    pub(super) fn note(
        &mut self,
        now: Timestamp,
        (frontend, backend): (FrontendId, BackendId),
        tasks: &[RunningTask],
    ) -> Vec<(FrontendId, SchedulerToFrontend)> {
        if self.tasks.is_empty() {
            self.tell_at = now + TELL_INTERVAL;
        }
        let (claimed, mut told) = (self.tasks.entry((frontend, backend)).or_default(), Vec::new());
        for chunk in tasks.chunks(ANSWERED_TASKS_MAX) {
            if claimed.len() + chunk.len() > ANSWERED_TASKS_MAX {
                let tasks = std::mem::take(claimed);
                told.push((frontend, SchedulerToFrontend::Answered { backend, tasks }));
            }
            claimed.extend(chunk.iter().map(|task| task.id));
        }
        told
    }

    /// What frontends are to be told now.
    pub(super) fn take_due(&mut self, now: Timestamp) -> impl Iterator<Item = (FrontendId, SchedulerToFrontend)> {
        let is_due = self.poll_timeout().is_some_and(|at| at <= now);
        let tasks = if is_due { std::mem::take(&mut self.tasks) } else { BTreeMap::new() };
        let told = |((frontend, backend), tasks)| (frontend, SchedulerToFrontend::Answered { backend, tasks });
        tasks.into_iter().map(told)
    }

    /// When [`Self::take_due`] has something.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        (!self.tasks.is_empty()).then_some(self.tell_at)
    }

    pub(super) fn forget_frontend(&mut self, frontend: FrontendId) {
        self.tasks.retain(|(other, _), _| *other != frontend);
    }
}
