//! Connections that come and go leave nothing behind. Alone in its process, as it counts the process's descriptors, and
//! its mapped memory.

#[path = "conformance/fabric.rs"]
#[allow(dead_code)]
mod fabric;

use fabric::{Fabric, config};
use transport::EndpointConfig;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Of memory that can be written. The allocator reserves 64 MiB more for a thread that finds another one allocating,
/// which happens by chance; what it has reserved cannot be written until it is used.
fn mapped_bytes() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let lines = maps.lines().map(|line| line.split_once(' ').unwrap());
    let writable = lines.filter(|(_, rest)| rest.starts_with("rw")).map(|(range, _)| range.split_once('-').unwrap());
    let address = |text| usize::from_str_radix(text, 16).unwrap();
    writable.map(|(from, to)| address(to) - address(from)).sum()
}

/// More than there may be regions (1,024 and one for each connection) or queue pairs: each connection has one of both,
/// so if they were kept, the last ones would be refused.
const CONNECTIONS: usize = 1_100;

#[test]
fn a_thousand_connections_leave_no_queue_pair_no_region_no_descriptor_and_no_memory() {
    let mut fabric = Fabric::with([0, 1].map(|node| EndpointConfig { connections_max: 2, ..config(node) }));
    let mut cycle = |closer: usize| {
        let (ours, theirs) = fabric.connect(0, 1);
        let ids = [ours, theirs];
        fabric.nodes[0].endpoint.send(ours, b"hello").unwrap();
        fabric.event(1);
        fabric.nodes[closer].endpoint.disconnect(ids[closer]);
        fabric.disconnected(0, ours);
        fabric.disconnected(1, theirs);
    };
    (0..10).for_each(|number| cycle(number % 2));
    let (descriptors, mapped) = (open_descriptors(), mapped_bytes());
    (0..CONNECTIONS).for_each(|number| cycle(number % 2));
    assert_eq!(open_descriptors(), descriptors);
    // A connection maps more than a megabyte on each side.
    assert!(mapped_bytes() < mapped + 50_000_000, "{mapped} bytes were mapped, now {}", mapped_bytes());
}
