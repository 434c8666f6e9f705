//! What requests of an emulated model take where they are unequal, as those of dynamic models are (Orloj, section 3.2).
//! A request's time is drawn by the digest of its input: equal inputs take equally long, as with a real network, and
//! whoever knows an input knows its time.

use std::f64::consts::TAU;

use proto::{BatchCost, LatencyProfile, ProfileError, Span};

use super::{GOLDEN, OUTPUT_ELEMENTS, finish};

/// The longest time, of a request alone and of a batch: whatever is drawn, a GPU is free again after it.
pub const TIME_MAX: Span = Span::from_millis(60_000);

/// What requests take alone.
#[derive(Debug, Clone, PartialEq)]
pub enum Alone {
    /// One of these, each as likely as the others; at least one.
    Normals(Vec<Normal>),
    /// Log-normal.
    LogNormal {
        /// In milliseconds.
        median_ms: f64,
        /// The standard deviation of the logarithm.
        sigma: f64,
    },
    /// One of these, in milliseconds; at least one.
    Trace(Vec<f64>),
    /// What the length of its input says: milliseconds for each KiB.
    Length(f64),
}

/// A normal distribution, cut off at nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normal {
    /// In milliseconds.
    pub mean_ms: f64,
    /// The standard deviation in milliseconds.
    pub sigma_ms: f64,
}

/// A model whose requests take unequal times.
#[derive(Debug, Clone, PartialEq)]
pub struct UnequalTimes {
    /// What a batch takes, given what its tasks take alone.
    pub cost: BatchCost,
    /// What these take.
    pub alone: Alone,
}

impl UnequalTimes {
    /// What a request takes alone whose input has this [digest](super::digest) and so many bytes. Never less than c0.
    #[must_use]
    pub fn alone(&self, digest: [u64; OUTPUT_ELEMENTS], input_bytes: usize) -> Span {
        let drawn_ms = match &self.alone {
            Alone::Normals(modes) => {
                // Neither half alone: the number that both make must say nothing of the mode.
                let mode = finish(digest[0].wrapping_add(digest[1].rotate_left(32)).wrapping_add(GOLDEN));
                let Normal { mean_ms, sigma_ms } = *chosen(modes, mode);
                mean_ms + sigma_ms * normal(digest)
            }
            Alone::LogNormal { median_ms, sigma } => median_ms * (sigma * normal(digest)).exp(),
            Alone::Trace(times) => *chosen(times, digest[0]),
            Alone::Length(ms_per_kib) => by_length_ms(*ms_per_kib, input_bytes),
        };
        Span::from_millis_f64(drawn_ms).clamp(self.cost.fixed, TIME_MAX)
    }

    /// What a batch of so many tasks takes whose longest takes this alone: c0 + (1 + c1 (k - 1)) (longest - c0).
    #[must_use]
    pub fn batch(&self, tasks: usize, longest: Span) -> Span {
        let BatchCost { fixed, per_task_ppm } = self.cost;
        let per_task = f64::from(per_task_ppm) / f64::from(BatchCost::PER_TASK_MAX);
        let times = 1.0 + per_task * tasks.saturating_sub(1) as f64;
        let work = (longest - fixed).max(Span::ZERO);
        (fixed + Span((times * work.as_nanos() as f64).round() as i64)).min(TIME_MAX)
    }

    /// An l(b) for a model that has no other: what batches take whose longest task takes the mean of all, or, where
    /// lengths tell, what the longest input does.
    ///
    /// # Errors
    /// If it is no profile, as nothing takes any time.
    pub fn profile(&self, max_batch: usize, input_bytes_max: usize) -> Result<LatencyProfile, ProfileError> {
        let mean_of = |times: &mut dyn ExactSizeIterator<Item = f64>| {
            let count = times.len() as f64;
            times.sum::<f64>() / count
        };
        let mean_ms = match &self.alone {
            Alone::Normals(modes) => mean_of(&mut modes.iter().map(|mode| mode.mean_ms)),
            Alone::LogNormal { median_ms, sigma } => median_ms * (sigma * sigma / 2.0).exp(),
            Alone::Trace(times) => mean_of(&mut times.iter().copied()),
            Alone::Length(ms_per_kib) => by_length_ms(*ms_per_kib, input_bytes_max),
        };
        let mean = Span::from_millis_f64(mean_ms).clamp(self.cost.fixed, TIME_MAX);
        LatencyProfile::from_table((1..=max_batch).map(|batch| self.batch(batch, mean)).collect())
    }
}

fn by_length_ms(ms_per_kib: f64, input_bytes: usize) -> f64 {
    ms_per_kib * input_bytes as f64 / 1024.0
}

/// One of these, each for as many hashes as the others.
fn chosen<T>(of: &[T], hash: u64) -> &T {
    &of[((u128::from(hash) * of.len() as u128) >> 64) as usize]
}

/// A standard normal number of two hashes (Box and Muller).
fn normal([first, second]: [u64; OUTPUT_ELEMENTS]) -> f64 {
    // Between 0 and 1, and neither.
    let uniform = |hash: u64| ((hash >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    (-2.0 * uniform(first).ln()).sqrt() * (TAU * uniform(second)).cos()
}

#[cfg(test)]
mod tests {
    use super::{super::digest, *};

    const COST: BatchCost = BatchCost { fixed: Span::from_millis(2), per_task_ppm: 250_000 };

    /// What many requests take alone, in milliseconds.
    fn drawn(alone: Alone) -> Vec<f64> {
        let times = UnequalTimes { cost: COST, alone };
        let of = |request: u32| times.alone(digest(&request.to_le_bytes()), 4).as_millis_f64();
        (0..40_000).map(of).collect()
    }

    fn mean_and_sigma(times: &[f64]) -> (f64, f64) {
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let squares = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>();
        (mean, (squares / times.len() as f64).sqrt())
    }

    fn assert_near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 0.03, "found {found}, expected {expected}");
    }

    #[test]
    fn a_batch_takes_what_its_longest_does_and_a_part_of_that_for_each_further_task() {
        let times = UnequalTimes { cost: COST, alone: Alone::Trace(vec![10.0]) };
        assert_eq!(times.batch(1, Span::from_millis(10)), Span::from_millis(10));
        assert_eq!(times.batch(5, Span::from_millis(10)), Span::from_millis(18));
        assert_eq!(times.batch(5, Span::from_millis(1)), Span::from_millis(2), "less than c0 is c0");
        assert_eq!(times.batch(256, TIME_MAX), TIME_MAX);
    }

    #[test]
    fn what_is_drawn_has_the_distribution_that_was_asked_for() {
        let (mean, sigma) = mean_and_sigma(&drawn(Alone::Normals(vec![Normal { mean_ms: 50.0, sigma_ms: 5.0 }])));
        assert_near(mean, 50.0);
        assert_near(sigma, 5.0);

        let logarithms: Vec<f64> =
            drawn(Alone::LogNormal { median_ms: 50.0, sigma: 0.5 }).into_iter().map(f64::ln).collect();
        let (mean, sigma) = mean_and_sigma(&logarithms);
        assert_near(mean, 50f64.ln());
        assert_near(sigma, 0.5);

        let trace = drawn(Alone::Trace(vec![10.0, 20.0, 60.0]));
        assert_near(mean_and_sigma(&trace).0, 30.0);
        assert!(trace.iter().all(|time| [10.0, 20.0, 60.0].contains(time)));
    }

    #[test]
    fn modes_are_equally_likely_and_what_they_draw_does_not_depend_on_which() {
        let modes = [20.0, 100.0].map(|mean_ms| Normal { mean_ms, sigma_ms: 3.0 });
        let (low, high): (Vec<f64>, Vec<f64>) =
            drawn(Alone::Normals(modes.to_vec())).into_iter().partition(|time| *time < 60.0);
        assert_near(low.len() as f64, high.len() as f64);
        for (times, expected) in [(low, 20.0), (high, 100.0)] {
            let (mean, sigma) = mean_and_sigma(&times);
            assert_near(mean, expected);
            assert_near(sigma, 3.0);
        }
    }

    #[test]
    fn a_time_lies_between_the_cost_of_any_batch_and_the_longest() {
        let times = drawn(Alone::Normals(vec![Normal { mean_ms: 1.0, sigma_ms: 60_000.0 }]));
        assert!(times.iter().all(|time| (2.0..=60_000.0).contains(time)));
        assert!(times.contains(&2.0) && times.contains(&60_000.0));
        let extremes = [[0, 0], [u64::MAX; 2], [0, u64::MAX], [u64::MAX, 0]].map(normal);
        assert!(extremes.iter().all(|number| number.abs() < 9.0), "{extremes:?}");
    }

    #[test]
    fn the_mean_gives_l_of_b_where_nothing_else_does() {
        let profile = |alone| UnequalTimes { cost: COST, alone }.profile(5, 2_048).unwrap();
        let mean_of_10 = LatencyProfile::linear(2.0, 8.0, 5).unwrap();
        let modes = [4.0, 16.0].map(|mean_ms| Normal { mean_ms, sigma_ms: 1.0 });
        assert_eq!(profile(Alone::Normals(modes.to_vec())), mean_of_10);
        assert_eq!(profile(Alone::Trace(vec![5.0, 15.0])), mean_of_10);
        assert_eq!(profile(Alone::Length(5.0)), mean_of_10, "the longest input has 2 KiB");
        let log_normal = profile(Alone::LogNormal { median_ms: 10.0, sigma: 1.0 });
        assert_near(log_normal.latency(1).as_millis_f64(), 10.0 * 0.5f64.exp());
    }
}
