//! Why a request was refused or ended without an answer. The text tells the client, or its operator, what to change.

use std::fmt::Display;

use proto::{Span, scheduler_to_frontend::DropReason};
use thiserror::Error;

/// The end of a request that has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InferError {
    /// The request itself is wrong: the text names the field, what was found and what was expected.
    #[error("{0}")]
    Invalid(String),
    /// No such model or version in the repository.
    #[error("{0}")]
    NotFound(String),
    /// The request's latency objective is shorter than the model can ever be.
    #[error(
        "parameters.timeout: found {slo}, expected at least {least}, the least latency of model '{model}' (one task \
         alone and the network); it can never be met"
    )]
    NeverMet {
        /// The model.
        model: String,
        /// What was asked for.
        slo: Span,
        /// l(1) and the network budget.
        least: Span,
    },
    /// The frontend is not connected to a scheduler, or has not yet learned its clock.
    #[error("the frontend has no scheduler now; it keeps trying to connect")]
    NoScheduler,
    /// No GPU that this frontend can use hosts the model now.
    #[error("no backend hosts model '{model}' now")]
    NoBackend {
        /// The model.
        model: String,
    },
    /// No backend could load the model.
    #[error("model '{model}' could not be loaded: {reason}")]
    NotLoaded {
        /// The model.
        model: String,
        /// As the repository index says it.
        reason: String,
    },
    /// Clients have unloaded the model (Triton's words).
    #[error("Request for unknown model: '{model}' has no available versions, as it was unloaded")]
    Unloaded {
        /// The model.
        model: String,
    },
    /// While the request came, the model was loaded anew, perhaps with other tensors.
    #[error("model '{model}' was loaded anew while the request came; send it again")]
    LoadedAnew {
        /// The model.
        model: String,
    },
    /// A model could not be loaded or unloaded.
    #[error("{0}")]
    ChangeFailed(String),
    /// Every place for clients that wait for models to be loaded or unloaded is taken.
    #[error("too many clients wait for models to be loaded or unloaded; try again")]
    ChangesFull,
    /// Every slot that the request could use is leased.
    #[error("all slots for model '{model}' are in use; send less at once or raise arena_bytes")]
    ArenaFull {
        /// The model.
        model: String,
    },
    /// This client's requests hold as many slots as it may.
    #[error(
        "this client's requests hold their share of the arena, so there are no slots for model '{model}'; send less at \
         once or raise arena_bytes"
    )]
    ArenaShare {
        /// The model.
        model: String,
    },
    /// Every place of this client for what is large, or a picture, and waits to be parsed or decoded is taken.
    #[error(
        "{waiting_max} requests of this client wait to be parsed or decoded already; send less at once, or tensors as \
         binary data"
    )]
    DecodersFull {
        /// How many may wait.
        waiting_max: usize,
    },
    /// What the request becomes when it is parsed and decoded finds no room.
    #[error("{0}")]
    MemoryFull(String),
    /// The scheduler dropped the task.
    #[error("dropped: {0}")]
    Dropped(#[from] DropReason),
    /// The backend could not start the batch in its window.
    #[error("dropped: the backend could not start its batch in time")]
    WindowMissed,
    /// The executor failed. It begins as Triton says it.
    #[error("Failed to process the request(s) for model in its backend: {0}")]
    Failed(String),
    /// The backend's answer does not fit the model.
    #[error("the backend's answer is malformed: {0}; do both serve the same model repository?")]
    BadAnswer(String),
    /// A backend says that it has answered, and has written nothing.
    #[error("backend {backend} says that it has answered, and no answer came; the request may have been executed")]
    NotWritten {
        /// Which one.
        backend: u32,
    },
    /// The connection to the scheduler broke while the task was outstanding.
    #[error("the connection to the scheduler was lost while the request was outstanding")]
    SchedulerLost,
    /// Long past its deadline there is neither an answer nor a drop.
    #[error("neither an answer nor a drop came within {waited} after the deadline")]
    NoAnswer {
        /// How long after the deadline it was given up.
        waited: Span,
    },
    /// The frontend is shutting down.
    #[error("the frontend is shutting down")]
    ShuttingDown,
    /// A step of an ensemble failed. It begins as Triton says it.
    #[error("in ensemble '{ensemble}', {cause} (in its step '{step}')")]
    InEnsemble {
        /// The ensemble.
        ensemble: String,
        /// The step's model.
        step: String,
        /// Why that failed.
        cause: Box<Self>,
    },
}

impl InferError {
    /// What happened, wherever: of an ensemble the reason of the step that failed.
    #[must_use]
    pub fn cause(&self) -> &Self {
        match self {
            Self::InEnsemble { cause, .. } => cause.cause(),
            other => other,
        }
    }
}

/// A request that is wrong: the field, what was found there and what was expected.
#[must_use]
pub fn invalid(field: &str, found: impl Display, expected: impl Display) -> InferError {
    InferError::Invalid(format!("{field}: found {found}, expected {expected}"))
}
