//! What this frontend can serve: the repository's models, joined with what the scheduler says about them.

use std::rc::Rc;

use proto::{ModelId, Span};
use repository::Model;

use crate::{error::InferError, slots::SlotSize};

/// A model of the repository.
#[derive(Debug)]
pub struct ServedModel {
    /// As in the repository.
    pub model: Rc<Model>,
    /// What one of its tasks needs.
    pub slot_size: SlotSize,
    /// What the scheduler said last; `None` before it said anything, and after it was lost.
    pub offer: Option<Offer>,
}

/// The scheduler's word on a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Assigned by the scheduler.
    pub id: ModelId,
    /// GPUs that host it and can reach our slots.
    pub gpus: u32,
    /// The least time from submission to answer.
    pub least_latency: Span,
}

/// All models, sorted by name.
#[derive(Debug)]
pub struct ModelTable {
    models: Vec<ServedModel>,
}

impl ModelTable {
    /// The repository's models, none of them offered yet.
    #[must_use]
    pub fn new(mut models: Vec<Model>) -> Self {
        models.sort_by(|a, b| a.name.cmp(&b.name));
        let served = |model: Model| ServedModel {
            slot_size: SlotSize::new(model.input_bytes(), model.output_bytes()),
            model: Rc::new(model),
            offer: None,
        };
        Self { models: models.into_iter().map(served).collect() }
    }

    /// The index of a model, by the name and, if given, the version that a client asked for.
    ///
    /// # Errors
    /// If there is none of that name, or it has another version.
    pub fn find(&self, name: &str, version: Option<&str>) -> Result<usize, InferError> {
        let Ok(index) = self.models.binary_search_by(|served| served.model.name.as_str().cmp(name)) else {
            let known: Vec<&str> = self.models.iter().map(|served| served.model.name.as_str()).collect();
            return Err(InferError::NotFound(format!(
                "model: found '{}', expected one of: {}",
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

    /// All models.
    pub fn iter(&self) -> impl Iterator<Item = &ServedModel> {
        self.models.iter()
    }

    /// Takes in the scheduler's word on a model. False if the repository has no such model and version.
    pub fn handle_offer(&mut self, name: &str, version: &str, offer: Offer) -> bool {
        let Ok(index) = self.find(name, Some(version)) else { return false };
        self.models[index].offer = Some(offer);
        true
    }

    /// Forgets everything that the scheduler said.
    pub fn clear_offers(&mut self) {
        self.models.iter_mut().for_each(|served| served.offer = None);
    }
}

/// A client's text, short enough for an error message.
#[must_use]
pub fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 64;
    if text.chars().count() <= CHARS_MAX {
        return text.to_owned();
    }
    text.chars().take(CHARS_MAX).chain("...".chars()).collect()
}
