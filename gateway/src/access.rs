//! Step 1, before anything else: who a client is, what it may do, how much at once and how often.
//!
//! A state machine that takes `now`. [`Access::authenticate`] finds the grant that a client's bearer token stands for,
//! [`Access::handle_request`] counts a request against it, [`Access::permit`] says whether it covers an operation, and
//! [`Access::handle_end`] gives the request's place back. `server/caller.rs` calls them in this order.

use std::net::{IpAddr, Ipv6Addr};

use proto::{Span, Timestamp};
use thiserror::Error;

pub use config::{Allowance, Clients, Token};
use digest::Digest;
use rate::{Limiter, Rate};

mod config;
mod digest;
pub mod rate;

/// Addresses whose rates are kept. One more is refused until another has been quiet.
const ADDRESSES_MAX: usize = 65_536;
/// When it is worth another try if that depends on others.
const RETRY_AFTER: Span = Span::from_millis(1000);

/// What a request does, as far as permissions are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Asks whether the server is live and ready, and what it is.
    Health,
    /// Runs a model.
    Infer,
    /// Reads metadata, configuration, readiness and statistics of models.
    Metadata,
    /// Scrapes.
    Metrics,
    /// Loads and unloads models.
    Repository,
    /// Asks what became of single requests.
    Debug,
    /// Registers shared memory of this host, and looks at what is registered.
    SharedMemory,
    /// Reads and changes the settings of log and trace.
    Settings,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 8] = [
        Self::Health,
        Self::Infer,
        Self::Metadata,
        Self::Metrics,
        Self::Repository,
        Self::Debug,
        Self::SharedMemory,
        Self::Settings,
    ];

    /// What configurations call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Infer => "infer",
            Self::Metadata => "metadata",
            Self::Metrics => "metrics",
            Self::Repository => "repository",
            Self::Debug => "debug",
            Self::SharedMemory => "shared_memory",
            Self::Settings => "settings",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }

    fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// The server, or something that belongs to no model.
    Server,
    /// This model.
    Model(&'a str),
    /// All models together.
    AllModels,
}

impl<'a> Scope<'a> {
    /// What an operation is about if it names this model, or none.
    #[must_use]
    pub fn of(operation: Operation, model: Option<&'a str>) -> Self {
        match (model, operation) {
            (Some(model), _) => Self::Model(model),
            (None, Operation::Infer | Operation::Metadata | Operation::Repository) => Self::AllModels,
            (None, _) => Self::Server,
        }
    }
}

/// A client's token, or its lack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Has no token.
    Anyone,
    /// Has the token of this digest.
    Token {
        /// For messages.
        name: String,
        /// SHA-256.
        digest: Digest,
    },
}

/// What a client may do.
#[derive(Debug, Clone, PartialEq)]
pub struct Grant {
    /// Whose it is.
    pub holder: Holder,
    /// What it covers.
    pub operations: Vec<Operation>,
    /// On which models: names, or what names begin with and a `*`.
    pub models: Vec<String>,
    /// Requests under way at once.
    pub requests_max: Option<usize>,
    /// Requests over time.
    pub rate: Option<Rate>,
}

/// A grant, by its place in the configuration; that of clients without a token is the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantId(usize);

const ANONYMOUS: GrantId = GrantId(0);

/// Why a request was refused before it was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// It needs a token and has none, or one that is not known.
    #[error("authorization: found {found}, expected 'Bearer' and a token that this server knows")]
    Unauthenticated {
        /// What there was instead.
        found: &'static str,
    },
    /// Its token does not cover what it wants.
    #[error("token '{name}' does not cover {wanted}")]
    Forbidden {
        /// The token's name in the configuration.
        name: String,
        /// The operation, and where.
        wanted: String,
    },
    /// Its client sends too often.
    #[error("this client exceeds its rate (requests_per_second, burst); try again in {retry_after}")]
    Rate {
        /// When there is room again.
        retry_after: Span,
    },
    /// Its client has too many requests under way.
    #[error("this client has {max} requests under way already (requests_max); wait for an answer")]
    Busy {
        /// The limit.
        max: usize,
    },
    /// All clients together have too many requests under way.
    #[error("there are {max} requests under way already (requests_max); send less at once")]
    Overloaded {
        /// The limit.
        max: usize,
    },
    /// Its head is too large.
    #[error("head: found {found} bytes, expected at most {max} (head_bytes_max)")]
    Head {
        /// Bytes of all names and values, and 32 for each field (RFC 9113, section 6.5.2).
        found: usize,
        /// The limit.
        max: usize,
    },
}

impl Refusal {
    /// When the same request may succeed.
    #[must_use]
    pub fn retry_after(&self) -> Option<Span> {
        match self {
            Self::Rate { retry_after } => Some(*retry_after),
            Self::Busy { .. } | Self::Overloaded { .. } => Some(RETRY_AFTER),
            Self::Unauthenticated { .. } | Self::Forbidden { .. } | Self::Head { .. } => None,
        }
    }
}

/// All grants, and what their holders have under way.
#[derive(Debug)]
pub struct Access {
    grants: Vec<Held>,
    requests: usize,
    requests_max: usize,
}

#[derive(Debug)]
struct Held {
    grant: Grant,
    requests: usize,
    /// A bucket for each address if the holder has no token, else one.
    limiter: Option<Limiter<Option<IpAddr>>>,
}

impl Access {
    /// These grants, of which the first is that of clients without a token, and so many requests of all together.
    #[must_use]
    pub fn new(grants: Vec<Grant>, requests_max: usize) -> Self {
        debug_assert!(grants.first().is_some_and(|grant| grant.holder == Holder::Anyone));
        let held = |grant: Grant| Held {
            limiter: grant.rate.map(|rate| Limiter::new(rate, ADDRESSES_MAX)),
            grant,
            requests: 0,
        };
        Self { grants: grants.into_iter().map(held).collect(), requests: 0, requests_max }
    }

    /// The grant of a client that presents this token. Where there are no tokens, whatever it presents is for others.
    ///
    /// # Errors
    /// If it presents a token that is not known.
    pub fn authenticate(&self, token: Option<&[u8]>) -> Result<GrantId, Refusal> {
        let digests = self.grants.iter().filter_map(|held| match &held.grant.holder {
            Holder::Anyone => None,
            Holder::Token { digest, .. } => Some(digest),
        });
        match token {
            Some(token) if self.grants.len() > 1 => match digest::position(digests, token) {
                Some(index) => Ok(GrantId(index + 1)),
                None => Err(Refusal::Unauthenticated { found: "an unknown token" }),
            },
            _ => Ok(ANONYMOUS),
        }
    }

    /// Counts a request of a client at this address, until [`Self::handle_end`].
    ///
    /// # Errors
    /// If the client, or all of them, send too much or too often.
    pub fn handle_request(&mut self, now: Timestamp, GrantId(index): GrantId, from: IpAddr) -> Result<(), Refusal> {
        if self.requests >= self.requests_max {
            return Err(Refusal::Overloaded { max: self.requests_max });
        }
        let held = &mut self.grants[index];
        if let Some(max) = held.grant.requests_max.filter(|max| held.requests >= *max) {
            return Err(Refusal::Busy { max });
        }
        let client = (held.grant.holder == Holder::Anyone).then(|| subscriber(from));
        if let Some(limiter) = &mut held.limiter {
            limiter.handle_request(now, client).map_err(|retry_after| Refusal::Rate { retry_after })?;
        }
        held.requests += 1;
        self.requests += 1;
        Ok(())
    }

    /// A request that was counted has ended.
    pub fn handle_end(&mut self, GrantId(index): GrantId) {
        self.grants[index].requests -= 1;
        self.requests -= 1;
    }

    /// Whether a grant covers an operation there.
    ///
    /// # Errors
    /// If it does not: a client without a token is asked for one.
    pub fn permit(&self, GrantId(index): GrantId, operation: Operation, scope: Scope<'_>) -> Result<(), Refusal> {
        let grant = &self.grants[index].grant;
        if grant.operations.contains(&operation) && grant.covers(scope) {
            return Ok(());
        }
        Err(match &grant.holder {
            Holder::Anyone => Refusal::Unauthenticated { found: "no token" },
            Holder::Token { name, .. } => {
                let at = match scope {
                    Scope::Server => String::new(),
                    Scope::Model(model) => format!(" of model '{}'", frontend::excerpt(model)),
                    Scope::AllModels => " of all models".to_owned(),
                };
                Refusal::Forbidden { name: name.clone(), wanted: format!("{}{at}", operation.name()) }
            }
        })
    }
}

impl Grant {
    fn covers(&self, scope: Scope<'_>) -> bool {
        self.models.iter().any(|pattern| match (scope, pattern.strip_suffix('*')) {
            (Scope::Server, _) => true,
            (Scope::AllModels, prefix) => prefix == Some(""),
            (Scope::Model(model), Some(prefix)) => model.starts_with(prefix),
            (Scope::Model(model), None) => model == pattern,
        })
    }
}

/// Whom an address belongs to: providers give every subscriber at least a /64 of IPv6 (RFC 6177).
fn subscriber(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests;
