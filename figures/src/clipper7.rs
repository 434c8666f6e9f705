//! Clipper's Figure 7: what an ensemble gains, and what its confidence tells.

use chart::{Axis, Chart, Mark, Panel, Series};
use repository::Policy;

use crate::{
    context::Context,
    digits::{Ensemble, FIVE, Picture, part_wrong},
    figure::{Figure, FigureError},
    table::Table,
};

pub(crate) const CLIPPER7: Figure = Figure {
    name: "clipper7",
    title: "Clipper, Figure 7: accuracy of an ensemble, and its confidence",
    shows: "Five models of handwritten digits. Left: the part of all pictures of which each model, and each ensemble, \
            is wrong. Right: the same of the pictures of which so many of the five agree with the answer (`majority`), \
            beside the part of all pictures that these are.",
    remarks: &[
        "The paper has five networks for ImageNet and five for CIFAR-10 (its Table 2). Here are five kinds of models \
         (nearest neighbours, regression, support vectors, Bayes, a tree) of scikit-learn's 1,797 digits, each trained \
         on 300, which predict what they were not trained on (`figures/digits/predict`). They err together, as \
         networks do.",
        "`weighted` weighs each model by the logarithm of how much likelier it is right than wrong in one given way, \
         counted in the other half of the pictures. The paper does not say how it weighs its models.",
        "As in the paper: ensembles are a little better than the best of their models, and where all five agree hardly \
         one answer is wrong. `exp4` (section 5.2) gives nearly all weight to the best model, if one is, and is as \
         good.",
    ],
    draw,
};

/// A model or an ensemble, and the part of which it is wrong.
struct Error {
    name: String,
    part: f64,
}

/// Of pictures of which so many agree with the answer.
struct Agreeing {
    models: usize,
    part_of_all: f64,
    error: f64,
}

/// How much each model counts, as those pictures have it: votes of independent models are best weighed so.
fn weights<'a>(pictures: impl ExactSizeIterator<Item = &'a Picture> + Clone) -> Vec<f64> {
    let weight = |model: usize| {
        let error = part_wrong(pictures.clone().map(|picture| picture.said[model] != picture.digit));
        // Of ten digits nine are wrong.
        (9.0 * (1.0 - error) / error).ln()
    };
    (0..FIVE.models.len()).map(weight).collect()
}

/// Whether each picture is answered wrong by an ensemble with the other half's weights.
fn weighted(seed: u64) -> Vec<bool> {
    let half = |first: usize| FIVE.pictures.iter().skip(first).step_by(2);
    let wrong_of_half = |first: usize| {
        let mut ensemble = Ensemble::new(Policy::Weighted(weights(half(1 - first))), FIVE.models.len(), seed);
        half(first).map(move |picture| ensemble.answer(picture, |_| true).is_none_or(|one| one.digit != picture.digit))
    };
    wrong_of_half(0).chain(wrong_of_half(1)).collect()
}

fn errors(seed: u64) -> (Vec<Error>, Vec<Agreeing>) {
    let model = |(at, name): (usize, &&str)| Error { name: (*name).to_owned(), part: FIVE.error(at) };
    let mut errors: Vec<Error> = FIVE.models.iter().enumerate().map(model).collect();
    let members = FIVE.models.len();
    let mut majority = Ensemble::new(Policy::Majority, members, seed);
    // How many agree, and whether they are wrong.
    let votes: Vec<(usize, bool)> = FIVE
        .pictures
        .iter()
        .map(|picture| {
            let answer = majority.answer(picture, |_| true).expect("all members answer");
            ((answer.confidence * members as f64).round() as usize, answer.digit != picture.digit)
        })
        .collect();
    errors.push(Error { name: "majority".to_owned(), part: part_wrong(votes.iter().map(|(_, is_wrong)| *is_wrong)) });
    errors.push(Error { name: "weighted".to_owned(), part: part_wrong(weighted(seed).into_iter()) });
    let agreeing = |models: usize| {
        let of: Vec<bool> = votes.iter().filter(|(agree, _)| *agree == models).map(|(_, is_wrong)| *is_wrong).collect();
        let part_of_all = of.len() as f64 / votes.len() as f64;
        Agreeing { models, part_of_all, error: part_wrong(of.into_iter()) }
    };
    // Hardly ever are all of another opinion.
    (errors, (2..=members).map(agreeing).collect())
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let (errors, agreeing) = errors(context.seed);
    let mut table = Table::new(&["who", "part of all pictures", "wrong of these"]);
    for Error { name, part } in &errors {
        table.push([name.clone(), "1".to_owned(), format!("{part:.4}")]);
    }
    for Agreeing { models, part_of_all, error } in &agreeing {
        table.push([format!("{models} agree"), format!("{part_of_all:.4}"), format!("{error:.4}")]);
    }
    let best = errors[..FIVE.models.len()].iter().map(|error| error.part).fold(f64::INFINITY, f64::min);
    let of_best = |error: &Error| format!("`{}` {:+.1} %", error.name, 100.0 * (error.part / best - 1.0));
    let changes = errors[FIVE.models.len()..].iter().map(of_best).collect::<Vec<_>>().join(", ");
    let text = format!("Errors beside the best model's: {changes} (the paper's ensemble for ImageNet -5.2 %)");
    table.note("finding", text);
    Ok((chart(&errors, &agreeing), table))
}

fn chart(errors: &[Error], agreeing: &[Agreeing]) -> Chart {
    let points = |values: Vec<f64>| values.into_iter().enumerate().map(|(at, value)| (at as f64, value)).collect();
    let bars = |name: &str, (place, places): (usize, usize), look: usize, values: Vec<f64>| Series {
        name: name.to_owned(),
        mark: Mark::Bar { place, places },
        look,
        points: points(values),
    };
    let left = Panel {
        title: "by who answers".to_owned(),
        x: Axis::named("", errors.iter().map(|error| error.name.clone())),
        y: Axis::up_to("part that is wrong", errors.iter().map(|error| error.part)),
        series: vec![bars("", (0, 1), 0, errors.iter().map(|error| error.part).collect())],
        boxes: Vec::new(),
    };
    let right = Panel {
        title: "by how many agree".to_owned(),
        x: Axis::named("models that agree with the answer", agreeing.iter().map(|group| group.models.to_string())),
        y: Axis::new("part", (0.0, 1.0)),
        series: vec![
            bars("wrong", (0, 2), 0, agreeing.iter().map(|group| group.error).collect()),
            bars("of all pictures", (1, 2), 1, agreeing.iter().map(|group| group.part_of_all).collect()),
        ],
        boxes: Vec::new(),
    };
    Chart::new(CLIPPER7.title, 2, vec![left, right])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clipper, section 5.2 and Figure 7.
    #[test]
    fn ensembles_beat_the_best_model_and_agreement_tells_who_is_right() {
        let (errors, agreeing) = errors(1);
        let (models, ensembles) = errors.split_at(FIVE.models.len());
        let best = models.iter().map(|error| error.part).fold(f64::INFINITY, f64::min);
        for Error { name, part } in ensembles {
            assert!(*part < best, "{name} {part}, the best model {best}");
        }
        assert!(agreeing.windows(2).all(|pair| pair[1].error < pair[0].error), "the more agree the fewer are wrong");
        assert!(agreeing.last().unwrap().error < best / 5.0);
    }
}
