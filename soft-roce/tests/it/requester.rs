//! Rule by rule: what the sending side transmits, and what it makes of each answer.

use std::time::Duration;

use crate::common::scripted::{Decoded, SQ_PSN, Scripted};
use soft_roce::{
    Access, CompletionOpcode, Memory, Operation, PathMtu, PostError, QueuePairConfig, QueuePairState, RegionHandle,
    Remote, Segment, SendRequest, Status, Timestamp,
    wire::{NakCode, PacketKind, Repr, Syndrome},
};

const REMOTE: Remote = Remote { address: 0x7000, rkey: 0x99 };
const TIMEOUT: Duration = Duration::from_nanos(4_096 << 10);

fn config() -> QueuePairConfig {
    QueuePairConfig { ack_timeout: 10, read_chunk_bytes: 1_024, ..QueuePairConfig::default() }
}

fn connected(config: QueuePairConfig) -> (Scripted, std::sync::Arc<soft_roce::HeapMemory>, RegionHandle) {
    let mut peer = Scripted::new(config, PathMtu::Mtu256);
    let (memory, handle) = peer.register((0..100_000).map(|at| (at / 3) as u8).collect(), Access::ALL);
    (peer, memory, handle)
}

/// The peer acknowledges what does not ask for it within this time.
fn agreed(config: QueuePairConfig, delay: Duration) -> (Scripted, std::sync::Arc<soft_roce::HeapMemory>, RegionHandle) {
    let mut peer = Scripted::agreed(config, PathMtu::Mtu256, delay);
    let (memory, handle) = peer.register(vec![0; 1_000], Access::ALL);
    (peer, memory, handle)
}

fn segment(handle: RegionHandle, bytes: u32) -> Segment {
    Segment { lkey: handle.lkey, offset: 0, bytes }
}

/// Numbers relative to the first.
fn offsets(packets: &[Decoded]) -> Vec<i32> {
    packets.iter().map(|packet| packet.repr.psn.since(SQ_PSN)).collect()
}

fn statuses(peer: &mut Scripted) -> Vec<(u64, Status)> {
    peer.completions().iter().map(|done| (done.id, done.status)).collect()
}

fn ack(peer: &mut Scripted, offset: u32) -> Vec<Decoded> {
    answer(peer, offset, Syndrome::ACK)
}

fn answer(peer: &mut Scripted, offset: u32, syndrome: Syndrome) -> Vec<Decoded> {
    let repr = peer.response(PacketKind::Acknowledge, offset, syndrome);
    peer.deliver(repr, &[])
}

fn read_response(peer: &mut Scripted, offset: u32, bytes: usize) -> Vec<Decoded> {
    let repr = peer.response(PacketKind::ReadResponseMiddle, offset, Syndrome::ACK);
    peer.deliver(repr, &vec![offset as u8; bytes])
}

#[test]
fn a_message_is_cut_at_the_path_mtu() {
    let (mut peer, memory, handle) = connected(config());
    let remote = REMOTE;
    peer.post_send(1, Operation::WriteWithImmediate { local: segment(handle, 530), remote, immediate: 6 });
    let packets = peer.transmitted();
    use PacketKind::{WriteFirst, WriteLastImmediate, WriteMiddle};
    assert_eq!(packets.iter().map(Decoded::kind).collect::<Vec<_>>(), [WriteFirst, WriteMiddle, WriteLastImmediate]);
    let reth = packets[0].repr.reth.expect("the first has it");
    assert_eq!((reth.address, reth.rkey, reth.bytes), (0x7000, 0x99, 530));
    assert_eq!(packets.iter().map(|packet| packet.repr.ack_request).collect::<Vec<_>>(), [false, false, true]);
    assert_eq!(packets[2].repr.immediate, Some(6));
    assert_eq!((packets[2].payload.len(), packets[2].repr.pad_bytes()), (18, 2));
    let payload: Vec<_> = packets.iter().flat_map(|packet| packet.payload.clone()).collect();
    assert!(payload == memory.to_vec()[..530]);
}

#[test]
fn an_acknowledgement_completes_everything_before_it() {
    let (mut peer, _, handle) = connected(config());
    for id in 0..3 {
        peer.post_send(id, Operation::Send { local: segment(handle, 10) });
    }
    assert_eq!(offsets(&peer.transmitted()), [0, 1, 2]);
    ack(&mut peer, 1);
    assert_eq!(statuses(&mut peer), [(0, Status::Success), (1, Status::Success)]);
    // Stale, and beyond what was sent.
    ack(&mut peer, 0);
    ack(&mut peer, 3);
    assert_eq!(statuses(&mut peer), []);
    assert_eq!(peer.endpoint.counters().dropped_ghost, 2);
    ack(&mut peer, 2);
    assert_eq!(statuses(&mut peer), [(2, Status::Success)]);
}

#[test]
fn long_messages_ask_for_acknowledgements_and_stop_at_the_window() {
    let (mut peer, _, handle) = connected(config());
    peer.post_send(0, Operation::Send { local: segment(handle, 256 * 200) });
    let packets = peer.transmitted();
    let asking = |packets: &[Decoded]| {
        let asking = packets.iter().filter(|packet| packet.repr.ack_request);
        offsets(&asking.cloned().collect::<Vec<_>>())
    };
    assert_eq!((packets.len(), asking(&packets)), (128, vec![63, 127]));
    let packets = ack(&mut peer, 63);
    assert_eq!((packets.len(), asking(&packets)), (64, vec![191]));
    let (mut peer, _, handle) = connected(QueuePairConfig { request_window_packets: 3, ..config() });
    peer.post_send(0, Operation::Send { local: segment(handle, 256 * 5) });
    assert_eq!(asking(&peer.transmitted()), [2], "a full window must open again");
    assert_eq!(offsets(&ack(&mut peer, 2)), [3, 4]);
}

#[test]
fn what_nobody_waits_for_asks_for_no_acknowledgement_where_both_ends_agree() {
    let delay = Duration::from_millis(1);
    let (mut peer, _, handle) = agreed(QueuePairConfig { send_depth: 8, ack_timeout: 11, ..config() }, delay);
    let local = segment(handle, 10);
    let asks = |peer: &mut Scripted, id, signalled| {
        let request = SendRequest { signalled, ..SendRequest::new(id, Operation::Send { local }) };
        peer.endpoint.post_send(peer.number, request).unwrap();
        let [packet] = &peer.transmitted()[..] else { panic!("one packet") };
        packet.repr.ack_request
    };
    assert!(asks(&mut peer, 0, false), "no round trip is known");
    assert!(!asks(&mut peer, 1, false), "it will be");
    peer.now = peer.now + Duration::from_micros(20);
    ack(&mut peer, 1);
    assert_eq!([2, 3, 4].map(|id| asks(&mut peer, id, id == 3)), [false, true, false]);
    // It is no gap that nothing comes for a while.
    peer.now = peer.now + Duration::from_micros(20);
    ack(&mut peer, 3);
    assert_eq!(statuses(&mut peer), [(3, Status::Success)]);
    let since = peer.now;
    assert_eq!(peer.expire(), [], "the timer of what is acknowledged");
    assert_eq!(peer.endpoint.poll_timeout(), Some(since + delay * 5), "a probe's delay, and what the peer may take");
    // Of eight places in the queue four are full.
    assert_eq!([5, 6, 7, 8].map(|id| asks(&mut peer, id, false)), [false, false, false, true]);
    // What is overdue is repeated, and asks.
    let [again] = &peer.expire()[..] else { panic!("one packet") };
    assert_eq!((again.repr.psn.since(SQ_PSN), again.repr.ack_request), (4, true));
    ack(&mut peer, 8);
    assert!(asks(&mut peer, 9, false), "the round trip is measured again");
}

#[test]
fn one_that_waits_for_an_end_of_all_that_it_sends_asks_each_time_without_an_agreement() {
    let (mut peer, _, handle) = connected(config());
    for id in 0..3 {
        let send = Operation::Send { local: segment(handle, 10) };
        peer.endpoint.post_send(peer.number, SendRequest { signalled: false, ..SendRequest::new(id, send) }).unwrap();
    }
    assert!(peer.transmitted().iter().all(|packet| packet.repr.ack_request));
}

#[test]
fn a_loss_halves_the_window_and_progress_restores_it() {
    let (mut peer, _, handle) = connected(config());
    peer.post_send(0, Operation::Send { local: segment(handle, 256 * 380) });
    assert_eq!(peer.transmitted().len(), 128);
    let again = answer(&mut peer, 1, Syndrome::Nak(NakCode::SequenceError));
    let asking: Vec<_> = again.iter().filter(|packet| packet.repr.ack_request).cloned().collect();
    assert_eq!((again.len(), offsets(&asking)), (64, vec![32, 64]), "half of it, with two acknowledgements");
    // 64 acknowledged packets let it grow by eight.
    assert_eq!(ack(&mut peer, 64).len(), 72);
    // Losses without progress halve it down to the least.
    for least in [36, 18, 16] {
        assert_eq!(answer(&mut peer, 65, Syndrome::Nak(NakCode::SequenceError)).len(), least);
    }
}

#[test]
fn a_sequence_error_sends_the_peer_back_there() {
    let (mut peer, _, handle) = connected(config());
    for id in 0..4 {
        peer.post_send(id, Operation::Send { local: segment(handle, 10) });
    }
    peer.transmitted();
    let again = answer(&mut peer, 2, Syndrome::Nak(NakCode::SequenceError));
    assert_eq!(offsets(&again), [2, 3]);
    assert_eq!(statuses(&mut peer), [(0, Status::Success), (1, Status::Success)]);
    // A peer that repeats itself cannot make us flood it: without progress, soon only the timer counts.
    let floods = (0..100).filter(|_| !answer(&mut peer, 2, Syndrome::Nak(NakCode::SequenceError)).is_empty());
    assert_eq!(floods.count(), 2);
    // The probe's answer leaves out what it does not name: that is lost.
    assert_eq!(offsets(&peer.expire()), [2], "a probe");
    assert_eq!(offsets(&ack(&mut peer, 2)), [3]);
}

#[test]
fn silence_is_answered_by_repetition_ever_more_slowly() {
    let (mut peer, _, handle) = connected(QueuePairConfig { retry_count: 2, ..config() });
    for id in 0..2 {
        peer.post_send(id, Operation::Send { local: segment(handle, 10) });
    }
    peer.post_recv(9, segment(handle, 10));
    peer.transmitted();
    let mut due = Timestamp(0);
    for doubled in [1, 2] {
        due = due + TIMEOUT * doubled;
        assert_eq!(offsets(&peer.expire()), [0, 1]);
        assert_eq!(peer.now, due);
    }
    assert!(offsets(&peer.expire()).is_empty());
    assert_eq!(peer.now, due + TIMEOUT * 4);
    assert_eq!(statuses(&mut peer), [(0, Status::RetryExceeded), (1, Status::Flushed), (9, Status::Flushed)]);
    assert_eq!(peer.state(), QueuePairState::Error);
    assert_eq!(peer.endpoint.poll_timeout(), None);
}

/// Whoever went back, and could not send since as its socket or its peer's ring was full, has nothing to probe.
#[test]
fn what_is_to_be_sent_again_is_not_probed() {
    let operations: [fn(Segment) -> Operation; 3] = [
        |local| Operation::Read { local, remote: REMOTE },
        |local| Operation::FetchAdd { local: Segment { bytes: 8, ..local }, remote: REMOTE, add: 1 },
        |local| Operation::Send { local },
    ];
    for (operation, probes) in operations.into_iter().flat_map(|operation| [1, 2].map(|probes| (operation, probes))) {
        let (mut peer, _, handle) = connected(config());
        peer.post_send(0, Operation::Send { local: segment(handle, 10) });
        peer.transmitted();
        peer.now = peer.now + Duration::from_micros(20);
        ack(&mut peer, 0);
        peer.post_send(1, operation(segment(handle, 100)));
        assert_eq!(offsets(&peer.transmitted()), [1]);
        peer.now = peer.now + TIMEOUT;
        peer.endpoint.handle_timeout(peer.now);
        for _ in 0..probes {
            peer.now = peer.endpoint.poll_timeout().expect("a probe is due");
            peer.endpoint.handle_timeout(peer.now);
        }
        assert_eq!(offsets(&peer.transmitted()), [1]);
        assert_eq!(peer.endpoint.counters().probes, 0);
    }
}

#[test]
fn progress_restores_patience() {
    let (mut peer, _, handle) = connected(QueuePairConfig { retry_count: 1, ..config() });
    for id in 0..3 {
        peer.post_send(id, Operation::Send { local: segment(handle, 10) });
    }
    peer.transmitted();
    assert_eq!(offsets(&peer.expire()), [0, 1, 2]);
    ack(&mut peer, 0);
    assert_eq!(offsets(&peer.expire()), [1, 2]);
    ack(&mut peer, 2);
    assert_eq!(statuses(&mut peer).len(), 3);
}

#[test]
fn a_peer_without_receive_is_left_alone_for_a_while() {
    let (mut peer, _, handle) = connected(QueuePairConfig { rnr_retry: 1, ..config() });
    for id in 0..2 {
        peer.post_send(id, Operation::Send { local: segment(handle, 10) });
    }
    peer.transmitted();
    let not_ready = Syndrome::ReceiverNotReady { timer: 14 };
    assert_eq!(answer(&mut peer, 0, not_ready), []);
    // Repeated, or followed by the sequence error that rdma_rxe sends for what was in flight: costs nothing.
    assert_eq!(answer(&mut peer, 0, not_ready), []);
    assert_eq!(answer(&mut peer, 0, Syndrome::Nak(NakCode::SequenceError)), []);
    while peer.expire().is_empty() {}
    assert_eq!(peer.now, Timestamp(0) + Duration::from_micros(1_280));
    answer(&mut peer, 0, not_ready);
    assert_eq!(statuses(&mut peer), [(0, Status::ReceiverNotReadyRetryExceeded), (1, Status::Flushed)]);
}

#[test]
fn seven_rnr_retries_mean_for_ever() {
    let (mut peer, _, handle) = connected(QueuePairConfig { rnr_retry: 7, ..config() });
    peer.post_send(0, Operation::Send { local: segment(handle, 10) });
    peer.transmitted();
    for _ in 0..1_000 {
        answer(&mut peer, 0, Syndrome::ReceiverNotReady { timer: 1 });
        while peer.expire().is_empty() {}
    }
    ack(&mut peer, 0);
    assert_eq!(statuses(&mut peer), [(0, Status::Success)]);
}

#[test]
fn refusals_become_the_status_of_their_request() {
    for (code, status) in [
        (NakCode::InvalidRequest, Status::RemoteInvalidRequest),
        (NakCode::RemoteAccess, Status::RemoteAccess),
        (NakCode::RemoteOperation, Status::RemoteOperation),
    ] {
        let (mut peer, _, handle) = connected(config());
        for id in 0..3 {
            peer.post_send(id, Operation::Write { local: segment(handle, 10), remote: REMOTE });
        }
        peer.transmitted();
        answer(&mut peer, 1, Syndrome::Nak(code));
        assert_eq!(statuses(&mut peer), [(0, Status::Success), (1, status), (2, Status::Flushed)]);
        // Later posts complete at once, as flushed.
        peer.post_send(3, Operation::Send { local: segment(handle, 10) });
        peer.post_recv(4, segment(handle, 10));
        assert_eq!(statuses(&mut peer), [(3, Status::Flushed), (4, Status::Flushed)]);
        assert_eq!(peer.transmitted(), []);
    }
}

#[test]
fn a_read_is_split_into_chunks_within_its_windows() {
    let config = QueuePairConfig { max_rd_atomic: 3, read_window_bytes: 2_048, ..config() };
    let (mut peer, memory, handle) = connected(config);
    peer.post_send(0, Operation::Read { local: segment(handle, 3_000), remote: REMOTE });
    let requests = peer.transmitted();
    let ranges = |requests: &[Decoded]| {
        let reths = requests.iter().map(|request| request.repr.reth.expect("a RETH"));
        reths.map(|reth| (reth.address - 0x7000, reth.bytes)).collect::<Vec<_>>()
    };
    assert_eq!((offsets(&requests), ranges(&requests)), (vec![0, 4], vec![(0, 1_024), (1_024, 1_024)]));
    for offset in 0..3 {
        assert_eq!(read_response(&mut peer, offset, 256), []);
    }
    let last = read_response(&mut peer, 3, 256);
    assert_eq!((offsets(&last), ranges(&last)), (vec![8], vec![(2_048, 952)]));
    for offset in 4..11 {
        read_response(&mut peer, offset, 256);
    }
    assert_eq!(statuses(&mut peer), []);
    read_response(&mut peer, 11, 3_000 - 11 * 256);
    assert_eq!(statuses(&mut peer), [(0, Status::Success)]);
    assert!((0..3_000).all(|at| memory.to_vec()[at] == (at / 256) as u8));
}

#[test]
fn a_lost_read_response_is_asked_for_at_once() {
    let (mut peer, memory, handle) = connected(config());
    peer.post_send(0, Operation::Read { local: segment(handle, 2_048), remote: REMOTE });
    peer.transmitted();
    assert_eq!(read_response(&mut peer, 0, 256), []);
    let again = read_response(&mut peer, 2, 256);
    let asked = |again: &[Decoded]| {
        let reths = again.iter().map(|packet| packet.repr.reth.expect("a READ"));
        reths.map(|reth| (reth.address - 0x7000, reth.bytes)).collect::<Vec<_>>()
    };
    assert_eq!((offsets(&again), asked(&again)), (vec![1], vec![(256, 256)]), "what is missing, and no more");
    assert_eq!(read_response(&mut peer, 3, 256), [], "one loss is repaired once");
    // Another is lost behind it: seen once the first is there.
    for offset in [6, 7] {
        assert_eq!(read_response(&mut peer, offset, 256), []);
    }
    let again = read_response(&mut peer, 1, 256);
    assert_eq!((offsets(&again), asked(&again)), (vec![4], vec![(1_024, 512)]));
    // The repeated answer comes without its first packet.
    let again = read_response(&mut peer, 5, 256);
    assert_eq!((offsets(&again), asked(&again)), (vec![4], vec![(1_024, 256)]));
    assert_eq!(read_response(&mut peer, 4, 256), []);
    assert_eq!(statuses(&mut peer), [(0, Status::Success)]);
    assert!((0..2_048).all(|at| memory.to_vec()[at] == (at / 256) as u8));
}

#[test]
fn a_lost_response_and_a_lost_request_are_repaired_together() {
    let (mut peer, _, handle) = connected(config());
    peer.post_send(0, Operation::Read { local: segment(handle, 2_048), remote: REMOTE });
    peer.transmitted();
    assert_eq!(offsets(&read_response(&mut peer, 2, 256)), [0]);
    // The request for the second chunk never arrived; this is said once.
    assert_eq!(offsets(&answer(&mut peer, 4, Syndrome::Nak(NakCode::SequenceError))), [0, 4]);
    for offset in 0..8 {
        assert_eq!(read_response(&mut peer, offset, 256), []);
    }
    assert_eq!(statuses(&mut peer), [(0, Status::Success)]);
}

#[test]
fn an_acknowledgement_beyond_a_read_proves_its_answer_lost() {
    let (mut peer, _, handle) = connected(config());
    peer.post_send(0, Operation::Send { local: segment(handle, 8) });
    peer.post_send(1, Operation::Read { local: segment(handle, 256), remote: REMOTE });
    peer.post_send(2, Operation::Send { local: segment(handle, 8) });
    peer.transmitted();
    assert_eq!(offsets(&ack(&mut peer, 2)), [1, 2]);
    assert_eq!(statuses(&mut peer), [(0, Status::Success)]);
    // The response acknowledges what came before; what comes after needs its own.
    read_response(&mut peer, 1, 256);
    assert_eq!(statuses(&mut peer), [(1, Status::Success)]);
    ack(&mut peer, 2);
    assert_eq!(statuses(&mut peer), [(2, Status::Success)]);
}

#[test]
fn a_fence_waits_for_earlier_reads() {
    let (mut peer, _, handle) = connected(config());
    peer.post_send(0, Operation::Read { local: segment(handle, 256), remote: REMOTE });
    let fenced = Operation::Send { local: segment(handle, 8) };
    let request = SendRequest { fence: true, ..SendRequest::new(1, fenced) };
    peer.endpoint.post_send(peer.number, request).unwrap();
    assert_eq!(offsets(&peer.transmitted()), [0]);
    assert_eq!(offsets(&read_response(&mut peer, 0, 256)), [1]);
}

#[test]
fn no_more_reads_and_atomics_than_the_peer_remembers() {
    let (mut peer, memory, handle) = connected(QueuePairConfig { max_rd_atomic: 2, ..config() });
    for id in 0..3 {
        let local = Segment { offset: id as usize * 8, ..segment(handle, 8) };
        peer.post_send(id, Operation::FetchAdd { local, remote: REMOTE, add: 1 });
    }
    assert_eq!(offsets(&peer.transmitted()), [0, 1]);
    let response = peer.response(PacketKind::AtomicAcknowledge, 0, Syndrome::ACK);
    let next = peer.deliver(Repr { atomic_ack_eth: Some(77), ..response }, &[]);
    assert_eq!(offsets(&next), [2]);
    assert_eq!(peer.completions()[0].opcode, CompletionOpcode::FetchAdd);
    let mut original = [0; 8];
    memory.read(0, &mut original);
    assert_eq!(u64::from_ne_bytes(original), 77);
}

#[test]
fn answers_that_answer_nothing_end_the_queue_pair() {
    let cases: [(PacketKind, usize); 3] =
        [(PacketKind::ReadResponseOnly, 255), (PacketKind::ReadResponseOnly, 0), (PacketKind::AtomicAcknowledge, 0)];
    for (kind, bytes) in cases {
        let (mut peer, _, handle) = connected(config());
        peer.post_send(0, Operation::Read { local: segment(handle, 256), remote: REMOTE });
        peer.transmitted();
        let atomic_ack_eth = kind.has_atomic_ack_eth().then_some(0);
        let repr = Repr { atomic_ack_eth, ..peer.response(kind, 0, Syndrome::ACK) };
        peer.deliver(repr, &vec![0; bytes]);
        assert_eq!(statuses(&mut peer), [(0, Status::BadResponse)], "{kind:?}");
    }
}

#[test]
fn bad_local_memory_fails_the_request_that_uses_it() {
    let (mut peer, _, handle) = connected(config());
    peer.post_send(0, Operation::Send { local: segment(handle, 8) });
    peer.post_send(1, Operation::Send { local: Segment { lkey: 0xbad, offset: 0, bytes: 8 } });
    peer.post_send(2, Operation::Send { local: segment(handle, 8) });
    peer.transmitted();
    assert_eq!(statuses(&mut peer), [(0, Status::Flushed), (1, Status::LocalProtection), (2, Status::Flushed)]);
    let (mut peer, _, _) = connected(config());
    let (_, read_only) = peer.register(vec![0; 8], Access::default());
    peer.post_send(0, Operation::Read { local: segment(read_only, 8), remote: REMOTE });
    assert_eq!(peer.transmitted(), []);
    assert_eq!(statuses(&mut peer), [(0, Status::LocalProtection)]);
}

#[test]
fn nothing_lands_in_memory_that_was_withdrawn_during_a_read() {
    let (mut peer, memory, handle) = connected(config());
    peer.post_send(0, Operation::Read { local: segment(handle, 512), remote: REMOTE });
    peer.transmitted();
    read_response(&mut peer, 0, 256);
    assert!(peer.endpoint.deregister(handle.lkey));
    let before = memory.to_vec();
    read_response(&mut peer, 1, 256);
    assert_eq!(statuses(&mut peer), [(0, Status::LocalProtection)]);
    assert!(memory.to_vec() == before);
}

#[test]
fn a_read_that_may_never_go_out_fails() {
    let (mut peer, _, handle) = connected(QueuePairConfig { max_rd_atomic: 0, ..config() });
    peer.post_send(0, Operation::Read { local: segment(handle, 8), remote: REMOTE });
    assert_eq!(peer.transmitted(), []);
    assert_eq!(statuses(&mut peer), [(0, Status::LocalQueuePairOperation)]);
}

#[test]
fn posts_are_refused_with_the_reason() {
    let mut peer = Scripted::initialised(QueuePairConfig { send_depth: 1, recv_depth: 1, ..config() });
    let send = SendRequest::new(0, Operation::Send { local: Segment::default() });
    let post = |peer: &mut Scripted, request| peer.endpoint.post_send(peer.number, request);
    assert_eq!(post(&mut peer, send), Err(PostError::State(QueuePairState::Init)));
    peer.post_recv(0, Segment::default());
    let receive = soft_roce::RecvRequest { id: 0, segment: Segment::default() };
    assert_eq!(
        peer.endpoint.post_recv(peer.number, receive),
        Err(PostError::QueueFull { key: "recv_depth", depth: 1 })
    );
    peer.endpoint.connect_queue_pair(peer.number, peer.peer(PathMtu::Mtu256)).unwrap();
    let atomic = Operation::FetchAdd { local: Segment { bytes: 4, ..Segment::default() }, remote: REMOTE, add: 1 };
    assert_eq!(post(&mut peer, SendRequest::new(0, atomic)), Err(PostError::AtomicSegment { bytes: 4 }));
    let huge = Operation::Send { local: Segment { bytes: u32::MAX, ..Segment::default() } };
    assert!(matches!(post(&mut peer, SendRequest::new(0, huge)), Err(PostError::TooLong { .. })));
    assert_eq!(post(&mut peer, send), Ok(()));
    assert_eq!(post(&mut peer, send), Err(PostError::QueueFull { key: "send_depth", depth: 1 }));
}

#[test]
fn the_owner_ends_a_queue_pair_and_everything_is_flushed() {
    let (mut peer, _, handle) = connected(config());
    peer.post_recv(7, segment(handle, 8));
    peer.post_send(8, Operation::Read { local: segment(handle, 8), remote: REMOTE });
    peer.transmitted();
    assert!(peer.endpoint.modify_to_error(peer.number));
    assert_eq!(statuses(&mut peer), [(8, Status::Flushed), (7, Status::Flushed)]);
    assert_eq!(read_response(&mut peer, 0, 8), []);
    assert_eq!(statuses(&mut peer), []);
    assert!(peer.endpoint.modify_to_reset(peer.number));
    assert_eq!(peer.state(), QueuePairState::Init);
    assert!(peer.endpoint.destroy_queue_pair(peer.number));
    assert_eq!(peer.endpoint.state(peer.number), None);
}

#[test]
fn equally_long_packets_leave_together() {
    let (mut peer, _, handle) = connected(config());
    let mut batches = |operation| {
        peer.post_send(0, operation);
        let mut buf = vec![0; 65_507];
        std::iter::from_fn(|| peer.endpoint.poll_transmit(peer.now, &mut buf, 64).map(|batch| batch.segments))
            .collect::<Vec<_>>()
    };
    assert_eq!(batches(Operation::Send { local: segment(handle, 256 * 9 + 5) }), [10]);
    // The RETH makes a first packet longer than the others, so only one other may follow it.
    assert_eq!(batches(Operation::Write { local: segment(handle, 256 * 9 + 5), remote: REMOTE }), [2, 8]);
}
