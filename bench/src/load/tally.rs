//! What was measured, for one model.

use std::{collections::BTreeMap, str::FromStr};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::request::Verdict;

/// Counts and latencies of one stream. Every request that was sent is in exactly one of `served`, `dropped`, `errors`.
#[derive(Debug, Clone)]
pub struct Tally {
    /// Requests that the arrival process sent.
    pub sent: u64,
    /// Answers with an output.
    pub served: u64,
    /// Served within the objective, counted from the intended send time.
    pub on_time: u64,
    /// Served with an output that is not the expected one.
    pub wrong: u64,
    /// For each input (by its index) of a classifier that was answered: whether the largest score is at the true class.
    pub classified: BTreeMap<usize, bool>,
    /// Refused or dropped by the service with a reason (HTTP 503 and 504), by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Everything else, by what happened.
    pub errors: BTreeMap<String, u64>,
    /// Stages of served requests.
    pub stages: Stages,
    latency_us: Histogram<u64>,
    batch: Histogram<u64>,
}

/// The reasons kept apart; more of them share one entry.
const REASONS_MAX: usize = 16;
/// A minute: the longest latency that is told apart from longer ones.
const LATENCY_US_MAX: u64 = 60_000_000;

fn histogram(max: u64) -> Histogram<u64> {
    let mut histogram = Histogram::new_with_bounds(1, max, 3).expect("1 to a larger bound at three digits is valid");
    histogram.auto(false);
    histogram
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            sent: 0,
            served: 0,
            on_time: 0,
            wrong: 0,
            classified: BTreeMap::new(),
            dropped: BTreeMap::new(),
            errors: BTreeMap::new(),
            stages: Stages::default(),
            latency_us: histogram(LATENCY_US_MAX),
            batch: histogram(4096),
        }
    }
}

impl Tally {
    pub(super) fn record_served(
        &mut self,
        latency_us: f64,
        slo_ms: f64,
        answer: (usize, Verdict),
        timing: Option<&str>,
    ) {
        self.served += 1;
        self.latency_us.saturating_record(latency_us.round() as u64);
        self.on_time += u64::from(latency_us <= slo_ms * 1e3);
        match answer {
            (_, Verdict::Wrong) => self.wrong += 1,
            (_, Verdict::Right { classified: None }) => {}
            (input, Verdict::Right { classified: Some(right) }) => {
                self.classified.insert(input, right);
            }
        }
        if let Some(timing) = timing.and_then(|text| Timing::from_str(text).ok()) {
            self.batch.saturating_record(timing.batch);
            self.stages.record(&timing, latency_us);
        }
    }

    pub(super) fn record_dropped(&mut self, reason: String) {
        count(&mut self.dropped, reason);
    }

    pub(super) fn record_error(&mut self, what: String) {
        count(&mut self.errors, what);
    }

    /// Requests that ended in one way or another.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.served + self.dropped.values().sum::<u64>() + self.errors.values().sum::<u64>()
    }

    /// The figures as `bench load --json` prints them.
    #[must_use]
    pub fn report(&self, name: &str, seconds: f64) -> Report {
        let quantile_ms = |q| if self.served == 0 { 0.0 } else { self.latency_us.value_at_quantile(q) as f64 / 1e3 };
        Report {
            name: name.to_owned(),
            offered_rps: self.sent as f64 / seconds,
            served_rps: self.served as f64 / seconds,
            on_time_fraction: if self.sent == 0 { 1.0 } else { self.on_time as f64 / self.sent as f64 },
            dropped: self.dropped.values().sum(),
            errors: self.errors.values().sum::<u64>() + self.wrong,
            p50_ms: quantile_ms(0.5),
            p99_ms: quantile_ms(0.99),
            p999_ms: quantile_ms(0.999),
            batch_median: self.batch.value_at_quantile(0.5),
            accuracy: self.accuracy(),
        }
    }

    /// Of the inputs that were answered, each counted once, the share whose class was found; `None` for a model that
    /// does not classify.
    #[must_use]
    pub fn accuracy(&self) -> Option<f64> {
        let right = self.classified.values().filter(|right| **right).count();
        (!self.classified.is_empty()).then(|| right as f64 / self.classified.len() as f64)
    }
}

fn count(by_reason: &mut BTreeMap<String, u64>, reason: String) {
    let room = by_reason.len() < REASONS_MAX || by_reason.contains_key(&reason);
    *by_reason.entry(if room { reason } else { "other reasons".into() }).or_default() += 1;
}

/// The figures of one model.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The model.
    pub name: String,
    /// Requests sent a second.
    pub offered_rps: f64,
    /// Requests answered with an output, a second.
    pub served_rps: f64,
    /// Of all requests sent, those answered within the objective.
    pub on_time_fraction: f64,
    /// Refused or dropped with a reason.
    pub dropped: u64,
    /// Wrong outputs and everything else that went wrong.
    pub errors: u64,
    /// Latency of answers with an output, from the intended send time.
    pub p50_ms: f64,
    /// As above.
    pub p99_ms: f64,
    /// As above.
    pub p999_ms: f64,
    /// Half of the requests ran in a batch of at least this size.
    pub batch_median: u64,
    /// Of a classifier's inputs that were answered, the share whose class was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

/// Where the time of served requests went: a histogram in microseconds for each stage, in the order in which a
/// request passes them.
#[derive(Debug, Clone)]
pub struct Stages(Vec<(&'static str, Histogram<u64>)>);

/// The stages between the instants of the timing header, each named with the instant that ends it:
/// to the scheduler, deferral and the wait for a GPU, to the backend, its READs, the wait for the planned start or for
/// the batch before, execution, and the WRITE back.
const STAGES: [(&str, &str); 7] = [
    ("submit", "queued"),
    ("queue", "granted"),
    ("plan", "planned"),
    ("fetch", "fetched"),
    ("wait", "started"),
    ("execute", "finished"),
    ("push", "answered"),
];
/// What is left of the latency: both ways of HTTP, parsing, and the client's own time.
const HTTP: &str = "http";
/// The latency without execution and without what the policy chose to wait.
const OVERHEAD: &str = "overhead";

impl Default for Stages {
    fn default() -> Self {
        let names = STAGES.into_iter().map(|(stage, _)| stage).chain([HTTP, OVERHEAD]);
        Self(names.map(|stage| (stage, histogram(LATENCY_US_MAX))).collect())
    }
}

impl Stages {
    /// Name, median and p99 in microseconds of each stage, in order; the last is `overhead`: latency less execution
    /// and intentional deferral.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, f64, f64)> {
        self.0.iter().map(|(stage, histogram)| {
            (*stage, histogram.value_at_quantile(0.5) as f64, histogram.value_at_quantile(0.99) as f64)
        })
    }

    fn record(&mut self, timing: &Timing, latency_us: f64) {
        let answered_us = timing.stage_us.iter().sum::<f64>();
        let of = |name| STAGES.iter().position(|(stage, _)| *stage == name).map_or(0.0, |at| timing.stage_us[at]);
        let rest = [latency_us - answered_us, latency_us - of("execute") - of("queue")];
        for ((_, histogram), us) in self.0.iter_mut().zip(timing.stage_us.into_iter().chain(rest)) {
            histogram.saturating_record(us.max(0.0).round() as u64);
        }
    }
}

/// The timing header of an answer: `name=value` entries separated by `;`, of which the instants count microseconds from
/// admission.
#[derive(Debug)]
struct Timing {
    stage_us: [f64; STAGES.len()],
    batch: u64,
}

impl FromStr for Timing {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let entries: BTreeMap<&str, &str> = text.split(';').filter_map(|entry| entry.split_once('=')).collect();
        let number = |name: &str| entries.get(name).and_then(|value| value.parse::<f64>().ok()).ok_or(());
        let mut stage_us = [0.0; STAGES.len()];
        let mut begin = 0.0;
        for (us, (_, end)) in stage_us.iter_mut().zip(STAGES) {
            let end = number(end)?;
            *us = end - begin;
            begin = end;
        }
        Ok(Self { stage_us, batch: number("batch")? as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_and_what_is_left_of_them() {
        let mut tally = Tally { sent: 2, ..Tally::default() };
        let timing = "queued=50;granted=3050;planned=3100;fetched=3200;exec_at=3200;started=3200;finished=8700;\
                      answered=8750;deadline=25000;batch=7;gpu=1:0";
        tally.record_served(9_000.0, 25.0, (0, Verdict::Right { classified: Some(true) }), Some(timing));
        tally.record_dropped("late".into());
        assert_eq!(tally.ended(), tally.sent);
        let report = tally.report("m", 2.0);
        assert_eq!((report.batch_median, report.on_time_fraction, report.accuracy), (7, 0.5, Some(1.0)));
        let rows: BTreeMap<_, _> = tally.stages.rows().map(|(stage, median, _)| (stage, median)).collect();
        let close = |stage: &str, us: f64| (rows[stage] - us).abs() <= us * 0.001 + 1.0;
        assert!(close("submit", 50.0) && close("execute", 5500.0) && close("push", 50.0), "{rows:?}");
        assert!(close("http", 250.0) && close("overhead", 500.0), "{rows:?}");
    }

    #[test]
    fn reasons_are_bounded() {
        let mut tally = Tally::default();
        for n in 0..100 {
            tally.record_error(format!("error {n}"));
        }
        assert_eq!(tally.errors.len(), REASONS_MAX + 1);
        assert_eq!(tally.errors["other reasons"], 100 - REASONS_MAX as u64);
    }
}
