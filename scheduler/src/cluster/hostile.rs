//! Members that have proved themselves and then say whatever they like, by a seed, beside one frontend and one backend
//! that keep to the protocol. Nothing panics (sums are checked in tests), whoever breaks the protocol is told so,
//! nobody else is, and once they are gone the others work as before.
//! A failing seed is printed; `DOWNBEAT_SEED=n cargo test -p scheduler hostile` replays it alone.

use std::collections::{BTreeMap, BTreeSet};

use proto::{
    Application, BatchCost, Brought, ChangeId, Epoch, FilesDigest, GpuId, LatencyProfile, LinkId, LoadId, PlanId,
    SlotDescriptor, TaskId, Weights,
    backend_to_scheduler::{
        BackendToScheduler, LoadOutcome, ModelOffer, PlanOutcome, ResidentModel, Undelivered, WeightsOutcome,
    },
    brought::CONFIG_BYTES_MAX,
    frame::Addressed,
    frontend_to_scheduler::{ADDRESS_BYTES_MAX, FrontendToScheduler, ModelChange},
    scheduler_to_backend::BatchPlan,
    weights::WeightsTally,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

const STEPS: usize = 1_000;
const MEMBERS_MAX: usize = 4;
/// The first epoch of a scheduler that is alone.
const EPOCH: Epoch = Epoch { number: 1, scheduler: 0 };

fn slot(number: u32) -> SlotDescriptor {
    SlotDescriptor { slot: number, input_offset: 0, input_bytes: 8, answer_offset: 64, answer_bytes_max: 128, key: 5 }
}

/// A profile as it comes off the wire: nobody has checked it.
fn raw_profile(table: Vec<Span>) -> LatencyProfile {
    wincode::deserialize(&wincode::serialize(&table).unwrap()).unwrap()
}

struct World {
    rng: ChaCha8Rng,
    cluster: Cluster,
    threads: u16,
    now: Timestamp,
    frontends: Vec<FrontendId>,
    backends: Vec<BackendId>,
    /// Plans that hostile backends were given.
    plans: Vec<(BackendId, PlanId)>,
    loads: Vec<LoadId>,
    good: (FrontendId, BackendId),
    next_task: u64,
    /// Of the frontend that keeps to the protocol.
    open: BTreeSet<TaskId>,
    /// Of these, those that hostile backends were given: they may say that they have answered.
    taken: BTreeSet<TaskId>,
    planned: Vec<BatchPlan>,
    /// Of plans that hostile backends reported done, tasks that hostile frontends had dropped, and members thrown out.
    reached: [u64; 3],
}

impl World {
    fn new(seed: u64, threads: u16) -> Self {
        let addresses =
            if threads == 1 { vec![] } else { (0..threads).map(|n| format!("127.0.0.1:{}", n + 1)).collect() };
        // Often enough for some hundred messages to see several.
        let placement = PlacementConfig {
            sub_clusters: 2,
            epoch: Span::from_millis(20),
            moves_max: 2,
            rate_max_rps: None,
            memory_max_bytes: None,
            memory_weight: 1.0,
            pins: BTreeMap::new(),
        };
        let config = ClusterConfig {
            policy: Policy::default(),
            budget: NetworkBudget {
                ctrl: Span::from_micros(300),
                data_per_task: Span::from_micros(10),
                jitter: Span::ZERO,
            },
            data_per_megabyte: Span::from_millis(1),
            resp: Span::from_millis(1),
            queue_max: 16,
            tasks_per_frontend_max: 24,
            reestimate: true,
            model_threads: threads,
            addresses,
            succession: SuccessionConfig::ALONE,
            first_id: 0,
            gpu_prices: BTreeMap::new(),
            advice: AdviceConfig::default(),
            placement: Some(placement),
        };
        let mut world = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            cluster: Cluster::new(&config, [7; 32]).unwrap(),
            threads,
            now: Timestamp(1_000_000_000),
            frontends: Vec::new(),
            backends: Vec::new(),
            plans: Vec::new(),
            loads: Vec::new(),
            good: (FrontendId(0), BackendId(0)),
            next_task: 0,
            open: BTreeSet::new(),
            taken: BTreeSet::new(),
            planned: Vec::new(),
            reached: [0; 3],
        };
        let hello = FrontendHello::new("127.0.0.1:9");
        let welcome = world.cluster.handle_frontend_joined(world.now, hello).unwrap();
        world.connect(Member::Frontend(welcome.frontend), welcome.model_threads.pass);
        let profile = LatencyProfile::linear(1.0, 2.0, 8).unwrap();
        let offer = ModelOffer {
            name: "m".into(),
            version: "1".into(),
            profile,
            input_bytes: 8,
            gpu_indexes: vec![0],
            weights: Weights::default(),
            cost: Some(BatchCost { fixed: Span(1), per_task_ppm: 500_000 }),
            queue_max: vec![0, 3],
            is_guest: false,
        };
        let hello = BackendHello::new(1, vec![offer]);
        let joined = world.cluster.handle_backend_joined(world.now, hello).unwrap();
        world.connect(Member::Backend(joined.backend), joined.model_threads.pass);
        world.good = (welcome.frontend, joined.backend);
        world.tell_good(BackendToControl::Obeys { epoch: EPOCH });
        world.tell_good(BackendToControl::Linked { frontend: welcome.frontend, link: LinkId(1) });
        world
    }

    fn connect(&mut self, member: Member, pass: u64) {
        for thread in (0..self.threads).map(ModelThreadId).filter(|_| self.threads > 1) {
            assert!(!self.cluster.handle_member_connected(self.now, thread, member, pass ^ 1), "a wrong pass");
            assert!(self.cluster.handle_member_connected(self.now, thread, member, pass));
        }
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.rng.random_range(0..from.len())])
    }

    fn epoch(&mut self) -> Epoch {
        if self.rng.random() { EPOCH } else { Epoch { number: self.number(3) as u32, scheduler: self.rng.random() } }
    }

    /// Mostly near what is sensible, otherwise anything, the ends above all.
    fn number(&mut self, sensible: u64) -> u64 {
        match self.rng.random_range(0..8) {
            0 => u64::MAX - self.rng.random_range(0..3),
            1 => self.rng.random(),
            2 => 1 << self.rng.random_range(0..64),
            _ => self.rng.random_range(0..=sensible),
        }
    }

    fn instant(&mut self) -> Timestamp {
        match self.rng.random_range(0..8) {
            0 => Timestamp::NEVER,
            1 => Timestamp::PAST,
            2 => Timestamp(self.rng.random()),
            3 => Timestamp(i64::MAX - 1),
            _ => self.now + Span(self.rng.random_range(-50_000_000..50_000_000)),
        }
    }

    fn span(&mut self) -> Span {
        match self.rng.random_range(0..6) {
            0 => Span(i64::MAX),
            1 => Span(i64::MIN),
            2 => Span(self.rng.random()),
            _ => Span(self.rng.random_range(-1_000..20_000_000)),
        }
    }

    fn text(&mut self, most: usize) -> String {
        let length = [0, 1, 2, most, most + 1, 20_000][self.rng.random_range(0..6)];
        let filler = if self.rng.random() { 'n' } else { '\u{1b}' };
        std::iter::repeat_n(filler, length).collect()
    }

    fn port(&mut self) -> Port {
        let thread = self.rng.random_range(0..=self.threads);
        if self.threads == 1 || thread == self.threads {
            Port::Control
        } else {
            Port::ModelThread(ModelThreadId(thread))
        }
    }

    fn task(&mut self, frontend: FrontendId) -> TaskId {
        match self.rng.random_range(0..40) {
            0 => TaskId(self.rng.random()),
            1 => TaskId::new(self.good.0, self.rng.random_range(0..4)),
            // The same ones again and again.
            _ => TaskId(u64::from(frontend.0) << 40 | self.rng.random_range(0..6)),
        }
    }

    fn model(&mut self) -> ModelId {
        ModelId(self.number(3) as u32)
    }

    fn plan(&mut self, backend: BackendId) -> PlanId {
        let known: Vec<PlanId> = self.plans.iter().filter(|given| given.0 == backend).map(|given| given.1).collect();
        let random = PlanId(self.number(40));
        // Old ones are mostly over.
        let late = &known[known.len().saturating_sub(3)..];
        if self.rng.random_range(0..20) == 0 { random } else { self.pick(late).unwrap_or(random) }
    }

    fn offer(&mut self) -> ModelOffer {
        if self.rng.random_range(0..3) > 0 {
            let name = if self.rng.random() { "m".to_owned() } else { "n".to_owned() };
            let profile = LatencyProfile::linear(0.1, self.rng.random_range(0.1..3.0), 8).unwrap();
            let (version, gpu_indexes) = ("1".into(), vec![0]);
            let weights = Weights::new(self.rng.random_range(0..3), Span::from_millis(1));
            let queue_max = vec![self.rng.random_range(0..3)];
            return ModelOffer {
                name,
                version,
                profile,
                input_bytes: 8,
                gpu_indexes,
                weights,
                cost: None,
                queue_max,
                is_guest: false,
            };
        }
        let mut table: Vec<Span> = (0..[0, 1, 4, 256, 257][self.rng.random_range(0..5)]).map(|_| self.span()).collect();
        if self.rng.random() {
            let l1 = self.rng.random_range(1..5_000_000);
            table = (1..=self.rng.random_range(1..40)).map(|batch| Span(l1 + batch * 1_000)).collect();
        }
        let name = match self.rng.random_range(0..4) {
            0 => "m".to_owned(),
            1 => self.text(256),
            _ => "n".to_owned(),
        };
        let version = if self.rng.random_range(0..4) == 0 { self.text(256) } else { "1".to_owned() };
        let gpu_indexes = (0..self.rng.random_range(0..5)).map(|_| self.number(2) as u32).collect();
        let weights = Weights { pages: self.number(3) as u32, load: self.span(), read: self.span() };
        let input_bytes = self.number(1 << 20) as u32;
        let queue_max = vec![self.number(2) as u32; [0, 1, 3, 256, 257][self.rng.random_range(0..5)]];
        ModelOffer {
            name,
            version,
            profile: raw_profile(table),
            input_bytes,
            gpu_indexes,
            weights,
            cost: None,
            queue_max,
            is_guest: self.rng.random(),
        }
    }

    fn join(&mut self) {
        if self.rng.random() && self.frontends.len() < MEMBERS_MAX {
            let address = if self.rng.random() { "127.0.0.1:8".to_owned() } else { self.text(ADDRESS_BYTES_MAX) };
            let fits = (1..=ADDRESS_BYTES_MAX).contains(&address.len());
            let joined = self.cluster.handle_frontend_joined(self.now, FrontendHello::new(address));
            assert_eq!(joined.is_ok(), fits);
            if let Ok(welcome) = joined {
                self.connect(Member::Frontend(welcome.frontend), welcome.model_threads.pass);
                self.frontends.push(welcome.frontend);
            }
        } else if self.backends.len() < MEMBERS_MAX {
            let models = (0..self.rng.random_range(0..4)).map(|_| self.offer()).collect();
            let gpus = if self.rng.random_range(0..4) == 0 { self.number(3) as u32 } else { 1 };
            let memory_pages = match self.rng.random_range(0..4) {
                0 => Some(self.number(3) as u32),
                1 => Some(3),
                _ => None,
            };
            let more = [0, 0, 0, 1, 3, u32::MAX][self.rng.random_range(0..6)];
            let is_auto = self.rng.random();
            let hello = BackendHello { memory_pages, more, is_auto, ..BackendHello::new(gpus, models) };
            if let Ok(welcome) = self.cluster.handle_backend_joined(self.now, hello) {
                self.connect(Member::Backend(welcome.backend), welcome.model_threads.pass);
                self.backends.push(welcome.backend);
                // One that can be planned on does more harm.
                let obeys = BackendToControl::Obeys { epoch: EPOCH };
                self.cluster.handle_backend_message(self.now, Port::Control, welcome.backend, obeys).unwrap();
                for frontend in self.frontends.iter().copied().chain([self.good.0]).collect::<Vec<_>>() {
                    let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
                    self.cluster.handle_backend_message(self.now, Port::Control, welcome.backend, linked).unwrap();
                }
            }
        }
    }

    fn frontend_says(&mut self) {
        let Some(frontend) = self.pick(&self.frontends.clone()) else { return };
        let (task, model) = (self.task(frontend), self.model());
        let message: FrontendToScheduler = match self.rng.random_range(0..12) {
            10 => match self.rng.random_range(0..5) {
                4 => {
                    let backends: Vec<_> = self.backends.iter().copied().chain([BackendId(9)]).collect();
                    FrontendToControl::Refuses { backend: self.pick(&backends).unwrap_or(self.good.1) }.into()
                }
                3 => FrontendToControl::PageRead.into(),
                0 => FrontendToControl::Link { backend: self.good.1, link: LinkId(self.number(3) as u32) }.into(),
                1 => FrontendToControl::Obeys { epoch: self.epoch() }.into(),
                _ => FrontendToControl::Misses { misses: self.rng.random() }.into(),
            },
            11 => match self.rng.random_range(0..4) {
                0 => FrontendToModelThread::AllOpen.into(),
                _ => FrontendToModelThread::Open {
                    task,
                    model,
                    deadline: self.instant(),
                    priority: self.rng.random(),
                    application: Application(self.number(40) as u32),
                    attempt: self.number(3) as u16,
                    slot: slot(0),
                }
                .into(),
            },
            0 | 1 => FrontendToModelThread::Cancel { task, model }.into(),
            2 => FrontendToControl::ClockRequest { sent_at: self.instant(), resp: self.span() }.into(),
            3 => {
                let to = if self.rng.random() { ModelChange::Load } else { ModelChange::Unload };
                // Not the model of those who keep to the protocol: who may change it is another matter.
                let name = if self.rng.random() { "n".to_owned() } else { self.text(256) };
                let files = self.rng.random::<bool>().then(|| FilesDigest(self.rng.random()));
                let brought = self.rng.random::<bool>().then(|| Brought { config: self.text(CONFIG_BYTES_MAX), files });
                FrontendToControl::ChangeModel { change: ChangeId(self.number(3)), to, name, brought }.into()
            }
            4 if self.rng.random_range(0..10) == 0 => {
                let backends: Vec<_> = self.backends.iter().copied().chain([self.good.1]).collect();
                let backend = self.pick(&backends).unwrap_or(BackendId(9));
                let unanswered = (0..self.rng.random_range(0..5)).map(|_| self.task(frontend)).collect();
                FrontendToModelThread::Fenced { backend, unanswered }.into()
            }
            _ => {
                let (deadline, priority) = (self.instant(), self.rng.random());
                let number = self.number(9) as u32;
                let (is_first, slot) = (self.rng.random(), slot(number));
                FrontendToModelThread::Submit {
                    task,
                    model,
                    deadline,
                    priority,
                    application: Application(self.number(40) as u32),
                    is_first,
                    slot,
                }
                .into()
            }
        };
        let is_for_thread = matches!(message, Addressed::ModelThread(_));
        let right = if is_for_thread { self.cluster.port_of(model) } else { Port::Control };
        let port = if self.rng.random_range(0..10) == 0 { self.port() } else { right };
        if self.cluster.handle_frontend_message(self.now, port, frontend, message).is_err() {
            self.leave(Member::Frontend(frontend));
        }
    }

    fn backend_says(&mut self) {
        let Some(backend) = self.pick(&self.backends.clone()) else { return };
        let frontends: Vec<_> = self.frontends.iter().copied().chain([self.good.0, FrontendId(u32::MAX)]).collect();
        let frontend = self.pick(&frontends).unwrap_or(self.good.0);
        let plan = self.plan(backend);
        let undelivered = |world: &mut Self| {
            let one = |world: &mut Self| Undelivered {
                task: world.task(frontend),
                link: LinkId([0, 1, u32::MAX][world.rng.random_range(0..3)]),
            };
            (0..world.rng.random_range(0..4)).map(|_| one(world)).collect::<Vec<_>>()
        };
        let gpu = GpuId(self.number(6) as u32);
        let message: BackendToScheduler = match self.rng.random_range(0..20) {
            19 => {
                let offer = self.offer();
                let model = self.model();
                BackendToControl::Measured { model, profile: offer.profile, cost: offer.cost }.into()
            }
            18 => {
                let models = (0..self.rng.random_range(0..4)).map(|_| self.offer()).collect();
                BackendToControl::Offers { models }.into()
            }
            14 => {
                let most = [0, 1, 3, 1_025][self.rng.random_range(0..4)];
                let models =
                    (0..most).map(|_| ResidentModel { model: self.model(), is_pinned: self.rng.random() }).collect();
                BackendToControl::Resident { gpu, models, is_last: self.rng.random() }.into()
            }
            15 => {
                let (started_at, finished_at) = (self.instant(), self.instant());
                let outcome = if self.rng.random() {
                    WeightsOutcome::Loaded { started_at, finished_at, read: self.span() }
                } else {
                    WeightsOutcome::Failed { failed_at: finished_at }
                };
                BackendToModelThread::WeightsLoaded { gpu, model: self.model(), outcome }.into()
            }
            17 => {
                let most = [0, 1, 3, 1_025][self.rng.random_range(0..4)];
                let models = (0..most).map(|_| self.model()).collect();
                BackendToControl::InHostMemory { models, is_there: self.rng.random() }.into()
            }
            16 if self.rng.random() => BackendToControl::WeightsMissing { gpu }.into(),
            16 => {
                let (busy, pages) = (self.span(), self.rng.random());
                BackendToControl::Weights(WeightsTally { busy, pages, pages_used: pages, ..WeightsTally::default() })
                    .into()
            }
            12 if self.rng.random() => BackendToControl::Obeys { epoch: self.epoch() }.into(),
            12 => BackendToControl::Misses { misses: self.rng.random() }.into(),
            13 => {
                let plan = PlanId::new(ModelThreadId::INHERITED, self.number(3) & 0xffff);
                let (gpu_index, model) = (self.number(1) as u32, self.model());
                let frees_at = self.rng.random::<bool>().then(|| self.instant());
                let tasks = (0..self.rng.random_range(0..300)).map(|_| (self.task(frontend), 0)).collect();
                BackendToControl::Unfinished { plan, gpu_index, model, frees_at, tasks }.into()
            }
            0 if self.rng.random_range(0..5) == 0 => BackendToControl::Unlinked { frontend }.into(),
            0..=2 => BackendToControl::Linked { frontend, link: LinkId(1) }.into(),
            3 => {
                let outcome = match self.rng.random_range(0..4) {
                    0 => LoadOutcome::Ready { offer: self.offer(), is_last: self.rng.random() },
                    1 => LoadOutcome::NotPlaced,
                    2 => LoadOutcome::Ensemble,
                    _ => LoadOutcome::Failed(self.text(1024)),
                };
                let known = self.loads.clone();
                let load = self.pick(&known).unwrap_or(LoadId(0));
                BackendToControl::Loaded { load, outcome }.into()
            }
            4 if self.rng.random() => {
                let (name, version) = (self.text(300), self.text(300));
                BackendToControl::NotLoaded { name, version, reason: self.text(2000) }.into()
            }
            4 => BackendToControl::Unloaded { model: self.model() }.into(),
            5 if self.rng.random() => BackendToModelThread::Cancelled { plan, task: self.task(frontend) }.into(),
            5 if self.rng.random() => BackendToModelThread::InputLate { plan, task: self.task(frontend) }.into(),
            6 if self.rng.random_range(0..10) == 0 => BackendToControl::Leaving { within: self.span() }.into(),
            6 if self.rng.random_range(0..10) == 0 => {
                BackendToControl::Assigned { sub_cluster: self.number(2) as u16 }.into()
            }
            6 => BackendToControl::ClockRequest { sent_at: self.instant() }.into(),
            7 | 8 => BackendToModelThread::Answered { plan, undelivered: undelivered(self) }.into(),
            _ => {
                let (started_at, finished_at) = (self.instant(), self.instant());
                let outcome = if self.rng.random() {
                    PlanOutcome::Executed { started_at, finished_at }
                } else {
                    PlanOutcome::WindowMissed { rejected_at: finished_at }
                };
                let (arrived_at, fetched_at) = (self.instant(), self.instant());
                BackendToModelThread::PlanDone { plan, outcome, undelivered: undelivered(self), arrived_at, fetched_at }
                    .into()
            }
        };
        let is_done = matches!(message, Addressed::ModelThread(BackendToModelThread::PlanDone { .. }));
        let inherited = Some(ModelThreadId::INHERITED);
        let message = match message {
            Addressed::ModelThread(report)
                if self.threads > 1 && report.plan().map(PlanId::model_thread) == inherited =>
            {
                BackendToControl::Inherited(report).into()
            }
            other => other,
        };
        let port = if self.rng.random_range(0..10) == 0 { self.port() } else { self.port_of(&message) };
        // What breaks the protocol costs it its connection, mostly: it has more to say otherwise.
        match self.cluster.handle_backend_message(self.now, port, backend, message) {
            Ok(()) => self.reached[0] += u64::from(is_done),
            Err(_) if self.rng.random_range(0..20) == 0 => self.leave(Member::Backend(backend)),
            Err(_) => {}
        }
    }

    fn leave(&mut self, member: Member) {
        self.reached[2] += 1;
        let port = self.port();
        self.cluster.handle_disconnected(self.now, port, member, "it broke the protocol".to_owned());
        self.cluster.handle_disconnected(self.now, Port::Control, member, "it broke the protocol".to_owned());
        self.frontends.retain(|frontend| member != Member::Frontend(*frontend));
        self.backends.retain(|backend| member != Member::Backend(*backend));
    }

    /// The backend that keeps to the protocol says something, which nobody may hold against it.
    fn tell_good(&mut self, message: impl Into<BackendToScheduler>) {
        let message = message.into();
        let (port, text) = (self.port_of(&message), format!("{message:?}"));
        let said = self.cluster.handle_backend_message(self.now, port, self.good.1, message);
        assert_eq!(said, Ok(()), "{text}");
    }

    /// Where a backend's message belongs.
    fn port_of(&self, message: &BackendToScheduler) -> Port {
        match message {
            Addressed::ModelThread(report) if self.threads > 1 => {
                report.plan().map_or(Port::Control, |plan| Port::ModelThread(plan.model_thread()))
            }
            _ => Port::Control,
        }
    }

    fn good_submits(&mut self) {
        let frontend = self.good.0;
        let task = TaskId::new(frontend, self.next_task);
        self.next_task += 1;
        let (deadline, slot) = (self.now + Span::from_millis(30), slot(0));
        let (model, is_first) = (ModelId(0), true);
        let message = FrontendToModelThread::Submit {
            task,
            model,
            deadline,
            priority: 0,
            application: proto::Application::NONE,
            is_first,
            slot,
        };
        let port = self.cluster.port_of(ModelId(0));
        self.open.insert(task);
        let said = self.cluster.handle_frontend_message(self.now, port, frontend, message);
        assert_eq!(said, Ok(()));
    }

    /// It executes its oldest plan.
    fn good_executes(&mut self) {
        if self.planned.is_empty() {
            return;
        }
        let plan = self.planned.remove(0);
        let outcome = PlanOutcome::Executed { started_at: self.now, finished_at: self.now };
        let (arrived_at, fetched_at) = (self.now, self.now);
        let undelivered = Vec::new();
        self.tell_good(BackendToModelThread::PlanDone {
            plan: plan.plan,
            outcome,
            undelivered,
            arrived_at,
            fetched_at,
        });
        self.tell_good(BackendToModelThread::Answered { plan: plan.plan, undelivered: Vec::new() });
        for task in plan.tasks {
            self.open.remove(&task.task);
        }
    }

    fn read_outputs(&mut self) {
        while let Some(output) = self.cluster.poll_output() {
            match output {
                ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Plan(plan)) if backend == self.good.1 => {
                    self.planned.push(plan);
                }
                ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Cancel { plan, task })
                    if backend == self.good.1 =>
                {
                    // As a backend does it: the first of that name is dropped, and told of once.
                    let planned = self.planned.iter_mut().find(|planned| planned.plan == plan);
                    let place = planned.and_then(|planned| {
                        let at = planned.tasks.iter().position(|other| other.task == task)?;
                        planned.tasks.remove(at);
                        Some(())
                    });
                    if place.is_some() {
                        self.tell_good(BackendToModelThread::Cancelled { plan, task });
                    }
                }
                // Hostile ones link too: else they would be given nothing to lie about.
                ClusterOutput::ToBackend(_, backend, SchedulerToBackend::FrontendJoined { frontend, .. }) => {
                    let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
                    let said = self.cluster.handle_backend_message(self.now, Port::Control, backend, linked);
                    assert_eq!(said, Ok(()));
                }
                ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Load { load, .. }) => {
                    if backend == self.good.1 {
                        self.tell_good(BackendToControl::Loaded { load, outcome: LoadOutcome::NotPlaced });
                    }
                    self.loads.push(load);
                }
                ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Plan(plan)) => {
                    let taken = plan.tasks.iter().filter_map(|planned| self.open.take(&planned.task));
                    self.taken.extend(taken);
                    self.plans.push((backend, plan.plan));
                }
                ClusterOutput::ToFrontend(_, frontend, SchedulerToFrontend::Dropped { task, .. }) => {
                    assert_eq!(task.frontend(), frontend);
                    self.reached[1] += u64::from(frontend != self.good.0);
                    let was_open = self.open.remove(&task) || self.taken.remove(&task);
                    assert!(frontend != self.good.0 || was_open, "{task:?} ended before");
                }
                ClusterOutput::ToFrontend(port, frontend, SchedulerToFrontend::Fence { backend, tasks, .. })
                    if frontend == self.good.0 =>
                {
                    let fenced = FrontendToModelThread::Fenced { backend, unanswered: tasks };
                    assert_eq!(self.cluster.handle_frontend_message(self.now, port, frontend, fenced), Ok(()));
                }
                ClusterOutput::ToFrontend(port, frontend, SchedulerToFrontend::PageEnd) if frontend == self.good.0 => {
                    let read = FrontendToControl::PageRead;
                    assert_eq!(self.cluster.handle_frontend_message(self.now, port, frontend, read), Ok(()));
                }
                ClusterOutput::Close(member, _) => {
                    assert!(member != Member::Frontend(self.good.0) && member != Member::Backend(self.good.1));
                    self.leave(member);
                }
                _ => {}
            }
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..24) {
            0 => self.join(),
            1..=7 => self.frontend_says(),
            8..=13 => self.backend_says(),
            14 | 15 => self.good_submits(),
            16 | 17 => self.good_executes(),
            18 if self.threads > 1 => {
                let (model, to) = (self.model(), ModelThreadId(self.rng.random_range(0..self.threads)));
                self.cluster.move_model(self.now, model, to);
            }
            _ => self.now += Span(self.rng.random_range(0..10_000_000)),
        }
        self.cluster.handle_timeout(self.now);
        self.read_outputs();
    }

    /// The hostile ones are gone: what is open ends, and new tasks are executed.
    fn settle(&mut self) {
        for member in self.frontends.clone().into_iter().map(Member::Frontend) {
            self.leave(member);
        }
        for member in self.backends.clone().into_iter().map(Member::Backend) {
            self.leave(member);
        }
        // For long enough that what they made of l(b), and of what requests take, is forgotten; until then some are
        // dropped.
        for _ in 0..60 {
            self.good_submits();
            self.now += Span::from_millis(1);
            self.cluster.handle_timeout(self.now);
            self.read_outputs();
            self.now += Span::from_millis(500);
            self.cluster.handle_timeout(self.now);
            self.read_outputs();
            self.good_executes();
        }
        self.read_outputs();
        assert!(self.open.is_empty(), "tasks that never end: {:?}", self.open);
        let before = self.next_task;
        for _ in 0..3 {
            self.good_submits();
            for _ in 0..40 {
                self.now += Span::from_millis(1);
                self.cluster.handle_timeout(self.now);
                let dropped = self.open.len();
                self.read_outputs();
                assert!(self.open.len() == dropped, "a task was dropped though nobody is in its way");
                self.good_executes();
            }
        }
        assert!(self.next_task == before + 3 && self.open.is_empty(), "they are executed");
    }
}

#[test]
fn hostile_members_break_nothing() {
    let mut reached = [0; 3];
    let only = std::env::var("DOWNBEAT_SEED").ok().map(|seed| seed.parse::<u64>().expect("a number"));
    for seed in only.map_or(0..100, |seed| seed..seed + 1) {
        for threads in [1, 3] {
            eprintln!("seed {seed}, {threads} ModelThreads");
            let mut world = World::new(seed, threads);
            (0..STEPS).for_each(|_| world.step());
            world.settle();
            reached.iter_mut().zip(world.reached).for_each(|(all, more)| *all += more);
        }
    }
    assert!(only.is_some() || reached.iter().all(|&count| count > 100), "it does not reach far: {reached:?}");
}
