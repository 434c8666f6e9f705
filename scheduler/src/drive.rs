//! The scheduler's process: one endpoint, one thread, one clock. Everything it decides is in [`Cluster`].
#![allow(clippy::disallowed_methods, reason = "the scheduler's only place with a clock and a socket")]

use std::{collections::BTreeMap, net::SocketAddr};

use proto::{
    BackendId, FrontendId, Span, Timestamp,
    frame::{FrameWriter, read_frame},
    hello::SchedulerHello,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use transport::{
    Arm, ArmName, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, OpenError, ROCE_PORT, TlsFiles,
    VerbsSettings,
};
use wincode::SchemaWrite;

use crate::{
    cluster::{Cluster, ClusterConfig, ClusterOutput},
    messages::NetworkBudget,
    policy::{Policy, PolicyError},
};

/// The scheduler's configuration file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where frontends and backends connect (TCP).
    pub listen: SocketAddr,
    /// The network: `soft`, or `verbs:DEVICE`.
    #[serde(default)]
    pub arm: ArmName,
    /// Where packets come from and arrive: a specific address. Without it, the soft arm takes that of `listen`, and a
    /// verbs device its first that others can route to.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// Whether other processes of this user have the same `address`; all of them must say so. Soft arm only.
    #[serde(default)]
    pub shared_address: bool,
    /// How the queue pairs of a verbs device are set up.
    #[serde(default)]
    pub verbs: VerbsSettings,
    /// Shared with all frontends and backends.
    pub secret: String,
    /// When batches run.
    #[serde(default = "default_policy")]
    pub policy: String,
    /// What the network may cost.
    #[serde(default)]
    pub network: Network,
    /// Tasks that may wait for one model.
    #[serde(default = "default_queue_max")]
    pub queue_max: usize,
    /// Tasks that one frontend may have under way.
    #[serde(default = "default_tasks_per_frontend_max")]
    pub tasks_per_frontend_max: usize,
    /// Plan with what executions take, not only with what backends offered.
    #[serde(default = "default_reestimate")]
    pub reestimate: bool,
    /// Faults injected into our packets, for tests.
    #[serde(default)]
    pub faults: Faults,
    /// Certificates, with which members also prove themselves to each other by mutual TLS.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
}

/// The network budget in microseconds: what the scheduler plans with, so better too large than too small.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// From the scheduler to a backend.
    pub ctrl_us: f64,
    /// To read one task's input.
    pub data_us_per_request: f64,
    /// What each megabyte of a task's input adds to that.
    pub data_us_per_megabyte: f64,
    /// From the end of execution to the client.
    pub resp_us: f64,
    /// How late timers fire and threads wake; windows open this much earlier.
    pub jitter_us: f64,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            ctrl_us: 100.0,
            data_us_per_request: 20.0,
            data_us_per_megabyte: 1000.0,
            resp_us: 1000.0,
            jitter_us: 1000.0,
        }
    }
}

fn default_policy() -> String {
    Policy::default().to_string()
}

/// Tasks that may wait for one model, unless the configuration says otherwise.
#[must_use]
pub fn default_queue_max() -> usize {
    16_384
}

/// Tasks that one frontend may have under way, unless the configuration says otherwise.
#[must_use]
pub fn default_tasks_per_frontend_max() -> usize {
    65_536
}

fn default_reestimate() -> bool {
    true
}

/// Why the scheduler stopped, or did not start.
#[derive(Debug, Error)]
pub enum RunError {
    /// The key `policy`.
    #[error("policy: {0}")]
    Policy(#[from] PolicyError),
    /// A time of the key `network`.
    #[error("network.{key} must be 0 to 1000000 us, found {found}")]
    Network {
        /// Which one.
        key: &'static str,
        /// What was given.
        found: f64,
    },
    /// The sockets.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl Config {
    fn cluster_config(&self) -> Result<ClusterConfig, RunError> {
        let span = |key, us: f64| match us {
            0.0..=1e6 => Ok(Span::from_millis_f64(us / 1e3)),
            _ => Err(RunError::Network { key, found: us }),
        };
        Ok(ClusterConfig {
            policy: Policy::of_cluster(&self.policy)?,
            budget: NetworkBudget {
                ctrl: span("ctrl_us", self.network.ctrl_us)?,
                data_per_task: span("data_us_per_request", self.network.data_us_per_request)?,
                jitter: span("jitter_us", self.network.jitter_us)?,
            },
            data_per_megabyte: span("data_us_per_megabyte", self.network.data_us_per_megabyte)?,
            resp: span("resp_us", self.network.resp_us)?,
            queue_max: self.queue_max,
            tasks_per_frontend_max: self.tasks_per_frontend_max,
            reestimate: self.reestimate,
        })
    }
}

/// Runs a scheduler until its process ends.
///
/// # Errors
/// If the configuration is wrong or a socket cannot be opened. Nothing that a peer does ends it.
pub fn run(config: &Config) -> Result<std::convert::Infallible, RunError> {
    let cluster = Cluster::new(config.cluster_config()?);
    let soft_address = (config.arm == ArmName::Soft).then(|| SocketAddr::new(config.listen.ip(), ROCE_PORT));
    let address = config.address.or(soft_address);
    let arm = Arm::choose(&config.arm, address, config.shared_address, config.faults, config.verbs)?;
    let endpoint = Endpoint::open(
        EndpointConfig::over(arm)
            .listening(config.listen)
            .with_secret(config.secret.as_str())
            .with_tls(config.tls.clone()),
    )?;
    tracing::info!(listen = %config.listen, policy = %config.policy, "the scheduler is up");
    let mut server =
        Server { cluster, endpoint, clock: Clock::start(), peers: BTreeMap::new(), routes: Routes::default() };
    loop {
        server.turn();
    }
}

#[derive(Debug, Clone, Copy)]
enum Peer {
    Frontend(FrontendId),
    Backend(BackendId),
}

#[derive(Default)]
struct Routes {
    frontends: BTreeMap<FrontendId, Route>,
    backends: BTreeMap<BackendId, Route>,
}

/// Where a peer's messages go: all of one turn leave in as few frames as they fit.
struct Route {
    connection: ConnectionId,
    frame: FrameWriter,
}

impl Route {
    fn new(connection: ConnectionId) -> Self {
        Self { connection, frame: FrameWriter::default() }
    }
}

struct Server {
    cluster: Cluster,
    endpoint: Endpoint,
    clock: Clock,
    peers: BTreeMap<ConnectionId, Peer>,
    routes: Routes,
}

impl Server {
    /// Takes in what has arrived, lets timers fire, sends what came of it, and sleeps if there was nothing to do.
    fn turn(&mut self) {
        let now = self.clock.now();
        let mut busy = self.endpoint.drive(now);
        while let Some(event) = self.endpoint.poll_event() {
            busy = true;
            self.on_event(event);
        }
        let now = self.clock.now();
        if self.cluster.poll_timeout().is_some_and(|at| at <= now) {
            busy = true;
            self.cluster.handle_timeout(now);
        }
        self.send_outputs();
        if busy {
            self.endpoint.drive(self.clock.now());
            return;
        }
        let timeouts = [self.cluster.poll_timeout(), self.endpoint.poll_timeout()];
        let until = timeouts.into_iter().flatten().min().unwrap_or(Timestamp::NEVER);
        self.endpoint.wait(now, until);
    }

    fn on_event(&mut self, event: Event) {
        let now = self.clock.now();
        match event {
            Event::Incoming { connection, peer, hello } => match self.welcome(now, connection, &hello) {
                Ok(welcome) => self.endpoint.accept(now, connection, welcome),
                Err(reason) => {
                    tracing::warn!(%peer, reason, "refused a peer");
                    self.endpoint.refuse(now, connection, &reason);
                }
            },
            Event::Message { connection, frame } => {
                if let Err(reason) = self.on_frame(now, connection, &frame) {
                    tracing::warn!(peer = ?self.peers.get(&connection), reason, "closed a connection");
                    self.endpoint.disconnect(connection);
                }
            }
            Event::Disconnected { connection, reason } => self.on_disconnected(now, connection, &reason.to_string()),
            // The scheduler opens no connection and registers no memory, so the rest does not happen to it.
            Event::Connected { .. }
            | Event::ReadDone { .. }
            | Event::WriteDone { .. }
            | Event::Immediate { .. }
            | Event::KeyChanged { .. } => {}
        }
    }

    fn welcome(&mut self, now: Timestamp, connection: ConnectionId, hello: &[u8]) -> Result<Vec<u8>, String> {
        let hello: SchedulerHello = wincode::deserialize(hello)
            .map_err(|error| format!("the hello does not decode ({error}); do both sides run the same version?"))?;
        match hello {
            SchedulerHello::Frontend(hello) => {
                let link_address = hello.link_address.clone();
                let welcome = self.cluster.handle_frontend_joined(now, hello).map_err(|error| error.to_string())?;
                tracing::info!(frontend = welcome.frontend.0, link_address, "a frontend joined");
                self.peers.insert(connection, Peer::Frontend(welcome.frontend));
                self.routes.frontends.insert(welcome.frontend, Route::new(connection));
                Ok(encode(&welcome))
            }
            SchedulerHello::Backend(hello) => {
                let (gpus, models) = (hello.gpus, hello.models.len());
                let welcome = self.cluster.handle_backend_joined(now, hello).map_err(|error| error.to_string())?;
                tracing::info!(backend = welcome.backend.0, gpus, models, "a backend joined");
                self.peers.insert(connection, Peer::Backend(welcome.backend));
                self.routes.backends.insert(welcome.backend, Route::new(connection));
                Ok(encode(&welcome))
            }
            SchedulerHello::Member(_) => Err("this scheduler has no ModelThreads to connect to".to_owned()),
        }
    }

    fn on_frame(&mut self, now: Timestamp, connection: ConnectionId, frame: &[u8]) -> Result<(), String> {
        match self.peers.get(&connection) {
            Some(&Peer::Frontend(frontend)) => {
                for message in read_frame(frame) {
                    let message = message.map_err(|error| error.to_string())?;
                    self.cluster
                        .handle_frontend_message(now, frontend, message)
                        .map_err(|violation| violation.to_string())?;
                }
            }
            Some(&Peer::Backend(backend)) => {
                for message in read_frame(frame) {
                    let message = message.map_err(|error| error.to_string())?;
                    self.cluster
                        .handle_backend_message(now, backend, message)
                        .map_err(|violation| violation.to_string())?;
                }
            }
            // Already being closed.
            None => {}
        }
        Ok(())
    }

    fn on_disconnected(&mut self, now: Timestamp, connection: ConnectionId, reason: &str) {
        match self.peers.remove(&connection) {
            Some(Peer::Frontend(frontend)) => {
                tracing::warn!(frontend = frontend.0, reason, "a frontend left");
                self.routes.frontends.remove(&frontend);
                self.cluster.handle_frontend_left(now, frontend);
            }
            Some(Peer::Backend(backend)) => {
                tracing::warn!(backend = backend.0, reason, "a backend left");
                self.routes.backends.remove(&backend);
                self.cluster.handle_backend_left(now, backend);
            }
            None => {}
        }
    }

    /// Steps 6: plans and news leave, those of one turn for one peer in as few frames as they fit.
    fn send_outputs(&mut self) {
        while let Some(output) = self.cluster.poll_output() {
            match output {
                ClusterOutput::ToFrontend(frontend, message) => {
                    if let Some(route) = self.routes.frontends.get_mut(&frontend) {
                        push(&mut self.endpoint, route, &message);
                    }
                }
                ClusterOutput::ToBackend(backend, message) => {
                    if let Some(route) = self.routes.backends.get_mut(&backend) {
                        push(&mut self.endpoint, route, &message);
                    }
                }
            }
        }
        for route in self.routes.frontends.values_mut().chain(self.routes.backends.values_mut()) {
            if let Some(frame) = route.frame.take() {
                send(&mut self.endpoint, route.connection, &frame);
            }
        }
    }
}

fn push<M>(endpoint: &mut Endpoint, route: &mut Route, message: &M)
where
    M: SchemaWrite<wincode::config::DefaultConfig, Src = M>,
{
    match route.frame.push(message) {
        Ok(Some(full)) => send(endpoint, route.connection, &full),
        Ok(None) => {}
        // Sizes are asserted in `proto`; a name of hundreds of bytes was refused when its backend joined.
        Err(error) => unreachable!("{error}"),
    }
}

/// A peer that does not take its messages is as good as gone: what it was not told cannot be told again in order.
fn send(endpoint: &mut Endpoint, connection: ConnectionId, frame: &[u8]) {
    if let Err(error) = endpoint.send(connection, frame) {
        tracing::warn!(?connection, %error, "closed a connection");
        endpoint.disconnect(connection);
    }
}

fn encode<M>(message: &M) -> Vec<u8>
where
    M: SchemaWrite<wincode::config::DefaultConfig, Src = M>,
{
    wincode::serialize(message).expect("encoding into memory cannot fail")
}
