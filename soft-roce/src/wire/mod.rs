//! What travels: packet formats, opcodes, the invariant CRC. Pure functions of bytes.

pub mod icrc;
mod opcode;
mod packet;
mod psn;
mod repr;
mod syndrome;

pub use opcode::{Opcode, PacketKind, Position, TransportService};
pub use packet::{Malformed, Packet};
pub use psn::Psn;
pub use repr::{Aeth, AtomicEth, Deth, Repr, Reth};
pub use syndrome::{NakCode, Syndrome, rnr_delay};

/// Names a queue pair of one endpoint; 24 bits. Assigned by the endpoint that owns the queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueuePairNumber(pub u32);

impl QueuePairNumber {
    /// The largest number that fits the wire.
    pub const MAX: Self = Self(0x00ff_ffff);
}

/// Bytes of the base transport header.
pub const BTH_BYTES: usize = 12;
/// Bytes of the invariant CRC.
pub const ICRC_BYTES: usize = 4;
/// The longest headers of a packet with payload: BTH, RETH, ImmDt.
pub(crate) const HEADER_BYTES_MAX: usize = BTH_BYTES + 16 + 4;
/// The longest packet that IBTA knows, BTH to ICRC: 4096 bytes of payload.
pub const PACKET_BYTES_MAX: usize = HEADER_BYTES_MAX + 4096 + ICRC_BYTES;
/// The longest of ours within a host, where IBTA's sizes do not matter.
pub const LARGE_PACKET_BYTES_MAX: usize = HEADER_BYTES_MAX + 57_344 + ICRC_BYTES;
/// The partition that everyone belongs to, as full member.
pub const DEFAULT_PARTITION_KEY: u16 = 0xffff;
