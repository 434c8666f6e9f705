//! What a run measured. Only requests that arrived, and batches that started, after the warm-up count.

use std::fmt::Write;

use hdrhistogram::Histogram;
use proto::{LatencyProfile, Span, Timestamp};
use serde::Serialize;

/// The result of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The workload's name.
    pub workload: String,
    /// As on the command line.
    pub policy: String,
    /// The aggregate rate that was asked for.
    pub rate_rps: f64,
    /// Simulated span, with its warm-up.
    pub seconds: f64,
    /// The seed of all arrivals.
    pub seed: u64,
    /// In the order of the workload.
    pub models: Vec<ModelReport>,
    /// All models together.
    pub totals: Figures,
    /// Mean of batch sizes over batches.
    pub batch_mean: f64,
    /// Time that GPUs executed, of all GPUs' time.
    pub gpu_busy_fraction: f64,
    /// GPUs that ran at least one batch in a second, averaged over seconds.
    pub gpus_used_mean: f64,
    /// All models together: `batches[b - 1]` batches of size b.
    #[serde(skip)]
    pub batches: Vec<u64>,
    /// All models together: from the arrival of an answered request to the start of its batch, in microseconds.
    #[serde(skip)]
    pub queueing_us: Histogram<u64>,
}

/// One model's part.
#[derive(Debug, Clone, Serialize)]
pub struct ModelReport {
    /// Its name in the workload.
    pub name: String,
    /// What was measured.
    #[serde(flatten)]
    pub figures: Figures,
}

/// What was measured of one model, or of all.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// Requests a second that arrived.
    pub offered_rps: f64,
    /// Requests a second that were answered, in time or late.
    pub served_rps: f64,
    /// Answered in time, of all that arrived; 1 if none did.
    pub on_time_fraction: f64,
    /// Requests that were refused or given up.
    pub dropped: u64,
    /// Requests that failed otherwise.
    pub errors: u64,
    /// Latency of answered requests: median. `null` if there were none.
    pub p50_ms: Option<f64>,
    /// 99th percentile.
    pub p99_ms: Option<f64>,
    /// 99.9th percentile.
    pub p999_ms: Option<f64>,
    /// Median of batch sizes over batches; `null` if there were none.
    pub batch_median: Option<f64>,
}

impl Figures {
    /// Late or dropped, of all that arrived.
    #[must_use]
    pub fn bad_rate(&self) -> f64 {
        1.0 - self.on_time_fraction
    }
}

impl Report {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = format!(
            "{} under {} at {:.0} requests/s for {} s, seed {}\n\n{:<24}{:>12}{:>12}{:>10}{:>10}{:>10}{:>10}{:>10}{:>7}\n",
            self.workload,
            self.policy,
            self.rate_rps,
            self.seconds,
            self.seed,
            "model",
            "offered r/s",
            "served r/s",
            "on time",
            "dropped",
            "p50 ms",
            "p99 ms",
            "p99.9 ms",
            "batch"
        );
        let named = self.models.iter().map(|model| (model.name.as_str(), &model.figures));
        for (name, figures) in named.chain([("all", &self.totals)]) {
            let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
            let _ = writeln!(
                text,
                "{name:<24}{:>12.1}{:>12.1}{:>9.3}%{:>10}{:>10}{:>10}{:>10}{:>7}",
                figures.offered_rps,
                figures.served_rps,
                100.0 * figures.on_time_fraction,
                figures.dropped,
                number(figures.p50_ms),
                number(figures.p99_ms),
                number(figures.p999_ms),
                figures.batch_median.map_or_else(|| "-".to_owned(), |median| median.to_string()),
            );
        }
        let _ = write!(
            text,
            "\nGPUs busy {:.1} % of the time, {:.2} used in a second; mean batch {:.2}",
            100.0 * self.gpu_busy_fraction,
            self.gpus_used_mean,
            self.batch_mean
        );
        text
    }
}

/// Counts while a run goes on.
#[derive(Debug)]
pub struct Recorder {
    /// What counts: from the end of the warm-up to the end of arrivals.
    measured: (Timestamp, Timestamp),
    models: Vec<ModelRecord>,
    /// Microseconds.
    queueing: Histogram<u64>,
    busy: Span,
    /// By GPU: the last second, from the end of the warm-up, that it was seen busy in.
    last_second: Vec<i64>,
    gpu_seconds: u64,
}

#[derive(Debug)]
struct ModelRecord {
    slo: Span,
    offered: u64,
    on_time: u64,
    dropped: u64,
    /// Microseconds.
    latencies: Histogram<u64>,
    /// `batches[b - 1]` batches of size b.
    batches: Vec<u64>,
}

impl Recorder {
    /// For models with these SLOs and this many GPUs. `measured` is half open.
    #[must_use]
    pub fn new(measured: (Timestamp, Timestamp), slos: impl Iterator<Item = Span>, gpus: usize) -> Self {
        let record = |slo| ModelRecord {
            slo,
            offered: 0,
            on_time: 0,
            dropped: 0,
            latencies: histogram(),
            batches: vec![0; LatencyProfile::MAX_BATCH],
        };
        Self {
            measured,
            models: slos.map(record).collect(),
            queueing: histogram(),
            busy: Span::ZERO,
            last_second: vec![-1; gpus],
            gpu_seconds: 0,
        }
    }

    fn counts(&self, at: Timestamp) -> bool {
        self.measured.0 <= at && at < self.measured.1
    }

    /// A request of `model` arrived.
    pub fn arrived(&mut self, model: usize, at: Timestamp) {
        self.models[model].offered += u64::from(self.counts(at));
    }

    /// A request that arrived at `arrived_at` was dropped.
    pub fn dropped(&mut self, model: usize, arrived_at: Timestamp) {
        self.models[model].dropped += u64::from(self.counts(arrived_at));
    }

    /// A request that arrived at `arrived_at` was answered; its batch started at `started_at`.
    pub fn answered(&mut self, model: usize, arrived_at: Timestamp, started_at: Timestamp, answered_at: Timestamp) {
        if self.counts(arrived_at) {
            let record = &mut self.models[model];
            let latency = answered_at - arrived_at;
            let micros = |span: Span| (span.as_nanos() / 1000) as u64;
            record.on_time += u64::from(latency <= record.slo);
            record.latencies.record(micros(latency)).expect("the histogram resizes");
            self.queueing.record(micros(started_at - arrived_at)).expect("the histogram resizes");
        }
    }

    /// A batch of `size` ran to its end.
    pub fn executed(&mut self, model: usize, size: usize, started_at: Timestamp) {
        self.models[model].batches[size - 1] += u64::from(self.counts(started_at));
    }

    /// A GPU was busy.
    pub fn busy(&mut self, gpu: usize, started_at: Timestamp, finished_at: Timestamp) {
        let (from, to) = (started_at.max(self.measured.0), finished_at.min(self.measured.1));
        if from >= to {
            return;
        }
        self.busy += to - from;
        let second = |at: Timestamp| (at - self.measured.0).as_nanos() / 1_000_000_000;
        let (first, last) = (second(from).max(self.last_second[gpu] + 1), second(to - Span(1)));
        self.gpu_seconds += (last + 1 - first).max(0) as u64;
        self.last_second[gpu] = self.last_second[gpu].max(last);
    }

    /// The measured figures; what identifies the run is given.
    #[must_use]
    pub fn report(&self, names: &[&str], identity: (String, String, f64, f64, u64)) -> Report {
        let (workload, policy, rate_rps, seconds, seed) = identity;
        let span = (self.measured.1 - self.measured.0).as_secs_f64();
        let mut all = ModelRecord {
            slo: Span::ZERO,
            offered: 0,
            on_time: 0,
            dropped: 0,
            latencies: histogram(),
            batches: vec![0; LatencyProfile::MAX_BATCH],
        };
        for model in &self.models {
            all.offered += model.offered;
            all.on_time += model.on_time;
            all.dropped += model.dropped;
            all.latencies.add(&model.latencies).expect("all histograms are alike and resize");
            for (sum, count) in all.batches.iter_mut().zip(&model.batches) {
                *sum += count;
            }
        }
        let batches: u64 = all.batches.iter().sum();
        let tasks: u64 = (1..).zip(&all.batches).map(|(size, count): (u64, _)| size * count).sum();
        let of_model = |(name, record): (&&str, &ModelRecord)| ModelReport {
            name: (*name).to_owned(),
            figures: record.figures(span),
        };
        Report {
            workload,
            policy,
            rate_rps,
            seconds,
            seed,
            models: names.iter().zip(&self.models).map(of_model).collect(),
            totals: all.figures(span),
            batch_mean: if batches == 0 { 0.0 } else { tasks as f64 / batches as f64 },
            gpu_busy_fraction: self.busy.as_secs_f64() / (span * self.last_second.len() as f64),
            gpus_used_mean: self.gpu_seconds as f64 / span.ceil(),
            batches: all.batches,
            queueing_us: self.queueing.clone(),
        }
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are within hdrhistogram's bounds")
}

impl ModelRecord {
    fn figures(&self, span_s: f64) -> Figures {
        let percentile =
            |quantile| (!self.latencies.is_empty()).then(|| self.latencies.value_at_quantile(quantile) as f64 / 1e3);
        Figures {
            offered_rps: self.offered as f64 / span_s,
            served_rps: self.latencies.len() as f64 / span_s,
            on_time_fraction: if self.offered == 0 { 1.0 } else { self.on_time as f64 / self.offered as f64 },
            dropped: self.dropped,
            errors: 0,
            p50_ms: percentile(0.5),
            p99_ms: percentile(0.99),
            p999_ms: percentile(0.999),
            batch_median: median(&self.batches),
        }
    }
}

/// The median of counted sizes, `counts[b - 1]` of size b; between the two middle ones if their number is even.
fn median(counts: &[u64]) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    let at_rank = |rank: u64| {
        let mut seen = 0;
        counts.iter().position(|count| {
            seen += count;
            seen > rank
        })
    };
    let (low, high) = (at_rank(total.saturating_sub(1) / 2)?, at_rank(total / 2)?);
    Some((low + high) as f64 / 2.0 + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[0, 0]), None);
        assert_eq!(median(&[0, 1]), Some(2.0));
        assert_eq!(median(&[1, 0, 1]), Some(2.0));
        assert_eq!(median(&[2, 0, 3]), Some(3.0));
    }

    #[test]
    fn only_what_is_after_the_warm_up_counts() {
        let second = |s: f64| Timestamp((s * 1e9) as i64);
        let slo = Span::from_millis(10);
        let mut recorder = Recorder::new((second(1.0), second(11.0)), [slo].into_iter(), 2);
        for at in [0.5, 2.0, 3.0, 4.0] {
            recorder.arrived(0, second(at));
        }
        recorder.dropped(0, second(0.5));
        recorder.dropped(0, second(2.0));
        recorder.answered(0, second(3.0), second(3.002), second(3.010));
        recorder.answered(0, second(4.0), second(4.006), second(4.011));
        for (gpu, size, started_at, finished_at) in [(0, 3, 0.5, 1.5), (0, 5, 1.6, 3.2), (1, 7, 10.5, 12.0)] {
            recorder.executed(0, size, second(started_at));
            recorder.busy(gpu, second(started_at), second(finished_at));
        }
        let report = recorder.report(&["m"], ("w".into(), "p".into(), 1.0, 11.0, 0));
        let figures = &report.models[0].figures;
        assert_eq!((figures.offered_rps, figures.served_rps, figures.dropped), (0.3, 0.2, 1));
        assert!((figures.on_time_fraction - 1.0 / 3.0).abs() < 1e-12);
        assert!((figures.p99_ms.unwrap() - 11.0).abs() < 0.02);
        assert_eq!((figures.batch_median, report.batch_mean), (Some(6.0), 6.0));
        assert_eq!((report.batches[4], report.batches[6], report.batches.iter().sum::<u64>()), (1, 1, 2));
        let queueing = |quantile| report.queueing_us.value_at_quantile(quantile) / 10;
        assert_eq!((queueing(0.5), queueing(1.0)), (200, 600));
        assert!((report.gpu_busy_fraction - (0.5 + 1.6 + 0.5) / 20.0).abs() < 1e-9);
        // GPU 0 in seconds 0, 1 and 2, GPU 1 in second 9, of ten.
        assert!((report.gpus_used_mean - 0.4).abs() < 1e-12);
    }
}
