//! Step 2, Step 3, Step 10.
//! A request's rows become tasks with slots; their answers become its reply.
//!
//! A task's life: admitted with a leased slot and submitted; then it ends exactly once, by a valid answer, by the
//! scheduler's drop, or with the scheduler itself. Only its end frees the slot, because only then can no READ or WRITE
//! still arrive (ARCHITECTURE.md, invariant 3). A request ends with its last task's answer or its first task's failure;
//! tasks that outlive their request (the client hung up, a sibling failed) are cancelled and keep their slots until
//! they end themselves.
//!
//! A request's inputs may come later than its tasks are submitted ([`later`]).
//!
//! When another primary is obeyed, tasks stay as they are: it is told of all that have not ended, in place of whatever
//! was still to be told to the former one.
//!
//! A task's attempt counts the backends that were fenced away from it. The scheduler counts the same way, so an
//! answer of an earlier attempt is known by its number and never taken.

mod claims;
mod group;
mod later;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    rc::Rc,
};

use bytes::Bytes;
use proto::{
    Application, BackendId, FrontendId, ModelId, ModelThreadId, SlotDescriptor, Span, TaskId, Timestamp, Wait,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus},
    frontend_to_scheduler::FrontendToModelThread,
    scheduler_to_frontend::DropReason,
    slot::ImmediateData,
    stages::AnswerStamps,
};

use claims::Claim;
use group::{Group, Later, Outputs, Request, Terms};
use repository::{Model, Tensor, cell};

use crate::{
    arena::Arena,
    durations::Durations,
    error::{InferError, invalid},
    models::{Offer, ServedModel},
    rope::Rope,
    slots::{ArenaTooSmall, Client, Lease, NoSlot, SlotSize, Slots},
};

/// How long after its deadline a request waits for word of its tasks. Losing a backend takes heartbeats and a fence,
/// and is reported well within this.
pub const WORD_WAIT: Span = Wait::Word.bound();

/// A request without an objective is given up as if it had been given so much time: nothing waits without a bound.
const ENDLESS_MAX: Span = Span::from_millis(24 * 3_600_000);

/// Names a request from its admission to its reply; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request that has been checked against its model.
#[derive(Debug)]
pub struct CheckedRequest {
    /// Index in the model table.
    pub model: usize,
    /// Tasks: the first dimension of every tensor; 1 to the model's `rows_max`.
    pub rows: usize,
    /// All inputs in the order of the model; each has `rows` times its tensor's bytes. If they differ in size between
    /// requests, the record of each row ([`repository::cell`]), all of the same length. None at all if they come later.
    pub inputs: Vec<Rope>,
    /// The latency objective, from its arrival on; `ENDLESS` if it has none.
    pub slo: Span,
    /// How long ago it arrived, if that was long ago.
    pub waited: Span,
    /// The smaller, the more important among the tasks of its model while these cannot all be met.
    pub priority: u8,
    /// The workload that it is of.
    pub application: Application,
    /// Whose share of the arena it takes; nobody's, where all requests are of one program.
    pub client: Option<Client>,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// All outputs in the order of the model; each has `rows` times its tensor's bytes.
    pub outputs: Vec<Bytes>,
    /// The shape of one row of each output, if these differ between requests; otherwise none.
    pub shapes: Vec<Vec<usize>>,
    /// Tasks, as in the request.
    pub rows: usize,
    /// Where the time of the row that came last went.
    pub timing: Timing,
    /// Where the time of one row of each batch that ran any of them went; the last is `timing`'s.
    pub batches: Vec<Timing>,
    /// Whether an input came so late that its row was submitted twice.
    pub was_late: bool,
}

impl Reply {
    /// The shape of an output with all its rows, by its index among the model's.
    #[must_use]
    pub fn shape(&self, model: &Model, index: usize) -> Vec<usize> {
        model.shape_of(self.shapes.get(index).unwrap_or(&model.outputs[index].shape), self.rows)
    }
}

/// The stages of one task. All instants are on the scheduler's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// The frontend admitted it.
    pub admitted_at: Timestamp,
    /// When the client wanted the answer; `NEVER` if it had no objective.
    pub deadline: Timestamp,
    /// What scheduler and backend stamped.
    pub stamps: AnswerStamps,
    /// The frontend took in the answer.
    pub answered_at: Timestamp,
    /// Tasks in its batch; [`Self::OF_CACHE`] if there was none.
    pub batch_size: u16,
    /// The backend that ran it.
    pub backend: BackendId,
    /// The backend's GPU that ran it.
    pub gpu: u32,
}

impl Timing {
    /// The batch of an answer that was kept: nobody ran it.
    pub const OF_CACHE: u16 = 0;

    /// Whether nobody ran it, as its answer had been kept.
    #[must_use]
    pub fn is_of_cache(&self) -> bool {
        self.batch_size == Self::OF_CACHE
    }

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
    /// Tasks whose input was not in its slot when their batch was fetched.
    pub late_inputs: u64,
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
    /// The tasks of each request, by the first of them: their ids follow each other.
    groups: BTreeMap<TaskId, Group>,
    /// Requests that have not ended: their first tasks, and when they are given up.
    requests: BTreeMap<RequestId, (TaskId, Timestamp)>,
    /// When requests are given up, on our clock.
    timers: BTreeSet<(Timestamp, RequestId)>,
    next_task: u64,
    next_request: u64,
    /// Each for the ModelThread that its task belongs to.
    messages: VecDeque<(ModelThreadId, FrontendToModelThread)>,
    /// Answers that backends say they have written and that are not here, by when they are missed.
    claims: VecDeque<Claim>,
    replies: VecDeque<(RequestId, Result<Reply, InferError>)>,
    counters: Counters,
    ways_back: Durations,
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
            groups: BTreeMap::new(),
            requests: BTreeMap::new(),
            timers: BTreeSet::new(),
            next_task: 0,
            next_request: 0,
            messages: VecDeque::new(),
            claims: VecDeque::new(),
            replies: VecDeque::new(),
            counters: Counters::default(),
            ways_back: Durations::default(),
        })
    }

    /// Admits a request: leases a slot for each row, copies the inputs there if they have come, submits the tasks.
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
        let first = TaskId::new(frontend, self.next_task);
        let comes_later = request.inputs.is_empty();
        let has_records = cell::is_record(&served.model.inputs);
        let size = match request.inputs.first().filter(|_| has_records) {
            Some(record) => served.slot_size.with_input(record.len()),
            None => served.slot_size,
        };
        self.slots.close_void(arena);
        let mut leases = self.lease_rows((first, request.client), (served, size), request.rows)?;
        leases.iter_mut().for_each(|lease| lease.open(arena));
        // Whoever comes late may be submitted twice.
        self.next_task += request.rows as u64 * if comes_later { 2 } else { 1 };
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let left = request.slo - request.waited;
        let deadline = at.scheduler_now + left;
        let left = left.min(ENDLESS_MAX);
        let outputs = Outputs::new(&served.model, request.rows);
        let give_up_at = at.now + left + WORD_WAIT;
        let (unanswered, batches) = (request.rows, Vec::new());
        let later = comes_later.then(|| Later {
            row_bytes: served.model.inputs.iter().map(repository::Tensor::bytes).collect(),
            submit_by: at.now + left - offer.least_latency,
            give_up_at,
            is_here: false,
        });
        let admitted_at = at.scheduler_now;
        let state = Request { id, unanswered, outputs, batches, admitted_at, later };
        let terms = Terms { deadline, priority: request.priority, application: request.application, comes_later };
        let group = Group::new(first, (Rc::clone(&served.model), &offer), terms, leases, state);
        for (rows, lease) in group.runs() {
            let offset = lease.descriptor(0).input_offset as usize;
            if comes_later {
                (0..lease.slots()).for_each(|index| later::guard(lease.descriptor(index), &self.slots, arena));
            } else if has_records {
                write_records(&request.inputs[rows.clone()], offset, arena);
            } else {
                let row_bytes = served.model.inputs.iter().map(repository::Tensor::bytes);
                write_rows(rows.clone(), offset, &request.inputs, row_bytes, arena);
            }
            self.messages.extend(rows.map(|row| (offer.model_thread, group.submit(row))));
        }
        self.counters.admitted += request.rows as u64;
        self.timers.insert((give_up_at, id));
        self.requests.insert(id, (first, give_up_at));
        self.groups.insert(first, group);
        Ok(id)
    }

    /// Where in the arena the slots' guards are.
    #[must_use]
    pub fn guards_offset(&self) -> usize {
        self.slots.guards_offset()
    }

    /// Makes room for tasks of a model that comes later.
    ///
    /// # Errors
    /// If one of them takes more than there can be, with what to change.
    pub fn make_room(&mut self, size: SlotSize) -> Result<(), String> {
        if self.slots.make_room(size) {
            return Ok(());
        }
        let (most, (arena, _)) = (self.slots.largest_later(), self.slots.bytes());
        let found = size.class_bytes();
        Err(format!(
            "a task of it takes {found} bytes with its answer, and has room for {most} in an arena of {arena}: raise \
             arena_bytes, and restart this frontend"
        ))
    }

    /// Whether task ids are used up; a new id from the scheduler gives new ones.
    #[must_use]
    pub fn ids_used_up(&self, rows: usize) -> bool {
        self.next_task + rows as u64 > SEQUENCES
    }

    /// Slots for all rows, in as few runs as there can be.
    fn lease_rows(
        &mut self,
        (first, client): (TaskId, Option<Client>),
        (served, size): (&ServedModel, SlotSize),
        rows: usize,
    ) -> Result<Vec<Lease>, InferError> {
        if self.slots.never_fit(size, rows) {
            let expected = "fewer, as the arena has no room for so many (arena_bytes, max_bytes)";
            return Err(invalid("inputs[].shape[0]", format_args!("{rows} rows"), expected));
        }
        // Alone, a client can send any one request.
        let in_share = self.slots.holds_any(client);
        let mut leases: Vec<Lease> = Vec::new();
        let mut leased = 0;
        while leased < rows {
            let owner = TaskId(first.0 + leased as u64);
            match self.slots.lease_within(size, (owner, client), rows - leased, in_share) {
                Ok(lease) => {
                    leased += lease.slots();
                    leases.push(lease);
                }
                Err(none) => {
                    leases.iter_mut().for_each(|lease| self.slots.release(lease, 0..lease.slots()));
                    let model = served.model.name.clone();
                    return Err(match none {
                        NoSlot::Full => InferError::ArenaFull { model },
                        NoSlot::Share => InferError::ArenaShare { model },
                    });
                }
            }
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
        let Some(answer) = self.valid_answer(immediate, bytes, arena) else {
            self.counters.stale_answers += 1;
            return;
        };
        let Answer { first, rows, outcome } = answer;
        let tasks = rows.len() as u64;
        let group = self.groups.get_mut(&first).expect("the answer is of one of its tasks");
        let payload = group.slot(rows.start).answer_offset as usize + ANSWER_HEADER_BYTES;
        let outcome = outcome.and_then(|header| match header.status {
            AnswerStatus::Done => Ok(header),
            AnswerStatus::WindowMissed => Err(InferError::WindowMissed),
            AnswerStatus::Failed => {
                let mut text = vec![0; header.payload_bytes as usize];
                arena.read(payload, &mut text);
                Err(InferError::Failed(String::from_utf8_lossy(&text).into_owned()))
            }
        });
        match outcome {
            Ok(header) => {
                self.counters.answered += tasks;
                let way_back = answered_at - Timestamp(header.stamps.finished_at_ns);
                rows.clone().for_each(|_| self.ways_back.record(way_back));
                let complete = group.take_rows(rows.clone(), (payload, header), (answered_at, backend), arena);
                self.end_tasks(first, rows);
                if let Some((request, reply)) = complete {
                    self.end_request(request);
                    self.replies.push_back((request, reply));
                }
            }
            Err(error) => {
                self.counters.failed += tasks;
                let request = group.request.as_ref().map(|request| request.id);
                self.end_tasks(first, rows);
                self.fail_request(request, error);
            }
        }
    }

    /// What the way back took of late, from the end of execution to the answer: 99 in 100 tasks since the last call
    /// took no longer. Zero if there was none.
    pub fn take_way_back(&mut self) -> Span {
        self.ways_back.take_p99()
    }

    /// The tasks that an immediate answers, and the header of their answer; `Err` inside if the header is their own but
    /// cannot be right. `None` if the immediate is not the answer of any present attempt.
    fn valid_answer(&self, immediate: u32, bytes: u32, arena: &dyn Arena) -> Option<Answer> {
        let immediate = ImmediateData::unpack(immediate);
        let owner = self.slots.owner(immediate.slot)?;
        let (&first, group) = self.groups.range(..=owner).next_back().expect("a leased slot is a task's");
        let row = group.row_of_slot(owner)?;
        let id = group.task(row);
        if !group.is_present(row, immediate.attempt) {
            return None;
        }
        let mut raw = [0; ANSWER_HEADER_BYTES];
        arena.read(group.slot(row).answer_offset as usize, &mut raw);
        let malformed = |rows, what: String| Some(Answer { first, rows, outcome: Err(InferError::BadAnswer(what)) });
        let Some(header) = AnswerHeader::parse(&raw) else {
            return malformed(row..row + 1, "its status is unknown".to_owned());
        };
        if header.task != id.0 || header.attempt != immediate.attempt {
            return None;
        }
        // How many tasks are answered is what the backend says; how many can be is what was leased.
        let found = usize::from(header.tasks);
        let rows = row..row + group.run_length(row, found.max(1), immediate.attempt);
        if rows.len() != found {
            return malformed(rows, format!("it is for {found} tasks, which are not all there"));
        }
        let room = rows.len() as u64 * u64::from(group.slot(row).answer_bytes_max) - ANSWER_HEADER_BYTES as u64;
        let payload = u64::from(header.payload_bytes);
        let expected = group.row_bytes().map(|bytes| (bytes * rows.len()) as u64);
        match header.status {
            AnswerStatus::Done if expected.is_some_and(|expected| expected != payload) => {
                let expected = expected.unwrap_or_default();
                malformed(rows, format!("found {payload} bytes of output, expected {expected}"))
            }
            _ if payload > room || u64::from(bytes) < ANSWER_HEADER_BYTES as u64 + payload => {
                malformed(rows, format!("it announces {payload} bytes and {bytes} came with room for {room}"))
            }
            _ => Some(Answer { first, rows, outcome: Ok(header) }),
        }
    }

    /// The tasks that were admitted with this one.
    fn find(&self, task: TaskId) -> Option<(TaskId, &Group)> {
        let (&first, group) = self.groups.range(..=task).next_back()?;
        group.row(task).map(|_| (first, group))
    }

    /// The scheduler dropped a task: no plan names it, so its slot is free.
    pub fn handle_dropped(&mut self, now: Timestamp, task: TaskId, reason: DropReason) {
        let Some((first, group)) = self.find(task) else { return };
        let row = group.row(task).expect("it was found there");
        if reason == DropReason::InputLate && self.on_late(now, first, row) {
            return;
        }
        let group = &self.groups[&first];
        let request = group.request.as_ref().map(|request| request.id);
        self.end_tasks(first, row..row + 1);
        self.counters.dropped += 1;
        self.fail_request(request, reason.into());
    }

    /// The backend that ran `tasks` can reach no slot any more: names those that have no answer. Each of them is on
    /// its next attempt from now on.
    pub fn handle_fenced(&mut self, mut tasks: Vec<TaskId>) -> Vec<TaskId> {
        tasks.retain(|&task| {
            let group = self.groups.range_mut(..=task).next_back().map(|(_, group)| group);
            group.is_some_and(|group| group.begin_next_attempt(task))
        });
        tasks
    }

    /// Another primary is obeyed: it is told of all tasks that have not ended, and nobody is told anything that was to
    /// be told before. `find` gives its word on a model.
    pub fn handle_obeyed(&mut self, find: impl Fn(&Model) -> Option<Offer>) {
        self.messages.clear();
        self.claims.clear();
        for group in self.groups.values_mut() {
            group.handle_obeyed(find(group.model()));
            let opens = group.submitted_rows().map(|row| (group.model_thread, group.open(row)));
            self.messages.extend(opens);
        }
        for group in self.groups.values().filter(|group| group.request.is_none()) {
            self.messages.extend(group.submitted_rows().map(|row| (group.model_thread, group.cancel(row))));
        }
    }

    /// The scheduler is lost: every request ends with `error`. Slots stay leased, because backends still have their
    /// addresses.
    pub fn abandon(&mut self, error: &InferError) {
        while let Some((&request, _)) = self.requests.first_key_value() {
            self.fail_request(Some(request), error.clone());
        }
        self.messages.clear();
        self.claims.clear();
    }

    /// No backend is linked any more, so no slot can be reached: frees them all.
    ///
    /// # Panics
    /// If a request is outstanding: [`Self::abandon`] comes first.
    pub fn release_abandoned(&mut self) {
        assert!(self.requests.is_empty(), "requests end before their slots are taken away");
        self.counters.abandoned += self.slots.leased() as u64;
        for mut group in std::mem::take(&mut self.groups).into_values() {
            let open: Vec<usize> = group.open_rows().collect();
            open.into_iter().for_each(|row| group.release(row..row + 1, &mut self.slots));
        }
        self.next_task = 0;
    }

    /// Gives up requests that are long past their deadline without any word, or whose input does not come in time.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        while let Some(&(at, request)) = self.timers.first().filter(|(at, _)| *at <= now) {
            if self.is_waiting(request) {
                self.fail_request(Some(request), DropReason::InputLate.into());
                continue;
            }
            Wait::Word.note_reached();
            tracing::warn!("request {request:?}: neither an answer nor a drop since its deadline, given up at {at:?}");
            self.fail_request(Some(request), InferError::NoAnswer { waited: WORD_WAIT });
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let claimed = self.claims.front().map(|claim| claim.missed_at);
        self.timers.first().map(|(at, _)| *at).into_iter().chain(claimed).min()
    }

    /// The next message, and the ModelThread that it is for.
    pub fn poll_message(&mut self) -> Option<(ModelThreadId, FrontendToModelThread)> {
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

    /// Bytes of registered memory for slots, and of those that are leased.
    #[must_use]
    pub fn arena_bytes(&self) -> (usize, usize) {
        self.slots.bytes()
    }

    /// Tasks that have not ended; each holds a slot.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.slots.leased()
    }

    /// Tasks end, and their slots are free.
    fn end_tasks(&mut self, first: TaskId, rows: Range<usize>) {
        let group = self.groups.get_mut(&first).expect("the caller found it");
        group.release(rows.clone(), &mut self.slots);
        if group.end(rows) == 0 {
            self.groups.remove(&first);
        }
    }

    fn fail_request(&mut self, request: Option<RequestId>, error: InferError) {
        if let Some(request) = request {
            self.end_request(request);
            self.replies.push_back((request, Err(error)));
        }
    }

    /// Ends a request and cancels those of its tasks that have not ended.
    fn end_request(&mut self, id: RequestId) {
        let Some((first, timer)) = self.requests.remove(&id) else { return };
        self.timers.remove(&(timer, id));
        let Some(group) = self.groups.get_mut(&first) else { return };
        group.request = None;
        self.messages.extend(group.submitted_rows().map(|row| (group.model_thread, group.cancel(row))));
        self.end_waiting(first);
    }
}

/// What an immediate answers.
struct Answer {
    /// Of the group.
    first: TaskId,
    /// Which of its tasks.
    rows: Range<usize>,
    outcome: Result<AnswerHeader, InferError>,
}

/// Copies records into neighbouring slots, one after another.
fn write_records(records: &[Rope], mut offset: usize, arena: &dyn Arena) {
    for piece in records.iter().flat_map(Rope::pieces) {
        arena.write(offset, piece);
        offset += piece.len();
    }
}

/// Copies rows into neighbouring slots, one after another; each has all inputs in the order of the model.
fn write_rows(
    rows: Range<usize>,
    mut offset: usize,
    inputs: &[Rope],
    row_bytes: impl Iterator<Item = usize> + Clone,
    arena: &dyn Arena,
) {
    let mut write = |input: &Rope, bytes: Range<usize>| {
        for piece in input.range(bytes) {
            arena.write(offset, piece);
            offset += piece.len();
        }
    };
    if let ([input], Some(bytes)) = (inputs, row_bytes.clone().next()) {
        return write(input, rows.start * bytes..rows.end * bytes);
    }
    for row in rows {
        for (input, bytes) in inputs.iter().zip(row_bytes.clone()) {
            write(input, row * bytes..(row + 1) * bytes);
        }
    }
}

#[cfg(test)]
mod tests;
