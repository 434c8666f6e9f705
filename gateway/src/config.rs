//! A frontend's configuration file: the frontend's own keys, and those of what serves its clients.

mod shares;

use std::{fmt, path::PathBuf, time::Duration};

use frontend::FrontendError;
use serde::{Deserialize, Serialize};
use transport::{Address, NetworkConfig, OwnAddress};

use crate::access::Clients;

pub use shares::Shares;

/// How a frontend that serves clients is started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Config {
    /// The scheduler's bootstrap listener; either this or `schedulers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<Address>,
    /// Several schedulers, each of which can take over from the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedulers: Vec<Address>,
    /// The model repository.
    pub repository: PathBuf,
    /// Whether a model whose configuration is wrong ends the frontend; otherwise the others are served.
    #[serde(default)]
    pub strict: bool,
    /// A folder for files that clients' loads bring along, the same for all frontends and backends; without it, such
    /// loads are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_files: Option<PathBuf>,
    /// Bytes of all files in that folder.
    #[serde(default = "default_load_files_bytes_max")]
    pub load_files_bytes_max: u64,
    /// Where clients reach us over HTTP.
    #[serde(default)]
    pub http: Option<Address>,
    /// Where clients reach us over gRPC; without it only at `http`, which answers both.
    #[serde(default)]
    pub grpc: Option<Address>,
    /// Where backends reach us (TCP); any port of the network's `address` if it is not given. Backends are told this
    /// address.
    #[serde(default)]
    pub link: Option<OwnAddress>,
    /// Bytes of registered memory for slots; without it as many as the models need.
    #[serde(default)]
    pub arena_bytes: Option<usize>,
    /// Backends linked at once.
    #[serde(default = "default_links_max")]
    pub links_max: usize,
    /// Connections of clients at once.
    #[serde(default = "default_connections_max")]
    pub connections_max: usize,
    /// Connections of one client (a certificate, or an address; IPv6 by /64) at once.
    #[serde(default = "default_client_connections_max")]
    pub client_connections_max: usize,
    /// Requests of clients under way at once.
    #[serde(default = "default_requests_max")]
    pub requests_max: usize,
    /// Requests of one client (a token, a certificate, or an address) under way at once.
    #[serde(default = "default_client_requests_max")]
    pub client_requests_max: usize,
    /// Bytes of one request's head.
    #[serde(default = "default_head_bytes_max")]
    pub head_bytes_max: usize,
    /// Bytes of one request's body.
    #[serde(default = "default_body_bytes_max")]
    pub body_bytes_max: usize,
    /// Bytes of all bodies that are being received.
    #[serde(default = "default_bodies_bytes_max")]
    pub bodies_bytes_max: usize,
    /// Bytes of all replies that clients have not taken in.
    #[serde(default = "default_untaken_bytes_max")]
    pub untaken_bytes_max: usize,
    /// Bytes of one client's replies that it has not taken in.
    #[serde(default = "default_client_untaken_bytes_max")]
    pub client_untaken_bytes_max: usize,
    /// Bytes of answers that are kept of models whose configuration says `response_cache`; 0: none is.
    #[serde(default = "default_cache_bytes")]
    pub cache_bytes: usize,
    /// Bytes of predictions that wait for feedback; 0: none do.
    #[serde(default = "default_feedback_bytes")]
    pub feedback_bytes: usize,
    /// How long they wait.
    #[serde(default = "default_feedback_timeout_ms")]
    pub feedback_timeout_ms: u32,
    /// Bytes of what ensembles have learned in contexts; 0: requests are answered as if they named none.
    #[serde(default = "default_contexts_bytes")]
    pub contexts_bytes: usize,
    /// How long a client may take to send its first request's head.
    #[serde(default = "default_head_timeout_ms")]
    pub head_timeout_ms: u64,
    /// How long a client may take to send a request's body, and to take in a reply.
    #[serde(default = "default_body_timeout_ms")]
    pub body_timeout_ms: u64,
    /// How long a gRPC stream may be open before its first message.
    #[serde(default = "default_stream_first_timeout_ms")]
    pub stream_first_timeout_ms: u64,
    /// How long a gRPC stream may have no message under way after that.
    #[serde(default = "default_stream_idle_timeout_ms")]
    pub stream_idle_timeout_ms: u64,
    /// How long a connection may stay idle between requests, the head of the next one among that.
    #[serde(default = "default_idle_timeout_ms")]
    pub idle_timeout_ms: u64,
    /// How long all is served as before once the frontend is told to end: balancers take a while to hear of it.
    #[serde(default = "default_drain_grace_ms")]
    pub drain_grace_ms: u64,
    /// How long all of that may take, what is under way after the grace too.
    #[serde(default = "default_drain_timeout_ms")]
    pub drain_timeout_ms: u64,
    /// Who may connect over HTTP and gRPC, and what they may do.
    #[serde(default)]
    pub clients: Clients,
    /// Where traces of requests go; without it, where `trace` says.
    #[serde(default)]
    pub otlp: Option<Otlp>,
    /// Where frontends share what ensembles learn in contexts; without it each has what it learns itself.
    #[serde(default)]
    pub selection: Option<SelectionConfig>,
    /// Which requests leave a trace in the log, or in a file.
    #[serde(default)]
    pub trace: TraceConfig,
    /// What clients are told that this server is called; some compare it.
    #[serde(default = "default_server_name")]
    pub server_name: String,
    /// What `/metrics` has besides what it always has.
    #[serde(default)]
    pub metrics: MetricsConfig,
    /// Who loads and unloads models.
    #[serde(default)]
    pub model_control_mode: ModelControlMode,
    /// Models without which this frontend is not ready, `*` is all, none lets it be ready without any; any one will do
    /// if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_with: Option<Vec<String>>,
    /// How often the repository is looked at where that is who loads them.
    #[serde(default = "default_repository_poll_secs")]
    pub repository_poll_secs: u32,
    /// Where health and metrics are told to whoever looks after the process, if anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<admin::Config>,
    /// The network, and the cluster's secret.
    #[serde(skip)]
    pub network: NetworkConfig,
}

transport::flatten_network!(Config, network);

impl Config {
    /// A configuration for one scheduler, with the default of everything that has one.
    #[must_use]
    pub fn new(scheduler: impl Into<Address>, secret: impl Into<String>, repository: impl Into<PathBuf>) -> Self {
        frontend::Config::new(scheduler, secret, repository).into()
    }

    /// The frontend's own part.
    ///
    /// # Errors
    /// One line if the two keys that can name schedulers do not name each once.
    pub fn frontend(&self) -> Result<frontend::Config, FrontendError> {
        let schedulers =
            transport::scheduler_list(self.scheduler.as_ref(), &self.schedulers).map_err(FrontendError::Config)?;
        Ok(frontend::Config {
            schedulers,
            repository: self.repository.clone(),
            strict: self.strict,
            load_files: self.load_files.clone(),
            link: self.link.clone(),
            arena_bytes: self.arena_bytes,
            links_max: self.links_max,
            is_windowless: false,
            network: self.network.clone(),
        })
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            requests_max: self.requests_max,
            head_bytes_max: self.head_bytes_max,
            body_bytes_max: self.body_bytes_max,
            bodies_bytes_max: self.bodies_bytes_max,
            connections_max: self.connections_max,
            client_connections_max: self.client_connections_max,
            client_requests_max: self.client_requests_max,
            untaken_bytes_max: self.untaken_bytes_max,
            client_untaken_bytes_max: self.client_untaken_bytes_max,
            stream_first_timeout: Duration::from_millis(self.stream_first_timeout_ms),
            stream_idle_timeout: Duration::from_millis(self.stream_idle_timeout_ms),
            drain_grace: Duration::from_millis(self.drain_grace_ms.min(self.drain_timeout_ms)),
            drain_timeout: Duration::from_millis(self.drain_timeout_ms),
            idle_timeout: Duration::from_millis(self.idle_timeout_ms),
            head_timeout: Duration::from_millis(self.head_timeout_ms),
            body_timeout: Duration::from_millis(self.body_timeout_ms),
        }
    }
}

impl From<frontend::Config> for Config {
    fn from(frontend: frontend::Config) -> Self {
        let frontend::Config {
            schedulers, repository, strict, load_files, link, arena_bytes, links_max, network, ..
        } = frontend;
        let (scheduler, schedulers) = match &schedulers[..] {
            [scheduler] => (Some(scheduler.clone()), Vec::new()),
            _ => (None, schedulers),
        };
        Self {
            scheduler,
            schedulers,
            repository,
            strict,
            load_files,
            load_files_bytes_max: default_load_files_bytes_max(),
            http: None,
            grpc: None,
            link,
            arena_bytes,
            links_max,
            connections_max: default_connections_max(),
            client_connections_max: default_client_connections_max(),
            requests_max: default_requests_max(),
            client_requests_max: default_client_requests_max(),
            untaken_bytes_max: default_untaken_bytes_max(),
            client_untaken_bytes_max: default_client_untaken_bytes_max(),
            cache_bytes: default_cache_bytes(),
            feedback_bytes: default_feedback_bytes(),
            feedback_timeout_ms: default_feedback_timeout_ms(),
            contexts_bytes: default_contexts_bytes(),
            stream_first_timeout_ms: default_stream_first_timeout_ms(),
            stream_idle_timeout_ms: default_stream_idle_timeout_ms(),
            idle_timeout_ms: default_idle_timeout_ms(),
            drain_grace_ms: default_drain_grace_ms(),
            drain_timeout_ms: default_drain_timeout_ms(),
            head_bytes_max: default_head_bytes_max(),
            body_bytes_max: default_body_bytes_max(),
            bodies_bytes_max: default_bodies_bytes_max(),
            head_timeout_ms: default_head_timeout_ms(),
            body_timeout_ms: default_body_timeout_ms(),
            clients: Clients::default(),
            otlp: None,
            selection: None,
            trace: TraceConfig::default(),
            server_name: default_server_name(),
            metrics: MetricsConfig::default(),
            model_control_mode: ModelControlMode::default(),
            ready_with: None,
            repository_poll_secs: default_repository_poll_secs(),
            admin: None,
            network,
        }
    }
}

/// Who loads and unloads models while the cluster runs; as Triton's flag `--model-control-mode` says it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelControlMode {
    /// Clients, by the protocol's extension.
    #[default]
    Explicit,
    /// Nobody.
    None,
    /// The repository: what changes there is loaded, and what goes is unloaded.
    Poll,
}

/// The table `[otlp]`: where traces go, and which.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Otlp {
    /// The collector: `http://host:port` or `https://host:port`, or with a path of its own.
    pub endpoint: String,
    /// A file (PEM) with the certificates that the collector's may come from; for `https`.
    #[serde(default)]
    pub authority: Option<PathBuf>,
    /// Of the requests whose caller says nothing, one in so many is traced; 0: none.
    #[serde(default)]
    pub trace_rate: u32,
    /// Traces that wait to be sent.
    #[serde(default = "default_queue_max")]
    pub queue_max: usize,
    /// How long the collector may take for a batch each time.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
}

/// The table `[selection]`: a Redis with what ensembles learn in contexts, the same for all frontends.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectionConfig {
    /// `redis[s]://[[USER]:PASSWORD@]HOST:PORT[/DATABASE]`; `rediss` is TLS 1.3.
    pub redis: RedisUrl,
    /// For `rediss`: the authorities (PEM) that the server's certificate may come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redis_authority: Option<PathBuf>,
    /// A file with the password, read anew for each connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redis_password_file: Option<PathBuf>,
    /// How long it may take to answer, connecting included.
    #[serde(default = "default_redis_timeout_ms")]
    pub redis_timeout_ms: u64,
    /// How long contexts stay there that nobody uses.
    #[serde(default = "default_context_ttl_secs")]
    pub context_ttl_secs: u64,
}

impl SelectionConfig {
    /// A Redis, with the default of everything else.
    #[must_use]
    pub fn at(redis: impl Into<String>) -> Self {
        let (redis_timeout_ms, context_ttl_secs) = (default_redis_timeout_ms(), default_context_ttl_secs());
        let redis = RedisUrl(redis.into());
        Self { redis, redis_authority: None, redis_password_file: None, redis_timeout_ms, context_ttl_secs }
    }
}

/// Where a Redis is, with a password perhaps.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RedisUrl(pub String);

impl RedisUrl {
    /// What stands behind the password.
    #[must_use]
    pub fn without_secret(&self) -> &str {
        self.0.rsplit_once('@').map_or(&self.0, |(_, place)| place)
    }
}

impl fmt::Debug for RedisUrl {
    /// Without what has no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.without_secret())
    }
}

/// The table `[trace]`: what holds until clients say otherwise by the trace settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TraceConfig {
    /// A file that gets a line for each trace; the log if there is none.
    pub file: Option<PathBuf>,
    /// One request in so many is traced; 0: none.
    pub rate: u32,
}

/// The table `[metrics]`: of how many models `/metrics` tells, and Triton's metrics that cost something, as its flag
/// `--metrics-config` names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Models that are named, those first that have had a request; the others are told together.
    pub models_max: usize,
    /// `nv_inference_first_response_histogram_ms`.
    pub histogram_latencies: bool,
    /// `nv_inference_request_summary_us` and those of the stages.
    pub summary_latencies: bool,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { models_max: 200, histogram_latencies: false, summary_latencies: false }
    }
}

/// Bounds on what clients can take up.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of one request's head.
    pub head_bytes_max: usize,
    /// Bytes of one request's body, as it comes and decoded; in gRPC of one message.
    pub body_bytes_max: usize,
    /// Bytes of all bodies that have not been copied into slots.
    pub bodies_bytes_max: usize,
    /// Connections at once.
    pub connections_max: usize,
    /// Connections of one client at once.
    pub client_connections_max: usize,
    /// Requests under way at once.
    pub requests_max: usize,
    /// Requests of one client under way at once, besides the first one of each of its connections.
    pub client_requests_max: usize,
    /// Bytes of replies that clients have not taken in, beyond which those who hold much of them are refused.
    pub untaken_bytes_max: usize,
    /// Bytes of replies that one client has not taken in, beyond which it is refused.
    pub client_untaken_bytes_max: usize,
    /// How long a gRPC stream may be open before its first message.
    pub stream_first_timeout: Duration,
    /// How long a gRPC stream may have no message under way after that.
    pub stream_idle_timeout: Duration,
    /// How long all is served as before once the server is told to end.
    pub drain_grace: Duration,
    /// How long that and what is under way then may take.
    pub drain_timeout: Duration,
    /// How long a client may take to send its first request's head.
    pub head_timeout: Duration,
    /// How long a connection may stay idle between requests.
    pub idle_timeout: Duration,
    /// How long a client may take to send a request's body, and to take in what we send.
    pub body_timeout: Duration,
}

/// What clients are told unless the operator says otherwise.
pub const DEFAULT_SERVER_NAME: &str = "downbeat";

fn default_server_name() -> String {
    DEFAULT_SERVER_NAME.to_owned()
}

/// As Triton.
fn default_repository_poll_secs() -> u32 {
    15
}

fn default_redis_timeout_ms() -> u64 {
    500
}

/// A week.
fn default_context_ttl_secs() -> u64 {
    604_800
}

fn default_queue_max() -> usize {
    4096
}

fn default_timeout_ms() -> u64 {
    10_000
}

fn default_links_max() -> usize {
    frontend::config::LINKS_MAX
}

/// At most an eighth of the memory is for what the kernel may hold for them.
fn default_connections_max() -> usize {
    Shares::here().connections_max
}

/// Three quarters of all: one client that takes all it can leaves room for others.
fn default_client_connections_max() -> usize {
    default_connections_max() / 4 * 3
}

/// A quarter of all.
fn default_client_requests_max() -> usize {
    4096
}

fn default_untaken_bytes_max() -> usize {
    Shares::here().untaken_bytes_max
}

/// A quarter of all.
fn default_client_untaken_bytes_max() -> usize {
    default_untaken_bytes_max() / 4
}

/// A 32nd of the memory at most.
fn default_cache_bytes() -> usize {
    Shares::here().cache_bytes
}

/// A 64th of the memory at most, as of the contexts.
fn default_feedback_bytes() -> usize {
    Shares::here().learning_bytes
}

fn default_contexts_bytes() -> usize {
    Shares::here().learning_bytes
}

fn default_feedback_timeout_ms() -> u32 {
    600_000
}

fn default_stream_first_timeout_ms() -> u64 {
    10_000
}

fn default_stream_idle_timeout_ms() -> u64 {
    300_000
}

/// Longer than proxies keep connections that they may use again (nginx and AWS's balancers: 60 s), so that they close
/// them and do not meet a closing one.
fn default_idle_timeout_ms() -> u64 {
    90_000
}

/// What orchestrators and balancers commonly take until nobody sends anything more.
fn default_drain_grace_ms() -> u64 {
    5_000
}

/// Less than the 30 s that orchestrators commonly wait before they kill.
fn default_drain_timeout_ms() -> u64 {
    25_000
}

/// Sixteen for each connection; a slot for each row is what binds before.
fn default_requests_max() -> usize {
    16_384
}

fn default_head_bytes_max() -> usize {
    64 << 10
}

fn default_load_files_bytes_max() -> u64 {
    1 << 30
}

/// As Triton takes them: two full batches of 64 images of 3 x 299 x 299 bytes, and room to spare; a quarter of all at
/// most.
fn default_body_bytes_max() -> usize {
    (64 << 20).min(default_bodies_bytes_max() / 4)
}

fn default_bodies_bytes_max() -> usize {
    Shares::here().bodies_bytes_max
}

fn default_head_timeout_ms() -> u64 {
    60_000
}

fn default_body_timeout_ms() -> u64 {
    10_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_configuration_has_the_same_defaults_as_new() {
        let json = r#"{"scheduler":"127.0.0.1:7000","secret":"open sesame, and another cave","repository":"models"}"#;
        let read: Config = serde_json::from_str(json).unwrap();
        let new = Config::new(([127, 0, 0, 1], 7000), "open sesame, and another cave", "models");
        assert_eq!(format!("{read:?}"), format!("{new:?}"));
        assert_eq!((read.network == new.network, format!("{read:?}").contains("sesame")), (true, false));
        assert!(serde_json::from_str::<Config>(&json.replace("secret", "secrets")).is_err());
    }

    #[test]
    fn one_of_two_keys_names_schedulers() {
        let read = |keys: &str| {
            let json = format!(r#"{{{keys}"secret":"open sesame, and another cave","repository":"models"}}"#);
            serde_json::from_str::<Config>(&json).unwrap()
        };
        let [one, other]: [Address; 2] = [7000, 7001].map(|port| ([127, 0, 0, 1], port).into());
        let two = read(r#""schedulers":["127.0.0.1:7000","127.0.0.1:7001"],"#);
        assert_eq!(two.frontend().unwrap().schedulers, [one.clone(), other]);
        assert_eq!(read(r#""scheduler":"127.0.0.1:7000","#).frontend().unwrap().schedulers, [one]);
        let written = serde_json::to_string(&two).unwrap();
        assert!(written.contains(r#""schedulers":["127.0.0.1:7000","127.0.0.1:7001"]"#), "{written}");
        assert!(!written.contains(r#""scheduler":"#), "{written}");
        let refused = |keys: &str| read(keys).frontend().unwrap_err().to_string();
        assert_eq!(refused(""), "scheduler, schedulers: found no address, expected one of these keys");
        let both = r#""scheduler":"127.0.0.1:7000","schedulers":["127.0.0.1:7001"],"#;
        assert_eq!(refused(both), "scheduler, schedulers: found both keys, expected one of them");
    }
}
