//! Bounds that several parts know.

/// Most pieces of one message.
pub const SEGMENTS_MAX: usize = 8;

/// Sequence numbers that the queued requests take together. Below 2^23, so that all can be compared.
pub(crate) const QUEUED_PSNS_MAX: u32 = 1 << 22;

pub(crate) const DEPTH_MAX: u64 = 65_536;

/// Shared receive queues of one endpoint.
pub(crate) const SHARED_RECEIVE_QUEUES_MAX: usize = 1_024;
