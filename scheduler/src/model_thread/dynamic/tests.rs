use super::*;
use crate::{dynamic::BatchCost, planners::testing::Bench, task::Weights};

const MODEL: ModelId = ModelId(1);
const COST: BatchCost = BatchCost { fixed: Span::from_millis(1), per_task: 1.0 };

fn at(ms: f64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis_f64(ms)
}

/// l(b) = b + 9 ms, and two in a batch at most.
fn config(queue_max: usize) -> ModelConfig {
    let profile = LatencyProfile::linear(1.0, 9.0, 2).unwrap();
    ModelConfig { dynamic: Some(COST), ..ModelConfig::new(profile, queue_max) }
}

/// With applications of 10 and of 100 ms.
fn thread(queue_max: usize) -> ModelThread<u64> {
    let mut thread = ModelThread::new(NetworkBudget::default(), Policy::Downbeat);
    thread.handle_model(at(0.0), MODEL, config(queue_max));
    learn(&mut thread);
    thread
}

fn learn(thread: &mut ModelThread<u64>) {
    for _ in 0..64 {
        thread.handle_alone(at(0.0), MODEL, (0, 0), Span::from_millis(11));
        thread.handle_alone(at(0.0), MODEL, (1, 0), Span::from_millis(101));
    }
}

fn submit(thread: &mut ModelThread<u64>, now: f64, id: u64, (application, priority): (u8, u8), deadline: f64) {
    let task = Task { id: TaskId(id), deadline: at(deadline), priority, application, length: 0, payload: id };
    thread.handle_submit(at(now), MODEL, task);
}

fn outputs(thread: &mut ModelThread<u64>, now: f64) -> Vec<Output<u64>> {
    thread.handle_timeout(at(now));
    std::iter::from_fn(|| thread.poll_output()).collect()
}

fn candidate(thread: &mut ModelThread<u64>, now: f64) -> Candidate {
    match &outputs(thread, now)[..] {
        [Output::Candidate(MODEL, Some(candidate))] => *candidate,
        other => panic!("{other:?}"),
    }
}

fn grant(thread: &mut ModelThread<u64>, now: f64, free_at: f64) -> (Batch<u64>, GpuUpdate) {
    let (gpu, free_at, timer_at) = (GpuId(3), at(free_at), at(now));
    thread.handle_grant(
        at(now),
        Grant { model: MODEL, gpu, free_at, gpus: 1, is_open: true, timer_at, background_until: None },
    );
    let answer: Vec<_> = outputs(thread, now)
        .into_iter()
        .filter(|output| matches!(output, Output::Batch(_) | Output::Gpu(GpuId(3), _)))
        .collect();
    match &answer[..] {
        [Output::Batch(batch), Output::Gpu(_, update)] => (batch.clone(), *update),
        other => panic!("{other:?}"),
    }
}

fn ids(batch: &Batch<u64>) -> Vec<u64> {
    batch.tasks.iter().map(|(_, payload)| *payload).collect()
}

fn dropped(thread: &mut ModelThread<u64>, now: f64) -> Vec<(u64, DropReason)> {
    let dropped = outputs(thread, now).into_iter().filter_map(|output| match output {
        Output::Dropped { task, reason, .. } => Some((task.payload, reason)),
        _ => None,
    });
    dropped.collect()
}

#[test]
fn a_candidate_is_schedulable_at_once_and_its_batch_is_chosen_when_it_is_granted() {
    let mut thread = thread(100);
    submit(&mut thread, 0.0, 1, (1, 0), 400.0);
    let first = candidate(&mut thread, 0.0);
    assert_eq!((first.size, first.exec_at, first.due_at), (1, Timestamp::PAST, at(299.0)));
    assert!(first.latest >= at(298.0) && first.latest < at(300.0), "{:?}", first.latest);
    for id in [2, 3] {
        submit(&mut thread, 5.0, id, (0, 0), 400.0);
    }
    // Two short ones go before a long one.
    assert_eq!((candidate(&mut thread, 5.0).size, thread.queue_length(MODEL)), (2, 3));
    let (batch, update) = grant(&mut thread, 6.0, 7.0);
    assert_eq!((ids(&batch), batch.exec_at, batch.execution), (vec![2, 3], at(7.0), Span::from_millis(21)));
    assert_eq!(update, GpuUpdate::Planned { exec_at: at(7.0), free_at: at(28.0), is_certain: false });
    assert_eq!(ids(&grant(&mut thread, 30.0, 0.0).0), [1]);
    thread.handle_grant(
        at(31.0),
        Grant {
            model: MODEL,
            gpu: GpuId(3),
            free_at: at(0.0),
            gpus: 1,
            is_open: true,
            timer_at: at(31.0),
            background_until: None,
        },
    );
    assert_eq!(outputs(&mut thread, 31.0)[0], Output::Gpu(GpuId(3), GpuUpdate::Returned));
}

#[test]
fn what_no_batch_could_serve_is_dropped_at_the_instant_that_shows_it() {
    let mut thread = thread(100);
    submit(&mut thread, 0.0, 1, (1, 0), 90.0);
    submit(&mut thread, 0.0, 2, (0, 0), 90.0);
    assert_eq!(dropped(&mut thread, 0.0), [(1, DropReason::Deadline)]);
    let until = thread.poll_timeout().unwrap();
    assert!(until > at(78.0) && until < at(80.0), "{until:?}");
    assert_eq!(dropped(&mut thread, (until - Timestamp::ZERO).as_millis_f64()), [(2, DropReason::Deadline)]);
    assert_eq!((thread.poll_timeout(), thread.queue_length(MODEL)), (None, 0));
}

#[test]
fn a_full_queue_gives_up_its_least_important_task() {
    let mut thread = thread(2);
    submit(&mut thread, 0.0, 1, (0, 1), 400.0);
    submit(&mut thread, 0.0, 2, (0, 2), 400.0);
    submit(&mut thread, 0.0, 3, (0, 2), 400.0);
    submit(&mut thread, 0.0, 4, (0, 0), 400.0);
    assert_eq!(dropped(&mut thread, 0.0), [(3, DropReason::QueueFull), (2, DropReason::QueueFull)]);
    assert_eq!([0, 1, 2].map(|priority| thread.queue_length_of(MODEL, priority)), [1, 1, 0]);
}

#[test]
fn a_model_that_gets_a_cost_or_loses_it_keeps_what_waits() {
    let mut thread = ModelThread::new(NetworkBudget::default(), Policy::Downbeat);
    let fixed = ModelConfig { dynamic: None, ..config(100) };
    thread.handle_model(at(0.0), MODEL, fixed.clone());
    submit(&mut thread, 0.0, 1, (0, 0), 100.0);
    submit(&mut thread, 0.0, 2, (0, 0), 200.0);
    let never = Task { id: TaskId(3), deadline: Timestamp::NEVER, priority: 0, application: 0, length: 0, payload: 3 };
    thread.handle_submit(at(0.0), MODEL, never);
    thread.handle_model(at(1.0), MODEL, config(100));
    assert_eq!(thread.queue_length(MODEL), 3);
    let (batch, update) = grant(&mut thread, 2.0, 0.0);
    assert_eq!((ids(&batch), batch.tasks[0].0.queued_at), (vec![1, 2], at(0.0)));
    assert!(matches!(update, GpuUpdate::Planned { is_certain: false, .. }));
    submit(&mut thread, 2.0, 4, (0, 0), 100.0);
    thread.handle_model(at(3.0), MODEL, fixed);
    // It is deferred now.
    let (batch, update) = grant(&mut thread, 89.5, 0.0);
    assert_eq!((ids(&batch), batch.latest), (vec![4], at(90.0)));
    assert!(matches!(update, GpuUpdate::Planned { is_certain: true, .. }));
    thread.handle_model(at(90.0), MODEL, config(100));
    submit(&mut thread, 90.0, 5, (0, 0), 190.0);
    learn(&mut thread);
    let (tasks, samples) = thread.release(MODEL);
    assert_eq!(tasks.iter().map(|task| task.payload).collect::<Vec<_>>(), [5, 3]);
    // Its next owner knows what it takes.
    thread.handle_model(at(91.0), MODEL, config(100));
    submit(&mut thread, 91.0, 6, (1, 0), 300.0);
    thread.handle_samples(at(91.0), MODEL, samples.unwrap());
    assert_eq!(candidate(&mut thread, 91.0).due_at, at(199.0));
}

#[test]
fn other_policies_plan_by_the_mean() {
    let mut thread = ModelThread::new(NetworkBudget::default(), Policy::Eager);
    thread.handle_model(at(0.0), MODEL, config(100));
    assert!(!thread.wants_samples());
    learn(&mut thread);
    submit(&mut thread, 0.0, 1, (1, 0), 50.0);
    assert_eq!(candidate(&mut thread, 0.0).latest, at(40.0));
}

#[test]
fn tasks_without_an_objective_are_taken_to_need_what_few_batches_exceed() {
    let mut thread = thread(100);
    for id in [1, 2] {
        let task =
            Task { id: TaskId(id), deadline: Timestamp::NEVER, priority: 0, application: 0, length: 0, payload: id };
        thread.handle_submit(at(0.0), MODEL, task);
    }
    let waiting = outputs(&mut thread, 0.0).into_iter().find_map(|output| match output {
        Output::Background(_, background) => background,
        _ => None,
    });
    let Background { size, least, most, .. } = waiting.unwrap();
    assert_eq!((size, least, most), (2, Span::from_millis(101), Span::from_millis(201)));
    let run = |thread: &mut ModelThread<u64>, until| {
        let (gpu, timer_at, background_until) = (GpuId(3), at(0.0), Some(at(until)));
        let grant = Grant { model: MODEL, gpu, free_at: at(0.0), gpus: 1, is_open: true, timer_at, background_until };
        thread.handle_grant(at(0.0), grant);
        outputs(thread, 0.0)
    };
    assert!(matches!(run(&mut thread, 100.0)[..], [Output::Gpu(_, GpuUpdate::Returned), ..]));
    let out = run(&mut thread, 150.0);
    let [Output::Batch(batch), Output::Gpu(_, GpuUpdate::Planned { is_certain, .. }), ..] = &out[..] else {
        panic!("{out:?}");
    };
    assert_eq!((ids(batch), batch.execution, *is_certain), (vec![1], Span::from_millis(101), false));
}

/// A dynamic model's load takes 30 ms.
#[test]
fn while_weights_are_elsewhere_only_what_a_load_still_helps_waits() {
    let mut thread = thread(100);
    let load = Span::from_millis(30);
    thread.handle_whereabouts(at(0.0), MODEL, Whereabouts::Cold { load, from: at(10.0) });
    submit(&mut thread, 0.0, 1, (0, 0), 45.0);
    submit(&mut thread, 0.0, 2, (0, 0), 100.0);
    assert_eq!(dropped(&mut thread, 0.0), [(1, DropReason::ColdStart)]);
    // 100 less 11 for the batch and 30 for the load.
    let until = thread.poll_timeout().unwrap();
    assert!(until > at(58.0) && until < at(60.0), "{until:?}");
    thread.handle_whereabouts(at(20.0), MODEL, Whereabouts::Arriving(at(50.0)));
    assert_eq!((dropped(&mut thread, 59.0), thread.queue_length(MODEL)), (vec![], 1));
    submit(&mut thread, 59.0, 3, (0, 0), 110.0);
    thread.handle_whereabouts(at(59.0), MODEL, Whereabouts::Here);
    assert_eq!((dropped(&mut thread, 80.0), thread.queue_length(MODEL)), (vec![], 2));
    assert_eq!(ids(&grant(&mut thread, 85.0, 0.0).0), [2]);
}

/// Model 0 has l(b) = b + 5 ms; model 1 is dynamic.
fn beside_a_static_one(memory: Option<u32>) -> Bench {
    let mut bench = match memory {
        None => Bench::new(Policy::Downbeat, 1, 2),
        Some(room) => Bench::paged(Policy::Downbeat, 1, 2, room),
    };
    let weights = Weights { pages: 7, load: Span::from_millis(8), read: Span::from_millis(50) };
    let weights = memory.map_or(Weights::default(), |_| weights);
    bench.planner.handle_model(at(0.0), MODEL, ModelConfig { weights, ..config(1000) });
    for _ in 0..64 {
        bench.planner.handle_alone(at(0.0), MODEL, (0, 0), Span::from_millis(11));
    }
    bench
}

#[test]
fn nothing_is_planned_behind_a_batch_whose_end_nobody_knows() {
    let mut bench = beside_a_static_one(None);
    bench.submit(0.0, 0, 500.0);
    assert_eq!(bench.decide(0.0), ["model 0 on GPU 0 at 0: [0]"]);
    // Behind a static model's batch anything may be planned, as it ends at 6.
    bench.submit(1.0, 1, 100.0);
    assert_eq!(bench.decide(1.0), [""; 0]);
    assert_eq!(bench.decide(6.0), ["model 1 on GPU 0 at 6: [1]"]);
    bench.finished(0, 6.0);
    // It should end at 17, but does at 40.
    bench.submit(7.0, 0, 500.0);
    bench.submit(7.0, 1, 500.0);
    assert_eq!(bench.decide(30.0), [""; 0]);
    bench.finished(0, 40.0);
    assert_eq!(bench.decide(40.0), ["model 1 on GPU 0 at 40: [3]"]);
    bench.finished(0, 45.0);
    // What is static starts as soon as it may.
    assert_eq!(bench.decide(45.0), ["model 0 on GPU 0 at 45: [2]"]);
}

#[test]
fn a_dynamic_model_wants_loads_as_others_do() {
    let mut bench = beside_a_static_one(Some(1));
    bench.submit(0.0, 1, 100.0);
    assert_eq!(bench.decide(0.0), ["load model 1 into GPU 0 at 0"]);
    assert_eq!(bench.decide(5.0), [""; 0]);
    bench.loaded(8.0, 0, 1, true);
    assert_eq!(bench.decide(8.0), ["model 1 on GPU 0 at 8: [0]"]);
    // The other one has to make room, once its batch has been reported.
    bench.submit(9.0, 0, 100.0);
    assert_eq!(bench.decide(9.0), [""; 0]);
    bench.finished(0, 19.0);
    assert_eq!(bench.decide(19.0), ["unload model 1 from GPU 0", "load model 0 into GPU 0 at 19"]);
}
