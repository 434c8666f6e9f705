//! Step 3: frontend -> scheduler. Task ids, deadlines and slot descriptors; never a tensor byte.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    brought::Brought,
    epoch::{Epoch, Standing},
    frame::Addressed,
    ids::{Application, BackendId, ChangeId, FrontendId, LinkId, ModelId, TaskId},
    slot::SlotDescriptor,
    time::{Span, Timestamp},
};

/// What is to become of a model, on every backend that may host it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum ModelChange {
    /// Read it from the repository, and serve that.
    Load,
    /// Serve it no more.
    Unload,
}

/// A message to the scheduler's control.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum FrontendToControl {
    /// Asks for the scheduler's clock.
    ClockRequest {
        /// When this was sent, on the sender's clock; comes back in the reply.
        sent_at: Timestamp,
        /// What the way back from the end of execution took of late, at a high percentile; zero if nothing came back.
        resp: Span,
    },
    /// A client asks for a change of a model. Answered once, by `ModelChanged`.
    ChangeModel {
        /// Comes back in the answer.
        change: ChangeId,
        /// Which one.
        to: ModelChange,
        /// The model, as in the repository; at most [`NAME_BYTES_MAX`].
        name: String,
        /// Of a load: what it brings along, if anything.
        brought: Option<Brought>,
    },
    /// To a primary that is about to be obeyed: one of the links that can reach our slots now.
    Link {
        /// Whose.
        backend: BackendId,
        /// Which one.
        link: LinkId,
    },
    /// The sender obeys this primary from now on, and no lower one any more; to control, after all `Link`. To each
    /// ModelThread then go the tasks that have not ended (`Open`), and `AllOpen`.
    Obeys {
        /// Whose word counts.
        epoch: Epoch,
    },
    /// The answer to `AskPrimary`.
    Misses {
        /// Whether the primary is not heard.
        misses: bool,
    },
    /// The answer to `PageEnd`: all before it has been read.
    PageRead,
    /// The sender takes no link of this backend any more: it broke its word.
    Refuses {
        /// Whose.
        backend: BackendId,
    },
    /// An operator has drained it, or resumed it; told to every scheduler, and by a drained one to each that has taken
    /// it in. What it submits meanwhile is served.
    Drained {
        /// Drained, or resumed.
        is_drained: bool,
    },
}

/// A message to the ModelThread that owns the model.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum FrontendToModelThread {
    /// The client hung up: do not run the task, if its execution has not begun. Its end is reported as any other's.
    #[wincode(tag = 64)]
    Cancel {
        /// The task.
        task: TaskId,
        /// Its model, so that no index of all tasks is needed.
        model: ModelId,
    },
    /// Run this task by its deadline.
    #[wincode(tag = 65)]
    Submit {
        /// The task.
        task: TaskId,
        /// The model.
        model: ModelId,
        /// When the client wants its answer, on the scheduler's clock. The scheduler takes off what the way back costs.
        deadline: Timestamp,
        /// The smaller, the more important among the tasks of its model while these cannot all be met.
        priority: u8,
        /// The workload that it is of.
        application: Application,
        /// Whether it is the first row of its request: a model's bound of requests that wait is held against these.
        is_first: bool,
        /// Where its bytes are.
        slot: SlotDescriptor,
    },
    /// A task that an earlier primary was given and that has not ended: it waits, runs, or is lost.
    #[wincode(tag = 66)]
    Open {
        /// The task.
        task: TaskId,
        /// The model; one that this scheduler has never named if it does not know it.
        model: ModelId,
        /// As in `Submit`.
        deadline: Timestamp,
        /// As in `Submit`.
        priority: u8,
        /// As in `Submit`.
        application: Application,
        /// Its present attempt: no answer with another number is taken.
        attempt: u16,
        /// As in `Submit`.
        slot: SlotDescriptor,
    },
    /// All open tasks have been named to this ModelThread.
    #[wincode(tag = 67)]
    AllOpen,
    /// The queue pair of `backend` is in ERROR: nothing that it still sends can reach a slot.
    #[wincode(tag = 68)]
    Fenced {
        /// The backend that was asked about.
        backend: BackendId,
        /// Of the tasks asked about, those that have no answer yet; the others have been answered.
        unanswered: Vec<TaskId>,
    },
}

/// A message to either, over the one connection that serves both.
pub type FrontendToScheduler = Addressed<FrontendToControl, FrontendToModelThread>;

impl From<FrontendToControl> for FrontendToScheduler {
    fn from(message: FrontendToControl) -> Self {
        Self::Control(message)
    }
}

impl From<FrontendToModelThread> for FrontendToScheduler {
    fn from(message: FrontendToModelThread) -> Self {
        Self::ModelThread(message)
    }
}

/// Bytes of a model's name and of its version.
pub const NAME_BYTES_MAX: usize = 256;

/// Bytes of an address.
pub const ADDRESS_BYTES_MAX: usize = 128;

/// What a frontend says about itself when it connects to the scheduler.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct FrontendHello {
    /// How operators call it; as [`member_name`](crate::member_name) has it.
    pub name: String,
    /// Where backends reach it: `ip:port` of its bootstrap listener; at most [`ADDRESS_BYTES_MAX`].
    pub link_address: String,
    /// The id that another scheduler has given it in this life.
    pub known_as: Option<FrontendId>,
    /// Whom it obeys.
    pub standing: Standing,
}

impl FrontendHello {
    /// Of one that no scheduler knows yet.
    #[must_use]
    pub fn new(link_address: impl Into<String>) -> Self {
        let (name, link_address) = ("frontend".to_owned(), link_address.into());
        Self { name, link_address, known_as: None, standing: Standing::default() }
    }
}
