use crate::{planners::testing::Bench, policy::Policy};

const NOTHING: [&str; 0] = [];

/// Batches of one take 6 ms, loads 8 ms.
#[test]
fn a_cold_model_is_loaded_and_runs_in_time_or_is_given_up_at_once() {
    let mut bench = Bench::paged(Policy::Eager, 1, 2, 1);
    // From 8 to 14 ms, at best.
    bench.submit(0.0, 0, 13.9);
    bench.submit(0.0, 1, 14.0);
    assert_eq!(bench.decide(0.0), ["load model 1 into GPU 0 at 0", "dropped [0]: ColdStart"]);
    assert_eq!(bench.decide(7.9), NOTHING);
    bench.loaded(8.0, 0, 1, true);
    assert_eq!(bench.decide(8.0), ["model 1 on GPU 0 at 8: [1]"]);
    // What runs does not make room, what has run does.
    bench.submit(9.0, 0, 30.0);
    assert_eq!(bench.decide(9.0), NOTHING);
    bench.finished(0, 14.0);
    assert_eq!(bench.decide(14.0), ["unload model 1 from GPU 0", "load model 0 into GPU 0 at 14"]);
    // It comes too late.
    bench.loaded(24.5, 0, 0, true);
    assert_eq!(bench.decide(24.5), ["dropped [2]: ColdStart"]);
}

#[test]
fn loads_go_by_deadline_and_wait_until_the_link_is_nearly_free() {
    let mut bench = Bench::paged(Policy::Eager, 1, 3, 3);
    bench.submit(0.0, 0, 80.0);
    bench.submit(0.0, 1, 60.0);
    bench.submit(0.0, 2, 70.0);
    assert_eq!(bench.decide(0.0), ["load model 1 into GPU 0 at 0"]);
    assert_eq!(bench.timeout(), Some(3.0));
    assert_eq!(bench.decide(3.0), ["load model 2 into GPU 0 at 8"]);
}

#[test]
fn what_was_used_least_makes_room_and_a_failed_load_is_tried_again() {
    let mut bench = Bench::paged(Policy::Eager, 1, 3, 2);
    let mut now = 0.0;
    // Model 0 is used twice, then model 1 once.
    for model in [0, 1] {
        bench.submit(now, model, now + 50.0);
        assert_eq!(bench.decide(now).len(), 1);
        bench.loaded(now + 8.0, 0, model, true);
        for _ in 0..2 - model {
            bench.submit(now + 8.0, model, now + 50.0);
        }
        assert_eq!(bench.decide(now + 8.0).len(), 1);
        bench.finished(0, now + 16.0);
        now += 20.0;
    }
    bench.submit(now, 2, now + 50.0);
    assert_eq!(bench.decide(now), ["unload model 1 from GPU 0", "load model 2 into GPU 0 at 40"]);
    bench.loaded(45.0, 0, 2, false);
    assert_eq!(bench.decide(45.0), ["load model 2 into GPU 0 at 45"]);
}

/// Two GPUs, one model: a copy is made once one GPU cannot serve all in time, and the other one would be idle.
#[test]
fn a_model_that_one_gpu_cannot_serve_is_loaded_into_another() {
    let mut bench = Bench::paged(Policy::Eager, 2, 1, 1);
    bench.submit(0.0, 0, 50.0);
    assert_eq!(bench.decide(0.0), ["load model 0 into GPU 0 at 0"]);
    bench.loaded(8.0, 0, 0, true);
    assert_eq!(bench.decide(8.0), ["model 0 on GPU 0 at 8: [0]"]);
    for _ in 0..64 {
        bench.submit(8.5, 0, 100.0);
    }
    // A batch of 64 waits for the GPU, which runs it from 14 to 83 ms.
    assert_eq!(bench.decide(8.5), NOTHING);
    bench.finished(0, 14.0);
    assert_eq!(bench.decide(14.0).len(), 1);
    bench.submit(15.0, 0, 60.0);
    assert_eq!(bench.decide(15.0), ["load model 0 into GPU 1 at 15"]);
    bench.loaded(23.0, 1, 0, true);
    assert_eq!(bench.decide(23.0), ["model 0 on GPU 1 at 23: [65]"]);
}
