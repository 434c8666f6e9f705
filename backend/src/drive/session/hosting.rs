//! Which models a session hosts: they come from the loader when the scheduler asks for them, and go when it says so and
//! the last batch of theirs is finished.

use std::sync::Arc;

use proto::{
    LoadId, ModelId,
    backend_to_scheduler::{BackendToScheduler, LoadOutcome, ModelOffer},
    scheduler_to_frontend::REASON_BYTES_MAX,
};

use super::{Loaded, Session};
use crate::drive::loader::{Done, Job};

impl Session<'_> {
    pub(super) fn handle_load(&mut self, load: LoadId, name: String) {
        let job = Job { session: self.number, load, name, waker: self.endpoint.waker() };
        if !self.loader.post(job) {
            let outcome = LoadOutcome::Failed("too many models wait to be loaded here; try again".into());
            self.report(&BackendToScheduler::Loaded { load, outcome });
        }
    }

    pub(super) fn handle_loaded(&mut self, done: Done) {
        // Asked for by a scheduler that is gone.
        if done.session != self.number {
            return;
        }
        let load = done.load;
        let outcome = match done.result.and_then(|loaded| loaded.map(|loaded| self.check(loaded)).transpose()) {
            Ok(Some(loaded)) => {
                let offer = offer(&loaded);
                self.joined().ready.insert(load, loaded);
                LoadOutcome::Ready(offer)
            }
            Ok(None) => LoadOutcome::NotPlaced,
            Err(mut reason) => {
                tracing::warn!(reason, "a model was not loaded");
                reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
                LoadOutcome::Failed(reason)
            }
        };
        self.report(&BackendToScheduler::Loaded { load, outcome });
    }

    /// Staging memory is laid out when a session begins, and batches under way lie there in the shape that they had.
    fn check(&mut self, loaded: Loaded) -> Result<Arc<Loaded>, String> {
        let (name, version) = (&loaded.model.name, &loaded.model.version);
        if !self.staging.fits(loaded.shape) {
            return Err(format!(
                "a batch of {name} is larger than that of any model this backend started with; restart it"
            ));
        }
        let same = |other: &&Arc<Loaded>| (&other.model.name, &other.model.version) == (name, version);
        if self.joined().models.values().find(same).is_some_and(|other| other.shape != loaded.shape) {
            return Err(format!(
                "version {version} of {name} is served with other tensors or another max_batch_size; unload it first, or \
                 put this in a folder of the next version"
            ));
        }
        Ok(Arc::new(loaded))
    }

    pub(super) fn handle_host(&mut self, load: LoadId, id: ModelId) {
        let joined = self.joined();
        let Some(loaded) = joined.ready.remove(&load) else {
            tracing::warn!(load = load.0, "the scheduler wants a model hosted that was not loaded");
            return;
        };
        for (gpu, worker) in (0..).zip(&mut joined.workers) {
            worker.handle_model(id, loaded.gpu_indexes.contains(&gpu).then_some(loaded.shape));
        }
        tracing::info!(model = loaded.model.name, version = loaded.model.version, "hosted");
        joined.leaving.remove(&id);
        joined.models.insert(id, loaded);
    }

    pub(super) fn handle_discard(&mut self, load: LoadId) {
        self.joined().ready.remove(&load);
    }

    pub(super) fn handle_unload(&mut self, id: ModelId) {
        self.joined().leaving.insert(id);
    }

    /// Lets models go that are not wanted, once their last batch is finished.
    pub(super) fn release_models(&mut self) {
        let Some(joined) = &mut self.joined else { return };
        let is_over = |id: &ModelId| !joined.workers.iter().any(|worker| worker.uses(*id));
        for model in joined.leaving.extract_if(.., is_over).collect::<Vec<_>>() {
            let joined = self.joined();
            joined.workers.iter_mut().for_each(|worker| worker.handle_model(model, None));
            if let Some(gone) = joined.models.remove(&model) {
                tracing::info!(model = gone.model.name, version = gone.model.version, "unloaded");
            }
            self.report(&BackendToScheduler::Unloaded { model });
        }
    }

    /// What the next session starts with.
    pub(super) fn into_models(self) -> Vec<Arc<Loaded>> {
        let Some(joined) = self.joined else { return self.models };
        let stays = joined.models.into_iter().filter(|(id, _)| !joined.leaving.contains(id));
        stays.map(|(_, loaded)| loaded).collect()
    }
}

pub(super) fn offer(loaded: &Loaded) -> ModelOffer {
    ModelOffer {
        name: loaded.model.name.clone(),
        version: loaded.model.version.clone(),
        profile: loaded.profile.clone(),
        input_bytes: u32::try_from(loaded.model.input_bytes()).unwrap_or(u32::MAX),
        gpu_indexes: loaded.gpu_indexes.clone(),
    }
}
