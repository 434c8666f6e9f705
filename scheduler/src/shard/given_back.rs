//! Tasks that backends gave back untouched, with no link to blame. The link may be silent, which is found out in
//! seconds only; and a backend that gives back at once has a free GPU, so tasks that were planned again at once would
//! go there again, over and over. They are set aside instead: longer each time, until the backend has answered a task
//! of that frontend, and never for longer than their deadlines allow. Where other backends are in use nothing waits, as
//! one of them may run it.

use std::collections::BTreeMap;

use proto::{BackendId, FrontendId, Span, TaskId, Timestamp, backoff::Backoff};

use super::plans::RunningTask;

/// The first wait of a frontend's tasks after a backend has given some back; it doubles.
const WAIT_MIN: Span = Span::from_millis(10);
/// The longest such wait.
const WAIT_MAX: Span = Span::from_millis(500);

/// Who gives back whose tasks, and those that wait. As many of these at most as frontends may have under way.
#[derive(Debug, Default)]
pub(super) struct GivenBack {
    pairs: BTreeMap<(FrontendId, BackendId), Pair>,
    /// Tasks by when they are planned again, and in the order in which they came.
    aside: BTreeMap<(Timestamp, u64), (BackendId, RunningTask)>,
    came: u64,
}

#[derive(Debug)]
struct Pair {
    backoff: Backoff,
    /// What is given back until then waits until then.
    until: Timestamp,
}

impl GivenBack {
    /// A backend has given back tasks of a frontend. Until when they wait.
    pub(super) fn until(&mut self, now: Timestamp, (frontend, backend): (FrontendId, BackendId)) -> Timestamp {
        let new = || Pair { backoff: Backoff::new(WAIT_MIN, WAIT_MAX), until: now };
        let pair = self.pairs.entry((frontend, backend)).or_insert_with(new);
        if pair.until <= now {
            pair.until = pair.backoff.handle_failure(now);
        }
        pair.until
    }

    pub(super) fn set_aside(&mut self, until: Timestamp, backend: BackendId, task: RunningTask) {
        self.aside.insert((until, self.came), (backend, task));
        self.came += 1;
    }

    /// The next task that has waited.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Option<RunningTask> {
        let first = self.aside.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove().1)
    }

    /// A scan: what it is asked for is rare.
    fn take(&mut self, is_meant: impl Fn(BackendId, &RunningTask) -> bool) -> Vec<RunningTask> {
        let taken = self.aside.extract_if(.., |_, (backend, task)| is_meant(*backend, task));
        taken.map(|(_, (_, task))| task).collect()
    }

    /// A backend has answered a frontend's task. Yields what need not wait any more.
    pub(super) fn handle_answered(&mut self, frontend: FrontendId, backend: BackendId) -> Vec<RunningTask> {
        match self.pairs.remove(&(frontend, backend)) {
            Some(_) => self.take(|from, task| from == backend && task.id.frontend() == frontend),
            None => Vec::new(),
        }
    }

    /// A backend is gone. Yields what it had given back.
    pub(super) fn handle_backend_left(&mut self, backend: BackendId) -> Vec<RunningTask> {
        self.pairs.retain(|(_, other), _| *other != backend);
        self.take(|from, _| from == backend)
    }

    /// A frontend is gone, or not served: yields its tasks.
    pub(super) fn forget_frontend(&mut self, frontend: FrontendId) -> Vec<RunningTask> {
        self.pairs.retain(|(other, _), _| *other != frontend);
        self.take(|_, task| task.id.frontend() == frontend)
    }

    /// A task's client hung up. Whether it waited here, which it does no more.
    pub(super) fn handle_cancelled(&mut self, id: TaskId) -> bool {
        !self.take(|_, task| task.id == id).is_empty()
    }

    /// When [`Self::take_due`] has something to do.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        Some(self.aside.first_key_value()?.0.0)
    }

    /// Tasks that wait.
    pub(super) fn len(&self) -> usize {
        self.aside.len()
    }
}
