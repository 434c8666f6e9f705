//! Whom what a request takes up is charged to, and how much that is at this moment.

use std::{
    cell::Cell,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::GrantId;
use super::digest::digest_of;

/// A client, as far as what it takes up is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Client {
    /// The holder of a token, from wherever.
    Token(GrantId),
    /// The holder of a certificate, by the first half of its SHA-256 digest.
    Certificate([u8; 16]),
    /// Whoever is at an address: providers give every subscriber at least a /64 of IPv6 (RFC 6177).
    Address(IpAddr),
}

impl Client {
    /// Who connects from this address and shows nothing else. `localhost` is one client, whichever way it is resolved.
    #[must_use]
    pub fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(Ipv6Addr::LOCALHOST) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
            v4 @ IpAddr::V4(_) => v4,
        })
    }

    /// Who has shown this certificate (DER), whose authority has been checked.
    #[must_use]
    pub fn with_certificate(certificate: &[u8]) -> Self {
        let digest = digest_of(certificate);
        Self::Certificate(std::array::from_fn(|index| digest[index]))
    }
}

/// What a client takes up at this moment.
#[derive(Debug, Default)]
pub struct Load {
    /// Connections that have a place.
    pub(crate) connections: Cell<usize>,
    /// Requests under way.
    pub(crate) requests: Cell<usize>,
    /// Of these, those that ask for health and have not been read.
    pub(crate) probes: Cell<usize>,
    /// Bytes of replies that it has not taken in.
    pub(crate) untaken_bytes: Cell<usize>,
}

/// One more of a count.
pub(crate) fn add(count: &Cell<usize>, more: usize) {
    count.set(count.get() + more);
}

/// One less of a count.
pub(crate) fn sub(count: &Cell<usize>, less: usize) {
    count.set(count.get() - less);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_is_one_client_whatever_address_it_takes() {
        let at = |text: &str| Client::at(text.parse().unwrap());
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
        assert_eq!(at("::1"), at("127.0.0.1"));
        assert_ne!(at("127.0.0.2"), at("127.0.0.1"));
        assert_eq!(Client::with_certificate(b"a"), Client::with_certificate(b"a"));
        assert_ne!(Client::with_certificate(b"a"), Client::with_certificate(b"b"));
    }
}
