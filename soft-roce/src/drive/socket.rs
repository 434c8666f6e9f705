//! The UDP socket as RoCEv2 needs it.
//!
//! The invariant CRC covers the IP identification and flags, which a UDP socket does not choose. Known are they all the
//! same: a datagram of an unconnected socket with path MTU discovery on leaves with identification 0 and DF set, and the
//! k-th segment of a UDP_SEGMENT buffer with identification k. `quinn-udp` sets exactly these options (IP_MTU_DISCOVER =
//! PROBE, UDP_GRO), knows the control messages, and falls back when the kernel refuses UDP_SEGMENT; the socket stays
//! unconnected here.

use std::{
    io::{self, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use socket2::SockRef;

use super::checksum;

/// What is asked of the system; it grants at most net.core.rmem_max and wmem_max.
const BUFFER_BYTES_WANTED: usize = 8 * 1024 * 1024;
/// What one receive buffer holds: the largest run that UDP_GRO merges.
const RUN_BYTES_MAX: usize = 64 * 1024;
/// Buffers per system call. More would leave the second-level cache.
const BATCH: usize = 8;

/// A non-blocking, unconnected UDP socket with segmentation offload in both directions.
pub struct Socket {
    socket: UdpSocket,
    state: UdpSocketState,
    local: SocketAddr,
    receive_buffer_bytes: usize,
    buffers: Vec<Vec<u8>>,
    metas: [RecvMeta; BATCH],
}

impl Socket {
    /// Binds to a specific address; port 0 lets the system choose.
    ///
    /// # Errors
    /// If the address is unspecified (the invariant CRC covers it, so it must be known), taken, or not this host's.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        if address.ip().is_unspecified() {
            let cause = "RoCEv2 needs one specific IP address of this host, not the unspecified one";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, cause));
        }
        let socket = UdpSocket::bind(address)?;
        let state = UdpSocketState::new((&socket).into())?;
        if state.may_fragment() {
            let cause = "this system sets no DF bit (IP_MTU_DISCOVER), so the invariant CRC cannot be known";
            return Err(io::Error::new(io::ErrorKind::Unsupported, cause));
        }
        if address.is_ipv6() {
            checksum::accept_zero(&socket)?;
        }
        let options = SockRef::from(&socket);
        // The system cuts down what it does not grant; what we really got is asked below.
        options.set_recv_buffer_size(BUFFER_BYTES_WANTED)?;
        options.set_send_buffer_size(BUFFER_BYTES_WANTED)?;
        Ok(Self {
            local: socket.local_addr()?,
            receive_buffer_bytes: options.recv_buffer_size()?,
            buffers: vec![vec![0; RUN_BYTES_MAX]; BATCH],
            metas: [RecvMeta::default(); BATCH],
            socket,
            state,
        })
    }

    /// Where it is bound.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Payload bytes that may arrive before we read, without loss. The system counts the memory behind each packet:
    /// 8.4 KB for a packet of 4112 bytes, so less than half of the buffer is payload.
    #[must_use]
    pub fn receive_capacity_bytes(&self) -> usize {
        self.receive_buffer_bytes / 20 * 9
    }

    /// The longest run of segments that [`Self::send`] takes; 1 where the system cannot segment.
    #[must_use]
    pub fn segments_max(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// The longest run of segments that one receive merges; 1 where the system does not merge.
    #[must_use]
    pub fn segments_merged_max(&self) -> usize {
        self.state.gro_segments()
    }

    /// Sends one datagram, or a run of datagrams of `segment_bytes` each (the last may be shorter).
    ///
    /// # Errors
    /// `WouldBlock` if the socket's buffer is full; anything else means that this run cannot be sent now.
    pub fn send(&self, destination: SocketAddr, bytes: &[u8], segment_bytes: usize) -> io::Result<()> {
        let transmit =
            Transmit { destination, ecn: None, contents: bytes, segment_size: Some(segment_bytes), src_ip: None };
        self.state.try_send((&self.socket).into(), &transmit)
    }

    /// Receives what one system call gives and hands out each datagram. False if there was nothing.
    ///
    /// # Errors
    /// If the system cannot receive, which is not known to happen to a bound UDP socket but for lack of memory.
    pub fn receive(&mut self, mut handle: impl FnMut(SocketAddr, &[u8])) -> io::Result<bool> {
        let mut slices = self.buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer));
        let mut slices: [IoSliceMut<'_>; BATCH] = std::array::from_fn(|_| slices.next().expect("one for each"));
        let runs = match self.state.recv((&self.socket).into(), &mut slices, &mut self.metas) {
            Ok(runs) => runs,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        for (buffer, meta) in self.buffers.iter().zip(&self.metas[..runs]) {
            for datagram in buffer[..meta.len].chunks(meta.stride.max(1)) {
                handle(meta.addr, datagram);
            }
        }
        Ok(runs > 0)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(socket: &mut Socket, datagrams: usize) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut received = Vec::new();
        while received.len() < datagrams {
            socket.receive(|source, datagram| received.push((source, datagram.to_vec()))).unwrap();
        }
        received
    }

    #[test]
    fn a_run_arrives_as_its_segments() {
        let any_port = "127.0.0.1:0".parse().unwrap();
        let (sender, mut receiver) = (Socket::bind(any_port).unwrap(), Socket::bind(any_port).unwrap());
        let run: Vec<u8> = (0..5300u32).map(|at| (at / 7) as u8).collect();
        let segment_bytes = if sender.segments_max() > 1 { 1000 } else { run.len() };
        sender.send(receiver.local(), &run, segment_bytes).unwrap();
        sender.send(receiver.local(), b"one", 3).unwrap();
        let expected: Vec<_> = run.chunks(segment_bytes).chain([&b"one"[..]]).map(<[u8]>::to_vec).collect();
        let received = receive(&mut receiver, expected.len());
        assert!(received.iter().all(|(source, _)| *source == sender.local()));
        assert_eq!(received.into_iter().map(|(_, datagram)| datagram).collect::<Vec<_>>(), expected);
        assert!(!receiver.receive(|_, _| panic!("nothing more was sent")).unwrap());
    }

    #[test]
    fn a_burst_within_the_capacity_is_not_lost() {
        let any_port = "127.0.0.1:0".parse().unwrap();
        let (sender, mut receiver) = (Socket::bind(any_port).unwrap(), Socket::bind(any_port).unwrap());
        let packet = [7; 4112];
        let packets = receiver.receive_capacity_bytes() / packet.len();
        assert!(packets > 0);
        (0..packets).for_each(|_| sender.send(receiver.local(), &packet, packet.len()).unwrap());
        receive(&mut receiver, packets);
    }

    #[test]
    fn the_unspecified_address_is_refused_by_name() {
        let error = Socket::bind("0.0.0.0:0".parse().unwrap()).err().expect("refused");
        assert!(error.to_string().contains("one specific IP address"), "{error}");
    }
}
