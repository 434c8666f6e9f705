//! The states of a queue pair: which transitions exist, what each does to posted work, and the events and notifications
//! that go with them.

use std::collections::BTreeSet;

use crate::common::scripted::{Decoded, PEER, SQ_PSN, Scripted};
use soft_roce::{
    Access, AsyncEvent, Endpoint, EndpointConfig, ModifyError, Notify, Operation, PathMtu, QueuePairConfig,
    QueuePairNumber, QueuePairState, RegionHandle, Remote, Segment, SendRequest, Status,
    wire::{PacketKind, Repr, Reth, Syndrome},
};

use QueuePairState::{Error, Init, ReadyToReceive, ReadyToSend, SendQueueDrain};

const REMOTE: Remote = Remote { address: 0x7000, rkey: 0x99 };

fn connected() -> (Scripted, RegionHandle) {
    let mut peer = Scripted::new(QueuePairConfig::default(), PathMtu::Mtu256);
    let (_, handle) = peer.register(vec![0; 10_000], Access::ALL);
    (peer, handle)
}

fn send(handle: RegionHandle, bytes: u32) -> Operation {
    Operation::Send { local: Segment { lkey: handle.lkey, offset: 0, bytes } }
}

fn offsets(packets: &[Decoded]) -> Vec<i32> {
    packets.iter().map(|packet| packet.repr.psn.since(SQ_PSN)).collect()
}

fn ack(peer: &mut Scripted, offset: u32) -> Vec<Decoded> {
    peer.deliver(peer.response(PacketKind::Acknowledge, offset, Syndrome::ACK), &[])
}

fn events(peer: &mut Scripted) -> Vec<AsyncEvent> {
    std::iter::from_fn(|| peer.endpoint.poll_event()).collect()
}

fn statuses(peer: &mut Scripted) -> Vec<(u64, Status)> {
    peer.completions().iter().map(|done| (done.id, done.status)).collect()
}

/// Each of the 24 bits of a number is set in about half of them, or each of the lower 16 where the upper byte is given;
/// and a number that was given up does not come back soon.
#[test]
fn numbers_are_random_in_all_their_bits() {
    for (queue_pair_prefix, bits) in [(None, 24), (Some(0xa5), 16)] {
        let config = EndpointConfig::new("127.0.0.1:4791".parse().unwrap(), 11);
        let mut endpoint = Endpoint::new(EndpointConfig { queue_pair_prefix, ..config });
        let mut numbers = BTreeSet::new();
        for _ in 0..4_000 {
            let number = endpoint.create_queue_pair(QueuePairConfig::default()).unwrap();
            assert!(numbers.insert(number), "{number:?} comes back at once");
            assert!(endpoint.destroy_queue_pair(number));
        }
        for bit in 0..bits {
            let count = numbers.iter().filter(|number| number.0 >> bit & 1 == 1).count();
            assert!((1_800..2_200).contains(&count), "bit {bit} is set in {count} of 4000");
        }
        let is_prefixed = |number: &QueuePairNumber| number.0 >> 16 == 0xa5;
        assert_eq!(numbers.iter().all(is_prefixed), queue_pair_prefix.is_some());
    }
    // One seed gives one history, and another another.
    let first = |seed| {
        let mut endpoint = Endpoint::new(EndpointConfig::new("127.0.0.1:4791".parse().unwrap(), seed));
        (endpoint.create_queue_pair(QueuePairConfig::default()).unwrap(), endpoint.random_psn())
    };
    assert!(first(1) == first(1) && first(1).0 != first(2).0);
}

/// A queue pair in a state, reached the legal way.
fn in_state(state: QueuePairState) -> Scripted {
    let mut peer = Scripted::initialised(QueuePairConfig::default());
    let number = peer.number;
    let connection = peer.peer(PathMtu::Mtu256);
    if matches!(state, ReadyToReceive | ReadyToSend | SendQueueDrain) {
        peer.endpoint.modify_to_ready_to_receive(number, connection).unwrap();
    }
    if matches!(state, ReadyToSend | SendQueueDrain) {
        peer.endpoint.modify_to_ready_to_send(number).unwrap();
    }
    if state == SendQueueDrain {
        peer.endpoint.modify_to_send_queue_drain(number).unwrap();
    }
    if state == Error {
        assert!(peer.endpoint.modify_to_error(number));
    }
    assert_eq!(peer.state(), state);
    peer
}

#[test]
fn only_the_transitions_of_the_specification_exist() {
    let legal = [
        (Init, ReadyToReceive),
        (ReadyToReceive, ReadyToSend),
        (ReadyToSend, SendQueueDrain),
        (SendQueueDrain, ReadyToSend),
    ];
    for from in [Init, ReadyToReceive, ReadyToSend, SendQueueDrain, Error] {
        for to in [ReadyToReceive, ReadyToSend, SendQueueDrain] {
            let mut peer = in_state(from);
            let (number, connection) = (peer.number, peer.peer(PathMtu::Mtu256));
            let modified = match to {
                ReadyToReceive => peer.endpoint.modify_to_ready_to_receive(number, connection),
                ReadyToSend => peer.endpoint.modify_to_ready_to_send(number),
                _ => peer.endpoint.modify_to_send_queue_drain(number),
            };
            if legal.contains(&(from, to)) {
                assert_eq!((modified, peer.state()), (Ok(()), to));
            } else {
                assert_eq!((modified, peer.state()), (Err(ModifyError::Transition { from, to }), from));
                let said = modified.unwrap_err().to_string();
                assert!(said.contains(&format!("{from:?}")) && said.contains(&format!("{to:?}")), "{said}");
            }
        }
        let mut peer = in_state(from);
        assert!(peer.endpoint.modify_to_error(peer.number) && peer.state() == Error, "ERROR from {from:?}");
        let mut peer = in_state(from);
        assert!(peer.endpoint.modify_to_reset(peer.number) && peer.state() == Init, "RESET from {from:?}");
    }
    let mut peer = in_state(Init);
    let unknown = peer.endpoint.modify_to_ready_to_send(QueuePairNumber(5));
    assert_eq!(unknown, Err(ModifyError::UnknownQueuePair));
}

#[test]
fn a_reset_empties_the_queues_without_completions() {
    let (mut peer, handle) = connected();
    peer.post_recv(1, Segment { lkey: handle.lkey, offset: 0, bytes: 8 });
    peer.post_send(2, send(handle, 8));
    assert!(peer.endpoint.modify_to_reset(peer.number));
    assert_eq!((statuses(&mut peer), peer.transmitted()), (vec![], vec![]));
    // And it starts anew.
    peer.endpoint.connect_queue_pair(peer.number, peer.peer(PathMtu::Mtu256)).unwrap();
    peer.post_send(3, send(handle, 8));
    assert_eq!(offsets(&peer.transmitted()), [0]);
}

#[test]
fn draining_finishes_what_was_begun_and_holds_the_rest() {
    let config = QueuePairConfig { request_window_packets: 2, ..QueuePairConfig::default() };
    let mut peer = Scripted::new(config, PathMtu::Mtu256);
    let (_, handle) = peer.register(vec![0; 10_000], Access::ALL);
    peer.post_send(0, send(handle, 256));
    peer.post_send(1, send(handle, 700));
    peer.post_send(2, send(handle, 8));
    assert_eq!(offsets(&peer.transmitted()), [0, 1], "the second has begun");
    peer.endpoint.modify_to_send_queue_drain(peer.number).unwrap();
    peer.post_send(3, send(handle, 8));
    assert_eq!(offsets(&ack(&mut peer, 1)), [2, 3]);
    assert_eq!(events(&mut peer), []);
    assert_eq!(ack(&mut peer, 3), []);
    assert_eq!(events(&mut peer), [AsyncEvent::SendQueueDrained(peer.number)]);
    assert_eq!(statuses(&mut peer), [(0, Status::Success), (1, Status::Success)]);
    // The peer is answered meanwhile.
    let reth = Some(Reth { address: handle.address, rkey: handle.rkey, bytes: 8 });
    assert_eq!(peer.deliver(Repr { reth, ..peer.request(PacketKind::ReadRequest, 0) }, &[]).len(), 1);
    peer.endpoint.modify_to_ready_to_send(peer.number).unwrap();
    assert_eq!(offsets(&peer.transmitted()), [4, 5]);
    ack(&mut peer, 5);
    assert_eq!(statuses(&mut peer), [(2, Status::Success), (3, Status::Success)]);
    // With nothing under way it is drained at once.
    peer.endpoint.modify_to_send_queue_drain(peer.number).unwrap();
    assert_eq!(events(&mut peer), [AsyncEvent::SendQueueDrained(peer.number)]);
}

#[test]
fn what_is_held_back_is_flushed_on_an_error() {
    let (mut peer, handle) = connected();
    peer.endpoint.modify_to_send_queue_drain(peer.number).unwrap();
    peer.post_send(1, send(handle, 8));
    assert_eq!(peer.transmitted(), []);
    peer.endpoint.modify_to_error(peer.number);
    assert_eq!(statuses(&mut peer), [(1, Status::Flushed)]);
}

#[test]
fn the_first_packet_in_rtr_is_an_event() {
    let mut peer = in_state(ReadyToReceive);
    let (_, handle) = peer.register(vec![0; 8], Access::ALL);
    let reth = Some(Reth { address: handle.address, rkey: handle.rkey, bytes: 8 });
    for offset in 0..2 {
        peer.deliver(Repr { reth, ..peer.request(PacketKind::WriteOnly, offset) }, &[1; 8]);
    }
    assert_eq!(events(&mut peer), [AsyncEvent::CommunicationEstablished(peer.number)]);
}

#[test]
fn a_request_that_ends_the_queue_pair_says_why() {
    for (kind, rkey) in [(PacketKind::SendMiddle, 0), (PacketKind::ReadRequest, 7)] {
        let (mut peer, _) = connected();
        let reth = kind.has_reth().then_some(Reth { address: 0, rkey, bytes: 8 });
        peer.deliver(Repr { reth, ..peer.request(kind, 0) }, &[]);
        let number = peer.number;
        let is_access = kind == PacketKind::ReadRequest;
        let event = if is_access { AsyncEvent::AccessError(number) } else { AsyncEvent::RequestError(number) };
        assert_eq!(events(&mut peer), [event]);
    }
    // A receive whose memory is not ours to fill is our own failure.
    let (mut peer, _) = connected();
    peer.post_recv(3, Segment { lkey: 0xbad, offset: 0, bytes: 8 });
    peer.deliver(peer.request(PacketKind::SendOnly, 0), &[0; 8]);
    assert_eq!(events(&mut peer), [AsyncEvent::QueuePairFatal(peer.number)]);
    assert_eq!(statuses(&mut peer), [(3, Status::LocalProtection)]);
}

#[test]
fn events_that_nobody_polls_are_counted() {
    let (mut peer, _) = connected();
    for _ in 0..1_030 {
        peer.endpoint.modify_to_send_queue_drain(peer.number).unwrap();
        peer.endpoint.modify_to_ready_to_send(peer.number).unwrap();
    }
    assert_eq!(events(&mut peer).len(), 1_024);
    assert_eq!(peer.endpoint.counters().events_lost, 6);
}

#[test]
fn a_notification_comes_once_for_what_was_asked() {
    let (mut peer, handle) = connected();
    let receive = |peer: &mut Scripted, offset: u32, solicited: bool| {
        peer.post_recv(0, Segment { lkey: handle.lkey, offset: 0, bytes: 8 });
        peer.deliver(Repr { solicited, ..peer.request(PacketKind::SendOnly, offset) }, &[1; 8]);
        peer.endpoint.poll_notification()
    };
    assert!(!receive(&mut peer, 0, true), "nobody asked");
    peer.endpoint.request_notification(Notify::Next);
    assert!(receive(&mut peer, 1, false));
    assert!(!receive(&mut peer, 2, false), "once");
    peer.endpoint.request_notification(Notify::Solicited);
    assert!(!receive(&mut peer, 3, false));
    assert!(receive(&mut peer, 4, true));
    // The wider of two wishes counts, and a failure is always worth one.
    peer.endpoint.request_notification(Notify::Next);
    peer.endpoint.request_notification(Notify::Solicited);
    assert!(receive(&mut peer, 5, false));
    peer.endpoint.request_notification(Notify::Solicited);
    peer.post_send(9, Operation::Read { local: Segment { lkey: handle.lkey, offset: 0, bytes: 8 }, remote: REMOTE });
    peer.endpoint.modify_to_error(peer.number);
    assert!(peer.endpoint.poll_notification());
}

#[test]
fn only_messages_that_complete_a_receive_are_solicited() {
    let (mut peer, handle) = connected();
    let local = Segment { lkey: handle.lkey, offset: 0, bytes: 300 };
    for operation in [
        Operation::Send { local },
        Operation::WriteWithImmediate { local, remote: REMOTE, immediate: 1 },
        Operation::Write { local, remote: REMOTE },
    ] {
        let request = SendRequest { solicited: true, ..SendRequest::new(0, operation) };
        peer.endpoint.post_send(peer.number, request).unwrap();
    }
    let packets = peer.transmitted();
    assert!(packets.iter().all(|packet| packet.repr.destination == PEER));
    let solicited: Vec<_> = packets.iter().map(|packet| packet.repr.solicited).collect();
    assert_eq!(solicited, [false, true, false, true, false, false]);
}
