//! The connections between schedulers in the simulated fabric, as `scheduler::process` has them: each dials each other
//! one, and READs the primary's heartbeat out of its memory.

use std::collections::BTreeMap;

use proto::{
    Span,
    frame::{FrameWriter, read_frame},
    hello::SchedulerHello,
    scheduler_to_scheduler::{PeerHello, PeerWelcome, SchedulerToScheduler},
};
use scheduler::control::{Control, PeerOutput};
use transport::{ConnectionId, Event, Transfer};

use super::{
    env::Env,
    network::{ARENA_ADDRESS, Network},
    scheduler::encode,
};
use crate::node::Node;

/// A heartbeat: one word.
const BEAT_BYTES: usize = 8;

/// One scheduler's connections to the others.
pub(super) struct Peers {
    all: Vec<Node>,
    rank: u16,
    beats: u64,
    rkey: u32,
    /// By connection: to whom, and the key of its memory once it is up.
    dialled: BTreeMap<ConnectionId, (u16, Option<u32>)>,
    dialers: BTreeMap<ConnectionId, u16>,
    /// What they are told in this turn.
    frames: BTreeMap<ConnectionId, FrameWriter>,
    /// Why the process is to end.
    pub(super) ended: Option<String>,
}

impl Peers {
    /// Of a process that starts. Memory: its heartbeat, then what it READs of each other one's.
    pub(super) fn new(env: &mut Env, node: Node, all: &[Node]) -> Self {
        let rank = all.iter().position(|other| *other == node).expect("it is one of them") as u16;
        env.scheduler_life += 1;
        let rkey = env.scheduler_life;
        env.network.register(node, BEAT_BYTES * (1 + all.len()), Some(rkey));
        env.begin_era(node, all.len() == 1);
        let (dialled, dialers, frames) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { all: all.to_vec(), rank, beats: 0, rkey, dialled, dialers, frames, ended: None }
    }

    /// A turn was taken; the next comes in time for those who look at the heartbeat.
    pub(super) fn beat(&mut self, env: &mut Env, node: Node, interval: Span) {
        self.beats += 1;
        env.network.write_arena(node, 0, &self.beats.to_le_bytes());
        if !self.dialers.is_empty() {
            let at = env.local(node) + interval;
            env.wake_at_local(node, at);
        }
    }

    pub(super) fn welcome(
        &mut self,
        env: &mut Env,
        node: Node,
        control: &mut Control,
        (connection, hello): (ConnectionId, PeerHello),
    ) {
        match control.handle_dialer(env.era(node), &hello) {
            Ok(claim) => {
                self.dialers.insert(connection, hello.rank);
                let (heartbeat_address, heartbeat_rkey) = (ARENA_ADDRESS, self.rkey);
                env.accept(connection, encode(&PeerWelcome { claim, heartbeat_address, heartbeat_rkey }));
            }
            Err(reason) => env.refuse(connection, &reason),
        }
    }

    /// False if the event concerns no other scheduler.
    pub(super) fn handle_event(&mut self, env: &mut Env, node: Node, control: &mut Control, event: &Event) -> bool {
        let now = env.era(node);
        match event {
            Event::Connected { connection, welcome } => {
                let Some((rank, rkey)) = self.dialled.get_mut(connection) else { return false };
                let welcome: PeerWelcome = wincode::deserialize(welcome).expect("it is ours");
                *rkey = Some(welcome.heartbeat_rkey);
                control.handle_peer_connected(now, *rank, welcome.claim);
            }
            Event::Message { connection, frame } => {
                let (dialled, dialer) = (self.dialled.get(connection), self.dialers.get(connection));
                if dialled.is_none() && dialer.is_none() {
                    return false;
                }
                for message in read_frame::<SchedulerToScheduler>(frame).map(|message| message.expect("it is ours")) {
                    env.trace(node, || format!("hears of another scheduler: {message:?}"));
                    match (dialled, dialer) {
                        (Some((rank, _)), _) => control.handle_peer_message(now, *rank, message),
                        (_, Some(rank)) => control.handle_dialer_message(now, *rank, &message),
                        _ => {}
                    }
                }
            }
            Event::ReadDone { connection, token, result } => {
                let Some((rank, _)) = self.dialled.get(connection) else { return false };
                let at = BEAT_BYTES * (1 + *token as usize);
                let word = env.network.arena(node)[at..][..BEAT_BYTES].try_into().expect("a word");
                control.handle_heartbeat(now, *rank, result.is_ok().then(|| u64::from_le_bytes(word)));
            }
            Event::Disconnected { connection, .. } => {
                self.frames.remove(connection);
                if let Some(rank) = self.dialers.remove(connection) {
                    control.handle_dialer_lost(rank);
                } else if let Some((rank, _)) = self.dialled.remove(connection) {
                    control.handle_peer_lost(now, rank);
                } else {
                    return false;
                }
            }
            _ => return false,
        }
        true
    }

    pub(super) fn perform(&mut self, env: &mut Env, node: Node, control: &mut Control, output: PeerOutput) {
        match output {
            PeerOutput::Dial(rank) => {
                let hello = PeerHello {
                    rank: self.rank,
                    name: format!("scheduler-{}", self.rank),
                    schedulers: Vec::new(),
                    claim: control.claim(),
                };
                let address = Network::address(self.all[usize::from(rank)]);
                let connection = env.connect(node, address, encode(&SchedulerHello::Peer(hello)));
                self.dialled.insert(connection, (rank, None));
            }
            PeerOutput::Tell(rank, message) => {
                let its = self.dialled.iter().find(|(_, dialled)| dialled.0 == rank && dialled.1.is_some());
                if let Some((&connection, _)) = its {
                    self.post(env, connection, &message);
                }
            }
            PeerOutput::Answer(rank, message) => {
                if let Some((&connection, _)) = self.dialers.iter().find(|(_, dialer)| **dialer == rank) {
                    self.post(env, connection, &message);
                }
            }
            PeerOutput::ReadHeartbeat(rank) => {
                let its = self.dialled.iter().find(|(_, dialled)| dialled.0 == rank);
                let posted = its.and_then(|(&connection, &(_, rkey))| {
                    let local_offset = BEAT_BYTES * (1 + usize::from(rank));
                    let (token, lkey, bytes) = (u64::from(rank), self.rkey, BEAT_BYTES);
                    let (remote_address, rkey) = (ARENA_ADDRESS, rkey?);
                    let transfer = Transfer { token, lkey, local_offset, remote_address, rkey, bytes };
                    env.read(connection, None, transfer).ok()
                });
                if posted.is_none() {
                    control.handle_heartbeat(env.era(node), rank, None);
                }
            }
            PeerOutput::ShiftClock(by) => {
                env.trace(node, || format!("sets its clock by {by}"));
                env.shift_era(node, by);
            }
            PeerOutput::HandedOver(done) => env.trace(node, || format!("is the primary, as was wanted: {done:?}")),
            PeerOutput::End(reason) => self.ended = Some(reason),
        }
    }

    fn post(&mut self, env: &mut Env, connection: ConnectionId, message: &SchedulerToScheduler) {
        let full = self.frames.entry(connection).or_default().push(message).expect("it fits");
        full.into_iter().for_each(|frame| send(env, connection, &frame));
    }

    /// Sends what they are told in this turn.
    pub(super) fn flush(&mut self, env: &mut Env) {
        for (connection, mut writer) in std::mem::take(&mut self.frames) {
            writer.take().into_iter().for_each(|frame| send(env, connection, &frame));
        }
    }
}

fn send(env: &mut Env, connection: ConnectionId, frame: &[u8]) {
    if env.send(connection, frame).is_err() {
        env.disconnect(connection);
    }
}
