//! What transfers of one frontend may hold up. A buffer is not free before all its READs and WRITEs have ended, and a
//! peer that lives and answers none keeps them under way for seconds. So, where there are others, one frontend's
//! transfers hold half of a GPU's buffers at most, and one that has been waited for is not read again until they have
//! ended: its tasks are given back, for they may run elsewhere or later.

use std::collections::BTreeSet;

use super::*;

/// What one frontend's transfers hold.
#[derive(Debug, Clone, Copy)]
struct Held {
    buffers: usize,
    /// When the first of them has been waited for.
    until: Timestamp,
}

/// Frontends that a plan has to reckon with.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// They hold what they may.
    full: BTreeSet<FrontendId>,
    /// They have been waited for.
    silent: BTreeSet<FrontendId>,
}

impl Shares {
    /// Whether a batch can have a buffer now: what holds others up is left out of it.
    pub(super) fn let_in(&self, batch: &Batch) -> bool {
        let is_held_up = |frontend: FrontendId| self.full.contains(&frontend) && !self.is_silent(frontend);
        self.full.is_empty() || !batch.plan.tasks.iter().any(|planned| is_held_up(planned.task.frontend()))
    }

    pub(super) fn is_silent(&self, frontend: FrontendId) -> bool {
        self.silent.contains(&frontend)
    }
}

impl Worker {
    /// What frontends hold; nothing where one is alone, as it keeps nobody waiting then.
    pub(super) fn shares(&self, now: Timestamp) -> Shares {
        let mut shares = Shares::default();
        for (frontend, Held { buffers, until }) in self.held() {
            if buffers >= HELD_MAX {
                shares.full.insert(frontend);
            }
            if until <= now {
                shares.silent.insert(frontend);
            }
        }
        shares
    }

    /// When a plan that waits for a frontend's transfers need not wait any more.
    pub(super) fn lets_in_at(&self) -> Option<Timestamp> {
        if self.waiting.is_empty() || self.buffers.iter().all(Option::is_some) {
            return None;
        }
        let ends = self.held().into_values().map(|held| held.until);
        ends.filter(|&at| at > self.looked_at).min()
    }

    fn held(&self) -> BTreeMap<FrontendId, Held> {
        let mut held: BTreeMap<FrontendId, Held> = BTreeMap::new();
        if self.linked.len() < 2 {
            return held;
        }
        for batch in self.buffers.iter().flatten() {
            let mut in_batch: BTreeMap<FrontendId, Timestamp> = BTreeMap::new();
            for (planned, task) in batch.plan.tasks.iter().zip(&batch.tasks) {
                if task.is_under_way() {
                    let until = task.since + batch.input_wait;
                    let first = in_batch.entry(planned.task.frontend()).or_insert(until);
                    *first = until.min(*first);
                }
            }
            for (frontend, until) in in_batch {
                let entry = held.entry(frontend).or_insert(Held { buffers: 0, until });
                *entry = Held { buffers: entry.buffers + 1, until: entry.until.min(until) };
            }
        }
        held
    }
}

impl Task {
    /// Whether a READ or WRITE of it is.
    fn is_under_way(&self) -> bool {
        use Progress::{Answering, Fetching, Guarding, Straggling};
        matches!(self.progress, Guarding | Fetching | Straggling | Answering)
    }
}
