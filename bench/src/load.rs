//! The load generator: open loop over HTTP. Requests leave when the arrival process says so, whether or not earlier
//! ones have been answered, and latency counts from that intended instant, so a slow server cannot hide behind a
//! waiting client (coordinated omission).

mod drive;
mod request;
mod tally;

pub use drive::{LoadError, Target, first_input, generate, is_ready};
pub use request::{Arrivals, Expected, Input, Stream};
pub use tally::{Report, Stages, Tally};
