//! A scheduler and backends that have proved themselves and then say whatever they like, by a seed. Nothing panics
//! (sums are checked in tests), each request ends once, and what is kept of their words stays bounded.

use proto::{
    BatchCost, Brought,
    request_times::{AloneTimes, LengthTimes, RequestTimes},
};

use super::*;

const STEPS: usize = 400;

struct Attack {
    rng: ChaCha8Rng,
    core: Core,
    arena: PlainArena,
    now: Timestamp,
    next_connection: u64,
    /// Opened by the frontend, and not up.
    dialled: Vec<ConnectionId>,
    /// Up, whoever began.
    up: Vec<ConnectionId>,
    /// Incoming, and neither accepted nor refused.
    waiting: Vec<ConnectionId>,
    /// Of links that were accepted.
    links: Vec<ConnectionId>,
    slots: Vec<(TaskId, SlotDescriptor)>,
    requests: BTreeSet<RequestId>,
    obeyed: BTreeSet<Epoch>,
}

impl Attack {
    fn new(seed: u64) -> Self {
        let mut attack = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            core: core_of((2, 3), 1 + (seed % 3) as usize, seed),
            arena: PlainArena::new(ARENA),
            now: Timestamp(1_000_000_000),
            next_connection: 1,
            dialled: Vec::new(),
            up: Vec::new(),
            waiting: Vec::new(),
            links: Vec::new(),
            slots: Vec::new(),
            requests: BTreeSet::new(),
            obeyed: BTreeSet::new(),
        };
        // They begin well, mostly: then they get further.
        if !seed.is_multiple_of(4) {
            attack.begin_well();
        }
        attack
    }

    fn begin_well(&mut self) {
        self.core.handle_timeout(self.now);
        self.outputs();
        let Some(connection) = self.dialled.pop() else { return };
        let model_threads = ModelThreads { addresses: vec![], pass: 1 };
        let welcome = encode(&FrontendWelcome { frontend: FrontendId(1), model_threads, claim: CLAIM });
        self.up.push(connection);
        self.event(Event::Connected { connection, welcome });
        let (sent_at, received_at) = (self.now, self.now + OFFSET);
        let clock = SchedulerToFrontend::Clock(ClockReply { sent_at, received_at, replied_at: received_at });
        self.event(Event::Message { connection, frame: encode(&clock) });
        for number in 0..2 {
            let offer = SchedulerToFrontend::Model {
                model: ModelId(number),
                name: format!("m{number}"),
                version: "1".to_owned(),
                gpus: 1,
                least_latency: Span(1),
                batching: Span(1),
                network: NetworkTimes::default(),
                model_thread: ModelThreadId(0),
            };
            self.event(Event::Message { connection, frame: encode(&offer) });
        }
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.rng.random_range(0..from.len())])
    }

    fn number(&mut self, sensible: u64) -> u64 {
        match self.rng.random_range(0..10) {
            0 => u64::MAX - self.rng.random_range(0..3),
            1 => self.rng.random(),
            2 => 1 << self.rng.random_range(0..64),
            _ => self.rng.random_range(0..=sensible),
        }
    }

    fn instant(&mut self) -> Timestamp {
        match self.rng.random_range(0..6) {
            0 => Timestamp::NEVER,
            1 => Timestamp::PAST,
            2 => Timestamp(self.rng.random()),
            _ => self.now + Span(self.rng.random_range(-50_000_000..50_000_000)),
        }
    }

    fn claim(&mut self) -> Claim {
        let era = Era(if self.rng.random_range(0..10) == 0 { self.rng.random() } else { 1 });
        let number = match self.rng.random_range(0..40) {
            0 => u32::MAX,
            1..20 => 0,
            // In turn with others.
            _ => self.core.obeys().epoch.number.saturating_add(self.rng.random_range(0..2)),
        };
        Claim { era, epoch: Epoch { number, scheduler: self.rng.random_range(0..3) } }
    }

    fn text(&mut self) -> String {
        match self.rng.random_range(0..5) {
            0 => "\u{1b}".repeat(self.rng.random_range(0..6_000)),
            1 => "../../etc".to_owned(),
            _ => format!("m{}", self.rng.random_range(0..3)),
        }
    }

    fn task(&mut self) -> TaskId {
        let known: Vec<TaskId> = self.slots.iter().map(|(task, _)| *task).collect();
        let random = TaskId(self.number(10));
        if self.rng.random_range(0..5) == 0 { random } else { self.pick(&known).unwrap_or(random) }
    }

    fn event(&mut self, event: Event) {
        self.core.handle_event(self.now, event, &self.arena);
    }

    fn answer_dialled(&mut self) {
        let Some(connection) = self.pick(&self.dialled.clone()) else { return };
        self.dialled.retain(|other| *other != connection);
        let addresses = match self.rng.random_range(0..5) {
            0 => vec!["nowhere".to_owned()],
            1 => vec!["127.0.0.1:5".to_owned(); self.rng.random_range(1..300)],
            _ => vec![],
        };
        let model_threads = ModelThreads { addresses, pass: self.rng.random() };
        let frontend = self.core.frontend().filter(|_| self.rng.random_range(0..4) > 0);
        let frontend = frontend.unwrap_or(FrontendId(self.number(5) as u32));
        let welcome = FrontendWelcome { frontend, model_threads, claim: self.claim() };
        let mut welcome = encode(&welcome);
        if self.rng.random_range(0..8) == 0 {
            welcome = (0..self.rng.random_range(0..40)).map(|_| self.rng.random()).collect();
        }
        self.up.push(connection);
        self.event(Event::Connected { connection, welcome });
    }

    fn say(&mut self) {
        let Some(connection) = self.pick(&self.up.clone()) else { return };
        let message = match self.rng.random_range(0..12) {
            10 => SchedulerToFrontend::Takeover { epoch: self.claim().epoch },
            11 => SchedulerToFrontend::AskPrimary,
            0 => SchedulerToFrontend::Dropped { task: self.task(), reason: DropReason::Deadline },
            1 => SchedulerToFrontend::Dropped { task: self.task(), reason: DropReason::InputLate },
            2 => SchedulerToFrontend::Clock(ClockReply {
                sent_at: self.instant(),
                received_at: self.instant(),
                replied_at: self.instant(),
            }),
            3 => {
                let sent_at = self.now;
                let received_at = self.now + OFFSET;
                SchedulerToFrontend::Clock(ClockReply { sent_at, received_at, replied_at: received_at })
            }
            4 => SchedulerToFrontend::Load(Box::new(SchedulerLoad {
                queued: u32::MAX,
                batches: u32::MAX,
                gpus: u32::MAX,
                members: u32::MAX,
                obeying: u32::MAX,
                settled: Span(i64::MIN),
                ..SchedulerLoad::default()
            })),
            5 if self.rng.random_range(0..3) == 0 => {
                let times = AloneTimes { samples: u32::MAX, quantiles: [Span(i64::MIN), Span::ZERO, Span(i64::MAX)] };
                let lengths = LengthTimes { shortest: 9, longest: 3, times };
                let times = RequestTimes {
                    cost: BatchCost { fixed: Span(-1), per_task_ppm: u32::MAX },
                    applications: vec![(None, times); self.rng.random_range(30..35)],
                    lengths: vec![lengths; self.rng.random_range(14..19)],
                };
                SchedulerToFrontend::RequestTimes { model: ModelId(self.number(3) as u32), times: Box::new(times) }
            }
            5 => {
                let most = if self.rng.random_range(0..20) == 0 { 1025 } else { 1024 };
                let tasks = (0..[0, 1, 3, most][self.rng.random_range(0..4)]).map(|_| self.task()).collect();
                let (backend, link) = (BackendId(self.number(3) as u32), LinkId(self.number(3) as u32));
                match self.rng.random() {
                    true => SchedulerToFrontend::Fence { backend, link, tasks },
                    false => SchedulerToFrontend::Answered { backend, tasks },
                }
            }
            6 if self.rng.random_range(0..3) == 0 => {
                let (name, version) = (self.text(), self.text());
                let reason = self.rng.random::<bool>().then(|| self.text());
                SchedulerToFrontend::NotLoaded { name, version, reason }
            }
            6 => {
                let (name, loads) = (self.text(), self.number(3) as u32);
                let states = [ModelState::Serving, ModelState::Loading, ModelState::Unloading, ModelState::Unloaded];
                SchedulerToFrontend::ModelState {
                    name,
                    state: states[self.rng.random_range(0..4)],
                    loads,
                    brought: None,
                }
            }
            7 => {
                let refused = if self.rng.random() { Some(self.text()) } else { None };
                SchedulerToFrontend::ModelChanged { change: ChangeId(self.number(3)), refused }
            }
            _ => SchedulerToFrontend::Model {
                model: ModelId(self.number(3) as u32),
                name: self.text(),
                version: if self.rng.random_range(0..5) == 0 { self.text() } else { "1".to_owned() },
                gpus: self.number(3) as u32,
                least_latency: Span(self.number(5_000_000) as i64),
                batching: Span(1),
                network: NetworkTimes::default(),
                model_thread: ModelThreadId(if self.rng.random_range(0..40) == 0 { self.rng.random() } else { 0 }),
            },
        };
        let mut frame = encode(&message);
        if self.rng.random_range(0..200) == 0 {
            frame = (0..self.rng.random_range(0..60)).map(|_| self.rng.random()).collect();
        }
        self.event(Event::Message { connection, frame });
    }

    fn link(&mut self) {
        let connection = ConnectionId(self.next_connection);
        self.next_connection += 1;
        let backend = BackendId(self.number(3) as u32);
        let is_odd = self.rng.random_range(0..10) == 0;
        let hello = LinkHello {
            backend,
            pass: if is_odd { LinkPass(self.rng.random()) } else { LinkPass::of(self.core.token(), backend) },
            frontend: self.core.frontend().unwrap_or(FrontendId(1)),
            link: LinkId(self.number(6) as u32),
            epoch: if self.rng.random_range(0..8) == 0 { self.claim().epoch } else { self.core.obeys().epoch },
        };
        let mut hello = encode(&hello);
        if self.rng.random_range(0..10) == 0 {
            hello.truncate(self.rng.random_range(0..hello.len()));
        }
        self.waiting.push(connection);
        self.event(Event::Incoming { connection, peer: "127.0.0.1:1".parse().unwrap(), hello });
    }

    /// Writes something that looks like an answer, or does not, and tells of it.
    fn write(&mut self) {
        let Some(connection) = self.pick(&self.links.clone()) else { return };
        let known = self.slots.clone();
        let Some((task, slot)) = self.pick(&known) else { return };
        let is_odd = self.rng.random_range(0..4) == 0;
        let tasks: u32 = if is_odd { self.number(3) as u32 % 70_000 } else { self.rng.random_range(1..3) };
        let statuses = [AnswerStatus::Done, AnswerStatus::WindowMissed, AnswerStatus::Failed];
        let stamps = AnswerStamps { finished_at_ns: self.instant().0, ..AnswerStamps::default() };
        let header = AnswerHeader {
            task: if self.rng.random_range(0..6) == 0 { self.rng.random() } else { task.0 },
            status: statuses[self.rng.random_range(0..3)],
            payload_bytes: if is_odd { self.number(18) as u32 } else { 18 * tasks },
            attempt: if is_odd { self.number(1) as u16 } else { 0 },
            batch_size: self.rng.random(),
            gpu: self.rng.random(),
            tasks: tasks as u16,
            stamps,
        };
        let mut bytes = header.as_bytes().to_vec();
        if self.rng.random_range(0..10) == 0 {
            self.rng.fill_bytes(&mut bytes);
        }
        self.arena.write(slot.answer_offset as usize, &bytes);
        let attempt = if is_odd { self.number(1) as u16 % 4096 } else { 0 };
        let immediate = ImmediateData { slot: slot.number(), attempt }.pack();
        let immediate = if self.rng.random_range(0..10) == 0 { self.rng.random() } else { immediate };
        let bytes = if is_odd { self.number(200) as u32 } else { 200 };
        self.event(Event::Immediate { connection, immediate, bytes });
    }

    fn end(&mut self) {
        let all: Vec<_> = self.up.iter().chain(&self.dialled).chain(&self.links).copied().collect();
        if let Some(connection) = self.pick(&all) {
            self.down(connection);
        }
    }

    fn down(&mut self, connection: ConnectionId) {
        for list in [&mut self.dialled, &mut self.up, &mut self.waiting, &mut self.links] {
            list.retain(|other| *other != connection);
        }
        self.event(Event::Disconnected { connection, reason: DisconnectReason::new("as it likes") });
    }

    fn request(&mut self) {
        let rows = self.rng.random_range(1..4);
        let inputs = if self.rng.random() { vec![vec![0; INPUT * rows].into()] } else { vec![] };
        let slo = Span::from_millis(self.rng.random_range(1..100));
        let (model, waited) = (self.rng.random_range(0..2), Span::ZERO);
        let request = CheckedRequest {
            model,
            rows,
            inputs,
            slo,
            waited,
            priority: 0,
            application: proto::Application::NONE,
            client: None,
        };
        if let Ok(request) = self.core.handle_request(self.now, &request, &self.arena) {
            self.requests.insert(request);
        }
        let name = self.text();
        let _ = self.core.handle_change(self.now, ModelChange::Load, &name, None);
    }

    fn outputs(&mut self) {
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Connect { to, .. } => {
                    let connection = ConnectionId(self.next_connection);
                    self.next_connection += 1;
                    self.dialled.push(connection);
                    self.core.handle_connecting(to, connection);
                }
                Output::Accept { connection, .. } => {
                    self.waiting.retain(|other| *other != connection);
                    self.links.push(connection);
                }
                Output::Refuse { connection, .. } => self.waiting.retain(|other| *other != connection),
                Output::Disconnect { connection } => {
                    let lists = [&self.dialled, &self.up, &self.waiting, &self.links];
                    if lists.iter().any(|list| list.contains(&connection)) {
                        self.down(connection);
                    }
                }
                Output::Send { frame, .. } => {
                    for message in read_frame::<FrontendToScheduler>(&frame) {
                        let (Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, .. })
                        | Addressed::ModelThread(FrontendToModelThread::Open { task, slot, .. })) = message.unwrap()
                        else {
                            continue;
                        };
                        self.slots.push((task, slot));
                    }
                    if self.slots.len() > 12 {
                        self.slots.drain(..4);
                    }
                }
                Output::Reply { request, .. } => assert!(self.requests.remove(&request), "{request:?} ends twice"),
                Output::ReadModel { name, brought: _ } => {
                    self.core.handle_model_read(&name, Err("there is none".to_owned()));
                }
                Output::ModelChanged { .. } => {}
            }
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..20) {
            0..=2 => self.answer_dialled(),
            3..=5 => self.say(),
            6..=8 => self.link(),
            9..=14 => self.write(),
            15 => self.end(),
            16 | 17 => self.request(),
            18 => {
                let (known, rows) = (self.requests.iter().copied().collect::<Vec<_>>(), self.rng.random_range(1..4));
                if let Some(request) = self.pick(&known) {
                    let inputs = [vec![0; INPUT * rows].into()];
                    self.core.handle_inputs(self.now, request, &inputs, &self.arena);
                }
            }
            _ => self.now += Span(self.rng.random_range(0..20_000_000)),
        }
        self.core.handle_timeout(self.now);
        self.outputs();
        self.obeyed.insert(self.core.obeys().epoch);
        assert!(self.core.early.len() <= 3 && self.core.links.len() <= 3 && self.core.fenced.len() <= FENCED_MAX);
    }
}

#[test]
fn a_hostile_scheduler_and_hostile_backends_break_nothing() {
    let (mut answered, mut takeovers) = (0, 0);
    for seed in 0..400 {
        eprintln!("seed {seed}");
        let mut attack = Attack::new(seed);
        (0..STEPS).for_each(|_| attack.step());
        answered += attack.core.counters().answered;
        // Besides nobody, and the first.
        takeovers += attack.obeyed.len().saturating_sub(2);
        // All that is open ends, at the latest when it is given up.
        attack.now += Span::from_millis(10_000);
        attack.core.handle_timeout(attack.now);
        attack.outputs();
        assert!(attack.requests.is_empty(), "seed {seed}: {:?}", attack.requests);
    }
    assert!(answered > 200, "only {answered} answers came through: the attack does not reach far");
    assert!(takeovers > 100, "only {takeovers} further claims were obeyed");
}

/// Regression: a welcome with an id that no task id can name was a panic with the first request.
#[test]
fn an_id_that_tasks_cannot_name_ends_the_session() {
    let mut attack = Attack::new(0);
    attack.core.handle_timeout(attack.now);
    attack.outputs();
    let model_threads = ModelThreads { addresses: vec![], pass: 1 };
    let welcome = encode(&FrontendWelcome { frontend: FrontendId(1 << 24), model_threads, claim: CLAIM });
    let connection = attack.dialled[0];
    attack.event(Event::Connected { connection, welcome });
    assert!(!attack.core.has_scheduler());
    attack.request();
}

/// Regression: all that a scheduler said of models was kept, however much it was.
#[test]
fn what_a_scheduler_says_of_models_is_bounded() {
    let mut table = ModelTable::new(vec![]);
    let (model_thread, network) = (ModelThreadId(0), NetworkTimes::default());
    let offer =
        Offer { id: ModelId(0), model_thread, gpus: 1, least_latency: Span::ZERO, batching: Span::ZERO, network };
    let long = "n".repeat(257);
    assert!(!table.handle_offer(&long, "1", offer) && !table.handle_offer("n", &long, offer));
    assert!(!table.handle_state(&long, (ModelState::Serving, 7), None));
    let brought = |bytes| Some(Brought { config: "c".repeat(bytes), files: None });
    assert!(!table.handle_state("n", (ModelState::Serving, 7), brought(12 * 1024 + 1)));
    let kept = format!("{table:?}").len();
    assert!(kept < 1_000, "{kept} bytes");
    let served = (ModelState::Serving, 7);
    let kept = (0..1_100).filter(|number| table.handle_state(&format!("c{number}"), served, brought(9)));
    assert_eq!(kept.count(), 1_024, "configurations of clients");
    for number in 0..70_000 {
        table.handle_state(&number.to_string(), (ModelState::Serving, 7), None);
    }
    assert!(
        !table.handle_state("one more", (ModelState::Serving, 7), None)
            && table.handle_state("5", (ModelState::Serving, 8), None)
    );
}
