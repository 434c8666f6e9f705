//! Runs a backend: one network thread, which moves packets and drives the state machines, and one thread for each GPU.
//!
//! The backend obeys one scheduler at a time. When it has none any more, it drops every link and every batch, and joins
//! again under a new name: a scheduler that comes back knows nothing of the old plans, and one that was cut off has
//! fenced them.
#![allow(clippy::disallowed_methods)] // Drivers own threads and clocks.

mod ahead;
mod copies;
mod epochs;
mod gpu;
mod health;
mod loader;
mod loading;
mod measuring;
mod pinned;
mod probe;
mod profile;
mod queue;
mod remembered;
mod rows;
mod session;
mod timers;
mod trial;
mod turns;
mod warmup;

use std::{
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use admin::{Listener, Pages, Service, Vitals};
use proto::{
    LatencyProfile, ModelId, Span, Weights, backoff::Backoff, host_memory::HostMemory,
    scheduler_to_frontend::REASON_BYTES_MAX,
};
use repository::{Model, Precision, Processor, Refused, Repository, Stamps, Store};
use transport::{Address, Clock, EndpointConfig};

use crate::{
    config::{self, Config, GpuName, Lanes, OnnxRuntime, Placed, is_on_gpus},
    core::Kept,
    error::{BackendError, ExecutorError},
    executor::{
        self, Loaded, Metrics, OnGpus, Programs,
        gpus::{Devices, OpenDriver, real_driver},
    },
    staging::ModelShape,
};

use copies::Copies;
use epochs::LowerEpochs;
use gpu::Gpus;
use health::Readings;
use loader::Loader;
use loading::{Means, choose_engine, load};
pub use probe::try_if_asked;
pub use profile::{ByLength, Effort, Measured, OfLength, QUANTILE};
use session::{Session, Threads};
use timers::reduce_timer_slack;
use turns::{Trials, Turns};

/// The first wait before the scheduler is tried again; each failure doubles it.
const BACKOFF_MIN: Span = Span::from_millis(50);
/// The longest wait.
const BACKOFF_MAX: Span = Span::from_millis(1_000);

/// Models that could not be loaded of which schedulers are told why.
const NOT_LOADED_MAX: usize = 64;

/// Loads the models, then serves until `stop` is set (looked at ten times a second) and its plans are finished, or
/// `drain_timeout_ms` are over.
///
/// # Errors
/// If the configuration, the repository or a model is wrong, or the network cannot be opened. A scheduler that cannot
/// be reached is no error: it is tried again and again.
pub fn run(config: &Config, stop: &AtomicBool) -> Result<(), BackendError> {
    run_with(config, Programs::default(), stop)
}

/// [`run`], with programs that may ask other models.
///
/// # Errors
/// As [`run`].
pub fn run_with(config: &Config, programs: Programs, stop: &AtomicBool) -> Result<(), BackendError> {
    serve(config, (programs, Box::new(real_driver)), stop)
}

/// [`run`], with GPUs that are opened in another way.
///
/// # Errors
/// As [`run`].
pub fn run_on(config: &Config, stop: &AtomicBool, open: Box<OpenDriver>) -> Result<(), BackendError> {
    serve(config, (Programs::default(), open), stop)
}

/// Reads what [`run`] reads before it opens or loads anything, and yields the repository.
///
/// # Errors
/// If the configuration, a file that it names, or the repository is wrong.
pub fn check(config: &Config) -> Result<Repository, BackendError> {
    config.scheduler_list()?;
    config.network.check()?;
    let found = repository::load(&config.repository)?.checked(config.strict)?;
    Lanes::of(config, &mut config.place(found.clone())?)?;
    Ok(found)
}

fn serve(
    config: &Config,
    (programs, open): (Programs, Box<OpenDriver>),
    stop: &AtomicBool,
) -> Result<(), BackendError> {
    let clock = Clock::start();
    let (schedulers, secrets) = (config.scheduler_list()?, config.network.secrets()?);
    let certificates = config.network.certificates()?;
    tracing::info!(name = config.network.member_name(), "the backend starts");
    let stamps = Stamps::of(&config.repository)?;
    let found = repository::load(&config.repository)?.checked(config.strict)?;
    let ensembles = found.ensembles.clone();
    let mut models = config.place(found)?;
    let lanes = Lanes::of(config, &mut models)?;
    let (readings, opened) = Readings::start(clock).map_err(BackendError::Thread)?;
    let (vitals, lower_epochs) = (Vitals::default(), LowerEpochs::default());
    let metrics = Metrics::new(config.program_metrics);
    let programs = programs.counting(metrics.clone());
    let counted = lower_epochs.clone();
    let told = move |now| {
        let mut text = readings.lock().text(now) + &metrics.text();
        counted.write(&mut text);
        text
    };
    let name = config.network.member_name();
    let pages = Pages::new("backend", name, vitals.clone(), told);
    let _admin = Listener::start(config.admin.as_ref(), clock, pages)?;
    let _service = Service::start(clock, &vitals)?;
    vitals.set_loading("models are loaded");
    let devices = Devices::new(config, open, opened)?;
    if !lanes.is_empty() {
        programs.prepare_to_ask();
    }
    let means = Means { clock, programs, devices, turns: Turns::default(), lanes };
    open_gpus(&means.devices, &models)?;
    let uses_gpus = config.executor == Processor::Cuda || models.iter().any(|placed| is_on_gpus(&placed.model));
    // A model that clients unload, or have yet to load, may be loaded whatever happened meanwhile.
    let shapes: Vec<ModelShape> = models.iter().map(|placed| ModelShape::from(&placed.model)).collect();
    let models = models.into_iter().filter(|placed| config.loads_at_start(&placed.model.name, &ensembles)).collect();
    let (mut models, not_loaded) = load_all(&means, (config, &stamps), models)?;
    config.check_pinned(models.iter().map(|model| model.claim()))?;
    let store = config.load_files.as_deref().map(Store::open).transpose()?;
    let loader = Loader::start(config.clone(), store, means.clone()).map_err(BackendError::Thread)?;
    let gpus = Gpus::start(clock, means.lanes.with_gpus() as usize, uses_gpus).map_err(BackendError::Thread)?;
    let copies = config.memory_pages()?.map_or(0, |_| config.gpus.count() as usize);
    let copies = Copies::start(clock, copies).map_err(BackendError::Thread)?;
    let (Means { devices, turns, lanes, .. }, lower_epochs) = (&means, &lower_epochs);
    vitals.set_ready(Err("it has no scheduler"));
    let heart = vitals.heart("network");
    let vital = (&vitals, &heart);
    let threads = Threads { gpus: &gpus, copies: &copies, loader: &loader, devices, turns, lanes, vital, lower_epochs };
    reduce_timer_slack();
    let (mut backoff, mut kept) = (Backoff::new(BACKOFF_MIN, BACKOFF_MAX), Kept::default());
    for number in 0.. {
        // The route may be another one each time.
        let look = || config.network.arm(None, &schedulers);
        let Some(arm) = transport::wait_for_names(|| stop.load(Ordering::Relaxed), look)? else { break };
        let endpoint = EndpointConfig::over(arm).with_name("backend", &config.network.member_name());
        let endpoint = endpoint.with_secrets(secrets.clone()).with_tls(certificates.clone());
        let place = (config, &schedulers[..], endpoint);
        let mut session = Session::open(place, clock, (models, &shapes), not_loaded.clone(), threads, number)?;
        session.set_kept(kept);
        let ended = session.run(stop);
        (models, kept) = (ended.models, ended.kept);
        if stop.load(Ordering::Relaxed) {
            break;
        }
        if ended.joined {
            backoff.handle_success();
        }
        let now = clock.now();
        let wait = backoff.handle_failure(now) - now;
        let scheduler = schedulers.iter().map(Address::to_string).collect::<Vec<_>>().join(", ");
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
    let models: Vec<Placed> = models.into_iter().map(|placed| choose_engine(config, placed)).collect();
    let tried = probe::all(config, &models);
    for (placed, tried) in models.into_iter().zip(tried) {
        let (name, version) = (placed.model.name.clone(), placed.model.version.clone());
        let load = || {
            tried?;
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
    if let Ok((_, l_1)) = profile::first(model, executor.as_ref(), &mut trials) {
        rows::settle(model, executor.as_ref(), Some(l_1), &mut trials);
    }
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
