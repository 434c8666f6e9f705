//! Row by row: what the receiving side answers to each kind of request.

use std::{net::SocketAddr, time::Duration};

use crate::common::scripted::{Decoded, RQ_PSN, Scripted};
use soft_roce::{
    Access, CompletionOpcode, Identification, MemoryWindow, Operation, PathMtu, Peer, Psn, QueuePairConfig,
    QueuePairState, RegionHandle, Segment, Status, Timestamp,
    wire::{AtomicEth, PacketKind, Repr, Reth, Syndrome},
};

const ACK: u8 = 0x1f;
const NAK_SEQUENCE: u8 = 0x60;
const NAK_INVALID: u8 = 0x61;
const NAK_ACCESS: u8 = 0x62;
const NAK_OPERATION: u8 = 0x63;

fn psn(offset: u32) -> u32 {
    RQ_PSN.plus(offset).value()
}

/// A region of 1,024 bytes that everything is allowed on, at a path MTU of 256.
fn connected(config: QueuePairConfig) -> (Scripted, std::sync::Arc<soft_roce::HeapMemory>, RegionHandle) {
    let mut peer = Scripted::new(config, PathMtu::Mtu256);
    let (memory, handle) = peer.register((0..1_024).map(|at| (at / 3) as u8).collect(), Access::ALL);
    (peer, memory, handle)
}

fn reth(handle: RegionHandle, offset: u64, bytes: u32) -> Reth {
    Reth { address: handle.address.wrapping_add(offset), rkey: handle.rkey, bytes }
}

fn asking(repr: Repr) -> Repr {
    Repr { ack_request: true, ..repr }
}

fn with_reth(repr: Repr, reth: Reth) -> Repr {
    Repr { reth: Some(reth), ..asking(repr) }
}

fn aeths(packets: &[Decoded]) -> Vec<(u32, u8, u32)> {
    packets.iter().map(Decoded::aeth).collect()
}

/// The packet is refused with this syndrome, the queue pair ends, and then there is silence.
fn refused(config: QueuePairConfig, syndrome: u8, request: impl Fn(&Scripted, RegionHandle) -> (Repr, Vec<u8>)) {
    let (mut peer, memory, handle) = connected(config);
    let before = memory.to_vec();
    let (repr, payload) = request(&peer, handle);
    let answers = peer.deliver(repr, &payload);
    assert_eq!(aeths(&answers), [(psn(0), syndrome, 0)], "{repr:?}");
    assert_eq!(peer.state(), QueuePairState::Error);
    assert_eq!(peer.deliver(repr, &payload), [], "silence after a refusal");
    assert!(memory.to_vec() == before);
}

#[test]
fn expected_requests_are_carried_out_and_acknowledged_when_asked() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    let write = |kind| Repr { ack_request: false, ..peer.request(kind, 0) };
    let first = Repr { reth: Some(reth(handle, 0, 300)), ..write(PacketKind::WriteFirst) };
    assert_eq!(peer.deliver(first, &[7; 256]), [], "nobody asked");
    let last = asking(peer.request(PacketKind::WriteLast, 1));
    assert_eq!(aeths(&peer.deliver(last, &[8; 44])), [(psn(1), ACK, 1)]);
    assert!(memory.to_vec()[..300] == [[7; 256].as_slice(), &[8; 44]].concat());
}

#[test]
fn what_does_not_ask_is_acknowledged_in_time_where_both_ends_agree() {
    let delay = Duration::from_millis(1);
    let mut peer = Scripted::agreed(QueuePairConfig::default(), PathMtu::Mtu256, delay);
    let (_, handle) = peer.register(vec![0; 1_024], Access::ALL);
    let write = |peer: &Scripted, offset| Repr {
        ack_request: false,
        ..with_reth(peer.request(PacketKind::WriteOnly, offset), reth(handle, 0, 4))
    };
    // Several share one, in time for the first.
    for offset in 0..3 {
        peer.now = Timestamp(u64::from(offset) * 100_000);
        assert_eq!(peer.deliver(write(&peer, offset), &[1; 4]), []);
    }
    assert_eq!(peer.endpoint.poll_timeout(), Some(Timestamp::default() + delay));
    assert_eq!(aeths(&peer.expire()), [(psn(2), ACK, 3)]);
    assert_eq!(peer.endpoint.poll_timeout().map(|_| peer.expire()), None, "nothing is left to do");

    // Whatever else is answered speaks for all before it.
    peer.deliver(write(&peer, 3), &[1; 4]);
    assert_eq!(peer.deliver(peer.read(4, reth(handle, 0, 4)), &[]).len(), 1);
    peer.deliver(write(&peer, 5), &[1; 4]);
    assert_eq!(aeths(&peer.deliver(asking(write(&peer, 6)), &[1; 4])), [(psn(6), ACK, 7)]);
    assert_eq!(peer.expire(), []);

    // It goes along with a request of ours, and not a second time.
    peer.deliver(write(&peer, 7), &[1; 4]);
    peer.post_send(0, Operation::Send { local: Segment { lkey: handle.lkey, offset: 0, bytes: 64 } });
    let kinds = |packets: &[Decoded]| packets.iter().map(Decoded::kind).collect::<Vec<_>>();
    assert_eq!(kinds(&peer.transmitted()), [PacketKind::SendOnly, PacketKind::Acknowledge]);
    peer.deliver(peer.response(PacketKind::Acknowledge, 0, Syndrome::ACK), &[]);
    assert_eq!(peer.endpoint.poll_timeout().map(|_| peer.expire()).unwrap_or_default(), []);
    // A message of several packets is acknowledged when it is whole.
    let first = Repr { reth: Some(reth(handle, 0, 300)), ..peer.request(PacketKind::WriteFirst, 8) };
    peer.deliver(Repr { ack_request: false, ..first }, &[7; 256]);
    assert_eq!(peer.endpoint.poll_timeout().map(|_| peer.expire()).unwrap_or_default(), []);
    peer.deliver(Repr { ack_request: false, ..peer.request(PacketKind::WriteLast, 9) }, &[8; 44]);
    assert_eq!(aeths(&peer.expire()), [(psn(9), ACK, 9)]);
}

#[test]
fn a_gap_is_reported_once_until_the_missing_packet_comes() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let write = |peer: &Scripted, offset| with_reth(peer.request(PacketKind::WriteOnly, offset), reth(handle, 0, 4));
    let (second, third, first) = (write(&peer, 1), write(&peer, 2), write(&peer, 0));
    assert_eq!(aeths(&peer.deliver(second, &[1; 4])), [(psn(0), NAK_SEQUENCE, 0)]);
    assert_eq!(peer.deliver(third, &[1; 4]), []);
    assert_eq!(aeths(&peer.deliver(first, &[1; 4])), [(psn(0), ACK, 1)]);
    assert_eq!(aeths(&peer.deliver(third, &[1; 4])), [(psn(1), NAK_SEQUENCE, 1)]);
    assert_eq!(peer.endpoint.counters().sequence_errors, 2);
}

#[test]
fn repeated_sends_and_writes_are_acknowledged_but_not_carried_out() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    for offset in 0..3 {
        let write = with_reth(peer.request(PacketKind::WriteOnly, offset), reth(handle, 0, 4));
        peer.deliver(write, &[1; 4]);
    }
    let again = Repr { ack_request: false, ..with_reth(peer.request(PacketKind::WriteOnly, 0), reth(handle, 0, 4)) };
    assert_eq!(aeths(&peer.deliver(again, &[9; 4])), [(psn(2), ACK, 3)], "the latest number");
    assert_eq!(memory.to_vec()[..4], [1; 4]);
    assert_eq!(peer.endpoint.counters().duplicate_requests, 1);
}

/// Linux's `rdma_rxe` takes an acknowledgement of a READ's last number for its last response, and ends the READ with
/// other bytes than the peer's.
#[test]
fn a_repeated_write_does_not_acknowledge_a_read_behind_it() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let write = with_reth(peer.request(PacketKind::WriteOnly, 0), reth(handle, 0, 4));
    peer.deliver(write, &[1; 4]);
    assert_eq!(peer.deliver(peer.read(1, reth(handle, 0, 700)), &[]).len(), 3);
    assert_eq!(aeths(&peer.deliver(write, &[1; 4])), [(psn(0), ACK, 2)]);
    let behind = with_reth(peer.request(PacketKind::WriteOnly, 4), reth(handle, 0, 4));
    assert_eq!(aeths(&peer.deliver(asking(behind), &[1; 4])), [(psn(4), ACK, 3)]);
    assert_eq!(aeths(&peer.deliver(write, &[1; 4])), [(psn(4), ACK, 3)], "the latest number of a WRITE");
}

#[test]
fn reads_are_answered_in_packets_that_number_themselves() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    let request = Repr { ack_request: false, ..peer.read(0, reth(handle, 5, 700)) };
    let answers = peer.deliver(request, &[]);
    let kinds: Vec<_> = answers.iter().map(Decoded::kind).collect();
    use PacketKind::{ReadResponseFirst, ReadResponseLast, ReadResponseMiddle, ReadResponseOnly};
    assert_eq!(kinds, [ReadResponseFirst, ReadResponseMiddle, ReadResponseLast]);
    assert_eq!([answers[0].aeth(), answers[2].aeth()], [(psn(0), ACK, 1), (psn(2), ACK, 1)]);
    let payload: Vec<_> = answers.iter().flat_map(|answer| answer.payload.clone()).collect();
    assert!(payload == memory.to_vec()[5..705]);
    // Nothing to read: the key is not looked at.
    let nothing = peer.read(3, Reth { address: 1, rkey: 2, bytes: 0 });
    let answers = peer.deliver(nothing, &[]);
    assert_eq!((answers[0].kind(), answers[0].aeth()), (ReadResponseOnly, (psn(3), ACK, 2)));
    assert_eq!(answers.len(), 1);
}

#[test]
fn a_repeated_read_is_answered_from_memory_again() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    peer.deliver(peer.read(0, reth(handle, 0, 700)), &[]);
    use soft_roce::Memory;
    memory.write(256, &[0xee; 8]);
    let answers = peer.deliver(peer.read(1, reth(handle, 256, 444)), &[]);
    assert_eq!(answers.iter().map(|answer| answer.repr.psn.value()).collect::<Vec<_>>(), [psn(1), psn(2)]);
    assert_eq!(answers[0].payload[..8], [0xee; 8]);
    // Beyond the first range, at another place, or with another key: silence.
    for wrong in [reth(handle, 256, 445), reth(handle, 255, 444), Reth { rkey: 1, ..reth(handle, 256, 444) }] {
        assert_eq!(peer.deliver(peer.read(1, wrong), &[]), []);
    }
    assert_eq!(peer.state(), QueuePairState::ReadyToSend);
}

#[test]
fn a_part_that_is_asked_for_again_does_not_cut_the_answer_short() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let read = peer.read(0, reth(handle, 0, 1_024));
    let again = peer.read(1, reth(handle, 256, 256));
    let encoded = [read, again, again].map(|repr| peer.encode(repr, &[]));
    peer.endpoint.handle_packet(peer.now, peer.remote, &encoded[0]);
    let mut buf = vec![0; 65_507];
    let sent = peer.endpoint.poll_transmit(peer.now, &mut buf, 3).expect("the answer begins");
    assert_eq!(sent.segments, 2, "First and one Middle, which is shorter");
    for bytes in &encoded[1..] {
        peer.endpoint.handle_packet(peer.now, peer.remote, bytes);
    }
    let numbers: Vec<_> = peer.transmitted().iter().map(|packet| packet.repr.psn.since(RQ_PSN)).collect();
    assert_eq!(numbers, [2, 3, 1]);
    // What is still to be sent anyway is not sent twice.
    peer.endpoint.handle_packet(peer.now, peer.remote, &encoded[0]);
    peer.endpoint.handle_packet(peer.now, peer.remote, &encoded[1]);
    assert_eq!(peer.transmitted().len(), 4);
}

#[test]
fn only_the_latest_reads_are_remembered() {
    let config = QueuePairConfig { max_dest_rd_atomic: 2, ..QueuePairConfig::default() };
    let (mut peer, _, handle) = connected(config);
    for offset in 0..3 {
        assert_eq!(peer.deliver(peer.read(offset, reth(handle, 0, 8)), &[]).len(), 1);
    }
    assert_eq!(peer.deliver(peer.read(0, reth(handle, 0, 8)), &[]), []);
    assert_eq!(peer.deliver(peer.read(1, reth(handle, 0, 8)), &[]).len(), 1);
}

#[test]
fn a_repeated_atomic_gets_the_saved_result() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    let original = u64::from_ne_bytes(memory.to_vec()[8..16].try_into().unwrap());
    let atomic_eth = Some(AtomicEth { address: handle.address + 8, rkey: handle.rkey, swap_or_add: 5, compare: 0 });
    let request = Repr { atomic_eth, ..peer.request(PacketKind::FetchAdd, 0) };
    for _ in 0..3 {
        let answers = peer.deliver(request, &[]);
        assert_eq!(answers[0].aeth(), (psn(0), ACK, 1));
        assert_eq!(answers[0].repr.atomic_ack_eth, Some(original));
    }
    let now = u64::from_ne_bytes(memory.to_vec()[8..16].try_into().unwrap());
    assert_eq!(now, original + 5, "it ran once");
    let unknown = Repr { atomic_eth, ..Repr::reliable(PacketKind::FetchAdd, peer.number, Psn::new(psn(0) - 1)) };
    assert_eq!(peer.deliver(unknown, &[]), []);
}

#[test]
fn without_a_receive_the_peer_is_asked_to_wait() {
    let config = QueuePairConfig { min_rnr_timer: 14, ..QueuePairConfig::default() };
    let (mut peer, _, handle) = connected(config);
    let send = asking(peer.request(PacketKind::SendOnly, 0));
    assert_eq!(aeths(&peer.deliver(send, &[1; 40])), [(psn(0), 0x20 | 14, 0)]);
    let next = asking(peer.request(PacketKind::SendOnly, 1));
    assert_eq!(peer.deliver(next, &[1; 40]), [], "the peer knows where to go on");
    peer.post_recv(3, Segment { lkey: handle.lkey, offset: 0, bytes: 100 });
    assert_eq!(aeths(&peer.deliver(send, &[1; 40])), [(psn(0), ACK, 1)]);
    // A WRITE with immediate needs one at its last packet, and has written nothing of that packet before.
    let first = with_reth(peer.request(PacketKind::WriteFirst, 1), reth(handle, 0, 300));
    peer.deliver(first, &[5; 256]);
    let last = Repr { immediate: Some(9), ..asking(peer.request(PacketKind::WriteLastImmediate, 2)) };
    assert_eq!(aeths(&peer.deliver(last, &[5; 44])), [(psn(2), 0x20 | 14, 1)]);
    peer.post_recv(4, Segment::default());
    assert_eq!(aeths(&peer.deliver(last, &[5; 44])), [(psn(2), ACK, 2)]);
    let done: Vec<_> = peer.completions().iter().map(|done| (done.id, done.opcode, done.bytes)).collect();
    assert_eq!(done, [(3, CompletionOpcode::Recv, 40), (4, CompletionOpcode::RecvWriteWithImmediate, 300)]);
}

#[test]
fn packets_out_of_order_within_a_message_are_invalid() {
    use PacketKind::{SendLast, SendMiddle, WriteLast, WriteMiddle};
    for kind in [SendMiddle, SendLast, WriteMiddle, WriteLast] {
        refused(QueuePairConfig::default(), NAK_INVALID, |peer, _| (peer.request(kind, 0), vec![0; 256]));
    }
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    peer.deliver(with_reth(peer.request(PacketKind::WriteFirst, 0), reth(handle, 0, 300)), &[0; 256]);
    let read = peer.read(1, reth(handle, 0, 8));
    assert_eq!(aeths(&peer.deliver(read, &[]))[1..], [], "one answer");
    assert_eq!(peer.state(), QueuePairState::Error, "a READ inside a WRITE");
}

#[test]
fn lengths_that_do_not_add_up_are_invalid() {
    let config = QueuePairConfig::default;
    let write = |kind, announced, sent: usize| {
        refused(config(), NAK_INVALID, move |peer, handle| {
            (with_reth(peer.request(kind, 0), reth(handle, 0, announced)), vec![0; sent])
        });
    };
    write(PacketKind::WriteFirst, 600, 255);
    write(PacketKind::WriteFirst, 600, 257);
    write(PacketKind::WriteFirst, 256, 256);
    write(PacketKind::WriteOnly, 10, 11);
    write(PacketKind::WriteOnly, 10, 9);
    write(PacketKind::WriteOnly, 257, 257);
    refused(config(), NAK_INVALID, |peer, handle| (peer.read(0, reth(handle, 0, 8)), vec![0; 4]));
}

#[test]
fn what_the_queue_pair_does_not_allow_is_invalid() {
    let forbid = |access| QueuePairConfig { access, ..QueuePairConfig::default() };
    let all = Access::ALL;
    refused(forbid(Access { remote_read: false, ..all }), NAK_INVALID, |peer, handle| {
        (peer.read(0, reth(handle, 0, 8)), vec![])
    });
    refused(forbid(Access { remote_write: false, ..all }), NAK_INVALID, |peer, handle| {
        (with_reth(peer.request(PacketKind::WriteOnly, 0), reth(handle, 0, 8)), vec![0; 8])
    });
    let add = |offset: u64| {
        move |peer: &Scripted, handle: RegionHandle| {
            let eth = AtomicEth { address: handle.address + offset, rkey: handle.rkey, swap_or_add: 1, compare: 0 };
            (Repr { atomic_eth: Some(eth), ..peer.request(PacketKind::FetchAdd, 0) }, vec![])
        }
    };
    refused(forbid(Access { remote_atomic: false, ..all }), NAK_INVALID, add(0));
    refused(QueuePairConfig::default(), NAK_INVALID, add(4));
    let no_reads = QueuePairConfig { max_dest_rd_atomic: 0, ..QueuePairConfig::default() };
    refused(no_reads, NAK_INVALID, |peer, handle| (peer.read(0, reth(handle, 0, 8)), vec![]));
    refused(no_reads, NAK_INVALID, add(0));
}

#[test]
fn keys_bounds_and_permissions_are_access_errors() {
    let config = QueuePairConfig::default;
    for wrong in [
        (|handle| Reth { rkey: 0x1234, ..reth(handle, 0, 8) }) as fn(RegionHandle) -> Reth,
        |handle| reth(handle, 1_017, 8),
        |handle| reth(handle, u64::MAX, 8),
        |handle| Reth { address: u64::MAX - 3, ..reth(handle, 0, 8) },
    ] {
        refused(config(), NAK_ACCESS, |peer, handle| (peer.read(0, wrong(handle)), vec![]));
        refused(config(), NAK_ACCESS, |peer, handle| {
            (with_reth(peer.request(PacketKind::WriteOnly, 0), wrong(handle)), vec![0; 8])
        });
    }
    let mut peer = Scripted::new(config(), PathMtu::Mtu256);
    let (_, read_only) = peer.register(vec![0; 64], Access { remote_read: true, ..Access::LOCAL });
    let write = with_reth(peer.request(PacketKind::WriteOnly, 0), reth(read_only, 0, 8));
    assert_eq!(aeths(&peer.deliver(write, &[0; 8])), [(psn(0), NAK_ACCESS, 0)]);
}

#[test]
fn a_message_longer_than_its_receive_fails_on_both_sides() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    let before = memory.to_vec();
    peer.post_recv(1, Segment { lkey: handle.lkey, offset: 0, bytes: 10 });
    peer.post_recv(2, Segment { lkey: handle.lkey, offset: 0, bytes: 10 });
    let send = asking(peer.request(PacketKind::SendOnly, 0));
    assert_eq!(aeths(&peer.deliver(send, &[1; 11])), [(psn(0), NAK_INVALID, 0)]);
    let statuses: Vec<_> = peer.completions().iter().map(|done| (done.id, done.status)).collect();
    assert_eq!(statuses, [(1, Status::LocalLength), (2, Status::Flushed)]);
    assert!(memory.to_vec() == before);
}

#[test]
fn a_receive_into_nowhere_is_our_own_failure() {
    let (mut peer, ..) = connected(QueuePairConfig::default());
    peer.post_recv(1, Segment { lkey: 0xdead, offset: 0, bytes: 100 });
    let send = asking(peer.request(PacketKind::SendOnly, 0));
    assert_eq!(aeths(&peer.deliver(send, &[1; 11])), [(psn(0), NAK_OPERATION, 0)]);
    assert_eq!(peer.completions()[0].status, Status::LocalProtection);
}

#[test]
fn an_invalidate_of_a_foreign_key_is_an_access_error() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    peer.post_recv(1, Segment { lkey: handle.lkey, offset: 0, bytes: 100 });
    let send = Repr { invalidate: Some(0x777), ..asking(peer.request(PacketKind::SendOnlyInvalidate, 0)) };
    assert_eq!(aeths(&peer.deliver(send, &[1; 11])), [(psn(0), NAK_ACCESS, 0)]);
}

/// Regression: a connected peer withdrew a region that all peers may reach.
#[test]
fn a_region_that_a_peer_reaches_is_not_its_own_to_withdraw() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let (_, shared) = peer.register(vec![7; 64], Access::ALL);
    peer.post_recv(1, Segment { lkey: handle.lkey, offset: 0, bytes: 100 });
    let send = Repr { invalidate: Some(shared.rkey), ..asking(peer.request(PacketKind::SendOnlyInvalidate, 0)) };
    assert_eq!(aeths(&peer.deliver(send, &[1; 11])), [(psn(0), NAK_ACCESS, 0)]);
    assert_eq!(peer.completions()[0].status, Status::LocalProtection);
    assert!(peer.endpoint.deregister(shared.lkey), "it is still there");
}

/// A stranger's packet is dropped before its ICRC is looked at, unless it comes from where the peer's do.
#[test]
fn packets_of_a_peer_like_us_come_from_its_own_port() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let write = asking(with_reth(peer.request(PacketKind::WriteOnly, 0), reth(handle, 0, 4)));
    let mut bytes = peer.encode(write, &[1; 4]);
    let elsewhere = SocketAddr::new(peer.remote.ip(), peer.remote.port() ^ 1);
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    peer.endpoint.handle_packet(peer.now, elsewhere, &bytes);
    assert_eq!((peer.endpoint.counters().dropped_wrong_peer, peer.endpoint.counters().dropped_icrc), (1, 0));
    peer.endpoint.handle_packet(peer.now, peer.remote, &bytes);
    assert_eq!((peer.endpoint.counters().dropped_wrong_peer, peer.endpoint.counters().dropped_icrc), (1, 1));

    // Whoever may send from any port is only told by its address.
    let mut peer = Scripted::initialised(QueuePairConfig::default());
    let any = Peer { identification: Identification::Any, ..peer.peer(PathMtu::Mtu256) };
    peer.endpoint.connect_queue_pair(peer.number, any).unwrap();
    let send = peer.encode(asking(peer.request(PacketKind::SendOnly, 0)), &[1; 4]);
    peer.endpoint.handle_packet(peer.now, elsewhere, &send);
    assert_eq!(peer.endpoint.counters().dropped_wrong_peer, 0);
}

#[test]
fn acknowledgements_are_gathered_but_never_overtake_a_read() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let write = |offset| with_reth(peer.request(PacketKind::WriteOnly, offset), reth(handle, 0, 4));
    let packets = [
        peer.encode(write(0), &[1; 4]),
        peer.encode(write(1), &[1; 4]),
        peer.encode(peer.read(2, reth(handle, 0, 4)), &[]),
        peer.encode(write(3), &[1; 4]),
        peer.encode(write(4), &[1; 4]),
    ];
    for bytes in packets {
        peer.endpoint.handle_packet(peer.now, peer.remote, &bytes);
    }
    assert_eq!(aeths(&peer.transmitted()), [(psn(1), ACK, 2), (psn(2), ACK, 3), (psn(4), ACK, 5)]);
}

#[test]
fn a_repeated_read_is_answered_before_what_comes_later() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    peer.deliver(peer.read(0, reth(handle, 0, 700)), &[]);
    let packets = [
        peer.encode(with_reth(peer.request(PacketKind::WriteOnly, 3), reth(handle, 0, 4)), &[1; 4]),
        peer.encode(peer.read(4, reth(handle, 0, 4)), &[]),
        peer.encode(peer.read(1, reth(handle, 256, 444)), &[]),
        // Again, while the answer still waits: one answer is enough.
        peer.encode(peer.read(1, reth(handle, 256, 444)), &[]),
    ];
    for bytes in packets {
        peer.endpoint.handle_packet(peer.now, peer.remote, &bytes);
    }
    let psns: Vec<_> = peer.transmitted().iter().map(|packet| packet.repr.psn.value()).collect();
    assert_eq!(psns, [psn(1), psn(2), psn(3), psn(4)]);
}

#[test]
fn a_region_withdrawn_during_a_read_stops_it() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let bytes = peer.encode(peer.read(0, reth(handle, 0, 700)), &[]);
    peer.endpoint.handle_packet(peer.now, peer.remote, &bytes);
    let mut buf = vec![0; 8_192];
    assert_eq!(peer.endpoint.poll_transmit(peer.now, &mut buf, 1).map(|transmit| transmit.segments), Some(1));
    assert!(peer.endpoint.deregister(handle.lkey));
    assert_eq!(aeths(&peer.transmitted()), [(psn(1), NAK_ACCESS, 1)]);
    assert_eq!(peer.state(), QueuePairState::Error);
}

#[test]
fn packets_for_nobody_are_counted_and_dropped() {
    let mut peer = Scripted::initialised(QueuePairConfig::default());
    let request = peer.request(PacketKind::SendOnly, 0);
    assert_eq!(peer.deliver(request, &[]), [], "INIT answers nobody");
    assert_eq!(peer.endpoint.counters().dropped_no_queue_pair, 1);
    peer.endpoint.modify_to_ready_to_receive(peer.number, peer.peer(PathMtu::Mtu256)).unwrap();
    peer.post_recv(1, Segment::default());
    assert_eq!(peer.deliver(asking(request), &[]).len(), 1, "RTR answers");
    assert_eq!(peer.deliver(Repr { partition_key: 0x8001, ..request }, &[]), []);
    let bytes = peer.encode(peer.request(PacketKind::SendOnly, 1), &[]);
    peer.endpoint.handle_packet(peer.now, "127.0.0.9:4791".parse().unwrap(), &bytes);
    assert_eq!(peer.endpoint.counters().dropped_wrong_peer, 2);
    let mut damaged = bytes.clone();
    damaged[11] ^= 1;
    peer.endpoint.handle_packet(peer.now, peer.remote, &damaged);
    assert_eq!(peer.endpoint.counters().dropped_icrc, 1);
    peer.endpoint.handle_packet(peer.now, peer.remote, &bytes[..10]);
    assert_eq!(peer.endpoint.counters().dropped_malformed, 1);
}

#[test]
fn an_owner_that_ends_a_refused_queue_pair_does_not_swallow_the_refusal() {
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    let read = peer.encode(peer.read(0, reth(handle, 0, 700)), &[]);
    let bad = peer.encode(peer.read(3, Reth { rkey: 1, ..reth(handle, 0, 8) }), &[]);
    for bytes in [read, bad] {
        peer.endpoint.handle_packet(peer.now, peer.remote, &bytes);
    }
    peer.endpoint.modify_to_error(peer.number);
    assert_eq!(aeths(&peer.transmitted()), [(psn(3), NAK_ACCESS, 1)]);
}

#[test]
fn a_region_is_valid_until_it_is_withdrawn_even_within_a_message() {
    let (mut peer, memory, handle) = connected(QueuePairConfig::default());
    peer.deliver(with_reth(peer.request(PacketKind::WriteFirst, 0), reth(handle, 0, 300)), &[7; 256]);
    assert!(peer.endpoint.deregister(handle.lkey));
    let before = memory.to_vec();
    let answers = peer.deliver(asking(peer.request(PacketKind::WriteLast, 1)), &[8; 44]);
    assert_eq!(aeths(&answers), [(psn(1), NAK_ACCESS, 0)]);
    assert!(memory.to_vec() == before);
    // What takes its place in the table is another region.
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    assert!(peer.endpoint.deregister(handle.lkey));
    let (_, next) = peer.register(vec![0; 1_024], Access::ALL);
    let stale = Reth { address: next.address, ..reth(handle, 0, 8) };
    assert_eq!(aeths(&peer.deliver(peer.read(0, stale), &[])), [(psn(0), NAK_ACCESS, 0)]);
}

#[test]
fn flush_and_atomic_write_are_refused() {
    refused(QueuePairConfig::default(), NAK_INVALID, |peer, handle| {
        let flush = Repr { feth: Some(0x11), ..peer.request(PacketKind::Flush, 0) };
        (with_reth(flush, reth(handle, 0, 8)), vec![])
    });
    refused(QueuePairConfig::default(), NAK_INVALID, |peer, handle| {
        (with_reth(peer.request(PacketKind::AtomicWrite, 0), reth(handle, 0, 8)), vec![1; 8])
    });
    // Nor does a repeated one pass for the READ that had its number.
    let (mut peer, _, handle) = connected(QueuePairConfig::default());
    peer.deliver(peer.read(0, reth(handle, 0, 8)), &[]);
    let flush = Repr { feth: Some(0x11), ..peer.request(PacketKind::Flush, 0) };
    assert_eq!(peer.deliver(with_reth(flush, reth(handle, 0, 8)), &[]), []);
}

#[test]
fn services_that_we_do_not_speak_are_counted_and_dropped() {
    // UC SEND Only, RD SEND Only, XRC SEND Only, a congestion notification, and a reserved value.
    for opcode in [0x24, 0x44, 0xa4, 0x81, 0x15] {
        let (mut peer, _, handle) = connected(QueuePairConfig::default());
        peer.post_recv(0, Segment { lkey: handle.lkey, offset: 0, bytes: 100 });
        let mut bytes = peer.encode(asking(peer.request(PacketKind::SendOnly, 0)), &[0; 16]);
        bytes[0] = opcode;
        peer.endpoint.handle_packet(peer.now, peer.remote, &bytes);
        assert_eq!(peer.transmitted(), [], "{opcode:#x}");
        assert_eq!(peer.completions(), []);
        assert_eq!(peer.endpoint.counters().dropped_unsupported, 1, "{opcode:#x}");
        assert_eq!(peer.state(), QueuePairState::ReadyToSend);
    }
}

/// A READ that was doubled on the way may come again when its owner has closed the window: the first answer has been
/// taken, or it would not be closed. That is nobody's mistake, so the queue pair goes on.
#[test]
fn a_read_that_comes_again_once_its_window_is_closed_is_not_answered_and_ends_nothing() {
    let mut peer = Scripted::new(QueuePairConfig::default(), PathMtu::Mtu256);
    let (memory, handle) = peer.register((0..1_024).map(|at| (at / 3) as u8).collect(), Access::LOCAL);
    let windows = peer.endpoint.windows(handle.lkey);
    let open = || windows.bind(MemoryWindow { readable: 0..600, writable: 600..1_024 });
    let key = open();
    let at = |rkey, offset, bytes| Reth { address: handle.address + offset, rkey, bytes };
    let read = peer.read(0, at(key, 0, 600));
    assert_eq!(peer.deliver(read, &[]).len(), 3);
    assert_eq!(peer.deliver(read, &[]).len(), 3, "it is open");
    windows.unbind(key);
    assert_eq!(peer.deliver(read, &[]), []);
    assert_eq!(peer.state(), QueuePairState::ReadyToSend);
    // What is asked for next is carried out, and what was not open before is refused.
    let next = open();
    let write = with_reth(peer.request(PacketKind::WriteOnly, 3), at(next, 600, 4));
    assert_eq!(aeths(&peer.deliver(write, &[9; 4])), [(psn(3), ACK, 2)]);
    assert_eq!(memory.to_vec()[600..604], [9; 4]);
    let late = with_reth(peer.request(PacketKind::WriteOnly, 4), at(key, 600, 4));
    assert_eq!(aeths(&peer.deliver(late, &[8; 4])), [(psn(4), NAK_ACCESS, 2)]);
    assert_eq!((peer.state(), &memory.to_vec()[600..604]), (QueuePairState::Error, &[9; 4][..]));
}
