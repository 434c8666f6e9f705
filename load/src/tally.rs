//! What was measured, for one model.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{answered::Answered, request::Verdict, timeline::Timeline};

/// Counts and latencies of one stream. Every request that was sent is in exactly one of `served`, `dropped`, `errors`.
#[derive(Debug, Clone)]
pub struct Tally {
    /// Requests that the arrival process sent.
    pub sent: u64,
    /// Answers with an output that is right, as far as that is known.
    pub served: u64,
    /// Served within the objective, counted from the intended send time.
    pub on_time: u64,
    /// Answered with an output that is not the expected one: so many of the errors.
    pub wrong: u64,
    /// For each input (by its index) of a classifier that was answered: whether the largest score is at the true class.
    pub classified: BTreeMap<usize, bool>,
    /// Refused or dropped by the service with a reason (such as HTTP 503), by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Everything else, by what happened.
    pub errors: BTreeMap<String, u64>,
    /// Stages of served requests.
    pub stages: Stages,
    /// Latencies of answers with an output, in nanoseconds from the intended send time.
    pub latencies_ns: Histogram<u64>,
    /// The same, over time.
    pub timeline: Timeline,
    /// When answers with an output came.
    pub answered: Answered,
    batch: Histogram<u64>,
    /// How much later than intended requests were sent.
    send_lag_ns: Histogram<u64>,
}

/// An answer with an output.
pub(crate) struct Served<'a> {
    /// When it came, after the start of the run.
    pub(crate) at: Duration,
    /// From the intended send time.
    pub(crate) latency: Duration,
    /// The objective.
    pub(crate) slo_ms: f64,
    /// The input's index.
    pub(crate) input: usize,
    pub(crate) verdict: Verdict,
    /// downbeat's header of that name.
    pub(crate) timing: Option<&'a str>,
}

/// The reasons kept apart; more of them share one entry.
const REASONS_MAX: usize = 16;
/// A minute: the longest latency that is told apart from longer ones.
const LATENCY_MAX: Duration = Duration::from_secs(60);

fn histogram(max: u64) -> Histogram<u64> {
    let mut histogram = Histogram::new_with_bounds(1, max, 3).expect("1 to a larger bound at three digits is valid");
    histogram.auto(false);
    histogram
}

/// An empty histogram for latencies in nanoseconds.
pub(crate) fn latency_histogram() -> Histogram<u64> {
    histogram(LATENCY_MAX.as_nanos() as u64)
}

impl Tally {
    /// Nothing yet of a run that sends for `span`.
    #[must_use]
    pub fn new(span: Duration) -> Self {
        Self {
            sent: 0,
            served: 0,
            on_time: 0,
            wrong: 0,
            classified: BTreeMap::new(),
            dropped: BTreeMap::new(),
            errors: BTreeMap::new(),
            stages: Stages::default(),
            latencies_ns: latency_histogram(),
            timeline: Timeline::new(span, latency_histogram()),
            answered: Answered::default(),
            batch: histogram(4096),
            send_lag_ns: latency_histogram(),
        }
    }

    /// A request was sent so much later than intended.
    pub(crate) fn record_sent(&mut self, lag: Duration) {
        self.sent += 1;
        self.send_lag_ns.saturating_record(lag.as_nanos() as u64);
    }

    /// An answer came. A wrong one is an error, and has no latency.
    pub(crate) fn record_served(&mut self, served: &Served<'_>) {
        let &Served { at, latency, slo_ms, input, verdict, timing } = served;
        if let Verdict::Wrong(how) = verdict {
            self.wrong += 1;
            self.record_error(how.to_owned());
            return;
        }
        let (latency_ns, latency_us) = (latency.as_nanos() as u64, latency.as_secs_f64() * 1e6);
        self.served += 1;
        self.latencies_ns.saturating_record(latency_ns);
        self.timeline.record(at, latency_ns);
        self.answered.record(at);
        self.on_time += u64::from(latency_us <= slo_ms * 1e3);
        if let Verdict::Right { classified: Some(right) } = verdict {
            self.classified.insert(input, right);
        }
        if let Some(timing) = timing.and_then(|text| Timing::from_str(text).ok()) {
            self.batch.saturating_record(timing.batch);
            self.stages.record(&timing, latency_us);
        }
    }

    pub(crate) fn record_dropped(&mut self, reason: String) {
        count(&mut self.dropped, reason, 1);
    }

    pub(crate) fn record_error(&mut self, what: String) {
        count(&mut self.errors, what, 1);
    }

    /// Requests that ended in one way or another.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.served + self.dropped.values().sum::<u64>() + self.errors.values().sum::<u64>()
    }

    /// The figures as `bench load --json` prints them.
    #[must_use]
    pub fn report(&self, name: &str, seconds: f64) -> Report {
        let quantile_ms = |q| (self.served > 0).then(|| self.latencies_ns.value_at_quantile(q) as f64 / 1e6);
        Report {
            name: name.to_owned(),
            offered_rps: self.sent as f64 / seconds,
            served_rps: self.served as f64 / seconds,
            on_time_fraction: if self.sent == 0 { 1.0 } else { self.on_time as f64 / self.sent as f64 },
            dropped: self.dropped.values().sum(),
            errors: self.errors.values().sum(),
            p50_ms: quantile_ms(0.5),
            p99_ms: quantile_ms(0.99),
            p999_ms: quantile_ms(0.999),
            batch_median: (!self.batch.is_empty()).then(|| self.batch.value_at_quantile(0.5)),
            send_lag_p99_ms: self.send_lag_ns.value_at_quantile(0.99) as f64 / 1e6,
            accuracy: self.accuracy(),
        }
    }

    /// All models as one: counts, latencies and reasons, without stages and classes.
    #[must_use]
    pub fn total<'a>(span: Duration, tallies: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut total = Self::new(span);
        for tally in tallies {
            total.sent += tally.sent;
            total.served += tally.served;
            total.on_time += tally.on_time;
            total.wrong += tally.wrong;
            for (sum, counts) in [(&mut total.dropped, &tally.dropped), (&mut total.errors, &tally.errors)] {
                counts.iter().for_each(|(reason, &n)| count(sum, reason.clone(), n));
            }
            let histograms = [
                (&mut total.latencies_ns, &tally.latencies_ns),
                (&mut total.batch, &tally.batch),
                (&mut total.send_lag_ns, &tally.send_lag_ns),
            ];
            for (sum, histogram) in histograms {
                sum.add(histogram).expect("histograms of one kind have the same bounds");
            }
        }
        total
    }

    /// Of the inputs that were answered, each counted once, the share whose class was found; `None` for a model that
    /// does not classify.
    #[must_use]
    pub fn accuracy(&self) -> Option<f64> {
        let right = self.classified.values().filter(|right| **right).count();
        (!self.classified.is_empty()).then(|| right as f64 / self.classified.len() as f64)
    }
}

/// Reasons that differ only in numbers are one, without these.
fn count(by_reason: &mut BTreeMap<String, u64>, reason: String, n: u64) {
    if let Some(known) = by_reason.get_mut(&reason) {
        *known += n;
        return;
    }
    let alike = by_reason.iter().find_map(|(known, &n)| Some((known.clone(), n, in_common(known, &reason)?)));
    if let Some((known, before, common)) = alike {
        by_reason.remove(&known);
        *by_reason.entry(common).or_default() += before + n;
        return;
    }
    let room = by_reason.len() < REASONS_MAX || by_reason.contains_key(&reason);
    *by_reason.entry(if room { reason } else { "other reasons".into() }).or_default() += n;
}

/// Stands for numbers that differ.
const NUMBER: &str = "..";

/// What two texts have in common that differ only in numbers; `None` if they differ in more.
fn in_common(one: &str, other: &str) -> Option<String> {
    let (one, other): (Vec<_>, Vec<_>) = (one.split(' ').collect(), other.split(' ').collect());
    let is_number = |word: &str| word == NUMBER || word.parse::<f64>().is_ok();
    let common = |(one, other)| {
        if one == other { Some(one) } else { (is_number(one) && is_number(other)).then_some(NUMBER) }
    };
    let words = one.iter().copied().zip(other.iter().copied()).map(common).collect::<Option<Vec<_>>>()?;
    (one.len() == other.len()).then(|| words.join(" "))
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
    /// Latency of answers with an output, from the intended send time; `None` if there were none.
    pub p50_ms: Option<f64>,
    /// As above.
    pub p99_ms: Option<f64>,
    /// As above.
    pub p999_ms: Option<f64>,
    /// Half of the requests ran in a batch of at least this size; `None` if no answer told its batch.
    pub batch_median: Option<u64>,
    /// 99 % of the requests were sent at most so much later than intended, which is part of their latency.
    pub send_lag_p99_ms: f64,
    /// Of a classifier's inputs that were answered, the share whose class was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

/// Where the time of served requests went: a histogram in microseconds for each stage, in the order in which a
/// request passes them.
#[derive(Debug, Clone)]
pub struct Stages(Vec<(&'static str, Histogram<u64>)>);

/// The stages between the instants of the timing header, each named as in `/metrics`, with the instant that ends it: to
/// the scheduler, deferral on purpose, the wait for a GPU, to the backend, its READs, the wait for the planned start or
/// for the batch before, execution, and the WRITE back.
const STAGES: [(&str, &str); 8] = [
    ("submit", "queued"),
    (DEFER, "due"),
    ("queue", "granted"),
    ("grant", "planned"),
    ("fetch", "fetched"),
    ("wait", "started"),
    (EXECUTE, "finished"),
    ("push", "answered"),
];
/// What the policy chose to wait, so that batches grow.
const DEFER: &str = "defer";
const EXECUTE: &str = "execute";
/// What is left of the latency: both ways of HTTP, parsing, and the client's own time.
const HTTP: &str = "http";
/// The latency without execution and without intentional deferral. Waiting for a GPU counts.
const OVERHEAD: &str = "overhead";

impl Default for Stages {
    fn default() -> Self {
        let names = STAGES.into_iter().map(|(stage, _)| stage).chain([HTTP, OVERHEAD]);
        Self(names.map(|stage| (stage, histogram(LATENCY_MAX.as_micros() as u64))).collect())
    }
}

impl Stages {
    /// Whether no answer told its stages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|(_, histogram)| histogram.is_empty())
    }

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
        let rest = [latency_us - answered_us, latency_us - of(EXECUTE) - of(DEFER)];
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
        let mut tally = Tally { sent: 2, ..Tally::new(Duration::from_secs(2)) };
        let timing = "queued=50;due=2550;granted=3050;planned=3100;fetched=3200;exec_at=3200;started=3200;\
                      finished=8700;answered=8750;deadline=25000;batch=7;gpu=1:0";
        let verdict = Verdict::Right { classified: Some(true) };
        let (at, latency) = (Duration::from_secs(1), Duration::from_millis(9));
        tally.record_served(&Served { at, latency, slo_ms: 25.0, input: 0, verdict, timing: Some(timing) });
        tally.record_dropped("late".into());
        assert_eq!(tally.ended(), tally.sent);
        let report = tally.report("m", 2.0);
        assert_eq!((report.batch_median, report.on_time_fraction, report.accuracy), (Some(7), 0.5, Some(1.0)));
        let rows: BTreeMap<_, _> = tally.stages.rows().map(|(stage, median, _)| (stage, median)).collect();
        let close = |stage: &str, us: f64| (rows[stage] - us).abs() <= us * 0.001 + 1.0;
        assert!(close("submit", 50.0) && close("defer", 2500.0) && close("queue", 500.0), "{rows:?}");
        assert!(close("execute", 5500.0) && close("push", 50.0), "{rows:?}");
        assert!(close("http", 250.0) && close("overhead", 1000.0), "{rows:?}");
    }

    #[test]
    fn a_total_has_the_requests_of_all_models() {
        let (mut fast, mut slow) = (Tally::new(Duration::from_secs(1)), Tally::new(Duration::from_secs(1)));
        let verdict = Verdict::Right { classified: None };
        for (tally, ms, n) in [(&mut fast, 1, 98), (&mut slow, 50, 2)] {
            for _ in 0..n {
                tally.record_sent(Duration::ZERO);
                let (at, latency) = (Duration::ZERO, Duration::from_millis(ms));
                tally.record_served(&Served { at, latency, slo_ms: 25.0, input: 0, verdict, timing: None });
            }
        }
        slow.record_sent(Duration::from_millis(3));
        slow.record_dropped("late".into());
        let total = Tally::total(Duration::from_secs(1), [&fast, &slow]);
        let report = total.report("total", 1.0);
        assert_eq!((total.sent, total.ended(), report.dropped, total.on_time), (101, 101, 1, 98));
        let (p50_ms, p99_ms) = (report.p50_ms.unwrap(), report.p99_ms.unwrap());
        assert!((p50_ms - 1.0).abs() < 0.01 && (p99_ms - 50.0).abs() < 0.1, "{report:?}");
    }

    /// One was once counted as served on time, and as an error without a reason.
    #[test]
    fn a_wrong_answer_is_one_error_with_a_reason() {
        let mut tally = Tally::new(Duration::from_secs(1));
        tally.record_sent(Duration::ZERO);
        let verdict = Verdict::Wrong("wrong");
        let (at, latency) = (Duration::ZERO, Duration::from_millis(1));
        tally.record_served(&Served { at, latency, slo_ms: 25.0, input: 0, verdict, timing: None });
        assert_eq!((tally.sent, tally.ended(), tally.served, tally.on_time, tally.wrong), (1, 1, 0, 0, 1));
        assert_eq!(tally.errors, BTreeMap::from([("wrong".to_owned(), 1)]));
        let report = tally.report("m", 1.0);
        assert_eq!((report.errors, report.on_time_fraction, report.served_rps), (1, 0.0, 0.0));
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        let mut tally = Tally::new(Duration::from_secs(1));
        let report = tally.report("m", 1.0);
        assert_eq!((report.p50_ms, report.p999_ms, report.batch_median), (None, None, None));
        assert!(crate::tables::models(&[report]).to_string().contains(" - "));
        let verdict = Verdict::Right { classified: None };
        let (at, latency) = (Duration::ZERO, Duration::from_millis(1));
        // As over gRPC, where nobody tells the batch.
        tally.record_served(&Served { at, latency, slo_ms: 25.0, input: 0, verdict, timing: None });
        let report = tally.report("m", 1.0);
        assert!(report.p50_ms.is_some() && report.batch_median.is_none() && tally.stages.is_empty());
    }

    #[test]
    fn reasons_that_differ_in_numbers_are_one() {
        let mut reasons = BTreeMap::new();
        for (reason, n) in [
            ("rate of 5; try again in 11.139 ms", 1),
            ("rate of 5; try again in 7 ms", 2),
            ("rate of 5; try again in 9.5 ms", 3),
            ("no model resnet50", 1),
            ("no model resnet101", 1),
        ] {
            count(&mut reasons, reason.to_owned(), n);
        }
        let found: Vec<_> = reasons.iter().map(|(reason, n)| (reason.as_str(), *n)).collect();
        let expected = [("no model resnet101", 1), ("no model resnet50", 1), ("rate of 5; try again in .. ms", 6)];
        assert_eq!(found, expected);
    }

    #[test]
    fn reasons_are_bounded() {
        let mut tally = Tally::new(Duration::from_secs(2));
        for n in 0..100 {
            tally.record_error(format!("error n{n}"));
        }
        assert_eq!(tally.errors.len(), REASONS_MAX + 1);
        assert_eq!(tally.errors["other reasons"], 100 - REASONS_MAX as u64);
    }
}
