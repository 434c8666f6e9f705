//! Two schedulers, of which one dies, stalls, or takes over.

use super::*;
use member::ORPHAN_MAX;

const OTHER: ConnectionId = ConnectionId(3);
/// What the second scheduler calls the model, and what the first does.
const THEIRS: ModelId = ModelId(9);

impl Backend {
    /// Obeys the first of two schedulers, has a link to the frontend, and knows the second as a standby.
    fn of_two() -> Self {
        let mut backend = Self::of(2);
        backend.welcome(SCHEDULER, ModelId(5), claim(1));
        let outputs = backend.outputs();
        let [Output::Connect { peer: Peer::Scheduler(1), hello, .. }, Output::Send { .. }] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        assert_eq!(standing(hello), (Some(BackendId(3)), claim(1), 1));
        backend.0.handle_connecting(Peer::Scheduler(1), OTHER);
        backend.link();
        assert_eq!(backend.reports(), [(SCHEDULER, LINKED)]);
        backend.welcome(OTHER, THEIRS, standby());
        backend.announce(OTHER);
        assert_eq!(backend.reports(), [(OTHER, LINKED)]);
        backend
    }

    fn welcome(&mut self, connection: ConnectionId, model: ModelId, claim: Claim) {
        let model_threads = ModelThreads::default();
        let welcome = BackendWelcome { backend: BackendId(3), models: vec![model], model_threads, claim };
        self.connected(connection, encode(&welcome));
    }

    fn announce(&mut self, connection: ConnectionId) {
        let link_address = "127.0.0.1:2".into();
        self.tell(connection, &SchedulerToBackend::FrontendJoined { frontend: FRONTEND, link_address, pass: PASS });
    }

    fn take_over(&mut self, connection: ConnectionId, number: u32) {
        self.tell(connection, &SchedulerToBackend::Takeover { epoch: epoch(number) });
    }

    fn lose(&mut self, connection: ConnectionId) {
        self.0.handle_event(NOW, Event::Disconnected { connection, reason: DisconnectReason::new("dead") });
    }

    /// Whom it is told to connect to at `at`, with the hellos, and what it says otherwise.
    fn dials(&mut self, at: Timestamp) -> Vec<(Peer, Vec<u8>)> {
        self.0.handle_timeout(at);
        let dials = self.outputs().into_iter().filter_map(|output| match output {
            Output::Connect { peer, hello, .. } => Some((peer, hello)),
            _ => None,
        });
        dials.collect()
    }
}

fn standby() -> Claim {
    Claim { epoch: Epoch::NONE, ..claim(1) }
}

/// What a hello says of us: our id, whom we obey, and how many models we have.
fn standing(hello: &[u8]) -> (Option<BackendId>, Claim, usize) {
    let Ok(SchedulerHello::Backend(hello)) = wincode::deserialize(hello) else {
        panic!("a backend says that it is one")
    };
    assert_eq!(hello.standing.token, 6);
    (hello.known_as, hello.standing.obeys, hello.models.len())
}

fn inherited(number: u64) -> PlanId {
    PlanId::new(ModelThreadId::INHERITED, number)
}

fn after(ms: i64) -> Timestamp {
    NOW + Span::from_millis(ms)
}

#[test]
fn the_next_primary_is_told_of_every_plan_and_its_answers_go_over_the_same_link() {
    let mut backend = Backend::of_two();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    let outputs = backend.outputs();
    let [Output::Execute { job, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    let later = |sequence: u64| {
        let SchedulerToBackend::Plan(mut plan) = plan(0, 0) else { unreachable!("it is a plan") };
        (plan.plan, plan.exec_at) = (PlanId(sequence), after(3));
        plan.tasks[0].task = TaskId::new(FRONTEND, sequence);
        SchedulerToBackend::Plan(plan)
    };
    backend.tell(SCHEDULER, &later(2));
    let [Output::Read { transfer: waits, .. }] = backend.outputs()[..] else { panic!("a plan is read") };

    backend.take_over(OTHER, 2);
    // l(1) = 2 ms.
    let unfinished = |number, frees_at, task| {
        Addressed::Control(BackendToControl::Unfinished {
            plan: inherited(number),
            gpu_index: 0,
            model: THEIRS,
            frees_at: Some(frees_at),
            tasks: vec![(TaskId::new(FRONTEND, task), 0)],
        })
    };
    let outputs = backend.outputs();
    assert!(matches!(outputs[0], Output::Disconnect { connection: SCHEDULER }), "before all else: {outputs:?}");
    let Output::Send { connection: OTHER, frame } = &outputs[1] else { panic!("{outputs:?}") };
    let reports: Vec<_> = read_frame::<BackendToScheduler>(frame).map(Result::unwrap).collect();
    assert_eq!(reports, [unfinished(1, after(2), 1), unfinished(2, after(5), 2), obeys(2)]);
    assert_eq!((outputs.len(), backend.0.obeys()), (2, Some(claim(2))));

    // The former primary is not heard any more.
    backend.tell(SCHEDULER, &later(7));
    backend.tell(SCHEDULER, &SchedulerToBackend::FrontendLeft { frontend: FRONTEND });
    assert!(backend.outputs().is_empty() && backend.0.plans() == 2);

    let execution = Execution::Done { started_at: NOW, finished_at: NOW, outputs: Outputs::default() };
    backend.0.handle_executed(NOW, 0, execution);
    let outputs = backend.outputs();
    let [Output::Write { connection, transfer, header, .. }, Output::Send { connection: OTHER, frame }] = &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!((*connection, header.task), (ConnectionId(2), TaskId::new(FRONTEND, 1).0));
    assert_eq!(transfer.local_offset + ANSWER_HEADER_BYTES, job.runs[0].output_offset);
    let done: Vec<_> = read_frame::<BackendToScheduler>(frame).map(Result::unwrap).collect();
    let [Addressed::ModelThread(BackendToModelThread::PlanDone { plan, .. })] = done[..] else { panic!("{done:?}") };
    assert_eq!(plan, inherited(1));
    backend
        .0
        .handle_event(NOW, Event::WriteDone { connection: ConnectionId(2), token: transfer.token, result: Ok(()) });
    let answered = Addressed::ModelThread(BackendToModelThread::Answered { plan: inherited(1), undelivered: vec![] });
    assert_eq!(backend.late_reports(NOW), [(OTHER, answered)]);

    // The other one keeps its window, and can be cancelled under its new name.
    let token = waits.token;
    backend.0.handle_event(NOW, Event::ReadDone { connection: ConnectionId(2), token, result: Ok(()) });
    assert!(backend.outputs().is_empty());
    let (plan, task) = (inherited(2), TaskId::new(FRONTEND, 2));
    backend.tell(OTHER, &SchedulerToBackend::Cancel { plan, task });
    let reports = backend.reports();
    assert_eq!(reports[0], (OTHER, Addressed::ModelThread(BackendToModelThread::Cancelled { plan, task })));
    assert_eq!((reports.len(), backend.0.plans()), (3, 0), "{reports:?}");
}

#[test]
fn a_plan_that_waits_starts_in_its_window_under_the_next_primary() {
    let mut backend = Backend::of_two();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.take_over(OTHER, 2);
    assert_eq!(backend.outputs().len(), 2);
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    let outputs = backend.outputs();
    let [Output::Execute { job, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!((job.exec_at, job.latest), (NOW, after(5)));
    // New plans name the model as the new primary does.
    let SchedulerToBackend::Plan(mut plan) = plan(0, 0) else { unreachable!("it is a plan") };
    (plan.plan, plan.model) = (PlanId(1), THEIRS);
    backend.tell(OTHER, &SchedulerToBackend::Plan(plan));
    assert!(matches!(backend.outputs()[..], [Output::Read { .. }]));
}

/// What the new primary is told first.
fn first_report(backend: &mut Backend) -> BackendToScheduler {
    let outputs = backend.outputs();
    let [Output::Disconnect { .. }, Output::Send { frame, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    read_frame(frame).next().unwrap().unwrap()
}

#[test]
fn what_may_still_touch_a_slot_is_named_and_what_is_over_is_not() {
    takes_over_a_plan_that_loses_tasks(false);
    takes_over_a_plan_that_loses_tasks(true);
}

/// Whether the former primary was told of the task that failed.
fn takes_over_a_plan_that_loses_tasks(is_told: bool) {
    let mut backend = Backend::of_two();
    let SchedulerToBackend::Plan(mut plan) = plan(0, 0) else { unreachable!("it is a plan") };
    let tasks = [1, 2, 3].map(|number| {
        let mut task = plan.tasks[0];
        task.task = TaskId::new(FRONTEND, number * 10);
        (task.slot.slot, task.slot.input_offset, task.slot.answer_offset) = (number as u32, number * 16, 512 * number);
        task
    });
    plan.tasks = tasks.to_vec();
    let id = plan.plan;
    backend.tell(SCHEDULER, &SchedulerToBackend::Plan(plan));
    let outputs = backend.outputs();
    let tokens = outputs.iter().map(|output| match output {
        Output::Read { transfer, .. } => transfer.token,
        other => panic!("{other:?}"),
    });
    let tokens: Vec<u64> = tokens.collect();
    // The first is cancelled while it is read, the second has been read and is cancelled, and the third cannot be read.
    let connection = ConnectionId(2);
    backend.tell(SCHEDULER, &SchedulerToBackend::Cancel { plan: id, task: tasks[0].task });
    if !is_told {
        // While the second can still execute the plan goes on, and the third is kept for its end.
        backend.0.handle_read_failed(NOW, tokens[2]);
        backend.take_over(OTHER, 2);
        let Addressed::Control(BackendToControl::Unfinished { tasks: named, .. }) = first_report(&mut backend) else {
            panic!("a plan")
        };
        return assert_eq!(named, tasks.map(|task| (task.task, 0)));
    }
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: tokens[1], result: Ok(()) });
    backend.tell(SCHEDULER, &SchedulerToBackend::Cancel { plan: id, task: tasks[1].task });
    backend.0.handle_read_failed(NOW, tokens[2]);
    backend.outputs();
    backend.take_over(OTHER, 2);
    let report = first_report(&mut backend);
    let Addressed::Control(BackendToControl::Unfinished { tasks: named, frees_at, .. }) = report else {
        panic!("{report:?}")
    };
    assert_eq!((named, frees_at), (vec![(tasks[0].task, 0)], None), "the third was told to the former one");
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: tokens[0], result: Ok(()) });
    let plan = inherited(1);
    let expected = [
        (OTHER, Addressed::ModelThread(BackendToModelThread::Cancelled { plan, task: tasks[0].task })),
        (OTHER, Addressed::ModelThread(BackendToModelThread::Answered { plan, undelivered: vec![] })),
    ];
    assert_eq!(backend.reports(), expected);
}

#[test]
fn only_a_higher_epoch_of_the_same_era_is_obeyed() {
    for lower in [0, 1] {
        let mut backend = Backend::of_two();
        backend.take_over(OTHER, lower);
        backend.tell(OTHER, &plan(0, 0));
        assert!(backend.outputs().is_empty() && backend.0.plans() == 0);
        assert_eq!((backend.0.obeys(), backend.0.ended()), (Some(claim(1)), None));
    }

    let mut backend = Backend::of_two();
    backend.take_over(OTHER, 3);
    backend.outputs();
    let dials = backend.dials(after(50));
    let [(Peer::Scheduler(0), hello)] = &dials[..] else { panic!("{dials:?}") };
    assert_eq!(standing(hello).1, claim(3), "the former primary hears of the new one");
    backend.0.handle_connecting(Peer::Scheduler(0), ConnectionId(5));
    backend.welcome(ConnectionId(5), ModelId(5), claim(2));
    assert_eq!((backend.reports(), backend.0.obeys()), (vec![(ConnectionId(5), LINKED)], Some(claim(3))));
    backend.take_over(ConnectionId(5), 4);
    assert!(matches!(backend.outputs()[0], Output::Disconnect { connection: OTHER }));
    assert_eq!(backend.0.obeys(), Some(claim(4)));
}

#[test]
fn a_lower_epoch_is_counted_and_changes_nothing_whoever_claims_it() {
    let mut backend = Backend::of_two();
    backend.take_over(OTHER, 3);
    backend.outputs();
    for (count, lower) in [Epoch::NONE, epoch(1), Epoch { number: 2, scheduler: 9 }].into_iter().enumerate() {
        backend.tell(OTHER, &SchedulerToBackend::Takeover { epoch: lower });
        assert!(backend.outputs().is_empty() && backend.0.ended().is_none(), "the primary claims {lower}");
        assert_eq!((backend.0.obeys(), backend.0.lower_epochs()), (Some(claim(3)), count as u64 + 1));
    }
    // The former primary has heard of no other one.
    assert_eq!(backend.dials(after(50)).len(), 1);
    backend.0.handle_connecting(Peer::Scheduler(0), ConnectionId(5));
    backend.welcome(ConnectionId(5), ModelId(5), claim(1));
    assert_eq!((backend.reports(), backend.0.lower_epochs()), (vec![(ConnectionId(5), LINKED)], 4));
    backend.take_over(ConnectionId(5), 2);
    backend.tell(ConnectionId(5), &plan(0, 0));
    assert!(backend.outputs().is_empty() && backend.0.plans() == 0);
    assert_eq!((backend.0.obeys(), backend.0.lower_epochs()), (Some(claim(3)), 5));
    // To say the same again is no lower claim, and neither is that of a standby that takes us in.
    backend.take_over(OTHER, 3);
    backend.lose(ConnectionId(5));
    backend.dials(after(150));
    backend.0.handle_connecting(Peer::Scheduler(0), ConnectionId(6));
    backend.welcome(ConnectionId(6), ModelId(5), standby());
    assert_eq!((backend.0.obeys(), backend.0.lower_epochs()), (Some(claim(3)), 5));
}

#[test]
fn whoever_is_of_another_era_is_tried_later_and_starts_only_an_orphan_over() {
    for number in [0, 1, 7] {
        let mut backend = Backend::of(2);
        backend.welcome(SCHEDULER, ModelId(5), claim(1));
        backend.outputs();
        backend.0.handle_connecting(Peer::Scheduler(1), OTHER);
        let era = Era(9);
        let epoch = if number == 0 { Epoch::NONE } else { epoch(number) };
        backend.welcome(OTHER, THEIRS, Claim { era, epoch });
        assert!(matches!(backend.outputs()[..], [Output::Disconnect { connection: OTHER }]));
        assert_eq!((backend.0.ended(), backend.0.obeys()), (None, Some(claim(1))));
        assert!(backend.dials(after(49)).is_empty());
        assert!(matches!(backend.dials(after(50))[..], [(Peer::Scheduler(1), _)]));
        backend.0.handle_connecting(Peer::Scheduler(1), ConnectionId(4));
        backend.welcome(ConnectionId(4), THEIRS, Claim { era, epoch });
        assert!(backend.dials(after(99)).is_empty(), "later each time");
        assert_eq!(backend.dials(after(100)).len(), 1);
        backend.lose(SCHEDULER);
        backend.0.handle_connecting(Peer::Scheduler(1), ConnectionId(6));
        backend.welcome(ConnectionId(6), THEIRS, Claim { era, epoch });
        let over = (number > 0).then_some("scheduler 127.0.0.1:2: it is the primary of another era");
        assert_eq!(backend.0.ended(), over);
    }
}

#[test]
fn an_orphan_keeps_all_and_is_served_on_or_ends_when_nobody_takes_over() {
    let mut backend = Backend::of_two();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.lose(SCHEDULER);
    assert_eq!((backend.0.ended(), backend.0.obeys(), backend.0.has_joined()), (None, None, true));
    // It goes on meanwhile, and has nobody to tell.
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    assert!(matches!(backend.outputs()[..], [Output::Execute { .. }]));
    backend.0.handle_executed(
        NOW,
        0,
        Execution::Done { started_at: NOW, finished_at: NOW, outputs: Outputs::default() },
    );
    assert!(matches!(backend.outputs()[..], [Output::Write { .. }]));
    backend.take_over(OTHER, 2);
    let reports = backend.reports();
    let (_, Addressed::Control(BackendToControl::Unfinished { frees_at, tasks, .. })) = &reports[0] else {
        panic!("{reports:?}")
    };
    assert_eq!((frees_at, &tasks[..]), (&None, &[(TaskId::new(FRONTEND, 1), 0)][..]), "it was executed");
    assert_eq!(reports[1..], [(OTHER, obeys(2))]);
    backend.0.handle_timeout(after(3_000));
    assert_eq!(backend.0.ended(), None);

    let mut backend = Backend::of_two();
    backend.lose(SCHEDULER);
    backend.0.handle_timeout(after(1_999));
    assert_eq!(backend.0.ended(), None);
    backend.0.handle_timeout(after(2_000));
    assert_eq!(backend.0.ended(), Some("no scheduler has become the primary in time, 2.000 s"));
}

#[test]
fn a_primary_that_comes_back_in_its_epoch_has_forgotten_us() {
    let mut backend = Backend::of_two();
    backend.lose(SCHEDULER);
    let dials = backend.dials(after(50));
    assert!(matches!(dials[..], [(Peer::Scheduler(0), _)]), "{dials:?}");
    backend.0.handle_connecting(Peer::Scheduler(0), ConnectionId(5));
    backend.welcome(ConnectionId(5), ModelId(5), claim(1));
    let reason = "scheduler 127.0.0.1:1: it was lost, and is the primary of the same epoch";
    assert_eq!(backend.0.ended(), Some(reason));

    // One that claims more on a connection whose plans are of its former term is joined anew first.
    let mut backend = Backend::of_two();
    backend.take_over(SCHEDULER, 1);
    assert!(backend.outputs().is_empty(), "it repeats what it said");
    backend.take_over(SCHEDULER, 2);
    assert!(matches!(backend.outputs()[..], [Output::Disconnect { connection: SCHEDULER }]));
    assert_eq!((backend.0.obeys(), backend.dials(after(50)).len()), (None, 1));
    backend.0.handle_connecting(Peer::Scheduler(0), ConnectionId(5));
    backend.welcome(ConnectionId(5), ModelId(5), claim(2));
    assert_eq!(backend.0.obeys(), Some(claim(2)));
}

#[test]
fn schedulers_are_tried_one_after_another_until_one_names_us_and_the_others_must_repeat_it() {
    let mut backend = Backend::of(2);
    backend.lose(SCHEDULER);
    let outputs = backend.outputs();
    assert!(matches!(outputs[..], [Output::Connect { peer: Peer::Scheduler(1), .. }]), "{outputs:?}");
    backend.0.handle_connecting(Peer::Scheduler(1), OTHER);
    assert!(backend.dials(after(500)).is_empty(), "one at a time");
    backend.welcome(OTHER, THEIRS, standby());
    let dials = backend.dials(after(50));
    let [(Peer::Scheduler(0), hello)] = &dials[..] else { panic!("{dials:?}") };
    assert_eq!(standing(hello), (Some(BackendId(3)), Claim::default(), 1));
    backend.0.handle_connecting(Peer::Scheduler(0), SCHEDULER);
    let model_threads = ModelThreads::default();
    let models = vec![ModelId(5)];
    let welcome = BackendWelcome { backend: BackendId(4), models, model_threads, claim: claim(1) };
    backend.connected(SCHEDULER, encode(&welcome));
    assert!(matches!(backend.outputs()[..], [Output::Disconnect { connection: SCHEDULER }]));
    assert_eq!((backend.0.ended(), backend.0.obeys()), (None, None));
    backend.0.handle_timeout(after(2_000));
    assert_eq!(
        backend.0.ended(),
        Some("no scheduler has become the primary in time, 2.000 s"),
        "another name may be taken"
    );
}

#[test]
fn a_claim_waits_until_all_model_threads_are_connected() {
    let mut backend = Backend::of(2);
    backend.welcome(SCHEDULER, ModelId(5), claim(1));
    backend.outputs();
    backend.0.handle_connecting(Peer::Scheduler(1), OTHER);
    let model_threads = ModelThreads { addresses: vec!["127.0.0.1:10".into()], pass: 9 };
    let models = vec![THEIRS];
    let welcome = BackendWelcome { backend: BackendId(3), models, model_threads, claim: standby() };
    backend.connected(OTHER, encode(&welcome));
    backend.take_over(OTHER, 2);
    let outputs = backend.outputs();
    assert!(matches!(outputs[..], [Output::Connect { peer: Peer::ModelThread(1, ModelThreadId(0)), .. }]));
    backend.0.handle_connecting(Peer::ModelThread(1, ModelThreadId(0)), ConnectionId(4));
    assert_eq!(backend.0.obeys(), Some(claim(1)));
    backend.connected(ConnectionId(4), vec![]);
    assert_eq!(backend.0.obeys(), Some(claim(2)));
    assert!(matches!(backend.outputs()[..], [Output::Disconnect { .. }, Output::Send { connection: OTHER, .. }]));

    // Regression: control refused what was said of a sample of an earlier primary's plan, and the backend was lost.
    let ran = |plan| BackendToModelThread::RanAlone { plan, took: Span(7) };
    backend.0.handle_ran_alone(NOW, inherited(1), Span(7));
    let told = Addressed::Control(BackendToControl::Inherited(ran(inherited(1))));
    assert_eq!(backend.reports(), [(OTHER, told)]);
    backend.0.handle_ran_alone(NOW, PlanId(9), Span(7));
    assert_eq!(backend.reports(), [(ConnectionId(4), Addressed::ModelThread(ran(PlanId(9))))]);
}

#[test]
fn a_standby_that_asks_is_told_whether_the_primary_is_heard() {
    let misses = |misses| (OTHER, Addressed::Control(BackendToControl::Misses { misses }));
    let asks_clock = (SCHEDULER, Addressed::Control(BackendToControl::ClockRequest { sent_at: NOW }));
    let asked = || {
        let mut backend = Backend::of_two();
        backend.0.handle_timeout(NOW);
        backend.outputs();
        backend.tell(OTHER, &SchedulerToBackend::AskPrimary);
        backend.tell(OTHER, &SchedulerToBackend::AskPrimary);
        assert_eq!(backend.reports(), std::slice::from_ref(&asks_clock));
        backend
    };
    // It answers.
    let mut backend = asked();
    let clock = ClockReply { sent_at: NOW, received_at: NOW, replied_at: NOW };
    backend.tell(SCHEDULER, &SchedulerToBackend::Clock(clock));
    assert_eq!(backend.reports(), [misses(false)]);
    backend.0.handle_timeout(after(4));
    assert!(backend.reports().is_empty(), "once");
    // It stalls.
    let mut backend = asked();
    assert!(backend.0.poll_timeout() <= after(5));
    backend.0.handle_timeout(after(5));
    assert!(backend.reports().contains(&misses(true)));
    // It dies, or is dead.
    let mut backend = asked();
    backend.lose(SCHEDULER);
    backend.0.handle_timeout(NOW);
    assert_eq!(backend.reports(), [misses(true)]);
    backend.tell(OTHER, &SchedulerToBackend::AskPrimary);
    backend.0.handle_timeout(NOW);
    assert_eq!(backend.reports(), [misses(true)]);
    // It asks about itself.
    let mut backend = Backend::of_two();
    backend.tell(SCHEDULER, &SchedulerToBackend::AskPrimary);
    assert_eq!(backend.reports(), [(SCHEDULER, Addressed::Control(BackendToControl::Misses { misses: false }))]);
}

#[test]
fn a_scheduler_that_claims_or_asks_a_thousand_times_is_answered_once_a_connection() {
    let frame = |message: &dyn Fn(u32) -> SchedulerToBackend| {
        let mut writer = FrameWriter::default();
        (2..1_002).for_each(|number| assert!(writer.push(&message(number)).unwrap().is_none(), "it fits one frame"));
        writer.take().unwrap()
    };
    let mut backend = Backend::of_two();
    let (connection, asks) = (OTHER, frame(&|_| SchedulerToBackend::AskPrimary));
    backend.0.handle_event(NOW, Event::Message { connection, frame: asks });
    assert_eq!(backend.reports().len(), 1, "the primary is asked");
    let claims = frame(&|number| SchedulerToBackend::Takeover { epoch: epoch(number) });
    backend.0.handle_event(NOW, Event::Message { connection, frame: claims });
    let outputs = backend.outputs();
    assert_eq!((outputs.len(), backend.0.obeys(), backend.0.ended()), (2, None, None), "{outputs:?}");
    assert!(outputs.iter().all(|output| matches!(output, Output::Disconnect { .. })));
}

#[test]
fn when_what_is_hosted_changes_standbys_are_joined_anew() {
    let mut backend = Backend::of_two();
    backend.tell(
        SCHEDULER,
        &SchedulerToBackend::Load { load: LoadId(1), name: "n".into(), brought: None, is_placed: false },
    );
    let outputs = backend.outputs();
    let [Output::Load { load, .. }] = outputs[..] else { panic!("{outputs:?}") };
    backend.0.handle_loaded(NOW, load, Ok(vec![loaded("n", 4)]));
    backend.outputs();
    backend.tell(SCHEDULER, &SchedulerToBackend::Host { load: LoadId(1), version: "1".into(), model: ModelId(6) });
    let outputs = backend.outputs();
    let [Output::Disconnect { connection: OTHER }, Output::Connect { peer: Peer::Scheduler(1), hello, .. }] =
        &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!(standing(hello).2, 2);
    backend.0.handle_connecting(Peer::Scheduler(1), ConnectionId(6));
    backend.tell(SCHEDULER, &SchedulerToBackend::Unload { model: ModelId(5) });
    let outputs = backend.outputs();
    let [Output::Disconnect { connection: ConnectionId(6) }, Output::Connect { hello, .. }, Output::Send { .. }] =
        &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!(standing(hello).2, 1);
    backend.0.handle_connecting(Peer::Scheduler(1), ConnectionId(7));
    backend.welcome(ConnectionId(7), THEIRS, claim(2));
    backend.outputs();
    // What is left is n, which the new primary calls so.
    let SchedulerToBackend::Plan(mut plan) = plan(0, 0) else { unreachable!("it is a plan") };
    plan.model = THEIRS;
    plan.tasks[0].slot.input_bytes = 4;
    backend.announce(ConnectionId(7));
    backend.tell(ConnectionId(7), &SchedulerToBackend::Plan(plan));
    let outputs = backend.outputs();
    let [Output::Read { transfer, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(transfer.bytes, 4);
}

#[test]
fn what_changes_twice_before_anybody_is_connected_to_is_told_once() {
    let mut backend = Backend::of_two();
    let load =
        |load| SchedulerToBackend::Load { load: LoadId(load), name: "n".into(), brought: None, is_placed: false };
    backend.tell(SCHEDULER, &load(1));
    let outputs = backend.outputs();
    let [Output::Load { load, .. }] = outputs[..] else { panic!("{outputs:?}") };
    backend.0.handle_loaded(NOW, load, Ok(vec![loaded("n", 4)]));
    backend.tell(SCHEDULER, &SchedulerToBackend::Host { load: LoadId(1), version: "1".into(), model: ModelId(6) });
    backend.tell(SCHEDULER, &SchedulerToBackend::Unload { model: ModelId(6) });
    let dials = backend.dials(NOW);
    let [(Peer::Scheduler(1), hello)] = &dials[..] else { panic!("{dials:?}") };
    assert_eq!(standing(hello).2, 1);
}

#[test]
fn a_plan_of_a_model_that_goes_is_told_under_a_name_that_nobody_knows() {
    let mut backend = Backend::of_two();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.tell(SCHEDULER, &SchedulerToBackend::Unload { model: ModelId(5) });
    backend.outputs();
    backend.0.handle_connecting(Peer::Scheduler(1), ConnectionId(6));
    let model_threads = ModelThreads::default();
    let welcome = BackendWelcome { backend: BackendId(3), models: vec![], model_threads, claim: claim(2) };
    backend.connected(ConnectionId(6), encode(&welcome));
    let outputs = backend.outputs();
    let Output::Send { frame, .. } = &outputs[1] else { panic!("{outputs:?}") };
    let reports: Vec<_> = read_frame::<BackendToScheduler>(frame).map(Result::unwrap).collect();
    let [LINKED, Addressed::Control(BackendToControl::Unfinished { model, .. }), obeyed] = &reports[..] else {
        panic!("{reports:?}")
    };
    assert_eq!((*model, obeyed), (ModelId(u32::MAX), &obeys(2)));
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    backend.outputs();
    backend.0.handle_executed(
        NOW,
        0,
        Execution::Done { started_at: NOW, finished_at: NOW, outputs: Outputs::default() },
    );
    let outputs = backend.outputs();
    let Output::Write { transfer, .. } = &outputs[0] else { panic!("{outputs:?}") };
    backend.0.handle_event(NOW, Event::WriteDone { connection, token: transfer.token, result: Ok(()) });
    let reports = backend.late_reports(NOW);
    assert!(
        matches!(&reports[..], [(_, Addressed::ModelThread(BackendToModelThread::Answered { .. }))]),
        "{reports:?}"
    );
    assert!(backend.0.into_models().is_empty());
}

#[test]
fn what_a_former_primary_wanted_loaded_is_forgotten() {
    let mut backend = Backend::of_two();
    for load in [1, 2] {
        backend.tell(
            SCHEDULER,
            &SchedulerToBackend::Load { load: LoadId(load), name: "n".into(), brought: None, is_placed: false },
        );
    }
    let outputs = backend.outputs();
    let [Output::Load { load: first, .. }, Output::Load { load: second, .. }] = outputs[..] else {
        panic!("{outputs:?}")
    };
    backend.0.handle_loaded(NOW, first, Ok(vec![loaded("n", 4)]));
    backend.take_over(OTHER, 2);
    backend.outputs();
    backend.0.handle_loaded(NOW, second, Ok(vec![loaded("n", 4)]));
    for load in [1, 2] {
        backend.tell(OTHER, &SchedulerToBackend::Host { load: LoadId(load), version: "1".into(), model: ModelId(6) });
    }
    assert!(backend.outputs().is_empty(), "nothing is said of a load that nobody waits for, nor hosted");
}

#[test]
fn frontends_stay_linked_while_they_may_join_the_next_primary() {
    let taken_over = || {
        let mut backend = Backend::of_two();
        backend.tell(OTHER, &SchedulerToBackend::FrontendLeft { frontend: FRONTEND });
        assert!(backend.outputs().is_empty(), "a standby has no say");
        backend.take_over(OTHER, 2);
        assert_eq!(backend.outputs().len(), 2);
        backend
    };
    let closes = |backend: &mut Backend| {
        let outputs = backend.outputs();
        outputs.iter().any(|output| matches!(output, Output::Disconnect { connection: ConnectionId(2) }))
    };
    let mut backend = taken_over();
    backend.0.handle_timeout(after(999));
    assert!(!closes(&mut backend));
    backend.announce(OTHER);
    assert!(backend.outputs().is_empty(), "it is linked already");
    backend.0.handle_timeout(after(1_000));
    assert!(!closes(&mut backend), "it has joined");

    let mut backend = taken_over();
    backend.0.handle_timeout(after(1_000));
    assert!(closes(&mut backend), "it has not");

    let mut backend = taken_over();
    backend.tell(OTHER, &SchedulerToBackend::FrontendLeft { frontend: FRONTEND });
    assert!(closes(&mut backend), "it is said to have left");
}

#[test]
fn the_next_primary_hears_of_unusable_gpus_and_that_we_leave() {
    let mut backend = Backend::of_two();
    lose_gpu(&mut backend);
    backend.0.handle_leaving(NOW, WITHIN);
    backend.outputs();
    backend.take_over(OTHER, 2);
    let outputs = backend.outputs();
    let Output::Send { connection: OTHER, frame } = &outputs[1] else { panic!("{outputs:?}") };
    let reports: Vec<_> = read_frame::<BackendToScheduler>(frame).map(Result::unwrap).collect();
    let unusable = Addressed::Control(BackendToControl::Usable { gpu_index: 0, is_usable: false });
    assert_eq!(reports, [obeys(2), unusable, Addressed::Control(BackendToControl::Leaving { within: WITHIN })]);
    assert!(!backend.0.has_left());
    backend.tell(OTHER, &SchedulerToBackend::Dismissed);
    assert!(backend.0.has_left());

    let mut backend = Backend::of_two();
    backend.lose(SCHEDULER);
    backend.0.handle_leaving(NOW, WITHIN);
    assert!(!backend.0.has_left(), "another one may take over, and have others host its models");
    backend.0.handle_timeout(NOW + ORPHAN_MAX);
    assert!(backend.0.has_left(), "nobody has");
}

#[test]
fn the_former_clock_is_kept_until_the_next_one_is_known() {
    let ahead = Span::from_millis(10_000);
    let clock = ClockReply { sent_at: NOW, received_at: NOW + ahead, replied_at: NOW + ahead };
    let mut backend = Backend::of_two();
    backend.take_over(OTHER, 2);
    backend.outputs();
    let arrived_at = |backend: &mut Backend, id| {
        let SchedulerToBackend::Plan(mut plan) = plan(0, 7) else { unreachable!("it is a plan") };
        plan.plan = PlanId(id);
        backend.tell(OTHER, &SchedulerToBackend::Plan(plan));
        match backend.reports()[0].1 {
            Addressed::ModelThread(BackendToModelThread::PlanDone { arrived_at, .. }) => arrived_at,
            ref other => panic!("{other:?}"),
        }
    };
    assert_eq!(arrived_at(&mut backend, 1), NOW);
    backend.tell(OTHER, &SchedulerToBackend::Clock(clock));
    assert_eq!(arrived_at(&mut backend, 2), NOW + ahead);

    let mut backend = Backend::of_two();
    backend.tell(OTHER, &SchedulerToBackend::Clock(clock));
    backend.take_over(OTHER, 2);
    backend.outputs();
    assert_eq!(arrived_at(&mut backend, 1), NOW + ahead, "it was known before");
}

/// Its GPU loses what runs its only model.
fn lose_gpu(backend: &mut Backend) {
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    assert!(matches!(backend.outputs()[..], [Output::Execute { .. }]));
    let lost = Execution::Lost { started_at: NOW, finished_at: NOW, reason: "it ended".into() };
    backend.0.handle_executed(NOW, 0, lost);
    let outputs = backend.outputs();
    let token = outputs.iter().find_map(|output| match output {
        Output::Write { transfer, .. } => Some(transfer.token),
        _ => None,
    });
    backend.0.handle_event(NOW, Event::WriteDone { connection, token: token.unwrap(), result: Ok(()) });
    backend.outputs();
}

#[test]
fn a_drain_is_told_to_every_scheduler_and_outlives_them() {
    let mut backend = Backend::of_two();
    let drained = |is_drained| Addressed::Control(BackendToControl::Drained { is_drained });
    backend.tell(OTHER, &SchedulerToBackend::Drain { is_drained: true });
    assert!(backend.reports().is_empty() && !backend.0.kept().is_drained, "a standby's word");
    backend.tell(SCHEDULER, &SchedulerToBackend::Drain { is_drained: true });
    assert_eq!(backend.reports(), [(SCHEDULER, drained(true)), (OTHER, drained(true))]);
    // The next life knows it, and whoever welcomes it then.
    let mut next = Backend::of(1);
    next.0.handle_kept(backend.0.kept());
    let mut next = next.welcomed_by(&[]);
    assert_eq!(next.reports(), [(SCHEDULER, drained(true)), (SCHEDULER, obeys(1))]);
    next.tell(SCHEDULER, &SchedulerToBackend::Drain { is_drained: false });
    assert_eq!(next.reports(), [(SCHEDULER, drained(false))]);
}
