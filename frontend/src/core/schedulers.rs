//! The schedulers of a frontend: which of them it has a session with, and which one it obeys.
//!
//! A life of the frontend begins with one session, whose welcome says who the frontend is; then it presents itself to
//! all others under the same id. Each is asked for its clock, and what it says of models is kept. Whom to obey is
//! `allegiance`'s to say. To obey another one is to cut off the former first, and then to tell the new one of all links
//! and of all tasks that have not ended: tasks, their slots and the links stay as they are. A frontend that has lost
//! its primary goes on admitting by the former one's word, and tells the next one. A life ends with all sessions and
//! links.

use proto::{Epoch, Span, Standing};

use super::*;
use crate::{allegiance::Verdict, session::Identity};

/// How primaries came and went since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Takeovers {
    /// The epoch that is obeyed, or was obeyed last, in whatever life; [`Epoch::NONE`] before there was one.
    pub epoch: Epoch,
    /// How often one was obeyed that was not the first of its life.
    pub count: u64,
    /// How long there was no primary before the last of these, from the loss of the former one; zero if that one was
    /// there until it was cut off.
    pub without: Span,
    /// Lives with a primary that have ended, and with them all requests of theirs.
    pub lives: u64,
    /// How often a scheduler claimed an epoch below one that it, or whoever is obeyed, had claimed; it is not believed.
    pub lower_epochs: u64,
    /// When the primary was lost, as long as there is no other one.
    lost_at: Option<Timestamp>,
}

impl Takeovers {
    fn handle_obeyed(&mut self, now: Timestamp, epoch: Epoch, is_first: bool) {
        let lost_at = self.lost_at.take();
        if !is_first {
            self.count += 1;
            self.without = lost_at.map_or(Span::ZERO, |lost_at| now - lost_at);
        }
        self.epoch = epoch;
    }

    fn handle_lost(&mut self, now: Timestamp) {
        self.lost_at = Some(now);
    }

    fn handle_life_ended(&mut self) {
        self.lives += 1;
        self.lost_at = None;
    }
}

impl Core {
    /// Who we are, if requests can be taken in that name: there is a primary, or there was one and another may come.
    pub(super) fn admits_as(&self) -> Option<FrontendId> {
        let leaves = self.allegiance.primary().is_some_and(|primary| self.words[primary].leaves);
        self.frontend.filter(|_| self.allegiance.has_obeyed() && !leaves)
    }

    /// The primary's clock; as long as it is not known, the former one's, which is the same. The first that is known
    /// counts.
    pub(super) fn clocks(&self) -> impl Iterator<Item = &ClockOffset> {
        let clock = self.allegiance.primary().map(|primary| self.sessions[primary].clock());
        clock.into_iter().chain([&self.former_clock])
    }

    /// An instant of our clock on the schedulers'; `None` before that is known.
    pub(super) fn to_scheduler(&self, local: Timestamp) -> Option<Timestamp> {
        self.clocks().find_map(|clock| clock.to_scheduler(local))
    }

    /// Whether the first primary of this life may be on its way.
    pub(super) fn awaits_primary(&self) -> bool {
        let may_come = |session: &Session| session.is_connecting() || session.is_welcomed();
        !self.allegiance.has_obeyed() && self.sessions.iter().any(may_come)
    }

    /// Gives the primary what is for it. As long as there is none, it is for nobody: the next one is told of all tasks.
    pub(super) fn post_messages(&mut self) {
        while let Some((model_thread, message)) = self.tasks.poll_message() {
            if let Some(primary) = self.allegiance.primary() {
                self.sessions[primary].post_to_thread(model_thread, &message);
            }
        }
    }

    /// Asks schedulers for their clocks when it is time, and tells the primary what answers took of late.
    pub(super) fn request_clocks(&mut self, now: Timestamp) {
        let primary = self.allegiance.primary();
        for (index, session) in self.sessions.iter_mut().enumerate() {
            if let Some(sent_at) = session.poll_clock_request(now) {
                let resp = if primary == Some(index) { self.tasks.take_way_back() } else { Span::ZERO };
                session.post(&FrontendToControl::ClockRequest { sent_at, resp });
            }
        }
    }

    /// Runs the timers of sessions and of what depends on them.
    pub(super) fn tend_schedulers(&mut self, now: Timestamp) {
        for session in self.questions.take_missed(now) {
            self.sessions[session].post(&FrontendToControl::Misses { misses: true });
        }
        if let Verdict::StartOver(reason) = self.allegiance.handle_timeout(now) {
            self.start_over(reason);
        }
        let standing = Standing { token: self.token(), obeys: self.allegiance.obeys() };
        let identity = Identity { frontend: self.frontend, standing };
        for index in 0..self.sessions.len() {
            if self.may_connect(index) {
                self.sessions[index].handle_timeout(now, identity);
            }
        }
    }

    /// What schedulers tell this life by, and make passes for links of.
    pub(super) fn token(&self) -> u64 {
        token(self.config.token_seed, self.lives)
    }

    /// When [`Self::tend_schedulers`] and [`Self::request_clocks`] must be called.
    pub(super) fn poll_schedulers_timeout(&self) -> Option<Timestamp> {
        let sessions = self.sessions.iter().enumerate();
        let due = sessions.filter(|(index, session)| !session.is_waiting() || self.may_connect(*index));
        let due = due.filter_map(|(_, session)| session.poll_timeout());
        due.chain(self.allegiance.poll_timeout()).chain(self.questions.poll_timeout()).min()
    }

    /// Who has no name asks for one, and only one scheduler at a time: two would give two.
    fn may_connect(&self, index: usize) -> bool {
        self.frontend.is_some() || self.asked == index
    }

    pub(super) fn on_connected(&mut self, now: Timestamp, connection: ConnectionId, welcome: &[u8]) {
        let Some(index) = self.sessions.iter().position(|session| session.owns(connection)) else { return };
        match self.sessions[index].handle_connected(now, connection, welcome, self.frontend) {
            Ok(None) => {}
            Ok(Some(frontend)) => {
                if self.frontend.is_none() {
                    self.frontend = Some(frontend);
                    self.allegiance.handle_named(now);
                }
                self.count_if_lower(index);
                self.request_clocks(now);
                if self.is_drained {
                    self.sessions[index].post(&FrontendToControl::Drained { is_drained: true });
                }
            }
            Err(reason) => return self.leave(now, index, &reason),
        }
        self.judge(now, index);
    }

    /// A welcome may claim less than what is obeyed, as of a former primary that has heard of no other one.
    fn count_if_lower(&mut self, index: usize) {
        let claimed = self.sessions[index].claimed().filter(Claim::is_primary);
        if claimed.is_some_and(|claimed| self.allegiance.is_below(claimed)) {
            self.takeovers.lower_epochs += 1;
        }
    }

    /// A lower epoch is never believed: it changes nothing.
    pub(super) fn on_takeover(&mut self, now: Timestamp, index: usize, epoch: Epoch) {
        let Some(claimed) = self.sessions[index].claimed() else { return };
        if epoch < claimed.epoch || self.allegiance.is_below(Claim { epoch, ..claimed }) {
            tracing::debug!("scheduler {index} claims epoch {epoch} after {}", claimed.epoch);
            self.takeovers.lower_epochs += 1;
            return;
        }
        self.sessions[index].handle_takeover(epoch);
        self.judge(now, index);
    }

    /// A scheduler that has joined may claim to be the primary.
    fn judge(&mut self, now: Timestamp, index: usize) {
        let Some(claim) = self.sessions[index].claim() else { return };
        let is_first = !self.allegiance.has_obeyed();
        match self.allegiance.handle_claim(index, claim) {
            Verdict::Nothing => {}
            Verdict::Leave(reason) => self.leave(now, index, reason),
            Verdict::StartOver(reason) => self.start_over(reason),
            Verdict::Obey { former } => {
                if let Some(former) = former {
                    self.cut_off(now, former);
                }
                self.takeovers.handle_obeyed(now, claim.epoch, is_first);
                self.adopt_word(index, is_first);
                self.obey(now, index);
            }
        }
    }

    /// The primary is no primary any more, and nothing counts that still comes from it.
    fn cut_off(&mut self, now: Timestamp, former: usize) {
        tracing::warn!("scheduler {former} is cut off: another one takes over");
        self.keep_clock(former);
        self.end_session(former);
        self.sessions[former].handle_left(now);
    }

    /// A scheduler is the primary from now on.
    fn obey(&mut self, now: Timestamp, index: usize) {
        let Claim { epoch, .. } = self.allegiance.obeys();
        tracing::info!("scheduler {index} is obeyed in epoch {epoch}: {} tasks are open", self.tasks.outstanding());
        self.changes.abandon();
        self.fences.clear();
        self.fenced.clear();
        for &(backend, link) in self.links.values() {
            self.sessions[index].post(&FrontendToControl::Link { backend, link });
        }
        self.sessions[index].post(&FrontendToControl::Obeys { epoch });
        self.tasks.handle_obeyed(|model| self.models.offer_of(model));
        self.post_messages();
        for thread in self.sessions[index].threads() {
            self.sessions[index].post_to_thread(thread, &FrontendToModelThread::AllOpen);
        }
        self.answer_questions(false);
        for (connection, hello) in std::mem::take(&mut self.early) {
            self.on_hello(connection, hello);
        }
        // Standbys of other eras.
        for other in (0..self.sessions.len()).filter(|other| *other != index) {
            self.judge(now, other);
        }
    }

    /// What a scheduler has said of models holds from now on. A model that was loaded may have changed since we read
    /// it: of the first primary of a life we cannot know, and later ones were heard all the time.
    fn adopt_word(&mut self, index: usize, is_first: bool) {
        let spoken = std::mem::take(&mut self.words[index].spoken);
        let loaded = if is_first { spoken.loaded_ever() } else { spoken.loaded_since_first() };
        self.models.handle_obeyed(spoken);
        loaded.iter().for_each(|name| self.changes.handle_loaded(name));
    }

    /// An operator has drained us, or resumed us: all schedulers are told.
    pub(super) fn on_drain(&mut self, is_drained: bool) {
        tracing::info!("this frontend is {}", if is_drained { "drained" } else { "resumed" });
        self.is_drained = is_drained;
        for session in self.sessions.iter_mut().filter(|session| session.is_welcomed()) {
            session.post(&FrontendToControl::Drained { is_drained });
        }
    }

    /// A standby asks whether we miss the primary, too.
    pub(super) fn on_asked(&mut self, now: Timestamp, index: usize) {
        match self.allegiance.primary() {
            // It must know.
            Some(primary) if primary == index => {}
            Some(primary) => {
                if self.questions.handle_asked(now, index) {
                    let resp = Span::ZERO;
                    self.sessions[primary].post(&FrontendToControl::ClockRequest { sent_at: now, resp });
                }
            }
            None => self.sessions[index].post(&FrontendToControl::Misses { misses: true }),
        }
    }

    /// Something came from a scheduler.
    pub(super) fn handle_heard(&mut self, index: usize) {
        if self.allegiance.primary() == Some(index) {
            self.answer_questions(false);
        }
    }

    fn answer_questions(&mut self, misses: bool) {
        for session in self.questions.take_all() {
            self.sessions[session].post(&FrontendToControl::Misses { misses });
        }
    }

    /// Ends a session, and this life with it if nobody else could take its place.
    pub(super) fn leave(&mut self, now: Timestamp, index: usize, reason: &str) {
        let is_primary = self.allegiance.primary() == Some(index);
        if is_primary {
            tracing::warn!("the primary, scheduler {index}, is lost: {reason}");
            self.takeovers.handle_lost(now);
            self.keep_clock(index);
        } else {
            tracing::warn!("scheduler {index} is lost: {reason}");
        }
        if self.frontend.is_none() {
            self.asked = (index + 1) % self.sessions.len();
        }
        self.end_session(index);
        if let Verdict::StartOver(reason) = self.allegiance.handle_left(now, index) {
            return self.start_over(reason);
        }
        self.sessions[index].handle_left(now);
        if is_primary {
            self.answer_questions(true);
        }
        self.refuse_early();
    }

    /// What is known of a primary's clock outlives its session.
    fn keep_clock(&mut self, primary: usize) {
        let clock = self.sessions[primary].clock();
        if clock.error_bound().is_some() {
            self.former_clock = clock.clone();
        }
    }

    /// Nothing is sent before its connections are ended.
    fn end_session(&mut self, index: usize) {
        self.sessions[index].leave();
        let ended = std::iter::from_fn(|| self.sessions[index].poll_output());
        self.outputs.extend(ended.map(Output::from));
        self.words[index] = Word::default();
        self.questions.handle_left(index);
    }

    /// Ends this life: all sessions, and everything that depends on them.
    pub(super) fn start_over(&mut self, reason: &str) {
        if self.allegiance.has_obeyed() {
            tracing::warn!("this frontend starts over: {reason}");
            self.takeovers.handle_life_ended();
        }
        (0..self.sessions.len()).for_each(|index| self.end_session(index));
        self.outputs.extend(self.links.keys().map(|&connection| Output::Disconnect { connection }));
        self.allegiance.start_over();
        self.refuse_early();
        self.tasks.abandon(&InferError::SchedulerLost);
        self.models.clear_offers();
        self.changes.abandon();
        self.fences.clear();
        self.fenced.clear();
        self.former_clock = ClockOffset::default();
        self.is_ending = true;
        if self.frontend.take().is_some() {
            // Another one than gave us a name that led nowhere.
            self.asked = (self.asked + 1) % self.sessions.len();
        }
    }

    /// All links are down: what the former life left is taken away, and sessions wait to connect again.
    pub(super) fn begin_life(&mut self, now: Timestamp) {
        self.tasks.release_abandoned();
        self.is_ending = false;
        self.lives += 1;
        self.sessions.iter_mut().for_each(|session| session.handle_left(now));
    }

    fn refuse_early(&mut self) {
        if !self.awaits_primary() {
            for (connection, _) in std::mem::take(&mut self.early) {
                self.refuse(connection, NO_SCHEDULER);
            }
        }
    }
}

/// The token of a life. Lives of one process follow from its seed, and no two have the same.
fn token(seed: u64, life: u64) -> u64 {
    // Steele, Lea and Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), figure 17, SplitMix64. It
    // permutes, and its increment is odd.
    let mut mixed = seed.wrapping_add(life.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
