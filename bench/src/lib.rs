//! Measurements of downbeat, each a subcommand of `downbeat bench`.
#![forbid(unsafe_code)]

pub mod goodput;
pub mod incast;
mod percentiles;
pub mod real_time;
pub mod scheduler;
pub mod stalls;
pub mod verbs;

pub use percentiles::{Percentiles, Tail, nanoseconds};
