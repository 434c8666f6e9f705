//! How one thread tells another one something, in its process or in another: no locks, and neither side ever waits.
//! Each end belongs to one thread (a single producer, a single consumer).
//!
//! | file | holds |
//! | --- | --- |
//! | `latest` | values of which only the newest counts, each in a slot of its own, and a queue of those that changed |
//! | `ring` | messages that must all arrive, in order |
//! | `doorbell` | how a thread that has nothing to do is woken |
//! | `records` | bytes for another process, through memory that both have mapped |
//!
//! All are small, and know nothing of what they carry, so that loom explores their interleavings in seconds
//! (`RUSTFLAGS="--cfg interleavings" cargo test -p spsc --lib loom`), with controls that must fail.
#![forbid(unsafe_code)]

mod doorbell;
mod latest;
#[cfg(interleavings)]
mod model;
pub mod records;
mod ring;
mod sync;

pub use doorbell::Doorbell;
pub use latest::{LatestReader, LatestWriter, latest};
pub use ring::{Receiver, Sender, ring};
