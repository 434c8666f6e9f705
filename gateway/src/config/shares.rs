//! Defaults that follow the memory there is. Beyond a control group's bound the kernel ends processes, whoever has
//! taken what; so each of these is an eighth of the memory at most, and so is the least arena; with what is kept of
//! answers they are half of it. What is left is for the roles, for models, and for other members in the same group.

use frontend::arena::ARENA_BYTES_MIN;
use transport::Memory;

use crate::limits::SEND_BUFFER_BYTES;

/// What a client that reads nothing makes the kernel hold: that is twice what was asked for (socket(7)).
const CONNECTION_BYTES: usize = 2 * SEND_BUFFER_BYTES;
/// Some clients can always connect.
const CONNECTIONS_LEAST: usize = 64;

/// Limits on clients, unless they are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// `connections_max`.
    pub connections_max: usize,
    /// `untaken_bytes_max`.
    pub untaken_bytes_max: usize,
    /// `bodies_bytes_max`.
    pub bodies_bytes_max: usize,
    /// `cache_bytes`.
    pub cache_bytes: usize,
    /// `feedback_bytes`, and `contexts_bytes`.
    pub learning_bytes: usize,
    arena_bytes: usize,
}

impl Shares {
    /// Of the memory that this process may use.
    #[must_use]
    pub fn here() -> Self {
        Self::of(Memory::here().as_ref())
    }

    /// Of this memory; where nobody knows, of plenty.
    #[must_use]
    pub fn of(memory: Option<&Memory>) -> Self {
        let eighth = |most: usize| memory.map_or(most, |memory| memory.eighth_of(most));
        let shares = Self {
            connections_max: (eighth(1024 * CONNECTION_BYTES) / CONNECTION_BYTES).max(CONNECTIONS_LEAST),
            untaken_bytes_max: eighth(512 << 20),
            bodies_bytes_max: eighth(512 << 20),
            cache_bytes: eighth(256 << 20) / 4,
            learning_bytes: eighth(128 << 20) / 8,
            arena_bytes: eighth(ARENA_BYTES_MIN),
        };
        // Where memory is short what is kept of answers takes its part from those that are not taken in.
        let over = memory.map_or(0, |memory| shares.bytes().saturating_sub(4 * memory.eighth_of(usize::MAX)));
        Self { untaken_bytes_max: shares.untaken_bytes_max - over.min(shares.kept_bytes()), ..shares }
    }

    /// What clients may take up of a frontend by these, and of the least arena.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let clients = self.connections_max * CONNECTION_BYTES + self.untaken_bytes_max + self.bodies_bytes_max;
        clients + self.arena_bytes + self.kept_bytes()
    }

    /// Answers, what feedback for them needs, and what was learned of it.
    fn kept_bytes(&self) -> usize {
        self.cache_bytes + 2 * self.learning_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_an_eighth_each_where_memory_is_short() {
        let memory = |total_bytes| Memory { total_bytes, used_bytes: 0, host_bytes: total_bytes, bounded_by: None };
        let plenty = Shares::of(None);
        assert_eq!((plenty.connections_max, plenty.untaken_bytes_max), (1024, 512 << 20));
        assert_eq!((plenty.cache_bytes, plenty.learning_bytes), (64 << 20, 16 << 20));
        assert_eq!(Shares::of(Some(&memory(4 << 30))), plenty);
        let short = Shares::of(Some(&memory(300 << 20)));
        assert_eq!((short.connections_max, short.bodies_bytes_max), (75, 300 << 17));
        assert!(short.bytes() <= 150 << 20, "half of it is for others");
        assert_eq!(Shares::of(Some(&memory(1 << 20))).connections_max, CONNECTIONS_LEAST);
    }
}
