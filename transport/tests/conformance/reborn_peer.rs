//! A peer that dies and comes back at the same addresses before anybody has noticed.

use crate::fabric::{Fabric, config};
use transport::{Arm, EndpointConfig, Event, TransferError};

const BYTES: usize = 1024 * 1024;

#[test]
fn a_peer_that_came_back_is_another() {
    let mut fabric = Fabric::new(2);
    let (ours, _) = fabric.connect(0, 1);
    let before = fabric.nodes[0].endpoint.peer_incarnation(ours).unwrap();
    let (listening, address) = (fabric.address(1), fabric.nodes[1].endpoint.packet_address().unwrap());
    let transfer = fabric.transfer(0, 1, 1, 0, BYTES);
    fabric.nodes.pop();
    let same = config(1).listening(listening);
    let arm = match same.arm {
        Arm::Soft { any_port, faults, sharing, local, .. } => Arm::Soft { address, any_port, faults, sharing, local },
        verbs @ Arm::Verbs(_) => verbs,
    };
    let same = EndpointConfig { arm, ..same };
    fabric.nodes.extend(Fabric::with([same]).nodes);
    // Nothing that was meant for the old one is answered by the new one.
    fabric.nodes[0].endpoint.read(ours, transfer).unwrap();
    assert!(matches!(fabric.event(0), Event::ReadDone { token: 1, result: Err(_), .. }));
    fabric.disconnected(0, ours);
    // Nor does a key of the old one open anything of the new one.
    let (ours, theirs) = fabric.connect(0, 1);
    assert_ne!(fabric.nodes[0].endpoint.peer_incarnation(ours), Some(before));
    fabric.nodes[0].endpoint.read(ours, transfer).unwrap();
    let result = Err(TransferError::RemoteAccess);
    assert_eq!(fabric.event(0), Event::ReadDone { connection: ours, token: 1, result });
    fabric.disconnected(0, ours);
    fabric.disconnected(1, theirs);
    fabric.quiet(1);
}
