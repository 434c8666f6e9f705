//! Step 10: what Prometheus scrapes: Triton's names, which dashboards know, and histograms of our own for every stage.
//!
//! The thread that moves packets counts, and reads gauges when somebody scrapes; the text is made beside it. There may
//! be thousands of models: a model counts from its first request on, and of so many as the configuration says
//! (`models_max`) the text names each.

mod contexts;
mod counts;
mod host;
mod models;
mod predictions;
mod register;
mod requests;
mod schedulers;
mod selections;
mod stages;
mod summaries;
mod traffic;

use std::cell::OnceCell;

use ensembles::{Selected, contexts::Counts};
use frontend::{
    InferError,
    core::Core,
    tasks::{Reply, Timing},
};
use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder, proto::MetricFamily};
use proto::Span;
use repository::Model;

pub(crate) use counts::drop_reason;
pub use selections::{Compared, FeedbackOutcome, ShadowOutcome, Took};
pub use stages::{Stage, stages};
pub(crate) use traffic::{PATH as TRAFFIC_PATH, Traffic};

use self::{
    contexts::ContextMetrics,
    host::HostMetrics,
    models::Models,
    register::{count_up_to, registered},
    requests::RequestMetrics,
    schedulers::SchedulerMetrics,
    selections::SelectionMetrics,
};
use crate::{access::Refusal, config::MetricsConfig};

/// Of so many models all metrics are there before their first request, as in Triton; of more, only of those that have
/// had one.
const ALL_FROM_START_MAX: usize = 32;

/// Everything that is scraped.
pub struct Metrics {
    registry: Registry,
    models: Models,
    slots: IntGauge,
    backends: IntGauge,
    silences: IntGauge,
    late_inputs: IntCounter,
    schedulers: SchedulerMetrics,
    requests: RequestMetrics,
    selections: SelectionMetrics,
    contexts: ContextMetrics,
    refusals: Refusals,
    traces: Traces,
    host: HostMetrics,
    /// How operators call this frontend, once it is known.
    name: OnceCell<String>,
}

/// What became of the trace of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceOutcome {
    /// The collector has it.
    Exported,
    /// Too many waited for the collector.
    QueueFull,
    /// The collector was not there, too slow, or did not want it.
    CollectorFailed,
}

impl TraceOutcome {
    const ALL: [(Self, &str); 3] =
        [(Self::Exported, "exported"), (Self::QueueFull, "queue_full"), (Self::CollectorFailed, "collector_failed")];
}

/// What became of traces.
#[derive(Debug, Clone)]
pub struct Traces(IntCounterVec);

impl Traces {
    fn new(registry: &Registry) -> Self {
        let opts = Opts::new("downbeat_traces_total", "Requests that were traced, by what became of their spans");
        let counters = registered(registry, IntCounterVec::new(opts, &["outcome"]));
        for (_, name) in TraceOutcome::ALL {
            counters.with_label_values(&[name]);
        }
        Self(counters)
    }

    /// So many traces ended so.
    pub fn count(&self, outcome: TraceOutcome, traces: usize) {
        self.0.with_label_values(&[TraceOutcome::ALL[outcome as usize].1]).inc_by(traces as u64);
    }
}

/// Why a client was refused before its request was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Too many connections.
    Connections,
    /// TLS could not be agreed on, or the client's certificate is none of ours.
    Handshake,
    /// The head is too large, or a field is there twice.
    Head,
    /// A body is too large, or all of them are.
    Body,
    /// A token is missing or unknown.
    Unauthenticated,
    /// The token does not cover the operation.
    Forbidden,
    /// Too many requests over time.
    Rate,
    /// Too many requests at once.
    Requests,
    /// An idle connection whose place was needed.
    Idle,
    /// A connection whose client does not take its replies in.
    SlowReader,
    /// Too much waits to be taken in.
    Untaken,
    /// A stream without messages, or one whose message does not end.
    Stream,
    /// It came for another host.
    Host,
    /// A page of another site sent it.
    CrossSite,
    /// The process is about to end.
    Draining,
}

impl Cause {
    const ALL: [(Self, &str); 15] = [
        (Self::Connections, "connections"),
        (Self::Handshake, "handshake"),
        (Self::Head, "head"),
        (Self::Body, "body"),
        (Self::Unauthenticated, "unauthenticated"),
        (Self::Forbidden, "forbidden"),
        (Self::Rate, "rate"),
        (Self::Requests, "requests"),
        (Self::Idle, "idle"),
        (Self::SlowReader, "slow_reader"),
        (Self::Untaken, "untaken"),
        (Self::Stream, "stream"),
        (Self::Host, "host"),
        (Self::CrossSite, "cross_site"),
        (Self::Draining, "draining"),
    ];
}

impl From<&Refusal> for Cause {
    fn from(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::Unauthenticated { .. } | Refusal::NoTokens { .. } => Self::Unauthenticated,
            Refusal::Forbidden { .. } => Self::Forbidden,
            Refusal::Rate { .. } => Self::Rate,
            Refusal::Busy { .. } | Refusal::ClientBusy { .. } | Refusal::Overloaded { .. } | Refusal::Probes { .. } => {
                Self::Requests
            }
            Refusal::Head { .. } | Refusal::Repeated { .. } => Self::Head,
            Refusal::Connections => Self::Connections,
            Refusal::Untaken { .. } => Self::Untaken,
            Refusal::Draining => Self::Draining,
            Refusal::Host { .. } => Self::Host,
            Refusal::CrossSite { .. } => Self::CrossSite,
        }
    }
}

/// How often clients were refused, by cause.
#[derive(Debug, Clone)]
pub struct Refusals(IntCounterVec);

impl Refusals {
    /// Of each cause none yet.
    fn new(registry: &Registry) -> Self {
        let counters = IntCounterVec::new(
            Opts::new("downbeat_refused_total", "Connections and requests that were refused unseen, by cause"),
            &["cause"],
        );
        let counters = registered(registry, counters);
        for (_, name) in Cause::ALL {
            counters.with_label_values(&[name]);
        }
        Self(counters)
    }

    /// A client was refused.
    pub fn count(&self, cause: Cause) {
        self.0.with_label_values(&[Cause::ALL[cause as usize].1]).inc();
    }
}

impl Metrics {
    /// Metrics of no model yet, all zero.
    #[must_use]
    pub fn new(config: MetricsConfig) -> Self {
        let registry = Registry::new();
        let gauge = |name: &str, help: &str| registered(&registry, IntGauge::new(name, help));
        Self {
            models: Models::new(&registry, config),
            slots: gauge("downbeat_slots_in_use", "Slots of registered memory that are leased"),
            backends: gauge("downbeat_backends_linked", "Backends that can reach our slots"),
            silences: gauge("downbeat_silences", "Times that the frontend's thread did nothing for 0.1 s or more"),
            late_inputs: registered(
                &registry,
                IntCounter::new(
                    "downbeat_late_inputs_total",
                    "Rows whose picture was not decoded yet when a backend came for it",
                ),
            ),
            schedulers: SchedulerMetrics::new(&registry),
            requests: RequestMetrics::new(&registry),
            selections: SelectionMetrics::new(&registry),
            contexts: ContextMetrics::new(&registry),
            refusals: Refusals::new(&registry),
            traces: Traces::new(&registry),
            host: HostMetrics::new(&registry),
            name: OnceCell::new(),
            registry,
        }
    }

    /// What counts those who are refused.
    #[must_use]
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// What counts traces.
    #[must_use]
    pub fn traces(&self) -> &Traces {
        &self.traces
    }

    /// A request named its application, in at most [`Application::NAME_BYTES_MAX`](proto::Application::NAME_BYTES_MAX).
    pub fn handle_application(&self, name: &str) {
        self.requests.handle_name(name);
    }

    /// How much each member of an ensemble counts now.
    pub fn handle_weights(&self, ensemble: usize, members: &[String], weights: &[f64]) {
        self.selections.handle_weights(ensemble, members, weights);
    }

    /// A request for models of one task has ended so.
    pub fn handle_selected(&self, ensemble: usize, selected: &Selected, is_answered: bool) {
        self.selections.handle_selected(ensemble, selected, is_answered);
    }

    /// A shadow of an ensemble has ended so.
    pub fn handle_shadow(&self, ensemble: usize, member: usize, compared: Compared) {
        self.selections.handle_shadow(ensemble, member, compared);
    }

    /// Feedback came to this.
    pub fn handle_feedback(&self, ensemble: usize, outcome: FeedbackOutcome) {
        self.selections.handle_feedback(ensemble, outcome);
    }

    /// So many contexts are there.
    pub fn handle_contexts(&self, counts: &Counts) {
        self.contexts.handle_counts(counts);
    }

    /// A model is served: another version of one that is here, or the next one of the table.
    pub fn handle_model(&self, index: usize, model: &Model) {
        self.models.handle_model(index, &model.name, &model.version);
        self.models.handle_objective(index, model.slo);
    }

    /// A request was answered.
    pub fn handle_success(&self, model: usize, reply: &Reply, new_executions: u64) {
        self.models.with(model, |known| known.handle_success(reply, new_executions));
    }

    /// A request was answered by what was kept.
    pub fn handle_cache_hit(&self, model: usize, timing: &Timing) {
        self.models.with(model, |known| known.handle_cache_hit(timing));
    }

    /// A request's answer was looked for so long, and its model is asked.
    pub fn handle_cache_miss(&self, model: usize, took: Span) {
        self.models.with(model, |known| known.counts().handle_cache_miss(took));
    }

    /// A request ended without an answer.
    pub fn handle_failure(&self, model: usize, error: &InferError) {
        self.models.with(model, |known| known.counts().handle_failure(error));
    }

    /// The frontend's thread was silent for too long so many times.
    pub fn handle_silences(&self, count: u64) {
        self.silences.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// A request was this long in a stage that the frontend alone knows.
    pub fn observe(&self, model: usize, stage: Stage, took: Span) {
        self.models.with(model, |known| known.counts().handle_stage(stage, took.0));
    }

    /// Reads all gauges. `pending` says how many requests of a model, by its index, have no answer yet.
    pub fn read(&self, core: &Core, pending: impl Fn(usize) -> usize) -> Reading {
        self.models.read(core, pending, ALL_FROM_START_MAX);
        self.slots.set(core.outstanding() as i64);
        self.backends.set(core.backends_linked() as i64);
        count_up_to(&self.late_inputs, core.counters().late_inputs);
        self.schedulers.read(core);
        self.requests.read(core, |model| self.models.is_named(model));
        self.selections.read(core, |model| self.models.is_named(model));
        self.host.read(core);
        self.name.get_or_init(|| core.name().to_owned());
        self.reading()
    }

    /// Counts as they are, and gauges as they were read last.
    #[must_use]
    pub fn reading(&self) -> Reading {
        Reading { registry: self.registry.clone(), name: self.name.get().cloned().unwrap_or_default() }
    }

    /// What tells, on any thread, what becomes of requests to the frontend that operators call so.
    pub(crate) fn traffic(&self, frontend: String) -> Traffic {
        Traffic::new(self.models.told(), frontend)
    }

    /// All that is counted of one model, in the same format.
    pub fn of_model(&self, core: &Core, pending: impl Fn(usize) -> usize, name: &str) -> String {
        text_of(&self.models.read_one(core, pending, name))
    }
}

/// What can be told, on any thread.
pub struct Reading {
    registry: Registry,
    name: String,
}

impl Reading {
    /// All metrics in Prometheus's text format, those of the process too.
    #[must_use]
    pub fn text(&self) -> String {
        admin::about_process("frontend", &self.name) + &self.own_text()
    }

    /// What the frontend itself counts.
    pub(crate) fn own_text(&self) -> String {
        text_of(&self.registry.gather())
    }
}

fn text_of(families: &[MetricFamily]) -> String {
    TextEncoder::new().encode_to_string(families).expect("names and labels were checked when they were made")
}
