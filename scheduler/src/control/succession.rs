//! Who is the primary, where several schedulers live: whether this one follows another, suspects it, or takes over.
//!
//! Each scheduler connects to each other one. A standby follows the one that claims the highest epoch: it keeps that
//! one's clock, READs its heartbeat, and suspects it once that stands still or the connection ends. Then it asks the
//! members, and takes over if most of those who answer miss the primary, too. That damps false alarms; safety does not
//! depend on it, as members obey one epoch only. Of several standbys the first in the list goes first.
//!
//! Whoever starts and finds nobody founds an era, with a clock of its own. Instants are on this scheduler's clock,
//! which follows the primary's ([`SuccessionOutput::ShiftClock`]).

use std::collections::VecDeque;

use proto::{
    Claim, Epoch, Era, Span, Timestamp, Wait,
    backoff::Backoff,
    clock::{ClockReply, ClockSync},
    scheduler_to_scheduler::SchedulerToScheduler,
};

use crate::snapshot::SchedulerState;

/// Waits between two attempts to reach another scheduler: the first and the longest.
const RETRY: (Span, Span) = (Span::from_millis(50), Span::from_millis(1_000));
/// How long the first of the list looks for others before it founds an era; each further one waits as much longer.
const FOUNDING_WAIT: Span = Span::from_millis(1_000);
/// How long each live standby that comes before this one in the list is given to take over.
const PRECEDENCE: Span = Span::from_millis(10);
/// How long members are waited for that were asked whether they miss the primary.
const ANSWERS_WAIT: Span = Wait::Misses.bound();
/// How long a primary must be missed by a scheduler that no member has joined yet.
const NOBODY_WAIT: Span = Span::from_millis(1_000);
/// Members join one after another: so long after the first, most of those who come at once are there.
const JOINING: Span = Span::from_millis(20);
/// How long the primary may take to hand over what it has learned.
const HAND_OVER_WAIT: Span = Wait::Learned.bound();
/// The pause after members have said that they hear the primary.
const ASK_AGAIN: Span = Span::from_millis(100);
/// Exchanges that the offset of the clock is estimated from.
const EXCHANGES: u32 = 8;
/// The pause until the next such estimate.
const SYNC_INTERVAL: Span = Span::from_millis(1_000);
/// What is believed at most of how long it takes to READ a heartbeat.
const READ_TAKES_MAX: Span = Span::from_millis(100);
/// How wrong the first such estimate may be.
const CLOCK_ERROR_MAX: Span = Span::from_millis(1);
/// Two clocks differ by no more than one part in so many.
const DRIFT_MAX: i64 = 10_000;

/// This scheduler's place among others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuccessionConfig {
    /// Its position in the list.
    pub rank: u16,
    /// Length of the list; 1: it is alone, and the primary from the start.
    pub schedulers: u16,
    /// A primary whose heartbeat stands still for so long is suspected.
    pub suspect: Span,
}

impl SuccessionConfig {
    /// The only scheduler.
    pub const ALONE: Self = Self { rank: 0, schedulers: 1, suspect: Span::from_millis(10) };

    /// The time between two looks at the primary's heartbeat, and between two beats at most. Each wakes both ends up.
    #[must_use]
    pub fn beat_interval(&self) -> Span {
        self.suspect / 4
    }
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub(super) enum SuccessionOutput {
    /// Connect to another scheduler.
    Dial(u16),
    /// Send something over the connection that was made to it.
    Tell(u16, SchedulerToScheduler),
    /// READ its heartbeat.
    ReadHeartbeat(u16),
    /// Ask all members whether they miss the primary, then call [`Succession::handle_asked`].
    AskMembers,
    /// Set the clock this much forward, or back.
    ShiftClock(Span),
    /// The era's clock is known: tell other schedulers.
    Warm,
    /// Draw an era, as there is none, then call [`Succession::handle_era`].
    Found,
    /// This scheduler is the primary from now on: tell everybody.
    TakeOver,
    /// Another one is: let go of all members.
    StepDown,
    /// This scheduler cannot go on: what it has is of another era than all others'.
    End(String),
}

/// Another scheduler.
#[derive(Debug)]
struct Peer {
    state: PeerState,
    backoff: Backoff,
    claim: Claim,
    /// Its heartbeat, and since when it has not changed.
    beat: Option<(u64, Timestamp)>,
    /// When its heartbeat is READ next; `None` while that is under way.
    look_at: Option<Timestamp>,
    /// Since when that is under way, and how long the last one took that has found it beating.
    read_at: Option<Timestamp>,
    read_takes: Span,
    /// It was dialled in vain since our start.
    has_failed: bool,
}

impl Peer {
    /// When its heart has stood still for so long. What we READ is as old as the way is long.
    fn stands_at(&self, suspect: Span) -> Option<Timestamp> {
        self.beat.map(|(_, since)| since + suspect + self.read_takes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerState {
    Waiting { until: Timestamp },
    Dialling,
    Up,
}

/// The primary may be lost.
#[derive(Debug, Clone, Copy)]
struct Suspicion {
    /// When members are asked.
    ask_at: Timestamp,
    /// How many were asked, and by when they should have answered.
    asked: Option<(usize, Timestamp)>,
    answered: usize,
    missed: usize,
}

/// One scheduler among others.
#[derive(Debug)]
pub(super) struct Succession {
    config: SuccessionConfig,
    claim: Claim,
    /// The highest epoch of our era that we know of.
    heard: Epoch,
    /// By rank; our own is never looked at.
    peers: Vec<Peer>,
    /// Whom we follow.
    primary: Option<u16>,
    /// Our clock is the primary's.
    is_synced: bool,
    clock: ClockSync,
    exchanges: u32,
    /// How wrong our clock was at most when it was last set, and when that was.
    clock_error: Span,
    synced_at: Timestamp,
    started_at: Option<Timestamp>,
    suspicion: Option<Suspicion>,
    /// An operator wants this one to be the primary: it takes over then, if the primary has not let it before.
    wanted_at: Option<Timestamp>,
    outputs: VecDeque<SuccessionOutput>,
}

impl Succession {
    /// Knows nobody.
    pub(super) fn new(config: SuccessionConfig) -> Self {
        let peer = || Peer {
            state: PeerState::Waiting { until: Timestamp::PAST },
            backoff: Backoff::new(RETRY.0, RETRY.1),
            claim: Claim::default(),
            beat: None,
            look_at: Some(Timestamp::PAST),
            read_at: None,
            read_takes: Span::ZERO,
            has_failed: false,
        };
        let mut new = Self {
            config,
            claim: Claim::default(),
            heard: Epoch::NONE,
            peers: (0..config.schedulers).map(|_| peer()).collect(),
            primary: None,
            is_synced: false,
            clock: ClockSync::default(),
            exchanges: 0,
            clock_error: Span::ZERO,
            synced_at: Timestamp::PAST,
            started_at: None,
            suspicion: None,
            wanted_at: None,
            outputs: VecDeque::new(),
        };
        if config.schedulers == 1 {
            new.outputs.push_back(SuccessionOutput::Found);
        }
        new
    }

    /// What this scheduler takes itself for. An era is named only by those who keep its clock.
    pub(super) fn claim(&self) -> Claim {
        if self.is_warm() { self.claim } else { Claim::default() }
    }

    /// Whether members may join: our clock is their primary's, or our own if we are that.
    pub(super) fn is_warm(&self) -> bool {
        self.claim.is_primary() || self.is_synced
    }

    /// The epoch of the primary, as far as it is known.
    pub(super) fn epoch(&self) -> Epoch {
        if self.claim.is_primary() { self.claim.epoch } else { self.heard }
    }

    /// What operators are shown of all schedulers, by rank.
    pub(super) fn states(&self) -> Vec<SchedulerState> {
        let state = |(rank, peer): (u16, &Peer)| match () {
            () if rank == self.config.rank && self.claim.is_primary() => SchedulerState::Primary,
            () if rank == self.config.rank && self.is_synced => SchedulerState::Standby,
            () if rank == self.config.rank => SchedulerState::Starting,
            () if peer.state != PeerState::Up => SchedulerState::Unreachable,
            () if peer.claim.is_primary() => SchedulerState::Primary,
            () => SchedulerState::Standby,
        };
        (0..).zip(&self.peers).map(state).collect()
    }

    /// The next thing to do.
    pub(super) fn poll_output(&mut self) -> Option<SuccessionOutput> {
        self.outputs.pop_front()
    }

    /// An era was drawn.
    pub(super) fn handle_era(&mut self, now: Timestamp, era: Era) {
        self.claim.era = era;
        self.heard = Epoch::NONE;
        self.take_over(now);
    }

    /// An operator wants this one to be the primary. The primary is asked to hand over what it has learned, and does
    /// not decide whether it will.
    ///
    /// # Errors
    /// Why it cannot be.
    pub(super) fn handle_hand_over(&mut self, now: Timestamp) -> Result<(), String> {
        let primary = self.predecessor()?;
        self.wanted_at.get_or_insert(now + HAND_OVER_WAIT);
        self.outputs.push_back(SuccessionOutput::Tell(primary, SchedulerToScheduler::AskHandOver));
        Ok(())
    }

    /// Whom this one could take over from.
    fn predecessor(&self) -> Result<u16, String> {
        if self.claim.is_primary() {
            return Err(format!("this scheduler is the primary already, in epoch {}", self.claim.epoch));
        }
        let not_warm = || "this scheduler is not warm: it follows no primary yet; try again in a second".to_owned();
        self.primary.filter(|_| self.is_synced).ok_or_else(not_warm)
    }

    /// Whether this one follows that.
    pub(super) fn follows(&self, rank: u16) -> bool {
        self.primary == Some(rank)
    }

    /// Our connection to another one is up, or it has told over it what it takes itself for.
    pub(super) fn handle_peer(&mut self, now: Timestamp, rank: u16, claim: Claim) {
        let Some(peer) = self.peers.get_mut(usize::from(rank)) else { return };
        if peer.state != PeerState::Up {
            peer.state = PeerState::Up;
            peer.backoff.handle_success();
            (peer.beat, peer.look_at) = (None, Some(now));
            (peer.read_at, peer.read_takes) = (None, Span::ZERO);
        }
        peer.claim = claim;
        self.handle_claim(claim);
        if self.claim.is_primary() {
            return;
        }
        let is_strange = self.is_synced && claim.era != self.claim.era;
        if claim.is_primary() && is_strange {
            // Whoever follows a primary goes on with it; they are about to find out about each other.
            if self.primary.is_none() {
                let text = "another primary has a clock that this scheduler does not know; it must start anew";
                self.outputs.push_back(SuccessionOutput::End(text.to_owned()));
            }
        } else if claim.is_primary() && (claim.epoch >= self.heard || !self.is_synced) {
            self.follow(now, rank, claim);
        } else if self.primary == Some(rank) {
            self.lose_primary(now);
        }
    }

    fn follow(&mut self, now: Timestamp, rank: u16, claim: Claim) {
        if !self.is_synced {
            (self.claim.era, self.heard) = (claim.era, claim.epoch);
        }
        if self.primary.replace(rank) != Some(rank) {
            tracing::info!(scheduler = rank, epoch = %claim.epoch, "following the primary");
            (self.clock, self.exchanges) = (ClockSync::start(now), 0);
        }
        self.suspicion = None;
    }

    /// Somebody speaks of an epoch: another scheduler of its own, or a member of the one that it obeys.
    pub(super) fn handle_claim(&mut self, claim: Claim) {
        if claim.era == self.claim.era {
            self.heard = self.heard.max(claim.epoch);
            if self.claim.is_primary() && self.claim.epoch < claim.epoch {
                let (own, other) = (self.claim.epoch, claim.epoch);
                tracing::warn!(%own, %other, "another scheduler is the primary; stepping down");
                self.claim.epoch = Epoch::NONE;
                self.suspicion = None;
                self.outputs.push_back(SuccessionOutput::StepDown);
            }
        }
    }

    /// The same of another scheduler, whose era may be another.
    pub(super) fn handle_rival(&mut self, claim: Claim) {
        self.handle_claim(claim);
        let is_rival = claim.is_primary() && self.claim.is_primary() && claim.era != self.claim.era;
        if is_rival && self.claim.epoch < claim.epoch {
            let text =
                format!("another primary claims epoch {}, with a clock that this scheduler does not know", claim.epoch);
            self.outputs.push_back(SuccessionOutput::End(text));
        }
    }

    /// Our connection to another one ended, or did not come up.
    pub(super) fn handle_peer_lost(&mut self, now: Timestamp, rank: u16) {
        let Some(peer) = self.peers.get_mut(usize::from(rank)) else { return };
        peer.state = PeerState::Waiting { until: peer.backoff.handle_failure(now) };
        peer.claim.epoch = Epoch::NONE;
        peer.has_failed = true;
        if self.primary == Some(rank) {
            tracing::warn!(scheduler = rank, "the primary's connection ended");
            self.lose_primary(now);
        }
    }

    fn lose_primary(&mut self, now: Timestamp) {
        self.primary = None;
        if !self.is_synced {
            // Nothing is known of that era but its name.
            self.claim.era = Era::default();
            self.started_at = Some(now);
        }
    }

    /// Another one's answer over our connection to it.
    pub(super) fn handle_message(&mut self, now: Timestamp, rank: u16, message: SchedulerToScheduler) {
        match message {
            SchedulerToScheduler::Claim(claim) => {
                self.handle_rival(claim);
                self.handle_peer(now, rank, claim);
            }
            SchedulerToScheduler::Clock(reply) if self.primary == Some(rank) => self.on_clock(now, reply),
            SchedulerToScheduler::HandOver if self.primary == Some(rank) => match self.predecessor() {
                Ok(_) => self.take_over(now),
                Err(reason) => {
                    tracing::warn!(reason, "the primary wants this scheduler to take over, which it cannot");
                }
            },
            SchedulerToScheduler::Clock(_)
            | SchedulerToScheduler::ClockRequest { .. }
            | SchedulerToScheduler::AskHandOver
            | SchedulerToScheduler::LearnedNetwork(_)
            | SchedulerToScheduler::LearnedModel(_)
            | SchedulerToScheduler::HandOver => {}
        }
    }

    fn on_clock(&mut self, now: Timestamp, reply: ClockReply) {
        self.clock.handle_reply(now, reply);
        self.exchanges += 1;
        let estimate = self.clock.offset();
        let Some((theirs, bound)) = estimate.to_scheduler(now).zip(estimate.error_bound()) else { return };
        if self.exchanges < EXCHANGES {
            return;
        }
        self.exchanges = 0;
        self.clock = ClockSync::start(now + SYNC_INTERVAL);
        let offset = theirs - now;
        if self.is_synced {
            // What was known is worse by now than it was, but better than what slow exchanges tell.
            // Who was the primary itself has not followed anybody for long, and is no worse for it.
            let known = self.clock_error + (now - self.synced_at) / DRIFT_MAX;
            if bound <= known.min(CLOCK_ERROR_MAX) {
                (self.synced_at, self.clock_error) = (now, bound);
                self.outputs.push_back(SuccessionOutput::ShiftClock(offset));
            }
        } else if bound <= CLOCK_ERROR_MAX {
            (self.is_synced, self.synced_at, self.clock_error) = (true, theirs, bound);
            self.outputs.push_back(SuccessionOutput::ShiftClock(offset));
            self.outputs.push_back(SuccessionOutput::Warm);
            self.handle_shifted(offset);
            self.clock = ClockSync::start(theirs + SYNC_INTERVAL);
        } else {
            self.clock = ClockSync::start(now);
        }
    }

    /// The clock has leapt: what was to happen at an instant happens that much later, too.
    fn handle_shifted(&mut self, offset: Span) {
        for peer in &mut self.peers {
            if let PeerState::Waiting { until } = &mut peer.state
                && *until != Timestamp::PAST
            {
                *until += offset;
            }
            peer.look_at = peer.look_at.map(|at| if at == Timestamp::PAST { at } else { at + offset });
            peer.read_at = peer.read_at.map(|at| at + offset);
            peer.beat = peer.beat.map(|(beat, since)| (beat, since + offset));
        }
        self.started_at = self.started_at.map(|at| at + offset);
    }

    /// The primary's heartbeat has been READ, or could not be.
    pub(super) fn handle_heartbeat(&mut self, now: Timestamp, rank: u16, beat: Option<u64>) {
        let Some(peer) = self.peers.get_mut(usize::from(rank)) else { return };
        peer.look_at = Some(now + self.config.beat_interval());
        let took = peer.read_at.take().map_or(Span::ZERO, |at| now - at);
        let is_new = beat.is_some() && beat != peer.beat.map(|(last, _)| last);
        if let Some(beat) = beat.filter(|_| is_new) {
            (peer.beat, peer.read_takes) = (Some((beat, now)), took.min(READ_TAKES_MAX));
            if self.primary == Some(rank) && self.suspicion.take().is_some() {
                tracing::info!(scheduler = rank, "the primary is there again");
            }
        }
    }

    /// So many members have been asked.
    pub(super) fn handle_asked(&mut self, now: Timestamp, members: usize) {
        if let Some(suspicion) = &mut self.suspicion {
            let wait = if members == 0 { NOBODY_WAIT } else { ANSWERS_WAIT };
            suspicion.asked = Some((members, now + wait));
        }
        self.decide(now);
    }

    /// A member has joined, whom nobody has asked yet.
    pub(super) fn handle_joined(&mut self, now: Timestamp) {
        if let Some(suspicion) = self.suspicion.as_mut().filter(|suspicion| matches!(suspicion.asked, Some((0, _)))) {
            (suspicion.ask_at, suspicion.asked) = (now + JOINING, None);
        }
    }

    /// A member's answer.
    pub(super) fn handle_answer(&mut self, now: Timestamp, misses: bool) {
        if let Some(suspicion) = self.suspicion.as_mut().filter(|suspicion| suspicion.asked.is_some()) {
            suspicion.answered += 1;
            suspicion.missed += usize::from(misses);
            self.decide(now);
        }
    }

    fn decide(&mut self, now: Timestamp) {
        let Some(Suspicion { asked: Some((asked, until)), answered, missed, .. }) = self.suspicion else { return };
        // Who waits for more has nothing to gain once most have spoken.
        let is_over = until <= now;
        if is_over && answered < asked {
            Wait::Misses.note_reached();
        }
        if missed * 2 > asked || (is_over && (asked == 0 || missed * 2 > answered)) {
            self.take_over(now);
        } else if is_over || (answered >= asked && asked > 0) {
            tracing::info!(answered, missed, "members hear the primary");
            let ask_at = now + ASK_AGAIN;
            self.suspicion = Some(Suspicion { ask_at, asked: None, answered: 0, missed: 0 });
        }
    }

    fn take_over(&mut self, now: Timestamp) {
        let epoch = self.heard.next_of(self.config.rank);
        tracing::warn!(%epoch, "taking over as the primary");
        (self.claim.epoch, self.heard, self.primary, self.suspicion) = (epoch, epoch, None, None);
        self.wanted_at = None;
        self.started_at = Some(now);
        self.is_synced = true;
        self.outputs.push_back(SuccessionOutput::TakeOver);
        let claims: Vec<Claim> = self.peers.iter().map(|peer| peer.claim).collect();
        claims.into_iter().for_each(|claim| self.handle_rival(claim));
    }

    /// Runs every timer that is due.
    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        let started_at = *self.started_at.get_or_insert(now);
        for (rank, peer) in (0..).zip(&mut self.peers) {
            if rank != self.config.rank
                && let PeerState::Waiting { until } = peer.state
                && until <= now
            {
                peer.state = PeerState::Dialling;
                self.outputs.push_back(SuccessionOutput::Dial(rank));
            }
        }
        if self.claim.is_primary() || self.config.schedulers == 1 {
            return;
        }
        if self.wanted_at.is_some_and(|at| at <= now) {
            Wait::Learned.note_reached();
            tracing::warn!("the primary has not handed over in time; what it has learned is learned anew");
            return self.take_over(now);
        }
        match self.primary {
            Some(rank) => self.watch(now, rank),
            None if self.is_synced => self.suspect(now),
            None if self.founds_at(started_at) <= now => self.outputs.push_back(SuccessionOutput::Found),
            None => {}
        }
        if let Some(suspicion) = &self.suspicion {
            if suspicion.asked.is_some() {
                self.decide(now);
            } else if suspicion.ask_at <= now {
                self.outputs.push_back(SuccessionOutput::AskMembers);
            }
        }
    }

    /// When there is nobody to follow: all have been looked for, or it takes too long. Never while somebody keeps an
    /// era's clock, who will take over.
    fn founds_at(&self, started_at: Timestamp) -> Timestamp {
        let is_unknown =
            |(rank, peer): (u16, &Peer)| rank != self.config.rank && peer.state != PeerState::Up && !peer.has_failed;
        let looks = (0..).zip(&self.peers).any(is_unknown);
        if self.peers.iter().any(|peer| peer.state == PeerState::Up && peer.claim.era != Era::default()) {
            return Timestamp::NEVER;
        }
        started_at + FOUNDING_WAIT * (i64::from(self.config.rank) + i64::from(looks))
    }

    fn watch(&mut self, now: Timestamp, rank: u16) {
        if let Some(sent_at) = self.clock.poll_request(now) {
            self.outputs.push_back(SuccessionOutput::Tell(rank, SchedulerToScheduler::ClockRequest { sent_at }));
        }
        let peer = &mut self.peers[usize::from(rank)];
        if peer.look_at.is_some_and(|at| at <= now) {
            (peer.look_at, peer.read_at) = (None, Some(now));
            self.outputs.push_back(SuccessionOutput::ReadHeartbeat(rank));
        }
        peer.beat.get_or_insert((0, now));
        if peer.stands_at(self.config.suspect).is_some_and(|at| at <= now) && self.is_synced {
            self.suspect(now);
        }
    }

    /// Members are asked, unless another standby is to do it first.
    fn suspect(&mut self, now: Timestamp) {
        if self.suspicion.is_some() {
            return;
        }
        let before = &self.peers[..usize::from(self.config.rank)];
        let standbys = before.iter().filter(|peer| peer.state == PeerState::Up && !peer.claim.is_primary()).count();
        let ask_at = now + PRECEDENCE * standbys as i64;
        self.suspicion = Some(Suspicion { ask_at, asked: None, answered: 0, missed: 0 });
    }

    /// When [`Self::handle_timeout`] must be called.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let dials = (0..).zip(&self.peers).filter_map(|(rank, peer)| match peer.state {
            PeerState::Waiting { until } if rank != self.config.rank => Some(until),
            _ => None,
        });
        let dials = dials.min();
        if self.claim.is_primary() || self.config.schedulers == 1 {
            return dials;
        }
        let suspicion = self.suspicion.map(|suspicion| suspicion.asked.map_or(suspicion.ask_at, |(_, until)| until));
        let watching = self.primary.map(|rank| {
            let peer = &self.peers[usize::from(rank)];
            let stands = peer.stands_at(self.config.suspect).filter(|_| suspicion.is_none());
            [peer.look_at, stands].into_iter().flatten().fold(self.clock.poll_timeout(), Timestamp::min)
        });
        let founding = match (self.primary, self.started_at) {
            (None, Some(at)) if !self.is_synced => Some(self.founds_at(at)),
            (None, None) => Some(Timestamp::PAST),
            _ => None,
        };
        [dials, suspicion, watching, founding, self.wanted_at].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THEIRS: Claim = Claim { era: Era(9), epoch: Epoch { number: 3, scheduler: 0 } };

    fn at(ms: i64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    fn among(rank: u16, schedulers: u16) -> Succession {
        Succession::new(SuccessionConfig { rank, schedulers, suspect: Span::from_millis(10) })
    }

    fn outputs(succession: &mut Succession, now: Timestamp) -> Vec<SuccessionOutput> {
        succession.handle_timeout(now);
        std::iter::from_fn(|| succession.poll_output()).collect()
    }

    /// One exchange with the primary at `now`, whose clock is `ahead` and whose answer took `round_trip`.
    fn exchange(succession: &mut Succession, now: Timestamp, ahead: Span, round_trip: Span) {
        let their_now = now + round_trip / 2 + ahead;
        let reply = ClockReply { sent_at: now, received_at: their_now, replied_at: their_now };
        succession.handle_message(now + round_trip, 0, SchedulerToScheduler::Clock(reply));
    }

    /// The second of two, which follows the first and keeps its clock.
    fn following() -> Succession {
        let mut succession = among(1, 2);
        outputs(&mut succession, at(0));
        succession.handle_peer(at(1), 0, THEIRS);
        (0..EXCHANGES).for_each(|_| exchange(&mut succession, at(2), Span::ZERO, Span::from_micros(100)));
        assert!(succession.is_warm() && !succession.claim().is_primary());
        while succession.poll_output().is_some() {}
        succession
    }

    #[test]
    fn the_first_of_the_list_founds_an_era_once_it_finds_nobody_and_others_wait_for_it() {
        let mut first = among(0, 3);
        assert_eq!(outputs(&mut first, at(0)), [SuccessionOutput::Dial(1), SuccessionOutput::Dial(2)]);
        first.handle_peer_lost(at(1), 1);
        assert_eq!(outputs(&mut first, at(1)), [], "one has not been found missing yet");
        first.handle_peer_lost(at(2), 2);
        assert_eq!(outputs(&mut first, at(2)), [SuccessionOutput::Found]);
        let mut second = among(1, 3);
        outputs(&mut second, at(0));
        [0, 2].iter().for_each(|&rank| second.handle_peer_lost(at(1), rank));
        assert!(!outputs(&mut second, at(999)).contains(&SuccessionOutput::Found));
        assert!(outputs(&mut second, at(1_000)).contains(&SuccessionOutput::Found));
    }

    #[test]
    fn nobody_founds_an_era_while_somebody_keeps_one() {
        let mut first = among(0, 2);
        outputs(&mut first, at(0));
        first.handle_peer(at(1), 1, Claim { epoch: Epoch::NONE, ..THEIRS });
        assert!(!outputs(&mut first, at(5_000)).contains(&SuccessionOutput::Found));
        first.handle_peer(at(5_001), 1, Claim::default());
        assert!(outputs(&mut first, at(5_002)).contains(&SuccessionOutput::Found), "it keeps none any more");
    }

    #[test]
    fn a_heart_that_stands_still_is_suspected_and_the_members_decide() {
        for (misses, takes_over) in [([true, true, false], true), ([true, false, false], false)] {
            let mut standby = following();
            standby.handle_heartbeat(at(3), 0, Some(7));
            standby.handle_heartbeat(at(4), 0, Some(7));
            assert!(!outputs(&mut standby, at(12)).contains(&SuccessionOutput::AskMembers));
            assert!(outputs(&mut standby, at(13)).contains(&SuccessionOutput::AskMembers));
            standby.handle_asked(at(13), 3);
            misses.iter().for_each(|&misses| standby.handle_answer(at(14), misses));
            assert_eq!(outputs(&mut standby, at(14)).contains(&SuccessionOutput::TakeOver), takes_over);
            assert_eq!(standby.claim().epoch, if takes_over { THEIRS.epoch.next_of(1) } else { Epoch::NONE });
        }
    }

    #[test]
    fn a_heart_that_is_far_away_is_not_suspected_for_that() {
        let mut standby = following();
        let asks = |standby: &mut Succession, ms| outputs(standby, at(ms)).contains(&SuccessionOutput::AskMembers);
        let reads = |standby: &mut Succession, ms| {
            assert!(outputs(standby, at(ms)).contains(&SuccessionOutput::ReadHeartbeat(0)), "after {ms} ms");
        };
        reads(&mut standby, 3);
        for beat in 1..100 {
            let came = 23 * beat;
            standby.handle_heartbeat(at(came), 0, Some(beat as u64));
            reads(&mut standby, came + 3);
            assert!(!asks(&mut standby, came + 22), "heartbeat {beat}");
        }
        // The last one was READ in 20 ms, at 2277; the next one does not come.
        assert!(!asks(&mut standby, 2_306) && asks(&mut standby, 2_307));
        // What took longer than any network is not believed.
        standby.handle_heartbeat(at(9_000), 0, Some(100));
        reads(&mut standby, 9_003);
        assert!(!asks(&mut standby, 9_109) && asks(&mut standby, 9_110));
    }

    #[test]
    fn a_heart_that_beats_again_ends_the_suspicion() {
        let mut standby = following();
        standby.handle_heartbeat(at(3), 0, Some(7));
        outputs(&mut standby, at(13));
        standby.handle_asked(at(13), 3);
        standby.handle_heartbeat(at(14), 0, Some(8));
        (0..3).for_each(|_| standby.handle_answer(at(15), true));
        assert!(!standby.claim().is_primary());
    }

    #[test]
    fn of_two_standbys_the_first_goes_first() {
        let mut last = among(2, 3);
        outputs(&mut last, at(0));
        last.handle_peer(at(1), 0, THEIRS);
        last.handle_peer(at(1), 1, Claim { epoch: Epoch::NONE, ..THEIRS });
        (0..EXCHANGES).for_each(|_| exchange(&mut last, at(2), Span::ZERO, Span::from_micros(100)));
        last.handle_peer_lost(at(3), 0);
        outputs(&mut last, at(3));
        assert!(!outputs(&mut last, at(12)).contains(&SuccessionOutput::AskMembers));
        assert!(outputs(&mut last, at(13)).contains(&SuccessionOutput::AskMembers));
    }

    #[test]
    fn slow_exchanges_do_not_move_a_clock_that_is_known_better() {
        let mut standby = following();
        let shift = |standby: &mut Succession, ms, ahead, round_trip| {
            (0..EXCHANGES).for_each(|_| exchange(standby, at(ms), ahead, round_trip));
            std::iter::from_fn(|| standby.poll_output())
                .find(|output| matches!(output, SuccessionOutput::ShiftClock(_)))
        };
        let (far, slow, fast) = (Span::from_millis(29), Span::from_millis(58), Span::from_micros(90));
        assert_eq!(shift(&mut standby, 1_000, far, slow), None);
        // Nor after an hour in which it was the primary itself.
        assert_eq!(shift(&mut standby, 3_600_000, far, slow), None);
        let little = Span::from_micros(30);
        assert_eq!(shift(&mut standby, 3_601_000, little, fast), Some(SuccessionOutput::ShiftClock(little)));
    }
}
