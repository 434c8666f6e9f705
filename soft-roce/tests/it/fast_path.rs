//! What makes it fast enough: no allocation per packet, segmentation batches as long as the kernel takes, turns between
//! queue pairs.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use crate::common::Pair;
use soft_roce::{
    Access, Endpoint, Operation, PathMtu, Peer, Psn, QueuePairConfig, QueuePairNumber, RecvRequest, Remote, Segment,
    SendRequest, Status,
};

/// Counts the allocations of this thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[allow(unsafe_code, reason = "an allocator is the only way to see allocations")]
// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BYTES: u32 = 153_600;

/// Moves packets between the ends until neither has any.
fn exchange(pair: &mut Pair, buf: &mut [u8]) {
    loop {
        let mut moved = false;
        for side in [0, 1] {
            while let Some(batch) = pair.ends[side].poll_transmit(pair.now, buf, 64) {
                moved = true;
                for datagram in buf[..batch.bytes].chunks(batch.segment_bytes) {
                    pair.ends[1 - side].handle_packet(pair.now, pair.addresses[side], datagram);
                }
            }
        }
        if !moved {
            return;
        }
    }
}

#[test]
fn steady_traffic_does_not_allocate() {
    let mut pair = Pair::new(1, QueuePairConfig::default(), PathMtu::Mtu4096);
    let near = pair.register(0, vec![1; BYTES as usize], Access::ALL).1;
    let far = pair.register(1, vec![2; BYTES as usize], Access::ALL).1;
    let local = Segment { lkey: near.lkey, offset: 0, bytes: BYTES };
    let remote = Remote { address: far.address, rkey: far.rkey };
    let mut buf = vec![0; 65_507];
    let operations = [
        Operation::Read { local, remote },
        Operation::WriteWithImmediate { local, remote, immediate: 1 },
        Operation::Send { local },
    ];
    let mut round = |pair: &mut Pair| {
        for operation in operations {
            if !matches!(operation, Operation::Read { .. }) {
                let segment = Segment { lkey: far.lkey, offset: 0, bytes: BYTES };
                pair.ends[1].post_recv(pair.queue_pairs[1], RecvRequest { id: 0, segment }).unwrap();
            }
            pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(0, operation)).unwrap();
            exchange(pair, &mut buf);
            assert_eq!(pair.ends[0].poll_completion().map(|done| done.status), Some(Status::Success));
        }
        while pair.ends[1].poll_completion().is_some() {}
    };
    // The queues find their size first.
    for _ in 0..10 {
        round(&mut pair);
    }
    let before = ALLOCATIONS.get();
    for _ in 0..20 {
        round(&mut pair);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0, "allocations for {} packets", 20 * 3 * 38);
}

/// Connects `count` queue pairs between two endpoints, the numbers of each side.
fn queue_pairs(ends: &mut [Endpoint; 2], pair: [std::net::SocketAddr; 2], count: usize) -> Vec<[QueuePairNumber; 2]> {
    let connect = |_| {
        let numbers = [0, 1].map(|side| ends[side].create_queue_pair(QueuePairConfig::default()).expect("room"));
        for side in [0, 1] {
            let peer = Peer {
                address: pair[1 - side],
                queue_pair: numbers[1 - side],
                rq_psn: Psn::new(0),
                sq_psn: Psn::new(0),
                path_mtu: PathMtu::Mtu4096,
                identification: soft_roce::Identification::SegmentIndex,
                ack_delay: None,
            };
            ends[side].connect_queue_pair(numbers[side], peer).expect("a fresh queue pair connects");
        }
        numbers
    };
    (0..count).map(connect).collect()
}

#[test]
fn read_responses_of_many_queue_pairs_take_turns() {
    let mut pair = Pair::new(2, QueuePairConfig::default(), PathMtu::Mtu4096);
    let near = pair.register(0, vec![1; BYTES as usize], Access::ALL).1;
    let far = pair.register(1, vec![2; BYTES as usize], Access::ALL).1;
    let addresses = pair.addresses;
    let numbers = queue_pairs(&mut pair.ends, addresses, 4);
    let local = Segment { lkey: near.lkey, offset: 0, bytes: BYTES };
    let remote = Remote { address: far.address, rkey: far.rkey };
    for [number, _] in &numbers {
        pair.ends[0].post_send(*number, SendRequest::new(0, Operation::Read { local, remote })).unwrap();
    }
    let mut buf = vec![0; 65_507];
    while let Some(batch) = pair.ends[0].poll_transmit(pair.now, &mut buf, 64) {
        for datagram in buf[..batch.bytes].chunks(batch.segment_bytes) {
            pair.ends[1].handle_packet(pair.now, pair.addresses[0], datagram);
        }
    }
    // Served bytes never differ by more than two batches between any two queue pairs that still wait.
    let mut served = std::collections::BTreeMap::<u32, usize>::new();
    let mut longest = 0;
    while let Some(batch) = pair.ends[1].poll_transmit(pair.now, &mut buf, 64) {
        let destination = u32::from_be_bytes([0, buf[5], buf[6], buf[7]]);
        *served.entry(destination).or_default() += batch.bytes;
        longest = longest.max(batch.segments);
        let least = numbers.iter().map(|[number, _]| served.get(&number.0).copied().unwrap_or(0)).min();
        let most = served.values().max().copied().unwrap_or(0);
        assert!(most - least.unwrap_or(0) <= 2 * buf.len(), "{served:?}");
    }
    assert!(served.values().all(|bytes| *bytes > BYTES as usize) && served.len() == 4);
    // Of a chunk's 16 packets, the first and the last are longer than the others: they leave in three batches.
    assert!(longest >= 13, "longest batch: {longest}");
}
