//! Runs a backend: one network thread, which moves packets and drives the state machines, and one thread for each GPU.
//!
//! The backend obeys one scheduler at a time. When it has none any more, it drops every link and every batch, and joins
//! again under a new name: a scheduler that comes back knows nothing of the old plans, and one that was cut off has
//! fenced them.
#![allow(clippy::disallowed_methods)] // Drivers own threads and clocks.

mod ahead;
mod copies;
mod gpu;
mod health;
mod loader;
mod pinned;
mod profile;
mod queue;
mod scrape;
mod session;
mod trial;
mod turns;
mod warmup;

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    num::NonZeroU64,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use proto::{
    BatchCost, LatencyProfile, ModelId, Span, Weights, backoff::Backoff, host_memory::HostMemory,
    scheduler_to_frontend::REASON_BYTES_MAX,
};
use repository::{Model, Precision, Processor, Refused, RepositoryError, SLO_MAX, Stamps, Store};
use thiserror::Error;
use transport::{Clock, OpenError};

use crate::{
    config::{self, Config, GpuName, OnnxRuntime, Placed, is_on_gpus, onnxruntime::Provider},
    executor::{
        self, Executor, ExecutorError, OnGpus, Programs,
        gpus::{Devices, OpenDriver, real_driver},
    },
    loaded::Loaded,
    staging::ModelShape,
};

use copies::Copies;
use gpu::Gpus;
use health::Readings;
use loader::Loader;
pub use profile::{ByLength, Effort, Measured, OfLength, QUANTILE};
use scrape::Scrape;
use session::{Session, Threads};
use turns::{Trials, Turns};

/// The first wait before the scheduler is tried again; each failure doubles it.
const BACKOFF_MIN: Span = Span::from_millis(50);
/// The longest wait.
const BACKOFF_MAX: Span = Span::from_millis(1_000);

/// The kernel may let timers fire this much late to save power; its default is 50 us.
const TIMER_SLACK_NS: u64 = 1_000;

/// Models that could not be loaded of which schedulers are told why.
const NOT_LOADED_MAX: usize = 64;

/// Why a backend could not run.
#[derive(Debug, Error)]
pub enum BackendError {
    /// A key of the configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The repository cannot be read.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// A model cannot be loaded.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The network cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is not enough memory to stage batches.
    #[error("staging memory of {bytes} bytes: {cause}; lower gpus, max_batch_size or the number of models")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A thread cannot be started.
    #[error("a thread for a GPU, for loading models or for metrics could not be started: {0}")]
    Thread(std::io::Error),
}

/// What models are loaded with.
#[derive(Clone)]
struct Means {
    clock: Clock,
    programs: Programs,
    devices: Arc<Devices>,
    turns: Turns,
}

impl Means {
    /// The trials of a load.
    fn trials(&self) -> Trials<'_> {
        Trials::new(&self.turns, self.clock)
    }
}

/// Loads the models, then serves until `stop` is set (looked at ten times a second) and its plans are finished, or
/// `drain_timeout_ms` are over.
///
/// # Errors
/// If the configuration, the repository or a model is wrong, or the network cannot be opened. A scheduler that cannot
/// be reached is no error: it is tried again and again.
pub fn run(config: &Config, stop: &AtomicBool) -> Result<(), BackendError> {
    run_on(config, stop, Box::new(real_driver))
}

/// [`run`], with GPUs that are opened in another way.
///
/// # Errors
/// As [`run`].
pub fn run_on(config: &Config, stop: &AtomicBool, open: Box<OpenDriver>) -> Result<(), BackendError> {
    let clock = Clock::start();
    let schedulers = config.scheduler_list()?;
    let stamps = Stamps::of(&config.repository)?;
    let models = config.place(repository::load(&config.repository)?.checked(config.strict)?)?;
    let (readings, opened) = Readings::start(clock).map_err(BackendError::Thread)?;
    let _scrape = config.metrics_http.map(|address| Scrape::start(address, clock, readings)).transpose()?;
    let devices = Devices::new(config, open, opened)?;
    let means = Means { clock, programs: Programs::default(), devices, turns: Turns::default() };
    open_gpus(&means.devices, &models)?;
    let uses_gpus = config.executor == Processor::Cuda || models.iter().any(|placed| is_on_gpus(&placed.model));
    // A model that clients unload, or have yet to load, may be loaded whatever happened meanwhile.
    let shapes: Vec<ModelShape> = models.iter().map(|placed| ModelShape::from(&placed.model)).collect();
    let models = models.into_iter().filter(|placed| config.loads_at_start(&placed.model.name)).collect();
    let (mut models, not_loaded) = load_all(&means, (config, &stamps), models)?;
    config.check_pinned(models.iter().map(|model| model.claim()))?;
    let store = config.load_files.as_deref().map(Store::open).transpose()?;
    let loader = Loader::start(config.clone(), store, means.clone()).map_err(BackendError::Thread)?;
    let gpus = Gpus::start(clock, config.gpus.count() as usize, uses_gpus).map_err(BackendError::Thread)?;
    let copies = config.memory_pages()?.map_or(0, |_| config.gpus.count() as usize);
    let copies = Copies::start(clock, copies).map_err(BackendError::Thread)?;
    let Means { devices, turns, .. } = &means;
    let threads = Threads { gpus: &gpus, copies: &copies, loader: &loader, devices, turns };
    reduce_timer_slack();
    let mut backoff = Backoff::new(BACKOFF_MIN, BACKOFF_MAX);
    for number in 0.. {
        let refused = not_loaded.clone();
        let session = Session::open((config, &schedulers), clock, (models, &shapes), refused, threads, number)?;
        let ended = session.run(stop);
        models = ended.models;
        if stop.load(Ordering::Relaxed) {
            break;
        }
        if ended.joined {
            backoff.handle_success();
        }
        let now = clock.now();
        let wait = backoff.handle_failure(now) - now;
        let scheduler = schedulers.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
        tracing::warn!(scheduler, reason = ended.reason, "no scheduler; trying again in {wait}");
        std::thread::sleep(wait.to_duration());
    }
    // Programs may finish what they do when their models go.
    drop((models, gpus));
    means.programs.wait_until_ended();
    Ok(())
}

/// Opens what models need that are placed on GPUs: without these the whole backend is of no use.
fn open_gpus(devices: &Devices, models: &[Placed]) -> Result<(), BackendError> {
    let on_gpus = models.iter().filter(|placed| is_on_gpus(&placed.model));
    let gpus: BTreeSet<u32> = on_gpus.flat_map(|placed| placed.gpu_indexes.iter().copied()).collect();
    Ok(gpus.into_iter().try_for_each(|gpu| devices.gpu(gpu as usize).map(drop))?)
}

/// Lets this thread's timers fire on time: batches start and end by them.
fn reduce_timer_slack() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS)) {
        tracing::warn!(%error, "timer slack stays at its default; batches may start up to 50 us late");
    }
}

/// Loads what can be loaded; all of it if that is wanted. A file that makes the executor panic is one that cannot be,
/// and so is one that changes meanwhile.
fn load_all(
    means: &Means,
    (config, stamps): (&Config, &Stamps),
    models: Vec<Placed>,
) -> Result<(Vec<Arc<Loaded>>, Vec<Refused>), BackendError> {
    let mut loaded: Vec<Arc<Loaded>> = Vec::with_capacity(models.len());
    let (mut first_error, mut not_loaded) = (None, Vec::new());
    // As the core will have it: what does not fit is let go before the next one is read.
    let mut host = config.host_pages()?.map(HostMemory::new);
    for placed in models {
        let (name, version) = (placed.model.name.clone(), placed.model.version.clone());
        let load = || {
            let loaded = load(means, config, placed, &mut means.trials())?;
            stamps.check(&config.repository, &name)?;
            Ok(loaded)
        };
        let result = catch_unwind(AssertUnwindSafe(load));
        match result.unwrap_or_else(|_| Err(ExecutorError(format!("model {name}: loading it panicked")).into())) {
            Ok(model) => {
                if let Some(host) = host.as_mut().filter(|_| model.weights.pages > 0) {
                    host.insert(ModelId(loaded.len() as u32), model.weights.pages);
                }
                loaded.push(Arc::new(model));
                while let Some(moved) = host.as_mut().and_then(HostMemory::poll_moved) {
                    if !moved.is_there {
                        loaded[moved.model.0 as usize].executor.release();
                    }
                }
            }
            Err(error) if config.strict => return Err(error),
            Err(error) => {
                tracing::warn!("not served: {error}");
                if not_loaded.len() < NOT_LOADED_MAX {
                    not_loaded.push(refused(name, version, &error));
                }
                first_error.get_or_insert(error);
            }
        }
    }
    match first_error {
        Some(error) if loaded.is_empty() => Err(error),
        _ => Ok((loaded, not_loaded)),
    }
}

/// What schedulers are told, as long as it may be.
fn refused(name: String, version: String, error: &BackendError) -> Refused {
    let mut reason = error.to_string();
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    Refused { name, version, reason }
}

fn load(means: &Means, config: &Config, placed: Placed, trials: &mut Trials<'_>) -> Result<Loaded, BackendError> {
    let Means { clock, programs, devices, .. } = means;
    let Placed { model, gpu_indexes, mut weights, is_pinned } = placed;
    let started_at = clock.now();
    trials.begin(&gpu_indexes);
    let executor = load_executor(&model, &gpu_indexes, (config, programs, devices), trials)?;
    let folder = model.folder(&config.repository);
    let (profile, source) = match (executor.on_gpus(), known_profile(&model, executor.as_ref())) {
        (Some(on_gpus), _) => {
            if weights.read > Span::ZERO {
                weights.read = trial::time_read(*clock, on_gpus)?;
            }
            let memory = (weights, config.memory_pages()?.is_some());
            let tried = trial::run(*clock, &model, on_gpus, memory, (Effort::AT_START, trials), &mut |_| {})?;
            weights = tried.weights;
            config.check_weights(&model.name, weights.pages)?;
            // What runs alone does so on the first of them.
            on_gpus.gpus().next().into_iter().for_each(|gpu| trials.go_to(gpu));
            warmup::run(&model, &folder, executor.as_ref(), trials)?;
            (tried.profile, "measured")
        }
        (None, known) => {
            if weights.read > Span::ZERO && executor.holds_weights() {
                weights.read = (clock.now() - started_at).clamp(Span(1), SLO_MAX);
            }
            if let Some(gpu) = gpu_of_trials(&model, &gpu_indexes, config.onnxruntime.provider) {
                trials.go_to(gpu);
            }
            warmup::run(&model, &folder, executor.as_ref(), trials)?;
            match known {
                Some(profile) => (profile, "known"),
                None => {
                    let effort = (Effort::AT_START, &mut *trials);
                    (profile::table(&profile::measure(&model, executor.as_ref(), effort, &mut |_| {})?), "measured")
                }
            }
        }
    };
    let cost = cost((config, &model), executor.as_ref(), (weights, &profile), trials)?;
    let shape = ModelShape::from(&model);
    let (least, largest) = (profile.latency(1), profile.latency(profile.max_batch()));
    let (name, gpus, waited) = (&model.name, &gpu_indexes, trials.waited());
    tracing::info!(model = name, l_1 = %least, l_max = %largest, profile = source, ?gpus, %waited, "loaded");
    Ok(Loaded { model, shape, gpu_indexes, executor, profile, cost, weights, is_pinned })
}

fn cost(
    (config, model): (&Config, &Model),
    executor: &dyn Executor,
    (weights, profile): (Weights, &LatencyProfile),
    trials: &mut Trials<'_>,
) -> Result<Option<BatchCost>, BackendError> {
    let is_chosen = ModelShape::from(model).records.inputs;
    if !is_chosen || executor.on_gpus().is_none() || config.memory_pages()?.is_none() {
        return Ok(profile::cost(model, executor, trials));
    }
    // The weights are there all the time: while it waited for turns they would have pages that the scheduler counts as
    // free.
    let takes = weights.load + Effort::AT_START.takes(profile.latency(profile.max_batch())) * 3;
    Ok(trials.together(takes, |trials| profile::cost(model, executor, trials)))
}

/// The one GPU that a model is tried on that we do not run on GPUs ourselves, if it takes one: ONNX Runtime has a
/// session for each, and what is for none of them runs in the first. What the CPU computes takes it from all of the
/// threads that stand for GPUs.
fn gpu_of_trials(model: &Model, gpu_indexes: &[u32], provider: Provider) -> Option<usize> {
    let runs_it = matches!(
        model.executor,
        repository::Executor::Onnx { wanted, .. } if wanted.processor == Some(Processor::Onnxruntime)
    );
    let first = gpu_indexes.first().map(|&gpu| gpu as usize);
    first.filter(|_| runs_it && provider == Provider::Cuda)
}

fn load_executor(
    model: &Model,
    gpu_indexes: &[u32],
    (config, programs, devices): (&Config, &Programs, &Arc<Devices>),
    trials: &mut Trials<'_>,
) -> Result<Arc<dyn Executor>, ExecutorError> {
    match &model.executor {
        repository::Executor::Onnx { file, batching, wanted, .. } if is_on_gpus(model) => {
            let how = (file.as_path(), batching, wanted.precision.unwrap_or_default());
            let mut turn = |gpu, took| {
                trials.go_to(gpu);
                trials.wait(took);
            };
            Ok(Arc::new(OnGpus::load_in_turns(model, how, gpu_indexes, devices, &mut turn)?))
        }
        _ => executor::load(model, (gpu_indexes, &config.gpus), &config.onnxruntime, programs),
    }
}

/// l(b) without measuring: an emulated GPU says what it is, and a model may have been measured ahead of time.
fn known_profile(model: &Model, executor: &dyn Executor) -> Option<LatencyProfile> {
    let stored = match &model.executor {
        repository::Executor::Onnx { profile, .. } | repository::Executor::Process { profile, .. } => profile.clone(),
        repository::Executor::Emulated { .. } => None,
    };
    executor.emulated_profile().cloned().or(stored)
}

/// What was measured of a model.
#[derive(Debug)]
pub struct Profiled {
    /// By batch size.
    pub sizes: Vec<Measured>,
    /// l(b).
    pub latency: LatencyProfile,
    /// If requests choose how long they are.
    pub by_length: Option<ByLength>,
}

/// Measures a model on this machine, by ONNX Runtime as it is configured if that runs it; it may use the GPU.
/// `progress` is told of how many batches so many are measured.
///
/// # Errors
/// If the model cannot be loaded or run.
pub fn measure(
    model: &Model,
    (gpu, onnxruntime): (&GpuName, &OnnxRuntime),
    effort: Effort,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Profiled, ExecutorError> {
    let (turns, programs) = (Turns::default(), Programs::default());
    let gpus = config::Gpus::Named(vec![gpu.clone()]);
    let executor = executor::load(model, (&[0], &gpus), onnxruntime, &programs)?;
    let (max_batch, mut trials) = (model.max_batch, Trials::new(&turns, Clock::start()));
    let mut of_size = |batch| progress(batch, max_batch);
    let sizes = profile::measure(model, executor.as_ref(), (effort, &mut trials), &mut of_size)?;
    let by_length = profile::measure_by_length(model, executor.as_ref(), (effort, &mut trials), progress);
    drop(executor);
    programs.wait_until_ended();
    Ok(Profiled { latency: profile::table(&sizes), sizes, by_length })
}

/// The same on a GPU, by its number or its name. What is measured are the batch sizes that GPUs are prepared for.
///
/// # Errors
/// As [`measure`], or if there is no such GPU.
pub fn measure_on_gpu(
    model: &Model,
    (gpu, precision): (&GpuName, Precision),
    effort: Effort,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Profiled, ExecutorError> {
    let repository::Executor::Onnx { file, batching, .. } = &model.executor else {
        return Err(ExecutorError(format!("model {} is no ONNX model, which is what GPUs run", model.name)));
    };
    let devices = Devices::one(gpu, Box::new(real_driver));
    let on_gpus = OnGpus::load(model, (file, batching, precision), &[0], &devices)?;
    let (clock, turns, max_batch) = (Clock::start(), Turns::default(), model.max_batch);
    let mut trials = Trials::new(&turns, clock);
    let mut of_size = |batch| progress(batch, max_batch);
    let memory = (Weights::default(), false);
    let tried = trial::run(clock, model, &on_gpus, memory, (effort, &mut trials), &mut of_size)?;
    let by_length = profile::measure_by_length(model, &on_gpus, (effort, &mut trials), progress);
    Ok(Profiled { sizes: tried.measured, latency: tried.profile, by_length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_runs_in_one_session_at_a_time_is_tried_on_the_gpu_of_that() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits");
        let mut model = repository::load_model(&folder).unwrap();
        let mut tried_by = |processor, provider| {
            let repository::Executor::Onnx { wanted, .. } = &mut model.executor else { panic!("it is an ONNX model") };
            wanted.processor = Some(processor);
            gpu_of_trials(&model, &[3, 5], provider)
        };
        assert_eq!(tried_by(Processor::Onnxruntime, Provider::Cuda), Some(3));
        assert_eq!(tried_by(Processor::Onnxruntime, Provider::Cpu), None, "all of them share the CPU");
        assert_eq!(tried_by(Processor::Cpu, Provider::Cuda), None);
    }
}
