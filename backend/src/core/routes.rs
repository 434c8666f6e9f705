//! The connections to the scheduler: its own, and one to each of its ModelThreads where these have their own. Messages
//! of one turn leave in as few frames as they fit, on the connection of whoever they are for.

use std::{collections::VecDeque, net::SocketAddr};

use proto::{
    ModelThreadId,
    backend_to_scheduler::BackendToScheduler,
    frame::{FrameError, FrameWriter},
    hello::ModelThreads,
};
use transport::ConnectionId;

use super::excerpt;

/// Whom a message to the scheduler is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// The place where members join.
    Scheduler,
    /// The ModelThread that made the plan that it is about.
    ModelThread(ModelThreadId),
}

/// All connections to the scheduler.
#[derive(Debug)]
pub(super) struct Routes {
    scheduler: Route,
    /// By id; none if the scheduler's connection is also to its only ModelThread.
    model_threads: Vec<Route>,
    /// Frames that are full, oldest first.
    full: VecDeque<(ConnectionId, Vec<u8>)>,
}

#[derive(Debug, Default)]
struct Route {
    connection: Option<ConnectionId>,
    is_up: bool,
    frame: FrameWriter,
}

impl Routes {
    pub(super) fn new() -> Self {
        Self { scheduler: Route::default(), model_threads: Vec::new(), full: VecDeque::new() }
    }

    /// The scheduler's welcome named these. Yields where to connect.
    ///
    /// # Errors
    /// One line if there are too many, or one cannot be reached.
    pub(super) fn handle_named(&mut self, named: &ModelThreads) -> Result<Vec<(ModelThreadId, SocketAddr)>, String> {
        if named.addresses.len() > usize::from(ModelThreadId::COUNT_MAX) {
            let found = named.addresses.len();
            return Err(format!("the scheduler names {found} ModelThreads, at most {} fit", ModelThreadId::COUNT_MAX));
        }
        let parsed = (0..).map(ModelThreadId).zip(&named.addresses).map(|(id, text)| match text.parse() {
            Ok(address) => Ok((id, address)),
            Err(_) => Err(format!("ModelThread {}: found address '{}', expected ip:port", id.0, excerpt(text))),
        });
        let addresses = parsed.collect::<Result<Vec<_>, _>>()?;
        self.model_threads.resize_with(addresses.len(), Route::default);
        Ok(addresses)
    }

    /// The driver is opening this connection.
    pub(super) fn handle_opened(&mut self, reader: Reader, connection: ConnectionId) {
        if let Some(route) = self.route_mut(reader) {
            route.connection = Some(connection);
        }
    }

    /// A connection is up. Whose it is; `None` if it is none of these.
    pub(super) fn handle_up(&mut self, connection: ConnectionId) -> Option<Reader> {
        let reader = self.reader(connection)?;
        self.route_mut(reader)?.is_up = true;
        Some(reader)
    }

    /// Whose connection this is; `None` if it is none of these.
    pub(super) fn reader(&self, connection: ConnectionId) -> Option<Reader> {
        if self.scheduler.connection == Some(connection) {
            return Some(Reader::Scheduler);
        }
        let index = self.model_threads.iter().position(|route| route.connection == Some(connection))?;
        Some(Reader::ModelThread(ModelThreadId(index as u16)))
    }

    /// Whether all that were named are connected.
    pub(super) fn are_up(&self) -> bool {
        self.scheduler.is_up && self.model_threads.iter().all(|route| route.is_up)
    }

    /// How many send plans.
    pub(super) fn plan_senders(&self) -> usize {
        self.model_threads.len().max(1)
    }

    /// Whether this one can be told something.
    pub(super) fn is_up(&self, reader: Reader) -> bool {
        self.route(reader).is_some_and(|route| route.is_up)
    }

    /// Adds a message to what leaves next. One for whom there is no connection is lost, like all that it would follow.
    ///
    /// # Errors
    /// If the message alone is larger than a frame.
    pub(super) fn push(&mut self, to: Reader, message: &BackendToScheduler) -> Result<(), FrameError> {
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
