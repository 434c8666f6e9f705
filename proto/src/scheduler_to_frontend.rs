//! Scheduler -> frontend: what can be served, and the end of tasks that no backend will answer.

use thiserror::Error;
use wincode::{SchemaRead, SchemaWrite};

use crate::{
    clock::ClockReply,
    ids::{BackendId, FrontendId, ModelId, TaskId},
    time::Span,
};

/// Why a task ended without having run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Error, SchemaRead, SchemaWrite)]
pub enum DropReason {
    /// No batch could have finished it by its deadline any more.
    #[error("its deadline could no longer be met")]
    Deadline,
    /// The model's queue was full when the task arrived.
    #[error("the model's queue is full")]
    QueueFull,
    /// No GPU hosts the model now.
    #[error("no backend hosts the model now")]
    NoBackend,
    /// The frontend cancelled it.
    #[error("it was cancelled")]
    Cancelled,
    /// Its backend failed, and no time was left to run it again.
    #[error("its backend failed and its deadline left no time to run it again")]
    BackendLost,
}

/// A message to a frontend.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum SchedulerToFrontend {
    /// The task ended without an answer; its slot may be reused.
    Dropped {
        /// The task.
        task: TaskId,
        /// Why.
        reason: DropReason,
    },
    /// The scheduler's clock.
    Clock(ClockReply),
    /// Move the queue pair of `backend` to ERROR, then say which of `tasks` have no answer.
    Fence {
        /// The suspected backend.
        backend: BackendId,
        /// Tasks of this frontend that were planned there; at most [`FENCED_TASKS_MAX`] a message.
        tasks: Vec<TaskId>,
    },
    /// A model, or a change in how many GPUs serve it.
    Model {
        /// Assigned by the scheduler.
        model: ModelId,
        /// As in the repository.
        name: String,
        /// As in the repository.
        version: String,
        /// GPUs that host the model and whose backend is connected to this frontend.
        gpus: u32,
        /// The least time from submission to answer: l(1) and the network budget. A shorter SLO can never be met.
        least_latency: Span,
    },
}

/// Tasks that one [`SchedulerToFrontend::Fence`] asks about.
pub const FENCED_TASKS_MAX: usize = 1024;

/// What the scheduler answers when a frontend connects.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct FrontendWelcome {
    /// The frontend's name from now on.
    pub frontend: FrontendId,
}
