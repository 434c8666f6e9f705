//! What this frontend can serve: the repository's models, joined with what the primary says about them.

use std::{collections::BTreeMap, rc::Rc};

use proto::{
    ModelId, ModelThreadId, Span,
    scheduler_to_frontend::{ModelState, NetworkTimes},
};
use repository::Model;

use crate::{error::InferError, slots::SlotSize, spoken::Spoken};

/// Models that cannot be served of which it is remembered why.
const REFUSED_MAX: usize = 4_096;

/// A model of the repository.
#[derive(Debug)]
pub struct ServedModel {
    /// As in the repository.
    pub model: Rc<Model>,
    /// What one of its tasks needs.
    pub slot_size: SlotSize,
    /// What the scheduler said last; `None` before it said anything, and after it was lost.
    pub offer: Option<Offer>,
    /// What clients have made of it, as the scheduler said last.
    pub state: ModelState,
}

/// The scheduler's word on a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Assigned by the scheduler.
    pub id: ModelId,
    /// Which ModelThread owns it: new tasks go there.
    pub model_thread: ModelThreadId,
    /// GPUs that host it and can reach our slots.
    pub gpus: u32,
    /// The least time from submission to answer.
    pub least_latency: Span,
    /// The network's part of that.
    pub network: NetworkTimes,
}

/// All models. One that has come keeps its index.
#[derive(Debug, Default)]
pub struct ModelTable {
    models: Vec<ServedModel>,
    by_name: BTreeMap<String, usize>,
    /// Why those of the repository that are not among them cannot be served.
    refused: BTreeMap<String, String>,
    /// All that the primary said.
    spoken: Spoken,
}

impl ModelTable {
    /// The repository's models, none of them offered yet.
    #[must_use]
    pub fn new(models: Vec<Model>) -> Self {
        let mut table = Self::default();
        for model in models {
            table.handle_model(model);
        }
        table
    }

    /// Takes in a model as it was read; instead of what was known under its name, if anything was. Yields its index.
    pub fn handle_model(&mut self, model: Model) -> usize {
        let name = model.name.clone();
        self.refused.remove(&name);
        let (offer, state) = (self.spoken.offer(&name, &model.version), self.spoken.state(&name));
        let slot_size = SlotSize::new(model.input_bytes(), model.output_bytes());
        let served = ServedModel { slot_size, model: Rc::new(model), offer, state };
        let index = *self.by_name.entry(name).or_insert(self.models.len());
        match self.models.get_mut(index) {
            Some(known) => *known = served,
            None => self.models.push(served),
        }
        index
    }

    /// A model of the repository cannot be served, for this reason. One that is served stays as it is.
    pub fn handle_refused(&mut self, name: &str, reason: String) {
        if !self.by_name.contains_key(name) && (self.refused.len() < REFUSED_MAX || self.refused.contains_key(name)) {
            self.refused.insert(name.to_owned(), reason);
        }
    }

    /// Models that cannot be served, by name, and why.
    pub fn refused(&self) -> impl Iterator<Item = (&str, &str)> {
        self.refused.iter().map(|(name, reason)| (name.as_str(), reason.as_str()))
    }

    /// The index of a model, by the name and, if given, the version that a client asked for.
    ///
    /// # Errors
    /// If there is none of that name, or it has another version.
    pub fn find(&self, name: &str, version: Option<&str>) -> Result<usize, InferError> {
        let Some(&index) = self.by_name.get(name) else {
            if self.refused.contains_key(name) {
                let why = "cannot be served, the repository index says why";
                return Err(InferError::NotFound(format!("Request for unknown model: '{name}' {why}")));
            }
            let known: Vec<&str> = self.by_name.keys().map(String::as_str).collect();
            // As Triton says it.
            return Err(InferError::NotFound(format!(
                "Request for unknown model: '{}' is not found, expected one of: {}",
                excerpt(name),
                known.join(", ")
            )));
        };
        let found = &self.models[index].model;
        match version {
            Some(version) if version != found.version => Err(InferError::NotFound(format!(
                "version of model '{name}': found '{}', expected '{}'",
                excerpt(version),
                found.version
            ))),
            _ => Ok(index),
        }
    }

    /// The model at an index that [`Self::find`] gave.
    #[must_use]
    pub fn get(&self, index: usize) -> &ServedModel {
        &self.models[index]
    }

    /// All models and their indexes, by name.
    pub fn sorted(&self) -> impl Iterator<Item = (usize, &ServedModel)> {
        self.by_name.values().map(|&index| (index, &self.models[index]))
    }

    /// All models, by index.
    pub fn iter(&self) -> impl Iterator<Item = &ServedModel> {
        self.models.iter()
    }

    /// Takes in the scheduler's word on a model. False if the repository has no such model and version.
    pub fn handle_offer(&mut self, name: &str, version: &str, offer: Offer) -> bool {
        if !self.spoken.handle_offer(name, version, offer) {
            return false;
        }
        let index = self.by_name.get(name).copied();
        let Some(index) = index.filter(|&index| self.models[index].model.version == version) else { return false };
        self.models[index].offer = Some(offer);
        true
    }

    /// Takes in what clients have made of a model. True if it has been loaded since it was last spoken of.
    pub fn handle_state(&mut self, name: &str, state: ModelState, loads: u32) -> bool {
        let Some(loads_before) = self.spoken.handle_state(name, state, loads) else { return false };
        if let Some(&index) = self.by_name.get(name) {
            self.models[index].state = state;
        }
        loads > loads_before
    }

    /// The word of a scheduler that is obeyed from now on takes the place of what another said.
    pub(crate) fn handle_obeyed(&mut self, spoken: Spoken) {
        let former = std::mem::replace(&mut self.spoken, spoken);
        self.spoken.inherit_states(former);
        for served in &mut self.models {
            let model = &served.model;
            (served.offer, served.state) =
                (self.spoken.offer(&model.name, &model.version), self.spoken.state(&model.name));
        }
    }

    /// What the primary says of a model that may have been read anew since.
    pub(crate) fn offer_of(&self, model: &Model) -> Option<Offer> {
        let served = self.by_name.get(&model.name).map(|&index| &self.models[index]);
        match served {
            Some(served) if served.model.version == model.version => served.offer,
            _ => self.spoken.offer(&model.name, &model.version),
        }
    }

    /// Forgets everything that the scheduler said.
    pub fn clear_offers(&mut self) {
        self.spoken = Spoken::default();
        for served in &mut self.models {
            (served.offer, served.state) = (None, ModelState::Serving);
        }
    }
}

/// A client's text for an error message: short, and on one line whatever is in it.
#[must_use]
pub fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 64;
    let cut = if text.chars().nth(CHARS_MAX).is_some() { "..." } else { "" };
    let shown =
        text.chars().take(CHARS_MAX).map(|char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char });
    shown.chain(cut.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_model_that_cannot_be_served_is_known_until_it_can_be() {
        let mut table = ModelTable::new(vec![testing::model("good", vec![], vec![])]);
        table.handle_refused("bad", "bad/config.pbtxt: dims: found 0".to_owned());
        table.handle_refused("good", "its next version".to_owned());
        assert_eq!(table.refused().collect::<Vec<_>>(), [("bad", "bad/config.pbtxt: dims: found 0")]);
        let error = table.find("bad", None).unwrap_err().to_string();
        assert!(error.ends_with("'bad' cannot be served, the repository index says why"), "{error}");
        table.handle_model(testing::model("bad", vec![], vec![]));
        assert_eq!((table.refused().count(), table.find("bad", None)), (0, Ok(1)));
        (0..REFUSED_MAX + 9).for_each(|n| table.handle_refused(&n.to_string(), String::new()));
        assert_eq!(table.refused().count(), REFUSED_MAX);
    }
}
