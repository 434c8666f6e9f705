//! One reliable connection: a requester and a responder under one state (IBTA 10.3.1).
//!
//! Created in INIT, connected to RTR and RTS, held in SQD and released, ended in ERROR: by its owner, by a request of
//! ours that failed, or by a request of the peer that had to be refused. On the way to ERROR everything outstanding
//! completes.

use std::net::SocketAddr;

use crate::{
    completion::Status,
    config::{Peer, QueuePairConfig},
    context::Context,
    error::{ModifyError, PostError},
    events::AsyncEvent,
    memory::{ProtectionDomain, Segment},
    requester::{self, Failure, Requester},
    responder::Responder,
    segmentation_batch::{SegmentationBatch, Transmit},
    segments::SegmentList,
    state::QueuePairState,
    time::Timestamp,
    wire::{Packet, QueuePairNumber, TransportService},
    work_request::{Operation, Receive, RecvRequest, SendRequest},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Requester,
    Responder,
}

/// A queue pair.
pub(crate) struct QueuePair {
    number: QueuePairNumber,
    config: QueuePairConfig,
    state: QueuePairState,
    peer: Option<Peer>,
    requester: Requester,
    responder: Responder,
    receive_domain: ProtectionDomain,
    /// The event of this kind is out: COMM_EST in RTR, SQ_DRAINED in SQD.
    announced: bool,
    /// Which side may send first next time.
    turn: Side,
    /// It stands in the endpoint's transmit queue.
    pub(crate) queued: bool,
}

impl QueuePair {
    /// `receive_domain` is that of the receive queue, its own or shared.
    pub(crate) fn new(number: QueuePairNumber, config: QueuePairConfig, receive_domain: ProtectionDomain) -> Self {
        Self {
            number,
            config,
            state: QueuePairState::Init,
            peer: None,
            requester: Requester::new(config),
            responder: Responder::new(config, receive_domain),
            receive_domain,
            announced: false,
            turn: Side::Responder,
            queued: false,
        }
    }

    pub(crate) const fn state(&self) -> QueuePairState {
        self.state
    }

    pub(crate) const fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Work requests that were posted and have no completion.
    pub(crate) fn outstanding(&self) -> usize {
        self.requester.queue.len() + self.responder.outstanding()
    }

    pub(crate) const fn config(&self) -> &QueuePairConfig {
        &self.config
    }

    /// IBTA 10.3.1: the transitions that an owner may ask for, apart from those to ERROR and RESET, which always exist.
    fn enter(&mut self, to: QueuePairState) -> Result<(), ModifyError> {
        use QueuePairState::{Init, ReadyToReceive, ReadyToSend, SendQueueDrain};
        let from = self.state;
        match (from, to) {
            (Init, ReadyToReceive) | (ReadyToReceive | SendQueueDrain, ReadyToSend) | (ReadyToSend, SendQueueDrain) => {
                self.state = to;
                self.announced = false;
                Ok(())
            }
            _ => Err(ModifyError::Transition { from, to }),
        }
    }

    pub(crate) fn modify_to_ready_to_receive(&mut self, peer: Peer) -> Result<(), ModifyError> {
        self.enter(QueuePairState::ReadyToReceive)?;
        self.requester.connect(&peer);
        self.responder.connect(&peer);
        self.peer = Some(peer);
        Ok(())
    }

    pub(crate) fn modify_to_ready_to_send(&mut self) -> Result<(), ModifyError> {
        self.enter(QueuePairState::ReadyToSend)?;
        self.requester.resume();
        Ok(())
    }

    pub(crate) fn modify_to_send_queue_drain(&mut self, cx: &mut Context<'_>) -> Result<(), ModifyError> {
        self.enter(QueuePairState::SendQueueDrain)?;
        self.requester.drain();
        self.announce_drained(cx);
        Ok(())
    }

    fn announce_drained(&mut self, cx: &mut Context<'_>) {
        if self.state == QueuePairState::SendQueueDrain && !self.announced && self.requester.is_drained() {
            self.announced = true;
            cx.raise(AsyncEvent::SendQueueDrained(self.number));
        }
    }

    /// Whether it may send requests, and take answers to them.
    const fn is_sending(&self) -> bool {
        matches!(self.state, QueuePairState::ReadyToSend | QueuePairState::SendQueueDrain)
    }

    pub(crate) fn limit_requests(&mut self, max_rd_atomic: usize, window_packets: u32) {
        self.requester.limit(max_rd_atomic, window_packets);
    }

    pub(crate) fn limit_reads(&mut self, chunk_bytes: u32, window_bytes: u32) {
        self.requester.limit_reads(chunk_bytes, window_bytes);
    }

    /// Back to INIT: queues emptied without completions.
    pub(crate) fn reset(&mut self) {
        *self = Self { queued: self.queued, ..Self::new(self.number, self.config, self.receive_domain) };
    }

    /// By its owner: nothing more is sent, but for the refusal that may have ended it before.
    pub(crate) fn modify_to_error(&mut self, cx: &mut Context<'_>) {
        if self.state == QueuePairState::Error {
            self.responder.outbox.drop_responses();
            return;
        }
        self.responder.outbox.clear();
        self.fail(None, Status::Flushed, cx);
    }

    fn fail(&mut self, failure: Option<Failure>, receive: Status, cx: &mut Context<'_>) {
        let was_error = std::mem::replace(&mut self.state, QueuePairState::Error) == QueuePairState::Error;
        self.requester.flush(failure, self.number, cx);
        self.responder.flush(receive, self.number, cx);
        if self.config.shared_receive_queue.is_some() && !was_error {
            cx.raise(AsyncEvent::LastReceiveReached(self.number));
        }
    }

    pub(crate) fn post_send(
        &mut self,
        request: SendRequest,
        more: &[Segment],
        cx: &mut Context<'_>,
    ) -> Result<(), PostError> {
        let segments = SegmentList::new(request.operation.local(), more, self.config.max_sge)?;
        let bytes = segments.bytes();
        if matches!(request.operation, Operation::CompareSwap { .. } | Operation::FetchAdd { .. }) && bytes != 8 {
            return Err(PostError::AtomicSegment { bytes });
        }
        match self.state {
            QueuePairState::ReadyToSend | QueuePairState::SendQueueDrain => self.requester.post(request, segments),
            QueuePairState::Error => {
                cx.completions.push(requester::completion(&request, Status::Flushed, self.number));
                Ok(())
            }
            state => Err(PostError::State(state)),
        }
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
        if self.responder.receives.len() >= self.config.recv_depth {
            return Err(PostError::QueueFull { key: "recv_depth", depth: self.config.recv_depth });
        }
        self.responder.receives.push_back(Receive::new(request, more, self.config.max_sge)?);
        if self.state == QueuePairState::Error {
            self.responder.flush(Status::Flushed, self.number, cx);
        }
        Ok(())
    }

    /// Takes a packet from the peer whose ICRC was right.
    pub(crate) fn handle_packet(&mut self, packet: &Packet<'_>, cx: &mut Context<'_>) {
        debug_assert_eq!(packet.opcode().service, TransportService::ReliableConnection);
        if self.state == QueuePairState::ReadyToReceive && !self.announced {
            self.announced = true;
            cx.raise(AsyncEvent::CommunicationEstablished(self.number));
        }
        if packet.opcode().kind.is_response() {
            if !self.is_sending() {
                cx.counters.dropped_ghost += 1;
            } else if let Err(failure) = self.requester.handle_response(packet, self.number, cx) {
                self.fail(Some(failure), Status::Flushed, cx);
                self.responder.outbox.clear();
            }
        } else if let Err(broken) = self.responder.handle_request(packet, self.number, cx) {
            // The outbox stays: answers to what came before, then the refusal.
            self.fail(None, broken.receive, cx);
        }
        self.announce_drained(cx);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        let timers = [self.requester.poll_timeout(), self.responder.outbox.poll_timeout()];
        timers.into_iter().flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, cx: &mut Context<'_>) {
        if self.responder.outbox.poll_timeout().is_some_and(|at| at <= cx.now) {
            self.responder.acknowledge();
        }
        if let Err(failure) = self.requester.handle_timeout(cx) {
            self.responder.outbox.clear();
            self.fail(Some(failure), Status::Flushed, cx);
        }
    }

    /// Writes a segmentation batch of one side; the sides take turns.
    pub(crate) fn poll_transmit(
        &mut self,
        source: SocketAddr,
        buf: &mut [u8],
        segments_max: usize,
        cx: &mut Context<'_>,
    ) -> Option<Transmit> {
        let peer = self.peer?;
        let packet_bytes = peer.path_mtu.packet_bytes_max();
        assert!(buf.len() >= packet_bytes, "the transmit buffer holds {} bytes of {packet_bytes}", buf.len());
        let other = if self.turn == Side::Requester { Side::Responder } else { Side::Requester };
        for side in [self.turn, other] {
            let mut batch = SegmentationBatch::new(buf, source, peer.address, segments_max, peer.path_mtu.has_icrc());
            match side {
                Side::Requester => {
                    self.transmit_requests(&mut batch, peer.queue_pair, cx);
                    // It costs next to nothing where a request goes the same way, and its own way a system call.
                    if self.responder.outbox.owes_acknowledgement_only() && batch.takes_acknowledgement() {
                        self.responder.acknowledge();
                        self.transmit_replies(&mut batch, peer.queue_pair, cx);
                    }
                }
                Side::Responder => self.transmit_replies(&mut batch, peer.queue_pair, cx),
            }
            if let Some(transmit) = batch.finish(self.number) {
                self.turn = if side == Side::Requester { Side::Responder } else { Side::Requester };
                cx.counters.packets_sent += transmit.segments as u64;
                return Some(transmit);
            }
        }
        None
    }

    fn transmit_requests(&mut self, batch: &mut SegmentationBatch<'_>, peer: QueuePairNumber, cx: &mut Context<'_>) {
        while self.is_sending() {
            match self.requester.peek(peer, cx.regions) {
                Ok(Some(packet)) if batch.fits(packet.repr.packet_bytes()) => {
                    batch.push(&packet);
                    self.requester.advance(cx.now, &packet);
                }
                Ok(_) => return,
                Err(failure) => {
                    self.responder.outbox.clear();
                    self.fail(Some(failure), Status::Flushed, cx);
                }
            }
        }
    }

    fn transmit_replies(&mut self, batch: &mut SegmentationBatch<'_>, peer: QueuePairNumber, cx: &mut Context<'_>) {
        let domain = self.config.protection_domain;
        loop {
            match self.responder.outbox.peek(peer, self.requester.mtu_bytes(), domain, cx.regions) {
                Ok(Some(packet)) if batch.fits(packet.repr.packet_bytes()) => {
                    batch.push(&packet);
                    self.responder.outbox.advance();
                }
                Ok(_) => return,
                Err(_) if self.responder.outbox.skip_again() => {}
                Err(psn) => {
                    self.responder.refuse_read(psn, self.number, cx);
                    self.fail(None, Status::Flushed, cx);
                }
            }
        }
    }
}
