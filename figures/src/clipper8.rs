//! Clipper's Figure 8: policies that learn, while the best of five models degrades.

use chart::{Axis, Chart, Mark, Panel, Series};
use ensembles::selection::Learner;
use proto::Span;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::{Agreement, Learning, Policy, Selection};

use crate::{
    context::Context,
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLIPPER8: Figure = Figure {
    name: "clipper8",
    title: "Clipper, Figure 8: selection while a model degrades",
    shows: "Five models of one task; the best one is worse than all others from its 5,000th query to its 10,000th. \
            Left, as in the paper, is the part of all queries so far that was answered wrong; right is that of 500 \
            queries in a row. Means of ten seeds.",
    remarks: &[
        "The paper has five networks on CIFAR-10. Here each model is wrong of as many labels of two classes, each \
         drawn by itself, so `exp4` is better than any: others outvote who is wrong. Networks err together.",
        "The paper's weights are products of all losses, as those of `exp3 for ever` and `exp4 for ever` are. Ours \
         count the losses of the last 800 queries, as a model that was good for long is left late otherwise.",
    ],
    draw,
};

const ERRORS: [f64; 5] = [0.10, 0.20, 0.30, 0.35, 0.40];
/// Of the first one meanwhile.
const DEGRADED: f64 = 0.60;
const DEGRADES_AT: usize = 5_000;
const RECOVERS_AT: usize = 10_000;
const QUERIES: usize = 20_000;
/// Queries of a point.
const STEP: usize = 500;
const SEEDS: u64 = 10;
/// More than there are queries.
const FOR_EVER: u64 = 1 << 32;

/// The policies and their names, with the constants that they have by default.
fn policies() -> [(&'static str, Policy); 5] {
    let for_ever = |learning| Learning { window: FOR_EVER, ..learning };
    [
        ("exp3", Policy::Exp3(Learning::EXP3)),
        ("exp4", Policy::Exp4(Learning::EXP4)),
        ("epsilon_greedy", Policy::EpsilonGreedy(Learning::EPSILON_GREEDY)),
        ("exp3 for ever", Policy::Exp3(for_ever(Learning::EXP3))),
        ("exp4 for ever", Policy::Exp4(for_ever(Learning::EXP4))),
    ]
}

/// Whether each query was answered wrong: by the policy, and by each model.
struct Run {
    wrong: Vec<bool>,
    of_models: Vec<[bool; ERRORS.len()]>,
}

fn run(policy: &Policy, seed: u64) -> Run {
    let selection = Selection {
        policy: policy.clone(),
        agreements: vec![Agreement::Argmax],
        defaults: None,
        confidence: 0.0,
        reply: Span::ZERO,
        seed,
    };
    let (mut learner, mut rng) = (Learner::new(&selection, ERRORS.len()), ChaCha8Rng::seed_from_u64(seed));
    let mut run = Run { wrong: Vec::with_capacity(QUERIES), of_models: Vec::with_capacity(QUERIES) };
    for query in 0..QUERIES {
        let is_degraded = (DEGRADES_AT..RECOVERS_AT).contains(&query);
        let error = |model: usize| if model == 0 && is_degraded { DEGRADED } else { ERRORS[model] };
        let of_models: [bool; ERRORS.len()] = std::array::from_fn(|model| rng.random::<f64>() < error(model));
        let choice = learner.select();
        let loss = |model: usize| choice.members.contains(&model).then(|| f64::from(u8::from(of_models[model])));
        let losses: Vec<Option<f64>> = (0..ERRORS.len()).map(loss).collect();
        learner.observe(choice.request, choice.probability, &losses).expect("a loss of this query");
        run.wrong.push(match choice.members[..] {
            [one] => of_models[one],
            // Of two classes the one with more weight is the answer.
            _ => {
                choice.weights.iter().zip(of_models).map(|(weight, is_wrong)| weight * f64::from(is_wrong)).sum::<f64>()
                    >= 0.5
            }
        });
        run.of_models.push(of_models);
    }
    run
}

/// How often a model or policy was wrong in each [`STEP`] queries, on average over the seeds.
struct Curve {
    name: String,
    look: usize,
    mark: Mark,
    wrong: Vec<f64>,
}

impl Curve {
    fn of(name: &str, (look, mark): (usize, Mark), histories: &[Vec<bool>]) -> Self {
        let count = |history: &Vec<bool>, step: usize| {
            history[step * STEP..(step + 1) * STEP].iter().filter(|is_wrong| **is_wrong).count()
        };
        let mean = |step: usize| {
            let sum: usize = histories.iter().map(|history| count(history, step)).sum();
            sum as f64 / histories.len() as f64
        };
        Self { name: name.to_owned(), look, mark, wrong: (0..QUERIES / STEP).map(mean).collect() }
    }

    /// At the end of each step, the part of all queries until then.
    fn so_far(&self) -> Vec<f64> {
        let mut sum = 0.0;
        let part = |(step, wrong): (usize, &f64)| {
            sum += wrong;
            sum / ((step + 1) * STEP) as f64
        };
        self.wrong.iter().enumerate().map(part).collect()
    }

    /// Of that step.
    fn of_steps(&self) -> Vec<f64> {
        self.wrong.iter().map(|wrong| wrong / STEP as f64).collect()
    }
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let policies = policies();
    let jobs: Vec<(&Policy, u64)> =
        policies.iter().flat_map(|(_, policy)| (0..SEEDS).map(move |seed| (policy, seed))).collect();
    context.bar.inc_length(jobs.len() as u64);
    let runs = context.parallel(&jobs, |(policy, seed)| Ok(run(policy, context.seed * SEEDS + seed)))?;
    let by_policy: Vec<&[Run]> = runs.chunks(SEEDS as usize).collect();
    let history_of_model = |model: usize| -> Vec<Vec<bool>> {
        by_policy[0].iter().map(|run| run.of_models.iter().map(|wrong| wrong[model]).collect()).collect()
    };
    let model = |model: usize| {
        Curve::of(&format!("model {}", model + 1), (chart::GREY, Mark::Dashed), &history_of_model(model))
    };
    let policy = |(at, (name, _)): (usize, &(&str, Policy))| {
        let histories: Vec<Vec<bool>> = by_policy[at].iter().map(|run| run.wrong.clone()).collect();
        Curve::of(name, (at, Mark::Curve), &histories)
    };
    let curves: Vec<Curve> = (0..ERRORS.len()).map(model).chain(policies.iter().enumerate().map(policy)).collect();

    let mut table = Table::new(&["queries", "who", "wrong of all so far", "wrong of the last 500"]);
    let best = curves[..ERRORS.len()].iter().map(|curve| curve.wrong.iter().sum::<f64>()).fold(f64::INFINITY, f64::min);
    let of_best = |curve: &Curve| format!("`{}` {}", curve.name, cell(curve.wrong.iter().sum::<f64>() / best));
    let ratios = curves[ERRORS.len()..].iter().map(of_best).collect::<Vec<_>>().join(", ");
    table.note("finding", format!("Errors as parts of those of the best model in hindsight: {ratios}"));
    for curve in &curves {
        for (step, (so_far, of_step)) in curve.so_far().into_iter().zip(curve.of_steps()).enumerate() {
            let queries = ((step + 1) * STEP).to_string();
            table.push([queries, curve.name.clone(), format!("{so_far:.4}"), format!("{of_step:.4}")]);
        }
    }
    Ok((chart(&curves), table))
}

fn chart(curves: &[Curve]) -> Chart {
    let panel = |title: &str, values: fn(&Curve) -> Vec<f64>| {
        let series = curves.iter().map(|curve| {
            let points = values(curve).into_iter().enumerate();
            let points = points.map(|(step, value)| (((step + 1) * STEP) as f64 / 1e3, value)).collect();
            Series { name: curve.name.clone(), mark: curve.mark, look: curve.look, points }
        });
        Panel {
            title: title.to_owned(),
            x: Axis::new("queries (thousands)", (0.0, QUERIES as f64 / 1e3)),
            y: Axis::new("part that was wrong", (0.0, 0.7)),
            series: series.collect(),
            boxes: Vec::new(),
        }
    };
    Chart::new(CLIPPER8.title, 2, vec![panel("of all so far", Curve::so_far), panel("of 500", Curve::of_steps)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It loses at most 1.10 times what the best model does in hindsight, and once the best degrades, the next 500
    /// queries are enough to be nearer to the second best than to it.
    #[test]
    fn a_model_that_degrades_is_left_within_500_queries() {
        for (name, policy) in &policies()[..3] {
            let mut ratios = 0.0;
            for seed in 0..SEEDS {
                let Run { wrong, of_models } = run(policy, seed);
                let count = |model: usize| of_models.iter().filter(|wrong| wrong[model]).count();
                let best = (0..ERRORS.len()).map(count).min().unwrap();
                ratios += wrong.iter().filter(|is_wrong| **is_wrong).count() as f64 / best as f64;
                let rate = |from: usize, to: usize| {
                    wrong[from..to].iter().filter(|is_wrong| **is_wrong).count() as f64 / (to - from) as f64
                };
                let recovered = rate(DEGRADES_AT + 500, DEGRADES_AT + 1_000);
                assert!(recovered < 0.4, "{name}, seed {seed}: {recovered} lost, 500 queries after the best degraded");
                let well = rate(RECOVERS_AT + 500, RECOVERS_AT + 1_000);
                assert!(well < 0.3, "{name}, seed {seed}: {well} lost, and after it is well again");
            }
            assert!(ratios / SEEDS as f64 <= 1.10, "{name}: {} times the best fixed one's", ratios / SEEDS as f64);
        }
    }
}
