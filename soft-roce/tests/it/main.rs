//! The whole crate by its public API, in one program: each file has a subject.

mod common;
mod datagrams;
mod fast_path;
mod golden;
mod hostile_network;
mod hostile_peer;
mod hostile_sharing;
mod kernel;
mod loss;
mod operations;
mod refusals;
mod requester;
mod responder;
mod scatter_gather;
mod shared_receive_queue;
#[cfg(feature = "udp")]
mod sharing;
#[cfg(feature = "udp")]
mod socket_limits;
mod states;
mod statuses;
