//! Models that could not be loaded, and why: frontends are told, whose clients ask.
//!
//! A backend tells what it could not load when it started; what a load ends with is known here. A reason is kept until
//! the model has been loaded, or unloaded, or its backend has gone.

use std::collections::BTreeMap;

use proto::{
    BackendId, FrontendId, frontend_to_scheduler::NAME_BYTES_MAX, scheduler_to_frontend::REASON_BYTES_MAX,
    scheduler_to_frontend::SchedulerToFrontend,
};

use super::{Control, ControlOutput};

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

    fn remove(&mut self, is_over: impl Fn(&str, BackendId) -> bool) -> Vec<(String, String)> {
        let over = self.0.extract_if(.., |(name, _), (backend, _)| is_over(name, *backend));
        over.map(|(key, _)| key).collect()
    }
}

impl Control {
    /// A model, or a version of it, could not be loaded by this backend, or, if it is nobody, as a client wanted.
    pub(super) fn on_not_loaded(&mut self, backend: BackendId, of: (&str, &str), mut reason: String) {
        reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
        if self.failures.insert(of, backend, reason.clone()) {
            self.tell_failure(of, Some(&reason));
        }
    }

    /// All that is known of a model's failures is over.
    pub(super) fn forget_failures_of(&mut self, name: &str) {
        let over = self.failures.remove(|other, _| other == name);
        over.iter().for_each(|(name, version)| self.tell_failure((name, version), None));
    }

    /// What a backend could not load that is not there any more does not matter.
    pub(super) fn forget_failures_at(&mut self, backend: BackendId) {
        let over = self.failures.remove(|_, other| other == backend);
        over.iter().for_each(|(name, version)| self.tell_failure((name, version), None));
    }

    fn tell_failure(&mut self, of: (&str, &str), reason: Option<&str>) {
        for &frontend in self.members.frontends.keys() {
            self.outputs.push_back(ControlOutput::ToFrontend(frontend, message(of, reason)));
        }
    }

    /// Tells a new frontend.
    pub(super) fn tell_failures(&mut self, frontend: FrontendId) {
        let all = self.failures.0.iter().map(|((name, version), (_, reason))| message((name, version), Some(reason)));
        self.outputs.extend(all.map(|message| ControlOutput::ToFrontend(frontend, message)));
    }
}

fn message((name, version): (&str, &str), reason: Option<&str>) -> SchedulerToFrontend {
    let (name, version) = (name.to_owned(), version.to_owned());
    SchedulerToFrontend::NotLoaded { name, version, reason: reason.map(str::to_owned) }
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
