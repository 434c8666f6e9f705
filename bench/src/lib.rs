//! Measurements of downbeat, each a subcommand of `downbeat bench`.
#![forbid(unsafe_code)]

pub mod goodput;
pub mod load;
pub mod scheduler;
