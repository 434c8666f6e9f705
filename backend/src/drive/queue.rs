//! What waits for a thread, in order. Unlike with a channel, what waits can be taken back.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use proto::Span;

/// Shared by whoever gives work to a thread, and the thread.
#[derive(Debug)]
pub(super) struct Queue<T> {
    waiting: Mutex<Waiting<T>>,
    /// There is something new, or there will not be.
    changed: Condvar,
}

#[derive(Debug)]
struct Waiting<T> {
    jobs: VecDeque<T>,
    is_closed: bool,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { waiting: Mutex::new(Waiting { jobs: VecDeque::new(), is_closed: false }), changed: Condvar::new() }
    }
}

impl<T> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, Waiting<T>> {
        // Nothing panics in between.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, job: T) {
        self.lock().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// The next one; waits for it, and until there is no time `left` that it can be taken back in. `None` once the
    /// queue is closed, whatever is left.
    pub(super) fn pop(&self, left: impl Fn(&T) -> Span) -> Option<T> {
        let mut waiting = self.lock();
        loop {
            if waiting.is_closed {
                return None;
            }
            waiting = match waiting.jobs.front().map(&left) {
                Some(left) if left <= Span::ZERO => return waiting.jobs.pop_front(),
                Some(left) => {
                    let waited = self.changed.wait_timeout(waiting, left.to_duration());
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().jobs.is_empty()
    }

    /// The next one, if it is there already and the queue is not closed.
    pub(super) fn try_pop(&self) -> Option<T> {
        let mut waiting = self.lock();
        if waiting.is_closed { None } else { waiting.jobs.pop_front() }
    }

    /// Takes back the last one, if that is `meant` and was not popped.
    pub(super) fn take_back(&self, meant: impl Fn(&T) -> bool) -> Option<T> {
        self.lock().jobs.pop_back_if(|job| meant(job))
    }

    /// Drops what is `meant` and was not popped.
    pub(super) fn remove(&self, meant: impl Fn(&T) -> bool) {
        self.lock().jobs.retain(|job| !meant(job));
    }

    /// Nothing is popped any more.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_popped_can_be_taken_back_and_a_queue_that_is_closed_gives_nothing() {
        let queue = Queue::default();
        let pop = || queue.pop(|_| Span::ZERO);
        assert_eq!(queue.try_pop(), None);
        (1..=5).for_each(|job| queue.push(job));
        assert_eq!((pop(), queue.take_back(|job| *job == 4)), (Some(1), None), "it is not the last one");
        assert_eq!((queue.take_back(|job| *job == 5), queue.take_back(|_| true)), (Some(5), Some(4)), "one at a time");
        (4..=6).for_each(|job| queue.push(job));
        queue.remove(|job| job % 2 == 0);
        assert_eq!(queue.try_pop(), Some(3));
        queue.close();
        assert_eq!((pop(), queue.try_pop(), queue.take_back(|_| true)), (None, None, Some(5)));
        assert_eq!(queue.take_back(|_| true), None);
    }

    #[test]
    fn who_waits_is_woken() {
        let queue = Queue::default();
        std::thread::scope(|scope| {
            let popped = scope.spawn(|| (queue.pop(|_| Span::ZERO), queue.pop(|_| Span::ZERO)));
            queue.push(7);
            while !queue.lock().jobs.is_empty() {
                std::thread::yield_now();
            }
            queue.close();
            assert_eq!(popped.join().unwrap(), (Some(7), None));
        });
    }
    #[test]
    fn what_has_time_left_can_be_taken_back_from_whoever_waits_for_it() {
        let queue = Queue::default();
        let left = |&job: &u32| if job == 7 { Span::from_millis(3_600_000) } else { Span::ZERO };
        std::thread::scope(|scope| {
            let popped = scope.spawn(|| queue.pop(left));
            queue.push(7);
            let taken_back = queue.take_back(|_| true);
            queue.push(8);
            assert_eq!((taken_back, popped.join().unwrap()), (Some(7), Some(8)));
        });
    }
}
