//! How much memory an input takes up: no more than is charged for it.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is the system's allocator, with counters beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(HELD.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Panics if `work` takes up more than so many bytes at once.
pub fn check(bytes_max: usize, work: impl FnOnce()) {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    work();
    let peak = PEAK.load(Relaxed) - before;
    assert!(peak <= bytes_max, "found {peak} bytes at once, expected at most {bytes_max}");
}
