//! Eight servers answer one reader at once, and eight writers write to one: nothing may drown in the socket's buffer.

use transport::{Event, Transfer};

use crate::fabric::{Fabric, REGION_BYTES, pattern};

const SERVERS: usize = 8;
const OBJECTS: usize = 8;
const BYTES: usize = 150 * 1024;

fn place(server: usize, object: usize) -> usize {
    ((server - 1) * OBJECTS + object) * BYTES / 4
}

#[test]
fn eight_servers_are_read_at_once() {
    let mut fabric = Fabric::new(1 + SERVERS);
    let connections: Vec<_> = (1..=SERVERS).map(|server| fabric.connect(0, server).0).collect();
    for server in 1..=SERVERS {
        fabric.nodes[server].region.write(0, &pattern(server as u64, OBJECTS * BYTES));
    }
    let local = transport::Region::allocate(SERVERS * OBJECTS * BYTES).unwrap();
    let key = fabric.nodes[0].endpoint.register(&local, transport::Access::default()).unwrap();
    for object in 0..OBJECTS {
        for server in 1..=SERVERS {
            let token = ((server - 1) * OBJECTS + object) as u64;
            let transfer = Transfer {
                lkey: key.lkey,
                local_offset: token as usize * BYTES,
                ..fabric.transfer(0, server, token, object * BYTES, BYTES)
            };
            fabric.nodes[0].endpoint.read(connections[server - 1], transfer).unwrap();
        }
    }
    let mut tokens: Vec<_> = (0..SERVERS * OBJECTS)
        .map(|_| match fabric.event(0) {
            Event::ReadDone { token, result: Ok(()), .. } => token,
            other => panic!("{other:?}"),
        })
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..(SERVERS * OBJECTS) as u64).collect::<Vec<_>>());
    for server in 1..=SERVERS {
        let mut bytes = vec![0; OBJECTS * BYTES];
        local.read((server - 1) * OBJECTS * BYTES, &mut bytes);
        assert!(bytes == pattern(server as u64, OBJECTS * BYTES), "what server {server} answered");
    }
    let Some(counters) = fabric.nodes[0].endpoint.counters() else { return };
    // Timeouts prove nothing: nine endpoints share one thread here, and a slow machine runs into them.
    assert_eq!(counters.retransmits_gap, 0, "the budget keeps the answers within the buffer: {counters:?}");
}

#[test]
fn eight_writers_write_at_once() {
    let mut fabric = Fabric::new(1 + SERVERS);
    let connections: Vec<_> = (1..=SERVERS).map(|server| fabric.connect(server, 0).0).collect();
    for server in 1..=SERVERS {
        fabric.nodes[server].region.write(0, &pattern(server as u64, REGION_BYTES));
        for object in 0..OBJECTS {
            let at = place(server, object);
            let transfer = fabric.transfer(server, 0, object as u64, at, BYTES / 4);
            let immediate = (server * OBJECTS + object) as u32;
            fabric.nodes[server].endpoint.write_with_immediate(connections[server - 1], transfer, immediate).unwrap();
        }
    }
    for _ in 0..SERVERS * OBJECTS {
        assert!(matches!(fabric.event(0), Event::Immediate { bytes, .. } if bytes as usize == BYTES / 4));
    }
    for server in 1..=SERVERS {
        let expected = pattern(server as u64, REGION_BYTES);
        let (from, to) = (place(server, 0), place(server, OBJECTS));
        assert!(fabric.nodes[0].bytes(from, to - from) == expected[from..to], "what {server} wrote");
    }
}
