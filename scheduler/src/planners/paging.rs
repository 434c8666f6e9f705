//! Which weights Clockwork loads where (OSDI 2020, section 5.3 and appendix B), for planners with one queue for each
//! model.
//!
//! The demand d of a model is the execution time of its requests that a load could still serve. It is allocated to the
//! GPUs that hold the model in inverse proportion to their loads l, which are the sums of what is allocated to them.
//! The priority of another load is what would not be served, `d - sum of a capacity / l`; a link with less than 5 ms
//! of work is given the highest one above zero that is not on its GPU yet, and what was used least recently makes room.
//!
//! The paper leaves the capacity open: here it is a GPU's time until the deadlines of its experiments. It keeps
//! allocations up to date as they change; here they are drawn up anew whenever a link can take a load, from the models
//! that wait, which are few. Equal priorities go by the nearest deadline.

use std::collections::BTreeMap;

use proto::{GpuId, ModelId, Span, Timestamp};

use crate::{
    residency::{Decision, LATE_MAX, LOOKAHEAD, Place, Residency, Retries},
    task::{GpuMemory, LoadEnd, Weights},
};

/// A GPU's time that demand is held against.
const CAPACITY: Span = Span::from_millis(100);

/// What waits for a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub model: ModelId,
    /// Execution time of all that waits.
    pub all: Span,
    /// Of what a load could still serve.
    pub loadable: Span,
    /// The nearest deadline.
    pub deadline: Timestamp,
}

/// GPUs whose memory holds a part of what they host.
#[derive(Debug, Default)]
pub(super) struct Paging {
    /// By model id.
    weights: Vec<Weights>,
    gpus: BTreeMap<GpuId, Memory>,
    retries: Retries,
}

#[derive(Debug)]
struct Memory {
    residency: Residency,
    /// Ascending.
    models: Vec<ModelId>,
    copies: BTreeMap<ModelId, Copy>,
}

#[derive(Debug, Clone, Copy)]
struct Copy {
    used_at: Timestamp,
    /// Batches without a report.
    batches: u32,
}

impl Paging {
    pub(super) fn handle_weights(&mut self, id: ModelId, weights: Weights) {
        if self.weights.len() <= id.0 as usize {
            self.weights.resize(id.0 as usize + 1, Weights::default());
        }
        self.weights[id.0 as usize] = weights;
    }

    /// Yields what is in the memory of a GPU that joins.
    pub(super) fn handle_gpu_joined(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        mut models: Vec<ModelId>,
        memory: &GpuMemory,
    ) -> Vec<ModelId> {
        models.sort_unstable();
        let residency = Residency::joined(now, memory, &models, |id| self.weights[id.0 as usize].pages);
        let resident: Vec<_> = residency.models().map(|(id, _)| id).collect();
        let copies = resident.iter().map(|&id| (id, Copy { used_at: now, batches: 0 })).collect();
        self.gpus.insert(gpu, Memory { residency, models, copies });
        resident
    }

    pub(super) fn handle_gpu_left(&mut self, gpu: GpuId) {
        self.gpus.remove(&gpu);
    }

    /// A batch was planned.
    pub(super) fn handle_planned(&mut self, now: Timestamp, gpu: GpuId, id: ModelId) {
        if let Some(copy) = self.gpus.get_mut(&gpu).and_then(|memory| memory.copies.get_mut(&id)) {
            *copy = Copy { used_at: now, batches: copy.batches + 1 };
        }
    }

    /// A batch was reported.
    pub(super) fn handle_batch_ended(&mut self, gpu: GpuId, id: ModelId) {
        if let Some(copy) = self.gpus.get_mut(&gpu).and_then(|memory| memory.copies.get_mut(&id)) {
            copy.batches = copy.batches.saturating_sub(1);
        }
    }

    /// True if the model is in the GPU's memory by it.
    pub(super) fn handle_loaded(&mut self, gpu: GpuId, id: ModelId, end: LoadEnd) -> bool {
        let Some(memory) = self.gpus.get_mut(&gpu) else { return false };
        let is_known = memory.residency.handle_loaded(id, end);
        if is_known {
            self.retries.handle_loaded(id, end);
        }
        if is_known && end.is_loaded {
            memory.copies.insert(id, Copy { used_at: end.finished_at, batches: 0 });
        }
        is_known && end.is_loaded
    }

    /// A model is in the host memory of a GPU's machine from now on, or on disk only.
    pub(super) fn handle_host_memory(&mut self, gpu: GpuId, id: ModelId, is_there: bool) {
        if let Some(memory) = self.gpus.get_mut(&gpu) {
            memory.residency.set_in_host_memory(id, is_there);
        }
    }

    /// Those that could have a model in memory.
    fn hosts(&self, id: ModelId) -> impl Iterator<Item = &Residency> {
        let hosts = self.gpus.values().filter(move |memory| memory.models.binary_search(&id).is_ok());
        hosts.map(|memory| &memory.residency)
    }

    /// Whether a model is in no memory, though it could be.
    pub(super) fn is_cold(&self, id: ModelId) -> bool {
        let mut hosts = self.hosts(id).peekable();
        hosts.peek().is_some() && hosts.all(|memory| memory.place(id) != Some(Place::Resident))
    }

    /// When a load of this model would end at the soonest, behind what links have to do; `None` if it is in some
    /// memory, or on its way there.
    pub(super) fn loadable_at(&self, now: Timestamp, id: ModelId) -> Option<Timestamp> {
        let mut soonest = None;
        let from = self.retries.waits_until(id).unwrap_or(now).max(now);
        for memory in self.hosts(id) {
            if memory.place(id).is_some() {
                return None;
            }
            let at = memory.link_free_at().max(from) + memory.load_time(id, self.weights[id.0 as usize]);
            soonest = Some(soonest.map_or(at, |soonest: Timestamp| soonest.min(at)));
        }
        soonest
    }

    /// Whether all weights are there all the time.
    pub(super) fn is_idle(&self) -> bool {
        self.gpus.is_empty()
    }

    /// When a link can take a load that could take none at `decided_at`.
    pub(super) fn poll_timeout(&self, decided_at: Timestamp) -> Option<Timestamp> {
        let links = self.gpus.values().map(|memory| memory.residency.link_free_at() - LOOKAHEAD);
        links.chain(self.retries.poll_timeout()).filter(|&at| at > decided_at).min()
    }

    /// Whether a link can take a load.
    pub(super) fn is_open(&self, now: Timestamp) -> bool {
        self.gpus.values().any(|memory| memory.residency.link_free_at() <= now + LOOKAHEAD)
    }

    /// Gives links work.
    pub(super) fn decide(&mut self, now: Timestamp, demands: &[Demand]) -> Vec<Decision> {
        while self.retries.poll_released(now).is_some() {}
        let mut decisions = Vec::new();
        let gpus: Vec<_> = self.gpus.keys().copied().collect();
        for gpu in gpus {
            while self.gpus[&gpu].residency.link_free_at() <= now + LOOKAHEAD {
                let Some(id) = self.highest_priority(gpu, demands) else { break };
                if !self.load(now, gpu, id, &mut decisions) {
                    break;
                }
            }
        }
        decisions
    }

    /// The model with the highest priority above zero that is not on this GPU, and could be.
    fn highest_priority(&self, gpu: GpuId, demands: &[Demand]) -> Option<ModelId> {
        let loads = self.gpu_loads(demands);
        let memory = &self.gpus[&gpu];
        let could = demands.iter().filter(|demand| {
            demand.loadable > Span::ZERO
                && self.retries.waits_until(demand.model).is_none()
                && memory.models.binary_search(&demand.model).is_ok()
                && memory.residency.place(demand.model).is_none()
                && self.weights[demand.model.0 as usize].pages <= memory.residency.pages()
        });
        let ranked = could.map(|demand| (self.priority(demand, &loads), demand));
        let found = ranked.filter(|&(priority, _)| priority > 0.0).max_by(|(one, first), (other, second)| {
            one.total_cmp(other).then_with(|| (second.deadline, second.model).cmp(&(first.deadline, first.model)))
        });
        found.map(|(_, demand)| demand.model)
    }

    fn holders(&self, id: ModelId) -> impl Iterator<Item = GpuId> {
        self.gpus.iter().filter(move |(_, memory)| memory.residency.place(id).is_some()).map(|(&gpu, _)| gpu)
    }

    /// l of each GPU in seconds: from an even allocation one step towards what is in inverse proportion to l itself.
    fn gpu_loads(&self, demands: &[Demand]) -> BTreeMap<GpuId, f64> {
        let mut even: BTreeMap<GpuId, f64> = BTreeMap::new();
        for demand in demands {
            let holders = self.holders(demand.model).count();
            for gpu in self.holders(demand.model) {
                *even.entry(gpu).or_default() += demand.all.as_secs_f64() / holders as f64;
            }
        }
        let mut loads: BTreeMap<GpuId, f64> = BTreeMap::new();
        for demand in demands {
            for (gpu, allocated) in self.allocation(demand, &even) {
                *loads.entry(gpu).or_default() += allocated;
            }
        }
        loads
    }

    /// a of each GPU that holds the model, in seconds.
    fn allocation(&self, demand: &Demand, loads: &BTreeMap<GpuId, f64>) -> Vec<(GpuId, f64)> {
        let inverse: Vec<_> = self.holders(demand.model).map(|gpu| (gpu, 1.0 / loads[&gpu].max(1e-9))).collect();
        let sum: f64 = inverse.iter().map(|(_, inverse)| inverse).sum();
        inverse.into_iter().map(|(gpu, inverse)| (gpu, demand.all.as_secs_f64() * inverse / sum)).collect()
    }

    fn priority(&self, demand: &Demand, loads: &BTreeMap<GpuId, f64>) -> f64 {
        let served = self
            .allocation(demand, loads)
            .into_iter()
            .map(|(gpu, allocated)| allocated * CAPACITY.as_secs_f64() / loads[&gpu].max(1e-9));
        demand.loadable.as_secs_f64() - served.sum::<f64>()
    }

    /// False if there is no room and cannot be made.
    fn load(&mut self, now: Timestamp, gpu: GpuId, id: ModelId, to: &mut Vec<Decision>) -> bool {
        let weights = self.weights[id.0 as usize];
        let memory = self.gpus.get_mut(&gpu).expect("the caller has looked at it");
        let copies = memory.copies.iter().filter(|&(&other, copy)| copy.batches == 0 && memory.residency.may_go(other));
        let mut idle: Vec<_> = copies.map(|(&other, copy)| (copy.used_at, other)).collect();
        idle.sort_unstable();
        let mut room = memory.residency.pages_free();
        let enough = idle.iter().take_while(|(_, other)| {
            let is_short = room < weights.pages;
            room += if is_short { memory.residency.pages_of(*other) } else { 0 };
            is_short
        });
        let victims: Vec<_> = enough.map(|&(_, other)| other).collect();
        if room < weights.pages {
            return false;
        }
        for victim in victims {
            memory.residency.unload(victim);
            memory.copies.remove(&victim);
            to.push(Decision::Unload(gpu, victim));
        }
        let earliest = memory.residency.link_free_at().max(now);
        let takes = memory.residency.load_time(id, weights);
        memory.residency.begin_load(earliest, id, weights);
        to.push(Decision::Load { gpu, model: id, earliest, latest: earliest + LATE_MAX, takes });
        true
    }
}
