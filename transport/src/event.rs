//! What is asked of an endpoint and what it answers.

use std::net::SocketAddr;

use thiserror::Error;

/// What peers may do with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Peers may READ it.
    pub remote_read: bool,
    /// Peers may WRITE it.
    pub remote_write: bool,
}

/// A region as registered with one endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionKey {
    /// Names the region in local work requests, as long as the endpoint lives.
    pub lkey: u32,
    /// Names it in a peer's, in this incarnation; told only to peers that have proved themselves.
    pub rkey: u32,
    /// The remote address of its first byte.
    pub address: u64,
}

/// A connection of one endpoint; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A one-sided transfer between a local registered region and a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Comes back in the completion.
    pub token: u64,
    /// The local region.
    pub lkey: u32,
    /// Where in the local region, in bytes from its start.
    pub local_offset: usize,
    /// The peer's address.
    pub remote_address: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Length.
    pub bytes: usize,
}

/// Something that happened on an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer proved itself and said `hello`; answer with `Endpoint::accept` or `Endpoint::refuse`.
    Incoming {
        /// The new connection.
        connection: ConnectionId,
        /// The TCP address that it came from.
        peer: SocketAddr,
        /// What the peer says of itself.
        hello: Vec<u8>,
    },
    /// A connection that we opened is up; the peer answered `welcome`.
    /// (An accepted one is up, for sends, as soon as `accept` returns.)
    Connected {
        /// What `Endpoint::connect` returned.
        connection: ConnectionId,
        /// What the peer says of itself.
        welcome: Vec<u8>,
    },
    /// A frame arrived.
    Message {
        /// From whom.
        connection: ConnectionId,
        /// As it was given to `Endpoint::send`.
        frame: Vec<u8>,
    },
    /// A READ ended.
    ReadDone {
        /// On which connection.
        connection: ConnectionId,
        /// From its [`Transfer`].
        token: u64,
        /// On success the bytes are in our region.
        result: Result<(), TransferError>,
    },
    /// A WRITE ended.
    WriteDone {
        /// On which connection.
        connection: ConnectionId,
        /// From its [`Transfer`].
        token: u64,
        /// On success the bytes are in the peer's memory.
        result: Result<(), TransferError>,
    },
    /// A peer's WRITE_WITH_IMM landed in our memory.
    Immediate {
        /// From whom.
        connection: ConnectionId,
        /// What the peer told with it.
        immediate: u32,
        /// How much was written.
        bytes: u32,
    },
    /// The connection ended, or never came up. Every transfer outstanding on it has been reported before this.
    Disconnected {
        /// Which; it is not used again.
        connection: ConnectionId,
        /// For the log.
        reason: DisconnectReason,
    },
    /// The device's port went down or has another address: all connections have ended, [`crate::Endpoint::incarnation`]
    /// is another, and no key that peers were told opens anything any more. Tells the new one of each region that peers
    /// may reach.
    KeyChanged {
        /// As before.
        lkey: u32,
        /// What peers are to be told from now on.
        rkey: u32,
    },
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct DisconnectReason {
    /// What the operator is to look at; parts of it are the peer's words.
    pub text: String,
    /// Whether we have ended it because the peer lives and gave no credit.
    pub is_starved: bool,
}

impl DisconnectReason {
    /// Any other reason.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_starved: false }
    }
}

/// Why a transfer failed; its connection ends with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TransferError {
    /// The peer did not acknowledge in time, over all retries.
    #[error("the peer stopped acknowledging")]
    RetriesExceeded,
    /// The peer refused the address or key.
    #[error("the peer refused the remote address or key")]
    RemoteAccess,
    /// The connection ended first.
    #[error("the connection ended")]
    Flushed,
    /// Anything else a queue pair reports.
    #[error("the queue pair failed")]
    QueuePair,
}

/// Why something could not be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PostError {
    /// No such connection, or not up.
    #[error("the connection is not up")]
    NotConnected,
    /// The bounded queue towards this peer is full: it does not keep up.
    #[error("the send queue to this peer is full")]
    QueueFull,
}
