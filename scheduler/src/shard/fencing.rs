//! Fencing: before a task runs again elsewhere, its frontend moves the suspected backend's queue pair to ERROR and
//! says which of the tasks have no answer (ARCHITECTURE.md, "When something fails").
//!
//! A task is *in doubt* from the moment its backend is lost, or reports that an answer may not have arrived, until its
//! frontend confirms. Nothing times out here: a frontend that does not confirm is itself lost, by its heartbeat, and
//! its tasks with it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{
    BackendId, FrontendId, LinkId, TaskId,
    scheduler_to_frontend::{FENCED_TASKS_MAX, SchedulerToFrontend},
};

use super::plans::RunningTask;

/// Tasks in doubt, by who was asked about them.
#[derive(Debug, Default)]
pub(super) struct Fences {
    /// Questions without an answer yet, oldest first: a connection keeps order, so answers come in that order.
    asked: BTreeMap<(FrontendId, BackendId), VecDeque<Question>>,
}

#[derive(Debug)]
struct Question {
    tasks: BTreeMap<TaskId, RunningTask>,
    is_given_back: bool,
}

/// What a frontend's confirmation says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Confirmed {
    /// Tasks that have no answer and cannot get one any more from that backend.
    pub(super) again: Vec<RunningTask>,
    /// How many of those asked about have been answered.
    pub(super) answered: usize,
    /// The backend had given them back, and no link was to blame.
    pub(super) is_given_back: bool,
}

/// A frontend confirmed a fence that nobody asked it for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotAsked;

impl Fences {
    /// Puts tasks of a backend in doubt, and yields the questions to send: for each frontend as many messages as its
    /// tasks need.
    pub(super) fn ask(
        &mut self,
        (backend, link): (BackendId, LinkId),
        is_given_back: bool,
        tasks: impl IntoIterator<Item = RunningTask>,
    ) -> Vec<(FrontendId, SchedulerToFrontend)> {
        let mut by_frontend: BTreeMap<FrontendId, Vec<RunningTask>> = BTreeMap::new();
        for task in tasks {
            by_frontend.entry(task.id.frontend()).or_default().push(task);
        }
        let mut questions = Vec::new();
        for (frontend, tasks) in by_frontend {
            for chunk in tasks.chunks(FENCED_TASKS_MAX) {
                let tasks = chunk.iter().map(|task| task.id).collect();
                questions.push((frontend, SchedulerToFrontend::Fence { backend, link, tasks }));
                let tasks = chunk.iter().map(|task| (task.id, *task)).collect();
                self.asked.entry((frontend, backend)).or_default().push_back(Question { tasks, is_given_back });
            }
        }
        questions
    }

    /// Asks for the end of a link, whoever it carries something for. It is confirmed before whatever is asked later.
    pub(super) fn ask_link(
        &mut self,
        frontend: FrontendId,
        (backend, link): (BackendId, LinkId),
    ) -> SchedulerToFrontend {
        self.asked
            .entry((frontend, backend))
            .or_default()
            .push_back(Question { tasks: BTreeMap::new(), is_given_back: false });
        SchedulerToFrontend::Fence { backend, link, tasks: Vec::new() }
    }

    /// Takes in a confirmation. Tasks that were not asked about are ignored.
    pub(super) fn handle_fenced(
        &mut self,
        frontend: FrontendId,
        backend: BackendId,
        unanswered: &[TaskId],
    ) -> Result<Confirmed, NotAsked> {
        let questions = self.asked.get_mut(&(frontend, backend)).ok_or(NotAsked)?;
        let Question { tasks, is_given_back } = questions.pop_front().ok_or(NotAsked)?;
        if questions.is_empty() {
            self.asked.remove(&(frontend, backend));
        }
        // A set, because a task named twice must not run twice.
        let unanswered: BTreeSet<TaskId> = unanswered.iter().copied().collect();
        let (again, answered): (Vec<_>, Vec<_>) = tasks.into_values().partition(|task| unanswered.contains(&task.id));
        Ok(Confirmed { again, answered: answered.len(), is_given_back })
    }

    /// The frontend is gone, and with it all interest in its tasks.
    pub(super) fn forget_frontend(&mut self, frontend: FrontendId) {
        self.asked.retain(|(asked, _), _| *asked != frontend);
    }

    /// Tasks in doubt.
    pub(super) fn len(&self) -> usize {
        self.asked.values().flatten().map(|question| question.tasks.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::{ModelId, SlotDescriptor, Timestamp};

    const BACKEND: BackendId = BackendId(4);

    fn task(frontend: u32, sequence: u64) -> RunningTask {
        RunningTask {
            id: TaskId::new(FrontendId(frontend), sequence),
            model: ModelId(0),
            deadline: Timestamp(1),
            priority: 0,
            application: 0,
            attempt: 0,
            losses: 0,
            slot: SlotDescriptor {
                slot: 0,
                input_offset: 0,
                input_bytes: 0,
                answer_offset: 0,
                answer_bytes_max: 80,
                key: 5,
            },
        }
    }

    #[test]
    fn each_frontend_is_asked_about_its_own_tasks_in_messages_that_fit() {
        let mut fences = Fences::default();
        let tasks = (0..FENCED_TASKS_MAX as u64 + 1).map(|n| task(1, n)).chain([task(2, 0)]);
        let questions = fences.ask((BACKEND, LinkId::ALL), false, tasks);
        let sizes: Vec<(u32, usize)> = questions
            .iter()
            .map(|(frontend, question)| match question {
                SchedulerToFrontend::Fence { tasks, .. } => (frontend.0, tasks.len()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(sizes, [(1, FENCED_TASKS_MAX), (1, 1), (2, 1)]);
        assert_eq!(fences.len(), FENCED_TASKS_MAX + 2);
    }

    #[test]
    fn only_what_was_asked_about_runs_again_and_only_once() {
        let mut fences = Fences::default();
        fences.ask((BACKEND, LinkId::NONE), true, [task(1, 0), task(1, 1), task(1, 2)]);
        let stranger = TaskId::new(FrontendId(1), 99);
        let unanswered = [task(1, 2).id, stranger, task(1, 0).id, task(1, 0).id];
        let again = fences.handle_fenced(FrontendId(1), BACKEND, &unanswered).unwrap();
        assert_eq!(again, Confirmed { again: vec![task(1, 0), task(1, 2)], answered: 1, is_given_back: true });
        assert_eq!(fences.handle_fenced(FrontendId(1), BACKEND, &unanswered), Err(NotAsked));
        assert_eq!(fences.len(), 0);
    }

    #[test]
    fn a_lost_frontend_takes_its_doubts_with_it() {
        let mut fences = Fences::default();
        fences.ask((BACKEND, LinkId::ALL), false, [task(1, 0), task(2, 0)]);
        fences.ask((BackendId(9), LinkId::ALL), false, [task(1, 7)]);
        fences.forget_frontend(FrontendId(1));
        assert_eq!(fences.len(), 1);
        let confirmed = Confirmed { again: vec![], answered: 1, is_given_back: false };
        assert_eq!(fences.handle_fenced(FrontendId(2), BACKEND, &[]), Ok(confirmed));
    }
}
