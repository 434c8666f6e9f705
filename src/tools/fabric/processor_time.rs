//! The processor time of another process, thread by thread, as Linux accounts it.

use std::{fs, io, path::Path};

/// Since the process started, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessorTime {
    /// Of the thread that runs `main`.
    pub first_thread_ns: u64,
    /// Of all others that live.
    pub other_threads_ns: u64,
}

impl ProcessorTime {
    /// `None` if there is no such process, or the kernel does not tell (`CONFIG_SCHED_INFO`).
    pub(super) fn of(process: u32) -> Option<Self> {
        let mut time = Self { first_thread_ns: 0, other_threads_ns: 0 };
        for thread in fs::read_dir(format!("/proc/{process}/task")).ok()? {
            let thread = thread.ok()?;
            let schedstat = match fs::read_to_string(thread.path().join("schedstat")) {
                Ok(schedstat) => schedstat,
                Err(error) if has_ended(&error, &thread.path()) => continue,
                Err(_) => return None,
            };
            let ns = run_time_ns(&schedstat)?;
            // The first thread's id is the process's.
            if thread.file_name().to_str() == Some(&process.to_string()) {
                time.first_thread_ns = ns;
            } else {
                time.other_threads_ns += ns;
            }
        }
        Some(time)
    }
}

/// The first number of a `schedstat`: time on a processor (Documentation/scheduler/sched-stats.rst).
fn run_time_ns(schedstat: &str) -> Option<u64> {
    schedstat.split_whitespace().next()?.parse().ok()
}

/// Whether the thread ended after it was listed: its folder is gone (`ENOENT`), or was just open
/// (`ESRCH`).
fn has_ended(error: &io::Error, thread: &Path) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        || error.kind() == io::ErrorKind::NotFound && !thread.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "threads come and go here")]
    fn threads_that_end_while_they_are_counted_are_left_out() {
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    std::thread::spawn(|| ()).join().unwrap();
                }
            });
            let counted = (0..2_000).all(|_| ProcessorTime::of(std::process::id()).is_some());
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(counted);
        });
    }

    #[test]
    fn work_counts_for_the_process_and_a_process_that_is_gone_has_none() {
        let own = || ProcessorTime::of(std::process::id());
        let Some(mut before) = own() else { return };
        // Threads of other tests end meanwhile, and their time with them.
        let is_counted = (0..1000).any(|_| {
            let sum = (0..1_000_000u64).fold(0u64, |sum, next| sum.wrapping_mul(31) ^ next);
            std::hint::black_box(sum);
            let last = std::mem::replace(&mut before, own().unwrap());
            before.other_threads_ns > last.other_threads_ns
        });
        assert!(is_counted, "this test runs on a thread of its own");
        assert_eq!(ProcessorTime::of(u32::MAX), None);
    }
}
