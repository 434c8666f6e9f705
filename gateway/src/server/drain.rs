//! How the server ends: first it is told to, then nothing new begins, and once nothing is under way it may go.

use std::cell::Cell;

use tokio::sync::Notify;

/// Whether the server is to end.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    has_begun: Cell<bool>,
    changed: Notify,
}

impl Drain {
    /// Whether nothing new is to begin.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun.get()
    }

    /// Nothing new is to begin from now on. False if that was so before.
    pub(crate) fn begin(&self) -> bool {
        let is_first = !self.has_begun.replace(true);
        self.changed.notify_waiters();
        is_first
    }

    /// Something that was under way has ended.
    pub(crate) fn handle_end(&self) {
        if self.has_begun.get() {
            self.changed.notify_waiters();
        }
    }

    /// Returns once it has begun.
    pub(crate) async fn begun(&self) {
        self.until(|| self.has_begun.get()).await;
    }

    /// Returns once it has begun and nothing is under way.
    pub(crate) async fn done(&self, is_quiet: impl Fn() -> bool) {
        self.until(|| self.has_begun.get() && is_quiet()).await;
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
                    under_way.set(under_way.get() - 1);
                    drain.handle_end();
                }
            };
            tokio::join!(drain.done(|| under_way.get() == 0), ends, drain.begun());
            assert!(drain.has_begun() && under_way.get() == 0);
        });
    }
}
