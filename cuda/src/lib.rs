//! Lowered models ([`lowering::Plan`]) on NVIDIA GPUs.
//!
//! Everything that is asked of a GPU goes through [`driver::Driver`]: the real one loads libcuda, cuBLASLt and cuDNN
//! when it is opened, and nothing before; the other one computes on the CPU and insists on the rules that make a GPU
//! predictable, so that what is built on it is tested on any machine.

pub mod driver;

pub use driver::{Driver, DriverError};
