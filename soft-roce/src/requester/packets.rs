//! One packet of a posted request, built from its sequence number alone: a repeated one is the same again, but for what
//! of a READ has arrived meanwhile.

use super::{ACK_INTERVAL_PACKETS, Entry, Requester, WINDOW_MIN_PACKETS};
use crate::{
    completion::Status,
    region::RegionTable,
    segmentation_batch::Outgoing,
    segments::Windows,
    wire::{AtomicEth, PacketKind, Position, Psn, QueuePairNumber, Repr, Reth},
    work_request::{Operation, Remote},
};

impl Requester {
    /// The packet of `entry` with number `psn`.
    pub(super) fn packet<'r>(
        &self,
        entry: &Entry,
        psn: Psn,
        peer: QueuePairNumber,
        regions: &'r RegionTable,
    ) -> Result<Outgoing<'r>, Status> {
        match entry.request.operation {
            Operation::Read { remote, .. } => self.read_packet(entry, psn, remote, peer, regions),
            Operation::CompareSwap { remote, compare, swap, .. } => {
                let eth = AtomicEth { address: remote.address, rkey: remote.rkey, swap_or_add: swap, compare };
                self.atomic_packet(entry, psn, PacketKind::CompareSwap, eth, peer, regions)
            }
            Operation::FetchAdd { remote, add, .. } => {
                let eth = AtomicEth { address: remote.address, rkey: remote.rkey, swap_or_add: add, compare: 0 };
                self.atomic_packet(entry, psn, PacketKind::FetchAdd, eth, peer, regions)
            }
            _ => self.push_packet(entry, psn, peer, regions),
        }
    }

    /// A packet of a SEND or WRITE.
    fn push_packet<'r>(
        &self,
        entry: &Entry,
        psn: Psn,
        peer: QueuePairNumber,
        regions: &'r RegionTable,
    ) -> Result<Outgoing<'r>, Status> {
        let index = psn.since(entry.first) as u32;
        let position = Position::of(index, entry.packets);
        let range = entry.range(index, 1, self.mtu_bytes);
        let mut repr = Repr::reliable(push_kind(&entry.request.operation, position), peer, psn);
        match entry.request.operation {
            Operation::SendWithImmediate { immediate, .. } | Operation::WriteWithImmediate { immediate, .. } => {
                repr.immediate = position.ends().then_some(immediate);
            }
            Operation::SendWithInvalidate { rkey, .. } => repr.invalidate = position.ends().then_some(rkey),
            _ => {}
        }
        if let Operation::Write { remote, .. } | Operation::WriteWithImmediate { remote, .. } = entry.request.operation
        {
            let reth = Reth { address: remote.address, rkey: remote.rkey, bytes: entry.segments.bytes() };
            repr.reth = position.begins().then_some(reth);
        }
        // A full window must open again, so its last packet asks too.
        repr.ack_request = (position.ends() && self.asks_at_end(entry))
            || self.repeat.is_some()
            || self.since_ack_request + 1 >= ACK_INTERVAL_PACKETS.min(self.window / 2).max(WINDOW_MIN_PACKETS / 2)
            || self.in_flight.packets + 1 >= self.window;
        repr.solicited = entry.request.solicited && position.ends() && is_noticed(&entry.request.operation);
        repr.payload_bytes = range.len();
        Ok(Outgoing::new(repr, self.local(entry, range, false, regions)?))
    }

    /// Whether the end of this SEND or WRITE is waited for: by our owner, for a round trip, or for its place among what
    /// is queued.
    fn asks_at_end(&self, entry: &Entry) -> bool {
        !self.may_ask_less
            || entry.request.signalled
            || self.timer.wants_round_trip()
            || self.queue.len() > self.config.send_depth / 2
    }

    /// A READ request for the rest of a chunk.
    fn read_packet<'r>(
        &self,
        entry: &Entry,
        psn: Psn,
        remote: Remote,
        peer: QueuePairNumber,
        regions: &'r RegionTable,
    ) -> Result<Outgoing<'r>, Status> {
        let index = psn.since(entry.first) as u32;
        let psns = match self.repeat {
            Some(_) => self.missing_psns(entry, psn),
            None => self.read_psns(entry, psn),
        };
        let range = entry.range(index, psns, self.mtu_bytes);
        let bytes = range.len() as u32;
        self.local(entry, range, true, regions)?;
        let mut repr = Repr::reliable(PacketKind::ReadRequest, peer, psn);
        let address = remote.address.wrapping_add(u64::from(index) * u64::from(self.mtu_bytes));
        repr.reth = Some(Reth { address, rkey: remote.rkey, bytes });
        repr.ack_request = true;
        Ok(Outgoing { repr, payload: Windows::default(), psns })
    }

    /// Numbers from `psn` to the end of its chunk.
    pub(super) fn read_psns(&self, entry: &Entry, psn: Psn) -> u32 {
        let (index, chunk) = (psn.since(entry.first) as u32, self.chunk_packets());
        (chunk - index % chunk).min(entry.packets - index)
    }

    /// The same, or to the first response that has come already.
    pub(super) fn missing_psns(&self, entry: &Entry, psn: Psn) -> u32 {
        let arrived = self.arrivals.first(psn).map(|first| first.since(psn) as u32);
        self.read_psns(entry, psn).min(arrived.unwrap_or(u32::MAX))
    }

    fn atomic_packet<'r>(
        &self,
        entry: &Entry,
        psn: Psn,
        kind: PacketKind,
        eth: AtomicEth,
        peer: QueuePairNumber,
        regions: &'r RegionTable,
    ) -> Result<Outgoing<'r>, Status> {
        self.local(entry, 0..entry.segments.bytes(), true, regions)?;
        let mut repr = Repr::reliable(kind, peer, psn);
        repr.atomic_eth = Some(eth);
        repr.ack_request = true;
        Ok(Outgoing::new(repr, Windows::default()))
    }

    pub(super) fn chunk_packets(&self) -> u32 {
        (self.config.read_chunk_bytes / self.mtu_bytes).max(1)
    }
}

/// The packet kind of a SEND or WRITE at a position.
const fn push_kind(operation: &Operation, position: Position) -> PacketKind {
    match operation {
        Operation::SendWithImmediate { .. } => PacketKind::send(position).with_immediate(),
        Operation::SendWithInvalidate { .. } => PacketKind::send(position).with_invalidate(),
        Operation::Write { .. } => PacketKind::write(position),
        Operation::WriteWithImmediate { .. } => PacketKind::write(position).with_immediate(),
        _ => PacketKind::send(position),
    }
}

/// Whether it completes a receive, so that it can be solicited (IBTA 9.2.3).
const fn is_noticed(operation: &Operation) -> bool {
    !matches!(operation, Operation::Write { .. })
}
