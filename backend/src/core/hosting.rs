//! Which models a backend hosts: they come from the loader when the primary asks for them, and go when it says so and
//! the last batch of theirs is finished.
//!
//! Schedulers name models each in its own way, so models and loads have names of our own here, which outlive a primary.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    sync::Arc,
};

use proto::{
    Brought, FrontendId, LoadId, ModelId, Timestamp,
    backend_to_scheduler::{BackendToControl, LoadOutcome, ModelOffer},
    scheduler_to_frontend::REASON_BYTES_MAX,
};

use transport::Notes;

use super::{Core, HANDOVER, Output, unmeasured::Unmeasured};
use crate::{executor::Loaded, staging::Staging, worker::Worker};

/// Models that may be loaded and wait for the primary's word.
const READY_MAX: usize = 64;
/// Frontends whose broken transfers have lines of their own in the log.
const FRONTENDS_TOLD_MAX: usize = 64;

/// The GPUs, and what they can run.
pub(super) struct Hosting {
    /// One for each GPU.
    pub(super) workers: Vec<Worker>,
    /// What is hosted, by our names.
    pub(super) models: BTreeMap<ModelId, Arc<Loaded>>,
    /// What the primary calls the loads that are under way, by our names.
    loading: BTreeMap<LoadId, LoadId>,
    /// What is loaded, and waits for the primary's word, by its names and by version.
    ready: BTreeMap<LoadId, BTreeMap<String, Arc<Loaded>>>,
    /// Hosted models that go when their last batch is finished.
    leaving: BTreeSet<ModelId>,
    pub(super) unmeasured: Unmeasured,
    next_model: u32,
    next_load: u64,
}

/// What becomes of models while others are served: clients may have them loaded and unloaded as often as they like.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) not_loaded: Notes,
    hosted: Notes,
    unloaded: Notes,
    pub(super) transfers: ByFrontend,
}

/// Notes of frontends, each of which has a line of its own: one that breaks its transfers hides no other.
#[derive(Debug, Default)]
pub(super) struct ByFrontend(BTreeMap<FrontendId, Notes>);

impl ByFrontend {
    /// One more. Frontends beyond [`FRONTENDS_TOLD_MAX`] share a line.
    pub(super) fn note(&mut self, frontend: FrontendId, text: impl Display) {
        let is_known = self.0.len() < FRONTENDS_TOLD_MAX || self.0.contains_key(&frontend);
        let of = if is_known { frontend } else { FrontendId(u32::MAX) };
        self.0.entry(of).or_default().note(text);
    }

    /// It has left.
    pub(super) fn forget(&mut self, frontend: FrontendId) {
        self.0.remove(&frontend);
    }

    fn poll_line(&mut self, now: Timestamp) -> Option<(FrontendId, u64, String)> {
        self.0.iter_mut().find_map(|(&frontend, notes)| {
            let (count, last) = notes.poll_line(now)?;
            Some((frontend, count, last))
        })
    }
}

impl Told {
    /// Logs what is due.
    pub(super) fn settle(&mut self, now: Timestamp) {
        if let Some((count, last)) = self.not_loaded.poll_line(now) {
            tracing::warn!(count, "models were not loaded; the last one: {last}");
        }
        if let Some((count, last)) = self.hosted.poll_line(now) {
            tracing::info!(count, "hosted; the last one: {last}");
        }
        if let Some((count, last)) = self.unloaded.poll_line(now) {
            tracing::info!(count, "unloaded; the last one: {last}");
        }
        while let Some((frontend, count, last)) = self.transfers.poll_line(now) {
            tracing::warn!(frontend = frontend.0, count, "transfers could not be made; the last one: {last}");
        }
    }
}

impl Core {
    /// The primary wants a model loaded.
    pub(super) fn on_load(&mut self, asked: LoadId, name: String, brought: Option<Brought>, is_placed: bool) {
        let load = LoadId(self.hosting.next_load);
        self.hosting.next_load += 1;
        self.hosting.loading.insert(load, asked);
        self.outputs.push_back(Output::Load { load, name, brought, is_placed });
    }

    /// A load that [`super::Output::Load`] asked for has found an ensemble.
    pub fn handle_ensemble(&mut self, now: Timestamp, load: LoadId) {
        let Some(load) = self.take_loading(load) else { return };
        self.report(&BackendToControl::Loaded { load, outcome: LoadOutcome::Ensemble });
        self.settle(now);
    }

    /// What the primary calls a load that has ended; what a former one wanted is not wanted any more.
    fn take_loading(&mut self, load: LoadId) -> Option<LoadId> {
        self.hosting.loading.remove(&load).filter(|_| self.ended.is_none())
    }

    /// A load that [`super::Output::Load`] asked for has ended: with the versions of a model, or none if the
    /// configuration places it on no GPU, or why it cannot be run.
    pub fn handle_loaded(&mut self, now: Timestamp, load: LoadId, result: Result<Vec<Loaded>, String>) {
        let Some(load) = self.take_loading(load) else { return };
        let checked = result.and_then(|mut versions| {
            for loaded in &mut versions {
                self.hosting.fit(&self.config.staging, loaded)?;
                self.memories.check(loaded)?;
            }
            Ok(versions)
        });
        let outcomes = match checked {
            Ok(versions) if versions.is_empty() => vec![LoadOutcome::NotPlaced],
            Ok(versions) => {
                self.not_loaded.retain(|refused| versions.iter().all(|loaded| loaded.model.name != refused.name));
                let left = (0..versions.len()).rev();
                let ready =
                    |(loaded, left): (&Loaded, usize)| LoadOutcome::Ready { offer: loaded.offer(), is_last: left == 0 };
                let outcomes = versions.iter().zip(left).map(ready).collect();
                let by_version = versions.into_iter().map(|loaded| (loaded.model.version.clone(), Arc::new(loaded)));
                self.hosting.ready.insert(load, by_version.collect());
                outcomes
            }
            Err(mut reason) => {
                reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
                self.told.not_loaded.note(&reason);
                vec![LoadOutcome::Failed(reason)]
            }
        };
        for outcome in outcomes {
            self.report(&BackendToControl::Loaded { load, outcome });
        }
        self.settle(now);
    }

    /// The primary, which is `session`, wants a version that was loaded hosted under its name `theirs`.
    pub(super) fn on_host(&mut self, now: Timestamp, session: usize, (load, version): (LoadId, &str), theirs: ModelId) {
        let hosting = &mut self.hosting;
        let Some(loaded) = hosting.take_ready(load, version) else {
            tracing::warn!(load = load.0, "the scheduler wants a model hosted that was not loaded");
            return;
        };
        let models = &mut self.membership[session].word.models;
        let known = models.get(&theirs).copied();
        // Batches under way lie in staging memory in the shape that they had: they keep the model that they are of. So
        // do weights that were copied to a GPU.
        let differs = |former: &Arc<Loaded>| former.shape != loaded.shape || former.executor.on_gpus().is_some();
        let former = known.filter(|id| hosting.models.get(id).is_some_and(differs));
        hosting.leaving.extend(former);
        let id = known.filter(|_| former.is_none()).unwrap_or_else(|| hosting.new_id());
        for (gpu, worker) in (0..).zip(&mut hosting.workers) {
            let is_here = loaded.gpu_indexes.contains(&gpu);
            worker.handle_model(id, is_here.then(|| (loaded.shape, loaded.profile.clone())));
        }
        self.told.hosted.note(format_args!("{} version {}", loaded.model.name, loaded.model.version));
        models.insert(theirs, id);
        hosting.leaving.remove(&id);
        hosting.unmeasured.handle_gone(id);
        hosting.unmeasured.handle_hosted(id, &loaded);
        hosting.models.insert(id, Arc::clone(&loaded));
        let scheduler_now = self.scheduler_now(now);
        self.memories.handle_model(scheduler_now, id, Some(&loaded));
        self.membership.rejoin_standbys();
    }

    /// The primary does not want what was loaded.
    pub(super) fn on_discard(&mut self, load: LoadId) {
        self.hosting.ready.remove(&load);
    }

    /// The primary, which is `session`, wants a model to go.
    pub(super) fn on_unload(&mut self, session: usize, theirs: ModelId) {
        let Some(&id) = self.membership[session].word.models.get(&theirs) else {
            return self.report(&BackendToControl::Unloaded { model: theirs });
        };
        if self.hosting.leaving.insert(id) {
            self.membership.rejoin_standbys();
        }
    }

    /// Lets models go that are not wanted, once their last batch is finished.
    pub(super) fn release_models(&mut self, now: Timestamp) {
        for (model, gone) in self.hosting.release() {
            self.hosting.unmeasured.handle_gone(model);
            if let Some(gone) = gone {
                self.told.unloaded.note(format_args!("{} version {}", gone.model.name, gone.model.version));
            }
            let scheduler_now = self.scheduler_now(now);
            self.memories.handle_model(scheduler_now, model, None);
            if let Some(primary) = self.primary()
                && let Some((&theirs, _)) =
                    self.membership[primary].word.models.iter().find(|(_, ours)| **ours == model)
            {
                self.report(&BackendToControl::Unloaded { model: theirs });
            }
            self.membership.iter_mut().for_each(|session| session.word.models.retain(|_, ours| *ours != model));
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
            hosted.map(|(&id, loaded)| (id, (loaded.shape, loaded.profile.clone()))).collect()
        };
        let mut unmeasured = Unmeasured::default();
        models.iter().for_each(|(&id, loaded)| unmeasured.handle_hosted(id, loaded));
        let workers = (0..gpus).map(|gpu| Worker::new(gpu, hosted(gpu as u32), HANDOVER)).collect();
        Self {
            workers,
            models,
            loading: BTreeMap::new(),
            ready: BTreeMap::new(),
            leaving: BTreeSet::new(),
            unmeasured,
            next_model,
            next_load: 0,
        }
    }

    /// What schedulers are told of the models that stay, by our names.
    pub(super) fn offers(&self) -> impl Iterator<Item = (ModelId, ModelOffer)> {
        let stays = self.models.iter().filter(|(id, _)| !self.leaving.contains(id));
        stays.map(|(&id, loaded)| (id, loaded.offer()))
    }

    /// What a former primary wanted loaded and has not used is not needed any more.
    pub(super) fn forget_loads(&mut self) {
        self.loading.clear();
        self.ready.clear();
    }

    fn take_ready(&mut self, load: LoadId, version: &str) -> Option<Arc<Loaded>> {
        let versions = self.ready.get_mut(&load)?;
        let loaded = versions.remove(version);
        if versions.is_empty() {
            self.ready.remove(&load);
        }
        loaded
    }

    /// Whether a GPU hosts no more than one model.
    pub(super) fn is_alone(&self, gpu: usize) -> bool {
        self.models.values().filter(|loaded| loaded.gpu_indexes.contains(&(gpu as u32))).count() <= 1
    }

    fn new_id(&mut self) -> ModelId {
        self.next_model += 1;
        ModelId(self.next_model - 1)
    }

    /// Forgets models that leave and have no batch any more. Yields them.
    fn release(&mut self) -> Vec<(ModelId, Option<Arc<Loaded>>)> {
        if self.leaving.is_empty() {
            return Vec::new();
        }
        let workers = &self.workers;
        let is_over = |id: &ModelId| !workers.iter().any(|worker| worker.uses(*id));
        let over: Vec<ModelId> = self.leaving.extract_if(.., is_over).collect();
        for &model in &over {
            self.workers.iter_mut().for_each(|worker| worker.handle_model(model, None));
        }
        over.into_iter().map(|model| (model, self.models.remove(&model))).collect()
    }

    /// Staging memory is laid out when a life begins: what comes later has no larger batches than there is room for.
    fn fit(&self, staging: &Staging, loaded: &mut Loaded) -> Result<(), String> {
        let Loaded { model, shape, profile, .. } = loaded;
        let (name, fitting) = (&model.name, staging.fitting(*shape));
        if fitting == 0 {
            let (inputs, answers) = staging.room();
            return Err(format!(
                "a task of {name} has inputs of {} and answers of {} bytes, and a batch has room for {inputs} and \
                 {answers}: raise staging_bytes and restart the backend, or lower max_bytes if requests choose sizes",
                shape.input_bytes,
                shape.answer_stride()
            ));
        }
        if fitting < shape.batch_max {
            let wanted = shape.batch_max;
            tracing::info!(model = name, batch_max = fitting, wanted, "room for smaller batches only (staging_bytes)");
            (shape.batch_max, *profile) = (fitting, profile.up_to(fitting));
        }
        if self.ready.len() >= READY_MAX {
            return Err(format!("{READY_MAX} loaded models wait for the scheduler's word already"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frontend_that_breaks_its_transfers_has_one_line_a_second_and_hides_no_other() {
        let (mut told, now) = (ByFrontend::default(), Timestamp(0));
        for number in 0..10_000 {
            told.note(FrontendId(7), number);
        }
        told.note(FrontendId(8), "once");
        let lines: Vec<_> = std::iter::from_fn(|| told.poll_line(now)).collect();
        let expected = [(FrontendId(7), 10_000, "9999".to_owned()), (FrontendId(8), 1, "once".to_owned())];
        assert_eq!(lines, expected);
        told.note(FrontendId(7), "again");
        assert_eq!(told.poll_line(now), None, "its line of this second is out");
        (0..1_000).for_each(|other| told.note(FrontendId(100 + other), "many"));
        assert_eq!(told.0.len(), FRONTENDS_TOLD_MAX + 1);
        told.forget(FrontendId(7));
        assert_eq!(told.0.len(), FRONTENDS_TOLD_MAX);
    }
}
