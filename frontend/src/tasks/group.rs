//! The tasks of one request, which have ids that follow each other, and what has been answered of it.
//!
//! A group lives until its last task has ended; the request may end before, without a reply or with a failure.

use super::*;
use crate::records::{self, Unpacked};

/// A model that the primary has never named.
const UNKNOWN: ModelId = ModelId(u32::MAX);

/// The tasks of one request.
#[derive(Debug)]
pub(super) struct Group {
    first: TaskId,
    model: Rc<Model>,
    /// As the primary calls it.
    model_id: ModelId,
    /// Where its tasks were submitted, whoever owns the model by now.
    pub(super) model_thread: ModelThreadId,
    terms: Terms,
    /// The first row of each, ascending, and its slots.
    leases: Vec<(usize, Lease)>,
    rows: Vec<Row>,
    /// Rows that have a slot.
    open: usize,
    /// Whether the input of any row was not there when its batch was fetched.
    was_late: bool,
    /// `None` once it has ended.
    pub(super) request: Option<Request>,
}

/// What all tasks of a request are submitted with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// On the scheduler's clock.
    pub(super) deadline: Timestamp,
    pub(super) priority: u8,
    pub(super) application: Application,
    /// Inputs come later than the tasks are submitted.
    pub(super) comes_later: bool,
}

/// One row, and its task.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    /// Fences that it has survived, modulo [`ImmediateData::ATTEMPTS`].
    attempt: u16,
    stand: Stand,
    /// A backend says that it has answered this attempt.
    is_claimed: bool,
}

/// Where a row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stand {
    /// Its task is submitted.
    #[default]
    Submitted,
    /// Its task has ended for want of its input; it has a slot and waits for that.
    Waits,
    /// It was late and is submitted again, as another task.
    Again,
    Ended,
}

/// A request that waits for answers.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) unanswered: usize,
    pub(super) outputs: Outputs,
    /// Of one row of each batch that has run any.
    pub(super) batches: Vec<Timing>,
    pub(super) admitted_at: Timestamp,
    /// If its inputs come later than its tasks were submitted.
    pub(super) later: Option<Later>,
}

/// What has come of a request's outputs.
#[derive(Debug)]
pub(super) enum Outputs {
    /// Each output of all rows.
    Fixed {
        /// Bytes of one row of each.
        row_bytes: Vec<usize>,
        outputs: Vec<Vec<u8>>,
    },
    /// The record of each row, or why one cannot be right.
    Records(Result<Vec<Vec<u8>>, String>),
}

/// Inputs that come later.
#[derive(Debug)]
pub(super) struct Later {
    /// Bytes of one row of each input.
    pub(super) row_bytes: Vec<usize>,
    /// Whoever is submitted again later than this, on our clock, cannot be answered in time.
    pub(super) submit_by: Timestamp,
    /// When the request is given up, once no row waits for its input.
    pub(super) give_up_at: Timestamp,
    /// They are in their slots.
    pub(super) is_here: bool,
}

impl Group {
    /// Of as many tasks as there are slots.
    pub(super) fn new(
        first: TaskId,
        (model, offer): (Rc<Model>, &Offer),
        terms: Terms,
        leases: Vec<Lease>,
        request: Request,
    ) -> Self {
        let mut open = 0;
        let leases = leases.into_iter().map(|lease| {
            let start = open;
            open += lease.slots();
            (start, lease)
        });
        let leases = leases.collect();
        let (rows, request) = (vec![Row::default(); open], Some(request));
        let (model_id, model_thread) = (offer.id, offer.model_thread);
        Self { first, model, model_id, model_thread, terms, leases, rows, open, was_late: false, request }
    }

    /// The model as it was when the request came.
    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    /// Another primary is obeyed, which says this of the model.
    pub(super) fn handle_obeyed(&mut self, offer: Option<Offer>) {
        (self.model_id, self.model_thread) =
            offer.map_or((UNKNOWN, ModelThreadId(0)), |offer| (offer.id, offer.model_thread));
        self.rows.iter_mut().for_each(|row| row.is_claimed = false);
    }

    /// Gives a row's task to the scheduler.
    pub(super) fn submit(&self, row: usize) -> FrontendToModelThread {
        let Terms { deadline, priority, application, .. } = self.terms;
        let (task, model, slot) = (self.task(row), self.model_id, self.offered_slot(row));
        FrontendToModelThread::Submit { task, model, deadline, priority, application, is_first: row == 0, slot }
    }

    /// Names a row's task, which an earlier primary was given, to the next one.
    pub(super) fn open(&self, row: usize) -> FrontendToModelThread {
        let Terms { deadline, priority, application, .. } = self.terms;
        let (task, model, slot) = (self.task(row), self.model_id, self.offered_slot(row));
        let attempt = self.rows[row].attempt;
        FrontendToModelThread::Open { task, model, deadline, priority, application, attempt, slot }
    }

    /// Takes a row's task back.
    pub(super) fn cancel(&self, row: usize) -> FrontendToModelThread {
        FrontendToModelThread::Cancel { task: self.task(row), model: self.model_id }
    }

    /// A row's slot, as the scheduler is told of it: whoever is submitted again has its input.
    fn offered_slot(&self, row: usize) -> SlotDescriptor {
        let is_guarded = self.terms.comes_later && self.rows[row].stand == Stand::Submitted;
        if is_guarded { self.slot(row).guarded() } else { self.slot(row) }
    }

    /// The task of a row. Whoever is submitted again is called by the ids that follow those of all rows, in the same
    /// order, so that neighbours stay neighbours.
    pub(super) fn task(&self, row: usize) -> TaskId {
        let is_again = self.rows[row].stand == Stand::Again;
        TaskId(self.first.0 + row as u64 + if is_again { self.rows.len() as u64 } else { 0 })
    }

    /// The row of a task; `None` if it is no task of this group, or has ended.
    pub(super) fn row(&self, task: TaskId) -> Option<usize> {
        let index = usize::try_from(task.0.checked_sub(self.first.0)?).ok()?;
        let (row, stand) = match index.checked_sub(self.rows.len()) {
            None => (index, Stand::Submitted),
            Some(row) => (row, Stand::Again),
        };
        self.rows.get(row).filter(|found| found.stand == stand).map(|_| row)
    }

    /// The row whose slot was leased in the name of this task, if its task has not ended.
    pub(super) fn row_of_slot(&self, owner: TaskId) -> Option<usize> {
        let row = usize::try_from(owner.0.checked_sub(self.first.0)?).ok()?;
        self.rows.get(row).filter(|found| found.is_submitted()).map(|_| row)
    }

    /// Where a row's bytes lie.
    pub(super) fn slot(&self, row: usize) -> SlotDescriptor {
        let (start, lease) = self.lease(row);
        lease.descriptor(row - start)
    }

    fn lease(&self, row: usize) -> (usize, &Lease) {
        let (start, lease) = &self.leases[self.lease_index(row)];
        (*start, lease)
    }

    fn lease_index(&self, row: usize) -> usize {
        self.leases.partition_point(|(start, _)| *start <= row) - 1
    }

    /// The rows of each run of neighbouring slots.
    pub(super) fn runs(&self) -> impl Iterator<Item = (Range<usize>, &Lease)> {
        self.leases.iter().map(|(start, lease)| (*start..start + lease.slots(), lease))
    }

    /// Rows that have a slot.
    pub(super) fn open_rows(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().enumerate().filter(|(_, row)| row.stand != Stand::Ended).map(|(index, _)| index)
    }

    /// Rows whose tasks have not ended.
    pub(super) fn submitted_rows(&self) -> impl Iterator<Item = usize> {
        self.open_rows().filter(|&row| self.rows[row].is_submitted())
    }

    /// Rows that wait for their inputs, and are not submitted meanwhile.
    pub(super) fn waiting_rows(&self) -> impl Iterator<Item = usize> {
        self.open_rows().filter(|&row| self.rows[row].stand == Stand::Waits)
    }

    /// How many rows the request has.
    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// What comes later, if the request has not ended.
    pub(super) fn later_mut(&mut self) -> Option<&mut Later> {
        self.request.as_mut()?.later.as_mut()
    }

    /// A row's first task has ended for want of its input. False if it was its second.
    pub(super) fn begin_wait(&mut self, row: usize) -> bool {
        let stand = &mut self.rows[row].stand;
        let is_first = *stand == Stand::Submitted;
        if is_first {
            *stand = Stand::Waits;
            self.was_late = true;
        }
        is_first
    }

    /// A row that waited is submitted again, as a task whose input is in its slot.
    pub(super) fn begin_again(&mut self, row: usize) {
        self.rows[row] = Row { stand: Stand::Again, ..Row::default() };
    }

    /// Whether a row's task is on this attempt.
    pub(super) fn is_present(&self, row: usize, attempt: u16) -> bool {
        self.rows[row].attempt == attempt
    }

    /// Rows from this one on that can be answered at once, `wanted` at most: their slots are neighbours, and their
    /// tasks have not ended and are on this attempt.
    pub(super) fn run_length(&self, row: usize, wanted: usize, attempt: u16) -> usize {
        let (start, lease) = self.lease(row);
        let neighbours = &self.rows[row..(start + lease.slots()).min(row + wanted)];
        let stand = self.rows[row].stand;
        let is_other = |row: &Row| row.stand != stand || row.attempt != attempt;
        neighbours.iter().position(is_other).unwrap_or(neighbours.len())
    }

    /// A task has no answer from the backend that was fenced. False if it is no task of this group, or has ended.
    pub(super) fn begin_next_attempt(&mut self, task: TaskId) -> bool {
        let Some(row) = self.row(task) else { return false };
        let Row { attempt, is_claimed, .. } = &mut self.rows[row];
        *attempt = (*attempt + 1) % ImmediateData::ATTEMPTS;
        *is_claimed = false;
        true
    }

    /// A backend says that it has answered a row. False if that is known.
    pub(super) fn claim(&mut self, row: usize) -> bool {
        !std::mem::replace(&mut self.rows[row].is_claimed, true)
    }

    /// Whether a task has not ended, and a backend says that it has answered it.
    pub(super) fn is_claimed(&self, task: TaskId) -> bool {
        self.row(task).is_some_and(|row| self.rows[row].is_claimed)
    }

    /// Bytes of a row's outputs; `None` if the request has ended, or they differ from row to row.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        match &self.request.as_ref()?.outputs {
            Outputs::Fixed { row_bytes, .. } => Some(row_bytes.iter().sum()),
            Outputs::Records(_) => None,
        }
    }

    /// Frees the slots of some neighbours.
    pub(super) fn release(&mut self, rows: Range<usize>, slots: &mut Slots) {
        let index = self.lease_index(rows.start);
        let (start, lease) = &mut self.leases[index];
        slots.release(lease, rows.start - *start..rows.end - *start);
    }

    /// Tasks end; yields how many have not.
    pub(super) fn end(&mut self, rows: Range<usize>) -> usize {
        self.open -= rows.len();
        self.rows[rows].iter_mut().for_each(|row| row.stand = Stand::Ended);
        self.open
    }

    /// Copies the outputs of some rows out of their slots; yields the request and its reply if these were the last.
    pub(super) fn take_rows(
        &mut self,
        rows: Range<usize>,
        (payload, header): (usize, AnswerHeader),
        (answered_at, backend): (Timestamp, BackendId),
        arena: &dyn Arena,
    ) -> Option<(RequestId, Result<Reply, InferError>)> {
        let request = self.request.as_mut()?;
        request.outputs.take(rows.clone(), (payload, header.payload_bytes as usize), arena);
        let timing = Timing {
            admitted_at: request.admitted_at,
            deadline: self.terms.deadline,
            stamps: header.stamps,
            answered_at,
            batch_size: header.batch_size,
            backend,
            gpu: header.gpu.into(),
        };
        request.batches.retain(|batch| batch.execution() != timing.execution());
        request.batches.push(timing);
        request.unanswered -= rows.len();
        if request.unanswered > 0 {
            return None;
        }
        let Request { id, outputs, batches, .. } = self.request.take()?;
        let (rows, was_late) = (self.rows.len(), self.was_late);
        let reply = outputs.unpacked(&self.model).map(|Unpacked { shapes, outputs }| Reply {
            outputs,
            shapes,
            rows,
            timing,
            batches,
            was_late,
        });
        Some((id, reply.map_err(InferError::BadAnswer)))
    }
}

impl Row {
    fn is_submitted(self) -> bool {
        matches!(self.stand, Stand::Submitted | Stand::Again)
    }
}

impl Outputs {
    /// Of a request with so many rows, none of which is answered.
    pub(super) fn new(model: &Model, rows: usize) -> Self {
        if cell::is_record(&model.outputs) {
            return Self::Records(Ok(vec![Vec::new(); rows]));
        }
        let row_bytes: Vec<usize> = model.outputs.iter().map(Tensor::bytes).collect();
        let outputs = row_bytes.iter().map(|&bytes| vec![0; bytes * rows]).collect();
        Self::Fixed { row_bytes, outputs }
    }

    /// Each row's outputs lie one after another, and the rows too; a reply has each output of all rows in one piece.
    fn take(&mut self, rows: Range<usize>, (mut from, payload_bytes): (usize, usize), arena: &dyn Arena) {
        match self {
            Self::Fixed { row_bytes, outputs } => {
                if let ([output], &[bytes]) = (&mut outputs[..], &row_bytes[..]) {
                    return arena.read(from, &mut output[rows.start * bytes..rows.end * bytes]);
                }
                for row in rows {
                    for (output, &bytes) in outputs.iter_mut().zip(&*row_bytes) {
                        arena.read(from, &mut output[row * bytes..][..bytes]);
                        from += bytes;
                    }
                }
            }
            Self::Records(Ok(records)) => {
                if let Err(wrong) = take_records(&mut records[rows], (from, payload_bytes), arena) {
                    *self = Self::Records(Err(wrong));
                }
            }
            Self::Records(Err(_)) => {}
        }
    }

    /// Of all rows; with shapes, if these are not always the same.
    fn unpacked(self, model: &Model) -> Result<Unpacked, String> {
        match self {
            Self::Fixed { outputs, .. } => {
                Ok(Unpacked { shapes: Vec::new(), outputs: outputs.into_iter().map(Bytes::from).collect() })
            }
            Self::Records(records) => records::unpack(&model.outputs, &records?),
        }
    }
}

/// Copies the records of an answer, whose lengths its sender chose.
fn take_records(
    records: &mut [Vec<u8>],
    (mut from, payload_bytes): (usize, usize),
    arena: &dyn Arena,
) -> Result<(), String> {
    let end = from + payload_bytes;
    for record in records {
        let mut head = [0; cell::HEAD_BYTES];
        let bytes = (end - from >= head.len()).then(|| {
            arena.read(from, &mut head);
            cell::record_bytes(&head)
        });
        let bytes = bytes.flatten().filter(|&bytes| bytes <= end - from);
        let bytes = bytes.ok_or_else(|| format!("its records are not within its {payload_bytes} bytes"))?;
        *record = vec![0; bytes];
        arena.read(from, record);
        from += bytes;
    }
    if from == end { Ok(()) } else { Err(format!("found {} bytes behind its records", end - from)) }
}
