//! Host memory for models' weights, if it is bounded: what is in it, and what makes room. What is not in it lies on
//! disk, and is read from there before it can be copied into a GPU's memory.
//!
//! What was loaded into a GPU longest ago makes room, as that is either in a GPU's memory or was not asked for since.
//! What is being loaded stays.

use std::collections::{BTreeMap, VecDeque};

use crate::ids::ModelId;

/// Weights come into host memory or leave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Whose.
    pub model: ModelId,
    /// They are in host memory from now on; otherwise on disk only.
    pub is_there: bool,
}

/// One machine's host memory for weights.
#[derive(Debug)]
pub struct HostMemory {
    pages: u32,
    pages_used: u32,
    models: BTreeMap<ModelId, Kept>,
    /// By `Kept::used`: those that may make room.
    idle: BTreeMap<u64, ModelId>,
    uses: u64,
    moved: VecDeque<Moved>,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    pages: u32,
    /// The largest was used last.
    used: u64,
    /// Loads of it that have not ended.
    loads: u32,
    /// It has been read.
    is_there: bool,
    /// It goes with the end of its loads.
    leaves: bool,
}

impl HostMemory {
    /// Empty memory of so many pages ([`PAGE_BYTES`](crate::weights::PAGE_BYTES)).
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let (models, idle, moved) = (BTreeMap::new(), BTreeMap::new(), VecDeque::new());
        Self { pages, pages_used: 0, models, idle, uses: 0, moved }
    }

    /// All pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages that weights are in, or are being read into.
    #[must_use]
    pub fn pages_used(&self) -> u32 {
        self.pages_used
    }

    /// Whether a model's weights are there.
    #[must_use]
    pub fn holds(&self, model: ModelId) -> bool {
        self.models.get(&model).is_some_and(|kept| kept.is_there)
    }

    /// A model's weights were read, and are not being loaded into any GPU yet. They stay unless what is being loaded
    /// takes their room.
    pub fn insert(&mut self, model: ModelId, pages: u32) {
        self.make_room(pages);
        let taken = self.models.get(&model).map_or(0, |kept| kept.pages);
        if self.pages - self.pages_used + taken < pages {
            return self.moved.push_back(Moved { model, is_there: false });
        }
        self.begin(model, pages);
        self.end(model, true);
    }

    /// A load of a model's weights into a GPU begins. True if they are there; otherwise they are read first, into
    /// room that is made for them.
    ///
    /// Callers see to it that what is loaded at once fits.
    pub fn begin(&mut self, model: ModelId, pages: u32) -> bool {
        self.uses += 1;
        let known = self.models.get(&model).copied();
        if let Some(known) = known {
            self.idle.remove(&known.used);
        }
        let known = known.unwrap_or(Kept { pages: 0, used: 0, loads: 0, is_there: false, leaves: false });
        self.make_room(pages.saturating_sub(known.pages));
        self.pages_used = self.pages_used - known.pages + pages;
        assert!(self.pages_used <= self.pages, "{model:?} takes {pages} pages, and what is being loaded the others");
        self.models.insert(model, Kept { pages, used: self.uses, loads: known.loads + 1, leaves: false, ..known });
        known.is_there
    }

    /// A load that began has ended. If it did not go well, what was to be read is not there.
    pub fn end(&mut self, model: ModelId, is_done: bool) {
        let Some(kept) = self.models.get_mut(&model) else { return };
        kept.loads = kept.loads.saturating_sub(1);
        let comes = is_done && !kept.leaves && !kept.is_there;
        kept.is_there |= comes;
        self.moved.extend(comes.then_some(Moved { model, is_there: true }));
        if kept.loads > 0 {
            return;
        }
        if kept.is_there && !kept.leaves {
            self.idle.insert(kept.used, model);
        } else {
            self.forget(model);
        }
    }

    /// A model is hosted no more, or has other weights: nothing of it stays once it is not being loaded.
    pub fn remove(&mut self, model: ModelId) {
        let Some(kept) = self.models.get_mut(&model) else { return };
        if kept.loads > 0 {
            kept.leaves = true;
            let was_there = std::mem::take(&mut kept.is_there);
            self.moved.extend(was_there.then_some(Moved { model, is_there: false }));
            return;
        }
        self.idle.remove(&kept.used);
        self.forget(model);
    }

    /// The next weights that have come or gone, in the order in which they have.
    pub fn poll_moved(&mut self) -> Option<Moved> {
        self.moved.pop_front()
    }

    fn make_room(&mut self, pages: u32) {
        while self.pages - self.pages_used < pages
            && let Some((_, evicted)) = self.idle.pop_first()
        {
            self.forget(evicted);
        }
    }

    fn forget(&mut self, model: ModelId) {
        if let Some(gone) = self.models.remove(&model) {
            self.pages_used -= gone.pages;
            self.moved.extend(gone.is_there.then_some(Moved { model, is_there: false }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn moved(memory: &mut HostMemory) -> Vec<(u32, bool)> {
        std::iter::from_fn(|| memory.poll_moved()).map(|moved| (moved.model.0, moved.is_there)).collect()
    }

    #[test]
    fn what_was_loaded_longest_ago_makes_room_and_what_is_being_loaded_stays() {
        let mut memory = HostMemory::new(10);
        (0..3).for_each(|model| memory.insert(ModelId(model), 3));
        assert_eq!((memory.pages_used(), moved(&mut memory)), (9, vec![(0, true), (1, true), (2, true)]));
        assert!(memory.begin(ModelId(0), 3), "it is there");
        assert!(!memory.begin(ModelId(3), 3), "it is read");
        assert_eq!((memory.pages_used(), moved(&mut memory)), (9, vec![(1, false)]));
        assert!(!memory.begin(ModelId(4), 3) && !memory.begin(ModelId(4), 3), "two GPUs read the same");
        assert_eq!(moved(&mut memory), [(2, false)]);
        memory.end(ModelId(3), false);
        memory.end(ModelId(4), false);
        memory.end(ModelId(4), true);
        memory.end(ModelId(0), true);
        assert_eq!((memory.pages_used(), moved(&mut memory)), (6, vec![(4, true)]), "one of the reads went well");
    }

    #[test]
    fn what_is_removed_goes_with_the_end_of_its_load() {
        let mut memory = HostMemory::new(4);
        memory.insert(ModelId(0), 2);
        assert!(memory.begin(ModelId(0), 2));
        memory.remove(ModelId(0));
        assert_eq!((memory.pages_used(), memory.holds(ModelId(0))), (2, false));
        memory.end(ModelId(0), true);
        assert_eq!((memory.pages_used(), moved(&mut memory)), (0, vec![(0, true), (0, false)]));
        memory.insert(ModelId(1), 2);
        memory.remove(ModelId(1));
        assert_eq!((memory.pages_used(), memory.holds(ModelId(1))), (0, false));
    }

    #[test]
    fn a_model_may_come_back_larger_while_its_former_weights_are_loaded() {
        let mut memory = HostMemory::new(6);
        memory.insert(ModelId(0), 2);
        memory.insert(ModelId(1), 3);
        assert!(memory.begin(ModelId(0), 2));
        memory.remove(ModelId(0));
        memory.insert(ModelId(0), 4);
        assert_eq!((memory.pages_used(), memory.holds(ModelId(1))), (4, false));
        memory.end(ModelId(0), true);
        assert!(memory.holds(ModelId(0)));
    }

    #[test]
    fn what_was_read_does_not_stay_where_all_is_being_loaded() {
        let mut memory = HostMemory::new(10);
        (0..2).for_each(|model| assert!(!memory.begin(ModelId(model), 5)));
        memory.insert(ModelId(2), 5);
        assert_eq!((memory.pages_used(), moved(&mut memory)), (10, vec![(2, false)]));
        memory.end(ModelId(0), true);
        memory.insert(ModelId(2), 5);
        assert_eq!(moved(&mut memory), [(0, true), (0, false), (2, true)]);
    }

    proptest! {
        /// Held against a list in the order of the last loads, of which at most three are under way at once, of at most
        /// four pages each.
        #[test]
        fn any_loads_keep_the_bound_and_evict_by_the_last_load(
            steps in prop::collection::vec((0..8u32, any::<bool>(), 0..3usize), 0..200)
        ) {
            const PAGES: u32 = 12;
            let (mut memory, mut naive) = (HostMemory::new(PAGES), Vec::<(u32, u32)>::new());
            let (mut told, mut loads) = (BTreeSet::new(), Vec::<(u32, bool)>::new());
            for (model, begins, which) in steps {
                let pages = model % 4 + 1;
                if begins && loads.len() < 3 {
                    let place = naive.iter().position(|&(other, _)| other == model);
                    let is_read = loads.iter().any(|&(other, reads)| other == model && reads);
                    let was_there = memory.begin(ModelId(model), pages);
                    prop_assert_eq!(was_there, place.is_some() && !is_read);
                    let kept = place.map_or((model, pages), |place| naive.remove(place));
                    while naive.iter().map(|(_, pages)| pages).sum::<u32>() + pages > PAGES {
                        let is_idle = |&(other, _): &(u32, u32)| loads.iter().all(|&(loaded, _)| loaded != other);
                        naive.remove(naive.iter().position(is_idle).expect("three fit"));
                    }
                    naive.push(kept);
                    loads.push((model, !was_there));
                } else if which < loads.len() {
                    let (model, _) = loads.swap_remove(which);
                    loads.iter_mut().filter(|(other, _)| *other == model).for_each(|(_, reads)| *reads = false);
                    memory.end(ModelId(model), true);
                }
                for (model, is_there) in moved(&mut memory) {
                    let is_news = if is_there { told.insert(model) } else { told.remove(&model) };
                    prop_assert!(is_news);
                }
                let there = (0..8).filter(|&model| memory.holds(ModelId(model)));
                prop_assert!(there.eq(told.iter().copied()), "what is told is what is there");
                prop_assert_eq!(memory.pages_used(), naive.iter().map(|(_, pages)| pages).sum::<u32>());
                prop_assert!(memory.pages_used() <= PAGES);
            }
        }
    }
}
