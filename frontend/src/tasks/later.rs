//! Requests whose inputs come later than their tasks are submitted: a picture waits in the model's queue while it is
//! decoded (Symphony, section 4.3), and its deadline counts from its arrival (section 5.3).
//!
//! Such a task's slot is guarded: its guard is emptied before the task is submitted, and names the task once the input
//! is there. A backend that finds another word there leaves the task out of its batch, and the scheduler drops it as
//! [`DropReason::InputLate`]. Nobody reads the slot then, so the row keeps it, and is submitted once more under another
//! id as soon as the input is there, as long as that is of use. A row that is late twice has been lied about, and
//! fails.

use proto::slot::{GUARD_EMPTY, guard_word};

use super::*;

/// Empties the guard of a slot whose input is to come.
pub(super) fn guard(slot: SlotDescriptor, slots: &Slots, arena: &dyn Arena) {
    arena.publish(slots.guard_offset(slot), GUARD_EMPTY);
}

impl Tasks {
    /// The inputs of a request that was admitted without, as they are in [`CheckedRequest`]. Nothing happens if it has
    /// ended meanwhile, or has had them before.
    pub fn handle_inputs(&mut self, now: Timestamp, id: RequestId, inputs: &[Rope], arena: &dyn Arena) {
        let Some(&(first, _)) = self.requests.get(&id) else { return };
        let group = self.groups.get_mut(&first).expect("a request has tasks");
        let rows = group.rows();
        let Some(later) = group.later_mut().filter(|later| !later.is_here) else { return };
        let fits = |(input, bytes): (&Rope, &usize)| input.len() == rows * bytes;
        if inputs.len() != later.row_bytes.len() || !inputs.iter().zip(&later.row_bytes).all(fits) {
            let wrong = format!("the request: found {} inputs of another size than was admitted", inputs.len());
            return self.fail_request(Some(id), InferError::Invalid(wrong));
        }
        later.is_here = true;
        let (row_bytes, is_too_late) = (std::mem::take(&mut later.row_bytes), now > later.submit_by);
        if is_too_late && group.waiting_rows().next().is_some() {
            return self.fail_request(Some(id), DropReason::InputLate.into());
        }
        for (rows, lease) in group.runs() {
            let offset = lease.descriptor(0).input_offset as usize;
            write_rows(rows, offset, inputs, row_bytes.iter().copied(), arena);
        }
        for row in group.submitted_rows() {
            arena.publish(self.slots.guard_offset(group.slot(row)), guard_word(group.task(row)));
        }
        let waiting: Vec<usize> = group.waiting_rows().collect();
        for row in waiting {
            self.submit_again(first, row);
        }
    }

    /// The input of a row's first task was not there. False if the row has nothing more to hope for.
    pub(super) fn on_late(&mut self, now: Timestamp, first: TaskId, row: usize) -> bool {
        self.counters.late_inputs += 1;
        let group = self.groups.get_mut(&first).expect("the caller found it");
        let Some(&mut Later { submit_by, is_here, .. }) = group.later_mut() else { return false };
        if now > submit_by || !group.begin_wait(row) {
            return false;
        }
        if is_here {
            self.submit_again(first, row);
        } else {
            self.set_timer(first, submit_by);
        }
        true
    }

    /// The row's first task ends, and its second begins.
    fn submit_again(&mut self, first: TaskId, row: usize) {
        let group = self.groups.get_mut(&first).expect("the caller found it");
        group.begin_again(row);
        let Some(&mut Later { give_up_at, .. }) = group.later_mut() else { return };
        self.messages.push_back((group.model_thread, group.submit(row)));
        self.counters.dropped += 1;
        self.counters.admitted += 1;
        self.set_timer(first, give_up_at);
    }

    /// Whether a row of a request waits for its input and is not submitted meanwhile.
    pub(super) fn is_waiting(&self, request: RequestId) -> bool {
        let group = self.requests.get(&request).and_then(|(first, _)| self.groups.get(first));
        group.is_some_and(|group| group.waiting_rows().next().is_some())
    }

    /// Rows whose request has ended wait for nothing any more.
    pub(super) fn end_waiting(&mut self, first: TaskId) {
        let waiting: Vec<usize> = self.groups[&first].waiting_rows().collect();
        for row in waiting {
            self.counters.dropped += 1;
            self.end_tasks(first, row..row + 1);
        }
    }

    fn set_timer(&mut self, first: TaskId, at: Timestamp) {
        let Some(id) = self.groups[&first].request.as_ref().map(|request| request.id) else { return };
        let Some((_, timer)) = self.requests.get_mut(&id) else { return };
        self.timers.remove(&(std::mem::replace(timer, at), id));
        self.timers.insert((at, id));
    }
}
