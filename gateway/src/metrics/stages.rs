//! The stages of a request's way.

use frontend::tasks::Timing;

/// A part of a request's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The client sends its request.
    Receive,
    /// A picture becomes a tensor.
    Preprocess,
    /// The task's descriptor goes to the scheduler.
    Submit,
    /// The batch has not been granted a GPU, although it is held back no longer.
    Queue,
    /// The batch is held back on purpose: it grows for as long as its deadline allows.
    Defer,
    /// The plan goes to the backend.
    Grant,
    /// The backend READs the inputs of the batch.
    Fetch,
    /// The batch waits for its window and for its GPU.
    Wait,
    /// The batch runs.
    Execute,
    /// The outputs are WRITTEN back.
    Push,
    /// The answer becomes a reply.
    Reply,
}

impl Stage {
    pub(super) const ALL: [(Self, &str); 11] = [
        (Self::Receive, "receive"),
        (Self::Preprocess, "preprocess"),
        (Self::Submit, "submit"),
        (Self::Queue, "queue"),
        (Self::Defer, "defer"),
        (Self::Grant, "grant"),
        (Self::Fetch, "fetch"),
        (Self::Wait, "wait"),
        (Self::Execute, "execute"),
        (Self::Push, "push"),
        (Self::Reply, "reply"),
    ];

    /// What metrics and traces call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The stages of an answered request between admission and answer: when each began and ended, in nanoseconds on the
/// scheduler's clock.
#[must_use]
pub fn stages(timing: &Timing) -> [(Stage, i64, i64); 8] {
    let stamps = &timing.stamps;
    let (admitted, answered) = (timing.admitted_at.0, timing.answered_at.0);
    [
        (Stage::Submit, admitted, stamps.queued_at_ns),
        (Stage::Defer, stamps.queued_at_ns, stamps.due_at_ns),
        (Stage::Queue, stamps.due_at_ns, stamps.granted_at_ns),
        (Stage::Grant, stamps.granted_at_ns, stamps.planned_at_ns),
        (Stage::Fetch, stamps.planned_at_ns, stamps.fetched_at_ns),
        (Stage::Wait, stamps.fetched_at_ns, stamps.started_at_ns),
        (Stage::Execute, stamps.started_at_ns, stamps.finished_at_ns),
        (Stage::Push, stamps.finished_at_ns, answered),
    ]
}
