use proto::{GpuId, Span, Timestamp};

use crate::{planners::testing::Bench, policy::Policy};

const NOTHING: [&str; 0] = [];

fn at(ms: f64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis_f64(ms)
}

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

/// The link has loads for 8 ms: what must be loaded and run for 6 ms by 21 ms is refused, also while others wait.
#[test]
fn what_no_load_can_serve_behind_what_links_have_to_do_is_refused_at_once() {
    let mut bench = Bench::paged(Policy::Eager, 1, 4, 4);
    bench.submit(0.0, 0, 40.0);
    assert_eq!(bench.decide(0.0), ["load model 0 into GPU 0 at 0"]);
    bench.submit(0.0, 1, 21.0);
    bench.submit(0.0, 2, 22.0);
    assert_eq!(bench.decide(0.0), ["dropped [1]: ColdStart"]);
    // Nor has another one for the same model to be asked about.
    bench.submit(1.0, 1, 21.5);
    bench.submit(1.0, 1, 60.0);
    assert_eq!(bench.decide(1.0), ["dropped [3]: ColdStart"]);
    assert_eq!(bench.decide(3.0), ["load model 2 into GPU 0 at 8"]);
    // A second GPU could, but for one with an empty link nobody waits in vain.
    let mut bench = Bench::paged(Policy::Eager, 2, 4, 4);
    bench.submit(0.0, 0, 40.0);
    bench.submit(0.0, 1, 21.0);
    assert_eq!(bench.decide(0.0), ["load model 1 into GPU 0 at 0", "load model 0 into GPU 1 at 0"]);
    bench.submit(0.0, 2, 21.0);
    assert_eq!(bench.decide(0.0), ["dropped [2]: ColdStart"]);
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

/// A load takes 8 ms, or 58 from disk, and a batch of one 6.
#[test]
fn what_is_on_disk_only_is_loaded_in_time_or_refused_at_once() {
    for policy in [Policy::Eager, Policy::Clockwork] {
        let mut bench = Bench::paged(policy, 1, 2, 2);
        bench.host_memory(0, 0, false);
        bench.submit(0.0, 0, 63.9);
        assert_eq!(bench.decide(0.0), ["dropped [0]: ColdStart"]);
        bench.submit(0.0, 0, 64.0);
        assert_eq!(bench.decide(0.0), ["load model 0 into GPU 0 at 0"]);
        // The way is in use until 58 ms.
        bench.submit(1.0, 1, 71.9);
        assert_eq!(bench.decide(1.0), ["dropped [2]: ColdStart"]);
        bench.host_memory(0, 0, true);
        bench.loaded(58.0, 0, 0, true);
        assert_eq!(bench.decide(58.0), ["model 0 on GPU 0 at 58: [1]"]);
        // It may leave host memory while it is in the GPU's, and comes back from wherever it is then.
        bench.finished(0, 64.0);
        bench.host_memory(0, 0, false);
        bench.submit(65.0, 0, 75.0);
        assert_eq!(bench.decide(65.0), ["model 0 on GPU 0 at 65: [3]"]);
    }
}

/// As one whose file cannot be read any more: others have the way meanwhile, and what cannot wait is refused.
#[test]
fn what_fails_to_load_again_and_again_is_tried_ever_more_rarely() {
    for policy in [Policy::Eager, Policy::Clockwork] {
        let mut bench = Bench::paged(policy, 1, 2, 1);
        bench.submit(0.0, 0, 1000.0);
        for failed_at in [0.0, 1.0] {
            assert_eq!(bench.decide(failed_at), [format!("load model 0 into GPU 0 at {failed_at}")]);
            bench.loaded(failed_at + 1.0, 0, 0, false);
        }
        // Until 12 ms.
        assert_eq!(bench.decide(2.0), NOTHING);
        bench.submit(2.0, 0, 25.9);
        assert_eq!(bench.decide(2.0), ["dropped [1]: ColdStart"]);
        bench.submit(2.0, 1, 1000.0);
        assert_eq!(bench.decide(2.0), ["load model 1 into GPU 0 at 2"]);
        bench.loaded(10.0, 0, 1, true);
        assert_eq!(bench.decide(10.0), ["model 1 on GPU 0 at 10: [2]"]);
        bench.finished(0, 11.0);
        assert_eq!(bench.decide(11.0), NOTHING);
        assert_eq!(bench.timeout(), Some(12.0));
        assert_eq!(bench.decide(12.0), ["unload model 1 from GPU 0", "load model 0 into GPU 0 at 12"]);
        bench.loaded(13.0, 0, 0, false);
        assert_eq!((bench.decide(13.0).len(), bench.timeout()), (0, Some(33.0)));
        assert_eq!(bench.decide(33.0), ["load model 0 into GPU 0 at 33"]);
        bench.loaded(41.0, 0, 0, true);
        assert_eq!(bench.decide(41.0), ["model 0 on GPU 0 at 41: [0]"]);
    }
}

#[test]
fn a_model_is_loaded_where_it_is_in_host_memory() {
    let mut bench = Bench::paged(Policy::Eager, 2, 2, 2);
    bench.host_memory(0, 0, false);
    bench.submit(0.0, 0, 30.0);
    assert_eq!(bench.decide(0.0), ["load model 0 into GPU 1 at 0"]);
    // A copy from disk would come too late.
    bench.host_memory(0, 1, false);
    bench.host_memory(1, 1, false);
    bench.submit(0.0, 1, 60.0);
    assert_eq!(bench.decide(0.0), ["dropped [1]: ColdStart"]);
    bench.planner.handle_gpu_left(at(1.0), GpuId(1));
    bench.submit(1.0, 0, 60.0);
    assert_eq!(
        bench.decide(1.0),
        ["dropped [0]: ColdStart", "dropped [2]: ColdStart"],
        "the GPU that is left has it on disk"
    );
    bench.submit(1.0, 0, 70.0);
    assert_eq!(bench.decide(1.0), ["load model 0 into GPU 0 at 1"]);
}

/// There is room for two; the first one stays, though it is never used.
#[test]
fn what_is_pinned_makes_no_room() {
    for policy in [Policy::Eager, Policy::Clockwork] {
        let mut bench = Bench::pinned(policy, 3, 2, &[0, 1]);
        bench.submit(0.0, 1, 50.0);
        assert_eq!(bench.decide(0.0), ["model 1 on GPU 0 at 0: [0]"]);
        bench.finished(0, 6.0);
        bench.submit(10.0, 2, 60.0);
        assert_eq!(bench.decide(10.0), ["unload model 1 from GPU 0", "load model 2 into GPU 0 at 10"]);
        let mut bench = Bench::pinned(policy, 2, 1, &[0]);
        bench.submit(0.0, 1, 50.0);
        assert_eq!(bench.decide(0.0), NOTHING);
        assert!(bench.decide(51.0)[0].starts_with("dropped [0]"));
    }
}
