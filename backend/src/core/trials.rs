//! When a model that is being loaded or measured is tried on GPUs that serve others: one run at a time, and only while
//! nothing is planned there before it should end. What is planned goes first, for as long as whoever tries has
//! patience.

use proto::{Span, Timestamp};

use super::{Core, Output, Trial};

impl Core {
    /// A model is to be tried on these GPUs, which should take so long: see [`Output::Try`]. It waits no longer than
    /// `patience`, and is made then whatever is planned, unless it is `put_off`. There is one at a time.
    pub fn handle_trial(&mut self, now: Timestamp, gpus: Vec<usize>, takes: Span, patience: Span, put_off: bool) {
        if self.ended.is_none() {
            self.trial = Some(Trial { gpus, takes, patience_ends: now + patience, put_off });
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
        if let Some(trial) = &self.trial {
            let has_turn = is_free(trial) || (trial.patience_ends <= now && !trial.put_off);
            if has_turn || trial.patience_ends <= now {
                self.trial = None;
                self.outputs.push_back(Output::Try { has_turn });
            }
        }
    }

    /// When [`Self::settle_trial`] must be looked at although nothing else happens.
    pub(super) fn trial_timeout(&self) -> Timestamp {
        self.trial.as_ref().map_or(Timestamp::NEVER, |trial| trial.patience_ends)
    }
}
