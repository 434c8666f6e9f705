//! Which sub-cluster hosts which model, decided anew every epoch and carried out while requests are served (Symphony,
//! sections 3.5 and 4.4, appendix A.1).
//!
//! Backends whose configuration says `placement = "auto"` are dealt to sub-clusters. Each hosts everything when it
//! comes; what it hosts from then on is said here. A model has a *home*, the sub-cluster whose backends all host it.
//! Once in an epoch a [`Search`] looks for better homes, a slice at a time, so that whoever drives it is never held up.
//! It moves at most `moves_max` models. They move one after the other: first all backends of the new home load the
//! model, then, once planners have it on all of these, the others let it go. If a load fails the model stays where it
//! was. What cannot be placed is said once, and the former placement stays.
//!
//! A model that nobody hosts any more, as all of its sub-cluster has gone, gets another home at once. That is no move:
//! no bound could save it.
//!
//! Whenever something has changed, and before each search, it goes round all models, a slice at a time too, and asks
//! of each where it is ([`Whereabouts`]): at thousands of models on dozens of backends that is a tenth of a second. It
//! yields [`Order`]s. No IO and no clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use placement::{Model, Pin, PlacementError, Problem, Search};
use proto::{BackendId, Span, Timestamp};

/// Steps of a search at a time: a tenth of a millisecond or less.
const SLICE_STEPS: u64 = 64;
/// Backends times models that are looked at at a time: about as long. Few in tests, where rounds are to have slices.
const SLICE_PLACES: usize = if cfg!(test) { 24 } else { 256 };
const SLICE_EVERY: Span = Span::from_millis(1);
/// Steps of a whole search: for each model, and within bounds.
const MODEL_STEPS: u64 = 512;
const STEPS: (u64, u64) = (16_384, 1 << 19);
/// The objective, a sum of deviations in parts of their means, must fall by this for models to move.
const GAIN_MIN: f64 = 0.02;

/// The table `placement` of a scheduler's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacementConfig {
    /// Sub-clusters that backends are dealt to; at least 1.
    pub sub_clusters: u16,
    /// From one search to the next.
    pub epoch: Span,
    /// Models that may move in an epoch; at least 1.
    pub moves_max: u32,
    /// Requests a second that a sub-cluster takes at most.
    pub rate_max_rps: Option<f64>,
    /// Bytes of weights that a sub-cluster hosts at most.
    pub memory_max_bytes: Option<u64>,
    /// What an imbalance of memory weighs beside one of rates.
    pub memory_weight: f64,
    /// Models that must be in a sub-cluster, from 0.
    pub pins: BTreeMap<String, u16>,
}

impl PlacementConfig {
    /// What is to be searched, for these sub-clusters and models. Pins of others are left out: models come and go.
    ///
    /// # Errors
    /// If a model is pinned to a sub-cluster that is none of these.
    pub fn problem(&self, sub_clusters: &[u16], models: Vec<Model>) -> Result<Problem, PlacementError> {
        let names: BTreeSet<&str> = models.iter().map(|model| model.name.as_str()).collect();
        let known = self.pins.iter().filter(|(model, _)| names.contains(model.as_str()));
        let pin = |(model, cluster): (&String, &u16)| match sub_clusters.iter().position(|other| other == cluster) {
            Some(sub_cluster) => Ok(Pin { model: model.clone(), sub_cluster }),
            None => Err(PlacementError {
                key: format!("pins.{model}"),
                found: format!("sub-cluster {cluster}, which has no backend"),
                expected: "one that has".to_owned(),
            }),
        };
        let pins = known.map(pin).collect::<Result<_, _>>()?;
        let problem = Problem {
            rate_max_rps: self.rate_max_rps,
            memory_max_bytes: self.memory_max_bytes,
            memory_weight: self.memory_weight,
            disruption_max: Some(self.moves_max.into()),
            pins,
            ..Problem::new(sub_clusters.len(), models)
        };
        Ok(problem.with_idle_models())
    }

    /// What is to be said of pins of models that are none of these.
    #[must_use]
    pub fn pins_in_vain(&self, models: &[Model]) -> Vec<PlacementError> {
        let names: BTreeSet<&str> = models.iter().map(|model| model.name.as_str()).collect();
        let unknown = self.pins.keys().filter(|model| !names.contains(model.as_str()));
        let error = |model: &String| PlacementError {
            key: format!("pins.{model}"),
            found: "no such model".to_owned(),
            expected: "the name of a model that is served".to_owned(),
        };
        unknown.map(error).collect()
    }
}

/// Who knows what there is to place, and where it is.
pub(crate) trait Whereabouts {
    /// Backends that are ours to choose for, are used and are to stay.
    fn backends(&self) -> BTreeMap<BackendId, Seat>;
    /// All models, ours to place or not; ascending.
    fn names(&self) -> Vec<&str>;
    /// Where a model is, if it is ours to place: some of our backends host it, or nobody does any more.
    fn seen(&self, name: &str) -> Option<Seen>;
    /// Requests a second for a model.
    fn rate_rps(&self, name: &str) -> f64;
}

/// A backend's place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seat {
    /// The sub-cluster that it is in, if any has been chosen.
    pub(crate) sub_cluster: Option<u16>,
    /// GPUs that work.
    pub(crate) gpus: u32,
}

/// A model, in all its versions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) rate_rps: f64,
    /// What it takes in memory, if that is short.
    pub(crate) bytes: u64,
    /// Of our backends, those that host it.
    pub(crate) hosts: BTreeSet<BackendId>,
    /// Of these, those where planners have it.
    pub(crate) planned: BTreeSet<BackendId>,
    /// Planners have it at backends that are none of ours to choose for.
    pub(crate) is_elsewhere: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    /// A backend is one of this sub-cluster from now on.
    Assign(BackendId, u16),
    /// A backend is to load a model and host it, unless the model is being changed. If it cannot,
    /// [`Placer::handle_failed`] is to be called.
    Copy(String, BackendId),
    /// Backends are to host these no more. Others do.
    LetGo(BTreeSet<(BackendId, String)>),
}

/// By sub-cluster: its backends. None is empty.
type Members = BTreeMap<u16, BTreeSet<BackendId>>;

/// Decides.
#[derive(Debug)]
pub(crate) struct Placer {
    config: PlacementConfig,
    /// Whether this scheduler is the primary, and all members obey it.
    is_on: bool,
    next_at: Timestamp,
    epochs: u64,
    round: Option<Round>,
    search: Option<Searching>,
    /// By model's name; none before the first search.
    homes: BTreeMap<String, u16>,
    /// Of the last search, those that have not ended; the first is under way.
    moves: VecDeque<Move>,
    /// Loads that have failed in this epoch.
    failed: BTreeSet<(String, BackendId)>,
    /// What was said of problems in this epoch.
    said: BTreeSet<String>,
    /// And in the last one.
    said_before: BTreeSet<String>,
    /// Something has changed since it was looked at who is there.
    is_due: bool,
    orders: VecDeque<Order>,
}

/// All models are looked at, one after the other.
#[derive(Debug)]
struct Round {
    members: Members,
    names: Vec<String>,
    /// The first of them that has not been looked at.
    next: usize,
    /// What is to be let go at the end.
    gone: BTreeSet<(BackendId, String)>,
    /// If an epoch begins with it: the models for its search.
    models: Option<Vec<Model>>,
    /// Requests a second that come to each sub-cluster, once somebody has asked.
    rates: Option<BTreeMap<u16, f64>>,
    /// Something has changed since it began: another one follows.
    is_again: bool,
    slice_at: Timestamp,
}

#[derive(Debug)]
struct Searching {
    search: Search,
    /// Of the problem's models.
    names: Vec<String>,
    /// Of the problem's sub-clusters.
    clusters: Vec<u16>,
    left: u64,
    slice_at: Timestamp,
}

/// A model that changes its home.
#[derive(Debug)]
struct Move {
    name: String,
    from: u16,
    to: u16,
    has_begun: bool,
}

impl Placer {
    /// Of a scheduler that is not the primary yet.
    pub(crate) fn new(config: PlacementConfig) -> Self {
        Self {
            config,
            is_on: false,
            next_at: Timestamp::NEVER,
            epochs: 0,
            round: None,
            search: None,
            homes: BTreeMap::new(),
            moves: VecDeque::new(),
            failed: BTreeSet::new(),
            said: BTreeSet::new(),
            said_before: BTreeSet::new(),
            is_due: false,
            orders: VecDeque::new(),
        }
    }

    /// Whether this scheduler is the primary and all members obey it. One that becomes it finds what is hosted, and
    /// changes nothing before an epoch has passed, but for models that nobody hosts.
    pub(crate) fn handle_standing(&mut self, now: Timestamp, is_on: bool) {
        if self.is_on != is_on {
            let next_at = if is_on { now + self.config.epoch } else { Timestamp::NEVER };
            *self = Self { is_on, next_at, is_due: is_on, ..Self::new(self.config.clone()) };
        }
    }

    /// What there is has changed.
    pub(crate) fn handle_changed(&mut self) {
        self.is_due = self.is_on;
    }

    /// A load that was ordered has failed.
    pub(crate) fn handle_failed(&mut self, name: &str, at: BackendId) {
        if self.is_on {
            self.failed.insert((name.to_owned(), at));
            self.is_due = true;
        }
    }

    /// When something is to be done.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        let round = self.round.as_ref().map(|round| round.slice_at);
        let search = self.search.as_ref().map(|searching| searching.slice_at);
        let look = (self.is_due && round.is_none()).then_some(Timestamp::PAST);
        let epoch = (self.is_on && round.is_none() && self.may_search()).then_some(self.next_at);
        [round, search, look, epoch].into_iter().flatten().min()
    }

    /// Moves that are under way end first.
    fn may_search(&self) -> bool {
        self.search.is_none() && self.moves.is_empty()
    }

    /// The next thing to do.
    pub(crate) fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Searches, and looks at models, if it is time.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp, world: &impl Whereabouts) {
        if !self.is_on {
            return;
        }
        self.search(now);
        if self.is_due || self.round.is_none() && self.may_search() && self.next_at <= now {
            self.look(now, world);
        }
        self.go_round(now, world);
    }

    /// Searches on.
    fn search(&mut self, now: Timestamp) {
        let Some(searching) = self.search.as_mut().filter(|searching| searching.slice_at <= now) else { return };
        searching.slice_at = now + SLICE_EVERY;
        let steps = SLICE_STEPS.min(searching.left);
        searching.left -= steps;
        if !searching.search.poll(steps) || searching.left == 0 {
            let found = self.search.take().expect("it has just gone on");
            self.take(found);
        }
    }

    /// Who is there now? A round begins, or the one that is under way goes on with these.
    fn look(&mut self, now: Timestamp, world: &impl Whereabouts) {
        self.is_due = false;
        let members = self.members(&world.backends());
        if self.search.as_ref().is_some_and(|searching| !searching.clusters.iter().eq(members.keys())) {
            // What it looks for is no placement any more.
            self.search = None;
            self.next_at = now;
        }
        if let Some(round) = &mut self.round {
            round.is_again = true;
            if round.members != members {
                (round.members, round.models, round.rates) = (members, None, None);
                round.gone.clear();
            }
            return;
        }
        self.go_on(world, &members);
        let is_epoch = self.next_at <= now && self.may_search();
        let names: BTreeSet<&str> = world.names().into_iter().chain(self.homes.keys().map(String::as_str)).collect();
        self.round = Some(Round {
            members,
            names: names.into_iter().map(str::to_owned).collect(),
            next: 0,
            gone: BTreeSet::new(),
            models: is_epoch.then(Vec::new),
            rates: None,
            is_again: false,
            slice_at: now,
        });
    }

    /// Backends by sub-cluster. One without goes where fewest GPUs are.
    fn members(&mut self, backends: &BTreeMap<BackendId, Seat>) -> Members {
        let mut gpus: BTreeMap<u16, u32> = (0..self.config.sub_clusters).map(|cluster| (cluster, 0)).collect();
        let mut members = Members::new();
        let (seated, new): (Vec<_>, Vec<_>) = backends
            .iter()
            .partition(|(_, seat)| seat.sub_cluster.is_some_and(|cluster| cluster < self.config.sub_clusters));
        for (&backend, seat) in seated.into_iter().chain(new) {
            let known = seat.sub_cluster.filter(|&cluster| cluster < self.config.sub_clusters);
            let least = || gpus.iter().min_by_key(|(_, gpus)| **gpus).map_or(0, |(&cluster, _)| cluster);
            let cluster = known.unwrap_or_else(least);
            if known.is_none() {
                self.orders.push_back(Order::Assign(backend, cluster));
            }
            *gpus.entry(cluster).or_default() += seat.gpus;
            members.entry(cluster).or_default().insert(backend);
        }
        members
    }

    /// Begins moves and ends them.
    fn go_on(&mut self, world: &impl Whereabouts, members: &Members) {
        while let Some(Move { name, from, to, has_begun }) = self.moves.front_mut() {
            if !*has_begun {
                *has_begun = true;
                self.homes.insert(name.clone(), *to);
            }
            let is_failed = |backend: &BackendId| self.failed.contains(&(name.clone(), *backend));
            match (world.seen(name), members.get(to)) {
                (Some(seen), Some(there)) if self.homes.get(name) == Some(to) && !there.iter().any(is_failed) => {
                    if !there.is_subset(&seen.planned) || !seen.hosts.is_subset(there) {
                        return;
                    }
                    tracing::info!(model = name, from = *from, to = *to, "a model has moved to another sub-cluster");
                }
                _ => {
                    tracing::warn!(
                        model = name,
                        from = *from,
                        to = *to,
                        "a model has not moved: it stays where it was"
                    );
                    if members.contains_key(from) && self.homes.get(name) == Some(to) {
                        self.homes.insert(name.clone(), *from);
                    }
                }
            }
            self.moves.pop_front();
        }
    }

    /// Looks at the models that are next.
    fn go_round(&mut self, now: Timestamp, world: &impl Whereabouts) {
        let Some(mut round) = self.round.take_if(|round| round.slice_at <= now) else { return };
        let backends: usize = round.members.values().map(BTreeSet::len).sum();
        let until = (round.next + (SLICE_PLACES / backends.max(1)).max(1)).min(round.names.len());
        for at in round.next..until {
            self.visit(&mut round, at, world);
        }
        round.next = until;
        if until < round.names.len() {
            round.slice_at = now + SLICE_EVERY;
            self.round = Some(round);
        } else {
            self.end_round(now, round);
        }
    }

    /// Looks at one model: where it is at home, who is to load it, and who is to let it go.
    fn visit(&mut self, round: &mut Round, at: usize, world: &impl Whereabouts) {
        let name = &round.names[at];
        let Some(seen) = world.seen(name) else {
            self.homes.remove(name);
            return;
        };
        let is_lost = match self.homes.get(name) {
            Some(home) => !round.members.contains_key(home),
            None => seen.hosts.is_empty() && !seen.is_elsewhere,
        };
        if is_lost {
            let rates = round.rates.get_or_insert_with(|| self.rates(&round.members, world));
            self.homes.extend(new_home(name, &seen, &round.members, rates));
        }
        let there = self.homes.get(name).and_then(|home| round.members.get(home));
        if let Some(there) = there {
            let mut missing = there.difference(&seen.hosts);
            let next = missing.find(|&&backend| !self.failed.contains(&(name.clone(), backend)));
            self.orders.extend(next.map(|&backend| Order::Copy(name.clone(), backend)));
            if there.is_subset(&seen.planned) {
                round.gone.extend(seen.hosts.difference(there).map(|&backend| (backend, name.clone())));
            }
        }
        if let Some(models) = &mut round.models {
            let index = |cluster: u16| round.members.keys().position(|&other| other == cluster);
            let former = match self.homes.get(name) {
                Some(&home) => index(home),
                None => found(&seen, &round.members).and_then(index),
            };
            let (name, rate_rps, static_bytes) = (name.clone(), seen.rate_rps, seen.bytes);
            models.push(Model { name, rate_rps, static_bytes, dynamic_bytes: 0, move_cost: 1.0, former });
        }
    }

    /// Requests a second that come to each sub-cluster.
    fn rates(&self, members: &Members, world: &impl Whereabouts) -> BTreeMap<u16, f64> {
        let mut rates: BTreeMap<u16, f64> = members.keys().map(|&cluster| (cluster, 0.0)).collect();
        for (name, cluster) in &self.homes {
            if let Some(rate) = rates.get_mut(cluster) {
                *rate += world.rate_rps(name);
            }
        }
        rates
    }

    /// All models have been looked at.
    fn end_round(&mut self, now: Timestamp, round: Round) {
        if !round.gone.is_empty() {
            self.orders.push_back(Order::LetGo(round.gone));
        }
        self.is_due |= round.is_again;
        if let Some(models) = round.models {
            self.begin(now, models, &round.members);
        }
    }

    /// An epoch begins.
    fn begin(&mut self, now: Timestamp, models: Vec<Model>, members: &Members) {
        self.next_at = now + self.config.epoch;
        self.epochs += 1;
        self.failed.clear();
        self.said_before = std::mem::take(&mut self.said);
        if members.is_empty() || models.is_empty() {
            return;
        }
        self.config.pins_in_vain(&models).iter().for_each(|error| self.say(error, "the other models are placed"));
        let clusters: Vec<u16> = members.keys().copied().collect();
        let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
        let problem = self.config.problem(&clusters, models);
        match problem.and_then(|problem| Search::new(&problem, self.epochs)) {
            Ok(search) => {
                let left = (MODEL_STEPS * names.len() as u64).clamp(STEPS.0, STEPS.1);
                self.search = Some(Searching { search, names, clusters, left, slice_at: now });
            }
            Err(error) => self.say(&error, "models stay where they are"),
        }
    }

    /// A search has ended: models that had no home have one now, and others move if that is worth it.
    fn take(&mut self, Searching { search, names, clusters, .. }: Searching) {
        let placement = match search.best() {
            Ok(placement) => placement,
            Err(error) => return self.say(&error, "models stay where they are"),
        };
        let plan = search.plan(&placement.sub_clusters);
        let (before, after) = (plan.before, placement.score);
        let is_worth_it = before.excess > after.excess || before.objective - after.objective >= GAIN_MIN;
        let moves = if is_worth_it { &plan.moves[..] } else { &[] };
        for (model, name) in names.iter().enumerate() {
            // Whatever moves is at home where it was until its turn comes.
            let from = plan.moves.iter().find(|step| step.model == model).map(|step| step.from);
            let home = clusters[from.unwrap_or(placement.sub_clusters[model])];
            self.homes.entry(name.clone()).or_insert(home);
        }
        self.moves.extend(moves.iter().map(|step| {
            let (from, to) = (clusters[step.from], clusters[step.to]);
            Move { name: names[step.model].clone(), from, to, has_begun: false }
        }));
        let (moves, before, after) = (moves.len(), before.objective, after.objective);
        tracing::info!(moves, before, after, sub_clusters = clusters.len(), "a placement was searched for");
        self.is_due = true;
    }

    /// Says that something cannot be placed, unless it was said in the last epoch.
    fn say(&mut self, error: &PlacementError, outcome: &str) {
        let text = error.to_string();
        if !self.said_before.contains(&text) && !self.said.contains(&text) {
            tracing::warn!("placement.{text}; {outcome}");
        }
        self.said.insert(text);
    }
}

/// Another home for a model that nobody hosts any more, or whose sub-cluster has gone: where it is, or else where the
/// fewest requests come, which are counted. None if there is no sub-cluster.
fn new_home(name: &str, seen: &Seen, members: &Members, rates: &mut BTreeMap<u16, f64>) -> Option<(String, u16)> {
    let is_there = |cluster: u16| members[&cluster].intersection(&seen.hosts).next().is_some();
    let order = |one: &(&u16, &mut f64), other: &(&u16, &mut f64)| {
        is_there(*other.0).cmp(&is_there(*one.0)).then(one.1.total_cmp(other.1))
    };
    let (&sub_cluster, rate) = rates.iter_mut().min_by(order)?;
    *rate += seen.rate_rps;
    tracing::info!(model = name, sub_cluster, "the sub-cluster of a model has gone: another one hosts it");
    Some((name.to_owned(), sub_cluster))
}

/// Where a model is whose home is not known: where most backends host it. Nowhere in particular if all sub-clusters
/// do: then it costs nothing to choose any.
fn found(seen: &Seen, members: &Members) -> Option<u16> {
    if members.values().all(|there| there.is_subset(&seen.hosts)) {
        return None;
    }
    let hosts = |there: &BTreeSet<BackendId>| there.intersection(&seen.hosts).count();
    let most = members.iter().filter(|(_, there)| hosts(there) > 0);
    most.max_by_key(|(cluster, there)| (hosts(there), std::cmp::Reverse(**cluster))).map(|(&cluster, _)| cluster)
}

#[cfg(test)]
mod tests;
