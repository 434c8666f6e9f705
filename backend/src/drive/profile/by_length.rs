//! l(b, length): what batches take of a model whose requests choose their lengths, a few of each.

use std::iter;

use proto::BatchCost;
use repository::{Model, cell};

use super::{Effort, Measured, cost, time_batch};
use crate::{
    drive::turns::Trials,
    error::ExecutorError,
    executor::{Execute, Executor},
};

/// Each is so many times the one before.
const STEP: usize = 4;
/// The longest, where a model takes it.
const LENGTH_MAX: usize = 1024;

/// What was measured of a model whose requests choose how long they are.
#[derive(Debug, Clone, PartialEq)]
pub struct ByLength {
    /// What a batch takes by its longest task, as it is offered to the scheduler.
    pub cost: BatchCost,
    /// Shortest first; lengths that the model fails with are left out.
    pub lengths: Vec<OfLength>,
}

/// Batches of tasks of one length.
#[derive(Debug, Clone, PartialEq)]
pub struct OfLength {
    /// The dimensions that requests choose.
    pub length: usize,
    /// What a task's inputs take up; the scheduler tells lengths by that.
    pub input_bytes: usize,
    /// By batch size, ascending.
    pub sizes: Vec<Measured>,
}

/// Measures a few lengths in a few batch sizes; nothing of a model whose requests choose none, or which cannot run the
/// smallest. `progress` is told how many of how many batches were measured.
pub(in crate::drive) fn measure(
    model: &Model,
    executor: &dyn Executor,
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize, usize),
) -> Option<ByLength> {
    let cost = cost(model, executor, trials)?;
    let mut measure = |execute: &mut Execute<'_>| measure_by(model, execute, (effort, &mut *trials), progress);
    let lengths = match executor.on_gpus() {
        Some(on_gpus) => {
            let gpu = on_gpus.gpus().next()?;
            on_gpus.try_records_on(gpu, |execute| Ok(measure(execute))).ok()?
        }
        None => measure(&mut |inputs, outputs| executor.execute(inputs, outputs)),
    };
    Some(ByLength { cost, lengths })
}

fn measure_by(
    model: &Model,
    execute: &mut Execute<'_>,
    (effort, trials): (Effort, &mut Trials<'_>),
    progress: &mut dyn FnMut(usize, usize),
) -> Vec<OfLength> {
    let samples = samples(model);
    let sizes = sizes(model.max_batch);
    let (all, mut done) = (samples.len() * sizes.len(), 0);
    let of_length = |(length, sample): (usize, Vec<u8>)| {
        let of_size = |&batch: &usize| {
            let tensors = (sample.repeat(batch), vec![0; batch * model.output_bytes()]);
            let measured = time_batch(execute, (effort, &mut *trials), tensors, batch);
            done += 1;
            progress(done, all);
            measured
        };
        let sizes: Result<_, ExecutorError> = sizes.iter().map(of_size).collect();
        Some(OfLength { length, input_bytes: sample.len(), sizes: sizes.ok()? })
    };
    samples.into_iter().filter_map(of_length).collect()
}

/// Tasks of 1, 4, 16 and so on, and of the longest that there may be; with their lengths.
fn samples(model: &Model) -> Vec<(usize, Vec<u8>)> {
    let lengths = iter::successors(Some(1), |length| Some(length * STEP)).take_while(|&length| length <= LENGTH_MAX);
    let samples = lengths.map(|length| cell::sample(&model.inputs, &model.outputs, length));
    let mut samples: Vec<(usize, Vec<u8>)> = samples.map(|sample| (length(model, &sample), sample)).collect();
    samples.dedup_by_key(|(length, _)| *length);
    samples
}

/// The longest dimension that is a request's choice.
fn length(model: &Model, sample: &[u8]) -> usize {
    let cells = cell::read(&model.inputs, sample).expect("samples are what the model takes");
    let chosen = model.inputs.iter().zip(&cells).flat_map(|(tensor, cell)| {
        let dims = tensor.variable.iter().flat_map(|variable| &variable.dims);
        dims.filter_map(|&dim| cell.as_ref().map(|cell| cell.shape[dim]))
    });
    chosen.max().unwrap_or_default()
}

/// 1, 2, 4 and so on, and the largest.
fn sizes(batch_max: usize) -> Vec<usize> {
    let powers = iter::successors(Some(1), |size| Some(2 * size)).take_while(|&size| size < batch_max);
    powers.chain([batch_max]).collect()
}

#[cfg(test)]
mod tests {
    use proto::{LatencyProfile, Span};
    use transport::Clock;

    use super::*;
    use crate::{drive::turns::Turns, error::TaskError};

    /// Fails with what is longer than this many bytes.
    struct Fails(usize);

    impl Executor for Fails {
        fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
            outputs.fill(0);
            match cell::record_bytes(inputs) {
                Some(bytes) if bytes <= self.0 => Ok(Vec::new()),
                found => Err(ExecutorError(format!("{found:?} bytes"))),
            }
        }

        fn emulated_profile(&self) -> Option<&LatencyProfile> {
            None
        }
    }

    fn model(dims: &str, max_dims: usize) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("m");
        let tensor = |name: &str| format!("{{ name: \"{name}\" data_type: TYPE_INT64 dims: [ {dims} ] }}");
        let parameters = [("alpha_ms", 1), ("beta_ms", 1), ("max_dims", max_dims)]
            .map(|(key, value)| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}"));
        let (input, output) = (tensor("x"), tensor("y"));
        let config =
            format!("backend: \"emulated\" max_batch_size: 4 input {input} output {output} {}", parameters.join(" "));
        std::fs::create_dir_all(folder.join("1")).unwrap();
        std::fs::write(folder.join("config.pbtxt"), config).unwrap();
        repository::load_model(&folder).unwrap()
    }

    fn lengths(model: &Model, fails_beyond: usize) -> Option<Vec<(usize, usize)>> {
        let effort = Effort { every_size: false, warm_up: 0, runs_max: 3, span: Span::ZERO };
        let (mut told, turns) = (Vec::new(), Turns::default());
        let effort = (effort, &mut Trials::new(&turns, Clock::start()));
        let found = measure(model, &Fails(fails_beyond), effort, &mut |done, of| told.push((done, of)))?;
        assert!(told.last().is_some_and(|&(done, of)| done <= of), "{told:?}");
        for OfLength { sizes, .. } in &found.lengths {
            let batches: Vec<usize> = sizes.iter().map(|size| size.batch).collect();
            assert_eq!(batches, [1, 2, 4]);
        }
        Some(found.lengths.iter().map(|of| (of.length, of.input_bytes)).collect())
    }

    #[test]
    fn each_length_that_the_model_takes_and_runs_is_measured_in_each_size() {
        // A record's head, a cell's length and dimension, and INT64s.
        let expected: Vec<_> = [1, 4, 16, 64, 200].map(|length| (length, 12 + 8 * length)).into();
        assert_eq!(lengths(&model("-1", 200), usize::MAX), Some(expected.clone()), "there is no longer one");
        assert_eq!(lengths(&model("-1", 1000), 1_000), Some(expected[..4].to_vec()));
        assert_eq!(lengths(&model("-1", 1000), 0), None, "not even the smallest runs");
        assert_eq!(lengths(&model("3", 1000), usize::MAX), None, "requests choose nothing");
    }

    #[test]
    fn sizes_double_up_to_the_largest() {
        assert_eq!((sizes(1), sizes(8), sizes(11)), (vec![1], vec![1, 2, 4, 8], vec![1, 2, 4, 8, 11]));
    }
}
