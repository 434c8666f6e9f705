//! The other end of `ibv_rc_pingpong -c` and `ibv_ud_pingpong -c` (rdma-core), which may run on a kernel's or network
//! card's queue pair.
//!
//! Both sides tell each other their queue pair over TCP in 52 bytes; then a message goes back and forth. The peer sends
//! from the buffer into which it receives, so what we get is what we sent the round before: every byte is compared.
//!
//! ```text
//! pingpong --local ADDRESS [--server ADDRESS] [--port 18515] [--bytes 4096] [--rounds 100] [--mtu 4096] [--loss 0]
//! [--seed N]
//!          [--service rc|ud]
//! ```

mod common;

use std::{io::Write, net::SocketAddr, sync::Arc};

use common::{Arguments, Failure, Name, Node, ROCE_PORT, address, agree, exchange, gid};
use soft_roce::{
    Access, CompletionOpcode, DATAGRAM_HEADER_BYTES, DatagramAddress, DatagramConfig, DatagramRequest, HeapMemory,
    Memory, Operation, PathMtu, QueuePairConfig, QueuePairNumber, RecvRequest, Segment, SendRequest,
};

/// `ibv_rc_pingpong -c` looks at one byte of each page and expects 0.
const PAGE_BYTES: usize = 4096;
/// What its buffer holds at first.
const FILL: u8 = 0x7b;
/// What it gives its datagram queue pair.
const QUEUE_KEY: u32 = 0x1111_1111;

fn main() -> Result<(), Failure> {
    let known = ["local", "server", "port", "bytes", "rounds", "mtu", "loss", "seed", "service"];
    let arguments = Arguments::parse(&known)?;
    let (local, server) = (arguments.need("local")?, arguments.find("server")?);
    let bytes: u32 = arguments.get("bytes", 4096)?;
    let rounds: u32 = arguments.get("rounds", 100)?;
    let mut node = Node::bind(local, &arguments)?;
    let mtu = arguments.mtu()?;
    let (number, name, datagrams) = match arguments.get("service", "rc".to_owned())?.as_str() {
        "rc" => {
            // What ibv_rc_pingpong sets at its end.
            let config =
                QueuePairConfig { max_rd_atomic: 1, max_dest_rd_atomic: 1, ack_timeout: 14, ..Default::default() };
            let (number, name) = node.queue_pair(local, config)?;
            (number, name, false)
        }
        "ud" => {
            let config = DatagramConfig { path_mtu: mtu, ..DatagramConfig::new(QUEUE_KEY) };
            let (number, name) = node.datagram_queue_pair(local, config)?;
            (number, name, true)
        }
        other => return Err(format!("--service {other}: expected rc or ud").into()),
    };
    let mut game = Game::new(&mut node, number, bytes, datagrams)?;
    game.post_receive(&mut node)?;

    let mut stream = agree(local, server, arguments.get("port", 18_515)?)?;
    if server.is_some() {
        let peer = decode(&exchange(&mut stream, true, &encode(name))?)?;
        game.connect(&mut node, name, peer, mtu)?;
        stream.write_all(b"done\0")?;
        game.serve(&mut node, 0)?;
    } else {
        // We must be ready before the peer learns our name.
        let mut theirs = [0; MESSAGE_BYTES];
        std::io::Read::read_exact(&mut stream, &mut theirs)?;
        game.connect(&mut node, name, decode(&theirs)?, mtu)?;
        stream.write_all(&encode(name))?;
    }
    let begun = node.elapsed();
    for round in 0..rounds {
        // The client has begun the first round already.
        let next = if server.is_some() { round + 1 } else { round };
        game.turn(&mut node, server.is_some(), round, (next < rounds).then_some(next))?;
    }
    if server.is_none() {
        node.success()?;
    }
    let micros = (node.elapsed() - begun).as_micros();
    node.linger();
    println!(
        "{rounds} rounds of {bytes} bytes, {} us each; {:?}",
        micros / u128::from(rounds),
        node.endpoint.counters()
    );
    Ok(())
}

/// The message that goes back and forth.
struct Game {
    number: QueuePairNumber,
    bytes: u32,
    out: Arc<HeapMemory>,
    inbox: Arc<HeapMemory>,
    out_key: u32,
    inbox_key: u32,
    /// What datagrams bring before the message.
    header_bytes: usize,
    /// Where datagrams go, once it is known.
    peer: Option<DatagramAddress>,
}

impl Game {
    fn new(node: &mut Node, number: QueuePairNumber, bytes: u32, datagrams: bool) -> Result<Self, Failure> {
        let header_bytes = if datagrams { DATAGRAM_HEADER_BYTES } else { 0 };
        let out = HeapMemory::new(vec![0; bytes as usize]);
        let inbox = HeapMemory::new(vec![0; header_bytes + bytes as usize]);
        let out_key = node.endpoint.register(out.clone(), Access::LOCAL)?.lkey;
        let inbox_key = node.endpoint.register(inbox.clone(), Access::LOCAL)?.lkey;
        Ok(Self { number, bytes, out, inbox, out_key, inbox_key, header_bytes, peer: None })
    }

    fn connect(&mut self, node: &mut Node, own: Name, peer: Name, mtu: PathMtu) -> Result<(), Failure> {
        if self.header_bytes == 0 {
            return node.connect(self.number, own, peer, mtu);
        }
        self.peer = Some(DatagramAddress {
            address: SocketAddr::new(peer.address, ROCE_PORT),
            queue_pair: QueuePairNumber(peer.queue_pair),
        });
        Ok(())
    }

    /// What a receive takes.
    fn received_bytes(&self) -> u32 {
        self.bytes + self.header_bytes as u32
    }

    fn post_receive(&self, node: &mut Node) -> Result<(), Failure> {
        let segment = Segment { lkey: self.inbox_key, offset: 0, bytes: self.received_bytes() };
        Ok(node.endpoint.post_recv(self.number, RecvRequest { id: 0, segment })?)
    }

    /// Sends the message of a round.
    fn serve(&self, node: &mut Node, round: u32) -> Result<(), Failure> {
        self.out.write(0, &pattern(round, self.bytes));
        let local = Segment { lkey: self.out_key, offset: 0, bytes: self.bytes };
        let Some(to) = self.peer else {
            return Ok(node.endpoint.post_send(self.number, SendRequest::new(0, Operation::Send { local }))?);
        };
        let request = DatagramRequest {
            id: 0,
            local,
            immediate: None,
            to,
            queue_key: QUEUE_KEY,
            signalled: true,
            solicited: false,
        };
        Ok(node.endpoint.post_datagram(self.number, request)?)
    }

    /// Waits for the peer's message of `round`, and sends ours of round `next`.
    fn turn(&self, node: &mut Node, client: bool, round: u32, next: Option<u32>) -> Result<(), Failure> {
        // A client has a message under way; a server has from the second round on.
        let mut waiting = if client || round > 0 { 2 } else { 1 };
        while waiting > 0 {
            let completion = node.success()?;
            let received = completion.opcode == CompletionOpcode::Recv;
            let expected = self.received_bytes();
            if received && completion.bytes != expected {
                return Err(format!("round {round}: {} bytes, expected {expected}", completion.bytes).into());
            }
            waiting -= 1;
        }
        let expected = match (client, round) {
            (true, _) => pattern(round, self.bytes),
            (false, 0) => (0..self.bytes as usize).map(|at| if at % PAGE_BYTES == 0 { 0 } else { FILL }).collect(),
            (false, _) => pattern(round - 1, self.bytes),
        };
        let found = self.inbox.to_vec().split_off(self.header_bytes);
        if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
            return Err(format!("round {round}, byte {at}: {:#x}, expected {:#x}", found[at], expected[at]).into());
        }
        if let Some(next) = next {
            self.post_receive(node)?;
            self.serve(node, next)?;
        }
        Ok(())
    }
}

/// Bytes that differ by round and place, 0 where the peer looks.
fn pattern(round: u32, bytes: u32) -> Vec<u8> {
    let byte = |at: usize| (at.wrapping_mul(31) ^ (at >> 8) ^ (round as usize).wrapping_mul(17)) as u8;
    (0..bytes as usize).map(|at| if at % PAGE_BYTES == 0 { 0 } else { byte(at) }).collect()
}

/// `LLLL:QQQQQQ:PPPPPP:<32 digits>` and a NUL, all hexadecimal: LID, queue pair, PSN, GID.
const MESSAGE_BYTES: usize = 52;

fn encode(name: Name) -> Vec<u8> {
    let gid: String = gid(name.address).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0000:{:06x}:{:06x}:{gid}\0", name.queue_pair, name.psn).into_bytes()
}

fn decode(message: &[u8]) -> Result<Name, Failure> {
    let text = std::str::from_utf8(message)?.trim_end_matches('\0');
    let mut fields = text.split(':').skip(1);
    let mut field = || fields.next().ok_or(format!("{text}: expected LID:QPN:PSN:GID"));
    let queue_pair = u32::from_str_radix(field()?, 16)?;
    let psn = u32::from_str_radix(field()?, 16)?;
    let gid = u128::from_str_radix(field()?, 16)?.to_be_bytes();
    Ok(Name { address: address(gid), queue_pair, psn })
}
