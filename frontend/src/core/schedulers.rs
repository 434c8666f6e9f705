//! The schedulers of a frontend: what it does when another one is obeyed, or none.
//!
//! Whom to have sessions with and whom to obey is `member`'s to say. To obey another scheduler is to have cut off the
//! former first, and then to tell the new one of all links and of all tasks that have not ended: tasks, their slots and
//! the links stay as they are. A frontend that has lost its primary goes on admitting by the former one's word, and
//! tells the next one. A life ends with all sessions and links.

use member::{Reader, Verdict, Welcome};
use proto::{
    Epoch, ModelThreadId, Span, Standing,
    frontend_to_scheduler::FrontendHello,
    hello::{Member, SchedulerHello},
    scheduler_to_frontend::FrontendWelcome,
};

use super::*;

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
    /// Who we are in this life.
    pub(super) fn frontend(&self) -> Option<FrontendId> {
        let Some(Member::Frontend(frontend)) = self.membership.name() else { return None };
        Some(frontend)
    }

    /// Who we are, if requests can be taken in that name: there is a primary, or there was one and another may come.
    pub(super) fn admits_as(&self) -> Option<FrontendId> {
        let leaves = self.primary().is_some_and(|primary| self.membership[primary].word.leaves);
        self.frontend().filter(|_| self.membership.has_obeyed() && !leaves)
    }

    /// An instant of our clock on the schedulers'; `None` before that is known.
    pub(super) fn to_scheduler(&self, local: Timestamp) -> Option<Timestamp> {
        self.membership.clock().to_scheduler(local)
    }

    /// Posts to a scheduler itself.
    pub(super) fn post(&mut self, scheduler: usize, message: &FrontendToControl) {
        self.membership[scheduler].push(Reader::Scheduler, message).expect(FITS);
    }

    /// Posts to a ModelThread.
    pub(super) fn post_to_thread(&mut self, scheduler: usize, id: ModelThreadId, message: &FrontendToModelThread) {
        self.membership[scheduler].push(Reader::ModelThread(id), message).expect(FITS);
    }

    /// Gives the primary what is for it. As long as there is none, it is for nobody: the next one is told of all tasks.
    pub(super) fn post_messages(&mut self) {
        while let Some((model_thread, message)) = self.tasks.poll_message() {
            if let Some(primary) = self.primary() {
                self.post_to_thread(primary, model_thread, &message);
            }
        }
    }

    /// Asks schedulers for their clocks when it is time, and tells the primary what answers took of late.
    pub(super) fn request_clocks(&mut self, now: Timestamp) {
        while let Some((scheduler, sent_at)) = self.membership.poll_clock_request(now) {
            let is_primary = self.primary() == Some(scheduler);
            let resp = if is_primary { self.tasks.take_way_back() } else { Span::ZERO };
            self.post(scheduler, &FrontendToControl::ClockRequest { sent_at, resp });
        }
    }

    /// Runs the timers of sessions and of what depends on them.
    pub(super) fn tend_schedulers(&mut self, now: Timestamp) {
        if let Verdict::StartOver(reason) = self.membership.handle_timeout(now) {
            self.start_over(reason);
        }
        self.request_clocks(now);
    }

    /// What schedulers tell this life by, and make passes for links of.
    pub(super) fn token(&self) -> u64 {
        token(self.config.token_seed, self.lives)
    }

    /// Who we are, as each scheduler is told.
    pub(super) fn hello(&self) -> Vec<u8> {
        let CoreConfig { name, link_address, .. } = &self.config;
        let standing = Standing { token: self.token(), obeys: self.membership.obeys() };
        let (name, link_address, known_as) = (name.clone(), link_address.clone(), self.frontend());
        encode(&SchedulerHello::Frontend(FrontendHello { name, link_address, known_as, standing }))
    }

    /// Takes in that a connection to a scheduler is up.
    pub(super) fn on_connected(&mut self, now: Timestamp, connection: ConnectionId, welcome: &[u8]) {
        let Some((scheduler, reader)) = self.membership.handle_connected(connection) else { return };
        if reader == Reader::Scheduler
            && let Err(reason) = self.on_welcome(now, scheduler, welcome)
        {
            return self.leave(now, scheduler, &reason);
        }
        if self.membership[scheduler].has_joined() {
            tracing::info!("joined scheduler {scheduler}");
        }
        self.judge(now, scheduler);
    }

    fn on_welcome(&mut self, now: Timestamp, scheduler: usize, welcome: &[u8]) -> Result<(), String> {
        let FrontendWelcome { frontend, model_threads, claim } = wincode::deserialize(welcome)
            .map_err(|_| "its welcome does not decode; do both sides run the same version?")?;
        if frontend.0 >= FrontendId::COUNT_MAX {
            return Err(format!("its welcome names us {}, expected less than {}", frontend.0, FrontendId::COUNT_MAX));
        }
        let welcome = Welcome { member: Member::Frontend(frontend), model_threads, claim, knows_all: true };
        self.membership.handle_welcome(now, scheduler, welcome)?;
        tracing::info!("scheduler {scheduler} knows us as frontend {}", frontend.0);
        self.request_clocks(now);
        if self.is_drained {
            self.post(scheduler, &FrontendToControl::Drained { is_drained: true });
        }
        Ok(())
    }

    /// A scheduler claims another epoch.
    pub(super) fn on_takeover(&mut self, now: Timestamp, scheduler: usize, epoch: Epoch) {
        if self.membership.handle_takeover(scheduler, epoch) {
            self.judge(now, scheduler);
        }
    }

    /// A scheduler that has joined may claim to be the primary.
    fn judge(&mut self, now: Timestamp, scheduler: usize) {
        let is_first = !self.membership.has_obeyed();
        match self.membership.handle_claim(now, scheduler) {
            Verdict::Nothing => {}
            Verdict::Leave(reason) => self.leave(now, scheduler, reason),
            Verdict::StartOver(reason) => self.start_over(reason),
            Verdict::Obey { former } => {
                if let Some(former) = former {
                    tracing::warn!("scheduler {former} is cut off: another one takes over");
                }
                self.takeovers.handle_obeyed(now, self.membership.obeys().epoch, is_first);
                self.adopt_word(scheduler, is_first);
                self.obey(scheduler);
            }
        }
    }

    /// A scheduler is the primary from now on.
    fn obey(&mut self, scheduler: usize) {
        let Claim { epoch, .. } = self.membership.obeys();
        tracing::info!("scheduler {scheduler} is obeyed in epoch {epoch}: {} tasks are open", self.tasks.outstanding());
        self.changes.abandon();
        self.fences.clear();
        self.fenced.clear();
        for (backend, link) in self.links.values().copied().collect::<Vec<_>>() {
            self.post(scheduler, &FrontendToControl::Link { backend, link });
        }
        self.post(scheduler, &FrontendToControl::Obeys { epoch });
        self.tasks.handle_obeyed(|model| self.models.offer_of(model));
        self.post_messages();
        for thread in self.membership[scheduler].threads() {
            self.post_to_thread(scheduler, thread, &FrontendToModelThread::AllOpen);
        }
        for (connection, hello) in std::mem::take(&mut self.early) {
            self.on_hello(connection, hello);
        }
    }

    /// What a scheduler has said of models holds from now on. A model that was loaded may have changed since we read
    /// it: of the first primary of a life we cannot know, and later ones were heard all the time.
    fn adopt_word(&mut self, scheduler: usize, is_first: bool) {
        let spoken = std::mem::take(&mut self.membership[scheduler].word.spoken);
        let loaded = if is_first { spoken.loaded_ever() } else { spoken.loaded_since_first() };
        self.models.handle_obeyed(spoken);
        loaded.iter().for_each(|name| self.changes.handle_loaded(name));
    }

    /// An operator has drained us, or resumed us: all schedulers are told.
    pub(super) fn on_drain(&mut self, is_drained: bool) {
        tracing::info!("this frontend is {}", if is_drained { "drained" } else { "resumed" });
        self.is_drained = is_drained;
        for session in self.membership.iter_mut() {
            session.push(Reader::Scheduler, &FrontendToControl::Drained { is_drained }).expect(FITS);
        }
    }

    /// A standby asks whether we miss the primary, too.
    pub(super) fn on_asked(&mut self, now: Timestamp, scheduler: usize) {
        if self.membership.handle_question(now, scheduler)
            && let Some(primary) = self.primary()
        {
            self.post(primary, &FrontendToControl::ClockRequest { sent_at: now, resp: Span::ZERO });
        }
    }

    /// Standbys are told whether we miss the primary.
    pub(super) fn answer_questions(&mut self) {
        while let Some((scheduler, misses)) = self.membership.poll_answer() {
            self.post(scheduler, &FrontendToControl::Misses { misses });
        }
    }

    /// Ends a session, and this life with it if nobody else could take its place.
    pub(super) fn leave(&mut self, now: Timestamp, scheduler: usize, reason: &str) {
        if self.primary() == Some(scheduler) {
            tracing::warn!("the primary, scheduler {scheduler}, is lost: {reason}");
            self.takeovers.handle_lost(now);
        } else {
            tracing::warn!("scheduler {scheduler} is lost: {reason}");
        }
        if let Verdict::StartOver(reason) = self.membership.handle_lost(now, scheduler) {
            return self.start_over(reason);
        }
        self.refuse_early();
    }

    /// Ends this life: all sessions, and everything that depends on them.
    pub(super) fn start_over(&mut self, reason: &str) {
        if self.membership.has_obeyed() {
            tracing::warn!("this frontend starts over: {reason}");
            self.takeovers.handle_life_ended();
        }
        self.membership.start_over();
        self.outputs.extend(self.links.keys().map(|&connection| Output::Disconnect { connection }));
        self.refuse_early();
        self.tasks.abandon(&InferError::SchedulerLost);
        self.models.clear_offers();
        self.changes.abandon();
        self.fences.clear();
        self.fenced.clear();
        self.is_ending = true;
    }

    /// All links are down: what the former life left is taken away, and sessions wait to connect again.
    pub(super) fn begin_life(&mut self, now: Timestamp) {
        self.tasks.release_abandoned();
        self.is_ending = false;
        self.lives += 1;
        self.membership.begin_life(now);
    }

    fn refuse_early(&mut self) {
        if !self.membership.awaits_primary() {
            for (connection, _) in std::mem::take(&mut self.early) {
                self.refuse(connection, NO_SCHEDULER);
            }
        }
    }
}

/// What is posted is bounded so that it does.
const FITS: &str = "every message to a scheduler fits a frame";

/// The token of a life. Lives of one process follow from its seed, and no two have the same.
fn token(seed: u64, life: u64) -> u64 {
    // Steele, Lea and Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), figure 17, SplitMix64. It
    // permutes, and its increment is odd.
    let mut mixed = seed.wrapping_add(life.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
