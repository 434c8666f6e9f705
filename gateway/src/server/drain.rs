//! How the server ends: first it is told to, and is not ready any more, but serves; after a grace nothing new begins,
//! and once nothing is under way it may go.

use std::cell::Cell;

use tokio::sync::Notify;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    #[default]
    Serving,
    /// All is served for those who have not heard yet that it is to end.
    Grace,
    /// Nothing new begins.
    Closed,
}

/// Whether the server is to end.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    phase: Cell<Phase>,
    changed: Notify,
}

impl Drain {
    /// Whether the server is to end.
    pub(crate) fn has_begun(&self) -> bool {
        self.phase.get() >= Phase::Grace
    }

    /// Whether nothing new is to begin.
    pub(crate) fn has_closed(&self) -> bool {
        self.phase.get() == Phase::Closed
    }

    /// The server is to end. False if that was so before.
    pub(crate) fn begin(&self) -> bool {
        self.advance(Phase::Grace)
    }

    /// Nothing new is to begin from now on. False if that was so before.
    pub(crate) fn close(&self) -> bool {
        self.advance(Phase::Closed)
    }

    fn advance(&self, to: Phase) -> bool {
        let is_new = self.phase.get() < to;
        if is_new {
            self.phase.set(to);
            self.changed.notify_waiters();
        }
        is_new
    }

    /// Something that was under way has ended.
    pub(crate) fn handle_end(&self) {
        if self.has_closed() {
            self.changed.notify_waiters();
        }
    }

    /// Returns once it has begun.
    pub(crate) async fn begun(&self) {
        self.until(|| self.has_begun()).await;
    }

    /// Returns once nothing new is to begin.
    pub(crate) async fn closed(&self) {
        self.until(|| self.has_closed()).await;
    }

    /// Returns once nothing new is to begin and nothing is under way.
    pub(crate) async fn done(&self, is_quiet: impl Fn() -> bool) {
        self.until(|| self.has_closed() && is_quiet()).await;
    }

    async fn until(&self, holds: impl Fn() -> bool) {
        loop {
            // Before the question: what changes in between is not missed.
            let changed = self.changed.notified();
            if holds() {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_done_when_it_has_begun_and_nothing_is_under_way() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (drain, under_way) = (Drain::default(), Cell::new(2));
            let ends = async {
                for _ in 0..2 {
                    tokio::task::yield_now().await;
                    assert_eq!(drain.begin(), under_way.get() == 2);
                    assert_eq!(drain.close(), under_way.get() == 2);
                    under_way.set(under_way.get() - 1);
                    drain.handle_end();
                }
            };
            tokio::join!(drain.done(|| under_way.get() == 0), ends, drain.begun(), drain.closed());
            assert!(drain.has_begun() && under_way.get() == 0);
        });
    }
}
