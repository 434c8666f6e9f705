//! What `fuzz/` reaches of this crate's inside; built for it alone.

use std::sync::Arc;

use proto::{Span, Timestamp};

use crate::{
    PeerName, Release,
    bootstrap::{
        Bootstrap, BootstrapEvent, Identity, MESSAGE_BYTES_MAX, NONCE_BYTES, PacketAddress, Parameters, RingName,
    },
};

const SECRET: &[u8] = b"correct horse battery staple";

/// One side of a bootstrap whose other side turns hostile. Each method panics when an invariant is broken: a closed
/// side stays closed and holds no memory, its reason is one line, and what waits in either direction stays bounded.
pub struct HandshakeUnderAttack {
    side: Bootstrap,
    now: Timestamp,
    closed: bool,
}

impl HandshakeUnderAttack {
    /// After `turns` honest exchanges; the attacker knows the secret from the second on.
    #[must_use]
    pub fn new(is_client: bool, turns: u8) -> Self {
        let identity = Identity { secrets: [SECRET.into()].into(), release: Arc::new(Release::this()) };
        let client = Bootstrap::client(Timestamp::ZERO, identity.clone(), [1; NONCE_BYTES]);
        let server = Bootstrap::server(Timestamp::ZERO, identity, [2; NONCE_BYTES]);
        let (side, other) = if is_client { (client, server) } else { (server, client) };
        let mut attacked = Self { side, now: Timestamp::ZERO, closed: false };
        let mut honest = Self { side: other, now: Timestamp::ZERO, closed: false };
        for _ in 0..turns {
            attacked.carry_to(&mut honest);
            honest.carry_to(&mut attacked);
        }
        attacked
    }

    fn carry_to(&mut self, to: &mut Self) {
        let bytes = self.side.poll_transmit().to_vec();
        self.side.handle_transmitted(bytes.len());
        to.bytes(&bytes);
    }

    /// Takes bytes from the peer, and does what an owner does on what follows.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.side.handle_bytes(self.now, bytes);
        self.serve();
    }

    /// Time passes.
    pub fn wait(&mut self, milliseconds: i64) {
        self.now = self.now + Span::from_millis(milliseconds);
        self.side.handle_timeout(self.now);
        self.serve();
    }

    /// The peer reads some of what waits for it.
    pub fn read(&mut self, bytes: usize) {
        let waiting = self.side.poll_transmit().len();
        self.side.handle_transmitted(bytes.min(waiting));
    }

    /// The peer's end of the connection goes away.
    pub fn end(&mut self) {
        self.side.handle_end("it closed the connection");
        self.serve();
    }

    fn serve(&mut self) {
        let parameters = Parameters {
            name: PeerName::NONE,
            incarnation: 7,
            address: PacketAddress::SoftRoce(([127, 0, 0, 1], 4791).into()),
            queue_pair: 17,
            psn: 0x00ab_cdef,
            path_mtu_bytes: 4096,
            max_dest_rd_atomic: 16,
            receive_depth: 64,
            window_bytes: 1 << 18,
            ring: RingName::NONE,
        };
        while let Some(event) = self.side.poll_event() {
            assert!(!self.closed, "{event:?} after the end");
            match event {
                BootstrapEvent::Proved => self.side.offer(self.now, parameters, b"hello".to_vec()),
                BootstrapEvent::Incoming { .. } => {
                    self.side.accept(self.now, parameters, b"welcome".to_vec());
                }
                BootstrapEvent::Answered { .. } => self.side.ready(),
                BootstrapEvent::Ready => {}
                BootstrapEvent::Closed(reason) => {
                    assert_eq!(reason.lines().count(), 1, "{reason}");
                    self.closed = true;
                }
            }
        }
        assert_eq!(self.side.poll_timeout().is_none(), self.closed);
        // Handshake messages, one heartbeat, the last word.
        assert!(self.side.poll_transmit().len() <= 4 * MESSAGE_BYTES_MAX);
        assert!(self.side.inbound_bytes() <= if self.closed { 0 } else { 2 * MESSAGE_BYTES_MAX });
    }
}
