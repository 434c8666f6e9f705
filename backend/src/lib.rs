//! Step 7, Step 8, Step 9 of a request's way.
//!
//! The backend fetches the inputs of a batch plan out of the frontends' memory, executes the batch in its window, and
//! pushes the outputs back.
#![deny(unsafe_code)]

pub mod calls;
pub mod config;
pub mod core;
pub mod drive;
pub mod error;
pub mod executor;
pub mod health;
pub mod limits;
pub mod links;
pub mod memory;
pub mod program_metrics;
pub mod staging;
pub mod worker;
