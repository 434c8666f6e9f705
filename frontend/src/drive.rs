//! Runs a frontend: one thread that owns the transport's endpoint, the core, the HTTP server and the way in for
//! in-process clients. Nothing is shared with other threads but the clients' channel.
#![allow(clippy::disallowed_methods)] // Drivers own threads and clocks.

use std::{
    collections::VecDeque,
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use proto::{Timestamp, backend_to_frontend::LinkWelcome};
use thiserror::Error;
use tokio::runtime::LocalOptions;
use transport::{Access, Arm, Clock, ConnectionId, Endpoint, EndpointConfig, OpenError, PostError, Region};

pub use export::Otlp;

pub(crate) mod export;

use crate::{
    config::Config,
    core::{Core, CoreConfig, Output},
    desk::Desk,
    readiness::Readiness,
    server::{self, Gate, Server},
    service::{Service, SetLogLevel},
    slots::ArenaTooSmall,
    tasks::Arena,
    trace::Tracing,
};

/// How often a stop flag is looked at.
const STOP_POLL: Duration = Duration::from_millis(100);
/// Connections that are served between two turns of the transport's loop. With many more, scheduler and backends wait while
/// requests are read, and clients while replies are written; with few, each frame carries little.
const CONNECTIONS_PER_TURN: u32 = 16;

/// Why a frontend could not run.
#[derive(Debug, Error)]
pub enum FrontendError {
    /// A key of the configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The repository cannot be read.
    #[error(transparent)]
    Repository(#[from] repository::RepositoryError),
    /// The arena is too small for the models.
    #[error(transparent)]
    Arena(#[from] ArenaTooSmall),
    /// There is no memory for the arena.
    #[error("arena_bytes: {bytes} bytes cannot be allocated: {cause}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        cause: io::Error,
    },
    /// The network cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Clients cannot reach us.
    #[error("{key}: cannot listen on {address}: {cause}")]
    Listen {
        /// `http` or `grpc`.
        key: &'static str,
        /// The configured address.
        address: SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// The event loop or its thread cannot be set up.
    #[error("the event loop cannot be set up: {0}")]
    Runtime(#[from] io::Error),
}

/// A frontend that is ready to run: its sockets are open. It belongs to one thread.
pub struct Frontend {
    endpoint: Endpoint,
    scheduler: SocketAddr,
    repository: PathBuf,
    clock: Clock,
    desk: Rc<Desk>,
    http: Option<TcpListener>,
    grpc: Option<TcpListener>,
    /// Who may connect, and what all clients may take up.
    gate: Gate,
    set_log_level: Option<SetLogLevel>,
    /// Where traces go, and one in how many requests is traced without its caller's word.
    tracing: Option<(Rc<Tracing>, u32)>,
    /// Frames that the scheduler has no room for yet. Bounded by the slots: each task has at most a few messages.
    unsent: VecDeque<(ConnectionId, Vec<u8>)>,
}

/// Opens a frontend and serves until `stop` is set (looked at ten times a second). Clients may change the level of the
/// process's log by `set_log_level`.
///
/// # Errors
/// If the configuration or the repository is wrong, or the network cannot be opened. A scheduler that cannot be
/// reached is no error: it is tried again and again.
pub fn run(config: &Config, set_log_level: SetLogLevel, stop: &AtomicBool) -> Result<(), FrontendError> {
    let frontend = Frontend { set_log_level: Some(set_log_level), ..Frontend::open(config)? };
    frontend.run(async {
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(STOP_POLL).await;
        }
    })
}

impl Frontend {
    /// Reads the repository, allocates the arena and opens all sockets.
    ///
    /// # Errors
    /// As [`run`].
    pub fn open(config: &Config) -> Result<Self, FrontendError> {
        let arm = Arm::choose(&config.arm, config.address, config.shared_address, config.faults, config.verbs)?;
        let own = match &arm {
            Arm::Soft { address, .. } => Some(address.ip()),
            Arm::Verbs(verbs) => verbs.address,
        };
        let link = config.link.or(own.map(|ip| SocketAddr::new(ip, 0))).ok_or_else(|| {
            FrontendError::Config(format!("link: expected, as arm {} was given no address", config.arm))
        })?;
        if link.ip().is_unspecified() {
            let expected = "an address of this host that backends can reach";
            return Err(FrontendError::Config(format!("link: found {link}, expected {expected}")));
        }
        let models = repository::load(&config.repository)?;
        let bytes = config.arena_bytes;
        let region = Region::allocate(bytes).map_err(|cause| FrontendError::Memory { bytes, cause })?;
        let endpoint = EndpointConfig {
            // The scheduler is one more.
            connections_max: config.links_max + 1,
            ..EndpointConfig::over(arm).listening(link)
        };
        let endpoint = endpoint.with_secret(config.secret.as_bytes()).with_tls(config.tls.clone());
        let mut endpoint = Endpoint::open(endpoint)?;
        let key = endpoint.register(&region, Access { remote_read: true, remote_write: true })?;
        let link = endpoint.listen_address().expect("it was told to listen");
        let core = CoreConfig {
            arena_bytes: bytes,
            arena: LinkWelcome { arena_address: key.address, arena_bytes: bytes as u64, arena_rkey: key.rkey },
            link_address: link.to_string(),
            links_max: config.links_max,
        };
        let core = Core::new(core, models)?;
        let gate = Gate::open(config).map_err(FrontendError::Config)?;
        let http = config.http.map(|address| listen("http", address)).transpose()?;
        let grpc = config.grpc.map(|address| listen("grpc", address)).transpose()?;
        let clock = Clock::start();
        let desk = Desk::new(core, Box::new(Registered(region)), Box::new(move || clock.now()));
        let tracing = match &config.otlp {
            None => None,
            Some(otlp) => {
                let queue = export::start(otlp, desk.traces().clone()).map_err(FrontendError::Config)?;
                Some((Tracing::new(Rc::clone(&desk), queue, export::unix_ns), otlp.trace_rate))
            }
        };
        let (unsent, set_log_level) = (VecDeque::new(), None);
        let (scheduler, repository) = (config.scheduler, config.repository.clone());
        Ok(Self { endpoint, scheduler, repository, clock, desk, http, grpc, gate, set_log_level, tracing, unsent })
    }

    /// Where clients reach us over HTTP.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref()?.local_addr().ok()
    }

    /// Where clients reach us over gRPC.
    #[must_use]
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref()?.local_addr().ok()
    }

    /// What the parts of this frontend's thread share.
    pub(crate) fn desk(&self) -> Rc<Desk> {
        Rc::clone(&self.desk)
    }

    /// Serves until `stop` is ready.
    ///
    /// # Errors
    /// If the event loop cannot be set up.
    pub fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), FrontendError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(CONNECTIONS_PER_TURN)
            .build_local(LocalOptions::default())?;
        let service = Service::new(Rc::clone(&self.desk), self.set_log_level.take(), SystemTime::now);
        let service = match self.tracing.take() {
            Some((tracing, rate)) => service.tracing(tracing, rate),
            None => service,
        };
        let server = Server::new(service, self.gate.clone());
        let (http, grpc) = (self.http.take(), self.grpc.take());
        runtime.block_on(async move {
            let serve = async |listener: Option<TcpListener>| match listener {
                Some(listener) => {
                    server::serve(tokio::net::TcpListener::from_std(listener)?, Rc::clone(&server)).await;
                    Ok(())
                }
                None => std::future::pending().await,
            };
            tokio::select! {
                () = stop => Ok(()),
                ended = serve(http) => ended,
                ended = serve(grpc) => ended,
                ended = self.move_packets() => ended,
            }
            .map_err(FrontendError::Runtime)
        })
    }

    /// The transport's loop: packets to events, events to the core, the core's outputs to the transport.
    async fn move_packets(&mut self) -> io::Result<()> {
        let endpoint = Readiness::of(&self.endpoint)?;
        let desk = Rc::clone(&self.desk);
        loop {
            let busy = self.turn();
            if busy {
                // Others of this thread have a turn too.
                tokio::task::yield_now().await;
                continue;
            }
            let wait = (self.poll_timeout() - self.clock.now()).to_duration();
            tokio::select! {
                ready = endpoint.readable() => ready?,
                () = tokio::time::sleep(wait) => {}
                () = desk.woken() => {}
            }
        }
    }

    /// Looks at everything once. True if there may be more to do at once.
    fn turn(&mut self) -> bool {
        let progressed = self.endpoint.drive(self.clock.now());
        while let Some(event) = self.endpoint.poll_event() {
            self.desk.handle_event(event);
        }
        self.desk.handle_timeout();
        self.send_unsent();
        while let Some(output) = self.desk.poll_output() {
            self.handle_output(output);
        }
        progressed || self.poll_timeout() <= self.clock.now()
    }

    fn poll_timeout(&self) -> Timestamp {
        [self.endpoint.poll_timeout(), self.desk.poll_timeout()].into_iter().flatten().min().unwrap_or(Timestamp::NEVER)
    }

    fn handle_output(&mut self, output: Output) {
        let now = self.clock.now();
        match output {
            Output::Connect { hello } => {
                self.unsent.clear();
                let connection = self.endpoint.connect(now, self.scheduler, hello);
                self.desk.handle_connecting(connection);
            }
            Output::Accept { connection, welcome } => self.endpoint.accept(now, connection, welcome),
            Output::Refuse { connection, reason } => self.endpoint.refuse(now, connection, &reason),
            Output::Disconnect { connection } => self.endpoint.disconnect(connection),
            Output::Send { connection, frame } => {
                self.unsent.push_back((connection, frame));
                self.send_unsent();
            }
            Output::ReadModel { name } => self.read_model(name),
            Output::Reply { .. } | Output::ModelChanged { .. } => unreachable!("the desk hands answers out"),
        }
    }

    /// Files can be slow; others of this thread must not wait for them.
    fn read_model(&self, name: String) {
        let (desk, repository) = (Rc::clone(&self.desk), self.repository.clone());
        tokio::task::spawn_local(async move {
            let folder = name.clone();
            let read = tokio::task::spawn_blocking(move || repository::load_named(&repository, &folder)).await;
            let model =
                read.map_err(|error| error.to_string()).and_then(|read| read.map_err(|error| error.to_string()));
            desk.handle_model_read(&name, model);
        });
    }

    fn send_unsent(&mut self) {
        while let Some((connection, frame)) = self.unsent.front() {
            if self.endpoint.send(*connection, frame) == Err(PostError::QueueFull) {
                return;
            }
            // A connection that is not up any more has been, or will be, reported.
            self.unsent.pop_front();
        }
    }
}

/// The arena as registered memory.
struct Registered(Region);

impl Arena for Registered {
    fn write(&self, offset: usize, bytes: &[u8]) {
        self.0.write(offset, bytes);
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.0.read(offset, into);
    }
}

fn listen(key: &'static str, address: SocketAddr) -> Result<TcpListener, FrontendError> {
    let open = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    open().map_err(|cause| FrontendError::Listen { key, address, cause })
}
