//! Between schedulers: who is the primary, whether it lives, and what it has learned. Each connects to each other one.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    clock::ClockReply,
    epoch::{Claim, Epoch},
    time::{Span, Timestamp},
};

/// What a scheduler says when it connects to another.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct PeerHello {
    /// Its position in the list of schedulers.
    pub rank: u16,
    /// The list as it knows it; all schedulers must have the same.
    pub schedulers: Vec<String>,
    /// What it takes itself for.
    pub claim: Claim,
}

/// What it is answered.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct PeerWelcome {
    /// What the other one takes itself for.
    pub claim: Claim,
    /// Remote address of its heartbeat, a word that grows as long as it works.
    pub heartbeat_address: u64,
    /// Remote key that covers the heartbeat and nothing else.
    pub heartbeat_rkey: u32,
}

/// A message between two schedulers.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum SchedulerToScheduler {
    /// Asks for the other one's clock.
    ClockRequest {
        /// When this was sent, on the sender's clock; comes back in the reply.
        sent_at: Timestamp,
    },
    /// The sender's clock.
    Clock(ClockReply),
    /// What the sender takes itself for has changed.
    Claim(Claim),
    /// The sender, which is the primary, is about to end, and wants the reader to take over.
    HandOver,
}

/// The primary has changed, as an operator wanted.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct HandedOver {
    /// The new primary's epoch.
    pub epoch: Epoch,
    /// From its claim until all members obeyed it.
    pub took: Span,
}
