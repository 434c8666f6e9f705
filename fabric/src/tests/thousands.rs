//! Thousands of models: the cores of one member of each role join over connections that hold as little as real ones,
//! and whose readers take in one frame a turn.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use backend::{
    core::{Core as BackendCore, CoreConfig as BackendConfig, Output as BackendOutput, Peer},
    executor::{Basis, Emulated, Loaded},
    staging::{ModelShape, Staging},
};
use frontend::{
    arena::Arena,
    core::{Core as FrontendCore, CoreConfig as FrontendConfig, Output as FrontendOutput},
};
use proto::{
    BackendId, FrontendId, LatencyProfile, Span, Timestamp, Weights,
    backend_to_frontend::LinkWelcome,
    backend_to_scheduler::BackendToControl,
    frame::{Addressed, FrameWriter, read_frame},
    hello::{Member, SchedulerHello},
};
use scheduler::{
    advice::AdviceConfig,
    cluster::{Cluster, ClusterConfig, ClusterOutput, Port},
    control::SuccessionConfig,
    messages::NetworkBudget,
    policy::Policy,
    shard::Violation,
};
use transport::{ConnectionId, Event};
use wincode::{SchemaWrite, config::DefaultConfig};

use crate::{models, scheduler::encode};

const MODELS: usize = 10_000;
const NAME_BYTES: usize = 200;
/// Two GPUs, of which one fails and comes back.
const GPUS: u32 = 2;
/// As `max_batch_size` 32 has it: hellos with all models would have more than 5 MB.
const BATCH_MAX: usize = 32;
/// What a connection holds of frames that have not been taken in: three quarters of the transport's queue.
const RING_BYTES: usize = 384 * 1024;
const FRAMES_MAX: usize = transport::WORK_MAX;

const SCHEDULER: ConnectionId = ConnectionId(1);
const LINK: ConnectionId = ConnectionId(2);
const ARENA_BYTES: usize = 8 << 20;

/// One direction of a connection.
#[derive(Default)]
struct Wire {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    bytes_max: usize,
}

impl Wire {
    fn push(&mut self, frame: Vec<u8>) {
        self.bytes += frame.len();
        self.bytes_max = self.bytes_max.max(self.bytes);
        self.frames.push_back(frame);
        assert!(self.bytes <= RING_BYTES && self.frames.len() <= FRAMES_MAX, "{} bytes wait", self.bytes);
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len();
        Some(frame)
    }
}

/// One member and the scheduler.
#[derive(Default)]
struct Line {
    to_member: Wire,
    to_scheduler: Wire,
    writer: FrameWriter,
}

impl Line {
    fn tell<M: SchemaWrite<DefaultConfig, Src = M>>(&mut self, message: &M) {
        let full = self.writer.push(message).expect("every message fits a frame");
        full.into_iter().for_each(|frame| self.to_member.push(frame));
    }

    fn flush(&mut self) {
        self.writer.take().into_iter().for_each(|frame| self.to_member.push(frame));
    }
}

/// No request is made.
struct NoArena;

impl Arena for NoArena {
    fn write(&self, _: usize, _: &[u8]) {
        panic!("no request is made");
    }

    fn read(&self, _: usize, _: &mut [u8]) {
        panic!("no request is made");
    }

    fn open(&self, _: Range<usize>, _: Range<usize>) -> u32 {
        panic!("no request is made");
    }

    fn close(&self, _: u32) {
        panic!("no request is made");
    }
}

struct World {
    now: Timestamp,
    cluster: Cluster,
    backend: BackendCore,
    frontend: FrontendCore,
    backend_id: BackendId,
    frontend_id: FrontendId,
    to_backend: Line,
    to_frontend: Line,
    /// The frontend takes nothing in.
    is_stalled: bool,
}

fn name(number: usize) -> String {
    format!("{number:0NAME_BYTES$}")
}

fn model(number: usize) -> repository::Model {
    let (name, max_batch) = (name(number), BATCH_MAX);
    repository::Model { name, max_batch, rows_max: max_batch, ..models::model(models::MODELS[0].0, 1) }
}

fn loaded(number: usize) -> Arc<Loaded> {
    let (model, profile) = (model(number), LatencyProfile::linear(0.5, 3.0, BATCH_MAX).unwrap());
    let executor = Arc::new(Emulated::new(&model, profile.clone()));
    let (shape, gpu_indexes) = (ModelShape::from(&model), (0..GPUS).collect());
    let (cost, weights, basis, is_pinned) = (None, Weights::default(), Basis::Sizes, false);
    Arc::new(Loaded { model, shape, gpu_indexes, executor, profile, cost, basis, weights, is_pinned, is_guest: false })
}

impl World {
    fn new() -> Self {
        let cluster = ClusterConfig {
            policy: Policy::of_cluster("downbeat").unwrap(),
            budget: NetworkBudget {
                ctrl: Span::from_millis(2),
                data_per_task: Span::from_micros(300),
                jitter: Span::ZERO,
            },
            data_per_megabyte: Span::ZERO,
            resp: Span::from_millis(3),
            queue_max: 256,
            tasks_per_frontend_max: 256,
            reestimate: false,
            model_threads: 1,
            addresses: Vec::new(),
            succession: SuccessionConfig::ALONE,
            first_id: 0,
            gpu_prices: BTreeMap::new(),
            advice: AdviceConfig::default(),
            placement: None,
        };
        let models: Vec<_> = (0..MODELS).map(loaded).collect();
        let staging = Staging::new(GPUS as usize, &[models[0].shape], 0);
        let backend = BackendConfig {
            name: "backend".to_owned(),
            schedulers: vec![([127, 0, 0, 1], 1).into()],
            token: 1,
            staging,
            lkey: 1,
            landings: Default::default(),
            memory_pages: None,
            host_pages: None,
            is_auto: false,
        };
        let arena_bytes = ARENA_BYTES as u64;
        let frontend = FrontendConfig {
            name: "frontend".to_owned(),
            arena_bytes: ARENA_BYTES,
            arena: LinkWelcome { arena_address: 0, arena_bytes, arena_rkey: 1, guards_offset: 0, guards_rkey: 0 },
            link_address: "127.0.0.1:2".to_owned(),
            links_max: 16,
            schedulers: 1,
            token_seed: 1,
        };
        Self {
            now: Timestamp(0),
            cluster: Cluster::new(&cluster, [7; 32]).unwrap(),
            backend: BackendCore::new(backend, models),
            frontend: FrontendCore::new(frontend, (0..MODELS).map(model).collect()).unwrap(),
            backend_id: BackendId::NOBODY,
            frontend_id: FrontendId(0),
            to_backend: Line::default(),
            to_frontend: Line::default(),
            is_stalled: false,
        }
    }

    /// Everybody takes in one frame, and says what it has to say.
    fn turn(&mut self) {
        self.now += Span::from_micros(100);
        self.backend.handle_timeout(self.now);
        self.backend_says();
        self.frontend.handle_timeout(self.now);
        self.frontend_says();
        self.scheduler_hears().unwrap();
        self.cluster.handle_timeout(self.now);
        self.scheduler_says();
        if let Some(frame) = self.to_backend.to_member.pop() {
            self.backend.handle_event(self.now, Event::Message { connection: SCHEDULER, frame });
        }
        if !self.is_stalled
            && let Some(frame) = self.to_frontend.to_member.pop()
        {
            self.frontend.handle_event(self.now, Event::Message { connection: SCHEDULER, frame }, &NoArena);
        }
    }

    fn backend_says(&mut self) {
        while let Some(output) = self.backend.poll_output() {
            match output {
                BackendOutput::Connect { peer: Peer::Scheduler(_), hello, .. } => {
                    assert!(hello.len() <= transport::HELLO_BYTES_MAX);
                    let Ok(SchedulerHello::Backend(hello)) = wincode::deserialize(&hello) else { panic!() };
                    let welcome = self.cluster.handle_backend_joined(self.now, hello).unwrap();
                    assert_eq!(self.backend_id, BackendId::NOBODY, "it joins once");
                    self.backend_id = welcome.backend;
                    self.backend.handle_connecting(Peer::Scheduler(0), SCHEDULER);
                    let welcome = encode(&welcome);
                    self.backend.handle_event(self.now, Event::Connected { connection: SCHEDULER, welcome });
                }
                BackendOutput::Connect { peer, hello, .. } => {
                    self.backend.handle_connecting(peer, LINK);
                    let peer = ([127, 0, 0, 1], 3).into();
                    let incoming = Event::Incoming { connection: LINK, peer, hello };
                    self.frontend.handle_event(self.now, incoming, &NoArena);
                }
                BackendOutput::Send { frame, .. } => self.to_backend.to_scheduler.push(frame),
                other => panic!("nothing is planned, and nobody leaves: {other:?}"),
            }
        }
        assert_eq!(self.backend.ended(), None);
    }

    fn frontend_says(&mut self) {
        while let Some(output) = self.frontend.poll_output() {
            match output {
                FrontendOutput::Connect { to, hello } => {
                    let Ok(SchedulerHello::Frontend(hello)) = wincode::deserialize(&hello) else { panic!() };
                    let welcome = self.cluster.handle_frontend_joined(self.now, hello).unwrap();
                    self.frontend_id = welcome.frontend;
                    self.frontend.handle_connecting(to, SCHEDULER);
                    let connected = Event::Connected { connection: SCHEDULER, welcome: encode(&welcome) };
                    self.frontend.handle_event(self.now, connected, &NoArena);
                }
                FrontendOutput::Accept { welcome, .. } => {
                    let welcome = encode(&welcome);
                    self.backend.handle_event(self.now, Event::Connected { connection: LINK, welcome });
                }
                FrontendOutput::Send { frame, .. } => self.to_frontend.to_scheduler.push(frame),
                other => panic!("nothing is asked for, and nobody leaves: {other:?}"),
            }
        }
    }

    fn scheduler_hears(&mut self) -> Result<(), Violation> {
        let (now, thread) = (self.now, proto::ModelThreadId(0));
        if let Some(frame) = self.to_backend.to_scheduler.pop() {
            read_frame(&frame).try_for_each(|message| match message.unwrap() {
                Addressed::Control(message) => self.cluster.handle_backend_to_control(now, self.backend_id, message),
                Addressed::ModelThread(message) => {
                    self.cluster.handle_backend_to_model_thread(now, thread, self.backend_id, message)
                }
            })?;
        }
        if let Some(frame) = self.to_frontend.to_scheduler.pop() {
            read_frame(&frame).try_for_each(|message| match message.unwrap() {
                Addressed::Control(message) => self.cluster.handle_frontend_to_control(now, self.frontend_id, message),
                Addressed::ModelThread(message) => {
                    self.cluster.handle_frontend_to_model_thread(now, thread, self.frontend_id, message)
                }
            })?;
        }
        Ok(())
    }

    fn scheduler_says(&mut self) {
        while let Some(output) = self.cluster.poll_output() {
            match output {
                ClusterOutput::ToFrontend(Port::Control, _, message) => self.to_frontend.tell(&message),
                ClusterOutput::ToBackend(Port::Control, _, message) => self.to_backend.tell(&message),
                other => panic!("nobody is to be closed: {other:?}"),
            }
        }
        self.to_frontend.flush();
        self.to_backend.flush();
    }

    /// How many GPUs the frontend was told of, if of each model the same.
    fn gpus(&self) -> Option<u32> {
        let gpus = |served: &frontend::models::ServedModel| served.offer.map(|offer| offer.gpus);
        let first = gpus(self.frontend.models().get(0));
        self.frontend.models().iter().all(|served| gpus(served) == first).then_some(first?)
    }

    fn set_usable(&mut self, is_usable: bool) {
        let usable = BackendToControl::Usable { gpu_index: 1, is_usable };
        self.cluster.handle_backend_to_control(self.now, self.backend_id, usable).unwrap();
        self.cluster.handle_timeout(self.now);
        self.scheduler_says();
    }

    fn run_until(&mut self, is_over: impl Fn(&Self) -> bool) {
        // As many frames as hold all names, ten times.
        let turns_max = 10 * MODELS * (NAME_BYTES + 8 * BATCH_MAX + 100) / proto::frame::FRAME_BYTES_MAX;
        for _ in 0..turns_max {
            if is_over(self) {
                return;
            }
            self.turn();
        }
        panic!("it is not over after {turns_max} turns");
    }
}

/// What there was to tell of 4,026 models was once more than a connection held: the frontend joined and was closed, for
/// ever.
#[test]
fn ten_thousand_models_join_once_and_a_reader_that_stalls_is_told_what_holds_in_the_end() {
    let mut world = World::new();
    world.run_until(|world| world.gpus() == Some(GPUS));
    assert!(world.frontend.is_model_ready(world.frontend.models().get(MODELS - 1)));
    world.is_stalled = true;
    for round in 0..20 {
        world.set_usable(round % 2 == 1);
        world.set_usable(round % 2 == 0);
        (0..5).for_each(|_| world.turn());
    }
    world.set_usable(false);
    world.is_stalled = false;
    world.run_until(|world| world.gpus() == Some(GPUS - 1));
    let wires = [&world.to_backend, &world.to_frontend].map(|line| [&line.to_member, &line.to_scheduler]);
    let most = wires.map(|wires| wires.map(|wire| wire.bytes_max));
    assert!(world.to_frontend.to_member.bytes_max > 32 * 1024, "pages follow each other without a pause: {most:?}");
    assert_eq!(world.to_frontend.writer.take(), None);
    let left = BackendId(world.backend_id.0);
    world.cluster.handle_disconnected(world.now, Port::Control, Member::Backend(left), "it is over".to_owned());
    world.scheduler_says();
    world.run_until(|world| world.gpus() == Some(0));
}
