//! What all metrics are made with.

use prometheus::{IntCounter, Registry, Result, core::Collector};

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
