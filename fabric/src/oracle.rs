//! What must hold after every step, seen from outside: no core is asked, only what it says and what its memory holds.

use std::{collections::BTreeMap, ops::Range};

use proto::{SlotDescriptor, Span, TaskId, Timestamp, frontend_to_scheduler::FrontendToModelThread};
use repository::emulated::digest;
use thiserror::Error;

use crate::node::Node;

/// A broken invariant of ARCHITECTURE.md.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    /// Invariant 1.
    #[error("invariant 1 (a task ends exactly once): {0}")]
    Ends(String),
    /// Invariant 2.
    #[error("invariant 2 (batches start in their window, one at a time): {0}")]
    Window(String),
    /// Invariant 3.
    #[error("invariant 3 (no slot is reused while a READ or WRITE can still arrive): {0}")]
    Slot(String),
    /// Invariant 4.
    #[error("invariant 4 (a completed task met its deadline or is reported late): {0}")]
    Late(String),
    /// Invariant 5.
    #[error("invariant 5 (everything bounded stays within its bound): {0}")]
    Bound(String),
    /// Invariant 6.
    #[error("invariant 6 (no batch runs without its weights, which fit): {0}")]
    Weights(String),
    /// The fabric does not come back once faults have ended.
    #[error("liveness (once faults end, all is served again): {0}")]
    Liveness(String),
    /// A core panicked.
    #[error("a core panicked: {0}")]
    Panic(String),
}

/// What a frontend has said of a task.
#[derive(Debug, Clone, Copy)]
struct Shadow {
    slot: SlotDescriptor,
    /// Of its input, as it lay in the slot when the task was submitted, or is to lie there when it is read; not known
    /// of one that comes later and was first told to another primary than it was admitted under.
    input: Option<[u64; 2]>,
}

/// Watches a run.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    tasks: BTreeMap<(Node, TaskId), Shadow>,
    /// By frontend and where they start: where the inputs and the places of answers in use end, and whose they were
    /// last.
    areas: BTreeMap<(Node, u64), (u64, TaskId)>,
    violation: Option<Violation>,
}

impl Oracle {
    /// The first violation counts.
    pub(super) fn report(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    /// What was violated, if anything was.
    pub(super) fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// A frontend submits a task, or tells another primary of it; its input lies in `arena`, or is `later` there.
    pub(super) fn handle_submitted(
        &mut self,
        node: Node,
        message: &FrontendToModelThread,
        (arena, later): (&[u8], Option<&[u8]>),
    ) {
        let (task, slot) = match message {
            FrontendToModelThread::Submit { task, slot, .. } if later.is_some() != slot.is_guarded() => {
                return self.report(Violation::Slot(format!("{task:?} is guarded: {}", slot.is_guarded())));
            }
            FrontendToModelThread::Submit { task, slot, .. } => (task, slot),
            // It was admitted while there was no primary.
            FrontendToModelThread::Open { task, slot, .. } if !self.tasks.contains_key(&(node, *task)) => (task, slot),
            _ => return,
        };
        let in_slot = (!slot.is_guarded()).then(|| &arena[slot.input_offset as usize..][..slot.input_bytes as usize]);
        let input = later.or(in_slot).map(digest);
        self.tasks.insert((node, *task), Shadow { slot: *slot, input });
        let input = slot.input_offset..slot.input_offset + u64::from(slot.input_bytes);
        let answer = slot.answer_offset..slot.answer_offset + u64::from(slot.answer_bytes_max);
        self.take_area(node, input, *task);
        self.take_area(node, answer, *task);
    }

    /// Areas in use never overlap one another, so those that overlap this one are the last that start before its end.
    fn take_area(&mut self, node: Node, area: Range<u64>, task: TaskId) {
        let before = self.areas.range((node, 0)..(node, area.end)).rev();
        let former: Vec<_> = before.take_while(|(_, (end, _))| area.start < *end).map(|(key, _)| *key).collect();
        for key in former {
            self.areas.remove(&key);
        }
        self.areas.insert((node, area.start), (area.end, task));
    }

    /// A frontend's process ended: its memory is gone.
    pub(super) fn handle_died(&mut self, node: Node) {
        self.tasks.retain(|(other, _), _| *other != node);
        self.areas.retain(|(other, _), _| *other != node);
    }

    /// A READ of the whole inputs of a run of tasks, from this one on, has read these bytes in a frontend's arena.
    pub(super) fn handle_read(&mut self, node: Node, first: TaskId, bytes: &[u8]) {
        let input_bytes = self.tasks.get(&(node, first)).map_or(bytes.len(), |shadow| shadow.slot.input_bytes as usize);
        for (input, task) in bytes.chunks(input_bytes).zip(first.0..) {
            self.check_input(node, TaskId(task), input);
        }
    }

    fn check_input(&mut self, node: Node, task: TaskId, bytes: &[u8]) {
        match self.tasks.get(&(node, task)) {
            Some(shadow) if shadow.input.is_none_or(|input| input == digest(bytes)) => {}
            Some(shadow) => {
                let slot = shadow.slot.slot;
                self.report(Violation::Slot(format!("a READ for {task:?} found another input in slot {slot}")));
            }
            None => self.report(Violation::Slot(format!("a READ for {task:?}, which was never submitted"))),
        }
    }

    /// Part of a WRITE of the answer of some tasks, this one and those that follow it, lands in a frontend's arena.
    pub(super) fn handle_written(&mut self, node: Node, (first, tasks): (TaskId, u16), offset: u64, bytes: usize) {
        let (mut offset, end) = (offset, offset + bytes as u64);
        while offset < end {
            let area = self.areas.range(..=(node, offset)).next_back().filter(|((other, _), _)| *other == node);
            let Some((_, &(area_end, owner))) = area.filter(|(_, (area_end, _))| offset < *area_end) else {
                return self.report(Violation::Slot(format!("a WRITE for {first:?} lands where no slot is")));
            };
            if !(first.0..first.0 + u64::from(tasks)).contains(&owner.0) {
                let text = format!("a WRITE for {tasks} tasks from {first:?} lands in the slot that {owner:?} has now");
                return self.report(Violation::Slot(text));
            }
            offset = area_end;
        }
    }

    /// A batch starts: `at` and its window are on the scheduler's clock, `error` is how far the backend may be off.
    pub(super) fn handle_started(&mut self, at: Timestamp, window: (Timestamp, Timestamp), error: Span) {
        let (exec_at, latest) = window;
        if at < exec_at - error || at > latest + error {
            let early = exec_at - at;
            let late = at - latest;
            let text = format!("a batch starts {early} before its window and {late} after it (allowed: {error})");
            self.report(Violation::Window(text));
        }
    }
}
