//! Connections that come and go leave nothing behind. Alone in its process, as it counts the process's descriptors.

#[path = "conformance/fabric.rs"]
#[allow(dead_code)]
mod fabric;

use fabric::{ARMS, Fabric};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mapped_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn two_hundred_connections_leave_no_descriptor_and_no_memory() {
    for arm in ARMS {
        let mut fabric = Fabric::new(arm, 2);
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
        (0..200).for_each(|number| cycle(number % 2));
        assert_eq!(open_descriptors(), descriptors);
        // A connection maps more than a megabyte on each side.
        assert!(mapped_bytes() < mapped + 50_000_000, "{mapped} bytes were mapped, now {}", mapped_bytes());
    }
}
