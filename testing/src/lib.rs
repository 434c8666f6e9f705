//! What the tests of all crates share: the one way to skip, to hold a port, to wait, and to have a Redis.

mod port;
mod redis;
mod skip;
mod wait;

pub use port::Port;
pub use redis::RedisServer;
pub use skip::skip;
pub use wait::{HANG, eventually};
