//! A histogram of durations in a fixed amount of memory: eight buckets for each power of two, so that a bucket's upper
//! end is at most an eighth above what fell into it.

use proto::Span;

/// Buckets of one power of two.
const PARTS: u64 = 8;
/// From 1 ns to 2^42 ns, over an hour; what is longer counts as that long.
const NS_MAX: u64 = 1 << 42;
const BUCKETS: usize = index_of(NS_MAX) + 1;

/// Durations since the last look.
#[derive(Debug, Clone)]
pub(crate) struct Durations {
    counts: [u32; BUCKETS],
}

impl Default for Durations {
    fn default() -> Self {
        Self { counts: [0; BUCKETS] }
    }
}

impl Durations {
    /// Takes one in. Clocks of members agree within an error, so it can seem negative: then it counts as the shortest.
    pub(crate) fn record(&mut self, took: Span) {
        let ns = u64::try_from(took.0).unwrap_or(0).clamp(1, NS_MAX);
        let count = &mut self.counts[index_of(ns)];
        *count = count.saturating_add(1);
    }

    /// The duration that 99 in 100 did not exceed, rounded up to the end of its bucket; zero if there was none. Forgets
    /// them all.
    pub(crate) fn take_p99(&mut self) -> Span {
        let counts = std::mem::take(self).counts;
        let total: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        let rank = (total * 99).div_ceil(100);
        let mut seen = 0;
        for (index, &count) in counts.iter().enumerate() {
            seen += u64::from(count);
            if seen >= rank && seen > 0 {
                return Span(end_of(index) as i64);
            }
        }
        Span::ZERO
    }
}

/// The bucket of a duration: the position of its highest bit, then the three bits below it. Below [`PARTS`] each has
/// its own.
const fn index_of(ns: u64) -> usize {
    if ns < PARTS {
        return ns as usize;
    }
    let shift = ns.ilog2() - PARTS.ilog2();
    (shift as u64 * PARTS + (ns >> shift)) as usize
}

/// The longest duration of a bucket.
const fn end_of(index: usize) -> u64 {
    let index = index as u64;
    if index < 2 * PARTS {
        return index;
    }
    let shift = index / PARTS - 1;
    ((index % PARTS + PARTS + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        for index in 1..BUCKETS {
            assert_eq!(index_of(end_of(index)), index);
            assert_eq!(index_of(end_of(index - 1) + 1), index);
        }
    }

    proptest! {
        #[test]
        fn the_percentile_is_at_most_an_eighth_above_the_true_one(
            durations in proptest::collection::vec((0..45u32, any::<i64>()), 0..300),
        ) {
            let mut histogram = Durations::default();
            let mut oracle: Vec<u64> = Vec::new();
            for (bits, number) in durations {
                let took = if bits == 44 { number } else { number & ((1 << bits) - 1) };
                histogram.record(Span(took));
                oracle.push(took.clamp(1, NS_MAX as i64) as u64);
            }
            oracle.sort_unstable();
            let found = histogram.take_p99();
            match (oracle.len() * 99).div_ceil(100) {
                0 => prop_assert_eq!(found, Span::ZERO),
                rank => {
                    let right = oracle[rank - 1];
                    prop_assert!((right..=right + right / PARTS).contains(&(found.0 as u64)), "{} {:?}", right, found);
                }
            }
            prop_assert_eq!(histogram.take_p99(), Span::ZERO, "all are forgotten");
        }
    }
}
