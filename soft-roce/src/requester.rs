//! The sending side of a queue pair: posted requests become packets (IBTA 9.7.3).
//!
//! Life of a request: posted, it gets the sequence numbers of all its packets, so that request and offset follow from
//! any number; transmitted, within windows; acknowledged or answered (`completer.rs`); completed, in order of posting.
//! Loss is repaired by going back: `next` returns to the oldest number without an answer and everything from there is
//! sent again. Only a hole in READ responses is asked for alone. A READ goes out as requests for chunks with fixed
//! borders, so that a repeated request always lies inside one that the responder remembers.

mod packets;

use std::{collections::VecDeque, ops::Range, time::Duration};

use crate::{
    arrivals::Arrivals,
    completion::{Completion, CompletionOpcode, Status},
    config::{Peer, QueuePairConfig},
    context::Context,
    error::PostError,
    limits::QUEUED_PSNS_MAX,
    loss_timer::{LossTimer, Overdue},
    region::RegionTable,
    segmentation_batch::Outgoing,
    segments::{SegmentList, Windows},
    time::Timestamp,
    wire::{PacketKind, Psn, QueuePairNumber},
    work_request::{Operation, SendRequest},
};

/// IBTA 9.7.3: an unanswered stretch must not grow without asking for an acknowledgement; rdma_rxe asks every 64.
const ACK_INTERVAL_PACKETS: u32 = 64;
/// Fewer packets in flight would be a round trip each.
const WINDOW_MIN_PACKETS: u32 = 16;
/// The window grows by a packet for so many acknowledged.
const WINDOW_GROWTH_PACKETS: u32 = 8;
/// An acknowledgement that may be late is missed after so many delays: the peer's own timer is late as well, by a
/// millisecond where an event loop counts in those, and longer on a busy machine.
const ACK_DELAYS_WAITED: u32 = 4;
/// How often we go back without progress because of gaps, before only the timer may.
const GAP_RETRIES: u32 = 3;

/// Ends the queue pair: what becomes of the request at `psn`. All others are flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) psn: Psn,
    pub(crate) status: Status,
}

/// A posted request with its sequence numbers.
pub(crate) struct Entry {
    pub(crate) request: SendRequest,
    pub(crate) segments: SegmentList,
    pub(crate) first: Psn,
    pub(crate) packets: u32,
}

impl Entry {
    pub(crate) const fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    pub(crate) const fn is_read(&self) -> bool {
        matches!(self.request.operation, Operation::Read { .. })
    }

    /// Whether its sequence numbers are answered one by one, rather than acknowledged in bulk.
    pub(crate) const fn wants_response(&self) -> bool {
        matches!(
            self.request.operation,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }

    /// The part of the message in packet `index`, and in the `packets - 1` that follow.
    pub(crate) fn range(&self, index: u32, packets: u32, mtu_bytes: u32) -> Range<u32> {
        let bytes = self.segments.bytes();
        let end = |packets: u32| (u64::from(packets) * u64::from(mtu_bytes)).min(bytes.into()) as u32;
        end(index)..end(index + packets)
    }
}

/// What is on its way: between `acknowledged` and `next`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct InFlight {
    /// SEND and WRITE packets.
    packets: u32,
    /// READ responses that will come.
    read_packets: u32,
    /// READ and atomic requests.
    reads: usize,
}

/// The sending side of a queue pair.
pub(crate) struct Requester {
    pub(crate) queue: VecDeque<Entry>,
    /// The oldest number without an answer: everything before is done.
    pub(crate) acknowledged: Psn,
    /// The next to transmit; goes back to repair loss.
    pub(crate) next: Psn,
    /// One past the highest ever transmitted: what acknowledgements may name.
    pub(crate) sent: Psn,
    /// One past the last of the queue.
    posted: Psn,
    /// In SQD: requests from here on are held back.
    hold_at: Option<Psn>,
    in_flight: InFlight,
    since_ack_request: u32,
    /// SEND and WRITE packets that may be in flight. After a loss, everything behind it comes to nothing: so it halves,
    /// and grows back to what is configured (after Chiu and Jain, additive increase and multiplicative decrease).
    window: u32,
    /// Packets acknowledged since it grew.
    since_growth: u32,
    timer: LossTimer,
    /// A packet between `acknowledged` and `next` to repeat before anything else.
    repeat: Option<Psn>,
    /// One past what was sent when the oldest packet was repeated as a probe: the answer to that speaks for all of it.
    probed_to: Option<Psn>,
    /// READ responses that came early; none is before `acknowledged`.
    pub(crate) arrivals: Arrivals,
    /// The end of the hole before them that was asked for again.
    pub(crate) hole_end: Psn,
    /// The peer has no receive posted and asked us to wait.
    pub(crate) wait_until: Option<Timestamp>,
    pub(crate) rnr_retries: u32,
    gap_retries: u32,
    /// The last answer that came too early, since progress was made.
    pub(crate) ahead: Option<Psn>,
    mtu_bytes: u32,
    /// The peer acknowledges in time what does not ask for it.
    may_ask_less: bool,
    config: QueuePairConfig,
}

impl Requester {
    pub(crate) fn new(config: QueuePairConfig) -> Self {
        Self {
            queue: VecDeque::new(),
            acknowledged: Psn::default(),
            next: Psn::default(),
            sent: Psn::default(),
            posted: Psn::default(),
            hold_at: None,
            in_flight: InFlight::default(),
            since_ack_request: 0,
            window: config.request_window_packets,
            since_growth: 0,
            timer: LossTimer::new(&config),
            repeat: None,
            probed_to: None,
            arrivals: Arrivals::default(),
            hole_end: Psn::default(),
            wait_until: None,
            rnr_retries: 0,
            gap_retries: 0,
            ahead: None,
            mtu_bytes: 0,
            may_ask_less: false,
            config,
        }
    }

    pub(crate) fn connect(&mut self, peer: &Peer) {
        let first = peer.sq_psn;
        (self.acknowledged, self.next, self.sent, self.posted) = (first, first, first, first);
        self.mtu_bytes = peer.path_mtu.bytes();
        self.may_ask_less = peer.ack_delay.is_some();
        self.timer.connect(first, peer.ack_delay.unwrap_or(Duration::ZERO) * ACK_DELAYS_WAITED);
    }

    pub(crate) fn limit(&mut self, max_rd_atomic: usize, window_packets: u32) {
        self.config.max_rd_atomic = self.config.max_rd_atomic.min(max_rd_atomic.max(1));
        self.config.request_window_packets = self.config.request_window_packets.min(window_packets.max(1));
        self.window = self.window.min(self.config.request_window_packets);
    }

    pub(crate) fn limit_reads(&mut self, chunk_bytes: u32, window_bytes: u32) {
        self.config.read_chunk_bytes = self.config.read_chunk_bytes.min(chunk_bytes.max(1));
        self.config.read_window_bytes = self.config.read_window_bytes.min(window_bytes);
    }

    pub(crate) const fn mtu_bytes(&self) -> u32 {
        self.mtu_bytes
    }

    pub(crate) const fn rnr_retry_limit(&self) -> u8 {
        self.config.rnr_retry
    }

    pub(crate) fn post(&mut self, request: SendRequest, segments: SegmentList) -> Result<(), PostError> {
        let bytes = segments.bytes();
        let packets = bytes.div_ceil(self.mtu_bytes).max(1);
        if packets > QUEUED_PSNS_MAX {
            let limit = QUEUED_PSNS_MAX.saturating_mul(self.mtu_bytes);
            return Err(PostError::TooLong { bytes: bytes.into(), limit });
        }
        let queued = self.queue.front().map_or(0, |front| self.posted.since(front.first) as u32);
        if self.queue.len() >= self.config.send_depth {
            return Err(PostError::QueueFull { key: "send_depth", depth: self.config.send_depth });
        }
        if queued + packets > QUEUED_PSNS_MAX {
            return Err(PostError::TooManyPackets { limit: QUEUED_PSNS_MAX });
        }
        self.queue.push_back(Entry { request, segments, first: self.posted, packets });
        self.posted = self.posted.plus(packets);
        Ok(())
    }

    /// The next packet: one to repeat, or what a window is open for.
    pub(crate) fn peek<'r>(
        &self,
        peer: QueuePairNumber,
        regions: &'r RegionTable,
    ) -> Result<Option<Outgoing<'r>>, Failure> {
        let psn = self.repeat.unwrap_or(self.next);
        if self.wait_until.is_some() || psn == self.hold_at.unwrap_or(self.posted) {
            return Ok(None);
        }
        let entry = self.entry(psn).expect("every number up to `posted` has its request");
        if entry.wants_response() && self.config.max_rd_atomic == 0 {
            // It would wait for ever.
            return Err(Failure { psn, status: Status::LocalQueuePairOperation });
        }
        // What is repeated is counted as in flight already.
        if self.repeat.is_none() && !self.is_open(entry) {
            return Ok(None);
        }
        let outgoing = self.packet(entry, psn, peer, regions);
        outgoing.map(Some).map_err(|status| Failure { psn, status })
    }

    /// Whether there is room in flight for the packet at `next`, which belongs to `entry`.
    fn is_open(&self, entry: &Entry) -> bool {
        let InFlight { packets, read_packets, reads } = self.in_flight;
        if entry.request.fence && reads > 0 {
            return false;
        }
        if !entry.wants_response() {
            return packets < self.window;
        }
        let window = self.config.read_window_bytes / self.mtu_bytes;
        let full = entry.is_read() && read_packets > 0 && read_packets + self.read_psns(entry, self.next) > window;
        !full && reads < self.config.max_rd_atomic
    }

    /// Checks the local memory of a part of a message.
    pub(crate) fn local<'r>(
        &self,
        entry: &Entry,
        range: Range<u32>,
        write: bool,
        regions: &'r RegionTable,
    ) -> Result<Windows<'r>, Status> {
        let windows = entry.segments.windows(range, write, self.config.protection_domain, regions);
        windows.map_err(|_| Status::LocalProtection)
    }

    /// IBTA 10.3.1.4: no request is begun any more; those that were are finished.
    pub(crate) fn drain(&mut self) {
        self.hold_at = Some(self.entry(self.sent.previous()).map_or(self.sent, Entry::end));
    }

    /// Requests that were held back may be begun.
    pub(crate) const fn resume(&mut self) {
        self.hold_at = None;
    }

    /// Whether everything that was begun is finished.
    pub(crate) fn is_drained(&self) -> bool {
        self.hold_at == Some(self.acknowledged)
    }

    /// Notes that what `peek` gave is on its way.
    pub(crate) fn advance(&mut self, now: Timestamp, packet: &Outgoing<'_>) {
        if self.repeat.take().is_some() {
            return;
        }
        let kind = packet.repr.opcode.kind;
        if kind == PacketKind::ReadRequest {
            self.in_flight.read_packets += packet.psns;
            self.in_flight.reads += 1;
        } else if kind.is_atomic() {
            self.in_flight.reads += 1;
        } else {
            self.in_flight.packets += 1;
        }
        self.since_ack_request = if packet.repr.ack_request { 0 } else { self.since_ack_request + 1 };
        let (psn, is_first) = (self.next, self.next == self.sent);
        self.next = self.next.plus(packet.psns);
        if packet.repr.ack_request {
            self.timer.ask(psn, self.next, is_first, now);
        }
        if self.sent.is_before(self.next) {
            self.sent = self.next;
        }
        self.timer.start(now, self.acknowledged);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.wait_until.or(self.timer.poll_timeout())
    }

    pub(crate) fn handle_timeout(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        if let Some(until) = self.wait_until {
            if until <= cx.now {
                self.wait_until = None;
            }
            return Ok(());
        }
        match self.timer.handle_timeout(cx.now) {
            None => {}
            Some(Overdue::ProbeLast) => self.probe(self.last_missing(), cx),
            Some(Overdue::ProbeOldest) => self.probe(self.acknowledged, cx),
            Some(Overdue::Timeout) => {
                (self.gap_retries, self.ahead) = (0, None);
                cx.counters.retransmits_timeout += 1;
                self.shrink_window();
                self.go_back();
                self.timer.on_repeat(cx.now, self.acknowledged);
            }
            Some(Overdue::RetriesExceeded) => {
                return Err(Failure { psn: self.acknowledged, status: Status::RetryExceeded });
            }
        }
        Ok(())
    }

    /// An answer is overdue: repeats one packet.
    fn probe(&mut self, psn: Psn, cx: &mut Context<'_>) {
        if self.repeat(psn) {
            cx.counters.probes += 1;
            // The answer may show the gap once more.
            (self.gap_retries, self.ahead) = (0, None);
            let acknowledges = self.entry(psn).is_some_and(|entry| !entry.wants_response());
            self.probed_to = (acknowledges && psn == self.acknowledged).then_some(self.next);
        }
    }

    /// An acknowledgement has come. If a probe asked for it, what it leaves out is lost.
    pub(crate) fn conclude_probe(&mut self, cx: &mut Context<'_>) {
        if self.probed_to.take().is_some_and(|end| self.acknowledged.is_before(end)) {
            self.repair_gap(cx);
        }
    }

    /// Makes one packet go out again, unless it is still to be sent anyway. Where all is, as we went back and nothing
    /// could be sent since, what came before `next` may be done.
    fn repeat(&mut self, psn: Psn) -> bool {
        if psn.is_before(self.acknowledged) || !psn.is_before(self.next) {
            return false;
        }
        self.repeat = Some(psn);
        if let Some(entry) = self.entry(psn).filter(|_| psn == self.acknowledged) {
            self.hole_end = psn.plus(if entry.is_read() { self.missing_psns(entry, psn) } else { 1 });
        }
        true
    }

    /// The last packet that may be missing, if that can be told from its answer: a response to a READ shows what is
    /// missing before it. To a SEND or WRITE behind a gap there may be none, so the oldest is probed.
    fn last_missing(&self) -> Psn {
        let reads = self.entry(self.acknowledged).is_some_and(Entry::wants_response);
        if !reads || !self.arrivals.is_empty() {
            return self.acknowledged;
        }
        let last = self.next.previous();
        let Some(entry) = self.entry(last).filter(|entry| entry.is_read()) else { return last };
        let index = last.since(entry.first) as u32;
        let chunk = entry.first.plus(index - index % self.chunk_packets());
        if chunk.is_before(self.acknowledged) { self.acknowledged } else { chunk }
    }

    /// Something is missing, and the peer's answer shows it: sends again from the oldest number without an answer, at
    /// once.
    pub(crate) fn repair_gap(&mut self, cx: &mut Context<'_>) {
        if self.may_repair(cx) {
            self.shrink_window();
            self.go_back();
            self.timer.on_repeat(cx.now, self.acknowledged);
        }
    }

    /// READ responses have come although an earlier one is missing: asks again for what is missing before them.
    pub(crate) fn repair_hole(&mut self, cx: &mut Context<'_>) {
        if self.may_repair(cx) && self.repeat(self.acknowledged) {
            self.timer.on_repeat(cx.now, self.acknowledged);
        }
    }

    /// Bounds repairs without progress, so that a peer cannot make us flood it.
    fn may_repair(&mut self, cx: &mut Context<'_>) -> bool {
        let may = self.gap_retries < GAP_RETRIES && self.wait_until.is_none() && self.next != self.acknowledged;
        self.gap_retries += u32::from(may);
        cx.counters.retransmits_gap += u64::from(may);
        may
    }

    fn shrink_window(&mut self) {
        let least = self.config.request_window_packets.min(WINDOW_MIN_PACKETS);
        (self.window, self.since_growth) = ((self.window / 2).max(least), 0);
    }

    fn grow_window(&mut self, acknowledged: u32) {
        if self.window < self.config.request_window_packets {
            self.since_growth += acknowledged;
            let grown = self.window + self.since_growth / WINDOW_GROWTH_PACKETS;
            self.window = grown.min(self.config.request_window_packets);
            self.since_growth %= WINDOW_GROWTH_PACKETS;
        }
    }

    /// Holds all sending until `until`, then begins at the oldest number without an answer.
    pub(crate) fn wait(&mut self, until: Timestamp) {
        self.go_back();
        self.timer.stop();
        self.wait_until = Some(until);
    }

    fn go_back(&mut self) {
        self.next = self.acknowledged;
        self.repeat = None;
        self.probed_to = None;
        self.arrivals.clear();
        self.hole_end = self.acknowledged;
        // After a loss the first packet asks, whoever may wait.
        self.since_ack_request = if self.may_ask_less { ACK_INTERVAL_PACKETS } else { 0 };
        self.recount();
    }

    /// Everything before `psn` is done, and so is what follows without a hole.
    pub(crate) fn acknowledge(&mut self, psn: Psn, number: QueuePairNumber, cx: &mut Context<'_>) {
        if psn == self.acknowledged {
            return;
        }
        let psn = self.arrivals.advance(self.acknowledged, psn);
        self.grow_window(psn.since(self.acknowledged) as u32);
        self.acknowledged = psn;
        if self.next.is_before(psn) {
            self.next = psn;
        }
        (self.rnr_retries, self.gap_retries) = (0, 0);
        self.ahead = None;
        self.repeat = None;
        self.wait_until = None;
        while self.queue.front().is_some_and(|front| !psn.is_before(front.end())) {
            let entry = self.queue.pop_front().expect("just seen");
            if entry.request.signalled {
                let bytes = entry.segments.bytes();
                cx.completions.push(Completion { bytes, ..completion(&entry.request, Status::Success, number) });
            } else {
                cx.completions.release(1);
            }
        }
        self.recount();
        self.timer.on_progress(cx.now, psn, psn != self.sent);
    }

    /// Completes everything that is queued with an error.
    pub(crate) fn flush(&mut self, failure: Option<Failure>, number: QueuePairNumber, cx: &mut Context<'_>) {
        self.wait_until = None;
        self.repeat = None;
        self.arrivals.clear();
        self.timer.stop();
        for entry in self.queue.drain(..) {
            let failed =
                failure.filter(|failure| !failure.psn.is_before(entry.first) && failure.psn.is_before(entry.end()));
            let status = failed.map_or(Status::Flushed, |failure| failure.status);
            cx.completions.push(completion(&entry.request, status, number));
        }
        self.next = self.posted;
        self.acknowledged = self.posted;
        self.sent = self.posted;
        self.in_flight = InFlight::default();
    }

    /// The request that `psn` belongs to.
    pub(crate) fn entry(&self, psn: Psn) -> Option<&Entry> {
        let index = self.queue.partition_point(|entry| !psn.is_before(entry.end()));
        self.queue.get(index).filter(|entry| !psn.is_before(entry.first))
    }

    fn recount(&mut self) {
        let chunk = self.chunk_packets();
        let mut count = InFlight::default();
        for entry in self.queue.iter().take_while(|entry| entry.first.is_before(self.next)) {
            let from = self.acknowledged.since(entry.first).max(0) as u32;
            let to = (self.next.since(entry.first) as u32).min(entry.packets);
            if from == to {
                // We went back into the middle of it.
            } else if entry.is_read() {
                count.read_packets += to - from;
                count.reads += (to.div_ceil(chunk) - from / chunk) as usize;
            } else if entry.wants_response() {
                count.reads += 1;
            } else {
                count.packets += to - from;
            }
        }
        self.in_flight = count;
    }
}

pub(crate) fn completion(request: &SendRequest, status: Status, queue_pair: QueuePairNumber) -> Completion {
    let opcode = match request.operation {
        Operation::Send { .. } | Operation::SendWithImmediate { .. } | Operation::SendWithInvalidate { .. } => {
            CompletionOpcode::Send
        }
        Operation::Write { .. } | Operation::WriteWithImmediate { .. } => CompletionOpcode::Write,
        Operation::Read { .. } => CompletionOpcode::Read,
        Operation::CompareSwap { .. } => CompletionOpcode::CompareSwap,
        Operation::FetchAdd { .. } => CompletionOpcode::FetchAdd,
    };
    Completion {
        queue_pair,
        id: request.id,
        status,
        opcode,
        bytes: 0,
        immediate: None,
        invalidated_rkey: None,
        solicited: false,
        source: None,
    }
}
