//! How far actions were off what was planned of them (Clockwork, section 6.5), in a report's units.

use std::fmt::Write;

use proto::Span;
use scheduler::predictions::{Action, Histogram, Predictions, Signed};
use serde::Serialize;

/// Of all actions.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PredictionReport {
    /// Executions of batches.
    pub infer: ActionReport,
    /// Loads of weights.
    pub load: ActionReport,
}

/// Of one kind of action.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct ActionReport {
    /// Actions that ran.
    pub actions: u64,
    /// How long they took.
    pub duration: SidesReport,
    /// When they ended.
    pub completion: SidesReport,
}

/// Errors of one quantity; what was right to the microsecond is in neither.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct SidesReport {
    /// It was predicted too long, or too late.
    pub over: TailReport,
    /// It was predicted too short, or too early.
    pub under: TailReport,
}

/// How large errors were in microseconds; zero if there were none.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct TailReport {
    /// How many.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// 99.99th percentile.
    pub p9999_us: f64,
}

impl PredictionReport {
    pub(super) fn new(predictions: &Predictions) -> Self {
        let tail = |errors: &Histogram| {
            let [p50_us, p99_us, p999_us, p9999_us] =
                [0.5, 0.99, 0.999, 0.9999].map(|part| Span::as_micros_f64(errors.quantile(part)));
            TailReport { count: errors.count(), p50_us, p99_us, p999_us, p9999_us }
        };
        let sides = |Signed { over, under }: &Signed| SidesReport { over: tail(over), under: tail(under) };
        let action = |action: Action| {
            let errors = predictions.of(action);
            ActionReport {
                actions: errors.actions,
                duration: sides(&errors.duration),
                completion: sides(&errors.completion),
            }
        };
        Self { infer: action(Action::Infer), load: action(Action::Load) }
    }

    /// For people: a line for each kind of action that was not always as planned.
    pub fn describe(&self, text: &mut String) {
        for (name, action) in [("executions", &self.infer), ("loads", &self.load)] {
            let ActionReport { duration, completion, .. } = action;
            if [duration, completion].iter().any(|sides| sides.over.count + sides.under.count > 0) {
                let _ = write!(
                    text,
                    "\n{name} took up to {:.0} us less and {:.0} us more than planned, and ended up to {:.0} us \
                     earlier and {:.0} us later (99th percentiles)",
                    duration.over.p99_us, duration.under.p99_us, completion.over.p99_us, completion.under.p99_us
                );
            }
        }
    }
}
