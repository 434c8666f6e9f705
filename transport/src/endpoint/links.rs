//! The bootstrap side of an endpoint: TCP connections come from the acceptor or are opened, turn into channels, and
//! tell when they end.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::io;

use proto::Timestamp;
use soft_roce::PathMtu;

use super::{
    ARRIVALS, Connection, Endpoint, NAMES, Stage, TURNS_MAX,
    acceptor::Proved,
    names::{Found, Peer},
};
use crate::{
    Certificates, ConnectionId, DisconnectReason, Event,
    bootstrap::{Bootstrap, BootstrapEvent, NONCE_BYTES, Parameters},
    channel::{Channel, RECEIVE_DEPTH},
    device::Device,
    error::{BootstrapError, ChannelError, ConnectError},
    limits::HELLO_BYTES_MAX,
    link::Link,
    poller::Interest,
    resolve::choose,
};

/// Peers taken over from the acceptor in one turn.
const ARRIVALS_MAX: usize = 16;

impl Endpoint {
    /// Opens a connection under this name.
    pub(super) fn connect_to(&mut self, now: Timestamp, id: ConnectionId, to: Peer, hello: Vec<u8>) {
        if let Err(reason) = self.try_connect(now, id, to.clone(), hello) {
            let reason = DisconnectReason::new(format!("cannot connect to {to}: {reason}"));
            self.events.push_back((Event::Disconnected { connection: id, reason }, None));
        }
    }

    /// Connects to those whose names have been looked up.
    fn take_names(&mut self, now: Timestamp) {
        while let Some(Found { id, name, hello, addresses }) = self.names.poll_found(now) {
            let own = self.device.address().udp().map(|own| own.ip());
            match addresses.map(|found| choose(&found, own, id.0)) {
                Ok(Some(at)) => self.connect_to(now, id, Peer::named(name, at), hello),
                Ok(None) => unreachable!("an answer has an address"),
                Err(reason) => {
                    // Only those are dialled by name.
                    let reason = DisconnectReason::new(format!("scheduler, schedulers: {reason}"));
                    self.events.push_back((Event::Disconnected { connection: id, reason }, None));
                }
            }
        }
    }

    fn try_connect(&mut self, now: Timestamp, id: ConnectionId, to: Peer, hello: Vec<u8>) -> Result<(), ConnectError> {
        if self.connections.len() + self.names.len() >= self.connections_max {
            return Err(ConnectError::ConnectionsMax(self.connections_max));
        }
        if hello.len() > HELLO_BYTES_MAX {
            return Err(ConnectError::HelloTooLong(hello.len()));
        }
        let bootstrap = Bootstrap::client(now, self.members.identity(), rand::random::<[u8; NONCE_BYTES]>());
        let tls = self.certificates.as_ref().map(Certificates::known);
        let link = Link::connect(to.at, tls.as_ref(), bootstrap)?;
        Ok(self.add_connection(id, link, to, Stage::Calling { hello })?)
    }

    fn add_connection(&mut self, id: ConnectionId, link: Link, peer: Peer, stage: Stage) -> io::Result<()> {
        let interest = Interest::ReadWrite;
        self.poller.links.add(&link, id.0, interest)?;
        self.bootstraps_at = self.bootstraps_at.min(link.bootstrap.poll_timeout().unwrap_or(Timestamp::NEVER));
        self.connections.insert(id, Connection { link, interest, peer, stage, due: false, is_starved: false });
        Ok(())
    }

    pub(super) fn try_accept(
        &mut self,
        now: Timestamp,
        id: ConnectionId,
        create: impl FnOnce(&mut Device) -> Result<(Channel, Vec<u8>), ChannelError>,
    ) -> Result<(), BootstrapError> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let Stage::Deciding { parameters: peer } = connection.stage else { return Ok(()) };
        let ours = self.device.path_mtu(peer.address.udp().map_or(connection.peer.at.ip(), |at| at.ip()))?;
        let (mut channel, welcome) = create(&mut self.device)?;
        let connected = match welcome.len() {
            ..=HELLO_BYTES_MAX => {
                channel.connect(&mut self.device, &peer, ours.min(peer.path_mtu())).map_err(Into::into)
            }
            found => Err(BootstrapError::WelcomeTooLong(found)),
        };
        if let Err(reason) = connected {
            channel.close(&mut self.device, &mut self.reads);
            return Err(reason);
        }
        self.regions += usize::from(channel.has_opening());
        self.by_queue_pair.insert(channel.number(), id);
        self.reads.open(id);
        let parameters = self.parameters(&channel, ours);
        let connection = self.connections.get_mut(&id).expect("looked up above");
        connection.link.bootstrap.accept(now, parameters, welcome);
        connection.stage = Stage::Up { channel: Box::new(channel), peer };
        Ok(())
    }

    /// Serves the TCP sockets that are ready. True if there were any.
    pub(super) fn poll_links(&mut self, now: Timestamp) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        self.poller.links.poll(&mut ready);
        for &number in &ready {
            match number {
                ARRIVALS => self.take_arrivals(now),
                NAMES => self.take_names(now),
                _ => {
                    let id = ConnectionId(number);
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.link.handle_ready(now, &mut self.buffer);
                    }
                    self.on_link(now, id);
                }
            }
        }
        let progressed = !ready.is_empty();
        self.ready = ready;
        progressed
    }

    /// Peers have come and proved themselves.
    fn take_arrivals(&mut self, now: Timestamp) {
        let arrivals = self.acceptor.as_ref().map(|acceptor| acceptor.take(ARRIVALS_MAX));
        for Proved { mut link, peer } in arrivals.into_iter().flatten() {
            link.bootstrap.handle_handover(now);
            if self.connections.len() >= self.connections_max {
                link.bootstrap.close(&ConnectError::ConnectionsMax(self.connections_max).to_string());
                link.transmit();
                continue;
            }
            let id = ConnectionId(self.next_connection);
            self.next_connection += 1;
            match self.add_connection(id, link, Peer::at(peer), Stage::Unannounced) {
                // It may have said more than its proof already.
                Ok(()) => self.on_link(now, id),
                Err(error) => tracing::warn!(%peer, "cannot watch a connection: {error}"),
            }
        }
    }

    pub(super) fn run_bootstrap_timers(&mut self, now: Timestamp) {
        if now < self.bootstraps_at {
            return;
        }
        self.take_names(now);
        self.bootstraps_at = self.names.poll_timeout();
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.link.bootstrap.handle_timeout(now);
            }
            self.on_link(now, id);
        }
    }

    /// Goes on with a connection whose bootstrap was given something.
    pub(super) fn on_link(&mut self, now: Timestamp, id: ConnectionId) {
        while let Some(event) = self.connections.get_mut(&id).and_then(|c| c.link.bootstrap.poll_event()) {
            if let Err(reason) = self.on_bootstrap(now, id, event) {
                let reason = reason.to_string();
                self.on_down(id, &reason, &reason);
            }
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.link.transmit();
        let wanted = if connection.link.wants_write() { Interest::ReadWrite } else { Interest::Read };
        if wanted != connection.interest && self.poller.links.modify(&connection.link, id.0, wanted).is_ok() {
            connection.interest = wanted;
        }
        let due = connection.link.bootstrap.poll_timeout().unwrap_or(Timestamp::NEVER);
        self.bootstraps_at = self.bootstraps_at.min(due);
    }

    fn on_bootstrap(&mut self, now: Timestamp, id: ConnectionId, event: BootstrapEvent) -> Result<(), BootstrapError> {
        match event {
            BootstrapEvent::Proved => self.on_proved(now, id),
            BootstrapEvent::Incoming { parameters, hello } => {
                let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
                connection.stage = Stage::Deciding { parameters };
                let event = Event::Incoming { connection: id, peer: connection.peer.at, hello };
                self.events.push_back((event, None));
                Ok(())
            }
            BootstrapEvent::Answered { parameters, welcome } => self.on_answered(id, parameters, welcome),
            BootstrapEvent::Ready => {
                self.start(id);
                Ok(())
            }
            BootstrapEvent::Closed(reason) => {
                // What the peer sent before its end counts, be it frames or the NAK that is the true cause.
                (0..TURNS_MAX).take_while(|_| self.receive(now).more).count();
                Err(BootstrapError::Closed(reason))
            }
        }
    }

    fn on_proved(&mut self, now: Timestamp, id: ConnectionId) -> Result<(), BootstrapError> {
        let Some(Connection { peer, stage: Stage::Calling { hello }, .. }) = self.connections.get_mut(&id) else {
            return Err(BootstrapError::OutOfOrder);
        };
        let (peer, hello) = (peer.at.ip(), std::mem::take(hello));
        let path_mtu = self.device.path_mtu(peer)?;
        let channel = Channel::create(&mut self.device, id)?;
        self.by_queue_pair.insert(channel.number(), id);
        self.device.invite(channel.number(), peer);
        let parameters = self.parameters(&channel, path_mtu);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.link.bootstrap.offer(now, parameters, hello);
            connection.stage = Stage::Offered { channel: Box::new(channel), path_mtu };
        }
        Ok(())
    }

    fn on_answered(&mut self, id: ConnectionId, peer: Parameters, welcome: Vec<u8>) -> Result<(), BootstrapError> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let Stage::Offered { channel, path_mtu } = &mut connection.stage else {
            return Err(BootstrapError::OutOfOrder);
        };
        channel.connect(&mut self.device, &peer, (*path_mtu).min(peer.path_mtu()))?;
        if let Stage::Offered { channel, .. } = std::mem::replace(&mut connection.stage, Stage::Unannounced) {
            connection.stage = Stage::Up { channel, peer };
        }
        connection.link.bootstrap.ready();
        self.reads.open(id);
        self.start(id);
        self.events.push_back((Event::Connected { connection: id, welcome }, None));
        Ok(())
    }

    /// Both queue pairs of an open connection receive: what waits may go.
    fn start(&mut self, id: ConnectionId) {
        let Some(Connection { stage: Stage::Up { channel, peer }, .. }) = self.connections.get_mut(&id) else { return };
        channel.start();
        let posted_max = peer.max_dest_rd_atomic.min(self.offer.reads_max).into();
        self.reads.start(id, posted_max, self.device.has_ring(channel.number()));
        self.reads_due = true;
        self.mark_due(id);
    }

    /// What we tell a peer of a connection's queue pair.
    fn parameters(&self, channel: &Channel, path_mtu: PathMtu) -> Parameters {
        Parameters {
            incarnation: self.incarnation,
            name: self.name,
            address: self.device.address(),
            queue_pair: channel.number().0,
            psn: channel.psn().value(),
            path_mtu_bytes: path_mtu.bytes() as u16,
            max_dest_rd_atomic: self.offer.reads_answered_max,
            receive_depth: RECEIVE_DEPTH,
            window_bytes: self.offer.peer_window_bytes,
            ring: self.device.ring_name(channel.number()),
        }
    }
}
