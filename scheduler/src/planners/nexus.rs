//! Nexus (SOSP 2019), as Symphony's section 2.2 describes it: every ten seconds a plan says which models each GPU runs
//! and in batches of which size; requests are routed by the plan, and GPUs run their models in turn.
//!
//! The plan is Nexus's squishy bin packing (its section 6.1). A model first fills GPUs of its own, in batches of the
//! largest b with `2 l(b) <= SLO`: a request may just miss a batch and then runs in the next one. What is left of its
//! rate becomes a bin with a duty cycle: every b / rate a batch of b, with `b / rate + l(b) <= SLO`. Bins are merged as
//! long as the shorter duty cycle has room for a batch of each of their models; batches shrink with the duty cycle.
//!
//! Nexus asks for as many GPUs as the rates need. Here their number is given, so the plan is that of the largest
//! multiple of the rates that fits them: at low load all GPUs are busy with small batches, as in Symphony's Figure 2,
//! and in overload all models give up the same part. A model's SLO is the least time that its requests were given.
//! Requests of models that had no part in a plan yet go to all GPUs that hold them.

use std::collections::{BTreeMap, BTreeSet};

use proto::{GpuId, LatencyProfile, ModelId, Span, Timestamp};

use super::replicas::{self, Placement};
use crate::policy::{Gathered, View, whole_batch};

/// From one plan to the next (Symphony, section 2.2).
const EPOCH: Span = Span::from_millis(10_000);
/// The first plan is drawn up on less: until then nothing is known.
const FIRST_EPOCH: Span = Span::from_millis(1_000);
/// Steps of the search for the multiple of the rates.
const SCALE_STEPS: u32 = 30;

#[derive(Debug, Default)]
pub(super) struct Nexus {
    epoch: Option<Epoch>,
    /// By model; only models that were asked for.
    demands: BTreeMap<ModelId, Demand>,
    /// Of the last epoch that ended.
    sessions: BTreeMap<ModelId, Session>,
}

#[derive(Debug)]
struct Epoch {
    started_at: Timestamp,
    ends_at: Timestamp,
}

#[derive(Debug)]
struct Demand {
    requests: u64,
    slo: Span,
}

/// What the plan is drawn up for (Nexus calls a model with its SLO a session).
#[derive(Debug, Clone, Copy, PartialEq)]
struct Session {
    /// Requests a nanosecond.
    rate: f64,
    slo: Span,
}

/// A GPU to be.
#[derive(Debug, Clone, PartialEq)]
struct Bin {
    duty_ns: f64,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    model: ModelId,
    /// Requests a nanosecond.
    rate: f64,
    batch: usize,
}

type Profiles<'a> = &'a [Option<LatencyProfile>];

fn latency_ns(profiles: Profiles<'_>, model: ModelId, batch: usize) -> f64 {
    profiles[model.0 as usize].as_ref().expect("sessions are of known models").latency(batch).as_nanos() as f64
}

impl Bin {
    /// Of its duty cycle, the part in which the GPU is busy.
    fn occupancy(&self, profiles: Profiles<'_>) -> f64 {
        let busy: f64 = self.entries.iter().map(|entry| latency_ns(profiles, entry.model, entry.batch)).sum();
        busy / self.duty_ns
    }

    /// Both on one GPU, if there is room.
    fn merge(&self, other: &Self, profiles: Profiles<'_>) -> Option<Self> {
        let duty_ns = self.duty_ns.min(other.duty_ns);
        let shrink = |entry: &Entry| {
            let batch = ((duty_ns * entry.rate).ceil() as usize).clamp(1, entry.batch);
            Entry { batch, ..entry.clone() }
        };
        let merged = Self { duty_ns, entries: self.entries.iter().chain(&other.entries).map(shrink).collect() };
        (merged.occupancy(profiles) <= 1.0).then_some(merged)
    }
}

/// Squishy bin packing of all sessions; `None` if it takes more than `bins_max`.
fn pack(sessions: &BTreeMap<ModelId, Session>, profiles: Profiles<'_>, bins_max: usize) -> Option<Vec<Bin>> {
    let (mut bins, mut residual) = (Vec::new(), Vec::new());
    for (&model, session) in sessions {
        let profile = profiles[model.0 as usize].as_ref().expect("sessions are of known models");
        // Nexus, ScheduleSaturate.
        let batch = profile.largest_batch_within(session.slo / 2).max(1);
        let duty_ns = latency_ns(profiles, model, batch);
        let throughput = batch as f64 / duty_ns;
        let full = (session.rate / throughput).floor();
        if full > bins_max as f64 {
            return None;
        }
        let entry = Entry { model, rate: throughput, batch };
        bins.extend((0..full as usize).map(|_| Bin { duty_ns, entries: vec![entry.clone()] }));
        // Nexus, ScheduleResidue: the largest batch that is gathered and run in time.
        let rate = session.rate - full * throughput;
        let slo_ns = session.slo.as_nanos() as f64;
        let in_time = |batch: &usize| latency_ns(profiles, model, *batch) + *batch as f64 / rate <= slo_ns;
        let batch = (1..=profile.max_batch()).take_while(in_time).last().unwrap_or(1);
        // A request that must not wait for another one bounds the duty cycle itself.
        let duty_ns = (batch as f64 / rate).min((slo_ns - latency_ns(profiles, model, batch)).max(1.0));
        residual.push(Bin { duty_ns, entries: vec![Entry { model, rate, batch }] });
    }
    let saturated = bins.len();
    residual.sort_by(|one, other| other.occupancy(profiles).total_cmp(&one.occupancy(profiles)));
    for bin in residual {
        // The bin that becomes fullest.
        let merged = bins[saturated..].iter().enumerate().filter_map(|(index, host)| {
            let merged = host.merge(&bin, profiles)?;
            Some((index, merged.occupancy(profiles), merged))
        });
        match merged.max_by(|one, other| one.1.total_cmp(&other.1)) {
            Some((index, _, merged)) => bins[saturated + index] = merged,
            None if bins.len() < bins_max => bins.push(bin),
            None => return None,
        }
    }
    (bins.len() <= bins_max).then_some(bins)
}

/// The plan of the largest multiple of the rates that fits the bins.
fn pack_scaled(sessions: &BTreeMap<ModelId, Session>, profiles: Profiles<'_>, bins_max: usize) -> Vec<Bin> {
    let scaled = |scale: f64| {
        let scale = |session: &Session| Session { rate: session.rate * scale, ..*session };
        let sessions = sessions.iter().map(|(&model, session)| (model, scale(session))).collect();
        pack(&sessions, profiles, bins_max)
    };
    // Everything, even in the smallest of batches, takes so many GPUs.
    let needed: f64 = sessions.iter().map(|(&model, session)| session.rate * latency_ns(profiles, model, 1)).sum();
    let (mut low, mut high) = (0.0, LatencyProfile::MAX_BATCH as f64 * bins_max as f64 / needed);
    let mut best = Vec::new();
    for _ in 0..SCALE_STEPS {
        let middle = f64::midpoint(low, high);
        match scaled(middle) {
            Some(bins) => (low, best) = (middle, bins),
            None => high = middle,
        }
    }
    best
}

impl Nexus {
    /// Ends an epoch that is over.
    fn update_sessions(&mut self, now: Timestamp) {
        let Some(epoch) = self.epoch.as_mut().filter(|epoch| epoch.ends_at <= now) else { return };
        let length_ns = (now - epoch.started_at).as_nanos() as f64;
        *epoch = Epoch { started_at: now, ends_at: now + EPOCH };
        for (&model, demand) in &mut self.demands {
            // A model that nobody asked for in this epoch keeps a place for one request in it.
            let rate = demand.requests.max(1) as f64 / length_ns;
            self.sessions.insert(model, Session { rate, slo: demand.slo });
            demand.requests = 0;
        }
    }
}

impl replicas::Rule for Nexus {
    fn handle_arrival(&mut self, now: Timestamp, model: ModelId, objective: Span) {
        self.epoch.get_or_insert(Epoch { started_at: now, ends_at: now + FIRST_EPOCH });
        let demand = self.demands.entry(model).or_insert(Demand { requests: 0, slo: objective });
        demand.requests += 1;
        demand.slo = demand.slo.min(objective);
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        self.epoch.as_ref().map(|epoch| epoch.ends_at)
    }

    fn plan(
        &mut self,
        now: Timestamp,
        profiles: &[Option<LatencyProfile>],
        hosts: &BTreeMap<GpuId, BTreeSet<ModelId>>,
    ) -> Vec<Placement> {
        self.update_sessions(now);
        // GPUs that hold the same models share the rates of these models with other such groups by their number.
        let mut groups: BTreeMap<&BTreeSet<ModelId>, Vec<GpuId>> = BTreeMap::new();
        for (&gpu, models) in hosts {
            groups.entry(models).or_default().push(gpu);
        }
        let holders =
            |model| groups.iter().filter(|(models, _)| models.contains(&model)).map(|(_, gpus)| gpus.len()).sum();
        let mut placements = Vec::new();
        for (models, gpus) in &groups {
            let mut sessions = BTreeMap::new();
            for &model in *models {
                let Some(session) = self.sessions.get(&model) else {
                    let everywhere = |&gpu| Placement { gpu, model, batch_max: Some(f64::INFINITY), weight: 1.0 };
                    placements.extend(gpus.iter().map(everywhere));
                    continue;
                };
                let all: usize = holders(model);
                let rate = session.rate * gpus.len() as f64 / all as f64;
                sessions.insert(model, Session { rate, ..*session });
            }
            if sessions.is_empty() {
                continue;
            }
            for (bin, &gpu) in pack_scaled(&sessions, profiles, gpus.len()).iter().zip(gpus) {
                placements.extend(bin.entries.iter().map(|entry| {
                    let &Entry { model, rate, batch } = entry;
                    Placement { gpu, model, batch_max: Some(batch as f64), weight: rate }
                }));
            }
        }
        placements
    }

    /// Nexus, section 6.3: heads are given up that keep the batch below its planned size.
    fn gather(&self, view: &View<'_>, batch_max: usize) -> Gathered {
        let batch = whole_batch(view, batch_max);
        Gathered { size: batch.size.min(batch_max), ..batch }
    }

    fn latest(&self, view: &View<'_>, batch: Gathered) -> Timestamp {
        view.queue[batch.skip].deadline - view.profile.latency(batch.size)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{planners::testing::Bench, policy::Policy};

    fn sessions(list: &[(f64, i64)]) -> BTreeMap<ModelId, Session> {
        let session = |&(rps, slo_ms)| Session { rate: rps / 1e9, slo: Span::from_millis(slo_ms) };
        (0..).map(ModelId).zip(list.iter().map(session)).collect()
    }

    fn profile(alpha_ms: f64, beta_ms: f64) -> Option<LatencyProfile> {
        Some(LatencyProfile::linear(alpha_ms, beta_ms, 256).unwrap())
    }

    fn rate_of(bins: &[Bin], model: u32) -> f64 {
        let entries = bins.iter().flat_map(|bin| &bin.entries).filter(|entry| entry.model == ModelId(model));
        entries.map(|entry| entry.rate * 1e9).sum()
    }

    /// Symphony, Table 2: without coordination eight GPUs run ResNet50 in batches of 7, 4501 requests a second, and
    /// InceptionResNetV2 in batches of 3, 713 requests a second.
    #[test]
    fn table_2_without_coordination() {
        for (alpha, beta, slo_ms, batch, rps) in [(1.053, 5.072, 25, 7, 4501.0), (5.090, 18.368, 70, 3, 713.0)] {
            let bins = pack_scaled(&sessions(&[(1000.0, slo_ms)]), &[profile(alpha, beta)], 8);
            assert!(bins[..7].iter().all(|bin| bin.entries[0].batch == batch), "{bins:?}");
            assert!((rate_of(&bins, 0) / rps - 1.0).abs() < 0.01, "{}", rate_of(&bins, 0));
        }
    }

    /// l(b) = b + 5 ms. Model 0: 100 requests/s within 36 ms: b / rate + l(b) = 11 b + 5 <= 36 gives b = 2, a duty
    /// cycle of 20 ms and 7 ms of it busy. Model 1: 50 requests/s within 46 ms: 21 b + 5 gives b = 1, every 20 ms, 6 ms
    /// busy. Model 2: 200 requests/s within 18 ms: 6 b + 5 gives b = 2, every 10 ms, 7 ms busy: too much for the other
    /// two.
    #[test]
    fn bins_are_merged_by_hand() {
        let profiles = [profile(1.0, 5.0), profile(1.0, 5.0), profile(1.0, 5.0)];
        let bins = pack(&sessions(&[(100.0, 36), (50.0, 46), (200.0, 18)]), &profiles, 3).unwrap();
        let text: Vec<_> = bins
            .iter()
            .map(|bin| {
                let entries: Vec<_> = bin.entries.iter().map(|entry| (entry.model.0, entry.batch)).collect();
                (bin.duty_ns / 1e6, entries)
            })
            .collect();
        assert_eq!(text, [(10.0, vec![(2, 2)]), (20.0, vec![(0, 2), (1, 1)])]);
        assert_eq!(pack(&sessions(&[(100.0, 36), (50.0, 46), (200.0, 18)]), &profiles, 1), None);
    }

    proptest! {
        /// What Nexus's plan promises: enough throughput, and each request in a batch within its SLO.
        #[test]
        fn a_plan_keeps_every_objective(
            models in proptest::collection::vec((0.1f64..3.0, 0.1f64..10.0, 1.0f64..3000.0, 2.0f64..20.0), 1..12),
        ) {
            let profiles: Vec<_> = models.iter().map(|&(alpha, beta, ..)| profile(alpha, beta)).collect();
            let list: Vec<_> =
                models.iter().map(|&(alpha, beta, rps, part)| (rps, ((alpha + beta) * part).ceil() as i64)).collect();
            let sessions = sessions(&list);
            let bins = pack(&sessions, &profiles, 100_000).unwrap();
            for (&model, session) in &sessions {
                prop_assert!(rate_of(&bins, model.0) > session.rate * 1e9 * 0.999_999);
            }
            for bin in bins {
                prop_assert!(bin.entries.len() == 1 || bin.occupancy(&profiles) <= 1.0);
                for entry in &bin.entries {
                    let slo_ns = sessions[&entry.model].slo.as_nanos() as f64;
                    let end = bin.duty_ns + latency_ns(&profiles, entry.model, entry.batch);
                    prop_assert!(end <= slo_ns * 1.000_001, "{bin:?}");
                    prop_assert!(entry.batch as f64 >= bin.duty_ns * entry.rate * 0.999_999 || bin.entries.len() == 1);
                }
            }
        }
    }

    #[test]
    fn gpus_run_their_models_in_turn_and_give_up_heads_that_make_batches_small() {
        let mut bench = Bench::new(Policy::Nexus, 1, 2);
        for (model, deadline) in [(0, 12.0), (0, 12.0), (1, 20.0), (0, 20.0)] {
            bench.submit(0.0, model, deadline);
        }
        // Before there is a plan batches are as large as there is time for. The turn of the first model comes last.
        assert_eq!(bench.decide(0.0), ["model 1 on GPU 0 at 0: [2]"]);
        // At 6 there is no time left for two in front of 12; task 3 leaves time for all that is behind.
        assert_eq!(bench.timeout(), Some(6.0));
        assert_eq!(bench.decide(6.0), ["model 0 on GPU 0 at 6: [3]", "dropped [0]: Deadline", "dropped [1]: Deadline"]);
    }
}
