//! The UDP driver under an [`Endpoint`]: moves packets between it and a socket, and makes no decision of its own.
//!
//! Every batch of received packets is followed by what the endpoint answers. A packet that the socket has no room for
//! is kept, and nothing is taken from the endpoint meanwhile: its queues are the bound. In steady state nothing is
//! allocated.
//!
//! Several drivers may share one address, of one process or of many: `share` tells how.

mod faults;
mod group;
// Socket options that have no safe wrapper.
#[allow(unsafe_code)]
mod options;
mod process;
mod share;
mod socket;

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

pub use faults::Faults;
use faults::{FaultInjector, Piece};
use group::Group;
use process::Held;
use socket::{Received, Socket};

use crate::{Endpoint, QueuePairNumber, Timestamp, Transmit};

/// Segmentation batches sent by one call of [`Driver::transmit`], so that a long queue does not keep us from receiving.
const BATCHES_PER_CALL: usize = 16;
/// The largest payload of an IPv4 datagram: what UDP_SEGMENT takes at once.
const BATCH_BYTES_MAX: usize = 65_507;
/// A reordered packet that nothing overtakes is sent after this.
const HOLD: Duration = Duration::from_millis(1);

/// What is asked of the system for receiving; it grants at most net.core.rmem_max.
const RECEIVE_BUFFER_BYTES: usize = 8 * 1024 * 1024;

/// How a [`Driver`] is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverConfig {
    /// Injected faults, for tests.
    pub faults: Faults,
    /// Decides the faults, and where the search for a prefix begins; unpredictable in production.
    pub seed: u64,
    /// Who else may have the same address.
    pub sharing: Sharing,
    /// Wanted of the system for received packets; 8 MiB, and what the system grants may be less.
    pub receive_buffer_bytes: usize,
    /// Makes the system refuse UDP_SEGMENT from the first batch on, as some devices do: for tests.
    pub refuse_segmentation: bool,
}

/// Who may have the same address and port. Each driver that shares one has a top byte of queue pair numbers of its own
/// ([`Driver::queue_pair_prefix`]). At most 64 drivers share one, and all must say so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// Nobody.
    #[default]
    Alone,
    /// Drivers of this process, so that each of its threads may have one. Another process is refused the address as
    /// long as it shares it with none, and so are we if it was there first.
    Process,
    /// Drivers of all processes of this user, which must see the same `/dev/shm`.
    User,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            faults: Faults::default(),
            seed: 0,
            sharing: Sharing::Alone,
            receive_buffer_bytes: RECEIVE_BUFFER_BYTES,
            refuse_segmentation: false,
        }
    }
}

/// A way that the packets of some queue pairs take instead of the socket, to a peer that can be reached by it.
pub trait Detour {
    /// How many packets of this queue pair are to go at once: `by_socket` of one whose packets go there; 0: none can go
    /// now.
    fn segments_max(&mut self, queue_pair: QueuePairNumber, by_socket: usize) -> usize;
    /// Takes what [`Endpoint::poll_transmit`] gave, if it is to go this way.
    fn take(&mut self, transmit: &Transmit, packets: &[u8]) -> bool;
}

/// There is none.
impl Detour for () {
    fn segments_max(&mut self, _: QueuePairNumber, by_socket: usize) -> usize {
        by_socket
    }
    fn take(&mut self, _: &Transmit, _: &[u8]) -> bool {
        false
    }
}

/// A socket and what was taken from an endpoint for it.
pub struct Driver {
    socket: Socket,
    /// Where the address is shared.
    group: Option<Group>,
    /// The socket had nothing more when it was read last.
    is_drained: bool,
    /// That was after the last [`Self::transmit`].
    was_read: bool,
    /// The last [`Self::transmit`] ended at its bound.
    is_unfinished: bool,
    /// Where it is this process's; given back after the socket is closed.
    _held: Option<Held>,
    buffer: Box<[u8]>,
    /// The batch in `buffer` that the socket had no room for.
    blocked: Option<Transmit>,
    injection: Option<Injection>,
    counters: DriverCounters,
}

struct Injection {
    injector: FaultInjector,
    /// What is to be sent: of the batch in the buffer, and by itself.
    out: VecDeque<Piece>,
    /// The batch in the buffer.
    batch: Option<Transmit>,
    release_at: Option<Timestamp>,
}

/// What the driver has done and what it could not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DriverCounters {
    /// System calls that received something.
    pub receive_calls: u64,
    /// Segmentation batches sent, each by one system call.
    pub send_calls: u64,
    /// Batches that waited because the socket's buffer was full.
    pub send_blocked: u64,
    /// Batches that the system refused (no route, a firewall, a packet larger than the link) and that were dropped.
    pub send_errors: u64,
}

impl DriverCounters {
    /// Counts what another driver has counted, too.
    pub fn add(&mut self, other: Self) {
        self.receive_calls += other.receive_calls;
        self.send_calls += other.send_calls;
        self.send_blocked += other.send_blocked;
        self.send_errors += other.send_errors;
    }
}

impl Driver {
    /// Binds to a specific address; port 0 lets the system choose. `seed` is the faults'.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub fn bind(address: SocketAddr, faults: Faults, seed: u64) -> io::Result<Self> {
        Self::open(address, DriverConfig { faults, seed, ..DriverConfig::default() })
    }

    /// Binds to a specific address; port 0 lets the system choose.
    ///
    /// # Errors
    /// One line that says what to change: if the address is unspecified, taken, or not this host's, the socket's buffer
    /// too small, the address shared by too many, or a fault no probability.
    pub fn open(address: SocketAddr, config: DriverConfig) -> io::Result<Self> {
        let DriverConfig { faults, seed, .. } = config;
        if let Some((fault, found)) = faults.invalid() {
            let cause = format!("faults.{fault}: found {found}, expected a probability, 0 to 1");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, cause));
        }
        let (socket, held) = match config.sharing {
            Sharing::Process => Held::bind(address, &config).map(|(socket, held)| (socket, Some(held)))?,
            Sharing::Alone | Sharing::User => (Socket::bind(address, &config)?, None),
        };
        let injection = faults.any().then(|| Injection {
            injector: FaultInjector::new(faults, seed, socket.local()),
            out: VecDeque::new(),
            batch: None,
            release_at: None,
        });
        let group = (config.sharing != Sharing::Alone).then(|| Group::join(&socket, seed)).transpose()?;
        Ok(Self {
            socket,
            group,
            is_drained: false,
            was_read: false,
            is_unfinished: false,
            _held: held,
            buffer: vec![0; BATCH_BYTES_MAX].into(),
            blocked: None,
            injection,
            counters: DriverCounters::default(),
        })
    }

    /// The top byte that all queue pair numbers behind this socket must have
    /// ([`EndpointConfig::queue_pair_prefix`](crate::EndpointConfig)); none unless the address is shared.
    #[must_use]
    pub fn queue_pair_prefix(&self) -> Option<u8> {
        self.group.as_ref().map(Group::prefix)
    }

    /// Whether the system was last seen to hand this process its packets: always, unless the address is shared and
    /// [`Self::receive`] and [`Self::transmit`] have not been called for long, or another process has just died.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.group.as_ref().is_none_or(Group::is_reachable)
    }

    /// Where the socket is bound.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        self.socket.local()
    }

    /// Payload bytes that may arrive between two calls of [`Self::receive`] without loss.
    #[must_use]
    pub fn receive_capacity_bytes(&self) -> usize {
        self.socket.receive_capacity_bytes()
    }

    /// Packets that one system call sends; 1 where the system cannot segment (UDP_SEGMENT).
    #[must_use]
    pub fn segments_sent_at_once(&self) -> usize {
        self.socket.segments_max()
    }

    /// Packets that one system call receives as one batch; 1 where the system does not merge (UDP_GRO).
    #[must_use]
    pub fn segments_received_at_once(&self) -> usize {
        self.socket.segments_merged_max()
    }

    /// What to change if packets have to be sent one by one, which costs a system call each. It can turn out at any
    /// time.
    #[must_use]
    pub fn segmentation_advice(&self) -> Option<&'static str> {
        (self.socket.segments_max() == 1).then_some(
            "this system refuses UDP_SEGMENT, so packets are sent one by one: it needs Linux 4.18 or later, and \
             checksum offload on the network device (`ethtool -K DEVICE tx on`)",
        )
    }

    /// Packets that the system threw away because the socket's buffer was full.
    ///
    /// # Errors
    /// If the system does not tell (Linux before 4.12).
    pub fn dropped_packets(&self) -> io::Result<u32> {
        self.socket.dropped_packets()
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> DriverCounters {
        self.counters
    }

    /// Hands the endpoint one batch of received packets. False if there was none.
    pub fn receive(&mut self, now: Timestamp, endpoint: &mut Endpoint) -> bool {
        // An error here is lack of memory or a signal: the packets stay in the socket, and we come back.
        let group = &mut self.group;
        let received = self.socket.receive(|source, datagram| {
            let taken = group.as_mut().is_some_and(|group| group.handle_datagram(now, source, datagram));
            if !taken {
                endpoint.handle_packet(now, source, datagram);
            }
        });
        (self.is_drained, self.was_read) = (matches!(received, Ok(Received::Nothing | Received::All)), true);
        let any = matches!(received, Ok(Received::Some | Received::All));
        self.counters.receive_calls += u64::from(any);
        any
    }

    /// Whether the last [`Self::receive`] has left nothing in the socket.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Whether the last [`Self::transmit`] has left something that the socket may have room for.
    #[must_use]
    pub fn is_unfinished(&self) -> bool {
        self.is_unfinished
    }

    /// Sends what the endpoint has to send, up to a bound. False if there was nothing, or no room for it.
    pub fn transmit(&mut self, now: Timestamp, endpoint: &mut Endpoint) -> bool {
        self.transmit_beside(now, endpoint, &mut ())
    }

    /// The same but for what takes a detour; nothing does where faults are injected.
    pub fn transmit_beside(&mut self, now: Timestamp, endpoint: &mut Endpoint, detour: &mut impl Detour) -> bool {
        self.is_unfinished = false;
        if let Some(group) = &mut self.group {
            group.turn(now, &self.socket, std::mem::take(&mut self.was_read) && self.is_drained);
        }
        if let Some(blocked) = self.blocked.take()
            && !self.send(blocked)
        {
            return false;
        }
        if self.injection.is_some() {
            return self.transmit_injected(now, endpoint);
        }
        for sent in 0..BATCHES_PER_CALL {
            let by_socket = self.socket.segments_max();
            let segments_max = |queue_pair| detour.segments_max(queue_pair, by_socket);
            let next = endpoint.poll_transmit_of(now, &mut self.buffer, segments_max);
            let Some(transmit) = next else { return sent > 0 };
            if !detour.take(&transmit, &self.buffer[..transmit.bytes]) && !self.send(transmit) {
                return sent > 0;
            }
        }
        self.is_unfinished = true;
        true
    }

    /// Whether to call [`Self::transmit`] once the socket can be written.
    #[must_use]
    pub fn wants_write(&self) -> bool {
        self.blocked.is_some() || self.injection.as_ref().is_some_and(|injection| !injection.out.is_empty())
    }

    /// When to call [`Self::transmit`] even if the endpoint has nothing to send.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let release_at = self.injection.as_ref().and_then(|injection| injection.release_at);
        release_at.into_iter().chain(self.group.as_ref().map(Group::poll_timeout)).min()
    }

    /// Sends the batch in the buffer. False if there was no room for it.
    fn send(&mut self, transmit: Transmit) -> bool {
        let batch = &self.buffer[..transmit.bytes];
        let sent = send(&self.socket, transmit.destination, batch, transmit.segment_bytes, &mut self.counters);
        self.blocked = (!sent).then_some(transmit);
        sent
    }

    /// The same as without faults, but that the injector decides what is left of each batch.
    fn transmit_injected(&mut self, now: Timestamp, endpoint: &mut Endpoint) -> bool {
        let mut progressed = false;
        for sent in 1..=BATCHES_PER_CALL {
            if !self.send_pieces() {
                break;
            }
            let Some(injection) = &mut self.injection else { break };
            let Some(batch) = endpoint.poll_transmit(now, &mut self.buffer, self.socket.segments_max()) else { break };
            self.is_unfinished = sent == BATCHES_PER_CALL;
            let bytes = &mut self.buffer[..batch.bytes];
            injection.injector.handle_batch(batch.destination, bytes, batch.segment_bytes, &mut injection.out);
            injection.batch = Some(batch);
            progressed = true;
        }
        let Some(injection) = &mut self.injection else { return false };
        if injection.release_at.is_some_and(|at| now >= at) {
            injection.injector.release(&mut injection.out);
            progressed = true;
        }
        injection.release_at = match injection.release_at.filter(|&at| now < at) {
            _ if !injection.injector.is_holding() => None,
            Some(at) => Some(at),
            None => Some(now + HOLD),
        };
        self.send_pieces();
        progressed
    }

    /// Sends what the injector has put out. False if there was no room for all of it.
    fn send_pieces(&mut self) -> bool {
        let Some(Injection { out, batch, .. }) = &mut self.injection else { return true };
        while let Some(piece) = out.front() {
            let (destination, bytes, segment_bytes) = match (piece, &batch) {
                (Piece::Packet((destination, packet)), _) => (*destination, &packet[..], packet.len()),
                (Piece::Part(part), Some(batch)) => {
                    (batch.destination, &self.buffer[part.clone()], batch.segment_bytes)
                }
                (Piece::Part(_), None) => unreachable!("a part is of the batch that was handed in last"),
            };
            if !send(&self.socket, destination, bytes, segment_bytes, &mut self.counters) {
                return false;
            }
            out.pop_front();
        }
        true
    }
}

/// Sends a batch. False if there was no room for it.
fn send(
    socket: &Socket,
    destination: SocketAddr,
    batch: &[u8],
    segment_bytes: usize,
    counters: &mut DriverCounters,
) -> bool {
    let segmented = socket.segments_max() > 1;
    match socket.send(destination, batch, segment_bytes) {
        Ok(()) => counters.send_calls += 1,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            counters.send_blocked += 1;
            return false;
        }
        Err(_) if segmented && socket.segments_max() == 1 => {
            // The system has just refused to segment. One by one, all segments have identification 0; a peer of ours
            // recovers from that, any other asks for them again.
            for segment in batch.chunks(segment_bytes) {
                let sent = socket.send(destination, segment, segment.len()).is_ok();
                *(if sent { &mut counters.send_calls } else { &mut counters.send_errors }) += 1;
            }
        }
        // The packets are lost as on a wire; the endpoint's timers go on.
        Err(_) => counters.send_errors += 1,
    }
    true
}

impl AsFd for Driver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
