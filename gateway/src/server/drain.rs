//! How the server ends. It is told to, and is not ready any more, but serves; after a grace nobody new may connect, and
//! those who have may still ask; then nothing new begins, and once nothing is under way it may go.

use std::{cell::Cell, time::Duration};

use tokio::sync::Notify;

/// How long those who have connected may still ask when nobody new may connect.
pub(crate) const LINGER: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    #[default]
    Serving,
    /// All is served for those who have not heard yet that it is to end.
    Grace,
    /// Listeners close; all is served for those who have connected.
    Closed,
    /// Nothing new begins.
    Over,
}

/// Whether the server is to end.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    phase: Cell<Phase>,
    listeners: Cell<usize>,
    changed: Notify,
}

/// A listener that has not let in everybody who has connected.
pub(crate) struct Listening<'a>(&'a Drain);

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.0.listeners.set(self.0.listeners.get() - 1);
        self.0.handle_end();
    }
}

impl Drain {
    /// Whether the server is to end.
    pub(crate) fn has_begun(&self) -> bool {
        self.phase.get() >= Phase::Grace
    }

    /// Whether nobody new is to connect.
    fn has_closed(&self) -> bool {
        self.phase.get() >= Phase::Closed
    }

    /// Whether nothing new is to begin.
    pub(crate) fn is_over(&self) -> bool {
        self.phase.get() == Phase::Over
    }

    /// The server is to end. False if that was so before.
    pub(crate) fn begin(&self) -> bool {
        self.advance(Phase::Grace)
    }

    /// Nobody new is to connect from now on.
    pub(crate) fn close(&self) {
        self.advance(Phase::Closed);
    }

    /// Nothing new is to begin from now on.
    pub(crate) fn end(&self) {
        self.advance(Phase::Over);
    }

    /// A listener lets clients in, until this is dropped.
    pub(crate) fn listen(&self) -> Listening<'_> {
        self.listeners.set(self.listeners.get() + 1);
        Listening(self)
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

    /// Returns once nobody new is to connect.
    pub(crate) async fn closed(&self) {
        self.until(|| self.has_closed()).await;
    }

    /// Returns once everybody who has connected is in.
    pub(crate) async fn all_in(&self) {
        self.until(|| self.has_closed() && self.listeners.get() == 0).await;
    }

    /// Returns once nobody new is to connect and that much has ended.
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
            let listening = drain.listen();
            let ends = async {
                for _ in 0..2 {
                    tokio::task::yield_now().await;
                    assert_eq!(drain.begin(), under_way.get() == 2);
                    drain.close();
                    under_way.set(under_way.get() - 1);
                    drain.handle_end();
                }
                tokio::task::yield_now().await;
                drop(listening);
            };
            tokio::join!(drain.done(|| under_way.get() == 0), ends, drain.begun(), drain.closed(), drain.all_in());
            assert!(drain.has_begun() && under_way.get() == 0 && !drain.is_over());
            drain.end();
            assert!(drain.is_over());
        });
    }
}
