//! Two queue pairs of `bench verbs` as the transport has them, each opened on its own: on one RDMA device of this host,
//! or soft-RoCE's with rings between them.
#![allow(clippy::disallowed_methods)] // A driver: it reads the clock.

use soft_roce::{CompletionOpcode, Operation, RecvRequest, Remote, Segment, SendRequest, Status};
use transport::{Access, Arm, ArmName, Clock, Faults, RawQueuePair, Region, RegionKey, VerbsSettings};

use super::{
    measure::{Contestant, Initiator, Target},
    soft::{operation, receives},
};
use crate::verbs::measure::Op;

/// Two connected ends.
pub(super) fn open(arm: &ArmName, op: Op, bytes: u32, window: usize, faults: Faults) -> Result<Contestant, String> {
    // Each of the soft arm has an address of its own.
    let node = || {
        let arm = Arm::choose(arm, None, false, faults, VerbsSettings::default()).map_err(|error| error.to_string())?;
        Node::open(arm, op, bytes, window)
    };
    let [mut near, mut far] = [node()?, node()?];
    let connect = |one: &mut Node, other: &mut Node| one.pair.connect(&other.pair.address()?);
    connect(&mut near, &mut far).and_then(|()| connect(&mut far, &mut near)).map_err(|error| error.to_string())?;
    let source = if op == Op::Read { &far } else { &near };
    let pattern: Vec<u8> = (0..source.memory.len()).map(|at| (at * 7 + at / 251 + 1) as u8).collect();
    source.memory.write(0, &pattern);
    let [ours, theirs] = receives(op, window);
    (0..ours).try_for_each(|_| near.post_recv())?;
    (0..theirs).try_for_each(|_| far.post_recv())?;
    // So that the receives stand.
    near.poll()?;
    far.poll()?;
    let remote = Remote { address: far.key.address, rkey: far.key.rkey };
    Ok(Contestant {
        name: if *arm == ArmName::Soft { "--arm soft, by rings" } else { "--arm verbs" },
        initiator: Box::new(DeviceInitiator { node: near, op, remote }),
        target: Box::new(DeviceTarget { node: far, op, is_verbs: *arm != ArmName::Soft }),
    })
}

/// A queue pair and memory for `window` objects, which are used in turn.
struct Node {
    pair: RawQueuePair,
    clock: Clock,
    memory: Region,
    key: RegionKey,
    object_bytes: u32,
    /// Of a ping-pong's SENDs so many have one completion: the answer tells as much. All others have one each.
    signal_every: usize,
    sent: usize,
    /// Where in the memory the next object to send is,
    send_offset: usize,
    /// and where the next one to receive belongs.
    receive_offset: usize,
}

impl Node {
    fn open(arm: Arm, op: Op, bytes: u32, window: usize) -> Result<Self, String> {
        let failed = |error: transport::error::RawError| error.to_string();
        let depth = u16::try_from(2 * window).map_err(|_| format!("--bytes {bytes}: too many objects under way"))?;
        let mut pair = RawQueuePair::open(arm, depth).map_err(failed)?;
        let memory = Region::allocate(window * bytes as usize).map_err(|error| format!("--bytes {bytes}: {error}"))?;
        let access = Access { remote_read: true, remote_write: true };
        let key = pair.register(&memory, access).map_err(failed)?;
        Ok(Self {
            pair,
            clock: Clock::start(),
            memory,
            key,
            object_bytes: bytes,
            signal_every: if op == Op::Pingpong { (window / 2).max(1) } else { 1 },
            sent: 0,
            send_offset: 0,
            receive_offset: 0,
        })
    }

    fn segment(&self, offset: usize) -> Segment {
        Segment { lkey: self.key.lkey, offset, bytes: self.object_bytes }
    }

    fn post_recv(&mut self) -> Result<(), String> {
        let segment = self.segment(self.receive_offset);
        self.receive_offset = (self.receive_offset + self.object_bytes as usize) % self.memory.len();
        self.pair.post_recv(RecvRequest { id: 0, segment }).map_err(|error| error.to_string())
    }

    fn post_send(&mut self, operation: impl FnOnce(Segment) -> Operation) -> Result<(), String> {
        self.sent += 1;
        let signalled = self.sent.is_multiple_of(self.signal_every);
        let request = SendRequest { signalled, ..SendRequest::new(0, operation(self.segment(self.send_offset))) };
        self.send_offset = (self.send_offset + self.object_bytes as usize) % self.memory.len();
        self.pair.post_send(request).map_err(|error| error.to_string())
    }

    /// What has completed, if anything has.
    fn poll(&mut self) -> Result<Option<CompletionOpcode>, String> {
        let Some(completion) = self.pair.poll(|| self.clock.now()) else { return Ok(None) };
        if completion.status != Status::Success {
            return Err(format!("an operation ended with status {:?}", completion.status));
        }
        Ok(Some(completion.opcode))
    }

    fn objects(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.read(0, &mut bytes);
        bytes
    }
}

struct DeviceInitiator {
    node: Node,
    op: Op,
    /// The peer's first object.
    remote: Remote,
}

impl Initiator for DeviceInitiator {
    fn post(&mut self) -> Result<(), String> {
        let (op, remote) = (self.op, self.remote);
        self.node.post_send(|local| operation(op, local, remote))
    }

    fn poll(&mut self) -> Result<u64, String> {
        match self.node.poll()? {
            None => Ok(0),
            Some(CompletionOpcode::Recv) => self.node.post_recv().map(|()| 1),
            Some(_) => Ok(u64::from(self.op != Op::Pingpong)),
        }
    }

    fn objects(&self) -> Option<Vec<u8>> {
        Some(self.node.objects())
    }
}

struct DeviceTarget {
    node: Node,
    op: Op,
    is_verbs: bool,
}

impl Target for DeviceTarget {
    fn serve(&mut self) -> Result<(), String> {
        if self.node.poll()? != Some(CompletionOpcode::Recv) {
            return Ok(());
        }
        self.node.post_recv()?;
        if self.op == Op::Pingpong { self.node.post_send(|local| Operation::Send { local }) } else { Ok(()) }
    }

    /// A verbs device answers one-sided operations by itself.
    fn is_idle(&self) -> bool {
        self.is_verbs && matches!(self.op, Op::Read | Op::Write)
    }

    fn objects(&self) -> Option<Vec<u8>> {
        Some(self.node.objects())
    }
}
