//! Waits for an instant with the kernel's resolution: the runtime's own timer wheel counts in milliseconds, which is a
//! good part of the latencies measured here.
#![allow(clippy::disallowed_methods, reason = "waits in real time, as part of the load generator's driver")]

use std::time::Instant;

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::unix::AsyncFd;

/// A timer of the kernel; belongs to the event loop that it was made in.
pub struct Pacer(AsyncFd<std::os::fd::OwnedFd>);

impl Pacer {
    /// A timer in this event loop.
    ///
    /// # Errors
    /// If the system gives none.
    pub fn new() -> std::io::Result<Self> {
        let timer =
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        // An `OwnedFd` keeps its descriptor for its whole life, which is what the unsafe `register` asks its caller
        // for.
        #[expect(deprecated, reason = "the replacement is unsafe, and this crate forbids that")]
        let timer = AsyncFd::new(timer)?;
        Ok(Self(timer))
    }

    /// Returns at that instant, or at once if it has passed.
    pub async fn wait_until(&self, instant: Instant) {
        let left = instant.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // Still let answers in: a generator that is late must not starve what it measures.
            tokio::task::yield_now().await;
            return;
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let once = Itimerspec { it_interval: zero, it_value: left };
        rustix::time::timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::empty(), &once)
            .expect("a timer of this process takes a valid time");
        if let Ok(mut ready) = self.0.readable().await {
            // Whether the read finds an expiration or not, the next wait arms the timer anew.
            let _ = rustix::io::read(self.0.get_ref(), &mut [0u8; 8]);
            ready.clear_ready();
        }
    }
}
