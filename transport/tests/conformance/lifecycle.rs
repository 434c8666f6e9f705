//! How connections end: on purpose, by a fence, by death, by a stall.
#![allow(clippy::disallowed_methods)] // A peer has a thread of its own.

use std::time::Duration;

use proto::{Span, Timestamp};
use transport::{Clock, Endpoint, Event, Faults, TransferError};

use crate::fabric::{Fabric, config, is_soft, pattern};

const BYTES: usize = 1024 * 1024;
/// Twice as long as a device with the settings of a role asks in vain: `rdma_rxe` takes 0.5 s over them.
const PAUSE: Duration = Duration::from_secs(1);

#[test]
fn a_fence_keeps_the_rest_of_a_write_out() {
    // Packets late and doubled, so that some are under way when the fence comes.
    let mut fabric = Fabric::with_faults(2, Faults { duplicate: 0.3, reorder: 0.3, ..Faults::default() });
    let (ours, theirs) = fabric.connect(0, 1);
    fabric.nodes[0].region.write(0, &vec![0xff; BYTES]);
    let transfer = fabric.transfer(0, 1, 1, 0, BYTES);
    fabric.nodes[0].endpoint.write_with_immediate(ours, transfer, 1).unwrap();
    fabric.until("some of the WRITE", |fabric| (fabric.nodes[1].bytes(0, 1) == [0xff]).then_some(()));
    fabric.nodes[1].endpoint.disconnect(theirs);
    let at_fence = fabric.nodes[1].bytes(0, BYTES);
    assert!(at_fence.contains(&0), "the WRITE was over before the fence; make it larger");
    assert!(fabric.disconnected(1, theirs).contains("we disconnected"));
    let result = Err(TransferError::Flushed);
    assert_eq!(fabric.event(0), Event::WriteDone { connection: ours, token: 1, result });
    assert!(fabric.disconnected(0, ours).contains("it disconnected"));
    (0..500).for_each(|_| fabric.step());
    assert!(fabric.nodes[1].bytes(0, BYTES) == at_fence, "something came through the fence");
    fabric.quiet(1);
    // A fresh connection is not disturbed by the old one's packets.
    let (ours, _) = fabric.connect(0, 1);
    fabric.nodes[0].endpoint.write_with_immediate(ours, transfer, 2).unwrap();
    let event = fabric.event(1);
    assert!(matches!(event, Event::Immediate { immediate: 2, .. }), "{event:?}");
}

#[test]
fn everything_outstanding_is_flushed_before_the_end() {
    let mut fabric = Fabric::new(2);
    let (ours, _) = fabric.connect(0, 1);
    fabric.stalled = vec![1];
    let transfer = fabric.transfer(0, 1, 0, 0, 300_000);
    for token in 0..200 {
        let node = &mut fabric.nodes[0].endpoint;
        let transfer = transport::Transfer { token, ..transfer };
        node.read(ours, transfer).unwrap();
        node.write_with_immediate(ours, transfer, 0).unwrap();
    }
    (0..20).for_each(|_| fabric.step());
    fabric.nodes[0].endpoint.disconnect(ours);
    let mut got = [(); 2].map(|()| std::collections::BTreeMap::new());
    for _ in 0..400 {
        let (kind, token, result) = match fabric.event(0) {
            Event::ReadDone { token, result, .. } => (0, token, result),
            Event::WriteDone { token, result, .. } => (1, token, result),
            other => panic!("{other:?}"),
        };
        assert_eq!(got[kind].insert(token, result), None, "told of twice");
    }
    for results in got {
        assert_eq!(results.len(), 200);
        let flushed = results.values().filter(|&&result| result == Err(TransferError::Flushed)).count();
        // A device answers for a process that stands still, until the credits and the READ budget are used up.
        let done = results.values().filter(|result| result.is_ok()).count();
        assert!(flushed + done == 200 && flushed > 100 && (done == 0 || !is_soft(1)), "{done} done, {flushed} flushed");
    }
    fabric.disconnected(0, ours);
    fabric.quiet(0);
}

#[test]
fn a_dead_peer_is_noticed_at_once() {
    let mut fabric = Fabric::new(2);
    let (ours, _) = fabric.connect(0, 1);
    let transfer = fabric.transfer(0, 1, 1, 0, BYTES);
    fabric.nodes[0].endpoint.read(ours, transfer).unwrap();
    // What the system does to the sockets of a killed process.
    fabric.nodes.pop();
    let result = Err(TransferError::Flushed);
    assert_eq!(fabric.event(0), Event::ReadDone { connection: ours, token: 1, result });
    assert!(fabric.disconnected(0, ours).contains("the peer is gone"));
}

#[test]
fn a_stalled_peer_is_noticed_by_its_silence() {
    let mut fabric = Fabric::new(2);
    let (ours, theirs) = fabric.connect(0, 1);
    for _ in 0..20 {
        fabric.skip(Span::from_millis(450));
        (0..20).for_each(|_| fabric.step());
    }
    assert!(fabric.nodes[0].events.is_empty() && fabric.nodes[1].events.is_empty(), "heartbeats keep it");
    fabric.stalled = vec![1];
    for _ in 0..5 {
        fabric.skip(Span::from_millis(450));
        (0..20).for_each(|_| fabric.step());
    }
    assert!(fabric.disconnected(0, ours).contains("has stalled"));
    // When it goes on, it learns what happened.
    fabric.stalled.clear();
    assert!(fabric.disconnected(1, theirs).contains("has stalled"));
}

#[test]
fn our_own_stall_is_not_taken_for_the_peers() {
    let mut fabric = Fabric::new(2);
    fabric.connect(0, 1);
    // However long a busy machine takes for all of this.
    fabric.is_frozen = true;
    // First the two beat at different times: node 1 at 700 ms, node 0 at 1000.
    for (ms, stalled) in [(500, vec![1]), (200, vec![]), (300, vec![]), (190, vec![])] {
        fabric.stalled = stalled;
        fabric.skip(Span::from_millis(ms));
        (0..20).for_each(|_| fabric.step());
    }
    // Node 0 stands still and, at 2840 ms, last heard the peer 2140 ms ago; but what the peer said is in its socket.
    fabric.stalled = vec![0];
    for _ in 0..3 {
        fabric.skip(Span::from_millis(550));
        (0..20).for_each(|_| fabric.step());
    }
    fabric.stalled.clear();
    fabric.quiet(0);
}

/// With one thread for all nodes, a machine that has no time for it keeps every one of them from answering; but a
/// device's kernel goes on asking.
#[test]
fn no_pause_of_the_machine_is_taken_for_a_stall() {
    let mut fabric = Fabric::new(2);
    let connections: [_; 2] = fabric.connect(0, 1).into();
    let [sender, receiver] = if is_soft(0) { [1, 0] } else { [0, 1] };
    fabric.nodes[sender].endpoint.send(connections[sender], b"frame").unwrap();
    fabric.stalled = vec![receiver];
    fabric.step();
    if !(is_soft(0) && is_soft(1)) {
        // Only a device has a clock that goes on.
        std::thread::sleep(PAUSE);
    }
    fabric.stalled.clear();
    let connection = connections[receiver];
    assert_eq!(fabric.event(receiver), Event::Message { connection, frame: b"frame".to_vec() });
    (0..2).for_each(|node| fabric.quiet(node));
}

#[test]
fn two_threads_that_sleep_and_wake() {
    let mut server = Endpoint::open(config(1)).unwrap();
    let to = server.listen_address().unwrap();
    let waker = server.waker();
    let thread = std::thread::spawn(move || {
        let clock = Clock::start();
        let mut echoed = 0;
        loop {
            server.drive(clock.now());
            while let Some(event) = server.poll_event() {
                match event {
                    Event::Incoming { connection, .. } => server.accept(clock.now(), connection, Vec::new()),
                    Event::Message { connection, frame } => {
                        server.send(connection, &frame).unwrap();
                        echoed += 1;
                    }
                    Event::Disconnected { .. } => return echoed,
                    other => panic!("{other:?}"),
                }
            }
            server.wait(clock.now(), Timestamp::NEVER);
        }
    });
    let clock = Clock::start();
    let mut client = Endpoint::open(config(0)).unwrap();
    let connection = client.connect(clock.now(), to, Vec::new());
    let next = |client: &mut Endpoint| loop {
        client.drive(clock.now());
        match client.poll_event() {
            Some(event) => return event,
            None => client.wait(clock.now(), Timestamp::NEVER),
        }
    };
    assert!(matches!(next(&mut client), Event::Connected { .. }));
    for number in 0..100u64 {
        waker.wake();
        let frame = pattern(number, 64);
        client.send(connection, &frame).unwrap();
        assert_eq!(next(&mut client), Event::Message { connection, frame });
    }
    client.disconnect(connection);
    assert_eq!(thread.join().unwrap(), 100);
}
