use proptest::prelude::*;

use super::*;

const MODEL: ModelId = ModelId(3);

fn profile() -> LatencyProfile {
    LatencyProfile::from_table((1..=6).map(|batch| Span(batch + 5)).collect()).unwrap()
}

fn thread(budget: NetworkBudget, policy: &str, queue_max: usize) -> ModelThread<u64> {
    let mut thread = ModelThread::new(budget, policy.parse().unwrap());
    thread.handle_model(Timestamp(0), MODEL, ModelConfig::new(profile(), queue_max));
    thread
}

fn submit(thread: &mut ModelThread<u64>, now: i64, id: u64, deadline: i64) {
    thread.handle_submit(
        Timestamp(now),
        MODEL,
        Task { id: TaskId(id), deadline: Timestamp(deadline), priority: 0, application: 0, length: 0, payload: id },
    );
}

fn outputs(thread: &mut ModelThread<u64>) -> Vec<Output<u64>> {
    std::iter::from_fn(|| thread.poll_output()).collect()
}

fn candidate(size: u32, exec_at: i64, latest: i64) -> Option<Candidate> {
    Some(Candidate {
        size,
        exec_at: Timestamp(exec_at),
        anywhere_at: Timestamp(exec_at),
        latest: Timestamp(latest),
        due_at: Timestamp(latest),
        grants_seen: 0,
        expected_at: Timestamp(exec_at),
        patience: Span(latest),
        traffic: None,
    })
}

/// A candidate whose head came at another time than 0.
fn since(queued_at: i64, candidate: Option<Candidate>) -> Option<Candidate> {
    candidate.map(|candidate| Candidate { patience: candidate.latest - Timestamp(queued_at), ..candidate })
}

fn ids(batch: &Batch<u64>) -> Vec<u64> {
    batch.tasks.iter().map(|(key, payload)| (key.id == TaskId(*payload)).then_some(*payload).unwrap()).collect()
}

#[test]
fn the_window_of_a_batch_is_from_frontrun_to_latest() {
    let mut thread = thread(NetworkBudget::default(), "deferred", 100);
    for (now, id) in [(0, 1), (1, 2), (2, 3)] {
        submit(&mut thread, now, id, now + 20);
    }
    // Three updates, one output: deadline 20, l(3) = 8, l(4) = 9.
    assert_eq!(outputs(&mut thread), [Output::Candidate(MODEL, candidate(3, 11, 12))]);
}

#[test]
fn a_batch_shrinks_when_its_latest_start_has_passed_and_its_last_task_is_dropped() {
    let mut thread = thread(NetworkBudget::default(), "deferred", 100);
    submit(&mut thread, 0, 1, 10);
    submit(&mut thread, 0, 2, 10);
    assert_eq!(outputs(&mut thread), [Output::Candidate(MODEL, candidate(2, 2, 3))]);
    assert_eq!(thread.poll_timeout(), Some(Timestamp(4)));
    thread.handle_timeout(Timestamp(4));
    assert_eq!(outputs(&mut thread), [Output::Candidate(MODEL, candidate(1, 3, 4))]);
    thread.handle_timeout(Timestamp(5));
    let out = outputs(&mut thread);
    assert_eq!(out.len(), 3, "{out:?}");
    assert!(matches!(&out[1], Output::Dropped { task, reason: DropReason::Deadline, .. } if task.id == TaskId(2)));
    assert_eq!(out[2], Output::Candidate(MODEL, None));
    assert_eq!(thread.poll_timeout(), None);
}

#[test]
fn a_grant_takes_the_batch_that_fits_the_granted_gpu() {
    let budget = NetworkBudget { ctrl: Span(1), ..NetworkBudget::default() };
    let mut thread = thread(budget, "deferred", 100);
    for id in 1..=4 {
        submit(&mut thread, 0, id, 20);
    }
    outputs(&mut thread);
    // At 10 the GPU that frees at 13 leaves room for l(2) = 7.
    thread.handle_grant(
        Timestamp(10),
        Grant {
            model: MODEL,
            gpu: GpuId(1),
            free_at: Timestamp(13),
            gpus: 1,
            is_open: true,
            timer_at: Timestamp(0),
            background_until: None,
        },
    );
    let out = outputs(&mut thread);
    let [Output::Batch(batch), Output::Gpu(GpuId(1), update), Output::Candidate(MODEL, Some(next))] = &out[..] else {
        panic!("{out:?}");
    };
    assert_eq!((batch.exec_at, batch.latest, ids(batch)), (Timestamp(13), Timestamp(13), vec![1, 2]));
    assert_eq!(*update, GpuUpdate::Planned { exec_at: Timestamp(13), free_at: Timestamp(20), is_certain: true });
    assert_eq!((next.size, next.grants_seen), (2, 1));
}

/// What is due on every GPU is due on a fast one, which takes what fits there.
#[test]
fn a_gpu_that_is_faster_than_others_takes_more() {
    let mut thread = thread(NetworkBudget::default(), "deferred", 100);
    let faster = LatencyProfile::from_table((1..=8).map(|batch| Span(batch + 1)).collect()).unwrap();
    thread.handle_gpu_profile(MODEL, GpuId(1), Some(faster));
    for id in 1..=16 {
        submit(&mut thread, 0, id, 20);
    }
    // l(6) = 11 on every GPU; the next ones would not fit.
    assert_eq!(outputs(&mut thread), [Output::Candidate(MODEL, candidate(6, i64::MIN, 9))]);
    let mut grant = |gpu| {
        thread.handle_grant(
            Timestamp(7),
            Grant {
                model: MODEL,
                gpu: GpuId(gpu),
                free_at: Timestamp(13),
                gpus: 2,
                is_open: true,
                timer_at: Timestamp(0),
                background_until: None,
            },
        );
        let out = outputs(&mut thread);
        let [Output::Batch(batch), Output::Gpu(_, GpuUpdate::Planned { exec_at, free_at, .. }), _] = &out[..] else {
            panic!("{out:?}");
        };
        (ids(batch).len(), batch.latest.0, exec_at.0, free_at.0)
    };
    // Until 20: l(2) = 7, and 7 for a batch of six.
    assert_eq!((grant(0), grant(1)), ((2, 13, 13, 20), (6, 13, 13, 20)));
    thread.handle_gpu_left(GpuId(1));
    thread.handle_grant(
        Timestamp(7),
        Grant {
            model: MODEL,
            gpu: GpuId(1),
            free_at: Timestamp(13),
            gpus: 2,
            is_open: true,
            timer_at: Timestamp(0),
            background_until: None,
        },
    );
    assert!(matches!(&outputs(&mut thread)[0], Output::Batch(batch) if batch.tasks.len() == 2));
}

#[test]
fn a_grant_that_nothing_is_due_for_returns_the_gpu() {
    let mut thread = thread(NetworkBudget::default(), "deferred", 100);
    let grant = Grant {
        model: MODEL,
        gpu: GpuId(0),
        free_at: Timestamp(0),
        gpus: 1,
        is_open: true,
        timer_at: Timestamp(0),
        background_until: None,
    };
    thread.handle_grant(Timestamp(0), grant);
    assert_eq!(outputs(&mut thread), [Output::Gpu(GpuId(0), GpuUpdate::Returned)]);
    // Five of six are cancelled while the grant is under way: the last one's window opens later.
    for id in 0..6 {
        submit(&mut thread, 0, id, 20);
    }
    for id in 1..6 {
        thread.handle_cancel(Timestamp(8), MODEL, TaskId(id));
    }
    outputs(&mut thread);
    thread.handle_grant(Timestamp(8), grant);
    let expected = Candidate { grants_seen: 2, ..candidate(1, 13, 14).unwrap() };
    assert_eq!(
        outputs(&mut thread),
        [Output::Gpu(GpuId(0), GpuUpdate::Returned), Output::Candidate(MODEL, Some(expected))]
    );
    thread.handle_grant(Timestamp(8), Grant { model: ModelId(99), ..grant });
    assert_eq!(outputs(&mut thread), [Output::Gpu(GpuId(0), GpuUpdate::Returned)]);
}

#[test]
fn what_cannot_wait_is_dropped_with_its_reason() {
    let mut thread = thread(NetworkBudget::default(), "eager", 1);
    submit(&mut thread, 0, 1, 20);
    submit(&mut thread, 0, 2, 20);
    let unknown = Task { id: TaskId(3), deadline: Timestamp(20), priority: 0, application: 0, length: 0, payload: 3 };
    thread.handle_submit(Timestamp(0), ModelId(0), unknown);
    thread.handle_unhosted(Timestamp(1), MODEL);
    submit(&mut thread, 2, 4, i64::MIN);
    let reasons: Vec<_> = outputs(&mut thread)
        .into_iter()
        .filter_map(|output| match output {
            Output::Dropped { task, reason, .. } => Some((task.payload, reason)),
            _ => None,
        })
        .collect();
    let expected =
        [(2, DropReason::QueueFull), (3, DropReason::NoBackend), (1, DropReason::NoBackend), (4, DropReason::Deadline)];
    assert_eq!(reasons, expected);
}

#[test]
fn timeout_opens_the_window_after_the_first_arrival() {
    let mut thread = thread(NetworkBudget::default(), "timeout:0.000004", 100);
    submit(&mut thread, 3, 1, 40);
    submit(&mut thread, 5, 2, 30);
    assert_eq!(outputs(&mut thread), [Output::Candidate(MODEL, since(5, candidate(2, 7, 23)))]);
}

#[test]
fn tasks_without_an_objective_wait_beside_the_others_and_take_what_time_they_are_given() {
    let mut thread = thread(NetworkBudget { ctrl: Span(1), ..NetworkBudget::default() }, "deferred", 4);
    let waits = |size, since, grants_seen| {
        let (least, most) = (Span(6), Span(i64::from(size) + 5));
        Output::Background(MODEL, Some(Background { size, since: Timestamp(since), least, most, grants_seen }))
    };
    let endless = Timestamp::NEVER.0;
    (1..=4).for_each(|id| submit(&mut thread, id as i64, id, endless));
    submit(&mut thread, 5, 5, 40);
    assert_eq!(outputs(&mut thread), [Output::Candidate(MODEL, since(5, candidate(1, 33, 34))), waits(4, 1, 0)]);
    // There is no room for a fifth one, and the other one's place is its own.
    submit(&mut thread, 6, 6, endless);
    let refused = outputs(&mut thread);
    assert!(matches!(&refused[..], [Output::Dropped { task, reason: DropReason::QueueFull, .. }] if task.payload == 6));
    assert_eq!((thread.queue_length(MODEL), thread.poll_timeout()), (5, Some(Timestamp(34))));
    thread.handle_cancel(Timestamp(7), MODEL, TaskId(1));
    assert!(matches!(&outputs(&mut thread)[..], [Output::Dropped { .. }, news] if *news == waits(3, 2, 0)));
    // From 11 to 19 there is time for three, to 18 for two, and for 16 none.
    let mut grant = |until| {
        let (gpu, free_at) = (GpuId(1), Timestamp(11));
        let background_until = Some(Timestamp(until));
        let grant =
            Grant { model: MODEL, gpu, free_at, gpus: 1, is_open: true, timer_at: Timestamp(8), background_until };
        thread.handle_grant(Timestamp(8), grant);
        outputs(&mut thread)
    };
    assert_eq!(grant(16), [Output::Gpu(GpuId(1), GpuUpdate::Returned), waits(3, 2, 1)]);
    let [Output::Batch(batch), Output::Gpu(_, update), news] = &grant(18)[..] else { panic!("a batch") };
    assert_eq!((ids(batch), batch.exec_at), (vec![2, 3], Timestamp(11)));
    assert_eq!(batch.latest, Timestamp(11) + Span::from_millis(5_000));
    let planned = GpuUpdate::Planned { exec_at: Timestamp(11), free_at: Timestamp(18), is_certain: true };
    assert_eq!((*update, news), (planned, &waits(1, 4, 2)));
    let (released, _) = thread.release(MODEL);
    let released: Vec<_> = released.iter().map(|task| (task.payload, task.deadline.0)).collect();
    assert_eq!(released, [(5, 40), (4, endless)]);
}

#[derive(Debug, Clone)]
enum Step {
    Submit { slack: i64 },
    Cancel(u64),
    Grant { free_in: i64 },
    Advance(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0i64..40).prop_map(|slack| Step::Submit { slack }),
        1 => (0u64..60).prop_map(Step::Cancel),
        2 => (-3i64..4).prop_map(|free_in| Step::Grant { free_in }),
        4 => (0i64..6).prop_map(Step::Advance),
    ]
}

/// The candidate by the paper's words, from a list that is sorted anew: give up heads that even alone would be late,
/// then add tasks one by one while all still finish by the first one's deadline.
fn naive_candidate(
    waiting: &[(Timestamp, u64)],
    now: Timestamp,
    free_at: Timestamp,
    budget: NetworkBudget,
) -> Option<(usize, usize, Timestamp, Timestamp)> {
    let profile = profile();
    let end = |size: usize| (now + budget.delay(size)).max(free_at) + profile.latency(size);
    let skip = waiting.iter().position(|&(deadline, _)| end(1) <= deadline)?;
    let deadline = waiting[skip].0;
    let mut size = 1;
    while size < profile.max_batch() && skip + size < waiting.len() && end(size + 1) <= deadline {
        size += 1;
    }
    let frontrun = if size == profile.max_batch() { Timestamp::PAST } else { deadline - profile.latency(size + 1) };
    Some((skip, size, frontrun, deadline - profile.latency(size)))
}

proptest! {
    /// After every event the candidate is the naive one, every granted batch is the naive one, and each task leaves
    /// exactly once.
    #[test]
    fn behaves_like_the_papers_words(
        steps in proptest::collection::vec(step(), 0..120),
        ctrl in 0i64..3,
        data in 0i64..2,
    ) {
        let budget = NetworkBudget { ctrl: Span(ctrl), data_per_task: Span(data), jitter: Span(0) };
        let mut thread = thread(budget, "deferred", 30);
        let mut now = Timestamp(0);
        let mut waiting: Vec<(Timestamp, u64)> = Vec::new();
        let mut posted = None;
        for (serial, step) in (0u64..).zip(steps) {
            let mut left: Vec<u64> = Vec::new();
            match step {
                Step::Submit { slack } => {
                    submit(&mut thread, now.0, serial, now.0 + slack);
                    waiting.push((now + Span(slack), serial));
                    waiting.sort();
                }
                Step::Cancel(id) => thread.handle_cancel(now, MODEL, TaskId(id)),
                Step::Advance(by) => {
                    now += Span(by);
                    thread.handle_timeout(now);
                }
                Step::Grant { free_in } => {
                    let free_at = now + Span(free_in);
                    let naive = naive_candidate(&waiting, now, free_at, budget);
                    let (gpu, timer_at, background_until) = (GpuId(0), now, None);
                    let (model, gpus, is_open) = (MODEL, 1, true);
                    thread.handle_grant(now, Grant { model, gpu, free_at, gpus, is_open, timer_at, background_until });
                    let start = |size| (now + budget.delay(size)).max(free_at);
                    let is_due = naive.is_some_and(|(_, size, frontrun, _)| frontrun <= start(size));
                    match thread.poll_output() {
                        Some(Output::Gpu(_, GpuUpdate::Returned)) => prop_assert!(!is_due),
                        Some(mut output) => {
                            while let Output::Dropped { task, .. } = &output {
                                left.push(task.payload);
                                output = thread.poll_output().unwrap();
                            }
                            let Output::Batch(batch) = output else { panic!("{output:?}") };
                            let (skip, size, _, latest) = naive.unwrap();
                            prop_assert!(is_due);
                            prop_assert_eq!((batch.latest, batch.exec_at), (latest, start(size)));
                            let expected: Vec<u64> = waiting[skip..skip + size].iter().map(|&(_, id)| id).collect();
                            prop_assert_eq!(ids(&batch), expected);
                            left.extend(ids(&batch));
                        }
                        None => panic!("a grant must be answered"),
                    }
                }
            }
            for output in outputs(&mut thread) {
                match output {
                    Output::Candidate(_, candidate) => posted = candidate,
                    Output::Dropped { task, .. } => left.push(task.payload),
                    Output::Gpu(..) | Output::Background(..) => {}
                    Output::Batch(batch) => panic!("nothing was granted: {batch:?}"),
                }
            }
            for id in left {
                let position = waiting.iter().position(|&(_, other)| other == id);
                prop_assert!(position.is_some(), "task {} left twice", id);
                waiting.remove(position.unwrap());
            }
            prop_assert_eq!(thread.queue_length(MODEL), waiting.len());
            let naive = naive_candidate(&waiting, now, Timestamp::PAST, budget);
            prop_assert_eq!(naive.map(|(skip, ..)| skip), (!waiting.is_empty()).then_some(0));
            prop_assert_eq!(
                posted.map(|candidate| (candidate.size as usize, candidate.exec_at, candidate.latest)),
                naive.map(|(_, size, frontrun, latest)| (size, frontrun, latest))
            );
        }
    }
}
