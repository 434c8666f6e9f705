use super::*;

const LATER: Timestamp = Timestamp(7);

#[test]
fn an_answer_that_does_not_come_is_missed_once_and_fails_its_request_when_nothing_can_reach_its_slot() {
    let mut bench = Bench::new();
    let request = bench.admit(2).unwrap();
    let tasks = bench.submitted();
    bench.answer(tasks[0].1, done(tasks[0].0, 3), &[0; 3]);
    let claimed = [tasks[0].0, tasks[1].0, tasks[1].0, TaskId(77)];
    bench.tasks.handle_claimed(LATER, BACKEND, &claimed);
    bench.tasks.handle_claimed(LATER, BackendId(6), &claimed);
    let at = bench.tasks.poll_timeout().unwrap();
    assert_eq!(at, LATER + Wait::Written.bound());
    assert_eq!(bench.tasks.take_missed(at - Span(1)), BTreeMap::new());
    let missed = BTreeMap::from([(BACKEND, vec![tasks[1].0])]);
    assert_eq!((bench.tasks.take_missed(at), bench.tasks.take_missed(at)), (missed, BTreeMap::new()));
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (1, None), "its link is not down yet");
    bench.tasks.handle_not_written(BACKEND, &claimed);
    let failed = Err(InferError::NotWritten { backend: BACKEND.0 });
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (0, Some((request, failed))));
    assert_eq!((bench.tasks.poll_timeout(), bench.tasks.poll_reply()), (None, None));
}

#[test]
fn an_answer_that_comes_within_its_time_is_not_missed() {
    let mut bench = Bench::new();
    bench.admit(1).unwrap();
    let (task, slot) = bench.submitted()[0];
    bench.tasks.handle_claimed(LATER, BACKEND, &[task]);
    bench.answer(slot, done(task, 3), &[0; 3]);
    assert!(bench.tasks.poll_reply().unwrap().1.is_ok());
    assert_eq!(bench.tasks.take_missed(LATER + Wait::Written.bound()), BTreeMap::new());
}

#[test]
fn a_slot_whose_client_has_hung_up_is_not_lost_with_its_answer() {
    let mut bench = Bench::new();
    let request = bench.admit(1).unwrap();
    let (task, _) = bench.submitted()[0];
    bench.tasks.handle_cancel(request);
    bench.tasks.handle_claimed(LATER, BACKEND, &[task]);
    let missed = bench.tasks.take_missed(LATER + Wait::Written.bound());
    bench.tasks.handle_not_written(BACKEND, &missed[&BACKEND]);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (0, None));
}

/// The next primary is told of what is open, and it runs again; so does what is fenced.
#[test]
fn what_runs_again_is_missed_no_more() {
    for is_fenced in [true, false] {
        let mut bench = Bench::new();
        bench.admit(1).unwrap();
        let (task, _) = bench.submitted()[0];
        bench.tasks.handle_claimed(LATER, BACKEND, &[task]);
        if is_fenced {
            assert_eq!(bench.tasks.handle_fenced(vec![task]), [task]);
        } else {
            bench.tasks.handle_obeyed(|_| None);
        }
        let at = LATER + Wait::Written.bound();
        assert_eq!(bench.tasks.take_missed(at), BTreeMap::new());
        bench.tasks.handle_claimed(at, BACKEND, &[task]);
        assert_eq!(bench.tasks.take_missed(at + Wait::Written.bound()).len(), 1, "its next attempt is");
    }
}
