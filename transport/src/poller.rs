//! Waiting: one epoll instance over the sockets that peers' bootstraps use, one over what packets come by, and an
//! eventfd with which other threads end a wait. They are apart so that one system call tells which of them to look at.
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
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// Looks at memory for one at descriptors, while awake.
const LOOKS_PER_CALL: usize = 16;
/// Descriptors told by one system call; the rest are told by the next.
const READY_MAX: usize = 64;
/// The kernel takes no arbitrarily long timeouts; callers look around once an hour at least.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

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

/// An epoll instance whose descriptors are known by numbers of their owner's choice.
pub(crate) struct Watch(OwnedFd);

impl Watch {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Watches a descriptor until it is closed.
    pub(crate) fn add(&self, descriptor: impl AsFd, number: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, descriptor, EventData::new_u64(number), interest.flags())?)
    }

    /// Watches a descriptor no more.
    pub(crate) fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, descriptor)?)
    }

    /// Changes what a descriptor is watched for.
    pub(crate) fn modify(&self, descriptor: impl AsFd, number: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, descriptor, EventData::new_u64(number), interest.flags())?)
    }

    /// The numbers of descriptors that are ready now, into `numbers`.
    pub(crate) fn poll(&self, numbers: &mut Vec<u64>) {
        numbers.clear();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [MaybeUninit::<Event>::uninit(); READY_MAX];
        match epoll::wait(&self.0, &mut events, Some(&at_once)) {
            Ok((events, _)) => numbers.extend(events.iter().map(|event| { event.data }.u64())),
            // A signal: the caller looks again.
            Err(Errno::INTR) => {}
            Err(error) => panic!("epoll on our own descriptor: {error}"),
        }
    }

    /// Returns when any is ready, or the time is over.
    pub(crate) fn wait(&self, timeout: Duration) {
        sleep(&mut [PollFd::new(&self.0, PollFlags::IN)], timeout);
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What an endpoint has to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ready {
    /// Packets or completions have come, or there is room again to send.
    pub packets: bool,
    /// Peers' bootstraps, or those who connect, have something to say.
    pub links: bool,
}

/// What an endpoint waits for.
pub(crate) struct Poller {
    pub(crate) packets: Watch,
    pub(crate) links: Watch,
    waker: Waker,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { packets: Watch::new()?, links: Watch::new()?, waker: Waker::new()? })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Looks for a little while, without sleeping. What is ready, if anything or the time is over; `has_come` tells of
    /// packets that no descriptor tells of.
    pub(crate) fn stay_awake(&self, time: Duration, has_come: impl Fn() -> bool) -> Option<Ready> {
        let started = Instant::now();
        loop {
            let mut watched = self.watched();
            if sleep(&mut watched, Duration::ZERO) {
                return Some(self.ready(watched));
            }
            // Each look at them costs a small part of a system call.
            for _ in 0..LOOKS_PER_CALL {
                if has_come() {
                    return Some(Ready { packets: true, links: false });
                }
                std::hint::spin_loop();
            }
            let spun = started.elapsed();
            if spun >= time {
                return Some(Ready::default());
            }
            if spun >= SPIN {
                return None;
            }
            // Whoever will send us something may need this core for it.
            rustix::thread::sched_yield();
        }
    }

    /// Returns when anything is ready, and what, or the time is over.
    pub(crate) fn sleep(&self, time: Duration) -> Ready {
        let mut watched = self.watched();
        sleep(&mut watched, time);
        self.ready(watched)
    }

    fn watched(&self) -> [PollFd<'_>; 3] {
        [self.packets.as_fd(), self.links.as_fd(), self.waker.as_fd()]
            .map(|watched| PollFd::from_borrowed_fd(watched, PollFlags::IN))
    }

    fn ready(&self, watched: [PollFd<'_>; 3]) -> Ready {
        let [packets, links, waker] = watched.map(|watched| !watched.revents().is_empty());
        // A call that comes after the caller has looked at its own queues and before it waits ends that wait, so calls
        // are taken in nowhere else.
        if waker {
            self.waker.clear();
        }
        Ready { packets, links }
    }
}

/// Whether anything may be ready, at the latest after `timeout`. `epoll_wait` counts in milliseconds and rounds up,
/// which would make every timer up to one late; `ppoll` counts in nanoseconds.
fn sleep(watched: &mut [PollFd<'_>], timeout: Duration) -> bool {
    let timeout = timeout.min(TIMEOUT_MAX);
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match poll(watched, Some(&timeout)) {
        Ok(ready) => ready > 0,
        // A signal: the caller looks around, as after any wake-up.
        Err(Errno::INTR) => {
            watched.iter_mut().for_each(PollFd::clear_revents);
            true
        }
        Err(error) => panic!("poll on our own descriptors: {error}"),
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
        let poller = Poller::new().unwrap();
        let (mut one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        poller.links.add(&other, 7, Interest::Read).unwrap();
        let mut numbers = vec![99];
        poller.links.poll(&mut numbers);
        assert!(numbers.is_empty());
        one.write_all(b"x").unwrap();
        assert_eq!(poller.sleep(Duration::MAX), Ready { packets: false, links: true });
        poller.links.poll(&mut numbers);
        assert_eq!(numbers, [7]);
        poller.links.modify(&other, 7, Interest::Paused).unwrap();
        assert_eq!(poller.sleep(Duration::ZERO), Ready::default());
        poller.packets.add(&other, 0, Interest::Read).unwrap();
        let packets = Ready { packets: true, links: false };
        assert_eq!(poller.stay_awake(Duration::MAX, || false), Some(packets));
        poller.packets.remove(&other).unwrap();
        assert_eq!(poller.stay_awake(Duration::MAX, || true), Some(packets), "in memory");
        assert_eq!(poller.stay_awake(Duration::ZERO, || false), Some(Ready::default()), "the time is over");
        assert_eq!(poller.stay_awake(Duration::MAX, || false), None);
    }

    #[test]
    fn a_waker_ends_one_wait_from_another_thread() {
        let poller = Poller::new().unwrap();
        for _ in 0..2 {
            let waker = poller.waker();
            let thread = std::thread::spawn(move || waker.wake());
            assert_eq!(poller.sleep(Duration::MAX), Ready::default());
            thread.join().unwrap();
            let mut waker = [PollFd::new(&poller.waker, PollFlags::IN)];
            assert!(!sleep(&mut waker, Duration::ZERO), "the call was taken in");
        }
    }
}
