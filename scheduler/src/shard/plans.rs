//! Plans that a backend has and has not reported done: what is lost if the backend is.

use std::collections::{BTreeMap, BTreeSet};

use proto::{
    BackendId, FrontendId, GpuId, ModelId, ModelThreadId, PlanId, SlotDescriptor, Span, TaskId, Timestamp, Wait,
};

use crate::predictions::Predicted;

/// A task that left its queue in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunningTask {
    pub(super) id: TaskId,
    pub(super) model: ModelId,
    /// The end of execution must not be later (the way back is taken off).
    pub(super) deadline: Timestamp,
    pub(super) priority: u8,
    /// The number of its workload.
    pub(super) application: u8,
    pub(super) attempt: u16,
    /// GPUs that hung, and backends that were lost, while they had it.
    pub(super) losses: u8,
    pub(super) slot: SlotDescriptor,
}

impl RunningTask {
    /// Its GPU or its backend was lost.
    pub(super) fn lost(self) -> Self {
        Self { losses: self.losses.saturating_add(1), ..self }
    }
}

/// A backend gives up a batch after ten times l(b) and at least a second. One that has not said a word of a plan for
/// so much longer ...
const OVERDUE_TIMES: i64 = 20;
/// ... and at least this long after its window ...
const OVERDUE_MIN: Span = Wait::Plan.bound();
/// ... or, of a model whose requests choose lengths, which may take more than l(b) and are given up after a minute ...
const OVERDUE_UNEQUAL_MIN: Span = Wait::UnequalPlan.bound();
/// ... or has not told what became of the answers for so long after that, does not keep to the protocol.
const ANSWERS_MAX: Span = Wait::Answers.bound();

/// What was planned when.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlanTimes {
    /// The plan left.
    pub(super) sent_at: Timestamp,
    /// It must not start earlier.
    pub(super) exec_at: Timestamp,
    /// It must not start later.
    pub(super) latest: Timestamp,
    /// How long it will run, and when the GPU will be done with it.
    pub(super) predicted: Predicted,
    /// What a batch takes depends on its tasks.
    pub(super) is_unequal: bool,
}

impl PlanTimes {
    /// When it should have been reported done, whatever happened.
    fn overdue_at(&self) -> Timestamp {
        let Predicted { duration, ends_at } = self.predicted;
        let least = if self.is_unequal { OVERDUE_UNEQUAL_MIN } else { OVERDUE_MIN };
        self.latest.max(ends_at) + (duration * OVERDUE_TIMES).max(least)
    }
}

/// A batch that was sent to a backend.
#[derive(Debug)]
pub(super) struct SentPlan {
    backend: BackendId,
    /// Which of the backend's GPUs, whatever its id is now.
    gpu_index: u32,
    gpu: GpuId,
    model: ModelId,
    /// Those that may still be answered; none, if all were cancelled.
    pub(super) tasks: Vec<RunningTask>,
    /// The same of frontends that are not settled, in a plan of an earlier primary: what they are is not known yet.
    heirs: Vec<(TaskId, u16)>,
    /// Tasks in the batch, as planned.
    size: usize,
    /// The number of the workload and the length of one that is a sample.
    sample: Option<(u8, u32)>,
    times: PlanTimes,
    /// Execution ended; only answers are still on their way.
    is_done: bool,
}

impl SentPlan {
    /// Of at least one task.
    pub(super) fn new(
        (backend, gpu_index): (BackendId, u32),
        gpu: GpuId,
        (tasks, sample): (Vec<RunningTask>, Option<(u8, u32)>),
        times: PlanTimes,
    ) -> Self {
        let model = tasks.first().expect("no plan is empty").model;
        let (size, heirs, is_done) = (tasks.len(), Vec::new(), false);
        Self { backend, gpu_index, gpu, model, tasks, heirs, size, sample, times, is_done }
    }

    /// Of an earlier primary; its GPU is none that a planner has given.
    pub(super) fn inherited(
        (backend, gpu_index): (BackendId, u32),
        model: ModelId,
        heirs: Vec<(TaskId, u16)>,
        (times, is_done): (PlanTimes, bool),
    ) -> Self {
        let (gpu, size, tasks, sample) = (GpuId(u32::MAX), heirs.len(), Vec::new(), None);
        Self { backend, gpu_index, gpu, model, tasks, heirs, size, sample, times, is_done }
    }

    /// What its backend owes.
    fn awaits(&self) -> Wait {
        match self.is_done {
            true => Wait::Answers,
            false if self.times.is_unequal => Wait::UnequalPlan,
            false => Wait::Plan,
        }
    }

    fn is_inherited(&self) -> bool {
        self.gpu == GpuId(u32::MAX)
    }
}

/// A plan whose execution ended.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) gpu: GpuId,
    /// Its place at its backend.
    pub(super) gpu_index: u32,
    /// Tasks that took part, as far as is known.
    pub(super) tasks: usize,
    /// When it was to start; `None` if an earlier primary sent it.
    pub(super) window: Option<(Timestamp, Timestamp)>,
    /// Tasks in the batch, as planned.
    pub(super) size: usize,
    pub(super) model: ModelId,
    /// The number of the workload and the length of the task that is a sample, if one is and all are still there.
    pub(super) sample: Option<(u8, u32)>,
    /// When it was sent, and what was planned of it; `None` if an earlier primary sent it.
    pub(super) sent: Option<(Timestamp, Predicted)>,
    /// Those that cannot be answered from there.
    pub(super) failed: Vec<RunningTask>,
    /// An input of it may have come late to its frontend.
    pub(super) is_guarded: bool,
}

/// What a task was that a backend dropped from its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    /// One that this primary planned, or has taken over.
    Task,
    /// One of a frontend that is not settled: when it is, the task is in doubt.
    Heir,
}

/// All plans under way. Bounded by the tasks that frontends may have under way, as no plan is empty; a backend that
/// stops reporting is lost by its heartbeat, or by [`Plans::overdue`], and its plans with it.
#[derive(Debug)]
pub(super) struct Plans {
    model_thread: ModelThreadId,
    under_way: BTreeMap<(BackendId, PlanId), SentPlan>,
    next: u64,
}

impl Plans {
    /// No plan yet of this ModelThread.
    pub(super) fn new(model_thread: ModelThreadId) -> Self {
        Self { model_thread, under_way: BTreeMap::new(), next: 0 }
    }

    /// Takes in a plan that is about to be sent, and names it.
    pub(super) fn insert(&mut self, plan: SentPlan) -> PlanId {
        let id = PlanId::new(self.model_thread, self.next);
        self.next += 1;
        self.under_way.insert((plan.backend, id), plan);
        id
    }

    /// Takes in a plan of an earlier primary, by the name that its backend has given it.
    pub(super) fn insert_inherited(&mut self, id: PlanId, plan: SentPlan) {
        self.under_way.insert((plan.backend, id), plan);
    }

    /// A task that is said to be open runs, if it is in a plan of an earlier primary on this very attempt. False if
    /// not.
    pub(super) fn adopt(&mut self, task: RunningTask) -> bool {
        let mut inherited = self.under_way.values_mut().filter(|plan| plan.is_inherited() && plan.model == task.model);
        let found = inherited.find_map(|plan| {
            let at = plan.heirs.iter().position(|heir| *heir == (task.id, task.attempt))?;
            plan.heirs.remove(at);
            plan.tasks.push(task);
            Some(())
        });
        found.is_some()
    }

    /// A frontend has left. It may come back under its name, having forgotten its tasks or with those that it still
    /// has: what becomes of them here concerns nobody. A scan: frontends leave rarely.
    pub(super) fn disown(&mut self, frontend: FrontendId) {
        for plan in self.under_way.values_mut() {
            let its = plan.tasks.extract_if(.., |task| task.id.frontend() == frontend);
            plan.heirs.extend(its.map(|task| (task.id, task.attempt)));
        }
    }

    /// Execution ended. `None` if `backend` does not execute such a plan.
    pub(super) fn on_done(&mut self, backend: BackendId, id: PlanId, failed: &[TaskId]) -> Option<Done> {
        let plan = self.under_way.get_mut(&(backend, id)).filter(|plan| !plan.is_done)?;
        plan.is_done = true;
        let is_guarded = plan.tasks.iter().any(|task| task.slot.is_guarded());
        let failed = match failed {
            [] => Vec::new(),
            failed => {
                let failed: BTreeSet<&TaskId> = failed.iter().collect();
                plan.heirs.retain(|(task, _)| !failed.contains(task));
                plan.tasks.extract_if(.., |task| failed.contains(&task.id)).collect()
            }
        };
        let sent = (!plan.is_inherited()).then_some((plan.times.sent_at, plan.times.predicted));
        // With fewer tasks than were planned it may be another one's time.
        let sample = plan.sample.filter(|_| plan.tasks.len() == plan.size);
        let window = (!plan.is_inherited()).then_some((plan.times.exec_at, plan.times.latest));
        let (gpu, gpu_index, model) = (plan.gpu, plan.gpu_index, plan.model);
        let (tasks, size) = (plan.tasks.len() + plan.heirs.len(), plan.size);
        Some(Done { gpu, gpu_index, tasks, window, size, model, sample, sent, failed, is_guarded })
    }

    /// Of a plan's tasks with an objective, those that could end then, and those that should have ended before.
    pub(super) fn in_time(&self, backend: BackendId, id: PlanId, ended_at: Timestamp) -> (u64, u64) {
        let tasks = self.under_way.get(&(backend, id)).map_or(&[][..], |plan| &plan.tasks);
        let with_objective = tasks.iter().filter(|task| task.deadline != Timestamp::NEVER);
        let late = |task: &RunningTask| task.deadline < ended_at;
        with_objective.fold((0, 0), |(in_time, lost), task| match late(task) {
            false => (in_time + 1, lost),
            true => (in_time, lost + 1),
        })
    }

    /// The tasks of a plan; nothing if some of those that were planned are not in it any more.
    pub(super) fn whole(&self, backend: BackendId, id: PlanId) -> Option<&[RunningTask]> {
        let plan = self.under_way.get(&(backend, id))?;
        (plan.tasks.len() == plan.size).then_some(&plan.tasks[..])
    }

    /// Where a task of a model is planned, if it is. A scan of that model's plans: hang-ups are rare.
    pub(super) fn find(&self, model: ModelId, task: TaskId) -> Option<(BackendId, PlanId)> {
        let holds = |plan: &SentPlan| plan.model == model && plan.tasks.iter().any(|other| other.id == task);
        self.under_way.iter().find(|(_, plan)| holds(plan)).map(|(&named, _)| named)
    }

    /// A task was dropped from its batch. False if `backend` has no such task in such a plan. A frontend may have
    /// submitted two of one name, which is not its backends' fault: of these it was one.
    pub(super) fn on_dropped(&mut self, backend: BackendId, id: PlanId, task: TaskId) -> Option<Dropped> {
        let plan = self.under_way.get_mut(&(backend, id))?;
        if let Some(at) = plan.tasks.iter().position(|other| other.id == task) {
            plan.tasks.remove(at);
            return Some(Dropped::Task);
        }
        let at = plan.heirs.iter().position(|(other, _)| *other == task)?;
        plan.heirs.remove(at);
        Some(Dropped::Heir)
    }

    /// All answers have arrived or failed. Yields the tasks that were answered and those that failed; `None` if
    /// `backend` has not executed such a plan.
    pub(super) fn on_answered(
        &mut self,
        backend: BackendId,
        id: PlanId,
        failed: &[TaskId],
    ) -> Option<(Vec<RunningTask>, Vec<RunningTask>)> {
        self.under_way.get(&(backend, id)).filter(|plan| plan.is_done)?;
        let plan = self.under_way.remove(&(backend, id))?;
        if failed.is_empty() {
            return Some((plan.tasks, Vec::new()));
        }
        let failed: BTreeSet<&TaskId> = failed.iter().collect();
        Some(plan.tasks.into_iter().partition(|task| !failed.contains(&task.id)))
    }

    /// When a backend's GPU will have executed all that it was sent, as planned; `None` if it has.
    pub(super) fn free_at(&self, backend: BackendId, gpu_index: u32) -> Option<Timestamp> {
        let is_its = |plan: &&SentPlan| (plan.backend, plan.gpu_index, plan.is_done) == (backend, gpu_index, false);
        self.under_way.values().filter(is_its).map(|plan| plan.times.predicted.ends_at).max()
    }

    /// A backend that owes a word on one of its plans, and on which, and for how long that was waited for.
    pub(super) fn overdue(&self, now: Timestamp) -> Option<(BackendId, PlanId, Wait)> {
        let is_overdue = |plan: &SentPlan| match plan.is_done {
            false => plan.times.overdue_at() <= now,
            true => !plan.tasks.is_empty() && plan.times.overdue_at() + ANSWERS_MAX <= now,
        };
        let (&(backend, id), plan) = self.under_way.iter().find(|(_, plan)| is_overdue(plan))?;
        Some((backend, id, plan.awaits()))
    }

    /// The backend is gone: its plans, oldest first.
    pub(super) fn remove_backend(&mut self, backend: BackendId) -> Vec<SentPlan> {
        let its = (backend, PlanId(0))..=(backend, PlanId(u64::MAX));
        self.under_way.extract_if(its, |_, _| true).map(|(_, plan)| plan).collect()
    }

    /// Plans under way.
    pub(super) fn len(&self) -> usize {
        self.under_way.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(sequence: u64) -> RunningTask {
        let slot =
            SlotDescriptor { slot: 0, input_offset: 0, input_bytes: 0, answer_offset: 0, answer_bytes_max: 80, key: 5 };
        let id = TaskId::new(FrontendId(1), sequence);
        RunningTask {
            id,
            model: ModelId(0),
            deadline: Timestamp(1),
            priority: 0,
            application: 0,
            attempt: 0,
            losses: 0,
            slot,
        }
    }

    fn plan(backend: u32, tasks: impl IntoIterator<Item = u64>) -> SentPlan {
        let tasks = tasks.into_iter().map(task).collect();
        let predicted = Predicted { duration: Span(4), ends_at: Timestamp(9) };
        let times = PlanTimes {
            sent_at: Timestamp(1),
            exec_at: Timestamp(2),
            latest: Timestamp(5),
            predicted,
            is_unequal: false,
        };
        SentPlan::new((BackendId(backend), 0), GpuId(0), (tasks, None), times)
    }

    #[test]
    fn each_task_of_a_plan_fails_or_is_answered() {
        let mut plans = Plans::new(ModelThreadId(3));
        let id = plans.insert(plan(1, 0..4));
        let done = plans.on_done(BackendId(1), id, &[task(1).id, task(9).id]).unwrap();
        assert_eq!((done.failed, done.size), (vec![task(1)], 4));
        let (answered, failed) = plans.on_answered(BackendId(1), id, &[task(1).id, task(3).id]).unwrap();
        assert_eq!((answered, failed), (vec![task(0), task(2)], vec![task(3)]));
        assert_eq!(plans.len(), 0);
    }

    #[test]
    fn a_backend_ends_its_own_plans_once_and_in_order() {
        let mut plans = Plans::new(ModelThreadId(3));
        let id = plans.insert(plan(1, 0..2));
        assert!(plans.on_answered(BackendId(1), id, &[]).is_none(), "answered before it was done");
        assert!(plans.on_done(BackendId(2), id, &[]).is_none(), "another backend's");
        assert!(plans.on_done(BackendId(1), id, &[]).is_some());
        assert!(plans.on_done(BackendId(1), id, &[]).is_none(), "done twice");
        assert!(plans.on_answered(BackendId(1), id, &[]).is_some());
        assert!(plans.on_answered(BackendId(1), id, &[]).is_none(), "answered twice");
    }

    #[test]
    fn a_cancelled_task_leaves_its_plan_once() {
        let mut plans = Plans::new(ModelThreadId(3));
        let id = plans.insert(plan(1, 0..2));
        assert_eq!(plans.find(ModelId(0), task(1).id), Some((BackendId(1), id)));
        assert_eq!(plans.find(ModelId(1), task(1).id), None);
        assert!(plans.on_dropped(BackendId(2), id, task(1).id).is_none(), "another backend's");
        assert!(plans.on_dropped(BackendId(1), id, task(1).id).is_some());
        assert!(plans.on_dropped(BackendId(1), id, task(1).id).is_none(), "it is gone");
        plans.on_done(BackendId(1), id, &[]).unwrap();
        assert_eq!(plans.on_answered(BackendId(1), id, &[]), Some((vec![task(0)], vec![])));
        let all = plans.insert(plan(1, 2..3));
        assert!(plans.on_dropped(BackendId(1), all, task(2).id).is_some());
        let done = plans.on_done(BackendId(1), all, &[]).unwrap();
        assert_eq!((done.failed, done.model), (vec![], ModelId(0)), "a batch of nothing ends, too");
        assert_eq!(plans.on_answered(BackendId(1), all, &[]), Some((vec![], vec![])));
    }

    /// Regression: a frontend that submitted two tasks of one name had the backend that dropped one of them thrown out.
    #[test]
    fn tasks_of_one_name_are_cancelled_one_by_one() {
        let mut plans = Plans::new(ModelThreadId(3));
        let id = plans.insert(plan(1, [4, 4, 5]));
        assert!(plans.on_dropped(BackendId(1), id, task(4).id).is_some());
        assert!(plans.on_dropped(BackendId(1), id, task(4).id).is_some());
        assert!(plans.on_dropped(BackendId(1), id, task(4).id).is_none());
        plans.on_done(BackendId(1), id, &[]).unwrap();
        assert_eq!(plans.on_answered(BackendId(1), id, &[]), Some((vec![task(5)], vec![])));
    }

    #[test]
    fn a_backend_owes_a_word_on_each_plan_and_on_each_task_in_it() {
        let mut plans = Plans::new(ModelThreadId(3));
        let silent = plans.insert(plan(1, 0..2));
        let due = Timestamp(9) + OVERDUE_MIN;
        assert_eq!(
            (plans.overdue(due - Span(1)), plans.overdue(due)),
            (None, Some((BackendId(1), silent, Wait::Plan)))
        );
        plans.on_done(BackendId(1), silent, &[]).unwrap();
        assert_eq!(plans.overdue(due), None);
        assert_eq!(plans.overdue(due + ANSWERS_MAX), Some((BackendId(1), silent, Wait::Answers)));
        plans.on_dropped(BackendId(1), silent, task(0).id);
        plans.on_dropped(BackendId(1), silent, task(1).id);
        assert_eq!(plans.overdue(Timestamp::NEVER), None, "nobody waits for anything of it");
    }

    #[test]
    fn a_lost_backend_leaves_what_has_no_answer_yet() {
        let mut plans = Plans::new(ModelThreadId(3));
        let done = plans.insert(plan(1, 0..2));
        plans.insert(plan(1, 2..3));
        plans.insert(plan(2, 3..4));
        assert_eq!(plans.free_at(BackendId(1), 0), Some(Timestamp(9)));
        plans.on_done(BackendId(1), done, &[task(0).id]).unwrap();
        let lost: Vec<_> = plans.remove_backend(BackendId(1)).into_iter().flat_map(|plan| plan.tasks).collect();
        assert_eq!(lost, [task(1), task(2)]);
        assert_eq!(plans.len(), 1);
    }
}
