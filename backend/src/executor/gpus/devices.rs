//! The GPUs of a backend, each opened when its first model comes: what hosts only emulated models, or those that
//! programs run, needs none.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use crossbeam_channel::Sender;
use cuda::{Driver, DriverError, Gpu, Landing, PinnedRegion, Settings};
use proto::weights::PAGE_BYTES;
use rustix::fs::{FlockOperation, flock};
use transport::Region;

use crate::{
    config::{Config, GpuName},
    error::{BackendError, ExecutorError},
    staging::BUFFERS,
};

/// Opens a GPU by its number or its name.
pub type OpenDriver = dyn Fn(&str) -> Result<Arc<dyn Driver>, DriverError> + Send + Sync;

/// Opens a GPU of this host.
///
/// # Errors
/// If there is none, or a library is missing: says which, and where it was looked for.
#[cfg(feature = "cuda")]
pub fn real_driver(name: &str) -> Result<Arc<dyn Driver>, DriverError> {
    Ok(Arc::new(cuda::driver::real::Cuda::open(&name.parse()?)?))
}

/// Opens none.
///
/// # Errors
/// Always: says what a program that serves GPUs is built with.
#[cfg(not(feature = "cuda"))]
pub fn real_driver(_: &str) -> Result<Arc<dyn Driver>, DriverError> {
    Err(DriverError(cuda::WITHOUT_GPUS.to_owned()))
}

/// The GPUs that a backend may use.
pub struct Devices {
    names: Vec<GpuName>,
    weights_pages: Option<u32>,
    share_gpu: bool,
    /// Whether RDMA devices may write inputs into their memory.
    gpu_direct: bool,
    open: Box<OpenDriver>,
    /// Who is told of each GPU that was opened.
    watcher: Option<Sender<cuda::driver::Device>>,
    opened: Mutex<BTreeMap<usize, Arc<Device>>>,
}

/// A GPU.
pub struct Device {
    /// As it is called in the configuration, and as NVIDIA calls it.
    pub(super) name: String,
    pub(super) gpu: Arc<Gpu>,
    /// Whose batch is tried.
    pub(super) trial: Mutex<()>,
    /// Where inputs land, once it has been asked for: a session after the other has the same.
    landing: Mutex<Option<Arc<Landing>>>,
    /// Other backends see that it is taken.
    _lock: Option<File>,
}

impl Devices {
    /// Those of a configuration; none is opened yet. Each one that is will be told to `watcher`.
    ///
    /// # Errors
    /// If keys do not go together.
    pub fn new(
        config: &Config,
        open: Box<OpenDriver>,
        watcher: Sender<cuda::driver::Device>,
    ) -> Result<Arc<Self>, BackendError> {
        let weights_pages = config.memory_pages()?;
        if config.share_gpu && weights_pages.is_none() {
            let text =
                "share_gpu: found it without gpu_memory_mb, expected both, as each backend takes all memory else";
            return Err(BackendError::Config(text.to_owned()));
        }
        let (names, watcher, opened) = (config.gpus.names(), Some(watcher), Mutex::default());
        let (share_gpu, gpu_direct) = (config.share_gpu, config.gpu_direct);
        Ok(Arc::new(Self { names, weights_pages, share_gpu, gpu_direct, open, watcher, opened }))
    }

    /// One GPU, all of whose memory is ours.
    #[must_use]
    pub fn one(name: &GpuName, open: Box<OpenDriver>) -> Arc<Self> {
        let (names, opened) = (vec![name.clone()], Mutex::default());
        let (share_gpu, gpu_direct) = (false, false);
        Arc::new(Self { names, weights_pages: None, share_gpu, gpu_direct, open, watcher: None, opened })
    }

    /// A GPU by its index in the configuration, opened if it was not.
    ///
    /// # Errors
    /// If it is not there, is in use, or has no memory left: says what to change.
    pub fn gpu(&self, index: usize) -> Result<Arc<Device>, ExecutorError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.get(&index) {
            return Ok(Arc::clone(device));
        }
        let name = self.names.get(index).map_or_else(|| index.to_string(), ToString::to_string);
        let failed = |error: &dyn std::fmt::Display| ExecutorError(format!("GPU {name}: {error}"));
        let driver = (self.open)(&name).map_err(|error| failed(&error))?;
        let found = driver.device().map_err(|error| failed(&error))?;
        let lock = if self.share_gpu { None } else { Some(lock(&found.uuid).map_err(|error| failed(&error))?) };
        let settings = settings(found.free_bytes, self.weights_pages, self.gpu_direct);
        let gpu = Gpu::open(driver, settings).map_err(|error| failed(&error))?;
        let (pages, share) = (gpu.weights_pages(), self.share_gpu);
        tracing::info!(
            gpu = name,
            device = found.name,
            uuid = found.uuid,
            weights_pages = pages,
            share,
            "opened a GPU"
        );
        let name = format!("{name} ({})", found.name);
        if let Some(watcher) = &self.watcher {
            // Nobody may be there any more as the backend ends.
            let _ = watcher.send(found);
        }
        let (trial, landing) = (Mutex::default(), Mutex::default());
        let device = Arc::new(Device { name, gpu, trial, landing, _lock: lock });
        opened.insert(index, Arc::clone(&device));
        Ok(device)
    }

    /// Makes memory known to a GPU, if that has been opened.
    ///
    /// # Errors
    /// If it cannot be pinned.
    pub fn pin(&self, index: usize, region: &Region) -> Result<Option<PinnedRegion>, ExecutorError> {
        Ok(self.opened(index).map(|device| device.gpu.pin(region)).transpose()?)
    }

    fn opened(&self, index: usize) -> Option<Arc<Device>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).get(&index).cloned()
    }

    /// So many bytes of a GPU's memory at least that RDMA devices may reach, if that is wanted and the GPU has been
    /// opened.
    ///
    /// # Errors
    /// If the GPU opens none to them, or has no room.
    pub fn landing(&self, index: usize, bytes: usize) -> Result<Option<Arc<Landing>>, ExecutorError> {
        let Some(device) = self.opened(index).filter(|_| self.gpu_direct) else { return Ok(None) };
        let mut landing = device.landing.lock().unwrap_or_else(PoisonError::into_inner);
        if landing.as_ref().is_none_or(|landing| landing.bytes() < bytes) {
            // What a session before had goes first, so that there is room for both.
            *landing = None;
            *landing = Some(device.gpu.landing(bytes)?);
        }
        Ok(landing.clone())
    }
}

/// What is set aside for all but weights is what large models want, and less where a GPU has little. Inputs land in as
/// many rooms as there are staging buffers.
fn settings(free_bytes: u64, weights_pages: Option<u32>, gpu_direct: bool) -> Settings {
    let most = Settings::default();
    let at_most = |bytes: u64, share: u64| bytes.min((free_bytes / share).next_multiple_of(PAGE_BYTES));
    let staging_bytes_max = at_most(most.staging_bytes_max, 64);
    let landing_bytes = if gpu_direct { BUFFERS as u64 * staging_bytes_max } else { 0 };
    Settings {
        weights_pages,
        arena_bytes_max: at_most(most.arena_bytes_max, 4),
        staging_bytes_max,
        spare_bytes: at_most(most.spare_bytes, 8) + landing_bytes,
        ..most
    }
}

/// Takes a GPU for this process alone, as far as backends of this host go.
fn lock(uuid: &str) -> Result<File, String> {
    let name: String = uuid.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
    let path = std::env::temp_dir().join(format!("downbeat-{name}.lock"));
    let file = open_lock(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(_) => Err(format!(
            "another backend of this host uses it ({} is locked); give each its own (key gpus), or say share_gpu = \
             true in all of them",
            path.display()
        )),
    }
}

/// Another user's file can be read, which is all that a lock needs.
fn open_lock(path: &PathBuf) -> std::io::Result<File> {
    let create = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    create.or_else(|error| if path.exists() { File::open(path) } else { Err(error) })
}
