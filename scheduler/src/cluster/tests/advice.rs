//! How many GPUs the scheduler says are needed, by what its ModelThreads count of a backend of one GPU.

use std::sync::Arc;

use super::*;
use crate::advice::{Advice, Reason};

/// l(b) of [`model_offer`].
fn execution(size: usize) -> Span {
    Span::from_millis(5 + size as i64)
}

/// A cluster, its GPU, and the clients of its model.
struct World {
    cluster: Cluster,
    frontend: FrontendId,
    backend: BackendId,
    now: Timestamp,
    submitted: u64,
    /// When the GPU is done with what it has.
    free_at: Timestamp,
    /// What the GPU has, by its ends.
    running: VecDeque<(Timestamp, PlanId, usize)>,
    /// It rejects every batch, as if its window were over.
    is_late: bool,
}

impl World {
    fn new(policy: Policy) -> Self {
        let mut cluster = scheduler(&ClusterConfig { policy, reestimate: false, ..config() });
        let (frontend, backend) = join(&mut cluster, Timestamp(0));
        let (now, running) = (Timestamp(0), VecDeque::new());
        Self { cluster, frontend, backend, now, submitted: 0, free_at: now, running, is_late: false }
    }

    /// So many tasks every ten milliseconds, for so long; without an objective if `slo` is none.
    fn run(&mut self, seconds: i64, tasks: u64, slo: Option<Span>) {
        for _ in 0..100 * seconds {
            for _ in 0..tasks {
                let deadline = slo.map_or(Timestamp::NEVER, |slo| self.now + slo);
                let task = submit(self.frontend, self.submitted, deadline);
                self.submitted += 1;
                self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, task).unwrap();
            }
            self.run_until(self.now + Span::from_millis(10));
        }
    }

    /// Timers fire, the GPU runs what it is given, and reports it.
    fn run_until(&mut self, until: Timestamp) {
        loop {
            self.cluster.handle_timeout(self.now);
            for output in drain(&mut self.cluster) {
                if let ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan)) = output {
                    let size = plan.tasks.len();
                    self.free_at = self.free_at.max(plan.exec_at).max(self.now) + execution(size);
                    self.running.push_back((self.free_at, plan.plan, size));
                }
            }
            let ends_at = self.running.front().map(|&(ends_at, ..)| ends_at);
            let next = [self.cluster.poll_timeout(), ends_at].into_iter().flatten().fold(until, Timestamp::min);
            self.now = self.now.max(next);
            if self.now >= until {
                return;
            }
            if let Some((ends_at, plan, size)) = self.running.pop_front_if(|(ends_at, ..)| *ends_at <= self.now) {
                let started_at = ends_at - execution(size);
                let outcome = match self.is_late {
                    false => PlanOutcome::Executed { started_at, finished_at: ends_at },
                    true => PlanOutcome::WindowMissed { rejected_at: started_at },
                };
                let answered = BackendToModelThread::Answered { plan, undelivered: vec![] };
                for message in [plan_done(plan, outcome, vec![]), answered] {
                    self.cluster.handle_backend_message(self.now, Port::Control, self.backend, message).unwrap();
                }
            }
        }
    }

    fn advice(&mut self) -> Arc<Advice> {
        self.cluster.control().snapshot(|_| None, 0).0.advice
    }
}

const SLO: Option<Span> = Some(Span::from_millis(25));

#[test]
fn more_gpus_are_needed_where_one_is_too_few_and_fewer_when_the_load_has_gone() {
    let mut world = World::new(Policy::Downbeat);
    // 1,000 a second, where one GPU runs at most 650 in time.
    world.run(55, 10, SLO);
    let advice = world.advice();
    assert!((advice.needed, advice.gpus, advice.is_primary) == (None, 1, true), "{advice:?}");
    world.run(10, 10, SLO);
    let advice = world.advice();
    assert_eq!((advice.needed, advice.gpus), (Some(2), 1), "{}", advice.reason());
    assert!((0.2..0.5).contains(&advice.lost_part) && advice.busy > 0.9, "{advice:?}");
    assert!(advice.in_time > 30_000 && advice.lost > 15_000 && advice.in_time + advice.lost <= world.submitted);
    world.run(200, 1, SLO);
    let advice = world.advice();
    assert_eq!((advice.needed, advice.sub_clusters[0].reason), (Some(1), Reason::Work), "{}", advice.reason());
    assert!(advice.lost_part < 0.01 && (0.2..0.7).contains(&advice.busy), "{advice:?}");
}

/// A cluster on a busy machine lost 4 % of its requests so, and said that it lost none.
#[test]
fn what_a_backend_rejects_is_lost() {
    let mut world = World::new(Policy::Downbeat);
    world.is_late = true;
    world.run(65, 1, SLO);
    let advice = world.advice();
    assert_eq!((advice.in_time, advice.lost_part), (0, 1.0), "{advice:?}");
    assert!(advice.lost > 6_000 && advice.lost <= world.submitted, "{advice:?}");
    let mut world = World::new(Policy::Downbeat);
    world.is_late = true;
    world.run(1, 1, None);
    assert_eq!(world.advice().lost, 0, "without an objective");
}

#[test]
fn policies_without_a_price_are_judged_by_how_long_gpus_were_busy() {
    let mut world = World::new(Policy::Deferred);
    world.run(65, 4, SLO);
    let advice = world.advice();
    assert!((advice.work - advice.busy).abs() < 1e-9 && advice.busy > 0.5, "{advice:?}");
    assert_eq!(advice.needed, Some(1), "{}", advice.reason());
}

#[test]
fn work_without_an_objective_asks_for_no_gpu() {
    let mut world = World::new(Policy::Downbeat);
    world.run(65, 10, None);
    let advice = world.advice();
    assert_eq!((advice.in_time, advice.lost, advice.busy, advice.needed), (0, 0, 0.0, Some(1)));
    assert!(world.free_at > Timestamp(64_000 * MS), "it keeps the GPU busy");
}

#[test]
fn what_nobody_hosts_is_not_lost_for_want_of_gpus() {
    let mut world = World::new(Policy::Downbeat);
    world.run(1, 1, SLO);
    let lost = world.advice().lost;
    world.running.clear();
    world.cluster.handle_disconnected(world.now, Port::Control, Member::Backend(world.backend), String::new());
    world.run(70, 1, SLO);
    let advice = world.advice();
    assert_eq!((advice.needed, advice.gpus, advice.reason().as_str()), (None, 0, "there is no GPU to judge by"));
    assert!(advice.lost <= lost + 10, "{advice:?}");
}
