//! A scheduler in the simulated fabric: the real control, ModelThreads and RankThread, driven as `scheduler::process`
//! drives them. One process holds all of their connections; which of them one is for, its port tells.

use std::collections::BTreeMap;

use proto::{
    Claim, Epoch, ModelId, ModelThreadId, Span, Timestamp,
    frame::{Addressed, FrameWriter, Message, read_frame},
    hello::{Member, SchedulerHello},
    scheduler_to_backend::SchedulerToBackend,
    scheduler_to_frontend::SchedulerToFrontend,
};
use rand::RngExt;
use scheduler::cluster::{Cluster, ClusterConfig, ClusterOutput, Port, Violation};
use transport::{ConnectionId, Event};
use wincode::{SchemaWrite, config::DefaultConfig};

use super::{
    env::{Env, Happening},
    network::{Network, PORT},
    peers::Peers,
};
use crate::node::Node;

/// A scheduler's process.
pub(super) struct SchedulerNode {
    pub(super) node: Node,
    /// All schedulers, by rank.
    all: Vec<Node>,
    config: ClusterConfig,
    process: Option<Process>,
}

struct Process {
    cluster: Cluster,
    /// Whether ModelThreads have connections of their own.
    has_ports: bool,
    peers: Peers,
    members: BTreeMap<ConnectionId, (Port, Member)>,
    /// Where a member's messages go.
    routes: BTreeMap<(Port, Member), (ConnectionId, FrameWriter)>,
}

impl SchedulerNode {
    pub(super) fn new(node: Node, all: Vec<Node>, config: ClusterConfig) -> Self {
        Self { node, all, config, process: None }
    }

    /// The process starts, and knows nobody.
    pub(super) fn start(&mut self, env: &mut Env) {
        env.reset_clock(self.node);
        env.network.listen(self.node);
        let config = ClusterConfig { first_id: env.rng.random(), ..self.config.clone() };
        let cluster = Cluster::new(&config, env.rng.random()).expect("the policy goes with several ModelThreads");
        let peers = Peers::new(env, self.node, &self.all);
        let has_ports = !config.addresses.is_empty();
        let (members, routes) = (BTreeMap::new(), BTreeMap::new());
        self.process = Some(Process { cluster, has_ports, peers, members, routes });
        env.trace(self.node, || "starts".to_owned());
        env.wake(self.node);
    }

    /// An operator wants this one to be the primary.
    pub(super) fn hand_over(&mut self, env: &mut Env) {
        let Some(process) = &mut self.process else { return };
        let done = process.cluster.control().handle_hand_over(env.era(self.node));
        env.trace(self.node, || format!("is to be the primary: {done:?}"));
        env.wake(self.node);
    }

    /// What it takes itself for.
    pub(super) fn claim(&mut self) -> Claim {
        self.process.as_mut().map_or_else(Claim::default, |process| process.cluster.control().claim())
    }

    /// Tells all members an epoch below the one that it claims; a standby, that of nobody.
    pub(super) fn tell_lower_epoch(&mut self, env: &mut Env) {
        let Some(process) = &mut self.process else { return };
        let own = process.cluster.control().claim().epoch;
        let epoch = Epoch { number: own.number.saturating_sub(1), ..own };
        env.trace(self.node, || format!("tells all members of epoch {epoch}"));
        process.tell_epoch(env, epoch);
        env.wake(self.node);
    }

    /// Moves a model to another ModelThread, if there are both.
    pub(super) fn move_model(&mut self, env: &mut Env, model: ModelId, to: ModelThreadId) {
        let Some(process) = &mut self.process else { return };
        env.trace(self.node, || format!("moves {model:?} to {to:?}"));
        process.cluster.move_model(env.era(self.node), model, to);
        env.wake(self.node);
    }

    /// The process ends.
    pub(super) fn die(&mut self, env: &mut Env, tells: bool) {
        env.trace(self.node, || format!("dies{}", if tells { "" } else { " in silence" }));
        self.process = None;
        env.close_endpoint(self.node, tells);
        env.close_listener(self.node);
    }

    pub(super) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// What is still open, if anything is.
    pub(super) fn unfinished(&self) -> Option<String> {
        let is_idle = self.process.as_ref().is_some_and(|process| process.cluster.is_idle());
        (!is_idle).then(|| "it still has tasks, or counts some".to_owned())
    }

    /// Looks at everything once.
    pub(super) fn turn(&mut self, env: &mut Env) {
        let Some(process) = &mut self.process else { return };
        let node = self.node;
        while let Some(event) = env.network.poll_event(node) {
            process.handle_event(env, node, event);
        }
        process.cluster.handle_timeout(env.era(node));
        process.send_outputs(env, node);
        let interval = self.config.succession.beat_interval();
        process.peers.beat(env, node, interval);
        // Whoever ends itself is started again by its supervisor.
        if let Some(reason) = process.peers.ended.take() {
            env.trace(node, || format!("gives up: {reason}"));
            self.die(env, true);
            return env.after(Span::from_millis(100), Happening::Start(node));
        }
        env.wake_at_era(node, process.cluster.poll_timeout().unwrap_or(Timestamp::NEVER));
    }
}

/// Where the ModelThreads of the scheduler at `node` listen.
pub(super) fn addresses(node: Node, model_threads: u16) -> Vec<String> {
    let mut address = Network::address(node);
    let at = |id: u16| {
        address.set_port(PORT + 1 + id);
        address.to_string()
    };
    (0..model_threads).map(at).collect()
}

impl Process {
    fn handle_event(&mut self, env: &mut Env, node: Node, event: Event) {
        let now = env.era(node);
        if self.peers.handle_event(env, node, self.cluster.control(), &event) {
            return;
        }
        match event {
            Event::Incoming { connection, hello, .. } => {
                let port = match env.network.port(connection).checked_sub(PORT + 1) {
                    Some(id) => Port::ModelThread(ModelThreadId(id)),
                    None => Port::Control,
                };
                if let Ok(SchedulerHello::Peer(hello)) = wincode::deserialize(&hello) {
                    return self.peers.welcome(env, node, self.cluster.control(), (connection, hello));
                }
                match self.welcome(now, (connection, port), &hello) {
                    Ok(welcome) => env.accept(connection, welcome),
                    Err(reason) => env.refuse(connection, &reason),
                }
            }
            Event::Message { connection, frame } => {
                if let Err(reason) = self.handle_frame(now, connection, &frame) {
                    env.trace(node, || format!("closes {}: {reason}", connection.0));
                    env.disconnect(connection);
                }
            }
            Event::Disconnected { connection, reason } => {
                let Some((port, member)) = self.members.remove(&connection) else { return };
                self.routes.remove(&(port, member));
                self.cluster.handle_disconnected(now, port, member, reason.text);
            }
            // It opens no connection and registers no memory but for other schedulers.
            _ => {}
        }
    }

    fn welcome(&mut self, now: Timestamp, at: (ConnectionId, Port), hello: &[u8]) -> Result<Vec<u8>, String> {
        let (connection, port) = at;
        let hello: SchedulerHello = wincode::deserialize(hello).map_err(|error| error.to_string())?;
        let (member, welcome) = match (port, hello) {
            (Port::Control, SchedulerHello::Frontend(hello)) => {
                let welcome = self.cluster.handle_frontend_joined(now, hello).map_err(|error| error.to_string())?;
                (Member::Frontend(welcome.frontend), encode(&welcome))
            }
            (Port::Control, SchedulerHello::Backend(hello)) => {
                let welcome = self.cluster.handle_backend_joined(now, hello).map_err(|error| error.to_string())?;
                (Member::Backend(welcome.backend), encode(&welcome))
            }
            (Port::ModelThread(id), SchedulerHello::Member(hello)) => {
                let is_new = !self.routes.contains_key(&(port, hello.member));
                if !(is_new && self.cluster.handle_member_connected(now, id, hello.member, hello.pass)) {
                    return Err("no such member is expected here".to_owned());
                }
                (hello.member, Vec::new())
            }
            _ => return Err("this is said to the wrong part of the scheduler".to_owned()),
        };
        self.members.insert(connection, (port, member));
        self.routes.insert((port, member), (connection, FrameWriter::default()));
        Ok(welcome)
    }

    fn handle_frame(&mut self, now: Timestamp, connection: ConnectionId, frame: &[u8]) -> Result<(), String> {
        let Some(&(port, member)) = self.members.get(&connection) else {
            // Already being closed.
            return Ok(());
        };
        let (cluster, only) = (&mut self.cluster, ModelThreadId(0));
        match (port, member) {
            (Port::Control, Member::Frontend(id)) if self.has_ports => {
                each(frame, |message| cluster.handle_frontend_to_control(now, id, message))
            }
            (Port::Control, Member::Backend(id)) if self.has_ports => {
                each(frame, |message| cluster.handle_backend_to_control(now, id, message))
            }
            (Port::Control, Member::Frontend(id)) => each(frame, |message| match message {
                Addressed::Control(message) => cluster.handle_frontend_to_control(now, id, message),
                Addressed::ModelThread(message) => cluster.handle_frontend_to_model_thread(now, only, id, message),
            }),
            (Port::Control, Member::Backend(id)) => each(frame, |message| match message {
                Addressed::Control(message) => cluster.handle_backend_to_control(now, id, message),
                Addressed::ModelThread(message) => cluster.handle_backend_to_model_thread(now, only, id, message),
            }),
            (Port::ModelThread(thread), Member::Frontend(id)) => {
                each(frame, |message| cluster.handle_frontend_to_model_thread(now, thread, id, message))
            }
            (Port::ModelThread(thread), Member::Backend(id)) => {
                each(frame, |message| cluster.handle_backend_to_model_thread(now, thread, id, message))
            }
        }
    }

    fn send_outputs(&mut self, env: &mut Env, node: Node) {
        let mut frames = Vec::new();
        while let Some(output) = self.cluster.poll_output() {
            match output {
                ClusterOutput::ToFrontend(port, frontend, message) => {
                    frames.extend(self.push((port, Member::Frontend(frontend)), &message));
                }
                ClusterOutput::ToBackend(port, backend, message) => {
                    frames.extend(self.push((port, Member::Backend(backend)), &message));
                }
                ClusterOutput::Close(member, reason) => {
                    env.trace(node, || format!("closes the connections of {member:?}: {reason}"));
                    let own = self.routes.iter().filter(|((_, other), _)| *other == member);
                    own.for_each(|(_, (connection, _))| env.disconnect(*connection));
                }
                ClusterOutput::Peer(output) => self.peers.perform(env, node, self.cluster.control(), output),
            }
        }
        frames.extend(self.routes.values_mut().filter_map(|(connection, writer)| Some((*connection, writer.take()?))));
        for (connection, frame) in frames {
            if env.send(connection, &frame).is_err() {
                env.disconnect(connection);
            }
        }
        self.peers.flush(env);
    }

    /// Says to all members that it takes over, in whatever epoch.
    fn tell_epoch(&mut self, env: &mut Env, epoch: Epoch) {
        let at_control = self.routes.keys().filter(|(port, _)| *port == Port::Control);
        for to in at_control.copied().collect::<Vec<(Port, Member)>>() {
            let full = match to.1 {
                Member::Frontend(_) => self.push(to, &SchedulerToFrontend::Takeover { epoch }),
                Member::Backend(_) => self.push(to, &SchedulerToBackend::Takeover { epoch }),
            };
            if let Some((connection, frame)) = full
                && env.send(connection, &frame).is_err()
            {
                env.disconnect(connection);
            }
        }
    }

    fn push<M>(&mut self, to: (Port, Member), message: &M) -> Option<(ConnectionId, Vec<u8>)>
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        let (connection, writer) = self.routes.get_mut(&to)?;
        Some((*connection, writer.push(message).expect("every message fits a frame")?))
    }
}

/// Hands each message of a frame to `take`.
fn each<M: Message>(frame: &[u8], mut take: impl FnMut(M) -> Result<(), Violation>) -> Result<(), String> {
    for message in read_frame(frame) {
        take(message.map_err(|error| error.to_string())?).map_err(|violation| violation.to_string())?;
    }
    Ok(())
}

pub(super) fn encode<M: SchemaWrite<DefaultConfig, Src = M>>(message: &M) -> Vec<u8> {
    wincode::serialize(message).expect("encoding into memory cannot fail")
}
