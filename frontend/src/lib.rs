//! The frontend: admits requests, keeps their inputs in registered slots for backends to READ, and answers them when
//! the outputs have been written there.
#![deny(unsafe_code)]

pub mod access;
pub mod api;
pub mod changes;
pub mod client;
pub mod compression;
pub mod config;
pub mod core;
pub mod desk;
pub mod drive;
pub mod error;
pub mod grpc;
mod image;
pub mod metrics;
pub mod models;
pub mod protocol;
// The one place where tokio needs a promise about a descriptor.
#[allow(unsafe_code)]
mod readiness;
pub mod recent;
pub mod regions;
pub mod rest;
pub mod rope;
pub mod server;
pub mod service;
pub mod settings;
pub mod slots;
pub mod statistics;
pub mod tasks;
#[cfg(test)]
mod testing;
pub mod trace;

pub use client::{Client, Infer, Inferred, OutputTensor};
pub use config::Config;
pub use drive::{Frontend, FrontendError, run};
pub use error::InferError;
#[cfg(fuzzing)]
pub use image::tensor_of;
pub use protocol::InputTensor;
