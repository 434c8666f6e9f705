//! What `bench verbs` compares with: one end sends so many bytes, the other sends so many back, over a UDP or a TCP
//! socket and nothing else. A READ is a small request and an object back, the others an object and a small answer.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::{
    io::{self, ErrorKind, IoSliceMut, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use socket2::SockRef;
use transport::random_loopback;

use super::measure::{Contestant, Initiator, Target};
use crate::verbs::measure::Op;

/// A request or an answer without an object: as much as RoCEv2's header for either.
const SMALL_BYTES: usize = 16;
/// Payload of one datagram: the path MTU that the soft arm has.
const DATAGRAM_BYTES: usize = 4096;
/// What one UDP_SEGMENT send carries, and one UDP_GRO receive.
const RUN_BYTES_MAX: usize = 15 * DATAGRAM_BYTES;
const GRO_BYTES_MAX: usize = 64 * 1024;
const GRO_BATCH: usize = 8;
/// What is asked of the system for socket buffers.
const BUFFER_BYTES_WANTED: usize = 8 * 1024 * 1024;
/// Bytes under way over UDP: nothing repairs a loss, so that must fit the smallest default buffer, twice.
const UDP_WINDOW_BYTES_MIN: usize = 48 * 1024;

/// A socket that moves bytes without looking at them.
trait Pipe: Send {
    /// Sends up to `bytes`, which belong together; how many it took, 0 if it has no room.
    fn send(&mut self, bytes: usize) -> io::Result<usize>;
    /// Receives; 0 if there is nothing.
    fn receive(&mut self) -> io::Result<usize>;
}

/// How an operation is taken apart.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Exchanges of one operation.
    pieces: usize,
    /// Exchanges under way.
    pieces_max: usize,
    /// Bytes of one exchange from the initiator,
    forward: usize,
    /// and from the target.
    back: usize,
}

impl Plan {
    fn new(op: Op, bytes: u32, window_bytes: usize) -> Self {
        let bytes = bytes as usize;
        let pieces = bytes.div_ceil(window_bytes);
        let piece = bytes.div_ceil(pieces);
        let small = SMALL_BYTES.min(piece);
        let (forward, back) = match op {
            Op::Read => (small, piece),
            Op::Send | Op::Write => (piece, small),
            Op::Pingpong => (piece, piece),
        };
        Self { pieces, pieces_max: (window_bytes / piece).max(1), forward, back }
    }
}

/// One end: what it still sends, and what it has received of the next message.
struct End<P> {
    pipe: P,
    /// Messages that wait to be sent.
    waiting: usize,
    /// Of the first of them.
    sent_bytes: usize,
    received_bytes: usize,
}

impl<P: Pipe> End<P> {
    fn new(pipe: P) -> Self {
        Self { pipe, waiting: 0, sent_bytes: 0, received_bytes: 0 }
    }

    /// Sends what waits, messages of `bytes` each, until there is no room.
    fn transmit(&mut self, bytes: usize) -> Result<(), String> {
        while self.waiting > 0 {
            match self.pipe.send(bytes - self.sent_bytes).map_err(|error| error.to_string())? {
                0 => break,
                sent => self.sent_bytes += sent,
            }
            if self.sent_bytes == bytes {
                self.waiting -= 1;
                self.sent_bytes = 0;
            }
        }
        Ok(())
    }

    /// One look; how many messages of `bytes` each are now complete.
    fn receive(&mut self, bytes: usize) -> Result<usize, String> {
        self.received_bytes += self.pipe.receive().map_err(|error| error.to_string())?;
        let messages = self.received_bytes / bytes;
        self.received_bytes %= bytes;
        Ok(messages)
    }
}

struct ExchangeInitiator<P> {
    end: End<P>,
    plan: Plan,
    /// Exchanges that were not begun.
    held: usize,
    /// Exchanges that were begun and have no answer.
    under_way: usize,
    /// Exchanges answered of the operation in progress.
    answered: usize,
}

impl<P: Pipe> ExchangeInitiator<P> {
    fn begin(&mut self) -> Result<(), String> {
        let room = self.held.min(self.plan.pieces_max - self.under_way);
        self.held -= room;
        self.under_way += room;
        self.end.waiting += room;
        self.end.transmit(self.plan.forward)
    }
}

impl<P: Pipe> Initiator for ExchangeInitiator<P> {
    fn post(&mut self) -> Result<(), String> {
        self.held += self.plan.pieces;
        self.begin()
    }

    fn poll(&mut self) -> Result<u64, String> {
        let answers = self.end.receive(self.plan.back)?;
        self.under_way -= answers;
        self.answered += answers;
        self.begin()?;
        let completed = self.answered / self.plan.pieces;
        self.answered %= self.plan.pieces;
        Ok(completed as u64)
    }

    fn objects(&self) -> Option<Vec<u8>> {
        None
    }
}

struct ExchangeTarget<P> {
    end: End<P>,
    plan: Plan,
}

impl<P: Pipe> Target for ExchangeTarget<P> {
    fn serve(&mut self) -> Result<(), String> {
        self.end.waiting += self.end.receive(self.plan.forward)?;
        self.end.transmit(self.plan.back)
    }

    fn objects(&self) -> Option<Vec<u8>> {
        None
    }
}

fn contestant<P: Pipe + 'static>(name: &'static str, near: P, far: P, plan: Plan) -> Contestant {
    Contestant {
        name,
        initiator: Box::new(ExchangeInitiator { end: End::new(near), plan, held: 0, under_way: 0, answered: 0 }),
        target: Box::new(ExchangeTarget { end: End::new(far), plan }),
    }
}

/// Two UDP sockets. Objects of one datagram travel by plain `send` and `recv`, larger ones by UDP_SEGMENT and UDP_GRO.
pub(super) fn open_udp(op: Op, bytes: u32) -> Result<Contestant, String> {
    let failed = |error: io::Error| error.to_string();
    let sockets = [UdpSocket::bind(any_port()).map_err(failed)?, UdpSocket::bind(any_port()).map_err(failed)?];
    let [near_address, far_address] =
        [sockets[0].local_addr().map_err(failed)?, sockets[1].local_addr().map_err(failed)?];
    let [near, far] = sockets;
    let near = UdpPipe::new(near, far_address, bytes as usize).map_err(failed)?;
    let far = UdpPipe::new(far, near_address, bytes as usize).map_err(failed)?;
    let plan = Plan::new(op, bytes, near.window_bytes().min(far.window_bytes()));
    Ok(contestant("raw UDP", near, far, plan))
}

/// Two TCP sockets, without Nagle's delay, and memory for `window` objects at each end.
pub(super) fn open_tcp(op: Op, bytes: u32, window: usize) -> Result<Contestant, String> {
    let open = || {
        let listener = TcpListener::bind(any_port())?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        // Whoever else found the port within that time would be a stranger.
        let far = loop {
            let (stream, from) = listener.accept()?;
            if from == near.local_addr()? {
                break stream;
            }
        };
        let memory_bytes = window * bytes as usize;
        Ok((TcpPipe::new(near, memory_bytes)?, TcpPipe::new(far, memory_bytes)?))
    };
    let (near, far) = open().map_err(|error: io::Error| error.to_string())?;
    // TCP has its own windows.
    Ok(contestant("raw TCP", near, far, Plan { pieces_max: usize::MAX, ..Plan::new(op, bytes, bytes as usize) }))
}

fn any_port() -> (Ipv4Addr, u16) {
    (random_loopback(), 0)
}

/// 0 where the system has nothing, or no room.
fn or_none(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

struct UdpPipe {
    socket: UdpSocket,
    peer: SocketAddr,
    /// Where objects need more than one datagram.
    offload: Option<Offload>,
    buffer: Vec<u8>,
}

struct Offload {
    state: UdpSocketState,
    buffers: Vec<Vec<u8>>,
    metas: [RecvMeta; GRO_BATCH],
}

impl UdpPipe {
    fn new(socket: UdpSocket, peer: SocketAddr, bytes: usize) -> io::Result<Self> {
        let offload = if bytes > DATAGRAM_BYTES {
            let buffers = vec![vec![0; GRO_BYTES_MAX]; GRO_BATCH];
            Some(Offload {
                state: UdpSocketState::new((&socket).into())?,
                buffers,
                metas: [RecvMeta::default(); GRO_BATCH],
            })
        } else {
            // What `send` and `recv` need; the larger objects' socket stays unconnected, as the soft arm's is.
            socket.connect(peer)?;
            None
        };
        socket.set_nonblocking(true)?;
        let options = SockRef::from(&socket);
        options.set_recv_buffer_size(BUFFER_BYTES_WANTED)?;
        options.set_send_buffer_size(BUFFER_BYTES_WANTED)?;
        Ok(Self { socket, peer, offload, buffer: vec![7; RUN_BYTES_MAX] })
    }

    /// Bytes that may wait in the socket. The system counts twice what a packet holds, and more.
    fn window_bytes(&self) -> usize {
        let buffer_bytes = SockRef::from(&self.socket).recv_buffer_size().unwrap_or(0);
        (buffer_bytes / 8).max(UDP_WINDOW_BYTES_MIN)
    }
}

impl Pipe for UdpPipe {
    fn send(&mut self, bytes: usize) -> io::Result<usize> {
        let Some(Offload { state, .. }) = &self.offload else {
            return or_none(self.socket.send(&self.buffer[..bytes]));
        };
        let run_max = if state.max_gso_segments() > 1 { RUN_BYTES_MAX } else { DATAGRAM_BYTES };
        let contents = &self.buffer[..bytes.min(run_max)];
        let transmit =
            Transmit { destination: self.peer, ecn: None, contents, segment_size: Some(DATAGRAM_BYTES), src_ip: None };
        or_none(state.try_send((&self.socket).into(), &transmit).map(|()| contents.len()))
    }

    fn receive(&mut self) -> io::Result<usize> {
        let Some(Offload { state, buffers, metas }) = &mut self.offload else {
            return or_none(self.socket.recv(&mut self.buffer));
        };
        let mut slices = buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer));
        let mut slices: [IoSliceMut<'_>; GRO_BATCH] = std::array::from_fn(|_| slices.next().expect("one for each"));
        let runs = or_none(state.recv((&self.socket).into(), &mut slices, metas))?;
        Ok(metas[..runs].iter().map(|meta| meta.len).sum())
    }
}

/// Objects lie one after the other in the memory of each end, from its start again after the last.
struct TcpPipe {
    stream: TcpStream,
    memory: Vec<u8>,
    send_at: usize,
    receive_at: usize,
}

impl TcpPipe {
    fn new(stream: TcpStream, memory_bytes: usize) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, memory: vec![7; memory_bytes], send_at: 0, receive_at: 0 })
    }
}

impl Pipe for TcpPipe {
    fn send(&mut self, bytes: usize) -> io::Result<usize> {
        let end = self.memory.len().min(self.send_at + bytes);
        let sent = or_none(self.stream.write(&self.memory[self.send_at..end]))?;
        self.send_at = (self.send_at + sent) % self.memory.len();
        Ok(sent)
    }

    fn receive(&mut self) -> io::Result<usize> {
        let received = or_none(self.stream.read(&mut self.memory[self.receive_at..]))?;
        self.receive_at = (self.receive_at + received) % self.memory.len();
        Ok(received)
    }
}
