//! Memory: pages of the GPU's that come and go behind addresses that stay, and host memory that it may reach.
//!
//! This module has `unsafe` because libcuda is told what is where.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    os::fd::{FromRawFd as _, OwnedFd, RawFd},
    ptr::null_mut,
    sync::{Arc, Mutex, Weak},
};

use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUmemRangeHandleType, CUmemorytype,
};
use proto::weights::PAGE_BYTES;
use transport::{DeviceMemory, Keeper, Region};

use super::{
    check::cuda,
    context::{Context, Queue},
    lock,
};
use crate::{DriverError, driver::Address};

#[allow(clippy::cast_possible_truncation, reason = "16 MiB")]
const PAGE: usize = PAGE_BYTES as usize;

fn location(context: &Context) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device() }
}

/// Who reaches a page where it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    Gpu,
    /// RDMA devices, too.
    Rdma,
}

fn properties(context: &Context, reach: Reach) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(context),
        win32HandleMetaData: null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(reach == Reach::Rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Makes sure that the GPU can map pages of our size.
pub(super) fn check_granularity(context: &Context) -> Result<(), DriverError> {
    let mut granularity = 0;
    let properties = properties(context, Reach::Gpu);
    let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the properties live through the call; one number is written.
    let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, option) };
    cuda("cuMemGetAllocationGranularity", result)?;
    if granularity == 0 || !PAGE.is_multiple_of(granularity) {
        return Err(DriverError(format!("this GPU maps {granularity} bytes at a time, which {PAGE} do not divide by")));
    }
    Ok(())
}

/// A page of the GPU's memory.
#[derive(Debug)]
pub(super) struct Physical {
    raw: CUmemGenericAllocationHandle,
    context: Arc<Context>,
}

impl Physical {
    pub(super) fn new(context: &Arc<Context>, reach: Reach) -> Result<Self, DriverError> {
        context.enter()?;
        let properties = properties(context, reach);
        let mut raw = 0;
        // SAFETY: the properties live through the call; the handle is released when it is dropped.
        cuda("cuMemCreate", unsafe { sys::cuMemCreate(&raw mut raw, PAGE, &raw const properties, 0) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: nobody else has it; where it is still mapped, libcuda keeps the memory until that ends.
        let _ = unsafe { sys::cuMemRelease(self.raw) };
    }
}

pub(super) fn reserve(bytes: usize) -> Result<Address, DriverError> {
    let mut at = 0;
    // SAFETY: addresses of nothing yet; one number is written.
    cuda("cuMemAddressReserve", unsafe { sys::cuMemAddressReserve(&raw mut at, bytes, PAGE, 0, 0) })?;
    Ok(Address(at))
}

pub(super) fn release(at: Address, bytes: usize) {
    // SAFETY: the driver refuses what it has not reserved as a whole, or where something is mapped.
    let _ = unsafe { sys::cuMemAddressFree(at.0, bytes) };
}

/// Puts pages behind addresses; if one cannot be, none is.
pub(super) fn map(context: &Context, at: Address, pages: &[Arc<Physical>]) -> Result<(), DriverError> {
    if pages.is_empty() {
        return Ok(());
    }
    for (i, page) in pages.iter().enumerate() {
        // SAFETY: the page lives, and libcuda refuses addresses that are not reserved or have a page already.
        let mapped = unsafe { sys::cuMemMap(at.plus((i * PAGE) as u64).0, PAGE, 0, page.raw, 0) };
        if let Err(error) = cuda("cuMemMap", mapped) {
            let _ = unmap(at, i);
            return Err(error);
        }
    }
    let access =
        CUmemAccessDesc { location: location(context), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: all of it was just mapped; the description lives through the call.
    let allowed = unsafe { sys::cuMemSetAccess(at.0, pages.len() * PAGE, &raw const access, 1) };
    cuda("cuMemSetAccess", allowed).inspect_err(|_| {
        let _ = unmap(at, pages.len());
    })
}

pub(super) fn unmap(at: Address, pages: usize) -> Result<(), DriverError> {
    if pages == 0 {
        return Ok(());
    }
    // SAFETY: what used them is done, as the rules of [`crate::Driver`] say; libcuda refuses what is not mapped.
    cuda("cuMemUnmap", unsafe { sys::cuMemUnmap(at.0, pages * PAGE) })
}

/// What is behind these addresses, for RDMA devices: as a dma-buf where the driver hands it over as one, and by its
/// address anyhow.
pub(super) fn share(
    context: &Context,
    at: Address,
    bytes: usize,
    keeper: Arc<dyn Keeper>,
) -> Result<DeviceMemory, DriverError> {
    let dma_buf = if context.has_dma_bufs()? { Some(dma_buf(at, bytes)?) } else { None };
    // SAFETY: the addresses are the GPU's, reserved by libcuda, which `keeper` leaves so with the pages behind them.
    Ok(unsafe { DeviceMemory::new(at.0, bytes, dma_buf, keeper) })
}

fn dma_buf(at: Address, bytes: usize) -> Result<OwnedFd, DriverError> {
    let mut descriptor: RawFd = -1;
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // SAFETY: for this kind of handle one descriptor is written.
    let result = unsafe { sys::cuMemGetHandleForAddressRange((&raw mut descriptor).cast(), at.0, bytes, kind, 0) };
    cuda("cuMemGetHandleForAddressRange", result)?;
    // SAFETY: it has just been opened for us, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Host memory that the GPU knows, and that lives as long.
#[derive(Debug)]
pub(super) struct Pinned {
    region: Region,
    context: Arc<Context>,
}

/// What is pinned in this process, by address: memory is pinned once for all its GPUs.
static PINNED: Mutex<BTreeMap<u64, Weak<Pinned>>> = Mutex::new(BTreeMap::new());

impl Pinned {
    /// Pins it unless another GPU of this process has it pinned.
    pub(super) fn get(context: &Arc<Context>, region: &Region) -> Result<Arc<Self>, DriverError> {
        context.enter()?;
        let mut all = lock(&PINNED);
        if let Some(pinned) = all.get(&region.address()).and_then(Weak::upgrade) {
            return Ok(pinned);
        }
        // SAFETY: the region's memory is mapped, and we hold a clone of it until it is unregistered.
        let result =
            unsafe { sys::cuMemHostRegister_v2(host(region, 0), region.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) };
        cuda("cuMemHostRegister_v2 (is `ulimit -l` too low?)", result)?;
        let pinned = Arc::new(Self { region: region.clone(), context: Arc::clone(context) });
        all.insert(region.address(), Arc::downgrade(&pinned));
        all.retain(|_, pinned| pinned.strong_count() > 0);
        Ok(pinned)
    }

    /// Undoes [`Self::get`], so that whoever pins the same memory next finds it either pinned or not.
    pub(super) fn give_back(self: Arc<Self>) {
        let all = lock(&PINNED);
        drop(self);
        drop(all);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: it was registered once; copies of it are done, as the rules of [`crate::Driver`] say.
        let _ = unsafe { sys::cuMemHostUnregister(host(&self.region, 0)) };
    }
}

fn host(region: &Region, offset: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(region.address()).unwrap_or(usize::MAX) + offset)
}

/// Where a part of a region is.
fn part(region: &Region, offset: usize, bytes: usize) -> Result<*mut c_void, DriverError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region.len() => Ok(host(region, offset)),
        _ => Err(DriverError(format!("{bytes} bytes at {offset} are not within a region of {}", region.len()))),
    }
}

pub(super) fn copy_in(
    queue: &Queue,
    to: Address,
    (region, offset): (&Region, usize),
    bytes: usize,
) -> Result<(), DriverError> {
    let from = part(region, offset, bytes)?;
    // SAFETY: the memory is the region's, which the caller keeps until the copy is done, as the rules say. A region's
    // memory is of atomic words: whoever writes there meanwhile has the GPU see old words or new ones.
    cuda("cuMemcpyHtoDAsync_v2", unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from, bytes, queue.raw()) })
}

pub(super) fn copy_out(
    queue: &Queue,
    (region, offset): (&Region, usize),
    from: Address,
    bytes: usize,
) -> Result<(), DriverError> {
    let to = part(region, offset, bytes)?;
    // SAFETY: as in `copy_in`; readers see old words or new ones.
    cuda("cuMemcpyDtoHAsync_v2", unsafe { sys::cuMemcpyDtoHAsync_v2(to, from.0, bytes, queue.raw()) })
}

pub(super) fn copy_rows(
    queue: &Queue,
    (to, to_stride): (Address, usize),
    (from, from_stride): (Address, usize),
    bytes: usize,
    rows: usize,
) -> Result<(), DriverError> {
    if rows == 1 || (to_stride == bytes && from_stride == bytes) {
        // SAFETY: no host memory is touched.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes * rows, queue.raw()) };
        return cuda("cuMemcpyDtoDAsync_v2", result);
    }
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: null_mut(),
        srcDevice: from.0,
        srcArray: null_mut(),
        srcPitch: from_stride,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: to.0,
        dstArray: null_mut(),
        dstPitch: to_stride,
        WidthInBytes: bytes,
        Height: rows,
    };
    // SAFETY: no host memory is touched; the description is read before the call returns.
    cuda("cuMemcpy2DAsync_v2", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, queue.raw()) })
}

pub(super) fn clear(queue: &Queue, at: Address, bytes: usize) -> Result<(), DriverError> {
    // SAFETY: no host memory is touched.
    cuda("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at.0, 0, bytes, queue.raw()) })
}

/// Memory of the GPU's that is there from the start, for what libraries need while they run.
#[derive(Debug)]
pub(super) struct Workspace {
    at: CUdeviceptr,
    context: Arc<Context>,
}

impl Workspace {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, DriverError> {
        context.enter()?;
        let mut at = 0;
        // SAFETY: the context is current; the memory is freed when it is dropped.
        cuda("cuMemAlloc_v2", unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes) })?;
        Ok(Self { at, context: Arc::clone(context) })
    }

    pub(super) fn address(&self) -> Address {
        Address(self.at)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: it was allocated once; libcuda waits for what still uses it.
        let _ = unsafe { sys::cuMemFree_v2(self.at) };
    }
}
