//! Whether actions took as long as was planned, and ended when that was planned (Clockwork, section 6.5 and Figure 9).
//!
//! An error is an over-prediction if the action was faster, or ended earlier, and an under-prediction otherwise: the
//! first leaves GPUs idle, the second makes what follows late. Both are counted in buckets that are an eighth as wide
//! as what they hold, so a run of any length takes the same few kilobytes, and what several threads have counted adds
//! up.

use proto::{
    Span, Timestamp,
    predictions::{self, ActionErrors, ErrorHistogram, ErrorSides, PredictionErrors},
};

/// Each power of two is cut into so many buckets, in bits.
const BUCKET_BITS: u32 = 3;
/// Longer errors count as so long: 2^32 us, more than an hour.
const MICROS_MAX: u64 = u32::MAX as u64;
/// Buckets of one sign.
const BUCKETS: usize = bucket(MICROS_MAX) + 1;

/// What an action does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Executes a batch.
    Infer,
    /// Copies weights into a GPU's memory.
    Load,
}

/// What was planned of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Predicted {
    /// How long it takes.
    pub duration: Span,
    /// When it ends, if all before it do as planned.
    pub ends_at: Timestamp,
}

/// Errors of all actions so far.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Predictions {
    infer: Errors,
    load: Errors,
}

/// Of one kind of action.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Errors {
    /// Actions that ran.
    pub actions: u64,
    /// How long they took.
    pub duration: Signed,
    /// When they ended.
    pub completion: Signed,
}

/// Errors of one quantity by their sign; those below a microsecond are none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Signed {
    /// It was predicted too long, or too late.
    pub over: Histogram,
    /// It was predicted too short, or too early.
    pub under: Histogram,
}

/// Lengths of errors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram {
    /// At most [`BUCKETS`]; as many as were needed.
    counts: Vec<u64>,
    /// In microseconds.
    sum: u64,
}

/// The bucket of an error in microseconds.
const fn bucket(micros: u64) -> usize {
    let width_bits = (u64::BITS - micros.leading_zeros()).saturating_sub(BUCKET_BITS + 1);
    ((width_bits as usize) << BUCKET_BITS) + (micros >> width_bits) as usize
}

/// The largest error of a bucket, in microseconds.
fn longest(bucket: usize) -> u64 {
    let width_bits = (bucket >> BUCKET_BITS).saturating_sub(1);
    let above = bucket + 1 - (width_bits << BUCKET_BITS);
    ((above as u64) << width_bits) - 1
}

impl Predictions {
    /// An action has run: it took so long, and ended then.
    pub fn handle_ended(&mut self, action: Action, predicted: Predicted, took: Span, ended_at: Timestamp) {
        let errors = match action {
            Action::Infer => &mut self.infer,
            Action::Load => &mut self.load,
        };
        errors.actions += 1;
        errors.duration.push(took - predicted.duration);
        errors.completion.push(ended_at - predicted.ends_at);
    }

    /// Adds what was counted elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.infer.add(&other.infer);
        self.load.add(&other.load);
    }

    /// Of one kind of action.
    #[must_use]
    pub fn of(&self, action: Action) -> &Errors {
        match action {
            Action::Infer => &self.infer,
            Action::Load => &self.load,
        }
    }

    /// As others are told of it.
    #[must_use]
    pub fn told(&self) -> PredictionErrors {
        PredictionErrors { infer: self.infer.told(), load: self.load.told() }
    }
}

impl Errors {
    fn add(&mut self, other: &Self) {
        self.actions += other.actions;
        self.duration.add(&other.duration);
        self.completion.add(&other.completion);
    }

    fn told(&self) -> ActionErrors {
        let Self { actions, duration, completion } = self;
        ActionErrors { actions: *actions, duration: duration.told(), completion: completion.told() }
    }
}

impl Signed {
    fn push(&mut self, later: Span) {
        let side = if later < Span::ZERO { &mut self.over } else { &mut self.under };
        match later.as_nanos().unsigned_abs() / 1000 {
            0 => {}
            micros => side.push(micros.min(MICROS_MAX)),
        }
    }

    fn add(&mut self, other: &Self) {
        self.over.add(&other.over);
        self.under.add(&other.under);
    }

    fn told(&self) -> ErrorSides {
        ErrorSides { over: self.over.told(), under: self.under.told() }
    }
}

impl Histogram {
    fn push(&mut self, micros: u64) {
        let bucket = bucket(micros);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.sum = self.sum.saturating_add(micros);
        debug_assert!(self.counts.len() <= BUCKETS);
    }

    fn add(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.sum = self.sum.saturating_add(other.sum);
    }

    /// How many errors there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// What so large a part of all errors does not exceed, up to an eighth; zero if there were none.
    #[must_use]
    pub fn quantile(&self, part: f64) -> Span {
        let rank = (part * self.count() as f64).ceil().max(1.0) as u64;
        self.steps().find(|&(_, until)| until >= rank).map_or(Span::ZERO, |(error, _)| error)
    }

    /// How many errors do not exceed which length, for each length that there was.
    pub fn steps(&self) -> impl Iterator<Item = (Span, u64)> {
        let mut until = 0;
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(move |(bucket, count)| {
            until += count;
            (Span(longest(bucket) as i64 * 1000), until)
        })
    }

    /// In wider buckets, each of which has some of these whole.
    fn told(&self) -> ErrorHistogram {
        let mut told = ErrorHistogram {
            sum: Span(i64::try_from(self.sum.saturating_mul(1000)).unwrap_or(i64::MAX)),
            ..ErrorHistogram::default()
        };
        let mut wider = 0;
        for (bucket, &count) in self.counts.iter().enumerate() {
            while wider < predictions::BUCKETS && Span(longest(bucket) as i64 * 1000) >= predictions::bound(wider) {
                wider += 1;
            }
            *told.counts.get_mut(wider).unwrap_or(&mut told.longer) += count;
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(micros: i64) -> Timestamp {
        Timestamp::ZERO + Span(micros * 1000)
    }

    #[test]
    fn what_ends_earlier_was_over_and_what_takes_longer_was_under_predicted() {
        let predicted = Predicted { duration: Span(8_000_000), ends_at: after(10_000) };
        let mut predictions = Predictions::default();
        predictions.handle_ended(Action::Infer, predicted, Span(8_003_000), after(9_995));
        predictions.handle_ended(Action::Infer, predicted, Span(8_000_999), after(10_000));
        predictions.handle_ended(Action::Load, predicted, Span(7_999_000), after(1 << 40));
        let errors = predictions.of(Action::Infer);
        assert_eq!(errors.actions, 2);
        let found = |histogram: &Histogram| (histogram.count(), histogram.quantile(1.0));
        let (none, us) = ((0, Span::ZERO), |micros: i64| (1, Span(micros * 1000)));
        assert_eq!((found(&errors.duration.over), found(&errors.duration.under)), (none, us(3)));
        assert_eq!((found(&errors.completion.over), found(&errors.completion.under)), (us(5), none));
        let errors = predictions.of(Action::Load);
        assert_eq!((found(&errors.duration.over), found(&errors.duration.under)), (us(1), none));
        assert_eq!((found(&errors.completion.over), found(&errors.completion.under)), (none, us(MICROS_MAX as i64)));
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_a_sorted_list_up_to_an_eighth(
            errors in prop::collection::vec((0u32..40).prop_flat_map(|bits| 0..=1u64 << bits), 1..300),
            cut in 0usize..300,
        ) {
            let mut parts = [Histogram::default(), Histogram::default()];
            for (index, &error) in errors.iter().enumerate() {
                parts[usize::from(index < cut)].push(error.min(MICROS_MAX));
            }
            let [mut all, other] = parts;
            all.add(&other);
            let mut sorted = errors.iter().map(|&error| error.min(MICROS_MAX)).collect::<Vec<_>>();
            sorted.sort_unstable();
            prop_assert_eq!(all.count(), sorted.len() as u64);
            prop_assert_eq!(all.steps().last().map(|(_, until)| until), Some(sorted.len() as u64));
            prop_assert!(all.counts.len() <= BUCKETS);
            let told = all.told();
            for (bucket, &count) in told.counts.iter().enumerate() {
                let from = bucket.checked_sub(1).map_or(0, |before| predictions::bound(before).0 / 1000);
                let bounds = from as u64..(predictions::bound(bucket).0 / 1000) as u64;
                let within = sorted.iter().filter(|error| bounds.contains(error)).count();
                prop_assert_eq!(count, within as u64, "{:?}", bounds);
            }
            prop_assert_eq!(told.counts.iter().sum::<u64>() + told.longer, all.count());
            prop_assert_eq!(told.sum, Span(sorted.iter().sum::<u64>() as i64 * 1000));
            for part in [0.5, 0.99, 0.999, 0.9999] {
                let exact = sorted[((part * sorted.len() as f64).ceil() as usize).max(1) - 1];
                let told = all.quantile(part).as_nanos() as u64 / 1000;
                prop_assert!((exact..=exact + exact / 8).contains(&told), "{exact}: {told}");
            }
        }
    }
}
