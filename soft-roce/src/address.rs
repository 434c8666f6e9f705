//! Where a datagram goes, or came from.

use std::net::SocketAddr;

use crate::wire::QueuePairNumber;

/// Where a datagram goes to or came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramAddress {
    /// The UDP address. Senders may use any port; a reply to a network card or a kernel goes to 4791.
    pub address: SocketAddr,
    /// The queue pair there.
    pub queue_pair: QueuePairNumber,
}
