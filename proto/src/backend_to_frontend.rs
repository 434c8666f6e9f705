//! Step 9: backend -> frontend. Answers are written into slots by RDMA WRITE_WITH_IMM: this header, then the output
//! tensors. One WRITE answers a run of tasks ([`PlannedTask::continues`](crate::scheduler_to_backend::PlannedTask)): it
//! begins where the first one's answer goes, has one header, and the outputs of all tasks follow, one after another.

use wincode::{SchemaRead, SchemaWrite};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::{
    epoch::Epoch,
    ids::{BackendId, FrontendId, LinkId},
    link_pass::LinkPass,
    stages::AnswerStamps,
};

/// How a planned task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(u32)]
pub enum AnswerStatus {
    /// The output follows the header.
    Done = 1,
    /// The batch could not start by `latest`, so it was not started (Clockwork, section 4.4). No output follows.
    WindowMissed = 2,
    /// The executor failed; the reason follows as UTF-8 text.
    Failed = 3,
}

/// Stands at `answer_offset` of the first task's slot. Both ends are little-endian (asserted), so it is read in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct AnswerHeader {
    /// The answered task; of a run, the first.
    pub task: u64,
    /// How they ended.
    pub status: AnswerStatus,
    /// Bytes that follow: the output tensors of all answered tasks, or the text of a failure.
    pub payload_bytes: u32,
    /// The attempt that is answered; repeats the immediate's.
    pub attempt: u16,
    /// Tasks in the batch that these ran in.
    pub batch_size: u16,
    /// The backend's GPU that ran it.
    pub gpu: u16,
    /// Tasks that are answered: 1, or as many as the run has.
    pub tasks: u16,
    /// Where the time went.
    pub stamps: AnswerStamps,
}
const _: () = assert!(size_of::<AnswerHeader>() == 88);
const _: () = assert!(cfg!(target_endian = "little"), "slot headers are exchanged in host order");

/// What a backend says about itself when it connects to a frontend.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct LinkHello {
    /// As the scheduler named it.
    pub backend: BackendId,
    /// The frontend that it means to reach. A frontend that has rejoined under another id shares its arena's memory
    /// with its former self, so it refuses links that were meant for that one.
    pub frontend: FrontendId,
    /// Which of the backend's links this is to be.
    pub link: LinkId,
    /// The primary that the backend obeys: a frontend that obeys another refuses it, as that one's plans are not its
    /// own.
    pub epoch: Epoch,
    /// From the scheduler's `FrontendJoined`. Who shows no right one is told nothing, least of all where the slots are.
    pub pass: LinkPass,
}

/// What the frontend answers: where its slots are. READ and WRITE reach nothing else, and slots that have keys of their
/// own by these only ([`SlotDescriptor::key`](crate::SlotDescriptor::key)).
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct LinkWelcome {
    /// Remote address of the arena's first byte.
    pub arena_address: u64,
    /// Length of the arena in bytes.
    pub arena_bytes: u64,
    /// Remote key of slots without one of their own: it covers the arena and nothing else, over this link alone and as
    /// long as that lasts. [`SlotDescriptor::NO_KEY`](crate::SlotDescriptor::NO_KEY) if all have one.
    pub arena_rkey: u32,
    /// Where in the arena the slots' guards are, in bytes: one word for each slot, in the order of their numbers.
    pub guards_offset: u64,
    /// Remote key by which they can be READ.
    pub guards_rkey: u32,
}

/// Room that the header takes before the output.
pub const ANSWER_HEADER_BYTES: usize = size_of::<AnswerHeader>();

impl AnswerHeader {
    /// Reads the header that stands at the start of `answer`; `None` if it is too short or its status unknown.
    #[must_use]
    pub fn parse(answer: &[u8]) -> Option<Self> {
        Self::try_read_from_prefix(answer).ok().map(|(header, _)| header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_round_trips_and_garbage_does_not() {
        let header = AnswerHeader {
            task: 7,
            status: AnswerStatus::Done,
            payload_bytes: 40,
            attempt: 1,
            batch_size: 9,
            gpu: 3,
            tasks: 1,
            stamps: AnswerStamps::default(),
        };
        assert_eq!(AnswerHeader::parse(header.as_bytes()), Some(header));
        assert_eq!(AnswerHeader::parse(&header.as_bytes()[..ANSWER_HEADER_BYTES - 1]), None);
        assert_eq!(AnswerHeader::parse(&[0xff; ANSWER_HEADER_BYTES]), None);
    }
}
