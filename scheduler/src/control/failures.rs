//! Models that could not be loaded, and why: frontends are told, whose clients ask.
//!
//! A backend tells what it could not load when it started; what a load ends with is known here. A reason is kept until
//! the model has been loaded, or unloaded, or its backend has gone.

use std::collections::BTreeMap;

use proto::{BackendId, frontend_to_scheduler::NAME_BYTES_MAX, scheduler_to_frontend::REASON_BYTES_MAX};

use super::{Control, topics::Topic};

/// Versions of models of which it is remembered why they could not be loaded.
const KEPT_MAX: usize = 256;

/// Why versions of models could not be loaded; the version is empty where it is about all.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<(String, String), (BackendId, String)>);

impl Failures {
    /// Whether it is kept.
    fn insert(&mut self, (name, version): (&str, &str), backend: BackendId, reason: String) -> bool {
        let key = (name.to_owned(), version.to_owned());
        let is_kept = name.len() <= NAME_BYTES_MAX
            && version.len() <= NAME_BYTES_MAX
            && (self.0.len() < KEPT_MAX || self.0.contains_key(&key));
        if is_kept {
            self.0.insert(key, (backend, reason));
        }
        is_kept
    }

    /// Of which models and versions it is kept.
    pub(super) fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.keys().map(|(name, version)| (name.as_str(), version.as_str()))
    }

    /// Why one of them could not be loaded.
    pub(super) fn reason(&self, name: &str, version: &str) -> Option<&str> {
        self.0.get(&(name.to_owned(), version.to_owned())).map(|(_, reason)| reason.as_str())
    }

    fn remove(&mut self, is_over: impl Fn(&str, BackendId) -> bool) -> Vec<(String, String)> {
        let over = self.0.extract_if(.., |(name, _), (backend, _)| is_over(name, *backend));
        over.map(|(key, _)| key).collect()
    }
}

impl Control {
    /// A model, or a version of it, could not be loaded by this backend, or, if it is nobody, as a client wanted.
    pub(super) fn on_not_loaded(&mut self, backend: BackendId, of: (&str, &str), mut reason: String) {
        reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
        if self.failures.insert(of, backend, reason) {
            self.tell_each(&topic(of));
        }
    }

    /// All that is known of a model's failures is over.
    pub(super) fn forget_failures_of(&mut self, name: &str) {
        let over = self.failures.remove(|other, _| other == name);
        over.iter().for_each(|(name, version)| self.tell_each(&topic((name, version))));
    }

    /// What a backend could not load that is not there any more does not matter.
    pub(super) fn forget_failures_at(&mut self, backend: BackendId) {
        let over = self.failures.remove(|_, other| other == backend);
        over.iter().for_each(|(name, version)| self.tell_each(&topic((name, version))));
    }
}

fn topic((name, version): (&str, &str)) -> Topic {
    Topic::Failure(name.to_owned(), version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_bounded_and_go_with_their_model_or_backend() {
        let mut failures = Failures::default();
        for number in 0..=KEPT_MAX {
            let is_kept = failures.insert((&number.to_string(), "1"), BackendId(number as u32 % 2), "torn".into());
            assert_eq!(is_kept, number < KEPT_MAX);
        }
        assert!(failures.insert(("7", "1"), BackendId(1), "still torn".into()), "it is known");
        assert!(!failures.insert((&"x".repeat(NAME_BYTES_MAX + 1), "1"), BackendId(1), String::new()));
        assert_eq!(failures.remove(|name, _| name == "7"), [("7".to_owned(), "1".to_owned())]);
        assert_eq!(failures.remove(|_, backend| backend == BackendId(0)).len(), KEPT_MAX / 2);
        assert_eq!(failures.0.len(), KEPT_MAX / 2 - 1);
    }
}
