//! Requests whose inputs come later than their tasks are submitted.

use proto::slot::{GUARD_BYTES, GUARD_EMPTY, guard_word};

use super::*;

impl Bench {
    fn guard(&self, slot: SlotDescriptor) -> u64 {
        let offset = self.tasks.guards_offset() + slot.number() as usize * GUARD_BYTES;
        u64::from_le_bytes(self.arena.bytes(offset as u64, GUARD_BYTES as u32).try_into().unwrap())
    }

    fn late(&mut self, now: Timestamp, task: TaskId) {
        self.tasks.handle_dropped(now, task, DropReason::InputLate);
    }

    /// Every task that was admitted has ended, or has a slot.
    fn check_counts(&self) {
        let Counters { admitted, answered, failed, dropped, abandoned, .. } = self.tasks.counters();
        assert_eq!(admitted, answered + failed + dropped + abandoned + self.tasks.outstanding() as u64);
    }
}

const LATE: InferError = InferError::Dropped(DropReason::InputLate);

#[test]
fn a_guard_names_a_task_once_its_input_is_there() {
    let mut bench = Bench::new();
    // Its slot had a guard before.
    let before = bench.admit_with(1, vec![]).unwrap();
    let (task, slot) = bench.submitted()[0];
    bench.tasks.handle_inputs(Timestamp(1), before, &inputs(1), &bench.arena);
    bench.answer(slot, done(task, 3), &[0; 3]);
    assert!(bench.tasks.poll_reply().unwrap().1.is_ok());

    let request = bench.admit_with(3, vec![]).unwrap();
    let tasks = bench.submitted();
    assert!(tasks.iter().all(|(_, slot)| slot.is_guarded() && bench.guard(*slot) == GUARD_EMPTY), "{tasks:?}");
    assert_eq!(tasks[0].1.number(), slot.number());
    bench.tasks.handle_inputs(Timestamp(1), request, &inputs(3), &bench.arena);
    for (row, (task, slot)) in (0..).zip(&tasks) {
        assert_eq!(bench.arena.bytes(slot.input_offset, slot.input_bytes), [row, row, row, 1, row]);
        assert_eq!(bench.guard(*slot), guard_word(*task));
    }
    let (task, slot) = tasks[0];
    bench.answer(slot, AnswerHeader { tasks: 3, ..done(task, 9) }, &[5; 9]);
    let reply = bench.tasks.poll_reply().unwrap().1.unwrap();
    assert!(!reply.was_late);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_timeout()), (0, None));
    bench.check_counts();
}

#[test]
fn an_ordinary_request_has_nothing_to_do_with_guards() {
    let mut bench = Bench::new();
    bench.admit(3).unwrap();
    let tasks = bench.submitted();
    assert!(tasks.iter().all(|(_, slot)| !slot.is_guarded() && bench.guard(*slot) == 0));
    assert_eq!(bench.tasks.next_task, 3);
}

#[test]
fn who_is_late_is_submitted_once_more_in_its_slot_when_its_input_comes() {
    let mut bench = Bench::new();
    let request = bench.admit_with(3, vec![]).unwrap();
    let first = bench.submitted();
    // Two are late before their input comes, one after that.
    bench.late(Timestamp(5), first[0].0);
    bench.late(Timestamp(5), first[1].0);
    assert_eq!((bench.submitted(), bench.tasks.outstanding()), (vec![], 3));
    bench.check_counts();
    bench.tasks.handle_inputs(SUBMIT_BY, request, &inputs(3), &bench.arena);
    bench.late(SUBMIT_BY, first[2].0);
    let again = bench.submitted();
    for ((row, (task, slot)), (former, lease)) in (0..).zip(&again).zip(&first) {
        assert_eq!((*task, *slot), (TaskId(former.0 + 3), SlotDescriptor { slot: lease.number(), ..*lease }));
        assert_eq!(bench.arena.bytes(slot.input_offset, slot.input_bytes), [row, row, row, 1, row]);
    }
    assert!(again.windows(2).all(|pair| pair[1].0.0 == pair[0].0.0 + 1 && pair[1].1.follows(&pair[0].1)));
    assert_eq!(bench.tasks.poll_timeout(), Some(Timestamp(0) + SLO + WORD_WAIT));
    // What is said of the first tasks is said of nobody any more.
    bench.late(Timestamp(9), first[0].0);
    assert_eq!(bench.tasks.handle_fenced(vec![first[1].0, again[1].0]), [again[1].0]);
    bench.answer(again[0].1, done(first[0].0, 3), &[0; 3]);
    assert_eq!((bench.tasks.counters().stale_answers, bench.tasks.poll_reply()), (1, None));
    bench.answer(again[1].1, AnswerHeader { attempt: 1, ..done(again[1].0, 3) }, &[1, 11, 21]);
    bench.answer(again[0].1, done(again[0].0, 3), &[0, 10, 20]);
    bench.answer(again[2].1, done(again[2].0, 3), &[2, 12, 22]);
    let reply = bench.tasks.poll_reply().unwrap().1.unwrap();
    assert_eq!(reply.outputs, [vec![0, 10, 1, 11, 2, 12], vec![20, 21, 22]]);
    assert!(reply.was_late);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.counters().late_inputs), (0, 3));
    bench.check_counts();
    // The next request's ids follow.
    bench.admit(1).unwrap();
    assert_eq!(bench.submitted()[0].0, TaskId(first[0].0.0 + 6));
}

#[test]
fn who_is_late_twice_or_too_late_ends_for_that_reason() {
    let ends = |act: &dyn Fn(&mut Bench, RequestId, TaskId)| {
        let mut bench = Bench::new();
        let request = bench.admit_with(1, vec![]).unwrap();
        let (task, _) = bench.submitted()[0];
        act(&mut bench, request, task);
        assert_eq!(bench.tasks.poll_reply(), Some((request, Err(LATE))));
        assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_timeout()), (0, None));
        // It comes after all.
        bench.tasks.handle_inputs(Timestamp(30_000_000), request, &inputs(1), &bench.arena);
        assert_eq!((bench.tasks.poll_message(), bench.tasks.poll_reply()), (None, None));
        bench.check_counts();
    };
    ends(&|bench, request, task| {
        bench.tasks.handle_inputs(Timestamp(1), request, &inputs(1), &bench.arena);
        bench.late(Timestamp(2), task);
        let (again, _) = bench.submitted()[0];
        bench.late(Timestamp(3), again);
    });
    ends(&|bench, _, task| bench.late(SUBMIT_BY + Span(1), task));
    ends(&|bench, request, task| {
        bench.late(Timestamp(2), task);
        bench.tasks.handle_inputs(SUBMIT_BY + Span(1), request, &inputs(1), &bench.arena);
    });
    ends(&|bench, _, task| {
        bench.late(Timestamp(2), task);
        assert_eq!(bench.tasks.poll_timeout(), Some(SUBMIT_BY));
        bench.tasks.handle_timeout(SUBMIT_BY - Span(1));
        assert_eq!(bench.tasks.poll_reply(), None);
        bench.tasks.handle_timeout(SUBMIT_BY);
    });
}

/// Only tasks that the scheduler has are cancelled; the others end at once.
#[test]
fn a_request_that_ends_before_its_input_comes_frees_what_waits_for_it() {
    let mut bench = Bench::new();
    let request = bench.admit_with(2, vec![]).unwrap();
    let tasks = bench.submitted();
    bench.late(Timestamp(2), tasks[0].0);
    bench.tasks.handle_cancel(request);
    let cancel = FrontendToModelThread::Cancel { task: tasks[1].0, model: ModelId(3) };
    assert_eq!((bench.tasks.poll_message(), bench.tasks.poll_message()), (Some((THREAD, cancel)), None));
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_timeout()), (1, None));
    bench.tasks.handle_inputs(Timestamp(3), request, &inputs(2), &bench.arena);
    assert_eq!(bench.guard(tasks[1].1), GUARD_EMPTY, "nobody is to read it");
    bench.late(Timestamp(4), tasks[1].0);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (0, None));
    bench.check_counts();
    // The same, where the last one waits.
    let request = bench.admit_with(1, vec![]).unwrap();
    let (task, _) = bench.submitted()[0];
    bench.late(Timestamp(5), task);
    bench.tasks.handle_cancel(request);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_message()), (0, None));
    assert!(bench.tasks.groups.is_empty());
    bench.check_counts();
}

#[test]
fn inputs_of_another_size_than_was_admitted_end_the_request() {
    let mut bench = Bench::new();
    for wrong in [vec![], inputs(1), inputs(3), inputs(2)[..1].to_vec()] {
        let request = bench.admit_with(2, vec![]).unwrap();
        bench.submitted();
        bench.tasks.handle_inputs(Timestamp(1), request, &wrong, &bench.arena);
        assert!(matches!(bench.tasks.poll_reply(), Some((ended, Err(InferError::Invalid(_)))) if ended == request));
        while bench.tasks.poll_message().is_some() {}
    }
}

#[test]
fn losing_the_scheduler_ends_what_waits_for_its_input() {
    let mut bench = Bench::new();
    let request = bench.admit_with(2, vec![]).unwrap();
    let tasks = bench.submitted();
    bench.late(Timestamp(2), tasks[0].0);
    bench.tasks.abandon(&InferError::SchedulerLost);
    assert_eq!(bench.tasks.poll_reply(), Some((request, Err(InferError::SchedulerLost))));
    bench.tasks.release_abandoned();
    assert_eq!(bench.tasks.outstanding(), 0);
    bench.check_counts();
}
