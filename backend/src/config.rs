//! A backend's configuration file, and what it says about where models go.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use proto::LatencyProfile;
use repository::{Executor, Model, Repository};
use serde::{Deserialize, Serialize};
use transport::{ArmName, Faults, TlsFiles, VerbsSettings};

use crate::drive::BackendError;

/// GPUs that one backend can offer: each has a thread and staging memory.
pub const GPUS_MAX: u32 = 64;

/// The default of [`Config::drain_timeout_ms`]: orchestrators kill after 30 s.
pub const DRAIN_TIMEOUT_MS: u64 = 25_000;

/// How a backend is started.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The bootstrap listener of the scheduler, `ip:port`, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<SocketAddr>,
    /// Those of the schedulers, if there are several. Exactly one of the two keys is to be there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedulers: Vec<SocketAddr>,
    /// The network: `soft`, or `verbs:DEVICE`.
    #[serde(default)]
    pub arm: ArmName,
    /// Where packets come from and arrive. Without it, the soft arm takes a random loopback address, and a verbs device
    /// its first that others can route to.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// Whether other processes of this user have the same `address`; all of them must say so. Soft arm only.
    #[serde(default)]
    pub shared_address: bool,
    /// How the queue pairs of a verbs device are set up.
    #[serde(default)]
    pub verbs: VerbsSettings,
    /// What all roles of the cluster share; at least [`SECRET_BYTES_MIN`](transport::SECRET_BYTES_MIN) bytes.
    #[serde(deserialize_with = "transport::deserialize_secret")]
    pub secret: String,
    /// The model repository.
    pub repository: PathBuf,
    /// Whether a model that cannot be loaded ends the backend; otherwise the others are served.
    #[serde(default)]
    pub strict: bool,
    /// GPUs to offer, 1 to [`GPUS_MAX`].
    #[serde(default = "one")]
    pub gpus: u32,
    /// Which models are loaded on which GPUs (by index). Without it, every model of the repository on every GPU.
    #[serde(default)]
    pub placement: BTreeMap<String, Vec<u32>>,
    /// Runs no model: each is emulated with this latency instead.
    #[serde(default)]
    pub emulate: Option<Emulate>,
    /// Bytes of READs that may be outstanding at once; 0 lets the transport choose.
    #[serde(default)]
    pub read_budget_bytes: usize,
    /// Connections at once: the schedulers with their ModelThreads, and one to each frontend.
    #[serde(default = "default_connections_max")]
    pub connections_max: usize,
    /// How long a backend that is asked to end finishes its plans.
    #[serde(default = "default_drain_timeout_ms")]
    pub drain_timeout_ms: u64,
    /// Faults injected into our packets, for tests.
    #[serde(default)]
    pub faults: Faults,
    /// Certificates, with which members also prove themselves to each other by mutual TLS.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
}

/// l(b) = `alpha_ms` * b + `beta_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Emulate {
    /// Milliseconds for each task.
    pub alpha_ms: f64,
    /// Milliseconds for each batch.
    pub beta_ms: f64,
}

fn one() -> u32 {
    1
}

fn default_drain_timeout_ms() -> u64 {
    DRAIN_TIMEOUT_MS
}

/// Connections at once, unless the configuration says otherwise.
#[must_use]
pub fn default_connections_max() -> usize {
    256
}

/// A model and the GPUs that host it.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// The model, with the executor that the configuration wants for it.
    pub model: Model,
    /// Ascending, none twice, at least one.
    pub gpu_indexes: Vec<u32>,
}

impl Config {
    /// Where the schedulers are, by whichever key says so.
    ///
    /// # Errors
    /// As [`transport::scheduler_list`].
    pub fn scheduler_list(&self) -> Result<Vec<SocketAddr>, BackendError> {
        transport::scheduler_list(self.scheduler, &self.schedulers).map_err(BackendError::Config)
    }

    /// Applies `gpus`, `placement` and `emulate` to the models of the repository.
    ///
    /// # Errors
    /// If one of these keys names something that there is not.
    pub fn place(&self, Repository { models, refused }: Repository) -> Result<Vec<Placed>, BackendError> {
        if !(1..=GPUS_MAX).contains(&self.gpus) {
            return Err(BackendError::Config(format!("gpus: found {}, expected 1 to {GPUS_MAX}", self.gpus)));
        }
        let names = || models.iter().map(|model| &model.name).chain(refused.iter().map(|refused| &refused.name));
        if let Some(unknown) = self.placement.keys().find(|placed| names().all(|name| name != *placed)) {
            let names: Vec<&str> = names().map(String::as_str).collect();
            let known = names.join(", ");
            return Err(BackendError::Config(format!("placement: found model {unknown}, expected one of: {known}")));
        }
        let placed = models.into_iter().map(|model| self.place_one(model));
        let placed: Vec<Placed> = placed.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        if placed.is_empty() {
            let folder = self.repository.display();
            let why = refused.first().map_or(String::new(), |refused| format!(": {}", refused.reason));
            let text = format!("repository: found no model to serve in {folder}, expected at least one{why}");
            return Err(BackendError::Config(text));
        }
        Ok(placed)
    }

    /// Applies `gpus`, `placement` and `emulate` to one model; `None` if no GPU is to host it.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn place_one(&self, mut model: Model) -> Result<Option<Placed>, BackendError> {
        let Some(gpu_indexes) = self.gpu_indexes(&model.name)? else { return Ok(None) };
        if let Some(Emulate { alpha_ms, beta_ms }) = self.emulate {
            let profile = LatencyProfile::linear(alpha_ms, beta_ms, model.max_batch)
                .map_err(|error| BackendError::Config(format!("emulate: {error}")))?;
            model.executor = Executor::Emulated { profile };
        }
        Ok(Some(Placed { model, gpu_indexes }))
    }

    /// The GPUs that host a model; `None` if it is not to be loaded.
    fn gpu_indexes(&self, name: &str) -> Result<Option<Vec<u32>>, BackendError> {
        if self.placement.is_empty() {
            return Ok(Some((0..self.gpus).collect()));
        }
        let Some(indexes) = self.placement.get(name) else { return Ok(None) };
        let mut indexes = indexes.clone();
        indexes.sort_unstable();
        indexes.dedup();
        if indexes.is_empty() || indexes.iter().any(|&index| index >= self.gpus) {
            let (found, last) = (&self.placement[name], self.gpus - 1);
            let text = format!("placement.{name}: found {found:?}, expected indexes of GPUs, 0 to {last} (key gpus)");
            return Err(BackendError::Config(text));
        }
        Ok(Some(indexes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::Span;

    fn config(text: &str) -> Result<Config, toml::de::Error> {
        let required = "scheduler = '127.0.0.1:7000'\nsecret = 'known to the cluster'\nrepository = 'models'\n";
        toml::from_str(&format!("{required}{text}"))
    }

    fn models() -> Vec<Model> {
        let model = |name: &str| Model {
            name: name.into(),
            version: "1".into(),
            inputs: vec![],
            outputs: vec![],
            max_batch: 4,
            rows_max: 4,
            is_batched: true,
            slo: Span::from_millis(20),
            priorities: repository::Priorities::default(),
            executor: Executor::Onnx { file: "model.onnx".into(), profile: None },
            labels: vec![],
            image: None,
            configuration: repository::Configuration::default(),
        };
        vec![model("a"), model("b")]
    }

    /// The models, and one that is refused.
    fn repository() -> Repository {
        let refused = repository::Refused { name: "bad".into(), reason: "bad/config.pbtxt: dims: found 0".into() };
        Repository { models: models(), refused: vec![refused] }
    }

    fn placed(text: &str) -> Result<Vec<(String, Vec<u32>)>, String> {
        let placed = config(text).unwrap().place(repository()).map_err(|error| error.to_string())?;
        Ok(placed.into_iter().map(|placed| (placed.model.name, placed.gpu_indexes)).collect())
    }

    #[test]
    fn every_model_goes_everywhere_unless_told_otherwise() {
        assert_eq!(placed("gpus = 2").unwrap(), [("a".into(), vec![0, 1]), ("b".into(), vec![0, 1])]);
        assert_eq!(placed("gpus = 3\nplacement = { b = [2, 0, 2] }").unwrap(), [("b".into(), vec![0, 2])]);
    }

    #[test]
    fn what_is_not_there_is_named_with_its_key() {
        assert_eq!(placed("gpus = 0").unwrap_err(), "gpus: found 0, expected 1 to 64");
        assert_eq!(
            placed("placement = { c = [0] }").unwrap_err(),
            "placement: found model c, expected one of: a, b, bad"
        );
        assert_eq!(placed("placement = { a = [0], bad = [0] }").unwrap(), [("a".into(), vec![0])]);
        let outside = placed("gpus = 2\nplacement = { a = [2] }").unwrap_err();
        assert_eq!(outside, "placement.a: found [2], expected indexes of GPUs, 0 to 1 (key gpus)");
        let empty = config("").unwrap().place(Repository { models: vec![], ..repository() });
        let expected = "repository: found no model to serve in models, expected at least one: bad/config.pbtxt: dims: \
                        found 0";
        assert_eq!(empty.unwrap_err().to_string(), expected);
        let short = "scheduler = '127.0.0.1:7000'\nrepository = 'models'\nsecret = 'hush'\n";
        let short = toml::from_str::<Config>(short).err().unwrap().to_string();
        assert!(short.contains("line 3") && short.contains("secret: found 4 bytes, expected at least 16"), "{short}");
        assert!(config("gpu = 1").err().unwrap().to_string().contains("unknown field `gpu`"));
    }

    #[test]
    fn one_key_names_one_scheduler_and_the_other_several_and_files_round_trip() {
        let rest = "secret = 'known to the cluster'\nrepository = 'models'\n";
        let list = |keys: &str| {
            let config: Config = toml::from_str(&format!("{keys}\n{rest}")).unwrap();
            let again: Config = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
            let lists = [config, again].map(|config| config.scheduler_list().map_err(|error| error.to_string()));
            assert_eq!(lists[0], lists[1]);
            lists[0].clone().map(|list| list.iter().map(SocketAddr::port).collect::<Vec<_>>())
        };
        assert_eq!(list("scheduler = '127.0.0.1:7400'"), Ok(vec![7400]));
        assert_eq!(list("schedulers = ['127.0.0.1:7401', '127.0.0.1:7400']"), Ok(vec![7401, 7400]));
        let error = list("scheduler = '127.0.0.1:7400'\nschedulers = ['127.0.0.1:7401']").unwrap_err();
        assert_eq!(error, "scheduler, schedulers: found both keys, expected one of them");
        assert_eq!(list("").unwrap_err(), "scheduler, schedulers: found no address, expected one of these keys");
        let error = list("schedulers = ['127.0.0.1:7401', '127.0.0.1:7401']").unwrap_err();
        assert_eq!(error, "schedulers: found 127.0.0.1:7401 twice, expected each address once");
    }

    #[test]
    fn emulation_replaces_executors_and_is_checked() {
        let emulated = config("emulate = { alpha_ms = 1, beta_ms = 2 }").unwrap().place(repository()).unwrap();
        let Executor::Emulated { profile } = &emulated[0].model.executor else { panic!("{emulated:?}") };
        assert_eq!((profile.latency(4), profile.max_batch()), (Span::from_millis(6), 4));
        let negative = placed("emulate = { alpha_ms = -1, beta_ms = 2 }").unwrap_err();
        assert!(negative.starts_with("emulate: l("), "{negative}");
    }

    #[test]
    fn faults_are_optional_one_by_one() {
        assert_eq!(config("faults = { loss = 0.02 }").unwrap().faults, Faults { loss: 0.02, ..Faults::default() });
        assert_eq!(config("").unwrap().faults, Faults::default());
    }
}
