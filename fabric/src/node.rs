//! The members of a simulated fabric.

/// A member: schedulers come first, then frontends, then backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Node(pub(super) usize);

/// How often a member has started or begun a session: what was begun before concerns no later one.
pub(super) type Life = u32;
