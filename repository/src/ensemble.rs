//! Ensembles: graphs of models whose tensors go from one to the next (Triton's `ensemble_scheduling`).
//!
//! A step may ask another ensemble. Its steps take its place when the repository is read (`nested.rs`), so that whoever
//! runs a graph finds models alone in it.
//!
//! Their entry is a [`Model`](crate::Model) that no backend runs. What its own configuration can say wrong is found
//! when that is read (`config/ensemble.rs`); whether it fits its members, [`Ensemble::check`] says, whenever these may
//! be others (`members.rs`).

use std::sync::Arc;

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
    /// What it was before the steps of the ensembles that it asks took their places; `None` if it asks none.
    pub nested: Option<Arc<Nested>>,
}

/// A graph some of whose steps ask ensembles.
#[derive(Debug, Clone, PartialEq)]
pub struct Nested {
    /// As its own configuration says it.
    pub written: Ensemble,
    /// The ensembles that it asks, and those that these ask, by name and version: one for each time.
    pub inner: Vec<(String, Option<String>)>,
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
    /// As its own configuration says it.
    #[must_use]
    pub fn written(&self) -> &Self {
        self.nested.as_ref().map_or(self, |nested| &nested.written)
    }

    /// All that it asks, by name and version: models, and the ensembles whose steps are among its own.
    pub fn asked(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        let steps = self.steps.iter().map(|step| (&step.model, &step.version));
        let inner = self.nested.iter().flat_map(|nested| &nested.inner).map(|(name, version)| (name, version));
        steps.chain(inner).map(|(name, version)| (name.as_str(), version.as_deref()))
    }

    /// The step that makes a tensor, and the output of its model that it is; none of what requests bring.
    #[must_use]
    pub fn maker(&self, tensor: usize) -> Option<(usize, &str)> {
        self.steps.iter().enumerate().find_map(|(at, step)| {
            let (output, _) = step.outputs.iter().find(|(_, to)| *to == tensor)?;
            Some((at, output.as_str()))
        })
    }
}
