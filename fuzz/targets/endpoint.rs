//! A soft-RoCE endpoint and a hostile peer that knows its connections: forged numbers, keys, lengths and orders, with
//! the right ICRC, so that they reach the deep code. Nothing panics; no byte outside what was granted is touched or
//! leaves; no work request completes twice or never; an endpoint without queue pairs keeps no state of it all.
#![no_main]

mod guarded;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use arbitrary::Arbitrary;
use guarded::{Guarded, REGION_BYTES};
use libfuzzer_sys::fuzz_target;
use soft_roce::{
    Access, DatagramAddress, DatagramConfig, DatagramRequest, Endpoint, EndpointConfig, Identification, Operation,
    PathMtu, Peer, Psn, QueuePairConfig, QueuePairNumber, RecvRequest, RegionHandle, Remote, Segment, SendRequest,
    SharedReceiveQueueConfig, SharedReceiveQueueNumber, Timestamp,
    wire::{
        Aeth, AtomicEth, Deth, ICRC_BYTES, Opcode, PACKET_BYTES_MAX, Repr, Reth, Syndrome,
        icrc::{self, Path},
    },
};

const RQ_PSN: Psn = Psn::new(0x00ff_fff0);
const SQ_PSN: Psn = Psn::new(0x1000);
const QUEUE_KEY: u32 = 0x1234;
const SECRET: u8 = 0xa7;
const REMOTE: Remote = Remote { address: 0x1000, rkey: 7 };

/// Which queue pair: a connected one, one for datagrams, and one of each that takes from a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary)]
enum Which {
    Connected,
    Sharing,
    Datagrams,
    SharingDatagrams,
}

impl Which {
    const ALL: [Self; 4] = [Self::Connected, Self::Sharing, Self::Datagrams, Self::SharingDatagrams];

    const fn takes_datagrams(self) -> bool {
        matches!(self, Self::Datagrams | Self::SharingDatagrams)
    }

    const fn shares_receives(self) -> bool {
        matches!(self, Self::Sharing | Self::SharingDatagrams)
    }
}

#[derive(Debug, Arbitrary)]
enum Step {
    Packet(Forged),
    Raw(Vec<u8>),
    Send { which: Which, kind: u8, local: Local },
    Receive { which: Which, local: Local },
    Wait { nanoseconds: u32 },
    Transmit,
    Withdraw,
    Drain { which: Which },
    Resume { which: Which },
    Reconnect { which: Which },
}

/// Local memory, which may reach beyond its region, in up to three pieces.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Local {
    bytes: u16,
    offset: u16,
    cuts: [u8; 2],
}

/// The numbers are picked near what matters.
#[derive(Debug, Arbitrary)]
struct Forged {
    to: Option<Which>,
    opcode: u8,
    answer: bool,
    psn: u8,
    key: u8,
    address: i16,
    bytes: u16,
    syndrome: u8,
    word: u64,
    flags: u8,
    payload_bytes: u16,
}

struct Victim {
    endpoint: Endpoint,
    /// In the order of [`Which`].
    numbers: [QueuePairNumber; 4],
    shared: SharedReceiveQueueNumber,
    granted: (Arc<Guarded>, RegionHandle),
    private: (Arc<Guarded>, RegionHandle),
    /// Has no queue pairs, and gets every packet too.
    stranger: Endpoint,
    /// Posted and not completed, but for shared receives.
    open: BTreeMap<u64, Which>,
    open_shared: BTreeSet<u64>,
    next_id: u64,
    now: Timestamp,
}

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 4791))
}

fn peer() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 2], 4791))
}

impl Victim {
    fn new() -> Self {
        let mut endpoint = Endpoint::new(EndpointConfig::new(local(), 1));
        let shared = SharedReceiveQueueConfig { protection_domain: Default::default(), depth: 16, max_sge: 4 };
        let shared = endpoint.create_shared_receive_queue(shared).unwrap();
        let sharing = QueuePairConfig { shared_receive_queue: Some(shared), ..Default::default() };
        let datagrams = DatagramConfig { path_mtu: PathMtu::Mtu256, ..DatagramConfig::new(QUEUE_KEY) };
        let sharing_datagrams = DatagramConfig { shared_receive_queue: Some(shared), ..datagrams };
        let numbers = [
            endpoint.create_queue_pair(QueuePairConfig::default()).unwrap(),
            endpoint.create_queue_pair(sharing).unwrap(),
            endpoint.create_datagram_queue_pair(datagrams).unwrap(),
            endpoint.create_datagram_queue_pair(sharing_datagrams).unwrap(),
        ];
        let (granted, private) = (Guarded::new(0), Guarded::new(SECRET));
        let open = endpoint.register(granted.clone(), Access::ALL).unwrap();
        let closed = endpoint.register(private.clone(), Access::LOCAL).unwrap();
        let mut victim = Self {
            endpoint,
            numbers,
            shared,
            granted: (granted, open),
            private: (private, closed),
            stranger: Endpoint::new(EndpointConfig::new(local(), 1)),
            open: BTreeMap::new(),
            open_shared: BTreeSet::new(),
            next_id: 0,
            now: Timestamp(0),
        };
        for which in Which::ALL {
            victim.connect(which);
        }
        victim
    }

    fn number(&self, which: Which) -> QueuePairNumber {
        self.numbers[which as usize]
    }

    fn connect(&mut self, which: Which) {
        let number = self.number(which);
        let peer = Peer {
            address: peer(),
            queue_pair: QueuePairNumber(0x33),
            rq_psn: RQ_PSN,
            sq_psn: SQ_PSN,
            path_mtu: PathMtu::Mtu256,
            identification: Identification::SegmentIndex,
            ack_delay: which.shares_receives().then(|| Duration::from_millis(1)),
        };
        if which.takes_datagrams() {
            self.endpoint.modify_datagrams_to_ready_to_receive(number).unwrap();
            self.endpoint.modify_to_ready_to_send(number).unwrap();
        } else {
            self.endpoint.connect_queue_pair(number, peer).unwrap();
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Packet(ref forged) => self.forge(forged),
            Step::Raw(ref bytes) => self.handle(bytes),
            Step::Send { which, kind, local } => self.post_send(which, kind, local),
            Step::Receive { which, local } => self.post_recv(which, local),
            Step::Wait { nanoseconds } => {
                self.now.0 += u64::from(nanoseconds);
                self.endpoint.handle_timeout(self.now);
            }
            Step::Transmit => self.transmit(),
            Step::Withdraw => {
                self.endpoint.deregister(self.granted.1.lkey);
            }
            Step::Drain { which } => {
                let _ = self.endpoint.modify_to_send_queue_drain(self.number(which));
            }
            Step::Resume { which } => {
                let _ = self.endpoint.modify_to_ready_to_send(self.number(which));
            }
            Step::Reconnect { which } => {
                self.complete();
                self.endpoint.modify_to_reset(self.number(which));
                self.open.retain(|_, whose| *whose != which);
                self.connect(which);
            }
        }
        self.complete();
        while self.endpoint.poll_event().is_some() {}
    }

    fn complete(&mut self) {
        while let Some(done) = self.endpoint.poll_completion() {
            let known = self.open.remove(&done.id).is_some() || self.open_shared.remove(&done.id);
            assert!(known, "{done:?} was not posted, or completes again");
        }
    }

    fn pieces(&self, local: Local) -> [Segment; 3] {
        let mut offset = usize::from(local.offset) % (REGION_BYTES + 16);
        let mut left = u32::from(local.bytes) % (REGION_BYTES as u32 + 16);
        [Some(local.cuts[0]), Some(local.cuts[1]), None].map(|cut| {
            let bytes = cut.map_or(left, |cut| left.min(u32::from(cut) * 2));
            let piece = Segment { lkey: self.granted.1.lkey, offset, bytes };
            (offset, left) = (offset + bytes as usize, left - bytes);
            piece
        })
    }

    fn post_send(&mut self, which: Which, kind: u8, local: Local) {
        let (number, id) = (self.number(which), self.next_id);
        let [local, more @ ..] = self.pieces(local);
        let posted = if which.takes_datagrams() {
            let to = DatagramAddress { address: peer(), queue_pair: QueuePairNumber(0x33) };
            let request = DatagramRequest {
                id,
                local,
                immediate: (kind & 1 == 1).then_some(5),
                to,
                queue_key: QUEUE_KEY,
                signalled: true,
                solicited: kind & 2 == 2,
            };
            self.endpoint.post_datagram_list(number, request, &more)
        } else {
            let eight = Segment { bytes: 8, ..local };
            let more = if matches!(kind % 8, 3 | 4) { &[][..] } else { &more };
            let operation = match kind % 8 {
                0 => Operation::Send { local },
                1 => Operation::Write { local, remote: REMOTE },
                2 => Operation::Read { local, remote: REMOTE },
                3 => Operation::FetchAdd { local: eight, remote: REMOTE, add: 1 },
                4 => Operation::CompareSwap { local: eight, remote: REMOTE, compare: 1, swap: 2 },
                5 => Operation::SendWithInvalidate { local, rkey: 9 },
                6 => Operation::SendWithImmediate { local, immediate: 3 },
                _ => Operation::WriteWithImmediate { local, remote: REMOTE, immediate: 4 },
            };
            let fence = kind & 0x80 != 0;
            self.endpoint.post_send_list(number, SendRequest { fence, ..SendRequest::new(id, operation) }, more)
        };
        if posted.is_ok() {
            self.open.insert(id, which);
        }
        self.next_id += 1;
    }

    fn post_recv(&mut self, which: Which, local: Local) {
        let [segment, more @ ..] = self.pieces(local);
        let request = RecvRequest { id: self.next_id, segment };
        self.next_id += 1;
        if which.shares_receives() {
            if self.endpoint.post_shared_recv_list(self.shared, request, &more).is_ok() {
                self.open_shared.insert(request.id);
            }
            self.endpoint.set_shared_receive_queue_limit(self.shared, usize::from(local.offset % 4));
        } else if self.endpoint.post_recv_list(self.number(which), request, &more).is_ok() {
            self.open.insert(request.id, which);
        }
    }

    fn handle(&mut self, packet: &[u8]) {
        self.endpoint.handle_packet(self.now, peer(), packet);
        self.stranger.handle_packet(self.now, peer(), packet);
    }

    fn transmit(&mut self) {
        let mut buf = vec![0; 65_507];
        // Bounded: acknowledgements, and READ responses of at most the region.
        for _ in 0..64 {
            let Some(run) = self.endpoint.poll_transmit(self.now, &mut buf, 64) else { break };
            let leaked = buf[..run.bytes].windows(16).any(|window| window.iter().all(|&byte| byte == SECRET));
            assert!(!leaked, "bytes of a region without remote access have left");
        }
    }

    fn forge(&mut self, forged: &Forged) {
        let Some((repr, fill)) = self.headers(forged) else { return };
        let mut packet = vec![0; repr.packet_bytes()];
        repr.emit(&mut packet).fill(fill);
        let covered_bytes = packet.len() - ICRC_BYTES;
        let (covered, icrc) = packet.split_at_mut(covered_bytes);
        icrc.copy_from_slice(&icrc::compute(&Path::segment(peer(), local(), 0), covered).to_le_bytes());
        self.handle(&packet);
    }

    fn headers(&self, forged: &Forged) -> Option<(Repr, u8)> {
        let service = if forged.to.is_some_and(Which::takes_datagrams) { 0b011 << 5 } else { 0 };
        let opcode = Opcode::from_value(service | forged.opcode % 0x20)?;
        let kind = opcode.kind;
        let destination = forged.to.map_or(QueuePairNumber(0x00ab_cdef), |which| self.number(which));
        let base = if forged.answer { SQ_PSN } else { RQ_PSN };
        let psn = Psn::new(base.plus(forged.psn.into()).value().wrapping_sub(4));
        let region = if forged.key & 1 == 0 { self.granted.1 } else { self.private.1 };
        let rkey = if forged.key & 6 == 6 { region.rkey ^ u32::from(forged.key) << 13 } else { region.rkey };
        let address = region.address.wrapping_add_signed(forged.address.into());
        let word = forged.word;
        let repr = Repr {
            opcode,
            solicited: forged.flags & 1 != 0,
            ack_request: forged.flags & 2 != 0,
            deth: (service != 0).then_some(Deth {
                queue_key: if forged.flags & 0x30 == 0x30 { word as u32 } else { QUEUE_KEY },
                source: QueuePairNumber(0x33),
            }),
            feth: kind.has_feth().then_some(word as u32),
            reth: kind.has_reth().then_some(Reth { address, rkey, bytes: forged.bytes.into() }),
            atomic_eth: kind.has_atomic_eth().then_some(AtomicEth { address, rkey, swap_or_add: word, compare: word }),
            aeth: kind.has_aeth().then_some(Aeth {
                syndrome: Syndrome::from_value(forged.syndrome),
                message_sequence: word as u32 & 0x00ff_ffff,
            }),
            atomic_ack_eth: kind.has_atomic_ack_eth().then_some(word),
            immediate: kind.has_immediate().then_some(word as u32),
            invalidate: kind.has_invalidate().then_some(rkey),
            payload_bytes: usize::from(forged.payload_bytes) % 300,
            ..Repr::reliable(kind, destination, psn)
        };
        Some((repr, forged.syndrome))
    }

    fn check(mut self) {
        self.transmit();
        for which in Which::ALL {
            self.endpoint.modify_to_error(self.number(which));
        }
        self.complete();
        assert!(self.open.is_empty(), "never completed: {:?}", self.open);
        self.granted.0.check();
        self.private.0.check();
        assert!(self.private.0.all(SECRET), "a region without remote access was changed");
        let stranger = &mut self.stranger;
        assert_eq!(stranger.counters().packets_received, 0);
        assert!(stranger.poll_timeout().is_none() && stranger.poll_completion().is_none());
        assert!(stranger.poll_event().is_none());
        assert!(stranger.poll_transmit(self.now, &mut [0; PACKET_BYTES_MAX], 1).is_none());
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let mut victim = Victim::new();
    for step in &steps {
        victim.step(step);
    }
    victim.check();
});
