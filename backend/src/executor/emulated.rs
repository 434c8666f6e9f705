//! Step 8, emulated: a GPU whose l(b) is given. The output is a digest of every byte of the task's inputs, so a torn
//! or misplaced input is noticed wherever the answer is checked; or its inputs themselves.

use proto::LatencyProfile;
use repository::{Model, Tensor, cell, emulated::is_echo};

use super::{Executor, ExecutorError, TaskError, tasks};

/// An emulated model.
pub struct Emulated {
    profile: LatencyProfile,
    inputs: Vec<Tensor>,
    output_bytes: usize,
    is_echo: bool,
}

impl Emulated {
    /// Emulates `model` with the given l(b).
    #[must_use]
    pub fn new(model: &Model, profile: LatencyProfile) -> Self {
        let is_echo = is_echo(&model.inputs, &model.outputs);
        Self { profile, inputs: model.inputs.clone(), output_bytes: model.output_bytes(), is_echo }
    }

    /// The output of one task.
    fn answer(&self, input: &[u8], output: &mut [u8]) -> Result<(), cell::CellError> {
        if !cell::is_record(&self.inputs) {
            fill(input, output, self.is_echo);
            return Ok(());
        }
        let cells = cell::read(&self.inputs, input)?;
        if self.is_echo {
            return cell::write(&self.inputs, &cells, output).map(drop);
        }
        let elements: Vec<u8> = cells.iter().flatten().flat_map(|cell| cell.data).copied().collect();
        fill(&elements, output, false);
        Ok(())
    }
}

/// Fills an output of fixed size with the input or its digest; one that is longer repeats it.
fn fill(input: &[u8], output: &mut [u8], is_echo: bool) {
    if is_echo {
        return output.copy_from_slice(input);
    }
    let digest = repository::emulated::digest(input).map(u64::to_le_bytes);
    output.iter_mut().zip(digest.as_flattened().iter().cycle()).for_each(|(into, byte)| *into = *byte);
}

impl Executor for Emulated {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        let mut failed = Vec::new();
        let outputs = outputs.chunks_exact_mut(self.output_bytes);
        for (task, (input, output)) in tasks(&self.inputs, inputs).zip(outputs).enumerate() {
            if let Err(error) = self.answer(input, output) {
                failed.push(TaskError { task, reason: error.to_string() });
            }
        }
        Ok(failed)
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        Some(&self.profile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::Span;
    use repository::{DataType, Variable, emulated::digest};

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
            queue: repository::QueuePolicies::default(),
            weights: repository::WeightsSize::default(),
            executor: repository::Executor::Emulated { profile: profile.clone() },
            labels: vec![],
            image: None,
            configuration: repository::Configuration::default(),
            files: None,
        };
        let mut outputs = [0; 2 * 19];
        Emulated::new(&model, profile).execute(b"firstother", &mut outputs).unwrap();
        for (input, output) in [b"first", b"other"].into_iter().zip(outputs.chunks_exact(19)) {
            let expected = digest(input).map(u64::to_le_bytes).concat();
            assert_eq!(output[..16], expected);
            assert_eq!(output[16..], expected[..3], "an output that is longer repeats it");
        }
    }

    #[test]
    fn records_are_digested_without_what_is_not_an_element_or_come_back() {
        let variable = Variable { dims: vec![0], reshape_dims: vec![], bytes_max: 9, is_optional: true };
        let optional = Tensor { variable: Some(variable), ..Tensor::new("a", DataType::Uint8, vec![9]) };
        let inputs = vec![optional.clone(), Tensor::new("b", DataType::Uint8, vec![2])];
        let profile = LatencyProfile::linear(1.0, 1.0, 4).unwrap();
        let executor = |inputs: &[Tensor], outputs: &[Tensor]| {
            let (inputs, profile) = (inputs.to_vec(), profile.clone());
            Emulated { profile, output_bytes: cell::bytes_max(outputs), is_echo: is_echo(&inputs, outputs), inputs }
        };
        let cell = |data: &'static [u8]| Some(cell::Cell { shape: vec![data.len()], data });
        let record = |tensors: &[Tensor], cells: &[Option<cell::Cell<'_>>]| {
            let mut record = vec![0; 64];
            let bytes = cell::write(tensors, cells, &mut record).unwrap();
            record.truncate(bytes);
            record
        };
        let digesting = executor(&inputs, &[Tensor::new("digest", DataType::Uint64, vec![2])]);
        let (both, one) = (record(&inputs, &[cell(b"first"), cell(b"xy")]), record(&inputs, &[None, cell(b"zz")]));
        let mut torn = one.clone();
        torn[4..8].copy_from_slice(&7u32.to_le_bytes());
        let mut outputs = [0; 48];
        let failed = digesting.execute(&[both.clone(), torn, one].concat(), &mut outputs).unwrap();
        assert_eq!((failed.len(), failed[0].task), (1, 1), "the others have outputs: {failed:?}");
        assert_eq!(outputs[..16], digest(b"firstxy").map(u64::to_le_bytes).concat());
        assert_eq!(outputs[32..], digest(b"zz").map(u64::to_le_bytes).concat());

        let needed = |name: &str| {
            let variable = optional.variable.clone().map(|variable| Variable { is_optional: false, ..variable });
            vec![Tensor { name: name.into(), variable, ..optional.clone() }]
        };
        let echo = executor(&needed("a"), &needed("b"));
        let (inputs, room) = (record(&needed("a"), &[cell(b"again")]), cell::bytes_max(&needed("b")));
        let mut outputs = vec![0; room];
        assert_eq!(echo.execute(&inputs, &mut outputs), Ok(vec![]));
        assert_eq!(outputs[..inputs.len()], inputs[..]);
    }
}
