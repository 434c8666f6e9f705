//! The end of a listener: nobody whose connection stands is reset with it.
//!
//! A kernel completes connections while nobody accepts them, and resets those that wait as their listener closes. So
//! newcomers are kept out before the last ones are accepted: their SYNs are lost, and they are refused when they try
//! again, a second later.

use std::{io, net::TcpListener, time::Duration};

use socket2::{SockFilter, SockRef};

/// How long handshakes have that had begun.
pub(super) const HANDSHAKES: Duration = Duration::from_millis(5);
/// Classic BPF over a TCP header: what has SYN among its flags is lost, all else passes.
const NO_SYNS: [SockFilter; 4] = [
    // Load byte 13, the flags.
    SockFilter::new(0x30, 0, 0, 13),
    // Skip the next one unless bit 1 is set, SYN.
    SockFilter::new(0x45, 0, 1, 2),
    // Return nothing of the packet.
    SockFilter::new(0x06, 0, 0, 0),
    // Return all of it.
    SockFilter::new(0x06, 0, 0, u32::MAX),
];

/// Nobody new can connect from now on.
pub(super) fn keep_newcomers_out(listener: &TcpListener) -> io::Result<()> {
    SockRef::from(listener).attach_filter(&NO_SYNS)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // Real sockets.
mod tests {
    use super::*;
    use std::{
        io::{ErrorKind, Read, Write},
        net::TcpStream,
    };

    #[test]
    fn who_has_connected_is_accepted_and_newcomers_are_not_reset() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let mut before = TcpStream::connect(address).unwrap();
        keep_newcomers_out(&listener).unwrap();
        // Its system tries again after a second.
        let newcomer = TcpStream::connect_timeout(&address, Duration::from_millis(20)).unwrap_err();
        assert_eq!(newcomer.kind(), ErrorKind::TimedOut);
        let (mut accepted, _) = listener.accept().unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(listener);
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        accepted.write_all(b"served").unwrap();
        drop(accepted);
        let mut said = String::new();
        before.read_to_string(&mut said).unwrap();
        assert_eq!(said, "served");
    }
}
