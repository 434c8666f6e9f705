//! What is taken from a driver, and given back when it is dropped. Whoever drops it has seen that no work uses it any
//! more.

use std::sync::Arc;

use lowering::Plan;
use proto::weights::PAGE_BYTES;
use transport::Region;

use crate::driver::{self, Address, Bases, Driver, DriverError, Page};

/// Attempts at taking pages away. What is refused twice will be refused always: the GPU has failed.
const ATTEMPTS: usize = 2;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    driver: Arc<dyn Driver>,
    pub(crate) id: driver::Event,
}

impl Event {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self, DriverError> {
        Ok(Self { driver: Arc::clone(driver), id: driver.create_event(false)? })
    }

    pub(crate) fn timed(driver: &Arc<dyn Driver>) -> Result<Self, DriverError> {
        Ok(Self { driver: Arc::clone(driver), id: driver.create_event(true)? })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.driver.destroy_event(self.id);
    }
}

/// Pinned host memory. Memory of no bytes needs no pinning.
#[derive(Debug)]
pub(crate) struct Pinned {
    driver: Arc<dyn Driver>,
    pub(crate) region: Region,
}

impl Pinned {
    pub(crate) fn new(driver: &Arc<dyn Driver>, region: Region) -> Result<Self, DriverError> {
        if !region.is_empty() {
            driver.pin(&region)?;
        }
        Ok(Self { driver: Arc::clone(driver), region })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.region.is_empty() {
            self.driver.unpin(&self.region);
        }
    }
}

/// A plan that has been prepared.
#[derive(Debug)]
pub(crate) struct Prepared {
    driver: Arc<dyn Driver>,
    pub(crate) id: driver::Prepared,
}

impl Prepared {
    pub(crate) fn new(driver: &Arc<dyn Driver>, plan: &Arc<Plan>, at: Bases) -> Result<Self, DriverError> {
        Ok(Self { driver: Arc::clone(driver), id: driver.prepare(plan, at)? })
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.driver.forget(self.id);
    }
}

/// What has been captured.
#[derive(Debug)]
pub(crate) struct Graph {
    driver: Arc<dyn Driver>,
    pub(crate) id: driver::Graph,
}

impl Graph {
    /// Of what `put` puts on the stream of batches, which nobody else uses meanwhile.
    pub(crate) fn capture(
        driver: &Arc<dyn Driver>,
        put: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<Self, DriverError> {
        driver.begin_capture()?;
        let put = put();
        let graph = driver.end_capture().map(|id| Self { driver: Arc::clone(driver), id });
        put.and(graph)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.driver.destroy_graph(self.id);
    }
}

/// Addresses, and the pages behind the first of them. Addresses never change, whatever is put behind them when.
#[derive(Debug)]
pub(crate) struct Range {
    driver: Arc<dyn Driver>,
    pub(crate) at: Address,
    bytes: u64,
    mapped: Vec<Page>,
}

impl Range {
    /// Room for so many bytes, with nothing behind them.
    pub(crate) fn reserve(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self, DriverError> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        // No bytes have no address, and nobody asks for one.
        let at = if bytes == 0 { Address(0) } else { driver.reserve(bytes)? };
        Ok(Self { driver: Arc::clone(driver), at, bytes, mapped: Vec::new() })
    }

    /// Bytes that there are addresses for.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pages that are behind them.
    pub(crate) fn pages(&self) -> usize {
        self.mapped.len()
    }

    /// Puts pages behind the addresses that have none yet; gives them back if that fails.
    pub(crate) fn map(&mut self, pages: Vec<Page>) -> Result<(), (DriverError, Vec<Page>)> {
        let mapped_bytes = self.mapped.len() as u64 * PAGE_BYTES;
        assert!(mapped_bytes + pages.len() as u64 * PAGE_BYTES <= self.bytes, "pages behind addresses of others");
        if pages.is_empty() {
            return Ok(());
        }
        match self.driver.map(self.at.plus(mapped_bytes), &pages) {
            Ok(()) => self.mapped.extend(pages),
            Err(error) => return Err((error, pages)),
        }
        Ok(())
    }

    /// Takes all pages away.
    pub(crate) fn unmap(&mut self) -> Result<Vec<Page>, DriverError> {
        if !self.mapped.is_empty() {
            let unmap = |_| self.driver.unmap(self.at, self.mapped.len()).err();
            let errors = (0..ATTEMPTS).map_while(unmap).collect::<Vec<_>>();
            if let Some(error) = errors.into_iter().nth(ATTEMPTS - 1) {
                return Err(error);
            }
        }
        Ok(std::mem::take(&mut self.mapped))
    }

    /// Puts new pages behind the first so many bytes, as far as there are none yet.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), DriverError> {
        self.grow_by(bytes, |driver| driver.create_page())
    }

    /// The same with pages that RDMA devices may reach.
    pub(crate) fn grow_shared(&mut self, bytes: u64) -> Result<(), DriverError> {
        self.grow_by(bytes, |driver| driver.create_shared_page())
    }

    fn grow_by(
        &mut self,
        bytes: u64,
        create: impl Fn(&dyn Driver) -> Result<Page, DriverError>,
    ) -> Result<(), DriverError> {
        for _ in self.mapped.len() as u64..bytes.div_ceil(PAGE_BYTES) {
            let page = create(&*self.driver)?;
            self.map(vec![page]).map_err(|(error, _)| {
                self.driver.destroy_page(page);
                error
            })?;
        }
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        match self.unmap() {
            Ok(pages) => pages.into_iter().for_each(|page| self.driver.destroy_page(page)),
            Err(error) => {
                tracing::error!(%error, pages = self.mapped.len(), "GPU memory cannot be given back");
                return;
            }
        }
        if self.bytes > 0 {
            self.driver.release(self.at, self.bytes);
        }
    }
}
