//! Bounds and constants that others name, too.

use proto::{Span, Wait};

/// Bytes of the shortest `secret`. Whoever connects is given a proof of it, and could try short ones against that.
pub const SECRET_BYTES_MIN: usize = 16;

/// Secrets that a member knows at once: two while a cluster goes over from one to the other.
pub(crate) const SECRETS_MAX: usize = 2;

/// Bytes of a file with a secret.
pub(crate) const SECRET_FILE_BYTES_MAX: usize = 4096;

/// How long a name's look-up is waited for. Resolvers turn to their second server after five seconds.
pub(crate) const RESOLVE_MAX: Span = Span::from_millis(8_000);

/// The UDP port of RoCEv2 (IANA).
pub const ROCE_PORT: u16 = 4791;

/// Regions that can be registered at once, those for single peers among them.
pub const REGIONS_MAX: usize = 1024;

/// The largest `connections_max`: soft-RoCE's 4,096 regions less ours, as each connection takes one.
pub const CONNECTIONS_MAX: usize = 4096 - REGIONS_MAX;

/// The largest hello or welcome. A backend's has the first of what it hosts, with latency profiles; what may be
/// thousands of models follows once it is up. Peers that have proved themselves may send so much.
pub const HELLO_BYTES_MAX: usize = 256 * 1024;

/// From the opening of a bootstrap connection to the offer.
pub const HANDSHAKE_MAX: Span = Wait::Handshake.bound();

/// A peer that has said nothing for so long has stalled: four heartbeats.
pub const SILENCE_MAX: Span = Wait::Heartbeat.bound();

/// Frames and WRITEs of one connection that wait or are under way.
pub const WORK_MAX: usize = 1024;

/// What is to be sent waits so long for a credit of a peer whose heartbeats come: if it takes nothing in for longer, it
/// does not want to.
pub const CREDIT_MAX: Span = Wait::Credit.bound();
