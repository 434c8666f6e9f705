//! How long to wait before something is tried again. Each failure doubles the wait up to a bound, and a success starts
//! over.

use crate::time::{Span, Timestamp};

/// The waits between tries.
///
/// ```
/// # use proto::{backoff::Backoff, Span, Timestamp};
/// let mut backoff = Backoff::new(Span(100), Span(300));
/// assert_eq!(backoff.handle_failure(Timestamp(1_000)), Timestamp(1_100));
/// assert_eq!(backoff.handle_failure(Timestamp(2_000)), Timestamp(2_200));
/// assert_eq!(backoff.handle_failure(Timestamp(3_000)), Timestamp(3_300));
/// backoff.handle_success();
/// assert_eq!(backoff.handle_failure(Timestamp(4_000)), Timestamp(4_100));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backoff {
    min: Span,
    max: Span,
    next: Span,
}

impl Backoff {
    /// Waits `min` after the first failure, and never more than `max`.
    ///
    /// # Panics
    /// Unless `min` is positive and at most `max`.
    #[must_use]
    pub const fn new(min: Span, max: Span) -> Self {
        assert!(0 < min.0 && min.0 <= max.0, "a backoff's first wait is positive and at most its longest");
        Self { min, max, next: min }
    }

    /// A try has failed at `now`. When to try again.
    #[must_use]
    pub fn handle_failure(&mut self, now: Timestamp) -> Timestamp {
        let wait = self.next;
        self.next = (wait + wait).min(self.max);
        now + wait
    }

    /// A try has succeeded: the next wait is the shortest again.
    pub const fn handle_success(&mut self) {
        self.next = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Since the last success, the n-th wait is min * 2^(n - 1), or max if that is less.
        #[test]
        fn waits_are_what_their_definition_says(
            (min, max) in (1i64..=i64::MAX).prop_flat_map(|min| (Just(min), min..=i64::MAX)),
            failed in proptest::collection::vec(any::<bool>(), 1..200),
        ) {
            let mut backoff = Backoff::new(Span(min), Span(max));
            let mut failures = 0u32;
            for failed in failed {
                if !failed {
                    backoff.handle_success();
                    failures = 0;
                    continue;
                }
                let doubled = 1i128.checked_shl(failures).and_then(|factor| factor.checked_mul(min.into()));
                let expected = doubled.map_or(max, |wait| wait.min(max.into()) as i64);
                prop_assert_eq!(backoff.handle_failure(Timestamp::ZERO), Timestamp(expected));
                // From here on both are at their longest, and the oracle's power would not fit.
                failures = (failures + 1).min(63);
            }
        }
    }
}
