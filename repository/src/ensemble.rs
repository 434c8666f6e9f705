//! Ensembles: graphs of models whose tensors go from one to the next (Triton's `ensemble_scheduling`).
//!
//! Their entry is a [`Model`](crate::Model) that no backend runs. What its own configuration can say wrong is found
//! when that is read (`config/ensemble.rs`); whether it fits its members, [`Ensemble::check`] says, whenever these may
//! be others (`members.rs`).

use crate::selection::Selection;

/// Steps of an ensemble, at most: each may hold slots of its own while a request is under way.
pub const STEPS_MAX: usize = 32;

/// A graph of models.
#[derive(Debug, Clone, PartialEq)]
pub struct Ensemble {
    /// Each after all whose tensors it takes; at least one, at most [`STEPS_MAX`].
    pub steps: Vec<EnsembleStep>,
    /// Names of the tensors that go between steps; those of the ensemble's inputs come first, in their order.
    pub tensors: Vec<String>,
    /// Which of the tensors each output of the ensemble is; some step makes it.
    pub outputs: Vec<usize>,
    /// How one answer is made of its steps', if they are models of one task: each takes inputs of the ensemble alone,
    /// and makes all of its outputs. `None` if the steps are a graph.
    pub selection: Option<Selection>,
}

/// A model that an ensemble asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnsembleStep {
    /// Its name.
    pub model: String,
    /// Its version; the newest that is served if none is named.
    pub version: Option<String>,
    /// The model's inputs by name, and which of the ensemble's tensors each is given.
    pub inputs: Vec<(String, usize)>,
    /// The model's outputs by name, and which of the ensemble's tensors each becomes.
    pub outputs: Vec<(String, usize)>,
}

impl Ensemble {
    /// The step that makes a tensor, and the output of its model that it is; none of what requests bring.
    #[must_use]
    pub fn maker(&self, tensor: usize) -> Option<(usize, &str)> {
        self.steps.iter().enumerate().find_map(|(at, step)| {
            let (output, _) = step.outputs.iter().find(|(_, to)| *to == tensor)?;
            Some((at, output.as_str()))
        })
    }
}
