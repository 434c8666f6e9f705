//! One reliable connection: a requester and a responder under one state (IBTA 10.3.1).
//!
//! Created in INIT, connected to RTR and RTS, ended in ERROR: by its owner, by a request of ours that failed, or by a
//! request of the peer that had to be refused. On the way to ERROR everything outstanding completes.

use std::net::SocketAddr;

use crate::{
    completion::{CompletionQueue, Status},
    config::{Peer, QueuePairConfig, QueuePairState},
    counters::Counters,
    endpoint::{ConnectError, Transmit},
    region::RegionTable,
    requester::{self, Failure, Requester},
    responder::Responder,
    run::Run,
    time::Timestamp,
    wire::{Packet, QueuePairNumber, TransportService},
    work_request::{PostError, RecvRequest, SendRequest},
};

/// What a queue pair shares with the others of its endpoint.
pub(crate) struct Context<'a> {
    pub(crate) now: Timestamp,
    pub(crate) regions: &'a mut RegionTable,
    pub(crate) completions: &'a mut CompletionQueue,
    pub(crate) counters: &'a mut Counters,
}

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
    /// Which side may send first next time.
    turn: Side,
    /// It stands in the endpoint's line of those that may have something to send.
    pub(crate) queued: bool,
}

impl QueuePair {
    pub(crate) fn new(number: QueuePairNumber, config: QueuePairConfig) -> Self {
        Self {
            number,
            config,
            state: QueuePairState::Init,
            peer: None,
            requester: Requester::new(config),
            responder: Responder::new(config),
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
        self.requester.queue.len() + self.responder.receives.len()
    }

    pub(crate) fn modify_to_ready_to_receive(&mut self, peer: Peer) -> Result<(), ConnectError> {
        if self.state != QueuePairState::Init {
            return Err(ConnectError::State(self.state));
        }
        self.requester.connect(&peer);
        self.responder.connect(&peer);
        self.peer = Some(peer);
        self.state = QueuePairState::ReadyToReceive;
        Ok(())
    }

    pub(crate) fn modify_to_ready_to_send(&mut self) -> Result<(), ConnectError> {
        if self.state != QueuePairState::ReadyToReceive {
            return Err(ConnectError::State(self.state));
        }
        self.state = QueuePairState::ReadyToSend;
        Ok(())
    }

    pub(crate) fn limit_requests(&mut self, max_rd_atomic: usize, window_packets: u32) {
        self.requester.limit(max_rd_atomic, window_packets);
    }

    /// Back to INIT: queues emptied without completions.
    pub(crate) fn reset(&mut self) {
        *self = Self { queued: self.queued, ..Self::new(self.number, self.config) };
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
        self.state = QueuePairState::Error;
        self.requester.flush(failure, self.number, cx);
        self.responder.flush(receive, self.number, cx);
    }

    pub(crate) fn post_send(&mut self, request: SendRequest, cx: &mut Context<'_>) -> Result<(), PostError> {
        match self.state {
            QueuePairState::ReadyToSend => self.requester.post(request),
            QueuePairState::Error => {
                cx.completions.push(requester::completion(&request, Status::Flushed, self.number));
                Ok(())
            }
            state => Err(PostError::State(state)),
        }
    }

    pub(crate) fn post_recv(&mut self, request: RecvRequest, cx: &mut Context<'_>) -> Result<(), PostError> {
        if self.responder.receives.len() >= self.config.recv_depth {
            return Err(PostError::QueueFull { depth: self.config.recv_depth });
        }
        self.responder.receives.push_back(request);
        if self.state == QueuePairState::Error {
            self.responder.flush(Status::Flushed, self.number, cx);
        }
        Ok(())
    }

    /// Takes a packet from the peer whose ICRC was right.
    pub(crate) fn handle_packet(&mut self, packet: &Packet<'_>, cx: &mut Context<'_>) {
        debug_assert_eq!(packet.opcode().service, TransportService::ReliableConnection);
        if packet.opcode().kind.is_response() {
            if self.state != QueuePairState::ReadyToSend {
                cx.counters.dropped_ghost += 1;
            } else if let Err(failure) = self.requester.handle_response(packet, self.number, cx) {
                self.fail(Some(failure), Status::Flushed, cx);
                self.responder.outbox.clear();
            }
        } else if let Err(broken) = self.responder.handle_request(packet, self.number, cx) {
            // The outbox stays: answers to what came before, then the refusal.
            self.fail(None, broken.receive, cx);
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.requester.poll_timeout()
    }

    pub(crate) fn handle_timeout(&mut self, cx: &mut Context<'_>) {
        if let Err(failure) = self.requester.handle_timeout(cx) {
            self.responder.outbox.clear();
            self.fail(Some(failure), Status::Flushed, cx);
        }
    }

    /// Writes a run of packets of one side; the sides take turns.
    pub(crate) fn poll_transmit(
        &mut self,
        source: SocketAddr,
        buf: &mut [u8],
        segments_max: usize,
        cx: &mut Context<'_>,
    ) -> Option<Transmit> {
        let peer = self.peer?;
        let other = if self.turn == Side::Requester { Side::Responder } else { Side::Requester };
        for side in [self.turn, other] {
            let mut run = Run::new(buf, source, peer.address, segments_max);
            match side {
                Side::Requester => self.transmit_requests(&mut run, peer.queue_pair, cx),
                Side::Responder => self.transmit_replies(&mut run, peer.queue_pair, cx),
            }
            if let Some(transmit) = run.finish() {
                self.turn = if side == Side::Requester { Side::Responder } else { Side::Requester };
                cx.counters.packets_sent += transmit.segments as u64;
                return Some(transmit);
            }
        }
        None
    }

    fn transmit_requests(&mut self, run: &mut Run<'_>, peer: QueuePairNumber, cx: &mut Context<'_>) {
        while self.state == QueuePairState::ReadyToSend {
            match self.requester.peek(peer, cx.regions) {
                Ok(Some(packet)) if run.fits(packet.repr.packet_bytes()) => {
                    run.push(&packet);
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

    fn transmit_replies(&mut self, run: &mut Run<'_>, peer: QueuePairNumber, cx: &mut Context<'_>) {
        let domain = self.config.protection_domain;
        loop {
            match self.responder.outbox.peek(peer, self.requester.mtu_bytes(), domain, cx.regions) {
                Ok(Some(packet)) if run.fits(packet.repr.packet_bytes()) => {
                    run.push(&packet);
                    self.responder.outbox.advance();
                }
                Ok(_) => return,
                Err(psn) => {
                    self.responder.refuse_read(psn, cx);
                    self.fail(None, Status::Flushed, cx);
                }
            }
        }
    }
}
