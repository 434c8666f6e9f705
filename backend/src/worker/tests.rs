//! Single rules. Whole histories, with every invariant checked at every step, are the crate `fabric`'s.

use super::*;
use proptest::prelude::*;
use proto::{PlanId, SlotDescriptor, stages::SchedulerStamps};

/// Of all slots.
const KEY: u32 = 77;
const MODEL: ModelId = ModelId(3);
const LINK: LinkId = LinkId(1);
const SHAPE: ModelShape =
    ModelShape { input_bytes: 100, output_bytes: 40, batch_max: 8, records: Records { inputs: false, outputs: false } };
const ANSWER_BYTES: u32 = (ANSWER_HEADER_BYTES + SHAPE.output_bytes) as u32;

/// Ten for each batch, and one for each task.
fn profile() -> LatencyProfile {
    LatencyProfile::from_table((11..=18).map(Span).collect()).unwrap()
}

fn worker(frontends: u32) -> Worker {
    let mut worker = Worker::new(0, BTreeMap::from([(MODEL, (SHAPE, profile()))]), Span::ZERO);
    (0..frontends).for_each(|frontend| worker.handle_linked(FrontendId(frontend), LINK));
    worker
}

/// A plan with one task for each of `frontends`; `place` makes its slots unlike those of other plans.
fn plan(id: u64, window: (i64, i64), frontends: &[u32]) -> BatchPlan {
    let task = |(index, &frontend): (usize, &u32)| {
        let number = id * 100 + index as u64;
        PlannedTask {
            task: TaskId::new(FrontendId(frontend), number),
            attempt: 1,
            slot: SlotDescriptor {
                slot: index as u32,
                input_offset: number,
                input_bytes: SHAPE.input_bytes as u32,
                answer_offset: number,
                answer_bytes_max: ANSWER_BYTES,
                key: KEY,
            },
            stamps: SchedulerStamps { queued_at: Timestamp(1), due_at: Timestamp(2), granted_at: Timestamp(3) },
        }
    };
    BatchPlan {
        plan: PlanId(id),
        gpu_index: 0,
        model: MODEL,
        exec_at: Timestamp(window.0),
        latest: Timestamp(window.1),
        tasks: frontends.iter().enumerate().map(task).collect(),
        sample: None,
    }
}

/// The same, with each task in the slot behind the one before.
fn neighbours(mut plan: BatchPlan) -> BatchPlan {
    for (index, task) in (0..).zip(&mut plan.tasks) {
        let first = 10_000 * plan.plan.0;
        task.slot.input_offset = first + index * u64::from(task.slot.input_bytes);
        task.slot.answer_offset = first + 5_000 + index * u64::from(task.slot.answer_bytes_max);
    }
    plan
}

fn place(buffer: usize, task: usize) -> Place {
    Place { gpu: 0, buffer, task }
}

fn actions(worker: &mut Worker) -> Vec<Action> {
    std::iter::from_fn(|| worker.poll_action()).collect()
}

/// When a plan and its inputs arrived is in its answers' stamps, too, and compared there.
fn without_instants(mut report: BackendToModelThread) -> BackendToModelThread {
    if let BackendToModelThread::PlanDone { arrived_at, fetched_at, .. } = &mut report {
        (*arrived_at, *fetched_at) = (Timestamp::PAST, Timestamp::PAST);
    }
    report
}

/// Of plan 1, without instants.
fn plan_done(outcome: PlanOutcome, undelivered: Vec<Undelivered>) -> BackendToModelThread {
    let (plan, arrived_at, fetched_at) = (PlanId(1), Timestamp::PAST, Timestamp::PAST);
    BackendToModelThread::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at }
}

fn reports(worker: &mut Worker) -> Vec<BackendToModelThread> {
    let report = |action| if let Action::Report(report) = action { Some(without_instants(report)) } else { None };
    actions(worker).into_iter().filter_map(report).collect()
}

fn pushes(worker: &mut Worker) -> Vec<(usize, AnswerHeader, Option<String>)> {
    let push = |action| match action {
        Action::Push(Push { place, header, text, .. }) => Some((place.task, header, text)),
        _ => None,
    };
    actions(worker).into_iter().filter_map(push).collect()
}

fn executes(worker: &mut Worker) -> Vec<(usize, Vec<usize>)> {
    let tasks = |runs: Vec<Run>| runs.into_iter().flat_map(|run| run.tasks).collect();
    let execute =
        |action| if let Action::Execute { buffer, runs, .. } = action { Some((buffer, tasks(runs))) } else { None };
    actions(worker).into_iter().filter_map(execute).collect()
}

fn done(started_at: i64, finished_at: i64) -> Execution {
    let outputs = Outputs::default();
    Execution::Done { started_at: Timestamp(started_at), finished_at: Timestamp(finished_at), outputs }
}

#[test]
fn a_batch_is_fetched_at_once_executed_in_its_window_and_answered() {
    let mut worker = worker(2);
    worker.handle_plan(Timestamp(10), plan(1, (100, 200), &[0, 1])).unwrap();
    assert!(matches!(actions(&mut worker)[..], [Action::Fetch { .. }, Action::Fetch { .. }]));
    worker.handle_fetched(Timestamp(20), place(0, 1), true);
    worker.handle_fetched(Timestamp(30), place(0, 0), true);
    assert_eq!((executes(&mut worker), worker.poll_timeout()), (vec![], Timestamp(100)));
    worker.handle_timeout(Timestamp(100));
    assert_eq!((executes(&mut worker), worker.poll_timeout()), (vec![(0, vec![0, 1])], Timestamp::NEVER));
    worker.handle_executed(Timestamp(150), done(101, 149));
    let actions = actions(&mut worker);
    let [Action::Push(Push { immediate, header, .. }), Action::Push(Push { .. }), Action::Report(report)] =
        &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!(*immediate, ImmediateData { slot: 0, attempt: 1 }.pack());
    assert_eq!((header.status, header.payload_bytes, header.batch_size), (AnswerStatus::Done, 40, 2));
    let stamps = AnswerStamps {
        queued_at_ns: 1,
        due_at_ns: 2,
        granted_at_ns: 3,
        planned_at_ns: 10,
        fetched_at_ns: 30,
        exec_at_ns: 100,
        started_at_ns: 101,
        finished_at_ns: 149,
    };
    assert_eq!(header.stamps, stamps);
    let outcome = PlanOutcome::Executed { started_at: Timestamp(101), finished_at: Timestamp(149) };
    assert_eq!(without_instants(report.clone()), plan_done(outcome, vec![]));

    // One answer arrives, the other does not.
    worker.handle_pushed(Timestamp(160), place(0, 0), true);
    assert_eq!(reports(&mut worker), []);
    worker.handle_pushed(Timestamp(170), place(0, 1), false);
    let undelivered = vec![Undelivered { task: TaskId::new(FrontendId(1), 101), link: LINK }];
    assert_eq!(reports(&mut worker), [BackendToModelThread::Answered { plan: PlanId(1), undelivered }]);
}

#[test]
fn neighbours_share_their_transfers_and_their_failures() {
    let mut worker = worker(2);
    worker.handle_plan(Timestamp(10), neighbours(plan(1, (100, 200), &[0, 0, 0, 1, 0, 0]))).unwrap();
    let fetches: Vec<(usize, usize, u64)> = actions(&mut worker)
        .into_iter()
        .map(|action| match action {
            Action::Fetch { place, tasks, input: Input { offset, key: KEY, .. }, .. } => (place.task, tasks, offset),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(fetches, [(0, 3, 10_000), (3, 1, 10_300), (4, 2, 10_400)]);
    // The middle one of the first run is not wanted any more; the last run cannot be read.
    worker.handle_cancel(Timestamp(15), PlanId(1), TaskId::new(FrontendId(0), 101));
    worker.handle_fetched(Timestamp(20), place(0, 0), true);
    let cancelled = BackendToModelThread::Cancelled { plan: PlanId(1), task: TaskId::new(FrontendId(0), 101) };
    assert_eq!(reports(&mut worker), [cancelled]);
    worker.handle_fetched(Timestamp(20), place(0, 3), true);
    worker.handle_fetched(Timestamp(20), place(0, 4), false);
    worker.handle_timeout(Timestamp(100));
    let Some(Action::Execute { runs, .. }) = worker.poll_action() else { panic!("no execution") };
    let runs: Vec<Range<usize>> = runs.into_iter().map(|run| run.tasks).collect();
    assert_eq!(runs, [0..1, 2..3, 3..4]);
    worker.handle_executed(Timestamp(150), done(101, 149));
    let pushed: Vec<_> = pushes(&mut worker).into_iter().map(|(task, header, _)| (task, header.tasks)).collect();
    assert_eq!(pushed, [(0, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_sample_is_asked_for_by_its_place_and_only_where_nothing_else_is_planned() {
    // Whether another plan is there; the task that is cancelled; the sample's place.
    for (is_busy, cancelled, expected) in [(false, 0, Some(1)), (false, 2, None), (false, 3, Some(2)), (true, 0, None)]
    {
        let mut worker = worker(1);
        let sampled = BatchPlan { sample: Some(2), ..neighbours(plan(1, (100, 200), &[0, 0, 0, 0])) };
        worker.handle_plan(Timestamp(0), sampled).unwrap();
        if is_busy {
            worker.handle_plan(Timestamp(0), plan(2, (300, 400), &[0])).unwrap();
        }
        worker.handle_cancel(Timestamp(1), PlanId(1), TaskId::new(FrontendId(0), 100 + cancelled));
        worker.handle_fetched(Timestamp(2), place(0, 0), true);
        worker.handle_timeout(Timestamp(100));
        let samples: Vec<_> = actions(&mut worker)
            .into_iter()
            .filter_map(|action| if let Action::Execute { sample, .. } = action { Some(sample) } else { None })
            .collect();
        assert_eq!(samples, [expected.map(|place| (place, PlanId(1)))], "{is_busy}, {cancelled}");
    }
}

#[test]
fn one_answer_is_for_the_run_that_executed() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), neighbours(plan(1, (0, 200), &[0, 0, 0]))).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    actions(&mut worker);
    worker.handle_executed(Timestamp(150), done(1, 149));
    let Some(Action::Push(Push { answer_offset, key: KEY, immediate, header, .. })) = worker.poll_action() else {
        panic!()
    };
    assert_eq!((answer_offset, immediate), (15_000, ImmediateData { slot: 0, attempt: 1 }.pack()));
    assert_eq!((header.tasks, header.payload_bytes, header.batch_size), (3, 3 * 40, 3));
    actions(&mut worker);
    worker.handle_pushed(Timestamp(160), place(0, 0), false);
    let undelivered = |number| Undelivered { task: TaskId::new(FrontendId(0), number), link: LINK };
    let undelivered = (100..103).map(undelivered).collect();
    assert_eq!(reports(&mut worker), [BackendToModelThread::Answered { plan: PlanId(1), undelivered }]);
}

#[test]
fn tasks_without_an_output_fail_alone_and_the_others_are_answered_each_by_itself() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), neighbours(plan(1, (0, 200), &[0, 0, 0]))).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    actions(&mut worker);
    let failed = vec![TaskError { task: 1, reason: "odd".into() }];
    let outputs = Outputs { failed, bytes: vec![40, 0, 40] };
    let (started_at, finished_at) = (Timestamp(1), Timestamp(149));
    worker.handle_executed(Timestamp(150), Execution::Done { started_at, finished_at, outputs });
    let pushed: Vec<_> = pushes(&mut worker)
        .into_iter()
        .map(|(task, header, text)| (task, header.status, header.tasks, header.payload_bytes, text))
        .collect();
    let done = |task| (task, AnswerStatus::Done, 1, 40, None);
    assert_eq!(pushed, [done(0), (1, AnswerStatus::Failed, 1, 3, Some("odd".to_owned())), done(2)]);
}

#[test]
fn records_are_fetched_and_answered_with_their_own_lengths() {
    let records = Records { inputs: true, outputs: true };
    let mut worker =
        Worker::new(0, BTreeMap::from([(MODEL, (ModelShape { records, ..SHAPE }, profile()))]), Span::ZERO);
    worker.handle_linked(FrontendId(0), LINK);
    let mut plan = plan(1, (0, 200), &[0; 6]);
    // Two requests of two rows each, one of them with longer records; one that is too long, one that is too short.
    for (task, input_bytes) in plan.tasks.iter_mut().zip([16, 16, 24, 24, 101, 3]) {
        task.slot.input_bytes = input_bytes;
    }
    worker.handle_plan(Timestamp(0), neighbours(plan)).unwrap();
    let mut fetched = Vec::new();
    let mut refused = Vec::new();
    for action in actions(&mut worker) {
        match action {
            Action::Fetch { place, tasks, input, .. } => fetched.push((place.task, tasks, input.bytes)),
            Action::Push(Push { place, text, .. }) => refused.push((place.task, text.unwrap())),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fetched, [(0, 2, 16), (2, 2, 24)]);
    let text = |found: u32| format!("the task has {found} input bytes, the model takes at most 100");
    let room = SHAPE.output_bytes;
    assert_eq!(
        refused,
        [(4, text(101)[..room].to_owned()), (5, text(3)[..room].to_owned())],
        "as far as there is room"
    );
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    worker.handle_fetched(Timestamp(1), place(0, 2), true);
    let Some(Action::Execute { runs, .. }) = worker.poll_action() else { panic!("no execution") };
    let run = |tasks: Range<usize>, input_bytes| Run { fetched_with: tasks.start, tasks, input_bytes };
    assert_eq!(runs, [run(0..2, 16), run(2..4, 24)]);
    let outputs = Outputs { failed: vec![], bytes: vec![12, 8, 40, 4] };
    let (started_at, finished_at) = (Timestamp(1), Timestamp(149));
    worker.handle_executed(Timestamp(150), Execution::Done { started_at, finished_at, outputs });
    let pushed: Vec<_> =
        pushes(&mut worker).into_iter().map(|(task, header, _)| (task, header.tasks, header.payload_bytes)).collect();
    assert_eq!(pushed, [(0, 2, 20), (2, 2, 44)]);
}

/// The same, with a guard before each input.
fn guarded(mut plan: BatchPlan) -> BatchPlan {
    plan.tasks.iter_mut().for_each(|task| task.slot = task.slot.guarded());
    plan
}

/// What is read, by the first task: how many guards, how many inputs.
fn reads(worker: &mut Worker) -> Vec<(usize, usize, usize)> {
    let read = |action| match action {
        Action::Guard { place, tasks, slot, .. } => {
            assert_eq!(slot as usize, place.task);
            Some((place.task, tasks, 0))
        }
        Action::Fetch { place, tasks, .. } => Some((place.task, 0, tasks)),
        _ => None,
    };
    actions(worker).into_iter().filter_map(read).collect()
}

fn word(task: u64) -> u64 {
    guard_word(TaskId::new(FrontendId(0), task))
}

#[test]
fn an_input_that_is_late_is_not_read_and_the_rest_of_its_batch_goes_on() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), guarded(neighbours(plan(1, (100, 200), &[0; 4])))).unwrap();
    assert_eq!(reads(&mut worker), [(0, 4, 0)], "one READ for the guards of all");
    assert_eq!(worker.reads_guards(place(0, 0)), Some((4, MODEL)));
    // The word of another task is no better than none.
    worker.handle_guards(Timestamp(10), place(0, 0), &[word(100), 0, word(102), word(102)]);
    let all = actions(&mut worker);
    let late = |task| Action::Report(BackendToModelThread::InputLate { plan: PlanId(1), task: TaskId(task) });
    assert_eq!(all[..2], [late(101), late(103)]);
    assert!(matches!(all[2..], [Action::Fetch { tasks: 1, .. }, Action::Fetch { tasks: 1, .. }]), "{all:?}");
    assert_eq!((worker.reads_guards(place(0, 0)), worker.poll_timeout()), (None, Timestamp(201)));
    worker.handle_fetched(Timestamp(20), place(0, 0), true);
    worker.handle_fetched(Timestamp(20), place(0, 2), true);
    worker.handle_timeout(Timestamp(100));
    assert_eq!(executes(&mut worker), [(0, vec![0, 2])]);
    worker.handle_executed(Timestamp(150), done(101, 149));
    let pushed: Vec<_> = pushes(&mut worker).into_iter().map(|(task, header, _)| (task, header.batch_size)).collect();
    assert_eq!(pushed, [(0, 2), (2, 2)]);
}

#[test]
fn a_batch_of_late_inputs_is_given_up_at_once() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), guarded(plan(1, (100, 200), &[0]))).unwrap();
    worker.handle_guards(Timestamp(10), place(0, 0), &[0]);
    let task = TaskId::new(FrontendId(0), 100);
    let outcome = PlanOutcome::WindowMissed { rejected_at: Timestamp(10) };
    let expected = [
        BackendToModelThread::InputLate { plan: PlanId(1), task },
        plan_done(outcome, vec![]),
        BackendToModelThread::Answered { plan: PlanId(1), undelivered: vec![] },
    ];
    assert_eq!(reports(&mut worker), expected);
    assert_eq!((worker.plans(), worker.poll_timeout()), (0, Timestamp::NEVER));
}

#[test]
fn a_guard_that_is_looked_at_too_late_or_for_nobody_ends_its_task_as_an_input_does() {
    // What has no guard starts without it.
    let mut worker = worker(2);
    let mut mixed = plan(1, (100, 200), &[0, 0, 0, 1, 1]);
    mixed.tasks[1..].iter_mut().for_each(|task| task.slot = task.slot.guarded());
    worker.handle_plan(Timestamp(0), mixed).unwrap();
    assert_eq!(reads(&mut worker), [(1, 1, 0), (2, 1, 0), (3, 1, 0), (4, 1, 0), (0, 0, 1)]);
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    worker.handle_cancel(Timestamp(2), PlanId(1), TaskId::new(FrontendId(0), 101));
    worker.handle_unlinked(Timestamp(3), FrontendId(1));
    worker.handle_fetched(Timestamp(4), place(0, 3), false);
    worker.handle_guards(Timestamp(4), place(0, 4), &[0]);
    worker.handle_timeout(Timestamp(150));
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
    worker.handle_guards(Timestamp(151), place(0, 1), &[word(101)]);
    worker.handle_guards(Timestamp(151), place(0, 2), &[word(102)]);
    let all = actions(&mut worker);
    let cancelled = BackendToModelThread::Cancelled { plan: PlanId(1), task: TaskId::new(FrontendId(0), 101) };
    let [Action::Report(report), Action::Push(Push { header, .. })] = &all[..] else { panic!("{all:?}") };
    assert_eq!((report, header.status), (&cancelled, AnswerStatus::WindowMissed));
    worker.handle_executed(Timestamp(160), done(150, 160));
    let undelivered = |number| Undelivered { task: TaskId::new(FrontendId(1), number), link: LINK };
    let outcome = PlanOutcome::Executed { started_at: Timestamp(150), finished_at: Timestamp(160) };
    assert_eq!(reports(&mut worker), [plan_done(outcome, vec![undelivered(103), undelivered(104)])]);
}

proptest! {
    /// Against the definition: indexes in order, neighbours in everything, none that could have been joined left apart.
    #[test]
    fn runs_are_as_long_as_they_can_be(
        breaks in proptest::collection::vec(0u8..6, 1..60),
        picked in proptest::collection::vec(prop::bool::weighted(0.9), 60),
        bytes_each in prop::sample::select(vec![0usize, 1, 1000, 20_000, 40_000, 70_000]),
    ) {
        let mut plan = neighbours(plan(1, (0, 1), &vec![0; breaks.len()]));
        for (task, kind) in plan.tasks.iter_mut().zip(&breaks) {
            match kind {
                1 => task.attempt += 1,
                2 => task.slot.slot += 100,
                _ => {}
            }
        }
        let mut batch = Batch::new(Timestamp(0), plan, (SHAPE, Span(1)), false);
        for (task, _) in batch.tasks.iter_mut().zip(&breaks).filter(|(_, kind)| **kind == 3) {
            task.link = LinkId(2);
        }
        let indexes: Vec<usize> = (0..breaks.len()).filter(|&index| picked[index]).collect();
        let runs = batch.runs(&indexes, |_| bytes_each);
        let are_joined = |before: usize, after: usize| {
            let (a, b) = (&batch.plan.tasks[before], &batch.plan.tasks[after]);
            after == before + 1
                && batch.tasks[before].link == batch.tasks[after].link
                && b.task.0 == a.task.0 + 1
                && b.attempt == a.attempt
                && b.slot.slot == a.slot.slot + 1
        };
        let fits = |tasks: usize| tasks == 1 || tasks * bytes_each <= 64 << 10;
        prop_assert_eq!(runs.iter().cloned().flatten().collect::<Vec<_>>(), indexes);
        for run in &runs {
            prop_assert!(fits(run.len()));
            prop_assert!((run.start + 1..run.end).all(|index| are_joined(index - 1, index)));
        }
        for pair in runs.windows(2) {
            prop_assert!(!are_joined(pair[0].end - 1, pair[1].start) || !fits(pair[0].len() + 1), "{:?}", pair);
        }
    }
}

#[test]
fn the_next_batch_is_fetched_while_one_executes_and_starts_when_it_ends() {
    let mut worker = worker(1);
    for (id, window) in [(1, (0, 100)), (2, (50, 100))] {
        worker.handle_plan(Timestamp(0), plan(id, window, &[0])).unwrap();
        worker.handle_fetched(Timestamp(5), place(id as usize - 1, 0), true);
    }
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
    worker.handle_timeout(Timestamp(60));
    assert_eq!(executes(&mut worker), []);
    worker.handle_executed(Timestamp(100), done(5, 100));
    assert_eq!(executes(&mut worker), [(1, vec![0])]);
}

#[test]
fn only_the_batch_that_was_planned_first_is_handed_over_ahead_of_its_window() {
    let mut worker = worker(1);
    worker.handover = Span(30);
    worker.handle_plan(Timestamp(0), plan(1, (100, 200), &[0])).unwrap();
    worker.handle_plan(Timestamp(0), plan(2, (110, 200), &[0])).unwrap();
    worker.handle_fetched(Timestamp(5), place(1, 0), true);
    assert_eq!(worker.poll_timeout(), Timestamp(110));
    worker.handle_fetched(Timestamp(6), place(0, 0), true);
    assert_eq!((executes(&mut worker), worker.poll_timeout()), (vec![], Timestamp(70)));
    worker.handle_timeout(Timestamp(70));
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
}

#[test]
fn a_batch_that_cannot_start_in_its_window_is_rejected() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), plan(1, (10, 20), &[0, 0])).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    actions(&mut worker);
    worker.handle_timeout(Timestamp(21));
    let outcome = PlanOutcome::WindowMissed { rejected_at: Timestamp(21) };
    let actions = actions(&mut worker);
    let [Action::Push(Push { place: first, header, .. }), Action::Report(report)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!((*first, header.status, header.payload_bytes), (place(0, 0), AnswerStatus::WindowMissed, 0));
    assert_eq!(without_instants(report.clone()), plan_done(outcome, vec![]));
    // The other task's READ still runs: it is answered when it ends, and until then the buffer is taken.
    worker.handle_fetched(Timestamp(30), place(0, 1), true);
    assert_eq!(pushes(&mut worker)[0].0, 1);
    worker.handle_pushed(Timestamp(40), place(0, 0), true);
    worker.handle_pushed(Timestamp(40), place(0, 1), true);
    assert_eq!(reports(&mut worker), [BackendToModelThread::Answered { plan: PlanId(1), undelivered: vec![] }]);
}

#[test]
fn stragglers_hold_up_their_batch_for_half_of_its_window() {
    let mut worker = worker(2);
    worker.handle_plan(Timestamp(0), plan(1, (100, 200), &[0, 1])).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    worker.handle_timeout(Timestamp(149));
    assert_eq!((executes(&mut worker), worker.poll_timeout()), (vec![], Timestamp(150)));
    worker.handle_timeout(Timestamp(150));
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
    worker.handle_executed(Timestamp(180), done(150, 180));
    actions(&mut worker);
    worker.handle_fetched(Timestamp(190), place(0, 1), true);
    assert_eq!(pushes(&mut worker)[0].1.status, AnswerStatus::WindowMissed);
}

#[test]
fn a_frontend_that_cannot_be_read_does_not_sink_the_batch() {
    let mut worker = worker(2);
    worker.handle_plan(Timestamp(0), plan(1, (100, 200), &[0, 1])).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    worker.handle_fetched(Timestamp(90), place(0, 1), false);
    worker.handle_timeout(Timestamp(100));
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
    worker.handle_executed(Timestamp(150), done(100, 150));
    let undelivered = vec![Undelivered { task: TaskId::new(FrontendId(1), 101), link: LINK }];
    let outcome = PlanOutcome::Executed { started_at: Timestamp(100), finished_at: Timestamp(150) };
    assert_eq!(reports(&mut worker), [plan_done(outcome, undelivered)]);
}

#[test]
fn a_frontend_that_comes_back_is_not_written_for_what_it_asked_before() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), plan(1, (0, 200), &[0])).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    worker.handle_plan(Timestamp(2), plan(2, (0, 200), &[0])).unwrap();
    worker.handle_unlinked(Timestamp(3), FrontendId(0));
    worker.handle_linked(FrontendId(0), LINK);
    actions(&mut worker);
    worker.handle_fetched(Timestamp(4), place(1, 0), true);
    worker.handle_executed(Timestamp(150), done(1, 150));
    assert!(actions(&mut worker).iter().all(|action| matches!(action, Action::Report(_))));
}

#[test]
fn an_executor_that_fails_is_told_to_the_client_within_the_room_there_is() {
    let mut worker = worker(1);
    worker.handle_plan(Timestamp(0), plan(1, (0, 200), &[0])).unwrap();
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    let reason = format!("{}ü and more", "x".repeat(39));
    let failed = Execution::Failed { started_at: Timestamp(1), finished_at: Timestamp(9), reason };
    actions(&mut worker);
    worker.handle_executed(Timestamp(10), failed);
    let (_, header, text) = pushes(&mut worker).remove(0);
    assert_eq!((header.status, header.payload_bytes, text), (AnswerStatus::Failed, 39, Some("x".repeat(39))));
}

#[test]
fn tasks_that_do_not_fit_the_model_are_refused_alone() {
    let mut worker = worker(2);
    let mut mixed = plan(1, (100, 200), &[0, 0, 0, 0, 7]);
    mixed.tasks[1].slot.input_bytes = 99;
    mixed.tasks[1].slot.answer_bytes_max = 200;
    mixed.tasks[2].slot.answer_bytes_max = ANSWER_BYTES - 1;
    mixed.tasks[3].slot.answer_bytes_max = ANSWER_HEADER_BYTES as u32 - 1;
    let undelivered = vec![
        Undelivered { task: mixed.tasks[3].task, link: LINK },
        Undelivered { task: mixed.tasks[4].task, link: LinkId::NONE },
    ];
    worker.handle_plan(Timestamp(0), mixed).unwrap();
    let texts: Vec<_> = pushes(&mut worker).into_iter().map(|(_, _, text)| text.unwrap()).collect();
    assert_eq!(texts[0], "the task has 99 input bytes, the model takes 100");
    assert_eq!(texts[1], "the slot has room for 39 output bytes, t"[..39], "cut to the room that there is");
    worker.handle_fetched(Timestamp(1), place(0, 0), true);
    worker.handle_timeout(Timestamp(100));
    assert_eq!(executes(&mut worker), [(0, vec![0])]);
    worker.handle_executed(Timestamp(150), done(100, 150));
    let outcome = PlanOutcome::Executed { started_at: Timestamp(100), finished_at: Timestamp(150) };
    assert_eq!(reports(&mut worker), [plan_done(outcome, undelivered)]);
}

#[test]
fn plans_that_no_gpu_could_run_end_at_once() {
    let refusal = |change: &dyn Fn(&mut BatchPlan)| {
        let mut worker = worker(1);
        let mut refused = plan(1, (100, 200), &[0; 8]);
        change(&mut refused);
        let error = worker.handle_plan(Timestamp(5), refused.clone()).unwrap_err();
        let undelivered =
            refused.tasks.iter().map(|task| Undelivered { task: task.task, link: LinkId::NONE }).collect();
        let outcome = PlanOutcome::WindowMissed { rejected_at: Timestamp(5) };
        let expected =
            [plan_done(outcome, undelivered), BackendToModelThread::Answered { plan: PlanId(1), undelivered: vec![] }];
        assert_eq!(reports(&mut worker), expected);
        error.to_string()
    };
    assert_eq!(refusal(&|plan| plan.model = ModelId(9)), "the plan names model 9, which this GPU does not host");
    assert_eq!(refusal(&|plan| plan.tasks.clear()), "the plan has 0 tasks, the model takes 1 to 8");
    let ninth = |plan: &mut BatchPlan| plan.tasks.push(plan.tasks[0]);
    assert_eq!(refusal(&ninth), "the plan has 9 tasks, the model takes 1 to 8");
}

#[test]
fn plans_wait_for_buffers_up_to_the_bound() {
    let mut worker = worker(1);
    let room = (BUFFERS + WAITING_MAX) as u64;
    for id in 0..room {
        worker.handle_plan(Timestamp(0), plan(id, (100, 200), &[0])).unwrap();
    }
    assert_eq!(actions(&mut worker).len(), BUFFERS);
    let refused = worker.handle_plan(Timestamp(0), plan(room, (100, 200), &[0])).unwrap_err();
    assert_eq!(refused, PlanError::QueueFull);
    // All that wait are given up on time, although no buffer is free to answer them from.
    actions(&mut worker);
    worker.handle_timeout(worker.poll_timeout());
    assert_eq!(reports(&mut worker).len(), room as usize);
}

/// Plan 1 executes, and plan 2 with two tasks is next.
fn one_executes() -> Worker {
    let mut worker = worker(2);
    worker.handle_plan(Timestamp(10), plan(1, (10, 20), &[0])).unwrap();
    assert_eq!(worker.poll_ahead(), None);
    worker.handle_fetched(Timestamp(10), place(0, 0), true);
    assert_eq!(executes(&mut worker).len(), 1);
    worker.handle_plan(Timestamp(11), plan(2, (30, 60), &[0, 1])).unwrap();
    worker
}

/// The number under which a batch executes that went ahead.
fn executes_as(worker: &mut Worker) -> Vec<Option<u64>> {
    let ahead = |action| if let Action::Execute { ahead, .. } = action { Some(ahead) } else { None };
    actions(worker).into_iter().filter_map(ahead).collect()
}

#[test]
fn inputs_go_ahead_once_all_are_there_while_another_batch_executes() {
    let mut worker = one_executes();
    worker.handle_fetched(Timestamp(12), place(1, 0), true);
    assert_eq!(worker.poll_ahead(), None, "one is missing");
    worker.handle_fetched(Timestamp(13), place(1, 1), true);
    let ahead = worker.poll_ahead().unwrap();
    assert_eq!((ahead.number, ahead.buffer, ahead.model), (0, 1, MODEL));
    assert_eq!(ahead.runs.iter().flat_map(|run| run.tasks.clone()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(worker.poll_ahead(), None, "once");
    worker.handle_executed(Timestamp(40), done(10, 40));
    assert_eq!(executes_as(&mut worker), [Some(0)]);
    assert_eq!(worker.poll_ahead(), None, "there is no other");
}

#[test]
fn a_batch_that_lost_a_task_since_does_not_run_with_what_went_ahead() {
    let mut worker = one_executes();
    for task in 0..2 {
        worker.handle_fetched(Timestamp(12), place(1, task), true);
    }
    assert!(worker.poll_ahead().is_some());
    worker.handle_cancel(Timestamp(14), PlanId(2), TaskId::new(FrontendId(1), 201));
    worker.handle_executed(Timestamp(40), done(10, 40));
    assert_eq!(executes_as(&mut worker), [None]);
}

#[test]
fn another_batch_in_the_same_buffer_does_not_run_with_what_went_ahead() {
    let mut worker = one_executes();
    for task in 0..2 {
        worker.handle_fetched(Timestamp(12), place(1, task), true);
    }
    assert_eq!(worker.poll_ahead().map(|ahead| ahead.number), Some(0));
    // It misses its window, is answered, and leaves its buffer to one that is the same in all but its inputs.
    worker.handle_timeout(Timestamp(61));
    for task in 0..2 {
        worker.handle_pushed(Timestamp(62), place(1, task), true);
    }
    worker.handle_plan(Timestamp(63), plan(3, (70, 90), &[0, 1])).unwrap();
    for task in 0..2 {
        worker.handle_fetched(Timestamp(64), place(1, task), true);
    }
    let mut other = worker;
    assert_eq!(other.poll_ahead().map(|ahead| ahead.number), Some(1));
    other.handle_executed(Timestamp(70), done(10, 70));
    assert_eq!(executes_as(&mut other), [Some(1)]);
}

mod handover;
mod shares;
