//! Instants of the caller's monotonic clock. Nothing here reads a clock.

use std::{ops::Add, time::Duration};

/// Nanoseconds on the caller's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp(pub u64);

impl Add<Duration> for Timestamp {
    type Output = Self;
    /// Saturates at the end of time.
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}
