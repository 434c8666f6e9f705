//! Frames: the messages of one edge, packed one after another into a single SEND, so that under load many of them
//! cost one packet.

use thiserror::Error;
use wincode::{SchemaReadOwned, SchemaWrite, config::DefaultConfig};

/// The largest frame: what one posted receive holds. The largest message, a plan of 256 tasks, fits (asserted there).
pub const FRAME_BYTES_MAX: usize = 17 * 1024;

/// Why a message could not be packed or a frame not unpacked.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The message alone is larger than a frame.
    #[error("a control message of {found} bytes is larger than a frame ({FRAME_BYTES_MAX} bytes)")]
    TooLarge {
        /// Its encoded size.
        found: usize,
    },
    /// Not a message of this edge. The peer runs another version, or the connection is not what it seems.
    #[error("a frame from the peer does not decode at byte {at}: {cause}; do both sides run the same version?")]
    Malformed {
        /// Where decoding stopped.
        at: usize,
        /// What the decoder said.
        cause: String,
    },
}

/// A message on a connection that serves the scheduler's control and its only ModelThread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addressed<C, M> {
    /// For control.
    Control(C),
    /// For the ModelThread.
    ModelThread(M),
}

/// The least tag of a message to a ModelThread; those to control are below it. So a message to the one never decodes as
/// a message to the other, and one connection can carry both.
pub const MODEL_THREAD_TAG: u32 = 64;

/// What a frame can be made of.
pub trait Message: Sized {
    /// Takes the first one off.
    ///
    /// # Errors
    /// What the decoder says.
    fn take(rest: &mut &[u8]) -> Result<Self, String>;
}

impl<M> Message for M
where
    M: SchemaReadOwned<DefaultConfig, Dst = M>,
{
    fn take(rest: &mut &[u8]) -> Result<Self, String> {
        wincode::deserialize_from(rest).map_err(|cause| cause.to_string())
    }
}

impl<C: Message, M: Message> Message for Addressed<C, M> {
    fn take(rest: &mut &[u8]) -> Result<Self, String> {
        let is_for_thread = rest.first_chunk().is_some_and(|&tag| u32::from_le_bytes(tag) >= MODEL_THREAD_TAG);
        if is_for_thread { M::take(rest).map(Self::ModelThread) } else { C::take(rest).map(Self::Control) }
    }
}

/// Packs messages into frames.
#[derive(Debug, Default)]
pub struct FrameWriter {
    frame: Vec<u8>,
}

impl FrameWriter {
    /// Adds a message. If it does not fit any more, the frame so far is returned for sending and the message starts
    /// the next one.
    ///
    /// # Errors
    /// If the message alone is larger than a frame; nothing was added then.
    pub fn push<M>(&mut self, message: &M) -> Result<Option<Vec<u8>>, FrameError>
    where
        M: SchemaWrite<DefaultConfig, Src = M>,
    {
        let before = self.frame.len();
        wincode::serialize_into(&mut self.frame, message).expect("encoding into memory cannot fail");
        let found = self.frame.len() - before;
        if found > FRAME_BYTES_MAX {
            self.frame.truncate(before);
            return Err(FrameError::TooLarge { found });
        }
        let full = (self.frame.len() > FRAME_BYTES_MAX).then(|| {
            let next = self.frame.split_off(before);
            std::mem::replace(&mut self.frame, next)
        });
        Ok(full)
    }

    /// The frame so far, if it holds anything.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        (!self.frame.is_empty()).then(|| std::mem::take(&mut self.frame))
    }
}

/// Unpacks all messages of a frame, in order.
///
/// # Errors
/// If it does not decode; messages before the fault have been handed out then.
pub fn read_frame<M: Message>(frame: &[u8]) -> impl Iterator<Item = Result<M, FrameError>> {
    let mut rest = frame;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let at = frame.len() - rest.len();
        Some(M::take(&mut rest).map_err(|cause| {
            rest = &[];
            FrameError::Malformed { at, cause }
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Span,
        frontend_to_scheduler::{FrontendToControl, FrontendToModelThread, FrontendToScheduler},
        ids::{ModelId, TaskId},
        time::Timestamp,
    };
    use proptest::prelude::*;

    fn cancel(task: u64) -> FrontendToModelThread {
        FrontendToModelThread::Cancel { task: TaskId(task), model: ModelId(0) }
    }

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut writer = FrameWriter::default();
        let mut frames = Vec::new();
        for task in 0..5000 {
            frames.extend(writer.push(&cancel(task)).unwrap());
        }
        frames.extend(writer.take());
        assert!(frames.len() > 1 && frames.iter().all(|frame| frame.len() <= FRAME_BYTES_MAX));
        let read: Vec<FrontendToModelThread> =
            frames.iter().flat_map(|frame| read_frame(frame)).map(Result::unwrap).collect();
        assert_eq!(read, (0..5000).map(cancel).collect::<Vec<_>>());
    }

    #[test]
    fn a_torn_frame_yields_what_is_whole_and_then_an_error() {
        let mut writer = FrameWriter::default();
        writer.push(&cancel(1)).unwrap();
        writer.push(&FrontendToControl::ClockRequest { sent_at: Timestamp(5), resp: Span::ZERO }).unwrap();
        let frame = writer.take().unwrap();
        let read: Vec<_> = read_frame::<FrontendToScheduler>(&frame[..frame.len() - 1]).collect();
        assert_eq!(read.len(), 2);
        assert!(read[0].is_ok() && matches!(read[1], Err(FrameError::Malformed { at: 16, .. })), "{read:?}");
    }

    /// What is for the other of both is as malformed as noise; where one connection serves both, each finds its own.
    #[test]
    fn a_message_for_control_is_none_for_a_model_thread() {
        let request = FrontendToControl::ClockRequest { sent_at: Timestamp(5), resp: Span::ZERO };
        let mut writer = FrameWriter::default();
        writer.push(&request).unwrap();
        let to_control = writer.take().unwrap();
        writer.push(&cancel(1)).unwrap();
        let to_thread = writer.take().unwrap();
        let error = read_frame::<FrontendToModelThread>(&to_control).next().unwrap().unwrap_err().to_string();
        assert!(error.starts_with("a frame from the peer does not decode at byte 0: "), "{error}");
        assert!(read_frame::<FrontendToControl>(&to_thread).next().unwrap().is_err());
        let both = [to_control, to_thread].concat();
        let read: Vec<FrontendToScheduler> = read_frame(&both).map(Result::unwrap).collect();
        assert_eq!(read, [Addressed::Control(request), Addressed::ModelThread(cancel(1))]);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for message in read_frame::<FrontendToScheduler>(&bytes) {
                let _ = message;
            }
            for message in read_frame::<crate::scheduler_to_backend::SchedulerToBackend>(&bytes) {
                let _ = message;
            }
        }
    }
}
