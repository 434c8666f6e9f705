//! Objects by one-sided READ: servers only register them.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use cli::CommandError;
use proto::{Span, Timestamp};
use rustix::event::{
    PollFlags,
    epoll::{self, CreateFlags, EventData, EventFlags},
};
use transport::{
    Access, Arm, ArmName, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, LocalPath, OpenError, Region,
    RegionKey, Transfer, VerbsSettings,
};

use super::{
    Reader, Shape, object,
    servers::{Server, Servers},
};

const CONNECT: Span = Span::from_millis(5_000);

/// The reader, and what it knows of its servers.
pub(super) struct RdmaReader {
    shape: Shape,
    endpoint: Endpoint,
    region: Region,
    lkey: u32,
    /// By server: the connection, and its objects, one after another.
    objects: Vec<(ConnectionId, RegionKey)>,
    _servers: Servers,
}

impl RdmaReader {
    /// Starts the servers and connects to each.
    pub(super) fn start(
        clock: &Clock,
        shape: Shape,
        arm: (&ArmName, LocalPath),
        window: Option<usize>,
        threads: usize,
    ) -> Result<Self, CommandError> {
        let mut peers = Vec::new();
        let servers = (0..shape.servers).map(|index| {
            let (server, at, key) = RdmaServer::open(arm, shape, index)
                .map_err(|error| CommandError::failed("a server's endpoint", error))?;
            peers.push((at, key));
            Ok(server)
        });
        let servers = servers.collect::<Result<Vec<_>, CommandError>>()?;
        let servers = Servers::start(clock, servers, threads)
            .map_err(|error| CommandError::failed("cannot start the servers", error))?;
        let config = config(arm).map_err(|error| CommandError::failed("--arm", error))?;
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
        let objects = peers.into_iter().map(|(at, key)| Ok((connect(clock, &mut endpoint, at)?, key)));
        let objects = objects.collect::<Result<Vec<_>, CommandError>>()?;
        Ok(Self { shape, endpoint, region, lkey, objects, _servers: servers })
    }
}

fn connect(clock: &Clock, endpoint: &mut Endpoint, to: SocketAddr) -> Result<ConnectionId, CommandError> {
    let connection = endpoint.connect(clock.now(), to, Vec::new());
    let deadline = clock.now() + CONNECT;
    while clock.now() < deadline {
        endpoint.drive(clock.now());
        match endpoint.poll_event() {
            Some(Event::Connected { .. }) => return Ok(connection),
            Some(event) => return Err(CommandError::failed("cannot connect to a server", format!("{event:?}"))),
            None => endpoint.wait(clock.now(), deadline),
        }
    }
    Err(CommandError::failed("cannot connect to a server", format!("no answer from {to}")))
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

/// Each endpoint of the soft arm has a random address of the loopback network; a device has its own.
fn config((arm, path): (&ArmName, LocalPath)) -> Result<EndpointConfig, OpenError> {
    let arm = Arm::choose(arm, None, false, Faults::default(), VerbsSettings::default())?;
    Ok(EndpointConfig::over(arm).with_local_path(path).with_secret("of one measurement"))
}

/// Holds its objects, and lets whoever connects read them.
struct RdmaServer {
    endpoint: Endpoint,
    watched: OwnedFd,
}

impl RdmaServer {
    /// With where it can be reached, and the key to its objects.
    fn open(arm: (&ArmName, LocalPath), shape: Shape, server: usize) -> Result<(Self, SocketAddr, RegionKey), String> {
        let text = |error: OpenError| error.to_string();
        let config = config(arm).map_err(text)?.listening(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let mut endpoint = Endpoint::open(EndpointConfig { connections_max: 1, ..config }).map_err(text)?;
        let region = Region::allocate(shape.objects * shape.bytes).map_err(|error| error.to_string())?;
        (0..shape.objects).for_each(|object| region.write(object * shape.bytes, &object::bytes(shape, server, object)));
        let key = endpoint.register(&region, Access { remote_read: true, remote_write: false }).map_err(text)?;
        let address = endpoint.listen_address().expect("it listens");
        let watched = watch(&endpoint).map_err(|error| error.to_string())?;
        Ok((Self { endpoint, watched }, address, key))
    }
}

impl Server for RdmaServer {
    fn turn(&mut self, now: Timestamp) -> io::Result<bool> {
        let progressed = self.endpoint.drive(now);
        while let Some(event) = self.endpoint.poll_event() {
            if let Event::Incoming { connection, .. } = event {
                self.endpoint.accept(now, connection, Vec::new());
            }
        }
        // It may be looked at again when its descriptor is ready only.
        Ok(progressed || !self.endpoint.lie_down())
    }

    fn interest(&self) -> PollFlags {
        PollFlags::IN
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
