//! Models of which only l(1) was measured before they were served: the rest follows one model after another, in
//! between what GPUs serve, and every scheduler is told.

use std::sync::{Arc, Weak};

use proto::{BatchCost, LatencyProfile, ModelId, Timestamp, backend_to_scheduler::BackendToControl};

use super::{Core, Hosting, Output};
use crate::executor::{Basis, Loaded};

impl Core {
    /// What is hosted under one of our names.
    #[must_use]
    pub fn hosted(&self, model: ModelId) -> Option<&Arc<Loaded>> {
        self.hosting.models.get(&model)
    }

    /// A model was measured, as [`Output::Measure`] asked for; `None` if nothing more could be learned of it. What has
    /// taken its name since is not what was measured.
    pub fn handle_measured(
        &mut self,
        now: Timestamp,
        (model, of): (ModelId, &Weak<Loaded>),
        measured: Option<(LatencyProfile, Option<BatchCost>)>,
    ) {
        let Hosting { models, unmeasured, .. } = &mut self.hosting;
        let is_it = models.get(&model).is_none_or(|loaded| Arc::as_ptr(loaded) == of.as_ptr());
        let is_awaited = is_it && unmeasured.handle_ended(model);
        let Some((profile, cost)) = measured.filter(|_| is_awaited && self.ended.is_none()) else {
            return self.settle(now);
        };
        let Hosting { models, workers, .. } = &mut self.hosting;
        let Some(former) = models.get(&model) else { return };
        let is_news = profile != former.profile || cost != former.cost;
        let loaded = Loaded { profile, cost, basis: Basis::Sizes, ..Loaded::clone(former) };
        for (gpu, worker) in (0..).zip(workers) {
            if loaded.gpu_indexes.contains(&gpu) {
                worker.handle_model(model, Some((loaded.shape, loaded.profile.clone())));
            }
        }
        models.insert(model, Arc::new(loaded));
        let told = self.membership.iter_mut().filter(|_| is_news);
        told.for_each(|session| session.word.handle_measured(model));
        self.settle(now);
    }

    /// Schedulers hear of what was measured, and the next model's turn has come.
    pub(super) fn settle_measured(&mut self) {
        for index in 0..self.config.schedulers.len() {
            while let Some((theirs, ours)) = self.membership[index].word.poll_measured() {
                let Some(loaded) = self.hosting.models.get(&ours) else { continue };
                let (profile, cost) = (loaded.profile.clone(), loaded.cost);
                self.tell(index, &BackendToControl::Measured { model: theirs, profile, cost });
            }
        }
        if self.primary().is_some()
            && self.leaving.is_none()
            && let Some(model) = self.hosting.unmeasured.begin_next()
        {
            let loaded = self.hosting.models.get(&model).map(Arc::downgrade).unwrap_or_default();
            self.outputs.push_back(Output::Measure { model, loaded });
        }
    }
}
