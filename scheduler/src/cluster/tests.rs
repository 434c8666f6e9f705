//! Single rules, everything on one thread. All of it together, with faults, is simulated in the crate `fabric`.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use proto::{
    Brought, ChangeId, Epoch, FilesDigest, LatencyProfile, LinkId, LoadId, PlanId, SlotDescriptor, TaskId, Weights,
    backend_to_scheduler::{BackendToScheduler, LoadOutcome, ModelOffer, PlanOutcome, Undelivered},
    frame::Addressed,
    frontend_to_scheduler::{FrontendToScheduler, ModelChange},
    scheduler_to_backend::{BatchPlan, PlannedTask},
    scheduler_to_frontend::{DropReason, ModelState, SchedulerLoad},
    stages::SchedulerStamps,
};

mod advice;
mod claims;
mod departures;
mod draining;
mod dynamic;
mod evacuations;
mod given_back;
mod handovers;
mod networks;
mod patience;
mod placements;
mod takeovers;
mod weights;

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
        succession: SuccessionConfig::ALONE,
        first_id: 0,
        gpu_prices: BTreeMap::new(),
        advice: AdviceConfig::default(),
        placement: None,
    }
}

fn scheduler(config: &ClusterConfig) -> Cluster {
    Cluster::new(config, [7; 32]).unwrap()
}

fn slot() -> SlotDescriptor {
    SlotDescriptor { slot: 3, input_offset: 0, input_bytes: 8, answer_offset: 64, answer_bytes_max: 128, key: 5 }
}

fn offer(gpus: u32) -> BackendHello {
    BackendHello::new(gpus, vec![model_offer(gpus, "m", 1)])
}

fn model_offer(gpus: u32, name: &str, version: u32) -> ModelOffer {
    let profile = LatencyProfile::linear(1.0, 5.0, 16).unwrap();
    let gpu_indexes = (0..gpus).collect();
    let (name, version, weights) = (name.into(), version.to_string(), Weights::default());
    ModelOffer {
        name,
        version,
        profile,
        input_bytes: 10_000,
        gpu_indexes,
        weights,
        cost: None,
        queue_max: Vec::new(),
        is_guest: false,
    }
}

fn submit(frontend: FrontendId, sequence: u64, deadline: Timestamp) -> FrontendToModelThread {
    FrontendToModelThread::Submit {
        task: TaskId::new(frontend, sequence),
        model: ModelId(0),
        deadline,
        priority: 0,
        application: proto::Application::NONE,
        is_first: true,
        slot: slot(),
    }
}

/// A connection carries messages to control, to a ModelThread, or, with one ModelThread, to both.
impl Cluster {
    pub(super) fn handle_frontend_message(
        &mut self,
        now: Timestamp,
        at: Port,
        frontend: FrontendId,
        message: impl Into<FrontendToScheduler>,
    ) -> Result<(), Violation> {
        match message.into() {
            Addressed::Control(message) => self.handle_frontend_to_control(now, frontend, message),
            Addressed::ModelThread(message) => {
                self.handle_frontend_to_model_thread(now, at.thread(), frontend, message)
            }
        }
    }

    pub(super) fn handle_backend_message(
        &mut self,
        now: Timestamp,
        at: Port,
        backend: BackendId,
        message: impl Into<BackendToScheduler>,
    ) -> Result<(), Violation> {
        match message.into() {
            Addressed::Control(message) => self.handle_backend_to_control(now, backend, message),
            Addressed::ModelThread(message) => self.handle_backend_to_model_thread(now, at.thread(), backend, message),
        }
    }
}

impl Port {
    fn thread(self) -> ModelThreadId {
        match self {
            Self::Control => ModelThreadId(0),
            Self::ModelThread(thread) => thread,
        }
    }
}

fn drain(cluster: &mut Cluster) -> Vec<ClusterOutput> {
    std::iter::from_fn(|| cluster.poll_output()).collect()
}

fn plan_done(plan: PlanId, outcome: PlanOutcome, undelivered: Vec<Undelivered>) -> BackendToModelThread {
    let (arrived_at, fetched_at) = (Timestamp::PAST, Timestamp::PAST);
    BackendToModelThread::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at }
}

/// One frontend linked to one backend of one GPU.
fn pair(now: Timestamp) -> (Cluster, FrontendId, BackendId) {
    let mut cluster = scheduler(&config());
    let (frontend, backend) = join(&mut cluster, now);
    (cluster, frontend, backend)
}

/// The first epoch of a scheduler that is alone.
const EPOCH: Epoch = Epoch { number: 1, scheduler: 0 };

/// A backend joins and obeys.
fn add_backend(cluster: &mut Cluster, now: Timestamp, hello: BackendHello) -> BackendWelcome {
    let welcome = cluster.handle_backend_joined(now, hello).unwrap();
    assert_eq!(welcome.claim.epoch, EPOCH);
    let obeys = BackendToControl::Obeys { epoch: EPOCH };
    cluster.handle_backend_message(now, Port::Control, welcome.backend, obeys).unwrap();
    welcome
}

fn join(cluster: &mut Cluster, now: Timestamp) -> (FrontendId, BackendId) {
    let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
    let backend = add_backend(cluster, now, offer(1)).backend;
    cluster
        .handle_backend_message(now, Port::Control, backend, BackendToControl::Linked { frontend, link: LinkId(1) })
        .unwrap();
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
fn a_task_whose_input_is_late_ends_once_and_only_as_its_backend_says() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    for sequence in 0..2 {
        let task = submit(frontend, sequence, Timestamp(25 * MS));
        cluster.handle_frontend_message(Timestamp(0), Port::Control, frontend, task).unwrap();
    }
    let fires_at = cluster.poll_timeout().unwrap();
    cluster.handle_timeout(fires_at);
    let outputs = drain(&mut cluster);
    let [ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan))] = &outputs[..] else { panic!("{outputs:?}") };
    let (plan, task) = (plan.plan, TaskId::new(frontend, 1));
    let mut tell = |backend, message| {
        let said = cluster.handle_backend_message(fires_at, Port::Control, backend, message);
        (said, drain(&mut cluster))
    };
    let late = |task| BackendToModelThread::InputLate { plan, task };
    let (said, outputs) = tell(backend, late(task));
    let [ClusterOutput::ToFrontend(_, to, SchedulerToFrontend::Dropped { task: dropped, reason })] = &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!((said, *to, *dropped, *reason), (Ok(()), frontend, task, DropReason::InputLate));
    assert!(tell(backend, late(task)).0.is_err(), "it has it no more");
    assert!(tell(backend, late(TaskId::new(frontend, 7))).0.is_err(), "it never had it");
    let outcome = PlanOutcome::Executed { started_at: fires_at, finished_at: fires_at };
    assert_eq!(tell(backend, plan_done(plan, outcome, vec![])).0, Ok(()));
    assert_eq!(tell(backend, BackendToModelThread::Answered { plan, undelivered: vec![] }).0, Ok(()));
    assert!(cluster.is_idle(), "the other one was answered");
}

#[test]
fn as_many_requests_of_a_priority_wait_as_the_model_says_however_many_rows_they_have() {
    let mut cluster = scheduler(&config());
    let frontend = cluster.handle_frontend_joined(Timestamp(0), FrontendHello::new("f:1")).unwrap().frontend;
    let hello = BackendHello::new(1, vec![ModelOffer { queue_max: vec![0, 2, 1], ..model_offer(1, "m", 1) }]);
    let backend = add_backend(&mut cluster, Timestamp(0), hello).backend;
    let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
    cluster.handle_backend_message(Timestamp(0), Port::Control, backend, linked).unwrap();
    drain(&mut cluster);
    // Priority, whether a request begins, and whether the task is let in.
    let tasks = [
        (1, true, true),
        (1, false, true),
        (1, true, false),
        (1, false, true),
        (2, true, true),
        (2, true, false),
        (0, true, true),
        (9, true, true),
    ];
    for (sequence, (priority, is_first, is_let_in)) in (0..).zip(tasks) {
        let slot = slot();
        let (task, model, deadline) = (TaskId::new(frontend, sequence), ModelId(0), Timestamp(25 * MS));
        let submit = FrontendToModelThread::Submit {
            task,
            model,
            deadline,
            priority,
            application: proto::Application::NONE,
            is_first,
            slot,
        };
        cluster.handle_frontend_message(Timestamp(0), Port::Control, frontend, submit).unwrap();
        let dropped = SchedulerToFrontend::Dropped { task, reason: DropReason::QueueFull };
        let expected = (!is_let_in).then_some(ClusterOutput::ToFrontend(Port::Control, frontend, dropped));
        assert_eq!(drain(&mut cluster), Vec::from_iter(expected), "task {sequence}");
    }
}

#[test]
fn frontends_are_told_why_a_model_could_not_be_loaded_until_it_is_or_its_backend_has_gone() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let not_loaded = |name: &str, reason: Option<&str>| {
        let (name, version, reason) = (name.to_owned(), "1".to_owned(), reason.map(str::to_owned));
        SchedulerToFrontend::NotLoaded { name, version, reason }
    };
    let told = |cluster: &mut Cluster, to: FrontendId| {
        let outputs = drain(cluster).into_iter().filter_map(|output| match output {
            ClusterOutput::ToFrontend(_, whom, told @ SchedulerToFrontend::NotLoaded { .. }) if whom == to => {
                Some(told)
            }
            _ => None,
        });
        outputs.collect::<Vec<_>>()
    };
    for name in ["n", "o"] {
        let (name, version, reason) = (name.to_owned(), "1".to_owned(), "it is torn".repeat(200));
        let message = BackendToControl::NotLoaded { name, version, reason };
        cluster.handle_backend_message(Timestamp(0), Port::Control, backend, message).unwrap();
    }
    let cut = "it is torn".repeat(200)[..1024].to_owned();
    let both = ["n", "o"].map(|name| not_loaded(name, Some(&cut)));
    assert_eq!(told(&mut cluster, frontend), both);
    let late = cluster.handle_frontend_joined(Timestamp(0), FrontendHello::new("f:2")).unwrap().frontend;
    assert_eq!(told(&mut cluster, late), both);
    let asked =
        FrontendToControl::ChangeModel { change: ChangeId(1), to: ModelChange::Load, name: "n".into(), brought: None };
    cluster.handle_frontend_message(Timestamp(0), Port::Control, frontend, asked).unwrap();
    let outcome = LoadOutcome::Ready { offer: model_offer(1, "n", 1), is_last: true };
    let loaded = BackendToControl::Loaded { load: proto::LoadId(0), outcome };
    cluster.handle_backend_message(Timestamp(0), Port::Control, backend, loaded).unwrap();
    assert_eq!(told(&mut cluster, late), [not_loaded("n", None)]);
    cluster.handle_disconnected(Timestamp(0), Port::Control, Member::Backend(backend), String::new());
    assert_eq!(told(&mut cluster, late), [not_loaded("o", None)]);
}

#[test]
fn a_frontend_that_asks_for_the_time_is_told_how_much_there_is_to_do() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let none = SchedulerLoad::default();
    let load = |cluster: &mut Cluster| {
        let request = FrontendToControl::ClockRequest { sent_at: Timestamp(0), resp: Span::ZERO };
        cluster.handle_frontend_message(Timestamp(1), Port::Control, frontend, request).unwrap();
        match &drain(cluster)[..] {
            [
                ClusterOutput::ToFrontend(Port::Control, _, SchedulerToFrontend::Clock(_)),
                ClusterOutput::ToFrontend(Port::Control, to, SchedulerToFrontend::Load(load)),
            ] if *to == frontend => **load,
            outputs => panic!("{outputs:?}"),
        }
    };
    assert_eq!(load(&mut cluster), SchedulerLoad { gpus: 1, members: 2, obeying: 1, ..none });
    cluster
        .handle_frontend_message(Timestamp(0), Port::Control, frontend, submit(frontend, 0, Timestamp(25 * MS)))
        .unwrap();
    assert_eq!(load(&mut cluster), SchedulerLoad { queued: 1, gpus: 1, members: 2, obeying: 1, ..none });
    let fires_at = cluster.poll_timeout().unwrap();
    cluster.handle_timeout(fires_at);
    drain(&mut cluster);
    assert_eq!(load(&mut cluster), SchedulerLoad { batches: 1, gpus: 1, members: 2, obeying: 1, ..none });
    cluster.handle_disconnected(fires_at, Port::Control, Member::Backend(backend), String::new());
    drain(&mut cluster);
    assert_eq!(load(&mut cluster), SchedulerLoad { members: 1, ..none });
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
    let plan = (0..100).find_map(|_| {
        let at = cluster.poll_timeout().expect("a task waits").max(now);
        cluster.handle_timeout(at);
        drain(cluster).into_iter().find_map(|output| match output {
            ClusterOutput::ToBackend(Port::Control, _, SchedulerToBackend::Plan(plan)) => Some(plan),
            _ => None,
        })
    });
    let plan = plan.expect("it is due within a few timers");
    let finished_at = plan.exec_at + execution;
    let outcome = PlanOutcome::Executed { started_at: plan.exec_at, finished_at };
    let done = plan_done(plan.plan, outcome, vec![]);
    cluster.handle_backend_message(finished_at, Port::Control, backend, done).unwrap();
    let answered = BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] };
    cluster.handle_backend_message(finished_at, Port::Control, backend, answered).unwrap();
    plan
}

#[test]
fn what_executions_take_is_planned_with_and_told() {
    for (reestimate, latency_us, errors) in [(true, 7_200, 32), (false, 6_000, 40)] {
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
        let request = FrontendToControl::ClockRequest { sent_at: Timestamp(0), resp: Span::ZERO };
        let asks_at = Timestamp(9_000 * MS);
        cluster.handle_frontend_message(asks_at, Port::Control, members.0, request).unwrap();
        let mut outputs = drain(&mut cluster).into_iter();
        let predicted = outputs.find_map(|output| match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Load(load)) => Some(load.predictions.infer),
            _ => None,
        });
        let infer = predicted.expect("it has asked");
        assert_eq!((infer.actions, infer.duration.under.count(), infer.duration.over.count()), (40, errors, 0));
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
    let fast = add_backend(&mut cluster, Timestamp(0), faster).backend;
    cluster
        .handle_backend_message(
            Timestamp(0),
            Port::Control,
            fast,
            BackendToControl::Linked { frontend, link: LinkId(1) },
        )
        .unwrap();
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
    let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
    let backend = add_backend(&mut cluster, now, offer(3)).backend;
    cluster
        .handle_backend_message(now, Port::Control, backend, BackendToControl::Linked { frontend, link: LinkId(1) })
        .unwrap();
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
    let message = FrontendToControl::ChangeModel { change: ChangeId(change), to, name: "m".into(), brought: None };
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
    let unknown = FrontendToControl::ChangeModel {
        change: ChangeId(9),
        to: ModelChange::Unload,
        name: "x".into(),
        brought: None,
    };
    cluster.handle_frontend_message(now, Port::Control, frontend, unknown).unwrap();
    // It may be an ensemble, of which only frontends know.
    let state = |state| SchedulerToFrontend::ModelState { name: "x".to_owned(), state, loads: 0, brought: None };
    let [unloading, unloaded] = [ModelState::Unloading, ModelState::Unloaded]
        .map(|of| ClusterOutput::ToFrontend(Port::Control, frontend, state(of)));
    let expected = [unloading, unloaded, changed(frontend, 9, None)];
    assert_eq!(drain(&mut cluster), expected, "what no backend hosts is unloaded at once");

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
        .handle_backend_message(now, Port::Control, backend, BackendToControl::Unloaded { model: ModelId(0) })
        .unwrap();
    assert_eq!(drain(&mut cluster).last(), Some(&changed(frontend, 1, None)));
    cluster.handle_frontend_message(now, Port::Control, frontend, submit(frontend, 1, Timestamp(90 * MS))).unwrap();
    assert_eq!(drain(&mut cluster), [dropped(1)]);

    // A backend that comes meanwhile is told to do without it, too.
    let late = add_backend(&mut cluster, now, offer(1));
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
        .handle_backend_message(now, Port::Control, backend, BackendToControl::Loaded { load, outcome: failed })
        .unwrap();
    let reason = "backend 0: model.onnx: it is torn";
    let outputs = drain(&mut cluster);
    assert_eq!(outputs.last(), Some(&changed(frontend, 2, Some(reason))));
    let not_loaded =
        SchedulerToFrontend::NotLoaded { name: "m".into(), version: String::new(), reason: Some(reason.into()) };
    assert!(outputs.contains(&ClusterOutput::ToFrontend(Port::Control, frontend, not_loaded)), "{outputs:?}");

    let outputs = change(&mut cluster, frontend, 3, ModelChange::Load);
    let [ClusterOutput::ToBackend(Port::Control, _, SchedulerToBackend::Load { load, .. }), ..] = outputs[..] else {
        panic!("{outputs:?}")
    };
    let ready = LoadOutcome::Ready { offer: model_offer(1, "m", 1), is_last: true };
    cluster
        .handle_backend_message(now, Port::Control, backend, BackendToControl::Loaded { load, outcome: ready })
        .unwrap();
    let outputs = drain(&mut cluster);
    let host = ClusterOutput::ToBackend(
        Port::Control,
        backend,
        SchedulerToBackend::Host { load, version: "1".into(), model: ModelId(0) },
    );
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

#[test]
fn members_that_come_later_are_told_of_files_that_clients_have_brought() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let now = Timestamp(0);
    let brought = Brought { config: "{}".to_owned(), files: Some(FilesDigest([7; 32])) };
    let load = |cluster: &mut Cluster| -> BTreeMap<BackendId, LoadId> {
        let outputs = drain(cluster).into_iter().filter_map(|output| match output {
            ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Load { load, name, brought: Some(with), .. }) => {
                assert_eq!((&name[..], &with), ("n", &brought));
                Some((backend, load))
            }
            _ => None,
        });
        outputs.collect()
    };
    let message = FrontendToControl::ChangeModel {
        change: ChangeId(1),
        to: ModelChange::Load,
        name: "n".into(),
        brought: Some(brought.clone()),
    };
    cluster.handle_frontend_message(now, Port::Control, frontend, message).unwrap();
    let asked = load(&mut cluster);
    let outcome = LoadOutcome::Ready { offer: model_offer(1, "n", 1), is_last: true };
    let loaded = BackendToControl::Loaded { load: asked[&backend], outcome };
    cluster.handle_backend_message(now, Port::Control, backend, loaded).unwrap();
    let state = SchedulerToFrontend::ModelState {
        name: "n".into(),
        state: ModelState::Serving,
        loads: 1,
        brought: Some(brought.clone()),
    };
    let is_told = |outputs: &[ClusterOutput], frontend: FrontendId| {
        outputs.contains(&ClusterOutput::ToFrontend(Port::Control, frontend, state.clone()))
    };
    let outputs = drain(&mut cluster);
    assert!(outputs.contains(&changed(frontend, 1, None)) && is_told(&outputs, frontend), "{outputs:?}");
    // Its repository has no such model, so it does not offer it.
    let late = add_backend(&mut cluster, now, offer(1)).backend;
    assert_eq!(load(&mut cluster).keys().copied().collect::<Vec<_>>(), [backend, late]);
    let late = cluster.handle_frontend_joined(now, FrontendHello::new("f:2")).unwrap().frontend;
    let outputs = drain(&mut cluster);
    let state = SchedulerToFrontend::ModelState {
        name: "n".into(),
        state: ModelState::Loading,
        loads: 1,
        brought: Some(brought),
    };
    assert!(outputs.contains(&ClusterOutput::ToFrontend(Port::Control, late, state)), "{outputs:?}");
}

/// Of two backends one is cut off from one frontend: none of that frontend's tasks is planned there.
#[test]
fn a_backend_that_cannot_reach_a_frontend_gets_none_of_its_tasks() {
    let mut cluster = scheduler(&config());
    let now = Timestamp(0);
    let (frontend, cut_off) = join(&mut cluster, now);
    let other = add_backend(&mut cluster, now, offer(1)).backend;
    cluster
        .handle_backend_message(now, Port::Control, other, BackendToControl::Linked { frontend, link: LinkId(1) })
        .unwrap();
    let unlinked = BackendToControl::Unlinked { frontend };
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
                let answered = BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] };
                cluster.handle_backend_message(finished_at, Port::Control, backend, answered).unwrap();
            }
        }
        backends
    };
    assert_eq!(planned_at(&mut cluster, 0), [other].into());
    let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
    cluster.handle_backend_message(Timestamp(900 * MS), Port::Control, cut_off, linked).unwrap();
    assert!(planned_at(&mut cluster, 10).contains(&other), "one of the two, which are alike");
    // When nobody reaches it, its tasks end at once and with the reason.
    for backend in [cut_off, other] {
        let unlinked = BackendToControl::Unlinked { frontend };
        cluster.handle_backend_message(Timestamp(2_000 * MS), Port::Control, backend, unlinked).unwrap();
    }
    drain(&mut cluster);
    let late = Timestamp(2_001 * MS);
    let task = submit(frontend, 99, late + Span::from_millis(25));
    cluster.handle_frontend_message(late, Port::Control, frontend, task).unwrap();
    let dropped = SchedulerToFrontend::Dropped { task: TaskId::new(frontend, 99), reason: DropReason::NoBackend };
    assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(Port::Control, frontend, dropped)]);
}
