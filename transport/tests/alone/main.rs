//! What looks at the whole process: one test at a time, in a program of their own.

#[path = "../conformance/fabric.rs"]
#[allow(dead_code)]
mod fabric;
mod hugepages;
mod strangers;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by each test, as all of them look at one process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
