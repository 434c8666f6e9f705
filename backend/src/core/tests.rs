//! What a scheduler can say, and what becomes of it. How the roles work together is simulated in `sim`.

use super::*;
use crate::{
    executor::{Basis, Emulated},
    worker::{Execution, Outputs},
};
use proto::{
    Epoch, Era, LatencyProfile, LinkId, LinkPass, PlanId, SlotDescriptor, Weights,
    backend_to_frontend::ANSWER_HEADER_BYTES,
    backend_to_scheduler::{BackendToScheduler, LoadOutcome, PlanOutcome, Undelivered},
    clock::ClockReply,
    frame::{Addressed, FrameWriter},
    hello::{Member, MemberHello, ModelThreads, SchedulerHello},
    scheduler_to_backend::{BackendWelcome, PlannedTask},
    stages::SchedulerStamps,
};
use repository::{DataType, Model, Priorities, Tensor};
use transport::{DisconnectReason, TransferError};

const SCHEDULER: ConnectionId = ConnectionId(1);
const FRONTEND: FrontendId = FrontendId(4);
const PASS: LinkPass = LinkPass(0x77);
const NOW: Timestamp = Timestamp(1_000_000);
const WITHIN: Span = Span::from_millis(25_000);
const LINKED: BackendToScheduler = Addressed::Control(BackendToControl::Linked { frontend: FRONTEND, link: LinkId(1) });

/// Of the primary with this number in an era.
fn claim(number: u32) -> Claim {
    Claim { era: Era(8), epoch: epoch(number) }
}

fn epoch(number: u32) -> Epoch {
    Epoch { number, scheduler: 0 }
}

/// What a backend says that obeys the first primary.
fn obeys(number: u32) -> BackendToScheduler {
    Addressed::Control(BackendToControl::Obeys { epoch: epoch(number) })
}

fn loaded(name: &str, elements: usize) -> Loaded {
    let tensor = |datatype, elements| Tensor::new("t", datatype, vec![elements]);
    let profile = LatencyProfile::linear(1.0, 1.0, 4).unwrap();
    let model = Model {
        name: name.into(),
        version: "1".into(),
        inputs: vec![tensor(DataType::Uint8, elements)],
        outputs: vec![tensor(DataType::Uint64, 2)],
        max_batch: 4,
        rows_max: 4,
        is_batched: true,
        slo: Span::from_millis(20),
        priorities: Priorities::default(),
        queue: repository::QueuePolicies::default(),
        weights: repository::WeightsSize::default(),
        executor: repository::Executor::Emulated { profile: profile.clone() },
        labels: vec![],
        image: None,
        configuration: repository::Configuration::default(),
        files: None,
    };
    let executor = Arc::new(Emulated::new(&model, profile.clone()));
    Loaded {
        shape: ModelShape::from(&model),
        model,
        gpu_indexes: vec![0],
        executor,
        profile,
        cost: None,
        weights: Weights::default(),
        basis: Basis::Sizes,
        is_pinned: false,
        is_guest: false,
    }
}

struct Backend(Core);

impl Backend {
    fn new() -> Self {
        Self::of(1)
    }

    /// With so many schedulers, of which the first is being connected to.
    fn of(schedulers: u16) -> Self {
        Self::with(schedulers, loaded("m", 8), (None, None))
    }

    /// The same, with this model, and memory of so many pages in its GPU and its host.
    fn with(schedulers: u16, model: Loaded, pages: (Option<u32>, Option<u32>)) -> Self {
        Self::with_all(schedulers, vec![model], pages)
    }

    fn with_all(schedulers: u16, models: Vec<Loaded>, (memory_pages, host_pages): (Option<u32>, Option<u32>)) -> Self {
        let models: Vec<_> = models.into_iter().map(Arc::new).collect();
        let staging = Staging::new(1, &models.iter().map(|model| model.shape).collect::<Vec<_>>(), 0);
        let schedulers = (1..=schedulers).map(|port| ([127, 0, 0, 1], port).into()).collect();
        let landings = BTreeMap::from([(0, 9)]);
        let name = "backend".to_owned();
        let is_auto = false;
        let config =
            CoreConfig { name, schedulers, token: 6, staging, lkey: 7, landings, memory_pages, host_pages, is_auto };
        let mut core = Core::new(config, models);
        assert!(matches!(core.poll_output(), Some(Output::Connect { peer: Peer::Scheduler(0), .. })));
        core.handle_connecting(Peer::Scheduler(0), SCHEDULER);
        Self(core)
    }

    fn welcomed(addresses: &[&str]) -> Self {
        Self::new().welcomed_by(addresses)
    }

    /// Is welcomed by the first scheduler, which is the primary.
    fn welcomed_by(self, addresses: &[&str]) -> Self {
        self.welcomed_as(addresses, &[ModelId(5)])
    }

    /// The same, which calls its models so.
    fn welcomed_as(mut self, addresses: &[&str], models: &[ModelId]) -> Self {
        let addresses = addresses.iter().map(|&address| address.into()).collect();
        let model_threads = ModelThreads { addresses, pass: 9 };
        let (models, claim) = (models.to_vec(), claim(1));
        let welcome = BackendWelcome { backend: BackendId(3), models, model_threads, claim };
        self.connected(SCHEDULER, encode(&welcome));
        self
    }

    /// With a link to the frontend, by connection 2.
    fn linked() -> Self {
        Self::linked_with(loaded("m", 8))
    }

    /// The same, with this model.
    fn linked_with(model: Loaded) -> Self {
        let mut backend = Self::with(1, model, (None, None)).welcomed_by(&[]);
        assert_eq!(backend.reports(), [(SCHEDULER, obeys(1))]);
        backend.link();
        assert_eq!(backend.reports(), [(SCHEDULER, LINKED)]);
        backend
    }

    /// The first scheduler announces the frontend and tells its clock.
    fn link(&mut self) {
        let link_address = "127.0.0.1:2".into();
        self.tell(SCHEDULER, &SchedulerToBackend::FrontendJoined { frontend: FRONTEND, link_address, pass: PASS });
        assert!(self.outputs().is_empty(), "no link before the clock");
        let clock = ClockReply { sent_at: NOW, received_at: NOW, replied_at: NOW };
        self.tell(SCHEDULER, &SchedulerToBackend::Clock(clock));
        let outputs = self.outputs();
        let [Output::Connect { peer, hello, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        let (backend, link, epoch) = (BackendId(3), LinkId(1), epoch(1));
        let expected = LinkHello { backend, frontend: FRONTEND, link, epoch, pass: PASS };
        assert_eq!((peer, wincode::deserialize(hello).unwrap()), (&Peer::Frontend(FRONTEND), expected));
        self.0.handle_connecting(Peer::Frontend(FRONTEND), ConnectionId(2));
        let welcome =
            LinkWelcome { arena_address: 1000, arena_bytes: 4096, arena_rkey: 1, guards_offset: 2048, guards_rkey: 2 };
        self.connected(ConnectionId(2), encode(&welcome));
    }

    fn connected(&mut self, connection: ConnectionId, welcome: Vec<u8>) {
        self.0.handle_event(NOW, Event::Connected { connection, welcome });
    }

    fn tell(&mut self, connection: ConnectionId, message: &SchedulerToBackend) {
        self.tell_at(NOW, connection, message);
    }

    fn tell_at(&mut self, at: Timestamp, connection: ConnectionId, message: &SchedulerToBackend) {
        let mut writer = FrameWriter::default();
        writer.push(message).unwrap();
        self.0.handle_event(at, Event::Message { connection, frame: writer.take().unwrap() });
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.0.poll_output()).collect()
    }

    fn reports(&mut self) -> Vec<(ConnectionId, BackendToScheduler)> {
        let (reports, others) = self.reports_and_others();
        assert!(others.is_empty(), "{others:?}");
        reports
    }

    /// Those that have waited for others. The clock may be asked for as well.
    fn late_reports(&mut self, now: Timestamp) -> Vec<(ConnectionId, BackendToScheduler)> {
        assert!(self.reports().is_empty());
        assert!(self.0.poll_timeout() <= now + ANSWERED_WAITS);
        self.0.handle_timeout(now + ANSWERED_WAITS);
        let is_report =
            |said: &BackendToScheduler| !matches!(said, Addressed::Control(BackendToControl::ClockRequest { .. }));
        self.reports().into_iter().filter(|(_, said)| is_report(said)).collect()
    }

    fn reports_and_others(&mut self) -> (Vec<(ConnectionId, BackendToScheduler)>, Vec<Output>) {
        let (mut reports, mut others) = (Vec::new(), Vec::new());
        for output in self.outputs() {
            let Output::Send { connection, frame } = output else {
                others.push(output);
                continue;
            };
            reports.extend(read_frame(&frame).map(|message| (connection, message.unwrap())));
        }
        (reports, others)
    }
}

fn plan(model_thread: u16, gpu_index: u32) -> SchedulerToBackend {
    let slot =
        SlotDescriptor { slot: 0, input_offset: 0, input_bytes: 8, answer_offset: 64, answer_bytes_max: 300, key: 5 };
    let task = PlannedTask {
        task: TaskId::new(FRONTEND, 1),
        attempt: 0,
        slot,
        stamps: SchedulerStamps { queued_at: NOW, due_at: NOW, granted_at: NOW },
    };
    SchedulerToBackend::Plan(BatchPlan {
        plan: PlanId::new(ModelThreadId(model_thread), 1),
        gpu_index,
        model: ModelId(5),
        exec_at: NOW,
        latest: NOW + Span::from_millis(5),
        tasks: vec![task],
        sample: None,
    })
}

#[test]
fn a_scheduler_that_breaks_the_protocol_ends_this_life_with_a_reason() {
    let mut backend = Backend::new();
    backend.tell(SCHEDULER, &SchedulerToBackend::FrontendLeft { frontend: FRONTEND });
    assert_eq!(backend.0.ended(), Some("the scheduler spoke before its welcome"));
    assert!(backend.0.poll_output().is_none() && backend.0.poll_timeout() == Timestamp::NEVER);

    let mut backend = Backend::new();
    let model_threads = ModelThreads::default();
    let welcome = BackendWelcome { backend: BackendId(3), models: vec![], model_threads, claim: claim(1) };
    backend.connected(SCHEDULER, encode(&welcome));
    assert!(backend.0.ended().unwrap().contains("names 0 models, expected 1"));

    let mut backend = Backend::welcomed(&[]);
    backend.0.handle_event(NOW, Event::Message { connection: SCHEDULER, frame: vec![0xff; 9] });
    assert!(backend.0.ended().unwrap().contains("does not decode"));

    let mut backend = Backend::welcomed(&[]);
    backend.tell(SCHEDULER, &plan(1, 0));
    assert_eq!(backend.0.ended(), Some("plan 281474976710657 is of ModelThread 1, which is not connected"));

    let backend = Backend::welcomed(&["127.0.0.1"]);
    assert_eq!(
        backend.0.ended(),
        Some("its welcome has '127.0.0.1' as the address of a ModelThread, expected ip:port")
    );

    let mut backend = Backend::welcomed(&[]);
    let reason = DisconnectReason::new("it closed the connection");
    backend.0.handle_event(NOW, Event::Disconnected { connection: SCHEDULER, reason });
    assert_eq!(backend.0.ended(), Some("it closed the connection"));
}

#[test]
fn it_has_joined_once_it_is_connected_to_every_model_thread_and_reports_to_whom_it_concerns() {
    let mut backend = Backend::welcomed(&["127.0.0.1:10", "127.0.0.1:11"]);
    for (id, output) in (0..).zip(backend.outputs()) {
        let Output::Connect { peer, to, hello } = output else { panic!("{output:?}") };
        assert_eq!((peer, to.ip().unwrap().port()), (Peer::ModelThread(0, ModelThreadId(id)), 10 + id));
        let hello = wincode::deserialize::<SchedulerHello>(&hello).unwrap();
        let expected = MemberHello { member: Member::Backend(BackendId(3)), pass: 9 };
        assert_eq!(hello, SchedulerHello::Member(expected));
        assert!(!backend.0.has_joined());
        let connection = ConnectionId(20 + u64::from(id));
        backend.0.handle_connecting(peer, connection);
        backend.connected(connection, vec![]);
    }
    assert!(backend.0.has_joined());
    backend.tell(ConnectionId(21), &plan(1, 7));
    backend.0.handle_timeout(NOW);
    let reports = backend.reports();
    let readers: Vec<u64> = reports.iter().map(|(connection, _)| connection.0).collect();
    assert_eq!(readers, [1, 1, 21, 21], "{reports:?}");
    assert_eq!(reports[0].1, obeys(1));
    assert!(matches!(reports[1].1, Addressed::Control(BackendToControl::ClockRequest { sent_at: NOW })));

    let (connection, reason) = (ConnectionId(20), DisconnectReason::new("gone"));
    backend.0.handle_event(NOW, Event::Disconnected { connection, reason });
    assert_eq!(backend.0.ended(), Some("gone"), "without one of them the scheduler is lost");
}

#[test]
fn a_plan_becomes_a_read_an_execution_and_a_write() {
    let mut backend = Backend::linked();
    backend.tell(SCHEDULER, &plan(0, 0));
    let outputs = backend.outputs();
    let [Output::Read { connection: ConnectionId(2), transfer: read, .. }] = outputs[..] else { panic!("{outputs:?}") };
    assert_eq!((read.remote_address, read.rkey, read.lkey, read.bytes), (1000, 5, 7, 8));
    let connection = ConnectionId(2);
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: read.token, result: Ok(()) });
    let outputs = backend.outputs();
    let [Output::Execute { gpu: 0, job }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!((job.runs[0].input_offset, job.exec_at), (read.local_offset, NOW));
    let (started_at, finished_at) = (NOW, NOW + Span(9));
    backend.0.handle_executed(finished_at, 0, Execution::Done { started_at, finished_at, outputs: Outputs::default() });
    let outputs = backend.outputs();
    let [Output::Write { transfer, header, .. }, Output::Send { .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(transfer.rkey, 5);
    assert_eq!(
        (transfer.remote_address, transfer.local_offset + ANSWER_HEADER_BYTES),
        (1064, job.runs[0].output_offset)
    );
    assert_eq!((header.task, header.batch_size, backend.0.plans()), (TaskId::new(FRONTEND, 1).0, 1, 1));
    backend.0.handle_event(NOW, Event::WriteDone { connection, token: transfer.token, result: Ok(()) });
    assert_eq!(backend.0.plans(), 0);
    let reports = backend.late_reports(NOW);
    let [(_, Addressed::ModelThread(BackendToModelThread::Answered { undelivered, .. }))] = &reports[..] else {
        panic!("{reports:?}")
    };
    assert!(undelivered.is_empty(), "{undelivered:?}");
}

#[test]
fn that_a_batch_is_answered_goes_with_the_next_report() {
    let mut backend = executing();
    let answer = |backend: &mut Backend| {
        backend.0.handle_executed(NOW, 0, Execution::WindowMissed { rejected_at: NOW });
        let outputs = backend.outputs();
        let [Output::Write { connection, transfer, .. }, Output::Send { frame, .. }] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        backend
            .0
            .handle_event(NOW, Event::WriteDone { connection: *connection, token: transfer.token, result: Ok(()) });
        read_frame::<BackendToScheduler>(frame).map(Result::unwrap).collect::<Vec<_>>()
    };
    let done = answer(&mut backend);
    assert!(matches!(done[..], [Addressed::ModelThread(BackendToModelThread::PlanDone { .. })]), "{done:?}");
    assert_eq!(backend.outputs().len(), 0);
    backend.tell(SCHEDULER, &plan(0, 9));
    let reports: Vec<_> = backend.reports().into_iter().map(|(_, report)| report).collect();
    let [answered, refused @ ..] = &reports[..] else { panic!("{reports:?}") };
    assert!(matches!(answered, Addressed::ModelThread(BackendToModelThread::Answered { .. })), "{answered:?}");
    assert!(matches!(refused[0], Addressed::ModelThread(BackendToModelThread::PlanDone { .. })), "{refused:?}");
    backend.0.handle_timeout(NOW + ANSWERED_WAITS);
    let again = backend.reports();
    assert!(!again.iter().any(|(_, said)| matches!(said, Addressed::ModelThread(_))), "{again:?}");
}

#[cfg(feature = "cuda")]
#[test]
fn inputs_land_in_the_memory_of_a_gpu_that_takes_them_and_guards_where_they_can_be_looked_at() {
    let (gpus, _fakes) = crate::executor::gpus::tests::on_gpus();
    let mut backend = Backend::linked_with(Loaded { executor: Arc::new(gpus), ..loaded("m", 8) });
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { transfer: read, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    assert_eq!((read.remote_address, read.lkey, read.local_offset), (1000, 9, 0));
    let connection = ConnectionId(2);
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: read.token, result: Ok(()) });
    let outputs = backend.outputs();
    let [Output::Execute { job, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(job.runs[0].input_offset, 0);
    // Another buffer's place is behind; what may be late is looked at in staging memory before.
    let SchedulerToBackend::Plan(mut second) = plan(0, 0) else { unreachable!() };
    second.plan = PlanId::new(ModelThreadId(0), 2);
    second.tasks[0].task = TaskId::new(FRONTEND, 2);
    second.tasks[0].slot = SlotDescriptor { slot: 1, ..second.tasks[0].slot }.guarded();
    backend.tell(SCHEDULER, &SchedulerToBackend::Plan(second));
    let [Output::ReadGuards { transfer: guard, .. }] = backend.outputs()[..] else { panic!("it has a guard") };
    assert_eq!(guard.lkey, 7);
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: guard.token, result: Ok(()) });
    let [Output::LookAtGuards { offset, .. }] = backend.outputs()[..] else { panic!("it is looked at") };
    assert_eq!(offset, guard.local_offset);
    backend.0.handle_guards(NOW, guard.token, &[proto::slot::guard_word(TaskId::new(FRONTEND, 2))]);
    let [Output::Read { transfer: read, .. }] = backend.outputs()[..] else { panic!("the input is there") };
    assert_eq!(read.lkey, 9);
    assert!(read.local_offset > 0 && read.local_offset < guard.local_offset);
}

#[test]
fn what_cannot_be_posted_is_reported_with_its_link() {
    let mut backend = Backend::linked();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.0.handle_read_failed(NOW, transfer.token);
    let reports = backend.reports();
    let [(_, Addressed::ModelThread(BackendToModelThread::PlanDone { outcome, undelivered, .. })), _] = &reports[..]
    else {
        panic!("{reports:?}")
    };
    assert!(matches!(outcome, PlanOutcome::WindowMissed { .. }));
    assert_eq!(undelivered[0].link, LinkId(1));

    let mut backend = Backend::linked();
    backend.0.handle_send_failed(NOW, SCHEDULER, "the send queue to this peer is full");
    assert!(backend.0.ended().unwrap().ends_with("the send queue to this peer is full"));
}

#[test]
fn a_link_that_breaks_is_reported_and_its_transfers_with_it() {
    let mut backend = Backend::linked();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    let (connection, result) = (ConnectionId(2), Err(TransferError::Flushed));
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result });
    backend.0.handle_event(NOW, Event::Disconnected { connection, reason: DisconnectReason::new("dead") });
    let reports = backend.reports();
    assert_eq!(reports.len(), 3, "{reports:?}");
    assert_eq!(reports[2].1, Addressed::Control(BackendToControl::Unlinked { frontend: FRONTEND }));
    let at = backend.0.poll_timeout().max(NOW + Span::from_millis(20));
    backend.0.handle_timeout(at);
    let again = |output: &Output| matches!(output, Output::Connect { peer: Peer::Frontend(FRONTEND), .. });
    assert!(backend.outputs().iter().any(again), "it is opened again without another clock");
}

#[test]
fn a_frontend_that_speaks_on_a_link_is_cut_off() {
    let mut backend = Backend::linked();
    let connection = ConnectionId(2);
    for event in
        [Event::Message { connection, frame: vec![1] }, Event::Immediate { connection, immediate: 0, bytes: 0 }]
    {
        backend.0.handle_event(NOW, event);
        assert!(matches!(backend.outputs()[..], [Output::Disconnect { connection: ConnectionId(2) }]));
    }
}

#[test]
fn loads_are_answered_and_a_batch_keeps_the_shape_that_it_came_with() {
    let mut backend = Backend::linked();
    let mut outcome = |load, result| {
        backend.tell(
            SCHEDULER,
            &SchedulerToBackend::Load { load: LoadId(load), name: "n".into(), brought: None, is_placed: false },
        );
        let outputs = backend.outputs();
        let [Output::Load { load: ours, name, brought: None, is_placed: false }] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        assert_eq!(name, "n");
        match result {
            None => backend.0.handle_ensemble(NOW, *ours),
            Some(result) => backend.0.handle_loaded(NOW, *ours, result),
        }
        let reports = backend.reports();
        let [(_, Addressed::Control(BackendToControl::Loaded { load: found, outcome }))] = &reports[..] else {
            panic!("one answer")
        };
        assert_eq!(*found, LoadId(load));
        outcome.clone()
    };
    assert_eq!(outcome(1, Some(Ok(vec![]))), LoadOutcome::NotPlaced);
    assert_eq!(outcome(1, None), LoadOutcome::Ensemble);
    assert_eq!(outcome(1, Some(Err("torn".into()))), LoadOutcome::Failed("torn".into()));
    let LoadOutcome::Failed(reason) = outcome(1, Some(Ok(vec![loaded("n", 4096)]))) else { panic!("it does not fit") };
    assert!(reason.starts_with("a task of n has inputs of 4096") && reason.contains("raise staging_bytes"), "{reason}");
    // Staging has room for four tasks of eight bytes, and is as large as a cache line: that is two of these.
    let LoadOutcome::Ready { offer, .. } = outcome(1, Some(Ok(vec![loaded("n", 32)]))) else { panic!("two fit") };
    assert_eq!((loaded("n", 32).profile.max_batch(), offer.profile.max_batch()), (4, 2));
    assert_eq!(
        outcome(1, Some(Ok(vec![loaded("n", 4)]))),
        LoadOutcome::Ready { offer: loaded("n", 4).offer(), is_last: true }
    );
    backend.tell(SCHEDULER, &plan(0, 0));
    backend.tell(SCHEDULER, &SchedulerToBackend::Host { load: LoadId(1), version: "1".into(), model: ModelId(5) });
    // The batch that came before is of eight bytes a task, and the next one of four.
    assert_eq!((backend.0.ended(), backend.0.hosting.models.len()), (None, 2));
    let shapes: Vec<usize> = backend.0.hosting.models.values().map(|loaded| loaded.shape.input_bytes).collect();
    assert_eq!(shapes, [8, 4]);
    for output in backend.outputs() {
        let Output::Send { frame, .. } = output else { continue };
        let mut said = read_frame::<BackendToScheduler>(&frame);
        assert!(
            !said.any(|said| matches!(said, Ok(Addressed::Control(BackendToControl::Unloaded { .. })))),
            "nobody wants it to go"
        );
    }
}

/// Has a plan whose batch executes.
fn executing() -> Backend {
    let mut backend = Backend::linked();
    backend.tell(SCHEDULER, &plan(0, 0));
    let [Output::Read { connection, transfer, .. }] = backend.outputs()[..] else { panic!("a plan is read") };
    backend.0.handle_event(NOW, Event::ReadDone { connection, token: transfer.token, result: Ok(()) });
    assert!(matches!(backend.outputs()[..], [Output::Execute { .. }]));
    backend
}

#[test]
fn a_batch_that_hangs_is_given_up_and_its_gpu_is_tried_again_later() {
    let mut backend = executing();
    // l(1) = 2 ms, so a second after its window.
    let gives_up_at = NOW + Span::from_millis(5 + 1_000);
    backend.0.handle_timeout(gives_up_at - Span(1));
    backend.outputs();
    backend.0.handle_timeout(gives_up_at);
    let (reports, others) = backend.reports_and_others();
    assert!(matches!(others[..], [Output::Interrupt { gpu: 0 }]), "{others:?}");
    let [usable, (_, Addressed::ModelThread(BackendToModelThread::PlanDone { outcome, undelivered, .. }))] =
        &reports[..]
    else {
        panic!("{reports:?}")
    };
    assert_eq!(usable.1, Addressed::Control(BackendToControl::Usable { gpu_index: 0, is_usable: false }));
    assert_eq!(*outcome, PlanOutcome::Abandoned { abandoned_at: gives_up_at });
    assert_eq!(undelivered[..], [Undelivered { task: TaskId::new(FRONTEND, 1), link: LinkId::NONE }]);

    let back_at = gives_up_at + Span::from_millis(9_000);
    backend.0.handle_executed(
        back_at,
        0,
        Execution::Done { started_at: NOW, finished_at: back_at, outputs: Outputs::default() },
    );
    let reports = backend.late_reports(back_at);
    let [(_, Addressed::ModelThread(BackendToModelThread::Answered { undelivered, .. }))] = &reports[..] else {
        panic!("{reports:?}")
    };
    assert!(undelivered.is_empty(), "{undelivered:?}");
    assert_eq!(backend.0.plans(), 0);
    backend.0.handle_timeout(back_at + Span::from_millis(1_000));
    let is_usable = Addressed::Control(BackendToControl::Usable { gpu_index: 0, is_usable: true });
    assert!(backend.reports().contains(&(SCHEDULER, is_usable)));
}

#[test]
fn a_gpu_rests_without_its_programs_only_if_it_hosts_nothing_else() {
    for others in [0, 1] {
        let mut backend = executing();
        for other in 0..others {
            backend.tell(
                SCHEDULER,
                &SchedulerToBackend::Load { load: LoadId(other), name: "n".into(), brought: None, is_placed: false },
            );
            let outputs = backend.outputs();
            let [Output::Load { load, .. }] = &outputs[..] else { panic!("{outputs:?}") };
            backend.0.handle_loaded(NOW, *load, Ok(vec![loaded("n", 4)]));
            backend.tell(
                SCHEDULER,
                &SchedulerToBackend::Host { load: LoadId(other), version: "1".into(), model: ModelId(5) },
            );
        }
        backend.outputs();
        let lost = Execution::Lost { started_at: NOW, finished_at: NOW, reason: "it ended".into() };
        backend.0.handle_executed(NOW, 0, lost);
        let (reports, _) = backend.reports_and_others();
        let is_unusable = Addressed::Control(BackendToControl::Usable { gpu_index: 0, is_usable: false });
        assert_eq!(reports.iter().any(|(_, report)| *report == is_unusable), others == 0, "{reports:?}");
        backend.0.handle_timeout(NOW + Span::from_millis(1_000));
        let is_usable = Addressed::Control(BackendToControl::Usable { gpu_index: 0, is_usable: true });
        assert_eq!(backend.reports().iter().any(|(_, report)| *report == is_usable), others == 0);
    }
}

#[test]
fn schedulers_are_told_what_could_not_be_loaded_until_it_is() {
    let mut backend = Backend::new();
    let refused = ["n", "o"].map(|name| Refused {
        name: name.to_owned(),
        version: "1".to_owned(),
        reason: "it is torn".to_owned(),
    });
    backend.0.handle_not_loaded(refused.into());
    let mut backend = backend.welcomed_by(&[]);
    let not_loaded = |name: &str| {
        let (name, version, reason) = (name.to_owned(), "1".to_owned(), "it is torn".to_owned());
        (SCHEDULER, Addressed::Control(BackendToControl::NotLoaded { name, version, reason }))
    };
    assert_eq!(backend.reports(), [not_loaded("n"), not_loaded("o"), (SCHEDULER, obeys(1))]);
    backend.tell(
        SCHEDULER,
        &SchedulerToBackend::Load { load: LoadId(7), name: "n".into(), brought: None, is_placed: false },
    );
    let outputs = backend.outputs();
    let [Output::Load { load, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    backend.0.handle_loaded(NOW, *load, Ok(vec![loaded("n", 4)]));
    let left: Vec<&str> = backend.0.not_loaded.iter().map(|refused| &refused.name[..]).collect();
    assert_eq!(left, ["o"]);
}

/// Clients may ask for models that are none as often as they like: 20,000 of them wrote 17 MB in 4 s.
#[test]
fn loads_that_fail_are_one_line_a_second() {
    let mut backend = Backend::linked();
    let mut fail = |now, reason: &str| {
        backend.tell(
            SCHEDULER,
            &SchedulerToBackend::Load { load: LoadId(7), name: "n".into(), brought: None, is_placed: false },
        );
        let outputs = backend.outputs();
        let [Output::Load { load, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        backend.0.handle_loaded(now, *load, Err(reason.to_owned()));
        assert_eq!(backend.reports().len(), 1, "whoever asked is told each time");
        backend.0.told.not_loaded.poll_timeout()
    };
    assert_eq!(fail(NOW, "it is told"), None);
    let next = NOW + Span::from_millis(1_000);
    for _ in 0..100 {
        assert_eq!(fail(NOW, "it is not"), Some(next));
    }
    assert_eq!(fail(next, "and then they are"), None);
}

#[test]
fn one_that_leaves_finishes_what_it_has_and_what_still_comes() {
    let mut backend = executing();
    backend.0.handle_leaving(NOW, WITHIN);
    backend.0.handle_leaving(NOW, WITHIN);
    assert_eq!(backend.reports(), [(SCHEDULER, Addressed::Control(BackendToControl::Leaving { within: WITHIN }))]);
    assert!(!backend.0.has_left());
    backend.tell(SCHEDULER, &SchedulerToBackend::Dismissed);
    assert!(!backend.0.has_left(), "a batch executes");
    backend.0.handle_executed(NOW, 0, Execution::WindowMissed { rejected_at: NOW });
    let outputs = backend.outputs();
    let [Output::Write { connection, transfer, .. }, _] = outputs[..] else { panic!("{outputs:?}") };
    backend.0.handle_event(NOW, Event::WriteDone { connection, token: transfer.token, result: Ok(()) });
    assert!(backend.0.has_left());
    assert_eq!(backend.late_reports(NOW).len(), 1);
    assert!(Backend::new().0.has_left(), "there is nobody to leave");
}

mod failover;
mod handover;
mod hostile;
mod lengths;
mod measuring;
mod trials;
mod weights;
