//! How far the scheduler was off with what it ordered (Clockwork, section 6.5).

use wincode::{SchemaRead, SchemaWrite};

use crate::time::Span;

/// The quantiles that are told of errors.
pub const QUANTILES: [f64; 4] = [0.5, 0.99, 0.999, 0.9999];

/// Errors of one sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ErrorTail {
    /// How many there were.
    pub count: u64,
    /// By [`QUANTILES`]: how large they were; zero if there was none.
    pub quantiles: [Span; QUANTILES.len()],
}

/// Errors of one quantity. What was right to the microsecond is in neither of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ErrorTails {
    /// It was predicted too long, or too late.
    pub over: ErrorTail,
    /// It was predicted too short, or too early.
    pub under: ErrorTail,
}

/// Errors of one kind of action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ActionErrors {
    /// Actions that ran.
    pub actions: u64,
    /// How long they took.
    pub duration: ErrorTails,
    /// When they ended.
    pub completion: ErrorTails,
}

/// Errors of all that a scheduler ordered in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct PredictionErrors {
    /// Executions of batches.
    pub infer: ActionErrors,
    /// Copies of weights into GPUs' memory.
    pub load: ActionErrors,
}
