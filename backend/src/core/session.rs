//! One scheduler of the list, as a backend sees it: the connections to it (its own, and one to each of its
//! ModelThreads where these have their own), its clock, what it says of itself, and what it has announced.
//!
//! A session waits, connects, is welcomed, connects to the ModelThreads that the welcome named, and is joined then. If
//! one of its connections ends it is left as a whole and waits again, longer each time. Messages of one turn leave in
//! as few frames as they fit, on the connection of whoever they are for.
//!
//! Instants are on this process's clock.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::SocketAddr,
};

use proto::{
    BackendId, Claim, FrontendId, ModelId, ModelThreadId, Span, Timestamp,
    backend_to_scheduler::{BackendToControl, BackendToModelThread},
    backoff::Backoff,
    clock::ClockSync,
    frame::{FrameError, FrameWriter},
    hello::ModelThreads,
    scheduler_to_backend::{BackendWelcome, SchedulerToBackend},
};
use transport::{Address, ConnectionId};
use wincode::{SchemaWrite, config::DefaultConfig};

use super::offers::Offers;
use crate::links::{FRONTENDS_MAX, Target, TooManyFrontends};

/// The first wait before a scheduler is tried again; each failure doubles it.
const BACKOFF_MIN: Span = Span::from_millis(50);
/// The longest wait.
const BACKOFF_MAX: Span = Span::from_millis(1_000);

/// Orders that are kept of a primary whose connections are not all up.
const EARLY_MAX: usize = 4_096;

/// Whom a message to a scheduler is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// The place where members join.
    Scheduler,
    /// The ModelThread that made the plan that it is about.
    ModelThread(ModelThreadId),
}

/// All that there is between us and one scheduler.
#[derive(Debug)]
pub(super) struct Session {
    /// Its bootstrap listener.
    pub(super) address: Address,
    /// What it has said of itself since it welcomed us.
    pub(super) claim: Claim,
    pub(super) clock: ClockSync,
    /// Our names of its models, by its own.
    pub(super) models: BTreeMap<ModelId, ModelId>,
    /// The frontends that it has announced.
    pub(super) frontends: BTreeMap<FrontendId, Target>,
    /// It has asked whether we miss the primary: when it is told that we do, unless we hear of the primary before.
    pub(super) question: Option<Timestamp>,
    /// What it wants, if it is the primary, and is not obeyed yet as not all its connections are up. At most
    /// [`EARLY_MAX`].
    early: Vec<SchedulerToBackend>,
    state: State,
    backoff: Backoff,
    offers: Offers,
    /// Models that were measured since it was connected to, by our names: it has yet to be told.
    measured: BTreeSet<ModelId>,
    scheduler: Route,
    /// By id; none if the scheduler's connection is also to its only ModelThread.
    model_threads: Vec<Route>,
    /// Frames that are full, oldest first.
    full: VecDeque<(ConnectionId, Vec<u8>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// There is no connection.
    Waiting { until: Timestamp },
    /// The driver has been asked for a connection.
    Connecting,
    /// It has taken us in; connections to its ModelThreads are on their way.
    Welcomed,
    /// All connections are up.
    Joined,
}

/// What a welcome says that the session does not keep.
#[derive(Debug)]
pub(super) struct Welcomed {
    /// Our id.
    pub(super) backend: BackendId,
    /// For ModelThreads: nobody else knows it.
    pub(super) pass: u64,
    /// Where to connect.
    pub(super) model_threads: Vec<(ModelThreadId, SocketAddr)>,
}

#[derive(Debug, Default)]
struct Route {
    connection: Option<ConnectionId>,
    is_up: bool,
    frame: FrameWriter,
}

impl Session {
    /// With the scheduler at this address, to be connected to at once.
    pub(super) fn new(address: Address) -> Self {
        Self {
            address,
            claim: Claim::default(),
            clock: ClockSync::default(),
            models: BTreeMap::new(),
            frontends: BTreeMap::new(),
            question: None,
            early: Vec::new(),
            state: State::Waiting { until: Timestamp::PAST },
            backoff: Backoff::new(BACKOFF_MIN, BACKOFF_MAX),
            offers: Offers::default(),
            measured: BTreeSet::new(),
            scheduler: Route::default(),
            model_threads: Vec::new(),
            full: VecDeque::new(),
        }
    }

    /// When it is to be connected to; [`Timestamp::NEVER`] if it is already, or is about to be.
    pub(super) fn connects_at(&self) -> Timestamp {
        if let State::Waiting { until } = self.state { until } else { Timestamp::NEVER }
    }

    /// It is about to be connected to, with a hello that has the first page of these.
    pub(super) fn handle_dialled(&mut self, offers: Offers) {
        (self.state, self.offers) = (State::Connecting, offers);
    }

    /// The driver is opening this connection. False if it is not wanted any more.
    pub(super) fn handle_opened(&mut self, reader: Reader, connection: ConnectionId) -> bool {
        let is_awaited = match reader {
            Reader::Scheduler => self.state == State::Connecting,
            Reader::ModelThread(_) => self.state == State::Welcomed,
        };
        let route = self.route_mut(reader).filter(|route| is_awaited && route.connection.is_none());
        route.map(|route| route.connection = Some(connection)).is_some()
    }

    /// A connection is up. Whose it is; `None` if it is none of these.
    pub(super) fn handle_up(&mut self, connection: ConnectionId) -> Option<Reader> {
        let reader = self.reader(connection)?;
        self.route_mut(reader)?.is_up = true;
        if self.state == State::Welcomed {
            self.look_around();
        }
        Some(reader)
    }

    /// The scheduler has taken us in.
    ///
    /// # Errors
    /// One line if the welcome is not what a scheduler of this version says, there are too many ModelThreads, or one
    /// cannot be reached.
    pub(super) fn handle_welcome(&mut self, now: Timestamp, welcome: &[u8]) -> Result<Welcomed, String> {
        let welcome = wincode::deserialize::<BackendWelcome>(welcome).ok();
        let Some(BackendWelcome { backend, models, model_threads, claim }) = welcome else {
            return Err("the scheduler's welcome does not decode; do both sides run the same version?".into());
        };
        let named = parse(&model_threads)?;
        self.model_threads.resize_with(named.len(), Route::default);
        let welcomed = Welcomed { backend, pass: model_threads.pass, model_threads: named };
        self.models = self.offers.handle_answered(models)?.collect();
        (self.claim, self.clock, self.state) = (claim, ClockSync::start(now), State::Welcomed);
        self.look_around();
        Ok(welcomed)
    }

    /// The scheduler names models that we have offered since its welcome.
    ///
    /// # Errors
    /// If those are not as many as we had offered.
    pub(super) fn handle_offered(&mut self, models: Vec<ModelId>) -> Result<(), String> {
        self.models.extend(self.offers.handle_answered(models)?);
        self.look_around();
        Ok(())
    }

    /// A model was measured that it may have been offered.
    pub(super) fn handle_measured(&mut self, model: ModelId) {
        if !matches!(self.state, State::Waiting { .. }) {
            self.measured.insert(model);
        }
    }

    /// A model that it is to be told to be measured: its name and ours. What it has no name for yet waits.
    pub(super) fn poll_measured(&mut self) -> Option<(ModelId, ModelId)> {
        let named = |ours: &ModelId| self.models.iter().find(|(_, known)| *known == ours).map(|(&theirs, _)| theirs);
        let (theirs, ours) = self.measured.iter().find_map(|&ours| Some((named(&ours)?, ours)))?;
        self.measured.remove(&ours);
        Some((theirs, ours))
    }

    /// More of what we host that the scheduler may be told now.
    pub(super) fn poll_offers(&mut self) -> Option<BackendToControl> {
        if self.is_welcomed() { self.offers.poll_page() } else { None }
    }

    /// A connection has ended.
    pub(super) fn handle_down(&mut self, connection: ConnectionId) {
        if let Some(route) = self.reader(connection).and_then(|reader| self.route_mut(reader)) {
            *route = Route::default();
        }
    }

    fn look_around(&mut self) {
        let is_up = self.scheduler.is_up && self.model_threads.iter().all(|route| route.is_up);
        if is_up && self.offers.is_over() {
            self.state = State::Joined;
        }
    }

    /// It wants something, and is not obeyed. False if that counts for nothing, or is too much.
    pub(super) fn handle_early(&mut self, order: SchedulerToBackend) -> bool {
        let may_be_obeyed = self.state == State::Welcomed && self.claim.is_primary() && self.early.len() < EARLY_MAX;
        if may_be_obeyed {
            self.early.push(order);
        }
        may_be_obeyed
    }

    /// What it has wanted before it was obeyed.
    pub(super) fn take_early(&mut self) -> Vec<SchedulerToBackend> {
        std::mem::take(&mut self.early)
    }

    /// It is joined, and stays so: when it fails, it is tried again soon.
    pub(super) fn handle_kept(&mut self) {
        self.backoff.handle_success();
    }

    /// It announces a frontend.
    ///
    /// # Errors
    /// If there are too many.
    pub(super) fn handle_frontend(&mut self, frontend: FrontendId, target: Target) -> Result<(), TooManyFrontends> {
        self.frontends.insert(frontend, target);
        if self.frontends.len() > FRONTENDS_MAX { Err(TooManyFrontends) } else { Ok(()) }
    }

    /// It has failed. Yields the connections that are to be closed; it is tried again later.
    pub(super) fn handle_failed(&mut self, now: Timestamp) -> Vec<ConnectionId> {
        let until = self.backoff.handle_failure(now);
        self.leave(until)
    }

    /// Forgets all but the address. Yields the connections that are to be closed; it is connected to again at `until`.
    pub(super) fn leave(&mut self, until: Timestamp) -> Vec<ConnectionId> {
        let backoff = self.backoff.clone();
        let fresh = Self { backoff, state: State::Waiting { until }, ..Self::new(self.address.clone()) };
        let left = std::mem::replace(self, fresh);
        let routes = std::iter::once(left.scheduler).chain(left.model_threads);
        routes.filter_map(|route| route.connection).collect()
    }

    /// Whose connection this is; `None` if it is none of these.
    pub(super) fn reader(&self, connection: ConnectionId) -> Option<Reader> {
        if self.scheduler.connection == Some(connection) {
            return Some(Reader::Scheduler);
        }
        let index = self.model_threads.iter().position(|route| route.connection == Some(connection))?;
        Some(Reader::ModelThread(ModelThreadId(index as u16)))
    }

    /// Whether the scheduler has taken us in.
    pub(super) fn is_welcomed(&self) -> bool {
        matches!(self.state, State::Welcomed | State::Joined)
    }

    /// Whether we are also connected to all its ModelThreads, and have named all that we host.
    pub(super) fn is_joined(&self) -> bool {
        self.state == State::Joined
    }

    /// How many send plans.
    pub(super) fn plan_senders(&self) -> usize {
        self.model_threads.len().max(1)
    }

    /// Whether its ModelThreads have connections of their own.
    pub(super) fn has_model_threads(&self) -> bool {
        !self.model_threads.is_empty()
    }

    /// Whether this one can be told something.
    pub(super) fn is_up(&self, reader: Reader) -> bool {
        self.route(reader).is_some_and(|route| route.is_up)
    }

    /// What it calls a model; one that it has never named if it does not know it.
    pub(super) fn name_of(&self, model: ModelId) -> ModelId {
        let known = self.models.iter().find(|(_, ours)| **ours == model);
        known.map_or(ModelId(u32::MAX), |(&theirs, _)| theirs)
    }

    /// Adds a message to what leaves next. One for whom there is no connection is lost, like all that it would follow.
    ///
    /// # Errors
    /// If the message alone is larger than a frame.
    pub(super) fn push(&mut self, message: &BackendToControl) -> Result<(), FrameError> {
        self.add(Reader::Scheduler, message)
    }

    /// The same for a ModelThread.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub(super) fn push_to(&mut self, to: ModelThreadId, message: &BackendToModelThread) -> Result<(), FrameError> {
        self.add(Reader::ModelThread(to), message)
    }

    fn add<M>(&mut self, to: Reader, message: &M) -> Result<(), FrameError>
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        let Some(route) = self.route_mut(to) else { return Ok(()) };
        let Some(connection) = route.connection else { return Ok(()) };
        let full = route.frame.push(message)?;
        self.full.extend(full.map(|frame| (connection, frame)));
        Ok(())
    }

    /// The next frame to send.
    pub(super) fn poll_frame(&mut self) -> Option<(ConnectionId, Vec<u8>)> {
        if let Some(full) = self.full.pop_front() {
            return Some(full);
        }
        let mut routes = std::iter::once(&mut self.scheduler).chain(&mut self.model_threads);
        routes.find_map(|route| Some((route.connection?, route.frame.take()?)))
    }

    fn route(&self, reader: Reader) -> Option<&Route> {
        match reader {
            Reader::ModelThread(ModelThreadId(0)) if self.model_threads.is_empty() => Some(&self.scheduler),
            Reader::ModelThread(id) => self.model_threads.get(usize::from(id.0)),
            Reader::Scheduler => Some(&self.scheduler),
        }
    }

    fn route_mut(&mut self, reader: Reader) -> Option<&mut Route> {
        match reader {
            Reader::ModelThread(ModelThreadId(0)) if self.model_threads.is_empty() => Some(&mut self.scheduler),
            Reader::ModelThread(id) => self.model_threads.get_mut(usize::from(id.0)),
            Reader::Scheduler => Some(&mut self.scheduler),
        }
    }
}

/// Where the ModelThreads of a welcome are.
fn parse(named: &ModelThreads) -> Result<Vec<(ModelThreadId, SocketAddr)>, String> {
    if named.addresses.len() > usize::from(ModelThreadId::COUNT_MAX) {
        let found = named.addresses.len();
        return Err(format!("the scheduler names {found} ModelThreads, at most {} fit", ModelThreadId::COUNT_MAX));
    }
    let parsed = (0..).map(ModelThreadId).zip(&named.addresses).map(|(id, text)| match text.parse() {
        Ok(address) => Ok((id, address)),
        Err(_) => Err(format!("ModelThread {}: found address '{}', expected ip:port", id.0, excerpt(text))),
    });
    parsed.collect()
}

/// A peer's text for our log: short, and on one line whatever is in it.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars().take(64).map(|char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char }).collect()
}
