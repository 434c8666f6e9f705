//! The metrics of models: Triton's families and our own, of each model that is named, and of the others together.
//!
//! A model is named from its first request on, until as many are as may be; what is named stays so. Stages are told of
//! all models together, and of one where somebody asks for it.

use std::{
    cell::{Cell, RefCell},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI64, Ordering::Relaxed},
    },
};

use frontend::{
    core::Core,
    tasks::{Reply, Timing},
};
use prometheus::{
    Opts, Registry,
    core::{Collector, Desc, Describer as _},
    proto::{Histogram, LabelPair, Metric, MetricFamily, MetricType},
};
use proto::{Span, scheduler_to_frontend::NetworkTimes};

use super::{
    counts::{CACHE, Count, Counts, DURATIONS, TRITONS_REASONS},
    register::{counter, family, gauge, histogram, label, registered},
    stages::Stage,
    summaries::Summary,
};
use crate::config::MetricsConfig;

/// What all models are called that are not named.
pub(super) const OTHERS: &str = "(others)";
/// Families whose names do not depend on anything, with their help.
const SUCCESS: (&str, &str) = ("nv_inference_request_success", "Requests that were answered");
const LATE: (&str, &str) = ("downbeat_request_late_total", "Of these, answered after their deadline");
const INFERENCES: (&str, &str) = ("nv_inference_count", "Rows that were answered");
const EXECUTIONS: (&str, &str) = ("nv_inference_exec_count", "Batches of which this frontend saw an answer");
const FAILURE: (&str, &str) = ("nv_inference_request_failure", "Requests without an answer");
const DROPPED: (&str, &str) = ("downbeat_dropped_total", "Requests that were dropped, by the reason in its own terms");
const PENDING: (&str, &str) = ("nv_inference_pending_request_count", "Requests without an answer yet");
const NETWORK: (&str, &str) = (
    "downbeat_network_budget_seconds",
    "What is planned with for the way of a plan (ctrl), of an input (data) and of an answer (resp)",
);
const REQUEST: (&str, &str) = ("downbeat_request_seconds", "From admission to answer");
const BATCH: (&str, &str) = ("downbeat_batch_size", "Tasks in the batch of an answered request");
const STAGES: (&str, &str) = ("downbeat_stage_seconds", "Where a request's time goes");
const FIRST_RESPONSE: (&str, &str) = ("nv_inference_first_response_histogram_ms", "From admission to answer");
const ALL_FAMILIES: [(&str, &str); 12] =
    [SUCCESS, LATE, INFERENCES, EXECUTIONS, FAILURE, DROPPED, PENDING, NETWORK, REQUEST, BATCH, STAGES, FIRST_RESPONSE];

/// A model that is served.
#[derive(Default)]
pub(super) struct Known {
    pub(super) name: String,
    pub(super) version: String,
    /// The latency objective of a request that names none.
    pub(super) objective_ns: AtomicI64,
    is_named: AtomicBool,
    /// Once it has had a request.
    pub(super) counts: OnceLock<Box<Counts>>,
    /// In the order of [`DURATIONS`], if it is named and they are wanted.
    summaries: OnceLock<[Summary; 5]>,
    pending: AtomicI64,
    /// Nanoseconds of [`NETWORK`]'s parts.
    network: [AtomicI64; 3],
}

impl Known {
    pub(super) fn counts(&self) -> &Counts {
        self.counts.get_or_init(Box::default)
    }

    fn has_traffic(&self) -> bool {
        self.counts.get().is_some()
    }

    /// A request was answered.
    pub(super) fn handle_success(&self, reply: &Reply, new_executions: u64) {
        let durations = self.counts().handle_success(reply, new_executions);
        for (summary, ns) in self.summaries.get().into_iter().flatten().zip(durations) {
            summary.observe(ns as f64 / 1e3);
        }
    }

    /// A request was answered by what was kept.
    pub(super) fn handle_cache_hit(&self, timing: &Timing) {
        let took = self.counts().handle_cache_hit(timing);
        // It has been in no stage of an execution.
        for (summary, ns) in self.summaries.get().into_iter().flatten().zip([took, 0]) {
            summary.observe(ns as f64 / 1e3);
        }
    }

    /// Reads what others know of it.
    fn read(&self, core: &Core, index: usize, pending: usize) {
        self.pending.store(i64::try_from(pending).unwrap_or(i64::MAX), Relaxed);
        // A model that nobody offers any more is not planned with anything.
        let network = core.models().get(index).offer.map_or_else(Default::default, |offer| offer.network);
        let NetworkTimes { ctrl, data, resp } = network;
        self.network.iter().zip([ctrl, data, resp]).for_each(|(to, time)| to.store(time.0, Relaxed));
    }
}

/// The metrics of all models: what the thread has that counts.
pub(super) struct Models {
    /// By index in the model table.
    known: RefCell<Vec<Arc<Known>>>,
    named: Cell<usize>,
    told: Told,
}

/// What whoever writes the text has.
#[derive(Clone)]
pub(super) struct Told {
    config: MetricsConfig,
    descs: Arc<Vec<Desc>>,
    pub(super) shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
pub(super) struct Shared {
    pub(super) known: Vec<Arc<Known>>,
    /// What versions have counted that are served no longer and were not named.
    gone: Option<Box<Counts>>,
}

impl Models {
    pub(super) fn new(registry: &Registry, config: MetricsConfig) -> Self {
        let told = registered(registry, Told::new(config));
        Self { known: RefCell::default(), named: Cell::default(), told }
    }

    /// Another version of a model is served, or the next one of the table.
    pub(super) fn handle_model(&self, index: usize, name: &str, version: &str) {
        let mut known = self.known.borrow_mut();
        let mut shared = self.told.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Known { name: name.to_owned(), version: version.to_owned(), ..Known::default() };
        let Some(former) = known.get_mut(index) else {
            let new = Arc::new(new);
            shared.known.push(Arc::clone(&new));
            return known.push(new);
        };
        if former.name == new.name && former.version == new.version {
            return;
        }
        if former.is_named.load(Relaxed) {
            self.named.set(self.named.get() - 1);
        } else if let Some(counts) = former.counts.get() {
            shared.gone.get_or_insert_default().absorb(counts);
        }
        *former = Arc::new(new);
        shared.known[index] = Arc::clone(former);
    }

    /// What is expected of a model that is served.
    pub(super) fn handle_objective(&self, index: usize, objective: Span) {
        self.known.borrow()[index].objective_ns.store(objective.0, Relaxed);
    }

    /// What whoever tells of them has.
    pub(super) fn told(&self) -> Told {
        self.told.clone()
    }

    /// Looks at a model that has traffic.
    pub(super) fn with<T>(&self, model: usize, look: impl FnOnce(&Known) -> T) -> T {
        let known = &self.known.borrow()[model];
        if !known.has_traffic() {
            self.name(known);
        }
        look(known)
    }

    /// Names a model if there is room.
    fn name(&self, known: &Known) {
        known.counts();
        let config = &self.told.config;
        if self.named.get() < config.models_max && !known.is_named.swap(true, Relaxed) {
            self.named.set(self.named.get() + 1);
            if config.summary_latencies {
                known.summaries.get_or_init(Default::default);
            }
        }
    }

    pub(super) fn is_named(&self, model: usize) -> bool {
        self.known.borrow().get(model).is_some_and(|known| known.is_named.load(Relaxed))
    }

    /// Reads what is to be told. Of at most `all_from_start_max` models all are told, with traffic or without.
    pub(super) fn read(&self, core: &Core, pending: impl Fn(usize) -> usize, all_from_start_max: usize) {
        let models = self.known.borrow();
        let are_few = models.len() <= all_from_start_max;
        for (index, known) in models.iter().enumerate() {
            let pending = pending(index);
            if !known.has_traffic() && (are_few || pending > 0) {
                self.name(known);
            }
            if known.has_traffic() {
                known.read(core, index, pending);
            }
        }
    }

    /// Reads and tells a model, in each version that is served. It is counted from then on, and not named.
    pub(super) fn read_one(&self, core: &Core, pending: impl Fn(usize) -> usize, name: &str) -> Vec<MetricFamily> {
        let models = self.known.borrow();
        let of_name = || models.iter().enumerate().filter(|(_, known)| known.name == name);
        of_name().for_each(|(index, known)| known.read(core, index, pending(index)));
        let rows: Vec<Row<'_>> = of_name().map(|(_, known)| Row::of(known)).collect();
        let stages = rows.iter().flat_map(Row::stages).collect();
        self.told.families(&rows, stages)
    }
}

/// A model, or the others, as they are told.
struct Row<'a> {
    labels: Vec<LabelPair>,
    counts: &'a Counts,
    /// Of one model.
    known: Option<&'a Known>,
}

impl<'a> Row<'a> {
    fn of(known: &'a Known) -> Self {
        Self { labels: labels(&known.name, &known.version), counts: known.counts(), known: Some(known) }
    }

    fn counter(&self, count: &Count) -> Metric {
        counter(self.labels.clone(), count.get())
    }

    fn stages(&self) -> impl Iterator<Item = Metric> {
        let told = |(stage, name): (Stage, &str)| {
            histogram(with_label(&self.labels, "stage", name), self.counts.stage_seconds(stage))
        };
        Stage::ALL.map(told).into_iter()
    }
}

impl Told {
    fn new(config: MetricsConfig) -> prometheus::Result<Self> {
        let of_durations = |what: &'static str| {
            DURATIONS.iter().map(move |(of, help)| (format!("nv_inference_{of}_{what}_us"), (*help).to_owned()))
        };
        let fixed = ALL_FAMILIES.iter().map(|(name, help)| ((*name).to_owned(), (*help).to_owned()));
        let of_cache = CACHE.iter().map(|(name, help)| ((*name).to_owned(), (*help).to_owned()));
        let all = fixed.chain(of_cache).chain(of_durations("duration")).chain(of_durations("summary"));
        let descs = all.map(|(name, help)| Opts::new(name, help).variable_label("model").describe());
        Ok(Self { config, descs: Arc::new(descs.collect::<prometheus::Result<_>>()?), shared: Arc::default() })
    }

    /// All families but those that are not wanted.
    fn families(&self, rows: &[Row<'_>], stages: Vec<Metric>) -> Vec<MetricFamily> {
        let counters = |of: fn(&Counts) -> &Count| rows.iter().map(|row| row.counter(of(row.counts))).collect();
        let histograms = |of: fn(&Counts) -> Histogram| {
            rows.iter().map(|row| histogram(row.labels.clone(), of(row.counts))).collect()
        };
        let known = || rows.iter().filter_map(|row| Some((row, row.known?)));
        let failures = rows.iter().flat_map(|row| {
            let of_reason =
                |(reason, count): (&&str, &Count)| counter(with_label(&row.labels, "reason", reason), count.get());
            TRITONS_REASONS.iter().zip(&row.counts.failures).map(of_reason).collect::<Vec<_>>()
        });
        let dropped = rows.iter().flat_map(|row| {
            let of_reason = |(reason, count)| counter(with_label(&row.labels, "reason", reason), count);
            row.counts.dropped().into_iter().map(of_reason).collect::<Vec<_>>()
        });
        let pending = known().map(|(row, known)| gauge(row.labels.clone(), known.pending.load(Relaxed) as f64));
        let network = known().flat_map(|(row, known)| {
            let of_part =
                |(part, ns): (&str, i64)| gauge(with_label(&row.labels, "part", part), ns.max(0) as f64 / 1e9);
            let times = known.network.each_ref().map(|ns| ns.load(Relaxed));
            ["ctrl", "data", "resp"].into_iter().zip(times).map(of_part).collect::<Vec<_>>()
        });
        let mut families = vec![
            family(SUCCESS, MetricType::COUNTER, counters(|of| &of.success)),
            family(LATE, MetricType::COUNTER, counters(|of| &of.late)),
            family(INFERENCES, MetricType::COUNTER, counters(|of| &of.inferences)),
            family(EXECUTIONS, MetricType::COUNTER, counters(|of| &of.executions)),
            family(FAILURE, MetricType::COUNTER, failures.collect()),
            family(DROPPED, MetricType::COUNTER, dropped.collect()),
            family(PENDING, MetricType::GAUGE, pending.collect()),
            family(NETWORK, MetricType::GAUGE, network.collect()),
            family(REQUEST, MetricType::HISTOGRAM, histograms(Counts::request_seconds)),
            family(BATCH, MetricType::HISTOGRAM, histograms(Counts::batch_size)),
            family(STAGES, MetricType::HISTOGRAM, stages),
        ];
        if self.config.histogram_latencies {
            families.push(family(FIRST_RESPONSE, MetricType::HISTOGRAM, histograms(Counts::first_response_ms)));
        }
        for (at, (of, help)) in DURATIONS.iter().enumerate() {
            let sums = rows.iter().map(|row| row.counter(&row.counts.durations_us[at])).collect();
            let (name, help_of_sum) = (format!("nv_inference_{of}_duration_us"), format!("Sum of {help}"));
            families.push(family((&name, &help_of_sum), MetricType::COUNTER, sums));
            let summaries =
                known().filter_map(|(row, known)| Some(known.summaries.get()?[at].told(row.labels.clone())));
            let (name, help) = (format!("nv_inference_{of}_summary_us"), format!("Quantiles of {help}"));
            families.push(family((&name, &help), MetricType::SUMMARY, summaries.collect()));
        }
        for (at, named) in CACHE.into_iter().enumerate() {
            let looked = rows.iter().filter(|row| row.counts.has_looked());
            let counts = looked.map(|row| row.counter(&row.counts.cache[at])).collect();
            families.push(family(named, MetricType::COUNTER, counts));
        }
        families.retain(|family| !family.get_metric().is_empty());
        families
    }
}

impl Collector for Told {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let (others, all) = (Counts::default(), Counts::default());
        let (known, have_gone) = {
            let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
            shared.gone.iter().for_each(|gone| others.absorb(gone));
            (shared.known.clone(), shared.gone.is_some())
        };
        let (named, unnamed): (Vec<_>, Vec<_>) =
            known.iter().filter(|known| known.has_traffic()).partition(|known| known.is_named.load(Relaxed));
        unnamed.iter().for_each(|known| others.absorb(known.counts()));
        let mut rows: Vec<Row<'_>> = named.iter().map(|known| Row::of(known)).collect();
        if have_gone || !unnamed.is_empty() {
            rows.push(Row { labels: labels(OTHERS, ""), counts: &others, known: None });
        }
        rows.iter().for_each(|row| all.absorb(row.counts));
        let of_all = Row { labels: Vec::new(), counts: &all, known: None };
        let stages = if rows.is_empty() { Vec::new() } else { of_all.stages().collect() };
        self.families(&rows, stages)
    }
}

fn labels(model: &str, version: &str) -> Vec<LabelPair> {
    vec![label("model", model), label("version", version)]
}

/// Labels in the order of their names, as elsewhere.
fn with_label(labels: &[LabelPair], name: &str, value: &str) -> Vec<LabelPair> {
    let mut labels = labels.to_vec();
    let at = labels.partition_point(|label| label.name() < name);
    labels.insert(at, label(name, value));
    labels
}

#[cfg(test)]
mod tests {
    use prometheus::TextEncoder;
    use proptest::prelude::*;

    use super::*;

    fn with_models(models_max: usize, count: usize) -> (Registry, Models) {
        let registry = Registry::new();
        let models = Models::new(&registry, MetricsConfig { models_max, ..MetricsConfig::default() });
        (0..count).for_each(|index| models.handle_model(index, &format!("m{index}"), "1"));
        (registry, models)
    }

    fn text(registry: &Registry) -> String {
        TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
    }

    /// The values of a family's lines, and their labels.
    fn lines<'a>(text: &'a str, family: &str) -> Vec<(&'a str, f64)> {
        let of_family = text.lines().filter_map(|line| line.strip_prefix(family)?.strip_prefix('{'));
        of_family
            .map(|line| line.split_once("} ").unwrap())
            .map(|(labels, value)| (labels, value.parse().unwrap()))
            .collect()
    }

    fn fail(models: &Models, index: usize) {
        models.with(index, |known| known.counts().handle_failure(&frontend::InferError::NoScheduler));
    }

    #[test]
    fn what_is_not_named_is_told_together_and_one_of_it_where_it_is_asked_for() {
        let (registry, models) = with_models(2, 5);
        assert!(!text(&registry).contains("nv_inference"), "no traffic yet");
        for index in [4, 0, 3, 3, 1] {
            models.with(index, |known| known.counts().handle_stage(Stage::Receive, 1_000_000));
            fail(&models, index);
        }
        let all = text(&registry);
        let mut rejected = lines(&all, "nv_inference_request_failure");
        rejected.retain(|(labels, _)| labels.contains("REJECTED"));
        let label = |model, version| format!(r#"model="{model}",reason="REJECTED",version="{version}""#);
        assert_eq!(rejected, [(&*label(OTHERS, ""), 3.0), (&*label("m0", "1"), 1.0), (&*label("m4", "1"), 1.0)]);
        assert!(lines(&all, "downbeat_stage_seconds_count").contains(&(r#"stage="receive""#, 5.0)), "{all}");
        let (of_one, others) = ([Row::of(&models.known.borrow()[3])].map(|row| row.counts.dropped()), &all);
        assert_eq!(of_one[0].get("no_scheduler"), Some(&2), "{others}");
    }

    /// 4,026 models of long names had 93 MB of text.
    #[test]
    fn thousands_of_models_with_long_names_are_told_in_2_mb() {
        let registry = Registry::new();
        let models = Models::new(&registry, MetricsConfig::default());
        for index in 0..4026 {
            models.handle_model(index, &format!("{index:0110}"), "1");
            models.with(index, |known| known.counts().handle_stage(Stage::Receive, 1));
        }
        let text = text(&registry);
        assert!(text.len() < 2 << 20, "{} bytes", text.len());
        assert!(text.contains(OTHERS));
    }

    proptest! {
        /// Whatever is served and asked for: the sum over all lines is what was counted of models that are named or
        /// were never, others only grow, and what is named stays so until it is replaced.
        #[test]
        fn sums_are_exact_and_names_stay(steps in proptest::collection::vec((0..6usize, any::<bool>()), 1..60)) {
            let (registry, models) = with_models(3, 6);
            let (mut versions, mut named, mut counted) = ([1; 6], Vec::new(), [0; 6]);
            let (mut others, mut before) = (0, 0.0);
            for (model, is_replaced) in steps {
                if is_replaced {
                    versions[model] += 1;
                    models.handle_model(model, &format!("m{model}"), &versions[model].to_string());
                    if !named.contains(&model) { others += counted[model]; }
                    named.retain(|of| *of != model);
                    counted[model] = 0;
                } else {
                    fail(&models, model);
                    if counted[model] == 0 && named.len() < 3 { named.push(model); }
                    counted[model] += 1;
                }
                let text = text(&registry);
                let told = lines(&text, "downbeat_dropped_total");
                let of_others = told.iter().find(|(labels, _)| labels.contains(OTHERS));
                let of_others = of_others.map_or(0.0, |(_, value)| *value);
                let unnamed: u64 = (0..6).filter(|of| !named.contains(of)).map(|of| counted[of]).sum();
                prop_assert_eq!(of_others, (others + unnamed) as f64);
                prop_assert!(of_others >= before);
                before = of_others;
                for of in &named {
                    let labels = format!(r#"model="m{of}",reason="no_scheduler",version="{}""#, versions[*of]);
                    prop_assert!(told.contains(&(&labels, counted[*of] as f64)), "{} {:?}", labels, told);
                }
            }
        }
    }
}
