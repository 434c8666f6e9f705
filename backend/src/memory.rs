//! What is in the memory of a GPU that holds but a part of what it hosts, and what is on its way there (Clockwork,
//! section 4.4: LOAD and UNLOAD are actions with windows, of an executor of their own).
//!
//! A load is ordered, waits until its window opens, the way to the GPU is free and there is room, is copied, and is
//! resident then; what cannot begin by the end of its window fails, and one alone is copied at a time, in the order of
//! their earliest starts. Weights are unloaded as soon as that is ordered, unless a batch runs with them: then as soon
//! as that has ended.
//!
//! Loads of models that are to be unloaded first, or whose room is yet to be made, wait, too: the orders of several
//! ModelThreads pass each other on their ways.
//!
//! Orders are of one name of this GPU: whoever gives it another one (*asks*) is told what is resident, and what has not
//! been copied by then never was. So nothing that was ordered before can surprise a planner that begins with that
//! answer.
//!
//! Instants are on the scheduler's clock. Bytes are moved by the driver.

use std::collections::{BTreeMap, VecDeque};

use proto::{GpuId, ModelId, Span, Timestamp, Weights, backend_to_scheduler::WeightsOutcome, weights::WeightsTally};

/// Loads that wait: the scheduler gives a link work for milliseconds.
const LOADS_MAX: usize = 64;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryAction {
    /// Copy this model's weights, which should take so long; then call [`Memory::handle_copied`].
    Copy {
        /// The model, by our name.
        model: ModelId,
        /// How long that should take.
        takes: Span,
    },
    /// Weights that have been copied are not needed there any more.
    Free {
        /// The model, by our name.
        model: ModelId,
    },
    /// Tell the scheduler how a load ended.
    Report {
        /// The GPU, by the scheduler's name.
        gpu: GpuId,
        /// The model, by the scheduler's name.
        model: ModelId,
        /// How.
        outcome: WeightsOutcome,
    },
}

/// An order to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOrder {
    /// The GPU, by the scheduler's name.
    pub gpu: GpuId,
    /// The model, by the scheduler's name.
    pub theirs: ModelId,
    /// The model, by ours; `None` if it is not hosted.
    pub model: Option<ModelId>,
    /// The earliest start.
    pub earliest: Timestamp,
    /// The latest start.
    pub latest: Timestamp,
}

/// One GPU's memory for weights.
#[derive(Debug)]
pub struct Memory {
    pages: u32,
    pages_free: u32,
    /// What the hosted models take.
    hosted: BTreeMap<ModelId, Weights>,
    /// What is there, with its pages.
    copies: BTreeMap<ModelId, Copy>,
    /// What waits, in the order of arrival; at most [`LOADS_MAX`].
    waiting: Vec<(ModelId, LoadOrder)>,
    copying: Option<Copying>,
    /// The model of the batch that runs.
    runs: Option<ModelId>,
    /// What orders call this GPU.
    name: Option<GpuId>,
    /// When those that wait were last looked at.
    looked_at: Timestamp,
    tally: WeightsTally,
    actions: VecDeque<MemoryAction>,
}

#[derive(Debug, Clone, Copy)]
struct Copy {
    pages: u32,
    /// It goes with the end of the batch that runs.
    leaves: bool,
}

#[derive(Debug, Clone, Copy)]
struct Copying {
    model: ModelId,
    pages: u32,
    started_at: Timestamp,
    /// Whether it is resident when it is there.
    is_wanted: bool,
    /// Who waits for it.
    order: Option<LoadOrder>,
}

impl Memory {
    /// Empty.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self {
            pages,
            pages_free: pages,
            hosted: BTreeMap::new(),
            copies: BTreeMap::new(),
            waiting: Vec::new(),
            copying: None,
            runs: None,
            name: None,
            looked_at: Timestamp::PAST,
            tally: WeightsTally::default(),
            actions: VecDeque::new(),
        }
    }

    /// All pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// What has become of weights so far.
    #[must_use]
    pub fn tally(&self) -> WeightsTally {
        let used = self.pages - self.pages_free;
        WeightsTally { pages: self.pages.into(), pages_used: used.into(), ..self.tally }
    }

    /// What orders call this GPU, if anybody has named it.
    #[must_use]
    pub fn name(&self) -> Option<GpuId> {
        self.name
    }

    /// The model is hosted from now on and takes so much, or, with `None`, is hosted no more: nothing of it stays.
    pub fn handle_model(&mut self, now: Timestamp, model: ModelId, weights: Option<Weights>) {
        let former = match weights {
            Some(weights) => self.hosted.insert(model, weights),
            None => self.hosted.remove(&model),
        };
        if former.is_some_and(|former| weights.is_none_or(|weights| weights.pages != former.pages)) {
            self.drop_copy(model);
            if let Some(copying) = self.copying.as_mut().filter(|copying| copying.model == model) {
                copying.is_wanted = false;
            }
            let gone = self.waiting.extract_if(.., |(other, _)| *other == model).collect::<Vec<_>>();
            gone.into_iter().for_each(|(_, order)| self.fail(now, order));
            self.on_change(now);
        }
    }

    /// The scheduler names this GPU, and asks what is resident.
    pub fn handle_asked(&mut self, now: Timestamp, gpu: GpuId) -> Vec<ModelId> {
        self.forget_orders();
        self.name = Some(gpu);
        if let Some(copying) = &mut self.copying {
            copying.is_wanted = false;
        }
        self.on_change(now);
        self.copies.iter().filter(|(_, copy)| !copy.leaves).map(|(&model, _)| model).collect()
    }

    /// Whoever gave orders has no say any more: what has not begun never will, and nobody is told of the rest.
    pub fn forget_orders(&mut self) {
        self.name = None;
        self.waiting.clear();
        self.actions.retain(|action| !matches!(action, MemoryAction::Report { .. }));
        if let Some(copying) = &mut self.copying {
            copying.order = None;
        }
    }

    /// A model is to be loaded.
    pub fn handle_load(&mut self, now: Timestamp, order: LoadOrder) {
        if self.name != Some(order.gpu) {
            return;
        }
        let pages = order.model.and_then(|model| self.hosted.get(&model)).map(|weights| weights.pages);
        match order.model.zip(pages) {
            Some((model, pages))
                if pages <= self.pages
                    && self.waiting.len() < LOADS_MAX
                    && self.waiting.iter().all(|(other, _)| *other != model) =>
            {
                self.waiting.push((model, order));
                self.on_change(now);
            }
            _ => self.fail(now, order),
        }
    }

    /// A model's weights make room. What is not there is not missed.
    pub fn handle_unload(&mut self, now: Timestamp, gpu: GpuId, model: ModelId) {
        if self.name != Some(gpu) {
            return;
        }
        if self.drop_copy(model) {
            self.tally.evictions += 1;
        } else if let Some(copying) = self.copying.as_mut().filter(|copying| copying.model == model) {
            copying.is_wanted = false;
        }
        self.on_change(now);
    }

    /// A batch of this model is about to run. False if it cannot, because its weights are not there; otherwise they
    /// stay until [`Self::handle_ran`].
    pub fn handle_run(&mut self, model: ModelId) -> bool {
        let has_none = self.hosted.get(&model).is_some_and(|weights| weights.pages == 0);
        let is_there = has_none || self.copies.get(&model).is_some_and(|copy| !copy.leaves);
        if is_there {
            self.runs = Some(model);
        } else {
            self.tally.absent += 1;
        }
        is_there
    }

    /// The batch that ran has ended.
    pub fn handle_ran(&mut self, now: Timestamp) {
        if let Some(model) = self.runs.take()
            && self.copies.get(&model).is_some_and(|copy| copy.leaves)
        {
            self.drop_copy(model);
            self.on_change(now);
        }
    }

    /// The copy that [`MemoryAction::Copy`] asked for has ended, well or not.
    ///
    /// # Panics
    /// If none is under way.
    pub fn handle_copied(&mut self, now: Timestamp, is_done: bool) {
        let copying = self.copying.take().expect("a copy ends only after it was asked for");
        let Copying { model, pages, started_at, is_wanted, order } = copying;
        self.tally.busy += (now - started_at).max(Span::ZERO);
        if is_done && is_wanted {
            self.copies.insert(model, Copy { pages, leaves: false });
            self.tally.loads += 1;
            self.report(order, WeightsOutcome::Loaded { started_at, finished_at: now });
        } else {
            self.pages_free += pages;
            self.actions.extend(is_done.then_some(MemoryAction::Free { model }));
            match order {
                Some(order) => self.fail(now, order),
                None => self.tally.failed += 1,
            }
        }
        self.on_change(now);
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.on_change(now);
    }

    /// When [`Self::handle_timeout`] must be called even if nothing else happens; [`Timestamp::NEVER`] if not at all.
    #[must_use]
    pub fn poll_timeout(&self) -> Timestamp {
        let is_free = self.copying.is_none();
        let look_at = |order: &LoadOrder| {
            let opens = Some(order.earliest).filter(|&at| is_free && at > self.looked_at);
            opens.unwrap_or(order.latest + Span(1))
        };
        self.waiting.iter().map(|(_, order)| look_at(order)).min().unwrap_or(Timestamp::NEVER)
    }

    /// What to do next.
    pub fn poll_action(&mut self) -> Option<MemoryAction> {
        self.actions.pop_front()
    }

    /// Begins the next load, if it is its time, and gives up those that come too late.
    fn on_change(&mut self, now: Timestamp) {
        self.looked_at = now;
        let late = self.waiting.extract_if(.., |(_, order)| order.latest < now).collect::<Vec<_>>();
        late.into_iter().for_each(|(_, order)| self.fail(now, order));
        if self.copying.is_some() {
            return;
        }
        let can_begin = |(model, order): &(ModelId, LoadOrder)| {
            let has_room = self.hosted.get(model).is_some_and(|weights| weights.pages <= self.pages_free);
            order.earliest <= now && has_room && !self.copies.contains_key(model)
        };
        let next = self.waiting.iter().enumerate().filter(|(_, load)| can_begin(load));
        let Some((index, _)) = next.min_by_key(|(_, (_, order))| order.earliest) else { return };
        let (model, order) = self.waiting.remove(index);
        let Weights { pages, load } = self.hosted[&model];
        self.pages_free -= pages;
        self.copying = Some(Copying { model, pages, started_at: now, is_wanted: true, order: Some(order) });
        self.actions.push_back(MemoryAction::Copy { model, takes: load });
    }

    /// Weights go, at once or with the end of the batch that runs with them. False if they are not there.
    fn drop_copy(&mut self, model: ModelId) -> bool {
        let Some(copy) = self.copies.get_mut(&model) else { return false };
        if self.runs == Some(model) {
            return !std::mem::replace(&mut copy.leaves, true);
        }
        let was_leaving = copy.leaves;
        self.pages_free += copy.pages;
        self.copies.remove(&model);
        self.actions.push_back(MemoryAction::Free { model });
        !was_leaving
    }

    fn fail(&mut self, now: Timestamp, order: LoadOrder) {
        self.tally.failed += 1;
        self.report(Some(order), WeightsOutcome::Failed { failed_at: now });
    }

    fn report(&mut self, order: Option<LoadOrder>, outcome: WeightsOutcome) {
        let report = order.map(|LoadOrder { gpu, theirs, .. }| MemoryAction::Report { gpu, model: theirs, outcome });
        self.actions.extend(report);
    }
}

#[cfg(test)]
mod tests;
