//! Step 5 for tasks that have no objective: they get a GPU that no candidate needs before they are done with it, oldest
//! first (Clockwork, section 6.4: batch clients must not cost latency-sensitive ones their deadlines).
//!
//! Deferred batches leave GPUs idle until their windows open, so that a GPU is idle says little. What is looked at is
//! when models will *claim* one: a candidate when its window opens, earlier if it grows to the usual size until then; a
//! model without one as soon as a request that comes the next moment must start; and each of them again every so often
//! as it has of late. Claims take the other GPUs, as these free; the first that finds none is the end of the batch.
//! What is granted is the free GPU with the largest id, as candidates take the smallest.
//!
//! Where objectives are short and a task without one is long, there may never be so much time. So once in
//! [`INDULGENCE`] the oldest task, if it has waited for longer, runs if only no candidate that is known is late for it.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
};

use proto::{GpuId, ModelId, Span, Timestamp};

use super::RankThread;
use crate::messages::Background;

/// Weight of the newest in the average time between a model's batches.
const INTERVAL_WEIGHT: f64 = 1.0 / 32.0;
/// A model claims GPUs more often than it has on average: arrivals are random.
const CLAIMS_FACTOR: f64 = 0.7;
/// GPUs that claims are shared out among; a GPU behind all these is granted until the next claim.
const GPUS_LOOKED_AT: usize = 64;
/// They are looked at so often, and whenever one frees.
const LOOK_INTERVAL: Span = Span::from_millis(1);
/// After so long a wait, and so long after the last time, claims are not foreseen.
const INDULGENCE: Span = Span::from_millis(10_000);
/// A model that has had no batch for so many average intervals, and for [`INDULGENCE`], claims none, like one that was
/// never asked for: of requests that come at random one pause in 3,000 is as long.
const INTERVALS_SILENT: f64 = 8.0;

/// What is known of a model's batches of tasks with an objective.
#[derive(Debug)]
pub(super) struct Demand {
    /// As [`Candidate::patience`](crate::Candidate::patience); endless before its first batch.
    pub(super) patience: Span,
    last_at: Timestamp,
    interval_ns: f64,
    /// Grants of its candidates that its ModelThread has not answered: what these leave is not known yet.
    unanswered: u32,
}

/// A model that was never asked for.
impl Default for Demand {
    fn default() -> Self {
        Self {
            patience: Span::ENDLESS,
            last_at: Timestamp::PAST,
            interval_ns: INDULGENCE.as_nanos() as f64,
            unanswered: 0,
        }
    }
}

impl Demand {
    pub(super) fn handle_granted(&mut self, now: Timestamp) {
        let interval_ns = ((now - self.last_at).as_nanos() as f64).min(INDULGENCE.as_nanos() as f64);
        self.interval_ns += INTERVAL_WEIGHT * (interval_ns - self.interval_ns);
        self.last_at = now;
        self.unanswered += 1;
    }

    pub(super) fn handle_answered(&mut self) {
        self.unanswered -= 1;
    }

    /// Whether nobody seems to ask for it any more.
    fn is_over(&self, now: Timestamp) -> bool {
        let silent_ns = (now - self.last_at).as_nanos() as f64;
        silent_ns > (INTERVALS_SILENT * self.interval_ns).max(INDULGENCE.as_nanos() as f64)
    }
}

/// Tasks without an objective that wait for GPUs.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// By model id.
    models: Vec<Model>,
    /// Models with such tasks, by when their oldest one was queued.
    by_age: BTreeSet<(Timestamp, ModelId)>,
    /// When GPUs are looked at again; `None` for at once.
    look_at: Option<Timestamp>,
}

#[derive(Debug, Default)]
struct Model {
    background: Option<Background>,
    /// Grants of the model's whole life, modulo 2^32.
    grants: u32,
}

impl Waiting {
    /// When GPUs are to be looked at for what waits.
    pub(super) fn looks_at(&self) -> Option<Timestamp> {
        (!self.by_age.is_empty()).then_some(self.look_at.unwrap_or(Timestamp::PAST))
    }

    /// Models with such tasks, oldest first.
    pub(super) fn ids(&self) -> impl Iterator<Item = ModelId> {
        self.by_age.iter().map(|&(_, id)| id)
    }

    fn set(&mut self, id: ModelId, background: Option<Background>) {
        if self.models.len() <= id.0 as usize {
            self.models.resize_with(id.0 as usize + 1, Model::default);
        }
        let former = std::mem::replace(&mut self.models[id.0 as usize].background, background);
        if let Some(former) = former {
            self.by_age.remove(&(former.since, id));
        }
        if let Some(Background { since, .. }) = background {
            self.by_age.insert((since, id));
            self.look_at = None;
        }
    }

    /// Another ModelThread owns the model from now on, and counts its grants anew.
    pub(super) fn remove(&mut self, id: ModelId) {
        self.set(id, None);
        self.models[id.0 as usize].grants = 0;
    }
}

/// A GPU of a sub-cluster that tasks without an objective may have.
#[derive(Debug, Clone, Copy)]
struct Spare {
    gpu: GpuId,
    /// From here on it is needed.
    until: Timestamp,
    is_indulged: bool,
}

impl RankThread {
    /// Takes in what waits of a model without an objective.
    pub fn handle_background(&mut self, id: ModelId, background: Option<Background>) {
        self.model_mut(id);
        let grants = self.background.models.get(id.0 as usize).map_or(0, |model| model.grants);
        if background.is_some_and(|background| background.grants_seen != grants) {
            return;
        }
        self.background.set(id, background);
        self.loader.handle_background(id, background.map(|background| background.since));
    }

    /// Grants what GPUs can be spared, to the oldest tasks that they are of use to.
    pub(super) fn grant_background(&mut self, now: Timestamp) {
        let waiting: Vec<ModelId> = self.background.by_age.iter().map(|&(_, id)| id).collect();
        for id in waiting {
            let background = self.background.models[id.0 as usize].background.expect("it waits");
            // What is free by the time that all inputs are there may be busy until then; if that is too late for one
            // task, what is free sooner may do.
            let soonest = now + self.delay(id, 1);
            let found = [background.size, 1].into_iter().find_map(|size| {
                let free_by = now + self.delay(id, size);
                self.models[id.0 as usize].hosts.iter().find_map(|&(host, _)| {
                    let spare = self.spare(now, host, (free_by, soonest), background)?;
                    Some((host, spare))
                })
            });
            if let Some((host, spare)) = found {
                self.on_background_match(now, (id, host), spare);
            }
        }
        self.background.look_at = Some(self.looks_again_at(now));
    }

    /// The GPU of a sub-cluster that is free by an instant and can be spared for a batch, which starts at `soonest`, if
    /// one can for long enough. How large the batch is its ModelThread decides, by the end.
    fn spare(
        &self,
        now: Timestamp,
        host: u32,
        (free_by, soonest): (Timestamp, Timestamp),
        background: Background,
    ) -> Option<Spare> {
        let sub_cluster = self.sub_clusters[host as usize].as_ref().expect("a host");
        if !sub_cluster.schedulable.is_empty() {
            return None;
        }
        let (position, free_at) = sub_cluster.free_times.last_free_by(free_by)?;
        let (gpu, starts_at) = (sub_cluster.gpus[position], free_at.max(soonest));
        let needed_at = |is_foreseen| self.needed_at(now, (host, position), is_foreseen);
        let is_enough = |until: &Timestamp| starts_at + background.least <= *until;
        if let Some(until) = Some(needed_at(true)).filter(is_enough) {
            return Some(Spare { gpu, until, is_indulged: false });
        }
        let is_due = now - background.since > INDULGENCE && now - sub_cluster.indulged_at > INDULGENCE;
        let until = starts_at + background.least;
        (is_due && needed_at(false) >= until).then_some(Spare { gpu, until, is_indulged: true })
    }

    /// When a candidate will need the GPU at this position of a sub-cluster, if it is free then; `NEVER` if none is
    /// foreseen. Otherwise when the candidates that are known must start at the latest.
    fn needed_at(&self, now: Timestamp, (host, position): (u32, usize), is_foreseen: bool) -> Timestamp {
        let sub_cluster = self.sub_clusters[host as usize].as_ref().expect("a host");
        let claim = |id: &ModelId| {
            let model = &self.models[id.0 as usize];
            let Demand { patience, interval_ns, unanswered, .. } = model.demand;
            let may_be_asked = is_foreseen && patience != Span::ENDLESS && !model.demand.is_over(now);
            let again = Span((interval_ns * CLAIMS_FACTOR) as i64);
            match model.candidate {
                Some(candidate) if is_foreseen => Some(Reverse((candidate.expected_at.max(now), again))),
                Some(candidate) => Some(Reverse((candidate.latest, Span::ENDLESS))),
                None if unanswered > 0 => Some(Reverse((now, again))),
                None if may_be_asked => Some(Reverse((now + patience, again))),
                None => None,
            }
        };
        let mut claims: BinaryHeap<_> = sub_cluster.models.iter().filter_map(claim).collect();
        if claims.is_empty() {
            return Timestamp::NEVER;
        }
        let mut others = sub_cluster.free_times.clone();
        others.set(position, Timestamp::NEVER);
        for _ in 0..GPUS_LOOKED_AT {
            let Some((other, free_at)) = others.earliest() else { break };
            let Some(mut next) = claims.peek_mut() else { break };
            let Reverse((at, again)) = *next;
            if free_at > at {
                break;
            }
            *next = Reverse((at + again, again));
            others.set(other, Timestamp::NEVER);
        }
        claims.peek().map_or(Timestamp::NEVER, |&Reverse((at, _))| at)
    }

    fn on_background_match(&mut self, now: Timestamp, (id, host): (ModelId, u32), spare: Spare) {
        let Spare { gpu, until, is_indulged } = spare;
        self.background.set(id, None);
        let grants = &mut self.background.models[id.0 as usize].grants;
        *grants = grants.wrapping_add(1);
        if is_indulged {
            self.sub_clusters[host as usize].as_mut().expect("a host").indulged_at = now;
        }
        self.grant(now, id, gpu, (0, Some(until)));
    }

    /// When the next GPU frees that hosts anything that waits, or soon.
    fn looks_again_at(&self, now: Timestamp) -> Timestamp {
        let ids = self.background.by_age.iter().map(|&(_, id)| id);
        let frees_at = |id: ModelId| {
            let size = self.background.models[id.0 as usize].background.map_or(1, |background| background.size);
            let hosts = self.models[id.0 as usize].hosts.iter();
            let free_times = hosts.filter_map(|&(host, _)| self.sub_clusters[host as usize].as_ref());
            let earliest = free_times.filter_map(|host| host.free_times.earliest()).map(|(_, at)| at).min();
            earliest.map(|at| at - self.delay(id, size))
        };
        let soon = now + LOOK_INTERVAL;
        ids.filter_map(frees_at).filter(|&at| at > now).min().map_or(soon, |at| at.min(soon))
    }
}

#[cfg(test)]
mod tests;
