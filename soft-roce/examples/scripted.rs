//! An end that does what a script at the other end tells it, a line at a time over TCP: for tests that compare each
//! step.
//!
//! ```text
//! scripted --local ADDRESS [--port 18515] [--mtu 4096] [--loss 0] [--seed N]
//! ```
//!
//! | line | answer |
//! | --- | --- |
//! | `connect QPN PSN GID` (hexadecimal) | `QPN PSN RKEY ADDRESS` of a fresh queue pair and a memory of 8 MiB + 128
//! bytes |
//! | `fill SEED` | `ok`; byte k of the memory becomes (31 k + k / 256 + SEED) mod 256 |
//! | `compare SEED OFFSET BYTES START` | `same` if the memory from OFFSET on holds the pattern of SEED from START on,
//! or where it does not |
//! | `dump OFFSET BYTES` | the bytes in hexadecimal |
//! | `pieces N` | `ok`; the local memory of each request from now on is given as N pieces |
//! | `recv BYTES` | `ok`; receives to the start of the memory |
//! | `send BYTES`, `send_imm BYTES IMM` | `ok`; sends from the start of the memory |
//! | `write`, `read` `BYTES ADDRESS RKEY`, `write_imm BYTES ADDRESS RKEY IMM` | `ok` |
//! | `fetch_add ADDRESS RKEY ADD`, `compare_swap ADDRESS RKEY COMPARE SWAP` | `ok`; the original goes to the start |
//! | `wait` | `STATUS BYTES IMM` of the next completion, numbered as `enum ibv_wc_status` is; IMM is `-` if there is
//! none |

mod common;

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, TcpStream},
    sync::Arc,
};

use common::{Arguments, Failure, Name, Node, PATIENCE, address, agree};
use soft_roce::{
    Access, HeapMemory, Memory, Operation, PathMtu, QueuePairConfig, QueuePairNumber, RecvRequest, RegionHandle,
    Remote, Segment, SendRequest,
};

const MEMORY_BYTES: usize = (8 << 20) + 128;
const LINE_BYTES_MAX: usize = 1 << 10;

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse(&["local", "port", "mtu", "loss", "seed"])?;
    let local: IpAddr = arguments.need("local")?;
    let mut node = Node::bind(local, &arguments)?;
    let memory = HeapMemory::new(vec![0; MEMORY_BYTES]);
    let region = node.endpoint.register(memory.clone(), Access::ALL)?;
    let mut stream = agree(local, None, arguments.get("port", 18_515)?)?;
    stream.set_nonblocking(true)?;
    let mut actor = Actor { node, local, mtu: arguments.mtu()?, memory, region, number: None, pieces: 1 };
    let mut line = Vec::new();
    while let Some(text) = actor.next_line(&mut stream, &mut line)? {
        let answer = actor.obey(&text).unwrap_or_else(|error| format!("error: {text}: {error}"));
        stream.set_nonblocking(false)?;
        writeln!(stream, "{answer}")?;
        stream.set_nonblocking(true)?;
    }
    Ok(())
}

struct Actor {
    node: Node,
    local: IpAddr,
    mtu: PathMtu,
    memory: Arc<HeapMemory>,
    region: RegionHandle,
    number: Option<QueuePairNumber>,
    pieces: u64,
}

impl Actor {
    /// Serves the peer's packets until the next line has come; `None` at the end.
    fn next_line(&mut self, stream: &mut TcpStream, line: &mut Vec<u8>) -> Result<Option<String>, Failure> {
        let until = self.node.elapsed() + 2 * PATIENCE;
        while self.node.elapsed() < until && line.len() < LINE_BYTES_MAX {
            if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
                let text = String::from_utf8(line[..end].to_vec())?;
                line.drain(..=end);
                return Ok(Some(text));
            }
            self.node.step();
            let mut some = [0; 256];
            match stream.read(&mut some) {
                Ok(0) => return Ok(None),
                Ok(bytes) => line.extend_from_slice(&some[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err("no line came".into())
    }

    fn obey(&mut self, text: &str) -> Result<String, Failure> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let number = |at: usize| words.get(at).ok_or("too few words")?.parse::<u64>().map_err(Failure::from);
        let pieces = |bytes: u64| pieces(self.region.lkey, bytes, self.pieces);
        let local = |bytes: u64| pieces(bytes)[0];
        let remote = |at: usize| Ok::<_, Failure>(Remote { address: number(at)?, rkey: number(at + 1)? as u32 });
        let operation = match words.first().copied().unwrap_or_default() {
            "connect" => return self.connect(&words),
            "fill" => {
                let seed = number(1)?;
                let bytes: Vec<u8> = (0..MEMORY_BYTES).map(|at| pattern(seed, at)).collect();
                self.memory.write(0, &bytes);
                return Ok("ok".into());
            }
            "compare" => {
                let (seed, start) = (number(1)?, number(4)? as usize);
                let part = self.part(number(2)?, number(3)?)?;
                let differs = (0..part.len()).find(|&at| part[at] != pattern(seed, start + at));
                return Ok(differs.map_or("same".into(), |at| format!("differs at byte {at} of {}", part.len())));
            }
            "dump" => {
                let part = self.part(number(1)?, number(2)?)?;
                return Ok(part.iter().map(|byte| format!("{byte:02x}")).collect());
            }
            "wait" => {
                let done = self.node.completion()?;
                let immediate = done.immediate.map_or("-".into(), |immediate| immediate.to_string());
                return Ok(format!("{} {} {immediate}", done.status as u8, done.bytes));
            }
            "pieces" => {
                self.pieces = number(1)?.max(1);
                return Ok("ok".into());
            }
            "recv" => {
                let list = pieces(number(1)?);
                let request = RecvRequest { id: 0, segment: list[0] };
                self.node.endpoint.post_recv_list(self.number.ok_or("not connected")?, request, &list[1..])?;
                return Ok("ok".into());
            }
            "send" => Operation::Send { local: local(number(1)?) },
            "send_imm" => Operation::SendWithImmediate { local: local(number(1)?), immediate: number(2)? as u32 },
            "write" => Operation::Write { local: local(number(1)?), remote: remote(2)? },
            "write_imm" => Operation::WriteWithImmediate {
                local: local(number(1)?),
                remote: remote(2)?,
                immediate: number(4)? as u32,
            },
            "read" => Operation::Read { local: local(number(1)?), remote: remote(2)? },
            "fetch_add" => Operation::FetchAdd { local: local(8), remote: remote(1)?, add: number(3)? },
            "compare_swap" => {
                Operation::CompareSwap { local: local(8), remote: remote(1)?, compare: number(3)?, swap: number(4)? }
            }
            _ => return Err("unknown command".into()),
        };
        let atomic = matches!(operation, Operation::FetchAdd { .. } | Operation::CompareSwap { .. });
        let list = pieces(if atomic { 8 } else { number(1)? });
        let number = self.number.ok_or("not connected")?;
        self.node.endpoint.post_send_list(number, SendRequest::new(0, operation), &list[1..])?;
        Ok("ok".into())
    }

    /// A copy of a part of the memory.
    fn part(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, Failure> {
        let end = offset.saturating_add(bytes);
        if end > MEMORY_BYTES as u64 {
            return Err("outside the memory".into());
        }
        let mut part = vec![0; bytes as usize];
        self.memory.read(offset as usize, &mut part);
        Ok(part)
    }

    fn connect(&mut self, words: &[&str]) -> Result<String, Failure> {
        let [_, queue_pair, psn, gid] = words else { return Err("expected QPN PSN GID".into()) };
        let peer = Name {
            address: address(u128::from_str_radix(gid, 16)?.to_be_bytes()),
            queue_pair: u32::from_str_radix(queue_pair, 16)?,
            psn: u32::from_str_radix(psn, 16)?,
        };
        if let Some(old) = self.number.take() {
            self.node.endpoint.destroy_queue_pair(old);
        }
        while self.node.endpoint.poll_completion().is_some() {}
        // The kernel's peers here take and give up to 4 READs, and wait 1.28 ms for a receive.
        let config = QueuePairConfig { max_rd_atomic: 4, ack_timeout: 14, min_rnr_timer: 14, ..Default::default() };
        let (number, name) = self.node.queue_pair(self.local, config)?;
        self.node.connect(number, name, peer, self.mtu)?;
        self.number = Some(number);
        Ok(format!("{} {} {} {}", name.queue_pair, name.psn, self.region.rkey, self.region.address))
    }
}

/// The first `bytes` of a region, in `count` pieces.
fn pieces(lkey: u32, bytes: u64, count: u64) -> Vec<Segment> {
    let border = |index: u64| bytes * index / count;
    let piece =
        |index| Segment { lkey, offset: border(index) as usize, bytes: (border(index + 1) - border(index)) as u32 };
    (0..count).map(piece).collect()
}

/// Byte `at` of the pattern of `seed`.
fn pattern(seed: u64, at: usize) -> u8 {
    (at * 31 + at / 256 + seed as usize) as u8
}
