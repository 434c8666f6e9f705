//! A model's own warm-up (`model_warmup`): its samples run before anybody is told that it is ready. Profiling runs it
//! too, but with zeros, and not as the configuration asks for.
#![allow(clippy::disallowed_methods)] // Drivers own the system's randomness.

use std::path::Path;

use proto::Span;
use repository::{
    Model,
    cell::{self, Cell},
};

use super::turns::Trials;
use crate::{
    error::{BackendError, ExecutorError},
    executor::Executor,
};

/// Runs all samples of a model. An emulated one has nothing to warm.
pub(super) fn run(
    model: &Model,
    folder: &Path,
    executor: &dyn Executor,
    trials: &mut Trials<'_>,
) -> Result<(), BackendError> {
    if executor.emulated_profile().is_some() {
        return Ok(());
    }
    for sample in model.configuration.warmup(model, folder)? {
        let mut tensors = Vec::with_capacity(model.inputs.len());
        for (tensor, input) in model.inputs.iter().zip(&sample.inputs) {
            tensors.push((input, input.row_bytes(tensor), input.bytes(tensor, sample.rows, rand::random)?));
        }
        let failed = |cause: &dyn std::fmt::Display| {
            ExecutorError(format!("model {}: model_warmup \"{}\": {cause}", model.name, sample.name))
        };
        // Tasks lie one after another, each with all its inputs.
        let mut inputs = Vec::new();
        for row in 0..sample.rows {
            let cells = tensors.iter().map(|(input, bytes, data)| {
                Some(Cell { shape: input.shape.clone(), data: &data[row * bytes..][..*bytes] })
            });
            let mut task = vec![0; model.input_bytes()];
            let length = cell::write(&model.inputs, &cells.collect::<Vec<_>>(), &mut task);
            inputs.extend_from_slice(&task[..length.map_err(|error| failed(&error))?]);
        }
        let mut outputs = vec![0; model.output_bytes() * sample.rows];
        let (mut last, mut ran) = (None, Span::ZERO);
        for _ in 0..sample.runs {
            let run = || match executor.execute(&inputs, &mut outputs).map_err(|error| failed(&error))?.first() {
                Some(task) => Err(failed(&task.reason)),
                None => Ok(()),
            };
            let took = trials.run(last, run)?;
            (last, ran) = (Some(took), ran + took);
        }
        let (name, version) = (&model.name, &model.version);
        tracing::info!(model = name, version, sample = sample.name, runs = sample.runs, took = %ran, "warmed up");
    }
    Ok(())
}
