//! `downbeat bench goodput`: the highest aggregate rate at which, for every model and each of its classes, at most 1 %
//! of requests are late or dropped (Symphony, section 3.4: a binary search over fixed rates).
//!
//! Near its limit deferred scheduling is metastable, so one seed's answer may be lucky or unlucky: with several seeds
//! the median is reported.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use cli::{CommandError, positive};
use indicatif::{ProgressBar, ProgressStyle};
use scheduler::{Policy, policy::POLICIES};
use serde::Serialize;
use sim::{
    Options, Report, Workload, WorkloadError,
    checker::Violation,
    cluster,
    report::{ClassReport, PredictionReport, StepReport},
    workload::SECONDS_MAX,
};

use crate::real_time;

/// Late or dropped requests that goodput allows, of each model's.
pub const BAD_RATE_MAX: f64 = 0.01;
/// The usual [`Probe::resolution`].
pub const RESOLUTION: f64 = 0.001;
/// Searches that one command runs.
const SEEDS_MAX: u64 = 1000;

/// Search the highest rate that a workload is served at, in virtual or in real time.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Workload file (TOML).
    #[arg(long)]
    pub workload: PathBuf,
    /// Batch policy.
    #[arg(long, default_value = "downbeat", help = format!("Batch policy: {POLICIES}"))]
    pub policy: Policy,
    /// Simulated span of each probe in seconds; the workload's by default. Its first tenth warms up.
    #[arg(long)]
    pub seconds: Option<f64>,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Search with this many consecutive seeds and report the search with the median goodput.
    #[arg(long, default_value_t = 1)]
    pub seeds: u64,
    /// Run every probe in real time: the scheduler and emulated GPUs on threads of their own. It takes about eleven
    /// times `--seconds`.
    #[arg(long)]
    pub real_time: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// The result: the best probe of the search with the median goodput.
#[derive(Debug, Clone, Serialize)]
pub struct Goodput {
    /// The workload's name.
    pub workload: String,
    /// As on the command line.
    pub policy: String,
    /// Median over seeds of the highest rate found, in requests a second.
    pub goodput_rps: f64,
    /// The same where all requests together are judged: a model that is late does not decide alone. `null` if there is
    /// one model, and in real time; where memory is short it is `goodput_rps`.
    pub goodput_in_all_rps: Option<f64>,
    /// What came in the run at `goodput_rps`: chance, and the minutes of `functions`, make it another rate.
    pub offered_rps: f64,
    /// Median latency of all that was answered in that run; `null` if nothing was.
    pub p50_ms: Option<f64>,
    /// Its 99.99th percentile.
    pub p9999_ms: Option<f64>,
    /// The model with the largest part of late or dropped requests, and that part.
    pub worst: Option<(String, f64)>,
    /// Mean of batch sizes over batches.
    pub batch_mean: f64,
    /// Time that GPUs executed, of all GPUs' time.
    pub gpu_busy_fraction: f64,
    /// GPUs that ran at least one batch in a second, averaged over seconds.
    pub gpus_used_mean: f64,
    /// How far actions were off what was planned.
    pub predicted: PredictionReport,
    /// In the order of the workload.
    pub models: Vec<ModelGoodput>,
    /// What the graphs ask.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepReport>,
}

/// One model at the found rate.
#[derive(Debug, Clone, Serialize)]
pub struct ModelGoodput {
    /// Its name in the workload.
    pub name: String,
    /// Requests a second that arrived.
    pub offered_rps: f64,
    /// Late or dropped, of those.
    pub bad_rate: f64,
    /// Median latency of those answered; `null` if there were none.
    pub p50_ms: Option<f64>,
    /// Its 99th percentile.
    pub p99_ms: Option<f64>,
    /// Median of batch sizes over batches.
    pub batch_median: Option<f64>,
    /// Its classes, in the order of the workload; none if there is but one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassReport>,
}

/// How a search tries a rate, and when it ends.
#[derive(Debug, Clone)]
pub struct Probe {
    /// Simulated span in seconds; its first tenth warms up.
    pub seconds: f64,
    /// Seeds the arrivals of every probe.
    pub seed: u64,
    /// The search ends when its bounds are this close, as a part of the upper one.
    pub resolution: f64,
    /// Whose requests are to be good.
    pub judged: Judged,
}

/// Whose requests are late or dropped by at most [`BAD_RATE_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judged {
    /// Those of each model and class; where memory is short all together, as of thousands of models most are asked for
    /// too rarely to be judged each.
    Each,
    /// All together.
    InAll,
}

impl Judged {
    fn is_good(self, workload: &Workload, report: &Report) -> bool {
        if self == Self::InAll || workload.memory.is_some() {
            report.totals.bad_rate() <= BAD_RATE_MAX
        } else {
            report.models.iter().all(|model| model.worst_bad_rate() <= BAD_RATE_MAX)
        }
    }
}

/// Searches with one seed. `progress` is told what part of the search is done, from 0
/// to 1, and the rate that is being tried.
///
/// Returns the run at the highest rate that was good enough; its rate is 0, and no request arrived, if none was.
///
/// # Errors
/// If an invariant is broken.
pub fn search(
    workload: &Workload,
    policy: Policy,
    probe: &Probe,
    progress: &mut dyn FnMut(f64, f64),
) -> Result<Option<Report>, Violation> {
    let run = |options: &Options, progress: &mut dyn FnMut(f64)| cluster::run(workload, options, &mut |_| (), progress);
    search_with(run, workload, policy, probe, progress)
}

/// As [`search`], with probes that `run` tries.
fn search_with<E>(
    mut run: impl FnMut(&Options, &mut dyn FnMut(f64)) -> Result<Report, E>,
    workload: &Workload,
    policy: Policy,
    probe: &Probe,
    progress: &mut dyn FnMut(f64, f64),
) -> Result<Option<Report>, E> {
    let &Probe { seconds, seed, resolution, judged } = probe;
    let mut bounds = (0.0, workload.capacity_rps());
    let probes = resolution.log2().abs().ceil() + 1.0;
    let mut done = 0.0;
    let mut best = None;
    // Below this even one request in a probe is too many.
    let floor = 1.0 / seconds;
    while bounds.1 - bounds.0 > resolution * bounds.1 && bounds.1 > floor {
        let rate_rps = f64::midpoint(bounds.0, bounds.1);
        let options = Options { policy, rate_rps, seconds, seed };
        let report = run(&options, &mut |second| {
            progress(((done + second / seconds) / probes).min(1.0), rate_rps);
        })?;
        if judged.is_good(workload, &report) {
            bounds.0 = rate_rps;
            best = Some(report);
        } else {
            bounds.1 = rate_rps;
        }
        done += 1.0;
    }
    Ok(best)
}

/// Whether a policy knows how to deal with short memory, if the workload's is.
///
/// # Errors
/// If it does not.
pub fn check_policy(workload: &Workload, policy: Policy) -> Result<(), CommandError> {
    if workload.memory.is_none() || policy.loads_weights() {
        return Ok(());
    }
    let expected = "one that loads weights, as the workload's memory does not hold all models";
    Err(CommandError::flag("--policy", expected, policy))
}

/// Reads what `--workload` names.
///
/// # Errors
/// If it cannot be read, or is wrong.
pub fn read_workload(path: &Path) -> Result<Workload, CommandError> {
    Workload::read(path).map_err(|error| match error {
        WorkloadError::Read { .. } => CommandError::failed("--workload", error),
        wrong => wrong.into(),
    })
}

/// Runs the command and prints its result on stdout, its progress on stderr.
///
/// # Errors
/// On bad input (exit code 2).
pub fn run(args: &Args) -> Result<(), CommandError> {
    let workload = read_workload(&args.workload)?;
    let seconds = positive("--seconds", args.seconds.unwrap_or(workload.seconds), SECONDS_MAX)?;
    positive("--seeds", args.seeds as f64, SEEDS_MAX as f64)?;
    check_policy(&workload, args.policy)?;
    let has_rates = workload.models.iter().all(|model| model.clients == 0);
    if args.real_time && !(workload.memory.is_none() && has_rates && workload.graphs.is_empty()) {
        let expected = "a workload without graphs whose models all fit the memory and whose rates are given";
        return Err(CommandError::flag("--real-time", expected, &workload.name));
    }
    let has_both = workload.asked().count() > 1 && workload.memory.is_none() && !args.real_time;
    let judges = if has_both { &[Judged::Each, Judged::InAll][..] } else { &[Judged::Each] };
    let bar = ProgressBar::new(1000 * args.seeds * judges.len() as u64);
    let style = ProgressStyle::with_template("searching [{bar:40}] {percent} %, {msg}, {eta} left");
    bar.set_style(style.expect("a constant template").progress_chars("=> "));
    let mut found = [Vec::new(), Vec::new()];
    for (place, (&judged, found)) in judges.iter().zip(&mut found).enumerate() {
        for index in 0..args.seeds {
            let seed = args.seed.wrapping_add(index);
            let probe = Probe { seconds, seed, resolution: RESOLUTION, judged };
            let mut progress = |part: f64, rate_rps: f64| {
                bar.set_position(1000 * (place as u64 * args.seeds + index) + (1000.0 * part) as u64);
                bar.set_message(format!("seed {seed}, {rate_rps:.0} requests/s"));
            };
            let report = if args.real_time {
                let run =
                    |options: &Options, progress: &mut dyn FnMut(f64)| real_time::run(&workload, options, progress);
                search_with(run, &workload, args.policy, &probe, &mut progress)?
            } else {
                search(&workload, args.policy, &probe, &mut progress)?
            };
            found.push(report);
        }
    }
    bar.finish_and_clear();
    let [each, in_all] = found;
    let mut goodput = median(&workload, args.policy, each);
    goodput.goodput_in_all_rps = match judges.len() {
        1 => workload.memory.map(|_| goodput.goodput_rps),
        _ => Some(median(&workload, args.policy, in_all).goodput_rps),
    };
    if args.json {
        println!("{}", serde_json::to_string(&goodput).expect("plain data"));
    } else {
        println!("{}", goodput.table());
    }
    Ok(())
}

/// The search with the median goodput; with an even number of seeds the rate is between the two middle ones.
fn median(workload: &Workload, policy: Policy, mut found: Vec<Option<Report>>) -> Goodput {
    let rate_of = |report: &Option<Report>| report.as_ref().map_or(0.0, |report| report.rate_rps);
    found.sort_by(|one, other| rate_of(one).total_cmp(&rate_of(other)));
    let (low, high) = (&found[(found.len() - 1) / 2], &found[found.len() / 2]);
    let goodput_rps = f64::midpoint(rate_of(low), rate_of(high));
    let report = low.as_ref();
    let models = report.into_iter().flat_map(|report| &report.models).map(|model| ModelGoodput {
        name: model.name.clone(),
        offered_rps: model.figures.offered_rps,
        bad_rate: model.figures.bad_rate(),
        p50_ms: model.figures.p50_ms,
        p99_ms: model.figures.p99_ms,
        batch_median: model.figures.batch_median,
        classes: model.classes.clone(),
    });
    Goodput {
        workload: workload.name.clone(),
        policy: policy.to_string(),
        goodput_rps,
        goodput_in_all_rps: None,
        offered_rps: report.map_or(0.0, |report| report.totals.offered_rps),
        p50_ms: report.and_then(|report| report.totals.p50_ms),
        p9999_ms: report.and_then(|report| report.totals.p9999_ms),
        worst: report.and_then(worst),
        batch_mean: report.map_or(0.0, |report| report.batch_mean),
        gpu_busy_fraction: report.map_or(0.0, |report| report.gpu_busy_fraction),
        gpus_used_mean: report.map_or(0.0, |report| report.gpus_used_mean),
        predicted: report.map(|report| report.predicted).unwrap_or_default(),
        models: models.collect(),
        steps: report.map_or_else(Vec::new, |report| report.steps.clone()),
    }
}

/// The model that fared worst.
#[must_use]
pub fn worst(report: &Report) -> Option<(String, f64)> {
    let models = report.models.iter().map(|model| (model.name.clone(), model.worst_bad_rate()));
    models.max_by(|one, other| one.1.total_cmp(&other.1))
}

impl Goodput {
    /// A table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
        let percent = |part: f64| format!("{:.3} %", 100.0 * part);
        let in_all = self.goodput_in_all_rps.map_or_else(String::new, |rate_rps| {
            format!("; {rate_rps:.0} requests/s if all models are judged together")
        });
        let mut lines = vec![
            format!(
                "{} under {}: {:.0} requests/s (asked for at {:.0}){in_all}",
                self.workload, self.policy, self.offered_rps, self.goodput_rps
            ),
            format!(
                "p50 {} ms, p99.99 {} ms; worst: {}",
                number(self.p50_ms),
                number(self.p9999_ms),
                self.worst
                    .as_ref()
                    .map_or_else(|| "-".to_owned(), |(name, bad)| format!("{name}, {} bad", percent(*bad))),
            ),
            format!(
                "mean batch {:.2}, GPUs busy {:.1} % of the time, {:.2} used in a second\n",
                self.batch_mean,
                100.0 * self.gpu_busy_fraction,
                self.gpus_used_mean
            ),
        ];
        let row = |cells: [String; 6]| {
            let [name, offered, bad, p50, p99, batch] = cells;
            format!("{name:<24}{offered:>12}{bad:>10}{p50:>10}{p99:>10}{batch:>7}")
        };
        lines.push(row(["model", "offered r/s", "bad", "p50 ms", "p99 ms", "batch"].map(str::to_owned)));
        for model in &self.models {
            lines.push(row([
                model.name.clone(),
                format!("{:.1}", model.offered_rps),
                percent(model.bad_rate),
                number(model.p50_ms),
                number(model.p99_ms),
                model.batch_median.map_or_else(|| "-".to_owned(), |median| median.to_string()),
            ]));
            lines.extend(model.classes.iter().map(|class| {
                row([
                    class.slo_ms.map_or_else(|| "  without SLO".to_owned(), |slo_ms| format!("  SLO {slo_ms} ms")),
                    format!("{:.1}", class.offered_rps),
                    percent(class.bad_rate()),
                    number(class.p50_ms),
                    number(class.p99_ms),
                    String::new(),
                ])
            }));
        }
        lines.extend(self.steps.iter().map(|step| step.line(49)));
        let mut text = lines.join("\n");
        self.predicted.describe(&mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn workload(text: &str) -> Workload {
        Workload::parse(text, "test", "test", Path::new(".")).unwrap()
    }

    fn probe(seconds: f64, seed: u64) -> Probe {
        Probe { seconds, seed, resolution: RESOLUTION, judged: Judged::Each }
    }

    #[test]
    fn finds_the_limit_of_a_queue_without_randomness() {
        // A batch of one takes 10 ms; uniform arrivals at up to 100 requests/s are all served.
        let text = "gpus = 1\nseconds = 10\narrivals = { process = \"uniform\" }\n\
                    [[model]]\nname = \"m\"\nlatency_ms = [10]\nslo_ms = 15\n";
        let workload = workload(text);
        let report = search(&workload, Policy::Eager, &probe(10.0, 1), &mut |_, _| ()).unwrap().unwrap();
        // The search approaches the capacity from below.
        assert!((99.8..=100.0).contains(&report.rate_rps), "{}", report.rate_rps);
    }

    /// One model of a hundredth of all requests can hardly be met: it decides alone unless all are judged together.
    #[test]
    fn a_model_that_is_late_decides_only_where_each_is_judged() {
        let text = "gpus = 2\n[[model]]\nname = \"usual\"\nlatency_ms = [10]\nslo_ms = 200\nshare = 0.995\n\
                    [[model]]\nname = \"tight\"\nlatency_ms = [10]\nslo_ms = 10.1\nshare = 0.005\n";
        let workload = workload(text);
        let [each, in_all] = [Judged::Each, Judged::InAll].map(|judged| {
            let probe = Probe { judged, ..probe(60.0, 1) };
            search(&workload, Policy::Eager, &probe, &mut |_, _| ()).unwrap().unwrap()
        });
        assert!(each.rate_rps < 100.0 && in_all.rate_rps > 150.0, "{} and {}", each.rate_rps, in_all.rate_rps);
        assert_eq!(worst(&in_all).unwrap().0, "tight");
        let goodput = median(&workload, Policy::Eager, vec![Some(in_all)]);
        let text = Goodput { goodput_in_all_rps: Some(150.0), ..goodput }.table();
        let head: Vec<&str> = text.lines().take(2).collect();
        assert!(head[0].ends_with("; 150 requests/s if all models are judged together"), "{text}");
        assert!(head[1].starts_with("p50 ") && head[1].contains("worst: tight, "), "{text}");
    }

    #[test]
    fn the_median_of_searches() {
        let workload = workload("gpus = 1\n[[model]]\nname = \"m\"\nlatency_ms = [10]\nslo_ms = 15\n");
        let at = |rate_rps| {
            let options = Options { policy: Policy::Eager, rate_rps, seconds: 1.0, seed: 1 };
            Some(cluster::run(&workload, &options, &mut |_| (), &mut |_| ()).unwrap())
        };
        let median_of = |found| median(&workload, Policy::Eager, found).goodput_rps;
        assert_eq!(median_of(vec![at(30.0), None, at(20.0)]), 20.0);
        assert_eq!(median_of(vec![at(30.0), at(20.0)]), 25.0);
        assert_eq!(median_of(vec![None]), 0.0);
    }

    /// Symphony, Table 2: Symphony before Shepherd, Nexus and Clockwork on both workloads. Section 5.3:
    /// the goodput of Nexus is near what eight GPUs can do without coordination.
    #[test]
    fn table_2_in_the_papers_order() {
        for (alpha, beta, slo, uncoordinated) in [(1.053, 5.072, 25, 4501.0), (5.090, 18.368, 70, 713.0)] {
            let workload = workload(&format!(
                "gpus = 8\n[[model]]\nname = \"m\"\nalpha_ms = {alpha}\nbeta_ms = {beta}\nslo_ms = {slo}\n"
            ));
            let goodput = |policy| {
                let found = search(&workload, policy, &probe(20.0, 3), &mut |_, _| ()).unwrap();
                found.map_or(0.0, |report| report.rate_rps)
            };
            let deferred = goodput(Policy::Deferred);
            for other in [Policy::Shepherd, Policy::Nexus, Policy::Clockwork] {
                assert!(goodput(other) < deferred, "{other}: {} of {deferred}", goodput(other));
            }
            let nexus = goodput(Policy::Nexus);
            assert!((0.8..1.0).contains(&(nexus / uncoordinated)), "{nexus} of {uncoordinated}");
        }
    }

    #[test]
    fn deferred_beats_eager_where_batching_matters() {
        let workload =
            workload("gpus = 32\n[[model]]\nname = \"m\"\ncount = 10\nalpha_ms = 1\nbeta_ms = 15\nslo_ms = 46\n");
        let goodput = |policy| search(&workload, policy, &probe(5.0, 2), &mut |_, _| ()).unwrap().unwrap().rate_rps;
        let (deferred, eager) = (goodput(Policy::Deferred), goodput(Policy::Eager));
        assert!(deferred > 1.05 * eager, "deferred {deferred}, eager {eager}");
    }
}
