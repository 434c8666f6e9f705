//! A seeded cluster: frontends, backends that fail, messages with delays. Each task must end exactly once.
//! A failing seed is printed; `DOWNBEAT_SEED=n cargo test -p scheduler cluster` replays it alone.

use std::collections::{BTreeMap, BTreeSet};

use proto::{
    ChangeId, LatencyProfile, LinkId, LoadId, PlanId, SlotDescriptor, TaskId,
    backend_to_scheduler::{LoadOutcome, ModelOffer, PlanOutcome, Undelivered},
    frontend_to_scheduler::ModelChange,
    hello::ModelThreads,
    scheduler_to_backend::{BatchPlan, PlannedTask},
    scheduler_to_frontend::{DropReason, SchedulerLoad},
    stages::SchedulerStamps,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

const MS: i64 = 1_000_000;

fn config() -> ClusterConfig {
    ClusterConfig {
        policy: Policy::Deferred,
        budget: NetworkBudget {
            ctrl: Span::from_micros(300),
            data_per_task: Span::from_micros(10),
            jitter: Span::ZERO,
        },
        // 10 us for each task's 10 kB.
        data_per_megabyte: Span::from_millis(1),
        resp: Span::from_millis(1),
        queue_max: 64,
        tasks_per_frontend_max: 100,
        reestimate: true,
        model_threads: 1,
        addresses: Vec::new(),
    }
}

fn scheduler(config: &ClusterConfig) -> Cluster {
    Cluster::new(config, [7; 32]).unwrap()
}

fn slot() -> SlotDescriptor {
    SlotDescriptor { slot: 3, input_offset: 0, input_bytes: 8, answer_offset: 64, answer_bytes_max: 128 }
}

fn offer(gpus: u32) -> BackendHello {
    BackendHello { gpus, models: vec![model_offer(gpus, "m", 1)] }
}

fn model_offer(gpus: u32, name: &str, version: u32) -> ModelOffer {
    let profile = LatencyProfile::linear(1.0, 5.0, 16).unwrap();
    let gpu_indexes = (0..gpus).collect();
    ModelOffer { name: name.into(), version: version.to_string(), profile, input_bytes: 10_000, gpu_indexes }
}

fn submit(frontend: FrontendId, sequence: u64, deadline: Timestamp) -> FrontendToScheduler {
    FrontendToScheduler::Submit {
        task: TaskId::new(frontend, sequence),
        model: ModelId(0),
        deadline,
        priority: 0,
        slot: slot(),
    }
}

fn drain(cluster: &mut Cluster) -> Vec<ClusterOutput> {
    std::iter::from_fn(|| cluster.poll_output()).collect()
}

fn plan_done(plan: PlanId, outcome: PlanOutcome, undelivered: Vec<Undelivered>) -> BackendToScheduler {
    let (arrived_at, fetched_at) = (Timestamp::PAST, Timestamp::PAST);
    BackendToScheduler::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at }
}

/// One frontend linked to one backend of one GPU.
fn pair(now: Timestamp) -> (Cluster, FrontendId, BackendId) {
    let mut cluster = scheduler(&config());
    let (frontend, backend) = join(&mut cluster, now);
    (cluster, frontend, backend)
}

fn join(cluster: &mut Cluster, now: Timestamp) -> (FrontendId, BackendId) {
    let frontend = cluster.handle_frontend_joined(now, FrontendHello { link_address: "f:1".into() }).unwrap().frontend;
    let backend = cluster.handle_backend_joined(now, offer(1)).unwrap().backend;
    cluster.handle_backend_message(now, Port::Control, backend, BackendToScheduler::Linked { frontend }).unwrap();
    drain(cluster);
    (frontend, backend)
}

#[test]
fn a_task_becomes_a_plan_within_its_window() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    cluster
        .handle_frontend_message(Timestamp(0), Port::Control, frontend, submit(frontend, 0, Timestamp(25 * MS)))
        .unwrap();
    // Deferred: nothing leaves before d - l(2) - delay(1) = 25 - 1 - 7 - 0.32 ms.
    let fires_at = cluster.poll_timeout().unwrap();
    assert_eq!(fires_at, Timestamp(16 * MS + 680_000));
    cluster.handle_timeout(fires_at);
    let outputs = drain(&mut cluster);
    let [ClusterOutput::ToBackend(Port::Control, to, SchedulerToBackend::Plan(plan))] = &outputs[..] else {
        panic!("{outputs:?}")
    };
    assert_eq!((*to, plan.exec_at, plan.latest), (backend, Timestamp(17 * MS), Timestamp(18 * MS)));
    assert_eq!(
        plan.tasks[0].stamps,
        SchedulerStamps { queued_at: Timestamp(0), due_at: fires_at, granted_at: fires_at }
    );
}

#[test]
fn a_frontend_that_asks_for_the_time_is_told_how_much_there_is_to_do() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let load = |cluster: &mut Cluster| {
        let request = FrontendToScheduler::ClockRequest { sent_at: Timestamp(0), resp: Span::ZERO };
        cluster.handle_frontend_message(Timestamp(1), Port::Control, frontend, request).unwrap();
        match &drain(cluster)[..] {
            &[
                ClusterOutput::ToFrontend(Port::Control, _, SchedulerToFrontend::Clock(_)),
                ClusterOutput::ToFrontend(Port::Control, to, SchedulerToFrontend::Load(load)),
            ] if to == frontend => load,
            outputs => panic!("{outputs:?}"),
        }
    };
    assert_eq!(load(&mut cluster), SchedulerLoad { queued: 0, batches: 0, gpus: 1 });
    cluster
        .handle_frontend_message(Timestamp(0), Port::Control, frontend, submit(frontend, 0, Timestamp(25 * MS)))
        .unwrap();
    assert_eq!(load(&mut cluster), SchedulerLoad { queued: 1, batches: 0, gpus: 1 });
    let fires_at = cluster.poll_timeout().unwrap();
    cluster.handle_timeout(fires_at);
    drain(&mut cluster);
    assert_eq!(load(&mut cluster), SchedulerLoad { queued: 0, batches: 1, gpus: 1 });
    cluster.handle_disconnected(fires_at, Port::Control, Member::Backend(backend), String::new());
    drain(&mut cluster);
    assert_eq!(load(&mut cluster), SchedulerLoad::default());
}

/// Submits a task at `now` and waits for its plan, which then runs for `execution`.
fn run_one(
    cluster: &mut Cluster,
    (frontend, backend): (FrontendId, BackendId),
    now: Timestamp,
    sequence: u64,
    execution: Span,
) -> BatchPlan {
    let task = submit(frontend, sequence, now + Span::from_millis(25));
    cluster.handle_frontend_message(now, Port::Control, frontend, task).unwrap();
    let plan = loop {
        let at = cluster.poll_timeout().expect("a task waits");
        cluster.handle_timeout(at);
        let outputs = drain(cluster);
        if let Some(ClusterOutput::ToBackend(Port::Control, _, SchedulerToBackend::Plan(plan))) =
            outputs.into_iter().next()
        {
            break plan;
        }
    };
    let finished_at = plan.exec_at + execution;
    let outcome = PlanOutcome::Executed { started_at: plan.exec_at, finished_at };
    let done = plan_done(plan.plan, outcome, vec![]);
    cluster.handle_backend_message(finished_at, Port::Control, backend, done).unwrap();
    let answered = BackendToScheduler::Answered { plan: plan.plan, undelivered: vec![] };
    cluster.handle_backend_message(finished_at, Port::Control, backend, answered).unwrap();
    plan
}

#[test]
fn what_executions_take_is_planned_with_and_told() {
    for (reestimate, latency_us) in [(true, 7_200), (false, 6_000)] {
        let mut cluster = scheduler(&ClusterConfig { reestimate, ..config() });
        let members = join(&mut cluster, Timestamp(0));
        let mut told = None;
        for sequence in 0..40 {
            let now = Timestamp(sequence as i64 * 100 * MS);
            let plan = run_one(&mut cluster, members, now, sequence, Span::from_micros(7_200));
            for output in drain(&mut cluster) {
                if let ClusterOutput::ToFrontend(Port::Control, _, SchedulerToFrontend::Model { least_latency, .. }) =
                    output
                {
                    told = Some(least_latency);
                }
            }
            if sequence == 39 {
                assert_eq!(plan.latest, now + Span::from_millis(24) - Span::from_micros(latency_us));
            }
        }
        // l(1), delay(1) and the way back.
        assert_eq!(told, reestimate.then_some(Span::from_micros(7_200 + 320 + 1_000)));
    }
}

/// A slow backend and one that takes a third of the time: what is due fits both, what is planned is right for each.
#[test]
fn each_gpu_is_planned_with_its_own_times() {
    let mut cluster = scheduler(&ClusterConfig { reestimate: false, ..config() });
    let (frontend, slow) = join(&mut cluster, Timestamp(0));
    let mut faster = offer(1);
    faster.models[0].profile = faster.models[0].profile.scaled(1.0 / 3.0);
    let fast = cluster.handle_backend_joined(Timestamp(0), faster).unwrap().backend;
    cluster.handle_backend_message(Timestamp(0), Port::Control, fast, BackendToScheduler::Linked { frontend }).unwrap();
    let plan_of_next = |cluster: &mut Cluster, sequence| {
        cluster
            .handle_frontend_message(
                Timestamp(0),
                Port::Control,
                frontend,
                submit(frontend, sequence, Timestamp(25 * MS)),
            )
            .unwrap();
        let at = cluster.poll_timeout().expect("a task waits");
        cluster.handle_timeout(at);
        let plan = drain(cluster).into_iter().find_map(|output| match output {
            ClusterOutput::ToBackend(Port::Control, backend, SchedulerToBackend::Plan(plan)) => {
                Some((backend, plan.latest))
            }
            _ => None,
        });
        plan.expect("it is due")
    };
    assert_eq!(plan_of_next(&mut cluster, 0), (slow, Timestamp(18 * MS)));
    assert_eq!(plan_of_next(&mut cluster, 1), (fast, Timestamp(22 * MS)));
    // Without the slow one what is due is due later, too: 24 ms less l(2) = 7/3 ms and the way there.
    cluster.handle_disconnected(Timestamp(0), Port::Control, Member::Backend(slow), String::new());
    drain(&mut cluster);
    cluster
        .handle_frontend_message(Timestamp(0), Port::Control, frontend, submit(frontend, 2, Timestamp(25 * MS)))
        .unwrap();
    assert_eq!(cluster.poll_timeout(), Some(Timestamp(24 * MS - 7 * MS / 3 - 320_000)));
}

#[test]
fn the_window_opens_earlier_by_what_timers_are_late() {
    let mut config = config();
    config.budget.jitter = Span::from_millis(2);
    let mut cluster = scheduler(&config);
    let (frontend, backend) = join(&mut cluster, Timestamp(0));
    cluster
        .handle_frontend_message(Timestamp(0), Port::Control, frontend, submit(frontend, 0, Timestamp(25 * MS)))
        .unwrap();
    let fires_at = cluster.poll_timeout().unwrap();
    assert_eq!(fires_at, Timestamp(14 * MS + 680_000));
    // The timer fires 2.5 ms late, and the batch still makes its deadline.
    cluster.handle_timeout(fires_at + Span::from_micros(2_500));
    let outputs = drain(&mut cluster);
    let [ClusterOutput::ToBackend(Port::Control, to, SchedulerToBackend::Plan(plan))] = &outputs[..] else {
        panic!("{outputs:?}")
    };
    assert_eq!((*to, plan.exec_at, plan.latest), (backend, Timestamp(17_500_000), Timestamp(18 * MS)));
}

#[test]
fn a_task_of_another_frontend_is_a_violation() {
    let (mut cluster, frontend, _) = pair(Timestamp(0));
    let foreign = submit(FrontendId(9), 0, Timestamp(25 * MS));
    let error = cluster.handle_frontend_message(Timestamp(0), Port::Control, frontend, foreign).unwrap_err();
    assert!(error.to_string().contains("another frontend's"), "{error}");
}

#[test]
fn a_frontend_is_told_what_serves_it_and_when_that_ends() {
    let mut cluster = scheduler(&config());
    let now = Timestamp(0);
    let frontend = cluster.handle_frontend_joined(now, FrontendHello { link_address: "f:1".into() }).unwrap().frontend;
    let backend = cluster.handle_backend_joined(now, offer(3)).unwrap().backend;
    cluster.handle_backend_message(now, Port::Control, backend, BackendToScheduler::Linked { frontend }).unwrap();
    cluster.handle_disconnected(now, Port::Control, Member::Backend(backend), String::new());
    let gpus: Vec<u32> = drain(&mut cluster)
        .into_iter()
        .filter_map(|output| match output {
            ClusterOutput::ToFrontend(
                Port::Control,
                _,
                SchedulerToFrontend::Model { gpus, least_latency, network, .. },
            ) => {
                assert_eq!(least_latency, Span::from_micros(6_000 + 320 + 1_000));
                assert_eq!((network.ctrl + network.data, network.resp), (Span::from_micros(320), Span::from_millis(1)));
                Some(gpus)
            }
            _ => None,
        })
        .collect();
    assert_eq!(gpus, [0, 3, 0]);
    cluster.handle_frontend_message(now, Port::Control, frontend, submit(frontend, 0, Timestamp(25 * MS))).unwrap();
    let dropped = SchedulerToFrontend::Dropped { task: TaskId::new(frontend, 0), reason: DropReason::NoBackend };
    assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(Port::Control, frontend, dropped)]);
}

#[test]
fn tasks_per_frontend_are_bounded() {
    let mut cluster = scheduler(&ClusterConfig { tasks_per_frontend_max: 2, ..config() });
    let (frontend, _) = join(&mut cluster, Timestamp(0));
    for sequence in 0..3 {
        cluster
            .handle_frontend_message(
                Timestamp(0),
                Port::Control,
                frontend,
                submit(frontend, sequence, Timestamp(90 * MS)),
            )
            .unwrap();
    }
    let dropped = SchedulerToFrontend::Dropped { task: TaskId::new(frontend, 2), reason: DropReason::QueueFull };
    assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(Port::Control, frontend, dropped)]);
}

fn change(cluster: &mut Cluster, frontend: FrontendId, change: u64, to: ModelChange) -> Vec<ClusterOutput> {
    let message = FrontendToScheduler::ChangeModel { change: ChangeId(change), to, name: "m".into() };
    cluster.handle_frontend_message(Timestamp(0), Port::Control, frontend, message).unwrap();
    drain(cluster)
}

fn changed(frontend: FrontendId, change: u64, refused: Option<&str>) -> ClusterOutput {
    let (change, refused) = (ChangeId(change), refused.map(str::to_owned));
    ClusterOutput::ToFrontend(Port::Control, frontend, SchedulerToFrontend::ModelChanged { change, refused })
}

#[test]
fn unloading_ends_what_waits_and_loading_serves_again() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let now = Timestamp(0);
    let reason = "no backend has ever hosted 'x'";
    let unknown = FrontendToScheduler::ChangeModel { change: ChangeId(9), to: ModelChange::Unload, name: "x".into() };
    cluster.handle_frontend_message(now, Port::Control, frontend, unknown).unwrap();
    assert_eq!(drain(&mut cluster), [changed(frontend, 9, Some(reason))]);

    cluster.handle_frontend_message(now, Port::Control, frontend, submit(frontend, 0, Timestamp(90 * MS))).unwrap();
    let outputs = change(&mut cluster, frontend, 1, ModelChange::Unload);
    let dropped = |sequence| {
        let (task, reason) = (TaskId::new(frontend, sequence), DropReason::Unloaded);
        ClusterOutput::ToFrontend(Port::Control, frontend, SchedulerToFrontend::Dropped { task, reason })
    };
    assert!(outputs.contains(&dropped(0)), "{outputs:?}");
    let unload = ClusterOutput::ToBackend(Port::Control, backend, SchedulerToBackend::Unload { model: ModelId(0) });
    assert!(outputs.contains(&unload), "{outputs:?}");
    assert!(!outputs.contains(&changed(frontend, 1, None)), "the backend has not finished");
    cluster
        .handle_backend_message(now, Port::Control, backend, BackendToScheduler::Unloaded { model: ModelId(0) })
        .unwrap();
    assert_eq!(drain(&mut cluster).last(), Some(&changed(frontend, 1, None)));
    cluster.handle_frontend_message(now, Port::Control, frontend, submit(frontend, 1, Timestamp(90 * MS))).unwrap();
    assert_eq!(drain(&mut cluster), [dropped(1)]);

    // A backend that comes meanwhile is told to do without it, too.
    let late = cluster.handle_backend_joined(now, offer(1)).unwrap();
    let unwanted =
        ClusterOutput::ToBackend(Port::Control, late.backend, SchedulerToBackend::Unload { model: late.models[0] });
    assert!(drain(&mut cluster).contains(&unwanted));
    cluster.handle_disconnected(now, Port::Control, Member::Backend(late.backend), String::new());

    let outputs = change(&mut cluster, frontend, 2, ModelChange::Load);
    let [ClusterOutput::ToBackend(Port::Control, _, SchedulerToBackend::Load { load, .. }), ..] = outputs[..] else {
        panic!("{outputs:?}")
    };
    let failed = LoadOutcome::Failed("model.onnx: it is torn".into());
    cluster
        .handle_backend_message(now, Port::Control, backend, BackendToScheduler::Loaded { load, outcome: failed })
        .unwrap();
    let reason = "backend 0: model.onnx: it is torn";
    assert_eq!(drain(&mut cluster).last(), Some(&changed(frontend, 2, Some(reason))));

    let outputs = change(&mut cluster, frontend, 3, ModelChange::Load);
    let [ClusterOutput::ToBackend(Port::Control, _, SchedulerToBackend::Load { load, .. }), ..] = outputs[..] else {
        panic!("{outputs:?}")
    };
    let ready = LoadOutcome::Ready(model_offer(1, "m", 1));
    cluster
        .handle_backend_message(now, Port::Control, backend, BackendToScheduler::Loaded { load, outcome: ready })
        .unwrap();
    let outputs = drain(&mut cluster);
    let host = ClusterOutput::ToBackend(Port::Control, backend, SchedulerToBackend::Host { load, model: ModelId(0) });
    let at = |wanted: &dyn Fn(&ClusterOutput) -> bool| outputs.iter().position(wanted);
    let is_offer = |output: &ClusterOutput| {
        matches!(output, ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Model { gpus: 1, .. }))
    };
    assert!(at(&|output| *output == host).is_some(), "{outputs:?}");
    assert!(at(&is_offer).unwrap() < at(&|output| *output == changed(frontend, 3, None)).unwrap(), "{outputs:?}");
    cluster.handle_frontend_message(now, Port::Control, frontend, submit(frontend, 2, Timestamp(25 * MS))).unwrap();
    cluster.handle_timeout(cluster.poll_timeout().unwrap());
    let outputs = drain(&mut cluster);
    assert!(
        matches!(&outputs[..], [ClusterOutput::ToBackend(Port::Control, _, SchedulerToBackend::Plan(_))]),
        "{outputs:?}"
    );
}

/// What is under way in the simulated world.
#[derive(Debug)]
enum Arrival {
    Submit(FrontendId),
    FromFrontend(Port, FrontendId, FrontendToScheduler),
    FromBackend(Port, BackendId, BackendToScheduler),
    ToFrontend(Port, FrontendId, SchedulerToFrontend),
    ToBackend(BackendId, SchedulerToBackend),
    /// A member that has joined connects to a ModelThread.
    Connects(ModelThreadId, Member, u64),
    /// A model goes to another ModelThread.
    Moves,
    /// From a backend straight into a frontend's slot, over the link as it was when the plan came.
    Answer {
        backend: BackendId,
        plan: PlanId,
        task: TaskId,
        attempt: u16,
        link: u64,
    },
    /// The last answer of a plan has arrived or failed.
    Answered(BackendId, PlanId),
    /// A backend connects to a frontend, after a fence again.
    Link(BackendId, FrontendId),
    BackendDies,
    BackendJoins,
    FrontendDies,
    /// A client asks for a change of a model.
    Change,
}

#[derive(Debug, Default)]
struct FakeFrontend {
    /// Expected attempt of each task that has not ended.
    open: BTreeMap<TaskId, u16>,
    /// The queue pair of each backend that is not fenced.
    links: BTreeMap<BackendId, u64>,
    next: u64,
    /// Where each model's tasks go, as it was last told.
    ports: BTreeMap<ModelId, Port>,
    /// Changes of models that are not answered yet.
    changes: BTreeSet<ChangeId>,
}

#[derive(Debug, Default)]
struct FakeBackend {
    /// What it can be sent plans for.
    hosts: BTreeSet<ModelId>,
    /// What is loaded, or being loaded, beside that.
    loads: BTreeSet<LoadId>,
}

struct World {
    threads: u16,
    cluster: Cluster,
    random: ChaCha8Rng,
    now: Timestamp,
    arrivals: BTreeMap<(Timestamp, u64), Arrival>,
    /// When the last message on a connection arrives: connections keep order.
    last: BTreeMap<String, Timestamp>,
    next: u64,
    frontends: BTreeMap<FrontendId, FakeFrontend>,
    backends: BTreeMap<BackendId, FakeBackend>,
    /// Answers of a plan that did not arrive.
    undelivered: BTreeMap<PlanId, Vec<Undelivered>>,
    submitted: usize,
    ended: usize,
    forgotten: usize,
    answered: usize,
    changed: usize,
    cancelled: usize,
}

impl World {
    /// With one ModelThread it shares control's connections.
    fn new(seed: u64, threads: u16) -> Self {
        let addresses = (0..threads).filter(|_| threads > 1).map(|thread| format!("s:{thread}")).collect();
        let mut world = Self {
            threads,
            cluster: scheduler(&ClusterConfig { model_threads: threads, addresses, ..config() }),
            random: ChaCha8Rng::seed_from_u64(seed),
            now: Timestamp(0),
            arrivals: BTreeMap::new(),
            last: BTreeMap::new(),
            next: 0,
            frontends: BTreeMap::new(),
            backends: BTreeMap::new(),
            undelivered: BTreeMap::new(),
            submitted: 0,
            ended: 0,
            forgotten: 0,
            answered: 0,
            changed: 0,
            cancelled: 0,
        };
        for name in 0..3 {
            let hello = FrontendHello { link_address: format!("f:{name}") };
            let welcome = world.cluster.handle_frontend_joined(world.now, hello).unwrap();
            world.frontends.insert(welcome.frontend, FakeFrontend::default());
            world.connect(Member::Frontend(welcome.frontend), &welcome.model_threads);
        }
        for _ in 0..2 {
            world.on_arrival(Arrival::BackendJoins);
        }
        world
    }

    fn connect(&mut self, member: Member, to: &ModelThreads) {
        for thread in (0..to.addresses.len() as u16).map(ModelThreadId) {
            let at = self.now + Span::from_micros(self.random.random_range(10..2_000));
            self.schedule(at, Arrival::Connects(thread, member, to.pass));
        }
    }

    /// Of its connections any may be the first whose end is noticed.
    fn end(&mut self, member: Member) {
        let port = match self.random.random_range(0..=self.threads) {
            thread if thread < self.threads && self.threads > 1 => Port::ModelThread(ModelThreadId(thread)),
            _ => Port::Control,
        };
        self.cluster.handle_disconnected(self.now, port, member, "gone".to_owned());
    }

    fn port_of_plan(&self, plan: PlanId) -> Port {
        if self.threads > 1 { Port::ModelThread(plan.model_thread()) } else { Port::Control }
    }

    fn schedule(&mut self, at: Timestamp, arrival: Arrival) {
        self.arrivals.insert((at, self.next), arrival);
        self.next += 1;
    }

    /// Sends over a connection that keeps order and takes 10 to 400 us.
    fn send(&mut self, connection: String, arrival: Arrival) {
        let at = self.now + Span::from_micros(self.random.random_range(10..400));
        let last = self.last.entry(connection).or_insert(at);
        *last = at.max(*last);
        let at = *last;
        self.schedule(at, arrival);
    }

    fn run(&mut self) {
        loop {
            for output in drain(&mut self.cluster) {
                match output {
                    ClusterOutput::ToFrontend(port, id, message) => {
                        self.send(format!("{port:?} to {id:?}"), Arrival::ToFrontend(port, id, message));
                    }
                    ClusterOutput::ToBackend(port, id, message) => {
                        self.send(format!("{port:?} to {id:?}"), Arrival::ToBackend(id, message));
                    }
                    ClusterOutput::Close(member, reason) => {
                        self.cluster.handle_disconnected(self.now, Port::Control, member, reason);
                    }
                }
            }
            let timer = self.cluster.poll_timeout();
            let arrival = self.arrivals.keys().next().map(|(at, _)| *at);
            match (timer, arrival) {
                (None, None) => break,
                (Some(timer), arrival) if arrival.is_none_or(|at| timer < at) => {
                    self.now = self.now.max(timer);
                    self.cluster.handle_timeout(self.now);
                }
                _ => {
                    let ((at, _), arrival) = self.arrivals.pop_first().unwrap();
                    self.now = self.now.max(at);
                    self.on_arrival(arrival);
                }
            }
        }
    }

    fn on_arrival(&mut self, arrival: Arrival) {
        let now = self.now;
        match arrival {
            Arrival::Submit(id) => self.on_submit(id),
            Arrival::FromFrontend(port, id, message) if self.frontends.contains_key(&id) => {
                self.cluster.handle_frontend_message(now, port, id, message).unwrap();
            }
            Arrival::FromBackend(port, id, message) if self.backends.contains_key(&id) => {
                self.cluster.handle_backend_message(now, port, id, message).unwrap();
            }
            Arrival::Connects(thread, member, pass) => {
                let is_there = match member {
                    Member::Frontend(id) => self.frontends.contains_key(&id),
                    Member::Backend(id) => self.backends.contains_key(&id),
                };
                assert!(!self.cluster.handle_member_connected(now, thread, member, pass ^ 1), "a wrong pass");
                assert_eq!(self.cluster.handle_member_connected(now, thread, member, pass), is_there);
            }
            Arrival::Moves => {
                let (model, to) = (self.random.random_range(0..4), self.random.random_range(0..self.threads));
                self.cluster.move_model(now, ModelId(model), ModelThreadId(to));
            }
            Arrival::ToFrontend(port, id, message) => self.on_frontend_message(port, id, message),
            Arrival::ToBackend(id, message) if self.backends.contains_key(&id) => self.on_backend_message(id, message),
            Arrival::Answer { backend, plan, task, attempt, link } => {
                let Some(frontend) = self.frontends.get_mut(&task.frontend()) else { return };
                if frontend.links.get(&backend) == Some(&link) {
                    assert_eq!(frontend.open.remove(&task), Some(attempt), "answered twice, or a stale answer");
                    self.ended += 1;
                    self.answered += 1;
                } else {
                    let failed = Undelivered { task, link: LinkId::ALL };
                    self.undelivered.entry(plan).or_default().push(failed);
                }
            }
            Arrival::Answered(id, plan) => {
                let undelivered = self.undelivered.remove(&plan).unwrap_or_default();
                let message = BackendToScheduler::Answered { plan, undelivered };
                self.on_arrival(Arrival::FromBackend(self.port_of_plan(plan), id, message));
            }
            Arrival::Link(id, frontend) => {
                if let Some(entry) = self.frontends.get_mut(&frontend).filter(|_| self.backends.contains_key(&id)) {
                    entry.links.insert(id, self.next);
                    let message = BackendToScheduler::Linked { frontend };
                    self.send(format!("from {id:?}"), Arrival::FromBackend(Port::Control, id, message));
                }
            }
            Arrival::BackendDies => {
                let Some(&id) = self.backends.keys().nth(self.random.random_range(0..2)) else { return };
                self.backends.remove(&id);
                self.end(Member::Backend(id));
            }
            Arrival::BackendJoins => {
                let welcome = self.cluster.handle_backend_joined(now, offer(2)).unwrap();
                let hosts = welcome.models.into_iter().collect();
                self.backends.insert(welcome.backend, FakeBackend { hosts, loads: BTreeSet::new() });
                self.connect(Member::Backend(welcome.backend), &welcome.model_threads);
            }
            Arrival::FrontendDies => {
                let Some((id, gone)) = self.frontends.pop_last() else { return };
                self.forgotten += gone.open.len();
                self.end(Member::Frontend(id));
            }
            Arrival::Change => self.on_change(),
            Arrival::FromFrontend(..) | Arrival::FromBackend(..) | Arrival::ToBackend(..) => {}
        }
    }

    fn on_submit(&mut self, id: FrontendId) {
        let Some(frontend) = self.frontends.get_mut(&id) else { return };
        let deadline = self.now + Span::from_millis(self.random.random_range(5..60));
        let (slot, task) = (slot(), TaskId::new(id, frontend.next));
        // Some may not be hosted any more, or never have been.
        let model = ModelId(self.random.random_range(0..4u32).saturating_sub(1));
        let message = FrontendToScheduler::Submit { task, model, deadline, priority: (task.0 % 3) as u8, slot };
        frontend.next += 1;
        frontend.open.insert(task, 0);
        self.submitted += 1;
        let port = frontend.ports.get(&model).copied().unwrap_or_else(|| self.cluster.port_of(model));
        self.send(format!("from {id:?} to {port:?}"), Arrival::FromFrontend(port, id, message));
        if self.random.random_bool(0.2) {
            let cancel = FrontendToScheduler::Cancel { task, model };
            let at = self.now + Span::from_micros(self.random.random_range(400..60_000));
            self.schedule(at, Arrival::FromFrontend(port, id, cancel));
        }
    }

    fn on_frontend_message(&mut self, port: Port, id: FrontendId, message: SchedulerToFrontend) {
        let Some(frontend) = self.frontends.get_mut(&id) else { return };
        match message {
            SchedulerToFrontend::Dropped { task, .. } => {
                assert!(frontend.open.remove(&task).is_some(), "{task:?} ended twice");
                self.ended += 1;
            }
            SchedulerToFrontend::Fence { backend, tasks, .. } => {
                frontend.links.remove(&backend);
                let unanswered: Vec<_> = tasks.into_iter().filter(|task| frontend.open.contains_key(task)).collect();
                for task in &unanswered {
                    *frontend.open.get_mut(task).unwrap() += 1;
                }
                let message = FrontendToScheduler::Fenced { backend, unanswered };
                self.send(format!("from {id:?} to {port:?}"), Arrival::FromFrontend(port, id, message));
                self.schedule(self.now + Span::from_millis(1), Arrival::Link(backend, id));
                if self.backends.contains_key(&backend) {
                    let message = BackendToScheduler::Unlinked { frontend: id };
                    self.send(format!("from {backend:?}"), Arrival::FromBackend(Port::Control, backend, message));
                }
            }
            SchedulerToFrontend::ModelChanged { change, .. } => {
                assert!(frontend.changes.remove(&change), "{change:?} is answered twice");
                self.changed += 1;
            }
            SchedulerToFrontend::Model { model, model_thread, .. } if self.threads > 1 => {
                frontend.ports.insert(model, Port::ModelThread(model_thread));
            }
            SchedulerToFrontend::Model { .. }
            | SchedulerToFrontend::ModelState { .. }
            | SchedulerToFrontend::Clock(_)
            | SchedulerToFrontend::Load(_) => {}
        }
    }

    fn on_change(&mut self) {
        let count = self.frontends.len();
        let Some((&id, frontend)) = self.frontends.iter_mut().nth(self.random.random_range(0..count)) else { return };
        let change = ChangeId(self.next);
        frontend.changes.insert(change);
        let to = if self.random.random_bool(0.6) { ModelChange::Load } else { ModelChange::Unload };
        let name = if self.random.random_bool(0.8) { "m" } else { "n" }.to_owned();
        let message = FrontendToScheduler::ChangeModel { change, to, name };
        self.send(format!("from {id:?}"), Arrival::FromFrontend(Port::Control, id, message));
    }

    /// The repository gets a second version of each model half way.
    fn on_load(&mut self, id: BackendId, load: LoadId, name: &str) {
        let version = 1 + u32::from(self.now > Timestamp(100 * MS));
        let outcome = match self.random.random_range(0..10) {
            0 => LoadOutcome::Failed("bad luck".into()),
            1 => LoadOutcome::NotPlaced,
            _ => LoadOutcome::Ready(model_offer(2, name, version)),
        };
        if matches!(outcome, LoadOutcome::Ready(_)) {
            self.backends.get_mut(&id).unwrap().loads.insert(load);
        }
        let at = self.now + Span::from_micros(self.random.random_range(100..20_000));
        self.schedule(at, Arrival::FromBackend(Port::Control, id, BackendToScheduler::Loaded { load, outcome }));
    }

    fn on_backend_message(&mut self, id: BackendId, message: SchedulerToBackend) {
        match message {
            SchedulerToBackend::FrontendJoined { frontend, .. } => {
                self.on_arrival(Arrival::Link(id, frontend));
            }
            SchedulerToBackend::Plan(plan) => self.on_plan(id, plan),
            SchedulerToBackend::Cancel { plan, task } => self.on_cancel(id, plan, task),
            SchedulerToBackend::Load { load, name } => self.on_load(id, load, &name),
            SchedulerToBackend::Host { load, model } => {
                let backend = self.backends.get_mut(&id).unwrap();
                assert!(backend.loads.remove(&load), "{load:?} is to be hosted, but it is not loaded");
                backend.hosts.insert(model);
            }
            SchedulerToBackend::Discard { load } => {
                self.backends.get_mut(&id).unwrap().loads.remove(&load);
            }
            SchedulerToBackend::Unload { model } => {
                self.backends.get_mut(&id).unwrap().hosts.remove(&model);
                let at = self.now + Span::from_millis(self.random.random_range(0..8));
                self.schedule(at, Arrival::FromBackend(Port::Control, id, BackendToScheduler::Unloaded { model }));
            }
            SchedulerToBackend::FrontendLeft { .. } | SchedulerToBackend::Clock(_) => {}
        }
    }

    /// Drops a task if its answer is not on its way for good.
    fn on_cancel(&mut self, id: BackendId, plan: PlanId, task: TaskId) {
        let is_its = |arrival: &Arrival| match arrival {
            Arrival::Answer { plan: other, task: of, .. } => (*other, *of) == (plan, task),
            _ => false,
        };
        if self.random.random_bool(0.7) && self.arrivals.extract_if(.., |_, arrival| is_its(arrival)).count() == 1 {
            self.cancelled += 1;
            let cancelled = BackendToScheduler::Cancelled { plan, task };
            self.schedule(self.now, Arrival::FromBackend(self.port_of_plan(plan), id, cancelled));
        }
    }

    fn on_plan(&mut self, id: BackendId, plan: BatchPlan) {
        assert!(plan.exec_at <= plan.latest && !plan.tasks.is_empty());
        let hosts = self.backends[&id].hosts.contains(&plan.model);
        // What a model's new owner says may overtake what its former one did; backends refuse such a plan.
        assert!(hosts || self.threads > 1, "{id:?} does not host {:?}", plan.model);
        let started_at = plan.exec_at.max(self.now);
        let finished_at = started_at + Span::from_millis(5 + plan.tasks.len() as i64);
        let outcome = if started_at > plan.latest {
            PlanOutcome::WindowMissed { rejected_at: started_at }
        } else {
            PlanOutcome::Executed { started_at, finished_at }
        };
        let mut unread = Vec::new();
        let mut answered_at = finished_at;
        for PlannedTask { task, attempt, .. } in plan.tasks {
            let link = self.frontends.get(&task.frontend()).and_then(|frontend| frontend.links.get(&id));
            match link {
                Some(&link) if hosts && self.random.random_bool(0.97) => {
                    let at = finished_at + Span::from_micros(self.random.random_range(10..900));
                    answered_at = answered_at.max(at);
                    self.schedule(at, Arrival::Answer { backend: id, plan: plan.plan, task, attempt, link });
                }
                _ => unread.push(Undelivered { task, link: LinkId::ALL }),
            }
        }
        let done = plan_done(plan.plan, outcome, unread);
        self.schedule(finished_at, Arrival::FromBackend(self.port_of_plan(plan.plan), id, done));
        self.schedule(answered_at + Span(1), Arrival::Answered(id, plan.plan));
    }
}

fn run_seed(seed: u64, threads: u16) -> World {
    let mut world = World::new(seed, threads);
    for _ in 0..400 {
        let at = Timestamp(world.random.random_range(MS..200 * MS));
        let frontend = FrontendId(world.random.random_range(0..3));
        world.schedule(at, Arrival::Submit(frontend));
    }
    for _ in 0..world.random.random_range(0..4) {
        let at = Timestamp(world.random.random_range(MS..200 * MS));
        world.schedule(at, Arrival::BackendDies);
        let back = at + Span(world.random.random_range(0..20 * MS));
        world.schedule(back, Arrival::BackendJoins);
    }
    for _ in 0..world.random.random_range(0..8) {
        let at = Timestamp(world.random.random_range(MS..200 * MS));
        world.schedule(at, Arrival::Change);
    }
    if threads > 1 {
        for _ in 0..world.random.random_range(0..12) {
            let at = Timestamp(world.random.random_range(MS..200 * MS));
            world.schedule(at, Arrival::Moves);
        }
    }
    if world.random.random_bool(0.3) {
        let at = Timestamp(world.random.random_range(MS..200 * MS));
        world.schedule(at, Arrival::FrontendDies);
    }
    world.run();
    let open: Vec<_> = world.frontends.values().flat_map(|frontend| frontend.open.keys()).collect();
    assert!(open.is_empty(), "lost: {open:?}");
    assert_eq!(world.ended + world.forgotten, world.submitted);
    assert!(world.cluster.shards.iter().all(Shard::is_idle), "something is left, or a count is off");
    let waits: Vec<_> = world.frontends.values().flat_map(|frontend| &frontend.changes).collect();
    assert!(waits.is_empty(), "without an answer: {waits:?}");
    for (id, backend) in &world.backends {
        let known = world.cluster.control.hosted_by(*id);
        assert_eq!((&backend.hosts, backend.loads.len()), (&known, 0), "{id:?} hosts something else");
    }
    world
}

#[test]
fn each_task_ends_exactly_once_whatever_fails() {
    let seeds = match std::env::var("DOWNBEAT_SEED") {
        Ok(seed) => {
            let seed: u64 = seed.parse().expect("DOWNBEAT_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..400,
    };
    let (mut answered, mut changed, mut cancelled) = (0, 0, 0);
    for (seed, threads) in seeds.flat_map(|seed| [(seed, 1), (seed, 3)]) {
        let outcome = std::panic::catch_unwind(|| {
            let world = run_seed(seed, threads);
            (world.answered, world.changed, world.cancelled)
        });
        let counts = outcome.unwrap_or_else(|_| {
            panic!("seed {seed} failed with {threads} ModelThreads; DOWNBEAT_SEED={seed} replays it")
        });
        (answered, changed, cancelled) = (answered + counts.0, changed + counts.1, cancelled + counts.2);
    }
    assert!(answered > 0 && changed > 0 && cancelled > 0, "a test in which nothing is answered shows nothing");
}

/// Of two backends one is cut off from one frontend: none of that frontend's tasks is planned there.
#[test]
fn a_backend_that_cannot_reach_a_frontend_gets_none_of_its_tasks() {
    let mut cluster = scheduler(&config());
    let now = Timestamp(0);
    let (frontend, cut_off) = join(&mut cluster, now);
    let other = cluster.handle_backend_joined(now, offer(1)).unwrap().backend;
    cluster.handle_backend_message(now, Port::Control, other, BackendToScheduler::Linked { frontend }).unwrap();
    let unlinked = BackendToScheduler::Unlinked { frontend };
    cluster.handle_backend_message(now, Port::Control, cut_off, unlinked).unwrap();
    let planned_at = |cluster: &mut Cluster, first: u64| {
        let mut backends = BTreeSet::new();
        for sequence in first..first + 8 {
            let at = Timestamp(sequence as i64 * 100 * MS);
            let task = submit(frontend, sequence, at + Span::from_millis(25));
            cluster.handle_frontend_message(at, Port::Control, frontend, task).unwrap();
            while let Some(due) = cluster.poll_timeout().filter(|due| *due < at + Span::from_millis(50)) {
                cluster.handle_timeout(due);
            }
            for output in drain(cluster) {
                let ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Plan(plan)) = output else { continue };
                backends.insert(backend);
                let (started_at, finished_at) = (plan.exec_at, plan.exec_at + Span::from_millis(6));
                let done = plan_done(plan.plan, PlanOutcome::Executed { started_at, finished_at }, vec![]);
                cluster.handle_backend_message(finished_at, Port::Control, backend, done).unwrap();
                let answered = BackendToScheduler::Answered { plan: plan.plan, undelivered: vec![] };
                cluster.handle_backend_message(finished_at, Port::Control, backend, answered).unwrap();
            }
        }
        backends
    };
    assert_eq!(planned_at(&mut cluster, 0), [other].into());
    let linked = BackendToScheduler::Linked { frontend };
    cluster.handle_backend_message(Timestamp(900 * MS), Port::Control, cut_off, linked).unwrap();
    assert!(planned_at(&mut cluster, 10).contains(&other), "one of the two, which are alike");
    // When nobody reaches it, its tasks end at once and with the reason.
    for backend in [cut_off, other] {
        let unlinked = BackendToScheduler::Unlinked { frontend };
        cluster.handle_backend_message(Timestamp(2_000 * MS), Port::Control, backend, unlinked).unwrap();
    }
    drain(&mut cluster);
    let late = Timestamp(2_001 * MS);
    let task = submit(frontend, 99, late + Span::from_millis(25));
    cluster.handle_frontend_message(late, Port::Control, frontend, task).unwrap();
    let dropped = SchedulerToFrontend::Dropped { task: TaskId::new(frontend, 99), reason: DropReason::NoBackend };
    assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(Port::Control, frontend, dropped)]);
}
