//! Hosted models of which only l(1) was measured before they were served.

use std::collections::BTreeSet;

use proto::ModelId;

use crate::executor::{Basis, Loaded};

/// Hosted models, by our names.
#[derive(Debug, Default)]
pub(super) struct Unmeasured {
    waiting: BTreeSet<ModelId>,
    under_way: Option<ModelId>,
}

impl Unmeasured {
    /// One that was under way has ended. False if it was not.
    pub(super) fn handle_ended(&mut self, model: ModelId) -> bool {
        self.under_way.take_if(|under_way| *under_way == model).is_some()
    }

    /// It is hosted from now on.
    pub(super) fn handle_hosted(&mut self, model: ModelId, loaded: &Loaded) {
        if loaded.basis == Basis::One && loaded.executor.runs_beside() {
            self.waiting.insert(model);
        }
    }

    /// It is not hosted any more.
    pub(super) fn handle_gone(&mut self, model: ModelId) {
        self.waiting.remove(&model);
        self.under_way.take_if(|under_way| *under_way == model);
    }

    /// The next one, unless one is under way.
    pub(super) fn begin_next(&mut self) -> Option<ModelId> {
        if self.under_way.is_none() {
            self.under_way = self.waiting.pop_first();
            return self.under_way;
        }
        None
    }
}
