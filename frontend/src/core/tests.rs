//! The core against a scheduler with its ModelThreads and backends that a seed drives: links break, fences cross
//! answers and new links, answers come late, clients hang up, models move between ModelThreads, the scheduler or one of
//! its connections is lost. A failing seed is in the assertion's text; `simulate(seed, threads)` replays it.

use std::{collections::BTreeSet, net::SocketAddr};

use member::RETRY_FIRST;
use proto::{
    Epoch, Era, ModelId, ModelThreadId, SlotDescriptor, Span,
    backend_to_frontend::{AnswerHeader, AnswerStatus},
    clock::ClockReply,
    frame::Addressed,
    frontend_to_scheduler::FrontendToScheduler,
    hello::{Member, MemberHello, ModelThreads, SchedulerHello},
    scheduler_to_frontend::{DropReason, FrontendWelcome, NetworkTimes},
    slot::ImmediateData,
    stages::AnswerStamps,
};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::{DataType, emulated::digest};
use transport::DisconnectReason;
use zerocopy::IntoBytes;

use super::*;
use crate::{
    arena::PlainArena,
    testing::{model, tensor},
};

const ARENA: usize = 1 << 15;
const BACKENDS: u32 = 4;
const MODELS: usize = 3;
/// What the scheduler's welcome tells its members to say to ModelThreads.
const PASS: u64 = 0xfeed;
/// What the only scheduler claims.
const CLAIM: Claim = Claim { era: Era(1), epoch: Epoch { number: 1, scheduler: 0 } };
const INPUT: usize = 40;
/// The scheduler's clock is this far ahead of ours.
const OFFSET: Span = Span::from_millis(7_000);

/// What the fake scheduler knows of a task.
#[derive(Debug, Clone)]
struct Planned {
    /// The ModelThread that it was submitted to.
    thread: u16,
    slot: SlotDescriptor,
    input: Vec<u8>,
    attempt: u16,
    /// The link that its plan went to; `None` while it is queued.
    link: Option<ConnectionId>,
    /// A fence that names it is under way.
    fencing: bool,
}

/// A plan at a backend: it will READ and WRITE its slot if its link is up then, whatever the scheduler thinks.
#[derive(Debug, Clone)]
struct Flight {
    task: TaskId,
    attempt: u16,
    link: ConnectionId,
    slot: SlotDescriptor,
    input: Vec<u8>,
}

/// Something that happens later.
#[derive(Debug)]
enum Later {
    /// The scheduler plans a queued task, or drops it.
    Plan(TaskId),
    /// A backend's READ and WRITE of a plan land.
    Land(Flight),
    /// The core takes in an event.
    Event(Event),
    /// The scheduler takes in a frame.
    Frame(ConnectionId, Vec<u8>),
    /// The scheduler accepts.
    Welcome(ConnectionId),
    /// A ModelThread accepts.
    ThreadUp(ConnectionId),
    /// Backend and link: the ModelThreads ask about the tasks planned there.
    Fence(BackendId, LinkId, ConnectionId),
    /// A model moves to another ModelThread.
    Move,
    /// A backend connects.
    Link(BackendId),
    /// A client sends a request.
    Request,
    /// A client hangs up.
    HangUp(RequestId),
    /// A backend is lost: the scheduler fences it.
    LoseBackend,
    /// The scheduler is lost, or the connection to one of its ModelThreads.
    LoseScheduler,
}

struct World {
    seed: u64,
    rng: ChaCha8Rng,
    now: Timestamp,
    later: BTreeMap<(Timestamp, u64), Later>,
    order: u64,
    core: Core,
    arena: PlainArena,
    /// Events reach the core in order: none before this instant.
    inbox_until: Timestamp,
    next_connection: u64,
    scheduler: Option<(ConnectionId, FrontendId)>,
    /// ModelThreads with endpoints of their own; none: the scheduler's connection leads to the only one.
    threads: usize,
    /// By ModelThread, as the core has dialled them.
    lines: Vec<Option<ConnectionId>>,
    /// The ModelThread of each model, as the scheduler has it, and as the core has been told.
    owners: [u16; MODELS],
    told: [u16; MODELS],
    /// Lines that the core knows to be up.
    up: BTreeSet<ConnectionId>,
    /// The connection that each task was submitted over.
    submitted_over: BTreeMap<TaskId, ConnectionId>,
    /// The connections that fences without an answer went over.
    asked: Vec<ConnectionId>,
    next_frontend: u32,
    next_link: u32,
    links: BTreeMap<ConnectionId, (BackendId, LinkId)>,
    /// Up to which link the core was told to fence each backend off.
    fenced: BTreeMap<BackendId, LinkId>,
    tasks: BTreeMap<TaskId, Planned>,
    /// Inputs of requests that have neither ended nor been hung up.
    requests: BTreeMap<RequestId, Vec<u8>>,
    stop_at: Timestamp,
    ok: u64,
    failed: BTreeSet<String>,
}

/// A core of some models that has so many schedulers.
fn core(schedulers: usize, token_seed: u64) -> Core {
    core_of((MODELS, 16), schedulers, token_seed)
}

/// One of so many models that has at most so many links.
fn core_of((models, links_max): (usize, usize), schedulers: usize, token_seed: u64) -> Core {
    let inputs = vec![tensor("x", DataType::Uint8, &[INPUT])];
    let outputs = vec![tensor("digest", DataType::Uint64, &[2]), tensor("attempt", DataType::Uint16, &[1])];
    let models = (0..models).map(|number| model(&format!("m{number}"), inputs.clone(), outputs.clone()));
    let config = CoreConfig {
        arena_bytes: ARENA,
        arena: LinkWelcome {
            arena_address: 1,
            arena_bytes: ARENA as u64,
            arena_rkey: 2,
            guards_offset: 0,
            guards_rkey: 0,
        },
        name: "frontend".to_owned(),
        link_address: "127.0.0.1:1".to_owned(),
        links_max,
        schedulers,
        token_seed,
    };
    Core::new(config, models.collect()).unwrap()
}

impl World {
    fn new(seed: u64, threads: usize) -> Self {
        let mut world = Self {
            seed,
            rng: ChaCha8Rng::seed_from_u64(seed),
            now: Timestamp(0),
            later: BTreeMap::new(),
            order: 0,
            core: core(1, seed),
            arena: PlainArena::new(ARENA),
            inbox_until: Timestamp(0),
            next_connection: 0,
            scheduler: None,
            threads,
            lines: vec![None; threads],
            owners: std::array::from_fn(|model| (model % threads.max(1)) as u16),
            told: [0; MODELS],
            up: BTreeSet::new(),
            submitted_over: BTreeMap::new(),
            asked: Vec::new(),
            next_frontend: 1,
            next_link: 1,
            links: BTreeMap::new(),
            fenced: BTreeMap::new(),
            tasks: BTreeMap::new(),
            requests: BTreeMap::new(),
            stop_at: Timestamp(0) + Span::from_millis(3_000),
            ok: 0,
            failed: BTreeSet::new(),
        };
        world.after(Span::ZERO, Later::Request);
        world.after(Span::from_millis(100), Later::LoseBackend);
        world.after(Span::from_millis(900), Later::LoseScheduler);
        world.after(Span::from_millis(50), Later::Move);
        world
    }

    fn after(&mut self, span: Span, what: Later) {
        self.order += 1;
        self.later.insert((self.now + span, self.order), what);
    }

    fn micros(&mut self, up_to: i64) -> Span {
        Span::from_micros(self.rng.random_range(0..=up_to))
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_ratio(percent, 100)
    }

    fn connection(&mut self) -> ConnectionId {
        self.next_connection += 1;
        ConnectionId(self.next_connection)
    }

    /// The transport reports an event: in order, and the core may take a while to look.
    fn report(&mut self, event: Event) {
        let delay = self.micros(300);
        self.inbox_until = self.inbox_until.max(self.now + delay);
        self.after(self.inbox_until - self.now, Later::Event(event));
    }

    /// The connection to a ModelThread.
    fn line(&self, thread: u16) -> Option<ConnectionId> {
        let (scheduler, _) = self.scheduler?;
        if self.threads == 0 { Some(scheduler) } else { self.lines[usize::from(thread)] }
    }

    fn tell(&mut self, connection: Option<ConnectionId>, message: &SchedulerToFrontend) {
        let Some(connection) = connection else { return };
        let frame = encode(message);
        self.report(Event::Message { connection, frame });
    }

    fn tell_models(&mut self) {
        for model in 0..MODELS {
            let message = SchedulerToFrontend::Model {
                model_thread: ModelThreadId(self.owners[model]),
                model: ModelId(model as u32),
                name: format!("m{model}"),
                version: "1".to_owned(),
                gpus: self.links.len() as u32,
                least_latency: Span::from_millis(5),
                batching: Span(1),
                network: NetworkTimes::default(),
            };
            self.tell(self.scheduler.map(|(connection, _)| connection), &message);
        }
    }

    /// What the core knows once it has taken in an event.
    fn note(&mut self, event: &Event) {
        match event {
            Event::Connected { connection, .. } if self.lines.contains(&Some(*connection)) => {
                self.up.insert(*connection);
            }
            Event::Message { frame, .. } => {
                for message in read_frame(frame) {
                    match message.unwrap() {
                        SchedulerToFrontend::Model { model, model_thread, .. } => {
                            self.told[model.0 as usize] = model_thread.0;
                        }
                        SchedulerToFrontend::Fence { backend, link, .. } => {
                            let fenced = self.fenced.entry(backend).or_insert(link);
                            *fenced = link.max(*fenced);
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }

    /// Every message must go over the right connection.
    fn check_route(&mut self, connection: ConnectionId, frame: &[u8]) {
        // The core may not have heard yet that the scheduler is lost.
        let Some((scheduler, _)) = self.scheduler else { return };
        let seed = self.seed;
        for message in read_frame(frame) {
            match message.unwrap() {
                Addressed::ModelThread(FrontendToModelThread::Submit { task, model, .. }) => {
                    let line = self.line(self.told[model.0 as usize]);
                    assert_eq!(Some(connection), line, "seed {seed}: {task:?} of {model:?} went elsewhere");
                    assert_eq!(self.up.len(), self.threads, "seed {seed}: submitted before all lines were up");
                    self.submitted_over.insert(task, connection);
                }
                Addressed::ModelThread(FrontendToModelThread::Cancel { task, .. }) => {
                    let over = self.submitted_over.get(&task);
                    assert_eq!(Some(&connection), over, "seed {seed}: {task:?} was submitted elsewhere");
                }
                Addressed::ModelThread(FrontendToModelThread::Fenced { .. }) => {
                    let asked = self.asked.iter().position(|asked| *asked == connection);
                    self.asked.remove(asked.unwrap_or_else(|| panic!("seed {seed}: nobody asked over {connection:?}")));
                }
                Addressed::Control(FrontendToControl::ClockRequest { .. })
                | Addressed::Control(FrontendToControl::Obeys { .. }) => {
                    assert_eq!(connection, scheduler, "seed {seed}");
                }
                Addressed::ModelThread(FrontendToModelThread::AllOpen) => {
                    assert_eq!(self.up.len(), self.threads, "seed {seed}")
                }
                other => panic!("seed {seed}: found {other:?}, nobody asked for that"),
            }
        }
    }

    /// Runs until nothing is left to happen.
    fn run(&mut self) {
        loop {
            self.drain_outputs();
            let timer = self.core.poll_timeout().unwrap_or(Timestamp::NEVER);
            let next = self.later.first_key_value().map(|((at, _), _)| *at);
            // Once clients have stopped and nothing is outstanding, only the clock requests go on.
            let quiet = self.requests.is_empty() && self.core.outstanding() == 0;
            if self.now > self.stop_at + Span::from_millis(20_000) || (self.now > self.stop_at && quiet) {
                return;
            }
            match next {
                Some(at) if at <= timer => {
                    let ((at, _), what) = self.later.pop_first().unwrap();
                    self.now = at;
                    self.step(what);
                }
                _ if timer == Timestamp::NEVER => return,
                _ => {
                    self.now = self.now.max(timer);
                    self.core.handle_timeout(self.now);
                }
            }
        }
    }

    fn step(&mut self, what: Later) {
        match what {
            Later::Event(event) => {
                self.note(&event);
                self.core.handle_event(self.now, event, &self.arena);
            }
            Later::Plan(task) => self.plan(task),
            Later::Land(flight) => self.land(flight),
            Later::Frame(connection, frame) => self.scheduler_takes(connection, &frame),
            Later::Welcome(connection) => self.welcome(connection),
            Later::ThreadUp(connection) => self.thread_up(connection),
            Later::Fence(backend, link, connection) => self.fence(backend, link, connection),
            Later::Move => self.move_model(),
            Later::Link(backend) => self.link(backend),
            Later::Request => self.request(),
            Later::HangUp(request) => {
                if self.requests.remove(&request).is_some() {
                    self.core.handle_cancel(request);
                }
            }
            Later::LoseBackend => self.lose_backend(),
            Later::LoseScheduler => self.lose_scheduler(),
        }
    }

    fn request(&mut self) {
        if self.now > self.stop_at {
            return;
        }
        let rows = self.rng.random_range(1..=3);
        let mut input = vec![0; rows * INPUT];
        self.rng.fill_bytes(&mut input);
        let slo = Span::from_millis(if self.chance(3) { 1 } else { 30 });
        let model = self.rng.random_range(0..MODELS);
        let inputs = vec![input.clone().into()];
        let request = CheckedRequest {
            model,
            rows,
            inputs,
            slo,
            waited: Span::ZERO,
            priority: 0,
            application: proto::Application::NONE,
            client: None,
        };
        match self.core.handle_request(self.now, &request, &self.arena) {
            Ok(id) => {
                self.requests.insert(id, input);
                if self.chance(10) {
                    let delay = self.micros(20_000);
                    self.after(delay, Later::HangUp(id));
                }
            }
            Err(error) => {
                self.failed.insert(format!("{error:?}").split([' ', '(']).next().unwrap().to_owned());
            }
        }
        let gap = self.micros(1_500);
        self.after(gap, Later::Request);
    }

    fn drain_outputs(&mut self) {
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Connect { to, hello } => self.connect(to, &hello),
                Output::Accept { .. } => self.tell_models(),
                Output::Refuse { connection, .. } => {
                    if let Some((backend, _)) = self.links.remove(&connection) {
                        self.after(Span::from_millis(30), Later::Link(backend));
                    }
                }
                Output::Disconnect { connection } => {
                    if let Some((backend, link)) = self.links.get(&connection) {
                        let fenced = self.fenced.get(backend).is_some_and(|fenced| link <= fenced);
                        let is_left = !self.core.has_scheduler();
                        assert!(fenced || is_left, "seed {}: nobody fenced {link:?} of {backend:?} off", self.seed);
                    }
                    self.disconnect(connection, "told to");
                }
                Output::Send { connection, frame } => {
                    self.check_route(connection, &frame);
                    let delay = self.micros(200);
                    self.after(delay, Later::Frame(connection, frame));
                }
                Output::Reply { request, result } => self.reply(request, result),
                other => panic!("nobody changes models here: {other:?}"),
            }
        }
    }

    fn connect(&mut self, to: Destination, hello: &[u8]) {
        let connection = self.connection();
        self.core.handle_connecting(to, connection);
        let hello: SchedulerHello = wincode::deserialize(hello).unwrap();
        let delay = self.micros(3_000);
        match to {
            Destination::Scheduler(index) => {
                assert_eq!(index, 0);
                assert!(matches!(hello, SchedulerHello::Frontend(_)));
                (self.up, self.submitted_over, self.fenced) = Default::default();
                self.asked.clear();
                self.after(delay, Later::Welcome(connection));
            }
            Destination::ModelThread { id, address, .. } => {
                // The core may not have heard yet that the scheduler is lost.
                if let Some((_, frontend)) = self.scheduler {
                    let member = Member::Frontend(frontend);
                    assert_eq!(hello, SchedulerHello::Member(MemberHello { member, pass: PASS }));
                    assert_eq!(address, thread_address(id.0));
                    self.lines[usize::from(id.0)] = Some(connection);
                    self.after(delay, Later::ThreadUp(connection));
                } else {
                    self.disconnect(connection, "nobody listens");
                }
            }
        }
    }

    fn thread_up(&mut self, connection: ConnectionId) {
        if !self.lines.contains(&Some(connection)) {
            return;
        }
        if self.now <= self.stop_at && self.chance(5) {
            self.disconnect(connection, "nobody listens");
        } else {
            self.report(Event::Connected { connection, welcome: Vec::new() });
        }
    }

    fn move_model(&mut self) {
        let model = self.rng.random_range(0..MODELS);
        self.owners[model] = self.rng.random_range(0..self.threads.max(1)) as u16;
        self.tell_models();
        let delay = self.micros(100_000);
        self.after(delay, Later::Move);
    }

    fn reply(&mut self, request: RequestId, result: Result<Reply, InferError>) {
        let seed = self.seed;
        let input =
            self.requests.remove(&request).unwrap_or_else(|| panic!("seed {seed}: replied twice to {request:?}"));
        match result {
            Ok(reply) => {
                self.ok += 1;
                for (row, input) in input.chunks(INPUT).enumerate() {
                    let expected: Vec<u8> = digest(input).into_iter().flat_map(u64::to_le_bytes).collect();
                    assert_eq!(reply.outputs[0][row * 16..][..16], expected, "seed {seed}: another row's answer");
                    let attempt = u16::from_le_bytes([reply.outputs[1][row * 2], reply.outputs[1][row * 2 + 1]]);
                    let task = self.tasks.values().find(|task| task.input == input);
                    if let Some(task) = task {
                        assert_eq!(attempt, task.attempt, "seed {seed}: the answer of another attempt was taken");
                    }
                }
            }
            Err(error) => {
                self.failed.insert(format!("{error:?}").split([' ', '(']).next().unwrap().to_owned());
            }
        }
    }

    /// The connection is gone at once for whatever has not landed; the core hears of it later.
    fn disconnect(&mut self, connection: ConnectionId, reason: &str) {
        let event = Event::Disconnected { connection, reason: DisconnectReason::new(reason) };
        if let Some((backend, link)) = self.links.remove(&connection) {
            self.report(event);
            let away = self.micros(20_000);
            self.after(away, Later::Link(backend));
            self.tell_models();
            // Sometimes after the next link is up.
            let noticed = self.micros(20_000);
            self.after(noticed, Later::Fence(backend, link, connection));
            return;
        }
        let is_scheduler = self.scheduler.is_some_and(|(scheduler, _)| scheduler == connection);
        if is_scheduler || self.lines.contains(&Some(connection)) {
            self.scheduler = None;
            self.lines.fill(None);
            self.tasks.clear();
        }
        self.report(event);
    }

    /// The backend has told that its link broke, or has stalled; each ModelThread asks about its tasks that were
    /// planned there.
    fn fence(&mut self, backend: BackendId, link: LinkId, connection: ConnectionId) {
        for thread in 0..self.threads.max(1) as u16 {
            let mut tasks = Vec::new();
            for (id, task) in &mut self.tasks {
                if task.link == Some(connection) && task.thread == thread && !task.fencing {
                    task.fencing = true;
                    tasks.push(*id);
                }
            }
            if !tasks.is_empty() {
                let line = self.line(thread);
                self.asked.extend(line);
                self.tell(line, &SchedulerToFrontend::Fence { backend, link, tasks });
            }
        }
    }

    fn lose_backend(&mut self) {
        if let Some((&connection, &(backend, link))) = self.links.iter().nth(self.rng.random_range(0..4)) {
            // Either the link breaks, or the backend stalls: then its writes go on until the frontend cuts it off.
            if self.chance(50) {
                self.disconnect(connection, "broken");
            } else {
                self.fence(backend, link, connection);
            }
        }
        let delay = self.micros(200_000);
        self.after(delay, Later::LoseBackend);
    }

    fn lose_scheduler(&mut self) {
        let one = self.rng.random_range(0..=self.threads);
        let line = self.lines.get(one).copied().unwrap_or(self.scheduler.map(|(connection, _)| connection));
        if let Some(connection) = line {
            self.disconnect(connection, "the scheduler's process died");
        }
        let delay = self.micros(1_500_000);
        self.after(delay, Later::LoseScheduler);
    }

    fn welcome(&mut self, connection: ConnectionId) {
        if self.now <= self.stop_at && self.chance(30) {
            let reason = DisconnectReason::new("nobody listens");
            self.report(Event::Disconnected { connection, reason });
            return;
        }
        let frontend = FrontendId(self.next_frontend);
        self.next_frontend += 1;
        self.scheduler = Some((connection, frontend));
        let addresses = (0..self.threads as u16).map(|id| thread_address(id).to_string()).collect();
        let model_threads = ModelThreads { addresses, pass: PASS };
        let welcome = FrontendWelcome { frontend, model_threads, claim: CLAIM };
        // Some backends are faster than the welcome.
        for backend in 0..BACKENDS {
            let delay = self.micros(2_000);
            self.after(delay, Later::Link(BackendId(backend)));
        }
        let delay = self.micros(1_000);
        self.after(delay, Later::Event(Event::Connected { connection, welcome: encode(&welcome) }));
        self.inbox_until = self.inbox_until.max(self.now + delay);
    }

    fn link(&mut self, backend: BackendId) {
        let Some((_, frontend)) = self.scheduler else { return };
        if self.links.values().any(|(linked, _)| *linked == backend) {
            return;
        }
        let (connection, link) = (self.connection(), LinkId(self.next_link));
        self.next_link += 1;
        self.links.insert(connection, (backend, link));
        let pass = LinkPass::of(self.core.token(), backend);
        let hello = encode(&LinkHello { backend, frontend, link, epoch: CLAIM.epoch, pass });
        self.report(Event::Incoming { connection, peer: "127.0.0.1:1".parse().unwrap(), hello });
    }

    fn scheduler_takes(&mut self, connection: ConnectionId, frame: &[u8]) {
        let lines = (0..self.threads.max(1) as u16).map(|thread| (thread, self.line(thread)));
        let thread = lines.into_iter().find(|(_, line)| *line == Some(connection)).map(|(thread, _)| thread);
        if thread.is_none() && self.scheduler.is_none_or(|(scheduler, _)| scheduler != connection) {
            return;
        }
        for message in read_frame::<FrontendToScheduler>(frame) {
            match message.unwrap() {
                Addressed::Control(FrontendToControl::ClockRequest { sent_at, .. }) => {
                    let at = self.now + OFFSET;
                    let reply = ClockReply { sent_at, received_at: at, replied_at: at };
                    self.tell(Some(connection), &SchedulerToFrontend::Clock(reply));
                }
                Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, .. }) => {
                    self.submitted(thread.expect("its way was checked"), task, slot);
                }
                Addressed::ModelThread(FrontendToModelThread::Cancel { task, .. }) => {
                    if self.tasks.get(&task).is_some_and(|task| task.link.is_none() && !task.fencing) {
                        self.drop_task(task, DropReason::Cancelled);
                    }
                }
                Addressed::Control(FrontendToControl::Obeys { epoch }) => assert_eq!(epoch, CLAIM.epoch),
                Addressed::ModelThread(FrontendToModelThread::AllOpen) => {}
                other @ (Addressed::Control(FrontendToControl::ChangeModel { .. })
                | Addressed::Control(FrontendToControl::Link { .. })
                | Addressed::ModelThread(FrontendToModelThread::Open { .. })
                | Addressed::Control(
                    FrontendToControl::Misses { .. }
                    | FrontendToControl::Drained { .. }
                    | FrontendToControl::PageRead
                    | FrontendToControl::Refuses { .. },
                )) => {
                    panic!("nobody asked for that: {other:?}")
                }
                Addressed::ModelThread(FrontendToModelThread::Fenced { unanswered, .. }) => {
                    for id in unanswered {
                        let task = self.tasks.get_mut(&id).expect("an unanswered task has not ended");
                        assert!(task.fencing);
                        (task.fencing, task.link) = (false, None);
                        task.attempt += 1;
                        self.plan(id);
                    }
                }
            }
        }
    }

    fn submitted(&mut self, thread: u16, task: TaskId, slot: SlotDescriptor) {
        let end = |slot: &SlotDescriptor| slot.answer_offset + u64::from(slot.answer_bytes_max);
        // Invariant 3: what can still be READ or written is leased to nobody else.
        for flight in self.later.values() {
            let Later::Land(flight) = flight else { continue };
            let apart = end(&slot) <= flight.slot.input_offset || end(&flight.slot) <= slot.input_offset;
            let void = !self.links.contains_key(&flight.link);
            assert!(apart || void, "seed {}: {task:?} was given the slot of {flight:?}", self.seed);
        }
        let input = self.arena.bytes(slot.input_offset, slot.input_bytes);
        self.tasks.insert(task, Planned { thread, slot, input, attempt: 0, link: None, fencing: false });
        let wait = self.micros(10_000);
        self.after(wait, Later::Plan(task));
    }

    fn drop_task(&mut self, task: TaskId, reason: DropReason) {
        let thread = self.tasks.remove(&task).expect("it has not ended").thread;
        self.tell(self.line(thread), &SchedulerToFrontend::Dropped { task, reason });
    }

    fn plan(&mut self, id: TaskId) {
        let linked: Vec<ConnectionId> = self.links.keys().copied().collect();
        let drop = self.chance(10);
        let Some(task) = self.tasks.get_mut(&id).filter(|task| task.link.is_none()) else { return };
        let attempt = task.attempt;
        if linked.is_empty() || drop {
            self.drop_task(id, if attempt > 0 { DropReason::BackendLost } else { DropReason::Deadline });
            return;
        }
        let link = linked[self.rng.random_range(0..linked.len())];
        task.link = Some(link);
        let flight = Flight { task: id, attempt, link, slot: task.slot, input: task.input.clone() };
        let run = self.micros(15_000);
        self.after(run, Later::Land(flight));
    }

    fn land(&mut self, Flight { task, attempt, link, slot, input }: Flight) {
        if !self.links.contains_key(&link) {
            return;
        }
        let read = self.arena.bytes(slot.input_offset, slot.input_bytes);
        assert_eq!(read, input, "seed {}: the input of {task:?} was overwritten before it was read", self.seed);
        let mut answer: Vec<u8> = digest(&read).into_iter().flat_map(u64::to_le_bytes).collect();
        answer.extend(attempt.to_le_bytes());
        let done = !self.chance(10);
        let header = AnswerHeader {
            task: task.0,
            status: if done { AnswerStatus::Done } else { AnswerStatus::WindowMissed },
            payload_bytes: if done { 18 } else { 0 },
            attempt,
            batch_size: 1,
            gpu: 0,
            tasks: 1,
            stamps: AnswerStamps::default(),
        };
        self.arena.write(slot.answer_offset as usize, header.as_bytes());
        self.arena.write(slot.answer_offset as usize + size_of::<AnswerHeader>(), &answer);
        let immediate = ImmediateData { slot: slot.slot, attempt };
        self.report(Event::Immediate {
            connection: link,
            immediate: immediate.pack(),
            bytes: size_of::<AnswerHeader>() as u32 + 18,
        });
        // Immediates that match no attempt must change nothing.
        let stale = ImmediateData { attempt: attempt + 1, ..immediate };
        self.report(Event::Immediate {
            connection: link,
            immediate: stale.pack(),
            bytes: size_of::<AnswerHeader>() as u32 + 18,
        });
    }
}

fn thread_address(id: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 2], 7_000 + id))
}

fn simulate(seed: u64, threads: usize) -> World {
    let mut world = World::new(seed, threads);
    world.run();
    assert_eq!(world.requests.len(), 0, "seed {seed}: requests that never ended");
    assert_eq!(world.core.outstanding(), 0, "seed {seed}: slots that never came back");
    world
}

#[test]
fn every_request_ends_once_and_no_stale_answer_is_taken() {
    let mut failed = BTreeSet::new();
    for (seed, threads) in (0..40).flat_map(|seed| [0, 1, 3].map(|threads| (seed, threads))) {
        let world = simulate(seed, threads);
        assert!(world.ok > 200, "seed {seed}, {threads} threads: only {} requests were answered", world.ok);
        assert!(world.core.counters().stale_answers > 0, "seed {seed}, {threads} threads");
        failed.extend(world.failed);
    }
    // The faults reach every way in which a request can end.
    for way in ["Dropped", "WindowMissed", "SchedulerLost", "NoScheduler", "NeverMet", "NoBackend"] {
        assert!(failed.contains(way), "no seed gave {way}: {failed:?}");
    }
}

mod hostile;
mod rules;
mod takeover;
mod takeovers;
