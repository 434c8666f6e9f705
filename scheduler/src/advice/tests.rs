use proptest::prelude::*;
use rand_chacha::{ChaCha12Rng, rand_core::SeedableRng as _};

use super::*;

const SECOND: Span = Span::from_millis(1_000);
/// Of [`AdviceConfig::default`], in seconds.
const WINDOW: i64 = 60;

fn at(second: i64) -> Timestamp {
    Timestamp::ZERO + SECOND * second
}

/// What one model does in a second: tasks in time and lost, and GPUs that it keeps busy.
fn second(in_time: u64, lost: u64, busy: f64) -> Served {
    Served { in_time, lost, busy: Span::from_millis_f64(1e3 * busy), traffic: None }
}

/// A primary from the first second on.
fn advisor(config: AdviceConfig) -> Advisor {
    let mut advisor = Advisor::new(config);
    advisor.handle_standing(at(0), true);
    advisor
}

fn host(models: impl IntoIterator<Item = u32>) -> Arc<Vec<ModelId>> {
    Arc::new(models.into_iter().map(ModelId).collect())
}

/// One second of one model on so many GPUs.
fn pass(advisor: &mut Advisor, second: i64, served: Served, gpus: usize) -> Option<u32> {
    advisor.handle_served(ModelId(0), &served);
    assert!(advisor.is_due(at(second)));
    advisor.handle_gpus(at(second), std::iter::repeat_n(host([0]), gpus));
    advisor.advice().needed
}

/// What docs/operations.md has to spare for this work, with it.
fn spared(work: f64) -> f64 {
    1.04 * work + 0.3 * work.sqrt()
}

/// GPUs for this work, and so many roots of them more.
fn for_work(work: f64, roots: f64) -> u32 {
    let gpus = spared(work);
    let enough = |count: &u32| gpus + roots * gpus.sqrt() <= f64::from(*count) + 1e-6;
    (1..).find(enough).unwrap()
}

/// The paper's words: N r / (1 - r) more if r is bad, or as many as would have had some to spare; else as many as leave
/// no idle part that can be released.
fn paper(gpus: usize, (in_time, lost): (u64, u64), work: f64) -> u32 {
    let all = in_time + lost;
    if all == 0 || lost * 100 <= all || lost * 60 < 5 {
        return for_work(work, 0.0);
    }
    let (n, r) = (gpus as f64, lost as f64 / all as f64);
    let most = (4.0 * spared(work) + 1.0 - 1e-6).ceil() as u32;
    let more = (n + n * r / (1.0 - r)).max(spared(work / (1.0 - r)));
    let more = if r < 1.0 { (more - 1e-6).ceil() as u32 } else { most };
    for_work(work, 0.0).max(more.min(most))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn constant_load_has_the_papers_advice_for_ever(
        gpus in 1usize..200,
        tasks in (0u64..5_000, 0u64..500),
        busy_part in 0.0f64..1.0,
    ) {
        let busy = busy_part * gpus as f64;
        let mut advisor = advisor(AdviceConfig::default());
        for now in 1..WINDOW {
            prop_assert_eq!(pass(&mut advisor, now, second(tasks.0, tasks.1, busy), gpus), None);
        }
        let expected = paper(gpus, tasks, busy);
        for now in WINDOW..5 * WINDOW {
            let needed = pass(&mut advisor, now, second(tasks.0, tasks.1, busy), gpus);
            prop_assert_eq!(needed, Some(expected), "at {}", now);
        }
    }

    #[test]
    fn twice_the_load_is_followed_within_a_window_and_half_of_it_once_gpus_would_have_come(
        busy in 0.05f64..100.0,
        comes_after_s in 0i64..300,
    ) {
        let config = AdviceConfig { gpu_comes_after: SECOND * comes_after_s, ..AdviceConfig::default() };
        let (mut advisor, gpus) = (advisor(config), 1);
        let mut run = |from: i64, until: i64, busy: f64| -> Vec<u32> {
            (from..until).filter_map(|now| pass(&mut advisor, now, second(100, 0, busy), gpus)).collect()
        };
        let before = run(1, 2 * WINDOW, busy);
        prop_assert!(before.iter().all(|&needed| needed == paper(gpus, (1, 0), busy)));
        // A window after a step 98 % of it are seen.
        let near = |needed: u32, to: f64| (for_work(0.97 * to, 0.0)..=for_work(1.02 * to, 0.25)).contains(&needed);
        let risen = run(2 * WINDOW, 5 * WINDOW, 2.0 * busy);
        prop_assert!(risen.is_sorted(), "{risen:?}");
        prop_assert!(risen[WINDOW as usize..].iter().all(|&needed| near(needed, 2.0 * busy)), "{risen:?}");
        let lasts = WINDOW.max(comes_after_s);
        let fallen = run(5 * WINDOW, 6 * WINDOW + 3 * lasts, busy);
        prop_assert!(fallen.is_sorted_by(|one, other| one >= other), "{fallen:?}");
        prop_assert_eq!(fallen[lasts as usize - 1], *risen.last().unwrap());
        prop_assert!(near(*fallen.last().unwrap(), busy), "{fallen:?}");
    }

    /// A hundred requests a second for each busy GPU stray so far if they come in bursts of three.
    #[test]
    fn chance_moves_nothing_to_and_fro(seed in any::<u64>(), busy in 0.05f64..100.0) {
        let mut random = ChaCha12Rng::seed_from_u64(seed);
        let far = 0.3 / busy.sqrt().max(1.0);
        let mut noise = || 1.0 + far * (2.0 * (random.next_u32() as f64 / f64::from(u32::MAX)) - 1.0);
        let mut advisor = advisor(AdviceConfig::default());
        let pass = |now| pass(&mut advisor, now, second(100, 0, noise() * busy), 1);
        let needed: Vec<u32> = (1..20 * WINDOW).filter_map(pass).collect();
        prop_assert!(needed.is_sorted(), "{needed:?}");
        let most = for_work((1.0 + far / 2.0) * busy, 0.0);
        prop_assert!(needed.iter().all(|needed| *needed <= most), "{needed:?}, {most}");
    }

    /// Whoever acts on it, and however late GPUs come then, has as many as the load takes, and never more: what was
    /// lost with few GPUs does not count against the ones that came since.
    #[test]
    fn who_acts_on_losses_overshoots_by_nothing(
        start in 1usize..50,
        overload in 1.05f64..3.5,
        delay_s in 1usize..200,
    ) {
        // A GPU serves 100 tasks a second, and the policy tells no work but how long GPUs are busy.
        let offered = overload * 100.0 * start as f64;
        let mut advisor = advisor(AdviceConfig::default());
        let (mut gpus, mut wishes) = (start, vec![start; delay_s]);
        let most = for_work(offered / 100.0, 0.0) as usize + 1;
        for now in 1..3_000 {
            let served = offered.min(100.0 * gpus as f64);
            let counts = second(served as u64, (offered - served) as u64, served / 100.0);
            let needed = pass(&mut advisor, now, counts, gpus);
            wishes.push(needed.map_or(gpus, |needed| needed as usize));
            gpus = wishes[wishes.len() - delay_s];
            prop_assert!(gpus <= most, "{gpus} of {most} at {now} s");
        }
        prop_assert!(100.0 * gpus as f64 >= offered, "{gpus} GPUs for {offered}");
    }

    #[test]
    fn whatever_is_counted_the_advice_is_a_number_within_bounds(
        seconds in proptest::collection::vec((any::<u64>(), any::<u64>(), 0i64..i64::MAX >> 20, 0usize..5), 1..100),
        window_s in 10i64..3_600,
    ) {
        let mut advisor = advisor(AdviceConfig { window: SECOND * window_s, ..AdviceConfig::default() });
        let mut now = 0;
        for (in_time, lost, busy, gpus) in seconds {
            now += window_s / 3 + 1;
            advisor.handle_served(ModelId(0), &Served { in_time, lost, busy: Span(busy), traffic: None });
            advisor.handle_gpus(at(now), std::iter::repeat_n(host([0]), gpus));
            let advice = advisor.advice();
            prop_assert_eq!(advice.needed.is_some(), advice.sub_clusters.iter().any(|sub| sub.needed.is_some()));
            prop_assert!(advice.needed.is_some() == (now >= window_s) || advice.gpus == 0);
            prop_assert!(advice.needed.is_none_or(|needed| (1..=NEEDED_MAX).contains(&needed)));
            prop_assert!([advice.busy, advice.work, advice.lost_part].iter().all(|part| part.is_finite()));
            prop_assert!((0.0..=1.0).contains(&advice.idle_part()) && (0.0..=1.0).contains(&advice.lost_part));
            prop_assert!(advice.reason().len() < 400);
        }
    }
}

/// ResNet50 on a 1080Ti, 25 ms (Symphony, Table 2), with a request every `gap_us`.
fn resnet50(gap_us: i64, target: u32, gpu_price: u32) -> Traffic {
    let us = Span::from_micros;
    Traffic { gap: us(gap_us), arrived_at: at(0), fixed: us(5_072), per_task: us(1_053), target, gpu_price }
}

/// What is needed for 2,000 requests a second while eight GPUs are busy all the time, as they are at no price.
fn needed_by_work(traffic: Traffic, gpu_price: f64) -> u32 {
    let mut advisor = advisor(AdviceConfig { gpu_price, ..AdviceConfig::default() });
    let served = Served { traffic: Some(traffic), ..second(2_000, 0, 8.0) };
    (1..=WINDOW).filter_map(|now| pass(&mut advisor, now, served, 8)).last().unwrap()
}

#[test]
fn what_is_needed_follows_from_the_work_at_the_price_of_gpus_not_from_who_is_idle() {
    // Batches of 9.9, which take 1.565 ms a task: 3.13 GPUs, and 0.66 to spare.
    assert_eq!(needed_by_work(resnet50(500, 9, 0), f64::INFINITY), 4);
    // sqrt(4 * 5.072 / (1.053 + 0.25)) = 3.95: 2.338 ms a task.
    assert_eq!(needed_by_work(resnet50(500, 9, 0), 4.0), 6);
    assert_eq!(needed_by_work(resnet50(500, 9, 4_000), f64::INFINITY), 6);
    // One by one: 6.125 ms.
    assert_eq!(needed_by_work(resnet50(500, 9, 0), 0.0), 14);
}

#[test]
fn sub_clusters_are_judged_by_themselves_and_share_what_they_share() {
    let mut advisor = advisor(AdviceConfig::default());
    let (both, second_only) = (host([0, 1]), host([1]));
    for now in 1..=WINDOW {
        // Model 1 is dealt to all four GPUs, model 0 is on two of them alone and loses half.
        advisor.handle_served(ModelId(0), &second(100, 100, 1.8));
        advisor.handle_served(ModelId(1), &second(1_000, 0, 0.2));
        let gpus = [&both, &both, &second_only, &second_only].map(Arc::clone);
        advisor.handle_gpus(at(now), gpus.into_iter());
    }
    let advice = advisor.advice();
    let [first, other] = &advice.sub_clusters[..] else { panic!("{advice:?}") };
    // 700 tasks are its, of which 100 are lost: 2 / (1 - 1/7) = 2.3; 1.9 are busy.
    assert_eq!((first.gpus, first.needed, first.reason), (2, Some(3), Reason::Losses));
    assert_eq!((other.gpus, other.needed, other.reason), (2, Some(1), Reason::Work));
    assert_eq!((advice.gpus, advice.needed), (4, Some(4)));
    assert!((advice.busy - 2.0).abs() < 1e-6 && (advice.idle_part() - 0.5).abs() < 1e-6);
    let reason = advice.reason();
    assert!(reason.starts_with("the sum of 2 sub-clusters; where it is furthest off: "), "{reason}");
}

#[test]
fn a_sub_cluster_that_has_gone_is_needed_while_it_may_come_back() {
    let config = AdviceConfig { gpu_comes_after: SECOND * 100, ..AdviceConfig::default() };
    let (mut advisor, mut needed) = (advisor(config), Vec::new());
    for now in 1..=WINDOW + 250 {
        let both = [host([0]), host([0]), host([1])];
        let gpus = if now <= WINDOW + 10 { &both[..] } else { &both[2..] };
        advisor.handle_served(ModelId(0), &second(if gpus.len() > 1 { 100 } else { 0 }, 0, 1.5));
        advisor.handle_gpus(at(now), gpus.iter().map(Arc::clone));
        needed.push(advisor.advice().needed);
    }
    let needed: Vec<u32> = needed.into_iter().flatten().collect();
    let gone = needed.iter().position(|&needed| needed == 1).unwrap();
    assert!(needed[..gone].iter().all(|&needed| needed == 3) && needed[gone..].iter().all(|&needed| needed == 1));
    assert_eq!(gone, 111);

    // Other GPUs host what it did: it does not come back.
    let mut advisor = super::Advisor::new(config);
    advisor.handle_standing(at(0), true);
    for now in 1..=WINDOW {
        advisor.handle_gpus(at(now), [host([0])].into_iter());
    }
    advisor.handle_gpus(at(WINDOW + 1), [host([0, 1])].into_iter());
    assert_eq!(advisor.advice().sub_clusters.len(), 1);
}

#[test]
fn a_takeover_begins_anew_and_says_so() {
    let mut advisor = advisor(AdviceConfig::default());
    assert_eq!(advisor.advice().reason(), "not known for 60 s more: a window has to pass");
    for now in 1..=WINDOW {
        pass(&mut advisor, now, second(10, 0, 0.5), 2);
    }
    assert!(advisor.advice().needed.is_some());
    advisor.handle_standing(at(WINDOW + 1), false);
    assert_eq!((advisor.advice().needed, advisor.is_due(at(2 * WINDOW))), (None, false));
    assert_eq!(advisor.advice().reason(), "this scheduler is not the primary");
    advisor.handle_standing(at(100), true);
    assert_eq!(pass(&mut advisor, 130, second(10, 0, 0.5), 2), None);
    assert_eq!(advisor.advice().reason(), "not known for 30 s more: a window has to pass");
    assert_eq!((advisor.advice().in_time, advisor.advice().lost), (10, 0));
    assert_eq!(pass(&mut advisor, 160, second(0, 0, 0.0), 0), None);
    assert_eq!(advisor.advice().reason(), "there is no GPU to judge by");
}

#[test]
fn many_kinds_of_gpus_count_as_one_and_what_is_kept_is_bounded() {
    let mut advisor = advisor(AdviceConfig::default());
    for now in 1..=40 {
        // Each of 200 GPUs hosts all but one of 4,000 models, and another one each second.
        let hosted = |gpu: u32| host((0..4_000).filter(move |model| *model != (gpu + now as u32) % 4_000));
        let gpus = if now % 10 == 0 { 200 } else { 20 };
        advisor.handle_served(ModelId(now as u32), &second(100, 0, 3.0));
        advisor.handle_gpus(at(now), (0..gpus).map(hosted));
        assert!(advisor.groups.len() <= 2 * SUB_CLUSTERS_MAX && advisor.models.len() <= 4_000);
        assert!(advisor.advice().sub_clusters.len() <= 2 * SUB_CLUSTERS_MAX);
        assert_eq!(advisor.advice().gpus, gpus);
    }
    advisor.handle_served(ModelId(u32::MAX), &second(1, 0, 0.0));
    assert!(advisor.models.len() <= 4_000, "no such model is known");
}

#[test]
fn the_reason_says_what_asks_for_gpus_and_whether_they_are_late() {
    let mut advisor = advisor(AdviceConfig::default());
    for now in 1..=WINDOW + 90 {
        pass(&mut advisor, now, second(100, 100, 1.9), 2);
    }
    let reason = advisor.advice().reason();
    assert_eq!(
        reason,
        "50.0 % of the tasks were lost with 2 GPUs; more are needed for 90 s, and one should come within 60 s"
    );
    // They come, and all that was lost is served.
    for now in WINDOW + 91..=2 * WINDOW + 120 {
        pass(&mut advisor, now, second(200, 0, 1.5), 4);
    }
    let [sub] = &advisor.advice().sub_clusters[..] else { panic!() };
    assert_eq!((sub.needed, sub.reason), (Some(5), Reason::Held));
    for now in 2 * WINDOW + 121..=6 * WINDOW {
        pass(&mut advisor, now, second(200, 0, 1.5), 4);
    }
    let advice = advisor.advice();
    assert_eq!(advice.needed, Some(2));
    assert_eq!(advice.reason(), "work for 1.5 GPUs, and 0.4 to spare");
}
