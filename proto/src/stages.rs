//! Where a request's time goes: the instants a task passes, all on the scheduler's clock.

use wincode::{SchemaRead, SchemaWrite};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::time::Timestamp;

/// Stamps that the scheduler puts on a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct SchedulerStamps {
    /// The ModelThread took the task into its queue.
    pub queued_at: Timestamp,
    /// The window of the task's batch was open: until then it was held back on purpose, so that it grows (deferral),
    /// from then on it waited for a GPU. Not before `queued_at`, not after `granted_at`.
    pub due_at: Timestamp,
    /// The RankThread's grant reached the ModelThread and the batch was made final.
    pub granted_at: Timestamp,
}

/// Stamps that come back with an answer, in nanoseconds on the scheduler's clock. Fixed layout: it lies in the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct AnswerStamps {
    /// The scheduler queued the task.
    pub queued_at_ns: i64,
    /// Its batch was not held back any more.
    pub due_at_ns: i64,
    /// The scheduler granted the batch a GPU.
    pub granted_at_ns: i64,
    /// The backend took in the plan and posted its READs.
    pub planned_at_ns: i64,
    /// The last input of the batch had arrived.
    pub fetched_at_ns: i64,
    /// The instant the batch was planned to start (`exec_at`).
    pub exec_at_ns: i64,
    /// Execution started.
    pub started_at_ns: i64,
    /// Execution ended; the answer was posted right after.
    pub finished_at_ns: i64,
}
const _: () = assert!(size_of::<AnswerStamps>() == 64);
