//! Our requester and responder against the recorded exchanges of Linux's rdma_rxe: the same operation gives the same
//! packets, field by field (addresses, keys and queue pair numbers aside).

use std::collections::BTreeMap;

use crate::common::{
    Pair,
    scripted::{PEER, RQ_PSN, SQ_PSN, Scripted},
};
use serde_json::Value;
use soft_roce::{
    Access, DatagramAddress, DatagramConfig, DatagramRequest, Operation, PathMtu, Psn, QueuePairConfig, RecvRequest,
    RegionConfig, Remote, Segment, SendRequest,
    wire::{Aeth, Deth, NakCode, Packet, PacketKind, Repr, Reth, Syndrome, TransportService},
};

/// What must agree: sender (0: requester), and everything but names of places.
#[derive(Debug, PartialEq, Eq)]
struct Facts {
    sender: usize,
    kind: PacketKind,
    psn: u32,
    ack_request: bool,
    solicited: bool,
    payload: Vec<u8>,
    dma_bytes: Option<u32>,
    syndrome: Option<(u8, u32)>,
    immediate: Option<u32>,
    atomic: Option<(u64, u64)>,
    original: Option<u64>,
}

fn facts(sender: usize, packet: &Packet<'_>) -> Facts {
    let repr = Repr::parse(packet);
    Facts {
        sender,
        kind: repr.opcode.kind,
        psn: repr.psn.value(),
        ack_request: repr.ack_request,
        solicited: repr.solicited,
        payload: packet.payload().to_vec(),
        dma_bytes: repr.reth.map(|reth| reth.bytes),
        syndrome: repr.aeth.map(|aeth| (aeth.syndrome.value(), aeth.message_sequence)),
        immediate: repr.immediate,
        atomic: repr.atomic_eth.map(|eth| (eth.swap_or_add, eth.compare)),
        original: repr.atomic_ack_eth,
    }
}

/// Packets and who sent them (0: the requester).
type Exchange = Vec<(usize, Vec<u8>)>;

/// The recorded exchanges by name, in order.
fn exchanges() -> Vec<(String, Exchange)> {
    let vectors: Vec<Value> = serde_json::from_str(include_str!("../data/roce_vectors.json")).expect("JSON");
    let mut names = Vec::new();
    let mut exchanges = BTreeMap::<String, Exchange>::new();
    for vector in &vectors {
        let text = |key: &str| vector[key].as_str().expect("a string");
        let group = text("name").split('/').next().expect("a group");
        let name = format!("{group}/{}", text("exchange"));
        if !exchanges.contains_key(&name) {
            names.push(name.clone());
        }
        let hex = text("ip_packet_hex");
        let bytes = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"));
        let skip = if hex.starts_with('4') { 28 } else { 48 };
        let sender = usize::from(text("direction") == "response");
        exchanges.entry(name).or_default().push((sender, bytes.skip(skip).collect()));
    }
    names.into_iter().map(|name| (name.clone(), exchanges.remove(&name).expect("just put there"))).collect()
}

/// An exchange that a fresh pair of ours can repeat: reliable, one request, nothing refused or lost.
fn is_plain(name: &str, packets: &[Packet<'_>]) -> bool {
    let reliable = packets.iter().all(|packet| packet.opcode().service == TransportService::ReliableConnection);
    // See `our_requests_to_invalidate_are_those_of_the_kernel`.
    let counts = !(name.starts_with("tap_respond/") && name.contains("send_inv"));
    reliable && counts && !["nak", "lost"].iter().any(|word| name.contains(word))
}

/// The operation that the first packets of a recording ask for, with local memory that holds its payload.
fn operation(packets: &[Packet<'_>], lkey: u32, remote: Remote, doomed: u32) -> Operation {
    let requests = || packets.iter().filter(|packet| !packet.opcode().kind.is_response());
    let bytes = requests().map(|packet| packet.payload().len() as u32).sum();
    let local = Segment { lkey, offset: 0, bytes };
    let (first, last) = (requests().next().expect("a request"), requests().next_back().expect("a request"));
    let immediate = last.immediate();
    match first.opcode().kind {
        PacketKind::ReadRequest => {
            let bytes = first.reth().expect("a RETH").bytes;
            Operation::Read { local: Segment { bytes, ..local }, remote }
        }
        PacketKind::CompareSwap => {
            let eth = first.atomic_eth().expect("an AtomicETH");
            let local = Segment { bytes: 8, ..local };
            Operation::CompareSwap { local, remote, compare: eth.compare, swap: eth.swap_or_add }
        }
        PacketKind::FetchAdd => {
            let eth = first.atomic_eth().expect("an AtomicETH");
            Operation::FetchAdd { local: Segment { bytes: 8, ..local }, remote, add: eth.swap_or_add }
        }
        kind if kind.is_write() => match immediate {
            Some(immediate) => Operation::WriteWithImmediate { local, remote, immediate },
            None => Operation::Write { local, remote },
        },
        _ => match (immediate, last.invalidate()) {
            (Some(immediate), _) => Operation::SendWithImmediate { local, immediate },
            (_, Some(_)) => Operation::SendWithInvalidate { local, rkey: doomed },
            _ => Operation::Send { local },
        },
    }
}

/// Memory that holds what one side of the recording sent, or the value that an atomic found.
fn memory(packets: &[(usize, Packet<'_>)], sender: usize) -> Vec<u8> {
    let mine = || packets.iter().filter(|(from, _)| *from == sender).map(|(_, packet)| packet);
    let mut bytes: Vec<u8> = mine().flat_map(|packet| packet.payload().to_vec()).collect();
    if let Some(original) = mine().find_map(Packet::atomic_ack_eth) {
        bytes = original.to_ne_bytes().to_vec();
    }
    bytes.resize(8_192, 0);
    bytes
}

fn repeat(name: &str, recorded: &[(usize, Packet<'_>)]) {
    let packets: Vec<_> = recorded.iter().map(|(_, packet)| *packet).collect();
    let mtu = if name.starts_with("veth_v4_1024") { PathMtu::Mtu1024 } else { PathMtu::Mtu256 };
    let psns = Some([packets[0].psn(), Psn::new(0x100)]);
    let mut pair = Pair::with_psns(1, QueuePairConfig::default(), mtu, psns);
    pair.record = true;
    let (_, near) = pair.register(0, memory(recorded, 0), Access::LOCAL);
    let (_, far) = pair.register(1, memory(recorded, 1), RegionConfig { address: Some(4_096), ..Access::ALL.into() });
    let config = RegionConfig { invalidated_over: Some(pair.queue_pairs[1]), ..Access::ALL.into() };
    let (_, doomed) = pair.register(1, vec![0; 8], config);
    let segment = Segment { lkey: far.lkey, offset: 0, bytes: 8_192 };
    pair.ends[1].post_recv(pair.queue_pairs[1], RecvRequest { id: 0, segment }).unwrap();
    let remote = Remote { address: far.address, rkey: far.rkey };
    let operation = operation(&packets, near.lkey, remote, doomed.rkey);
    let solicited = packets.iter().any(Packet::solicited);
    let request = SendRequest { solicited, ..SendRequest::new(0, operation) };
    pair.ends[0].post_send(pair.queue_pairs[0], request).unwrap();
    pair.run();
    let ours: Vec<_> = std::mem::take(&mut pair.sent);
    let ours = ours.iter().map(|(sender, bytes)| facts(*sender, &Packet::new_checked(bytes).expect("a packet")));
    let theirs = recorded.iter().map(|(sender, packet)| facts(*sender, packet));
    assert_eq!(ours.collect::<Vec<_>>(), theirs.collect::<Vec<_>>(), "{name}");
}

#[test]
fn our_packets_are_those_of_the_kernel() {
    let mut repeated = 0;
    for (name, packets) in exchanges() {
        let recorded: Vec<_> =
            packets.iter().map(|(sender, bytes)| (*sender, Packet::new_checked(bytes).expect("a packet"))).collect();
        let views: Vec<_> = recorded.iter().map(|(_, packet)| *packet).collect();
        if is_plain(&name, &views) {
            repeat(&name, &recorded);
            repeated += 1;
        }
    }
    assert_eq!(repeated, 61, "plain exchanges of the recording");
}

#[test]
fn our_refusals_are_those_of_the_kernel() {
    let mut repeated = 0;
    for (name, packets) in exchanges() {
        // A message too long for its receive: rdma_rxe reports its own failure (0x63), the specification an invalid
        // request (0x61), which is what we do.
        if !name.contains("nak") || name.contains("too_long") {
            continue;
        }
        let access = Access { remote_read: !name.contains("not_permitted"), ..Access::ALL };
        // Timer code 14 is what the recorded kernel was set to.
        let config = QueuePairConfig { access, min_rnr_timer: 14, ..QueuePairConfig::default() };
        let mut peer = Scripted::new(config, PathMtu::Mtu256);
        let request = Packet::new_checked(&packets[0].1).expect("a packet");
        let repr = Repr { destination: peer.number, psn: RQ_PSN, ..Repr::parse(&request) };
        let answers = peer.deliver(repr, request.payload());
        let recorded = Packet::new_checked(&packets[1].1).expect("a packet").aeth();
        assert_eq!(answers.iter().map(|answer| answer.repr.aeth).collect::<Vec<_>>(), [recorded], "{name}");
        repeated += 1;
    }
    assert_eq!(repeated, 7, "refusals in the recording");
}

/// The recorded exchange of that name.
fn recorded(name: &str) -> Vec<Vec<u8>> {
    let exchange = exchanges().into_iter().find(|(found, _)| found == name);
    exchange.expect("it was recorded").1.into_iter().map(|(_, bytes)| bytes).collect()
}

/// The other end of these recordings did not count messages that invalidate, so only the requests are compared.
#[test]
fn our_requests_to_invalidate_are_those_of_the_kernel() {
    for name in ["tap_respond/send_inv_only", "tap_respond/send_inv_fml"] {
        let packets = recorded(name);
        let theirs: Vec<_> = packets.iter().map(|bytes| Packet::new_checked(bytes).expect("a packet")).collect();
        let requests: Vec<_> = theirs.iter().filter(|packet| !packet.opcode().kind.is_response()).collect();
        let mut peer = Scripted::new(QueuePairConfig::default(), PathMtu::Mtu256);
        let payload: Vec<_> = requests.iter().flat_map(|packet| packet.payload().to_vec()).collect();
        let bytes = payload.len() as u32;
        let (_, handle) = peer.register(payload, Access::LOCAL);
        let local = Segment { lkey: handle.lkey, offset: 0, bytes };
        let rkey = requests.iter().find_map(|packet| packet.invalidate()).expect("it invalidates");
        peer.post_send(0, Operation::SendWithInvalidate { local, rkey });
        let ours = peer.transmitted();
        assert_eq!(ours.len(), requests.len(), "{name}");
        for (ours, theirs) in ours.iter().zip(requests) {
            let repr = Repr::parse(theirs);
            assert_eq!(ours.repr, Repr { destination: PEER, psn: ours.repr.psn, ..repr }, "{name}");
            assert_eq!(ours.payload, theirs.payload(), "{name}");
        }
    }
}

#[test]
fn a_receive_that_comes_late_is_used_as_by_the_kernel() {
    for name in ["veth_v4_256/rnr_nak_then_recv", "veth_v6/rnr_nak_then_recv"] {
        let packets = recorded(name);
        let [request, not_ready, done] = [0, 1, 2].map(|index| Packet::new_checked(&packets[index]).expect("a packet"));
        let config = QueuePairConfig { min_rnr_timer: 14, ..QueuePairConfig::default() };
        let mut peer = Scripted::new(config, PathMtu::Mtu256);
        let repr = Repr { destination: peer.number, psn: RQ_PSN, ..Repr::parse(&request) };
        let (_, handle) = peer.register(vec![0; 100], Access::LOCAL);
        let answers = peer.deliver(repr, request.payload());
        assert_eq!(answers.iter().map(|answer| answer.repr.aeth).collect::<Vec<_>>(), [not_ready.aeth()], "{name}");
        peer.post_recv(0, Segment { lkey: handle.lkey, offset: 0, bytes: 100 });
        let answers = peer.deliver(repr, request.payload());
        assert_eq!(answers.iter().map(|answer| answer.repr.aeth).collect::<Vec<_>>(), [done.aeth()], "{name}");
    }
}

/// The kernel answers 0x63; the specification, and we, 0x61. The rest agrees.
#[test]
fn a_message_too_long_is_refused_as_by_the_kernel_but_for_the_code() {
    let packets = recorded("veth_v6/nak_send_too_long");
    let [request, answer] = [0, 1].map(|index| Packet::new_checked(&packets[index]).expect("a packet"));
    let mut peer = Scripted::new(QueuePairConfig::default(), PathMtu::Mtu256);
    let (_, handle) = peer.register(vec![0; 8], Access::LOCAL);
    peer.post_recv(0, Segment { lkey: handle.lkey, offset: 0, bytes: 8 });
    let repr = Repr { destination: peer.number, psn: RQ_PSN, ..Repr::parse(&request) };
    let ours = peer.deliver(repr, request.payload());
    let code = NakCode::InvalidRequest;
    let aeth = answer.aeth().map(|aeth| Aeth { syndrome: Syndrome::Nak(code), ..aeth });
    let theirs = Repr { aeth, destination: PEER, psn: RQ_PSN, ..Repr::parse(&answer) };
    assert_eq!(ours.iter().map(|answer| answer.repr).collect::<Vec<_>>(), [theirs]);
}

/// The kernel asks for everything from the lost response on, once its timer has run out; we ask at once, and only for
/// what is missing. Number, address and key agree.
#[test]
fn a_lost_response_is_asked_for_where_the_kernel_asks() {
    let packets = recorded("tap_respond_drop1/read_1022_one_response_lost");
    let theirs: Vec<_> = packets.iter().map(|bytes| Packet::new_checked(bytes).expect("a packet")).collect();
    let mut peer = Scripted::new(QueuePairConfig::default(), PathMtu::Mtu256);
    let (_, handle) = peer.register(vec![0; 1_022], Access::LOCAL);
    let first = theirs[0].reth().expect("a READ");
    let local = Segment { lkey: handle.lkey, offset: 0, bytes: first.bytes };
    peer.post_send(0, Operation::Read { local, remote: Remote { address: first.address, rkey: first.rkey } });
    let mut sent = peer.transmitted();
    for response in &theirs[1..4] {
        let offset = response.psn().since(theirs[0].psn()) as u32;
        let repr = Repr { destination: peer.number, psn: SQ_PSN.plus(offset), ..Repr::parse(response) };
        sent.extend(peer.deliver(repr, response.payload()));
    }
    let again = theirs[4].reth().expect("a READ");
    let expected = [(0, first), (1, Reth { bytes: 256, ..again })];
    let ours: Vec<_> =
        sent.iter().map(|packet| (packet.repr.psn.since(SQ_PSN), packet.repr.reth.expect("a READ"))).collect();
    assert_eq!(ours, expected);
    let repr = Repr { destination: peer.number, psn: SQ_PSN.plus(1), ..Repr::parse(&theirs[5]) };
    peer.deliver(repr, theirs[5].payload());
    assert_eq!(peer.completions().len(), 1, "the recorded answer completes it");
}

#[test]
fn our_datagrams_are_those_of_the_kernel() {
    for name in ["veth_v4_256/ud_send_50", "veth_v4_256/ud_send_imm_51", "veth_v6/ud_send_50"] {
        let packets = recorded(name);
        let theirs = Packet::new_checked(&packets[0]).expect("a packet");
        let mut peer = Scripted::initialised(QueuePairConfig::default());
        let deth = theirs.deth().expect("a datagram");
        let config = DatagramConfig { path_mtu: PathMtu::Mtu256, ..DatagramConfig::new(deth.queue_key) };
        let number = peer.endpoint.create_datagram_queue_pair(config).expect("room");
        peer.endpoint.modify_datagrams_to_ready_to_receive(number).expect("INIT to RTR");
        peer.endpoint.modify_to_ready_to_send(number).expect("RTR to RTS");
        let bytes = theirs.payload().len() as u32;
        let (_, handle) = peer.register(theirs.payload().to_vec(), Access::LOCAL);
        let request = DatagramRequest {
            id: 0,
            local: Segment { lkey: handle.lkey, offset: 0, bytes },
            immediate: theirs.immediate(),
            to: DatagramAddress { address: peer.remote, queue_pair: theirs.destination() },
            queue_key: deth.queue_key,
            signalled: true,
            solicited: theirs.solicited(),
        };
        peer.endpoint.post_datagram(number, request).expect("room");
        let ours = peer.transmitted();
        let expected = Repr { psn: ours[0].repr.psn, ..Repr::parse(&theirs) };
        let expected = Repr { deth: Some(Deth { source: number, ..deth }), ..expected };
        assert_eq!(ours.iter().map(|packet| packet.repr).collect::<Vec<_>>(), [expected], "{name}");
        assert_eq!(ours[0].payload, theirs.payload(), "{name}");
    }
}
