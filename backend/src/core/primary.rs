//! Which scheduler a backend obeys. It has a session with each of them, and obeys the one that claims the highest epoch
//! of an era: the primary. All that is under way outlives a primary: the next one is told of it.
//!
//! The first scheduler that welcomes a backend names it; only then are the others connected to, under that name. A
//! backend that has lost its primary, or has found none yet, is an orphan: it goes on with what it has, and waits for
//! another one to claim more. With one scheduler there is nothing to wait for.

use std::collections::BTreeSet;

use proto::{
    BackendId, Claim, Epoch, FrontendId, ModelId, ModelThreadId, PlanId, Span, Standing, Timestamp, Wait,
    backend_to_scheduler::{BackendHello, BackendToControl},
    hello::{Member, MemberHello, SchedulerHello},
};
use repository::Refused;
use transport::ConnectionId;

use super::{Core, Hosting, Output, Peer, encode, offers::Offers, session::Welcomed};
use crate::{links::Target, worker::Unfinished};

/// An orphan waits this long for another primary.
const ORPHAN_MAX: Span = Wait::Orphan.bound();
/// A primary is missed that is asked for its clock and says nothing for so long.
const MISSED_AFTER: Span = Wait::Missed.bound();
/// Frontends that the former primary had announced, and the new one has not yet, may join it within this time.
const JOIN_GRACE: Span = Wait::Announced.bound();

/// Whom we obey.
pub(super) struct Obedience {
    /// What the first scheduler named us.
    pub(super) backend: Option<BackendId>,
    /// Which scheduler is connected to while we have no name.
    first: usize,
    /// What was claimed by whom we obey, or obeyed last.
    claim: Option<Claim>,
    /// Its session, unless that is lost.
    primary: Option<usize>,
    /// When waiting for another one is over.
    orphan_until: Timestamp,
    /// Frontends of the former primary that the new one has not announced,
    inherited: BTreeSet<FrontendId>,
    /// and until when it may.
    inherited_until: Timestamp,
    /// Plans that were given another name.
    renamed: u64,
    /// How often a scheduler claimed an epoch below one that it, or whoever is obeyed, had claimed.
    lower_epochs: u64,
    /// An operator has drained us, by a primary's word.
    pub(super) is_drained: bool,
}

impl Default for Obedience {
    fn default() -> Self {
        Self {
            backend: None,
            first: 0,
            claim: None,
            primary: None,
            orphan_until: Timestamp::NEVER,
            inherited: BTreeSet::new(),
            inherited_until: Timestamp::NEVER,
            renamed: 0,
            lower_epochs: 0,
            is_drained: false,
        }
    }
}

impl Obedience {
    /// What was claimed by whom we obey, or obeyed last, if there was anybody.
    pub(super) fn claim(&self) -> Option<Claim> {
        self.claim
    }

    /// Whether this is less than what is obeyed, or was last: it is never believed. Epochs of eras cannot be compared.
    fn is_below(&self, claim: Claim) -> bool {
        self.claim.is_some_and(|obeyed| obeyed.era == claim.era && claim.epoch < obeyed.epoch)
    }
}

impl Core {
    /// What an earlier life was told by an operator: whether this backend is drained.
    pub fn handle_drained(&mut self, is_drained: bool) {
        self.obedience.is_drained = is_drained;
    }

    /// Whether an operator has drained it.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.obedience.is_drained
    }

    /// The session with the scheduler that we obey, unless that is lost.
    pub(super) fn primary(&self) -> Option<usize> {
        self.obedience.primary
    }

    /// How often a scheduler claimed an epoch below one that it, or whoever is obeyed, had claimed; it is not believed.
    #[must_use]
    pub fn lower_epochs(&self) -> u64 {
        self.obedience.lower_epochs
    }

    /// A scheduler claims an epoch. A lower one is never believed: it changes nothing.
    pub(super) fn on_takeover(&mut self, now: Timestamp, index: usize, epoch: Epoch) {
        let claimed = self.sessions[index].claim;
        if epoch < claimed.epoch || self.obedience.is_below(Claim { epoch, ..claimed }) {
            tracing::debug!(scheduler = %self.sessions[index].address, %epoch, "claims less than was claimed before");
            self.obedience.lower_epochs += 1;
            return;
        }
        self.sessions[index].claim.epoch = epoch;
        self.on_claim(now, index);
    }

    /// A scheduler has taken us in.
    pub(super) fn on_welcome(&mut self, now: Timestamp, index: usize, welcome: &[u8]) {
        let session = &mut self.sessions[index];
        let Welcomed { backend, pass, model_threads } = match session.handle_welcome(now, welcome) {
            Ok(welcomed) => welcomed,
            Err(reason) => return self.lose(now, index, reason),
        };
        if self.obedience.backend.is_none() {
            self.obedience.orphan_until = now + ORPHAN_MAX;
        }
        let known_as = *self.obedience.backend.get_or_insert(backend);
        if known_as != backend {
            let reason = format!("the scheduler names us backend {}, expected {}", backend.0, known_as.0);
            return self.lose(now, index, reason);
        }
        // As of a former primary that has heard of no other one.
        if session.claim.is_primary() && self.obedience.is_below(session.claim) {
            self.obedience.lower_epochs += 1;
        }
        let (scheduler, threads) = (session.address.clone(), model_threads.len().max(1));
        tracing::info!(backend = backend.0, %scheduler, model_threads = threads, "joined");
        for (frontend, link) in self.links.up().collect::<Vec<_>>() {
            self.tell(index, &BackendToControl::Linked { frontend, link });
        }
        if self.obedience.is_drained {
            self.tell(index, &BackendToControl::Drained { is_drained: true });
        }
        self.offer(index);
        for Refused { name, version, reason } in self.not_loaded.clone() {
            self.tell(index, &BackendToControl::NotLoaded { name, version, reason });
        }
        for (id, to) in model_threads {
            let hello = MemberHello { member: Member::Backend(backend), pass };
            let hello = encode(&SchedulerHello::Member(hello));
            self.outputs.push_back(Output::Connect { peer: Peer::ModelThread(index, id), to: to.into(), hello });
        }
        self.on_claim(now, index);
    }

    /// A session has come as far as to be joined, or its scheduler claims to be the primary.
    pub(super) fn on_claim(&mut self, now: Timestamp, index: usize) {
        let session = &self.sessions[index];
        let (claim, scheduler) = (session.claim, session.address.clone());
        if !session.is_joined() {
            return;
        }
        let is_lost = self.obedience.primary.is_none();
        match self.obedience.claim {
            None if claim.is_primary() => self.obey(now, index),
            None => self.sessions[index].handle_kept(),
            Some(obeyed) if obeyed.era != claim.era && claim.is_primary() && is_lost => {
                self.end(format!("scheduler {scheduler} is the primary of another era"));
            }
            Some(obeyed) if obeyed.era != claim.era => self.lose(now, index, "it is of another era".into()),
            // What it has sent before it claimed another epoch cannot be told from what it sends after.
            Some(obeyed) if obeyed.epoch < claim.epoch && self.obedience.primary == Some(index) => {
                self.lose(now, index, format!("it claims epoch {} after {}", claim.epoch, obeyed.epoch));
            }
            Some(obeyed) if obeyed.epoch < claim.epoch => self.obey(now, index),
            Some(obeyed) if obeyed.epoch == claim.epoch && is_lost => {
                self.end(format!("scheduler {scheduler} was lost, and is the primary of the same epoch"));
            }
            Some(_) => self.sessions[index].handle_kept(),
        }
    }

    /// The scheduler of this session is the primary: nobody else's word counts from now on.
    fn obey(&mut self, now: Timestamp, index: usize) {
        self.sessions[index].handle_kept();
        let claim = self.sessions[index].claim;
        let former = self.obedience.primary.replace(index);
        let is_first = self.obedience.claim.replace(claim).is_none();
        self.obedience.orphan_until = Timestamp::NEVER;
        let scheduler = self.sessions[index].address.clone();
        tracing::info!(%scheduler, epoch = %claim.epoch, is_first, "obeying the primary");
        for other in (0..self.sessions.len()).filter(|&other| other != index) {
            let session = &self.sessions[other];
            if former == Some(other) || (session.is_welcomed() && session.claim.era != claim.era) {
                let left = self.sessions[other].handle_failed(now);
                self.hang_up(other, left);
            }
        }
        self.hosting.forget_loads();
        self.memories.forget_orders();
        self.tell_plans(index);
        self.report(&BackendToControl::Obeys { epoch: claim.epoch });
        for gpu in self.watchdog.unusable() {
            let usable = BackendToControl::Usable { gpu_index: gpu as u32, is_usable: false };
            self.tell(index, &usable);
        }
        if self.leaving.is_some() {
            self.leaving = Some(self.sessions[index].plan_senders());
            self.report(&BackendToControl::Leaving);
        }
        self.on_clock(now, index);
        self.inherit_frontends(now, index);
        for order in self.sessions[index].take_early() {
            // One of them may lose the session.
            if self.primary() == Some(index) && self.ended.is_none() {
                self.on_order(now, index, order);
            }
        }
    }

    /// Names all plans anew that have not ended, and tells the primary of them.
    fn tell_plans(&mut self, index: usize) {
        let renamed = &mut self.obedience.renamed;
        let mut name = || {
            *renamed += 1;
            PlanId::new(ModelThreadId::INHERITED, *renamed)
        };
        let Hosting { workers, models, .. } = &mut self.hosting;
        let mut unfinished = Vec::new();
        for (gpu_index, worker) in (0..).zip(workers) {
            for Unfinished { plan, model, exec_at, tasks } in worker.rename_plans(&mut name) {
                let frees_at = exec_at.map(|at| at + models[&model].profile.latency(tasks.len().max(1)));
                let model = self.sessions[index].name_of(model);
                unfinished.push(BackendToControl::Unfinished { plan, gpu_index, model, frees_at, tasks });
            }
        }
        unfinished.iter().for_each(|plan| self.tell(index, plan));
    }

    /// Links that are up stay up, whoever is obeyed, for as long as the new primary may still announce their frontends.
    fn inherit_frontends(&mut self, now: Timestamp, index: usize) {
        let announced = self.sessions[index].frontends.clone();
        let known: BTreeSet<FrontendId> = self.links.frontends().collect();
        self.obedience.inherited = known.iter().filter(|known| !announced.contains_key(known)).copied().collect();
        let is_any = !self.obedience.inherited.is_empty();
        self.obedience.inherited_until = if is_any { now + JOIN_GRACE } else { Timestamp::NEVER };
        for (frontend, target) in announced {
            if self.links.target(frontend) != Some(target) {
                self.join_frontend(now, index, frontend, target);
            }
        }
    }

    /// A scheduler has announced a frontend.
    pub(super) fn on_frontend(&mut self, now: Timestamp, index: usize, frontend: FrontendId, target: Target) {
        if let Err(reason) = self.sessions[index].handle_frontend(frontend, target) {
            return self.lose(now, index, reason.to_string());
        }
        if self.primary() == Some(index) {
            let is_inherited = self.obedience.inherited.remove(&frontend);
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
        for frontend in std::mem::take(&mut self.obedience.inherited) {
            self.leave_frontend(now, frontend);
        }
    }

    /// An operator has drained us, or resumed us: all schedulers are told.
    pub(super) fn on_drain(&mut self, is_drained: bool) {
        tracing::info!(is_drained, "whether this backend is drained has changed");
        self.obedience.is_drained = is_drained;
        self.tell_all(&BackendToControl::Drained { is_drained });
    }

    /// The primary does not serve a frontend any more.
    pub(super) fn leave_frontend(&mut self, now: Timestamp, frontend: FrontendId) {
        self.obedience.inherited.remove(&frontend);
        self.links.handle_left(frontend);
        self.told.transfers.forget(frontend);
        self.cut_off(now, frontend);
    }

    /// A session has failed. With several schedulers it is tried again, and another one may become the primary; with
    /// one, this life is over.
    pub(super) fn lose(&mut self, now: Timestamp, index: usize, reason: String) {
        if self.sessions.len() == 1 {
            return self.end(reason);
        }
        let scheduler = self.sessions[index].address.clone();
        let left = self.sessions[index].handle_failed(now);
        self.hang_up(index, left);
        if self.obedience.backend.is_none() {
            self.obedience.first = (index + 1) % self.sessions.len();
        }
        if self.obedience.primary.take_if(|primary| *primary == index).is_some() {
            tracing::warn!(%scheduler, reason, "the primary is lost; waiting for another one");
            self.obedience.orphan_until = now + ORPHAN_MAX;
            let questions = self.sessions.iter_mut().filter_map(|session| session.question.as_mut());
            questions.for_each(|answer_at| *answer_at = now);
        } else {
            tracing::warn!(%scheduler, reason, "no session with a scheduler; trying again");
        }
    }

    /// What is hosted has changed: all schedulers but the primary are told by another hello.
    pub(super) fn rejoin_standbys(&mut self, now: Timestamp) {
        for index in 0..self.sessions.len() {
            if self.primary() != Some(index) && self.sessions[index].connects_at() == Timestamp::NEVER {
                let left = self.sessions[index].leave(now);
                self.hang_up(index, left);
            }
        }
    }

    /// Closes connections of a session, those too that were about to be opened.
    fn hang_up(&mut self, index: usize, connections: Vec<ConnectionId>) {
        self.outputs.retain(|output| {
            let Output::Connect { peer: Peer::Scheduler(of) | Peer::ModelThread(of, _), .. } = output else {
                return true;
            };
            *of != index
        });
        self.outputs.extend(connections.into_iter().map(|connection| Output::Disconnect { connection }));
    }

    /// A standby asks whether we miss the primary.
    pub(super) fn on_question(&mut self, now: Timestamp, index: usize) {
        let answer_at = match self.primary() {
            None => now,
            Some(primary) if primary == index => return self.tell(index, &MISSES_NOT),
            Some(_) => now + MISSED_AFTER,
        };
        if self.sessions[index].question.is_some() {
            return;
        }
        self.sessions[index].question = Some(answer_at);
        self.report(&BackendToControl::ClockRequest { sent_at: now });
    }

    /// The primary has said something.
    pub(super) fn on_heard(&mut self) {
        for index in 0..self.sessions.len() {
            if self.sessions[index].question.take().is_some() {
                self.tell(index, &MISSES_NOT);
            }
        }
    }

    /// Runs every timer that is due.
    pub(super) fn on_time(&mut self, now: Timestamp) {
        for index in 0..self.sessions.len() {
            if self.sessions[index].question.take_if(|answer_at| *answer_at <= now).is_some() {
                Wait::Missed.note_reached();
                self.tell(index, &BackendToControl::Misses { misses: true });
            }
            if let Some(sent_at) = self.sessions[index].clock.poll_request(now) {
                self.tell(index, &BackendToControl::ClockRequest { sent_at });
            }
        }
        if self.obedience.inherited_until <= now {
            self.obedience.inherited_until = Timestamp::NEVER;
            if !self.obedience.inherited.is_empty() {
                Wait::Announced.note_reached();
            }
            self.leave_inherited(now);
        }
        if self.obedience.orphan_until <= now {
            Wait::Orphan.note_reached();
            self.end(format!("no scheduler has become the primary for {ORPHAN_MAX}"));
        }
    }

    /// When [`Self::on_time`] or [`Self::connect_due`] has something to do.
    pub(super) fn primary_timeout(&self) -> Timestamp {
        let sessions = self.sessions.iter().enumerate().map(|(index, session)| {
            let connects_at = if self.connects_to(index) { session.connects_at() } else { Timestamp::NEVER };
            let answer_at = session.question.unwrap_or(Timestamp::NEVER);
            connects_at.min(answer_at).min(session.clock.poll_timeout())
        });
        let own = self.obedience.inherited_until.min(self.obedience.orphan_until);
        sessions.fold(own, Timestamp::min)
    }

    /// Until we have a name, one scheduler at a time is asked for it.
    fn connects_to(&self, index: usize) -> bool {
        self.obedience.backend.is_some() || self.obedience.first == index
    }

    /// Connects to all schedulers whose time it is.
    pub(super) fn connect_due(&mut self, now: Timestamp) {
        for index in 0..self.sessions.len() {
            if self.sessions[index].connects_at() <= now && self.connects_to(index) {
                self.connect(index);
            }
        }
    }

    /// Connects to a scheduler, which is told what is hosted now.
    pub(super) fn connect(&mut self, index: usize) {
        let mut offers = Offers::new(self.hosting.offers());
        let (models, more) = offers.first_page();
        let standing = Standing { token: self.config.token, obeys: self.obedience.claim.unwrap_or_default() };
        let gpus = self.config.staging.gpus() as u32;
        let memory_pages = self.memories.pages();
        let name = self.config.name.clone();
        let known_as = self.obedience.backend;
        let hello = BackendHello { name, gpus, memory_pages, models, more, known_as, standing };
        let hello = encode(&SchedulerHello::Backend(hello));
        let session = &mut self.sessions[index];
        session.handle_dialled(offers);
        self.outputs.push_back(Output::Connect { peer: Peer::Scheduler(index), to: session.address.clone(), hello });
    }

    /// Tells a scheduler as much of what is hosted as it may be told now.
    fn offer(&mut self, index: usize) {
        while let Some(offers) = self.sessions[index].poll_offers() {
            self.tell(index, &offers);
        }
    }

    /// A scheduler names models that it was told of since it took us in.
    pub(super) fn on_offered(&mut self, now: Timestamp, index: usize, models: Vec<ModelId>) {
        if let Err(reason) = self.sessions[index].handle_offered(models) {
            return self.lose(now, index, reason);
        }
        self.offer(index);
        self.on_claim(now, index);
    }
}

const MISSES_NOT: BackendToControl = BackendToControl::Misses { misses: false };
