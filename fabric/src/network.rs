//! The simulated transport, with the semantics of `transport::Endpoint`: connections whose packets keep their order,
//! frames, READs, WRITEs with an immediate, and ends that fence. Bytes are read and written at instants of their own,
//! by the network and not by the process whose memory it is, as an RDMA device does.
//!
//! Each connection has two sides. A side that is down takes in nothing: from that instant nothing lands in its memory.
//! What was outstanding there has been reported, as flushed, before its `Disconnected`. The other side learns of it by
//! a packet, or by silence.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Range,
};

use proto::{Span, TaskId, Timestamp};
use rand::RngExt;
use transport::{
    ConnectionId, DisconnectReason, Event, HANDSHAKE_MAX, PostError, SILENCE_MAX, Transfer, TransferError, WORK_MAX,
};

use super::env::{Env, Happening};
use crate::{node::Node, oracle::Violation};

/// One side of a connection; also its [`ConnectionId`] there.
pub(super) type SideId = u64;

/// Where members listen; the scheduler's ModelThreads listen on the next ones.
pub(super) const PORT: u16 = 7000;
/// Members' addresses follow from it.
const NETWORK: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 0);

/// All connections, and what connects members.
#[derive(Debug, Default)]
pub(super) struct Network {
    sides: BTreeMap<SideId, Side>,
    next_side: SideId,
    pairs: BTreeMap<(Node, Node), Pair>,
    /// By direction: since when nothing gets through.
    blocked: BTreeMap<(Node, Node), Timestamp>,
    /// Who listens.
    listening: BTreeSet<Node>,
    /// Each member's registered memory.
    arenas: BTreeMap<Node, Arena>,
    /// Keys that were given to parts of them.
    keys: u32,
    events: BTreeMap<Node, VecDeque<Event>>,
}

/// What a packet between two members costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    pub(super) latency: Span,
    /// That much more at most.
    pub(super) jitter: Span,
    pub(super) ns_per_kilobyte: i64,
}

#[derive(Debug)]
struct Arena {
    bytes: Vec<u8>,
    /// What all of it is reached by, if it is not by its parts' keys only.
    rkey: Option<u32>,
    /// What is open to READs, and to WRITEs, by its key.
    windows: BTreeMap<u32, [Range<usize>; 2]>,
}

/// What a peer does with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Write,
}

#[derive(Debug)]
struct Side {
    node: Node,
    other: SideId,
    other_node: Node,
    /// The port that was dialled.
    port: u16,
    state: State,
    /// Packets on their way here, oldest first.
    incoming: VecDeque<Packet>,
    /// When the last of them arrives.
    arrives_at: Timestamp,
    /// Of them, those that came while the direction was blocked.
    held: usize,
    /// Posted here and not acknowledged, oldest first.
    outstanding: VecDeque<Posted>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Ours, until the other side answers.
    Calling,
    /// The other side's, until our owner decides.
    Deciding,
    Up,
    Down,
}

#[derive(Debug, Clone, Copy)]
struct Posted {
    token: u64,
    is_read: bool,
    local_offset: usize,
}

#[derive(Debug)]
enum Packet {
    Hello(Vec<u8>),
    Welcome(Vec<u8>),
    Close(String),
    Frame(Vec<u8>),
    /// Of inputs from this task's on, or of guards.
    ReadRequest {
        task: Option<TaskId>,
        transfer: Transfer,
    },
    ReadReply {
        token: u64,
        bytes: Option<Vec<u8>>,
    },
    Write(Write),
    Acknowledge {
        token: u64,
        landed: bool,
    },
}

/// Part of a WRITE.
#[derive(Debug)]
struct Write {
    /// The first that is answered, and how many are.
    tasks: (TaskId, u16),
    remote_address: u64,
    rkey: u32,
    bytes: Vec<u8>,
    /// With the last part: the token, the immediate, and how many bytes it was in all.
    last: Option<(u64, u32, usize)>,
}

impl Network {
    /// What packets between two members cost, both ways.
    pub(super) fn set_pair(&mut self, (a, b): (Node, Node), pair: Pair) {
        self.pairs.insert((a, b), pair);
        self.pairs.insert((b, a), pair);
    }

    /// Registers a member's memory, instead of what was registered before. Peers reach it by this key, or by those of
    /// windows only.
    pub(super) fn register(&mut self, node: Node, bytes: usize, rkey: Option<u32>) {
        self.arenas.insert(node, Arena { bytes: vec![0; bytes], rkey, windows: BTreeMap::new() });
    }

    /// Opens parts of a member's memory to READs and to WRITEs. Yields the key.
    pub(super) fn open_window(&mut self, node: Node, window: [Range<usize>; 2]) -> u32 {
        self.keys += 1;
        let arena = self.arenas.get_mut(&node).expect("a frontend registers its memory first");
        arena.windows.insert(self.keys, window);
        self.keys
    }

    /// Closes what was opened.
    pub(super) fn close_window(&mut self, node: Node, key: u32) {
        let arena = self.arenas.get_mut(&node).expect("a frontend registers its memory first");
        assert!(arena.windows.remove(&key).is_some(), "key {key} opens nothing");
    }

    /// A member's registered memory.
    pub(super) fn arena(&self, node: Node) -> &[u8] {
        &self.arenas[&node].bytes
    }

    /// Copies bytes into a member's registered memory.
    pub(super) fn write_arena(&mut self, node: Node, offset: usize, bytes: &[u8]) {
        let arena = self.arenas.get_mut(&node).expect("a frontend registers its memory first");
        arena.bytes[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Peers can connect to this member.
    pub(super) fn listen(&mut self, node: Node) {
        self.listening.insert(node);
    }

    /// What has happened next on a member's endpoint.
    pub(super) fn poll_event(&mut self, node: Node) -> Option<Event> {
        self.events.get_mut(&node)?.pop_front()
    }

    /// A member's bootstrap listener.
    pub(super) fn address(node: Node) -> SocketAddr {
        let host = u32::try_from(node.0).expect("a run has few members");
        SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(NETWORK.to_bits() + host)), PORT)
    }

    /// Whose address that is.
    fn node(at: SocketAddr) -> Node {
        let IpAddr::V4(ip) = at.ip() else { unreachable!("all members have addresses of version 4") };
        Node((ip.to_bits() - NETWORK.to_bits()) as usize)
    }

    /// The port that a connection was made to.
    pub(super) fn port(&self, connection: ConnectionId) -> u16 {
        self.sides.get(&connection.0).map_or(PORT, |side| side.port)
    }

    fn is_up(&self, side: SideId) -> bool {
        self.sides.get(&side).is_some_and(|side| side.state == State::Up)
    }

    fn is_blocked(&self, from: Node, to: Node) -> bool {
        self.blocked.contains_key(&(from, to))
    }
}

/// What members do, as with `transport::Endpoint`.
impl Env {
    pub(super) fn connect(&mut self, node: Node, to: SocketAddr, hello: Vec<u8>) -> ConnectionId {
        let other_node = Network::node(to);
        let (ours, theirs) = (self.network.next_side, self.network.next_side + 1);
        self.network.next_side += 2;
        for (id, other, node, other_node, state) in
            [(ours, theirs, node, other_node, State::Calling), (theirs, ours, other_node, node, State::Down)]
        {
            let side = Side {
                node,
                other,
                other_node,
                port: to.port(),
                state,
                incoming: VecDeque::new(),
                arrives_at: Timestamp::PAST,
                held: 0,
                outstanding: VecDeque::new(),
            };
            self.network.sides.insert(id, side);
        }
        self.transmit(ours, Packet::Hello(hello), Span::ZERO);
        self.after(HANDSHAKE_MAX, Happening::Handshake(ours));
        ConnectionId(ours)
    }

    pub(super) fn accept(&mut self, connection: ConnectionId, welcome: Vec<u8>) {
        let Some(side) = self.network.sides.get_mut(&connection.0) else { return };
        if side.state == State::Deciding {
            side.state = State::Up;
            self.transmit(connection.0, Packet::Welcome(welcome), Span::ZERO);
        }
    }

    pub(super) fn refuse(&mut self, connection: ConnectionId, reason: &str) {
        let Some(side) = self.network.sides.get_mut(&connection.0) else { return };
        if side.state == State::Deciding {
            side.state = State::Down;
            self.transmit(connection.0, Packet::Close(reason.to_owned()), Span::ZERO);
        }
    }

    /// Moves the queue pair to ERROR at once, and tells the other side.
    pub(super) fn disconnect(&mut self, connection: ConnectionId) {
        if self.network.is_alive(connection.0) {
            self.take_down(connection.0, "we disconnected");
            self.transmit(connection.0, Packet::Close("it disconnected".to_owned()), Span::ZERO);
        }
    }

    pub(super) fn send(&mut self, connection: ConnectionId, frame: &[u8]) -> Result<(), PostError> {
        let side = self.up(connection)?;
        let (node, other) = (side.node, side.other);
        if self.network.sides[&other].incoming.len() >= WORK_MAX {
            return Err(PostError::QueueFull);
        }
        self.trace(node, || format!("sends a frame of {} bytes on {}", frame.len(), connection.0));
        self.transmit(connection.0, Packet::Frame(frame.to_owned()), Span::ZERO);
        Ok(())
    }

    /// READs inputs from this task's on, or, without one, guards.
    pub(super) fn read(
        &mut self,
        connection: ConnectionId,
        task: Option<TaskId>,
        transfer: Transfer,
    ) -> Result<(), PostError> {
        self.post(connection, &transfer, true)?;
        self.transmit(connection.0, Packet::ReadRequest { task, transfer }, Span::ZERO);
        Ok(())
    }

    /// A WRITE lands in one piece or several, each at an instant of its own; the immediate comes with the last.
    pub(super) fn write_with_immediate(
        &mut self,
        connection: ConnectionId,
        (tasks, transfer, immediate): ((TaskId, u16), Transfer, u32),
        bytes: &[u8],
    ) -> Result<(), PostError> {
        self.post(connection, &transfer, false)?;
        let piece = if self.chance(30) { bytes.len() / 2 + 1 } else { bytes.len() };
        let mut offset = 0;
        for part in bytes.chunks(piece) {
            let is_last = offset + part.len() == bytes.len();
            let write = Write {
                tasks,
                remote_address: transfer.remote_address + offset as u64,
                rkey: transfer.rkey,
                bytes: part.to_owned(),
                last: is_last.then_some((transfer.token, immediate, bytes.len())),
            };
            offset += part.len();
            let apart = if is_last { Span::ZERO } else { self.micros(100) };
            self.transmit(connection.0, Packet::Write(write), apart);
        }
        Ok(())
    }

    fn post(&mut self, connection: ConnectionId, transfer: &Transfer, is_read: bool) -> Result<(), PostError> {
        let side = self.up(connection)?;
        if side.outstanding.len() >= WORK_MAX {
            return Err(PostError::QueueFull);
        }
        let (token, local_offset) = (transfer.token, transfer.local_offset);
        side.outstanding.push_back(Posted { token, is_read, local_offset });
        let (node, other, other_node) = (side.node, side.other, side.other_node);
        let network = &self.network;
        if network.is_blocked(node, other_node) || network.is_blocked(other_node, node) || !network.is_up(other) {
            self.await_retries(connection.0, token);
        }
        Ok(())
    }

    fn up(&mut self, connection: ConnectionId) -> Result<&mut Side, PostError> {
        self.network.sides.get_mut(&connection.0).filter(|side| side.state == State::Up).ok_or(PostError::NotConnected)
    }

    /// A member's endpoint is closed: its process ended, or opened another. If it `tells`, the other sides learn of it
    /// as soon as a packet arrives, otherwise by silence.
    pub(super) fn close_endpoint(&mut self, node: Node, tells: bool) {
        let own: Vec<SideId> = self.network.sides.iter().filter(|(_, s)| s.node == node).map(|(id, _)| *id).collect();
        for id in own {
            let side = self.network.sides.get_mut(&id).expect("listed above");
            if side.state == State::Down {
                continue;
            }
            side.state = State::Down;
            side.outstanding.clear();
            let other = side.other;
            if tells {
                self.transmit(id, Packet::Close("its process ended".to_owned()), Span::ZERO);
            }
            self.await_silence(other);
        }
        self.network.events.remove(&node);
    }

    /// The process ended: nobody listens any more.
    pub(super) fn close_listener(&mut self, node: Node) {
        self.network.listening.remove(&node);
    }
}

/// What the network does.
impl Env {
    /// Sends a packet to the other side: it arrives after those before it, and `apart` later.
    fn transmit(&mut self, from: SideId, packet: Packet, apart: Span) {
        let Side { node, other, other_node, .. } = self.network.sides[&from];
        let Pair { latency, jitter, ns_per_kilobyte } = self.network.pairs[&(node, other_node)];
        let bytes = 64
            + match &packet {
                Packet::Frame(bytes) | Packet::Hello(bytes) | Packet::Welcome(bytes) => bytes.len(),
                Packet::Write(write) => write.bytes.len(),
                Packet::ReadReply { bytes, .. } => bytes.as_ref().map_or(0, Vec::len),
                Packet::Close(_) | Packet::ReadRequest { .. } | Packet::Acknowledge { .. } => 0,
            };
        let late = Span(self.rng.random_range(0..=jitter.0));
        let takes = Span(ns_per_kilobyte * bytes as i64 / 1000) + apart;
        let now = self.now;
        let side = self.network.sides.get_mut(&other).expect("sides are removed together");
        side.arrives_at = (now + latency + late).max(side.arrives_at) + takes;
        side.incoming.push_back(packet);
        let at = side.arrives_at;
        self.schedule(at, Happening::Deliver(other));
    }

    /// The next packet to this side arrives.
    pub(super) fn deliver(&mut self, id: SideId) {
        let Some(side) = self.network.sides.get_mut(&id) else { return };
        let (node, other_node) = (side.node, side.other_node);
        if self.network.blocked.contains_key(&(other_node, node)) {
            side.held += 1;
            return;
        }
        let Some(packet) = side.incoming.pop_front() else { return };
        match (side.state, packet) {
            (State::Down, Packet::Hello(hello)) => self.on_hello(id, hello),
            (State::Calling, Packet::Welcome(welcome)) => {
                side.state = State::Up;
                self.push(id, Event::Connected { connection: ConnectionId(id), welcome });
            }
            (State::Calling | State::Deciding | State::Up, Packet::Close(reason)) => self.take_down(id, &reason),
            (State::Up, Packet::Frame(frame)) => self.push(id, Event::Message { connection: ConnectionId(id), frame }),
            (State::Up, Packet::ReadRequest { task, transfer }) => self.on_read(id, task, &transfer),
            (State::Up, Packet::ReadReply { token, bytes }) => self.on_read_done(id, token, bytes),
            (State::Up, Packet::Write(write)) => self.on_write(id, write),
            (State::Up, Packet::Acknowledge { token, landed }) => self.on_acknowledged(id, token, landed),
            // What a side that is down is sent is lost.
            _ => {}
        }
        self.forget(id);
    }

    fn on_hello(&mut self, id: SideId, hello: Vec<u8>) {
        let side = self.network.sides.get_mut(&id).expect("the caller looked it up");
        let (node, peer) = (side.node, Network::address(side.other_node));
        if self.network.listening.contains(&node) {
            side.state = State::Deciding;
            self.push(id, Event::Incoming { connection: ConnectionId(id), peer, hello });
        } else {
            self.transmit(id, Packet::Close("nobody listens there".to_owned()), Span::ZERO);
        }
    }

    fn on_read(&mut self, id: SideId, task: Option<TaskId>, transfer: &Transfer) {
        let node = self.network.sides[&id].node;
        let found = self.range(node, (transfer.remote_address, transfer.bytes), transfer.rkey, Way::Read);
        let bytes = found.map(|range| self.network.arenas[&node].bytes[range].to_owned());
        match &bytes {
            Some(bytes) => {
                if let Some(task) = task {
                    self.oracle.handle_read(node, task, bytes);
                }
                self.trace(node, || format!("is read for {task:?} on {id}"));
            }
            None => self.on_void(node, &format!("a READ for {task:?}")),
        }
        self.transmit(id, Packet::ReadReply { token: transfer.token, bytes }, Span::ZERO);
    }

    fn on_read_done(&mut self, id: SideId, token: u64, bytes: Option<Vec<u8>>) {
        let side = self.network.sides.get_mut(&id).expect("the caller looked it up");
        let Some(index) = side.outstanding.iter().position(|posted| posted.token == token) else { return };
        let Some(bytes) = bytes else { return self.fail(id, token, TransferError::RemoteAccess) };
        let posted = side.outstanding.remove(index).expect("just found");
        let node = side.node;
        self.network.write_arena(node, posted.local_offset, &bytes);
        self.push(id, Event::ReadDone { connection: ConnectionId(id), token, result: Ok(()) });
    }

    fn on_write(&mut self, id: SideId, write: Write) {
        let node = self.network.sides[&id].node;
        let place = (write.remote_address, write.bytes.len());
        let Some(range) = self.range(node, place, write.rkey, Way::Write) else {
            self.on_void(node, &format!("a WRITE for {:?}", write.tasks.0));
            if let Some((token, ..)) = write.last {
                self.transmit(id, Packet::Acknowledge { token, landed: false }, Span::ZERO);
            }
            return;
        };
        self.oracle.handle_written(node, write.tasks, range.start as u64, write.bytes.len());
        self.network.write_arena(node, range.start, &write.bytes);
        if let Some((token, immediate, bytes)) = write.last {
            self.trace(node, || format!("holds the answer of {:?} from {id}", write.tasks.0));
            let bytes = bytes as u32;
            self.push(id, Event::Immediate { connection: ConnectionId(id), immediate, bytes });
            self.transmit(id, Packet::Acknowledge { token, landed: true }, Span::ZERO);
        }
    }

    fn on_acknowledged(&mut self, id: SideId, token: u64, landed: bool) {
        if !landed {
            return self.fail(id, token, TransferError::RemoteAccess);
        }
        let side = self.network.sides.get_mut(&id).expect("the caller looked it up");
        let Some(index) = side.outstanding.iter().position(|posted| posted.token == token) else { return };
        side.outstanding.remove(index);
        self.push(id, Event::WriteDone { connection: ConnectionId(id), token, result: Ok(()) });
    }

    /// Where in a member's memory a peer reaches, if it may.
    fn range(&self, node: Node, (address, bytes): (u64, usize), rkey: u32, way: Way) -> Option<Range<usize>> {
        let arena = self.network.arenas.get(&node)?;
        let open = match arena.windows.get(&rkey) {
            Some([readable, _]) if way == Way::Read => readable.clone(),
            Some([_, writable]) => writable.clone(),
            None => 0..arena.bytes.len(),
        };
        let is_open = arena.rkey == Some(rkey) || arena.windows.contains_key(&rkey);
        let start = address.checked_sub(ARENA_ADDRESS)? as usize;
        (is_open && open.start <= start && start.checked_add(bytes)? <= open.end).then(|| start..start + bytes)
    }

    /// No backend here reaches for what it was not given, so a slot's key has become void too early.
    fn on_void(&mut self, node: Node, what: &str) {
        self.trace(node, || format!("refuses {what}"));
        if self.network.arenas.get(&node).is_some_and(|arena| arena.rkey.is_none()) {
            self.oracle.report(Violation::Slot(format!("{what} meets a void key")));
        }
    }

    /// A side goes down at once: what is outstanding there is reported, then its end.
    fn take_down(&mut self, id: SideId, reason: &str) {
        let Some(side) = self.network.sides.get_mut(&id).filter(|side| side.state != State::Down) else { return };
        side.state = State::Down;
        let (node, other) = (side.node, side.other);
        let outstanding = std::mem::take(&mut side.outstanding);
        self.trace(node, || format!("is disconnected on {id}: {reason}"));
        for posted in outstanding {
            self.push(id, posted.ended(ConnectionId(id), TransferError::Flushed));
        }
        let reason = DisconnectReason::new(reason);
        self.push(id, Event::Disconnected { connection: ConnectionId(id), reason });
        self.await_silence(other);
    }

    /// A transfer failed, and its connection with it.
    fn fail(&mut self, id: SideId, token: u64, error: TransferError) {
        let Some(side) = self.network.sides.get_mut(&id).filter(|side| side.state == State::Up) else { return };
        let Some(index) = side.outstanding.iter().position(|posted| posted.token == token) else { return };
        let posted = side.outstanding.remove(index).expect("just found");
        self.push(id, posted.ended(ConnectionId(id), error));
        self.take_down(id, &error.to_string());
        self.transmit(id, Packet::Close(error.to_string()), Span::ZERO);
    }

    /// A side will hear nothing more: it notices at last.
    fn await_silence(&mut self, id: SideId) {
        let after = SILENCE_MAX + self.micros(500_000);
        self.after(after, Happening::Silence(id));
        let front = self.network.sides.get(&id).and_then(|side| side.outstanding.front());
        if let Some(token) = front.map(|posted| posted.token) {
            self.await_retries(id, token);
        }
    }

    fn await_retries(&mut self, id: SideId, token: u64) {
        let after = Span::from_millis(500) + self.micros(1_000_000);
        self.after(after, Happening::Retries(id, token));
    }

    /// A side may not have heard of the other for too long.
    pub(super) fn handle_silence(&mut self, id: SideId) {
        let Some(Side { node, other, other_node, .. }) = self.network.sides.get(&id) else { return };
        let blocked_since = self.network.blocked.get(&(*other_node, *node));
        let is_silent = !self.network.is_alive(*other) || self.is_stalled(*other_node);
        if is_silent || blocked_since.is_some_and(|since| self.now - *since >= SILENCE_MAX) {
            self.take_down(id, "it has said nothing for two seconds");
            self.transmit(id, Packet::Close("it was not heard".to_owned()), Span::ZERO);
            self.forget(id);
        }
    }

    /// A transfer may not have been acknowledged for too long.
    pub(super) fn handle_retries(&mut self, id: SideId, token: u64) {
        let Some(Side { node, other, other_node, outstanding, .. }) = self.network.sides.get(&id) else { return };
        let network = &self.network;
        let is_cut = network.is_blocked(*node, *other_node) || network.is_blocked(*other_node, *node);
        if outstanding.iter().any(|posted| posted.token == token) && (is_cut || !network.is_up(*other)) {
            self.fail(id, token, TransferError::RetriesExceeded);
        }
    }

    /// A connection may not have come up in time.
    pub(super) fn handle_handshake(&mut self, id: SideId) {
        if self.network.sides.get(&id).is_some_and(|side| side.state == State::Calling) {
            self.take_down(id, "it did not answer in time");
            self.transmit(id, Packet::Close("it took too long".to_owned()), Span::ZERO);
        }
    }

    /// Nothing gets from one member to the other until [`Self::unblock`].
    pub(super) fn block(&mut self, from: Node, to: Node) {
        let now = self.now;
        self.network.blocked.entry((from, to)).or_insert(now);
        let hears =
            |side: &Side| (side.node, side.other_node) == (to, from) || (side.node, side.other_node) == (from, to);
        for id in self.live_sides(hears) {
            self.await_silence(id);
        }
    }

    /// What was held up arrives, all in order, and everything gets through again. What a side sent that has gone down
    /// since is not sent again, but for its end.
    pub(super) fn unblock(&mut self, from: Node, to: Node) {
        self.network.blocked.remove(&(from, to));
        let latency = self.network.pairs[&(from, to)].latency;
        let is_held = |side: &Side| (side.other_node, side.node) == (from, to) && side.held > 0;
        let sides = self.network.sides.iter().filter(|(_, side)| is_held(side));
        for id in sides.map(|(id, _)| *id).collect::<Vec<_>>() {
            let is_sent_again = self.network.is_alive(self.network.sides[&id].other);
            let side = self.network.sides.get_mut(&id).expect("listed above");
            let mut held: VecDeque<Packet> = side.incoming.drain(..std::mem::take(&mut side.held)).collect();
            held.retain(|packet| is_sent_again || matches!(packet, Packet::Close(_)));
            let count = held.len();
            held.append(&mut side.incoming);
            side.incoming = held;
            for _ in 0..count {
                let at = self.now + latency + self.micros(2_000);
                self.schedule(at, Happening::Deliver(id));
            }
        }
    }

    /// A member does nothing for a while, not even tell that it lives.
    pub(super) fn handle_stalled(&mut self, node: Node) {
        for id in self.live_sides(|side| side.other_node == node) {
            self.await_silence(id);
        }
    }

    /// One side of a connection to `node` ends, and the other does not hear of it.
    pub(super) fn cut(&mut self, node: Node) {
        let sides = self.live_sides(|side| side.node == node && side.state == State::Up);
        if sides.is_empty() {
            return;
        }
        let id = sides[self.rng.random_range(0..sides.len())];
        self.take_down(id, "the link went down");
    }

    fn live_sides(&self, wanted: impl Fn(&Side) -> bool) -> Vec<SideId> {
        let live = self.network.sides.iter().filter(|(_, side)| side.state != State::Down && wanted(side));
        live.map(|(id, _)| *id).collect()
    }

    fn is_stalled(&self, node: Node) -> bool {
        self.members[node.0].stalled_until > self.now
    }

    fn push(&mut self, id: SideId, event: Event) {
        let node = self.network.sides[&id].node;
        self.network.events.entry(node).or_default().push_back(event);
        self.wake(node);
    }

    /// A connection whose sides are both down, with nothing on its way, is over.
    fn forget(&mut self, id: SideId) {
        let is_over = |side: &Side| side.state == State::Down && side.incoming.is_empty();
        let sides = &mut self.network.sides;
        let Some(other) = sides.get(&id).filter(|side| is_over(side)).map(|side| side.other) else { return };
        if sides.get(&other).is_some_and(is_over) {
            sides.remove(&id);
            sides.remove(&other);
        }
    }
}

impl Network {
    fn is_alive(&self, side: SideId) -> bool {
        self.sides.get(&side).is_some_and(|side| side.state != State::Down)
    }
}

impl Posted {
    fn ended(self, connection: ConnectionId, error: TransferError) -> Event {
        let (token, result) = (self.token, Err(error));
        if self.is_read {
            Event::ReadDone { connection, token, result }
        } else {
            Event::WriteDone { connection, token, result }
        }
    }
}

/// Where every member's registered memory begins, for its peers.
pub(super) const ARENA_ADDRESS: u64 = 1 << 20;
