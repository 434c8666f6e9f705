//! The other end of perftest's `ib_{send,write,read,atomic}_{lat,bw}` (version 6.06), which may run on a kernel's or
//! network card's queue pair.
//!
//! Both sides agree over TCP: version, two settings of their build, MTU, then one message of 108 bytes that names queue
//! pair and memory, repeated as a barrier before and after the test; "done" ends it. After a bandwidth test, numbers
//! that only its tool prints go both ways. A server answers each message as it comes, but begins a test only after the
//! last barrier, and answers what follows a test only when it has done its part.
//!
//! Latency: one request at a time; SEND and WRITE go back and forth. Bandwidth: the client keeps many under way.
//!
//! ```text
//! perftest --test send_lat|..|atomic_bw --local ADDRESS [--server ADDRESS] [--port 18515] [--bytes 2] [--rounds 1000]
//!          [--mtu 4096] [--loss 0] [--seed N]
//! ```

mod common;

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, TcpStream},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use common::{Arguments, Failure, Name, Node, PATIENCE, address, agree, exchange, gid};
use soft_roce::{
    Access, CompletionOpcode, HeapMemory, Memory, Operation, PathMtu, QueuePairConfig, QueuePairNumber, RecvRequest,
    RegionHandle, Remote, Segment, SendRequest, Status,
};

/// Barriers from the first exchange of names to the first packet.
const BARRIERS: u32 = 4;
/// Numbers in the report of a bandwidth test, and what ours are: the tool only prints them.
const REPORT_NUMBERS: usize = 5;
const NUMBER: [u8; 8] = [0; 8];
/// Requests under way in a bandwidth test.
const DEPTH: u32 = 64;
/// Receives kept posted, as many as the tool does.
const RECEIVES: u32 = 512;
/// READs and atomics that we take at once.
const READS: usize = 16;
/// A bandwidth test reaches so much memory at least: the tool's requests wander through it.
const CYCLE_BYTES: u32 = 4096;
const ATOMIC_BYTES: u32 = 8;
/// Passes between two looks at the TCP connection during a test.
const LISTEN_PASSES: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Send,
    Write,
    Read,
    Atomic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Test {
    verb: Verb,
    bandwidth: bool,
}

impl FromStr for Test {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let (verb, kind) = text.split_once('_').ok_or(())?;
        let verb = match verb {
            "send" => Verb::Send,
            "write" => Verb::Write,
            "read" => Verb::Read,
            "atomic" => Verb::Atomic,
            _ => return Err(()),
        };
        match kind {
            "lat" => Ok(Self { verb, bandwidth: false }),
            "bw" => Ok(Self { verb, bandwidth: true }),
            _ => Err(()),
        }
    }
}

impl Test {
    /// Whether messages go back and forth, one at a time.
    fn alternates(self) -> bool {
        !self.bandwidth && matches!(self.verb, Verb::Send | Verb::Write)
    }

    /// Whether the tool goes without a word after the test.
    fn is_silent_at_the_end(self) -> bool {
        self == Self { verb: Verb::Write, bandwidth: false }
    }

    /// Whether numbers are exchanged after the test.
    fn reports(self) -> bool {
        self.bandwidth && self.verb != Verb::Send
    }
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse(&["test", "local", "server", "port", "bytes", "rounds", "mtu", "loss", "seed"])?;
    let (local, server): (IpAddr, Option<IpAddr>) = (arguments.need("local")?, arguments.find("server")?);
    let mtu = arguments.mtu()?;
    let mut node = Node::bind(local, &arguments)?;
    let (test, bytes): (Test, _) = (arguments.need("test")?, arguments.get("bytes", 2)?);
    let bytes = if test.verb == Verb::Atomic { ATOMIC_BYTES } else { bytes };
    let mut session = Session::new(&mut node, local, test, server.is_some(), bytes, arguments.get("rounds", 1000)?)?;
    let mut stream = agree(local, server, arguments.get("port", 18_515)?)?;
    settings(&mut stream, server.is_some(), mtu)?;
    if server.is_some() {
        session.run_client(&mut node, &mut stream, mtu)?;
    } else {
        session.run_server(&mut node, &mut stream, mtu)?;
    }
    if test.is_silent_at_the_end() {
        node.linger();
    }
    println!("{}; {:?}", session.result(), node.endpoint.counters());
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

/// One run of a test.
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
    posted: u32,
    completed: u32,
    received: u32,
    /// When the request under way was posted, and how long each took before.
    posted_at: Duration,
    times: Vec<Duration>,
    /// From the first request to the last completion.
    begun: Option<Duration>,
    ended: Duration,
}

impl Session {
    fn new(node: &mut Node, local: IpAddr, test: Test, client: bool, bytes: u32, rounds: u32) -> Result<Self, Failure> {
        let config = QueuePairConfig {
            recv_depth: RECEIVES as usize,
            max_rd_atomic: READS,
            max_dest_rd_atomic: READS,
            ack_timeout: 14,
            ..Default::default()
        };
        let (number, name) = node.queue_pair(local, config)?;
        let memory = || HeapMemory::new(vec![0; bytes.max(CYCLE_BYTES) as usize]);
        let (out, inbox) = (memory(), memory());
        let near = node.endpoint.register(out.clone(), Access::LOCAL)?;
        let far = node.endpoint.register(inbox.clone(), Access::ALL)?;
        let session = Self {
            test,
            client,
            bytes,
            rounds,
            number,
            name,
            out,
            inbox,
            near,
            far,
            peer: None,
            posted: 0,
            completed: 0,
            received: 0,
            posted_at: Duration::ZERO,
            times: Vec::new(),
            begun: None,
            ended: Duration::ZERO,
        };
        for _ in 0..RECEIVES {
            session.post_receive(node)?;
        }
        Ok(session)
    }

    fn post_receive(&self, node: &mut Node) -> Result<(), Failure> {
        let segment = Segment { lkey: self.far.lkey, offset: 0, bytes: self.bytes };
        Ok(node.endpoint.post_recv(self.number, RecvRequest { id: 0, segment })?)
    }

    /// Whether it is our turn. Where messages alternate, the client begins with SEND, the server with WRITE.
    fn may_post(&self) -> bool {
        let depth = if self.test.bandwidth { DEPTH } else { 1 };
        let room = self.posted < self.rounds && self.posted - self.completed < depth;
        if !self.test.alternates() {
            return self.client && room;
        }
        let begins = self.client == (self.test.verb == Verb::Send);
        room && if begins { self.posted == self.received } else { self.posted < self.received }
    }

    fn is_done(&self) -> bool {
        let sent = self.completed == self.rounds;
        match self.test.verb {
            _ if self.test.alternates() => sent && self.received == self.rounds,
            _ if self.client => sent,
            Verb::Send => self.received == self.rounds,
            // The tool adds 1 each time: none may be lost or done twice.
            Verb::Atomic => self.count() == u64::from(self.rounds),
            Verb::Write | Verb::Read => true,
        }
    }

    /// What the peer's atomics have added up to, wherever the tool has sent them.
    fn count(&self) -> u64 {
        let words = self.inbox.to_vec();
        words.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes"))).sum()
    }

    /// One pass: packets, completions, our next requests, which leave at once.
    fn step(&mut self, node: &mut Node, peer: Remote) -> Result<(), Failure> {
        let received = node.receive();
        while let Some(completion) = node.endpoint.poll_completion() {
            if completion.status != Status::Success {
                return Err(format!("{completion:?}; {:?}", node.endpoint.counters()).into());
            }
            if completion.opcode == CompletionOpcode::Recv {
                self.received += 1;
                self.post_receive(node)?;
            } else {
                self.completed += 1;
                self.ended = node.elapsed();
            }
            self.on_round(node);
        }
        if self.test.alternates() && self.test.verb == Verb::Write && self.received < self.rounds {
            // A WRITE shows by its last byte, which counts.
            let mut last = [0];
            self.inbox.read(self.bytes as usize - 1, &mut last);
            if last[0] == (self.received + 1) as u8 {
                self.received += 1;
                self.on_round(node);
            }
        }
        while self.may_post() {
            self.post(node, peer)?;
        }
        node.transmit(received);
        Ok(())
    }

    /// Takes the time of a round that has ended: there and back, or done.
    fn on_round(&mut self, node: &Node) {
        let ended = if self.test.alternates() { self.received } else { self.completed };
        if !self.test.bandwidth && self.begun.is_some() && ended == self.posted && self.times.len() < ended as usize {
            self.times.push(node.elapsed() - self.posted_at);
        }
    }

    fn post(&mut self, node: &mut Node, peer: Remote) -> Result<(), Failure> {
        self.posted += 1;
        self.posted_at = node.elapsed();
        self.begun.get_or_insert(self.posted_at);
        let local = Segment { lkey: self.near.lkey, offset: 0, bytes: self.bytes };
        let operation = match self.test.verb {
            Verb::Send => Operation::Send { local },
            Verb::Write => Operation::Write { local, remote: peer },
            Verb::Read => Operation::Read { local, remote: peer },
            Verb::Atomic => Operation::FetchAdd { local, remote: peer, add: 1 },
        };
        if self.test.verb == Verb::Write {
            self.out.write(self.bytes as usize - 1, &[self.posted as u8]);
        }
        Ok(node.endpoint.post_send(self.number, SendRequest::new(0, operation))?)
    }

    /// What the tool prints: latency is half of a round where messages alternate; a MB has 2^20 bytes.
    fn result(&mut self) -> String {
        let Some(begun) = self.begun else { return format!("{} received of {}", self.received, self.rounds) };
        if self.test.bandwidth {
            let bytes = f64::from(self.bytes) * f64::from(self.completed);
            return format!("bandwidth {:.2} MB/s", bytes / f64::from(1 << 20) / (self.ended - begun).as_secs_f64());
        }
        self.times.sort_unstable();
        let median = self.times.get(self.times.len() / 2).copied().unwrap_or_default();
        let halves = if self.test.alternates() { 2 } else { 1 };
        format!("latency {:.2} us", (median / halves).as_secs_f64() * 1e6)
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
        let (mut heard, mut heard_at) = (0, node.elapsed());
        while !self.is_done() && node.elapsed_about() < heard_at + PATIENCE {
            self.step(node, peer)?;
            let packets = node.endpoint.counters().packets_received;
            if packets != std::mem::replace(&mut heard, packets) {
                heard_at = node.elapsed_about();
            }
        }
        if self.test.is_silent_at_the_end() || !self.is_done() {
            return Ok(());
        }
        if self.test.reports() {
            for _ in 0..REPORT_NUMBERS {
                exchange(stream, true, &NUMBER)?;
            }
        }
        exchange(stream, true, &keys)?;
        exchange(stream, true, DONE)?;
        Ok(())
    }

    fn run_server(&mut self, node: &mut Node, stream: &mut TcpStream, mtu: PathMtu) -> Result<(), Failure> {
        let (keys, mut heard) = (self.keys(), Vec::new());
        let mut answers = self.answers(&keys);
        let after_test = answers.len() - BARRIERS as usize;
        stream.set_nonblocking(true)?;
        let (mut progress, mut progressed) = ((0, 0), node.elapsed());
        for pass in 0.. {
            if node.elapsed_about() > progressed + PATIENCE {
                break;
            }
            let testing = answers.len() <= after_test;
            match self.peer.filter(|_| testing) {
                Some(peer) => self.step(node, peer)?,
                None => {
                    node.step();
                }
            }
            // While packets are what counts, few looks at the TCP connection, each of which is a system call.
            if testing && pass % LISTEN_PASSES != 0 {
                continue;
            }
            if !listen(stream, &mut heard)? {
                return Ok(());
            }
            let due = answers.front().filter(|answer| heard.len() >= answer.len() && (!testing || self.is_done()));
            if let Some(&answer) = due {
                self.on_keys(node, &heard[..answer.len()], mtu)?;
                heard.drain(..answer.len());
                stream.write_all(answer)?;
                answers.pop_front();
            }
            if answers.is_empty() && !self.test.is_silent_at_the_end() {
                return Ok(());
            }
            let now = (node.endpoint.counters().packets_received, answers.len());
            if now != std::mem::replace(&mut progress, now) {
                progressed = node.elapsed_about();
            }
        }
        Err(format!("nothing happened for {} s", PATIENCE.as_secs()).into())
    }

    /// What a server says, in order; each answers a message of the same length.
    fn answers<'a>(&self, keys: &'a [u8]) -> VecDeque<&'a [u8]> {
        let mut answers = VecDeque::from([keys; BARRIERS as usize]);
        if self.test.reports() {
            answers.extend([&NUMBER[..]; REPORT_NUMBERS]);
        }
        if !self.test.is_silent_at_the_end() {
            answers.extend([keys, DONE]);
        }
        answers
    }

    /// LID, outstanding READs, queue pair, PSN, key, address, GID, shared receive queue, and a NUL, all hexadecimal.
    fn keys(&self) -> Vec<u8> {
        let Name { queue_pair, psn, address } = self.name;
        let gid: String = gid(address).iter().map(|byte| format!("{byte:02x}:")).collect();
        let (rkey, vaddr) = (self.far.rkey, self.far.address);
        format!("0000:{READS:04x}:{queue_pair:06x}:{psn:06x}:{rkey:08x}:{vaddr:016x}:{gid}00000000:\0").into_bytes()
    }
}

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
