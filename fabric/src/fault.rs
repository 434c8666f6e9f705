//! What can go wrong.

use proto::Span;

use super::node::Node;

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A process ends. If it tells, its peers learn of it as their kernels do, otherwise by silence.
    Crash { node: Node, tells: bool },
    /// Nothing gets through in one direction.
    Partition { from: Node, to: Node },
    /// One side of a connection ends, and the other learns of it by silence.
    Cut { node: Node },
    /// A pair's packets take so much longer.
    SlowPair { pair: (Node, Node), longer: Span },
    /// A process looks at its events that late.
    SlowMember { node: Node, reaction: Span },
    /// A process does nothing.
    Stall { node: Node, span: Span },
    /// A backend is told to end, and comes back.
    Leave { node: Node },
    /// A scheduler tells all its members a lower epoch than its own, or than anybody's if it is a standby.
    LowerEpoch { node: Node },
    /// Executors do not do as their profile says.
    Executors { node: Node, trouble: Trouble },
}

/// How executors behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// As their profile says.
    None,
    /// So many times slower.
    Slow(i64),
    /// Each takes that much longer.
    Hang(Span),
    /// They fail.
    Fail,
}
