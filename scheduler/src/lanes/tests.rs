use proptest::prelude::*;
use proto::{GpuId, ModelId};

use super::*;
use crate::dynamic::BatchCost;

const COST: BatchCost = BatchCost { fixed: Span::from_millis(1), per_task: 1.0 };
const ORLOJ: Rules = Rules { rate: 1e-4, has_lanes: false };

fn at(ms: f64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis_f64(ms)
}

fn config(max_batch: usize) -> ModelConfig {
    let profile = LatencyProfile::linear(50.0, 1.0, max_batch).unwrap();
    ModelConfig { dynamic: Some(COST), ..ModelConfig::new(profile, 100) }
}

/// Of a model with applications of about 10 and 100 ms, two of them alike.
fn lanes(rules: Rules, max_batch: usize) -> Lanes<()> {
    let mut lanes = Lanes::new(at(0.0), rules, config(max_batch), NetworkBudget::default());
    for sample in 0..3 * SAMPLES_A_TABLE {
        let application = (sample % 3) as u8;
        let alone = [11.0, 11.5, 101.0][usize::from(application)] + (sample % 7) as f64 / 10.0;
        lanes.handle_alone(at(0.0), (application, 0), Span::from_millis_f64(alone));
    }
    lanes
}

fn key(id: u64, application: u8, deadline: f64) -> Queued {
    Queued { id: TaskId(id), deadline: at(deadline), queued_at: at(0.0), priority: 0, application, length: 0 }
}

fn take(lanes: &mut Lanes<()>, now: f64) -> Option<Batch<()>> {
    let choice = lanes.choice(at(now))?;
    Some(lanes.take_batch(at(now), choice, (ModelId(0), GpuId(0)), (at(now), Timestamp::PAST)))
}

fn ids(batch: &Batch<()>) -> Vec<u64> {
    batch.tasks.iter().map(|(key, ())| key.id.0).collect()
}

#[test]
fn lanes_keep_short_requests_from_being_padded_to_long_ones() {
    let mut lanes = lanes(Rules::LANES, 2);
    let classes: Vec<_> = lanes.lanes.iter().map(|lane| lane.classes.clone()).collect();
    // What is of none of them may take as long as any.
    assert_eq!(classes, [vec![Class::of(0), Class::of(1)], vec![Class::ANY], vec![Class::of(2)]]);
    for (id, application) in [(0, 2), (1, 0), (2, 2), (3, 1)] {
        lanes.push(at(0.0), key(id, application, 500.0), ());
    }
    // What is short goes first, though all have the same deadline.
    let mut batch = ids(&take(&mut lanes, 0.0).unwrap());
    batch.sort_unstable();
    assert_eq!(batch, [1, 3]);
    assert_eq!(ids(&take(&mut lanes, 25.0).unwrap()), [0, 2]);
    assert!(take(&mut lanes, 300.0).is_none());
}

#[test]
fn batches_have_sizes_between_powers_of_two_where_requests_of_a_lane_are_alike() {
    assert_eq!(sizes(16, true), [1, 2, 3, 4, 6, 8, 12, 16]);
    assert_eq!(sizes(16, false), [1, 2, 4, 8, 16]);
    assert_eq!([sizes(1, true), sizes(7, true)], [vec![1], vec![1, 2, 3, 4, 6, 7]]);
    let of_lanes = |rules: Rules| lanes(rules, 6).lanes[0].queues.iter().map(SizeQueue::size).collect::<Vec<_>>();
    assert_eq!([of_lanes(Rules::LANES), of_lanes(ORLOJ)], [vec![1, 2, 3, 4, 6], vec![1, 2, 4, 6]]);
}

/// Of two lanes the one goes first whose application has lost more, even if its requests take longer.
#[test]
fn who_loses_more_than_others_goes_first_and_who_asks_for_too_much_does_not() {
    let mut lanes = lanes(Rules::LANES, 2);
    let lose = |lanes: &mut Lanes<()>, given_ms: f64| {
        for id in 0..100 {
            lanes.push(at(0.0), key(id, 2, given_ms), ());
            assert_eq!(lanes.handle_timeout(at(0.0), at(given_ms)).len(), 1);
        }
        lanes.push(at(0.0), key(200, 2, 500.0), ());
        lanes.push(at(0.0), key(201, 0, 500.0), ());
        [0.0, 1.0].map(|now| ids(&take(lanes, now).unwrap())[0])
    };
    // 101 ms alone are more than 90, whoever else is given up.
    assert_eq!(lose(&mut lanes, 90.0), [201, 200]);
    assert_eq!(lose(&mut lanes, 400.0), [200, 201]);
}

/// One application, whose requests take what their lengths say: 10 ms for 100 bytes, 100 ms for 1,000.
fn of_two_lengths(rules: Rules) -> Lanes<()> {
    let mut lanes = Lanes::new(at(0.0), rules, config(2), NetworkBudget::default());
    for sample in 0..2 * SAMPLES_A_TABLE {
        let (length, alone) = [(100, 11.0), (1_000, 101.0)][sample as usize % 2];
        let alone = alone + (sample % 7) as f64 / 10.0;
        lanes.handle_alone(at(0.0), (0, length), Span::from_millis_f64(alone));
    }
    lanes
}

#[test]
fn with_lanes_lengths_tell_what_applications_do_not_and_orloj_does_not_know_them() {
    let [late, of_orloj] = [Rules::LANES, ORLOJ].map(|rules| {
        let mut lanes = of_two_lengths(rules);
        for (id, length, deadline) in
            [(0, 1_000, 500.0), (1, 100, 500.0), (2, 1_000, 500.0), (3, 100, 500.0), (4, 1_000, 60.0)]
        {
            lanes.push(at(0.0), Queued { length, ..key(id, 0, deadline) }, ());
        }
        let late: Vec<u64> = lanes.handle_timeout(at(0.0), at(0.0)).iter().map(|(key, ())| key.id.0).collect();
        if rules == Rules::LANES {
            assert_eq!(ids(&take(&mut lanes, 0.0).unwrap()), [1, 3]);
            assert_eq!(ids(&take(&mut lanes, 25.0).unwrap()), [0, 2]);
        }
        late
    });
    // No batch serves it in time; to Orloj it is one of those that take 56 ms on average.
    assert_eq!((late, of_orloj), (vec![4], vec![]));
}

#[test]
fn lanes_follow_what_batches_take() {
    let mut lanes = of_two_lengths(Rules::LANES);
    let mean = |lanes: &Lanes<()>| lanes.lanes[0].times[1].mean;
    let (before, tables) = (mean(&lanes), lanes.tables_made());
    // A second request for half of what the first one takes, instead of all of it.
    for index in 0..2 * SAMPLES_A_TABLE {
        let (length, took) = [(100, 16.5), (1_000, 151.5)][index as usize % 2];
        lanes.handle_executed(at(1.0), GpuId(0), &[(0, length); 2], Span::from_millis_f64(took));
    }
    let after = mean(&lanes);
    assert!(before > Span::from_millis(21) && after < Span::from_millis(18), "{before} {after}");
    assert_eq!(lanes.tables_made(), tables + 2);
    // Whoever plans it next knows as much, and what it does not know of its GPUs yet.
    let mut next = Lanes::new(at(2.0), Rules::LANES, config(2), NetworkBudget::default());
    next.handle_samples(at(2.0), lanes.into_samples().unwrap());
    assert_eq!(mean(&next), after);
}

#[test]
fn a_model_whose_requests_are_not_known_is_planned_by_its_profile_and_soon_by_them() {
    let mut lanes = Lanes::new(at(0.0), Rules::LANES, config(2), NetworkBudget::default());
    lanes.push(at(0.0), key(0, 0, 60.0), ());
    let outlook = |lanes: &Lanes<()>| lanes.outlook(lanes.choice(at(0.0)).unwrap());
    assert_eq!(outlook(&lanes).execution, Span::from_millis(51));
    assert_eq!(lanes.longest(), config(2).profile);
    for sample in 1..=2 * SAMPLES_AT_FIRST {
        let is_made_anew = lanes.handle_alone(at(0.0), (0, 0), Span::from_millis(11));
        assert_eq!(is_made_anew, sample == SAMPLES_AT_FIRST || sample == 2 * SAMPLES_AT_FIRST, "{sample}");
    }
    assert_eq!(outlook(&lanes).execution, Span::from_millis(11));
    assert_eq!(lanes.longest().latency(2), Span::from_millis(21));
    // Another cost: what requests took alone they took, and two of them take less.
    let dynamic = Some(BatchCost { per_task: 0.5, ..COST });
    lanes.handle_config(at(0.0), ModelConfig { dynamic, ..config(2) }, NetworkBudget::default());
    assert_eq!(outlook(&lanes).execution, Span::from_millis(11));
    assert_eq!(lanes.longest().latency(2), Span::from_millis(16));
    // A model that is not dynamic for a while knows nothing again.
    for dynamic in [None, dynamic] {
        lanes.handle_config(at(0.0), ModelConfig { dynamic, ..config(2) }, NetworkBudget::default());
        assert_eq!(outlook(&lanes).execution, Span::from_millis(51));
    }
}

#[test]
fn what_hung_keeps_nothing_like_it_from_running_for_ever() {
    let hopeless = |rules: Rules| {
        let mut lanes = lanes(rules, 2);
        // Of a fourth application, which is all that is known of it; of the third nothing has a chance.
        for _ in 0..SAMPLES_A_TABLE {
            lanes.handle_alone(at(0.0), (3, 0), Span::from_millis(700));
        }
        let mut given_up = |now: f64, application| {
            lanes.push(at(now), Queued { queued_at: at(now), ..key(0, application, now + 90.0) }, ());
            let given_up = lanes.handle_timeout(at(now), at(now)).len();
            lanes.drain();
            given_up
        };
        [(0.0, 3), (9_000.0, 3), (10_000.0, 3), (10_001.0, 3), (10_002.0, 2), (20_002.0, 2), (20_003.0, 2)]
            .map(|(now, application)| given_up(now, application))
    };
    assert_eq!(hopeless(Rules::LANES), [1, 1, 0, 0, 1, 0, 0]);
    assert_eq!(hopeless(ORLOJ)[3], 1, "as published");
}

#[test]
fn one_that_hung_is_forgotten_the_sooner_the_less_a_trial_costs() {
    // Ten took 4 ms and one a second: all are thought to take 95, which is more than they have.
    let mut lanes = lanes(Rules::LANES, 2);
    for sample in 0..SAMPLES_A_TABLE {
        let took = if sample % 11 == 10 { 1_000 } else { 4 };
        lanes.handle_alone(at(0.0), (3, 0), Span::from_millis(took));
    }
    let mut given_up = |now: f64| {
        lanes.push(at(now), Queued { queued_at: at(now), ..key(0, 3, now + 50.0) }, ());
        let given_up = lanes.handle_timeout(at(now), at(now)).len();
        lanes.drain();
        given_up
    };
    assert_eq!([0.0, 1_000.0, 2_000.0].map(&mut given_up), [1, 1, 0]);
}

#[test]
fn who_asks_for_too_much_makes_nobody_forget_what_others_take() {
    let mut lanes = lanes(Rules::LANES, 2);
    let before = lanes.request_times();
    let mut given_up = |now: f64, application| {
        lanes.push(at(now), Queued { queued_at: at(now), ..key(0, application, now + 30.0) }, ());
        let given_up = lanes.handle_timeout(at(now), at(now)).len();
        lanes.drain();
        given_up
    };
    // An application that nothing is known of is like all, of which a third are long; in the end it is tried.
    let given_up = [0.0, 500.0, 1_000.0, 1_001.0].map(|now| given_up(now, 7));
    assert_eq!(given_up, [1, 1, 0, 0]);
    assert_eq!(lanes.request_times(), before);
}

#[test]
fn requests_far_shorter_than_what_was_measured_are_tried_at_once() {
    let mut lanes = Lanes::new(at(0.0), Rules::LANES, config(2), NetworkBudget::default());
    // l(1) is 51 ms, and a batch takes 1 ms in any case.
    let mut given_up = |now: f64, slo: f64| {
        lanes.push(at(now), Queued { queued_at: at(now), ..key(0, 0, now + slo) }, ());
        let given_up = lanes.handle_timeout(at(now), at(now)).len();
        lanes.drain();
        given_up
    };
    assert_eq!([given_up(0.0, 20.0), given_up(1.0, 0.5), given_up(11_000.0, 0.5)], [0, 1, 1]);
}

#[test]
fn a_table_costs_no_more_where_many_wait() {
    let mut lanes = lanes(Rules::LANES, 2);
    (0..80 * SAMPLES_A_TABLE).for_each(|id| lanes.push(at(0.0), key(id, 0, 1e6), ()));
    let tables = lanes.tables_made();
    let samples = 40 * SAMPLES_A_TABLE;
    let made = (0..samples).filter(|_| lanes.handle_alone(at(0.0), (0, 0), Span::from_millis(11))).count() as u64;
    assert_eq!(lanes.tables_made() - tables, made);
    assert_eq!(made, samples / (80 * SAMPLES_A_TABLE / WAITING_A_SAMPLE));
    // Nor do changes of l(b), which nobody goes by any more.
    let choice = lanes.choice(at(1.0));
    let slower = LatencyProfile::linear(60.0, 1.0, 2).unwrap();
    lanes.handle_config(at(1.0), ModelConfig { profile: slower, ..config(2) }, NetworkBudget::default());
    assert_eq!(lanes.choice(at(1.0)), choice);
}

#[test]
fn what_had_a_chance_and_lost_it_is_no_reason_to_forget() {
    let mut lanes = lanes(Rules::LANES, 2);
    let before = lanes.request_times();
    for second in 0..30 {
        let now = f64::from(second) * 1_000.0;
        lanes.push(at(now), Queued { queued_at: at(now), ..key(0, 0, now + 90.0) }, ());
        assert_eq!(lanes.handle_timeout(at(now), at(now)).len(), 0);
        assert_eq!(lanes.handle_timeout(at(now + 89.0), at(now + 89.0)).len(), 1);
    }
    assert_eq!(lanes.request_times(), before);
}

#[test]
fn a_batch_may_start_while_one_of_its_tasks_could_be_in_time_and_for_so_long_at_most() {
    let mut lanes = lanes(Rules::LANES, 2);
    lanes.push(at(0.0), key(0, 0, 100.0), ());
    lanes.push(at(0.0), key(1, 0, 200.0), ());
    let batch = take(&mut lanes, 0.0).unwrap();
    // The shortest of two take 21 ms.
    assert_eq!((batch.exec_at, batch.latest), (at(0.0), at(200.0 - 21.0)));
    lanes.push(at(0.0), key(2, 0, 1e9), ());
    let choice = lanes.choice(at(0.0)).unwrap();
    let batch = lanes.take_batch(at(0.0), choice, (ModelId(0), GpuId(0)), (at(0.0), at(3.0)));
    assert_eq!((batch.exec_at, batch.latest), (at(3.0), at(3.0) + WINDOW_MAX));
    // Whoever looks too late is told so, and no window ends before it begins.
    lanes.push(at(0.0), key(3, 0, 20.0), ());
    let batch = take(&mut lanes, 30.0).unwrap();
    assert_eq!((batch.exec_at, batch.latest), (at(30.0), at(30.0)));
}

#[derive(Debug, Clone)]
enum Step {
    Push(u8, f64, u8),
    Pass(f64),
    Take,
    TakeBelow(u8),
    Remove(u64),
    KeepEvery(u64),
    Learn(u8, f64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..5, 5.0..600.0, 0u8..3).prop_map(|(number, slo, priority)| Step::Push(number, slo, priority)),
        3 => (0.0..30.0).prop_map(Step::Pass),
        2 => Just(Step::Take),
        1 => (0u8..4).prop_map(Step::TakeBelow),
        1 => (0u64..80).prop_map(Step::Remove),
        1 => (2u64..6).prop_map(Step::KeepEvery),
        1 => (0u8..5, 2.0..150.0).prop_map(|(application, alone)| Step::Learn(application, alone)),
    ]
}

/// The lane of an application, and what of a list could be in its batches of each size now.
fn fits(lanes: &Lanes<()>, waiting: &[Queued], now: Timestamp, lane: usize, size: usize) -> Vec<Queued> {
    let has = |lane: &Lane, class| lane.classes.contains(&class);
    let class = |application| {
        let own = Class::of(application);
        if lanes.lanes.iter().any(|lane| has(lane, own)) { own } else { Class::ANY }
    };
    let Lane { times, .. } = &lanes.lanes[lane];
    let fits = |key: &&Queued| {
        let class = class(key.application);
        has(&lanes.lanes[lane], class) && now + times[size].of(class).mean <= key.deadline
    };
    waiting.iter().filter(fits).copied().collect()
}

proptest! {
    /// The oracle is a list that is looked through each time.
    #[test]
    fn behaves_like_a_list(
        steps in proptest::collection::vec(step(), 0..150),
        has_lanes in any::<bool>(),
    ) {
        let mut lanes = lanes(Rules { has_lanes, ..ORLOJ }, 6);
        let mut waiting: Vec<Queued> = Vec::new();
        let mut now = at(0.0);
        for (serial, step) in (0u64..).zip(steps) {
            match step {
                Step::Push(application, slo, priority) => {
                    let deadline = now + Span::from_millis_f64(slo);
                    let key = Queued { id: TaskId(serial), deadline, queued_at: now, priority, application, length: 0 };
                    lanes.push(now, key, ());
                    waiting.push(key);
                }
                Step::Pass(ms) => now += Span::from_millis_f64(ms),
                Step::Take => {
                    if let Some(choice) = lanes.choice(now) {
                        let outlook = lanes.outlook(choice);
                        let fit = fits(&lanes, &waiting, now, choice.lane, choice.queue);
                        let batch = lanes.take_batch(now, choice, (ModelId(0), GpuId(0)), (now, Timestamp::PAST));
                        prop_assert_eq!(batch.tasks.len(), outlook.size);
                        prop_assert!(batch.tasks.is_sorted_by_key(|(key, ())| key.deadline));
                        prop_assert!(batch.tasks.iter().all(|(key, ())| fit.contains(key)));
                        prop_assert!(batch.exec_at <= batch.latest);
                        waiting.retain(|key| !batch.tasks.iter().any(|(taken, ())| taken == key));
                    }
                }
                Step::TakeBelow(priority) => {
                    let least = waiting.iter().max_by_key(|key| (key.priority, key.deadline, key.id)).copied();
                    let least = least.filter(|least| least.priority > priority);
                    prop_assert_eq!(lanes.take_below(priority).map(|(key, ())| key), least);
                    waiting.retain(|key| Some(*key) != least);
                }
                Step::Remove(id) => {
                    let found = waiting.iter().find(|key| key.id == TaskId(id)).copied();
                    prop_assert_eq!(lanes.remove(TaskId(id)).map(|(key, ())| key), found);
                    waiting.retain(|key| Some(*key) != found);
                }
                Step::KeepEvery(nth) => {
                    let before = waiting.len();
                    waiting.retain(|key| key.id.0 % nth == 0);
                    prop_assert_eq!(lanes.retain(|key| key.id.0 % nth == 0), waiting.len() < before);
                }
                Step::Learn(application, alone) => {
                    for _ in 0..SAMPLES_A_TABLE {
                        lanes.handle_alone(now, (application, 0), Span::from_millis_f64(alone));
                    }
                }
            }
            let late = lanes.handle_timeout(now, now);
            let hopeless = |key: &Queued| {
                let of = |lane: usize| (0..lanes.lanes[lane].queues.len()).map(move |size| (lane, size));
                let mut places = (0..lanes.lanes.len()).flat_map(of);
                places.all(|(lane, size)| fits(&lanes, &[*key], now, lane, size).is_empty())
            };
            for (key, ()) in &late {
                prop_assert!(waiting.contains(key) && hopeless(key), "{:?} at {:?}", key, now);
            }
            waiting.retain(|key| !late.iter().any(|(gone, ())| gone == key));
            prop_assert!(!waiting.iter().any(hopeless));
            prop_assert_eq!(lanes.len(), waiting.len());
            for priority in 0..4 {
                let of_it = waiting.iter().filter(|key| key.priority == priority).count();
                prop_assert_eq!(lanes.length_of(priority), of_it);
            }
            let expected = (0..lanes.lanes.len()).filter_map(|lane| {
                let queues = lanes.lanes[lane].queues.iter().enumerate();
                let full = queues.filter_map(|(index, queue)| {
                    let fit = fits(&lanes, &waiting, now, lane, index);
                    let (earliest, queued_at) = fit.iter().map(|key| (key.deadline, key.queued_at)).min()?;
                    (fit.len() >= queue.size()).then_some((earliest, queue.size(), index, queued_at, fit))
                });
                let (deadline, size, queue, queued_at, fit) = full.max_by_key(|found| (found.0, found.1))?;
                // By weight in a nanosecond, and the sooner the less it can wait.
                let weight: f64 = fit.iter().map(|key| lanes.losses.weight(key.application)).sum();
                let mean = lanes.lanes[lane].times[queue].mean;
                let ns = |span: Span| span.as_nanos() as f64;
                let waits = ns((deadline - now - mean).max(Span::ZERO)) / ns(deadline - queued_at);
                let worth = size as f64 * weight / fit.len() as f64 / ns(mean) * (2.0 - waits.min(1.0));
                Some((worth, Choice { deadline, lane, queue }))
            });
            let expected: Vec<(f64, Choice)> = expected.collect();
            let most = expected.iter().map(|(worth, _)| *worth).fold(0.0, f64::max);
            let found = lanes.choice(now);
            prop_assert_eq!(found.is_some(), !expected.is_empty());
            // Of those that are worth as much any.
            let is_best = |(worth, choice): &(f64, Choice)| Some(*choice) == found && *worth >= most * (1.0 - 1e-9);
            prop_assert!(found.is_none() || expected.iter().any(is_best), "{:?} of {:?}", found, expected);
            if let Some(choice) = lanes.choice(now) {
                let Outlook { expires_at, .. } = lanes.outlook(choice);
                prop_assert!(expires_at > now && lanes.first_expiry().unwrap() > now);
            }
        }
        let all: Vec<Queued> = lanes.drain().into_iter().map(|(key, ())| key).collect();
        prop_assert!(all.is_sorted_by_key(|key| key.deadline));
        prop_assert_eq!((all.len(), lanes.len(), lanes.choice(now)), (waiting.len(), 0, None));
    }
}
