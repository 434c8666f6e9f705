//! What is counted of one model, or of several together.
//!
//! One thread counts, others read while it does: each number is right at some instant of the scrape.

use std::{
    array,
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use frontend::{
    InferError,
    tasks::{Reply, Timing},
};
use prometheus::proto::{Bucket, Histogram};
use proto::{Span, scheduler_to_frontend::DropReason};

use super::stages::{Stage, stages};

/// Upper bounds of durations, in nanoseconds: 20 us to 10 s, each twice the one before.
pub(super) const DURATION_BOUNDS_NS: [u64; 20] = doubled(20_000);
/// Upper bounds of batches, in tasks: 1 to 256.
const BATCH_BOUNDS: [u64; 9] = doubled(1);
/// Those of `nv_inference_first_response_histogram_ms`, in nanoseconds: Triton's 100 ms to 5 s.
const FIRST_RESPONSE_BOUNDS_NS: [u64; 4] = [100_000_000, 500_000_000, 2_000_000_000, 5_000_000_000];
const NS_PER_S: f64 = 1e9;
const NS_PER_MS: f64 = 1e6;

/// What Triton sums up of answered requests, and what it is here.
pub(super) const DURATIONS: [(&str, &str); 5] = [
    ("request", "the time of answered requests"),
    ("queue", "their time until a GPU was granted"),
    ("compute_input", "the time of fetching inputs"),
    ("compute_infer", "the time of execution"),
    ("compute_output", "the time of pushing outputs"),
];

/// What Triton tells of the answers that were kept, of models that keep them.
pub(super) const CACHE: [(&str, &str); 4] = [
    ("nv_cache_num_hits_per_model", "Requests that were answered by what was kept"),
    ("nv_cache_num_misses_per_model", "Requests whose answer was looked for and had not been kept"),
    ("nv_cache_hit_duration_per_model", "Microseconds in which answers were found, or waited for"),
    ("nv_cache_miss_duration_per_model", "Microseconds in which answers were looked for and not found"),
];

/// Triton's reasons of failure. It tells of all before there is any.
pub(super) const TRITONS_REASONS: [&str; 4] = ["REJECTED", "CANCELED", "BACKEND", "OTHER"];

const fn doubled<const N: usize>(first: u64) -> [u64; N] {
    let mut bounds = [first; N];
    let mut at = 1;
    while at < N {
        bounds[at] = 2 * bounds[at - 1];
        at += 1;
    }
    bounds
}

/// A number that only grows; one thread adds to it.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    fn add(&self, more: u64) {
        // There is one writer, so nothing is lost between the two.
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// How many values were at most each bound, and their sum.
#[derive(Debug)]
struct Buckets<const N: usize> {
    /// Values above the bound before, up to this one.
    up_to: [Count; N],
    all: Count,
    sum: Count,
}

impl<const N: usize> Default for Buckets<N> {
    fn default() -> Self {
        Self { up_to: array::from_fn(|_| Count::default()), all: Count::default(), sum: Count::default() }
    }
}

impl<const N: usize> Buckets<N> {
    fn observe(&self, bounds: &[u64; N], value: u64) {
        if let Some(count) = self.up_to.get(bounds.partition_point(|bound| *bound < value)) {
            count.add(1);
        }
        self.all.add(1);
        self.sum.add(value);
    }

    fn absorb(&self, other: &Self) {
        self.up_to.iter().zip(&other.up_to).for_each(|(count, other)| count.add(other.get()));
        self.all.add(other.all.get());
        self.sum.add(other.sum.get());
    }

    /// With so many of the bounds' units in one of the histogram's.
    fn told(&self, bounds: &[u64; N], unit: f64) -> Histogram {
        let mut below = 0;
        let buckets = bounds.iter().zip(&self.up_to).map(|(bound, count)| {
            below += count.get();
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound as f64 / unit);
            bucket.set_cumulative_count(below);
            bucket
        });
        let buckets = buckets.collect();
        let mut histogram = Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(self.all.get().max(below));
        histogram.set_sample_sum(self.sum.get() as f64 / unit);
        histogram
    }
}

/// All counts of requests.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) success: Count,
    pub(super) late: Count,
    pub(super) inferences: Count,
    pub(super) executions: Count,
    /// In the order of [`DURATIONS`].
    pub(super) durations_us: [Count; 5],
    /// In the order of [`TRITONS_REASONS`].
    pub(super) failures: [Count; 4],
    /// In the order of [`CACHE`].
    pub(super) cache: [Count; 4],
    dropped: Mutex<BTreeMap<&'static str, u64>>,
    first_response: Buckets<4>,
    request: Buckets<20>,
    batch: Buckets<9>,
    /// In the order of [`Stage::ALL`].
    stages: [Buckets<20>; 11],
}

impl Counts {
    /// A request was answered. Returns its durations in nanoseconds, in the order of [`DURATIONS`].
    pub(super) fn handle_success(&self, reply: &Reply, new_executions: u64) -> [u64; 5] {
        let (timing, stamps) = (&reply.timing, &reply.timing.stamps);
        let (admitted, answered) = (timing.admitted_at.0, timing.answered_at.0);
        self.success.add(1);
        self.late.add(u64::from(timing.answered_at > timing.deadline));
        self.inferences.add(reply.rows as u64);
        self.executions.add(new_executions);
        let took = not_negative(answered - admitted);
        self.request.observe(&DURATION_BOUNDS_NS, took);
        self.first_response.observe(&FIRST_RESPONSE_BOUNDS_NS, took);
        self.batch.observe(&BATCH_BOUNDS, timing.batch_size.into());
        let durations = [
            took,
            not_negative(stamps.granted_at_ns - admitted),
            not_negative(stamps.fetched_at_ns - stamps.planned_at_ns),
            not_negative(stamps.finished_at_ns - stamps.started_at_ns),
            not_negative(answered - stamps.finished_at_ns),
        ];
        self.durations_us.iter().zip(durations).for_each(|(count, ns)| count.add(ns / 1000));
        // The steps of an ensemble have been in stages, and are counted themselves.
        let stages = stages(timing).into_iter().filter(|_| !reply.batches.is_empty());
        stages.for_each(|(stage, from, to)| self.handle_stage(stage, to - from));
        durations
    }

    /// A request was answered by what was kept. Returns how many nanoseconds that took.
    pub(super) fn handle_cache_hit(&self, timing: &Timing) -> u64 {
        let took = not_negative((timing.answered_at - timing.admitted_at).0);
        self.success.add(1);
        self.late.add(u64::from(timing.answered_at > timing.deadline));
        self.request.observe(&DURATION_BOUNDS_NS, took);
        self.first_response.observe(&FIRST_RESPONSE_BOUNDS_NS, took);
        self.durations_us[0].add(took / 1000);
        let [hits, _, hit_us, _] = &self.cache;
        hits.add(1);
        hit_us.add(took / 1000);
        took
    }

    /// A request's answer was looked for so long, and not found.
    pub(super) fn handle_cache_miss(&self, took: Span) {
        let [_, misses, _, miss_us] = &self.cache;
        misses.add(1);
        miss_us.add(not_negative(took.0) / 1000);
    }

    /// Whether an answer was ever looked for.
    pub(super) fn has_looked(&self) -> bool {
        self.cache.iter().any(|count| count.get() > 0)
    }

    /// A request was so many nanoseconds in a stage.
    pub(super) fn handle_stage(&self, stage: Stage, ns: i64) {
        self.stages[stage as usize].observe(&DURATION_BOUNDS_NS, not_negative(ns));
    }

    /// A request ended without an answer.
    pub(super) fn handle_failure(&self, error: &InferError) {
        self.failures[tritons_reason(error)].add(1);
        if let Some(reason) = drop_reason(error) {
            *self.dropped.lock().unwrap_or_else(PoisonError::into_inner).entry(reason).or_default() += 1;
        }
    }

    /// Adds what others have counted.
    pub(super) fn absorb(&self, other: &Self) {
        for (count, more) in self.numbers().zip(other.numbers()) {
            count.add(more.get());
        }
        self.first_response.absorb(&other.first_response);
        self.request.absorb(&other.request);
        self.batch.absorb(&other.batch);
        self.stages.iter().zip(&other.stages).for_each(|(stage, other)| stage.absorb(other));
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        for (reason, count) in other.dropped() {
            *dropped.entry(reason).or_default() += count;
        }
    }

    fn numbers(&self) -> impl Iterator<Item = &Count> {
        let ones = [&self.success, &self.late, &self.inferences, &self.executions];
        ones.into_iter().chain(&self.durations_us).chain(&self.failures).chain(&self.cache)
    }

    /// Requests that were dropped, by [`drop_reason`].
    pub(super) fn dropped(&self) -> BTreeMap<&'static str, u64> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn first_response_ms(&self) -> Histogram {
        self.first_response.told(&FIRST_RESPONSE_BOUNDS_NS, NS_PER_MS)
    }

    /// Answered requests by how long they took, in the order of their bounds; those beyond come last.
    pub(super) fn took(&self) -> [u64; DURATION_BOUNDS_NS.len() + 1] {
        let below = self.request.up_to.each_ref().map(Count::get);
        let beyond = self.request.all.get().saturating_sub(below.iter().sum());
        array::from_fn(|at| below.get(at).copied().unwrap_or(beyond))
    }

    /// Answered requests that were in a batch, and the tasks of their batches.
    pub(super) fn batches(&self) -> (u64, u64) {
        (self.batch.all.get(), self.batch.sum.get())
    }

    pub(super) fn request_seconds(&self) -> Histogram {
        self.request.told(&DURATION_BOUNDS_NS, NS_PER_S)
    }

    pub(super) fn batch_size(&self) -> Histogram {
        self.batch.told(&BATCH_BOUNDS, 1.0)
    }

    pub(super) fn stage_seconds(&self, stage: Stage) -> Histogram {
        self.stages[stage as usize].told(&DURATION_BOUNDS_NS, NS_PER_S)
    }
}

/// How many nanoseconds this share of answered requests took at most, of their counts by duration: interpolated between
/// bounds, and the last bound for what is beyond it, as `histogram_quantile` of Prometheus does. `None` if there are
/// none.
pub(super) fn quantile_ns(took: &[u64; DURATION_BOUNDS_NS.len() + 1], quantile: f64) -> Option<f64> {
    let (rank, mut below) = (took.iter().sum::<u64>() as f64 * quantile, 0.0);
    let mut from = 0.0;
    for (count, bound) in took.iter().zip(DURATION_BOUNDS_NS) {
        let (count, to) = (*count as f64, bound as f64);
        if count > 0.0 && below + count >= rank {
            return Some(from + (to - from) * (rank - below) / count);
        }
        (below, from) = (below + count, to);
    }
    (rank > 0.0).then_some(from)
}

/// Clocks of members agree within an error, so a short stage can seem to end before it began.
fn not_negative(ns: i64) -> u64 {
    u64::try_from(ns).unwrap_or(0)
}

/// Which of [`TRITONS_REASONS`] it is, by its index.
fn tritons_reason(error: &InferError) -> usize {
    match error.cause() {
        InferError::Dropped(DropReason::Cancelled) => 1,
        InferError::Failed(_) | InferError::BadAnswer(_) | InferError::NotWritten { .. } => 2,
        InferError::Dropped(_)
        | InferError::NeverMet { .. }
        | InferError::WindowMissed
        | InferError::ArenaFull { .. }
        | InferError::ArenaShare { .. }
        | InferError::NoScheduler
        | InferError::NoBackend { .. }
        | InferError::NotLoaded { .. }
        | InferError::Unloaded { .. }
        | InferError::LoadedAnew { .. } => 0,
        _ => 3,
    }
}

/// Why a request was dropped, in our own terms; nothing if it was not.
pub(crate) fn drop_reason(error: &InferError) -> Option<&'static str> {
    Some(match error.cause() {
        InferError::Dropped(DropReason::Deadline) => "deadline",
        InferError::Dropped(DropReason::ColdStart) => "cold_start",
        InferError::Dropped(DropReason::QueueFull) => "queue_full",
        InferError::Dropped(DropReason::NoBackend) | InferError::NoBackend { .. } | InferError::NotLoaded { .. } => {
            "no_backend"
        }
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
