//! What a GPU has behind the batch that it executes.

use super::*;

/// Plan 1 executes since 10, and should end at 21. Plan 2, with a task of each frontend, is all there.
fn two() -> Worker {
    let mut worker = one_executes();
    for task in 0..2 {
        worker.handle_fetched(Timestamp(12), place(1, task), true);
    }
    worker
}

/// Puts the next batch behind the one that executes, if that can be. Yields its tasks.
fn hand_over(worker: &mut Worker, now: i64) -> Option<Vec<usize>> {
    let model = worker.next_model(Timestamp(now));
    worker.hand_over_next(Timestamp(now));
    let executes = executes(worker).pop().map(|(_, tasks)| tasks);
    assert_eq!(model.is_some(), executes.is_some(), "both say the same");
    executes
}

/// The same, with plan 2 behind plan 1.
fn one_behind() -> Worker {
    let mut worker = two();
    assert_eq!(hand_over(&mut worker, 30), Some(vec![0, 1]));
    worker
}

fn is_asked_back(worker: &mut Worker) -> bool {
    actions(worker).contains(&Action::TakeBack)
}

fn task(frontend: u32, number: u64) -> TaskId {
    TaskId::new(FrontendId(frontend), number)
}

#[test]
fn a_batch_goes_behind_another_when_its_window_opens_before_that_should_end() {
    for (exec_at, since) in [(21, 13), (22, 22)] {
        let mut worker = one_executes();
        worker.handle_plan(Timestamp(11), plan(3, (exec_at, 60), &[0, 1])).unwrap();
        worker.handle_fetched(Timestamp(12), place(2, 0), true);
        assert_eq!(hand_over(&mut worker, 12), None, "an input is missing");
        worker.handle_fetched(Timestamp(13), place(2, 1), true);
        let at = worker.poll_timeout();
        assert_eq!(at, Timestamp(if since == 13 { 61 } else { since }), "time alone decides about the later one");
        assert_eq!(hand_over(&mut worker, since - 1).is_some(), since == 13);
        worker.handle_timeout(Timestamp(since));
        if since != 13 {
            assert_eq!(worker.poll_timeout(), Timestamp(61), "weights may be missing: it is not asked again and again");
            assert!(hand_over(&mut worker, since).is_some());
        }
        assert_eq!(worker.poll_timeout(), Timestamp(61), "its window ends");
        worker.handle_executed(Timestamp(30), done(10, 20));
        assert_eq!(executes(&mut worker), [], "the GPU has it already");
        worker.handle_executed(Timestamp(40), done(30, 40));
        let answered: Vec<u64> =
            pushes(&mut worker).iter().map(|(_, header, _)| header.stamps.started_at_ns as u64).collect();
        assert_eq!(answered, [30, 30]);
    }
}

#[test]
fn no_more_than_one_is_behind_another_and_not_before_those_that_come_first() {
    let mut worker = one_behind();
    worker.handle_plan(Timestamp(13), plan(3, (31, 60), &[0])).unwrap();
    worker.handle_fetched(Timestamp(14), place(2, 0), true);
    assert_eq!((hand_over(&mut worker, 50), is_asked_back(&mut worker)), (None, false), "there is one");
    worker.handle_plan(Timestamp(15), plan(4, (32, 60), &[0])).unwrap();
    worker.handle_executed(Timestamp(50), done(10, 50));
    assert_eq!(hand_over(&mut worker, 50), Some(vec![0]));
    worker.handle_executed(Timestamp(60), done(50, 60));
    worker.handle_fetched(Timestamp(60), place(3, 0), true);
    assert_eq!(hand_over(&mut worker, 60), Some(vec![0]));

    // The first of all is still being fetched.
    let mut worker = two();
    worker.handle_plan(Timestamp(13), plan(3, (29, 60), &[0])).unwrap();
    assert_eq!(hand_over(&mut worker, 40), None);
}

#[test]
fn a_sooner_one_takes_the_place_of_what_is_behind_another() {
    let mut worker = one_behind();
    worker.handle_plan(Timestamp(31), plan(3, (29, 60), &[0])).unwrap();
    assert!(is_asked_back(&mut worker));
    worker.handle_timeout(Timestamp(32));
    assert!(!is_asked_back(&mut worker), "once");
    worker.handle_taken_back(Timestamp(32));
    assert_eq!(hand_over(&mut worker, 33), None, "the sooner one is being fetched");
    worker.handle_fetched(Timestamp(34), place(2, 0), true);
    assert_eq!(hand_over(&mut worker, 34), Some(vec![0]));
    worker.handle_executed(Timestamp(40), done(10, 40));
    assert_eq!(hand_over(&mut worker, 40), Some(vec![0, 1]));
}

#[test]
fn a_task_that_nobody_wants_leaves_what_is_behind_another_unless_it_has_begun() {
    // Cancelled, or cut off; given back, or begun already.
    for (is_cancelled, is_given_back) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut worker = one_behind();
        match is_cancelled {
            true => worker.handle_cancel(Timestamp(31), PlanId(2), task(1, 201)),
            false => worker.handle_unlinked(Timestamp(31), FrontendId(1)),
        }
        assert!(is_asked_back(&mut worker));
        if is_given_back {
            worker.handle_taken_back(Timestamp(32));
            let cancelled = BackendToModelThread::Cancelled { plan: PlanId(2), task: task(1, 201) };
            let expected = if is_cancelled { vec![cancelled] } else { vec![] };
            assert_eq!(reports(&mut worker), expected);
            assert_eq!(hand_over(&mut worker, 33), Some(vec![0]), "the rest goes on");
        }
        worker.handle_executed(Timestamp(40), done(10, 40));
        actions(&mut worker);
        worker.handle_executed(Timestamp(50), done(40, 50));
        let actions = actions(&mut worker);
        let answered = actions.iter().filter(|action| matches!(action, Action::Push(_))).count();
        assert_eq!(answered, if is_cancelled && !is_given_back { 2 } else { 1 }, "{actions:?}");
        let Some(Action::Report(BackendToModelThread::PlanDone { undelivered, .. })) = actions.last() else {
            panic!("{actions:?}")
        };
        let lost: Vec<TaskId> = undelivered.iter().map(|undelivered| undelivered.task).collect();
        assert_eq!(lost, if is_cancelled { vec![] } else { vec![task(1, 201)] });
    }
}

#[test]
fn one_that_nobody_wants_at_all_ends_without_the_gpu() {
    let mut worker = one_behind();
    worker.handle_cancel(Timestamp(31), PlanId(2), task(0, 200));
    worker.handle_cancel(Timestamp(31), PlanId(2), task(1, 201));
    assert_eq!(actions(&mut worker), [Action::TakeBack]);
    worker.handle_taken_back(Timestamp(32));
    let reports = reports(&mut worker);
    let cancelled =
        |number| BackendToModelThread::Cancelled { plan: PlanId(2), task: task(number as u32 - 200, number) };
    assert_eq!(reports[..2], [cancelled(200), cancelled(201)]);
    let [BackendToModelThread::PlanDone { undelivered, .. }, BackendToModelThread::Answered { .. }] = &reports[2..]
    else {
        panic!("{reports:?}")
    };
    assert!(undelivered.is_empty(), "{undelivered:?}");
    assert_eq!((worker.plans(), hand_over(&mut worker, 33)), (1, None));
}

#[test]
fn what_is_behind_a_batch_that_takes_too_long_is_rejected_when_its_window_ends() {
    let mut worker = one_behind();
    assert_eq!(worker.poll_timeout(), Timestamp(61));
    worker.handle_timeout(Timestamp(61));
    assert_eq!((actions(&mut worker), worker.poll_timeout()), (vec![Action::TakeBack], Timestamp::NEVER));
    worker.handle_taken_back(Timestamp(61));
    let status: Vec<_> = pushes(&mut worker).iter().map(|(_, header, _)| header.status).collect();
    assert_eq!(status, [AnswerStatus::WindowMissed; 2]);
    worker.handle_executed(Timestamp(70), done(10, 70));
    assert_eq!(executes(&mut worker), []);
}

#[test]
fn what_is_behind_one_that_hangs_waits_until_that_has_ended() {
    let mut worker = one_behind();
    worker.handle_hangs(Timestamp(40));
    assert!(is_asked_back(&mut worker));
    worker.handle_taken_back(Timestamp(40));
    assert_eq!((hand_over(&mut worker, 41), worker.poll_timeout()), (None, Timestamp(61)), "not behind one that hangs");
    worker.handle_executed(Timestamp(50), done(10, 50));
    assert_eq!(executes(&mut worker), [(1, vec![0, 1])]);

    // The GPU had taken it already.
    let mut worker = one_behind();
    worker.handle_hangs(Timestamp(40));
    actions(&mut worker);
    worker.handle_executed(Timestamp(41), done(10, 41));
    assert_eq!(executes(&mut worker), []);
    worker.handle_executed(Timestamp(50), done(41, 50));
    assert_eq!(pushes(&mut worker).len(), 2);
}

#[test]
fn what_was_skipped_behind_a_lost_one_runs_elsewhere() {
    let mut worker = one_behind();
    let reason = "it ended".to_owned();
    worker.handle_executed(
        Timestamp(40),
        Execution::Lost { started_at: Timestamp(10), finished_at: Timestamp(40), reason },
    );
    assert_eq!(pushes(&mut worker)[0].1.status, AnswerStatus::Failed);
    worker.handle_executed(Timestamp(40), Execution::Skipped { rejected_at: Timestamp(40) });
    let actions = actions(&mut worker);
    let [Action::Report(BackendToModelThread::PlanDone { plan, outcome, undelivered, .. }), Action::Report(answered)] =
        &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!((*plan, *outcome), (PlanId(2), PlanOutcome::WindowMissed { rejected_at: Timestamp(40) }));
    let lost = [task(0, 200), task(1, 201)].map(|task| Undelivered { task, link: LinkId::NONE });
    assert_eq!(undelivered[..], lost);
    assert_eq!(*answered, BackendToModelThread::Answered { plan: PlanId(2), undelivered: vec![] });
}

#[test]
fn what_went_ahead_is_used_by_what_is_behind_and_by_what_comes_back_and_nothing_more_goes_meanwhile() {
    let mut worker = two();
    let number = worker.poll_ahead().map(|ahead| ahead.number);
    assert_eq!(number, Some(0));
    worker.handle_plan(Timestamp(13), plan(3, (31, 60), &[0])).unwrap();
    worker.handle_fetched(Timestamp(14), place(2, 0), true);
    actions(&mut worker);
    worker.hand_over_next(Timestamp(30));
    assert_eq!(executes_as(&mut worker), [Some(0)]);
    assert_eq!(worker.poll_ahead(), None, "the room for another batch is taken");
    worker.handle_hangs(Timestamp(40));
    worker.handle_taken_back(Timestamp(40));
    assert_eq!(worker.poll_ahead(), None, "it has gone already");
    actions(&mut worker);
    worker.handle_executed(Timestamp(50), done(10, 50));
    assert_eq!(executes_as(&mut worker), [Some(0)]);
    assert_eq!(worker.poll_ahead().map(|ahead| (ahead.number, ahead.buffer)), Some((1, 2)));
}

#[test]
fn a_sample_behind_a_batch_is_given_up_for_a_plan_that_comes() {
    let mut worker = one_executes();
    let mut first = worker.buffers[1].take().unwrap();
    first.plan.sample = Some(1);
    worker.buffers[1] = Some(first);
    for task in 0..2 {
        worker.handle_fetched(Timestamp(12), place(1, task), true);
    }
    let samples = |worker: &mut Worker| {
        worker.hand_over_next(Timestamp(30));
        let sample = |action| if let Action::Execute { sample, .. } = action { Some(sample) } else { None };
        actions(worker).into_iter().filter_map(sample).collect::<Vec<_>>()
    };
    assert_eq!(samples(&mut worker), [Some((1, PlanId(2)))]);
    worker.handle_plan(Timestamp(31), plan(3, (90, 99), &[0])).unwrap();
    assert!(is_asked_back(&mut worker));
    worker.handle_taken_back(Timestamp(31));
    assert_eq!(samples(&mut worker), [None]);
    assert!(!is_asked_back(&mut worker));
}

#[test]
fn another_primary_is_told_of_what_is_behind_another() {
    let mut worker = one_behind();
    let mut names = 7..;
    let unfinished = worker.rename_plans(|| PlanId(names.next().unwrap()));
    let found: Vec<_> = unfinished.iter().map(|plan| (plan.plan, plan.exec_at, plan.tasks.len())).collect();
    assert_eq!(found, [(PlanId(7), Some(Timestamp(10)), 1), (PlanId(8), Some(Timestamp(30)), 2)]);
    worker.handle_executed(Timestamp(40), done(10, 40));
    worker.handle_executed(Timestamp(50), done(40, 50));
    let done = reports(&mut worker).into_iter().filter_map(|report| match report {
        BackendToModelThread::PlanDone { plan, .. } => Some(plan),
        _ => None,
    });
    assert_eq!(done.collect::<Vec<_>>(), [PlanId(7), PlanId(8)]);
}

proptest! {
    /// Whatever happens in whatever order, each plan is done once and answered once, and each task ends once.
    #[test]
    fn every_plan_ends_once_whatever_happens_around_it(
        steps in proptest::collection::vec((0u8..9, 0u64..6, 0i64..30), 1..120),
    ) {
        let mut worker = worker(2);
        let (mut now, mut plans) = (0, 0);
        // What the GPU has: the windows of its batches.
        let mut gpu: VecDeque<(Timestamp, Timestamp)> = VecDeque::new();
        let (mut reads, mut writes) = (Vec::new(), VecDeque::new());
        let mut reports: Vec<BackendToModelThread> = Vec::new();
        let mut ended: Vec<TaskId> = Vec::new();
        // At the end all that is open is finished.
        let rest = (0..80).flat_map(|_| [(1, 0, 7), (2, 0, 7), (3, 0, 7)]);
        for (kind, which, later) in steps.into_iter().chain(rest) {
            now += later + if kind == 8 && which == 0 { INPUT_WAIT.0 } else { 0 };
            let at = Timestamp(now);
            match kind {
                0 => {
                    plans += 1;
                    let exec_at = now + which as i64 * 5;
                    let window = if which == 1 { 3 * INPUT_WAIT.0 } else { 40 };
                    let planned = BatchPlan { sample: Some(0), ..plan(plans, (exec_at, exec_at + window), &[0, 1]) };
                    // A queue that is full says so by itself.
                    let _ = worker.handle_plan(at, planned);
                }
                1 if !reads.is_empty() => {
                    let place = reads.remove(which as usize % reads.len());
                    worker.handle_fetched(at, place, which != 5);
                }
                2 if !writes.is_empty() => {
                    let (place, answered) = writes.pop_front().unwrap();
                    ended.extend((which != 5).then_some(answered));
                    worker.handle_pushed(at, place, which != 5);
                }
                3 if !gpu.is_empty() => {
                    let (exec_at, latest) = gpu.pop_front().unwrap();
                    let execution = match which {
                        _ if exec_at.max(at) > latest => Execution::WindowMissed { rejected_at: at },
                        5 => Execution::Skipped { rejected_at: at },
                        _ => done(now, now),
                    };
                    worker.handle_executed(at, execution);
                }
                4 => {
                    let plan = which.min(plans);
                    worker.handle_cancel(at, PlanId(plan), task(0, plan * 100));
                }
                5 if which == 0 => {
                    worker.handle_unlinked(at, FrontendId(1));
                    worker.handle_linked(FrontendId(1), LINK);
                }
                6 if which == 0 => worker.handle_hangs(at),
                7 => drop(worker.poll_ahead()),
                _ => worker.handle_timeout(at),
            }
            worker.hand_over_next(at);
            while let Some(action) = worker.poll_action() {
                match action {
                    Action::Fetch { place, .. } => reads.push(place),
                    Action::Guard { .. } => unreachable!("nothing is guarded"),
                    Action::Push(push) => writes.push_back((push.place, TaskId(push.header.task))),
                    Action::Execute { exec_at, latest, .. } => gpu.push_back((exec_at, latest)),
                    // Now and then it has begun already.
                    Action::TakeBack if which % 2 == 0 => {
                        gpu.pop_back();
                        worker.handle_taken_back(at);
                    }
                    Action::TakeBack | Action::TellWaited(_) => {}
                    Action::Report(report) => reports.push(report),
                }
                prop_assert!(gpu.len() <= HANDED_MAX);
            }
        }
        prop_assert_eq!(worker.plans(), 0);
        let (mut are_done, mut are_answered) = (Vec::new(), Vec::new());
        for report in reports {
            let undelivered = match report {
                BackendToModelThread::PlanDone { plan, undelivered, .. } => {
                    are_done.push(plan.0);
                    undelivered
                }
                BackendToModelThread::Answered { plan, undelivered } => {
                    are_answered.push(plan.0);
                    undelivered
                }
                BackendToModelThread::Cancelled { task, .. } => {
                    ended.push(task);
                    vec![]
                }
                other => panic!("{other:?}"),
            };
            ended.extend(undelivered.iter().map(|lost| lost.task));
        }
        for ends in [&mut are_done, &mut are_answered] {
            ends.sort_unstable();
            prop_assert_eq!(&*ends, &(1..=plans).collect::<Vec<_>>());
        }
        ended.sort_unstable();
        let both = |plan| [task(0, plan * 100), task(1, plan * 100 + 1)];
        let mut all: Vec<TaskId> = (1..=plans).flat_map(both).collect();
        all.sort_unstable();
        prop_assert_eq!(ended, all);
    }
}
