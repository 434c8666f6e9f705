//! Objects over TCP: one connection for each server, requests pipelined, bytes received straight into their place.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::AsFd,
    thread::{self, JoinHandle},
};

use proto::Timestamp;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    thread::sched_yield,
};
use sim::command::CommandError;
use std::collections::VecDeque;
use transport::Clock;

use super::{Reader, Shape, failed, object};

/// Looks at the sockets before it sleeps, as the other arm does.
const SPINS: u32 = 50;

/// The reader, and the threads of its servers.
pub(super) struct TcpReader {
    shape: Shape,
    /// All slots.
    memory: Vec<u8>,
    connections: Vec<Connection>,
    /// Complete, not taken yet.
    done: VecDeque<usize>,
    servers: Vec<JoinHandle<()>>,
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
    pub(super) fn start(shape: Shape) -> io::Result<Self> {
        let mut reader = Self {
            shape,
            memory: vec![0; shape.count() * shape.bytes],
            connections: Vec::new(),
            done: VecDeque::new(),
            servers: Vec::new(),
        };
        for server in 0..shape.servers {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let stream = TcpStream::connect(listener.local_addr()?)?;
            let (theirs, _) = listener.accept()?;
            theirs.set_nodelay(true)?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            reader.servers.push(thread::spawn(move || serve(theirs, shape, server)));
            reader.connections.push(Connection { stream, asked: VecDeque::new(), received: 0 });
        }
        Ok(reader)
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
            .map_err(|error| failed("cannot ask for an object", &error))?;
        connection.asked.push_back(self.shape.slot(server, object));
        Ok(())
    }

    fn poll_done(&mut self, clock: &Clock, until: Timestamp) -> Result<Option<usize>, CommandError> {
        let mut spins = 0;
        loop {
            if let Some(slot) = self.done.pop_front() {
                return Ok(Some(slot));
            }
            if self.receive().map_err(|error| failed("a server is lost", &error))? {
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
                self.wait(now, until).map_err(|error| failed("cannot wait for sockets", &error))?;
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

impl Drop for TcpReader {
    fn drop(&mut self) {
        // The servers see the end of their streams.
        self.connections.clear();
        for server in self.servers.drain(..) {
            let _ = server.join();
        }
    }
}

/// One server: answers requests in their order until the stream ends.
fn serve(mut stream: TcpStream, shape: Shape, server: usize) {
    let objects: Vec<_> = (0..shape.objects).map(|object| object::bytes(shape, server, object)).collect();
    let mut request = [0; 4];
    while stream.read_exact(&mut request).is_ok() {
        let object = u32::from_le_bytes(request) as usize;
        if stream.write_all(&objects[object]).is_err() {
            return;
        }
    }
}
