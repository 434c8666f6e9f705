//! The endpoint's side of datagram queue pairs.

use std::net::SocketAddr;

use super::{Context, Endpoint};
use crate::{
    datagram::{DatagramConfig, DatagramQueuePair},
    error::CreateError,
    time::Timestamp,
    wire::{Packet, QueuePairNumber},
};

impl Endpoint {
    /// Makes a datagram queue pair, in INIT. It goes to RTR by [`Self::modify_datagrams_to_ready_to_receive`] and on as
    /// every other.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn create_datagram_queue_pair(&mut self, config: DatagramConfig) -> Result<QueuePairNumber, CreateError> {
        config.check()?;
        let number = self.free_number()?;
        let receive_domain = self.attach(config.shared_receive_queue)?.unwrap_or(config.protection_domain);
        let first = self.random_psn();
        self.datagrams.insert(number, DatagramQueuePair::new(number, config, receive_domain, first));
        Ok(number)
    }

    pub(super) fn handle_datagram(&mut self, now: Timestamp, source: SocketAddr, packet: &Packet<'_>) {
        let queue_pair = self.datagrams.get_mut(&packet.destination());
        let Some(queue_pair) = queue_pair.filter(|queue_pair| queue_pair.is_receiving()) else {
            self.counters.dropped_no_queue_pair += 1;
            return;
        };
        if !packet.is_default_partition() {
            self.counters.dropped_wrong_peer += 1;
            return;
        }
        let accept = queue_pair.identification();
        let Some(path) = self.verifier.verify(source, self.config.local, packet.covered(), packet.icrc(), accept)
        else {
            self.counters.dropped_icrc += 1;
            return;
        };
        self.counters.packets_received += 1;
        queue_pair.handle_packet(packet, &path, &mut context!(self, now));
    }
}
