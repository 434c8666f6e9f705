//! What requests of a model take whose requests are unequal, as the scheduler has learned it (Orloj, section 3.2).

use wincode::{SchemaRead, SchemaWrite};

use crate::{ids::Application, profile::BatchCost, time::Span};

/// The quantiles that are told of times.
pub const QUANTILES: [f64; 3] = [0.5, 0.9, 0.99];
/// Workloads of a model that times are told of; more are not believed.
pub const APPLICATIONS_MAX: usize = 32;
/// Ranges of lengths of a model that times are told of; more are not believed.
pub const LENGTHS_MAX: usize = 16;

/// What requests took that ran alone, or would have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct AloneTimes {
    /// Requests that this is known of.
    pub samples: u32,
    /// By [`QUANTILES`].
    pub quantiles: [Span; QUANTILES.len()],
}

impl AloneTimes {
    /// Of these.
    #[must_use]
    pub fn of(mut samples: Vec<Span>) -> Self {
        samples.sort_unstable();
        let at = |quantile: f64| {
            let rank = (quantile * samples.len() as f64).ceil() as usize;
            samples.get(rank.saturating_sub(1)).copied().unwrap_or(Span::ZERO)
        };
        Self { samples: samples.len() as u32, quantiles: QUANTILES.map(at) }
    }
}

/// Of requests of a range of lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct LengthTimes {
    /// The least, in bytes of a task's input.
    pub shortest: u32,
    /// The greatest.
    pub longest: u32,
    /// What they took.
    pub times: AloneTimes,
}

/// Of one model's requests.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct RequestTimes {
    /// c0 and c1, as they are planned with.
    pub cost: BatchCost,
    /// By workload; `None`: of all that are not told apart. At most [`APPLICATIONS_MAX`].
    pub applications: Vec<(Option<Application>, AloneTimes)>,
    /// Shortest first. At most [`LENGTHS_MAX`]; none if the policy does not look at lengths.
    pub lengths: Vec<LengthTimes>,
}

impl RequestTimes {
    /// Whether it is within its bounds.
    #[must_use]
    pub fn is_bounded(&self) -> bool {
        self.applications.len() <= APPLICATIONS_MAX && self.lengths.len() <= LENGTHS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_samples() {
        assert_eq!(AloneTimes::of(Vec::new()), AloneTimes::default());
        let samples = (1..=200).rev().map(Span::from_millis).collect();
        let expected = [100, 180, 198].map(Span::from_millis);
        assert_eq!(AloneTimes::of(samples), AloneTimes { samples: 200, quantiles: expected });
        assert_eq!(AloneTimes::of(vec![Span(7)]).quantiles, [Span(7); 3]);
    }
}
