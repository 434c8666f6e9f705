//! Bounds of a backend that several of its parts know.

/// GPUs that one backend can offer: each has a thread and staging memory.
pub const GPUS_MAX: u32 = 64;

/// Where requests choose lengths, l(b) is of tasks as long as this, or of the longest below that there may be.
pub const MEASURED_LENGTH: usize = 256;
