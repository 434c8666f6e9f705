//! Step 1: a request's body as it comes in: bounded, charged to its client, and timed.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use frontend::rope::{Gather, Rope};
use hyper::body::{Body, Incoming};
use thiserror::Error;
use tokio::time::{Sleep, sleep};

use crate::{
    budget::{Charge, NoRoom},
    compression::{Coding, Decoding, PIECE_BYTES},
    config::Limits,
    metrics::{Cause, Refusals},
    pool::Pool,
};

/// Chunks of a body whose length is not announced: each costs time, however small it is. As many as in Triton.
const CHUNKS_MAX: usize = 65_536;

/// Why a body was not read to its end, or not taken apart.
#[derive(Debug, Error)]
pub enum IntakeError {
    /// It is larger than one body may be.
    #[error("body: found {found} bytes, expected at most {max}{key}")]
    TooLarge {
        /// What was announced, or `more`.
        found: String,
        /// The limit.
        max: usize,
        /// In brackets, if it is configured; else nothing.
        key: &'static str,
    },
    /// Its client, or all of them, hold too much already.
    #[error("body: {0}")]
    NoRoom(#[from] NoRoom),
    /// It came in too many chunks (as Triton says it).
    #[error("Chunked request body exceeds maximum of {CHUNKS_MAX} non-empty chunks. Send fewer or larger HTTP chunks.")]
    TooManyChunks,
    /// It took too long.
    #[error("body: incomplete after {0:?}, the time that a client has for it (body_timeout_ms)")]
    Late(std::time::Duration),
    /// It is not what its encoding says.
    #[error("body: it is not {0}")]
    Malformed(String),
    /// Too much of its client waits to be taken apart.
    #[error("body: {0}")]
    Busy(frontend::InferError),
    /// The connection failed.
    #[error("body: {0}")]
    Broken(#[from] hyper::Error),
}

/// What one body may be.
#[derive(Debug, Clone, Copy)]
pub struct BodyMax {
    /// In bytes.
    pub bytes: usize,
    /// For messages: the key that sets it, in brackets; nothing if it is fixed.
    pub key: &'static str,
}

/// A body that is being received.
#[derive(Debug)]
pub struct Intake {
    body: Incoming,
    limits: Limits,
    /// Of all of it; without one, single messages are bounded by who reads them.
    max: Option<BodyMax>,
    received: usize,
    /// Pieces of a body whose length was not announced.
    chunks: usize,
    charge: Charge,
    refusals: Refusals,
    /// When the body must be there, or the message of a stream that has begun; a stream itself may stay open.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl BodyMax {
    /// That of requests that are not for inference: what is in them becomes a tree.
    pub const OBJECT: Self = Self { bytes: 64 << 10, key: "" };

    /// That of requests for inference.
    #[must_use]
    pub fn infer(limits: &Limits) -> Self {
        Self { bytes: limits.body_bytes_max, key: " (body_bytes_max)" }
    }

    /// Says that it is exceeded.
    #[must_use]
    pub fn exceeded(self, found: impl ToString) -> IntakeError {
        IntakeError::TooLarge { found: found.to_string(), max: self.bytes, key: self.key }
    }
}

impl Intake {
    pub(super) fn new(
        body: Incoming,
        limits: Limits,
        max: Option<BodyMax>,
        charge: Charge,
        refusals: Refusals,
    ) -> Self {
        let deadline = max.is_some().then(|| Box::pin(sleep(limits.body_timeout)));
        Self { body, limits, max, received: 0, chunks: 0, charge, refusals, deadline }
    }

    /// What holds the bytes that were received.
    #[must_use]
    pub fn charge(&self) -> &Charge {
        &self.charge
    }

    /// A message of a stream has been begun: it has a time of its own, as the body of another call has.
    pub fn handle_begun(&mut self) {
        if self.max.is_none() {
            let timeout = self.limits.body_timeout;
            self.deadline.get_or_insert_with(|| Box::pin(sleep(timeout)));
        }
    }

    /// The message that was begun is here.
    pub fn handle_ended(&mut self) {
        if self.max.is_none() {
            self.deadline = None;
        }
    }

    /// The next piece, charged; nothing at the end. May be dropped and asked for again.
    ///
    /// # Errors
    /// Why there is no more of it.
    pub async fn piece(&mut self) -> Result<Option<Bytes>, IntakeError> {
        poll_fn(|context| self.poll_piece(context)).await
    }

    /// All of it, in few pieces, and what holds them.
    ///
    /// # Errors
    /// Why it is not to be had.
    pub async fn all(mut self) -> Result<(Rope, Charge), IntakeError> {
        let mut gather = Gather::default();
        let mut poll = |context: &mut Context<'_>| {
            let polled = self.poll_piece(context);
            if polled.is_pending() {
                gather.settle();
            }
            polled.map(|piece| piece.map(|piece| piece.map(|piece| gather.push(piece))))
        };
        while poll_fn(&mut poll).await?.is_some() {}
        Ok((gather.finish(), self.charge))
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, IntakeError>> {
        let announced = self.body.size_hint().lower();
        if let Some(max) = self.max.filter(|max| announced > max.bytes as u64) {
            return Poll::Ready(Err(self.refuse(max.exceeded(announced))));
        }
        loop {
            let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
                // A body that is there already needs no timer.
                let Some(deadline) = &mut self.deadline else { return Poll::Pending };
                ready!(deadline.as_mut().poll(context));
                if self.max.is_none() {
                    self.refusals.count(Cause::Stream);
                }
                return Poll::Ready(Err(IntakeError::Late(self.limits.body_timeout)));
            };
            let Some(frame) = frame.transpose()? else { return Poll::Ready(Ok(None)) };
            // Trailers mean nothing here.
            let Ok(piece) = frame.into_data() else { continue };
            if self.max.is_some() && self.body.size_hint().exact().is_none() && !piece.is_empty() {
                self.chunks += 1;
                if self.chunks > CHUNKS_MAX {
                    return Poll::Ready(Err(self.refuse(IntakeError::TooManyChunks)));
                }
            }
            self.take_in(piece.len())?;
            return Poll::Ready(Ok(Some(piece)));
        }
    }

    fn take_in(&mut self, bytes: usize) -> Result<(), IntakeError> {
        self.received += bytes;
        if let Some(max) = self.max.filter(|max| self.received > max.bytes) {
            return Err(self.refuse(max.exceeded("more")));
        }
        self.charge.grow(bytes).map_err(|full| self.refuse(full.into()))
    }

    fn refuse(&self, error: IntakeError) -> IntakeError {
        self.refusals.count(Cause::Body);
        error
    }
}

/// A body as it was before it was compressed. Each piece is charged before the next one is made; if it has several,
/// that is the pool's work.
///
/// # Errors
/// If it is larger than it may be, or malformed, or there is no room.
pub async fn decompressed(
    pool: &Pool,
    coding: Coding,
    body: Rope,
    charge: &Charge,
    max: BodyMax,
) -> Result<Bytes, IntakeError> {
    let room = charge.beside(Decoding::BYTES)?;
    let mut decoding = coding.decoding(body);
    if !decode_piece(coding, &mut decoding, charge, max)? {
        return Ok(decoding.decoded().into());
    }
    let held = charge.clone();
    let work = move || {
        let _room = room;
        while decode_piece(coding, &mut decoding, &held, max)? {}
        Ok(decoding.decoded().into())
    };
    pool.run(charge, work).await.map_err(IntakeError::Busy)?
}

/// Whether there is more to decode.
fn decode_piece(coding: Coding, decoding: &mut Decoding, charge: &Charge, max: BodyMax) -> Result<bool, IntakeError> {
    let piece = decoding.step().map_err(|cause| IntakeError::Malformed(format!("{}: {cause}", coding.name())))?;
    if decoding.len() > max.bytes {
        return Err(max.exceeded("more decoded"));
    }
    charge.grow(piece)?;
    Ok(piece == PIECE_BYTES)
}
