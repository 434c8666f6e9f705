//! What a backend does when another scheduler is obeyed, or none. Whom to have sessions with and whom to obey is
//! `member`'s to say. All that is under way outlives a primary: the next one is told of it. A backend that has lost its
//! primary goes on with what it has, and waits for another one.

use std::collections::BTreeSet;

use member::{ORPHAN_MAX, Verdict, Welcome, encode};
use proto::{
    FrontendId, ModelId, ModelThreadId, PlanId, Span, Standing, Timestamp, Wait,
    backend_to_scheduler::{BackendHello, BackendToControl},
    clock::ClockReply,
    hello::{Member, SchedulerHello},
    scheduler_to_backend::{BackendWelcome, SchedulerToBackend},
};
use repository::Refused;

use super::{Core, Hosting, leaving::Leaving, offers::Offers, word::Word};
use crate::{links::Target, worker::Unfinished};

/// Frontends that the former primary had announced, and the new one has not yet, may join it within this time.
const JOIN_GRACE: Span = Wait::Announced.bound();

/// What outlives a primary.
pub(super) struct Inheritance {
    /// Frontends of the former primary that the new one has not announced,
    frontends: BTreeSet<FrontendId>,
    /// and until when it may.
    pub(super) until: Timestamp,
    /// Plans that were given another name.
    renamed: u64,
}

impl Default for Inheritance {
    fn default() -> Self {
        Self { frontends: BTreeSet::new(), until: Timestamp::NEVER, renamed: 0 }
    }
}

/// What schedulers have made of a backend, which outlives its sessions and ends with its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    /// An operator has drained it.
    pub is_drained: bool,
    /// The sub-cluster that it is in.
    pub sub_cluster: Option<u16>,
}

impl Core {
    /// What an earlier life was told that this one is to go on with.
    pub fn handle_kept(&mut self, Kept { is_drained, sub_cluster }: Kept) {
        (self.is_drained, self.sub_cluster) = (is_drained, sub_cluster);
    }

    /// What a next life is to be told.
    #[must_use]
    pub fn kept(&self) -> Kept {
        Kept { is_drained: self.is_drained, sub_cluster: self.sub_cluster }
    }

    /// The session with the scheduler that we obey, unless that is lost.
    pub(super) fn primary(&self) -> Option<usize> {
        self.membership.primary()
    }

    /// How often a scheduler claimed an epoch below one that it, or whoever is obeyed, had claimed; it is not believed.
    #[must_use]
    pub fn lower_epochs(&self) -> u64 {
        self.membership.lower_epochs()
    }

    /// A scheduler has taken us in.
    pub(super) fn on_welcome(&mut self, now: Timestamp, index: usize, welcome: &[u8]) {
        if let Err(reason) = self.take_welcome(now, index, welcome) {
            return self.lose(now, index, reason);
        }
        let (scheduler, threads) = (&self.config.schedulers[index], self.membership[index].threads().count());
        tracing::info!(backend = self.backend().map(|id| id.0), %scheduler, model_threads = threads, "joined");
        for (frontend, link) in self.links.up().collect::<Vec<_>>() {
            self.tell(index, &BackendToControl::Linked { frontend, link });
        }
        if self.is_drained {
            self.tell(index, &BackendToControl::Drained { is_drained: true });
        }
        if let Some(sub_cluster) = self.sub_cluster {
            self.tell(index, &BackendToControl::Assigned { sub_cluster });
        }
        self.offer(index);
        for Refused { name, version, reason } in self.not_loaded.clone() {
            self.tell(index, &BackendToControl::NotLoaded { name, version, reason });
        }
        self.on_claim(now, index);
    }

    fn take_welcome(&mut self, now: Timestamp, index: usize, welcome: &[u8]) -> Result<(), String> {
        let BackendWelcome { backend, models, model_threads, claim } = wincode::deserialize(welcome)
            .map_err(|_| "its welcome does not decode; do both sides run the same version?")?;
        let word = &mut self.membership[index].word;
        word.handle_named(models)?;
        let (member, knows_all) = (Member::Backend(backend), word.knows_all());
        self.membership.handle_welcome(now, index, Welcome { member, model_threads, claim, knows_all })
    }

    /// A session has come as far as to be joined, or its scheduler claims to be the primary.
    pub(super) fn on_claim(&mut self, now: Timestamp, index: usize) {
        let is_first = !self.membership.has_obeyed();
        match self.membership.handle_claim(now, index) {
            Verdict::Nothing => {}
            Verdict::Leave(reason) => self.lose(now, index, reason.to_owned()),
            Verdict::StartOver(reason) => self.end(format!("scheduler {}: {reason}", self.config.schedulers[index])),
            Verdict::Obey { .. } => self.obey(now, index, is_first),
        }
    }

    /// The scheduler of this session is the primary: nobody else's word counts from now on.
    fn obey(&mut self, now: Timestamp, index: usize, is_first: bool) {
        let (claim, scheduler) = (self.membership.obeys(), &self.config.schedulers[index]);
        tracing::info!(%scheduler, epoch = %claim.epoch, is_first, "obeying the primary");
        self.hosting.forget_loads();
        self.memories.forget_orders();
        self.tell_plans(index);
        self.report(&BackendToControl::Obeys { epoch: claim.epoch });
        for gpu in self.watchdog.unusable() {
            let usable = BackendToControl::Usable { gpu_index: gpu as u32, is_usable: false };
            self.tell(index, &usable);
        }
        if let Some(Leaving { until, .. }) = self.leaving {
            self.leaving = Some(Leaving { senders: self.membership[index].threads().count(), until });
            self.report(&BackendToControl::Leaving { within: (until - now).max(Span::ZERO) });
        }
        if self.membership.clock().error_bound().is_some() {
            self.links.handle_clock(now);
        }
        self.inherit_frontends(now, index);
        for order in self.membership[index].word.take_early() {
            // One of them may lose the session.
            if self.primary() == Some(index) && self.ended.is_none() {
                self.on_order(now, index, order);
            }
        }
    }

    /// What a scheduler wants that is not obeyed. It may be as soon as all its connections are up.
    pub(super) fn on_early(&mut self, index: usize, order: SchedulerToBackend) {
        let session = &mut self.membership[index];
        let may_be_obeyed = session.claim().is_primary() && !session.has_joined();
        if !(may_be_obeyed && session.word.handle_early(order)) {
            let scheduler = &self.config.schedulers[index];
            tracing::debug!(%scheduler, "not the primary, so what it wants is not done");
        }
    }

    /// A scheduler told its clock.
    pub(super) fn on_clock(&mut self, now: Timestamp, index: usize, reply: ClockReply) {
        if self.membership.handle_clock(now, index, reply) {
            self.links.handle_clock(now);
        }
    }

    /// Names all plans anew that have not ended, and tells the primary of them.
    fn tell_plans(&mut self, index: usize) {
        let renamed = &mut self.inheritance.renamed;
        let mut name = || {
            *renamed += 1;
            PlanId::new(ModelThreadId::INHERITED, *renamed)
        };
        let Hosting { workers, models, .. } = &mut self.hosting;
        let mut unfinished = Vec::new();
        for (gpu_index, worker) in (0..).zip(workers) {
            for Unfinished { plan, model, exec_at, tasks } in worker.rename_plans(&mut name) {
                let frees_at = exec_at.map(|at| at + models[&model].profile.latency(tasks.len().max(1)));
                let model = self.membership[index].word.name_of(model);
                unfinished.push(BackendToControl::Unfinished { plan, gpu_index, model, frees_at, tasks });
            }
        }
        unfinished.iter().for_each(|plan| self.tell(index, plan));
    }

    /// Links that are up stay up, whoever is obeyed, for as long as the new primary may still announce their frontends.
    fn inherit_frontends(&mut self, now: Timestamp, index: usize) {
        let announced = self.membership[index].word.frontends.clone();
        let known: BTreeSet<FrontendId> = self.links.frontends().collect();
        self.inheritance.frontends = known.iter().filter(|known| !announced.contains_key(known)).copied().collect();
        let is_any = !self.inheritance.frontends.is_empty();
        self.inheritance.until = if is_any { now + JOIN_GRACE } else { Timestamp::NEVER };
        for (frontend, target) in announced {
            if self.links.target(frontend) != Some(target) {
                self.join_frontend(now, index, frontend, target);
            }
        }
    }

    /// A scheduler has announced a frontend.
    pub(super) fn on_frontend(&mut self, now: Timestamp, index: usize, frontend: FrontendId, target: Target) {
        if let Err(reason) = self.membership[index].word.handle_frontend(frontend, target) {
            return self.lose(now, index, reason.to_string());
        }
        if self.primary() == Some(index) {
            let is_inherited = self.inheritance.frontends.remove(&frontend);
            if !is_inherited || self.links.target(frontend) != Some(target) {
                self.join_frontend(now, index, frontend, target);
            }
        }
    }

    /// The primary wants a frontend linked to, or anew.
    fn join_frontend(&mut self, now: Timestamp, index: usize, frontend: FrontendId, target: Target) {
        self.cut_off(now, frontend);
        if self.links.handle_joined(now, frontend, target).is_err() {
            // Only those that nobody has announced to us any more can be too many.
            self.leave_inherited(now);
            if let Err(reason) = self.links.handle_joined(now, frontend, target) {
                self.lose(now, index, reason.to_string());
            }
        }
    }

    fn leave_inherited(&mut self, now: Timestamp) {
        for frontend in std::mem::take(&mut self.inheritance.frontends) {
            self.leave_frontend(now, frontend);
        }
    }

    /// An operator has drained us, or resumed us: all schedulers are told.
    pub(super) fn on_drain(&mut self, is_drained: bool) {
        tracing::info!(is_drained, "whether this backend is drained has changed");
        self.is_drained = is_drained;
        self.tell_all(&BackendToControl::Drained { is_drained });
    }

    /// A primary has put us in a sub-cluster: all schedulers are told.
    pub(super) fn on_assign(&mut self, sub_cluster: u16) {
        self.sub_cluster = Some(sub_cluster);
        self.tell_all(&BackendToControl::Assigned { sub_cluster });
    }

    /// The operator wants this process to end, `within` that time: the scheduler is told, which has others host our
    /// models first, and what is under way is finished. It is over once [`Self::has_left`] says so.
    pub fn handle_leaving(&mut self, now: Timestamp, within: Span) {
        if self.leaving.is_none() && self.has_joined() {
            // An orphan tells its next primary.
            let senders = self.primary().map_or(1, |primary| self.membership[primary].threads().count());
            self.leaving = Some(Leaving { senders, until: now + within });
            self.report(&BackendToControl::Leaving { within });
            self.settle(now);
        }
    }

    /// Whether nothing is under way any more and nothing comes, or there is nobody to leave. What was said last may be
    /// on its way for [`LAST_WORDS_SPAN`](super::LAST_WORDS_SPAN).
    #[must_use]
    pub fn has_left(&self) -> bool {
        // Another scheduler may take over, and have others host our models first.
        let is_alone = self.primary().is_none() && self.config.schedulers.len() == 1;
        let is_dismissed = self.leaving.is_some_and(|leaving| leaving.senders == 0 || is_alone);
        self.ended.is_some() || !self.has_joined() || (is_dismissed && self.plans() == 0)
    }

    /// A ModelThread plans no more here.
    pub(super) fn on_dismissed(&mut self) {
        if let Some(leaving) = &mut self.leaving {
            leaving.senders = leaving.senders.saturating_sub(1);
        }
    }

    /// The primary does not serve a frontend any more.
    pub(super) fn leave_frontend(&mut self, now: Timestamp, frontend: FrontendId) {
        self.inheritance.frontends.remove(&frontend);
        self.links.handle_left(frontend);
        self.told.transfers.forget(frontend);
        self.cut_off(now, frontend);
    }

    /// A session has failed. With several schedulers it is tried again, and another one may become the primary; with
    /// one, this life is over.
    pub(super) fn lose(&mut self, now: Timestamp, index: usize, reason: String) {
        let was_primary = self.primary() == Some(index);
        if let Verdict::StartOver(_) = self.membership.handle_lost(now, index) {
            return self.end(reason);
        }
        let scheduler = &self.config.schedulers[index];
        if was_primary {
            tracing::warn!(%scheduler, reason, "the primary is lost; waiting for another one");
        } else {
            tracing::warn!(%scheduler, reason, "no session with a scheduler; trying again");
        }
    }

    /// A standby asks whether we miss the primary.
    pub(super) fn on_question(&mut self, now: Timestamp, index: usize) {
        if self.membership.handle_question(now, index) {
            self.report(&BackendToControl::ClockRequest { sent_at: now });
        }
    }

    /// Standbys are told whether we miss the primary.
    pub(super) fn answer_questions(&mut self) {
        while let Some((index, misses)) = self.membership.poll_answer() {
            self.tell(index, &BackendToControl::Misses { misses });
        }
    }

    /// Runs every timer that is due.
    pub(super) fn on_time(&mut self, now: Timestamp) {
        let verdict = self.membership.handle_timeout(now);
        while let Some((index, sent_at)) = self.membership.poll_clock_request(now) {
            self.tell(index, &BackendToControl::ClockRequest { sent_at });
        }
        if self.inheritance.until <= now {
            self.inheritance.until = Timestamp::NEVER;
            if !self.inheritance.frontends.is_empty() {
                Wait::Announced.note_reached();
            }
            self.leave_inherited(now);
        }
        if let Verdict::StartOver(reason) = verdict {
            self.end(format!("{reason}, {ORPHAN_MAX}"));
        }
    }

    /// What a scheduler that is dialled is told: what is hosted now, among others.
    pub(super) fn hello(&mut self, index: usize) -> Vec<u8> {
        let mut offers = Offers::new(self.hosting.offers());
        let (models, more) = offers.first_page();
        let standing = Standing { token: self.config.token, obeys: self.membership.obeys() };
        let gpus = self.config.staging.gpus() as u32;
        let memory_pages = self.memories.pages();
        let (name, known_as, is_auto) = (self.config.name.clone(), self.backend(), self.config.is_auto);
        self.membership[index].word = Word::new(offers);
        let hello = BackendHello { name, gpus, memory_pages, models, more, known_as, standing, is_auto };
        encode(&SchedulerHello::Backend(hello))
    }

    /// Tells a scheduler as much of what is hosted as it may be told now.
    fn offer(&mut self, index: usize) {
        while let Some(offers) = self.membership[index].word.poll_offers() {
            self.tell(index, &offers);
        }
    }

    /// A scheduler names models that it was told of since it took us in.
    pub(super) fn on_offered(&mut self, now: Timestamp, index: usize, models: Vec<ModelId>) {
        let word = &mut self.membership[index].word;
        if let Err(reason) = word.handle_named(models) {
            return self.lose(now, index, reason);
        }
        if word.knows_all() {
            self.membership.handle_known(index);
        }
        self.offer(index);
        self.on_claim(now, index);
    }
}
