//! Everything that can be set, with its limits.

use std::{net::SocketAddr, time::Duration};

use crate::{
    error::CreateError,
    limits::{DEPTH_MAX, QUEUED_PSNS_MAX, SEGMENTS_MAX},
    memory::{Access, ProtectionDomain},
    wire::{
        HEADER_BYTES_MAX, ICRC_BYTES, LARGE_PACKET_BYTES_MAX, PACKET_BYTES_MAX, Psn, QueuePairNumber,
        icrc::Identification,
    },
};

const _: () = assert!(PathMtu::Mtu4096.packet_bytes_max() == PACKET_BYTES_MAX);
const _: () = assert!(PathMtu::WITHIN_A_HOST[0].packet_bytes_max() == LARGE_PACKET_BYTES_MAX);

/// Packets in flight: fewer would make every few packets wait for a round trip.
pub const WINDOW_PACKETS_MIN: u32 = 4;
/// Headers of IPv6 and UDP before a packet.
const IP_UDP_BYTES: usize = 40 + 8;
const PSN_WINDOW_MAX: u64 = QUEUED_PSNS_MAX as u64;

/// Payload bytes per packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256,
    /// 512 bytes.
    Mtu512,
    /// 1024 bytes: for an Ethernet MTU of 1500.
    Mtu1024,
    /// 2048 bytes.
    Mtu2048,
    /// 4096 bytes: for an Ethernet MTU of at least 4200, or the loopback.
    Mtu4096,
    /// 16,384 bytes, between our own endpoints of one host ([`Self::has_icrc`]).
    Mtu16384,
    /// 57,344 bytes, between our own endpoints of one host: a datagram takes 65,507.
    Mtu57344,
}

impl PathMtu {
    const IBTA: [Self; 5] = [Self::Mtu4096, Self::Mtu2048, Self::Mtu1024, Self::Mtu512, Self::Mtu256];
    /// Those that IBTA does not have.
    const WITHIN_A_HOST: [Self; 2] = [Self::Mtu57344, Self::Mtu16384];

    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Mtu256 => 256,
            Self::Mtu512 => 512,
            Self::Mtu1024 => 1024,
            Self::Mtu2048 => 2048,
            Self::Mtu4096 => 4096,
            Self::Mtu16384 => 16_384,
            Self::Mtu57344 => 57_344,
        }
    }

    /// Whether packets have an ICRC: all that IBTA knows. Those of other sizes never leave the memory of a host, which
    /// damages nothing, so zeros stand in its place and nobody looks at them.
    #[must_use]
    pub const fn has_icrc(self) -> bool {
        self.bytes() <= Self::Mtu4096.bytes()
    }

    /// The longest packet, BTH to ICRC, in bytes.
    #[must_use]
    pub const fn packet_bytes_max(self) -> usize {
        HEADER_BYTES_MAX + self.bytes() as usize + ICRC_BYTES
    }

    /// The largest that fits a link: the power of two not above its MTU less 80 bytes of headers, as Linux's rdma_rxe
    /// chooses. `None` below an MTU of 336.
    #[must_use]
    pub fn for_link(link_mtu_bytes: u32) -> Option<Self> {
        Self::IBTA.into_iter().find(|mtu| mtu.bytes() + 80 <= link_mtu_bytes)
    }

    /// The largest for two of our own endpoints on one host, of which [`WINDOW_PACKETS_MIN`] fit the bytes that may be
    /// in flight. `None` if IBTA's sizes are as good.
    #[must_use]
    pub fn within_a_host(link_mtu_bytes: u32, window_bytes: u32) -> Option<Self> {
        let fits_link = |mtu: Self| mtu.packet_bytes_max() + IP_UDP_BYTES <= link_mtu_bytes as usize;
        let fits_window = |mtu: Self| mtu.bytes() * WINDOW_PACKETS_MIN <= window_bytes;
        Self::WITHIN_A_HOST.into_iter().find(|mtu| fits_link(*mtu) && fits_window(*mtu))
    }

    /// The one of so many bytes, if there is one.
    #[must_use]
    pub fn of_bytes(bytes: u32) -> Option<Self> {
        Self::WITHIN_A_HOST.into_iter().chain(Self::IBTA).find(|mtu| mtu.bytes() == bytes)
    }
}

/// One UDP address and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Where packets come from and go to: the ICRC covers address and port.
    pub local: SocketAddr,
    /// Keys, queue pair numbers and packet sequence numbers derive from it, all their bits: 32 bytes of the system's
    /// randomness in production.
    pub seed: [u8; 32],
    /// The top byte of every queue pair number, so that processes that share an address can be told apart. Without it,
    /// that byte is random too.
    pub queue_pair_prefix: Option<u8>,
    /// Queue pairs at once; at most 32,768.
    pub queue_pairs_max: usize,
    /// Regions at once; at most 4,096.
    pub regions_max: usize,
    /// Work requests outstanding or completed but not polled.
    pub completions_max: usize,
}

impl EndpointConfig {
    /// 1,024 queue pairs, 1,024 regions, 65,536 completions. What follows from so short a seed can be guessed.
    #[must_use]
    pub const fn new(local: SocketAddr, seed: u64) -> Self {
        let mut bytes = [0; 32];
        bytes.split_at_mut(8).0.copy_from_slice(&seed.to_le_bytes());
        Self {
            local,
            seed: bytes,
            queue_pair_prefix: None,
            queue_pairs_max: 1_024,
            regions_max: 1_024,
            completions_max: 65_536,
        }
    }
}

/// What a queue pair is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// The regions that it may use.
    pub protection_domain: ProtectionDomain,
    /// Send work requests outstanding.
    pub send_depth: usize,
    /// Receive work requests outstanding, unless they are shared.
    pub recv_depth: usize,
    /// Pieces of local memory of one request or receive, 1 ..= [`SEGMENTS_MAX`](crate::SEGMENTS_MAX).
    pub max_sge: usize,
    /// Takes receives from there instead of from a queue of its own.
    pub shared_receive_queue: Option<SharedReceiveQueueNumber>,
    /// READs and atomics that we keep outstanding; at most the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: usize,
    /// READs and atomics that the peer may keep outstanding.
    pub max_dest_rd_atomic: usize,
    /// How often an unanswered packet is sent again before the queue pair gives up, 0 ..= 7.
    pub retry_count: u8,
    /// How often a request that met no receive is sent again, 0 ..= 6; 7: for ever.
    pub rnr_retry: u8,
    /// The retransmission timeout is 4.096 us * 2^this, 1 ..= 31, doubled with each retry; 0: never.
    pub ack_timeout: u8,
    /// The code of the time that we ask a peer to wait when no receive is posted (IBTA table 45), 0 ..= 31.
    pub min_rnr_timer: u8,
    /// What the peer may do over this queue pair.
    pub access: Access,
    /// SEND and WRITE packets in flight: they must fit the peer's socket buffer.
    pub request_window_packets: u32,
    /// A READ is split into requests of at most this; rounded down to whole packets, but at least one.
    pub read_chunk_bytes: u32,
    /// READ response bytes in flight: they must fit our own socket buffer. At least one chunk always goes out.
    pub read_window_bytes: u32,
}

impl Default for QueuePairConfig {
    fn default() -> Self {
        Self {
            protection_domain: ProtectionDomain(0),
            send_depth: 256,
            recv_depth: 256,
            max_sge: 4,
            shared_receive_queue: None,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            retry_count: 7,
            rnr_retry: 7,
            ack_timeout: 12,
            min_rnr_timer: 1,
            access: Access::ALL,
            request_window_packets: 128,
            read_chunk_bytes: 64 * 1024,
            read_window_bytes: 256 * 1024,
        }
    }
}

impl QueuePairConfig {
    /// The same with windows that overrun neither socket, however late either end reads: READs are split and kept to
    /// half of what our own holds (`udp::Driver::receive_capacity_bytes`), SENDs and WRITEs to half
    /// of what the peer's holds. The other halves are for what the other end asks for, and for packets smaller than the
    /// capacity counts with. Queue pairs that share a socket must share its capacity too.
    #[must_use]
    pub fn within(self, own_capacity_bytes: usize, peer_capacity_bytes: usize, path_mtu: PathMtu) -> Self {
        let half = |capacity_bytes: usize| u32::try_from(capacity_bytes / 2).unwrap_or(u32::MAX);
        Self {
            read_window_bytes: half(own_capacity_bytes),
            read_chunk_bytes: half(own_capacity_bytes).max(1),
            request_window_packets: (half(peer_capacity_bytes) / path_mtu.bytes()).max(1),
            ..self
        }
    }
}

/// The other end of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Where its packets go. Packets are accepted from this IP address, and, as `identification` says, from this port
    /// or any.
    pub address: SocketAddr,
    /// Its queue pair.
    pub queue_pair: QueuePairNumber,
    /// The first packet sequence number that it sends.
    pub rq_psn: Psn,
    /// The first that we send.
    pub sq_psn: Psn,
    /// Payload bytes per packet, the same at both ends.
    pub path_mtu: PathMtu,
    /// How strictly its ICRC can be checked.
    pub identification: Identification,
    /// Both ends agree that a SEND or WRITE whose end nobody waits for (it is not signalled) asks for no
    /// acknowledgement, and gets one all the same within this time. `None`: the last packet of every message asks, as
    /// those of Linux's rdma_rxe do, and what does not ask is acknowledged with what does.
    pub ack_delay: Option<Duration>,
}

impl Peer {
    /// Whether its packets can come from there.
    pub(crate) fn sends_from(&self, source: SocketAddr) -> bool {
        let is_any_port = self.identification == Identification::Any;
        self.address.ip() == source.ip() && (is_any_port || self.address.port() == source.port())
    }
}

impl QueuePairConfig {
    pub(crate) fn check(&self) -> Result<(), CreateError> {
        let checks = [
            ("send_depth", self.send_depth as u64, 1, DEPTH_MAX, "1 ..= 65536"),
            ("recv_depth", self.recv_depth as u64, 0, DEPTH_MAX, "0 ..= 65536"),
            max_sge_limit(self.max_sge),
            ("max_rd_atomic", self.max_rd_atomic as u64, 0, 255, "0 ..= 255"),
            ("max_dest_rd_atomic", self.max_dest_rd_atomic as u64, 0, 255, "0 ..= 255"),
            ("retry_count", self.retry_count.into(), 0, 7, "0 ..= 7"),
            ("rnr_retry", self.rnr_retry.into(), 0, 7, "0 ..= 7"),
            ("ack_timeout", self.ack_timeout.into(), 0, 31, "0 ..= 31"),
            ("min_rnr_timer", self.min_rnr_timer.into(), 0, 31, "0 ..= 31"),
            ("request_window_packets", self.request_window_packets.into(), 1, PSN_WINDOW_MAX, "1 ..= 4194304"),
            ("read_chunk_bytes", self.read_chunk_bytes.into(), 1, u64::from(u32::MAX), "at least 1"),
        ];
        in_range(&checks)
    }
}

/// Key, value, least, most, and both in words.
pub(crate) type Limit = (&'static str, u64, u64, u64, &'static str);

pub(crate) const fn max_sge_limit(max_sge: usize) -> Limit {
    const { assert!(SEGMENTS_MAX == 8, "the text below, and that of `PostError::TooManySegments`") };
    ("max_sge", max_sge as u64, 1, SEGMENTS_MAX as u64, "1 ..= 8")
}

pub(crate) fn in_range(limits: &[Limit]) -> Result<(), CreateError> {
    let wrong = limits.iter().find(|(_, found, min, max, _)| !(min..=max).contains(&found));
    wrong.map_or(Ok(()), |&(key, found, _, _, expected)| Err(CreateError::Config { key, found, expected }))
}

/// Names a shared receive queue of an endpoint. Assigned by the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SharedReceiveQueueNumber(pub u32);

/// What a shared receive queue is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedReceiveQueueConfig {
    /// The regions that its receives may fill, whichever queue pair takes them.
    pub protection_domain: ProtectionDomain,
    /// Receives outstanding, 1 ..= 65536.
    pub depth: usize,
    /// Pieces of local memory of one receive, 1 ..= [`SEGMENTS_MAX`](crate::SEGMENTS_MAX).
    pub max_sge: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_within_a_host_fit_its_link_and_a_few_of_them_the_window() {
        let found = |link, window| PathMtu::within_a_host(link, window).map(PathMtu::bytes);
        assert_eq!(found(65_536, 1 << 20), Some(57_344));
        assert_eq!(found(65_536, 4 * 57_344 - 1), Some(16_384));
        assert_eq!(found(65_536, 4 * 16_384 - 1), None);
        assert_eq!(found(57_344, 1 << 20), Some(16_384));
        assert_eq!(found(9_000, 1 << 20), None);
        let known = [256, 512, 1_024, 2_048, 4_096, 16_384, 57_344].map(|bytes| PathMtu::of_bytes(bytes).unwrap());
        assert_eq!(known.map(PathMtu::has_icrc), [true, true, true, true, true, false, false]);
        assert_eq!(PathMtu::of_bytes(8_192), None);
    }
}
