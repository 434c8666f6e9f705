//! The other end of perftest's `ib_send_lat`, `ib_write_lat` and `ib_read_lat` (version 6.06), which may run on a
//! kernel's or network card's queue pair.
//!
//! Both sides agree over TCP: version, two settings of their build, MTU, then one message of 108 bytes that names queue
//! pair and memory, repeated as a barrier before and after the test; "done" ends it. A server answers each message as it
//! comes, but begins a test only after the last barrier.
//!
//! ```text
//! perftest --test send|write|read --local ADDRESS [--server ADDRESS] [--port 18515] [--bytes 2] [--rounds 1000]
//!          [--mtu 4096] [--loss 0]
//! ```

mod common;

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, TcpStream},
    str::FromStr,
    sync::Arc,
};

use common::{Arguments, Failure, Name, Node, PATIENCE, address, agree, exchange, gid};
use soft_roce::{
    Access, CompletionOpcode, HeapMemory, Memory, Operation, PathMtu, QueuePairConfig, QueuePairNumber, RecvRequest,
    RegionHandle, Remote, Segment, SendRequest,
};

/// Barriers from the first exchange of names to the first packet.
const BARRIERS: u32 = 4;
/// Receives kept posted.
const RECEIVES: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Test {
    Send,
    Write,
    Read,
}

impl FromStr for Test {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "send" => Ok(Self::Send),
            "write" => Ok(Self::Write),
            "read" => Ok(Self::Read),
            _ => Err(()),
        }
    }
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse(&["test", "local", "server", "port", "bytes", "rounds", "mtu", "loss"])?;
    let (local, server): (IpAddr, Option<IpAddr>) = (arguments.need("local")?, arguments.find("server")?);
    let mtu = arguments.mtu()?;
    let mut node = Node::bind(local, arguments.get("loss", 0.0)?)?;
    let (test, bytes) = (arguments.need("test")?, arguments.get("bytes", 2)?);
    let mut session = Session::new(&mut node, local, test, server.is_some(), bytes, arguments.get("rounds", 1000)?)?;
    let mut stream = agree(local, server, arguments.get("port", 18_515)?)?;
    settings(&mut stream, server.is_some(), mtu)?;
    if server.is_some() {
        session.run_client(&mut node, &mut stream, mtu)?;
    } else {
        session.run_server(&mut node, &mut stream, mtu)?;
    }
    node.linger();
    let Session { sent, received, rounds, .. } = session;
    println!("{sent} sent, {received} received of {rounds}; {:?}", node.endpoint.counters());
    if session.is_done() { Ok(()) } else { Err("the test did not run to its end".into()) }
}

/// Version, cycle buffer, cache line and MTU. A server says what its client says.
fn settings(stream: &mut TcpStream, client: bool, mtu: PathMtu) -> Result<(), Failure> {
    let mut version = *b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";
    if client {
        exchange(stream, true, &version)?;
    } else {
        stream.read_exact(&mut version)?;
        stream.write_all(&version)?;
    }
    exchange(stream, client, &4096_u32.to_be_bytes())?;
    exchange(stream, client, &64_u32.to_be_bytes())?;
    // As in `enum ibv_mtu`: 1 for 256 bytes to 5 for 4096.
    let code = mtu.bytes().ilog2() - 7;
    let theirs = exchange(stream, client, &[b'0' + code as u8, 0])?;
    if theirs[0] < b'0' + code as u8 {
        return Err(format!("the peer's MTU has code {}: lower --mtu", theirs[0] as char).into());
    }
    Ok(())
}

/// One run of a test. Messages alternate: one is under way at a time.
struct Session {
    test: Test,
    client: bool,
    bytes: u32,
    rounds: u32,
    number: QueuePairNumber,
    name: Name,
    /// What we send from and READ into; what the peer reaches.
    out: Arc<HeapMemory>,
    inbox: Arc<HeapMemory>,
    near: RegionHandle,
    far: RegionHandle,
    peer: Option<Remote>,
    sent: u32,
    received: u32,
    in_flight: bool,
}

impl Session {
    fn new(node: &mut Node, local: IpAddr, test: Test, client: bool, bytes: u32, rounds: u32) -> Result<Self, Failure> {
        let config = QueuePairConfig { max_rd_atomic: 1, ack_timeout: 14, ..Default::default() };
        let (number, name) = node.queue_pair(local, config)?;
        let memory = || HeapMemory::new(vec![0; bytes as usize]);
        let (out, inbox) = (memory(), memory());
        let near = node.endpoint.register(out.clone(), Access::LOCAL)?;
        let far = node.endpoint.register(inbox.clone(), Access::ALL)?;
        let (peer, sent, received, in_flight) = (None, 0, 0, false);
        let session =
            Self { test, client, bytes, rounds, number, name, out, inbox, near, far, peer, sent, received, in_flight };
        for _ in 0..RECEIVES {
            session.post_receive(node)?;
        }
        Ok(session)
    }

    fn post_receive(&self, node: &mut Node) -> Result<(), Failure> {
        let segment = Segment { lkey: self.far.lkey, offset: 0, bytes: self.bytes };
        Ok(node.endpoint.post_recv(self.number, RecvRequest { id: 0, segment })?)
    }

    /// Whether it is our turn. The client begins with SEND, the server with WRITE; only the client READs.
    fn may_send(&self) -> bool {
        let begins = match self.test {
            Test::Read => return self.client && self.sent < self.rounds && !self.in_flight,
            Test::Send => self.client,
            Test::Write => !self.client,
        };
        let answered = if begins { self.sent == self.received } else { self.sent < self.received };
        answered && self.sent < self.rounds && !self.in_flight
    }

    fn is_done(&self) -> bool {
        let sent = self.sent == self.rounds && !self.in_flight;
        match self.test {
            Test::Read => sent || !self.client,
            Test::Send | Test::Write => sent && self.received == self.rounds,
        }
    }

    /// One pass: packets, completions, our next message.
    fn step(&mut self, node: &mut Node, peer: Remote) -> Result<(), Failure> {
        node.step();
        while let Some(completion) = node.endpoint.poll_completion() {
            if completion.status != soft_roce::Status::Success {
                return Err(format!("{completion:?}; {:?}", node.endpoint.counters()).into());
            }
            if completion.opcode == CompletionOpcode::Recv {
                self.received += 1;
                self.post_receive(node)?;
            } else {
                self.in_flight = false;
            }
        }
        if self.test == Test::Write && self.received < self.rounds {
            // A WRITE shows by its last byte, which counts.
            let mut last = [0];
            self.inbox.read(self.bytes as usize - 1, &mut last);
            self.received += u32::from(last[0] == (self.received + 1) as u8);
        }
        if self.may_send() {
            self.sent += 1;
            self.in_flight = true;
            let local = Segment { lkey: self.near.lkey, offset: 0, bytes: self.bytes };
            let operation = match self.test {
                Test::Send => Operation::Send { local },
                Test::Write => Operation::Write { local, remote: peer },
                Test::Read => Operation::Read { local, remote: peer },
            };
            if self.test == Test::Write {
                self.out.write(self.bytes as usize - 1, &[self.sent as u8]);
            }
            node.endpoint.post_send(self.number, SendRequest::new(0, operation))?;
        }
        Ok(())
    }

    /// Meets the peer: the first time, connects to it.
    fn on_keys(&mut self, node: &mut Node, keys: &[u8], mtu: PathMtu) -> Result<(), Failure> {
        if self.peer.is_none() {
            let (name, memory) = decode(keys)?;
            node.connect(self.number, self.name, name, mtu)?;
            self.peer = Some(memory);
        }
        Ok(())
    }

    fn run_client(&mut self, node: &mut Node, stream: &mut TcpStream, mtu: PathMtu) -> Result<(), Failure> {
        let keys = self.keys();
        for _ in 0..BARRIERS {
            let theirs = exchange(stream, true, &keys)?;
            self.on_keys(node, &theirs, mtu)?;
        }
        let peer = self.peer.expect("met at the first barrier");
        let until = node.elapsed() + PATIENCE;
        while !self.is_done() && node.elapsed() < until {
            self.step(node, peer)?;
        }
        // The write test does without a farewell.
        if self.test != Test::Write {
            exchange(stream, true, &keys)?;
            exchange(stream, true, DONE)?;
        }
        Ok(())
    }

    fn run_server(&mut self, node: &mut Node, stream: &mut TcpStream, mtu: PathMtu) -> Result<(), Failure> {
        let (keys, mut heard) = (self.keys(), Vec::new());
        let mut barriers = 0;
        stream.set_nonblocking(true)?;
        let mut progressed = node.elapsed();
        while node.elapsed() < progressed + PATIENCE {
            let before = (self.sent, self.received, heard.len());
            match self.peer.filter(|_| barriers >= BARRIERS) {
                Some(peer) => self.step(node, peer)?,
                None => {
                    node.step();
                }
            }
            if !listen(stream, &mut heard)? {
                return Ok(());
            }
            if heard.starts_with(DONE) {
                stream.write_all(DONE)?;
                return Ok(());
            }
            if heard.len() >= KEYS_BYTES {
                self.on_keys(node, &heard[..KEYS_BYTES], mtu)?;
                heard.drain(..KEYS_BYTES);
                stream.write_all(&keys)?;
                barriers += 1;
            }
            if before != (self.sent, self.received, heard.len()) || self.test == Test::Read {
                progressed = node.elapsed();
            }
        }
        Err(format!("nothing happened for {} s", PATIENCE.as_secs()).into())
    }

    /// LID, outstanding READs, queue pair, PSN, key, address, GID, shared receive queue, and a NUL, all hexadecimal.
    fn keys(&self) -> Vec<u8> {
        let Name { queue_pair, psn, address } = self.name;
        let gid: String = gid(address).iter().map(|byte| format!("{byte:02x}:")).collect();
        let (rkey, vaddr) = (self.far.rkey, self.far.address);
        format!("0000:0001:{queue_pair:06x}:{psn:06x}:{rkey:08x}:{vaddr:016x}:{gid}00000000:\0").into_bytes()
    }
}

const KEYS_BYTES: usize = 108;
const DONE: &[u8] = b"done\0";

/// Takes what has come. False if the peer has closed.
fn listen(stream: &mut TcpStream, heard: &mut Vec<u8>) -> Result<bool, Failure> {
    let mut some = [0; 256];
    match stream.read(&mut some) {
        Ok(bytes) => {
            heard.extend_from_slice(&some[..bytes]);
            Ok(bytes > 0)
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(true),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn decode(keys: &[u8]) -> Result<(Name, Remote), Failure> {
    let text = std::str::from_utf8(keys)?;
    let fields: Vec<&str> = text.split(':').collect();
    if fields.len() < 22 {
        return Err(format!("{text}: expected 23 fields").into());
    }
    let hex = |at: usize| u64::from_str_radix(fields[at], 16);
    let mut gid = [0; 16];
    for (at, byte) in gid.iter_mut().enumerate() {
        *byte = hex(6 + at)? as u8;
    }
    let name = Name { address: address(gid), queue_pair: hex(2)? as u32, psn: hex(3)? as u32 };
    Ok((name, Remote { rkey: hex(4)? as u32, address: hex(5)? }))
}
