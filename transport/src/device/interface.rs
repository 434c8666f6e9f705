//! What an endpoint and a device ask and tell each other, whichever arm it is.

use soft_roce::QueuePairNumber;

/// What an endpoint will ask of its device, at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    /// Queue pairs at once.
    pub queue_pairs_max: usize,
    /// Regions at once.
    pub regions_max: usize,
    /// Send work requests outstanding on one queue pair.
    pub send_depth: usize,
    /// Receives posted on one queue pair.
    pub receive_depth: usize,
    /// READs that a queue pair asks for, and answers, at once.
    pub reads_max: u8,
    /// Bytes of READs outstanding, as configured; 0: what suits the device.
    pub read_budget_bytes: usize,
}

#[cfg(test)]
impl Demand {
    /// One of each.
    pub(crate) const LEAST: Self = Self {
        queue_pairs_max: 1,
        regions_max: 1,
        send_depth: 1,
        receive_depth: 1,
        reads_max: 1,
        read_budget_bytes: 0,
    };
}

/// What a device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Bytes of READs outstanding over all queue pairs.
    pub read_budget_bytes: usize,
    /// The largest READ that is posted as one.
    pub read_bytes_max: usize,
    /// READs that one queue pair keeps outstanding, at least 1.
    pub reads_max: u8,
    /// READs that it answers at once, at least 1.
    pub reads_answered_max: u8,
    /// Bytes that one peer may have in flight towards us.
    pub peer_window_bytes: u32,
}

/// What came of a look for packets, or of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Moved {
    /// There was something.
    pub any: bool,
    /// There may be more.
    pub more: bool,
}

/// Which of a device's descriptors an endpoint's poller watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Descriptor {
    /// Ready when packets or completions have come.
    Data,
    /// Ready when the device has something to tell of itself.
    Events,
}

/// What a device tells of itself.
#[derive(Debug)]
#[cfg_attr(not(feature = "verbs"), expect(dead_code, reason = "most are a verbs device's"))]
pub(crate) enum DeviceEvent {
    /// A queue pair is in ERROR.
    QueuePairFailed { number: QueuePairNumber, reason: String },
    /// No queue pair works any more, and what peers were told of us does not hold: its owner ends all connections, then
    /// calls [`let_go`](super::Device::let_go).
    Lost { reason: String },
    /// A lost device is back, with other descriptors; the local keys of regions that peers may reach, with the remote
    /// keys that these have now.
    OpenedAgain { changed: Vec<(u32, u32)> },
}
