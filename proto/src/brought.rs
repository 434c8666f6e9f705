//! What a load brings along, to be served instead of what the repository has.

use std::fmt;

use wincode::{SchemaRead, SchemaWrite};

use crate::{frame::FRAME_BYTES_MAX, frontend_to_scheduler::NAME_BYTES_MAX};

/// Bytes of a configuration that a load brings along: each message that has one fits a frame.
pub const CONFIG_BYTES_MAX: usize = 12 * 1024;
const _: () = assert!(CONFIG_BYTES_MAX + size_of::<FilesDigest>() + NAME_BYTES_MAX + 64 <= FRAME_BYTES_MAX);

/// Names files that a load brings along: SHA-256 of their model's name, their paths and what is in them. The files
/// themselves lie in a folder that frontends and backends share, and pass no scheduler.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, SchemaRead, SchemaWrite)]
pub struct FilesDigest(pub [u8; 32]);

/// What a load brings along: whoever brings files says how they are to be served.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct Brought {
    /// A configuration (JSON) instead of the repository's, of at most [`CONFIG_BYTES_MAX`].
    pub config: String,
    /// Files instead of those in the repository.
    pub files: Option<FilesDigest>,
}

impl fmt::Display for FilesDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for FilesDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
