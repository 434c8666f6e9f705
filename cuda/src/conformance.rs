//! What must hold of every [`Driver`], and of GPUs and models on it: run on the CPU by this crate's tests, and on a
//! real GPU by `examples/conformance.rs`.
//!
//! A case fails by its error, or by a panic. It gives back all that it takes.

#![allow(clippy::disallowed_methods, reason = "batches, loads and registrations come from several threads")]

mod driver;
pub(crate) mod gpu;
pub(crate) mod samples;

use std::{fmt, sync::Arc};

use transport::Region;

use crate::{DriverError, GpuError, driver::Driver};

/// One of them.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What holds if it passes.
    pub name: &'static str,
    /// Tries it.
    pub run: fn(&Arc<dyn Driver>) -> Result<(), Failure>,
}

/// Why a case failed, in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self(error.to_string())
    }
}

impl From<GpuError> for Failure {
    fn from(error: GpuError) -> Self {
        Self(error.to_string())
    }
}

/// All cases, simple ones first.
#[must_use]
pub fn cases() -> Vec<Case> {
    driver::CASES.iter().chain(gpu::CASES).copied().collect()
}

fn check(holds: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure(what())) }
}

/// Host memory with these bytes.
fn host(bytes: &[u8]) -> Result<Region, Failure> {
    Ok(crate::image(bytes)?)
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
