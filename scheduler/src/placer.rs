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
//! It is told what there is ([`View`]) whenever that has changed, and yields [`Order`]s. No IO and no clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use placement::{Model, Pin, PlacementError, Problem, Search};
use proto::{BackendId, Span, Timestamp};

/// Steps of a search at a time: a tenth of a millisecond or less.
const SLICE_STEPS: u64 = 64;
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
    /// What is to be searched, for so many sub-clusters, these models and these pins.
    #[must_use]
    pub fn problem(&self, sub_clusters: usize, models: Vec<Model>, pins: Vec<Pin>) -> Problem {
        Problem {
            rate_max_rps: self.rate_max_rps,
            memory_max_bytes: self.memory_max_bytes,
            memory_weight: self.memory_weight,
            disruption_max: Some(self.moves_max.into()),
            pins,
            ..Problem::new(sub_clusters, models)
        }
        .with_idle_models()
    }
}

/// What there is to place, and where it is.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// Backends that are ours to choose for, are used and are to stay.
    pub(crate) backends: BTreeMap<BackendId, Seat>,
    /// By name: models that these host, and those that nobody hosts any more.
    pub(crate) models: BTreeMap<String, Seen>,
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
    /// Of the view's backends, those that host it.
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
    search: Option<Searching>,
    /// By model's name; none before the first search.
    homes: BTreeMap<String, u16>,
    /// Of the last search, those that have not ended; the first is under way.
    moves: VecDeque<Move>,
    /// Loads that have failed in this epoch.
    failed: BTreeSet<(String, BackendId)>,
    /// What was said last of a problem.
    said: Option<String>,
    is_due: bool,
    orders: VecDeque<Order>,
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
            search: None,
            homes: BTreeMap::new(),
            moves: VecDeque::new(),
            failed: BTreeSet::new(),
            said: None,
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

    /// Whether [`Self::handle_view`] is to be called.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.is_due || self.may_search() && self.next_at <= now
    }

    /// When something is to be done.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        if self.is_due {
            return Some(Timestamp::PAST);
        }
        let next_at = (self.is_on && self.may_search()).then_some(self.next_at);
        self.search.as_ref().map(|searching| searching.slice_at).or(next_at)
    }

    /// Moves that are under way end first.
    fn may_search(&self) -> bool {
        self.search.is_none() && self.moves.is_empty()
    }

    /// The next thing to do.
    pub(crate) fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Searches on, if it is time.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        let Some(searching) = self.search.as_mut().filter(|searching| searching.slice_at <= now) else { return };
        searching.slice_at = now + SLICE_EVERY;
        let steps = SLICE_STEPS.min(searching.left);
        searching.left -= steps;
        if !searching.search.poll(steps) || searching.left == 0 {
            let found = self.search.take().expect("it has just gone on");
            self.take(found);
        }
    }

    /// What there is now.
    pub(crate) fn handle_view(&mut self, now: Timestamp, view: &View) {
        self.is_due = false;
        if !self.is_on {
            return;
        }
        let members = self.members(view);
        if self.search.as_ref().is_some_and(|searching| !searching.clusters.iter().eq(members.keys())) {
            // What it looks for is no placement any more.
            self.search = None;
            self.next_at = now;
        }
        self.homes.retain(|name, _| view.models.contains_key(name));
        self.find_homes(view, &members);
        self.go_on(view, &members);
        self.reconcile(view, &members);
        if self.next_at <= now && self.may_search() {
            self.begin(now, view, &members);
        }
    }

    /// Backends by sub-cluster. One without goes where fewest GPUs are.
    fn members(&mut self, view: &View) -> Members {
        let mut gpus: BTreeMap<u16, u32> = (0..self.config.sub_clusters).map(|cluster| (cluster, 0)).collect();
        let mut members = Members::new();
        let (seated, new): (Vec<_>, Vec<_>) = view
            .backends
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

    /// Models that nobody hosts any more, or whose sub-cluster has gone, get a home: where they are, or else where the
    /// fewest requests come.
    fn find_homes(&mut self, view: &View, members: &Members) {
        let mut rates: BTreeMap<u16, f64> = members.keys().map(|&cluster| (cluster, 0.0)).collect();
        for (name, cluster) in &self.homes {
            if let (Some(rate), Some(seen)) = (rates.get_mut(cluster), view.models.get(name)) {
                *rate += seen.rate_rps;
            }
        }
        for (name, seen) in &view.models {
            let is_lost = match self.homes.get(name) {
                Some(home) => !members.contains_key(home),
                None => seen.hosts.is_empty() && !seen.is_elsewhere,
            };
            if !is_lost {
                continue;
            }
            let is_there = |cluster: u16| members[&cluster].intersection(&seen.hosts).next().is_some();
            let best = rates
                .iter()
                .min_by(|one, other| is_there(*other.0).cmp(&is_there(*one.0)).then(one.1.total_cmp(other.1)));
            if let Some((&cluster, _)) = best {
                *rates.entry(cluster).or_default() += seen.rate_rps;
                tracing::info!(
                    model = name,
                    sub_cluster = cluster,
                    "the sub-cluster of a model has gone: another one hosts it"
                );
                self.homes.insert(name.clone(), cluster);
            }
        }
    }

    /// Begins moves and ends them.
    fn go_on(&mut self, view: &View, members: &Members) {
        while let Some(Move { name, from, to, has_begun }) = self.moves.front_mut() {
            if !*has_begun {
                *has_begun = true;
                self.homes.insert(name.clone(), *to);
            }
            let is_failed = |backend: &BackendId| self.failed.contains(&(name.clone(), *backend));
            let (seen, there) = (view.models.get(name), members.get(to));
            match (seen, there) {
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

    /// Who is to load what, and who is to let it go.
    fn reconcile(&mut self, view: &View, members: &Members) {
        let mut gone = BTreeSet::new();
        for (name, home) in &self.homes {
            let (Some(seen), Some(there)) = (view.models.get(name), members.get(home)) else { continue };
            let missing = there.difference(&seen.hosts);
            let next = missing.copied().find(|&backend| !self.failed.contains(&(name.clone(), backend)));
            self.orders.extend(next.map(|backend| Order::Copy(name.clone(), backend)));
            if there.is_subset(&seen.planned) {
                gone.extend(seen.hosts.difference(there).map(|&backend| (backend, name.clone())));
            }
        }
        if !gone.is_empty() {
            self.orders.push_back(Order::LetGo(gone));
        }
    }

    /// An epoch begins.
    fn begin(&mut self, now: Timestamp, view: &View, members: &Members) {
        self.next_at = now + self.config.epoch;
        self.epochs += 1;
        self.failed.clear();
        if members.is_empty() || view.models.is_empty() {
            return;
        }
        let clusters: Vec<u16> = members.keys().copied().collect();
        let problem = self.problem(view, members, &clusters);
        match problem.and_then(|problem| Search::new(&problem, self.epochs)) {
            Ok(search) => {
                let names: Vec<String> = view.models.keys().cloned().collect();
                let left = (MODEL_STEPS * names.len() as u64).clamp(STEPS.0, STEPS.1);
                self.search = Some(Searching { search, names, clusters, left, slice_at: now });
            }
            Err(error) => self.say(&error),
        }
    }

    fn problem(&self, view: &View, members: &Members, clusters: &[u16]) -> Result<Problem, PlacementError> {
        let index = |cluster: u16| clusters.iter().position(|&other| other == cluster);
        let former = |name: &str, seen: &Seen| match self.homes.get(name) {
            Some(&home) => index(home),
            None => found(seen, members).and_then(index),
        };
        let models = view.models.iter().map(|(name, seen)| Model {
            name: name.clone(),
            rate_rps: seen.rate_rps,
            static_bytes: seen.bytes,
            dynamic_bytes: 0,
            move_cost: 1.0,
            former: former(name, seen),
        });
        let pin = |(model, &cluster): (&String, &u16)| match index(cluster) {
            Some(sub_cluster) => Ok(Pin { model: model.clone(), sub_cluster }),
            None => Err(PlacementError {
                key: format!("pins.{model}"),
                found: format!("sub-cluster {cluster}, which has no backend"),
                expected: "one that has".to_owned(),
            }),
        };
        let pins = self.config.pins.iter().map(pin).collect::<Result<_, _>>()?;
        Ok(self.config.problem(clusters.len(), models.collect(), pins))
    }

    /// A search has ended: models that had no home have one now, and others move if that is worth it.
    fn take(&mut self, Searching { search, names, clusters, .. }: Searching) {
        let placement = match search.best() {
            Ok(placement) => placement,
            Err(error) => return self.say(&error),
        };
        self.said = None;
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

    /// Says once that something cannot be placed.
    fn say(&mut self, error: &PlacementError) {
        let text = error.to_string();
        if self.said.as_ref() != Some(&text) {
            tracing::warn!("placement.{text}; models stay where they are");
            self.said = Some(text);
        }
    }
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
