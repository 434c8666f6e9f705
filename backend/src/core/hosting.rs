//! Which models a backend hosts: they come from the loader when the primary asks for them, and go when it says so and
//! the last batch of theirs is finished.
//!
//! Schedulers name models each in its own way, so models and loads have names of our own here, which outlive a primary.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proto::{
    LoadId, ModelId, Timestamp,
    backend_to_scheduler::{BackendToScheduler, LoadOutcome, ModelOffer},
    scheduler_to_frontend::REASON_BYTES_MAX,
};

use super::{Core, HANDOVER, Output, Reader};
use crate::{loaded::Loaded, staging::Staging, worker::Worker};

/// Models that may be loaded and wait for the primary's word.
const READY_MAX: usize = 64;

/// The GPUs, and what they can run.
pub(super) struct Hosting {
    /// One for each GPU.
    pub(super) workers: Vec<Worker>,
    /// What is hosted, by our names.
    pub(super) models: BTreeMap<ModelId, Arc<Loaded>>,
    /// What the primary calls the loads that are under way, by our names.
    loading: BTreeMap<LoadId, LoadId>,
    /// What is loaded, and waits for the primary's word, by its names.
    ready: BTreeMap<LoadId, Arc<Loaded>>,
    /// Hosted models that go when their last batch is finished.
    leaving: BTreeSet<ModelId>,
    next_model: u32,
    next_load: u64,
}

impl Core {
    /// The primary wants a model loaded.
    pub(super) fn on_load(&mut self, asked: LoadId, name: String) {
        let load = LoadId(self.hosting.next_load);
        self.hosting.next_load += 1;
        self.hosting.loading.insert(load, asked);
        self.outputs.push_back(Output::Load { load, name });
    }

    /// A load that [`super::Output::Load`] asked for has ended: with a model, or nothing if the configuration places it
    /// on no GPU, or why it cannot be run.
    pub fn handle_loaded(&mut self, now: Timestamp, load: LoadId, result: Result<Option<Loaded>, String>) {
        // What a former primary wanted is not wanted any more.
        let Some(load) = self.hosting.loading.remove(&load).filter(|_| self.ended.is_none()) else { return };
        let checked = result.and_then(|loaded| {
            let check = |loaded: Loaded| {
                self.hosting.check(&self.config.staging, &loaded)?;
                self.memories.check(&loaded)?;
                Ok(loaded)
            };
            loaded.map(check).transpose()
        });
        let outcome = match checked {
            Ok(Some(loaded)) => {
                let offer = loaded.offer();
                self.hosting.ready.insert(load, Arc::new(loaded));
                LoadOutcome::Ready(offer)
            }
            Ok(None) => LoadOutcome::NotPlaced,
            Err(mut reason) => {
                tracing::warn!(reason, "a model was not loaded");
                reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
                LoadOutcome::Failed(reason)
            }
        };
        self.report(Reader::Scheduler, &BackendToScheduler::Loaded { load, outcome });
        self.settle(now);
    }

    /// The primary, which is `session`, wants what was loaded hosted under its name `theirs`.
    pub(super) fn on_host(&mut self, now: Timestamp, session: usize, load: LoadId, theirs: ModelId) {
        let hosting = &mut self.hosting;
        let Some(loaded) = hosting.ready.remove(&load) else {
            tracing::warn!(load = load.0, "the scheduler wants a model hosted that was not loaded");
            return;
        };
        let models = &mut self.sessions[session].models;
        let id = models.get(&theirs).copied().unwrap_or_else(|| hosting.new_id());
        // Batches under way lie in staging memory in the shape that they had.
        if hosting.models.get(&id).is_some_and(|other| other.shape != loaded.shape) && hosting.uses(id) {
            let reason = format!("model {} is to be replaced by one of another shape while it runs", theirs.0);
            return self.lose(now, session, reason);
        }
        for (gpu, worker) in (0..).zip(&mut hosting.workers) {
            worker.handle_model(id, loaded.gpu_indexes.contains(&gpu).then_some(loaded.shape));
        }
        tracing::info!(model = loaded.model.name, version = loaded.model.version, "hosted");
        models.insert(theirs, id);
        hosting.leaving.remove(&id);
        hosting.models.insert(id, Arc::clone(&loaded));
        let scheduler_now = self.scheduler_now(now);
        self.memories.handle_model(scheduler_now, id, Some(&loaded));
        self.rejoin_standbys(now);
    }

    /// The primary does not want what was loaded.
    pub(super) fn on_discard(&mut self, load: LoadId) {
        self.hosting.ready.remove(&load);
    }

    /// The primary, which is `session`, wants a model to go.
    pub(super) fn on_unload(&mut self, now: Timestamp, session: usize, theirs: ModelId) {
        let Some(&id) = self.sessions[session].models.get(&theirs) else {
            return self.report(Reader::Scheduler, &BackendToScheduler::Unloaded { model: theirs });
        };
        if self.hosting.leaving.insert(id) {
            self.rejoin_standbys(now);
        }
    }

    /// Lets models go that are not wanted, once their last batch is finished.
    pub(super) fn release_models(&mut self, now: Timestamp) {
        for model in self.hosting.release() {
            let scheduler_now = self.scheduler_now(now);
            self.memories.handle_model(scheduler_now, model, None);
            if let Some(primary) = self.primary()
                && let Some((&theirs, _)) = self.sessions[primary].models.iter().find(|(_, ours)| **ours == model)
            {
                self.report(Reader::Scheduler, &BackendToScheduler::Unloaded { model: theirs });
            }
            self.sessions.iter_mut().for_each(|session| session.models.retain(|_, ours| *ours != model));
        }
    }

    /// What a next life starts with.
    #[must_use]
    pub fn into_models(self) -> Vec<Arc<Loaded>> {
        let leaving = self.hosting.leaving;
        let stays = self.hosting.models.into_iter().filter(|(id, _)| !leaving.contains(id));
        stays.map(|(_, loaded)| loaded).collect()
    }
}

impl Hosting {
    /// So many GPUs, which host these models from the start.
    pub(super) fn new(gpus: usize, loaded: Vec<Arc<Loaded>>) -> Self {
        let next_model = loaded.len() as u32;
        let models: BTreeMap<ModelId, Arc<Loaded>> = (0..).map(ModelId).zip(loaded).collect();
        let hosted = |gpu: u32| {
            let hosted = models.iter().filter(|(_, loaded)| loaded.gpu_indexes.contains(&gpu));
            hosted.map(|(&id, loaded)| (id, loaded.shape)).collect()
        };
        let workers = (0..gpus).map(|gpu| Worker::new(gpu, hosted(gpu as u32), HANDOVER)).collect();
        Self {
            workers,
            models,
            loading: BTreeMap::new(),
            ready: BTreeMap::new(),
            leaving: BTreeSet::new(),
            next_model,
            next_load: 0,
        }
    }

    /// What schedulers are told of the models that stay, and our names of these.
    pub(super) fn offers(&self) -> (Vec<ModelId>, Vec<ModelOffer>) {
        let stays = self.models.iter().filter(|(id, _)| !self.leaving.contains(id));
        stays.map(|(&id, loaded)| (id, loaded.offer())).unzip()
    }

    /// What a former primary wanted loaded and has not used is not needed any more.
    pub(super) fn forget_loads(&mut self) {
        self.loading.clear();
        self.ready.clear();
    }

    fn new_id(&mut self) -> ModelId {
        self.next_model += 1;
        ModelId(self.next_model - 1)
    }

    fn uses(&self, model: ModelId) -> bool {
        self.workers.iter().any(|worker| worker.uses(model))
    }

    /// Forgets models that leave and have no batch any more. Yields them.
    fn release(&mut self) -> Vec<ModelId> {
        if self.leaving.is_empty() {
            return Vec::new();
        }
        let workers = &self.workers;
        let is_over = |id: &ModelId| !workers.iter().any(|worker| worker.uses(*id));
        let over: Vec<ModelId> = self.leaving.extract_if(.., is_over).collect();
        for &model in &over {
            self.workers.iter_mut().for_each(|worker| worker.handle_model(model, None));
            if let Some(gone) = self.models.remove(&model) {
                tracing::info!(model = gone.model.name, version = gone.model.version, "unloaded");
            }
        }
        over
    }

    /// Staging memory is laid out when a life begins, and batches under way lie there in the shape that they had.
    fn check(&self, staging: &Staging, loaded: &Loaded) -> Result<(), String> {
        let (name, version) = (&loaded.model.name, &loaded.model.version);
        if !staging.fits(loaded.shape) {
            return Err(format!(
                "a batch of {name} is larger than that of any model this backend started with; restart it"
            ));
        }
        let other = self.models.values().find(|other| other.is_same_version(loaded));
        if other.is_some_and(|other| other.shape != loaded.shape) {
            return Err(format!(
                "version {version} of {name} is served with other tensors or another max_batch_size; unload it first, \
                 or put this in a folder of the next version"
            ));
        }
        if self.ready.len() >= READY_MAX {
            return Err(format!("{READY_MAX} loaded models wait for the scheduler's word already"));
        }
        Ok(())
    }
}
