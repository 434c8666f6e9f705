//! Bounds and constants that errors name, too.

/// Bytes of the shortest `secret`. Whoever connects is given a proof of it, and could try short ones against that.
pub const SECRET_BYTES_MIN: usize = 16;

/// The UDP port of RoCEv2 (IANA).
pub const ROCE_PORT: u16 = 4791;

/// Regions that can be registered at once.
pub const REGIONS_MAX: usize = 1024;

/// The largest `connections_max`: soft-RoCE's 4,096 regions less ours, as each connection takes one.
pub const CONNECTIONS_MAX: usize = 4096 - REGIONS_MAX;

/// The largest hello or welcome: a backend's names what it hosts, which may be thousands of models with their latency
/// profiles. Peers that have proved themselves may send so much; more than that does not decode, either.
pub const HELLO_BYTES_MAX: usize = 4 << 20;
