//! Wakes a thread that has nothing to do, and costs next to nothing while it has: whoever posts something to it looks
//! at one flag, which only a thread that is about to sleep sets.
//!
//! Life of a nap: the thread sets its flag, looks once more for work, and sleeps. Who posts does it the other way
//! round, the work first and then a look at the flag, so one of the two always sees the other (checked with loom).

use crate::sync::{AtomicBool, Ordering, fence};

/// At the door of one thread.
pub struct Doorbell {
    is_asleep: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Doorbell {
    /// `wake` ends the thread's current or next sleep.
    #[must_use]
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { is_asleep: AtomicBool::new(false), wake: Box::new(wake) }
    }

    /// Something was posted to the thread.
    pub fn ring(&self) {
        // After what was posted; pairs with the fence of `nap`.
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            (self.wake)();
        }
    }

    /// Sleeps, by the thread itself, unless there is work.
    pub fn nap(&self, has_work: impl FnOnce() -> bool, sleep: impl FnOnce()) {
        if self.lies_down(has_work) {
            sleep();
        }
        self.is_asleep.store(false, Ordering::Relaxed);
    }

    /// True if there is no work: from then on whoever posts some wakes.
    fn lies_down(&self, has_work: impl FnOnce() -> bool) -> bool {
        self.is_asleep.store(true, Ordering::Relaxed);
        // Before the last look; pairs with the fence of `ring`.
        fence(Ordering::SeqCst);
        !has_work()
    }
}

#[cfg(all(test, interleavings))]
mod loom_tests {
    use loom::{model, sync::Arc, thread};

    use super::*;

    /// A thread lies down while something is posted: it has seen it, or is woken.
    fn lie_down_while_posting(post: fn(&AtomicBool, &Doorbell)) {
        let (posted, woken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let bell = Arc::new(Doorbell::new({
            let woken = Arc::clone(&woken);
            move || woken.store(true, Ordering::Relaxed)
        }));
        let poster = thread::spawn({
            let (posted, bell) = (Arc::clone(&posted), Arc::clone(&bell));
            move || post(&posted, &bell)
        });
        let sleeps = bell.lies_down(|| posted.load(Ordering::Relaxed));
        poster.join().unwrap();
        assert!(!sleeps || woken.load(Ordering::Relaxed), "it sleeps through");
    }

    #[test]
    fn loom_what_is_posted_is_seen_or_wakes() {
        model(|| {
            lie_down_while_posting(|posted, bell| {
                posted.store(true, Ordering::Relaxed);
                bell.ring();
            });
        });
    }

    /// Control: rings before there is anything to see.
    #[test]
    #[should_panic(expected = "it sleeps through")]
    fn loom_control_a_ring_before_the_post_is_missed() {
        model(|| {
            lie_down_while_posting(|posted, bell| {
                bell.ring();
                posted.store(true, Ordering::Relaxed);
            });
        });
    }
}
