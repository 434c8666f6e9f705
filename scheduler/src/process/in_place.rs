//! Everything on one thread, with one endpoint.

use std::{net::SocketAddr, sync::atomic::AtomicBool};

use admin::Heart;
use proto::{
    ModelThreadId, Span, Timestamp,
    frame::Addressed,
    hello::{Member, SchedulerHello},
    turns::TurnWatch,
};
use transport::{Clock, ConnectionId, Event};

use super::{
    LOOK_INTERVAL, Openness, Place,
    connections::{Connections, Said, encode},
    era_clock::EraClock,
    leaving::Exit,
    peers::Peers,
};
use crate::{
    cluster::{Cluster, ClusterConfig, ClusterOutput, Port},
    config::{Config, RunError},
};

/// It shares control's connections.
const ONLY_THREAD: ModelThreadId = ModelThreadId(0);

pub(super) fn run(
    (config, place): (&Config, &mut Place),
    cluster: &ClusterConfig,
    clock: Clock,
    stop: &AtomicBool,
) -> Result<(), RunError> {
    let era = place.era.clone();
    let mut cluster = Cluster::new(cluster, rand::random())?;
    if let Some(history) = &place.history {
        cluster.record(history);
    }
    let mut connections = Connections::new(place.open(place.listen, false)?);
    let peers = Peers::open((config, &place.name), clock, era.clone(), &mut connections.endpoint)?;
    tracing::info!(name = place.name, listen = %config.listen, policy = %config.policy, "the scheduler is up");
    let (watch, due) = (TurnWatch::default(), Timestamp::PAST);
    let (heart, openness) = (place.vitals.heart("scheduler"), Openness::new(&place.vitals));
    let mut server = Server { cluster, connections, peers, clock, era, watch, due, heart, openness };
    let (mut exit, mut publisher) = (Exit::new(stop, config.drain_timeout_ms), place.board.publisher());
    loop {
        server.turn();
        server.peers.ended()?;
        let now = server.clock.now();
        let Server { cluster, connections, .. } = &mut server;
        publisher.turn(now, |from| cluster.control().snapshot(|member| connections.whereabouts(member), from));
        if exit.begins(now) {
            place.vitals.set_ending();
            server.cluster.handle_leaving(server.era.now());
        }
        if exit.is_over(now, || server.cluster.is_idle()) {
            return Ok(());
        }
    }
}

struct Server {
    cluster: Cluster,
    connections: Connections,
    peers: Peers,
    /// The process's, which the endpoint keeps time by.
    clock: Clock,
    /// What all state machines are told.
    era: EraClock,
    watch: TurnWatch,
    /// When the next turn should come.
    due: Timestamp,
    heart: Heart,
    openness: Openness,
}

impl Server {
    /// Takes in what has arrived, lets timers fire, sends what came of it, and sleeps until there is more.
    fn turn(&mut self) {
        let now = self.clock.now();
        super::tell_silence(&mut self.watch, self.due, now);
        self.heart.beat(now);
        self.openness.tell(self.cluster.control().is_open());
        self.connections.endpoint.drive(now);
        while let Some(event) = self.connections.endpoint.poll_event() {
            self.on_event(event);
        }
        let now = self.era.now();
        // All that has come in is decided on at once.
        self.cluster.handle_timeout(now);
        self.send_outputs();
        self.peers.beat();
        let now = self.clock.now();
        let cluster = self.cluster.poll_timeout().map(|at| self.era.to_process(at));
        let beats = self.peers.beats_in().map(|wait| now + Span(wait.as_nanos() as i64));
        let timeouts = [cluster, beats, self.connections.endpoint.poll_timeout()];
        let until = timeouts.into_iter().flatten().fold(now + LOOK_INTERVAL, Timestamp::min);
        self.due = until.max(now);
        self.connections.endpoint.wait(now, until);
    }

    fn on_event(&mut self, event: Event) {
        let now = self.era.now();
        if self.peers.handle_event(self.cluster.control(), &mut self.connections.endpoint, &event) {
            return;
        }
        match event {
            Event::Incoming { connection, peer, hello } => {
                if let Err(reason) = self.welcome(now, (connection, peer), &hello) {
                    tracing::warn!(%peer, reason, "refused a peer");
                    self.connections.endpoint.refuse(self.clock.now(), connection, &reason);
                }
            }
            Event::Message { connection, frame } => {
                let cluster = &mut self.cluster;
                self.connections.read(connection, &frame, |said| match said {
                    Said::Frontend(frontend, Addressed::Control(message)) => {
                        cluster.handle_frontend_to_control(now, frontend, message)
                    }
                    Said::Frontend(frontend, Addressed::ModelThread(message)) => {
                        cluster.handle_frontend_to_model_thread(now, ONLY_THREAD, frontend, message)
                    }
                    Said::Backend(backend, Addressed::Control(message)) => {
                        cluster.handle_backend_to_control(now, backend, message)
                    }
                    Said::Backend(backend, Addressed::ModelThread(message)) => {
                        cluster.handle_backend_to_model_thread(now, ONLY_THREAD, backend, message)
                    }
                });
            }
            Event::Disconnected { connection, reason } => {
                if let Some(member) = self.connections.handle_disconnected(connection) {
                    let name = self.cluster.control().name_of(member);
                    tracing::warn!(?member, name, reason = reason.text, "a member left");
                    self.cluster.handle_disconnected(now, Port::Control, member, reason.text);
                }
            }
            // It opens no connection and registers no memory but for other schedulers.
            Event::Connected { .. }
            | Event::ReadDone { .. }
            | Event::WriteDone { .. }
            | Event::Immediate { .. }
            | Event::KeyChanged { .. } => {}
        }
    }

    fn welcome(
        &mut self,
        now: Timestamp,
        (connection, peer): (ConnectionId, SocketAddr),
        hello: &[u8],
    ) -> Result<(), String> {
        let (member, welcome) = match super::read_hello(hello)? {
            SchedulerHello::Frontend(hello) => {
                let link_address = hello.link_address.clone();
                let welcome = self.cluster.handle_frontend_joined(now, hello).map_err(|error| error.to_string())?;
                let member = Member::Frontend(welcome.frontend);
                let name = self.cluster.control().name_of(member);
                tracing::info!(frontend = welcome.frontend.0, name, link_address, "a frontend joined");
                (member, encode(&welcome))
            }
            SchedulerHello::Backend(hello) => {
                let (gpus, models) = (hello.gpus, hello.models.len());
                let welcome = self.cluster.handle_backend_joined(now, hello).map_err(|error| error.to_string())?;
                let member = Member::Backend(welcome.backend);
                let name = self.cluster.control().name_of(member);
                tracing::info!(backend = welcome.backend.0, name, gpus, models, "a backend joined");
                (member, encode(&welcome))
            }
            SchedulerHello::Member(_) => return Err("this scheduler has no ModelThreads to connect to".to_owned()),
            other => {
                let at_door = (connection, other);
                return self.peers.welcome(self.cluster.control(), &mut self.connections.endpoint, at_door);
            }
        };
        self.connections.accept(self.clock.now(), (connection, peer), member, welcome);
        Ok(())
    }

    /// Steps 6: plans and news leave, those of one turn for one peer in as few frames as they fit.
    fn send_outputs(&mut self) {
        while let Some(output) = self.cluster.poll_output() {
            match output {
                ClusterOutput::ToFrontend(_, frontend, message) => {
                    self.connections.post(Member::Frontend(frontend), &message);
                }
                ClusterOutput::ToBackend(_, backend, message) => {
                    self.connections.post(Member::Backend(backend), &message);
                }
                ClusterOutput::Close(member, reason) => self.connections.close(member, &reason),
                ClusterOutput::Peer(output) => {
                    self.peers.perform(self.cluster.control(), &mut self.connections.endpoint, output);
                }
            }
        }
        self.connections.flush();
        self.peers.flush(&mut self.connections.endpoint);
    }
}
