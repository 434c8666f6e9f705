//! What requests take alone by their length: a small table for each model. Orloj tells requests apart by their
//! application only; where a model's lengths are its requests' choice, they say more, and before anything has run.
//!
//! A length is what a request's input takes up, in bytes. A bucket is half an octave wide, so times that grow with the
//! length differ by a factor of 1.4 within one, wherever a model's lengths lie. There are at most [`BUCKETS_MAX`]: what
//! is shorter than the shortest of so many counts as of that one, as the times of short requests differ least.
//!
//! What a bucket knows are requests that ran alone, and, as long as these are few, batches: their longest request
//! decides what they take, so that its time follows from theirs (Orloj, equation 3). If times depend on more than the
//! length that is too much, as the slowest of a batch need not be the longest; so it is the second choice.

use std::collections::{BTreeMap, VecDeque};

use proto::Span;

use super::{Sample, Works};

/// Lengths of a model that are told apart.
pub const BUCKETS_MAX: usize = proto::request_times::LENGTHS_MAX;
/// Samples of a distribution that is preferred to a broader one.
pub(super) const ENOUGH: usize = 32;
/// A bucket's last batches.
const BATCHES_MAX: usize = 64;

/// A range of lengths: `[2^(n / 2), 2^((n + 1) / 2))`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bucket(u8);

impl Bucket {
    /// That of a length in bytes; none of 0, which says that it is not known.
    #[must_use]
    pub fn of(length: u32) -> Option<Self> {
        let octave = length.checked_ilog2()?;
        let is_upper = u64::from(length).pow(2) >= 1 << (2 * octave + 1);
        Some(Self(2 * octave as u8 + u8::from(is_upper)))
    }

    /// The least length in it.
    #[must_use]
    pub fn shortest(self) -> u32 {
        let square = 1u64 << self.0;
        // The square root of half an octave is no whole number.
        (square.isqrt() + u64::from(self.0 % 2)) as u32
    }

    /// The greatest length in it.
    #[must_use]
    pub fn longest(self) -> u32 {
        if self.0 == 63 { u32::MAX } else { Self(self.0 + 1).shortest() - 1 }
    }
}

/// The table of one model.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Lengths(BTreeMap<Bucket, Times>);

/// Of one bucket.
#[derive(Debug, Clone, PartialEq, Default)]
struct Times {
    alone: Works,
    /// What the longest request of each would have taken alone.
    batches: VecDeque<Span>,
}

impl Lengths {
    /// The bucket that stands for this one.
    pub(super) fn known(&self, bucket: Bucket) -> Bucket {
        match self.0.first_key_value() {
            Some((&shortest, _)) if self.0.len() == BUCKETS_MAX => bucket.max(shortest),
            _ => bucket,
        }
    }

    fn entry(&mut self, bucket: Bucket) -> &mut Times {
        let bucket = self.known(bucket);
        if self.0.len() == BUCKETS_MAX && !self.0.contains_key(&bucket) {
            let (_, shortest) = self.0.pop_first().expect("it is full");
            let mut next = self.0.first_entry().expect("there are more");
            shortest.alone.samples().for_each(|sample| next.get_mut().alone.handle(sample));
        }
        self.0.entry(bucket).or_default()
    }

    pub(super) fn remove(&mut self, bucket: Bucket) {
        self.0.remove(&bucket);
    }

    /// A request ran alone.
    pub(super) fn handle_alone(&mut self, sample: Sample) {
        if let Some(bucket) = sample.bucket {
            self.entry(bucket).alone.handle(sample);
        }
    }

    /// A batch ran, whose longest request would have taken so long alone.
    pub(super) fn handle_batch(&mut self, longest: Bucket, alone: Span) {
        let batches = &mut self.entry(longest).batches;
        batches.push_back(alone);
        if batches.len() > BATCHES_MAX {
            batches.pop_front();
        }
    }

    /// Those that enough is known of, shortest first. One of all lengths tells nothing that applications do not.
    pub(super) fn known_well(&self) -> impl Iterator<Item = Bucket> + '_ {
        let tells_apart = self.0.len() > 1;
        let known = self.0.iter().filter(move |(_, times)| tells_apart && times.len() >= ENOUGH);
        known.map(|(&bucket, _)| bucket)
    }

    /// What requests of a bucket took, or would have.
    pub(super) fn times(&self, bucket: Bucket) -> impl Iterator<Item = Span> + '_ {
        self.alone(bucket).chain(self.of_batches(bucket))
    }

    /// What those of them would have that were in batches, as long as that counts.
    pub(super) fn of_batches(&self, bucket: Bucket) -> impl Iterator<Item = Span> + '_ {
        let times = self.0.get(&bucket).filter(|times| times.alone.len() < ENOUGH);
        times.into_iter().flat_map(|times| &times.batches).copied()
    }

    /// What those of them took that ran alone.
    pub(super) fn alone(&self, bucket: Bucket) -> impl Iterator<Item = Span> + '_ {
        self.0.get(&bucket).into_iter().flat_map(|times| times.alone.samples()).map(|sample| sample.alone)
    }

    /// All buckets, shortest first.
    pub(super) fn buckets(&self) -> impl Iterator<Item = Bucket> + '_ {
        self.0.keys().copied()
    }
}

impl Times {
    /// Samples that [`Lengths::times`] yields.
    fn len(&self) -> usize {
        let alone = self.alone.len();
        if alone < ENOUGH { alone + self.batches.len() } else { alone }
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn each_length_is_in_one_bucket_and_no_bucket_is_wider_than_half_an_octave() {
        assert_eq!(Bucket::of(0), None);
        let around = |power: u32| [-1, 0, 1].map(|by| (1i64 << power) + by);
        let lengths = (1..5000).chain((13..32).flat_map(around)).chain([i64::from(u32::MAX)]);
        let mut last = Bucket(0);
        for length in lengths {
            let length = length as u32;
            let bucket = Bucket::of(length).unwrap();
            assert!((bucket.shortest()..=bucket.longest()).contains(&length), "{length} {bucket:?}");
            assert!(last <= bucket, "{length}");
            assert!(f64::from(bucket.longest()) < f64::from(bucket.shortest()) * 2f64.sqrt(), "{bucket:?}");
            last = bucket;
        }
        assert_eq!(last, Bucket(63));
    }

    /// All samples in the order that they came in; buckets are found from the lengths that are there.
    #[derive(Default)]
    struct Naive {
        alone: Vec<(Bucket, Span)>,
        batches: Vec<(Bucket, Span)>,
        /// Shortest first.
        buckets: Vec<Bucket>,
    }

    impl Naive {
        fn see(&mut self, bucket: Bucket) -> Bucket {
            let is_full = self.buckets.len() == BUCKETS_MAX;
            let shortest = self.buckets.first().copied().unwrap_or(bucket);
            let bucket = if is_full { bucket.max(shortest) } else { bucket };
            if !self.buckets.contains(&bucket) {
                self.buckets.push(bucket);
                self.buckets.sort();
                if is_full {
                    self.buckets.remove(0);
                    let next = self.buckets[0];
                    self.batches.retain(|(of, _)| *of != shortest);
                    self.alone.iter_mut().filter(|(of, _)| *of == shortest).for_each(|(of, _)| *of = next);
                }
            }
            bucket
        }

        fn times(&self, bucket: Bucket) -> Vec<Span> {
            let of = |list: &[(Bucket, Span)]| -> Vec<Span> {
                list.iter().filter(|(of, _)| *of == bucket).map(|&(_, time)| time).collect()
            };
            let (mut times, batches) = (of(&self.alone), of(&self.batches));
            if times.len() < ENOUGH {
                times.extend(&batches[batches.len().saturating_sub(BATCHES_MAX)..]);
            }
            times.sort_unstable();
            times
        }
    }

    #[test]
    fn the_table_is_what_all_samples_together_say() {
        for seed in 0..20 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let (mut lengths, mut naive) = (Lengths::default(), Naive::default());
            // Fewer than a window of each bucket, so that nothing is forgotten.
            let range = rng.random_range(1..30);
            for step in 0..1500 {
                let length = 1 << (rng.random_range(0..=range) as u32);
                let bucket = Bucket::of(length).unwrap();
                let time = Span(1_000 * i64::from(length) + rng.random_range(0..500));
                let known = naive.see(bucket);
                if rng.random_bool(0.4) {
                    naive.alone.push((known, time));
                    lengths.handle_alone(Sample { alone: time, bucket: Some(bucket) });
                } else {
                    naive.batches.push((known, time));
                    lengths.handle_batch(bucket, time);
                }
                if naive.alone.iter().filter(|(of, _)| *of == known).count() > 400 {
                    break;
                }
                assert_eq!(lengths.known(bucket), known, "step {step} of seed {seed}");
            }
            assert_eq!(lengths.buckets().collect::<Vec<_>>(), naive.buckets);
            for &bucket in &naive.buckets {
                let mut times: Vec<Span> = lengths.times(bucket).collect();
                times.sort_unstable();
                let expected = naive.times(bucket);
                assert_eq!(times, expected, "{bucket:?} of seed {seed}");
                let is_known = naive.buckets.len() > 1 && expected.len() >= ENOUGH;
                assert_eq!(lengths.known_well().any(|known| known == bucket), is_known, "{bucket:?} of seed {seed}");
            }
        }
    }

    #[test]
    fn batches_count_until_enough_requests_ran_alone() {
        let (mut lengths, bucket) = (Lengths::default(), Bucket::of(100).unwrap());
        (0..2 * BATCHES_MAX).for_each(|_| lengths.handle_batch(bucket, Span::from_millis(9)));
        assert_eq!((lengths.times(bucket).count(), lengths.alone(bucket).count()), (BATCHES_MAX, 0));
        let sample = Sample { alone: Span::from_millis(5), bucket: Some(bucket) };
        (0..ENOUGH).for_each(|_| lengths.handle_alone(sample));
        assert!(lengths.times(bucket).all(|time| time == Span::from_millis(5)));
        assert_eq!(lengths.known_well().count(), 0, "there is no other length");
    }
}
