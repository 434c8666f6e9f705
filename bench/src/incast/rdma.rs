//! Objects by one-sided READ: servers only register them.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use cli::CommandError;
use proto::{Span, Timestamp};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use transport::{
    Access, Address, Arm, ArmName, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, LocalPath, OpenError,
    OwnAddress, ROCE_PORT, Region, RegionKey, Transfer, VerbsSettings, own_or_routed,
};

use super::{
    Reader, Shape,
    object::{Share, check_room},
    servers::Server,
};

const CONNECT: Span = Span::from_millis(5_000);
/// Readers of one server at once.
const READERS_MAX: usize = 64;

/// The reader, and what it knows of its servers.
pub(super) struct RdmaReader {
    shape: Shape,
    endpoint: Endpoint,
    region: Region,
    lkey: u32,
    /// By server: the connection, and where its objects are, one after another.
    objects: Vec<(ConnectionId, Objects)>,
}

/// Where a server's objects are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Objects {
    address: u64,
    rkey: u32,
}

impl Objects {
    /// What a server welcomes a reader with.
    fn encode(self) -> Vec<u8> {
        [&self.address.to_le_bytes()[..], &self.rkey.to_le_bytes()].concat()
    }

    fn decode(wire: &[u8]) -> Option<Self> {
        let (address, rkey) = wire.split_first_chunk()?;
        Some(Self { address: u64::from_le_bytes(*address), rkey: u32::from_le_bytes(rkey.try_into().ok()?) })
    }
}

impl RdmaReader {
    /// Connects to servers; those of other hosts by the network that leads to them.
    pub(super) fn connect(
        clock: &Clock,
        shape: Shape,
        (arm, path): (&ArmName, LocalPath),
        (servers, are_elsewhere): (&[Address], bool),
        window: Option<usize>,
    ) -> Result<Self, CommandError> {
        let own = || own_or_routed("--from", &OwnAddress::Auto(None), servers, ROCE_PORT);
        let own = are_elsewhere.then(own).transpose().map_err(|error| CommandError::Failed(error.to_string()))?;
        let config = config(arm, path, own.map(|at| at.ip()));
        let config = config.map_err(|error| CommandError::failed("--arm", error))?;
        let read_budget_bytes = window.unwrap_or(config.read_budget_bytes);
        let config = EndpointConfig { read_budget_bytes, connections_max: shape.servers, ..config };
        let mut endpoint =
            Endpoint::open(config).map_err(|error| CommandError::failed("the reader's endpoint", error))?;
        let region = Region::allocate(shape.count() * shape.bytes)
            .map_err(|error| CommandError::failed("the reader's memory", error))?;
        let lkey = endpoint
            .register(&region, Access::default())
            .map_err(|error| CommandError::failed("the reader's memory", error))?
            .lkey;
        let objects = servers.iter().enumerate().map(|(server, at)| ask(clock, &mut endpoint, at, shape.share(server)));
        let objects = objects.collect::<Result<Vec<_>, CommandError>>()?;
        Ok(Self { shape, endpoint, region, lkey, objects })
    }
}

/// Connects to a server, which is to hold this share.
fn ask(
    clock: &Clock,
    endpoint: &mut Endpoint,
    server: &Address,
    share: Share,
) -> Result<(ConnectionId, Objects), CommandError> {
    let failed = |cause: String| CommandError::failed(format!("cannot connect to the server {server}"), cause);
    let connection = endpoint.connect(clock.now(), server.clone(), share.encode().into());
    let deadline = clock.now() + CONNECT;
    while clock.now() < deadline {
        endpoint.drive(clock.now());
        match endpoint.poll_event() {
            Some(Event::Connected { welcome, .. }) => {
                let objects = Objects::decode(&welcome);
                return Ok((connection, objects.ok_or_else(|| failed("it is no `bench incast --serve`".into()))?));
            }
            Some(Event::Disconnected { reason, .. }) => return Err(failed(reason.to_string())),
            Some(event) => return Err(failed(format!("{event:?}"))),
            None => endpoint.wait(clock.now(), deadline),
        }
    }
    Err(failed("it does not answer".into()))
}

impl Reader for RdmaReader {
    fn ask(&mut self, _now: Timestamp, server: usize, object: usize) -> Result<(), CommandError> {
        let (bytes, slot) = (self.shape.bytes, self.shape.slot(server, object));
        let (connection, objects) = self.objects[server];
        let transfer = Transfer {
            token: slot as u64,
            lkey: self.lkey,
            local_offset: slot * bytes,
            remote_address: objects.address + (object * bytes) as u64,
            rkey: objects.rkey,
            bytes,
        };
        self.endpoint
            .read(connection, transfer)
            .map_err(|error| CommandError::failed("cannot ask for an object", error))
    }

    fn poll_done(&mut self, clock: &Clock, until: Timestamp) -> Result<Option<usize>, CommandError> {
        loop {
            match self.endpoint.poll_event() {
                Some(Event::ReadDone { token, result: Ok(()), .. }) => return Ok(Some(token as usize)),
                Some(event) => return Err(CommandError::failed("a server is lost", format!("{event:?}"))),
                None => {}
            }
            let now = clock.now();
            if !self.endpoint.drive(now) {
                if now >= until {
                    return Ok(None);
                }
                self.endpoint.wait(now, until);
            }
        }
    }

    fn read(&self, slot: usize, into: &mut [u8]) {
        self.region.read(slot * self.shape.bytes, into);
    }

    fn wipe(&mut self) {
        let zeros = vec![0; self.shape.bytes];
        (0..self.shape.count()).for_each(|slot| self.region.write(slot * self.shape.bytes, &zeros));
    }
}

/// Without an address, each endpoint of the soft arm has a random one of the loopback network. A device has its own.
fn config(name: &ArmName, path: LocalPath, own: Option<IpAddr>) -> Result<EndpointConfig, OpenError> {
    let own = own.filter(|_| *name == ArmName::Soft).map(|ip| SocketAddr::new(ip, ROCE_PORT));
    let mut arm = Arm::choose(name, own, false, Faults::default(), VerbsSettings::default())?;
    if let (Arm::Soft { any_port, .. }, Some(_)) = (&mut arm, own) {
        *any_port = true;
    }
    Ok(EndpointConfig::over(arm).with_local_path(path).with_secret("of one measurement"))
}

/// Holds objects, and lets whoever asks for them read them.
pub(super) struct RdmaServer {
    endpoint: Endpoint,
    watched: OwnedFd,
    held: BTreeMap<Share, Objects>,
}

impl RdmaServer {
    /// With where it can be reached. One that readers of other hosts reach has the address that it listens at for its
    /// packets, too.
    pub(super) fn open(
        (arm, path): (&ArmName, LocalPath),
        (listen, is_reached): (SocketAddr, bool),
    ) -> Result<(Self, SocketAddr), CommandError> {
        let failed = |cause: &dyn std::fmt::Display| CommandError::failed("a server's endpoint", cause);
        let config = config(arm, path, is_reached.then_some(listen.ip())).map_err(|error| failed(&error))?;
        let config = EndpointConfig { connections_max: READERS_MAX, ..config.listening(listen) };
        let endpoint = Endpoint::open(config).map_err(|error| failed(&error))?;
        let address = endpoint.listen_address().expect("it listens");
        let watched = watch(&endpoint).map_err(|error| failed(&error))?;
        Ok((Self { endpoint, watched, held: BTreeMap::new() }, address))
    }

    /// Where the objects are that a reader asks for. They stay for the next one that asks for the same.
    fn hold(&mut self, hello: &[u8]) -> Result<Objects, String> {
        let share = Share::decode(hello)?;
        if let Some(objects) = self.held.get(&share) {
            return Ok(*objects);
        }
        check_room(self.held.keys(), share)?;
        let region = Region::allocate(share.size()).map_err(|error| error.to_string())?;
        share.all().enumerate().for_each(|(object, bytes)| region.write(object * share.bytes, &bytes));
        let access = Access { remote_read: true, remote_write: false };
        let RegionKey { address, rkey, .. } =
            self.endpoint.register(&region, access).map_err(|error| error.to_string())?;
        let objects = Objects { address, rkey };
        self.held.insert(share, objects);
        Ok(objects)
    }
}

impl Server for RdmaServer {
    fn turn(&mut self, now: Timestamp) -> io::Result<bool> {
        let progressed = self.endpoint.drive(now);
        while let Some(event) = self.endpoint.poll_event() {
            if let Event::Incoming { connection, hello, .. } = event {
                match self.hold(&hello) {
                    Ok(objects) => self.endpoint.accept(now, connection, objects.encode()),
                    Err(reason) => self.endpoint.refuse(now, connection, &reason),
                }
            }
        }
        // It may be looked at again when its descriptor is ready only.
        Ok(progressed || !self.endpoint.lie_down())
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        self.endpoint.poll_timeout()
    }
}

impl AsFd for RdmaServer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }
}

/// One descriptor for all that an endpoint is watched by.
fn watch(endpoint: &Endpoint) -> io::Result<OwnedFd> {
    let watched = epoll::create(CreateFlags::CLOEXEC)?;
    for descriptor in endpoint.descriptors() {
        epoll::add(&watched, descriptor, EventData::new_u64(0), EventFlags::IN)?;
    }
    Ok(watched)
}
