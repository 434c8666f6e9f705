//! One GPU, on which models are run one batch at a time (Clockwork, section 5.2).
//!
//! All its memory is taken when it is opened, or while models are registered: pages for weights, one arena that all
//! plans share, and for each [`Slot`] room for the inputs of a batch to come and for the outputs of one that has run.
//! Each has addresses that never change, behind which pages are put as registered models need them, so what has been
//! captured stays right. Serving a batch allocates nothing, maps nothing and waits on the host once.
//!
//! Locks are taken in this order: a model's copies, a slot, a model's weights, the stream of batches, the rest.

use std::{
    hint,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use proto::weights::{PAGE_BYTES, PAGES_MAX};
use thiserror::Error;
use transport::Region;

use crate::{
    driver::{Address, Device, Driver, DriverError, Stream},
    handles::{Event, Pinned, Range},
    model::Form,
    pages::Pool,
};

/// Batches whose inputs or outputs are in the GPU's memory at a time: one runs, one is staged meanwhile, and one is of
/// a model that is tried before it serves.
pub const SLOTS: usize = 3;
/// Tasks of a batch at most.
pub const BATCH_MAX: usize = 4096;
/// Bytes of a task's fault.
pub(crate) const FAULT_BYTES: usize = size_of::<u32>();

/// A batch is asked for so many times without a pause, which is enough for a copy of outputs, ...
const POLLS_SPINNING: usize = 64;
/// ... and so many times in all, giving the CPU away in between; each takes about a microsecond. Only then the thread
/// sleeps in the driver, from where it takes tens of microseconds to come back: little, beside a batch that long.
const POLLS: usize = 2048;

/// Why a GPU did not do something, in one line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GpuError {
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// There are too few free pages for a model's weights.
    #[error("{needed} pages of weights are needed, {free} of {all} are free: unload a model first")]
    NoRoom {
        /// What the model takes.
        needed: usize,
        /// What is free.
        free: usize,
        /// All there are.
        all: u32,
    },
    /// A batch was to run without its weights.
    #[error("the weights of {0} are not in the GPU's memory: load them first")]
    NotResident(String),
    /// A model was to be loaded whose weights have been let go.
    #[error("the weights of {0} are not in host memory: read them first")]
    NotInHostMemory(String),
    /// The GPU or the model cannot be served as it is; says what to change.
    #[error("{0}")]
    Refused(String),
    /// The GPU has failed for good.
    #[error("the GPU has failed: look for its errors (Xid) in the kernel's log, and start the backend again")]
    Failed,
}

/// How a GPU's memory is dealt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Pages of weights ([`PAGE_BYTES`]); `None` for all that is free but for what follows.
    pub weights_pages: Option<u32>,
    /// The arena grows up to so many bytes: activations of the largest batch of any model.
    pub arena_bytes_max: u64,
    /// The inputs of a batch, and its outputs, take so many bytes at most, in each of [`SLOTS`].
    pub staging_bytes_max: u64,
    /// Bytes that stay free: for kernels, for the libraries' workspaces, and for the weights of a model while it is
    /// registered.
    pub spare_bytes: u64,
    /// Each size of a model runs so many times to be measured when it is registered; at least once.
    pub repeats: usize,
}

impl Default for Settings {
    /// 2 GiB for the arena, 256 MiB for each slot's inputs and for its outputs, 2 GiB to spare.
    fn default() -> Self {
        Self {
            weights_pages: None,
            arena_bytes_max: 2 << 30,
            staging_bytes_max: 256 << 20,
            spare_bytes: 2 << 30,
            repeats: 10,
        }
    }
}

/// Names one of the places in a GPU's memory where a batch's inputs and outputs lie: below [`SLOTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub usize);

impl Slot {
    /// Where models are measured and tried, so that batches of those that serve need not wait.
    pub const TRIAL: Self = Self(SLOTS - 1);
}

/// A GPU: its memory, and who uses it when.
#[derive(Debug)]
pub struct Gpu {
    pub(crate) buffers: Vec<Mutex<Buffers>>,
    pub(crate) arena: Mutex<Range>,
    pub(crate) arena_at: Address,
    /// Whoever puts work on the stream of batches.
    pub(crate) execute: Mutex<()>,
    pub(crate) pool: Mutex<Pool>,
    pub(crate) settings: Settings,
    settled: Mutex<Event>,
    is_up: AtomicBool,
    models: AtomicU64,
    pub(crate) driver: Arc<dyn Driver>,
}

/// A slot.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// Tasks' inputs one after another.
    pub(crate) inputs: Range,
    /// Tasks' outputs one after another, and, behind, their faults.
    pub(crate) outputs: Range,
    /// Where their faults are copied to.
    pub(crate) faults: Pinned,
    /// Whose inputs are there, or on their way, in which form, and how many tasks'.
    pub(crate) holds: Option<(ModelKey, Form, usize)>,
    /// The inputs are there.
    pub(crate) staged: Event,
    /// The inputs are there, and the batch begins.
    pub(crate) started: Event,
    /// The outputs are in the slot.
    pub(crate) ended: Event,
    /// The outputs are in host memory.
    pub(crate) delivered: Event,
}

/// Assigned by the GPU when a model is registered; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelKey(u64);

impl Buffers {
    fn new(driver: &Arc<dyn Driver>, bytes_max: u64) -> Result<Self, GpuError> {
        let faults = allocate(BATCH_MAX * FAULT_BYTES)?;
        Ok(Self {
            inputs: Range::reserve(driver, bytes_max)?,
            outputs: Range::reserve(driver, bytes_max + PAGE_BYTES)?,
            faults: Pinned::new(driver, faults)?,
            holds: None,
            staged: Event::new(driver)?,
            started: Event::timed(driver)?,
            ended: Event::timed(driver)?,
            delivered: Event::new(driver)?,
        })
    }
}

impl Gpu {
    /// Takes a GPU: makes all pages of weights, and reserves addresses for the rest.
    ///
    /// # Errors
    /// If the driver refuses, or the GPU has too little free memory.
    pub fn open(driver: Arc<dyn Driver>, settings: Settings) -> Result<Arc<Self>, GpuError> {
        let pages = match settings.weights_pages {
            Some(pages) => pages,
            None => pages_left(&driver.device()?, &settings)?,
        };
        let buffers = || Buffers::new(&driver, settings.staging_bytes_max).map(Mutex::new);
        let buffers = (0..SLOTS).map(|_| buffers()).collect::<Result<_, _>>()?;
        let arena = Range::reserve(&driver, settings.arena_bytes_max)?;
        let pool = Pool::new(&driver, pages).map_err(|error| {
            let text = format!("the GPU has no room for {pages} pages of weights ({error}): give it fewer");
            GpuError::Refused(text)
        })?;
        Ok(Arc::new(Self {
            buffers,
            arena_at: arena.at,
            arena: Mutex::new(arena),
            execute: Mutex::new(()),
            pool: Mutex::new(pool),
            settings,
            settled: Mutex::new(Event::new(&driver)?),
            is_up: AtomicBool::new(true),
            models: AtomicU64::new(0),
            driver,
        }))
    }

    /// What it is, and how much of its memory is free now.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn device(&self) -> Result<Device, GpuError> {
        Ok(self.driver.device()?)
    }

    /// All pages of weights.
    #[must_use]
    pub fn weights_pages(&self) -> u32 {
        lock(&self.pool).all()
    }

    /// Pages of weights that nothing is in.
    #[must_use]
    pub fn weights_pages_free(&self) -> usize {
        lock(&self.pool).free()
    }

    /// Whether it works. What has failed for good stays so: the process must start again.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Relaxed)
    }

    /// Makes host memory known to this GPU, which inputs are staged from or outputs are copied to. Where several GPUs
    /// use the same memory, each must know it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn pin(self: &Arc<Self>, region: &Region) -> Result<PinnedRegion, GpuError> {
        Ok(PinnedRegion { pinned: Pinned::new(&self.driver, region.clone())?, gpu: Arc::clone(self) })
    }

    pub(crate) fn next_model(&self) -> ModelKey {
        ModelKey(self.models.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn slot(&self, slot: Slot) -> MutexGuard<'_, Buffers> {
        lock(&self.buffers[slot.0])
    }

    pub(crate) fn check(&self) -> Result<(), GpuError> {
        if self.is_up() { Ok(()) } else { Err(GpuError::Failed) }
    }

    /// Waits on this thread until what the event marks is done. A thread that only polled would take a core from the
    /// rest of the process for as long as a batch runs, and hosts of few cores have none to give.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), DriverError> {
        for poll in 0..POLLS {
            if self.driver.is_done(event.id)? {
                return Ok(());
            }
            if poll < POLLS_SPINNING {
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        self.driver.synchronize(event.id)
    }

    /// After a call failed on the way: waits for all that has been put on streams, so that memory it uses can be used
    /// otherwise. A GPU that cannot even do that has failed.
    pub(crate) fn settle(&self) {
        let event = lock(&self.settled);
        let settle = |stream| {
            let turn = lock(&self.execute);
            self.driver.record(event.id, stream)?;
            drop(turn);
            self.driver.synchronize(event.id)
        };
        if let Err(error) = Stream::ALL.into_iter().try_for_each(settle)
            && self.is_up.swap(false, Ordering::Relaxed)
        {
            tracing::error!(%error, "the GPU has failed");
        }
    }
}

/// Host memory that a GPU knows as long as this lives.
#[derive(Debug)]
pub struct PinnedRegion {
    pinned: Pinned,
    gpu: Arc<Gpu>,
}

impl PinnedRegion {
    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.pinned.region
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        // Inputs may be on their way from there to a batch that never ran. All else that is put on streams is waited
        // for by whoever put it there.
        self.gpu.settle();
    }
}

/// What is left for weights.
fn pages_left(device: &Device, settings: &Settings) -> Result<u32, GpuError> {
    let Settings { arena_bytes_max, staging_bytes_max, spare_bytes, .. } = settings;
    let others = arena_bytes_max + 2 * SLOTS as u64 * (staging_bytes_max + PAGE_BYTES) + spare_bytes;
    match device.free_bytes.saturating_sub(others) / PAGE_BYTES {
        0 => Err(GpuError::Refused(format!(
            "{} has {} MiB of free memory, and all but weights takes up to {} MiB: free some, or set less aside",
            device.name,
            device.free_bytes >> 20,
            others >> 20
        ))),
        pages => Ok(pages.min(PAGES_MAX.into()) as u32),
    }
}

/// Host memory for `bytes`, such as a model's weights: [`crate::Hosted::read`] wants it.
///
/// # Errors
/// If the host has not so much memory.
pub fn image(bytes: &[u8]) -> Result<Region, GpuError> {
    let region = allocate(bytes.len())?;
    region.write(0, bytes);
    Ok(region)
}

fn allocate(bytes: usize) -> Result<Region, GpuError> {
    let refuse = |error| GpuError::Refused(format!("the host has no {bytes} bytes of memory to pin: {error}"));
    Region::allocate(bytes).map_err(refuse)
}

/// A panic elsewhere is reported elsewhere; what it left is given back all the same.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
