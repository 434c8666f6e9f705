//! What requests take of models whose requests are unequal, as the scheduler has learned it: by the application that
//! clients name, and by length.
//!
//! Applications travel as hashes of their names. The first [`NAMES_MAX`] names are kept that clients of this frontend
//! have used; of others the hash is shown.

use std::{cell::RefCell, collections::BTreeMap};

use frontend::core::Core;
use prometheus::{GaugeVec, IntGaugeVec, Opts, Registry};
use proto::{
    Application, BatchCost,
    request_times::{AloneTimes, LengthTimes, QUANTILES, RequestTimes},
};

use super::register::registered;

/// Names of applications that are kept, of at most [`Application::NAME_BYTES_MAX`] each.
const NAMES_MAX: usize = 1024;
/// What all applications are called that the scheduler does not tell apart.
const OTHERS: &str = "(others)";

/// By model and version, these and two more.
const LABELS: [&str; 4] = ["model", "version", "application", "part"];
const LENGTH_LABELS: [&str; 4] = ["model", "version", "bytes", "part"];

pub(super) struct RequestMetrics {
    /// c0 in seconds and c1.
    cost: [GaugeVec; 2],
    /// Of applications, and of lengths.
    samples: [IntGaugeVec; 2],
    alone: [GaugeVec; 2],
    names: RefCell<BTreeMap<Application, String>>,
}

impl RequestMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, GaugeVec::new(Opts::new(name, help), labels))
        };
        let count = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, IntGaugeVec::new(Opts::new(name, help), labels))
        };
        Self {
            cost: [
                gauge("downbeat_batch_fixed_seconds", "c0: what a batch takes in any case", &LABELS[..2]),
                gauge(
                    "downbeat_batch_per_task",
                    "c1: what each further request adds, as a part of what the longest takes beyond c0",
                    &LABELS[..2],
                ),
            ],
            samples: [
                count("downbeat_alone_samples", "Requests of an application whose time alone is known", &LABELS[..3]),
                count(
                    "downbeat_alone_by_length_samples",
                    "Requests of a length whose time alone is known, or follows from a batch's",
                    &LENGTH_LABELS[..3],
                ),
            ],
            alone: [
                gauge(
                    "downbeat_alone_seconds",
                    "What this part of an application's requests takes at most, alone",
                    &LABELS,
                ),
                gauge(
                    "downbeat_alone_by_length_seconds",
                    "The same of requests whose inputs have so many bytes",
                    &LENGTH_LABELS,
                ),
            ],
            names: RefCell::default(),
        }
    }

    /// A request named its application, within the bounds of names.
    pub(super) fn handle_name(&self, name: &str) {
        let mut names = self.names.borrow_mut();
        let application = Application::named(name);
        if names.len() < NAMES_MAX && !names.contains_key(&application) {
            names.insert(application, name.to_owned());
        }
    }

    /// Reads what is known of the models that are named, by their index.
    pub(super) fn read(&self, core: &Core, is_named: impl Fn(usize) -> bool) {
        // What was learned may be of other lengths and applications than before.
        self.cost.iter().chain(&self.alone).for_each(GaugeVec::reset);
        self.samples.iter().for_each(IntGaugeVec::reset);
        for (index, served) in core.models().iter().enumerate().filter(|(index, _)| is_named(*index)) {
            if let Some(times) = core.request_times(index) {
                self.set((&served.model.name, &served.model.version), times);
            }
        }
    }

    fn set(&self, (model, version): (&str, &str), times: &RequestTimes) {
        let RequestTimes { cost: BatchCost { fixed, per_task_ppm }, applications, lengths } = times;
        let per_task = f64::from(*per_task_ppm) / f64::from(BatchCost::PER_TASK_MAX);
        for (gauge, value) in self.cost.iter().zip([fixed.as_secs_f64(), per_task]) {
            gauge.with_label_values(&[model, version]).set(value);
        }
        for (application, times) in applications {
            self.set_alone(0, [model, version, &self.label(*application)], times);
        }
        for LengthTimes { shortest, longest, times } in lengths {
            self.set_alone(1, [model, version, &format!("{shortest}-{longest}")], times);
        }
    }

    fn set_alone(&self, which: usize, [model, version, of]: [&str; 3], times: &AloneTimes) {
        self.samples[which].with_label_values(&[model, version, of]).set(times.samples.into());
        for (quantile, time) in QUANTILES.iter().zip(times.quantiles) {
            let labels = [model, version, of, &quantile.to_string()];
            self.alone[which].with_label_values(&labels).set(time.as_secs_f64());
        }
    }

    /// What people call it.
    fn label(&self, application: Option<Application>) -> String {
        let Some(application) = application else { return OTHERS.to_owned() };
        let hash = || if application == Application::NONE { String::new() } else { format!("#{:08x}", application.0) };
        self.names.borrow().get(&application).cloned().unwrap_or_else(hash)
    }
}

#[cfg(test)]
mod tests {
    use prometheus::TextEncoder;
    use proto::Span;

    use super::*;

    #[test]
    fn applications_are_called_by_their_names_where_these_are_known_and_told_as_text() {
        let registry = Registry::new();
        let metrics = RequestMetrics::new(&registry);
        let evil = "a\"} 1\nb{c=\"";
        [evil, "chat"].into_iter().for_each(|name| metrics.handle_name(name));
        let times = |ms| AloneTimes { samples: 7, quantiles: [ms, 2 * ms, 3 * ms].map(Span::from_millis) };
        let named = |name| Some(Application::named(name));
        metrics.set(
            ("m", "1"),
            &RequestTimes {
                cost: BatchCost { fixed: Span::from_millis(2), per_task_ppm: 250_000 },
                applications: vec![
                    (Some(Application::NONE), times(1)),
                    (named("chat"), times(10)),
                    (named(evil), times(20)),
                    (Some(Application(0xabc)), times(30)),
                    (None, times(40)),
                ],
                lengths: vec![LengthTimes { shortest: 64, longest: 90, times: times(100) }],
            },
        );
        let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for expected in [
            r#"downbeat_batch_fixed_seconds{model="m",version="1"} 0.002"#,
            r#"downbeat_batch_per_task{model="m",version="1"} 0.25"#,
            r#"downbeat_alone_seconds{application="",model="m",part="0.5",version="1"} 0.001"#,
            r#"downbeat_alone_seconds{application="chat",model="m",part="0.99",version="1"} 0.03"#,
            r##"downbeat_alone_seconds{application="#00000abc",model="m",part="0.9",version="1"} 0.06"##,
            r#"downbeat_alone_samples{application="(others)",model="m",version="1"} 7"#,
            r#"downbeat_alone_by_length_seconds{bytes="64-90",model="m",part="0.5",version="1"} 0.1"#,
        ] {
            assert!(text.lines().any(|line| line == expected), "{expected}\n{text}");
        }
        assert!(text.lines().all(|line| line.starts_with("downbeat_") || line.starts_with("# ")), "{text}");
    }

    #[test]
    fn names_are_bounded() {
        let metrics = RequestMetrics::new(&Registry::new());
        (0..2 * NAMES_MAX).for_each(|name| metrics.handle_name(&name.to_string()));
        assert_eq!(metrics.names.borrow().len(), NAMES_MAX);
        assert_eq!(metrics.label(Some(Application::named("0"))), "0");
        assert!(metrics.label(Some(Application::named("2000"))).starts_with('#'));
    }
}
