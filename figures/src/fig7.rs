//! Symphony's Figure 7: deferred against eager scheduling on the 5,880 synthetic workloads of its Table 1.
//!
//! It takes hours at a good precision, so it saves what it has every minute or so and goes on from there when it is
//! started again with the same seed and budget. Workloads are taken in random order: a part of them is a fair sample.

use std::collections::BTreeSet;

use bench::goodput::{self, Probe};
use chart::{Axis, Chart, Mark, Panel, Series};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use sim::{Workload, checker::Violation};

use crate::{
    Figure, FigureError,
    context::{Context, PROBE_RATE, REQUESTS_PER_CORE_SECOND, axis_of, policy, rate_of, workload},
    save,
    table::{Table, cell},
};

pub(crate) const FIG7: Figure = Figure {
    name: "fig7",
    title: "Symphony, Figure 7: deferred against eager scheduling on 5,880 synthetic workloads",
    shows: "Goodput of `deferred` relative to `eager` (1 is equal). (a) the 35 models of the 1080Ti zoo together, with \
            GPUs per model; (b) 24 DenseNet121, strong batching; (c) 24 BERT, nearly none; (d) all workloads, sorted.",
    remarks: &[
        "Table 1 of the paper spans 7,560 combinations of one model and an unstated number of mixes; which of them are \
         left out is not said. Those here: one model with an SLO of at least 2 l(2), for otherwise batches cannot be \
         had at all (5,796), and the 35 models of the 1080Ti zoo together with their 1080Ti or their A100 profiles \
         (84), which makes 5,880.",
        "The paper's text: 35 % to 102 % more goodput on mixes, 34 % to 234 % on DenseNet121 with an SLO of 30 ms, \
         more than 0.95 times on almost all workloads, more than 1.5 times on 16 % of them.",
        "We do not find gains as large as the paper's. Its eager baseline is not described further; ours takes the \
         longest prefix that can finish, from one central queue, and drops what cannot be met, exactly as `deferred` \
         does, and there is little left to gain over that but by the batching effect: most with DenseNet121 (up to a \
         third), nothing with BERT. With one GPU per model, or bursts of a shape of 0.1, deferral loses several per \
         cent: two batches that become due together collide, and a burst leaves nothing to wait for.",
        "Probes are short, so a single workload's ratio means little; the distribution does.",
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
    let mut setups = setups();
    let total = setups.len();
    setups.shuffle(&mut ChaCha8Rng::seed_from_u64(context.seed));
    let requests = context.budget_minutes * 60.0 * REQUESTS_PER_CORE_SECOND / (2.0 * total as f64 * PROBES);
    let columns = ["models", "count", "GPUs per model", "SLO (ms)", "shape", "deferred (r/s)", "eager (r/s)", "ratio"];
    let mut table = Table::new(&columns);
    table.note("precision", precision(requests));
    if let Ok(before) = Table::read(&context.out.join("fig7.csv"))
        && before.noted("seed") == Some(&context.seed.to_string())
        && before.noted("precision") == table.noted("precision")
    {
        table.rows = before.rows;
    }
    table.note("seed", context.seed.to_string());
    let done: BTreeSet<_> = table.rows.iter().map(|row| row[..5].to_vec()).collect();
    setups.retain(|setup| !done.contains(setup.cells().as_slice()));
    context.bar.set_length(total as u64);
    context.bar.set_position((total - setups.len()) as u64);
    for chunk in setups.chunks(CHUNK) {
        let rates = context.parallel(chunk, |setup| both(setup, requests, context.seed))?;
        for (setup, [deferred, eager]) in chunk.iter().zip(rates) {
            let [models, count, gpus, slo, shape] = setup.cells();
            let ratio = if eager > 0.0 { format!("{:.4}", deferred / eager) } else { "none".to_owned() };
            table.push([models, count, gpus, slo, shape, cell(deferred), cell(eager), ratio]);
        }
        let so_far = summarized(&table, total);
        save(&FIG7, context, &chart(&so_far), so_far.clone())?;
    }
    let table = summarized(&table, total);
    Ok((chart(&table), table))
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

/// Goodput under `deferred` and under `eager`.
fn both(setup: &Setup, requests: f64, seed: u64) -> Result<[f64; 2], Violation> {
    let workload = setup.workload();
    let seconds = (requests / (PROBE_RATE * workload.capacity_rps())).max(SECONDS_MIN);
    let probe = Probe { seconds, seed, resolution: RESOLUTION };
    let goodput = |name| goodput::search(&workload, policy(name), &probe, &mut |_, _| ()).map(|found| rate_of(&found));
    Ok([goodput("deferred")?, goodput("eager")?])
}

/// (row, ratio) of all workloads that `eager` serves at all.
fn ratios(table: &Table) -> impl Iterator<Item = (&[String], f64)> {
    table.rows.iter().filter_map(|row| Some((&row[..], row[7].parse().ok()?)))
}

/// With the findings.
fn summarized(table: &Table, total: usize) -> Table {
    let mut table = table.clone();
    let part = |is: fn(f64) -> bool| {
        100.0 * ratios(&table).filter(|(_, ratio)| is(*ratio)).count() as f64 / ratios(&table).count().max(1) as f64
    };
    let span = |is: fn(&[String]) -> bool| {
        let found = ratios(&table).filter(|(row, _)| is(row)).map(|(_, ratio)| ratio);
        let (low, high) = found.fold((f64::INFINITY, 0.0f64), |(low, high), ratio| (low.min(ratio), high.max(ratio)));
        format!("{low:.2} to {high:.2}")
    };
    let findings = [
        format!("{} of {total} workloads, a random sample unless all.", table.rows.len()),
        format!(
            "At least 0.95 times eager's goodput on {:.1} % of them (paper: almost all), more than 1.5 times on {:.1} \
             % (paper: 16 %).",
            part(|ratio| ratio >= 0.95),
            part(|ratio| ratio > 1.5)
        ),
        format!("Mixes: {} times (paper: 1.35 to 2.02).", span(|row| row[0].starts_with("mixed"))),
        format!(
            "DenseNet121 with an SLO of 30 ms: {} times (paper: 1.34 to 3.34).",
            span(|row| row[0] == "DenseNet121" && row[3] == "30")
        ),
    ];
    for finding in findings {
        table.note("finding", finding);
    }
    table
}

fn chart(table: &Table) -> Chart {
    let line = |name: String, look, x: usize, is: &dyn Fn(&[String]) -> bool| {
        let number = |row: &[String]| row[x].parse::<f64>().ok();
        let mut points: Vec<_> =
            ratios(table).filter(|(row, _)| is(row)).filter_map(|(row, ratio)| Some((number(row)?, ratio))).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Series { name, mark: Mark::Line, look, points }
    };
    let panel = |title: &str, x: Axis, mut series: Vec<Series>| {
        let points = vec![(x.range.0, 1.0), (x.range.1, 1.0)];
        series.push(Series { name: "equal".to_owned(), mark: Mark::Dashed, look: chart::BOUND, points });
        Panel { title: title.to_owned(), x, y: axis_of("goodput (times eager's)", &series), series, boxes: Vec::new() }
    };
    let per_model = || Axis::new("GPUs per model", (0.8, 4.2));
    let bursts = [("0.1", 5), ("0.3", 2), ("1", 0)];
    let mixed = bursts
        .map(|(shape, look)| line(format!("shape {shape}"), look, 2, &|row| row[0] == ZOOS[0].0 && row[4] == shape));
    let single = |model: &str| {
        let cases = [("30", "1", 1), ("30", "0.1", 3), ("50", "1", 4), ("50", "0.1", 7)];
        let of = |(slo, shape, look): (&str, &str, usize)| {
            let is = |row: &[String]| row[0] == model && row[1] == "24" && row[3] == slo && row[4] == shape;
            line(format!("SLO {slo} ms; shape {shape}"), look, 2, &is)
        };
        cases.map(of).to_vec()
    };
    let mut all: Vec<f64> = ratios(table).map(|(_, ratio)| ratio).collect();
    all.sort_by(f64::total_cmp);
    let count = all.len().max(1) as f64;
    // A thousand points are as good as all of them.
    let step = all.len().div_ceil(1000).max(1);
    let points =
        all.iter().enumerate().step_by(step).map(|(index, ratio)| (100.0 * index as f64 / count, *ratio)).collect();
    let sorted = vec![Series { name: "all workloads".to_owned(), mark: Mark::Curve, look: 0, points }];
    let panels = vec![
        panel("(a) 35 mixed models", per_model(), mixed.to_vec()),
        panel("(b) 24 x DenseNet121", per_model(), single("DenseNet121")),
        panel("(c) 24 x BERT", per_model(), single("BERT")),
        panel("(d) all workloads", Axis::new("workloads, sorted (%)", (0.0, 100.0)), sorted),
    ];
    Chart::new(format!("Symphony, Figure 7: deferred / eager, {} workloads", table.rows.len()), 2, panels)
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

    #[test]
    fn what_was_done_is_not_done_again() {
        let directory = tempfile::tempdir().unwrap();
        let bar = indicatif::ProgressBar::hidden();
        let context = Context { budget_minutes: 0.001, seed: 3, out: directory.path().to_owned(), bar };
        let mut table = Table::new(&["models", "count", "GPUs per model", "SLO (ms)", "shape", "d", "e", "ratio"]);
        let requests = context.budget_minutes * 60.0 * REQUESTS_PER_CORE_SECOND / (2.0 * 5880.0 * PROBES);
        table.note("precision", precision(requests));
        table.note("seed", "3");
        for setup in setups() {
            let [models, count, gpus, slo, shape] = setup.cells();
            table.push([models, count, gpus, slo, shape, "2".into(), "1".into(), "2".into()]);
        }
        std::fs::write(directory.path().join("fig7.csv"), table.csv()).unwrap();
        // Would take hours otherwise.
        let (_, found) = draw(&context).unwrap();
        assert_eq!(found.rows, table.rows);
        assert!(found.notes.iter().any(|(_, value)| value.starts_with("5880 of 5880 workloads")));
    }
}
