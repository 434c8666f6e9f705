//! What is asked of one GPU.
//!
//! The rules, which the fake insists on and the real one relies on:
//!
//! - While a thread captures, it allocates, maps, unmaps, pins and waits for nothing, and nobody puts anything on the
//!   stream but it, and that by [`Driver::enqueue`], [`Driver::copy_on_device`] and [`Driver::clear`] only. Other
//!   threads load weights and stage inputs meanwhile.
//! - A page is mapped at one address at most; it is unmapped only when no work that was put on a stream before may
//!   still use it: its event has been seen done.
//! - Prepared plans of one GPU run one after another: they share the arena.
//! - Host memory of copies is pinned, and stays so until they are done.
//! - What RDMA devices reach is made of pages that were taken for them, and what they have written there is used after
//!   [`Driver::flush_remote_writes`] only.

pub mod fake;
#[cfg(feature = "driver")]
pub mod real;

use std::{fmt::Debug, sync::Arc};

use lowering::Plan;
use proto::Span;
use thiserror::Error;
use transport::{DeviceMemory, Keeper, Region};

/// Why a GPU did not do what was asked, in one line: the call, what it returned, and what to change if that is known.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct DriverError(pub String);

/// A virtual address of the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// So many bytes on.
    #[must_use]
    pub fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A page of the GPU's physical memory ([`proto::weights::PAGE_BYTES`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(pub u64);

/// A mark in the order of a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event(pub u64);

/// A plan with its addresses, launch parameters and algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prepared(pub u64);

/// What has been captured from a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Graph(pub u64);

/// Queues of work, each done in order; they exist from the start (Clockwork, section 5.2). Inputs and outputs go before
/// executions, and these before loads, where they compete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// Batches.
    Execute,
    /// Inputs on their way to the GPU.
    Inputs,
    /// Outputs on their way from it.
    Outputs,
    /// Weights on their way to it.
    Loads,
}

impl Stream {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Execute, Self::Inputs, Self::Outputs, Self::Loads];
}

/// What a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// As NVIDIA calls it.
    pub name: String,
    /// `GPU-...` or `MIG-...`.
    pub uuid: String,
    /// `domain:bus:device.function`.
    pub pci: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of it that are free.
    pub free_bytes: u64,
    /// Major and minor.
    pub compute_capability: (u32, u32),
}

/// Where a plan runs: addresses that do not change as long as it is prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bases {
    /// Of the arena, mapped for as many bytes as the plan needs.
    pub arena: Address,
    /// Of the model's weights; mapped and copied while the plan is prepared and whenever it runs.
    pub weights: Address,
}

/// One GPU. Calls may come from any thread.
pub trait Driver: Debug + Send + Sync {
    /// What it is, and how much of its memory is free now.
    ///
    /// # Errors
    /// If it does not answer.
    fn device(&self) -> Result<Device, DriverError>;

    /// Takes so many bytes of addresses, a multiple of a page, with no memory behind them yet.
    ///
    /// # Errors
    /// If there are none left.
    fn reserve(&self, bytes: u64) -> Result<Address, DriverError>;

    /// Gives addresses back that [`Self::reserve`] yielded, when nothing is mapped there.
    fn release(&self, at: Address, bytes: u64);

    /// Takes a page of memory.
    ///
    /// # Errors
    /// If there is none left.
    fn create_page(&self) -> Result<Page, DriverError>;

    /// Takes a page of memory that RDMA devices may reach where it is mapped.
    ///
    /// # Errors
    /// If there is none left, or the GPU opens none to them.
    fn create_shared_page(&self) -> Result<Page, DriverError>;

    /// What is behind these addresses, for RDMA devices; all of it in pages that may be shared. `keeper` keeps it
    /// there.
    ///
    /// # Errors
    /// If the driver refuses.
    fn share(&self, at: Address, bytes: u64, keeper: Arc<dyn Keeper>) -> Result<DeviceMemory, DriverError>;

    /// What RDMA devices have written before they told of it is there for whatever is put on a stream from now on.
    ///
    /// # Errors
    /// If the driver refuses.
    fn flush_remote_writes(&self) -> Result<(), DriverError>;

    /// Gives a page back that is not mapped.
    fn destroy_page(&self, page: Page);

    /// Puts pages behind addresses, one after another, for reading and writing.
    ///
    /// # Errors
    /// If the driver refuses; none of them is mapped then.
    fn map(&self, at: Address, pages: &[Page]) -> Result<(), DriverError>;

    /// Takes so many pages away from behind addresses. They keep what is in them, for whoever maps them next.
    ///
    /// # Errors
    /// If the driver refuses; all of them are still mapped then.
    fn unmap(&self, at: Address, pages: usize) -> Result<(), DriverError>;

    /// Makes host memory known to the GPU, so that it is copied at full speed and beside other work. Other GPUs of this
    /// process may have the same memory pinned.
    ///
    /// # Errors
    /// If the driver refuses: `ulimit -l` may be too low.
    fn pin(&self, region: &Region) -> Result<(), DriverError>;

    /// Undoes [`Self::pin`].
    fn unpin(&self, region: &Region);

    /// Copies pinned host memory to the GPU.
    ///
    /// # Errors
    /// If the driver refuses.
    fn copy_in(&self, stream: Stream, to: Address, from: (&Region, usize), bytes: usize) -> Result<(), DriverError>;

    /// Copies the GPU's memory to pinned host memory.
    ///
    /// # Errors
    /// If the driver refuses.
    fn copy_out(&self, stream: Stream, to: (&Region, usize), from: Address, bytes: usize) -> Result<(), DriverError>;

    /// Copies so many rows of so many bytes within the GPU's memory; each side says where the first row is, and how
    /// many bytes are from one row to the next.
    ///
    /// # Errors
    /// If the driver refuses.
    fn copy_on_device(
        &self,
        stream: Stream,
        to: (Address, usize),
        from: (Address, usize),
        bytes: usize,
        rows: usize,
    ) -> Result<(), DriverError>;

    /// Fills with zeros.
    ///
    /// # Errors
    /// If the driver refuses.
    fn clear(&self, stream: Stream, at: Address, bytes: usize) -> Result<(), DriverError>;

    /// Makes an event. `is_timed` ones can be given to [`Self::elapsed`].
    ///
    /// # Errors
    /// If the driver refuses.
    fn create_event(&self, is_timed: bool) -> Result<Event, DriverError>;

    /// Gives an event back.
    fn destroy_event(&self, event: Event);

    /// Marks what has been put on the stream so far.
    ///
    /// # Errors
    /// If the driver refuses.
    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError>;

    /// What is put on the stream from now on waits until what the event marks is done.
    ///
    /// # Errors
    /// If the driver refuses.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), DriverError>;

    /// Whether what it marks is done; also if it was never recorded.
    ///
    /// # Errors
    /// If the GPU failed: nothing more can be done with it then.
    fn is_done(&self, event: Event) -> Result<bool, DriverError>;

    /// Waits on this thread until what it marks is done, without keeping a core busy.
    ///
    /// # Errors
    /// As [`Self::is_done`].
    fn synchronize(&self, event: Event) -> Result<(), DriverError>;

    /// The GPU's time between two timed events that are done.
    ///
    /// # Errors
    /// If they are not.
    fn elapsed(&self, from: Event, to: Event) -> Result<Span, DriverError>;

    /// Gets a plan ready: loads kernels, picks algorithms, fixes every parameter. Algorithms are picked by capturing
    /// them on [`Stream::Execute`] and launching that, so nobody else puts anything there meanwhile, and the arena's
    /// contents are lost. Waits for the GPU.
    ///
    /// # Errors
    /// If a step cannot be run, by its kind.
    fn prepare(&self, plan: &Arc<Plan>, at: Bases) -> Result<Prepared, DriverError>;

    /// Gives a prepared plan back, when nothing runs that uses it.
    fn forget(&self, prepared: Prepared);

    /// Puts a plan's steps on [`Stream::Execute`].
    ///
    /// # Errors
    /// If the driver refuses.
    fn enqueue(&self, prepared: Prepared) -> Result<(), DriverError>;

    /// What this thread puts on [`Stream::Execute`] from now on is not run, but remembered.
    ///
    /// # Errors
    /// If the driver refuses.
    fn begin_capture(&self) -> Result<(), DriverError>;

    /// Ends what [`Self::begin_capture`] began, also if it fails.
    ///
    /// # Errors
    /// If something was put there that cannot be captured.
    fn end_capture(&self) -> Result<Graph, DriverError>;

    /// Puts all that was captured on [`Stream::Execute`], at once.
    ///
    /// # Errors
    /// If the driver refuses.
    fn launch(&self, graph: Graph) -> Result<(), DriverError>;

    /// Gives a graph back, when it does not run.
    fn destroy_graph(&self, graph: Graph);
}
