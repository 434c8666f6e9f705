//! The session with one scheduler, as far as connections go: one to the scheduler itself, and one to each of its
//! ModelThreads where these have endpoints of their own.
//!
//! It waits, is dialled, is welcomed, connects to the ModelThreads that the welcome names, and has joined once all of
//! them are up and the scheduler knows all of us. What ends one of the connections ends the session, and with it all
//! that its scheduler has said; then it waits again, longer each time that it was of no use. Messages of one turn leave
//! in as few frames as they fit, on the connection of whoever they are for. Whether the scheduler is obeyed is not for
//! the session to say; it keeps what the scheduler claims.

use std::{collections::VecDeque, net::SocketAddr};

use proto::{
    Claim, Epoch, ModelThreadId, Span, Timestamp,
    backoff::Backoff,
    clock::{ClockOffset, ClockReply, ClockSync},
    frame::{FrameError, FrameWriter},
};
use transport::ConnectionId;
use wincode::{SchemaWrite, config::DefaultConfig};

/// The first wait before a scheduler is tried again; each failure doubles it.
pub const RETRY_FIRST: Span = Span::from_millis(50);
/// The longest wait.
pub const RETRY_MAX: Span = Span::from_millis(1_000);

/// Where a session connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// The scheduler at this index of the list, whose address is the driver's to know.
    Scheduler(usize),
    /// One of its ModelThreads.
    ModelThread {
        /// Whose.
        scheduler: usize,
        /// Which one.
        id: ModelThreadId,
        /// Its bootstrap listener.
        address: SocketAddr,
    },
}

impl Destination {
    /// The index of the scheduler.
    #[must_use]
    pub fn scheduler(self) -> usize {
        match self {
            Self::Scheduler(scheduler) | Self::ModelThread { scheduler, .. } => scheduler,
        }
    }

    /// Who reads there.
    #[must_use]
    pub fn reader(self) -> Reader {
        match self {
            Self::Scheduler(_) => Reader::Scheduler,
            Self::ModelThread { id, .. } => Reader::ModelThread(id),
        }
    }
}

/// Whom a connection to a scheduler is to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The place where members join.
    Scheduler,
    /// One of its ModelThreads.
    ModelThread(ModelThreadId),
}

/// All that there is between us and one scheduler: at most [`ModelThreadId::COUNT_MAX`] connections and one, and what
/// the role keeps of what the scheduler has said.
#[derive(Debug)]
pub struct Session<W> {
    /// What the scheduler has said since it was dialled.
    pub word: W,
    claim: Claim,
    clock: ClockSync,
    state: State,
    backoff: Backoff,
    scheduler: Route,
    /// By id; none if the scheduler's connection is also to its only ModelThread.
    threads: Vec<Route>,
    /// Frames that are full, oldest first.
    full: VecDeque<(ConnectionId, Vec<u8>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// There is no connection.
    Waiting { until: Timestamp },
    /// The role is to dial it.
    Due,
    /// The driver has been asked for a connection.
    Dialled,
    /// It has taken us in; connections to its ModelThreads are on their way.
    Welcomed { knows_all: bool },
}

#[derive(Debug, Default)]
struct Route {
    connection: Option<ConnectionId>,
    is_up: bool,
    writer: FrameWriter,
    /// Whether what was pushed leaves at the next opportunity.
    is_due: bool,
    /// When what may wait leaves, if nothing else does before.
    leaves_at: Option<Timestamp>,
}

impl<W: Default> Default for Session<W> {
    fn default() -> Self {
        Self {
            word: W::default(),
            claim: Claim::default(),
            clock: ClockSync::default(),
            state: State::Waiting { until: Timestamp::PAST },
            backoff: Backoff::new(RETRY_FIRST, RETRY_MAX),
            scheduler: Route::default(),
            threads: Vec::new(),
            full: VecDeque::new(),
        }
    }
}

impl<W> Session<W> {
    /// What the scheduler claims; no primary's claim before it has taken us in.
    #[must_use]
    pub fn claim(&self) -> Claim {
        self.claim
    }

    /// What is known of the scheduler's clock.
    #[must_use]
    pub fn clock(&self) -> &ClockOffset {
        self.clock.offset()
    }

    /// Whether there is no connection, and none on its way.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    /// Whether a welcome may still come.
    #[must_use]
    pub fn is_connecting(&self) -> bool {
        matches!(self.state, State::Due | State::Dialled)
    }

    /// Whether the scheduler has taken us in.
    #[must_use]
    pub fn is_welcomed(&self) -> bool {
        matches!(self.state, State::Welcomed { .. })
    }

    /// Whether all connections are up as well, and the scheduler knows all of us.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        let is_up = |route: &Route| route.is_up;
        self.state == State::Welcomed { knows_all: true } && is_up(&self.scheduler) && self.threads.iter().all(is_up)
    }

    /// The ModelThreads of a scheduler that has taken us in; thread 0 is there without an endpoint of its own, too.
    pub fn threads(&self) -> impl Iterator<Item = ModelThreadId> + use<W> {
        let count = if self.is_welcomed() { self.threads.len().max(1) as u16 } else { 0 };
        (0..count).map(ModelThreadId)
    }

    /// Whether its ModelThreads have connections of their own.
    #[must_use]
    pub fn has_own_threads(&self) -> bool {
        !self.threads.is_empty()
    }

    /// Whether messages that come over this connection count.
    #[must_use]
    pub fn hears(&self, connection: ConnectionId) -> bool {
        self.is_welcomed() && self.reader(connection).is_some_and(|reader| self.is_up(reader))
    }

    /// Whether this one can be told something.
    #[must_use]
    pub fn is_up(&self, reader: Reader) -> bool {
        self.route(reader).is_some_and(|route| route.is_up)
    }

    /// Whom a connection is to, up or not; `None` if it is none of these.
    pub(crate) fn reader(&self, connection: ConnectionId) -> Option<Reader> {
        let is_it = |route: &Route| route.connection == Some(connection);
        if is_it(&self.scheduler) {
            return Some(Reader::Scheduler);
        }
        let index = self.threads.iter().position(is_it)?;
        Some(Reader::ModelThread(ModelThreadId(index as u16)))
    }

    /// It is to be dialled if its time has come.
    pub(crate) fn handle_due(&mut self, now: Timestamp) {
        if matches!(self.state, State::Waiting { until } if until <= now) {
            self.state = State::Due;
        }
    }

    /// True once if it is to be dialled.
    pub(crate) fn poll_dial(&mut self) -> bool {
        let is_due = self.state == State::Due;
        if is_due {
            self.state = State::Dialled;
        }
        is_due
    }

    /// The driver is opening this connection. False if it is not wanted any more.
    pub(crate) fn handle_connecting(&mut self, reader: Reader, connection: ConnectionId) -> bool {
        let is_awaited = match reader {
            Reader::Scheduler => self.state == State::Dialled,
            Reader::ModelThread(_) => self.is_welcomed(),
        };
        let route = self.route_mut(reader).filter(|route| is_awaited && route.connection.is_none());
        route.map(|route| route.connection = Some(connection)).is_some()
    }

    /// A connection is up. Whose it is; `None` if it is none of these, or has been up.
    pub(crate) fn handle_up(&mut self, connection: ConnectionId) -> Option<Reader> {
        let reader = self.reader(connection)?;
        let route = self.route_mut(reader)?;
        (!std::mem::replace(&mut route.is_up, true)).then_some(reader)
    }

    /// A connection has ended by itself.
    pub(crate) fn handle_down(&mut self, reader: Reader) {
        if let Some(route) = self.route_mut(reader) {
            *route = Route::default();
        }
    }

    /// The scheduler has taken us in, and has so many ModelThreads with endpoints of their own.
    pub(crate) fn handle_welcome(&mut self, now: Timestamp, claim: Claim, threads: usize, knows_all: bool) {
        self.threads.resize_with(threads, Route::default);
        (self.claim, self.clock, self.state) = (claim, ClockSync::start(now), State::Welcomed { knows_all });
    }

    /// The scheduler knows all that it was to be told.
    pub(crate) fn handle_known(&mut self) {
        if let State::Welcomed { knows_all } = &mut self.state {
            *knows_all = true;
        }
    }

    /// The scheduler claims another epoch than in its welcome.
    pub(crate) fn handle_epoch(&mut self, epoch: Epoch) {
        self.claim.epoch = epoch;
    }

    /// It is of use: when it fails, it is tried again soon.
    pub(crate) fn handle_kept(&mut self) {
        self.backoff.handle_success();
    }

    /// The scheduler told its clock.
    pub(crate) fn handle_clock(&mut self, now: Timestamp, reply: ClockReply) {
        self.clock.handle_reply(now, reply);
    }

    /// The stamp of a request for the scheduler's clock that is due.
    pub(crate) fn poll_clock_request(&mut self, now: Timestamp) -> Option<Timestamp> {
        if self.is_welcomed() { self.clock.poll_request(now) } else { None }
    }

    /// When it is to be dialled, if it waits; otherwise when its clock is to be asked for, or something has waited long
    /// enough.
    pub(crate) fn poll_timeout(&self) -> Timestamp {
        if let State::Waiting { until } = self.state {
            return until;
        }
        let routes = std::iter::once(&self.scheduler).chain(&self.threads);
        let leaves_at = routes.filter_map(|route| route.leaves_at.filter(|_| !route.is_due)).min();
        self.clock.poll_timeout().min(leaves_at.unwrap_or(Timestamp::NEVER))
    }

    /// What may wait leaves if its time has come.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        for route in std::iter::once(&mut self.scheduler).chain(&mut self.threads) {
            route.is_due |= route.leaves_at.is_some_and(|at| at <= now);
        }
    }

    /// When it is to be tried again that has failed now.
    pub(crate) fn handle_failed(&mut self, now: Timestamp) -> Timestamp {
        self.backoff.handle_failure(now)
    }

    /// It waits for so long.
    pub(crate) fn wait(&mut self, until: Timestamp) {
        self.state = State::Waiting { until };
    }

    /// Adds a message to what leaves next. One for whom there is no connection is lost, like all that it would follow.
    ///
    /// # Errors
    /// If the message alone is larger than a frame.
    pub fn push<M: SchemaWrite<DefaultConfig, Src = M>>(&mut self, to: Reader, message: &M) -> Result<(), FrameError> {
        self.write(to, message, |route| route.is_due = true)
    }

    /// The same for a message that nobody waits for: it leaves with the next one, and then if there is none before.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_by<M>(&mut self, at: Timestamp, to: Reader, message: &M) -> Result<(), FrameError>
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        self.write(to, message, |route| _ = route.leaves_at.get_or_insert(at))
    }

    fn write<M>(&mut self, to: Reader, message: &M, note: impl FnOnce(&mut Route)) -> Result<(), FrameError>
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        let is_welcomed = self.is_welcomed();
        let Some(route) = self.route_mut(to).filter(|_| is_welcomed) else { return Ok(()) };
        let Some(connection) = route.connection else { return Ok(()) };
        let full = route.writer.push(message)?;
        note(route);
        self.full.extend(full.map(|frame| (connection, frame)));
        Ok(())
    }

    /// The same over the connection that a question came on.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_back<M>(&mut self, connection: ConnectionId, message: &M) -> Result<(), FrameError>
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        self.reader(connection).map_or(Ok(()), |reader| self.push(reader, message))
    }

    /// The next frame to send: a full one, or what was pushed since the last one.
    pub(crate) fn poll_frame(&mut self) -> Option<(ConnectionId, Vec<u8>)> {
        if let Some(full) = self.full.pop_front() {
            return Some(full);
        }
        let mut routes = std::iter::once(&mut self.scheduler).chain(&mut self.threads);
        let route = routes.find(|route| route.is_due && route.connection.is_some())?;
        (route.is_due, route.leaves_at) = (false, None);
        Some((route.connection?, route.writer.take()?))
    }

    fn route(&self, reader: Reader) -> Option<&Route> {
        match reader {
            Reader::ModelThread(ModelThreadId(0)) if self.threads.is_empty() => Some(&self.scheduler),
            Reader::ModelThread(id) => self.threads.get(usize::from(id.0)),
            Reader::Scheduler => Some(&self.scheduler),
        }
    }

    fn route_mut(&mut self, reader: Reader) -> Option<&mut Route> {
        match reader {
            Reader::ModelThread(ModelThreadId(0)) if self.threads.is_empty() => Some(&mut self.scheduler),
            Reader::ModelThread(id) => self.threads.get_mut(usize::from(id.0)),
            Reader::Scheduler => Some(&mut self.scheduler),
        }
    }
}

impl<W: Default> Session<W> {
    /// Forgets all that it knows, and waits. Yields the connections that are to be closed.
    pub(crate) fn leave(&mut self, until: Timestamp) -> impl Iterator<Item = ConnectionId> + use<W> {
        let fresh = Self { backoff: self.backoff.clone(), state: State::Waiting { until }, ..Self::default() };
        let left = std::mem::replace(self, fresh);
        std::iter::once(left.scheduler).chain(left.threads).filter_map(|route| route.connection)
    }
}

/// Encodes what a connection begins with.
///
/// # Panics
/// Never: memory takes whatever is encoded.
#[must_use]
pub fn encode<T: SchemaWrite<DefaultConfig, Src = T>>(value: &T) -> Vec<u8> {
    wincode::serialize(value).expect("encoding into memory cannot fail")
}

/// A peer's text for our log: short, and on one line whatever is in it.
#[must_use]
pub fn excerpt(text: &str) -> String {
    text.chars().take(64).map(|char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char }).collect()
}
