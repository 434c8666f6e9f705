//! Which release a process is of.

use std::fmt;

use proto::WireVersion;

/// What a process says of itself to a peer whose wire has another version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// As its users know it.
    pub name: String,
    /// What its messages look like.
    pub wire: WireVersion,
}

impl Release {
    /// Of this build.
    #[must_use]
    pub fn this() -> Self {
        Self { name: env!("CARGO_PKG_VERSION").to_owned(), wire: WireVersion::THIS }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "release {} (wire {})", self.name, self.wire)
    }
}
