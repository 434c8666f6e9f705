//! The AETH syndrome (IBTA 9.7.5.1): acknowledged, come back later, or refused.

use std::time::Duration;

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum NakCode {
    /// A packet is missing before this one.
    SequenceError = 0,
    /// Not possible as such: order of opcodes, length, an operation that is not enabled.
    InvalidRequest = 1,
    /// Key, protection domain, permission or bounds.
    RemoteAccess = 2,
    /// The responder failed on its own side.
    RemoteOperation = 3,
}

/// A decoded syndrome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syndrome {
    /// Everything up to here is done. We ignore the credits and send "none" (31), as rdma_rxe does.
    Ack {
        /// Encoded count of receives that the peer has posted, 0 ..= 31.
        credit: u8,
    },
    /// No receive is posted.
    ReceiverNotReady {
        /// How long to wait, as a code for [`rnr_delay`].
        timer: u8,
    },
    /// Refused.
    Nak(NakCode),
    /// A value without meaning in RC.
    Reserved(u8),
}

impl Syndrome {
    /// What we acknowledge with.
    pub const ACK: Self = Self::Ack { credit: 31 };

    /// The byte.
    #[must_use]
    pub const fn value(self) -> u8 {
        match self {
            Self::Ack { credit } => credit & 0x1f,
            Self::ReceiverNotReady { timer } => 0x20 | timer & 0x1f,
            Self::Nak(code) => 0x60 | code as u8,
            Self::Reserved(value) => value,
        }
    }

    /// From the byte.
    #[must_use]
    pub const fn from_value(value: u8) -> Self {
        match value {
            0x00..=0x1f => Self::Ack { credit: value },
            0x20..=0x3f => Self::ReceiverNotReady { timer: value & 0x1f },
            0x60 => Self::Nak(NakCode::SequenceError),
            0x61 => Self::Nak(NakCode::InvalidRequest),
            0x62 => Self::Nak(NakCode::RemoteAccess),
            0x63 => Self::Nak(NakCode::RemoteOperation),
            _ => Self::Reserved(value),
        }
    }
}

/// How long an RNR NAK asks to wait (IBTA table 45): code 0 is the longest.
#[must_use]
pub const fn rnr_delay(timer: u8) -> Duration {
    const UNITS_OF_10_US: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(UNITS_OF_10_US[(timer & 0x1f) as usize] * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives() {
        for value in 0..=255 {
            assert_eq!(Syndrome::from_value(value).value(), value);
        }
    }

    #[test]
    fn delays_match_the_table() {
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(14), Duration::from_micros(1_280));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
    }
}
