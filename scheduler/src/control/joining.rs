//! What a member has yet to do until it has joined, and how long it may take.

use proto::{Span, Timestamp, Wait};

/// How long a new member is waited for until it is to blame for links that are missing.
pub(super) const LINK_GRACE: Span = Wait::Link.bound();

/// A member's way in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joining {
    /// ModelThreads that it has yet to connect to.
    pub(super) threads: usize,
    /// Models that it has yet to offer.
    pub(super) offers: usize,
    /// From then on it is to blame for links that are missing.
    pub(super) grace_until: Timestamp,
    /// When it is closed unless it has joined.
    until: Timestamp,
}

impl Joining {
    /// A member that comes now has yet to do all this.
    pub(super) fn new(now: Timestamp, threads: usize, offers: usize) -> Self {
        Self { threads, offers, grace_until: now + LINK_GRACE, until: now + Wait::Join.bound() }
    }

    pub(super) fn is_over(&self) -> bool {
        self.threads == 0 && self.offers == 0
    }

    /// Whether it takes too long; told once.
    pub(super) fn is_overdue(&mut self, now: Timestamp) -> bool {
        let is_overdue = !self.is_over() && self.until <= now;
        if is_overdue {
            self.until = Timestamp::NEVER;
        }
        is_overdue
    }
}
