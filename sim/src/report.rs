//! What a run measured. Only requests that arrived, and batches that started, after the warm-up count.

mod predictions;

use std::fmt::Write;

use hdrhistogram::Histogram;
use proto::{LatencyProfile, ModelId, Span, Timestamp};
use scheduler::{Predicted, Predictions, predictions::Action};
use serde::Serialize;

use crate::{
    arrivals::Request,
    cluster::Options,
    workload::{Class, Model, Workload},
};
pub use predictions::{ActionReport, PredictionReport, SidesReport, TailReport};

/// Tables have a line for each model up to so many.
const MODELS_SHOWN: usize = 200;

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
    /// What was asked for, in the order of the workload: its graphs, if it has any, otherwise its models.
    pub models: Vec<ModelReport>,
    /// What the graphs ask.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepReport>,
    /// All requests with an SLO.
    pub totals: Figures,
    /// All requests without one, if any class has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub background: Option<Figures>,
    /// Mean of batch sizes over batches.
    pub batch_mean: f64,
    /// Time that GPUs executed, of all GPUs' time.
    pub gpu_busy_fraction: f64,
    /// GPUs that ran at least one batch in a second, averaged over seconds.
    pub gpus_used_mean: f64,
    /// Where GPUs' memory is short: what went in and out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryReport>,
    /// How far actions were off what was planned.
    pub predicted: PredictionReport,
    /// The same, of every length.
    #[serde(skip)]
    pub predictions: Predictions,
    /// All models together: `batches[b - 1]` batches of size b.
    #[serde(skip)]
    pub batches: Vec<u64>,
    /// All models together: from the arrival of an answered request to the start of its batch, in microseconds.
    #[serde(skip)]
    pub queueing_us: Histogram<u64>,
}

/// What went into GPUs' memory and out of it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MemoryReport {
    /// Requests whose model was in no GPU's memory when they arrived, of all.
    pub cold_fraction: f64,
    /// Models that were loaded, a second.
    pub loads_per_s: f64,
    /// Of these, models that were read from disk, a second.
    pub reads_per_s: f64,
    /// Models that made room, a second.
    pub unloads_per_s: f64,
    /// Loads that could not start in their windows, a second.
    pub loads_failed_per_s: f64,
    /// Time that links copied weights, of all links' time.
    pub link_busy_fraction: f64,
}

/// One model's part.
#[derive(Debug, Clone, Serialize)]
pub struct ModelReport {
    /// Its name in the workload.
    pub name: String,
    /// What was measured.
    #[serde(flatten)]
    pub figures: Figures,
    /// Its classes, in the order of the workload; none if there is but one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassReport>,
}

impl ModelReport {
    /// Late or dropped, of all requests of the class that fared worst.
    #[must_use]
    pub fn worst_bad_rate(&self) -> f64 {
        self.classes.iter().map(ClassReport::bad_rate).fold(self.figures.bad_rate(), f64::max)
    }
}

/// A model that graphs ask.
#[derive(Debug, Clone, Serialize)]
pub struct StepReport {
    /// Its name in the workload.
    pub model: String,
    /// Median of batch sizes over batches; `null` if there were none.
    pub batch_median: Option<f64>,
    /// Of the answers that variants of one task have given, its part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered_fraction: Option<f64>,
}

impl StepReport {
    /// Its line in a table, where batch sizes end in this column behind names.
    #[must_use]
    pub fn line(&self, column: usize) -> String {
        let median = self.batch_median.map_or_else(|| "-".to_owned(), |median| median.to_string());
        let answered =
            self.answered_fraction.map_or_else(String::new, |part| format!("{:.3} % of answers", 100.0 * part));
        format!("  step {:<17}{answered:>24}{median:>width$}", self.model, width = column - 24)
    }
}

/// What was measured of the requests of one class of a model.
#[derive(Debug, Clone, Serialize)]
pub struct ClassReport {
    /// Its SLO; `null` if it has none.
    pub slo_ms: Option<f64>,
    /// Requests a second that arrived.
    pub offered_rps: f64,
    /// Answered in time, of all that arrived; 1 if none did.
    pub on_time_fraction: f64,
    /// Requests that were refused or given up.
    pub dropped: u64,
    /// Latency of answered requests: median. `null` if there were none.
    pub p50_ms: Option<f64>,
    /// 99th percentile.
    pub p99_ms: Option<f64>,
}

impl ClassReport {
    /// Late or dropped, of all that arrived.
    #[must_use]
    pub fn bad_rate(&self) -> f64 {
        1.0 - self.on_time_fraction
    }
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
    /// 99.99th percentile.
    pub p9999_ms: Option<f64>,
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
            "{} under {} at {:.0} requests/s for {} s, seed \
             {}\n\n{:<24}{:>12}{:>12}{:>10}{:>10}{:>10}{:>10}{:>10}{:>7}\n",
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
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
        let named = self.models.iter().map(|model| (model.name.as_str(), &model.figures, &model.classes[..]));
        // Of thousands of models nobody reads a line each.
        let shown = if self.models.len() > MODELS_SHOWN { 0 } else { self.models.len() };
        let background = self.background.iter().map(|figures| ("all without SLO", figures, &[][..]));
        for (name, figures, classes) in named.take(shown).chain([("all", &self.totals, &[][..])]).chain(background) {
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
            for class in classes {
                let _ = writeln!(
                    text,
                    "{:<24}{:>12.1}{:>12}{:>9.3}%{:>10}{:>10}{:>10}",
                    class.slo_ms.map_or_else(|| "  without SLO".to_owned(), |slo_ms| format!("  SLO {slo_ms} ms")),
                    class.offered_rps,
                    "",
                    100.0 * class.on_time_fraction,
                    class.dropped,
                    number(class.p50_ms),
                    number(class.p99_ms),
                );
            }
        }
        self.steps.iter().for_each(|step| text += &(step.line(79) + "\n"));
        let _ = write!(
            text,
            "\nGPUs busy {:.1} % of the time, {:.2} used in a second; mean batch {:.2}",
            100.0 * self.gpu_busy_fraction,
            self.gpus_used_mean,
            self.batch_mean
        );
        if let Some(memory) = self.memory {
            let _ = write!(
                text,
                "\n{:.2} % of requests cold; {:.1} loads a second ({:.1} from disk, {:.1} failed), {:.1} unloads; \
                 links busy {:.1} % of the time",
                100.0 * memory.cold_fraction,
                memory.loads_per_s,
                memory.reads_per_s,
                memory.loads_failed_per_s,
                memory.unloads_per_s,
                100.0 * memory.link_busy_fraction
            );
        }
        self.predicted.describe(&mut text);
        text
    }
}

/// Counts while a run goes on.
#[derive(Debug)]
pub struct Recorder {
    /// What counts: from the end of the warm-up to the end of arrivals.
    measured: (Timestamp, Timestamp),
    /// What is asked for, by number and class.
    asked: Vec<Vec<Record>>,
    /// By model: `batches[b - 1]` batches of size b.
    batches: Vec<Vec<u64>>,
    /// By model: answers that it gave as one of several variants.
    answers: Vec<u64>,
    /// Microseconds.
    queueing: Histogram<u64>,
    busy: Span,
    /// By GPU: the last second, from the end of the warm-up, that it was seen busy in.
    last_second: Vec<i64>,
    gpu_seconds: u64,
    cold: u64,
    loads: u64,
    reads: u64,
    loads_failed: u64,
    unloads: u64,
    link_busy: Span,
    predictions: Predictions,
}

/// Of the requests of one class, or of several.
#[derive(Debug, Clone)]
struct Record {
    slo: Span,
    offered: u64,
    on_time: u64,
    dropped: u64,
    /// Microseconds.
    latencies: Histogram<u64>,
}

impl Recorder {
    /// For the models, graphs and GPUs of this workload. `measured` is half open.
    #[must_use]
    pub fn new(measured: (Timestamp, Timestamp), workload: &Workload) -> Self {
        let records = |classes: &[Class]| classes.iter().map(|class| Record::new(class.slo)).collect();
        let gpus = workload.gpus as usize;
        Self {
            measured,
            asked: workload.asked().map(|(_, classes)| records(classes)).collect(),
            batches: vec![vec![0; LatencyProfile::MAX_BATCH]; workload.models.len()],
            answers: vec![0; workload.models.len()],
            queueing: histogram(),
            busy: Span::ZERO,
            last_second: vec![-1; gpus],
            gpu_seconds: 0,
            cold: 0,
            loads: 0,
            reads: 0,
            loads_failed: 0,
            unloads: 0,
            link_busy: Span::ZERO,
            predictions: Predictions::default(),
        }
    }

    fn counts(&self, at: Timestamp) -> bool {
        self.measured.0 <= at && at < self.measured.1
    }

    /// The record of a request's class, if the request counts.
    fn record(&mut self, request: Request) -> Option<&mut Record> {
        let counts = self.counts(request.arrived_at);
        counts.then(|| &mut self.asked[request.model.0 as usize][request.class as usize])
    }

    /// A request arrived; its model was in no GPU's memory if it is cold.
    pub fn arrived(&mut self, request: Request, is_cold: bool) {
        if let Some(record) = self.record(request) {
            record.offered += 1;
            self.cold += u64::from(is_cold);
        }
    }

    /// A load ended; if it began, it did at `started_at`, with reading from disk for `read`.
    pub fn loaded(
        &mut self,
        predicted: Predicted,
        (started_at, read): (Option<Timestamp>, Span),
        finished_at: Timestamp,
    ) {
        if !self.counts(finished_at) {
            return;
        }
        match started_at {
            Some(started_at) => {
                self.loads += 1;
                self.reads += u64::from(read > Span::ZERO);
                self.link_busy += finished_at - started_at;
                self.predicted(Action::Load, predicted, (started_at, finished_at));
            }
            None => self.loads_failed += 1,
        }
    }

    /// A model made room.
    pub fn unloaded(&mut self, at: Timestamp) {
        self.unloads += u64::from(self.counts(at));
    }

    /// A request was dropped.
    pub fn dropped(&mut self, request: Request) {
        if let Some(record) = self.record(request) {
            record.dropped += 1;
        }
    }

    /// A request was answered; its batch started at `started_at`, if it was but one.
    pub fn answered(&mut self, request: Request, started_at: Option<Timestamp>, answered_at: Timestamp) {
        let arrived_at = request.arrived_at;
        if let Some(record) = self.record(request) {
            let latency = answered_at - arrived_at;
            let micros = |span: Span| (span.as_nanos() / 1000) as u64;
            record.on_time += u64::from(latency <= record.slo);
            record.latencies.record(micros(latency)).expect("the histogram resizes");
            if let Some(started_at) = started_at {
                self.queueing.record(micros(started_at - arrived_at)).expect("the histogram resizes");
            }
        }
    }

    /// Of several variants this one has answered.
    pub fn answered_by(&mut self, request: Request, variant: Option<ModelId>) {
        if let Some(variant) = variant.filter(|_| self.counts(request.arrived_at)) {
            self.answers[variant.0 as usize] += 1;
        }
    }

    /// A batch of `size` ran to its end.
    pub fn executed(&mut self, model: usize, size: usize, started_at: Timestamp) {
        self.batches[model][size - 1] += u64::from(self.counts(started_at));
    }

    /// An action ran.
    pub fn predicted(&mut self, action: Action, predicted: Predicted, (from, to): (Timestamp, Timestamp)) {
        if self.counts(to) {
            self.predictions.handle_ended(action, predicted, to - from, to);
        }
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

    /// What was measured in the run of this workload with these options.
    #[must_use]
    pub fn report(&self, workload: &Workload, options: &Options) -> Report {
        let span = (self.measured.1 - self.measured.0).as_secs_f64();
        let all = Record::sum(self.asked.iter().flatten());
        let (background, others): (Vec<&Record>, Vec<&Record>) =
            self.asked.iter().flatten().partition(|record| record.slo == Span::ENDLESS);
        let has_background = !background.is_empty();
        let (background, others) = (Record::sum(background), Record::sum(others));
        let mut all_batches = vec![0; LatencyProfile::MAX_BATCH];
        for batches in &self.batches {
            for (sum, count) in all_batches.iter_mut().zip(batches) {
                *sum += count;
            }
        }
        let batches: u64 = all_batches.iter().sum();
        let tasks: u64 = (1..).zip(&all_batches).map(|(size, count): (u64, _)| size * count).sum();
        let has_graphs = !workload.graphs.is_empty();
        // A graph's requests are in batches of several models.
        let batches_of = |index: usize| if has_graphs { &[][..] } else { &self.batches[index] };
        let asked = workload.asked().zip(&self.asked).enumerate();
        let of_asked =
            |(index, ((name, _), records)): (usize, (_, &Vec<Record>))| report(name, records, batches_of(index), span);
        let answers: u64 = self.answers.iter().sum();
        let of_step = |((model, batches), given): ((&Model, &Vec<u64>), &u64)| StepReport {
            model: model.name.clone(),
            batch_median: median(batches),
            answered_fraction: (answers > 0).then(|| *given as f64 / answers as f64),
        };
        let steps = workload.models.iter().zip(&self.batches).zip(&self.answers).filter(|_| has_graphs).map(of_step);
        Report {
            workload: workload.name.clone(),
            policy: options.policy.to_string(),
            rate_rps: options.rate_rps,
            seconds: options.seconds,
            seed: options.seed,
            models: asked.map(of_asked).collect(),
            steps: steps.collect(),
            totals: others.figures(&all_batches, span),
            background: has_background.then(|| background.figures(&all_batches, span)),
            batch_mean: if batches == 0 { 0.0 } else { tasks as f64 / batches as f64 },
            gpu_busy_fraction: self.busy.as_secs_f64() / (span * self.last_second.len() as f64),
            gpus_used_mean: self.gpu_seconds as f64 / span.ceil(),
            memory: workload.memory.map(|_| MemoryReport {
                cold_fraction: self.cold as f64 / all.offered.max(1) as f64,
                loads_per_s: self.loads as f64 / span,
                reads_per_s: self.reads as f64 / span,
                unloads_per_s: self.unloads as f64 / span,
                loads_failed_per_s: self.loads_failed as f64 / span,
                link_busy_fraction: self.link_busy.as_secs_f64() / (span * self.last_second.len() as f64),
            }),
            predicted: PredictionReport::new(&self.predictions),
            predictions: self.predictions.clone(),
            batches: all_batches,
            queueing_us: self.queueing.clone(),
        }
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are within hdrhistogram's bounds")
}

fn report(name: &str, classes: &[Record], batches: &[u64], span_s: f64) -> ModelReport {
    let reported = if classes.len() > 1 { classes } else { &[] };
    ModelReport {
        name: name.to_owned(),
        figures: Record::sum(classes).figures(batches, span_s),
        classes: reported.iter().map(|class| class.report(span_s)).collect(),
    }
}

impl Record {
    fn new(slo: Span) -> Self {
        Self { slo, offered: 0, on_time: 0, dropped: 0, latencies: histogram() }
    }

    fn sum<'a>(records: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::new(Span::ZERO);
        for record in records {
            sum.offered += record.offered;
            sum.on_time += record.on_time;
            sum.dropped += record.dropped;
            sum.latencies.add(&record.latencies).expect("all histograms are alike and resize");
        }
        sum
    }

    fn on_time_fraction(&self) -> f64 {
        if self.offered == 0 { 1.0 } else { self.on_time as f64 / self.offered as f64 }
    }

    fn percentile_ms(&self, quantile: f64) -> Option<f64> {
        (!self.latencies.is_empty()).then(|| self.latencies.value_at_quantile(quantile) as f64 / 1e3)
    }

    fn report(&self, span_s: f64) -> ClassReport {
        ClassReport {
            slo_ms: (self.slo != Span::ENDLESS).then(|| self.slo.as_secs_f64() * 1e3),
            offered_rps: self.offered as f64 / span_s,
            on_time_fraction: self.on_time_fraction(),
            dropped: self.dropped,
            p50_ms: self.percentile_ms(0.5),
            p99_ms: self.percentile_ms(0.99),
        }
    }

    fn figures(&self, batches: &[u64], span_s: f64) -> Figures {
        Figures {
            offered_rps: self.offered as f64 / span_s,
            served_rps: self.latencies.len() as f64 / span_s,
            on_time_fraction: self.on_time_fraction(),
            dropped: self.dropped,
            errors: 0,
            p50_ms: self.percentile_ms(0.5),
            p99_ms: self.percentile_ms(0.99),
            p999_ms: self.percentile_ms(0.999),
            p9999_ms: self.percentile_ms(0.9999),
            batch_median: median(batches),
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
    use std::path::Path;

    use scheduler::Policy;

    use super::*;

    const OPTIONS: Options = Options { policy: Policy::Eager, rate_rps: 1.0, seconds: 11.0, seed: 0 };

    fn workload(slos: &str) -> Workload {
        let text = format!("gpus = 2\n[[model]]\nname = \"m\"\nlatency_ms = [1]\n{slos}\n");
        Workload::parse(&text, "test", "test", Path::new(".")).unwrap()
    }

    #[test]
    fn a_model_is_the_sum_of_its_classes_and_as_bad_as_the_worst() {
        let second = |s: f64| Timestamp((s * 1e9) as i64);
        let workload = workload("classes = [{ slo_ms = 10 }, { slo_ms = 20 }]");
        let mut recorder = Recorder::new((second(1.0), second(11.0)), &workload);
        for (class, latency) in [(0, 0.011), (0, 0.009), (1, 0.011), (1, 0.019)] {
            let request = Request::new(second(2.0), ModelId(0), class);
            recorder.arrived(request, false);
            recorder.answered(request, Some(second(2.0)), second(2.0 + latency));
        }
        let report = recorder.report(&workload, &OPTIONS);
        let model = &report.models[0];
        assert_eq!((model.figures.on_time_fraction, model.worst_bad_rate()), (0.75, 0.5));
        let classes = model.classes.iter().map(|class| (class.slo_ms, class.on_time_fraction, class.offered_rps));
        assert_eq!(classes.collect::<Vec<_>>(), [(Some(10.0), 0.5, 0.2), (Some(20.0), 1.0, 0.2)]);
        assert!(report.table().contains("  SLO 20 ms"), "{}", report.table());
    }

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
        let request = |s| Request::new(second(s), ModelId(0), 0);
        let workload = workload("slo_ms = 10");
        let mut recorder = Recorder::new((second(1.0), second(11.0)), &workload);
        for at in [0.5, 2.0, 3.0, 4.0] {
            recorder.arrived(request(at), false);
        }
        recorder.dropped(request(0.5));
        recorder.dropped(request(2.0));
        recorder.answered(request(3.0), Some(second(3.002)), second(3.010));
        recorder.answered(request(4.0), Some(second(4.006)), second(4.011));
        for (gpu, size, started_at, finished_at) in [(0, 3, 0.5, 1.5), (0, 5, 1.6, 3.2), (1, 7, 10.5, 12.0)] {
            recorder.executed(0, size, second(started_at));
            recorder.busy(gpu, second(started_at), second(finished_at));
        }
        let report = recorder.report(&workload, &OPTIONS);
        assert!(report.models[0].classes.is_empty());
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
