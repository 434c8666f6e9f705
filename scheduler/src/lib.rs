//! The central scheduler: ModelThreads keep each model's queue and candidate batch, the RankThread matches candidates
//! with GPUs (Symphony, sections 3 and 4, and Figure 18).
//!
//! The cores here take `now` and do no IO, so the same code runs in the simulator and in production:
//! tasks enter by [`ModelThread::handle_submit`]; each model's candidate goes to [`RankThread::handle_candidate`];
//! a [`Grant`] comes back to [`ModelThread::handle_grant`], which makes the batch final and says when its GPU will be
//! free again ([`RankThread::handle_gpu`]). The two may run on different threads with delays between them.
//! [`matchmaker::Matchmaker`] runs them on one. It is a [`Planner`], as is each published policy that works otherwise;
//! [`cluster::Cluster`] is a planner's life with its peers around them; [`drive`] gives it sockets and a clock.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod drive;
pub mod estimates;
pub mod free_times;
pub mod gpu_work;
pub mod indexed_heap;
pub mod mailbox;
pub mod matchmaker;
pub mod messages;
pub mod model_thread;
mod model_times;
pub mod planner;
pub mod policy;
mod priorities;
pub mod rank_thread;
pub mod task_queue;

pub use estimates::{Estimates, ProfileChange};
pub use messages::{Candidate, GpuUpdate, Grant, NetworkBudget};
pub use model_thread::{Batch, ModelConfig, ModelThread, Task};
pub use planner::{Planner, PlannerOutput};
pub use policy::Policy;
pub use rank_thread::RankThread;
