//! When requests are sent: a process of random gaps, stretched by a rate that may change over time.

use std::{sync::Arc, time::Duration};

use rand_chacha::ChaCha8Rng;
use sim::{arrivals::Gaps, workload::ArrivalProcess};

/// When the requests of a stream are sent.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrivals {
    /// Open loop: requests leave at this rate, whatever the answers do.
    Open {
        /// How gaps differ from each other.
        process: ArrivalProcess,
        /// Their mean, over time.
        rate: Rate,
    },
    /// Closed loop: so many requests are always under way, and the next one leaves when one has been answered. Shows
    /// what a server can do, or what one request costs, and nothing about latency under load.
    Closed {
        /// Requests under way.
        requests: usize,
    },
}

impl Arrivals {
    /// Closed loop with one request.
    pub const ONE_AT_A_TIME: Self = Self::Closed { requests: 1 };

    /// When the last request may leave, in seconds after the start of the run; infinite if there is no last one.
    pub(crate) fn end_seconds(&self) -> f64 {
        match self {
            Self::Open { rate, .. } => rate.steps_rps.len() as f64 * rate.step_seconds,
            Self::Closed { .. } => f64::INFINITY,
        }
    }

    /// A Poisson process of this mean rate, in requests a second.
    #[must_use]
    pub fn poisson(rate_rps: f64) -> Self {
        Self::Open { process: ArrivalProcess::Poisson, rate: Rate::constant(rate_rps) }
    }
}

/// A rate over time, constant within each step. Nothing is sent after the last one.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    steps_rps: Arc<[f64]>,
    step_seconds: f64,
}

impl Rate {
    /// The same rate for ever, in requests a second; above 0.
    #[must_use]
    pub fn constant(rate_rps: f64) -> Self {
        Self { steps_rps: [rate_rps].into(), step_seconds: f64::INFINITY }
    }

    /// One rate after the other, in requests a second, each for `step_seconds`.
    #[must_use]
    pub fn steps(steps_rps: Vec<f64>, step_seconds: f64) -> Self {
        Self { steps_rps: steps_rps.into(), step_seconds }
    }

    /// The highest rate, in requests a second.
    #[must_use]
    pub fn max_rps(&self) -> f64 {
        self.steps_rps.iter().copied().fold(0.0, f64::max)
    }
}

/// The instants at which requests are sent, ascending, from the start of the run.
pub struct Instants {
    gaps: Gaps,
    rate: Rate,
    random: ChaCha8Rng,
    at_seconds: f64,
    step: usize,
}

impl Instants {
    /// Of this process, at this rate.
    #[must_use]
    pub fn new(process: ArrivalProcess, rate: Rate, random: ChaCha8Rng) -> Self {
        Self { gaps: Gaps::new(process), rate, random, at_seconds: 0.0, step: 0 }
    }
}

impl Iterator for Instants {
    type Item = Duration;

    /// A gap of the process counts in arrivals that the mean would have brought; the rate turns that into time.
    fn next(&mut self) -> Option<Duration> {
        let mut left = self.gaps.sample(&mut self.random);
        loop {
            let rps = *self.rate.steps_rps.get(self.step)?;
            let end = (self.step + 1) as f64 * self.rate.step_seconds;
            let room = (end - self.at_seconds) * rps;
            if left < room {
                self.at_seconds += left / rps;
                // Beyond what a duration holds is beyond every run.
                return Duration::try_from_secs_f64(self.at_seconds).ok();
            }
            left -= room;
            self.at_seconds = end;
            self.step += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;

    fn seconds(process: ArrivalProcess, rate: Rate, seed: u64, until: f64) -> Vec<f64> {
        let instants = Instants::new(process, rate, ChaCha8Rng::seed_from_u64(seed));
        instants.map(|at| at.as_secs_f64()).take_while(|at| *at < until).collect()
    }

    #[test]
    fn gaps_have_the_mean_and_the_variance_of_their_process() {
        // Gamma(k) gaps have a squared coefficient of variation of 1 / k.
        let gamma = |shape| ArrivalProcess::Gamma { shape };
        for (process, cv2) in
            [(ArrivalProcess::Poisson, 1.0), (ArrivalProcess::Uniform, 0.0), (gamma(4.0), 0.25), (gamma(0.2), 5.0)]
        {
            let at = seconds(process, Rate::constant(1000.0), 7, 200.0);
            let gaps: Vec<f64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean * 1000.0 - 1.0).abs() < 0.03, "{process:?}: mean {mean} s");
            assert!((variance / mean.powi(2) - cv2).abs() <= 0.1 * cv2 + 1e-6, "{process:?}: variance {variance}");
        }
    }

    #[test]
    fn equal_gaps_follow_the_recorded_steps_and_end_with_them() {
        // Half a request a second, silence, then two a second: the second half of a request comes in the third step.
        let at = seconds(ArrivalProcess::Uniform, Rate::steps(vec![0.5, 0.0, 2.0], 3.0), 1, f64::INFINITY);
        assert_eq!(at, [2.0, 6.25, 6.75, 7.25, 7.75, 8.25, 8.75]);
    }

    proptest! {
        /// The naive way: count what each step should have brought.
        #[test]
        fn each_step_gets_its_share(
            steps in proptest::collection::vec(0.0..2000.0f64, 1..6),
            step_seconds in 0.5..3.0f64,
            seed in any::<u64>(),
        ) {
            let at = seconds(ArrivalProcess::Poisson, Rate::steps(steps.clone(), step_seconds), seed, f64::INFINITY);
            prop_assert!(at.is_sorted());
            prop_assert!(at.iter().all(|at| *at <= step_seconds * steps.len() as f64));
            for (index, rps) in steps.into_iter().enumerate() {
                let (from, to) = (index as f64 * step_seconds, (index + 1) as f64 * step_seconds);
                let found = at.iter().filter(|at| (from..to).contains(at)).count() as f64;
                let expected = rps * step_seconds;
                // Six deviations of a Poisson distribution, and a little for the smallest.
                prop_assert!((found - expected).abs() <= 6.0 * expected.sqrt() + 6.0, "{found} of {expected}");
            }
        }
    }
}
