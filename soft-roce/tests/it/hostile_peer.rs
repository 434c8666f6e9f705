//! A peer that knows the connection and wants to break it: forged numbers, keys, lengths, orders. Nothing panics, no
//! byte outside what was granted changes or leaves, and work on another queue pair goes on.

use std::sync::Arc;

use crate::common::scripted::{RQ_PSN, SQ_PSN, Scripted};
use proptest::prelude::*;
use soft_roce::{
    Access, HeapMemory, Operation, PathMtu, ProtectionDomain, QueuePairConfig, QueuePairNumber, QueuePairState,
    RegionConfig, RegionHandle, Remote, Segment, Timestamp,
    wire::{Aeth, AtomicEth, Opcode, PacketKind, Psn, Repr, Reth, Syndrome},
};

/// What a hostile packet is made of; the numbers are picked near what matters.
#[derive(Debug, Clone)]
struct Forged {
    opcode: u8,
    psn_base: usize,
    psn_offset: i8,
    key: usize,
    key_noise: Option<u32>,
    address: usize,
    address_offset: i16,
    bytes: usize,
    payload_bytes: usize,
    syndrome: u8,
    word: u64,
    ack_request: bool,
    raw: Option<Vec<u8>>,
    advance_ns: u32,
}

fn forged() -> impl Strategy<Value = Forged> {
    let place = (any::<usize>(), any::<i8>(), any::<usize>(), prop::option::weighted(0.1, any::<u32>()));
    let range = (any::<usize>(), -600_i16..600, any::<usize>(), 0_usize..5);
    let rest = (any::<u8>(), any::<u64>(), any::<bool>(), 0_u32..1_000_000);
    let raw = prop::option::weighted(0.05, prop::collection::vec(any::<u8>(), 0..80));
    (0_u8..0x20, place, range, rest, raw).prop_map(|(opcode, place, range, rest, raw)| Forged {
        opcode,
        psn_base: place.0,
        // Mostly exactly what is expected.
        psn_offset: if place.1 > 0 { 0 } else { place.1 / 8 },
        key: place.2,
        key_noise: place.3,
        address: range.0,
        address_offset: if range.1 % 2 == 0 { 0 } else { range.1 },
        bytes: range.2,
        payload_bytes: range.3,
        syndrome: rest.0,
        word: rest.1,
        ack_request: rest.2,
        raw,
        advance_ns: rest.3,
    })
}

/// The endpoint under attack.
struct Victim {
    peer: Scripted,
    granted: (Arc<HeapMemory>, RegionHandle),
    /// Regions that the peer has no right to, for five different reasons, and what they held.
    forbidden: Vec<(Arc<HeapMemory>, RegionHandle)>,
    /// Where our own READ lands, in the middle of its region.
    landing: (Arc<HeapMemory>, RegionHandle),
    receiving: (Arc<HeapMemory>, RegionHandle),
    /// Another queue pair, of another protection domain, and its region.
    bystander: (QueuePairNumber, Arc<HeapMemory>, RegionHandle),
}

const SECRET: u8 = 0xa7;
/// Receives and READs use this part of their regions.
const GRANTED: std::ops::Range<usize> = 512..812;

impl Victim {
    fn new() -> Self {
        let mut peer = Scripted::new(QueuePairConfig { retry_count: 7, ..Default::default() }, PathMtu::Mtu256);
        let granted = peer.register(vec![0; 2_048], Access::ALL);
        let mut secret = |config: RegionConfig| peer.register(vec![SECRET; 2_048], config);
        let mut forbidden = vec![
            secret(Access::default().into()),
            secret(Access::LOCAL.into()),
            secret(RegionConfig { protection_domain: ProtectionDomain(9), ..Access::ALL.into() }),
        ];
        let withdrawn = secret(Access::ALL.into());
        forbidden.push(withdrawn.clone());
        let landing = secret(Access::LOCAL.into());
        let receiving = secret(Access::LOCAL.into());
        peer.endpoint.deregister(withdrawn.1.lkey);
        forbidden.push(landing.clone());
        forbidden.push(receiving.clone());
        let other = ProtectionDomain(9);
        let config = QueuePairConfig { protection_domain: other, ..Default::default() };
        let number = peer.endpoint.create_queue_pair(config).expect("room");
        peer.endpoint.connect_queue_pair(number, peer.peer(PathMtu::Mtu256)).expect("a fresh queue pair connects");
        let config = RegionConfig { protection_domain: other, ..Access::ALL.into() };
        let (memory, handle) = peer.register(vec![0; 8], config);
        let bystander = (number, memory, handle);
        let mut victim = Self { peer, granted, forbidden, landing, receiving, bystander };
        victim.post();
        victim
    }

    /// Requests and receives for the peer to answer wrongly.
    fn post(&mut self) {
        let (peer, bytes) = (&mut self.peer, GRANTED.len() as u32);
        for id in 0..4 {
            peer.post_recv(id, Segment { lkey: self.receiving.1.lkey, offset: GRANTED.start, bytes });
        }
        let remote = Remote { address: 0, rkey: 0 };
        let local = Segment { lkey: self.landing.1.lkey, offset: GRANTED.start, bytes };
        peer.post_send(10, Operation::Send { local: Segment { bytes: 300, ..local } });
        peer.post_send(11, Operation::Read { local, remote });
        peer.post_send(12, Operation::FetchAdd { local: Segment { bytes: 8, ..local }, remote, add: 1 });
        peer.transmitted();
    }

    fn attack(&mut self, forged: &Forged, expected: &mut Psn) {
        self.peer.now = Timestamp(self.peer.now.0 + u64::from(forged.advance_ns));
        self.peer.endpoint.handle_timeout(self.peer.now);
        if let Some(raw) = &forged.raw {
            self.peer.endpoint.handle_packet(self.peer.now, self.peer.remote, raw);
            return;
        }
        let Some(opcode) = Opcode::from_value(forged.opcode) else { return };
        if self.peer.state() == QueuePairState::Error {
            // The attack goes on after each refusal, on a connection made anew.
            assert!(self.peer.endpoint.modify_to_reset(self.peer.number));
            self.peer.endpoint.connect_queue_pair(self.peer.number, self.peer.peer(PathMtu::Mtu256)).unwrap();
            *expected = RQ_PSN;
            self.post();
        }
        let answers = self.peer.deliver(self.forge(forged, opcode, *expected), &self.payload(forged));
        for answer in &answers {
            if answer.kind() == PacketKind::Acknowledge || answer.kind().position().ends() {
                // Follow the victim, so that many packets are taken rather than dropped.
                *expected = answer.repr.psn.plus(1);
            }
            let leaks = answer.kind().is_response() && answer.payload.contains(&SECRET);
            assert!(!leaks, "{answer:?} gives away what was not granted");
        }
    }

    fn payload(&self, forged: &Forged) -> Vec<u8> {
        vec![0x11; [0, 256, 256, 8, 100][forged.payload_bytes]]
    }

    fn forge(&self, forged: &Forged, opcode: Opcode, expected: Psn) -> Repr {
        let kind = opcode.kind;
        let base = if kind.is_response() { SQ_PSN.plus(forged.psn_base as u32 % 8) } else { expected };
        let psn = Psn::new(base.value().wrapping_add_signed(forged.psn_offset.into()));
        let regions: Vec<_> = std::iter::repeat_n(&self.granted, 5).chain(&self.forbidden).collect();
        let handle = regions[forged.key % regions.len()].1;
        // Mostly the address that belongs to the key.
        let other = regions[forged.address % regions.len()].1;
        let address = if forged.address.is_multiple_of(7) { other.address } else { handle.address };
        let address = address.wrapping_add_signed(forged.address_offset.into());
        let rkey = handle.rkey ^ forged.key_noise.unwrap_or(0);
        let bytes = [0, 8, 100, 256, 356, 512, 2_048, 2_049, u32::MAX][forged.bytes % 9];
        let aeth = Aeth { syndrome: Syndrome::from_value(forged.syndrome), message_sequence: 1 };
        Repr {
            ack_request: forged.ack_request,
            feth: kind.has_feth().then_some(forged.word as u32),
            reth: kind.has_reth().then_some(Reth { address, rkey, bytes }),
            atomic_eth: kind.has_atomic_eth().then_some(AtomicEth {
                address,
                rkey,
                swap_or_add: forged.word,
                compare: forged.word,
            }),
            aeth: kind.has_aeth().then_some(aeth),
            atomic_ack_eth: kind.has_atomic_ack_eth().then_some(forged.word),
            immediate: kind.has_immediate().then_some(forged.word as u32),
            invalidate: kind.has_invalidate().then_some(rkey),
            ..Repr::reliable(kind, self.peer.number, psn)
        }
    }

    fn check(&self) {
        for (memory, handle) in &self.forbidden {
            let bytes = memory.to_vec();
            let writable = [&self.landing, &self.receiving].into_iter().any(|own| own.1 == *handle);
            let outside = (0..bytes.len()).filter(|at| !(writable && GRANTED.contains(at)));
            assert!(outside.into_iter().all(|at| bytes[at] == SECRET), "region {handle:?} was touched");
        }
        assert_eq!(self.bystander.1.to_vec(), [0; 8]);
    }

    /// The other queue pair works as before.
    fn check_bystander(&mut self) {
        let (number, memory, handle) = self.bystander.clone();
        let reth = Some(Reth { address: handle.address, rkey: handle.rkey, bytes: 8 });
        let write = Repr::reliable(PacketKind::WriteOnly, number, RQ_PSN);
        let answers = self.peer.deliver(Repr { reth, ack_request: true, ..write }, &[5; 8]);
        assert_eq!(answers.iter().map(|answer| answer.aeth()).collect::<Vec<_>>(), [(RQ_PSN.value(), 0x1f, 1)]);
        assert_eq!(memory.to_vec(), [5; 8]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]
    #[test]
    fn a_hostile_peer_reaches_only_what_it_was_granted(attacks in prop::collection::vec(forged(), 1..40)) {
        let mut victim = Victim::new();
        let mut expected = RQ_PSN;
        for forged in &attacks {
            victim.attack(forged, &mut expected);
        }
        victim.check();
        // Whatever it did, everything posted completes when the owner ends the queue pair.
        victim.peer.endpoint.modify_to_error(victim.peer.number);
        let mut ids: Vec<_> = victim.peer.completions().iter().map(|done| done.id).collect();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids, [0, 1, 2, 3, 10, 11, 12]);
        victim.check_bystander();
        prop_assert!(victim.peer.endpoint.deregister(victim.granted.1.lkey), "it was withdrawn by the peer");
    }
}
