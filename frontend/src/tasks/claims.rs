//! Answers that backends say they have written. The scheduler has forgotten such a task, and so nobody would ever end
//! it if the answer does not come: a request hung, and its slot was lost. So an answer is *missed* some time after the
//! backend's word, and its task fails once the backend can reach its slot no more.

use super::*;

/// One that is not here.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) missed_at: Timestamp,
    backend: BackendId,
    task: TaskId,
}

impl Tasks {
    /// A backend says that it has answered these tasks; nearly always they have ended with that.
    pub fn handle_claimed(&mut self, now: Timestamp, backend: BackendId, tasks: &[TaskId]) {
        for &task in tasks {
            let Some((_, group)) = self.groups.range_mut(..=task).next_back() else { continue };
            if let Some(row) = group.row(task)
                && group.claim(row)
            {
                self.claims.push_back(Claim { missed_at: now + Wait::Written.bound(), backend, task });
            }
        }
    }

    /// The answers that are missed by now, by who says that it has written them. Called once for each.
    pub fn take_missed(&mut self, now: Timestamp) -> BTreeMap<BackendId, Vec<TaskId>> {
        let mut missed: BTreeMap<BackendId, Vec<TaskId>> = BTreeMap::new();
        while let Some(Claim { backend, task, .. }) = self.claims.pop_front_if(|claim| claim.missed_at <= now) {
            if self.find(task).is_some_and(|(_, group)| group.is_claimed(task)) {
                missed.entry(backend).or_default().push(task);
            }
        }
        missed
    }

    /// The backend that did not write these answers can reach no slot any more: those that are still missing fail.
    pub fn handle_not_written(&mut self, backend: BackendId, tasks: &[TaskId]) {
        for &task in tasks {
            let Some((first, group)) = self.find(task) else { continue };
            let row = group.row(task).expect("it was found there");
            let request = group.request.as_ref().map(|request| request.id);
            self.end_tasks(first, row..row + 1);
            self.counters.failed += 1;
            self.fail_request(request, InferError::NotWritten { backend: backend.0 });
        }
    }
}
