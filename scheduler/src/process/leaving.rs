//! When a scheduler that was asked to end is done: once nothing has been under way for a while, as what frontends sent
//! before they heard of it is still to come; or when its time is up.

use std::sync::atomic::{AtomicBool, Ordering};

use proto::{Span, Timestamp};

/// How long nothing must have been under way: longer than any message is, and than two reports of a ModelThread.
const QUIET: Span = Span::from_millis(1_200);

/// The operator's wish, and what has become of it.
pub(super) struct Exit<'a> {
    stop: &'a AtomicBool,
    timeout: Span,
    leaving: Option<Leaving>,
}

impl<'a> Exit<'a> {
    /// To end once `stop` is set, within `timeout_ms`.
    pub(super) fn new(stop: &'a AtomicBool, timeout_ms: u64) -> Self {
        let timeout = Span::from_millis(i64::try_from(timeout_ms).unwrap_or(i64::MAX / 1_000_000));
        Self { stop, timeout, leaving: None }
    }

    /// Whether the wish has just come.
    pub(super) fn begins(&mut self, now: Timestamp) -> bool {
        let begins = self.leaving.is_none() && self.stop.load(Ordering::Relaxed);
        if begins {
            tracing::info!("about to end: what is under way is finished");
            self.leaving = Some(Leaving::new(now, self.timeout));
        }
        begins
    }

    /// Whether the process is to end now.
    pub(super) fn is_over(&mut self, now: Timestamp, is_idle: impl FnOnce() -> bool) -> bool {
        self.leaving.as_mut().is_some_and(|leaving| leaving.is_over(now, is_idle()))
    }
}

/// The way out.
#[derive(Debug)]
struct Leaving {
    ends_at: Timestamp,
    idle_since: Option<Timestamp>,
}

impl Leaving {
    /// Asked to end at `now`, within `timeout`.
    fn new(now: Timestamp, timeout: Span) -> Self {
        Self { ends_at: now + timeout, idle_since: None }
    }

    /// Whether the process is to end now. To be asked ten times a second.
    fn is_over(&mut self, now: Timestamp, is_idle: bool) -> bool {
        if !is_idle {
            self.idle_since = None;
            return self.ends_at <= now;
        }
        let idle_since = *self.idle_since.get_or_insert(now);
        self.ends_at <= now || idle_since + QUIET <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_all_has_been_quiet_for_a_while_or_time_is_up() {
        let at = |ms| Timestamp(0) + Span::from_millis(ms);
        let mut leaving = Leaving::new(at(0), Span::from_millis(5_000));
        let asked = [(100, true), (1_000, false), (1_100, true), (2_299, true), (2_300, true)];
        assert_eq!(asked.map(|(ms, idle)| leaving.is_over(at(ms), idle)), [false, false, false, false, true]);
        let mut busy = Leaving::new(at(0), Span::from_millis(5_000));
        assert_eq!([4_999, 5_000].map(|ms| busy.is_over(at(ms), false)), [false, true]);
    }
}
