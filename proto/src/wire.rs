//! The version of the wire: a hash of the encodings of sample messages. It changes with any message, and with nothing
//! else; members of one cluster must have the same.
//!
//! `golden/messages.txt` has the samples: on each line the name of a type or variant, and its bytes in hexadecimal
//! digits. A test encodes them anew and compares. After a change of a message, `UPDATE_GOLDEN=1 cargo test -p proto
//! wire` writes the file.

use std::fmt;

#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;

const GOLDEN: &str = include_str!("../golden/messages.txt");

/// To be raised where a message means something else with the same bytes.
const MEANING: u8 = 0;

/// What tells one wire from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WireVersion(pub u64);

impl WireVersion {
    /// Of this build.
    pub const THIS: Self = Self::of(GOLDEN, MEANING);

    /// FNV-1a of 64 bits over the digits and ends of all lines; names do not count.
    const fn of(golden: &str, meaning: u8) -> Self {
        let golden = golden.as_bytes();
        let mut hash = with_byte(0xcbf2_9ce4_8422_2325, meaning);
        let (mut at, mut is_digit) = (0, false);
        while at < golden.len() {
            if is_digit {
                hash = with_byte(hash, golden[at]);
            }
            is_digit = match golden[at] {
                b' ' => true,
                b'\n' => false,
                _ => is_digit,
            };
            at += 1;
        }
        Self(hash)
    }
}

const fn with_byte(hash: u64, byte: u8) -> u64 {
    (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
}

impl fmt::Display for WireVersion {
    /// Its first eight digits: enough for an operator to tell two apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 32)
    }
}
