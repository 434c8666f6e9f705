//! A segmentation batch: packets that one `UDP_SEGMENT` send can carry: all equally long, only the last may be shorter.

use std::net::SocketAddr;

use crate::{
    segments::Windows,
    wire::{
        ICRC_BYTES, QueuePairNumber, Repr,
        icrc::{BATCH_SEGMENTS_MAX, Headers},
    },
};

/// What the kernel accepts in one send: 65,535 bytes with IPv4 and UDP headers.
const BATCH_BYTES_MAX: usize = 65_507;
/// BTH, AETH and ICRC.
const ACKNOWLEDGEMENT_BYTES: usize = 12 + 4 + ICRC_BYTES;

/// A packet ready to be written.
pub(crate) struct Outgoing<'a> {
    pub(crate) repr: Repr,
    /// Where its payload lies.
    pub(crate) payload: Windows<'a>,
    /// Sequence numbers that it takes: more than one for a READ request.
    pub(crate) psns: u32,
}

impl<'a> Outgoing<'a> {
    pub(crate) const fn new(repr: Repr, payload: Windows<'a>) -> Self {
        Self { repr, payload, psns: 1 }
    }
}

/// A segmentation batch being written.
pub(crate) struct SegmentationBatch<'a> {
    buf: &'a mut [u8],
    source: SocketAddr,
    destination: SocketAddr,
    has_icrc: bool,
    /// Of the last packet.
    headers: Option<Headers>,
    segments_max: usize,
    segments: usize,
    segment_bytes: usize,
    bytes: usize,
    /// A shorter packet has ended it.
    closed: bool,
}

impl<'a> SegmentationBatch<'a> {
    /// Of packets that have an ICRC, or zeros in its place.
    pub(crate) fn new(
        buf: &'a mut [u8],
        source: SocketAddr,
        destination: SocketAddr,
        segments_max: usize,
        has_icrc: bool,
    ) -> Self {
        let bytes_max = buf.len().min(BATCH_BYTES_MAX);
        Self {
            buf: &mut buf[..bytes_max],
            source,
            destination,
            has_icrc,
            headers: None,
            segments_max: segments_max.clamp(1, BATCH_SEGMENTS_MAX),
            segments: 0,
            segment_bytes: 0,
            bytes: 0,
            closed: false,
        }
    }

    /// Whether a packet of this length can be the next.
    pub(crate) const fn fits(&self, packet_bytes: usize) -> bool {
        !self.closed
            && self.segments < self.segments_max
            && self.bytes + packet_bytes <= self.buf.len()
            && (self.segments == 0 || packet_bytes <= self.segment_bytes)
    }

    /// Whether an acknowledgement can follow what is there.
    pub(crate) const fn takes_acknowledgement(&self) -> bool {
        self.segments > 0 && self.fits(ACKNOWLEDGEMENT_BYTES)
    }

    /// Writes a packet that fits.
    pub(crate) fn push(&mut self, packet: &Outgoing<'_>) {
        let packet_bytes = packet.repr.packet_bytes();
        let out = &mut self.buf[self.bytes..self.bytes + packet_bytes];
        let payload = packet.repr.emit(out);
        packet.payload.read(payload);
        let (covered, icrc) = out.split_at_mut(packet_bytes - ICRC_BYTES);
        if self.has_icrc {
            let headers = Headers::after(&mut self.headers, self.source, self.destination, covered.len());
            icrc.copy_from_slice(&headers.icrc(self.segments as u16, covered).to_le_bytes());
        } else {
            icrc.fill(0);
        }
        if self.segments == 0 {
            self.segment_bytes = packet_bytes;
        }
        self.closed = packet_bytes < self.segment_bytes;
        self.segments += 1;
        self.bytes += packet_bytes;
    }

    /// What was written, by this queue pair of ours; `None` if nothing was.
    pub(crate) fn finish(self, queue_pair: QueuePairNumber) -> Option<Transmit> {
        (self.segments > 0).then_some(Transmit {
            queue_pair,
            destination: self.destination,
            bytes: self.bytes,
            segment_bytes: self.segment_bytes,
            segments: self.segments,
        })
    }
}

/// A datagram, or a segmentation batch of equally long datagrams (the last may be shorter) that one `UDP_SEGMENT` send
/// can carry.
///
/// Segment k carries an ICRC for IPv4 identification k with DF set: what Linux gives the segments of an unconnected
/// socket with `IP_PMTUDISC_DO` or `IP_PMTUDISC_PROBE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// Ours, that sends it.
    pub queue_pair: QueuePairNumber,
    /// Where to.
    pub destination: SocketAddr,
    /// Bytes written to the buffer, from its start.
    pub bytes: usize,
    /// Bytes of every datagram but the last.
    pub segment_bytes: usize,
    /// Datagrams.
    pub segments: usize,
}
