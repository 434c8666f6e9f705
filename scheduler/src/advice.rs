//! How many GPUs are needed, and why (Symphony, section 3.5).
//!
//! GPUs that host the same models are a sub-cluster, and each is judged by itself: a model's load is dealt to all GPUs
//! that host it. Two things ask for GPUs:
//!
//! - *Work*: what is asked for, times the GPU time of a task in batches of the size that the price at which GPUs are
//!   paid for makes. Where batches are not held back, GPUs are busy at any load, so who is idle tells nothing. Of
//!   models without such sizes it is how long GPUs were busy; then what is left over is the paper's N f, with f the
//!   idle part.
//! - *Losses*: with a part r of the tasks lost, N GPUs should have been N / (1 - r), which are the paper's
//!   N r / (1 - r) more.
//!
//! All is averaged over a window with decay. Advice follows at once if more are needed. Fewer are said to do once
//! that was so, with some slack, for as long as a new GPU takes to come. Nothing is said before a window has passed, as
//! after a takeover.
//!
//! Control tells what ModelThreads have counted, and which GPUs there are; no planner waits for any of this.

mod shown;

use std::{collections::BTreeMap, sync::Arc};

use proto::{ModelId, Span, Timestamp};

use crate::{messages::Traffic, pricing::Load};
pub use shown::{Advice, Reason, SubCluster};

/// What was counted a window ago weighs e^-4 of what is counted now.
const DECAYS: i64 = 4;
/// Samples of one window, at most; ModelThreads report twice a second.
const SAMPLES: i64 = 60;
const SAMPLE_MIN: Span = Span::from_millis(1_000);
/// Less is no bad rate: goodput, in the paper, is what is served while no more than 1 % is lost.
const LOST_PART: f64 = 0.01;
/// Fewer lost tasks in a window tell nothing.
const LOST_MIN: f64 = 5.0;
/// Losses ask for no more GPUs than so many times those that the work takes, and one: what is lost then is not lost for
/// want of GPUs.
const LOSSES_TIMES: f64 = 4.0;
/// GPUs beyond the work that they are to do: a part of it, as no GPU is as well used as the model of it says, and a
/// multiple of its root, as that is how far chance strays (square-root staffing).
const SPARE_PART: f64 = 0.04;
const SPARE_ROOTS: f64 = 0.3;
/// Fewer are said to do once they would with so many roots of the demand more: what chance takes comes back.
const SLACK_ROOTS: f64 = 0.25;
/// Sub-clusters that are told apart; with more all GPUs count as one.
pub const SUB_CLUSTERS_MAX: usize = 64;
/// No advice is beyond.
pub const NEEDED_MAX: u32 = 1 << 20;

/// The table `advice` of a scheduler's configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdviceConfig {
    /// What happened longer ago hardly counts.
    pub window: Span,
    /// From the wish for a GPU until it serves.
    pub gpu_comes_after: Span,
    /// Milliseconds of a request's latency that a millisecond of GPU time is worth where models have no price of their
    /// own (`gpu_price` of 0).
    pub gpu_price: f64,
}

impl Default for AdviceConfig {
    fn default() -> Self {
        let minute = Span::from_millis(60_000);
        Self { window: minute, gpu_comes_after: minute, gpu_price: f64::INFINITY }
    }
}

/// What was counted of a model, of tasks with an objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Served {
    /// Tasks whose batch ended in time.
    pub in_time: u64,
    /// Tasks that were given up, had no room in their queue, or whose batch ended too late.
    pub lost: u64,
    /// How long GPUs ran its batches.
    pub busy: Span,
    /// What is asked for now, if batches are sized by a price, and anything is.
    pub traffic: Option<Traffic>,
}

impl Served {
    /// Whether there is anything to tell.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn add(&mut self, other: &Self) {
        let Self { in_time, lost, busy, traffic } = *other;
        self.in_time = self.in_time.saturating_add(in_time);
        self.lost = self.lost.saturating_add(lost);
        self.busy += busy;
        self.traffic = traffic.or(self.traffic);
    }
}

/// Of a model, or of all models of a sub-cluster, as far as its GPUs serve them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Rates {
    /// Tasks a millisecond.
    in_time: f64,
    lost: f64,
    /// GPUs that ran batches.
    busy: f64,
    /// GPUs that the tasks would keep busy at the price at which GPUs are paid for.
    work: f64,
}

impl Rates {
    fn zip(self, other: Self, of: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            in_time: of(self.in_time, other.in_time),
            lost: of(self.lost, other.lost),
            busy: of(self.busy, other.busy),
            work: of(self.work, other.work),
        }
    }

    /// Moves towards what was seen last, which has this weight.
    fn average(&mut self, seen: Self, weight: f64) {
        *self = self.zip(seen, |average, seen| average + weight * (seen - average));
    }

    fn times(self, factor: f64) -> Self {
        self.zip(self, |rate, _| rate * factor)
    }

    /// The paper's r.
    fn lost_part(&self) -> f64 {
        let all = self.in_time + self.lost;
        if all > 0.0 { self.lost / all } else { 0.0 }
    }
}

#[derive(Debug, Default)]
struct Model {
    /// Since the last sample. Its traffic is the last that was told, whenever that was.
    counted: Served,
    averages: Rates,
}

impl Model {
    fn sample(&mut self, passed_ms: f64, weight: f64, config: &AdviceConfig) {
        let Served { in_time, lost, busy, traffic } = self.counted;
        let busy = busy.as_millis_f64() / passed_ms;
        let (in_time, lost) = (in_time as f64 / passed_ms, lost as f64 / passed_ms);
        let work = traffic.map_or(busy, |traffic| (in_time + lost) * gpu_ms(&traffic, config.gpu_price));
        self.averages.average(Rates { in_time, lost, busy, work }, weight);
        self.counted = Served { traffic, ..Served::default() };
    }
}

/// The GPU time of one task, in batches that are as large as the price at which GPUs are paid for makes them.
fn gpu_ms(traffic: &Traffic, unpriced: f64) -> f64 {
    let load = Load::of(traffic, traffic.arrived_at, 1.0);
    let size = load.size(if load.gpu_price > 0.0 { load.gpu_price } else { unpriced });
    load.execution_ms(size) / size
}

/// GPUs that are to do this work.
fn with_spare(work: f64) -> f64 {
    (1.0 + SPARE_PART) * work + SPARE_ROOTS * work.max(0.0).sqrt()
}

/// GPUs that host the same models.
#[derive(Debug, Default)]
struct Group {
    /// On average, and the weight of all that it is the average of.
    gpus: f64,
    weight: f64,
    standing: Option<Standing>,
    gone_since: Option<Timestamp>,
}

/// What the GPUs of a sub-cluster should be.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Demand {
    gpus: f64,
    /// Losses ask for them, not work.
    is_for_losses: bool,
    /// So much is lost that fewer would be wrong, whatever the work is.
    is_losing: bool,
}

impl Demand {
    /// With so many GPUs on average.
    fn of(rates: &Rates, gpus: f64, window_ms: f64) -> Self {
        let for_work = with_spare(rates.work);
        let lost_part = rates.lost_part();
        let is_losing = lost_part > LOST_PART && rates.lost * window_ms >= LOST_MIN;
        let at_most = LOSSES_TIMES * for_work + 1.0;
        // N + N r / (1 - r), and at least what all of it would keep busy.
        let (served, busy) = (1.0 - lost_part, rates.busy);
        let for_losses = match is_losing {
            false => 0.0,
            true if served > 0.0 => with_spare(busy / served).max(gpus / served).min(at_most),
            true => at_most,
        };
        Self { gpus: for_work.max(for_losses), is_for_losses: for_losses > for_work, is_losing }
    }

    /// Whole ones, with so many roots of them more; at least one, as nobody would host the models otherwise.
    fn needed(&self, roots: f64) -> u32 {
        (self.gpus + roots * self.gpus.sqrt() - 1e-9).ceil().clamp(1.0, NEEDED_MAX.into()) as u32
    }
}

/// Advice that was given.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Standing {
    needed: u32,
    since: Timestamp,
    is_for_losses: bool,
    /// Since when fewer would do, and how many at most once half of the time was over in which that must be so.
    fewer: Option<(Timestamp, u32)>,
}

impl Standing {
    fn new(now: Timestamp, demand: &Demand) -> Self {
        Self { needed: demand.needed(0.0), since: now, is_for_losses: demand.is_for_losses, fewer: None }
    }

    fn handle(&mut self, now: Timestamp, demand: &Demand, config: &AdviceConfig) {
        let needed = demand.needed(0.0);
        if needed > self.needed {
            *self = Self { needed, since: now, is_for_losses: demand.is_for_losses, fewer: None };
            return;
        }
        if demand.is_losing || demand.needed(SLACK_ROOTS) >= self.needed {
            self.fewer = None;
            return;
        }
        let (since, mut most) = self.fewer.unwrap_or((now, 0));
        let lasts = config.window.max(config.gpu_comes_after);
        // Before, the average was on its way down.
        if now - since >= lasts / 2 {
            most = most.max(needed);
        }
        self.fewer = Some((since, most));
        if now - since >= lasts {
            *self = Self { needed: most, since: now, is_for_losses: false, fewer: None };
        }
    }
}

/// How many GPUs host the same models; ascending.
type SubClusters = BTreeMap<Arc<Vec<ModelId>>, u32>;

/// Works out the advice.
#[derive(Debug)]
pub struct Advisor {
    config: AdviceConfig,
    /// Since when this scheduler is the primary, if it is.
    began_at: Option<Timestamp>,
    sampled_at: Timestamp,
    /// What all averages are the average of weighs so much: less than 1 while there is little.
    weight: f64,
    /// By id.
    models: Vec<Model>,
    /// By the models that they host; ascending.
    groups: BTreeMap<Arc<Vec<ModelId>>, Group>,
    /// Since this scheduler is the primary.
    in_time: u64,
    lost: u64,
    advice: Arc<Advice>,
}

impl Advisor {
    /// Of a scheduler that is not the primary yet.
    #[must_use]
    pub fn new(config: AdviceConfig) -> Self {
        Self {
            config,
            began_at: None,
            sampled_at: Timestamp::PAST,
            weight: 0.0,
            models: Vec::new(),
            groups: BTreeMap::new(),
            in_time: 0,
            lost: 0,
            advice: Arc::new(Advice::default()),
        }
    }

    /// Whether this scheduler is the primary. One that becomes it knows nothing yet.
    pub fn handle_standing(&mut self, now: Timestamp, is_primary: bool) {
        if is_primary != self.began_at.is_some() {
            let began_at = is_primary.then_some(now);
            let advice = Arc::new(Advice { is_primary, known_in: self.config.window, ..Advice::default() });
            *self = Self { began_at, sampled_at: now, advice, ..Self::new(self.config) };
        }
    }

    /// A ModelThread has counted this since it last told.
    pub fn handle_served(&mut self, model: ModelId, served: &Served) {
        let index = model.0 as usize;
        if self.began_at.is_none() || index >= crate::MODELS_MAX {
            return;
        }
        if self.models.len() <= index {
            self.models.resize_with(index + 1, Model::default);
        }
        self.models[index].counted.add(served);
        self.in_time = self.in_time.saturating_add(served.in_time);
        self.lost = self.lost.saturating_add(served.lost);
    }

    /// Whether [`Self::handle_gpus`] is to be called.
    #[must_use]
    pub fn is_due(&self, now: Timestamp) -> bool {
        self.began_at.is_some() && now - self.sampled_at >= (self.config.window / SAMPLES).max(SAMPLE_MIN)
    }

    /// The GPUs that plans go to now, by the models that each hosts. O(models of each sub-cluster).
    pub fn handle_gpus(&mut self, now: Timestamp, gpus: impl Iterator<Item = Arc<Vec<ModelId>>>) {
        let (Some(began_at), true) = (self.began_at, now > self.sampled_at) else { return };
        let passed = now - self.sampled_at;
        self.sampled_at = now;
        let weight = 1.0 - (-((passed * DECAYS).as_millis_f64() / self.config.window.as_millis_f64())).exp();
        self.weight += weight * (1.0 - self.weight);
        self.models.iter_mut().for_each(|model| model.sample(passed.as_millis_f64(), weight, &self.config));
        let here = sub_clusters(gpus);
        let hosts = hosts(&here);
        self.note_gpus(now, (&here, &hosts), weight);
        self.tell(now, began_at, (&here, &hosts));
    }

    /// Requests with an objective that come for a model, in a second, averaged over the window; 0 while nothing is
    /// known.
    #[must_use]
    pub fn rate(&self, model: ModelId) -> f64 {
        let averages = self.models.get(model.0 as usize).map(|model| model.averages);
        let counted = averages.map_or(0.0, |averages| averages.in_time + averages.lost);
        if self.weight > 0.0 { counted / self.weight * 1_000.0 } else { 0.0 }
    }

    /// The last advice.
    #[must_use]
    pub fn advice(&self) -> Arc<Advice> {
        Arc::clone(&self.advice)
    }

    /// Which sub-clusters there are. One that has gone is needed as long as nobody else hosts what it did, and it may
    /// come back.
    fn note_gpus(&mut self, now: Timestamp, (here, hosts): (&SubClusters, &[u32]), weight: f64) {
        for models in here.keys() {
            self.groups.entry(Arc::clone(models)).or_default().gone_since = None;
        }
        let stays = self.config.window.max(self.config.gpu_comes_after);
        let is_hosted = |model: &ModelId| hosts.get(model.0 as usize).is_some_and(|&gpus| gpus > 0);
        self.groups.retain(|models, group| {
            let gpus = here.get(models).copied().unwrap_or_default();
            group.gpus += weight * (f64::from(gpus) - group.gpus);
            group.weight += weight * (1.0 - group.weight);
            if gpus > 0 {
                return true;
            }
            let since = *group.gone_since.get_or_insert(now);
            now - since < stays && group.standing.is_some() && !models.iter().all(is_hosted)
        });
        if self.groups.len() > 2 * SUB_CLUSTERS_MAX {
            self.groups.retain(|_, group| group.gone_since.is_none());
        }
    }

    fn tell(&mut self, now: Timestamp, began_at: Timestamp, (here, hosts): (&SubClusters, &[u32])) {
        let (config, window_ms) = (self.config, self.config.window.as_millis_f64());
        let known_at = began_at + config.window;
        let mut told = Vec::new();
        let mut all = Rates::default();
        let keys: Vec<_> = self.groups.keys().cloned().collect();
        for models in keys {
            let gpus = here.get(&models).copied().unwrap_or_default();
            let mut rates = Rates::default();
            for index in self.of(&models).filter(|_| gpus > 0) {
                let part = f64::from(gpus) / f64::from(hosts[index]);
                rates = rates.zip(self.models[index].averages, |sum, rate| sum + part * rate);
            }
            let rates = rates.times(1.0 / self.weight);
            all = all.zip(rates, |sum, rate| sum + rate);
            let group = self.groups.get_mut(&models).expect("just listed");
            if known_at <= now && gpus > 0 {
                let demand = Demand::of(&rates, group.gpus / group.weight, window_ms);
                group.standing.get_or_insert_with(|| Standing::new(now, &demand)).handle(now, &demand, &config);
            }
            told.push(SubCluster::new((models, gpus), &rates, group.standing.as_ref(), now));
        }
        let gpus = here.values().sum();
        self.advice = Arc::new(Advice {
            gpus,
            needed: told.iter().filter_map(|sub| sub.needed).reduce(|one, other| NEEDED_MAX.min(one + other)),
            busy: all.busy,
            work: all.work,
            lost_part: all.lost_part(),
            in_time: self.in_time,
            lost: self.lost,
            known_in: (known_at - now).max(Span::ZERO),
            gpu_comes_after: config.gpu_comes_after,
            is_primary: true,
            sub_clusters: told,
        });
    }

    /// Places of a sub-cluster's models that anything is known of.
    fn of<'a>(&self, models: &'a [ModelId]) -> impl Iterator<Item = usize> + use<'a> {
        let known = self.models.len();
        models.iter().map(|model| model.0 as usize).filter(move |&index| index < known)
    }
}

/// GPUs by the models that they host: all as one, if these are too many kinds.
fn sub_clusters(gpus: impl Iterator<Item = Arc<Vec<ModelId>>>) -> SubClusters {
    let mut found = SubClusters::new();
    // Those of one backend mostly share their list.
    let mut last: Option<(Arc<Vec<ModelId>>, u32)> = None;
    for models in gpus {
        match &mut last {
            Some((same, count)) if Arc::ptr_eq(same, &models) => *count += 1,
            _ => {
                if let Some((models, count)) = last.replace((models, 1)) {
                    *found.entry(models).or_default() += count;
                }
            }
        }
    }
    if let Some((models, count)) = last {
        *found.entry(models).or_default() += count;
    }
    if found.len() <= SUB_CLUSTERS_MAX {
        return found;
    }
    let gpus = found.values().sum();
    let mut all: Vec<ModelId> = found.keys().flat_map(|models| models.iter().copied()).collect();
    all.sort_unstable();
    all.dedup();
    BTreeMap::from([(Arc::new(all), gpus)])
}

/// By model: GPUs that host it.
fn hosts(here: &SubClusters) -> Vec<u32> {
    let models = here.keys().filter_map(|models| models.last()).map(|model| model.0 as usize + 1).max();
    let mut hosts = vec![0; models.unwrap_or_default()];
    for (models, gpus) in here {
        models.iter().for_each(|model| hosts[model.0 as usize] += gpus);
    }
    hosts
}

#[cfg(test)]
mod tests;
