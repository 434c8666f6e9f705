//! Everything that can be set, with its limits.

use std::net::SocketAddr;

use crate::{
    memory::{Access, ProtectionDomain},
    wire::{Psn, QueuePairNumber},
};

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
}

impl PathMtu {
    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Mtu256 => 256,
            Self::Mtu512 => 512,
            Self::Mtu1024 => 1024,
            Self::Mtu2048 => 2048,
            Self::Mtu4096 => 4096,
        }
    }

    /// The largest that fits a link: the power of two not above its MTU less 80 bytes of headers, as Linux's rdma_rxe
    /// chooses. `None` below an MTU of 336.
    #[must_use]
    pub fn for_link(link_mtu_bytes: u32) -> Option<Self> {
        [Self::Mtu4096, Self::Mtu2048, Self::Mtu1024, Self::Mtu512, Self::Mtu256]
            .into_iter()
            .find(|mtu| mtu.bytes() + 80 <= link_mtu_bytes)
    }
}

/// One UDP address and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Where packets come from and go to: the ICRC covers address and port.
    pub local: SocketAddr,
    /// Keys, queue pair numbers and packet sequence numbers derive from it; unpredictable in production.
    pub seed: u64,
    /// The top byte of every queue pair number, so that processes that share an address can be told apart.
    pub queue_pair_prefix: u8,
    /// Queue pairs at once; at most 32,768.
    pub queue_pairs_max: usize,
    /// Regions at once; at most 4,096.
    pub regions_max: usize,
    /// Work requests outstanding or completed but not polled.
    pub completions_max: usize,
}

impl EndpointConfig {
    /// 1,024 queue pairs, 1,024 regions, 65,536 completions.
    #[must_use]
    pub const fn new(local: SocketAddr, seed: u64) -> Self {
        Self { local, seed, queue_pair_prefix: 0, queue_pairs_max: 1_024, regions_max: 1_024, completions_max: 65_536 }
    }
}

/// What a queue pair is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// The regions that it may use.
    pub protection_domain: ProtectionDomain,
    /// Send work requests outstanding.
    pub send_depth: usize,
    /// Receive work requests outstanding.
    pub recv_depth: usize,
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

/// How a peer's kernel fills the IPv4 identification field, which the ICRC covers but a UDP socket does not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Identification {
    /// A socket set up as ours are: 0, or the packet's place in a segmentation run (below 128), with DF. The ICRC check
    /// keeps 25 of its 32 bits.
    #[default]
    SegmentIndex,
    /// Anything, DF or not, as kernels and network cards do. The ICRC check keeps 15 bits.
    Any,
}

/// The other end of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Where its packets go. Packets are accepted from this IP address, from any port.
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
}

/// Where a queue pair stands in its life (IBTA 10.3.1). RESET and INIT are one here: a queue pair is created in INIT.
/// SQD and SQE are absent: nothing needs to drain a send queue, and RC has no SQE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    /// Takes receives; ignores packets.
    Init,
    /// Answers the peer; sends nothing of its own.
    ReadyToReceive,
    /// Works.
    ReadyToSend,
    /// Failed, or stopped by its owner: flushes everything.
    Error,
}
