//! Several schedulers, one of which takes over from another: single rules, with schedulers that do nothing by
//! themselves.

use member::{MISSED_AFTER, ORPHAN_MAX};

use super::*;

pub(super) const NAME: FrontendId = FrontendId(7);

/// A claim of the common era.
pub(super) fn claim(number: u32, scheduler: u16) -> Claim {
    Claim { era: Era(1), epoch: Epoch { number, scheduler } }
}

pub(super) const STANDBY: Claim = Claim { era: Era(1), epoch: Epoch::NONE };

/// What the frontend did, in its order.
#[derive(Debug, PartialEq)]
pub(super) enum Done {
    Cut(ConnectionId),
    Said(ConnectionId, FrontendToScheduler),
}

/// A frontend whose test is all others.
pub(super) struct Bench {
    pub(super) core: Core,
    pub(super) arena: PlainArena,
    pub(super) now: Timestamp,
    next_connection: u64,
    /// By scheduler: its connection, and the hello that it came with.
    pub(super) dialled: Vec<Option<(ConnectionId, proto::frontend_to_scheduler::FrontendHello)>>,
    /// By scheduler: the connections to its ModelThreads.
    pub(super) lines: Vec<Vec<ConnectionId>>,
    pub(super) done: Vec<Done>,
    pub(super) refused: Vec<String>,
    pub(super) replies: Vec<(RequestId, Result<Reply, InferError>)>,
    pub(super) read: Vec<String>,
    pub(super) changed: Vec<Result<(), InferError>>,
    /// Links that are reported down only later.
    pub(super) holds: BTreeSet<ConnectionId>,
}

impl Bench {
    pub(super) fn new(schedulers: usize) -> Self {
        let mut bench = Self {
            core: core(schedulers, 5),
            arena: PlainArena::new(ARENA),
            now: Timestamp(1_000_000_000),
            next_connection: 0,
            dialled: vec![None; schedulers],
            lines: vec![Vec::new(); schedulers],
            done: Vec::new(),
            refused: Vec::new(),
            replies: Vec::new(),
            read: Vec::new(),
            changed: Vec::new(),
            holds: BTreeSet::new(),
        };
        bench.pass(Span::ZERO);
        bench
    }

    /// Two schedulers: the first is obeyed in epoch 1.0, the other is warm and calls model 0 model 9, of its thread 1.
    /// Backend 1 has a link.
    pub(super) fn warm() -> (Self, ConnectionId) {
        let mut bench = Self::new(2);
        bench.welcome(0, STANDBY.era, Epoch { number: 1, scheduler: 0 }, 0);
        bench.clock(0, OFFSET);
        bench.offer(0, ModelId(0), 0, 0);
        bench.welcome(1, STANDBY.era, Epoch::NONE, 2);
        bench.clock(1, OFFSET);
        bench.offer(1, ModelId(9), 1, 0);
        let link = bench.link(1, 1, claim(1, 0).epoch);
        bench.done.clear();
        (bench, link)
    }

    pub(super) fn connection(&mut self) -> ConnectionId {
        self.next_connection += 1;
        ConnectionId(self.next_connection)
    }

    pub(super) fn pass(&mut self, span: Span) {
        self.now += span;
        self.core.handle_timeout(self.now);
        self.outputs();
    }

    pub(super) fn event(&mut self, event: Event) {
        self.core.handle_event(self.now, event, &self.arena);
        self.outputs();
    }

    fn outputs(&mut self) {
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Connect { to, hello } => {
                    let connection = self.connection();
                    self.core.handle_connecting(to, connection);
                    match (to, wincode::deserialize(&hello).unwrap()) {
                        (Destination::Scheduler(index), SchedulerHello::Frontend(hello)) => {
                            self.dialled[index] = Some((connection, hello));
                            self.lines[index].clear();
                        }
                        (Destination::ModelThread { scheduler, .. }, SchedulerHello::Member(_)) => {
                            self.lines[scheduler].push(connection);
                        }
                        (to, hello) => panic!("{hello:?} to {to:?}"),
                    }
                }
                Output::Accept { .. } => {}
                Output::Refuse { reason, .. } => self.refused.push(reason),
                Output::Disconnect { connection } => {
                    self.done.push(Done::Cut(connection));
                    if !self.holds.contains(&connection) {
                        let reason = DisconnectReason::new("told to");
                        let event = Event::Disconnected { connection, reason };
                        self.core.handle_event(self.now, event, &self.arena);
                    }
                }
                Output::Send { connection, frame } => {
                    self.done.extend(read_frame(&frame).map(|message| Done::Said(connection, message.unwrap())));
                }
                Output::Reply { request, result } => self.replies.push((request, result)),
                Output::ReadModel { name, brought: _ } => self.read.push(name),
                Output::ModelChanged { result, .. } => self.changed.push(result),
            }
        }
    }

    pub(super) fn control(&self, scheduler: usize) -> ConnectionId {
        self.dialled[scheduler].as_ref().expect("it was dialled").0
    }

    /// Welcomes by the common name, and lets all ModelThreads come up.
    pub(super) fn welcome(&mut self, scheduler: usize, era: Era, epoch: Epoch, threads: u16) {
        self.welcome_as(scheduler, NAME, Claim { era, epoch }, threads);
        for connection in self.lines[scheduler].clone() {
            self.event(Event::Connected { connection, welcome: Vec::new() });
        }
        self.pass(Span::ZERO);
    }

    fn welcome_as(&mut self, scheduler: usize, frontend: FrontendId, claim: Claim, threads: u16) {
        let addresses = (0..threads).map(|id| thread_address(id).to_string()).collect();
        let model_threads = ModelThreads { addresses, pass: PASS };
        let welcome = encode(&FrontendWelcome { frontend, model_threads, claim });
        self.event(Event::Connected { connection: self.control(scheduler), welcome });
    }

    pub(super) fn tell(&mut self, scheduler: usize, message: &SchedulerToFrontend) {
        self.event(Event::Message { connection: self.control(scheduler), frame: encode(message) });
    }

    pub(super) fn clock(&mut self, scheduler: usize, offset: Span) {
        let at = self.now + offset;
        let reply = ClockReply { sent_at: self.now, received_at: at, replied_at: at };
        self.tell(scheduler, &SchedulerToFrontend::Clock(reply));
    }

    pub(super) fn offer(&mut self, scheduler: usize, model: ModelId, thread: u16, number: usize) {
        self.tell(
            scheduler,
            &SchedulerToFrontend::Model {
                model_thread: ModelThreadId(thread),
                model,
                name: format!("m{number}"),
                version: "1".to_owned(),
                gpus: 1,
                least_latency: Span::from_millis(5),
                batching: Span(1),
                network: NetworkTimes::default(),
            },
        );
    }

    fn state(&mut self, scheduler: usize, number: usize, state: ModelState, loads: u32) {
        self.tell(
            scheduler,
            &SchedulerToFrontend::ModelState { name: format!("m{number}"), state, loads, brought: None },
        );
    }

    pub(super) fn take_over(&mut self, scheduler: usize, epoch: Epoch) {
        self.tell(scheduler, &SchedulerToFrontend::Takeover { epoch });
    }

    pub(super) fn down(&mut self, connection: ConnectionId) {
        let reason = DisconnectReason::new("it died");
        self.event(Event::Disconnected { connection, reason });
    }

    pub(super) fn lose(&mut self, scheduler: usize) {
        self.down(self.control(scheduler));
    }

    pub(super) fn link(&mut self, backend: u32, link: u32, epoch: Epoch) -> ConnectionId {
        let (connection, peer) = (self.connection(), "127.0.0.1:1".parse().unwrap());
        let frontend = self.core.frontend().unwrap_or(NAME);
        let (backend, link) = (BackendId(backend), LinkId(link));
        let pass = LinkPass::of(self.core.token(), backend);
        let hello = encode(&LinkHello { backend, frontend, link, epoch, pass });
        self.event(Event::Incoming { connection, peer, hello });
        connection
    }

    pub(super) fn request(&mut self, comes_later: bool) -> Result<RequestId, InferError> {
        let inputs = if comes_later { vec![] } else { vec![vec![3; INPUT].into()] };
        let slo = Span::from_millis(30);
        let request = CheckedRequest {
            model: 0,
            rows: 1,
            inputs,
            slo,
            waited: Span::ZERO,
            priority: 1,
            application: proto::Application::NONE,
            client: None,
        };
        let admitted = self.core.handle_request(self.now, &request, &self.arena);
        self.outputs();
        admitted
    }

    pub(super) fn cancel(&mut self, request: RequestId) {
        self.core.handle_cancel(request);
        self.outputs();
    }

    pub(super) fn inputs(&mut self, request: RequestId) {
        self.core.handle_inputs(self.now, request, &[vec![3; INPUT].into()], &self.arena);
        self.outputs();
    }

    /// A backend answers one task.
    pub(super) fn answer(&mut self, link: ConnectionId, task: TaskId, attempt: u16, slot: SlotDescriptor) {
        let header = AnswerHeader {
            task: task.0,
            status: AnswerStatus::Done,
            payload_bytes: 18,
            attempt,
            batch_size: 1,
            gpu: 0,
            tasks: 1,
            stamps: AnswerStamps::default(),
        };
        self.arena.write(slot.answer_offset as usize, header.as_bytes());
        let immediate = ImmediateData { slot: slot.number(), attempt }.pack();
        let bytes = size_of::<AnswerHeader>() as u32 + 18;
        self.event(Event::Immediate { connection: link, immediate, bytes });
    }

    /// What was said over a connection since the last look.
    pub(super) fn said(&mut self, connection: ConnectionId) -> Vec<FrontendToScheduler> {
        let said = self.done.extract_if(.., |done| matches!(done, Done::Said(over, _) if *over == connection));
        let message = |done| if let Done::Said(_, message) = done { Some(message) } else { None };
        said.filter_map(message)
            .filter(|said| !matches!(said, Addressed::Control(FrontendToControl::ClockRequest { .. })))
            .collect()
    }

    /// The tasks that were submitted over a connection.
    fn submitted(&mut self, connection: ConnectionId) -> Vec<(TaskId, SlotDescriptor)> {
        let task = |said| match said {
            Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, .. }) => (task, slot),
            other => panic!("found {other:?}, expected a submission"),
        };
        self.said(connection).into_iter().map(task).collect()
    }

    /// The tasks that were submitted to a scheduler since it was obeyed, over whatever connection.
    fn submitted_to(&mut self, scheduler: usize) -> Vec<(TaskId, SlotDescriptor)> {
        let connections = [vec![self.control(scheduler)], self.lines[scheduler].clone()].concat();
        let said = connections.into_iter().flat_map(|connection| self.said(connection)).collect::<Vec<_>>();
        let task = |said| match said {
            Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, .. }) => Some((task, slot)),
            _ => None,
        };
        said.into_iter().filter_map(task).collect()
    }

    fn lost(&self) -> usize {
        self.replies.iter().filter(|(_, result)| *result == Err(InferError::SchedulerLost)).count()
    }
}

#[test]
fn one_scheduler_gives_it_a_name_and_all_others_are_told() {
    let mut bench = Bench::new(3);
    let dialled = |bench: &Bench| bench.dialled.iter().map(Option::is_some).collect::<Vec<_>>();
    assert_eq!(dialled(&bench), [true, false, false], "two would give two names");
    bench.lose(0);
    assert_eq!(dialled(&bench), [true, false, false]);
    bench.pass(Span::ZERO);
    assert_eq!(dialled(&bench), [true, true, false], "the next one is tried at once");
    let former = bench.control(0);
    bench.pass(Span::from_millis(500));
    assert_eq!(bench.control(0), former, "as long as it may still give a name");
    bench.welcome(1, STANDBY.era, Epoch::NONE, 0);
    assert!(!bench.core.has_scheduler() && bench.core.poll_timeout().is_some());
    bench.pass(Span::ZERO);
    let hellos: Vec<_> = bench.dialled.iter().flatten().map(|(_, hello)| hello.clone()).collect();
    assert_eq!(hellos.iter().map(|hello| hello.known_as).collect::<Vec<_>>(), [Some(NAME), None, Some(NAME)]);
    assert!(
        hellos.iter().all(|hello| hello.standing == hellos[1].standing && hello.standing.obeys == Claim::default())
    );
    bench.done.clear();
    let other = bench.control(2);
    bench.welcome_as(2, FrontendId(8), STANDBY, 0);
    assert_eq!(bench.done, [Done::Cut(other)], "it must not be named twice");
    bench.welcome(0, STANDBY.era, claim(3, 0).epoch, 0);
    assert_eq!(bench.core.obeys(), claim(3, 0));
    bench.pass(RETRY_FIRST);
    assert_eq!(bench.dialled[2].as_ref().unwrap().1.standing.obeys, claim(3, 0), "which may make it step down");
}

#[test]
fn without_a_primary_another_scheduler_is_asked_for_a_name() {
    let mut bench = Bench::new(2);
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    let early = bench.link(1, 1, claim(1, 0).epoch);
    assert!(bench.refused.is_empty(), "it waits for the primary");
    let token = bench.dialled[0].as_ref().unwrap().1.standing.token;
    bench.dialled[1] = None;
    bench.pass(ORPHAN_MAX);
    assert_eq!(bench.refused, ["this frontend has no scheduler now"], "{early:?}");
    bench.pass(RETRY_FIRST);
    let (_, hello) = bench.dialled[1].as_ref().expect("it is asked next");
    assert!(hello.known_as.is_none() && hello.standing.token != token);
}

#[test]
fn links_that_come_before_the_primary_wait_for_it() {
    let mut bench = Bench::new(2);
    bench.link(1, 1, claim(1, 0).epoch);
    bench.link(2, 1, claim(2, 1).epoch);
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    assert_eq!((bench.core.backends_linked(), bench.refused.len()), (0, 0));
    bench.take_over(0, claim(1, 0).epoch);
    assert_eq!(bench.core.backends_linked(), 1);
    assert_eq!(bench.refused, ["obeys epoch 2.1, expected 1.0"]);
}

#[test]
fn a_takeover_cuts_off_the_former_primary_and_then_names_all_open_tasks() {
    let (mut bench, link) = Bench::warm();
    let former = bench.control(0);
    let queued = bench.request(false).unwrap();
    let running = bench.request(false).unwrap();
    let cancelled = bench.request(false).unwrap();
    let guarded = bench.request(true).unwrap();
    let waits = bench.request(true).unwrap();
    let again = bench.request(true).unwrap();
    let answered = bench.request(false).unwrap();
    let tasks = bench.submitted(former);
    bench.cancel(cancelled);
    for late in [4, 5] {
        bench.tell(0, &SchedulerToFrontend::Dropped { task: tasks[late].0, reason: DropReason::InputLate });
    }
    bench.inputs(again);
    bench.answer(link, tasks[6].0, 0, tasks[6].1);
    assert_eq!(bench.replies.len(), 1);
    let fence = SchedulerToFrontend::Fence { backend: BackendId(9), link: LinkId::ALL, tasks: vec![tasks[1].0] };
    bench.tell(0, &fence);
    bench.said(former);
    bench.done.clear();

    bench.take_over(1, claim(2, 1).epoch);
    assert_eq!(bench.done.remove(0), Done::Cut(former), "before anything is said");
    let (control, lines) = (bench.control(1), bench.lines[1].clone());
    let (epoch, links) =
        (claim(2, 1).epoch, Addressed::Control(FrontendToControl::Link { backend: BackendId(1), link: LinkId(1) }));
    assert_eq!(bench.said(control), [links, Addressed::Control(FrontendToControl::Obeys { epoch })]);
    assert_eq!(bench.said(lines[0]), [Addressed::ModelThread(FrontendToModelThread::AllOpen)]);
    let said = bench.said(lines[1]);
    let mut opened: BTreeMap<TaskId, (u16, SlotDescriptor)> = BTreeMap::new();
    for message in &said[..5] {
        let Addressed::ModelThread(FrontendToModelThread::Open {
            task, model, deadline, priority, attempt, slot, ..
        }) = *message
        else {
            panic!("{said:?}")
        };
        assert_eq!((model, priority, deadline), (ModelId(9), 1, bench.now + OFFSET + Span::from_millis(30)));
        opened.insert(task, (attempt, slot));
    }
    let second = TaskId(tasks[5].0.0 + 1);
    let names = [tasks[0].0, tasks[1].0, tasks[2].0, tasks[3].0, second];
    assert_eq!(opened.keys().copied().collect::<Vec<_>>(), names, "who waits for its input is not submitted");
    assert_eq!(opened.values().map(|(attempt, _)| *attempt).collect::<Vec<_>>(), [0, 1, 0, 0, 0]);
    assert_eq!(
        opened.values().map(|(_, slot)| slot.is_guarded()).collect::<Vec<_>>(),
        [false, false, false, true, false]
    );
    let cancel = Addressed::ModelThread(FrontendToModelThread::Cancel { task: tasks[2].0, model: ModelId(9) });
    assert_eq!(said[5..], [cancel, Addressed::ModelThread(FrontendToModelThread::AllOpen)]);

    // What still comes over the former primary's connection counts for nothing.
    let frame = encode(&SchedulerToFrontend::Dropped { task: tasks[0].0, reason: DropReason::Deadline });
    bench.event(Event::Message { connection: former, frame });
    assert_eq!(bench.replies.len(), 1);
    // Everyone ends once.
    bench.inputs(guarded);
    bench.inputs(waits);
    let [Addressed::ModelThread(FrontendToModelThread::Submit { task, model: ModelId(9), slot, .. })] =
        bench.said(lines[1])[..]
    else {
        panic!()
    };
    opened.insert(task, (0, slot));
    bench.tell(1, &SchedulerToFrontend::Dropped { task: tasks[2].0, reason: DropReason::Cancelled });
    opened.remove(&tasks[2].0);
    for (task, (attempt, slot)) in opened {
        bench.answer(link, task, attempt, slot);
    }
    let ended: BTreeSet<RequestId> = bench.replies.iter().map(|(request, _)| *request).collect();
    assert_eq!(ended, BTreeSet::from([queued, running, guarded, waits, again, answered]));
    assert!(bench.replies.len() == 6 && bench.replies.iter().all(|(_, result)| result.is_ok()));
    assert_eq!((bench.core.outstanding(), bench.core.has_scheduler()), (0, true));
}

/// Regression: a frontend left the primary that claimed less than it was obeyed in, and all its requests ended.
#[test]
fn a_lower_epoch_is_counted_and_changes_nothing_whoever_claims_it() {
    let (mut bench, link) = Bench::warm();
    bench.take_over(1, claim(3, 1).epoch);
    let request = bench.request(false).unwrap();
    let tasks = bench.submitted_to(1);
    bench.done.clear();
    for (count, lower) in [Epoch::NONE, claim(1, 0).epoch, claim(3, 0).epoch].into_iter().enumerate() {
        bench.take_over(1, lower);
        assert_eq!((bench.done.len(), bench.core.obeys()), (0, claim(3, 1)), "the primary claims {lower}");
        assert_eq!(bench.core.takeovers().lower_epochs, count as u64 + 1);
    }
    // The former primary has heard of no other one.
    bench.pass(RETRY_FIRST);
    bench.welcome(0, STANDBY.era, claim(1, 0).epoch, 0);
    assert_eq!((bench.core.primary(), bench.core.takeovers().lower_epochs), (Some(1), 4));
    bench.take_over(0, claim(2, 0).epoch);
    assert_eq!((bench.core.obeys(), bench.core.takeovers().lower_epochs), (claim(3, 1), 5));
    // To say the same again is no lower claim, and neither is that of a standby that takes us in.
    bench.take_over(1, claim(3, 1).epoch);
    bench.lose(0);
    bench.pass(Span::from_millis(500));
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    let takeovers = bench.core.takeovers();
    assert_eq!((takeovers.count, takeovers.lives, takeovers.lower_epochs), (1, 0, 5));
    bench.answer(link, tasks[0].0, 0, tasks[0].1);
    assert_eq!(bench.replies.iter().map(|(id, result)| (*id, result.is_ok())).collect::<Vec<_>>(), [(request, true)]);
}

#[test]
fn an_orphan_goes_on_admitting_and_the_next_primary_is_told() {
    let (mut bench, link) = Bench::warm();
    let before = bench.request(false).unwrap();
    bench.lose(0);
    bench.done.clear();
    assert!(!bench.core.has_scheduler() && bench.core.is_ready());
    let meanwhile = bench.request(false).unwrap();
    let cancelled = bench.request(false).unwrap();
    bench.cancel(cancelled);
    assert_eq!(bench.done, [], "there is nobody to tell");
    assert_eq!(bench.core.handle_change(bench.now, ModelChange::Load, "m0", None), Err(InferError::NoScheduler));
    // Balancers are told when nobody has taken over for a while, and again when somebody has.
    bench.pass(Span::from_millis(250));
    assert!(!bench.core.is_ready());
    // It comes back as a standby, and claims to be the primary in another epoch later.
    bench.pass(RETRY_FIRST);
    let (_, hello) = bench.dialled[0].clone().unwrap();
    assert_eq!((hello.known_as, hello.standing.obeys), (Some(NAME), claim(1, 0)));
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    bench.offer(0, ModelId(2), 0, 0);
    assert!(!bench.core.has_scheduler());
    bench.take_over(0, claim(2, 0).epoch);
    let control = bench.control(0);
    let said = bench.said(control);
    let opened: Vec<_> = said
        .iter()
        .filter_map(|said| match said {
            Addressed::ModelThread(FrontendToModelThread::Open { task, model: ModelId(2), slot, .. }) => {
                Some((*task, *slot))
            }
            _ => None,
        })
        .collect();
    assert_eq!((said.len(), opened.len()), (7, 3), "a link, whom it obeys, three tasks, a cancel, the end: {said:?}");
    assert!(!said.iter().any(|said| matches!(said, Addressed::ModelThread(FrontendToModelThread::Submit { .. }))));
    opened.iter().for_each(|&(task, slot)| bench.answer(link, task, 0, slot));
    let ended: Vec<RequestId> = bench.replies.iter().map(|(request, _)| *request).collect();
    assert_eq!((ended, bench.core.outstanding()), (vec![before, meanwhile], 0));
    bench.request(false).unwrap();
    assert_eq!((bench.submitted(control).len(), bench.core.is_ready()), (1, true), "from now on tasks are submitted");
}

#[test]
fn answers_and_links_of_an_orphan_count() {
    let (mut bench, link) = Bench::warm();
    bench.request(false).unwrap();
    let former = bench.control(0);
    let [(task, slot)] = bench.submitted(former)[..] else { panic!() };
    bench.lose(0);
    bench.answer(link, task, 0, slot);
    assert!(matches!(bench.replies[..], [(_, Ok(_))]));
    bench.link(2, 1, claim(1, 0).epoch);
    assert_eq!((bench.core.backends_linked(), bench.refused.len()), (2, 0));
    bench.link(3, 1, claim(2, 1).epoch);
    assert_eq!(bench.refused, ["obeys epoch 2.1, expected 1.0"]);
}

#[test]
fn an_orphan_starts_over_when_nobody_comes() {
    let (mut bench, link) = Bench::warm();
    let token = bench.dialled[0].as_ref().unwrap().1.standing.token;
    bench.request(false).unwrap();
    let standby = bench.control(1);
    bench.lose(0);
    bench.holds.insert(link);
    bench.pass(ORPHAN_MAX - Span(1));
    assert_eq!((bench.replies.len(), bench.core.outstanding()), (0, 1));
    bench.done.clear();
    bench.pass(Span(1));
    assert_eq!((bench.lost(), bench.core.outstanding()), (1, 1), "its slot can still be reached");
    for connection in [standby, link] {
        assert!(bench.done.contains(&Done::Cut(connection)), "{:?}", bench.done);
    }
    assert_eq!(bench.request(false), Err(InferError::NoScheduler));
    bench.dialled = vec![None; 2];
    bench.pass(Span::from_millis(5_000));
    assert!(bench.dialled.iter().all(Option::is_none), "not before the link is down");
    bench.down(link);
    assert_eq!(bench.core.outstanding(), 0);
    bench.pass(RETRY_FIRST);
    let hellos: Vec<_> = bench.dialled.iter().flatten().map(|(_, hello)| hello).collect();
    assert!(hellos.len() == 1 && hellos[0].known_as.is_none() && hellos[0].standing.obeys == Claim::default());
    assert_ne!(hellos[0].standing.token, token, "another life");
}

#[test]
fn who_comes_back_in_the_same_epoch_or_as_another_eras_primary_makes_start_over() {
    for (back, starts_over) in [
        (claim(1, 0), true),
        (Claim { era: Era(2), ..claim(9, 0) }, true),
        (Claim { era: Era(2), ..claim(1, 0) }, true),
        (STANDBY, false),
        // A standby of another era knows nothing of us; it is asked again later.
        (Claim { era: Era(2), ..STANDBY }, false),
    ] {
        let (mut bench, _) = Bench::warm();
        bench.request(false).unwrap();
        bench.lose(0);
        bench.pass(RETRY_FIRST);
        let control = bench.control(0);
        bench.done.clear();
        bench.welcome(0, back.era, back.epoch, 0);
        assert_eq!(bench.lost(), usize::from(starts_over), "{back:?}");
        assert_eq!(bench.done.contains(&Done::Cut(control)), starts_over || back.era != STANDBY.era, "{back:?}");
        assert_eq!(bench.core.frontend().is_none(), starts_over, "{back:?}");
    }
}

#[test]
fn a_claim_waits_for_all_model_threads() {
    let (mut bench, _) = Bench::warm();
    bench.lose(1);
    bench.pass(RETRY_FIRST);
    bench.welcome_as(1, NAME, STANDBY, 2);
    bench.take_over(1, claim(2, 1).epoch);
    assert_eq!(bench.core.obeys(), claim(1, 0), "its ModelThreads are not reached yet");
    for connection in bench.lines[1].clone() {
        assert_eq!(bench.core.obeys(), claim(1, 0));
        bench.event(Event::Connected { connection, welcome: Vec::new() });
    }
    assert_eq!(bench.core.obeys(), claim(2, 1));
}

#[test]
fn a_lower_claim_is_not_obeyed_and_the_primary_makes_no_other() {
    let (mut bench, _) = Bench::warm();
    bench.take_over(1, claim(2, 1).epoch);
    bench.pass(RETRY_FIRST);
    assert_eq!(bench.dialled[0].as_ref().unwrap().1.standing.obeys, claim(2, 1), "the former one hears of it");
    bench.welcome(0, STANDBY.era, claim(1, 0).epoch, 0);
    bench.take_over(0, claim(2, 0).epoch);
    assert_eq!((bench.core.obeys(), bench.core.has_scheduler()), (claim(2, 1), true));
    bench.done.clear();
    bench.take_over(1, claim(3, 1).epoch);
    assert_eq!(bench.core.obeys(), claim(2, 1));
    assert!(!bench.core.has_scheduler(), "it would have to be told everything again on the same connections");
}

#[test]
fn a_standby_is_told_whether_the_primary_is_missed() {
    let missed = |misses| Addressed::Control(FrontendToControl::Misses { misses });
    let (mut bench, _) = Bench::warm();
    let (primary, standby) = (bench.control(0), bench.control(1));
    // It answers.
    bench.tell(1, &SchedulerToFrontend::AskPrimary);
    bench.tell(1, &SchedulerToFrontend::AskPrimary);
    let asked = bench.done.iter().filter(|done| matches!(done, Done::Said(over, _) if *over == primary)).count();
    assert_eq!(asked, 1, "for its clock, once: {:?}", bench.done);
    assert_eq!(bench.said(standby), []);
    bench.clock(0, OFFSET);
    assert_eq!(bench.said(standby), [missed(false)]);
    // It is silent.
    bench.tell(1, &SchedulerToFrontend::AskPrimary);
    bench.pass(MISSED_AFTER - Span(1));
    assert_eq!(bench.said(standby), []);
    assert!(bench.core.poll_timeout().unwrap() <= bench.now + Span(1));
    bench.pass(Span(1));
    assert_eq!(bench.said(standby), [missed(true)]);
    // It is lost, before it has answered and after.
    bench.tell(1, &SchedulerToFrontend::AskPrimary);
    bench.lose(0);
    assert_eq!(bench.said(standby), [missed(true)]);
    bench.tell(1, &SchedulerToFrontend::AskPrimary);
    assert_eq!(bench.said(standby), [missed(true)]);
    // Nobody was obeyed yet.
    let mut bench = Bench::new(2);
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    bench.tell(0, &SchedulerToFrontend::AskPrimary);
    let control = bench.control(0);
    assert_eq!(bench.said(control), [missed(true)]);
}

#[test]
fn what_was_to_be_told_to_the_former_primary_is_not_told_to_the_next() {
    let (mut bench, _) = Bench::warm();
    let inputs = vec![vec![3; INPUT].into()];
    let slo = Span::from_millis(30);
    let request = CheckedRequest {
        model: 0,
        rows: 1,
        inputs,
        slo,
        waited: Span::ZERO,
        priority: 1,
        application: proto::Application::NONE,
        client: None,
    };
    // All in one turn: nothing was sent in between.
    let cancelled = bench.core.handle_request(bench.now, &request, &bench.arena).unwrap();
    bench.core.handle_request(bench.now, &request, &bench.arena).unwrap();
    bench.core.handle_cancel(cancelled);
    bench.take_over(1, claim(2, 1).epoch);
    let [other, line] = bench.lines[1][..] else { panic!() };
    assert_eq!(bench.said(other), [Addressed::ModelThread(FrontendToModelThread::AllOpen)]);
    let said = bench.said(line);
    let opened =
        said.iter().filter(|said| matches!(said, Addressed::ModelThread(FrontendToModelThread::Open { .. }))).count();
    assert_eq!((opened, said.len()), (2, 4), "and a cancel, and the end: {said:?}");
}

#[test]
fn what_a_former_primary_asked_is_not_answered_to_the_next() {
    let (mut bench, link) = Bench::warm();
    let other = bench.link(2, 1, claim(1, 0).epoch);
    bench.request(false).unwrap();
    let former = bench.control(0);
    let [(task, slot)] = bench.submitted(former)[..] else { panic!() };
    bench.holds.insert(link);
    let (backend, up_to) = (BackendId(1), LinkId(1));
    bench.tell(0, &SchedulerToFrontend::Fence { backend, link: up_to, tasks: vec![task] });
    bench.take_over(1, claim(2, 1).epoch);
    let control = bench.control(1);
    bench.said(control);
    bench.down(link);
    assert_eq!(bench.said(control), []);
    bench.link(1, 1, claim(2, 1).epoch);
    assert_eq!((bench.core.backends_linked(), bench.refused.len()), (2, 0), "the next one has fenced nobody off");
    bench.answer(other, task, 0, slot);
    assert_eq!(bench.replies.len(), 1, "on the attempt that the next one was told");
}

#[test]
fn orders_of_a_standby_count_for_nothing() {
    let (mut bench, link) = Bench::warm();
    bench.request(false).unwrap();
    let former = bench.control(0);
    let [(task, _)] = bench.submitted(former)[..] else { panic!() };
    bench.done.clear();
    bench.tell(1, &SchedulerToFrontend::Dropped { task, reason: DropReason::Deadline });
    bench.tell(1, &SchedulerToFrontend::Fence { backend: BackendId(1), link: LinkId::ALL, tasks: vec![task] });
    bench.tell(1, &SchedulerToFrontend::Leaving);
    bench.tell(
        1,
        &SchedulerToFrontend::Load(Box::new(SchedulerLoad {
            queued: 9,
            batches: 9,
            gpus: 9,
            ..SchedulerLoad::default()
        })),
    );
    assert_eq!((bench.replies.len(), bench.done.len()), (0, 0), "{:?} {link:?}", bench.done);
    assert!(bench.core.is_ready() && bench.core.scheduler_load() == SchedulerLoad::default());
    bench.lose(1);
    assert!(bench.core.has_scheduler() && bench.replies.is_empty(), "losing it costs nothing");
}

#[test]
fn models_are_what_the_next_primary_says_and_are_read_anew_only_if_loaded_since() {
    let (mut bench, _) = Bench::warm();
    let read = |bench: &mut Bench| std::mem::take(&mut bench.read);
    bench.state(0, 0, ModelState::Serving, 2);
    assert_eq!(read(&mut bench), ["m0"]);
    bench.core.handle_model_read("m0", Err("not today".to_owned()));
    bench.state(0, 1, ModelState::Unloaded, 0);
    bench.state(1, 0, ModelState::Serving, 4);
    bench.state(1, 2, ModelState::Serving, 4);
    bench.state(1, 2, ModelState::Serving, 5);
    assert_eq!(read(&mut bench), Vec::<String>::new(), "a standby's word");
    bench.core.handle_change(bench.now, ModelChange::Unload, "m2", None).unwrap();
    bench.take_over(1, claim(2, 1).epoch);
    assert_eq!(read(&mut bench), ["m2"], "it was loaded since the standby was joined");
    assert_eq!(bench.changed, [Err(InferError::SchedulerLost)]);
    assert_eq!(bench.core.models().get(1).state, ModelState::Unloaded, "nobody said anything else");
    bench.state(1, 1, ModelState::Serving, 0);
    bench.state(1, 0, ModelState::Serving, 4);
    assert_eq!((read(&mut bench), bench.core.models().get(1).state), (vec![], ModelState::Serving));
    bench.state(1, 0, ModelState::Serving, 5);
    assert_eq!(read(&mut bench), ["m0"]);
}

#[test]
fn the_first_primary_makes_read_what_was_ever_loaded() {
    let mut bench = Bench::new(2);
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    bench.state(0, 1, ModelState::Serving, 1);
    assert!(bench.read.is_empty());
    bench.take_over(0, claim(1, 0).epoch);
    assert_eq!(bench.read, ["m1"]);
}

#[test]
fn tasks_of_a_model_that_the_next_primary_does_not_know_are_named_without() {
    let (mut bench, _) = Bench::warm();
    bench.lose(1);
    bench.pass(RETRY_FIRST);
    bench.welcome(1, STANDBY.era, Epoch::NONE, 2);
    bench.request(false).unwrap();
    // It has been read since, and is another version now; the task is of the former one.
    let mut newer = model("m0", vec![tensor("x", DataType::Uint8, &[INPUT])], vec![]);
    newer.version = "2".to_owned();
    bench.core.changes.handle_loaded("m0");
    bench.core.handle_model_read("m0", Ok(vec![newer]));
    let mut other = Bench::warm().0;
    other.request(false).unwrap();
    for (mut bench, model, thread) in [(bench, ModelId(u32::MAX), 0), (other, ModelId(9), 1)] {
        bench.take_over(1, claim(2, 1).epoch);
        let line = bench.lines[1][thread];
        let said = bench.said(line);
        let Addressed::ModelThread(FrontendToModelThread::Open { model: found, .. }) = said[0] else {
            panic!("{said:?}")
        };
        assert_eq!(found, model);
    }
}

#[test]
fn the_former_primarys_clock_holds_until_the_next_ones_is_known() {
    let mut bench = Bench::new(2);
    bench.welcome(0, STANDBY.era, claim(1, 0).epoch, 0);
    bench.clock(0, OFFSET);
    bench.welcome(1, STANDBY.era, Epoch::NONE, 0);
    bench.offer(1, ModelId(0), 0, 0);
    let at = |bench: &Bench| bench.core.to_local(bench.now + OFFSET);
    assert_eq!(at(&bench), Some(bench.now));
    bench.lose(0);
    assert_eq!(at(&bench), Some(bench.now), "an orphan knows what it knew");
    bench.take_over(1, claim(2, 1).epoch);
    assert_eq!(at(&bench), Some(bench.now));
    assert!(bench.core.is_ready() && bench.request(false).is_ok());
    bench.clock(1, OFFSET + Span(700));
    assert_eq!(at(&bench), Some(bench.now - Span(700)));
}

#[test]
fn a_primary_that_is_about_to_end_is_given_nothing_until_it_has() {
    let (mut bench, _) = Bench::warm();
    bench.tell(0, &SchedulerToFrontend::Leaving);
    assert_eq!((bench.request(false), bench.core.is_ready()), (Err(InferError::NoScheduler), false));
    bench.lose(0);
    assert!(bench.core.is_ready() && bench.request(false).is_ok(), "another one takes over");
}

#[test]
fn takeovers_are_counted_with_the_time_that_there_was_no_primary() {
    let seen = |bench: &Bench| {
        let Takeovers { epoch, count, without, lives, .. } = bench.core.takeovers();
        (bench.core.primary(), bench.core.schedulers_joined(), epoch, (count, without, lives))
    };
    let mut bench = Bench::new(1);
    bench.lose(0);
    assert_eq!(seen(&bench), (None, 0, Epoch::NONE, (0, Span::ZERO, 0)), "there was no life yet");
    let (mut bench, _) = Bench::warm();
    assert_eq!(seen(&bench), (Some(0), 2, claim(1, 0).epoch, (0, Span::ZERO, 0)), "the first takes nothing over");
    bench.pass(Span::from_millis(10));
    bench.take_over(1, claim(2, 1).epoch);
    assert_eq!(seen(&bench), (Some(1), 1, claim(2, 1).epoch, (1, Span::ZERO, 0)), "the former was there until then");
    bench.pass(RETRY_FIRST);
    bench.welcome(0, STANDBY.era, Epoch::NONE, 0);
    bench.lose(1);
    assert_eq!(seen(&bench), (None, 1, claim(2, 1).epoch, (1, Span::ZERO, 0)));
    let took = Span::from_millis(7);
    bench.pass(took);
    bench.take_over(0, claim(3, 0).epoch);
    assert_eq!(seen(&bench), (Some(0), 1, claim(3, 0).epoch, (2, took, 0)));
    bench.lose(0);
    bench.pass(ORPHAN_MAX);
    assert_eq!(seen(&bench), (None, 0, claim(3, 0).epoch, (2, took, 1)), "what ended then was of that epoch");
    bench.pass(Span::from_millis(500));
    bench.welcome(1, STANDBY.era, claim(4, 1).epoch, 2);
    assert_eq!(seen(&bench), (Some(1), 1, claim(4, 1).epoch, (2, took, 1)), "in another life");
}

#[test]
fn a_drain_is_told_to_every_scheduler_and_outlives_them() {
    let (mut bench, _) = Bench::warm();
    let drained = |is_drained| Addressed::Control(FrontendToControl::Drained { is_drained });
    bench.tell(1, &SchedulerToFrontend::Drain { is_drained: true });
    assert!(!bench.core.is_drained(), "a standby's word");
    bench.tell(0, &SchedulerToFrontend::Drain { is_drained: true });
    let [first, second] = [0, 1].map(|scheduler| bench.control(scheduler));
    assert_eq!([first, second].map(|control| bench.said(control)), [[drained(true)], [drained(true)]]);
    assert!(bench.core.is_drained() && bench.core.is_ready() && bench.request(false).is_ok(), "it serves");
    bench.lose(1);
    bench.pass(Span::from_millis(3_000));
    bench.welcome(1, STANDBY.era, Epoch::NONE, 2);
    let again = bench.control(1);
    assert_eq!(bench.said(again), [drained(true)]);
    bench.tell(0, &SchedulerToFrontend::Drain { is_drained: false });
    assert!(!bench.core.is_drained());
}
