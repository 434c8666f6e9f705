//! What models say of handwritten digits (scikit-learn's; `digits/predict` made the files), and ensembles of them: the
//! selection that serves, over predictions that were made before.

use std::sync::LazyLock;

use bytes::Bytes;
use ensembles::selection::{
    Learner,
    combine::{OutputKind, Outputs},
};
use proto::Span;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use repository::{Agreement, DataType, Policy, Selection};

/// Five kinds of models.
pub(crate) static FIVE: LazyLock<Said> = LazyLock::new(|| Said::parse(include_str!("../digits/five")));
/// Sixteen trees, each trained on pictures of its own.
pub(crate) static BAGGED: LazyLock<Said> = LazyLock::new(|| Said::parse(include_str!("../digits/bagged")));
/// A model for each of eight styles of writing, and one for all; [`USERS`] users of each style, one after another.
pub(crate) static STYLES: LazyLock<Said> = LazyLock::new(|| Said::parse(include_str!("../digits/styles")));
/// Of each of [`STYLES`].
pub(crate) const USERS: usize = 6;
/// Pictures of each user.
pub(crate) const QUERIES: usize = 120;

/// Predictions of the same pictures by several models.
pub(crate) struct Said {
    /// Their names.
    pub models: Vec<&'static str>,
    /// In the order of the file.
    pub pictures: Vec<Picture>,
}

/// One picture.
#[derive(Debug, Clone)]
pub(crate) struct Picture {
    /// What it shows.
    pub digit: u8,
    /// What each model says that it shows.
    pub said: Vec<u8>,
}

impl Said {
    fn parse(text: &'static str) -> Self {
        let (models, pictures) = text.split_once('\n').expect("a line of names");
        let picture = |line: &str| {
            let (digit, said) = line.split_once(' ').expect("a digit, then predictions");
            Picture { digit: digit.as_bytes()[0] - b'0', said: said.bytes().map(|byte| byte - b'0').collect() }
        };
        Self { models: models.split(' ').collect(), pictures: pictures.lines().map(picture).collect() }
    }

    /// The part of all pictures that a model is wrong of.
    pub(crate) fn error(&self, model: usize) -> f64 {
        part_wrong(self.pictures.iter().map(|picture| picture.said[model] != picture.digit))
    }
}

/// The part that is true.
pub(crate) fn part_wrong(wrong: impl ExactSizeIterator<Item = bool>) -> f64 {
    let of = wrong.len() as f64;
    wrong.filter(|is_wrong| *is_wrong).count() as f64 / of
}

/// In an order that follows from the seed.
pub(crate) fn shuffled(pictures: &[Picture], seed: u64) -> Vec<&Picture> {
    let mut shuffled: Vec<&Picture> = pictures.iter().collect();
    shuffled.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    shuffled
}

/// An ensemble whose members classify: their digits are voted on by weight.
pub(crate) struct Ensemble {
    learner: Learner,
    members: usize,
}

/// What an ensemble says of a picture.
pub(crate) struct Answer {
    /// What it shows.
    pub digit: u8,
    /// The weight of the members that agree, of all that were asked.
    pub confidence: f64,
}

impl Ensemble {
    /// A policy that has learned nothing yet.
    pub(crate) fn new(policy: Policy, members: usize, seed: u64) -> Self {
        let agreements = vec![Agreement::Equal];
        let selection = Selection { policy, agreements, defaults: None, confidence: 0.0, reply: Span::ZERO, seed };
        Self { learner: Learner::new(&selection, members), members }
    }

    /// What it says if only those members answer in time, and if it is told at once what was right.
    pub(crate) fn answer(&mut self, picture: &Picture, is_there: impl Fn(usize) -> bool) -> Option<Answer> {
        let choice = self.learner.select();
        let said = |member: &usize| is_there(*member).then(|| vec![Bytes::copy_from_slice(&[picture.said[*member]])]);
        let predictions: Vec<Option<Vec<Bytes>>> = choice.members.iter().map(said).collect();
        let weights: Vec<f64> = choice.members.iter().map(|member| choice.weights[*member]).collect();
        let is_asked = |member: usize| choice.members.contains(&member) && is_there(member);
        let loss = |member: usize| is_asked(member).then(|| f64::from(picture.said[member] != picture.digit));
        let losses: Vec<Option<f64>> = (0..self.members).map(loss).collect();
        // A policy that does not learn says so.
        let _ = self.learner.observe(choice.request, choice.probability, &losses);
        let combined = outputs().combine(&weights, &predictions)?;
        Some(Answer { digit: combined.outputs[0][0], confidence: combined.confidence })
    }
}

/// One digit.
fn outputs() -> Outputs {
    let kind = OutputKind {
        datatype: DataType::Uint8,
        row_bytes: 1,
        agreement: Agreement::Equal,
        is_averaged: false,
        is_wanted: true,
    };
    Outputs { rows: 1, outputs: vec![kind] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_have_a_prediction_of_each_model_for_each_picture() {
        for (said, models, pictures) in [(&FIVE, 5, 1_797), (&BAGGED, 16, 1_797), (&STYLES, 9, 8 * USERS * QUERIES)] {
            assert_eq!((said.models.len(), said.pictures.len()), (models, pictures));
            assert!(said.pictures.iter().all(|picture| picture.digit < 10 && picture.said.len() == models));
        }
    }

    /// Clipper, section 5.2.1: the confidence is the part of the models that agree with the answer.
    #[test]
    fn an_answer_is_what_most_say_and_its_confidence_how_many_do() {
        let mut ensemble = Ensemble::new(Policy::Majority, 4, 1);
        let picture = Picture { digit: 7, said: vec![7, 7, 1, 1] };
        let answer = ensemble.answer(&picture, |member| member != 3).unwrap();
        assert_eq!((answer.digit, answer.confidence), (7, 0.5));
        assert!(ensemble.answer(&picture, |_| false).is_none());
    }
}
