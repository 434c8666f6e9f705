//! Lowered models ([`lowering::Plan`]) on NVIDIA GPUs: each [`Gpu`] holds the weights of some of the models that it
//! hosts ([`Hosted`]), and runs one batch at a time as one graph.
//!
//! Everything that is asked of a GPU goes through [`driver::Driver`]: the real one loads libcuda, cuBLASLt and cuDNN
//! when it is opened, and nothing before; the other one computes on the CPU and insists on the rules that make a GPU
//! predictable, so that what is built on it is tested on any machine.
#![deny(unsafe_code)]

pub mod conformance;
pub mod driver;
mod gpu;
mod handles;
mod health;
mod host;
#[cfg(feature = "driver")]
mod kernels;
mod landing;
mod model;
mod pages;
mod random;

/// Why a program without the feature `driver` uses no GPU, and what has it.
pub const WITHOUT_GPUS: &str =
    "this program was built without GPUs; `cargo build --release --features cuda` builds one that serves them";

pub use driver::{Driver, DriverError, fake::Fake};
pub use gpu::{BATCH_MAX, Gpu, GpuError, PinnedRegion, SLOTS, Settings, Slot, image};
#[cfg(feature = "driver")]
pub use health::nvml::library as management_library;
pub use health::{Brake, GpuHealth, Health, Management, health};
pub use host::{DirectAccess, Library};
pub use landing::Landing;
pub use model::{Form, Hosted, Measured, Part, Ran};
