//! An endpoint: the only place where sockets, the device and the connections meet.
//!
//! Life of a connection: a TCP link whose [`crate::bootstrap::Bootstrap`] proves both sides (of one that comes to us on
//! the [`Acceptor`]'s thread) and exchanges parameters; a [`Channel`], whose queue pair then carries everything else;
//! the link stays open for liveness. Whatever ends either ends both, in [`Endpoint::on_down`] and nowhere else.

mod acceptor;
mod links;
mod names;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd},
    sync::Arc,
};

use proto::{Span, Timestamp, Wait};
use soft_roce::{
    CompletionOpcode, Counters, MemoryWindows, PathMtu, ProtectionDomain, QueuePairNumber, Status, udp::DriverCounters,
};

use acceptor::Acceptor;
use names::{Names, Peer};

use crate::{
    Access, Address, ConnectionId, DeviceMemory, DisconnectReason, EndpointConfig, Event, Path, PeerName, PostError,
    Region, RegionKey, Release, Secrets, Transfer, Way,
    bootstrap::{HEARTBEAT, Identity, Parameters},
    certificates::Certificates,
    channel::{Channel, Held, READS_POSTED_MAX, SEND_DEPTH, SLOTS},
    device::{
        Device, Soft,
        interface::{Demand, Descriptor, DeviceEvent, Moved, Offer},
    },
    error::{BootstrapError, ChannelError, OpenError},
    limits::{CONNECTIONS_MAX, REGIONS_MAX},
    link::{Link, READ_BYTES},
    poller::{Interest, Poller, Ready, SPIN, Waker},
    reads::Reads,
    resolve::Resolver,
    traffic::{Reporter, Traffic},
};

/// Turns of receiving and sending in one call, so that a flood does not keep the caller from its own work.
const TURNS_MAX: usize = 8;
/// TCP sockets are looked at whenever no packets come, and so often while they do.
const POLL_EVERY: Span = Span::from_micros(100);
/// A wait spins at first if packets came so lately: more than one, as nothing follows a heartbeat.
const LATELY: Span = Span::from_millis(1);

/// Numbers among the links. Connections have their own, from 1.
const ARRIVALS: u64 = u64::MAX - 1;
const NAMES: u64 = u64::MAX - 2;

/// One thread's device with its regions, queue pairs and connections.
pub struct Endpoint {
    device: Device,
    offer: Offer,
    /// What the poller watches each of the device's descriptors for, in their order.
    watched: Vec<(Descriptor, Interest)>,
    poller: Poller,
    acceptor: Option<Acceptor>,
    members: Membership,
    certificates: Option<Certificates>,
    /// Connections to names that are being looked up.
    names: Names,
    connections_refused: u64,
    incarnation: u64,
    name: PeerName,
    reporter: Reporter,
    connections_max: usize,
    has_windows: bool,
    /// Registered by our owner, or for single peers.
    regions: usize,
    next_connection: u64,
    connections: BTreeMap<ConnectionId, Connection>,
    by_queue_pair: BTreeMap<QueuePairNumber, ConnectionId>,
    reads: Reads,
    /// Connections whose channels have something to post, each once.
    due: VecDeque<ConnectionId>,
    /// Connections whose peers give no credit for what is to be sent.
    starved: BTreeSet<ConnectionId>,
    credit_wait: Span,
    /// Whether READs were given since the last look at `reads`.
    reads_due: bool,
    /// Whether the last call of `drive` ended before the packets did.
    unfinished: bool,
    /// Whether it found links that had something to say: there may be more.
    links_due: bool,
    /// What [`Self::wait`] or our owner has seen since then, if it has looked.
    told: Option<Ready>,
    /// Connections that have failed and are to be taken down.
    failed: VecDeque<(ConnectionId, String)>,
    events: VecDeque<Held>,
    /// When bootstraps have deadlines or heartbeats; may be too early.
    bootstraps_at: Timestamp,
    polled_at: Timestamp,
    /// When the last two batches of packets came, the newest last.
    packets_at: [Timestamp; 2],
    ready: Vec<u64>,
    buffer: Box<[u8]>,
}

struct Connection {
    link: Link,
    interest: Interest,
    peer: Peer,
    stage: Stage,
    /// Whether it is in `due`.
    due: bool,
    /// Whether it is ended because the peer gives no credit.
    is_starved: bool,
}

/// By what members know each other.
#[derive(Clone)]
struct Membership {
    secrets: Secrets,
    release: Arc<Release>,
}

impl Membership {
    /// What a connection proves and believes that begins now.
    fn identity(&self) -> Identity {
        Identity { secrets: self.secrets.known(), release: Arc::clone(&self.release) }
    }
}

enum Stage {
    /// Ours, until the server has proved itself.
    Calling { hello: Vec<u8> },
    /// Ours, until the server answers; with the path MTU that we offered.
    Offered { channel: Box<Channel>, path_mtu: PathMtu },
    /// A peer's that has proved itself: our owner has not been told of it, or has refused it.
    Unannounced,
    /// A peer's, until our owner decides.
    Deciding { parameters: Parameters },
    /// For sends, though an accepted one keeps them until the peer is ready.
    Up { channel: Box<Channel>, peer: Parameters },
}

impl Endpoint {
    /// Opens the device and the sockets.
    ///
    /// # Errors
    /// One line that names the address that is taken or not this host's, what the device lacks, the limit that is
    /// reached, or the secret if it is too short.
    pub fn open(config: EndpointConfig) -> Result<Self, OpenError> {
        Self::open_with(config, Resolver::system())
    }

    fn open_with(config: EndpointConfig, resolver: Resolver) -> Result<Self, OpenError> {
        if config.connections_max > CONNECTIONS_MAX {
            return Err(OpenError::ConnectionsMax { found: config.connections_max });
        }
        config.secrets.check()?;
        let certificates = config.tls;
        let poller = Poller::new().map_err(OpenError::Poller)?;
        let demand = Demand {
            queue_pairs_max: config.connections_max,
            regions_max: config.connections_max + REGIONS_MAX,
            send_depth: SEND_DEPTH,
            receive_depth: SLOTS,
            reads_max: READS_POSTED_MAX,
            read_budget_bytes: config.read_budget_bytes,
        };
        let device = Device::open(config.arm, demand)?;
        let members = Membership { secrets: config.secrets, release: Arc::new(config.release) };
        let listen = |at| {
            let opened = Acceptor::open(at, members.clone(), certificates.clone());
            opened.map_err(|cause| OpenError::Listen { at, cause })
        };
        let acceptor = config.listen.map(listen).transpose()?;
        let watched = watched(&poller, &device).map_err(OpenError::Watch)?;
        if let Some(acceptor) = &acceptor {
            poller.links.add(acceptor, ARRIVALS, Interest::Read).map_err(OpenError::Watch)?;
        }
        let names = Names::new(resolver).map_err(OpenError::Poller)?;
        poller.links.add(&names, NAMES, Interest::Read).map_err(OpenError::Watch)?;
        let (offer, has_windows) = (device.offer(), device.soft().is_some() && !config.is_windowless);
        Ok(Self {
            device,
            offer,
            watched,
            poller,
            acceptor,
            members,
            certificates,
            names,
            connections_refused: 0,
            incarnation: rand::random(),
            name: config.name,
            reporter: Reporter::open(),
            connections_max: config.connections_max,
            has_windows,
            regions: 0,
            next_connection: 1,
            connections: BTreeMap::new(),
            by_queue_pair: BTreeMap::new(),
            reads: Reads::new(offer.read_budget_bytes, offer.read_bytes_max),
            due: VecDeque::new(),
            starved: BTreeSet::new(),
            credit_wait: config.credit_wait,
            reads_due: false,
            unfinished: false,
            links_due: false,
            told: None,
            failed: VecDeque::new(),
            events: VecDeque::new(),
            bootstraps_at: Timestamp::NEVER,
            polled_at: Timestamp::PAST,
            packets_at: [Timestamp::PAST; 2],
            ready: Vec::new(),
            buffer: vec![0; READ_BYTES].into(),
        })
    }

    /// Where peers reach our bootstrap listener.
    #[must_use]
    pub fn listen_address(&self) -> Option<SocketAddr> {
        Some(self.acceptor.as_ref()?.address)
    }

    /// The UDP address where our packets come from and arrive; none on InfiniBand.
    #[must_use]
    pub fn packet_address(&self) -> Option<SocketAddr> {
        self.device.address().udp()
    }

    /// A random number that peers know this opening of the endpoint by.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The peer's incarnation, once its parameters are known.
    #[must_use]
    pub fn peer_incarnation(&self, connection: ConnectionId) -> Option<u64> {
        match &self.connections.get(&connection)?.stage {
            Stage::Deciding { parameters: peer } | Stage::Up { peer, .. } => Some(peer.incarnation),
            _ => None,
        }
    }

    /// The way that packets take to a peer, once its parameters are known.
    #[must_use]
    pub fn path(&self, connection: ConnectionId) -> Option<Path> {
        match &self.connections.get(&connection)?.stage {
            Stage::Deciding { parameters: peer } => Some(Path::to(peer.address)),
            Stage::Up { channel, peer } => Some(self.path_of(channel, peer)),
            _ => None,
        }
    }

    fn path_of(&self, channel: &Channel, peer: &Parameters) -> Path {
        if self.device.has_ring(channel.number()) { Path::ring(peer.address) } else { Path::to(peer.address) }
    }

    /// What the soft arm's queue pairs have seen. A verbs device has counters of its own, for all that use it.
    #[must_use]
    pub fn counters(&self) -> Option<Counters> {
        Some(self.device.soft()?.counters())
    }

    /// What the soft arm's UDP driver has done.
    #[must_use]
    pub fn driver_counters(&self) -> Option<DriverCounters> {
        Some(self.device.soft()?.driver_counters())
    }

    /// Connections that ended before our owner was told of them, mostly as their peer did not prove itself.
    #[must_use]
    pub fn connections_refused(&self) -> u64 {
        self.connections_refused + self.acceptor.as_ref().map_or(0, Acceptor::refused)
    }

    /// Registers a region, for as long as this endpoint lives.
    ///
    /// # Errors
    /// One line that names the limit of ours or of the system that is reached.
    pub fn register(&mut self, region: &Region, access: Access) -> Result<RegionKey, OpenError> {
        if self.regions == REGIONS_MAX {
            return Err(OpenError::RegionsMax);
        }
        let key = self.device.register(region, access, ProtectionDomain::default());
        let key = key.map_err(|cause| OpenError::Register { bytes: region.len(), cause })?;
        self.regions += 1;
        Ok(key)
    }

    /// Whether parts of regions can be opened by keys of their own, without a word to peers: over soft-RoCE. On a verbs
    /// device each window that is bound or unbound is a work request of a queue pair; there a region can be opened to
    /// one peer as a whole ([`Self::accept_opening`]).
    #[must_use]
    pub fn has_windows(&self) -> bool {
        self.has_windows
    }

    /// To open parts of a region, which need not be open itself; nothing where there are no windows.
    #[must_use]
    pub fn windows(&self, key: &RegionKey) -> Option<MemoryWindows> {
        self.device.windows(key.lkey).filter(|_| self.has_windows)
    }

    /// Registers memory of another device's, for READs to land there: by its dma-buf if it has one and the RDMA device
    /// takes it, else by its address, for which `nvidia-peermem` must be loaded. For as long as this endpoint lives,
    /// which keeps it. Yields its local key, and the way.
    ///
    /// # Errors
    /// One line that names what is missing; soft-RoCE, for one, has no way there.
    pub fn register_device_memory(&mut self, memory: &DeviceMemory) -> Result<(u32, Way), OpenError> {
        if self.regions == REGIONS_MAX {
            return Err(OpenError::RegionsMax);
        }
        let registered = self.device.register_device_memory(memory);
        let registered = registered.map_err(|cause| OpenError::Register { bytes: memory.len(), cause })?;
        self.regions += 1;
        Ok(registered)
    }

    /// Opens a connection; the outcome comes as `Connected` or `Disconnected`. A name is looked up first, on another
    /// thread. `hello`: at most `HELLO_BYTES_MAX` bytes.
    pub fn connect(&mut self, now: Timestamp, to: impl Into<Address>, hello: Vec<u8>) -> ConnectionId {
        let (id, to) = (ConnectionId(self.next_connection), to.into());
        self.next_connection += 1;
        match to.ip() {
            Some(at) => self.connect_to(now, id, Peer::at(at), hello),
            None => {
                self.names.look_up(now, id, to, hello);
                self.bootstraps_at = self.bootstraps_at.min(self.names.poll_timeout());
            }
        }
        id
    }

    /// Accepts an incoming connection. If it has ended meanwhile, its `Disconnected` says so. `welcome`: at most
    /// `HELLO_BYTES_MAX` bytes.
    pub fn accept(&mut self, now: Timestamp, connection: ConnectionId, welcome: Vec<u8>) {
        self.accept_with(now, connection, |device| Ok((Channel::create(device, connection)?, welcome)));
    }

    /// The same, and opens a region to this peer alone, over this connection: by a key of its own, of which `welcome`
    /// is made, until the connection ends. If there is no room for one more registration, the connection ends with that
    /// reason, which both sides are told.
    pub fn accept_opening(
        &mut self,
        now: Timestamp,
        connection: ConnectionId,
        (region, access): (&Region, Access),
        welcome: impl FnOnce(RegionKey) -> Vec<u8>,
    ) {
        if self.regions >= REGIONS_MAX {
            self.failed.push_back((connection, BootstrapError::RegionsMax.to_string()));
            return;
        }
        self.accept_with(now, connection, |device| {
            let (channel, key) = Channel::create_opening(device, connection, region, access)?;
            Ok((channel, welcome(key)))
        });
    }

    fn accept_with(
        &mut self,
        now: Timestamp,
        connection: ConnectionId,
        create: impl FnOnce(&mut Device) -> Result<(Channel, Vec<u8>), ChannelError>,
    ) {
        if let Err(reason) = self.try_accept(now, connection, create) {
            self.failed.push_back((connection, reason.to_string()));
        }
        self.on_link(now, connection);
    }

    /// Refuses an incoming connection; the peer is told why. No `Disconnected` follows.
    pub fn refuse(&mut self, now: Timestamp, connection: ConnectionId, reason: &str) {
        if let Some(refused) = self.connections.get_mut(&connection)
            && let Stage::Deciding { .. } = refused.stage
        {
            refused.stage = Stage::Unannounced;
            refused.link.bootstrap.close(reason);
        }
        self.on_link(now, connection);
    }

    /// Moves the queue pair to ERROR at once: when this returns, nothing that the peer sends touches our memory any
    /// more (fencing). Outstanding transfers are reported as `Flushed`, then `Disconnected`.
    pub fn disconnect(&mut self, connection: ConnectionId) {
        self.on_down(connection, "we disconnected", "it disconnected");
    }

    /// Sends a frame of at most `proto::frame::FRAME_BYTES_MAX` bytes, in order. Waits for credits in a bounded queue.
    /// It leaves with the next [`Self::drive`] or [`Self::wait`].
    ///
    /// # Errors
    /// `NotConnected`, or `QueueFull` when 512 KiB or 1,024 frames and WRITEs wait or are not acknowledged.
    ///
    /// # Panics
    /// If the frame is too large.
    pub fn send(&mut self, connection: ConnectionId, frame: &[u8]) -> Result<(), PostError> {
        channel_of(&mut self.connections, connection)?.send(frame)?;
        self.mark_due(connection);
        Ok(())
    }

    /// Pulls a peer's memory into ours. Waits for the READ budget in a bounded queue.
    ///
    /// # Errors
    /// `NotConnected`, or `QueueFull` when 4,096 READs of this connection wait.
    pub fn read(&mut self, connection: ConnectionId, transfer: Transfer) -> Result<(), PostError> {
        self.reads.post(connection, transfer)?;
        self.reads_due = true;
        Ok(())
    }

    /// Pushes our memory into a peer's and tells it `immediate`. In order with frames, and bounded with them.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn write_with_immediate(
        &mut self,
        connection: ConnectionId,
        transfer: Transfer,
        immediate: u32,
    ) -> Result<(), PostError> {
        channel_of(&mut self.connections, connection)?.write(transfer, immediate)?;
        self.mark_due(connection);
        Ok(())
    }

    /// Moves packets: receives, runs timers, sends. Never blocks. True if anything was done; call it again then, or
    /// [`Self::wait`], which sees what is left.
    ///
    /// A thread that does not come here (or to [`Self::wait`]) for a second or two is taken for stalled by its peers,
    /// and loses its connections: do long work elsewhere.
    pub fn drive(&mut self, now: Timestamp) -> bool {
        // What is told is not asked for again, unless somebody is about to be given up, or something to be sent again.
        let told = self.told.take().filter(|_| now < self.bootstraps_at && self.starved.is_empty());
        let is_due = self.device.poll_timeout().is_some_and(|at| at <= now);
        let looks = told.is_none_or(|ready| ready.packets) || is_due || self.device.soft().is_none();
        let mut progressed = false;
        for turn in 1..=TURNS_MAX {
            let moved = self.move_packets(now, looks, turn == TURNS_MAX);
            progressed |= moved.any;
            self.unfinished = moved.more;
            if !moved.more {
                break;
            }
        }
        let is_time = !progressed || now - self.polled_at >= POLL_EVERY;
        if told.map_or(is_time, |ready| ready.packets) {
            progressed |= self.poll_device();
        }
        if self.links_due || told.map_or(is_time, |ready| ready.links) {
            self.polled_at = now;
            self.links_due = self.poll_links(now);
            progressed |= self.links_due;
        }
        self.run_bootstrap_timers(now);
        self.end_starved(now);
        self.take_down_failed();
        if self.reporter.is_due(now) {
            self.reporter.leave(now, self.seen(self.reporter.gone()));
        }
        self.flush(now);
        // The soft arm's peers need not wake us before we sleep.
        if !progressed && self.device.soft().is_none() && self.device.request_notification() {
            self.unfinished = true;
            return true;
        }
        progressed
    }

    /// Sends what was given since the last call of [`Self::drive`], and looks for nothing that has come.
    pub fn flush(&mut self, now: Timestamp) {
        self.post(now);
        self.unfinished |= self.device.transmit(now).more;
        self.take_down_failed();
        self.watch_device();
    }

    /// What the next [`Self::drive`] has to look at, from an owner that waits for [`Self::descriptors`] itself and has
    /// seen which of them have got ready since the last call.
    pub fn handle_ready(&mut self, ready: Ready) {
        self.told = Some(ready);
    }

    /// Of packets, and of links, for the event loop of another library: after [`Self::lie_down`], each is readable when
    /// [`Self::drive`] has something to do (they are epoll instances).
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.poller.packets.as_fd(), self.poller.links.as_fd()]
    }

    /// Before an owner waits for [`Self::descriptors`]: from now on they tell of all that comes. False if something has
    /// come already: then it must not wait.
    pub fn lie_down(&mut self) -> bool {
        if self.device.request_notification() {
            self.unfinished = true;
        }
        !self.unfinished
    }

    /// What happened since. A frame's or immediate's receive is the peer's again once it has been taken here, so a slow
    /// caller slows its peers down.
    pub fn poll_event(&mut self) -> Option<Event> {
        let (event, slot) = self.events.pop_front()?;
        if let (Event::Message { connection, .. } | Event::Immediate { connection, .. }, Some(slot)) = (&event, slot)
            && let Ok(channel) = channel_of(&mut self.connections, *connection)
        {
            match channel.handle_taken(&mut self.device, slot) {
                Ok(()) if channel.is_due() => self.mark_due(*connection),
                Ok(()) => {}
                Err(reason) => self.failed.push_back((*connection, reason.to_string())),
            }
        }
        Some(event)
    }

    /// When [`Self::drive`] must run again even if no packet comes; `PAST` if at once.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        if self.is_pending() {
            return Some(Timestamp::PAST);
        }
        let starved_until = self.starved.iter().filter_map(|&id| self.starved_until(id)).min();
        let starved_until = starved_until.unwrap_or(Timestamp::NEVER);
        let at = self.device.poll_timeout().unwrap_or(Timestamp::NEVER).min(self.bootstraps_at).min(starved_until);
        Some(at).filter(|&at| at < Timestamp::NEVER)
    }

    /// Whether [`Self::drive`] has something to do even if nothing comes.
    fn is_pending(&self) -> bool {
        self.unfinished || self.links_due || self.reads_due || !self.due.is_empty() || !self.failed.is_empty()
    }

    /// Sends what waits, then sleeps until a packet or connection comes, a timer is due, or until `until`. Returns at
    /// once while there are events to take. With [`Self::waker`] another thread can end it.
    pub fn wait(&mut self, now: Timestamp, until: Timestamp) {
        self.flush(now);
        if !self.events.is_empty() {
            return;
        }
        // A verbs device tells of what comes after it was asked to. The soft arm's peers wake us by a system call each,
        // which they are asked for when we sleep.
        if self.device.soft().is_none() && !self.lie_down() || self.is_pending() {
            return;
        }
        let until = until.min(self.poll_timeout().unwrap_or(Timestamp::NEVER)).max(now);
        let (time, is_lately) = ((until - now).to_duration(), now - self.packets_at[0] < LATELY);
        let has_come = || self.device.soft().is_some_and(Soft::has_come);
        let seen = is_lately.then(|| self.poller.stay_awake(time, has_come)).flatten();
        self.told = match seen {
            Some(ready) => Some(ready),
            None if self.lie_down() => {
                Some(self.poller.sleep(if is_lately { time.saturating_sub(SPIN) } else { time }))
            }
            None => None,
        };
    }

    /// Ends a `wait` from another thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.poller.waker()
    }

    // Packets.

    /// Receives a batch, unless it is known that there is none, then sends what there is to send. Timers run once
    /// nothing more is there to be received, or in the `last` turn: if we were away for a while, the answer that a
    /// timer misses may lie in the socket.
    fn move_packets(&mut self, now: Timestamp, looks: bool, last: bool) -> Moved {
        let received = if looks { self.receive(now) } else { Moved::default() };
        if (last || !received.more) && self.device.is_timer_due(now) {
            self.device.handle_timeout(now);
            self.handle_completions();
        }
        self.post(now);
        let sent = self.device.transmit(now);
        // Last, so that a refusal (a NAK) is on its way before the queue pair that refused is gone.
        self.take_down_failed();
        Moved { any: received.any || sent.any, more: received.more || sent.more }
    }

    /// Takes in one batch of packets and what it completes.
    fn receive(&mut self, now: Timestamp) -> Moved {
        let received = self.device.receive(now);
        if received.any {
            self.packets_at = [self.packets_at[1], now];
        }
        self.handle_completions();
        received
    }

    /// Hears what a device tells by its descriptors; those of soft-RoCE tell of packets only. True if anything was
    /// told.
    fn poll_device(&mut self) -> bool {
        if self.device.soft().is_some() {
            return false;
        }
        let mut ready = std::mem::take(&mut self.ready);
        self.poller.packets.poll(&mut ready);
        let mut is_told = false;
        for &number in &ready {
            if number == number_of(Descriptor::Events) {
                is_told = true;
                self.device.handle_ready(Descriptor::Events);
                self.handle_device_events();
            } else {
                self.device.handle_ready(Descriptor::Data);
            }
        }
        self.ready = ready;
        is_told
    }

    fn handle_completions(&mut self) {
        while let Some(completion) = self.device.poll_completion() {
            let Some(&id) = self.by_queue_pair.get(&completion.queue_pair) else { continue };
            let Ok(channel) = channel_of(&mut self.connections, id) else { continue };
            match completion.opcode {
                CompletionOpcode::Recv | CompletionOpcode::RecvWriteWithImmediate => {
                    match channel.handle_received(&mut self.device, &completion) {
                        Ok(held) => self.events.extend(held),
                        Err(reason) => self.failed.push_back((id, reason.to_string())),
                    }
                }
                _ => {
                    let event = channel.handle_sent(&completion, &mut self.reads);
                    self.events.extend(event.map(|event| (event, None)));
                    self.reads_due = true;
                }
            }
            if completion.status != Status::Success {
                self.failed.push_back((id, failure(completion.status)));
            }
            self.mark_due(id);
        }
    }

    /// Posts what waits and may go.
    fn post(&mut self, now: Timestamp) {
        while let Some(id) = self.due.pop_front() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.due = false;
            let Stage::Up { channel, .. } = &mut connection.stage else { continue };
            if let Err(reason) = channel.post(now, &mut self.device) {
                self.failed.push_back((id, reason.to_string()));
            }
            match channel.starved_since() {
                Some(_) => self.starved.insert(id),
                None => self.starved.remove(&id),
            };
        }
        self.reads_due = false;
        while let Some((id, piece)) = self.reads.poll_piece() {
            if let Ok(channel) = channel_of(&mut self.connections, id)
                && let Err(reason) = channel.post_read(&mut self.device, piece)
            {
                self.failed.push_back((id, reason.to_string()));
            }
        }
        self.device.ring();
        self.handle_device_events();
    }

    /// What the device tells of itself ends connections; their owners open them again.
    fn handle_device_events(&mut self) {
        while let Some(event) = self.device.poll_event() {
            match event {
                DeviceEvent::QueuePairFailed { number, reason } => {
                    self.failed.extend(self.by_queue_pair.get(&number).map(|&id| (id, reason)));
                }
                DeviceEvent::Lost { reason } => self.on_device_lost(reason),
                DeviceEvent::OpenedAgain { changed } => {
                    tracing::info!("the device is there again");
                    self.watched = watched(&self.poller, &self.device).unwrap_or_else(|error| {
                        tracing::error!("cannot watch the device: {error}; restart this process");
                        Vec::new()
                    });
                    self.events
                        .extend(changed.into_iter().map(|(lkey, rkey)| (Event::KeyChanged { lkey, rkey }, None)));
                }
            }
        }
    }

    fn on_device_lost(&mut self, reason: String) {
        tracing::warn!("all connections end: {reason}");
        let ids: Vec<_> = self.by_queue_pair.values().copied().collect();
        ids.into_iter().for_each(|id| self.on_down(id, &reason, &reason));
        // What comes up again is another life, by which peers tell what is of the old one.
        self.incarnation = rand::random();
        for (_, fd, _) in self.device.descriptors() {
            // Closing them would do, but a driver that fails may leave them open.
            let _ = self.poller.packets.remove(fd);
        }
        self.device.let_go(reason);
    }

    /// A peer whose process lives and takes nothing in is lost. If we were away for a while, its credits may still lie
    /// in the socket.
    fn end_starved(&mut self, now: Timestamp) {
        if self.unfinished {
            return;
        }
        let is_over = |id: &ConnectionId| self.starved_until(*id).is_some_and(|until| until <= now);
        for id in self.starved.iter().copied().filter(is_over).collect::<Vec<_>>() {
            Wait::Credit.note_reached();
            let wait = self.credit_wait;
            self.connections.entry(id).and_modify(|connection| connection.is_starved = true);
            self.failed.push_back((id, format!("the peer takes nothing in: no credit for {wait}, is it stalled?")));
        }
    }

    /// When a peer that gives no credit is lost; `None` as long as it may be stalled as a whole, which its silence
    /// tells: whoever still says something has had its turn since.
    fn starved_until(&self, id: ConnectionId) -> Option<Timestamp> {
        let Connection { stage: Stage::Up { channel, .. }, link, .. } = self.connections.get(&id)? else { return None };
        let since = channel.starved_since()?;
        (link.bootstrap.heard_at() > since + HEARTBEAT).then(|| since + self.credit_wait)
    }

    /// Adds what was seen of the network to what it was at connections that are gone.
    fn seen(&self, mut traffic: Traffic) -> Traffic {
        let soft = self.device.soft();
        if let Some(soft) = soft {
            (traffic.counters, traffic.driver) = (soft.counters(), soft.driver_counters());
        }
        traffic.devices.extend(self.device.verbs_name().map(str::to_owned));
        for connection in self.connections.values() {
            let Stage::Up { channel, peer } = &connection.stage else { continue };
            let seen = traffic.peer(&called(connection, peer));
            seen.path = Some(self.path_of(channel, peer));
            if let Some(counters) = soft.and_then(|soft| soft.counters_of(channel.number())) {
                seen.counters.add(counters);
            }
        }
        traffic
    }

    fn take_down_failed(&mut self) {
        while let Some((id, reason)) = self.failed.pop_front() {
            self.on_down(id, &reason, &reason);
        }
    }

    fn mark_due(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id)
            && !connection.due
        {
            connection.due = true;
            self.due.push_back(id);
        }
    }

    /// Has the poller watch the device's descriptors for what they are to be watched for now.
    fn watch_device(&mut self) {
        for ((descriptor, fd, wanted), (_, watched)) in self.device.descriptors().zip(&mut self.watched) {
            if wanted != *watched && self.poller.packets.modify(fd, number_of(descriptor), wanted).is_ok() {
                *watched = wanted;
            }
        }
    }

    /// The end of a connection: fences it, tells the peer, reports what was under way, and lets go of everything.
    fn on_down(&mut self, id: ConnectionId, reason: &str, told: &str) {
        if let Some(name) = self.names.give_up(id) {
            let reason = DisconnectReason::new(format!("{name}: {reason}"));
            self.events.push_back((Event::Disconnected { connection: id, reason }, None));
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Stage::Up { channel, peer } = &connection.stage {
            self.device.modify_to_error(channel.number());
            if let Some(counters) = self.device.soft().and_then(|soft| soft.counters_of(channel.number())) {
                self.reporter.handle_gone(&called(connection, peer), counters);
            }
            // What had ended before the fence is reported as it ended, the rest as flushed.
            self.handle_completions();
        }
        let Some(mut connection) = self.connections.remove(&id) else { return };
        self.starved.remove(&id);
        connection.link.bootstrap.close(told);
        connection.link.transmit();
        match connection.stage {
            Stage::Up { channel, .. } | Stage::Offered { channel, .. } => {
                self.by_queue_pair.remove(&channel.number());
                self.regions -= usize::from(channel.has_opening());
                let flushed = channel.close(&mut self.device, &mut self.reads);
                self.events.extend(flushed.into_iter().map(|event| (event, None)));
            }
            Stage::Unannounced => {
                self.connections_refused += 1;
                tracing::warn!(peer = %connection.peer, "refused a connection: {reason}");
                return;
            }
            Stage::Calling { .. } | Stage::Deciding { .. } => {}
        }
        let (text, is_starved) = (format!("{}: {reason}", connection.peer), connection.is_starved);
        let reason = DisconnectReason { text, is_starved };
        self.events.push_back((Event::Disconnected { connection: id, reason }, None));
    }
}

impl Drop for Endpoint {
    /// What it has seen stays counted.
    fn drop(&mut self) {
        self.reporter.end(self.seen(self.reporter.gone()));
    }
}

/// Has the poller watch a device that has just been opened.
fn watched(poller: &Poller, device: &Device) -> io::Result<Vec<(Descriptor, Interest)>> {
    let watch = |(descriptor, fd, interest)| {
        poller.packets.add(fd, number_of(descriptor), interest)?;
        Ok((descriptor, interest))
    };
    device.descriptors().map(watch).collect()
}

/// What operators call a peer: as it says itself, or by its address.
fn called(connection: &Connection, peer: &Parameters) -> String {
    peer.name.shown().map_or_else(|| connection.peer.at.ip().to_string(), str::to_owned)
}

/// A descriptor's number in the poller.
fn number_of(descriptor: Descriptor) -> u64 {
    match descriptor {
        Descriptor::Data => 0,
        Descriptor::Events => 1,
    }
}

fn channel_of(
    connections: &mut BTreeMap<ConnectionId, Connection>,
    id: ConnectionId,
) -> Result<&mut Channel, PostError> {
    match connections.get_mut(&id) {
        Some(Connection { stage: Stage::Up { channel, .. }, .. }) => Ok(channel),
        _ => Err(PostError::NotConnected),
    }
}

/// Why a connection whose queue pair reports this is over.
fn failure(status: Status) -> String {
    match status {
        Status::RetryExceeded => {
            "the peer stopped acknowledging: is its process stalled, or does a firewall drop UDP between us?".to_owned()
        }
        Status::RemoteAccess => "the peer refused the address or key of a READ or WRITE".to_owned(),
        Status::Flushed => {
            "the queue pair went to ERROR: the peer asked for something that it may not do, or sent too much".to_owned()
        }
        status => format!("a work request failed: {status:?}"),
    }
}
