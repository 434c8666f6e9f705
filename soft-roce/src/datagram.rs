//! A queue pair for datagrams (UD, IBTA 9.8.3): single packets to anyone, without acknowledgement.
//!
//! A send is complete once it is on its way. What is received begins with 40 bytes that name the sender: the IPv6
//! header, or 20 zeros and the IPv4 header, as far as a UDP socket shows them. Created in INIT, moved to RTR and RTS;
//! a send that fails ends the send queue (SQE), a receive that fails the queue pair (ERROR).

use std::{collections::VecDeque, net::SocketAddr};

use crate::{
    address::DatagramAddress,
    completion::{Completion, CompletionOpcode, Status},
    config::{PathMtu, SharedReceiveQueueNumber, in_range, max_sge_limit},
    context::Context,
    error::{CreateError, ModifyError, PostError},
    events::AsyncEvent,
    limits::DEPTH_MAX,
    memory::{ProtectionDomain, Segment},
    segmentation_batch::{Outgoing, SegmentationBatch, Transmit},
    segments::SegmentList,
    state::QueuePairState,
    wire::{
        Deth, Opcode, Packet, PacketKind, Psn, QueuePairNumber, Repr, TransportService,
        icrc::{Identification, Path},
    },
    work_request::{Receive, RecvRequest},
};

/// Bytes at the start of every receive for where the datagram came from.
pub const DATAGRAM_HEADER_BYTES: usize = 40;
/// A request's queue key with this bit stands for that of the sending queue pair (IBTA 10.2.5).
const OWN_QUEUE_KEY: u32 = 0x8000_0000;
const IPV4_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
const UDP: u8 = 17;

/// What a datagram queue pair is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramConfig {
    /// The regions that it may use.
    pub protection_domain: ProtectionDomain,
    /// Only datagrams with this key are received.
    pub queue_key: u32,
    /// Sends outstanding, 1 ..= 65536.
    pub send_depth: usize,
    /// Receives outstanding, unless they are shared, 0 ..= 65536.
    pub recv_depth: usize,
    /// Pieces of local memory of one datagram or receive, 1 ..= [`SEGMENTS_MAX`](crate::SEGMENTS_MAX).
    pub max_sge: usize,
    /// Takes receives from there instead of from a queue of its own.
    pub shared_receive_queue: Option<SharedReceiveQueueNumber>,
    /// The longest datagram, in payload bytes.
    pub path_mtu: PathMtu,
    /// How strictly the ICRC of senders can be checked. With `Any`, 15 bits of it protect a datagram over IPv4, besides
    /// the UDP checksum, which kernels and network cards leave out.
    pub identification: Identification,
}

impl DatagramConfig {
    /// Protection domain 0, depths of 256, datagrams of up to 1024 bytes from any sender.
    #[must_use]
    pub const fn new(queue_key: u32) -> Self {
        Self {
            protection_domain: ProtectionDomain(0),
            queue_key,
            send_depth: 256,
            recv_depth: 256,
            max_sge: 4,
            shared_receive_queue: None,
            path_mtu: PathMtu::Mtu1024,
            identification: Identification::Any,
        }
    }

    pub(crate) fn check(&self) -> Result<(), CreateError> {
        in_range(&[
            ("send_depth", self.send_depth as u64, 1, DEPTH_MAX, "1 ..= 65536"),
            ("recv_depth", self.recv_depth as u64, 0, DEPTH_MAX, "0 ..= 65536"),
            max_sge_limit(self.max_sge),
            ("path_mtu", self.path_mtu.bytes().into(), 256, 4096, "256 ..= 4096"),
        ])
    }
}

/// A datagram to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramRequest {
    /// Comes back in the completion.
    pub id: u64,
    /// The message, at most a path MTU, or the first piece of it.
    pub local: Segment,
    /// 32 bits for the receive's completion.
    pub immediate: Option<u32>,
    /// Where to.
    pub to: DatagramAddress,
    /// The key of the receiving queue pair; with the top bit set, that of the sending one is used.
    pub queue_key: u32,
    /// Whether success is reported; failure always is.
    pub signalled: bool,
    /// Marks the peer's completion as solicited.
    pub solicited: bool,
}

/// A datagram queue pair.
pub(crate) struct DatagramQueuePair {
    number: QueuePairNumber,
    config: DatagramConfig,
    state: QueuePairState,
    next: Psn,
    sends: VecDeque<(DatagramRequest, SegmentList)>,
    receives: VecDeque<Receive>,
    /// The domain of the regions that receives may fill.
    receive_domain: ProtectionDomain,
    /// It stands in the endpoint's transmit queue.
    pub(crate) queued: bool,
}

impl DatagramQueuePair {
    /// `receive_domain` is that of the receive queue, its own or shared; `first` the sequence number of its first
    /// datagram.
    pub(crate) const fn new(
        number: QueuePairNumber,
        config: DatagramConfig,
        receive_domain: ProtectionDomain,
        first: Psn,
    ) -> Self {
        Self {
            number,
            config,
            state: QueuePairState::Init,
            next: first,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            receive_domain,
            queued: false,
        }
    }

    pub(crate) const fn state(&self) -> QueuePairState {
        self.state
    }

    pub(crate) const fn config(&self) -> &DatagramConfig {
        &self.config
    }

    pub(crate) const fn identification(&self) -> Identification {
        self.config.identification
    }

    /// Work requests that were posted and have no completion.
    pub(crate) fn outstanding(&self) -> usize {
        self.sends.len() + self.receives.len()
    }

    /// Whether it takes datagrams.
    pub(crate) const fn is_receiving(&self) -> bool {
        !matches!(self.state, QueuePairState::Init | QueuePairState::Error)
    }

    /// IBTA 10.3.1: the transitions that an owner may ask for, apart from those to ERROR and RESET, which always exist.
    pub(crate) fn enter(&mut self, to: QueuePairState, cx: &mut Context<'_>) -> Result<(), ModifyError> {
        use QueuePairState::{Init, ReadyToReceive, ReadyToSend, SendQueueDrain, SendQueueError};
        let from = self.state;
        match (from, to) {
            (Init, ReadyToReceive)
            | (ReadyToReceive | SendQueueDrain | SendQueueError, ReadyToSend)
            | (ReadyToSend, SendQueueDrain) => {}
            _ => return Err(ModifyError::Transition { from, to }),
        }
        self.state = to;
        if to == SendQueueDrain {
            // A datagram is begun and finished at once.
            cx.raise(AsyncEvent::SendQueueDrained(self.number));
        }
        Ok(())
    }

    pub(crate) fn modify_to_error(&mut self, cx: &mut Context<'_>) {
        let was_error = std::mem::replace(&mut self.state, QueuePairState::Error) == QueuePairState::Error;
        self.flush_sends(Status::Flushed, cx);
        self.flush_receives(cx);
        if self.config.shared_receive_queue.is_some() && !was_error {
            cx.raise(AsyncEvent::LastReceiveReached(self.number));
        }
    }

    /// Back to INIT: queues emptied without completions.
    pub(crate) fn reset(&mut self) {
        *self = Self { queued: self.queued, ..Self::new(self.number, self.config, self.receive_domain, self.next) };
    }

    pub(crate) fn post_send(
        &mut self,
        request: DatagramRequest,
        more: &[Segment],
        local: SocketAddr,
        cx: &mut Context<'_>,
    ) -> Result<(), PostError> {
        let segments = SegmentList::new(request.local, more, self.config.max_sge)?;
        let (bytes, limit) = (segments.bytes(), self.config.path_mtu.bytes());
        if bytes > limit {
            return Err(PostError::TooLong { bytes: bytes.into(), limit });
        }
        let DatagramAddress { address, queue_pair } = request.to;
        if address.is_ipv4() != local.is_ipv4() || queue_pair.0 == 0 || queue_pair >= QueuePairNumber::MAX {
            return Err(PostError::Destination(request.to));
        }
        match self.state {
            QueuePairState::ReadyToSend | QueuePairState::SendQueueDrain => {
                if self.sends.len() >= self.config.send_depth {
                    return Err(PostError::QueueFull { key: "send_depth", depth: self.config.send_depth });
                }
                self.sends.push_back((request, segments));
            }
            QueuePairState::SendQueueError | QueuePairState::Error => {
                cx.completions.push(self.completion(request.id, Status::Flushed, CompletionOpcode::Send));
            }
            state => return Err(PostError::State(state)),
        }
        Ok(())
    }

    pub(crate) fn post_recv(
        &mut self,
        request: RecvRequest,
        more: &[Segment],
        cx: &mut Context<'_>,
    ) -> Result<(), PostError> {
        if self.config.shared_receive_queue.is_some() {
            return Err(PostError::ReceivesAreShared);
        }
        if self.receives.len() >= self.config.recv_depth {
            return Err(PostError::QueueFull { key: "recv_depth", depth: self.config.recv_depth });
        }
        self.receives.push_back(Receive::new(request, more, self.config.max_sge)?);
        if self.state == QueuePairState::Error {
            self.flush_receives(cx);
        }
        Ok(())
    }

    /// Takes a datagram whose ICRC was right. What does not fit is dropped without a word to the sender (IBTA 9.8.3.1).
    pub(crate) fn handle_packet(&mut self, packet: &Packet<'_>, path: &Path, cx: &mut Context<'_>) {
        let Some(deth) = packet.deth().filter(|deth| deth.queue_key == self.config.queue_key) else {
            cx.counters.dropped_queue_key += 1;
            return;
        };
        let payload = packet.payload();
        if payload.len() > self.config.path_mtu.bytes() as usize {
            cx.counters.dropped_malformed += 1;
            return;
        }
        let bytes = (DATAGRAM_HEADER_BYTES + payload.len()) as u32;
        let receive = match self.config.shared_receive_queue {
            Some(shared) => cx.take_shared(shared, bytes),
            None => self.receives.pop_front_if(|receive| receive.segments.bytes() >= bytes),
        };
        let Some(receive) = receive else {
            cx.counters.dropped_no_receive += 1;
            return;
        };
        let Ok(windows) = receive.segments.windows(0..bytes, true, self.receive_domain, cx.regions) else {
            cx.raise(AsyncEvent::QueuePairFatal(self.number));
            cx.completions.push(self.completion(receive.id, Status::LocalProtection, CompletionOpcode::Recv));
            self.modify_to_error(cx);
            return;
        };
        windows.write(&network_header(path, packet), payload);
        cx.completions.push(Completion {
            bytes,
            immediate: packet.immediate(),
            solicited: packet.solicited(),
            source: Some(DatagramAddress { address: path.source, queue_pair: deth.source }),
            ..self.completion(receive.id, Status::Success, CompletionOpcode::Recv)
        });
    }

    /// Writes the next datagram.
    pub(crate) fn poll_transmit(
        &mut self,
        source: SocketAddr,
        buf: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Option<Transmit> {
        if self.state != QueuePairState::ReadyToSend {
            return None;
        }
        let (request, segments) = *self.sends.front()?;
        let bytes = segments.bytes();
        let Ok(windows) = segments.windows(0..bytes, false, self.config.protection_domain, cx.regions) else {
            self.state = QueuePairState::SendQueueError;
            self.flush_sends(Status::LocalProtection, cx);
            return None;
        };
        let mut batch = SegmentationBatch::new(buf, source, request.to.address, 1, true);
        batch.push(&Outgoing::new(self.repr(&request, bytes as usize), windows));
        self.sends.pop_front();
        self.next = self.next.plus(1);
        if request.signalled {
            let done = self.completion(request.id, Status::Success, CompletionOpcode::Send);
            cx.completions.push(Completion { bytes, ..done });
        } else {
            cx.completions.release(1);
        }
        cx.counters.packets_sent += 1;
        batch.finish(self.number)
    }

    fn repr(&self, request: &DatagramRequest, payload_bytes: usize) -> Repr {
        let kind = PacketKind::SendOnly;
        let kind = if request.immediate.is_some() { kind.with_immediate() } else { kind };
        let own = request.queue_key & OWN_QUEUE_KEY != 0;
        let queue_key = if own { self.config.queue_key } else { request.queue_key };
        Repr {
            opcode: Opcode { service: TransportService::UnreliableDatagram, kind },
            solicited: request.solicited,
            deth: Some(Deth { queue_key, source: self.number }),
            immediate: request.immediate,
            payload_bytes,
            ..Repr::reliable(kind, request.to.queue_pair, self.next)
        }
    }

    fn flush_sends(&mut self, mut first: Status, cx: &mut Context<'_>) {
        while let Some((request, _)) = self.sends.pop_front() {
            let status = std::mem::replace(&mut first, Status::Flushed);
            cx.completions.push(self.completion(request.id, status, CompletionOpcode::Send));
        }
    }

    fn flush_receives(&mut self, cx: &mut Context<'_>) {
        while let Some(receive) = self.receives.pop_front() {
            cx.completions.push(self.completion(receive.id, Status::Flushed, CompletionOpcode::Recv));
        }
    }

    const fn completion(&self, id: u64, status: Status, opcode: CompletionOpcode) -> Completion {
        Completion {
            queue_pair: self.number,
            id,
            status,
            opcode,
            bytes: 0,
            immediate: None,
            invalidated_rkey: None,
            solicited: false,
            source: None,
        }
    }
}

/// The 40 bytes before a received message, as rdma_rxe writes them. Type of service, time to live and header checksum
/// stay zero: a UDP socket does not show them.
fn network_header(path: &Path, packet: &Packet<'_>) -> [u8; DATAGRAM_HEADER_BYTES] {
    let mut header = [0; DATAGRAM_HEADER_BYTES];
    let udp_bytes = (UDP_BYTES + packet.bytes().len()) as u16;
    match (path.source, path.destination) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            let ip = &mut header[DATAGRAM_HEADER_BYTES - IPV4_BYTES..];
            ip[0] = 0x45;
            ip[2..4].copy_from_slice(&(IPV4_BYTES as u16 + udp_bytes).to_be_bytes());
            ip[4..6].copy_from_slice(&path.identification.to_be_bytes());
            ip[6] = if path.dont_fragment { 0x40 } else { 0 };
            ip[9] = UDP;
            ip[12..16].copy_from_slice(&source.ip().octets());
            ip[16..20].copy_from_slice(&destination.ip().octets());
        }
        (SocketAddr::V6(source), SocketAddr::V6(destination)) => {
            header[0] = 0x60;
            header[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
            header[6] = UDP;
            header[8..24].copy_from_slice(&source.ip().octets());
            header[24..40].copy_from_slice(&destination.ip().octets());
        }
        // The endpoint's own address decides the family; the socket delivers no other.
        _ => {}
    }
    header
}
