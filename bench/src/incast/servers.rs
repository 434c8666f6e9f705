//! The threads of the servers: each serves many, whoever has something to do.
//!
//! A thread for each server would measure the machine's scheduler: with more of them than cores, whoever is answered
//! waits for whole time slices of the others. What a thread serves it learns by one `poll` over all of them; it looks
//! around for a while before it sleeps, as an endpoint does. This is a driver: it owns threads and reads the clock.

use std::{
    io,
    num::NonZero,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread::{self, JoinHandle},
};

use proto::{Span, Timestamp};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    thread::sched_yield,
};
use transport::Clock;

/// How long a thread without work stays awake: as long as an endpoint does.
const SPIN: Span = Span::from_micros(50);
/// A sleep without a timer.
const SLEEP_MAX: Span = Span::from_millis(1_000);

/// One server, whose descriptor is readable when it has something to do.
pub(super) trait Server: AsFd + Send + 'static {
    /// Does what there is to do, without blocking and up to a bound. False if that was nothing.
    ///
    /// # Errors
    /// When it cannot serve any more; it gets no more turns then.
    fn turn(&mut self, now: Timestamp) -> io::Result<bool>;
    /// When it wants a turn even if its descriptor is not ready.
    fn poll_timeout(&self) -> Option<Timestamp>;
}

/// The threads; they end when this is dropped.
pub(super) struct Servers {
    /// Readable once the threads are to end.
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

/// Cores without the reader's, but one at least.
pub(super) fn threads_by_default() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).saturating_sub(1).max(1)
}

impl Servers {
    /// Deals the servers out to `threads` threads, or to fewer if there are fewer servers.
    pub(super) fn start<S: Server>(clock: &Clock, servers: Vec<S>, threads: usize) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut hands: Vec<Vec<S>> = (0..threads.min(servers.len())).map(|_| Vec::new()).collect();
        let dealt_to = hands.len();
        servers.into_iter().enumerate().for_each(|(index, server)| hands[index % dealt_to].push(server));
        let threads = hands.into_iter().map(|servers| {
            let (clock, stop) = (*clock, Arc::clone(&stop));
            thread::spawn(move || serve(&clock, servers, &stop))
        });
        Ok(Self { threads: threads.collect(), stop })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        // It fails only when the count is at its maximum, and then the threads have been told.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// One thread.
fn serve<S: Server>(clock: &Clock, servers: Vec<S>, stop: &OwnedFd) {
    let mut servers: Vec<_> = servers.into_iter().map(|server| (server, true)).collect();
    let mut busy_at = clock.now();
    loop {
        turns(clock.now(), &mut servers);
        let now = clock.now();
        if servers.iter().any(|(_, progressed)| *progressed) {
            busy_at = now;
        }
        let timer = servers.iter().filter_map(|(server, _)| server.poll_timeout()).min();
        let wait = timer.map_or(SLEEP_MAX, |at| (at - now).clamp(Span::ZERO, SLEEP_MAX));
        let wait = if now - busy_at < SPIN { Span::ZERO } else { wait };
        if wait == Span::ZERO && busy_at < now {
            // Whoever will ask us may need this core for it.
            sched_yield();
        }
        let timeout = Timespec::try_from(wait.to_duration()).expect("at most a second");
        let mut watched: Vec<_> =
            servers.iter().map(|(server, _)| PollFd::from_borrowed_fd(server.as_fd(), PollFlags::IN)).collect();
        watched.push(PollFd::new(stop, PollFlags::IN));
        // A signal ends the wait as well as anything.
        let _ = poll(&mut watched, Some(&timeout));
        let ready: Vec<_> = watched.iter().map(|entry| !entry.revents().is_empty()).collect();
        if ready.last() == Some(&true) {
            return;
        }
        servers.iter_mut().zip(ready).for_each(|((_, wants), ready)| *wants |= ready);
    }
}

/// A turn for each server that wants one; its mark then says whether it wants the next at once. Those whose connection
/// is over go.
fn turns<S: Server>(now: Timestamp, servers: &mut Vec<(S, bool)>) {
    servers.retain_mut(|(server, wants)| {
        if *wants || server.poll_timeout().is_some_and(|at| at <= now) {
            match server.turn(now) {
                Ok(progressed) => *wants = progressed,
                Err(_) => return false,
            }
        }
        true
    });
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        os::{fd::BorrowedFd, unix::net::UnixStream},
    };

    use super::*;

    /// Takes a byte a turn; of the byte 0 it dies.
    struct Bytes {
        stream: UnixStream,
        taken: Vec<u8>,
        timer: Option<Timestamp>,
    }

    impl Server for Bytes {
        fn turn(&mut self, _: Timestamp) -> io::Result<bool> {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(1) if byte[0] != 0 => self.taken.push(byte[0]),
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(_) => return Ok(false),
            }
            Ok(true)
        }
        fn poll_timeout(&self) -> Option<Timestamp> {
            self.timer
        }
    }

    impl AsFd for Bytes {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.stream.as_fd()
        }
    }

    fn bytes(sent: &[u8]) -> (UnixStream, Bytes) {
        let (mut far, stream) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        io::Write::write_all(&mut far, sent).unwrap();
        (far, Bytes { stream, taken: Vec::new(), timer: None })
    }

    #[test]
    fn who_wants_gets_a_turn_and_who_fails_goes() {
        let [(_a, ready), (_b, idle), (_c, mut timed), (_d, dying)] = [&[1, 2][..], &[3], &[4], &[0]].map(bytes);
        timed.timer = Some(Timestamp(5));
        let mut servers = vec![(ready, true), (idle, false), (timed, false), (dying, true)];
        turns(Timestamp(4), &mut servers);
        let state =
            |servers: &[(Bytes, bool)]| servers.iter().map(|(one, wants)| (one.taken.clone(), *wants)).collect();
        let found: Vec<(Vec<u8>, bool)> = state(&servers);
        assert_eq!(found, [(vec![1], true), (vec![], false), (vec![], false)]);
        turns(Timestamp(5), &mut servers);
        let found: Vec<(Vec<u8>, bool)> = state(&servers);
        assert_eq!(found, [(vec![1, 2], true), (vec![], false), (vec![4], true)]);
    }

    #[test]
    fn threads_end_with_their_owner_whether_they_sleep_or_not() {
        for threads in [1, 2, 9] {
            let (ends, servers): (Vec<_>, Vec<_>) = (0..3).map(|_| bytes(&[1])).unzip();
            let started = Servers::start(&Clock::start(), servers, threads).unwrap();
            assert_eq!(started.threads.len(), threads.min(3));
            drop(started);
            drop(ends);
        }
    }
}
