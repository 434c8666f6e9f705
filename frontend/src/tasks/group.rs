//! The tasks of one request, which have ids that follow each other, and what has been answered of it.
//!
//! A group lives until its last task has ended; the request may end before, without a reply or with a failure.

use super::*;

/// The tasks of one request.
#[derive(Debug)]
pub(super) struct Group {
    first: TaskId,
    pub(super) model: ModelId,
    /// Where its tasks were submitted, whoever owns the model by now.
    pub(super) model_thread: ModelThreadId,
    /// The first row of each, ascending, and its slots.
    leases: Vec<(usize, Lease)>,
    rows: Vec<Row>,
    /// Tasks that have not ended.
    open: usize,
    /// `None` once it has ended.
    pub(super) request: Option<Request>,
}

/// One task.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    /// Fences that it has survived, modulo [`ImmediateData::ATTEMPTS`].
    attempt: u16,
    has_ended: bool,
}

/// A request that waits for answers.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) unanswered: usize,
    /// Bytes of one row of each output.
    pub(super) row_bytes: Vec<usize>,
    pub(super) outputs: Vec<Vec<u8>>,
    /// Of one row of each batch that has run any.
    pub(super) batches: Vec<Timing>,
    pub(super) admitted_at: Timestamp,
    pub(super) deadline: Timestamp,
}

impl Group {
    /// Of as many tasks as there are slots.
    pub(super) fn new(first: TaskId, offer: &Offer, leases: Vec<Lease>, request: Request) -> Self {
        let mut open = 0;
        let leases = leases.into_iter().map(|lease| {
            let start = open;
            open += lease.slots();
            (start, lease)
        });
        let leases = leases.collect();
        let (rows, request) = (vec![Row::default(); open], Some(request));
        Self { first, model: offer.id, model_thread: offer.model_thread, leases, rows, open, request }
    }

    /// The task of a row.
    pub(super) fn task(&self, row: usize) -> TaskId {
        TaskId(self.first.0 + row as u64)
    }

    /// The row of a task; `None` if it is no task of this group, or has ended.
    pub(super) fn row(&self, task: TaskId) -> Option<usize> {
        let row = usize::try_from(task.0.checked_sub(self.first.0)?).ok()?;
        self.rows.get(row).filter(|found| !found.has_ended).map(|_| row)
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

    /// Rows whose tasks have not ended.
    pub(super) fn open_rows(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().enumerate().filter(|(_, row)| !row.has_ended).map(|(index, _)| index)
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
        let is_other = |row: &Row| row.has_ended || row.attempt != attempt;
        neighbours.iter().position(is_other).unwrap_or(neighbours.len())
    }

    /// A task has no answer from the backend that was fenced. False if it is no task of this group, or has ended.
    pub(super) fn begin_next_attempt(&mut self, task: TaskId) -> bool {
        let Some(row) = self.row(task) else { return false };
        let attempt = &mut self.rows[row].attempt;
        *attempt = (*attempt + 1) % ImmediateData::ATTEMPTS;
        true
    }

    /// Bytes of a row's outputs; `None` if the request has ended.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        self.request.as_ref().map(|request| request.row_bytes.iter().sum())
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
        self.rows[rows].iter_mut().for_each(|row| row.has_ended = true);
        self.open
    }

    /// Copies the outputs of some rows out of their slots; yields the request and its reply if these were the last.
    pub(super) fn take_rows(
        &mut self,
        rows: Range<usize>,
        (payload, header): (usize, AnswerHeader),
        (answered_at, backend): (Timestamp, BackendId),
        arena: &dyn Arena,
    ) -> Option<(RequestId, Reply)> {
        let request = self.request.as_mut()?;
        request.take_outputs(rows.clone(), payload, arena);
        let timing = Timing {
            admitted_at: request.admitted_at,
            deadline: request.deadline,
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
        let outputs = outputs.into_iter().map(Bytes::from).collect();
        Some((id, Reply { outputs, rows: self.rows.len(), timing, batches }))
    }
}

impl Request {
    /// Each row's outputs lie one after another, and the rows too; a reply has each output of all rows in one piece.
    fn take_outputs(&mut self, rows: Range<usize>, mut from: usize, arena: &dyn Arena) {
        if let ([output], &[bytes]) = (&mut self.outputs[..], &self.row_bytes[..]) {
            return arena.read(from, &mut output[rows.start * bytes..rows.end * bytes]);
        }
        for row in rows {
            for (output, &bytes) in self.outputs.iter_mut().zip(&self.row_bytes) {
                arena.read(from, &mut output[row * bytes..][..bytes]);
                from += bytes;
            }
        }
    }
}
