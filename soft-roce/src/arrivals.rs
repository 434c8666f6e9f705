//! Which READ responses have come although an earlier one is missing. Their bytes are in place already, so only the
//! hole is asked for again.

use crate::wire::Psn;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = 16;
/// Numbers further ahead are not remembered: they come again.
const SPAN: u32 = WORDS as u32 * WORD_BITS;

/// A set of sequence numbers within `SPAN` of a base that only moves up: a ring of bits.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    words: [u64; WORDS],
    count: u32,
    /// The highest number in it.
    last: Psn,
}

impl Arrivals {
    pub(crate) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The highest number in it.
    pub(crate) const fn last(&self) -> Option<Psn> {
        if self.is_empty() { None } else { Some(self.last) }
    }

    /// Adds a number that is not before `base`, unless it is too far ahead.
    pub(crate) fn insert(&mut self, base: Psn, psn: Psn) {
        if psn.since(base) as u32 >= SPAN || self.contains(psn) {
            return;
        }
        if self.is_empty() || self.last.is_before(psn) {
            self.last = psn;
        }
        self.flip(psn);
        self.count += 1;
    }

    /// The lowest number in it, none of which is before `base`.
    pub(crate) fn first(&self, base: Psn) -> Option<Psn> {
        (!self.is_empty()).then(|| (0..SPAN).map(|ahead| base.plus(ahead)).find(|psn| self.contains(*psn)))?
    }

    /// Moves the base from `base` to `to`, and further over all numbers that follow without a hole: the first missing.
    pub(crate) fn advance(&mut self, base: Psn, to: Psn) -> Psn {
        let mut at = base;
        while !self.is_empty() && (at.is_before(to) || self.contains(at)) {
            if self.contains(at) {
                self.flip(at);
                self.count -= 1;
            }
            at = at.plus(1);
        }
        if at.is_before(to) { to } else { at }
    }

    pub(crate) fn clear(&mut self) {
        if !self.is_empty() {
            *self = Self::default();
        }
    }

    const fn contains(&self, psn: Psn) -> bool {
        let (word, bit) = Self::place(psn);
        self.words[word] & bit != 0
    }

    const fn flip(&mut self, psn: Psn) {
        let (word, bit) = Self::place(psn);
        self.words[word] ^= bit;
    }

    const fn place(psn: Psn) -> (usize, u64) {
        let place = psn.value() % SPAN;
        ((place / WORD_BITS) as usize, 1 << (place % WORD_BITS))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain set, with the base near the wrap of sequence numbers.
        #[test]
        fn agrees_with_a_set(steps in prop::collection::vec((0_u32..1_100, any::<bool>()), 1..200)) {
            let start = Psn::new(0x00ff_fe00);
            let (mut arrivals, mut set, mut base) = (Arrivals::default(), BTreeSet::<u32>::new(), 0);
            for (ahead, insert) in steps {
                if insert {
                    arrivals.insert(start.plus(base), start.plus(base + ahead));
                    if ahead < SPAN {
                        set.insert(base + ahead);
                    }
                } else {
                    let mut to = base + ahead / 64;
                    while set.contains(&to) {
                        to += 1;
                    }
                    let reached = arrivals.advance(start.plus(base), start.plus(base + ahead / 64));
                    prop_assert_eq!(reached, start.plus(to));
                    base = to;
                    set = set.split_off(&base);
                }
                prop_assert_eq!(arrivals.first(start.plus(base)), set.first().map(|at| start.plus(*at)));
                prop_assert_eq!(arrivals.last(), set.last().map(|at| start.plus(*at)));
            }
        }
    }
}
