//! UDP checksums over IPv6. RoCEv2 senders such as rdma_rxe leave them zero, since the invariant CRC is stronger; over
//! IPv6 Linux drops such datagrams (RFC 6935 permits them to sockets that ask). No safe wrapper of this option is
//! known, hence the one `unsafe` block of this crate.

use std::{io, os::fd::AsRawFd};

/// Lets this IPv6 socket receive datagrams whose checksum is zero.
pub(super) fn accept_zero(socket: &impl AsRawFd) -> io::Result<()> {
    switch_on(socket, libc::UDP_NO_CHECK6_RX)
}

fn switch_on(socket: &impl AsRawFd, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open as its owner is borrowed; the value is a live c_int and its size is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            option,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
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
            eprintln!("not run: this host has no IPv6 loopback");
            return;
        };
        let receiver = UdpSocket::bind("[::1]:0").unwrap();
        receiver.set_nonblocking(true).unwrap();
        switch_on(&sender, libc::UDP_NO_CHECK6_TX).unwrap();
        let mut buffer = [0; 8];
        // The loopback delivers within the call.
        sender.send_to(b"before", receiver.local_addr().unwrap()).unwrap();
        let refused = receiver.recv(&mut buffer).map_err(|error| error.kind());
        assert_eq!(refused, Err(io::ErrorKind::WouldBlock), "the system drops it unless told otherwise");
        accept_zero(&receiver).unwrap();
        sender.send_to(b"after", receiver.local_addr().unwrap()).unwrap();
        assert_eq!(receiver.recv(&mut buffer).unwrap(), 5);
    }
}
