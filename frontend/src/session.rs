//! The session with the scheduler, as far as connections go: one to the scheduler itself, and one to each of its
//! ModelThreads where these have endpoints of their own.
//!
//! It waits, connects, is welcomed, connects to the ModelThreads that the welcome names, and has joined once all of
//! them are up. What ends one of the connections ends the session: the core then calls [`Session::leave`], takes down
//! what depends on the scheduler, and calls [`Session::handle_left`], after which it waits to connect again.

use std::{collections::VecDeque, net::SocketAddr};

use proto::{
    FrontendId, ModelThreadId, Span, Timestamp,
    backoff::Backoff,
    clock::{ClockReply, ClockSync},
    frame::FrameWriter,
    frontend_to_scheduler::{FrontendHello, FrontendToScheduler},
    hello::{Member, MemberHello, ModelThreads, SchedulerHello},
    scheduler_to_frontend::FrontendWelcome,
};
use transport::ConnectionId;

use crate::models::excerpt;

/// The first wait before connecting again; each failure doubles it.
pub(crate) const RETRY_FIRST: Span = Span::from_millis(50);
/// The longest wait before connecting again.
const RETRY_MAX: Span = Span::from_millis(2_000);

/// Where a session connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// The scheduler, whose address is the driver's to know.
    Scheduler,
    /// One of its ModelThreads.
    ModelThread {
        /// Which one.
        id: ModelThreadId,
        /// Its bootstrap listener.
        address: SocketAddr,
    },
}

/// What a session wants to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SessionOutput {
    /// Connect with this hello, then call [`Session::handle_connecting`].
    Connect { to: Destination, hello: Vec<u8> },
    /// Disconnect.
    Disconnect { connection: ConnectionId },
    /// Send a frame.
    Send { connection: ConnectionId, frame: Vec<u8> },
}

/// All connections to the scheduler. At most [`ModelThreadId::COUNT_MAX`] and one.
#[derive(Debug)]
pub(crate) struct Session {
    link_address: String,
    state: State,
    backoff: Backoff,
    clock: ClockSync,
    outputs: VecDeque<SessionOutput>,
}

/// Where we stand with the scheduler.
#[derive(Debug)]
enum State {
    /// Connects at this instant.
    Waiting { until: Timestamp },
    /// The driver is to connect, or is connecting.
    Connecting { connection: Option<ConnectionId> },
    /// The scheduler has named us; we have joined once every ModelThread is up.
    Welcomed(Scheduler),
    /// The session is over, and what depended on it is being taken down.
    Leaving,
}

/// A scheduler that has welcomed us.
#[derive(Debug)]
struct Scheduler {
    frontend: FrontendId,
    line: Line,
    /// By id. None: `line` leads to the only one, too.
    threads: Vec<Thread>,
}

#[derive(Debug)]
struct Thread {
    /// `None` until the driver has begun to connect.
    line: Option<Line>,
    is_up: bool,
}

/// A connection, and the frame that it is sent next.
#[derive(Debug)]
struct Line {
    connection: ConnectionId,
    writer: FrameWriter,
}

impl Line {
    fn new(connection: ConnectionId) -> Self {
        Self { connection, writer: FrameWriter::default() }
    }
}

impl Scheduler {
    /// Every connection, up or not.
    fn lines(&self) -> impl Iterator<Item = &Line> {
        std::iter::once(&self.line).chain(self.threads.iter().filter_map(|thread| thread.line.as_ref()))
    }

    fn lines_mut(&mut self) -> impl Iterator<Item = &mut Line> {
        let threads = self.threads.iter_mut().filter_map(|thread| thread.line.as_mut());
        std::iter::once(&mut self.line).chain(threads)
    }
}

impl Session {
    /// A session that connects at its first [`Self::handle_timeout`]. Backends are told `link_address`.
    pub(crate) fn new(link_address: String) -> Self {
        Self {
            link_address,
            state: State::Waiting { until: Timestamp::PAST },
            backoff: Backoff::new(RETRY_FIRST, RETRY_MAX),
            clock: ClockSync::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Who we are, by the scheduler's welcome.
    pub(crate) fn frontend(&self) -> Option<FrontendId> {
        match &self.state {
            State::Welcomed(scheduler) => Some(scheduler.frontend),
            _ => None,
        }
    }

    /// Who we are, once all ModelThreads are up.
    pub(crate) fn joined(&self) -> Option<FrontendId> {
        match &self.state {
            State::Welcomed(Scheduler { frontend, threads, .. }) if threads.iter().all(|thread| thread.is_up) => {
                Some(*frontend)
            }
            _ => None,
        }
    }

    /// Whether a welcome may still come.
    pub(crate) fn is_connecting(&self) -> bool {
        matches!(self.state, State::Connecting { .. })
    }

    /// Whether the session is over, and what depended on it is not yet taken down.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.state, State::Leaving)
    }

    /// Whether the scheduler's clock is known.
    pub(crate) fn knows_clock(&self) -> bool {
        self.clock.offset().error_bound().is_some()
    }

    /// The scheduler told its clock.
    pub(crate) fn handle_clock(&mut self, now: Timestamp, reply: ClockReply) {
        self.clock.handle_reply(now, reply);
    }

    /// An instant of our clock on the scheduler's; `None` before that is known.
    pub(crate) fn to_scheduler(&self, local: Timestamp) -> Option<Timestamp> {
        self.clock.offset().to_scheduler(local)
    }

    /// An instant of the scheduler's clock on ours; `None` before that is known.
    pub(crate) fn to_local(&self, scheduler: Timestamp) -> Option<Timestamp> {
        self.clock.offset().to_local(scheduler)
    }

    /// Whether this session has such a ModelThread.
    pub(crate) fn has_thread(&self, id: ModelThreadId) -> bool {
        match &self.state {
            State::Welcomed(Scheduler { threads, .. }) => usize::from(id.0) < threads.len().max(1),
            _ => false,
        }
    }

    /// Whether a connection is one of this session's, up or not.
    pub(crate) fn owns(&self, connection: ConnectionId) -> bool {
        match &self.state {
            State::Connecting { connection: own } => *own == Some(connection),
            State::Welcomed(scheduler) => scheduler.lines().any(|line| line.connection == connection),
            State::Waiting { .. } | State::Leaving => false,
        }
    }

    /// Whether messages that come over this connection count.
    pub(crate) fn hears(&self, connection: ConnectionId) -> bool {
        let State::Welcomed(Scheduler { line, threads, .. }) = &self.state else { return false };
        let is_it = |line: &Line| line.connection == connection;
        is_it(line) || threads.iter().any(|thread| thread.is_up && thread.line.as_ref().is_some_and(is_it))
    }

    /// The driver did what [`SessionOutput::Connect`] asked for.
    pub(crate) fn handle_connecting(&mut self, to: Destination, connection: ConnectionId) {
        match (to, &mut self.state) {
            (Destination::Scheduler, State::Connecting { connection: own @ None }) => *own = Some(connection),
            (Destination::ModelThread { id, .. }, State::Welcomed(Scheduler { threads, .. }))
                if threads.get(usize::from(id.0)).is_some_and(|thread| thread.line.is_none()) =>
            {
                threads[usize::from(id.0)].line = Some(Line::new(connection));
            }
            _ => self.outputs.push_back(SessionOutput::Disconnect { connection }),
        }
    }

    /// A connection is up. True if that is the scheduler's welcome.
    ///
    /// # Errors
    /// Why the session must be left.
    pub(crate) fn handle_connected(
        &mut self,
        now: Timestamp,
        connection: ConnectionId,
        welcome: &[u8],
    ) -> Result<bool, String> {
        if self.is_connecting() && self.owns(connection) {
            self.on_welcome(now, connection, welcome)?;
            self.on_joined();
            return Ok(true);
        }
        if let State::Welcomed(Scheduler { threads, .. }) = &mut self.state {
            let is_it = |line: &Line| line.connection == connection;
            if let Some(thread) = threads.iter_mut().find(|thread| thread.line.as_ref().is_some_and(is_it)) {
                thread.is_up = true;
                self.on_joined();
            }
        }
        Ok(false)
    }

    fn on_welcome(&mut self, now: Timestamp, connection: ConnectionId, welcome: &[u8]) -> Result<(), String> {
        let FrontendWelcome { frontend, model_threads: ModelThreads { addresses, pass } } =
            wincode::deserialize(welcome)
                .map_err(|_| "its welcome does not decode; do both sides run the same version?")?;
        if frontend.0 >= FrontendId::COUNT_MAX {
            return Err(format!("its welcome names us {}, expected less than {}", frontend.0, FrontendId::COUNT_MAX));
        }
        let max = usize::from(ModelThreadId::COUNT_MAX);
        if addresses.len() > max {
            return Err(format!("its welcome names {} ModelThreads, expected at most {max}", addresses.len()));
        }
        let hello = encode(&SchedulerHello::Member(MemberHello { member: Member::Frontend(frontend), pass }));
        let mut connects = VecDeque::with_capacity(addresses.len());
        for (id, address) in (0..).map(ModelThreadId).zip(&addresses) {
            let address = address.parse().map_err(|_| {
                format!("its welcome has '{}' as the address of a ModelThread, expected ip:port", excerpt(address))
            })?;
            let to = Destination::ModelThread { id, address };
            connects.push_back(SessionOutput::Connect { to, hello: hello.clone() });
        }
        tracing::info!("the scheduler knows us as frontend {}", frontend.0);
        let threads = addresses.iter().map(|_| Thread { line: None, is_up: false }).collect();
        self.state = State::Welcomed(Scheduler { frontend, line: Line::new(connection), threads });
        self.outputs.append(&mut connects);
        self.clock = ClockSync::start(now);
        Ok(())
    }

    /// If that was the last connection.
    fn on_joined(&mut self) {
        if let Some(frontend) = self.joined() {
            tracing::info!("joined the scheduler as frontend {}", frontend.0);
            self.backoff.handle_success();
        }
    }

    /// Ends the session: all its connections end, and nothing more is sent.
    pub(crate) fn leave(&mut self) {
        self.outputs.retain(|output| matches!(output, SessionOutput::Disconnect { .. }));
        let disconnect = |connection| SessionOutput::Disconnect { connection };
        match std::mem::replace(&mut self.state, State::Leaving) {
            State::Connecting { connection } => self.outputs.extend(connection.map(disconnect)),
            State::Welcomed(scheduler) => {
                self.outputs.extend(scheduler.lines().map(|line| disconnect(line.connection)));
            }
            State::Waiting { .. } | State::Leaving => {}
        }
        self.clock = ClockSync::default();
    }

    /// What depended on the session is taken down.
    pub(crate) fn handle_left(&mut self, now: Timestamp) {
        self.state = State::Waiting { until: self.backoff.handle_failure(now) };
    }

    /// Connects when it is time.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        if matches!(self.state, State::Waiting { until } if until <= now) {
            self.state = State::Connecting { connection: None };
            let hello = SchedulerHello::Frontend(FrontendHello { link_address: self.link_address.clone() });
            let (to, hello) = (Destination::Scheduler, encode(&hello));
            self.outputs.push_back(SessionOutput::Connect { to, hello });
        }
    }

    /// The stamp of a request for the scheduler's clock that is due.
    pub(crate) fn poll_clock_request(&mut self, now: Timestamp) -> Option<Timestamp> {
        self.frontend().and_then(|_| self.clock.poll_request(now))
    }

    /// When [`Self::handle_timeout`] or [`Self::poll_clock_request`] must be called.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        match &self.state {
            State::Waiting { until } => Some(*until),
            State::Welcomed(_) => Some(self.clock.poll_timeout()),
            State::Connecting { .. } | State::Leaving => None,
        }
    }

    /// Posts to the scheduler itself; to nobody while there is none.
    pub(crate) fn post(&mut self, message: &FrontendToScheduler) {
        if let State::Welcomed(Scheduler { line, .. }) = &mut self.state {
            push(line, message, &mut self.outputs);
        }
    }

    /// Posts to a ModelThread.
    pub(crate) fn post_to_thread(&mut self, id: ModelThreadId, message: &FrontendToScheduler) {
        let State::Welcomed(Scheduler { line, threads, .. }) = &mut self.state else { return };
        let line = match threads.get_mut(usize::from(id.0)) {
            Some(thread) => thread.line.as_mut(),
            None => Some(line),
        };
        if let Some(line) = line {
            push(line, message, &mut self.outputs);
        }
    }

    /// Posts over the connection that a question came on.
    pub(crate) fn post_back(&mut self, connection: ConnectionId, message: &FrontendToScheduler) {
        let State::Welcomed(scheduler) = &mut self.state else { return };
        if let Some(line) = scheduler.lines_mut().find(|line| line.connection == connection) {
            push(line, message, &mut self.outputs);
        }
    }

    /// What to do next; full frames are among it.
    pub(crate) fn poll_output(&mut self) -> Option<SessionOutput> {
        self.outputs.pop_front()
    }

    /// What was posted since the last frame, one connection after another; to be sent at the end of a turn.
    pub(crate) fn poll_frame(&mut self) -> Option<SessionOutput> {
        let State::Welcomed(scheduler) = &mut self.state else { return None };
        let mut frames = scheduler.lines_mut().filter_map(|line| Some((line.connection, line.writer.take()?)));
        frames.next().map(|(connection, frame)| SessionOutput::Send { connection, frame })
    }
}

fn push(line: &mut Line, message: &FrontendToScheduler, outputs: &mut VecDeque<SessionOutput>) {
    let full = line.writer.push(message).expect("every message to the scheduler fits a frame");
    outputs.extend(full.map(|frame| SessionOutput::Send { connection: line.connection, frame }));
}

/// Encodes what a connection begins with.
pub(crate) fn encode<T: wincode::SchemaWrite<wincode::config::DefaultConfig, Src = T>>(value: &T) -> Vec<u8> {
    wincode::serialize(value).expect("encoding into memory cannot fail")
}
