//! The whole cluster in virtual time, from one seed: requests arrive, the scheduler's real cores plan them, GPUs run
//! them for l(b) unless the workload asks for faults, and every run is checked against the invariants of
//! ARCHITECTURE.md.
//!
//! The control network costs nothing here but what the scheduler budgets for it, so results are those of the
//! scheduling alone. The crate `fabric` is the opposite: the cores of all roles over a network that
//! delays, splits and fails.
#![forbid(unsafe_code)]

pub mod arrivals;
pub mod checker;
pub mod clairvoyant;
pub mod cluster;
pub mod dynamic;
pub mod examples;
pub mod faults;
pub mod functions;
pub mod gpus;
pub mod graphs;
pub mod memory;
pub mod report;
pub mod trace;
pub mod workload;

pub use cluster::{Options, run};
pub use report::Report;
pub use workload::{Workload, WorkloadError};
