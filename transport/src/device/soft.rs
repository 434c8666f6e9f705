//! The soft arm: soft-RoCE's core on its UDP driver, and on rings in shared memory between processes of one host.
#![allow(clippy::disallowed_methods)] // A driver: it asks the system which address is its own.

mod meeting;
mod rings;

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use proto::Timestamp;
use soft_roce::{
    Completion, Counters, Endpoint as Core, Identification, MemoryWindows, PathMtu, Peer, ProtectionDomain, Psn,
    QueuePairConfig, QueuePairNumber, RecvRequest, RegionConfig, SendRequest, WINDOW_PACKETS_MIN,
    udp::{Driver, DriverConfig, DriverCounters},
};

use rings::Rings;

use super::interface::{Demand, Descriptor, DeviceEvent, Moved, Offer};
use crate::{
    Access, Faults, LocalPath, Region, RegionKey, Sharing,
    bootstrap::{PacketAddress, Parameters, RingName},
    device_memory::{DeviceMemory, Way},
    error::{
        ConnectQueuePairError, CreateQueuePairError, DeviceOpenError, PathMtuError, RegisterError, WorkRequestError,
    },
    poller::Interest,
};

/// What all peers together may have in flight towards us is shared as if there were so many.
const SENDERS_EXPECTED: usize = 8;
/// A READ goes out in pieces of at most this, and never more than an eighth of the budget.
pub(crate) const READ_BYTES_MAX: usize = 256 * 1024;
const READ_BYTES_MIN: usize = 4096;
/// The first retransmission timeout, as an exponent: 4.096 us * 2^11 = 8.4 ms, long against a busy peer's turn and
/// short against a deadline. It doubles seven times, so a queue pair gives up after 2.1 s, as the bootstrap does on
/// silence.
const ACK_TIMEOUT: u8 = 11;

/// How late our own endpoints acknowledge what nobody waits for: a few requests of one client's after another share an
/// acknowledgement. One that does not come is probed for after 5 ms, before the timeout.
const ACK_DELAY: Duration = Duration::from_millis(1);

/// Packets in flight by a ring; one that is full makes its queue pair wait.
const RING_WINDOW_PACKETS: u32 = 128;
/// A READ by a ring goes out in pieces of so much, and asks for so much at once.
const RING_READ_WINDOW_BYTES: u32 = 16 * READ_BYTES_MAX as u32;
/// Turns in which the socket is not looked at, as rings had something: then it is, whatever they have.
const TURNS_WITHOUT_SOCKET: u32 = 16;

/// A UDP socket, rings, and the queue pairs behind them.
pub(crate) struct Soft {
    core: Core,
    udp: Driver,
    rings: Rings,
    /// Turns since the socket was looked at.
    turns_without_socket: u32,
    /// Queue pairs wait for room in rings until then.
    again_at: Option<soft_roce::Timestamp>,
    queue_pair: QueuePairConfig,
    /// The newest protection domain.
    last_domain: ProtectionDomain,
    offer: Offer,
    /// Faults are injected.
    is_faulty: bool,
    /// The owner knows that packets are sent one by one.
    advised: bool,
}

impl Soft {
    pub(super) fn open(
        address: SocketAddr,
        faults: Faults,
        sharing: Sharing,
        local: LocalPath,
        demand: Demand,
    ) -> Result<Self, DeviceOpenError> {
        // Faults are injected into what goes by the socket.
        let rings = Rings::new(local == LocalPath::Ring && !faults.any());
        let rings = rings.map_err(|cause| DeviceOpenError::Udp { address, cause })?;
        let config = DriverConfig { faults, sharing, seed: rand::random(), ..DriverConfig::default() };
        let udp = Driver::open(address, config).map_err(|cause| DeviceOpenError::Udp { address, cause })?;
        let offer = offer(udp.receive_capacity_bytes(), &demand);
        let core = Core::new(soft_roce::EndpointConfig {
            queue_pair_prefix: udp.queue_pair_prefix(),
            seed: rand::random(),
            queue_pairs_max: demand.queue_pairs_max,
            regions_max: demand.regions_max,
            completions_max: demand.queue_pairs_max * (demand.send_depth + demand.receive_depth),
            ..soft_roce::EndpointConfig::new(udp.local(), 0)
        });
        let queue_pair = QueuePairConfig {
            send_depth: demand.send_depth,
            recv_depth: demand.receive_depth,
            max_rd_atomic: demand.reads_max.into(),
            max_dest_rd_atomic: demand.reads_max.into(),
            access: soft_roce::Access {
                local_write: true,
                remote_read: true,
                remote_write: true,
                remote_atomic: false,
            },
            ack_timeout: ACK_TIMEOUT,
            read_window_bytes: u32::try_from(offer.read_budget_bytes).unwrap_or(u32::MAX),
            // A READ's pieces are small enough: cut again, each part would begin and end with batches of one packet or
            // two.
            read_chunk_bytes: offer.read_bytes_max as u32,
            ..QueuePairConfig::default()
        };
        Ok(Self {
            core,
            udp,
            rings,
            turns_without_socket: 0,
            again_at: None,
            queue_pair,
            last_domain: ProtectionDomain::default(),
            offer,
            is_faulty: faults.any(),
            advised: false,
        })
    }

    pub(super) fn offer(&self) -> Offer {
        self.offer
    }

    pub(super) fn address(&self) -> PacketAddress {
        PacketAddress::SoftRoce(self.udp.local())
    }

    pub(super) fn descriptors(&self) -> [(Descriptor, BorrowedFd<'_>, Interest); 2] {
        let interest = if self.udp.wants_write() { Interest::ReadWrite } else { Interest::Read };
        let bells = (Descriptor::Data, self.rings.bells(), Interest::Read);
        [(Descriptor::Data, self.udp.as_fd(), interest), bells]
    }

    pub(crate) fn counters(&self) -> Counters {
        self.core.counters()
    }

    pub(crate) fn counters_of(&self, number: QueuePairNumber) -> Option<&Counters> {
        self.core.counters_of(number)
    }

    pub(crate) fn driver_counters(&self) -> DriverCounters {
        self.udp.counters()
    }

    /// Numbers come again after 2^32, when what had them is long gone.
    #[allow(clippy::unnecessary_wraps, reason = "as each arm is asked")]
    pub(super) fn open_domain(&mut self) -> Result<ProtectionDomain, RegisterError> {
        self.last_domain = ProtectionDomain(self.last_domain.0.wrapping_add(1).max(1));
        Ok(self.last_domain)
    }

    /// Deliberately nothing: here a domain is a number.
    #[allow(clippy::unused_self, reason = "as each arm is asked")]
    pub(super) fn close_domain(&mut self, _: ProtectionDomain) {}

    pub(super) fn register(
        &mut self,
        region: &Region,
        access: Access,
        protection_domain: ProtectionDomain,
    ) -> Result<RegionKey, RegisterError> {
        let access = soft_roce::Access {
            local_write: true,
            remote_read: access.remote_read,
            remote_write: access.remote_write,
            remote_atomic: false,
        };
        let config = RegionConfig { protection_domain, ..access.into() };
        let handle = self.core.register(Arc::new(region.clone()), config)?;
        Ok(RegionKey { lkey: handle.lkey, rkey: handle.rkey, address: handle.address })
    }

    pub(super) fn windows(&self, lkey: u32) -> MemoryWindows {
        self.core.windows(lkey)
    }

    /// The CPU has no way there.
    #[allow(clippy::unused_self, reason = "as each arm is asked")]
    pub(super) fn register_device_memory(&mut self, _: &DeviceMemory) -> Result<(u32, Way), RegisterError> {
        Err(RegisterError::Software)
    }

    pub(super) fn deregister(&mut self, lkey: u32) {
        self.core.deregister(lkey);
    }

    pub(super) fn path_mtu(&self, peer: IpAddr) -> Result<PathMtu, PathMtuError> {
        let local = self.udp.local();
        let link_mtu = || -> io::Result<u32> {
            // Not the packets' socket: that one must stay unconnected.
            let probe = UdpSocket::bind((local.ip(), 0))?;
            probe.connect((peer, local.port()))?;
            let ipv4 = peer.is_ipv4();
            Ok(if ipv4 { rustix::net::sockopt::ip_mtu(&probe) } else { rustix::net::sockopt::ipv6_mtu(&probe) }?)
        };
        let local = local.ip();
        let bytes = link_mtu().map_err(|cause| PathMtuError::NoRoute { local, peer, cause })?;
        // Faults that are injected damage packets within the host, too: the ICRC is to find that.
        let large = (self.is_here(peer) && !self.is_faulty)
            .then(|| PathMtu::within_a_host(bytes, self.offer.peer_window_bytes))
            .flatten();
        large.or_else(|| PathMtu::for_link(bytes)).ok_or(PathMtuError::TooSmall { local, peer, bytes })
    }

    fn is_here(&self, peer: IpAddr) -> bool {
        peer.is_loopback() || peer == self.udp.local().ip()
    }

    /// Has the peer of a queue pair come by a ring, if it is on this host and wants to.
    pub(super) fn invite(&mut self, number: QueuePairNumber, peer: IpAddr) {
        if self.is_here(peer) {
            self.rings.invite(number);
        }
    }

    pub(super) fn ring_name(&self, number: QueuePairNumber) -> RingName {
        self.rings.name(number)
    }

    pub(crate) fn has_ring(&self, number: QueuePairNumber) -> bool {
        self.rings.is_joined(number)
    }

    /// Whether packets have come that no descriptor tells of.
    pub(crate) fn has_come(&self) -> bool {
        self.rings.have_packets()
    }

    pub(super) fn create_queue_pair(
        &mut self,
        protection_domain: ProtectionDomain,
    ) -> Result<QueuePairNumber, CreateQueuePairError> {
        // With room for rings; connecting it lowers that.
        Ok(self.core.create_queue_pair(QueuePairConfig {
            read_window_bytes: self.queue_pair.read_window_bytes.max(RING_READ_WINDOW_BYTES),
            read_chunk_bytes: self.queue_pair.read_chunk_bytes.max(READ_BYTES_MAX as u32),
            protection_domain,
            ..self.queue_pair
        })?)
    }

    pub(super) fn random_psn(&mut self) -> Psn {
        self.core.random_psn()
    }

    pub(super) fn connect_queue_pair(
        &mut self,
        number: QueuePairNumber,
        psn: Psn,
        peer: &Parameters,
        path_mtu: PathMtu,
    ) -> Result<(), ConnectQueuePairError> {
        let (address, identification) = match peer.address {
            PacketAddress::SoftRoce(address) => (address, Identification::SegmentIndex),
            PacketAddress::Roce(address) => (address, Identification::Any),
            PacketAddress::InfiniBand { .. } => {
                return Err(ConnectQueuePairError::PeerOnInfiniBand);
            }
        };
        // Whatever a network card's owner says of it.
        let is_ours = identification == Identification::SegmentIndex;
        let path_mtu = if is_ours { path_mtu } else { path_mtu.min(PathMtu::Mtu4096) };
        // However small the peer's buffer.
        let window_packets = (peer.window_bytes / path_mtu.bytes()).max(WINDOW_PACKETS_MIN);
        let name = if is_ours && self.is_here(address.ip()) { peer.ring } else { RingName::NONE };
        let has_ring = self.rings.join(number, name, address).map_err(ConnectQueuePairError::Ring)?;
        let (path_mtu, window_packets) =
            if has_ring { (rings::MTU, RING_WINDOW_PACKETS) } else { (path_mtu, window_packets) };
        let queue_pair = Peer {
            address,
            queue_pair: QueuePairNumber(peer.queue_pair),
            rq_psn: Psn::new(peer.psn),
            sq_psn: psn,
            path_mtu,
            identification,
            ack_delay: is_ours.then_some(ACK_DELAY),
        };
        self.core.connect_queue_pair(number, queue_pair)?;
        self.core.limit_requests(number, peer.max_dest_rd_atomic.into(), window_packets);
        if !has_ring {
            let QueuePairConfig { read_chunk_bytes, read_window_bytes, .. } = self.queue_pair;
            self.core.limit_reads(number, read_chunk_bytes, read_window_bytes);
        }
        Ok(())
    }

    pub(super) fn post_send(&mut self, number: QueuePairNumber, request: SendRequest) -> Result<(), WorkRequestError> {
        Ok(self.core.post_send(number, request)?)
    }

    pub(super) fn post_recv(&mut self, number: QueuePairNumber, request: RecvRequest) -> Result<(), WorkRequestError> {
        Ok(self.core.post_recv(number, request)?)
    }

    // What only a verbs device has: here the core takes in what is posted.

    pub(super) fn ring(&mut self) {}

    pub(super) fn handle_ready(&mut self, _: Descriptor) {}

    pub(super) fn request_notification(&mut self) -> bool {
        self.rings.lie_down()
    }

    pub(super) fn poll_event(&mut self) -> Option<DeviceEvent> {
        let (number, reason) = self.rings.poll_failed()?;
        Some(DeviceEvent::QueuePairFailed { number, reason })
    }

    /// Looks at the rings, and at the socket where these had nothing: it stays readable, so that its turn comes. Before
    /// a timer misses an answer, it is looked for everywhere.
    pub(super) fn receive(&mut self, now: Timestamp) -> Moved {
        let at = to_core(now);
        let by_rings = self.rings.receive(at, |source, packet| self.core.handle_packet(at, source, packet));
        self.turns_without_socket += 1;
        if by_rings.any && self.turns_without_socket < TURNS_WITHOUT_SOCKET && !self.is_timer_due(now) {
            return by_rings;
        }
        self.turns_without_socket = 0;
        let any = self.udp.receive(at, &mut self.core);
        Moved { any: any || by_rings.any, more: by_rings.more || !self.udp.is_drained() }
    }

    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        self.core.handle_timeout(to_core(now));
    }

    pub(super) fn is_timer_due(&self, now: Timestamp) -> bool {
        self.core.poll_timeout().is_some_and(|due| due <= to_core(now))
    }

    pub(super) fn transmit(&mut self, now: Timestamp) -> Moved {
        let any = self.udp.transmit_beside(to_core(now), &mut self.core, &mut self.rings);
        self.again_at = self.rings.take_blocked().then(|| to_core(now) + rings::AGAIN);
        if !self.advised
            && let Some(advice) = self.udp.segmentation_advice()
        {
            self.advised = true;
            tracing::warn!("{}: {advice}", self.udp.local());
        }
        Moved { any, more: self.udp.is_unfinished() }
    }

    pub(super) fn poll_completion(&mut self) -> Option<Completion> {
        self.core.poll_completion()
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        [self.core.poll_timeout(), self.udp.poll_timeout(), self.again_at].into_iter().flatten().min().map(from_core)
    }

    pub(super) fn modify_to_error(&mut self, number: QueuePairNumber) {
        self.core.modify_to_error(number);
    }

    pub(super) fn destroy_queue_pair(&mut self, number: QueuePairNumber) {
        self.core.destroy_queue_pair(number);
        self.rings.remove(number);
    }
}

/// A port that nobody has at the moment. One that several endpoints share has to be named before it is opened.
pub(super) fn free_port(ip: IpAddr) -> io::Result<u16> {
    Ok(UdpSocket::bind((ip, 0))?.local_addr()?.port())
}

/// One half of the socket's buffer is for the READs that we ask for, the other for what peers send unasked.
fn offer(capacity_bytes: usize, demand: &Demand) -> Offer {
    let configured = demand.read_budget_bytes;
    let read_budget_bytes = if configured == 0 { capacity_bytes / 2 } else { configured };
    let peer_window = capacity_bytes / 2 / SENDERS_EXPECTED;
    Offer {
        read_budget_bytes,
        read_bytes_max: (read_budget_bytes / 8).clamp(READ_BYTES_MIN, READ_BYTES_MAX),
        reads_max: demand.reads_max,
        reads_answered_max: demand.reads_max,
        peer_window_bytes: u32::try_from(peer_window).unwrap_or(u32::MAX).max(1),
    }
}

fn to_core(at: Timestamp) -> soft_roce::Timestamp {
    // Our clocks start after their epoch.
    soft_roce::Timestamp(u64::try_from(at.as_nanos()).unwrap_or(0))
}

fn from_core(at: soft_roce::Timestamp) -> Timestamp {
    Timestamp(i64::try_from(at.0).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(faults: Faults, peer: &str) -> PathMtu {
        let address = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        let soft = Soft::open(address, faults, Sharing::Alone, LocalPath::Ring, Demand::LEAST).unwrap();
        assert_eq!(offer(16 << 20, &Demand::LEAST).peer_window_bytes, 1 << 20);
        let soft = Soft { offer: offer(16 << 20, &Demand::LEAST), ..soft };
        soft.path_mtu(peer.parse().unwrap()).unwrap()
    }

    /// Whatever buffer this system grants.
    #[test]
    fn a_peer_on_this_host_is_offered_packets_without_an_icrc_unless_faults_are_injected() {
        assert_eq!(offered(Faults::default(), "127.0.0.9"), PathMtu::Mtu57344);
        assert_eq!(offered("corrupt=0.01".parse().unwrap(), "127.0.0.9"), PathMtu::Mtu4096);
    }
}
