//! The same names from loom when it explores, and from the standard library and `rtrb` otherwise.

#[cfg(interleavings)]
pub(crate) use crate::model::{Consumer, Producer, RingBuffer};
#[cfg(interleavings)]
pub(crate) use loom::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};
#[cfg(not(interleavings))]
pub(crate) use rtrb::{Consumer, Producer, RingBuffer};
#[cfg(not(interleavings))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};
