//! Step 6 to 7: scheduler -> backend. A batch plan names tasks and their slots; the backend pulls the bytes itself.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    clock::ClockReply,
    frame::FRAME_BYTES_MAX,
    hello::ModelThreads,
    ids::{BackendId, FrontendId, LoadId, ModelId, PlanId, TaskId},
    profile::LatencyProfile,
    slot::SlotDescriptor,
    stages::SchedulerStamps,
    time::Timestamp,
};

/// One task of a batch plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct PlannedTask {
    /// The task; its frontend is in its id.
    pub task: TaskId,
    /// 0 at first; one more each time its backend was lost.
    pub attempt: u16,
    /// Where its bytes are in the frontend's arena.
    pub slot: SlotDescriptor,
    /// What the scheduler stamped.
    pub stamps: SchedulerStamps,
}

/// One batch for one GPU. It may start in `[exec_at, latest]` and at no other time.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct BatchPlan {
    /// Assigned by the scheduler.
    pub plan: PlanId,
    /// Index of the GPU among those that this backend offered.
    pub gpu_index: u32,
    /// The model.
    pub model: ModelId,
    /// The earliest start, on the scheduler's clock.
    pub exec_at: Timestamp,
    /// The latest start, on the scheduler's clock; a batch that cannot start by then is rejected, not late.
    pub latest: Timestamp,
    /// 1 to [`LatencyProfile::MAX_BATCH`] tasks.
    pub tasks: Vec<PlannedTask>,
}

/// A message to a backend.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum SchedulerToBackend {
    /// The frontend is gone: its slots are not to be read or written any more.
    FrontendLeft {
        /// The frontend.
        frontend: FrontendId,
    },
    /// The scheduler's clock.
    Clock(ClockReply),
    /// A frontend to connect to.
    FrontendJoined {
        /// The frontend.
        frontend: FrontendId,
        /// `ip:port` of its bootstrap listener.
        link_address: String,
    },
    /// Read this model from the repository and make it ready to run, beside whatever is hosted. Answered by `Loaded`.
    Load {
        /// Comes back in the answer.
        load: LoadId,
        /// The model, as in the repository.
        name: String,
    },
    /// What was loaded is hosted from now on, in the place of what was hosted as the same model.
    Host {
        /// What was loaded.
        load: LoadId,
        /// Its id in plans.
        model: ModelId,
    },
    /// What was loaded, or is being loaded, is not wanted any more.
    Discard {
        /// The load.
        load: LoadId,
    },
    /// No plan names this model any more; once those that have come are finished, it can go. Answered by `Unloaded`.
    Unload {
        /// The model.
        model: ModelId,
    },
    /// The client of a planned task hung up. Answered by `Cancelled` if the task has not begun to execute.
    Cancel {
        /// The plan that it is in.
        plan: PlanId,
        /// The task.
        task: TaskId,
    },
    /// Run this batch.
    Plan(BatchPlan),
}

/// What the scheduler answers when a backend connects.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct BackendWelcome {
    /// The backend's name from now on.
    pub backend: BackendId,
    /// The ids of the models it offered, in the order of its hello.
    pub models: Vec<ModelId>,
    /// Where plans come from.
    pub model_threads: ModelThreads,
}

/// Encoded bytes of a [`PlannedTask`].
const PLANNED_TASK_BYTES: usize = 8 + 2 + (4 + 8 + 4 + 8 + 4) + 3 * 8;
/// Encoded bytes of a [`SchedulerToBackend::Plan`] without its tasks.
const PLAN_BYTES: usize = 4 + 8 + 4 + 4 + 8 + 8 + 8;
const _: () = assert!(PLAN_BYTES + LatencyProfile::MAX_BATCH * PLANNED_TASK_BYTES + 4 <= FRAME_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_plan_fits_one_frame() {
        let slot =
            SlotDescriptor { slot: 1, input_offset: 0, input_bytes: 1, answer_offset: 64, answer_bytes_max: 128 };
        let task = PlannedTask { task: TaskId(1), attempt: 0, slot, stamps: SchedulerStamps::default() };
        let plan = |tasks| {
            let plan = BatchPlan {
                plan: PlanId(1),
                gpu_index: 0,
                model: ModelId(0),
                exec_at: Timestamp(1),
                latest: Timestamp(2),
                tasks: vec![task; tasks],
            };
            wincode::serialize(&SchedulerToBackend::Plan(plan)).unwrap().len()
        };
        assert_eq!(plan(0), PLAN_BYTES);
        assert_eq!(plan(LatencyProfile::MAX_BATCH), PLAN_BYTES + LatencyProfile::MAX_BATCH * PLANNED_TASK_BYTES);
    }
}
