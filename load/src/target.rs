//! Where load is sent, and how it travels.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rustls::ClientConfig;

/// Where to send, and for how long.
#[derive(Debug, Clone)]
pub struct Target {
    /// The server.
    pub address: SocketAddr,
    /// How requests travel.
    pub wire: Wire,
    /// The server's name and authority, if requests are encrypted; `address` is not used then.
    pub tls: Option<Tls>,
    /// A bearer token, sent with each request.
    pub token: Option<String>,
    /// How long requests are sent.
    pub span: Duration,
    /// Decides the arrivals.
    pub seed: u64,
}

impl Target {
    /// A server that is reached over HTTP with binary tensors.
    #[must_use]
    pub fn http(address: SocketAddr, span: Duration, seed: u64) -> Self {
        Self { address, wire: Wire::Http(Encoding::Binary), tls: None, token: None, span, seed }
    }
}

/// How tensors are written over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Encoding {
    /// As bytes behind the JSON: the protocol's binary extension.
    Binary,
    /// As numbers within the JSON, which every server understands.
    Json,
}

/// How requests travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// HTTP/1.1, on as many connections as are needed.
    Http(Encoding),
    /// gRPC, on HTTP/2.
    Grpc,
}

/// A server that is reached by TLS 1.3.
#[derive(Debug, Clone)]
pub struct Tls {
    /// `HOST:PORT`, where HOST is what the server's certificate names.
    pub authority: String,
    /// Whom to trust.
    pub config: Arc<ClientConfig>,
}
