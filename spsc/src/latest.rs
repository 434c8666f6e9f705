//! Values of which only the newest counts: each has a slot, and a queue says which slots changed, so that a thousand
//! updates between two looks cost the reader one.
//!
//! A slot is a sequence lock whose words are atomics (Boehm, "Can seqlocks get along with programming language memory
//! models?", MSPC 2012), so no `unsafe` is needed. Checked with loom, with controls that must fail.

use crate::{
    ring::{Receiver, Sender, ring},
    sync::{Arc, AtomicBool, AtomicU64, Ordering, fence},
};

/// The side that posts values.
#[derive(Debug)]
pub struct LatestWriter<const WORDS: usize> {
    slots: Arc<Slots<WORDS>>,
    /// By slot: even, and what its version is; only this side writes it.
    versions: Vec<u64>,
    changed: Sender<u32>,
}

/// The side that looks at them.
#[derive(Debug)]
pub struct LatestReader<const WORDS: usize> {
    slots: Arc<Slots<WORDS>>,
    changed: Receiver<u32>,
}

#[derive(Debug)]
struct Slots<const WORDS: usize>(Box<[Slot<WORDS>]>);

/// Fills cache lines of its own, as neighbours may belong to other threads.
#[derive(Debug)]
#[repr(align(64))]
struct Slot<const WORDS: usize> {
    /// Odd while a write is going on.
    version: AtomicU64,
    words: [AtomicU64; WORDS],
    /// It is in the queue of changed ones, or about to be.
    is_changed: AtomicBool,
}

/// Both sides of so many slots, whose values have so many words; nothing has been posted yet.
#[must_use]
pub fn latest<const WORDS: usize>(count: usize) -> (LatestWriter<WORDS>, LatestReader<WORDS>) {
    let slots = Arc::new(Slots((0..count).map(|_| Slot::new()).collect()));
    // Each slot is in it at most once.
    let (changed_sender, changed) = ring(count);
    let writer = LatestWriter { slots: Arc::clone(&slots), versions: vec![0; count], changed: changed_sender };
    (writer, LatestReader { slots, changed })
}

impl<const WORDS: usize> LatestWriter<WORDS> {
    /// Posts a slot's newest value; an older one that was not looked at yet is gone.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn post(&mut self, index: u32, words: [u64; WORDS]) {
        let slot = &self.slots.0[index as usize];
        slot.write(&mut self.versions[index as usize], words);
        // After the value, so that whoever sees the flag cleared by the reader knows that the reader has yet to look.
        if !slot.is_changed.swap(true, Ordering::AcqRel) {
            self.changed.send(index);
        }
    }

    /// Sends what had no room before. True if something is left.
    pub fn flush(&mut self) -> bool {
        self.changed.flush()
    }
}

impl<const WORDS: usize> LatestReader<WORDS> {
    /// A slot that has changed, and what is in it now.
    pub fn poll(&mut self) -> Option<(u32, [u64; WORDS])> {
        while let Some(index) = self.changed.poll() {
            let slot = &self.slots.0[index as usize];
            // Before the value is read: a write that the read misses finds the flag cleared and queues the slot again.
            slot.is_changed.swap(false, Ordering::AcqRel);
            // A read that meets a write gives up: that write queues the slot again when it is done.
            if let Some(words) = slot.read() {
                return Some((index, words));
            }
        }
        None
    }

    /// Whether [`Self::poll`] has nothing to yield.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }
}

impl<const WORDS: usize> Slot<WORDS> {
    fn new() -> Self {
        let words = std::array::from_fn(|_| AtomicU64::new(0));
        Self { version: AtomicU64::new(0), words, is_changed: AtomicBool::new(false) }
    }

    fn write(&self, version: &mut u64, words: [u64; WORDS]) {
        self.version.store(*version + 1, Ordering::Relaxed);
        // No word becomes visible before the odd version.
        fence(Ordering::Release);
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        *version += 2;
        self.version.store(*version, Ordering::Release);
    }

    /// `None` if a write is going on.
    fn read(&self) -> Option<[u64; WORDS]> {
        let before = self.version.load(Ordering::Acquire);
        let words = self.load();
        // No word was read after this version.
        fence(Ordering::Acquire);
        let after = self.version.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(words)
    }

    fn load(&self) -> [u64; WORDS] {
        std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed))
    }
}

#[cfg(all(test, interleavings))]
mod loom_tests;
#[cfg(all(test, not(interleavings)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The oracle is a map of what was not looked at yet.
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((any::<bool>(), 0..8u32), 0..200)) {
            let (mut writer, mut reader) = latest(8);
            let mut posted = BTreeMap::new();
            for (serial, (is_post, index)) in (0..).zip(steps) {
                if is_post {
                    writer.post(index, [serial, !serial]);
                    posted.insert(index, [serial, !serial]);
                } else {
                    prop_assert_eq!(reader.is_empty(), posted.is_empty());
                    match reader.poll() {
                        Some((index, words)) => prop_assert_eq!(posted.remove(&index), Some(words)),
                        None => prop_assert!(posted.is_empty()),
                    }
                }
            }
        }
    }
}
