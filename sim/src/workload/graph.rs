//! A graph of models, as a workload has it.

use std::sync::Arc;

use proto::{ModelId, Span};
use repository::Ensemble;

use super::class::Class;

/// A graph of a workload.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Unique in the workload.
    pub name: String,
    /// What its clients ask for: one objective, from a request's arrival to its answer.
    pub class: [Class; 1],
    /// Its part of the aggregate rate; all parts make 1.
    pub share: f64,
    /// Each after all whose answers it waits for; or variants of one task, if the ensemble has a selection.
    pub steps: Vec<GraphStep>,
    /// The same as frontends know it: each step makes one tensor, variants all the same.
    pub ensemble: Arc<Ensemble>,
}

/// A model that a graph asks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GraphStep {
    /// The model.
    pub model: ModelId,
    /// The part of the requests that take the step; for others it is over when it begins. Nobody knows before.
    pub chance: f64,
    /// How long after the request's arrival it should have answered; by the rule of [`ensembles::run`] if nothing is
    /// given.
    pub by: Option<Span>,
}

/// The step of a request under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepOf {
    /// Numbers the request.
    pub run: u64,
    /// Its index in the graph.
    pub step: usize,
}
