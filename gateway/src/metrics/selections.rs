//! Metrics of ensembles whose steps are models of one task: who answered, how much each counts, and what became of
//! feedback. Each is told of ensembles that are named, and of the others together, as other metrics of models are.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ensembles::{Selected, vote::Order};
use frontend::core::Core;
use prometheus::{
    Opts, Registry,
    core::{Collector, Desc, Describer as _},
    proto::{LabelPair, Metric, MetricFamily, MetricType},
};
use proto::Span;

use super::{
    models::OTHERS,
    register::{counter, family, gauge, label, registered, sum},
};

const USED: (&str, &str) =
    ("downbeat_selection_predictions_total", "Predictions of a member that answers of its ensemble were made of");
const MISSING: (&str, &str) =
    ("downbeat_selection_missing_total", "Requests in which a member was to be asked and gave nothing in time");
const WEIGHT: (&str, &str) =
    ("downbeat_selection_weight", "How much a member counts, or how likely it is to be asked; together 1");
const DOUBTED: (&str, &str) =
    ("downbeat_selection_doubted_total", "Answers whose confidence was below what the configuration asks for");
const DEFAULTS: (&str, &str) = ("downbeat_selection_defaults_total", "Answers that were the configured default");
const FEEDBACK: (&str, &str) = ("downbeat_feedback_total", "Feedback, by what became of it");
const SHADOW: (&str, &str) =
    ("downbeat_shadow_requests_total", "Requests that were mirrored to a shadow, by what became of them there");
const SHADOW_SECONDS: (&str, &str) = (
    "downbeat_shadow_seconds_total",
    "Time of mirrored requests that both answered, at the first step and at the shadow",
);
const ALL: [(&str, &str); 8] = [USED, MISSING, WEIGHT, DOUBTED, DEFAULTS, FEEDBACK, SHADOW, SHADOW_SECONDS];

/// What became of feedback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedbackOutcome {
    /// The members' weights changed.
    Counted,
    /// The same was said of that request before.
    Repeated,
    /// Another thing was.
    Contradictory,
    /// Its request has been forgotten.
    Late,
    /// There was no such request here.
    Unknown,
    /// It is another client's request, which is as if there were none.
    Foreign,
    /// It does not fit its request.
    Malformed,
}

impl FeedbackOutcome {
    const ALL: [(Self, &str); 7] = [
        (Self::Counted, "counted"),
        (Self::Repeated, "repeated"),
        (Self::Contradictory, "contradictory"),
        (Self::Late, "late"),
        (Self::Unknown, "unknown"),
        (Self::Foreign, "foreign"),
        (Self::Malformed, "malformed"),
    ];

    /// What its client is told.
    #[must_use]
    pub fn told(self) -> &'static str {
        let as_told = if self == Self::Foreign { Self::Unknown } else { self };
        Self::ALL[as_told as usize].1
    }
}

/// What became of a request that was mirrored to a shadow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowOutcome {
    /// Its answer agrees with the first step's.
    Agreed,
    /// It does not.
    Disagreed,
    /// It has none.
    Failed,
    /// It had none when nobody waited any more.
    Late,
    /// It was not asked: there was no room.
    Skipped,
}

impl ShadowOutcome {
    const ALL: [&str; 5] = ["agreed", "disagreed", "failed", "late", "skipped"];
}

/// Where the time of a step's request went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Took {
    /// From when it was asked to its answer.
    pub total: Span,
    /// On a GPU, with the batch that it was in.
    pub execution: Span,
}

/// How a shadow did beside the first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compared {
    /// What became of its request.
    pub outcome: ShadowOutcome,
    /// The first step's times and its own, if both ran.
    pub took: Option<(Took, Took)>,
}

impl Compared {
    /// Without times.
    #[must_use]
    pub fn of(outcome: ShadowOutcome) -> Self {
        Self { outcome, took: None }
    }
}

/// What ensembles have counted, by index in the model table.
#[derive(Clone)]
pub(super) struct SelectionMetrics {
    descs: Arc<Vec<Desc>>,
    rows: Arc<Mutex<BTreeMap<usize, Row>>>,
}

#[derive(Default, Clone)]
struct Row {
    /// The ensemble's name and version, if it is named.
    named: Option<(String, String)>,
    members: Vec<String>,
    used: Vec<u64>,
    missing: Vec<u64>,
    weights: Vec<f64>,
    shadows: Vec<Shadow>,
    doubted: u64,
    defaults: u64,
    feedback: [u64; FeedbackOutcome::ALL.len()],
}

/// What was mirrored to one member.
#[derive(Default, Clone)]
struct Shadow {
    outcomes: [u64; ShadowOutcome::ALL.len()],
    /// Of the first step, and of the shadow.
    took: [Took; 2],
}

impl SelectionMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let descs = ALL.map(|(name, help)| Opts::new(name, help).variable_label("model").describe());
        let descs = descs.into_iter().collect::<prometheus::Result<_>>();
        registered(registry, descs.map(|descs| Self { descs: Arc::new(descs), rows: Arc::default() }))
    }

    /// How much each member of an ensemble counts now; with other members its counts begin anew.
    pub(super) fn handle_weights(&self, index: usize, members: &[String], weights: &[f64]) {
        let mut rows = self.lock();
        let row = rows.entry(index).or_default();
        if row.members != members {
            let (used, missing) = (vec![0; members.len()], vec![0; members.len()]);
            let shadows = vec![Shadow::default(); members.len()];
            *row = Row { members: members.to_vec(), used, missing, shadows, ..row.without_members() };
        }
        row.weights = weights.to_vec();
    }

    /// A request has ended so.
    pub(super) fn handle_selected(&self, index: usize, selected: &Selected, is_answered: bool) {
        let mut rows = self.lock();
        let row = rows.entry(index).or_default();
        for &member in &selected.choice.members {
            // One by one those who come later need not be asked.
            let is_missing = match selected.choice.order {
                Order::AtOnce => selected.predictions[member].is_none(),
                Order::UntilConfident | Order::UntilAnswered | Order::OnFailure => selected.in_vain.contains(&member),
            };
            row.missing.get_mut(member).into_iter().for_each(|count| *count += u64::from(is_missing));
        }
        if is_answered {
            for &member in &selected.counted {
                row.used.get_mut(member).into_iter().for_each(|count| *count += 1);
            }
            row.doubted += u64::from(selected.is_doubted);
            row.defaults += u64::from(selected.is_default);
        }
    }

    /// A shadow has ended so.
    pub(super) fn handle_shadow(&self, index: usize, member: usize, compared: Compared) {
        let mut rows = self.lock();
        let Some(shadow) = rows.entry(index).or_default().shadows.get_mut(member) else { return };
        shadow.outcomes[compared.outcome as usize] += 1;
        if let Some((main, own)) = compared.took {
            shadow.took.iter_mut().zip([main, own]).for_each(|(sum, took)| sum.add(took));
        }
    }

    pub(super) fn handle_feedback(&self, index: usize, outcome: FeedbackOutcome) {
        self.lock().entry(index).or_default().feedback[outcome as usize] += 1;
    }

    /// Reads who is named.
    pub(super) fn read(&self, core: &Core, is_named: impl Fn(usize) -> bool) {
        for (index, row) in self.lock().iter_mut() {
            let model = &core.models().get(*index).model;
            row.named = is_named(*index).then(|| (model.name.clone(), model.version.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Row>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Took {
    fn add(&mut self, other: Self) {
        self.total += other.total;
        self.execution += other.execution;
    }
}

impl Shadow {
    fn absorb(&mut self, other: &Self) {
        self.outcomes.iter_mut().zip(other.outcomes).for_each(|(sum, count)| *sum += count);
        self.took.iter_mut().zip(other.took).for_each(|(sum, took)| sum.add(took));
    }

    fn told_outcomes(&self) -> [(Vec<LabelPair>, f64); ShadowOutcome::ALL.len()] {
        std::array::from_fn(|at| (vec![label("outcome", ShadowOutcome::ALL[at])], self.outcomes[at] as f64))
    }

    fn told_seconds(&self) -> [(Vec<LabelPair>, f64); 4] {
        let [main, own] = self.took;
        let spans = [
            ("main", "execution", main.execution),
            ("main", "total", main.total),
            ("shadow", "execution", own.execution),
            ("shadow", "total", own.total),
        ];
        spans.map(|(of, part, span)| (vec![label("of", of), label("part", part)], span.as_secs_f64()))
    }
}

impl Row {
    /// What an ensemble keeps when its members are others.
    fn without_members(&self) -> Self {
        let Self { named, doubted, defaults, feedback, .. } = self.clone();
        Self { named, doubted, defaults, feedback, ..Self::default() }
    }

    fn absorb(&mut self, other: &Self) {
        if self.members.is_empty() {
            (self.members, self.used, self.missing) = (vec![String::new()], vec![0], vec![0]);
            self.shadows = vec![Shadow::default()];
        }
        other.shadows.iter().for_each(|shadow| self.shadows[0].absorb(shadow));
        self.used[0] += other.used.iter().sum::<u64>();
        self.missing[0] += other.missing.iter().sum::<u64>();
        self.doubted += other.doubted;
        self.defaults += other.defaults;
        self.feedback.iter_mut().zip(other.feedback).for_each(|(sum, count)| *sum += count);
    }

    fn labels(&self) -> (LabelPair, LabelPair) {
        let (name, version) = self.named.as_ref().map_or((OTHERS, ""), |(name, version)| (name, version));
        (label("model", name), label("version", version))
    }

    fn of_members(&self, of: impl Fn(usize, Vec<LabelPair>) -> Metric) -> Vec<Metric> {
        let (model, version) = self.labels();
        let labels = |name: &String| vec![label("member", name), model.clone(), version.clone()];
        self.members.iter().enumerate().map(|(at, name)| of(at, labels(name))).collect()
    }

    /// Of members that anything was mirrored to.
    fn of_shadows<const N: usize>(&self, of: impl Fn(&Shadow) -> [(Vec<LabelPair>, f64); N]) -> Vec<Metric> {
        let (model, version) = self.labels();
        let shadows =
            self.members.iter().zip(&self.shadows).filter(|(_, shadow)| shadow.outcomes.iter().any(|count| *count > 0));
        let told = |(name, shadow): (&String, &Shadow)| {
            of(shadow).map(|(mut labels, value)| {
                labels.extend([label("member", name), model.clone(), version.clone()]);
                labels.sort_by(|one, other| one.name().cmp(other.name()));
                sum(labels, value)
            })
        };
        shadows.flat_map(told).collect()
    }

    fn of_all(&self, count: u64) -> Metric {
        let (model, version) = self.labels();
        counter(vec![model, version], count)
    }

    fn of_feedback(&self) -> Vec<Metric> {
        let (model, version) = self.labels();
        let labels = |outcome: &str| vec![model.clone(), label("outcome", outcome), version.clone()];
        let counts = FeedbackOutcome::ALL.iter().zip(self.feedback);
        counts.map(|((_, outcome), count)| counter(labels(outcome), count)).collect()
    }
}

impl Collector for SelectionMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let rows: Vec<Row> = self.lock().values().cloned().collect();
        let (mut named, unnamed): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| row.named.is_some());
        if !unnamed.is_empty() {
            let mut others = Row::default();
            unnamed.iter().for_each(|row| others.absorb(row));
            named.push(others);
        }
        let all = |of: &dyn Fn(&Row) -> Vec<Metric>| named.iter().flat_map(of).collect::<Vec<_>>();
        let weights = |row: &Row| match row.weights.is_empty() {
            true => Vec::new(),
            false => row.of_members(|at, labels| gauge(labels, row.weights[at])),
        };
        let families = [
            (USED, MetricType::COUNTER, all(&|row| row.of_members(|at, labels| counter(labels, row.used[at])))),
            (MISSING, MetricType::COUNTER, all(&|row| row.of_members(|at, labels| counter(labels, row.missing[at])))),
            (WEIGHT, MetricType::GAUGE, all(&weights)),
            (DOUBTED, MetricType::COUNTER, all(&|row| vec![row.of_all(row.doubted)])),
            (DEFAULTS, MetricType::COUNTER, all(&|row| vec![row.of_all(row.defaults)])),
            (FEEDBACK, MetricType::COUNTER, all(&Row::of_feedback)),
            (SHADOW, MetricType::COUNTER, all(&|row| row.of_shadows(Shadow::told_outcomes))),
            (SHADOW_SECONDS, MetricType::COUNTER, all(&|row| row.of_shadows(Shadow::told_seconds))),
        ];
        let families = families.into_iter().map(|(named, kind, metrics)| family(named, kind, metrics));
        families.filter(|family| !family.get_metric().is_empty()).collect()
    }
}
