//! Between schedulers: who is the primary, whether it lives, and what it has learned. Each connects to each other one.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    clock::ClockReply,
    epoch::{Claim, Epoch},
    ids::BackendId,
    time::{Span, Timestamp},
};

/// What a scheduler says when it connects to another.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct PeerHello {
    /// Its position in the list of schedulers.
    pub rank: u16,
    /// How operators call it; as [`member_name`](crate::member_name) has it.
    pub name: String,
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
#[derive(Debug, Clone, PartialEq, SchemaRead, SchemaWrite)]
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
    /// The sender wants to be the primary, which the reader is. What that one has learned follows, then `HandOver`.
    AskHandOver,
    /// What the network takes, as the sender has seen it.
    LearnedNetwork(LearnedNetwork),
    /// What the sender has learned of a model.
    LearnedModel(LearnedModel),
    /// The sender, which is the primary, wants the reader to take over. It has told what it has learned.
    HandOver,
}

/// What the network takes, whatever the model; `None`: as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct LearnedNetwork {
    /// From a grant to its plan's arrival at a backend.
    pub ctrl: Option<Span>,
    /// From the end of execution to the answer's arrival.
    pub resp: Option<Span>,
}

/// What a primary has learned of a model. No member could tell it, and nothing of it is needed: what the next primary
/// is not told, or cannot believe, it learns anew.
#[derive(Debug, Clone, PartialEq, SchemaRead, SchemaWrite)]
pub struct LearnedModel {
    /// As in the repository.
    pub name: String,
    /// As in the repository.
    pub version: String,
    /// What executions take; at most [`FACTORS_MAX`] a message.
    pub factors: Vec<LearnedFactor>,
    /// To READ one task's input; `None`: as configured.
    pub data: Option<Span>,
    /// The policy's, if it has any.
    pub averages: Option<LearnedAverages>,
}

/// GPUs that one [`LearnedModel`] speaks of.
pub const FACTORS_MAX: usize = 256;

/// What a model's executions take on one GPU, against what its backend offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct LearnedFactor {
    /// The GPU's backend.
    pub backend: BackendId,
    /// Which of its GPUs.
    pub gpu_index: u32,
    /// In thousandths of l(b), whatever b.
    pub thousandths: u32,
}

/// What the policy `downbeat` keeps of a model's tasks; `scheduler/src/policy/` says what for.
#[derive(Debug, Clone, Copy, PartialEq, SchemaRead, SchemaWrite)]
pub struct LearnedAverages {
    /// Arrivals seen.
    pub arrivals: u32,
    /// Between two arrivals, in nanoseconds.
    pub gap_ns: f64,
    /// GPUs that host the model.
    pub hosts: u32,
    /// Mean SLO of served tasks, in nanoseconds.
    pub slo_ns: f64,
    /// Served tasks that were in a hurry, of all.
    pub hurried_part: f64,
    /// Tasks with a longer SLO, and those in a hurry.
    pub classes: [LearnedClass; 2],
}

/// What the tasks of one class lose.
#[derive(Debug, Clone, Copy, PartialEq, SchemaRead, SchemaWrite)]
pub struct LearnedClass {
    /// Tasks seen.
    pub tasks: u32,
    /// Tasks that were lost, of all.
    pub lost_part: f64,
}

/// The primary has changed, as an operator wanted.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct HandedOver {
    /// The new primary's epoch.
    pub epoch: Epoch,
    /// From its claim until all members obeyed it.
    pub took: Span,
}
