//! What every arm of the transport must do, written once over its API; and what only one of them can be asked.
#![allow(clippy::disallowed_methods)] // Strangers have sockets of their own.

mod certificates;
mod connect;
mod device_events;
mod fabric;
mod faults;
mod frames;
mod incast;
mod killed_peer;
mod lifecycle;
mod link_down;
mod openings;
mod reborn_peer;
mod rings;
mod shared_address;
mod sharing;
mod transfers;
mod windows;
