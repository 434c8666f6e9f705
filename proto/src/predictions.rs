//! How far the scheduler was off with what it ordered (Clockwork, section 6.5).

use wincode::{SchemaRead, SchemaWrite};

use crate::time::Span;

/// Errors are told in so many buckets, two for each power of two.
pub const BUCKETS: usize = 32;

/// The bound of a bucket, which none of its errors reaches: 16 us, 24, 32, 48 and so on to 0.8 s.
#[must_use]
pub const fn bound(bucket: usize) -> Span {
    let power = 16_000 << (bucket / 2);
    Span(if bucket.is_multiple_of(2) { power } else { power + power / 2 })
}

/// Errors of one sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ErrorHistogram {
    /// By bucket: those below its [`bound`], but not below the one before.
    pub counts: [u64; BUCKETS],
    /// Those that are not below any.
    pub longer: u64,
    /// Of all of them.
    pub sum: Span,
}

impl ErrorHistogram {
    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        // What a peer says may overflow.
        self.counts.iter().fold(self.longer, |all, &count| all.saturating_add(count))
    }
}

/// Errors of one quantity. What was right to the microsecond is in neither of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ErrorSides {
    /// It was predicted too long, or too late.
    pub over: ErrorHistogram,
    /// It was predicted too short, or too early.
    pub under: ErrorHistogram,
}

/// Errors of one kind of action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ActionErrors {
    /// Actions that ran.
    pub actions: u64,
    /// How long they took.
    pub duration: ErrorSides,
    /// When they ended.
    pub completion: ErrorSides,
}

/// Errors of all that a scheduler ordered in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct PredictionErrors {
    /// Executions of batches.
    pub infer: ActionErrors,
    /// Copies of weights into GPUs' memory.
    pub load: ActionErrors,
}
