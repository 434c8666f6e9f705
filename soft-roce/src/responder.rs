//! The receiving side of a queue pair: request packets are checked, carried out and answered (IBTA 9.7.4, 9.7.5.1).
//!
//! Checks come in the order of the specification: sequence number, order of opcodes, what the queue pair allows,
//! resources, length, key. What fails has changed nothing but, at most, the receive in use. Requests are carried out in
//! order, packet by packet, so the only state of a message in progress is [`Inbound`].

use std::{collections::VecDeque, time::Duration};

use crate::{
    completion::{Completion, CompletionOpcode, Status},
    config::{Peer, QueuePairConfig},
    context::Context,
    events::AsyncEvent,
    limits::QUEUED_PSNS_MAX,
    memory::{Access, ProtectionDomain},
    outbox::{Answer, Outbox, Resource, readable},
    wire::{NakCode, Packet, PacketKind, Psn, QueuePairNumber, Reth, Syndrome},
    work_request::Receive,
};

const WRITE: Access = Access { local_write: true, remote_read: false, remote_write: true, remote_atomic: false };
const ATOMIC: Access = Access { local_write: true, remote_read: false, remote_write: false, remote_atomic: true };

/// A message of which not all packets have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inbound {
    None,
    /// Fills the oldest receive.
    Send {
        filled: u32,
    },
    Write {
        reth: Reth,
        written: u32,
    },
}

/// Why a request is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// For now: no receive is posted.
    NotReady,
    /// For good: ends the queue pair. The status is that of the receive in use.
    Nak(NakCode, Status),
}

impl Refusal {
    const INVALID: Self = Self::Nak(NakCode::InvalidRequest, Status::RemoteInvalidRequest);
    const ACCESS: Self = Self::Nak(NakCode::RemoteAccess, Status::Flushed);
}

/// A peer's request has ended the queue pair: the status of the oldest receive, if it was in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken {
    pub(crate) receive: Status,
}

/// The receiving side of a queue pair.
pub(crate) struct Responder {
    pub(crate) receives: VecDeque<Receive>,
    /// The shared receive that the message in progress uses.
    taken: Option<Receive>,
    /// The domain of the regions that receives may fill.
    receive_domain: ProtectionDomain,
    pub(crate) outbox: Outbox,
    /// The next sequence number to carry out.
    expected: Psn,
    /// The newest packet of a SEND or WRITE that was carried out: what an acknowledgement names. Never a number of a
    /// READ or atomic behind it, which its response alone answers; Linux's `rdma_rxe` ends a READ of which only the
    /// last response is missing with success when an acknowledgement names that one (`check_psn`, then
    /// `COMPST_WRITE_SEND`).
    acknowledged: Psn,
    /// Requests carried out, 24 bits.
    message_sequence: u32,
    /// The peer knows that it must come back to `expected`: everything beyond is dropped silently.
    gap_reported: bool,
    inbound: Inbound,
    mtu_bytes: u32,
    ack_delay: Option<Duration>,
    config: QueuePairConfig,
}

impl Responder {
    /// `receive_domain` is that of the receive queue, its own or shared.
    pub(crate) fn new(config: QueuePairConfig, receive_domain: ProtectionDomain) -> Self {
        Self {
            receives: VecDeque::new(),
            taken: None,
            receive_domain,
            outbox: Outbox::new(config.max_dest_rd_atomic),
            expected: Psn::default(),
            acknowledged: Psn::default(),
            message_sequence: 0,
            gap_reported: false,
            inbound: Inbound::None,
            mtu_bytes: 0,
            ack_delay: None,
            config,
        }
    }

    pub(crate) const fn connect(&mut self, peer: &Peer) {
        self.expected = peer.rq_psn;
        self.acknowledged = peer.rq_psn.previous();
        self.mtu_bytes = peer.path_mtu.bytes();
        self.ack_delay = peer.ack_delay;
    }

    /// Takes a request packet. An error ends the queue pair, once the outbox is empty.
    pub(crate) fn handle_request(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Broken> {
        match packet.psn().since(self.expected) {
            0 => self.on_expected(packet, number, cx),
            distance if distance > 0 => {
                self.on_gap(cx);
                Ok(())
            }
            _ => {
                self.on_duplicate(packet, cx);
                Ok(())
            }
        }
    }

    /// IBTA 9.7.5.1.1: one NAK tells the peer where to go on; until it does, silence.
    fn on_gap(&mut self, cx: &mut Context<'_>) {
        if !self.gap_reported {
            self.gap_reported = true;
            cx.counters.sequence_errors += 1;
            self.outbox.acknowledge(self.expected, Syndrome::Nak(NakCode::SequenceError), self.message_sequence);
        }
    }

    fn on_expected(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Broken> {
        self.gap_reported = false;
        let in_receive = matches!(self.inbound, Inbound::Send { .. }) || packet.opcode().kind.is_send();
        match self.execute(packet, number, cx) {
            Ok(psns) => {
                self.expected = self.expected.plus(psns);
                let kind = packet.opcode().kind;
                if kind.is_send() || kind.is_write() {
                    self.acknowledged = packet.psn();
                    if packet.ack_request() {
                        self.acknowledge();
                    } else if let Some(delay) = self.ack_delay.filter(|_| kind.position().ends()) {
                        self.outbox.acknowledge_by(cx.now + delay);
                    }
                }
                Ok(())
            }
            Err(Refusal::NotReady) => {
                cx.counters.receiver_not_ready += 1;
                self.gap_reported = true;
                let syndrome = Syndrome::ReceiverNotReady { timer: self.config.min_rnr_timer };
                self.outbox.acknowledge(self.expected, syndrome, self.message_sequence);
                Ok(())
            }
            Err(Refusal::Nak(code, status)) => {
                cx.counters.requests_refused += 1;
                cx.raise(match code {
                    NakCode::RemoteAccess => AsyncEvent::AccessError(number),
                    NakCode::RemoteOperation => AsyncEvent::QueuePairFatal(number),
                    NakCode::InvalidRequest | NakCode::SequenceError => AsyncEvent::RequestError(number),
                });
                self.outbox.acknowledge(self.expected, Syndrome::Nak(code), self.message_sequence);
                Err(Broken { receive: if in_receive { status } else { Status::Flushed } })
            }
        }
    }

    /// Acknowledges all that was carried out.
    pub(crate) fn acknowledge(&mut self) {
        self.outbox.acknowledge(self.acknowledged, Syndrome::ACK, self.message_sequence);
    }

    /// The receive for the message in progress, or for one that begins.
    fn receive(&mut self, cx: &mut Context<'_>) -> Option<Receive> {
        let Some(shared) = self.config.shared_receive_queue else { return self.receives.front().copied() };
        // One that turns out too short fails with its message.
        self.taken = self.taken.or_else(|| cx.take_shared(shared, 0));
        self.taken
    }

    /// Receives that are posted or in use.
    pub(crate) fn outstanding(&self) -> usize {
        self.receives.len() + usize::from(self.taken.is_some())
    }

    /// Carries the packet out; how many sequence numbers it takes.
    fn execute(&mut self, packet: &Packet<'_>, number: QueuePairNumber, cx: &mut Context<'_>) -> Result<u32, Refusal> {
        let kind = packet.opcode().kind;
        self.check_order(kind)?;
        if kind.is_send() {
            self.execute_send(packet, number, cx)?;
        } else if kind.is_write() {
            self.execute_write(packet, number, cx)?;
        } else if kind.is_atomic() {
            self.execute_atomic(packet, cx)?;
        } else if kind == PacketKind::ReadRequest {
            return self.execute_read(packet, cx);
        } else {
            // FLUSH and ATOMIC WRITE.
            return Err(Refusal::INVALID);
        }
        Ok(1)
    }

    /// IBTA 9.7.4.1.2: a message is First, Middle .., Last of one kind, or Only.
    fn check_order(&self, kind: PacketKind) -> Result<(), Refusal> {
        let fits = match self.inbound {
            Inbound::None => kind.position().begins(),
            Inbound::Send { .. } => kind.is_send() && !kind.position().begins(),
            Inbound::Write { .. } => kind.is_write() && !kind.position().begins(),
        };
        if fits { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// IBTA 9.7.4.1.6: First and Middle are full, Last is not empty.
    fn check_length(&self, packet: &Packet<'_>) -> Result<u32, Refusal> {
        use crate::wire::Position::{First, Last, Middle, Only};
        let bytes = packet.payload().len() as u32;
        let fits = match packet.opcode().kind.position() {
            First | Middle => bytes == self.mtu_bytes,
            Last => bytes > 0 && bytes <= self.mtu_bytes,
            Only => bytes <= self.mtu_bytes,
        };
        if fits { Ok(bytes) } else { Err(Refusal::INVALID) }
    }

    fn execute_send(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Refusal> {
        let receive = self.receive(cx).ok_or(Refusal::NotReady)?;
        let filled = if let Inbound::Send { filled } = self.inbound { filled } else { 0 };
        let bytes = self.check_length(packet)?;
        if u64::from(filled) + u64::from(bytes) > u64::from(receive.segments.bytes()) {
            return Err(Refusal::Nak(NakCode::InvalidRequest, Status::LocalLength));
        }
        let windows = receive.segments.windows(filled..filled + bytes, true, self.receive_domain, cx.regions);
        let windows = windows.map_err(|_| Refusal::Nak(NakCode::RemoteOperation, Status::LocalProtection))?;
        windows.write(&[], packet.payload());
        if !packet.opcode().kind.position().ends() {
            self.inbound = Inbound::Send { filled: filled + bytes };
            return Ok(());
        }
        if let Some(rkey) = packet.invalidate() {
            let invalidated = cx.regions.invalidate(self.config.protection_domain, rkey, number);
            invalidated.map_err(|_| Refusal::Nak(NakCode::RemoteAccess, Status::LocalProtection))?;
        }
        self.complete_receive(packet, CompletionOpcode::Recv, filled + bytes, number, cx);
        Ok(())
    }

    fn execute_write(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Refusal> {
        if !self.config.access.remote_write {
            return Err(Refusal::INVALID);
        }
        let kind = packet.opcode().kind;
        if kind.has_immediate() && self.receive(cx).is_none() {
            return Err(Refusal::NotReady);
        }
        let (reth, written) = match (self.inbound, packet.reth()) {
            (Inbound::Write { reth, written }, _) => (reth, written),
            (_, Some(reth)) => (reth, 0),
            _ => return Err(Refusal::INVALID),
        };
        let bytes = self.check_length(packet)?;
        // The parts must add up to the length announced, exactly at the end.
        let total = u64::from(written) + u64::from(bytes);
        let ends = kind.position().ends();
        if if ends { total != u64::from(reth.bytes) } else { total >= u64::from(reth.bytes) } {
            return Err(Refusal::INVALID);
        }
        if reth.bytes > 0 {
            let domain = self.config.protection_domain;
            // The whole range each time: the region may be withdrawn meanwhile.
            let window = cx.regions.remote(domain, reth.rkey, reth.address, u64::from(reth.bytes), WRITE);
            let window = window.map_err(|_| Refusal::ACCESS)?;
            window.memory.write(window.offset + written as usize, packet.payload());
        }
        if !ends {
            self.inbound = Inbound::Write { reth, written: total as u32 };
        } else if kind.has_immediate() {
            self.complete_receive(packet, CompletionOpcode::RecvWriteWithImmediate, reth.bytes, number, cx);
        } else {
            self.complete_message();
        }
        Ok(())
    }

    fn execute_read(&mut self, packet: &Packet<'_>, cx: &mut Context<'_>) -> Result<u32, Refusal> {
        let reth = packet.reth().ok_or(Refusal::INVALID)?;
        let packets = reth.bytes.div_ceil(self.mtu_bytes).max(1);
        let possible = self.config.access.remote_read
            && self.config.max_dest_rd_atomic > 0
            && packet.payload().is_empty()
            && packets <= QUEUED_PSNS_MAX;
        if !possible {
            return Err(Refusal::INVALID);
        }
        readable(reth, 0, u64::from(reth.bytes), self.config.protection_domain, cx.regions)
            .map_err(|_| Refusal::ACCESS)?;
        self.complete_message();
        self.remember(packets, Answer::Read(reth));
        Ok(packets)
    }

    fn execute_atomic(&mut self, packet: &Packet<'_>, cx: &mut Context<'_>) -> Result<(), Refusal> {
        let atomic = packet.atomic_eth().ok_or(Refusal::INVALID)?;
        let possible = self.config.access.remote_atomic
            && self.config.max_dest_rd_atomic > 0
            && packet.payload().is_empty()
            && atomic.address.is_multiple_of(8);
        if !possible {
            return Err(Refusal::INVALID);
        }
        let window = cx.regions.remote(self.config.protection_domain, atomic.rkey, atomic.address, 8, ATOMIC);
        let window = window.map_err(|_| Refusal::ACCESS)?;
        if !window.offset.is_multiple_of(8) {
            return Err(Refusal::INVALID);
        }
        let original = if packet.opcode().kind == PacketKind::CompareSwap {
            window.memory.compare_swap_u64(window.offset, atomic.compare, atomic.swap_or_add)
        } else {
            window.memory.fetch_add_u64(window.offset, atomic.swap_or_add)
        };
        self.complete_message();
        self.remember(1, Answer::Atomic(original));
        Ok(())
    }

    fn remember(&mut self, packets: u32, answer: Answer) {
        let (first, message_sequence) = (self.expected, self.message_sequence);
        self.outbox.respond(Resource { first, packets, answer, message_sequence });
    }

    fn complete_message(&mut self) {
        self.inbound = Inbound::None;
        self.message_sequence = self.message_sequence.wrapping_add(1) & 0x00ff_ffff;
    }

    fn complete_receive(
        &mut self,
        packet: &Packet<'_>,
        opcode: CompletionOpcode,
        bytes: u32,
        queue_pair: QueuePairNumber,
        cx: &mut Context<'_>,
    ) {
        self.complete_message();
        let Some(receive) = self.taken.take().or_else(|| self.receives.pop_front()) else { return };
        cx.completions.push(Completion {
            queue_pair,
            id: receive.id,
            status: Status::Success,
            opcode,
            bytes,
            immediate: packet.immediate(),
            invalidated_rkey: packet.invalidate(),
            solicited: packet.solicited(),
            source: None,
        });
    }

    /// IBTA 9.7.5.1.3 - 9.7.5.1.5: a request that was carried out before is not carried out again, but for READs.
    fn on_duplicate(&mut self, packet: &Packet<'_>, cx: &mut Context<'_>) {
        cx.counters.duplicate_requests += 1;
        let kind = packet.opcode().kind;
        let psn = packet.psn();
        if kind.is_send() || kind.is_write() {
            // What refuses `expected` acknowledges all before it too, and must not get lost.
            if !self.outbox.refuses(self.expected) {
                self.acknowledge();
            }
            return;
        }
        let Some(resource) = self.outbox.resource(psn).copied() else { return };
        match (resource.answer, packet.reth()) {
            (Answer::Read(original), Some(again)) if kind == PacketKind::ReadRequest => {
                let skipped = psn.since(resource.first) as u32;
                let offset = u64::from(skipped) * u64::from(self.mtu_bytes);
                let packets = again.bytes.div_ceil(self.mtu_bytes).max(1);
                // Only a tail, or a part, of what was allowed the first time.
                let inside = again.rkey == original.rkey
                    && original.address.checked_add(offset) == Some(again.address)
                    && offset + u64::from(again.bytes) <= u64::from(original.bytes)
                    && (again.bytes > 0 || original.bytes == 0);
                if inside {
                    self.outbox.respond_again(Resource {
                        first: psn,
                        packets,
                        answer: Answer::Read(again),
                        message_sequence: self.message_sequence,
                    });
                }
            }
            (Answer::Atomic(_), None) if kind.is_atomic() => self.outbox.respond_again(resource),
            _ => {}
        }
    }

    /// The region of a READ in progress was withdrawn.
    pub(crate) fn refuse_read(&mut self, psn: Psn, number: QueuePairNumber, cx: &mut Context<'_>) {
        cx.counters.requests_refused += 1;
        cx.raise(AsyncEvent::AccessError(number));
        self.outbox.refuse_only(psn, Syndrome::Nak(NakCode::RemoteAccess), self.message_sequence);
    }

    /// Completes all receives with an error: the oldest with `first`.
    pub(crate) fn flush(&mut self, mut first: Status, queue_pair: QueuePairNumber, cx: &mut Context<'_>) {
        for receive in self.taken.take().into_iter().chain(self.receives.drain(..)) {
            cx.completions.push(Completion {
                queue_pair,
                id: receive.id,
                status: std::mem::replace(&mut first, Status::Flushed),
                opcode: CompletionOpcode::Recv,
                bytes: 0,
                immediate: None,
                invalidated_rkey: None,
                solicited: false,
                source: None,
            });
        }
        self.inbound = Inbound::None;
    }
}
