//! Messages of a call as they come in (gRPC over HTTP/2, "Length-Prefixed-Message"). Each is charged to its client by
//! itself, and holds no more than its own bytes: however it ends, these are given back. It is decompressed when
//! somebody has a use for it, and what it becomes is charged and bounded then.

use std::{mem, rc::Rc};

use bytes::{Buf as _, Bytes, BytesMut};
use frontend::{desk::Desk, rope::Rope};
use hyper::HeaderMap;
use proto::Timestamp;
use tonic::Status;

use crate::{
    budget::Charge,
    compression::Coding,
    pool::Pool,
    server::{BodyMax, Intake, IntakeError, decompressed},
};

/// A flag, and four bytes of length.
const HEADER_BYTES: usize = 5;

/// The messages of a call.
pub(super) struct Messages {
    intake: Intake,
    coding: Option<Coding>,
    /// Of one message, as it comes and decompressed.
    max: BodyMax,
    /// Received, not looked at yet.
    front: Bytes,
    /// The next message's beginning, as far as it was in pieces before.
    partial: BytesMut,
    /// When the first of it was looked at.
    began: Option<Timestamp>,
    desk: Rc<Desk>,
}

/// A message as it came.
pub(super) struct Message {
    payload: Bytes,
    coding: Option<Coding>,
    max: BodyMax,
    charge: Charge,
    began: Timestamp,
}

/// How the messages of a call are compressed.
pub(super) fn message_coding(headers: &HeaderMap) -> Result<Option<Coding>, Status> {
    match headers.get("grpc-encoding") {
        None => Ok(None),
        Some(identity) if identity == "identity" => Ok(None),
        Some(name) => name.to_str().ok().and_then(Coding::from_name).map(Some).ok_or_else(|| {
            Status::unimplemented(format!("grpc-encoding: found {name:?}, expected gzip, deflate or identity"))
        }),
    }
}

impl Messages {
    /// The desk has the clock.
    pub(super) fn new(intake: Intake, coding: Option<Coding>, max: BodyMax, desk: Rc<Desk>) -> Self {
        Self { intake, coding, max, front: Bytes::new(), partial: BytesMut::new(), began: None, desk }
    }

    /// The next message; nothing after the last one. May be dropped and asked for again.
    ///
    /// # Errors
    /// If what comes is no message, or too large, or finds no room.
    pub(super) async fn next(&mut self) -> Result<Option<Message>, Status> {
        loop {
            if self.began.is_none() && !(self.front.is_empty() && self.partial.is_empty()) {
                self.began = Some(self.desk.now());
            }
            if let Some(message) = self.take()? {
                self.intake.handle_ended();
                return Ok(Some(message));
            }
            if !self.partial.is_empty() {
                self.intake.handle_begun();
            }
            match self.intake.piece().await? {
                Some(piece) => self.front = piece,
                None if self.partial.is_empty() => return Ok(None),
                None => return Err(Status::internal("body: found its end, expected the rest of a message")),
            }
        }
    }

    /// The one message of a unary call.
    ///
    /// # Errors
    /// If there is none, or another one.
    pub(super) async fn only(mut self) -> Result<Message, Status> {
        let message = self.next().await?;
        let message = message.ok_or_else(|| Status::internal("body: found no message, expected one"))?;
        match self.next().await? {
            None => Ok(message),
            Some(_) => Err(Status::internal("body: found several messages, expected one")),
        }
    }

    /// Takes a message off what was received, if it is all there.
    fn take(&mut self) -> Result<Option<Message>, Status> {
        if self.partial.is_empty() && self.front.len() >= HEADER_BYTES {
            let (coding, length) = self.header(&self.front)?;
            if self.front.len() - HEADER_BYTES >= length {
                // The usual case: nothing is copied.
                self.front.advance(HEADER_BYTES);
                let payload = self.front.split_to(length);
                return Ok(Some(self.message(payload, coding)));
            }
        }
        self.fill(HEADER_BYTES);
        if self.partial.len() < HEADER_BYTES {
            return Ok(None);
        }
        let (coding, length) = self.header(&self.partial)?;
        self.fill(HEADER_BYTES + length);
        if self.partial.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        let mut payload = mem::take(&mut self.partial).freeze();
        payload.advance(HEADER_BYTES);
        Ok(Some(self.message(payload, coding)))
    }

    /// Moves what was received to what was there before, until that has so many bytes. Others keep its buffer alive
    /// only as long as a whole message is in it.
    fn fill(&mut self, bytes: usize) {
        let missing = bytes.saturating_sub(self.partial.len()).min(self.front.len());
        self.partial.extend_from_slice(&self.front.split_to(missing));
        if self.front.is_empty() {
            self.front = Bytes::new();
        }
    }

    fn header(&self, bytes: &[u8]) -> Result<(Option<Coding>, usize), Status> {
        let [flag, length @ ..] = *bytes.first_chunk::<HEADER_BYTES>().expect("the header is there");
        let coding = match flag {
            0 => None,
            1 if self.coding.is_some() => self.coding,
            1 => return Err(Status::internal("grpc-encoding: found none, expected that of a compressed message")),
            _ => return Err(Status::internal(format!("body: found a message with flag {flag}, expected 0 or 1"))),
        };
        let length = u32::from_be_bytes(length) as usize;
        if length > self.max.bytes { Err(self.max.exceeded(length).into()) } else { Ok((coding, length)) }
    }

    fn message(&mut self, payload: Bytes, coding: Option<Coding>) -> Message {
        let charge = self.intake.charge().split(HEADER_BYTES + payload.len());
        let began = self.began.take().expect("it is looked at");
        Message { payload, coding, max: self.max, charge, began }
    }
}

impl Message {
    /// When the first of it was looked at.
    pub(super) fn began(&self) -> Timestamp {
        self.began
    }

    /// Its bytes, decompressed, and what holds them.
    ///
    /// # Errors
    /// If they are too many, or malformed, or find no room.
    pub(super) async fn decompressed(self, pool: &Pool) -> Result<(Bytes, Charge), IntakeError> {
        let Self { payload, coding, max, charge, began: _ } = self;
        let Some(coding) = coding else { return Ok((payload, charge)) };
        let bytes = decompressed(pool, coding, Rope::from(payload), &charge, max).await?;
        Ok((bytes, charge))
    }
}
