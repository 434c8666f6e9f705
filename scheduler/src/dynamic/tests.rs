use super::*;

const COST: BatchCost = BatchCost { fixed: Span::from_millis(2), per_task: 0.5 };

fn ms(span: Span) -> f64 {
    span.as_millis_f64()
}

#[test]
fn a_batch_is_padded_to_its_longest_request() {
    assert_eq!(COST.latency(4, Span::from_millis(10)), Span::from_millis(27));
    assert_eq!(COST.work(Span::from_millis(7)), Span::from_millis(5));
    assert_eq!(COST.work(Span::from_millis(1)), Span::ZERO);
}

/// Of uniform samples from 0 to 1 the largest of k is k / (k + 1) on average.
#[test]
fn the_largest_of_k_is_an_order_statistic() {
    let samples: Vec<Span> = (0..=1000).map(|step| Span::from_micros(step * 1000)).collect();
    for k in [1, 2, 4, 16] {
        let expected = 1000.0 * k as f64 / (k as f64 + 1.0);
        assert!((ms(largest_of(&samples, k)) / expected - 1.0).abs() < 2e-3, "{k}: {}", largest_of(&samples, k));
    }
}

#[test]
fn an_application_of_short_requests_still_sees_the_long_ones_of_others_in_its_batch() {
    let mut times = DynamicTimes::new(COST);
    assert_eq!(times.batches(&[Class::of(0)], &[1], |_| Span::ZERO), None);
    for step in 0..100 {
        times.handle_alone(0, 0, Span::from_millis_f64(2.0 + 10.0 + f64::from(step) / 100.0));
        times.handle_alone(2, 0, Span::from_millis_f64(2.0 + 100.0 + f64::from(step) / 100.0));
    }
    times.settle();
    let batches = times.batches(&times.classes(), &[1, 2], |_| Span::ZERO).unwrap();
    let parts = |bins: &[Bin]| bins.iter().map(|bin| bin.part).sum::<f64>();
    for batch in &batches {
        assert!(batch.classes.iter().all(|(_, seen)| (parts(&seen.bins) - 1.0).abs() < 1e-9));
    }
    // Alone they are short; of two, half are with a long one.
    assert!(ms(batches[0].of(Class::of(0)).mean) < 20.0 && ms(batches[0].of(Class::of(2)).mean) > 95.0);
    assert!((ms(batches[1].of(Class::of(0)).mean) - (2.0 + 1.5 * (10.5 + 100.5) / 2.0)).abs() < 8.0);
    assert!((ms(batches[1].mean) - (2.0 + 1.5 * (10.5 * 0.25 + 100.5 * 0.75))).abs() < 2.0);
    // Nothing is known of application 9 but that it is of this model.
    assert!((ms(batches[0].of(Class::of(9)).mean) - (2.0 + (10.5 + 100.5) / 2.0)).abs() < 5.0);
    let short = times.batches(&[Class::of(0)], &[2], |_| Span::ZERO).unwrap();
    assert!(ms(short[0].mean) < 18.0, "{}", short[0].mean);
}

#[test]
fn applications_share_batches_where_padding_is_cheaper_than_another_batch() {
    let groups = |fixed| {
        let mut times = DynamicTimes::new(BatchCost { fixed: Span::from_millis(fixed), per_task: 1.0 });
        for (application, work) in [(3, 100), (0, 20), (1, 25)] {
            times.handle_alone(application, 0, Span::from_millis(fixed + work));
        }
        (0..1000).for_each(|_| times.handle_granted(4));
        times.settle();
        times.groups()
    };
    let classes = |applications: &[u8]| -> Vec<Class> { applications.iter().copied().map(Class::of).collect() };
    // What is of no application may be any of them: 48 ms on average.
    let any = vec![Class::ANY];
    assert_eq!(groups(1), [classes(&[0]), classes(&[1]), any.clone(), classes(&[3])]);
    // Four in a batch of 25 instead of 20 ms cost 20 ms, which count for 30.
    assert_eq!(groups(29).len(), 4);
    assert_eq!(groups(31), [classes(&[0, 1]), any.clone(), classes(&[3])]);
    assert_eq!(groups(500), [[classes(&[0, 1, 3]), any].concat()]);
}

#[test]
fn what_was_before_a_shift_is_forgotten() {
    let mut works = Works::default();
    let mut handle = |ms| works.handle(Sample { alone: Span::from_millis(ms), bucket: None });
    (0..3 * WINDOW).for_each(|_| handle(12));
    (0..SHIFT_MIN).for_each(|_| handle(22));
    assert!(works.samples().all(|sample| sample.alone == Span::from_millis(22)));
    assert_eq!(works.len(), SHIFT_MIN, "and nothing that came since");
}

#[test]
fn a_shift_in_the_middle_of_a_window_is_seen_soon_and_chance_is_none() {
    use rand::{RngExt, SeedableRng};
    let (mut seen, mut forgotten) = (0, 0);
    for seed in 0..20 {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        let mut works = Works::default();
        // Two modes, whose median is that of one or of the other.
        let mut handle = |works: &mut Works, ms: f64| {
            let mode = [1.0, 10.0][usize::from(rng.random_bool(0.5))];
            works.handle(Sample { alone: Span::from_millis_f64(ms * mode), bucket: None });
        };
        for _ in 0..20 {
            (0..WINDOW).for_each(|_| handle(&mut works, 2.0));
            forgotten += usize::from(works.samples().count() < WINDOW);
        }
        (0..WINDOW / 2).for_each(|_| handle(&mut works, 2.0));
        (0..WINDOW).for_each(|_| handle(&mut works, 3.0));
        let old = works.samples().filter(|sample| [2, 20].map(Span::from_millis).contains(&sample.alone)).count();
        seen += usize::from(old <= WINDOW / 2);
    }
    assert!(seen == 20 && forgotten <= 4, "{seen} shifts of 20, {forgotten} of 400 windows that are none");
}

/// A hiccup, or a request that was very long.
#[test]
fn one_request_that_took_long_hardly_moves_the_mean_of_the_others() {
    for times in [DynamicTimes::new, DynamicTimes::by_length] {
        let mut times = times(COST);
        (0..500).for_each(|_| times.handle_alone(0, 100, Span::from_millis(7)));
        times.handle_alone(0, 100, Span::from_millis(902));
        times.settle();
        let class = times.class(0, 100);
        let batches = times.batches(&times.classes(), &[1, 4], |_| Span::ZERO).unwrap();
        let seen = batches.iter().map(|batch| batch.of(class));
        let parts: Vec<f64> = seen.clone().map(|seen| seen.bins.iter().map(|bin| bin.part).sum()).collect();
        assert!(parts.iter().all(|sum| (sum - 1.0).abs() < 1e-9), "{parts:?}");
        // 500 of 5 ms of work and one of 900; the largest of four is that one four times as often.
        let expected = [2.0 + 3_400.0 / 501.0, 2.0 + 2.5 * (5.0 + 4.0 * 895.0 / 501.0)];
        for (seen, expected) in seen.zip(expected) {
            assert!((ms(seen.mean) / expected - 1.0).abs() < 0.01, "{} {expected}", seen.mean);
            // Nearly all of it is where nearly all samples are.
            let short: f64 = seen.bins.iter().filter(|bin| ms(bin.to) < 20.0).map(|bin| bin.part).sum();
            assert!(short > 0.98, "{:?}", seen.bins);
        }
    }
}

/// The mean is that of all pairs of a request of the class and the longest of the others.
#[test]
fn the_mean_beside_others_is_that_of_all_who_may_be_there() {
    let samples = |ms: &[i64]| Distribution::new(ms.iter().map(|&ms| Span::from_millis(ms)));
    let (own, all) = (samples(&[1, 4, 9]), samples(&[2, 3, 4, 8]));
    let longest = |count: u32| {
        let each = |draw: usize| -> i64 {
            let drawn = (0..count).map(|place| [2, 3, 4, 8][draw / 4usize.pow(place) % 4]);
            [1, 4, 9].map(|own| drawn.clone().max().unwrap_or(0).max(own)).iter().sum()
        };
        (0..4usize.pow(count)).map(each).sum::<i64>() as f64 / 3.0 / 4f64.powi(count as i32)
    };
    for count in 0..4 {
        let found = ms(Largest::new(&all, count).mean_beside(&own));
        assert!((found - longest(count as u32)).abs() < 1e-5, "{count}: {found}");
    }
}

#[test]
fn numbers_of_applications_change_with_who_plans_them() {
    let mut times = DynamicTimes::new(COST);
    for (application, ms) in [(0, 3), (1, 5), (2, 9)] {
        (0..10).for_each(|_| times.handle_alone(application, 0, Span::from_millis(ms)));
    }
    let mut numbers = [0; APPLICATIONS_MAX];
    (numbers[1], numbers[2]) = (4, 4);
    times.renumber(&numbers);
    times.settle();
    let of = |class| times.times(class).iter().map(|alone| ms(*alone)).sum::<f64>();
    assert_eq!([0, 1, 2, 4].map(|number| of(Class::of(number))), [30.0, 0.0, 0.0, 140.0]);
}

#[test]
fn two_windows_are_kept() {
    let mut works = Works::default();
    (1..4 * WINDOW).for_each(|_| works.handle(Sample { alone: Span::from_millis(12), bucket: None }));
    assert_eq!((works.samples().count(), works.len()), (2 * WINDOW - 1, 2 * WINDOW - 1));
}

/// Requests of 100 and of 1,000 bytes take 10 and 100 ms beyond c0, whatever their application.
fn of_two_lengths() -> DynamicTimes {
    let mut times = DynamicTimes::by_length(COST);
    for sample in 0..2 * ENOUGH as u32 {
        let (length, work) = [(100, 10), (1_000, 100)][sample as usize % 2];
        times.handle_alone(0, length, Span::from_millis(2 + work));
    }
    times.settle();
    times
}

#[test]
fn a_request_goes_by_the_narrowest_class_that_enough_is_known_of() {
    let mut times = of_two_lengths();
    let class = |application, length: u32| Class { application, bucket: Bucket::of(length) };
    assert_eq!(times.class(0, 100), class(Some(0), 100));
    assert_eq!(times.class(7, 100), class(None, 100), "that application is new, but its length is not");
    assert_eq!(times.class(7, 10_000), Class::ANY, "nothing is known of it");
    assert_eq!(times.class(0, 0), class(Some(0), 0), "it does not say how long it is");
    // The third is one that batches alone tell of.
    for _ in 0..ENOUGH {
        assert!(times.handle_batch(GpuId(0), &[(0, 300); 3], Span::from_millis(2 + 2 * 30)));
    }
    assert_eq!(times.class(0, 300), class(Some(0), 0), "that counts from the next time on");
    times.settle();
    assert_eq!(times.class(0, 300), class(None, 300));
    let batches = times.batches(&times.classes(), &[1], |_| Span::ZERO).unwrap();
    let mean = |application, length| ms(batches[0].of(times.class(application, length)).mean).round();
    assert_eq!([mean(0, 100), mean(7, 1_000), mean(0, 300)], [12.0, 102.0, 32.0]);
    // Of all lengths, half and half.
    assert!((mean(0, 0) - 57.0).abs() <= 5.0, "{}", mean(0, 0));
}

#[test]
fn lengths_are_not_looked_at_where_nobody_asks_for_it_and_one_alone_tells_nothing() {
    let mut orloj = DynamicTimes::new(COST);
    let mut alike = DynamicTimes::by_length(COST);
    for sample in 0..4 * ENOUGH as u32 {
        orloj.handle_alone(0, 100 << (sample % 4), Span::from_millis(10));
        alike.handle_alone(0, 100, Span::from_millis(10));
        assert!(!orloj.handle_batch(GpuId(0), &[(0, 100); 4], Span::from_millis(40)));
    }
    orloj.settle();
    alike.settle();
    assert_eq!((orloj.classes(), alike.classes()), (vec![Class::ANY, Class::of(0)], vec![Class::ANY, Class::of(0)]));
    assert_eq!(orloj.class(0, 200), Class::of(0));
}

#[test]
fn groups_are_of_lengths_where_these_tell_more_than_applications() {
    let mut times = of_two_lengths();
    (0..1000).for_each(|_| times.handle_granted(8));
    let groups = times.groups();
    assert!(groups.len() >= 2, "{groups:?}");
    let lane = |length| groups.iter().position(|group| group.contains(&times.class(0, length)));
    assert!(lane(100).unwrap() < lane(1_000).unwrap(), "{groups:?}");
    // Who is in a group is not taken to be in another one, too: short batches stay short.
    let short = times.batches(&groups[lane(100).unwrap()], &[8], |_| Span::ZERO).unwrap();
    assert_eq!(short[0].mean, COST.latency(8, Span::from_millis(10)));
}

#[test]
fn classes_are_bounded_and_those_with_the_fewest_samples_count_as_of_their_length() {
    let mut times = DynamicTimes::by_length(COST);
    for application in 0..APPLICATIONS_MAX as u8 {
        for step in 0..2 * BUCKETS_MAX as u32 {
            let length = 1 << step.min(31);
            (0..ENOUGH).for_each(|_| times.handle_alone(application, length, Span::from_millis(9)));
        }
    }
    times.settle();
    let narrow = times.classes().into_iter().filter(|class| class.application.is_some() && class.bucket.is_some());
    assert_eq!(narrow.count(), NARROW_MAX);
    assert!(times.classes().len() <= APPLICATIONS_MAX + BUCKETS_MAX + NARROW_MAX + 1);
}

/// What a GPU whose c0 and c1 are these takes for batches of 2 to 8, one in nine of which takes three times as long.
fn run_batches(times: &mut DynamicTimes, gpu: GpuId, cost: BatchCost) {
    for index in 0..BATCHES {
        let (length, work) = [(100, 10), (1_000, 100)][index % 2];
        let batch = 2 + index % 7;
        // What ran alone took c0 as measured, and so much more.
        let alone = COST.fixed + Span::from_millis(work);
        let took = cost.latency(batch, cost.work(alone));
        let took = if index % 9 == 4 { took * 3 } else { took };
        times.handle_batch(gpu, &vec![(0, length); batch], took);
    }
    times.settle();
}

const BATCHES: usize = 63;

#[test]
fn c0_and_c1_follow_executions_whatever_some_outliers_say() {
    let mut times = of_two_lengths();
    let fixed = |ms: f64| Span::from_millis_f64(ms);
    run_batches(&mut times, GpuId(0), BatchCost { fixed: fixed(4.0), per_task: 0.8 });
    let found = times.cost();
    assert!((found.per_task - 0.8).abs() < 0.01 && (ms(found.fixed) - 4.0).abs() < 0.1, "{found:?}");
    // A slower GPU counts for all, until it leaves; a faster one does not.
    run_batches(&mut times, GpuId(1), BatchCost { fixed: fixed(4.0), per_task: 0.95 });
    assert!((times.cost().per_task - 0.95).abs() < 0.01, "{:?}", times.cost());
    run_batches(&mut times, GpuId(2), BatchCost { fixed: fixed(4.0), per_task: 0.5 });
    assert!((times.cost().per_task - 0.95).abs() < 0.01, "{:?}", times.cost());
    times.remove_gpu(GpuId(1));
    times.settle();
    assert!((times.cost().per_task - 0.8).abs() < 0.01, "{:?}", times.cost());
}

#[test]
fn c0_and_c1_stay_near_what_was_measured() {
    let mut times = of_two_lengths();
    run_batches(&mut times, GpuId(0), BatchCost { fixed: Span::from_millis(2), per_task: 0.51 });
    assert_eq!(times.cost(), COST, "within the tolerance");
    for (took, expected) in [(Span::from_millis(60_000), 1.0), (Span(-1), 0.25)] {
        let mut times = of_two_lengths();
        (0..BATCHES).for_each(|_| assert!(times.handle_batch(GpuId(0), &[(0, 1_000); 8], took)));
        times.settle();
        let BatchCost { fixed, per_task } = times.cost();
        assert_eq!((fixed, per_task), (COST.fixed, expected), "{took}: of one length c0 stays as measured");
    }
}

#[test]
fn the_longest_of_many_alike_takes_longer_than_one_of_them() {
    let mut times = DynamicTimes::by_length(COST);
    for sample in 0..1000u32 {
        let work = f64::from(sample.wrapping_mul(617) % 1000) / 100.0;
        times.handle_alone(0, 100, Span::from_millis_f64(2.0 + work));
        times.handle_alone(1, 100, Span::from_millis_f64(2.0 + 1.0));
        times.handle_alone(2, 100 << (sample % 2), Span::from_millis_f64(2.0));
    }
    times.settle();
    // Of four that are uniform from 0 to 10; the others are shorter.
    let largest = times.largest_work(&[(0, 100), (1, 100), (0, 100), (0, 100), (2, 200), (0, 100)]).unwrap();
    assert!((ms(largest) - 8.0).abs() < 0.2, "{largest}");
    assert_eq!(times.largest_work(&[(0, 100), (9, 3_000)]), None, "nothing is known of the second");
}

#[test]
fn nearly_all_batches_are_within_the_longest_time() {
    let mut times = DynamicTimes::by_length(COST);
    assert_eq!(times.longest(4), None);
    for step in 0..100 {
        times.handle_alone(step % 3, 100, Span::from_millis(2 + 1 + i64::from(step)));
    }
    // The 99th of a hundred alone; of several the longest one is mostly the very longest.
    let longest = |times: &DynamicTimes| times.longest(3).unwrap().into_iter().map(ms).collect::<Vec<_>>();
    assert_eq!(longest(&times), [2.0 + 99.0, 2.0 + 1.5 * 100.0, 2.0 + 2.0 * 100.0]);
    // Of what is longer nothing ran alone: 200 ms, and half of that more.
    for _ in 0..2 {
        times.handle_batch(GpuId(0), &[(0, 100), (0, 1_000)], Span::from_millis(2 + 300));
    }
    assert_eq!(longest(&times), [2.0 + 200.0, 2.0 + 1.5 * 200.0, 2.0 + 2.0 * 200.0]);
}

#[test]
fn a_model_that_moves_keeps_its_cost_until_batches_show_another() {
    let mut times = of_two_lengths();
    let cost = BatchCost { fixed: Span::from_millis(4), per_task: 0.8 };
    run_batches(&mut times, GpuId(0), cost);
    let found = times.cost();
    times.handle_moved(COST);
    times.settle();
    assert_eq!(times.cost(), found);
    run_batches(&mut times, GpuId(0), COST);
    assert!((times.cost().per_task - COST.per_task).abs() < 0.05, "{:?}", times.cost());
    // Where backends have measured another one, that holds.
    times.handle_moved(cost);
    times.settle();
    assert_eq!(times.cost(), cost);
}

#[test]
fn what_is_forgotten_of_a_length_is_forgotten_of_all_applications() {
    let mut times = of_two_lengths();
    let long = times.class(0, 1_000);
    times.forget(long);
    times.settle();
    let lengths = |times: &DynamicTimes| times.known_times().lengths.iter().map(|of| of.longest).collect::<Vec<_>>();
    assert_eq!(lengths(&times), [127]);
    let is_short = |class: &Class| times.times(*class).iter().all(|&alone| ms(alone) < 50.0);
    assert!(times.classes().iter().all(is_short), "{:?}", times.classes());
    // Nothing is known of application 9 but what is of all: that is not believed until there is a new one.
    let of_others = times.times(Class::of(0));
    times.forget(times.class(9, 0));
    times.settle();
    assert_eq!((times.times(Class::ANY), times.times(Class::of(0))), (vec![COST.fixed], of_others));
    times.handle_alone(9, 0, Span::from_millis(5));
    times.settle();
    assert!(times.times(Class::ANY).len() > 1);
}

#[test]
fn a_stall_among_few_samples_counts_once_another_one_takes_as_long() {
    let (app, stall) = (Class::of(0), Span::from_millis(900));
    let mut times = DynamicTimes::new(COST);
    for _ in 0..8 {
        times.handle_alone(0, 0, Span::from_millis(10));
    }
    times.handle_alone(0, 0, stall);
    times.handle_alone(0, 0, Span::from_millis(10));
    assert_eq!(times.times(app), vec![Span::from_millis(10); 9], "one in ten would be a mean of 99 ms");
    times.handle_alone(0, 0, stall);
    assert_eq!(times.times(app).iter().filter(|&&alone| alone == stall).count(), 2);
    // What is known then is that some take so long.
    times.handle_alone(0, 0, stall);
    assert_eq!(times.times(app).len(), 12);
}
