//! Lets tokio's event loop wait for the transport's endpoint. Holds the crate's only `unsafe`: tokio cannot know that
//! a descriptor stays open.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use tokio::io::{Interest, unix::AsyncFd};

/// Says when a descriptor has become readable.
#[derive(Debug)]
pub(crate) struct Readiness(AsyncFd<OwnedFd>);

impl Readiness {
    /// Watches a descriptor, through a duplicate of its own. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the process has no descriptor left, or the descriptor cannot be watched.
    pub(crate) fn of(watched: &impl AsFd) -> io::Result<Self> {
        let own = watched.as_fd().try_clone_to_owned()?;
        // SAFETY: the descriptor is valid, and `AsyncFd` owns it: an `OwnedFd` keeps it open, and keeps being it, until
        // the `AsyncFd` drops it.
        let watched = unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) }?;
        Ok(Self(watched))
    }

    /// Returns when the descriptor has become readable since the last return. What comes after that counts again, so
    /// whoever then looks at everything misses nothing.
    ///
    /// # Errors
    /// If the event loop is shutting down.
    pub(crate) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}
