//! What users post: work requests, and why a post is refused.

use thiserror::Error;

use crate::{config::QueuePairState, datagram::DatagramAddress, segments::SegmentList};

/// A piece of local registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// The region.
    pub lkey: u32,
    /// Where in the region, in bytes from its start.
    pub offset: usize,
    /// Length; with 0 the key is not looked at.
    pub bytes: u32,
}

/// A place in the peer's registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// The peer's virtual address.
    pub address: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// What a send-queue work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Fills the peer's next receive.
    Send {
        /// The message.
        local: Segment,
    },
    /// The same, with 32 bits for the receive's completion.
    SendWithImmediate {
        /// The message.
        local: Segment,
        /// Handed to the peer.
        immediate: u32,
    },
    /// The same, and withdraws one of the peer's regions.
    SendWithInvalidate {
        /// The message.
        local: Segment,
        /// The peer's region.
        rkey: u32,
    },
    /// Pushes into the peer's memory; the peer's software does not notice.
    Write {
        /// The data.
        local: Segment,
        /// Where to.
        remote: Remote,
    },
    /// Pushes into the peer's memory and completes the peer's next receive.
    WriteWithImmediate {
        /// The data.
        local: Segment,
        /// Where to.
        remote: Remote,
        /// Handed to the peer.
        immediate: u32,
    },
    /// Pulls from the peer's memory.
    Read {
        /// Where to.
        local: Segment,
        /// Where from.
        remote: Remote,
    },
    /// Replaces the peer's u64 by `swap` if it equals `compare`.
    CompareSwap {
        /// Eight bytes for the original value, host-endian.
        local: Segment,
        /// The u64; a multiple of 8.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds to the peer's u64.
    FetchAdd {
        /// Eight bytes for the original value, host-endian.
        local: Segment,
        /// The u64; a multiple of 8.
        remote: Remote,
        /// Added, wrapping.
        add: u64,
    },
}

impl Operation {
    /// The local memory that it reads or fills, or the first piece of it.
    #[must_use]
    pub const fn local(&self) -> Segment {
        match self {
            Self::Send { local }
            | Self::SendWithImmediate { local, .. }
            | Self::SendWithInvalidate { local, .. }
            | Self::Write { local, .. }
            | Self::WriteWithImmediate { local, .. }
            | Self::Read { local, .. }
            | Self::CompareSwap { local, .. }
            | Self::FetchAdd { local, .. } => *local,
        }
    }
}

/// A send-queue work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendRequest {
    /// Comes back in the completion.
    pub id: u64,
    /// What to do.
    pub operation: Operation,
    /// Whether success is reported; failure always is.
    pub signalled: bool,
    /// Waits until all earlier READs and atomics of the queue pair are complete.
    pub fence: bool,
    /// Marks the peer's completion as solicited.
    pub solicited: bool,
}

impl SendRequest {
    /// Signalled, neither fenced nor solicited.
    #[must_use]
    pub const fn new(id: u64, operation: Operation) -> Self {
        Self { id, operation, signalled: true, fence: false, solicited: false }
    }
}

/// A receive-queue work request: filled by a SEND, or used up by a WRITE_WITH_IMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvRequest {
    /// Comes back in the completion.
    pub id: u64,
    /// Room for the message, or the first piece of it.
    pub segment: Segment,
}

/// A posted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) segments: SegmentList,
}

impl Receive {
    /// A request with the pieces that follow its own, of at most `max_sge` together.
    pub(crate) fn new(request: RecvRequest, more: &[Segment], max_sge: usize) -> Result<Self, PostError> {
        Ok(Self { id: request.id, segments: SegmentList::new(request.segment, more, max_sge)? })
    }
}

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
