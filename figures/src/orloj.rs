//! Orloj's Figures 7 to 11, which are its Tables 2 to 5: finish rates of dynamic models under tight objectives.

use std::collections::BTreeMap;

use chart::{Axis, Chart, Mark, Panel, Series};

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
        "Of a task the paper tells the mean and the 99th percentile: times are log-normal with both. Nothing is known \
         of groups of short and long requests in it, so each has one application, and lanes have nothing to divide.",
    ],
    draw: |context| draw(context, &ORLOJ7, &tasks()),
};

pub(crate) const ORLOJ8: Figure = Figure {
    name: "orloj8",
    title: "Orloj, Figure 8 and Table 3: one to eight modes",
    shows: "Requests answered in time, of all, by objective (in 99th percentiles of what a request takes alone): one \
            model on one GPU, with as many applications as modes, each normal. Dashed: the paper's measurements of \
            its systems. The table has all modes, and the setting in which batching helps little.",
    remarks: &REMARKS,
    draw: |context| draw(context, &ORLOJ8, &modes()),
};

pub(crate) const ORLOJ9: Figure = Figure {
    name: "orloj9",
    title: "Orloj, Figures 9 and 10 and Table 2: two modes, wide and narrow, and unequal ones",
    shows: "As Figure 8, with two modes: of equal widths, more short requests (2/0.5), and more long ones (0.5/2).",
    remarks: &REMARKS,
    draw: |context| draw(context, &ORLOJ9, &widths()),
};

const REMARKS: [&str; 4] = [
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
];

const SLOS_X_P99: [f64; 5] = [1.5, 2.0, 3.0, 4.0, 5.0];
const POLICIES: [&str; 5] = ["downbeat", "orloj", "clockwork", "nexus", "clipper"];

/// How much batching helps: c0 as a part of the mean, c1, and the load (the first remark).
struct Setting {
    name: &'static str,
    fixed_part: f64,
    per_task: f64,
    load: f64,
}

const SETTINGS: [Setting; 2] = [
    Setting { name: "strong", fixed_part: 0.1, per_task: 0.3, load: 1.3 },
    Setting { name: "weak", fixed_part: 0.8, per_task: 1.0, load: 1.4 },
];

/// One row of the paper's tables.
struct Case {
    /// As in the paper.
    name: String,
    mean_ms: f64,
    /// Applications, as in a workload.
    applications: String,
}

impl Case {
    /// Normal modes: mean, standard deviation and share.
    fn normal(name: &str, modes: &[(f64, f64, f64)]) -> Self {
        let of =
            |&(mean, std, share): &(f64, f64, f64)| format!("{{ mean_ms = {mean}, std_ms = {std}, share = {share} }}");
        let shares: f64 = modes.iter().map(|(_, _, share)| share).sum();
        let mean_ms = modes.iter().map(|(mean, _, share)| mean * share / shares).sum();
        let applications = modes.iter().map(of).collect::<Vec<_>>().join(", ");
        Self { name: name.to_owned(), mean_ms, applications }
    }

    fn workload(&self, setting: &Setting, slo_x_p99: f64) -> sim::Workload {
        let fixed_ms = setting.fixed_part * self.mean_ms;
        let Self { name, applications, .. } = self;
        let text = format!(
            "gpus = 1\nreestimate = true\n[[model]]\nname = \"{name}\"\ncost = {{ fixed_ms = {fixed_ms}, per_task = \
             {} }}\napplications = [{applications}]\nslo_x_p99 = {slo_x_p99}\nmax_batch = 16\n",
            setting.per_task
        );
        workload(name, &text)
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
        let applications = format!("{{ median_ms = {median_ms}, sigma = {sigma} }}");
        Case { name: name.to_owned(), mean_ms, applications }
    };
    TASKS.iter().map(case).collect()
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

fn draw(context: &Context, figure: &Figure, cases: &[Case]) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["setting", "case", "SLO (x p99)", "policy", "finish rate", "paper"]);
    for Setting { name, fixed_part, per_task, load } in &SETTINGS {
        let setting = format!("c0 = {fixed_part} of the mean alone, c1 = {per_task}, load {load}");
        table.note(name, setting);
    }
    let mut runs = Vec::new();
    for setting in &SETTINGS {
        for case in cases {
            let rate_rps = setting.load * case.workload(setting, SLOS_X_P99[4]).capacity_rps();
            for slo in SLOS_X_P99 {
                let run = |name| Run { workload: case.workload(setting, slo), policy: policy(name), rate_rps };
                runs.extend(POLICIES.map(run));
            }
        }
    }
    let reports = context.runs(&runs, &mut table)?;
    let reported = reported();
    let mut panels = Vec::new();
    let mut found = reports.iter().map(|report| report.totals.on_time_fraction);
    for (index, setting) in SETTINGS.iter().enumerate() {
        for case in cases {
            let mut lines = vec![(Vec::new(), Vec::new()); POLICIES.len()];
            for slo in SLOS_X_P99 {
                for (name, (ours, papers)) in POLICIES.iter().zip(&mut lines) {
                    let rate = found.next().expect("a report for each run");
                    let paper = reported.get(&(case.name.clone(), slo.to_string(), *name)).copied();
                    ours.push((slo, rate));
                    papers.extend(paper.map(|rate| (slo, rate)));
                    let paper = paper.map_or_else(String::new, cell);
                    table.push([
                        setting.name.into(),
                        case.name.clone(),
                        cell(slo),
                        (*name).into(),
                        cell((rate * 1000.0).round() / 1000.0),
                        paper,
                    ]);
                }
            }
            // One setting is drawn, and no more than fit on a page.
            if index == 0 && panels.len() < 6 {
                panels.push(panel(&case.name, lines));
            }
        }
    }
    Ok((Chart::new(figure.title, 3, panels), table))
}

type Points = Vec<(f64, f64)>;

fn panel(title: &str, lines: Vec<(Points, Points)>) -> Panel {
    let mut series = Vec::new();
    for (name, (ours, papers)) in POLICIES.iter().zip(lines) {
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
        for case in modes().iter().chain(&widths()) {
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
