//! Several endpoints of one process on one address, as each thread of a process has one of its own.

use transport::{ConnectionId, Event};

use crate::fabric::{Fabric, REGION_BYTES, config, is_soft, pattern};

/// Nodes 0, 1 and 2 share an address; 3 and 4 are their peers.
const SHARING: usize = 3;
const PEERS: usize = 2;
/// Of one object; more than one packet, and more than one segmentation batch.
const BYTES: usize = 150 * 1024;

fn fabric() -> Fabric {
    let sharing = vec![config(0).sharing_address_within_process(); SHARING];
    Fabric::with(sharing.into_iter().chain((1..=PEERS).map(config)))
}

/// A connection between a node and a peer, with its id on each.
struct Pair {
    node: usize,
    peer: usize,
    ours: ConnectionId,
    theirs: ConnectionId,
    /// Where its object lies in the regions of both.
    at: usize,
}

/// Connects every node that shares with every peer; half of the connections are the peers'.
fn connect(fabric: &mut Fabric) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (node, peer) in (0..SHARING).flat_map(|node| (SHARING..SHARING + PEERS).map(move |peer| (node, peer))) {
        let (ours, theirs) = if (node + peer) % 2 == 0 {
            fabric.connect(node, peer)
        } else {
            let (theirs, ours) = fabric.connect(peer, node);
            (ours, theirs)
        };
        pairs.push(Pair { node, peer, ours, theirs, at: pairs.len() * BYTES });
    }
    pairs
}

/// Every pair at once: a frame each way, a READ of the peer's memory and a WRITE into it.
fn exchange(fabric: &mut Fabric, pairs: &[Pair], seed: u64) {
    for pair in pairs {
        let at = pair.at;
        fabric.nodes[pair.peer].region.write(at, &pattern(seed + at as u64, BYTES));
        fabric.nodes[pair.node].region.write(at + REGION_BYTES / 2, &pattern(!seed - at as u64, BYTES));
    }
    for pair in pairs {
        let at = pair.at;
        let read = fabric.transfer(pair.node, pair.peer, 1, at, BYTES);
        let write = fabric.transfer(pair.node, pair.peer, 2, at + REGION_BYTES / 2, BYTES);
        let node = &mut fabric.nodes[pair.node].endpoint;
        node.read(pair.ours, read).unwrap();
        node.write_with_immediate(pair.ours, write, at as u32).unwrap();
        node.send(pair.ours, &at.to_be_bytes()).unwrap();
        fabric.nodes[pair.peer].endpoint.send(pair.theirs, &at.to_le_bytes()).unwrap();
    }
    for pair in pairs {
        let (connection, at) = (pair.ours, pair.at);
        for event in [
            Event::ReadDone { connection, token: 1, result: Ok(()) },
            Event::WriteDone { connection, token: 2, result: Ok(()) },
            Event::Message { connection, frame: at.to_le_bytes().to_vec() },
        ] {
            take(fabric, pair.node, &event);
        }
        let connection = pair.theirs;
        take(fabric, pair.peer, &Event::Immediate { connection, immediate: at as u32, bytes: BYTES as u32 });
        take(fabric, pair.peer, &Event::Message { connection, frame: at.to_be_bytes().to_vec() });
        assert!(fabric.nodes[pair.node].bytes(at, BYTES) == pattern(seed + at as u64, BYTES), "what was read");
        let written = fabric.nodes[pair.peer].bytes(at + REGION_BYTES / 2, BYTES);
        assert!(written == pattern(!seed - at as u64, BYTES), "what was written");
    }
    assert!(fabric.nodes.iter().all(|node| node.events.is_empty()), "events that nobody expects");
}

/// Waits for an event of a node, whatever others come before it, unless a connection ends.
fn take(fabric: &mut Fabric, node: usize, expected: &Event) {
    fabric.until(&format!("{expected:?}"), |fabric| {
        let mut events = fabric.nodes.iter().flat_map(|node| &node.events);
        let ended = events.any(|event| matches!(event, Event::Disconnected { .. }));
        assert!(!ended, "waiting for {expected:?}: {}", fabric.describe());
        let events = &mut fabric.nodes[node].events;
        let found = events.iter().position(|event| event == expected);
        found.and_then(|at| events.remove(at))
    });
}

#[test]
fn endpoints_of_one_process_share_an_address() {
    let mut fabric = fabric();
    if is_soft(0) {
        let addresses = [0, 1, 2].map(|node: usize| fabric.nodes[node].endpoint.packet_address());
        assert!(addresses.iter().all(|address| *address == addresses[0]), "{addresses:?}");
    }
    let pairs = connect(&mut fabric);
    (0..4).for_each(|seed| exchange(&mut fabric, &pairs, seed));
}

#[test]
fn when_one_of_them_closes_the_others_go_on() {
    let mut fabric = fabric();
    let mut pairs = connect(&mut fabric);
    exchange(&mut fabric, &pairs, 1);
    // The first to bind: the kernel moves the last one's socket into its place.
    fabric.nodes.remove(0);
    for pair in pairs.extract_if(.., |pair| pair.node == 0) {
        let Event::Disconnected { connection, .. } = fabric.event(pair.peer - 1) else { panic!("still connected") };
        assert_eq!(connection, pair.theirs);
    }
    pairs.iter_mut().for_each(|pair| (pair.node, pair.peer) = (pair.node - 1, pair.peer - 1));
    (2..5).for_each(|seed| exchange(&mut fabric, &pairs, seed));
}
