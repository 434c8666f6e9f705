//! What a change of the primary does to members: they are told, say what they have, and each frontend's tasks are
//! settled once all backends have spoken, or have had their time.

use std::collections::{BTreeMap, BTreeSet};

use proto::{
    BackendId, Claim, Epoch, Era, FrontendId, LinkId, ModelThreadId, PlanId, Span, Timestamp, Wait,
    backend_to_scheduler::BackendToModelThread,
    clock::ClockReply,
    hello::Member,
    scheduler_to_backend::SchedulerToBackend,
    scheduler_to_frontend::SchedulerToFrontend,
    scheduler_to_scheduler::{HandedOver, PeerHello, SchedulerToScheduler},
};
use rand_chacha::rand_core::Rng as _;

use super::{
    Control, ControlOutput, PeerOutput,
    changes::Changes,
    learned,
    members::{Gpu, Heir},
    succession::SuccessionOutput,
};
use crate::{
    news::{ControlToRank, ControlToShard, Links},
    shard::{Unfinished, Violation},
};

/// How long a backend that was here is waited for, until what it runs is taken for lost.
const BACKENDS_WAIT: Span = Wait::TakenOver.bound();
/// An operator is told no later than this that the primary has changed: whoever asks does not wait much longer.
const OPERATOR_WAIT: Span = Wait::HandedOver.bound();
/// Plans that a backend may still have of an earlier primary, for each of its GPUs.
const UNFINISHED_MAX: usize = 32;
/// The clock of an era begins this long after zero, at least.
const ERA_BEGINS: Span = Span::from_millis(1_000_000);

/// What is under way between a claim and the last member that obeys it.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    began_at: Option<Timestamp>,
    /// How long the last one took.
    took: Span,
    /// Backends that owe a word are waited for until then.
    backends_until: Option<Timestamp>,
    /// An operator waits for the end of it.
    operator: bool,
    /// Who is to be told what we have learned, and that it may take over.
    pub(super) heir: Option<learned::Heir>,
    /// Another scheduler has been told that it may take over.
    pub(super) is_handed_over: bool,
    /// Backends that have left since, and when.
    gone: Vec<(Timestamp, BackendId)>,
    /// Plans of earlier primaries, and who plans their models.
    inherited: BTreeMap<(BackendId, PlanId), ModelThreadId>,
    /// Schedulers that have connected to us.
    dialers: BTreeSet<u16>,
}

impl Takeover {
    pub(super) fn handle_backend_left(&mut self, backend: BackendId) {
        self.inherited.retain(|(other, _), _| *other != backend);
    }

    /// Not all members have been taken over.
    pub(super) fn is_under_way(&self) -> bool {
        self.began_at.is_some()
    }

    /// From the claim until all members that were here obeyed it; zero if they do not yet.
    pub(super) fn settled(&self) -> Span {
        if self.is_under_way() { Span::ZERO } else { self.took }
    }

    /// Whether a backend has left while there was to be another primary.
    pub(super) fn has_gone(&self, backend: BackendId) -> bool {
        self.gone.iter().any(|&(_, gone)| gone == backend)
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let operator = self.began_at.filter(|_| self.operator).map(|at| at + OPERATOR_WAIT);
        let gone = self.gone.first().map(|&(at, _)| at + BACKENDS_WAIT);
        [self.backends_until, operator, gone].into_iter().flatten().min()
    }
}

impl Control {
    /// What this scheduler takes itself for.
    #[must_use]
    pub fn claim(&self) -> Claim {
        self.succession.claim()
    }

    /// Whether members may join, and this scheduler take over.
    #[must_use]
    pub fn is_warm(&self) -> bool {
        self.succession.is_warm()
    }

    /// Our connection to another scheduler is up.
    pub fn handle_peer_connected(&mut self, now: Timestamp, rank: u16, claim: Claim) {
        self.succession.handle_rival(claim);
        self.succession.handle_peer(now, rank, claim);
        self.follow_succession(now);
    }

    /// It ended, or did not come up.
    pub fn handle_peer_lost(&mut self, now: Timestamp, rank: u16) {
        self.succession.handle_peer_lost(now, rank);
        self.follow_succession(now);
    }

    /// Something came over it.
    pub fn handle_peer_message(&mut self, now: Timestamp, rank: u16, message: SchedulerToScheduler) {
        match message {
            SchedulerToScheduler::LearnedNetwork(told) if self.succession.follows(rank) => {
                self.on_learned_network(now, told);
            }
            SchedulerToScheduler::LearnedModel(told) if self.succession.follows(rank) => self.on_learned_model(told),
            other => self.succession.handle_message(now, rank, other),
        }
        self.follow_succession(now);
    }

    /// A heartbeat was READ; `None` if it could not be.
    pub fn handle_heartbeat(&mut self, now: Timestamp, rank: u16, beat: Option<u64>) {
        self.succession.handle_heartbeat(now, rank, beat);
        self.follow_succession(now);
    }

    /// Another scheduler connects to us.
    ///
    /// # Errors
    /// If it is none of the list, or is connected already.
    pub fn handle_dialer(&mut self, now: Timestamp, hello: &PeerHello) -> Result<Claim, String> {
        let (rank, own) = (hello.rank, self.config.succession);
        if rank >= own.schedulers || rank == own.rank {
            return Err(format!(
                "schedulers: found one that is number {rank} of its list; expected the same list everywhere"
            ));
        }
        if !self.takeover.dialers.insert(rank) {
            return Err(format!("schedulers: number {rank} is connected already; try again"));
        }
        self.succession.handle_rival(hello.claim);
        self.follow_succession(now);
        Ok(self.claim())
    }

    /// Its connection ended.
    pub fn handle_dialer_lost(&mut self, rank: u16) {
        self.takeover.dialers.remove(&rank);
    }

    /// Something came over it.
    pub fn handle_dialer_message(&mut self, now: Timestamp, rank: u16, message: &SchedulerToScheduler) {
        match *message {
            SchedulerToScheduler::ClockRequest { sent_at } => {
                let reply = SchedulerToScheduler::Clock(ClockReply { sent_at, received_at: now, replied_at: now });
                self.outputs.push_back(ControlOutput::Peer(PeerOutput::Answer(rank, reply)));
            }
            SchedulerToScheduler::AskHandOver if self.claim().is_primary() => self.hand_over_to(rank),
            _ => {}
        }
    }

    /// An operator wants this scheduler to be the primary; [`PeerOutput::HandedOver`] follows.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn handle_hand_over(&mut self, now: Timestamp) -> Result<(), String> {
        if self.leaves {
            return Err("this scheduler is about to end".to_owned());
        }
        self.succession.handle_hand_over(now)?;
        self.takeover.operator = true;
        self.follow_succession(now);
        Ok(())
    }

    /// Asks the first other scheduler that is there to take over. False if we are the primary and there is none.
    pub(super) fn hand_over(&mut self) -> bool {
        if !self.claim().is_primary() {
            return true;
        }
        let other = self.takeover.dialers.first().copied();
        other.into_iter().for_each(|rank| self.hand_over_to(rank));
        other.is_some()
    }

    /// Does what follows from who is the primary.
    pub(super) fn follow_succession(&mut self, now: Timestamp) {
        while let Some(output) = self.succession.poll_output() {
            let peer = match output {
                SuccessionOutput::Dial(rank) => PeerOutput::Dial(rank),
                SuccessionOutput::Tell(rank, message) => PeerOutput::Tell(rank, message),
                SuccessionOutput::ReadHeartbeat(rank) => PeerOutput::ReadHeartbeat(rank),
                SuccessionOutput::ShiftClock(span) => PeerOutput::ShiftClock(span),
                SuccessionOutput::End(reason) => PeerOutput::End(reason),
                SuccessionOutput::AskMembers => {
                    self.ask_members(now);
                    continue;
                }
                SuccessionOutput::Found => {
                    self.found_era(now);
                    continue;
                }
                SuccessionOutput::TakeOver => {
                    self.on_take_over(now);
                    continue;
                }
                SuccessionOutput::Warm => {
                    self.tell_dialers();
                    continue;
                }
                SuccessionOutput::StepDown => {
                    self.on_step_down(now);
                    continue;
                }
            };
            self.outputs.push_back(ControlOutput::Peer(peer));
        }
    }

    fn ask_members(&mut self, now: Timestamp) {
        for &frontend in self.members.frontends.keys() {
            self.outputs.push_back(ControlOutput::ToFrontend(frontend, SchedulerToFrontend::AskPrimary));
        }
        for &backend in self.members.backends.keys() {
            self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::AskPrimary));
        }
        let asked = self.members.frontends.len() + self.members.backends.len();
        self.succession.handle_asked(now, asked);
    }

    pub(super) fn on_misses(&mut self, now: Timestamp, misses: bool) {
        self.succession.handle_answer(now, misses);
        self.follow_succession(now);
    }

    /// Nobody is there yet. With others in the list, the era's clock begins anywhere far from zero, where all begin
    /// that have yet to follow somebody: so it never leaps back.
    fn found_era(&mut self, now: Timestamp) {
        let era = Era(self.passes.next_u64() | 1);
        if self.config.succession.schedulers > 1 {
            let leap = ERA_BEGINS + Span((self.passes.next_u64() >> 23) as i64);
            self.outputs.push_back(ControlOutput::Peer(PeerOutput::ShiftClock(leap)));
        }
        self.succession.handle_era(now, era);
    }

    fn on_take_over(&mut self, now: Timestamp) {
        let Claim { epoch, .. } = self.claim();
        for (&frontend, entry) in &mut self.members.frontends {
            entry.heir = Heir::default();
            let message = SchedulerToFrontend::Takeover { epoch };
            self.outputs.push_back(ControlOutput::ToFrontend(frontend, message));
        }
        for (&backend, entry) in &mut self.members.backends {
            (entry.obeys, entry.owes) = (false, true);
            self.outputs.push_back(ControlOutput::ToBackend(backend, SchedulerToBackend::Takeover { epoch }));
        }
        self.tell_dialers();
        self.takeover.began_at = Some(now);
        self.takeover.backends_until = (!self.members.backends.is_empty()).then_some(now + BACKENDS_WAIT);
        self.note_progress(now);
    }

    /// Members that have not left by themselves do so now; they come back as a standby's. What clients have loaded and
    /// unloaded is the new primary's to know.
    /// Whoever obeys the next primary leaves the former one, backends mostly before frontends: to those nothing is
    /// said of that, as the next one accounts for all. It is made up for if there is none after all.
    pub(super) fn note_gone(&mut self, now: Timestamp, backend: BackendId) {
        if !self.takeover.has_gone(backend) {
            self.takeover.gone.push((now, backend));
        }
    }

    /// Backends that have left while there was to be another primary are dealt with.
    pub(super) fn end_handover(&mut self, now: Timestamp) {
        self.takeover.is_handed_over = false;
        for (_, backend) in std::mem::take(&mut self.takeover.gone) {
            self.handle_left(now, Member::Backend(backend));
        }
    }

    fn on_step_down(&mut self, now: Timestamp) {
        let reason = "this scheduler is not the primary any more";
        let frontends = self.members.frontends.keys().map(|&id| Member::Frontend(id));
        let members = frontends.chain(self.members.backends.keys().map(|&id| Member::Backend(id)));
        self.outputs.extend(members.map(|member| ControlOutput::Close(member, reason.to_owned())));
        self.changes = Changes::default();
        self.end_handover(now);
        self.takeover = Takeover { dialers: std::mem::take(&mut self.takeover.dialers), ..Takeover::default() };
        self.tell_dialers();
    }

    fn tell_dialers(&mut self) {
        let claim = self.claim();
        let told =
            self.takeover.dialers.iter().map(|&rank| PeerOutput::Answer(rank, SchedulerToScheduler::Claim(claim)));
        self.outputs.extend(told.map(ControlOutput::Peer));
    }

    /// A frontend that is about to obey names a link that can reach its slots.
    pub(super) fn on_link_named(&mut self, frontend: FrontendId, link: (BackendId, LinkId)) -> Result<(), Violation> {
        let Some(entry) = self.members.frontends.get_mut(&frontend) else { return Ok(()) };
        if entry.heir.links.len() >= super::members::BACKENDS_MAX {
            return Err(Violation(format!("it names more than {} links", super::members::BACKENDS_MAX)));
        }
        entry.heir.links.insert(link.0, link.1);
        Ok(())
    }

    pub(super) fn on_frontend_obeys(&mut self, now: Timestamp, frontend: FrontendId, epoch: Epoch) {
        if epoch == self.claim().epoch
            && let Some(entry) = self.members.frontends.get_mut(&frontend)
        {
            entry.heir.obeys = true;
            self.settle_heirs(now);
        }
    }

    /// A ModelThread has heard of all tasks that a frontend has.
    pub(super) fn on_all_open(&mut self, now: Timestamp, frontend: FrontendId) {
        if let Some(entry) = self.members.frontends.get_mut(&frontend) {
            entry.heir.threads += 1;
            self.settle_heirs(now);
        }
    }

    pub(super) fn on_backend_obeys(&mut self, now: Timestamp, backend: BackendId, epoch: Epoch) {
        if epoch == self.claim().epoch && self.members.backends.contains_key(&backend) {
            let in_vain = self.members.set_obeys(backend);
            let in_repository = in_vain.iter().map(|model| self.members.models[model.0 as usize].name.clone());
            let names = in_repository.chain(self.changes.with_files().map(str::to_owned)).collect();
            self.unload(&in_vain.into_iter().map(|model| (backend, model)).collect());
            self.load_brought(now, names);
            self.members.forget_resident(backend);
            self.refresh(now);
            self.settle_heirs(now);
        }
    }

    /// A backend that is about to obey has a plan of an earlier primary.
    pub(super) fn on_unfinished(&mut self, backend: BackendId, plan: Unfinished) -> Result<(), Violation> {
        let Some(entry) = self.members.backends.get(&backend) else { return Ok(()) };
        let Some(&gpu) = entry.gpus.get(plan.gpu_index as usize) else {
            return Err(Violation(format!("it has a plan for GPU {}, which it does not have", plan.gpu_index)));
        };
        let its = (backend, PlanId(0))..=(backend, PlanId(u64::MAX));
        let (found, max) = (self.takeover.inherited.range(its).count(), UNFINISHED_MAX * entry.gpus.len());
        if found >= max || plan.plan.model_thread() != ModelThreadId::INHERITED {
            return Err(Violation(format!(
                "{:?} is one more of an earlier primary than the {max} there can be",
                plan.plan
            )));
        }
        let owner = self.owner(plan.model);
        // Without ports of their own ModelThreads are told by the backend itself what becomes of it.
        if !self.config.addresses.is_empty() {
            self.takeover.inherited.insert((backend, plan.plan), owner);
        }
        if let Some(until) = plan.frees_at {
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::GpuBusy(gpu, until)));
        }
        self.outputs.push_back(ControlOutput::ToShard(owner, ControlToShard::Unfinished(backend, plan)));
        Ok(())
    }

    /// What becomes of such a plan is its ModelThread's to know.
    pub(super) fn on_inherited(&mut self, backend: BackendId, report: BackendToModelThread) {
        let Some(plan) = report.plan() else { return };
        let Some(&owner) = self.takeover.inherited.get(&(backend, plan)) else { return };
        if matches!(report, BackendToModelThread::Answered { .. }) {
            self.takeover.inherited.remove(&(backend, plan));
        }
        self.outputs.push_back(ControlOutput::ToShard(owner, ControlToShard::Inherited(backend, report)));
    }

    /// Frontends that have said all are settled, once backends have, and what is in GPUs' memory is known: what runs
    /// again before finds no GPU.
    pub(super) fn settle_heirs(&mut self, now: Timestamp) {
        let waits = self.takeover.backends_until.is_some_and(|until| now < until);
        let owes = self.members.backends.values().any(|backend| backend.owes)
            || waits && self.members.gpus.values().any(Gpu::is_asked);
        if self.claim().is_primary() && !owes {
            let threads = self.config.model_threads;
            let frontends = self.members.frontends.iter_mut();
            let ready = frontends
                .filter(|(_, entry)| entry.heir.obeys && entry.heir.threads >= threads && !entry.heir.is_settled);
            let ready = ready.map(|(&frontend, entry)| {
                entry.heir.is_settled = true;
                frontend
            });
            for frontend in ready.collect::<Vec<_>>() {
                let links = self.members.doubtful_links(frontend);
                if !links.is_empty() {
                    tracing::warn!(
                        frontend = frontend.0,
                        links = links.len(),
                        "links of backends that do not obey are fenced"
                    );
                }
                let all = self.members.frontends[&frontend].heir.links.iter().map(|(&backend, &link)| (backend, link));
                let links = Links { all: all.collect(), doubtful: links };
                self.tell_shards(|| ControlToShard::Settle(frontend, links.clone()));
            }
            self.takeover.backends_until = None;
        }
        self.note_progress(now);
    }

    /// Backends that owe a word have had their time: their links are fenced off, so nothing that they still do meets
    /// what runs again. They may obey later, with other links.
    pub(super) fn end_waiting(&mut self, now: Timestamp) {
        if self.takeover.gone.first().is_some_and(|&(at, _)| at + BACKENDS_WAIT <= now) {
            self.end_handover(now);
        }
        if self.takeover.backends_until.is_some_and(|until| until <= now) {
            for (backend, entry) in self.members.backends.iter_mut().filter(|(_, entry)| entry.owes) {
                entry.owes = false;
                Wait::TakenOver.note_reached();
                tracing::warn!(
                    backend = backend.0,
                    "it has not said within {BACKENDS_WAIT} what it runs; it is fenced off"
                );
            }
            self.settle_heirs(now);
        }
        if self.takeover.operator && self.takeover.began_at.is_some_and(|at| at + OPERATOR_WAIT <= now) {
            Wait::HandedOver.note_reached();
            self.answer_operator(now);
        }
    }

    /// One line once all who were there have been taken over.
    fn note_progress(&mut self, now: Timestamp) {
        let Some(began_at) = self.takeover.began_at else { return };
        let waits = self.members.frontends.values().any(|entry| !entry.heir.is_settled)
            || self.members.backends.values().any(|entry| entry.owes);
        if waits {
            return;
        }
        let (frontends, backends) = (self.members.frontends.len(), self.members.backends.len());
        let epoch = self.claim().epoch;
        let took = now - began_at;
        tracing::warn!(%epoch, frontends, backends, %took, "all members obey; this scheduler is the primary");
        if self.takeover.operator {
            self.answer_operator(now);
        }
        (self.takeover.began_at, self.takeover.took) = (None, took);
    }

    fn answer_operator(&mut self, now: Timestamp) {
        let began_at = self.takeover.began_at.unwrap_or(now);
        let done = HandedOver { epoch: self.claim().epoch, took: now - began_at };
        self.takeover.operator = false;
        self.outputs.push_back(ControlOutput::Peer(PeerOutput::HandedOver(done)));
    }
}
