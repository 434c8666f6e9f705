//! Every policy as a planner: those of windows by way of a ModelThread and the RankThread, those that decide otherwise
//! as state machines of their own, here.

mod central;
mod clipper;
mod clockwork;
mod nexus;
mod orloj;
mod paging;
mod replicas;
mod shepherd;
#[cfg(test)]
pub(crate) mod testing;

use crate::{
    mailbox::ModelEnd,
    matchmaker::Matchmaker,
    messages::NetworkBudget,
    planner::Planner,
    policy::{Policy, PolicyError},
};

impl Policy {
    /// All that turns tasks into batches under this policy. Only `downbeat` and `orloj` look at what tells dynamic
    /// models apart ([`crate::dynamic`]); to the others such a model is one whose l(b) is the mean.
    #[must_use]
    pub fn planner<P: Send + 'static>(self, budget: NetworkBudget) -> Box<dyn Planner<P>> {
        match self {
            Self::Clockwork => Box::new(central::Central::new(budget, clockwork::Clockwork)),
            Self::Shepherd => Box::new(central::Central::new(budget, shepherd::Shepherd)),
            Self::Nexus => Box::new(replicas::Replicas::new(budget, nexus::Nexus::default())),
            Self::Orloj(rate) => Box::new(orloj::Orloj::new(budget, rate)),
            Self::Clipper => Box::new(replicas::Replicas::new(budget, clipper::Clipper)),
            _ => Box::new(Matchmaker::in_place(budget, self)),
        }
    }

    /// The same for one of several ModelThreads, whose RankThread is at the other end of a mailbox.
    ///
    /// # Errors
    /// If the policy needs one queue for all models.
    pub fn sharded_planner<P: Send + 'static>(
        self,
        budget: NetworkBudget,
        rank: ModelEnd,
    ) -> Result<Box<dyn Planner<P>>, PolicyError> {
        if self.needs_one_queue() {
            return Err(PolicyError::OneQueue(self.to_string()));
        }
        Ok(Box::new(Matchmaker::new(budget, self, rank)))
    }
}
