//! What stands between clients and the server, as configured: limits, grants and certificates.

use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio_rustls::TlsAcceptor;
use transport::Address;

use super::Hosts;
use crate::{
    access::{Grant, SharedMemory},
    config::{Config, Limits},
    limits::{READ_BUFFER_BYTES_MAX, SPARE_MAX},
};

/// Files that are open beside clients' connections, of which some are spare: links, the log, models that are read.
const FILES_BESIDE: usize = SPARE_MAX + 64;

/// How many files this process may open, after it has asked for so many.
fn files_max(wanted: usize) -> usize {
    let found = getrlimit(Resource::Nofile);
    let Some(current) = found.current.filter(|current| *current < wanted as u64) else { return wanted };
    let raised = found.maximum.map_or(wanted as u64, |most| most.min(wanted as u64)).max(current);
    // What is not granted stays as it was.
    let granted = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..found }).map_or(current, |()| raised);
    usize::try_from(granted).unwrap_or(wanted)
}

/// What clients are asked for, and what they may take up.
#[derive(Clone)]
pub struct Gate {
    /// What clients may take up.
    pub limits: Limits,
    /// What they may do; the first is the grant of those without a token.
    pub grants: Vec<Grant>,
    /// With what connections are encrypted.
    pub tls: Option<TlsAcceptor>,
    /// By which names they may reach us.
    pub hosts: Hosts,
    /// What of this host's shared memory they may register.
    pub shared_memory: SharedMemory,
}

impl Gate {
    /// Reads the files that the configuration names, and warns of a listener that is open to everybody.
    ///
    /// # Errors
    /// One line that names the key, and tells what was found and expected.
    pub fn open(config: &Config) -> Result<Self, String> {
        let mut limits = config.limits();
        let max = READ_BUFFER_BYTES_MAX;
        if !(1..=max).contains(&limits.head_bytes_max) {
            return Err(format!("head_bytes_max: found {}, expected 1 to {max}", limits.head_bytes_max));
        }
        for (key, found) in [
            ("requests_max", limits.requests_max),
            ("client_requests_max", limits.client_requests_max),
            ("connections_max", limits.connections_max),
            ("client_connections_max", limits.client_connections_max),
        ] {
            if found == 0 {
                return Err(format!("{key}: found 0, expected at least 1"));
            }
        }
        let room = files_max(limits.connections_max + FILES_BESIDE).saturating_sub(FILES_BESIDE).max(1);
        if room < limits.connections_max {
            tracing::warn!(
                "connections_max: found {}, expected fewer than the {} files that this process may open (ulimit -n); \
                 {room} are taken",
                limits.connections_max,
                room + FILES_BESIDE
            );
            limits.connections_max = room;
        }
        let tls = match &config.clients.tls {
            None => None,
            Some(files) => {
                let mut tls = files.load("clients.tls").map_err(|error| error.to_string())?;
                if files.has_rsa_key("clients.tls").map_err(|error| error.to_string())? {
                    tracing::warn!(
                        "clients.tls.key: found an RSA key, expected one on a curve (P-256): each handshake takes 1 to \
                         5 ms of the thread that moves packets, instead of 0.1"
                    );
                }
                tls.alpn_protocols = [&b"h2"[..], b"http/1.1"].map(Vec::from).into();
                Some(TlsAcceptor::from(Arc::new(tls)))
            }
        };
        let grants = config.clients.grants()?;
        for (key, address) in [("http", &config.http), ("grpc", &config.grpc)] {
            if let Some(address) = address.as_ref().filter(|address| !is_local(address))
                && !config.clients.is_guarded()
            {
                tracing::warn!(
                    "{key}: whoever reaches {address} is served unencrypted or unasked; expected [clients.tls], and \
                     [[clients.token]] or clients.tls.authority beside it"
                );
            }
        }
        let hosts = Hosts::new(config.clients.hosts.as_deref(), !config.clients.token.is_empty());
        Ok(Self { limits, grants, tls, hosts, shared_memory: config.clients.shared_memory.clone() })
    }
}

/// Whether nobody else's host can come there.
fn is_local(address: &Address) -> bool {
    match (address.ip(), address.name()) {
        (Some(at), _) => at.ip().is_loopback(),
        (None, name) => name.is_some_and(|(host, _)| host == "localhost"),
    }
}
