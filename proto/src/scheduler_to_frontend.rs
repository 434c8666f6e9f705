//! Scheduler -> frontend: what can be served, and the end of tasks that no backend will answer.

use thiserror::Error;
use wincode::{SchemaRead, SchemaWrite};

use crate::{
    brought::Brought,
    clock::ClockReply,
    epoch::{Claim, Epoch},
    hello::ModelThreads,
    ids::{BackendId, ChangeId, FrontendId, LinkId, ModelId, ModelThreadId, TaskId},
    predictions::PredictionErrors,
    request_times::RequestTimes,
    time::Span,
    weights::WeightsTally,
};

/// Why a task ended without having run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Error, SchemaRead, SchemaWrite)]
pub enum DropReason {
    /// No batch could have finished it by its deadline any more.
    #[error("Request timeout expired: its deadline could no longer be met")]
    Deadline,
    /// The model's queue was full when the task arrived.
    #[error("Exceeds maximum queue size: the model's queue is full")]
    QueueFull,
    /// No GPU hosts the model now.
    #[error("no backend hosts the model now")]
    NoBackend,
    /// The frontend cancelled it.
    #[error("it was cancelled")]
    Cancelled,
    /// A client unloaded the model while the task waited.
    #[error("the model was unloaded")]
    Unloaded,
    /// Its backend failed, and no time was left to run it again.
    #[error("its backend failed and its deadline left no time to run it again")]
    BackendLost,
    /// Its model was in no GPU's memory, and could not be loaded before its deadline.
    #[error("its model could not be loaded into a GPU's memory in time")]
    ColdStart,
    /// Its input was not in its slot when its batch was fetched. Whoever submitted it may do so again, once.
    #[error("its input was not decoded in time")]
    InputLate,
}

/// What clients have made of a model by loading and unloading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum ModelState {
    /// It is served wherever a backend hosts it.
    Serving,
    /// Backends load it; what they hosted before is served meanwhile.
    Loading,
    /// It is not served any more; backends still finish the batches that they were given.
    Unloading,
    /// It is not served.
    Unloaded,
}

/// How much a scheduler has to do, and for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct SchedulerLoad {
    /// Tasks of all frontends that wait for their batch.
    pub queued: u32,
    /// Batches that backends were given and have not answered for.
    pub batches: u32,
    /// GPUs of the backends that are here.
    pub gpus: u32,
    /// Frontends and backends that are here.
    pub members: u32,
    /// Of these, those that obey it.
    pub obeying: u32,
    /// From its claim until all members that were here obeyed it; zero if they do not yet.
    pub settled: Span,
    /// Tasks that came while no GPU had their model's weights in its memory; of the scheduler's life.
    pub cold: u64,
    /// What has become of weights at all backends.
    pub weights: WeightsTally,
    /// How far actions of its life were off what it had planned.
    pub predictions: PredictionErrors,
}

/// What the scheduler reckons with for the network's part of a task's way (Symphony, section 5.6): a high percentile of
/// what it has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct NetworkTimes {
    /// From a grant to its plan's arrival at a backend.
    pub ctrl: Span,
    /// To READ one task's input.
    pub data: Span,
    /// From the end of execution to the answer's arrival.
    pub resp: Span,
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
    /// A backend says that it has answered these tasks. Told a few times a second, so that answers which never came are
    /// missed.
    Answered {
        /// Who says so.
        backend: BackendId,
        /// Tasks of this frontend; at most [`ANSWERED_TASKS_MAX`] a message.
        tasks: Vec<TaskId>,
    },
    /// The scheduler's clock.
    Clock(ClockReply),
    /// How much the scheduler has to do. Follows each `Clock`.
    Load(Box<SchedulerLoad>),
    /// What requests of a model take, as has been learned. Told when it plans with that, and to who joins.
    RequestTimes {
        /// The model.
        model: ModelId,
        /// What they take.
        times: Box<RequestTimes>,
    },
    /// The scheduler is about to end: it finishes what it has, and is not to be given more.
    Leaving,
    /// The sender is the primary now. If its epoch is the highest so far it is obeyed: the former primary's connections
    /// are ended first, then `Obeys` follows.
    Takeover {
        /// Its epoch.
        epoch: Epoch,
    },
    /// A standby misses the primary: does the reader, too? Answered by `Misses`.
    AskPrimary,
    /// Move the queue pairs of these links to ERROR and never accept one of them again, then say which of `tasks` have
    /// no answer. Fences of one connection are confirmed in their order.
    Fence {
        /// The suspected backend; [`BackendId::NOBODY`] if only the tasks are asked about.
        backend: BackendId,
        /// Its links up to this one; newer ones are not to blame.
        link: LinkId,
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
        /// How much the model gains by time for larger batches ([`crate::LatencyProfile::batching`]).
        batching: Span,
        /// The network's part of that.
        network: NetworkTimes,
        /// Which ModelThread owns it: its tasks are submitted there.
        model_thread: ModelThreadId,
    },
    /// A model's state changed, whatever its version.
    ModelState {
        /// As in the repository.
        name: String,
        /// Its state now.
        state: ModelState,
        /// How often it has been loaded so far. When that grows its configuration is to be read anew.
        loads: u32,
        /// What it was loaded with, if not what the repository has.
        brought: Option<Brought>,
    },
    /// Whether a model, or a version of it, could not be loaded when that was tried last.
    NotLoaded {
        /// As in the repository.
        name: String,
        /// As in the repository; empty if it is about all of them.
        version: String,
        /// Why, in at most [`REASON_BYTES_MAX`]; nothing if that is over.
        reason: Option<String>,
    },
    /// The answer to `ChangeModel`, after everything that the change made known.
    ModelChanged {
        /// As in the question.
        change: ChangeId,
        /// Why nothing was changed, if so; at most [`REASON_BYTES_MAX`].
        refused: Option<String>,
    },
    /// So much of what there is to tell of models was a page ([`Pages`](crate::pages::Pages)). Answered by `PageRead`.
    PageEnd,
    /// From the primary: an operator wants the reader drained, or resumed.
    Drain {
        /// Drained, or resumed.
        is_drained: bool,
    },
}

/// Bytes of a reason that is told in words.
pub const REASON_BYTES_MAX: usize = 1024;

/// Tasks that one [`SchedulerToFrontend::Fence`] asks about.
pub const FENCED_TASKS_MAX: usize = 1024;

/// Tasks that one [`SchedulerToFrontend::Answered`] names.
pub const ANSWERED_TASKS_MAX: usize = 1024;

/// What the scheduler answers when a frontend connects.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct FrontendWelcome {
    /// The frontend's name from now on.
    pub frontend: FrontendId,
    /// Where tasks go.
    pub model_threads: ModelThreads,
    /// Whether the scheduler is the primary, and of which epoch.
    pub claim: Claim,
}
