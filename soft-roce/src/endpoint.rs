//! One UDP address: its regions, queue pairs and completions. The whole public interface of the core.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    ops::Bound,
    sync::Arc,
};

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use crate::{
    completion::{Completion, CompletionQueue, Notify},
    config::{
        EndpointConfig, Peer, QueuePairConfig, SharedReceiveQueueConfig, SharedReceiveQueueNumber, in_range,
        max_sge_limit,
    },
    context::Context,
    counters::Counters,
    datagram::DatagramQueuePair,
    error::{CreateError, ModifyError, RegisterError},
    events::{AsyncEvent, EventQueue},
    limits::{DEPTH_MAX, SHARED_RECEIVE_QUEUES_MAX},
    memory::{Memory, ProtectionDomain, RegionConfig, RegionHandle},
    queue_pair::QueuePair,
    region::RegionTable,
    segmentation_batch::Transmit,
    shared_receive_queue::SharedReceiveQueueTable,
    state::QueuePairState,
    time::Timestamp,
    windows::MemoryWindows,
    wire::{Malformed, PACKET_BYTES_MAX, Packet, Psn, QueuePairNumber, TransportService, icrc::Verifier},
};

/// The part of a queue pair number that is random where the top byte is `queue_pair_prefix`.
const NUMBER_BITS: u32 = 16;
/// Half of these numbers, so that a free one is found soon.
const QUEUE_PAIRS_MAX: usize = 1 << (NUMBER_BITS - 1);
/// Numbers of queue pairs that have gone last: what their peers still send must not reach another.
const RETIRED_MAX: usize = 4096;

/// One UDP address. No IO, no clock.
pub struct Endpoint {
    config: EndpointConfig,
    rng: ChaCha8Rng,
    regions: RegionTable,
    queue_pairs: BTreeMap<QueuePairNumber, Counted>,
    datagrams: BTreeMap<QueuePairNumber, DatagramQueuePair>,
    /// Oldest first; at most [`RETIRED_MAX`].
    retired: VecDeque<QueuePairNumber>,
    /// Queue pairs that may have something to send, each at most once.
    transmit_queue: VecDeque<QueuePairNumber>,
    completions: CompletionQueue,
    /// Of what belongs to no connection that is there.
    counters: Counters,
    shared_receive_queues: SharedReceiveQueueTable,
    events: EventQueue,
    verifier: Verifier,
    /// No timer is due before. Timers mostly move back, so this lags behind and is put right when it is reached.
    timeout: Option<Timestamp>,
}

/// A queue pair, and what has happened there.
struct Counted {
    queue_pair: QueuePair,
    counters: Counters,
}

/// What a queue pair shares with the others, apart from the tables of queue pairs. It counts for itself, or with all
/// that have no counters of their own.
macro_rules! context {
    ($self:ident, $now:expr) => {
        context!($self, $now, &mut $self.counters)
    };
    ($self:ident, $now:expr, $counters:expr) => {
        Context {
            now: $now,
            regions: &mut $self.regions,
            completions: &mut $self.completions,
            counters: $counters,
            shared_receive_queue: &mut $self.shared_receive_queues,
            events: &mut $self.events,
        }
    };
}

/// Splits an endpoint into a queue pair and what it shares; `None` if there is no such queue pair.
macro_rules! with_queue_pair {
    ($self:ident, $number:expr, $now:expr) => {
        $self
            .queue_pairs
            .get_mut(&$number)
            .map(|Counted { queue_pair, counters }| (queue_pair, context!($self, $now, counters)))
    };
}

mod datagrams;
mod posting;

impl Endpoint {
    /// An endpoint without regions or queue pairs.
    #[must_use]
    pub fn new(config: EndpointConfig) -> Self {
        let rng = ChaCha8Rng::from_seed(config.seed);
        let mut keys = rng.clone();
        keys.set_stream(1);
        Self {
            config,
            regions: RegionTable::new(config.regions_max, keys),
            queue_pairs: BTreeMap::new(),
            datagrams: BTreeMap::new(),
            retired: VecDeque::new(),
            rng,
            transmit_queue: VecDeque::new(),
            completions: CompletionQueue::new(config.completions_max),
            counters: Counters::default(),
            shared_receive_queues: SharedReceiveQueueTable::default(),
            events: EventQueue::default(),
            verifier: Verifier::default(),
            timeout: None,
        }
    }

    /// Makes `memory` reachable by its keys.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn register(
        &mut self,
        memory: Arc<dyn Memory>,
        config: impl Into<RegionConfig>,
    ) -> Result<RegionHandle, RegisterError> {
        self.regions.register(memory, config.into())
    }

    /// Withdraws a region: when this returns, nothing reaches its memory any more. False if there is none.
    pub fn deregister(&mut self, lkey: u32) -> bool {
        self.regions.deregister(lkey)
    }

    /// To bind windows to a region of this key, which opens it to nobody by itself.
    #[must_use]
    pub fn windows(&self, lkey: u32) -> MemoryWindows {
        self.regions.windows(lkey)
    }

    /// A starting packet sequence number that a third party cannot guess.
    pub fn random_psn(&mut self) -> Psn {
        Psn::new(self.rng.next_u32())
    }

    /// Makes a queue pair, in INIT.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn create_queue_pair(&mut self, config: QueuePairConfig) -> Result<QueuePairNumber, CreateError> {
        config.check()?;
        let number = self.free_number()?;
        let receive_domain = self.attach(config.shared_receive_queue)?.unwrap_or(config.protection_domain);
        let queue_pair = QueuePair::new(number, config, receive_domain);
        self.queue_pairs.insert(number, Counted { queue_pair, counters: Counters::default() });
        Ok(number)
    }

    /// A queue pair will take its receives from a shared receive queue, if it says so: the domain of those.
    fn attach(&mut self, shared: Option<SharedReceiveQueueNumber>) -> Result<Option<ProtectionDomain>, CreateError> {
        let Some(shared) = shared else { return Ok(None) };
        let queue = self.shared_receive_queues.find(shared).ok_or(CreateError::UnknownSharedReceiveQueue(shared))?;
        queue.users += 1;
        Ok(Some(queue.config.protection_domain))
    }

    /// A number for another queue pair of either service, which a third party cannot guess.
    fn free_number(&mut self) -> Result<QueuePairNumber, CreateError> {
        let limit = self.config.queue_pairs_max.min(QUEUE_PAIRS_MAX);
        if self.queue_pairs.len() + self.datagrams.len() >= limit {
            return Err(CreateError::Full(limit));
        }
        loop {
            let random = self.rng.next_u32() & QueuePairNumber::MAX.0;
            let number = QueuePairNumber(match self.config.queue_pair_prefix {
                Some(prefix) => u32::from(prefix) << NUMBER_BITS | random & ((1 << NUMBER_BITS) - 1),
                None => random,
            });
            // 0 and 1 are reserved for management, 0xffffff for multicast (IBTA 10.2.4).
            let is_reserved = number.0 < 2 || number == QueuePairNumber::MAX;
            let is_used = self.queue_pairs.contains_key(&number) || self.datagrams.contains_key(&number);
            if !is_reserved && !is_used && !self.retired.contains(&number) {
                return Ok(number);
            }
        }
    }

    /// INIT to RTR to RTS.
    ///
    /// # Errors
    /// See [`ModifyError`].
    pub fn connect_queue_pair(&mut self, qpn: QueuePairNumber, peer: Peer) -> Result<(), ModifyError> {
        self.modify_to_ready_to_receive(qpn, peer)?;
        self.modify_to_ready_to_send(qpn)
    }

    /// INIT to RTR: answers `peer` from now on.
    ///
    /// # Errors
    /// See [`ModifyError`].
    pub fn modify_to_ready_to_receive(&mut self, qpn: QueuePairNumber, peer: Peer) -> Result<(), ModifyError> {
        if peer.address.is_ipv4() != self.config.local.is_ipv4() {
            return Err(ModifyError::AddressFamily(peer.address));
        }
        if peer.queue_pair.0 < 2 || peer.queue_pair >= QueuePairNumber::MAX {
            return Err(ModifyError::PeerNumber(peer.queue_pair.0));
        }
        self.find(qpn)?.modify_to_ready_to_receive(peer)
    }

    /// INIT to RTR, for datagrams: receives them from now on.
    ///
    /// # Errors
    /// See [`ModifyError`].
    pub fn modify_datagrams_to_ready_to_receive(&mut self, qpn: QueuePairNumber) -> Result<(), ModifyError> {
        self.enter_datagrams(qpn, QueuePairState::ReadyToReceive).unwrap_or(Err(ModifyError::UnknownQueuePair))
    }

    /// `None` if there is no such datagram queue pair.
    fn enter_datagrams(&mut self, qpn: QueuePairNumber, to: QueuePairState) -> Option<Result<(), ModifyError>> {
        let queue_pair = self.datagrams.get_mut(&qpn)?;
        Some(queue_pair.enter(to, &mut context!(self, Timestamp::default())))
    }

    /// RTR, SQD or (of datagrams) SQE to RTS: sends may be posted, and are sent.
    ///
    /// # Errors
    /// See [`ModifyError`].
    pub fn modify_to_ready_to_send(&mut self, qpn: QueuePairNumber) -> Result<(), ModifyError> {
        match self.enter_datagrams(qpn, QueuePairState::ReadyToSend) {
            Some(entered) => entered?,
            None => self.find(qpn)?.modify_to_ready_to_send()?,
        }
        self.enqueue(qpn);
        Ok(())
    }

    /// RTS to SQD: sends that were begun are finished, which [`AsyncEvent::SendQueueDrained`] tells; others wait for
    /// RTS.
    ///
    /// # Errors
    /// See [`ModifyError`].
    pub fn modify_to_send_queue_drain(&mut self, qpn: QueuePairNumber) -> Result<(), ModifyError> {
        if let Some(entered) = self.enter_datagrams(qpn, QueuePairState::SendQueueDrain) {
            return entered;
        }
        let parts = with_queue_pair!(self, qpn, Timestamp::default());
        let (queue_pair, mut cx) = parts.ok_or(ModifyError::UnknownQueuePair)?;
        queue_pair.modify_to_send_queue_drain(&mut cx)
    }

    /// Lowers what a queue pair keeps in flight to what its peer has since told that it takes: READs and atomics (the
    /// peer's `max_dest_rd_atomic`), and SEND and WRITE packets. Never raises; at least one of each goes out. False if
    /// there is no such queue pair.
    pub fn limit_requests(&mut self, qpn: QueuePairNumber, max_rd_atomic: usize, window_packets: u32) -> bool {
        let found = self.queue_pairs.get_mut(&qpn);
        found.map(|found| found.queue_pair.limit_requests(max_rd_atomic, window_packets)).is_some()
    }

    /// Lowers what READs of a queue pair ask for, each and all at once, in bytes; before any is posted. Never raises.
    /// False if there is no such queue pair.
    pub fn limit_reads(&mut self, qpn: QueuePairNumber, chunk_bytes: u32, window_bytes: u32) -> bool {
        let found = self.queue_pairs.get_mut(&qpn);
        found.map(|found| found.queue_pair.limit_reads(chunk_bytes, window_bytes)).is_some()
    }

    fn find(&mut self, qpn: QueuePairNumber) -> Result<&mut QueuePair, ModifyError> {
        let found = self.queue_pairs.get_mut(&qpn).ok_or(ModifyError::UnknownQueuePair)?;
        Ok(&mut found.queue_pair)
    }

    /// Any state to ERROR: when this returns, nothing that the peer sends touches our memory over this queue pair any
    /// more. Everything outstanding completes as flushed. False if there is no such queue pair.
    pub fn modify_to_error(&mut self, qpn: QueuePairNumber) -> bool {
        if let Some(queue_pair) = self.datagrams.get_mut(&qpn) {
            queue_pair.modify_to_error(&mut context!(self, Timestamp::default()));
            return true;
        }
        let parts = with_queue_pair!(self, qpn, Timestamp::default());
        parts.map(|(queue_pair, mut cx)| queue_pair.modify_to_error(&mut cx)).is_some()
    }

    /// Any state to INIT: outstanding work vanishes without completions. False if there is no such queue pair.
    pub fn modify_to_reset(&mut self, qpn: QueuePairNumber) -> bool {
        if let Some(queue_pair) = self.datagrams.get_mut(&qpn) {
            self.completions.release(queue_pair.outstanding());
            queue_pair.reset();
            return true;
        }
        let Some(Counted { queue_pair, .. }) = self.queue_pairs.get_mut(&qpn) else { return false };
        self.completions.release(queue_pair.outstanding());
        queue_pair.reset();
        true
    }

    /// Removes a queue pair; outstanding work vanishes without completions. False if there is none.
    pub fn destroy_queue_pair(&mut self, qpn: QueuePairNumber) -> bool {
        self.transmit_queue.retain(|number| *number != qpn);
        let (outstanding, shared) = if let Some(queue_pair) = self.datagrams.remove(&qpn) {
            (queue_pair.outstanding(), queue_pair.config().shared_receive_queue)
        } else if let Some(Counted { queue_pair, counters }) = self.queue_pairs.remove(&qpn) {
            self.counters.add(&counters);
            (queue_pair.outstanding(), queue_pair.config().shared_receive_queue)
        } else {
            return false;
        };
        self.completions.release(outstanding);
        if self.retired.len() == RETIRED_MAX {
            self.retired.pop_front();
        }
        self.retired.push_back(qpn);
        if let Some(queue) = shared.and_then(|shared| self.shared_receive_queues.find(shared)) {
            queue.users -= 1;
        }
        true
    }

    /// Where a queue pair stands.
    #[must_use]
    pub fn state(&self, qpn: QueuePairNumber) -> Option<QueuePairState> {
        let datagrams = self.datagrams.get(&qpn).map(DatagramQueuePair::state);
        datagrams.or_else(|| self.queue_pairs.get(&qpn).map(|found| found.queue_pair.state()))
    }

    /// Makes a queue of receives for many queue pairs ([`QueuePairConfig::shared_receive_queue`]).
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn create_shared_receive_queue(
        &mut self,
        config: SharedReceiveQueueConfig,
    ) -> Result<SharedReceiveQueueNumber, CreateError> {
        in_range(&[("depth", config.depth as u64, 1, DEPTH_MAX, "1 ..= 65536"), max_sge_limit(config.max_sge)])?;
        self.shared_receive_queues.create(config).ok_or(CreateError::SharedReceiveQueuesFull(SHARED_RECEIVE_QUEUES_MAX))
    }

    /// Removes a shared receive queue, whose receives vanish without completions. False if there is none, or if queue
    /// pairs use it.
    pub fn destroy_shared_receive_queue(&mut self, shared: SharedReceiveQueueNumber) -> bool {
        let held = self.shared_receive_queues.destroy(shared);
        self.completions.release(held.unwrap_or(0));
        held.is_some()
    }

    /// Asks for one [`AsyncEvent::SharedReceiveQueueLow`] once fewer than `limit` receives are left; 0: for none. False
    /// if there is no such queue.
    pub fn set_shared_receive_queue_limit(&mut self, shared: SharedReceiveQueueNumber, limit: usize) -> bool {
        self.shared_receive_queues.find(shared).map(|queue| queue.limit = limit).is_some()
    }

    /// Takes a datagram (BTH to ICRC) that came from `source`. Anything malformed or unexpected is counted and dropped.
    pub fn handle_packet(&mut self, now: Timestamp, source: SocketAddr, bytes: &[u8]) {
        let packet = match Packet::new_checked(bytes) {
            Ok(packet) if packet.opcode().service == TransportService::ReliableConnection => packet,
            Ok(packet) if packet.opcode().service == TransportService::UnreliableDatagram => {
                self.handle_datagram(now, source, &packet);
                return;
            }
            Ok(_) | Err(Malformed::Opcode) => {
                self.counters.dropped_unsupported += 1;
                return;
            }
            Err(_) => {
                self.counters.dropped_malformed += 1;
                return;
            }
        };
        let number = packet.destination();
        let Some((queue_pair, mut cx)) = with_queue_pair!(self, number, now) else {
            self.counters.dropped_no_queue_pair += 1;
            return;
        };
        let ready = matches!(
            queue_pair.state(),
            QueuePairState::ReadyToReceive | QueuePairState::ReadyToSend | QueuePairState::SendQueueDrain
        );
        let Some(peer) = queue_pair.peer().filter(|_| ready) else {
            cx.counters.dropped_no_queue_pair += 1;
            return;
        };
        // What a stranger may send for next to nothing is found out before its ICRC is computed.
        if !peer.sends_from(source) || !packet.is_default_partition() {
            cx.counters.dropped_wrong_peer += 1;
            return;
        }
        let local = self.config.local;
        let (covered, icrc, accept) = (packet.covered(), packet.icrc(), peer.identification);
        if peer.path_mtu.has_icrc() && self.verifier.verify(source, local, covered, icrc, accept).is_none() {
            cx.counters.dropped_icrc += 1;
            return;
        }
        cx.counters.packets_received += 1;
        queue_pair.handle_packet(&packet, &mut cx);
        let due = queue_pair.poll_timeout();
        self.note_timeout(due);
        self.enqueue(number);
    }

    /// Runs the timers that are due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.timeout.is_none_or(|due| now < due) {
            return;
        }
        self.timeout = None;
        let mut after = Bound::Unbounded;
        while let Some((&number, _)) = self.queue_pairs.range((after, Bound::Unbounded)).next() {
            after = Bound::Excluded(number);
            let Some((queue_pair, mut cx)) = with_queue_pair!(self, number, now) else { continue };
            let due = queue_pair.poll_timeout().is_some_and(|due| due <= now);
            if due {
                queue_pair.handle_timeout(&mut cx);
            }
            let next = queue_pair.poll_timeout();
            self.note_timeout(next);
            if due {
                self.enqueue(number);
            }
        }
    }

    fn note_timeout(&mut self, due: Option<Timestamp>) {
        self.timeout = self.timeout.into_iter().chain(due).min();
    }

    /// When [`Self::handle_timeout`] must run; it may come out earlier than needed, never later.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Timestamp> {
        self.timeout
    }

    /// Writes a datagram or a segmentation batch of at most `segments_max` (1 ..= 128) equally long ones to the start
    /// of `buf`. Queue pairs take turns, a batch each. `buf` must hold one packet of each queue pair
    /// ([`crate::PathMtu::packet_bytes_max`]); its length, at most 65,507, bounds the batch.
    pub fn poll_transmit(&mut self, now: Timestamp, buf: &mut [u8], segments_max: usize) -> Option<Transmit> {
        self.poll_transmit_of(now, buf, |_| segments_max)
    }

    /// The same with a limit for each queue pair, of batches: 0 for one whose packets cannot go now. It keeps them, and
    /// is asked again by the next call.
    pub fn poll_transmit_of(
        &mut self,
        now: Timestamp,
        buf: &mut [u8],
        mut segments_max: impl FnMut(QueuePairNumber) -> usize,
    ) -> Option<Transmit> {
        assert!(buf.len() >= PACKET_BYTES_MAX, "the transmit buffer holds {} bytes", buf.len());
        // Each once: those that cannot go are queued again.
        for _ in 0..self.transmit_queue.len() {
            let number = self.transmit_queue.pop_front()?;
            let segments_max = segments_max(number);
            if segments_max == 0 {
                self.transmit_queue.push_back(number);
                continue;
            }
            if let Some(queue_pair) = self.datagrams.get_mut(&number) {
                queue_pair.queued = false;
                let transmit = queue_pair.poll_transmit(self.config.local, buf, &mut context!(self, now));
                if transmit.is_some() {
                    self.enqueue(number);
                    return transmit;
                }
                continue;
            }
            let Some((queue_pair, mut cx)) = with_queue_pair!(self, number, now) else { continue };
            queue_pair.queued = false;
            let transmit = queue_pair.poll_transmit(self.config.local, buf, segments_max, &mut cx);
            let due = queue_pair.poll_timeout();
            self.note_timeout(due);
            if transmit.is_some() {
                self.enqueue(number);
                return transmit;
            }
        }
        None
    }

    /// Something happened to a queue pair: it may have something to send.
    fn enqueue(&mut self, number: QueuePairNumber) {
        let queued = match self.queue_pairs.get_mut(&number) {
            Some(found) => Some(&mut found.queue_pair.queued),
            None => self.datagrams.get_mut(&number).map(|queue_pair| &mut queue_pair.queued),
        };
        if let Some(queued) = queued.filter(|queued| !**queued) {
            *queued = true;
            self.transmit_queue.push_back(number);
        }
    }

    /// The next finished work request. Per queue, completions come in the order of posting.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop()
    }

    /// The next event that belongs to no work request. At most 1,024 wait; more are counted and dropped.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop()
    }

    /// Asks for one notification, of a completion that is yet to come: poll what is there after this, then sleep.
    pub fn request_notification(&mut self, notify: Notify) {
        self.completions.request_notification(notify);
    }

    /// Whether a completion has come that was asked for; told once.
    pub fn poll_notification(&mut self) -> bool {
        self.completions.take_notification()
    }

    /// What happened so far, at all queue pairs that there are and were.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut all = self.counters;
        self.queue_pairs.values().for_each(|found| all.add(&found.counters));
        all
    }

    /// What happened so far at a reliable connection, of what is counted by connection.
    #[must_use]
    pub fn counters_of(&self, qpn: QueuePairNumber) -> Option<&Counters> {
        self.queue_pairs.get(&qpn).map(|found| &found.counters)
    }
}
