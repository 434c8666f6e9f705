//! Step 10: what becomes of requests is counted twice: for Prometheus, and in the protocol's own statistics.

use std::cell::RefCell;

use ensembles::{Selected, contexts::Counts};
use frontend::{
    InferError,
    desk::{Desk, Observer},
    tasks::{Reply, Timing},
};
use proto::{Span, Timestamp};
use repository::Model;

use crate::{
    config::MetricsConfig,
    metrics::{Compared, FeedbackOutcome, Metrics, Reading, Refusals, Stage, Traces, Traffic},
    statistics::Statistics,
};

/// All counts of a frontend; by default none yet, of no model.
pub struct Record {
    metrics: Metrics,
    /// By index in the model table.
    statistics: RefCell<Vec<Statistics>>,
}

impl Record {
    /// No counts yet, of no model.
    #[must_use]
    pub fn new(config: MetricsConfig) -> Self {
        Self { metrics: Metrics::new(config), statistics: RefCell::default() }
    }

    /// Looks at the counts of a model, by its index in the model table.
    pub fn with_statistics<T>(&self, model: usize, look: impl FnOnce(&Statistics) -> T) -> T {
        look(&self.statistics.borrow()[model])
    }

    /// Reads what Prometheus scrapes.
    #[must_use]
    pub fn read_metrics(&self, desk: &Desk) -> Reading {
        let pending = desk.pending();
        desk.with_core(|core| self.metrics.read(core, |model| pending.get(&model).copied().unwrap_or_default()))
    }

    /// What Prometheus scrapes of one model.
    ///
    /// # Errors
    /// If there is none of that name, in Triton's words.
    pub fn metrics_of(&self, desk: &Desk, name: &str) -> Result<String, InferError> {
        let pending = desk.pending();
        let pending = |model| pending.get(&model).copied().unwrap_or_default();
        desk.with_core(|core| {
            core.models().find(name, None)?;
            Ok(self.metrics.of_model(core, pending, name))
        })
    }

    /// What tells, on any thread, what becomes of requests to the frontend that operators call so.
    pub(crate) fn traffic(&self, frontend: String) -> Traffic {
        self.metrics.traffic(frontend)
    }

    /// A request for a model was this long in a stage that only its protocol knows.
    pub fn observe(&self, model: usize, stage: Stage, took: Span) {
        self.metrics.observe(model, stage, took);
    }

    /// A request named its application.
    pub fn handle_application(&self, name: &str) {
        self.metrics.handle_application(name);
    }

    /// A request was answered at `now` by what was kept.
    pub fn handle_cache_hit(&self, now: Timestamp, model: usize, timing: &Timing) {
        self.statistics.borrow_mut()[model].handle_cache_hit(now, timing);
        self.metrics.handle_cache_hit(model, timing);
    }

    /// A request's answer was looked for so long, and its model is asked.
    pub fn handle_cache_miss(&self, model: usize, took: Span) {
        self.statistics.borrow_mut()[model].handle_cache_miss(took);
        self.metrics.handle_cache_miss(model, took);
    }

    /// How much each member of an ensemble counts now.
    pub fn handle_weights(&self, ensemble: usize, members: &[String], weights: &[f64]) {
        self.metrics.handle_weights(ensemble, members, weights);
    }

    /// A request for models of one task has ended so.
    pub fn handle_selected(&self, ensemble: usize, selected: &Selected, is_answered: bool) {
        self.metrics.handle_selected(ensemble, selected, is_answered);
    }

    /// A shadow of an ensemble has ended so.
    pub fn handle_shadow(&self, ensemble: usize, member: usize, compared: Compared) {
        self.metrics.handle_shadow(ensemble, member, compared);
    }

    /// Feedback came to this.
    pub fn handle_feedback(&self, ensemble: usize, outcome: FeedbackOutcome) {
        self.metrics.handle_feedback(ensemble, outcome);
    }

    /// So many contexts are there.
    pub fn handle_contexts(&self, counts: &Counts) {
        self.metrics.handle_contexts(counts);
    }

    /// What counts those who are refused.
    #[must_use]
    pub fn refusals(&self) -> &Refusals {
        self.metrics.refusals()
    }

    /// What counts traces.
    #[must_use]
    pub fn traces(&self) -> &Traces {
        self.metrics.traces()
    }
}

impl Default for Record {
    fn default() -> Self {
        Self::new(MetricsConfig::default())
    }
}

impl Observer for Record {
    fn handle_model(&self, index: usize, model: &Model) {
        self.metrics.handle_model(index, model);
        let mut statistics = self.statistics.borrow_mut();
        if index == statistics.len() {
            statistics.push(Statistics::default());
        }
    }

    fn handle_success(&self, now: Timestamp, model: usize, reply: &Reply) {
        let executions = self.statistics.borrow_mut()[model].handle_success(now, reply);
        self.metrics.handle_success(model, reply, executions);
    }

    fn handle_failure(&self, now: Timestamp, model: usize, after: Span, error: &InferError) {
        self.statistics.borrow_mut()[model].handle_failure(now, after);
        self.metrics.handle_failure(model, error);
    }

    fn handle_silences(&self, count: u64) {
        self.metrics.handle_silences(count);
    }
}
