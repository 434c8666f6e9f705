//! Single rules, with a world that does nothing by itself.

use repository::Refused;

use super::*;

/// A world whose frontend has joined, without faults and clients.
fn joined() -> World {
    let mut world = World::new(0, 0);
    world.later.clear();
    world.welcome_now(Vec::new());
    world
}

impl World {
    /// A welcome that names these ModelThreads.
    fn welcome_now(&mut self, addresses: Vec<String>) {
        self.core.handle_timeout(self.now);
        let to = Destination::Scheduler(0);
        assert!(matches!(self.core.poll_output(), Some(Output::Connect { to: found, .. }) if found == to));
        let connection = self.connection();
        self.core.handle_connecting(to, connection);
        let model_threads = ModelThreads { addresses, pass: PASS };
        let welcome = encode(&FrontendWelcome { frontend: FrontendId(1), model_threads, claim: CLAIM });
        self.core.handle_event(self.now, Event::Connected { connection, welcome }, &self.arena);
        self.scheduler = Some((connection, FrontendId(1)));
    }

    /// A backend's link is offered. If it is taken, which others are cut off for it.
    fn link_now(&mut self, backend: u32, link: u32) -> (ConnectionId, Option<Vec<ConnectionId>>) {
        let (connection, peer) = (self.connection(), "127.0.0.1:1".parse().unwrap());
        let (backend, frontend, link) = (BackendId(backend), FrontendId(1), LinkId(link));
        let pass = LinkPass::of(self.core.token(), backend);
        let hello = encode(&LinkHello { backend, frontend, link, epoch: CLAIM.epoch, pass });
        self.core.handle_event(self.now, Event::Incoming { connection, peer, hello }, &self.arena);
        let (mut taken, mut cut) = (false, Vec::new());
        while let Some(output) = self.core.poll_output() {
            taken |= matches!(output, Output::Accept { .. });
            cut.extend(if let Output::Disconnect { connection } = output { Some(connection) } else { None });
        }
        (connection, taken.then_some(cut))
    }

    fn tell_now(&mut self, message: &SchedulerToFrontend) {
        let (connection, _) = self.scheduler.unwrap();
        self.core.handle_event(self.now, Event::Message { connection, frame: encode(message) }, &self.arena);
    }

    fn offer_now(&mut self, gpus: u32) {
        let (name, version) = ("m0".to_owned(), "1".to_owned());
        let least_latency = Span::from_millis(5);
        self.tell_now(&SchedulerToFrontend::Model {
            model_thread: ModelThreadId(0),
            model: ModelId(0),
            name,
            version,
            gpus,
            least_latency,
            batching: least_latency,
            network: NetworkTimes::default(),
        });
    }

    fn request_now(&mut self) -> Result<RequestId, InferError> {
        self.request_after(Span::ZERO)
    }

    fn tell_clock_now(&mut self) {
        let reply = ClockReply { sent_at: self.now, received_at: self.now, replied_at: self.now };
        self.tell_now(&SchedulerToFrontend::Clock(reply));
    }

    fn request_after(&mut self, waited: Span) -> Result<RequestId, InferError> {
        let inputs = vec![vec![0; INPUT].into()];
        let slo = Span::from_millis(30);
        let request = CheckedRequest {
            model: 0,
            rows: 1,
            inputs,
            slo,
            waited,
            priority: 0,
            application: proto::Application::NONE,
            client: None,
        };
        self.core.handle_request(self.now, &request, &self.arena)
    }

    fn frames(&mut self) -> Vec<Vec<FrontendToScheduler>> {
        let outputs: Vec<Output> = std::iter::from_fn(|| self.core.poll_output()).collect();
        let read = |output| match output {
            Output::Send { frame, .. } => read_frame(&frame).map(Result::unwrap).collect(),
            other => panic!("found {other:?}, expected a frame"),
        };
        outputs.into_iter().map(read).collect()
    }
}

#[test]
fn a_model_is_ready_once_the_clock_is_known_and_a_gpu_hosts_it() {
    let mut world = joined();
    assert_eq!(world.request_now(), Err(InferError::NoScheduler), "no clock yet");
    world.tell_clock_now();
    let no_backend = Err(InferError::NoBackend { model: "m0".to_owned() });
    assert_eq!((world.request_now(), world.core.is_ready()), (no_backend.clone(), false));
    world.offer_now(1);
    assert!(world.request_now().is_ok() && world.core.is_ready());
    world.offer_now(0);
    assert_eq!((world.request_now(), world.core.is_ready()), (no_backend, false));
}

#[test]
fn one_whose_models_were_all_unloaded_is_ready_once_it_knows_the_clock_and_a_backend_could_load_one() {
    let mut world = joined();
    let names: Vec<String> = world.core.models().iter().map(|served| served.model.name.clone()).collect();
    let unload = |world: &mut World, name: &str| {
        let (name, state) = (name.to_owned(), ModelState::Unloaded);
        world.tell_now(&SchedulerToFrontend::ModelState { name, state, loads: 0, brought: None });
    };
    let (all, one) = (["*".to_owned()], &names[..1]);
    assert!(!world.core.is_ready_with(&[]), "no clock yet");
    world.tell_clock_now();
    assert!(world.core.is_ready_with(&[]) && world.core.is_ready_with(&["another".to_owned()]));
    for name in &names {
        assert!(!world.core.is_ready_with(&all), "'{name}' is needed and nobody hosts it");
        assert_eq!(world.core.is_ready_with(one), *name != names[0]);
        assert!(!world.core.is_ready(), "'{name}' is to be served and nobody hosts it");
        unload(&mut world, name);
    }
    assert!(!world.core.is_ready(), "no backend yet");
    let backends = |gpus| SchedulerToFrontend::Load(Box::new(SchedulerLoad { gpus, ..SchedulerLoad::default() }));
    world.tell_now(&backends(1));
    assert!(world.core.is_ready() && world.core.is_ready_with(&all));
    let (name, version) = ("refused".to_owned(), String::new());
    world.core.handle_refused(Refused { name, version, reason: "its file is empty".to_owned() });
    assert!(world.core.is_ready() && !world.core.is_ready_with(&all) && world.core.is_ready_with(one));
    let mut unclear = joined();
    names.iter().for_each(|name| unload(&mut unclear, name));
    unclear.tell_now(&backends(1));
    assert!(!unclear.core.is_ready(), "no clock yet");
}

#[test]
fn the_messages_of_one_turn_share_a_frame() {
    let mut world = joined();
    world.tell_clock_now();
    world.offer_now(1);
    world.frames();
    let requests: Vec<RequestId> = (0..30).map(|_| world.request_now().unwrap()).collect();
    world.core.handle_cancel(requests[7]);
    let frames = world.frames();
    assert_eq!(frames.iter().map(Vec::len).collect::<Vec<_>>(), [31]);
}

#[test]
fn a_deadline_counts_from_the_arrival() {
    let mut world = joined();
    world.tell_clock_now();
    world.offer_now(1);
    world.frames();
    world.request_after(Span::from_millis(25)).unwrap();
    let frames = world.frames();
    let [Addressed::ModelThread(FrontendToModelThread::Submit { deadline, .. })] = frames[0][..] else {
        panic!("{frames:?}")
    };
    assert_eq!(deadline, world.now + Span::from_millis(5), "30 ms less 25; the model takes 5");
    let late = Err(InferError::Dropped(DropReason::InputLate));
    assert_eq!(world.request_after(Span::from_millis(25) + Span(1)), late);
}

#[test]
fn a_link_that_was_meant_for_another_frontend_or_epoch_is_refused() {
    let mut world = joined();
    world.frames();
    let (backend, link) = (BackendId(1), LinkId(1));
    let pass = LinkPass::of(world.core.token(), backend);
    let hello = |frontend, number| {
        let epoch = Epoch { number, scheduler: 0 };
        encode(&LinkHello { backend, frontend: FrontendId(frontend), link, epoch, pass })
    };
    let of_others = [hello(2, 1), hello(1, 0), hello(1, 2), vec![1]].map(|hello| (hello, true));
    for (hello, refused) in of_others.into_iter().chain([(hello(1, 1), false)]) {
        let connection = world.connection();
        let peer = "127.0.0.1:1".parse().unwrap();
        world.core.handle_event(world.now, Event::Incoming { connection, peer, hello }, &world.arena);
        assert_eq!(matches!(world.core.poll_output(), Some(Output::Refuse { .. })), refused);
    }
}

/// Any holder of the cluster's secret could take any backend's link, and was told where the slots are.
#[test]
fn who_was_not_sent_by_a_scheduler_is_refused_and_learns_nothing() {
    let mut world = joined();
    world.frames();
    let (linked, _) = world.link_now(1, 4);
    let token = world.core.token();
    let (frontend, link, epoch) = (FrontendId(1), LinkId(9), CLAIM.epoch);
    // Of another backend, of another life, of nobody.
    for pass in [LinkPass::of(token, BackendId(2)), LinkPass::of(token + 1, BackendId(1)), LinkPass(0)] {
        let hello = encode(&LinkHello { backend: BackendId(1), frontend, link, epoch, pass });
        let (connection, peer) = (world.connection(), "127.0.0.1:1".parse().unwrap());
        world.core.handle_event(world.now, Event::Incoming { connection, peer, hello }, &world.arena);
        let Some(Output::Refuse { connection: refused, reason }) = world.core.poll_output() else { panic!("taken") };
        assert_eq!(refused, connection);
        assert!(!reason.contains(char::is_numeric), "{reason}");
        assert_eq!(world.core.poll_output(), None, "{linked:?} stays");
    }
    assert_eq!(world.link_now(1, 10).1, Some(vec![linked]), "the backend itself replaces its link");
}

#[test]
fn a_fence_cuts_off_links_up_to_the_one_that_failed_and_no_newer_one() {
    let mut world = joined();
    world.frames();
    let (former, _) = world.link_now(1, 4);
    let reason = DisconnectReason::new("it broke");
    world.core.handle_event(world.now, Event::Disconnected { connection: former, reason }, &world.arena);
    let ((newer, taken), (other, _)) = (world.link_now(1, 6), world.link_now(2, 3));
    assert_eq!(taken, Some(vec![]));
    world.tell_now(&SchedulerToFrontend::Fence { backend: BackendId(1), link: LinkId(5), tasks: vec![] });
    let fenced = Addressed::ModelThread(FrontendToModelThread::Fenced { backend: BackendId(1), unanswered: vec![] });
    assert_eq!(world.frames(), [vec![fenced]], "answered at once, and nobody is cut off");
    assert_eq!(world.link_now(1, 5).1, None, "a link that was fenced off comes late");
    assert_eq!(world.link_now(2, 4).1, Some(vec![other]), "a backend has one link");
    world.tell_now(&SchedulerToFrontend::Fence { backend: BackendId(1), link: LinkId(6), tasks: vec![] });
    assert_eq!(world.core.poll_output(), Some(Output::Disconnect { connection: newer }));
    assert_eq!(world.core.poll_output(), None, "the answer waits until the link is down");
}

/// A backend that says it has answered and writes nothing is cut off, and what it held fails once its link is down.
#[test]
fn a_backend_that_breaks_its_word_is_refused_for_good() {
    let mut world = joined();
    world.tell_clock_now();
    world.offer_now(1);
    let request = world.request_now().unwrap();
    let frames = world.frames();
    let Addressed::ModelThread(FrontendToModelThread::Submit { task, .. }) = frames[0][frames[0].len() - 1] else {
        panic!("{frames:?}")
    };
    let (link, _) = world.link_now(1, 4);
    world.tell_now(&SchedulerToFrontend::Answered { backend: BackendId(1), tasks: vec![task] });
    let reached = Wait::Written.reached();
    world.now += Wait::Written.bound();
    world.core.handle_timeout(world.now);
    assert!(Wait::Written.reached() > reached);
    assert_eq!(world.core.poll_output(), Some(Output::Disconnect { connection: link }));
    let refuses = Addressed::Control(FrontendToControl::Refuses { backend: BackendId(1) });
    assert!(world.frames().concat().contains(&refuses));
    assert_eq!(world.link_now(1, 5).1, None, "it is not taken again");
    let reason = DisconnectReason::new("we disconnected");
    world.core.handle_event(world.now, Event::Disconnected { connection: link, reason }, &world.arena);
    let result = Err(InferError::NotWritten { backend: 1 });
    assert_eq!(world.core.poll_output(), Some(Output::Reply { request, result }));
    assert_eq!(world.core.outstanding(), 0);
    let tasks = vec![task; ANSWERED_TASKS_MAX + 1];
    world.tell_now(&SchedulerToFrontend::Answered { backend: BackendId(2), tasks });
    assert!(!world.core.has_scheduler(), "a scheduler that says too much at once");
}

#[test]
fn fences_are_confirmed_in_the_order_of_their_connection() {
    let mut world = joined();
    world.frames();
    let (link, _) = world.link_now(1, 4);
    let task = |sequence| TaskId::new(FrontendId(1), sequence);
    let backends = [BackendId(1), BackendId(1), BackendId(2), BackendId::NOBODY];
    for (backend, link) in backends.into_iter().zip([LinkId(4), LinkId::NONE, LinkId::NONE, LinkId::ALL]) {
        world.tell_now(&SchedulerToFrontend::Fence { backend, link, tasks: vec![task(7)] });
    }
    assert_eq!(world.core.poll_output(), Some(Output::Disconnect { connection: link }));
    assert!(world.frames().is_empty(), "all wait behind the first");
    let reason = DisconnectReason::new("we disconnected");
    world.core.handle_event(world.now, Event::Disconnected { connection: link, reason }, &world.arena);
    let fenced = |backend| Addressed::ModelThread(FrontendToModelThread::Fenced { backend, unanswered: vec![] });
    assert_eq!(world.frames(), [backends.map(fenced).to_vec()]);
    // Nobody is fenced off by a question about nobody.
    assert_eq!(world.core.fenced.len(), 2);
}

#[test]
fn a_welcome_with_bad_model_threads_ends_the_session_with_the_reason() {
    let many = vec!["127.0.0.1:1".to_owned(); usize::from(ModelThreadId::COUNT_MAX) + 1];
    for addresses in [vec!["127.0.0.1".to_owned()], vec!["127.0.0.1:1".to_owned(), "x".repeat(500)], many] {
        let mut world = World::new(0, 0);
        world.welcome_now(addresses);
        let (connection, _) = world.scheduler.unwrap();
        assert_eq!(world.core.poll_output(), Some(Output::Disconnect { connection }));
        assert_eq!(world.core.poll_output(), None);
        assert_eq!(world.core.poll_timeout(), Some(world.now + RETRY_FIRST));
    }
}

#[test]
fn a_model_of_no_known_thread_ends_the_session() {
    let mut world = joined();
    world.frames();
    let (name, version) = ("m0".to_owned(), "1".to_owned());
    let (model, least_latency) = (ModelId(0), Span::from_millis(5));
    world.tell_now(&SchedulerToFrontend::Model {
        model_thread: ModelThreadId(1),
        model,
        name,
        version,
        gpus: 1,
        least_latency,
        batching: least_latency,
        network: NetworkTimes::default(),
    });
    let (connection, _) = world.scheduler.unwrap();
    assert_eq!(world.core.poll_output(), Some(Output::Disconnect { connection }));
}

#[test]
fn it_has_joined_once_every_model_thread_is_up() {
    let mut world = World::new(0, 0);
    world.welcome_now([0, 1].map(|id| thread_address(id).to_string()).to_vec());
    let mut lines = Vec::new();
    let mut frames = 0;
    while let Some(output) = world.core.poll_output() {
        match output {
            Output::Connect { to, .. } => {
                lines.push(world.connection());
                world.core.handle_connecting(to, lines[lines.len() - 1]);
            }
            Output::Send { .. } => frames += 1,
            other => panic!("found {other:?}"),
        }
    }
    assert_eq!((lines.len(), frames), (2, 1), "the clock is asked for meanwhile");
    for &connection in &lines {
        assert!(!world.core.has_scheduler());
        world.core.handle_event(world.now, Event::Connected { connection, welcome: vec![] }, &world.arena);
    }
    assert!(world.core.has_scheduler());
    let reason = DisconnectReason::new("its thread is gone");
    world.core.handle_event(world.now, Event::Disconnected { connection: lines[1], reason }, &world.arena);
    assert!(!world.core.has_scheduler());
    let ended: Vec<Output> = std::iter::from_fn(|| world.core.poll_output()).collect();
    let (scheduler, _) = world.scheduler.unwrap();
    let expected = [scheduler, lines[0]].map(|connection| Output::Disconnect { connection });
    assert_eq!(ended, expected);
}

#[test]
fn a_scheduler_that_breaks_the_protocol_is_left_and_joined_again() {
    let mut world = joined();
    let (connection, _) = world.scheduler.unwrap();
    let frame = vec![0xff; 9];
    world.core.handle_event(world.now, Event::Message { connection, frame }, &world.arena);
    assert_eq!(world.core.poll_output(), Some(Output::Disconnect { connection }));
    let again = world.core.poll_timeout().unwrap();
    assert_eq!(again, world.now + RETRY_FIRST);
    world.core.handle_timeout(again);
    assert!(matches!(world.core.poll_output(), Some(Output::Connect { .. })));
}
