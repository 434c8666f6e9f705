//! Orloj's queue of one batch size: the requests that such a batch could still serve, by their scores (section 4.1).
//!
//! A score is that of a request in a batch that takes [from, to) with some probability, summed over these steps. By the
//! request's deadline D and a rate b at which it would be delayed if it were not chosen now it is, for each step
//! (equation 2, with a cost of 1 for a miss),
//!
//! - before `D - to`: `h / (E[L] b) (e^{b to} - e^{b from}) e^{-bD} e^{bt}`: the batch would be on time, and the
//!   less likely later the nearer that is,
//! - before `D - from`: `h / (E[L] b) (1 - e^{b from} e^{-bD} e^{bt})`: it may be,
//! - then 0.
//!
//! The paper calls h the step's frequency. It is a density, the step's probability divided by its width: the integral
//! of equation 1 over the step has it so, and steps are of unequal widths.
//!
//! Each is a line over `x = e^{bt}` that changes only at these milestones. So the best are found by a look at each
//! request, which is a product and a sum, once for each batch. The paper keeps a dynamic convex hull of the lines
//! instead: each request is in the hulls of all batch sizes and moves in them at every milestone, and weights that
//! change with what applications lose would change all lines.

use std::collections::{BTreeMap, BTreeSet};

use proto::{Span, Timestamp};

use crate::dynamic::{BatchTimes, Class};

/// A score over x = e^{bt}.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    alpha: f64,
    beta: f64,
}

impl Line {
    fn at(self, x: f64) -> f64 {
        self.alpha * x + self.beta
    }
}

/// Scores' clock: `b` for a millisecond, and the instant that exponents count from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScoreClock {
    pub rate: f64,
    pub base: Timestamp,
}

impl ScoreClock {
    /// e^{b at}.
    pub(super) fn exp(&self, at: Timestamp) -> f64 {
        self.grow(at - self.base)
    }

    fn grow(&self, span: Span) -> f64 {
        (self.rate * span.as_millis_f64()).exp()
    }
}

/// A request, as a queue needs it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub key: u32,
    pub deadline: Timestamp,
    pub application: u8,
    pub class: Class,
}

/// Its line at `now`, and when it has another one.
fn line(now: Timestamp, entry: &Entry, times: &BatchTimes, clock: ScoreClock) -> (Line, Timestamp) {
    let bins = &times.of(entry.class).bins;
    let per_part = 1.0 / (times.mean.as_millis_f64() * clock.rate);
    // What a batch takes is multiplied with what is left before powers are taken: none overflows, however long both
    // are.
    let deadline = entry.deadline - clock.base;
    let grown = |time: Span| clock.grow(time - deadline);
    let mut line = Line { alpha: 0.0, beta: 0.0 };
    let mut until = Timestamp::NEVER;
    for bin in bins {
        let (certain_until, possible_until) = (entry.deadline - bin.to, entry.deadline - bin.from);
        let weight = bin.part / (bin.to - bin.from).as_millis_f64() * per_part;
        if now < certain_until {
            line.alpha += weight * (grown(bin.to) - grown(bin.from));
            until = until.min(certain_until);
        } else if now < possible_until {
            line.alpha -= weight * grown(bin.from);
            line.beta += weight;
            until = until.min(possible_until);
        }
    }
    (line, until)
}

#[derive(Debug)]
struct Waiting {
    entry: Entry,
    line: Line,
    /// When it has another one.
    until: Timestamp,
    expires_at: Timestamp,
}

impl Waiting {
    /// Its line is found when a batch is first chosen beside it: most leave other queues before.
    fn new(now: Timestamp, entry: Entry, times: &BatchTimes) -> Self {
        // Algorithm 1, line 11: too late from the instant after.
        let expires_at = entry.deadline - times.of(entry.class).mean + Span(1);
        Self { entry, line: Line { alpha: 0.0, beta: 0.0 }, until: now, expires_at }
    }
}

/// The requests that a batch of one size may serve.
#[derive(Debug)]
pub(super) struct SizeQueue {
    size: usize,
    waiting: BTreeMap<u32, Waiting>,
    /// How many wait of each application that any is of.
    applications: BTreeMap<u8, usize>,
    by_deadline: BTreeSet<(Timestamp, u32)>,
    /// By when a batch of this size would be late, on average.
    by_expiry: BTreeSet<(Timestamp, u32)>,
}

impl SizeQueue {
    /// With these requests, in any order.
    pub(super) fn of(size: usize, now: Timestamp, entries: &[Entry], times: &BatchTimes) -> Self {
        let waiting: BTreeMap<u32, Waiting> =
            entries.iter().map(|entry| (entry.key, Waiting::new(now, *entry, times))).collect();
        let mut applications = BTreeMap::new();
        entries.iter().for_each(|entry| *applications.entry(entry.application).or_default() += 1);
        Self {
            size,
            applications,
            by_deadline: waiting.iter().map(|(&key, waiting)| (waiting.entry.deadline, key)).collect(),
            by_expiry: waiting.iter().map(|(&key, waiting)| (waiting.expires_at, key)).collect(),
            waiting,
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// D_Q of Algorithm 1, and whose it is.
    pub(super) fn earliest(&self) -> Option<(Timestamp, u32)> {
        self.by_deadline.first().copied()
    }

    /// When the first one must leave.
    pub(super) fn first_expiry(&self) -> Option<Timestamp> {
        self.by_expiry.first().map(|&(at, _)| at)
    }

    pub(super) fn insert(&mut self, now: Timestamp, entry: Entry, times: &BatchTimes) {
        let waiting = Waiting::new(now, entry, times);
        *self.applications.entry(entry.application).or_default() += 1;
        self.by_deadline.insert((entry.deadline, entry.key));
        self.by_expiry.insert((waiting.expires_at, entry.key));
        self.waiting.insert(entry.key, waiting);
    }

    /// Nothing happens if it is not there.
    pub(super) fn remove(&mut self, key: u32) {
        let Some(Waiting { entry, expires_at, .. }) = self.waiting.remove(&key) else { return };
        let count = self.applications.get_mut(&entry.application).expect("it was counted");
        *count -= 1;
        if *count == 0 {
            self.applications.remove(&entry.application);
        }
        self.by_deadline.remove(&(entry.deadline, key));
        self.by_expiry.remove(&(expires_at, key));
    }

    /// The next request that a batch of this size would serve too late; it has left.
    pub(super) fn pop_expired(&mut self, now: Timestamp) -> Option<u32> {
        let &(_, key) = self.by_expiry.first().filter(|&&(at, _)| at <= now)?;
        self.remove(key);
        Some(key)
    }

    /// The mean weight of those that wait, by their applications; some do.
    pub(super) fn mean_weight(&self, weight: impl Fn(u8) -> f64) -> f64 {
        let sum: f64 = self.applications.iter().map(|(&of, &count)| count as f64 * weight(of)).sum();
        sum / self.waiting.len() as f64
    }

    /// The requests of a batch: those with the highest scores, each times its application's weight. There are enough.
    pub(super) fn best(
        &mut self,
        now: Timestamp,
        times: &BatchTimes,
        clock: ScoreClock,
        weight: impl Fn(u8) -> f64,
    ) -> Vec<u32> {
        let x = clock.exp(now);
        let mut weights = [0.0; 1 + u8::MAX as usize];
        self.applications.keys().for_each(|&of| weights[usize::from(of)] = weight(of));
        let score = |(&key, waiting): (&u32, &mut Waiting)| {
            if waiting.until <= now {
                (waiting.line, waiting.until) = line(now, &waiting.entry, times, clock);
            }
            (weights[usize::from(waiting.entry.application)] * waiting.line.at(x), key)
        };
        let mut scores: Vec<(f64, u32)> = self.waiting.iter_mut().map(score).collect();
        let order = |one: &(f64, u32), other: &(f64, u32)| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1));
        if scores.len() > self.size {
            scores.select_nth_unstable_by(self.size - 1, order);
            scores.truncate(self.size);
        }
        scores.into_iter().map(|(_, key)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::dynamic::{BatchCost, DynamicTimes};

    const CLOCK: ScoreClock = ScoreClock { rate: 1e-4, base: Timestamp::ZERO };

    fn at(ms: f64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis_f64(ms)
    }

    /// Equation 1, as it is written: by how much the expected cost of a miss grows if the request is delayed, for a
    /// delay that follows an exponential distribution, over E[L]. Each step's times are alike likely; the integral is a
    /// sum over slices of them.
    fn expected_cost_reduction(now: Timestamp, entry: &Entry, times: &BatchTimes) -> f64 {
        const SLICES: usize = 2_000;
        let ms = Span::as_millis_f64;
        let left = ms(entry.deadline - now);
        let of_time = |took: f64| {
            let missed_now = if took > left { 1.0 } else { 0.0 };
            // P(delay > what is left).
            let missed_later = if took > left { 1.0 } else { (-CLOCK.rate * (left - took)).exp() };
            missed_later - missed_now
        };
        let of_bin = |bin: &crate::dynamic::Bin| {
            let (from, width) = (ms(bin.from), ms(bin.to - bin.from));
            let slice = |index: usize| of_time(from + width * (index as f64 + 0.5) / SLICES as f64);
            bin.part * (0..SLICES).map(slice).sum::<f64>() / SLICES as f64
        };
        times.of(entry.class).bins.iter().map(of_bin).sum::<f64>() / ms(times.mean)
    }

    /// A step's probability stood where its density belongs: wide steps counted for more than they are.
    #[test]
    fn a_score_is_the_expected_cost_that_running_now_saves() {
        let ms = Span::from_millis;
        let bin = |from, to, part| crate::dynamic::Bin { from: ms(from), to: ms(to), part };
        let bins = vec![bin(10, 12, 0.5), bin(12, 40, 0.3), bin(40, 400, 0.2)];
        let times = BatchTimes::of_bins(bins, ms(60));
        for left in [5, 11, 12, 30, 39, 41, 200, 399, 500, 5_000] {
            let entry = Entry { key: 0, deadline: at(7_000.0) + ms(left), application: 0, class: Class::ANY };
            let (Line { alpha, beta }, _) = line(at(7_000.0), &entry, &times, CLOCK);
            let score = alpha * CLOCK.exp(at(7_000.0)) + beta;
            let expected = expected_cost_reduction(at(7_000.0), &entry, &times);
            assert!((score - expected).abs() < 1e-3 * expected.max(1e-3), "{left} ms left: {score}, {expected}");
        }
    }

    /// Equation 2, as it is written.
    fn naive_score(now: Timestamp, entry: &Entry, times: &BatchTimes) -> f64 {
        let ms = Span::as_millis_f64;
        let (t, d, b) = (ms(now - CLOCK.base), ms(entry.deadline - CLOCK.base), CLOCK.rate);
        let factor = 1.0 / (ms(times.mean) * b);
        let score = |bin: &crate::dynamic::Bin| {
            let (l1, l2) = (ms(bin.from), ms(bin.to));
            let h = bin.part / (l2 - l1);
            if t < d - l2 {
                h * factor * ((b * l2).exp() - (b * l1).exp()) * (b * (t - d)).exp()
            } else if t < d - l1 {
                h * factor * (1.0 - (b * l1).exp() * (b * (t - d)).exp())
            } else {
                0.0
            }
        };
        times.of(entry.class).bins.iter().map(score).sum()
    }

    #[test]
    fn no_score_overflows_however_long_a_batch_takes_and_may_wait() {
        let hours = |hours: f64| at(hours * 3_600_000.0);
        for took in [1.0, 20.0, 1_000.0] {
            let times = BatchTimes::constant(hours(took) - at(0.0));
            for deadline in [0.5, 3.0, 24.0, 2_000.0] {
                for now in [0.0, 0.2, 23.0] {
                    let entry = Entry { key: 0, deadline: hours(deadline), application: 0, class: Class::ANY };
                    let (Line { alpha, beta }, _) = line(hours(now), &entry, &times, CLOCK);
                    assert!(alpha.is_finite() && beta.is_finite(), "{took} h until {deadline} h at {now} h");
                }
            }
        }
    }

    #[test]
    fn a_batch_has_the_highest_weighted_scores_as_requests_come_and_go_and_time_passes() {
        let weight = |application: u8| [1.0, 3.0, 0.5][usize::from(application)];
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut times = DynamicTimes::new(BatchCost { fixed: Span::from_millis(3), per_task: 0.4 });
        for _ in 0..300 {
            for (application, mean) in [(0, 10.0), (1, 30.0), (2, 90.0)] {
                let spread: f64 = rng.random_range(0.5..1.5);
                times.handle_alone(application, 0, Span::from_millis_f64(3.0 + 0.4 * mean * spread));
            }
        }
        times.settle();
        let times = &times.batches(&times.classes(), &[4], |_| Span::ZERO).unwrap()[0];
        let mut queue = SizeQueue::of(4, at(0.0), &[], times);
        let mut waiting: BTreeMap<u32, Entry> = BTreeMap::new();
        for key in 0..3000 {
            let now = at(f64::from(key));
            let application = rng.random_range(0..3);
            let entry = Entry {
                key,
                deadline: now + Span::from_millis_f64(rng.random_range(20.0..600.0)),
                application,
                class: Class::of(application),
            };
            queue.insert(now, entry, times);
            waiting.insert(key, entry);
            if key % 500 == 250 {
                let entries: Vec<Entry> = waiting.values().copied().collect();
                queue = SizeQueue::of(4, now, &entries, times);
            }
            while let Some(gone) = queue.pop_expired(now) {
                let entry = waiting.remove(&gone).expect("it waited");
                assert!(now + times.of(entry.class).mean > entry.deadline);
            }
            assert!(waiting.values().all(|entry| now + times.of(entry.class).mean <= entry.deadline));
            let earliest = waiting.values().map(|entry| (entry.deadline, entry.key)).min();
            assert_eq!((queue.len(), queue.earliest()), (waiting.len(), earliest));
            let applications = |of: u8| waiting.values().filter(|entry| entry.application == of).count() as f64;
            let mean = (0..3).map(|of| weight(of) * applications(of)).sum::<f64>() / waiting.len() as f64;
            assert!(waiting.is_empty() || (queue.mean_weight(weight) - mean).abs() < 1e-9 * mean);
            if key % 9 == 0 && waiting.len() >= 4 {
                let score = |entry: &Entry| weight(entry.application) * naive_score(now, entry, times);
                let mut expected: Vec<f64> = waiting.values().map(score).collect();
                expected.sort_by(|one, other| other.total_cmp(one));
                let best = queue.best(now, times, CLOCK, weight);
                let mut found: Vec<f64> = best.iter().map(|key| score(&waiting[key])).collect();
                found.sort_by(|one, other| other.total_cmp(one));
                assert_eq!(found.len(), 4);
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() <= 1e-9 * expected.max(1.0), "{found} {expected} at {now:?}");
                }
                for key in best {
                    queue.remove(key);
                    waiting.remove(&key);
                }
            }
        }
    }
}
