//! What is sent and what must come back.

use std::sync::Arc;

use bytes::Bytes;
use repository::DataType;

use crate::arrivals::Arrivals;

/// Requests that are measured together: for one model, or for several, as their inputs say.
#[derive(Debug, Clone)]
pub struct Stream {
    /// The model's name, or what tables call several.
    pub model: String,
    /// When requests are sent.
    pub arrivals: Arrivals,
    /// The objective that on-time is judged by, in milliseconds.
    pub slo_ms: f64,
    /// Used in turn.
    pub inputs: Arc<[Input]>,
}

/// One request with the input tensors of one task, and what its answer must be.
#[derive(Debug, Clone)]
pub struct Input {
    /// In the model's order.
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) timeout_us: Option<i64>,
    /// The model that it is for, if that is not its stream's.
    pub(crate) model: Option<String>,
    expected: Expected,
}

/// One input of a model.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    /// As it is sent: with a batch dimension of 1, if the model has one.
    pub(crate) shape: Vec<i64>,
    /// Little-endian.
    pub(crate) data: Bytes,
}

/// What the first output must be.
#[derive(Debug, Clone, PartialEq)]
pub enum Expected {
    /// Anything of the right form.
    Any,
    /// These bytes.
    Bytes(Vec<u8>),
    /// These floats within 1e-5, and whether their largest is at `label`.
    Scores {
        /// What running the model directly gives.
        scores: Vec<f32>,
        /// The true class.
        label: usize,
    },
}

impl Expected {
    /// What an emulated model gives: the digest of its input, or of all of them, one behind the other.
    #[must_use]
    pub fn digest(data: &[u8]) -> Self {
        Self::Bytes(repository::emulated::digest(data).iter().flat_map(|word| word.to_le_bytes()).collect())
    }
}

/// How an answer compares with what was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// As expected. For scores: whether the largest is at the true class.
    Right { classified: Option<bool> },
    /// Not as expected, and how.
    Wrong(&'static str),
}

/// Reasons of wrong answers.
const NO_OUTPUT: &str = "wrong answer: it has no output in the protocol's form";
const OTHER_OUTPUT: &str = "wrong answer: its output is not the expected one";

impl Input {
    /// `shape` is without the batch dimension. With `slo_ms` the request carries that objective (`timeout`); without,
    /// the model's own holds.
    #[must_use]
    pub fn new(
        name: &str,
        datatype: DataType,
        shape: &[usize],
        data: &[u8],
        slo_ms: Option<f64>,
        expected: Expected,
    ) -> Self {
        let shape = std::iter::once(1).chain(shape.iter().map(|&size| size as i64)).collect();
        let tensor = Tensor { name: name.to_owned(), datatype, shape, data: Bytes::copy_from_slice(data) };
        Self::of(vec![tensor], slo_ms, expected)
    }

    /// Of a model with any number of inputs.
    pub(crate) fn of(tensors: Vec<Tensor>, slo_ms: Option<f64>, expected: Expected) -> Self {
        let timeout_us = slo_ms.map(|slo_ms| (slo_ms * 1e3).round() as i64);
        Self { tensors, timeout_us, model: None, expected }
    }

    /// The same for a model whose tensors have no dimension for batches.
    #[must_use]
    pub fn without_batch(mut self) -> Self {
        for tensor in &mut self.tensors {
            tensor.shape.remove(0);
        }
        self
    }

    /// The same for another model than its stream's.
    #[must_use]
    pub fn for_model(self, model: String) -> Self {
        Self { model: Some(model), ..self }
    }

    /// Compares the first output's bytes; there is none in an answer that has not the protocol's form.
    pub(crate) fn judge(&self, output: Option<&[u8]>) -> Verdict {
        let Some(output) = output else { return Verdict::Wrong(NO_OUTPUT) };
        match &self.expected {
            Expected::Any => Verdict::Right { classified: None },
            Expected::Bytes(bytes) if output == bytes => Verdict::Right { classified: None },
            Expected::Bytes(_) => Verdict::Wrong(OTHER_OUTPUT),
            Expected::Scores { scores, label } => judge_scores(output, scores, *label),
        }
    }
}

fn judge_scores(output: &[u8], scores: &[f32], label: usize) -> Verdict {
    let (floats, rest) = output.as_chunks::<4>();
    let found: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let close = rest.is_empty()
        && found.len() == scores.len()
        && found.iter().zip(scores).all(|(found, score)| (found - score).abs() <= 1e-5);
    let largest = found.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| index);
    if close { Verdict::Right { classified: Some(largest == Some(label)) } } else { Verdict::Wrong(OTHER_OUTPUT) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(expected: Expected) -> Input {
        Input::new("i", DataType::Uint8, &[3], &[1, 2, 3], Some(25.0), expected)
    }

    #[test]
    fn wrong_and_missing_outputs_are_caught() {
        let right = Verdict::Right { classified: None };
        assert_eq!(input(Expected::Bytes(vec![7, 8])).judge(Some(&[7, 8])), right);
        assert_eq!(input(Expected::Bytes(vec![7, 9])).judge(Some(&[7, 8])), Verdict::Wrong(OTHER_OUTPUT));
        assert_eq!(input(Expected::Any).judge(Some(&[])), right);
        assert_eq!(input(Expected::Any).judge(None), Verdict::Wrong(NO_OUTPUT));
    }

    #[test]
    fn scores_must_agree_and_then_count_for_accuracy() {
        let bytes: Vec<u8> = [0.25f32, 0.75].iter().flat_map(|f| f.to_le_bytes()).collect();
        let judge =
            |scores: [f32; 2], label| input(Expected::Scores { scores: scores.to_vec(), label }).judge(Some(&bytes));
        assert_eq!(judge([0.25, 0.750_001], 1), Verdict::Right { classified: Some(true) });
        assert_eq!(judge([0.25, 0.75], 0), Verdict::Right { classified: Some(false) });
        assert_eq!(judge([0.25, 0.7501], 1), Verdict::Wrong(OTHER_OUTPUT));
    }
}
