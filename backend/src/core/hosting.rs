//! Which models a backend hosts: they come from the loader when the scheduler asks for them, and go when it says so and
//! the last batch of theirs is finished.

use std::sync::Arc;

use proto::{
    LoadId, ModelId, Timestamp,
    backend_to_scheduler::{BackendToScheduler, LoadOutcome},
    scheduler_to_frontend::REASON_BYTES_MAX,
};

use super::{Core, Joined, Reader};
use crate::{loaded::Loaded, staging::Staging};

/// Models that may be loaded and wait for the scheduler's word.
const READY_MAX: usize = 64;

impl Core {
    /// A load that [`super::Output::Load`] asked for has ended: with a model, or nothing if the configuration places it
    /// on no GPU, or why it cannot be run.
    pub fn handle_loaded(&mut self, now: Timestamp, load: LoadId, result: Result<Option<Loaded>, String>) {
        let Some(joined) = self.joined.as_mut().filter(|_| self.ended.is_none()) else { return };
        let checked = result.and_then(|loaded| {
            let check = |loaded: Loaded| joined.check(&self.config.staging, &loaded).map(|()| loaded);
            loaded.map(check).transpose()
        });
        let outcome = match checked {
            Ok(Some(loaded)) => {
                let offer = loaded.offer();
                joined.ready.insert(load, Arc::new(loaded));
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

    pub(super) fn on_host(&mut self, load: LoadId, id: ModelId) {
        let Some(joined) = &mut self.joined else { return };
        let Some(loaded) = joined.ready.remove(&load) else {
            tracing::warn!(load = load.0, "the scheduler wants a model hosted that was not loaded");
            return;
        };
        // Batches under way lie in staging memory in the shape that they had.
        if joined.models.get(&id).is_some_and(|other| other.shape != loaded.shape) && joined.uses(id) {
            return self.end(format!("model {} is to be replaced by one of another shape while it runs", id.0));
        }
        for (gpu, worker) in (0..).zip(&mut joined.workers) {
            worker.handle_model(id, loaded.gpu_indexes.contains(&gpu).then_some(loaded.shape));
        }
        tracing::info!(model = loaded.model.name, version = loaded.model.version, "hosted");
        joined.leaving.remove(&id);
        joined.models.insert(id, loaded);
    }

    /// Lets models go that are not wanted, once their last batch is finished.
    pub(super) fn release_models(&mut self) {
        let Some(joined) = self.joined.as_mut().filter(|joined| !joined.leaving.is_empty()) else { return };
        let workers = &joined.workers;
        let is_over = |id: &ModelId| !workers.iter().any(|worker| worker.uses(*id));
        let over: Vec<ModelId> = joined.leaving.extract_if(.., is_over).collect();
        for &model in &over {
            joined.workers.iter_mut().for_each(|worker| worker.handle_model(model, None));
            if let Some(gone) = joined.models.remove(&model) {
                tracing::info!(model = gone.model.name, version = gone.model.version, "unloaded");
            }
        }
        for model in over {
            self.report(Reader::Scheduler, &BackendToScheduler::Unloaded { model });
        }
    }

    /// What a next life starts with.
    #[must_use]
    pub fn into_models(self) -> Vec<Arc<Loaded>> {
        let Some(joined) = self.joined else { return self.models };
        let stays = joined.models.into_iter().filter(|(id, _)| !joined.leaving.contains(id));
        stays.map(|(_, loaded)| loaded).collect()
    }
}

impl Joined {
    fn uses(&self, model: ModelId) -> bool {
        self.workers.iter().any(|worker| worker.uses(model))
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
