//! Step 1: a request's body as it comes in: bounded, counted against what all bodies may take up together, and timed.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use thiserror::Error;
use tokio::time::{Sleep, sleep};

use super::messages::Messages;
use crate::{
    config::Limits,
    metrics::{Cause, Refusals},
};

/// Why a body was not read to its end.
#[derive(Debug, Error)]
pub enum IntakeError {
    /// It is larger than one body may be.
    #[error("body: found {found} bytes, expected at most {max} (body_bytes_max)")]
    TooLarge {
        /// What was announced, or `more`.
        found: String,
        /// The limit.
        max: usize,
    },
    /// All bodies together are larger than they may be.
    #[error("the bodies of all requests together exceed bodies_bytes_max; send less at once")]
    TooMuch,
    /// It took too long.
    #[error("body: incomplete after {0:?}, the time that a client has for it (body_timeout_ms)")]
    Late(std::time::Duration),
    /// The connection failed.
    #[error("body: {0}")]
    Broken(#[from] hyper::Error),
}

/// A body that is being received.
#[derive(Debug)]
pub struct Intake {
    body: Incoming,
    limits: Limits,
    received: usize,
    share: Share,
    refusals: Refusals,
    /// When the body must be there, or the message of a stream that has begun; a stream itself may stay open.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Of a stream.
    messages: Option<Messages>,
}

/// What a body has of the common budget; given back when the last clone is dropped, or before.
#[derive(Debug, Clone)]
pub struct Share(Arc<ShareInner>);

#[derive(Debug)]
struct ShareInner {
    total: Arc<AtomicUsize>,
    own: AtomicUsize,
}

impl Intake {
    pub(super) fn new(
        body: Incoming,
        limits: Limits,
        total: &Arc<AtomicUsize>,
        refusals: Refusals,
        is_stream: bool,
    ) -> Self {
        let share = Share(Arc::new(ShareInner { total: Arc::clone(total), own: AtomicUsize::new(0) }));
        let deadline = (!is_stream).then(|| Box::pin(sleep(limits.body_timeout)));
        let messages = is_stream.then(Messages::default);
        Self { body, limits, received: 0, share, refusals, deadline, messages }
    }

    /// What the body takes up. Whoever keeps its bytes keeps a clone.
    #[must_use]
    pub fn share(&self) -> Share {
        self.share.clone()
    }

    fn refuse(&self, error: IntakeError) -> IntakeError {
        self.refusals.count(Cause::Body);
        error
    }

    fn take_in(&mut self, bytes: usize) -> Result<(), IntakeError> {
        self.received += bytes;
        let max = self.limits.body_bytes_max;
        if self.messages.is_none() && self.received > max {
            return Err(self.refuse(IntakeError::TooLarge { found: "more".to_owned(), max }));
        }
        if self.share.grow(bytes) > self.limits.bodies_bytes_max {
            return Err(self.refuse(IntakeError::TooMuch));
        }
        Ok(())
    }
}

impl Body for Intake {
    type Data = Bytes;
    type Error = IntakeError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, IntakeError>>> {
        let (announced, max) = (self.body.size_hint().lower(), self.limits.body_bytes_max);
        if self.messages.is_none() && announced > max as u64 {
            let error = IntakeError::TooLarge { found: announced.to_string(), max };
            return Poll::Ready(Some(Err(self.refuse(error))));
        }
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
            // A body that is there already needs no timer.
            if self.messages.as_ref().is_some_and(Messages::is_within) && self.deadline.is_none() {
                self.deadline = Some(Box::pin(sleep(self.limits.body_timeout)));
            }
            let is_late = self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready());
            return if is_late {
                if self.messages.is_some() {
                    self.refusals.count(Cause::Stream);
                }
                Poll::Ready(Some(Err(IntakeError::Late(self.limits.body_timeout))))
            } else {
                Poll::Pending
            };
        };
        Poll::Ready(frame.map(|frame| {
            let frame = frame?;
            if let (Some(messages), Some(bytes)) = (&mut self.messages, frame.data_ref())
                && messages.handle(bytes)
            {
                // The next one has a time of its own.
                self.deadline = None;
            }
            self.take_in(frame.data_ref().map_or(0, Bytes::len))?;
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Share {
    /// Takes more; yields what all bodies take up together then.
    pub fn grow(&self, bytes: usize) -> usize {
        self.0.own.fetch_add(bytes, Relaxed);
        self.0.total.fetch_add(bytes, Relaxed) + bytes
    }

    /// Gives everything back: the bytes are in slots now.
    pub fn release(&self) {
        self.0.total.fetch_sub(self.0.own.swap(0, Relaxed), Relaxed);
    }
}

impl Drop for ShareInner {
    fn drop(&mut self) {
        self.total.fetch_sub(*self.own.get_mut(), Relaxed);
    }
}
