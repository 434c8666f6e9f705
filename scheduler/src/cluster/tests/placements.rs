//! Models that the scheduler places: what a cluster of emulated GPUs under load loses by moves, in virtual time.

use std::collections::BinaryHeap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::placer::PlacementConfig;

const BACKENDS: u32 = 16;
const GPUS: u32 = 4;
const MODELS: usize = 40;
const SLO: Span = Span::from_millis(150);
/// Searches are this far apart; the first deals all models to sub-clusters.
const EPOCH: Span = Span::from_millis(13_000);
/// When requests come for other models than before.
const SHIFTS_AT: Timestamp = Timestamp(14_000 * MS);
const ENDS_AT: Timestamp = Timestamp(40_000 * MS);
/// How long a load takes.
const LOADS: Span = Span::from_millis(300);
/// Of what 64 GPUs can serve in batches of four.
const LOAD: f64 = 0.8;

fn profile() -> LatencyProfile {
    LatencyProfile::linear(4.0, 20.0, 16).unwrap()
}

fn model_name(number: usize) -> String {
    format!("m{number:02}")
}

/// What happens later, by when; ties in the order in which they were listed.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Later {
    Arrival,
    Ended { backend: BackendId, plan: PlanId, started_at: Option<Timestamp> },
    Loaded { backend: BackendId, load: LoadId, name: String },
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    sent: u64,
    in_time: u64,
}

impl Counts {
    fn lost_part(self) -> f64 {
        (self.sent - self.in_time) as f64 / self.sent as f64
    }
}

struct World {
    cluster: Cluster,
    frontend: FrontendId,
    now: Timestamp,
    later: BinaryHeap<std::cmp::Reverse<(Timestamp, u64, Later)>>,
    order: u64,
    rng: ChaCha8Rng,
    /// By GPU: until when it runs what it was given.
    busy: BTreeMap<(BackendId, u32), Timestamp>,
    hosts: BTreeSet<(BackendId, ModelId)>,
    sub_clusters: BTreeMap<BackendId, u16>,
    deadlines: BTreeMap<TaskId, Timestamp>,
    plans: BTreeMap<PlanId, Vec<TaskId>>,
    /// Models that more requests come for.
    hot: Vec<ModelId>,
    sequence: u64,
    /// Whether loads of copies succeed.
    loads_work: bool,
    copies: usize,
    /// From the second search on.
    counts: Counts,
}

impl World {
    fn new(loads_work: bool) -> Self {
        let placement = PlacementConfig {
            sub_clusters: 4,
            epoch: EPOCH,
            moves_max: 4,
            rate_max_rps: None,
            memory_max_bytes: None,
            memory_weight: 1.0,
            pins: BTreeMap::new(),
        };
        let advice = AdviceConfig { window: Span::from_millis(10_000), ..AdviceConfig::default() };
        let (placement, policy) = (Some(placement), Policy::default());
        let config =
            ClusterConfig { tasks_per_frontend_max: 1 << 20, queue_max: 4_096, advice, placement, policy, ..config() };
        let mut cluster = scheduler(&config);
        let now = Timestamp(0);
        let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
        let mut world = Self {
            cluster,
            frontend,
            now,
            later: BinaryHeap::new(),
            order: 0,
            rng: ChaCha8Rng::seed_from_u64(7),
            busy: BTreeMap::new(),
            hosts: BTreeSet::new(),
            sub_clusters: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            plans: BTreeMap::new(),
            hot: Vec::new(),
            sequence: 0,
            loads_work,
            copies: 0,
            counts: Counts::default(),
        };
        for number in 0..BACKENDS {
            world.add(number);
        }
        world
    }

    fn add(&mut self, number: u32) {
        let models = (0..MODELS).map(|model| offer_of(&model_name(model))).collect();
        let hello = BackendHello { name: format!("b{number}"), is_auto: true, ..BackendHello::new(GPUS, models) };
        let backend = add_backend(&mut self.cluster, self.now, hello).backend;
        self.hosts.extend((0..MODELS as u32).map(|model| (backend, ModelId(model))));
        self.tell(backend, BackendToControl::Linked { frontend: self.frontend, link: LinkId(1) });
    }

    fn tell(&mut self, backend: BackendId, message: impl Into<BackendToScheduler>) {
        self.cluster.handle_backend_message(self.now, Port::Control, backend, message).unwrap();
    }

    fn schedule(&mut self, at: Timestamp, what: Later) {
        self.order += 1;
        self.later.push(std::cmp::Reverse((at, self.order, what)));
    }

    /// Runs to the end. Two runs of one load differ only by what becomes of moves.
    fn run(mut self) -> Self {
        self.schedule(Timestamp(MS), Later::Arrival);
        while self.now < ENDS_AT {
            self.perform();
            let at = self.later.peek().map_or(Timestamp::NEVER, |next| next.0.0);
            match self.cluster.poll_timeout().filter(|&due| due <= at) {
                Some(due) => {
                    self.now = self.now.max(due);
                    self.cluster.handle_timeout(self.now);
                }
                None => {
                    let std::cmp::Reverse((at, _, what)) = self.later.pop().expect("requests go on coming");
                    self.now = self.now.max(at);
                    self.happen(what);
                }
            }
        }
        self
    }

    fn happen(&mut self, what: Later) {
        match what {
            Later::Arrival => self.arrive(),
            Later::Ended { backend, plan, started_at } => {
                let tasks = self.plans.remove(&plan).expect("it runs");
                let outcome = match started_at {
                    Some(started_at) => PlanOutcome::Executed { started_at, finished_at: self.now },
                    None => PlanOutcome::WindowMissed { rejected_at: self.now },
                };
                for task in tasks {
                    let deadline = self.deadlines.remove(&task).expect("each ends once");
                    let is_in_time = started_at.is_some() && self.now + Span::from_millis(1) <= deadline;
                    self.counts.in_time += u64::from(is_counted(deadline) && is_in_time);
                }
                self.tell(backend, plan_done(plan, outcome, vec![]));
                self.tell(backend, BackendToModelThread::Answered { plan, undelivered: vec![] });
            }
            Later::Loaded { backend, load, name } if self.loads_work => {
                let outcome = LoadOutcome::Ready { offer: offer_of(&name), is_last: true };
                self.tell(backend, BackendToControl::Loaded { load, outcome });
            }
            Later::Loaded { backend, load, .. } => {
                let outcome = LoadOutcome::Failed("out of memory".to_owned());
                self.tell(backend, BackendToControl::Loaded { load, outcome });
            }
        }
    }

    /// A request comes, and the next one is drawn.
    fn arrive(&mut self) {
        if self.now >= SHIFTS_AT && self.hot.is_empty() {
            self.hot = self.models_of(0);
        }
        // Those get a tenth more than before, and the others so much less.
        let is_extra = self.rng.random::<f64>() < 0.1 * self.hot.len() as f64 / MODELS as f64;
        let model = match self.hot.len() {
            0 => self.rng.random_range(0..MODELS as u32),
            hot if is_extra => self.hot[self.rng.random_range(0..hot)].0,
            _ => self.rng.random_range(0..MODELS as u32),
        };
        let (task, deadline) = (TaskId::new(self.frontend, self.sequence), self.now + SLO);
        self.sequence += 1;
        self.counts.sent += u64::from(is_counted(deadline));
        self.deadlines.insert(task, deadline);
        let (model, application) = (ModelId(model), proto::Application::NONE);
        let submit = FrontendToModelThread::Submit {
            task,
            model,
            deadline,
            priority: 0,
            application,
            is_first: true,
            slot: slot(),
        };
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, submit).unwrap();
        let rate = LOAD * f64::from(BACKENDS * GPUS) * 4.0 / profile().latency(4).as_millis_f64();
        let gap = -(1.0 - self.rng.random::<f64>()).ln() / rate;
        self.schedule(self.now + Span::from_millis_f64(gap), Later::Arrival);
    }

    /// What the backends of a sub-cluster host.
    fn models_of(&self, cluster: u16) -> Vec<ModelId> {
        let is_there = |backend: &BackendId| self.sub_clusters.get(backend) == Some(&cluster);
        let models: BTreeSet<ModelId> =
            self.hosts.iter().filter(|(backend, _)| is_there(backend)).map(|(_, model)| *model).collect();
        models.into_iter().collect()
    }

    /// Members do what they are told.
    fn perform(&mut self) {
        for output in drain(&mut self.cluster) {
            match output {
                ClusterOutput::ToBackend(_, backend, message) => self.backend(backend, message),
                ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Dropped { task, .. }) => {
                    self.deadlines.remove(&task).expect("each ends once");
                }
                ClusterOutput::ToFrontend(_, frontend, SchedulerToFrontend::PageEnd) => {
                    let read = FrontendToControl::PageRead;
                    self.cluster.handle_frontend_message(self.now, Port::Control, frontend, read).unwrap();
                }
                ClusterOutput::Close(member, reason) => panic!("{member:?} is closed: {reason}"),
                _ => {}
            }
        }
    }

    fn backend(&mut self, backend: BackendId, message: SchedulerToBackend) {
        match message {
            SchedulerToBackend::Plan(plan) => self.execute(backend, &plan),
            SchedulerToBackend::Load { load, name, .. } => {
                self.copies += 1;
                self.schedule(self.now + LOADS, Later::Loaded { backend, load, name });
            }
            SchedulerToBackend::Host { model, .. } => {
                assert!(self.hosts.insert((backend, model)), "it is hosted there")
            }
            SchedulerToBackend::Unload { model } => {
                assert!(self.hosts.remove(&(backend, model)), "it is not hosted there");
                assert!(self.hosts.iter().any(|(_, other)| *other == model), "nobody hosts {model:?} any more");
                self.tell(backend, BackendToControl::Unloaded { model });
            }
            SchedulerToBackend::Assign { sub_cluster } => drop(self.sub_clusters.insert(backend, sub_cluster)),
            _ => {}
        }
    }

    /// A GPU runs one plan after the other.
    fn execute(&mut self, backend: BackendId, plan: &BatchPlan) {
        assert!(self.hosts.contains(&(backend, plan.model)), "a plan is for what is not hosted");
        let busy = self.busy.entry((backend, plan.gpu_index)).or_insert(Timestamp(0));
        let starts_at = self.now.max(plan.exec_at).max(*busy);
        let started_at = (starts_at <= plan.latest).then_some(starts_at);
        let ends_at = started_at.map_or(plan.latest, |at| at + profile().latency(plan.tasks.len()));
        *busy = started_at.map_or(*busy, |_| ends_at);
        self.plans.insert(plan.plan, plan.tasks.iter().map(|task| task.task).collect());
        self.schedule(ends_at, Later::Ended { backend, plan: plan.plan, started_at });
    }
}

fn is_counted(deadline: Timestamp) -> bool {
    deadline - SLO >= Timestamp(0) + EPOCH * 2 && deadline <= ENDS_AT
}

fn offer_of(name: &str) -> ModelOffer {
    ModelOffer { profile: profile(), ..model_offer(GPUS, name, 1) }
}

#[test]
fn moves_of_a_cluster_of_64_gpus_under_load_lose_nearly_nothing() {
    let [without, with] = [false, true].map(|loads_work| World::new(loads_work).run());
    for world in [&without, &with] {
        assert!((0..4).all(|cluster| !world.models_of(cluster).is_empty()) && world.sub_clusters.len() == 16);
    }
    assert!(without.copies > 0, "loads were tried, which failed");
    let moved = with.models_of(0) != without.models_of(0);
    assert!(moved && with.copies >= 4, "{} loads, and nothing has moved", with.copies);
    let (without, with) = (without.counts, with.counts);
    println!("without a move {without:?}, {}; with moves {with:?}, {}", without.lost_part(), with.lost_part());
    assert!(without.lost_part() < 0.01 && with.lost_part() < without.lost_part() + 0.001, "{without:?} {with:?}");
}
