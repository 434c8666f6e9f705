use proptest::prelude::*;

use super::*;
use crate::{
    mailbox::FromRankThread,
    messages::{Candidate, GpuUpdate, NetworkBudget},
    planners::testing::Bench,
    policy::Policy,
};

const NOTHING: [&str; 0] = [];
const NEVER: f64 = f64::INFINITY;

fn submit(bench: &mut Bench, now: f64, model: u32, tasks: usize) {
    (0..tasks).for_each(|_| bench.submit(now, model, NEVER));
}

fn sizes(batches: &[String]) -> Vec<usize> {
    batches.iter().map(|text| text.matches(", ").count() + 1).collect()
}

/// l(b) = b + 5 ms, as in all of these.
#[test]
fn where_nothing_has_an_objective_all_that_waits_runs_as_soon_as_a_gpu_is_free() {
    let mut bench = Bench::new(Policy::Downbeat, 1, 2);
    submit(&mut bench, 0.0, 0, 1);
    assert_eq!(bench.decide(0.0), ["model 0 on GPU 0 at 0: [0]"]);
    submit(&mut bench, 1.0, 1, 2);
    submit(&mut bench, 2.0, 0, 1);
    submit(&mut bench, 3.0, 1, 1);
    assert_eq!(bench.decide(3.0), NOTHING);
    bench.finished(0, 6.0);
    // The oldest first, with all that its batch has room for.
    assert_eq!(bench.decide(6.0), ["model 1 on GPU 0 at 6: [1, 2, 4]"]);
    bench.finished(0, 14.0);
    assert_eq!(bench.decide(14.0), ["model 0 on GPU 0 at 14: [3]"]);
    assert_eq!(bench.timeout(), None);
}

#[test]
fn they_are_done_before_a_window_opens_and_wait_while_a_candidate_does() {
    let mut bench = Bench::new(Policy::Deferred, 1, 2);
    bench.submit(0.0, 0, 40.0);
    submit(&mut bench, 0.0, 1, 60);
    // The window opens at 40 - l(2).
    assert_eq!(sizes(&bench.decide(0.0)), [28]);
    bench.submit(1.0, 0, 36.0);
    bench.finished(0, 33.0);
    assert_eq!(bench.decide(29.0), NOTHING, "a task in a hurry came, and the GPU is not free");
    assert_eq!(bench.decide(30.1), ["dropped [61]: Deadline"]);
    assert_eq!(bench.decide(33.0), ["model 0 on GPU 0 at 33: [0]"]);
}

/// After a batch whose head had 14 ms until it had to start.
fn asked_before(gpus: u32) -> Bench {
    let mut bench = Bench::new(Policy::Deferred, gpus, 2);
    bench.submit(0.0, 0, 20.0);
    assert_eq!(bench.decide(13.0), ["model 0 on GPU 0 at 13: [0]"]);
    bench.finished(0, 19.0);
    bench
}

#[test]
fn a_request_of_the_next_moment_finds_a_gpu_in_time() {
    let mut bench = asked_before(1);
    submit(&mut bench, 30.0, 1, 60);
    assert_eq!(sizes(&bench.decide(30.0)), [9]);
    // Another GPU could serve it.
    let mut bench = asked_before(2);
    submit(&mut bench, 30.0, 1, 60);
    assert_eq!(bench.decide(30.0)[0].split(':').next(), Some("model 1 on GPU 1 at 30"));
}

#[test]
fn a_model_that_nobody_asks_for_any_more_claims_no_gpu() {
    let mut bench = asked_before(1);
    submit(&mut bench, 80_010.0, 1, 60);
    assert_eq!(sizes(&bench.decide(80_010.0)), [9], "its requests may be ten seconds apart");
    let mut bench = asked_before(1);
    submit(&mut bench, 80_020.0, 1, 60);
    assert_eq!(sizes(&bench.decide(80_020.0)), [60]);
}

/// Models whose windows open in 40 ms and in 75, and another one whose inputs take 10 ms each to fetch.
#[test]
fn inputs_of_many_tasks_take_too_long_and_those_of_fewer_do_not() {
    let ms = |ms| Timestamp::default() + Span::from_millis(ms);
    let granted = |gpus_free_at: &[i64]| {
        let mut rank = RankThread::new(NetworkBudget::default());
        for (gpu, &free_at) in (0..).map(GpuId).zip(gpus_free_at) {
            rank.handle_gpu_joined(ms(free_at), gpu, (0..3).map(ModelId).collect(), None);
        }
        let data_per_task = Span::from_millis(10);
        rank.handle_model_budget(ModelId(1), NetworkBudget { data_per_task, ..NetworkBudget::default() });
        for (model, exec_at) in [(0, ms(40)), (2, ms(75))] {
            let (latest, patience) = (exec_at + Span::from_millis(10), Span::ENDLESS);
            let (anywhere_at, due_at, expected_at) = (exec_at, latest, exec_at);
            let (size, grants_seen, traffic) = (1, 0, None);
            let candidate =
                Candidate { size, exec_at, anywhere_at, latest, due_at, grants_seen, expected_at, patience, traffic };
            rank.handle_candidate(ms(0), ModelId(model), Some(candidate));
        }
        let (least, most) = (Span::from_millis(10), Span::from_millis(80));
        let background = Background { size: 8, since: ms(0), least, most, grants_seen: 0 };
        rank.handle_background(ModelId(1), Some(background));
        rank.handle_timeout(ms(0));
        let message = rank.poll_message()?.1;
        let FromRankThread::Grant(grant) = message else { panic!("only grants: {message:?}") };
        Some((grant.gpu.0, grant.background_until))
    };
    assert_eq!(granted(&[0]), Some((0, Some(ms(40)))));
    assert_eq!(granted(&[35]), None, "it would not be done in time");
    // What will be free when all inputs are there is needed soon after; another one is free now.
    assert_eq!(granted(&[0, 70]), Some((0, Some(ms(40)))));
}

#[test]
fn what_never_finds_the_time_runs_once_in_ten_seconds() {
    let mut bench = Bench::new(Policy::Deferred, 1, 2);
    bench.submit(0.0, 0, 11.0);
    assert_eq!(bench.decide(4.0), ["model 0 on GPU 0 at 4: [0]"]);
    bench.finished(0, 10.0);
    submit(&mut bench, 20.0, 1, 3);
    assert_eq!(bench.decide(20.0), NOTHING);
    assert_eq!(bench.decide(10_020.0), NOTHING);
    // But not while that makes another one late.
    bench.submit(10_020.5, 0, 10_030.5);
    assert_eq!(bench.decide(10_021.0), NOTHING);
    assert_eq!(bench.decide(10_023.5), ["model 0 on GPU 0 at 10023.5: [4]"]);
    bench.finished(0, 10_029.5);
    assert_eq!(bench.decide(10_029.5), ["model 1 on GPU 0 at 10029.5: [1]"]);
    bench.finished(0, 10_035.5);
    assert_eq!(bench.decide(10_036.0), NOTHING);
    assert_eq!(bench.decide(20_030.0), ["model 1 on GPU 0 at 20030: [2]"]);
}

/// Loads take 8 ms; there is room for one of three models.
#[test]
fn their_weights_are_loaded_behind_all_others_and_make_room_first() {
    let mut bench = Bench::paged(Policy::Eager, 1, 3, 1);
    submit(&mut bench, 0.0, 1, 1);
    submit(&mut bench, 0.5, 2, 1);
    bench.submit(1.0, 0, 60.0);
    assert_eq!(bench.decide(1.0), ["load model 0 into GPU 0 at 1"]);
    bench.loaded(9.0, 0, 0, true);
    assert_eq!(bench.decide(9.0), ["model 0 on GPU 0 at 9: [2]"]);
    bench.finished(0, 15.0);
    assert_eq!(bench.decide(15.0), ["unload model 0 from GPU 0", "load model 1 into GPU 0 at 15"]);
    bench.loaded(23.0, 0, 1, true);
    // It stays until it has run.
    assert_eq!(bench.decide(23.0), ["model 1 on GPU 0 at 23: [0]"]);
    bench.finished(0, 29.0);
    assert_eq!(bench.decide(29.0), ["unload model 1 from GPU 0", "load model 2 into GPU 0 at 29"]);
}

#[test]
fn published_policies_take_them_for_tasks_with_a_day() {
    for policy in [Policy::Clockwork, Policy::Shepherd, Policy::Nexus, Policy::Clipper] {
        let mut bench = Bench::new(policy, 1, 2);
        submit(&mut bench, 0.0, 0, 1);
        bench.submit(0.0, 1, 50.0);
        let mut out = bench.decide(0.0);
        for _ in 0..2 {
            bench.finished(0, 6.0);
            out.extend(bench.decide(6.0));
        }
        out.sort();
        let is_batch = |(model, text): (usize, &String)| text.starts_with(&format!("model {model} on GPU 0 at "));
        assert!(out.len() == 2 && out.iter().enumerate().all(is_batch), "{policy}: {out:?}");
    }
}

proptest! {
    /// Whatever candidates are known, each finds a GPU when its window opens, if it would have without what is granted.
    #[test]
    fn no_known_candidate_is_made_to_wait(
        frees in proptest::collection::vec(0i64..100, 1..6),
        windows in proptest::collection::vec((0i64..200, 1i64..50), 0..6),
        (least, waiting) in (1i64..60, 1u32..4),
    ) {
        let mut rank = RankThread::new(NetworkBudget::default());
        let models = windows.len() as u32 + waiting;
        for (gpu, &free_at) in (0..).map(GpuId).zip(&frees) {
            rank.handle_gpu_joined(Timestamp(free_at), gpu, (0..models).map(ModelId).collect(), None);
        }
        for (id, &(opens_in, window)) in (0..).map(ModelId).zip(&windows) {
            let (exec_at, patience) = (Timestamp(1 + opens_in), Span::ENDLESS);
            let latest = exec_at + Span(window);
            let (anywhere_at, due_at, expected_at) = (exec_at, latest, exec_at);
            let (size, grants_seen, traffic) = (1, 0, None);
            let candidate =
                Candidate { size, exec_at, anywhere_at, latest, due_at, grants_seen, expected_at, patience, traffic };
            rank.handle_candidate(Timestamp(0), id, Some(candidate));
        }
        for id in windows.len() as u32..models {
            let (least, most) = (Span(least), Span(2 * least));
            let background = Background { size: 2, since: Timestamp(i64::from(id)), least, most, grants_seen: 0 };
            rank.handle_background(ModelId(id), Some(background));
        }
        rank.handle_timeout(Timestamp(0));
        let mut after = frees.clone();
        let mut last = None;
        while let Some((model, message)) = rank.poll_message() {
            let FromRankThread::Grant(grant) = message else { panic!("only grants: {message:?}") };
            let until = grant.background_until.expect("no window is open yet");
            prop_assert!(Some(model) > last, "the oldest first");
            prop_assert_eq!(frees[grant.gpu.0 as usize], 0, "a GPU that is free");
            last = Some(model);
            after[grant.gpu.0 as usize] = until.0.min(2 * least);
            prop_assert!(until.0 >= least);
            rank.handle_gpu(grant.gpu, GpuUpdate::Returned);
        }
        // Each window takes the GPU that frees first.
        let late = |mut free: Vec<i64>| {
            let mut opens: Vec<i64> = windows.iter().map(|(opens_in, _)| 1 + opens_in).collect();
            opens.sort_unstable();
            free.sort_unstable();
            let free = free.into_iter().chain(std::iter::repeat(i64::MAX));
            opens.into_iter().zip(free).filter(|(at, free)| free > at).count()
        };
        prop_assert!(late(after) <= late(frees));
    }
}
