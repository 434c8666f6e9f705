//! A set of small numbers as bits, which finds runs of neighbours.

use std::ops::Range;

const WORD_BITS: usize = u64::BITS as usize;

/// A set of numbers below a bound.
#[derive(Debug, Default)]
pub(super) struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    /// All numbers below `bound`.
    pub(super) fn full(bound: usize) -> Self {
        let mut bits = Self { words: vec![0; bound.div_ceil(WORD_BITS)], len: 0 };
        bits.insert(0..bound);
        bits
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds numbers, none of which is in it.
    pub(super) fn insert(&mut self, numbers: Range<usize>) {
        self.len += numbers.len();
        masks(numbers).for_each(|(word, mask)| self.words[word] |= mask);
    }

    /// Takes out numbers, all of which are in it.
    pub(super) fn remove(&mut self, numbers: Range<usize>) {
        self.len -= numbers.len();
        masks(numbers).for_each(|(word, mask)| self.words[word] &= !mask);
    }

    /// The first `wanted` neighbours, or as many as there are anywhere, the first of these.
    pub(super) fn first_run(&self, wanted: usize) -> Range<usize> {
        let mut longest = 0..0;
        let mut from = 0;
        while let Some(start) = self.next(from, |word| word) {
            let end = self.next(start, |word| !word).unwrap_or(self.words.len() * WORD_BITS).min(start + wanted);
            if end - start > longest.len() {
                longest = start..end;
            }
            if longest.len() == wanted {
                break;
            }
            from = end;
        }
        longest
    }

    /// The first bit from `from` on that is set in what `look` makes of its word.
    fn next(&self, from: usize, look: impl Fn(u64) -> u64) -> Option<usize> {
        let mut below = !0 << (from % WORD_BITS);
        for (index, &word) in self.words.iter().enumerate().skip(from / WORD_BITS) {
            let found = look(word) & below;
            if found != 0 {
                return Some(index * WORD_BITS + found.trailing_zeros() as usize);
            }
            below = !0;
        }
        None
    }
}

/// The words that hold these numbers, and their bits there.
fn masks(numbers: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let words = numbers.start / WORD_BITS..numbers.end.div_ceil(WORD_BITS).max(numbers.start / WORD_BITS);
    words.map(move |word| {
        let from = numbers.start.saturating_sub(word * WORD_BITS);
        let to = (numbers.end - word * WORD_BITS).min(WORD_BITS);
        (word, (!0 >> (WORD_BITS - (to - from))) << from)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The longest run, cut to what is wanted, number by number.
    fn first_run(set: &BTreeSet<usize>, wanted: usize) -> Range<usize> {
        let mut longest = 0..0;
        for &start in set {
            let end = (start..).find(|number| !set.contains(number)).unwrap().min(start + wanted);
            if end - start > longest.len() {
                longest = start..end;
            }
        }
        longest
    }

    proptest! {
        /// Against a set of numbers.
        #[test]
        fn runs_are_those_of_a_set(
            bound in 1usize..300,
            steps in proptest::collection::vec((any::<prop::sample::Index>(), 1usize..70), 1..60),
            wanted in 1usize..130,
        ) {
            let mut bits = Bits::full(bound);
            let mut set: BTreeSet<usize> = (0..bound).collect();
            for (pick, length) in steps {
                let start = pick.index(bound);
                let is_in = set.contains(&start);
                let same = |number: &usize| *number < bound && set.contains(number) == is_in;
                let numbers = start..(start..start + length).take_while(same).last().unwrap() + 1;
                if is_in {
                    set.retain(|number| !numbers.contains(number));
                    bits.remove(numbers);
                } else {
                    set.extend(numbers.clone());
                    bits.insert(numbers);
                }
                prop_assert_eq!((bits.len(), bits.is_empty()), (set.len(), set.is_empty()));
                prop_assert_eq!(bits.first_run(wanted), first_run(&set, wanted));
            }
        }
    }
}
