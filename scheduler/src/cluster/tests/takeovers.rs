//! A standby follows the primary, and takes over with what members have.

use super::*;
use crate::control::PeerOutput;
use proto::{Claim, Era, Standing, clock::ClockReply, scheduler_to_scheduler::SchedulerToScheduler};

/// The primary that is followed, and its clock's lead.
const PRIMARY: Claim = Claim { era: Era(77), epoch: Epoch { number: 4, scheduler: 0 } };
const LEAD: Span = Span::from_millis(5_000);
/// What the standby claims after it.
pub(super) const OURS: Epoch = Epoch { number: 5, scheduler: 1 };
pub(super) const FRONTEND: FrontendId = FrontendId(500);
pub(super) const BACKEND: BackendId = BackendId(900);
/// What a backend calls the first plan that it was given before.
const INHERITED: PlanId = PlanId((ModelThreadId::INHERITED.0 as u64) << 48);

pub(super) struct Standby {
    pub(super) cluster: Cluster,
    pub(super) now: Timestamp,
    beats: u64,
    outputs: Vec<ClusterOutput>,
}

impl Standby {
    /// The second of two, that knows nobody yet.
    fn new() -> Self {
        Self::of(config().policy)
    }

    pub(super) fn of(policy: Policy) -> Self {
        let succession = SuccessionConfig { rank: 1, schedulers: 2, suspect: Span::from_millis(10) };
        let cluster = scheduler(&ClusterConfig { policy, succession, ..config() });
        let mut standby = Self { cluster, now: Timestamp(0), beats: 0, outputs: Vec::new() };
        standby.turn();
        standby
    }

    /// Has followed the primary for a while, whose members have joined here, too.
    fn warm() -> Self {
        let mut standby = Self::new();
        standby.warm_up();
        standby
    }

    pub(super) fn warm_up(&mut self) {
        self.follow();
        self.join(Claim { era: PRIMARY.era, epoch: PRIMARY.epoch });
    }

    fn turn(&mut self) {
        self.cluster.handle_timeout(self.now);
        while let Some(output) = self.cluster.poll_output() {
            match output {
                ClusterOutput::Peer(PeerOutput::ShiftClock(by)) => self.now += by,
                // The primary's heart beats.
                ClusterOutput::Peer(PeerOutput::ReadHeartbeat(0)) => {
                    self.beats += 1;
                    self.cluster.control().handle_heartbeat(self.now, 0, Some(self.beats));
                }
                _ => {}
            }
            self.outputs.push(output);
        }
    }

    pub(super) fn take(&mut self) -> Vec<ClusterOutput> {
        self.turn();
        std::mem::take(&mut self.outputs)
    }

    fn follow(&mut self) {
        assert!(self.take().contains(&ClusterOutput::Peer(PeerOutput::Dial(0))));
        self.cluster.control().handle_peer_connected(self.now, 0, PRIMARY);
        while !self.cluster.control().is_warm() {
            let asked = self.take().into_iter().find_map(|output| match output {
                ClusterOutput::Peer(PeerOutput::Tell(0, SchedulerToScheduler::ClockRequest { sent_at })) => {
                    Some(sent_at)
                }
                _ => None,
            });
            let Some(sent_at) = asked else {
                self.now += Span::from_millis(1);
                continue;
            };
            let at = sent_at + LEAD;
            let reply = ClockReply { sent_at, received_at: at, replied_at: at };
            self.cluster.control().handle_peer_message(self.now, 0, SchedulerToScheduler::Clock(reply));
        }
        let before = self.now;
        self.turn();
        assert_eq!(self.now, before + LEAD, "it keeps the primary's clock");
    }

    fn join(&mut self, obeys: Claim) {
        let standing = Standing { token: 1, obeys };
        let hello = FrontendHello { known_as: Some(FRONTEND), standing, ..FrontendHello::new("f:1") };
        let welcome = self.cluster.handle_frontend_joined(self.now, hello).unwrap();
        assert_eq!((welcome.frontend, welcome.claim.era, welcome.claim.is_primary()), (FRONTEND, PRIMARY.era, false));
        let hello = BackendHello { known_as: Some(BACKEND), standing, ..offer(1) };
        assert_eq!(self.cluster.handle_backend_joined(self.now, hello).unwrap().backend, BACKEND);
        self.backend(BackendToControl::Linked { frontend: FRONTEND, link: LinkId(3) });
        let mut gpus = self.take().into_iter().filter_map(|output| match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Model { gpus, .. }) => Some(gpus),
            _ => None,
        });
        assert_eq!(gpus.next_back(), Some(1), "the frontend knows what it could be served with");
    }

    pub(super) fn backend(&mut self, message: impl Into<BackendToScheduler>) {
        self.cluster.handle_backend_message(self.now, Port::Control, BACKEND, message).unwrap();
    }

    pub(super) fn frontend(&mut self, message: impl Into<FrontendToScheduler>) {
        self.cluster.handle_frontend_message(self.now, Port::Control, FRONTEND, message).unwrap();
    }

    /// The primary's process has ended, and both members say so.
    pub(super) fn take_over(&mut self) {
        self.take();
        self.cluster.control().handle_peer_lost(self.now, 0);
        let asked = self.take();
        assert!(
            asked.contains(&ClusterOutput::ToFrontend(Port::Control, FRONTEND, SchedulerToFrontend::AskPrimary)),
            "{asked:?}"
        );
        self.frontend(FrontendToControl::Misses { misses: true });
        self.backend(BackendToControl::Misses { misses: true });
        let told = self.take();
        let takeover = SchedulerToBackend::Takeover { epoch: OURS };
        assert!(told.contains(&ClusterOutput::ToBackend(Port::Control, BACKEND, takeover)), "{told:?}");
    }

    fn open(&self, sequence: u64) -> FrontendToModelThread {
        let (task, model) = (TaskId::new(FRONTEND, sequence), ModelId(0));
        let deadline = self.now + Span::from_millis(200);
        FrontendToModelThread::Open {
            task,
            model,
            deadline,
            priority: 0,
            application: proto::Application::NONE,
            attempt: 0,
            slot: slot(),
        }
    }

    /// The frontend obeys, with two open tasks and one link.
    fn frontend_obeys(&mut self) {
        self.frontend(FrontendToControl::Link { backend: BACKEND, link: LinkId(3) });
        self.frontend(FrontendToControl::Obeys { epoch: OURS });
        for sequence in 0..2 {
            let open = self.open(sequence);
            self.frontend(open);
        }
        self.frontend(FrontendToModelThread::AllOpen);
    }

    fn unfinished(&self) -> BackendToControl {
        BackendToControl::Unfinished {
            plan: INHERITED,
            gpu_index: 0,
            model: ModelId(0),
            frees_at: Some(self.now + Span::from_millis(4)),
            tasks: vec![(TaskId::new(FRONTEND, 0), 0)],
        }
    }

    fn fences(&mut self) -> Vec<(BackendId, LinkId, Vec<TaskId>)> {
        let outputs = self.take().into_iter().filter_map(|output| match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Fence { backend, link, tasks }) => {
                Some((backend, link, tasks))
            }
            _ => None,
        });
        outputs.collect()
    }

    pub(super) fn next_plan(&mut self) -> BatchPlan {
        for _ in 0..1_000 {
            let plan = self.take().into_iter().find_map(|output| match output {
                ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan)) => Some(plan),
                _ => None,
            });
            if let Some(plan) = plan {
                return plan;
            }
            self.now = self.cluster.poll_timeout().expect("a task waits").max(self.now);
        }
        panic!("no plan comes")
    }
}

#[test]
fn nobody_joins_a_scheduler_that_does_not_know_the_time() {
    let mut standby = Standby::new();
    assert_eq!(standby.cluster.handle_frontend_joined(standby.now, FrontendHello::new("f:1")), Err(JoinError::NotWarm));
    assert!(standby.cluster.control().handle_hand_over(standby.now).unwrap_err().contains("not warm"));
    standby.follow();
    assert!(standby.cluster.handle_frontend_joined(standby.now, FrontendHello::new("f:1")).is_ok());
}

#[test]
fn what_runs_goes_on_and_what_waited_runs_as_another_attempt() {
    let mut standby = Standby::warm();
    standby.take_over();
    let unfinished = standby.unfinished();
    standby.backend(unfinished);
    standby.frontend_obeys();
    assert_eq!(standby.fences(), [], "the backend has not said yet that this is all");
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    let waited = TaskId::new(FRONTEND, 1);
    assert_eq!(standby.fences(), [(BackendId::NOBODY, LinkId::NONE, vec![waited])]);
    standby.frontend(FrontendToModelThread::Fenced { backend: BackendId::NOBODY, unanswered: vec![waited] });
    let freed_at = standby.now + Span::from_millis(4);
    let plan = standby.next_plan();
    assert_eq!(plan.tasks.iter().map(|task| (task.task, task.attempt)).collect::<Vec<_>>(), [(waited, 1)]);
    assert!(plan.exec_at >= freed_at, "the GPU is not free before");
    let outcome = PlanOutcome::Executed { started_at: standby.now, finished_at: standby.now };
    for plan in [INHERITED, plan.plan] {
        standby.backend(plan_done(plan, outcome, vec![]));
        standby.backend(BackendToModelThread::Answered { plan, undelivered: vec![] });
    }
    assert!(standby.cluster.is_idle());
}

#[test]
fn a_backend_that_leaves_waits_for_others_that_have_yet_to_obey_and_could_host_its_model() {
    let mut standby = Standby::warm();
    standby.take_over();
    let other = BackendHello { name: "other".to_owned(), ..BackendHello::new(1, vec![model_offer(1, "n", 1)]) };
    let other = standby.cluster.handle_backend_joined(standby.now, other).unwrap().backend;
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    standby.backend(BackendToControl::Leaving { within: Span::from_millis(20_000) });
    let dismissed = ClusterOutput::ToBackend(Port::Control, BACKEND, SchedulerToBackend::Dismissed);
    let loads = |outputs: &[ClusterOutput]| {
        let loads = outputs.iter().filter_map(|output| match output {
            ClusterOutput::ToBackend(_, to, SchedulerToBackend::Load { load, name, .. }) => {
                Some((*to, *load, name.clone()))
            }
            _ => None,
        });
        loads.collect::<Vec<_>>()
    };
    let outputs = standby.take();
    assert!(loads(&outputs).is_empty() && !outputs.contains(&dismissed), "{outputs:?}");
    for says in
        [BackendToControl::Obeys { epoch: OURS }, BackendToControl::Linked { frontend: FRONTEND, link: LinkId(1) }]
    {
        standby.cluster.handle_backend_message(standby.now, Port::Control, other, says).unwrap();
    }
    let outputs = standby.take();
    let [(to, load, name)] = &loads(&outputs)[..] else { panic!("{outputs:?}") };
    assert_eq!((*to, &name[..], outputs.contains(&dismissed)), (other, "m", false));
    let outcome = LoadOutcome::Ready { offer: model_offer(1, "m", 1), is_last: true };
    let loaded = BackendToControl::Loaded { load: *load, outcome };
    standby.cluster.handle_backend_message(standby.now, Port::Control, other, loaded).unwrap();
    assert!(standby.take().contains(&dismissed));
}

#[test]
fn what_is_lost_of_an_inherited_plan_is_asked_about_whenever_that_is_said() {
    let mut standby = Standby::warm();
    standby.take_over();
    let (unfinished, first) = (standby.unfinished(), TaskId::new(FRONTEND, 0));
    standby.backend(unfinished);
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    // Before the frontend has said that it waits for it ...
    let lost = vec![Undelivered { task: first, link: LinkId(3) }];
    let outcome = PlanOutcome::WindowMissed { rejected_at: standby.now };
    standby.backend(BackendToControl::Unlinked { frontend: FRONTEND });
    standby.backend(plan_done(INHERITED, outcome, lost));
    standby.frontend_obeys();
    // ... and the link that it was lost with is not accounted for any more.
    let both = vec![first, TaskId::new(FRONTEND, 1)];
    assert_eq!(standby.fences(), [(BACKEND, LinkId(3), vec![]), (BackendId::NOBODY, LinkId::NONE, both)]);
}

#[test]
fn a_backend_that_says_nothing_is_fenced_and_may_obey_later() {
    let mut standby = Standby::warm();
    standby.take_over();
    standby.frontend_obeys();
    assert_eq!(standby.fences(), []);
    standby.now += Span::from_millis(50);
    let both = vec![TaskId::new(FRONTEND, 0), TaskId::new(FRONTEND, 1)];
    assert_eq!(standby.fences(), [(BACKEND, LinkId(3), vec![]), (BackendId::NOBODY, LinkId::NONE, both.clone())]);
    standby.frontend(FrontendToModelThread::Fenced { backend: BACKEND, unanswered: vec![] });
    standby.frontend(FrontendToModelThread::Fenced { backend: BackendId::NOBODY, unanswered: both.clone() });
    // What it says now of what it was given before concerns nobody.
    let (unfinished, frees_at) = (standby.unfinished(), standby.now + Span::from_millis(4));
    standby.backend(unfinished);
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    standby.backend(BackendToControl::Linked { frontend: FRONTEND, link: LinkId(4) });
    let plan = standby.next_plan();
    assert!(plan.exec_at >= frees_at && plan.tasks.iter().all(|task| task.attempt == 1));
    assert_eq!(plan.tasks.iter().map(|task| task.task).collect::<Vec<_>>(), both);
}

#[test]
fn members_that_hear_the_primary_keep_it() {
    let mut standby = Standby::warm();
    standby.take();
    standby.cluster.control().handle_peer_lost(standby.now, 0);
    standby.take();
    standby.frontend(FrontendToControl::Misses { misses: false });
    standby.backend(BackendToControl::Misses { misses: false });
    let told = standby.take();
    let takes_over =
        |output: &ClusterOutput| matches!(output, ClusterOutput::ToBackend(_, _, SchedulerToBackend::Takeover { .. }));
    assert!(!told.iter().any(takes_over) && !standby.cluster.control().claim().is_primary());
}

#[test]
fn a_primary_that_hears_of_a_higher_epoch_lets_go_of_its_members() {
    let mut standby = Standby::warm();
    standby.take_over();
    let higher = Claim { era: PRIMARY.era, epoch: Epoch { number: 6, scheduler: 0 } };
    standby.cluster.control().handle_peer_connected(standby.now, 0, higher);
    let closed = standby.take().into_iter().filter(|output| matches!(output, ClusterOutput::Close(..)));
    assert_eq!(closed.count(), 2);
    assert!(!standby.cluster.control().claim().is_primary());
    for member in [Member::Frontend(FRONTEND), Member::Backend(BACKEND)] {
        standby.cluster.handle_disconnected(standby.now, Port::Control, member, "closed".to_owned());
    }
    standby.join(higher);
}

#[test]
fn an_id_that_is_in_use_is_not_given_to_somebody_else() {
    let mut standby = Standby::warm();
    let mut refused = |token| {
        let standing = Standing { token, obeys: PRIMARY };
        let hello = FrontendHello { known_as: Some(FRONTEND), standing, ..FrontendHello::new("g:1") };
        standby.cluster.handle_frontend_joined(standby.now, hello).unwrap_err().to_string()
    };
    assert!(refused(1).contains("your former connection"));
    assert!(refused(2).contains("another member has your id"));
}

#[test]
fn a_frontend_that_comes_back_under_its_name_owes_nothing_of_what_it_had() {
    let mut standby = Standby::warm();
    standby.take_over();
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    standby.frontend(FrontendToControl::Obeys { epoch: OURS });
    standby.frontend(FrontendToModelThread::AllOpen);
    standby.frontend(submit(FRONTEND, 7, standby.now + Span::from_millis(25)));
    let plan = standby.next_plan();
    standby.cluster.handle_disconnected(standby.now, Port::Control, Member::Frontend(FRONTEND), "lost".to_owned());
    let standing = Standing { token: 1, obeys: Claim { era: PRIMARY.era, epoch: OURS } };
    let hello = FrontendHello { known_as: Some(FRONTEND), standing, ..FrontendHello::new("f:1") };
    standby.cluster.handle_frontend_joined(standby.now, hello).unwrap();
    let outcome = PlanOutcome::Executed { started_at: standby.now, finished_at: standby.now };
    standby.backend(plan_done(plan.plan, outcome, vec![]));
    standby.backend(BackendToModelThread::Answered { plan: plan.plan, undelivered: vec![] });
    assert!(standby.cluster.is_idle());
}

#[test]
fn whatever_may_carry_a_task_of_an_unknown_model_is_fenced() {
    let mut standby = Standby::warm();
    standby.take_over();
    let unfinished = standby.unfinished();
    standby.backend(unfinished);
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    standby.frontend(FrontendToControl::Link { backend: BACKEND, link: LinkId(3) });
    standby.frontend(FrontendToControl::Obeys { epoch: OURS });
    let FrontendToModelThread::Open { task, deadline, priority, attempt, slot, .. } = standby.open(0) else { panic!() };
    // It has not heard yet what the new primary calls the model.
    let model = ModelId(u32::MAX);
    standby.frontend(FrontendToModelThread::Open {
        task,
        model,
        deadline,
        priority,
        application: proto::Application::NONE,
        attempt,
        slot,
    });
    standby.frontend(FrontendToModelThread::AllOpen);
    assert_eq!(standby.fences(), [(BACKEND, LinkId(3), vec![]), (BackendId::NOBODY, LinkId::NONE, vec![task])]);
}

#[test]
fn frontends_are_told_who_obeys_and_how_long_that_took() {
    let mut standby = Standby::warm();
    standby.take_over();
    let load = |standby: &mut Standby| {
        standby.take();
        standby.frontend(FrontendToControl::ClockRequest { sent_at: Timestamp(0), resp: Span::ZERO });
        let loads = standby.take().into_iter().find_map(|output| match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Load(load)) => Some(*load),
            _ => None,
        });
        let SchedulerLoad { members, obeying, settled, .. } = loads.unwrap();
        (members, obeying, settled)
    };
    assert_eq!(load(&mut standby), (2, 0, Span::ZERO));
    standby.now += Span::from_millis(2);
    standby.backend(BackendToControl::Obeys { epoch: OURS });
    assert_eq!(load(&mut standby), (2, 1, Span::ZERO));
    standby.now += Span::from_millis(1);
    standby.frontend(FrontendToControl::Obeys { epoch: OURS });
    standby.frontend(FrontendToModelThread::AllOpen);
    assert_eq!(load(&mut standby), (2, 2, Span::from_millis(3)));
}
