//! All sessions of a member with schedulers: one name, and one primary.
//!
//! A life begins with one session, whose welcome names the member; then it presents itself to all other schedulers
//! under that name. The role is told by a [`Verdict`] when another scheduler is obeyed, which has cut off the former
//! one, and when the life is over. Whatever is to be done with connections comes out of [`Membership::poll_output`], in
//! which what ends comes before what begins.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    ops::{Index, IndexMut},
};

use proto::{
    Claim, Epoch, ModelThreadId, Timestamp,
    clock::{ClockOffset, ClockReply},
    hello::{Member, MemberHello, ModelThreads, SchedulerHello},
};
use transport::ConnectionId;

use crate::{
    allegiance::{Allegiance, Verdict},
    questions::Questions,
    session::{Destination, Reader, Session, encode, excerpt},
};

/// What a welcome says, in whichever role's words.
#[derive(Debug)]
pub struct Welcome {
    /// Who we are by it.
    pub member: Member,
    /// Where to connect.
    pub model_threads: ModelThreads,
    /// Whether it is the primary.
    pub claim: Claim,
    /// Whether the scheduler knows all that it must before it is joined; if not, [`Membership::handle_known`] follows.
    pub knows_all: bool,
}

/// What is to be done with connections to schedulers.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Connect, then call [`Membership::handle_connecting`].
    Connect {
        /// The scheduler, or one of its ModelThreads.
        to: Destination,
        /// What a ModelThread is told, an encoded [`SchedulerHello`]. `None`: what the role tells a scheduler.
        hello: Option<Vec<u8>>,
    },
    /// Disconnect.
    Disconnect {
        /// The connection.
        connection: ConnectionId,
    },
}

/// All sessions, by the index of their scheduler.
#[derive(Debug)]
pub struct Membership<W> {
    sessions: Vec<Session<W>>,
    /// Who we are in this life.
    name: Option<Member>,
    /// As long as nobody has named us: the only session that may connect. Two would give two names.
    asked: usize,
    allegiance: Allegiance,
    questions: Questions,
    /// The primary's clock; the former one's, which is the same, until the new one's is known.
    clock: ClockOffset,
    lower_epochs: u64,
    outputs: VecDeque<Output>,
}

impl<W> Index<usize> for Membership<W> {
    type Output = Session<W>;

    fn index(&self, scheduler: usize) -> &Session<W> {
        &self.sessions[scheduler]
    }
}

impl<W> IndexMut<usize> for Membership<W> {
    fn index_mut(&mut self, scheduler: usize) -> &mut Session<W> {
        &mut self.sessions[scheduler]
    }
}

impl<W> Membership<W> {
    /// Who we are in this life.
    #[must_use]
    pub fn name(&self) -> Option<Member> {
        self.name
    }

    /// Whom we obey, or obeyed last; no primary's claim if nobody was obeyed in this life.
    #[must_use]
    pub fn obeys(&self) -> Claim {
        self.allegiance.obeys()
    }

    /// Whether anybody has been obeyed in this life.
    #[must_use]
    pub fn has_obeyed(&self) -> bool {
        self.allegiance.has_obeyed()
    }

    /// The session that is obeyed and up.
    #[must_use]
    pub fn primary(&self) -> Option<usize> {
        self.allegiance.primary()
    }

    /// Whether the primary has been lost for longer than a takeover takes.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.allegiance.is_missing()
    }

    /// The primary's clock, as far as it is known.
    #[must_use]
    pub fn clock(&self) -> &ClockOffset {
        &self.clock
    }

    /// How often a scheduler claimed an epoch below one that it, or whoever is obeyed, had claimed before.
    #[must_use]
    pub fn lower_epochs(&self) -> u64 {
        self.lower_epochs
    }

    /// The sessions, in the order of the list.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Session<W>> {
        self.sessions.iter()
    }

    /// The same, to be told something.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut Session<W>> {
        self.sessions.iter_mut()
    }

    /// Whose connection this is.
    #[must_use]
    pub fn session_of(&self, connection: ConnectionId) -> Option<usize> {
        self.sessions.iter().position(|session| session.reader(connection).is_some())
    }

    /// Whether the first primary of this life may be on its way.
    #[must_use]
    pub fn awaits_primary(&self) -> bool {
        let may_come = |session: &Session<W>| session.is_connecting() || session.is_welcomed();
        !self.has_obeyed() && self.sessions.iter().any(may_come)
    }

    fn may_connect(&self, scheduler: usize) -> bool {
        self.name.is_some() || self.asked == scheduler
    }
}

impl<W: Default> Membership<W> {
    /// A member of so many schedulers, of which the first is to be dialled at once.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn new(schedulers: usize) -> Self {
        assert!(schedulers > 0, "the configuration names a scheduler");
        let mut membership = Self {
            sessions: (0..schedulers).map(|_| Session::default()).collect(),
            name: None,
            asked: 0,
            allegiance: Allegiance::new(schedulers),
            questions: Questions::default(),
            clock: ClockOffset::default(),
            lower_epochs: 0,
            outputs: VecDeque::new(),
        };
        membership.handle_due(Timestamp::PAST);
        membership
    }

    /// The driver did what [`Output::Connect`] asked for.
    pub fn handle_connecting(&mut self, scheduler: usize, reader: Reader, connection: ConnectionId) {
        if !self.sessions[scheduler].handle_connecting(reader, connection) {
            self.outputs.push_back(Output::Disconnect { connection });
        }
    }

    /// A connection is up: if it is to a scheduler its welcome is to be read, and [`Self::handle_welcome`] called; if
    /// it is to a ModelThread, [`Self::handle_claim`]. `None` if it is none of these.
    pub fn handle_connected(&mut self, connection: ConnectionId) -> Option<(usize, Reader)> {
        let scheduler = self.session_of(connection)?;
        Some((scheduler, self.sessions[scheduler].handle_up(connection)?))
    }

    /// A scheduler has taken us in. [`Self::handle_claim`] is to be called once it was told what it must know.
    ///
    /// # Errors
    /// Why the session must be left.
    pub fn handle_welcome(&mut self, now: Timestamp, scheduler: usize, welcome: Welcome) -> Result<(), String> {
        let Welcome { member, model_threads: ModelThreads { addresses, pass }, claim, knows_all } = welcome;
        let threads = parse(&addresses)?;
        if let Some(known_as) = self.name.filter(|known_as| *known_as != member) {
            return Err(format!("its welcome names us {member:?}, expected {known_as:?} as others do"));
        }
        if self.name.replace(member).is_none() {
            self.allegiance.handle_named(now);
        }
        // As of a former primary that has heard of no other one.
        if claim.is_primary() && self.allegiance.is_below(claim) {
            self.lower_epochs += 1;
        }
        self.sessions[scheduler].handle_welcome(now, claim, threads.len(), knows_all);
        for (id, address) in (0..).map(ModelThreadId).zip(threads) {
            let to = Destination::ModelThread { scheduler, id, address };
            let hello = Some(encode(&SchedulerHello::Member(MemberHello { member, pass })));
            self.outputs.push_back(Output::Connect { to, hello });
        }
        Ok(())
    }

    /// A scheduler knows all of us, and may be joined now: [`Self::handle_claim`] is to be called.
    pub fn handle_known(&mut self, scheduler: usize) {
        self.sessions[scheduler].handle_known();
    }

    /// A scheduler claims another epoch than in its welcome: [`Self::handle_claim`] is to be called. False if that is
    /// lower than what it, or whoever is obeyed, has claimed: it is not believed, and changes nothing.
    pub fn handle_takeover(&mut self, scheduler: usize, epoch: Epoch) -> bool {
        let claim = self.sessions[scheduler].claim();
        if epoch < claim.epoch || self.allegiance.is_below(Claim { epoch, ..claim }) {
            tracing::debug!(scheduler, %epoch, "claims less than was claimed before");
            self.lower_epochs += 1;
            return false;
        }
        self.sessions[scheduler].handle_epoch(epoch);
        true
    }

    /// Whether a scheduler is to be obeyed, if it is joined. Whoever is to be left is left by [`Self::handle_lost`].
    pub fn handle_claim(&mut self, now: Timestamp, scheduler: usize) -> Verdict {
        if !self.sessions[scheduler].has_joined() {
            return Verdict::Nothing;
        }
        let claim = self.sessions[scheduler].claim();
        let verdict = self.allegiance.handle_claim(scheduler, claim);
        match verdict {
            Verdict::Leave(_) | Verdict::StartOver(_) => {}
            Verdict::Nothing => self.sessions[scheduler].handle_kept(),
            Verdict::Obey { former } => {
                self.sessions[scheduler].handle_kept();
                let is_other_era = |session: &Session<W>| session.is_welcomed() && session.claim().era != claim.era;
                for other in (0..self.sessions.len()).filter(|other| *other != scheduler) {
                    if former == Some(other) || is_other_era(&self.sessions[other]) {
                        let until = self.sessions[other].handle_failed(now);
                        self.end(other, until);
                    }
                }
                self.adopt_clock(scheduler);
                self.questions.handle_known(false);
            }
        }
        verdict
    }

    /// A connection has ended. Whose session it was, which is to be left.
    pub fn handle_disconnected(&mut self, connection: ConnectionId) -> Option<usize> {
        let scheduler = self.session_of(connection)?;
        let reader = self.sessions[scheduler].reader(connection)?;
        self.sessions[scheduler].handle_down(reader);
        Some(scheduler)
    }

    /// A session is lost, or to be left; it is tried again later, unless the life is over.
    pub fn handle_lost(&mut self, now: Timestamp, scheduler: usize) -> Verdict {
        if self.name.is_none() {
            self.asked = (scheduler + 1) % self.sessions.len();
        }
        let was_primary = self.primary() == Some(scheduler);
        let verdict = self.allegiance.handle_left(now, scheduler);
        let until = match verdict {
            Verdict::StartOver(_) => Timestamp::NEVER,
            _ => self.sessions[scheduler].handle_failed(now),
        };
        self.end(scheduler, until);
        if was_primary {
            self.questions.handle_known(true);
        }
        verdict
    }

    /// What schedulers but the primary are told in the hello has changed: those that know it are dialled anew.
    pub fn rejoin_standbys(&mut self) {
        for scheduler in 0..self.sessions.len() {
            if self.primary() != Some(scheduler) && !self.sessions[scheduler].is_waiting() {
                self.end(scheduler, Timestamp::PAST);
            }
        }
    }

    /// Ends this life, and all sessions. None is dialled before [`Self::begin_life`].
    pub fn start_over(&mut self) {
        (0..self.sessions.len()).for_each(|scheduler| self.end(scheduler, Timestamp::NEVER));
        if self.name.take().is_some() {
            // Another one than gave us a name that led nowhere.
            self.asked = (self.asked + 1) % self.sessions.len();
        }
        self.allegiance.start_over();
        self.clock = ClockOffset::default();
    }

    /// Sessions wait to be dialled again.
    pub fn begin_life(&mut self, now: Timestamp) {
        for session in &mut self.sessions {
            let until = session.handle_failed(now);
            session.wait(until);
        }
    }

    fn end(&mut self, scheduler: usize, until: Timestamp) {
        let is_of = |output: &Output| matches!(output, Output::Connect { to, .. } if to.scheduler() == scheduler);
        self.outputs.retain(|output| !is_of(output));
        let closed = self.sessions[scheduler].leave(until);
        self.outputs.extend(closed.map(|connection| Output::Disconnect { connection }));
        self.questions.handle_left(scheduler);
    }

    /// A scheduler told its clock. True if it is the primary's, which counts.
    pub fn handle_clock(&mut self, now: Timestamp, scheduler: usize, reply: ClockReply) -> bool {
        self.sessions[scheduler].handle_clock(now, reply);
        self.primary() == Some(scheduler) && self.adopt_clock(scheduler)
    }

    fn adopt_clock(&mut self, scheduler: usize) -> bool {
        let clock = self.sessions[scheduler].clock();
        let is_known = clock.error_bound().is_some();
        if is_known {
            self.clock = clock.clone();
        }
        is_known
    }

    /// A standby asks whether we miss the primary. True if that one is to be asked for its clock now.
    pub fn handle_question(&mut self, now: Timestamp, scheduler: usize) -> bool {
        self.questions.handle_asked(now, scheduler, self.allegiance.primary())
    }

    /// Something came from a scheduler.
    pub fn handle_heard(&mut self, scheduler: usize) {
        if self.primary() == Some(scheduler) {
            self.questions.handle_known(false);
        }
    }

    /// A session that is to be told whether the primary is missed, and whether it is.
    pub fn poll_answer(&mut self) -> Option<(usize, bool)> {
        self.questions.poll_answer()
    }

    /// Runs every timer that is due, but for [`Self::poll_clock_request`].
    pub fn handle_timeout(&mut self, now: Timestamp) -> Verdict {
        self.questions.handle_timeout(now);
        self.sessions.iter_mut().for_each(|session| session.handle_timeout(now));
        self.handle_due(now);
        self.allegiance.handle_timeout(now)
    }

    /// Schedulers are to be dialled whose time has come.
    pub fn handle_due(&mut self, now: Timestamp) {
        for scheduler in 0..self.sessions.len() {
            if self.may_connect(scheduler) {
                self.sessions[scheduler].handle_due(now);
            }
        }
    }

    /// A session whose clock is to be asked for, and the stamp of the request.
    pub fn poll_clock_request(&mut self, now: Timestamp) -> Option<(usize, Timestamp)> {
        let mut sessions = self.sessions.iter_mut().enumerate();
        sessions.find_map(|(scheduler, session)| Some((scheduler, session.poll_clock_request(now)?)))
    }

    /// When [`Self::handle_timeout`] or [`Self::poll_clock_request`] must be called; [`Timestamp::NEVER`] if not at
    /// all.
    #[must_use]
    pub fn poll_timeout(&self) -> Timestamp {
        let sessions = self.sessions.iter().enumerate();
        let due = sessions.filter(|(scheduler, session)| !session.is_waiting() || self.may_connect(*scheduler));
        let timers = self.allegiance.poll_timeout().into_iter().chain(self.questions.poll_timeout());
        due.map(|(_, session)| session.poll_timeout()).chain(timers).min().unwrap_or(Timestamp::NEVER)
    }

    /// What is to be done next with connections.
    pub fn poll_output(&mut self) -> Option<Output> {
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        let scheduler = self.sessions.iter_mut().position(Session::poll_dial)?;
        Some(Output::Connect { to: Destination::Scheduler(scheduler), hello: None })
    }

    /// The next frame: a full one, or all messages to one reader since the last `None`.
    pub fn poll_frame(&mut self) -> Option<(ConnectionId, Vec<u8>)> {
        self.sessions.iter_mut().find_map(Session::poll_frame)
    }
}

/// Where the ModelThreads of a welcome are.
fn parse(addresses: &[String]) -> Result<Vec<SocketAddr>, String> {
    let max = usize::from(ModelThreadId::COUNT_MAX);
    if addresses.len() > max {
        return Err(format!("its welcome names {} ModelThreads, expected at most {max}", addresses.len()));
    }
    let parsed = addresses.iter().map(|text| {
        let wrong = || format!("its welcome has '{}' as the address of a ModelThread, expected ip:port", excerpt(text));
        text.parse().map_err(|_| wrong())
    });
    parsed.collect()
}
