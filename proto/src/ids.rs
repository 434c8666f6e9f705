//! Ids. Each says who assigns it, and none is ever used again within one life of its assigner.
//!
//! Several schedulers may live, of which one is the primary. What outlives a primary (a frontend, a backend, a link, a
//! task) has an id that all of them know it by: whoever assigned it, the member tells it to the others. What does not
//! (a GPU, a model, a plan) is named anew by the next one.

use wincode::{SchemaRead, SchemaWrite};

/// Assigned by the first scheduler that a frontend joins, and told to the others; a frontend that starts over is given
/// a fresh one, so an id is also the frontend's incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct FrontendId(pub u32);

/// Assigned by the first scheduler that a backend joins, and told to the others; a backend that starts over is given a
/// fresh one, so an id is also the backend's incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct BackendId(pub u32);

impl BackendId {
    /// No backend has it: a fence that names it asks about tasks only.
    pub const NOBODY: Self = Self(u32::MAX);
}

/// Assigned by the scheduler, one for each GPU that a backend offers, dense from 0. The smallest free id is
/// used first, so GPUs with large ids stay idle at low load (Symphony, section 3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct GpuId(pub u32);

/// Assigned by the scheduler when a backend first offers a model of that name and version, dense from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct ModelId(pub u32);

/// The workload that a request is of, by a hash of what its client calls it: requests of one workload take alike
/// (Orloj, section 3.2). Two names may have one hash; their requests count as of one workload then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, SchemaRead, SchemaWrite)]
pub struct Application(pub u32);

impl Application {
    /// Bytes of a name.
    pub const NAME_BYTES_MAX: usize = 64;
    /// Of requests whose clients name none.
    pub const NONE: Self = Self(0);

    /// The workload of that name: FNV-1a of 32 bits.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let hash = name.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        if name.is_empty() { Self::NONE } else { Self(hash.max(1)) }
    }
}

/// The position of one of the scheduler's ModelThreads, from 0. Each owns its models; at most
/// [`ModelThreadId::COUNT_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, SchemaRead, SchemaWrite)]
pub struct ModelThreadId(pub u16);

impl ModelThreadId {
    /// ModelThreads that a scheduler can have.
    pub const COUNT_MAX: u16 = 256;
    /// None of them: the plan is an earlier primary's, and what becomes of it is told to control.
    pub const INHERITED: Self = Self(u16::MAX);
}

/// Assigned by a ModelThread when a batch is granted: its own id in the upper 16 bits, a sequence number in the lower
/// 48. What becomes of the plan is reported to that thread. When a backend obeys another primary, it names the plans
/// that it has anew, as [`ModelThreadId::INHERITED`]'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct PlanId(pub u64);

impl PlanId {
    const SEQUENCE_BITS: u32 = 48;

    /// The id of the `sequence`-th plan of a ModelThread.
    #[must_use]
    pub fn new(model_thread: ModelThreadId, sequence: u64) -> Self {
        debug_assert!(sequence < 1 << Self::SEQUENCE_BITS, "at a million plans a second that takes nine years");
        Self(u64::from(model_thread.0) << Self::SEQUENCE_BITS | sequence)
    }

    /// The ModelThread that made the plan.
    #[must_use]
    pub fn model_thread(self) -> ModelThreadId {
        ModelThreadId((self.0 >> Self::SEQUENCE_BITS) as u16)
    }
}

/// Assigned by a backend when it opens a connection to a frontend, ascending from 1 over all its frontends. So what
/// failed on one link is not blamed on a newer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct LinkId(pub u32);

impl LinkId {
    /// Below every link: there was none.
    pub const NONE: Self = Self(0);
    /// Every link, those that are still to come too: the backend is lost.
    pub const ALL: Self = Self(u32::MAX);
}

/// Assigned by the scheduler when it asks backends to load a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct LoadId(pub u64);

/// Assigned by a frontend when a client asks for a change of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct ChangeId(pub u64);

/// Assigned by a frontend when it admits a task: its own id in the upper 24 bits, a sequence number in the lower 40.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub struct TaskId(pub u64);

impl FrontendId {
    /// Below these, task ids can name it.
    pub const COUNT_MAX: u32 = 1 << (u64::BITS - TaskId::SEQUENCE_BITS);
}

impl TaskId {
    const SEQUENCE_BITS: u32 = 40;

    /// The id of the `sequence`-th task of a frontend.
    ///
    /// # Panics
    /// If `frontend` needs more than 24 bits or `sequence` more than 40: at a million tasks a second that takes 12 days
    /// of one frontend's incarnation, which rejoins before.
    #[must_use]
    pub fn new(frontend: FrontendId, sequence: u64) -> Self {
        assert!(frontend.0 < FrontendId::COUNT_MAX, "frontend ids are 24 bits in a task id");
        assert!(sequence < 1 << Self::SEQUENCE_BITS, "task sequence numbers are 40 bits");
        Self(u64::from(frontend.0) << Self::SEQUENCE_BITS | sequence)
    }

    /// The frontend that admitted the task and waits for its answer.
    #[must_use]
    pub fn frontend(self) -> FrontendId {
        FrontendId((self.0 >> Self::SEQUENCE_BITS) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_id_names_its_frontend() {
        let task = TaskId::new(FrontendId(0xabcdef), (1 << 40) - 1);
        assert_eq!(task.frontend(), FrontendId(0xabcdef));
        assert_ne!(task, TaskId::new(FrontendId(0xabcdef), 0));
    }
}
