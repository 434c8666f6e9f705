use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{kinds::WINDOW, *};

const MODEL: ModelId = ModelId(3);

fn offered() -> LatencyProfile {
    LatencyProfile::linear(1.0, 5.0, 8).unwrap()
}

fn estimates() -> Estimates {
    let mut estimates = Estimates::new(Learning::Factors);
    estimates.handle_model(MODEL, offered());
    assert_eq!(estimates.poll_changed(), Some(ProfileChange::Common(MODEL)));
    estimates
}

/// `count` batches of all sizes on one GPU, each `factor` times as long as offered, from `now` on every 10 ms.
fn execute(estimates: &mut Estimates, now: Timestamp, gpu: u32, factor: f64, count: usize) {
    for index in 0..count {
        let size = 1 + index % 8;
        let execution = Span::from_millis_f64(offered().latency(size).as_millis_f64() * factor);
        estimates.handle_executed(now + Span::from_millis(10) * index as i64, MODEL, GpuId(gpu), size, execution);
    }
}

#[test]
fn what_lasts_is_learned_and_what_does_not_is_not() {
    let mut estimates = estimates();
    execute(&mut estimates, Timestamp(0), 0, 1.04, 1000);
    execute(&mut estimates, Timestamp(0), 0, 1.0, WINDOW);
    execute(&mut estimates, Timestamp(0), 0, 3.0, WINDOW / 2 - 1);
    assert_eq!(estimates.poll_changed(), None);
    execute(&mut estimates, Timestamp(0), 0, 1.2, WINDOW);
    assert_eq!(estimates.poll_changed(), Some(ProfileChange::Common(MODEL)));
    assert_eq!(estimates.profile(MODEL), &LatencyProfile::linear(1.2, 6.0, 8).unwrap());
    execute(&mut estimates, Timestamp(0), 0, 0.9, WINDOW);
    assert_eq!(estimates.profile(MODEL), &LatencyProfile::linear(0.9, 4.5, 8).unwrap());
}

#[test]
fn the_slowest_gpu_counts_until_it_leaves() {
    let mut estimates = estimates();
    for gpu in 0..4 {
        execute(&mut estimates, Timestamp(0), gpu, if gpu == 2 { 1.5 } else { 1.0 }, WINDOW);
    }
    assert_eq!(estimates.profile(MODEL).latency(1), Span::from_millis(9));
    estimates.handle_gpu_left(GpuId(2));
    execute(&mut estimates, Timestamp(0), 0, 1.0, 1);
    assert_eq!(estimates.profile(MODEL), &offered());
    assert_eq!(estimates.poll_timeout(), None);
}

#[test]
fn an_estimate_that_leaves_no_time_to_run_is_forgotten() {
    let mut estimates = estimates();
    execute(&mut estimates, Timestamp(0), 0, 100.0, WINDOW);
    assert_eq!(estimates.profile(MODEL).latency(1), Span::from_millis(24), "four times at most");
    let last = Timestamp(0) + Span::from_millis(10) * (WINDOW as i64 - 1);
    assert_eq!(estimates.poll_timeout(), Some(last + Learning::Factors.forget_after()));
    estimates.handle_timeout(last + Learning::Factors.forget_after());
    assert_eq!((estimates.profile(MODEL), estimates.poll_timeout()), (&offered(), None));
}

#[test]
fn offers_hold_if_it_is_off_and_a_new_offer_starts_anew() {
    let mut off = Estimates::new(Learning::Off);
    off.handle_model(MODEL, offered());
    execute(&mut off, Timestamp(0), 0, 2.0, 2 * WINDOW);
    assert_eq!(off.profile(MODEL), &offered());
    let mut on = estimates();
    execute(&mut on, Timestamp(0), 0, 2.0, WINDOW);
    let slower = LatencyProfile::linear(2.0, 10.0, 8).unwrap();
    on.handle_model(MODEL, slower.clone());
    execute(&mut on, Timestamp(0), 0, 2.0, WINDOW);
    assert_eq!(on.profile(MODEL), &slower);
}

#[test]
fn a_gpu_has_a_profile_of_its_own_while_it_is_faster() {
    let mut estimates = estimates();
    let changes = |estimates: &mut Estimates| -> Vec<_> { std::iter::from_fn(|| estimates.poll_changed()).collect() };
    let [common, of_fast] = [ProfileChange::Common(MODEL), ProfileChange::OfGpu(MODEL, GpuId(1))];
    estimates.handle_offer(MODEL, &[GpuId(0)], &offered().scaled(0.96));
    estimates.handle_offer(MODEL, &[GpuId(1)], &offered().scaled(0.5));
    assert_eq!(changes(&mut estimates), [of_fast]);
    assert_eq!(estimates.profile_on(MODEL, GpuId(0)), &offered());
    assert_eq!(estimates.profile_on(MODEL, GpuId(1)), &offered().scaled(0.5));
    // It throttles: still faster than the other, and nobody else's concern.
    execute(&mut estimates, Timestamp(0), 1, 0.75, WINDOW);
    assert_eq!(changes(&mut estimates), [of_fast]);
    assert_eq!(estimates.profile_on(MODEL, GpuId(1)), &offered().scaled(0.5).scaled(1.5));
    assert_eq!(estimates.profile(MODEL), &offered());
    // It becomes the slowest: what holds for it holds for all.
    execute(&mut estimates, Timestamp(0), 1, 1.5, WINDOW);
    assert!(changes(&mut estimates).starts_with(&[common, of_fast]));
    assert_eq!(estimates.profile(MODEL), &offered().scaled(0.5).scaled(3.0));
    assert_eq!(estimates.own_profile(MODEL, GpuId(1)), None);
    // Under another id it has run nothing.
    estimates.handle_gpu_renamed(GpuId(1), GpuId(2));
    execute(&mut estimates, Timestamp(0), 0, 1.0, WINDOW);
    assert_eq!(estimates.profile_on(MODEL, GpuId(2)), estimates.profile(MODEL), "as its kind, which did learn");
    estimates.handle_gpu_left(GpuId(2));
    execute(&mut estimates, Timestamp(0), 0, 1.0, 1);
    assert_eq!(estimates.profile(MODEL), &offered());
    estimates.handle_offer(MODEL, &[GpuId(3)], &offered().scaled(0.5));
    changes(&mut estimates);
    estimates.handle_unhosted(MODEL);
    assert_eq!(changes(&mut estimates), [common, ProfileChange::OfGpu(MODEL, GpuId(3))]);
    assert_eq!(estimates.own_profile(MODEL, GpuId(3)), None);
}

#[test]
fn an_offer_that_is_slower_than_the_common_one_is_what_all_are_planned_with() {
    let mut estimates = estimates();
    estimates.handle_offer(MODEL, &[GpuId(0)], &offered().scaled(0.5));
    estimates.handle_offer(MODEL, &[GpuId(1)], &offered().scaled(2.0).up_to(4));
    assert_eq!(estimates.profile(MODEL), &offered().scaled(2.0).up_to(4));
    assert_eq!(
        (estimates.own_profile(MODEL, GpuId(0)).is_some(), estimates.own_profile(MODEL, GpuId(1))),
        (true, None)
    );
}

#[test]
fn kinds_are_bounded_and_one_too_many_counts_as_common() {
    let mut estimates = estimates();
    for gpu in 1..=Estimates::KINDS_MAX as u32 {
        estimates.handle_offer(MODEL, &[GpuId(gpu)], &offered().scaled(0.9f64.powi(gpu as i32)));
    }
    let last = Estimates::KINDS_MAX as u32;
    assert!(estimates.own_profile(MODEL, GpuId(last - 1)).is_some());
    assert_eq!(estimates.own_profile(MODEL, GpuId(last)), None);
    // A kind without GPUs makes room.
    estimates.handle_gpu_left(GpuId(1));
    estimates.handle_offer(MODEL, &[GpuId(last)], &offered().scaled(0.1));
    assert_eq!(estimates.profile_on(MODEL, GpuId(last)), &offered().scaled(0.1));
}

/// Offers as parts of the common one; the last is like the first.
const OFFERS: [f64; 4] = [1.0, 0.6, 0.3, 0.97];

/// All factors of each GPU, as thousandths of its kind's offer; kinds are named by their place in [`OFFERS`].
#[derive(Default)]
struct Oracle {
    kinds: BTreeMap<GpuId, usize>,
    factors: BTreeMap<GpuId, Vec<u32>>,
    learned: [Option<u32>; 3],
    /// What the planner was told.
    told: BTreeMap<GpuId, LatencyProfile>,
}

impl Oracle {
    fn kind(&self, gpu: GpuId) -> usize {
        self.kinds.get(&gpu).copied().unwrap_or(0)
    }

    fn factor(&self, kind: usize) -> u32 {
        self.learned[kind].unwrap_or(1000)
    }

    fn median(&self, gpu: GpuId) -> Option<u32> {
        let factors = self.factors.get(&gpu)?;
        let mut last = factors[factors.len().checked_sub(WINDOW)?..].to_vec();
        last.sort_unstable();
        Some(last[WINDOW / 2])
    }

    fn forget(&mut self, gpu: GpuId) {
        self.kinds.remove(&gpu);
        self.factors.remove(&gpu);
        self.told.remove(&gpu);
    }

    fn executed(&mut self, gpu: GpuId, ratio: f64) {
        self.factors.entry(gpu).or_default().push((ratio * 1000.0).round().clamp(500.0, 4000.0) as u32);
        for kind in 0..3 {
            let known: BTreeSet<_> = self.kinds.keys().chain(self.factors.keys()).copied().collect();
            let of_kind: Vec<_> = known.into_iter().filter(|&gpu| self.kind(gpu) == kind).collect();
            let slowest = of_kind.iter().filter_map(|&gpu| self.median(gpu)).max();
            let Some(slowest) = slowest.or(of_kind.is_empty().then_some(1000)) else { continue };
            let (one, other) = (f64::from(slowest), f64::from(self.factor(kind)));
            if one > other * 1.05 || other > one * 1.05 {
                self.learned[kind] = Some(slowest);
            }
        }
    }

    fn offer(kind: usize) -> LatencyProfile {
        offered().scaled(OFFERS[kind])
    }

    /// The slowest kind's at each batch size.
    fn common(&self) -> LatencyProfile {
        let of_kind = |kind: usize| Self::offer(kind).scaled(f64::from(self.factor(kind)) / 1000.0);
        of_kind(0).slowest(&of_kind(1)).slowest(&of_kind(2))
    }

    fn check(&self, estimates: &Estimates) -> Result<(), TestCaseError> {
        let common = estimates.profile(MODEL);
        prop_assert_eq!(common, &self.common());
        for gpu in (0..4).map(GpuId) {
            let own = estimates.own_profile(MODEL, gpu);
            prop_assert_eq!(own.map(|own| &**own), self.told.get(&gpu), "{:?}", gpu);
            if let Some(own) = own {
                prop_assert!(!own.is_near(common, 0.05) && own.clone().slowest(common) == *common);
            }
            // Off by a tolerance since it was told, and by one against the common one.
            let factor = self.factor(self.kind(gpu));
            let learned = self.median(gpu).map(|median| median.min(factor));
            if let Some(factor) = learned.or(self.kinds.contains_key(&gpu).then_some(factor)) {
                let expected = Self::offer(self.kind(gpu)).scaled(f64::from(factor) / 1000.0);
                prop_assert!(estimates.profile_on(MODEL, gpu).is_near(&expected, 1.05 * 1.05 - 1.0), "{:?}", gpu);
            }
        }
        Ok(())
    }
}

proptest! {
    /// GPUs come with any offer, run batches for any time, and go.
    #[test]
    fn follows_each_gpu_and_the_slowest_of_all(
        steps in proptest::collection::vec((0u32..4, 1usize..=8, 0.2f64..3.0, 0usize..150), 0..600),
    ) {
        let mut estimates = estimates();
        // A new kind, which takes the place of one that nobody is of, has learned nothing: here all have a GPU.
        for kind in 1..3 {
            estimates.handle_offer(MODEL, &[GpuId(10 + kind)], &Oracle::offer(kind as usize));
        }
        let mut oracle = Oracle::default();
        oracle.kinds.extend([(GpuId(11), 1), (GpuId(12), 2)]);
        // What a GPU takes mostly stays the same.
        let mut part = [1.0; 4];
        for (gpu, size, ratio, event) in steps {
            let id = GpuId(gpu);
            match event {
                0 => {
                    estimates.handle_gpu_left(id);
                    oracle.forget(id);
                }
                1..=4 => {
                    let offer = event - 1;
                    estimates.handle_offer(MODEL, &[id], &Oracle::offer(offer));
                    oracle.kinds.remove(&id);
                    oracle.factors.remove(&id);
                    oracle.kinds.extend([(id, offer)].into_iter().filter(|_| (1..3).contains(&offer)));
                }
                5..=8 => part[gpu as usize] = ratio,
                _ => {
                    let offered = Oracle::offer(oracle.kind(id)).latency(size);
                    let execution = Span::from_millis_f64(offered.as_millis_f64() * part[gpu as usize]);
                    estimates.handle_executed(Timestamp(0), MODEL, id, size, execution);
                    oracle.executed(id, execution.as_nanos() as f64 / offered.as_nanos() as f64);
                }
            }
            while let Some(change) = estimates.poll_changed() {
                let ProfileChange::OfGpu(_, gpu) = change else { continue };
                oracle.told.remove(&gpu);
                oracle.told.extend(estimates.own_profile(MODEL, gpu).map(|own| (gpu, LatencyProfile::clone(own))));
            }
            oracle.check(&estimates)?;
            prop_assert!(estimates.profile(MODEL).clone().validated().is_ok());
        }
    }
}

fn longest() -> Estimates {
    let mut estimates = Estimates::new(Learning::Longest);
    estimates.handle_model(MODEL, offered());
    assert_eq!(estimates.poll_changed(), Some(ProfileChange::Common(MODEL)));
    estimates
}

/// Clockwork, section 5.3. Offers are b + 5 ms.
#[test]
fn clockwork_plans_each_size_and_gpu_with_the_longest_of_its_last_ten() {
    let (mut estimates, ms) = (longest(), Span::from_millis);
    let mut ran = |gpu: u32, size: usize, took: Span| {
        estimates.handle_executed(Timestamp(0), MODEL, GpuId(gpu), size, took);
        let changes: Vec<_> = std::iter::from_fn(|| estimates.poll_changed()).collect();
        let of = |gpu| (1..=4).map(|size| estimates.profile_on(MODEL, GpuId(gpu)).latency(size)).collect::<Vec<_>>();
        (changes, of(0), of(1))
    };
    // One size of one GPU; what was not run is as offered, but l(b) does not decrease.
    let (changes, first, second) = ran(0, 2, ms(10));
    assert_eq!(changes, [ProfileChange::Common(MODEL)]);
    assert_eq!((&first, &second), (&vec![ms(6), ms(10), ms(10), ms(10)], &first));
    // The second GPU is faster.
    let (changes, first, second) = ran(1, 3, Span::from_micros(6_500));
    assert_eq!(changes, [ProfileChange::OfGpu(MODEL, GpuId(1))]);
    let faster = [6_000, 6_500, 6_500, 9_000].map(Span::from_micros);
    assert_eq!((first, second), (vec![ms(6), ms(10), ms(10), ms(10)], faster.to_vec()));
    // Nine that are shorter leave the longest in the window, a tenth does not.
    for _ in 0..9 {
        assert_eq!(ran(0, 2, ms(7)).1[1], ms(10));
    }
    assert_eq!(ran(0, 2, ms(7)).1, [ms(6), ms(7), ms(8), ms(9)]);
    // What hung is not believed.
    assert_eq!(ran(0, 1, ms(1_000_000)).1[0], ms(24));
}

/// Found by chance: the only GPU known so far was faster than its offer.
#[test]
fn clockwork_counts_a_gpu_whose_first_batch_takes_what_it_offered() {
    let mut estimates = longest();
    estimates.handle_executed(Timestamp(0), MODEL, GpuId(0), 4, Span::from_millis(5));
    assert_eq!(estimates.profile(MODEL).latency(4), Span::from_millis(5));
    estimates.handle_executed(Timestamp(0), MODEL, GpuId(1), 4, offered().latency(4));
    assert_eq!(estimates.profile(MODEL), &offered());
}

#[test]
fn clockwork_forgets_what_has_not_run_for_ten_minutes() {
    let mut estimates = longest();
    estimates.handle_executed(Timestamp(0), MODEL, GpuId(0), 1, Span::from_millis(20));
    assert_eq!(estimates.profile(MODEL).latency(1), Span::from_millis(20));
    let forgotten_at = Timestamp(0) + Span::from_millis(600_000);
    assert_eq!(estimates.poll_timeout(), Some(forgotten_at));
    estimates.handle_timeout(forgotten_at);
    assert_eq!((estimates.profile(MODEL), estimates.poll_timeout()), (&offered(), None));
}

#[test]
fn clockwork_plans_loads_with_the_longest_of_their_last_ten() {
    let (mut estimates, ms) = (longest(), Span::from_millis);
    assert_eq!(estimates.load(MODEL, ms(8)), ms(8));
    for took in [9, 7, 7, 7, 7, 7, 7, 7, 7, 7] {
        estimates.handle_loaded(MODEL, ms(8), ms(took));
        assert_eq!(estimates.load(MODEL, ms(8)), ms(9));
    }
    estimates.handle_loaded(MODEL, ms(8), ms(7));
    assert_eq!(estimates.load(MODEL, ms(8)), ms(7));
    let mut others = self::estimates();
    others.handle_loaded(MODEL, ms(8), ms(9));
    assert_eq!(others.load(MODEL, ms(8)), ms(8), "no other policy does");
}

proptest! {
    /// Whatever runs where, a GPU is never planned to be slower than all are, and l(b) never decreases.
    #[test]
    fn clockworks_common_profile_is_that_of_the_slowest_gpu(
        runs in prop::collection::vec((0u32..4, 1usize..=8, 1i64..60, 0u32..20), 1..200),
    ) {
        let mut estimates = longest();
        estimates.handle_offer(MODEL, &[GpuId(3)], &offered().scaled(0.5));
        let mut durations: BTreeMap<(u32, usize), Vec<Span>> = BTreeMap::new();
        for (gpu, size, took_ms, event) in runs {
            if event == 0 {
                estimates.handle_gpu_left(GpuId(gpu));
                durations.retain(|&(other, _), _| other != gpu);
                continue;
            }
            let took = Span::from_millis(took_ms);
            estimates.handle_executed(Timestamp(0), MODEL, GpuId(gpu), size, took);
            durations.entry((gpu, size)).or_default().push(took);
            for (&(gpu, size), took) in &durations {
                let own = estimates.profile_on(MODEL, GpuId(gpu)).latency(size);
                let offered = offered().latency(size);
                let least = took[took.len().saturating_sub(10)..].iter().map(|took| (*took).min(offered * 2)).max();
                prop_assert!(own >= least.unwrap() && own <= estimates.profile(MODEL).latency(size));
            }
        }
    }
}
