//! The central scheduler: ModelThreads keep each model's queue and candidate batch, the RankThread matches candidates
//! with GPUs (Symphony, sections 3 and 4, and Figure 18).
//!
//! The cores here take `now` and do no IO, so the same code runs in the simulator and in production:
//! tasks enter by [`ModelThread::handle_submit`]; each model's candidate goes to [`RankThread::handle_candidate`];
//! a [`Grant`] comes back to [`ModelThread::handle_grant`], which makes the batch final and says when its GPU will be
//! free again ([`RankThread::handle_gpu`]). The two may run on different threads with delays between them.
//! [`matchmaker::Matchmaker`] runs them on one. It is a [`Planner`], as is each published policy that works otherwise;
//! [`shard::Shard`] is what a ModelThread does with its peers around that, [`control::Control`] everything that is not
//! on a task's way. [`cluster::Cluster`] is all of it on one thread; [`process`] gives it sockets, threads and a clock.
#![forbid(unsafe_code)]

pub mod advice;
pub mod cluster;
pub mod config;
pub mod control;
pub mod dynamic;
pub mod estimates;
pub mod free_times;
pub mod gpu_work;
pub mod history;
pub mod indexed_heap;
pub mod input_sizes;
mod lanes;
pub mod mailbox;
pub mod matchmaker;
pub mod messages;
pub mod model_thread;
mod model_times;
pub mod network_times;
pub mod news;
pub mod perfetto;
pub mod placer;
pub mod planner;
mod planners;
pub mod policy;
pub mod predictions;
mod pricing;
mod priorities;
pub mod process;
pub mod rank_loop;
pub mod rank_thread;
pub mod residency;
pub mod shard;
pub mod snapshot;
pub mod status;
pub mod task;
pub mod task_queue;
pub mod trace;

/// Models that a scheduler keeps track of.
pub const MODELS_MAX: usize = 65_536;

pub use estimates::{Estimates, Learning, ProfileChange};
pub use messages::{Background, Candidate, GpuUpdate, Grant, NetworkBudget, Price, Traffic, Whereabouts};
pub use model_thread::ModelThread;
pub use planner::{Planner, PlannerOutput};
pub use policy::{Policy, Tuning};
pub use predictions::{Predicted, Predictions};
pub use rank_thread::RankThread;
pub use spsc::Doorbell;
pub use task::{Batch, GpuMemory, LoadEnd, ModelConfig, Task, Weights};
