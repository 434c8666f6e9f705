//! Step 4, Step 5, Step 6 as one thing: what turns tasks into batches on GPUs.
//!
//! The simulator and production drive any policy
//! through this interface, so a published policy that is no choice of window (a static plan, a queue for each replica,
//! preemption) can be a state machine of its own beside ModelThread and RankThread.

use proto::{
    GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp, scheduler_to_frontend::DropReason,
    scheduler_to_scheduler::LearnedAverages,
};

use crate::{
    dynamic::{DynamicTimes, KnownTimes},
    messages::Traffic,
    task::{Batch, GpuMemory, LoadEnd, ModelConfig, Task},
};

/// What a planner wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannerOutput<P> {
    /// To the backend.
    Batch(Batch<P>),
    /// To the backend: kill what the GPU runs. It reports the batch as ended, and its tasks are submitted again.
    Preempt(GpuId),
    /// To the backend: copy the model's weights into the GPU's memory, starting in `[earliest, latest]`, or not at
    /// all. What was unloaded before has made room. The end is reported ([`Planner::handle_loaded`]).
    Load {
        /// The GPU.
        gpu: GpuId,
        /// The model.
        model: ModelId,
        /// The earliest start.
        earliest: Timestamp,
        /// The latest start.
        latest: Timestamp,
        /// How long it takes, if it goes as planned.
        takes: Span,
    },
    /// To the backend: the weights' pages are free. None of the model's batches there is without a report.
    Unload {
        /// The GPU.
        gpu: GpuId,
        /// The model.
        model: ModelId,
    },
    /// To the task's frontend: it ended without having run.
    Dropped {
        /// The model.
        model: ModelId,
        /// The task.
        task: Task<P>,
        /// Why.
        reason: DropReason,
    },
}

/// A model that another ModelThread owns from now on.
#[derive(Debug, Clone, PartialEq)]
pub struct Released<P> {
    /// The model.
    pub model: ModelId,
    /// What waits for it, nearest deadline first.
    pub tasks: Vec<Task<P>>,
    /// What its policy has learned.
    pub averages: Option<LearnedAverages>,
    /// If it is dynamic, what is known of its requests.
    pub samples: Option<DynamicTimes>,
}

/// Tasks in, batches out. `P` is the tasks' payload.
///
/// Inputs of one instant may come in any number; decisions are made by [`Self::handle_timeout`] after them. Each task
/// leaves once: in a batch, dropped, released with its model, or forgotten with its owner. Each batch's end is reported
/// once, in the order of its GPU's batches.
pub trait Planner<P>: Send {
    /// Takes a model in, or gives one that is already here a new profile.
    fn handle_model(&mut self, now: Timestamp, id: ModelId, config: ModelConfig);

    /// What a model takes on one GPU, if that is less than what it takes on every one; `None`: it is not. It holds
    /// until the GPU leaves.
    fn handle_gpu_profile(&mut self, id: ModelId, gpu: GpuId, profile: Option<LatencyProfile>);

    /// No GPU hosts the model any more: all that waits is dropped.
    fn handle_unhosted(&mut self, now: Timestamp, id: ModelId);

    /// A task to run. It is dropped at once if its model is not here or too many wait.
    fn handle_submit(&mut self, now: Timestamp, id: ModelId, task: Task<P>);

    /// Drops a task that still waits. Nothing happens if it does not.
    fn handle_cancel(&mut self, now: Timestamp, id: ModelId, task: TaskId);

    /// Forgets all waiting tasks whose owner is gone; nobody is told.
    fn handle_owner_left(&mut self, now: Timestamp, is_owned: &dyn Fn(TaskId) -> bool);

    /// A GPU that is free from `free_at` on and hosts `models`: all the time, or, if it has `memory`, while they are
    /// loaded. Models with weights must have been taken in before.
    ///
    /// # Panics
    /// If the GPU is already here: ids are never used twice.
    fn handle_gpu_joined(&mut self, free_at: Timestamp, gpu: GpuId, models: Vec<ModelId>, memory: Option<GpuMemory>);

    /// Forgets a GPU; its batches are the caller's to end.
    fn handle_gpu_left(&mut self, now: Timestamp, gpu: GpuId);

    /// The GPU's oldest batch that was not reported yet ended, or was rejected.
    fn handle_finished(&mut self, gpu: GpuId, finished_at: Timestamp);

    /// A load ended, or could not start in its window.
    fn handle_loaded(&mut self, now: Timestamp, gpu: GpuId, model: ModelId, end: LoadEnd);

    /// A model's weights are in the host memory of a GPU's machine from now on, or on disk only, which loads take
    /// longer for. By default nothing comes of it: no loads are planned.
    fn handle_host_memory(&mut self, _gpu: GpuId, _model: ModelId, _is_there: bool) {}

    /// A task of a dynamic model was executed alone, as a sample of its application and its length. By default it is
    /// not looked at.
    fn handle_alone(&mut self, _now: Timestamp, _id: ModelId, _of: (u8, u32), _alone: Span) {}

    /// A GPU executed a batch of a dynamic model: its tasks' applications and lengths, and what it took. By default
    /// it is not looked at.
    fn handle_executed(&mut self, _now: Timestamp, _id: ModelId, _gpu: GpuId, _tasks: &[(u8, u32)], _took: Span) {}

    /// Whether samples are worth executing tasks alone for.
    fn wants_samples(&self) -> bool {
        false
    }

    /// How often samples of a dynamic model's tasks have changed what it is planned with.
    fn tables_made(&self, _id: ModelId) -> u64 {
        0
    }

    /// What is known of a dynamic model's tasks, with their applications' numbers; nothing if that is not looked at.
    fn request_times(&self, _id: ModelId) -> Option<KnownTimes> {
        None
    }

    /// What another one knew of a dynamic model's requests. By default it is learned anew.
    fn handle_samples(&mut self, _now: Timestamp, _id: ModelId, _samples: DynamicTimes) {}

    /// Decides, and fires all timers that are due.
    fn handle_timeout(&mut self, now: Timestamp);

    /// When [`Self::handle_timeout`] must be called at the latest, if nothing comes in.
    fn poll_timeout(&self) -> Option<Timestamp>;

    /// Whether another thread has something for it, so that [`Self::handle_timeout`] is to be called.
    fn has_mail(&self) -> bool {
        false
    }

    /// The next model that another ModelThread owns from now on.
    fn poll_released(&mut self) -> Option<Released<P>> {
        None
    }

    /// What a model's policy has learned, for whoever plans the model next.
    fn learned(&self, _id: ModelId) -> Option<LearnedAverages> {
        None
    }

    /// What another one's had. By default it is learned anew.
    fn handle_learned(&mut self, _now: Timestamp, _id: ModelId, _learned: &LearnedAverages) {}

    /// The next thing that is to be done.
    fn poll_output(&mut self) -> Option<PlannerOutput<P>>;

    /// What is asked of a model, if its batches are sized by a price. By default they are not.
    fn traffic(&self, _now: Timestamp, _id: ModelId) -> Option<Traffic> {
        None
    }

    /// Whether the weights of a model are in no GPU's memory, as far as is known.
    fn is_cold(&self, _id: ModelId) -> bool {
        false
    }

    /// Tasks of a model that wait.
    fn queue_length(&self, id: ModelId) -> usize;

    /// Those of one priority. By default all are taken for that, as planners that know no priorities do.
    fn queue_length_of(&self, id: ModelId, _priority: u8) -> usize {
        self.queue_length(id)
    }
}
