//! Clipper's Figure 9: what stragglers cost an ensemble that waits for all, and one that answers at its deadline.

use std::collections::BinaryHeap;

use chart::{Axis, Chart, Mark, Panel, Series};
use ensembles::vote::{Action, Order, Vote};
use proto::{Span, Timestamp};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::Policy;

use crate::{
    context::Context,
    digits::{BAGGED, Ensemble, part_wrong, shuffled},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLIPPER9: Figure = Figure {
    name: "clipper9",
    title: "Clipper, Figure 9: ensembles and stragglers, an objective of 20 ms",
    shows: "Ensembles of 1 to 16 models, which wait for all (dashed), or answer 1 ms before the deadline with what is \
            there. Left: the latency of answers, its mean and its 99th percentile. Middle: the part of the predictions \
            that is there, on average and in the worst per cent of the answers. Right: the part of all answers that is \
            wrong.",
    remarks: &[
        "The paper measures containers on a cluster. Here a prediction takes 4 ms and an exponential part of 2 ms on \
         average, and one of fifty takes ten times as long, each by itself. What decides when an answer leaves is what \
         serves (`ensembles/src/vote.rs`).",
        "Predictions are real: trees, each trained on a sample of its own of scikit-learn's digits \
         (`figures/digits/predict`).",
        "As in the paper: the ensemble that waits misses its objective at the 99th percentile from one model on, and \
         the more models it has the longer its mean is; the one that does not wait never misses, nearly all \
         predictions are there, and what is lost costs hardly any accuracy.",
    ],
    draw,
};

const OBJECTIVE: Span = Span::from_millis(20);
/// What is left for making the answer.
const REPLY: Span = Span::from_millis(1);
const LEAST_MS: f64 = 4.0;
const MEAN_MORE_MS: f64 = 2.0;
/// One prediction of so many takes so many times as long.
const STRAGGLES: f64 = 0.02;
const STRAGGLES_BY: f64 = 10.0;
const ORDERS: u64 = 5;

/// An ensemble of so many members, and whether it waits.
struct Setting {
    members: usize,
    waits: bool,
}

/// What became of a request: when it was answered, and by whom.
struct Answered {
    latency: Span,
    is_there: Vec<bool>,
}

/// All requests of a setting.
struct Outcome {
    mean_ms: f64,
    p99_ms: f64,
    /// Predictions that were there, of all.
    there: f64,
    /// The same of the worst per cent.
    there_p99: f64,
    wrong: f64,
}

fn prediction_takes(rng: &mut ChaCha8Rng) -> Span {
    let ms = LEAST_MS - MEAN_MORE_MS * (1.0 - rng.random::<f64>()).ln();
    let is_straggler = rng.random::<f64>() < STRAGGLES;
    Span::from_millis_f64(if is_straggler { STRAGGLES_BY * ms } else { ms })
}

/// One request at time 0, as the frontend has it.
fn asked(setting: &Setting, rng: &mut ChaCha8Rng) -> Answered {
    let deadline = if setting.waits { Timestamp::NEVER } else { Timestamp::ZERO + OBJECTIVE };
    let members = (0..setting.members).map(|member| (member, Span::from_millis_f64(LEAST_MS))).collect();
    let mut vote = Vote::new(members, Order::AtOnce, deadline, REPLY);
    let mut is_there = vec![false; setting.members];
    // The earliest first.
    let mut ends = BinaryHeap::new();
    let mut now = Timestamp::ZERO;
    loop {
        while let Some(action) = vote.poll_action(now) {
            match action {
                Action::Ask { member, .. } => ends.push(std::cmp::Reverse((now + prediction_takes(rng), member))),
                Action::Cancel { .. } => (),
                Action::Close => return Answered { latency: now - Timestamp::ZERO, is_there },
            }
        }
        let end = ends.peek().map_or(Timestamp::NEVER, |end| end.0.0);
        let timeout = vote.poll_timeout().unwrap_or(Timestamp::NEVER);
        now = end.min(timeout);
        if now == end {
            let (_, member) = ends.pop().expect("it was there").0;
            is_there[member] = vote.handle_end(member, false);
        }
        vote.handle_timeout(now);
    }
}

fn run(setting: &Setting, seed: u64) -> Outcome {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut answers, mut wrong) = (Vec::new(), Vec::new());
    for order in 0..ORDERS {
        let mut ensemble = Ensemble::new(Policy::Majority, setting.members, seed);
        for picture in shuffled(&BAGGED.pictures, seed * ORDERS + order) {
            let answered = asked(setting, &mut rng);
            let answer = ensemble.answer(picture, |member| answered.is_there[member]);
            wrong.push(answer.is_none_or(|answer| answer.digit != picture.digit));
            answers.push(answered);
        }
    }
    let there = |answered: &Answered| {
        answered.is_there.iter().filter(|is_there| **is_there).count() as f64 / setting.members as f64
    };
    let mut latencies: Vec<f64> = answers.iter().map(|answered| answered.latency.as_millis_f64()).collect();
    let mut parts: Vec<f64> = answers.iter().map(there).collect();
    latencies.sort_by(f64::total_cmp);
    parts.sort_by(f64::total_cmp);
    let count = answers.len();
    Outcome {
        mean_ms: latencies.iter().sum::<f64>() / count as f64,
        p99_ms: latencies[count * 99 / 100],
        there: parts.iter().sum::<f64>() / count as f64,
        there_p99: parts[count / 100],
        wrong: part_wrong(wrong.into_iter()),
    }
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let settings: Vec<Setting> =
        [true, false].into_iter().flat_map(|waits| (1..=16).map(move |members| Setting { members, waits })).collect();
    context.bar.inc_length(settings.len() as u64);
    let outcomes = context.parallel(&settings, |setting| Ok(run(setting, context.seed)))?;
    let mut table = Table::new(&[
        "models",
        "waits for all",
        "mean (ms)",
        "p99 (ms)",
        "predictions there",
        "of the worst per cent",
        "wrong",
    ]);
    for (setting, outcome) in settings.iter().zip(&outcomes) {
        table.push([
            setting.members.to_string(),
            setting.waits.to_string(),
            cell(outcome.mean_ms),
            cell(outcome.p99_ms),
            format!("{:.4}", outcome.there),
            format!("{:.4}", outcome.there_p99),
            format!("{:.4}", outcome.wrong),
        ]);
    }
    let (waiting, timely) = outcomes.split_at(settings.len() / 2);
    let (waits, leaves) = (&waiting[waiting.len() - 1], &timely[timely.len() - 1]);
    let text = format!(
        "Sixteen models that wait: p99 {} ms, {:.2} % wrong; that do not: p99 {} ms, {:.1} % of the predictions, {:.2} \
         % wrong",
        cell(waits.p99_ms),
        100.0 * waits.wrong,
        cell(leaves.p99_ms),
        100.0 * leaves.there,
        100.0 * leaves.wrong,
    );
    table.note("finding", text);
    Ok((chart(waiting, timely), table))
}

fn chart(waiting: &[Outcome], timely: &[Outcome]) -> Chart {
    let series = |name: &str, mark: Mark, look: usize, of: &[Outcome], value: fn(&Outcome) -> f64| Series {
        name: name.to_owned(),
        mark,
        look,
        points: of.iter().enumerate().map(|(at, outcome)| ((at + 1) as f64, value(outcome))).collect(),
    };
    let panel = |title: &str, label: &str, series: Vec<Series>| Panel {
        title: title.to_owned(),
        x: Axis::new("models", (0.0, 17.0)),
        y: Axis::up_to(label, series.iter().flat_map(|series| series.points.iter().map(|(_, value)| *value))),
        series,
        boxes: Vec::new(),
    };
    let latencies = vec![
        series("p99, waits", Mark::Dashed, 0, waiting, |outcome| outcome.p99_ms),
        series("mean, waits", Mark::Dashed, 1, waiting, |outcome| outcome.mean_ms),
        series("p99", Mark::Line, 0, timely, |outcome| outcome.p99_ms),
        series("mean", Mark::Line, 1, timely, |outcome| outcome.mean_ms),
    ];
    let there = vec![
        series("mean", Mark::Line, 1, timely, |outcome| outcome.there),
        series("worst per cent", Mark::Line, 0, timely, |outcome| outcome.there_p99),
    ];
    let wrong = vec![
        series("waits", Mark::Dashed, 0, waiting, |outcome| outcome.wrong),
        series("at the deadline", Mark::Line, 0, timely, |outcome| outcome.wrong),
    ];
    Chart::new(
        CLIPPER9.title,
        3,
        vec![
            panel("latency", "ms", latencies),
            panel("predictions that are there", "part", there),
            panel("accuracy", "part of answers that is wrong", wrong),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clipper, section 5.2.2.
    #[test]
    fn an_ensemble_that_does_not_wait_meets_its_objective_with_most_of_its_models() {
        let of = |members, waits| run(&Setting { members, waits }, 1);
        let (waits, leaves) = (of(16, true), of(16, false));
        let objective = OBJECTIVE.as_millis_f64();
        assert!(waits.p99_ms > objective && leaves.p99_ms <= objective - REPLY.as_millis_f64());
        assert!(waits.there == 1.0 && leaves.there > 0.97 && leaves.there_p99 >= 13.0 / 16.0, "{}", leaves.there_p99);
        assert!(leaves.wrong < waits.wrong + 0.005, "{} and {} are wrong", leaves.wrong, waits.wrong);
        assert!(of(16, true).mean_ms > 2.0 * of(1, true).mean_ms);
    }
}
