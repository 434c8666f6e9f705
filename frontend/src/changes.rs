//! Loading and unloading models, as clients of this frontend ask for it. The scheduler sees to it that every backend
//! does; what is left to do here is to read the configuration of a loaded model anew, before its load is answered.

use std::collections::{BTreeMap, VecDeque};

use proto::{ChangeId, Span, Timestamp, Wait, frontend_to_scheduler::ModelChange};

use crate::error::InferError;

/// Clients of one frontend that may wait for changes.
const WAITING_MAX: usize = 256;
/// How long the primary is waited for. Its own waits for backends are shorter, but it does one change of a model after
/// another.
const WORD_WAIT: Span = Wait::Change.bound();

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum ChangeOutput {
    /// Read a model from the repository; then call [`Changes::handle_read`].
    Read(String),
    /// A change has ended.
    Ended(ChangeId, Result<(), InferError>),
}

/// All changes that clients wait for, and the models that are being read.
#[derive(Debug, Default)]
pub struct Changes {
    next: u64,
    /// At most [`WAITING_MAX`].
    waiting: BTreeMap<ChangeId, Waiting>,
    /// Whether a model must be read once more when its present reading has ended, by name.
    reading: BTreeMap<String, bool>,
    outputs: VecDeque<ChangeOutput>,
}

#[derive(Debug)]
struct Waiting {
    to: ModelChange,
    name: String,
    until: Timestamp,
    /// The scheduler has done it, only the reading is missing.
    is_done: bool,
}

impl Changes {
    /// A client asks for a change; the scheduler is to be asked next.
    ///
    /// # Errors
    /// If too many wait already.
    pub fn handle_asked(&mut self, now: Timestamp, to: ModelChange, name: &str) -> Result<ChangeId, InferError> {
        if self.waiting.len() >= WAITING_MAX {
            return Err(InferError::ChangesFull);
        }
        let change = ChangeId(self.next);
        self.next += 1;
        let until = now + WORD_WAIT;
        self.waiting.insert(change, Waiting { to, name: name.to_owned(), until, is_done: false });
        Ok(change)
    }

    /// A model was loaded, for whomever: its configuration may be another one.
    pub fn handle_loaded(&mut self, name: &str) {
        match self.reading.get_mut(name) {
            Some(once_more) => *once_more = true,
            None => {
                self.reading.insert(name.to_owned(), false);
                self.outputs.push_back(ChangeOutput::Read(name.to_owned()));
            }
        }
    }

    /// A model was read, and can be served or not. False if that counts for nothing, as it has to be read once more.
    pub fn handle_read(&mut self, name: &str, result: &Result<(), String>) -> bool {
        match self.reading.remove(name) {
            Some(true) => {
                self.handle_loaded(name);
                false
            }
            Some(false) => {
                let done = self.waiting.extract_if(.., |_, waiting| waiting.is_done && waiting.name == name);
                let ended = done.map(|(change, waiting)| {
                    let failed =
                        |reason: &String| failed(waiting.to, name, &format!("the frontend cannot serve it: {reason}"));
                    ChangeOutput::Ended(change, result.as_ref().copied().map_err(failed))
                });
                self.outputs.extend(ended);
                true
            }
            None => false,
        }
    }

    /// The scheduler's answer.
    pub fn handle_changed(&mut self, change: ChangeId, refused: Option<String>) {
        let Some(waiting) = self.waiting.get_mut(&change) else { return };
        if refused.is_none() && self.reading.contains_key(&waiting.name) {
            waiting.is_done = true;
            return;
        }
        let result = refused.map_or(Ok(()), |reason| Err(failed(waiting.to, &waiting.name, &reason)));
        self.waiting.remove(&change);
        self.outputs.push_back(ChangeOutput::Ended(change, result));
    }

    /// The scheduler is lost: what becomes of the changes is not known.
    pub fn abandon(&mut self) {
        let ended = std::mem::take(&mut self.waiting).into_keys();
        self.outputs.extend(ended.map(|change| ChangeOutput::Ended(change, Err(InferError::SchedulerLost))));
    }

    /// Ends what the scheduler has said nothing of for as long as that may take. What is being read ends by itself.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        let overdue = self.waiting.extract_if(.., |_, waiting| !waiting.is_done && waiting.until <= now);
        for (change, Waiting { to, name, .. }) in overdue {
            Wait::Change.note_reached();
            let reason =
                format!("the scheduler has not said within {WORD_WAIT} what became of it: look, and try again");
            self.outputs.push_back(ChangeOutput::Ended(change, Err(failed(to, &name, &reason))));
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.waiting.values().filter(|waiting| !waiting.is_done).map(|waiting| waiting.until).min()
    }

    /// What to do next.
    pub fn poll_output(&mut self) -> Option<ChangeOutput> {
        self.outputs.pop_front()
    }
}

/// As Triton says it.
fn failed(to: ModelChange, name: &str, reason: &str) -> InferError {
    let verb = match to {
        ModelChange::Load => "load",
        ModelChange::Unload => "unload",
    };
    InferError::ChangeFailed(format!("failed to {verb} '{}', {reason}", crate::models::excerpt(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1);

    fn outputs(changes: &mut Changes) -> Vec<ChangeOutput> {
        std::iter::from_fn(|| changes.poll_output()).collect()
    }

    fn read(name: &str) -> ChangeOutput {
        ChangeOutput::Read(name.to_owned())
    }

    #[test]
    fn a_load_is_answered_once_the_model_has_been_read() {
        let mut changes = Changes::default();
        let load = changes.handle_asked(NOW, ModelChange::Load, "m").unwrap();
        changes.handle_loaded("m");
        changes.handle_changed(load, None);
        assert_eq!(outputs(&mut changes), [read("m")]);
        assert!(changes.handle_read("m", &Ok(())));
        assert_eq!(outputs(&mut changes), [ChangeOutput::Ended(load, Ok(()))]);
        changes.handle_changed(load, None);
        assert_eq!(outputs(&mut changes), [], "it was answered");
    }

    #[test]
    fn a_load_that_comes_while_the_model_is_read_makes_it_read_once_more() {
        let mut changes = Changes::default();
        changes.handle_loaded("m");
        changes.handle_loaded("m");
        let load = changes.handle_asked(NOW, ModelChange::Load, "m").unwrap();
        changes.handle_changed(load, None);
        assert_eq!(outputs(&mut changes), [read("m")]);
        assert!(!changes.handle_read("m", &Ok(())), "it may be an older one");
        assert_eq!(outputs(&mut changes), [read("m")]);
        assert!(changes.handle_read("m", &Err("no such file".to_owned())));
        let [ChangeOutput::Ended(_, Err(error))] = &outputs(&mut changes)[..] else { panic!() };
        assert_eq!(error.to_string(), "failed to load 'm', the frontend cannot serve it: no such file");
        assert!(!changes.handle_read("m", &Ok(())), "nobody asked for it");
    }

    #[test]
    fn refusals_and_a_lost_scheduler_end_changes_and_waiting_is_bounded() {
        let mut changes = Changes::default();
        let unload = changes.handle_asked(NOW, ModelChange::Unload, "m").unwrap();
        changes.handle_changed(unload, Some("the scheduler is busy".to_owned()));
        let text = "failed to unload 'm', the scheduler is busy".to_owned();
        assert_eq!(outputs(&mut changes), [ChangeOutput::Ended(unload, Err(InferError::ChangeFailed(text)))]);
        assert!((0..WAITING_MAX).all(|_| changes.handle_asked(NOW, ModelChange::Load, "m").is_ok()));
        assert_eq!(changes.handle_asked(NOW, ModelChange::Load, "m"), Err(InferError::ChangesFull));
        changes.abandon();
        let ended = outputs(&mut changes);
        assert!(ended.len() == WAITING_MAX && changes.handle_asked(NOW, ModelChange::Load, "m").is_ok());
    }

    #[test]
    fn a_scheduler_that_never_says_what_became_of_a_change_is_waited_for_no_longer_than_that_may_take() {
        let mut changes = Changes::default();
        let silent = changes.handle_asked(NOW, ModelChange::Load, "m").unwrap();
        let read_late = changes.handle_asked(NOW, ModelChange::Load, "n").unwrap();
        changes.handle_loaded("n");
        changes.handle_changed(read_late, None);
        assert_eq!(outputs(&mut changes), [read("n")]);
        let (at, reached) = (NOW + Wait::Change.bound(), Wait::Change.reached());
        changes.handle_timeout(at - Span(1));
        assert_eq!((outputs(&mut changes), changes.poll_timeout()), (vec![], Some(at)));
        changes.handle_timeout(at);
        let [ChangeOutput::Ended(ended, Err(error))] = &outputs(&mut changes)[..] else { panic!() };
        let text = "the scheduler has not said within 300.000 s what became of it: look, and try again";
        assert_eq!((*ended, error.to_string()), (silent, format!("failed to load 'm', {text}")));
        assert!(Wait::Change.reached() > reached);
        assert_eq!(changes.poll_timeout(), None, "our own disk is no member");
        changes.handle_changed(silent, None);
        assert_eq!(outputs(&mut changes), [], "it was answered");
        assert!(changes.handle_read("n", &Ok(())));
        assert_eq!(outputs(&mut changes), [ChangeOutput::Ended(read_late, Ok(()))]);
    }
}
