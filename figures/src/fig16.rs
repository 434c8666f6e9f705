//! Symphony's Figure 16: models dealt to sub-clusters.

use chart::{Axis, Chart, Mark, Panel, Series};
use placement::{Model, Problem, Score, Search};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{
    context::{Context, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG16: Figure = Figure {
    name: "fig16",
    title: "Symphony, Figure 16: 800 models in 20 sub-clusters",
    shows: "Ten instances: 800 variants of models drawn from Clockwork's zoo, whose rates are exponential. Imbalance \
            is (max - min) / mean over the sub-clusters, of rates and of static memory; each curve is the part of the \
            instances that is at most so unbalanced. The axes are decimal logarithms.",
    remarks: &[
        "Symphony's zoo tells nothing of memory, Clockwork's does. The paper leaves open w, R_max and S_max: both \
         deviations count alike here, each as a part of its mean, and nothing is limited.",
        "HiGHS is an open solver; the paper has CPLEX, and its curves are in a drawing only. HiGHS ran once, on one \
         thread of a busy machine, by `tests/placement/figure.py`; what it found is committed. All others are made \
         again by a number of steps, so no clock is looked at.",
        "`random` is the best of many random placements by the objective, as in the paper. `greedy` deals the largest \
         model first, each to where it adds least to the sum of squares, and is where `downbeat` starts.",
    ],
    draw,
};

const MODELS: usize = 800;
const SUB_CLUSTERS: usize = 20;
const INSTANCES: u64 = 10;
const RATE_MEAN_RPS: f64 = 100.0;
/// Steps of a search, and random placements, in a budget of one minute: each takes about 10 s of an idle core.
const STEPS: f64 = 10e6;
const DRAWS: f64 = 500e3;
const SOLVERS: [&str; 3] = ["random", "greedy", "downbeat"];
/// How small an imbalance is drawn.
const LEAST: f64 = 1e-5;

/// What HiGHS found.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reported {
    instance: u64,
    seconds: f64,
    /// Of all models, which tells that it was this instance.
    rate_rps: f64,
    static_bytes: f64,
    objective: f64,
    rate_imbalance: f64,
    memory_imbalance: f64,
}

fn reported() -> Vec<Reported> {
    let row = |line: &str| {
        let cells: Vec<f64> = line.split(',').map(|cell| cell.parse().expect("a number")).collect();
        let &[instance, seconds, rate_rps, static_bytes, objective, rate_imbalance, memory_imbalance] = &cells[..]
        else {
            panic!("seven cells: {line}");
        };
        let instance = instance as u64;
        Reported { instance, seconds, rate_rps, static_bytes, objective, rate_imbalance, memory_imbalance }
    };
    include_str!("../data/fig16-highs.csv").lines().skip(1).map(row).collect()
}

/// `SplitMix64`, by which `tests/placement/highs.py` draws the same instances.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

fn instance(number: u64) -> Problem {
    let zoo = workload("zoo", "gpus = 1\n[[model]]\nzoo = \"clockwork-zoo-v100.csv\"\nslo_ms = 100\n").models;
    let mut draws = Draws(number);
    let model = |number: usize| {
        let kind = &zoo[(draws.next() % zoo.len() as u64) as usize];
        let part = (draws.next() >> 11) as f64 / (1u64 << 53) as f64;
        Model {
            name: format!("{}-{number}", kind.name),
            rate_rps: -RATE_MEAN_RPS * (-part).ln_1p(),
            static_bytes: kind.footprint.static_bytes,
            dynamic_bytes: kind.footprint.dynamic_bytes,
            move_cost: 1.0,
            former: None,
        }
    };
    Problem::new(SUB_CLUSTERS, (0..MODELS).map(model).collect())
}

/// What each of [`SOLVERS`] makes of an instance.
fn solve(number: u64, seed: u64, budget: f64) -> [Score; SOLVERS.len()] {
    let mut search = Search::new(&instance(number), seed).expect("an instance without limits");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(number);
    let mut random = || {
        let place: Vec<usize> = (0..MODELS).map(|_| rng.random_range(0..SUB_CLUSTERS)).collect();
        search.score(&place)
    };
    let first = random();
    let better = |best: Score, other: Score| if other.objective < best.objective { other } else { best };
    let random = (1..(budget * DRAWS) as u64).map(|_| random()).fold(first, better);
    let greedy = search.start();
    search.poll((budget * STEPS) as u64);
    [random, greedy, search.best().expect("nothing is limited").score]
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let numbers: Vec<u64> = (1..=INSTANCES).collect();
    context.bar.inc_length(INSTANCES);
    let found = context.parallel(&numbers, |&number| Ok(solve(number, context.seed, context.budget_minutes)))?;
    let highs = reported();
    let mut table = Table::new(&["instance", "solver", "objective", "imbalance of rates", "imbalance of memory"]);
    let steps = context.budget_minutes * STEPS;
    let draws = context.budget_minutes * DRAWS;
    table.note("precision", format!("`downbeat` makes {steps} steps, `random` draws {draws} placements"));
    let mut curves: Vec<(String, usize, Vec<[f64; 2]>)> = Vec::new();
    for (index, solver) in SOLVERS.into_iter().enumerate() {
        let scores = || found.iter().map(|scores| scores[index]);
        let look = [chart::GREY, 2, 0][index];
        let pairs = scores().map(|score| [score.rate_imbalance, score.memory_imbalance]).collect();
        curves.push((solver.to_owned(), look, pairs));
        for (number, score) in numbers.iter().zip(scores()) {
            push(&mut table, *number, solver, [score.objective, score.rate_imbalance, score.memory_imbalance]);
        }
    }
    let mut spans: Vec<f64> = highs.iter().map(|row| row.seconds).collect();
    spans.dedup();
    for (index, seconds) in spans.into_iter().enumerate() {
        let name = format!("HiGHS after {seconds} s");
        let rows: Vec<&Reported> = highs.iter().filter(|row| row.seconds == seconds).collect();
        for row in &rows {
            push(&mut table, row.instance, &name, [row.objective, row.rate_imbalance, row.memory_imbalance]);
        }
        let pairs = rows.iter().map(|row| [row.rate_imbalance, row.memory_imbalance]).collect();
        curves.push((name, 4 + index, pairs));
    }
    note_worst(&mut table, &curves);
    Ok((chart(&curves), table))
}

fn push(table: &mut Table, instance: u64, solver: &str, values: [f64; 3]) {
    let [objective, rate, memory] = values.map(|value| format!("{value:.6}"));
    table.push([instance.to_string(), solver.to_owned(), objective, rate, memory]);
}

/// The worst instance of each.
fn note_worst(table: &mut Table, curves: &[(String, usize, Vec<[f64; 2]>)]) {
    let of_curve = |(name, _, pairs): &(String, usize, Vec<[f64; 2]>)| {
        let worst = |index: usize| cell(pairs.iter().map(|pair| 100.0 * pair[index]).fold(0.0, f64::max));
        format!("`{name}` {} % and {} % (of {})", worst(0), worst(1), pairs.len())
    };
    let each = curves.iter().map(of_curve).collect::<Vec<_>>().join(", ");
    table.note("finding", format!("The largest imbalances of rates and of memory of any instance: {each}"));
}

fn chart(curves: &[(String, usize, Vec<[f64; 2]>)]) -> Chart {
    let panel = |index: usize, title: &str| {
        let series = curves.iter().map(|(name, look, pairs)| {
            let mut values: Vec<f64> = pairs.iter().map(|pair| pair[index].max(LEAST).log10()).collect();
            values.sort_by(f64::total_cmp);
            let part = |below: usize| below as f64 / values.len() as f64;
            let steps = values.iter().enumerate();
            let points = steps.flat_map(|(below, &value)| [(value, part(below)), (value, part(below + 1))]).collect();
            Series { name: name.clone(), mark: Mark::Curve, look: *look, points }
        });
        Panel {
            title: title.to_owned(),
            x: Axis::new("log10 of (max - min) / mean", (LEAST.log10(), 0.5)),
            y: Axis::new("part of instances", (0.0, 1.0)),
            series: series.collect(),
            boxes: Vec::new(),
        }
    };
    Chart::new(FIG16.title, 2, vec![panel(1, "imbalance of memory"), panel(0, "imbalance of rates")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_solver_had_the_same_instances() {
        let rows = reported();
        let longest = rows.iter().map(|row| row.seconds).fold(0.0, f64::max);
        assert_eq!((rows.len() as u64, longest), (INSTANCES + 1, 600.0));
        for row in rows {
            let models = instance(row.instance).models;
            let rate_rps: f64 = models.iter().map(|model| model.rate_rps).sum();
            let static_bytes: u64 = models.iter().map(|model| model.static_bytes).sum();
            assert!((rate_rps / row.rate_rps - 1.0).abs() < 1e-12, "{rate_rps} {row:?}");
            assert!(static_bytes as f64 == row.static_bytes, "{static_bytes} {row:?}");
        }
    }

    #[test]
    fn even_a_short_search_is_within_a_hundredth_of_the_solvers_longest() {
        let row = reported().into_iter().find(|row| row.seconds == 600.0).unwrap();
        let [random, greedy, found] = solve(row.instance, 1, 1e-3);
        assert!(found.rate_imbalance <= row.rate_imbalance + 0.01, "{found:?} {row:?}");
        assert!(found.memory_imbalance <= row.memory_imbalance + 0.01, "{found:?} {row:?}");
        assert!(found.objective <= greedy.objective && greedy.objective < random.objective, "{greedy:?} {random:?}");
    }
}
