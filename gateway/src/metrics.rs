//! Step 10: what Prometheus scrapes: Triton's names, which dashboards know, and histograms of our own for every stage.
//!
//! Everything is resolved to a handle when a model has its first request, so a request costs a few additions and no
//! look-up, and models without traffic do not appear: there may be thousands.

mod host;
mod register;
mod requests;
mod schedulers;
mod summaries;

use std::cell::{OnceCell, Ref, RefCell};

use frontend::{
    InferError,
    core::Core,
    tasks::{Reply, Timing},
};
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder, exponential_buckets,
};
use proto::{
    Span,
    scheduler_to_frontend::{DropReason, NetworkTimes},
};
use repository::Model;

use self::{
    host::HostMetrics,
    register::{MODEL, count_up_to, registered},
    requests::RequestMetrics,
    schedulers::SchedulerMetrics,
    summaries::{Summary, SummaryVec},
};
use crate::{access::Refusal, config::MetricsConfig};

/// Of our own durations: 20 us to 10 s, each bucket twice the one before.
const BUCKETS: (f64, f64, usize) = (20e-6, 2.0, 20);
/// Of `nv_inference_first_response_histogram_ms`: Triton's.
const FIRST_RESPONSE_BUCKETS_MS: [f64; 4] = [100.0, 500.0, 2000.0, 5000.0];
/// What Triton sums up of answered requests, and what it is here.
const DURATIONS: [(&str, &str); 5] = [
    ("request", "the time of answered requests"),
    ("queue", "their time until a GPU was granted"),
    ("compute_input", "the time of fetching inputs"),
    ("compute_infer", "the time of execution"),
    ("compute_output", "the time of pushing outputs"),
];
/// A part of a request's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The client sends its request.
    Receive,
    /// A picture becomes a tensor.
    Preprocess,
    /// The task's descriptor goes to the scheduler.
    Submit,
    /// The batch has not been granted a GPU, although it is held back no longer.
    Queue,
    /// The batch is held back on purpose: it grows for as long as its deadline allows.
    Defer,
    /// The plan goes to the backend.
    Grant,
    /// The backend READs the inputs of the batch.
    Fetch,
    /// The batch waits for its window and for its GPU.
    Wait,
    /// The batch runs.
    Execute,
    /// The outputs are WRITTEN back.
    Push,
    /// The answer becomes a reply.
    Reply,
}

impl Stage {
    const ALL: [(Self, &str); 11] = [
        (Self::Receive, "receive"),
        (Self::Preprocess, "preprocess"),
        (Self::Submit, "submit"),
        (Self::Queue, "queue"),
        (Self::Defer, "defer"),
        (Self::Grant, "grant"),
        (Self::Fetch, "fetch"),
        (Self::Wait, "wait"),
        (Self::Execute, "execute"),
        (Self::Push, "push"),
        (Self::Reply, "reply"),
    ];

    /// What metrics and traces call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The stages of an answered request between admission and answer: when each began and ended, in nanoseconds on the
/// scheduler's clock.
#[must_use]
pub fn stages(timing: &Timing) -> [(Stage, i64, i64); 8] {
    let stamps = &timing.stamps;
    let (admitted, answered) = (timing.admitted_at.0, timing.answered_at.0);
    [
        (Stage::Submit, admitted, stamps.queued_at_ns),
        (Stage::Defer, stamps.queued_at_ns, stamps.due_at_ns),
        (Stage::Queue, stamps.due_at_ns, stamps.granted_at_ns),
        (Stage::Grant, stamps.granted_at_ns, stamps.planned_at_ns),
        (Stage::Fetch, stamps.planned_at_ns, stamps.fetched_at_ns),
        (Stage::Wait, stamps.fetched_at_ns, stamps.started_at_ns),
        (Stage::Execute, stamps.started_at_ns, stamps.finished_at_ns),
        (Stage::Push, stamps.finished_at_ns, answered),
    ]
}

/// Of so many models all metrics are there before their first request, as in Triton; of more, only of those that have
/// had one: each has hundreds of lines.
const ALL_FROM_START_MAX: usize = 32;

/// Everything that is scraped.
pub struct Metrics {
    registry: Registry,
    families: Families,
    /// By index in the model table.
    models: RefCell<Vec<KnownModel>>,
    pending: IntGaugeVec,
    network: GaugeVec,
    slots: IntGauge,
    backends: IntGauge,
    silences: IntGauge,
    late_inputs: IntCounter,
    schedulers: SchedulerMetrics,
    requests: RequestMetrics,
    refusals: Refusals,
    traces: Traces,
    host: HostMetrics,
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
        let opts = Opts::new("downbeat_traces", "Requests that were traced, by what became of their spans");
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
            Opts::new("downbeat_refused", "Connections and requests that were refused unseen, by cause"),
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

/// A model that is served, and its handles once it has had a request.
struct KnownModel {
    name: String,
    version: String,
    metrics: OnceCell<ModelMetrics>,
}

/// One model's handles.
struct ModelMetrics {
    success: IntCounter,
    late: IntCounter,
    inferences: IntCounter,
    executions: IntCounter,
    /// In the order of [`DURATIONS`].
    durations_us: [IntCounter; 5],
    /// In the same order, if they are wanted.
    summaries_us: Option<[Summary; 5]>,
    first_response_ms: Option<Histogram>,
    request: Histogram,
    batch: Histogram,
    /// In the order of [`Stage::ALL`].
    stages: Vec<Histogram>,
}

impl Metrics {
    /// Metrics of no model yet, all zero.
    #[must_use]
    pub fn new(config: MetricsConfig) -> Self {
        let registry = Registry::new();
        let families = Families::new(&registry, config);
        let gauge = |name: &str, help: &str| registered(&registry, IntGauge::new(name, help));
        Self {
            models: RefCell::default(),
            families,
            pending: registered(
                &registry,
                IntGaugeVec::new(
                    Opts::new("nv_inference_pending_request_count", "Requests without an answer yet"),
                    &MODEL,
                ),
            ),
            network: registered(
                &registry,
                GaugeVec::new(
                    Opts::new(
                        "downbeat_network_budget_seconds",
                        "What is planned with for the way of a plan (ctrl), of an input (data) and of an answer (resp)",
                    ),
                    &["model", "version", "part"],
                ),
            ),
            slots: gauge("downbeat_slots_in_use", "Slots of registered memory that are leased"),
            backends: gauge("downbeat_backends_linked", "Backends that can reach our slots"),
            silences: gauge("downbeat_silences", "Times that the frontend's thread did nothing for 0.1 s or more"),
            late_inputs: registered(
                &registry,
                IntCounter::new(
                    "downbeat_late_inputs",
                    "Rows whose picture was not decoded yet when a backend came for it",
                ),
            ),
            schedulers: SchedulerMetrics::new(&registry),
            requests: RequestMetrics::new(&registry),
            refusals: Refusals::new(&registry),
            traces: Traces::new(&registry),
            host: HostMetrics::new(&registry),
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

    /// A model is served: another version of one that is here, or the next one of the table.
    pub fn handle_model(&self, index: usize, model: &Model) {
        let (name, version) = (model.name.clone(), model.version.clone());
        let model = KnownModel { name, version, metrics: OnceCell::new() };
        let mut models = self.models.borrow_mut();
        match models.get_mut(index) {
            Some(known) => *known = model,
            None => models.push(model),
        }
    }

    /// A model's handles: it has traffic.
    fn of(&self, model: usize) -> Ref<'_, ModelMetrics> {
        Ref::map(self.models.borrow(), |models| {
            let KnownModel { name, version, metrics } = &models[model];
            metrics.get_or_init(|| self.families.model(name, version))
        })
    }

    /// A request was answered.
    pub fn handle_success(&self, model: usize, reply: &Reply, new_executions: u64) {
        let of = self.of(model);
        let (timing, stamps) = (&reply.timing, &reply.timing.stamps);
        let (admitted, answered) = (timing.admitted_at.0, timing.answered_at.0);
        of.success.inc();
        of.late.inc_by(u64::from(timing.answered_at > timing.deadline));
        of.inferences.inc_by(reply.rows as u64);
        of.executions.inc_by(new_executions);
        of.request.observe(seconds(answered - admitted));
        of.batch.observe(timing.batch_size.into());
        let durations_ns = [
            answered - admitted,
            stamps.granted_at_ns - admitted,
            stamps.fetched_at_ns - stamps.planned_at_ns,
            stamps.finished_at_ns - stamps.started_at_ns,
            answered - stamps.finished_at_ns,
        ];
        for (counter, ns) in of.durations_us.iter().zip(durations_ns) {
            counter.inc_by(u64::try_from(ns / 1000).unwrap_or(0));
        }
        for (summary, ns) in of.summaries_us.iter().flatten().zip(durations_ns) {
            summary.observe(ns.max(0) as f64 / 1e3);
        }
        if let Some(histogram) = &of.first_response_ms {
            histogram.observe(seconds(answered - admitted) * 1e3);
        }
        for (stage, from, to) in stages(timing) {
            of.stages[stage as usize].observe(seconds(to - from));
        }
    }

    /// A request ended without an answer.
    pub fn handle_failure(&self, model: usize, error: &InferError) {
        self.of(model);
        let known = &self.models.borrow()[model];
        let labels = |reason| [&known.name[..], &known.version, reason];
        self.families.failure.with_label_values(&labels(tritons_reason(error))).inc();
        if let Some(reason) = drop_reason(error) {
            self.families.dropped.with_label_values(&labels(reason)).inc();
        }
    }

    /// The frontend's thread was silent for too long so many times.
    pub fn handle_silences(&self, count: u64) {
        self.silences.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// A request was this long in a stage that the frontend alone knows.
    pub fn observe(&self, model: usize, stage: Stage, took: Span) {
        self.of(model).stages[stage as usize].observe(seconds(took.0));
    }

    /// All metrics in Prometheus's text format; the gauges are read now.
    #[must_use]
    pub fn text(&self, core: &Core, pending: impl Fn(usize) -> usize) -> String {
        if self.models.borrow().len() <= ALL_FROM_START_MAX {
            (0..self.models.borrow().len()).for_each(|index| drop(self.of(index)));
        }
        let has_traffic = |index: usize, known: &KnownModel| known.metrics.get().is_some() || pending(index) > 0;
        for (index, known) in
            self.models.borrow().iter().enumerate().filter(|(index, known)| has_traffic(*index, known))
        {
            self.pending.with_label_values(&[&known.name, &known.version]).set(pending(index) as i64);
            let served = core.models().get(index);
            // A model that nobody offers any more is not planned with anything.
            let NetworkTimes { ctrl, data, resp } = served.offer.map_or_else(Default::default, |offer| offer.network);
            for (part, time) in [("ctrl", ctrl), ("data", data), ("resp", resp)] {
                let gauge = self.network.with_label_values(&[&served.model.name[..], &served.model.version, part]);
                gauge.set(seconds(time.0));
            }
        }
        self.slots.set(core.outstanding() as i64);
        self.backends.set(core.backends_linked() as i64);
        count_up_to(&self.late_inputs, core.counters().late_inputs);
        self.schedulers.read(core);
        self.requests.read(core);
        self.host.read(core);
        TextEncoder::new()
            .encode_to_string(&self.registry.gather())
            .expect("names and labels were checked when they were made")
    }
}

/// Metrics that each model has one of.
struct Families {
    counters: [IntCounterVec; 4],
    durations: [IntCounterVec; 5],
    summaries: Option<[SummaryVec; 5]>,
    first_response: Option<HistogramVec>,
    failure: IntCounterVec,
    dropped: IntCounterVec,
    request: HistogramVec,
    batch: HistogramVec,
    stages: HistogramVec,
}

impl Families {
    fn new(registry: &Registry, config: MetricsConfig) -> Self {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let of_model = |(name, help): (&str, &str)| counter(name, help, &MODEL);
        let (start, factor, count) = BUCKETS;
        let durations = exponential_buckets(start, factor, count).expect("constants");
        let histogram = |name: &str, help: &str, labels: &[&str], buckets: Vec<f64>| {
            registered(registry, HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), labels))
        };
        let (by_reason, by_stage) = (["model", "version", "reason"], ["model", "version", "stage"]);
        Self {
            counters: [
                ("nv_inference_request_success", "Requests that were answered"),
                ("downbeat_request_late", "Of these, answered after their deadline"),
                ("nv_inference_count", "Rows that were answered"),
                ("nv_inference_exec_count", "Batches of which this frontend saw an answer"),
            ]
            .map(of_model),
            durations: DURATIONS
                .map(|(of, help)| of_model((&format!("nv_inference_{of}_duration_us"), &format!("Sum of {help}")))),
            summaries: config.summary_latencies.then(|| {
                DURATIONS.map(|(of, help)| {
                    let (name, help) = (format!("nv_inference_{of}_summary_us"), format!("Quantiles of {help}"));
                    registered(registry, SummaryVec::new(&name, &help))
                })
            }),
            first_response: config.histogram_latencies.then(|| {
                let name = "nv_inference_first_response_histogram_ms";
                histogram(name, "From admission to answer", &MODEL, FIRST_RESPONSE_BUCKETS_MS.into())
            }),
            failure: counter("nv_inference_request_failure", "Requests without an answer", &by_reason),
            dropped: counter(
                "downbeat_dropped",
                "Requests that were dropped, by the reason in its own terms",
                &by_reason,
            ),
            request: histogram("downbeat_request_seconds", "From admission to answer", &MODEL, durations.clone()),
            batch: histogram(
                "downbeat_batch_size",
                "Tasks in the batch of an answered request",
                &MODEL,
                exponential_buckets(1.0, 2.0, 9).expect("constants"),
            ),
            stages: histogram("downbeat_stage_seconds", "Where a request's time goes", &by_stage, durations),
        }
    }

    fn model(&self, name: &str, version: &str) -> ModelMetrics {
        let labels = [name, version];
        let [success, late, inferences, executions] =
            self.counters.each_ref().map(|family| family.with_label_values(&labels));
        for reason in TRITONS_REASONS {
            self.failure.with_label_values(&[name, version, reason]);
        }
        let summaries = self.summaries.as_ref();
        let stage = |(_, name): (Stage, &str)| self.stages.with_label_values(&[labels[0], labels[1], name]);
        ModelMetrics {
            success,
            late,
            inferences,
            executions,
            durations_us: self.durations.each_ref().map(|family| family.with_label_values(&labels)),
            summaries_us: summaries.map(|all| all.each_ref().map(|family| family.of(labels[0], labels[1]))),
            first_response_ms: self.first_response.as_ref().map(|family| family.with_label_values(&labels)),
            request: self.request.with_label_values(&labels),
            batch: self.batch.with_label_values(&labels),
            stages: Stage::ALL.map(stage).into(),
        }
    }
}

/// Clocks of members agree within an error, so a short stage can seem to end before it began.
fn seconds(ns: i64) -> f64 {
    ns.max(0) as f64 / 1e9
}

/// Triton's reasons of failure. It tells of all before there is any.
const TRITONS_REASONS: [&str; 4] = ["REJECTED", "CANCELED", "BACKEND", "OTHER"];

/// Which of [`TRITONS_REASONS`] it is.
fn tritons_reason(error: &InferError) -> &'static str {
    match error {
        InferError::Dropped(DropReason::Cancelled) => "CANCELED",
        InferError::Failed(_) | InferError::BadAnswer(_) => "BACKEND",
        InferError::Dropped(_)
        | InferError::NeverMet { .. }
        | InferError::WindowMissed
        | InferError::ArenaFull { .. }
        | InferError::ArenaShare { .. }
        | InferError::NoScheduler
        | InferError::NoBackend { .. }
        | InferError::Unloaded { .. }
        | InferError::LoadedAnew { .. } => "REJECTED",
        _ => "OTHER",
    }
}

/// Why a request was dropped, in our own terms; nothing if it was not.
pub(crate) fn drop_reason(error: &InferError) -> Option<&'static str> {
    Some(match error {
        InferError::Dropped(DropReason::Deadline) => "deadline",
        InferError::Dropped(DropReason::ColdStart) => "cold_start",
        InferError::Dropped(DropReason::QueueFull) => "queue_full",
        InferError::Dropped(DropReason::NoBackend) | InferError::NoBackend { .. } => "no_backend",
        InferError::Dropped(DropReason::Unloaded) | InferError::Unloaded { .. } => "unloaded",
        InferError::Dropped(DropReason::BackendLost) => "backend_lost",
        InferError::Dropped(DropReason::Cancelled) => "cancelled",
        InferError::Dropped(DropReason::InputLate) => "input_late",
        InferError::WindowMissed => "window_missed",
        InferError::NeverMet { .. } => "never_met",
        InferError::ArenaFull { .. } | InferError::ArenaShare { .. } => "slots_full",
        InferError::NoScheduler | InferError::SchedulerLost => "no_scheduler",
        InferError::NoAnswer { .. } => "no_answer",
        _ => return None,
    })
}
