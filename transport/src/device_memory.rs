//! Memory that another device of this host has, such as a GPU, and that an RDMA device is to reach by itself
//! (GPUDirect). It cannot be read or written here: only transfers go there.
//!
//! This module has `unsafe` because only whoever made the memory knows that an RDMA device may be given its address.

use std::{
    fmt::Debug,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// Memory of another device. Cheap to clone; it stays as long as a clone does, and a registration holds one.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    dma_buf: Option<Arc<OwnedFd>>,
    /// Gives the memory back when it is dropped.
    _keeper: Arc<dyn Keeper>,
}

/// What the memory belongs to, whatever that is.
pub trait Keeper: Debug + Send + Sync {}

impl<T: Debug + Send + Sync> Keeper for T {}

impl DeviceMemory {
    /// `bytes` from `address` on, which is where the device has them in this process. `dma_buf` is the same memory as
    /// the kernel hands it from driver to driver, if the device's can: its first byte is the one at `address`.
    ///
    /// # Safety
    /// Whoever may be written to by an RDMA device: until `keeper` is dropped these addresses are that device's, and
    /// nothing that a reference of this process is to is behind them.
    #[must_use]
    pub unsafe fn new(address: u64, bytes: usize, dma_buf: Option<OwnedFd>, keeper: Arc<dyn Keeper>) -> Self {
        Self { address, bytes, dma_buf: dma_buf.map(Arc::new), _keeper: keeper }
    }

    /// Where the device has it in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the device hands it over as a dma-buf.
    #[must_use]
    pub fn dma_buf(&self) -> Option<BorrowedFd<'_>> {
        self.dma_buf.as_deref().map(AsFd::as_fd)
    }
}

/// How an RDMA device was let into another device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The kernel hands it from driver to driver as a dma-buf.
    DmaBuf,
    /// A module tells the RDMA device's driver what is behind an address: `nvidia-peermem`.
    Address,
}

impl Way {
    /// As operators know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "dma-buf",
            Self::Address => "nvidia-peermem",
        }
    }
}
