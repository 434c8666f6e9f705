//! Clipper's Figure 10: a selection for each user, where users differ.

use chart::{Axis, Chart, Mark, Panel, Series};
use repository::{Learning, Policy};

use crate::{
    context::Context,
    digits::{Ensemble, QUERIES, STYLES, USERS, shuffled},
    figure::{Figure, FigureError},
    table::Table,
};

pub(crate) const CLIPPER10: Figure = Figure {
    name: "clipper10",
    title: "Clipper, Figure 10: a selection for each user",
    shows: "Handwritten digits of 48 users in eight styles: a model for each style, and one for all styles. The part \
            of answers that is wrong, over 15 queries of each user in a row: by the model for all, by that of the \
            style that the user names, by `exp4` with one state for all users, and with one for each. Means of all \
            users and of ten orders of their queries.",
    remarks: &[
        "The paper has TIMIT's voices in eight dialects. Here scikit-learn's digits are turned by -35 to 35 degrees, a \
         style for each 10; each user's are turned, and slanted, a little in a way of their own; models are logistic \
         regressions, each trained on as many pictures (`figures/digits/predict`).",
        "As in the paper: the user's own style beats the model for all, and what is learned for each user beats both, \
         after some fifteen queries. One state for all users learns nothing of any.",
        "Each query is followed by its feedback. With a state for each user `exp4` has an eta of 1, ten times the \
         default, as 120 queries are few; the state for all users has the default.",
    ],
    draw,
};

/// Queries of a point.
const STEP: usize = 15;
const ORDERS: u64 = 10;
const POLICY: Policy = Policy::Exp4(Learning { eta: 1.0, ..Learning::EXP4 });

/// Who answers, and what part is wrong in each [`STEP`] queries of a user.
struct Curve {
    name: &'static str,
    wrong: [f64; QUERIES / STEP],
}

/// Everybody's n-th query comes before anybody's next one.
fn curves(seed: u64) -> [Curve; 4] {
    let names = ["for all styles", "of the user's style", "exp4 for all users", "exp4 for each user"];
    let mut curves = names.map(|name| Curve { name, wrong: [0.0; QUERIES / STEP] });
    let all = STYLES.models.len() - 1;
    let users = all * USERS;
    let each = 1.0 / (users as u64 * ORDERS * STEP as u64) as f64;
    for order in 0..ORDERS {
        // What each user asks, and what was learned of it.
        let mut asking: Vec<(Vec<_>, Ensemble)> = STYLES
            .pictures
            .chunks(QUERIES)
            .zip(0..)
            .map(|(pictures, user)| {
                let queries = shuffled(pictures, (seed * ORDERS + order) * users as u64 + user);
                (queries, Ensemble::new(POLICY, all, seed))
            })
            .collect();
        let mut shared = Ensemble::new(Policy::Exp4(Learning::EXP4), all, seed);
        for query in 0..QUERIES {
            for (user, (queries, own)) in asking.iter_mut().enumerate() {
                let picture = queries[query];
                let of = |ensemble: &mut Ensemble| ensemble.answer(picture, |_| true).map(|answer| answer.digit);
                let answers = [Some(picture.said[all]), Some(picture.said[user / USERS]), of(&mut shared), of(own)];
                for (curve, answer) in curves.iter_mut().zip(answers) {
                    curve.wrong[query / STEP] += if answer == Some(picture.digit) { 0.0 } else { each };
                }
            }
        }
    }
    curves
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let curves = curves(context.seed);
    let mut table = Table::new(&["queries of a user", "who", "wrong of the last 15"]);
    let last = |curve: &Curve| format!("{} {:.3}", curve.name, curve.wrong[QUERIES / STEP - 1]);
    let lasts = curves.iter().map(last).collect::<Vec<_>>().join(", ");
    table.note("finding", format!("Parts wrong of each user's last 15 queries: {lasts}"));
    for curve in &curves {
        for (step, wrong) in curve.wrong.iter().enumerate() {
            table.push([((step + 1) * STEP).to_string(), curve.name.to_owned(), format!("{wrong:.4}")]);
        }
    }
    let series = curves.iter().enumerate().map(|(look, curve)| Series {
        name: curve.name.to_owned(),
        mark: Mark::Line,
        look,
        points: curve.wrong.iter().enumerate().map(|(step, wrong)| (((step + 1) * STEP) as f64, *wrong)).collect(),
    });
    let series: Vec<Series> = series.collect();
    let panel = Panel {
        title: String::new(),
        x: Axis::new("queries of a user", (0.0, QUERIES as f64)),
        y: Axis::up_to("part that is wrong", curves.iter().flat_map(|curve| curve.wrong)),
        series,
        boxes: Vec::new(),
    };
    Ok((Chart::new(CLIPPER10.title, 1, vec![panel]), table))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clipper, section 5.3.
    #[test]
    fn what_is_learned_for_each_user_beats_the_style_that_users_name() {
        let [all, named, shared, each] = curves(1);
        for step in 1..QUERIES / STEP {
            let [all, named, shared, each] = [&all, &named, &shared, &each].map(|curve| curve.wrong[step]);
            assert!(each < named && named < all && each < shared, "{step}: {each} {named} {all} {shared}");
        }
    }
}
