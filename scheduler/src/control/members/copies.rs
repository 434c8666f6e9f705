//! Copies of models that others host, and who could have one.

use std::collections::BTreeSet;

use proto::{BackendId, GpuId, ModelId, backend_to_scheduler::ModelOffer, hello::Member};

use super::{Backend, Gpu, Joined, Members, Offer};
use crate::advice::Advisor;

/// A backend that hosts a model.
#[derive(Debug)]
pub(in super::super) struct Host {
    pub(in super::super) backend: BackendId,
    /// What it hosts is ours to choose.
    pub(in super::super) is_auto: bool,
    /// Planners have one of the versions there that it hosts.
    pub(in super::super) is_planned: bool,
    /// They have all of these.
    pub(in super::super) is_planned_whole: bool,
}

impl Members {
    /// A backend hosts a copy that it has loaded of a model. Versions that `retires` names do not count.
    ///
    /// # Errors
    /// If it has not loaded the versions that are hosted.
    pub(in super::super) fn host_copy(
        &mut self,
        (backend, name): (BackendId, &str),
        offers: &[ModelOffer],
        retires: impl Fn(BackendId, ModelId) -> bool,
    ) -> Result<Joined, String> {
        if !self.has_room(offers) {
            return Err("there are too many models".to_owned());
        }
        let hosted = self.versions_hosted(name, retires);
        let loaded: BTreeSet<&str> = offers.iter().map(|offer| offer.version.as_str()).collect();
        if !hosted.is_empty() && hosted != loaded {
            let expected = hosted.into_iter().collect::<Vec<_>>().join(", ");
            let found = loaded.into_iter().collect::<Vec<_>>().join(", ");
            return Err(format!("its repository has versions {found}, expected {expected}, which are served"));
        }
        let (mut models, mut reprofiled) = (Vec::new(), BTreeSet::new());
        for offer in offers {
            let (model, changed) = self.merge_offer(offer);
            let profile = self.shared(model, &offer.profile);
            let Some(entry) = self.backends.get_mut(&backend) else { return Err("it has left".to_owned()) };
            reprofiled.extend(changed.then_some(model));
            models.push(model);
            entry.offers.insert(model, Offer::new(profile, offer));
            for &index in &offer.gpu_indexes {
                self.gpus.get_mut(&entry.gpus[index as usize]).expect("GPUs leave with their backend").insert(model);
            }
        }
        Ok(Joined { backend, models, reprofiled })
    }

    fn versions_hosted(&self, name: &str, retires: impl Fn(BackendId, ModelId) -> bool) -> BTreeSet<&str> {
        let versions = self.versions.get(name).into_iter().flatten().copied();
        let is_hosted = |model: &ModelId| {
            let hosts = |gpu: &Gpu| gpu.models.binary_search(model).is_ok() && !retires(gpu.backend, *model);
            self.gpus.values().any(hosts)
        };
        versions.filter(is_hosted).map(|model| self.models[model.0 as usize].version.as_str()).collect()
    }

    /// Whether a backend is here to stay: it is used, obeys, and nobody wants it to end or drained.
    pub(in super::super) fn stays(&self, backend: BackendId) -> bool {
        let stays = |entry: &Backend| entry.obeys && !entry.leaves && !entry.evacuates;
        self.reach.backends.contains(&backend) && self.backends.get(&backend).is_some_and(stays)
    }

    /// Backends that stay and have a GPU that works, each with how many such GPUs.
    pub(in super::super) fn staying(&self) -> impl Iterator<Item = (BackendId, usize)> {
        let staying = self.backends.iter().filter(|(id, _)| self.stays(**id));
        let works = |gpu: &&GpuId| self.gpus[gpu].is_usable;
        let counted = staying.map(move |(&id, entry)| (id, entry.gpus.iter().filter(works).count()));
        counted.filter(|(_, gpus)| *gpus > 0)
    }

    /// Whether a backend hosts a model, in whatever version.
    pub(in super::super) fn hosts(&self, backend: BackendId, name: &str) -> bool {
        self.versions_on(backend, name).next().is_some()
    }

    /// The names of the models that a backend hosts; ascending.
    pub(in super::super) fn names_at(&self, backend: BackendId) -> BTreeSet<&str> {
        let Some(entry) = self.backends.get(&backend) else { return BTreeSet::new() };
        entry.offers.keys().map(|model| self.models[model.0 as usize].name.as_str()).collect()
    }

    /// Requests a second for a model, in all its versions, as far as that is known.
    pub(in super::super) fn rate_of(&self, name: &str, advisor: &Advisor) -> f64 {
        self.versions.get(name).into_iter().flatten().map(|&model| advisor.rate(model)).sum()
    }

    /// What comes to each GPU of a backend of that.
    pub(in super::super) fn gpu_rate(&self, backend: BackendId, advisor: &Advisor) -> f64 {
        let hosted = self.backends.get(&backend).into_iter().flat_map(|entry| entry.offers.keys());
        hosted.map(|&model| advisor.rate(model) / f64::from(self.models[model.0 as usize].hosts.max(1))).sum()
    }

    /// The models that a backend hosts and planners have nowhere else, on a GPU that works; ascending.
    pub(in super::super) fn planned_only_at(&self, backend: BackendId) -> Vec<ModelId> {
        let Some(entry) = self.backends.get(&backend) else { return Vec::new() };
        let hosted: BTreeSet<ModelId> = entry.offers.keys().copied().collect();
        let elsewhere = self.planned_beside(|other| other == backend);
        hosted.difference(&elsewhere).copied().collect()
    }

    /// What planners have on GPUs that work, leaving out some backends.
    fn planned_beside(&self, is_left_out: impl Fn(BackendId) -> bool) -> BTreeSet<ModelId> {
        let others = self.gpus.values().filter(|gpu| gpu.is_usable && !is_left_out(gpu.backend));
        let others = others.filter(|gpu| self.reach.backends.contains(&gpu.backend));
        others.filter_map(|gpu| gpu.planned.as_ref()).flat_map(|models| models.iter().copied()).collect()
    }

    /// Guests that are needed no more: backends that stay have the same model of their own accord.
    pub(in super::super) fn guests_to_go(&self) -> BTreeSet<(BackendId, ModelId)> {
        let mut guests = self.offered(|entry, offer| entry.obeys && offer.is_guest);
        if guests.is_empty() {
            return guests;
        }
        let name = |model: ModelId| self.models[model.0 as usize].name.as_str();
        let mut at_home = self.offered(|_, offer| !offer.is_guest);
        at_home.retain(|&(backend, model)| self.stays(backend) && self.is_planned_at(backend, model));
        let at_home: BTreeSet<&str> = at_home.into_iter().map(|(_, model)| name(model)).collect();
        guests.retain(|&(_, model)| at_home.contains(name(model)));
        guests
    }

    fn offered(&self, counts: impl Fn(&Backend, &Offer) -> bool) -> BTreeSet<(BackendId, ModelId)> {
        let offers =
            self.backends.iter().flat_map(|(&id, entry)| entry.offers.iter().map(move |offer| (id, entry, offer)));
        offers.filter(|(_, entry, (_, offer))| counts(entry, offer)).map(|(id, _, (&model, _))| (id, model)).collect()
    }

    /// Leaves only what planners have elsewhere too, at backends that stay and do not let it go.
    pub(in super::super) fn retain_hosted_elsewhere(&self, gone: &mut BTreeSet<(BackendId, ModelId)>) {
        let mut kept = self.offered(|entry, _| entry.obeys);
        kept.retain(|at| !gone.contains(at) && self.stays(at.0) && self.is_planned_at(at.0, at.1));
        let kept: BTreeSet<ModelId> = kept.into_iter().map(|(_, model)| model).collect();
        gone.retain(|(_, model)| kept.contains(model));
    }

    /// The names of all models; ascending.
    pub(in super::super) fn names(&self) -> impl Iterator<Item = &str> {
        self.versions.keys().map(String::as_str)
    }

    /// Backends that stay and host a model.
    pub(in super::super) fn hosts_of(&self, name: &str) -> impl Iterator<Item = Host> {
        let versions = self.versions.get(name).map_or(&[][..], Vec::as_slice);
        self.backends.iter().filter_map(move |(&backend, entry)| {
            let mut hosted = versions.iter().filter(|model| entry.offers.contains_key(model)).peekable();
            hosted.peek()?;
            if !self.stays(backend) || !entry.gpus.iter().any(|gpu| self.gpus[gpu].is_usable) {
                return None;
            }
            let planned: Vec<bool> = hosted.map(|&model| self.is_planned_at(backend, model)).collect();
            let (is_planned, is_planned_whole) = (planned.contains(&true), !planned.contains(&false));
            Some(Host { backend, is_auto: entry.is_auto, is_planned, is_planned_whole })
        })
    }

    /// Whether a version of a model is on no GPU in use.
    pub(in super::super) fn is_used_nowhere(&self, name: &str) -> bool {
        let mut versions = self.versions.get(name).into_iter().flatten();
        versions.any(|model| self.models[model.0 as usize].hosts == 0)
    }

    /// Pages that a model takes in the memory of a GPU where that is short, in all its versions that are hosted.
    pub(in super::super) fn pages_of(&self, name: &str) -> u32 {
        let versions = self.versions.get(name).into_iter().flatten().map(|model| &self.models[model.0 as usize]);
        versions.filter(|model| model.hosts > 0).map(|model| model.weights.pages).sum()
    }

    /// Whether planners have a model on a GPU of a backend that works.
    fn is_planned_at(&self, backend: BackendId, model: ModelId) -> bool {
        let gpus = self.backends.get(&backend).into_iter().flat_map(|entry| &entry.gpus).map(|gpu| &self.gpus[gpu]);
        let has = |gpu: &Gpu| gpu.planned.as_ref().is_some_and(|planned| planned.binary_search(&model).is_ok());
        gpus.filter(|gpu| gpu.is_usable).any(has)
    }

    /// Whether another backend is here, is not to go, and has yet to obey us or to link to those who are served.
    pub(in super::super) fn are_others_awaited(&self, backend: BackendId) -> bool {
        let goes = |id: &BackendId, entry: &Backend| entry.leaves || self.drained.contains(&Member::Backend(*id));
        let is_used = |id: &BackendId, entry: &Backend| entry.obeys && self.reach.backends.contains(id);
        let mut others = self.backends.iter().filter(|(id, _)| **id != backend);
        others.any(|(id, entry)| !goes(id, entry) && !is_used(id, entry))
    }

    /// Notes whether a backend that is to go is used until others host what it does.
    pub(in super::super) fn set_evacuates(&mut self, backend: BackendId, evacuates: bool) {
        if let Some(entry) = self.backends.get_mut(&backend) {
            entry.evacuates = evacuates;
        }
    }
}
