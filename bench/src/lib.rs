//! Measurements of downbeat, each a subcommand of `downbeat bench`.
#![forbid(unsafe_code)]

pub mod figures;
pub mod goodput;
pub mod incast;
pub mod load;
mod percentiles;
pub mod real_time;
pub mod scheduler;
mod stalls;
pub mod verbs;

pub use percentiles::{Percentiles, Tail};
