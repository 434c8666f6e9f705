//! The verbs arm: queue pairs of an InfiniBand or RoCE device, or of the kernel's `rdma_rxe`, by libibverbs.
//!
//! What is posted gathers until [`Verbs::ring`], which hands the device one list for each queue, so that its doorbell
//! rings once; receives first, since the sends tell the peer of them. Completions are polled in batches while there is
//! work; before its owner sleeps, [`Verbs::arm`] has the device tell of the next one.
//!
//! A device tells of its own troubles, too: a queue pair that failed, its port that went down, an address that is
//! another now. Connections end with that reason, and their owners connect again once it is over.

mod attributes;
mod gid;
#[allow(unsafe_code)] // libibverbs is C.
mod sys;

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use proto::Timestamp;
use soft_roce::{Completion, CompletionOpcode, PathMtu, Psn, QueuePairNumber, RecvRequest, SendRequest, Status};

use super::{Demand, Descriptor, DeviceEvent, Offer};
use crate::{
    Access, ROCE_PORT, Region, RegionKey, VerbsConfig, VerbsSettings,
    bootstrap::{PacketAddress, Parameters},
    poller::Interest,
};
use gid::Gid;
use sys::{AsyncEvent, CompletionChannel, CompletionQueue, Context, Depths, MemoryRegion, PortState, ProtectionDomain};

/// READs outstanding, unless configured: the bandwidth-delay product of 100 Gbit/s and 20 us, and some inputs.
const READ_BUDGET_BYTES: usize = 1024 * 1024;
/// What a soft peer may have in flight towards us: what it can send within a round trip.
const PEER_WINDOW_BYTES: u32 = 256 * 1024;
/// SENDs of at most so many bytes are copied when they are posted, where the device can.
const INLINE_BYTES: u32 = 256;
/// Set in the ids of receives: a failed completion does not say which queue it is of.
const RECEIVE: u64 = 1 << 63;

/// An opened device.
pub(crate) struct Verbs {
    config: VerbsConfig,
    /// Connections end, and regions are let go, before what they are of: fields are dropped in this order.
    queue_pairs: BTreeMap<QueuePairNumber, QueuePair>,
    regions: BTreeMap<u32, MemoryRegion>,
    /// What the next region is called here: a device's own keys change with [`Self::renew_keys`].
    next_lkey: u32,
    /// As few as hold the completions of all queue pairs.
    queues: Vec<Arc<CompletionQueue>>,
    channel: Arc<CompletionChannel>,
    domain: Arc<ProtectionDomain>,
    context: Arc<Context>,
    link: Link,
    message_bytes_max: u32,
    demand: Demand,
    offer: Offer,
    /// Queue pairs that a completion queue has room for.
    queue_pairs_per_queue: usize,
    /// Queue pairs with something posted since the last [`Self::ring`], each once.
    posted: Vec<QueuePairNumber>,
    ready: VecDeque<Completion>,
    events: VecDeque<DeviceEvent>,
    /// Whether the channel will tell of the next completion, or has told.
    armed: bool,
    /// Why the device cannot be used any more.
    failed: Option<String>,
}

struct QueuePair {
    pair: sys::QueuePair,
    sends: Vec<SendRequest>,
    receives: Vec<RecvRequest>,
}

/// What our port is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Roce(Gid),
    InfiniBand { lid: u16 },
}

impl Verbs {
    pub(super) fn open(config: VerbsConfig, demand: Demand) -> Result<Self, String> {
        config.settings.check()?;
        let name = &config.device;
        let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
        let context = Context::open(name)?;
        let port = active_port(&context, &config)?;
        let link = link_of(&port, &config)?;
        let limits = context.limits().map_err(failed("its limits cannot be read"))?;
        if limits.reads_max == 0 || limits.reads_answered_max == 0 {
            return Err(format!("{name} carries no READs (max_qp_rd_atom is 0)"));
        }
        let requests = demand.send_depth + demand.receive_depth;
        if limits.queue_pair_requests_max < demand.send_depth || limits.completions_max < requests {
            let (pair, queue) = (limits.queue_pair_requests_max, limits.completions_max);
            return Err(format!(
                "{name} has {pair} requests a queue pair and {queue} completions; {requests} are needed"
            ));
        }
        let read_budget_bytes =
            if demand.read_budget_bytes == 0 { READ_BUDGET_BYTES } else { demand.read_budget_bytes };
        let reads = |of_device: usize| u8::try_from(of_device).unwrap_or(u8::MAX).min(demand.reads_max);
        let offer = Offer {
            read_budget_bytes,
            // What neither the device nor the budget forbids is one READ.
            read_bytes_max: (port.message_bytes_max as usize).min(read_budget_bytes),
            reads_max: reads(limits.reads_max),
            reads_answered_max: reads(limits.reads_answered_max),
            peer_window_bytes: PEER_WINDOW_BYTES,
        };
        let domain = ProtectionDomain::new(&context).map_err(failed("no protection domain"))?;
        let channel = CompletionChannel::new(&context).map_err(failed("no completion channel"))?;
        Ok(Self {
            queue_pairs: BTreeMap::new(),
            regions: BTreeMap::new(),
            next_lkey: 1,
            queues: Vec::new(),
            channel,
            domain,
            context,
            link,
            message_bytes_max: port.message_bytes_max,
            demand,
            offer,
            queue_pairs_per_queue: (limits.completions_max / requests).min(demand.queue_pairs_max.max(1)),
            posted: Vec::new(),
            ready: VecDeque::new(),
            events: VecDeque::new(),
            armed: false,
            failed: None,
            config,
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

    pub(super) fn descriptors(&self) -> [(Descriptor, BorrowedFd<'_>, Interest); 2] {
        [
            (Descriptor::Data, self.channel.as_fd(), Interest::Read),
            (Descriptor::Events, self.context.as_fd(), Interest::Read),
        ]
    }

    pub(super) fn register(&mut self, region: &Region, access: Access) -> Result<RegionKey, String> {
        let registered = MemoryRegion::register(&self.domain, region, access).map_err(|error| {
            format!("{}: {error}; is the limit of locked memory (ulimit -l) large enough?", self.config.device)
        })?;
        let (lkey, rkey) = (self.next_lkey, registered.rkey());
        self.next_lkey += 1;
        self.regions.insert(lkey, registered);
        Ok(RegionKey { lkey, rkey, address: region.address() })
    }

    pub(super) fn renew_keys(&mut self) -> Vec<(u32, u32)> {
        let mut changed = Vec::new();
        for (&lkey, region) in self.regions.iter_mut().filter(|(_, region)| region.is_remote()) {
            // Registered anew before the old registration ends, so the keys differ.
            match region.again() {
                Ok(again) => *region = again,
                Err(error) => {
                    let device = &self.config.device;
                    self.failed = Some(format!(
                        "{device} gives no new keys: {error}; for that, memory counts twice against the limit of \
                         locked memory (ulimit -l): raise it and restart this process"
                    ));
                    return changed;
                }
            }
            changed.push((lkey, region.rkey()));
        }
        changed
    }

    pub(super) fn deregister(&mut self, lkey: u32) {
        self.regions.remove(&lkey);
    }

    /// What the port carries now. Both ends of a route may carry more than what is between them: that is the
    /// operator's to see to, as no packet of a verbs device is ever split.
    pub(super) fn path_mtu(&self, _: IpAddr) -> Result<PathMtu, String> {
        if let Some(reason) = &self.failed {
            return Err(reason.clone());
        }
        let port = active_port(&self.context, &self.config)?;
        // IBTA 14.2.5.6: 1 is 256 bytes, each further code is twice as much.
        let mtus = [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];
        let at = (port.active_mtu as usize).clamp(1, mtus.len());
        Ok(mtus[at - 1])
    }

    pub(super) fn create_queue_pair(&mut self) -> Result<QueuePairNumber, String> {
        let queue = self.queue_with_room();
        let failed = |error: io::Error| format!("{}: {error}", self.config.device);
        let queue = queue.map_err(failed)?;
        let depths =
            |inline_bytes| Depths { send: self.demand.send_depth, receive: self.demand.receive_depth, inline_bytes };
        // A device that copies no SENDs, or no such long ones, refuses the queue pair.
        let pair = sys::QueuePair::new(&self.domain, &queue, depths(INLINE_BYTES))
            .or_else(|_| sys::QueuePair::new(&self.domain, &queue, depths(0)))
            .map_err(failed)?;
        pair.modify(attributes::initialised_mask(), |to| attributes::initialised(to, &self.config.settings))
            .map_err(failed)?;
        let number = QueuePairNumber(pair.number());
        self.queue_pairs.insert(number, QueuePair { pair, sends: Vec::new(), receives: Vec::new() });
        Ok(number)
    }

    /// A completion queue that one more queue pair cannot overrun.
    fn queue_with_room(&mut self) -> io::Result<Arc<CompletionQueue>> {
        let has_room = |queue: &&Arc<CompletionQueue>| {
            let pairs = self.queue_pairs.values().filter(|entry| entry.pair.completes_to(queue)).count();
            pairs < self.queue_pairs_per_queue
        };
        if let Some(queue) = self.queues.iter().find(has_room) {
            return Ok(Arc::clone(queue));
        }
        let entries = self.queue_pairs_per_queue * (self.demand.send_depth + self.demand.receive_depth);
        let queue = CompletionQueue::new(&self.channel, entries)?;
        if self.armed {
            queue.arm();
        }
        self.queues.push(Arc::clone(&queue));
        Ok(queue)
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
    ) -> Result<(), String> {
        let route = route(self.link, peer.address)?;
        self.ring_one(number).map_err(|error| format!("its receives cannot be posted: {error}"))?;
        let entry = self.queue_pairs.get(&number).expect("a channel connects its own queue pair, once");
        let failed = |error: io::Error| format!("{} cannot reach {}: {error}", self.config.device, peer.address);
        let (settings, offer) = (&self.config.settings, &self.offer);
        entry
            .pair
            .modify(attributes::ready_to_receive_mask(), |to| {
                attributes::ready_to_receive(to, settings, offer, (route, path_mtu), peer);
            })
            .map_err(failed)?;
        entry
            .pair
            .modify(attributes::ready_to_send_mask(), |to| attributes::ready_to_send(to, settings, offer, psn, peer))
            .map_err(failed)
    }

    pub(super) fn post_send(&mut self, number: QueuePairNumber, request: SendRequest) -> Result<(), String> {
        let (bytes, most) = (request.operation.local().bytes, self.message_bytes_max);
        if bytes > most {
            return Err(format!("a message of {bytes} bytes, where {} carries {most}", self.config.device));
        }
        self.posting(number).sends.push(request);
        Ok(())
    }

    pub(super) fn post_recv(&mut self, number: QueuePairNumber, request: RecvRequest) -> Result<(), String> {
        self.posting(number).receives.push(RecvRequest { id: request.id | RECEIVE, ..request });
        Ok(())
    }

    fn posting(&mut self, number: QueuePairNumber) -> &mut QueuePair {
        let entry = self.queue_pairs.get_mut(&number).expect("a channel posts to its own queue pair");
        if entry.sends.is_empty() && entry.receives.is_empty() {
            self.posted.push(number);
        }
        entry
    }

    pub(super) fn ring(&mut self) {
        let mut posted = std::mem::take(&mut self.posted);
        for number in posted.drain(..) {
            if let Err(error) = self.ring_one(number) {
                let reason = format!("{} takes no work requests: {error}", self.config.device);
                self.events.push_back(DeviceEvent::QueuePairFailed { number, reason });
            }
        }
        self.posted = posted;
    }

    fn ring_one(&mut self, number: QueuePairNumber) -> io::Result<()> {
        let Some(entry) = self.queue_pairs.get_mut(&number) else { return Ok(()) };
        let region = |lkey| self.regions.get(&lkey);
        entry.pair.post_receives(&entry.receives, region)?;
        entry.receives.clear();
        entry.pair.post_sends(&entry.sends, region)?;
        entry.sends.clear();
        Ok(())
    }

    pub(super) fn receive(&mut self, _: Timestamp) -> bool {
        self.poll_queues()
    }

    /// Takes in all completions; true if there were any.
    fn poll_queues(&mut self) -> bool {
        let before = self.ready.len();
        for queue in &self.queues {
            while queue.poll(|found| self.ready.push_back(completion(found))) {}
        }
        self.ready.len() > before
    }

    pub(super) fn poll_completion(&mut self) -> Option<Completion> {
        self.ready.pop_front()
    }

    pub(super) fn arm(&mut self) -> bool {
        if !self.armed {
            self.queues.iter().for_each(|queue| queue.arm());
            self.armed = true;
            // What came before it was armed is not told.
            self.poll_queues();
        }
        !self.ready.is_empty()
    }

    pub(super) fn handle_ready(&mut self, descriptor: Descriptor) {
        match descriptor {
            Descriptor::Data => self.armed &= !self.channel.drain(),
            Descriptor::Events => {
                while let Some(event) = self.context.poll_async_event() {
                    self.on_async_event(event);
                }
            }
        }
    }

    pub(super) fn poll_event(&mut self) -> Option<DeviceEvent> {
        self.events.pop_front()
    }

    fn on_async_event(&mut self, event: AsyncEvent) {
        let (device, port) = (&self.config.device, self.config.settings.port);
        let event = match event {
            AsyncEvent::QueuePairFailed { number } => DeviceEvent::QueuePairFailed {
                number: QueuePairNumber(number),
                reason: format!("{device} moved the queue pair to ERROR: one side asked for what the other refused"),
            },
            AsyncEvent::DeviceFailed => {
                let reason = format!("{device} has failed; restart this process once the kernel has recovered it");
                self.failed = Some(reason.clone());
                DeviceEvent::Lost { reason }
            }
            AsyncEvent::PortDown => match active_port(&self.context, &self.config) {
                // Another port of the device, or it is up again.
                Ok(_) => return,
                Err(reason) => DeviceEvent::Lost { reason },
            },
            AsyncEvent::AddressChanged => {
                let link = self.context.port(port).map_err(|error| error.to_string());
                match link.and_then(|state| link_of(&state, &self.config)) {
                    Ok(link) if link == self.link => return,
                    Ok(link) => {
                        self.link = link;
                        DeviceEvent::Lost { reason: format!("the address of {device} has changed") }
                    }
                    Err(reason) => DeviceEvent::Lost { reason },
                }
            }
            AsyncEvent::Other => return,
        };
        self.events.push_back(event);
    }

    pub(super) fn modify_to_error(&mut self, number: QueuePairNumber) {
        if let Some(entry) = self.queue_pairs.get(&number)
            && let Err(error) = entry.pair.modify_to_error()
        {
            // It is destroyed next, which no device refuses.
            tracing::warn!("{}: a queue pair does not go to ERROR: {error}", self.config.device);
        }
        self.poll_queues();
    }

    pub(super) fn destroy_queue_pair(&mut self, number: QueuePairNumber) {
        self.queue_pairs.remove(&number);
        // The device may give the number to the next queue pair, which must not get these.
        self.poll_queues();
        self.ready.retain(|completion| completion.queue_pair != number);
        self.events.retain(|event| !matches!(event, DeviceEvent::QueuePairFailed { number: of, .. } if *of == number));
    }

    // What only soft-RoCE has: a device has timers and packets of its own.

    pub(super) fn handle_timeout(&mut self, _: Timestamp) {}

    pub(super) fn transmit(&mut self, _: Timestamp) -> bool {
        false
    }

    pub(super) fn is_timer_due(&self, _: Timestamp) -> bool {
        false
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        None
    }
}

/// How packets get to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    Roce { gid_index: u8, peer: IpAddr },
    InfiniBand { lid: u16 },
}

/// The route from our port to a peer's.
fn route(link: Link, peer: PacketAddress) -> Result<Route, String> {
    match (link, peer) {
        (Link::Roce(_), PacketAddress::SoftRoce(at) | PacketAddress::Roce(at)) if at.port() != ROCE_PORT => {
            Err(format!(
                "the peer is at UDP port {}, but a device sends to {ROCE_PORT} only: give the peer an `address` with that port",
                at.port()
            ))
        }
        (Link::Roce(gid), PacketAddress::SoftRoce(at) | PacketAddress::Roce(at)) => {
            Ok(Route::Roce { gid_index: gid.index, peer: at.ip() })
        }
        (Link::InfiniBand { .. }, PacketAddress::InfiniBand { lid }) => Ok(Route::InfiniBand { lid }),
        _ => Err("one side is on Ethernet, the other on InfiniBand; use ports of one network".to_owned()),
    }
}

/// Our port, if it is up.
fn active_port(context: &Context, config: &VerbsConfig) -> Result<PortState, String> {
    let VerbsConfig { device, settings: VerbsSettings { port, .. }, .. } = config;
    let state = context.port(*port).map_err(|error| format!("{device} has no port {port}: {error}"))?;
    if state.active { Ok(state) } else { Err(format!("port {port} of {device} is down; bring its link up")) }
}

fn link_of(port: &PortState, config: &VerbsConfig) -> Result<Link, String> {
    if port.infiniband {
        return Ok(Link::InfiniBand { lid: port.lid });
    }
    gid::choose(&gid::port_folder(&config.device, config.settings.port), config.address)
        .map(Link::Roce)
        .map_err(|error| format!("{}: {error}", config.device))
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

    #[test]
    fn routes_exist_within_one_network_only() {
        let gid = Gid { index: 1, address: "10.0.0.1".parse().unwrap() };
        let (roce, infiniband) = (Link::Roce(gid), Link::InfiniBand { lid: 3 });
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let peer = at("10.0.0.2:4791");
        let expected = Ok(Route::Roce { gid_index: 1, peer: peer.ip() });
        assert_eq!(route(roce, PacketAddress::SoftRoce(peer)), expected);
        assert_eq!(route(roce, PacketAddress::Roce(peer)), expected);
        let other_port = route(roce, PacketAddress::SoftRoce(at("10.0.0.2:5000")));
        assert!(other_port.unwrap_err().contains("UDP port 5000"));
        assert_eq!(route(infiniband, PacketAddress::InfiniBand { lid: 4 }), Ok(Route::InfiniBand { lid: 4 }));
        assert!(route(infiniband, PacketAddress::Roce(peer)).is_err());
        assert!(route(roce, PacketAddress::InfiniBand { lid: 4 }).is_err());
    }
}
