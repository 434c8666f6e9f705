//! Runs a frontend that clients reach over HTTP and gRPC: its listeners share the frontend's thread, so that a request
//! costs no hop between threads.
#![allow(clippy::disallowed_methods)] // Drivers own clocks.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use frontend::{Frontend, FrontendError, desk::Observer};
use thiserror::Error;

use crate::{
    config::Config,
    connection, export,
    record::Record,
    server::{Gate, Server},
    service::{Service, SetLogLevel},
    trace::Tracing,
};

/// How often a stop flag is looked at.
const STOP_POLL: Duration = Duration::from_millis(100);

/// Why a gateway could not run.
#[derive(Debug, Error)]
pub enum GatewayError {
    /// A key of the configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The frontend could not run.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
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

/// A frontend and its listeners, ready to run: its sockets are open. It belongs to one thread.
pub struct Gateway {
    frontend: Frontend,
    http: Option<TcpListener>,
    grpc: Option<TcpListener>,
    server: Rc<Server>,
}

/// Opens a gateway and serves until `stop` is set (looked at ten times a second). Clients may change the level of the
/// process's log by `set_log_level`.
///
/// # Errors
/// If the configuration or the repository is wrong, or the network cannot be opened. A scheduler that cannot be
/// reached is no error: it is tried again and again.
pub fn run(config: &Config, set_log_level: SetLogLevel, stop: &AtomicBool) -> Result<(), GatewayError> {
    Gateway::open(config, Some(set_log_level))?.run(async {
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(STOP_POLL).await;
        }
    })
}

impl Gateway {
    /// Opens the frontend and the listeners. Without `set_log_level` the log is not the clients' to change.
    ///
    /// # Errors
    /// As [`run`].
    pub fn open(config: &Config, set_log_level: Option<SetLogLevel>) -> Result<Self, GatewayError> {
        let record = Rc::new(Record::default());
        let frontend = Frontend::open(&config.frontend(), Rc::clone(&record) as Rc<dyn Observer>)?;
        let gate = Gate::open(config).map_err(GatewayError::Config)?;
        let http = config.http.map(|address| listen("http", address)).transpose()?;
        let grpc = config.grpc.map(|address| listen("grpc", address)).transpose()?;
        let desk = frontend.desk();
        let mut service = Service::new(Rc::clone(&desk), Rc::clone(&record), set_log_level, SystemTime::now);
        if let Some(otlp) = &config.otlp {
            let queue = export::start(otlp, record.traces().clone()).map_err(GatewayError::Config)?;
            let tracing = Tracing::new(desk, queue, record.traces().clone(), export::unix_ns);
            service = service.tracing(tracing, otlp.trace_rate);
        }
        Ok(Self { frontend, http, grpc, server: Server::new(service, gate) })
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

    /// Serves until `stop` is ready.
    ///
    /// # Errors
    /// If the event loop cannot be set up.
    pub fn run(self, stop: impl Future<Output = ()>) -> Result<(), GatewayError> {
        let Self { frontend, http, grpc, server } = self;
        let serve = async |listener: Option<TcpListener>| match listener {
            Some(listener) => {
                connection::serve(tokio::net::TcpListener::from_std(listener)?, Rc::clone(&server)).await;
                Ok(())
            }
            None => std::future::pending().await,
        };
        let ended: io::Result<()> = frontend.run(async {
            tokio::select! {
                () = stop => Ok(()),
                ended = serve(http) => ended,
                ended = serve(grpc) => ended,
            }
        })?;
        Ok(ended?)
    }
}

fn listen(key: &'static str, address: SocketAddr) -> Result<TcpListener, GatewayError> {
    let open = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    open().map_err(|cause| GatewayError::Listen { key, address, cause })
}
