//! Models whose batches take what their tasks do: workloads that clients name, and samples of them.

use proto::{Application, BatchCost, backend_to_scheduler::BackendHello, scheduler_to_backend::BatchPlan};

use super::*;
use crate::policy::Policy;

const COST: BatchCost = BatchCost { fixed: Span::from_millis(1), per_task_ppm: 1_000_000 };

struct Dynamic {
    cluster: Cluster,
    frontend: FrontendId,
    backend: BackendId,
    now: Timestamp,
    sequence: u64,
}

impl Dynamic {
    fn new(policy: Policy, cost: Option<BatchCost>) -> Self {
        let mut cluster = scheduler(&ClusterConfig { policy, ..config() });
        let now = Timestamp(0);
        let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
        let hello = BackendHello::new(1, vec![ModelOffer { cost, ..model_offer(1, "m", 1) }]);
        let backend = add_backend(&mut cluster, now, hello).backend;
        let linked = BackendToScheduler::Linked { frontend, link: LinkId(1) };
        cluster.handle_backend_message(now, Port::Control, backend, linked).unwrap();
        drain(&mut cluster);
        Self { cluster, frontend, backend, now, sequence: 0 }
    }

    fn submit(&mut self, name: &str, slo_ms: i64) {
        let FrontendToScheduler::Submit { task, model, deadline, priority, is_first, slot, .. } =
            submit(self.frontend, self.sequence, self.now + Span::from_millis(slo_ms))
        else {
            unreachable!("that is what it makes")
        };
        self.sequence += 1;
        let application = Application::named(name);
        let submit = FrontendToScheduler::Submit { task, model, deadline, priority, application, is_first, slot };
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, submit).unwrap();
    }

    fn say(&mut self, message: BackendToScheduler) {
        self.cluster.handle_backend_message(self.now, Port::Control, self.backend, message).unwrap();
    }

    /// The next plan, which takes so long.
    fn run(&mut self, ms: i64) -> BatchPlan {
        self.cluster.handle_timeout(self.now);
        let outputs = drain(&mut self.cluster);
        let plan = outputs.into_iter().find_map(|output| match output {
            ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan)) => Some(plan),
            _ => None,
        });
        let plan = plan.expect("the GPU is idle");
        let started_at = self.now;
        self.now += Span::from_millis(ms);
        self.say(plan_done(plan.plan, PlanOutcome::Executed { started_at, finished_at: self.now }, vec![]));
        self.say(BackendToScheduler::Answered { plan: plan.plan, undelivered: vec![] });
        plan
    }

    /// So many of each come while the GPU has a short one.
    fn come(&mut self, tasks: &[(&str, usize)]) {
        self.submit("short", 10_000);
        for &(name, count) in tasks {
            (0..count).for_each(|_| self.submit(name, 10_000));
        }
        assert_eq!(self.run(3).tasks.len(), 1);
    }

    /// Sizes of the batches in which these run.
    fn sizes(&mut self, tasks: &[(&str, usize)]) -> Vec<usize> {
        self.come(tasks);
        let all: usize = tasks.iter().map(|(_, count)| count).sum();
        let mut sizes = Vec::new();
        while sizes.iter().sum::<usize>() < all {
            sizes.push(self.run(3).tasks.len());
        }
        sizes
    }
}

#[test]
fn tasks_that_ran_alone_say_which_workloads_share_batches() {
    let mut dynamic = Dynamic::new(Policy::DownbeatDynamic, Some(COST));
    assert_eq!(dynamic.sizes(&[("short", 2), ("long", 2)]), [4], "nothing is known of them");
    for _ in 0..1024 {
        for (name, ms) in [("short", 3), ("long", 300)] {
            dynamic.submit(name, 10_000);
            assert_eq!(dynamic.run(ms).sample, None, "it runs alone anyway");
        }
    }
    assert_eq!(dynamic.sizes(&[("short", 2), ("long", 2)]), [2, 2]);
    assert_eq!(
        dynamic.sizes(&[("short", 2), ("also short", 2)]).len(),
        1,
        "what nobody knows goes with the short ones"
    );
}

#[test]
fn what_a_backend_ran_again_alone_counts_for_its_workload_and_once() {
    let mut dynamic = Dynamic::new(Policy::DownbeatDynamic, Some(COST));
    let mut sampled = 0;
    for _ in 0..600 {
        for (name, ms) in [("short", 3), ("long", 300)] {
            dynamic.come(&[(name, 4)]);
            let plan = dynamic.run(ms);
            let Some(sample) = plan.sample else { continue };
            assert!(usize::from(sample) < plan.tasks.len());
            sampled += 1;
            let ran = BackendToScheduler::RanAlone { plan: plan.plan, took: Span::from_millis(ms) };
            // Whoever says it twice, or of what nobody asked for, is not believed.
            (0..2).for_each(|_| dynamic.say(ran.clone()));
            dynamic.say(BackendToScheduler::RanAlone { plan: PlanId(1 << 40), took: Span(-7) });
        }
    }
    assert!((600..750).contains(&sampled), "one task in eight, of which some were alone: {sampled}");
    assert_eq!(dynamic.sizes(&[("short", 2), ("long", 2)]).len(), 2);
}

#[test]
fn nothing_is_run_again_for_policies_and_models_that_do_not_ask_for_it() {
    for (policy, cost) in [(Policy::Eager, Some(COST)), (Policy::DownbeatDynamic, None)] {
        let mut dynamic = Dynamic::new(policy, cost);
        for _ in 0..20 {
            dynamic.come(&[("short", 4)]);
            assert_eq!(dynamic.run(3).sample, None, "{policy}");
        }
    }
}
