//! How far the primary was off with what it planned, since it took over: it counts, and frontends tell.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::{
    Opts, Registry,
    core::{Collector, Desc, Describer as _},
    proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};
use proto::predictions::{ActionErrors, ErrorHistogram, PredictionErrors, bound};

use super::register::{counter, family, histogram, label, registered};

const ACTIONS: (&str, &str) =
    ("downbeat_predicted_actions_total", "Actions of the primary's life whose end it had predicted");
const ERRORS: (&str, &str) =
    ("downbeat_prediction_error_seconds", "How far off those were that were off by a microsecond and more");

/// What the primary told last.
#[derive(Clone)]
pub(super) struct Predictions {
    descs: Arc<Vec<Desc>>,
    told: Arc<Mutex<PredictionErrors>>,
}

impl Predictions {
    pub(super) fn new(registry: &Registry) -> Self {
        let descs = [(ACTIONS, &["action"][..]), (ERRORS, &["action", "of", "side"])].map(|((name, help), labels)| {
            labels.iter().fold(Opts::new(name, help), |opts, &label| opts.variable_label(label)).describe()
        });
        let descs = descs.into_iter().collect::<prometheus::Result<_>>();
        registered(registry, descs.map(|descs| Self { descs: Arc::new(descs), told: Arc::default() }))
    }

    pub(super) fn read(&self, errors: &PredictionErrors) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = *errors;
    }
}

impl Collector for Predictions {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let PredictionErrors { infer, load } = *self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever loads no weights sees nothing of it.
        let told =
            [("infer", infer), ("load", load)].into_iter().filter(|(name, of)| *name == "infer" || of.actions > 0);
        let actions = told.clone().map(|(name, of)| counter(vec![label("action", name)], of.actions));
        let errors = told.flat_map(|(name, of)| errors(name, &of));
        vec![
            family(ACTIONS, MetricType::COUNTER, actions.collect()),
            family(ERRORS, MetricType::HISTOGRAM, errors.collect()),
        ]
    }
}

/// Those of one kind of action.
fn errors(action: &str, ActionErrors { duration, completion, .. }: &ActionErrors) -> [Metric; 4] {
    let labels = |of, side| -> Vec<LabelPair> { vec![label("action", action), label("of", of), label("side", side)] };
    [
        histogram(labels("duration", "over"), cumulative(&duration.over)),
        histogram(labels("duration", "under"), cumulative(&duration.under)),
        histogram(labels("completion", "over"), cumulative(&completion.over)),
        histogram(labels("completion", "under"), cumulative(&completion.under)),
    ]
}

fn cumulative(errors: &ErrorHistogram) -> Histogram {
    let mut below = 0_u64;
    let buckets = errors.counts.iter().enumerate().map(|(bucket, count)| {
        below = below.saturating_add(*count);
        let mut told = Bucket::default();
        told.set_upper_bound(bound(bucket).as_secs_f64());
        told.set_cumulative_count(below);
        told
    });
    let buckets = buckets.collect();
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets);
    histogram.set_sample_count(errors.count());
    histogram.set_sample_sum(errors.sum.as_secs_f64());
    histogram
}
