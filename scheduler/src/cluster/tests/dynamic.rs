//! Models whose batches take what their tasks do: workloads that clients name, and samples of them.

use proto::{
    Application, BatchCost, ModelThreadId, backend_to_scheduler::BackendHello, hello::Member,
    request_times::RequestTimes, scheduler_to_backend::BatchPlan,
};

use super::*;
use crate::policy::Policy;

const COST: BatchCost = BatchCost { fixed: Span::from_millis(1), per_task_ppm: 1_000_000 };

struct Dynamic {
    cluster: Cluster,
    frontend: FrontendId,
    backend: BackendId,
    now: Timestamp,
    sequence: u64,
    /// What frontends were told last of what requests take.
    told: BTreeMap<FrontendId, Box<RequestTimes>>,
}

impl Dynamic {
    fn new(policy: Policy, cost: Option<BatchCost>) -> Self {
        Self::with_threads(policy, cost, 1)
    }

    fn with_threads(policy: Policy, cost: Option<BatchCost>, model_threads: u16) -> Self {
        let threads = (0..model_threads).filter(|_| model_threads > 1);
        let addresses = threads.clone().map(|id| format!("s:{id}")).collect();
        let mut cluster = scheduler(&ClusterConfig { policy, model_threads, addresses, ..config() });
        let now = Timestamp(0);
        let welcomed = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap();
        let hello = BackendHello::new(1, vec![ModelOffer { cost, ..model_offer(1, "m", 1) }]);
        let joined = add_backend(&mut cluster, now, hello);
        let (frontend, backend) = (welcomed.frontend, joined.backend);
        for id in threads.map(ModelThreadId) {
            for (member, pass) in [
                (Member::Frontend(frontend), welcomed.model_threads.pass),
                (Member::Backend(backend), joined.model_threads.pass),
            ] {
                assert!(cluster.handle_member_connected(now, id, member, pass));
            }
        }
        let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
        cluster.handle_backend_message(now, Port::Control, backend, linked).unwrap();
        drain(&mut cluster);
        Self { cluster, frontend, backend, now, sequence: 0, told: BTreeMap::new() }
    }

    fn submit(&mut self, name: &str, slo_ms: i64) {
        self.submit_long(name, slo_ms, 8);
    }

    fn submit_long(&mut self, name: &str, slo_ms: i64, input_bytes: u32) {
        let FrontendToModelThread::Submit { task, model, deadline, priority, is_first, slot, .. } =
            submit(self.frontend, self.sequence, self.now + Span::from_millis(slo_ms))
        else {
            unreachable!("that is what it makes")
        };
        self.sequence += 1;
        let (application, slot) = (Application::named(name), SlotDescriptor { input_bytes, ..slot });
        let submit = FrontendToModelThread::Submit { task, model, deadline, priority, application, is_first, slot };
        let port = self.cluster.port_of(ModelId(0));
        self.cluster.handle_frontend_message(self.now, port, self.frontend, submit).unwrap();
    }

    /// Of a plan, to the thread that made it.
    fn say(&mut self, plan: PlanId, message: impl Into<BackendToScheduler>) {
        let port = match self.cluster.port_of(ModelId(0)) {
            Port::Control => Port::Control,
            Port::ModelThread(_) => Port::ModelThread(plan.model_thread()),
        };
        self.cluster.handle_backend_message(self.now, port, self.backend, message).unwrap();
    }

    /// The next plan, which takes so long.
    fn run(&mut self, ms: i64) -> BatchPlan {
        self.cluster.handle_timeout(self.now);
        let plan = self.hear().expect("the GPU is idle");
        let started_at = self.now;
        self.now += Span::from_millis(ms);
        self.say(plan.plan, plan_done(plan.plan, PlanOutcome::Executed { started_at, finished_at: self.now }, vec![]));
        self.say(plan.plan, BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] });
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

    /// What frontends were told last of what requests take, if that was since this was asked.
    fn told(&mut self) -> Vec<(FrontendId, Box<RequestTimes>)> {
        let request = FrontendToControl::ClockRequest { sent_at: Timestamp(0), resp: Span::ZERO };
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, request).unwrap();
        assert_eq!(self.hear(), None);
        std::mem::take(&mut self.told).into_iter().collect()
    }

    /// Takes in all that is said. Yields the plan, if there is one.
    fn hear(&mut self) -> Option<BatchPlan> {
        let mut found = None;
        for output in drain(&mut self.cluster) {
            match output {
                ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan)) => found = Some(plan),
                ClusterOutput::ToFrontend(_, frontend, SchedulerToFrontend::RequestTimes { model, times }) => {
                    assert_eq!(model, ModelId(0));
                    self.told.insert(frontend, times);
                }
                _ => {}
            }
        }
        found
    }
}

#[test]
fn tasks_that_ran_alone_say_which_workloads_share_batches() {
    let mut dynamic = Dynamic::new(Policy::Downbeat, Some(COST));
    assert_eq!(dynamic.sizes(&[("short", 2), ("long", 2)]), [4], "nothing is known of them");
    for _ in 0..1024 {
        for (name, ms) in [("short", 3), ("long", 300)] {
            dynamic.submit(name, 10_000);
            assert_eq!(dynamic.run(ms).sample, None, "it runs alone anyway");
        }
    }
    assert_eq!(dynamic.sizes(&[("short", 2), ("long", 2)]), [2, 2]);
    assert_eq!(dynamic.sizes(&[("short", 2), ("unknown", 2)]).len(), 2, "what nobody knows may be as long as any");
}

#[test]
fn a_model_takes_along_to_another_thread_what_its_workloads_are_and_take() {
    let mut dynamic = Dynamic::with_threads(Policy::Downbeat, Some(COST), 2);
    for _ in 0..1024 {
        for (name, ms) in [("short", 3), ("long", 300)] {
            dynamic.submit(name, 10_000);
            dynamic.run(ms);
        }
    }
    let Port::ModelThread(owner) = dynamic.cluster.port_of(ModelId(0)) else { panic!("there are two") };
    // Two long ones run, and the short ones that wait move, too.
    dynamic.come(&[("long", 2)]);
    let other = ModelThreadId(1 - owner.0);
    dynamic.submit("short", 10_000);
    dynamic.submit("short", 10_000);
    dynamic.cluster.move_model(dynamic.now, ModelId(0), other);
    assert_eq!(dynamic.cluster.port_of(ModelId(0)), Port::ModelThread(other));
    let plans = [dynamic.run(300), dynamic.run(3)];
    assert_eq!(plans.map(|plan| (plan.plan.model_thread(), plan.tasks.len())), [(owner, 2), (other, 2)]);
    assert_eq!(dynamic.sizes(&[("long", 2), ("short", 2)]), [2, 2]);
}

#[test]
fn what_a_backend_ran_again_alone_counts_for_its_workload_and_once() {
    let mut dynamic = Dynamic::new(Policy::Downbeat, Some(COST));
    let mut sampled = 0;
    for _ in 0..600 {
        for (name, ms) in [("short", 3), ("long", 300)] {
            dynamic.come(&[(name, 4)]);
            let plan = dynamic.run(ms);
            let Some(sample) = plan.sample else { continue };
            assert!(usize::from(sample) < plan.tasks.len());
            sampled += 1;
            // It says that it took longer: more than has passed is not believed.
            dynamic.now += Span::from_millis(ms);
            let ran = BackendToModelThread::RanAlone { plan: plan.plan, took: Span::from_millis(1_000 * ms) };
            // Whoever says it twice, or of what nobody asked for, is not believed.
            (0..2).for_each(|_| dynamic.say(plan.plan, ran.clone()));
            dynamic.say(plan.plan, BackendToModelThread::RanAlone { plan: PlanId(1 << 40), took: Span(-7) });
        }
    }
    assert!((600..750).contains(&sampled), "one task in eight, of which some were alone: {sampled}");
    assert_eq!(dynamic.sizes(&[("short", 2), ("long", 2)]).len(), 2);
}

/// Tasks of 100 and of 1,000 bytes, which take 3 and 300 ms. One in eight is a sample, so three of them take turns.
const LENGTHS: [(u32, i64); 3] = [(100, 3), (1_000, 300), (100, 3)];

#[test]
fn lengths_say_which_tasks_share_batches_where_that_is_asked_for() {
    for (policy, expected) in [(Policy::Downbeat, vec![2, 2]), (Policy::Orloj(1e-4), vec![4])] {
        let mut dynamic = Dynamic::new(policy, Some(COST));
        for _ in 0..1024 {
            for (length, ms) in LENGTHS {
                dynamic.submit_long("", 10_000, length);
                dynamic.run(ms);
            }
        }
        dynamic.submit_long("", 10_000, 100);
        for length in [100, 1_000, 100, 1_000] {
            dynamic.submit_long("", 10_000, length);
        }
        assert_eq!(dynamic.run(3).tasks.len(), 1);
        let mut sizes = Vec::new();
        while sizes.iter().sum::<usize>() < 4 {
            let plan = dynamic.run(3);
            let lengths: BTreeSet<u32> = plan.tasks.iter().map(|task| task.slot.input_bytes).collect();
            assert_eq!(lengths.len(), 2 / expected.len(), "{policy}");
            sizes.push(plan.tasks.len());
        }
        assert_eq!(sizes, expected, "{policy}");
    }
}

#[test]
fn frontends_are_told_what_requests_take_and_so_is_who_joins() {
    let mut dynamic = Dynamic::new(Policy::Downbeat, Some(COST));
    assert_eq!(dynamic.told(), []);
    for _ in 0..1024 {
        for (length, ms) in LENGTHS {
            dynamic.submit_long("chat", 10_000, length);
            dynamic.run(ms);
        }
    }
    let first = dynamic.told();
    let [(frontend, times)] = &first[..] else { panic!("{first:?}") };
    assert_eq!(*frontend, dynamic.frontend);
    let (name, of_chat) = times.applications[0];
    assert_eq!((name, times.applications.len(), times.cost), (Some(Application::named("chat")), 1, COST));
    assert_eq!(of_chat.quantiles, [3, 300, 300].map(Span::from_millis));
    let lengths: Vec<_> = times.lengths.iter().map(|of| (of.shortest, of.longest, of.times.quantiles[0])).collect();
    assert_eq!(lengths, [(91, 127, Span::from_millis(3)), (725, 1023, Span::from_millis(300))]);
    assert_eq!(dynamic.told(), [], "nothing is new");
    let late = dynamic.cluster.handle_frontend_joined(dynamic.now, FrontendHello::new("f:2")).unwrap().frontend;
    assert_eq!(dynamic.told(), [(late, times.clone())]);
}

#[test]
fn batches_tell_what_lengths_take_that_never_ran_alone() {
    let mut dynamic = Dynamic::new(Policy::Downbeat, Some(COST));
    for _ in 0..128 {
        dynamic.submit_long("", 10_000, 100);
        (0..4).for_each(|_| dynamic.submit_long("", 10_000, 1_000));
        assert_eq!([dynamic.run(3), dynamic.run(33)].map(|plan| plan.tasks.len()), [1, 4]);
    }
    let told = dynamic.told();
    let (_, times) = told.last().expect("much is known");
    let lengths: Vec<_> = times.lengths.iter().map(|of| (of.longest, of.times.quantiles)).collect();
    // The longest of four takes 1 ms, and eight ms of its own.
    assert_eq!(lengths, [(127, [Span::from_millis(3); 3]), (1_023, [Span::from_millis(9); 3])]);
}

#[test]
fn nothing_is_run_again_for_policies_and_models_that_do_not_ask_for_it() {
    for (policy, cost) in [(Policy::Eager, Some(COST)), (Policy::Orloj(1e-4), None)] {
        let mut dynamic = Dynamic::new(policy, cost);
        for _ in 0..20 {
            dynamic.come(&[("short", 4)]);
            assert_eq!(dynamic.run(3).sample, None, "{policy}");
        }
    }
}
