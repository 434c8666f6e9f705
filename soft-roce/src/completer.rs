//! Answers come back to the sending side: acknowledgements, refusals, READ and atomic responses (IBTA 9.7.5, 9.7.6).
//!
//! One pointer, `acknowledged`, moves over all sequence numbers. SENDs and WRITEs are acknowledged in bulk; the numbers
//! of a READ or atomic are passed only by the response that carries each. An answer beyond such a number that has not
//! been answered itself proves a loss (an implied NAK), and is repaired at once.

use crate::{
    completion::Status,
    context::Context,
    requester::{Failure, Requester},
    wire::{NakCode, Packet, PacketKind, Psn, QueuePairNumber, Syndrome, rnr_delay},
};

/// The `rnr_retry` that means no limit (IBTA 9.7.5.2.8).
const RNR_RETRY_FOR_EVER: u8 = 7;

impl Requester {
    /// Takes a response packet. An error ends the queue pair.
    pub(crate) fn handle_response(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Failure> {
        let psn = packet.psn();
        if psn.is_before(self.acknowledged) || !psn.is_before(self.sent) {
            // Stale, or an answer to what was never asked ("ghost").
            cx.counters.dropped_ghost += 1;
            return Ok(());
        }
        match (packet.opcode().kind, packet.aeth().map(|aeth| aeth.syndrome)) {
            (PacketKind::Acknowledge, Some(syndrome)) => self.on_acknowledge(psn, syndrome, number, cx),
            (PacketKind::AtomicAcknowledge, _) => self.on_atomic_response(packet, number, cx),
            _ => self.on_read_response(packet, number, cx),
        }?;
        self.catch_up(number, cx);
        Ok(())
    }

    fn on_acknowledge(
        &mut self,
        psn: Psn,
        syndrome: Syndrome,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Failure> {
        match syndrome {
            Syndrome::Ack { .. } => {
                self.reach(psn.plus(1), number, cx);
                self.conclude_probe(cx);
                Ok(())
            }
            Syndrome::ReceiverNotReady { timer } => self.on_receiver_not_ready(psn, timer, number, cx),
            Syndrome::Nak(NakCode::SequenceError) => {
                // It says so once. If a response before is missing as well, both are repaired together.
                self.settle(psn, number, cx);
                self.repair_gap(cx);
                Ok(())
            }
            Syndrome::Nak(code) => {
                if !self.reach(psn, number, cx) {
                    return Ok(());
                }
                let status = match code {
                    NakCode::RemoteAccess => Status::RemoteAccess,
                    NakCode::RemoteOperation => Status::RemoteOperation,
                    NakCode::InvalidRequest | NakCode::SequenceError => Status::RemoteInvalidRequest,
                };
                Err(Failure { psn, status })
            }
            Syndrome::Reserved(_) => {
                cx.counters.dropped_ghost += 1;
                Ok(())
            }
        }
    }

    /// IBTA 9.7.5.2.8: everything before `psn` has arrived; `psn` must wait for a receive.
    fn on_receiver_not_ready(
        &mut self,
        psn: Psn,
        timer: u8,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Failure> {
        if !self.settle(psn, number, cx) {
            self.repair_gap(cx);
            return Ok(());
        }
        if self.wait_until.is_some() {
            // A second one while we wait is a duplicate: it must not cost a retry.
            return Ok(());
        }
        let limit = self.rnr_retry_limit();
        if limit != RNR_RETRY_FOR_EVER {
            if self.rnr_retries >= u32::from(limit) {
                return Err(Failure { psn, status: Status::ReceiverNotReadyRetryExceeded });
            }
            self.rnr_retries += 1;
        }
        self.wait(cx.now + rnr_delay(timer));
        Ok(())
    }

    fn on_read_response(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Failure> {
        let psn = packet.psn();
        if self.settle(psn, number, cx) {
            // Unless it came early before, so that what followed is settled with it.
            if psn == self.acknowledged {
                self.take_read_response(packet, cx).map_err(|status| Failure { psn, status })?;
                self.acknowledge(psn.plus(1), number, cx);
            }
            return Ok(());
        }
        let first = self.is_first_ahead(psn);
        if self.take_read_response(packet, cx).is_ok() {
            self.arrivals.insert(self.acknowledged, psn);
        }
        if first {
            self.repair_hole(cx);
        }
        Ok(())
    }

    /// Puts the payload in its place.
    fn take_read_response(&self, packet: &Packet<'_>, cx: &Context<'_>) -> Result<(), Status> {
        let psn = packet.psn();
        // A middle response has no AETH; in every other the syndrome must be an acknowledgement.
        let accepted = packet.aeth().is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack { .. }));
        let entry = self.entry(psn).filter(|entry| entry.is_read() && accepted).ok_or(Status::BadResponse)?;
        let range = entry.range(psn.since(entry.first) as u32, 1, self.mtu_bytes());
        if packet.payload().len() != range.len() {
            return Err(Status::BadResponse);
        }
        self.local(entry, range, true, cx.regions)?.write(&[], packet.payload());
        Ok(())
    }

    /// What came early may be next now, or shows that something else before it is missing too.
    fn catch_up(&mut self, number: QueuePairNumber, cx: &mut Context<'_>) {
        while let Some(early) = self.arrivals.first(self.acknowledged) {
            if self.acknowledged.is_before(self.hole_end) {
                // On its way already.
                self.ahead = self.arrivals.last();
                return;
            }
            if !self.settle(early, number, cx) {
                self.ahead = self.arrivals.last();
                self.repair_hole(cx);
                return;
            }
        }
    }

    fn on_atomic_response(
        &mut self,
        packet: &Packet<'_>,
        number: QueuePairNumber,
        cx: &mut Context<'_>,
    ) -> Result<(), Failure> {
        let psn = packet.psn();
        if !self.reach(psn, number, cx) {
            return Ok(());
        }
        let failure = |status| Failure { psn, status };
        let entry = self.entry(psn).filter(|entry| entry.wants_response() && !entry.is_read());
        let (entry, original) = entry.zip(packet.atomic_ack_eth()).ok_or(failure(Status::BadResponse))?;
        let local = self.local(entry, 0..entry.segments.bytes(), true, cx.regions).map_err(failure)?;
        local.write(&[], &original.to_ne_bytes());
        self.acknowledge(psn.plus(1), number, cx);
        Ok(())
    }

    /// The peer has handled everything before `psn`. False if a response to a READ or atomic before it is missing: then
    /// everything from there is asked for again.
    fn reach(&mut self, psn: Psn, number: QueuePairNumber, cx: &mut Context<'_>) -> bool {
        let reached = self.settle(psn, number, cx);
        if !reached && self.is_first_ahead(psn) {
            self.repair_gap(cx);
        }
        reached
    }

    /// Acknowledges everything before `psn`, or before the first response that is missing: then false.
    fn settle(&mut self, psn: Psn, number: QueuePairNumber, cx: &mut Context<'_>) -> bool {
        let from = self.acknowledged;
        let missing = self
            .queue
            .iter()
            .take_while(|entry| entry.first.is_before(psn))
            .find(|entry| entry.wants_response() && from.is_before(entry.end()))
            .map(|entry| if entry.first.is_before(from) { from } else { entry.first })
            .filter(|missing| missing.is_before(psn));
        self.acknowledge(missing.unwrap_or(psn), number, cx);
        missing.is_none()
    }

    /// One loss makes everything behind it come too early, in ascending order: only the first counts. When it begins
    /// from lower numbers again, that is the answer to the repeated request, with another loss at its head.
    fn is_first_ahead(&mut self, psn: Psn) -> bool {
        let last = self.ahead.replace(psn);
        last.is_none_or(|last| !last.is_before(psn))
    }
}
