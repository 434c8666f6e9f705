//! The gateway: clients reach a frontend through it over HTTP and gRPC, in the Open Inference Protocol. It checks who
//! they are, turns pictures into tensors, and tells what became of requests in metrics, statistics and traces.
#![deny(unsafe_code)]

pub mod access;
mod ahead;
pub mod api;
pub mod budget;
pub mod cache;
pub mod compression;
pub mod config;
pub mod connection;
mod conversation;
pub mod drive;
mod export;
pub mod grpc;
// The one place that calls the C library.
#[allow(unsafe_code)]
mod heap;
pub mod image;
mod limits;
pub mod loads;
pub mod metrics;
mod picture;
mod poll;
pub mod pool;
mod probes;
pub mod protocol;
pub mod recent;
pub mod record;
mod redis;
pub mod regions;
pub mod rest;
pub mod selections;
pub mod server;
pub mod service;
pub mod settings;
pub mod statistics;
#[cfg(test)]
mod testing;
pub mod trace;
pub mod trace_file;
mod vital;

pub use config::Config;
pub use drive::{Control, Gateway, GatewayError, check, run};
