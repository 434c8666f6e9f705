//! Messages gathered from and scattered over several pieces of local memory, compared with flat copies; what is
//! refused, and what fails on the way.

use std::sync::Arc;

use crate::common::Pair;
use proptest::prelude::*;
use soft_roce::{
    Access, CreateError, DATAGRAM_HEADER_BYTES, DatagramAddress, DatagramConfig, DatagramRequest, HeapMemory,
    Operation, PathMtu, PostError, QueuePairConfig, RecvRequest, RegionHandle, Remote, SEGMENTS_MAX, Segment,
    SendRequest, SharedReceiveQueueConfig, Status,
};

const REGION_BYTES: usize = 4_096;

type Region = (Arc<HeapMemory>, RegionHandle);

fn pair(shared: bool) -> Pair {
    let config = QueuePairConfig { max_sge: SEGMENTS_MAX, read_chunk_bytes: 700, ..QueuePairConfig::default() };
    Pair::with_shared_receive_queue(1, config, PathMtu::Mtu256, shared)
}

/// Two regions at one end, all their bytes different in sequence from the other end's.
fn regions(pair: &mut Pair, side: usize) -> [Region; 2] {
    [1, 2].map(|salt| {
        let bytes = (0..REGION_BYTES).map(|at| (at * 7 + at / 251 + side * 100 + salt) as u8).collect();
        pair.register(side, bytes, Access::ALL)
    })
}

/// Pieces of the two regions: which one, where, and how long. None overlap, so that it does not matter in which order
/// bytes arrive.
fn pieces() -> impl Strategy<Value = Vec<(usize, usize, u32)>> {
    let cell = REGION_BYTES / SEGMENTS_MAX;
    let lengths = prop::collection::vec(0..=cell as u32, 1..=SEGMENTS_MAX);
    (lengths, any::<u8>()).prop_map(move |(lengths, turn)| {
        let place = |index: usize| (index + usize::from(turn)) % 2;
        // Backwards through the regions, so that the order of pieces shows.
        let at = |index: usize| (SEGMENTS_MAX - 1 - index) * cell;
        lengths.iter().enumerate().map(|(index, &bytes)| (place(index), at(index), bytes)).collect()
    })
}

fn segments(regions: &[Region; 2], pieces: &[(usize, usize, u32)]) -> Vec<Segment> {
    let segment = |&(which, offset, bytes): &(usize, usize, u32)| {
        let lkey = regions[which].1.lkey;
        Segment { lkey, offset, bytes }
    };
    pieces.iter().map(segment).collect()
}

/// The naive flat copy of what a list names.
fn flat(regions: &[Region; 2], pieces: &[(usize, usize, u32)]) -> Vec<u8> {
    let memory = [0, 1].map(|which: usize| regions[which].0.to_vec());
    pieces.iter().flat_map(|&(which, offset, bytes)| memory[which][offset..offset + bytes as usize].to_vec()).collect()
}

fn total(pieces: &[(usize, usize, u32)]) -> u32 {
    pieces.iter().map(|piece| piece.2).sum()
}

fn post_recv(pair: &mut Pair, list: &[Segment]) {
    pair.post_recv_list(1, RecvRequest { id: 9, segment: list[0] }, &list[1..]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_send_is_gathered_and_scattered(from in pieces(), to in pieces(), shared in any::<bool>()) {
        let mut pair = pair(shared);
        let (near, far) = (regions(&mut pair, 0), regions(&mut pair, 1));
        post_recv(&mut pair, &segments(&far, &to));
        let list = segments(&near, &from);
        let request = SendRequest::new(1, Operation::Send { local: list[0] });
        pair.ends[0].post_send_list(pair.queue_pairs[0], request, &list[1..]).unwrap();
        let (message, room) = (flat(&near, &from), flat(&far, &to));
        pair.run();
        let statuses = [0, 1].map(|side: usize| (pair.completions[side][0].status, pair.completions[side][0].bytes));
        if message.len() <= room.len() {
            let bytes = message.len() as u32;
            prop_assert_eq!(statuses, [(Status::Success, bytes), (Status::Success, bytes)]);
            prop_assert_eq!(flat(&far, &to), [&message[..], &room[message.len()..]].concat());
        } else {
            prop_assert_eq!(statuses.map(|status| status.0), [Status::RemoteInvalidRequest, Status::LocalLength]);
        }
    }

    #[test]
    fn a_write_is_gathered_and_a_read_scattered(from in pieces(), to in pieces()) {
        let mut pair = pair(false);
        let (near, far) = (regions(&mut pair, 0), regions(&mut pair, 1));
        let landing = regions(&mut pair, 0);
        let (sink, handle) = pair.register(1, vec![0; REGION_BYTES * 2], Access::ALL);
        let remote = Remote { address: handle.address, rkey: handle.rkey };
        let list = segments(&near, &from);
        let write = SendRequest::new(1, Operation::Write { local: list[0], remote });
        pair.ends[0].post_send_list(pair.queue_pairs[0], write, &list[1..]).unwrap();
        let source = Remote { address: far[0].1.address, rkey: far[0].1.rkey };
        let list = segments(&landing, &to);
        let read = SendRequest::new(2, Operation::Read { local: list[0], remote: source });
        pair.ends[0].post_send_list(pair.queue_pairs[0], read, &list[1..]).unwrap();
        pair.run();
        let done: Vec<_> = pair.completions[0].iter().map(|done| (done.id, done.status, done.bytes)).collect();
        prop_assert_eq!(done, [(1, Status::Success, total(&from)), (2, Status::Success, total(&to))]);
        prop_assert_eq!(&sink.to_vec()[..total(&from) as usize], flat(&near, &from));
        prop_assert_eq!(flat(&landing, &to), &far[0].0.to_vec()[..total(&to) as usize]);
    }
}

#[test]
fn a_datagram_is_gathered_and_lands_behind_its_header() {
    let mut pair = pair(false);
    let (near, far) = (regions(&mut pair, 0), regions(&mut pair, 1));
    let numbers = [0, 1].map(|side: usize| {
        let number = pair.ends[side].create_datagram_queue_pair(DatagramConfig::new(5)).unwrap();
        pair.ends[side].modify_datagrams_to_ready_to_receive(number).unwrap();
        pair.ends[side].modify_to_ready_to_send(number).unwrap();
        number
    });
    // A border inside the header, and one inside the payload.
    let to = [(0, 500, 30), (1, 7, 50), (0, 0, 400)];
    let room = segments(&far, &to);
    pair.ends[1].post_recv_list(numbers[1], RecvRequest { id: 3, segment: room[0] }, &room[1..]).unwrap();
    let from = [(0, 100, 10), (1, 0, 0), (1, 33, 150)];
    let list = segments(&near, &from);
    let request = DatagramRequest {
        id: 4,
        local: list[0],
        immediate: None,
        to: DatagramAddress { address: pair.addresses[1], queue_pair: numbers[1] },
        queue_key: 5,
        signalled: true,
        solicited: false,
    };
    pair.ends[0].post_datagram_list(numbers[0], request, &list[1..]).unwrap();
    pair.run();
    let [sent, received] = [0, 1].map(|side: usize| pair.completions[side][0]);
    assert_eq!((sent.status, sent.bytes), (Status::Success, 160));
    assert_eq!((received.status, received.bytes), (Status::Success, 40 + 160));
    let landed = flat(&far, &to);
    assert_eq!(landed[DATAGRAM_HEADER_BYTES..][..160], flat(&near, &from));
    assert_eq!(landed[12..20], [0; 8]);
    assert_eq!(landed[20], 0x45, "the IPv4 header is in the second half of the forty bytes");
    let refused = pair.ends[0].post_datagram_list(numbers[0], request, &[list[2]; 4]);
    assert_eq!(refused, Err(PostError::TooManySegments { found: 5, limit: 4 }));
    let refused = pair.ends[0].post_datagram_list(numbers[0], request, &[Segment { bytes: 1_015, ..list[2] }]);
    assert_eq!(refused, Err(PostError::TooLong { bytes: 1_025, limit: 1_024 }));
}

#[test]
fn an_atomic_may_scatter_its_eight_bytes() {
    let mut pair = pair(false);
    let near = regions(&mut pair, 0);
    let (_, far) = pair.register(1, 0x0807_0605_0403_0201_u64.to_le_bytes().to_vec(), Access::ALL);
    let to = [(0, 9, 3), (1, 1, 5)];
    let list = segments(&near, &to);
    let remote = Remote { address: far.address, rkey: far.rkey };
    let request = SendRequest::new(1, Operation::FetchAdd { local: list[0], remote, add: 1 });
    let refused = pair.ends[0].post_send(pair.queue_pairs[0], request);
    assert_eq!(refused, Err(PostError::AtomicSegment { bytes: 3 }));
    pair.ends[0].post_send_list(pair.queue_pairs[0], request, &list[1..]).unwrap();
    pair.run();
    assert_eq!(pair.completions[0][0].status, Status::Success);
    assert_eq!(flat(&near, &to), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn refusals_name_the_limit_and_hold_no_place() {
    let config = QueuePairConfig { max_sge: 2, send_depth: 1, recv_depth: 1, ..QueuePairConfig::default() };
    let mut pair = Pair::new(1, config, PathMtu::Mtu256);
    let near = regions(&mut pair, 0);
    let piece = Segment { lkey: near[0].1.lkey, offset: 0, bytes: 1 };
    let (end, number) = (&mut pair.ends[0], pair.queue_pairs[0]);
    let request = SendRequest::new(1, Operation::Send { local: piece });
    let too_many = PostError::TooManySegments { found: 3, limit: 2 };
    assert_eq!(end.post_send_list(number, request, &[piece; 2]), Err(too_many));
    assert_eq!(end.post_recv_list(number, RecvRequest { id: 1, segment: piece }, &[piece; 2]), Err(too_many));
    assert_eq!(
        too_many.to_string(),
        "max_sge: 3 local segments, at most 2 are allowed; post fewer, or raise the limit (8 at most)"
    );
    assert_eq!(end.post_send_list(number, request, &[piece]), Ok(()));
    assert_eq!(end.post_recv_list(number, RecvRequest { id: 1, segment: piece }, &[piece]), Ok(()));
    let shared = SharedReceiveQueueConfig { protection_domain: Default::default(), depth: 1, max_sge: 1 };
    let shared = end.create_shared_receive_queue(shared).unwrap();
    let refused = end.post_shared_recv_list(shared, RecvRequest { id: 1, segment: piece }, &[piece]);
    assert_eq!(refused, Err(PostError::TooManySegments { found: 2, limit: 1 }));
}

#[test]
fn the_limit_itself_is_bounded() {
    let mut pair = pair(false);
    for max_sge in [0, SEGMENTS_MAX + 1] {
        let expected = "1 ..= 8";
        let refused = CreateError::Config { key: "max_sge", found: max_sge as u64, expected };
        let end = &mut pair.ends[0];
        let connected = QueuePairConfig { max_sge, ..QueuePairConfig::default() };
        assert_eq!(end.create_queue_pair(connected), Err(refused));
        let datagrams = DatagramConfig { max_sge, ..DatagramConfig::new(1) };
        assert_eq!(end.create_datagram_queue_pair(datagrams), Err(refused));
        let shared = SharedReceiveQueueConfig { protection_domain: Default::default(), depth: 1, max_sge };
        assert_eq!(end.create_shared_receive_queue(shared), Err(refused));
    }
}

/// What was sent before the bad piece has arrived; the request fails, and so does the receive that it was filling.
#[test]
fn a_bad_key_in_the_middle_fails_the_request_there() {
    let mut pair = pair(false);
    let (near, far) = (regions(&mut pair, 0), regions(&mut pair, 1));
    let (sink, handle) = pair.register(1, vec![0; 2_000], Access::ALL);
    let good = Segment { lkey: near[0].1.lkey, offset: 0, bytes: 600 };
    let remote = Remote { address: handle.address, rkey: handle.rkey };
    let write = SendRequest::new(1, Operation::Write { local: good, remote });
    pair.ends[0].post_send_list(pair.queue_pairs[0], write, &[Segment { lkey: !good.lkey, ..good }, good]).unwrap();
    pair.run();
    assert_eq!(pair.completions[0][0].status, Status::LocalProtection);
    let first = near[0].0.to_vec();
    assert_eq!(sink.to_vec()[..512], first[..512], "two packets of 256 bytes lie before the bad piece");
    assert!(sink.to_vec()[512..].iter().all(|&byte| byte == 0));

    let mut pair = self::pair(false);
    let near = regions(&mut pair, 0);
    regions(&mut pair, 1);
    let room = Segment { lkey: near[0].1.lkey, offset: 0, bytes: 256 };
    // Keys of the other end: unknown here.
    post_recv(&mut pair, &[room, Segment { lkey: !far[0].1.lkey, ..room }]);
    let local = Segment { lkey: near[0].1.lkey, offset: 0, bytes: 300 };
    pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(1, Operation::Send { local })).unwrap();
    pair.run();
    let statuses = [0, 1].map(|side: usize| pair.completions[side][0].status);
    assert_eq!(statuses, [Status::RemoteOperation, Status::LocalProtection]);
}
