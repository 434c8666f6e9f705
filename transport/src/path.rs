//! The way that the packets of a connection take, for operators.

use std::{fmt, net::SocketAddr};

use crate::bootstrap::PacketAddress;

/// Which arm a peer's queue pair is on, and where its packets arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    address: PacketAddress,
    /// By memory that both processes share, instead.
    is_ring: bool,
}

impl Path {
    pub(crate) fn to(address: PacketAddress) -> Self {
        Self { address, is_ring: false }
    }

    pub(crate) fn ring(address: PacketAddress) -> Self {
        Self { address, is_ring: true }
    }

    /// Of a peer on soft-RoCE.
    #[must_use]
    pub fn soft(address: SocketAddr) -> Self {
        Self::to(PacketAddress::SoftRoce(address))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            PacketAddress::SoftRoce(address) if self.is_ring => write!(f, "ring {address}"),
            PacketAddress::SoftRoce(address) => write!(f, "soft {address}"),
            PacketAddress::Roce(address) => write!(f, "verbs {}", address.ip()),
            PacketAddress::InfiniBand { lid } => write!(f, "verbs LID {lid:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_arm_and_where_packets_arrive() {
        let at = "10.0.0.3:4791".parse().unwrap();
        assert_eq!(Path::soft(at).to_string(), "soft 10.0.0.3:4791");
        assert_eq!(Path::ring(PacketAddress::SoftRoce(at)).to_string(), "ring 10.0.0.3:4791");
        assert_eq!(Path::to(PacketAddress::Roce(at)).to_string(), "verbs 10.0.0.3");
        assert_eq!(Path::to(PacketAddress::InfiniBand { lid: 18 }).to_string(), "verbs LID 0x12");
    }
}
