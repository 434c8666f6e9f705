//! What operators call a peer: what it is, and its name. Told with its parameters, once it has proved itself.

use std::fmt;

use wincode::{SchemaRead, SchemaWrite};

/// Bytes of one: a role, a space, and a member's name.
const BYTES_MAX: usize = 80;

/// As `backend rack7`, or nothing. What a peer says is only shown: characters of names, and a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct PeerName {
    bytes: [u8; BYTES_MAX],
    length: u8,
}

impl PeerName {
    /// Of a peer that says nothing.
    pub(crate) const NONE: Self = Self { bytes: [0; BYTES_MAX], length: 0 };

    /// Of a member of this kind; nothing if that is too long.
    #[must_use]
    pub fn new(role: &str, name: &str) -> Self {
        let (text, mut new) = (format!("{role} {name}"), Self::NONE);
        if text.len() <= BYTES_MAX {
            new.bytes[..text.len()].copy_from_slice(text.as_bytes());
            new.length = text.len() as u8;
        }
        new
    }

    /// What can be shown.
    pub(crate) fn shown(&self) -> Option<&str> {
        let text = std::str::from_utf8(self.bytes.get(..usize::from(self.length))?).ok()?;
        let is_right = |byte: u8| byte.is_ascii_alphanumeric() || b"-_. ".contains(&byte);
        Some(text).filter(|text| !text.is_empty() && text.bytes().all(is_right))
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_if_they_are_names() {
        assert_eq!(PeerName::new("backend", "rack7").shown(), Some("backend rack7"));
        assert_eq!(PeerName::new("backend", &"x".repeat(80)), PeerName::NONE);
        assert_eq!(PeerName::NONE.shown(), None);
        for wrong in ["a\"b", "a\nb", "\u{e9}", "a{b}"] {
            assert_eq!(PeerName::new("backend", wrong).shown(), None, "{wrong:?}");
        }
        let long = PeerName { length: 255, ..PeerName::new("a", "b") };
        assert_eq!((long.shown(), long.to_string()), (None, String::new()), "a peer may say so");
    }
}
