//! One bootstrap connection on a TCP socket, with TLS or without. Never blocks.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
};

use proto::Timestamp;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    bootstrap::Bootstrap,
    tls::{Tls, Wire},
};

/// What one call reads at most (the size of its buffer); a peer that sends more gets its turn again.
pub(crate) const READ_BYTES: usize = 64 * 1024;

/// A TCP connection and what is said over it.
pub(crate) struct Link {
    wire: Wire,
    pub(crate) bootstrap: Bootstrap,
    /// Whether the system has told us that the connection stands.
    connected: bool,
}

impl Link {
    /// Begins to connect.
    ///
    /// # Errors
    /// What the system refuses at once, such as an unreachable network.
    pub(crate) fn connect(to: SocketAddr, tls: Option<&Tls>, bootstrap: Bootstrap) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        match socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => Err(error),
            _ => {
                socket.set_tcp_nodelay(true)?;
                Ok(Self { wire: Wire::client(tls, socket.into()), bootstrap, connected: false })
            }
        }
    }

    /// A connection that was accepted.
    ///
    /// # Errors
    /// If it broke since.
    pub(crate) fn accepted(stream: TcpStream, tls: Option<&Tls>, bootstrap: Bootstrap) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { wire: Wire::server(tls, stream), bootstrap, connected: true })
    }

    /// Reads and writes what can be without waiting. The socket is readable, writable, or broken.
    pub(crate) fn handle_ready(&mut self, now: Timestamp, buffer: &mut [u8]) {
        if !self.connected {
            let stream = self.wire.stream();
            match stream.take_error() {
                Ok(None) if stream.peer_addr().is_ok() => self.connected = true,
                Ok(None) => return,
                Ok(Some(error)) | Err(error) => {
                    self.bootstrap.handle_end(&format!("{error}; does the peer listen there?"));
                    return;
                }
            }
        }
        self.receive(now, buffer);
        self.transmit();
    }

    fn receive(&mut self, now: Timestamp, buffer: &mut [u8]) {
        match self.wire.read(buffer) {
            Ok(0) => self.bootstrap.handle_end("it closed the connection"),
            Ok(bytes) => self.bootstrap.handle_bytes(now, &buffer[..bytes]),
            Err(error) if is_transient(&error) => {}
            Err(error) => self.bootstrap.handle_end(&error.to_string()),
        }
    }

    /// Writes what the bootstrap has to say, as far as the socket takes it.
    pub(crate) fn transmit(&mut self) {
        while self.wants_write() && self.connected {
            match self.write_some() {
                Ok(bytes) => self.bootstrap.handle_transmitted(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_transient(&error) => return,
                Err(error) => return self.bootstrap.handle_end(&error.to_string()),
            }
        }
    }

    /// How many of the bootstrap's bytes were taken.
    fn write_some(&mut self) -> io::Result<usize> {
        self.wire.flush()?;
        match self.bootstrap.poll_transmit() {
            [] => Ok(0),
            bytes => self.wire.write(bytes),
        }
    }

    /// Whether to wait until the socket can be written.
    pub(crate) fn wants_write(&self) -> bool {
        !self.connected || self.wire.wants_write() || !self.bootstrap.poll_transmit().is_empty()
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.stream().as_fd()
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
