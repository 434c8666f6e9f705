//! A backend that is told to end: its primary has others host its models, then each ModelThread says that it plans no
//! more here, and what is under way is finished.

use proto::Timestamp;

/// A backend that is about to leave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leaving {
    /// ModelThreads that may still send plans.
    pub(super) senders: usize,
    /// It stays no longer.
    pub(super) until: Timestamp,
}
