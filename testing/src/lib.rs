//! What the tests of all crates share: the one way to skip, the one way to hold a port, and the one way to wait.

mod port;
mod skip;
mod wait;

pub use port::Port;
pub use skip::skip;
pub use wait::{HANG, eventually};
