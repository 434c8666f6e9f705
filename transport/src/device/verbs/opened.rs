//! What there is of a device while it is opened: its objects, each of which ends before what it is made of.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use soft_roce::{PathMtu, ProtectionDomain, Psn, QueuePairNumber, RecvRequest, SendRequest};

use super::{
    Link, attributes, link_of,
    memory::Memory,
    partition, route,
    sys::{
        self, AsyncEvent, CompletionChannel, CompletionQueue, Context, Depths, MemoryRegion, PortState, WorkCompletion,
    },
};
use crate::{
    Access, VerbsConfig, VerbsSettings,
    bootstrap::Parameters,
    device::interface::{Demand, Offer},
    device_memory::{DeviceMemory, Way},
    error::{ConnectQueuePairError, PortError, RegisterError, VerbsOpenError},
};

/// READs outstanding, unless configured: the bandwidth-delay product of 100 Gbit/s and 20 us, and some inputs.
const READ_BUDGET_BYTES: usize = 1024 * 1024;
/// What a soft peer may have in flight towards us: what it can send within a round trip.
const PEER_WINDOW_BYTES: u32 = 256 * 1024;
/// SENDs of at most so many bytes are copied when they are posted, where the device can.
const INLINE_BYTES: u32 = 256;

/// An opened device. Its fields are dropped in this order.
pub(super) struct Opened {
    queue_pairs: BTreeMap<QueuePairNumber, QueuePair>,
    /// By the keys that their owners know.
    regions: BTreeMap<u32, MemoryRegion>,
    /// As few as hold the completions of all queue pairs.
    queues: Vec<Arc<CompletionQueue>>,
    channel: Arc<CompletionChannel>,
    /// The default one, and those of single queue pairs.
    domains: BTreeMap<ProtectionDomain, Arc<sys::ProtectionDomain>>,
    context: Arc<Context>,
    pub(super) link: Link,
    /// Of the port's table.
    partition_index: u16,
    pub(super) offer: Offer,
    pub(super) message_bytes_max: u32,
    config: VerbsConfig,
    demand: Demand,
    /// Queue pairs that a completion queue has room for.
    queue_pairs_per_queue: usize,
    /// Whether the channel will tell of the next completion, or has told.
    notifying: bool,
}

struct QueuePair {
    pair: sys::QueuePair,
    sends: Vec<SendRequest>,
    receives: Vec<RecvRequest>,
}

impl Opened {
    pub(super) fn open(config: &VerbsConfig, demand: Demand) -> Result<Self, VerbsOpenError> {
        let name = &config.device;
        let failed = |what: &'static str| move |cause: io::Error| VerbsOpenError::Object { what, cause };
        let context = Context::open(name)?;
        let port = active_port(&context, config)?;
        let link = link_of(&port, config)?;
        let partition_index = partition::index(config)?;
        let limits = context.limits().map_err(failed("its limits cannot be read"))?;
        if limits.reads_max == 0 || limits.reads_answered_max == 0 {
            return Err(VerbsOpenError::NoReads { device: name.clone() });
        }
        let needed = demand.send_depth + demand.receive_depth;
        let (requests, completions) = (limits.queue_pair_requests_max, limits.completions_max);
        if requests < demand.send_depth || completions < needed {
            return Err(VerbsOpenError::TooSmall { device: name.clone(), requests, completions, needed });
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
        let domain = sys::ProtectionDomain::new(&context).map_err(failed("no protection domain"))?;
        Ok(Self {
            queue_pairs: BTreeMap::new(),
            regions: BTreeMap::new(),
            queues: Vec::new(),
            channel: CompletionChannel::new(&context).map_err(failed("no completion channel"))?,
            domains: BTreeMap::from([(ProtectionDomain::default(), domain)]),
            context,
            link,
            partition_index,
            offer,
            message_bytes_max: port.message_bytes_max,
            config: config.clone(),
            demand,
            queue_pairs_per_queue: (completions / needed).min(demand.queue_pairs_max.max(1)),
            notifying: false,
        })
    }

    /// Whether the device is still that of this host which we have opened.
    pub(super) fn is_there(&self) -> bool {
        self.context.is_there()
    }

    /// Told of completions, and of the device itself.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.channel.as_fd(), self.context.as_fd()]
    }

    pub(super) fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.context.poll_async_event()
    }

    /// What our port is on now.
    pub(super) fn look(&self) -> Result<Link, PortError> {
        link_of(&active_port(&self.context, &self.config)?, &self.config)
    }

    /// Begins a protection domain under this number.
    pub(super) fn open_domain(&mut self, number: ProtectionDomain) -> Result<(), RegisterError> {
        let opened = sys::ProtectionDomain::new(&self.context)
            .map_err(|cause| RegisterError::Domain { device: self.config.device.clone(), cause })?;
        self.domains.insert(number, opened);
        Ok(())
    }

    /// What was of it has ended.
    pub(super) fn close_domain(&mut self, number: ProtectionDomain) {
        self.domains.remove(&number);
    }

    fn domain(&self, number: ProtectionDomain) -> &Arc<sys::ProtectionDomain> {
        self.domains.get(&number).expect("a channel's protection domain stays as long as the channel")
    }

    /// Registers a region under `lkey`; its remote key, which is none that it had in an earlier life of the device.
    pub(super) fn register(
        &mut self,
        lkey: u32,
        memory: &Memory,
        (access, domain): (Access, ProtectionDomain),
        before: Option<u32>,
    ) -> Result<u32, RegisterError> {
        let domain = self.domain(domain);
        let register = || match memory {
            Memory::Host(_) => MemoryRegion::register(domain, memory, access)
                .map_err(|cause| RegisterError::Verbs { device: self.config.device.clone(), cause }),
            Memory::Device(device) => self.register_device(domain, device, memory, access),
        };
        let first = register()?;
        // A device that came back may begin to count again. Two registrations at once have different keys.
        let registered = if Some(first.rkey()) == before { register()? } else { first };
        let rkey = registered.rkey();
        self.regions.insert(lkey, registered);
        Ok(rkey)
    }

    /// The dma-buf is the kernel's own way; the address takes a module of NVIDIA's that tells the RDMA device's driver
    /// what is there.
    fn register_device(
        &self,
        domain: &Arc<sys::ProtectionDomain>,
        device: &DeviceMemory,
        memory: &Memory,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        let dma_buf = match device.dma_buf() {
            Some(dma_buf) => match MemoryRegion::register_dma_buf(domain, memory, dma_buf, access) {
                Ok(registered) => return Ok(registered),
                Err(error) => error.to_string(),
            },
            None => "it is handed over as none".to_owned(),
        };
        MemoryRegion::register(domain, memory, access).map_err(|address| {
            let device = self.config.device.clone();
            RegisterError::NoWay { device, dma_buf, address }
        })
    }

    /// How memory was registered.
    pub(super) fn way(&self, lkey: u32) -> Way {
        self.regions.get(&lkey).map_or(Way::Address, MemoryRegion::way)
    }

    pub(super) fn deregister(&mut self, lkey: u32) {
        self.regions.remove(&lkey);
    }

    /// What the port carries now. Both ends of a route may carry more than what is between them: that is the
    /// operator's to see to, as no packet of a verbs device is ever split.
    pub(super) fn path_mtu(&self) -> Result<PathMtu, PortError> {
        let port = active_port(&self.context, &self.config)?;
        // IBTA 14.2.5.6: 1 is 256 bytes, each further code is twice as much.
        let mtus = [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];
        let at = (port.active_mtu as usize).clamp(1, mtus.len());
        Ok(mtus[at - 1])
    }

    pub(super) fn create_queue_pair(&mut self, domain: ProtectionDomain) -> io::Result<QueuePairNumber> {
        let queue = self.queue_with_room()?;
        let depths =
            |inline_bytes| Depths { send: self.demand.send_depth, receive: self.demand.receive_depth, inline_bytes };
        // A device that copies no SENDs, or no such long ones, refuses the queue pair.
        let domain = self.domain(domain);
        let pair = sys::QueuePair::new(domain, &queue, depths(INLINE_BYTES))
            .or_else(|_| sys::QueuePair::new(domain, &queue, depths(0)))?;
        pair.modify(attributes::initialised_mask(), |to| {
            attributes::initialised(to, &self.config.settings, self.partition_index);
        })?;
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
        if self.notifying {
            queue.request_notification();
        }
        self.queues.push(Arc::clone(&queue));
        Ok(queue)
    }

    pub(super) fn connect_queue_pair(
        &mut self,
        number: QueuePairNumber,
        psn: Psn,
        peer: &Parameters,
        path_mtu: PathMtu,
    ) -> Result<(), ConnectQueuePairError> {
        let route = route(self.link, peer.address)?;
        self.ring(number).map_err(ConnectQueuePairError::Receives)?;
        let pair = &self.queue_pairs.get(&number).expect("a channel connects its own queue pair, once").pair;
        let (settings, offer) = (&self.config.settings, &self.offer);
        pair.modify(attributes::ready_to_receive_mask(), |to| {
            attributes::ready_to_receive(to, settings, offer, (route, path_mtu), peer);
        })
        .and_then(|()| {
            pair.modify(attributes::ready_to_send_mask(), |to| {
                attributes::ready_to_send(to, settings, offer, psn, peer);
            })
        })
        .map_err(|cause| {
            let (device, peer) = (self.config.device.clone(), peer.address.to_string());
            ConnectQueuePairError::Verbs { device, peer, cause }
        })
    }

    /// Takes a send in for the next [`Self::ring`]; true if it is the first that waits.
    pub(super) fn post_send(&mut self, number: QueuePairNumber, request: SendRequest) -> bool {
        let (entry, is_first) = self.posting(number);
        entry.sends.push(request);
        is_first
    }

    /// Takes a receive in, as [`Self::post_send`].
    pub(super) fn post_recv(&mut self, number: QueuePairNumber, request: RecvRequest) -> bool {
        let (entry, is_first) = self.posting(number);
        entry.receives.push(request);
        is_first
    }

    fn posting(&mut self, number: QueuePairNumber) -> (&mut QueuePair, bool) {
        let entry = self.queue_pairs.get_mut(&number).expect("a channel posts to its own queue pair");
        let is_first = entry.sends.is_empty() && entry.receives.is_empty();
        (entry, is_first)
    }

    /// Hands what a queue pair gathered to the device: receives first, since the sends tell the peer of them.
    pub(super) fn ring(&mut self, number: QueuePairNumber) -> io::Result<()> {
        let Some(entry) = self.queue_pairs.get_mut(&number) else { return Ok(()) };
        let region = |lkey| self.regions.get(&lkey);
        entry.pair.post_receives(&entry.receives, region)?;
        entry.receives.clear();
        entry.pair.post_sends(&entry.sends, region)?;
        entry.sends.clear();
        Ok(())
    }

    /// Hands over all completions.
    pub(super) fn poll_queues(&self, mut take: impl FnMut(WorkCompletion)) {
        for queue in &self.queues {
            while queue.poll(&mut take) {}
        }
    }

    /// Has the channel tell of the next completion; false if it will, or has, already. What came before is not told.
    pub(super) fn request_notification(&mut self) -> bool {
        let asks = !self.notifying;
        if asks {
            self.queues.iter().for_each(|queue| queue.request_notification());
            self.notifying = true;
        }
        asks
    }

    /// Takes in what the channel has told.
    pub(super) fn drain(&mut self) {
        self.notifying &= !self.channel.drain();
    }

    pub(super) fn modify_to_error(&mut self, number: QueuePairNumber) -> io::Result<()> {
        self.queue_pairs.get(&number).map_or(Ok(()), |entry| entry.pair.modify_to_error())
    }

    pub(super) fn destroy_queue_pair(&mut self, number: QueuePairNumber) {
        self.queue_pairs.remove(&number);
    }
}

/// Our port, if it is up.
fn active_port(context: &Context, config: &VerbsConfig) -> Result<PortState, PortError> {
    let VerbsConfig { device, settings: VerbsSettings { port, .. }, .. } = config;
    let (device, port) = (device.clone(), *port);
    match context.port(port) {
        Ok(state) if state.active => Ok(state),
        Ok(_) => Err(PortError::Down { device, port }),
        Err(cause) => Err(PortError::Missing { device, port, cause }),
    }
}
