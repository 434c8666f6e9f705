//! What users post: work requests, and why a post is refused.

use crate::{error::PostError, memory::Segment, segments::SegmentList};

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
