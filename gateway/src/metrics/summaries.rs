//! Quantiles of a model's last durations, as Triton's `--metrics-config summary_latencies=true` shows them. Kept only
//! where somebody wants them: a histogram of ours tells more and can be added up over frontends.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use prometheus::proto::{self, LabelPair, Metric};

/// Quantiles are those of so many durations.
const KEPT_MAX: usize = 1024;
/// Triton's.
const QUANTILES: [f64; 5] = [0.5, 0.9, 0.95, 0.99, 0.999];

/// Those of one kind of one model's durations.
#[derive(Default)]
pub(super) struct Summary(Mutex<Observed>);

#[derive(Default)]
struct Observed {
    count: u64,
    sum: f64,
    last: VecDeque<f64>,
}

impl Summary {
    pub(super) fn observe(&self, value: f64) {
        let mut observed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        observed.count += 1;
        observed.sum += value;
        if observed.last.len() == KEPT_MAX {
            observed.last.pop_front();
        }
        observed.last.push_back(value);
    }

    pub(super) fn told(&self, labels: Vec<LabelPair>) -> Metric {
        let mut metric = Metric::from_label(labels);
        metric.set_summary(self.quantiles());
        metric
    }

    fn quantiles(&self) -> proto::Summary {
        let observed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last: Vec<f64> = observed.last.iter().copied().collect();
        last.sort_by(f64::total_cmp);
        let quantiles = QUANTILES.iter().map(|&quantile| {
            let mut told = proto::Quantile::default();
            told.set_quantile(quantile);
            let rank = (quantile * last.len() as f64).ceil() as usize;
            told.set_value(last.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN));
            told
        });
        let mut summary = proto::Summary::default();
        summary.set_sample_count(observed.count);
        summary.set_sample_sum(observed.sum);
        summary.set_quantile(quantiles.collect());
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_last_durations_and_sums_of_all() {
        let summary = Summary::default();
        assert!(summary.quantiles().get_quantile().iter().all(|told| told.value().is_nan()), "none yet");
        (0..KEPT_MAX).for_each(|_| summary.observe(1e9));
        (1..=KEPT_MAX).rev().for_each(|value| summary.observe(value as f64));
        let told = summary.quantiles();
        let found: Vec<f64> = told.get_quantile().iter().map(proto::Quantile::value).collect();
        assert_eq!(found, [512.0, 922.0, 973.0, 1014.0, 1023.0]);
        assert_eq!(told.sample_count(), 2 * KEPT_MAX as u64);
        assert_eq!(told.sample_sum(), 1e9 * 1024.0 + 512.0 * 1025.0);
    }
}
