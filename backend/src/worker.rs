//! Step 7, Step 8, Step 9 for one GPU: a batch's life from its plan over the READs of its inputs to its last answer.
//!
//! Bytes are moved by the run: tasks that are neighbours in their frontend's slots and in their plan are read and
//! answered by one transfer, which has the name of the first of them. A READ or WRITE that fails, fails for its whole
//! run.
//!
//! Once a batch executes the next one is handed over behind it, so that the GPU need not wait to be told
//! ([`handover`]).
//!
//! A plan waits for a staging buffer, fetches its inputs, starts in `[exec_at, latest]` or is rejected (Clockwork,
//! section 4.4), and pushes an answer for each of its tasks. Its buffer is given to another plan when the last READ
//! into it and the last WRITE from it have ended, however they ended. A task whose input is not there does not hold up
//! its batch: the first half of the window is kept for stragglers, or a quarter of a second where the window is long,
//! then the batch starts without them. What one frontend keeps under way holds up no other one for long ([`shares`]).
//!
//! A task whose client hung up is dropped from its batch until it executes: its input is not fetched, or, if that is
//! under way, not used. Only when no READ is outstanding is it reported, because its slot is free from then on.
//!
//! An input that may come later than its task is guarded. Its guard is READ first, and its input only once the guard
//! has been looked at and names the task: by then it is there, in whatever order a device serves two READs, and no link
//! carries what nobody can use. A task with another guard is *late*: it is dropped from its batch and reported, as a
//! cancelled one is, and the rest of the batch goes on.
//!
//! A frontend that left, or whose link broke, is *cut off*: none of its tasks known here is read or answered any more,
//! not even after it has linked again, because it may have given their slots to other tasks by then (fencing).
//!
//! Instants are on the scheduler's clock. Bytes are moved by the driver; no memory is touched here.

mod batch;
mod handover;
mod shares;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

use proto::{
    FrontendId, LatencyProfile, LinkId, ModelId, PlanId, Span, TaskId, Timestamp, Wait,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus},
    backend_to_scheduler::{BackendToModelThread, PlanOutcome, Undelivered},
    scheduler_to_backend::{BatchPlan, PlannedTask},
    slot::{GUARD_BYTES, ImmediateData, guard_word},
    stages::AnswerStamps,
};
use thiserror::Error;

use crate::{
    error::TaskError,
    staging::{BUFFERS, FAILURE_TEXT_BYTES_MAX, ModelShape, Place, Records},
};
pub use handover::HANDED_MAX;
use handover::Handed;

/// Plans that wait for a staging buffer. The scheduler has about two plans of a GPU under way; more than these only
/// queue when frontends stopped acknowledging, and every buffer waits for their transfers to fail.
pub const WAITING_MAX: usize = 16;
/// How long inputs are waited for.
const INPUT_WAIT: Span = Wait::Input.bound();
/// What is added for each byte of a batch's beyond so many: 50 MB/s.
const INPUT_BYTE: Span = Span(20);
const INPUT_BYTES: i64 = 1 << 20;
/// Buffers in which one frontend's transfers may be under way, where there are others.
const HELD_MAX: usize = BUFFERS / 2;

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// READ the guards of a run of tasks from their frontend, to where the first one's input goes; then call
    /// [`Worker::handle_guards`] with what they say, or [`Worker::handle_fetched`] if they could not be read.
    Guard {
        /// Where the first goes, and the transfer's name.
        place: Place,
        /// How many there are, one after another on both sides.
        tasks: usize,
        /// The model, which tells how large inputs are.
        model: ModelId,
        /// The first, whose frontend is read.
        task: TaskId,
        /// Its slot.
        slot: u32,
    },
    /// READ the inputs of a run of tasks from their frontend; then call [`Worker::handle_fetched`].
    Fetch {
        /// Where the first goes, and the transfer's name.
        place: Place,
        /// How many there are, one after another on both sides.
        tasks: usize,
        /// The model, which tells how large inputs are.
        model: ModelId,
        /// The first, whose frontend is read.
        task: TaskId,
        /// Its input.
        input: Input,
    },
    /// Execute a batch in its window, of which this may be a little ahead, and behind the one that the GPU has, if it
    /// has one; then call [`Worker::handle_executed`].
    Execute {
        /// The staging buffer.
        buffer: usize,
        /// The model.
        model: ModelId,
        /// The tasks that take part, by their index in the plan: their inputs are in the buffer. Each run's outputs go
        /// behind the header of its first task's answer, one after another.
        runs: Vec<Run>,
        /// It must not start earlier.
        exec_at: Timestamp,
        /// If it has not started by then, it must not start.
        latest: Timestamp,
        /// A task that is to be run again alone, if nothing else waits for the GPU then: its place among those that
        /// take part, and the plan.
        sample: Option<(usize, PlanId)>,
        /// Its inputs went ahead under this number ([`Worker::poll_ahead`]), all of them and no others.
        ahead: Option<u64>,
    },
    /// Take back the batch that was handed over last, unless it has begun or waits for its window alone; then call
    /// [`Worker::handle_taken_back`]. Otherwise nothing comes of this.
    TakeBack,
    /// WRITE_WITH_IMM the answer of a run into its slots; then call [`Worker::handle_pushed`].
    Push(Push),
    /// Say in the log that a frontend's transfers were waited for as long as that may last.
    TellWaited(FrontendId),
    /// Tell the scheduler.
    Report(BackendToModelThread),
}

/// Where an input is, in its frontend's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u32,
    /// What opens it, as its slot's descriptor says.
    pub key: u32,
}

/// A batch that is about to be next, while another one executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    /// Comes back with its execution, unless other tasks take part by then; none is used twice.
    pub number: u64,
    /// The staging buffer.
    pub buffer: usize,
    /// The model.
    pub model: ModelId,
    /// As in [`Action::Execute`].
    pub runs: Vec<Run>,
}

/// Neighbours in a batch, whose inputs lie one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// By their index in the plan.
    pub tasks: Range<usize>,
    /// Bytes of each one's input.
    pub input_bytes: usize,
    /// The task to whose place the first one's input was fetched, or that of one before it with others.
    pub fetched_with: usize,
}

/// The answer of a run to write: the header and `header.payload_bytes` more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// Where the first one's is, and the transfer's name.
    pub place: Place,
    /// The model, which tells how large answers are.
    pub model: ModelId,
    /// To whom.
    pub frontend: FrontendId,
    /// Where to, in the frontend's arena.
    pub answer_offset: u64,
    /// What opens that, as the first slot's descriptor says.
    pub key: u32,
    /// Packed slot of the first and attempt.
    pub immediate: u32,
    /// What to write in front of the payload.
    pub header: AnswerHeader,
    /// The payload, if it is a failure's text. Otherwise execution has put it where it belongs.
    pub text: Option<String>,
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Execution {
    /// The outputs are in the buffer.
    Done {
        /// It started.
        started_at: Timestamp,
        /// It ended.
        finished_at: Timestamp,
        /// What is to be known of them.
        outputs: Outputs,
    },
    /// The executor failed.
    Failed {
        /// It started.
        started_at: Timestamp,
        /// It ended.
        finished_at: Timestamp,
        /// Why, in one line.
        reason: String,
    },
    /// The executor failed, and cannot run another batch for now.
    Lost {
        /// It started.
        started_at: Timestamp,
        /// It ended.
        finished_at: Timestamp,
        /// Why, in one line.
        reason: String,
    },
    /// The executor panicked.
    Panicked {
        /// It started.
        started_at: Timestamp,
        /// It ended.
        finished_at: Timestamp,
    },
    /// The executor found that `latest` had passed, and did not start.
    WindowMissed {
        /// When it looked.
        rejected_at: Timestamp,
    },
    /// The batch before lost the executor, and this one, which was behind it, did not start.
    Skipped {
        /// When that was found.
        rejected_at: Timestamp,
    },
}

/// The outputs of a batch, as far as they are not one of the model's size for each task.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outputs {
    /// Tasks without one, by their place among those that took part, ascending. If there are any, the output of each of
    /// the others is behind the header of its own answer, as no two of them are answered together.
    pub failed: Vec<TaskError>,
    /// Bytes of each task's output, if these are records; 0 for those without.
    pub bytes: Vec<u32>,
}

/// Why a plan was refused as a whole. Scheduler and backend disagree; all its tasks are reported undelivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The model is not loaded on this GPU.
    #[error("the plan names model {0}, which this GPU does not host")]
    UnknownModel(u32),
    /// No task, or more than the model's largest batch.
    #[error("the plan has {found} tasks, the model takes 1 to {batch_max}")]
    BatchSize {
        /// Tasks of the plan.
        found: usize,
        /// The model's largest batch.
        batch_max: usize,
    },
    /// The bounded queue is full.
    #[error("{WAITING_MAX} plans wait for this GPU already")]
    QueueFull,
}

/// A plan that has not ended, under its new name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The name.
    pub plan: PlanId,
    /// The model.
    pub model: ModelId,
    /// The earliest start; `None` if it was executed or given up, and only its answers are under way.
    pub exec_at: Option<Timestamp>,
    /// Its tasks that will still be reported, by `Answered` at the latest, and their attempts.
    pub tasks: Vec<(TaskId, u16)>,
}

/// One GPU's batches.
#[derive(Debug)]
pub struct Worker {
    gpu: usize,
    models: BTreeMap<ModelId, (ModelShape, LatencyProfile)>,
    handover: Span,
    linked: BTreeMap<FrontendId, LinkId>,
    /// At most [`WAITING_MAX`], oldest first.
    waiting: VecDeque<Batch>,
    buffers: [Option<Batch>; BUFFERS],
    /// What the GPU has: the batch that executes, and the one behind it. At most [`HANDED_MAX`].
    handed: VecDeque<Handed>,
    /// When it was last looked at.
    looked_at: Timestamp,
    /// Of the batches that went ahead, the last one whose buffer is still its own.
    ahead: Option<Ahead>,
    ahead_next: u64,
    actions: VecDeque<Action>,
}

#[derive(Debug)]
struct Batch {
    plan: BatchPlan,
    model: ModelShape,
    /// l(b) of all its tasks.
    takes: Span,
    phase: Phase,
    /// One for each task of the plan.
    tasks: Vec<Task>,
    /// Whether there is but one frontend, which nobody else waits for.
    is_alone: bool,
    /// How long its inputs are waited for: a slow network needs longer for many bytes.
    input_wait: Span,
    planned_at: Timestamp,
    /// The last input that arrived.
    fetched_at: Timestamp,
    /// Not reported yet.
    undelivered: Vec<Undelivered>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Inputs are awaited; the GPU has not taken it, and nobody gave it up.
    Pending,
    /// The GPU has it.
    Executing,
    /// The GPU has it still, but nobody waits any more: `PlanDone` is out, and the buffer is not free.
    Abandoned,
    /// Executed or given up, `PlanDone` is out.
    Answering,
}

#[derive(Debug, Clone, Copy)]
struct Task {
    progress: Progress,
    /// What carries its input and its answer.
    link: LinkId,
    /// Tasks of the outstanding transfer that has this one's name.
    run: u16,
    /// When its READ or WRITE began.
    since: Timestamp,
    /// Whether that is the READ of their guards.
    of_guards: bool,
    /// The first task of the READ that has fetched its input, if inputs are records.
    fetched_with: u16,
    /// Bytes of its output.
    output_bytes: u32,
    /// Its frontend must not be touched any more.
    cut_off: bool,
    /// Nobody wants its output; it ends with its READ.
    cancelled: bool,
}

impl Task {
    /// It can still take part in its batch.
    fn is_wanted(&self) -> bool {
        !self.cut_off && !self.cancelled
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Its batch has no buffer yet.
    Waiting,
    /// The READ of its guard is outstanding, or that is about to be looked at.
    Guarding,
    /// Its READ is outstanding.
    Fetching,
    /// Its READ, or that of its guard, is outstanding, and its batch does without it: it will be answered
    /// `WindowMissed`.
    Straggling,
    /// Its input is here.
    Fetched,
    /// It is part of the execution.
    Executing,
    /// Its WRITE is outstanding.
    Answering,
    /// Answered or reported undelivered.
    Ended,
}

/// What a task is answered with.
enum Answer {
    Output { started_at: Timestamp, finished_at: Timestamp, batch_size: u16 },
    WindowMissed,
    Failed { reason: String },
}

impl Worker {
    /// A GPU with nothing to do and no frontend, which hosts these models. A complete batch is handed to the executor
    /// `handover` before it may start, so that the executor is awake by then.
    #[must_use]
    pub fn new(gpu: usize, models: BTreeMap<ModelId, (ModelShape, LatencyProfile)>, handover: Span) -> Self {
        Self {
            gpu,
            models,
            handover,
            linked: BTreeMap::new(),
            waiting: VecDeque::new(),
            buffers: std::array::from_fn(|_| None),
            handed: VecDeque::with_capacity(HANDED_MAX),
            looked_at: Timestamp::PAST,
            ahead: None,
            ahead_next: 0,
            actions: VecDeque::new(),
        }
    }

    /// A batch whose inputs are all here while another one executes: they can go to the GPU already, which has room
    /// for those of one batch besides. Each is yielded once.
    pub fn poll_ahead(&mut self) -> Option<Ahead> {
        if self.handed.len() != 1 {
            return None;
        }
        let (buffer, batch) = self.first_pending()?;
        let went = self.ahead.as_ref().is_some_and(|ahead| ahead.buffer == buffer);
        if went || !batch.is_complete() {
            return None;
        }
        let runs = batch.runs_of(&batch.indexes_in(Progress::Fetched));
        if runs.is_empty() {
            return None;
        }
        let ahead = Ahead { number: self.ahead_next, buffer, model: batch.plan.model, runs };
        self.ahead_next += 1;
        self.ahead = Some(ahead.clone());
        Some(ahead)
    }

    /// The frontend's slots can be read and written from now on.
    pub fn handle_linked(&mut self, frontend: FrontendId, link: LinkId) {
        self.linked.insert(frontend, link);
    }

    /// The frontend left, or its link broke: it is cut off. Transfers that are outstanding must still be reported.
    pub fn handle_unlinked(&mut self, now: Timestamp, frontend: FrontendId) {
        if self.linked.remove(&frontend).is_some() {
            for batch in self.waiting.iter_mut().chain(self.buffers.iter_mut().flatten()) {
                batch.cut_off(frontend);
            }
            self.on_change(now);
        }
    }

    /// The model is hosted from now on, or, without a shape, no more. Batches under way keep the shape that they have.
    pub fn handle_model(&mut self, model: ModelId, hosted: Option<(ModelShape, LatencyProfile)>) {
        self.models.remove(&model);
        self.models.extend(hosted.map(|hosted| (model, hosted)));
    }

    /// Whether a batch of the model is under way.
    #[must_use]
    pub fn uses(&self, model: ModelId) -> bool {
        self.waiting.iter().chain(self.buffers.iter().flatten()).any(|batch| batch.plan.model == model)
    }

    /// Plans that have not ended.
    #[must_use]
    pub fn plans(&self) -> usize {
        self.waiting.len() + self.buffers.iter().flatten().count()
    }

    /// All plans that have not ended are given other names: another primary is told of them.
    pub fn rename_plans(&mut self, mut name: impl FnMut() -> PlanId) -> Vec<Unfinished> {
        let batches = self.buffers.iter_mut().flatten().chain(&mut self.waiting);
        batches.map(|batch| batch.rename(name())).collect()
    }

    /// Takes in a plan.
    ///
    /// # Errors
    /// If the plan as a whole cannot be run here; it has been reported to the scheduler as ended then.
    pub fn handle_plan(&mut self, now: Timestamp, plan: BatchPlan) -> Result<(), PlanError> {
        let (model, takes) = match self.check(&plan) {
            Ok(found) => found,
            Err(error) => {
                self.actions.extend(refuse(now, &plan).map(Action::Report));
                return Err(error);
            }
        };
        let mut batch = Batch::new(now, plan, (model, takes), self.linked.len() < 2);
        for index in 0..batch.tasks.len() {
            let link = self.linked.get(&batch.plan.tasks[index].task.frontend()).copied();
            batch.tasks[index].link = link.unwrap_or(LinkId::NONE);
            if link.is_none() || !batch.can_be_answered(index) {
                batch.end_undelivered(index);
            }
        }
        self.waiting.push_back(batch);
        self.on_change(now);
        Ok(())
    }

    /// A client hung up: its task is dropped, if it has not begun to execute. A batch behind another one is taken back
    /// for that.
    pub fn handle_cancel(&mut self, now: Timestamp, plan: PlanId, task: TaskId) {
        let mut batches = self.waiting.iter_mut().chain(self.buffers.iter_mut().flatten());
        let Some(batch) = batches.find(|batch| batch.plan.plan == plan) else { return };
        let Some(index) = batch.plan.tasks.iter().position(|planned| planned.task == task) else { return };
        match batch.tasks[index].progress {
            Progress::Waiting | Progress::Fetched => {
                batch.tasks[index].progress = Progress::Ended;
                self.report(BackendToModelThread::Cancelled { plan, task });
            }
            Progress::Guarding | Progress::Fetching | Progress::Straggling | Progress::Executing => {
                batch.tasks[index].cancelled = true;
            }
            Progress::Answering | Progress::Ended => {}
        }
        self.on_change(now);
    }

    fn check(&self, plan: &BatchPlan) -> Result<(ModelShape, Span), PlanError> {
        let (model, profile) = self.models.get(&plan.model).ok_or(PlanError::UnknownModel(plan.model.0))?;
        if plan.tasks.is_empty() || plan.tasks.len() > model.batch_max {
            return Err(PlanError::BatchSize { found: plan.tasks.len(), batch_max: model.batch_max });
        }
        if self.waiting.len() >= WAITING_MAX {
            return Err(PlanError::QueueFull);
        }
        Ok((*model, profile.latency(plan.tasks.len())))
    }

    /// The guards of a run have been READ, and say this.
    pub fn handle_guards(&mut self, now: Timestamp, place: Place, words: &[u64]) {
        self.looked_at = now;
        let batch = self.batch_mut(place.buffer);
        let (mut fit, mut stragglers, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
        let plan = batch.plan.plan;
        for (index, word) in batch.transfer(place.task).zip(words) {
            let (state, task) = (batch.tasks[index], batch.plan.tasks[index].task);
            let has_input = *word == guard_word(task);
            match state.progress {
                _ if state.cut_off => batch.end_undelivered(index),
                Progress::Guarding if has_input && !state.cancelled => fit.push(index),
                Progress::Straggling if has_input && !state.cancelled => stragglers.push(index),
                Progress::Guarding | Progress::Straggling => {
                    batch.tasks[index].progress = Progress::Ended;
                    dropped.push(match state.cancelled {
                        true => BackendToModelThread::Cancelled { plan, task },
                        false => BackendToModelThread::InputLate { plan, task },
                    });
                }
                progress => unreachable!("the guard was read of a task that is {progress:?}"),
            }
        }
        dropped.into_iter().for_each(|report| self.report(report));
        self.answer(place.buffer, &stragglers, &Answer::WindowMissed);
        self.fetch_inputs(place.buffer, &fit);
        self.on_change(now);
    }

    /// How many guards the READ that is outstanding at this place is for, and of which model; `None` if it is for
    /// inputs.
    #[must_use]
    pub fn reads_guards(&self, place: Place) -> Option<(usize, ModelId)> {
        let batch = self.buffers.get(place.buffer)?.as_ref()?;
        let task = batch.tasks.get(place.task)?;
        task.of_guards.then_some((task.run.into(), batch.plan.model))
    }

    /// A READ ended, for all tasks of its run.
    pub fn handle_fetched(&mut self, now: Timestamp, place: Place, arrived: bool) {
        self.looked_at = now;
        let batch = self.batch_mut(place.buffer);
        let mut stragglers = Vec::new();
        let mut cancelled = Vec::new();
        for index in batch.transfer(place.task) {
            let task = batch.tasks[index];
            match task.progress {
                _ if !arrived || task.cut_off => batch.end_undelivered(index),
                Progress::Fetching | Progress::Straggling if task.cancelled => {
                    batch.tasks[index].progress = Progress::Ended;
                    cancelled.push(batch.plan.tasks[index].task);
                }
                Progress::Fetching => {
                    batch.tasks[index].progress = Progress::Fetched;
                    batch.fetched_at = now;
                }
                Progress::Straggling if now < batch.stragglers_until() => batch.give_back(index),
                Progress::Straggling => stragglers.push(index),
                progress => unreachable!("a READ ended for a task that is {progress:?}"),
            }
        }
        let plan = batch.plan.plan;
        cancelled.into_iter().for_each(|task| self.report(BackendToModelThread::Cancelled { plan, task }));
        self.answer(place.buffer, &stragglers, &Answer::WindowMissed);
        self.on_change(now);
    }

    /// An execution ended: of what the GPU has, the one that it was given first.
    pub fn handle_executed(&mut self, now: Timestamp, execution: Execution) {
        self.looked_at = now;
        let buffer = self.on_handed_ended(now);
        let batch = self.batch_mut(buffer);
        if std::mem::replace(&mut batch.phase, Phase::Answering) == Phase::Abandoned {
            return self.on_change(now);
        }
        if let Execution::Skipped { rejected_at } = execution {
            return self.give_up(now, buffer, PlanOutcome::WindowMissed { rejected_at });
        }
        let executed = batch.indexes_in(Progress::Executing);
        for &index in &executed {
            if batch.tasks[index].cut_off {
                batch.end_undelivered(index);
            }
        }
        let (outcome, answer) = match execution {
            Execution::Done { started_at, finished_at, outputs } => {
                let batch_size = executed.len() as u16;
                let answer = Answer::Output { started_at, finished_at, batch_size };
                let outcome = PlanOutcome::Executed { started_at, finished_at };
                if outputs != Outputs::default() {
                    self.answer_each(buffer, &executed, &outputs, &answer);
                }
                (outcome, answer)
            }
            Execution::Failed { started_at, finished_at, reason }
            | Execution::Lost { started_at, finished_at, reason } => {
                (PlanOutcome::Executed { started_at, finished_at }, Answer::Failed { reason })
            }
            Execution::Panicked { started_at, finished_at } => {
                let reason = "the executor panicked; see the backend's log".to_owned();
                (PlanOutcome::Executed { started_at, finished_at }, Answer::Failed { reason })
            }
            Execution::WindowMissed { rejected_at } | Execution::Skipped { rejected_at } => {
                (PlanOutcome::WindowMissed { rejected_at }, Answer::WindowMissed)
            }
        };
        let executed = self.batch_mut(buffer).indexes_in(Progress::Executing);
        self.answer(buffer, &executed, &answer);
        self.report_done(buffer, outcome);
        self.on_change(now);
    }

    /// Takes in the lengths of outputs. If any task has failed, each of them is answered by itself.
    fn answer_each(&mut self, buffer: usize, executed: &[usize], outputs: &Outputs, answer: &Answer) {
        let batch = self.batch_mut(buffer);
        for (&index, &bytes) in executed.iter().zip(&outputs.bytes) {
            batch.tasks[index].output_bytes = bytes;
        }
        if outputs.failed.is_empty() {
            return;
        }
        let mut failed = outputs.failed.iter().peekable();
        for (place, &index) in executed.iter().enumerate() {
            let failure = failed.next_if(|failure| failure.task == place);
            if self.batch_mut(buffer).tasks[index].progress != Progress::Executing {
                continue;
            }
            match failure {
                Some(TaskError { reason, .. }) => {
                    self.answer(buffer, &[index], &Answer::Failed { reason: reason.clone() });
                }
                None => self.answer(buffer, &[index], answer),
            }
        }
    }

    /// What executes does not come back: its tasks can run elsewhere, as none of them is answered from here any more.
    /// No link is to blame. The GPU stays taken until [`Self::handle_executed`].
    pub fn handle_hangs(&mut self, now: Timestamp) {
        let Some(&Handed { buffer, .. }) = self.handed.front() else { return };
        if std::mem::replace(&mut self.batch_mut(buffer).phase, Phase::Abandoned) != Phase::Abandoned {
            self.give_up(now, buffer, PlanOutcome::Abandoned { abandoned_at: now });
        }
    }

    /// What a batch was to execute runs elsewhere: no link is to blame.
    fn give_up(&mut self, now: Timestamp, buffer: usize, outcome: PlanOutcome) {
        let batch = self.batch_mut(buffer);
        batch.indexes_in(Progress::Executing).into_iter().for_each(|index| batch.give_back(index));
        self.report_done(buffer, outcome);
        self.on_change(now);
    }

    /// A WRITE ended, for all tasks of its run.
    pub fn handle_pushed(&mut self, now: Timestamp, place: Place, arrived: bool) {
        let batch = self.batch_mut(place.buffer);
        for index in batch.transfer(place.task) {
            let progress = &mut batch.tasks[index].progress;
            assert_eq!(*progress, Progress::Answering, "a WRITE ended that was not outstanding");
            if arrived {
                *progress = Progress::Ended;
            } else {
                batch.end_undelivered(index);
            }
        }
        self.on_change(now);
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.on_change(now);
    }

    /// When [`Self::handle_timeout`] must be called even if nothing else happens; [`Timestamp::NEVER`] if not at all.
    #[must_use]
    pub fn poll_timeout(&self) -> Timestamp {
        let starts = self.next_start().map(|(_, at)| at);
        let pending = self.waiting.iter().chain(self.buffers.iter().flatten());
        let rejections = pending.filter(|batch| batch.phase == Phase::Pending).map(Batch::reject_at);
        let handed = [self.queues_at(), self.asks_back_at(), self.lets_in_at()].into_iter().flatten();
        starts.into_iter().chain(rejections).chain(handed).min().unwrap_or(Timestamp::NEVER)
    }

    /// What to do next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    fn on_change(&mut self, now: Timestamp) {
        self.looked_at = now;
        loop {
            self.reject_overdue(now);
            self.start_next(now);
            self.release_buffers();
            if !self.admit_next(now) {
                break;
            }
        }
        self.ask_back(now);
    }

    /// Gives up the batches that missed their window, or have lost every task.
    fn reject_overdue(&mut self, now: Timestamp) {
        let outcome = PlanOutcome::WindowMissed { rejected_at: now };
        for batch in self.waiting.iter_mut().filter(|batch| batch.is_lost(now)) {
            batch.phase = Phase::Answering;
            self.actions.push_back(Action::Report(batch.done(outcome)));
        }
        for buffer in 0..BUFFERS {
            let Some(batch) = self.buffers[buffer].as_mut().filter(|batch| batch.is_lost(now)) else { continue };
            batch.phase = Phase::Answering;
            let waited_for = batch.waited_for(now);
            batch.leave_stragglers();
            let fetched = batch.indexes_in(Progress::Fetched);
            self.answer(buffer, &fetched, &Answer::WindowMissed);
            self.report_done(buffer, outcome);
            self.tell_waited(waited_for);
        }
    }

    /// Frees the buffers whose tasks have all ended: no transfer is outstanding there.
    fn release_buffers(&mut self) {
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            let over = |batch: &mut Batch| {
                batch.phase == Phase::Answering && batch.tasks.iter().all(|task| task.progress == Progress::Ended)
            };
            if let Some(Batch { plan, undelivered, .. }) = buffer.take_if(over) {
                self.actions.push_back(Action::Report(BackendToModelThread::Answered { plan: plan.plan, undelivered }));
                self.ahead.take_if(|ahead| ahead.buffer == index);
            }
        }
    }

    /// Gives the oldest waiting plan that can have one a free buffer; false if there is none of either.
    fn admit_next(&mut self, now: Timestamp) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let Some(buffer) = self.buffers.iter().position(Option::is_none) else { return false };
        let shares = self.shares(now);
        let Some(next) = self.waiting.iter().position(|batch| shares.let_in(batch)) else { return false };
        let Some(mut batch) = self.waiting.remove(next) else { return false };
        let left_out = batch.leave_out(&shares);
        self.tell_waited(left_out);
        let given_up = batch.phase == Phase::Answering;
        let waiting = batch.indexes_in(Progress::Waiting);
        self.buffers[buffer] = Some(batch);
        let mut fit = Vec::with_capacity(waiting.len());
        for index in waiting {
            let refusal = self.batch_mut(buffer).refusal(index);
            match refusal {
                Some(reason) => self.answer(buffer, &[index], &Answer::Failed { reason }),
                None => fit.push(index),
            }
        }
        if given_up {
            self.answer(buffer, &fit, &Answer::WindowMissed)
        } else {
            self.fetch(buffer, &fit)
        }
        true
    }

    fn fetch(&mut self, buffer: usize, indexes: &[usize]) {
        let batch = self.batch_mut(buffer);
        let is_guarded = |&index: &usize| batch.plan.tasks[index].slot.is_guarded();
        if !indexes.iter().any(is_guarded) {
            return self.fetch_inputs(buffer, indexes);
        }
        let (guarded, others): (Vec<usize>, Vec<usize>) = indexes.iter().partition(|index| is_guarded(index));
        self.fetch_guards(buffer, &guarded);
        self.fetch_inputs(buffer, &others);
    }

    fn fetch_guards(&mut self, buffer: usize, indexes: &[usize]) {
        let (gpu, now) = (self.gpu, self.looked_at);
        let batch = self.batch_mut(buffer);
        let model = batch.plan.model;
        let mut actions = VecDeque::new();
        for run in batch.runs(indexes, |_| GUARD_BYTES) {
            batch.begin_transfer(now, run.clone(), Progress::Guarding);
            batch.tasks[run.start].of_guards = true;
            let place = Place { gpu, buffer, task: run.start };
            let PlannedTask { task, slot, .. } = batch.plan.tasks[run.start];
            actions.push_back(Action::Guard { place, tasks: run.len(), model, task, slot: slot.number() });
        }
        self.actions.append(&mut actions);
    }

    fn fetch_inputs(&mut self, buffer: usize, indexes: &[usize]) {
        let (gpu, now) = (self.gpu, self.looked_at);
        let batch = self.batch_mut(buffer);
        let model = batch.plan.model;
        let mut actions = VecDeque::new();
        for run in batch.runs(indexes, |index| batch.plan.tasks[index].slot.input_bytes as usize) {
            batch.begin_transfer(now, run.clone(), Progress::Fetching);
            let place = Place { gpu, buffer, task: run.start };
            let PlannedTask { task, slot, .. } = batch.plan.tasks[run.start];
            let input = Input { offset: slot.input_offset, bytes: slot.input_bytes, key: slot.key };
            actions.push_back(Action::Fetch { place, tasks: run.len(), model, task, input });
        }
        self.actions.append(&mut actions);
    }

    fn answer(&mut self, buffer: usize, indexes: &[usize], answer: &Answer) {
        let (gpu, now) = (self.gpu, self.looked_at);
        let batch = self.batch_mut(buffer);
        let mut actions = VecDeque::new();
        for run in batch.runs(indexes, |_| batch.model.output_bytes) {
            batch.begin_transfer(now, run.clone(), Progress::Answering);
            let place = Place { gpu, buffer, task: run.start };
            let PlannedTask { task, attempt, slot, .. } = batch.plan.tasks[run.start];
            let (header, text) = batch.header(place, run.len(), answer);
            actions.push_back(Action::Push(Push {
                place,
                model: batch.plan.model,
                frontend: task.frontend(),
                answer_offset: slot.answer_offset,
                key: slot.key,
                immediate: ImmediateData { slot: slot.number(), attempt }.pack(),
                header,
                text,
            }));
        }
        self.actions.append(&mut actions);
    }

    fn tell_waited(&mut self, frontend: Option<FrontendId>) {
        if let Some(frontend) = frontend {
            Wait::Input.note_reached();
            self.actions.push_back(Action::TellWaited(frontend));
        }
    }

    fn report_done(&mut self, buffer: usize, outcome: PlanOutcome) {
        let done = self.batch_mut(buffer).done(outcome);
        self.report(done);
    }

    fn report(&mut self, message: BackendToModelThread) {
        self.actions.push_back(Action::Report(message));
    }

    fn batch_mut(&mut self, buffer: usize) -> &mut Batch {
        self.buffers[buffer].as_mut().expect("a buffer keeps its batch until all its transfers and its execution ended")
    }
}

/// What the scheduler is told of a plan that cannot be run at all: that it ended at once, and all its tasks with it.
#[must_use]
pub fn refuse(now: Timestamp, plan: &BatchPlan) -> [BackendToModelThread; 2] {
    let undelivered = plan.tasks.iter().map(|task| Undelivered { task: task.task, link: LinkId::NONE }).collect();
    let outcome = PlanOutcome::WindowMissed { rejected_at: now };
    [
        BackendToModelThread::PlanDone { plan: plan.plan, outcome, undelivered, arrived_at: now, fetched_at: now },
        BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] },
    ]
}

#[cfg(test)]
mod tests;
