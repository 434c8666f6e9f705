//! What this machine makes threads wait for without any work: the part of every measured wait that is not ours.
//!
//! This is a driver: it owns threads and reads the clock.
#![allow(clippy::disallowed_methods)]

use std::{
    thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;

use crate::percentiles::{Tail, nanoseconds};

/// A request arrives this often at each thread.
const GAP_NS: u64 = 1_000;

/// How long requests wait that arrive every microsecond at each of so many threads, which do nothing but look at the
/// clock, for `length`. In an undisturbed machine about a microsecond; the largest is the longest gap between two
/// looks.
#[must_use]
pub fn measure(threads: u32, length: Duration) -> Tail {
    let waits = thread::scope(|scope| {
        let spinning: Vec<_> = (0..threads).map(|_| scope.spawn(|| spin(length))).collect();
        let mut waits = nanoseconds();
        for thread in spinning {
            waits.add(thread.join().expect("a spinning thread panicked")).expect("all histograms are alike and resize");
        }
        waits
    });
    Tail::of(&waits)
}

fn spin(length: Duration) -> Histogram<u64> {
    let mut waits = nanoseconds();
    let start = Instant::now();
    let (mut last_ns, end_ns) = (0, length.as_nanos() as u64);
    while last_ns < end_ns {
        let now_ns = start.elapsed().as_nanos() as u64;
        if now_ns - last_ns >= GAP_NS {
            // The gap itself, and what is left of it for each request that arrived in it.
            waits.record_correct(now_ns - last_ns, GAP_NS).expect("the histogram resizes");
            last_ns = now_ns;
        }
        std::hint::spin_loop();
    }
    waits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_sees_gaps() {
        let tail = measure(2, Duration::from_millis(5));
        assert!(tail.p50 >= 1.0 && tail.max >= tail.p9999, "{tail:?}");
    }
}
