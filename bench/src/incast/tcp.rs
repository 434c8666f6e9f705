//! Objects over TCP: one connection for each server, requests pipelined, bytes received straight into their place.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use cli::CommandError;
use proto::Timestamp;
use rustix::{
    event::{
        PollFd, PollFlags, Timespec,
        epoll::{self, CreateFlags, EventData, EventFlags},
        poll,
    },
    thread::sched_yield,
};
use transport::{Address, Clock};

use super::{
    Reader, Shape,
    object::{Share, check_room},
    servers::Server,
};

/// Looks at the sockets before it sleeps, as the other arm does.
const SPINS: u32 = 50;
/// Requests taken in at once.
const REQUESTS_BYTES: usize = 4096;
const CONNECT: Duration = Duration::from_secs(5);
/// Readers of one server at once.
const READERS_MAX: usize = 64;

/// The reader.
pub(super) struct TcpReader {
    shape: Shape,
    /// All slots.
    memory: Vec<u8>,
    connections: Vec<Connection>,
    /// Complete, not taken yet.
    done: VecDeque<usize>,
}

struct Connection {
    stream: TcpStream,
    /// Slots in the order in which they were asked for, which is that of the answers.
    asked: VecDeque<usize>,
    /// Of the first slot.
    received: usize,
}

impl TcpReader {
    /// Connects to each server, and says what it is to hold.
    pub(super) fn connect(shape: Shape, servers: &[Address]) -> Result<Self, CommandError> {
        let connections = servers.iter().enumerate().map(|(server, at)| {
            let stream = ask(&at.to_string(), shape.share(server));
            let failed = |error| CommandError::failed(format!("cannot connect to the server {at}"), error);
            Ok(Connection { stream: stream.map_err(failed)?, asked: VecDeque::new(), received: 0 })
        });
        let connections = connections.collect::<Result<Vec<_>, CommandError>>()?;
        let memory = vec![0; shape.count() * shape.bytes];
        Ok(Self { shape, memory, connections, done: VecDeque::new() })
    }

    /// Takes what all sockets hold. False if that was nothing.
    fn receive(&mut self) -> io::Result<bool> {
        let mut progressed = false;
        for connection in &mut self.connections {
            while let Some(&slot) = connection.asked.front() {
                let place = &mut self.memory[slot * self.shape.bytes..][connection.received..self.shape.bytes];
                match connection.stream.read(place) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(bytes) => connection.received += bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
                progressed = true;
                if connection.received == self.shape.bytes {
                    connection.received = 0;
                    self.done.extend(connection.asked.pop_front());
                }
            }
        }
        Ok(progressed)
    }

    /// Sleeps until a socket has bytes, or until `until`.
    fn wait(&self, now: Timestamp, until: Timestamp) -> io::Result<()> {
        let mut sockets: Vec<_> = self
            .connections
            .iter()
            .map(|connection| PollFd::from_borrowed_fd(connection.stream.as_fd(), PollFlags::IN))
            .collect();
        let timeout = Timespec::try_from((until - now).to_duration()).expect("a wait of seconds");
        poll(&mut sockets, Some(&timeout))?;
        Ok(())
    }
}

/// A connection to a server, which is to hold this share.
fn ask(server: &str, share: Share) -> io::Result<TcpStream> {
    let mut addresses = server.to_socket_addrs()?;
    let address = addresses.next().ok_or(ErrorKind::AddrNotAvailable)?;
    let mut stream = TcpStream::connect_timeout(&address, CONNECT)?;
    stream.set_nodelay(true)?;
    stream.write_all(&share.encode())?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

impl Reader for TcpReader {
    fn ask(&mut self, _now: Timestamp, server: usize, object: usize) -> Result<(), CommandError> {
        let connection = &mut self.connections[server];
        // A few thousand requests of four bytes always fit the socket's buffer.
        connection
            .stream
            .write_all(&(object as u32).to_le_bytes())
            .map_err(|error| CommandError::failed("cannot ask for an object", error))?;
        connection.asked.push_back(self.shape.slot(server, object));
        Ok(())
    }

    fn poll_done(&mut self, clock: &Clock, until: Timestamp) -> Result<Option<usize>, CommandError> {
        let mut spins = 0;
        loop {
            if let Some(slot) = self.done.pop_front() {
                return Ok(Some(slot));
            }
            if self.receive().map_err(|error| CommandError::failed("a server is lost", error))? {
                continue;
            }
            let now = clock.now();
            if now >= until {
                return Ok(None);
            }
            spins += 1;
            if spins < SPINS {
                sched_yield();
            } else {
                self.wait(now, until).map_err(|error| CommandError::failed("cannot wait for sockets", error))?;
            }
        }
    }

    fn read(&self, slot: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.memory[slot * self.shape.bytes..][..self.shape.bytes]);
    }

    fn wipe(&mut self) {
        self.memory.fill(0);
    }
}

/// Answers readers, each over a connection of its own.
pub(super) struct TcpServer {
    listener: TcpListener,
    /// Of the listener, and of all readers.
    watched: OwnedFd,
    readers: Vec<Served>,
    /// Shares stay for the next one who asks for the same.
    held: BTreeMap<Share, Arc<[Vec<u8>]>>,
}

/// A reader: it says what is to be held for it, and then the number of an object with each request; they are answered
/// in their order.
struct Served {
    stream: TcpStream,
    objects: Option<Arc<[Vec<u8>]>>,
    /// What has come of its share, or of a request.
    request: Vec<u8>,
    /// Objects to send, and how much of the first has been sent.
    asked: VecDeque<usize>,
    sent: usize,
    /// Whether it is watched for room, too.
    awaits_room: bool,
}

impl TcpServer {
    /// With where it can be reached.
    pub(super) fn open(listen: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let watched = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&watched, &listener, EventData::new_u64(0), EventFlags::IN)?;
        Ok((Self { listener, watched, readers: Vec::new(), held: BTreeMap::new() }, address))
    }

    /// Takes a reader in; whether one waited. One too many, or one that has gone already, is sent away.
    fn accept(&mut self) -> bool {
        let Ok((stream, _)) = self.listener.accept() else { return false };
        if self.readers.len() < READERS_MAX && self.watch(&stream).is_ok() {
            self.readers.push(Served::new(stream));
        }
        true
    }

    fn watch(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(epoll::add(&self.watched, stream, EventData::new_u64(0), EventFlags::IN)?)
    }
}

/// The objects of a share that a reader asks for.
fn hold(held: &mut BTreeMap<Share, Arc<[Vec<u8>]>>, share: &[u8]) -> Result<Arc<[Vec<u8>]>, String> {
    let share = Share::decode(share)?;
    if !held.contains_key(&share) {
        check_room(held.keys(), share)?;
    }
    Ok(Arc::clone(held.entry(share).or_insert_with(|| share.all().collect())))
}

impl Served {
    fn new(stream: TcpStream) -> Self {
        let (objects, request, asked) = (None, Vec::new(), VecDeque::new());
        Self { stream, objects, request, asked, sent: 0, awaits_room: false }
    }

    /// Takes in what it asks; how many bytes of it came.
    fn receive(&mut self, held: &mut BTreeMap<Share, Arc<[Vec<u8>]>>) -> io::Result<usize> {
        let mut buffer = [0; REQUESTS_BYTES];
        let received = self.stream.read(&mut buffer)?;
        self.request.extend(&buffer[..received]);
        if self.objects.is_none() && self.request.len() >= Share::WIRE_BYTES {
            let share: Vec<u8> = self.request.drain(..Share::WIRE_BYTES).collect();
            self.objects = Some(hold(held, &share).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?);
        }
        if let Some(objects) = &self.objects {
            let whole = self.request.len() / 4 * 4;
            for number in self.request[..whole].chunks_exact(4) {
                let object = u32::from_le_bytes(number.try_into().expect("four bytes")) as usize;
                if object >= objects.len() || self.asked.len() > objects.len() {
                    return Err(ErrorKind::InvalidData.into());
                }
                self.asked.push_back(object);
            }
            self.request.drain(..whole);
        }
        if received == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(received) }
    }

    /// Sends of the first object what the socket takes.
    fn transmit(&mut self) -> io::Result<usize> {
        let (Some(&object), Some(objects)) = (self.asked.front(), &self.objects) else { return Ok(0) };
        let sent = self.stream.write(&objects[object][self.sent..])?;
        self.sent += sent;
        if self.sent == objects[object].len() {
            self.sent = 0;
            self.asked.pop_front();
        }
        Ok(sent)
    }

    /// Both. False if there was nothing to do.
    fn turn(&mut self, held: &mut BTreeMap<Share, Arc<[Vec<u8>]>>, watched: &OwnedFd) -> io::Result<bool> {
        let received = or_none(self.receive(held))?;
        let sent = or_none(self.transmit())?;
        if self.awaits_room == self.asked.is_empty() {
            self.awaits_room = !self.awaits_room;
            let room = if self.awaits_room { EventFlags::OUT } else { EventFlags::empty() };
            epoll::modify(watched, &self.stream, EventData::new_u64(0), EventFlags::IN | room)?;
        }
        Ok(received + sent > 0)
    }
}

impl Server for TcpServer {
    fn turn(&mut self, _: Timestamp) -> io::Result<bool> {
        let mut progressed = self.accept();
        let Self { readers, held, watched, .. } = self;
        // Whoever has gone, or asks for what is not there, is dropped, and no longer watched.
        readers.retain_mut(|reader| reader.turn(held, watched).inspect(|did| progressed |= did).is_ok());
        Ok(progressed)
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        None
    }
}

/// 0 where there is nothing, or no room.
fn or_none(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

impl AsFd for TcpServer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }
}
