//! Lets tokio's event loop wait for the transport's endpoint. Holds the crate's only `unsafe`: tokio cannot know that
//! a descriptor stays open.
#![allow(clippy::disallowed_methods)] // A driver: it waits in real time.

use std::{
    future::poll_fn,
    io,
    os::fd::{AsFd, OwnedFd},
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    time::{Instant, Sleep, sleep},
};
use transport::Ready;

/// A timer is set for no longer than this.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Says when an endpoint has something to look at.
#[derive(Debug)]
pub(crate) struct Readiness {
    packets: AsyncFd<OwnedFd>,
    links: AsyncFd<OwnedFd>,
    /// It may be due before anything is: to set it anew costs a system call, so it is set for an earlier time only.
    alarm: Pin<Box<Sleep>>,
}

impl Readiness {
    /// Watches the descriptors of an endpoint, through duplicates of its own. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the process has no descriptor left, or one cannot be watched.
    pub(crate) fn of(packets: &impl AsFd, links: &impl AsFd) -> io::Result<Self> {
        Ok(Self { packets: watched(packets)?, links: watched(links)?, alarm: Box::pin(sleep(Duration::ZERO)) })
    }

    /// Returns when something has got ready since the last return, when somebody rings, or when the time is over,
    /// perhaps earlier. What comes after that counts again, so whoever then looks at everything that is ready misses
    /// nothing. Other tasks of the thread have had a turn by then.
    ///
    /// # Errors
    /// If the event loop is shutting down.
    pub(crate) async fn wait(&mut self, time: Duration, rung: impl Future<Output = ()>) -> io::Result<Ready> {
        let until = Instant::now() + time.min(SLEEP_MAX);
        if self.alarm.is_elapsed() || until < self.alarm.deadline() {
            self.alarm.as_mut().reset(until);
        }
        let (mut rung, mut ready, mut is_over, mut others_had_a_turn) = (pin!(rung), Ready::default(), false, false);
        poll_fn(|context| {
            ready.packets |= take(&self.packets, context)?;
            ready.links |= take(&self.links, context)?;
            is_over = is_over || rung.as_mut().poll(context).is_ready() || self.alarm.as_mut().poll(context).is_ready();
            let is_ready = is_over || ready != Ready::default();
            if is_ready && others_had_a_turn {
                return Poll::Ready(Ok(ready));
            }
            if is_ready {
                context.waker().wake_by_ref();
            }
            others_had_a_turn = true;
            Poll::Pending
        })
        .await
    }
}

fn watched(descriptor: &impl AsFd) -> io::Result<AsyncFd<OwnedFd>> {
    let own = descriptor.as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is valid, and `AsyncFd` owns it: an `OwnedFd` keeps it open, and keeps being it, until the
    // `AsyncFd` drops it.
    Ok(unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) }?)
}

/// Whether a descriptor has got readable since this was true last.
fn take(descriptor: &AsyncFd<OwnedFd>, context: &mut Context<'_>) -> io::Result<bool> {
    match descriptor.poll_read_ready(context) {
        Poll::Ready(guard) => {
            guard?.clear_ready();
            Ok(true)
        }
        Poll::Pending => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use std::{future::ready, io::Write as _, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn what_has_got_ready_is_told_once_and_nothing_else() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (packets, links) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
            let mut readiness = Readiness::of(&packets.0, &links.0).unwrap();
            let (long, never) = (Duration::MAX, std::future::pending::<()>);
            assert_eq!(readiness.wait(Duration::ZERO, never()).await.unwrap(), Ready::default(), "the time is over");
            (&packets.1).write_all(b"x").unwrap();
            assert_eq!(readiness.wait(long, never()).await.unwrap(), Ready { packets: true, links: false });
            assert_eq!(readiness.wait(long, ready(())).await.unwrap(), Ready::default(), "somebody rang");
            (&packets.1).write_all(b"y").unwrap();
            (&links.1).write_all(b"x").unwrap();
            let mut seen = Ready::default();
            while seen != (Ready { packets: true, links: true }) {
                let ready = readiness.wait(long, never()).await.unwrap();
                seen = Ready { packets: seen.packets || ready.packets, links: seen.links || ready.links };
            }
        });
    }
}
