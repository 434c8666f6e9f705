//! What the tests of all crates share: the one way to skip, to hold a port, to wait, and to have a Redis.

mod path;
mod port;
mod redis;
mod skip;
mod wait;

pub use path::{local_path, run_again_by_udp};
pub use port::Port;
pub use redis::RedisServer;
pub use skip::skip;
pub use wait::{HANG, eventually};
