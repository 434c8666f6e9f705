//! What happened on an endpoint, by cause.

/// Monotonic counts since the endpoint was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Packets accepted.
    pub packets_received: u64,
    /// Packets written.
    pub packets_sent: u64,
    /// Dropped: too short, too long, or not a whole packet.
    pub dropped_malformed: u64,
    /// Dropped: an opcode that we do not speak (UC, RD, XRC, congestion notifications, reserved values).
    pub dropped_unsupported: u64,
    /// Dropped: for no queue pair of ours, or one that is not ready.
    pub dropped_no_queue_pair: u64,
    /// Dropped: from another address or port than the queue pair's peer, or with another partition key.
    pub dropped_wrong_peer: u64,
    /// Dropped: ICRC mismatch.
    pub dropped_icrc: u64,
    /// Dropped: a datagram with another queue key.
    pub dropped_queue_key: u64,
    /// Dropped: a datagram that met no receive, or one that is too short for it.
    pub dropped_no_receive: u64,
    /// Dropped: an acknowledgement or response for nothing that is outstanding.
    pub dropped_ghost: u64,
    /// Asynchronous events that nobody polled in time.
    pub events_lost: u64,
    /// Requests that arrived again.
    pub duplicate_requests: u64,
    /// Gaps in the request sequence that we reported (NAK 0x60).
    pub sequence_errors: u64,
    /// Requests that met no receive (RNR NAK sent).
    pub receiver_not_ready: u64,
    /// Requests that we refused (NAK 0x61, 0x62, 0x63 sent).
    pub requests_refused: u64,
    /// Times that we went back because the peer reported a gap, or a READ response was missing.
    pub retransmits_gap: u64,
    /// Packets that we repeated because the answer took much longer than usual.
    pub probes: u64,
    /// Times that we went back because nothing came back in time.
    pub retransmits_timeout: u64,
}
