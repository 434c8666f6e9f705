//! Quantiles of a model's last durations, as Triton's `--metrics-config summary_latencies=true` shows them. Kept only
//! where somebody wants them: a histogram of ours tells more and can be added up over frontends.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use prometheus::{
    Opts,
    core::{Collector, Desc, Describer as _},
    proto,
};

use super::register::MODEL;

/// Quantiles are those of so many durations.
const KEPT_MAX: usize = 1024;
/// Triton's.
const QUANTILES: [f64; 5] = [0.5, 0.9, 0.95, 0.99, 0.999];

/// The summaries of all models.
#[derive(Clone)]
pub(super) struct SummaryVec {
    desc: Desc,
    /// By name and version.
    models: Arc<Mutex<BTreeMap<(String, String), Summary>>>,
}

/// That of one model.
#[derive(Clone, Default)]
pub(super) struct Summary(Arc<Mutex<Observed>>);

#[derive(Default)]
struct Observed {
    count: u64,
    sum: f64,
    last: VecDeque<f64>,
}

impl SummaryVec {
    pub(super) fn new(name: &str, help: &str) -> prometheus::Result<Self> {
        let opts = Opts::new(name, help).variable_labels(MODEL.map(str::to_owned).into());
        Ok(Self { desc: opts.describe()?, models: Arc::default() })
    }

    /// The summary of a model, as it was if there was one.
    pub(super) fn of(&self, name: &str, version: &str) -> Summary {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.entry((name.to_owned(), version.to_owned())).or_default().clone()
    }
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

    fn collect(&self) -> proto::Summary {
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

impl Collector for SummaryVec {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let label = |name: &str, value: &str| {
            let mut label = proto::LabelPair::default();
            label.set_name(name.to_owned());
            label.set_value(value.to_owned());
            label
        };
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let metrics = models.iter().map(|((name, version), summary)| {
            let mut metric = proto::Metric::from_label(vec![label(MODEL[0], name), label(MODEL[1], version)]);
            metric.set_summary(summary.collect());
            metric
        });
        let mut family = proto::MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(proto::MetricType::SUMMARY);
        family.set_metric(metrics.collect());
        vec![family]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_last_durations_and_sums_of_all() {
        let family = SummaryVec::new("s", "help").unwrap();
        let summary = family.of("m", "1");
        assert!(summary.collect().get_quantile().iter().all(|told| told.value().is_nan()), "none yet");
        (0..KEPT_MAX).for_each(|_| summary.observe(1e9));
        (1..=KEPT_MAX).rev().for_each(|value| family.of("m", "1").observe(value as f64));
        let told = summary.collect();
        let found: Vec<f64> = told.get_quantile().iter().map(proto::Quantile::value).collect();
        assert_eq!(found, [512.0, 922.0, 973.0, 1014.0, 1023.0]);
        assert_eq!(told.sample_count(), 2 * KEPT_MAX as u64);
        assert_eq!(told.sample_sum(), 1e9 * 1024.0 + 512.0 * 1025.0);
        let text = prometheus::TextEncoder::new().encode_to_string(&Collector::collect(&family)).unwrap();
        assert!(text.contains("s{model=\"m\",version=\"1\",quantile=\"0.5\"} 512"), "{text}");
        assert!(text.contains("s_count{model=\"m\",version=\"1\"} 2048"), "{text}");
    }
}
