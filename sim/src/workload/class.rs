//! What a model's clients ask for.

use proto::Span;

/// Requests of a model that have one SLO.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Class {
    /// From a request's arrival to its answer; `ENDLESS` if it has no objective.
    pub slo: Span,
    /// Its part of the model's rate; all parts make 1.
    pub share: f64,
}

impl Class {
    /// Whether its requests have a latency objective.
    #[must_use]
    pub fn has_objective(&self) -> bool {
        self.slo != Span::ENDLESS
    }
}
