//! GPUs whose memory holds a part of what they host. What is in it planners are told once, when such a GPU joins them,
//! and decide from then on. So it joins in two steps: its backend is asked by the name under which it is about to be
//! planned with, and from its answer on only orders by that name count. Whatever was ordered before, by an earlier
//! primary or before the GPU left the planners, is over by then.

use std::collections::BTreeSet;

use proto::{
    BackendId, GpuId, ModelId, Timestamp,
    backend_to_scheduler::{BackendHello, RESIDENT_MAX, ResidentModel},
    scheduler_to_backend::SchedulerToBackend,
};

use super::{
    Control, ControlOutput, JoinError, Violation,
    members::{Memory, Resident},
};
use crate::{
    news::{ControlToRank, ControlToShard},
    task::GpuMemory,
};

impl Control {
    /// Whether the policy can use a backend's memory.
    pub(super) fn check_memory(&self, hello: &BackendHello) -> Result<(), JoinError> {
        let policy = self.config.policy;
        if hello.memory_pages.is_none() || policy.loads_weights() {
            return Ok(());
        }
        Err(JoinError::BadOffer(format!(
            "gpu_memory_mb: found memory that holds a part of all models, expected none of this key with the \
             scheduler's policy {policy}, which loads no weights"
        )))
    }

    /// Asks what is in the memory of GPUs that are about to join planners.
    pub(super) fn ask_resident(&mut self) {
        for gpu in self.members.gpus_to_ask() {
            let entry = &self.members.gpus[&gpu];
            let message = SchedulerToBackend::AskResident { gpu_index: entry.index, gpu };
            self.outputs.push_back(ControlOutput::ToBackend(entry.backend, message));
        }
    }

    /// A backend says what is in a GPU's memory.
    pub(super) fn on_resident(
        &mut self,
        now: Timestamp,
        (backend, gpu): (BackendId, GpuId),
        models: Vec<ResidentModel>,
        is_last: bool,
    ) -> Result<(), Violation> {
        // It may have got another name since.
        let entry = self.members.gpus.get_mut(&gpu).filter(|entry| entry.backend == backend);
        let Some(Memory { resident, pages, .. }) = entry.and_then(|entry| entry.memory.as_mut()) else { return Ok(()) };
        let Resident::Asked(known) = resident else { return Ok(()) };
        if models.len() > RESIDENT_MAX || known.len() + models.len() > *pages as usize {
            return Err(Violation(format!("it has more models in the {pages} pages of {gpu:?} than fit")));
        }
        known.extend(models);
        if is_last {
            *resident = Resident::Known(std::mem::take(known));
            self.refresh(now);
            self.settle_heirs(now);
        }
        Ok(())
    }

    /// What a GPU that joins planners has in memory. What it does not host any more, or what does not fit by our
    /// count, has to go.
    pub(super) fn take_resident(&mut self, gpu: GpuId) -> Option<GpuMemory> {
        let entry = self.members.gpus.get_mut(&gpu)?;
        let Memory { pages, resident: Resident::Known(known), .. } = entry.memory.as_mut()? else { return None };
        let (pages, mut known) = (*pages, std::mem::take(known));
        // What stays comes first.
        known.sort_unstable_by_key(|known| (!known.is_pinned, known.model));
        let (mut left, mut joins) = (pages, GpuMemory::empty(pages));
        let mut seen = BTreeSet::new();
        for ResidentModel { model, is_pinned } in known.into_iter().filter(|known| seen.insert(known.model)) {
            let takes = self.members.models.get(model.0 as usize).map(|model| model.weights.pages);
            match takes.filter(|&takes| takes <= left && entry.models.binary_search(&model).is_ok()) {
                Some(takes) => {
                    left -= takes;
                    joins.resident.push(model);
                    joins.pinned.extend(is_pinned.then_some(model));
                }
                None => {
                    let message = SchedulerToBackend::UnloadWeights { gpu, model };
                    self.outputs.push_back(ControlOutput::ToBackend(entry.backend, message));
                }
            }
        }
        let entry = &self.members.gpus[&gpu];
        let on_disk = self.members.backends.get(&entry.backend).into_iter().flat_map(|backend| &backend.on_disk);
        joins.on_disk = on_disk.copied().filter(|model| entry.models.binary_search(model).is_ok()).collect();
        Some(joins)
    }

    /// A backend says what has come into its host memory, or is on disk only.
    pub(super) fn on_host_memory(
        &mut self,
        backend: BackendId,
        models: Vec<ModelId>,
        is_there: bool,
    ) -> Result<(), Violation> {
        if models.len() > RESIDENT_MAX {
            return Err(Violation(format!("it names {} models of its host memory at once", models.len())));
        }
        let gpus = self.members.set_host_memory(backend, &models, is_there);
        if !gpus.is_empty() {
            let (gpus_too, models_too) = (gpus.clone(), models.clone());
            self.outputs.push_back(ControlOutput::ToRank(ControlToRank::HostMemory { gpus, models, is_there }));
            let news = || ControlToShard::HostMemory { gpus: gpus_too.clone(), models: models_too.clone(), is_there };
            self.tell_shards(news);
        }
        Ok(())
    }

    /// A batch came whose weights were not there: the GPU leaves planners, and joins them with what is.
    pub(super) fn on_weights_missing(&mut self, now: Timestamp, backend: BackendId, gpu: GpuId) {
        let entry = self.members.gpus.get_mut(&gpu).filter(|entry| entry.backend == backend && entry.planned.is_some());
        if let Some(memory) = entry.and_then(|entry| entry.memory.as_mut()) {
            tracing::warn!(gpu = gpu.0, backend = backend.0, "planners take weights for resident that are not");
            memory.is_disputed = true;
            self.refresh(now);
        }
    }
}
