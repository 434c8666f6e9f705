//! What the responder still has to send: acknowledgements, READ responses, atomic responses, in the order of sequence
//! numbers; and what it remembers to answer a repeated READ or atomic (IBTA 9.7.5.1.5, responder resources).
//!
//! READ responses are made one by one when there is room on the wire: a reply only knows how far it got. Bounded by
//! `max_dest_rd_atomic` READs and atomics, and one acknowledgement between any two of them.

use std::collections::VecDeque;

use crate::{
    memory::{Access, ProtectionDomain},
    region::{Denied, RegionTable},
    segmentation_batch::Outgoing,
    segments::Windows,
    time::Timestamp,
    wire::{Aeth, PacketKind, Position, Psn, QueuePairNumber, Repr, Reth, Syndrome},
};

/// A READ or atomic that a peer may ask for again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resource {
    pub(crate) first: Psn,
    pub(crate) packets: u32,
    pub(crate) answer: Answer,
    pub(crate) message_sequence: u32,
}

/// How a remembered request is answered.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    /// From memory, again each time.
    Read(Reth),
    /// With the saved original value: an atomic runs once.
    Atomic(u64),
}

impl Resource {
    const fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    fn covers(&self, psn: Psn) -> bool {
        !psn.is_before(self.first) && psn.is_before(self.end())
    }
}

#[derive(Debug, Clone, Copy)]
enum Reply {
    Acknowledge {
        psn: Psn,
        syndrome: Syndrome,
        message_sequence: u32,
    },
    /// `sent` packets of the resource are out.
    Respond {
        resource: Resource,
        sent: u32,
        is_again: bool,
    },
}

impl Reply {
    const fn psn(&self) -> Psn {
        match self {
            Self::Acknowledge { psn, .. } => *psn,
            Self::Respond { resource, .. } => resource.first,
        }
    }
}

/// Replies to send, and answered requests to remember.
pub(crate) struct Outbox {
    replies: VecDeque<Reply>,
    /// When what was carried out and did not ask for it is to be acknowledged, unless a reply does so before.
    acknowledge_by: Option<Timestamp>,
    resources: VecDeque<Resource>,
    resources_max: usize,
}

impl Outbox {
    pub(crate) const fn new(resources_max: usize) -> Self {
        Self { replies: VecDeque::new(), acknowledge_by: None, resources: VecDeque::new(), resources_max }
    }

    /// Acknowledges or refuses `psn`. What comes last speaks for all before it, so two in a row become one.
    pub(crate) fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome, message_sequence: u32) {
        self.acknowledge_by = None;
        if let Some(Reply::Acknowledge { .. }) = self.replies.back() {
            self.replies.pop_back();
        }
        self.replies.push_back(Reply::Acknowledge { psn, syndrome, message_sequence });
    }

    /// Something was carried out that is to be acknowledged at last then.
    pub(crate) fn acknowledge_by(&mut self, at: Timestamp) {
        self.acknowledge_by.get_or_insert(at);
    }

    /// When an acknowledgement is due that nobody has asked for.
    pub(crate) const fn poll_timeout(&self) -> Option<Timestamp> {
        self.acknowledge_by
    }

    /// Whether such an acknowledgement is all that there is to send.
    pub(crate) fn owes_acknowledgement_only(&self) -> bool {
        self.acknowledge_by.is_some() && self.replies.is_empty()
    }

    /// Whether a refusal of `psn` is still to be sent.
    pub(crate) fn refuses(&self, psn: Psn) -> bool {
        matches!(
            self.replies.back(),
            Some(Reply::Acknowledge { psn: refused, syndrome, .. })
                if *refused == psn && !matches!(syndrome, Syndrome::Ack { .. })
        )
    }

    /// Answers a new READ or atomic, and remembers it instead of the oldest: the peer has at most `max_dest_rd_atomic`
    /// of them outstanding, so it has the whole answer to the oldest.
    pub(crate) fn respond(&mut self, resource: Resource) {
        if self.resources.len() >= self.resources_max {
            let forgotten = self.resources.pop_front();
            self.replies.retain(|reply| match reply {
                Reply::Respond { resource, .. } => !forgotten.is_some_and(|old| old.covers(resource.first)),
                Reply::Acknowledge { .. } => true,
            });
        }
        self.resources.push_back(resource);
        // Its response speaks for all before it.
        self.acknowledge_by = None;
        self.replies.push_back(Reply::Respond { resource, sent: 0, is_again: false });
    }

    /// The remembered request that `psn` belongs to.
    pub(crate) fn resource(&self, psn: Psn) -> Option<&Resource> {
        self.resources.iter().find(|resource| resource.covers(psn))
    }

    /// Answers (part of) a remembered request again, unless that is still to be sent anyway. At most two answers to one
    /// request wait: one that goes to its end, and one for a part from its middle.
    pub(crate) fn respond_again(&mut self, again: Resource) {
        let Some(whole) = self.resource(again.first).copied() else { return };
        let is_part = |resource: &Resource| resource.end() != whole.end();
        let mut same = None;
        for (place, reply) in self.replies.iter().enumerate() {
            let Reply::Respond { resource, sent, .. } = reply else { continue };
            if !whole.covers(resource.first) {
                continue;
            }
            if !again.first.is_before(resource.first.plus(*sent)) && !resource.end().is_before(again.end()) {
                return;
            }
            if is_part(resource) == is_part(&again) {
                same = Some(place);
            }
        }
        let reply = Reply::Respond { resource: again, sent: 0, is_again: true };
        if let Some(place) = same {
            self.replies[place] = reply;
            return;
        }
        // A later number must not overtake this one: the peer would take it for another loss.
        let place = self.replies.iter().position(|reply| again.first.is_before(reply.psn()));
        self.replies.insert(place.unwrap_or(self.replies.len()), reply);
    }

    pub(crate) fn clear(&mut self) {
        self.acknowledge_by = None;
        self.replies.clear();
        self.resources.clear();
    }

    /// Reads no memory any more.
    pub(crate) fn drop_responses(&mut self) {
        self.resources.clear();
        self.replies.retain(|reply| matches!(reply, Reply::Acknowledge { .. }));
    }

    /// The next packet. `Err`: the region of a READ is gone meanwhile; the number is that of the response.
    pub(crate) fn peek<'r>(
        &self,
        peer: QueuePairNumber,
        mtu_bytes: u32,
        domain: ProtectionDomain,
        regions: &'r RegionTable,
    ) -> Result<Option<Outgoing<'r>>, Psn> {
        let Some(reply) = self.replies.front() else { return Ok(None) };
        match *reply {
            Reply::Acknowledge { psn, syndrome, message_sequence } => {
                let mut repr = Repr::reliable(PacketKind::Acknowledge, peer, psn);
                repr.aeth = Some(Aeth { syndrome, message_sequence });
                Ok(Some(Outgoing::new(repr, Windows::default())))
            }
            Reply::Respond { resource, sent, .. } => {
                let psn = resource.first.plus(sent);
                let aeth = Aeth { syndrome: Syndrome::ACK, message_sequence: resource.message_sequence };
                match resource.answer {
                    Answer::Atomic(original) => {
                        let mut repr = Repr::reliable(PacketKind::AtomicAcknowledge, peer, psn);
                        (repr.aeth, repr.atomic_ack_eth) = (Some(aeth), Some(original));
                        Ok(Some(Outgoing::new(repr, Windows::default())))
                    }
                    Answer::Read(reth) => {
                        let kind = PacketKind::read_response(Position::of(sent, resource.packets));
                        let mut repr = Repr::reliable(kind, peer, psn);
                        repr.aeth = kind.has_aeth().then_some(aeth);
                        let start = sent * mtu_bytes;
                        repr.payload_bytes = reth.bytes.saturating_sub(start).min(mtu_bytes) as usize;
                        let payload = readable(reth, start, repr.payload_bytes as u64, domain, regions);
                        payload.map(|payload| Some(Outgoing::new(repr, payload))).map_err(|Denied| psn)
                    }
                }
            }
        }
    }

    /// Notes that what `peek` gave is on its way.
    pub(crate) fn advance(&mut self) {
        let done = match self.replies.front_mut() {
            Some(Reply::Respond { resource, sent, .. }) => {
                *sent += 1;
                *sent >= resource.packets
            }
            Some(Reply::Acknowledge { .. }) => true,
            None => false,
        };
        if done {
            self.replies.pop_front();
        }
    }

    /// Gives up an answer that is given again, if that is next: what it is read from has gone, which is no mistake of a
    /// peer whose request was doubled on the way. One that still waits asks once more, until it gives up itself.
    pub(crate) fn skip_again(&mut self) -> bool {
        self.replies.pop_front_if(|reply| matches!(reply, Reply::Respond { is_again: true, .. })).is_some()
    }

    /// Drops what comes before a refusal of `psn`, which ends everything.
    pub(crate) fn refuse_only(&mut self, psn: Psn, syndrome: Syndrome, message_sequence: u32) {
        self.clear();
        self.acknowledge(psn, syndrome, message_sequence);
    }
}

/// The bytes of a READ from `start` on. For a READ of nothing the key is not looked at.
pub(crate) fn readable<'r>(
    reth: Reth,
    start: u32,
    bytes: u64,
    domain: ProtectionDomain,
    regions: &'r RegionTable,
) -> Result<Windows<'r>, Denied> {
    const READ: Access = Access { local_write: false, remote_read: true, remote_write: false, remote_atomic: false };
    if reth.bytes == 0 {
        return Ok(Windows::default());
    }
    let address = reth.address.checked_add(u64::from(start)).ok_or(Denied)?;
    let window = regions.remote(domain, reth.rkey, address, bytes, READ)?;
    Ok(Windows::from((window, bytes as usize)))
}
