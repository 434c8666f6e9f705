//! Loading and unloading models, as clients ask for it: one change of a model at a time, on every backend that may host
//! it, or on none.
//!
//! A load is asked of all backends and takes effect once all have it ready; if one fails, or is silent for too long,
//! all discard it and nothing has changed. An unload takes effect at once; its answer waits until backends have
//! finished what they were given. Whoever asks for a change that is under way shares its answer; whoever asks for the
//! opposite waits until it has ended.
//!
//! A copy is a load that nobody asked for, at one backend, of a model that others host: to have it where it is wanted
//! before they let it go. It is no change to clients, and gives way to whatever they ask for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proto::{
    BackendId, Brought, ChangeId, FrontendId, LoadId, ModelId, Span, Timestamp, Wait,
    backend_to_scheduler::{LoadOutcome, ModelOffer, VERSIONS_MAX},
    frontend_to_scheduler::ModelChange,
    scheduler_to_frontend::{ModelState, REASON_BYTES_MAX},
};

/// Models that may change at once.
const CHANGES_MAX: usize = 64;
/// Copies among them, at most: clients find room.
pub(super) const COPIES_MAX: usize = 16;
/// Clients that may wait for one change, and that may wait until it has ended.
const WAITERS_MAX: usize = 256;
/// Of those that wait until a change has ended, how many may bring something along.
const BROUGHT_WAITING_MAX: usize = 16;
/// Models of which it is remembered that clients changed them.
const KNOWN_MAX: usize = 65_536;
/// Of these, how many no backend has ever hosted: ensembles, or nothing at all.
const UNHOSTED_MAX: usize = 4_096;
/// Models that are served with what clients brought along.
const BROUGHT_MAX: usize = 1_024;
/// Models that clients have ever brought files of: their names are the clients' choice, and all members remember them.
const NAMES_BROUGHT_MAX: usize = 256;
/// How long backends may take to load a model and measure it.
pub(super) const LOAD_WAIT: Span = Wait::Load.bound();
/// How long backends may take to finish the batches of a model that is unloaded.
pub(super) const UNLOAD_WAIT: Span = Wait::Unload.bound();

/// Who is to be answered.
pub(super) type Waiter = (FrontendId, ChangeId);

/// All changes under way, and what became of earlier ones.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// By the model's name; at most [`CHANGES_MAX`].
    under_way: BTreeMap<String, Change>,
    /// Models that clients have changed, by name; at most [`KNOWN_MAX`].
    known: BTreeMap<String, Known>,
    /// Copies that have given way.
    given_up: VecDeque<Ended>,
    next_load: u64,
}

#[derive(Debug, Clone, Default)]
struct Known {
    loads: u32,
    is_unloaded: bool,
    /// What it is served with instead of what the repository has.
    brought: Option<Brought>,
    /// Clients have brought files of it, now or before.
    had_files: bool,
    /// Nobody hosted it when it was unloaded, and it has not been loaded since.
    is_unhosted: bool,
}

/// What clients want to become of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) to: ModelChange,
    /// Of a load: what it brings along.
    pub(super) brought: Option<Brought>,
}

#[derive(Debug)]
struct Change {
    waiters: Vec<Waiter>,
    give_up_at: Timestamp,
    work: Work,
    /// What is to be done when it has ended, in order; at most [`WAITERS_MAX`].
    next: VecDeque<(Waiter, Wish)>,
}

#[derive(Debug)]
enum Work {
    Load {
        load: LoadId,
        brought: Option<Brought>,
        /// Have not answered yet.
        awaited: BTreeSet<BackendId>,
        /// Versions that wait for their word; none of an ensemble.
        ready: BTreeMap<BackendId, Vec<ModelOffer>>,
        failure: Option<String>,
    },
    Copy {
        load: LoadId,
        to: BackendId,
        ready: Vec<ModelOffer>,
        /// Whether all versions have come, or why they will not.
        ended: Option<Result<(), String>>,
    },
    Unload {
        awaited: BTreeSet<(BackendId, ModelId)>,
    },
}

/// What became of a request for a change.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Backends are to be asked to load this instead of what the repository has.
    Load(LoadId, Option<Brought>),
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
    pub(super) next: VecDeque<(Waiter, Wish)>,
}

/// How a change ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// These are to host what they have loaded.
    Loaded(LoadId, BTreeMap<BackendId, Vec<ModelOffer>>),
    /// These are to discard what they have loaded, and so are those that are still at it.
    LoadFailed(LoadId, BTreeSet<BackendId>, String),
    /// It is gone, or, if there is a reason, perhaps not everywhere yet.
    Unloaded(Option<String>),
    /// This backend is to host what it has loaded.
    Copied(LoadId, BackendId, Vec<ModelOffer>),
    /// This backend is to discard what it has loaded, or is still at.
    NotCopied(LoadId, BackendId, String),
}

impl Changes {
    /// A client asks for a change, or, without a waiter, the scheduler itself. `backends` are all that obey.
    pub(super) fn handle_asked(
        &mut self,
        now: Timestamp,
        waiter: Option<Waiter>,
        (wish, name): (Wish, &str),
        backends: impl Iterator<Item = BackendId>,
    ) -> Asked {
        self.give_up_copy(name);
        if let Some(change) = self.under_way.get_mut(name) {
            return waiter.map_or(Asked::Joined, |waiter| change.join(waiter, wish));
        }
        if self.under_way.len() >= CHANGES_MAX {
            return Asked::Refused(format!("{CHANGES_MAX} models are being loaded or unloaded; try again"));
        }
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(name) {
            return Asked::Refused(format!("clients have changed {KNOWN_MAX} models, and no more are kept track of"));
        }
        if let Some(brought) = &wish.brought
            && let Some(reason) = self.reason_against(name, brought)
        {
            return Asked::Refused(reason);
        }
        let (work, give_up_at, asked) = match wish.to {
            ModelChange::Load => {
                let load = LoadId(self.next_load);
                self.next_load += 1;
                let (awaited, ready) = (backends.collect(), BTreeMap::new());
                // As in Triton: what a model is served with it keeps until it is unloaded, or told another one.
                let brought = wish.brought.or_else(|| self.brought(name).cloned());
                let work = Work::Load { load, brought: brought.clone(), awaited, ready, failure: None };
                (work, now + LOAD_WAIT, Asked::Load(load, brought))
            }
            ModelChange::Unload => {
                let known = self.known.entry(name.to_owned()).or_default();
                (known.is_unloaded, known.brought) = (true, None);
                (Work::Unload { awaited: BTreeSet::new() }, now + UNLOAD_WAIT, Asked::Unload)
            }
        };
        self.under_way.insert(
            name.to_owned(),
            Change { waiters: waiter.into_iter().collect(), give_up_at, work, next: VecDeque::new() },
        );
        asked
    }

    /// A backend is to load a copy of a model. Yields what that is served with, if it is not what the repository has.
    /// `None` if the model is being changed, clients have unloaded it, or there are too many copies or changes.
    pub(super) fn begin_copy(
        &mut self,
        now: Timestamp,
        name: &str,
        to: BackendId,
    ) -> Option<(LoadId, Option<Brought>)> {
        let is_full = self.under_way.len() >= CHANGES_MAX || self.copies().count() >= COPIES_MAX;
        if is_full || self.under_way.contains_key(name) || self.is_unloaded(name) {
            return None;
        }
        let load = LoadId(self.next_load);
        self.next_load += 1;
        let work = Work::Copy { load, to, ready: Vec::new(), ended: None };
        let change = Change { waiters: Vec::new(), give_up_at: now + LOAD_WAIT, work, next: VecDeque::new() };
        self.under_way.insert(name.to_owned(), change);
        Some((load, self.brought(name).cloned()))
    }

    /// Copies that are under way, and where they are made.
    pub(super) fn copies(&self) -> impl Iterator<Item = (&str, BackendId)> {
        self.under_way.iter().filter_map(|(name, change)| match change.work {
            Work::Copy { to, .. } => Some((name.as_str(), to)),
            _ => None,
        })
    }

    /// Whether a model is being changed, or copied.
    pub(super) fn is_changing(&self, name: &str) -> bool {
        self.under_way.contains_key(name)
    }

    /// A copy is not wanted any more, if there is one.
    pub(super) fn give_up_copy(&mut self, name: &str) {
        let Some(Work::Copy { load, to, .. }) = self.under_way.get(name).map(|change| &change.work) else { return };
        let outcome = Outcome::NotCopied(*load, *to, "another change of it has begun".to_owned());
        self.under_way.remove(name);
        let (waiters, next) = (Vec::new(), VecDeque::new());
        self.given_up.push_back(Ended { name: name.to_owned(), waiters, outcome, next });
    }

    /// A model is to be unloaded that no backend hosts. It may be an ensemble, which frontends are told of; if it is
    /// nothing, nothing comes of it.
    ///
    /// # Errors
    /// If too many such have been.
    pub(super) fn note_unhosted(&mut self, name: &str) -> Result<(), String> {
        let is_full = || self.known.values().filter(|known| known.is_unhosted).count() >= UNHOSTED_MAX;
        if !self.known.contains_key(name) && is_full() {
            let text = "models that no backend hosts, and no more such are kept track of";
            return Err(format!("clients have unloaded {UNHOSTED_MAX} {text}"));
        }
        self.known.entry(name.to_owned()).or_insert_with(|| Known { is_unhosted: true, ..Known::default() });
        Ok(())
    }

    /// The model was withdrawn, and these backends were told.
    pub(super) fn handle_withdrawn(&mut self, name: &str, told: impl IntoIterator<Item = (BackendId, ModelId)>) {
        if let Some(Change { work: Work::Unload { awaited }, .. }) = self.under_way.get_mut(name) {
            awaited.extend(told);
        }
    }

    /// A backend has ended a load, or one version of it. False if nobody waits for it (any more): it is to be
    /// discarded.
    pub(super) fn handle_loaded(&mut self, backend: BackendId, id: LoadId, outcome: LoadOutcome) -> bool {
        for change in self.under_way.values_mut() {
            if let Work::Copy { load, to, ready, ended: ended @ None } = &mut change.work {
                if (*load, *to) == (id, backend) {
                    *ended = take_copied(ready, outcome);
                    return true;
                }
                continue;
            }
            let Work::Load { load, awaited, ready, failure, .. } = &mut change.work else { continue };
            if *load != id || !awaited.contains(&backend) {
                continue;
            }
            let mut fail = |reason: &str| *failure = Some(format!("backend {}: {}", backend.0, short(reason)));
            let is_last = match outcome {
                LoadOutcome::Ready { offer, is_last } => {
                    let versions = ready.entry(backend).or_default();
                    versions.push(offer);
                    if versions.len() > VERSIONS_MAX {
                        fail(&format!("it has loaded more than {VERSIONS_MAX} versions"));
                    }
                    is_last
                }
                LoadOutcome::NotPlaced => true,
                LoadOutcome::Ensemble => {
                    ready.entry(backend).or_default();
                    true
                }
                LoadOutcome::Failed(reason) => {
                    fail(&reason);
                    true
                }
            };
            if is_last {
                awaited.remove(&backend);
            }
            return true;
        }
        false
    }

    /// The model that is being loaded.
    pub(super) fn name_of(&self, id: LoadId) -> Option<&str> {
        let is_it =
            |change: &Change| matches!(change.work, Work::Load { load, .. } | Work::Copy { load, .. } if load == id);
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
                Work::Copy { to, ended, .. } if *to == backend => *ended = Some(Err("it has left".to_owned())),
                Work::Copy { .. } => {}
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
        if let Some(given_up) = self.given_up.pop_front() {
            return Some(given_up);
        }
        let name = self.under_way.iter().find(|(_, change)| change.is_over(now))?.0.clone();
        let Change { waiters, work, next, give_up_at } = self.under_way.remove(&name).expect("just found");
        if give_up_at <= now {
            let wait = if matches!(work, Work::Unload { .. }) { Wait::Unload } else { Wait::Load };
            wait.note_reached();
        }
        let outcome = match work {
            Work::Load { load, brought, awaited, ready, failure } => match reason_against(&awaited, &ready, failure) {
                Some(reason) => Outcome::LoadFailed(load, ready.into_keys().collect(), reason),
                None => {
                    let known = self.known.entry(name.clone()).or_default();
                    let had_files = known.had_files || brought.as_ref().is_some_and(|brought| brought.files.is_some());
                    let loads = known.loads + 1;
                    *known = Known { loads, is_unloaded: false, brought, had_files, is_unhosted: false };
                    Outcome::Loaded(load, ready)
                }
            },
            Work::Copy { load, to, ready, ended } => match ended {
                Some(Ok(())) => Outcome::Copied(load, to, ready),
                Some(Err(reason)) => Outcome::NotCopied(load, to, reason),
                None => Outcome::NotCopied(load, to, format!("it took more than {LOAD_WAIT}")),
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

    /// What a model is served with instead of what the repository has.
    pub(super) fn brought(&self, name: &str) -> Option<&Brought> {
        self.known.get(name)?.brought.as_ref()
    }

    /// Models that are served with files of clients: a backend that joins may know nothing of them.
    pub(super) fn with_files(&self) -> impl Iterator<Item = &str> {
        let has_files = |known: &Known| known.brought.as_ref().is_some_and(|brought| brought.files.is_some());
        self.known.iter().filter(move |(_, known)| has_files(known)).map(|(name, _)| name.as_str())
    }

    /// Why a model cannot be loaded with what a client brings along, if so.
    fn reason_against(&self, name: &str, brought: &Brought) -> Option<String> {
        let others = || self.known.iter().filter(|(other, _)| *other != name).map(|(_, known)| known);
        if others().filter(|known| known.brought.is_some()).count() >= BROUGHT_MAX {
            return Some(format!("{BROUGHT_MAX} models are served with what clients brought along already"));
        }
        if brought.files.is_some() && others().filter(|known| known.had_files).count() >= NAMES_BROUGHT_MAX {
            let text = "models, and no more are kept track of: use one of their names";
            return Some(format!("clients have brought files of {NAMES_BROUGHT_MAX} {text}"));
        }
        None
    }

    /// A model's state, and how often it has been loaded.
    pub(super) fn state(&self, name: &str) -> (ModelState, u32) {
        let (is_unloaded, loads) = self.known.get(name).map_or((false, 0), |known| (known.is_unloaded, known.loads));
        let changes = self.under_way.get(name).map(|change| &change.work);
        let state = match changes {
            Some(Work::Copy { .. }) | None if is_unloaded => ModelState::Unloaded,
            Some(Work::Load { .. }) => ModelState::Loading,
            Some(Work::Unload { .. }) => ModelState::Unloading,
            Some(Work::Copy { .. }) | None => ModelState::Serving,
        };
        (state, loads)
    }

    /// The models whose state a new frontend has to be told.
    pub(super) fn names(&self) -> BTreeSet<&str> {
        let changes = self.under_way.iter().filter(|(_, change)| !matches!(change.work, Work::Copy { .. }));
        self.known.keys().chain(changes.map(|(name, _)| name)).map(String::as_str).collect()
    }
}

impl Change {
    fn join(&mut self, waiter: Waiter, wish: Wish) -> Asked {
        let is_doing = match &self.work {
            Work::Load { brought, .. } => {
                wish.to == ModelChange::Load && (wish.brought.is_none() || wish.brought == *brought)
            }
            Work::Unload { .. } => wish.to == ModelChange::Unload,
            Work::Copy { .. } => unreachable!("copies give way"),
        };
        // Behind those who wait for its end: what they ask for comes first.
        let is_same = is_doing && self.next.is_empty();
        let bringing = self.next.iter().filter(|(_, wish)| wish.brought.is_some()).count();
        if !is_same && wish.brought.is_some() && bringing >= BROUGHT_WAITING_MAX {
            let text = "clients wait to load the same model with a configuration already";
            return Asked::Refused(format!("{BROUGHT_WAITING_MAX} {text}"));
        }
        if (if is_same { self.waiters.len() } else { self.next.len() }) >= WAITERS_MAX {
            return Asked::Refused(format!("{WAITERS_MAX} clients wait for changes of the same model already"));
        }
        match is_same {
            true => self.waiters.push(waiter),
            false => self.next.push_back((waiter, wish)),
        }
        Asked::Joined
    }

    fn is_over(&self, now: Timestamp) -> bool {
        let done = match &self.work {
            Work::Load { awaited, failure, .. } => awaited.is_empty() || failure.is_some(),
            Work::Copy { ended, .. } => ended.is_some(),
            Work::Unload { awaited } => awaited.is_empty(),
        };
        done || self.give_up_at <= now
    }
}

/// One version of a copy, or its failure, has come. Yields how the copy ended, if it has.
fn take_copied(ready: &mut Vec<ModelOffer>, outcome: LoadOutcome) -> Option<Result<(), String>> {
    match outcome {
        LoadOutcome::Ready { .. } if ready.len() >= VERSIONS_MAX => {
            Some(Err(format!("it has loaded more than {VERSIONS_MAX} versions")))
        }
        LoadOutcome::Ready { offer, is_last } => {
            ready.push(offer);
            is_last.then_some(Ok(()))
        }
        LoadOutcome::NotPlaced => Some(Err("its configuration excludes it".to_owned())),
        LoadOutcome::Ensemble => Some(Err("it is an ensemble there".to_owned())),
        LoadOutcome::Failed(reason) => Some(Err(short(&reason).to_owned())),
    }
}

/// Why a load that is over changes nothing, if so.
fn reason_against(
    awaited: &BTreeSet<BackendId>,
    ready: &BTreeMap<BackendId, Vec<ModelOffer>>,
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
    use proto::{FilesDigest, LatencyProfile, Weights};

    const LOAD: (Wish, &str) = (Wish { to: ModelChange::Load, brought: None }, "m");
    const UNLOAD: (Wish, &str) = (Wish { to: ModelChange::Unload, brought: None }, "m");

    fn waiter(change: u64) -> Waiter {
        (FrontendId(1), ChangeId(change))
    }

    fn brought(config: &str) -> Option<Brought> {
        Some(Brought { config: config.to_owned(), files: None })
    }

    fn with(config: &str) -> (Wish, &str) {
        (Wish { to: ModelChange::Load, brought: brought(config) }, "m")
    }

    fn backends() -> impl Iterator<Item = BackendId> {
        [BackendId(1), BackendId(2)].into_iter()
    }

    fn offer() -> ModelOffer {
        let profile = LatencyProfile::linear(1.0, 1.0, 4).unwrap();
        let (name, version, weights) = ("m".into(), "1".into(), Weights::default());
        let (gpu_indexes, queue_max) = (vec![0], Vec::new());
        ModelOffer {
            name,
            version,
            profile,
            input_bytes: 8,
            gpu_indexes,
            weights,
            cost: None,
            queue_max,
            is_guest: false,
        }
    }

    fn ready(is_last: bool) -> LoadOutcome {
        LoadOutcome::Ready { offer: offer(), is_last }
    }

    #[test]
    fn an_ensemble_is_loaded_although_no_backend_hosts_it() {
        let mut changes = Changes::default();
        let at = Timestamp(0);
        changes.handle_asked(at, Some(waiter(1)), LOAD, backends());
        [1, 2].into_iter().for_each(|backend| {
            assert!(changes.handle_loaded(BackendId(backend), LoadId(0), LoadOutcome::Ensemble));
        });
        let none = backends().map(|backend| (backend, Vec::new())).collect();
        assert_eq!(changes.poll_ended(at).unwrap().outcome, Outcome::Loaded(LoadId(0), none));
        assert_eq!(changes.state("m"), (ModelState::Serving, 1), "frontends read it anew");
        assert_eq!(changes.handle_asked(at, Some(waiter(1)), UNLOAD, backends()), Asked::Unload);
        assert_eq!(changes.poll_ended(at).unwrap().outcome, Outcome::Unloaded(None));
        assert_eq!(changes.state("m"), (ModelState::Unloaded, 1));
    }

    #[test]
    fn names_that_nobody_hosts_are_bounded() {
        let mut changes = Changes::default();
        let noted = (0..UNHOSTED_MAX).filter(|number| changes.note_unhosted(&number.to_string()).is_ok());
        assert_eq!(noted.count(), UNHOSTED_MAX);
        assert!(changes.note_unhosted("0").is_ok(), "it is known");
        assert!(changes.note_unhosted("m").unwrap_err().starts_with("clients have unloaded 4096 models"));
        changes.handle_asked(Timestamp(0), None, (LOAD.0, "0"), backends());
        assert!(backends().all(|backend| changes.handle_loaded(backend, LoadId(0), LoadOutcome::Ensemble)));
        changes.poll_ended(Timestamp(0)).unwrap();
        assert!(changes.note_unhosted("m").is_ok(), "it has made room");
    }

    #[test]
    fn loads_of_one_model_are_one_and_end_when_all_backends_have() {
        let mut changes = Changes::default();
        let at = Timestamp(0);
        assert_eq!(changes.handle_asked(at, Some(waiter(1)), LOAD, backends()), Asked::Load(LoadId(0), None));
        assert_eq!(changes.handle_asked(at, Some(waiter(2)), LOAD, backends()), Asked::Joined);
        assert!(changes.handle_loaded(BackendId(1), LoadId(0), ready(true)));
        assert!(!changes.handle_loaded(BackendId(1), LoadId(0), LoadOutcome::NotPlaced), "it has answered");
        assert_eq!(changes.poll_ended(at), None);
        assert_eq!(changes.state("m"), (ModelState::Loading, 0));
        assert!(changes.handle_loaded(BackendId(2), LoadId(0), LoadOutcome::NotPlaced));
        let ended = changes.poll_ended(at).unwrap();
        assert_eq!(ended.waiters, [waiter(1), waiter(2)]);
        assert_eq!(ended.outcome, Outcome::Loaded(LoadId(0), [(BackendId(1), vec![offer()])].into()));
        assert_eq!(changes.state("m"), (ModelState::Serving, 1));
    }

    #[test]
    fn the_opposite_change_waits_for_the_end_and_so_does_what_comes_behind_it() {
        let mut changes = Changes::default();
        let ask = |changes: &mut Changes, number, wish| {
            changes.handle_asked(Timestamp(0), Some(waiter(number)), wish, [BackendId(1)].into_iter())
        };
        assert_eq!(ask(&mut changes, 1, LOAD), Asked::Load(LoadId(0), None));
        for (number, to) in [(2, UNLOAD), (3, LOAD), (4, LOAD)] {
            assert_eq!(ask(&mut changes, number, to), Asked::Joined);
        }
        changes.handle_asked(Timestamp(0), Some((FrontendId(2), ChangeId(5))), UNLOAD, backends());
        changes.handle_frontend_left(FrontendId(2));
        changes.handle_loaded(BackendId(1), LoadId(0), ready(true));
        let ended = changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!(ended.waiters, [waiter(1)]);
        let expected = [(2, UNLOAD), (3, LOAD), (4, LOAD)];
        assert_eq!(ended.next, expected.map(|(number, (wish, _))| (waiter(number), wish)));
        // As control does it.
        let asked: Vec<Asked> = ended
            .next
            .into_iter()
            .map(|((_, ChangeId(number)), wish)| ask(&mut changes, number, (wish, "m")))
            .collect();
        assert_eq!(asked, [Asked::Unload, Asked::Joined, Asked::Joined]);
        let ended = changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!((ended.waiters, ended.next.len()), (vec![waiter(2)], 2));
        assert_eq!(ask(&mut changes, 0, LOAD), Asked::Load(LoadId(1), None));
        assert!((0..WAITERS_MAX as u64).all(|number| ask(&mut changes, number, UNLOAD) == Asked::Joined));
        assert!(matches!(ask(&mut changes, 999, LOAD), Asked::Refused(_)), "as many wait for the end as may");
    }

    #[test]
    fn a_backend_has_loaded_when_it_has_told_all_versions_and_tells_not_too_many() {
        let mut changes = Changes::default();
        let at = Timestamp(0);
        changes.handle_asked(at, Some(waiter(1)), LOAD, [BackendId(1)].into_iter());
        assert!(changes.handle_loaded(BackendId(1), LoadId(0), ready(false)));
        assert_eq!(changes.poll_ended(at), None, "one is to follow");
        assert!(changes.handle_loaded(BackendId(1), LoadId(0), ready(true)));
        let loaded = Outcome::Loaded(LoadId(0), [(BackendId(1), vec![offer(); 2])].into());
        assert_eq!(changes.poll_ended(at).unwrap().outcome, loaded);
        changes.handle_asked(at, Some(waiter(1)), LOAD, [BackendId(1)].into_iter());
        assert!((0..=VERSIONS_MAX).all(|_| changes.handle_loaded(BackendId(1), LoadId(1), ready(false))));
        let Outcome::LoadFailed(_, holders, reason) = changes.poll_ended(at).unwrap().outcome else { panic!() };
        assert_eq!((holders, &reason[..]), ([BackendId(1)].into(), "backend 1: it has loaded more than 64 versions"));
    }

    #[test]
    fn a_load_with_another_configuration_is_another_change_and_what_is_served_is_remembered() {
        let mut changes = Changes::default();
        let ask = |changes: &mut Changes, wish| {
            changes.handle_asked(Timestamp(0), Some(waiter(1)), wish, [BackendId(1)].into_iter())
        };
        let end = |changes: &mut Changes, load| {
            changes.handle_loaded(BackendId(1), LoadId(load), ready(true));
            changes.poll_ended(Timestamp(0)).unwrap()
        };
        assert_eq!(ask(&mut changes, with("a")), Asked::Load(LoadId(0), brought("a")));
        assert_eq!((ask(&mut changes, with("a")), changes.brought("m")), (Asked::Joined, None), "it is not loaded yet");
        assert!((0..BROUGHT_WAITING_MAX).all(|_| ask(&mut changes, with("b")) == Asked::Joined));
        assert!(matches!(ask(&mut changes, with("b")), Asked::Refused(_)));
        assert_eq!(ask(&mut changes, UNLOAD), Asked::Joined, "it brings nothing along");
        let ended = end(&mut changes, 0);
        assert_eq!((ended.waiters.len(), ended.next.len()), (2, BROUGHT_WAITING_MAX + 1));
        assert_eq!(changes.brought("m"), brought("a").as_ref());
        ask(&mut changes, with("b"));
        changes.handle_loaded(BackendId(1), LoadId(1), LoadOutcome::Failed("torn".into()));
        changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!(changes.brought("m"), brought("a").as_ref(), "nothing has changed");
        ask(&mut changes, with("b"));
        end(&mut changes, 2);
        assert_eq!(ask(&mut changes, LOAD), Asked::Load(LoadId(3), brought("b")), "it is kept ..");
        end(&mut changes, 3);
        assert_eq!(ask(&mut changes, UNLOAD), Asked::Unload);
        changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!(ask(&mut changes, LOAD), Asked::Load(LoadId(4), None), ".. until the model is unloaded");
    }

    #[test]
    fn loads_with_the_same_files_are_one_and_names_that_clients_bring_are_few() {
        let mut changes = Changes::default();
        let with_files = |name: &'static str, digest| {
            let brought = Some(Brought { config: "{}".to_owned(), files: Some(FilesDigest([digest; 32])) });
            (Wish { to: ModelChange::Load, brought }, name)
        };
        let ask = |changes: &mut Changes, wish: (Wish, &'static str)| {
            changes.handle_asked(Timestamp(0), Some(waiter(1)), wish, [BackendId(1)].into_iter())
        };
        assert!(matches!(ask(&mut changes, with_files("m", 1)), Asked::Load(..)));
        ask(&mut changes, with_files("m", 1));
        ask(&mut changes, with_files("m", 2));
        changes.handle_loaded(BackendId(1), LoadId(0), ready(true));
        let ended = changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!((ended.waiters.len(), ended.next.len()), (2, 1), "other files are another load");
        assert_eq!(changes.with_files().collect::<Vec<_>>(), ["m"]);
        for number in 1..NAMES_BROUGHT_MAX as u64 {
            let name: &'static str = format!("m{number}").leak();
            ask(&mut changes, with_files(name, 1));
            changes.handle_loaded(BackendId(1), LoadId(number), ready(true));
            changes.poll_ended(Timestamp(0)).unwrap();
        }
        let Asked::Refused(reason) = ask(&mut changes, with_files("other", 1)) else { panic!("it is one too many") };
        assert!(reason.starts_with("clients have brought files of 256 models"), "{reason}");
        assert_eq!(ask(&mut changes, (UNLOAD.0, "m7")), Asked::Unload);
        changes.poll_ended(Timestamp(0)).unwrap();
        assert_eq!(changes.with_files().count(), NAMES_BROUGHT_MAX - 1);
        assert!(matches!(ask(&mut changes, with_files("other", 1)), Asked::Refused(_)), "names are remembered");
        assert!(matches!(ask(&mut changes, with_files("m7", 1)), Asked::Load(..)), "one that is known is not another");
        let only_config = (Wish { to: ModelChange::Load, brought: brought("{}") }, "other");
        assert!(matches!(ask(&mut changes, only_config), Asked::Load(..)), "its name is the repository's");
    }

    #[test]
    fn one_backend_that_fails_or_is_silent_undoes_a_load() {
        let mut changes = Changes::default();
        changes.handle_asked(Timestamp(0), Some(waiter(1)), LOAD, backends());
        changes.handle_loaded(BackendId(1), LoadId(0), ready(true));
        changes.handle_loaded(BackendId(2), LoadId(0), LoadOutcome::Failed("it is torn".into()));
        let expected = Outcome::LoadFailed(LoadId(0), [BackendId(1)].into(), "backend 2: it is torn".into());
        assert_eq!(changes.poll_ended(Timestamp(0)).unwrap().outcome, expected);
        changes.handle_asked(Timestamp(0), Some(waiter(2)), LOAD, backends());
        changes.handle_loaded(BackendId(2), LoadId(1), ready(true));
        let late = changes.poll_timeout().unwrap();
        assert_eq!(changes.poll_ended(late - Span(1)), None);
        let expected = "backend 1 took more than 120.000 s".to_owned();
        let outcome = changes.poll_ended(late).unwrap().outcome;
        assert_eq!(outcome, Outcome::LoadFailed(LoadId(1), [BackendId(2)].into(), expected));
        assert!(!changes.handle_loaded(BackendId(1), LoadId(1), ready(true)), "too late");
        assert_eq!(changes.state("m"), (ModelState::Serving, 0));
    }

    #[test]
    fn an_unload_waits_for_those_who_were_told_and_are_there() {
        let mut changes = Changes::default();
        assert_eq!(changes.handle_asked(Timestamp(0), Some(waiter(1)), UNLOAD, backends()), Asked::Unload);
        changes.handle_withdrawn("m", backends().map(|backend| (backend, ModelId(0))));
        assert!(changes.is_unloaded("m"));
        changes.handle_unloaded(BackendId(1), ModelId(0));
        assert_eq!(changes.poll_ended(Timestamp(0)), None);
        changes.handle_backend_left(BackendId(2));
        assert_eq!(changes.poll_ended(Timestamp(0)).unwrap().outcome, Outcome::Unloaded(None));
        assert_eq!(changes.state("m"), (ModelState::Unloaded, 0));
        changes.handle_asked(Timestamp(0), Some(waiter(1)), UNLOAD, backends());
        changes.handle_withdrawn("m", [(BackendId(7), ModelId(0))]);
        let late = changes.poll_timeout().unwrap();
        let Outcome::Unloaded(Some(reason)) = changes.poll_ended(late).unwrap().outcome else { panic!() };
        assert!(reason.contains("backend 7"), "{reason}");
    }

    #[test]
    fn a_load_without_backends_fails_and_a_lost_frontend_is_not_answered() {
        let mut changes = Changes::default();
        changes.handle_asked(Timestamp(0), Some(waiter(1)), LOAD, [].into_iter());
        changes.handle_frontend_left(FrontendId(1));
        let Ended { waiters, outcome, .. } = changes.poll_ended(Timestamp(0)).unwrap();
        assert!(waiters.is_empty());
        let Outcome::LoadFailed(_, _, reason) = outcome else { panic!() };
        assert!(reason.starts_with("no backend hosts it"), "{reason}");
    }
}
