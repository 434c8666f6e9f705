//! What becomes of a verbs device: its link goes down and up, its address and the device itself go and come. Needs a
//! node on such a device (`DOWNBEAT_NODES`), the other one soft, and the right to change its interface:
//! `tests/rxe/run transport`.

use crate::fabric::{Fabric, Interface, is_soft, pattern};
use transport::{ConnectionId, Event, Transfer, TransferError};

/// Two connected nodes, one of them on a device whose interface we may spoil.
struct Pair {
    fabric: Fabric,
    interface: Interface,
    /// The node on the device, and the other.
    node: usize,
    peer: usize,
    /// The connection, as each node knows it.
    ids: [ConnectionId; 2],
}

fn pair() -> Option<Pair> {
    let Some(node) = (0..2).find(|&node| !is_soft(node) && is_soft(1 - node)) else {
        testing::skip("transport/device_events", "a node on a verbs device and a soft one (DOWNBEAT_NODES)");
        return None;
    };
    let mut fabric = Fabric::new(2);
    let (ours, theirs) = fabric.connect(0, 1);
    let interface = Interface::of(node).expect("a verbs node has one");
    Some(Pair { fabric, interface, node, peer: 1 - node, ids: [ours, theirs] })
}

impl Pair {
    /// The reason why the connection has ended: the node's own, which it tells its peer.
    fn ended(&mut self) -> String {
        let (node, peer) = (self.node, self.peer);
        let reason = self.fabric.disconnected(node, self.ids[node]);
        let told = self.fabric.disconnected(peer, self.ids[peer]);
        let cause = reason.split_once(": ").expect("the peer's address comes first").1;
        assert!(told.ends_with(cause), "{told}");
        reason
    }

    /// What comes up again is another life: the old one's keys open nothing, and what peers are told now does.
    fn lives_again(&mut self, incarnation: u64, old: Transfer) {
        let (node, peer) = (self.node, self.peer);
        let Event::KeyChanged { lkey, rkey } = self.fabric.event(node) else { panic!("no new key") };
        assert_eq!(lkey, self.fabric.nodes[node].key.lkey);
        self.fabric.nodes[node].key.rkey = rkey;
        let (ours, theirs) = self.fabric.connect(0, 1);
        let at_peer = [ours, theirs][peer];
        assert_ne!(self.fabric.nodes[peer].endpoint.peer_incarnation(at_peer), Some(incarnation));
        self.fabric.nodes[peer].endpoint.read(at_peer, old).unwrap();
        let refused = Err(TransferError::RemoteAccess);
        assert_eq!(self.fabric.event(peer), Event::ReadDone { connection: at_peer, token: 1, result: refused });
        self.fabric.disconnected(0, ours);
        self.fabric.disconnected(1, theirs);

        let (ours, theirs) = self.fabric.connect(0, 1);
        let ids = [ours, theirs];
        for (from, to) in [(node, peer), (peer, node)] {
            self.fabric.nodes[to].region.write(0, &pattern(to as u64, 100_000));
            let transfer = self.fabric.transfer(from, to, 2, 0, 100_000);
            self.fabric.nodes[from].endpoint.read(ids[from], transfer).unwrap();
            let done = Event::ReadDone { connection: ids[from], token: 2, result: Ok(()) };
            assert_eq!(self.fabric.event(from), done);
            assert!(self.fabric.nodes[from].bytes(0, 100_000) == pattern(to as u64, 100_000));
        }
    }

    fn incarnation(&self) -> u64 {
        self.fabric.nodes[self.node].endpoint.incarnation()
    }
}

#[test]
fn a_port_that_went_down_comes_up_as_another_incarnation() {
    let Some(mut pair) = pair() else { return };
    let (before, old) = (pair.incarnation(), pair.fabric.transfer(pair.peer, pair.node, 1, 0, 100));
    let down = pair.interface.down();
    assert!(pair.ended().contains("is down; bring its link up"));
    // Whoever connects meanwhile is told at once.
    let (now, to) = (pair.fabric.now(), pair.fabric.address(pair.peer));
    let early = pair.fabric.nodes[pair.node].endpoint.connect(now, to, Vec::new());
    let reason = pair.fabric.disconnected(pair.node, early);
    assert!(reason.contains("is down"), "{reason}");
    drop(down);
    pair.fabric.until("the port to be up", |_| pair.interface.is_active().then_some(()));
    pair.lives_again(before, old);
}

#[test]
fn an_address_that_went_away_comes_back_as_another_incarnation() {
    let Some(mut pair) = pair() else { return };
    let (before, old) = (pair.incarnation(), pair.fabric.transfer(pair.peer, pair.node, 1, 0, 100));
    let without = pair.interface.without_address();
    assert!(pair.ended().contains("no RoCEv2 GID for address"));
    drop(without);
    pair.fabric.until("the GID", |_| pair.interface.has_gid().then_some(()));
    pair.lives_again(before, old);
}

#[test]
fn a_device_that_was_removed_comes_back_as_another_incarnation() {
    const CONNECTIONS: usize = 8;
    let Some(mut pair) = pair() else { return };
    let (node, peer) = (pair.node, pair.peer);
    let (before, old) = (pair.incarnation(), pair.fabric.transfer(peer, node, 1, 0, 100));
    let mut ids = vec![pair.ids];
    ids.extend((1..CONNECTIONS).map(|_| pair.fabric.connect(0, 1)).map(|(ours, theirs)| [ours, theirs]));
    let mut removal = pair.interface.remove_device();
    // Each connection ends once on each side, and both know why.
    for side in [node, peer] {
        let mut expected: Vec<_> = ids.iter().map(|ids| ids[side]).collect();
        for _ in 0..CONNECTIONS {
            let ended = pair.fabric.event(side);
            let Event::Disconnected { connection, reason } = ended else { panic!("{ended:?}") };
            assert!(reason.text.ends_with("was removed from this host"), "{reason}");
            expected.retain(|&id| id != connection);
        }
        assert_eq!(expected, []);
    }
    pair.fabric.until("the device to be let go", |_| removal.is_over().then_some(()));
    // Whoever connects meanwhile is told at once.
    let (now, to) = (pair.fabric.now(), pair.fabric.address(peer));
    let early = pair.fabric.nodes[node].endpoint.connect(now, to, Vec::new());
    let reason = pair.fabric.disconnected(node, early);
    assert!(reason.contains("no RDMA device") || reason.contains("was removed"), "{reason}");
    removal.undo();
    pair.lives_again(before, old);
    for at in 1..CONNECTIONS {
        let (ours, theirs) = pair.fabric.connect(0, 1);
        let (id, token) = ([ours, theirs][node], at as u64);
        let transfer = pair.fabric.transfer(node, peer, token, at * 10_000, 10_000);
        pair.fabric.nodes[node].endpoint.read(id, transfer).unwrap();
        assert_eq!(pair.fabric.event(node), Event::ReadDone { connection: id, token, result: Ok(()) });
    }
    pair.fabric.quiet(node);
    pair.fabric.quiet(peer);
}
