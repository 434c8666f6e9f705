//! Runs a frontend that clients reach over HTTP and gRPC: its listeners share the frontend's thread, so that a request
//! costs no hop between threads.
#![allow(clippy::disallowed_methods)] // Drivers own clocks.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use admin::AdminError;
use frontend::{
    Frontend, FrontendError,
    desk::{Desk, Observer},
    models::ServedModel,
};
use proto::Span;
use repository::Repository;
use thiserror::Error;
use tokio::sync::mpsc;
use transport::{Address, Followed, OpenError};

use crate::{
    config::{Config, TraceConfig},
    connection, export, heap, loads,
    poll::Poll,
    record::Record,
    redis,
    redis::Redis,
    selections::Selections,
    server::{Gate, Server},
    service::{Service, SetLogLevel},
    trace::Tracing,
    trace_file::{self, TraceFile},
    vital::Vital,
};

/// Orders that wait; who gives more has no need of them.
const ORDERS_MAX: usize = 16;

/// Why a gateway could not run.
#[derive(Debug, Error)]
pub enum GatewayError {
    /// A key of the configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The frontend could not run.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// The table `admin`.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// What a key names leads nowhere.
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
    /// A listener cannot join the event loop.
    #[error("the event loop cannot be set up: {0}")]
    Runtime(#[from] io::Error),
}

/// What an operator tells a running gateway.
enum Order {
    Drain,
    Close,
    Stop,
    Reload(Box<Gate>),
}

/// Tells a running gateway what to do, from any thread.
#[derive(Clone)]
pub struct Control {
    orders: mpsc::Sender<Order>,
    taken: Arc<Mutex<Taken>>,
}

/// The configuration that counts, and the files that it names.
struct Taken {
    config: Config,
    files: Followed,
}

impl Taken {
    /// With what is made of it.
    fn of(config: &Config) -> Result<(Self, Gate), String> {
        let files = Followed::new(config.clients.files());
        let gate = Gate::open(config)?;
        Ok((Self { config: config.clone(), files }, gate))
    }
}

impl Control {
    /// Lets it end once `drain_grace_ms` are over and what is under way has been answered, or after
    /// `drain_timeout_ms`.
    pub fn drain(&self) {
        self.give(Order::Drain);
    }

    /// The same without a grace.
    pub fn close(&self) {
        self.give(Order::Close);
    }

    /// Lets it end at once.
    pub fn stop(&self) {
        self.give(Order::Stop);
    }

    /// Lets it take limits, tokens and certificates from another configuration. Nobody is cut off; the rest of the
    /// configuration stays as it was.
    ///
    /// # Errors
    /// What is wrong with the configuration; then nothing changes.
    pub fn reload(&self, config: &Config) -> Result<(), String> {
        // Whoever is followed meanwhile must not be overtaken.
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (new, gate) = Taken::of(config)?;
        *taken = new;
        self.give(Order::Reload(Box::new(gate)));
        Ok(())
    }

    /// From now on files that `[clients]` names are taken in anew once they hold something else.
    fn follow_files(&self) -> io::Result<()> {
        let control = self.clone();
        transport::each_second("clients' files", move || control.look())
    }

    /// Takes in what has been replaced. `None` once nobody is told any more.
    fn look(&self) -> Option<()> {
        if self.orders.is_closed() {
            return None;
        }
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let Taken { config, files } = &mut *taken;
        if let Some(gate) = files.look(|| Gate::open(config)) {
            tracing::info!("clients: files that it names were replaced");
            self.give(Order::Reload(Box::new(gate)));
        }
        Some(())
    }

    fn give(&self, order: Order) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.orders.try_send(order) {
            tracing::warn!("{ORDERS_MAX} orders of the operator wait already; one more is ignored");
        }
    }
}

/// A frontend and its listeners, ready to run: its sockets are open. It belongs to one thread.
pub struct Gateway {
    frontend: Frontend,
    http: Option<TcpListener>,
    grpc: Option<TcpListener>,
    server: Rc<Server>,
    control: Control,
    orders: mpsc::Receiver<Order>,
    poll: Option<Poll>,
    vital: Option<Vital>,
    redis: Option<Redis>,
}

/// Opens a gateway and serves until it is told to end, by what `controlled` gets or by a client that may. Clients may
/// change the level of the process's log by `set_log_level`.
///
/// # Errors
/// If the configuration or the repository is wrong, or the network cannot be opened. A scheduler that cannot be
/// reached is no error: it is tried again and again.
pub fn run(config: &Config, set_log_level: SetLogLevel, controlled: impl FnOnce(Control)) -> Result<(), GatewayError> {
    let gateway = Gateway::open(config, Some(set_log_level))?;
    controlled(gateway.control());
    gateway.run(std::future::pending())
}

/// Reads what [`run`] reads before it opens anything, and yields the repository.
///
/// # Errors
/// If the configuration, a file that it names, or the repository is wrong.
pub fn check(config: &Config) -> Result<Repository, GatewayError> {
    Poll::of(config)?;
    let repository = frontend::check(&config.frontend()?)?;
    Gate::open(config).map_err(GatewayError::Config)?;
    check_traces(config).map_err(GatewayError::Config)?;
    config.otlp.as_ref().map(export::check).transpose().map_err(GatewayError::Config)?;
    config.selection.as_ref().map(redis::check).transpose().map_err(GatewayError::Config)?;
    config.trace.file.as_deref().map(trace_file::check).transpose().map_err(GatewayError::Config)?;
    Ok(repository)
}

fn check_traces(config: &Config) -> Result<(), String> {
    if config.otlp.is_some() && config.trace != TraceConfig::default() {
        return Err("trace: found it beside otlp, expected one of the two: traces go to one place".to_owned());
    }
    Ok(())
}

impl Gateway {
    /// Opens the frontend and the listeners. Without `set_log_level` the log is not the clients' to change.
    ///
    /// # Errors
    /// As [`run`].
    pub fn open(config: &Config, set_log_level: Option<SetLogLevel>) -> Result<Self, GatewayError> {
        let record = Rc::new(Record::new(config.metrics));
        let (poll, vital) = (Poll::of(config)?, Vital::start(config, &record)?);
        let frontend = Frontend::open(&config.frontend()?, Rc::clone(&record) as Rc<dyn Observer>)?;
        let (taken, gate) = Taken::of(config).map_err(GatewayError::Config)?;
        let http = config.http.as_ref().map(|address| listen("http", address)).transpose()?;
        let grpc = config.grpc.as_ref().map(|address| listen("grpc", address)).transpose()?;
        let desk = frontend.desk();
        let mut service = Service::new(Rc::clone(&desk), Rc::clone(&record), set_log_level, SystemTime::now)
            .named(&config.server_name)
            .caching(config.cache_bytes, rand::random())
            .learning(selections(config))
            .controlled(config.model_control_mode)
            .ready_with(config.ready_with.clone());
        if config.cache_bytes == 0 {
            warn_of_no_cache(&desk);
        }
        if let Some(store) = frontend.store() {
            service = service.taking_files(loads::Intake::new(store, config.load_files_bytes_max));
        }
        if config.trace != TraceConfig::default() {
            check_traces(config).map_err(GatewayError::Config)?;
            let file = config.trace.file.as_deref().map(|file| TraceFile::open(file, record.traces().clone()));
            service = service.tracing_to(file.transpose().map_err(GatewayError::Config)?, config.trace.rate);
        }
        if let Some(otlp) = &config.otlp {
            let queue = export::start(otlp, record.traces().clone()).map_err(GatewayError::Config)?;
            let tracing = Tracing::new(desk, queue, record.traces().clone(), export::unix_ns);
            service = service.tracing(tracing, otlp.trace_rate);
        }
        let redis = config.selection.as_ref().map(|redis| Redis::start(redis, &service.selections));
        let redis = redis.transpose().map_err(GatewayError::Config)?;
        let (control, orders) = mpsc::channel(ORDERS_MAX);
        let (server, control) =
            (Server::new(service, gate), Control { orders: control, taken: Arc::new(Mutex::new(taken)) });
        control.follow_files()?;
        Ok(Self { frontend, http, grpc, server, control, orders, poll, vital, redis })
    }

    /// What tells it what to do once it runs.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control.clone()
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

    /// Serves until `stop` is ready, or it is told to end.
    ///
    /// # Errors
    /// If the event loop cannot be set up.
    pub fn run(self, stop: impl Future<Output = ()>) -> Result<(), GatewayError> {
        // With a control of its own the orders never end.
        let Self { frontend, http, grpc, server, control: _control, mut orders, poll, vital, redis } = self;
        let obey = async {
            while let Some(order) = orders.recv().await {
                match order {
                    Order::Drain => server.begin_drain(),
                    Order::Close => server.close(),
                    Order::Reload(gate) => {
                        server.reload(*gate);
                        tracing::info!("limits, tokens and certificates have been read anew");
                    }
                    Order::Stop => return,
                }
            }
        };
        let serve = async |listener: Option<TcpListener>| match listener {
            Some(listener) => {
                connection::serve(tokio::net::TcpListener::from_std(listener)?, Rc::clone(&server)).await?;
                // What else there is to do is no listener's.
                std::future::pending().await
            }
            None => std::future::pending().await,
        };
        let poll = async {
            match poll {
                Some(poll) => poll.run(&server.service.desk).await,
                None => std::future::pending().await,
            }
        };
        let live = async {
            match vital {
                Some(vital) => vital.run(&server).await,
                None => std::future::pending().await,
            }
        };
        let exchange = async {
            match redis {
                Some(redis) => redis.run(&server.service).await,
                None => std::future::pending().await,
            }
        };
        let ended: io::Result<()> = frontend.run(async {
            tokio::select! {
                () = stop => Ok(()),
                () = obey => Ok(()),
                () = server.drained() => Ok(()),
                never = heap::keep_small(&server) => match never {},
                never = poll => match never {},
                never = live => match never {},
                never = exchange => match never {},
                ended = serve(http) => ended,
                ended = serve(grpc) => ended,
            }
        })?;
        Ok(ended?)
    }
}

/// What ensembles learn in this life.
fn selections(config: &Config) -> Selections {
    let waiting = (config.feedback_bytes, Span::from_millis(config.feedback_timeout_ms.into()));
    Selections::new(rand::random(), waiting, config.contexts_bytes)
}

/// Says of which models answers are to be kept for which there is no room.
fn warn_of_no_cache(desk: &Desk) {
    let keeps = |model: &&ServedModel| model.model.configuration.caches_responses();
    let names: Vec<String> = desk.with_core(|core| core.models().iter().filter(keeps).map(name_of).collect());
    if !names.is_empty() {
        let names = repository::listed(names.iter().map(String::as_str));
        tracing::warn!("cache_bytes: found 0, expected room for the answers of models with response_cache: {names}");
    }
}

fn name_of(served: &ServedModel) -> String {
    served.model.name.clone()
}

/// A name that leads nowhere yet is waited for.
fn listen(key: &'static str, address: &Address) -> Result<TcpListener, GatewayError> {
    let look = || Ok(transport::own_address(key, address)?);
    let address = transport::wait_for_names(|| false, look)?.expect("it is never over");
    let open = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    open().map_err(|cause| GatewayError::Listen { key, address, cause })
}
