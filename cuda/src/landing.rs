//! Memory of a GPU's that RDMA devices write inputs to (GPUDirect), so that these pass no host memory. From there they
//! go to a slot as those in host memory do, since a batch's tasks are not all neighbours: a copy that the GPU makes at
//! the speed of its own memory.

use std::sync::Arc;

use transport::{DeviceMemory, Keeper};

use crate::{
    driver::Address,
    gpu::{Gpu, GpuError},
    handles::Range,
};

/// Memory that RDMA devices may reach. It is given back when it is dropped, and what [`Self::memory`] yielded is.
#[derive(Debug)]
pub struct Landing {
    range: Range,
    bytes: usize,
    gpu: Arc<Gpu>,
}

impl Gpu {
    /// Takes so many bytes that RDMA devices may reach.
    ///
    /// # Errors
    /// If the GPU opens none to them, or has no room.
    pub fn landing(self: &Arc<Self>, bytes: usize) -> Result<Arc<Landing>, GpuError> {
        let mut range = Range::reserve(&self.driver, bytes as u64)?;
        range.grow_shared(bytes as u64)?;
        Ok(Arc::new(Landing { range, bytes, gpu: Arc::clone(self) }))
    }
}

impl Landing {
    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// As RDMA devices are given it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn memory(self: &Arc<Self>) -> Result<DeviceMemory, GpuError> {
        let keeper: Arc<dyn Keeper> = Arc::<Self>::clone(self);
        Ok(self.gpu.driver.share(self.range.at, self.range.bytes(), keeper)?)
    }

    /// Where these bytes are.
    ///
    /// # Panics
    /// If they are outside.
    pub(crate) fn at(&self, offset: usize, bytes: usize) -> Address {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} are not among {}", self.bytes);
        self.range.at.plus(offset as u64)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // Inputs may be on their way from there to a batch that never ran.
        self.gpu.settle();
    }
}
