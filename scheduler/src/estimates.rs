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
//! If a model does not run any more, perhaps since its estimate leaves no time to, the offer holds again after a while.
//!
//! The policy `clockwork` has Clockwork's own estimates instead ([`Learning::Longest`]), of loads, too.

mod kinds;
mod rolling;

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::Arc,
};

use proto::{GpuId, LatencyProfile, ModelId, Span, Timestamp};

use crate::indexed_heap::IndexedHeap;
use kinds::Kinds;
use rolling::{Longest, Rolling};

/// What is learned is used once it is off by more than this part.
pub(crate) const TOLERANCE: f64 = 0.05;
/// Durations beyond so many times an offer, or so small a part of it, are not believed: such a backend is to be looked
/// at, or its offer was of another model.
const BELIEVED_MAX: i64 = 4;
const BELIEVED_PART: i64 = 2;

/// How estimates follow executions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learning {
    /// Not at all: offers hold for ever.
    Off,
    /// By one factor of each GPU for all batch sizes.
    Factors,
    /// Each action takes the longest of its last ten durations (Clockwork, section 5.3).
    Longest,
}

impl Learning {
    /// A model without an execution for so long is taken to be as fast as offered. Clockwork says nothing of that; here
    /// one execution that hung must not keep a model from ever running again.
    fn forget_after(self) -> Span {
        if self == Self::Longest { Span::from_millis(600_000) } else { Span::from_millis(10_000) }
    }
}

/// What is known of one model.
trait Estimate: fmt::Debug + Send {
    /// The slowest of all GPUs' offers.
    fn offered(&self) -> &LatencyProfile;
    /// What holds wherever it runs.
    fn common(&self) -> &LatencyProfile;
    /// What holds on this GPU, if that is less than the common one.
    fn own_profile(&self, gpu: GpuId) -> Option<&Arc<LatencyProfile>>;
    /// Those that have one.
    fn gpus_with_own_profile(&self) -> Vec<GpuId>;
    /// Whether anything is known of single GPUs.
    fn knows_gpus(&self) -> bool;
    /// Whether nothing is planned otherwise than offered.
    fn is_as_offered(&self) -> bool;
    /// GPUs offer this.
    fn handle_offer(&mut self, gpus: &[GpuId], offered: &LatencyProfile);
    /// A GPU ran a batch of `size`. False if that teaches nothing.
    fn handle_executed(&mut self, gpu: GpuId, size: usize, execution: Span) -> bool;
    /// What can be told of GPUs that have run the model for a while, in thousandths of what they offer.
    fn learned(&self) -> Vec<(GpuId, u32)>;
    /// What another one has learned of a GPU.
    fn handle_learned(&mut self, gpu: GpuId, factor: u32);
    /// Takes all GPUs to be as fast as offered.
    fn forget_executions(&mut self);
    /// A GPU is gone.
    fn remove_gpu(&mut self, gpu: GpuId);
    /// A GPU has another id: it offers what it did, and has run nothing yet.
    fn rename_gpu(&mut self, old: GpuId, new: GpuId);
    /// Whether the common profile is another one since the last call, and of which GPUs the own one is; a GPU may be
    /// named twice.
    fn take_changes(&mut self) -> (bool, Vec<GpuId>);
}

/// The profiles that the scheduler plans with.
#[derive(Debug)]
pub struct Estimates {
    learning: Learning,
    models: BTreeMap<ModelId, Box<dyn Estimate>>,
    /// What loads of these models take.
    loads: BTreeMap<ModelId, Longest>,
    /// By model: when its offer holds again, if it does not.
    forgotten_at: IndexedHeap,
    changes: VecDeque<ProfileChange>,
}

/// A profile is another one now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfileChange {
    /// A model's common one, or what its loads take.
    Common(ModelId),
    /// What a model takes on one GPU.
    OfGpu(ModelId, GpuId),
}

impl Estimates {
    /// Kinds of GPUs that one model tells apart, with that of its common offer; GPUs of further ones count as common.
    pub const KINDS_MAX: usize = 16;

    /// Without models.
    #[must_use]
    pub fn new(learning: Learning) -> Self {
        Self {
            learning,
            models: BTreeMap::new(),
            loads: BTreeMap::new(),
            forgotten_at: IndexedHeap::default(),
            changes: VecDeque::new(),
        }
    }

    /// A model with a new offer, the slowest of all GPUs': what was measured against the last one is gone. All GPUs are
    /// taken to be like that until [`Self::handle_offer`] tells otherwise.
    pub fn handle_model(&mut self, id: ModelId, offered: LatencyProfile) {
        self.forgotten_at.remove(id.0);
        self.loads.remove(&id);
        let estimate: Box<dyn Estimate> = match self.learning {
            Learning::Off | Learning::Factors => Box::new(Kinds::new(offered)),
            Learning::Longest => Box::new(Rolling::new(offered)),
        };
        let former = self.models.insert(id, estimate);
        self.changes.push_back(ProfileChange::Common(id));
        let gone = former.iter().flat_map(|former| former.gpus_with_own_profile());
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
        if self.learning == Learning::Off || !estimate.handle_executed(gpu, size, execution) {
            return;
        }
        self.on_learned(now, id);
    }

    /// A model's weights were loaded, which took so long; as offered it takes `offered`.
    pub fn handle_loaded(&mut self, id: ModelId, offered: Span, took: Span) {
        if self.learning == Learning::Longest && self.models.contains_key(&id) {
            let took = believed(took, offered);
            if self.loads.entry(id).or_default().push(took) {
                self.changes.push_back(ProfileChange::Common(id));
            }
        }
    }

    /// What a load of a model is planned to take that is offered to take `offered`.
    #[must_use]
    pub fn load(&self, id: ModelId, offered: Span) -> Span {
        self.loads.get(&id).and_then(Longest::get).unwrap_or(offered)
    }

    fn on_learned(&mut self, now: Timestamp, id: ModelId) {
        self.note_changes(id);
        if self.models[&id].is_as_offered() {
            self.forgotten_at.remove(id.0);
        } else {
            self.forgotten_at.set(id.0, now + self.learning.forget_after());
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
            self.models.get_mut(&id).expect("just listed").rename_gpu(old, new);
            self.note_changes(id);
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
        self.models.get(&id).map_or_else(Vec::new, |estimate| estimate.learned())
    }

    /// The same of another one that planned the model before. Factors that are not believed of executions are not
    /// believed here, either.
    pub fn handle_learned(&mut self, now: Timestamp, id: ModelId, learned: &[(GpuId, u32)]) {
        let Some(estimate) = self.models.get_mut(&id).filter(|_| self.learning != Learning::Off) else { return };
        for &(gpu, factor) in learned {
            estimate.handle_learned(gpu, factor);
        }
        self.on_learned(now, id);
    }

    /// A model is not here any more.
    pub fn remove(&mut self, id: ModelId) {
        self.forgotten_at.remove(id.0);
        self.models.remove(&id);
        self.loads.remove(&id);
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

/// A duration, as far as it is believed of an action that is offered to take `offered`.
fn believed(took: Span, offered: Span) -> Span {
    took.clamp(offered / BELIEVED_PART, offered * BELIEVED_MAX).max(Span(1))
}

#[cfg(test)]
mod tests;
