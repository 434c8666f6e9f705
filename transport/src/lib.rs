//! Registered memory and reliable connections. One API, two arms: soft-RoCE now, libibverbs to come.
//!
//! An [`Endpoint`] belongs to one thread. It never blocks except in [`Endpoint::wait`].

use std::{net::SocketAddr, sync::Arc};

use proto::Timestamp;
use thiserror::Error;

/// Which network carries the queue pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arm {
    /// soft-RoCE over a UDP socket bound to this address. A specific IP; port 4791 unless told otherwise.
    Soft {
        /// Where our UDP socket binds.
        address: SocketAddr,
        /// Injected faults, for tests.
        faults: Faults,
    },
}

/// Faults injected under the UDP driver, each a probability per packet in 0 ..= 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Faults {
    /// Packets thrown away.
    pub loss: f64,
    /// Packets sent twice.
    pub duplicate: f64,
    /// Packets sent late, after later ones.
    pub reorder: f64,
    /// Packets with a flipped bit.
    pub corrupt: f64,
}
impl Eq for Faults {}

/// How an endpoint is opened. `Default` gives an endpoint that only connects, on a random 127.x.y.z.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// The network.
    pub arm: Arm,
    /// Where to listen for bootstrap connections (TCP); port 0 lets the system choose.
    pub listen: Option<SocketAddr>,
    /// Both ends of every connection must prove that they know it (HMAC-SHA-256 challenge), before any key is told.
    pub secret: Vec<u8>,
    /// Connections at once, both directions.
    pub connections_max: usize,
    /// Bytes of READs that may be outstanding at once, over all connections, shared fairly.
    pub read_budget_bytes: usize,
}

/// Memory that peers may reach. Cheap to clone; all clones are the same bytes.
#[derive(Clone)]
pub struct Region {
    _bytes: Arc<()>,
}

impl Region {
    /// Allocates zeroed, page-aligned memory (hugepages where there are any).
    pub fn allocate(bytes: usize) -> std::io::Result<Self> {
        let _ = bytes;
        todo!()
    }
    /// Length in bytes.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        todo!()
    }
    /// Copies `bytes` in at `offset`. Panics when out of bounds: our own bug.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let _ = (offset, bytes);
        todo!()
    }
    /// Copies out at `offset`. Panics when out of bounds.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let _ = (offset, into);
        todo!()
    }
}

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
    /// Names the region in local work requests.
    pub lkey: u32,
    /// Names it in a peer's; told only to peers that have proved themselves.
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
#[derive(Debug)]
pub enum Event {
    /// A peer proved itself and said `hello`; answer with [`Endpoint::accept`] or [`Endpoint::refuse`].
    Incoming { connection: ConnectionId, peer: SocketAddr, hello: Vec<u8> },
    /// A connection that we opened is up; the peer answered `welcome`.
    /// (An accepted one is up, for sends, as soon as `accept` returns.)
    Connected { connection: ConnectionId, welcome: Vec<u8> },
    /// A frame arrived.
    Message { connection: ConnectionId, frame: Vec<u8> },
    /// A READ ended.
    ReadDone { connection: ConnectionId, token: u64, result: Result<(), TransferError> },
    /// A WRITE ended: on success the bytes are in the peer's memory.
    WriteDone { connection: ConnectionId, token: u64, result: Result<(), TransferError> },
    /// A peer's WRITE_WITH_IMM landed in our memory.
    Immediate { connection: ConnectionId, immediate: u32, bytes: u32 },
    /// The connection ended, or never came up. Every transfer outstanding on it has been reported before this.
    Disconnected { connection: ConnectionId, reason: DisconnectReason },
}

/// Why a connection ended. The text tells the operator what to look at.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct DisconnectReason(pub String);

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

/// Why an endpoint could not be opened.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct OpenError(pub String);

/// One thread's device: its socket, regions, queue pairs and connections.
pub struct Endpoint {}

#[allow(unused_variables, clippy::missing_errors_doc)]
impl Endpoint {
    /// Opens sockets.
    pub fn open(config: EndpointConfig) -> Result<Self, OpenError> {
        todo!()
    }
    /// Where peers reach our bootstrap listener.
    pub fn listen_address(&self) -> Option<SocketAddr> {
        todo!()
    }
    /// Registers a region.
    pub fn register(&mut self, region: &Region, access: Access) -> RegionKey {
        todo!()
    }
    /// Opens a connection; the outcome comes as `Connected` or `Disconnected`.
    pub fn connect(&mut self, now: Timestamp, to: SocketAddr, hello: Vec<u8>) -> ConnectionId {
        todo!()
    }
    /// Accepts an incoming connection.
    pub fn accept(&mut self, now: Timestamp, connection: ConnectionId, welcome: Vec<u8>) {
        todo!()
    }
    /// Refuses an incoming connection; the peer is told why.
    pub fn refuse(&mut self, now: Timestamp, connection: ConnectionId, reason: &str) {
        todo!()
    }
    /// Moves the queue pair to ERROR at once: when this returns, nothing that the peer sends touches our memory any
    /// more (fencing). Outstanding transfers are reported as `Flushed`, then `Disconnected`.
    pub fn disconnect(&mut self, connection: ConnectionId) {
        todo!()
    }
    /// Sends a frame of at most `proto::frame::FRAME_BYTES_MAX` bytes, in order. Waits for credits in a bounded queue.
    pub fn send(&mut self, connection: ConnectionId, frame: &[u8]) -> Result<(), PostError> {
        todo!()
    }
    /// Pulls a peer's memory into ours.
    pub fn read(&mut self, connection: ConnectionId, transfer: Transfer) -> Result<(), PostError> {
        todo!()
    }
    /// Pushes our memory into a peer's and tells it `immediate`.
    pub fn write_with_immediate(
        &mut self,
        connection: ConnectionId,
        transfer: Transfer,
        immediate: u32,
    ) -> Result<(), PostError> {
        todo!()
    }
    /// Moves packets: receives, runs timers, sends. Never blocks. True if anything was done.
    pub fn drive(&mut self, now: Timestamp) -> bool {
        todo!()
    }
    /// What happened since.
    pub fn poll_event(&mut self) -> Option<Event> {
        todo!()
    }
    /// When [`Self::drive`] must run again even if no packet comes.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        todo!()
    }
    /// Sleeps until a packet or connection comes, or until `until`. With [`Self::waker`] another thread can end it.
    pub fn wait(&mut self, now: Timestamp, until: Timestamp) {
        todo!()
    }
    /// Ends a `wait` from another thread.
    pub fn waker(&self) -> Waker {
        todo!()
    }
}

impl std::os::fd::AsFd for Endpoint {
    /// Readable when [`Endpoint::drive`] has something to do (an epoll instance), so that an event loop of another
    /// library can wait for it.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        todo!()
    }
}

/// Wakes an endpoint's thread (an eventfd).
#[derive(Debug, Clone)]
pub struct Waker {}
impl Waker {
    /// Ends the endpoint's current or next `wait`.
    pub fn wake(&self) {
        todo!()
    }
}

/// This process's monotonic clock. Its epoch is the process's own start, so clocks of two processes differ and the
/// offset must be estimated (`proto::clock`).
#[derive(Debug, Clone, Copy)]
pub struct Clock {}
impl Clock {
    /// Starts a clock.
    pub fn start() -> Self {
        todo!()
    }
    /// Now.
    pub fn now(&self) -> Timestamp {
        todo!()
    }
}
