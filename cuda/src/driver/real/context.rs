//! A GPU's context, its streams, events and captured graphs: each an object that gives back what it holds when the last
//! one who uses it lets go.
//!
//! This module has `unsafe` because these are handles of libcuda's.

use std::{ffi::c_int, ptr::null_mut, sync::Arc};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUevent, CUevent_flags, CUflushGPUDirectRDMAWritesOptions,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUgraphExec, CUresult, CUstream, CUstream_flags,
    CUstreamCaptureMode,
};
use proto::Span;

use super::{check::cuda, library};
use crate::{DirectAccess, DriverError, driver::Device};

/// What all GPUs of this host are, in CUDA's order.
///
/// # Errors
/// If there is no libcuda, or it does not answer.
pub fn devices() -> Result<Vec<Device>, DriverError> {
    library::require_cuda()?;
    // SAFETY: libcuda is there; it may be initialised any number of times.
    cuda("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: libcuda is initialised, and writes one number.
    cuda("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    (0..count).map(|index| describe(device(index)?)).collect()
}

/// Which GPUs RDMA devices could reach: their addresses on the PCI bus, as CUDA writes them, in CUDA's order.
///
/// # Errors
/// As [`devices`].
pub fn direct_access() -> Result<Vec<(String, DirectAccess)>, DriverError> {
    let devices = devices()?.into_iter().zip(0..);
    let of = |(found, index): (Device, c_int)| {
        let device = device(index)?;
        let has = |which| attribute(device, which).map(|value| value != 0);
        let access = DirectAccess {
            dma_buf: has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
            rdma: has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
            mapped: has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
        };
        Ok((found.pci, access))
    };
    devices.map(of).collect()
}

fn device(index: c_int) -> Result<CUdevice, DriverError> {
    let mut device = 0;
    // SAFETY: libcuda is initialised, and writes one number.
    cuda("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
    Ok(device)
}

/// A device without its free memory, which only a context knows.
fn describe(device: CUdevice) -> Result<Device, DriverError> {
    let mut name = [0_u8; 128];
    let mut pci = [0_u8; 32];
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    let mut memory_bytes = 0;
    // SAFETY: texts are written with their terminating zero within the lengths said, and one value for each other.
    unsafe {
        cuda("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr().cast(), 128, device))?;
        cuda("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), 32, device))?;
        cuda("cuDeviceGetUuid_v2", sys::cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        cuda("cuDeviceTotalMem_v2", sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device))?;
    }
    let name = text(&name);
    let capability = (
        attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(Device {
        uuid: uuid_text(&name, uuid.bytes.map(c_char_to_byte)),
        name,
        pci: text(&pci),
        memory_bytes: memory_bytes as u64,
        free_bytes: 0,
        compute_capability: capability,
    })
}

/// `c_char` is signed on x86-64, and not on arm64.
#[allow(clippy::cast_sign_loss, clippy::unnecessary_cast, reason = "the same bits")]
fn c_char_to_byte(byte: std::ffi::c_char) -> u8 {
    byte as u8
}

fn attribute(device: CUdevice, which: CUdevice_attribute) -> Result<u32, DriverError> {
    let mut value = 0;
    // SAFETY: writes one number.
    cuda("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// As `nvidia-smi -L` shows it. What CUDA shows of a GPU that is split is one of its instances, and its name says so.
fn uuid_text(name: &str, bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let kind = if name.contains(" MIG ") { "MIG" } else { "GPU" };
    format!("{kind}-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// What makes sure that work on a stream meets what an RDMA device had written before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RemoteWrites {
    /// The device itself: writes are there before whatever tells of them.
    InOrder,
    /// A call.
    Flushed,
    /// Nothing, or RDMA devices have no way to what is mapped anyway.
    Refused,
}

impl RemoteWrites {
    fn of(device: CUdevice) -> Result<Self, DriverError> {
        let mapped = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let ordering = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
        let options = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS;
        // Of an ordering, how far: to the GPU that is written to is enough.
        let owner = CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as u32;
        let by_call = CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as u32;
        Ok(if attribute(device, mapped)? == 0 {
            Self::Refused
        } else if attribute(device, ordering)? >= owner {
            Self::InOrder
        } else if attribute(device, options)? & by_call != 0 {
            Self::Flushed
        } else {
            Self::Refused
        })
    }
}

/// A device's primary context: the one that cuBLASLt and cuDNN would make.
#[derive(Debug)]
pub(super) struct Context {
    device: CUdevice,
    raw: CUcontext,
    remote_writes: RemoteWrites,
}

// SAFETY: a context is used from any thread that has made it current.
unsafe impl Send for Context {}
// SAFETY: libcuda locks what threads share.
unsafe impl Sync for Context {}

impl Context {
    /// Of a device that [`devices`] told of; it is current on this thread then.
    pub(super) fn open(index: usize) -> Result<Self, DriverError> {
        let device = device(c_int::try_from(index).map_err(|_| DriverError(format!("no GPU {index}")))?)?;
        let remote_writes = RemoteWrites::of(device)?;
        let mut raw = null_mut();
        // SAFETY: the device exists; the context is released when it is dropped.
        cuda("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        let context = Self { device, raw, remote_writes };
        context.enter()?;
        Ok(context)
    }

    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Makes it this thread's: what every call needs.
    pub(super) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained.
        cuda("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    pub(super) fn describe(&self) -> Result<Device, DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; two numbers are written.
        cuda("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(Device { memory_bytes: total as u64, free_bytes: free as u64, ..describe(self.device)? })
    }

    /// That RDMA devices can write to its memory, and that it can be known when they have.
    pub(super) fn require_remote_writes(&self) -> Result<(), DriverError> {
        match self.remote_writes {
            RemoteWrites::InOrder | RemoteWrites::Flushed => Ok(()),
            RemoteWrites::Refused => {
                let text =
                    "this GPU opens no mapped pages to RDMA devices, or does not say when their writes are there";
                Err(DriverError(text.to_owned()))
            }
        }
    }

    /// Returns when what RDMA devices had written is there.
    pub(super) fn flush_remote_writes(&self) -> Result<(), DriverError> {
        if self.remote_writes == RemoteWrites::InOrder {
            return Ok(());
        }
        let target = CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the context is current.
        cuda("cuFlushGPUDirectRDMAWrites", unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) })
    }

    /// Whether its memory can be handed over as dma-bufs.
    pub(super) fn has_dma_bufs(&self) -> Result<bool, DriverError> {
        Ok(attribute(self.device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0)
    }

    /// The least and the most urgent.
    pub(super) fn priorities(&self) -> Result<(c_int, c_int), DriverError> {
        self.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current; two numbers are written.
        let result = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        cuda("cuCtxGetStreamPriorityRange", result)?;
        Ok((least, greatest))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and everything made in it holds it until it is gone itself.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Work that is done in order.
#[derive(Debug)]
pub(super) struct Queue {
    raw: CUstream,
    context: Arc<Context>,
}

// SAFETY: libcuda takes work for a stream from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above; it locks what threads share.
unsafe impl Sync for Queue {}

impl Queue {
    /// Lower numbers go first, within [`Context::priorities`].
    pub(super) fn new(context: &Arc<Context>, priority: c_int) -> Result<Self, DriverError> {
        context.enter()?;
        let mut raw = null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the stream is destroyed when it is dropped.
        let result = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags, priority) };
        cuda("cuStreamCreateWithPriority", result)?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives.
        cuda("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    pub(super) fn wait(&self, mark: &Mark) -> Result<(), DriverError> {
        // SAFETY: both live; the event may be destroyed while something waits for it.
        cuda("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, mark.raw, 0) })
    }

    /// What other threads put elsewhere meanwhile is theirs: only this thread is watched.
    pub(super) fn begin_capture(&self) -> Result<(), DriverError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        cuda("cuStreamBeginCapture_v2", unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) })
    }

    /// Ends a capture, and puts what was captured onto the GPU, so that its first launch is as fast as the others.
    pub(super) fn end_capture(&self) -> Result<Recording, DriverError> {
        let mut graph = null_mut();
        // SAFETY: the stream lives; the graph is destroyed below.
        cuda("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) })?;
        let mut raw = null_mut();
        // SAFETY: the graph was just made; what is made of it does not need it any more.
        let instantiated = unsafe {
            let result = sys::cuGraphInstantiateWithFlags(&raw mut raw, graph, 0);
            let _ = sys::cuGraphDestroy(graph);
            result
        };
        cuda("cuGraphInstantiateWithFlags", instantiated)?;
        let recording = Recording { raw, context: Arc::clone(&self.context) };
        // SAFETY: both live.
        cuda("cuGraphUpload", unsafe { sys::cuGraphUpload(raw, self.raw) })?;
        self.synchronize()?;
        Ok(recording)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: nobody else has it; what is on it is still done.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// A place in a stream's order.
#[derive(Debug)]
pub(super) struct Mark {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: libcuda takes events from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above; it locks what threads share.
unsafe impl Sync for Mark {}

impl Mark {
    pub(super) fn new(context: &Arc<Context>, is_timed: bool) -> Result<Self, DriverError> {
        context.enter()?;
        let timing = if is_timed { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        // Otherwise whoever waits for it would keep a core busy.
        let flags = timing as u32 | CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let mut raw = null_mut();
        // SAFETY: the context is current; the event is destroyed when it is dropped.
        cuda("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub(super) fn record(&self, queue: &Queue) -> Result<(), DriverError> {
        // SAFETY: both live.
        cuda("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, queue.raw) })
    }

    pub(super) fn is_done(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => cuda("cuEventQuery", result).map(|()| true),
        }
    }

    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the event lives.
        cuda("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    pub(super) fn until(&self, to: &Self) -> Result<Span, DriverError> {
        let mut milliseconds = 0.0_f32;
        // SAFETY: both live; one number is written.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, self.raw, to.raw) };
        cuda("cuEventElapsedTime_v2", result)?;
        #[allow(clippy::cast_possible_truncation, reason = "far below 2^63 ns")]
        Ok(Span::from_nanos((f64::from(milliseconds) * 1e6).round() as i64))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: nobody else has it; libcuda keeps what is still waited for.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// What was captured, on the GPU.
#[derive(Debug)]
pub(super) struct Recording {
    raw: CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: a graph may be launched from any thread; [`super::Cuda`] launches one at a time.
unsafe impl Send for Recording {}
// SAFETY: as above.
unsafe impl Sync for Recording {}

impl Recording {
    pub(super) fn launch(&self, queue: &Queue) -> Result<(), DriverError> {
        // SAFETY: both live.
        cuda("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, queue.raw) })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: nobody else has it; libcuda keeps it until its launches are done.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_written_as_nvidia_smi_does() {
        let bytes = std::array::from_fn(|i| u8::try_from(i * 17).unwrap());
        assert_eq!(uuid_text("NVIDIA H200", bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert!(uuid_text("NVIDIA H200 MIG 1g.18gb", bytes).starts_with("MIG-0011"));
    }

    #[test]
    fn texts_end_at_the_first_zero() {
        assert_eq!(text(b"NVIDIA H200\0\0rest"), "NVIDIA H200");
        assert_eq!(text(b"full"), "full");
    }
}
