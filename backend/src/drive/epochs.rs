//! How often schedulers claimed lower epochs, over all sessions of a backend: as a metric.

use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

const NAME: &str = "downbeat_scheduler_lower_epochs_total";
const HELP: &str = "Times that a scheduler claimed an epoch below one that was claimed before, and was not believed";

/// What the network thread counts, and whoever scrapes reads.
#[derive(Debug, Clone, Default)]
pub(super) struct LowerEpochs(Arc<AtomicU64>);

impl LowerEpochs {
    /// A session's count has grown from `told`.
    pub(super) fn handle_counted(&self, count: u64, told: &mut u64) {
        self.0.fetch_add(count - std::mem::replace(told, count), Ordering::Relaxed);
    }

    /// In Prometheus's text format.
    pub(super) fn write(&self, text: &mut String) {
        let count = self.0.load(Ordering::Relaxed);
        let _ = write!(text, "# HELP {NAME} {HELP}\n# TYPE {NAME} counter\n{NAME} {count}\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_added_up() {
        let all = LowerEpochs::default();
        for counts in [&[0, 2, 2, 3][..], &[0, 1]] {
            let mut told = 0;
            counts.iter().for_each(|count| all.handle_counted(*count, &mut told));
        }
        let mut text = String::new();
        all.write(&mut text);
        assert!(text.ends_with("counter\ndownbeat_scheduler_lower_epochs_total 4\n"), "{text}");
    }
}
