//! The connections between this scheduler and the others: what [`Control`] wants of them, and what they say.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proto::{
    frame::{FrameWriter, read_frame},
    hello::SchedulerHello,
    member_name::is_member_name,
    scheduler_to_scheduler::{PeerHello, PeerWelcome, SchedulerToScheduler},
};
use transport::{Access, Address, Clock, ConnectionId, Endpoint, Event, Region, RegionKey, Transfer};

use super::{connections::encode, era_clock::EraClock};
use crate::{
    config::{Config, RunError},
    control::{Control, PeerOutput},
};

/// A heartbeat: one word.
const BEAT_BYTES: usize = 8;

/// Where a dialled scheduler's heartbeat is, once it has told.
#[derive(Debug, Clone, Copy)]
struct Dialled {
    rank: u16,
    beat: Option<(u64, u32)>,
}

/// All of them.
pub(super) struct Peers {
    schedulers: Vec<Address>,
    rank: u16,
    /// How operators call this one.
    name: String,
    clock: Clock,
    era: EraClock,
    /// Our heartbeat, then what was READ of each other one's, by rank. None if there are no others.
    memory: Option<(Region, RegionKey)>,
    beats: u64,
    beat_every: Duration,
    beat_at: Instant,
    dialled: BTreeMap<ConnectionId, Dialled>,
    dialers: BTreeMap<ConnectionId, u16>,
    /// Why those cannot be reached that cannot, as it was last told.
    unreachable: BTreeMap<u16, String>,
    /// What they are told in this turn, in as few frames as hold it.
    frames: BTreeMap<ConnectionId, FrameWriter>,
    /// Operators that wait for an answer.
    operators: Vec<ConnectionId>,
    /// Why the process is to end.
    ended: Option<String>,
}

impl Peers {
    /// Registers the heartbeat, if there are others to READ it.
    pub(super) fn open(
        (config, name): (&Config, &str),
        clock: Clock,
        era: EraClock,
        endpoint: &mut Endpoint,
    ) -> Result<Self, RunError> {
        let succession = config.succession()?;
        let memory = match succession.schedulers {
            0 | 1 => None,
            others => {
                let region = Region::allocate(BEAT_BYTES * (1 + usize::from(others))).map_err(RunError::Memory)?;
                let key = endpoint.register(&region, Access { remote_read: true, remote_write: false })?;
                Some((region, key))
            }
        };
        Ok(Self {
            schedulers: config.schedulers.clone(),
            rank: succession.rank,
            name: name.to_owned(),
            clock,
            era,
            memory,
            beats: 0,
            beat_every: succession.beat_interval().to_duration(),
            beat_at: Instant::now(),
            dialled: BTreeMap::new(),
            dialers: BTreeMap::new(),
            unreachable: BTreeMap::new(),
            frames: BTreeMap::new(),
            operators: Vec::new(),
            ended: None,
        })
    }

    /// Why the process is to end, if it is.
    pub(super) fn ended(&mut self) -> Result<(), RunError> {
        self.ended.take().map_or(Ok(()), |reason| Err(RunError::Superseded(reason)))
    }

    /// One more turn has been taken: others may know.
    pub(super) fn beat(&mut self) {
        if let Some((region, _)) = &self.memory {
            self.beats += 1;
            region.write(0, &self.beats.to_le_bytes());
            self.beat_at = Instant::now() + self.beat_every;
        }
    }

    /// When the heart must beat next, if anybody looks at it.
    pub(super) fn beats_in(&self) -> Option<Duration> {
        (!self.dialers.is_empty()).then(|| self.beat_at.saturating_duration_since(Instant::now()))
    }

    /// Another scheduler, or an operator, is at the door.
    pub(super) fn welcome(
        &mut self,
        control: &mut Control,
        endpoint: &mut Endpoint,
        (connection, hello): (ConnectionId, SchedulerHello),
    ) -> Result<(), String> {
        let now = self.era.now();
        match hello {
            SchedulerHello::Peer(hello) => {
                self.check_list(&hello)?;
                if !is_member_name(&hello.name) {
                    return Err(format!("name: found {} bytes, expected a member's name", hello.name.len()));
                }
                let claim = control.handle_dialer(now, &hello)?;
                tracing::info!(rank = hello.rank, name = hello.name, "another scheduler has connected");
                let key = self.memory.as_ref().expect("there are others").1;
                self.dialers.insert(connection, hello.rank);
                let (heartbeat_address, heartbeat_rkey) = (key.address, key.rkey);
                let welcome = PeerWelcome { claim, heartbeat_address, heartbeat_rkey };
                endpoint.accept(self.clock.now(), connection, encode(&welcome));
                Ok(())
            }
            SchedulerHello::HandOver => {
                control.handle_hand_over(now)?;
                self.operators.push(connection);
                Ok(())
            }
            SchedulerHello::Drain(request) => {
                let answer = control.handle_drain(now, &request)?;
                endpoint.accept(self.clock.now(), connection, encode(&answer));
                Ok(())
            }
            _ => Err("this is said to the wrong part of the scheduler".to_owned()),
        }
    }

    fn check_list(&self, hello: &PeerHello) -> Result<(), String> {
        let own: Vec<String> = self.schedulers.iter().map(ToString::to_string).collect();
        if hello.schedulers == own {
            return Ok(());
        }
        Err(format!(
            "schedulers: another one has another list; expected the same everywhere, as here: {}",
            own.join(", ")
        ))
    }

    /// Takes in what happened on the endpoint. False if it concerns no scheduler.
    pub(super) fn handle_event(&mut self, control: &mut Control, endpoint: &mut Endpoint, event: &Event) -> bool {
        let now = self.era.now();
        match event {
            Event::Connected { connection, welcome } => {
                let Some(dialled) = self.dialled.get_mut(connection) else { return false };
                match wincode::deserialize::<PeerWelcome>(welcome) {
                    Ok(PeerWelcome { claim, heartbeat_address, heartbeat_rkey }) => {
                        dialled.beat = Some((heartbeat_address, heartbeat_rkey));
                        self.unreachable.remove(&dialled.rank);
                        let address = &self.schedulers[usize::from(dialled.rank)];
                        tracing::info!(scheduler = %address, epoch = %claim.epoch, "connected to another scheduler");
                        control.handle_peer_connected(now, dialled.rank, claim);
                    }
                    Err(_) => endpoint.disconnect(*connection),
                }
            }
            Event::Message { connection, frame } => {
                let (dialled, dialer) = (self.dialled.get(connection), self.dialers.get(connection));
                if dialled.is_none() && dialer.is_none() {
                    return false;
                }
                for message in read_frame::<SchedulerToScheduler>(frame) {
                    match (message, dialled, dialer) {
                        (Ok(message), Some(dialled), _) => control.handle_peer_message(now, dialled.rank, message),
                        (Ok(message), _, Some(&rank)) => control.handle_dialer_message(now, rank, &message),
                        _ => endpoint.disconnect(*connection),
                    }
                }
            }
            Event::ReadDone { connection, token, result } => {
                let Some(dialled) = self.dialled.get(connection) else { return false };
                let mut word = [0; BEAT_BYTES];
                let memory = self.memory.as_ref().filter(|_| result.is_ok());
                let beat = memory.map(|(region, _)| {
                    region.read(BEAT_BYTES * (1 + *token as usize), &mut word);
                    u64::from_le_bytes(word)
                });
                control.handle_heartbeat(now, dialled.rank, beat);
            }
            Event::Disconnected { connection, reason } => {
                self.operators.retain(|operator| operator != connection);
                self.frames.remove(connection);
                if let Some(rank) = self.dialers.remove(connection) {
                    control.handle_dialer_lost(rank);
                } else if let Some(Dialled { rank, beat }) = self.dialled.remove(connection) {
                    let scheduler = &self.schedulers[usize::from(rank)];
                    if beat.is_some() {
                        tracing::warn!(%scheduler, reason = reason.text, "another scheduler is lost");
                    } else {
                        let told = self.unreachable.insert(rank, reason.text.clone());
                        if told.as_ref() != Some(&reason.text) {
                            tracing::info!(%scheduler, reason = reason.text, "another scheduler cannot be reached");
                        }
                    }
                    control.handle_peer_lost(now, rank);
                } else {
                    return false;
                }
            }
            Event::KeyChanged { rkey, .. } => {
                let key = self.memory.as_mut().map(|(_, key)| key);
                key.into_iter().for_each(|key| key.rkey = *rkey);
            }
            Event::Incoming { .. } | Event::WriteDone { .. } | Event::Immediate { .. } => return false,
        }
        true
    }

    /// Does what control wants.
    pub(super) fn perform(&mut self, control: &mut Control, endpoint: &mut Endpoint, output: PeerOutput) {
        match output {
            PeerOutput::Dial(rank) => {
                let schedulers = self.schedulers.iter().map(ToString::to_string).collect();
                let (own, name, claim) = (self.rank, self.name.clone(), control.claim());
                let hello = SchedulerHello::Peer(PeerHello { rank: own, name, schedulers, claim });
                let address = self.schedulers[usize::from(rank)].clone();
                let connection = endpoint.connect(self.clock.now(), address, encode(&hello));
                self.dialled.insert(connection, Dialled { rank, beat: None });
            }
            PeerOutput::Tell(rank, message) => {
                let its = self.dialled.iter().find(|(_, dialled)| dialled.rank == rank && dialled.beat.is_some());
                if let Some((&connection, _)) = its {
                    self.post(endpoint, connection, &message);
                }
            }
            PeerOutput::Answer(rank, message) => {
                if let Some((&connection, _)) = self.dialers.iter().find(|(_, dialer)| **dialer == rank) {
                    self.post(endpoint, connection, &message);
                }
            }
            PeerOutput::ReadHeartbeat(rank) => self.read_heartbeat(control, endpoint, rank),
            PeerOutput::ShiftClock(by) => self.era.set(by),
            PeerOutput::HandedOver(done) => {
                for operator in self.operators.drain(..) {
                    endpoint.accept(self.clock.now(), operator, encode(&done));
                }
            }
            PeerOutput::End(reason) => self.ended = Some(reason),
        }
    }

    /// Adds a message to a connection's frame.
    fn post(&mut self, endpoint: &mut Endpoint, connection: ConnectionId, message: &SchedulerToScheduler) {
        match self.frames.entry(connection).or_default().push(message) {
            Ok(full) => full.into_iter().for_each(|frame| send(endpoint, connection, &frame)),
            Err(_) => endpoint.disconnect(connection),
        }
    }

    /// Sends all frames.
    pub(super) fn flush(&mut self, endpoint: &mut Endpoint) {
        for (connection, mut writer) in std::mem::take(&mut self.frames) {
            writer.take().into_iter().for_each(|frame| send(endpoint, connection, &frame));
        }
    }

    fn read_heartbeat(&mut self, control: &mut Control, endpoint: &mut Endpoint, rank: u16) {
        let its = self.dialled.iter().find(|(_, dialled)| dialled.rank == rank);
        let posted = its.zip(self.memory.as_ref()).and_then(|((&connection, dialled), (_, key))| {
            let (remote_address, rkey) = dialled.beat?;
            let local_offset = BEAT_BYTES * (1 + usize::from(rank));
            let (token, lkey, bytes) = (u64::from(rank), key.lkey, BEAT_BYTES);
            endpoint.read(connection, Transfer { token, lkey, local_offset, remote_address, rkey, bytes }).ok()
        });
        if posted.is_none() {
            control.handle_heartbeat(self.era.now(), rank, None);
        }
    }
}

/// One that does not take it is about to be found lost.
fn send(endpoint: &mut Endpoint, connection: ConnectionId, frame: &[u8]) {
    if endpoint.send(connection, frame).is_err() {
        endpoint.disconnect(connection);
    }
}
