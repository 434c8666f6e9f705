//! Everything of the other files at once, over a bad network.

use transport::{Event, Faults};

use crate::fabric::{Fabric, is_soft, pattern};

const ROUNDS: u64 = 25;
/// On devices, which are judged on an emulated processor.
const DEVICE_ROUNDS: u64 = 8;
const BYTES: usize = 40_000;

/// Frames, WRITEs and READs both ways. Each must come through whole, in order, once.
fn everything_over(faults: Faults) {
    let mut fabric = Fabric::with_faults(2, faults);
    let (ours, theirs) = fabric.connect(0, 1);
    let ids = [ours, theirs];
    let rounds = if is_soft(0) && is_soft(1) { ROUNDS } else { DEVICE_ROUNDS };
    for round in 0..rounds {
        for (node, &connection) in ids.iter().enumerate() {
            let peer = 1 - node;
            let seed = 2 * round + node as u64;
            // Each node READs its own quarter of the region and WRITEs into another one.
            let (read_at, write_at) = (node * 1_000_000, (2 + node) * 1_000_000);
            fabric.nodes[peer].region.write(read_at, &pattern(seed, BYTES));
            fabric.nodes[node].region.write(write_at, &pattern(!seed, BYTES));
            let read = fabric.transfer(node, peer, round, read_at, BYTES);
            let write = fabric.transfer(node, peer, round, write_at, BYTES);
            let endpoint = &mut fabric.nodes[node].endpoint;
            endpoint.send(connection, &pattern(seed, 500)).unwrap();
            endpoint.read(connection, read).unwrap();
            endpoint.write_with_immediate(connection, write, round as u32).unwrap();
        }
        for (node, &connection) in ids.iter().enumerate() {
            let peer = 1 - node;
            let seed = 2 * round + node as u64;
            let mut events: Vec<_> = (0..4).map(|_| fabric.event(node)).collect();
            let mut take = |wanted: Event| {
                let at = events.iter().position(|event| *event == wanted);
                events.remove(at.unwrap_or_else(|| panic!("round {round}: {wanted:?} is not among {events:?}")));
            };
            take(Event::Message { connection, frame: pattern(2 * round + peer as u64, 500) });
            take(Event::Immediate { connection, immediate: round as u32, bytes: BYTES as u32 });
            take(Event::ReadDone { connection, token: round, result: Ok(()) });
            take(Event::WriteDone { connection, token: round, result: Ok(()) });
            let read = fabric.nodes[node].bytes(node * 1_000_000, BYTES);
            same(&read, &pattern(seed, BYTES), &format!("round {round}: READ by node {node}"));
            let written = fabric.nodes[peer].bytes((2 + node) * 1_000_000, BYTES);
            same(&written, &pattern(!seed, BYTES), &format!("round {round}: WRITE by node {node}"));
        }
    }
}

/// Says who moved which bytes to where they do not belong.
fn same(found: &[u8], expected: &[u8], what: &str) {
    let wrong: Vec<_> = (0..expected.len()).filter(|&at| found[at] != expected[at]).collect();
    let (Some(&first), Some(&last)) = (wrong.first(), wrong.last()) else { return };
    let there = &found[first..(first + 16).min(found.len())];
    let belongs = expected.windows(there.len()).position(|bytes| bytes == there);
    panic!("{what}: {} wrong bytes from {first} to {last}; what is there belongs to {belongs:?}", wrong.len());
}

#[test]
fn two_percent_loss() {
    everything_over(Faults { loss: 0.02, ..Faults::default() });
}

#[test]
fn ten_percent_loss() {
    everything_over(Faults { loss: 0.1, ..Faults::default() });
}

#[test]
fn duplicates_and_reordering() {
    everything_over(Faults { duplicate: 0.2, reorder: 0.1, ..Faults::default() });
}

#[test]
fn damage() {
    everything_over(Faults { corrupt: 0.05, ..Faults::default() });
}

#[test]
fn a_fault_that_is_no_probability_is_refused() {
    let config = transport::EndpointConfig::default().with_faults(Faults { loss: 2.0, ..Faults::default() });
    let error = transport::Endpoint::open(config).err().expect("refused");
    assert!(error.to_string().contains("faults.loss: found 2, expected a probability, 0 to 1"), "{error}");
}
