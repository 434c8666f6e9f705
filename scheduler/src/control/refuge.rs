//! Backends that are to go and alone host models: these are loaded elsewhere first, while the backend serves on.
//!
//! A backend is listed from when it says that it leaves, or an operator wants it drained, until all of its models are
//! planned elsewhere, no further backend can be asked, or its time is up. Each model is tried at one backend after the
//! other, and nowhere twice. Who could host a model, and what becomes of a load, others know.

use std::collections::{BTreeMap, BTreeSet};

use proto::{BackendId, Timestamp};

/// Models that a line of the log names.
const NAMED_MAX: usize = 3;

/// What becomes of a backend once others host its models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// It is sent no more plans, and told so: its process ends, whatever has found no place.
    Leaves,
    /// It is drained, as an operator wants, unless something has found no place.
    IsDrained,
}

/// All that are to go.
#[derive(Debug, Default)]
pub(super) struct Refuge {
    going: BTreeMap<BackendId, Going>,
    /// Something has changed since it was looked at them.
    is_due: bool,
}

#[derive(Debug)]
struct Going {
    then: Then,
    until: Timestamp,
    /// By a model's name: whom it was tried at.
    tried: BTreeMap<String, BTreeSet<BackendId>>,
    /// By a model's name: why it is not there, of the last that was tried.
    reasons: BTreeMap<String, String>,
}

impl Refuge {
    /// A backend is to go, and has models that only it hosts. It has until then.
    pub(super) fn begin(&mut self, backend: BackendId, then: Then, until: Timestamp) {
        let going = Going { then, until, tried: BTreeMap::new(), reasons: BTreeMap::new() };
        self.going.insert(backend, going);
        self.is_due = true;
    }

    /// It has gone, or stays. Yields what was to become of it.
    pub(super) fn end(&mut self, backend: BackendId) -> Option<Then> {
        self.going.remove(&backend).map(|going| going.then)
    }

    /// What is to become of a backend.
    pub(super) fn then(&self, backend: BackendId) -> Option<Then> {
        self.going.get(&backend).map(|going| going.then)
    }

    /// Who hosts what, or who is used, has changed.
    pub(super) fn handle_changed(&mut self) {
        self.is_due = !self.going.is_empty();
    }

    /// A model is tried at a backend, for the sake of another one.
    pub(super) fn handle_tried(&mut self, backend: BackendId, name: &str, at: BackendId) {
        if let Some(going) = self.going.get_mut(&backend) {
            going.tried.entry(name.to_owned()).or_default().insert(at);
        }
    }

    /// It could not be loaded there.
    pub(super) fn handle_failed(&mut self, name: &str, at: BackendId, reason: &str) {
        for going in self.going.values_mut() {
            if going.tried.get(name).is_some_and(|tried| tried.contains(&at)) {
                going.reasons.insert(name.to_owned(), format!("backend {}: {reason}", at.0));
            }
        }
        self.handle_changed();
    }

    /// The backends that are to be looked at now.
    pub(super) fn poll_due(&mut self, now: Timestamp) -> Vec<BackendId> {
        let is_due = std::mem::take(&mut self.is_due);
        let due = self.going.iter().filter(|(_, going)| is_due || going.until <= now);
        due.map(|(&backend, _)| backend).collect()
    }

    /// When [`Self::poll_due`] yields somebody.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let until = self.going.values().map(|going| going.until).min();
        if self.is_due { until.map(|_| Timestamp::PAST) } else { until }
    }

    /// Whether a backend's time is up.
    pub(super) fn is_over(&self, now: Timestamp, backend: BackendId) -> bool {
        self.going.get(&backend).is_some_and(|going| going.until <= now)
    }

    /// Whether a model was tried there for a backend's sake.
    pub(super) fn was_tried(&self, backend: BackendId, name: &str, at: BackendId) -> bool {
        self.going.get(&backend).and_then(|going| going.tried.get(name)).is_some_and(|tried| tried.contains(&at))
    }

    /// Of models that have found no place: what a line of the log says.
    pub(super) fn without_place(&self, backend: BackendId, names: &[String]) -> String {
        let reason =
            |name: &str| self.going.get(&backend).and_then(|going| going.reasons.get(name)).map(String::as_str);
        let nobody = "no other backend could be asked";
        let named = names.iter().take(NAMED_MAX).map(|name| format!("{name} ({})", reason(name).unwrap_or(nobody)));
        let more = if names.len() > NAMED_MAX { ", .." } else { "" };
        format!("{} of its models: {}{more}", names.len(), named.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOES: BackendId = BackendId(1);
    const OTHER: BackendId = BackendId(2);

    #[test]
    fn it_is_looked_at_when_something_changes_and_when_its_time_is_up() {
        let (mut refuge, until) = (Refuge::default(), Timestamp(100));
        refuge.handle_changed();
        assert_eq!((refuge.poll_due(Timestamp(0)), refuge.poll_timeout()), (vec![], None), "nobody is to go");
        refuge.begin(GOES, Then::Leaves, until);
        assert_eq!(refuge.poll_timeout(), Some(Timestamp::PAST));
        assert_eq!((refuge.poll_due(Timestamp(0)), refuge.poll_timeout()), (vec![GOES], Some(until)));
        assert_eq!(refuge.poll_due(Timestamp(99)), []);
        refuge.handle_changed();
        assert_eq!(refuge.poll_due(Timestamp(99)), [GOES]);
        assert!(refuge.poll_due(until) == [GOES] && refuge.is_over(until, GOES) && !refuge.is_over(until, OTHER));
        assert_eq!((refuge.end(GOES), refuge.end(GOES)), (Some(Then::Leaves), None));
    }

    #[test]
    fn what_has_found_no_place_is_said_with_the_reason_in_one_line() {
        let mut refuge = Refuge::default();
        refuge.begin(GOES, Then::IsDrained, Timestamp(100));
        refuge.handle_tried(GOES, "m", OTHER);
        assert!(refuge.was_tried(GOES, "m", OTHER) && !refuge.was_tried(GOES, "n", OTHER));
        refuge.handle_failed("m", OTHER, "out of memory");
        refuge.handle_failed("n", OTHER, "nobody asked for it");
        let names = ["m", "n", "o", "p"].map(str::to_owned);
        let nobody = "no other backend could be asked";
        let expected = format!("4 of its models: m (backend 2: out of memory), n ({nobody}), o ({nobody}), ..");
        assert_eq!(refuge.without_place(GOES, &names), expected);
    }
}
