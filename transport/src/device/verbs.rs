//! The verbs arm: queue pairs of an InfiniBand or RoCE device, or of the kernel's `rdma_rxe`, by libibverbs.
//!
//! What is posted gathers until [`Verbs::ring`], which hands the device one list for each queue, so that its doorbell
//! rings once; receives first, since the sends tell the peer of them. Completions are polled in batches while there is
//! work; before its owner sleeps, [`Verbs::request_notification`] has the device tell of the next one.
//!
//! Life of the device: opened; lost, when it tells that it has failed, its port went down, or its address is another
//! now, or when it is gone from this host; let go, once its owner has ended all connections; and opened again as soon
//! as that is possible, with all memory registered anew, so that keys of the old life open nothing. One failed queue
//! pair is no loss: its connection alone ends.

mod attributes;
mod auto;
mod gid;
mod memory;
mod opened;
mod partition;
#[allow(unsafe_code)] // libibverbs is C.
mod sys;

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

use proto::{Span, Timestamp};
use soft_roce::{
    Completion, CompletionOpcode, PathMtu, ProtectionDomain, Psn, QueuePairNumber, RecvRequest, SendRequest, Status,
};

use super::interface::{Demand, Descriptor, DeviceEvent, Moved, Offer};
use crate::{
    Access, ROCE_PORT, Region, RegionKey, VerbsConfig,
    bootstrap::{PacketAddress, Parameters},
    device_memory::{DeviceMemory, Way},
    error::{
        ConnectQueuePairError, CreateQueuePairError, DeviceLost, PathMtuError, PortError, RegisterError,
        VerbsOpenError, WorkRequestError,
    },
    poller::Interest,
};
use gid::Gid;
use memory::Memory;
use opened::Opened;
use sys::{AsyncEvent, Context, PortState};

/// How often we look whether the device is still there: a driver that cannot take a device from its users (`rdma_rxe`)
/// waits until they let it go, and tells nobody.
const LOOK_EVERY: Span = Span::from_millis(1000);
/// How often we try to open a device that we have lost.
const OPEN_EVERY: Span = Span::from_millis(250);
/// Set in the ids of receives: a failed completion does not say which queue it is of.
const RECEIVE: u64 = 1 << 63;

/// A device, and what it is to have again whenever it is opened.
pub(crate) struct Verbs {
    config: VerbsConfig,
    demand: Demand,
    offer: Offer,
    /// What our port was on when the device was opened last.
    link: Link,
    /// Or why there is nothing.
    opened: Result<Opened, DeviceLost>,
    /// What is registered, by keys of our own.
    registered: BTreeMap<u32, Registered>,
    next_lkey: u32,
    /// The newest protection domain.
    last_domain: ProtectionDomain,
    /// Queue pairs with something posted since the last [`Self::ring`], each once.
    posted: Vec<QueuePairNumber>,
    ready: VecDeque<Completion>,
    events: VecDeque<DeviceEvent>,
    /// When to look whether the device is still there, or there again.
    look_at: Timestamp,
}

struct Registered {
    memory: Memory,
    access: Access,
    /// Of those that outlive the device all are of the default one.
    domain: ProtectionDomain,
    /// The device's key for peers.
    rkey: u32,
}

/// What our port is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Roce(Gid),
    InfiniBand { lid: u16 },
}

/// Whether a device registers dma-bufs.
pub(super) fn takes_dma_bufs(device: &str) -> Result<bool, VerbsOpenError> {
    let failed = |what: &'static str| move |cause| VerbsOpenError::Object { what, cause };
    let domain = sys::ProtectionDomain::new(&Context::open(device)?).map_err(failed("no protection domain"))?;
    domain.takes_dma_bufs().map_err(failed("it does not say whether it registers dma-bufs"))
}

impl Verbs {
    /// As the kernel calls it.
    pub(super) fn name(&self) -> &str {
        &self.config.device
    }

    pub(super) fn open(config: VerbsConfig, demand: Demand) -> Result<Self, VerbsOpenError> {
        config.settings.check()?;
        let config = auto::placed(config)?;
        let opened = Opened::open(&config, demand)?;
        Ok(Self {
            config,
            demand,
            offer: opened.offer,
            link: opened.link,
            opened: Ok(opened),
            registered: BTreeMap::new(),
            next_lkey: 1,
            last_domain: ProtectionDomain::default(),
            posted: Vec::new(),
            ready: VecDeque::new(),
            events: VecDeque::new(),
            look_at: Timestamp::default(),
        })
    }

    pub(super) fn offer(&self) -> Offer {
        self.offer
    }

    pub(super) fn address(&self) -> PacketAddress {
        match self.link {
            Link::Roce(gid) => PacketAddress::Roce(SocketAddr::new(gid.address, ROCE_PORT)),
            Link::InfiniBand { lid } => PacketAddress::InfiniBand { lid },
        }
    }

    pub(super) fn descriptors(&self) -> Vec<(Descriptor, BorrowedFd<'_>, Interest)> {
        let Ok(opened) = &self.opened else { return Vec::new() };
        let [data, events] = opened.descriptors();
        vec![(Descriptor::Data, data, Interest::Read), (Descriptor::Events, events, Interest::Read)]
    }

    /// The device, or why there is none.
    fn device(&mut self) -> Result<&mut Opened, DeviceLost> {
        self.opened.as_mut().map_err(|lost| lost.clone())
    }

    pub(super) fn open_domain(&mut self) -> Result<ProtectionDomain, RegisterError> {
        // Numbers come again after 2^32, when what had them is long gone.
        let domain = ProtectionDomain(self.last_domain.0.wrapping_add(1).max(1));
        self.device()?.open_domain(domain)?;
        self.last_domain = domain;
        Ok(domain)
    }

    pub(super) fn close_domain(&mut self, domain: ProtectionDomain) {
        if let Ok(opened) = &mut self.opened {
            opened.close_domain(domain);
        }
    }

    pub(super) fn register(
        &mut self,
        region: &Region,
        access: Access,
        domain: ProtectionDomain,
    ) -> Result<RegionKey, RegisterError> {
        self.register_memory(Memory::Host(region.clone()), access, domain)
    }

    pub(super) fn register_device_memory(&mut self, memory: &DeviceMemory) -> Result<(u32, Way), RegisterError> {
        let (memory, domain) = (Memory::Device(memory.clone()), ProtectionDomain::default());
        let key = self.register_memory(memory, Access::default(), domain)?;
        Ok((key.lkey, self.device()?.way(key.lkey)))
    }

    fn register_memory(
        &mut self,
        memory: Memory,
        access: Access,
        domain: ProtectionDomain,
    ) -> Result<RegionKey, RegisterError> {
        let (lkey, address) = (self.next_lkey, memory.address());
        let rkey = self.device()?.register(lkey, &memory, (access, domain), None)?;
        self.next_lkey += 1;
        self.registered.insert(lkey, Registered { memory, access, domain, rkey });
        Ok(RegionKey { lkey, rkey, address })
    }

    pub(super) fn deregister(&mut self, lkey: u32) {
        self.registered.remove(&lkey);
        if let Ok(opened) = &mut self.opened {
            opened.deregister(lkey);
        }
    }

    pub(super) fn path_mtu(&self, _: IpAddr) -> Result<PathMtu, PathMtuError> {
        Ok(self.opened.as_ref().map_err(DeviceLost::clone)?.path_mtu()?)
    }

    pub(super) fn create_queue_pair(
        &mut self,
        domain: ProtectionDomain,
    ) -> Result<QueuePairNumber, CreateQueuePairError> {
        let created = self.device()?.create_queue_pair(domain);
        created.map_err(|cause| CreateQueuePairError::Verbs { device: self.config.device.clone(), cause })
    }

    pub(super) fn random_psn(&self) -> Psn {
        Psn::new(rand::random_range(0..1 << 24))
    }

    pub(super) fn connect_queue_pair(
        &mut self,
        number: QueuePairNumber,
        psn: Psn,
        peer: &Parameters,
        path_mtu: PathMtu,
    ) -> Result<(), ConnectQueuePairError> {
        self.device()?.connect_queue_pair(number, psn, peer, path_mtu)
    }

    pub(super) fn post_send(&mut self, number: QueuePairNumber, request: SendRequest) -> Result<(), WorkRequestError> {
        let opened = self.opened.as_mut().map_err(|lost| lost.clone())?;
        let (bytes, most) = (request.operation.local().bytes, opened.message_bytes_max);
        if bytes > most {
            return Err(WorkRequestError::TooLong { device: self.config.device.clone(), bytes, most });
        }
        if opened.post_send(number, request) {
            self.posted.push(number);
        }
        Ok(())
    }

    pub(super) fn post_recv(&mut self, number: QueuePairNumber, request: RecvRequest) -> Result<(), WorkRequestError> {
        if self.device()?.post_recv(number, RecvRequest { id: request.id | RECEIVE, ..request }) {
            self.posted.push(number);
        }
        Ok(())
    }

    pub(super) fn ring(&mut self) {
        let Ok(opened) = &mut self.opened else { return };
        for number in self.posted.drain(..) {
            if let Err(error) = opened.ring(number) {
                let reason = format!("{} takes no work requests: {error}", self.config.device);
                self.events.push_back(DeviceEvent::QueuePairFailed { number, reason });
            }
        }
    }

    pub(super) fn receive(&mut self, _: Timestamp) -> Moved {
        let any = self.poll_queues();
        Moved { any, more: any }
    }

    /// Takes in all completions; true if there were any.
    fn poll_queues(&mut self) -> bool {
        let Ok(opened) = &self.opened else { return false };
        let before = self.ready.len();
        opened.poll_queues(|found| self.ready.push_back(completion(found)));
        self.ready.len() > before
    }

    pub(super) fn poll_completion(&mut self) -> Option<Completion> {
        self.ready.pop_front()
    }

    pub(super) fn request_notification(&mut self) -> bool {
        if self.opened.as_mut().is_ok_and(Opened::request_notification) {
            // What came before the request is not told.
            self.poll_queues();
        }
        !self.ready.is_empty()
    }

    pub(super) fn handle_ready(&mut self, descriptor: Descriptor) {
        let Ok(opened) = &mut self.opened else { return };
        match descriptor {
            Descriptor::Data => opened.drain(),
            Descriptor::Events => {
                while let Some(event) = opened.poll_async_event() {
                    self.events.extend(consequence(event, &self.config.device, self.link, || opened.look()));
                }
            }
        }
    }

    pub(super) fn poll_event(&mut self) -> Option<DeviceEvent> {
        self.events.pop_front()
    }

    pub(super) fn modify_to_error(&mut self, number: QueuePairNumber) {
        if let Ok(opened) = &mut self.opened
            && let Err(error) = opened.modify_to_error(number)
        {
            // It is destroyed next, which no device refuses.
            tracing::warn!("{}: a queue pair does not go to ERROR: {error}", self.config.device);
        }
        self.poll_queues();
    }

    pub(super) fn destroy_queue_pair(&mut self, number: QueuePairNumber) {
        if let Ok(opened) = &mut self.opened {
            opened.destroy_queue_pair(number);
        }
        // The device may give the number to the next queue pair, which must not get these.
        self.poll_queues();
        self.ready.retain(|completion| completion.queue_pair != number);
        self.events.retain(|event| !matches!(event, DeviceEvent::QueuePairFailed { number: of, .. } if *of == number));
    }

    /// Lets the device go, which may be what its driver waits for. No queue pair is left.
    pub(super) fn let_go(&mut self, reason: String) {
        self.opened = Err(DeviceLost(reason));
        // Whatever it still had to tell was of the life that is over.
        self.events.clear();
        self.look_at = Timestamp::default();
    }

    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        if !self.is_timer_due(now) {
            return;
        }
        match &self.opened {
            Ok(opened) => {
                if !opened.is_there() {
                    let reason = format!("{} was removed from this host", self.config.device);
                    self.events.push_back(DeviceEvent::Lost { reason });
                }
                self.look_at = now + LOOK_EVERY;
            }
            Err(_) => {
                if let Err(reason) = self.open_again() {
                    self.opened = Err(DeviceLost(reason.to_string()));
                }
                self.look_at = now + OPEN_EVERY;
            }
        }
    }

    /// Opens the device and registers all memory anew.
    fn open_again(&mut self) -> Result<(), VerbsOpenError> {
        let mut opened = Opened::open(&self.config, self.demand)?;
        if opened.offer != self.offer {
            return Err(VerbsOpenError::Changed { device: self.config.device.clone() });
        }
        let mut rkeys = Vec::with_capacity(self.registered.len());
        for (&lkey, registered) in &self.registered {
            let Registered { memory, access, domain, rkey } = registered;
            rkeys.push(opened.register(lkey, memory, (*access, *domain), Some(*rkey))?);
        }
        let mut changed = Vec::new();
        for ((&lkey, registered), rkey) in self.registered.iter_mut().zip(rkeys) {
            registered.rkey = rkey;
            if registered.access.remote_read || registered.access.remote_write {
                changed.push((lkey, rkey));
            }
        }
        (self.link, self.opened) = (opened.link, Ok(opened));
        self.events.push_back(DeviceEvent::OpenedAgain { changed });
        Ok(())
    }

    pub(super) fn is_timer_due(&self, now: Timestamp) -> bool {
        self.look_at <= now
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        Some(self.look_at)
    }

    /// Deliberately nothing: a device sends by itself.
    pub(super) fn transmit(&mut self, _: Timestamp) -> Moved {
        Moved::default()
    }
}

/// What an event of the device means for its owner. `look` tells what our port is on now.
fn consequence(
    event: AsyncEvent,
    device: &str,
    link: Link,
    look: impl FnOnce() -> Result<Link, PortError>,
) -> Option<DeviceEvent> {
    let lost = |reason| Some(DeviceEvent::Lost { reason });
    match event {
        AsyncEvent::QueuePairFailed { number } => {
            let reason = format!("{device} moved the queue pair to ERROR: one side asked for what the other refused");
            Some(DeviceEvent::QueuePairFailed { number: QueuePairNumber(number), reason })
        }
        AsyncEvent::DeviceFailed => lost(format!("{device} has failed")),
        AsyncEvent::PortDown | AsyncEvent::AddressChanged => match look() {
            // Of another port or another address, or over again.
            Ok(found) if found == link => None,
            Ok(_) => lost(format!("the address of {device} has changed")),
            Err(reason) => lost(reason.to_string()),
        },
        AsyncEvent::Other => None,
    }
}

/// How packets get to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    Roce { gid_index: u8, peer: IpAddr },
    InfiniBand { lid: u16 },
}

/// The route from our port to a peer's.
fn route(link: Link, peer: PacketAddress) -> Result<Route, ConnectQueuePairError> {
    match (link, peer) {
        (Link::Roce(_), PacketAddress::SoftRoce(at) | PacketAddress::Roce(at)) if at.port() != ROCE_PORT => {
            Err(ConnectQueuePairError::PeerPort(at.port()))
        }
        (Link::Roce(gid), PacketAddress::SoftRoce(at) | PacketAddress::Roce(at)) => {
            Ok(Route::Roce { gid_index: gid.index, peer: at.ip() })
        }
        (Link::InfiniBand { .. }, PacketAddress::InfiniBand { lid }) => Ok(Route::InfiniBand { lid }),
        _ => Err(ConnectQueuePairError::TwoNetworks),
    }
}

fn link_of(port: &PortState, config: &VerbsConfig) -> Result<Link, PortError> {
    if port.infiniband {
        return Ok(Link::InfiniBand { lid: port.lid });
    }
    gid::choose(&gid::port_folder(&config.device, config.settings.port), config.address)
        .map(Link::Roce)
        .map_err(|cause| PortError::Address { device: config.device.clone(), cause })
}

fn completion(found: sys::WorkCompletion) -> Completion {
    /// `IBV_WC_RDMA_READ`, `IBV_WC_RDMA_WRITE` and `IBV_WC_RECV_RDMA_WITH_IMM`.
    const WRITE: u32 = 1;
    const READ: u32 = 2;
    const RECEIVE_WITH_IMMEDIATE: u32 = 129;
    let opcode = match found.opcode {
        RECEIVE_WITH_IMMEDIATE if found.id & RECEIVE != 0 && found.status == 0 => {
            CompletionOpcode::RecvWriteWithImmediate
        }
        _ if found.id & RECEIVE != 0 => CompletionOpcode::Recv,
        WRITE => CompletionOpcode::Write,
        READ => CompletionOpcode::Read,
        _ => CompletionOpcode::Send,
    };
    Completion {
        queue_pair: QueuePairNumber(found.queue_pair),
        id: found.id & !RECEIVE,
        status: status(found.status),
        opcode,
        bytes: found.bytes,
        immediate: (opcode == CompletionOpcode::RecvWriteWithImmediate).then_some(found.immediate),
        invalidated_rkey: None,
        source: None,
        solicited: false,
    }
}

/// IBTA 11.6.2, with the numbers of `enum ibv_wc_status`.
fn status(number: u32) -> Status {
    match number {
        0 => Status::Success,
        1 => Status::LocalLength,
        4 | 8 => Status::LocalProtection,
        5 => Status::Flushed,
        7 => Status::BadResponse,
        9 => Status::RemoteInvalidRequest,
        10 => Status::RemoteAccess,
        11 => Status::RemoteOperation,
        12 => Status::RetryExceeded,
        13 => Status::ReceiverNotReadyRetryExceeded,
        // A fault of the device or of this side's queue pair.
        _ => Status::LocalQueuePairOperation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(id: u64, status: u32, opcode: u32) -> sys::WorkCompletion {
        sys::WorkCompletion { id, status, opcode, bytes: 7, immediate: 9, queue_pair: 17 }
    }

    #[test]
    fn completions_say_which_queue_they_are_of_even_when_they_failed() {
        let received = completion(found(RECEIVE | 3, 0, 129));
        assert_eq!((received.id, received.opcode), (3, CompletionOpcode::RecvWriteWithImmediate));
        assert_eq!(received.immediate, Some(9));
        // The opcode of a failed one is garbage.
        let flushed = completion(found(RECEIVE | 3, 5, 1));
        assert_eq!((flushed.id, flushed.opcode, flushed.status), (3, CompletionOpcode::Recv, Status::Flushed));
        assert_eq!(completion(found(3, 0, 2)).opcode, CompletionOpcode::Read);
        assert_eq!(completion(found(3, 10, 129)).opcode, CompletionOpcode::Send);
        assert_eq!(completion(found(3, 19, 0)).status, Status::LocalQueuePairOperation);
    }

    const GID: Gid = Gid { index: 1, address: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)) };

    /// A failed device and a queue pair that a device moved to ERROR by itself: `rdma_rxe` tells of neither, so its
    /// cases (ports, addresses and devices that come and go, in `transport/tests/device_events.rs`) leave these two.
    #[test]
    fn one_failed_queue_pair_is_one_connections_end_and_a_failed_device_is_all_of_theirs() {
        let told = |event| consequence(event, "mlx5_0", Link::Roce(GID), || unreachable!("the port does not matter"));
        let failed = told(AsyncEvent::QueuePairFailed { number: 17 });
        let Some(DeviceEvent::QueuePairFailed { number: QueuePairNumber(17), reason }) = failed else {
            panic!("{failed:?}")
        };
        assert!(reason.contains("mlx5_0 moved the queue pair to ERROR"), "{reason}");
        let failed = told(AsyncEvent::DeviceFailed);
        assert!(matches!(&failed, Some(DeviceEvent::Lost { reason }) if reason == "mlx5_0 has failed"), "{failed:?}");
        assert!(told(AsyncEvent::Other).is_none());
    }

    #[test]
    fn a_port_is_lost_if_it_is_down_or_no_longer_what_peers_were_told() {
        let other = Gid { index: 3, ..GID };
        for event in [AsyncEvent::PortDown, AsyncEvent::AddressChanged] {
            let told = |found| consequence(event, "mlx5_0", Link::Roce(GID), || found);
            assert!(told(Ok(Link::Roce(GID))).is_none());
            for (found, why) in [
                (Ok(Link::Roce(other)), "the address of mlx5_0 has changed"),
                (Ok(Link::InfiniBand { lid: 4 }), "the address of mlx5_0 has changed"),
                (
                    Err(PortError::Down { device: "mlx5_0".to_owned(), port: 1 }),
                    "port 1 of mlx5_0 is down; bring its link up",
                ),
            ] {
                let lost = told(found);
                assert!(matches!(&lost, Some(DeviceEvent::Lost { reason }) if reason == why), "{lost:?}");
            }
        }
    }

    #[test]
    fn routes_exist_within_one_network_only() {
        let (roce, infiniband) = (Link::Roce(GID), Link::InfiniBand { lid: 3 });
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let peer = at("10.0.0.2:4791");
        let expected = Route::Roce { gid_index: 1, peer: peer.ip() };
        assert_eq!(route(roce, PacketAddress::SoftRoce(peer)).unwrap(), expected);
        assert_eq!(route(roce, PacketAddress::Roce(peer)).unwrap(), expected);
        let other_port = route(roce, PacketAddress::SoftRoce(at("10.0.0.2:5000")));
        assert!(other_port.unwrap_err().to_string().contains("UDP port 5000"));
        let lid = route(infiniband, PacketAddress::InfiniBand { lid: 4 }).unwrap();
        assert_eq!(lid, Route::InfiniBand { lid: 4 });
        assert!(route(infiniband, PacketAddress::Roce(peer)).is_err());
        assert!(route(roce, PacketAddress::InfiniBand { lid: 4 }).is_err());
    }
}
