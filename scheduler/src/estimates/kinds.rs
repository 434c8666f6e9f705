//! One model's GPUs: which are alike, and how long each takes against what it offered.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use proto::{GpuId, LatencyProfile, Span};

use super::{BELIEVED_MAX, BELIEVED_PART, Estimate, Estimates, TOLERANCE};

/// Executions of a model on a GPU that count; fewer than that teach nothing yet.
pub(super) const WINDOW: usize = 32;
/// Factors beyond are not believed.
const FACTOR_MIN: u32 = AS_OFFERED / BELIEVED_PART as u32;
const FACTOR_MAX: u32 = AS_OFFERED * BELIEVED_MAX as u32;
/// Factors are in thousandths, so that they are ordered and one seed gives one history.
const AS_OFFERED: u32 = 1000;

/// What is known of one model. Bounded by the GPUs that host it.
#[derive(Debug)]
pub(super) struct Kinds {
    /// The slowest of all kinds.
    common: LatencyProfile,
    /// The first is that of the common offer; at most [`Estimates::KINDS_MAX`].
    kinds: Vec<Kind>,
    /// Those of other kinds than the first one, and those that have run the model.
    gpus: BTreeMap<GpuId, Gpu>,
    /// GPUs whose profile is another one since [`Self::take_changes`].
    changed: Vec<GpuId>,
    is_common_changed: bool,
}

/// GPUs whose offers are alike.
#[derive(Debug)]
struct Kind {
    offered: LatencyProfile,
    /// `offered` times `factor`.
    current: Arc<LatencyProfile>,
    factor: u32,
    /// Of all its GPUs with a full window; the last one is the slowest.
    medians: BTreeSet<(u32, GpuId)>,
    /// GPUs of this kind in `Kinds::gpus`.
    gpus: usize,
}

#[derive(Debug)]
struct Gpu {
    kind: usize,
    /// Empty until it runs the model.
    window: Window,
    /// What `own` was decided with.
    factor: u32,
    /// `None`: the common profile holds.
    own: Option<Arc<LatencyProfile>>,
}

impl Gpu {
    /// Its own factor, or its kind's as long as it has none; not more than that of its kind, which follows the slowest.
    fn learned(&self, kind: &Kind) -> u32 {
        self.window.median.map_or(kind.factor, |median| median.min(kind.factor))
    }
}

/// The last factors of one GPU.
#[derive(Debug, Default)]
struct Window {
    factors: VecDeque<u32>,
    /// Once it is full.
    median: Option<u32>,
}

impl Window {
    fn push(&mut self, factor: u32) {
        if self.factors.len() == WINDOW {
            self.factors.pop_front();
        }
        self.factors.push_back(factor);
        if self.factors.len() == WINDOW {
            let mut sorted: [u32; WINDOW] = std::array::from_fn(|index| self.factors[index]);
            sorted.sort_unstable();
            self.median = Some(sorted[WINDOW / 2]);
        }
    }
}

impl Kind {
    fn new(offered: LatencyProfile) -> Self {
        let current = Arc::new(offered.clone());
        Self { offered, current, factor: AS_OFFERED, medians: BTreeSet::new(), gpus: 0 }
    }

    /// True if the profile has changed.
    fn follow(&mut self) -> bool {
        let slowest = match self.medians.last() {
            Some(&(slowest, _)) => slowest,
            // What was learned left with those who taught it.
            None if self.gpus == 0 => AS_OFFERED,
            None => return false,
        };
        if is_near(slowest, self.factor) {
            return false;
        }
        self.factor = slowest;
        self.current = Arc::new(scaled(&self.offered, slowest));
        true
    }
}

impl Kinds {
    pub(super) fn new(offered: LatencyProfile) -> Self {
        Self {
            common: offered.clone(),
            kinds: vec![Kind::new(offered)],
            gpus: BTreeMap::new(),
            changed: Vec::new(),
            is_common_changed: false,
        }
    }

    fn on_factor(&mut self, id: GpuId, factor: u32) {
        let kind_index = self.gpus.get(&id).map_or(0, |gpu| gpu.kind);
        let kind = &mut self.kinds[kind_index];
        let mut is_new = false;
        let gpu = self.gpus.entry(id).or_insert_with(|| {
            is_new = true;
            kind.gpus += 1;
            Gpu { kind: 0, window: Window::default(), factor: kind.factor, own: None }
        });
        let before = gpu.window.median;
        gpu.window.push(factor);
        if gpu.window.median != before {
            if let Some(median) = before {
                kind.medians.remove(&(median, id));
            }
            kind.medians.extend(gpu.window.median.map(|median| (median, id)));
        }
        self.follow();
        let gpu = &self.gpus[&id];
        if is_new || !is_near(gpu.learned(&self.kinds[gpu.kind]), gpu.factor) {
            self.decide(id);
        }
    }

    /// A GPU that has run nothing.
    pub(super) fn insert_gpu(&mut self, id: GpuId, kind: usize) {
        if kind != 0 {
            self.kinds[kind].gpus += 1;
            let factor = self.kinds[kind].factor;
            self.gpus.insert(id, Gpu { kind, window: Window::default(), factor, own: None });
            self.decide(id);
        }
    }

    /// That of a like offer; else a new one, in the place of one without GPUs if there is any.
    fn kind_of(&mut self, offered: &LatencyProfile) -> usize {
        if let Some(like) = self.kinds.iter().position(|kind| kind.offered.is_near(offered, TOLERANCE)) {
            return like;
        }
        let unused = (1..self.kinds.len()).find(|&kind| self.kinds[kind].gpus == 0);
        match unused {
            Some(kind) => self.kinds[kind] = Kind::new(offered.clone()),
            None if self.kinds.len() < Estimates::KINDS_MAX => self.kinds.push(Kind::new(offered.clone())),
            None => return 0,
        }
        unused.unwrap_or(self.kinds.len() - 1)
    }

    /// Kinds follow their slowest GPUs.
    fn follow(&mut self) {
        let mut has_changed = false;
        for kind in &mut self.kinds {
            has_changed |= kind.follow();
        }
        if has_changed {
            self.on_kinds_changed();
        }
    }

    fn on_kinds_changed(&mut self) {
        let first = LatencyProfile::clone(&self.kinds[0].current);
        let others = self.kinds[1..].iter().filter(|kind| kind.gpus > 0);
        let common = others.fold(first, |slowest, other| slowest.slowest(&other.current));
        self.is_common_changed |= common != self.common;
        self.common = common;
        for gpu in self.gpus.keys().copied().collect::<Vec<_>>() {
            self.decide(gpu);
        }
    }

    /// Whether a GPU has a profile of its own, and which one.
    fn decide(&mut self, id: GpuId) {
        let gpu = self.gpus.get_mut(&id).expect("callers looked it up");
        let kind = &self.kinds[gpu.kind];
        gpu.factor = gpu.learned(kind);
        let profile =
            if gpu.factor == kind.factor { kind.current.clone() } else { Arc::new(scaled(&kind.offered, gpu.factor)) };
        let own = Some(profile).filter(|profile| !profile.is_near(&self.common, TOLERANCE));
        if own != gpu.own {
            gpu.own = own;
            self.changed.push(id);
        }
    }

    /// Yields the GPU's kind, if it was not as all are.
    fn take_gpu(&mut self, id: GpuId) -> Option<usize> {
        let gpu = self.gpus.remove(&id)?;
        let kind = &mut self.kinds[gpu.kind];
        kind.gpus -= 1;
        if let Some(median) = gpu.window.median {
            kind.medians.remove(&(median, id));
        }
        Some(gpu.kind)
    }
}

impl Estimate for Kinds {
    fn offered(&self) -> &LatencyProfile {
        &self.kinds[0].offered
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
        self.kinds.iter().all(|kind| kind.factor == AS_OFFERED)
    }

    fn handle_offer(&mut self, gpus: &[GpuId], offered: &LatencyProfile) {
        let kind = self.kind_of(offered);
        for &gpu in gpus {
            let had_own = self.own_profile(gpu).is_some();
            self.take_gpu(gpu);
            if had_own {
                self.changed.push(gpu);
            }
            self.insert_gpu(gpu, kind);
        }
        // Slower than what was taken to be the slowest: no GPU's own profile may be.
        if kind != 0 && self.kinds[kind].current.slowest(&self.common) != self.common {
            self.on_kinds_changed();
        }
    }

    fn handle_executed(&mut self, id: GpuId, size: usize, execution: Span) -> bool {
        let kind = &self.kinds[self.gpus.get(&id).map_or(0, |gpu| gpu.kind)];
        if size > kind.offered.max_batch() {
            return false;
        }
        let offered_ns = kind.offered.latency(size).as_nanos() as f64;
        let factor = (execution.as_nanos() as f64 / offered_ns * f64::from(AS_OFFERED)).round() as u32;
        self.on_factor(id, factor.clamp(FACTOR_MIN, FACTOR_MAX));
        true
    }

    fn learned(&self) -> Vec<(GpuId, u32)> {
        self.gpus.iter().filter_map(|(&id, gpu)| Some((id, gpu.window.median?))).collect()
    }

    fn handle_learned(&mut self, id: GpuId, factor: u32) {
        // It is worth as much as a window of executions that say the same.
        if (FACTOR_MIN..=FACTOR_MAX).contains(&factor) {
            (0..WINDOW).for_each(|_| self.on_factor(id, factor));
        }
    }

    fn forget_executions(&mut self) {
        for kind in &mut self.kinds {
            (kind.factor, kind.current) = (AS_OFFERED, Arc::new(kind.offered.clone()));
            kind.medians.clear();
        }
        for gpu in self.gpus.values_mut() {
            gpu.window = Window::default();
        }
        self.on_kinds_changed();
        let first = self.gpus.extract_if(.., |_, gpu| gpu.kind == 0).count();
        self.kinds[0].gpus -= first;
    }

    fn remove_gpu(&mut self, id: GpuId) {
        self.take_gpu(id);
    }

    fn rename_gpu(&mut self, old: GpuId, new: GpuId) {
        if let Some(kind) = self.take_gpu(old) {
            self.insert_gpu(new, kind);
        }
    }

    fn take_changes(&mut self) -> (bool, Vec<GpuId>) {
        (std::mem::take(&mut self.is_common_changed), std::mem::take(&mut self.changed))
    }
}

fn is_near(one: u32, other: u32) -> bool {
    let (one, other) = (f64::from(one), f64::from(other));
    one <= other * (1.0 + TOLERANCE) && other <= one * (1.0 + TOLERANCE)
}

fn scaled(profile: &LatencyProfile, factor: u32) -> LatencyProfile {
    profile.scaled(f64::from(factor) / f64::from(AS_OFFERED))
}
