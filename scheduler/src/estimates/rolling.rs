//! One model's l(b) as Clockwork has it (section 5.3): what the last ten durations of a batch size on a GPU say. The
//! 99th percentile of ten is the longest.
//!
//! Sizes that a GPU has not run take what was offered, as far as larger and smaller ones do not show otherwise: l(b)
//! never decreases. The common profile is the slowest of all GPUs that are known.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use proto::{GpuId, LatencyProfile, Span};

use super::{Estimate, believed};

/// Durations that count (section 5.3: "past 10 actions").
const WINDOW: usize = 10;

/// The last durations of one action.
#[derive(Debug, Default, Clone)]
pub(super) struct Longest {
    last: VecDeque<Span>,
}

impl Longest {
    /// True if the longest is another one now.
    pub(super) fn push(&mut self, took: Span) -> bool {
        let before = self.get();
        if self.last.len() == WINDOW {
            self.last.pop_front();
        }
        self.last.push_back(took);
        self.get() != before
    }

    /// `None` as long as there was none.
    pub(super) fn get(&self) -> Option<Span> {
        self.last.iter().max().copied()
    }
}

/// What is known of one model. Bounded by the GPUs that host it, and the batch sizes that they offer.
#[derive(Debug)]
pub(super) struct Rolling {
    offered: LatencyProfile,
    common: LatencyProfile,
    /// Those that have offered something else, or have run the model.
    gpus: BTreeMap<GpuId, Gpu>,
    changed: Vec<GpuId>,
    is_common_changed: bool,
}

#[derive(Debug)]
struct Gpu {
    offered: LatencyProfile,
    /// By batch size.
    sizes: BTreeMap<usize, Longest>,
    profile: LatencyProfile,
    /// `None`: the common profile holds.
    own: Option<Arc<LatencyProfile>>,
}

impl Gpu {
    fn new(offered: LatencyProfile) -> Self {
        Self { profile: offered.clone(), offered, sizes: BTreeMap::new(), own: None }
    }

    /// True if the profile is another one now.
    fn follow(&mut self) -> bool {
        let sizes = 1..=self.offered.max_batch();
        let mut table: Vec<_> = sizes.map(|size| self.offered.latency(size)).collect();
        let mut least = Span(i64::MAX - 1);
        for (index, latency) in table.iter_mut().enumerate().rev() {
            let seen = self.sizes.get(&(index + 1)).and_then(Longest::get);
            *latency = seen.unwrap_or((*latency).min(least));
            least = least.min(*latency);
        }
        let mut most = Span(1);
        for latency in &mut table {
            most = most.max(*latency);
            *latency = most;
        }
        let profile = LatencyProfile::from_table(table).expect("positive, bounded and made not to decrease");
        let is_changed = profile != self.profile;
        self.profile = profile;
        is_changed
    }
}

impl Rolling {
    pub(super) fn new(offered: LatencyProfile) -> Self {
        Self { common: offered.clone(), offered, gpus: BTreeMap::new(), changed: Vec::new(), is_common_changed: false }
    }

    /// Some GPU's profile is another one.
    fn on_changed(&mut self) {
        // GPUs that nothing is known of are like the common offer, or those of that offer that are known.
        let is_offer_known = self.gpus.values().any(|gpu| gpu.offered == self.offered);
        let offered = Some(&self.offered).filter(|_| !is_offer_known);
        let mut profiles = offered.into_iter().chain(self.gpus.values().map(|gpu| &gpu.profile));
        let first = profiles.next().expect("the offer, or a GPU with it").clone();
        let common = profiles.fold(first, |slowest, profile| slowest.slowest(profile));
        self.is_common_changed |= common != self.common;
        self.common = common;
        for (&id, gpu) in &mut self.gpus {
            let own = (gpu.profile != self.common).then(|| Arc::new(gpu.profile.clone()));
            if own != gpu.own {
                gpu.own = own;
                self.changed.push(id);
            }
        }
    }
}

impl Estimate for Rolling {
    fn offered(&self) -> &LatencyProfile {
        &self.offered
    }

    fn common(&self) -> &LatencyProfile {
        &self.common
    }

    fn own_profile(&self, gpu: GpuId) -> Option<&Arc<LatencyProfile>> {
        self.gpus.get(&gpu)?.own.as_ref()
    }

    fn gpus_with_own_profile(&self) -> Vec<GpuId> {
        self.gpus.iter().filter(|(_, gpu)| gpu.own.is_some()).map(|(&id, _)| id).collect()
    }

    fn knows_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    fn is_as_offered(&self) -> bool {
        self.gpus.values().all(|gpu| gpu.profile == gpu.offered)
    }

    fn handle_offer(&mut self, gpus: &[GpuId], offered: &LatencyProfile) {
        for &id in gpus {
            let had_own = self.gpus.insert(id, Gpu::new(offered.clone())).is_some_and(|former| former.own.is_some());
            self.changed.extend(had_own.then_some(id));
        }
        self.on_changed();
    }

    fn handle_executed(&mut self, id: GpuId, size: usize, execution: Span) -> bool {
        let is_new = !self.gpus.contains_key(&id);
        let gpu = self.gpus.entry(id).or_insert_with(|| Gpu::new(self.offered.clone()));
        if size > gpu.offered.max_batch() {
            return false;
        }
        let took = believed(execution, gpu.offered.latency(size));
        let is_changed = gpu.sizes.entry(size).or_default().push(took) && gpu.follow();
        // One that runs as it offered may be slower than all that are known.
        if is_new || is_changed {
            self.on_changed();
        }
        true
    }

    /// Ten durations are soon seen again.
    fn learned(&self) -> Vec<(GpuId, u32)> {
        Vec::new()
    }

    fn handle_learned(&mut self, _: GpuId, _: u32) {}

    fn forget_executions(&mut self) {
        for gpu in self.gpus.values_mut() {
            gpu.sizes.clear();
            gpu.profile = gpu.offered.clone();
        }
        self.on_changed();
    }

    fn remove_gpu(&mut self, id: GpuId) {
        self.gpus.remove(&id);
    }

    fn rename_gpu(&mut self, old: GpuId, new: GpuId) {
        if let Some(gpu) = self.gpus.remove(&old) {
            self.gpus.insert(new, Gpu::new(gpu.offered));
            self.on_changed();
        }
    }

    fn take_changes(&mut self) -> (bool, Vec<GpuId>) {
        (std::mem::take(&mut self.is_common_changed), std::mem::take(&mut self.changed))
    }
}
