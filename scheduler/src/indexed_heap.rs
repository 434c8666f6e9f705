//! A binary heap whose entries can be moved and removed by key: timers, and candidates by urgency.
//!
//! Keys are small dense numbers (a model, a sub-cluster); each is in the heap at most once. O(log n) for everything
//! but `peek`. Equal instants come out in the order of their keys, so that one seed gives one history.

use proto::Timestamp;

/// Where a key that is not in the heap stands.
const ABSENT: u32 = u32::MAX;

/// A min-heap of instants, addressed by key.
#[derive(Debug, Default, Clone)]
pub struct IndexedHeap {
    entries: Vec<(Timestamp, u32)>,
    /// `positions[key]` is where the key stands in `entries`.
    positions: Vec<u32>,
}

impl IndexedHeap {
    /// Inserts `key`, or moves it if it is already there.
    pub fn set(&mut self, key: u32, at: Timestamp) {
        if self.positions.len() <= key as usize {
            self.positions.resize(key as usize + 1, ABSENT);
        }
        match self.positions[key as usize] {
            ABSENT => {
                self.entries.push((at, key));
                self.sift_up(self.entries.len() - 1);
            }
            position => {
                let position = position as usize;
                let earlier = (at, key) < self.entries[position];
                self.entries[position].0 = at;
                if earlier { self.sift_up(position) } else { self.sift_down(position) }
            }
        }
    }

    /// Takes `key` out; nothing happens if it is not there.
    pub fn remove(&mut self, key: u32) {
        let Some(&position) = self.positions.get(key as usize) else { return };
        if position == ABSENT {
            return;
        }
        self.positions[key as usize] = ABSENT;
        let position = position as usize;
        let last = self.entries.pop().expect("the heap holds at least the removed key");
        if position < self.entries.len() {
            let earlier = last < self.entries[position];
            self.entries[position] = last;
            if earlier { self.sift_up(position) } else { self.sift_down(position) }
        }
    }

    /// Keys in the heap.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// No key is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The earliest entry.
    #[must_use]
    pub fn peek(&self) -> Option<(Timestamp, u32)> {
        self.entries.first().copied()
    }

    /// The instant that `key` stands at.
    #[must_use]
    pub fn get(&self, key: u32) -> Option<Timestamp> {
        match self.positions.get(key as usize) {
            None | Some(&ABSENT) => None,
            Some(&position) => Some(self.entries[position as usize].0),
        }
    }

    fn sift_up(&mut self, mut position: usize) {
        let entry = self.entries[position];
        while position > 0 {
            let parent = (position - 1) / 2;
            if self.entries[parent] <= entry {
                break;
            }
            self.place(position, self.entries[parent]);
            position = parent;
        }
        self.place(position, entry);
    }

    fn sift_down(&mut self, mut position: usize) {
        let entry = self.entries[position];
        loop {
            let mut child = 2 * position + 1;
            if child >= self.entries.len() {
                break;
            }
            if child + 1 < self.entries.len() && self.entries[child + 1] < self.entries[child] {
                child += 1;
            }
            if entry <= self.entries[child] {
                break;
            }
            self.place(position, self.entries[child]);
            position = child;
        }
        self.place(position, entry);
    }

    fn place(&mut self, position: usize, entry: (Timestamp, u32)) {
        self.entries[position] = entry;
        self.positions[entry.1 as usize] = position as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// The oracle scans a map.
        #[test]
        fn behaves_like_a_map_that_is_scanned(
            steps in proptest::collection::vec((0u32..24, proptest::option::weighted(0.7, 0i64..40)), 1..300)
        ) {
            let mut heap = IndexedHeap::default();
            let mut oracle = BTreeMap::new();
            for (key, at) in steps {
                match at {
                    Some(at) => {
                        heap.set(key, Timestamp(at));
                        oracle.insert(key, Timestamp(at));
                    }
                    None => {
                        heap.remove(key);
                        oracle.remove(&key);
                    }
                }
                prop_assert_eq!(heap.peek(), oracle.iter().map(|(&key, &at)| (at, key)).min());
                prop_assert_eq!(heap.get(key), oracle.get(&key).copied());
            }
        }
    }
}
