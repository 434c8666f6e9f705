//! When a member that ended is started again: with growing pauses, until it has lived for long once more. One that has
//! never lived for long and says each time itself that it cannot go on never will.

use proto::{Span, Timestamp, backoff::Backoff};

/// Pauses before a member is started again: the first and the longest.
const PAUSE: (Span, Span) = (Span::from_millis(100), Span::from_millis(5_000));
/// A member that has lived for so long is started again after the shortest pause.
const LONG: Span = Span::from_millis(10_000);
/// How often a member is started again that has never lived for so long.
const RESTARTS_MAX: u32 = 5;

/// The lives of one member so far.
#[derive(Debug)]
pub(super) struct Lives {
    born_at: Timestamp,
    backoff: Backoff,
    /// It has lived for long once.
    is_proven: bool,
    /// Times in a row that it said itself that it cannot go on.
    failures: u32,
}

impl Lives {
    /// The first one begins.
    pub(super) fn new(now: Timestamp) -> Self {
        Self { born_at: now, backoff: Backoff::new(PAUSE.0, PAUSE.1), is_proven: false, failures: 0 }
    }

    /// It was started again.
    pub(super) fn handle_start(&mut self, now: Timestamp) {
        self.born_at = now;
    }

    /// It ended, or could not be started. When to start it again; `None` if that is in vain. A member that somebody
    /// killed did not end `by_itself`, and tells nothing of whether it could go on.
    pub(super) fn handle_end(&mut self, now: Timestamp, by_itself: bool) -> Option<Timestamp> {
        if self.born_at + LONG <= now {
            self.is_proven = true;
            self.backoff.handle_success();
        }
        self.failures = if by_itself { self.failures + 1 } else { 0 };
        (self.is_proven || self.failures <= RESTARTS_MAX).then(|| self.backoff.handle_failure(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    /// A member that ends at once each time: the pauses in milliseconds until it is left.
    fn pauses(lives: &mut Lives, mut now: Timestamp, by_itself: bool, most: usize) -> Vec<i64> {
        let mut pauses = Vec::new();
        while let Some(again) = lives.handle_end(now, by_itself).filter(|_| pauses.len() < most) {
            pauses.push((again - now).0 / 1_000_000);
            lives.handle_start(again);
            now = again;
        }
        pauses
    }

    #[test]
    fn one_that_cannot_start_is_left_after_five_more_tries() {
        assert_eq!(pauses(&mut Lives::new(at(0)), at(50), true, 100), [100, 200, 400, 800, 1600]);
    }

    #[test]
    fn one_that_is_killed_again_and_again_is_started_for_ever() {
        let found = pauses(&mut Lives::new(at(0)), at(50), false, 8);
        assert_eq!(found, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
    }

    #[test]
    fn one_that_has_lived_for_long_is_never_left_and_starts_over_with_the_shortest_pause() {
        let mut lives = Lives::new(at(0));
        assert_eq!(lives.handle_end(at(9_999), true), Some(at(10_099)));
        lives.handle_start(at(10_099));
        assert_eq!(lives.handle_end(at(20_099), true), Some(at(20_199)), "it has lived for 10 s");
        lives.handle_start(at(20_199));
        assert_eq!(pauses(&mut lives, at(20_200), true, 9), [200, 400, 800, 1600, 3200, 5000, 5000, 5000, 5000]);
    }
}
