//! A few endpoints in one thread, on their real sockets or devices but on a clock that a test can push forward.
#![allow(clippy::disallowed_methods)] // A test that hangs is ended by the real clock.

#[path = "fabric/arm.rs"] // Another test program includes this file.
mod arm;

use std::{
    cell::Cell,
    collections::VecDeque,
    net::SocketAddr,
    time::{Duration, Instant},
};

use arm::Undo;
#[allow(unused_imports)] // Each of the programs that include this file has its own needs.
pub(crate) use arm::{Interface, config, is_soft};
use proto::{Span, Timestamp};
use transport::{Access, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, Region, RegionKey, Transfer};

pub(crate) const SECRET: &[u8] = b"the fabric's secret";
pub(crate) const REGION_BYTES: usize = 4 * 1024 * 1024;
/// No test takes so long unless it hangs.
const HANG: Duration = Duration::from_secs(300);
/// A busy machine may let this thread, and with it every node, stand still for longer: that is no node's stall.
const PAUSE_MAX: Span = Span::from_millis(100);

/// An endpoint and one region that peers may READ and WRITE.
pub(crate) struct Node {
    pub endpoint: Endpoint,
    pub region: Region,
    pub key: RegionKey,
    pub events: VecDeque<Event>,
}

impl Node {
    fn open(config: EndpointConfig) -> Self {
        let mut endpoint = Endpoint::open(config).unwrap();
        let region = Region::allocate(REGION_BYTES).unwrap();
        let key = endpoint.register(&region, Access { remote_read: true, remote_write: true }).unwrap();
        Self { endpoint, region, key, events: VecDeque::new() }
    }

    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.region.read(offset, &mut bytes);
        bytes
    }
}

pub(crate) struct Fabric {
    clock: Clock,
    /// What the clock showed when we last looked, and what we made of it.
    looked: Cell<(Timestamp, Timestamp)>,
    pub nodes: Vec<Node>,
    /// Nodes that stand still, as a stopped process does.
    pub stalled: Vec<usize>,
    /// Whether time passes only where a test pushes it forward.
    pub is_frozen: bool,
    /// Whether `step` takes events from the endpoints.
    pub collecting: bool,
    /// What spoils the links of verbs devices.
    spoilt: Vec<Undo>,
    not_ready_before: u64,
}

impl Fabric {
    pub(crate) fn new(nodes: usize) -> Self {
        Self::with((0..nodes).map(config))
    }

    pub(crate) fn with_faults(nodes: usize, faults: Faults) -> Self {
        let mut fabric = Self::with((0..nodes).map(|node| arm::config_with(node, faults)));
        let interfaces = (0..nodes).filter_map(Interface::of);
        fabric.spoilt = interfaces.map(|interface| interface.spoil(faults)).collect();
        fabric
    }

    pub(crate) fn with(configs: impl IntoIterator<Item = EndpointConfig>) -> Self {
        let clock = Clock::start();
        let started = clock.now();
        Self {
            clock,
            looked: Cell::new((started, started)),
            nodes: configs.into_iter().map(arm::patient).map(Node::open).collect(),
            stalled: Vec::new(),
            is_frozen: false,
            collecting: true,
            spoilt: Vec::new(),
            not_ready_before: arm::not_ready_of_devices(),
        }
    }

    /// How often a SEND or WRITE has met no receive.
    pub(crate) fn not_ready(&self) -> u64 {
        let soft: u64 = self.nodes.iter().filter_map(|node| Some(node.endpoint.counters()?.receiver_not_ready)).sum();
        soft + arm::not_ready_of_devices() - self.not_ready_before
    }

    pub(crate) fn now(&self) -> Timestamp {
        let (before, ours) = self.looked.get();
        let now = self.clock.now();
        let ours = if self.is_frozen { ours } else { ours + (now - before).min(PAUSE_MAX) };
        self.looked.set((now, ours));
        ours
    }

    /// Pushes every node's clock forward.
    pub(crate) fn skip(&mut self, span: Span) {
        let ours = self.now() + span;
        self.looked.set((self.looked.get().0, ours));
    }

    pub(crate) fn address(&self, node: usize) -> SocketAddr {
        self.nodes[node].endpoint.listen_address().unwrap()
    }

    /// Drives every node once and takes its events.
    pub(crate) fn step(&mut self) {
        let mut progressed = false;
        for at in 0..self.nodes.len() {
            if !self.stalled.contains(&at) {
                let now = self.now();
                let node = &mut self.nodes[at];
                progressed |= node.endpoint.drive(now);
                if self.collecting {
                    node.events.extend(std::iter::from_fn(|| node.endpoint.poll_event()));
                }
            }
        }
        if !progressed {
            std::thread::yield_now();
        }
    }

    /// Drives until `look` finds what it looks for.
    pub(crate) fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            assert!(started.elapsed() < HANG, "waiting for {what} in vain; {}", self.describe());
            self.step();
        }
    }

    /// What every node has counted, and what it has told that nobody has taken yet: an error, perhaps.
    pub(crate) fn describe(&self) -> String {
        let nodes = self.nodes.iter().map(|node| format!("{:?} of {:?}", node.events, node.endpoint.counters()));
        nodes.enumerate().map(|(at, node)| format!("\nnode {at}: {node}")).collect()
    }

    /// The next event of a node.
    pub(crate) fn event(&mut self, node: usize) -> Event {
        self.until("an event", |fabric| fabric.nodes[node].events.pop_front())
    }

    /// Connects two nodes; the connection's id on each.
    pub(crate) fn connect(&mut self, client: usize, server: usize) -> (ConnectionId, ConnectionId) {
        let now = self.now();
        let to = self.address(server);
        let ours = self.nodes[client].endpoint.connect(now, to, b"hello".to_vec());
        let Event::Incoming { connection: theirs, hello, .. } = self.event(server) else { panic!("not incoming") };
        assert_eq!(hello, b"hello");
        let now = self.now();
        self.nodes[server].endpoint.accept(now, theirs, b"welcome".to_vec());
        assert_eq!(self.event(client), Event::Connected { connection: ours, welcome: b"welcome".to_vec() });
        (ours, theirs)
    }

    /// A transfer between the same offset of the regions of two nodes.
    pub(crate) fn transfer(&self, local: usize, remote: usize, token: u64, offset: usize, bytes: usize) -> Transfer {
        let (local, remote) = (&self.nodes[local], &self.nodes[remote]);
        Transfer {
            token,
            lkey: local.key.lkey,
            local_offset: offset,
            remote_address: remote.key.address + offset as u64,
            rkey: remote.key.rkey,
            bytes,
        }
    }

    /// The reason of a node's next event, which must be the end of this connection.
    pub(crate) fn disconnected(&mut self, node: usize, connection: ConnectionId) -> String {
        match self.event(node) {
            Event::Disconnected { connection: ended, reason } if ended == connection => reason.text,
            other => panic!("{other:?}"),
        }
    }

    /// Steps a while and checks that a node has nothing to tell.
    pub(crate) fn quiet(&mut self, node: usize) {
        (0..200).for_each(|_| self.step());
        assert_eq!(self.nodes[node].events, []);
    }
}

/// Bytes that tell one place and one seed from another.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| ((at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
