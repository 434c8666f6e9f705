//! One endpoint with the members' connections to it: decodes what they say, and packs what they are told in a turn into
//! as few frames as hold it.

use std::{collections::BTreeMap, net::SocketAddr};

use proto::{
    BackendId, FrontendId, Timestamp,
    frame::{FrameWriter, Message, read_frame},
    hello::Member,
};
use transport::{ConnectionId, Endpoint};
use wincode::{SchemaWrite, config::DefaultConfig};

use crate::{shard::Violation, snapshot::Whereabouts};

/// What a member said to whom this connection serves.
pub(super) enum Said<F, B> {
    Frontend(FrontendId, F),
    Backend(BackendId, B),
}

pub(super) struct Connections {
    pub(super) endpoint: Endpoint,
    members: BTreeMap<ConnectionId, Member>,
    routes: BTreeMap<Member, Route>,
    /// Members with something in their frame.
    unsent: Vec<Member>,
}

struct Route {
    connection: ConnectionId,
    /// What it came from.
    address: SocketAddr,
    frame: FrameWriter,
    is_unsent: bool,
}

impl Connections {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, members: BTreeMap::new(), routes: BTreeMap::new(), unsent: Vec::new() }
    }

    /// Where a member that is connected is.
    pub(super) fn whereabouts(&self, member: Member) -> Option<Whereabouts> {
        let Route { connection, address, .. } = self.routes.get(&member)?;
        Some(Whereabouts { address: *address, path: self.endpoint.path(*connection) })
    }

    /// Takes in a member, whose connection came from this address. False if it is connected already: then it is
    /// refused.
    pub(super) fn accept(
        &mut self,
        now: Timestamp,
        (connection, address): (ConnectionId, SocketAddr),
        member: Member,
        welcome: Vec<u8>,
    ) -> bool {
        if self.routes.contains_key(&member) {
            self.endpoint.refuse(now, connection, "this member is connected here already");
            return false;
        }
        self.members.insert(connection, member);
        self.routes.insert(member, Route { connection, address, frame: FrameWriter::default(), is_unsent: false });
        self.endpoint.accept(now, connection, welcome);
        true
    }

    /// A connection ended. Yields whose it was, if it was any member's.
    pub(super) fn handle_disconnected(&mut self, connection: ConnectionId) -> Option<Member> {
        let member = self.members.remove(&connection)?;
        self.routes.remove(&member);
        Some(member)
    }

    /// Ends a member's connection. Its end is reported.
    pub(super) fn close(&mut self, member: Member, reason: &str) {
        if let Some(route) = self.routes.get(&member) {
            tracing::warn!(?member, reason, "closed a connection");
            self.endpoint.disconnect(route.connection);
        }
    }

    /// Hands each message of a frame to `take`. A member that breaks the protocol loses its connection.
    pub(super) fn read<F: Message, B: Message>(
        &mut self,
        connection: ConnectionId,
        frame: &[u8],
        mut take: impl FnMut(Said<F, B>) -> Result<(), Violation>,
    ) {
        let broken = match self.members.get(&connection) {
            Some(&Member::Frontend(frontend)) => read_frame(frame).try_for_each(|message| {
                take(Said::Frontend(frontend, message.map_err(|error| Violation(error.to_string()))?))
            }),
            Some(&Member::Backend(backend)) => read_frame(frame).try_for_each(|message| {
                take(Said::Backend(backend, message.map_err(|error| Violation(error.to_string()))?))
            }),
            // Already being closed.
            None => Ok(()),
        };
        if let Err(violation) = broken {
            tracing::warn!(member = ?self.members.get(&connection), %violation, "closed a connection");
            self.endpoint.disconnect(connection);
        }
    }

    /// Adds a message to a member's frame.
    pub(super) fn post<M>(&mut self, member: Member, message: &M)
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        let Some(route) = self.routes.get_mut(&member) else { return };
        match route.frame.push(message) {
            Ok(full) => {
                if !std::mem::replace(&mut route.is_unsent, true) {
                    self.unsent.push(member);
                }
                if let Some(full) = full {
                    let connection = route.connection;
                    self.send(connection, &full);
                }
            }
            // What members and operators may give a message its size by is bounded where it is read.
            Err(error) => self.close(member, &error.to_string()),
        }
    }

    /// Sends all frames.
    pub(super) fn flush(&mut self) {
        for member in std::mem::take(&mut self.unsent) {
            let Some(route) = self.routes.get_mut(&member) else { continue };
            route.is_unsent = false;
            let connection = route.connection;
            if let Some(frame) = route.frame.take() {
                self.send(connection, &frame);
            }
        }
    }

    /// A peer that does not take its messages is as good as gone: what it was not told cannot be told again in order.
    fn send(&mut self, connection: ConnectionId, frame: &[u8]) {
        if let Err(error) = self.endpoint.send(connection, frame) {
            tracing::warn!(?connection, %error, "closed a connection");
            self.endpoint.disconnect(connection);
        }
    }
}

pub(super) fn encode<M>(message: &M) -> Vec<u8>
where
    M: SchemaWrite<DefaultConfig, Src = M>,
{
    wincode::serialize(message).expect("encoding into memory cannot fail")
}
