//! Waiting: one epoll instance over all sockets of an endpoint, and an eventfd with which other threads end a wait.
#![allow(clippy::disallowed_methods)] // Spinning is timed here; no core reads this clock.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{
        EventfdFlags, PollFd, PollFlags, Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
        eventfd, poll,
    },
    io::Errno,
};

/// How long a wait spins, when packets came lately, before it sleeps: longer than a round trip between busy peers, and
/// short against what a wake-up costs them all on a machine with fewer cores than pollers.
const SPIN: Duration = Duration::from_micros(50);
/// Descriptors told by one system call; the rest are told by the next.
const READY_MAX: usize = 64;
/// The kernel takes no arbitrarily long timeouts; callers look around once an hour at least.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);
const WAKER: u64 = u64::MAX;

/// Wakes an endpoint's thread (an eventfd).
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Takes in all calls so far.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0u8; 8]);
    }

    /// Ends the endpoint's current or next `wait`.
    pub fn wake(&self) {
        // It fails only when the count is at its maximum, and then the endpoint is awake already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An epoll instance whose descriptors are known by numbers of their owner's choice, any but `u64::MAX`.
pub(crate) struct Poller {
    epoll: OwnedFd,
    waker: Waker,
    /// Whom the last look found ready.
    ready: Vec<u64>,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = Waker::new()?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        Ok(Self { epoll, waker, ready: Vec::with_capacity(READY_MAX) })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Watches a descriptor until it is closed.
    pub(crate) fn add(&self, descriptor: impl AsFd, number: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, EventData::new_u64(number), interest.flags())?)
    }

    /// Watches a descriptor no more.
    pub(crate) fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, descriptor)?)
    }

    /// Changes what a descriptor is watched for.
    pub(crate) fn modify(&self, descriptor: impl AsFd, number: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, descriptor, EventData::new_u64(number), interest.flags())?)
    }

    /// The numbers of all descriptors that are ready now, into `numbers`.
    pub(crate) fn poll(&mut self, numbers: &mut Vec<u64>) {
        numbers.clear();
        self.sleep(Duration::ZERO);
        numbers.extend(self.ready.iter().filter(|&&number| number != WAKER));
    }

    /// Returns when anything is ready or the time is over. With `spin`, it first stays awake for a little while.
    pub(crate) fn wait(&mut self, timeout: Duration, spin: bool) {
        self.wait_awake(timeout, spin);
        // A waker's call ends here and not in `poll`: one that comes after the caller has looked at its own queues and
        // before it waits must end that wait.
        if self.ready.contains(&WAKER) {
            self.waker.clear();
        }
    }

    fn wait_awake(&mut self, timeout: Duration, spin: bool) {
        if spin {
            let started = Instant::now();
            loop {
                if self.sleep(Duration::ZERO) {
                    return;
                }
                let spun = started.elapsed();
                if spun >= timeout {
                    return;
                }
                if spun >= SPIN {
                    break;
                }
                // Whoever will send us something may need this core for it.
                rustix::thread::sched_yield();
            }
            self.sleep(timeout.saturating_sub(SPIN));
        } else {
            self.sleep(timeout);
        }
    }

    /// Returns whether anything is ready, at the latest after `timeout`.
    fn sleep(&mut self, timeout: Duration) -> bool {
        self.ready.clear();
        if !timeout.is_zero() && !self.sleep_precisely(timeout) {
            return false;
        }
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [MaybeUninit::<Event>::uninit(); READY_MAX];
        match epoll::wait(&self.epoll, &mut events, Some(&at_once)) {
            Ok((events, _)) => self.ready.extend(events.iter().map(|event| { event.data }.u64())),
            // A signal: the caller looks around, as after any wake-up.
            Err(Errno::INTR) => {}
            Err(error) => panic!("epoll on our own descriptor: {error}"),
        }
        !self.ready.is_empty()
    }

    /// Returns whether anything may be ready. `epoll_wait` counts in milliseconds and rounds up, which would make every
    /// timer up to one late; `ppoll` on the epoll instance counts in nanoseconds.
    fn sleep_precisely(&self, timeout: Duration) -> bool {
        let timeout = timeout.min(TIMEOUT_MAX);
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => ready > 0,
            Err(Errno::INTR) => true,
            Err(error) => panic!("poll on our own descriptor: {error}"),
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// What a descriptor is watched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Nothing for now.
    Paused,
    Read,
    ReadWrite,
}

impl Interest {
    fn flags(self) -> EventFlags {
        match self {
            Self::Paused => EventFlags::empty(),
            Self::Read => EventFlags::IN,
            Self::ReadWrite => EventFlags::IN | EventFlags::OUT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn tells_who_is_ready() {
        let mut poller = Poller::new().unwrap();
        let (mut one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        poller.add(&other, 7, Interest::Read).unwrap();
        let mut numbers = vec![99];
        poller.poll(&mut numbers);
        assert!(numbers.is_empty());
        one.write_all(b"x").unwrap();
        poller.wait(Duration::MAX, false);
        poller.poll(&mut numbers);
        assert_eq!(numbers, [7]);
        poller.modify(&other, 7, Interest::Paused).unwrap();
        poller.poll(&mut numbers);
        assert!(numbers.is_empty());
    }

    #[test]
    fn a_waker_ends_one_wait_from_another_thread() {
        let mut poller = Poller::new().unwrap();
        let waker = poller.waker();
        for spin in [false, true] {
            let waker = waker.clone();
            let thread = std::thread::spawn(move || waker.wake());
            poller.poll(&mut Vec::new());
            poller.wait(Duration::MAX, spin);
            thread.join().unwrap();
            assert!(!poller.sleep(Duration::ZERO), "the call was taken in");
        }
    }
}
