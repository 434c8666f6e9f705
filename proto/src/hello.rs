//! What a role says when it connects to the scheduler.

use wincode::{SchemaRead, SchemaWrite};

use crate::{
    backend_to_scheduler::BackendHello,
    draining::DrainRequest,
    frontend_to_scheduler::FrontendHello,
    ids::{BackendId, FrontendId},
    scheduler_to_scheduler::PeerHello,
};

/// The first bytes on a connection to the scheduler: who is there.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum SchedulerHello {
    /// A frontend; answered with a [`FrontendWelcome`](crate::scheduler_to_frontend::FrontendWelcome).
    Frontend(FrontendHello),
    /// A backend; answered with a [`BackendWelcome`](crate::scheduler_to_backend::BackendWelcome).
    Backend(BackendHello),
    /// A member that has joined, to one of the ModelThreads that its welcome named; answered with nothing.
    Member(MemberHello),
    /// Another scheduler; answered with a [`PeerWelcome`](crate::scheduler_to_scheduler::PeerWelcome).
    Peer(PeerHello),
    /// An operator who wants this scheduler to be the primary; answered, once it is, with a
    /// [`HandedOver`](crate::scheduler_to_scheduler::HandedOver), or refused with the reason.
    HandOver,
    /// An operator who wants a member drained, or resumed; answered by the primary with a
    /// [`DrainAnswer`](crate::draining::DrainAnswer), or refused with the reason.
    Drain(DrainRequest),
}

/// What a member says when it connects to a ModelThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct MemberHello {
    /// Who it is, by its welcome.
    pub member: Member,
    /// From its welcome: nobody else knows it.
    pub pass: u64,
}

/// Who takes part, besides the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaRead, SchemaWrite)]
pub enum Member {
    /// A frontend.
    Frontend(FrontendId),
    /// A backend.
    Backend(BackendId),
}

/// Where a member reaches the ModelThreads: part of its welcome. It has joined once it is connected to all of them, and
/// has lost the scheduler once it has lost one.
#[derive(Debug, Clone, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct ModelThreads {
    /// `ip:port` of each one's bootstrap listener. None: the connection to the scheduler is to its only one, too.
    pub addresses: Vec<String>,
    /// For [`MemberHello`].
    pub pass: u64,
}
