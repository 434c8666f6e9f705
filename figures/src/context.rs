//! What a figure is made with: its budget, its seed, and simulations on all cores with a progress bar.

use std::{
    num::NonZero,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use bench::goodput::{self, Judged, Probe};
use chart::{Axis, Series};
use indicatif::ProgressBar;
use scheduler::Policy;
use sim::{Options, Report, Workload, checker::Violation, cluster};

use crate::{
    figure::FigureError,
    table::{Table, cell},
};

/// Requests that a core simulates in a second, about. Budgets are turned into requests with it and not by a clock, so
/// that one budget gives one result on every machine.
pub(crate) const REQUESTS_PER_CORE_SECOND: f64 = 400_000.0;
/// Probes of a goodput search, and the rate that they run at on average, of the workload's capacity.
const PROBES: f64 = 11.0;
pub(crate) const PROBE_RATE: f64 = 0.65;
/// Simulated seconds of a run: too short, and it is over before the cluster has settled.
const SECONDS_MIN: f64 = 3.0;
const SECONDS_MAX: f64 = 240.0;

/// The policies that figures compare, and their looks.
pub(crate) const POLICIES: [&str; 9] =
    ["downbeat", SYMPHONY, "deferred", "eager", "shepherd", "nexus", "clockwork", "clipper", AUTHORS];
/// Symphony's scheduler as its authors' code has it: the target follows the measured rate.
pub(crate) const AUTHORS: &str = "symphony";
/// What Symphony's evaluation ran.
pub(crate) const SYMPHONY: &str = "deferred:target";
/// The published policies of windows: what `downbeat` must beat the best of.
const RIVALS: [&str; 4] = [AUTHORS, SYMPHONY, "deferred", "eager"];

/// One goodput search.
pub(crate) struct Search {
    /// On what.
    pub workload: Workload,
    /// With what.
    pub policy: Policy,
}

/// One run at a fixed rate.
pub(crate) struct Run {
    /// On what.
    pub workload: Workload,
    /// With what.
    pub policy: Policy,
    /// Aggregate.
    pub rate_rps: f64,
}

/// Of one call of `downbeat figures`.
pub(crate) struct Context {
    /// Core minutes for each figure, about.
    pub budget_minutes: f64,
    /// Of all arrivals.
    pub seed: u64,
    /// Where figures are written to.
    pub out: PathBuf,
    /// On stderr.
    pub bar: ProgressBar,
}

impl Context {
    /// Searches the goodput of each; notes on the table how precisely. `None` where no rate was good enough.
    pub(crate) fn goodputs(&self, searches: &[Search], table: &mut Table) -> Result<Vec<Option<Report>>, FigureError> {
        let rate = |search: &Search| PROBES * PROBE_RATE * search.workload.capacity_rps();
        let seconds = self.seconds(searches.iter().map(rate).sum());
        self.bar.inc_length(searches.len() as u64);
        let found = self.parallel(searches, |search| {
            let probe = Probe { seconds, seed: self.seed, resolution: goodput::RESOLUTION, judged: Judged::Each };
            goodput::search(&search.workload, search.policy, &probe, &mut |_, _| ())
        })?;
        // Where next to nothing can be served there is nothing to be precise about.
        let least = searches.iter().zip(&found).filter_map(|(search, report)| {
            let rate_rps = report.as_ref()?.rate_rps;
            (rate_rps > 0.1 * search.workload.capacity_rps()).then(|| rate_rps * share_min(&search.workload))
        });
        note_precision(table, seconds, least.fold(f64::INFINITY, f64::min));
        Ok(found)
    }

    /// Runs each at its rate; notes on the table how precisely.
    pub(crate) fn runs(&self, runs: &[Run], table: &mut Table) -> Result<Vec<Report>, FigureError> {
        let seconds = self.seconds(runs.iter().map(|run| run.rate_rps).sum());
        self.bar.inc_length(runs.len() as u64);
        let reports = self.parallel(runs, |run| {
            let options = Options { policy: run.policy, rate_rps: run.rate_rps, seconds, seed: self.seed };
            cluster::run(&run.workload, &options, &mut |_| (), &mut |_| ())
        })?;
        let least = runs.iter().map(|run| run.rate_rps * share_min(&run.workload));
        note_precision(table, seconds, least.fold(f64::INFINITY, f64::min));
        Ok(reports)
    }

    /// Simulated seconds that the budget allows for at this many requests a second, over all runs of a figure.
    pub(crate) fn seconds(&self, rate_rps: f64) -> f64 {
        let seconds = self.budget_minutes * 60.0 * REQUESTS_PER_CORE_SECOND / rate_rps.max(1.0);
        // Rounded, so that it can be told.
        (10.0 * seconds.clamp(SECONDS_MIN, SECONDS_MAX)).round() / 10.0
    }

    /// Does all jobs on all cores, with a step of the bar for each; the results are in the order of the jobs.
    #[allow(clippy::disallowed_methods, reason = "simulations share nothing; each is a core of its own")]
    pub(crate) fn parallel<T: Sync, R: Send>(
        &self,
        jobs: &[T],
        work: impl Fn(&T) -> Result<R, Violation> + Sync,
    ) -> Result<Vec<R>, FigureError> {
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(jobs.len()));
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        thread::scope(|scope| {
            for _ in 0..cores.min(jobs.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(job) = jobs.get(index) else { break };
                        let result = work(job);
                        self.bar.inc(1);
                        done.lock().expect("no job panics").push((index, result));
                    }
                });
            }
        });
        let mut done = done.into_inner().expect("no job panics");
        done.sort_by_key(|(index, _)| *index);
        Ok(done.into_iter().map(|(_, result)| result).collect::<Result<_, _>>()?)
    }
}

/// The part of a workload's least asked model.
fn share_min(workload: &Workload) -> f64 {
    workload.models.iter().map(|model| model.share).fold(1.0, f64::min)
}

/// `rate_rps` is that of the least asked model.
pub(crate) fn note_precision(table: &mut Table, seconds: f64, rate_rps: f64) {
    let requests = 0.9 * seconds * rate_rps;
    // Half the width of the normal approximation's interval.
    let error = 100.0 * 1.96 * (0.01 * 0.99 / requests).sqrt();
    table.note(
        "precision",
        format!(
            "each run simulates {seconds} s and counts at least {requests:.0} requests of each model; with so many a \
             bad rate of 1 % is measured within ±{error:.2} % (95 % confidence)"
        ),
    );
}

/// What policies are compared by, in words around the ratio.
pub(crate) struct Measure {
    does: &'static str,
    what: &'static str,
    /// Whether less is better.
    is_cost: bool,
}

/// Goodputs, in requests a second.
pub(crate) const GOODPUT: Measure = Measure { does: "serves", what: "the goodput of the best of", is_cost: false };
/// Requests answered in time at one load.
pub(crate) const IN_TIME: Measure =
    Measure { does: "answers in time", what: "as many requests as the best of", is_cost: false };
/// GPU time.
pub(crate) const GPU_TIME: Measure =
    Measure { does: "keeps GPUs busy", what: "as long as whichever does least of", is_cost: true };
/// GPUs that suffice.
pub(crate) const GPUS_NEEDED: Measure =
    Measure { does: "needs", what: "as many GPUs as whichever needs fewest of", is_cost: true };

/// Notes how `downbeat` compares with the best of [`RIVALS`], over values of each of `names`, one setting after the
/// other. A rival at zero or infinity does not serve the setting at all.
pub(crate) fn note_rivals(table: &mut Table, measure: &Measure, names: &[&str], values: &[f64]) {
    let Measure { does, what, is_cost } = measure;
    let of = |values: &[f64], name: &str| values[names.iter().position(|&policy| policy == name).expect("it is named")];
    let rivals: Vec<_> = RIVALS.into_iter().filter(|name| names.contains(name)).collect();
    let best = |values: &[f64]| {
        let found = rivals.iter().map(|name| of(values, name)).filter(|&value| value > 0.0 && value.is_finite());
        if *is_cost { found.reduce(f64::min) } else { found.reduce(f64::max) }
    };
    let ratio = |values: &[f64]| Some(of(values, "downbeat") / best(values)?);
    let mut ratios: Vec<f64> = values.chunks(names.len()).filter_map(ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (ratios.first(), ratios.last()) else { return };
    let finding = match ratios.len() {
        1 => format!("`downbeat` {does} {least:.3} times"),
        settings => {
            let median = ratios[settings / 2];
            let is_worse = |ratio: &f64| if *is_cost { *ratio > 1.005 } else { *ratio < 0.995 };
            let worse = ratios.iter().filter(|ratio| is_worse(ratio)).count();
            let bound = if *is_cost { "more than 1.005" } else { "less than 0.995" };
            format!(
                "In {settings} settings `downbeat` {does} {least:.3} to {most:.3} times (median {median:.3}; {bound} \
                 in {worse})"
            )
        }
    };
    table.note("finding", format!("{finding} {what} `{}`", rivals.join("`, `")));
}

/// Rows of `columns` values each as columns.
pub(crate) fn transposed(values: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

/// The rate of a search's result.
pub(crate) fn rate_of(report: &Option<Report>) -> f64 {
    report.as_ref().map_or(0.0, |report| report.rate_rps)
}

/// Columns that stand beside a goodput.
pub(crate) const BESIDE: [&str; 3] = ["p50 (ms)", "p99.99 (ms)", "worst model (% bad)"];

/// What they say of the run at a search's result.
pub(crate) fn beside(report: &Option<Report>) -> [String; 3] {
    let Some(report) = report else { return ["-".into(), "-".into(), "-".into()] };
    let latency = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), cell);
    let worst = goodput::worst(report);
    let worst = worst.map_or_else(|| "-".to_owned(), |(name, bad)| format!("{name}: {}", cell(100.0 * bad)));
    [latency(report.totals.p50_ms), latency(report.totals.p9999_ms), worst]
}

/// Notes in which settings another policy's value is better than `downbeat`'s by more than a fiftieth; each is the
/// setting, `downbeat`'s value and the other's.
pub(crate) fn note_ahead(table: &mut Table, other: &str, what: &str, is_cost: bool, values: &[(String, f64, f64)]) {
    let is_ahead = |ours: f64, theirs: f64| if is_cost { theirs < 0.98 * ours } else { theirs > 1.02 * ours };
    let ahead = values.iter().filter(|(_, ours, theirs)| is_ahead(*ours, *theirs));
    let ahead: Vec<String> =
        ahead.map(|(setting, ours, theirs)| format!("{setting} ({} against {})", cell(*theirs), cell(*ours))).collect();
    let finding = match ahead.len() {
        0 => format!("`{other}` is nowhere ahead of `downbeat` in {what}."),
        count => {
            format!("`{other}` is ahead of `downbeat` in {what} in {count} of {}: {}.", values.len(), ahead.join("; "))
        }
    };
    table.note("finding", finding);
}

/// A policy's fixed look.
pub(crate) fn look_of(policy: &str) -> usize {
    POLICIES.iter().position(|&name| name == policy).unwrap_or(chart::GREY)
}

/// What a policy is called in a legend, where it is told which ones stand for Symphony.
pub(crate) fn legend_of(policy: &str) -> String {
    match policy {
        SYMPHONY => format!("{SYMPHONY} (Symphony as evaluated)"),
        "deferred" => "deferred (Symphony, Algorithm 1)".to_owned(),
        AUTHORS => format!("{AUTHORS} (its authors' code)"),
        _ => policy.to_owned(),
    }
}

/// A policy that is known to exist.
pub(crate) fn policy(name: &str) -> Policy {
    name.parse().expect("figures name policies that there are")
}

/// A workload from its text, which is known to be right.
pub(crate) fn workload(name: &str, text: &str) -> Workload {
    Workload::parse(text, name, name, std::path::Path::new(".")).unwrap_or_else(|error| panic!("{error}"))
}

/// An axis from 0 that all points of the series fit on.
pub(crate) fn axis_of(label: &str, series: &[Series]) -> Axis {
    Axis::up_to(label, series.iter().flat_map(|series| &series.points).map(|point| point.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `downbeat` against the best of its rivals in two settings; of the other policies nobody asks.
    fn finding(measure: &Measure) -> String {
        let mut table = Table::default();
        let settings = [[100.0, 90.0, 80.0, 0.0, 900.0], [60.0, 50.0, 80.0, 70.0, 900.0], [9.0, 0.0, 0.0, 0.0, 9.0]];
        let names = ["downbeat", SYMPHONY, "deferred", "eager", "clockwork"];
        note_rivals(&mut table, measure, &names, &settings.concat());
        table.noted("finding").unwrap().to_owned()
    }

    #[test]
    fn downbeat_is_compared_with_whichever_rival_is_best() {
        let rivals = "`deferred:target`, `deferred`, `eager`";
        let more = "In 2 settings `downbeat` serves 0.750 to 1.111 times (median 1.111; less than 0.995 in 1)";
        assert_eq!(finding(&GOODPUT), format!("{more} the goodput of the best of {rivals}"));
        let less = "In 2 settings `downbeat` needs 1.200 to 1.250 times (median 1.250; more than 1.005 in 2)";
        assert_eq!(finding(&GPUS_NEEDED), format!("{less} as many GPUs as whichever needs fewest of {rivals}"));
    }

    #[test]
    fn where_another_policy_is_ahead_is_told() {
        let values = [("10 ms".to_owned(), 9.0, 4.0), ("20 ms".to_owned(), 9.0, 8.9), ("30 ms".to_owned(), 9.0, 10.0)];
        let told = |is_cost| {
            let mut table = Table::default();
            note_ahead(&mut table, "clockwork", "p50", is_cost, &values);
            table.noted("finding").unwrap().to_owned()
        };
        let ahead = "`clockwork` is ahead of `downbeat` in p50 in 1 of 3";
        assert_eq!(told(true), format!("{ahead}: 10 ms (4.000 against 9.000)."));
        assert_eq!(told(false), format!("{ahead}: 30 ms (10.00 against 9.000)."));
    }

    #[test]
    fn rows_become_columns() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
