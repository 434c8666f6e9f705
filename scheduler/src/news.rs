//! What the scheduler's threads tell each other besides candidates and grants: who is there, what is hosted where,
//! which thread owns a model. Nothing of this is on a task's way; it travels in order from each thread to each other
//! one.

use std::sync::Arc;

use proto::{
    Application, BackendId, BatchCost, FrontendId, GpuId, LatencyProfile, LinkId, LoadId, ModelId, ModelThreadId, Span,
    TaskId, Timestamp, backend_to_scheduler::BackendToModelThread, hello::Member, scheduler_to_frontend::DropReason,
    scheduler_to_scheduler::LearnedAverages,
};

use crate::{
    dynamic::DynamicTimes,
    input_sizes::ReadTime,
    messages::NetworkBudget,
    shard::{Applications, Ride, ShardLoad, Unfinished},
    task::{GpuMemory, Task, Weights},
};

/// Control -> one ModelThread.
#[derive(Debug)]
pub enum ControlToShard {
    /// A member joined: it may connect with this pass.
    Joined {
        /// Who.
        member: Member,
        /// What it has to show.
        pass: u64,
    },
    /// A frontend left: its tasks are forgotten.
    FrontendLeft(FrontendId),
    /// A backend left: its tasks are in doubt. Its GPUs left before.
    BackendLeft(BackendId),
    /// Whether a frontend's tasks are taken: not while backends in use cannot reach it.
    Served(FrontendId, bool),
    /// A GPU is in use from now on.
    GpuJoined(Gpu),
    /// A GPU is not in use any more.
    GpuLeft(GpuId),
    /// A GPU is known by another id from now on; it is not in use.
    GpuRenamed {
        /// Its id so far.
        old: GpuId,
        /// Its id from now on.
        new: GpuId,
    },
    /// A GPU is gone for good; it was not in use any more.
    GpuGone(GpuId),
    /// Models are in the host memory of some GPUs' machine from now on, or on disk only.
    HostMemory {
        /// The GPUs.
        gpus: Vec<GpuId>,
        /// The models.
        models: Vec<ModelId>,
        /// Whether they are there.
        is_there: bool,
    },
    /// What backends offer for a model that this thread owns.
    Offered(Offered),
    /// What the way back from the end of execution takes.
    Resp(Span),
    /// Whether any GPU in use hosts a model that this thread owns; if none does, why its tasks are dropped.
    Hosted(ModelId, Result<(), DropReason>),
    /// To be passed on before the first plan that needs it.
    Host {
        /// To whom.
        backend: BackendId,
        /// What it has loaded.
        load: LoadId,
        /// Which version of it.
        version: String,
        /// Its id in plans.
        model: ModelId,
    },
    /// To be passed on after the last plan that names it.
    Unload {
        /// To whom.
        backend: BackendId,
        /// The model.
        model: ModelId,
    },
    /// A backend is about to leave, and its GPUs have left: it is to be told that no plan follows.
    Dismiss(BackendId),
    /// A backend that obeys this primary has a plan of an earlier one, of a model that this thread owns.
    Unfinished(BackendId, Unfinished),
    /// What a backend reports of such a plan.
    Inherited(BackendId, BackendToModelThread),
    /// All backends have said what they have, and a frontend what it waits for.
    Settle(FrontendId, Links),
    /// A model that another thread owned so far.
    Adopt(Box<Moved>),
    /// Another scheduler is to be the primary: what has been learned is to be told.
    TellLearned,
    /// What the former primary had learned of a model that this thread owns.
    Learned(ModelId, Box<Learned>),
    /// What it took that one's plans to arrive.
    LearnedCtrl(Span),
    /// Meant for a model that this thread owns, but sent to one that did before.
    Forwarded(ModelId, Forwarded),
}

/// Links that could reach a frontend's slots when it obeyed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Links {
    /// All of them.
    pub all: Vec<(BackendId, LinkId)>,
    /// Those that are not accounted for: their backends do not obey, or have others.
    pub doubtful: Vec<(BackendId, LinkId)>,
}

/// A GPU as ModelThreads know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its id.
    pub id: GpuId,
    /// Whose it is.
    pub backend: BackendId,
    /// Which of that one's.
    pub index: u32,
    /// What it hosts; ascending.
    pub models: Vec<ModelId>,
    /// If it holds but a part of that.
    pub memory: Option<GpuMemory>,
}

/// What backends offer for a model.
#[derive(Debug, Clone)]
pub struct Offered {
    /// The model.
    pub model: ModelId,
    /// What reading one of its inputs takes.
    pub read_time: ReadTime,
    /// What its weights take.
    pub weights: Weights,
    /// As [`ModelOffer::queue_max`](proto::backend_to_scheduler::ModelOffer::queue_max).
    pub queue_max: Vec<u32>,
    /// If what a batch takes depends on its tasks.
    pub cost: Option<BatchCost>,
    /// What GPU time is worth to its owner, if that is not what it is worth to all.
    pub gpu_price: Option<f64>,
    /// The slowest of all offers, if that is another one than before: what was learned of the model is void then, and
    /// `offers` are all that there are.
    pub common: Option<LatencyProfile>,
    /// What GPUs offer.
    pub offers: Vec<(Vec<GpuId>, Arc<LatencyProfile>)>,
}

/// A model on its way from one ModelThread to another.
#[derive(Debug)]
pub struct Moved {
    /// The model.
    pub model: ModelId,
    /// What waits for it.
    pub tasks: Vec<Task<Ride>>,
    /// What is known of it.
    pub learned: Learned,
    /// The workloads that its clients have named.
    pub applications: Applications,
    /// If it is dynamic, what is known of its requests, by the numbers of these.
    pub samples: Option<DynamicTimes>,
}

/// What is known of a model and no member can tell: for whoever plans it next, be that another ModelThread or another
/// scheduler.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Learned {
    /// What executions take on GPUs, in thousandths of what these offer.
    pub factors: Vec<(GpuId, u32)>,
    /// What READing one task's input takes; `None`: as configured.
    pub data: Option<Span>,
    /// The policy's.
    pub averages: Option<LearnedAverages>,
}

/// What came too late for the thread that it was sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forwarded {
    /// A task to run, of this workload if that is known: numbers are those of one thread.
    Task(Task<Ride>, Application),
    /// A task whose client hung up.
    Cancel(TaskId),
}

/// What a ModelThread plans a model with, as far as frontends are told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedWith {
    /// l(1).
    pub least: Span,
    /// How much it gains by time for larger batches ([`LatencyProfile::batching`]).
    pub batching: Span,
    /// What the network costs it.
    pub budget: NetworkBudget,
}

/// One ModelThread -> control.
#[derive(Debug)]
pub enum ShardToControl {
    /// A member is connected here.
    Connected(Member),
    /// A member's connection to this thread ended, or it broke the protocol there.
    Lost(Member, String),
    /// A frontend has named all tasks to this thread that an earlier primary was given.
    AllOpen(FrontendId),
    /// What a model is planned with.
    Planned(ModelId, PlannedWith),
    /// What this thread has had to do.
    Load(ModelThreadId, Box<ShardLoad>),
    /// A model that this thread was told to release.
    Released(Box<Moved>),
    /// What this thread has learned: what plans take to arrive, unless it is as configured, and of its models.
    Learned(Option<Span>, Vec<(ModelId, Learned)>),
    /// For whoever owns the model now.
    Forward(ModelId, Forwarded),
}

/// Control -> RankThread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlToRank {
    /// A model, and the thread that owns it.
    Model(ModelId, ModelThreadId),
    /// What the network costs a model.
    Budget(ModelId, NetworkBudget),
    /// A model is to be moved to another thread.
    Move(ModelId, ModelThreadId),
    /// A GPU that is not in use still runs what an earlier primary gave it, until then.
    GpuBusy(GpuId, Timestamp),
    /// What a model's weights take; before a GPU that hosts it joins.
    Weights(ModelId, Weights),
    /// A GPU is in use from now on.
    GpuJoined {
        /// The GPU.
        gpu: GpuId,
        /// What it hosts.
        models: Vec<ModelId>,
        /// If it holds but a part of that.
        memory: Option<GpuMemory>,
    },
    /// Models are in the host memory of some GPUs' machine from now on, or on disk only.
    HostMemory {
        /// The GPUs.
        gpus: Vec<GpuId>,
        /// The models.
        models: Vec<ModelId>,
        /// Whether they are there.
        is_there: bool,
    },
    /// A GPU is not in use any more.
    GpuLeft(GpuId),
    /// It comes back under this id, and is free when its plans have ended.
    GpuRenamed {
        /// Its id so far.
        old: GpuId,
        /// Its id from now on.
        new: GpuId,
    },
    /// A GPU is gone for good; it was not in use any more.
    GpuGone(GpuId),
}
