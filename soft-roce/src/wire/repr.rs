//! The headers of a packet as plain values: parsed from a [`Packet`], emitted into a buffer.

use super::{
    BTH_BYTES, DEFAULT_PARTITION_KEY, ICRC_BYTES, Opcode, PacketKind, Psn, QueuePairNumber, packet::Packet,
    packet::field, syndrome::Syndrome,
};

/// RDMA extended transport header (IBTA 9.3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reth {
    /// Virtual address.
    pub address: u64,
    /// Key.
    pub rkey: u32,
    /// Length of the whole transfer.
    pub bytes: u32,
}

/// Atomic extended transport header (IBTA 9.3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtomicEth {
    /// Virtual address.
    pub address: u64,
    /// Key.
    pub rkey: u32,
    /// The new value, or what is added.
    pub swap_or_add: u64,
    /// The expected value.
    pub compare: u64,
}

/// ACK extended transport header (IBTA 9.3.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aeth {
    /// Verdict.
    pub syndrome: Syndrome,
    /// 24 bits: requests that the responder has completed.
    pub message_sequence: u32,
}

/// Datagram extended transport header (IBTA 9.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deth {
    /// Key of the receiving queue.
    pub queue_key: u32,
    /// Sender's queue pair.
    pub source: QueuePairNumber,
}

/// All headers of a packet. An extension that the opcode has is `Some`, every other is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repr {
    /// Opcode.
    pub opcode: Opcode,
    /// SE.
    pub solicited: bool,
    /// M.
    pub migration_request: bool,
    /// P_Key.
    pub partition_key: u16,
    /// FECN.
    pub forward_congestion: bool,
    /// BECN.
    pub backward_congestion: bool,
    /// DestQP.
    pub destination: QueuePairNumber,
    /// AckReq.
    pub ack_request: bool,
    /// PSN.
    pub psn: Psn,
    /// DETH.
    pub deth: Option<Deth>,
    /// FETH.
    pub feth: Option<u32>,
    /// RETH.
    pub reth: Option<Reth>,
    /// AtomicETH.
    pub atomic_eth: Option<AtomicEth>,
    /// AETH.
    pub aeth: Option<Aeth>,
    /// AtomicAckETH: the original value.
    pub atomic_ack_eth: Option<u64>,
    /// ImmDt.
    pub immediate: Option<u32>,
    /// IETH: the rkey to withdraw.
    pub invalidate: Option<u32>,
    /// Payload without pad.
    pub payload_bytes: usize,
}

impl Repr {
    /// An RC packet without extensions.
    #[must_use]
    pub const fn reliable(kind: PacketKind, destination: QueuePairNumber, psn: Psn) -> Self {
        Self {
            opcode: Opcode::reliable(kind),
            solicited: false,
            migration_request: false,
            partition_key: DEFAULT_PARTITION_KEY,
            forward_congestion: false,
            backward_congestion: false,
            destination,
            ack_request: false,
            psn,
            deth: None,
            feth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_ack_eth: None,
            immediate: None,
            invalidate: None,
            payload_bytes: 0,
        }
    }

    /// From a checked packet.
    #[must_use]
    pub fn parse(packet: &Packet<'_>) -> Self {
        Self {
            opcode: packet.opcode(),
            solicited: packet.solicited(),
            migration_request: packet.migration_request(),
            partition_key: packet.partition_key(),
            forward_congestion: packet.forward_congestion(),
            backward_congestion: packet.backward_congestion(),
            destination: packet.destination(),
            ack_request: packet.ack_request(),
            psn: packet.psn(),
            deth: packet.deth(),
            feth: packet.feth(),
            reth: packet.reth(),
            atomic_eth: packet.atomic_eth(),
            aeth: packet.aeth(),
            atomic_ack_eth: packet.atomic_ack_eth(),
            immediate: packet.immediate(),
            invalidate: packet.invalidate(),
            payload_bytes: packet.payload().len(),
        }
    }

    /// Pad bytes after the payload.
    #[must_use]
    pub const fn pad_bytes(&self) -> usize {
        self.payload_bytes.wrapping_neg() & 3
    }

    /// Bytes of the whole packet, BTH to ICRC.
    #[must_use]
    pub const fn packet_bytes(&self) -> usize {
        self.opcode.header_bytes() + self.payload_bytes + self.pad_bytes() + ICRC_BYTES
    }

    /// Writes headers and pad into `buf`, which has [`Self::packet_bytes`] bytes, and returns where the payload goes.
    /// The ICRC, the last four bytes, is for the caller.
    pub fn emit<'a>(&self, buf: &'a mut [u8]) -> &'a mut [u8] {
        debug_assert_eq!(buf.len(), self.packet_bytes());
        self.emit_bth(buf);
        let mut cursor = Cursor { buf, at: BTH_BYTES };
        if let Some(deth) = self.deth {
            cursor.put(&deth.queue_key.to_be_bytes());
            cursor.put(&deth.source.0.to_be_bytes());
        }
        if let Some(feth) = self.feth {
            cursor.put(&feth.to_be_bytes());
        }
        if let Some(reth) = self.reth {
            cursor.put(&reth.address.to_be_bytes());
            cursor.put(&reth.rkey.to_be_bytes());
            cursor.put(&reth.bytes.to_be_bytes());
        }
        if let Some(atomic) = self.atomic_eth {
            cursor.put(&atomic.address.to_be_bytes());
            cursor.put(&atomic.rkey.to_be_bytes());
            cursor.put(&atomic.swap_or_add.to_be_bytes());
            cursor.put(&atomic.compare.to_be_bytes());
        }
        if let Some(aeth) = self.aeth {
            let word = u32::from(aeth.syndrome.value()) << 24 | aeth.message_sequence & 0x00ff_ffff;
            cursor.put(&word.to_be_bytes());
        }
        if let Some(original) = self.atomic_ack_eth {
            cursor.put(&original.to_be_bytes());
        }
        if let Some(word) = self.immediate.or(self.invalidate) {
            cursor.put(&word.to_be_bytes());
        }
        let Cursor { buf, at } = cursor;
        debug_assert_eq!(at, self.opcode.header_bytes(), "{self:?}: extensions do not fit the opcode");
        let (payload, tail) = buf[at..].split_at_mut(self.payload_bytes);
        tail[..self.payload_bytes.wrapping_neg() & 3].fill(0);
        payload
    }

    fn emit_bth(&self, buf: &mut [u8]) {
        buf[field::OPCODE] = self.opcode.value();
        let flag = |on: bool, bit: u8| if on { bit } else { 0 };
        buf[field::FLAGS] = flag(self.solicited, field::SOLICITED)
            | flag(self.migration_request, field::MIGRATION)
            | (self.pad_bytes() as u8) << field::PAD_SHIFT;
        buf[field::PARTITION_KEY].copy_from_slice(&self.partition_key.to_be_bytes());
        buf[field::CONGESTION] =
            flag(self.forward_congestion, field::FECN) | flag(self.backward_congestion, field::BECN);
        buf[field::DESTINATION].copy_from_slice(&self.destination.0.to_be_bytes()[1..]);
        buf[field::ACK_REQUEST] = flag(self.ack_request, field::TOP_BIT);
        buf[field::PSN].copy_from_slice(&self.psn.value().to_be_bytes()[1..]);
    }
}

/// Appends header after header.
struct Cursor<'a> {
    buf: &'a mut [u8],
    at: usize,
}

impl Cursor<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.buf[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}
