//! Where peers connect to us: a thread that takes in whoever comes, and hands on only who has proved itself. So the
//! thread that moves packets never waits for a stranger's TLS, and has nothing of a stranger in its tables.
//!
//! Life of a connection here: accepted into the pool of [`Strangers`]; its bootstrap runs up to the proof; then it
//! leaves this thread's poller and goes to the endpoint, over a bounded channel and with a bell. What fails, is too
//! late or must make room is closed, counted, and told in a line a second.
#![allow(clippy::disallowed_methods)] // A driver: it owns sockets, a clock and a thread.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread::{Builder, JoinHandle},
};

use proto::{Span, Timestamp};
use socket2::{Domain, Protocol, Socket, Type};

use super::Membership;
use crate::{
    Clock,
    bootstrap::{Bootstrap, BootstrapEvent, NONCE_BYTES},
    certificates::Certificates,
    limits::HANDSHAKE_MAX,
    link::{Link, READ_BYTES},
    notes::Notes,
    poller::{Interest, Waker, Watch},
    strangers::{STRANGERS_MAX, Strangers},
};

/// Connections accepted in one turn.
const ACCEPTS_MAX: usize = 16;
/// How long we stop accepting when the system has no descriptors left.
const ACCEPT_PAUSE: Span = Span::from_millis(100);
/// Connections that the system holds for us until we accept them: more than come in while a TLS handshake is computed.
const BACKLOG: i32 = 1024;
/// Proved connections that wait for the endpoint's next turn.
const HANDOVERS_MAX: usize = 64;
/// The listener's number among those that are watched, and that of who ends the thread; strangers count from 1.
const LISTENER: u64 = 0;
const WAKER: u64 = u64::MAX;

/// The endpoint's end.
pub(super) struct Acceptor {
    pub(super) address: SocketAddr,
    proved: Receiver<Proved>,
    bell: Waker,
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

/// A peer that has proved itself.
pub(super) struct Proved {
    pub(super) link: Link,
    pub(super) peer: SocketAddr,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    refused: AtomicU64,
}

impl Acceptor {
    /// Listens, and starts the thread.
    pub(super) fn open(at: SocketAddr, members: Membership, certificates: Option<Certificates>) -> io::Result<Self> {
        let socket = listen(at)?;
        let address = socket.local_addr()?;
        let (watch, waker) = (Watch::new()?, Waker::new()?);
        watch.add(&socket, LISTENER, Interest::Read)?;
        watch.add(&waker, WAKER, Interest::Read)?;
        let (bell, shared) = (Waker::new()?, Arc::new(Shared::default()));
        let (sender, proved) = sync_channel(HANDOVERS_MAX);
        let mut reception = Reception {
            socket,
            watch,
            clock: Clock::start(),
            members,
            certificates,
            strangers: Strangers::new(STRANGERS_MAX, HANDSHAKE_MAX),
            refusals: Notes::default(),
            paused_until: None,
            proved: sender,
            bell: bell.clone(),
            shared: Arc::clone(&shared),
            buffer: vec![0; READ_BYTES].into(),
            ready: Vec::new(),
        };
        let run = move || {
            while !reception.shared.stop.load(Ordering::Acquire) {
                reception.turn();
            }
        };
        let thread = Builder::new().name("acceptor".to_owned()).spawn(run)?;
        Ok(Self { address, proved, bell, shared, waker, thread: Some(thread) })
    }

    /// Strangers that were sent away so far.
    pub(super) fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// At most `most` of those that have proved themselves since.
    pub(super) fn take(&self, most: usize) -> Vec<Proved> {
        self.bell.clear();
        let taken: Vec<_> = self.proved.try_iter().take(most).collect();
        if taken.len() == most {
            // There may be more, and nobody rings for them again.
            self.bell.wake();
        }
        taken
    }
}

impl AsFd for Acceptor {
    /// Readable when [`Acceptor::take`] has something.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Drop for Acceptor {
    /// When this returns, the address can be listened at again.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // It only fails if the thread panicked, which has been told.
            let _ = thread.join();
        }
    }
}

fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
    // So a restart need not wait for old connections to time out.
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// The thread's end.
struct Reception {
    socket: TcpListener,
    watch: Watch,
    clock: Clock,
    members: Membership,
    certificates: Option<Certificates>,
    strangers: Strangers<Visitor>,
    refusals: Notes,
    /// Set while the system has no descriptors left.
    paused_until: Option<Timestamp>,
    proved: SyncSender<Proved>,
    bell: Waker,
    shared: Arc<Shared>,
    buffer: Box<[u8]>,
    ready: Vec<u64>,
}

struct Visitor {
    link: Link,
    peer: SocketAddr,
    interest: Interest,
}

impl Reception {
    /// Sleeps until there is something to do, and does it.
    fn turn(&mut self) {
        let due = [self.strangers.poll_timeout(), self.refusals.poll_timeout(), self.paused_until];
        let until = due.into_iter().flatten().min().unwrap_or(Timestamp::NEVER);
        self.watch.wait((until - self.clock.now()).to_duration());
        let now = self.clock.now();
        let mut ready = std::mem::take(&mut self.ready);
        self.watch.poll(&mut ready);
        for &number in &ready {
            match number {
                LISTENER => self.accept(now),
                // To stop, which is looked at next.
                WAKER => {}
                number => {
                    if let Some(visitor) = self.strangers.get_mut(number) {
                        visitor.link.handle_ready(now, &mut self.buffer);
                        self.look_at(number);
                    }
                }
            }
        }
        self.ready = ready;
        self.run_timers(now);
    }

    fn accept(&mut self, now: Timestamp) {
        for _ in 0..ACCEPTS_MAX {
            let (stream, peer) = match self.socket.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    let pause = format!("accepting nobody for {ACCEPT_PAUSE}: {error}; raise the limit of open files");
                    self.refusals.note(pause);
                    self.paused_until = Some(now + ACCEPT_PAUSE);
                    let _ = self.watch.modify(&self.socket, LISTENER, Interest::Paused);
                    return;
                }
            };
            let bootstrap = Bootstrap::server(now, self.members.identity(), rand::random::<[u8; NONCE_BYTES]>());
            let tls = self.certificates.as_ref().map(Certificates::known);
            let Ok(link) = Link::accepted(stream, tls.as_ref(), bootstrap) else { continue };
            let visitor = Visitor { link, peer, interest: Interest::Read };
            let (number, evicted) = self.strangers.admit(now, peer.ip(), visitor);
            if let Some(evicted) = evicted {
                self.refuse(evicted, "too many connect at once that do not prove themselves; try again");
            }
            if let Some(visitor) = self.strangers.get_mut(number)
                && let Err(error) = self.watch.add(&visitor.link, number, visitor.interest)
            {
                let visitor = self.strangers.remove(number);
                visitor.into_iter().for_each(|visitor| self.refuse(visitor, &format!("cannot be watched: {error}")));
            }
        }
    }

    /// Goes on with a stranger that was heard.
    fn look_at(&mut self, number: u64) {
        let Some(visitor) = self.strangers.get_mut(number) else { return };
        if visitor.link.bootstrap.is_proved() {
            let visitor = self.strangers.remove(number);
            return visitor.into_iter().for_each(|visitor| self.hand_over(visitor));
        }
        if let Some(reason) = end_of(&mut visitor.link.bootstrap) {
            let visitor = self.strangers.remove(number);
            return visitor.into_iter().for_each(|visitor| self.refuse(visitor, &reason));
        }
        let wanted = if visitor.link.wants_write() { Interest::ReadWrite } else { Interest::Read };
        if wanted != visitor.interest && self.watch.modify(&visitor.link, number, wanted).is_ok() {
            visitor.interest = wanted;
        }
    }

    fn hand_over(&mut self, Visitor { link, peer, .. }: Visitor) {
        // Its descriptor lives on; the endpoint's poller watches it from now on.
        let _ = self.watch.remove(&link);
        match self.proved.try_send(Proved { link, peer }) {
            Ok(()) => self.bell.wake(),
            Err(TrySendError::Full(Proved { link, peer }) | TrySendError::Disconnected(Proved { link, peer })) => {
                let visitor = Visitor { link, peer, interest: Interest::Paused };
                self.refuse(visitor, "too many peers connect at once; try again");
            }
        }
    }

    /// The end of one, who is told why as far as its socket takes it at once.
    fn refuse(&mut self, Visitor { mut link, peer, .. }: Visitor, reason: &str) {
        link.bootstrap.close(reason);
        link.transmit();
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
        self.refusals.note(format_args!("{peer}: {reason}"));
    }

    fn run_timers(&mut self, now: Timestamp) {
        while let Some(mut late) = self.strangers.poll_overdue(now) {
            late.link.bootstrap.handle_timeout(now);
            let reason = end_of(&mut late.link.bootstrap).unwrap_or_else(|| "its time is over".to_owned());
            self.refuse(late, &reason);
        }
        if self.paused_until.is_some_and(|until| now >= until)
            && self.watch.modify(&self.socket, LISTENER, Interest::Read).is_ok()
        {
            self.paused_until = None;
        }
        if let Some((count, last)) = self.refusals.poll_line(now) {
            tracing::warn!(count, "refused connections; the last one: {last}");
        }
    }
}

/// Why a bootstrap has ended, if it has.
fn end_of(bootstrap: &mut Bootstrap) -> Option<String> {
    std::iter::from_fn(|| bootstrap.poll_event()).find_map(|event| match event {
        BootstrapEvent::Closed(reason) => Some(reason),
        _ => None,
    })
}
