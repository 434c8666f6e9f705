//! Objects by one-sided READ: servers only register them.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use proto::{Span, Timestamp};
use sim::command::CommandError;
use transport::{
    Access, Arm, ArmName, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, Region, RegionKey, Transfer,
    VerbsSettings, Waker,
};

use super::{Reader, Shape, failed, object};

/// A server with nothing to do looks this often whether it shall end.
const LOOK: Span = Span::from_millis(100);
const CONNECT: Span = Span::from_millis(5_000);

/// The reader, and the threads of its servers.
pub(super) struct RdmaReader {
    shape: Shape,
    endpoint: Endpoint,
    region: Region,
    lkey: u32,
    servers: Vec<Server>,
}

struct Server {
    connection: ConnectionId,
    /// Its objects, one after another.
    objects: RegionKey,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl RdmaReader {
    /// Starts the servers and connects to each.
    pub(super) fn start(
        clock: &Clock,
        shape: Shape,
        arm: &ArmName,
        window: Option<usize>,
    ) -> Result<Self, CommandError> {
        let config = config(arm)?;
        let read_budget_bytes = window.unwrap_or(config.read_budget_bytes);
        let config = EndpointConfig { read_budget_bytes, connections_max: shape.servers, ..config };
        let mut endpoint = Endpoint::open(config).map_err(|error| failed("the reader's endpoint", &error))?;
        let region =
            Region::allocate(shape.count() * shape.bytes).map_err(|error| failed("the reader's memory", &error))?;
        let lkey =
            endpoint.register(&region, Access::default()).map_err(|error| failed("the reader's memory", &error))?.lkey;
        let mut reader = Self { shape, endpoint, region, lkey, servers: Vec::new() };
        for server in 0..shape.servers {
            reader.add(clock, arm, server)?;
        }
        Ok(reader)
    }

    fn add(&mut self, clock: &Clock, arm: &ArmName, server: usize) -> Result<(), CommandError> {
        let config = config(arm)?.listening(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let (stop, at) = (Arc::new(AtomicBool::new(false)), mpsc::sync_channel(1));
        let (shape, clock_of_server, stop_of_server) = (self.shape, *clock, Arc::clone(&stop));
        let thread = thread::spawn(move || serve(config, &clock_of_server, shape, server, &stop_of_server, &at.0));
        let opened = at.1.recv().unwrap_or_else(|_| Err("it ended at once".into()));
        let (address, objects, waker) = opened.map_err(|error| failed("a server's endpoint", &error))?;
        let connection = self.endpoint.connect(clock.now(), address, Vec::new());
        self.servers.push(Server { connection, objects, stop, waker, thread: Some(thread) });
        let deadline = clock.now() + CONNECT;
        while clock.now() < deadline {
            self.endpoint.drive(clock.now());
            match self.endpoint.poll_event() {
                Some(Event::Connected { .. }) => return Ok(()),
                Some(event) => return Err(failed("cannot connect to a server", &format!("{event:?}"))),
                None => self.endpoint.wait(clock.now(), deadline),
            }
        }
        Err(failed("cannot connect to a server", &format!("no answer from {address}")))
    }
}

impl Reader for RdmaReader {
    fn ask(&mut self, _now: Timestamp, server: usize, object: usize) -> Result<(), CommandError> {
        let (bytes, slot) = (self.shape.bytes, self.shape.slot(server, object));
        let Server { connection, objects, .. } = &self.servers[server];
        let transfer = Transfer {
            token: slot as u64,
            lkey: self.lkey,
            local_offset: slot * bytes,
            remote_address: objects.address + (object * bytes) as u64,
            rkey: objects.rkey,
            bytes,
        };
        self.endpoint.read(*connection, transfer).map_err(|error| failed("cannot ask for an object", &error))
    }

    fn poll_done(&mut self, clock: &Clock, until: Timestamp) -> Result<Option<usize>, CommandError> {
        loop {
            match self.endpoint.poll_event() {
                Some(Event::ReadDone { token, result: Ok(()), .. }) => return Ok(Some(token as usize)),
                Some(event) => return Err(failed("a server is lost", &format!("{event:?}"))),
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

impl Drop for RdmaReader {
    fn drop(&mut self) {
        for server in &mut self.servers {
            server.stop.store(true, Ordering::Relaxed);
            server.waker.wake();
            // A server that panicked has said so.
            let _ = server.thread.take().map(JoinHandle::join);
        }
    }
}

/// Each endpoint of the soft arm has a random address of the loopback network; a device has its own.
fn config(arm: &ArmName) -> Result<EndpointConfig, CommandError> {
    let arm = Arm::choose(arm, None, false, Faults::default(), VerbsSettings::default());
    arm.map(EndpointConfig::over).map_err(|error| failed("--arm", &error))
}

/// Where a server can be reached, what it holds, and how it is woken; or why it has not started.
type Opened = Result<(SocketAddr, RegionKey, Waker), String>;

/// One server: holds its objects and answers, until it is told to stop.
fn serve(
    config: EndpointConfig,
    clock: &Clock,
    shape: Shape,
    server: usize,
    stop: &AtomicBool,
    opened: &mpsc::SyncSender<Opened>,
) {
    let open = || -> Result<Endpoint, String> {
        let mut endpoint = Endpoint::open(config).map_err(|error| error.to_string())?;
        let region = Region::allocate(shape.objects * shape.bytes).map_err(|error| error.to_string())?;
        (0..shape.objects).for_each(|object| region.write(object * shape.bytes, &object::bytes(shape, server, object)));
        let access = Access { remote_read: true, remote_write: false };
        let key = endpoint.register(&region, access).map_err(|error| error.to_string())?;
        let address = endpoint.listen_address().expect("it listens");
        let _ = opened.send(Ok((address, key, endpoint.waker())));
        Ok(endpoint)
    };
    let mut endpoint = match open() {
        Ok(endpoint) => endpoint,
        Err(error) => return drop(opened.send(Err(error))),
    };
    while !stop.load(Ordering::Relaxed) {
        let progressed = endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            if let Event::Incoming { connection, .. } = event {
                endpoint.accept(clock.now(), connection, Vec::new());
            }
        }
        if !progressed {
            endpoint.wait(clock.now(), clock.now() + LOOK);
        }
    }
}
