//! What every arm of the transport must do, written once over its API.
#![allow(clippy::disallowed_methods)] // Strangers have sockets of their own.

mod connect;
mod fabric;
mod faults;
mod frames;
mod incast;
mod lifecycle;
mod sharing;
mod transfers;
