//! Orloj's Figures 7 to 11, which are its Tables 2 to 5: finish rates of dynamic models under tight objectives. Its
//! Figure 3 shows the other systems in cases of Figures 8 and 9.

use std::collections::BTreeMap;

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::{Report, clairvoyant, report::ModelReport};

use crate::{
    context::{Context, Run, look_of, policy, workload},
    figure::{Figure, FigureError},
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
        REMARKS[5],
        REMARKS[6],
        REMARKS[7],
        "`clipper` and `nexus` finish nearly all requests of some tasks in the paper, at five times the 99th \
         percentile: each case must have had a load below the GPU's capacity, and not all the same part of it. Here it \
         is the one part that was calibrated. The paper's rows of skipnet-imagenet, whose requests take 3 ms, jump \
         from 0.62 to 0.02 to 0.92, and its last is misprinted as a second one for 3: they are given as printed, and \
         nothing is made of them.",
        "Of a task the paper tells the mean and the 99th percentile: times are log-normal with both. Nothing is known \
         of groups of short and long requests in it, so each has one application, and lanes have nothing to divide.",
    ],
    draw: |context| draw(context, &ORLOJ7, &SETTINGS, &tasks()),
};

pub(crate) const ORLOJ8: Figure = Figure {
    name: "orloj8",
    title: "Orloj, Figures 3 and 8 and Table 3: one to eight modes",
    shows: "Requests answered in time, of all, by objective (in 99th percentiles of what a request takes alone): one \
            model on one GPU, with as many applications as modes, each normal. Dashed: the paper's measurements of \
            its systems. The table has all modes, and the setting in which batching helps little.",
    remarks: &[
        FIGURE_3, REMARKS[0], REMARKS[1], REMARKS[2], REMARKS[3], REMARKS[4], REMARKS[5], REMARKS[6], REMARKS[7],
    ],
    draw: |context| draw(context, &ORLOJ8, &SETTINGS, &modes()),
};

pub(crate) const ORLOJ9: Figure = Figure {
    name: "orloj9",
    title: "Orloj, Figures 3, 9 and 10 and Table 2: two modes, wide and narrow, and unequal ones",
    shows: "As Figure 8, with two modes: of equal widths, more short requests (2/0.5), and more long ones (0.5/2).",
    remarks: &[
        FIGURE_3, REMARKS[0], REMARKS[1], REMARKS[2], REMARKS[3], REMARKS[4], REMARKS[5], REMARKS[6], REMARKS[7],
    ],
    draw: |context| draw(context, &ORLOJ9, &SETTINGS, &widths()),
};

pub(crate) const ORLOJ11: Figure = Figure {
    name: "orloj11",
    title: "Orloj, Figure 11 and Table 4: static models",
    shows: "As Figure 8, with two models whose requests all take the same time.",
    remarks: &[
        "The paper does not tell what its batches take: here as Clockwork measured ResNet50 and InceptionV3 on the \
         same kind of GPU. Requests come at random. The rate is that at which `clockwork` comes nearest to its row of \
         ResNet, in steps of 0.05 of the capacity; all else is predicted.",
        "At 1.5 and 2 times l(1) nearly all finish more here than in the paper, where inputs and answers are copied \
         within the same objective: 1.5 times an execution of 2.73 ms leaves 1.4 ms for that, and here it costs \
         nothing.",
        "From 3 times on `orloj` is within 0.04 of its row for ResNet, and 0.10 below that for Inception: only one \
         load was calibrated, and what part of the capacity the paper's is of either model is not known. `nexus` and \
         `clipper` differ most at 3 times, by up to 0.34.",
        "The paper's Clockwork stays between 0.82 and 0.88 from 4 times on, the only one that does not go on: its \
         predictions fail now and then. `clockwork` here reaches 0.92, since executions take what was predicted.",
        "`clairvoyant` knows when requests will come; what they take everybody knows here.",
    ],
    draw: |context| draw(context, &ORLOJ11, &STATIC, &statics()),
};

const FIGURE_3: &str = "Figure 3 shows Clockwork, Nexus and Clipper before there is an Orloj, in cases of Figures 8 \
                        and 9; its last one has two unequal modes. They are these rows.";

pub(crate) const REMARKS: [&str; 8] = [
    "The paper tells neither c0 and c1, nor the load, nor where modes lie. Here modes are 40 ms apart from 20 ms on, \
     requests come at random (the paper scales the rates of a trace of Azure Functions), c0 is a tenth (`strong`: \
     batching helps, c1 = 0.3) or eight tenths (`weak`, c1 = 1) of the mean time alone. The rate is the same for all \
     objectives of a case: so many times what the GPU could serve at the longest objective as brings `clockwork` \
     nearest to its row of the three-modal case, in steps of a tenth. Nothing was fitted to Orloj's row: what the \
     table has is predicted.",
    "With that load the GPU cannot serve all, and no policy comes near the paper's 0.97 and more. The paper's \
     Clockwork loses every other batch to its own timeouts when a prediction fails, at a load that is below the GPU's \
     capacity; `clockwork` here has wide windows and loses to the load. So policies are to be compared with each \
     other, not with the paper's systems.",
    "`orloj` finishes up to 0.43 less than the paper's (0.77 on real tasks), most at three and more times the 99th \
     percentile: not even `clairvoyant` finishes all of such a load. At 1.5 times, where the load matters least, the \
     two are within 0.12 on average.",
    "`nexus` finishes up to 0.54 more than the paper's with several modes: both plan with means, but here heads that \
     would be late are given up, and the next batch starts when one has ended, however long it took. With one mode, \
     and where short requests prevail, the paper's finishes nearly all at long objectives: the load again. `clipper` \
     finishes 0.14 at most here (0.38 of rdinet-cifar), where the paper's has up to 0.97 (0.99 on real tasks): it \
     rejects nothing before its deadline has passed, so beyond capacity every batch begins with requests that have \
     waited for as long as they may. `clockwork` is within 0.16 of its rows with modes, and within 0.4 on real tasks.",
    "The batch size of `orloj` is chosen in the order of the paper's pseudocode (Algorithm 1, lines 16 to 19: of the \
     sizes with enough requests the one whose earliest deadline is the latest, and of equal ones the largest). Its \
     section 3.2 says the earliest instead, which mostly means one request at a time: of the three-modal case \
     (`strong`, three times the 99th percentile) that finished 0.75, 0.56 and 0.44 at 0.8, 1.1 and 1.4 of the \
     capacity, where the pseudocode's order finishes 0.87, 0.72 and 0.59. The better one is kept.",
    "`downbeat` gives applications whose times differ lanes of their own (`scheduler/src/lanes.rs`), so that \
     short requests are not padded to long ones. The paper's Orloj mixes them and chooses by score. Of lanes the one \
     goes first whose batch serves most for its time, where requests weigh more of applications that lose more than \
     others (`scheduler/src/lanes/losses.rs`): without weights more of all requests finish, and the long ones starve.",
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

const HEADER: [&str; 7] = ["setting", "case", "SLO (x p99)", "policy", "finish rate", "worst application", "paper"];

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
    Setting { name: "strong", cost: Some((0.1, 0.3)), load: 1.4 },
    Setting { name: "weak", cost: Some((0.8, 1.0)), load: 1.6 },
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
    let mut table = Table::new(&HEADER);
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
                for ((name, finished), (ours, papers)) in named.zip(&mut lines) {
                    let Finished { rate, worst } = *finished;
                    let paper = reported.get(&(case.name.clone(), slo.to_string(), *name)).copied();
                    ours.push((slo, rate));
                    papers.extend(paper.map(|rate| (slo, rate)));
                    let paper = paper.map_or_else(String::new, cell);
                    let [rate, worst] = [Some(rate), worst].map(|rate| rate.map_or_else(String::new, rounded));
                    table.push([setting.name.into(), case.name.clone(), cell(slo), (*name).into(), rate, worst, paper]);
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

/// What a run finished of all requests.
#[derive(Debug, Clone, Copy)]
struct Finished {
    rate: f64,
    /// Of those of the application that fared worst, where that is known.
    worst: Option<f64>,
}

impl Finished {
    fn of(report: &Report) -> Self {
        let worst = 1.0 - report.models.iter().map(ModelReport::worst_bad_rate).fold(0.0, f64::max);
        Self { rate: report.totals.on_time_fraction, worst: Some(worst) }
    }
}

fn rounded(rate: f64) -> String {
    cell((rate * 1000.0).round() / 1000.0)
}

/// Finish rates of all runs, and of each `POLICIES` of them what somebody would finish who knows the future.
fn with_references(
    context: &Context,
    runs: &[Run],
    table: &mut Table,
) -> Result<(Vec<Finished>, Vec<Finished>), FigureError> {
    let reports = context.runs(runs, table)?;
    let seconds = context.seconds(runs.iter().map(|run| run.rate_rps).sum());
    let settings: Vec<&Run> = runs.iter().step_by(POLICIES.len()).collect();
    context.bar.inc_length(settings.len() as u64);
    let reference = |run: &&Run| Ok(clairvoyant::finish_rate(&run.workload, run.rate_rps, seconds, context.seed));
    let references = context.parallel(&settings, reference)?;
    let reference = |rate| Finished { rate, worst: None };
    Ok((reports.iter().map(Finished::of).collect(), references.into_iter().map(reference).collect()))
}

/// How `downbeat` compares with `orloj`, and how much of what is between that and the reference it wins; and how the
/// worst application fares, compared with whichever of the other two serves it best.
fn note_gap(table: &mut Table, found: &[Finished], references: &[Finished]) {
    let rates = |found: &[Finished]| found.iter().map(|finished| finished.rate).collect::<Vec<f64>>();
    let worsts = |found: &[Finished]| found.iter().filter_map(|finished| finished.worst).collect::<Vec<f64>>();
    let [downbeat, orloj, clockwork] = ["downbeat", "orloj", "clockwork"].map(|name| {
        let place = POLICIES.iter().position(|policy| *policy == name).expect("it is compared");
        found.iter().skip(place).step_by(POLICIES.len()).copied().collect::<Vec<Finished>>()
    });
    let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len().max(1) as f64;
    let least = |of: &dyn Fn(&[Finished]) -> Vec<f64>| {
        let best = of(&orloj).into_iter().zip(of(&clockwork)).map(|(one, other)| one.max(other));
        let more: Vec<f64> = of(&downbeat).into_iter().zip(best).map(|(ours, best)| ours - best).collect();
        // What is told of rates has three digits.
        let fewer = more.iter().filter(|more| **more < -0.0005).count();
        (more.into_iter().fold(f64::INFINITY, f64::min), fewer)
    };
    let (gap, won) = (mean(&rates(references)) - mean(&rates(&orloj)), mean(&rates(&downbeat)) - mean(&rates(&orloj)));
    let (least_in_all, fewer_in_all) = least(&rates);
    table.note(
        "finding",
        format!(
            "Over all {} settings `orloj` finishes {:.3}, `clockwork` {:.3}, `downbeat` {:.3} and `clairvoyant` {:.3} \
             on average: `downbeat` wins {:.0} % of the gap of {gap:.3}. It finishes less than the better of `orloj` \
             and `clockwork` in {fewer_in_all} of them; where it compares worst it differs by {least_in_all:.3}",
            references.len(),
            mean(&rates(&orloj)),
            mean(&rates(&clockwork)),
            mean(&rates(&downbeat)),
            mean(&rates(references)),
            100.0 * won / gap.max(1e-9),
        ),
    );
    let (least_by_application, fewer_by_application) = least(&worsts);
    table.note(
        "finding",
        format!(
            "Of the application that fares worst `orloj` finishes {:.3}, `clockwork` {:.3} and `downbeat` {:.3} on \
             average; that is less than the better of `orloj` and `clockwork` in {fewer_by_application} of them, by \
             {:.3} at most",
            mean(&worsts(&orloj)),
            mean(&worsts(&clockwork)),
            mean(&worsts(&downbeat)),
            (-least_by_application).max(0.0),
        ),
    );
}

/// Finish rates of a figure's table by setting, policy and objective: the mean over all cases, and in brackets that of
/// the paper, where both are of the cases that it has. `None` if the table is of another kind.
pub(crate) fn summary(table: &Table) -> Option<Table> {
    (table.header == HEADER).then_some(())?;
    let distinct = |column: usize| {
        let mut found: Vec<&String> = Vec::new();
        for row in &table.rows {
            if !found.contains(&&row[column]) {
                found.push(&row[column]);
            }
        }
        found
    };
    let slos = distinct(2);
    let header =
        ["setting", "policy"].map(str::to_owned).into_iter().chain(slos.iter().map(|slo| format!("{slo} x p99")));
    let mut summary = Table { header: header.collect(), ..Table::default() };
    for (setting, policy) in
        distinct(0).into_iter().flat_map(|setting| distinct(3).into_iter().map(move |of| (setting, of)))
    {
        let cells = slos.iter().map(|slo| {
            let rows = table.rows.iter().filter(|row| [&row[0], &row[3], &row[2]] == [setting, policy, *slo]);
            let rates: Vec<(f64, Option<f64>)> =
                rows.filter_map(|row| Some((row[4].parse().ok()?, row[6].parse().ok()))).collect();
            let both: Vec<_> = rates.iter().filter_map(|(ours, paper)| Some((*ours, (*paper)?))).collect();
            let mean = |rates: &mut dyn Iterator<Item = f64>| {
                let (sum, count) = rates.fold((0.0, 0.0f64), |(sum, count), rate| (sum + rate, count + 1.0));
                sum / count.max(1.0)
            };
            if both.is_empty() {
                return format!("{:.2}", mean(&mut rates.iter().map(|rate| rate.0)));
            }
            let [ours, paper] = [mean(&mut both.iter().map(|rate| rate.0)), mean(&mut both.iter().map(|rate| rate.1))];
            format!("{ours:.2} ({paper:.2})")
        });
        summary.rows.push([setting.clone(), policy.clone()].into_iter().chain(cells).collect());
    }
    Some(summary)
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

    /// How far `clockwork` is from its row of a case, by the root of the mean square over all objectives.
    fn distance_of_clockwork(case: &Case, setting: &Setting) -> f64 {
        let reported = reported();
        let squares = SLOS_X_P99.map(|slo| {
            let rate_rps = setting.load * case.workload(setting, SLOS_X_P99[4]).capacity_rps();
            let options = sim::Options { policy: policy("clockwork"), rate_rps, seconds: 60.0, seed: 11 };
            let report = sim::cluster::run(&case.workload(setting, slo), &options, &mut |_| (), &mut |_| ()).unwrap();
            let paper = reported[&(case.name.clone(), slo.to_string(), "clockwork")];
            (report.totals.on_time_fraction - paper).powi(2)
        });
        (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
    }

    #[test]
    fn loads_are_those_that_bring_clockwork_nearest_to_its_own_row() {
        let [three_modal, resnet] = [modes().swap_remove(2), statics().swap_remove(0)];
        for (case, setting) in SETTINGS.iter().map(|setting| (&three_modal, setting)).chain([(&resnet, &STATIC[0])]) {
            let at = |factor: f64| distance_of_clockwork(case, &Setting { load: factor * setting.load, ..*setting });
            let [less, here, more] = [0.85, 1.0, 1.15].map(at);
            assert!(here < less && here < more, "{}: {less}, {here}, {more}", setting.name);
        }
    }

    #[test]
    fn a_summary_has_means_over_the_cases_that_the_paper_has() {
        let mut table = Table::new(&HEADER);
        let rows = [("a", "orloj", "0.5", "0.7"), ("b", "orloj", "0.7", "0.8"), ("c", "orloj", "0.1", "")];
        for (case, policy, ours, paper) in
            rows.into_iter().chain([("a", "downbeat", "0.9", ""), ("b", "downbeat", "0.8", "")])
        {
            table.push(["weak", case, "1.500", policy, ours, "", paper].map(str::to_owned));
        }
        let found = summary(&table).unwrap();
        assert_eq!(found.header, ["setting", "policy", "1.500 x p99"]);
        assert_eq!(found.rows, [["weak", "orloj", "0.60 (0.75)"], ["weak", "downbeat", "0.85"]]);
        assert!(summary(&Table::new(&["policy"])).is_none());
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
