//! Steps 2, 3 and 10: a request's rows become tasks with slots; their answers become its reply.
//!
//! A task's life: admitted with a leased slot and submitted; then it ends exactly once, by a valid answer, by the
//! scheduler's drop, or with the scheduler itself. Only its end frees the slot, because only then can no READ or WRITE
//! still arrive (ARCHITECTURE.md, invariant 3). A request ends with its last task's answer or its first task's failure;
//! tasks that outlive their request (the client hung up, a sibling failed) are cancelled and keep their slots until
//! they end themselves.
//!
//! A task's attempt counts the backends that were fenced away from it. The scheduler counts the same way, so an
//! answer of an earlier attempt is known by its number and never taken.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use proto::{
    BackendId, FrontendId, ModelId, ModelThreadId, Span, TaskId, Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus},
    frontend_to_scheduler::FrontendToScheduler,
    scheduler_to_frontend::DropReason,
    slot::ImmediateData,
    stages::AnswerStamps,
};

use crate::{
    arena::Arena,
    durations::Durations,
    error::InferError,
    models::{Offer, ServedModel},
    rope::Rope,
    slots::{ArenaTooSmall, Lease, SlotSize, Slots},
};

/// How long after its deadline a request waits for word of its tasks. Losing a backend takes heartbeats and a fence,
/// and is reported well within this.
pub const WORD_WAIT: Span = Span::from_millis(5_000);

/// Names a request from its admission to its reply; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request that has been checked against its model.
#[derive(Debug)]
pub struct CheckedRequest {
    /// Index in the model table.
    pub model: usize,
    /// Tasks: the first dimension of every tensor; 1 to the model's `max_batch`.
    pub rows: usize,
    /// All inputs in the order of the model; each has `rows` times its tensor's bytes.
    pub inputs: Vec<Rope>,
    /// The latency objective.
    pub slo: Span,
    /// The smaller, the more important among the tasks of its model while these cannot all be met.
    pub priority: u8,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// All outputs in the order of the model; each has `rows` times its tensor's bytes.
    pub outputs: Vec<Bytes>,
    /// Tasks, as in the request.
    pub rows: usize,
    /// Where the time of the row that came last went.
    pub timing: Timing,
    /// Where the time of one row of each batch that ran any of them went; the last is `timing`'s.
    pub batches: Vec<Timing>,
}

/// The stages of one task. All instants are on the scheduler's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// The frontend admitted it.
    pub admitted_at: Timestamp,
    /// When the client wanted the answer.
    pub deadline: Timestamp,
    /// What scheduler and backend stamped.
    pub stamps: AnswerStamps,
    /// The frontend took in the answer.
    pub answered_at: Timestamp,
    /// Tasks in its batch.
    pub batch_size: u16,
    /// The backend that ran it.
    pub backend: BackendId,
    /// The backend's GPU that ran it.
    pub gpu: u32,
}

impl Timing {
    /// Tells executions apart: a GPU runs one batch at a time.
    #[must_use]
    pub fn execution(&self) -> (BackendId, u32, i64) {
        (self.backend, self.gpu, self.stamps.started_at_ns)
    }

    /// How far the answer missed its deadline; not above zero if it was in time (ARCHITECTURE.md, invariant 4).
    #[must_use]
    pub fn lateness(&self) -> Span {
        self.answered_at - self.deadline
    }
}

/// What was counted since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Tasks admitted.
    pub admitted: u64,
    /// Tasks that ended with a valid answer.
    pub answered: u64,
    /// Tasks that ended with an answer that says why there is no output, or with a malformed one.
    pub failed: u64,
    /// Tasks that the scheduler dropped.
    pub dropped: u64,
    /// Tasks that ended with the scheduler's connection.
    pub abandoned: u64,
    /// Immediates that matched no lease or an earlier attempt.
    pub stale_answers: u64,
}

/// Instants of a task that is admitted now.
#[derive(Debug, Clone, Copy)]
pub struct AdmitInstants {
    /// On our clock.
    pub now: Timestamp,
    /// The same instant on the scheduler's.
    pub scheduler_now: Timestamp,
}

/// All requests and tasks of a frontend.
#[derive(Debug)]
pub struct Tasks {
    slots: Slots,
    tasks: BTreeMap<TaskId, Task>,
    requests: BTreeMap<RequestId, Request>,
    /// When requests are given up, on our clock.
    timers: BTreeSet<(Timestamp, RequestId)>,
    next_task: u64,
    next_request: u64,
    /// Each for the ModelThread that its task belongs to.
    messages: VecDeque<(ModelThreadId, FrontendToScheduler)>,
    replies: VecDeque<(RequestId, Result<Reply, InferError>)>,
    counters: Counters,
    ways_back: Durations,
}

#[derive(Debug)]
struct Task {
    lease: Lease,
    /// Fences that it has survived, modulo [`ImmediateData::ATTEMPTS`].
    attempt: u16,
    /// Whose row it is; `None` if the request has ended.
    row: Option<(RequestId, usize)>,
}

#[derive(Debug)]
struct Request {
    model: ModelId,
    /// Where its tasks were submitted, whoever owns the model by now.
    model_thread: ModelThreadId,
    /// By row; `None` once it has ended.
    tasks: Vec<Option<TaskId>>,
    unanswered: usize,
    /// Bytes of one row of each output.
    row_bytes: Vec<usize>,
    outputs: Vec<Vec<u8>>,
    /// Of one row of each batch that has run any.
    batches: Vec<Timing>,
    admitted_at: Timestamp,
    deadline: Timestamp,
    give_up_at: Timestamp,
}

/// Task sequence numbers are 40 bits (`proto::TaskId`).
const SEQUENCES: u64 = 1 << 40;

impl Tasks {
    /// No tasks, and an arena laid out for tasks of these sizes.
    ///
    /// # Errors
    /// If the arena is too small.
    pub fn new(arena_bytes: usize, sizes: &[SlotSize]) -> Result<Self, ArenaTooSmall> {
        Ok(Self {
            slots: Slots::new(arena_bytes, sizes)?,
            tasks: BTreeMap::new(),
            requests: BTreeMap::new(),
            timers: BTreeSet::new(),
            next_task: 0,
            next_request: 0,
            messages: VecDeque::new(),
            replies: VecDeque::new(),
            counters: Counters::default(),
            ways_back: Durations::default(),
        })
    }

    /// Admits a request: leases a slot for each row, copies the inputs there, submits the tasks.
    ///
    /// # Errors
    /// If the arena has no room. Nothing has happened then.
    pub fn admit(
        &mut self,
        at: AdmitInstants,
        frontend: FrontendId,
        (served, offer): (&ServedModel, Offer),
        request: &CheckedRequest,
        arena: &dyn Arena,
    ) -> Result<RequestId, InferError> {
        let leases = self.lease_rows(frontend, served, request.rows)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let deadline = at.scheduler_now + request.slo;
        let mut tasks = Vec::with_capacity(request.rows);
        for (row, (task, lease)) in leases.into_iter().enumerate() {
            let slot = lease.descriptor();
            write_row(row, slot.input_offset as usize, request, served, arena);
            let (model, priority) = (offer.id, request.priority);
            let submit = FrontendToScheduler::Submit { task, model, deadline, priority, slot };
            self.messages.push_back((offer.model_thread, submit));
            self.tasks.insert(task, Task { lease, attempt: 0, row: Some((id, row)) });
            tasks.push(Some(task));
        }
        self.counters.admitted += request.rows as u64;
        let row_bytes: Vec<usize> = served.model.outputs.iter().map(repository::Tensor::bytes).collect();
        let outputs = row_bytes.iter().map(|&bytes| vec![0; bytes * request.rows]).collect();
        let give_up_at = at.now + request.slo + WORD_WAIT;
        self.timers.insert((give_up_at, id));
        let admitted_at = at.scheduler_now;
        let unanswered = request.rows;
        let Offer { id: model, model_thread, .. } = offer;
        let batches = Vec::new();
        self.requests.insert(
            id,
            Request {
                model,
                model_thread,
                tasks,
                unanswered,
                row_bytes,
                outputs,
                batches,
                admitted_at,
                deadline,
                give_up_at,
            },
        );
        Ok(id)
    }

    /// Whether a task of this size has room in any slot.
    #[must_use]
    pub fn fits(&self, size: SlotSize) -> bool {
        self.slots.fits(size)
    }

    /// Whether task ids are used up; a new id from the scheduler gives new ones.
    #[must_use]
    pub fn ids_used_up(&self, rows: usize) -> bool {
        self.next_task + rows as u64 > SEQUENCES
    }

    fn lease_rows(
        &mut self,
        frontend: FrontendId,
        served: &ServedModel,
        rows: usize,
    ) -> Result<Vec<(TaskId, Lease)>, InferError> {
        let mut leases: Vec<(TaskId, Lease)> = Vec::with_capacity(rows);
        for _ in 0..rows {
            let task = TaskId::new(frontend, self.next_task);
            let Some(lease) = self.slots.lease(served.slot_size, task) else {
                leases.into_iter().for_each(|(_, lease)| self.slots.release(lease));
                return Err(InferError::ArenaFull { model: served.model.name.clone() });
            };
            self.next_task += 1;
            leases.push((task, lease));
        }
        Ok(leases)
    }

    /// The client hung up: the request ends without a reply.
    pub fn handle_cancel(&mut self, request: RequestId) {
        self.end_request(request);
    }

    /// Step 10: a WRITE_WITH_IMM of `bytes` landed, from a backend whose link has not been reported down.
    pub fn handle_immediate(
        &mut self,
        answered_at: Timestamp,
        backend: BackendId,
        immediate: u32,
        bytes: u32,
        arena: &dyn Arena,
    ) {
        let Some((task, header)) = self.valid_answer(immediate, bytes, arena) else {
            self.counters.stale_answers += 1;
            return;
        };
        let (slot, request) = self.end_task(task);
        let outcome = header.and_then(|header| match header.status {
            AnswerStatus::Done => Ok(header),
            AnswerStatus::WindowMissed => Err(InferError::WindowMissed),
            AnswerStatus::Failed => {
                let mut text = vec![0; header.payload_bytes as usize];
                arena.read(slot.answer_offset as usize + ANSWER_HEADER_BYTES, &mut text);
                Err(InferError::Failed(String::from_utf8_lossy(&text).into_owned()))
            }
        });
        match (outcome, request) {
            (Ok(header), Some((request, row))) => {
                self.on_answered(answered_at, &header);
                let offset = slot.answer_offset as usize + ANSWER_HEADER_BYTES;
                self.on_row(request, row, (offset, header), (answered_at, backend), arena);
            }
            (Ok(header), None) => self.on_answered(answered_at, &header),
            (Err(error), request) => {
                self.counters.failed += 1;
                self.fail_request(request, error);
            }
        }
    }

    fn on_answered(&mut self, answered_at: Timestamp, header: &AnswerHeader) {
        self.counters.answered += 1;
        self.ways_back.record(answered_at - Timestamp(header.stamps.finished_at_ns));
    }

    /// What the way back took of late, from the end of execution to the answer: 99 in 100 tasks since the last call
    /// took no longer. Zero if there was none.
    pub fn take_way_back(&mut self) -> Span {
        self.ways_back.take_p99()
    }

    /// The task that an immediate answers, and the header of the answer; `Err` inside if the header is the task's own
    /// but cannot be right. `None` if the immediate is not the answer of any present attempt.
    fn valid_answer(
        &self,
        immediate: u32,
        bytes: u32,
        arena: &dyn Arena,
    ) -> Option<(TaskId, Result<AnswerHeader, InferError>)> {
        let immediate = ImmediateData::unpack(immediate);
        let id = self.slots.owner(immediate.slot)?;
        let task = &self.tasks[&id];
        if immediate.attempt != task.attempt {
            return None;
        }
        let slot = task.lease.descriptor();
        let mut raw = [0; ANSWER_HEADER_BYTES];
        arena.read(slot.answer_offset as usize, &mut raw);
        let malformed = |what: String| Some((id, Err(InferError::BadAnswer(what))));
        let Some(header) = AnswerHeader::parse(&raw) else {
            return malformed("its status is unknown".to_owned());
        };
        if header.task != id.0 || header.attempt != task.attempt {
            return None;
        }
        let room = slot.answer_bytes_max - ANSWER_HEADER_BYTES as u32;
        let output_bytes = self.output_bytes(task);
        let payload = header.payload_bytes;
        match header.status {
            AnswerStatus::Done if output_bytes.is_some_and(|expected| expected != payload as usize) => {
                malformed(format!("found {payload} bytes of output, expected {}", output_bytes.unwrap_or_default()))
            }
            _ if payload > room || bytes < ANSWER_HEADER_BYTES as u32 + payload => {
                malformed(format!("it announces {payload} bytes and {bytes} came with room for {room}"))
            }
            _ => Some((id, Ok(header))),
        }
    }

    /// Bytes of a task's outputs; `None` if its request has ended.
    fn output_bytes(&self, task: &Task) -> Option<usize> {
        let (request, _) = task.row?;
        Some(self.requests[&request].row_bytes.iter().sum())
    }

    /// Copies one row's outputs out of its slot; the last row completes the reply.
    fn on_row(
        &mut self,
        id: RequestId,
        row: usize,
        (mut offset, header): (usize, AnswerHeader),
        (answered_at, backend): (Timestamp, BackendId),
        arena: &dyn Arena,
    ) {
        let request = self.requests.get_mut(&id).expect("a task's row names a request that has not ended");
        for (output, &bytes) in request.outputs.iter_mut().zip(request.row_bytes.iter()) {
            arena.read(offset, &mut output[row * bytes..][..bytes]);
            offset += bytes;
        }
        let timing = Timing {
            admitted_at: request.admitted_at,
            deadline: request.deadline,
            stamps: header.stamps,
            answered_at,
            batch_size: header.batch_size,
            backend,
            gpu: header.gpu,
        };
        request.batches.retain(|batch| batch.execution() != timing.execution());
        request.batches.push(timing);
        request.tasks[row] = None;
        request.unanswered -= 1;
        if request.unanswered > 0 {
            return;
        }
        let outputs = std::mem::take(&mut request.outputs).into_iter().map(Bytes::from).collect();
        let batches = std::mem::take(&mut request.batches);
        let rows = request.tasks.len();
        self.end_request(id);
        self.replies.push_back((id, Ok(Reply { outputs, rows, timing, batches })));
    }

    /// The scheduler dropped a task: no plan names it, so its slot is free.
    pub fn handle_dropped(&mut self, task: TaskId, reason: DropReason) {
        if self.tasks.contains_key(&task) {
            let (_, request) = self.end_task(task);
            self.counters.dropped += 1;
            self.fail_request(request, reason.into());
        }
    }

    /// The backend that ran `tasks` can reach no slot any more: names those that have no answer. Each of them is on
    /// its next attempt from now on.
    pub fn handle_fenced(&mut self, mut tasks: Vec<TaskId>) -> Vec<TaskId> {
        tasks.retain(|id| match self.tasks.get_mut(id) {
            Some(task) => {
                task.attempt = (task.attempt + 1) % ImmediateData::ATTEMPTS;
                true
            }
            None => false,
        });
        tasks
    }

    /// The scheduler is lost: every request ends with `error`. Slots stay leased, because backends still have their
    /// addresses.
    pub fn abandon(&mut self, error: &InferError) {
        while let Some((&request, _)) = self.requests.first_key_value() {
            self.fail_request(Some((request, 0)), error.clone());
        }
        self.messages.clear();
    }

    /// No backend is linked any more, so no slot can be reached: frees them all.
    ///
    /// # Panics
    /// If a request is outstanding: [`Self::abandon`] comes first.
    pub fn release_abandoned(&mut self) {
        assert!(self.requests.is_empty(), "requests end before their slots are taken away");
        self.counters.abandoned += self.tasks.len() as u64;
        std::mem::take(&mut self.tasks).into_values().for_each(|task| self.slots.release(task.lease));
        self.next_task = 0;
    }

    /// Gives up requests that are long past their deadline without any word.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        while let Some(&(at, request)) = self.timers.first().filter(|(at, _)| *at <= now) {
            tracing::warn!("request {request:?}: neither an answer nor a drop since its deadline, given up at {at:?}");
            self.fail_request(Some((request, 0)), InferError::NoAnswer { waited: WORD_WAIT });
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The next message, and the ModelThread that it is for.
    pub fn poll_message(&mut self) -> Option<(ModelThreadId, FrontendToScheduler)> {
        self.messages.pop_front()
    }

    /// The next request that ended.
    pub fn poll_reply(&mut self) -> Option<(RequestId, Result<Reply, InferError>)> {
        self.replies.pop_front()
    }

    /// What was counted since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Tasks that have not ended; each holds a slot.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        debug_assert_eq!(self.slots.leased(), self.tasks.len());
        self.tasks.len()
    }

    fn end_task(&mut self, id: TaskId) -> (proto::SlotDescriptor, Option<(RequestId, usize)>) {
        let task = self.tasks.remove(&id).expect("the caller looked it up");
        let slot = task.lease.descriptor();
        self.slots.release(task.lease);
        (slot, task.row)
    }

    fn fail_request(&mut self, row: Option<(RequestId, usize)>, error: InferError) {
        if let Some((request, _)) = row {
            self.end_request(request);
            self.replies.push_back((request, Err(error)));
        }
    }

    /// Removes a request and cancels those of its tasks that have not ended.
    fn end_request(&mut self, id: RequestId) {
        let Some(request) = self.requests.remove(&id) else { return };
        self.timers.remove(&(request.give_up_at, id));
        for task in request.tasks.into_iter().flatten() {
            if let Some(orphan) = self.tasks.get_mut(&task) {
                orphan.row = None;
                let cancel = FrontendToScheduler::Cancel { task, model: request.model };
                self.messages.push_back((request.model_thread, cancel));
            }
        }
    }
}

/// Copies one row of every input into its slot, one after another in the order of the model.
fn write_row(row: usize, mut offset: usize, request: &CheckedRequest, served: &ServedModel, arena: &dyn Arena) {
    for (input, tensor) in request.inputs.iter().zip(&served.model.inputs) {
        let bytes = tensor.bytes();
        for piece in input.slice(row * bytes..(row + 1) * bytes).pieces() {
            arena.write(offset, piece);
            offset += piece.len();
        }
    }
}

#[cfg(test)]
mod tests;
