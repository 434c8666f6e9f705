//! Whether a thread looks at its work in time: one that is silent for long is taken for dead by its peers.

use crate::time::{Span, Timestamp};

/// A silence that is told.
const LONG: Span = Span::from_millis(100);
/// The least between two times of telling.
const TOLD_INTERVAL: Span = Span::from_millis(1_000);

/// Counts the silences of one thread.
///
/// ```
/// # use proto::{turns::TurnWatch, Span, Timestamp};
/// let ms = |ms| Timestamp::ZERO + Span::from_millis(ms);
/// let mut watch = TurnWatch::default();
/// assert_eq!(watch.handle_turn(ms(1_000), ms(1_099)), None);
/// assert_eq!(watch.handle_turn(ms(2_000), ms(2_300)), Some(Span::from_millis(300)));
/// assert_eq!(watch.handle_turn(ms(2_400), ms(2_900)), None, "it is told once a second");
/// assert_eq!(watch.handle_turn(ms(3_200), ms(3_300)), Some(Span::from_millis(500)), "the longest since");
/// assert_eq!(watch.count(), 3);
/// ```
#[derive(Debug, Clone, Default)]
pub struct TurnWatch {
    count: u64,
    /// Of those that have not been told.
    longest: Span,
    told_at: Option<Timestamp>,
}

impl TurnWatch {
    /// The thread looks at its work, which it should have done by `due`. Yields the longest silence that has not been
    /// told, when it is to be told.
    pub fn handle_turn(&mut self, due: Timestamp, now: Timestamp) -> Option<Span> {
        // Before the first turn nothing was due, and at the end of time nothing is.
        if due == Timestamp::PAST || due >= now || now - due < LONG {
            return None;
        }
        self.count += 1;
        self.longest = self.longest.max(now - due);
        if self.told_at.is_some_and(|at| now - at < TOLD_INTERVAL) {
            return None;
        }
        self.told_at = Some(now);
        Some(std::mem::take(&mut self.longest))
    }

    /// How many silences there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }
}
