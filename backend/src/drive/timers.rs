//! How a thread waits for an instant that matters.
#![allow(clippy::disallowed_methods)] // It is of a driver.

use std::{num::NonZeroU64, thread};

use proto::{Span, Timestamp};

/// The kernel may let timers fire this much late to save power; its default is 50 us.
pub(crate) const TIMER_SLACK_NS: u64 = 1_000;

/// Lets this thread's timers fire on time: batches start and end by them.
pub(crate) fn reduce_timer_slack() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS)) {
        tracing::warn!(%error, "timer slack stays at its default; batches may start up to 50 us late");
    }
}

/// Sleeping ends up to this late, so the rest of a wait is spent awake.
pub(crate) const SLEEP_ERROR: Span = Span::from_micros(80);

/// Sleeps while there is time to oversleep, then yields until `at`.
pub(crate) fn sleep_until(now: impl Fn() -> Timestamp, at: Timestamp) {
    loop {
        let left = at - now();
        if left <= Span::ZERO {
            return;
        }
        if left > SLEEP_ERROR {
            thread::sleep((left - SLEEP_ERROR).to_duration());
        } else {
            thread::yield_now();
        }
    }
}
