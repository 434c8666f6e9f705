//! Tasks that backends gave back untouched, with no link to blame. The link may be silent, which is found out in
//! seconds only; and a backend that gives back at once has a free GPU, so tasks that were planned again at once would
//! go there again, over and over. A frontend is *doubted* by each backend that gave back its tasks and has answered
//! none since:
//!
//! - While all backends in use doubt a frontend (it stands still), its tasks wait: longer each time, as one, however
//!   many backends there are.
//! - While some do not, what a backend gives back for the first time is planned again at once; later it waits for a
//!   moment, or until as many tasks have been answered.
//!
//! No task waits for longer than its deadline allows.

use std::collections::{BTreeMap, BTreeSet};

use proto::{BackendId, FrontendId, Span, TaskId, Timestamp, backoff::Backoff};

use super::plans::RunningTask;

/// The first wait of a frontend's tasks after all backends have given some back; it doubles. Also each wait for those
/// that have not.
const WAIT_MIN: Span = Span::from_millis(10);
/// The longest such wait.
const WAIT_MAX: Span = Span::from_millis(500);

/// Whose tasks are given back, and those that wait. As many of these at most as frontends may have under way.
#[derive(Debug, Default)]
pub(super) struct GivenBack {
    doubts: BTreeMap<FrontendId, Doubt>,
    /// Tasks by when they are planned again.
    aside: BTreeMap<(Timestamp, TaskId), RunningTask>,
    /// Until when each of these waits; those of a frontend stand together.
    waits: BTreeMap<TaskId, Timestamp>,
}

/// That backends doubt a frontend.
#[derive(Debug)]
struct Doubt {
    by: BTreeSet<BackendId>,
    backoff: Backoff,
    /// While all backends doubt: what is given back until then waits until then.
    until: Timestamp,
}

impl GivenBack {
    /// A backend has given back tasks of a frontend. Until when they wait, where `in_use` are all backends that may be
    /// given tasks.
    pub(super) fn until(
        &mut self,
        now: Timestamp,
        (frontend, backend): (FrontendId, BackendId),
        in_use: &BTreeSet<BackendId>,
    ) -> Timestamp {
        if !in_use.contains(&backend) {
            return now;
        }
        let new = || Doubt { by: BTreeSet::new(), backoff: Backoff::new(WAIT_MIN, WAIT_MAX), until: now };
        let doubt = self.doubts.entry(frontend).or_insert_with(new);
        let is_new = doubt.by.insert(backend);
        if !in_use.is_subset(&doubt.by) {
            return if is_new { now } else { now + WAIT_MIN };
        }
        if doubt.until <= now {
            doubt.until = doubt.backoff.handle_failure(now);
        }
        doubt.until
    }

    pub(super) fn set_aside(&mut self, until: Timestamp, task: RunningTask) {
        self.waits.insert(task.id, until);
        self.aside.insert((until, task.id), task);
    }

    /// The next task that has waited.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Option<RunningTask> {
        let first = self.aside.first_entry().filter(|first| first.key().0 <= now)?;
        let task = first.remove();
        self.waits.remove(&task.id);
        Some(task)
    }

    /// A backend has answered tasks of a frontend. Yields what need not wait any more: all, if nobody doubts it now;
    /// as many, if others do.
    pub(super) fn handle_answered(
        &mut self,
        (frontend, backend): (FrontendId, BackendId),
        answered: usize,
    ) -> Vec<RunningTask> {
        let Some(doubt) = self.doubts.get_mut(&frontend) else { return Vec::new() };
        doubt.by.remove(&backend);
        if doubt.by.is_empty() {
            return self.forget_frontend(frontend);
        }
        doubt.backoff.handle_success();
        self.take_first(frontend, answered)
    }

    /// A backend is gone. Yields the tasks of those that it doubted.
    pub(super) fn handle_backend_left(&mut self, backend: BackendId) -> Vec<RunningTask> {
        let doubts = self.doubts.iter_mut();
        let doubted: Vec<FrontendId> =
            doubts.filter_map(|(&frontend, doubt)| doubt.by.remove(&backend).then_some(frontend)).collect();
        self.doubts.retain(|_, doubt| !doubt.by.is_empty());
        doubted.into_iter().flat_map(|frontend| self.take_first(frontend, usize::MAX)).collect()
    }

    /// A frontend is gone, or not served, or nobody doubts it: yields its tasks.
    pub(super) fn forget_frontend(&mut self, frontend: FrontendId) -> Vec<RunningTask> {
        self.doubts.remove(&frontend);
        self.take_first(frontend, usize::MAX)
    }

    /// A task's client hung up. Whether it waited here, which it does no more.
    pub(super) fn handle_cancelled(&mut self, id: TaskId) -> bool {
        self.take(id).is_some()
    }

    /// When [`Self::take_due`] has something to do.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        Some(self.aside.first_key_value()?.0.0)
    }

    /// Tasks that wait.
    pub(super) fn len(&self) -> usize {
        self.aside.len()
    }

    /// A frontend's tasks, at most so many, as they were submitted.
    fn take_first(&mut self, frontend: FrontendId, most: usize) -> Vec<RunningTask> {
        let waits = self.waits.range(TaskId::new(frontend, 0)..).map(|(&id, _)| id);
        let first: Vec<TaskId> = waits.take_while(|id| id.frontend() == frontend).take(most).collect();
        first.into_iter().filter_map(|id| self.take(id)).collect()
    }

    fn take(&mut self, id: TaskId) -> Option<RunningTask> {
        let until = self.waits.remove(&id)?;
        self.aside.remove(&(until, id))
    }
}
