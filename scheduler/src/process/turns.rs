//! How a thread of the scheduler spends its turns: pinned to a core if there is one for it, and looking for work for a
//! while before it sleeps.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use proto::{Span, Timestamp};
use spsc::Doorbell;

/// A thread with a core of its own looks for work so long before it sleeps: waking up takes longer than most waits.
const LOOKING_MAX: Duration = Duration::from_micros(100);

/// Pins the calling thread. True if it is.
pub fn pin(core: Option<usize>) -> bool {
    core.is_some_and(|id| core_affinity::set_for_current(core_affinity::CoreId { id }))
}

/// The cores that this process may run on.
#[must_use]
pub fn cores() -> Vec<usize> {
    core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect()
}

/// How long a thread has had nothing to do.
#[derive(Debug, Default)]
pub struct Idleness {
    since: Option<Instant>,
}

impl Idleness {
    /// After a turn. True if the thread is to look again rather than sleep.
    pub fn looks_again(&mut self, is_busy: bool, has_core: bool) -> bool {
        if is_busy {
            self.since = None;
            return true;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let looks = has_core && since.elapsed() < LOOKING_MAX;
        if looks {
            std::hint::spin_loop();
        }
        looks
    }
}

/// Where a thread without an endpoint sleeps.
pub struct Bed {
    alarm: Receiver<()>,
}

impl Bed {
    /// A bed, and the doorbell that ends sleeping in it.
    #[must_use]
    pub fn new() -> (Self, Doorbell) {
        let (sender, alarm): (Sender<()>, _) = bounded(1);
        // Full: it has been woken already.
        (
            Self { alarm },
            Doorbell::new(move || {
                let _ = sender.try_send(());
            }),
        )
    }

    /// Sleeps until `until`, at most for `longest`, or until somebody rings.
    pub fn sleep(&self, now: Timestamp, until: Timestamp, longest: Span) {
        let nap = (until - now).min(longest).to_duration();
        let _ = self.alarm.recv_timeout(nap);
    }
}
