//! When a model that is being loaded is tried on GPUs that serve others: one run at a time, and only while nothing is
//! planned there before it should end. What is planned goes first, for as long as whoever tries has patience.

use proto::{Span, Timestamp};

use super::{Core, Output, Trial};

impl Core {
    /// A model is to be tried on these GPUs, which should take so long: see [`Output::Try`]. It waits no longer than
    /// `patience`. There is one at a time.
    pub fn handle_trial(&mut self, now: Timestamp, gpus: Vec<usize>, takes: Span, patience: Span) {
        if self.ended.is_none() {
            self.trial = Some(Trial { gpus, takes, patience_ends: now + patience });
            self.settle(now);
        }
    }

    /// Lets a trial begin, if it is its turn.
    pub(super) fn settle_trial(&mut self, now: Timestamp) {
        let scheduler_now = self.scheduler_now(now);
        let is_free = |trial: &Trial| {
            let workers = trial.gpus.iter().filter_map(|&gpu| self.hosting.workers.get(gpu));
            workers.into_iter().all(|worker| worker.is_free_until(scheduler_now + trial.takes))
        };
        if self.trial.as_ref().is_some_and(|trial| trial.patience_ends <= now || is_free(trial)) {
            self.trial = None;
            self.outputs.push_back(Output::Try);
        }
    }

    /// When [`Self::settle_trial`] must be looked at although nothing else happens.
    pub(super) fn trial_timeout(&self) -> Timestamp {
        self.trial.as_ref().map_or(Timestamp::NEVER, |trial| trial.patience_ends)
    }
}
