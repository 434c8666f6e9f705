//! Symphony's Figure 7: deferred against eager scheduling on the 5,880 synthetic workloads of its Table 1.
//!
//! It takes hours at a good precision, so it saves what it has every minute or so and goes on from there when it is
//! started again with the same seed and budget. After those that are drawn one by one, workloads are taken in random
//! order: a part of them is a fair sample.

use std::collections::BTreeMap;

use bench::goodput::{self, Judged, Probe};
use chart::{Axis, Chart, Mark, Panel, Series};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use sim::{Workload, checker::Violation};

use crate::{
    context::{
        AUTHORS, Context, GOODPUT, PROBE_RATE, REQUESTS_PER_CORE_SECOND, axis_of, legend_of, look_of, note_rivals,
        policy, rate_of, workload,
    },
    figure::{Figure, FigureError, save},
    table::{Table, cell},
};

pub(crate) const FIG7: Figure = Figure {
    name: "fig7",
    title: "Symphony, Figure 7: deferred against eager scheduling on 5,880 synthetic workloads",
    shows: "Goodput relative to eager scheduling that gathers batches by the same rule (1 is equal): of `symphony` \
            (its authors' code, whose batches have a target that follows the rate, solid) to `symphony:eager`, and of \
            `deferred` (the paper's Algorithm 1, the longest prefix, dashed) to `eager`. (a) the 35 models of the \
            1080Ti zoo together, with GPUs per model; (b) 24 DenseNet121, strong batching; (c) 24 BERT, nearly none; \
            (d) all workloads, each policy's sorted, and `downbeat` beside, relative to `eager`.",
    remarks: &[
        "Table 1 of the paper spans 7,560 combinations of one model and an unstated number of mixes; which of them are \
         left out is not said. Those here: one model with an SLO of at least 2 l(2), for otherwise batches cannot be \
         had at all (5,796), and the 35 models of the 1080Ti zoo together with their 1080Ti or their A100 profiles \
         (84), which makes 5,880.",
        "The paper's text: 35 % to 102 % more goodput on mixes, 34 % to 234 % on DenseNet121 with an SLO of 30 ms, \
         more than 0.95 times on almost all workloads, more than 1.5 times on 16 % of them.",
        "With the authors' rule on both sides deferral gains what the paper says in places, up to twice the goodput \
         on mixes and 1.7 times on DenseNet121. It is the baseline that loses: `symphony:eager` serves less than \
         `eager`, whose batches are the longest prefix that can finish (0.96 times in the median, 0.87 with \
         DenseNet121, 0.81 on mixes), and `symphony` more than that `eager` with DenseNet121 alone (1.03 times). \
         With one GPU per model, or bursts of a shape of 0.1, deferral loses a tenth under either rule: two batches \
         that become due together collide, and a burst leaves nothing to wait for.",
        "`downbeat` serves what `eager` and `deferred` do in the median, 1.06 and 1.07 times that in a tenth of the \
         settings, and 1.03 times what `symphony` does. In a tenth it serves less than 0.95 times what the best of \
         them does, in a hundredth less than 0.9. Three quarters of that hundredth are DenseNet121 with 25 ms, which \
         leaves time for two batches, in bursts: while GPUs are not scarce it runs small batches, and a burst finds \
         more GPUs busy than under deferral. There a probe of a second condemns a model for two or three requests.",
        "Probes are short, so a single workload's ratio means little; the distribution does. A search takes it that a \
         lower rate is no harder, so one unlucky probe of bursts ends it far too low. Of four others the best is also \
         the luckiest, by about 2 %.",
    ],
    draw,
};

/// The 1080Ti profiles of the models that Table 1 names (alpha and beta in milliseconds).
const MODELS: [(&str, f64, f64); 6] = [
    ("DenseNet121", 1.061, 10.312),
    ("InceptionV3", 1.964, 8.771),
    ("ResNet50V2", 1.409, 5.947),
    ("VGG16", 2.734, 5.786),
    ("Xception", 4.751, 2.046),
    ("BERT", 7.008, 0.159),
];
const COUNTS: [u32; 6] = [8, 16, 24, 32, 48, 64];
const GPUS_PER_MODEL: [f64; 7] = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0];
const SLOS_MS: [f64; 5] = [20.0, 25.0, 30.0, 40.0, 50.0];
const SHAPES: [f64; 6] = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0];
const ZOOS: [(&str, &str); 2] = [("mixed 1080Ti", "symphony-zoo-1080ti.csv"), ("mixed A100", "symphony-zoo-a100.csv")];
/// Models of a mix.
const MIXED: u32 = 35;
/// What a bound of the search may be off by, as a part of it, and the probes that takes.
const RESOLUTION: f64 = 0.02;
const PROBES: f64 = 7.0;
/// Simulated seconds of a probe at least: dozens of SLOs.
const SECONDS_MIN: f64 = 1.0;
/// Workloads between two saves.
const CHUNK: usize = 60;
/// Deferred scheduling and eager scheduling, which gather a batch by the same rule.
const DEFERRED: [(&str, &str); 2] = [(AUTHORS, AUTHORS_EAGER), ("deferred", "eager")];
const AUTHORS_EAGER: &str = "symphony:eager";
const POLICIES: [&str; 5] = [AUTHORS, AUTHORS_EAGER, "deferred", "eager", "downbeat"];
/// Columns that tell one workload from all others.
const KEY: [&str; 5] = ["models", "count", "GPUs per model", "SLO (ms)", "shape"];
/// Of each policy's goodput; empty where it was not tried yet.
const COLUMNS: [&str; 5] =
    ["symphony (r/s)", "symphony:eager (r/s)", "deferred (r/s)", "eager (r/s)", "downbeat (r/s)"];

/// Goodputs as cells, by policy, of each workload.
type Found = BTreeMap<[String; KEY.len()], Vec<(&'static str, String)>>;

/// One workload of Table 1.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Setup {
    models: &'static str,
    count: u32,
    gpus_per_model: f64,
    /// `None` for the models' own.
    slo_ms: Option<f64>,
    shape: f64,
}

impl Setup {
    /// The first cells of its row: what tells it from all others.
    fn cells(&self) -> [String; 5] {
        let slo = self.slo_ms.map_or_else(|| "own".to_owned(), |slo_ms| slo_ms.to_string());
        let numbers = [self.gpus_per_model, self.shape].map(|number| number.to_string());
        let [gpus, shape] = numbers;
        [self.models.to_owned(), self.count.to_string(), gpus, slo, shape]
    }

    fn workload(&self) -> Workload {
        let gpus = (f64::from(self.count) * self.gpus_per_model).round();
        let head = format!("gpus = {gpus}\narrivals = {{ process = \"gamma\", shape = {} }}\n[[model]]\n", self.shape);
        let Some(slo_ms) = self.slo_ms else {
            let zoo = |name| ZOOS.iter().find(|zoo| zoo.0 == name).expect("a mix is one of the zoos").1;
            let mut mix = workload(self.models, &format!("{head}zoo = \"{}\"\n", zoo(self.models)));
            let smaller = workload("zoo", &format!("{head}zoo = \"{}\"\n", ZOOS[0].1));
            mix.models.retain(|model| smaller.models.iter().any(|other| other.name == model.name));
            for model in &mut mix.models {
                model.share = 1.0 / f64::from(MIXED);
            }
            return mix;
        };
        let (name, alpha, beta) = MODELS.iter().find(|model| model.0 == self.models).expect("one of the models");
        let profile = format!("alpha_ms = {alpha}\nbeta_ms = {beta}\nslo_ms = {slo_ms}\n");
        workload(name, &format!("{head}name = \"{name}\"\ncount = {}\n{profile}", self.count))
    }
}

/// All 5,880.
fn setups() -> Vec<Setup> {
    let mut setups = Vec::new();
    for gpus_per_model in GPUS_PER_MODEL {
        for shape in SHAPES {
            for (models, alpha, beta) in MODELS {
                for slo_ms in SLOS_MS.into_iter().filter(|slo_ms| 2.0 * (2.0 * alpha + beta) <= *slo_ms) {
                    let slo_ms = Some(slo_ms);
                    setups.extend(COUNTS.map(|count| Setup { models, count, gpus_per_model, slo_ms, shape }));
                }
            }
            let mix = |(models, _)| Setup { models, count: MIXED, gpus_per_model, slo_ms: None, shape };
            setups.extend(ZOOS.map(mix));
        }
    }
    setups
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let setups = in_order(context.seed);
    let requests = requests_a_probe(context.budget_minutes);
    let header = [&KEY[..], &COLUMNS].concat();
    let mut table = Table::new(&header);
    table.note("precision", precision(requests));
    let mut found = BTreeMap::new();
    if let Ok(before) = Table::read(&context.out.join("fig7.csv"))
        && before.noted("seed") == Some(&context.seed.to_string())
        && before.noted("precision") == table.noted("precision")
    {
        found = rates_of(&before);
    }
    table.note("seed", context.seed.to_string());
    let missing = |setup: &Setup, found: &Found| {
        let has = |name| found.get(&setup.cells()).is_some_and(|rates| rates.iter().any(|(of, _)| *of == name));
        POLICIES.into_iter().filter(|&name| !has(name)).collect::<Vec<_>>()
    };
    let jobs: Vec<_> = setups.iter().map(|setup| (*setup, missing(setup, &found))).collect();
    let jobs: Vec<_> = jobs.into_iter().filter(|(_, names)| !names.is_empty()).collect();
    context.bar.set_length(setups.len() as u64);
    context.bar.set_position((setups.len() - jobs.len()) as u64);
    for chunk in jobs.chunks(CHUNK) {
        let rates = context.parallel(chunk, |(setup, names)| goodputs(setup, names, requests, context.seed))?;
        for ((setup, names), rates) in chunk.iter().zip(rates) {
            found.entry(setup.cells()).or_default().extend(names.iter().copied().zip(rates));
        }
        let so_far = summarized(&table, &setups, &found);
        save(&FIG7, context, &chart(&so_far), so_far)?;
    }
    let table = summarized(&table, &setups, &found);
    Ok((chart(&table), table))
}

/// In the order in which they are done: what is drawn one by one, and then all others at random.
fn in_order(seed: u64) -> Vec<Setup> {
    let mut setups = setups();
    setups.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    setups.sort_by_key(|setup| !is_drawn(&setup.cells()));
    setups
}

/// That the budget allows for, over all workloads and policies.
fn requests_a_probe(budget_minutes: f64) -> f64 {
    let probes = (POLICIES.len() * setups().len()) as f64 * PROBES;
    budget_minutes * 60.0 * REQUESTS_PER_CORE_SECOND / probes
}

fn precision(requests: f64) -> String {
    format!(
        "a probe simulates about {requests:.0} requests, and {SECONDS_MIN} s at least; goodput is searched to {} %, \
         and a model that is asked n times in a probe is judged with an error of ±{:.1} % / sqrt(n / 100) in its bad \
         rate (95 % confidence)",
        100.0 * RESOLUTION,
        100.0 * 1.96 * (0.01f64 * 0.99 / 100.0).sqrt(),
    )
}

/// Goodputs under these policies.
fn goodputs(setup: &Setup, names: &[&str], requests: f64, seed: u64) -> Result<Vec<String>, Violation> {
    let workload = setup.workload();
    let seconds = (requests / (PROBE_RATE * workload.capacity_rps())).max(SECONDS_MIN);
    let probe = Probe { seconds, seed, resolution: RESOLUTION, judged: Judged::Each };
    let goodput = |name: &&str| goodput::search(&workload, policy(name), &probe, &mut |_, _| ());
    names.iter().map(|name| Ok(cell(rate_of(&goodput(name)?)))).collect()
}

/// The goodputs that a table has, by workload.
fn rates_of(table: &Table) -> Found {
    let places: Vec<_> = POLICIES
        .into_iter()
        .zip(COLUMNS)
        .filter_map(|(name, column)| Some((name, table.header.iter().position(|header| header == column)?)))
        .collect();
    let of_row = |row: &Vec<String>| {
        let key = <[String; KEY.len()]>::try_from(row[..KEY.len()].to_vec()).expect("a row is longer");
        let rates = places.iter().map(|&(name, place)| (name, row[place].clone()));
        (key, rates.filter(|(_, rate)| !rate.is_empty()).collect())
    };
    table.rows.iter().map(of_row).collect()
}

/// (row, goodput relative to `eager`'s) of all workloads that that serves at all and both were tried on.
fn ratios<'a>(table: &'a Table, name: &'static str, eager: &'static str) -> impl Iterator<Item = (&'a [String], f64)> {
    let rates = table.rows.iter().map(move |row| (&row[..], rate(row, name), rate(row, eager)));
    rates.filter_map(|(row, rate, eager)| Some((row, rate? / eager.filter(|&eager| eager > 0.0)?)))
}

fn rate(row: &[String], name: &str) -> Option<f64> {
    let place = POLICIES.iter().position(|&policy| policy == name).expect("it is compared");
    row[KEY.len() + place].parse().ok()
}

/// With rows, in the order of the workloads, and the findings.
fn summarized(table: &Table, setups: &[Setup], found: &Found) -> Table {
    let mut table = table.clone();
    for key in setups.iter().map(Setup::cells) {
        let Some(rates) = found.get(&key) else { continue };
        let of =
            |name: &&str| rates.iter().find(|(of, _)| of == name).map_or_else(String::new, |(_, rate)| rate.clone());
        table.rows.push(key.iter().cloned().chain(POLICIES.iter().map(of)).collect());
    }
    let of_all: Vec<f64> = table
        .rows
        .iter()
        .filter_map(|row| POLICIES.map(|name| rate(row, name)).into_iter().collect::<Option<Vec<_>>>())
        .flatten()
        .collect();
    let (done, total) = (of_all.len() / POLICIES.len(), setups.len());
    let drawn = setups.iter().filter(|setup| is_drawn(&setup.cells())).count();
    table.note(
        "finding",
        format!(
            "`deferred` and `eager` were tried on {} of {total} workloads, the others on {done}: the {drawn} that (a) \
             to (c) draw, and others at random.",
            ratios(&table, "deferred", "eager").count()
        ),
    );
    for (name, eager) in DEFERRED {
        let ratios: Vec<_> = ratios(&table, name, eager).collect();
        let part = |is: fn(f64) -> bool| {
            100.0 * ratios.iter().filter(|(_, ratio)| is(*ratio)).count() as f64 / ratios.len().max(1) as f64
        };
        let span = |is: fn(&[String]) -> bool| {
            let of = ratios.iter().filter(|(row, _)| is(row)).map(|(_, ratio)| *ratio);
            let (low, high) = of.fold((f64::INFINITY, 0.0f64), |(low, high), ratio| (low.min(ratio), high.max(ratio)));
            format!("{low:.2} to {high:.2}")
        };
        table.note(
            "finding",
            format!(
                "`{name}` has at least 0.95 times the goodput of `{eager}` on {:.1} % (paper: almost all), more than \
                 1.5 times on {:.1} % (paper: 16 %); {} times on mixes (paper: 1.35 to 2.02), {} times on DenseNet121 \
                 with an SLO of 30 ms (paper: 1.34 to 3.34).",
                part(|ratio| ratio >= 0.95),
                part(|ratio| ratio > 1.5),
                span(|row| row[0].starts_with("mixed")),
                span(|row| row[0] == "DenseNet121" && row[3] == "30")
            ),
        );
    }
    note_rivals(&mut table, &GOODPUT, &POLICIES, &of_all);
    table
}

/// The lines of a panel: each of [`DEFERRED`], of workloads that differ in what the panel's axis shows.
const MIXED_SHAPES: [(&str, usize); 3] = [("0.1", 5), ("0.3", 2), ("1", 0)];
/// SLO and shape.
const SINGLE: [(&str, &str, usize); 4] = [("30", "1", 1), ("30", "0.1", 3), ("50", "1", 4), ("50", "0.1", 7)];
/// What panels (b) and (c) show 24 of.
const SINGLES: [&str; 2] = ["DenseNet121", "BERT"];

/// Whether a workload is a point of panels (a) to (c).
fn is_drawn(row: &[String]) -> bool {
    let is_mix = row[0] == ZOOS[0].0 && MIXED_SHAPES.iter().any(|(shape, _)| row[4] == *shape);
    let is_single = SINGLES.contains(&row[0].as_str())
        && row[1] == "24"
        && SINGLE.iter().any(|(slo, shape, _)| row[3] == *slo && row[4] == *shape);
    is_mix || is_single
}

fn chart(table: &Table) -> Chart {
    let lines = |what: &str, look, is: &dyn Fn(&[String]) -> bool| {
        DEFERRED.map(|(name, eager)| {
            let number = |row: &[String]| row[2].parse::<f64>().ok();
            let of_line = ratios(table, name, eager).filter(|(row, _)| is(row));
            let mut points: Vec<_> = of_line.filter_map(|(row, ratio)| Some((number(row)?, ratio))).collect();
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            let mark = if name == AUTHORS { Mark::Line } else { Mark::Dashed };
            Series { name: format!("{name}: {what}"), mark, look, points }
        })
    };
    let panel = |title: &str, x: Axis, mut series: Vec<Series>| {
        let points = vec![(x.range.0, 1.0), (x.range.1, 1.0)];
        series.push(Series { name: "equal".to_owned(), mark: Mark::Dashed, look: chart::BOUND, points });
        Panel { title: title.to_owned(), x, y: axis_of("goodput (times eager's)", &series), series, boxes: Vec::new() }
    };
    let per_model = || Axis::new("GPUs per model", (0.8, 4.2));
    let mixed = MIXED_SHAPES.map(|(shape, look)| {
        lines(&format!("mix; shape {shape}"), look, &|row| row[0] == ZOOS[0].0 && row[4] == shape)
    });
    let single = |model: &str| {
        let of = |(slo, shape, look): (&str, &str, usize)| {
            let is = |row: &[String]| row[0] == model && row[1] == "24" && row[3] == slo && row[4] == shape;
            lines(&format!("SLO {slo} ms; shape {shape}"), look, &is)
        };
        SINGLE.map(of).concat()
    };
    let sorted = [DEFERRED[0], DEFERRED[1], ("downbeat", "eager")].map(|(name, eager)| {
        let mut all: Vec<f64> = ratios(table, name, eager).map(|(_, ratio)| ratio).collect();
        all.sort_by(f64::total_cmp);
        let count = all.len().max(1) as f64;
        // A thousand points are as good as all of them.
        let step = all.len().div_ceil(1000).max(1);
        let sampled = all.iter().enumerate().step_by(step);
        let points = sampled.map(|(index, ratio)| (100.0 * index as f64 / count, *ratio)).collect();
        Series { name: format!("all: {}", legend_of(name)), mark: Mark::Curve, look: look_of(name), points }
    });
    let panels = vec![
        panel("(a) 35 mixed models", per_model(), mixed.concat()),
        panel("(b) 24 x DenseNet121", per_model(), single(SINGLES[0])),
        panel("(c) 24 x BERT", per_model(), single(SINGLES[1])),
        panel("(d) all workloads", Axis::new("workloads, sorted (%)", (0.0, 100.0)), sorted.to_vec()),
    ];
    Chart::new("Symphony, Figure 7: goodput relative to eager's", 2, panels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_5880_different_workloads() {
        let setups = setups();
        assert_eq!(setups.len(), 5880);
        let mut keys: Vec<_> = setups.iter().map(Setup::cells).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 5880);
        for setup in setups.iter().step_by(97).chain(&setups[138..140]) {
            assert_eq!(setup.workload().models.len(), setup.count as usize, "{setup:?}");
        }
    }

    fn context(directory: &std::path::Path) -> Context {
        let bar = indicatif::ProgressBar::hidden();
        Context { budget_minutes: 0.001, seed: 3, out: directory.to_owned(), bar }
    }

    /// A row for each workload with these rates, as if it had been made with `context`.
    fn made_before(context: &Context, header: &[&str], rates: &[&str]) -> Table {
        let mut table = Table::new(header);
        table.note("precision", precision(requests_a_probe(context.budget_minutes)));
        table.note("seed", context.seed.to_string());
        for setup in in_order(context.seed) {
            table.rows.push(setup.cells().into_iter().chain(rates.iter().map(|&rate| rate.to_owned())).collect());
        }
        table
    }

    #[test]
    fn what_was_done_is_not_done_again() {
        let directory = tempfile::tempdir().unwrap();
        let context = context(directory.path());
        let table = made_before(&context, &[&KEY[..], &COLUMNS].concat(), &["2", "1", "2", "1", "3"]);
        std::fs::write(directory.path().join("fig7.csv"), table.csv()).unwrap();
        // Would take hours otherwise.
        let (_, found) = draw(&context).unwrap();
        assert_eq!(found.rows, table.rows);
        let finds = |text: &str| found.notes.iter().any(|(_, value)| value.contains(text));
        assert!(finds("tried on 5880 of 5880 workloads, the others on 5880"));
        assert!(finds("In 5880 settings `downbeat` serves 1.500 to 1.500 times"));
    }

    #[test]
    fn goodputs_of_some_policies_are_kept_while_others_are_missing() {
        let directory = tempfile::tempdir().unwrap();
        let context = context(directory.path());
        let header = [&KEY[..], &["eager (r/s)", "deferred (r/s)", "ratio"]].concat();
        let found = rates_of(&made_before(&context, &header, &["1", "2", "2"]));
        let setups = in_order(context.seed);
        assert!(is_drawn(&setups[0].cells()) && !is_drawn(&setups[5879].cells()));
        let table = summarized(&Table::new(&[&KEY[..], &COLUMNS].concat()), &setups, &found);
        assert!(table.rows.iter().all(|row| row[KEY.len()..] == ["", "", "2", "1", ""]));
        let counts = DEFERRED.map(|(name, eager)| ratios(&table, name, eager).count());
        assert_eq!(counts, [0, 5880]);
        assert!(table.noted("finding").unwrap().contains("tried on 5880 of 5880 workloads, the others on 0"));
    }
}
