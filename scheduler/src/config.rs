//! The scheduler's configuration file, and what follows from it.

use std::collections::BTreeMap;

use proto::{ModelThreadId, Span};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use transport::{Address, NetworkConfig, OpenError};

use crate::{
    advice::AdviceConfig,
    cluster::ClusterConfig,
    control::SuccessionConfig,
    messages::NetworkBudget,
    network_times::TIMERS_LATE,
    placer::PlacementConfig,
    policy::{Policy, PolicyError},
};

/// The default of [`Config::drain_timeout_ms`]: orchestrators kill after 30 s.
pub const DRAIN_TIMEOUT_MS: u64 = 25_000;

/// The default of [`Config::suspect_ms`]: a machine with two cores stops threads for several.
pub const SUSPECT_MS: f64 = 10.0;

/// The scheduler's configuration file.
#[derive(Clone, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Config {
    /// Where frontends and backends connect (TCP).
    pub listen: Address,
    /// All schedulers, `listen` among them, in the order in which they take over: the same list for every role. Without
    /// it, this one is the only one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedulers: Vec<Address>,
    /// A primary whose heartbeat stands still for so long is suspected.
    #[serde(default = "default_suspect_ms")]
    pub suspect_ms: f64,
    /// When batches run.
    #[serde(default = "default_policy")]
    pub policy: String,
    /// Milliseconds of a request's latency that a millisecond of GPU time is worth, from 0 to infinity: as
    /// `downbeat:gpu_price=..` in `policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_price: Option<f64>,
    /// The same of single models, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpu_prices: BTreeMap<String, f64>,
    /// How many ModelThreads plan, each on a core of its own, beside one for the RankThread and one for control. With
    /// one, a single thread does everything.
    #[serde(default)]
    pub model_threads: ModelThreadCount,
    /// Cores that the RankThread and the ModelThreads are pinned to, in this order; those without one run anywhere.
    #[serde(default)]
    pub cores: Vec<usize>,
    /// What the network may cost.
    #[serde(default)]
    pub network: Network,
    /// How many GPUs are needed is worked out with this.
    #[serde(default, skip_serializing_if = "Advice::is_default")]
    pub advice: Advice,
    /// How models are placed on backends that leave it to the scheduler; without it they stay where they start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Tasks that may wait for one model.
    #[serde(default = "default_queue_max")]
    pub queue_max: usize,
    /// Tasks that one frontend may have under way.
    #[serde(default = "default_tasks_per_frontend_max")]
    pub tasks_per_frontend_max: usize,
    /// Plan with what executions take, not only with what backends offered.
    #[serde(default = "default_reestimate")]
    pub reestimate: bool,
    /// How long a scheduler that is asked to end finishes what it has.
    #[serde(default = "default_drain_timeout_ms")]
    pub drain_timeout_ms: u64,
    /// Where health and metrics are told, if anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<admin::Config>,
    /// The way to the other members, and the cluster's secret. Without an `address`, the soft arm takes that of
    /// `listen`.
    #[serde(skip)]
    pub fabric: NetworkConfig,
}

transport::flatten_network!(Config, fabric);

/// The key `model_threads`: a number, or `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"auto\" or a number")]
pub enum ModelThreadCount {
    /// As many as the machine has cores for.
    #[default]
    #[serde(with = "auto")]
    Auto,
    /// So many.
    Fixed(u16),
}

/// The word `auto`.
mod auto {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("auto")
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "auto" => Ok(()),
            other => Err(D::Error::custom(format!("expected \"auto\" or a number, found \"{other}\""))),
        }
    }
}

/// ModelThreads that are worth their messages: they are taken one by one as rates grow, which few reach.
const AUTO_MAX: usize = 8;

impl ModelThreadCount {
    /// How many, on a machine with so many cores. Control and the RankThread need cores, too: where there are not
    /// three, every hop between threads costs more than the work itself.
    fn of(self, policy: Policy, cores: usize) -> u16 {
        match self {
            Self::Fixed(count) => count,
            Self::Auto if policy.needs_one_queue() => 1,
            Self::Auto => cores.saturating_sub(2).clamp(1, AUTO_MAX) as u16,
        }
    }
}

/// The network budget in microseconds: what the scheduler plans with, so better too large than too small.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// From the scheduler to a backend.
    pub ctrl_us: f64,
    /// To read one task's input.
    pub data_us_per_request: f64,
    /// What each megabyte of a task's input adds to that.
    pub data_us_per_megabyte: f64,
    /// From the end of execution to the client.
    pub resp_us: f64,
}

impl Default for Network {
    fn default() -> Self {
        Self { ctrl_us: 100.0, data_us_per_request: 20.0, data_us_per_megabyte: 1000.0, resp_us: 1000.0 }
    }
}

/// What the number of GPUs that are needed is worked out with ([`crate::advice`]).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Advice {
    /// Loads are averages over about so long, and nothing is said before. In milliseconds.
    pub window_ms: u64,
    /// What a new GPU takes to come, from the wish to the first batch: one is given up once it was not needed for so
    /// long. In milliseconds.
    pub gpu_comes_after_ms: u64,
    /// Milliseconds of a request's latency that a millisecond of GPU time is worth, where `gpu_price` is 0.
    pub gpu_price: f64,
}

impl Default for Advice {
    fn default() -> Self {
        let AdviceConfig { window, gpu_comes_after, gpu_price } = AdviceConfig::default();
        let ms = |span: Span| (span.as_nanos() / 1_000_000) as u64;
        Self { window_ms: ms(window), gpu_comes_after_ms: ms(gpu_comes_after), gpu_price }
    }
}

impl Advice {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a scheduler takes it.
    ///
    /// # Errors
    /// If a key is wrong.
    pub fn check(&self) -> Result<(), RunError> {
        self.checked().map(drop)
    }

    fn checked(&self) -> Result<AdviceConfig, RunError> {
        let &Self { window_ms, gpu_comes_after_ms, gpu_price } = self;
        let wrong = |key, expected, found: String| Err(RunError::Advice { key, expected, found });
        match () {
            () if !(10_000..=3_600_000).contains(&window_ms) => {
                wrong("window_ms", "10000 to 3600000", window_ms.to_string())
            }
            () if gpu_comes_after_ms > 86_400_000 => {
                wrong("gpu_comes_after_ms", "0 to 86400000", gpu_comes_after_ms.to_string())
            }
            () if gpu_price.is_nan() || gpu_price < 0.0 => {
                wrong("gpu_price", "a number from 0 to inf", gpu_price.to_string())
            }
            () => {
                let span = |ms: u64| Span::from_millis(ms as i64);
                Ok(AdviceConfig { window: span(window_ms), gpu_comes_after: span(gpu_comes_after_ms), gpu_price })
            }
        }
    }
}

/// How models are placed on backends that leave it to the scheduler ([`crate::placer`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Sub-clusters that backends are dealt to. All backends of one host the same models.
    pub sub_clusters: u16,
    /// How often better places are looked for. In milliseconds.
    #[serde(default = "default_epoch_ms")]
    pub epoch_ms: u64,
    /// Models that may move in an epoch.
    #[serde(default = "default_moves_max")]
    pub moves_max: u32,
    /// Requests a second that a sub-cluster takes at most, if there is a bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_max_rps: Option<f64>,
    /// Weights that a sub-cluster hosts at most, in megabytes (10^6 bytes), if there is a bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max_mb: Option<f64>,
    /// What an imbalance of memory weighs beside one of rates.
    #[serde(default = "default_memory_weight")]
    pub memory_weight: f64,
    /// Models that must be in a sub-cluster, from 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pins: BTreeMap<String, u16>,
}

fn default_epoch_ms() -> u64 {
    120_000
}

fn default_moves_max() -> u32 {
    8
}

fn default_memory_weight() -> f64 {
    1.0
}

impl Placement {
    /// As a scheduler takes it.
    ///
    /// # Errors
    /// If a key is wrong.
    pub fn checked(&self) -> Result<PlacementConfig, RunError> {
        let Self { sub_clusters, epoch_ms, moves_max, rate_max_rps, memory_max_mb, memory_weight, ref pins } = *self;
        let wrong =
            |key: &str, expected, found: String| Err(RunError::Placement { key: key.to_owned(), expected, found });
        let is_amount = |amount: Option<f64>| amount.is_none_or(|amount| amount > 0.0 && amount <= 1e9);
        let shown = |amount: Option<f64>| amount.map_or_else(String::new, |amount| amount.to_string());
        match () {
            () if !(1..=1_024).contains(&sub_clusters) => wrong("sub_clusters", "1 to 1024", sub_clusters.to_string()),
            () if !(1_000..=86_400_000).contains(&epoch_ms) => {
                wrong("epoch_ms", "1000 to 86400000", epoch_ms.to_string())
            }
            () if !(1..=10_000).contains(&moves_max) => wrong("moves_max", "1 to 10000", moves_max.to_string()),
            () if !is_amount(rate_max_rps) => wrong("rate_max_rps", "a number above 0, to 1e9", shown(rate_max_rps)),
            () if !is_amount(memory_max_mb) => wrong("memory_max_mb", "a number above 0, to 1e9", shown(memory_max_mb)),
            () if !(0.0..=1e6).contains(&memory_weight) => {
                wrong("memory_weight", "a number from 0 to 1e6", memory_weight.to_string())
            }
            () => match pins.iter().find(|(_, cluster)| **cluster >= sub_clusters) {
                Some((model, cluster)) => {
                    wrong(&format!("pins.{model}"), "a sub-cluster, from 0, below sub_clusters", cluster.to_string())
                }
                None => Ok(PlacementConfig {
                    sub_clusters,
                    epoch: Span::from_millis(epoch_ms as i64),
                    moves_max,
                    rate_max_rps,
                    memory_max_bytes: memory_max_mb.map(|megabytes| (megabytes * 1e6) as u64),
                    memory_weight,
                    pins: pins.clone(),
                }),
            },
        }
    }
}

fn default_drain_timeout_ms() -> u64 {
    DRAIN_TIMEOUT_MS
}

fn default_suspect_ms() -> f64 {
    SUSPECT_MS
}

fn default_policy() -> String {
    Policy::default().to_string()
}

/// Tasks that may wait for one model, unless the configuration says otherwise.
#[must_use]
pub fn default_queue_max() -> usize {
    16_384
}

/// Tasks that one frontend may have under way, unless the configuration says otherwise.
#[must_use]
pub fn default_tasks_per_frontend_max() -> usize {
    65_536
}

fn default_reestimate() -> bool {
    true
}

/// Why the scheduler stopped, or did not start.
#[derive(Debug, Error)]
pub enum RunError {
    /// The key `policy`.
    #[error("policy: {0}")]
    Policy(#[from] PolicyError),
    /// A time of the key `network`.
    #[error("network.{key} must be 0 to 1000000 us, found {found}")]
    Network {
        /// Which one.
        key: &'static str,
        /// What was given.
        found: f64,
    },
    /// A key of the table `advice`.
    #[error("advice.{key} must be {expected}, found {found}")]
    Advice {
        /// Which one.
        key: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// A key of the table `placement`.
    #[error("placement.{key} must be {expected}, found {found}")]
    Placement {
        /// Which one.
        key: String,
        /// What it may be.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// The key `model_threads`.
    #[error("model_threads must be \"auto\" or 1 to {max}, found {found}", max = ModelThreadId::COUNT_MAX)]
    ModelThreads {
        /// What was given.
        found: u16,
    },
    /// The key `cores`.
    #[error("cores: {0}")]
    Cores(String),
    /// The key `schedulers`.
    #[error("{0}")]
    Schedulers(String),
    /// The key `suspect_ms`.
    #[error("suspect_ms must be 1 to 10000, found {0}")]
    Suspect(f64),
    /// Other schedulers have gone on without this one.
    #[error("{0}")]
    Superseded(String),
    /// The sockets.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The table `admin`.
    #[error(transparent)]
    Admin(#[from] admin::AdminError),
    /// There is no memory for the heartbeat.
    #[error("there is no memory for the heartbeat: {0}")]
    Memory(std::io::Error),
    /// A thread could not be started.
    #[error("a thread of the scheduler could not be started: {0}")]
    Thread(std::io::Error),
    /// A thread ended, and the scheduler with it: a bug of ours, which its log tells of.
    #[error("the scheduler's thread {0} ended; see its log, and report it")]
    Ended(String),
}

impl Config {
    /// What the scheduler's state machines need to know, on a machine with so many cores.
    ///
    /// # Errors
    /// If a key is wrong.
    pub fn cluster_config(&self, cores: usize) -> Result<ClusterConfig, RunError> {
        // At most what is believed of members: `NETWORK_MAX`.
        let span = |key, us: f64| match us {
            0.0..=1e6 => Ok(Span::from_millis_f64(us / 1e3)),
            _ => Err(RunError::Network { key, found: us }),
        };
        let policy = Policy::of_cluster(&self.policy)?.with_gpu_price(self.gpu_price)?;
        policy.check_gpu_prices(&self.gpu_prices)?;
        let model_threads = self.model_threads.of(policy, cores);
        if !(1..=ModelThreadId::COUNT_MAX).contains(&model_threads) {
            return Err(RunError::ModelThreads { found: model_threads });
        }
        if model_threads > 1 && policy.needs_one_queue() {
            return Err(PolicyError::OneQueue(self.policy.clone()).into());
        }
        Ok(ClusterConfig {
            policy,
            budget: NetworkBudget {
                ctrl: span("ctrl_us", self.network.ctrl_us)?,
                data_per_task: span("data_us_per_request", self.network.data_us_per_request)?,
                jitter: TIMERS_LATE,
            },
            data_per_megabyte: span("data_us_per_megabyte", self.network.data_us_per_megabyte)?,
            resp: span("resp_us", self.network.resp_us)?,
            queue_max: self.queue_max,
            tasks_per_frontend_max: self.tasks_per_frontend_max,
            reestimate: self.reestimate,
            model_threads,
            addresses: Vec::new(),
            succession: self.succession()?,
            first_id: 0,
            gpu_prices: self.gpu_prices.clone(),
            advice: self.advice.checked()?,
            placement: self.placement.as_ref().map(Placement::checked).transpose()?,
        })
    }

    /// Its place among the schedulers.
    ///
    /// # Errors
    /// If `schedulers` or `suspect_ms` is wrong.
    pub(crate) fn succession(&self) -> Result<SuccessionConfig, RunError> {
        if !(1.0..=10_000.0).contains(&self.suspect_ms) {
            return Err(RunError::Suspect(self.suspect_ms));
        }
        let suspect = Span::from_millis_f64(self.suspect_ms);
        if self.schedulers.is_empty() {
            return Ok(SuccessionConfig { suspect, ..SuccessionConfig::ALONE });
        }
        let list = transport::scheduler_list(None, &self.schedulers).map_err(RunError::Schedulers)?;
        let rank = list.iter().position(|address| *address == self.listen).ok_or_else(|| {
            let expected = format!("expected listen, which is {}, among them", self.listen);
            RunError::Schedulers(format!("schedulers: found {} others, {expected}", list.len()))
        })?;
        Ok(SuccessionConfig { rank: rank as u16, schedulers: list.len() as u16, suspect })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(keys: &str) -> Result<ClusterConfig, String> {
        let text = format!("listen = \"127.0.0.1:1\"\nsecret = \"known to the cluster\"\n{keys}");
        let config: Config = toml::from_str(&text).map_err(|error| error.to_string())?;
        let again: Config = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
        assert_eq!(again.model_threads, config.model_threads, "it reads as it was written");
        config.cluster_config(6).map_err(|error| error.to_string())
    }

    #[test]
    fn model_threads_follow_the_cores_and_the_policy() {
        assert_eq!(config("").unwrap().model_threads, 4);
        assert_eq!(config("model_threads = \"auto\"").unwrap().model_threads, 4);
        assert_eq!(config("model_threads = 2").unwrap().model_threads, 2);
        assert_eq!(config("policy = \"clockwork\"").unwrap().model_threads, 1);
        assert_eq!(ModelThreadCount::Auto.of(Policy::default(), 2), 1);
        assert_eq!(ModelThreadCount::Auto.of(Policy::default(), 64), 8);
    }

    #[test]
    fn wrong_keys_say_what_is_expected() {
        let error = |keys: &str| config(keys).unwrap_err();
        assert_eq!(error("model_threads = 0"), "model_threads must be \"auto\" or 1 to 256, found 0");
        assert_eq!(
            error("model_threads = 2\npolicy = \"nexus\""),
            "policy: policy nexus needs one queue for all models, so model_threads must be 1"
        );
        assert_eq!(error("gpu_price = -1"), "policy: gpu_price must be a number from 0 to inf, found -1");
        assert_eq!(error("gpu_price = nan"), "policy: gpu_price must be a number from 0 to inf, found NaN");
        assert_eq!(
            error("policy = \"eager\"\ngpu_price = 4"),
            "policy: gpu_price and gpu_prices need the policy downbeat, found eager"
        );
        let eager = "policy = \"eager\"\n[gpu_prices]\nm = 1";
        assert_eq!(error(eager), "policy: gpu_price and gpu_prices need the policy downbeat, found eager");
        for (price, found) in [("-0.5", "-0.5"), ("nan", "NaN")] {
            let expected = format!("policy: gpu_prices.m must be a number from 0 to inf, found {found}");
            let keys = format!("[gpu_prices]\nm = {price}");
            assert_eq!(config(&keys).unwrap_err().to_string(), expected);
        }
        let prices = config("gpu_price = 4\n[gpu_prices]\nm = inf\nn = 0").unwrap().gpu_prices;
        assert_eq!(prices, [("m".to_owned(), f64::INFINITY), ("n".to_owned(), 0.0)].into());
        assert_eq!(config("gpu_price = 4").unwrap().policy.to_string(), "downbeat:gpu_price=4");
        assert_eq!(config("gpu_price = inf").unwrap().policy.to_string(), "downbeat:gpu_price=inf");
        let placement = |keys: &str| error(&format!("[placement]\nsub_clusters = 2\n{keys}"));
        assert_eq!(placement("moves_max = 0"), "placement.moves_max must be 1 to 10000, found 0");
        assert_eq!(placement("epoch_ms = 10"), "placement.epoch_ms must be 1000 to 86400000, found 10");
        let rate = "placement.rate_max_rps must be a number above 0, to 1e9, found 0";
        assert_eq!(placement("rate_max_rps = 0"), rate);
        let memory = "placement.memory_max_mb must be a number above 0, to 1e9, found NaN";
        assert_eq!(placement("memory_max_mb = nan"), memory);
        let weight = "placement.memory_weight must be a number from 0 to 1e6, found -1";
        assert_eq!(placement("memory_weight = -1"), weight);
        let pin = "placement.pins.m must be a sub-cluster, from 0, below sub_clusters, found 2";
        assert_eq!(placement("pins = { m = 2 }"), pin);
        assert!(placement("pins = { m = 0, m = 1 }").contains("duplicate key"), "a model has one pin");
        assert_eq!(error("[placement]\nsub_clusters = 0"), "placement.sub_clusters must be 1 to 1024, found 0");
        assert!(error("[placement]\nmoves_max = 3").contains("missing field `sub_clusters`"));
        let advice = |keys: &str| error(&format!("[advice]\n{keys}"));
        assert_eq!(advice("window_ms = 9999"), "advice.window_ms must be 10000 to 3600000, found 9999");
        let late = "advice.gpu_comes_after_ms must be 0 to 86400000, found 86400001";
        assert_eq!(advice("gpu_comes_after_ms = 86400001"), late);
        assert_eq!(advice("gpu_price = -1"), "advice.gpu_price must be a number from 0 to inf, found -1");
        assert!(advice("window = 5").contains("unknown field `window`"), "{}", advice("window = 5"));
        let keys = "[advice]\nwindow_ms = 30000\ngpu_comes_after_ms = 0\ngpu_price = 4";
        let (window, gpu_comes_after) = (Span::from_millis(30_000), Span::ZERO);
        assert_eq!(config(keys).unwrap().advice, AdviceConfig { window, gpu_comes_after, gpu_price: 4.0 });
        assert_eq!(config("").unwrap().advice, AdviceConfig::default());
        let short = toml::from_str::<Config>("listen = '127.0.0.1:1'\nsecret = 'hush'").err().unwrap().to_string();
        assert!(short.contains("secret: found 4 bytes, expected at least 16"), "{short}");
        assert!(error("model_threads = \"many\"").contains("expected \"auto\" or a number"));
    }
}
