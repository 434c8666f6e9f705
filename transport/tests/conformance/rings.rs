//! Rings in shared memory between endpoints of one host: who has them, that nothing is lost there, and that nobody
//! sleeps through what comes.
#![allow(clippy::disallowed_methods)] // Two threads, in real time.

use std::{sync::mpsc, thread};

use proto::Span;
use transport::{Clock, Endpoint, EndpointConfig, Event, Faults, LocalPath};

use crate::fabric::{Fabric, REGION_BYTES, config, is_soft, pattern};

fn ring(node: usize) -> EndpointConfig {
    config(node).with_local_path(LocalPath::Ring)
}

fn paths(configs: [EndpointConfig; 2]) -> [String; 2] {
    let mut fabric = Fabric::with(configs);
    let (ours, theirs) = fabric.connect(0, 1);
    let of = |node: usize, connection| fabric.nodes[node].endpoint.path(connection).unwrap().to_string();
    [of(0, ours), of(1, theirs)]
}

#[test]
fn endpoints_of_one_host_have_rings_if_both_want_them_and_inject_no_faults() {
    if !is_soft(0) || !is_soft(1) {
        return;
    }
    let begin_with = |configs, expected: &str| {
        let found = paths(configs);
        assert!(found.iter().all(|path| path.starts_with(expected)), "{found:?}");
    };
    begin_with([ring(0), ring(1)], "ring 127.");
    let udp = |node| config(node).with_local_path(LocalPath::Udp);
    begin_with([ring(0), udp(1)], "soft 127.");
    begin_with([udp(0), ring(1)], "soft 127.");
    let faulty = Faults { loss: 0.01, ..Faults::default() };
    begin_with([ring(0), ring(1).with_faults(faulty)], "soft 127.");
    begin_with([ring(0).with_faults(faulty), ring(1)], "soft 127.");
}

/// Every case once more by UDP, as between hosts; but for one that makes interfaces, which goes that way anyway.
#[test]
fn every_case_holds_by_udp_too() {
    if is_soft(0) {
        testing::run_again_by_udp(Some("link_down"));
    }
}

/// More than a ring holds, both ways at once, in messages, WRITEs and READs: no packet goes by the socket, or twice.
#[test]
fn what_does_not_fit_a_ring_waits_and_nothing_is_sent_again() {
    if !is_soft(0) || !is_soft(1) {
        return;
    }
    const PIECE: usize = 700_001;
    let mut fabric = Fabric::with([ring(0), ring(1)]);
    let (ours, theirs) = fabric.connect(0, 1);
    let bytes = [0, 1].map(|seed| pattern(seed, REGION_BYTES));
    (0..2).for_each(|node| fabric.nodes[node].region.write(0, &bytes[node]));
    // The server takes nothing in for a while, and no timer gives it up.
    fabric.is_frozen = true;
    fabric.stalled.push(1);
    for piece in 0..5 {
        let at = piece * PIECE;
        let read = fabric.transfer(0, 1, piece as u64, at, PIECE);
        fabric.nodes[0].endpoint.read(ours, read).unwrap();
        let write = fabric.transfer(0, 1, 100 + piece as u64, REGION_BYTES - 100_000 - piece, 50_000);
        fabric.nodes[0].endpoint.write_with_immediate(ours, write, piece as u32).unwrap();
        fabric.nodes[0].endpoint.send(ours, &pattern(7, 1000)).unwrap();
    }
    (0..50).for_each(|_| fabric.step());
    fabric.stalled.clear();
    let (mut reads, mut writes, mut messages, mut immediates) = (0, 0, 0, 0);
    fabric.until("all ends", |fabric| {
        for event in [0, 1].into_iter().flat_map(|node| std::mem::take(&mut fabric.nodes[node].events)) {
            match event {
                Event::ReadDone { result, .. } => {
                    result.unwrap();
                    reads += 1;
                }
                Event::WriteDone { result, .. } => {
                    result.unwrap();
                    writes += 1;
                }
                Event::Message { connection, frame } => {
                    assert_eq!((connection, frame), (theirs, pattern(7, 1000)));
                    messages += 1;
                }
                Event::Immediate { .. } => immediates += 1,
                other => panic!("{other:?}"),
            }
        }
        (reads == 5 && writes == 5 && messages == 5 && immediates == 5).then_some(())
    });
    assert!(fabric.nodes[0].bytes(0, 5 * PIECE) == bytes[1][..5 * PIECE], "what was read is wrong");
    for node in &fabric.nodes {
        let (counters, driver) = (node.endpoint.counters().unwrap(), node.endpoint.driver_counters().unwrap());
        assert_eq!((driver.send_calls, driver.receive_calls), (0, 0), "{driver:?}");
        assert_eq!((counters.retransmits_timeout, counters.probes), (0, 0), "{counters:?}");
    }
}

/// One that answers, and sleeps for as long as nothing comes.
fn echo(endpoint: &mut Endpoint, clock: &Clock) {
    loop {
        endpoint.wait(clock.now(), clock.now() + Span::from_millis(3_600_000));
        endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            match event {
                Event::Incoming { connection, .. } => endpoint.accept(clock.now(), connection, Vec::new()),
                Event::Message { connection, frame } => endpoint.send(connection, &frame).unwrap(),
                Event::Disconnected { .. } => return,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// No alarm but the heartbeats' would end a sleep that a message should have ended: a few would take minutes.
#[test]
fn who_sleeps_is_woken_by_what_comes() {
    let (clock, (told, address)) = (Clock::start(), mpsc::channel());
    let server = thread::spawn(move || {
        let mut endpoint = Endpoint::open(config(1)).unwrap();
        told.send(endpoint.listen_address().unwrap()).unwrap();
        echo(&mut endpoint, &clock);
    });
    let mut endpoint = Endpoint::open(config(0)).unwrap();
    let connection = endpoint.connect(clock.now(), address.recv().unwrap(), Vec::new());
    let (mut next, mut random) = (0u32, 1u32);
    while next < 3_000 {
        endpoint.wait(clock.now(), clock.now() + Span::from_millis(3_600_000));
        endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            match event {
                Event::Connected { .. } => {}
                Event::Message { frame, .. } => {
                    assert_eq!(frame, next.to_ne_bytes());
                    next += 1;
                }
                other => panic!("{other:?}"),
            }
            // The other one has gone to sleep by now, or is about to, or is awake.
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (0..random >> 18).for_each(|_| std::hint::spin_loop());
            endpoint.send(connection, &next.to_ne_bytes()).unwrap();
        }
    }
    endpoint.disconnect(connection);
    endpoint.flush(clock.now());
    server.join().unwrap();
}
