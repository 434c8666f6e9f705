//! A backend process's worth of threads against a scheduler and a frontend that are played here, over real sockets:
//! held- out digits go through arena, READ, batch, ONNX, WRITE and back.
#![allow(clippy::disallowed_methods)] // The backend has a thread of its own.

use std::{
    collections::{BTreeMap, VecDeque},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use backend::{
    config::{Config, Emulate, Placement},
    drive::run,
    error::BackendError,
};
use proto::{
    BackendId, Claim, Epoch, Era, FrontendId, LinkId, LinkPass, LoadId, ModelId, PlanId, SlotDescriptor, Span, TaskId,
    Timestamp,
    backend_to_frontend::{ANSWER_HEADER_BYTES, AnswerHeader, AnswerStatus, LinkHello, LinkWelcome},
    backend_to_scheduler::{
        BackendHello, BackendToControl, BackendToModelThread, BackendToScheduler, LoadOutcome, PlanOutcome, Undelivered,
    },
    clock::ClockReply,
    frame::{Addressed, FrameWriter, read_frame},
    hello::{ModelThreads, SchedulerHello},
    scheduler_to_backend::{BackendWelcome, BatchPlan, PlannedTask, SchedulerToBackend},
    slot::{GUARD_BYTES, ImmediateData, guard_word},
    stages::{AnswerStamps, SchedulerStamps},
};
use transport::{
    Access, Address, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, LocalPath, NetworkConfig, ROCE_PORT,
    Region, random_loopback,
};

#[cfg(feature = "cuda")]
#[path = "serve/gpus.rs"]
mod gpus;

const SECRET: &str = "the cluster's secret";
const FRONTEND: FrontendId = FrontendId(2);
/// What the frontend is to be shown.
const PASS: LinkPass = LinkPass(0x77);
/// Our scheduler is the primary.
const CLAIM: Claim = Claim { era: Era(1), epoch: Epoch { number: 1, scheduler: 0 } };
const IMAGE_BYTES: usize = 64 * 4;
const CLASSES: usize = 10;
const SLOTS: usize = 450;
const ANSWER_BYTES: usize = ANSWER_HEADER_BYTES + CLASSES * 4;
const ANSWERS_AT: usize = SLOTS * IMAGE_BYTES;
const GUARDS_AT: usize = (ANSWERS_AT + SLOTS * ANSWER_BYTES).next_multiple_of(GUARD_BYTES);
/// Nothing here takes nearly as long; a test that hangs must end.
const PATIENCE: Span = Span::from_millis(60_000);

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
}

fn endpoint(ip: Ipv4Addr) -> Endpoint {
    let path = testing::local_path().map_or(LocalPath::Ring, |path| path.parse().unwrap());
    let config = EndpointConfig::soft((ip, ROCE_PORT).into()).with_local_path(path);
    Endpoint::open(config.listening((ip, 0).into()).with_secret(SECRET)).unwrap()
}

/// A scheduler that is not the primary.
struct Standby {
    scheduler: Endpoint,
    to_backend: Option<ConnectionId>,
}

/// A scheduler and a frontend, and the backend that they talk with.
struct Cluster {
    clock: Clock,
    started_at: Timestamp,
    scheduler: Endpoint,
    standby: Option<Standby>,
    frontend: Endpoint,
    arena: Region,
    /// The backend's connections to both.
    to_backend: Option<ConnectionId>,
    link: Option<ConnectionId>,
    hello: Option<BackendHello>,
    joins: u32,
    reports: VecDeque<BackendToScheduler>,
    /// By slot.
    answers: BTreeMap<usize, Answer>,
    stop: Arc<AtomicBool>,
    backend: Option<JoinHandle<Result<(), BackendError>>>,
}

impl Cluster {
    fn start(change: impl FnOnce(&mut Config)) -> Self {
        Self::start_with(None, change)
    }

    /// With another scheduler, which the backend knows, too.
    fn start_with(standby: Option<Standby>, change: impl FnOnce(&mut Config)) -> Self {
        Self::start_running(standby, change, run)
    }

    /// With another way to run the backend.
    fn start_running(
        standby: Option<Standby>,
        change: impl FnOnce(&mut Config),
        run: impl FnOnce(&Config, &AtomicBool) -> Result<(), BackendError> + Send + 'static,
    ) -> Self {
        let clock = Clock::start();
        let scheduler = endpoint(random_loopback());
        let frontend = endpoint(random_loopback());
        let arena = Region::allocate(GUARDS_AT + SLOTS * GUARD_BYTES).unwrap();
        let mut config = Config {
            scheduler: scheduler.listen_address().map(Address::from),
            schedulers: vec![],
            repository: models(),
            strict: false,
            load_files: None,
            executor: repository::Processor::default(),
            precision: repository::Precision::default(),
            gpus: 2.into(),
            lanes: None,
            share_gpu: false,
            gpu_direct: false,
            staging_bytes: None,
            onnxruntime: backend::config::OnnxRuntime::default(),
            placement: Placement::Table(BTreeMap::from([("digits".into(), vec![0, 1])])),
            load_models: None,
            emulate: None,
            gpu_memory_mb: None,
            pinned: vec![],
            pcie_gbps: backend::config::default_pcie_gbps(),
            host_memory_mb: None,
            disk_gbps: backend::config::default_disk_gbps(),
            read_budget_bytes: 0,
            connections_max: 8,
            program_metrics: backend::config::default_program_metrics(),
            admin: None,
            drain_timeout_ms: 200,
            network: NetworkConfig::new(SECRET),
        };
        if let Some(standby) = &standby {
            config.schedulers.extend(config.scheduler.take());
            config.schedulers.extend(standby.scheduler.listen_address().map(Address::from));
        }
        change(&mut config);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let backend = std::thread::spawn(move || run(&config, &stopped));
        Self {
            clock,
            started_at: clock.now(),
            scheduler,
            standby,
            frontend,
            arena,
            to_backend: None,
            link: None,
            hello: None,
            joins: 0,
            reports: VecDeque::new(),
            answers: BTreeMap::new(),
            stop,
            backend: Some(backend),
        }
    }

    /// Moves packets until `done`.
    fn run_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        while !done(self) {
            let now = self.clock.now();
            assert!(now - self.started_at < PATIENCE, "waited too long for {what}");
            let mut busy = self.scheduler.drive(now) | self.frontend.drive(now);
            while let Some(event) = self.scheduler.poll_event() {
                busy = true;
                self.handle_scheduler_event(event);
            }
            if let Some(mut standby) = self.standby.take() {
                busy |= standby.scheduler.drive(now);
                while let Some(event) = standby.scheduler.poll_event() {
                    busy = true;
                    self.handle_standby_event(&mut standby, event);
                }
                self.standby = Some(standby);
            }
            while let Some(event) = self.frontend.poll_event() {
                busy = true;
                self.handle_frontend_event(event);
            }
            if !busy {
                self.scheduler.wait(now, now + Span::from_micros(100));
            }
        }
    }

    fn handle_scheduler_event(&mut self, event: Event) {
        match event {
            Event::Incoming { connection, hello, .. } => {
                let SchedulerHello::Backend(hello) = wincode::deserialize(&hello).unwrap() else {
                    panic!("a backend says that it is one")
                };
                self.hello = Some(hello);
                self.joins += 1;
                let welcome = BackendWelcome {
                    backend: BackendId(10 + self.joins),
                    models: vec![ModelId(5)],
                    model_threads: ModelThreads::default(),
                    claim: CLAIM,
                };
                self.scheduler.accept(self.clock.now(), connection, wincode::serialize(&welcome).unwrap());
                self.to_backend = Some(connection);
                let link_address = self.frontend.listen_address().unwrap().to_string();
                self.tell(&SchedulerToBackend::FrontendJoined { frontend: FRONTEND, link_address, pass: PASS });
            }
            Event::Message { frame, .. } => {
                for message in read_frame::<BackendToScheduler>(&frame) {
                    self.handle_report(message.unwrap());
                }
            }
            Event::Disconnected { .. } => self.to_backend = None,
            other => panic!("{other:?}"),
        }
    }

    fn handle_standby_event(&mut self, standby: &mut Standby, event: Event) {
        let Event::Incoming { connection, hello, .. } = event else { return };
        let SchedulerHello::Backend(hello) = wincode::deserialize(&hello).unwrap() else {
            panic!("a backend says that it is one")
        };
        let backend = hello.known_as.expect("the primary has named it");
        let claim = Claim { epoch: Epoch::NONE, ..CLAIM };
        let (models, model_threads) = (vec![ModelId(6)], ModelThreads::default());
        let welcome = BackendWelcome { backend, models, model_threads, claim };
        standby.scheduler.accept(self.clock.now(), connection, wincode::serialize(&welcome).unwrap());
        standby.to_backend = Some(connection);
    }

    /// The standby becomes the primary. Yields the former one.
    fn take_over(&mut self, epoch: Epoch) -> (Endpoint, ConnectionId) {
        let standby = self.standby.take().unwrap();
        let former = std::mem::replace(&mut self.scheduler, standby.scheduler);
        let to_former = std::mem::replace(&mut self.to_backend, standby.to_backend).unwrap();
        let link_address = self.frontend.listen_address().unwrap().to_string();
        self.tell(&SchedulerToBackend::FrontendJoined { frontend: FRONTEND, link_address, pass: PASS });
        self.tell(&SchedulerToBackend::Takeover { epoch });
        (former, to_former)
    }

    /// Keeps what tests wait for. Batches are measured whenever nothing is planned, so that may be told at any time.
    fn handle_report(&mut self, message: BackendToScheduler) {
        let is_obeying = message == (Addressed::Control(BackendToControl::Obeys { epoch: CLAIM.epoch }));
        if is_obeying || matches!(message, Addressed::Control(BackendToControl::Measured { .. })) {
            return;
        }
        let Addressed::Control(BackendToControl::ClockRequest { sent_at }) = message else {
            return self.reports.push_back(message);
        };
        let now = self.clock.now();
        self.tell(&SchedulerToBackend::Clock(ClockReply { sent_at, received_at: now, replied_at: now }));
    }

    fn handle_frontend_event(&mut self, event: Event) {
        match event {
            Event::Incoming { connection, hello, .. } => {
                let hello: LinkHello = wincode::deserialize(&hello).unwrap();
                assert_eq!((hello.backend, hello.frontend), (BackendId(10 + self.joins), FRONTEND));
                assert_eq!((hello.epoch, hello.pass), (CLAIM.epoch, PASS));
                // As over a device without windows.
                let arena = (&self.arena, Access { remote_read: true, remote_write: true });
                self.frontend.accept_opening(self.clock.now(), connection, arena, |key| {
                    let welcome = LinkWelcome {
                        arena_address: key.address,
                        arena_bytes: self.arena.len() as u64,
                        arena_rkey: key.rkey,
                        guards_offset: GUARDS_AT as u64,
                        guards_rkey: key.rkey,
                    };
                    wincode::serialize(&welcome).unwrap()
                });
                self.link = Some(connection);
            }
            Event::Immediate { immediate, bytes, .. } => self.take(ImmediateData::unpack(immediate), bytes as usize),
            Event::Disconnected { .. } => self.link = None,
            other => panic!("{other:?}"),
        }
    }

    fn tell(&mut self, message: &SchedulerToBackend) {
        let mut writer = FrameWriter::default();
        writer.push(message).unwrap();
        self.scheduler.send(self.to_backend.unwrap(), &writer.take().unwrap()).unwrap();
    }

    /// Asks for a load, and yields how it ended.
    fn load(&mut self, load: u64, name: &str) -> LoadOutcome {
        let load = LoadId(load);
        self.tell(&SchedulerToBackend::Load { load, name: name.into(), brought: None, is_placed: false });
        let mut outcome = None;
        self.run_until("the load", |cluster| {
            cluster.reports.retain(|report| match report {
                Addressed::Control(BackendToControl::Loaded { load: ended, outcome: found }) if *ended == load => {
                    outcome = Some(found.clone());
                    false
                }
                _ => true,
            });
            outcome.is_some()
        });
        outcome.unwrap()
    }

    fn await_linked(&mut self) {
        self.run_until("the link", |cluster| {
            let is_linked =
                |report| matches!(report, Addressed::Control(BackendToControl::Linked { frontend: FRONTEND, .. }));
            cluster.reports.pop_front().is_some_and(is_linked)
        });
    }

    /// Sends a plan for `slots`, to start within the next second.
    fn plan(&mut self, id: u64, gpu_index: u32, slots: std::ops::Range<usize>) {
        self.plan_with(id, gpu_index, slots, |slot| slot);
    }

    fn plan_with(
        &mut self,
        id: u64,
        gpu_index: u32,
        slots: std::ops::Range<usize>,
        change: impl Fn(SlotDescriptor) -> SlotDescriptor,
    ) {
        let now = self.clock.now();
        let task = |slot: usize| PlannedTask {
            task: TaskId::new(FRONTEND, slot as u64),
            attempt: 3,
            slot: change(SlotDescriptor {
                slot: slot as u32,
                input_offset: (slot * IMAGE_BYTES) as u64,
                input_bytes: IMAGE_BYTES as u32,
                answer_offset: (ANSWERS_AT + slot * ANSWER_BYTES) as u64,
                answer_bytes_max: ANSWER_BYTES as u32,
                key: SlotDescriptor::NO_KEY,
            }),
            stamps: SchedulerStamps { queued_at: now, due_at: now, granted_at: now },
        };
        self.tell(&SchedulerToBackend::Plan(BatchPlan {
            plan: PlanId(id),
            gpu_index,
            model: ModelId(5),
            exec_at: now + Span::from_millis(1),
            latest: now + Span::from_millis(10_000),
            tasks: slots.map(task).collect(),
            sample: None,
        }));
    }

    /// Takes the answers of a run, as its frontend would.
    fn take(&mut self, immediate: ImmediateData, written: usize) {
        let first = immediate.slot as usize;
        let mut bytes = vec![0; written];
        self.arena.read(ANSWERS_AT + first * ANSWER_BYTES, &mut bytes);
        let header = AnswerHeader::parse(&bytes).unwrap();
        assert_eq!((header.task, header.attempt), (TaskId::new(FRONTEND, first as u64).0, immediate.attempt));
        assert_eq!(written, ANSWER_HEADER_BYTES + header.payload_bytes as usize);
        let outputs: Vec<f32> =
            bytes[ANSWER_HEADER_BYTES..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        for task in 0..usize::from(header.tasks) {
            // A task that was not executed has none.
            let output = outputs.chunks_exact(CLASSES).nth(task).unwrap_or_default().to_vec();
            assert!(self.answers.insert(first + task, Answer { header, output }).is_none(), "answered twice");
        }
    }
}

/// The answer of one task, and the header of its run.
struct Answer {
    header: AnswerHeader,
    output: Vec<f32>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let result = self.backend.take().unwrap().join();
        if !std::thread::panicking() {
            result.expect("the backend panicked").expect("the backend failed");
        }
    }
}

fn held_out() -> Vec<(usize, Vec<u8>)> {
    let text = std::fs::read_to_string(models().join("digits/heldout.csv")).unwrap();
    let image = |line: &str| {
        let mut values = line.split(',').map(|value| value.parse::<u8>().unwrap());
        let label = usize::from(values.next().unwrap());
        (label, values.flat_map(|pixel| f32::from(pixel).to_le_bytes()).collect())
    };
    text.lines().map(image).collect()
}

/// Runs all held-out images in batches of different sizes, on both GPUs; how many were classified rightly.
fn classify(cluster: &mut Cluster) -> usize {
    let images = held_out();
    assert_eq!(images.len(), SLOTS);
    for (slot, (_, image)) in images.iter().enumerate() {
        cluster.arena.write(slot * IMAGE_BYTES, image);
    }
    cluster.await_linked();
    let (mut from, mut right) = (0, 0);
    for id in 0.. {
        let slots = from..SLOTS.min(from + 1 + (id as usize * 17) % 64);
        let batch = slots.len();
        cluster.plan(id, id as u32 % 2, slots.clone());
        cluster.run_until("the answers", |cluster| cluster.answers.len() == batch && cluster.reports.len() == 2);
        let answers = std::mem::take(&mut cluster.answers);
        assert!(answers.keys().copied().eq(slots.clone()));
        check_reports(&mut cluster.reports, PlanId(id));
        for (slot, Answer { header, output }) in answers {
            // What lies in neighbouring slots comes by one WRITE.
            assert_eq!((header.status, usize::from(header.tasks)), (AnswerStatus::Done, batch));
            let AnswerStamps { exec_at_ns, fetched_at_ns, planned_at_ns, started_at_ns, finished_at_ns, .. } =
                header.stamps;
            assert!(planned_at_ns <= fetched_at_ns && exec_at_ns <= started_at_ns && started_at_ns < finished_at_ns);
            assert_eq!((header.attempt, header.gpu, usize::from(header.batch_size)), (3, id as u16 % 2, batch));
            let best = (0..CLASSES).max_by(|&a, &b| output[a].total_cmp(&output[b]));
            right += usize::from(best == Some(images[slot].0));
        }
        from += batch;
        if from == SLOTS {
            break;
        }
    }
    right
}

fn check_reports(reports: &mut VecDeque<BackendToScheduler>, id: PlanId) {
    match (reports.pop_front(), reports.pop_front()) {
        (
            Some(Addressed::ModelThread(BackendToModelThread::PlanDone {
                plan,
                outcome: PlanOutcome::Executed { started_at, finished_at },
                undelivered: lost,
                ..
            })),
            Some(Addressed::ModelThread(BackendToModelThread::Answered { plan: answered, undelivered })),
        ) => {
            assert_eq!((plan, answered), (id, id));
            assert!(started_at < finished_at && lost.is_empty() && undelivered.is_empty());
        }
        other => panic!("{other:?}"),
    }
}

/// As `models/digits/README.md` records it from training.
const RIGHT: usize = 440;

#[test]
fn held_out_digits_are_classified_as_in_training() {
    let mut cluster = Cluster::start(|_| {});
    assert_eq!(classify(&mut cluster), RIGHT);
    let hello = cluster.hello.as_ref().unwrap();
    assert_eq!((hello.gpus, hello.models.len(), &*hello.models[0].name), (2, 1, "digits"));
    assert_eq!((hello.models[0].profile.max_batch(), &hello.models[0].gpu_indexes), (64, &vec![0, 1]));
}

#[test]
fn every_test_holds_by_udp_too() {
    testing::run_again_by_udp(None);
}

#[test]
fn of_guarded_inputs_those_are_fetched_that_are_there() {
    let mut cluster = Cluster::start(|_| {});
    let images = held_out();
    for slot in [1, 3, 4, 7] {
        cluster.arena.write(slot * IMAGE_BYTES, &images[slot].1);
        let word = guard_word(TaskId::new(FRONTEND, slot as u64));
        cluster.arena.write(GUARDS_AT + slot * GUARD_BYTES, &word.to_le_bytes());
    }
    cluster.await_linked();
    cluster.plan_with(1, 0, 0..8, SlotDescriptor::guarded);
    cluster.run_until("the answers", |cluster| cluster.answers.len() == 4 && cluster.reports.len() == 6);
    let late = |slot| {
        Addressed::ModelThread(BackendToModelThread::InputLate { plan: PlanId(1), task: TaskId::new(FRONTEND, slot) })
    };
    assert!(cluster.reports.drain(..4).eq([0, 2, 5, 6].map(late)));
    check_reports(&mut cluster.reports, PlanId(1));
    let best = |output: &[f32]| (0..CLASSES).max_by(|&a, &b| output[a].total_cmp(&output[b]));
    for (slot, Answer { header, output }) in std::mem::take(&mut cluster.answers) {
        assert_eq!((header.status, header.batch_size), (AnswerStatus::Done, 4));
        assert_eq!(best(&output), Some(images[slot].0));
    }
}

#[test]
fn a_network_that_loses_duplicates_reorders_and_corrupts_changes_no_answer() {
    let faults = Faults { loss: 0.03, duplicate: 0.02, reorder: 0.02, corrupt: 0.02 };
    let mut cluster = Cluster::start(|config| config.network.faults = faults);
    assert_eq!(classify(&mut cluster), RIGHT);
}

#[test]
fn a_backend_that_loses_its_scheduler_joins_again_and_serves_again() {
    let mut cluster = Cluster::start(|_| {});
    cluster.await_linked();
    cluster.scheduler.disconnect(cluster.to_backend.unwrap());
    cluster.run_until("the backend to join again", |cluster| cluster.joins == 2);
    assert_eq!(classify(&mut cluster), RIGHT);
}

#[test]
fn what_executes_when_another_scheduler_takes_over_is_answered_over_the_same_link() {
    let standby = Standby { scheduler: endpoint(random_loopback()), to_backend: None };
    let emulate = Some(Emulate { alpha_ms: 1.0, beta_ms: 300.0 });
    let mut cluster = Cluster::start_with(Some(standby), |config| config.emulate = emulate);
    cluster.await_linked();
    let has_joined = |cluster: &mut Cluster| cluster.standby.as_ref().is_some_and(|other| other.to_backend.is_some());
    cluster.run_until("the standby's session", has_joined);
    cluster.plan(1, 0, 0..3);
    let started_at = cluster.clock.now();
    cluster.run_until("the start", |cluster| cluster.clock.now() - started_at > Span::from_millis(100));

    let epoch = Epoch { number: 2, scheduler: 1 };
    let (mut former, to_former) = cluster.take_over(epoch);
    let obeys = Addressed::Control(BackendToControl::Obeys { epoch });
    cluster.run_until("the backend to obey", |cluster| cluster.reports.contains(&obeys));
    cluster.reports.retain(|report| !matches!(report, Addressed::Control(BackendToControl::Linked { .. })));
    let Some(Addressed::Control(BackendToControl::Unfinished {
        plan,
        gpu_index: 0,
        model: ModelId(6),
        frees_at,
        tasks,
    })) = cluster.reports.pop_front()
    else {
        panic!("it has a plan")
    };
    let named: Vec<_> = (0..3).map(|slot| (TaskId::new(FRONTEND, slot), 3)).collect();
    assert_eq!((tasks, frees_at.is_some(), cluster.reports.pop_front()), (named, true, Some(obeys)));

    cluster.run_until("the answers", |cluster| cluster.answers.len() == 3 && cluster.reports.len() == 2);
    check_reports(&mut cluster.reports, plan);
    assert!(cluster.answers.values().all(|answer| answer.header.status == AnswerStatus::Done));
    assert_eq!((cluster.joins, cluster.link.is_some()), (1, true));
    let is_gone = |event| matches!(event, Event::Disconnected { connection, .. } if connection == to_former);
    cluster.run_until("the former primary to be left", |cluster| {
        former.drive(cluster.clock.now());
        std::iter::from_fn(|| former.poll_event()).any(is_gone)
    });
}

#[test]
fn a_link_that_breaks_is_reported_and_opened_again() {
    let mut cluster = Cluster::start(|_| {});
    cluster.await_linked();
    cluster.frontend.disconnect(cluster.link.unwrap());
    let unlinked = Addressed::Control(BackendToControl::Unlinked { frontend: FRONTEND });
    cluster.run_until("the broken link to be noticed", |cluster| cluster.reports.front() == Some(&unlinked));
    cluster.reports.clear();
    assert_eq!(classify(&mut cluster), RIGHT);
}

#[test]
fn models_are_loaded_beside_what_is_served_and_unloaded() {
    let mut cluster = Cluster::start(|_| {});
    cluster.run_until("the backend", |cluster| cluster.to_backend.is_some());
    assert_eq!(cluster.load(1, "resnet50"), LoadOutcome::NotPlaced);
    for name in ["nothing", "", "..", "../models/digits", "/"] {
        let LoadOutcome::Failed(reason) = cluster.load(2, name) else { panic!("{name} was loaded") };
        assert!(reason.contains("found no model"), "{reason}");
    }
    let LoadOutcome::Ready { offer, is_last: true } = cluster.load(3, "digits") else { panic!("digits is whole") };
    assert_eq!((offer.version.as_str(), &offer.gpu_indexes[..]), ("1", &[0, 1][..]));
    assert_eq!(classify(&mut cluster), RIGHT, "what was hosted still is");
    cluster.tell(&SchedulerToBackend::Host { load: LoadId(3), version: "1".into(), model: ModelId(5) });
    cluster.plan(98, 1, 0..3);
    cluster.run_until("the answers", |cluster| cluster.answers.len() == 3 && cluster.reports.len() == 2);
    check_reports(&mut cluster.reports, PlanId(98));
    assert!(cluster.answers.values().all(|answer| answer.header.status == AnswerStatus::Done));
    cluster.tell(&SchedulerToBackend::Unload { model: ModelId(5) });
    let gone = Addressed::Control(BackendToControl::Unloaded { model: ModelId(5) });
    cluster.run_until("the unload", |cluster| cluster.reports.pop_front().as_ref() == Some(&gone));
    cluster.plan(99, 0, 0..1);
    cluster.run_until("the refusal", |cluster| cluster.reports.len() == 2);
    let undelivered = vec![Undelivered { task: TaskId::new(FRONTEND, 0), link: LinkId::NONE }];
    let Some(Addressed::ModelThread(BackendToModelThread::PlanDone { undelivered: found, .. })) =
        cluster.reports.pop_front()
    else {
        panic!()
    };
    assert_eq!(found, undelivered);
}

#[test]
fn tasks_of_a_frontend_that_left_are_undelivered_and_its_memory_is_left_alone() {
    let mut cluster = Cluster::start(|config| config.emulate = Some(Emulate { alpha_ms: 1.0, beta_ms: 300.0 }));
    cluster.await_linked();
    cluster.plan(1, 0, 0..3);
    // Let it start, then leave while it executes.
    let started_at = cluster.clock.now();
    cluster.run_until("the start", |cluster| cluster.clock.now() - started_at > Span::from_millis(100));
    cluster.tell(&SchedulerToBackend::FrontendLeft { frontend: FRONTEND });
    cluster.run_until("the end of the plan", |cluster| cluster.reports.len() == 2);
    let undelivered = match cluster.reports.pop_front() {
        Some(Addressed::ModelThread(BackendToModelThread::PlanDone { undelivered, .. })) => undelivered,
        other => panic!("{other:?}"),
    };
    let failed = |slot| Undelivered { task: TaskId::new(FRONTEND, slot), link: LinkId(1) };
    assert_eq!(undelivered, (0..3).map(failed).collect::<Vec<_>>());
    assert!(cluster.answers.is_empty() && cluster.link.is_none());
    let mut answers = vec![0; 3 * ANSWER_BYTES];
    cluster.arena.read(ANSWERS_AT, &mut answers);
    assert!(answers.iter().all(|&byte| byte == 0));
}
