//! Step 1, before anything else: who a client is, what it may do, how much at once and how often.
//!
//! A state machine that takes `now`. [`Access::authenticate`] finds the grant that a client's bearer token stands for,
//! [`Access::handle_request`] counts a request against it, [`Access::permit`] says whether it covers an operation, and
//! [`Access::handle_end`] gives the request's place back. `server/caller.rs` calls them in this order.
//! [`Access::handle_grants`] takes other grants while requests are under way.

use std::{collections::BTreeMap, rc::Rc};

use proto::{Span, Timestamp};
use thiserror::Error;

pub use client::{Client, Load};
pub use config::{Allowance, Clients, SharedMemory, Token};
use digest::Digest;
use rate::{Limiter, Rate};

pub(crate) mod client;
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
    /// Says what would have been right.
    Feedback,
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
    /// Ends the process once what is under way has been answered.
    Drain,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 10] = [
        Self::Health,
        Self::Infer,
        Self::Feedback,
        Self::Metadata,
        Self::Metrics,
        Self::Repository,
        Self::Debug,
        Self::SharedMemory,
        Self::Settings,
        Self::Drain,
    ];

    /// What configurations call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Infer => "infer",
            Self::Feedback => "feedback",
            Self::Metadata => "metadata",
            Self::Metrics => "metrics",
            Self::Repository => "repository",
            Self::Debug => "debug",
            Self::SharedMemory => "shared_memory",
            Self::Settings => "settings",
            Self::Drain => "drain",
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

impl Holder {
    fn name(&self) -> Option<&str> {
        match self {
            Self::Anyone => None,
            Self::Token { name, .. } => Some(name),
        }
    }
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

/// A grant, by its number among all that there have been; that of clients without a token is the first. Its holder
/// keeps it when grants are replaced, and nobody else ever has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantId(usize);

const ANONYMOUS: GrantId = GrantId(0);
/// To whoever had a valid token when its connection or stream began.
const WITHDRAWN: Refusal = Refusal::Unauthenticated { found: "a token that has been withdrawn" };

/// Why a request was refused before it was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// It needs a token and has none, or one that is not known.
    #[error("authorization: found {found}, expected 'Bearer' and a token that this server knows")]
    Unauthenticated {
        /// What there was instead.
        found: &'static str,
    },
    /// It needs a token, and there is none that anybody could have.
    #[error(
        "authorization: no token is configured here, and '{wanted}' takes one: set [[clients.token]], or name \
         \"{wanted}\" in clients.anonymous.operations"
    )]
    NoTokens {
        /// The operation.
        wanted: &'static str,
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
    #[error(
        "this client exceeds its rate (requests_per_second, burst); try again in {} ms", whole_millis(*retry_after)
    )]
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
    /// Its client has too many requests under way on its connections.
    #[error("this client has {max} requests under way already (client_requests_max); wait for an answer")]
    ClientBusy {
        /// The limit.
        max: usize,
    },
    /// Too many requests for health have been begun and not sent.
    #[error("{max} requests for health are incomplete already; send their messages")]
    Probes {
        /// The limit.
        max: usize,
    },
    /// It came on a connection beyond those that clients may have, which answers health only.
    #[error("this client, or all of them, have too many connections (client_connections_max, connections_max)")]
    Connections,
    /// Its client does not take its replies in.
    #[error("replies of {found} bytes wait to be taken in, expected at most {max} ({key}); read them first")]
    Untaken {
        /// What waits.
        found: usize,
        /// The limit.
        max: usize,
        /// Which limit.
        key: &'static str,
    },
    /// The process is about to end.
    #[error("this frontend is being drained; ask another one")]
    Draining,
    /// The request's target is none of ours.
    #[error(
        "Host: found '{found}' from a browser, expected localhost, an IP address, or a name in \
         hosts = [\"{found}\"] of the table [clients]"
    )]
    Host {
        /// The field, shortened.
        found: String,
    },
    /// Another site's page sent it.
    #[error("{field}: found '{found}', expected {expected}: pages of other sites may not change anything here")]
    CrossSite {
        /// The field of the head.
        field: &'static str,
        /// Its value, shortened.
        found: String,
        /// What would have been served.
        expected: &'static str,
    },
    /// A field that names one thing is there more than once (RFC 9112, section 3.2).
    #[error("{field}: found it more than once, expected it once")]
    Repeated {
        /// The field of the head.
        field: &'static str,
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

/// A wait in whole milliseconds, which is not too short: the same words whatever the clock says.
pub(crate) fn whole_millis(wait: Span) -> u64 {
    (wait.0.max(0) as u64).div_ceil(1_000_000)
}

impl Refusal {
    /// When the same request may succeed.
    #[must_use]
    pub fn retry_after(&self) -> Option<Span> {
        match self {
            Self::Rate { retry_after } => Some(*retry_after),
            Self::Busy { .. }
            | Self::ClientBusy { .. }
            | Self::Probes { .. }
            | Self::Overloaded { .. }
            | Self::Connections
            | Self::Untaken { .. }
            | Self::Draining => Some(RETRY_AFTER),
            Self::Unauthenticated { .. }
            | Self::NoTokens { .. }
            | Self::Forbidden { .. }
            | Self::Head { .. }
            | Self::Host { .. }
            | Self::Repeated { .. }
            | Self::CrossSite { .. } => None,
        }
    }
}

/// All grants, and what their holders have under way.
#[derive(Debug)]
pub struct Access {
    grants: BTreeMap<GrantId, Held>,
    next: GrantId,
    requests: usize,
    requests_max: usize,
}

#[derive(Debug)]
struct Held {
    grant: Grant,
    /// False once a reload has left it out. It goes when nothing of it is under way.
    is_valid: bool,
    requests: usize,
    load: Rc<Load>,
    /// A bucket for each address if the holder has no token, else one.
    limiter: Option<Limiter<Option<Client>>>,
}

impl Held {
    fn new(grant: Grant) -> Self {
        let limiter = grant.rate.map(|rate| Limiter::new(rate, ADDRESSES_MAX));
        Self { limiter, grant, is_valid: true, requests: 0, load: Rc::default() }
    }

    /// The same holder, with another grant.
    fn replace(&mut self, grant: Grant) {
        if self.grant.rate != grant.rate {
            self.limiter = grant.rate.map(|rate| Limiter::new(rate, ADDRESSES_MAX));
        }
        (self.grant, self.is_valid) = (grant, true);
    }

    fn is_gone(&self) -> bool {
        !self.is_valid && self.requests == 0
    }
}

impl Access {
    /// These grants, of which the first is that of clients without a token, and so many requests of all together.
    #[must_use]
    pub fn new(grants: Vec<Grant>, requests_max: usize) -> Self {
        debug_assert!(grants.first().is_some_and(|grant| grant.holder == Holder::Anyone));
        let mut access = Self { grants: BTreeMap::new(), next: ANONYMOUS, requests: 0, requests_max };
        grants.into_iter().for_each(|grant| access.add(grant));
        access
    }

    /// Replaces all grants. Who holds one of the same name keeps its number and what it has under way, whatever its
    /// token is now; who is left out may do nothing any more, and what it has under way is answered.
    pub fn handle_grants(&mut self, grants: Vec<Grant>, requests_max: usize) {
        self.requests_max = requests_max;
        self.grants.values_mut().for_each(|held| held.is_valid = false);
        for grant in grants {
            match self.grants.values_mut().find(|held| held.grant.holder.name() == grant.holder.name()) {
                Some(held) => held.replace(grant),
                None => self.add(grant),
            }
        }
        self.grants.retain(|_, held| !held.is_gone());
        self.grants.values_mut().filter(|held| !held.is_valid).for_each(|held| held.grant.operations.clear());
    }

    fn add(&mut self, grant: Grant) {
        self.grants.insert(self.next, Held::new(grant));
        self.next.0 += 1;
    }

    /// Whether a client may still come: whoever needs no token, and holders of those that are valid.
    #[must_use]
    pub fn knows(&self, client: Client) -> bool {
        match client {
            Client::Token(grant) => self.grants.get(&grant).is_some_and(|held| held.is_valid),
            Client::Certificate(_) | Client::Address(_) => true,
        }
    }

    /// Requests under way.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// What the holder of a grant takes up; nothing that counts if it has no token, since that is not one client.
    #[must_use]
    pub fn load(&self, grant: GrantId) -> Option<&Rc<Load>> {
        self.grants.get(&grant).filter(|_| grant != ANONYMOUS).map(|held| &held.load)
    }

    /// The grant of a client that presents this token. Where there are no tokens, whatever it presents is for others.
    ///
    /// # Errors
    /// If it presents a token that is not known.
    pub fn authenticate(&self, token: Option<&[u8]>) -> Result<GrantId, Refusal> {
        match token {
            Some(token) if self.has_tokens() => match digest::find(self.digests(), token) {
                Some(grant) => Ok(grant),
                None => Err(Refusal::Unauthenticated { found: "an unknown token" }),
            },
            _ => Ok(ANONYMOUS),
        }
    }

    /// The tokens that clients may have.
    fn digests(&self) -> impl Iterator<Item = (GrantId, &Digest)> {
        self.grants.iter().filter_map(|(&grant, held)| match &held.grant.holder {
            Holder::Token { digest, .. } if held.is_valid => Some((grant, digest)),
            _ => None,
        })
    }

    fn has_tokens(&self) -> bool {
        self.digests().next().is_some()
    }

    /// Counts a request until [`Self::handle_end`]: of the grant's holder, or of `from` if that has no token.
    ///
    /// # Errors
    /// If the client, or all of them, send too much or too often.
    pub fn handle_request(&mut self, now: Timestamp, grant: GrantId, from: Client) -> Result<(), Refusal> {
        if self.requests >= self.requests_max {
            return Err(Refusal::Overloaded { max: self.requests_max });
        }
        let held = self.grants.get_mut(&grant).ok_or(WITHDRAWN)?;
        if let Some(max) = held.grant.requests_max.filter(|max| held.requests >= *max) {
            return Err(Refusal::Busy { max });
        }
        let client = (held.grant.holder == Holder::Anyone).then_some(from);
        if let Some(limiter) = &mut held.limiter {
            limiter.handle_request(now, client).map_err(|retry_after| Refusal::Rate { retry_after })?;
        }
        held.requests += 1;
        self.requests += 1;
        Ok(())
    }

    /// A request that was counted has ended.
    pub fn handle_end(&mut self, grant: GrantId) {
        self.requests -= 1;
        let held = self.grants.get_mut(&grant).expect("grants that have requests under way are kept");
        held.requests -= 1;
        if held.is_gone() {
            self.grants.remove(&grant);
        }
    }

    /// Whether a grant covers an operation somewhere.
    #[must_use]
    pub fn covers(&self, grant: GrantId, operation: Operation) -> bool {
        self.grants.get(&grant).is_some_and(|held| held.grant.operations.contains(&operation))
    }

    /// Whether a grant covers an operation there.
    #[must_use]
    pub fn covers_at(&self, grant: GrantId, operation: Operation, scope: Scope<'_>) -> bool {
        self.covers(grant, operation) && self.grants.get(&grant).is_some_and(|held| held.grant.covers(scope))
    }

    /// Asks that a grant covers an operation there.
    ///
    /// # Errors
    /// If it does not: a client without a token is asked for one.
    pub fn permit(&self, grant: GrantId, operation: Operation, scope: Scope<'_>) -> Result<(), Refusal> {
        let Held { grant, is_valid, .. } = self.grants.get(&grant).ok_or(WITHDRAWN)?;
        if grant.operations.contains(&operation) && grant.covers(scope) {
            return Ok(());
        }
        Err(match &grant.holder {
            Holder::Token { .. } if !is_valid => WITHDRAWN,
            Holder::Anyone if !self.has_tokens() => Refusal::NoTokens { wanted: operation.name() },
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

#[cfg(test)]
mod tests;
