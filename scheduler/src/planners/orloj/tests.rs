use super::*;
use crate::{dynamic::BatchCost, lanes::SAMPLES_A_TABLE, planners::testing::Bench, policy::Policy};

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
    let profile = LatencyProfile::linear(50.0, 1.0, 2).unwrap();
    let cost = BatchCost { fixed: Span::from_millis(1), per_task: 1.0 };
    planner.handle_model(at(0.0), ModelId(0), ModelConfig { dynamic: Some(cost), ..ModelConfig::new(profile, 100) });
    for sample in 0..2 * SAMPLES_A_TABLE {
        let application = (sample % 2) as u8;
        let alone = [11.0, 101.0][application as usize] + (sample % 7) as f64 / 10.0;
        planner.handle_alone(at(0.0), ModelId(0), (application, 0), Span::from_millis_f64(alone));
    }
    planner.handle_gpu_joined(at(0.0), GpuId(0), vec![ModelId(0)], None);
    planner
}

fn submit(planner: &mut Orloj<()>, id: u64, application: u8, deadline: f64) {
    let task = Task { id: TaskId(id), deadline: at(deadline), priority: 0, application, length: 0, payload: () };
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
    let base = planner.models[0].as_ref().unwrap().base();
    assert!(base > at(1_900_000.0), "{base:?}");
}

#[test]
fn what_batches_took_counts_for_gpus_that_are_here_and_lengths_tell_nothing() {
    let mut planner = dynamic();
    let times = |planner: &Orloj<()>| planner.request_times(ModelId(0)).unwrap();
    let before = (times(&planner), planner.tables_made(ModelId(0)));
    for gpu in [GpuId(0), GpuId(9)] {
        for _ in 0..SAMPLES_A_TABLE {
            planner.handle_executed(at(1.0), ModelId(0), gpu, &[(0, 100); 2], Span::from_millis(15));
        }
    }
    assert_eq!((times(&planner), planner.tables_made(ModelId(0))), before);
    assert!(before.1 > 0 && before.0.lengths.is_empty() && before.0.applications.len() == 2, "{before:?}");
}
