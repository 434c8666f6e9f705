//! A region that is opened to single peers: the key that each is told opens nothing over another connection, and
//! nothing once its own has ended.

use transport::{Access, ConnectionId, Event, Faults, REGIONS_MAX, Region, RegionKey, Transfer, TransferError};

use crate::fabric::{Fabric, pattern};

const BYTES: usize = 1024 * 1024;

/// Nodes that connect to the last one, and the region that it opens to each of them.
struct Opened {
    fabric: Fabric,
    owner: usize,
    region: Region,
}

/// A node's connection, as it and as the owner knows it, and what the node was told.
#[derive(Clone, Copy)]
struct Linked {
    node: usize,
    ours: ConnectionId,
    theirs: ConnectionId,
    address: u64,
    rkey: u32,
}

impl Opened {
    fn new() -> Self {
        Self::over(Fabric::new(3))
    }

    fn over(fabric: Fabric) -> Self {
        let region = Region::allocate(BYTES).unwrap();
        region.write(0, &pattern(1, BYTES));
        let owner = fabric.nodes.len() - 1;
        Self { fabric, owner, region }
    }

    /// Connects a node, which is told the key in a welcome of this length at least. Yields its connection as both know
    /// it; what comes of that is for the caller to see.
    fn ask(&mut self, node: usize, welcome_bytes: usize) -> (ConnectionId, ConnectionId) {
        let (now, to) = (self.fabric.now(), self.fabric.address(self.owner));
        let ours = self.fabric.nodes[node].endpoint.connect(now, to, Vec::new());
        let Event::Incoming { connection: theirs, .. } = self.fabric.event(self.owner) else { panic!("not incoming") };
        let welcome = |RegionKey { address, rkey, .. }: RegionKey| {
            let told = [&address.to_le_bytes()[..], &rkey.to_le_bytes()[..]].concat();
            let rest = welcome_bytes.saturating_sub(told.len());
            [told, vec![0; rest]].concat()
        };
        let (now, access) = (self.fabric.now(), Access { remote_read: true, remote_write: true });
        let endpoint = &mut self.fabric.nodes[self.owner].endpoint;
        endpoint.accept_opening(now, theirs, (&self.region, access), welcome);
        (ours, theirs)
    }

    fn link(&mut self, node: usize) -> Linked {
        let (ours, theirs) = self.ask(node, 0);
        match self.fabric.event(node) {
            Event::Connected { connection, welcome } if connection == ours => {
                let (address, rkey) = welcome.split_at(8);
                let address = u64::from_le_bytes(address.try_into().unwrap());
                Linked { node, ours, theirs, address, rkey: u32::from_le_bytes(rkey.try_into().unwrap()) }
            }
            other => panic!("{other:?}"),
        }
    }

    fn transfer(&self, node: usize, told: Linked) -> Transfer {
        let Linked { address: remote_address, rkey, .. } = told;
        Transfer { rkey, remote_address, ..self.fabric.transfer(node, self.owner, 7, 0, BYTES) }
    }

    /// READs over a connection, by what another one was told, perhaps.
    fn read(&mut self, by: Linked, told: Linked) -> Result<(), TransferError> {
        let transfer = self.transfer(by.node, told);
        self.fabric.nodes[by.node].endpoint.read(by.ours, transfer).unwrap();
        match self.fabric.event(by.node) {
            Event::ReadDone { token: 7, result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    /// The same with a WRITE.
    fn write(&mut self, by: Linked, told: Linked) -> Result<(), TransferError> {
        let transfer = self.transfer(by.node, told);
        self.fabric.nodes[by.node].endpoint.write_with_immediate(by.ours, transfer, 1).unwrap();
        match self.fabric.event(by.node) {
            Event::WriteDone { token: 7, result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    fn works(&mut self, linked: Linked) {
        let node = linked.node;
        self.fabric.nodes[node].region.write(0, &vec![0; BYTES]);
        assert_eq!(self.read(linked, linked), Ok(()));
        assert!(self.fabric.nodes[node].bytes(0, BYTES) == self.bytes(), "read something else");
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        self.region.read(0, &mut bytes);
        bytes
    }

    /// A connection has ended on both sides.
    fn ended(&mut self, linked: Linked) {
        self.fabric.disconnected(linked.node, linked.ours);
        self.fabric.disconnected(self.owner, linked.theirs);
    }

    fn end(&mut self, linked: Linked) {
        self.fabric.nodes[self.owner].endpoint.disconnect(linked.theirs);
        self.ended(linked);
    }
}

#[test]
fn each_peer_reads_and_writes_by_the_key_that_it_was_told() {
    let mut opened = Opened::new();
    let links = [0, 1].map(|node| opened.link(node));
    assert_ne!(links[0].rkey, links[1].rkey);
    for (seed, linked) in links.into_iter().enumerate() {
        opened.works(linked);
        let answer = pattern(seed as u64 + 2, BYTES);
        opened.fabric.nodes[linked.node].region.write(0, &answer);
        assert_eq!(opened.write(linked, linked), Ok(()));
        assert!(opened.bytes() == answer);
        let told = opened.fabric.event(opened.owner);
        assert!(matches!(told, Event::Immediate { connection, .. } if connection == linked.theirs), "{told:?}");
    }
}

#[test]
fn a_key_opens_nothing_over_another_connection() {
    let refused = |ask: &dyn Fn(&mut Opened, Linked, Linked) -> Result<(), TransferError>| {
        let mut opened = Opened::new();
        let (honest, thief) = (opened.link(0), opened.link(1));
        assert_eq!(ask(&mut opened, thief, honest), Err(TransferError::RemoteAccess));
        assert!(opened.bytes() == pattern(1, BYTES), "it was written");
        assert!(opened.fabric.nodes[1].bytes(0, BYTES) == vec![0; BYTES], "it was read");
        opened.ended(thief);
        opened.works(honest);
    };
    refused(&|opened, thief, honest| opened.read(thief, honest));
    refused(&|opened, thief, honest| opened.write(thief, honest));
}

/// Not even over one to the same owner which opens nothing.
#[test]
fn a_key_opens_nothing_to_who_was_told_none() {
    let mut opened = Opened::new();
    let honest = opened.link(0);
    let (ours, theirs) = opened.fabric.connect(1, opened.owner);
    let thief = Linked { node: 1, ours, theirs, ..honest };
    assert_eq!(opened.read(thief, honest), Err(TransferError::RemoteAccess));
    opened.ended(thief);
    // What the owner opens to all is not opened over this one.
    let RegionKey { address: other, rkey: shared, .. } = opened.fabric.nodes[opened.owner].key;
    assert_eq!(
        opened.read(honest, Linked { address: other, rkey: shared, ..honest }),
        Err(TransferError::RemoteAccess)
    );
    opened.ended(honest);
}

#[test]
fn a_key_opens_nothing_once_its_connection_has_ended() {
    let mut opened = Opened::new();
    let (former, other) = (opened.link(0), opened.link(1));
    opened.works(former);
    opened.end(former);
    opened.works(other);
    let again = opened.link(0);
    assert_ne!(former.rkey, again.rkey);
    opened.works(again);
    assert_eq!(opened.write(again, former), Err(TransferError::RemoteAccess));
    opened.ended(again);
    assert!(opened.bytes() == pattern(1, BYTES), "it was written");
    opened.works(other);
}

#[test]
fn what_is_under_way_when_its_connection_ends_stays_out() {
    // Packets late and doubled, so that some are under way when the end comes.
    let faults = Faults { duplicate: 0.3, reorder: 0.3, ..Faults::default() };
    let mut opened = Opened::over(Fabric::with_faults(2, faults));
    let ending = opened.link(0);
    opened.region.write(0, &[0]);
    opened.fabric.nodes[0].region.write(0, &vec![0xff; BYTES]);
    let transfer = opened.transfer(0, ending);
    opened.fabric.nodes[0].endpoint.write_with_immediate(ending.ours, transfer, 1).unwrap();
    opened.fabric.until("some of the WRITE", |_| {
        let mut first = [0];
        opened.region.read(0, &mut first);
        (first == [0xff]).then_some(())
    });
    opened.fabric.nodes[opened.owner].endpoint.disconnect(ending.theirs);
    let at_end = opened.bytes();
    (0..500).for_each(|_| opened.fabric.step());
    assert!(opened.bytes() == at_end, "something came after the end");
    // A device may have taken in all of it since we looked.
    let is_over = at_end == vec![0xff; BYTES];
    if let Some(Event::Immediate { .. }) = opened.fabric.nodes[opened.owner].events.front() {
        assert!(is_over, "a part of a WRITE was told as all of it");
        opened.fabric.event(opened.owner);
    }
    opened.fabric.disconnected(opened.owner, ending.theirs);
    let event = opened.fabric.event(0);
    let Event::WriteDone { result, .. } = event else { panic!("{event:?}") };
    assert!(is_over || result == Err(TransferError::Flushed), "{result:?}");
    opened.fabric.disconnected(0, ending.ours);
}

/// Whoever finds no room is told so, and what is not accepted leaves nothing behind.
#[test]
fn who_finds_no_room_for_a_key_is_told_so_and_others_go_on() {
    let mut opened = Opened::new();
    let little = Region::allocate(8).unwrap();
    // The node has one region, one is left.
    for _ in 0..REGIONS_MAX - 2 {
        opened.fabric.nodes[opened.owner].endpoint.register(&little, Access::default()).unwrap();
    }
    let linked = opened.link(0);
    let (ours, theirs) = opened.ask(1, 0);
    for (node, connection) in [(1, ours), (opened.owner, theirs)] {
        let reason = opened.fabric.disconnected(node, connection);
        assert!(reason.contains("1024 regions are registered already, and one more peer needs one"), "{reason}");
    }
    opened.works(linked);
    opened.end(linked);
    let (ours, theirs) = opened.ask(1, 300_000);
    for (node, connection) in [(1, ours), (opened.owner, theirs)] {
        let reason = opened.fabric.disconnected(node, connection);
        assert!(reason.contains("a welcome of 300000 bytes"), "{reason}");
    }
    let linked = opened.link(1);
    opened.works(linked);
    let error = opened.fabric.nodes[opened.owner].endpoint.register(&little, Access::default()).unwrap_err();
    assert_eq!(error.to_string(), "cannot register one more region: 1024 are registered");
}
