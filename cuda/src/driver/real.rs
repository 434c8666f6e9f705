//! A GPU by NVIDIA's libraries: libcuda for memory, streams and graphs, cuDNN for convolutions, cuBLASLt for products,
//! and our own kernels for all else.
//!
//! Everything is made at the start or when a plan is prepared. What serves requests afterwards is copies, events and
//! launches of graphs, none of which allocates or takes a lock for longer than a look into a table.
//!
//! Those of its modules that call C have `unsafe`, and nobody else.

#[allow(unsafe_code)]
mod check;
#[allow(unsafe_code)]
mod context;
#[allow(unsafe_code)]
mod convolution;
#[allow(unsafe_code)]
mod kernels;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod memory;
mod name;
#[allow(unsafe_code)]
mod product;
mod steps;
mod table;
mod timer;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lowering::Plan;
use proto::Span;
use transport::{DeviceMemory, Keeper, Region};

use self::{
    context::{Context, Mark, Queue, Recording},
    memory::{Physical, Pinned, Reach},
    steps::{Call, Steps},
    table::Table,
};
pub use self::{
    context::{devices, direct_access},
    library::{libraries, looked_in},
    name::GpuName,
};
use crate::{
    DriverError,
    driver::{Address, Bases, Device, Driver, Event, Graph, Page, Prepared, Stream},
};

/// What our kernels are compiled for at least: Ampere, the first with TF32 and with copies into shared memory.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// A GPU of this host.
#[derive(Debug)]
pub struct Cuda {
    graphs: Table<Recording>,
    prepared: Table<Vec<Call>>,
    events: Table<Mark>,
    pages: Table<Physical>,
    pinned: Mutex<HashMap<u64, Arc<Pinned>>>,
    steps: Mutex<Steps>,
    execute: Arc<Queue>,
    inputs: Queue,
    outputs: Queue,
    loads: Queue,
    context: Arc<Context>,
}

impl Cuda {
    /// Opens a GPU, and what it is driven with.
    ///
    /// # Errors
    /// If a library is missing or too old, with where it was looked for; if there is no such GPU, or it fails.
    pub fn open(which: &GpuName) -> Result<Self, DriverError> {
        library::require()?;
        let devices = devices()?;
        let index = which.find(&devices)?;
        let (major, minor) = devices[index].compute_capability;
        if (major, minor) < CAPABILITY_MIN {
            let (name, (least, _)) = (&devices[index].name, CAPABILITY_MIN);
            let text = format!("{name} has compute capability {major}.{minor}, not {least}.0: name another GPU");
            return Err(DriverError(text));
        }
        let context = Arc::new(Context::open(index)?);
        memory::check_granularity(&context)?;
        let (least, greatest) = context.priorities()?;
        // Lower numbers are more urgent.
        let middle = (greatest + 1).min(least);
        let execute = Arc::new(Queue::new(&context, middle)?);
        Ok(Self {
            graphs: Table::new("graph"),
            prepared: Table::new("prepared plan"),
            events: Table::new("event"),
            pages: Table::new("page"),
            pinned: Mutex::default(),
            steps: Mutex::new(Steps::new(&context, &execute)?),
            execute,
            inputs: Queue::new(&context, greatest)?,
            outputs: Queue::new(&context, greatest)?,
            loads: Queue::new(&context, least)?,
            context,
        })
    }

    fn queue(&self, stream: Stream) -> &Queue {
        match stream {
            Stream::Execute => &self.execute,
            Stream::Inputs => &self.inputs,
            Stream::Outputs => &self.outputs,
            Stream::Loads => &self.loads,
        }
    }

    /// The stream, once this thread may use it.
    fn enter(&self, stream: Stream) -> Result<&Queue, DriverError> {
        self.context.enter()?;
        Ok(self.queue(stream))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // What runs uses what goes now.
        for stream in Stream::ALL {
            let _ = self.enter(stream).and_then(Queue::synchronize);
        }
        lock(&self.pinned).drain().for_each(|(_, pinned)| pinned.give_back());
    }
}

/// What is behind a lock is whole whenever it is free.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn length(bytes: u64) -> Result<usize, DriverError> {
    usize::try_from(bytes).map_err(|_| DriverError(format!("{bytes} bytes are more than there are addresses")))
}

impl Driver for Cuda {
    fn device(&self) -> Result<Device, DriverError> {
        self.context.describe()
    }

    fn reserve(&self, bytes: u64) -> Result<Address, DriverError> {
        self.context.enter()?;
        memory::reserve(length(bytes)?)
    }

    fn release(&self, at: Address, bytes: u64) {
        if self.context.enter().is_ok()
            && let Ok(bytes) = length(bytes)
        {
            memory::release(at, bytes);
        }
    }

    fn create_page(&self) -> Result<Page, DriverError> {
        Ok(Page(self.pages.insert(Physical::new(&self.context, Reach::Gpu)?)))
    }

    fn create_shared_page(&self) -> Result<Page, DriverError> {
        self.context.require_remote_writes()?;
        Ok(Page(self.pages.insert(Physical::new(&self.context, Reach::Rdma)?)))
    }

    fn share(&self, at: Address, bytes: u64, keeper: Arc<dyn Keeper>) -> Result<DeviceMemory, DriverError> {
        self.context.enter()?;
        memory::share(&self.context, at, length(bytes)?, keeper)
    }

    fn flush_remote_writes(&self) -> Result<(), DriverError> {
        self.context.enter()?;
        self.context.flush_remote_writes()
    }

    fn destroy_page(&self, page: Page) {
        self.pages.remove(page.0);
    }

    fn map(&self, at: Address, pages: &[Page]) -> Result<(), DriverError> {
        self.context.enter()?;
        let pages = pages.iter().map(|page| self.pages.get(page.0)).collect::<Result<Vec<_>, _>>()?;
        memory::map(&self.context, at, &pages)
    }

    fn unmap(&self, at: Address, pages: usize) -> Result<(), DriverError> {
        self.context.enter()?;
        memory::unmap(at, pages)
    }

    fn pin(&self, region: &Region) -> Result<(), DriverError> {
        let pinned = Pinned::get(&self.context, region)?;
        lock(&self.pinned).insert(region.address(), pinned);
        Ok(())
    }

    fn unpin(&self, region: &Region) {
        let pinned = lock(&self.pinned).remove(&region.address());
        pinned.into_iter().for_each(Pinned::give_back);
    }

    fn copy_in(&self, stream: Stream, to: Address, from: (&Region, usize), bytes: usize) -> Result<(), DriverError> {
        memory::copy_in(self.enter(stream)?, to, from, bytes)
    }

    fn copy_out(&self, stream: Stream, to: (&Region, usize), from: Address, bytes: usize) -> Result<(), DriverError> {
        memory::copy_out(self.enter(stream)?, to, from, bytes)
    }

    fn copy_on_device(
        &self,
        stream: Stream,
        to: (Address, usize),
        from: (Address, usize),
        bytes: usize,
        rows: usize,
    ) -> Result<(), DriverError> {
        memory::copy_rows(self.enter(stream)?, to, from, bytes, rows)
    }

    fn clear(&self, stream: Stream, at: Address, bytes: usize) -> Result<(), DriverError> {
        memory::clear(self.enter(stream)?, at, bytes)
    }

    fn create_event(&self, is_timed: bool) -> Result<Event, DriverError> {
        Ok(Event(self.events.insert(Mark::new(&self.context, is_timed)?)))
    }

    fn destroy_event(&self, event: Event) {
        self.events.remove(event.0);
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError> {
        self.events.get(event.0)?.record(self.enter(stream)?)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), DriverError> {
        self.enter(stream)?.wait(&*self.events.get(event.0)?)
    }

    fn is_done(&self, event: Event) -> Result<bool, DriverError> {
        self.context.enter()?;
        self.events.get(event.0)?.is_done()
    }

    fn synchronize(&self, event: Event) -> Result<(), DriverError> {
        self.context.enter()?;
        self.events.get(event.0)?.synchronize()
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Span, DriverError> {
        self.context.enter()?;
        self.events.get(from.0)?.until(&*self.events.get(to.0)?)
    }

    fn prepare(&self, plan: &Arc<Plan>, at: Bases) -> Result<Prepared, DriverError> {
        self.context.enter()?;
        Ok(Prepared(self.prepared.insert(lock(&self.steps).prepare(plan, at)?)))
    }

    fn forget(&self, prepared: Prepared) {
        self.prepared.remove(prepared.0);
    }

    fn enqueue(&self, prepared: Prepared) -> Result<(), DriverError> {
        self.context.enter()?;
        let steps = lock(&self.steps);
        self.prepared.get(prepared.0)?.iter().try_for_each(|call| steps.enqueue(call))
    }

    fn begin_capture(&self) -> Result<(), DriverError> {
        self.enter(Stream::Execute)?.begin_capture()
    }

    fn end_capture(&self) -> Result<Graph, DriverError> {
        Ok(Graph(self.graphs.insert(self.enter(Stream::Execute)?.end_capture()?)))
    }

    fn launch(&self, graph: Graph) -> Result<(), DriverError> {
        self.graphs.get(graph.0)?.launch(self.enter(Stream::Execute)?)
    }

    fn destroy_graph(&self, graph: Graph) {
        self.graphs.remove(graph.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there are the libraries, a GPU of that index is not.
    #[test]
    fn what_is_missing_is_said_in_one_line() {
        let error = Cuda::open(&GpuName::Index(usize::MAX)).unwrap_err().0;
        assert!(!error.contains('\n'), "{error}");
        let missing: Vec<String> = libraries().into_iter().filter_map(|library| library.found.err()).collect();
        match missing.first() {
            Some(missing) => assert_eq!(&error, missing),
            None => assert!(error.contains("no GPU") || error.starts_with("cu"), "{error}"),
        }
    }

    #[test]
    fn devices_need_libcuda_alone() {
        let cuda = libraries().into_iter().find(|library| library.name == "libcuda").unwrap();
        match (cuda.found, devices()) {
            (Err(missing), Err(error)) => assert_eq!(error.0, missing),
            (Err(missing), Ok(found)) => panic!("{found:?} without libcuda: {missing}"),
            (Ok(_), Err(error)) => assert!(error.0.starts_with("cu"), "{error}"),
            (Ok(_), Ok(_)) => {}
        }
    }
}
