//! How a frontend is started.

use std::path::PathBuf;

use transport::{Address, NetworkConfig, OwnAddress};

/// The default of [`Config::links_max`].
pub const LINKS_MAX: usize = 255;

/// How a frontend is started. The keys of a frontend's configuration file have the same names.
#[derive(Debug, Clone)]
pub struct Config {
    /// The schedulers' bootstrap listeners: one, or several of which each can take over from the others.
    pub schedulers: Vec<Address>,
    /// The model repository.
    pub repository: PathBuf,
    /// Whether a model whose configuration is wrong ends the frontend; otherwise the others are served.
    pub strict: bool,
    /// A folder for files that clients' loads bring along, the same for all frontends and backends; without it, such
    /// loads fail.
    pub load_files: Option<PathBuf>,
    /// Where backends reach us (TCP); any port of the network's `address` if it is not given. Backends are told this
    /// address.
    pub link: Option<OwnAddress>,
    /// Bytes of registered memory for slots; without it as many as the models need ([`crate::arena::bytes_for`]).
    pub arena_bytes: Option<usize>,
    /// Backends linked at once.
    pub links_max: usize,
    /// Whether slots have no keys of their own, as on verbs devices; false but in tests.
    pub is_windowless: bool,
    /// The network, and the cluster's secret.
    pub network: NetworkConfig,
}

impl Config {
    /// A configuration for one scheduler, with the default of everything that has one.
    #[must_use]
    pub fn new(scheduler: impl Into<Address>, secret: impl Into<String>, repository: impl Into<PathBuf>) -> Self {
        Self {
            schedulers: vec![scheduler.into()],
            repository: repository.into(),
            strict: false,
            load_files: None,
            link: None,
            arena_bytes: None,
            links_max: LINKS_MAX,
            is_windowless: false,
            network: NetworkConfig::new(secret),
        }
    }
}
