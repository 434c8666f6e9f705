//! A checked view of a received packet: BTH, extension headers, payload, pad, ICRC.
//!
//! After [`Packet::new_checked`] no accessor can panic.

use super::{
    BTH_BYTES, DEFAULT_PARTITION_KEY, ICRC_BYTES, LARGE_PACKET_BYTES_MAX, Opcode, Psn, QueuePairNumber,
    TransportService,
    repr::{Aeth, AtomicEth, Deth, Reth},
    syndrome::Syndrome,
};

/// Byte ranges inside the BTH (IBTA 9.2.1).
pub(super) mod field {
    use std::ops::Range;

    pub(crate) const OPCODE: usize = 0;
    /// Solicited event, MigReq, two bits of pad count, four of version.
    pub(crate) const FLAGS: usize = 1;
    pub(crate) const PARTITION_KEY: Range<usize> = 2..4;
    /// FECN, BECN, six reserved bits; masked in the ICRC.
    pub(crate) const CONGESTION: usize = 4;
    pub(crate) const DESTINATION: Range<usize> = 5..8;
    pub(crate) const ACK_REQUEST: usize = 8;
    pub(crate) const PSN: Range<usize> = 9..12;

    pub(crate) const SOLICITED: u8 = 0x80;
    pub(crate) const MIGRATION: u8 = 0x40;
    pub(crate) const PAD_SHIFT: u32 = 4;
    pub(crate) const VERSION_MASK: u8 = 0x0f;
    pub(crate) const TOP_BIT: u8 = 0x80;
    pub(crate) const FECN: u8 = 0x80;
    pub(crate) const BECN: u8 = 0x40;
}

/// Why bytes are no packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// Shorter than its headers, pad and ICRC.
    TooShort,
    /// Longer than any packet, or not a multiple of four.
    Length,
    /// A transport header version other than 0.
    Version,
    /// An opcode that we do not decode.
    Opcode,
}

/// A received packet.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    bytes: &'a [u8],
    opcode: Opcode,
}

fn u24(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

impl<'a> Packet<'a> {
    /// Checks lengths, version and opcode; not the ICRC.
    ///
    /// # Errors
    /// See [`Malformed`].
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, Malformed> {
        if bytes.len() < BTH_BYTES + ICRC_BYTES {
            return Err(Malformed::TooShort);
        }
        if bytes.len() > LARGE_PACKET_BYTES_MAX || !bytes.len().is_multiple_of(4) {
            return Err(Malformed::Length);
        }
        if bytes[field::FLAGS] & field::VERSION_MASK != 0 {
            return Err(Malformed::Version);
        }
        let opcode = Opcode::from_value(bytes[field::OPCODE]).ok_or(Malformed::Opcode)?;
        let packet = Self { bytes, opcode };
        let tail = bytes.len() - ICRC_BYTES;
        if opcode.header_bytes() + packet.pad_count() > tail {
            return Err(Malformed::TooShort);
        }
        Ok(packet)
    }

    /// Opcode.
    #[must_use]
    pub const fn opcode(&self) -> Opcode {
        self.opcode
    }
    /// SE.
    #[must_use]
    pub fn solicited(&self) -> bool {
        self.bytes[field::FLAGS] & field::SOLICITED != 0
    }
    /// M; means nothing here.
    #[must_use]
    pub fn migration_request(&self) -> bool {
        self.bytes[field::FLAGS] & field::MIGRATION != 0
    }
    /// Pad bytes, 0 ..= 3.
    #[must_use]
    pub fn pad_count(&self) -> usize {
        usize::from(self.bytes[field::FLAGS] >> field::PAD_SHIFT & 3)
    }
    /// Partition key.
    #[must_use]
    pub fn partition_key(&self) -> u16 {
        u16::from_be_bytes([self.bytes[field::PARTITION_KEY.start], self.bytes[field::PARTITION_KEY.start + 1]])
    }
    /// Whether it belongs to the default partition: the low fifteen bits decide.
    #[must_use]
    pub fn is_default_partition(&self) -> bool {
        self.partition_key() | 0x8000 == DEFAULT_PARTITION_KEY
    }
    /// FECN.
    #[must_use]
    pub fn forward_congestion(&self) -> bool {
        self.bytes[field::CONGESTION] & field::FECN != 0
    }
    /// BECN.
    #[must_use]
    pub fn backward_congestion(&self) -> bool {
        self.bytes[field::CONGESTION] & field::BECN != 0
    }
    /// Destination queue pair.
    #[must_use]
    pub fn destination(&self) -> QueuePairNumber {
        QueuePairNumber(u24(&self.bytes[field::DESTINATION]))
    }
    /// AckReq.
    #[must_use]
    pub fn ack_request(&self) -> bool {
        self.bytes[field::ACK_REQUEST] & field::TOP_BIT != 0
    }
    /// Packet sequence number.
    #[must_use]
    pub fn psn(&self) -> Psn {
        Psn::new(u24(&self.bytes[field::PSN]))
    }

    /// DETH, on UD.
    #[must_use]
    pub fn deth(&self) -> Option<Deth> {
        (self.opcode.service == TransportService::UnreliableDatagram).then(|| Deth {
            queue_key: u32_at(self.bytes, BTH_BYTES),
            source: QueuePairNumber(u24(&self.bytes[BTH_BYTES + 5..BTH_BYTES + 8])),
        })
    }
    /// FETH, where the opcode has one: what a FLUSH is to reach.
    #[must_use]
    pub fn feth(&self) -> Option<u32> {
        self.opcode.kind.has_feth().then(|| u32_at(self.bytes, BTH_BYTES))
    }
    /// RETH, where the opcode has one.
    #[must_use]
    pub fn reth(&self) -> Option<Reth> {
        let at = BTH_BYTES + if self.opcode.kind.has_feth() { 4 } else { 0 };
        self.opcode.kind.has_reth().then(|| Reth {
            address: u64_at(self.bytes, at),
            rkey: u32_at(self.bytes, at + 8),
            bytes: u32_at(self.bytes, at + 12),
        })
    }
    /// AtomicETH, where the opcode has one.
    #[must_use]
    pub fn atomic_eth(&self) -> Option<AtomicEth> {
        self.opcode.kind.has_atomic_eth().then(|| AtomicEth {
            address: u64_at(self.bytes, BTH_BYTES),
            rkey: u32_at(self.bytes, BTH_BYTES + 8),
            swap_or_add: u64_at(self.bytes, BTH_BYTES + 12),
            compare: u64_at(self.bytes, BTH_BYTES + 20),
        })
    }
    /// AETH, where the opcode has one.
    #[must_use]
    pub fn aeth(&self) -> Option<Aeth> {
        self.opcode.kind.has_aeth().then(|| Aeth {
            syndrome: Syndrome::from_value(self.bytes[BTH_BYTES]),
            message_sequence: u24(&self.bytes[BTH_BYTES + 1..BTH_BYTES + 4]),
        })
    }
    /// The original value, where the opcode has an AtomicAckETH.
    #[must_use]
    pub fn atomic_ack_eth(&self) -> Option<u64> {
        self.opcode.kind.has_atomic_ack_eth().then(|| u64_at(self.bytes, BTH_BYTES + 4))
    }
    /// ImmDt, where the opcode has one: always the last header.
    #[must_use]
    pub fn immediate(&self) -> Option<u32> {
        self.opcode.kind.has_immediate().then(|| u32_at(self.bytes, self.opcode.header_bytes() - 4))
    }
    /// IETH, where the opcode has one: always the last header.
    #[must_use]
    pub fn invalidate(&self) -> Option<u32> {
        self.opcode.kind.has_invalidate().then(|| u32_at(self.bytes, self.opcode.header_bytes() - 4))
    }

    /// The whole packet.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
    /// Payload without pad.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.opcode.header_bytes()..self.bytes.len() - ICRC_BYTES - self.pad_count()]
    }
    /// Everything that the ICRC covers of the datagram: all but itself.
    #[must_use]
    pub fn covered(&self) -> &'a [u8] {
        &self.bytes[..self.bytes.len() - ICRC_BYTES]
    }
    /// The ICRC as sent: little-endian, unlike everything else.
    #[must_use]
    pub fn icrc(&self) -> u32 {
        u32_at(self.bytes, self.bytes.len() - ICRC_BYTES).swap_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::Repr;

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_readable(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            plausible in any::<bool>(),
        ) {
            if plausible && bytes.len() > 2 {
                // Version 0, no pad, known range of opcodes: otherwise random bytes rarely pass the checks.
                bytes[1] &= 0xc0;
                bytes[0] &= 0x1f;
                bytes.truncate(bytes.len() / 4 * 4);
            }
            if let Ok(packet) = Packet::new_checked(&bytes) {
                let repr = Repr::parse(&packet);
                prop_assert_eq!(repr.payload_bytes, packet.payload().len());
                let mut again = vec![0; repr.packet_bytes()];
                repr.emit(&mut again);
                prop_assert_eq!(again.len(), bytes.len());
                let parsed = Packet::new_checked(&again).map(|packet| Repr::parse(&packet));
                prop_assert_eq!(parsed, Ok(repr));
                let _ = packet.icrc();
            }
        }
    }

    #[test]
    fn each_defect_is_named() {
        let whole = {
            let mut bytes = vec![0; 20];
            bytes[0] = 0x04;
            bytes[1] = 0x30;
            bytes
        };
        assert!(Packet::new_checked(&whole).is_ok());
        let defect = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            Packet::new_checked(&bytes).err()
        };
        assert_eq!(defect(&|bytes| bytes.truncate(15)), Some(Malformed::TooShort));
        assert_eq!(defect(&|bytes| bytes.truncate(18)), Some(Malformed::Length));
        assert_eq!(defect(&|bytes| bytes.resize(LARGE_PACKET_BYTES_MAX + 4, 0)), Some(Malformed::Length));
        assert_eq!(defect(&|bytes| bytes[1] |= 1), Some(Malformed::Version));
        assert_eq!(defect(&|bytes| bytes[0] = 0xff), Some(Malformed::Opcode));
        assert_eq!(defect(&|bytes| bytes[0] = 0x0c), Some(Malformed::TooShort));
        // What is in the pad is nobody's business.
        assert_eq!(defect(&|bytes| bytes[15] = 1), None);
    }
}
