//! What operators ask of a scheduler: to give a member nothing more, or again. The member itself keeps that, and tells
//! every scheduler: so it outlives a primary, and ends with the member's process.

use wincode::{SchemaRead, SchemaWrite};

use crate::hello::Member;

/// Which kind of member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub enum MemberKind {
    /// It is not ready, and serves what comes.
    Frontend,
    /// It is sent no plans.
    Backend,
}

impl MemberKind {
    /// Whether a member is of this kind.
    #[must_use]
    pub fn is_of(self, member: Member) -> bool {
        matches!((self, member), (Self::Frontend, Member::Frontend(_)) | (Self::Backend, Member::Backend(_)))
    }
}

/// A member is to be drained, or resumed.
#[derive(Debug, Clone, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct DrainRequest {
    /// Of which kind it is.
    pub kind: MemberKind,
    /// What operators call it, as the scheduler shows it.
    pub name: String,
    /// Drained, or resumed.
    pub is_drained: bool,
    /// Although models that only it hosts are served no more.
    pub is_forced: bool,
}

/// It is done, or has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct DrainAnswer {
    /// The member's id.
    pub id: u32,
    /// Models that no other backend hosts which serves.
    pub only_there: u32,
    /// These are loaded elsewhere first, and it is drained then.
    pub is_moving: bool,
}
