//! What all metrics are made with.

use prometheus::{
    IntCounter, Registry, Result,
    core::Collector,
    proto::{Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};

/// Constant names are valid, and each is registered once.
pub(super) fn registered<C: Collector + Clone + 'static>(registry: &Registry, collector: Result<C>) -> C {
    let collector = collector.expect("a valid name");
    registry.register(Box::new(collector.clone())).expect("a new name");
    collector
}

/// What was counted elsewhere.
pub(super) fn count_up_to(counter: &IntCounter, count: u64) {
    counter.inc_by(count - counter.get());
}

pub(super) fn label(name: &str, value: &str) -> LabelPair {
    let mut label = LabelPair::default();
    label.set_name(name.to_owned());
    label.set_value(value.to_owned());
    label
}

pub(super) fn counter(labels: Vec<LabelPair>, count: u64) -> Metric {
    sum(labels, count as f64)
}

/// A counter of something that has parts.
pub(super) fn sum(labels: Vec<LabelPair>, value: f64) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(value);
    let mut metric = Metric::from_label(labels);
    metric.set_counter(counter);
    metric
}

pub(super) fn gauge(labels: Vec<LabelPair>, value: f64) -> Metric {
    let mut told = Gauge::default();
    told.set_value(value);
    let mut metric = Metric::from_label(labels);
    metric.set_gauge(told);
    metric
}

pub(super) fn histogram(labels: Vec<LabelPair>, told: Histogram) -> Metric {
    let mut metric = Metric::from_label(labels);
    metric.set_histogram(told);
    metric
}

/// Metrics of one name.
pub(super) fn family((name, help): (&str, &str), kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}
