//! The vocabulary that downbeat's roles share: ids, instants on the scheduler's clock, latency profiles,
//! and one file of messages for each edge of the data flow. No IO and no clock is read here.
#![forbid(unsafe_code)]

pub mod backend_to_frontend;
pub mod backend_to_program;
pub mod backend_to_scheduler;
pub mod backoff;
pub mod brought;
pub mod clock;
pub mod draining;
pub mod epoch;
pub mod frame;
pub mod frontend_to_scheduler;
pub mod hello;
pub mod host_memory;
pub mod ids;
pub mod link_pass;
pub mod member_name;
pub mod pages;
pub mod predictions;
pub mod profile;
pub mod request_times;
pub mod scheduler_to_backend;
pub mod scheduler_to_frontend;
pub mod scheduler_to_scheduler;
pub mod slot;
pub mod stages;
pub mod time;
pub mod turns;
pub mod waits;
pub mod weights;
pub mod wire;

pub use brought::{Brought, FilesDigest};
pub use epoch::{Claim, Epoch, Era, Standing};
pub use ids::{
    Application, BackendId, ChangeId, FrontendId, GpuId, LinkId, LoadId, ModelId, ModelThreadId, PlanId, TaskId,
};
pub use link_pass::LinkPass;
pub use profile::{BatchCost, LatencyProfile, ProfileError};
pub use slot::SlotDescriptor;
pub use time::{Span, Timestamp};
pub use waits::Wait;
pub use weights::Weights;
pub use wire::WireVersion;

/// What the build refuses, which only other hosts would show.
#[cfg(test)]
#[path = "../build.rs"]
#[expect(dead_code, reason = "only cargo calls its `main`")]
mod build;
