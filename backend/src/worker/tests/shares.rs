use super::*;

/// As long as those of tasks without an objective.
const WINDOW: (i64, i64) = (100, 100 + Span::from_millis(5_000).0);
const START: Timestamp = Timestamp(10);
const WAITED: Timestamp = Timestamp(10 + INPUT_WAIT.0);

/// The plans whose inputs are fetched.
fn fetched(worker: &mut Worker) -> Vec<u64> {
    let fetch = |action| if let Action::Fetch { task, .. } = action { Some((task.0 & 0xff_ffff) / 100) } else { None };
    actions(worker).into_iter().filter_map(fetch).collect()
}

fn given_back(plan: u64, number: u64, frontend: u32) -> Vec<BackendToModelThread> {
    let undelivered = vec![Undelivered { task: TaskId::new(FrontendId(frontend), number), link: LinkId::NONE }];
    let (arrived_at, fetched_at) = (Timestamp::PAST, Timestamp::PAST);
    let outcome = PlanOutcome::WindowMissed { rejected_at: WAITED };
    let plan = PlanId(plan);
    vec![
        BackendToModelThread::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at },
        BackendToModelThread::Answered { plan, undelivered: vec![] },
    ]
}

/// A frontend that lives and answers no READ had all buffers until its link broke, and nobody else was served.
#[test]
fn a_frontend_that_answers_no_read_leaves_buffers_to_others() {
    let mut worker = worker(2);
    for id in 1..=4 {
        worker.handle_plan(START, plan(id, WINDOW, &[0])).unwrap();
    }
    assert_eq!(fetched(&mut worker), [1, 2]);
    worker.handle_plan(START, plan(5, WINDOW, &[1])).unwrap();
    assert_eq!(fetched(&mut worker), [5]);
    worker.handle_fetched(START, place(2, 0), true);
    worker.handle_timeout(Timestamp(100));
    assert_eq!(executes(&mut worker), [(2, vec![0])]);
    worker.handle_executed(Timestamp(200), done(100, 200));
    worker.handle_pushed(Timestamp(300), place(2, 0), true);
    actions(&mut worker);
    // Who was waited for is not read again before its READs have ended.
    assert_eq!(worker.poll_timeout(), WAITED);
    let reached = Wait::Input.reached();
    worker.handle_timeout(WAITED);
    assert!(Wait::Input.reached() > reached);
    // Nothing of the first two is here: their GPU is free for others, and their tasks end with their READs.
    let (arrived_at, fetched_at) = (Timestamp::PAST, Timestamp::PAST);
    let outcome = PlanOutcome::WindowMissed { rejected_at: WAITED };
    let missed = |plan| BackendToModelThread::PlanDone {
        plan: PlanId(plan),
        outcome,
        undelivered: vec![],
        arrived_at,
        fetched_at,
    };
    let rest = [given_back(3, 300, 0), given_back(4, 400, 0)].concat();
    assert_eq!(reports(&mut worker), [vec![missed(1), missed(2)], rest].concat());
    worker.handle_plan(WAITED, plan(6, WINDOW, &[0])).unwrap();
    assert_eq!(reports(&mut worker), given_back(6, 600, 0));
    worker.handle_plan(WAITED, plan(7, WINDOW, &[0, 1])).unwrap();
    let actions = actions(&mut worker);
    assert!(
        matches!(actions[..], [Action::TellWaited(FrontendId(0)), Action::Fetch { task: TaskId(task), .. }]
        if TaskId(task).frontend() == FrontendId(1)),
        "{actions:?}"
    );
    // They end when its link does, or it has come to life again.
    worker.handle_fetched(WAITED, place(0, 0), false);
    worker.handle_fetched(WAITED, place(1, 0), true);
    worker.handle_plan(WAITED, plan(8, WINDOW, &[0])).unwrap();
    assert_eq!(fetched(&mut worker), [8]);
}

#[test]
fn a_frontend_that_takes_no_answer_leaves_buffers_to_others() {
    let mut worker = worker(2);
    for id in 1..=2 {
        let now = Timestamp(id as i64 * 1_000);
        worker.handle_plan(now, plan(id, WINDOW, &[0])).unwrap();
        let buffer = id as usize - 1;
        worker.handle_fetched(now, place(buffer, 0), true);
        worker.handle_executed(now, done(now.0, now.0));
    }
    actions(&mut worker);
    worker.handle_plan(Timestamp(3_000), plan(3, WINDOW, &[0])).unwrap();
    assert!(fetched(&mut worker).is_empty());
    worker.handle_pushed(Timestamp(3_001), place(0, 0), true);
    assert_eq!(fetched(&mut worker), [3]);
}

#[test]
fn a_frontend_that_is_alone_has_all_buffers() {
    let mut worker = worker(1);
    for id in 1..=4 {
        worker.handle_plan(START, plan(id, WINDOW, &[0])).unwrap();
    }
    assert_eq!(fetched(&mut worker), [1, 2, 3, 4]);
    worker.handle_plan(WAITED - Span(1), plan(5, WINDOW, &[0])).unwrap();
    assert!(reports(&mut worker).is_empty());
}

#[test]
fn a_batch_with_a_long_window_does_without_an_input_soon_and_gives_its_task_back() {
    let mut worker = worker(2);
    worker.handle_plan(START, plan(1, WINDOW, &[0, 1])).unwrap();
    worker.handle_fetched(START, place(0, 1), true);
    actions(&mut worker);
    assert_eq!(worker.poll_timeout(), WAITED);
    worker.handle_timeout(WAITED - Span(1));
    assert!(actions(&mut worker).is_empty());
    worker.handle_timeout(WAITED);
    assert_eq!(executes(&mut worker), [(0, vec![1])]);
    worker.handle_executed(WAITED, done(WAITED.0, WAITED.0));
    worker.handle_pushed(WAITED, place(0, 1), true);
    actions(&mut worker);
    worker.handle_fetched(WAITED, place(0, 0), true);
    let undelivered = vec![Undelivered { task: TaskId::new(FrontendId(0), 100), link: LinkId::NONE }];
    assert_eq!(reports(&mut worker), [BackendToModelThread::Answered { plan: PlanId(1), undelivered }]);
}

/// On a host without a processor for it all READs are late: a batch that was given up began again, and nobody was ever
/// served.
#[test]
fn a_frontend_that_is_alone_is_waited_for_as_long_as_its_window_lasts() {
    let mut worker = worker(1);
    worker.handle_plan(START, plan(1, WINDOW, &[0])).unwrap();
    assert_eq!(fetched(&mut worker), [1]);
    worker.handle_timeout(WAITED);
    let late = Timestamp(WINDOW.1 - 1);
    worker.handle_timeout(late);
    assert_eq!(reports(&mut worker), []);
    worker.handle_fetched(late, place(0, 0), true);
    worker.handle_timeout(late);
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
}
