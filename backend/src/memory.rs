//! What is in the memory of a GPU that holds but a part of what it hosts, and what is on its way there (Clockwork,
//! section 4.4: LOAD and UNLOAD are actions with windows, of an executor of their own).
//!
//! A load is ordered, waits until its window opens, the way to the GPU is free and there is room, is copied, and is
//! resident then; what cannot begin by the end of its window fails, and one alone is copied at a time, in the order of
//! their earliest starts. Weights are unloaded as soon as that is ordered, unless the GPU has a batch that runs with
//! them: then as soon as that has ended.
//!
//! Loads of models that are to be unloaded first, or whose room is yet to be made, wait, too: the orders of several
//! ModelThreads pass each other on their ways.
//!
//! Orders are of one name of this GPU: whoever gives it another one (*asks*) is told what is resident, and what has not
//! been copied by then never was. So nothing that was ordered before can surprise a planner that begins with that
//! answer.
//!
//! Models that are *pinned* are copied without an order, once this GPU has a name, before anything that is ordered and
//! before that answer is given; no order unloads them. One that could not be copied is tried again under the next name.
//!
//! Instants are on the scheduler's clock. Bytes are moved by the driver.

use std::collections::{BTreeMap, VecDeque};

use proto::{
    GpuId, ModelId, Span, Timestamp, Weights,
    backend_to_scheduler::{ResidentModel, WeightsOutcome},
    weights::WeightsTally,
};

/// Loads that wait: the scheduler gives a link work for milliseconds.
const LOADS_MAX: usize = 64;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryAction {
    /// Copy this model's weights, which should take so long; then call [`Memory::handle_copied`].
    Copy {
        /// The model, by our name.
        model: ModelId,
        /// How long that should take from host memory.
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

/// A model that this GPU hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hosted {
    /// What it takes.
    pub weights: Weights,
    /// Whether it is in memory all the time.
    pub is_pinned: bool,
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
    hosted: BTreeMap<ModelId, Hosted>,
    /// Those of them that are pinned and take memory, and whether they could not be copied.
    pins: BTreeMap<ModelId, bool>,
    /// What is there, with its pages.
    copies: BTreeMap<ModelId, Copy>,
    /// What waits, in the order of arrival; at most [`LOADS_MAX`].
    waiting: Vec<(ModelId, LoadOrder)>,
    copying: Option<Copying>,
    /// The models of the batches that the GPU has: the one that runs, and what is behind it.
    runs: VecDeque<ModelId>,
    /// What orders call this GPU.
    name: Option<GpuId>,
    /// Whoever gave it waits for an answer.
    is_asked: bool,
    /// When those that wait were last looked at.
    looked_at: Timestamp,
    tally: WeightsTally,
    actions: VecDeque<MemoryAction>,
}

#[derive(Debug, Clone, Copy)]
struct Copy {
    pages: u32,
    /// It goes with the end of the batches that the GPU has.
    leaves: bool,
    is_pinned: bool,
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
    /// Nobody does: it is pinned.
    is_pin: bool,
}

impl Memory {
    /// Empty.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self {
            pages,
            pages_free: pages,
            hosted: BTreeMap::new(),
            pins: BTreeMap::new(),
            copies: BTreeMap::new(),
            waiting: Vec::new(),
            copying: None,
            runs: VecDeque::new(),
            name: None,
            is_asked: false,
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

    /// Whether a model's weights are there, or on their way.
    #[must_use]
    pub fn holds(&self, model: ModelId) -> bool {
        self.copies.contains_key(&model) || self.copying.is_some_and(|copying| copying.model == model)
    }

    /// Pages of pinned models, and of the largest that is not.
    #[must_use]
    pub fn claims(&self) -> (u32, u32) {
        let pages = |is_pinned| {
            self.hosted.values().filter(move |hosted| hosted.is_pinned == is_pinned).map(|hosted| hosted.weights.pages)
        };
        (pages(true).sum(), pages(false).max().unwrap_or(0))
    }

    /// The model is hosted from now on, or, with `None`, is hosted no more: nothing of it stays.
    pub fn handle_model(&mut self, now: Timestamp, model: ModelId, hosted: Option<Hosted>) {
        let former = match hosted {
            Some(hosted) => self.hosted.insert(model, hosted),
            None => self.hosted.remove(&model),
        };
        self.pins.remove(&model);
        if hosted.is_some_and(|hosted| hosted.is_pinned && (1..=self.pages).contains(&hosted.weights.pages)) {
            self.pins.insert(model, false);
        }
        let pages = hosted.map(|hosted| hosted.weights.pages);
        if former.is_some_and(|former| pages != Some(former.weights.pages)) {
            self.drop_copy(model);
            if let Some(copying) = self.copying.as_mut().filter(|copying| copying.model == model) {
                copying.is_wanted = false;
            }
            let gone = self.waiting.extract_if(.., |(other, _)| *other == model).collect::<Vec<_>>();
            gone.into_iter().for_each(|(_, order)| self.fail(now, order));
            self.on_change(now);
        } else if self.pins.contains_key(&model) {
            self.on_change(now);
        }
    }

    /// The scheduler names this GPU, and asks what is resident: see [`Self::poll_answer`].
    pub fn handle_asked(&mut self, now: Timestamp, gpu: GpuId) {
        self.forget_orders();
        (self.name, self.is_asked) = (Some(gpu), true);
        if let Some(copying) = self.copying.as_mut().filter(|copying| !copying.is_pin) {
            copying.is_wanted = false;
        }
        for (model, has_failed) in &mut self.pins {
            *has_failed = false;
            if let Some(copy) = self.copies.get_mut(model) {
                copy.is_pinned = true;
            }
        }
        self.on_change(now);
    }

    /// What is resident, by our names, if that was asked and all that is pinned is there.
    pub fn poll_answer(&mut self) -> Option<Vec<ResidentModel>> {
        if self.next_pin().is_some() || !std::mem::take(&mut self.is_asked) {
            return None;
        }
        let stays = self.copies.iter().filter(|(_, copy)| !copy.leaves);
        Some(stays.map(|(&model, copy)| ResidentModel { model, is_pinned: copy.is_pinned }).collect())
    }

    /// A pinned model that is yet to be copied.
    fn next_pin(&self) -> Option<ModelId> {
        let is_missing = |model: &ModelId| self.copies.get(model).is_none_or(|copy| copy.leaves);
        self.pins.iter().find(|(model, has_failed)| !**has_failed && is_missing(model)).map(|(&model, _)| model)
    }

    /// Whoever gave orders has no say any more: what has not begun never will, and nobody is told of the rest.
    pub fn forget_orders(&mut self) {
        (self.name, self.is_asked) = (None, false);
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
        let pages = order.model.and_then(|model| self.hosted.get(&model)).map(|hosted| hosted.weights.pages);
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

    /// A model's weights make room, unless they are pinned. What is not there is not missed.
    pub fn handle_unload(&mut self, now: Timestamp, gpu: GpuId, model: ModelId) {
        if self.name != Some(gpu) || self.copies.get(&model).is_some_and(|copy| copy.is_pinned) {
            return;
        }
        if self.drop_copy(model) {
            self.tally.evictions += 1;
        } else if let Some(copying) = self.copying.as_mut().filter(|copying| copying.model == model) {
            copying.is_wanted = false;
        }
        self.on_change(now);
    }

    /// Whether a batch of this model can run: its weights are there, or it has none.
    #[must_use]
    pub fn can_run(&self, model: ModelId) -> bool {
        let has_none = self.hosted.get(&model).is_some_and(|hosted| hosted.weights.pages == 0);
        has_none || self.copies.get(&model).is_some_and(|copy| !copy.leaves)
    }

    /// A batch of this model is about to run, after those that the GPU has. False if it cannot, because its weights are
    /// not there; otherwise they stay until it has ended.
    pub fn handle_run(&mut self, model: ModelId) -> bool {
        let can_run = self.can_run(model);
        if can_run {
            self.runs.push_back(model);
        } else {
            self.tally.absent += 1;
        }
        can_run
    }

    /// The batch that ran has ended.
    pub fn handle_ran(&mut self, now: Timestamp) {
        let model = self.runs.pop_front();
        self.on_over(now, model);
    }

    /// The last batch that was about to run will not.
    pub fn handle_taken_back(&mut self, now: Timestamp) {
        let model = self.runs.pop_back();
        self.on_over(now, model);
    }

    fn on_over(&mut self, now: Timestamp, model: Option<ModelId>) {
        if let Some(model) = model.filter(|model| !self.runs.contains(model))
            && self.copies.get(&model).is_some_and(|copy| copy.leaves)
        {
            self.drop_copy(model);
            self.on_change(now);
        }
    }

    /// The copy that [`MemoryAction::Copy`] asked for has ended: with how much of its time the weights were read from
    /// disk for, or, with `None`, without success. Yields whose it was.
    ///
    /// # Panics
    /// If none is under way.
    pub fn handle_copied(&mut self, now: Timestamp, read: Option<Span>) -> ModelId {
        let copying = self.copying.take().expect("a copy ends only after it was asked for");
        let Copying { model, pages, started_at, is_wanted, order, is_pin } = copying;
        self.tally.busy += (now - started_at).max(Span::ZERO);
        if let Some(read) = read.filter(|_| is_wanted) {
            self.copies.insert(model, Copy { pages, leaves: false, is_pinned: is_pin });
            self.tally.loads += 1;
            self.tally.reads += u64::from(read > Span::ZERO);
            self.report(order, WeightsOutcome::Loaded { started_at, finished_at: now, read });
        } else {
            self.pages_free += pages;
            self.actions.extend(read.map(|_| MemoryAction::Free { model }));
            if let Some(has_failed) = self.pins.get_mut(&model).filter(|_| is_pin) {
                *has_failed = read.is_none();
            }
            match order {
                Some(order) => self.fail(now, order),
                None => self.tally.failed += 1,
            }
        }
        self.on_change(now);
        model
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
        if let Some(model) = self.next_pin().filter(|_| self.name.is_some()) {
            // What leaves with the batch that runs has to go first.
            if !self.copies.contains_key(&model) && self.make_room(self.hosted[&model].weights.pages) {
                self.begin(now, model, None);
            }
            return;
        }
        let can_begin = |(model, order): &(ModelId, LoadOrder)| {
            let has_room = self.hosted.get(model).is_some_and(|hosted| hosted.weights.pages <= self.pages_free);
            order.earliest <= now && has_room && !self.copies.contains_key(model)
        };
        let next = self.waiting.iter().enumerate().filter(|(_, load)| can_begin(load));
        let Some((index, _)) = next.min_by_key(|(_, (_, order))| order.earliest) else { return };
        let (model, order) = self.waiting.remove(index);
        self.begin(now, model, Some(order));
    }

    fn begin(&mut self, now: Timestamp, model: ModelId, order: Option<LoadOrder>) {
        let Weights { pages, load, .. } = self.hosted[&model].weights;
        self.pages_free -= pages;
        let is_pin = order.is_none();
        self.copying = Some(Copying { model, pages, started_at: now, is_wanted: true, order, is_pin });
        self.actions.push_back(MemoryAction::Copy { model, takes: load });
    }

    /// What is not pinned goes until so much is free. False if that is yet to come: a batch runs.
    fn make_room(&mut self, pages: u32) -> bool {
        while self.pages_free < pages {
            let mut may_go = self.copies.iter().filter(|(_, copy)| !copy.is_pinned && !copy.leaves);
            let Some(victim) = may_go.find(|(model, _)| !self.runs.contains(model)).map(|(&model, _)| model) else {
                break;
            };
            self.drop_copy(victim);
        }
        let may_go = |model: &&ModelId| self.copies.get(model).is_some_and(|copy| !copy.is_pinned);
        if self.pages_free < pages
            && let Some(&model) = self.runs.iter().find(may_go)
        {
            self.drop_copy(model);
        }
        self.pages_free >= pages
    }

    /// Weights go, at once or with the end of the batches that run with them. False if they are not there.
    fn drop_copy(&mut self, model: ModelId) -> bool {
        let Some(copy) = self.copies.get_mut(&model) else { return false };
        if self.runs.contains(&model) {
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
