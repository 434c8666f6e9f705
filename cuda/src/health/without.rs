//! A program that uses no GPUs asks for none.

use super::{GpuHealth, Health};

/// What would be asked: there is none.
pub enum Management {}

impl Management {
    /// Opens none.
    ///
    /// # Errors
    /// Always: says what has it.
    pub fn open() -> Result<Self, String> {
        Err(crate::WITHOUT_GPUS.to_owned())
    }

    /// Nobody asks.
    ///
    /// # Errors
    /// None.
    pub fn all(&self) -> Result<Health, String> {
        match *self {}
    }

    /// Nobody asks.
    ///
    /// # Errors
    /// None.
    pub fn at(&self, _: &str) -> Result<GpuHealth, String> {
        match *self {}
    }
}
