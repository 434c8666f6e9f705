use super::*;
use crate::{dynamic::BatchCost, planners::testing::Bench, policy::Policy};

fn at(ms: f64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis_f64(ms)
}

/// l(b) = b + 5 ms. Sizes are 1, 2, 4 and so on.
#[test]
fn the_largest_full_batch_that_could_be_on_time_goes_to_an_idle_gpu() {
    let mut bench = Bench::new(Policy::Orloj(1e-4), 1, 1);
    bench.submit(0.0, 0, 40.0);
    assert_eq!(bench.decide(0.0), ["model 0 on GPU 0 at 0: [0]"]);
    for _ in 0..5 {
        bench.submit(1.0, 0, 40.0);
    }
    // Until it reports that it is idle, it is not.
    assert_eq!(bench.decide(7.0), [""; 0]);
    bench.finished(0, 8.0);
    assert_eq!(bench.decide(8.0), ["model 0 on GPU 0 at 8: [1, 2, 3, 4]"]);
    // One that no batch could serve is given up at the instant that shows it.
    bench.submit(9.0, 0, 20.0);
    assert_eq!(bench.decide(9.0), [""; 0]);
    assert_eq!(bench.timeout(), Some(14.000_001));
    assert_eq!(bench.decide(14.000_001), ["dropped [6]: Deadline"]);
    bench.finished(0, 17.0);
    assert_eq!(bench.decide(17.0), ["model 0 on GPU 0 at 17: [5]"]);
}

/// A model with applications of 10 and of 100 ms, and no cost of its own.
fn dynamic() -> Orloj<()> {
    let mut planner = Orloj::new(NetworkBudget::default(), 1e-4);
    learn(&mut planner);
    planner
}

fn learn(planner: &mut Orloj<()>) {
    let profile = LatencyProfile::linear(50.0, 1.0, 2).unwrap();
    let cost = BatchCost { fixed: Span::from_millis(1), per_task: 1.0 };
    planner.handle_model(at(0.0), ModelId(0), ModelConfig { dynamic: Some(cost), ..ModelConfig::new(profile, 100) });
    for sample in 0..2 * SAMPLES_A_TABLE {
        let application = (sample % 2) as u8;
        let alone = [11.0, 101.0][application as usize] + (sample % 7) as f64 / 10.0;
        planner.handle_alone(at(0.0), ModelId(0), (application, 0), Span::from_millis_f64(alone));
    }
    planner.handle_gpu_joined(at(0.0), GpuId(0), vec![ModelId(0)], None);
}

fn submit(planner: &mut Orloj<()>, id: u64, application: u8, deadline: f64) {
    submit_long(planner, id, (application, 0), deadline);
}

fn submit_long(planner: &mut Orloj<()>, id: u64, (application, length): (u8, u32), deadline: f64) {
    let task = Task { id: TaskId(id), deadline: at(deadline), priority: 0, application, length, payload: () };
    planner.handle_submit(at(0.0), ModelId(0), task);
}

fn decide(planner: &mut Orloj<()>, now: f64) -> Vec<Vec<u64>> {
    planner.handle_timeout(at(now));
    let outputs = std::iter::from_fn(|| planner.poll_output());
    let ids = |output| match output {
        PlannerOutput::Batch(batch) => batch.tasks.iter().map(|(key, ())| key.id.0).collect(),
        PlannerOutput::Dropped { task, .. } => vec![100 + task.id.0],
        other => panic!("{other:?}"),
    };
    outputs.map(ids).collect()
}

#[test]
fn what_is_expected_of_an_application_decides_what_it_can_still_be_in() {
    let mut planner = dynamic();
    // 60 ms are enough for a short one alone, and for no batch of two, whose mean is about 156 ms; a long one needs
    // 100.
    submit(&mut planner, 0, 0, 60.0);
    submit(&mut planner, 1, 1, 60.0);
    submit(&mut planner, 2, 0, 60.0);
    assert_eq!(decide(&mut planner, 0.0), [vec![101], vec![0]]);
    // Both deadlines are far: they go together, and the one that must be alone waits.
    submit(&mut planner, 3, 1, 400.0);
    submit(&mut planner, 4, 0, 400.0);
    planner.handle_finished(GpuId(0), at(11.0));
    assert_eq!(decide(&mut planner, 11.0), [vec![3, 4]]);
    planner.handle_finished(GpuId(0), at(40.0));
    assert_eq!(decide(&mut planner, 40.0), [vec![2]]);
}

#[test]
fn scores_outlive_the_clock_that_they_count_from() {
    let mut planner = dynamic();
    let mut ended = 0;
    for second in 0..3000 {
        let now = f64::from(second) * 1000.0;
        let id = u64::from(second as u32);
        let task = |id, application, slo| Task {
            id: TaskId(id),
            deadline: at(now + slo),
            priority: 0,
            application,
            length: 0,
            payload: (),
        };
        planner.handle_submit(at(now), ModelId(0), task(2 * id, 0, 300.0));
        planner.handle_submit(at(now), ModelId(0), task(2 * id + 1, 1, 350.0));
        ended += decide(&mut planner, now).into_iter().flatten().filter(|&id| id < 100 || id % 2 < 2).count();
        planner.handle_finished(GpuId(0), at(now + 200.0));
    }
    assert_eq!((ended, planner.queue_length(ModelId(0))), (6000, 0));
    assert!(planner.clock.base > at(1_900_000.0), "{:?}", planner.clock.base);
}

#[test]
fn lanes_keep_short_requests_from_being_padded_to_long_ones() {
    let mut planner = Orloj::with_lanes(NetworkBudget::default());
    learn(&mut planner);
    assert_eq!(planner.models[0].as_ref().unwrap().lanes.len(), 2);
    for (id, application) in [(0, 1), (1, 0), (2, 1), (3, 0)] {
        submit(&mut planner, id, application, 500.0);
    }
    // What is short goes first, though all have the same deadline.
    assert_eq!(decide(&mut planner, 0.0), [vec![1, 3]]);
    planner.handle_finished(GpuId(0), at(25.0));
    assert_eq!(decide(&mut planner, 25.0), [vec![0, 2]]);
}

/// One application, whose requests take what their lengths say: 10 ms for 100 bytes, 100 ms for 1,000.
fn learn_lengths(planner: &mut Orloj<()>) {
    let profile = LatencyProfile::linear(50.0, 1.0, 2).unwrap();
    let cost = BatchCost { fixed: Span::from_millis(1), per_task: 1.0 };
    planner.handle_model(at(0.0), ModelId(0), ModelConfig { dynamic: Some(cost), ..ModelConfig::new(profile, 100) });
    for sample in 0..2 * SAMPLES_A_TABLE {
        let (length, alone) = [(100, 11.0), (1_000, 101.0)][sample as usize % 2];
        let alone = alone + (sample % 7) as f64 / 10.0;
        planner.handle_alone(at(0.0), ModelId(0), (0, length), Span::from_millis_f64(alone));
    }
    planner.handle_gpu_joined(at(0.0), GpuId(0), vec![ModelId(0)], None);
}

#[test]
fn with_lanes_lengths_tell_what_applications_do_not_and_orloj_does_not_know_them() {
    let mut lanes = Orloj::with_lanes(NetworkBudget::default());
    let mut orloj = Orloj::new(NetworkBudget::default(), 1e-4);
    for planner in [&mut lanes, &mut orloj] {
        learn_lengths(planner);
        for (id, length) in [(0, 1_000), (1, 100), (2, 1_000), (3, 100)] {
            submit_long(planner, id, (0, length), 500.0);
        }
        // No batch serves it in time; to Orloj it is one of those that take 56 ms on average.
        submit_long(planner, 4, (0, 1_000), 60.0);
    }
    assert_eq!(decide(&mut lanes, 0.0), [vec![104], vec![1, 3]]);
    lanes.handle_finished(GpuId(0), at(25.0));
    assert_eq!(decide(&mut lanes, 25.0), [vec![0, 2]]);
    let mixed = decide(&mut orloj, 0.0);
    assert!(mixed.iter().flatten().all(|&id| id < 100), "nothing is given up yet: {mixed:?}");
}

#[test]
fn lanes_follow_what_batches_take() {
    let mut planner = Orloj::with_lanes(NetworkBudget::default());
    learn_lengths(&mut planner);
    let mean = |planner: &Orloj<()>| planner.models[0].as_ref().unwrap().lanes[0].times[1].mean;
    let before = mean(&planner);
    // A second request for half of what the first one takes, instead of all of it.
    for index in 0..2 * SAMPLES_A_TABLE {
        let (length, took) = [(100, 16.5), (1_000, 151.5)][index as usize % 2];
        let took = Span::from_millis_f64(took);
        planner.handle_executed(at(1.0), ModelId(0), GpuId(0), &[(0, length); 2], took);
        planner.handle_executed(at(1.0), ModelId(0), GpuId(9), &[(0, length); 2], took * 9);
    }
    let after = mean(&planner);
    assert!(before > Span::from_millis(21) && after < Span::from_millis(18), "{before} {after}");
}
