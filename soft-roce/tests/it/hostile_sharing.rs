//! Hostile packets against queues that many may reach: a datagram queue pair, and a connection that shares its receives
//! with another. Nothing panics, no byte outside the receives changes, every packet is counted once as received or
//! dropped, no shared receive is lost, and the other connection gets all that are left.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use crate::common::scripted::{RQ_PSN, Scripted};
use proptest::prelude::*;
use soft_roce::{
    Access, Completion, DATAGRAM_HEADER_BYTES, DatagramAddress, DatagramConfig, HeapMemory, PathMtu, ProtectionDomain,
    QueuePairConfig, QueuePairNumber, QueuePairState, RecvRequest, RegionConfig, RegionHandle, Segment,
    SharedReceiveQueueConfig, SharedReceiveQueueNumber, Status,
    wire::{Aeth, AtomicEth, Deth, Opcode, PacketKind, Psn, Repr, Reth, Syndrome},
};

const SECRET: u8 = 0xa7;
const QUEUE_KEY: u32 = 0x1234;
/// Receives lie in this part of their region, two pieces each.
const GRANTED: std::ops::Range<usize> = 512..1_024;
const SHARED_DEPTH: usize = 6;
const DATAGRAM_DEPTH: usize = 3;
/// Receives of connections live in a domain of their own; so do those of datagrams.
const RECEIVES: ProtectionDomain = ProtectionDomain(4);

#[derive(Debug, Clone)]
struct Forged {
    opcode: u8,
    /// The attacked connection, the datagram queue pair, or one that does not exist.
    to: usize,
    /// Most are sent from where the connection's peer is.
    stranger: bool,
    psn_offset: i8,
    queue_key: Option<u32>,
    source: u32,
    payload_bytes: usize,
    word: u64,
    flags: u8,
    damage: bool,
}

fn forged() -> impl Strategy<Value = Forged> {
    let mostly = |value: u8| prop_oneof![3 => Just(value), 1 => any::<u8>()];
    let opcode = prop_oneof![mostly(0x64), mostly(0x00), mostly(0x02), mostly(0x04), 0_u8..0x20];
    let place = (opcode, 0_usize..3, prop::bool::weighted(0.1), -4_i8..12);
    let datagram = (prop::option::weighted(0.2, any::<u32>()), any::<u32>(), 0_usize..6);
    let rest = (any::<u64>(), any::<u8>(), prop::bool::weighted(0.05));
    (place, datagram, rest).prop_map(|(place, datagram, rest)| Forged {
        opcode: place.0,
        to: place.1,
        stranger: place.2,
        // Mostly exactly what is expected.
        psn_offset: if place.3 > 0 { 0 } else { place.3 },
        queue_key: datagram.0,
        source: datagram.1 & 0x00ff_ffff,
        payload_bytes: [0, 8, 100, 256, 260, 1_000][datagram.2],
        word: rest.0,
        flags: rest.1,
        damage: rest.2,
    })
}

struct Victim {
    peer: Scripted,
    attacked: QueuePairNumber,
    bystander: QueuePairNumber,
    datagrams: QueuePairNumber,
    shared: SharedReceiveQueueNumber,
    receiving: (Arc<HeapMemory>, RegionHandle),
    secret: (Arc<HeapMemory>, RegionHandle),
    expected: Psn,
    /// Receives posted and not completed.
    open_shared: BTreeSet<u64>,
    open_datagrams: BTreeSet<u64>,
    next_id: u64,
    handled: u64,
}

impl Victim {
    fn new() -> Self {
        let mut peer = Scripted::initialised(QueuePairConfig::default());
        let config = SharedReceiveQueueConfig { protection_domain: RECEIVES, depth: SHARED_DEPTH, max_sge: 2 };
        let shared = peer.endpoint.create_shared_receive_queue(config).expect("room");
        let config = QueuePairConfig { shared_receive_queue: Some(shared), ..QueuePairConfig::default() };
        let [attacked, bystander] = [0, 1].map(|_| {
            let number = peer.endpoint.create_queue_pair(config).expect("room");
            peer.endpoint.connect_queue_pair(number, peer.peer(PathMtu::Mtu256)).expect("it is fresh");
            number
        });
        let config = DatagramConfig {
            protection_domain: RECEIVES,
            path_mtu: PathMtu::Mtu256,
            recv_depth: DATAGRAM_DEPTH,
            ..DatagramConfig::new(QUEUE_KEY)
        };
        let datagrams = peer.endpoint.create_datagram_queue_pair(config).expect("room");
        peer.endpoint.modify_datagrams_to_ready_to_receive(datagrams).expect("INIT to RTR");
        let config = RegionConfig { protection_domain: RECEIVES, ..Access::LOCAL.into() };
        let receiving = peer.register(vec![SECRET; 2_048], config);
        let secret = peer.register(vec![SECRET; 2_048], Access::LOCAL);
        let mut victim = Self {
            peer,
            attacked,
            bystander,
            datagrams,
            shared,
            receiving,
            secret,
            expected: RQ_PSN,
            open_shared: BTreeSet::new(),
            open_datagrams: BTreeSet::new(),
            next_id: 0,
            handled: 0,
        };
        victim.top_up();
        victim
    }

    /// Posts receives for all that were used up.
    fn top_up(&mut self) {
        let half = (GRANTED.len() / 2) as u32;
        let second = Segment { lkey: self.receiving.1.lkey, offset: GRANTED.start, bytes: half };
        let segment = Segment { offset: GRANTED.start + half as usize, ..second };
        while self.open_shared.len() < SHARED_DEPTH {
            let request = RecvRequest { id: self.next_id, segment };
            self.peer.endpoint.post_shared_recv_list(self.shared, request, &[second]).expect("room");
            self.open_shared.insert(self.next_id);
            self.next_id += 1;
        }
        while self.open_datagrams.len() < DATAGRAM_DEPTH {
            let request = RecvRequest { id: self.next_id, segment };
            // Once it has failed, posts are flushed.
            self.peer.endpoint.post_recv_list(self.datagrams, request, &[second]).expect("room");
            self.open_datagrams.insert(self.next_id);
            self.next_id += 1;
        }
    }

    fn collect(&mut self) -> Vec<Completion> {
        let done = self.peer.completions();
        for done in &done {
            let open = if done.queue_pair == self.datagrams { &mut self.open_datagrams } else { &mut self.open_shared };
            assert!(open.remove(&done.id), "{done:?} was not posted there, or completes again");
            assert!(done.bytes as usize <= GRANTED.len());
        }
        done
    }

    fn attack(&mut self, forged: &Forged) {
        if self.peer.endpoint.state(self.attacked) == Some(QueuePairState::Error) {
            assert!(self.peer.endpoint.modify_to_reset(self.attacked));
            let peer = self.peer.peer(PathMtu::Mtu256);
            self.peer.endpoint.connect_queue_pair(self.attacked, peer).expect("it was reset");
            self.expected = RQ_PSN;
        }
        let Some(repr) = self.forge(forged) else { return };
        let mut bytes = self.peer.encode(repr, &vec![0x11; forged.payload_bytes]);
        if forged.damage {
            bytes[4 + forged.word as usize % 12] ^= 0x10;
        }
        let stranger = SocketAddr::from(([127, 0, 0, 3], 4791));
        let source = if forged.stranger { stranger } else { self.peer.remote };
        self.peer.endpoint.handle_packet(self.peer.now, source, &bytes);
        self.handled += 1;
        for answer in self.peer.transmitted() {
            assert!(!answer.payload.contains(&SECRET), "{answer:?} gives away what was not granted");
            if matches!(answer.repr.aeth, Some(Aeth { syndrome: Syndrome::Ack { .. }, .. })) {
                self.expected = answer.repr.psn.plus(1);
            }
        }
        for done in self.collect() {
            let from = DatagramAddress { address: source, queue_pair: QueuePairNumber(forged.source) };
            let is_datagram = done.queue_pair == self.datagrams && done.status == Status::Success;
            assert_eq!(done.source, is_datagram.then_some(from));
            assert!(!is_datagram || done.bytes as usize == DATAGRAM_HEADER_BYTES + forged.payload_bytes);
        }
        self.top_up();
    }

    fn forge(&self, forged: &Forged) -> Option<Repr> {
        let opcode = Opcode::from_value(forged.opcode)?;
        let kind = opcode.kind;
        let destination = [self.attacked, self.datagrams, QueuePairNumber(0x00ab_cdef)][forged.to];
        let psn = Psn::new(self.expected.value().wrapping_add_signed(forged.psn_offset.into()));
        let (handle, word) = (self.secret.1, forged.word as u32);
        Some(Repr {
            opcode,
            // Acknowledged, so that the attack can follow.
            ack_request: true,
            solicited: forged.flags & 1 != 0,
            deth: (forged.opcode >> 5 == 0b011).then_some(Deth {
                queue_key: forged.queue_key.unwrap_or(QUEUE_KEY),
                source: QueuePairNumber(forged.source),
            }),
            feth: kind.has_feth().then_some(word),
            reth: kind.has_reth().then_some(Reth { address: handle.address, rkey: handle.rkey, bytes: word % 600 }),
            atomic_eth: kind.has_atomic_eth().then_some(AtomicEth {
                address: handle.address,
                rkey: handle.rkey,
                swap_or_add: 1,
                compare: 1,
            }),
            aeth: kind
                .has_aeth()
                .then_some(Aeth { syndrome: Syndrome::from_value(forged.flags), message_sequence: word & 0xff }),
            atomic_ack_eth: kind.has_atomic_ack_eth().then_some(1),
            immediate: kind.has_immediate().then_some(word),
            invalidate: kind.has_invalidate().then_some(handle.rkey),
            ..Repr::reliable(kind, destination, psn)
        })
    }

    fn check_memory(&self) {
        let untouched = |bytes: &[u8]| bytes.iter().all(|&byte| byte == SECRET);
        let receiving = self.receiving.0.to_vec();
        assert!(untouched(&self.secret.0.to_vec()), "a region without remote access was touched");
        assert!(untouched(&receiving[..GRANTED.start]) && untouched(&receiving[GRANTED.end..]));
    }

    fn check_counters(&self) {
        let counters = self.peer.endpoint.counters();
        let dropped = counters.dropped_unsupported
            + counters.dropped_no_queue_pair
            + counters.dropped_wrong_peer
            + counters.dropped_icrc;
        assert_eq!(counters.packets_received + dropped, self.handled, "{counters:?}");
    }

    /// The other connection gets every shared receive that is left, in order; then there are none.
    fn drain_by_bystander(&mut self) {
        let left: Vec<_> = self.open_shared.iter().copied().collect();
        for (offset, id) in left.iter().enumerate() {
            let psn = RQ_PSN.plus(offset as u32);
            let send = Repr { ack_request: true, ..Repr::reliable(PacketKind::SendOnly, self.bystander, psn) };
            let answers = self.peer.deliver(send, &[offset as u8; 200]);
            assert_eq!(answers.iter().map(|answer| answer.aeth().1).collect::<Vec<_>>(), [0x1f]);
            let done = self.collect();
            assert_eq!(done.iter().map(|done| (done.id, done.status)).collect::<Vec<_>>(), [(*id, Status::Success)]);
        }
        let psn = RQ_PSN.plus(left.len() as u32);
        let send = Repr { ack_request: true, ..Repr::reliable(PacketKind::SendOnly, self.bystander, psn) };
        assert_eq!(self.peer.deliver(send, &[1])[0].aeth().1, 0x21, "no receive is left");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]
    #[test]
    fn hostile_packets_reach_only_receives_and_lose_none(attacks in prop::collection::vec(forged(), 1..60)) {
        let mut victim = Victim::new();
        for forged in &attacks {
            victim.attack(forged);
        }
        victim.check_memory();
        victim.check_counters();
        for number in [victim.attacked, victim.datagrams] {
            victim.peer.endpoint.modify_to_error(number);
        }
        victim.collect();
        prop_assert!(victim.open_datagrams.is_empty());
        victim.drain_by_bystander();
    }
}
