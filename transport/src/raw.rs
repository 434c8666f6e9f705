//! One queue pair of an arm and nothing around it: for measuring what the arm itself costs, as `perftest` does.
//!
//! Life: opened with its device, connected to the peer whose address its owner has brought, then posted to and polled.
//! Deliberately absent: what makes a connection of a queue pair ([`crate::Endpoint`] has it): bootstrap and proof,
//! credits, budgets, liveness.

use proto::Timestamp;
use soft_roce::{Completion, Operation, ProtectionDomain, Psn, QueuePairNumber, RecvRequest, SendRequest};

use crate::{
    Access, Arm, PeerName, Region, RegionKey,
    bootstrap::Parameters,
    channel::READS_POSTED_MAX,
    device::{
        Device,
        interface::{Demand, DeviceEvent},
    },
    error::RawError,
};

/// A reliable queue pair on a device of its own.
pub struct RawQueuePair {
    device: Device,
    number: QueuePairNumber,
    psn: Psn,
    depth: u16,
}

/// What the other end must know of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct RawAddress(Parameters);

impl RawQueuePair {
    /// Opens the device and creates a queue pair with room for `depth` sends and as many receives.
    ///
    /// # Errors
    /// One line that names what is missing, taken or out of bounds.
    pub fn open(arm: Arm, depth: u16) -> Result<Self, RawError> {
        let demand = Demand {
            queue_pairs_max: 1,
            regions_max: 1,
            send_depth: depth.into(),
            receive_depth: depth.into(),
            reads_max: READS_POSTED_MAX,
            read_budget_bytes: 0,
        };
        let mut device = Device::open(arm, demand)?;
        let number = device.create_queue_pair(ProtectionDomain::default())?;
        let psn = device.random_psn();
        Ok(Self { device, number, psn, depth })
    }

    /// Registers the memory that it works on.
    ///
    /// # Errors
    /// One line that names the limit that is reached.
    pub fn register(&mut self, region: &Region, access: Access) -> Result<RegionKey, RawError> {
        Ok(self.device.register(region, access, ProtectionDomain::default())?)
    }

    /// For the other end.
    ///
    /// # Errors
    /// One line if the link is down.
    pub fn address(&mut self) -> Result<RawAddress, RawError> {
        let (offer, address) = (self.device.offer(), self.device.address());
        let ip = address.udp().map_or(std::net::Ipv4Addr::UNSPECIFIED.into(), |at| at.ip());
        self.device.invite(self.number, ip);
        Ok(RawAddress(Parameters {
            name: PeerName::NONE,
            incarnation: 0,
            address,
            queue_pair: self.number.0,
            psn: self.psn.value(),
            path_mtu_bytes: self.device.path_mtu(ip)?.bytes() as u16,
            max_dest_rd_atomic: offer.reads_answered_max,
            receive_depth: self.depth,
            window_bytes: offer.peer_window_bytes,
            ring: self.device.ring_name(self.number),
        }))
    }

    /// Tells it who its peer is: from now on it receives and sends.
    ///
    /// # Errors
    /// One line if the device cannot reach that peer.
    pub fn connect(&mut self, peer: &RawAddress) -> Result<(), RawError> {
        let ip = peer.0.address.udp().map_or(std::net::Ipv4Addr::UNSPECIFIED.into(), |at| at.ip());
        let path_mtu = self.device.path_mtu(ip)?.min(peer.0.path_mtu());
        Ok(self.device.connect_queue_pair(self.number, self.psn, &peer.0, path_mtu)?)
    }

    /// Posts a SEND, a WRITE (with an immediate or without) or a READ, which leaves at once.
    ///
    /// # Errors
    /// One line if it cannot be carried out.
    pub fn post_send(&mut self, request: SendRequest) -> Result<(), RawError> {
        let (Operation::Send { .. }
        | Operation::Write { .. }
        | Operation::WriteWithImmediate { .. }
        | Operation::Read { .. }) = request.operation
        else {
            return Err(RawError::Operation(format!("{:?}", request.operation)));
        };
        self.device.post_send(self.number, request)?;
        self.device.ring();
        Ok(())
    }

    /// Posts a receive, which stands when the next send leaves, or with the next [`Self::poll`].
    ///
    /// # Errors
    /// As [`Self::post_send`].
    pub fn post_recv(&mut self, request: RecvRequest) -> Result<(), RawError> {
        Ok(self.device.post_recv(self.number, request)?)
    }

    /// One look, without blocking: takes in what has come and sends what is due, until a completion is there. The time
    /// is asked for only by an arm that has timers of its own: where a clock is a system call, it costs as much as a
    /// look.
    pub fn poll(&mut self, now: impl FnOnce() -> Timestamp) -> Option<Completion> {
        if let Some(completion) = self.device.poll_completion() {
            return Some(completion);
        }
        self.device.ring();
        let now = if self.device.soft().is_some() { now() } else { Timestamp::PAST };
        if !self.device.receive(now).any && self.device.is_timer_due(now) {
            self.device.handle_timeout(now);
        }
        self.device.transmit(now);
        // What is posted flushes, which its owner sees.
        if let Some(DeviceEvent::QueuePairFailed { number, reason }) = self.device.poll_event() {
            tracing::error!("the queue pair has failed: {reason}");
            self.device.modify_to_error(number);
        }
        self.device.poll_completion()
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // On the loopback network, in real time.
mod tests {
    use soft_roce::{Remote, Segment, Status};

    use super::*;
    use crate::{Clock, EndpointConfig};

    #[test]
    fn a_write_and_a_send_arrive() {
        let clock = Clock::start();
        let mut ends = [(); 2].map(|()| RawQueuePair::open(EndpointConfig::default().arm, 4).unwrap());
        let regions = [(); 2].map(|()| Region::allocate(8192).unwrap());
        let access = Access { remote_read: true, remote_write: true };
        let keys = [0, 1].map(|end| ends[end].register(&regions[end], access).unwrap());
        let addresses = [0, 1].map(|end| ends[end].address().unwrap());
        (0..2).for_each(|end| ends[end].connect(&addresses[1 - end]).unwrap());
        regions[0].write(0, b"written and sent");
        let segment = |end: usize, offset, bytes| Segment { lkey: keys[end].lkey, offset, bytes };
        ends[1].post_recv(RecvRequest { id: 9, segment: segment(1, 100, 8) }).unwrap();
        let remote = Remote { address: keys[1].address, rkey: keys[1].rkey };
        let write = Operation::Write { local: segment(0, 0, 8), remote };
        ends[0].post_send(SendRequest::new(1, write)).unwrap();
        ends[0].post_send(SendRequest::new(2, Operation::Send { local: segment(0, 8, 8) })).unwrap();
        let mut done = Vec::new();
        while done.len() < 3 {
            let polled = ends.iter_mut().enumerate().filter_map(|(end, pair)| Some((end, pair.poll(|| clock.now())?)));
            done.extend(polled.map(|(end, completion)| (end, completion.id, completion.status)));
        }
        done.sort_by_key(|&(end, id, _)| (end, id));
        let ok = Status::Success;
        assert_eq!(done, [(0, 1, ok), (0, 2, ok), (1, 9, ok)]);
        let mut bytes = [0; 8];
        regions[1].read(0, &mut bytes);
        assert_eq!(&bytes, b"written ");
        regions[1].read(100, &mut bytes);
        assert_eq!(&bytes, b"and sent");
    }
}
