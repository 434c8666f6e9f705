//! The frontend: admits requests, keeps their inputs in registered slots for backends to READ, and answers them when
//! the outputs have been written there. Programs link it and ask through a [`Client`]; the crate `gateway` serves HTTP
//! and gRPC with it.
#![deny(unsafe_code)]

pub mod arena;
pub mod changes;
pub mod client;
pub mod config;
pub mod core;
pub mod desk;
pub mod drive;
mod durations;
pub mod error;
pub mod models;
// The one place where tokio needs a promise about a descriptor.
#[allow(unsafe_code)]
mod readiness;
mod records;
pub mod request;
pub mod rope;
pub mod slots;
mod spoken;
pub mod tasks;
#[cfg(test)]
mod testing;

pub use client::{Client, Infer, Inferred, OutputTensor};
pub use config::Config;
pub use drive::{Frontend, FrontendError, check};
pub use error::InferError;
pub use models::excerpt;
pub use request::InputTensor;
