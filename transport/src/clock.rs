//! The process's clock.
#![allow(clippy::disallowed_methods)] // This is where the process's clock is read.

use std::time::Instant;

use proto::Timestamp;

/// Clocks start up to this long after their epoch: about 17 minutes.
const EPOCH_SPREAD_NS: i64 = 1 << 40;

/// This process's monotonic clock. Its epoch is a random while before its start, so clocks of two processes differ,
/// and the offset must be estimated (`proto::clock`) even where both run on one host.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: Instant,
    started_ns: i64,
}

impl Clock {
    /// Starts a clock. Once per process: copies agree with one another, a second start does not.
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now(), started_ns: rand::random_range(1..EPOCH_SPREAD_NS) }
    }

    /// Now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        // 2^63 ns are 292 years.
        Timestamp(self.started_ns + self.started.elapsed().as_nanos() as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_differ_and_run_forward() {
        let (one, other) = (Clock::start(), Clock::start());
        assert!((one.now() - other.now()).0.abs() > 1_000_000, "two random epochs within a millisecond of each other");
        let earlier = one.now();
        assert!(one.now() >= earlier && earlier > Timestamp::ZERO);
    }
}
