//! Metrics of what ensembles have learned for users or sessions apart.

use ensembles::contexts::Counts;
use prometheus::{IntCounter, IntGauge, Registry};

use super::register::{count_up_to, registered};

/// How many contexts there are, and what they take.
#[derive(Clone)]
pub(super) struct ContextMetrics {
    kept: IntGauge,
    bytes: IntGauge,
    forgotten: IntCounter,
    refused: IntCounter,
}

impl ContextMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        let counter = |name: &str, help: &str| registered(registry, IntCounter::new(name, help));
        Self {
            kept: gauge("downbeat_selection_contexts", "Contexts of ensembles that are kept here"),
            bytes: gauge("downbeat_selection_context_bytes", "What they take"),
            forgotten: counter("downbeat_selection_contexts_forgotten_total", "Contexts that made room for others"),
            refused: counter(
                "downbeat_selection_contexts_refused_total",
                "Requests that were answered without their context, for which there was no room",
            ),
        }
    }

    pub(super) fn handle_counts(&self, counts: &Counts) {
        self.kept.set(i64::try_from(counts.kept).unwrap_or(i64::MAX));
        self.bytes.set(i64::try_from(counts.bytes).unwrap_or(i64::MAX));
        count_up_to(&self.forgotten, counts.forgotten);
        count_up_to(&self.refused, counts.refused);
    }
}
