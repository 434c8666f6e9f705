//! Memory from the pool of reserved hugepages, where there is one (`/proc/sys/vm/nr_hugepages`; the guest of
//! `tests/rxe/run transport` has one). Alone in its process, as it asks how many of them the process has.

use crate::{
    alone,
    fabric::{Fabric, REGION_BYTES, pattern},
};
use transport::Event;

/// The number behind a name in a table of /proc.
fn kibibytes(file: &str, name: &str) -> usize {
    let table = std::fs::read_to_string(file).unwrap();
    let number = table.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    number.split_whitespace().next().map_or(0, |number| number.parse().unwrap())
}

#[test]
fn reserved_hugepages_are_taken_and_peers_reach_them() {
    let _alone = alone();
    let wanted = 2 * REGION_BYTES / 1024;
    let free = kibibytes("/proc/meminfo", "HugePages_Free:") * kibibytes("/proc/meminfo", "Hugepagesize:");
    if free < wanted {
        testing::skip("transport/hugepages", "8 MiB of reserved hugepages (vm.nr_hugepages)");
        return;
    }
    let mut fabric = Fabric::new(2);
    let (connection, _) = fabric.connect(0, 1);
    let bytes = pattern(3, REGION_BYTES);
    fabric.nodes[1].region.write(0, &bytes);
    let whole = fabric.transfer(0, 1, 1, 0, REGION_BYTES);
    fabric.nodes[0].endpoint.read(connection, whole).unwrap();
    assert_eq!(fabric.event(0), Event::ReadDone { connection, token: 1, result: Ok(()) });
    assert!(fabric.nodes[0].bytes(0, REGION_BYTES) == bytes);
    // Both regions, now that every page of them has been touched.
    let ours = kibibytes("/proc/self/status", "HugetlbPages:");
    assert!(ours >= wanted, "{ours} KiB of hugepages, where {wanted} were free");
}
