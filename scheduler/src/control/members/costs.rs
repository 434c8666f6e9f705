//! What models take, by what backends that host them have offered, and have measured since.

use std::sync::Arc;

use proto::{BackendId, BatchCost, GpuId, LatencyProfile, ModelId};

use super::{super::offers::check_costs, Members};

impl Members {
    /// Backends that host a model, with their GPUs that do and what it takes there.
    pub(in crate::control) fn offers(
        &self,
        model: ModelId,
    ) -> impl Iterator<Item = (BackendId, Vec<GpuId>, &Arc<LatencyProfile>)> {
        self.backends.iter().filter_map(move |(&id, backend)| {
            let offer = &backend.offers.get(&model)?.profile;
            let hosts = backend.gpus.iter().copied().filter(|gpu| self.gpus[gpu].models.binary_search(&model).is_ok());
            Some((id, hosts.collect(), offer))
        })
    }

    /// What a batch of unequal tasks takes, by the slowest of all offers: a backend that could not measure it says
    /// nothing of the others.
    pub(in crate::control) fn cost(&self, model: ModelId) -> Option<BatchCost> {
        let offers = self.backends.values().filter_map(|backend| backend.offers.get(&model));
        offers.filter_map(|offer| offer.cost).reduce(BatchCost::slowest)
    }

    /// l(b) at the slowest of all who offer a model.
    pub(super) fn slowest(&self, model: ModelId) -> Option<LatencyProfile> {
        let mut offers = self.backends.values().filter_map(|backend| backend.offers.get(&model));
        let first = LatencyProfile::clone(&offers.next()?.profile);
        Some(offers.fold(first, |slowest, other| slowest.slowest(&other.profile)))
    }

    /// A backend has measured what it had offered before. False if it does not host the model any more.
    ///
    /// # Errors
    /// If it has said so before, or what was measured cannot be.
    pub(in crate::control) fn set_measured(
        &mut self,
        (backend, model): (BackendId, ModelId),
        profile: LatencyProfile,
        cost: Option<BatchCost>,
    ) -> Result<bool, String> {
        let offers = self.backends.get_mut(&backend).map(|entry| &mut entry.offers);
        let Some(offer) = offers.and_then(|offers| offers.get_mut(&model)) else { return Ok(false) };
        let name = &self.models[model.0 as usize].name;
        if std::mem::replace(&mut offer.is_measured, true) {
            return Err(format!("{name}: it was measured before"));
        }
        let profile = check_costs(name, profile, cost)?;
        let (found, expected) = (profile.max_batch(), offer.profile.max_batch());
        if found != expected {
            return Err(format!("{name}: l(b) was measured up to {found}, expected {expected}"));
        }
        let profile = self.shared(model, &profile);
        if let Some(offer) = self.backends.get_mut(&backend).and_then(|entry| entry.offers.get_mut(&model)) {
            (offer.profile, offer.cost) = (profile, cost);
        }
        if let Some(slowest) = self.slowest(model) {
            self.models[model.0 as usize].profile = slowest;
        }
        Ok(true)
    }

    /// One table for all who offer the same.
    pub(super) fn shared(&self, model: ModelId, offer: &LatencyProfile) -> Arc<LatencyProfile> {
        let others = self.backends.values().filter_map(|backend| backend.offers.get(&model));
        others
            .map(|other| &other.profile)
            .find(|other| ***other == *offer)
            .cloned()
            .unwrap_or_else(|| Arc::new(offer.clone()))
    }
}
