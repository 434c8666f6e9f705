//! What one scheduler has said since it was joined. A standby's word is kept until the standby is obeyed.

use std::collections::BTreeMap;

use proto::{
    ModelId,
    brought::{Brought, CONFIG_BYTES_MAX},
    frontend_to_scheduler::NAME_BYTES_MAX,
    request_times::RequestTimes,
    scheduler_to_frontend::{ModelState, REASON_BYTES_MAX, SchedulerLoad},
};

use crate::models::Offer;

/// Models of which is kept what one scheduler said: it may speak of more than our repository has.
const SPOKEN_OF_MAX: usize = 65_536;

/// Of these, how many may be served with what a client brought along.
const BROUGHT_MAX: usize = 1_024;

/// Versions of models of which is kept why they could not be loaded.
const REASONS_MAX: usize = 4_096;

/// What one scheduler has said.
#[derive(Debug, Default)]
pub(crate) struct Word {
    /// Of models; the model table has it while the scheduler is obeyed.
    pub(crate) spoken: Spoken,
    /// How much it had to do.
    pub(crate) load: SchedulerLoad,
    /// What requests take of models whose requests are unequal. Of at most [`SPOKEN_OF_MAX`].
    request_times: BTreeMap<ModelId, RequestTimes>,
    /// It is about to end, and takes nothing more.
    pub(crate) leaves: bool,
}

impl Word {
    /// What requests of a model take.
    pub(crate) fn request_times(&self, model: ModelId) -> Option<&RequestTimes> {
        self.request_times.get(&model)
    }

    /// What is beyond its bounds is not kept.
    pub(crate) fn handle_request_times(&mut self, model: ModelId, times: RequestTimes) {
        let has_room = self.request_times.len() < SPOKEN_OF_MAX || self.request_times.contains_key(&model);
        if has_room && times.is_bounded() {
            self.request_times.insert(model, times);
        }
    }
}

/// What one scheduler has said of models.
#[derive(Debug, Default)]
pub(crate) struct Spoken {
    /// By name and version: it may speak of a version before we have read it. At most [`SPOKEN_OF_MAX`], with names of
    /// at most [`NAME_BYTES_MAX`] bytes.
    offers: BTreeMap<(String, String), Offer>,
    /// What clients have made of models, by name; bounded in the same way.
    states: BTreeMap<String, State>,
    /// Why versions could not be loaded, by name and version, which is empty where it is about all of them. At most
    /// [`REASONS_MAX`].
    reasons: BTreeMap<(String, String), String>,
}

/// What clients have made of a model.
#[derive(Debug, Clone)]
struct State {
    state: ModelState,
    /// What it was loaded with, if not what the repository has.
    brought: Option<Brought>,
    /// How often it was loaded, as was said first and last.
    loads_first: u32,
    loads: u32,
}

impl Spoken {
    /// Takes in a word on a model. False if it is too long to be kept.
    pub(crate) fn handle_offer(&mut self, name: &str, version: &str, offer: Offer) -> bool {
        if name.len() > NAME_BYTES_MAX || version.len() > NAME_BYTES_MAX {
            return false;
        }
        let key = (name.to_owned(), version.to_owned());
        if self.offers.len() < SPOKEN_OF_MAX || self.offers.contains_key(&key) {
            self.offers.insert(key, offer);
        }
        true
    }

    /// Takes in what clients have made of a model. How often it had been loaded when it was last spoken of; `None` if
    /// the word is not kept.
    pub(crate) fn handle_state(
        &mut self,
        name: &str,
        (state, loads): (ModelState, u32),
        brought: Option<Brought>,
    ) -> Option<u32> {
        if let Some(Brought { config, .. }) = &brought {
            let others = self.states.iter().filter(|(other, known)| known.brought.is_some() && *other != name);
            if config.len() > CONFIG_BYTES_MAX || others.count() >= BROUGHT_MAX {
                return None;
            }
        }
        if name.len() > NAME_BYTES_MAX || self.states.len() >= SPOKEN_OF_MAX && !self.states.contains_key(name) {
            return None;
        }
        match self.states.get_mut(name) {
            Some(known) => {
                (known.state, known.brought) = (state, brought);
                Some(std::mem::replace(&mut known.loads, loads))
            }
            None => {
                self.states.insert(name.to_owned(), State { state, brought, loads_first: loads, loads });
                Some(0)
            }
        }
    }

    /// Takes in whether a version of a model could not be loaded, and why. What is too long is not kept.
    pub(crate) fn handle_not_loaded(&mut self, name: String, version: String, reason: Option<String>) {
        let is_too_long = name.len() > NAME_BYTES_MAX || version.len() > NAME_BYTES_MAX;
        let key = (name, version);
        match reason {
            None => drop(self.reasons.remove(&key)),
            Some(reason) if is_too_long || reason.len() > REASON_BYTES_MAX => {}
            Some(reason) if self.reasons.len() < REASONS_MAX || self.reasons.contains_key(&key) => {
                self.reasons.insert(key, reason);
            }
            Some(_) => {}
        }
    }

    /// Why a version could not be loaded, or all of its model's.
    pub(crate) fn reason_against(&self, name: &str, version: &str) -> Option<&str> {
        let of = |version: &str| self.reasons.get(&(name.to_owned(), version.to_owned()));
        of(version).or_else(|| of("")).map(String::as_str)
    }

    /// The last word on a version of a model.
    pub(crate) fn offer(&self, name: &str, version: &str) -> Option<Offer> {
        self.offers.get(&(name.to_owned(), version.to_owned())).copied()
    }

    /// What clients have made of a model.
    pub(crate) fn state(&self, name: &str) -> ModelState {
        self.states.get(name).map_or(ModelState::Serving, |known| known.state)
    }

    /// What a model was loaded with, if not what the repository has.
    pub(crate) fn brought(&self, name: &str) -> Option<&Brought> {
        self.states.get(name)?.brought.as_ref()
    }

    /// What another scheduler said of states holds as long as this one has said nothing. They count loads each for
    /// itself.
    pub(crate) fn inherit_states(&mut self, former: Self) {
        for (name, State { state, brought, .. }) in former.states {
            if self.states.len() < SPOKEN_OF_MAX {
                self.states.entry(name).or_insert(State { state, brought, loads_first: 0, loads: 0 });
            }
        }
    }

    /// Models that have been loaded since they were first spoken of.
    pub(crate) fn loaded_since_first(&self) -> Vec<String> {
        self.names(|known| known.loads > known.loads_first)
    }

    /// Models that have ever been loaded.
    pub(crate) fn loaded_ever(&self) -> Vec<String> {
        self.names(|known| known.loads > 0)
    }

    fn names(&self, is_meant: impl Fn(&State) -> bool) -> Vec<String> {
        self.states.iter().filter(|(_, known)| is_meant(known)).map(|(name, _)| name.clone()).collect()
    }
}
