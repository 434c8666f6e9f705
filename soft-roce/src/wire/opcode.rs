//! BTH opcodes (IBTA 9.2): three bits of transport service, five of packet kind, and which headers follow.

/// The service that a packet belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportService {
    /// RC: acknowledged, in order.
    ReliableConnection,
    /// UC: SEND and WRITE without acknowledgement. Decoded only.
    UnreliableConnection,
    /// UD: single packets to anyone.
    UnreliableDatagram,
}

/// Where in its message a packet stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message.
    Only,
}

impl Position {
    /// Of packet `index` of `count`.
    #[must_use]
    pub const fn of(index: u32, count: u32) -> Self {
        match (index == 0, index + 1 == count) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    /// Whether a message begins here.
    #[must_use]
    pub const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends here.
    #[must_use]
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// What a packet is for: the low five bits of the opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names of IBTA table 38")]
pub enum PacketKind {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImmediate = 0x03,
    SendOnly = 0x04,
    SendOnlyImmediate = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImmediate = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImmediate = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Acknowledge = 0x11,
    AtomicAcknowledge = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
    Flush = 0x1c,
    AtomicWrite = 0x1d,
}

impl PacketKind {
    const ALL: [Self; 25] = [
        Self::SendFirst,
        Self::SendMiddle,
        Self::SendLast,
        Self::SendLastImmediate,
        Self::SendOnly,
        Self::SendOnlyImmediate,
        Self::WriteFirst,
        Self::WriteMiddle,
        Self::WriteLast,
        Self::WriteLastImmediate,
        Self::WriteOnly,
        Self::WriteOnlyImmediate,
        Self::ReadRequest,
        Self::ReadResponseFirst,
        Self::ReadResponseMiddle,
        Self::ReadResponseLast,
        Self::ReadResponseOnly,
        Self::Acknowledge,
        Self::AtomicAcknowledge,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::SendLastInvalidate,
        Self::SendOnlyInvalidate,
        Self::Flush,
        Self::AtomicWrite,
    ];

    /// By the low five bits.
    const BY_VALUE: [Option<Self>; 32] = {
        let mut table = [None; 32];
        let mut index = 0;
        while index < Self::ALL.len() {
            table[Self::ALL[index] as usize] = Some(Self::ALL[index]);
            index += 1;
        }
        table
    };

    /// SEND packets by position.
    #[must_use]
    pub const fn send(position: Position) -> Self {
        match position {
            Position::First => Self::SendFirst,
            Position::Middle => Self::SendMiddle,
            Position::Last => Self::SendLast,
            Position::Only => Self::SendOnly,
        }
    }

    /// WRITE packets by position.
    #[must_use]
    pub const fn write(position: Position) -> Self {
        match position {
            Position::First => Self::WriteFirst,
            Position::Middle => Self::WriteMiddle,
            Position::Last => Self::WriteLast,
            Position::Only => Self::WriteOnly,
        }
    }

    /// READ responses by position.
    #[must_use]
    pub const fn read_response(position: Position) -> Self {
        match position {
            Position::First => Self::ReadResponseFirst,
            Position::Middle => Self::ReadResponseMiddle,
            Position::Last => Self::ReadResponseLast,
            Position::Only => Self::ReadResponseOnly,
        }
    }

    /// The kind that also carries an immediate; itself if there is none.
    #[must_use]
    pub const fn with_immediate(self) -> Self {
        match self {
            Self::SendLast => Self::SendLastImmediate,
            Self::SendOnly => Self::SendOnlyImmediate,
            Self::WriteLast => Self::WriteLastImmediate,
            Self::WriteOnly => Self::WriteOnlyImmediate,
            other => other,
        }
    }

    /// The kind that also invalidates; itself if there is none.
    #[must_use]
    pub const fn with_invalidate(self) -> Self {
        match self {
            Self::SendLast => Self::SendLastInvalidate,
            Self::SendOnly => Self::SendOnlyInvalidate,
            other => other,
        }
    }

    /// Where in its message such a packet stands.
    #[must_use]
    pub const fn position(self) -> Position {
        match self {
            Self::SendFirst | Self::WriteFirst | Self::ReadResponseFirst => Position::First,
            Self::SendMiddle | Self::WriteMiddle | Self::ReadResponseMiddle => Position::Middle,
            Self::SendLast
            | Self::SendLastImmediate
            | Self::SendLastInvalidate
            | Self::WriteLast
            | Self::WriteLastImmediate
            | Self::ReadResponseLast => Position::Last,
            _ => Position::Only,
        }
    }

    /// Whether it belongs to a SEND.
    #[must_use]
    pub const fn is_send(self) -> bool {
        matches!(self as u8, 0x00..=0x05 | 0x16 | 0x17)
    }

    /// Whether it belongs to a WRITE.
    #[must_use]
    pub const fn is_write(self) -> bool {
        matches!(self as u8, 0x06..=0x0b)
    }

    /// Whether it is a compare-and-swap or fetch-and-add request.
    #[must_use]
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Whether it answers: a READ response or an acknowledgement.
    #[must_use]
    pub const fn is_response(self) -> bool {
        matches!(self as u8, 0x0d..=0x12)
    }

    /// Whether a RETH follows.
    #[must_use]
    pub const fn has_reth(self) -> bool {
        matches!(
            self,
            Self::WriteFirst
                | Self::WriteOnly
                | Self::WriteOnlyImmediate
                | Self::ReadRequest
                | Self::Flush
                | Self::AtomicWrite
        )
    }

    /// Whether a FETH comes before the RETH.
    #[must_use]
    pub const fn has_feth(self) -> bool {
        matches!(self, Self::Flush)
    }

    /// Whether an AtomicETH follows.
    #[must_use]
    pub const fn has_atomic_eth(self) -> bool {
        self.is_atomic()
    }

    /// Whether an AETH follows. Middle READ responses have none.
    #[must_use]
    pub const fn has_aeth(self) -> bool {
        self.is_response() && !matches!(self, Self::ReadResponseMiddle)
    }

    /// Whether an AtomicAckETH follows.
    #[must_use]
    pub const fn has_atomic_ack_eth(self) -> bool {
        matches!(self, Self::AtomicAcknowledge)
    }

    /// Whether an ImmDt follows.
    #[must_use]
    pub const fn has_immediate(self) -> bool {
        matches!(
            self,
            Self::SendLastImmediate | Self::SendOnlyImmediate | Self::WriteLastImmediate | Self::WriteOnlyImmediate
        )
    }

    /// Whether an IETH follows.
    #[must_use]
    pub const fn has_invalidate(self) -> bool {
        matches!(self, Self::SendLastInvalidate | Self::SendOnlyInvalidate)
    }
}

/// A whole opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opcode {
    /// Top three bits.
    pub service: TransportService,
    /// Low five bits.
    pub kind: PacketKind,
}

impl Opcode {
    /// An opcode of the reliable connection service.
    #[must_use]
    pub const fn reliable(kind: PacketKind) -> Self {
        Self { service: TransportService::ReliableConnection, kind }
    }

    /// The byte.
    #[must_use]
    pub const fn value(self) -> u8 {
        let service = match self.service {
            TransportService::ReliableConnection => 0b000,
            TransportService::UnreliableConnection => 0b001,
            TransportService::UnreliableDatagram => 0b011,
        };
        service << 5 | self.kind as u8
    }

    /// From the byte; `None` for what we do not decode: RD, XRC, CNP, reserved values.
    #[must_use]
    pub fn from_value(value: u8) -> Option<Self> {
        let kind = PacketKind::BY_VALUE[usize::from(value & 0x1f)]?;
        let (service, exists) = match value >> 5 {
            0b000 => (TransportService::ReliableConnection, true),
            0b001 => (TransportService::UnreliableConnection, kind as u8 <= PacketKind::WriteOnlyImmediate as u8),
            0b011 => (
                TransportService::UnreliableDatagram,
                matches!(kind, PacketKind::SendOnly | PacketKind::SendOnlyImmediate),
            ),
            _ => return None,
        };
        exists.then_some(Self { service, kind })
    }

    /// Bytes of the headers, BTH included.
    #[must_use]
    pub const fn header_bytes(self) -> usize {
        let kind = self.kind;
        super::BTH_BYTES
            + if matches!(self.service, TransportService::UnreliableDatagram) { 8 } else { 0 }
            + if kind.has_feth() { 4 } else { 0 }
            + if kind.has_reth() { 16 } else { 0 }
            + if kind.has_atomic_eth() { 28 } else { 0 }
            + if kind.has_aeth() { 4 } else { 0 }
            + if kind.has_atomic_ack_eth() { 8 } else { 0 }
            + if kind.has_immediate() || kind.has_invalidate() { 4 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_maps_to_itself_or_nothing() {
        let known: Vec<u8> = (0..=255).filter(|value| Opcode::from_value(*value).is_some()).collect();
        for value in &known {
            assert_eq!(Opcode::from_value(*value).unwrap().value(), *value);
        }
        // 25 of RC, 12 of UC, 2 of UD.
        assert_eq!(known.len(), 25 + 12 + 2);
        assert!(Opcode::from_value(0x15).is_none() && Opcode::from_value(0x81).is_none());
    }

    #[test]
    fn kinds_agree_with_their_constructors() {
        for position in [Position::First, Position::Middle, Position::Last, Position::Only] {
            for kind in [
                PacketKind::send(position),
                PacketKind::write(position),
                PacketKind::read_response(position),
                PacketKind::send(position).with_invalidate(),
                PacketKind::write(position).with_immediate(),
            ] {
                assert_eq!(kind.position(), position, "{kind:?}");
            }
        }
    }
}
