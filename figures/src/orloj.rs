//! Orloj's Figures 7 to 11, which are its Tables 2 to 5: finish rates of dynamic models under tight objectives. Its
//! Figure 3 is the three-modal case of Figure 8.

use std::collections::BTreeMap;

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::clairvoyant;

use crate::{
    Figure, FigureError,
    context::{Context, Run, look_of, policy, workload},
    table::{Table, cell},
};

pub(crate) const ORLOJ7: Figure = Figure {
    name: "orloj7",
    title: "Orloj, Figure 7 and Table 5: real tasks, by their means and 99th percentiles",
    shows: "Requests answered in time, of all, by objective (in 99th percentiles of what a request takes alone), of \
            ten tasks on one GPU at one rate each; dashed in the paper. Six are drawn, in the setting in which \
            batching helps much; the table has all, and the other setting.",
    remarks: &[
        REMARKS[0],
        REMARKS[1],
        REMARKS[2],
        REMARKS[3],
        REMARKS[4],
        "Of a task the paper tells the mean and the 99th percentile: times are log-normal with both. Nothing is known \
         of groups of short and long requests in it, so each has one application, and lanes have nothing to divide.",
    ],
    draw: |context| draw(context, &ORLOJ7, &SETTINGS, &tasks()),
};

pub(crate) const ORLOJ8: Figure = Figure {
    name: "orloj8",
    title: "Orloj, Figure 8 and Table 3: one to eight modes",
    shows: "Requests answered in time, of all, by objective (in 99th percentiles of what a request takes alone): one \
            model on one GPU, with as many applications as modes, each normal. Dashed: the paper's measurements of \
            its systems. The table has all modes, and the setting in which batching helps little.",
    remarks: &REMARKS,
    draw: |context| draw(context, &ORLOJ8, &SETTINGS, &modes()),
};

pub(crate) const ORLOJ9: Figure = Figure {
    name: "orloj9",
    title: "Orloj, Figures 9 and 10 and Table 2: two modes, wide and narrow, and unequal ones",
    shows: "As Figure 8, with two modes: of equal widths, more short requests (2/0.5), and more long ones (0.5/2).",
    remarks: &REMARKS,
    draw: |context| draw(context, &ORLOJ9, &SETTINGS, &widths()),
};

pub(crate) const ORLOJ11: Figure = Figure {
    name: "orloj11",
    title: "Orloj, Figure 11 and Table 4: static models",
    shows: "As Figure 8, with two models whose requests all take the same time.",
    remarks: &[
        "The paper does not tell what its batches take: here as Clockwork measured ResNet50 and InceptionV3 on the \
         same kind of GPU. Requests come at random. The rate is that at which `clockwork` comes nearest to its row of \
         ResNet; all else is predicted.",
        "`clairvoyant` knows when requests will come; what they take everybody knows here.",
    ],
    draw: |context| draw(context, &ORLOJ11, &STATIC, &statics()),
};

pub(crate) const REMARKS: [&str; 5] = [
    "The paper tells neither c0 and c1, nor the load, nor where modes lie. Here modes are 40 ms apart from 20 ms on, \
     requests come at random, c0 is a tenth (`strong`: batching helps, c1 = 0.3) or eight tenths (`weak`, c1 = 1) of \
     the mean time alone. The rate is the same for all objectives of a case: so many times what the GPU could serve \
     at the longest objective as brings `clockwork` nearest to its row of the three-modal case. Nothing was fitted to \
     Orloj's row: what the table has is predicted.",
    "With that load the GPU cannot serve all, and no policy comes near the paper's 0.97 and more. The paper's \
     Clockwork loses every other batch to its own timeouts when a prediction fails, at a load that is below the GPU's \
     capacity; `clockwork` here has wide windows and loses to the load. So policies are to be compared with each \
     other, not with the paper's systems.",
    "`downbeat` gives applications whose times differ lanes of their own (`scheduler/src/planners/orloj.rs`), so that \
     short requests are not padded to long ones. The paper's Orloj mixes them and chooses by score.",
    "Samples for the distributions, which the paper's profiler runs alone when there is time, cost nothing here; 192 \
     of each application are known from the start.",
    "`clairvoyant` is no policy: it knows when requests come and what each takes, and is the best of 28 greedy rules, \
     found afterwards for each run (`sim/src/clairvoyant/batches.rs`). Nobody knows that; it tells how much knowing \
     could win.",
];

pub(crate) const SLOS_X_P99: [f64; 5] = [1.5, 2.0, 3.0, 4.0, 5.0];
const POLICIES: [&str; 5] = ["downbeat", "orloj", "clockwork", "nexus", "clipper"];
/// These and the reference.
const NAMES: usize = POLICIES.len() + 1;

/// Beside the policies, in tables and drawings.
const REFERENCE: &str = "clairvoyant";

/// How much batching helps, and the load (the first remark).
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    /// c0 as a part of the mean, and c1; `None` where the case itself says what batches take.
    cost: Option<(f64, f64)>,
    pub(crate) load: f64,
}

pub(crate) const SETTINGS: [Setting; 2] = [
    Setting { name: "strong", cost: Some((0.1, 0.3)), load: 1.3 },
    Setting { name: "weak", cost: Some((0.8, 1.0)), load: 1.4 },
];
const STATIC: [Setting; 1] = [Setting { name: "static", cost: None, load: 0.55 }];

/// One row of the paper's tables.
pub(crate) struct Case {
    /// As in the paper.
    name: String,
    mean_ms: f64,
    /// What requests or batches take, as in a workload.
    times: String,
}

impl Case {
    /// Normal modes: mean, standard deviation and share.
    pub(crate) fn normal(name: &str, modes: &[(f64, f64, f64)]) -> Self {
        let of =
            |&(mean, std, share): &(f64, f64, f64)| format!("{{ mean_ms = {mean}, std_ms = {std}, share = {share} }}");
        let shares: f64 = modes.iter().map(|(_, _, share)| share).sum();
        let mean_ms = modes.iter().map(|(mean, _, share)| mean * share / shares).sum();
        let applications = modes.iter().map(of).collect::<Vec<_>>().join(", ");
        Self { name: name.to_owned(), mean_ms, times: format!("applications = [{applications}]") }
    }

    pub(crate) fn workload(&self, setting: &Setting, slo_x_p99: f64) -> sim::Workload {
        let Self { name, times, mean_ms } = self;
        let slo = match setting.cost {
            Some((fixed_part, per_task)) => format!(
                "slo_x_p99 = {slo_x_p99}\nmax_batch = 16\ncost = {{ fixed_ms = {}, per_task = {per_task} }}",
                fixed_part * mean_ms
            ),
            None => format!("slo_ms = {}", slo_x_p99 * mean_ms),
        };
        workload(name, &format!("gpus = 1\nreestimate = true\n[[model]]\nname = \"{name}\"\n{times}\n{slo}\n"))
    }
}

/// Table 3. Modes lie 40 ms apart, each as wide as a tenth of that.
fn modes() -> Vec<Case> {
    let names = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
    let case = |(count, name): (usize, &&str)| {
        let modes: Vec<_> = (0..=count).map(|mode| (20.0 + 40.0 * mode as f64, 4.0, 1.0)).collect();
        Case::normal(&format!("{name}-modal"), &modes)
    };
    names.iter().enumerate().map(case).collect()
}

/// Table 2. A standard deviation of 1 there is 4 ms here.
fn widths() -> Vec<Case> {
    let equal = |std: f64| Case::normal(&format!("std-{std}"), &[(20.0, 4.0 * std, 1.0), (60.0, 4.0 * std, 1.0)]);
    let mut cases: Vec<_> = [0.5, 1.0, 2.0].map(equal).into();
    // The wide mode holds more requests: in Figure 9 (a) it is the short one.
    cases.push(Case::normal("std-2/0.5", &[(20.0, 8.0, 3.0), (60.0, 2.0, 1.0)]));
    cases.push(Case::normal("std-0.5/2", &[(20.0, 2.0, 1.0), (60.0, 8.0, 3.0)]));
    cases
}

/// Table 1: mean and 99th percentile in milliseconds.
const TASKS: [(&str, f64, f64); 10] = [
    ("rdinet-cifar", 683.15, 2667.54),
    ("skipnet-imagenet", 3.24, 5.56),
    ("blenderbot-convAI", 200.39, 242.27),
    ("blenderbot-cornell", 203.22, 247.04),
    ("gpt-convAI", 79.47, 143.40),
    ("gpt-cornell", 94.84, 161.69),
    ("bart-cnn", 774.66, 1101.99),
    ("t5-cnn", 552.91, 797.28),
    ("fsmt-wmt", 189.30, 319.31),
    ("mbart-wmt", 432.38, 729.87),
];

/// Table 5.
fn tasks() -> Vec<Case> {
    /// The 99th percentile of a standard normal.
    const Z99: f64 = 2.326_347_874;
    let case = |&(name, mean_ms, p99_ms): &(&str, f64, f64)| {
        // ln p99 = mu + z sigma and ln mean = mu + sigma^2 / 2; the smaller solution.
        let difference = (p99_ms / mean_ms).ln();
        let sigma = Z99 - (Z99 * Z99 - 2.0 * difference).max(0.0).sqrt();
        let median_ms = mean_ms / (sigma * sigma / 2.0).exp();
        let times = format!("applications = [{{ median_ms = {median_ms}, sigma = {sigma} }}]");
        Case { name: name.to_owned(), mean_ms, times }
    };
    TASKS.iter().map(case).collect()
}

/// Table 4. Batches of 1, 2, 4, 8 and 16 as in Clockwork's appendix A (`resnet50_v2`, `tsn_inceptionv3_kinetics400`).
fn statics() -> Vec<Case> {
    const MEASURED: [(&str, [f64; 5]); 2] = [
        ("resnet-imagenet", [2.73, 4.05, 5.87, 9.93, 17.3]),
        ("inception-imagenet", [4.47, 6.87, 10.97, 16.43, 26.12]),
    ];
    let case = |(name, measured): &(&str, [f64; 5])| {
        let between = |batch: usize| {
            let step = (batch - 1).ilog2();
            let (low, high) = (measured[step as usize], measured[step as usize + 1]);
            let from = 1 << step;
            low + (high - low) * (batch - from) as f64 / from as f64
        };
        let latencies: Vec<f64> = std::iter::once(measured[0]).chain((2..=16).map(between)).collect();
        Case { name: (*name).to_owned(), mean_ms: measured[0], times: format!("latency_ms = {latencies:?}") }
    };
    MEASURED.iter().map(case).collect()
}

/// The paper's finish rates, by case, objective and system.
fn reported() -> BTreeMap<(String, String, &'static str), f64> {
    const SYSTEMS: [&str; 4] = ["clipper", "nexus", "clockwork", "orloj"];
    let mut rates = BTreeMap::new();
    for line in include_str!("../data/orloj-finish-rates.csv").lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let key = |slo: &str, system| (cells[1].to_owned(), slo.to_owned(), system);
        // The last row of skipnet is misprinted as a second one for 3.
        let slo = if rates.contains_key(&key(cells[2], SYSTEMS[0])) { "5" } else { cells[2] };
        for (system, rate) in SYSTEMS.into_iter().zip(&cells[3..]) {
            if let Ok(rate) = rate.parse() {
                rates.insert(key(slo, system), rate);
            }
        }
    }
    rates
}

fn draw(
    context: &Context,
    figure: &Figure,
    settings: &[Setting],
    cases: &[Case],
) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["setting", "case", "SLO (x p99)", "policy", "finish rate", "paper"]);
    for Setting { name, cost, load } in settings {
        let cost = cost
            .map_or_else(String::new, |(fixed, per_task)| format!("c0 = {fixed} of the mean alone, c1 = {per_task}, "));
        table.note(name, format!("{cost}load {load}"));
    }
    let mut runs = Vec::new();
    for setting in settings {
        for case in cases {
            let rate_rps = setting.load * case.workload(setting, SLOS_X_P99[4]).capacity_rps();
            for slo in SLOS_X_P99 {
                let run = |name| Run { workload: case.workload(setting, slo), policy: policy(name), rate_rps };
                runs.extend(POLICIES.map(run));
            }
        }
    }
    let (reports, references) = with_references(context, &runs, &mut table)?;
    let reported = reported();
    let mut panels = Vec::new();
    let mut found = reports.chunks(POLICIES.len()).zip(&references);
    for (index, setting) in settings.iter().enumerate() {
        for case in cases {
            let mut lines = vec![(Vec::new(), Vec::new()); NAMES];
            for slo in SLOS_X_P99 {
                let (rates, reference) = found.next().expect("a report for each run");
                let named = POLICIES.iter().zip(rates).chain([(&REFERENCE, reference)]);
                for ((name, &rate), (ours, papers)) in named.zip(&mut lines) {
                    let paper = reported.get(&(case.name.clone(), slo.to_string(), *name)).copied();
                    ours.push((slo, rate));
                    papers.extend(paper.map(|rate| (slo, rate)));
                    let paper = paper.map_or_else(String::new, cell);
                    let rate = cell((rate * 1000.0).round() / 1000.0);
                    table.push([setting.name.into(), case.name.clone(), cell(slo), (*name).into(), rate, paper]);
                }
            }
            // One setting is drawn, and no more than fit on a page.
            if index == 0 && panels.len() < 6 {
                panels.push(panel(&case.name, lines));
            }
        }
    }
    note_gap(&mut table, &reports, &references);
    Ok((Chart::new(figure.title, 3, panels), table))
}

/// Finish rates of all runs, and of each `POLICIES` of them what somebody would finish who knows the future.
fn with_references(context: &Context, runs: &[Run], table: &mut Table) -> Result<(Vec<f64>, Vec<f64>), FigureError> {
    let reports = context.runs(runs, table)?;
    let seconds = context.seconds(runs.iter().map(|run| run.rate_rps).sum());
    let settings: Vec<&Run> = runs.iter().step_by(POLICIES.len()).collect();
    context.bar.inc_length(settings.len() as u64);
    let reference = |run: &&Run| Ok(clairvoyant::finish_rate(&run.workload, run.rate_rps, seconds, context.seed));
    let references = context.parallel(&settings, reference)?;
    Ok((reports.iter().map(|report| report.totals.on_time_fraction).collect(), references))
}

/// How `downbeat` compares with `orloj`, and how much of what is between that and the reference it wins.
fn note_gap(table: &mut Table, rates: &[f64], references: &[f64]) {
    let [downbeat, orloj] = ["downbeat", "orloj"].map(|name| {
        let place = POLICIES.iter().position(|policy| *policy == name).expect("it is compared");
        rates.iter().skip(place).step_by(POLICIES.len()).copied().collect::<Vec<f64>>()
    });
    let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len().max(1) as f64;
    let (gap, won) = (mean(references) - mean(&orloj), mean(&downbeat) - mean(&orloj));
    let least = downbeat.iter().zip(&orloj).map(|(ours, other)| ours - other).fold(f64::INFINITY, f64::min);
    table.note(
        "finding",
        format!(
            "Over all {} settings `orloj` finishes {:.3}, `downbeat` {:.3} and `clairvoyant` {:.3} on average: \
             `downbeat` wins {:.0} % of the gap of {gap:.3}; where it compares worst it differs by {least:.3}",
            references.len(),
            mean(&orloj),
            mean(&downbeat),
            mean(references),
            100.0 * won / gap.max(1e-9),
        ),
    );
}

pub(crate) type Points = Vec<(f64, f64)>;

fn panel(title: &str, lines: Vec<(Points, Points)>) -> Panel {
    let mut series = Vec::new();
    for (name, (ours, papers)) in POLICIES.iter().chain([&REFERENCE]).zip(lines) {
        let look = if *name == "orloj" { ORLOJ_LOOK } else { look_of(name) };
        series.push(Series { name: (*name).to_owned(), mark: Mark::Line, look, points: ours });
        if !papers.is_empty() {
            series.push(Series { name: format!("{name}: paper"), mark: Mark::Dashed, look, points: papers });
        }
    }
    let x = Axis::new("objective (x p99)", (1.0, 5.5));
    Panel { title: title.to_owned(), x, y: Axis::new("finish rate", (0.0, 1.0)), series, boxes: Vec::new() }
}

/// The look of what the other figures call deferred, which is not drawn here.
const ORLOJ_LOOK: usize = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_its_row_in_the_paper() {
        let reported = reported();
        let has = |case: &Case, slo: f64| {
            let key = |system| (case.name.clone(), slo.to_string(), system);
            ["orloj", "clipper"].map(key).iter().all(|key| reported.contains_key(key))
        };
        for case in modes().iter().chain(&widths()).chain(&statics()) {
            assert!(SLOS_X_P99.iter().all(|&slo| has(case, slo)), "{}", case.name);
        }
        // Of one task the first rows cannot be read.
        assert!(tasks().iter().all(|case| has(case, 5.0)));
    }

    #[test]
    fn tasks_have_the_papers_means_and_percentiles() {
        for (case, (name, mean_ms, p99_ms)) in tasks().iter().zip(TASKS) {
            let model = case.workload(&SETTINGS[0], 1.0).models.remove(0);
            let p99 = model.classes[0].slo.as_millis_f64();
            let mean = model.profile.latency(1).as_millis_f64();
            assert!((mean / mean_ms - 1.0).abs() < 0.02, "{name}: {mean}");
            assert!((p99 / p99_ms - 1.0).abs() < 0.05, "{name}: {p99}");
        }
    }
}
