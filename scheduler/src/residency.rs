//! What is in the memory of a GPU that holds but a part of what it hosts, and what is on its way there (Clockwork,
//! section 5.3: the controller counts free pages, no more).

use std::collections::BTreeMap;

use proto::{GpuId, ModelId, Span, Timestamp};

use crate::{
    gpu_work::GpuWork,
    task::{LoadEnd, Weights},
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
}

impl Residency {
    /// Empty memory.
    #[must_use]
    pub fn new(now: Timestamp, pages: u32) -> Self {
        Self { pages, pages_free: pages, models: BTreeMap::new(), link: GpuWork::new(now) }
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

    /// Pages that a model's weights take here.
    #[must_use]
    pub fn pages_of(&self, model: ModelId) -> u32 {
        self.models.get(&model).map_or(0, |&(_, pages)| pages)
    }

    /// Weights that are there. False if they do not fit, and so cannot be.
    pub fn insert_resident(&mut self, model: ModelId, pages: u32) -> bool {
        let fits = pages <= self.pages_free && !self.models.contains_key(&model);
        if fits {
            self.pages_free -= pages;
            self.models.insert(model, (Place::Resident, pages));
        }
        fits
    }

    /// A load begins at `start`, behind those that were begun. Yields when it should end.
    ///
    /// # Panics
    /// If there are too few free pages, or the weights are there.
    pub fn begin_load(&mut self, start: Timestamp, model: ModelId, weights: Weights) -> Timestamp {
        self.pages_free = self.pages_free.checked_sub(weights.pages).expect("callers have made room");
        assert!(self.models.insert(model, (Place::Loading, weights.pages)).is_none(), "{model:?} is there");
        self.link.push(start, weights.load);
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
        assert!(memory.insert_resident(ModelId(1), 4));
        assert!(!memory.insert_resident(ModelId(1), 1) && !memory.insert_resident(ModelId(2), 7));
        let weights = Weights { pages: 6, load: Span::from_millis(8) };
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
    fn loads_follow_one_another() {
        let mut memory = Residency::new(at(0), 10);
        let weights = Weights { pages: 1, load: Span::from_millis(8) };
        assert_eq!(memory.begin_load(at(1), ModelId(0), weights), at(9));
        assert_eq!(memory.begin_load(at(2), ModelId(1), weights), at(17));
    }
}
