//! How gRPC spells a refusal.

use frontend::InferError;
use proto::scheduler_to_frontend::DropReason;
use tonic::{Code, Status};

use crate::{
    access::{Refusal, whole_millis},
    server::IntakeError,
};

/// What is no message (gRPC, "Status codes and their use").
pub(super) fn undecodable(error: impl ToString) -> Status {
    Status::internal(error.to_string())
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let code = match &refusal {
            Refusal::Unauthenticated { .. } | Refusal::NoTokens { .. } => Code::Unauthenticated,
            Refusal::Forbidden { .. } => Code::PermissionDenied,
            Refusal::CrossSite { .. } => Code::PermissionDenied,
            Refusal::Host { .. } | Refusal::Repeated { .. } => Code::InvalidArgument,
            Refusal::Draining => Code::Unavailable,
            Refusal::Rate { .. }
            | Refusal::Busy { .. }
            | Refusal::ClientBusy { .. }
            | Refusal::Probes { .. }
            | Refusal::Untaken { .. }
            | Refusal::Connections
            | Refusal::Overloaded { .. }
            | Refusal::Head { .. } => Code::ResourceExhausted,
        };
        let mut status = Self::new(code, refusal.to_string());
        if let Some(span) = refusal.retry_after() {
            // gRPC proposal A6, "pushback": milliseconds until the client may try again.
            status.metadata_mut().insert("grpc-retry-pushback-ms", whole_millis(span).into());
        }
        status
    }
}

impl From<IntakeError> for Status {
    fn from(error: IntakeError) -> Self {
        let code = match &error {
            IntakeError::TooLarge { .. } | IntakeError::NoRoom(_) | IntakeError::Busy(_) => Code::ResourceExhausted,
            IntakeError::TooManyChunks => Code::InvalidArgument,
            IntakeError::Late(_) => Code::DeadlineExceeded,
            IntakeError::Malformed(_) => Code::Internal,
            IntakeError::Broken(_) => Code::Cancelled,
        };
        Self::new(code, error.to_string())
    }
}

pub(super) fn status_of(error: InferError) -> Status {
    let code = match error.cause() {
        InferError::Invalid(_) => Code::InvalidArgument,
        InferError::NotFound(_) => Code::NotFound,
        InferError::Failed(_)
        | InferError::BadAnswer(_)
        | InferError::NotWritten { .. }
        | InferError::ChangeFailed(_)
        | InferError::InEnsemble { .. } => Code::Internal,
        InferError::NeverMet { .. }
        | InferError::Dropped(
            DropReason::Deadline | DropReason::ColdStart | DropReason::BackendLost | DropReason::InputLate,
        )
        | InferError::WindowMissed
        | InferError::NoAnswer { .. } => Code::DeadlineExceeded,
        InferError::ArenaFull { .. }
        | InferError::ArenaShare { .. }
        | InferError::DecodersFull { .. }
        | InferError::MemoryFull(_)
        | InferError::ChangesFull => Code::ResourceExhausted,
        InferError::Dropped(DropReason::Cancelled) => Code::Cancelled,
        // As Triton has it for a queue that is full.
        InferError::Dropped(DropReason::QueueFull | DropReason::NoBackend | DropReason::Unloaded)
        | InferError::NoScheduler
        | InferError::NoBackend { .. }
        | InferError::NotLoaded { .. }
        | InferError::Unloaded { .. }
        | InferError::LoadedAnew { .. }
        | InferError::SchedulerLost
        | InferError::ShuttingDown => Code::Unavailable,
    };
    // gRPC's own words for it, which clients look for as they would find them if they had given up themselves.
    let text = if code == Code::DeadlineExceeded { format!("Deadline Exceeded: {error}") } else { error.to_string() };
    Status::new(code, text)
}
