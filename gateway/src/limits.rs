//! Limits of connections that are not configured.

/// Connections beyond all others, for health. Each is closed after its first answer, or when it has been silent
/// longest.
pub(crate) const SPARE_MAX: usize = 64;
/// Largest head of a request that is looked at at all, and largest piece in which a body is read: few pieces, few
/// system calls.
pub(crate) const READ_BUFFER_BYTES_MAX: usize = 256 * 1024;
/// Bytes of replies in the kernel that are not acknowledged, which it counts twice as it keeps more than bytes. It
/// would let a client have 4 MiB.
pub(crate) const SEND_BUFFER_BYTES: usize = 256 << 10;
