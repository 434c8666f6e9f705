//! What every arm of the transport must do, written once over its API.

mod connect;
mod fabric;
mod faults;
mod frames;
mod incast;
mod lifecycle;
mod sharing;
mod transfers;
