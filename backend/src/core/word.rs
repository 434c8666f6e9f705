//! What one scheduler has said since it was dialled, and what it is told of models.

use std::collections::{BTreeMap, BTreeSet};

use proto::{FrontendId, ModelId, backend_to_scheduler::BackendToControl, scheduler_to_backend::SchedulerToBackend};

use super::offers::Offers;
use crate::links::{FRONTENDS_MAX, Target, TooManyFrontends};

/// Orders that are kept of a primary whose connections are not all up.
const EARLY_MAX: usize = 4_096;

/// One scheduler's word.
#[derive(Debug, Default)]
pub(super) struct Word {
    /// Our names of its models, by its own.
    pub(super) models: BTreeMap<ModelId, ModelId>,
    /// The frontends that it has announced.
    pub(super) frontends: BTreeMap<FrontendId, Target>,
    /// What it wants, if it is the primary, and is not obeyed yet as not all its connections are up. At most
    /// [`EARLY_MAX`].
    early: Vec<SchedulerToBackend>,
    offers: Offers,
    /// Models that were measured since it was dialled, by our names: it has yet to be told.
    measured: BTreeSet<ModelId>,
}

impl Word {
    /// Of a scheduler that is dialled, with a hello that has the first page of these.
    pub(super) fn new(offers: Offers) -> Self {
        Self { offers, ..Self::default() }
    }

    /// The scheduler names models of a page that it was offered.
    ///
    /// # Errors
    /// If those are not as many as we had offered.
    pub(super) fn handle_named(&mut self, models: Vec<ModelId>) -> Result<(), String> {
        self.models.extend(self.offers.handle_answered(models)?);
        Ok(())
    }

    /// Whether the scheduler was told of all that we host, and has named it.
    pub(super) fn knows_all(&self) -> bool {
        self.offers.is_over()
    }

    /// A model was measured that it may have been offered.
    pub(super) fn handle_measured(&mut self, model: ModelId) {
        self.measured.insert(model);
    }

    /// A model that it is to be told to be measured: its name and ours. What it has no name for yet waits.
    pub(super) fn poll_measured(&mut self) -> Option<(ModelId, ModelId)> {
        let named = |ours: &ModelId| self.models.iter().find(|(_, known)| *known == ours).map(|(&theirs, _)| theirs);
        let (theirs, ours) = self.measured.iter().find_map(|&ours| Some((named(&ours)?, ours)))?;
        self.measured.remove(&ours);
        Some((theirs, ours))
    }

    /// More of what we host that the scheduler may be told now.
    pub(super) fn poll_offers(&mut self) -> Option<BackendToControl> {
        self.offers.poll_page()
    }

    /// It wants something, and may be obeyed soon. False if that is too much.
    pub(super) fn handle_early(&mut self, order: SchedulerToBackend) -> bool {
        let has_room = self.early.len() < EARLY_MAX;
        if has_room {
            self.early.push(order);
        }
        has_room
    }

    /// What it has wanted before it was obeyed.
    pub(super) fn take_early(&mut self) -> Vec<SchedulerToBackend> {
        std::mem::take(&mut self.early)
    }

    /// It announces a frontend.
    ///
    /// # Errors
    /// If there are too many.
    pub(super) fn handle_frontend(&mut self, frontend: FrontendId, target: Target) -> Result<(), TooManyFrontends> {
        self.frontends.insert(frontend, target);
        if self.frontends.len() > FRONTENDS_MAX { Err(TooManyFrontends) } else { Ok(()) }
    }

    /// What it calls a model; one that it has never named if it does not know it.
    pub(super) fn name_of(&self, model: ModelId) -> ModelId {
        let known = self.models.iter().find(|(_, ours)| **ours == model);
        known.map_or(ModelId(u32::MAX), |(&theirs, _)| theirs)
    }
}
