//! The load generator. In open loop requests leave when the arrival process says so, whether or not earlier ones have
//! been answered, and latency counts from that intended instant, so a slow server cannot hide behind a waiting client
//! (coordinated omission).

mod arrivals;
mod charts;
mod command;
mod drive;
mod exchange;
mod grpc;
mod http;
mod log;
mod pacer;
mod recorded;
mod request;
mod server;
mod tally;
mod timeline;

pub use arrivals::{Arrivals, Rate};
pub use charts::latency_chart;
pub use command::{Args, Plan, StreamPlan};
pub use drive::{LoadError, Target, first_inputs, generate, is_ready};
pub use exchange::{Encoding, InputShape, Wire};
pub use log::write_log;
pub use request::{Expected, Input, Stream};
pub use server::Tls;
pub use tally::{Report, Stages, Tally};
pub use timeline::{Interval, Timeline};
