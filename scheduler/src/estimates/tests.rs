use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{kinds::WINDOW, *};

const MODEL: ModelId = ModelId(3);

fn offered() -> LatencyProfile {
    LatencyProfile::linear(1.0, 5.0, 8).unwrap()
}

fn estimates() -> Estimates {
    let mut estimates = Estimates::new(true);
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
    assert_eq!(estimates.poll_timeout(), Some(last + FORGET_AFTER));
    estimates.handle_timeout(last + FORGET_AFTER);
    assert_eq!((estimates.profile(MODEL), estimates.poll_timeout()), (&offered(), None));
}

#[test]
fn offers_hold_if_it_is_off_and_a_new_offer_starts_anew() {
    let mut off = Estimates::new(false);
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
