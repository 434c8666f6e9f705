//! The soft arm of `bench verbs`: two soft-RoCE endpoints, each on a loopback address of its own.
#![allow(clippy::disallowed_methods)] // A driver: it reads the clock.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use soft_roce::{
    Access, CompletionOpcode, Endpoint, EndpointConfig, Identification, Operation, PathMtu, Peer, Psn, QueuePairConfig,
    QueuePairNumber, RecvRequest, RegionHandle, Remote, Segment, SendRequest, Status, Timestamp,
    udp::{Driver, Faults},
};
use transport::{ROCE_PORT, Region, random_loopback};

use super::measure::{Contestant, Initiator, Target};
use crate::verbs::measure::Op;

/// Addresses that are tried before we believe that none is free.
const BINDS_MAX: u32 = 8;
/// The first retransmission timeout, as an exponent: 4.096 us * 2^11 = 8.4 ms, as the transport has it. Doubled seven
/// times, that outlasts a machine whose cores are taken; what is lost is found by probes long before.
const ACK_TIMEOUT: u8 = 11;
/// The loopback's links take packets of 64 KiB.
const LINK_MTU_BYTES: u32 = 65_536;

/// Two connected ends.
pub(super) fn open(op: Op, bytes: u32, window: usize, faults: Faults) -> Result<Contestant, String> {
    let [mut near, mut far] = [Node::bind(bytes, window, faults)?, Node::bind(bytes, window, faults)?];
    let [one, other] = [near.peer(), far.peer()];
    near.connect(other)?;
    far.connect(one)?;
    let source = if op == Op::Read { &far } else { &near };
    let pattern: Vec<u8> = (0..source.memory.len()).map(|at| (at * 7 + at / 251 + 1) as u8).collect();
    source.memory.write(0, &pattern);
    let [ours, theirs] = receives(op, window);
    (0..ours).try_for_each(|_| near.post_recv())?;
    (0..theirs).try_for_each(|_| far.post_recv())?;
    let remote = Remote { address: far.region.address, rkey: far.region.rkey };
    Ok(Contestant {
        name: "--arm soft",
        initiator: Box::new(SoftInitiator { node: near, op, remote }),
        target: Box::new(SoftTarget { node: far, answers: op == Op::Pingpong }),
    })
}

/// What each end keeps posted.
pub(super) fn receives(op: Op, window: usize) -> [usize; 2] {
    match op {
        Op::Send => [0, 2 * window],
        Op::Pingpong => [2 * window, 2 * window],
        Op::Write | Op::Read => [0, 0],
    }
}

/// As the transport has it between endpoints of one host.
fn path_mtu(capacity_bytes: usize, faults: Faults) -> PathMtu {
    let window_bytes = u32::try_from(capacity_bytes / 2).unwrap_or(u32::MAX);
    let large = (!faults.any()).then(|| PathMtu::within_a_host(LINK_MTU_BYTES, window_bytes)).flatten();
    large.unwrap_or(PathMtu::Mtu4096)
}

/// An endpoint on its socket, with one queue pair and memory for `window` objects, which are used in turn.
struct Node {
    core: Endpoint,
    driver: Driver,
    started: Instant,
    number: QueuePairNumber,
    first_psn: Psn,
    path_mtu: PathMtu,
    memory: Region,
    region: RegionHandle,
    object_bytes: u32,
    /// Where in the memory the next object to send is,
    send_offset: usize,
    /// and where the next one to receive belongs.
    receive_offset: usize,
    /// Work requests that the queue of sends holds at most,
    send_depth: usize,
    /// and those that it holds.
    sends: usize,
    /// What completed while a send waited for room.
    meanwhile: Completed,
}

/// Work requests that have completed.
#[derive(Debug, Default)]
struct Completed {
    sends: u64,
    receives: u64,
}

impl Node {
    fn bind(bytes: u32, window: usize, faults: Faults) -> Result<Self, String> {
        let driver = bind(faults)?;
        let mut core = Endpoint::new(EndpointConfig::new(driver.local(), rand::random()));
        let memory = Region::allocate(window * bytes as usize).map_err(|error| format!("--bytes {bytes}: {error}"))?;
        let region = core.register(Arc::new(memory.clone()), Access::ALL).map_err(|error| error.to_string())?;
        let capacity = driver.receive_capacity_bytes();
        let config = QueuePairConfig {
            send_depth: window,
            recv_depth: 2 * window,
            ack_timeout: ACK_TIMEOUT,
            ..QueuePairConfig::default()
        };
        // Both ends have the same system's buffers.
        let path_mtu = path_mtu(capacity, faults);
        let config = config.within(capacity, capacity, path_mtu);
        let number = core.create_queue_pair(config).map_err(|error| error.to_string())?;
        let first_psn = core.random_psn();
        let started = Instant::now();
        Ok(Self {
            core,
            driver,
            started,
            number,
            first_psn,
            path_mtu,
            memory,
            region,
            object_bytes: bytes,
            send_offset: 0,
            receive_offset: 0,
            send_depth: config.send_depth,
            sends: 0,
            meanwhile: Completed::default(),
        })
    }

    /// What the other end must know of this one.
    fn peer(&self) -> (SocketAddr, QueuePairNumber, Psn) {
        (self.driver.local(), self.number, self.first_psn)
    }

    fn connect(&mut self, (address, queue_pair, rq_psn): (SocketAddr, QueuePairNumber, Psn)) -> Result<(), String> {
        let peer = Peer {
            address,
            queue_pair,
            rq_psn,
            sq_psn: self.first_psn,
            path_mtu: self.path_mtu,
            identification: Identification::SegmentIndex,
            ack_delay: None,
        };
        self.core.connect_queue_pair(self.number, peer).map_err(|error| error.to_string())
    }

    fn segment(&self, offset: usize) -> Segment {
        Segment { lkey: self.region.lkey, offset, bytes: self.object_bytes }
    }

    fn post_recv(&mut self) -> Result<(), String> {
        let segment = self.segment(self.receive_offset);
        self.receive_offset = (self.receive_offset + self.object_bytes as usize) % self.memory.len();
        self.core.post_recv(self.number, RecvRequest { id: 0, segment }).map_err(|error| error.to_string())
    }

    /// Posts what `operation` makes of the next object's place. An answer overtakes the acknowledgement of what it
    /// answers if that is lost: then the queue may be full, and this waits for room. Acknowledgements that are lost
    /// are asked for again, and the other end gives them, as it waits for what is posted here.
    fn post_send(&mut self, operation: impl FnOnce(Segment) -> Operation) -> Result<(), String> {
        while self.sends == self.send_depth {
            let Completed { sends, receives } = self.progress()?;
            self.meanwhile.sends += sends;
            self.meanwhile.receives += receives;
        }
        let request = SendRequest::new(0, operation(self.segment(self.send_offset)));
        self.send_offset = (self.send_offset + self.object_bytes as usize) % self.memory.len();
        self.core.post_send(self.number, request).map_err(|error| error.to_string())?;
        self.sends += 1;
        self.transmit(self.now());
        Ok(())
    }

    fn transmit(&mut self, now: Timestamp) {
        self.driver.transmit(now, &mut self.core);
    }

    /// Receives, runs timers, answers; returns how many work requests have completed since the last turn.
    fn turn(&mut self) -> Result<Completed, String> {
        let now = self.progress()?;
        let before = std::mem::take(&mut self.meanwhile);
        Ok(Completed { sends: before.sends + now.sends, receives: before.receives + now.receives })
    }

    fn progress(&mut self) -> Result<Completed, String> {
        let now = self.now();
        if !self.driver.receive(now, &mut self.core) {
            self.core.handle_timeout(now);
        }
        self.transmit(now);
        let mut completed = Completed::default();
        while let Some(completion) = self.core.poll_completion() {
            if completion.status != Status::Success {
                return Err(format!("an operation ended with status {:?}", completion.status));
            }
            match completion.opcode {
                CompletionOpcode::Recv => completed.receives += 1,
                _ => completed.sends += 1,
            }
        }
        self.sends -= completed.sends as usize;
        Ok(completed)
    }

    fn now(&self) -> Timestamp {
        Timestamp::default() + self.started.elapsed()
    }
}

/// On a random address of the loopback network.
fn bind(faults: Faults) -> Result<Driver, String> {
    let mut tries = 1;
    loop {
        let address = SocketAddr::new(random_loopback().into(), ROCE_PORT);
        match Driver::bind(address, faults, rand::random()) {
            Ok(driver) => return Ok(driver),
            Err(error) if tries == BINDS_MAX => return Err(error.to_string()),
            Err(_) => tries += 1,
        }
    }
}

struct SoftInitiator {
    node: Node,
    op: Op,
    /// The peer's first object.
    remote: Remote,
}

impl Initiator for SoftInitiator {
    fn post(&mut self) -> Result<(), String> {
        let (op, remote) = (self.op, self.remote);
        self.node.post_send(|local| operation(op, local, remote))
    }

    fn poll(&mut self) -> Result<u64, String> {
        let Completed { sends, receives } = self.node.turn()?;
        (0..receives).try_for_each(|_| self.node.post_recv())?;
        Ok(if self.op == Op::Pingpong { receives } else { sends })
    }

    fn objects(&self) -> Option<Vec<u8>> {
        Some(objects(&self.node))
    }
}

/// The work request of one operation; `remote` is the peer's first object.
pub(super) fn operation(op: Op, local: Segment, remote: Remote) -> Operation {
    let remote = Remote { address: remote.address + local.offset as u64, ..remote };
    match op {
        Op::Send | Op::Pingpong => Operation::Send { local },
        Op::Write => Operation::Write { local, remote },
        Op::Read => Operation::Read { local, remote },
    }
}

struct SoftTarget {
    node: Node,
    /// Each object that arrives is sent back.
    answers: bool,
}

impl Target for SoftTarget {
    fn serve(&mut self) -> Result<(), String> {
        let received = self.node.turn()?.receives;
        (0..received).try_for_each(|_| {
            self.node.post_recv()?;
            if self.answers { self.node.post_send(|local| Operation::Send { local }) } else { Ok(()) }
        })
    }

    fn objects(&self) -> Option<Vec<u8>> {
        Some(objects(&self.node))
    }
}

fn objects(node: &Node) -> Vec<u8> {
    let mut bytes = vec![0; node.memory.len()];
    node.memory.read(0, &mut bytes);
    bytes
}
