//! What is in the memory of a GPU that holds but a part of what it hosts, and what is on its way there (Clockwork,
//! section 5.3: the controller counts free pages, no more).

use std::collections::{BTreeMap, BTreeSet};

use proto::{GpuId, ModelId, Span, Timestamp};

use crate::{
    gpu_work::GpuWork,
    task::{GpuMemory, LoadEnd, Weights},
};

/// A link is given work when it has less than this, so that what comes later and is more urgent waits little
/// (Clockwork, section 5.3).
pub const LOOKAHEAD: Span = Span::from_millis(5);
/// A load may start so much later than planned.
pub const LATE_MAX: Span = Span::from_millis(10);

/// What a controller of memory wants done; in the order in which it says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// As [`PlannerOutput::Unload`](crate::PlannerOutput::Unload).
    Unload(GpuId, ModelId),
    /// As [`PlannerOutput::Load`](crate::PlannerOutput::Load).
    Load {
        /// The GPU.
        gpu: GpuId,
        /// The model.
        model: ModelId,
        /// The earliest start.
        earliest: Timestamp,
        /// The latest start.
        latest: Timestamp,
        /// How long it takes, if it goes as planned.
        takes: Span,
    },
}

/// Where a model's weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the GPU's memory.
    Resident,
    /// On their way there; their pages are taken.
    Loading,
}

/// One GPU's memory for weights, and the way to it.
#[derive(Debug)]
pub struct Residency {
    pages: u32,
    pages_free: u32,
    /// With the pages of each.
    models: BTreeMap<ModelId, (Place, u32)>,
    /// Loads that have not been reported.
    link: GpuWork,
    /// What must be read from disk to be loaded.
    on_disk: BTreeSet<ModelId>,
    /// What stays.
    pinned: BTreeSet<ModelId>,
}

impl Residency {
    /// Empty memory.
    #[must_use]
    pub fn new(now: Timestamp, pages: u32) -> Self {
        let (models, on_disk, pinned) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { pages, pages_free: pages, models, link: GpuWork::new(now), on_disk, pinned }
    }

    /// The memory of a GPU that joins and hosts `models` (ascending): what is said to be there, as far as it fits, and
    /// all that take no pages.
    #[must_use]
    pub fn joined(now: Timestamp, memory: &GpuMemory, models: &[ModelId], pages_of: impl Fn(ModelId) -> u32) -> Self {
        let mut joined = Self::new(now, memory.pages);
        joined.on_disk = memory.on_disk.iter().copied().collect();
        joined.pinned = memory.pinned.iter().copied().collect();
        let without = models.iter().filter(|&&id| pages_of(id) == 0);
        for &id in memory.resident.iter().chain(without) {
            if models.binary_search(&id).is_ok() {
                joined.insert_resident(id, pages_of(id));
            }
        }
        joined
    }

    /// All pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages that nothing is in, or on its way to.
    #[must_use]
    pub fn pages_free(&self) -> u32 {
        self.pages_free
    }

    /// When the loads that were begun will have ended.
    #[must_use]
    pub fn link_free_at(&self) -> Timestamp {
        self.link.free_at()
    }

    /// Where a model's weights are; `None` if they are not in this memory.
    #[must_use]
    pub fn place(&self, model: ModelId) -> Option<Place> {
        self.models.get(&model).map(|&(place, _)| place)
    }

    /// Whether a model's weights may make room: they are there, take pages, and need not stay.
    #[must_use]
    pub fn may_go(&self, model: ModelId) -> bool {
        let is_there = matches!(self.models.get(&model), Some(&(Place::Resident, pages)) if pages > 0);
        is_there && !self.pinned.contains(&model)
    }

    /// Pages that a model's weights take here.
    #[must_use]
    pub fn pages_of(&self, model: ModelId) -> u32 {
        self.models.get(&model).map_or(0, |&(_, pages)| pages)
    }

    /// Weights that are there; if they do not fit, they cannot be.
    fn insert_resident(&mut self, model: ModelId, pages: u32) {
        if pages <= self.pages_free && !self.models.contains_key(&model) {
            self.pages_free -= pages;
            self.models.insert(model, (Place::Resident, pages));
        }
    }

    /// How long a load of a model takes now.
    #[must_use]
    pub fn load_time(&self, model: ModelId, weights: Weights) -> Span {
        if self.on_disk.contains(&model) { weights.load + weights.read } else { weights.load }
    }

    /// A model's weights are in host memory from now on, or on disk only. True if that is news.
    pub fn set_in_host_memory(&mut self, model: ModelId, is_there: bool) -> bool {
        if is_there { self.on_disk.remove(&model) } else { self.on_disk.insert(model) }
    }

    /// Whether a model's weights are in host memory.
    #[must_use]
    pub fn is_in_host_memory(&self, model: ModelId) -> bool {
        !self.on_disk.contains(&model)
    }

    /// A load begins at `start`, behind those that were begun. Yields when it should end.
    ///
    /// # Panics
    /// If there are too few free pages, or the weights are there.
    pub fn begin_load(&mut self, start: Timestamp, model: ModelId, weights: Weights) -> Timestamp {
        self.pages_free = self.pages_free.checked_sub(weights.pages).expect("callers have made room");
        assert!(self.models.insert(model, (Place::Loading, weights.pages)).is_none(), "{model:?} is there");
        self.link.push(start, self.load_time(model, weights));
        self.link.free_at()
    }

    /// The oldest load that was not reported ended. False if this model is not being loaded.
    pub fn handle_loaded(&mut self, model: ModelId, end: LoadEnd) -> bool {
        let Some((place @ Place::Loading, pages)) = self.models.get_mut(&model) else { return false };
        self.link.handle_finished(end.finished_at);
        if end.is_loaded {
            *place = Place::Resident;
        } else {
            self.pages_free += *pages;
            self.models.remove(&model);
        }
        true
    }

    /// Weights that are there make room.
    ///
    /// # Panics
    /// If they are not there.
    pub fn unload(&mut self, model: ModelId) {
        let (place, pages) = self.models.remove(&model).expect("callers know what is there");
        assert_eq!(place, Place::Resident, "a load cannot be taken back");
        self.pages_free += pages;
    }

    /// All models that are there or on their way.
    pub fn models(&self) -> impl Iterator<Item = (ModelId, Place)> {
        self.models.iter().map(|(&model, &(place, _))| (model, place))
    }
}

/// Loads that fail again and again, as those of a file that cannot be read any more: after one failure the next try is
/// made at once, since a load may have come too late; after more ever more rarely.
#[derive(Debug, Default)]
pub struct Retries {
    /// Failures in a row, and when the next try may be made, if not at once.
    failed: BTreeMap<ModelId, (u32, Option<Timestamp>)>,
    /// By when the next try may be made.
    waiting: BTreeSet<(Timestamp, ModelId)>,
}

impl Retries {
    /// After two failures in a row; twice that after each further one.
    const PAUSE: Span = Span::from_millis(10);
    const DOUBLED_MAX: u32 = 9;

    /// A load ended.
    pub fn handle_loaded(&mut self, model: ModelId, end: LoadEnd) {
        let (failures, from) = self.failed.remove(&model).unwrap_or_default();
        if let Some(at) = from {
            self.waiting.remove(&(at, model));
        }
        if !end.is_loaded {
            let pause = |doubled: u32| end.finished_at + Self::PAUSE * (1 << doubled.min(Self::DOUBLED_MAX));
            let from = failures.checked_sub(1).map(pause);
            self.waiting.extend(from.map(|at| (at, model)));
            self.failed.insert(model, (failures.saturating_add(1), from));
        }
    }

    /// When a model may be loaded that must wait for it.
    #[must_use]
    pub fn waits_until(&self, model: ModelId) -> Option<Timestamp> {
        self.failed.get(&model).and_then(|&(_, from)| from)
    }

    /// The next model that need not wait any more.
    pub fn poll_released(&mut self, now: Timestamp) -> Option<ModelId> {
        let &(at, model) = self.waiting.first().filter(|&&(at, _)| at <= now)?;
        self.waiting.remove(&(at, model));
        if let Some((_, from)) = self.failed.get_mut(&model) {
            *from = None;
        }
        Some(model)
    }

    /// When [`Self::poll_released`] yields something.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.waiting.first().map(|&(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelId = ModelId(3);

    fn at(ms: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(ms)
    }

    #[test]
    fn pages_are_taken_by_what_is_on_its_way_and_come_back() {
        let mut memory = Residency::new(at(0), 10);
        memory.insert_resident(ModelId(1), 4);
        let weights = Weights::new(6, Span::from_millis(8));
        assert_eq!(memory.begin_load(at(2), MODEL, weights), at(10));
        assert_eq!((memory.pages_free(), memory.place(MODEL)), (0, Some(Place::Loading)));
        assert!(!memory.handle_loaded(ModelId(1), LoadEnd { finished_at: at(9), is_loaded: true }));
        assert!(memory.handle_loaded(MODEL, LoadEnd { finished_at: at(9), is_loaded: false }));
        assert_eq!((memory.pages_free(), memory.place(MODEL), memory.link_free_at()), (6, None, at(9)));
        memory.begin_load(at(9), MODEL, weights);
        assert!(memory.handle_loaded(MODEL, LoadEnd { finished_at: at(18), is_loaded: true }));
        memory.unload(MODEL);
        memory.unload(ModelId(1));
        assert_eq!((memory.pages_free(), memory.models().count(), memory.link_free_at()), (10, 0, at(18)));
    }

    #[test]
    fn a_gpu_joins_with_what_it_hosts_and_what_fits() {
        let pages = |id: ModelId| [4, 6, 4, 0, 2, 0][id.0 as usize];
        let resident = [0, 1, 0, 2, 4].map(ModelId).to_vec();
        let hosted = [0, 1, 2, 3, 5].map(ModelId);
        let (pinned, on_disk) = (vec![ModelId(2)], vec![ModelId(5)]);
        let joins = GpuMemory { pages: 9, resident, pinned, on_disk };
        let mut memory = Residency::joined(at(0), &joins, &hosted, pages);
        let there: Vec<_> = memory.models().collect();
        assert_eq!(there, [0, 2, 3, 5].map(|id| (ModelId(id), Place::Resident)));
        assert_eq!((memory.pages(), memory.pages_free()), (9, 1));
        assert_eq!([0, 1, 2, 3].map(|id| memory.may_go(ModelId(id))), [true, false, false, false]);
        let weights = Weights { read: Span::from_millis(50), ..Weights::new(1, Span::from_millis(8)) };
        assert_eq!([0, 5].map(|id| memory.load_time(ModelId(id), weights).as_millis_f64()), [8.0, 58.0]);
        assert!(memory.set_in_host_memory(ModelId(5), true) && !memory.set_in_host_memory(ModelId(5), true));
        assert_eq!(memory.load_time(ModelId(5), weights), weights.load);
    }

    #[test]
    fn loads_that_fail_again_are_tried_ever_more_rarely() {
        let mut retries = Retries::default();
        let fails = |ms: i64| LoadEnd { finished_at: at(ms), is_loaded: false };
        retries.handle_loaded(MODEL, fails(0));
        assert_eq!((retries.waits_until(MODEL), retries.poll_timeout()), (None, None));
        for (now, next) in [(1, 11), (11, 31), (31, 71)] {
            retries.handle_loaded(MODEL, fails(now));
            assert_eq!((retries.waits_until(MODEL), retries.poll_timeout()), (Some(at(next)), Some(at(next))));
            assert_eq!(retries.poll_released(at(next) - Span(1)), None);
            assert_eq!(retries.poll_released(at(next)), Some(MODEL));
            assert_eq!((retries.waits_until(MODEL), retries.poll_timeout()), (None, None));
        }
        (0..100).for_each(|_| retries.handle_loaded(MODEL, fails(100)));
        assert_eq!(retries.poll_timeout(), Some(at(100 + 5_120)));
        // Another GPU has it.
        retries.handle_loaded(MODEL, LoadEnd { finished_at: at(101), is_loaded: true });
        assert_eq!((retries.waits_until(MODEL), retries.poll_timeout()), (None, None));
        retries.handle_loaded(MODEL, fails(102));
        assert_eq!(retries.waits_until(MODEL), None);
    }

    #[test]
    fn loads_follow_one_another() {
        let mut memory = Residency::new(at(0), 10);
        let weights = Weights::new(1, Span::from_millis(8));
        assert_eq!(memory.begin_load(at(1), ModelId(0), weights), at(9));
        assert_eq!(memory.begin_load(at(2), ModelId(1), weights), at(17));
    }
}
