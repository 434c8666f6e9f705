//! Metrics of what ensembles have learned for users or sessions apart.

use ensembles::contexts::Counts;
use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use super::register::{count_up_to, registered};

/// How many contexts there are, and what they take.
#[derive(Clone)]
pub(super) struct ContextMetrics {
    kept: IntGauge,
    bytes: IntGauge,
    forgotten: IntCounter,
    refused: IntCounter,
    stale: IntCounter,
    told: IntCounter,
    lost: IntCounter,
    failures: IntCounter,
    silent: IntGauge,
}

impl ContextMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        let counter = |name: &str, help: &str| registered(registry, IntCounter::new(name, help));
        let updates =
            Opts::new("downbeat_selection_context_updates_total", "Losses for the store, by what became of them");
        let updates = registered(registry, IntCounterVec::new(updates, &["outcome"]));
        Self {
            kept: gauge("downbeat_selection_contexts", "Contexts of ensembles that are kept here"),
            bytes: gauge("downbeat_selection_context_bytes", "What they take"),
            forgotten: counter("downbeat_selection_contexts_forgotten_total", "Contexts that made room for others"),
            refused: counter(
                "downbeat_selection_contexts_refused_total",
                "Requests that were answered without their context, for which there was no room",
            ),
            stale: counter(
                "downbeat_selection_context_stale_total",
                "Requests that were answered with what had been known of their context for long",
            ),
            told: updates.with_label_values(&["told"]),
            lost: updates.with_label_values(&["lost"]),
            failures: counter("downbeat_selection_context_failures_total", "Batches that the store did not take in"),
            silent: gauge("downbeat_selection_context_store_silent", "Whether the store did not answer the last time"),
        }
    }

    pub(super) fn handle_counts(&self, counts: &Counts) {
        self.kept.set(i64::try_from(counts.kept).unwrap_or(i64::MAX));
        self.bytes.set(i64::try_from(counts.bytes).unwrap_or(i64::MAX));
        count_up_to(&self.forgotten, counts.forgotten);
        count_up_to(&self.refused, counts.refused);
        count_up_to(&self.stale, counts.stale);
        count_up_to(&self.told, counts.told);
        count_up_to(&self.lost, counts.lost);
        count_up_to(&self.failures, counts.failures);
        self.silent.set(counts.is_silent.into());
    }
}
