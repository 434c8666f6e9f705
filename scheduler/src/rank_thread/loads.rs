//! Step 5 where memory is short: which weights go to which GPU, and which make room for them.
//!
//! A candidate whose model is in no GPU's memory *wants* a load, until the latest start at which that still helps; so
//! does one that none of its GPUs can take in time. Wants are served in the order of that latest start, as deadlines
//! are, each by the GPU that could run the batch first. A GPU's link is given work 5 ms ahead, no more, so that what
//! comes later and is more urgent waits little (Clockwork, section 5.3).
//!
//! What makes room is what was used least, in a count that halves in [`HALF_LIFE`]: long ago is as little as rarely,
//! and of several copies of a model each counts only what it was used itself, so those that are not needed go. Nothing
//! goes that runs, is planned, or has tasks that wait for it and no other copy.

use std::collections::{BTreeMap, BTreeSet};

use proto::{GpuId, ModelId, Span, Timestamp};

use crate::{
    indexed_heap::IndexedHeap,
    messages::Whereabouts,
    residency::{Decision, LATE_MAX, LOOKAHEAD, Place, Residency},
    task::{GpuMemory, LoadEnd, Weights},
};

/// In which time uses count half.
const HALF_LIFE: Span = Span::from_millis(30_000);
/// GPUs that are looked at for one load: those whose links have been idle for longest.
const GPUS_LOOKED_AT: usize = 16;
/// Wants that are passed over in one turn, because no GPU has room for them.
const PASSED_OVER_MAX: usize = 8;

/// What a GPU has to do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Business {
    /// When what it was given ends.
    pub free_at: Timestamp,
    /// When all that waits for it would have run, too, about.
    pub idle_at: Timestamp,
}

/// Decides loads. It knows of GPUs with [`GpuMemory`] only.
#[derive(Debug, Default)]
pub(super) struct Loader {
    /// By model id.
    models: Vec<Model>,
    gpus: BTreeMap<GpuId, Memory>,
    /// By when their links are free.
    links: BTreeSet<(Timestamp, GpuId)>,
    /// By model: the latest start of a load that it wants.
    wants: IndexedHeap,
    decided_at: Timestamp,
}

#[derive(Debug, Default)]
struct Model {
    weights: Weights,
    /// All GPUs' uses; see [`used`].
    uses: f64,
    /// GPUs that have it in memory, or on its way there.
    holders: Vec<GpuId>,
    /// GPUs that could have it.
    hosts: u32,
    /// The latest start of the batch that waits, if one does.
    latest: Option<Timestamp>,
}

#[derive(Debug)]
struct Memory {
    residency: Residency,
    /// Ascending.
    models: Vec<ModelId>,
    copies: BTreeMap<ModelId, Copy>,
    /// By model: its uses here. Those that may go.
    spare: IndexedHeap,
    spare_pages: u32,
}

/// Weights in a GPU's memory, or on their way there.
#[derive(Debug, Default, Clone)]
struct Copy {
    /// See [`used`].
    uses: f64,
    /// Grants and plans that have not been reported.
    batches: u32,
}

/// The binary logarithm of a count of uses that halves in [`HALF_LIFE`], as of the beginning of time: counts that were
/// made at different times compare as they are.
fn used(before: f64, now: Timestamp, uses: u32) -> f64 {
    let halves = (now - Timestamp::ZERO).as_secs_f64() / HALF_LIFE.as_secs_f64();
    let now = halves + f64::from(uses.max(1)).log2();
    let (less, more) = if before < now { (before, now) } else { (now, before) };
    more + (less - more).exp2().ln_1p() / std::f64::consts::LN_2
}

impl Loader {
    /// Whether there is anything to decide about.
    pub(super) fn is_idle(&self) -> bool {
        self.gpus.is_empty()
    }

    pub(super) fn handle_weights(&mut self, model: ModelId, weights: Weights) {
        self.model_mut(model).weights = weights;
    }

    /// Takes in a GPU. Yields the models whose weights are in its memory: those that it says, as far as they fit, and
    /// all that have none.
    pub(super) fn handle_gpu_joined(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        models: Vec<ModelId>,
        memory: &GpuMemory,
    ) -> Vec<ModelId> {
        let mut residency = Residency::new(now, memory.pages);
        let mut resident = memory.resident.clone();
        resident.extend(models.iter().filter(|&&id| self.model_mut(id).weights.pages == 0));
        resident.retain(|&id| {
            models.binary_search(&id).is_ok() && residency.insert_resident(id, self.model_mut(id).weights.pages)
        });
        for &id in &models {
            self.model_mut(id).hosts += 1;
        }
        let copies = resident.iter().map(|&id| (id, Copy { uses: used(0.0, now, 1), batches: 0 })).collect();
        self.links.insert((residency.link_free_at(), gpu));
        self.gpus.insert(gpu, Memory { residency, models, copies, spare: IndexedHeap::default(), spare_pages: 0 });
        for &id in &resident {
            self.models[id.0 as usize].holders.push(gpu);
            self.on_changed(id);
        }
        resident
    }

    /// Forgets a GPU. Yields all models that it could have run.
    pub(super) fn handle_gpu_left(&mut self, gpu: GpuId) -> Vec<ModelId> {
        let Some(memory) = self.gpus.remove(&gpu) else { return Vec::new() };
        self.links.remove(&(memory.residency.link_free_at(), gpu));
        for &id in &memory.models {
            let model = &mut self.models[id.0 as usize];
            model.hosts -= 1;
            model.holders.retain(|&holder| holder != gpu);
            self.on_changed(id);
        }
        memory.models
    }

    /// A model's batch waits from now on, or none does any more.
    pub(super) fn handle_waits(&mut self, id: ModelId, latest: Option<Timestamp>) {
        if self.is_idle() {
            return;
        }
        self.model_mut(id).latest = latest;
        self.on_changed(id);
    }

    /// None of the model's GPUs can run its batch in time.
    pub(super) fn handle_starved(&mut self, id: ModelId) {
        let model = &self.models[id.0 as usize];
        if let Some(latest) = model.latest
            && (model.holders.len() as u32) < model.hosts
        {
            self.wants.set(id.0, latest - model.weights.load);
        }
    }

    /// A GPU was granted to a model's batch of `size`.
    pub(super) fn handle_granted(&mut self, now: Timestamp, gpu: GpuId, id: ModelId, size: u32) {
        let Some(copy) = self.gpus.get_mut(&gpu).and_then(|memory| memory.copies.get_mut(&id)) else { return };
        copy.uses = used(copy.uses, now, size);
        copy.batches += 1;
        let model = &mut self.models[id.0 as usize];
        model.uses = used(model.uses, now, size);
        model.latest = None;
        self.on_changed(id);
    }

    /// A batch that was granted has ended, or will never be.
    pub(super) fn handle_batch_ended(&mut self, gpu: GpuId, id: ModelId) {
        if let Some(copy) = self.gpus.get_mut(&gpu).and_then(|memory| memory.copies.get_mut(&id)) {
            copy.batches = copy.batches.saturating_sub(1);
            self.refresh(gpu, id);
        }
    }

    /// A load ended. True if the model is in the GPU's memory by it.
    pub(super) fn handle_loaded(&mut self, gpu: GpuId, id: ModelId, end: LoadEnd) -> bool {
        let Some(memory) = self.gpus.get_mut(&gpu) else { return false };
        self.links.remove(&(memory.residency.link_free_at(), gpu));
        let is_known = memory.residency.handle_loaded(id, end);
        self.links.insert((memory.residency.link_free_at(), gpu));
        if is_known && !end.is_loaded {
            memory.copies.remove(&id);
            self.models[id.0 as usize].holders.retain(|&holder| holder != gpu);
        }
        self.on_changed(id);
        is_known && end.is_loaded
    }

    /// Where a model is that no GPU hosts at the moment; `None` if none of those with memory ever could.
    pub(super) fn whereabouts(&self, id: ModelId) -> Option<Whereabouts> {
        let model = self.models.get(id.0 as usize).filter(|model| model.hosts > 0)?;
        let arrives_at = model.holders.iter().map(|gpu| self.gpus[gpu].residency.link_free_at()).min();
        Some(arrives_at.map_or(Whereabouts::Cold(model.weights.load), Whereabouts::Arriving))
    }

    /// Gives links work.
    pub(super) fn decide(&mut self, now: Timestamp, business: &dyn Fn(GpuId) -> Business) -> Vec<Decision> {
        self.decided_at = now;
        let mut decisions = Vec::new();
        let mut passed_over = Vec::new();
        while let Some((at, key)) = self.wants.peek()
            && passed_over.len() < PASSED_OVER_MAX
        {
            if at >= now && self.links.first().is_none_or(|&(free_at, _)| free_at > now + LOOKAHEAD) {
                break;
            }
            self.wants.remove(key);
            if at < now {
                // No load helps any more. What comes later to the model wants one of its own.
                continue;
            }
            match self.choose(now, ModelId(key), business) {
                Some(gpu) => self.load(now, gpu, (ModelId(key), at), &mut decisions),
                None => passed_over.push((key, at)),
            }
        }
        for (key, at) in passed_over {
            self.wants.set(key, at);
        }
        decisions
    }

    /// When [`Self::decide`] must be called at the latest.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let (helps_until, _) = self.wants.peek()?;
        let looked_at = (self.decided_at + LOOKAHEAD, GpuId(u32::MAX));
        let next_link = self.links.range(looked_at..).next().map(|&(free_at, _)| free_at - LOOKAHEAD);
        Some(next_link.map_or(helps_until + Span(1), |at| at.min(helps_until + Span(1))))
    }

    /// The GPU that could run the model's batch first; of several the one whose memory loses least.
    fn choose(&self, now: Timestamp, id: ModelId, business: &dyn Fn(GpuId) -> Business) -> Option<GpuId> {
        let model = &self.models[id.0 as usize];
        let is_copy = !model.holders.is_empty();
        let latest = model.latest?;
        let open = self.links.range(..=(now + LOOKAHEAD, GpuId(u32::MAX))).take(GPUS_LOOKED_AT);
        let could = open.filter_map(|&(link_free_at, gpu)| {
            let memory = &self.gpus[&gpu];
            let has_room = memory.residency.pages_free() + memory.spare_pages >= model.weights.pages;
            let is_host = memory.models.binary_search(&id).is_ok() && memory.residency.place(id).is_none();
            if !has_room || !is_host {
                return None;
            }
            let Business { free_at, idle_at } = business(gpu);
            let loaded_at = link_free_at.max(now) + model.weights.load;
            let starts_at = loaded_at.max(idle_at);
            // What is urgent may pass others. Another copy is for a GPU that has time for it.
            let is_useful = if is_copy { starts_at <= latest } else { loaded_at.max(free_at) <= latest };
            let loses = if memory.residency.pages_free() >= model.weights.pages {
                Timestamp::PAST
            } else {
                memory.spare.peek().map_or(Timestamp::NEVER, |(uses, _)| uses)
            };
            is_useful.then_some((starts_at, loses, gpu))
        });
        could.min().map(|(.., gpu)| gpu)
    }

    fn load(&mut self, now: Timestamp, gpu: GpuId, (id, helps_until): (ModelId, Timestamp), to: &mut Vec<Decision>) {
        let Model { weights, uses, ref holders, .. } = self.models[id.0 as usize];
        let uses = if holders.is_empty() { used(uses, now, 1) } else { used(0.0, now, 1) };
        while self.gpus[&gpu].residency.pages_free() < weights.pages {
            let (_, victim) = self.gpus[&gpu].spare.peek().expect("callers have counted what is spare");
            self.unload(gpu, ModelId(victim));
            to.push(Decision::Unload(gpu, ModelId(victim)));
        }
        let memory = self.gpus.get_mut(&gpu).expect("it was chosen");
        let link_free_at = memory.residency.link_free_at();
        self.links.remove(&(link_free_at, gpu));
        let earliest = link_free_at.max(now);
        let ends_at = memory.residency.begin_load(earliest, id, weights);
        self.links.insert((ends_at, gpu));
        memory.copies.insert(id, Copy { uses, batches: 0 });
        self.models[id.0 as usize].holders.push(gpu);
        self.on_changed(id);
        to.push(Decision::Load { gpu, model: id, earliest, latest: helps_until.max(earliest) + LATE_MAX });
    }

    fn unload(&mut self, gpu: GpuId, id: ModelId) {
        let memory = self.gpus.get_mut(&gpu).expect("its memory is looked at");
        memory.copies.remove(&id);
        self.models[id.0 as usize].holders.retain(|&holder| holder != gpu);
        // While its pages are still counted.
        self.refresh(gpu, id);
        self.gpus.get_mut(&gpu).expect("just used").residency.unload(id);
        self.on_changed(id);
    }

    /// The model waits or not, or is elsewhere: whether it wants a load, and which of its copies may go.
    fn on_changed(&mut self, id: ModelId) {
        let model = &self.models[id.0 as usize];
        match model.latest {
            Some(latest) if model.holders.is_empty() && model.hosts > 0 => {
                self.wants.set(id.0, latest - model.weights.load);
            }
            _ => self.wants.remove(id.0),
        }
        for index in 0..self.models[id.0 as usize].holders.len() {
            self.refresh(self.models[id.0 as usize].holders[index], id);
        }
    }

    /// Whether this copy may go.
    fn refresh(&mut self, gpu: GpuId, id: ModelId) {
        let model = &self.models[id.0 as usize];
        let Some(memory) = self.gpus.get_mut(&gpu) else { return };
        let is_needed = model.latest.is_some() && model.holders.len() == 1;
        let pages = memory.residency.pages_of(id);
        let is_there = memory.residency.place(id) == Some(Place::Resident) && pages > 0;
        let was_spare = memory.spare.get(id.0).is_some();
        match memory.copies.get(&id).filter(|copy| is_there && !is_needed && copy.batches == 0) {
            Some(copy) => {
                memory.spare.set(id.0, Timestamp((copy.uses * 1e6) as i64));
                memory.spare_pages += if was_spare { 0 } else { pages };
            }
            None => {
                memory.spare.remove(id.0);
                memory.spare_pages -= if was_spare { pages } else { 0 };
            }
        }
    }

    fn model_mut(&mut self, id: ModelId) -> &mut Model {
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, Model::default);
        }
        &mut self.models[id.0 as usize]
    }
}

#[cfg(test)]
mod tests;
