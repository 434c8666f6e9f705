//! soft-RoCE's wire format: whatever is accepted is written again byte for byte, but for bits that mean nothing, and
//! its CRC is found right once it is.
#![no_main]

use libfuzzer_sys::fuzz_target;
use soft_roce::{
    Identification,
    wire::{
        ICRC_BYTES, Packet, Repr,
        icrc::{self, Path},
    },
};

fuzz_target!(|bytes: &[u8]| {
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let repr = Repr::parse(&packet);
    assert_eq!(repr.packet_bytes(), bytes.len());
    let mut again = vec![0; bytes.len()];
    repr.emit(&mut again).copy_from_slice(packet.payload());
    let covered_bytes = bytes.len() - ICRC_BYTES;
    for [source, local] in [["127.0.0.2:4791", "127.0.0.1:4791"], ["[::2]:4791", "[::1]:4791"]] {
        let (source, local) = (source.parse().unwrap(), local.parse().unwrap());
        let _ = icrc::verify(source, local, packet.covered(), packet.icrc(), Identification::Any);
        let (covered, icrc) = again.split_at_mut(covered_bytes);
        icrc.copy_from_slice(&icrc::compute(&Path::segment(source, local, 3), covered).to_le_bytes());
        let packet = Packet::new_checked(&again).expect("what we write is well-formed");
        assert_eq!(Repr::parse(&packet), repr);
        assert_eq!(packet.payload(), Packet::new_checked(bytes).unwrap().payload());
        let found = icrc::verify(source, local, packet.covered(), packet.icrc(), Identification::SegmentIndex);
        assert!(found.is_some());
    }
});
