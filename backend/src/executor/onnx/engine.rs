//! What runs a batch of whole tensors: the engine that is embedded, or ONNX Runtime.

use super::{
    source::Source,
    tensor::{Elements, Tensor},
    turns::Turn,
};
use crate::error::ExecutorError;

/// What computes a graph, with its weights.
pub(super) trait Engine: Send + Sync {
    /// Runs the graph once. `inputs` are in the order of the binding. `take` gets the outputs, in the configuration's
    /// order, and is called once at most.
    fn run(
        &self,
        turn: &Turn,
        inputs: &[Tensor],
        take: &mut dyn FnMut(&[Output<'_>]) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError>;

    /// See `Executor::release`.
    fn release(&self);

    /// See `Executor::read`.
    fn read(&self, source: &Source) -> Result<(), ExecutorError>;
}

/// An output of a graph that has run.
pub(in crate::executor) struct Output<'a> {
    pub(in crate::executor) shape: Vec<usize>,
    pub(in crate::executor) elements: Elements<'a>,
}

impl<'a> Output<'a> {
    pub(in crate::executor) fn of(result: &'a Tensor) -> Self {
        Self { shape: result.shape.clone(), elements: result.elements() }
    }

    pub(super) fn numbers(&self) -> Result<&'a [u8], ExecutorError> {
        match self.elements {
            Elements::Numbers(bytes) => Ok(bytes),
            Elements::Strings(_) => Err(ExecutorError("it has strings, expected numbers".to_owned())),
        }
    }

    pub(super) fn strings(&self) -> Result<&'a [String], ExecutorError> {
        match self.elements {
            Elements::Strings(strings) => Ok(strings),
            Elements::Numbers(_) => Err(ExecutorError("it has numbers, expected strings".to_owned())),
        }
    }
}
