//! A local cluster: schedulers, frontends and backends, real processes of this binary joined by soft-RoCE over
//! loopback. `demo` drives it, `up` leaves it running.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

mod gpus;
mod tritonserver;
mod up;

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use backend::{
    config::{GpuName, Gpus, OTHERS, OnnxRuntime, Placement},
    error::ExecutorError,
    executor::{self, Library},
    limits::GPUS_MAX,
};
use gateway::{
    access::Clients,
    config::{DEFAULT_SERVER_NAME, MetricsConfig, ModelControlMode, Otlp, TraceConfig},
};
use rand::RngExt;
use repository::{Precision, Processor};
use scheduler::Policy;
use serde::{Deserialize, Deserializer, de::Error as _};
use tempfile::TempDir;
use transport::{
    Address, Arm, ArmName, Endpoint, EndpointConfig, Faults, LocalPath, NetworkConfig, OwnAddress, ROCE_PORT,
    VerbsSettings,
};

use super::{
    autoscaler::{self, Autoscale},
    demo_models,
    supervisor::{Casualty, DRAIN_TIMEOUT, Fate, Incident, Logs, Restarts, Supervisor},
};
use crate::{
    config_file::{escaped, read_written},
    notices,
};
pub(crate) use tritonserver::words;
pub(crate) use up::{UpArgs, up};

/// What a local cluster consists of; the file of `up --config`. Every key has a default: the cluster of `demo`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Layout {
    /// Where HTTP is served: one frontend for each address.
    #[serde(deserialize_with = "http_addresses")]
    pub http: Vec<SocketAddr>,
    /// Where gRPC is served: one of the frontends for each address, from the first on.
    #[serde(deserialize_with = "grpc_addresses")]
    pub grpc: Vec<SocketAddr>,
    /// The model repository; the demo's models if none is named.
    pub repository: Option<PathBuf>,
    /// Whether a model that cannot be loaded ends the members; otherwise the others are served.
    pub strict: bool,
    /// Schedulers: one is the primary, the others take over from it.
    pub schedulers: u16,
    /// How long the primary's heartbeat stands still before it is suspected, in milliseconds.
    pub suspect_ms: f64,
    /// The scheduler's policy.
    pub policy: String,
    /// Its price of GPU time.
    pub gpu_price: Option<f64>,
    /// The same of single models.
    pub gpu_prices: BTreeMap<String, f64>,
    /// The scheduler's ModelThreads.
    pub model_threads: scheduler::config::ModelThreadCount,
    /// Cores that the scheduler's threads are pinned to.
    pub cores: Vec<usize>,
    /// The scheduler's network budget.
    pub network: scheduler::config::Network,
    /// The network of all members: `soft`, or `verbs:DEVICE`.
    pub arm: ArmName,
    /// How the queue pairs of a verbs device are set up.
    pub verbs: VerbsSettings,
    /// How packets go between members of one host.
    pub local_path: LocalPath,
    /// Faults on the soft-RoCE path, for tests.
    pub faults: Faults,
    /// Who may connect to the frontends, and what they may do.
    pub clients: Clients,
    /// Where the frontends send traces.
    pub otlp: Option<Otlp>,
    /// Which requests leave a trace in the frontends' logs, or in a file.
    pub trace: TraceConfig,
    /// What clients are told that the frontends are called.
    pub server_name: String,
    /// What the frontends' `/metrics` have besides what they always have.
    pub metrics: MetricsConfig,
    /// Who loads and unloads models.
    pub model_control_mode: ModelControlMode,
    /// Models that are loaded from the start; all if it is not said.
    pub load_models: Option<Vec<String>>,
    /// Whether loads may bring files along.
    pub load_files: bool,
    /// Whether one of these that cannot be loaded ends the cluster.
    #[serde(skip)]
    pub ends_without_models: bool,
    /// Where the first frontend tells how it is, if its limits do not say it.
    #[serde(skip)]
    pub admin: Option<SocketAddr>,
    /// Where the first scheduler does.
    #[serde(skip)]
    pub ui: Option<SocketAddr>,
    /// Limits of each frontend: further keys of its file.
    pub frontend: toml::Table,
    /// How the schedulers work out how many GPUs are needed.
    pub advice: scheduler::config::Advice,
    /// How the schedulers place models on backends that leave it to them.
    pub placement: Option<scheduler::config::Placement>,
    /// Backends come and go as they say, if that is wanted.
    pub autoscale: Option<Autoscale>,
    /// The backends. If the file names none: those of the demo, or one for all of its repository.
    #[serde(default)]
    pub backend: Vec<BackendLayout>,
}

fn http_addresses<'de, D: Deserializer<'de>>(found: D) -> Result<Vec<SocketAddr>, D::Error> {
    own_addresses("http", found)
}

fn grpc_addresses<'de, D: Deserializer<'de>>(found: D) -> Result<Vec<SocketAddr>, D::Error> {
    own_addresses("grpc", found)
}

/// Addresses of this host, whose names are looked up.
fn own_addresses<'de, D: Deserializer<'de>>(key: &'static str, found: D) -> Result<Vec<SocketAddr>, D::Error> {
    let found = Vec::<Address>::deserialize(found)?;
    found.iter().map(|address| transport::own_address(key, address).map_err(D::Error::custom)).collect()
}

/// One backend process.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BackendLayout {
    /// GPUs that it offers.
    #[serde(default = "one_gpu")]
    pub gpus: u32,
    /// What computes ONNX models that do not say it themselves.
    #[serde(default)]
    pub executor: Processor,
    /// How numbers of type FP32 are multiplied on GPUs, of models that do not say it themselves.
    #[serde(default)]
    pub precision: Precision,
    /// Where models run that call others; by default as many as such models have processes.
    #[serde(default)]
    pub lanes: Option<u32>,
    /// Whether other backends use these GPUs, too.
    #[serde(default)]
    pub share_gpu: bool,
    /// Whether the RDMA device writes inputs straight into GPUs' memory, where both let it.
    #[serde(default)]
    pub gpu_direct: bool,
    /// Room for each side of a batch of a model that comes later.
    #[serde(default)]
    pub staging_bytes: Option<usize>,
    /// How ONNX Runtime runs the models that it does.
    #[serde(default)]
    pub onnxruntime: OnnxRuntime,
    /// Models that each of them hosts; all of the repository if none is named.
    #[serde(default)]
    pub models: Vec<String>,
    /// The scheduler chooses what it hosts, of all of the repository.
    #[serde(default)]
    pub placement: Option<backend::config::Auto>,
    /// Memory of each GPU for weights, in megabytes, if it holds but a part of these.
    #[serde(default)]
    pub gpu_memory_mb: Option<f64>,
    /// Gigabits a second from host memory to each GPU.
    #[serde(default = "backend::config::default_pcie_gbps")]
    pub pcie_gbps: f64,
    /// Host memory for weights, in megabytes, if it holds but a part of these.
    #[serde(default)]
    pub host_memory_mb: Option<f64>,
    /// Gigabits a second from disk to host memory.
    #[serde(default = "backend::config::default_disk_gbps")]
    pub disk_gbps: f64,
    /// Models that stay in the memory of each of them.
    #[serde(default)]
    pub pinned: Vec<String>,
    /// Where it tells how it is, and its GPUs.
    #[serde(default)]
    pub admin: Option<admin::Config>,
    /// Lines of metrics that its programs may have of their own.
    #[serde(default = "backend::config::default_program_metrics")]
    pub program_metrics: usize,
    /// Models that programs run, and how many GPUs of its own each has beyond these.
    #[serde(skip)]
    pub programs: Vec<(String, usize)>,
    /// Its GPU is the device of this host that has its number, as others have the other ones.
    #[serde(skip)]
    pub has_own_device: bool,
}

fn one_gpu() -> u32 {
    1
}

impl BackendLayout {
    /// With memory for all weights.
    pub(super) fn new(gpus: u32, models: Vec<String>) -> Self {
        let (pcie_gbps, disk_gbps) = (backend::config::default_pcie_gbps(), backend::config::default_disk_gbps());
        let (gpu_memory_mb, host_memory_mb, pinned, programs) = (None, None, Vec::new(), Vec::new());
        let (executor, precision, admin) = (Processor::default(), Precision::default(), None);
        let (share_gpu, gpu_direct, onnxruntime) = (false, false, OnnxRuntime::default());
        Self {
            gpus,
            executor,
            precision,
            lanes: None,
            share_gpu,
            gpu_direct,
            staging_bytes: None,
            onnxruntime,
            models,
            placement: None,
            gpu_memory_mb,
            pcie_gbps,
            host_memory_mb,
            disk_gbps,
            pinned,
            admin,
            program_metrics: backend::config::default_program_metrics(),
            programs,
            has_own_device: false,
        }
    }

    /// All GPUs, and which of them host which models.
    fn placement(&self) -> (u32, BTreeMap<String, Vec<u32>>) {
        let all: Vec<u32> = (0..self.gpus).collect();
        let mut placement: BTreeMap<_, _> = self.models.iter().map(|model| (model.clone(), all.clone())).collect();
        let mut gpus = self.gpus;
        for (name, count) in &self.programs {
            // Where there are too many of them, the last ones share theirs with the others.
            let own = (gpus..GPUS_MAX.min(gpus + *count as u32)).collect::<Vec<_>>();
            if !own.is_empty() {
                gpus += own.len() as u32;
                placement.insert(name.clone(), own);
            }
        }
        if self.models.is_empty() && !placement.is_empty() {
            placement.insert(OTHERS.to_owned(), all);
        }
        (gpus, placement)
    }
}

impl Default for Layout {
    fn default() -> Self {
        let backend =
            |gpus, models: &[&str]| BackendLayout::new(gpus, models.iter().map(|&model| model.into()).collect());
        Self {
            http: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 8000))],
            grpc: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 8001))],
            repository: None,
            strict: false,
            schedulers: 1,
            suspect_ms: scheduler::config::SUSPECT_MS,
            policy: scheduler::Policy::default().to_string(),
            gpu_price: None,
            gpu_prices: BTreeMap::new(),
            model_threads: scheduler::config::ModelThreadCount::default(),
            cores: Vec::new(),
            network: scheduler::config::Network::default(),
            arm: ArmName::Soft,
            verbs: VerbsSettings::default(),
            local_path: LocalPath::default(),
            faults: Faults::default(),
            clients: Clients::default(),
            otlp: None,
            trace: TraceConfig::default(),
            server_name: DEFAULT_SERVER_NAME.to_owned(),
            metrics: MetricsConfig::default(),
            model_control_mode: ModelControlMode::default(),
            load_models: None,
            load_files: false,
            ends_without_models: false,
            admin: None,
            ui: None,
            frontend: toml::Table::new(),
            advice: scheduler::config::Advice::default(),
            placement: None,
            autoscale: None,
            backend: vec![backend(1, &["digits"]), backend(8, &["resnet50", "inception_resnet_v2"])],
        }
    }
}

impl Layout {
    /// What a member would refuse too, but only in its log.
    fn check(&self) -> Result<()> {
        let policy = Policy::of_cluster(&self.policy).context("policy")?;
        let policy = policy.with_gpu_price(self.gpu_price).map_err(|error| anyhow!(error))?;
        policy.check_gpu_prices(&self.gpu_prices).map_err(|error| anyhow!(error))?;
        self.advice.check()?;
        self.placement.as_ref().map(scheduler::config::Placement::checked).transpose()?;
        let has_both = |backend: &BackendLayout| backend.placement.is_some() && !backend.models.is_empty();
        if let Some(index) = self.backend.iter().position(has_both) {
            bail!("backend {index}: placement: found \"auto\" beside models, expected one of both");
        }
        self.clients.grants().map_err(|error| anyhow!(error))?;
        self.clients.tls.as_ref().map(|tls| tls.load("clients.tls")).transpose()?;
        let (schedulers, frontends, backends) = (self.schedulers, self.http.len(), self.backend.len());
        ensure!(
            (1..=SCHEDULERS_MAX).contains(&schedulers),
            "schedulers: expected 1 to {SCHEDULERS_MAX}, found {schedulers}"
        );
        let suspect_ms = self.suspect_ms;
        ensure!((1.0..=10_000.0).contains(&suspect_ms), "suspect_ms: expected 1 to 10000, found {suspect_ms}");
        ensure!(
            (1..=FRONTENDS_MAX).contains(&frontends),
            "http: expected 1 to {FRONTENDS_MAX} addresses, found {frontends}"
        );
        let backends_max = self.backends_max();
        ensure!(
            (1..=backends_max).contains(&backends),
            "backend: expected 1 to {backends_max} of them, found {backends}"
        );
        ensure!(
            self.grpc.len() <= frontends,
            "grpc: expected at most {frontends} addresses, as http has, found {}",
            self.grpc.len()
        );
        if let Some(key) = self.frontend.keys().find(|key| FRONTEND_KEYS.contains(&key.as_str())) {
            bail!("frontend: found {key}, expected limits; it is said outside of [frontend], or `up` chooses it");
        }
        read_written::<gateway::Config>(&Wiring::random().frontend(self, 0))
            .map_err(|error| anyhow!("frontend: {error}"))?;
        Ok(())
    }

    /// A port that is taken would only show in the frontend's log; says it here, where it can be changed.
    fn check_ports(&self) -> Result<()> {
        let http = self.http.iter().map(|address| ("http", address));
        let grpc = self.grpc.iter().map(|address| ("grpc", address));
        let admin = self.admin.iter().map(|address| ("metrics-port", address));
        let ui = self.ui.iter().map(|address| ("ui", address));
        for (key, address) in http.chain(grpc).chain(ui).chain(admin) {
            let listener = std::net::TcpListener::bind(address);
            drop(listener.with_context(|| format!("cannot listen on {address}; choose another address (--{key})"))?);
        }
        Ok(())
    }

    /// Where the models are. Those of the demo are written into `folder`, which must last as long as the cluster.
    pub(super) fn find_repository(&mut self, folder: &Path) -> Result<PathBuf> {
        if self.repository.is_none() {
            self.repository = Some(demo_models::write(folder)?);
        }
        Ok(self.repository().to_owned())
    }

    /// Names the library of ONNX Runtime to all backends that name none: the one that is found here, also among the
    /// packages of a Python.
    ///
    /// # Errors
    /// If there is none that can be used.
    pub(super) fn find_onnxruntime(&mut self) -> Result<Library, ExecutorError> {
        let settings = self.backend.first().map(|backend| backend.onnxruntime.clone()).unwrap_or_default();
        let library = executor::onnxruntime_library(&settings, executor::python_package().as_deref())?;
        for backend in &mut self.backend {
            backend.onnxruntime.library.get_or_insert_with(|| library.path.clone());
        }
        Ok(library)
    }

    /// What runs ONNX models that do not say it themselves, and why.
    pub(super) fn engines(&self, found: &Result<Library, ExecutorError>) -> String {
        let mut executors: Vec<Processor> = self.backend.iter().map(|backend| backend.executor).collect();
        executors.dedup();
        let engines = executors.into_iter().map(|executor| match (executor, found) {
            (Processor::Auto, found) => executor::engine_of(found).1,
            (Processor::Onnxruntime, Ok(library)) => format!("ONNX Runtime, {library}"),
            (Processor::Onnxruntime, Err(reason)) => format!("nothing, as {reason}"),
            (Processor::Cpu, _) => "the embedded engine, as `executor` says".to_owned(),
            (Processor::Cuda, _) => "plans for GPUs, as `executor` says".to_owned(),
        });
        engines.collect::<Vec<_>>().join("; and by ")
    }

    fn repository(&self) -> &Path {
        self.repository.as_deref().expect("`find_repository` comes first")
    }

    /// A member's address for packets: all of them share that of a device.
    fn packet_address(&self, soft: SocketAddr) -> Option<SocketAddr> {
        (self.arm == ArmName::Soft).then_some(soft)
    }

    /// The name of the scheduler of this position in the list.
    pub(super) fn scheduler_name(&self, index: u16) -> String {
        if self.schedulers == 1 { "scheduler".to_owned() } else { format!("scheduler-{index}") }
    }

    /// Backends that have hosts to be at.
    fn backends_max(&self) -> usize {
        usize::from(if self.schedulers == 1 { u8::MAX } else { STANDBY_HOSTS } - BACKEND_HOSTS)
    }

    /// Whether a model is loaded from the start.
    pub(super) fn loads_at_start(&self, name: &str) -> bool {
        self.load_models.as_ref().is_none_or(|models| models.iter().any(|model| model == name))
    }

    /// The backend at this place, the first of which are in the file; others are like the last of them.
    fn backend(&self, index: usize) -> &BackendLayout {
        &self.backend[index.min(self.backend.len() - 1)]
    }

    /// Backends that there may be.
    fn most_backends(&self) -> usize {
        self.autoscale.map_or(self.backend.len(), |autoscale| autoscale.gpus.max as usize)
    }

    /// How long frontends may take to end: somewhat more than they are told.
    fn drain_timeout(&self) -> Duration {
        let told = self.frontend.get("drain_timeout_ms").and_then(toml::Value::as_integer);
        told.map_or(DRAIN_TIMEOUT, |ms| Duration::from_millis(ms.unsigned_abs()) + Duration::from_secs(3))
    }

    /// All models that some backend is told to host.
    pub(super) fn models(&self) -> Vec<String> {
        let mut models: Vec<_> = self.backend.iter().flat_map(|backend| backend.models.iter().cloned()).collect();
        models.sort();
        models.dedup();
        models
    }
}

/// How the members of one cluster find and trust each other: a random 127.x.y.0/24 and a random secret, so that
/// clusters on one host do not meet.
pub(super) struct Wiring {
    x: u8,
    y: u8,
    secret: String,
    /// Where files that loads bring along are kept, if they may.
    load_files: Option<PathBuf>,
}

/// TCP port of bootstrap listeners.
const BOOTSTRAP_PORT: u16 = 7400;
/// TCP port where backends tell the first frontend what their programs count.
const PROGRAM_METRICS_PORT: u16 = 7401;
/// TCP port where schedulers tell this process how many GPUs are needed.
const ADVICE_PORT: u16 = 7402;
/// The first host of a 127.x.y.0/24 for each role; the first scheduler is at 1, and the others behind the backends.
pub(super) const FRONTEND_HOSTS: u8 = 2;
const BACKEND_HOSTS: u8 = 32;
const STANDBY_HOSTS: u8 = 241;
/// Schedulers of a local cluster: more than anybody needs, and few enough to keep apart in a log.
pub(super) const SCHEDULERS_MAX: u16 = 4;
/// A frontend within this process, that sees when the cluster is ready where its clients must prove who they are.
const OBSERVER_HOST: u8 = BACKEND_HOSTS - 1;
/// Frontends that fit before the first backend and the observer.
const FRONTENDS_MAX: usize = (OBSERVER_HOST - FRONTEND_HOSTS) as usize;

/// Keys of a frontend's file that are not limits: where it is, whom it trusts, and what `up` is told itself.
const FRONTEND_KEYS: [&str; 22] = [
    "scheduler",
    "schedulers",
    "secret",
    "secret_file",
    "name",
    "repository",
    "strict",
    "load_files",
    "http",
    "grpc",
    "link",
    "clients",
    "otlp",
    "trace",
    "model_control_mode",
    "arm",
    "address",
    "shared_address",
    "local_path",
    "verbs",
    "faults",
    "tls",
];

/// A running cluster.
pub(super) struct Cluster {
    supervisor: Supervisor,
    layout: Layout,
    wiring: Wiring,
    /// Who runs it is told what happens to members.
    is_told: bool,
    /// What sees when the cluster is ready, if strangers are not told.
    observer: Option<frontend::Config>,
}

impl Cluster {
    /// Starts all processes, whose files are in `folder`; see [`Self::wait_until_ready`].
    pub(super) fn start(folder: TempDir, layout: Layout, logs: Logs, restarts: Restarts) -> Result<Self> {
        layout.check()?;
        layout.check_ports()?;
        let mut wiring = Wiring::random();
        try_arm(&layout, &wiring)?;
        let supervisor = Supervisor::new(folder, (logs, restarts), layout.drain_timeout())?;
        wiring.load_files = layout.load_files.then(|| supervisor.loaded_files());
        for index in 0..layout.schedulers {
            let file = wiring.scheduler(&layout, index);
            supervisor.start(&["scheduler"], &layout.scheduler_name(index), &file)?;
        }
        for index in 0..layout.http.len() {
            supervisor.start(&["frontend"], &format!("frontend-{index}"), &wiring.frontend(&layout, index))?;
        }
        for index in 0..layout.backend.len() {
            supervisor.start(&["backend"], &autoscaler::name(index), &wiring.backend(&layout, index))?;
        }
        // Who must show a token or a certificate is not asked by strangers.
        let observer =
            (layout.clients != Clients::default()).then(|| wiring.silent_frontend(&layout, "observer", OBSERVER_HOST));
        Ok(Self { supervisor, layout, wiring, is_told: restarts == Restarts::All, observer })
    }

    /// Where the first frontend serves HTTP.
    pub(super) fn http(&self) -> SocketAddr {
        self.layout.http[0]
    }

    /// The schedulers in the order in which they take over: where members connect, and their names.
    fn schedulers(&self) -> impl Iterator<Item = (SocketAddr, String)> {
        (0..).zip(self.wiring.schedulers(&self.layout)).map(|(index, at)| (at, self.layout.scheduler_name(index)))
    }

    /// What tells whether a model can be served at an address.
    fn readiness(&self) -> Result<impl Fn(SocketAddr, &str) -> bool + use<>> {
        let observer = self.observer.clone().map(frontend::Client::start).transpose()?;
        Ok(move |http: SocketAddr, model: &str| match &observer {
            None => load::is_ready(http, model),
            Some(client) => TcpStream::connect(http).is_ok() && client.is_ready_blocking(model).unwrap_or(false),
        })
    }

    /// Waits until every model can be served.
    ///
    /// # Errors
    /// If a member ends, or `timeout` passes: says which, and shows its last words.
    #[allow(clippy::disallowed_methods, reason = "waits for other processes, in real time")]
    pub(super) fn wait_until_ready(&self, timeout: Duration) -> Result<()> {
        let started = Instant::now();
        let is_ready = self.readiness()?;
        let models = self.layout.models();
        let mut missing: Vec<_> =
            self.layout.http.iter().flat_map(|http| models.iter().map(move |model| (*http, model))).collect();
        loop {
            self.check()?;
            missing.retain(|(http, model)| !is_ready(*http, model));
            let Some((http, model)) = missing.first() else { return Ok(()) };
            if started.elapsed() > timeout {
                bail!("after {} s {model} is not ready at {http}", timeout.as_secs());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The name of the scheduler of this position in the list.
    pub(super) fn scheduler_name(&self, index: u16) -> String {
        self.layout.scheduler_name(index)
    }

    /// What all schedulers have logged into files so far, one after the other.
    pub(super) fn scheduler_logs(&self) -> String {
        self.schedulers().map(|(_, name)| self.supervisor.log(&name)).collect()
    }

    /// Kills a member, which is started again. False if it is not there.
    pub(super) fn kill(&self, name: &str) -> bool {
        self.supervisor.kill(name)
    }

    /// What each member logged last.
    pub(super) fn last_words(&self) -> String {
        self.supervisor.last_words()
    }

    /// Looks after the members: those that ended are started again where that is wanted. Members end with the thread
    /// that starts them, so it must be the one that started the cluster.
    ///
    /// # Errors
    /// If a member ended that is not started again; shows its last words.
    pub(super) fn check(&self) -> Result<()> {
        self.tend(|_| false).map(drop)
    }

    /// As [`Self::check`], but members that ended in a way that `is_left` are told of and left as they are. Those that
    /// are not started again.
    fn tend(&self, is_left: impl Fn(&Casualty) -> bool) -> Result<Vec<Casualty>> {
        let mut left = Vec::new();
        for incident in self.supervisor.tend() {
            match incident {
                Incident::Restarted { name, process } if self.is_told => {
                    notices::tell_whoever_reads(&format!("{name}: process {process}"));
                }
                Incident::Restarted { .. } => {}
                Incident::Fell(fallen) if matches!(fallen.fate, Fate::Again(_)) || is_left(&fallen) => {
                    let is_as_told = fallen.fate == Fate::AsTold && fallen.end.is_success();
                    if self.is_told && !is_as_told {
                        notices::warn(&fallen.to_string());
                    }
                    if !matches!(fallen.fate, Fate::Again(_)) {
                        left.push(fallen);
                    }
                }
                Incident::Fell(fallen) => {
                    let last_words = fallen.last_words.trim_end();
                    // Where its log is ours, it has been read already.
                    ensure!(!last_words.is_empty(), "{fallen}");
                    bail!("{fallen}; its last words were:\n{last_words}");
                }
            }
        }
        Ok(left)
    }

    /// What lets backends come and go, if that is wanted.
    fn autoscale(&self) -> Result<Option<autoscaler::Drive>> {
        let Some(Autoscale { gpus }) = self.layout.autoscale else { return Ok(None) };
        let schedulers = 0..self.layout.schedulers;
        let admins = schedulers.filter_map(|index| self.wiring.scheduler_admin(&self.layout, index));
        autoscaler::Drive::start(gpus, admins.map(|address| address.to_string()).collect()).map(Some)
    }
}

impl Wiring {
    /// At random.
    pub(super) fn random() -> Self {
        let mut random = rand::rng();
        let secret = format!("{:032x}", random.random::<u128>());
        // Not 127.0: that is where everybody else's servers are.
        Self { x: random.random_range(1..=254), y: random.random_range(0..=255), secret, load_files: None }
    }

    fn host(&self, host: u8, port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::new(127, self.x, self.y, host), port))
    }

    /// Where the scheduler of this position in the list is.
    fn scheduler_address(&self, index: u16, port: u16) -> SocketAddr {
        // There are few.
        self.host(if index == 0 { 1 } else { STANDBY_HOSTS + (index - 1) as u8 }, port)
    }

    /// Where members connect, the first primary first.
    fn schedulers(&self, layout: &Layout) -> Vec<SocketAddr> {
        (0..layout.schedulers).map(|index| self.scheduler_address(index, BOOTSTRAP_PORT)).collect()
    }

    /// The key `schedulers`, for which there is no need if there is only one.
    fn scheduler_list(&self, layout: &Layout) -> Vec<Address> {
        let list = if layout.schedulers == 1 { Vec::new() } else { self.schedulers(layout) };
        list.into_iter().map(Address::from).collect()
    }

    /// A scheduler's file.
    pub(super) fn scheduler(&self, layout: &Layout, index: u16) -> String {
        to_toml(&scheduler::config::Config {
            listen: self.scheduler_address(index, BOOTSTRAP_PORT).into(),
            schedulers: self.scheduler_list(layout),
            suspect_ms: layout.suspect_ms,
            fabric: self.member(layout, layout.scheduler_name(index), self.scheduler_address(index, ROCE_PORT)),
            policy: layout.policy.clone(),
            gpu_price: layout.gpu_price,
            gpu_prices: layout.gpu_prices.clone(),
            model_threads: layout.model_threads,
            cores: layout.cores.clone(),
            network: layout.network,
            advice: layout.advice,
            placement: layout.placement.clone(),
            queue_max: scheduler::config::default_queue_max(),
            tasks_per_frontend_max: scheduler::config::default_tasks_per_frontend_max(),
            reestimate: true,
            admin: self.scheduler_admin(layout, index).map(|address| Address::from(address).into()),
            drain_timeout_ms: scheduler::config::DRAIN_TIMEOUT_MS,
        })
    }

    /// Where a scheduler tells how it and the cluster are, if anybody wants to know.
    fn scheduler_admin(&self, layout: &Layout, index: u16) -> Option<SocketAddr> {
        let own = layout.autoscale.map(|_| self.scheduler_address(index, ADVICE_PORT));
        layout.ui.filter(|_| index == 0).or(own)
    }

    /// Where a backend tells how it is: as its part of the file says, or else where nobody but the first frontend
    /// looks, if that is to tell on what programs count.
    fn backend_admin(&self, layout: &Layout, index: usize) -> Option<admin::Config> {
        let host = BACKEND_HOSTS + index as u8;
        let tells = layout.admin.is_some() || layout.frontend.contains_key("admin");
        let own = (tells && index < admin::ALSO_MAX).then(|| Address::from(self.host(host, PROGRAM_METRICS_PORT)));
        // There is one address for all that are like it.
        let said = layout.backend(index).admin.as_ref().filter(|_| index == 0 || layout.autoscale.is_none());
        said.cloned().or(own.map(Into::into))
    }

    fn frontend(&self, layout: &Layout, index: usize) -> String {
        let config = gateway::Config {
            http: Some(layout.http[index].into()),
            grpc: layout.grpc.get(index).map(|&address| address.into()),
            clients: layout.clients.clone(),
            otlp: layout.otlp.clone(),
            trace: layout.trace.clone(),
            server_name: layout.server_name.clone(),
            metrics: layout.metrics,
            admin: layout.admin.filter(|_| index == 0).map(|address| Address::from(address).into()),
            model_control_mode: match layout.model_control_mode {
                // One looks at the repository for all.
                ModelControlMode::Poll if index > 0 => ModelControlMode::None,
                mode => mode,
            },
            ..self.silent_frontend(layout, &format!("frontend-{index}"), FRONTEND_HOSTS + index as u8).into()
        };
        let mut file = toml::Table::try_from(config).expect("a configuration is representable in TOML");
        file.extend(layout.frontend.clone());
        if let Some(toml::Value::Table(admin)) = file.get_mut("admin").filter(|_| index == 0) {
            let backends = (0..layout.most_backends()).filter_map(|index| self.backend_admin(layout, index));
            let also = backends.take(admin::ALSO_MAX).map(|admin| admin.http.to_string().into());
            admin.entry("also").or_insert(toml::Value::Array(also.collect()));
        }
        to_toml(&file)
    }

    /// The configuration of one that serves no clients over the network.
    pub(super) fn silent_frontend(&self, layout: &Layout, name: &str, host: u8) -> frontend::Config {
        let config = frontend::Config::new(
            self.scheduler_address(0, BOOTSTRAP_PORT),
            self.secret.clone(),
            layout.repository().to_owned(),
        );
        frontend::Config {
            schedulers: self.schedulers(layout).into_iter().map(Address::from).collect(),
            strict: layout.strict,
            load_files: self.load_files.clone(),
            link: Some(self.host(host, 0).into()),
            network: self.member(layout, name.to_owned(), self.host(host, ROCE_PORT)),
            ..config
        }
    }

    /// What all members say of the network, and each of itself.
    fn member(&self, layout: &Layout, name: String, packets: SocketAddr) -> NetworkConfig {
        NetworkConfig {
            name: Some(name),
            arm: layout.arm.clone(),
            address: layout.packet_address(packets).map(OwnAddress::from),
            verbs: layout.verbs,
            local_path: layout.local_path,
            faults: layout.faults,
            ..NetworkConfig::new(self.secret.clone())
        }
    }

    /// A backend's file.
    pub(super) fn backend(&self, layout: &Layout, index: usize) -> String {
        let this = layout.backend(index);
        let (gpus, placement) = this.placement();
        // Each has a device of its own.
        let own = || Gpus::Named(vec![GpuName::Number(index as u32)]);
        let gpus = if this.has_own_device { own() } else { gpus.into() };
        to_toml(&backend::config::Config {
            scheduler: (layout.schedulers == 1).then(|| self.scheduler_address(0, BOOTSTRAP_PORT).into()),
            schedulers: self.scheduler_list(layout),
            network: self.member(layout, autoscaler::name(index), self.host(BACKEND_HOSTS + index as u8, ROCE_PORT)),
            repository: layout.repository().to_owned(),
            strict: layout.strict,
            load_files: self.load_files.clone(),
            executor: this.executor,
            precision: this.precision,
            gpus,
            lanes: this.lanes,
            share_gpu: this.share_gpu,
            gpu_direct: this.gpu_direct,
            staging_bytes: this.staging_bytes,
            onnxruntime: this.onnxruntime.clone(),
            placement: this.placement.map_or(Placement::Table(placement), Placement::Auto),
            load_models: layout.load_models.clone(),
            emulate: None,
            gpu_memory_mb: this.gpu_memory_mb,
            pinned: this.pinned.clone(),
            pcie_gbps: this.pcie_gbps,
            host_memory_mb: this.host_memory_mb,
            disk_gbps: this.disk_gbps,
            read_budget_bytes: 0,
            connections_max: backend::config::default_connections_max(),
            admin: self.backend_admin(layout, index),
            program_metrics: this.program_metrics,
            drain_timeout_ms: backend::config::DRAIN_TIMEOUT_MS,
        })
    }
}

/// Opens the network once as the scheduler will: what is wrong with it would only show in the members' logs.
pub(super) fn try_arm(layout: &Layout, wiring: &Wiring) -> Result<()> {
    let address = layout.packet_address(wiring.scheduler_address(0, ROCE_PORT));
    let arm = Arm::choose(&layout.arm, address, false, layout.faults, layout.verbs)?;
    drop(Endpoint::open(EndpointConfig::over(arm))?);
    Ok(())
}

/// A member's file, which is read as it is written.
pub(super) fn to_toml(config: &impl serde::Serialize) -> String {
    let mut file = toml::Value::try_from(config).expect("a configuration is representable in TOML");
    escape(&mut file);
    toml::to_string(&file).expect("it has just been read as TOML")
}

fn escape(value: &mut toml::Value) {
    match value {
        toml::Value::String(text) => *text = escaped(text),
        toml::Value::Array(values) => values.iter_mut().for_each(escape),
        toml::Value::Table(table) => table.iter_mut().for_each(|(_, value)| escape(value)),
        _ => {}
    }
}

/// How often members are looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Measuring a model at every batch size takes a while on a busy machine.
pub(super) const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// An HTTP address for one run of the demo, which must not be in the way of anything else.
pub(super) fn random_http() -> SocketAddr {
    let mut random = rand::rng();
    let host = Ipv4Addr::new(127, random.random_range(1..=254), random.random_range(0..=255), FRONTEND_HOSTS);
    SocketAddr::from((host, 8000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_be_names_of_this_host() {
        let layout = |text: &str| toml::from_str::<Layout>(text);
        let named = layout("http = ['localhost:8000', '127.0.0.2:8000']\ngrpc = ['localhost:9000']").unwrap();
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(named.http, [at("127.0.0.1:8000"), at("127.0.0.2:8000")]);
        assert_eq!(named.grpc, [at("127.0.0.1:9000")]);
        let error = layout("http = ['localhost']").unwrap_err().to_string();
        assert!(error.contains("`localhost`"), "{error}");
    }
}
