//! Every operation end to end over a perfect network: the right bytes, the right completions on both sides.

use crate::common::Pair;
use soft_roce::{
    Access, CompletionOpcode, Operation, PathMtu, Psn, QueuePairConfig, RecvRequest, RegionConfig, Remote, Segment,
    SendRequest, Status,
};

const MTUS: [PathMtu; 7] = [
    PathMtu::Mtu256,
    PathMtu::Mtu512,
    PathMtu::Mtu1024,
    PathMtu::Mtu2048,
    PathMtu::Mtu4096,
    PathMtu::Mtu16384,
    PathMtu::Mtu57344,
];
/// Around packet and chunk borders.
const LENGTHS: [u32; 11] = [0, 1, 255, 256, 257, 4_096, 10_000, 57_344, 57_345, 65_536, 153_600];

fn pattern(bytes: u32, salt: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8 ^ salt).collect()
}

#[test]
fn send_fills_receives_in_order() {
    for mtu in MTUS {
        let mut pair = Pair::new(1, QueuePairConfig::default(), mtu);
        let total: u32 = LENGTHS.iter().sum();
        let (_, source) = pair.register(0, pattern(total, 3), Access::LOCAL);
        let (sink, target) = pair.register(1, vec![0; total as usize], Access::LOCAL);
        let mut offset = 0;
        for (id, bytes) in LENGTHS.into_iter().enumerate() {
            let segment = Segment { lkey: target.lkey, offset, bytes };
            pair.ends[1].post_recv(pair.queue_pairs[1], RecvRequest { id: id as u64, segment }).unwrap();
            let local = Segment { lkey: source.lkey, offset, bytes };
            let mut request = SendRequest::new(id as u64, Operation::SendWithImmediate { local, immediate: 77 });
            request.solicited = id == 2;
            pair.ends[0].post_send(pair.queue_pairs[0], request).unwrap();
            offset += bytes as usize;
        }
        pair.run();
        assert!(sink.to_vec() == pattern(total, 3), "{mtu:?}");
        for side in [0, 1] {
            let ids: Vec<_> = pair.completions[side].iter().map(|done| (done.id, done.bytes, done.status)).collect();
            let expected: Vec<_> =
                LENGTHS.iter().enumerate().map(|(id, bytes)| (id as u64, *bytes, Status::Success)).collect();
            assert_eq!(ids, expected);
        }
        let receive = pair.completions[1][2];
        assert_eq!((receive.opcode, receive.immediate), (CompletionOpcode::Recv, Some(77)));
        assert!(receive.solicited && !pair.completions[1][3].solicited);
    }
}

#[test]
fn read_write_and_write_with_immediate_move_the_right_bytes() {
    for mtu in MTUS {
        let mut pair = Pair::new(2, QueuePairConfig::default(), mtu);
        let room = 200_000;
        let (local, near) = pair.register(0, pattern(room, 5), Access::ALL);
        let (remote, far) = pair.register(1, pattern(room, 9), Access::ALL);
        let qp = pair.queue_pairs;
        for (round, bytes) in LENGTHS.into_iter().enumerate() {
            let segment = Segment { lkey: near.lkey, offset: 11, bytes };
            let place = Remote { address: far.address + 17, rkey: far.rkey };
            pair.ends[1].post_recv(qp[1], RecvRequest { id: 7, segment: Segment::default() }).unwrap();
            let operations = [
                Operation::Write { local: segment, remote: place },
                Operation::WriteWithImmediate { local: segment, remote: place, immediate: round as u32 },
                Operation::Read { local: Segment { offset: 20_011, ..segment }, remote: place },
            ];
            for (id, operation) in operations.into_iter().enumerate() {
                pair.ends[0].post_send(qp[0], SendRequest::new(id as u64, operation)).unwrap();
            }
            pair.run();
            let (near, far) = (local.to_vec(), remote.to_vec());
            let length = bytes as usize;
            // The WRITE read its bytes before the READ could change them, so compare what the READ brought back.
            assert!(near[20_011..20_011 + length] == far[17..17 + length], "{mtu:?} {bytes}");
            let ids: Vec<_> = pair.completions[0].drain(..).map(|done| (done.id, done.status)).collect();
            assert_eq!(ids, [(0, Status::Success), (1, Status::Success), (2, Status::Success)]);
            let receive = pair.completions[1].pop().expect("a completion");
            assert!(pair.completions[1].is_empty());
            assert_eq!(receive.opcode, CompletionOpcode::RecvWriteWithImmediate);
            assert_eq!((receive.id, receive.bytes, receive.immediate), (7, bytes, Some(round as u32)));
        }
    }
}

#[test]
fn atomics_run_once_and_bring_the_original_back() {
    let mut pair = Pair::new(3, QueuePairConfig::default(), PathMtu::Mtu1024);
    let (local, near) = pair.register(0, vec![0; 24], Access::LOCAL);
    let (remote, far) = pair.register(1, 40_u64.to_ne_bytes().to_vec(), Access::ALL);
    let place = Remote { address: far.address, rkey: far.rkey };
    let segment = |index: usize| Segment { lkey: near.lkey, offset: index * 8, bytes: 8 };
    let operations = [
        Operation::FetchAdd { local: segment(0), remote: place, add: 2 },
        Operation::CompareSwap { local: segment(1), remote: place, compare: 42, swap: 100 },
        Operation::CompareSwap { local: segment(2), remote: place, compare: 42, swap: 7 },
    ];
    for operation in operations {
        pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(0, operation)).unwrap();
    }
    pair.run();
    assert_eq!(remote.to_vec(), 100_u64.to_ne_bytes());
    let originals: Vec<_> = local.to_vec().chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(originals, [40, 42, 100]);
    let opcodes: Vec<_> = pair.completions[0].iter().map(|done| done.opcode).collect();
    assert_eq!(opcodes, [CompletionOpcode::FetchAdd, CompletionOpcode::CompareSwap, CompletionOpcode::CompareSwap]);
}

#[test]
fn send_with_invalidate_withdraws_the_region_first() {
    let mut pair = Pair::new(4, QueuePairConfig::default(), PathMtu::Mtu256);
    let (_, near) = pair.register(0, vec![1; 600], Access::LOCAL);
    let (_, far) = pair.register(1, vec![0; 600], Access::LOCAL);
    let qp = pair.queue_pairs;
    let config = RegionConfig { invalidated_over: Some(qp[1]), ..Access::ALL.into() };
    let (_, doomed) = pair.register(1, vec![0; 8], config);
    let segment = Segment { lkey: far.lkey, offset: 0, bytes: 600 };
    pair.ends[1].post_recv(qp[1], RecvRequest { id: 1, segment }).unwrap();
    let local = Segment { lkey: near.lkey, offset: 0, bytes: 600 };
    let send = Operation::SendWithInvalidate { local, rkey: doomed.rkey };
    pair.ends[0].post_send(qp[0], SendRequest::new(1, send)).unwrap();
    pair.run();
    assert_eq!(pair.completions[1][0].invalidated_rkey, Some(doomed.rkey));
    assert!(!pair.ends[1].deregister(doomed.lkey), "it is gone already");
}

#[test]
fn sequence_numbers_wrap() {
    let psns = Some([Psn::new(0x00ff_fffe), Psn::new(0x00ff_ffff)]);
    let mut pair = Pair::with_psns(5, QueuePairConfig::default(), PathMtu::Mtu256, psns);
    let (local, near) = pair.register(0, pattern(20_000, 1), Access::ALL);
    let (remote, far) = pair.register(1, vec![0; 20_000], Access::ALL);
    let place = Remote { address: far.address, rkey: far.rkey };
    let write = Operation::Write { local: Segment { lkey: near.lkey, offset: 0, bytes: 20_000 }, remote: place };
    let read = Operation::Read { local: Segment { lkey: near.lkey, offset: 0, bytes: 20_000 }, remote: place };
    for operation in [write, read, write] {
        pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(0, operation)).unwrap();
    }
    pair.run();
    assert!(pair.completions[0].iter().all(|done| done.status == Status::Success), "{:?}", pair.completions[0]);
    assert_eq!(pair.completions[0].len(), 3);
    assert!(remote.to_vec() == local.to_vec());
}

#[test]
fn unsignalled_requests_complete_silently_and_free_their_place() {
    let config = QueuePairConfig { send_depth: 2, ..QueuePairConfig::default() };
    let mut pair = Pair::new(6, config, PathMtu::Mtu256);
    let (_, near) = pair.register(0, vec![0; 8], Access::ALL);
    let (_, far) = pair.register(1, vec![0; 8], Access::ALL);
    let local = Segment { lkey: near.lkey, offset: 0, bytes: 8 };
    let write = Operation::Write { local, remote: Remote { address: far.address, rkey: far.rkey } };
    for round in 0..10 {
        for signalled in [false, true] {
            let request = SendRequest { signalled, ..SendRequest::new(round, write) };
            pair.ends[0].post_send(pair.queue_pairs[0], request).unwrap();
        }
        assert!(pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(0, write)).is_err());
        pair.run();
    }
    assert_eq!(pair.completions[0].len(), 10);
}
