//! Messages that must all arrive, in order: a ring, and what it has no room for waits on its sender's side.

use std::collections::VecDeque;

use crate::sync::{Consumer, Producer, RingBuffer};

/// The sending side. What waits here is bounded by what its caller has under way.
#[derive(Debug)]
pub struct Sender<T> {
    ring: Producer<T>,
    waiting: VecDeque<T>,
}

/// The receiving side.
#[derive(Debug)]
pub struct Receiver<T>(Consumer<T>);

/// Both sides of a ring of so many messages.
#[must_use]
pub fn ring<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let (ring, consumer) = RingBuffer::new(capacity);
    (Sender { ring, waiting: VecDeque::new() }, Receiver(consumer))
}

impl<T> Sender<T> {
    /// Sends a message, after all that wait.
    pub fn send(&mut self, message: T) {
        self.waiting.push_back(message);
        self.flush();
    }

    /// Sends what had no room before. True if something is left.
    pub fn flush(&mut self) -> bool {
        while let Some(message) = self.waiting.pop_front() {
            if let Err(rtrb::PushError::Full(message)) = self.ring.push(message) {
                self.waiting.push_front(message);
                return true;
            }
        }
        false
    }
}

impl<T> Receiver<T> {
    /// The next message.
    pub fn poll(&mut self) -> Option<T> {
        self.0.pop().ok()
    }

    /// Whether [`Self::poll`] has nothing to yield.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(all(test, not(interleavings)))]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_ring_holds_waits_with_its_sender() {
        let (mut sender, mut receiver) = ring(16);
        (0..33).for_each(|serial| sender.send(serial));
        for serial in 0..33 {
            sender.flush();
            assert_eq!(receiver.poll(), Some(serial), "neither lost nor overtaken");
        }
        assert!(!sender.flush() && receiver.is_empty() && receiver.poll().is_none());
    }
}
