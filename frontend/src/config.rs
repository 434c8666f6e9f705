//! How a frontend is started.

use std::{net::SocketAddr, path::PathBuf};

use transport::{ArmName, Faults, TlsFiles, VerbsSettings};

/// The default of [`Config::arena_bytes`]: over 400 tasks of 150 kB, a second of 400 requests each.
pub const ARENA_BYTES: usize = 64 << 20;
/// The default of [`Config::links_max`].
pub const LINKS_MAX: usize = 255;

/// How a frontend is started. The keys of a frontend's configuration file have the same names.
#[derive(Debug, Clone)]
pub struct Config {
    /// The scheduler's bootstrap listener.
    pub scheduler: SocketAddr,
    /// What all roles of the cluster share.
    pub secret: String,
    /// The model repository.
    pub repository: PathBuf,
    /// The network: `soft`, or `verbs:DEVICE`.
    pub arm: ArmName,
    /// Where packets come from and arrive. Without it, the soft arm takes a random loopback address, and a verbs device
    /// its first that others can route to.
    pub address: Option<SocketAddr>,
    /// Whether other processes of this user have the same `address`; all of them must say so. Soft arm only.
    pub shared_address: bool,
    /// How the queue pairs of a verbs device are set up.
    pub verbs: VerbsSettings,
    /// Where backends reach us (TCP); any port of `address` if it is not given. Backends are told this address.
    pub link: Option<SocketAddr>,
    /// Bytes of registered memory for slots.
    pub arena_bytes: usize,
    /// Backends linked at once.
    pub links_max: usize,
    /// Faults injected into our packets, for tests.
    pub faults: Faults,
    /// Certificates, with which members also prove themselves to each other by mutual TLS.
    pub tls: Option<TlsFiles>,
}

impl Config {
    /// A configuration with the default of everything that has one.
    #[must_use]
    pub fn new(scheduler: SocketAddr, secret: impl Into<String>, repository: impl Into<PathBuf>) -> Self {
        Self {
            scheduler,
            secret: secret.into(),
            repository: repository.into(),
            arm: ArmName::Soft,
            address: None,
            shared_address: false,
            verbs: VerbsSettings::default(),
            link: None,
            arena_bytes: ARENA_BYTES,
            links_max: LINKS_MAX,
            faults: Faults::default(),
            tls: None,
        }
    }
}
