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
//!
//! Tasks without an objective want loads behind all others, those that have waited for longest first. Their uses do
//! not count, so their copies make room first, and at most one in a GPU's memory has yet to be used: the next one waits
//! until it is.

use std::collections::{BTreeMap, BTreeSet};

use proto::{GpuId, ModelId, Span, Timestamp};

use crate::{
    indexed_heap::IndexedHeap,
    messages::Whereabouts,
    residency::{Decision, LATE_MAX, LOOKAHEAD, Residency, Retries},
    task::{FAR, GpuMemory, LoadEnd, Weights},
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
    /// Models whose batches no load can serve in time.
    refused: Vec<ModelId>,
    retries: Retries,
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
    /// Of these, those whose machines have it in host memory.
    near: u32,
    /// The latest start of the batch that waits, if one does.
    latest: Option<Timestamp>,
    /// When its load could have begun at the soonest, if that was too late.
    refused_until: Timestamp,
    /// Since when tasks without an objective wait, if any do.
    background_since: Option<Timestamp>,
}

impl Model {
    /// What a load takes where it is quickest.
    fn load(&self) -> Span {
        if self.near > 0 { self.weights.load } else { self.weights.load + self.weights.read }
    }
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

impl Memory {
    /// Whether what would make room first is there for tasks without an objective that have not run yet.
    fn has_unused(&self, models: &[Model]) -> bool {
        self.spare.peek().is_some_and(|(_, first)| models[first as usize].background_since.is_some())
    }
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
        for &id in &models {
            self.model_mut(id).hosts += 1;
        }
        let residency = Residency::joined(now, memory, &models, |id| self.models[id.0 as usize].weights.pages);
        for &id in models.iter().filter(|id| residency.is_in_host_memory(**id)) {
            self.models[id.0 as usize].near += 1;
        }
        let resident: Vec<_> = residency.models().map(|(id, _)| id).collect();
        let copies = resident.iter().map(|&id| (id, Copy { uses: used(0.0, now, 1), batches: 0 })).collect();
        self.links.insert((residency.link_free_at(), gpu));
        let (spare, hosted) = (IndexedHeap::default(), models.clone());
        self.gpus.insert(gpu, Memory { residency, models: hosted, copies, spare, spare_pages: 0 });
        for &id in &resident {
            self.models[id.0 as usize].holders.push(gpu);
        }
        models.into_iter().for_each(|id| self.on_changed(id));
        resident
    }

    /// Forgets a GPU. Yields all models that it could have run.
    pub(super) fn handle_gpu_left(&mut self, gpu: GpuId) -> Vec<ModelId> {
        let Some(memory) = self.gpus.remove(&gpu) else { return Vec::new() };
        self.links.remove(&(memory.residency.link_free_at(), gpu));
        for &id in &memory.models {
            let model = &mut self.models[id.0 as usize];
            model.hosts -= 1;
            model.near -= u32::from(memory.residency.is_in_host_memory(id));
            model.holders.retain(|&holder| holder != gpu);
            self.on_changed(id);
        }
        memory.models
    }

    /// A model is in the host memory of a GPU's machine from now on, or on disk only.
    pub(super) fn handle_host_memory(&mut self, gpu: GpuId, id: ModelId, is_there: bool) {
        let Some(memory) = self.gpus.get_mut(&gpu) else { return };
        if memory.residency.set_in_host_memory(id, is_there) && memory.models.binary_search(&id).is_ok() {
            let near = &mut self.models[id.0 as usize].near;
            *near = if is_there { *near + 1 } else { *near - 1 };
            self.on_changed(id);
        }
    }

    /// A model's batch waits from now on, or none does any more.
    pub(super) fn handle_waits(&mut self, id: ModelId, latest: Option<Timestamp>) {
        if self.is_idle() {
            return;
        }
        self.model_mut(id).latest = latest;
        self.on_changed(id);
    }

    /// Tasks without an objective wait since then, or none do any more.
    pub(super) fn handle_background(&mut self, id: ModelId, since: Option<Timestamp>) {
        self.model_mut(id).background_since = since;
        self.on_changed(id);
    }

    /// None of the model's GPUs can run its batch in time.
    pub(super) fn handle_starved(&mut self, id: ModelId) {
        let model = &self.models[id.0 as usize];
        if let Some(latest) = model.latest
            && self.retries.waits_until(id).is_none()
            && (model.holders.len() as u32) < model.hosts
        {
            self.wants.set(id.0, latest - model.load());
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

    /// A GPU was granted to tasks of a model that have no objective.
    pub(super) fn handle_background_granted(&mut self, gpu: GpuId, id: ModelId) {
        if let Some(copy) = self.gpus.get_mut(&gpu).and_then(|memory| memory.copies.get_mut(&id)) {
            copy.batches += 1;
            self.refresh(gpu, id);
        }
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
        if is_known {
            self.retries.handle_loaded(id, end);
        }
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
        let from = self.retries.waits_until(id).map_or(model.refused_until, |at| at.max(model.refused_until));
        let load = model.load();
        Some(arrives_at.map_or(Whereabouts::Cold { load, from }, Whereabouts::Arriving))
    }

    /// Gives links work.
    pub(super) fn decide(&mut self, now: Timestamp, business: &dyn Fn(GpuId) -> Business) -> Vec<Decision> {
        self.decided_at = now;
        while let Some(id) = self.retries.poll_released(now) {
            self.on_changed(id);
        }
        let mut decisions = Vec::new();
        let mut passed_over = Vec::new();
        while let Some((at, key)) = self.wants.peek()
            && passed_over.len() < PASSED_OVER_MAX
        {
            let soonest = self.soonest(now, self.links.iter());
            if at >= soonest && soonest > now + LOOKAHEAD {
                break;
            }
            self.wants.remove(key);
            let id = ModelId(key);
            if at < soonest {
                self.refuse(now, id);
                continue;
            }
            match self.choose(now, id, business) {
                Some(gpu) => self.load(now, gpu, (id, at), &mut decisions),
                None => passed_over.push((key, at)),
            }
        }
        for (key, at) in passed_over {
            self.wants.set(key, at);
        }
        decisions
    }

    /// When the first of some links is free, which are in that order.
    fn soonest<'a>(&self, now: Timestamp, mut links: impl Iterator<Item = &'a (Timestamp, GpuId)>) -> Timestamp {
        links.next().map_or(Timestamp::NEVER, |&(free_at, _)| free_at.max(now))
    }

    /// No load helps any more: all links have too much to do before. What comes later to the model wants one of its
    /// own.
    fn refuse(&mut self, now: Timestamp, id: ModelId) {
        let is_host = |(_, gpu): &&(Timestamp, GpuId)| self.gpus[gpu].models.binary_search(&id).is_ok();
        let from = self.soonest(now, self.links.iter().filter(is_host));
        let model = &mut self.models[id.0 as usize];
        if model.holders.is_empty() {
            model.refused_until = from;
            self.refused.push(id);
        }
    }

    /// The next model whose batch no load can serve in time: its whereabouts say when one could begin.
    pub(super) fn poll_refused(&mut self) -> Option<ModelId> {
        self.refused.pop()
    }

    /// When [`Self::decide`] must be called at the latest.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let wanted = self.wants.peek().map(|(helps_until, _)| {
            let looked_at = (self.decided_at + LOOKAHEAD, GpuId(u32::MAX));
            let next_link = self.links.range(looked_at..).next().map(|&(free_at, _)| free_at - LOOKAHEAD);
            next_link.map_or(helps_until + Span(1), |at| at.min(helps_until + Span(1)))
        });
        [wanted, self.retries.poll_timeout()].into_iter().flatten().min()
    }

    /// The GPU that could run the model's batch first; of several the one whose memory loses least.
    fn choose(&self, now: Timestamp, id: ModelId, business: &dyn Fn(GpuId) -> Business) -> Option<GpuId> {
        let model = &self.models[id.0 as usize];
        let is_copy = !model.holders.is_empty();
        let latest = model.latest.or(model.background_since.map(|_| Timestamp::NEVER))?;
        let open = self.links.range(..=(now + LOOKAHEAD, GpuId(u32::MAX))).take(GPUS_LOOKED_AT);
        let could = open.filter_map(|&(link_free_at, gpu)| {
            let memory = &self.gpus[&gpu];
            let has_space = memory.residency.pages_free() >= model.weights.pages;
            let has_room = memory.residency.pages_free() + memory.spare_pages >= model.weights.pages;
            let has_room = has_space || has_room && (model.latest.is_some() || !memory.has_unused(&self.models));
            let is_host = memory.models.binary_search(&id).is_ok() && memory.residency.place(id).is_none();
            if !has_room || !is_host {
                return None;
            }
            let Business { free_at, idle_at } = business(gpu);
            let loaded_at = link_free_at.max(now) + memory.residency.load_time(id, model.weights);
            let starts_at = loaded_at.max(idle_at);
            // What is urgent may pass others. Another copy is for a GPU that has time for it.
            let is_useful = if is_copy { starts_at <= latest } else { loaded_at.max(free_at) <= latest };
            let loses = if has_space {
                Timestamp::PAST
            } else {
                memory.spare.peek().map_or(Timestamp::NEVER, |(uses, _)| uses)
            };
            is_useful.then_some((starts_at, loses, gpu))
        });
        could.min().map(|(.., gpu)| gpu)
    }

    fn load(&mut self, now: Timestamp, gpu: GpuId, (id, helps_until): (ModelId, Timestamp), to: &mut Vec<Decision>) {
        let Model { weights, uses, ref holders, latest, .. } = self.models[id.0 as usize];
        let (uses, helps_until) = match latest {
            None => (0.0, now),
            Some(_) if holders.is_empty() => (used(uses, now, 1), helps_until),
            Some(_) => (used(0.0, now, 1), helps_until),
        };
        while self.gpus[&gpu].residency.pages_free() < weights.pages {
            let (_, victim) = self.gpus[&gpu].spare.peek().expect("callers have counted what is spare");
            self.unload(gpu, ModelId(victim));
            to.push(Decision::Unload(gpu, ModelId(victim)));
        }
        let memory = self.gpus.get_mut(&gpu).expect("it was chosen");
        let link_free_at = memory.residency.link_free_at();
        self.links.remove(&(link_free_at, gpu));
        let earliest = link_free_at.max(now);
        let takes = memory.residency.load_time(id, weights);
        let ends_at = memory.residency.begin_load(earliest, id, weights);
        self.links.insert((ends_at, gpu));
        memory.copies.insert(id, Copy { uses, batches: 0 });
        self.models[id.0 as usize].holders.push(gpu);
        self.on_changed(id);
        let latest = helps_until.max(earliest) + LATE_MAX;
        to.push(Decision::Load { gpu, model: id, earliest, latest, takes });
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
        let is_nowhere = model.holders.is_empty() && model.hosts > 0 && self.retries.waits_until(id).is_none();
        let load = model.load();
        match (model.latest, model.background_since) {
            (Some(latest), _) if is_nowhere => self.wants.set(id.0, latest - load),
            (None, Some(since)) if is_nowhere => self.wants.set(id.0, since + FAR),
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
        let may_go = memory.residency.may_go(id);
        let was_spare = memory.spare.get(id.0).is_some();
        match memory.copies.get(&id).filter(|copy| may_go && !is_needed && copy.batches == 0) {
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
