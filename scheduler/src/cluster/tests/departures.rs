//! GPUs that hang, backends that fall silent, and members and schedulers that leave in good order.

use super::*;

/// One frontend linked to one backend of two GPUs.
fn with_two_gpus() -> (Cluster, FrontendId, BackendId) {
    let (mut cluster, now) = (scheduler(&config()), Timestamp(0));
    let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
    let backend = add_backend(&mut cluster, now, offer(2)).backend;
    tell(&mut cluster, now, backend, BackendToControl::Linked { frontend, link: LinkId(1) });
    drain(&mut cluster);
    (cluster, frontend, backend)
}

fn tell(cluster: &mut Cluster, now: Timestamp, backend: BackendId, message: impl Into<BackendToScheduler>) {
    cluster.handle_backend_message(now, Port::Control, backend, message).unwrap();
}

/// Submits a task that has so long, and waits for its plan. Yields it with the instant at which it left.
fn planned(cluster: &mut Cluster, frontend: FrontendId, now: Timestamp, sequence: u64, slo_ms: i64) -> BatchPlan {
    let task = submit(frontend, sequence, now + Span::from_millis(slo_ms));
    cluster.handle_frontend_message(now, Port::Control, frontend, task).unwrap();
    next_plan(cluster)
}

fn next_plan(cluster: &mut Cluster) -> BatchPlan {
    loop {
        let mut plans = drain(cluster).into_iter().filter_map(|output| match output {
            ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan)) => Some(plan),
            _ => None,
        });
        if let Some(plan) = plans.next_back() {
            return plan;
        }
        let at = cluster.poll_timeout().expect("a task waits");
        cluster.handle_timeout(at);
    }
}

fn is_told_gpus(outputs: &[ClusterOutput]) -> Vec<u32> {
    let told = outputs.iter().filter_map(|output| match output {
        ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Model { gpus, .. }) => Some(*gpus),
        _ => None,
    });
    told.collect()
}

#[test]
fn what_a_hanging_gpu_had_runs_elsewhere_and_nothing_goes_there_until_it_works() {
    let (mut cluster, frontend, backend) = with_two_gpus();
    let plan = planned(&mut cluster, frontend, Timestamp(0), 0, 5_000);
    let now = plan.latest + Span::from_millis(1_000);
    tell(&mut cluster, now, backend, BackendToControl::Usable { gpu_index: plan.gpu_index, is_usable: false });
    assert_eq!(is_told_gpus(&drain(&mut cluster)), [1]);
    let (task, link) = (plan.tasks[0].task, LinkId::NONE);
    let outcome = PlanOutcome::Abandoned { abandoned_at: now };
    tell(&mut cluster, now, backend, plan_done(plan.plan, outcome, vec![Undelivered { task, link }]));
    let fence = SchedulerToFrontend::Fence { backend, link, tasks: vec![task] };
    assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(Port::Control, frontend, fence)], "no link is to blame");
    let fenced = FrontendToModelThread::Fenced { backend, unanswered: vec![task] };
    cluster.handle_frontend_message(now, Port::Control, frontend, fenced).unwrap();
    cluster.handle_timeout(now);
    let late = drain(&mut cluster);
    let dropped = SchedulerToFrontend::Dropped { task, reason: DropReason::BackendLost };
    assert_eq!(late, [ClusterOutput::ToFrontend(Port::Control, frontend, dropped)], "its deadline is over");

    for sequence in 1..4 {
        let at = now + Span::from_millis(100 * sequence as i64);
        let other = planned(&mut cluster, frontend, at, sequence, 50);
        assert_ne!(other.gpu_index, plan.gpu_index);
        let finished_at = other.exec_at + Span::from_millis(6);
        let outcome = PlanOutcome::Executed { started_at: other.exec_at, finished_at };
        tell(&mut cluster, finished_at, backend, plan_done(other.plan, outcome, vec![]));
        let answered = BackendToModelThread::Answered { plan: other.plan, undelivered: vec![] };
        tell(&mut cluster, finished_at, backend, answered);
    }
    let answered = BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] };
    tell(&mut cluster, now, backend, answered);
    tell(&mut cluster, now, backend, BackendToControl::Usable { gpu_index: plan.gpu_index, is_usable: true });
    assert_eq!(is_told_gpus(&drain(&mut cluster)), [2]);
    let unknown = BackendToControl::Usable { gpu_index: 2, is_usable: true };
    assert!(cluster.handle_backend_message(now, Port::Control, backend, unknown).is_err());
}

#[test]
fn a_task_that_was_given_up_in_time_runs_on_another_gpu_and_not_for_ever() {
    let (mut cluster, frontend, backend) = with_two_gpus();
    let mut plan = planned(&mut cluster, frontend, Timestamp(0), 0, 60_000);
    let task = plan.tasks[0].task;
    for attempt in 0..2 {
        assert_eq!((plan.tasks[0].task, plan.tasks[0].attempt), (task, attempt));
        // Long before its deadline, as windows open early for this test only.
        let now = Timestamp(i64::from(attempt) * MS);
        let outcome = PlanOutcome::Abandoned { abandoned_at: now };
        let undelivered = vec![Undelivered { task, link: LinkId::NONE }];
        tell(&mut cluster, now, backend, plan_done(plan.plan, outcome, undelivered));
        let gpu_index = plan.gpu_index;
        tell(&mut cluster, now, backend, BackendToControl::Usable { gpu_index, is_usable: false });
        tell(&mut cluster, now, backend, BackendToControl::Usable { gpu_index, is_usable: true });
        let fenced = FrontendToModelThread::Fenced { backend, unanswered: vec![task] };
        cluster.handle_frontend_message(now, Port::Control, frontend, fenced).unwrap();
        plan = next_plan(&mut cluster);
    }
    let undelivered = vec![Undelivered { task, link: LinkId::NONE }];
    let now = Timestamp(9 * MS);
    let outcome = PlanOutcome::Abandoned { abandoned_at: now };
    tell(&mut cluster, now, backend, plan_done(plan.plan, outcome, undelivered));
    drain(&mut cluster);
    let fenced = FrontendToModelThread::Fenced { backend, unanswered: vec![task] };
    cluster.handle_frontend_message(now, Port::Control, frontend, fenced).unwrap();
    let dropped = SchedulerToFrontend::Dropped { task, reason: DropReason::BackendLost };
    assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(Port::Control, frontend, dropped)]);
}

#[test]
fn a_backend_that_says_nothing_of_a_plan_is_closed() {
    let (mut cluster, frontend, backend) = with_two_gpus();
    let plan = planned(&mut cluster, frontend, Timestamp(0), 0, 50);
    let closed = |cluster: &mut Cluster| {
        let closed = drain(cluster).into_iter().filter_map(|output| match output {
            ClusterOutput::Close(member, _) => Some(member),
            _ => None,
        });
        closed.collect::<Vec<_>>()
    };
    let soon = plan.latest + Span::from_millis(3_000);
    cluster.handle_timeout(soon);
    assert_eq!(closed(&mut cluster), []);
    let at = cluster.poll_timeout().expect("plans are looked at");
    assert!(at <= soon + Span::from_millis(250));
    cluster.handle_timeout(plan.latest + Span::from_millis(5_000));
    assert_eq!(closed(&mut cluster), [Member::Backend(backend)]);
}

#[test]
fn a_backend_that_leaves_is_dismissed_once_nothing_is_planned_there() {
    for model_threads in [1, 3] {
        let addresses = if model_threads == 1 { vec![] } else { vec!["s:1".into(), "s:2".into(), "s:3".into()] };
        let has_ports = !addresses.is_empty();
        let mut cluster = scheduler(&ClusterConfig { model_threads, addresses, ..config() });
        let now = Timestamp(0);
        let hello = FrontendHello::new("f:1");
        let frontend = cluster.handle_frontend_joined(now, hello).unwrap();
        let backend = add_backend(&mut cluster, now, offer(1));
        let passes = [
            (Member::Frontend(frontend.frontend), frontend.model_threads.pass),
            (Member::Backend(backend.backend), backend.model_threads.pass),
        ];
        for (id, (member, pass)) in (0..model_threads).flat_map(|id| passes.map(|member| (id, member))) {
            assert!(!has_ports || cluster.handle_member_connected(now, ModelThreadId(id), member, pass));
        }
        let (frontend, backend) = (frontend.frontend, backend.backend);
        tell(&mut cluster, now, backend, BackendToControl::Linked { frontend, link: LinkId(1) });
        assert_eq!(is_told_gpus(&drain(&mut cluster)).last(), Some(&1));
        tell(&mut cluster, now, backend, BackendToControl::Leaving { within: Span::from_millis(25_000) });
        tell(&mut cluster, now, backend, BackendToControl::Leaving { within: Span::from_millis(25_000) });
        let outputs = drain(&mut cluster);
        assert_eq!(is_told_gpus(&outputs), [0]);
        let is_dismissal =
            |output: &&ClusterOutput| matches!(output, ClusterOutput::ToBackend(_, _, SchedulerToBackend::Dismissed));
        assert_eq!(outputs.iter().filter(is_dismissal).count(), usize::from(model_threads));
        let port = cluster.port_of(ModelId(0));
        let task = submit(frontend, 0, Timestamp(25 * MS));
        cluster.handle_frontend_message(now, port, frontend, task).unwrap();
        let dropped = SchedulerToFrontend::Dropped { task: TaskId::new(frontend, 0), reason: DropReason::NoBackend };
        assert_eq!(drain(&mut cluster), [ClusterOutput::ToFrontend(port, frontend, dropped)]);
    }
}

#[test]
fn a_backend_that_is_still_connecting_misses_nothing_that_it_is_told() {
    let addresses = vec!["s:1".into(), "s:2".into()];
    let mut cluster = scheduler(&ClusterConfig { model_threads: 2, addresses, ..config() });
    let now = Timestamp(0);
    let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
    let told = |cluster: &mut Cluster| {
        let told = drain(cluster).into_iter().filter_map(|output| match output {
            ClusterOutput::ToBackend(Port::ModelThread(_), backend, message) => Some((backend, message)),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    let unload = SchedulerToBackend::Unload { model: ModelId(0) };
    let first = add_backend(&mut cluster, now, offer(1));
    let change = FrontendToControl::ChangeModel {
        change: ChangeId(0),
        to: ModelChange::Unload,
        name: "m".into(),
        brought: None,
    };
    cluster.handle_frontend_message(now, Port::Control, frontend, change).unwrap();
    // One that joins with a model that clients have unloaded has to unload it, too.
    let second = add_backend(&mut cluster, now, offer(1));
    assert_eq!(told(&mut cluster), []);
    let Port::ModelThread(owner) = cluster.port_of(ModelId(0)) else { panic!("there are several") };
    for joined in [first, second] {
        let member = Member::Backend(joined.backend);
        assert!(cluster.handle_member_connected(now, owner, member, joined.model_threads.pass));
        assert_eq!(told(&mut cluster), [(joined.backend, unload.clone())]);
    }
}

#[test]
fn a_scheduler_that_leaves_tells_frontends_takes_nobody_in_and_is_idle_in_the_end() {
    let (mut cluster, frontend, backend) = with_two_gpus();
    let plan = planned(&mut cluster, frontend, Timestamp(0), 0, 50);
    let now = plan.exec_at;
    cluster.handle_leaving(now);
    let told = ClusterOutput::ToFrontend(Port::Control, frontend, SchedulerToFrontend::Leaving);
    assert_eq!(drain(&mut cluster), [told]);
    let refused = cluster.handle_frontend_joined(now, FrontendHello::new("f:2"));
    assert_eq!(refused.unwrap_err().to_string(), "the scheduler is about to end and takes nobody in");
    assert!(cluster.handle_backend_joined(now, offer(1)).is_err());
    assert!(!cluster.is_idle(), "a plan is under way");
    let outcome = PlanOutcome::WindowMissed { rejected_at: now };
    let undelivered = vec![Undelivered { task: plan.tasks[0].task, link: LinkId::NONE }];
    tell(&mut cluster, now, backend, plan_done(plan.plan, outcome, undelivered));
    tell(&mut cluster, now, backend, BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] });
    assert!(!cluster.is_idle(), "its frontend has yet to say what it knows of the task");
    let fenced = FrontendToModelThread::Fenced { backend, unanswered: vec![] };
    cluster.handle_frontend_message(now, Port::Control, frontend, fenced).unwrap();
    assert!(cluster.is_idle());
}

/// It has joined, and does not say that it obeys: it is neither asked to load, nor waited for, nor forgotten.
#[test]
fn a_backend_that_does_not_obey_yet_holds_up_no_change_and_hears_of_it_later() {
    let (mut cluster, frontend, backend) = pair(Timestamp(0));
    let now = Timestamp(0);
    let late = cluster.handle_backend_joined(now, offer(1)).unwrap().backend;
    let tell = |cluster: &mut Cluster, from, message| {
        cluster.handle_backend_message(now, Port::Control, from, message).unwrap();
        drain(cluster)
    };
    let unload = |to, model| ClusterOutput::ToBackend(Port::Control, to, SchedulerToBackend::Unload { model });
    let outputs = change(&mut cluster, frontend, 1, ModelChange::Unload);
    assert!(outputs.contains(&unload(backend, ModelId(0))) && !outputs.contains(&unload(late, ModelId(0))));
    let outputs = tell(&mut cluster, backend, BackendToControl::Unloaded { model: ModelId(0) });
    assert_eq!(outputs.last(), Some(&changed(frontend, 1, None)));
    let outputs = tell(&mut cluster, late, BackendToControl::Obeys { epoch: EPOCH });
    assert!(outputs.contains(&unload(late, ModelId(0))), "{outputs:?}");
    // The next one joins and is never heard of again.
    let silent = cluster.handle_backend_joined(now, offer(1)).unwrap().backend;
    let outputs = change(&mut cluster, frontend, 2, ModelChange::Load);
    let asked = outputs.iter().filter_map(|output| match output {
        ClusterOutput::ToBackend(_, to, SchedulerToBackend::Load { load, .. }) => Some((*to, *load)),
        _ => None,
    });
    let asked: Vec<_> = asked.collect();
    assert!(asked.len() == 2 && asked.iter().all(|(to, _)| *to != silent), "{outputs:?}");
    for (to, load) in asked {
        let outcome = LoadOutcome::Ready { offer: model_offer(1, "m", 1), is_last: true };
        let outputs = tell(&mut cluster, to, BackendToControl::Loaded { load, outcome });
        assert_eq!(outputs.contains(&changed(frontend, 2, None)), to == late, "{outputs:?}");
    }
}
