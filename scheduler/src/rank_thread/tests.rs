use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const BUDGET: NetworkBudget = NetworkBudget { ctrl: Span(2), data_per_task: Span(1), jitter: Span(0) };

fn candidate(size: u32, exec_at: i64, latest: i64, grants_seen: u32) -> Option<Candidate> {
    let latest = Timestamp(latest);
    let (exec_at, patience) = (Timestamp(exec_at), Span::ENDLESS);
    let (anywhere_at, due_at, expected_at, traffic) = (exec_at, latest, exec_at, None);
    Some(Candidate { size, exec_at, anywhere_at, latest, due_at, grants_seen, expected_at, patience, traffic })
}

fn poll_grant(rank: &mut RankThread) -> Option<Grant> {
    rank.poll_message().map(|(_, message)| match message {
        FromRankThread::Grant(grant) => grant,
        other => panic!("expected a grant, found {other:?}"),
    })
}

fn grants(rank: &mut RankThread) -> Vec<(u32, u32, i64)> {
    std::iter::from_fn(|| poll_grant(rank)).map(|grant| (grant.model.0, grant.gpu.0, grant.free_at.0)).collect()
}

fn planned(exec_at: i64, free_at: i64) -> GpuUpdate {
    GpuUpdate::Planned { exec_at: Timestamp(exec_at), free_at: Timestamp(free_at), is_certain: true }
}

fn cluster(gpus: u32, models: u32) -> RankThread {
    let mut rank = RankThread::new(BUDGET);
    for gpu in 0..gpus {
        rank.handle_gpu_joined(Timestamp(0), GpuId(gpu), (0..models).map(ModelId).collect(), None);
    }
    rank
}

#[test]
fn a_model_timer_takes_the_smallest_free_gpu_delay_before_exec_at() {
    let mut rank = cluster(2, 1);
    rank.handle_candidate(Timestamp(0), ModelId(0), candidate(3, 50, 60, 0));
    assert_eq!(rank.poll_timeout(), Some(Timestamp(45)));
    rank.handle_timeout(Timestamp(44));
    assert_eq!(grants(&mut rank), []);
    rank.handle_timeout(Timestamp(45));
    assert_eq!(grants(&mut rank), [(0, 0, 0)]);
    // A candidate that does not know of the grant consists of tasks that are gone.
    rank.handle_candidate(Timestamp(45), ModelId(0), candidate(4, 0, 60, 0));
    rank.handle_timeout(Timestamp(46));
    assert_eq!(grants(&mut rank), []);
    rank.handle_candidate(Timestamp(46), ModelId(0), candidate(1, 0, 90, 1));
    rank.handle_timeout(Timestamp(46));
    assert_eq!(grants(&mut rank), [(0, 1, 0)]);
}

/// A candidate that may start early on open GPUs.
fn early(exec_at: i64, anywhere_at: i64, latest: i64) -> Option<Candidate> {
    let anywhere_at = Timestamp(anywhere_at);
    candidate(1, exec_at, latest, 0).map(|candidate| Candidate { anywhere_at, ..candidate })
}

#[test]
fn a_batch_starts_early_on_open_gpus_only() {
    let busy = || {
        let mut rank = cluster(2, 3);
        rank.set_open(0, 1);
        rank.handle_candidate(Timestamp(0), ModelId(0), early(0, 0, 90));
        rank.handle_timeout(Timestamp(0));
        assert_eq!(grants(&mut rank), [(0, 0, 0)]);
        rank.handle_gpu(GpuId(0), planned(3, 53));
        rank.handle_candidate(Timestamp(0), ModelId(1), early(0, 43, 90));
        rank.handle_timeout(Timestamp(39));
        assert_eq!(grants(&mut rank), [], "only the other GPU is free");
        rank
    };
    let mut rank = busy();
    assert_eq!(rank.poll_timeout(), Some(Timestamp(40)));
    rank.handle_timeout(Timestamp(40));
    assert_eq!(grants(&mut rank), [(1, 1, 0)], "from its frontrun moment on it takes any");
    let mut rank = busy();
    rank.handle_gpu(GpuId(0), GpuUpdate::Finished { finished_at: Timestamp(20) });
    rank.handle_timeout(Timestamp(39));
    assert_eq!(grants(&mut rank), [(1, 0, 20)], "the open one was free sooner");
    // Once all are open nobody waits for the first.
    let mut rank = busy();
    rank.set_open(0, 2);
    rank.handle_timeout(Timestamp(39));
    assert_eq!(grants(&mut rank), [(1, 1, 0)]);
    // Of those that wait the one that is due first takes the open GPU, wherever else it could go.
    let mut rank = busy();
    rank.handle_candidate(Timestamp(39), ModelId(2), early(0, 43, 80));
    rank.handle_timeout(Timestamp(39));
    rank.handle_gpu(GpuId(0), GpuUpdate::Finished { finished_at: Timestamp(20) });
    rank.handle_timeout(Timestamp(39));
    assert_eq!(grants(&mut rank), [(2, 0, 20)]);
}

#[test]
fn prices_follow_what_is_asked_for_and_rest_when_nothing_is() {
    let at = |ms: i64| Timestamp(1_000_000 * ms);
    let traffic = |gap_us: i64, now, gpu_price| Traffic {
        gap: Span::from_micros(gap_us),
        arrived_at: now,
        fixed: Span::from_millis(5),
        per_task: Span::from_millis(1),
        target: 14,
        gpu_price,
    };
    let told = |gap_us, gpu_price| {
        let mut rank = cluster(8, 2);
        // Each price has its turn.
        for ms in 0..2_000 {
            let candidate = candidate(1, 9_000_000_000, 9_900_000_000, 0).unwrap();
            let candidate = Candidate { traffic: Some(traffic(gap_us, at(ms), gpu_price)), ..candidate };
            rank.handle_candidate(at(ms), ModelId(0), Some(candidate));
            rank.handle_timeout(at(ms));
        }
        let found = (rank.price(ModelId(0)).price, rank.sub_clusters[0].as_ref().unwrap().open);
        assert_eq!(rank.price(ModelId(1)), Price::default(), "nobody asks for it");
        rank.handle_candidate(at(2_000), ModelId(0), None);
        let mut looks = 0;
        while let Some(now) = rank.poll_timeout() {
            rank.handle_timeout(now);
            looks += 1;
        }
        assert!(looks < 1_000, "{looks} plans in silence");
        found
    };
    // At a tenth of what eight GPUs can serve, a half and twice as much.
    let prices = [1_800, 360, 90].map(|gap_us| told(gap_us, 0).0);
    assert!(prices[0] < 0.1 && prices[1] > prices[0] && prices[1].is_finite(), "{prices:?}");
    assert_eq!(prices[2], f32::INFINITY);
    let (dear, open) = told(1_800, 4_000);
    assert!(dear > 1.0 && open < 8, "{dear} {open}");
    assert_eq!(told(1_800, Traffic::ENDLESS_PRICE).0, f32::INFINITY);
}

#[test]
fn a_gpu_timer_takes_the_nearest_latest_delay_before_the_gpu_frees() {
    let mut rank = cluster(1, 3);
    rank.handle_candidate(Timestamp(0), ModelId(0), candidate(1, 0, 90, 0));
    rank.handle_timeout(Timestamp(0));
    assert_eq!(grants(&mut rank), [(0, 0, 0)]);
    rank.handle_gpu(GpuId(0), planned(3, 40));
    rank.handle_candidate(Timestamp(1), ModelId(1), candidate(4, 10, 60, 0));
    rank.handle_candidate(Timestamp(1), ModelId(2), candidate(2, 10, 50, 0));
    rank.handle_candidate(Timestamp(1), ModelId(0), candidate(2, 10, 35, 1));
    rank.handle_timeout(Timestamp(20));
    assert_eq!(grants(&mut rank), []);
    // Model 0's is nearest but can no longer be met when the GPU frees; of the others model 2's is.
    rank.handle_timeout(Timestamp(36));
    assert_eq!(grants(&mut rank), [(2, 0, 40)]);
}

#[test]
fn a_result_moves_the_free_time() {
    let mut rank = cluster(1, 1);
    rank.handle_candidate(Timestamp(0), ModelId(0), candidate(1, 0, 90, 0));
    rank.handle_timeout(Timestamp(0));
    rank.handle_gpu(GpuId(0), planned(3, 40));
    rank.handle_candidate(Timestamp(1), ModelId(0), candidate(1, 10, 80, 1));
    rank.handle_timeout(Timestamp(10));
    assert_eq!(rank.poll_timeout(), Some(Timestamp(37)));
    grants(&mut rank);
    rank.handle_gpu(GpuId(0), GpuUpdate::Finished { finished_at: Timestamp(30) });
    rank.handle_timeout(Timestamp(30));
    assert_eq!(grants(&mut rank), [(0, 0, 30)]);
}

#[test]
fn a_late_result_moves_what_is_planned_behind_it() {
    let mut rank = cluster(1, 1);
    let grant = |rank: &mut RankThread, now, seen| {
        rank.handle_candidate(Timestamp(now), ModelId(0), candidate(1, 0, 900, seen));
        rank.handle_timeout(Timestamp(now));
        grants(rank)
    };
    assert_eq!(grant(&mut rank, 0, 0), [(0, 0, 0)]);
    rank.handle_gpu(GpuId(0), planned(3, 40));
    assert_eq!(grant(&mut rank, 37, 1), [(0, 0, 40)]);
    rank.handle_gpu(GpuId(0), planned(40, 60));
    // Two plans have no result: a third must wait for one, however late it is.
    assert_eq!(grant(&mut rank, 100, 2), []);
    rank.handle_gpu(GpuId(0), GpuUpdate::Finished { finished_at: Timestamp(101) });
    rank.handle_timeout(Timestamp(117));
    assert_eq!(grants(&mut rank), []);
    rank.handle_timeout(Timestamp(118));
    assert_eq!(grants(&mut rank), [(0, 0, 121)]);
}

#[test]
fn a_gpu_that_left_is_forgotten_and_a_new_one_serves_who_waits() {
    let mut rank = cluster(1, 2);
    rank.handle_candidate(Timestamp(0), ModelId(0), candidate(1, 0, 90, 0));
    rank.handle_timeout(Timestamp(0));
    assert_eq!(grants(&mut rank).len(), 1);
    rank.handle_gpu_left(GpuId(0));
    rank.handle_gpu_left(GpuId(0));
    rank.handle_gpu(GpuId(0), planned(3, 40));
    rank.handle_candidate(Timestamp(5), ModelId(1), candidate(1, 0, 90, 0));
    rank.handle_timeout(Timestamp(5));
    assert_eq!((grants(&mut rank), rank.poll_timeout()), (vec![], None));
    rank.handle_gpu_joined(Timestamp(8), GpuId(1), vec![ModelId(0)], None);
    rank.handle_gpu_joined(Timestamp(9), GpuId(2), vec![ModelId(2), ModelId(1)], None);
    rank.handle_timeout(Timestamp(9));
    assert_eq!(grants(&mut rank), [(1, 2, 9)]);
}

/// One that waits keeps its only copy. It did so for ever if it had stopped to wait while no GPU was there.
#[test]
fn what_waited_when_the_last_gpu_left_keeps_no_place_on_the_next() {
    let mut rank = RankThread::new(BUDGET);
    (0..2).for_each(|model| rank.handle_weights(ModelId(model), Weights::new(2, Span(10))));
    let join = |rank: &mut RankThread, at, gpu| {
        let memory = GpuMemory { resident: vec![ModelId(0)], ..GpuMemory::empty(3) };
        rank.handle_gpu_joined(Timestamp(at), GpuId(gpu), vec![ModelId(0), ModelId(1)], Some(memory));
    };
    join(&mut rank, 0, 0);
    rank.handle_candidate(Timestamp(0), ModelId(0), candidate(1, 1_000, 2_000, 0));
    rank.handle_gpu_left(GpuId(0));
    rank.handle_candidate(Timestamp(10), ModelId(0), None);
    join(&mut rank, 20, 1);
    rank.handle_candidate(Timestamp(20), ModelId(1), candidate(1, 1_000, 2_000, 0));
    rank.handle_timeout(Timestamp(20));
    let said: Vec<_> = std::iter::from_fn(|| rank.poll_message()).map(|(_, message)| message).collect();
    let is_load = |said: &FromRankThread| matches!(said, FromRankThread::Load { gpu: GpuId(1), model: ModelId(1), .. });
    assert!(said.iter().any(is_load), "{said:?}");
}

#[test]
fn a_grant_tells_how_many_gpus_host_the_model() {
    let mut rank = cluster(2, 1);
    rank.handle_gpu_joined(Timestamp(0), GpuId(2), vec![ModelId(0), ModelId(1)], None);
    for (seen, gpus) in [(0, 3), (1, 2)] {
        rank.handle_candidate(Timestamp(0), ModelId(0), candidate(1, 0, 90, seen));
        rank.handle_timeout(Timestamp(0));
        assert_eq!(poll_grant(&mut rank).map(|grant| grant.gpus), Some(gpus));
        rank.handle_gpu_left(GpuId(1));
    }
}

/// Algorithm 1 by scanning everything: no trees, no heaps, no sub-clusters with indexes.
#[derive(Default)]
struct Oracle {
    models: BTreeMap<u32, OracleModel>,
    gpus: BTreeMap<u32, OracleGpu>,
    /// (hosted set, model): its candidate waits for those GPUs.
    waiting: BTreeSet<(Vec<u32>, u32)>,
    /// Hosted sets; a new one takes the first place that is empty. Of timers that are due at once the first place's
    /// goes first, which the paper leaves open.
    places: Vec<Option<Vec<u32>>>,
}

#[derive(Default)]
struct OracleModel {
    candidate: Option<Candidate>,
    timer: Option<Timestamp>,
    is_schedulable: bool,
    grants: u32,
}

struct OracleGpu {
    hosted: Vec<u32>,
    idle_since: Timestamp,
    is_granted: bool,
    plans: Vec<(Timestamp, Span)>,
}

impl OracleGpu {
    fn free_at(&self) -> Timestamp {
        self.plans.iter().fold(self.idle_since, |free, &(exec_at, length)| free.max(exec_at) + length)
    }

    fn is_available(&self) -> bool {
        !self.is_granted && self.plans.len() < 2
    }
}

impl Oracle {
    fn handle_joined(&mut self, now: Timestamp, id: u32, hosted: Vec<u32>) {
        if !self.places.contains(&Some(hosted.clone())) {
            let waiting =
                hosted.iter().filter(|model| self.models.get(model).is_some_and(|model| model.is_schedulable));
            self.waiting.extend(waiting.map(|&model| (hosted.clone(), model)));
            match self.places.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = Some(hosted.clone()),
                None => self.places.push(Some(hosted.clone())),
            }
        }
        self.gpus.insert(id, OracleGpu { hosted, idle_since: now, is_granted: false, plans: Vec::new() });
    }

    fn handle_left(&mut self, id: u32) {
        let hosted = self.gpus.remove(&id).unwrap().hosted;
        if self.gpus.values().all(|other| other.hosted != hosted) {
            self.waiting.retain(|(set, _)| *set != hosted);
            self.places.iter_mut().filter(|place| **place == Some(hosted.clone())).for_each(|place| *place = None);
        }
    }

    fn wait(&mut self, model: u32) {
        self.models.get_mut(&model).unwrap().is_schedulable = true;
        for gpu in self.gpus.values().filter(|gpu| gpu.hosted.contains(&model)) {
            self.waiting.insert((gpu.hosted.clone(), model));
        }
    }

    fn withdraw(&mut self, model: u32) {
        let entry = self.models.get_mut(&model).unwrap();
        (entry.timer, entry.is_schedulable) = (None, false);
        self.waiting.retain(|(_, other)| *other != model);
    }

    fn handle_candidate(&mut self, now: Timestamp, model: u32, candidate: Option<Candidate>) {
        let entry = self.models.entry(model).or_default();
        if candidate.is_some_and(|candidate| candidate.grants_seen != entry.grants) {
            return;
        }
        let waited = entry.is_schedulable;
        entry.candidate = candidate;
        self.withdraw(model);
        let Some(candidate) = candidate else { return };
        let fires_at = candidate.exec_at - BUDGET.delay(candidate.size as usize);
        if waited && fires_at <= now {
            self.wait(model);
        } else {
            self.models.get_mut(&model).unwrap().timer = Some(fires_at.max(now));
        }
    }

    /// The GPU timers: of each hosted set, the GPU that frees first and the waiting candidate that is due first.
    fn gpu_timers(&self) -> Vec<(Timestamp, usize, u32, u32)> {
        let of_place = |(place, set): (usize, &Option<Vec<u32>>)| {
            let set = set.as_ref()?;
            let members = self.gpus.iter().filter(|(_, gpu)| gpu.hosted == *set && gpu.is_available());
            let (&gpu, state) = members.min_by_key(|(id, gpu)| (gpu.free_at(), **id))?;
            let waiting = self.waiting.iter().filter(|(hosted, _)| hosted == set);
            let candidates = waiting.map(|&(_, model)| (self.models[&model].candidate.unwrap(), model));
            let (candidate, model) = candidates.min_by_key(|&(candidate, model)| (candidate.due_at, model))?;
            Some((state.free_at() - BUDGET.delay(candidate.size as usize), place, gpu, model))
        };
        self.places.iter().enumerate().filter_map(of_place).collect()
    }

    fn handle_timeout(&mut self, now: Timestamp) -> Vec<(u32, u32, i64)> {
        let mut granted = Vec::new();
        loop {
            let model_timers = self.models.iter().filter_map(|(&id, model)| Some((model.timer?, id)));
            let model_timer = model_timers.min().filter(|&(at, _)| at <= now);
            let gpu_timer = self.gpu_timers().into_iter().min().filter(|&(at, ..)| at <= now);
            let matched = match (model_timer, gpu_timer) {
                (None, None) => return granted,
                (Some((at, model)), gpu) if gpu.is_none_or(|(gpu_at, ..)| at < gpu_at) => {
                    self.models.get_mut(&model).unwrap().timer = None;
                    let candidate = self.models[&model].candidate.unwrap();
                    let exec_at = candidate.exec_at.max(now + BUDGET.delay(candidate.size as usize));
                    let fits =
                        |gpu: &OracleGpu| gpu.hosted.contains(&model) && gpu.is_available() && gpu.free_at() <= exec_at;
                    let gpu = self.gpus.iter().find(|(_, gpu)| fits(gpu)).map(|(&id, _)| id);
                    if gpu.is_none() {
                        self.wait(model);
                    }
                    gpu.map(|gpu| (model, gpu))
                }
                (_, Some((_, _, gpu, model))) => {
                    let candidate = self.models[&model].candidate.unwrap();
                    let start = self.gpus[&gpu].free_at().max(now + BUDGET.delay(candidate.size as usize));
                    // Line 19: the smallest id that is free then, where the timer was late for several.
                    let set = &self.gpus[&gpu].hosted;
                    let fits = |gpu: &OracleGpu| gpu.hosted == *set && gpu.is_available() && gpu.free_at() <= start;
                    let gpu = self.gpus.iter().find(|(_, gpu)| fits(gpu)).map_or(gpu, |(&id, _)| id);
                    if start > candidate.latest {
                        self.waiting.remove(&(self.gpus[&gpu].hosted.clone(), model));
                    }
                    (start <= candidate.latest).then_some((model, gpu))
                }
                (Some(_), None) => unreachable!(),
            };
            if let Some((model, gpu)) = matched {
                self.withdraw(model);
                self.models.get_mut(&model).unwrap().grants += 1;
                let state = self.gpus.get_mut(&gpu).unwrap();
                state.is_granted = true;
                granted.push((model, gpu, state.free_at().0));
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Candidate {
        model: u32,
        size: u32,
        opens_in: i64,
        window: i64,
        patience: i64,
        is_stale: bool,
    },
    NoCandidate {
        model: u32,
    },
    Join {
        hosted: Vec<u32>,
    },
    Leave {
        nth: usize,
    },
    /// Answers the oldest grant under way.
    Answer {
        execution: Option<i64>,
    },
    Finish {
        nth: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let candidate = (0u32..5, 1u32..9, -1000i64..4000, 0i64..6000, -500i64..500, proptest::bool::weighted(0.1));
    prop_oneof![
        6 => candidate.prop_map(|(model, size, opens_in, window, patience, is_stale)| Step::Candidate {
            model, size, opens_in, window, patience, is_stale
        }),
        1 => (0u32..5).prop_map(|model| Step::NoCandidate { model }),
        1 => proptest::sample::select(vec![vec![0, 1, 2, 3, 4], vec![0, 1], vec![1, 2, 3], vec![4]])
            .prop_map(|hosted| Step::Join { hosted }),
        1 => (0usize..8).prop_map(|nth| Step::Leave { nth }),
        5 => proptest::option::weighted(0.9, 500i64..5000).prop_map(|execution| Step::Answer { execution }),
        3 => (0usize..8).prop_map(|nth| Step::Finish { nth }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    /// Whatever happens, grants are those of the oracle.
    #[test]
    fn matches_as_algorithm_1_does(steps in proptest::collection::vec((step(), 1i64..1500), 1..150)) {
        let mut rank = RankThread::new(BUDGET);
        let mut oracle = Oracle::default();
        let mut now = Timestamp(0);
        let mut under_way: VecDeque<(u32, u32, i64)> = VecDeque::new();
        let mut gpus_joined = 0;
        for (step, pause) in steps {
            now += Span(pause);
            let nth_gpu = |oracle: &Oracle, nth: usize| oracle.gpus.keys().nth(nth).copied();
            match step {
                Step::Candidate { model, size, opens_in, window, patience, is_stale } => {
                    let grants = oracle.models.get(&model).map_or(0, |model| model.grants);
                    let exec_at = now.0 + opens_in;
                    let candidate = candidate(size, exec_at, exec_at + window, grants.wrapping_sub(is_stale.into()));
                    let candidate =
                        candidate.map(|candidate| Candidate { due_at: candidate.latest + Span(patience), ..candidate });
                    rank.handle_candidate(now, ModelId(model), candidate);
                    oracle.handle_candidate(now, model, candidate);
                }
                Step::NoCandidate { model } => {
                    rank.handle_candidate(now, ModelId(model), None);
                    oracle.handle_candidate(now, model, None);
                }
                Step::Join { hosted } => {
                    let gpu = gpus_joined;
                    gpus_joined += 1;
                    rank.handle_gpu_joined(now, GpuId(gpu), hosted.iter().copied().map(ModelId).collect(), None);
                    oracle.handle_joined(now, gpu, hosted);
                }
                Step::Leave { nth } => if let Some(gpu) = nth_gpu(&oracle, nth) {
                    rank.handle_gpu_left(GpuId(gpu));
                    oracle.handle_left(gpu);
                },
                Step::Answer { execution } => if let Some((_, gpu, free_at)) = under_way.pop_front() {
                    let exec_at = now.0.max(free_at);
                    let update = match execution {
                        Some(execution) => planned(exec_at, exec_at + execution),
                        None => GpuUpdate::Returned,
                    };
                    rank.handle_gpu(GpuId(gpu), update);
                    if let Some(state) = oracle.gpus.get_mut(&gpu) {
                        state.is_granted = false;
                        state.plans.extend(execution.map(|execution| (Timestamp(exec_at), Span(execution))));
                    }
                },
                Step::Finish { nth } => if let Some(gpu) = nth_gpu(&oracle, nth) {
                    rank.handle_gpu(GpuId(gpu), GpuUpdate::Finished { finished_at: now });
                    let state = oracle.gpus.get_mut(&gpu).unwrap();
                    if !state.plans.is_empty() {
                        state.plans.remove(0);
                        state.idle_since = now;
                    }
                },
            }
            rank.handle_timeout(now);
            let expected = oracle.handle_timeout(now);
            prop_assert_eq!(grants(&mut rank), expected.clone());
            under_way.extend(expected);
        }
    }
}
