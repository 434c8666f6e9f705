//! Objects over TCP: one connection for each server, requests pipelined, bytes received straight into their place.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd},
};

use cli::CommandError;
use proto::Timestamp;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    thread::sched_yield,
};
use transport::Clock;

use super::{
    Reader, Shape, object,
    servers::{Server, Servers},
};

/// Looks at the sockets before it sleeps, as the other arm does.
const SPINS: u32 = 50;
/// Requests taken in at once.
const REQUESTS_BYTES: usize = 4096;

/// The reader.
pub(super) struct TcpReader {
    shape: Shape,
    /// All slots.
    memory: Vec<u8>,
    connections: Vec<Connection>,
    /// Complete, not taken yet.
    done: VecDeque<usize>,
    _servers: Servers,
}

struct Connection {
    stream: TcpStream,
    /// Slots in the order in which they were asked for, which is that of the answers.
    asked: VecDeque<usize>,
    /// Of the first slot.
    received: usize,
}

impl TcpReader {
    /// Starts the servers and connects to each.
    pub(super) fn start(clock: &Clock, shape: Shape, threads: usize) -> io::Result<Self> {
        let (mut connections, mut servers) = (Vec::new(), Vec::new());
        for server in 0..shape.servers {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let stream = TcpStream::connect(listener.local_addr()?)?;
            let (theirs, _) = listener.accept()?;
            for end in [&stream, &theirs] {
                end.set_nodelay(true)?;
                end.set_nonblocking(true)?;
            }
            servers.push(TcpServer::new(theirs, shape, server));
            connections.push(Connection { stream, asked: VecDeque::new(), received: 0 });
        }
        let memory = vec![0; shape.count() * shape.bytes];
        Ok(Self {
            shape,
            memory,
            connections,
            done: VecDeque::new(),
            _servers: Servers::start(clock, servers, threads)?,
        })
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

/// Answers requests, the number of an object each, in their order.
struct TcpServer {
    stream: TcpStream,
    objects: Vec<Vec<u8>>,
    /// What has come of a request.
    request: Vec<u8>,
    /// Objects to send, and how much of the first has been sent.
    asked: VecDeque<usize>,
    sent: usize,
}

impl TcpServer {
    fn new(stream: TcpStream, shape: Shape, server: usize) -> Self {
        let objects = (0..shape.objects).map(|object| object::bytes(shape, server, object)).collect();
        Self { stream, objects, request: Vec::new(), asked: VecDeque::new(), sent: 0 }
    }

    /// Takes requests in; how many bytes of them came.
    fn receive(&mut self) -> io::Result<usize> {
        let mut buffer = [0; REQUESTS_BYTES];
        let received = self.stream.read(&mut buffer)?;
        self.request.extend(&buffer[..received]);
        let whole = self.request.len() / 4 * 4;
        for number in self.request[..whole].chunks_exact(4) {
            self.asked.push_back(u32::from_le_bytes(number.try_into().expect("four bytes")) as usize);
        }
        self.request.drain(..whole);
        if received == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(received) }
    }

    /// Sends of the first object what the socket takes.
    fn transmit(&mut self) -> io::Result<usize> {
        let Some(&object) = self.asked.front() else { return Ok(0) };
        let sent = self.stream.write(&self.objects[object][self.sent..])?;
        self.sent += sent;
        if self.sent == self.objects[object].len() {
            self.sent = 0;
            self.asked.pop_front();
        }
        Ok(sent)
    }
}

impl Server for TcpServer {
    fn turn(&mut self, _: Timestamp) -> io::Result<bool> {
        let [received, sent] = [Self::receive, Self::transmit].map(|step| or_none(step(self)));
        Ok(received? + sent? > 0)
    }

    fn interest(&self) -> PollFlags {
        if self.asked.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT }
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
        self.stream.as_fd()
    }
}
