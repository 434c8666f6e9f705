//! Places for frames in a connection's registered memory, given out and taken back in the same order. No IO.

use std::collections::VecDeque;

/// Frames start at multiples of this: a cache line.
const ALIGN: usize = 64;

/// A ring of `capacity` bytes. A frame lies in one piece; where it would cross the end, the end is left unused.
#[derive(Debug)]
pub(crate) struct Ring {
    capacity: usize,
    /// (offset, length) of what is out, oldest first.
    taken: VecDeque<(usize, usize)>,
}

impl Ring {
    /// # Panics
    /// If `capacity` is no multiple of the alignment.
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity.is_multiple_of(ALIGN));
        Self { capacity, taken: VecDeque::new() }
    }

    /// A place for `bytes` (at least 1); its offset. `None` when there is none now.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        let length = bytes.next_multiple_of(ALIGN);
        let offset = match (self.taken.front(), self.taken.back()) {
            (Some(&(first, _)), Some(&(last, last_length))) => {
                let end = last + last_length;
                // What is out lies either in one piece, or wraps: then only the gap before `first` is free.
                if last < first {
                    (length <= first - end).then_some(end)?
                } else if length <= self.capacity - end {
                    end
                } else {
                    (length <= first).then_some(0)?
                }
            }
            _ => (length <= self.capacity).then_some(0)?,
        };
        self.taken.push_back((offset, length));
        Some(offset)
    }

    /// Takes the oldest place back.
    ///
    /// # Panics
    /// If nothing is out.
    pub(crate) fn give_back(&mut self) {
        self.taken.pop_front().expect("a place is given back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the naive rule: places lie within the ring and never overlap, and an empty ring takes anything that
        /// fits.
        #[test]
        fn places_never_overlap(steps in proptest::collection::vec((any::<bool>(), 1usize..700), 1..300)) {
            let mut ring = Ring::new(1024);
            let mut out: VecDeque<(usize, usize)> = VecDeque::new();
            for (take, bytes) in steps {
                if take {
                    match ring.take(bytes) {
                        Some(offset) => {
                            prop_assert!(offset + bytes <= 1024);
                            prop_assert!(out.iter().all(|&(at, length)| offset + bytes <= at || at + length <= offset));
                            out.push_back((offset, bytes));
                        }
                        None => prop_assert!(!out.is_empty()),
                    }
                } else if out.pop_front().is_some() {
                    ring.give_back();
                }
            }
        }
    }
}
