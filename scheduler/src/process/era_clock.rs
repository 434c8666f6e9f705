//! The clock that everything in a scheduler is told: its process's own, or, among several schedulers, that of their
//! era, which a standby sets by the primary's.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use proto::{Span, Timestamp};
use transport::Clock;

/// Where the clock begins of a scheduler that has yet to follow another: behind every era, so it never leaps back.
const BEGINS: Timestamp = Timestamp(1_000_000_000);

/// The process's clock and what is between that and the era's. Copies are set together.
#[derive(Debug, Clone)]
pub(super) struct EraClock {
    clock: Clock,
    shift: Arc<AtomicI64>,
}

impl EraClock {
    /// Of the only scheduler: the process's clock itself.
    pub(super) fn alone(clock: Clock) -> Self {
        Self { clock, shift: Arc::default() }
    }

    /// Of one among several.
    pub(super) fn among_others(clock: Clock) -> Self {
        let shift = BEGINS - clock.now();
        Self { clock, shift: Arc::new(AtomicI64::new(shift.0)) }
    }

    /// Now.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now() + self.shift()
    }

    /// An instant of this clock on the process's own.
    pub(super) fn to_process(&self, at: Timestamp) -> Timestamp {
        if at == Timestamp::NEVER || at == Timestamp::PAST { at } else { at - self.shift() }
    }

    /// Sets it forward, or a little back.
    pub(super) fn set(&self, by: Span) {
        self.shift.fetch_add(by.0, Ordering::Relaxed);
    }

    fn shift(&self) -> Span {
        Span(self.shift.load(Ordering::Relaxed))
    }
}
