//! Loading and unloading models, as clients ask for it: one change of a model at a time, on every backend that may host
//! it, or on none.
//!
//! A load is asked of all backends and takes effect once all have it ready; if one fails, or is silent for too long,
//! all discard it and nothing has changed. An unload takes effect at once; its answer waits until backends have
//! finished what they were given. Whoever asks for a change that is under way shares its answer; whoever asks for the
//! opposite waits until it has ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{
    BackendId, ChangeId, FrontendId, LoadId, ModelId, Span, Timestamp,
    backend_to_scheduler::{LoadOutcome, ModelOffer},
    frontend_to_scheduler::ModelChange,
    scheduler_to_frontend::{ModelState, REASON_BYTES_MAX},
};

/// Models that may change at once.
const CHANGES_MAX: usize = 64;
/// Clients that may wait for one change, and that may wait until it has ended.
const WAITERS_MAX: usize = 256;
/// Models of which it is remembered that clients changed them.
const KNOWN_MAX: usize = 65_536;
/// How long backends may take to load a model and measure it.
pub(super) const LOAD_WAIT: Span = Span::from_millis(120_000);
/// How long backends may take to finish the batches of a model that is unloaded.
pub(super) const UNLOAD_WAIT: Span = Span::from_millis(30_000);

/// Who is to be answered.
pub(super) type Waiter = (FrontendId, ChangeId);

/// All changes under way, and what became of earlier ones.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// By the model's name; at most [`CHANGES_MAX`].
    under_way: BTreeMap<String, Change>,
    /// Models that clients have changed, by name; at most [`KNOWN_MAX`].
    known: BTreeMap<String, Known>,
    next_load: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    loads: u32,
    is_unloaded: bool,
}

#[derive(Debug)]
struct Change {
    waiters: Vec<Waiter>,
    give_up_at: Timestamp,
    work: Work,
    /// What is to be done when it has ended, in order; at most [`WAITERS_MAX`].
    next: VecDeque<(Waiter, ModelChange)>,
}

#[derive(Debug)]
enum Work {
    Load {
        load: LoadId,
        /// Have not answered yet.
        awaited: BTreeSet<BackendId>,
        ready: BTreeMap<BackendId, ModelOffer>,
        failure: Option<String>,
    },
    Unload {
        awaited: BTreeSet<(BackendId, ModelId)>,
    },
}

/// What became of a request for a change.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Backends are to be asked to load.
    Load(LoadId),
    /// The model is to be withdrawn; [`Changes::handle_withdrawn`] comes next.
    Unload,
    /// It shares the answer of one that is under way, or waits for its end.
    Joined,
    /// Not now.
    Refused(String),
}

/// A change that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) name: String,
    pub(super) waiters: Vec<Waiter>,
    pub(super) outcome: Outcome,
    /// Who waited for the end: each is to ask again, in this order.
    pub(super) next: VecDeque<(Waiter, ModelChange)>,
}

/// How a change ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// These are to host what they have loaded.
    Loaded(LoadId, BTreeMap<BackendId, ModelOffer>),
    /// These are to discard what they have loaded, and so are those that are still at it.
    LoadFailed(LoadId, BTreeSet<BackendId>, String),
    /// It is gone, or, if there is a reason, perhaps not everywhere yet.
    Unloaded(Option<String>),
}

impl Changes {
    /// A client asks for a change. `backends` are all that obey.
    pub(super) fn handle_asked(
        &mut self,
        now: Timestamp,
        waiter: Waiter,
        (to, name): (ModelChange, &str),
        backends: impl Iterator<Item = BackendId>,
    ) -> Asked {
        if let Some(change) = self.under_way.get_mut(name) {
            return change.join(waiter, to);
        }
        if self.under_way.len() >= CHANGES_MAX {
            return Asked::Refused(format!("{CHANGES_MAX} models are being loaded or unloaded; try again"));
        }
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(name) {
            return Asked::Refused(format!("clients have changed {KNOWN_MAX} models, and no more are kept track of"));
        }
        let (work, give_up_at, asked) = match to {
            ModelChange::Load => {
                let load = LoadId(self.next_load);
                self.next_load += 1;
                let (awaited, ready) = (backends.collect(), BTreeMap::new());
                (Work::Load { load, awaited, ready, failure: None }, now + LOAD_WAIT, Asked::Load(load))
            }
            ModelChange::Unload => {
                self.known.entry(name.to_owned()).or_default().is_unloaded = true;
                (Work::Unload { awaited: BTreeSet::new() }, now + UNLOAD_WAIT, Asked::Unload)
            }
        };
        self.under_way
            .insert(name.to_owned(), Change { waiters: vec![waiter], give_up_at, work, next: VecDeque::new() });
        asked
    }

    /// The model was withdrawn, and these backends were told.
    pub(super) fn handle_withdrawn(&mut self, name: &str, told: impl IntoIterator<Item = (BackendId, ModelId)>) {
        if let Some(Change { work: Work::Unload { awaited }, .. }) = self.under_way.get_mut(name) {
            awaited.extend(told);
        }
    }

    /// A backend has ended a load. False if nobody waits for it (any more): it is to be discarded.
    pub(super) fn handle_loaded(&mut self, backend: BackendId, id: LoadId, outcome: LoadOutcome) -> bool {
        for change in self.under_way.values_mut() {
            let Work::Load { load, awaited, ready, failure } = &mut change.work else { continue };
            if *load != id || !awaited.remove(&backend) {
                continue;
            }
            match outcome {
                LoadOutcome::Ready(offer) => drop(ready.insert(backend, offer)),
                LoadOutcome::NotPlaced => {}
                LoadOutcome::Failed(reason) => *failure = Some(format!("backend {}: {}", backend.0, short(&reason))),
            }
            return true;
        }
        false
    }

    /// The model that is being loaded.
    pub(super) fn name_of(&self, id: LoadId) -> Option<&str> {
        let is_it = |change: &Change| matches!(change.work, Work::Load { load, .. } if load == id);
        self.under_way.iter().find(|(_, change)| is_it(change)).map(|(name, _)| name.as_str())
    }

    /// A backend has nothing left of a model.
    pub(super) fn handle_unloaded(&mut self, backend: BackendId, model: ModelId) {
        for change in self.under_way.values_mut() {
            if let Work::Unload { awaited } = &mut change.work {
                awaited.remove(&(backend, model));
            }
        }
    }

    /// A backend is gone: nothing more is expected of it.
    pub(super) fn handle_backend_left(&mut self, backend: BackendId) {
        for change in self.under_way.values_mut() {
            match &mut change.work {
                Work::Load { awaited, ready, .. } => {
                    awaited.remove(&backend);
                    ready.remove(&backend);
                }
                Work::Unload { awaited } => awaited.retain(|(other, _)| *other != backend),
            }
        }
    }

    /// A frontend is gone: nobody there waits any more. What was begun goes on.
    pub(super) fn handle_frontend_left(&mut self, frontend: FrontendId) {
        for change in self.under_way.values_mut() {
            change.waiters.retain(|(waiter, _)| *waiter != frontend);
            change.next.retain(|((waiter, _), _)| *waiter != frontend);
        }
    }

    /// The next change that has ended.
    pub(super) fn poll_ended(&mut self, now: Timestamp) -> Option<Ended> {
        let name = self.under_way.iter().find(|(_, change)| change.is_over(now))?.0.clone();
        let Change { waiters, work, next, give_up_at: _ } = self.under_way.remove(&name).expect("just found");
        let outcome = match work {
            Work::Load { load, awaited, ready, failure } => match reason_against(&awaited, &ready, failure) {
                Some(reason) => Outcome::LoadFailed(load, ready.into_keys().collect(), reason),
                None => {
                    let known = self.known.entry(name.clone()).or_default();
                    *known = Known { loads: known.loads + 1, is_unloaded: false };
                    Outcome::Loaded(load, ready)
                }
            },
            Work::Unload { awaited } => Outcome::Unloaded(awaited.first().map(|(backend, _)| {
                format!("no request reaches it any more, but backend {} has not finished its batches", backend.0)
            })),
        };
        Some(Ended { name, waiters, outcome, next })
    }

    /// When [`Self::poll_ended`] has something to yield even if nobody answers.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        self.under_way.values().map(|change| change.give_up_at).min()
    }

    /// Whether clients have unloaded the model.
    pub(super) fn is_unloaded(&self, name: &str) -> bool {
        self.known.get(name).is_some_and(|known| known.is_unloaded)
    }

    /// A model's state, and how often it has been loaded.
    pub(super) fn state(&self, name: &str) -> (ModelState, u32) {
        let known = self.known.get(name).copied().unwrap_or_default();
        let state = match self.under_way.get(name).map(|change| &change.work) {
            Some(Work::Load { .. }) => ModelState::Loading,
            Some(Work::Unload { .. }) => ModelState::Unloading,
            None if known.is_unloaded => ModelState::Unloaded,
            None => ModelState::Serving,
        };
        (state, known.loads)
    }

    /// The models whose state a new frontend has to be told.
    pub(super) fn names(&self) -> BTreeSet<&str> {
        self.known.keys().chain(self.under_way.keys()).map(String::as_str).collect()
    }
}

impl Change {
    fn join(&mut self, waiter: Waiter, to: ModelChange) -> Asked {
        let doing = match self.work {
            Work::Load { .. } => ModelChange::Load,
            Work::Unload { .. } => ModelChange::Unload,
        };
        // Behind those who wait for its end: what they ask for comes first.
        let is_same = doing == to && self.next.is_empty();
        if (if is_same { self.waiters.len() } else { self.next.len() }) >= WAITERS_MAX {
            return Asked::Refused(format!("{WAITERS_MAX} clients wait for changes of the same model already"));
        }
        match is_same {
            true => self.waiters.push(waiter),
            false => self.next.push_back((waiter, to)),
        }
        Asked::Joined
    }

    fn is_over(&self, now: Timestamp) -> bool {
        let done = match &self.work {
            Work::Load { awaited, failure, .. } => awaited.is_empty() || failure.is_some(),
            Work::Unload { awaited } => awaited.is_empty(),
        };
        done || self.give_up_at <= now
    }
}

/// Why a load that is over changes nothing, if so.
fn reason_against(
    awaited: &BTreeSet<BackendId>,
    ready: &BTreeMap<BackendId, ModelOffer>,
    failure: Option<String>,
) -> Option<String> {
    let silent = || awaited.first().map(|backend| format!("backend {} took more than {LOAD_WAIT}", backend.0));
    let nowhere =
        || ready.is_empty().then(|| "no backend hosts it: there is none, or placement excludes it".to_owned());
    failure.or_else(silent).or_else(nowhere)
}

fn short(reason: &str) -> &str {
    &reason[..reason.floor_char_boundary(REASON_BYTES_MAX - 64)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::{LatencyProfile, Weights};

    const LOAD: (ModelChange, &str) = (ModelChange::Load, "m");
    const UNLOAD: (ModelChange, &str) = (ModelChange::Unload, "m");

    fn waiter(change: u64) -> Waiter {
        (FrontendId(1), ChangeId(change))
    }

    fn backends() -> impl Iterator<Item = BackendId> {
        [BackendId(1), BackendId(2)].into_iter()
    }

    fn offer() -> ModelOffer {
        let profile = LatencyProfile::linear(1.0, 1.0, 4).unwrap();
        let (name, version, weights) = ("m".into(), "1".into(), Weights::default());
        ModelOffer { name, version, profile, input_bytes: 8, gpu_indexes: vec![0], weights }
    }

    #[test]
    fn loads_of_one_model_are_one_and_end_when_all_backends_have() {
        let mut changes = Changes::default();
        let at = Timestamp(0);
        assert_eq!(changes.handle_asked(at, waiter(1), LOAD, backends()), Asked::Load(LoadId(0)));
        assert_eq!(changes.handle_asked(at, waiter(2), LOAD, backends()), Asked::Joined);
        assert!(changes.handle_loaded(BackendId(1), LoadId(0), LoadOutcome::Ready(offer())));
        assert!(!changes.handle_loaded(BackendId(1), LoadId(0), LoadOutcome::NotPlaced), "it has answered");
        assert_eq!(changes.poll_ended(at), None);
        assert_eq!(changes.state("m"), (ModelState::Loading, 0));
        assert!(changes.handle_loaded(BackendId(2), LoadId(0), LoadOutcome::NotPlaced));
        let ended = changes.poll_ended(at).unwrap();
        assert_eq!(ended.waiters, [waiter(1), waiter(2)]);
        assert_eq!(ended.outcome, Outcome::Loaded(LoadId(0), [(BackendId(1), offer())].into()));
        assert_eq!(changes.state("m"), (ModelState::Serving, 1));
    }

    #[test]
    fn the_opposite_change_waits_for_the_end_and_so_does_what_comes_behind_it() {
        let mut changes = Changes::default();
        let ask = |changes: &mut Changes, number, to| {
            changes.handle_asked(Timestamp(0), waiter(number), to, [BackendId(1)].into_iter())
        };
        assert_eq!(ask(&mut changes, 1, LOAD), Asked::Load(LoadId(0)));
        for (number, to) in [(2, UNLOAD), (3, LOAD), (4, LOAD)] {
            assert_eq!(ask(&mut changes, number, to), Asked::Joined);
        }
        changes.handle_asked(Timestamp(0), (FrontendId(2), ChangeId(5)), UNLOAD, backends());
        changes.handle_frontend_left(FrontendId(2));
        changes.handle_loaded(BackendId(1), LoadId(0), LoadOutcome::Ready(offer()));
        let ended = changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!(ended.waiters, [waiter(1)]);
        let expected = [(2, ModelChange::Unload), (3, ModelChange::Load), (4, ModelChange::Load)];
        assert_eq!(ended.next, expected.map(|(number, to)| (waiter(number), to)));
        // As control does it.
        let asked: Vec<Asked> =
            ended.next.into_iter().map(|((_, ChangeId(number)), to)| ask(&mut changes, number, (to, "m"))).collect();
        assert_eq!(asked, [Asked::Unload, Asked::Joined, Asked::Joined]);
        let ended = changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!((ended.waiters, ended.next.len()), (vec![waiter(2)], 2));
        assert_eq!(ask(&mut changes, 0, LOAD), Asked::Load(LoadId(1)));
        assert!((0..WAITERS_MAX as u64).all(|number| ask(&mut changes, number, UNLOAD) == Asked::Joined));
        assert!(matches!(ask(&mut changes, 999, LOAD), Asked::Refused(_)), "as many wait for the end as may");
    }

    #[test]
    fn one_backend_that_fails_or_is_silent_undoes_a_load() {
        let mut changes = Changes::default();
        changes.handle_asked(Timestamp(0), waiter(1), LOAD, backends());
        changes.handle_loaded(BackendId(1), LoadId(0), LoadOutcome::Ready(offer()));
        changes.handle_loaded(BackendId(2), LoadId(0), LoadOutcome::Failed("it is torn".into()));
        let expected = Outcome::LoadFailed(LoadId(0), [BackendId(1)].into(), "backend 2: it is torn".into());
        assert_eq!(changes.poll_ended(Timestamp(0)).unwrap().outcome, expected);
        changes.handle_asked(Timestamp(0), waiter(2), LOAD, backends());
        changes.handle_loaded(BackendId(2), LoadId(1), LoadOutcome::Ready(offer()));
        let late = changes.poll_timeout().unwrap();
        assert_eq!(changes.poll_ended(late - Span(1)), None);
        let expected = "backend 1 took more than 120.000 s".to_owned();
        let outcome = changes.poll_ended(late).unwrap().outcome;
        assert_eq!(outcome, Outcome::LoadFailed(LoadId(1), [BackendId(2)].into(), expected));
        assert!(!changes.handle_loaded(BackendId(1), LoadId(1), LoadOutcome::Ready(offer())), "too late");
        assert_eq!(changes.state("m"), (ModelState::Serving, 0));
    }

    #[test]
    fn an_unload_waits_for_those_who_were_told_and_are_there() {
        let mut changes = Changes::default();
        assert_eq!(changes.handle_asked(Timestamp(0), waiter(1), UNLOAD, backends()), Asked::Unload);
        changes.handle_withdrawn("m", backends().map(|backend| (backend, ModelId(0))));
        assert!(changes.is_unloaded("m"));
        changes.handle_unloaded(BackendId(1), ModelId(0));
        assert_eq!(changes.poll_ended(Timestamp(0)), None);
        changes.handle_backend_left(BackendId(2));
        assert_eq!(changes.poll_ended(Timestamp(0)).unwrap().outcome, Outcome::Unloaded(None));
        assert_eq!(changes.state("m"), (ModelState::Unloaded, 0));
        changes.handle_asked(Timestamp(0), waiter(1), UNLOAD, backends());
        changes.handle_withdrawn("m", [(BackendId(7), ModelId(0))]);
        let late = changes.poll_timeout().unwrap();
        let Outcome::Unloaded(Some(reason)) = changes.poll_ended(late).unwrap().outcome else { panic!() };
        assert!(reason.contains("backend 7"), "{reason}");
    }

    #[test]
    fn a_load_without_backends_fails_and_a_lost_frontend_is_not_answered() {
        let mut changes = Changes::default();
        changes.handle_asked(Timestamp(0), waiter(1), LOAD, [].into_iter());
        changes.handle_frontend_left(FrontendId(1));
        let Ended { waiters, outcome, .. } = changes.poll_ended(Timestamp(0)).unwrap();
        assert!(waiters.is_empty());
        let Outcome::LoadFailed(_, _, reason) = outcome else { panic!() };
        assert!(reason.starts_with("no backend hosts it"), "{reason}");
    }
}
