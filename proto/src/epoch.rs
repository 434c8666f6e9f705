//! Whose word counts, where several schedulers live: one of them is the primary, and the others are ready to take over.
//!
//! There is no consensus. A primary claims an epoch that is higher than any that it has heard of, and a member obeys
//! the highest that was ever claimed to it; from then on it hears no lower one. So two schedulers that both take
//! themselves for the primary never have the same member.

use std::fmt;

use wincode::{SchemaRead, SchemaWrite};

/// The term of office of one primary. Compared by `number`, and by `scheduler` where two claimed the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, SchemaRead, SchemaWrite)]
pub struct Epoch {
    /// One more than any that the primary had heard of; 0 is nobody's.
    pub number: u32,
    /// The position of the primary in the list of schedulers.
    pub scheduler: u16,
}

impl Epoch {
    /// Below every epoch: nobody has been obeyed yet.
    pub const NONE: Self = Self { number: 0, scheduler: 0 };

    /// The epoch that this scheduler may claim after having heard of `self`.
    #[must_use]
    pub fn next_of(self, scheduler: u16) -> Self {
        Self { number: self.number.saturating_add(1), scheduler }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.number, self.scheduler)
    }
}

/// All schedulers that have kept the same clock, one from the other. Drawn at random by a scheduler that becomes
/// primary without having heard of another one. Whatever a member has from one era means nothing in another: it starts
/// over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, SchemaRead, SchemaWrite)]
pub struct Era(pub u64);

/// What a scheduler says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct Claim {
    /// Whose clock it keeps.
    pub era: Era,
    /// Its own epoch, if it is the primary; [`Epoch::NONE`] if it is not.
    pub epoch: Epoch,
}

impl Claim {
    /// Whether it is the primary, as far as it knows.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.epoch != Epoch::NONE
    }
}

/// What a member says of itself to each scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, SchemaRead, SchemaWrite)]
pub struct Standing {
    /// Drawn at random when it started over: no other member that claims its id knows it.
    pub token: u64,
    /// Of the primary that it obeys, or obeyed last.
    pub obeys: Claim,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_higher_than_what_was_heard_of_and_ties_have_a_winner() {
        let heard = Epoch { number: 7, scheduler: 3 };
        let (one, other) = (heard.next_of(0), heard.next_of(1));
        assert!(heard < one && one < other && Epoch::NONE < heard);
        assert_eq!(other.to_string(), "8.1");
    }
}
