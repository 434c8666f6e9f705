//! A backend gives back tasks of a frontend that it does not reach, with no link to blame, as soon as they are planned.

use super::*;

const ROUND_TRIP: Span = Span::from_micros(200);

/// Backends that give back what one frontend submits for as long as its links are silent, and execute all else; and
/// frontends that say of each task they are asked about that it has no answer.
struct World {
    cluster: Cluster,
    now: Timestamp,
    silent: FrontendId,
    /// Those whose links to it are.
    giving_back: BTreeSet<BackendId>,
    /// What arrives at the scheduler, and when.
    on_way: Vec<(Timestamp, From)>,
    /// How often each task was planned.
    planned: BTreeMap<TaskId, usize>,
    answered: BTreeSet<TaskId>,
    dropped: BTreeMap<TaskId, (Timestamp, DropReason)>,
    /// Messages about plans and their ends, either way.
    messages: usize,
}

enum From {
    Frontend(FrontendId, FrontendToModelThread),
    Backend(BackendId, BackendToModelThread),
}

impl World {
    fn new(backends: usize) -> (Self, FrontendId, Vec<BackendId>) {
        let (mut cluster, now) = (scheduler(&ClusterConfig { policy: Policy::default(), ..config() }), Timestamp(0));
        let join =
            |cluster: &mut Cluster| cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
        let (silent, other) = (join(&mut cluster), join(&mut cluster));
        let backends: Vec<BackendId> =
            (0..backends).map(|_| add_backend(&mut cluster, now, offer(1)).backend).collect();
        for (&backend, frontend) in backends.iter().flat_map(|backend| [(backend, silent), (backend, other)]) {
            let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
            cluster.handle_backend_message(now, Port::Control, backend, linked).unwrap();
        }
        drain(&mut cluster);
        let (giving_back, on_way, planned, messages) = (BTreeSet::new(), Vec::new(), BTreeMap::new(), 0);
        let (answered, dropped) = (BTreeSet::new(), BTreeMap::new());
        (Self { cluster, now, silent, giving_back, on_way, planned, answered, dropped, messages }, other, backends)
    }

    fn submit(&mut self, frontend: FrontendId, sequence: u64, deadline: Timestamp) -> TaskId {
        let task = submit(frontend, sequence, deadline);
        self.cluster.handle_frontend_message(self.now, Port::Control, frontend, task).unwrap();
        TaskId::new(frontend, sequence)
    }

    fn run_until(&mut self, end: Timestamp) {
        while self.now < end {
            self.now += ROUND_TRIP;
            let now = self.now;
            for (_, from) in self.on_way.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
                self.messages += 1;
                match from {
                    From::Frontend(frontend, message) => {
                        self.cluster.handle_frontend_message(now, Port::Control, frontend, message).unwrap();
                    }
                    From::Backend(backend, message) => {
                        self.cluster.handle_backend_message(now, Port::Control, backend, message).unwrap();
                    }
                }
            }
            self.cluster.handle_timeout(now);
            for output in drain(&mut self.cluster) {
                self.read(output);
            }
        }
    }

    fn read(&mut self, output: ClusterOutput) {
        let now = self.now;
        match output {
            ClusterOutput::ToFrontend(_, frontend, SchedulerToFrontend::Fence { backend, link, tasks }) => {
                assert_eq!(link, LinkId::NONE);
                self.messages += 1;
                let fenced = FrontendToModelThread::Fenced { backend, unanswered: tasks };
                self.on_way.push((now + ROUND_TRIP, From::Frontend(frontend, fenced)));
            }
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Dropped { task, reason }) => {
                assert_eq!(self.dropped.insert(task, (now, reason)), None);
            }
            ClusterOutput::ToBackend(_, backend, SchedulerToBackend::Plan(plan)) => {
                self.messages += 1;
                self.on_plan(backend, &plan);
            }
            _ => {}
        }
    }

    fn on_plan(&mut self, backend: BackendId, plan: &BatchPlan) {
        let (mut undelivered, link) = (vec![], LinkId::NONE);
        for &PlannedTask { task, .. } in &plan.tasks {
            *self.planned.entry(task).or_default() += 1;
            if task.frontend() == self.silent && self.giving_back.contains(&backend) {
                undelivered.push(Undelivered { task, link });
            } else {
                assert!(self.answered.insert(task));
            }
        }
        let rejected_at = self.now;
        let (at, outcome) = match undelivered.len() == plan.tasks.len() {
            true => (self.now + ROUND_TRIP, PlanOutcome::WindowMissed { rejected_at }),
            false => {
                let (started_at, finished_at) = (plan.exec_at, plan.exec_at + Span::from_millis(6));
                (finished_at + ROUND_TRIP, PlanOutcome::Executed { started_at, finished_at })
            }
        };
        let answered = BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] };
        self.on_way.push((at, From::Backend(backend, plan_done(plan.plan, outcome, undelivered))));
        self.on_way.push((at, From::Backend(backend, answered)));
    }
}

/// Sixty tasks of the silent frontend, which all these give back, while another one asks for something every 50 ms and
/// gets it in time. The tasks, and how often each was planned.
fn give_back_for_two_seconds(
    world: &mut World,
    other: FrontendId,
    giving_back: &[BackendId],
) -> (Vec<TaskId>, Vec<usize>) {
    let silent = world.silent;
    world.giving_back.extend(giving_back);
    let tasks: Vec<TaskId> = (0..60).map(|sequence| world.submit(silent, sequence, Timestamp::NEVER)).collect();
    for sequence in 0..40 {
        let asked = world.submit(other, sequence, world.now + Span::from_millis(45));
        world.run_until(world.now + Span::from_millis(50));
        assert!(world.answered.contains(&asked), "{asked:?}: {:?}", world.dropped.get(&asked));
    }
    let visits = tasks.iter().map(|task| world.planned[task]).collect();
    (tasks, visits)
}

#[test]
fn a_silent_link_makes_no_storm_and_holds_up_no_other_frontend() {
    let (mut world, other, backends) = World::new(1);
    let silent = world.silent;
    // After 10, 20, 40, 80, 160, 320, 500 and 500 ms more.
    let (tasks, visits) = give_back_for_two_seconds(&mut world, other, &backends);
    assert!(visits.iter().all(|visits| (4..=9).contains(visits)), "{visits:?}");
    let others = world.planned.values().sum::<usize>() - visits.iter().sum::<usize>();
    let most = 5 * (visits.iter().sum::<usize>() + others);
    assert!(world.messages <= most, "{} messages, at most {most}", world.messages);
    assert!(!world.cluster.is_idle() && world.dropped.is_empty());

    // The link is heard of again: with the first answer all that waits need not wait any more.
    world.giving_back.clear();
    world.submit(silent, 99, world.now + Span::from_millis(40));
    world.run_until(world.now + Span::from_millis(150));
    assert!(tasks.iter().all(|task| world.answered.contains(task)), "{:?}", world.answered);
    assert!(world.cluster.is_idle());
}

#[test]
fn a_task_with_a_deadline_waits_no_longer_than_that_allows() {
    let (mut world, _, backends) = World::new(1);
    let silent = world.silent;
    world.giving_back.extend(&backends);
    let deadline = Timestamp(200 * MS);
    let tasks: Vec<TaskId> = (0..30).map(|sequence| world.submit(silent, sequence, deadline)).collect();
    world.run_until(deadline);
    for task in tasks {
        assert_eq!(world.dropped.get(&task).map(|(_, reason)| *reason), Some(DropReason::Deadline), "{task:?}");
        assert!(world.planned.get(&task).is_none_or(|visits| *visits <= 6), "{:?}", world.planned);
    }
    assert!(world.cluster.is_idle());
}

#[test]
fn a_silent_frontend_makes_no_larger_storm_where_there_are_more_backends() {
    for backends in [2, 8] {
        let (mut world, other, all) = World::new(backends);
        let silent = world.silent;
        // Once for each that does not doubt it yet; then as with one, after 10, 20, 40, .. ms.
        let (tasks, visits) = give_back_for_two_seconds(&mut world, other, &all);
        assert!(visits.iter().all(|visits| (4..=9 + backends).contains(visits)), "{backends}: {visits:?}");

        world.giving_back.clear();
        world.submit(silent, 99, world.now + Span::from_millis(40));
        world.run_until(world.now + Span::from_millis(1_000));
        assert!(tasks.iter().all(|task| world.answered.contains(task)), "{backends}: {:?}", world.answered);
        assert!(world.cluster.is_idle());
    }
}

#[test]
fn what_some_backends_give_back_others_run_without_a_storm() {
    for (backends, giving_back) in [(2, 1), (8, 1), (8, 7)] {
        let (mut world, _, all) = World::new(backends);
        let silent = world.silent;
        world.giving_back.extend(&all[..giving_back]);
        let tasks: Vec<TaskId> = (0..60).map(|sequence| world.submit(silent, sequence, Timestamp::NEVER)).collect();
        world.run_until(Timestamp(1_000 * MS));
        assert_eq!((world.answered.len(), world.dropped.len()), (60, 0), "{giving_back} of {backends}");
        // A round trip is 0.2 ms: planned again at once each time, a task would come back a hundred times meanwhile.
        let visits: Vec<usize> = tasks.iter().map(|task| world.planned[task]).collect();
        assert!(visits.iter().all(|visits| *visits <= 20), "{giving_back} of {backends}: {visits:?}");
        assert!(world.cluster.is_idle());
    }
}

#[test]
fn what_one_backend_gives_back_another_one_runs() {
    let (mut world, _, backends) = World::new(2);
    let silent = world.silent;
    world.giving_back.insert(backends[0]);
    for sequence in 0..60 {
        world.submit(silent, sequence, Timestamp::NEVER);
    }
    world.run_until(Timestamp(1_000 * MS));
    assert_eq!((world.answered.len(), world.dropped.len()), (60, 0));
    assert!(world.cluster.is_idle());
}

/// One backend that gives back, and four tasks that wait for it.
fn waiting() -> (World, Vec<BackendId>, Vec<TaskId>) {
    let (mut world, _, backends) = World::new(1);
    let silent = world.silent;
    world.giving_back.extend(&backends);
    let tasks = (0..4).map(|sequence| world.submit(silent, sequence, Timestamp::NEVER)).collect();
    world.run_until(Timestamp(1_200 * MS));
    assert!(world.on_way.is_empty() && world.dropped.is_empty());
    (world, backends, tasks)
}

#[test]
fn a_waiting_task_ends_once_when_its_client_hangs_up_or_its_frontend_is_not_served_or_leaves() {
    let (mut world, backends, tasks) = waiting();
    let silent = world.silent;
    let cancel = FrontendToModelThread::Cancel { task: tasks[1], model: ModelId(0) };
    for _ in 0..2 {
        world.cluster.handle_frontend_message(world.now, Port::Control, silent, cancel.clone()).unwrap();
    }
    world.run_until(world.now + ROUND_TRIP);
    assert_eq!(
        world.dropped.iter().map(|(task, end)| (*task, end.1)).collect::<Vec<_>>(),
        [(tasks[1], DropReason::Cancelled)]
    );
    // Its link is found to be broken: of a backend and one of two frontends that miss each other the latter stays out.
    let unlinked = BackendToControl::Unlinked { frontend: silent };
    world.cluster.handle_backend_message(world.now, Port::Control, backends[0], unlinked).unwrap();
    world.run_until(world.now + ROUND_TRIP);
    assert_eq!(world.dropped.len(), tasks.len());
    assert_eq!(world.dropped[&tasks[0]].1, DropReason::NoBackend);
    assert!(world.cluster.is_idle());

    let (mut world, _, _) = waiting();
    let (now, silent) = (world.now, Member::Frontend(world.silent));
    world.cluster.handle_disconnected(now, Port::Control, silent, "its end".into());
    assert!(world.cluster.is_idle());
}

#[test]
fn a_waiting_task_waits_for_no_backend_that_has_left() {
    let (mut world, backends, tasks) = waiting();
    let successor = add_backend(&mut world.cluster, world.now, offer(1)).backend;
    let linked = BackendToControl::Linked { frontend: world.silent, link: LinkId(1) };
    world.cluster.handle_backend_message(world.now, Port::Control, successor, linked).unwrap();
    let linked = BackendToControl::Linked { frontend: FrontendId(world.silent.0 + 1), link: LinkId(1) };
    world.cluster.handle_backend_message(world.now, Port::Control, successor, linked).unwrap();
    world.cluster.handle_disconnected(world.now, Port::Control, Member::Backend(backends[0]), "its end".into());
    world.run_until(world.now + Span::from_millis(40));
    assert!(tasks.iter().all(|task| world.answered.contains(task)), "{:?}", world.dropped);
}
