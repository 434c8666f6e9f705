//! What is sent and what must come back: Open Inference Protocol v2 with the binary tensor extension.

use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

/// The requests for one model.
#[derive(Debug, Clone)]
pub struct Stream {
    /// The model's name.
    pub model: String,
    /// When requests are sent.
    pub arrivals: Arrivals,
    /// The objective that on-time is judged by, in milliseconds.
    pub slo_ms: f64,
    /// Used in turn.
    pub inputs: Arc<[Input]>,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Open loop: a Poisson process of this mean rate, whatever the answers do.
    Poisson {
        /// Requests a second.
        rate_rps: f64,
    },
    /// Closed loop: the next request leaves when the last one has been answered. Shows what one request costs, and
    /// nothing about load.
    OneAtATime,
}

/// One request body and what its answer must be.
#[derive(Debug, Clone)]
pub struct Input {
    body: Bytes,
    json_bytes: usize,
    expected: Expected,
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

/// How an answer compares with what was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// As expected. For scores: whether the largest is at the true class.
    Right { classified: Option<bool> },
    /// Not as expected.
    Wrong,
}

impl Input {
    /// A request with one input tensor of one task; `shape` is without the batch dimension. With `slo_ms` it carries
    /// that objective (`timeout`); without, the model's own holds.
    #[must_use]
    pub fn new(
        name: &str,
        datatype: &str,
        shape: &[usize],
        data: &[u8],
        slo_ms: Option<f64>,
        expected: Expected,
    ) -> Self {
        let shape: Vec<usize> = std::iter::once(1).chain(shape.iter().copied()).collect();
        let mut parameters = json!({ "binary_data_output": true });
        if let Some(slo_ms) = slo_ms {
            parameters["timeout"] = json!((slo_ms * 1e3).round() as i64);
        }
        let header = json!({
            "parameters": parameters,
            "inputs": [{
                "name": name, "datatype": datatype, "shape": shape,
                "parameters": { "binary_data_size": data.len() },
            }],
        })
        .to_string();
        let body = [header.as_bytes(), data].concat().into();
        Self { body, json_bytes: header.len(), expected }
    }

    pub(super) fn body(&self) -> Bytes {
        self.body.clone()
    }

    pub(super) fn json_bytes(&self) -> usize {
        self.json_bytes
    }

    /// Compares an answer's body: `json_bytes` of JSON, then the binary outputs.
    pub(super) fn judge(&self, body: &[u8], json_bytes: usize) -> Verdict {
        let Some(output) = first_output(body, json_bytes) else { return Verdict::Wrong };
        match &self.expected {
            Expected::Any => Verdict::Right { classified: None },
            Expected::Bytes(bytes) if output == bytes => Verdict::Right { classified: None },
            Expected::Bytes(_) => Verdict::Wrong,
            Expected::Scores { scores, label } => judge_scores(output, scores, *label),
        }
    }
}

fn first_output(body: &[u8], json_bytes: usize) -> Option<&[u8]> {
    #[derive(Deserialize)]
    struct Response {
        outputs: Vec<Output>,
    }
    #[derive(Deserialize)]
    struct Output {
        parameters: Parameters,
    }
    #[derive(Deserialize)]
    struct Parameters {
        binary_data_size: usize,
    }
    let (json, binary) = body.split_at_checked(json_bytes)?;
    let response: Response = serde_json::from_slice(json).ok()?;
    binary.get(..response.outputs.first()?.parameters.binary_data_size)
}

fn judge_scores(output: &[u8], scores: &[f32], label: usize) -> Verdict {
    let (floats, rest) = output.as_chunks::<4>();
    let found: Vec<f32> = floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let close = rest.is_empty()
        && found.len() == scores.len()
        && found.iter().zip(scores).all(|(found, score)| (found - score).abs() <= 1e-5);
    let largest = found.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| index);
    if close { Verdict::Right { classified: Some(largest == Some(label)) } } else { Verdict::Wrong }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(output: &[u8]) -> (Vec<u8>, usize) {
        let header = json!({ "model_name": "m", "outputs": [{
            "name": "o", "datatype": "FP32", "shape": [1, 2], "parameters": { "binary_data_size": output.len() } }] })
        .to_string();
        ([header.as_bytes(), output].concat(), header.len())
    }

    fn input(expected: Expected) -> Input {
        Input::new("i", "UINT8", &[3], &[1, 2, 3], Some(25.0), expected)
    }

    #[test]
    fn a_body_is_its_header_and_the_tensor() {
        let input = input(Expected::Any);
        let header: serde_json::Value = serde_json::from_slice(&input.body[..input.json_bytes]).unwrap();
        assert_eq!(header["inputs"][0]["shape"], json!([1, 3]));
        assert_eq!(header["parameters"]["timeout"], 25_000);
        assert_eq!(&input.body[input.json_bytes..], [1, 2, 3]);
    }

    #[test]
    fn wrong_torn_and_short_answers_are_caught() {
        let right = Verdict::Right { classified: None };
        let (body, json_bytes) = answer(&[7, 8]);
        assert_eq!(input(Expected::Bytes(vec![7, 8])).judge(&body, json_bytes), right);
        assert_eq!(input(Expected::Bytes(vec![7, 9])).judge(&body, json_bytes), Verdict::Wrong);
        assert_eq!(input(Expected::Any).judge(&body[..body.len() - 1], json_bytes), Verdict::Wrong);
        assert_eq!(input(Expected::Any).judge(&body, body.len() + 1), Verdict::Wrong);
    }

    #[test]
    fn scores_must_agree_and_then_count_for_accuracy() {
        let bytes: Vec<u8> = [0.25f32, 0.75].iter().flat_map(|f| f.to_le_bytes()).collect();
        let (body, json_bytes) = answer(&bytes);
        let judge = |scores: [f32; 2], label| {
            input(Expected::Scores { scores: scores.to_vec(), label }).judge(&body, json_bytes)
        };
        assert_eq!(judge([0.25, 0.750_001], 1), Verdict::Right { classified: Some(true) });
        assert_eq!(judge([0.25, 0.75], 0), Verdict::Right { classified: Some(false) });
        assert_eq!(judge([0.25, 0.7501], 1), Verdict::Wrong);
    }
}
