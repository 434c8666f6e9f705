//! Socket options that no safe wrapper is known for; the only module of this crate with `unsafe`. Each function is one
//! system call on a descriptor whose owner is borrowed.
#![allow(clippy::disallowed_methods)] // Its tests set the options of real sockets.

use std::{io, os::fd::AsRawFd};

/// One instruction of a classic BPF program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) code: u16,
    /// Instructions to skip if a comparison holds,
    pub(super) jump_true: u8,
    /// and if it does not.
    pub(super) jump_false: u8,
    pub(super) operand: u32,
}

/// Lets this IPv6 socket receive datagrams whose UDP checksum is zero. RoCEv2 senders such as rdma_rxe leave it zero,
/// since the invariant CRC is stronger; Linux drops such datagrams over IPv6 (RFC 6935 permits them to sockets that
/// ask).
pub(super) fn accept_zero_checksums(socket: &impl AsRawFd) -> io::Result<()> {
    set(socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)
}

/// Spares the control messages that tell when and on which interface a packet came: nobody reads them here.
pub(super) fn omit_arrivals(socket: &impl AsRawFd) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0)?;
    set(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 0)
}

/// Sends without UDP checksums, for tests: the system then refuses UDP_SEGMENT, as some devices do.
pub(super) fn refuse_segmentation(socket: &impl AsRawFd) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)
}

/// Who the effective user is. All sockets that share a port must have the same.
pub(super) fn effective_user() -> u32 {
    // SAFETY: has no argument and cannot fail.
    unsafe { libc::geteuid() }
}

/// Makes `program` choose among the sockets that share this one's address (SO_REUSEPORT): it sees the UDP payload and
/// returns the socket's index in the group.
pub(super) fn steer(socket: &impl AsRawFd, program: &[Instruction]) -> io::Result<()> {
    let mut filters: Vec<_> = program
        .iter()
        .map(|&Instruction { code, jump_true, jump_false, operand }| libc::sock_filter {
            code,
            jt: jump_true,
            jf: jump_false,
            k: operand,
        })
        .collect();
    let len = u16::try_from(filters.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: filters.as_mut_ptr() };
    set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, program)
}

/// Packets that the system has thrown away because this socket's buffer was full.
pub(super) fn dropped_packets(socket: &impl AsRawFd) -> io::Result<u32> {
    /// The places of SO_MEMINFO (linux/sock_diag.h): the last is the count of drops.
    const PLACES: usize = 9;
    let mut places = [0u32; PLACES];
    let mut bytes = size_of_val(&places) as libc::socklen_t;
    // SAFETY: the descriptor is open as its owner is borrowed; the array is live and its size is given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            places.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(places[PLACES - 1]) } else { Err(io::Error::last_os_error()) }
}

/// `T` must be what the option takes: a C int, or the struct of its name.
fn set<T>(socket: &impl AsRawFd, level: libc::c_int, option: libc::c_int, value: T) -> io::Result<()> {
    // SAFETY: the descriptor is open as its owner is borrowed; the value is live and its size is given. What it points
    // to, if anything, is alive in the caller, and the system only reads it.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn a_datagram_without_checksum_arrives() {
        let Ok(sender) = UdpSocket::bind("[::1]:0") else {
            testing::skip("soft-roce/checksums", "an IPv6 loopback");
            return;
        };
        let receiver = UdpSocket::bind("[::1]:0").unwrap();
        receiver.set_nonblocking(true).unwrap();
        set(&sender, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).unwrap();
        let mut buffer = [0; 8];
        // The loopback delivers within the call.
        sender.send_to(b"before", receiver.local_addr().unwrap()).unwrap();
        let refused = receiver.recv(&mut buffer).map_err(|error| error.kind());
        assert_eq!(refused, Err(io::ErrorKind::WouldBlock), "the system drops it unless told otherwise");
        accept_zero_checksums(&receiver).unwrap();
        sender.send_to(b"after", receiver.local_addr().unwrap()).unwrap();
        assert_eq!(receiver.recv(&mut buffer).unwrap(), 5);
    }

    #[test]
    fn drops_are_counted() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(dropped_packets(&receiver).unwrap(), 0);
        set(&receiver, libc::SOL_SOCKET, libc::SO_RCVBUF, 4096).unwrap();
        for _ in 0..20 {
            sender.send_to(&[0; 4096], receiver.local_addr().unwrap()).unwrap();
        }
        assert!(dropped_packets(&receiver).unwrap() > 0);
    }
}
