//! The UDP socket as RoCEv2 needs it.
//!
//! The invariant CRC covers the IP identification and flags, which a UDP socket does not choose. Known are they all the
//! same: a datagram of an unconnected socket with path MTU discovery on leaves with identification 0 and DF set, and
//! the k-th segment of a UDP_SEGMENT buffer with identification k. `quinn-udp` sets exactly these options
//! (IP_MTU_DISCOVER = PROBE, UDP_GRO), knows the control messages, and falls back when the kernel refuses UDP_SEGMENT;
//! the socket stays unconnected here.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::{
    io::{self, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use socket2::{Domain, SockRef, Type};

use super::{
    DriverConfig, Sharing,
    options::{self, Instruction},
};
use crate::wire::PACKET_BYTES_MAX;

/// What must arrive before we read without loss: fewer packets would make every READ wait for many round trips.
const CAPACITY_BYTES_MIN: usize = 4 * PACKET_BYTES_MAX;
/// What is asked of the system for sending; it grants at most net.core.wmem_max.
const SEND_BUFFER_BYTES: usize = 8 * 1024 * 1024;
/// What one receive buffer holds: the largest batch of packets that UDP_GRO merges.
const BATCH_BYTES_MAX: usize = 64 * 1024;
/// Buffers per system call. More would leave the second-level cache.
const BUFFERS: usize = 8;
/// The least: with one more than there are batches, a call tells that there is nothing behind them.
const OFFERED_MIN: usize = 2;

/// What a look at the socket has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    Nothing,
    /// There may be more.
    Some,
    All,
}

/// A non-blocking, unconnected UDP socket with segmentation offload in both directions.
pub(crate) struct Socket {
    socket: UdpSocket,
    state: UdpSocketState,
    local: SocketAddr,
    receive_buffer_bytes: usize,
    buffers: Vec<Vec<u8>>,
    metas: [RecvMeta; BUFFERS],
    /// Buffers to offer next: looking at an empty socket costs by their number, so it grows while they are filled.
    offered: usize,
}

impl Socket {
    /// Binds to a specific address; port 0 lets the system choose.
    ///
    /// # Errors
    /// One line that says what to change: if the address is unspecified (the invariant CRC covers it, so it must be
    /// known), taken, or not this host's, or the system grants too small a buffer.
    pub(crate) fn bind(address: SocketAddr, config: &DriverConfig) -> io::Result<Self> {
        if address.ip().is_unspecified() {
            return Err(invalid("RoCEv2 needs one specific IP address of this host, not the unspecified one"));
        }
        let shared = config.sharing != Sharing::Alone;
        if shared && address.port() == 0 {
            return Err(invalid("a port can only be shared if it is named; RoCEv2's is 4791"));
        }
        let socket = socket2::Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
        socket.set_reuse_port(shared)?;
        socket.bind(&address.into()).map_err(|error| explain(&error, shared))?;
        let socket = UdpSocket::from(socket);
        let state = UdpSocketState::new((&socket).into())?;
        if state.may_fragment() {
            let cause = "this system sets no DF bit (IP_MTU_DISCOVER), so the invariant CRC cannot be known";
            return Err(io::Error::new(io::ErrorKind::Unsupported, cause));
        }
        if address.is_ipv6() {
            options::accept_zero_checksums(&socket)?;
        }
        options::omit_arrivals(&socket)?;
        if config.refuse_segmentation {
            options::refuse_segmentation(&socket)?;
        }
        let sizes = SockRef::from(&socket);
        // The system cuts down what it does not grant; what we really got is asked below.
        sizes.set_recv_buffer_size(config.receive_buffer_bytes)?;
        sizes.set_send_buffer_size(SEND_BUFFER_BYTES)?;
        let bound = Self {
            local: socket.local_addr()?,
            receive_buffer_bytes: sizes.recv_buffer_size()?,
            buffers: vec![vec![0; BATCH_BYTES_MAX]; BUFFERS],
            metas: [RecvMeta::default(); BUFFERS],
            offered: OFFERED_MIN,
            socket,
            state,
        };
        let capacity = bound.receive_capacity_bytes();
        if capacity < CAPACITY_BYTES_MIN {
            return Err(io::Error::other(format!(
                "the socket's receive buffer holds {capacity} bytes of packets, and {CAPACITY_BYTES_MIN} are needed: \
                 raise the limit with `sysctl -w net.core.rmem_max=4194304`"
            )));
        }
        Ok(bound)
    }

    /// Where it is bound.
    #[must_use]
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Payload bytes that may arrive before we read, without loss. The system counts the memory behind each packet:
    /// 8.4 KB for a packet of 4112 bytes, so less than half of the buffer is payload.
    #[must_use]
    pub(crate) fn receive_capacity_bytes(&self) -> usize {
        self.receive_buffer_bytes / 20 * 9
    }

    /// The longest batch of segments that [`Self::send`] takes; 1 where the system cannot segment.
    #[must_use]
    pub(crate) fn segments_max(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// The longest batch of segments that one receive merges; 1 where the system does not merge.
    #[must_use]
    pub(crate) fn segments_merged_max(&self) -> usize {
        self.state.gro_segments()
    }

    /// Makes `program` choose among the sockets that share our address.
    pub(crate) fn steer(&self, program: &[Instruction]) -> io::Result<()> {
        options::steer(&self.socket, program)
    }

    /// Packets that the system threw away because our buffer was full.
    pub(crate) fn dropped_packets(&self) -> io::Result<u32> {
        options::dropped_packets(&self.socket)
    }

    /// Sends one datagram, or a segmentation batch: datagrams of `segment_bytes` each (the last may be shorter).
    ///
    /// # Errors
    /// `WouldBlock` if the socket's buffer is full; anything else means that this batch cannot be sent now.
    pub(crate) fn send(&self, destination: SocketAddr, bytes: &[u8], segment_bytes: usize) -> io::Result<()> {
        if bytes.len() <= segment_bytes {
            // Without control messages the system does it faster.
            return self.socket.send_to(bytes, destination).map(|_| ());
        }
        let transmit =
            Transmit { destination, ecn: None, contents: bytes, segment_size: Some(segment_bytes), src_ip: None };
        self.state.try_send((&self.socket).into(), &transmit)
    }

    /// Receives what one system call gives and hands out each datagram.
    ///
    /// # Errors
    /// If the system cannot receive, which is not known to happen to a bound UDP socket but for lack of memory.
    pub(crate) fn receive(&mut self, mut handle: impl FnMut(SocketAddr, &[u8])) -> io::Result<Received> {
        let mut slices = self.buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer));
        let mut slices: [IoSliceMut<'_>; BUFFERS] = std::array::from_fn(|_| slices.next().expect("one for each"));
        let batches = match self.state.recv((&self.socket).into(), &mut slices[..self.offered], &mut self.metas) {
            Ok(batches) => batches,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.offered = OFFERED_MIN;
                return Ok(Received::Nothing);
            }
            Err(error) => return Err(error),
        };
        let is_all = batches < self.offered;
        self.offered = if is_all { batches + 1 } else { BUFFERS.min(2 * batches) }.max(OFFERED_MIN);
        for (buffer, meta) in self.buffers.iter().zip(&self.metas[..batches]) {
            for datagram in buffer[..meta.len].chunks(meta.stride.max(1)) {
                handle(meta.addr, datagram);
            }
        }
        Ok(if is_all { Received::All } else { Received::Some })
    }
}

fn invalid(cause: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, cause)
}

/// What to change if an address cannot be bound.
fn explain(error: &io::Error, shared: bool) -> io::Error {
    let cause = match (error.kind(), shared) {
        (io::ErrorKind::AddrInUse, false) => {
            "another process has it: choose another address, or let all processes share it (Linux: one user's)"
        }
        (io::ErrorKind::AddrInUse, true) => {
            "a process has it that does not share it, or that another user runs: choose another address, or stop that \
             one"
        }
        (io::ErrorKind::AddrNotAvailable, _) => "it is none of this host's addresses: `ip address` shows those",
        (io::ErrorKind::PermissionDenied, _) => "this user may not bind that port: choose one above 1023",
        _ => return io::Error::new(error.kind(), error.to_string()),
    };
    io::Error::new(error.kind(), cause)
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(address: &str) -> io::Result<Socket> {
        Socket::bind(address.parse().unwrap(), &DriverConfig::default())
    }

    fn receive(socket: &mut Socket, datagrams: usize) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut received = Vec::new();
        while received.len() < datagrams {
            socket.receive(|source, datagram| received.push((source, datagram.to_vec()))).unwrap();
        }
        received
    }

    #[test]
    fn a_batch_arrives_as_its_segments() {
        let (sender, mut receiver) = (bind("127.0.0.1:0").unwrap(), bind("127.0.0.1:0").unwrap());
        let batch: Vec<u8> = (0..5300u32).map(|at| (at / 7) as u8).collect();
        let segment_bytes = if sender.segments_max() > 1 { 1000 } else { batch.len() };
        sender.send(receiver.local(), &batch, segment_bytes).unwrap();
        sender.send(receiver.local(), b"one", 3).unwrap();
        let expected: Vec<_> = batch.chunks(segment_bytes).chain([&b"one"[..]]).map(<[u8]>::to_vec).collect();
        let received = receive(&mut receiver, expected.len());
        assert!(received.iter().all(|(source, _)| *source == sender.local()));
        assert_eq!(received.into_iter().map(|(_, datagram)| datagram).collect::<Vec<_>>(), expected);
        assert_eq!(receiver.receive(|_, _| panic!("nothing more was sent")).unwrap(), Received::Nothing);
    }

    #[test]
    fn a_burst_within_the_capacity_is_not_lost() {
        let (sender, mut receiver) = (bind("127.0.0.1:0").unwrap(), bind("127.0.0.1:0").unwrap());
        let packet = [7; 4112];
        let packets = receiver.receive_capacity_bytes() / packet.len();
        assert!(packets > 0);
        (0..packets).for_each(|_| sender.send(receiver.local(), &packet, packet.len()).unwrap());
        receive(&mut receiver, packets);
    }

    #[test]
    fn the_unspecified_address_is_refused_by_name() {
        let error = bind("0.0.0.0:0").err().expect("refused");
        assert!(error.to_string().contains("one specific IP address"), "{error}");
    }

    #[test]
    fn every_refusal_says_what_to_change() {
        let refused = |address: SocketAddr, config: &DriverConfig| {
            Socket::bind(address, config).err().expect("refused").to_string()
        };
        let (alone, sharing) =
            (DriverConfig::default(), DriverConfig { sharing: Sharing::User, ..DriverConfig::default() });
        let first = bind("127.0.0.1:0").unwrap();
        assert!(refused(first.local(), &alone).contains("another process has it: choose another address, or let all"));
        assert!(refused(first.local(), &sharing).contains("that does not share it"));
        let shared = Socket::bind("127.55.44.33:4791".parse().unwrap(), &sharing).unwrap();
        assert!(refused(shared.local(), &alone).contains("let all processes share it"));
        assert!(Socket::bind(shared.local(), &sharing).is_ok());
        assert!(refused("192.0.2.1:4791".parse().unwrap(), &alone).contains("`ip address`"));
        assert!(refused("127.0.0.1:0".parse().unwrap(), &sharing).contains("4791"));
        let small = DriverConfig { receive_buffer_bytes: 4096, ..DriverConfig::default() };
        assert!(refused("127.0.0.1:0".parse().unwrap(), &small).contains("sysctl -w net.core.rmem_max"));
    }
}
