//! Bugs that are planted to show that they are found. None of them is in a core: the simulated drivers do to a core
//! what one with that bug would do to itself.

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// A frontend confirms fences without moving the queue pair to ERROR.
    SkipFence,
    /// A frontend now and then frees a slot whose task has not ended.
    ReuseEarly,
    /// A backend now and then forgets to tell how a plan ended.
    DropOutcome,
    /// One backend now and then says that it has written an answer, and has not. Frontends find that out.
    SkipWrite,
    /// A backend believes that every guard names the task that it fetches.
    SkipGuard,
}
