//! Models whose requests take unequal times: the workload's keys `cost` and `applications`.

use std::{fs, path::Path};

use proto::{LatencyProfile, Span};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use scheduler::dynamic::{APPLICATIONS_MAX, BatchCost, largest_of};

/// Requests whose times stand for those of all: for percentiles and l(b).
const SAMPLES: usize = 20_000;
/// Seeds them; they are the same in every run.
const SAMPLES_SEED: u64 = 19;
/// Times that a trace may have.
const TRACE_MAX: usize = 1_000_000;
/// What requests' lengths are measured in hardly matters: so many bytes for a second of work.
const BYTES_A_SECOND: f64 = 1e6;
/// The shortest time of a request alone, above the batch's own cost.
const WORK_MIN: Span = Span::from_micros(1);

/// A dynamic model.
#[derive(Debug, Clone, PartialEq)]
pub struct Dynamic {
    /// What a batch takes.
    pub cost: BatchCost,
    /// Its requests' times alone, by class.
    pub applications: Vec<Times>,
    /// If requests are as long as they take, so that it shows before they run: the standard deviation of the logarithm
    /// of their lengths for one time.
    pub length_sigma: Option<f64>,
}

/// What requests of an application take alone.
#[derive(Debug, Clone, PartialEq)]
pub enum Times {
    /// Normal, in milliseconds, cut off at what a batch costs in any case.
    Normal {
        /// Mean.
        mean_ms: f64,
        /// Standard deviation.
        std_ms: f64,
    },
    /// Log-normal.
    LogNormal {
        /// Median in milliseconds.
        median_ms: f64,
        /// Standard deviation of its logarithm.
        sigma: f64,
    },
    /// One of these, in milliseconds.
    Trace(Vec<f64>),
}

impl Times {
    /// One request's.
    pub fn sample(&self, random: &mut impl Rng) -> Span {
        let normal = |random: &mut _| -> f64 { StandardNormal.sample(random) };
        Span::from_millis_f64(match self {
            Self::Normal { mean_ms, std_ms } => (mean_ms + std_ms * normal(random)).max(0.0),
            Self::LogNormal { median_ms, sigma } => median_ms * (sigma * normal(random)).exp(),
            Self::Trace(times) => times[random.random_range(0..times.len())],
        })
    }
}

impl Dynamic {
    /// A request's work, as it rides along with it.
    pub fn sample(&self, class: usize, random: &mut impl Rng) -> Span {
        self.cost.work(self.applications[class].sample(random)).max(WORK_MIN)
    }

    /// The length of a request of so much work, in bytes; 0 if lengths say nothing.
    pub fn length(&self, work: Span, random: &mut impl Rng) -> u32 {
        let Some(sigma) = self.length_sigma else { return 0 };
        let normal: f64 = StandardNormal.sample(random);
        (work.as_secs_f64() * BYTES_A_SECOND * (sigma * normal).exp()).clamp(1.0, f64::from(u32::MAX)) as u32
    }

    /// What a request of so much work takes alone.
    #[must_use]
    pub fn alone(&self, work: Span) -> Span {
        self.cost.latency(1, work)
    }

    /// Works of many requests, of applications in proportion to their shares; ascending.
    #[must_use]
    pub fn works(&self, shares: impl Iterator<Item = f64>) -> Vec<Span> {
        let mut random = ChaCha8Rng::seed_from_u64(SAMPLES_SEED);
        let of_application = |(class, share): (usize, f64)| {
            let count = (share * SAMPLES as f64).ceil() as usize;
            (0..count).map(|_| self.sample(class, &mut random)).collect::<Vec<_>>()
        };
        let mut works: Vec<Span> = shares.enumerate().flat_map(of_application).collect();
        works.sort_unstable();
        works
    }

    /// The mean of what batches of random requests take, as somebody who measures them would find it.
    ///
    /// # Errors
    /// If it is no profile.
    pub fn profile(&self, works: &[Span], max_batch: usize) -> Result<LatencyProfile, proto::ProfileError> {
        let mean = |batch| self.cost.latency(batch, largest_of(works, batch));
        LatencyProfile::from_table((1..=max_batch).map(mean).collect())
    }
}

/// As they are written in a workload.
pub(crate) mod raw {
    use serde::Deserialize;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Cost {
        pub fixed_ms: f64,
        pub per_task: f64,
        pub length_sigma: Option<f64>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(crate) struct Application {
        pub share: Option<f64>,
        pub mean_ms: Option<f64>,
        pub std_ms: Option<f64>,
        pub median_ms: Option<f64>,
        pub sigma: Option<f64>,
        pub trace: Option<String>,
    }
}

/// Why an application was refused: its key, and what was found and expected.
pub(crate) type Refusal = (&'static str, String);

fn within(key: &'static str, found: f64, min: f64, max: f64) -> Result<f64, Refusal> {
    if (min..=max).contains(&found) {
        return Ok(found);
    }
    Err((key, format!("expected a number from {min} to {max}, found {found}")))
}

/// Longest time of a request alone, in milliseconds: an hour.
const TIME_MAX_MS: f64 = 3_600_000.0;

/// Checks a dynamic model's keys; traces are looked for in `directory`. Yields the shares of its applications, too.
pub(crate) fn check(
    cost: &raw::Cost,
    applications: &[raw::Application],
    directory: &Path,
) -> Result<(Dynamic, Vec<f64>), Refusal> {
    let fixed_ms = within("cost.fixed_ms", cost.fixed_ms, 0.0, TIME_MAX_MS)?;
    let per_task = within("cost.per_task", cost.per_task, 1e-6, 1.0)?;
    if !(1..=APPLICATIONS_MAX).contains(&applications.len()) {
        return Err(("applications", format!("expected 1 to {APPLICATIONS_MAX}, found {}", applications.len())));
    }
    let shares: Vec<f64> = applications
        .iter()
        .map(|raw| within("applications.share", raw.share.unwrap_or(1.0), 1e-9, 1e9))
        .collect::<Result<_, _>>()?;
    let sum: f64 = shares.iter().sum();
    let times = applications.iter().map(|raw| times(raw, directory)).collect::<Result<_, _>>()?;
    let length_sigma = cost.length_sigma.map(|sigma| within("cost.length_sigma", sigma, 0.0, 3.0)).transpose()?;
    let cost = BatchCost { fixed: Span::from_millis_f64(fixed_ms), per_task };
    Ok((Dynamic { cost, applications: times, length_sigma }, shares.into_iter().map(|share| share / sum).collect()))
}

fn times(raw: &raw::Application, directory: &Path) -> Result<Times, Refusal> {
    match (raw.mean_ms, raw.std_ms, raw.median_ms, raw.sigma, &raw.trace) {
        (Some(mean_ms), Some(std_ms), None, None, None) => Ok(Times::Normal {
            mean_ms: within("applications.mean_ms", mean_ms, 1e-3, TIME_MAX_MS)?,
            std_ms: within("applications.std_ms", std_ms, 0.0, TIME_MAX_MS)?,
        }),
        (None, None, Some(median_ms), Some(sigma), None) => Ok(Times::LogNormal {
            median_ms: within("applications.median_ms", median_ms, 1e-3, TIME_MAX_MS)?,
            sigma: within("applications.sigma", sigma, 0.0, 3.0)?,
        }),
        (None, None, None, None, Some(file)) => {
            let path = directory.join(file);
            let text = fs::read_to_string(&path)
                .map_err(|error| ("applications.trace", format!("cannot read {}: {error}", path.display())))?;
            trace(file, &text).map(Times::Trace)
        }
        _ => Err(("applications", "expected mean_ms and std_ms, median_ms and sigma, or trace".to_owned())),
    }
}

/// One time in milliseconds a line.
fn trace(file: &str, text: &str) -> Result<Vec<f64>, Refusal> {
    let mut times = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        match line.trim().parse::<f64>() {
            Ok(time) if time > 0.0 && time <= TIME_MAX_MS => times.push(time),
            _ => {
                let problem =
                    format!("{file}, line {number}: expected milliseconds above 0 and at most {TIME_MAX_MS}, found ");
                return Err(("applications.trace", problem + &format!("{:?}", line.trim())));
            }
        }
        if times.len() > TRACE_MAX {
            return Err(("applications.trace", format!("{file}: expected at most {TRACE_MAX} times, found more")));
        }
    }
    if times.is_empty() {
        return Err(("applications.trace", format!("{file}: expected a time in milliseconds a line, found none")));
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: BatchCost = BatchCost { fixed: Span::from_millis(5), per_task: 0.5 };

    #[test]
    fn applications_take_what_they_say_and_a_batch_what_its_longest_does() {
        let applications = vec![
            Times::Normal { mean_ms: 10.0, std_ms: 1.0 },
            Times::LogNormal { median_ms: 100.0, sigma: 0.5 },
            Times::Trace(vec![7.0]),
        ];
        let model = Dynamic { cost: COST, applications, length_sigma: None };
        let works = model.works([0.5, 0.25, 0.25].into_iter());
        assert!(works.is_sorted() && works.len() == SAMPLES);
        let alone: Vec<f64> = works.iter().map(|&work| model.alone(work).as_millis_f64()).collect();
        let mean = alone.iter().sum::<f64>() / alone.len() as f64;
        // A log-normal's mean is its median times e^(sigma^2 / 2).
        let expected = 0.5 * 10.0 + 0.25 * 100.0 * (0.125f64).exp() + 0.25 * 7.0;
        assert!((mean / expected - 1.0).abs() < 0.02, "{mean} {expected}");
        let profile = model.profile(&works, 64).unwrap();
        assert!((profile.latency(1).as_millis_f64() - mean).abs() < 0.01);
        let longest = model.cost.latency(64, *works.last().unwrap());
        assert!(profile.latency(64) > model.cost.latency(64, Span::from_millis(200)) && profile.latency(64) < longest);
    }

    #[test]
    fn traces_are_milliseconds() {
        assert_eq!(trace("t", "1.5\n\n2\n").unwrap(), [1.5, 2.0]);
        for (text, expected) in [
            ("", "t: expected a time in milliseconds a line, found none"),
            ("1\nNaN\n", "t, line 2: expected milliseconds above 0 and at most 3600000, found \"NaN\""),
            ("-1", "t, line 1: expected milliseconds above 0 and at most 3600000, found \"-1\""),
        ] {
            assert_eq!(trace("t", text), Err(("applications.trace", expected.to_owned())));
        }
    }
}
