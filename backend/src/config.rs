//! A backend's configuration file, and what it says about where models go.

mod gpus;
mod lanes;
pub mod onnxruntime;

use std::{collections::BTreeMap, path::PathBuf};

use proto::{
    LatencyProfile, Span, Weights,
    weights::{PAGE_BYTES, PAGES_MAX},
};
use repository::{Executor, Model, Precision, Processor, Repository, SLO_MAX, Wanted};
use serde::{Deserialize, Serialize};
use transport::{Address, NetworkConfig};

use crate::error::BackendError;
pub use gpus::{GpuName, Gpus};
pub use lanes::Lanes;
pub use onnxruntime::OnnxRuntime;
use onnxruntime::Provider;

/// Slower is no PCIe and no disk, and faster none that there is.
const GBPS_MIN: f64 = 0.1;
const GBPS_MAX: f64 = 1e5;
/// The most that a batch of a model which comes later may take, for its inputs and for its answers.
const STAGING_BYTES_MAX: usize = 4 << 30;

/// What [`Config::placement`] calls the models that it does not name.
pub const OTHERS: &str = "*";

/// The default of [`Config::pcie_gbps`]: ResNet50's 102.3 MB in 8.33 ms (Clockwork, appendix A).
pub const PCIE_GBPS: f64 = 98.25;

/// The default of [`Config::disk_gbps`]: the 3.5 GB/s of an NVMe drive.
pub const DISK_GBPS: f64 = 28.0;

/// The default of [`Config::drain_timeout_ms`]: orchestrators kill after 30 s.
pub const DRAIN_TIMEOUT_MS: u64 = 25_000;

/// How a backend is started.
#[derive(Clone, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Config {
    /// The bootstrap listener of the scheduler, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<Address>,
    /// Those of the schedulers, if there are several. Exactly one of the two keys is to be there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedulers: Vec<Address>,
    /// The model repository.
    pub repository: PathBuf,
    /// Whether a model that cannot be loaded ends the backend; otherwise the others are served.
    #[serde(default)]
    pub strict: bool,
    /// A folder for files that clients' loads bring along, the same for all frontends and backends; without it, such
    /// loads fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_files: Option<PathBuf>,
    /// What computes ONNX models that do not say it themselves.
    #[serde(default)]
    pub executor: Processor,
    /// How numbers of type FP32 are multiplied on GPUs, of models that do not say it themselves.
    #[serde(default)]
    pub precision: Precision,
    /// GPUs to offer, 1 to [`crate::limits::GPUS_MAX`]. Without `executor = "cuda"` they are only threads, and names
    /// mean nothing.
    #[serde(default = "one")]
    pub gpus: Gpus,
    /// Where models run that call others, beside the GPUs: as many as there are processes of such models, unless this
    /// says otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<u32>,
    /// Whether other backends use these GPUs, too; all of them must say so, and predictions will be worse.
    #[serde(default)]
    pub share_gpu: bool,
    /// Whether the RDMA device writes inputs straight into GPUs' memory, where both let it.
    #[serde(default)]
    pub gpu_direct: bool,
    /// How ONNX Runtime runs the models that it does.
    #[serde(default)]
    pub onnxruntime: OnnxRuntime,
    /// Which models are loaded on which GPUs.
    #[serde(default)]
    pub placement: Placement,
    /// Models that are loaded from the start, of those that are placed; the others are once a client wants them.
    /// Without it, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_models: Option<Vec<String>>,
    /// Runs no model: each is emulated with this latency instead.
    #[serde(default)]
    pub emulate: Option<Emulate>,
    /// Memory of each GPU for models' weights, in megabytes (10^6 bytes), if it holds but a part of what is hosted: the
    /// scheduler decides what is in it. Without the key, all weights are there all the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory_mb: Option<f64>,
    /// Models that stay in the memory of all GPUs that host them, if that is short.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pinned: Vec<String>,
    /// Gigabits a second (10^9) from host memory to each GPU: how long a load takes of a model without `load_ms`.
    #[serde(default = "default_pcie_gbps")]
    pub pcie_gbps: f64,
    /// Host memory for models' weights, in megabytes (10^6 bytes), if it holds but a part of what is hosted: loads of
    /// the others read them from disk first. Without the key, all weights are there all the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_mb: Option<f64>,
    /// Gigabits a second (10^9) from disk to host memory, for each GPU at once: how long that takes of a model whose
    /// weights are not in a file that can be read again.
    #[serde(default = "default_disk_gbps")]
    pub disk_gbps: f64,
    /// What inputs of a batch, and what its answers may take at most if the model comes while this backend runs; there
    /// are four buffers with both for each GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staging_bytes: Option<usize>,
    /// Bytes of READs that may be outstanding at once; 0 lets the transport choose.
    #[serde(default)]
    pub read_budget_bytes: usize,
    /// Connections at once: the schedulers with their ModelThreads, and one to each frontend.
    #[serde(default = "default_connections_max")]
    pub connections_max: usize,
    /// Where health and metrics are told, those of its GPUs among them, if anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<admin::Config>,
    /// Lines of metrics that models' programs may have of their own, in all: families, metrics and buckets. With 0 they
    /// are taken and not kept.
    #[serde(default = "default_program_metrics")]
    pub program_metrics: usize,
    /// How long a backend that is asked to end finishes its plans.
    #[serde(default = "default_drain_timeout_ms")]
    pub drain_timeout_ms: u64,
    /// The network, and the cluster's secret.
    #[serde(skip)]
    pub network: NetworkConfig,
}

transport::flatten_network!(Config, network);

/// l(b) = `alpha_ms` * b + `beta_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Emulate {
    /// Milliseconds for each task.
    pub alpha_ms: f64,
    /// Milliseconds for each batch.
    pub beta_ms: f64,
}

fn one() -> Gpus {
    Gpus::Count(1)
}

/// From host memory to a GPU, unless the configuration says otherwise.
#[must_use]
pub fn default_pcie_gbps() -> f64 {
    PCIE_GBPS
}

/// From disk to host memory, unless the configuration says otherwise.
#[must_use]
pub fn default_disk_gbps() -> f64 {
    DISK_GBPS
}

fn default_drain_timeout_ms() -> u64 {
    DRAIN_TIMEOUT_MS
}

/// Room for [`Config::program_metrics`] unless it says otherwise: a page of some hundred kilobytes at most.
#[must_use]
pub fn default_program_metrics() -> usize {
    1_000
}

/// Connections at once, unless the configuration says otherwise.
#[must_use]
pub fn default_connections_max() -> usize {
    256
}

/// The key `placement`: a table, or `"auto"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"auto\" or a table of models with indexes of GPUs")]
pub enum Placement {
    /// Every model on every GPU at the start; then the scheduler chooses.
    Auto(Auto),
    /// These models on these GPUs, by their indexes; [`OTHERS`] stands for all that are not named. An empty table is
    /// every model on every GPU.
    Table(BTreeMap<String, Vec<u32>>),
}

/// The word `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// It.
    Auto,
}

impl Default for Placement {
    fn default() -> Self {
        Self::Table(BTreeMap::new())
    }
}

impl Placement {
    /// Whether the scheduler chooses.
    #[must_use]
    pub fn is_auto(&self) -> bool {
        matches!(self, Self::Auto(_))
    }

    fn table(&self) -> &BTreeMap<String, Vec<u32>> {
        static NONE: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        match self {
            Self::Auto(_) => &NONE,
            Self::Table(table) => table,
        }
    }
}

/// A model and the GPUs that host it.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// The model, with the executor that the configuration wants for it.
    pub model: Model,
    /// Ascending, none twice, at least one.
    pub gpu_indexes: Vec<u32>,
    /// What it takes in their memory, if that is short.
    pub weights: Weights,
    /// Whether it is there all the time.
    pub is_pinned: bool,
    /// Whether `placement` has no place for it.
    pub is_guest: bool,
}

/// What a model claims of the memory of GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// Which.
    pub gpu_indexes: &'a [u32],
    /// How much.
    pub pages: u32,
    /// Whether all the time.
    pub is_pinned: bool,
}

impl Placed {
    /// How much of GPUs' memory it takes is only known once it is there: `None`.
    fn claim(&self) -> Option<Claim<'_>> {
        let Self { gpu_indexes, weights, is_pinned, .. } = self;
        let claim = Claim { gpu_indexes, pages: weights.pages, is_pinned: *is_pinned };
        (!is_on_gpus(&self.model)).then_some(claim)
    }
}

/// Whether GPUs run it, whose memory its weights take as they are lowered, and not as its file has them.
pub(crate) fn is_on_gpus(model: &Model) -> bool {
    let cuda = Some(Processor::Cuda);
    matches!(model.executor, Executor::Onnx { wanted, .. } if wanted.processor == cuda)
}

/// Pages in so many megabytes; `None` if there is less than one, or more than there can be.
fn pages(mb: f64) -> Option<u32> {
    let pages = (mb * 1e6).round() / PAGE_BYTES as f64;
    // Not a number is neither.
    (1.0..=f64::from(PAGES_MAX)).contains(&pages).then_some(pages as u32)
}

fn wrong_pages(key: &str, found: f64) -> BackendError {
    let (least, most) = (PAGE_BYTES as f64 / 1e6, f64::from(PAGES_MAX) * PAGE_BYTES as f64 / 1e6);
    BackendError::Config(format!("{key}: found {found}, expected {least} (a page) to {most}"))
}

/// How long bytes take at so many gigabits a second.
fn transfer(key: &str, gbps: f64, bytes: u64) -> Result<Span, BackendError> {
    if !(GBPS_MIN..=GBPS_MAX).contains(&gbps) {
        return Err(BackendError::Config(format!("{key}: found {gbps}, expected {GBPS_MIN} to {GBPS_MAX}")));
    }
    Ok(Span::from_millis_f64(bytes as f64 * 8.0 / (gbps * 1e6)).clamp(Span(1), SLO_MAX))
}

impl Config {
    /// Where the schedulers are, by whichever key says so.
    ///
    /// # Errors
    /// As [`transport::scheduler_list`].
    pub fn scheduler_list(&self) -> Result<Vec<Address>, BackendError> {
        transport::scheduler_list(self.scheduler.as_ref(), &self.schedulers).map_err(BackendError::Config)
    }

    /// Pages for weights in each GPU's memory; `None` if all weights are there all the time.
    ///
    /// # Errors
    /// If there is less than a page, or more than there can be.
    pub fn memory_pages(&self) -> Result<Option<u32>, BackendError> {
        let checked = |mb| pages(mb).ok_or_else(|| wrong_pages("gpu_memory_mb", mb));
        self.gpu_memory_mb.map(checked).transpose()
    }

    /// Pages for weights in host memory; `None` if all weights are there all the time.
    ///
    /// # Errors
    /// If there is less than a page, more than there can be, or GPUs' memory is not short.
    pub fn host_pages(&self) -> Result<Option<u32>, BackendError> {
        let Some(mb) = self.host_memory_mb else { return Ok(None) };
        if self.gpu_memory_mb.is_none() {
            let text = format!("host_memory_mb: found {mb} without gpu_memory_mb, expected both or neither");
            return Err(BackendError::Config(text));
        }
        pages(mb).map(Some).ok_or_else(|| wrong_pages("host_memory_mb", mb))
    }

    /// What a model takes in the memory of a GPU, if that is short.
    fn weights(&self, model: &Model) -> Result<Weights, BackendError> {
        let (Some(pages_max), host_pages) = (self.memory_pages()?, self.host_pages()?) else {
            return Ok(Weights::default());
        };
        let bytes = model.weights.bytes.unwrap_or(0);
        let copy = transfer("pcie_gbps", self.pcie_gbps, bytes)?;
        let read = transfer("disk_gbps", self.disk_gbps, bytes)?;
        if bytes == 0 {
            return Ok(Weights::default());
        }
        let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX);
        if is_on_gpus(model) {
            let read = host_pages.map_or(Span::ZERO, |_| read);
            return Ok(Weights { pages: pages.min(pages_max), load: copy, read });
        }
        if pages > pages_max {
            let (name, found) = (&model.name, bytes as f64 / 1e6);
            return Err(BackendError::Config(format!(
                "weights_mb of model {name}: found {found}, expected at most what {pages_max} pages of 16 MiB hold \
                 (key gpu_memory_mb)"
            )));
        }
        self.check_weights(&model.name, pages)?;
        let read = host_pages.map_or(Span::ZERO, |_| read);
        Ok(Weights { pages, load: model.weights.load.unwrap_or(copy), read })
    }

    /// Whether host memory has room for a model's weights wherever they are loaded at once.
    ///
    /// # Errors
    /// If not, or a key of memory is wrong.
    pub fn check_weights(&self, name: &str, pages: u32) -> Result<(), BackendError> {
        let host_pages = self.host_pages()?;
        // Each of them may load it, or one as large, at once.
        let at_once = u64::from(pages) * u64::from(self.gpus.count());
        if let (Some(found), Some(host_pages)) = (self.host_memory_mb, host_pages)
            && at_once > u64::from(host_pages)
        {
            let expected = at_once as f64 * PAGE_BYTES as f64 / 1e6;
            return Err(BackendError::Config(format!(
                "host_memory_mb: found {found}, expected at least {expected}: what model {name} takes of it when each \
                 GPU is loaded"
            )));
        }
        Ok(())
    }

    /// Whether what is pinned fits each GPU, beside the largest model that is not.
    ///
    /// # Errors
    /// If not, or a key of memory is wrong.
    pub fn check_pinned<'a>(&self, claims: impl Iterator<Item = Claim<'a>>) -> Result<(), BackendError> {
        let Some(pages) = self.memory_pages()? else { return Ok(()) };
        let claims: Vec<Claim<'_>> = claims.collect();
        for gpu in 0..self.gpus.count() {
            let hosted = || claims.iter().filter(|claim| claim.gpu_indexes.contains(&gpu));
            let pinned: u64 = hosted().filter(|claim| claim.is_pinned).map(|claim| u64::from(claim.pages)).sum();
            let other = hosted().filter(|claim| !claim.is_pinned).map(|claim| claim.pages).max();
            let left = u64::from(pages.saturating_sub(other.unwrap_or(0)));
            if pinned > left {
                return Err(BackendError::Config(format!(
                    "pinned: found models of {pinned} pages of 16 MiB for GPU {gpu}, expected at most {left}: what \
                     gpu_memory_mb holds beside the largest of the others"
                )));
            }
        }
        Ok(())
    }

    /// Applies `gpus`, `placement`, `emulate` and memory to the models of the repository.
    ///
    /// # Errors
    /// If one of these keys names something that there is not.
    pub fn place(&self, Repository { models, ensembles, refused }: Repository) -> Result<Vec<Placed>, BackendError> {
        self.gpus.check()?;
        self.onnxruntime.check()?;
        if let Some(found) = self.staging_bytes.filter(|&bytes| bytes > STAGING_BYTES_MAX) {
            let text = format!("staging_bytes: found {found}, expected at most {STAGING_BYTES_MAX}");
            return Err(BackendError::Config(text));
        }
        let served = || models.iter().chain(&ensembles).map(|model| &model.name);
        let names = || served().chain(refused.iter().map(|refused| &refused.name));
        if let Some(unknown) =
            self.placement.table().keys().find(|&placed| placed != OTHERS && names().all(|name| name != placed))
        {
            let names: Vec<&str> = names().map(String::as_str).collect();
            let known = repository::listed(names.into_iter());
            return Err(BackendError::Config(format!("placement: found model {unknown}, expected one of: {known}")));
        }
        for (key, named) in [("load_models", self.load_models.as_deref()), ("pinned", Some(&self.pinned[..]))] {
            let unknown = named.into_iter().flatten().find(|named| names().all(|name| name != *named));
            if let Some(unknown) = unknown {
                let names: Vec<&str> = names().map(String::as_str).collect();
                let known = repository::listed(names.into_iter());
                return Err(BackendError::Config(format!("{key}: found {unknown}, expected some of: {known}")));
            }
        }
        let is_empty = models.is_empty() && refused.is_empty();
        let placed = models.into_iter().map(|model| self.place_one(model));
        let placed: Vec<Placed> = placed.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        // Models may come; what is there and cannot be served is a mistake.
        if placed.is_empty() && !is_empty {
            let folder = self.repository.display();
            let why = refused.first().map_or(String::new(), |refused| format!(": {}", refused.reason));
            let text = format!("repository: found no model to serve in {folder}, expected at least one{why}");
            return Err(BackendError::Config(text));
        }
        self.check_pinned(placed.iter().filter_map(Placed::claim))?;
        Ok(placed)
    }

    /// Whether a model is loaded from the start: all are, or it is named, or an ensemble that is asks it.
    #[must_use]
    pub fn loads_at_start(&self, name: &str, ensembles: &[Model]) -> bool {
        let Some(named) = &self.load_models else { return true };
        let asks = |face: &Model| {
            let steps = face.ensemble().into_iter().flat_map(|ensemble| &ensemble.steps);
            named.contains(&face.name) && steps.clone().any(|step| step.model == name)
        };
        named.iter().any(|model| model == name) || ensembles.iter().any(asks)
    }

    /// Applies `gpus`, `placement`, `emulate` and memory to one model; `None` if no GPU is to host it.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn place_one(&self, model: Model) -> Result<Option<Placed>, BackendError> {
        let gpu_indexes = self.gpu_indexes(&model.name)?;
        gpu_indexes.map(|gpu_indexes| self.placed(model, gpu_indexes, false)).transpose()
    }

    /// The same of a model that is to be hosted whatever `placement` says: on all GPUs if it names it nowhere.
    ///
    /// # Errors
    /// As [`Self::place`].
    pub fn place_guest(&self, model: Model) -> Result<Placed, BackendError> {
        match self.gpu_indexes(&model.name)? {
            Some(gpu_indexes) => self.placed(model, gpu_indexes, false),
            None => self.placed(model, (0..self.gpus.count()).collect(), true),
        }
    }

    fn placed(&self, mut model: Model, gpu_indexes: Vec<u32>, is_guest: bool) -> Result<Placed, BackendError> {
        if let Some(Emulate { alpha_ms, beta_ms }) = self.emulate {
            let profile = LatencyProfile::linear(alpha_ms, beta_ms, model.max_batch)
                .map_err(|error| BackendError::Config(format!("emulate: {error}")))?;
            model.executor = Executor::Emulated { profile };
        }
        self.choose_processor(&mut model);
        let weights = self.weights(&model)?;
        let is_pinned = self.pinned.contains(&model.name);
        Ok(Placed { model, gpu_indexes, weights, is_pinned, is_guest })
    }

    /// What a model does not say of where and how it runs is as this backend is configured.
    fn choose_processor(&self, model: &mut Model) {
        let Executor::Onnx { wanted, .. } = &mut model.executor else { return };
        let processor = wanted.processor.unwrap_or(self.executor);
        let precision = wanted.precision.unwrap_or(self.precision);
        *wanted = Wanted { processor: Some(processor), precision: Some(precision) };
        self.keep_profile(model);
    }

    /// Drops what was measured ahead of time by something else than what computes the model.
    pub(crate) fn keep_profile(&self, model: &mut Model) {
        let Executor::Onnx { wanted, profile, .. } = &mut model.executor else { return };
        let (Some(processor), provider) = (wanted.processor, self.onnxruntime.provider) else { return };
        let is_known = |by: Processor| match processor {
            Processor::Auto => true,
            // It was measured on the CPU.
            Processor::Onnxruntime => by == processor && provider == Provider::Cpu,
            Processor::Cpu | Processor::Cuda => by == processor,
        };
        *profile = profile.take().filter(|(by, _)| is_known(*by));
    }

    /// The GPUs that host a model; `None` if it is not to be loaded.
    fn gpu_indexes(&self, name: &str) -> Result<Option<Vec<u32>>, BackendError> {
        let table = self.placement.table();
        if table.is_empty() {
            return Ok(Some((0..self.gpus.count()).collect()));
        }
        let Some(placed) = table.get(name).or_else(|| table.get(OTHERS)) else { return Ok(None) };
        let mut indexes = placed.clone();
        indexes.sort_unstable();
        indexes.dedup();
        if indexes.is_empty() || indexes.iter().any(|&index| index >= self.gpus.count()) {
            let last = self.gpus.count() - 1;
            let text = format!("placement.{name}: found {placed:?}, expected indexes of GPUs, 0 to {last} (key gpus)");
            return Err(BackendError::Config(text));
        }
        Ok(Some(indexes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::Span;
    use transport::Faults;

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
            queue: repository::QueuePolicies::default(),
            weights: repository::WeightsSize::default(),
            executor: Executor::Onnx {
                file: "model.onnx".into(),
                batching: repository::Batching::equal(1, 1),
                profile: None,
                wanted: Wanted::default(),
            },
            labels: vec![],
            image: None,
            configuration: repository::Configuration::default(),
            files: None,
        };
        vec![model("a"), model("b")]
    }

    /// The models, and one that is refused.
    fn only(model: Model) -> Repository {
        Repository { models: vec![model], ..Repository::default() }
    }

    fn repository() -> Repository {
        let reason = "bad/config.pbtxt: dims: found 0".into();
        let refused = repository::Refused { name: "bad".into(), version: String::new(), reason };
        Repository { models: models(), refused: vec![refused], ..Repository::default() }
    }

    fn placed(text: &str) -> Result<Vec<(String, Vec<u32>)>, String> {
        let placed = config(text).unwrap().place(repository()).map_err(|error| error.to_string())?;
        Ok(placed.into_iter().map(|placed| (placed.model.name, placed.gpu_indexes)).collect())
    }

    #[test]
    fn every_model_goes_everywhere_unless_told_otherwise() {
        assert_eq!(placed("gpus = 2").unwrap(), [("a".into(), vec![0, 1]), ("b".into(), vec![0, 1])]);
        assert_eq!(placed("gpus = 3\nplacement = { b = [2, 0, 2] }").unwrap(), [("b".into(), vec![0, 2])]);
        let others = placed("gpus = 3\nplacement = { b = [2], '*' = [0, 1] }").unwrap();
        assert_eq!(others, [("a".into(), vec![0, 1]), ("b".into(), vec![2])]);
    }

    #[test]
    fn gpus_are_counted_or_named() {
        let names = |text: &str| {
            let config = config(text).map_err(|error| error.message().to_owned())?;
            config.gpus.check().map_err(|error| error.to_string())?;
            let again: Config = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
            assert_eq!(again.gpus, config.gpus);
            Ok::<_, String>(config.gpus.names().iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(names(""), Ok("0".into()));
        assert_eq!(names("gpus = 2"), Ok("0 1".into()));
        assert_eq!(names("gpus = [3, 'GPU-5a', 'MIG-7']"), Ok("3 GPU-5a MIG-7".into()));
        assert_eq!(names("gpus = [1, 1]"), Err("gpus: found 1 twice, expected each GPU once".into()));
        assert_eq!(names("gpus = []"), Err("gpus: found 0, expected 1 to 64".into()));
        let expected = "gpus: found \"H200\", expected numbers, or names that begin with GPU- or MIG- (nvidia-smi -L)";
        assert_eq!(names("gpus = ['H200']"), Err(expected.into()));
        assert_eq!(("8".parse(), "GPU-5a".parse()), (Ok(GpuName::Number(8)), Ok(GpuName::Uuid("GPU-5a".into()))));
        assert!("H200".parse::<GpuName>().unwrap_err().contains("found \"H200\""));
    }

    #[test]
    fn models_run_where_they_say_or_else_where_the_backend_says() {
        let (cpu, cuda, runtime) = (Processor::Cpu, Processor::Cuda, Processor::Onnxruntime);
        let measured_by = |by: Processor, text: &str, own: Wanted| {
            let mut model = models().remove(0);
            let Executor::Onnx { wanted, profile, .. } = &mut model.executor else { panic!("{model:?}") };
            *wanted = own;
            *profile = Some((by, LatencyProfile::linear(1.0, 1.0, 4).unwrap()));
            let placed = config(text).unwrap().place(only(model)).unwrap().remove(0);
            let Executor::Onnx { wanted, profile, .. } = placed.model.executor else { panic!("it is onnx") };
            (wanted.processor.unwrap(), wanted.precision.unwrap(), profile.is_some())
        };
        let wanted = |text: &str, own| measured_by(cpu, text, own);
        let of_model = Wanted { processor: Some(cuda), precision: Some(Precision::Fp16) };
        let auto = Processor::Auto;
        assert_eq!(wanted("", Wanted::default()), (auto, Precision::Tf32, true), "the host decides");
        assert_eq!(wanted("executor = 'cpu'", Wanted::default()), (cpu, Precision::Tf32, true));
        assert_eq!(wanted("", of_model), (cuda, Precision::Fp16, false), "what was measured is of the CPU");
        let keys = "executor = 'cuda'\nprecision = 'fp32'";
        assert_eq!(wanted(keys, Wanted::default()), (cuda, Precision::Fp32, false));
        assert_eq!(wanted(keys, of_model), (cuda, Precision::Fp16, false));
        let own = Wanted { processor: Some(cpu), precision: None };
        assert_eq!(wanted(keys, own), (cpu, Precision::Fp32, true));
        let keys = "executor = 'onnxruntime'";
        assert_eq!(
            wanted(keys, Wanted::default()),
            (runtime, Precision::Tf32, false),
            "its profile was the embedded engine's"
        );
        let own = Wanted { processor: Some(runtime), precision: None };
        assert_eq!(measured_by(runtime, keys, Wanted::default()), (runtime, Precision::Tf32, true));
        assert_eq!(measured_by(runtime, "", own), (runtime, Precision::Tf32, true));
        let on_gpus = "onnxruntime = { provider = 'cuda' }";
        assert_eq!(
            measured_by(runtime, on_gpus, own),
            (runtime, Precision::Tf32, false),
            "what was measured is of the CPU"
        );
    }

    #[test]
    fn what_is_not_there_is_named_with_its_key() {
        assert_eq!(placed("gpus = 0").unwrap_err(), "gpus: found 0, expected 1 to 64");
        assert_eq!(
            placed("placement = { c = [0] }").unwrap_err(),
            "placement: found model c, expected one of: a, b, bad"
        );
        assert_eq!(placed("placement = { a = [0], bad = [0] }").unwrap(), [("a".into(), vec![0])]);
        let staging = placed("staging_bytes = 4294967297").unwrap_err();
        assert_eq!(staging, "staging_bytes: found 4294967297, expected at most 4294967296");
        let outside = placed("gpus = 2\nplacement = { a = [2] }").unwrap_err();
        assert_eq!(outside, "placement.a: found [2], expected indexes of GPUs, 0 to 1 (key gpus)");
        assert!(config("").unwrap().place(Repository::default()).unwrap().is_empty());
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
            lists[0].clone().map(|list| list.iter().filter_map(Address::ip).map(|at| at.port()).collect::<Vec<_>>())
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
    fn weights_are_counted_in_pages_where_memory_is_short() {
        let weights = |text: &str, bytes: Option<u64>, load: Option<Span>| {
            let mut model = models().remove(0);
            model.weights = repository::WeightsSize { bytes, load };
            let placed = config(text).unwrap().place(only(model)).map_err(|error| error.to_string());
            placed.map(|mut placed| placed.remove(0).weights)
        };
        let (bytes, ms) = (Some(102_300_000), Span::from_millis(9));
        assert_eq!(weights("", bytes, Some(ms)), Ok(Weights::default()), "all of it is there all the time");
        assert_eq!(weights("gpu_memory_mb = 2147.483648", None, None), Ok(Weights::default()));
        let of_gpu = config("gpu_memory_mb = 2147.483648").unwrap().memory_pages().unwrap();
        assert_eq!(of_gpu, Some(128), "2 GiB");
        assert_eq!(weights("gpu_memory_mb = 2000", bytes, Some(ms)), Ok(Weights::new(7, ms)));
        let found = weights("gpu_memory_mb = 2000\npcie_gbps = 8.184", bytes, None).unwrap();
        assert_eq!((found.pages, found.load), (7, Span::from_millis(100)));
        let default = weights("gpu_memory_mb = 2000", bytes, None).unwrap().load;
        assert_eq!(default.as_millis_f64().round(), 8.0);
    }

    #[test]
    fn memory_that_cannot_be_is_named_with_its_key() {
        for mb in ["-1", "0", "nan", "inf", "16", "1e12"] {
            let text = placed(&format!("gpu_memory_mb = {mb}")).unwrap_err();
            assert!(
                text.starts_with("gpu_memory_mb: found ") && text.contains("expected 16.777216 (a page)"),
                "{text}"
            );
        }
        for gbps in ["-1", "0", "nan", "inf"] {
            let text = placed(&format!("gpu_memory_mb = 100\npcie_gbps = {gbps}")).unwrap_err();
            assert!(text.starts_with("pcie_gbps: found ") && text.ends_with("expected 0.1 to 100000"), "{text}");
        }
        let mut model = models().remove(0);
        model.weights.bytes = Some(100_000_001);
        let error = config("gpu_memory_mb = 100").unwrap().place(only(model)).unwrap_err().to_string();
        let expected = "weights_mb of model a: found 100.000001, expected at most what 5 pages of 16 MiB hold (key \
                        gpu_memory_mb)";
        assert_eq!(error, expected);
    }

    /// Model a has 5 pages and b 3.
    fn with_memory(text: &str) -> Result<Vec<Placed>, String> {
        let mut models = models();
        for (model, bytes) in models.iter_mut().zip([80_000_000, 50_000_000]) {
            model.weights.bytes = Some(bytes);
        }
        let repository = Repository { models, ..Repository::default() };
        config(text).unwrap().place(repository).map_err(|error| error.to_string())
    }

    #[test]
    fn host_memory_has_room_for_what_all_gpus_load_at_once() {
        let found =
            |text: &str| with_memory(&format!("gpu_memory_mb = 100\n{text}")).map(|placed| placed[0].weights.read);
        assert_eq!(found(""), Ok(Span::ZERO), "all is in host memory");
        assert_eq!(found("host_memory_mb = 84").map(|read| read.as_millis_f64().round()), Ok(23.0));
        assert_eq!(found("host_memory_mb = 84\ndisk_gbps = 6.4"), Ok(Span::from_millis(100)));
        let text = found("gpus = 2\nhost_memory_mb = 160").unwrap_err();
        let expected = "host_memory_mb: found 160, expected at least 167.77216: what model a takes of it when each GPU \
                        is loaded";
        assert_eq!(text, expected);
        assert!(found("gpus = 2\nhost_memory_mb = 168").is_ok());
        for mb in ["-1", "0", "nan", "16", "1e12"] {
            let text = found(&format!("host_memory_mb = {mb}")).unwrap_err();
            assert!(
                text.starts_with("host_memory_mb: found ") && text.contains("expected 16.777216 (a page)"),
                "{text}"
            );
        }
        let text = found("host_memory_mb = 84\ndisk_gbps = 0").unwrap_err();
        assert_eq!(text, "disk_gbps: found 0, expected 0.1 to 100000");
        let alone = config("host_memory_mb = 84").unwrap().host_pages().unwrap_err().to_string();
        assert_eq!(alone, "host_memory_mb: found 84 without gpu_memory_mb, expected both or neither");
    }

    #[test]
    fn what_is_pinned_fits_beside_any_other_model() {
        let pins = |text: &str| {
            let placed = with_memory(text)?;
            Ok::<_, String>(placed.into_iter().map(|placed| placed.is_pinned).collect::<Vec<_>>())
        };
        assert_eq!(pins("gpu_memory_mb = 135\npinned = ['a']"), Ok(vec![true, false]));
        assert_eq!(
            pins("gpu_memory_mb = 118\npinned = ['a']").unwrap_err(),
            "pinned: found models of 5 pages of 16 MiB \
            for GPU 0, expected at most 4: what gpu_memory_mb holds beside the largest of the others"
        );
        let apart = "gpu_memory_mb = 100\ngpus = 2\nplacement = { a = [0], b = [1] }\npinned = ['a', 'b']";
        assert_eq!(pins(apart), Ok(vec![true; 2]));
        assert!(pins("gpu_memory_mb = 100\npinned = ['a', 'b']").unwrap_err().starts_with("pinned: found models of 8"));
        assert_eq!(pins("pinned = ['c']").unwrap_err(), "pinned: found c, expected some of: a, b");
        assert_eq!(pins("pinned = ['a']"), Ok(vec![true, false]), "where memory is not short, all stays");
    }

    #[test]
    fn models_may_be_loaded_later() {
        let loads = |text: &str| ["a", "b"].map(|name| config(text).unwrap().loads_at_start(name, &[]));
        assert_eq!(
            (loads(""), loads("load_models = ['b']"), loads("load_models = []")),
            ([true; 2], [false, true], [false; 2])
        );
        assert_eq!(placed("load_models = ['c']").unwrap_err(), "load_models: found c, expected some of: a, b, bad");
    }

    #[test]
    fn faults_are_optional_one_by_one() {
        let faults = |text: &str| config(text).unwrap().network.faults;
        assert_eq!(faults("faults = { loss = 0.02 }"), Faults { loss: 0.02, ..Faults::default() });
        assert_eq!(faults(""), Faults::default());
    }
}
