//! libibverbs behind safe types: each object is ended when it is dropped, and holds what it depends on.
//!
//! The library is loaded when the first device is asked for, so a program that has this arm starts on
//! hosts without it. `rdma-sys` gives the types, and the calls of the data path, which go through a device's own table
//! of functions. Deliberately absent: everything that this crate does not use (UD, SRQ, atomics, memory windows).
//!
//! This module has `unsafe` because libibverbs is C. What makes its types sound: handles come from libibverbs, are
//! never null and never copied out of their type; objects are ended in the order in which they depend on each other
//! (they hold their parents by `Arc`); a device reaches memory only through a registration, whose [`MemoryRegion`]
//! keeps the memory mapped, and it checks every access against the registration; libibverbs may be called from any
//! thread.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    io,
    mem::{MaybeUninit, zeroed},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::{Path, PathBuf},
    ptr::{NonNull, null_mut},
    sync::{Arc, OnceLock},
};

use rdma_sys::{
    _compat_ibv_port_attr, ibv_access_flags, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode,
};
use soft_roce::{Operation, RecvRequest, Segment, SendRequest};

use super::memory::Memory;
use crate::{
    Access, Way,
    error::{LibraryError, VerbsOpenError},
};

/// The name that distributions and rdma-core agree on.
const LIBRARY: &str = "libibverbs.so.1";

/// The functions of libibverbs that are not in a device's table.
macro_rules! entry_points {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Library {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Keeps the functions where they are.
            loaded: libloading::Library,
        }

        impl Library {
            fn load() -> Result<Self, LibraryError> {
                // SAFETY: libibverbs's constructors touch nothing of ours.
                let library = unsafe { libloading::Library::new(LIBRARY) }
                    .map_err(|_| LibraryError::Missing { name: LIBRARY })?;
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: a function of this name has this type in verbs.h, the library outlives it.
                        *unsafe { library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(name) }
                            .map_err(|_| LibraryError::Old { function: stringify!($name) })?
                    },)*
                    loaded: library,
                })
            }
        }
    };
}

entry_points! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: fn(*mut *mut ibv_device);
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: fn(*mut ibv_context) -> c_int;
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
    ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut ibv_async_event);
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ibv_cq, u32);
    ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
}

/// The library, loaded at the first call.
fn library() -> Result<&'static Library, LibraryError> {
    static LOADED: OnceLock<Result<Library, LibraryError>> = OnceLock::new();
    LOADED.get_or_init(Library::load).as_ref().map_err(Clone::clone)
}

/// An object of libibverbs, owned by the type that wraps it.
#[derive(Debug)]
struct Handle<T>(NonNull<T>);

// SAFETY: libibverbs's objects belong to no thread in particular.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: libibverbs locks its objects, or its providers do.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// What a function returned, or why it did not.
    fn new(raw: *mut T) -> io::Result<Self> {
        NonNull::new(raw).map(Self).ok_or_else(io::Error::last_os_error)
    }

    fn raw(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// libibverbs returns 0, an error number, or -1 and sets `errno`.
fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        error => Err(io::Error::from_raw_os_error(error.abs())),
    }
}

/// An opened device.
pub(super) struct Context {
    library: &'static Library,
    raw: Handle<ibv_context>,
    /// The kernel's entry for it, and which one it is of all that ever have that name.
    entry: PathBuf,
    entry_number: Option<u64>,
}

/// What a device is able to do; see `ibv_query_device(3)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceLimits {
    pub queue_pair_requests_max: usize,
    pub completions_max: usize,
    /// READs that a queue pair asks for at once.
    pub reads_max: usize,
    /// READs that it answers at once.
    pub reads_answered_max: usize,
}

/// What a port is and carries; see `ibv_query_port(3)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortState {
    pub active: bool,
    pub infiniband: bool,
    pub lid: u16,
    /// IBTA's code: 256 bytes are 1, each further one is twice the size.
    pub active_mtu: u32,
    pub message_bytes_max: u32,
}

/// What a device tells on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AsyncEvent {
    QueuePairFailed { number: u32 },
    DeviceFailed,
    PortDown,
    AddressChanged,
    Other,
}

impl AsyncEvent {
    /// From a number of `enum ibv_event_type`. `queue_pair` is asked where the event is about one.
    fn of(kind: c_int, queue_pair: impl FnOnce() -> u32) -> Self {
        match kind {
            // QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR.
            1..=3 => Self::QueuePairFailed { number: queue_pair() },
            // CQ_ERR (all queue pairs of ours may complete there) and DEVICE_FATAL.
            0 | 8 => Self::DeviceFailed,
            // PORT_ERR.
            10 => Self::PortDown,
            // LID_CHANGE, GID_CHANGE.
            11 | 18 => Self::AddressChanged,
            _ => Self::Other,
        }
    }
}

impl Context {
    /// Opens a device by its name.
    ///
    /// # Errors
    /// One line that says what is missing.
    pub(super) fn open(name: &str) -> Result<Arc<Self>, VerbsOpenError> {
        let library = library()?;
        let mut count = 0;
        // SAFETY: `count` is written; the list is freed below.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(VerbsOpenError::NoList(io::Error::last_os_error()));
        }
        // SAFETY: the list has `count` devices, which live until it is freed.
        let devices = unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0)) };
        let name_of = |&device: &*mut ibv_device| {
            // SAFETY: the device is in the list, and its name is a C string inside it.
            unsafe { CStr::from_ptr((library.ibv_get_device_name)(device)) }.to_string_lossy().into_owned()
        };
        let opened = match devices.iter().find(|device| name_of(device) == name) {
            Some(&device) => {
                // SAFETY: the device is in the list, and the path is a C string inside it.
                let entry = unsafe { CStr::from_ptr((*device).dev_path.as_ptr()) };
                let entry = PathBuf::from(OsStr::from_bytes(entry.to_bytes()));
                // SAFETY: the device is in the list.
                Handle::new(unsafe { (library.ibv_open_device)(device) })
                    .map(|raw| (raw, entry))
                    .map_err(|cause| VerbsOpenError::NotOpened { device: name.to_owned(), cause })
            }
            None => {
                let found = devices.iter().map(name_of).collect();
                Err(VerbsOpenError::NoDevice { device: name.to_owned(), found })
            }
        };
        // SAFETY: allocated above; an opened device outlives the list.
        unsafe { (library.ibv_free_device_list)(list) };
        let (raw, entry) = opened?;
        let context = Self { library, raw, entry_number: inode(&entry), entry };
        nonblocking(context.as_fd()).map_err(|cause| VerbsOpenError::Object { what: "its events block", cause })?;
        Ok(Arc::new(context))
    }

    /// Whether the kernel still lists it.
    pub(super) fn is_there(&self) -> bool {
        inode(&self.entry) == self.entry_number
    }

    pub(super) fn limits(&self) -> io::Result<DeviceLimits> {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut attributes: ibv_device_attr = unsafe { zeroed() };
        // SAFETY: the device is open; `attributes` is written.
        check(unsafe { (self.library.ibv_query_device)(self.raw.raw(), &raw mut attributes) })?;
        let count = |number: c_int| usize::try_from(number).unwrap_or(0);
        Ok(DeviceLimits {
            queue_pair_requests_max: count(attributes.max_qp_wr),
            completions_max: count(attributes.max_cqe),
            reads_max: count(attributes.max_qp_init_rd_atom),
            reads_answered_max: count(attributes.max_qp_rd_atom),
        })
    }

    pub(super) fn port(&self, port: u8) -> io::Result<PortState> {
        /// `IBV_PORT_ACTIVE` and `IBV_PORT_ACTIVE_DEFER`.
        const ACTIVE: [u32; 2] = [4, 5];
        /// `IBV_LINK_LAYER_UNSPECIFIED` (from times when there was no other) and `IBV_LINK_LAYER_INFINIBAND`.
        const INFINIBAND: [u8; 2] = [0, 1];
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut attributes: ibv_port_attr = unsafe { zeroed() };
        // SAFETY: the device is open. The function writes the first fields of what it is given, as many as the first
        // version of the structure had, and `ibv_port_attr` begins with these.
        check(unsafe { (self.library.ibv_query_port)(self.raw.raw(), port, (&raw mut attributes).cast()) })?;
        Ok(PortState {
            active: ACTIVE.contains(&attributes.state),
            infiniband: INFINIBAND.contains(&attributes.link_layer),
            lid: attributes.lid,
            active_mtu: attributes.active_mtu,
            message_bytes_max: attributes.max_msg_sz,
        })
    }

    /// What the device has told; `None` when there is nothing more now.
    pub(super) fn poll_async_event(&self) -> Option<AsyncEvent> {
        // The kinds are an enum in `rdma-sys`, but a newer kernel may know more of them: read as a number.
        #[repr(C)]
        struct Raw {
            element: *mut c_void,
            kind: c_int,
        }
        const _: () = assert!(size_of::<Raw>() == size_of::<ibv_async_event>());
        let mut event = MaybeUninit::<Raw>::zeroed();
        // SAFETY: the device is open; `Raw` has the layout of `ibv_async_event` and is written on success.
        check(unsafe { (self.library.ibv_get_async_event)(self.raw.raw(), event.as_mut_ptr().cast()) }).ok()?;
        // SAFETY: zeroes are a valid `Raw`, and so is what the library wrote.
        let mut event = unsafe { event.assume_init() };
        // SAFETY: called for events that are about a queue pair, which cannot be destroyed before its event is
        // acknowledged, below.
        let told = AsyncEvent::of(event.kind, || unsafe { (*event.element.cast::<ibv_qp>()).qp_num });
        // SAFETY: an event that was read and not acknowledged yet.
        unsafe { (self.library.ibv_ack_async_event)((&raw mut event).cast()) };
        Some(told)
    }
}

impl AsFd for Context {
    /// Readable when the device has something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the device's own and open as long as it is.
        unsafe { BorrowedFd::borrow_raw((*self.raw.raw()).async_fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all objects of the device hold it by `Arc`, so none is left.
        unsafe { (self.library.ibv_close_device)(self.raw.raw()) };
    }
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|entry| entry.ino())
}

fn nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, true)?)
}

/// What regions and queue pairs must share to work together.
pub(super) struct ProtectionDomain {
    context: Arc<Context>,
    raw: Handle<ibv_pd>,
}

impl ProtectionDomain {
    pub(super) fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the device is open.
        let raw = Handle::new(unsafe { (context.library.ibv_alloc_pd)(context.raw.raw()) })?;
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }
}

/// `ibv_reg_dmabuf_mr(3)`: domain, offset, bytes, address for peers, descriptor, access.
type RegisterDmaBuf = unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;

impl ProtectionDomain {
    /// Whether dma-bufs can be registered here: by offering one that is none, which registers nothing.
    pub(super) fn takes_dma_bufs(&self) -> io::Result<bool> {
        /// Less may be refused for its length.
        const BYTES: usize = 4096;
        let Some(register) = self.register_dma_buf() else { return Ok(false) };
        // SAFETY: the domain is there; no file has this descriptor.
        match Handle::new(unsafe { register(self.raw.raw(), 0, BYTES, 0, -1, 0) }) {
            Ok(_) => Err(io::Error::other("a dma-buf was registered that is none")),
            Err(refused) => is_of_the_descriptor(refused),
        }
    }

    /// What registers a dma-buf; rdma-core has it since version 34.
    fn register_dma_buf(&self) -> Option<libloading::Symbol<'_, RegisterDmaBuf>> {
        let library = &self.context.library.loaded;
        // SAFETY: a function of this name has this type in verbs.h, and the library outlives what is returned.
        unsafe { library.get(b"ibv_reg_dmabuf_mr\0") }.ok()
    }
}

/// Whether the descriptor was refused, and not the whole idea.
fn is_of_the_descriptor(refused: io::Error) -> io::Result<bool> {
    match refused.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::BADF) => Ok(true),
        // The driver has no such call, or the kernel none (before 5.12).
        Some(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::PROTONOSUPPORT | rustix::io::Errno::NOSYS) => Ok(false),
        _ => Err(refused),
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: its regions and queue pairs hold it by `Arc`, so none is left.
        unsafe { (self.context.library.ibv_dealloc_pd)(self.raw.raw()) };
    }
}

/// Registered memory.
pub(super) struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: Handle<ibv_mr>,
    /// Keeps the memory mapped.
    memory: Memory,
    way: Way,
}

fn flags(access: Access) -> c_int {
    let mut flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
    if access.remote_read {
        flags |= ibv_access_flags::IBV_ACCESS_REMOTE_READ;
    }
    if access.remote_write {
        flags |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    }
    flags.0 as c_int
}

impl MemoryRegion {
    /// By its address. Of another device's memory the kernel knows that only if a module tells it.
    pub(super) fn register(domain: &Arc<ProtectionDomain>, memory: &Memory, access: Access) -> io::Result<Self> {
        let address = std::ptr::with_exposed_provenance_mut(memory.address() as usize);
        let bytes = memory.len().max(1);
        // SAFETY: a region's mapping is at least this long (never empty) and lives until it is deregistered. It is
        // shared as atomic words, so no reference of ours is to memory that must not change. Of a device's memory its
        // maker has promised the same.
        let raw = unsafe { (domain.context.library.ibv_reg_mr)(domain.raw.raw(), address, bytes, flags(access)) };
        Self::of(domain, raw, memory, Way::Address)
    }

    /// By a descriptor that stands for it.
    pub(super) fn register_dma_buf(
        domain: &Arc<ProtectionDomain>,
        memory: &Memory,
        dma_buf: BorrowedFd<'_>,
        access: Access,
    ) -> io::Result<Self> {
        let register = domain.register_dma_buf().ok_or(io::ErrorKind::Unsupported)?;
        let (address, bytes) = (memory.address(), memory.len());
        // SAFETY: the domain and the descriptor are there; what the latter stands for is the memory, whose maker has
        // promised that an RDMA device may write to it until this is deregistered.
        let raw = unsafe { register(domain.raw.raw(), 0, bytes, address, dma_buf.as_raw_fd(), flags(access)) };
        Self::of(domain, raw, memory, Way::DmaBuf)
    }

    fn of(domain: &Arc<ProtectionDomain>, raw: *mut ibv_mr, memory: &Memory, way: Way) -> io::Result<Self> {
        Ok(Self { domain: Arc::clone(domain), raw: Handle::new(raw)?, memory: memory.clone(), way })
    }

    pub(super) fn way(&self) -> Way {
        self.way
    }

    fn lkey(&self) -> u32 {
        // SAFETY: a registered region.
        unsafe { (*self.raw.raw()).lkey }
    }

    /// The key for peers.
    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: a registered region.
        unsafe { (*self.raw.raw()).rkey }
    }

    /// The entry for a segment of this region.
    fn entry(&self, segment: Segment) -> Option<ibv_sge> {
        let end = segment.offset.checked_add(segment.bytes as usize)?;
        let addr = self.memory.address() + segment.offset as u64;
        (end <= self.memory.len()).then_some(ibv_sge { addr, length: segment.bytes, lkey: self.lkey() })
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered once. What a queue pair still asks of it fails from now on.
        unsafe { (self.domain.context.library.ibv_dereg_mr)(self.raw.raw()) };
    }
}

/// Tells when completions come, if asked to.
pub(super) struct CompletionChannel {
    context: Arc<Context>,
    raw: Handle<ibv_comp_channel>,
}

impl CompletionChannel {
    pub(super) fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the device is open.
        let raw = Handle::new(unsafe { (context.library.ibv_create_comp_channel)(context.raw.raw()) })?;
        let channel = Self { context: Arc::clone(context), raw };
        nonblocking(channel.as_fd())?;
        Ok(Arc::new(channel))
    }

    /// Takes in all that was told. True if anything was.
    pub(super) fn drain(&self) -> bool {
        let mut told = false;
        loop {
            let (mut queue, mut cookie) = (null_mut(), null_mut());
            let get = self.context.library.ibv_get_cq_event;
            // SAFETY: the channel is open and does not block; both pointers are written on success.
            if check(unsafe { get(self.raw.raw(), &raw mut queue, &raw mut cookie) }).is_err() {
                return told;
            }
            // SAFETY: a completion queue cannot be destroyed before its events are acknowledged.
            unsafe { (self.context.library.ibv_ack_cq_events)(queue, 1) };
            told = true;
        }
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's own and open as long as it is.
        unsafe { BorrowedFd::borrow_raw((*self.raw.raw()).fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: its completion queues hold it by `Arc`, so none is left.
        unsafe { (self.context.library.ibv_destroy_comp_channel)(self.raw.raw()) };
    }
}

/// Where the completions of some queue pairs gather.
pub(super) struct CompletionQueue {
    channel: Arc<CompletionChannel>,
    raw: Handle<ibv_cq>,
}

/// One completion, as the device tells it.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkCompletion {
    pub id: u64,
    /// See `enum ibv_wc_status`; unless 0, only `id` and `queue_pair` mean anything besides.
    pub status: u32,
    /// See `enum ibv_wc_opcode`.
    pub opcode: u32,
    pub bytes: u32,
    /// In host order; means something where the opcode says so.
    pub immediate: u32,
    pub queue_pair: u32,
}

/// Completions taken by one call.
const BATCH: usize = 32;

impl CompletionQueue {
    pub(super) fn new(channel: &Arc<CompletionChannel>, entries: usize) -> io::Result<Arc<Self>> {
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let context = &channel.context;
        // SAFETY: device and channel are open; no cookie; completion vector 0 is always there.
        let raw =
            unsafe { (context.library.ibv_create_cq)(context.raw.raw(), entries, null_mut(), channel.raw.raw(), 0) };
        Ok(Arc::new(Self { channel: Arc::clone(channel), raw: Handle::new(raw)? }))
    }

    /// Has the channel tell of the next completion, once.
    pub(super) fn request_notification(&self) {
        // SAFETY: the completion queue is there. An error means that the device is gone, which its events tell.
        unsafe { rdma_sys::ibv_req_notify_cq(self.raw.raw(), 0) };
    }

    /// Hands over one batch of completions; false once that was the last.
    pub(super) fn poll(&self, mut take: impl FnMut(WorkCompletion)) -> bool {
        let mut batch = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        // SAFETY: the completion queue is there; the batch has room for as many as are asked for.
        let found = unsafe { rdma_sys::ibv_poll_cq(self.raw.raw(), BATCH as c_int, batch.as_mut_ptr().cast()) };
        // Negative: the device is gone, which its events tell.
        let found = usize::try_from(found).unwrap_or(0);
        for completion in &batch[..found] {
            // SAFETY: the device has written as many as it says.
            let completion = unsafe { completion.assume_init_ref() };
            // SAFETY: both fields of the union are plain 32-bit numbers.
            let immediate = unsafe { completion.imm_data_invalidated_rkey_union.imm_data };
            take(WorkCompletion {
                id: completion.wr_id,
                status: completion.status,
                opcode: completion.opcode,
                bytes: completion.byte_len,
                immediate: u32::from_be(immediate),
                queue_pair: completion.qp_num,
            });
        }
        found == BATCH
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: its queue pairs hold it by `Arc`, so none is left; all its events are acknowledged.
        unsafe { (self.channel.context.library.ibv_destroy_cq)(self.raw.raw()) };
    }
}

/// How deep a queue pair's queues are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Depths {
    pub send: usize,
    pub receive: usize,
    /// SENDs of at most so many bytes are copied when they are posted.
    pub inline_bytes: u32,
}

/// What nothing is set of yet.
pub(super) fn no_attributes() -> ibv_qp_attr {
    // SAFETY: plain numbers, for which zeroes are valid.
    unsafe { zeroed() }
}

/// The bytes of a GID.
#[cfg(test)]
pub(super) fn octets(gid: rdma_sys::ibv_gid) -> [u8; 16] {
    // SAFETY: all fields of the union are plain numbers of the same size.
    unsafe { gid.raw }
}

/// A reliable connected queue pair.
pub(super) struct QueuePair {
    domain: Arc<ProtectionDomain>,
    queue: Arc<CompletionQueue>,
    raw: Handle<ibv_qp>,
    inline_bytes: u32,
}

impl QueuePair {
    /// In state RESET.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depths: Depths,
    ) -> io::Result<Self> {
        // SAFETY: plain numbers and pointers, for which zeroes are valid.
        let mut attributes: ibv_qp_init_attr = unsafe { zeroed() };
        (attributes.send_cq, attributes.recv_cq) = (queue.raw.raw(), queue.raw.raw());
        attributes.qp_type = ibv_qp_type::IBV_QPT_RC;
        let depth = |requests: usize| u32::try_from(requests).unwrap_or(u32::MAX);
        (attributes.cap.max_send_wr, attributes.cap.max_recv_wr) = (depth(depths.send), depth(depths.receive));
        (attributes.cap.max_send_sge, attributes.cap.max_recv_sge) = (1, 1);
        attributes.cap.max_inline_data = depths.inline_bytes;
        // SAFETY: the protection domain and the completion queue are there, and of one device.
        let raw =
            Handle::new(unsafe { (domain.context.library.ibv_create_qp)(domain.raw.raw(), &raw mut attributes) })?;
        let inline_bytes = attributes.cap.max_inline_data;
        Ok(Self { domain: Arc::clone(domain), queue: Arc::clone(queue), raw, inline_bytes })
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair is there.
        unsafe { (*self.raw.raw()).qp_num }
    }

    /// Whether its completions gather there.
    pub(super) fn completes_to(&self, queue: &Arc<CompletionQueue>) -> bool {
        Arc::ptr_eq(&self.queue, queue)
    }

    /// Changes what `fill` sets, from no attributes at all.
    pub(super) fn modify(&self, mask: ibv_qp_attr_mask, fill: impl FnOnce(&mut ibv_qp_attr)) -> io::Result<()> {
        let mut attributes = no_attributes();
        fill(&mut attributes);
        let modify = self.domain.context.library.ibv_modify_qp;
        // SAFETY: the queue pair is there; the attributes are numbers, which the device checks.
        check(unsafe { modify(self.raw.raw(), &raw mut attributes, mask.0 as c_int) })
    }

    /// Stops it.
    pub(super) fn modify_to_error(&self) -> io::Result<()> {
        self.modify(ibv_qp_attr_mask::IBV_QP_STATE, |attributes| attributes.qp_state = ibv_qp_state::IBV_QPS_ERR)
    }

    /// Posts send work requests in lists, for each of which the device is told once. `region` finds a region by its
    /// key.
    ///
    /// # Errors
    /// If the device takes one not in; those before it are posted.
    pub(super) fn post_sends<'a>(
        &self,
        requests: &[SendRequest],
        region: impl Fn(u32) -> Option<&'a MemoryRegion>,
    ) -> io::Result<()> {
        for requests in requests.chunks(LIST) {
            let mut entries = [NO_ENTRY; LIST];
            let mut list = [const { MaybeUninit::<ibv_send_wr>::uninit() }; LIST];
            for (at, (request, place)) in requests.iter().zip(&mut entries).enumerate() {
                *place = entry(request.operation.local(), &region)?;
                list[at].write(self.send_request(request, place));
            }
            let first = chain(&mut list[..requests.len()], |request, next| request.next = next);
            let mut bad = null_mut();
            // SAFETY: the list and its entries live until the call returns, which copies them. Each entry lies within a
            // registered region, so what the device reads inline, now, is mapped; everything else it checks by the key.
            check(unsafe { rdma_sys::ibv_post_send(self.raw.raw(), first, &raw mut bad) })?;
        }
        Ok(())
    }

    fn send_request(&self, request: &SendRequest, entry: &mut ibv_sge) -> ibv_send_wr {
        // SAFETY: plain numbers and pointers, for which zeroes are valid.
        let mut send: ibv_send_wr = unsafe { zeroed() };
        send.wr_id = request.id;
        (send.sg_list, send.num_sge) = (&raw mut *entry, c_int::from(entry.length > 0));
        let mut flags = ibv_send_flags(0);
        if request.signalled {
            flags |= ibv_send_flags::IBV_SEND_SIGNALED;
        }
        let is_short = entry.length <= self.inline_bytes;
        if is_short && matches!(request.operation, Operation::Send { .. } | Operation::Write { .. }) {
            flags |= ibv_send_flags::IBV_SEND_INLINE;
        }
        let remote = match request.operation {
            Operation::Send { .. } => {
                send.opcode = ibv_wr_opcode::IBV_WR_SEND;
                None
            }
            Operation::Write { remote, .. } => {
                send.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                Some(remote)
            }
            Operation::WriteWithImmediate { remote, immediate, .. } => {
                send.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                send.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
                Some(remote)
            }
            Operation::Read { remote, .. } => {
                send.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                Some(remote)
            }
            other => unreachable!("nobody posts {other:?}"),
        };
        if let Some(remote) = remote {
            send.wr.rdma = rdma_sys::rdma_t { remote_addr: remote.address, rkey: remote.rkey };
        }
        send.send_flags = flags.0;
        send
    }

    /// Posts receives in lists.
    ///
    /// # Errors
    /// As [`Self::post_sends`].
    pub(super) fn post_receives<'a>(
        &self,
        requests: &[RecvRequest],
        region: impl Fn(u32) -> Option<&'a MemoryRegion>,
    ) -> io::Result<()> {
        for requests in requests.chunks(LIST) {
            let mut entries = [NO_ENTRY; LIST];
            let mut list = [const { MaybeUninit::<ibv_recv_wr>::uninit() }; LIST];
            for (at, (request, place)) in requests.iter().zip(&mut entries).enumerate() {
                *place = entry(request.segment, &region)?;
                list[at].write(ibv_recv_wr { wr_id: request.id, next: null_mut(), sg_list: place, num_sge: 1 });
            }
            let first = chain(&mut list[..requests.len()], |request, next| request.next = next);
            let mut bad = null_mut();
            // SAFETY: as in `post_sends`; the memory is the device's to fill until the receive completes, and it is
            // shared as atomic words.
            check(unsafe { rdma_sys::ibv_post_recv(self.raw.raw(), first, &raw mut bad) })?;
        }
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is there. When this returns, the device has let go of it and of its memory.
        unsafe { (self.domain.context.library.ibv_destroy_qp)(self.raw.raw()) };
    }
}

/// Work requests in one list, which is on the stack: an allocation takes as long as everything else here.
const LIST: usize = 16;
const NO_ENTRY: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };

fn entry<'a>(segment: Segment, region: &impl Fn(u32) -> Option<&'a MemoryRegion>) -> io::Result<ibv_sge> {
    if segment.bytes == 0 {
        return Ok(NO_ENTRY);
    }
    region(segment.lkey)
        .and_then(|region| region.entry(segment))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a segment outside of registered memory"))
}

/// Chains work requests, all of them written, in their order; the first.
fn chain<T>(list: &mut [MaybeUninit<T>], set_next: impl Fn(&mut T, *mut T)) -> *mut T {
    let first = list.as_mut_ptr().cast::<T>();
    for at in 1..list.len() {
        // SAFETY: both are elements of the list and written, and no reference to either is held.
        unsafe { set_next(&mut *first.add(at - 1), first.add(at)) };
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_takes_dma_bufs_that_refuses_one_for_its_descriptor() {
        let refused = |errno: rustix::io::Errno| {
            is_of_the_descriptor(io::Error::from_raw_os_error(errno.raw_os_error())).map_err(|error| error.kind())
        };
        assert_eq!(refused(rustix::io::Errno::BADF), Ok(true));
        assert_eq!(refused(rustix::io::Errno::OPNOTSUPP), Ok(false));
        assert_eq!(refused(rustix::io::Errno::PROTONOSUPPORT), Ok(false));
        // Too much is pinned already: that says nothing of dma-bufs.
        assert_eq!(refused(rustix::io::Errno::NOMEM), Err(io::ErrorKind::OutOfMemory));
    }

    /// The numbers are those of verbs.h, which rdma_rxe gives few of: it never moves a queue pair to ERROR by itself
    /// without a completion that says so, and has no failure of the device.
    #[test]
    fn events_are_known_by_their_numbers() {
        let of = |kind| AsyncEvent::of(kind, || 0x17);
        for kind in [1, 2, 3] {
            assert_eq!(of(kind), AsyncEvent::QueuePairFailed { number: 0x17 });
        }
        assert_eq!((of(0), of(8)), (AsyncEvent::DeviceFailed, AsyncEvent::DeviceFailed));
        assert_eq!(of(10), AsyncEvent::PortDown);
        assert_eq!((of(11), of(18)), (AsyncEvent::AddressChanged, AsyncEvent::AddressChanged));
        // COMM_EST, SQ_DRAINED, PATH_MIG, PORT_ACTIVE, and what a newer kernel may say: not about a queue pair of ours.
        for kind in [4, 5, 6, 9, 99] {
            assert_eq!(AsyncEvent::of(kind, || unreachable!()), AsyncEvent::Other);
        }
    }
}
