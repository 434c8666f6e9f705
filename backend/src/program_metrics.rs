//! Metrics that programs of models have of their own, as Triton's `MetricFamily` has them. No IO.
//!
//! Life of a metric here: a program declares its family and then itself, its model owns both, and so does each other
//! model that declares the same. From then on every process of these models changes the one value that there is.
//! Both are gone when their last owner is unloaded, and stay when a process dies.
//!
//! A program is not believed: all that it declares is bounded before it is kept, in lines of the page and in bytes of
//! each line, and what would spoil the page for its scraper is refused.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use admin::{OWN_METRICS, label_value};
use proto::backend_to_program::{MetricChange, MetricKind, MetricValue};
use thiserror::Error;

/// Bytes of a family's or a label's name.
const NAME_BYTES_MAX: usize = 128;
/// Bytes of a family's description.
const DESCRIPTION_BYTES_MAX: usize = 512;
/// Bytes of a metric's labels, names and values together.
const LABELS_BYTES_MAX: usize = 1_024;
/// What a histogram's lines have besides buckets that are declared: the one that holds all, the sum and the count.
const HISTOGRAM_LINES: usize = 3;
/// Ends of the names of a histogram's lines.
const HISTOGRAM_ENDS: [&str; 3] = ["_bucket", "_sum", "_count"];

/// Why a change is not made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MetricError {
    /// Prometheus would not take it.
    #[error("{what}: found {found:?}, expected letters, digits and _, no digit first, at most {NAME_BYTES_MAX} bytes")]
    Name {
        /// Whose name.
        what: &'static str,
        /// As the program wrote it, shortened.
        found: String,
    },
    /// It is ours.
    #[error("metric family {0}: expected another name: {own} are the server's own", own = OWN_METRICS.join(", "))]
    Reserved(String),
    /// A scraper could not tell them apart.
    #[error("metric family {0}: expected another name: {1} would be two metrics, one of them a histogram's")]
    Ambiguous(String, String),
    /// It has been declared as another kind.
    #[error("metric family {family}: found kind {found}, expected {expected}, which it has been declared with")]
    Kind {
        /// Its name.
        family: String,
        /// Declared now.
        found: &'static str,
        /// Declared before.
        expected: &'static str,
    },
    /// It is too long.
    #[error("metric family {family}: {what}: found {found} bytes, expected at most {most}")]
    Long {
        /// Its name.
        family: String,
        /// What of it.
        what: &'static str,
        /// How long.
        found: usize,
        /// How long it may be.
        most: usize,
    },
    /// There is no such family.
    #[error("metric family {0}: found none, expected one that has been declared")]
    NoFamily(String),
    /// There is no such metric.
    #[error("metric family {0}: found no metric with these labels, expected one that has been declared")]
    NoMetric(String),
    /// They are no bounds of a histogram, or of none.
    #[error("metric family {family}: buckets: found {found}, expected {expected}")]
    Buckets {
        /// Its name.
        family: String,
        /// Shortened.
        found: String,
        /// What is wrong with them.
        expected: &'static str,
    },
    /// A metric of this kind cannot be changed so.
    #[error("metric family {family}: found {found} of a {kind}, expected {expected}")]
    Change {
        /// Its name.
        family: String,
        /// What was to happen.
        found: &'static str,
        /// What it is.
        kind: &'static str,
        /// What could.
        expected: &'static str,
    },
    /// There is no room.
    #[error(
        "metric family {family}: found {found} lines of programs' metrics with it, expected at most {most} \
         (program_metrics)"
    )]
    Full {
        /// Its name.
        family: String,
        /// Lines of all.
        found: usize,
        /// Lines that may be.
        most: usize,
    },
}

/// A model that is loaded. Assigned by [`Registry::handle_begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner(u64);

/// All metrics of programs.
#[derive(Debug, Default)]
pub struct Registry {
    /// With none, nothing is kept.
    lines_max: usize,
    lines: usize,
    families: BTreeMap<String, Family>,
    refused: u64,
    owners: u64,
}

#[derive(Debug)]
struct Family {
    kind: MetricKind,
    description: String,
    metrics: BTreeMap<Labels, Metric>,
    owners: BTreeSet<Owner>,
}

type Labels = BTreeMap<String, String>;

#[derive(Debug)]
struct Metric {
    value: Value,
    owners: BTreeSet<Owner>,
}

#[derive(Debug)]
enum Value {
    One(f64),
    Histogram {
        /// Ascending.
        bounds: Vec<f64>,
        /// Of values up to each bound and above the one before; the last one of values above all.
        counts: Vec<u64>,
        sum: f64,
    },
}

impl Registry {
    /// With room for so many lines: of families, of metrics and of histograms' buckets.
    #[must_use]
    pub fn new(lines_max: usize) -> Self {
        Self { lines_max, ..Self::default() }
    }

    /// A model is being loaded.
    pub fn handle_begin(&mut self) -> Owner {
        self.owners += 1;
        Owner(self.owners)
    }

    /// It is gone, and what nobody else has declared is, too.
    pub fn handle_end(&mut self, owner: Owner) {
        self.families.retain(|_, family| {
            family.owners.remove(&owner);
            family.metrics.retain(|_, metric| {
                metric.owners.remove(&owner);
                !metric.owners.is_empty()
            });
            !family.owners.is_empty()
        });
        self.lines = self.families.values().map(Family::lines).sum();
    }

    /// A program of the model asks for this. Yields what the metric is then, if it is one number.
    ///
    /// # Errors
    /// If it cannot be; all is as it was then.
    pub fn handle_change(&mut self, owner: Owner, change: &MetricChange) -> Result<Option<f64>, MetricError> {
        if self.lines_max == 0 {
            return Ok(None);
        }
        let changed = match change {
            MetricChange::Family { name, description, kind } => self.declare_family(owner, (name, *kind), description),
            MetricChange::Metric { family, labels, buckets } => self.declare_metric(owner, (family, labels), buckets),
            MetricChange::Increment(to) => self.metric(to).and_then(|(kind, metric)| metric.increment(kind, to)),
            MetricChange::Set(to) => self.metric(to).and_then(|(kind, metric)| metric.set(kind, to)),
            MetricChange::Observe(to) => self.metric(to).and_then(|(kind, metric)| metric.observe(kind, to)),
        };
        self.refused += u64::from(changed.is_err());
        changed
    }

    fn declare_family(
        &mut self,
        owner: Owner,
        (name, kind): (&String, MetricKind),
        description: &str,
    ) -> Result<Option<f64>, MetricError> {
        if let Some(family) = self.families.get_mut(name) {
            if family.kind != kind {
                let (found, expected) = (kind.name(), family.kind.name());
                return Err(MetricError::Kind { family: name.clone(), found, expected });
            }
            family.owners.insert(owner);
            return Ok(None);
        }
        check_name("metric family", name, true)?;
        if OWN_METRICS.iter().any(|own| name.starts_with(own)) {
            return Err(MetricError::Reserved(name.clone()));
        }
        self.check_apart(name, kind)?;
        check_length(name, ("description", DESCRIPTION_BYTES_MAX), description.len())?;
        self.take_lines(name, 1)?;
        let (metrics, owners) = (BTreeMap::new(), BTreeSet::from([owner]));
        self.families.insert(name.clone(), Family { kind, description: description.to_owned(), metrics, owners });
        Ok(None)
    }

    /// No line of a histogram may have a name that another family has.
    fn check_apart(&self, name: &str, kind: MetricKind) -> Result<(), MetricError> {
        let is_histogram = |stem: &str| self.families.get(stem).is_some_and(|of| of.kind == MetricKind::Histogram);
        if HISTOGRAM_ENDS.iter().filter_map(|end| name.strip_suffix(end)).any(is_histogram) {
            return Err(MetricError::Ambiguous(name.to_owned(), name.to_owned()));
        }
        let lines = HISTOGRAM_ENDS.iter().map(|end| format!("{name}{end}"));
        match lines.filter(|_| kind == MetricKind::Histogram).find(|line| self.families.contains_key(line)) {
            Some(line) => Err(MetricError::Ambiguous(name.to_owned(), line)),
            None => Ok(()),
        }
    }

    fn declare_metric(
        &mut self,
        owner: Owner,
        (name, labels): (&String, &Labels),
        buckets: &[f64],
    ) -> Result<Option<f64>, MetricError> {
        let family = self.families.get_mut(name).ok_or_else(|| MetricError::NoFamily(shortened(name)))?;
        let kind = family.kind;
        if let Some(metric) = family.metrics.get_mut(labels) {
            metric.owners.insert(owner);
            family.owners.insert(owner);
            return Ok(metric.number());
        }
        for label in labels.keys() {
            check_name("label", label, false)?;
            if label.starts_with("__") || (kind == MetricKind::Histogram && label == "le") {
                return Err(MetricError::Name { what: "label", found: label.clone() });
            }
        }
        let bytes = labels.iter().map(|(label, value)| label.len() + value.len()).sum();
        check_length(name, ("labels", LABELS_BYTES_MAX), bytes)?;
        check_buckets(name, kind, buckets)?;
        let metric = Metric { value: Value::new(kind, buckets), owners: BTreeSet::from([owner]) };
        self.take_lines(name, metric.lines())?;
        let value = metric.number();
        let family = self.families.get_mut(name).expect("it was there");
        family.owners.insert(owner);
        family.metrics.insert(labels.clone(), metric);
        Ok(value)
    }

    fn metric(&mut self, of: &MetricValue) -> Result<(MetricKind, &mut Metric), MetricError> {
        let family = self.families.get_mut(&of.family).ok_or_else(|| MetricError::NoFamily(shortened(&of.family)))?;
        let metric = family.metrics.get_mut(&of.labels).ok_or_else(|| MetricError::NoMetric(of.family.clone()))?;
        Ok((family.kind, metric))
    }

    fn take_lines(&mut self, family: &str, more: usize) -> Result<(), MetricError> {
        let (found, most) = (self.lines + more, self.lines_max);
        if found > most {
            return Err(MetricError::Full { family: family.to_owned(), found, most });
        }
        self.lines = found;
        Ok(())
    }

    /// All of them, and how often programs were refused one, in Prometheus's text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, Family { kind, description, metrics, .. }) in &self.families {
            let help = description.replace('\\', "\\\\").replace('\n', "\\n");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
            metrics.iter().for_each(|(labels, metric)| metric.write(&mut text, name, labels));
        }
        let (name, help) = ("downbeat_program_metrics_refused_total", "Changes to metrics that programs were refused");
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {}", self.refused);
        text
    }
}

impl Family {
    fn lines(&self) -> usize {
        1 + self.metrics.values().map(Metric::lines).sum::<usize>()
    }
}

impl Value {
    fn new(kind: MetricKind, bounds: &[f64]) -> Self {
        match kind {
            MetricKind::Counter | MetricKind::Gauge => Self::One(0.0),
            MetricKind::Histogram => {
                Self::Histogram { bounds: bounds.to_vec(), counts: vec![0; bounds.len() + 1], sum: 0.0 }
            }
        }
    }
}

impl Metric {
    fn lines(&self) -> usize {
        match &self.value {
            Value::One(_) => 1,
            Value::Histogram { bounds, .. } => bounds.len() + HISTOGRAM_LINES,
        }
    }

    fn number(&self) -> Option<f64> {
        match self.value {
            Value::One(value) => Some(value),
            Value::Histogram { .. } => None,
        }
    }

    fn increment(&mut self, kind: MetricKind, by: &MetricValue) -> Result<Option<f64>, MetricError> {
        match &mut self.value {
            Value::One(_) if kind == MetricKind::Counter && by.value < 0.0 => {
                Err(refused(by, "a negative increment", kind, "one that is not negative"))
            }
            Value::One(value) => {
                *value += by.value;
                Ok(Some(*value))
            }
            Value::Histogram { .. } => Err(refused(by, "an increment", kind, "that it observes")),
        }
    }

    fn set(&mut self, kind: MetricKind, to: &MetricValue) -> Result<Option<f64>, MetricError> {
        match &mut self.value {
            Value::One(value) if kind == MetricKind::Gauge => {
                *value = to.value;
                Ok(Some(*value))
            }
            _ => Err(refused(to, "a set", kind, "it of a gauge")),
        }
    }

    fn observe(&mut self, kind: MetricKind, seen: &MetricValue) -> Result<Option<f64>, MetricError> {
        match &mut self.value {
            Value::Histogram { bounds, counts, sum } => {
                let at = bounds.partition_point(|&bound| bound < seen.value);
                counts[at] += 1;
                *sum += seen.value;
                Ok(None)
            }
            Value::One(_) => Err(refused(seen, "an observation", kind, "it of a histogram")),
        }
    }

    fn write(&self, text: &mut String, name: &str, labels: &Labels) {
        let mut pairs: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{}\"", label_value(value))).collect();
        let inside =
            |pairs: &[String]| if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) };
        let (bounds, counts, sum) = match &self.value {
            Value::One(value) => {
                let _ = writeln!(text, "{name}{} {}", inside(&pairs), Told(*value));
                return;
            }
            Value::Histogram { bounds, counts, sum } => (bounds, counts, sum),
        };
        let plain = inside(&pairs);
        let mut up_to = 0;
        for (bound, count) in bounds.iter().copied().chain([f64::INFINITY]).zip(counts) {
            up_to += count;
            pairs.push(format!("le=\"{}\"", Told(bound)));
            let _ = writeln!(text, "{name}_bucket{} {up_to}", inside(&pairs));
            pairs.pop();
        }
        let _ = writeln!(text, "{name}_sum{plain} {}\n{name}_count{plain} {up_to}", Told(*sum));
    }
}

/// A number as Prometheus writes it.
struct Told(f64);

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            value if value == f64::INFINITY => f.write_str("+Inf"),
            value if value == f64::NEG_INFINITY => f.write_str("-Inf"),
            value => value.fmt(f),
        }
    }
}

fn refused(of: &MetricValue, found: &'static str, kind: MetricKind, expected: &'static str) -> MetricError {
    MetricError::Change { family: of.family.clone(), found, kind: kind.name(), expected }
}

/// By the grammar of Prometheus's data model.
fn check_name(what: &'static str, name: &str, may_have_colons: bool) -> Result<(), MetricError> {
    let is_letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_' || (may_have_colons && byte == b':');
    let bytes = name.as_bytes();
    let is_one = bytes.first().is_some_and(|&first| is_letter(first))
        && bytes.iter().all(|&byte| is_letter(byte) || byte.is_ascii_digit())
        && bytes.len() <= NAME_BYTES_MAX;
    if is_one { Ok(()) } else { Err(MetricError::Name { what, found: shortened(name) }) }
}

fn shortened(name: &str) -> String {
    name.chars().take(NAME_BYTES_MAX).collect()
}

fn check_length(family: &str, (what, most): (&'static str, usize), found: usize) -> Result<(), MetricError> {
    if found <= most { Ok(()) } else { Err(MetricError::Long { family: family.to_owned(), what, found, most }) }
}

fn check_buckets(family: &str, kind: MetricKind, buckets: &[f64]) -> Result<(), MetricError> {
    let expected = match kind {
        MetricKind::Histogram if buckets.is_empty() => "at least one of a histogram",
        MetricKind::Histogram if !buckets.is_sorted_by(|a, b| a < b) => "ascending bounds",
        MetricKind::Counter | MetricKind::Gauge if !buckets.is_empty() => "them of a histogram only",
        _ => return Ok(()),
    };
    let found = format!("{:?}", &buckets[..buckets.len().min(8)]);
    Err(MetricError::Buckets { family: family.to_owned(), found, expected })
}

#[cfg(test)]
mod tests;
