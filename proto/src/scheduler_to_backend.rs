//! Step 6, Step 7.
//! Scheduler -> backend. A batch plan names tasks and their slots; the backend pulls the bytes itself.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    brought::Brought,
    clock::ClockReply,
    epoch::{Claim, Epoch},
    frame::FRAME_BYTES_MAX,
    hello::ModelThreads,
    ids::{BackendId, FrontendId, GpuId, LoadId, ModelId, PlanId, TaskId},
    link_pass::LinkPass,
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

impl PlannedTask {
    /// Whether this task and `before` are of one run: what is read and answered for one is read and answered for both
    /// by one transfer, and one header says all about both.
    #[must_use]
    pub fn continues(&self, before: &Self) -> bool {
        before.task.0.checked_add(1) == Some(self.task.0)
            && before.task.frontend() == self.task.frontend()
            && (before.attempt, before.stamps) == (self.attempt, self.stamps)
            && self.slot.follows(&before.slot)
    }
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
    /// Of a dynamic model: the index of a task that is to be run again when the batch has ended, alone, if the GPU has
    /// nothing else to do then (Orloj, section 3.2). Its outputs are nobody's; `RanAlone` tells what it took.
    pub sample: Option<u16>,
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
        /// What the frontend is to be shown.
        pass: LinkPass,
    },
    /// The answer to `Offers`.
    Offered {
        /// The ids of the models, in their order.
        models: Vec<ModelId>,
    },
    /// Read this model from the repository and make all versions that are to be served ready to run, beside whatever is
    /// hosted. Answered by `Loaded`.
    Load {
        /// Comes back in the answer.
        load: LoadId,
        /// The model, as in the repository.
        name: String,
        /// What is to be loaded instead of what the repository has, if clients want that.
        brought: Option<Brought>,
        /// Where the reader's `placement` has no place for it: on all of its GPUs, as a guest.
        is_placed: bool,
    },
    /// A version that was loaded is hosted from now on, in the place of what was hosted as the same model.
    Host {
        /// What was loaded.
        load: LoadId,
        /// Which version of it.
        version: String,
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
    /// A GPU whose memory is short is about to be planned with, under this name. Loads that have yet to begin are
    /// forgotten, and orders that call it by any other name do not count. Answered by `Resident`.
    AskResident {
        /// Index of the GPU.
        gpu_index: u32,
        /// Assigned by the scheduler; never twice.
        gpu: GpuId,
    },
    /// Copy a hosted model's weights into a GPU's memory, starting in `[earliest, latest]` or not at all (Clockwork,
    /// section 4.4). Answered by `WeightsLoaded`. Loads of one GPU run one after another. There is room for them, or
    /// there will be as soon as an `UnloadWeights` is here that another ModelThread has passed on.
    LoadWeights {
        /// The GPU.
        gpu: GpuId,
        /// The model.
        model: ModelId,
        /// The earliest start, on the scheduler's clock.
        earliest: Timestamp,
        /// The latest start, on the scheduler's clock.
        latest: Timestamp,
    },
    /// A model's weights make room. No plan that names it there is without a report.
    UnloadWeights {
        /// The GPU.
        gpu: GpuId,
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
    /// The sender has no more plans for a backend that is about to leave.
    Dismissed,
    /// The sender is the primary now. If its epoch is the highest so far it is obeyed: the former primary's connections
    /// are ended first, then each plan that has not ended is named (`Unfinished`), and `Obeys` follows.
    Takeover {
        /// Its epoch.
        epoch: Epoch,
    },
    /// A standby misses the primary: does the reader, too? Answered by `Misses`.
    AskPrimary,
    /// Run this batch.
    Plan(BatchPlan),
    /// From the primary: an operator wants the reader drained, or resumed.
    Drain {
        /// Drained, or resumed.
        is_drained: bool,
    },
    /// From the primary: the reader is one of this sub-cluster, and tells every scheduler.
    Assign {
        /// From 0.
        sub_cluster: u16,
    },
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
    /// Whether the scheduler is the primary, and of which epoch.
    pub claim: Claim,
}

/// Encoded bytes of a [`PlannedTask`].
const PLANNED_TASK_BYTES: usize = 8 + 2 + (4 + 8 + 4 + 8 + 4 + 4) + 3 * 8;
/// Encoded bytes of a [`SchedulerToBackend::Plan`] without its tasks.
const PLAN_BYTES: usize = 4 + 8 + 4 + 4 + 8 + 8 + 8 + 3;
const _: () = assert!(PLAN_BYTES + LatencyProfile::MAX_BATCH * PLANNED_TASK_BYTES + 4 <= FRAME_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_of_neighbours_that_differ_in_nothing_else() {
        let slot = SlotDescriptor {
            slot: 4,
            input_offset: 32,
            input_bytes: 16,
            answer_offset: 640,
            answer_bytes_max: 128,
            key: 7,
        };
        let before = PlannedTask { task: TaskId(7), attempt: 2, slot, stamps: SchedulerStamps::default() };
        let next = SlotDescriptor { slot: 5, input_offset: 48, answer_offset: 768, ..slot };
        let after = PlannedTask { task: TaskId(8), slot: next, ..before };
        assert!(after.continues(&before));
        let stamps = SchedulerStamps { queued_at: Timestamp(1), ..before.stamps };
        let others = [
            before,
            PlannedTask { task: TaskId(9), ..after },
            PlannedTask { attempt: 1, ..after },
            PlannedTask { stamps, ..after },
            PlannedTask { slot: SlotDescriptor { slot: 6, ..next }, ..after },
            PlannedTask { slot: SlotDescriptor { input_offset: 64, ..next }, ..after },
            PlannedTask { slot: SlotDescriptor { input_bytes: 15, ..next }, ..after },
            PlannedTask { slot: SlotDescriptor { answer_offset: 760, ..next }, ..after },
            PlannedTask { slot: SlotDescriptor { answer_bytes_max: 120, ..next }, ..after },
            PlannedTask { slot: SlotDescriptor { key: 8, ..next }, ..after },
        ];
        assert!(others.iter().all(|other| !other.continues(&before)));
        let last = PlannedTask { task: TaskId::new(FrontendId(1), (1 << 40) - 1), ..before };
        let of_another = PlannedTask { task: TaskId::new(FrontendId(2), 0), ..after };
        assert!(!of_another.continues(&last), "ids of two frontends are no neighbours");
        let end = PlannedTask { slot: SlotDescriptor { input_offset: u64::MAX, ..slot }, ..before };
        assert!(!after.continues(&end), "what a peer says is not added up unchecked");
    }

    #[test]
    fn the_largest_plan_fits_one_frame() {
        let slot = SlotDescriptor {
            slot: 1,
            input_offset: 0,
            input_bytes: 1,
            answer_offset: 64,
            answer_bytes_max: 128,
            key: 0,
        };
        let task = PlannedTask { task: TaskId(1), attempt: 0, slot, stamps: SchedulerStamps::default() };
        let plan = |tasks| {
            let plan = BatchPlan {
                plan: PlanId(1),
                gpu_index: 0,
                model: ModelId(0),
                exec_at: Timestamp(1),
                latest: Timestamp(2),
                tasks: vec![task; tasks],
                sample: Some(0),
            };
            wincode::serialize(&SchedulerToBackend::Plan(plan)).unwrap().len()
        };
        assert_eq!(plan(0), PLAN_BYTES);
        assert_eq!(plan(LatencyProfile::MAX_BATCH), PLAN_BYTES + LatencyProfile::MAX_BATCH * PLANNED_TASK_BYTES);
    }
}
