//! How long the oldest of what waits in a queue has waited, though nothing is kept for each that waits. No IO.

use std::collections::VecDeque;

use proto::{Span, Timestamp};

/// Waits are known to so much.
const PRECISION: Span = Span::from_millis(50);

/// Of a queue whose owner says what has come and gone. Counts wrap never.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// All before these had come, and waited, at these instants; the oldest first.
    marks: VecDeque<(u64, Timestamp)>,
}

impl Patience {
    /// So many have come, and so many gone; those between wait for the peer, if `waits`.
    pub(crate) fn handle_change(&mut self, now: Timestamp, (came, gone): (u64, u64), waits: bool) {
        if !waits {
            return self.marks.clear();
        }
        while self.marks.front().is_some_and(|(before, _)| *before <= gone) {
            self.marks.pop_front();
        }
        let is_known = self.marks.back().is_some_and(|(before, at)| *before >= came || now < *at + PRECISION);
        if !is_known {
            self.marks.push_back((came, now));
        }
    }

    /// Since when the oldest has waited; it may be a little longer.
    pub(crate) fn since(&self) -> Option<Timestamp> {
        self.marks.front().map(|(_, at)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a queue that knows when each came: what is told is never earlier, and late by the precision at most.
        #[test]
        fn the_oldest_wait_is_known(steps in proptest::collection::vec((0..3_u64, 0..3_usize, 0..90_i64), 1..200)) {
            let (mut patience, mut queue) = (Patience::default(), VecDeque::new());
            let (mut now, mut came, mut gone) = (Timestamp(0), 0, 0);
            for (come, go, later_ms) in steps {
                now += Span::from_millis(later_ms);
                for _ in 0..go.min(queue.len()) {
                    queue.pop_front();
                    gone += 1;
                }
                (0..come).for_each(|_| queue.push_back(now));
                came += come;
                patience.handle_change(now, (came, gone), !queue.is_empty());
                match (queue.front(), patience.since()) {
                    (Some(&came_at), Some(since)) => {
                        prop_assert!(came_at <= since && since <= came_at + PRECISION + Span::from_millis(90));
                    }
                    (front, since) => prop_assert_eq!((front, since), (None, None)),
                }
            }
        }
    }
}
