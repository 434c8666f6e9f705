//! The trace of a request: which spans it leaves for a collector of OpenTelemetry. A request is traced as its caller
//! says (W3C Trace Context), and one without a caller's word as the trace settings say.
//!
//! An [`OpenTrace`] is made when a request comes and gathers its stages; however the request ends, dropping it hands
//! the [`Trace`] on. The queue is bounded and never waited for: what does not fit is counted. `export.rs` sends it.

use std::rc::Rc;

use frontend::{InferError, desk::Desk, tasks::Timing};
use proto::{Span, Timestamp};
use tokio::sync::mpsc;

pub use context::TraceContext;

use crate::metrics::{self, Stage, TraceOutcome, Traces};

mod context;
pub mod otlp;

/// A part of a traced request's way, or all of it, in nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period {
    /// When it began.
    pub from_unix_ns: i64,
    /// When it ended; not before.
    pub to_unix_ns: i64,
}

/// A request that has ended and was traced.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Its caller's word, if it came with one.
    pub context: Option<TraceContext>,
    /// What it asked for.
    pub model: String,
    /// All of it.
    pub period: Period,
    /// Its stages, by name.
    pub stages: Vec<(&'static str, Period)>,
    /// Where it ran.
    pub ran: Option<Ran>,
    /// Why it has no answer, and the reason if it was dropped.
    pub error: Option<(String, Option<&'static str>)>,
}

/// Where a request ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// Tasks in its batch.
    pub batch_size: u16,
    /// The backend.
    pub backend: u32,
    /// Its GPU.
    pub gpu: u32,
}

/// Where traces go, from the requests' side.
pub struct Tracing {
    desk: Rc<Desk>,
    queue: mpsc::Sender<Trace>,
    counts: Traces,
    /// Nanoseconds since 1970.
    wall_clock: fn() -> i64,
}

impl Tracing {
    /// Hands traces to this queue, and counts those that find it full.
    #[must_use]
    pub fn new(desk: Rc<Desk>, queue: mpsc::Sender<Trace>, counts: Traces, wall_clock: fn() -> i64) -> Rc<Self> {
        Rc::new(Self { desk, queue, counts, wall_clock })
    }
}

/// What a request leaves behind while it is under way; nothing if it is not traced.
#[derive(Default)]
pub struct OpenTrace(Option<Box<Open>>);

struct Open {
    tracing: Rc<Tracing>,
    context: Option<TraceContext>,
    model: String,
    began: Timestamp,
    /// On our clock.
    stages: Vec<(Stage, Timestamp, Timestamp)>,
    ran: Option<Ran>,
    error: Option<(String, Option<&'static str>)>,
}

impl OpenTrace {
    /// A request for this model came at `began`.
    #[must_use]
    pub fn new(tracing: &Rc<Tracing>, context: Option<TraceContext>, model: &str, began: Timestamp) -> Self {
        let (tracing, model) = (Rc::clone(tracing), model.to_owned());
        Self(Some(Box::new(Open { tracing, context, model, began, stages: Vec::new(), ran: None, error: None })))
    }

    /// It was in this stage until now.
    pub fn stage(&mut self, stage: Stage, from: Timestamp) {
        if let Some(open) = &mut self.0 {
            open.stages.push((stage, from, open.tracing.desk.now()));
        }
    }

    /// Backends answered it, or each step of it.
    pub fn answered<'t>(&mut self, timings: impl IntoIterator<Item = &'t Timing>) {
        let Some(open) = &mut self.0 else { return };
        for timing in timings {
            open.ran = Some(Ran { batch_size: timing.batch_size, backend: timing.backend.0, gpu: timing.gpu });
            for (stage, from_ns, to_ns) in metrics::stages(timing) {
                let local = |ns| open.tracing.desk.with_core(|core| core.to_local(Timestamp(ns)));
                if let Some((from, to)) = local(from_ns).zip(local(to_ns)) {
                    open.stages.push((stage, from, to));
                }
            }
        }
        if let Some(&(Stage::Push, _, pushed)) = open.stages.last() {
            // Until the trace is dropped, with the reply.
            open.stages.push((Stage::Reply, pushed, pushed));
        }
    }

    /// It ended without an answer.
    pub fn failed(&mut self, error: &InferError) {
        if let Some(open) = &mut self.0 {
            open.error = Some((error.to_string(), metrics::drop_reason(error)));
        }
    }

    /// It was refused as wrong, if nothing else is known already.
    pub fn refused(&mut self, message: &str) {
        if let Some(open) = &mut self.0 {
            open.error.get_or_insert_with(|| (message.to_owned(), None));
        }
    }
}

impl Open {
    fn end(self) {
        let Self { tracing, context, model, began, stages, ran, mut error } = self;
        if ran.is_none() && error.is_none() {
            error = Some(("the client went away".to_owned(), Some("cancelled")));
        }
        let (now, unix_ns) = (tracing.desk.now(), (tracing.wall_clock)());
        let at = |local: Timestamp| unix_ns.saturating_sub((now - local).max(Span::ZERO).0);
        // Clocks of members agree within an error, so a short stage can seem to end before it began.
        let period = |from, to| Period { from_unix_ns: at(from), to_unix_ns: at(to).max(at(from)) };
        let stages = stages.into_iter().map(|(stage, from, to)| {
            let to = if stage == Stage::Reply { now } else { to };
            (stage.name(), period(from, to))
        });
        let trace = Trace { context, model, period: period(began, now), stages: stages.collect(), ran, error };
        if tracing.queue.try_send(trace).is_err() {
            tracing.counts.count(TraceOutcome::QueueFull, 1);
        }
    }
}

impl Drop for OpenTrace {
    fn drop(&mut self) {
        if let Some(open) = self.0.take() {
            open.end();
        }
    }
}
