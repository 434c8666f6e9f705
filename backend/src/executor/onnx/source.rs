//! A model's file and its configuration: what an engine loads.

use std::path::{Path, PathBuf};

use repository::{Batching, Model, Stamp, cell};

use super::{
    binding::{self, Binding, Difference, Fact, Port},
    tensor::Length,
};
use crate::error::ExecutorError;

/// Bytes of a reason, which an engine makes as long as it likes.
pub(super) const REASON_BYTES_MAX: usize = 400;

/// Where a model is read from, and what its files were like.
pub(in crate::executor) struct Source {
    pub(in crate::executor) model: Model,
    pub(in crate::executor) batching: Batching,
    pub(in crate::executor) file: PathBuf,
    stamp: Stamp,
}

impl Source {
    pub(in crate::executor) fn of(model: &Model, file: &Path, batching: &Batching) -> Result<Self, ExecutorError> {
        let (model, file, batching) = (model.clone(), file.to_owned(), batching.clone());
        // Weights may lie in files beside it.
        let folder = file.parent().unwrap_or(Path::new("."));
        let refused = |error| ExecutorError(format!("model {}: {}: {error}", model.name, file.display()));
        let stamp = Stamp::of(folder).map_err(refused)?;
        Ok(Self { model, batching, file, stamp })
    }

    pub(in crate::executor) fn is_batched(&self) -> bool {
        self.model.is_batched
    }

    /// What the file says of its inputs and outputs, brought together with the configuration.
    pub(super) fn bind(&self, inputs: &[Port], outputs: &[Port]) -> Result<Binding, ExecutorError> {
        let Self { model, batching, .. } = self;
        let (mut binding, facts) = binding::bind(inputs, model, batching)?;
        let port_of = |name: &str| inputs.iter().find(|port| port.name == name);
        for (index, (tensor, fact)) in model.inputs.iter().zip(&facts).enumerate() {
            let port = port_of(&tensor.name).filter(|_| !batching.ragged[index]);
            if let Some(Difference { text, .. }) =
                port.and_then(|port| Difference::of(port, tensor, fact, model.is_batched))
            {
                return Err(ExecutorError(text));
            }
        }
        for (name, fact) in binding::input_names(model, batching).into_iter().zip(&facts) {
            port_of(name).map_or(Ok(()), |port| check_input(port, fact))?;
        }
        let names: Vec<String> = outputs.iter().map(|port| port.name.clone()).collect();
        let places = binding::output_places(&names, model)?;
        let outputs: Vec<Port> = places.into_iter().map(|place| outputs[place].clone()).collect();
        binding.bind_parts(&outputs, model, batching)?;
        Ok(binding)
    }

    /// Whether sizes of tensors differ between requests, or a run takes more than these.
    pub(in crate::executor) fn is_in_groups(&self) -> bool {
        let Self { model, batching, .. } = self;
        cell::is_record(&model.inputs) || cell::is_record(&model.outputs) || !batching.is_plain()
    }

    pub(in crate::executor) fn check_stamp(&self) -> Result<(), ExecutorError> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        self.stamp.check(folder).map_err(|error| ExecutorError(error.to_string()))
    }

    pub(in crate::executor) fn refused(&self, cause: &dyn std::fmt::Display) -> ExecutorError {
        ExecutorError(format!("model {}: {}: {cause}", self.model.name, self.file.display()))
    }
}

/// That a file takes what it will be given.
fn check_input(port: &Port, (datatype, shape): &Fact) -> Result<(), ExecutorError> {
    let fits = |(found, given): (&Option<Length>, &Length)| match found {
        Some(Length::Fixed(found)) => Length::Fixed(*found) == *given,
        Some(Length::Named(_)) | None => true,
    };
    let has_shape = |found: &Vec<Option<Length>>| found.len() == shape.len() && found.iter().zip(shape).all(fits);
    if port.datatype == Some(*datatype) && port.shape.as_ref().is_none_or(has_shape) {
        return Ok(());
    }
    let given: String = shape.iter().map(|length| format!("{length},")).collect();
    Err(ExecutorError(format!(
        "input {} is {port} in the file, and config.pbtxt gives it {given}{datatype}",
        port.name
    )))
}

/// Engines' reasons have lines of their own.
pub(super) fn one_line(error: &dyn std::fmt::Display) -> String {
    let mut line = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > REASON_BYTES_MAX {
        line.truncate(line.floor_char_boundary(REASON_BYTES_MAX));
        line.push_str("..");
    }
    line
}
