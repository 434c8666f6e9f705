//! TCP ports that are held from the choice until the program under test listens, and while it is started again.

use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

/// A free port of the loopback, bound but not listened on: connections to it are refused, nobody else is given it, and
/// whoever binds it by name, with the option SO_REUSEADDR as all our listeners do, may listen on it.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    _held: Socket,
}

impl Port {
    /// Holds a port that the system chooses.
    ///
    /// # Panics
    /// If the system has none left.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "a port is held by a socket")]
    pub fn hold() -> Self {
        let held = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        held.set_reuse_address(true).unwrap();
        held.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        Self { address: held.local_addr().unwrap().as_socket().unwrap(), _held: held }
    }

    /// The loopback's address with this port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)] // Real sockets.

    use std::{
        io::ErrorKind,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn nobody_listens_until_somebody_does_by_name() {
        let port = Port::hold();
        assert_eq!(TcpStream::connect(port.address()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        for _ in 0..2 {
            let listener = TcpListener::bind(port.address()).unwrap();
            let _client = TcpStream::connect(port.address()).unwrap();
            assert_eq!(TcpListener::bind(port.address()).unwrap_err().kind(), ErrorKind::AddrInUse, "only one listens");
            drop(listener);
        }
        assert_eq!(TcpStream::connect(port.address()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
