//! Latency profiles l(b): how long a batch of b tasks takes on a GPU (Symphony, section 2; Clockwork, section 3).

use thiserror::Error;
use wincode::{SchemaRead, SchemaWrite};

use crate::time::Span;

/// l(b) for b = 1 ..= `max_batch`, in nanoseconds, never decreasing in b.
///
/// Both forms of a workload file (a table, or `alpha * b + beta`) become a table, so a look-up is one load.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct LatencyProfile {
    /// `table[b - 1]` is l(b).
    table: Vec<Span>,
}

/// What a batch of unequal tasks takes: all are padded to the longest (Orloj, equation 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct BatchCost {
    /// c0: in any case.
    pub fixed: Span,
    /// c1: what each further task adds, in millionths of the longest one's work; 1 to [`Self::PER_TASK_MAX`].
    pub per_task_ppm: u32,
}

impl BatchCost {
    /// Each task takes as much as the longest.
    pub const PER_TASK_MAX: u32 = 1_000_000;

    /// What neither exceeds.
    #[must_use]
    pub fn slowest(self, other: Self) -> Self {
        Self { fixed: self.fixed.max(other.fixed), per_task_ppm: self.per_task_ppm.max(other.per_task_ppm) }
    }
}

/// Why a latency profile was refused.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ProfileError {
    /// The table is empty.
    #[error("a latency profile needs at least l(1), found an empty table")]
    Empty,
    /// More batch sizes than any queue holds.
    #[error("a latency profile holds at most {max} batch sizes, found {found}", max = LatencyProfile::MAX_BATCH)]
    TooLong {
        /// Batch sizes given.
        found: usize,
    },
    /// l(b) is not a positive, finite time.
    #[error("l({batch}) must be above 0 ms and finite, found {found_ms} ms")]
    NotPositive {
        /// The batch size.
        batch: usize,
        /// What was given for it.
        found_ms: f64,
    },
    /// l(b) is below l(b - 1).
    #[error("l(b) must not decrease: l({batch}) is {found}, below l({}) = {previous}", batch - 1)]
    Decreasing {
        /// The batch size.
        batch: usize,
        /// What was given for it.
        found: Span,
        /// What was given for one less.
        previous: Span,
    },
}

impl LatencyProfile {
    /// The largest batch that any profile describes. A batch plan of this size fits one control message
    /// (asserted in `scheduler_to_backend`).
    pub const MAX_BATCH: usize = 256;

    /// A profile from l(1), l(2), ...
    ///
    /// # Errors
    /// If the table is empty, longer than [`Self::MAX_BATCH`], holds a value that is not positive, or decreases.
    pub fn from_table(table: Vec<Span>) -> Result<Self, ProfileError> {
        if table.is_empty() {
            return Err(ProfileError::Empty);
        }
        if table.len() > Self::MAX_BATCH {
            return Err(ProfileError::TooLong { found: table.len() });
        }
        let mut previous = Span::ZERO;
        for (index, &latency) in table.iter().enumerate() {
            if latency <= Span::ZERO || latency == Span(i64::MAX) {
                return Err(ProfileError::NotPositive { batch: index + 1, found_ms: latency.as_millis_f64() });
            }
            if latency < previous {
                return Err(ProfileError::Decreasing { batch: index + 1, found: latency, previous });
            }
            previous = latency;
        }
        Ok(Self { table })
    }

    /// A profile l(b) = `alpha_ms` * b + `beta_ms` for b up to `max_batch`.
    ///
    /// # Errors
    /// As [`Self::from_table`]; a negative or non-finite `alpha_ms` or `beta_ms` shows as such an l(b).
    pub fn linear(alpha_ms: f64, beta_ms: f64, max_batch: usize) -> Result<Self, ProfileError> {
        if max_batch > Self::MAX_BATCH {
            return Err(ProfileError::TooLong { found: max_batch });
        }
        let latency_ms = |batch: usize| alpha_ms * batch as f64 + beta_ms;
        if let Some(batch) = (1..=max_batch).find(|&b| !latency_ms(b).is_finite()) {
            return Err(ProfileError::NotPositive { batch, found_ms: latency_ms(batch) });
        }
        Self::from_table((1..=max_batch).map(|batch| Span::from_millis_f64(latency_ms(batch))).collect())
    }

    /// Checks a profile that came off the wire: decoding alone does not run the constructor.
    ///
    /// # Errors
    /// As [`Self::from_table`].
    pub fn validated(self) -> Result<Self, ProfileError> {
        Self::from_table(self.table)
    }

    /// This profile times a factor above 0: nothing becomes shorter than 1 ns.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        let scale = |latency: &Span| Span(((latency.as_nanos() as f64 * factor).round() as i64).clamp(1, i64::MAX - 1));
        Self { table: self.table.iter().map(scale).collect() }
    }

    /// The slower of two profiles at every batch size that both have.
    #[must_use]
    pub fn slowest(&self, other: &Self) -> Self {
        Self { table: self.table.iter().zip(&other.table).map(|(&one, &other)| one.max(other)).collect() }
    }

    /// Without the batches that are larger than `max_batch`, which is at least 1.
    #[must_use]
    pub fn up_to(&self, max_batch: usize) -> Self {
        debug_assert!(max_batch > 0, "a profile has an l(1)");
        Self { table: self.table[..max_batch.min(self.table.len())].to_vec() }
    }

    /// Whether two profiles have the same batch sizes and neither is longer than the other by more than the part
    /// `tolerance` at any of them.
    #[must_use]
    pub fn is_near(&self, other: &Self, tolerance: f64) -> bool {
        let is_near = |(one, other): (&Span, &Span)| {
            let (one, other) = (one.as_nanos() as f64, other.as_nanos() as f64);
            one <= other * (1.0 + tolerance) && other <= one * (1.0 + tolerance)
        };
        self.table.len() == other.table.len() && self.table.iter().zip(&other.table).all(is_near)
    }

    /// l(b).
    ///
    /// # Panics
    /// If `batch` is 0 or above [`Self::max_batch`].
    #[must_use]
    pub fn latency(&self, batch: usize) -> Span {
        self.table[batch - 1]
    }

    /// How much the model gains by time for larger batches: the geometric mean of what a task adds to a batch (alpha)
    /// and what a batch takes besides (beta), by the line from l(1) to the largest batch. A request that has the time s
    /// costs its GPU `alpha + alpha beta / (s - beta)`, as the largest batch within s has `(s - beta) / alpha` tasks;
    /// of several models with a sum of s, all gain alike by more where each `s - beta` is in proportion to this.
    #[must_use]
    pub fn batching(&self) -> Span {
        let (one, largest) = (self.latency(1).as_nanos() as f64, self.latency(self.max_batch()).as_nanos() as f64);
        let alpha = if self.max_batch() == 1 { one } else { (largest - one) / (self.max_batch() - 1) as f64 };
        Span((alpha * (one - alpha).max(0.0)).sqrt().round() as i64)
    }

    /// The largest batch that the model accepts.
    #[must_use]
    pub fn max_batch(&self) -> usize {
        self.table.len()
    }

    /// The largest b with l(b) <= `within`; 0 if even one task takes longer.
    #[must_use]
    pub fn largest_batch_within(&self, within: Span) -> usize {
        self.table.partition_point(|&latency| latency <= within)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_2_of_the_paper() {
        let resnet50 = LatencyProfile::linear(1.053, 5.072, 64).unwrap();
        assert_eq!(resnet50.latency(1), Span(6_125_000));
        assert_eq!(resnet50.largest_batch_within(Span::from_millis(25)), 18);
        assert_eq!(resnet50.largest_batch_within(Span::from_millis(6)), 0);
        assert_eq!(resnet50.largest_batch_within(Span(i64::MAX)), 64);
    }

    #[test]
    fn what_batches_gain() {
        let batching = |alpha, beta, max| LatencyProfile::linear(alpha, beta, max).unwrap().batching().as_millis_f64();
        assert!((batching(2.0, 8.0, 32) - 4.0).abs() < 1e-6);
        assert_eq!((batching(2.0, 0.0, 32), batching(0.0, 8.0, 32), batching(2.0, 8.0, 1)), (0.0, 0.0, 0.0));
    }

    #[test]
    fn bad_profiles_say_what_is_wrong() {
        assert_eq!(LatencyProfile::from_table(vec![]), Err(ProfileError::Empty));
        let decreasing = LatencyProfile::linear(-0.5, 5.0, 4).unwrap_err();
        assert_eq!(decreasing.to_string(), "l(b) must not decrease: l(2) is 4.000 ms, below l(1) = 4.500 ms");
        let negative = LatencyProfile::linear(1.0, -5.0, 4).unwrap_err();
        assert_eq!(negative.to_string(), "l(1) must be above 0 ms and finite, found -4 ms");
        assert!(LatencyProfile::linear(f64::NAN, 0.0, 4).is_err());
    }
}
