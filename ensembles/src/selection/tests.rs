use bytes::Bytes;
use proptest::prelude::*;
use repository::{Agreement, DataType, Learning, Tensor};

use super::{
    combine::{Combined, Outputs},
    *,
};

fn selection(policy: Policy, seed: u64) -> Selection {
    let (agreements, defaults) = (vec![Agreement::Argmax], None);
    Selection { policy, agreements, defaults, confidence: 0.0, reply: proto::Span::ZERO, seed }
}

fn learning(eta: f64, exploration: f64, window: u64) -> Learning {
    Learning { eta, exploration, window }
}

/// Clipper's Exp3 and Exp4 as its section 5 writes them: weights that are multiplied, and never forget.
fn naive(is_exp3: bool, eta: f64, feedback: &[(f64, Vec<Option<f64>>)], members: usize) -> Vec<f64> {
    let mut weights = vec![1.0; members];
    for (probability, losses) in feedback {
        for (weight, loss) in weights.iter_mut().zip(losses) {
            if let Some(loss) = loss {
                let divisor = if is_exp3 { *probability } else { 1.0 };
                *weight *= f64::exp(-eta * loss / divisor);
            }
        }
    }
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

fn are_near(one: &[f64], other: &[f64]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-9)
}

proptest! {
    /// Within a window the weights are Clipper's, in whatever order feedback comes.
    #[test]
    fn sums_of_losses_are_the_papers_products(
        is_exp3: bool,
        eta in 0.01..1.0,
        losses in proptest::collection::vec(proptest::collection::vec(proptest::option::of(0.0..=1.0), 4), 1..60),
        turn in 0..60usize,
    ) {
        let rule = learning(eta, 0.0, 1 << 20);
        let policy = if is_exp3 { Policy::Exp3(rule) } else { Policy::Exp4(rule) };
        let mut learner = Learner::new(&selection(policy, 1), 4);
        let choices: Vec<Choice> = losses.iter().map(|_| learner.select()).collect();
        let mut feedback: Vec<_> = choices.iter().zip(&losses).collect();
        let turn = turn % feedback.len();
        feedback.rotate_left(turn);
        for (choice, losses) in feedback {
            learner.observe(choice.request, choice.probability, losses).unwrap();
        }
        let told: Vec<_> = choices.iter().map(|choice| choice.probability).zip(losses).collect();
        prop_assert!(are_near(&learner.weights(), &naive(is_exp3, eta, &told, 4)));
    }

    /// Of a history that goes over many windows the order of feedback does not matter either.
    #[test]
    fn feedback_commutes(
        told in proptest::collection::vec((0..300u64, proptest::option::of(0.0..=1.0)), 1..80), turn in 0..80usize,
    ) {
        let learner = || {
            let mut learner = Learner::new(&selection(Policy::Exp4(learning(0.1, 0.0, 80)), 0), 2);
            (0..300).for_each(|_| drop(learner.select()));
            learner
        };
        let (mut one, mut other) = (learner(), learner());
        let heard = told.iter().map(|(request, loss)| one.observe(*request, 1.0, &[*loss, Some(0.5)]).is_ok());
        let heard: Vec<bool> = heard.collect();
        let mut later: Vec<_> = told.iter().zip(heard).collect();
        let turn = turn % later.len();
        later.rotate_left(turn);
        for ((request, loss), was_heard) in later {
            prop_assert_eq!(other.observe(*request, 1.0, &[*loss, Some(0.5)]).is_ok(), was_heard);
            // 300 requests are 30 blocks of 10, of which the last 8 before the newest count.
            prop_assert_eq!(was_heard, *request >= 210);
        }
        prop_assert!(are_near(&one.weights(), &other.weights()));
    }

    /// Row by row: whoever most weight agrees with is the answer, and that weight the confidence.
    #[test]
    fn an_answer_is_what_most_agree_with(
        members in proptest::collection::vec((0..5u32, proptest::option::of((0..3u8, 0..3u8))), 2..6),
    ) {
        let weights: Vec<f64> = members.iter().map(|(weight, _)| f64::from(*weight)).collect();
        let predictions: Vec<_> =
            members.iter().map(|(_, rows)| rows.map(|(one, other)| vec![Bytes::from(vec![one, other])])).collect();
        let outputs = outputs(Policy::Majority, Agreement::Equal, DataType::Uint8, 1, 2);
        let combined = outputs.combine(&weights, &predictions);
        prop_assert_eq!(combined.is_some(), predictions.iter().any(Option::is_some));
        let Some(Combined { outputs, confidence }) = combined else { return Ok(()) };
        let all: f64 = weights.iter().sum();
        let mut least = 1.0f64;
        for row in 0..2 {
            let votes = |value: u8| -> f64 {
                let mine = |(weight, prediction): (&f64, &Option<Vec<Bytes>>)| {
                    prediction.as_ref().filter(|data| data[0][row] == value).map(|_| *weight)
                };
                weights.iter().zip(&predictions).filter_map(mine).sum()
            };
            let most = (0..3).map(votes).fold(0.0, f64::max);
            prop_assert_eq!(votes(outputs[0][row]), most);
            least = least.min(if all > 0.0 { most / all } else { 0.0 });
        }
        prop_assert!((confidence - least).abs() < 1e-12);
    }
}

fn outputs(policy: Policy, agreement: Agreement, datatype: DataType, elements: usize, rows: usize) -> Outputs {
    let selection = Selection { agreements: vec![agreement], ..selection(policy, 0) };
    Outputs::of(&selection, &[Tensor::new("y", datatype, vec![elements])], rows, &[true])
}

fn floats(numbers: &[f32]) -> Option<Vec<Bytes>> {
    Some(vec![numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>().into()])
}

#[test]
fn numbers_are_averaged_and_who_is_missing_takes_the_average() {
    let policy = || Policy::Weighted(vec![3.0, 1.0, 4.0]);
    let all = outputs(policy(), Agreement::Argmax, DataType::Fp32, 2, 1);
    let predictions = [floats(&[0.8, 0.2]), floats(&[0.0, 1.0]), None];
    let combined = all.combine(&[3.0, 1.0, 4.0], &predictions).unwrap();
    assert_eq!(Some(combined.outputs), floats(&[0.6, 0.4]), "(3 * 0.8 + 1 * 0) / 4");
    assert_eq!(combined.confidence, 3.0 / 8.0, "who is missing agrees with nobody");
    let within = outputs(policy(), Agreement::Within(0.25), DataType::Fp32, 1, 1);
    let combined = within.combine(&[1.0, 1.0, 2.0], &[floats(&[1.0]), floats(&[1.2]), floats(&[3.0])]).unwrap();
    assert_eq!((Some(combined.outputs), combined.confidence), (floats(&[2.05]), 0.0));
}

#[test]
fn what_is_not_finite_is_missing_and_alone_no_answer() {
    let argmax = outputs(Policy::Majority, Agreement::Argmax, DataType::Fp32, 2, 1);
    let nan = floats(&[f32::NAN, 1.0]);
    let combined = argmax.combine(&[1.0, 1.0], &[nan.clone(), floats(&[0.9, 0.1])]).unwrap();
    assert_eq!((Some(combined.outputs), combined.confidence), (floats(&[0.9, 0.1]), 0.5));
    assert_eq!(argmax.combine(&[1.0, 1.0], &[nan.clone(), floats(&[f32::INFINITY, 0.0])]), None);
    assert_eq!(argmax.combine(&[1.0], &[nan]), None);
    assert_eq!(argmax.combine(&[1.0], &[None]), None);
}

#[test]
fn one_alone_is_as_sure_as_it_says() {
    let argmax = outputs(Policy::Static, Agreement::Argmax, DataType::Fp32, 2, 2);
    let prediction = floats(&[0.9, 0.1, 0.3, 0.7]);
    let combined = argmax.combine(&[1.0], std::slice::from_ref(&prediction)).unwrap();
    assert_eq!((Some(combined.outputs), combined.confidence as f32), (prediction.clone(), 0.7));
    assert_eq!(argmax.own_confidence(&prediction.unwrap()) as f32, 0.7);
    let equal = outputs(Policy::Static, Agreement::Equal, DataType::Uint8, 1, 1);
    assert_eq!(equal.combine(&[1.0], &[Some(vec![vec![7].into()])]).unwrap().confidence, 1.0);
}

#[test]
fn what_is_no_loss_is_refused_and_changes_nothing() {
    let mut learner = Learner::new(&selection(Policy::Exp3(learning(0.1, 0.1, 80)), 0), 2);
    let choice = learner.select();
    let before = learner.weights();
    for wrong in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
        assert_eq!(learner.observe(choice.request, choice.probability, &[Some(wrong), None]), Err(Unheard::NoLoss));
        assert_eq!(learner.observe(choice.request, wrong.min(0.0), &[Some(1.0), None]), Err(Unheard::NoLoss));
    }
    assert_eq!(learner.observe(choice.request, 1.0, &[Some(1.0)]), Err(Unheard::NoLoss), "one loss for two");
    assert_eq!(learner.observe(1, 1.0, &[Some(1.0), None]), Err(Unheard::NoLoss), "no such request yet");
    assert_eq!(learner.weights(), before);
    let mut fixed = Learner::new(&selection(Policy::Majority, 0), 2);
    assert_eq!(fixed.observe(fixed.clone().select().request, 1.0, &[None, None]), Err(Unheard::NotLearning));
    (0..90).for_each(|_| drop(learner.select()));
    assert_eq!(learner.observe(choice.request, 1.0, &[Some(1.0), None]), Err(Unheard::Old));
}

#[test]
fn a_seed_replays_and_another_differs() {
    let drawn = |policy: Policy, seed| -> Vec<Vec<usize>> {
        let mut learner = Learner::new(&selection(policy, seed), 5);
        (0..200).map(|_| learner.select().members).collect()
    };
    for policy in [Policy::Exp3(learning(0.03, 0.1, 80)), Policy::EpsilonGreedy(learning(1.0, 0.5, 80))] {
        assert_eq!(drawn(policy.clone(), 7), drawn(policy.clone(), 7));
        assert_ne!(drawn(policy.clone(), 7), drawn(policy, 8));
    }
    assert!(drawn(Policy::Fallback, 7).iter().all(|members| *members == [0, 1, 2, 3, 4]), "nothing was lost yet");
    for (policy, expected) in [(Policy::Static, vec![0]), (Policy::Majority, vec![0, 1, 2, 3, 4])] {
        assert!(drawn(policy, 7).iter().all(|members| *members == expected));
    }
}

#[test]
fn a_canary_has_its_part_of_the_requests_and_fails_to_the_others() {
    let chosen = |weights: &[f64], seed: u64| -> Vec<Choice> {
        let mut learner = Learner::new(&selection(Policy::Canary(weights.to_vec()), seed), weights.len());
        (0..10_000).map(|_| learner.select()).collect()
    };
    let choices = chosen(&[9.0, 1.0, 0.0], 3);
    let parts = |at: usize| choices.iter().filter(|choice| choice.members[0] == at).count();
    // Of 10,000 a standard deviation is 30.
    assert!((880..=1_120).contains(&parts(1)) && parts(2) == 0, "{} {}", parts(0), parts(1));
    for choice in &choices {
        let expected = if choice.members[0] == 0 { [0, 1] } else { [1, 0] };
        assert_eq!((&choice.members[..], choice.order), (&expected[..], Order::OnFailure), "nobody without a weight");
        assert!((choice.probability - [0.9, 0.1][choice.members[0]]).abs() < 1e-12 && choice.mirrored.is_empty());
    }
    assert_eq!(choices, chosen(&[9.0, 1.0, 0.0], 3), "a seed replays");
    assert_ne!(choices, chosen(&[9.0, 1.0, 0.0], 4));
    // All that weigh nothing are out of it, as after a roll back.
    assert!(chosen(&[5.0, 0.0, 0.0], 3).iter().all(|choice| choice.members == [0]));
}

#[test]
fn a_part_of_the_requests_is_mirrored_and_the_first_step_answers_all() {
    let mirrored = |part: f64| {
        let mut learner = Learner::new(&selection(Policy::Shadow(part), 5), 3);
        let choices = (0..10_000).map(|_| learner.select());
        let check = |choice: &Choice| {
            assert_eq!((&choice.members[..], &choice.weights[..]), (&[0][..], &[1.0, 0.0, 0.0][..]));
            assert!(choice.mirrored.is_empty() || choice.mirrored == [1, 2]);
        };
        choices.inspect(check).filter(|choice| !choice.mirrored.is_empty()).count()
    };
    assert_eq!([mirrored(0.0), mirrored(1.0)], [0, 10_000]);
    assert!((2_370..=2_630).contains(&mirrored(0.25)), "{}", mirrored(0.25));
}

#[test]
fn predictions_agree_as_their_outputs_say() {
    let of = |numbers: &[f32]| vec![Bytes::from(numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())];
    let within = outputs(Policy::Static, Agreement::Within(0.5), DataType::Fp32, 2, 2);
    assert!(within.agree(&of(&[1.0, 2.0, 3.0, 4.0]), &of(&[1.5, 2.0, 3.0, 3.5])));
    assert!(!within.agree(&of(&[1.0, 2.0, 3.0, 4.0]), &of(&[1.0, 2.0, 3.0, 4.6])));
    assert!(!within.agree(&of(&[f32::NAN; 4]), &of(&[f32::NAN; 4])), "no number is near none");
    assert!(!within.agree(&of(&[1.0, 2.0, 3.0, 4.0]), &of(&[1.0, 2.0])), "a row is missing");
    let argmax = outputs(Policy::Static, Agreement::Argmax, DataType::Fp32, 2, 2);
    assert!(argmax.agree(&of(&[1.0, 2.0, 9.0, 4.0]), &of(&[0.0, 0.1, 1.0, 0.0])));
    assert!(!argmax.agree(&of(&[1.0, 2.0, 9.0, 4.0]), &of(&[0.0, 0.1, 1.0, 2.0])), "of one row another class");
}
