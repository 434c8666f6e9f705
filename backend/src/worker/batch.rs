//! One batch by itself: when it may start or must be rejected, which of its tasks still count, and what each is
//! answered.

use std::collections::BTreeSet;

use repository::cell;

use super::{shares::Shares, *};

/// The largest transfer of several tasks. Beyond that joining saves little, and a batch would wait longer for the last
/// of its inputs, or do without more of them.
const RUN_BYTES_MAX: usize = 64 << 10;

impl Batch {
    pub(super) fn new(now: Timestamp, plan: BatchPlan, (model, takes): (ModelShape, Span), is_alone: bool) -> Self {
        let task = Task {
            progress: Progress::Waiting,
            link: LinkId::NONE,
            run: 0,
            since: now,
            of_guards: false,
            fetched_with: 0,
            output_bytes: model.output_bytes as u32,
            cut_off: false,
            cancelled: false,
        };
        let tasks = vec![task; plan.tasks.len()];
        let bytes = plan.tasks.iter().map(|planned| i64::from(planned.slot.input_bytes)).sum::<i64>();
        Self {
            plan,
            model,
            takes,
            phase: Phase::Pending,
            tasks,
            is_alone,
            input_wait: INPUT_WAIT + INPUT_BYTE * (bytes - INPUT_BYTES).max(0),
            planned_at: now,
            fetched_at: now,
            undelivered: vec![],
        }
    }

    pub(super) fn indexes_in(&self, progress: Progress) -> Vec<usize> {
        (0..self.tasks.len()).filter(|&index| self.tasks[index].progress == progress).collect()
    }

    /// Ascending indexes as runs: neighbours in the plan and in the slots of one link, whose bytes fit one transfer.
    /// Each task of a run has as many as its first one.
    pub(super) fn runs(&self, indexes: &[usize], bytes_each: impl Fn(usize) -> usize) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        let mut tasks_max = 0;
        for &index in indexes {
            match runs.last_mut() {
                Some(run) if run.end == index && run.len() < tasks_max && self.continues(index) => run.end += 1,
                _ => {
                    tasks_max = (RUN_BYTES_MAX / bytes_each(index).max(1)).max(1);
                    runs.push(index..index + 1);
                }
            }
        }
        runs
    }

    /// A run that takes part in the execution.
    pub(super) fn executed(&self, tasks: Range<usize>) -> Run {
        let fetched_with =
            if self.model.records.inputs { self.tasks[tasks.start].fetched_with.into() } else { tasks.start };
        Run { input_bytes: self.plan.tasks[tasks.start].slot.input_bytes as usize, fetched_with, tasks }
    }

    /// Whether a task and the one before it in the plan are of one run.
    fn continues(&self, index: usize) -> bool {
        self.tasks[index].link == self.tasks[index - 1].link
            && self.tasks[index].fetched_with == self.tasks[index - 1].fetched_with
            && self.plan.tasks[index].continues(&self.plan.tasks[index - 1])
    }

    /// A transfer of a run begins, under the name of its first task.
    pub(super) fn begin_transfer(&mut self, now: Timestamp, run: Range<usize>, progress: Progress) {
        (self.tasks[run.start].run, self.tasks[run.start].of_guards) = (run.len() as u16, false);
        if progress == Progress::Fetching && self.model.records.inputs {
            self.tasks[run.clone()].iter_mut().for_each(|task| task.fetched_with = run.start as u16);
        }
        self.tasks[run].iter_mut().for_each(|task| (task.progress, task.since) = (progress, now));
    }

    /// The run of the outstanding transfer with this task's name.
    pub(super) fn transfer(&self, first: usize) -> Range<usize> {
        first..first + usize::from(self.tasks[first].run)
    }

    /// When it can be handed to a free GPU, as things stand; `None` if no input is here.
    pub(super) fn start_at(&self, handover: Span) -> Option<Timestamp> {
        let exec_at = self.plan.exec_at;
        let start_at = if self.is_complete() { exec_at - handover } else { exec_at.max(self.stragglers_at()) };
        let any_input = self.tasks.iter().any(|task| task.progress == Progress::Fetched);
        any_input.then_some(start_at)
    }

    /// Whether no input is awaited any more; there may be none at all.
    pub(super) fn is_complete(&self) -> bool {
        self.awaited().next().is_none()
    }

    fn awaited(&self) -> impl Iterator<Item = &Task> {
        self.tasks.iter().filter(|task| is_awaited(task))
    }

    /// When all inputs that are still to come have been waited for.
    fn waited_at(&self) -> Option<Timestamp> {
        Some(self.awaited().map(|task| task.since).max()? + self.input_wait)
    }

    /// Until when inputs are waited for.
    fn stragglers_at(&self) -> Timestamp {
        let BatchPlan { exec_at, latest, .. } = self.plan;
        let half = exec_at + (latest - exec_at) / 2;
        self.waited_at().map_or(half, |waited| waited.min(half))
    }

    /// Who comes too late for a batch that was still in the first half of its window may run in another one until then.
    pub(super) fn stragglers_until(&self) -> Timestamp {
        let BatchPlan { exec_at, latest, .. } = self.plan;
        if (latest - exec_at) / 2 > self.input_wait { latest } else { Timestamp::PAST }
    }

    /// It may run elsewhere, or later, and no link is to blame.
    pub(super) fn give_back(&mut self, index: usize) {
        self.tasks[index].link = LinkId::NONE;
        self.end_undelivered(index);
    }

    /// Tasks of frontends that have been waited for are not begun; yields one of these frontends.
    pub(super) fn leave_out(&mut self, shares: &Shares) -> Option<FrontendId> {
        let frontend_of = |index: &usize| self.plan.tasks[*index].task.frontend();
        let mut out = self.indexes_in(Progress::Waiting);
        out.retain(|index| shares.is_silent(frontend_of(index)));
        let last = out.last().map(frontend_of);
        out.into_iter().for_each(|index| self.give_back(index));
        last
    }

    /// A frontend whose inputs it does without, as they were waited for as long as that may last.
    pub(super) fn waited_for(&self, now: Timestamp) -> Option<FrontendId> {
        let index = (0..self.tasks.len()).find(|&index| {
            let task = &self.tasks[index];
            is_awaited(task) && task.since + self.input_wait <= now
        })?;
        Some(self.plan.tasks[index].task.frontend())
    }

    /// What of a batch is executed if these tasks are.
    pub(super) fn runs_of(&self, tasks: &[usize]) -> Vec<Run> {
        self.runs(tasks, |_| self.model.output_bytes).into_iter().map(|run| self.executed(run)).collect()
    }

    /// When it is given up: after its window, or where that is long and no input is here, once all of them have been
    /// waited for, if that keeps others waiting: a host that is slow for all would begin again and again. The scheduler
    /// takes the GPU for busy until then.
    pub(super) fn reject_at(&self) -> Timestamp {
        let after = self.plan.latest + Span(1);
        let has_hope = |task: &Task| matches!(task.progress, Progress::Waiting | Progress::Fetched) && task.is_wanted();
        if self.is_alone || self.stragglers_until() == Timestamp::PAST || self.tasks.iter().any(has_hope) {
            return after;
        }
        self.waited_at().map_or(after, |waited| waited.max(self.plan.exec_at).min(after))
    }

    pub(super) fn is_lost(&self, now: Timestamp) -> bool {
        let hopeful = |task: &Task| {
            use Progress::{Fetched, Fetching, Guarding, Waiting};
            matches!(task.progress, Waiting | Guarding | Fetching | Fetched) && task.is_wanted()
        };
        self.phase == Phase::Pending && (now >= self.reject_at() || !self.tasks.iter().any(hopeful))
    }

    pub(super) fn leave_stragglers(&mut self) {
        let is_awaited = |task: &&mut Task| matches!(task.progress, Progress::Guarding | Progress::Fetching);
        for task in self.tasks.iter_mut().filter(is_awaited) {
            task.progress = Progress::Straggling;
        }
    }

    pub(super) fn cut_off(&mut self, frontend: FrontendId) {
        for index in 0..self.tasks.len() {
            if self.plan.tasks[index].task.frontend() != frontend {
                continue;
            }
            match self.tasks[index].progress {
                Progress::Waiting | Progress::Fetched => self.end_undelivered(index),
                // They end with their READ, execution or WRITE.
                Progress::Guarding
                | Progress::Fetching
                | Progress::Straggling
                | Progress::Executing
                | Progress::Answering => {
                    self.tasks[index].cut_off = true;
                }
                Progress::Ended => {}
            }
        }
    }

    pub(super) fn end_undelivered(&mut self, index: usize) {
        self.tasks[index].progress = Progress::Ended;
        let (task, link) = (self.plan.tasks[index].task, self.tasks[index].link);
        self.undelivered.push(Undelivered { task, link });
    }

    pub(super) fn done(&mut self, outcome: PlanOutcome) -> BackendToModelThread {
        let undelivered = std::mem::take(&mut self.undelivered);
        let (plan, arrived_at, fetched_at) = (self.plan.plan, self.planned_at, self.fetched_at);
        BackendToModelThread::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at }
    }

    /// What is told of it under another name. A task that has failed and was not reported is, like one that was
    /// cancelled or cut off while a transfer is under way: its slot is not to be touched before that has been reported.
    pub(super) fn rename(&mut self, plan: PlanId) -> Unfinished {
        self.plan.plan = plan;
        let BatchPlan { model, exec_at, .. } = self.plan;
        let failed: BTreeSet<TaskId> = self.undelivered.iter().map(|undelivered| undelivered.task).collect();
        let tasks = self.plan.tasks.iter().zip(&self.tasks);
        let open = tasks.filter(|(planned, task)| task.progress != Progress::Ended || failed.contains(&planned.task));
        let tasks = open.map(|(planned, _)| (planned.task, planned.attempt)).collect();
        let is_ahead = matches!(self.phase, Phase::Pending | Phase::Executing);
        Unfinished { plan, model, exec_at: is_ahead.then_some(exec_at), tasks }
    }

    pub(super) fn can_be_answered(&self, index: usize) -> bool {
        let slot = &self.plan.tasks[index].slot;
        slot.number() < ImmediateData::SLOTS_MAX && slot.answer_bytes_max as usize >= ANSWER_HEADER_BYTES
    }

    /// Why a task cannot be run, whatever the rest of its batch does.
    pub(super) fn refusal(&self, index: usize) -> Option<String> {
        let slot = &self.plan.tasks[index].slot;
        let ModelShape { input_bytes, output_bytes, records: Records { inputs: is_record, .. }, .. } = self.model;
        let found = slot.input_bytes as usize;
        if is_record && !(cell::HEAD_BYTES..=input_bytes).contains(&found) {
            return Some(format!("the task has {found} input bytes, the model takes at most {input_bytes}"));
        }
        if !is_record && found != input_bytes {
            return Some(format!("the task has {found} input bytes, the model takes {input_bytes}"));
        }
        if slot.is_guarded() && found < GUARD_BYTES {
            return Some(format!("the task's {found} input bytes come later, which takes {GUARD_BYTES} at least"));
        }
        let room = slot.answer_bytes_max as usize - ANSWER_HEADER_BYTES;
        (room < output_bytes)
            .then(|| format!("the slot has room for {room} output bytes, the model gives {output_bytes}"))
    }

    pub(super) fn header(&self, place: Place, tasks: usize, answer: &Answer) -> (AnswerHeader, Option<String>) {
        let PlannedTask { task, attempt, slot, stamps } = self.plan.tasks[place.task];
        let mut header = AnswerHeader {
            task: task.0,
            status: AnswerStatus::WindowMissed,
            payload_bytes: 0,
            attempt,
            batch_size: 0,
            gpu: place.gpu as u16,
            tasks: tasks as u16,
            stamps: AnswerStamps {
                queued_at_ns: stamps.queued_at.0,
                due_at_ns: stamps.due_at.0,
                granted_at_ns: stamps.granted_at.0,
                planned_at_ns: self.planned_at.0,
                fetched_at_ns: self.fetched_at.0,
                exec_at_ns: self.plan.exec_at.0,
                ..AnswerStamps::default()
            },
        };
        let mut text = None;
        match answer {
            Answer::Output { started_at, finished_at, batch_size } => {
                header.status = AnswerStatus::Done;
                header.payload_bytes =
                    self.tasks[place.task..place.task + tasks].iter().map(|task| task.output_bytes).sum();
                header.batch_size = *batch_size;
                header.stamps.started_at_ns = started_at.0;
                header.stamps.finished_at_ns = finished_at.0;
            }
            Answer::WindowMissed => {}
            Answer::Failed { reason } => {
                let room = FAILURE_TEXT_BYTES_MAX.min(slot.answer_bytes_max as usize - ANSWER_HEADER_BYTES);
                let reason = &reason[..reason.floor_char_boundary(room)];
                header.status = AnswerStatus::Failed;
                header.payload_bytes = reason.len() as u32;
                text = Some(reason.to_owned());
            }
        }
        (header, text)
    }
}

/// Whether its batch waits for its input.
fn is_awaited(task: &Task) -> bool {
    matches!(task.progress, Progress::Guarding | Progress::Fetching) && task.is_wanted()
}
