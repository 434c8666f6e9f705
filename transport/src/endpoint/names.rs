//! Connections to names: what is looked up, and who a peer is then.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
};

use proto::Timestamp;

use crate::{
    Address, ConnectionId,
    error::NameError,
    limits::RESOLVE_MAX,
    poller::Waker,
    resolve::{Lookup, Resolver},
};

/// At the other end of a connection.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) at: SocketAddr,
    /// By which we found it, if we did by a name.
    name: Option<Address>,
}

impl Peer {
    pub(super) fn at(at: SocketAddr) -> Self {
        Self { at, name: None }
    }

    pub(super) fn named(name: Address, at: SocketAddr) -> Self {
        Self { at, name: Some(name) }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            None => self.at.fmt(f),
            Some(name) => write!(f, "{name} ({})", self.at.ip()),
        }
    }
}

/// All names that are being looked up.
pub(super) struct Names {
    resolver: Resolver,
    /// Rung for each answer.
    bell: Waker,
    sought: BTreeMap<ConnectionId, Sought>,
}

/// A connection to be.
struct Sought {
    name: Address,
    hello: Vec<u8>,
    lookup: Lookup,
    until: Timestamp,
}

/// What has come of a look-up.
pub(super) struct Found {
    pub(super) id: ConnectionId,
    pub(super) name: Address,
    pub(super) hello: Vec<u8>,
    pub(super) addresses: Result<Vec<SocketAddr>, NameError>,
}

impl Names {
    pub(super) fn new(resolver: Resolver) -> io::Result<Self> {
        Ok(Self { resolver, bell: Waker::new()?, sought: BTreeMap::new() })
    }

    pub(super) fn look_up(&mut self, now: Timestamp, id: ConnectionId, name: Address, hello: Vec<u8>) {
        let bell = self.bell.clone();
        let lookup = self.resolver.look_up(&name, move || bell.wake());
        self.sought.insert(id, Sought { name, hello, lookup, until: now + RESOLVE_MAX });
    }

    /// Nobody waits for this one any more. Yields its name, if it was looked up.
    pub(super) fn give_up(&mut self, id: ConnectionId) -> Option<Address> {
        Some(self.sought.remove(&id)?.name)
    }

    /// How many are being looked up.
    pub(super) fn len(&self) -> usize {
        self.sought.len()
    }

    /// The next one that is found, or whose time is over.
    pub(super) fn poll_found(&mut self, now: Timestamp) -> Option<Found> {
        self.bell.clear();
        let is_done = |sought: &Sought| sought.lookup.answer().is_some() || sought.until <= now;
        let id = *self.sought.iter().find(|(_, sought)| is_done(sought))?.0;
        let Sought { name, hello, lookup, .. } = self.sought.remove(&id)?;
        let late = || Err(NameError::Late { name: name.clone() });
        let addresses = lookup.answer().cloned().unwrap_or_else(late);
        Some(Found { id, name, hello, addresses })
    }

    /// When the time of the first one is over.
    pub(super) fn poll_timeout(&self) -> Timestamp {
        self.sought.values().map(|sought| sought.until).min().unwrap_or(Timestamp::NEVER)
    }
}

impl AsFd for Names {
    /// Readable when [`Names::poll_found`] has something.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests;
