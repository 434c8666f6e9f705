//! Why operations fail: one type for each.

use std::net::SocketAddr;

use thiserror::Error;

use crate::{address::DatagramAddress, config::SharedReceiveQueueNumber, state::QueuePairState};

/// Why a work request was not taken. Nothing has happened; no completion will come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PostError {
    /// No such queue pair.
    #[error("the endpoint has no such queue pair")]
    UnknownQueuePair,
    /// Sends need ReadyToSend.
    #[error("the queue pair is in state {0:?}: connect it before posting sends")]
    State(QueuePairState),
    /// No such shared receive queue.
    #[error("the endpoint has no such shared receive queue")]
    UnknownSharedReceiveQueue,
    /// The queue pair has no receive queue of its own.
    #[error("the queue pair takes from a shared receive queue: post there")]
    ReceivesAreShared,
    /// Connected and datagram queue pairs take different requests.
    #[error("the queue pair is of the other service: `post_send` is for connected ones, `post_datagram` for datagrams")]
    Service,
    /// Another address family than our socket's, or a reserved queue pair number.
    #[error("destination {0:?}: expected an address of our own family and a queue pair in 1 ..= 0xfffffe")]
    Destination(DatagramAddress),
    /// As many requests are outstanding as the queue was made for.
    #[error("{key}: the queue holds {depth} requests already: poll completions, or raise it")]
    QueueFull {
        /// The setting that bounds it.
        key: &'static str,
        /// Its value.
        depth: usize,
    },
    /// The messages that are outstanding and this one have more packets than sequence numbers can tell apart.
    #[error("the send queue's messages take {limit} packets at most: poll completions first, or raise the path MTU")]
    TooManyPackets {
        /// Possible.
        limit: u32,
    },
    /// As many requests are outstanding or completed but not polled as the endpoint has room to complete.
    #[error("completions_max: {limit} requests are outstanding or not polled: poll completions, or raise the limit")]
    CompletionQueueFull {
        /// The configured limit.
        limit: usize,
    },
    /// The message is longer than the limit.
    #[error("message of {bytes} bytes: at most {limit} fit; send it in parts, or raise path_mtu")]
    TooLong {
        /// Wanted.
        bytes: u64,
        /// Possible.
        limit: u32,
    },
    /// The scatter/gather list is longer than the queue takes.
    #[error("max_sge: {found} local segments, at most {limit} are allowed; post fewer, or raise the limit (8 at most)")]
    TooManySegments {
        /// Posted.
        found: usize,
        /// The configured limit.
        limit: usize,
    },
    /// An atomic's local memory must have 8 bytes.
    #[error("atomic with {bytes} bytes of local memory: it must have 8")]
    AtomicSegment {
        /// Found.
        bytes: u32,
    },
}

/// Why no queue pair or shared receive queue was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CreateError {
    /// The table is full.
    #[error("queue_pairs_max: all {0} queue pairs are in use; destroy one or raise the limit")]
    Full(usize),
    /// The table of shared receive queues is full.
    #[error("all {0} shared receive queues are in use; destroy one")]
    SharedReceiveQueuesFull(usize),
    /// The shared receive queue does not exist.
    #[error("shared_receive_queue: the endpoint has no shared receive queue {}", .0.0)]
    UnknownSharedReceiveQueue(SharedReceiveQueueNumber),
    /// A setting out of range.
    #[error("{key}: found {found}, expected {expected}")]
    Config {
        /// The field of the configuration.
        key: &'static str,
        /// Its value.
        found: u64,
        /// The range.
        expected: &'static str,
    },
}

/// Why a queue pair was not moved to another state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ModifyError {
    /// No such queue pair.
    #[error("the endpoint has no such queue pair")]
    UnknownQueuePair,
    /// The transition does not exist.
    #[error("the queue pair is in state {from:?}: it cannot go to {to:?} from there")]
    Transition {
        /// Where it is.
        from: QueuePairState,
        /// Where it was to go.
        to: QueuePairState,
    },
    /// Our socket cannot reach that family.
    #[error("peer address {0}: it must be of the same family as our own")]
    AddressFamily(SocketAddr),
    /// More than 24 bits, or a reserved number.
    #[error("peer queue pair {0:#x}: expected 2 ..= 0xfffffe")]
    PeerNumber(u32),
}

/// Why a region was not registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE (IBTA 10.6.3.3).
    #[error("access: remote_write and remote_atomic need local_write too")]
    Access,
    /// The table is full.
    #[error("regions_max: all {0} regions are in use; deregister one or raise the limit")]
    Full(usize),
    /// The range wraps around the end of the address space.
    #[error("address {address:#x}: {bytes} bytes from there run past the end of the address space")]
    Range {
        /// The wanted first address.
        address: u64,
        /// The region's length.
        bytes: usize,
    },
}
