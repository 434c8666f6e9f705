//! What executions teach about l(b). A backend measures a model once, when it loads it; afterwards clocks throttle and
//! neighbours share the device, and a plan that still trusts the offer is late with every batch.
//!
//! Clockwork (section 5) predicts each action by its last ten durations. Here what is kept of an execution is how long
//! it took against the offer at its batch size, so that rare sizes profit from frequent ones and the shape of the
//! offer stays (an estimate never decreases in b). A GPU's factor is the median of its last `WINDOW`: single outliers
//! are what windows and the network's jitter are for, what lasts is what is learned. GPUs whose offers are alike are a
//! kind, and the kind's factor is that of its slowest GPU; it follows when it is off by more than [`TOLERANCE`], so
//! that noise changes nothing.
//!
//! The model's common profile is the slowest of all kinds, batch size by batch size, as a batch must fit its window on
//! whichever GPU it gets. A GPU has a profile of its own if it is faster than that by more than the tolerance at any
//! batch size: its kind's offer times its own factor, or its kind's until it has one. It is never slower than the
//! common profile, so that what fits every GPU fits this one.
//!
//! If a model does not run any more, perhaps since its estimate leaves no time to, the offer holds again after
//! [`FORGET_AFTER`].

mod kinds;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use proto::{GpuId, LatencyProfile, ModelId, Span, Timestamp};

use crate::indexed_heap::IndexedHeap;
pub use kinds::Estimate;

/// What is learned is used once it is off by more than this part.
pub(crate) const TOLERANCE: f64 = 0.05;
/// A model without an execution for so long is taken to be as fast as offered.
const FORGET_AFTER: Span = Span::from_millis(10_000);

/// The profiles that the scheduler plans with.
#[derive(Debug)]
pub struct Estimates {
    is_on: bool,
    models: BTreeMap<ModelId, Estimate>,
    /// By model: when its offer holds again, if it does not.
    forgotten_at: IndexedHeap,
    changes: VecDeque<ProfileChange>,
}

/// A profile is another one now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfileChange {
    /// A model's common one.
    Common(ModelId),
    /// What a model takes on one GPU.
    OfGpu(ModelId, GpuId),
}

impl Estimates {
    /// Kinds of GPUs that one model tells apart, with that of its common offer; GPUs of further ones count as common.
    pub const KINDS_MAX: usize = 16;

    /// Without models. If it is not on, offers hold for ever.
    #[must_use]
    pub fn new(is_on: bool) -> Self {
        Self { is_on, models: BTreeMap::new(), forgotten_at: IndexedHeap::default(), changes: VecDeque::new() }
    }

    /// A model with a new offer, the slowest of all GPUs': what was measured against the last one is gone. All GPUs are
    /// taken to be like that until [`Self::handle_offer`] tells otherwise.
    pub fn handle_model(&mut self, id: ModelId, offered: LatencyProfile) {
        self.forgotten_at.remove(id.0);
        let former = self.models.insert(id, Estimate::new(offered));
        self.changes.push_back(ProfileChange::Common(id));
        let gone = former.iter().flat_map(Estimate::gpus_with_own_profile);
        self.changes.extend(gone.map(|gpu| ProfileChange::OfGpu(id, gpu)));
    }

    /// What GPUs offer for a model. If that is slower than its common offer at any batch size, all are planned with it.
    ///
    /// # Panics
    /// If the model is not here.
    pub fn handle_offer(&mut self, id: ModelId, gpus: &[GpuId], offered: &LatencyProfile) {
        self.models.get_mut(&id).expect("only known models are offered").handle_offer(gpus, offered);
        self.note_changes(id);
    }

    /// A GPU ran a batch of `size` for `execution`. One that is larger than its newest offer allows teaches nothing.
    ///
    /// # Panics
    /// If the model is not here.
    pub fn handle_executed(&mut self, now: Timestamp, id: ModelId, gpu: GpuId, size: usize, execution: Span) {
        let estimate = self.models.get_mut(&id).expect("only known models run");
        if !self.is_on || !estimate.handle_executed(gpu, size, execution) {
            return;
        }
        self.on_learned(now, id);
    }

    fn on_learned(&mut self, now: Timestamp, id: ModelId) {
        self.note_changes(id);
        if self.models[&id].is_as_offered() {
            self.forgotten_at.remove(id.0);
        } else {
            self.forgotten_at.set(id.0, now + FORGET_AFTER);
        }
    }

    /// A GPU is gone. Models that it was the slowest of follow with their next execution. A scan: GPUs leave rarely.
    pub fn handle_gpu_left(&mut self, gpu: GpuId) {
        for estimate in self.models.values_mut() {
            estimate.remove_gpu(gpu);
        }
    }

    /// A GPU has another id: it offers what it did, and has run nothing yet.
    pub fn handle_gpu_renamed(&mut self, old: GpuId, new: GpuId) {
        for id in self.models.keys().copied().collect::<Vec<_>>() {
            let estimate = self.models.get_mut(&id).expect("just listed");
            if let Some(kind) = estimate.remove_gpu(old) {
                estimate.insert_gpu(new, kind);
                self.note_changes(id);
            }
        }
    }

    /// Nobody hosts the model any more: what is known of GPUs is forgotten.
    pub fn handle_unhosted(&mut self, id: ModelId) {
        if let Some(estimate) = self.models.get(&id).filter(|estimate| estimate.knows_gpus()) {
            let offered = estimate.offered().clone();
            self.handle_model(id, offered);
        }
    }

    /// What a model's executions take on each GPU that has run it for a while, in thousandths of what that offers.
    #[must_use]
    pub fn learned(&self, id: ModelId) -> Vec<(GpuId, u32)> {
        self.models.get(&id).map_or_else(Vec::new, |estimate| estimate.learned().collect())
    }

    /// The same of another one that planned the model before. Factors that are not believed of executions are not
    /// believed here, either.
    pub fn handle_learned(&mut self, now: Timestamp, id: ModelId, learned: &[(GpuId, u32)]) {
        let Some(estimate) = self.models.get_mut(&id).filter(|_| self.is_on) else { return };
        for &(gpu, factor) in learned {
            estimate.handle_learned(gpu, factor);
        }
        self.on_learned(now, id);
    }

    /// A model is not here any more.
    pub fn remove(&mut self, id: ModelId) {
        self.forgotten_at.remove(id.0);
        self.models.remove(&id);
    }

    /// Forgets what is too old.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        while let Some((at, id)) = self.forgotten_at.peek()
            && at <= now
        {
            self.forgotten_at.remove(id);
            self.models.get_mut(&ModelId(id)).expect("only known models run").forget_executions();
            self.note_changes(ModelId(id));
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.forgotten_at.peek().map(|(at, _)| at)
    }

    /// The next profile that is another one now.
    pub fn poll_changed(&mut self) -> Option<ProfileChange> {
        self.changes.pop_front()
    }

    /// What to plan a model with wherever it runs.
    ///
    /// # Panics
    /// If it is not here.
    #[must_use]
    pub fn profile(&self, id: ModelId) -> &LatencyProfile {
        self.models[&id].common()
    }

    /// What a model takes on one GPU, if that is less than what it takes on every one.
    ///
    /// # Panics
    /// If the model is not here.
    #[must_use]
    pub fn own_profile(&self, id: ModelId, gpu: GpuId) -> Option<&Arc<LatencyProfile>> {
        self.models[&id].own_profile(gpu)
    }

    /// What a model takes on one GPU.
    ///
    /// # Panics
    /// If the model is not here.
    #[must_use]
    pub fn profile_on(&self, id: ModelId, gpu: GpuId) -> &LatencyProfile {
        self.own_profile(id, gpu).map_or_else(|| self.profile(id), |own| &**own)
    }

    fn note_changes(&mut self, id: ModelId) {
        let (is_common_changed, gpus) = self.models.get_mut(&id).expect("callers looked it up").take_changes();
        self.changes.extend(is_common_changed.then_some(ProfileChange::Common(id)));
        self.changes.extend(gpus.into_iter().map(|gpu| ProfileChange::OfGpu(id, gpu)));
    }
}

#[cfg(test)]
mod tests;
