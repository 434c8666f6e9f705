//! The load generator. In open loop requests leave when the arrival process says so, whether or not earlier ones have
//! been answered, and latency counts from that intended instant, so a slow server cannot hide behind a waiting client
//! (coordinated omission).
#![forbid(unsafe_code)]

mod answer;
mod answered;
mod args;
mod arrivals;
mod charts;
mod client;
mod command;
mod drive;
mod grpc;
mod http;
mod log;
mod pacer;
mod recorded;
mod request;
mod rows;
mod server;
pub mod tables;
mod tally;
mod target;
mod timeline;

pub use answered::Answered;
pub use args::{Args, Plan, StreamPlan};
pub use arrivals::{Arrivals, Instants, Rate};
pub use command::{progress_bar, run};
pub use drive::{LoadError, generate, is_ready, metrics};
pub use pacer::Pacer;
pub use request::{Expected, Input, Stream};
pub use tally::{Report, Stages, Tally};
pub use target::{Encoding, Target, Tls, Wire};
pub use timeline::{Interval, Timeline};
