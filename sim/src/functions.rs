//! Rates that change by the minute, of many functions that each ask for one model: a synthetic trace with the published
//! statistics of Azure Functions, or a file in that data set's format.
//!
//! The synthetic trace is not the one that Clockwork's section 6.4 replays. Its functions' mean rates are log-normal,
//! such that 45 % of functions are invoked at most once an hour and 81 % at most once a minute (Shahrad et al., ATC
//! 2020, Figure 5), and cut off at three standard deviations, which gives about Clockwork's 4,860 requests a second for
//! its 17,000 functions. Every fifth one is a timer, with all its invocations in the first minute of its period; the
//! rest go up and down with the hour, and by chance each minute.

use std::f64::consts::TAU;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Functions that a workload may have.
pub const FUNCTIONS_MAX: usize = 1_000_000;

/// Mean and standard deviation of the decimal logarithm of a function's invocations a minute.
const MINUTE_RATES: (f64, f64) = (-1.555, 1.771);
/// Rates are cut off at so many standard deviations.
const DEVIATIONS_MAX: f64 = 3.0;
/// One function of so many is a timer.
const TIMERS: u32 = 5;
/// Periods of timers in minutes.
const PERIODS: [u64; 4] = [5, 15, 30, 60];
/// How much rates go up and down with the hour, as a part of their mean.
const TIDE: f64 = 0.25;
/// Standard deviation of the natural logarithm of what a minute makes of a rate.
const MINUTE_NOISE: f64 = 0.5;

/// Requests of each model in each minute, as parts of all requests of an average minute.
#[derive(Debug, Clone, PartialEq)]
pub struct MinuteShares {
    /// By model, then by minute; what comes after the last minute is as the first again.
    shares: Vec<Vec<f32>>,
}

impl MinuteShares {
    /// A synthetic trace of so many functions and minutes, drawn from a seed.
    #[must_use]
    pub fn synthetic(functions: usize, minutes: usize, assignment: &Assignment) -> Self {
        let of_function = |function| {
            let mut rng = ChaCha8Rng::seed_from_u64(assignment.seed);
            rng.set_stream(function as u64);
            function_rates(minutes, &mut rng)
        };
        Self::new((0..functions).map(of_function).collect(), assignment)
    }

    /// A trace in the format of Azure Functions' data set: one line for each function, whose columns named 1, 2, ...
    /// are its invocations in each minute.
    ///
    /// # Errors
    /// Of the line, what was found and expected.
    pub fn parse(text: &str, assignment: &Assignment) -> Result<Self, String> {
        let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let (_, header) = lines.next().ok_or("expected a header, found nothing")?;
        let first = header.split(',').position(|column| column.trim() == "1");
        let first = first.ok_or_else(|| format!("expected columns 1, 2, ... in the header, found `{header}`"))?;
        let mut functions = Vec::new();
        for (number, line) in lines {
            if functions.len() == FUNCTIONS_MAX {
                return Err(format!("expected at most {FUNCTIONS_MAX} functions"));
            }
            let counts = line.split(',').skip(first).map(|cell| {
                let count: f32 = cell.trim().parse().unwrap_or(f32::NAN);
                let problem = || format!("line {number}: expected a number of invocations, found {cell:?}");
                if (0.0..=1e9).contains(&count) { Ok(count) } else { Err(problem()) }
            });
            functions.push(counts.collect::<Result<Vec<f32>, _>>()?);
        }
        let shares = Self::new(functions, assignment);
        if shares.shares.iter().flatten().all(|&share| share == 0.0) {
            return Err("expected at least one invocation, found none".to_owned());
        }
        Ok(shares)
    }

    fn new(functions: Vec<Vec<f32>>, assignment: &Assignment) -> Self {
        let mut shares = vec![Vec::new(); assignment.models.len()];
        for (model, rates) in assignment.deal(&functions).into_iter().zip(functions) {
            let sums: &mut Vec<f32> = &mut shares[model];
            sums.resize(sums.len().max(rates.len()), 0.0);
            sums.iter_mut().zip(&rates).for_each(|(sum, rate)| *sum += rate);
        }
        let minutes = shares.iter().map(Vec::len).max().unwrap_or(0).max(1);
        shares.iter_mut().for_each(|sums| sums.resize(minutes, 0.0));
        let all: f64 = shares.iter().flatten().map(|&share| f64::from(share)).sum();
        let scale = minutes as f64 / all.max(f64::MIN_POSITIVE);
        shares.iter_mut().flatten().for_each(|share| *share = (f64::from(*share) * scale) as f32);
        Self { shares }
    }

    /// A model's part of an average minute's requests, in this minute.
    #[must_use]
    pub fn share(&self, model: usize, minute: usize) -> f64 {
        let minutes = &self.shares[model];
        f64::from(minutes[minute % minutes.len()])
    }

    /// A model's part of all requests.
    #[must_use]
    pub fn mean_share(&self, model: usize) -> f64 {
        let minutes = &self.shares[model];
        minutes.iter().map(|&share| f64::from(share)).sum::<f64>() / minutes.len() as f64
    }
}

/// Which model each function asks for; each model is asked for by as many as every other. The paper does not say, and
/// it decides how many GPUs a trace needs.
#[derive(Debug, Clone)]
pub struct Assignment {
    /// The models, the cheapest first.
    pub models: Vec<usize>,
    /// Those that are invoked most ask for the cheapest; otherwise chance decides.
    pub is_lucky: bool,
    /// Of all that is drawn.
    pub seed: u64,
}

impl Assignment {
    /// By function.
    fn deal(&self, functions: &[Vec<f32>]) -> Vec<usize> {
        let (models, count) = (&self.models, functions.len());
        if self.is_lucky {
            let invocations: Vec<f64> =
                functions.iter().map(|rates| rates.iter().map(|&rate| f64::from(rate)).sum()).collect();
            let mut busiest: Vec<usize> = (0..count).collect();
            busiest.sort_by(|&one, &other| invocations[other].total_cmp(&invocations[one]));
            let mut dealt = vec![0; count];
            for (rank, function) in busiest.into_iter().enumerate() {
                dealt[function] = models[rank * models.len() / count];
            }
            return dealt;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(u64::MAX);
        let mut dealt: Vec<usize> = (0..count).map(|function| models[function % models.len()]).collect();
        for last in (1..count).rev() {
            dealt.swap(last, rng.random_range(0..=last));
        }
        dealt
    }
}

/// Of one function.
fn function_rates(minutes: usize, rng: &mut impl Rng) -> Vec<f32> {
    let deviation = loop {
        let drawn: f64 = StandardNormal.sample(rng);
        if drawn <= DEVIATIONS_MAX {
            break drawn;
        }
    };
    let mean = 10f64.powf(MINUTE_RATES.0 + MINUTE_RATES.1 * deviation);
    if rng.random_range(0..TIMERS) == 0 {
        let period = PERIODS[rng.random_range(0..PERIODS.len())];
        let phase = rng.random_range(0..period);
        let rate = |minute: u64| if minute % period == phase { mean * period as f64 } else { 0.0 };
        return (0..minutes as u64).map(|minute| rate(minute) as f32).collect();
    }
    let phase = rng.random_range(0.0..TAU);
    let rate = |minute: usize| {
        let tide = 1.0 + TIDE * (TAU * minute as f64 / 60.0 + phase).sin();
        let noise: f64 = StandardNormal.sample(rng);
        mean * tide * (MINUTE_NOISE * noise - MINUTE_NOISE.powi(2) / 2.0).exp()
    };
    (0..minutes).map(rate).map(|rate| rate as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_the_published_statistics() {
        let functions = 17_000;
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let means: Vec<f64> = (0..functions)
            .map(|_| function_rates(60, &mut rng).iter().map(|&rate| f64::from(rate)).sum::<f64>() / 60.0)
            .collect();
        let part = |most: f64| means.iter().filter(|&&mean| mean <= most).count() as f64 / functions as f64;
        assert!((part(1.0 / 60.0) - 0.45).abs() < 0.02, "{}", part(1.0 / 60.0));
        assert!((part(1.0) - 0.81).abs() < 0.02, "{}", part(1.0));
        let rate_rps = means.iter().sum::<f64>() / 60.0;
        assert!((4_000.0..5_500.0).contains(&rate_rps), "{rate_rps}");
    }

    #[test]
    fn shares_are_of_an_average_minute_and_one_seed_gives_one_trace() {
        let assignment = |seed| Assignment { models: (0..40).collect(), is_lucky: false, seed };
        let trace = MinuteShares::synthetic(170, 30, &assignment(7));
        let all: f64 = (0..40).map(|model| trace.mean_share(model)).sum();
        assert!((all - 1.0).abs() < 1e-5, "{all}");
        assert_eq!(trace, MinuteShares::synthetic(170, 30, &assignment(7)));
        assert_ne!(trace, MinuteShares::synthetic(170, 30, &assignment(8)));
        assert_eq!(trace.share(3, 31), trace.share(3, 1));
        let lucky = MinuteShares::synthetic(170, 30, &Assignment { is_lucky: true, ..assignment(7) });
        let of = |models: std::ops::Range<usize>| models.map(|model| lucky.mean_share(model)).sum::<f64>();
        assert!(of(0..10) > of(10..20) && of(10..20) > of(20..40));
    }

    #[test]
    fn a_file_is_read_as_the_data_set_writes_it() {
        let text = "HashOwner,HashApp,HashFunction,Trigger,1,2\na,b,c,http,3,0\nd,e,f,timer,0,1\n";
        let assignment = Assignment { models: vec![0], is_lucky: false, seed: 0 };
        let trace = MinuteShares::parse(text, &assignment).unwrap();
        assert_eq!((trace.share(0, 0), trace.share(0, 1)), (1.5, 0.5));
        let error = |text: &str| MinuteShares::parse(text, &assignment).unwrap_err();
        assert_eq!(error(""), "expected a header, found nothing");
        assert_eq!(error("a,b\n"), "expected columns 1, 2, ... in the header, found `a,b`");
        assert_eq!(error("a,1\nx,-3\n"), "line 2: expected a number of invocations, found \"-3\"");
        assert_eq!(error("a,1\nx,0\n"), "expected at least one invocation, found none");
    }
}
