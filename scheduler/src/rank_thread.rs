//! Step 5: the RankThread, the only global state: when each GPU frees, and two kinds of timer that match candidates
//! with GPUs (Symphony, Algorithm 1 and Figure 18).
//!
//! A model's timer fires at `exec_at - delay(b)` and takes the GPU with the smallest id that hosts the model and is
//! free by then. If there is none, the candidate is *schedulable* and waits; a sub-cluster's GPU timer fires
//! `delay(b)` before its next GPU frees and takes the waiting candidate whose `due_at` is nearest.
//!
//! GPUs that host the same models form a sub-cluster, so that one tree of free times and one heap of waiting
//! candidates serve all of them; a model may be hosted by several sub-clusters. Every event costs
//! O(S (log M + log G)), where S, the sub-clusters that host one model, is mostly 1. A GPU whose memory holds a part
//! of what it hosts is a sub-cluster of its own, of the models that are loaded (`rank_thread/loads.rs`).
//!
//! The life of a grant: the model and the GPU are taken out of all structures; the model comes back with the first
//! candidate that knows of the grant, the GPU with the [`GpuUpdate`] that answers it. So at most one grant is under
//! way for a model and for a GPU, whatever the two threads' delays are.

use std::collections::{BTreeMap, VecDeque};

use proto::{GpuId, ModelId, Span, Timestamp};

use crate::{
    free_times::FreeTimes,
    gpu_work::GpuWork,
    indexed_heap::IndexedHeap,
    mailbox::FromRankThread,
    messages::{Candidate, GpuUpdate, Grant, NetworkBudget, Price, Traffic, Whereabouts},
    pricing::Pricing,
    residency::Decision,
    task::{GpuMemory, LoadEnd, Weights},
};
use background::{Demand, Waiting};
use loads::{Business, Loader};
use prices::Prices;

mod background;
mod loads;
mod prices;
mod waiting;

/// Plans of one GPU that its backend has not reported on: one runs and the inputs of the next are fetched. A GPU with
/// this many is not granted before it reports, however long its batches should have ended.
const UNREPORTED_PLANS_MAX: usize = 2;

/// Weight of the newest batch in the average of what batches take.
const EXECUTION_WEIGHT: f64 = 0.02;

/// Matches candidates with GPUs.
#[derive(Debug)]
pub struct RankThread {
    budget: NetworkBudget,
    /// By model id.
    models: Vec<Model>,
    gpus: BTreeMap<GpuId, Gpu>,
    /// Freed places are `None` and used again.
    sub_clusters: Vec<Option<SubCluster>>,
    /// By model id: when a candidate becomes schedulable.
    model_timers: IndexedHeap,
    /// By sub-cluster: when its next GPU frees, if a candidate waits for it.
    gpu_timers: IndexedHeap,
    /// What waits without an objective.
    background: Waiting,
    loader: Loader,
    prices: Prices,
    /// With the models whose ModelThreads they are for.
    messages: VecDeque<(ModelId, FromRankThread)>,
}

#[derive(Debug, Default)]
struct Model {
    /// What the network costs it, if that is not what it costs all.
    budget: Option<NetworkBudget>,
    candidate: Option<Candidate>,
    /// Whether the candidate's timer has fired and found no GPU.
    waits: Waits,
    /// What was last told of its requests.
    traffic: Option<Traffic>,
    /// As its ModelThread was told.
    price: Price,
    /// Grants of the model's whole life, modulo 2^32.
    grants: u32,
    /// The sub-clusters that host it, and its place among their models.
    hosts: Vec<(u32, u32)>,
    /// As its ModelThread was told.
    whereabouts: Whereabouts,
    demand: Demand,
}

/// What a candidate waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Waits {
    /// Its timer runs, or there is none.
    #[default]
    No,
    /// A GPU that may start batches early. Its timer runs until it is schedulable anywhere.
    Open,
    /// Any GPU.
    Anywhere,
}

#[derive(Debug)]
struct Gpu {
    sub_cluster: u32,
    /// Its place in the sub-cluster's free times.
    position: usize,
    is_granted: bool,
    /// The model whose candidate it is granted to.
    candidate_of: Option<ModelId>,
    work: GpuWork,
    /// The last of its batches ends at some time that is not known.
    is_uncertain: bool,
    /// If its memory is short.
    paged: Option<PagedWork>,
}

/// What must be known of a GPU's work to load weights.
#[derive(Debug, Default)]
struct PagedWork {
    /// The models of the batches that were not reported and of the grant that is under way, oldest first.
    batches: VecDeque<ModelId>,
    /// What its batches take, on average over some.
    execution_ns: f64,
}

impl PagedWork {
    fn handle_planned(&mut self, execution: Span) {
        self.execution_ns += EXECUTION_WEIGHT * (execution.as_nanos() as f64 - self.execution_ns);
    }

    /// The model of the oldest batch; not that of a grant that has yet to be answered.
    fn pop_finished(&mut self, is_granted: bool) -> Option<ModelId> {
        if self.batches.len() > usize::from(is_granted) { self.batches.pop_front() } else { None }
    }
}

impl Gpu {
    /// When it can be granted for: `NEVER` while it cannot.
    fn available_at(&self) -> Timestamp {
        let is_blocked = self.is_granted || self.is_uncertain || self.work.len() >= UNREPORTED_PLANS_MAX;
        if is_blocked { Timestamp::NEVER } else { self.work.free_at() }
    }
}

#[derive(Debug)]
struct SubCluster {
    /// What its GPUs host; ascending, unless it is paged.
    models: Vec<ModelId>,
    /// Of one GPU, whose models come and go: places in `models` that are free.
    paged: Option<Vec<u32>>,
    /// Ascending.
    gpus: Vec<GpuId>,
    /// By place in `gpus`.
    free_times: FreeTimes,
    /// `due_at` of each candidate that waits for any GPU, by place in `models`.
    schedulable: IndexedHeap,
    /// The same of those that wait for one of the first `open`.
    early: IndexedHeap,
    /// GPUs that may start batches early: those with the smallest ids.
    open: usize,
    pricing: Pricing,
    /// What batches with an objective take there, on average over some.
    execution_ns: f64,
    /// When tasks without an objective last ran here although a request of the next moment could have been late for it.
    indulged_at: Timestamp,
}

impl RankThread {
    /// A cluster without GPUs.
    #[must_use]
    pub fn new(budget: NetworkBudget) -> Self {
        Self {
            budget,
            models: Vec::new(),
            gpus: BTreeMap::new(),
            sub_clusters: Vec::new(),
            model_timers: IndexedHeap::default(),
            gpu_timers: IndexedHeap::default(),
            background: Waiting::default(),
            loader: Loader::default(),
            prices: Prices::default(),
            messages: VecDeque::new(),
        }
    }

    /// From now on the network costs this model so much; its ModelThread is to be told the same.
    pub fn handle_model_budget(&mut self, id: ModelId, budget: NetworkBudget) {
        self.model_mut(id).budget = Some(budget);
    }

    /// What a model's weights take, wherever memory is short. Known before a GPU joins that hosts the model.
    pub fn handle_weights(&mut self, id: ModelId, weights: Weights) {
        self.model_mut(id);
        self.loader.handle_weights(id, weights);
    }

    /// Takes in a GPU that is free at `now` and hosts `models`: always, or while they are in its memory. O(G + M) of
    /// its sub-cluster: membership rarely changes.
    ///
    /// # Panics
    /// If the GPU is already here: ids are never used twice.
    pub fn handle_gpu_joined(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        mut models: Vec<ModelId>,
        memory: Option<GpuMemory>,
    ) {
        assert!(!self.gpus.contains_key(&gpu), "{gpu:?} joined twice");
        models.sort_unstable();
        models.dedup();
        let sub_cluster = match &memory {
            None => self.sub_cluster_of(&models),
            Some(memory) => {
                let resident = self.loader.handle_gpu_joined(now, gpu, models.clone(), memory);
                // It was told nothing while it knew of no GPU.
                models.iter().for_each(|&model| self.tell_loader(model));
                self.new_sub_cluster(resident, Some(Vec::new()))
            }
        };
        let members = &mut self.sub_clusters[sub_cluster as usize].as_mut().expect("just looked up").gpus;
        members.insert(members.partition_point(|&member| member < gpu), gpu);
        let work = GpuWork::new(now);
        let paged = memory.map(|_| PagedWork::default());
        let (position, is_granted, candidate_of, is_uncertain) = (0, false, None, false);
        let joined = Gpu { sub_cluster, position, is_granted, candidate_of, work, is_uncertain, paged };
        self.gpus.insert(gpu, joined);
        self.rebuild_free_times(sub_cluster);
        if !self.loader.is_idle() {
            models.into_iter().for_each(|model| self.tell_whereabouts(model));
        }
    }

    /// A model's weights are in the host memory of a GPU's machine from now on, or on disk only.
    pub fn handle_host_memory(&mut self, gpu: GpuId, model: ModelId, is_there: bool) {
        self.loader.handle_host_memory(gpu, model, is_there);
        self.tell_whereabouts(model);
    }

    /// Another ModelThread owns the model from now on, and counts its grants anew. One that is under way is the former
    /// owner's to answer.
    pub fn handle_model_moved(&mut self, id: ModelId) {
        self.model_mut(id);
        self.withdraw(id);
        let model = self.model_mut(id);
        model.candidate = None;
        model.grants = 0;
        // The new owner takes it for being here, and knows of no price.
        (model.whereabouts, model.price) = (Whereabouts::Here, Price::default());
        self.background.remove(id);
        self.loader.handle_waits(id, None);
        self.loader.handle_background(id, None);
        self.tell_whereabouts(id);
    }

    /// Forgets a GPU. A grant under way for it is the caller's to fail, as every plan of a lost backend. Yields when it
    /// would have been free.
    pub fn handle_gpu_left(&mut self, gpu: GpuId) -> Option<Timestamp> {
        let Gpu { sub_cluster, work, candidate_of, .. } = self.gpus.remove(&gpu)?;
        if let Some(model) = candidate_of {
            self.models[model.0 as usize].demand.handle_answered();
        }
        let paged = self.loader.handle_gpu_left(gpu);
        let members = &mut self.sub_clusters[sub_cluster as usize].as_mut().expect("its GPU was here").gpus;
        members.retain(|&member| member != gpu);
        if !members.is_empty() {
            self.rebuild_free_times(sub_cluster);
            return Some(work.free_at());
        }
        let SubCluster { models, .. } = self.sub_clusters[sub_cluster as usize].take().expect("just used");
        for model in models {
            // A place that is free names one that was there before.
            self.models[model.0 as usize].hosts.retain(|&(host, _)| host != sub_cluster);
        }
        self.gpu_timers.remove(sub_cluster);
        paged.into_iter().for_each(|model| self.tell_whereabouts(model));
        Some(work.free_at())
    }

    /// Takes in a model's newest candidate (Figure 18, `inform_candidate`).
    pub fn handle_candidate(&mut self, now: Timestamp, id: ModelId, candidate: Option<Candidate>) {
        let model = self.model_mut(id);
        if candidate.is_some_and(|candidate| candidate.grants_seen != model.grants) {
            return;
        }
        let waits_already = model.waits != Waits::No;
        model.candidate = candidate;
        if let Some(candidate) = candidate {
            model.demand.patience = candidate.patience;
            if candidate.traffic.is_some() {
                model.traffic = candidate.traffic;
                self.prices.handle_traffic(now);
            }
        }
        if !self.loader.is_idle() {
            self.tell_loader(id);
        }
        match candidate {
            // It keeps its place among those that wait, rather than look for a GPU that there was none of before.
            Some(candidate) if waits_already && self.fires_at(id, &candidate) <= now => self.on_waiting(now, id),
            Some(candidate) => {
                self.withdraw(id);
                // Not before `now`: candidates that wait already come first.
                self.model_timers.set(id.0, self.fires_at(id, &candidate).max(now));
            }
            None => self.withdraw(id),
        }
    }

    /// Tells the loader whether a batch of the model waits, and by when that must start.
    fn tell_loader(&mut self, id: ModelId) {
        let candidate = self.model_mut(id).candidate;
        let starts_by = candidate.map(|candidate| candidate.latest - self.delay(id, candidate.size));
        self.loader.handle_waits(id, starts_by);
    }

    /// Takes in what became of a GPU (Figure 18, `inform_gpu`). Of a GPU that has left nothing is expected any more.
    pub fn handle_gpu(&mut self, id: GpuId, update: GpuUpdate) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        if matches!(update, GpuUpdate::Planned { .. } | GpuUpdate::Returned)
            && let Some(model) = gpu.candidate_of.take()
        {
            self.models[model.0 as usize].demand.handle_answered();
            if let GpuUpdate::Planned { exec_at, free_at, .. } = update {
                let average_ns =
                    &mut self.sub_clusters[gpu.sub_cluster as usize].as_mut().expect("its own").execution_ns;
                *average_ns += EXECUTION_WEIGHT * ((free_at - exec_at).as_nanos() as f64 - *average_ns);
            }
        }
        match update {
            GpuUpdate::Planned { exec_at, free_at, is_certain } => {
                (gpu.is_granted, gpu.is_uncertain) = (false, !is_certain);
                gpu.work.push(exec_at, free_at - exec_at);
                if let Some(paged) = &mut gpu.paged {
                    paged.handle_planned(free_at - exec_at);
                }
            }
            GpuUpdate::Returned => {
                gpu.is_granted = false;
                if let Some(model) = gpu.paged.as_mut().and_then(|paged| paged.batches.pop_back()) {
                    self.loader.handle_batch_ended(id, model);
                }
            }
            GpuUpdate::Finished { finished_at } => {
                gpu.work.handle_finished(finished_at);
                gpu.is_uncertain &= !gpu.work.is_empty();
                let is_granted = gpu.is_granted;
                if let Some(model) = gpu.paged.as_mut().and_then(|paged| paged.pop_finished(is_granted)) {
                    self.loader.handle_batch_ended(id, model);
                }
            }
            GpuUpdate::Loaded { model, end } => return self.on_loaded(id, model, end),
        }
        let (sub_cluster, position, available_at) = (gpu.sub_cluster, gpu.position, gpu.available_at());
        self.set_available(sub_cluster, position, available_at);
    }

    /// Fires all timers that are due, in the order of their instants; at the same instant GPUs first, so that
    /// candidates that wait come before those that begin to.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.fire_timers(now);
        if self.prices.looks_at().is_some_and(|at| at <= now) {
            self.plan_prices(now);
            self.fire_timers(now);
        }
        if !self.loader.is_idle() {
            self.decide_loads(now);
        }
        if self.background.looks_at().is_some_and(|at| at <= now) {
            self.grant_background(now);
        }
    }

    fn fire_timers(&mut self, now: Timestamp) {
        loop {
            let model = self.model_timers.peek().filter(|&(at, _)| at <= now);
            let gpu = self.gpu_timers.peek().filter(|&(at, _)| at <= now);
            match (model, gpu) {
                (None, None) => break,
                (Some((at, model)), gpu) if gpu.is_none_or(|(gpu_at, _)| at < gpu_at) => {
                    self.on_model_timer((now, at), ModelId(model));
                }
                (_, Some((at, sub_cluster))) => self.on_gpu_timer((now, at), sub_cluster),
                (Some(_), None) => unreachable!("the second arm takes every model timer that has no rival"),
            }
        }
    }

    /// When `handle_timeout` must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        // Asked after every event: `NEVER` spares the branches of four options.
        let earliest = |heap: &IndexedHeap| heap.peek().map_or(Timestamp::NEVER, |(at, _)| at);
        let or_never = |at: Option<Timestamp>| at.unwrap_or(Timestamp::NEVER);
        let candidates_at = earliest(&self.model_timers).min(earliest(&self.gpu_timers));
        let at = candidates_at.min(or_never(self.loader.poll_timeout())).min(or_never(self.background.looks_at()));
        let at = at.min(or_never(self.prices.looks_at()));
        (at != Timestamp::NEVER).then_some(at)
    }

    /// The next thing to say, with the model whose ModelThread it is for.
    pub fn poll_message(&mut self) -> Option<(ModelId, FromRankThread)> {
        self.messages.pop_front()
    }

    fn on_match(&mut self, timer_at: Timestamp, id: ModelId, gpu_id: GpuId) {
        self.withdraw(id);
        let model = &mut self.models[id.0 as usize];
        let size = model.candidate.take().map_or(0, |candidate| candidate.size);
        model.grants = model.grants.wrapping_add(1);
        model.demand.handle_granted(timer_at);
        self.grant(timer_at, id, gpu_id, (size, None));
    }

    /// For a batch of about so many tasks, which must have ended by then if they have no objective.
    fn grant(
        &mut self,
        timer_at: Timestamp,
        id: ModelId,
        gpu_id: GpuId,
        (size, background_until): (u32, Option<Timestamp>),
    ) {
        let gpu = self.gpus.get_mut(&gpu_id).expect("sub-clusters hold GPUs that are here");
        gpu.is_granted = true;
        gpu.candidate_of = background_until.is_none().then_some(id);
        if let Some(paged) = &mut gpu.paged {
            paged.batches.push_back(id);
            match background_until {
                None => self.loader.handle_granted(timer_at, gpu_id, id, size),
                Some(_) => self.loader.handle_background_granted(gpu_id, id),
            }
        }
        let (sub_cluster, position, free_at) = (gpu.sub_cluster, gpu.position, gpu.work.free_at());
        let hosts = self.models[id.0 as usize].hosts.iter();
        let gpus = hosts.filter_map(|&(host, _)| self.sub_clusters[host as usize].as_ref());
        let gpus = gpus.map(|host| host.gpus.len() as u32).sum();
        let is_open = self.sub_clusters[sub_cluster as usize].as_ref().is_some_and(|host| position < host.open);
        let grant = Grant { model: id, gpu: gpu_id, free_at, gpus, is_open, timer_at, background_until };
        self.messages.push_back((id, FromRankThread::Grant(grant)));
        self.set_available(sub_cluster, position, Timestamp::NEVER);
    }

    /// If no GPU that has the candidate's model in memory can take it in time, another one may have to.
    fn check_starved(&mut self, now: Timestamp, id: ModelId) {
        if self.loader.is_idle() {
            return;
        }
        let model = &self.models[id.0 as usize];
        let Candidate { size, latest, .. } = model.candidate.expect("callers checked");
        let idle_at = |&(host, _): &(u32, u32)| {
            let gpus = &self.sub_clusters[host as usize].as_ref().expect("a host").gpus;
            gpus.iter().map(|&gpu| self.idle_at(now, gpu)).min()
        };
        let is_shared =
            |&(host, _): &(u32, u32)| self.sub_clusters[host as usize].as_ref().expect("a host").paged.is_none();
        let starts_by = latest - self.delay(id, size);
        if !model.hosts.iter().any(is_shared) && model.hosts.iter().filter_map(idle_at).all(|at| at > starts_by) {
            self.loader.handle_starved(id);
        }
    }

    /// When a GPU would have run all that it was given and that waits for it, if batches are as they were.
    fn idle_at(&self, now: Timestamp, gpu: GpuId) -> Timestamp {
        let Gpu { work, sub_cluster, paged, .. } = &self.gpus[&gpu];
        let execution_ns = paged.as_ref().map_or(0.0, |paged| paged.execution_ns);
        let waiting = self.sub_clusters[*sub_cluster as usize].as_ref().expect("a GPU's").schedulable.len();
        work.free_at().max(now) + Span((execution_ns * waiting as f64) as i64)
    }

    /// Weights are in a GPU's memory, or are not.
    fn on_loaded(&mut self, gpu: GpuId, model: ModelId, end: LoadEnd) {
        let sub_cluster = self.gpus[&gpu].sub_cluster;
        if self.loader.handle_loaded(gpu, model, end) {
            self.host(sub_cluster, model);
        }
        self.tell_whereabouts(model);
    }

    /// Tells links what to do, and ModelThreads where weights are.
    fn decide_loads(&mut self, now: Timestamp) {
        // It asks about everything else.
        let mut loader = std::mem::take(&mut self.loader);
        let business = |gpu| {
            let free_at = self.gpus[&gpu].work.free_at().max(now);
            Business { free_at, idle_at: self.idle_at(now, gpu) }
        };
        let decisions = loader.decide(now, &business);
        self.loader = loader;
        while let Some(model) = self.loader.poll_refused() {
            self.tell_whereabouts(model);
        }
        let mut unloads = Vec::new();
        for decision in decisions {
            match decision {
                Decision::Unload(gpu, model) => unloads.push((gpu, model)),
                Decision::Load { gpu, model, earliest, latest, takes } => {
                    for (gpu, unloaded) in unloads.drain(..) {
                        self.unhost(self.gpus[&gpu].sub_cluster, unloaded);
                        self.messages.push_back((model, FromRankThread::Unload { gpu, model: unloaded }));
                        self.tell_whereabouts(unloaded);
                    }
                    self.messages.push_back((model, FromRankThread::Load { gpu, model, earliest, latest, takes }));
                    self.tell_whereabouts(model);
                }
            }
        }
    }

    /// Tells the model's ModelThread where it is, if that is another place than before.
    fn tell_whereabouts(&mut self, id: ModelId) {
        let elsewhere = self.loader.whereabouts(id);
        let Some(model) = self.models.get_mut(id.0 as usize) else { return };
        let whereabouts = elsewhere.filter(|_| model.hosts.is_empty()).unwrap_or(Whereabouts::Here);
        if model.whereabouts != whereabouts {
            model.whereabouts = whereabouts;
            self.messages.push_back((id, FromRankThread::Whereabouts(id, whereabouts)));
        }
    }

    /// A paged sub-cluster has the model in memory from now on.
    fn host(&mut self, host: u32, id: ModelId) {
        let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("a GPU's");
        let place = sub_cluster.paged.as_mut().expect("only its models come").pop().unwrap_or_else(|| {
            sub_cluster.models.push(id);
            sub_cluster.models.len() as u32 - 1
        });
        sub_cluster.models[place as usize] = id;
        let model = &mut self.models[id.0 as usize];
        model.hosts.push((host, place));
        if model.waits != Waits::No {
            self.set_waiting(host, place, id);
        }
    }

    /// A paged sub-cluster does not have it any more.
    fn unhost(&mut self, host: u32, id: ModelId) {
        let hosts = &mut self.models[id.0 as usize].hosts;
        let index = hosts.iter().position(|&(other, _)| other == host).expect("it was there");
        let (_, place) = hosts.swap_remove(index);
        let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("a GPU's");
        sub_cluster.schedulable.remove(place);
        sub_cluster.early.remove(place);
        sub_cluster.paged.as_mut().expect("only its models go").push(place);
        self.set_gpu_timer(host);
    }

    fn set_available(&mut self, host: u32, position: usize, at: Timestamp) {
        self.sub_clusters[host as usize].as_mut().expect("a GPU's").free_times.set(position, at);
        self.set_gpu_timer(host);
    }

    fn fires_at(&self, id: ModelId, candidate: &Candidate) -> Timestamp {
        candidate.exec_at - self.delay(id, candidate.size)
    }

    /// From a grant for a batch of this model to its start.
    fn delay(&self, id: ModelId, size: u32) -> Span {
        self.models[id.0 as usize].budget.unwrap_or(self.budget).delay(size as usize)
    }

    fn model_mut(&mut self, id: ModelId) -> &mut Model {
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, Model::default);
        }
        &mut self.models[id.0 as usize]
    }

    /// The sub-cluster that hosts exactly `models`; a new one if there is none.
    fn sub_cluster_of(&mut self, models: &[ModelId]) -> u32 {
        let same = |place: &Option<SubCluster>| {
            place.as_ref().is_some_and(|other| other.paged.is_none() && other.models == models)
        };
        match self.sub_clusters.iter().position(same) {
            Some(index) => index as u32,
            None => self.new_sub_cluster(models.to_vec(), None),
        }
    }

    fn new_sub_cluster(&mut self, models: Vec<ModelId>, paged: Option<Vec<u32>>) -> u32 {
        let index = self.sub_clusters.iter().position(Option::is_none).unwrap_or_else(|| {
            self.sub_clusters.push(None);
            self.sub_clusters.len() - 1
        });
        let (mut schedulable, early) = (IndexedHeap::default(), IndexedHeap::default());
        for (place, &id) in (0u32..).zip(&models) {
            let model = self.model_mut(id);
            model.hosts.push((index as u32, place));
            // Nobody has planned for it yet: all of its GPUs are open.
            if model.waits != Waits::No {
                schedulable.set(place, model.candidate.expect("it waits").due_at);
            }
        }
        let free_times = FreeTimes::new(std::iter::empty());
        self.sub_clusters[index] = Some(SubCluster {
            models,
            paged,
            gpus: Vec::new(),
            free_times,
            schedulable,
            early,
            open: usize::MAX,
            pricing: Pricing::default(),
            execution_ns: 0.0,
            indulged_at: Timestamp::PAST,
        });
        index as u32
    }

    fn rebuild_free_times(&mut self, host: u32) {
        let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("callers hold a sub-cluster with GPUs");
        for (position, id) in sub_cluster.gpus.iter().enumerate() {
            self.gpus.get_mut(id).expect("its GPUs are here").position = position;
        }
        sub_cluster.free_times = FreeTimes::new(sub_cluster.gpus.iter().map(|id| self.gpus[id].available_at()));
        self.set_gpu_timer(host);
    }
}

#[cfg(test)]
mod tests;
