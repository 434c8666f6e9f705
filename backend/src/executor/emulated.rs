//! Step 8, emulated: a GPU whose l(b) is given. The output is a digest of every byte of the task's input, so a torn
//! or misplaced input is noticed wherever the answer is checked.

use proto::LatencyProfile;
use repository::Model;

use super::{Executor, ExecutorError};

/// An emulated model.
pub struct Emulated {
    profile: LatencyProfile,
    input_bytes: usize,
    output_bytes: usize,
}

impl Emulated {
    /// Emulates `model` with the given l(b).
    #[must_use]
    pub fn new(model: &Model, profile: LatencyProfile) -> Self {
        Self { profile, input_bytes: model.input_bytes(), output_bytes: model.output_bytes() }
    }
}

impl Executor for Emulated {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError> {
        for (input, output) in inputs.chunks_exact(self.input_bytes).zip(outputs.chunks_exact_mut(self.output_bytes)) {
            let digest = repository::emulated::digest(input).map(u64::to_le_bytes);
            output.iter_mut().zip(digest.as_flattened().iter().cycle()).for_each(|(into, byte)| *into = *byte);
        }
        Ok(())
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        Some(&self.profile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::Span;
    use repository::{DataType, Tensor, emulated::digest};

    #[test]
    fn each_task_gets_the_digest_of_its_own_input() {
        let tensor = |datatype, elements| Tensor::new("t", datatype, vec![elements]);
        let profile = LatencyProfile::linear(1.0, 1.0, 4).unwrap();
        let model = Model {
            name: "emulated".into(),
            version: "1".into(),
            inputs: vec![tensor(DataType::Uint8, 5)],
            outputs: vec![tensor(DataType::Uint64, 2), tensor(DataType::Uint8, 3)],
            max_batch: 4,
            rows_max: 4,
            is_batched: true,
            slo: Span::from_millis(20),
            priorities: repository::Priorities::default(),
            weights: repository::WeightsSize::default(),
            executor: repository::Executor::Emulated { profile: profile.clone() },
            labels: vec![],
            image: None,
            configuration: repository::Configuration::default(),
        };
        let mut outputs = [0; 2 * 19];
        Emulated::new(&model, profile).execute(b"firstother", &mut outputs).unwrap();
        for (input, output) in [b"first", b"other"].into_iter().zip(outputs.chunks_exact(19)) {
            let expected = digest(input).map(u64::to_le_bytes).concat();
            assert_eq!(output[..16], expected);
            assert_eq!(output[16..], expected[..3], "an output that is longer repeats it");
        }
    }
}
