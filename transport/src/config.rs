//! How an endpoint is opened.

use std::net::{Ipv4Addr, SocketAddr};

pub use soft_roce::drive::Faults;

use crate::TlsFiles;

/// The UDP port of RoCEv2 (IANA).
pub const ROCE_PORT: u16 = 4791;

/// Which network carries the queue pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arm {
    /// soft-RoCE over a UDP socket bound to this address. A specific IP; port 4791 unless told otherwise.
    Soft {
        /// Where our UDP socket binds.
        address: SocketAddr,
        /// Injected faults, for tests.
        faults: Faults,
        /// Whether other processes of this user may have the same address; all of them must say so, and see the same
        /// `/dev/shm`.
        shared: bool,
    },
}

/// How an endpoint is opened. `Default` gives an endpoint that only connects, on a random 127.x.y.z, without a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct EndpointConfig {
    /// The network.
    pub arm: Arm,
    /// Where to listen for bootstrap connections (TCP); port 0 lets the system choose.
    pub listen: Option<SocketAddr>,
    /// Both ends of every connection must prove that they know it (HMAC-SHA-256 challenge), before any key is told.
    pub secret: Vec<u8>,
    /// Certificates; with them both ends of every bootstrap also prove themselves by mutual TLS, and it is encrypted.
    pub tls: Option<TlsFiles>,
    /// Connections at once, both directions.
    pub connections_max: usize,
    /// Bytes of READs that may be outstanding at once, over all connections, shared fairly. 0: half of what the
    /// socket's receive buffer really holds.
    pub read_budget_bytes: usize,
}

impl std::fmt::Debug for EndpointConfig {
    /// Without the secret, which has no place in a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { arm, listen, secret: _, tls, connections_max, read_budget_bytes } = self;
        f.debug_struct("EndpointConfig")
            .field("arm", arm)
            .field("listen", listen)
            .field("tls", tls)
            .field("connections_max", connections_max)
            .field("read_budget_bytes", read_budget_bytes)
            .finish_non_exhaustive()
    }
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self::soft(SocketAddr::new(random_loopback().into(), ROCE_PORT))
    }
}

impl EndpointConfig {
    /// An endpoint of the soft arm at this address that only connects.
    #[must_use]
    pub fn soft(address: SocketAddr) -> Self {
        Self {
            arm: Arm::Soft { address, faults: Faults::default(), shared: false },
            listen: None,
            secret: Vec::new(),
            tls: None,
            connections_max: 256,
            read_budget_bytes: 0,
        }
    }

    /// The same, and listens there (TCP).
    #[must_use]
    pub fn listening(mut self, at: SocketAddr) -> Self {
        self.listen = Some(at);
        self
    }

    /// The same with this secret.
    #[must_use]
    pub fn with_secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.secret = secret.into();
        self
    }

    /// The same with these certificates, if any.
    #[must_use]
    pub fn with_tls(mut self, files: Option<TlsFiles>) -> Self {
        self.tls = files;
        self
    }

    /// The same, and other processes of this user may have the same address.
    #[must_use]
    pub fn sharing_address(mut self) -> Self {
        let Arm::Soft { shared, .. } = &mut self.arm;
        *shared = true;
        self
    }

    /// The same with these faults injected.
    #[must_use]
    pub fn with_faults(mut self, injected: Faults) -> Self {
        let Arm::Soft { faults, .. } = &mut self.arm;
        *faults = injected;
        self
    }
}

/// A random address of the loopback network, other than 127.0.x.y, so that the processes of one host need not agree on
/// addresses: among a hundred, two collide with a chance of 1 in 3000, and then the second fails to bind.
#[must_use]
pub fn random_loopback() -> Ipv4Addr {
    Ipv4Addr::new(127, rand::random_range(1..=254), rand::random_range(0..=255), rand::random_range(1..=254))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_does_not_tell_the_secret() {
        let text = format!("{:?}", EndpointConfig::default().with_secret([77; 8]));
        assert!(!text.contains("77, 77") && text.contains("connections_max: 256"), "{text}");
    }

    #[test]
    fn random_addresses_are_loopback_and_differ() {
        let addresses: std::collections::BTreeSet<_> = (0..20).map(|_| random_loopback()).collect();
        assert!(addresses.len() > 1 && addresses.iter().all(Ipv4Addr::is_loopback));
    }
}
