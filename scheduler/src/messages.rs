//! What ModelThreads and the RankThread tell each other, and the network budget that both plan with.

use proto::{GpuId, LatencyProfile, ModelId, Span, Timestamp};

use crate::task::LoadEnd;

/// What the network may cost. Both threads plan with `delay(b) = ctrl + data_per_task * b` between a grant and the
/// start of its batch: the plan travels, then the backend reads `b` inputs (Symphony, Figure 18).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetworkBudget {
    /// From the scheduler to a backend.
    pub ctrl: Span,
    /// To read one task's input.
    pub data_per_task: Span,
    /// How late timers fire and threads wake. The window of a deferred batch opens this much earlier: between
    /// `d - l(b + 1)` and `d - l(b)` lies only what one more task would cost, which for a small model is less than any
    /// operating system keeps time by. Zero in the paper.
    pub jitter: Span,
}

impl NetworkBudget {
    /// `delay(batch)`.
    #[must_use]
    pub fn delay(&self, batch: usize) -> Span {
        self.ctrl + self.data_per_task * batch as i64
    }

    /// delay(b) + l(b) for b = 1, 2, ...: from a grant to the end of its batch, on an idle GPU.
    #[must_use]
    pub fn lead_times(&self, profile: &LatencyProfile) -> Vec<Span> {
        (1..=profile.max_batch()).map(|batch| self.delay(batch) + profile.latency(batch)).collect()
    }
}

/// ModelThread -> RankThread: the batch that a model would run next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Tasks in it; at least 1.
    pub size: u32,
    /// It is schedulable from here on, on GPUs that may start batches early; may lie in the past.
    pub exec_at: Timestamp,
    /// And from here on on any GPU; not before `exec_at`. Policies without prices say the same for both.
    pub anywhere_at: Timestamp,
    /// It is schedulable until here: the head's deadline less l(size).
    pub latest: Timestamp,
    /// Of the candidates that wait for a GPU the one with the nearest is taken. Symphony's Algorithm 1 takes `latest`.
    pub due_at: Timestamp,
    /// Grants that the ModelThread had answered for this model, of its whole life and modulo 2^32, when it drew this
    /// up. A candidate that does not know the model's last grant yet consists of tasks that this grant takes away:
    /// the RankThread ignores it, as the answer to the grant brings a new one.
    pub grants_seen: u32,
    /// As much before `exec_at` as the batch takes longer once it is as large as the model's usually are: its window
    /// may open then. That is what work without an objective gives way to ([`Background`]).
    pub expected_at: Timestamp,
    /// From a task's arrival to the latest start of the batch that it leads, of late at least.
    pub patience: Span,
    /// What is asked for, if batches are sized by a price.
    pub traffic: Option<Traffic>,
}

/// What a model's clients ask for, and what its batches take, for the price of GPU time ([`crate::pricing`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Between two arrivals, on average; above zero.
    pub gap: Span,
    /// When the newest task came.
    pub arrived_at: Timestamp,
    /// l(b) is about `fixed + b * per_task`.
    pub fixed: Span,
    /// What each task adds.
    pub per_task: Span,
    /// Tasks that a batch can gather and run in time; at least 1.
    pub target: u32,
    /// Thousandths of a millisecond of a request's latency that a millisecond of GPU time is worth; infinite at
    /// [`Self::ENDLESS_PRICE`].
    pub gpu_price: u32,
}

impl Traffic {
    /// Stands for an infinite price.
    pub const ENDLESS_PRICE: u32 = u32::MAX;
}

/// RankThread -> ModelThread: what its batches are sized by, until the next plan.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Price {
    /// Milliseconds of a request's latency that a millisecond of GPU time is worth; infinite where GPUs are scarce.
    pub price: f32,
    /// What the batches of all models take on average, in milliseconds, times how scarce GPUs are: from 0 to 1.
    pub execution_ms: f32,
}

/// ModelThread -> RankThread: tasks of a model that have no objective wait. They run on GPUs that no candidate needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Background {
    /// Tasks that one batch could hold; at least 1.
    pub size: u32,
    /// When the oldest of them was queued.
    pub since: Timestamp,
    /// What a batch of one takes: with less time no GPU is of use.
    pub least: Span,
    /// What a batch of `size` takes: more time is of no use.
    pub most: Span,
    /// As [`Candidate::grants_seen`], of the model's grants for such tasks.
    pub grants_seen: u32,
}

/// RankThread -> ModelThread: run your candidate on this GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The model.
    pub model: ModelId,
    /// The GPU, which is reserved until a [`GpuUpdate`] answers this grant.
    pub gpu: GpuId,
    /// When the GPU is free; may lie in the past.
    pub free_at: Timestamp,
    /// GPUs that host the model.
    pub gpus: u32,
    /// Whether the GPU may start batches early ([`Candidate::exec_at`]).
    pub is_open: bool,
    /// When the timer that found the match was due: how late a batch leaves counts from there.
    pub timer_at: Timestamp,
    /// If it is for tasks without an objective: when their batch must have ended.
    pub background_until: Option<Timestamp>,
}

/// RankThread -> ModelThread: where a model's weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Whereabouts {
    /// In a GPU's memory.
    #[default]
    Here,
    /// On their way there, until about then.
    Arriving(Timestamp),
    /// In host memory only.
    Cold {
        /// How long a load takes, once it begins.
        load: Span,
        /// No link can begin one earlier.
        from: Timestamp,
    },
}

impl Whereabouts {
    /// The earliest start of a batch, as far as weights go.
    #[must_use]
    pub fn ready_at(self, now: Timestamp) -> Timestamp {
        match self {
            Self::Here => Timestamp::PAST,
            Self::Arriving(at) => at,
            Self::Cold { load, from } => from.max(now) + load,
        }
    }
}

/// To the RankThread: what became of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuUpdate {
    /// From a ModelThread, in answer to a grant: a batch runs from `exec_at` to `free_at`.
    Planned {
        /// When it starts.
        exec_at: Timestamp,
        /// When the GPU will be free again.
        free_at: Timestamp,
        /// Whether that holds. If nobody knows when the batch ends, as that of a dynamic model, the GPU is not granted
        /// before it is reported: what was planned behind it could miss its window.
        is_certain: bool,
    },
    /// From a ModelThread, in answer to a grant: no batch wants the GPU now (its tasks were cancelled, or have
    /// expired, while the grant was under way).
    Returned,
    /// From the backend: the oldest batch that it had not reported yet ended, or was rejected, at `finished_at`.
    Finished {
        /// When the GPU was free.
        finished_at: Timestamp,
    },
    /// From the backend: a load of this model ended.
    Loaded {
        /// The model.
        model: ModelId,
        /// How.
        end: LoadEnd,
    },
}
