//! What a primary has learned goes to the next one if it is moved, and nothing else does.

use proto::scheduler_to_scheduler::{
    LearnedAverages, LearnedClass, LearnedFactor, LearnedModel, LearnedNetwork, SchedulerToScheduler,
};

use super::{
    takeovers::{BACKEND, FRONTEND, OURS, Standby},
    *,
};
use crate::control::PeerOutput;

impl Standby {
    /// Warm, with a policy that learns.
    fn that_learns() -> Self {
        let mut standby = Self::of(Policy::Downbeat);
        standby.warm_up();
        standby
    }

    /// Its members obey it, and nothing is open.
    fn settle(&mut self) {
        self.backend(BackendToControl::Obeys { epoch: OURS });
        self.frontend(FrontendToControl::Obeys { epoch: OURS });
        self.frontend(FrontendToModelThread::AllOpen);
        self.take();
        assert!(self.cluster.control().claim().is_primary());
    }

    /// Runs batches of one task, each for that long.
    fn run(&mut self, batches: u64, execution: Span) {
        for sequence in 0..batches {
            self.frontend(submit(FRONTEND, sequence, self.now + Span::from_millis(30)));
            let plan = self.next_plan();
            self.now = plan.exec_at + execution;
            let outcome = PlanOutcome::Executed { started_at: plan.exec_at, finished_at: self.now };
            self.backend(plan_done(plan.plan, outcome, vec![]));
            self.backend(BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] });
            self.take();
        }
    }

    /// Another scheduler asks for what this one has learned, and that it may take over.
    fn asked(&mut self) -> Vec<SchedulerToScheduler> {
        self.take();
        self.cluster.control().handle_dialer_message(self.now, 0, &SchedulerToScheduler::AskHandOver);
        let outputs = self.take().into_iter().filter_map(|output| match output {
            ClusterOutput::Peer(PeerOutput::Answer(0, message)) => Some(message),
            _ => None,
        });
        outputs.collect()
    }

    fn told(&mut self, messages: &[SchedulerToScheduler]) {
        for message in messages {
            self.cluster.control().handle_peer_message(self.now, 0, message.clone());
        }
    }

    /// The last that the frontend heard of the model: the least time that a task takes.
    fn least_latency(&mut self) -> Option<Span> {
        let mut told = self.take().into_iter().filter_map(|output| match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Model { least_latency, .. }) => Some(least_latency),
            _ => None,
        });
        told.next_back()
    }
}

fn averages() -> LearnedAverages {
    LearnedAverages {
        arrivals: 7,
        gap_ns: 1e7,
        hosts: 1,
        slo_ns: 3e7,
        hurried_part: 0.0,
        classes: [LearnedClass { tasks: 9, lost_part: 0.25 }; 2],
    }
}

fn model() -> LearnedModel {
    let (name, version) = ("m".to_owned(), "1".to_owned());
    LearnedModel { name, version, factors: vec![], data: None, averages: None }
}

#[test]
fn whoever_is_handed_over_to_knows_what_the_former_primary_knew() {
    let mut former = Standby::that_learns();
    former.take_over();
    former.settle();
    former.run(40, Span::from_micros(7_200));
    let told = former.asked();
    let [SchedulerToScheduler::LearnedModel(learned), SchedulerToScheduler::LearnedNetwork(_), last] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!(*last, SchedulerToScheduler::HandOver);
    let factor = LearnedFactor { backend: BACKEND, gpu_index: 0, thousandths: 1_200 };
    assert_eq!((learned.name.as_str(), &learned.factors[..]), ("m", &[factor][..]));
    assert!(learned.averages.is_some_and(|averages| averages.arrivals == 40), "{learned:?}");
    let mut next = Standby::that_learns();
    next.told(&told[..1]);
    // l(1), delay(1) and the way back, as in `what_executions_take_is_planned_with_and_told`.
    assert_eq!(next.least_latency(), Some(Span::from_micros(7_200 + 320 + 1_000)));
    next.told(&told[1..]);
    assert!(next.cluster.control().claim().is_primary());
    next.settle();
    assert_eq!(next.asked(), told, "it would tell the same");
}

#[test]
fn what_the_network_takes_is_handed_over_and_refuses_no_more_than_what_is_configured() {
    let mut next = Standby::that_learns();
    next.least_latency();
    let network = |us: i64| {
        let span = Some(Span::from_micros(us));
        SchedulerToScheduler::LearnedNetwork(LearnedNetwork { ctrl: span, resp: span })
    };
    next.told(&[network(100), SchedulerToScheduler::LearnedModel(LearnedModel { data: Some(Span(7_000)), ..model() })]);
    assert_eq!(next.least_latency(), Some(Span::from_micros(6_000 + 100 + 7 + 100)));
    let data = Some(Span::from_millis(9));
    let slow = SchedulerToScheduler::LearnedModel(LearnedModel { data, ..model() });
    next.told(&[network(9_000), slow.clone()]);
    assert_eq!(next.least_latency(), Some(Span::from_micros(6_000 + 300 + 20 + 1_000)));
    next.told(&[network(100), SchedulerToScheduler::HandOver]);
    next.settle();
    assert_eq!(next.asked(), [slow, network(100), SchedulerToScheduler::HandOver]);
}

#[test]
fn what_cannot_be_is_not_believed() {
    let mut next = Standby::that_learns();
    let spans = [Span(i64::MIN), Span(-1), Span::ZERO].map(Some);
    for span in spans {
        let network = LearnedNetwork { ctrl: span, resp: span };
        next.told(&[SchedulerToScheduler::LearnedNetwork(network)]);
        next.told(&[SchedulerToScheduler::LearnedModel(LearnedModel { data: span, ..model() })]);
    }
    let (backend, gpu_index) = (BACKEND, 0);
    let factors = [0, 499, 4_001, u32::MAX].map(|thousandths| LearnedFactor { backend, gpu_index, thousandths });
    let elsewhere = [(BACKEND, 1), (BACKEND, u32::MAX), (BackendId(1), 0)];
    let elsewhere = elsewhere.map(|(backend, gpu_index)| LearnedFactor { backend, gpu_index, thousandths: 1_500 });
    let factors = factors.into_iter().chain(elsewhere).cycle().take(10_000).collect();
    next.told(&[SchedulerToScheduler::LearnedModel(LearnedModel { factors, ..model() })]);
    for wrong in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
        for change in [
            |averages: &mut LearnedAverages, wrong| averages.gap_ns = wrong,
            |averages: &mut LearnedAverages, wrong| averages.slo_ns = wrong,
            |averages: &mut LearnedAverages, wrong| averages.hurried_part = wrong,
            |averages: &mut LearnedAverages, wrong| averages.classes[1].lost_part = wrong,
        ] {
            let mut averages = averages();
            change(&mut averages, wrong);
            let averages = Some(averages);
            next.told(&[SchedulerToScheduler::LearnedModel(LearnedModel { averages, ..model() })]);
        }
    }
    let unknown = LearnedModel { name: "n".repeat(10_000), averages: Some(averages()), ..model() };
    next.told(&[SchedulerToScheduler::LearnedModel(unknown)]);
    // Nor is a scheduler that is not followed.
    let good = SchedulerToScheduler::LearnedModel(LearnedModel { averages: Some(averages()), ..model() });
    next.cluster.control().handle_peer_message(next.now, 1, good.clone());
    assert_eq!(next.least_latency(), None);
    next.told(&[SchedulerToScheduler::HandOver]);
    next.settle();
    let nothing = SchedulerToScheduler::LearnedNetwork(LearnedNetwork::default());
    assert_eq!(next.asked(), [nothing, SchedulerToScheduler::HandOver]);
    // The primary follows nobody.
    next.told(&[good]);
    assert_eq!(next.asked().len(), 2);
}

#[test]
fn a_primary_that_does_not_answer_is_not_waited_for() {
    let mut standby = Standby::that_learns();
    standby.cluster.control().handle_hand_over(standby.now).unwrap();
    let asks = ClusterOutput::Peer(PeerOutput::Tell(0, SchedulerToScheduler::AskHandOver));
    assert!(standby.take().contains(&asks));
    standby.now += Span::from_millis(99);
    standby.take();
    assert!(!standby.cluster.control().claim().is_primary());
    standby.now += Span::from_millis(1);
    standby.take();
    assert_eq!(standby.cluster.control().claim().epoch, OURS);
}

/// A model's policy goes on where it was, on whichever thread.
#[test]
fn a_model_that_moves_between_threads_takes_along_what_was_learned() {
    let mut cluster = scheduler(&ClusterConfig { policy: Policy::Downbeat, model_threads: 2, ..config() });
    let members = join(&mut cluster, Timestamp(0));
    for sequence in 0..40 {
        let now = Timestamp(sequence as i64 * 100 * MS);
        run_one(&mut cluster, members, now, sequence, Span::from_micros(7_200));
    }
    let now = Timestamp(4_000 * MS);
    let learned = |cluster: &mut Cluster| {
        drain(cluster);
        cluster.control().handle_dialer_message(now, 0, &SchedulerToScheduler::AskHandOver);
        cluster.handle_timeout(now);
        drain(cluster)
    };
    let before = learned(&mut cluster);
    assert!(matches!(
        &before[..],
        [ClusterOutput::Peer(PeerOutput::Answer(_, SchedulerToScheduler::LearnedModel(model))), _, _]
            if model.averages.is_some() && model.factors.len() == 1
    ));
    cluster.move_model(now, ModelId(0), ModelThreadId(1));
    assert_eq!(learned(&mut cluster), before);
}
