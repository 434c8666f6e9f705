//! Step 8, emulated: a GPU whose l(b) is given, or what each task takes alone. The output is a digest of every byte of
//! the task's inputs, so a torn or misplaced input is noticed wherever the answer is checked; or its inputs themselves.

use std::{borrow::Cow, sync::Arc};

use proto::{BatchCost, LatencyProfile, Span};
use repository::{
    Model, Tensor, cell,
    emulated::{UnequalTimes, digest, is_echo},
};

use crate::{
    error::{ExecutorError, TaskError},
    executor::{Executor, tasks},
};

/// An emulated model.
pub struct Emulated {
    profile: LatencyProfile,
    times: Option<Arc<UnequalTimes>>,
    inputs: Vec<Tensor>,
    output_bytes: usize,
    is_echo: bool,
}

impl Emulated {
    /// Emulates `model` with the given l(b); with that, and the times of its requests, where they are unequal.
    #[must_use]
    pub fn new(model: &Model, profile: LatencyProfile) -> Self {
        let is_echo = is_echo(&model.inputs, &model.outputs);
        let times = model.configuration.unequal_times().cloned();
        Self { profile, times, inputs: model.inputs.clone(), output_bytes: model.output_bytes(), is_echo }
    }

    /// The output of one task.
    fn answer(&self, input: &[u8], output: &mut [u8]) -> Result<(), cell::CellError> {
        if self.is_echo && cell::is_record(&self.inputs) {
            return cell::write(&self.inputs, &cell::read(&self.inputs, input)?, output).map(drop);
        }
        fill(&self.elements(input)?, output, self.is_echo);
        Ok(())
    }

    /// The elements of a task's inputs, one after another: of a record what is not one of them is left out.
    fn elements<'a>(&self, input: &'a [u8]) -> Result<Cow<'a, [u8]>, cell::CellError> {
        if !cell::is_record(&self.inputs) {
            return Ok(Cow::Borrowed(input));
        }
        let cells = cell::read(&self.inputs, input)?;
        Ok(cells.iter().flatten().flat_map(|cell| cell.data).copied().collect())
    }

    /// What a task takes alone; nothing if it cannot be read, as it fails then.
    fn alone(&self, times: &UnequalTimes, input: &[u8]) -> Span {
        self.elements(input).map_or(Span::ZERO, |elements| times.alone(digest(&elements), elements.len()))
    }
}

/// Fills an output of fixed size with the input or its digest; one that is longer repeats it.
fn fill(input: &[u8], output: &mut [u8], is_echo: bool) {
    if is_echo {
        return output.copy_from_slice(input);
    }
    let digest = digest(input).map(u64::to_le_bytes);
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

    fn emulated_latency(&self, batch: usize, inputs: &[u8]) -> Option<Span> {
        let Some(times) = &self.times else { return Some(self.profile.latency(batch)) };
        let longest = tasks(&self.inputs, inputs).map(|input| self.alone(times, input)).max();
        Some(times.batch(batch, longest.unwrap_or(Span::ZERO)))
    }

    fn emulated_cost(&self) -> Option<BatchCost> {
        self.times.as_ref().map(|times| times.cost)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use repository::{DataType, Variable};

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
        let variable =
            Variable { dims: vec![0], reshape_dims: vec![], bytes_max: 9, is_optional: true, any_rank: false };
        let optional = Tensor { variable: Some(variable), ..Tensor::new("a", DataType::Uint8, vec![9]) };
        let inputs = vec![optional.clone(), Tensor::new("b", DataType::Uint8, vec![2])];
        let profile = LatencyProfile::linear(1.0, 1.0, 4).unwrap();
        let executor = |inputs: &[Tensor], outputs: &[Tensor]| {
            let (inputs, profile) = (inputs.to_vec(), profile.clone());
            let (output_bytes, is_echo) = (cell::bytes_max(outputs), is_echo(&inputs, outputs));
            Emulated { profile, times: None, output_bytes, is_echo, inputs }
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

    /// A model as its folder says, whose requests take unequal times: c0 is 2 ms, and c1 a quarter.
    fn unequal(input: &str, alone: &str) -> Emulated {
        let repository = tempfile::tempdir().unwrap();
        let folder = repository.path().join("m");
        fs::create_dir(&folder).unwrap();
        let parameters = [("cost_fixed_ms", "2"), ("cost_per_task", "0.25"), ("alone_ms", alone)]
            .map(|(key, value)| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}\n"))
            .concat();
        let tensors =
            format!("input {{ name: \"x\" {input} }} output {{ name: \"digest\" data_type: TYPE_UINT64 dims: 2 }}");
        let config = format!("backend: \"emulated\" max_batch_size: 8 {tensors} {parameters}");
        fs::write(folder.join("config.pbtxt"), config).unwrap();
        let model = repository::load_model(&folder).unwrap();
        let repository::Executor::Emulated { profile } = &model.executor else { panic!("{:?}", model.executor) };
        Emulated::new(&model, profile.clone())
    }

    #[test]
    fn a_batch_takes_what_its_tasks_say_and_equal_inputs_take_equally_long() {
        let executor = unequal("data_type: TYPE_UINT8 dims: 4", "log-normal:20:0.5");
        let cost = BatchCost { fixed: Span::from_millis(2), per_task_ppm: 250_000 };
        assert_eq!(executor.emulated_cost(), Some(cost));
        let alone = |input: &[u8]| executor.emulated_latency(1, input).unwrap();
        let times = [alone(b"this"), alone(b"that"), alone(b"then")];
        assert!(times[0] != times[1] && times[1] != times[2]);
        assert_eq!(alone(b"this"), times[0]);
        let work = (times.into_iter().max().unwrap() - cost.fixed).as_millis_f64();
        let batch = executor.emulated_latency(3, b"thisthatthen").unwrap();
        assert!((batch.as_millis_f64() - (2.0 + 1.5 * work)).abs() < 1e-5, "{batch} {work}");
        assert_eq!(executor.emulated_latency(3, b"thenthisthat"), Some(batch));
    }

    #[test]
    fn the_length_of_an_input_is_that_of_its_elements() {
        let executor = unequal("data_type: TYPE_UINT8 dims: -1", "bytes:1024");
        let record = |length: usize| {
            let data = vec![7; length];
            let mut record = vec![0; length + 64];
            let cells = [Some(cell::Cell { shape: vec![length], data: &data })];
            let bytes = cell::write(&executor.inputs, &cells, &mut record).unwrap();
            record.truncate(bytes);
            record
        };
        let (short, long) = (record(6), record(10));
        assert_eq!(executor.emulated_latency(1, &short), Some(Span::from_millis(6)));
        assert_eq!(executor.emulated_latency(2, &[&short[..], &long].concat()), Some(Span::from_millis(12)));
        let mut torn = long.clone();
        torn[4..8].copy_from_slice(&1_000u32.to_le_bytes());
        let both = [&torn[..], &short].concat();
        assert_eq!(
            executor.emulated_latency(2, &both),
            Some(Span::from_millis(7)),
            "what fails takes no time of its own"
        );
    }

    #[test]
    fn without_times_a_batch_takes_l_of_b() {
        let (inputs, profile) = (vec![Tensor::new("x", DataType::Uint8, vec![1])], LatencyProfile::linear(1.0, 2.0, 4));
        let profile = profile.unwrap();
        let executor = Emulated { profile, times: None, inputs, output_bytes: 16, is_echo: false };
        assert_eq!(executor.emulated_latency(3, b"abc"), Some(Span::from_millis(5)));
        assert_eq!(executor.emulated_cost(), None);
    }
}
