//! `tritonserver`'s flags, so that manifests made for it run with only the image changed: each becomes a setting of
//! `up`, or is named as one that changes nothing. With one of them, or where the program is called `tritonserver`, its
//! defaults hold too, unless `--config` names a file. What would change answers and has no counterpart is refused.

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::{Arg, ArgAction, ArgMatches, FromArgMatches, parser::ValueSource};
use gateway::config::ModelControlMode;
use tracing::level_filters::LevelFilter;
use transport::Address;

use super::{Layout, random_http};

/// The name of the program, and of the hidden subcommand that it is then.
pub(crate) const NAME: &str = "tritonserver";

/// As it listens: on all addresses.
const ANYWHERE: &str = "0.0.0.0";
const HTTP_PORT: u16 = 8000;
const GRPC_PORT: u16 = 8001;
const METRICS_PORT: u16 = 8002;
/// What it calls itself.
const SERVER_NAME: &str = "triton";

/// Flags that change no answer here, each with a value.
const IDLE: &[&str] = &[
    "allow-cpu-metrics",
    "allow-gpu-metrics",
    "backend-config",
    "backend-directory",
    "buffer-manager-thread-count",
    "cache-directory",
    "cuda-memory-pool-byte-size",
    "cuda-virtual-address-size",
    "enable-peer-access",
    "grpc-http2-max-ping-strikes",
    "grpc-http2-max-pings-without-data",
    "grpc-http2-min-recv-ping-interval-without-data",
    "grpc-infer-allocation-pool-size",
    "grpc-infer-response-compression-level",
    "grpc-infer-thread-count",
    "grpc-keepalive-permit-without-calls",
    "grpc-keepalive-time",
    "grpc-keepalive-timeout",
    "grpc-max-connection-age",
    "grpc-max-connection-age-grace",
    "grpc-max-response-pool-size",
    "grpc-root-cert",
    "grpc-server-cert",
    "grpc-server-key",
    "grpc-stream-infer-thread-count",
    "host-policy",
    "http-thread-count",
    "log-error",
    "log-file",
    "log-info",
    "log-warning",
    "metrics-interval-ms",
    "min-supported-compute-capability",
    "model-load-gpu-limit",
    "model-load-retry-count",
    "model-load-thread-count",
    "pinned-memory-pool-byte-size",
    "rate-limit",
    "rate-limit-resource",
    "repoagent-directory",
    "reuse-grpc-port",
    "reuse-http-port",
    "sagemaker-port",
    "sagemaker-safe-port-range",
    "sagemaker-thread-count",
    "strict-model-config",
    "trace-config",
    "trace-count",
    "trace-file",
    "trace-level",
    "trace-log-frequency",
    "trace-rate",
    "vertex-ai-default-model",
    "vertex-ai-port",
    "vertex-ai-thread-count",
];

/// The only one without a value.
const IDLE_ALONE: &str = "disable-auto-complete-config";

/// Flags that change no answer while they are false, and have no counterpart otherwise.
const OFF: [(&str, &str); 5] = [
    ("allow-sagemaker", "its protocol is not served"),
    ("allow-vertex-ai", "its protocol is not served"),
    ("grpc-use-ssl", "[clients.tls] in the file of --config serves HTTP and gRPC with certificates"),
    ("grpc-use-ssl-mutual", "[clients.tls] in the file of --config serves HTTP and gRPC with certificates"),
    ("model-namespacing", "each name is one model's"),
];

/// Those that become settings of `up`.
#[derive(Debug, Clone, Default, PartialEq, clap::Args)]
#[command(next_help_heading = "Flags of tritonserver, with its defaults (docs/configuration.md has all)")]
pub(crate) struct Flags {
    /// As --repository
    #[arg(long, alias = "model-store", value_name = "DIR", conflicts_with_all = ["repository", "model"])]
    model_repository: Vec<PathBuf>,
    /// The port of HTTP [default: 8000]
    #[arg(long, value_name = "PORT", conflicts_with = "http")]
    http_port: Option<u16>,
    /// The address of HTTP [default: 0.0.0.0]
    #[arg(long, value_name = "HOST", conflicts_with = "http")]
    http_address: Option<String>,
    /// As body_bytes_max
    #[arg(long, value_name = "BYTES", hide = true)]
    http_max_input_size: Option<u32>,
    /// Whether to serve HTTP to others than this host [default: true]
    #[arg(long, value_name = "BOOL", value_parser = switch, conflicts_with = "http")]
    allow_http: Option<bool>,
    /// The port of gRPC [default: 8001]
    #[arg(long, value_name = "PORT", conflicts_with = "grpc")]
    grpc_port: Option<u16>,
    /// The address of gRPC [default: 0.0.0.0]
    #[arg(long, value_name = "HOST", conflicts_with = "grpc")]
    grpc_address: Option<String>,
    /// Whether to have a port for gRPC [default: true]
    #[arg(long, value_name = "BOOL", value_parser = switch, conflicts_with = "grpc")]
    allow_grpc: Option<bool>,
    /// The port of /metrics [default: 8002]
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// The address of /metrics [default: as HTTP]
    #[arg(long, value_name = "HOST")]
    metrics_address: Option<String>,
    /// histogram_latencies=BOOL or summary_latencies=BOOL: as the table `metrics` has them
    #[arg(long, value_name = "KEY=VALUE")]
    metrics_config: Vec<String>,
    /// Whether to have a port for /metrics [default: true]
    #[arg(long, value_name = "BOOL", value_parser = switch)]
    allow_metrics: Option<bool>,
    /// As --server-name [default: triton]
    #[arg(long, value_name = "NAME", conflicts_with = "server_name")]
    id: Option<String>,
    /// Whether a model that is loaded from the start and cannot be ends the cluster [default: true]
    #[arg(long, value_name = "BOOL", value_parser = switch)]
    exit_on_error: Option<bool>,
    /// Whether v2/health/ready waits for all models that are loaded from the start, or for none [default: true]
    #[arg(long, value_name = "BOOL", value_parser = switch)]
    strict_readiness: Option<bool>,
    /// How long requests that are under way have when the cluster is told to end [default: 25]
    #[arg(long, value_name = "SECONDS")]
    exit_timeout_secs: Option<u32>,
    /// From 1 on the log is one for whoever looks for a fault [default: 0]
    #[arg(long, value_name = "LEVEL", value_parser = verbosity)]
    log_verbose: Option<u32>,
    /// local,size=BYTES: as --cache-bytes
    #[arg(long, value_name = "CACHE,KEY=VALUE", value_parser = cache, conflicts_with = "cache_bytes")]
    cache_config: Option<u32>,
    /// As --cache-bytes
    #[arg(long, value_name = "BYTES", hide = true, conflicts_with_all = ["cache_bytes", "cache_config"])]
    response_cache_byte_size: Option<u32>,
    #[command(flatten)]
    idle: Idle,
}

/// Those that were given of the others.
#[derive(Debug, Clone, Default, PartialEq)]
struct Idle(Vec<&'static str>);

impl clap::Args for Idle {
    fn augment_args(command: clap::Command) -> clap::Command {
        let flag = |name: &'static str| Arg::new(name).long(name).hide(true);
        let command = IDLE.iter().fold(command, |command, &name| command.arg(flag(name).action(ArgAction::Append)));
        let command = command.arg(flag(IDLE_ALONE).action(ArgAction::SetTrue));
        OFF.iter().fold(command, |command, &(name, instead)| {
            let parser = move |text: &str| match switch(text)? {
                false => Ok(()),
                true => Err(format!("expected false: {instead}")),
            };
            command.arg(flag(name).value_parser(parser))
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Idle {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let all = IDLE.iter().copied().chain([IDLE_ALONE]).chain(OFF.map(|(name, _)| name));
        Ok(Self(all.filter(|name| matches.value_source(name) == Some(ValueSource::CommandLine)).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Flags {
    /// Whether any of them was given.
    pub(super) fn are_given(&self) -> bool {
        *self != Self::default()
    }

    /// The model repository, if they name one.
    pub(super) fn repository(&self) -> Result<Option<&Path>> {
        let [repository] = &self.model_repository[..] else {
            let found = self.model_repository.len();
            ensure!(found == 0, "--model-repository: found {found} folders, expected one");
            return Ok(None);
        };
        let shown = repository.display();
        let is_elsewhere = repository.to_str().is_some_and(|text| text.contains("://"));
        ensure!(!is_elsewhere, "--model-repository: found {shown}, expected a folder of this host with a copy of it");
        Ok(Some(repository))
    }

    /// The cluster where no file says otherwise.
    pub(super) fn defaults() -> Layout {
        Layout {
            http: vec![([0; 4], HTTP_PORT).into()],
            grpc: vec![([0; 4], GRPC_PORT).into()],
            admin: Some(([0; 4], METRICS_PORT).into()),
            server_name: SERVER_NAME.to_owned(),
            model_control_mode: ModelControlMode::None,
            backend: Vec::new(),
            ..Layout::default()
        }
    }

    /// Puts what they say about the network and the process into a cluster.
    pub(super) fn apply(&self, layout: &mut Layout) -> Result<()> {
        if self.http_port.is_some() || self.http_address.is_some() {
            let port = self.http_port.unwrap_or(HTTP_PORT);
            layout.http = vec![own_address("--http-address", self.http_address.as_deref(), port)?];
        }
        if self.grpc_port.is_some() || self.grpc_address.is_some() {
            let port = self.grpc_port.unwrap_or(GRPC_PORT);
            layout.grpc = vec![own_address("--grpc-address", self.grpc_address.as_deref(), port)?];
        }
        if self.metrics_port.is_some() || self.metrics_address.is_some() || layout.admin.is_some() {
            let host = self.metrics_address.as_ref().or(self.http_address.as_ref());
            let port = self.metrics_port.unwrap_or(METRICS_PORT);
            layout.admin = Some(own_address("--metrics-address", host.map(String::as_str), port)?);
        }
        if self.allow_http == Some(false) {
            // What starts a cluster asks its frontend whether it is ready.
            layout.http = vec![random_http()];
        }
        if self.allow_grpc == Some(false) {
            layout.grpc = Vec::new();
        }
        layout.admin = layout.admin.filter(|_| self.allow_metrics != Some(false));
        layout.server_name = self.id.clone().unwrap_or(std::mem::take(&mut layout.server_name));
        for setting in &self.metrics_config {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            let metrics = &mut layout.metrics;
            let known = match key {
                "histogram_latencies" => &mut metrics.histogram_latencies,
                "summary_latencies" => &mut metrics.summary_latencies,
                // They are always there; quantiles are Triton's own by default.
                "counter_latencies" | "summary_quantiles" => continue,
                _ => {
                    bail!("--metrics-config: found {setting}, expected histogram_latencies=.. or summary_latencies=..")
                }
            };
            *known = switch(value).map_err(|expected| anyhow!("--metrics-config: found {setting}, {expected}"))?;
        }
        for (key, value) in [
            ("drain_timeout_ms", self.exit_timeout_secs.map(|seconds| i64::from(seconds) * 1000)),
            ("cache_bytes", self.cache_config.or(self.response_cache_byte_size).map(i64::from)),
            ("body_bytes_max", self.http_max_input_size.map(i64::from)),
        ] {
            if let Some(value) = value {
                layout.frontend.insert(key.to_owned(), value.into());
            }
        }
        Ok(())
    }

    /// Puts what they say about models into a cluster whose control mode and models to load are known. `has_defaults`
    /// tells whether what they do not say is as it is there.
    pub(super) fn apply_to_models(&self, layout: &mut Layout, has_defaults: bool) {
        let is_explicit = layout.model_control_mode == ModelControlMode::Explicit;
        let from_start = layout.load_models.clone().unwrap_or_else(|| vec!["*".to_owned()]);
        let said = |flag: Option<bool>| flag.or(has_defaults.then_some(true));
        if let Some(ends) = said(self.exit_on_error) {
            layout.ends_without_models = ends;
            // Members would not start with models that nobody asked for.
            layout.strict = ends && !is_explicit;
        }
        if let Some(is_strict) = said(self.strict_readiness) {
            let needed = if is_strict { from_start } else { Vec::new() };
            layout.frontend.insert("ready_with".to_owned(), needed.into());
        }
    }

    /// How much members log, if they say it.
    pub(super) fn log_level(&self) -> Option<LevelFilter> {
        self.log_verbose.map(|level| if level == 0 { LevelFilter::INFO } else { LevelFilter::DEBUG })
    }

    /// A line about those that change nothing.
    pub(super) fn idle(&self) -> Option<String> {
        let names: Vec<String> = self.idle.0.iter().map(|name| format!("--{name}")).collect();
        (!names.is_empty()).then(|| format!("these change nothing here: {}", names.join(", ")))
    }
}

/// A listener's address.
fn own_address(key: &'static str, host: Option<&str>, port: u16) -> Result<SocketAddr> {
    let host = host.unwrap_or(ANYWHERE);
    let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let address: Address = text.parse().with_context(|| key)?;
    Ok(transport::own_address(key, &address)?)
}

/// The words of a command line, where a program that is called as Triton's is the subcommand of that name.
pub(crate) fn words(mut words: Vec<OsString>) -> Vec<OsString> {
    if words.first().is_some_and(|program| Path::new(program).file_name().is_some_and(|name| name == NAME)) {
        words.insert(1, NAME.into());
    }
    words
}

/// As Triton reads it.
fn switch(text: &str) -> Result<bool, String> {
    match &text.to_ascii_lowercase()[..] {
        "true" | "on" | "1" => Ok(true),
        "false" | "off" | "0" => Ok(false),
        _ => Err("expected true, on or 1, or false, off or 0".to_owned()),
    }
}

fn verbosity(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().or_else(|| switch(text).ok().map(u32::from));
    number.ok_or_else(|| "expected a number from 0 on".to_owned())
}

/// The bytes of a cache in memory.
fn cache(text: &str) -> Result<u32, String> {
    let bytes = text.strip_prefix("local,size=").and_then(|size| size.parse().ok());
    bytes.ok_or_else(|| format!("expected local,size=BYTES, {} at most", u32::MAX))
}

#[cfg(test)]
mod tests;
