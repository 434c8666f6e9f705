//! Backend -> scheduler: what it offers, and how its plans went.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    epoch::{Epoch, Standing},
    frame::{Addressed, FRAME_BYTES_MAX},
    frontend_to_scheduler::NAME_BYTES_MAX,
    ids::{BackendId, FrontendId, GpuId, LinkId, LoadId, ModelId, PlanId, TaskId},
    profile::{BatchCost, LatencyProfile},
    time::{Span, Timestamp},
    weights::{Weights, WeightsTally},
};

/// A model that a backend has loaded on some of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct ModelOffer {
    /// As in the repository.
    pub name: String,
    /// As in the repository.
    pub version: String,
    /// l(b), as far as it was measured when the model was loaded; `Measured` may tell more.
    pub profile: LatencyProfile,
    /// Bytes of one task's input, which the backend will READ.
    pub input_bytes: u32,
    /// Indexes of the GPUs that host it; each below the hello's `gpus`.
    pub gpu_indexes: Vec<u32>,
    /// What it takes in the memory of these, if that is short.
    pub weights: Weights,
    /// If what a batch takes depends on its tasks.
    pub cost: Option<BatchCost>,
    /// Requests that may wait, by their priority; 0, or none for it: as many as the scheduler lets. At most
    /// [`PRIORITIES`].
    pub queue_max: Vec<u32>,
    /// The backend's own `placement` does not ask for it: a scheduler did, as nobody else would have hosted it.
    pub is_guest: bool,
}

impl ModelOffer {
    /// Its encoded bytes at most: two names, l(b) for each b, GPUs, bounds of queues, and the rest.
    pub const BYTES_MAX: usize =
        2 * NAME_BYTES_MAX + 8 * LatencyProfile::MAX_BATCH + 4 * GPUS_PER_BACKEND_MAX as usize + 4 * PRIORITIES + 128;
}

/// GPUs of one backend.
pub const GPUS_PER_BACKEND_MAX: u32 = 64;

/// Priorities that there can be.
pub const PRIORITIES: usize = u8::MAX as usize + 1;

/// Bytes of the models in a hello, but for the last of them; a first page, which is all that most backends have.
pub const OFFERED_BYTES_MAX: usize = 128 * 1024;
/// Bytes of the models in one [`BackendToControl::Offers`], but for the last of them. One more fits the frame.
pub const OFFERS_BYTES_MAX: usize = 8 * 1024;
/// [`BackendToControl::Offers`] that a scheduler is sent before it has answered the first of them.
pub const OFFERS_UNANSWERED_MAX: usize = 8;
const _: () = assert!(OFFERS_BYTES_MAX + ModelOffer::BYTES_MAX + 16 <= FRAME_BYTES_MAX);

/// What a backend says about itself when it connects to the scheduler.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct BackendHello {
    /// How operators call it; as [`member_name`](crate::member_name) has it.
    pub name: String,
    /// GPUs it offers.
    pub gpus: u32,
    /// Pages for weights in the memory of each; `None` if all weights are there all the time.
    pub memory_pages: Option<u32>,
    /// Models it has loaded, as many as make up to [`OFFERED_BYTES_MAX`].
    pub models: Vec<ModelOffer>,
    /// How many more there are, which `Offers` name.
    pub more: u32,
    /// The id that another scheduler has given it in this life.
    pub known_as: Option<BackendId>,
    /// Whom it obeys.
    pub standing: Standing,
    /// What it hosts is the scheduler's to choose (`placement = "auto"`).
    pub is_auto: bool,
}

impl BackendHello {
    /// Of one that no scheduler knows yet.
    #[must_use]
    pub fn new(gpus: u32, models: Vec<ModelOffer>) -> Self {
        let (name, standing) = ("backend".to_owned(), Standing::default());
        Self { name, gpus, memory_pages: None, models, more: 0, known_as: None, standing, is_auto: false }
    }
}

/// How a plan ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum PlanOutcome {
    /// It ran. Both stamps are on the scheduler's clock.
    Executed {
        /// Execution started.
        started_at: Timestamp,
        /// Execution ended and the GPU was free.
        finished_at: Timestamp,
    },
    /// It could not start by `latest`; its frontends have been told (`AnswerStatus::WindowMissed`).
    WindowMissed {
        /// When it was given up.
        rejected_at: Timestamp,
    },
    /// Its executor does not come back: the GPU is not free, and none of the tasks that it was given is answered from
    /// there any more.
    Abandoned {
        /// When it was given up.
        abandoned_at: Timestamp,
    },
}

/// A task that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, SchemaRead, SchemaWrite)]
pub struct Undelivered {
    /// The task.
    pub task: TaskId,
    /// The link that its READ and WRITE were meant for; [`LinkId::NONE`] if there was none when its plan came.
    pub link: LinkId,
}

/// How weights fared on their way into a GPU's memory. Stamps are on the scheduler's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum WeightsOutcome {
    /// They are there.
    Loaded {
        /// The copy began.
        started_at: Timestamp,
        /// It ended.
        finished_at: Timestamp,
        /// How much of that they were read from disk for, which comes first.
        read: Span,
    },
    /// The copy could not start by `latest`, or there was no room, or it failed: nothing of them is there.
    Failed {
        /// When that was clear.
        failed_at: Timestamp,
    },
}

/// A model whose weights are in a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct ResidentModel {
    /// The model.
    pub model: ModelId,
    /// Its backend keeps it there, whatever it is told to unload.
    pub is_pinned: bool,
}

/// How a load ended.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum LoadOutcome {
    /// One of its versions waits for `Host` or `Discard`. All are told, or none.
    Ready {
        /// The version.
        offer: ModelOffer,
        /// Whether no other one follows; at most [`VERSIONS_MAX`] are told.
        is_last: bool,
    },
    /// This backend's configuration places the model on none of its GPUs.
    NotPlaced,
    /// It cannot be run here, and what is hosted stays hosted; the reason has at most
    /// [`REASON_BYTES_MAX`](crate::scheduler_to_frontend::REASON_BYTES_MAX).
    Failed(String),
    /// It is an ensemble, which no backend runs: frontends ask its members. What this backend hosts stays hosted.
    Ensemble,
}

/// Versions of one model that are served at once.
pub const VERSIONS_MAX: usize = 64;

/// Models that one [`BackendToControl::Resident`] or [`BackendToControl::InHostMemory`] names.
pub const RESIDENT_MAX: usize = 1024;

/// A message to the scheduler's control.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum BackendToControl {
    /// The queue pair to this frontend is up: its tasks can be planned here. Told to every scheduler.
    Linked {
        /// The frontend.
        frontend: FrontendId,
        /// Which of our links it is.
        link: LinkId,
    },
    /// The queue pair to this frontend broke; the backend tries to connect again.
    Unlinked {
        /// The frontend.
        frontend: FrontendId,
    },
    /// A GPU cannot be used any more, or can be used again.
    Usable {
        /// Its index.
        gpu_index: u32,
        /// Whether plans are welcome there.
        is_usable: bool,
    },
    /// The backend is about to leave: it finishes its plans, and wants no more of them once others host its models.
    /// Each ModelThread answers `Dismissed` then.
    Leaving {
        /// It does not stay longer, whatever it has.
        within: Span,
    },
    /// A load ended.
    Loaded {
        /// As in the question.
        load: LoadId,
        /// How.
        outcome: LoadOutcome,
    },
    /// A model, or a version of it, that could not be loaded when the backend started; told to every scheduler that has
    /// taken it in.
    NotLoaded {
        /// As in the repository.
        name: String,
        /// As in the repository; empty if it is about all of them.
        version: String,
        /// Why, in at most [`REASON_BYTES_MAX`](crate::scheduler_to_frontend::REASON_BYTES_MAX).
        reason: String,
    },
    /// More models that it has loaded, after those of its hello. Answered by `Offered`; at most
    /// [`OFFERS_UNANSWERED_MAX`] are not.
    Offers {
        /// The models; up to [`OFFERS_BYTES_MAX`].
        models: Vec<ModelOffer>,
    },
    /// Nothing of the model is left.
    Unloaded {
        /// The model.
        model: ModelId,
    },
    /// A part of the answer to `AskResident`.
    Resident {
        /// As in the question.
        gpu: GpuId,
        /// Models whose weights are in its memory; at most [`RESIDENT_MAX`].
        models: Vec<ResidentModel>,
        /// Whether nothing follows.
        is_last: bool,
    },
    /// Weights have come into host memory, or are on disk only from now on. As long as nothing is said of a model, they
    /// are in host memory. Told to the primary only.
    InHostMemory {
        /// The models; at most [`RESIDENT_MAX`].
        models: Vec<ModelId>,
        /// Whether they are there.
        is_there: bool,
    },
    /// A batch was rejected because its weights were not there: the scheduler takes something for resident that is not.
    WeightsMissing {
        /// As the scheduler calls it.
        gpu: GpuId,
    },
    /// What has become of weights; told while that changes, and not more often than every
    /// [`TALLY_INTERVAL`](crate::weights::TALLY_INTERVAL).
    Weights(WeightsTally),
    /// A plan of an earlier primary that has not ended. What becomes of it is reported under this name (`Inherited`).
    /// Of its tasks those are named whose end has yet to be reported.
    Unfinished {
        /// Its name from now on, of [`ModelThreadId::INHERITED`](crate::ModelThreadId::INHERITED).
        plan: PlanId,
        /// The GPU.
        gpu_index: u32,
        /// The model, as the reader calls it.
        model: ModelId,
        /// When the GPU should be done with it; `None` if it is.
        frees_at: Option<Timestamp>,
        /// Those tasks and their attempts; at most [`LatencyProfile::MAX_BATCH`].
        tasks: Vec<(TaskId, u16)>,
    },
    /// What becomes of an `Unfinished` plan, where ModelThreads have connections of their own: control knows which of
    /// them owns the plan's model, and passes it on.
    Inherited(BackendToModelThread),
    /// The sender obeys this primary from now on, and no lower one any more. Follows all `Unfinished`.
    Obeys {
        /// Whose word counts.
        epoch: Epoch,
    },
    /// The answer to `AskPrimary`.
    Misses {
        /// Whether the primary is not heard.
        misses: bool,
    },
    /// Asks for the scheduler's clock.
    ClockRequest {
        /// When this was sent, on the sender's clock; comes back in the reply.
        sent_at: Timestamp,
    },
    /// What batches of a model take is measured now that it was offered before that. Once, and told to every scheduler.
    Measured {
        /// The model, as the reader calls it.
        model: ModelId,
        /// l(b), for as many tasks as in the offer.
        profile: LatencyProfile,
        /// As in the offer.
        cost: Option<BatchCost>,
    },
    /// An operator has drained it, or resumed it; told to every scheduler, and by a drained one to each that has taken
    /// it in. It wants no plans meanwhile.
    Drained {
        /// Drained, or resumed.
        is_drained: bool,
    },
    /// The sub-cluster that a primary has put it in; told to every scheduler, and by one that has one to each that has
    /// taken it in.
    Assigned {
        /// From 0.
        sub_cluster: u16,
    },
}

/// A message to a ModelThread: what becomes of its plans, and of weights that it has ordered.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum BackendToModelThread {
    /// The answer to `LoadWeights`, for whichever ModelThread is the first.
    #[wincode(tag = 64)]
    WeightsLoaded {
        /// As in the order.
        gpu: GpuId,
        /// The model.
        model: ModelId,
        /// How.
        outcome: WeightsOutcome,
    },
    /// The [`sample`](crate::scheduler_to_backend::BatchPlan::sample) of a plan was run again, alone, and took so
    /// long. Not all are.
    #[wincode(tag = 65)]
    RanAlone {
        /// The plan.
        plan: PlanId,
        /// From its start to its end.
        took: Span,
    },
    /// A task that was cancelled was dropped from its batch: its slot is neither read nor written any more. Precedes
    /// the plan's `Answered`.
    #[wincode(tag = 66)]
    Cancelled {
        /// The plan.
        plan: PlanId,
        /// The task.
        task: TaskId,
    },
    /// A task was dropped from its batch because its guarded input was not in its slot: that is neither read nor
    /// written any more. Precedes the plan's `Answered`.
    #[wincode(tag = 67)]
    InputLate {
        /// The plan.
        plan: PlanId,
        /// The task.
        task: TaskId,
    },
    /// Every answer of a plan has arrived or failed: the plan's tasks have ended here. Sent once for each plan, after
    /// its `PlanDone`; until then a task's answer can still be lost with the backend.
    #[wincode(tag = 68)]
    Answered {
        /// The plan.
        plan: PlanId,
        /// Tasks that failed since `PlanDone`; as there.
        undelivered: Vec<Undelivered>,
    },
    /// A plan's execution ended or was given up: unless it was abandoned the GPU is free, and the answers are on their
    /// way. Sent once for each plan.
    #[wincode(tag = 69)]
    PlanDone {
        /// The plan.
        plan: PlanId,
        /// How.
        outcome: PlanOutcome,
        /// Tasks whose input could not be read or whose answer may not have arrived: their frontend must be asked
        /// (fence) before they end or run again. Those that fail later are named by `Answered`.
        undelivered: Vec<Undelivered>,
        /// When the plan arrived here, on the scheduler's clock.
        arrived_at: Timestamp,
        /// When the last of its inputs did.
        fetched_at: Timestamp,
    },
}

impl BackendToModelThread {
    /// The plan that it is about, if it is about one.
    #[must_use]
    pub fn plan(&self) -> Option<PlanId> {
        match self {
            Self::PlanDone { plan, .. }
            | Self::Answered { plan, .. }
            | Self::Cancelled { plan, .. }
            | Self::InputLate { plan, .. }
            | Self::RanAlone { plan, .. } => Some(*plan),
            Self::WeightsLoaded { .. } => None,
        }
    }
}

/// A message to either, over the one connection that serves both.
pub type BackendToScheduler = Addressed<BackendToControl, BackendToModelThread>;

impl From<BackendToControl> for BackendToScheduler {
    fn from(message: BackendToControl) -> Self {
        Self::Control(message)
    }
}

impl From<BackendToModelThread> for BackendToScheduler {
    fn from(message: BackendToModelThread) -> Self {
        Self::ModelThread(message)
    }
}
