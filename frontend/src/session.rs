//! The session with one scheduler, as far as connections go: one to the scheduler itself, and one to each of its
//! ModelThreads where these have endpoints of their own.
//!
//! It waits, connects, is welcomed, connects to the ModelThreads that the welcome names, and has joined once all of
//! them are up. What ends one of the connections ends the session: the core then calls [`Session::leave`], takes down
//! what depends on the scheduler, and calls [`Session::handle_left`], after which it waits to connect again. Whether
//! the scheduler is obeyed is not for the session to say; it keeps what the scheduler claims.

use std::{collections::VecDeque, net::SocketAddr};

use proto::{
    Claim, Epoch, FrontendId, ModelThreadId, Span, Standing, Timestamp,
    backoff::Backoff,
    clock::{ClockOffset, ClockReply, ClockSync},
    frame::FrameWriter,
    frontend_to_scheduler::{FrontendHello, FrontendToControl, FrontendToModelThread},
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
}

/// Who we are, as each scheduler is told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    /// `None` until a scheduler has given us one.
    pub(crate) frontend: Option<FrontendId>,
    pub(crate) standing: Standing,
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

/// All connections to one scheduler. At most [`ModelThreadId::COUNT_MAX`] and one.
#[derive(Debug)]
pub(crate) struct Session {
    /// Of the scheduler, in the list.
    index: usize,
    name: String,
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
    claim: Claim,
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
    /// A session that connects at its first [`Self::handle_timeout`]. Operators are told `name`, and backends
    /// `link_address`.
    pub(crate) fn new(index: usize, name: &str, link_address: &str) -> Self {
        Self {
            index,
            name: name.to_owned(),
            link_address: link_address.to_owned(),
            state: State::Waiting { until: Timestamp::PAST },
            backoff: Backoff::new(RETRY_FIRST, RETRY_MAX),
            clock: ClockSync::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Whether all ModelThreads are up.
    pub(crate) fn has_joined(&self) -> bool {
        matches!(&self.state, State::Welcomed(Scheduler { threads, .. }) if threads.iter().all(|thread| thread.is_up))
    }

    /// What the scheduler claims, once all ModelThreads are up.
    pub(crate) fn claim(&self) -> Option<Claim> {
        match &self.state {
            State::Welcomed(Scheduler { claim, .. }) if self.has_joined() => Some(*claim),
            _ => None,
        }
    }

    /// What the scheduler claims, whether all ModelThreads are up or not.
    pub(crate) fn claimed(&self) -> Option<Claim> {
        if let State::Welcomed(Scheduler { claim, .. }) = &self.state { Some(*claim) } else { None }
    }

    /// The scheduler claims a higher epoch than before.
    pub(crate) fn handle_takeover(&mut self, epoch: Epoch) {
        if let State::Welcomed(Scheduler { claim, .. }) = &mut self.state {
            claim.epoch = epoch;
        }
    }

    /// Whether a welcome may still come.
    pub(crate) fn is_connecting(&self) -> bool {
        matches!(self.state, State::Connecting { .. })
    }

    /// Whether it waits until it may connect.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    /// Whether the scheduler has named us.
    pub(crate) fn is_welcomed(&self) -> bool {
        matches!(self.state, State::Welcomed(_))
    }

    /// The scheduler told its clock.
    pub(crate) fn handle_clock(&mut self, now: Timestamp, reply: ClockReply) {
        self.clock.handle_reply(now, reply);
    }

    /// What is known of the scheduler's clock.
    pub(crate) fn clock(&self) -> &ClockOffset {
        self.clock.offset()
    }

    /// Its ModelThreads; thread 0 is there without an endpoint of its own, too.
    pub(crate) fn threads(&self) -> impl Iterator<Item = ModelThreadId> + use<> {
        let count = match &self.state {
            State::Welcomed(Scheduler { threads, .. }) => threads.len().max(1) as u16,
            _ => 0,
        };
        (0..count).map(ModelThreadId)
    }

    /// Whether this session has such a ModelThread.
    pub(crate) fn has_thread(&self, id: ModelThreadId) -> bool {
        self.threads().any(|thread| thread == id)
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
            (Destination::Scheduler(_), State::Connecting { connection: own @ None }) => *own = Some(connection),
            (Destination::ModelThread { id, .. }, State::Welcomed(Scheduler { threads, .. }))
                if threads.get(usize::from(id.0)).is_some_and(|thread| thread.line.is_none()) =>
            {
                threads[usize::from(id.0)].line = Some(Line::new(connection));
            }
            _ => self.outputs.push_back(SessionOutput::Disconnect { connection }),
        }
    }

    /// A connection is up. If that is the scheduler's welcome, who we are by it: `known_as` if we are known already.
    ///
    /// # Errors
    /// Why the session must be left.
    pub(crate) fn handle_connected(
        &mut self,
        now: Timestamp,
        connection: ConnectionId,
        welcome: &[u8],
        known_as: Option<FrontendId>,
    ) -> Result<Option<FrontendId>, String> {
        if self.is_connecting() && self.owns(connection) {
            let frontend = self.on_welcome(now, connection, welcome, known_as)?;
            self.on_joined();
            return Ok(Some(frontend));
        }
        if let State::Welcomed(Scheduler { threads, .. }) = &mut self.state {
            let is_it = |line: &Line| line.connection == connection;
            if let Some(thread) = threads.iter_mut().find(|thread| thread.line.as_ref().is_some_and(is_it)) {
                thread.is_up = true;
                self.on_joined();
            }
        }
        Ok(None)
    }

    fn on_welcome(
        &mut self,
        now: Timestamp,
        connection: ConnectionId,
        welcome: &[u8],
        known_as: Option<FrontendId>,
    ) -> Result<FrontendId, String> {
        let FrontendWelcome { frontend, model_threads: ModelThreads { addresses, pass }, claim } =
            wincode::deserialize(welcome)
                .map_err(|_| "its welcome does not decode; do both sides run the same version?")?;
        if frontend.0 >= FrontendId::COUNT_MAX {
            return Err(format!("its welcome names us {}, expected less than {}", frontend.0, FrontendId::COUNT_MAX));
        }
        if let Some(known_as) = known_as.filter(|known_as| *known_as != frontend) {
            return Err(format!("its welcome names us {}, expected {} as others do", frontend.0, known_as.0));
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
            let to = Destination::ModelThread { scheduler: self.index, id, address };
            connects.push_back(SessionOutput::Connect { to, hello: hello.clone() });
        }
        tracing::info!("scheduler {} knows us as frontend {}", self.index, frontend.0);
        let threads = addresses.iter().map(|_| Thread { line: None, is_up: false }).collect();
        self.state = State::Welcomed(Scheduler { claim, line: Line::new(connection), threads });
        self.outputs.append(&mut connects);
        self.clock = ClockSync::start(now);
        Ok(frontend)
    }

    /// If that was the last connection.
    fn on_joined(&mut self) {
        if self.has_joined() {
            tracing::info!("joined scheduler {}", self.index);
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
    pub(crate) fn handle_timeout(&mut self, now: Timestamp, identity: Identity) {
        if matches!(self.state, State::Waiting { until } if until <= now) {
            self.state = State::Connecting { connection: None };
            let Identity { frontend: known_as, standing } = identity;
            let (name, link_address) = (self.name.clone(), self.link_address.clone());
            let hello = FrontendHello { name, link_address, known_as, standing };
            let (to, hello) = (Destination::Scheduler(self.index), encode(&SchedulerHello::Frontend(hello)));
            self.outputs.push_back(SessionOutput::Connect { to, hello });
        }
    }

    /// The stamp of a request for the scheduler's clock that is due.
    pub(crate) fn poll_clock_request(&mut self, now: Timestamp) -> Option<Timestamp> {
        if self.is_welcomed() { self.clock.poll_request(now) } else { None }
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
    pub(crate) fn post(&mut self, message: &FrontendToControl) {
        if let State::Welcomed(Scheduler { line, .. }) = &mut self.state {
            push(line, message, &mut self.outputs);
        }
    }

    /// Posts to a ModelThread.
    pub(crate) fn post_to_thread(&mut self, id: ModelThreadId, message: &FrontendToModelThread) {
        let State::Welcomed(Scheduler { line, threads, .. }) = &mut self.state else { return };
        let line = match threads.get_mut(usize::from(id.0)) {
            Some(thread) => thread.line.as_mut(),
            None => Some(line),
        };
        if let Some(line) = line {
            push(line, message, &mut self.outputs);
        }
    }

    /// Posts over the connection that a ModelThread's question came on.
    pub(crate) fn post_back(&mut self, connection: ConnectionId, message: &FrontendToModelThread) {
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

fn push<M>(line: &mut Line, message: &M, outputs: &mut VecDeque<SessionOutput>)
where
    M: wincode::SchemaWrite<wincode::config::DefaultConfig, Src = M>,
{
    let full = line.writer.push(message).expect("every message to the scheduler fits a frame");
    outputs.extend(full.map(|frame| SessionOutput::Send { connection: line.connection, frame }));
}

/// Encodes what a connection begins with.
pub(crate) fn encode<T: wincode::SchemaWrite<wincode::config::DefaultConfig, Src = T>>(value: &T) -> Vec<u8> {
    wincode::serialize(value).expect("encoding into memory cannot fail")
}
