use std::sync::Mutex;

use super::*;
use crate::staging::Records;
use proto::{LatencyProfile, ModelId, clock::ClockOffset};
use transport::{Endpoint, EndpointConfig};

/// Doubles every byte; panics on 13, fails on 14, and fails the task alone on 15.
struct Doubling(Option<LatencyProfile>);

impl Executor for Doubling {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        assert!(!inputs.contains(&13), "this panic is part of the test");
        if inputs.contains(&14) {
            return Err(ExecutorError("out of luck".into()));
        }
        outputs.iter_mut().zip(inputs).for_each(|(output, input)| *output = input * 2);
        let failed = (0..inputs.len()).filter(|&task| inputs[task] == 15);
        Ok(failed.map(|task| TaskError { task, reason: "odd".into() }).collect())
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        self.0.as_ref()
    }
}

/// Runs one batch whose inputs lie in two runs in the region.
fn run(inputs: &[u8], latest: Timestamp, profile: Option<LatencyProfile>) -> (Execution, Vec<u8>) {
    let clock = Clock::start();
    let gpus = Gpus::start(clock, 1, false).unwrap();
    let mut endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
    let region = Region::allocate(2000).unwrap();
    // The last task's input lies first, those of the others behind it.
    let (last, others) = inputs.split_last().unwrap();
    region.write(0, &[*last]);
    region.write(1, others);
    let others = core::Run { tasks: others.len(), input_offset: 1, input_bytes: 1, output_offset: 100 };
    let last = core::Run { tasks: 1, input_offset: 0, input_bytes: 1, output_offset: 100 + others.tasks };
    let batch = core::Job {
        model: ModelId(0),
        executor: Arc::new(Doubling(profile)),
        shape: ModelShape { input_bytes: 1, output_bytes: 1, batch_max: 8, records: Records::default() },
        runs: vec![others, last],
        exec_at: Timestamp::PAST,
        latest,
        sample: None,
        offset: ClockOffset::default(),
        ahead: None,
    };
    let staged = Arc::new(Staged::unpinned(region.clone()));
    gpus.post(0, Job { session: 1, batch, staged, waker: endpoint.waker() });
    let finished = loop {
        match gpus.poll_finished() {
            Some(finished) => break finished,
            None => endpoint.wait(clock.now(), Timestamp::NEVER),
        }
    };
    assert_eq!((finished.session, finished.gpu), (1, 0));
    let mut outputs = vec![0; inputs.len()];
    region.read(100, &mut outputs);
    let End::Batch(execution) = finished.end else { panic!("that was no sample") };
    (execution, outputs)
}

#[test]
fn a_batch_is_gathered_executed_and_scattered() {
    let (execution, outputs) = run(&[1, 2, 3], Timestamp::NEVER, None);
    assert!(matches!(execution, Execution::Done { started_at, finished_at, .. } if started_at <= finished_at));
    assert_eq!(outputs, [2, 4, 6]);
}

#[test]
fn an_emulated_batch_lasts_as_long_as_its_profile_says() {
    let profile = LatencyProfile::linear(1.0, 5.0, 8).unwrap();
    let (execution, _) = run(&[1, 2, 3], Timestamp::NEVER, Some(profile));
    let Execution::Done { started_at, finished_at, .. } = execution else { panic!("{execution:?}") };
    assert!(finished_at - started_at >= Span::from_millis(8));
}

#[test]
fn a_batch_that_is_taken_in_too_late_is_not_run() {
    let (execution, outputs) = run(&[1, 2, 3], Timestamp::PAST, None);
    assert!(matches!(execution, Execution::WindowMissed { .. }));
    assert_eq!(outputs, [0, 0, 0]);
}

#[test]
fn a_task_that_fails_leaves_the_others_and_each_output_is_in_its_own_place() {
    let (execution, outputs) = run(&[1, 15, 3], Timestamp::NEVER, None);
    let Execution::Done { outputs: outcome, .. } = execution else { panic!("{execution:?}") };
    assert_eq!(outcome.bytes, [1, 0, 1]);
    assert_eq!((outcome.failed[0].task, &outcome.failed[0].reason[..]), (1, "odd"));
    assert_eq!((outputs[0], outputs[1], outputs[2]), (2, 0, 6), "the last is of another run");
}

#[test]
fn records_are_gathered_and_scattered_without_what_is_behind_them() {
    /// Answers each record with one of a byte more, but 13 not at all.
    struct Longer;

    impl Executor for Longer {
        fn execute(&self, mut inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
            let mut failed = vec![];
            for (task, output) in outputs.chunks_exact_mut(16).enumerate() {
                let record = inputs.split_off(..cell::record_bytes(inputs).unwrap()).unwrap();
                if record[4] == 13 {
                    failed.push(TaskError { task, reason: "odd".into() });
                    continue;
                }
                output[..record.len()].copy_from_slice(record);
                output[record.len()] = 7;
                cell::set_record_bytes(&mut output[..=record.len()]);
            }
            assert!(inputs.is_empty());
            Ok(failed)
        }

        fn emulated_profile(&self) -> Option<&LatencyProfile> {
            None
        }
    }

    let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
    let region = Region::allocate(800).unwrap();
    // What they say of their length is not believed.
    region.write(0, &[99, 0, 0, 0, 1, 0, 0, 0, 0, 2]);
    region.write(64, &[6, 0, 0, 0, 3, 4]);
    let run =
        |tasks, input_offset, input_bytes, output_offset| core::Run { tasks, input_offset, input_bytes, output_offset };
    let records = Records { inputs: true, outputs: true };
    let batch = core::Job {
        model: ModelId(0),
        executor: Arc::new(Longer),
        shape: ModelShape { input_bytes: 16, output_bytes: 16, batch_max: 8, records },
        runs: vec![run(2, 0, 5, 200), run(1, 64, 6, 400)],
        exec_at: Timestamp::PAST,
        latest: Timestamp::NEVER,
        sample: None,
        offset: ClockOffset::default(),
        ahead: None,
    };
    let job = Job { session: 1, batch, staged: Arc::new(Staged::unpinned(region.clone())), waker: endpoint.waker() };
    let mut scratch = Scratch { inputs: vec![0xaa; 50], outputs: vec![0xaa; 80] };
    assert_eq!(scratch.run(&job, (0, &Ahead::default())), Ok(Outputs { failed: vec![], bytes: vec![6, 6, 7] }));
    let read = |offset, bytes| {
        let mut found = vec![0; bytes];
        region.read(offset, &mut found);
        found
    };
    assert_eq!(read(200, 13), [6, 0, 0, 0, 1, 7, 6, 0, 0, 0, 2, 7, 0], "one after another");
    assert_eq!(read(400, 8), [7, 0, 0, 0, 3, 4, 7, 0]);
    region.write(9, &[13]);
    scratch.outputs.fill(0xaa);
    let found = scratch.run(&job, (0, &Ahead::default())).unwrap();
    assert_eq!((found.bytes, found.failed.len()), (vec![6, 0, 7], 1), "whatever lies in its room");
    drop(endpoint);
}

#[test]
fn a_sample_is_run_again_alone_by_its_own_input() {
    /// Notes what it ran; panics on 13 alone.
    struct Noting(Mutex<Vec<Vec<u8>>>);

    impl Executor for Noting {
        fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
            self.0.lock().unwrap().push(inputs.to_vec());
            assert!(inputs != [13], "this panic is part of the test");
            outputs.fill(7);
            Ok(vec![])
        }

        fn emulated_profile(&self) -> Option<&LatencyProfile> {
            None
        }
    }

    let clock = Clock::start();
    let region = Region::allocate(400).unwrap();
    region.write(0, &[1, 2, 3, 13]);
    let executor = Arc::new(Noting(Mutex::default()));
    let run = |tasks, input_offset| core::Run { tasks, input_offset, input_bytes: 1, output_offset: 100 };
    let batch = core::Job {
        model: ModelId(0),
        executor: executor.clone(),
        shape: ModelShape { input_bytes: 1, output_bytes: 1, batch_max: 8, records: Records::default() },
        runs: vec![run(2, 2), run(2, 0)],
        exec_at: Timestamp::PAST,
        latest: Timestamp::NEVER,
        sample: None,
        offset: ClockOffset::default(),
        ahead: None,
    };
    let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
    let job = Job { session: 1, batch, staged: Arc::new(Staged::unpinned(region)), waker: endpoint.waker() };
    let mut scratch = Scratch::default();
    assert_eq!(scratch.run(&job, (0, &Ahead::default())), Ok(Outputs::default()));
    let alone: Vec<bool> =
        (0..5).map(|place| scratch.run_alone(clock, &job.batch, place, (0, &Ahead::default())).is_some()).collect();
    assert_eq!(alone, [true, false, true, true, false], "one fails, and there is no fifth");
    let ran = executor.0.lock().unwrap().clone();
    assert_eq!(ran, [vec![3, 13, 1, 2], vec![3], vec![13], vec![1], vec![2]]);
}

#[test]
fn where_tasks_take_unequal_times_a_batch_lasts_by_its_inputs_and_a_sample_by_its_own() {
    /// Takes as many milliseconds as the largest byte says, and notes what it is asked about.
    struct Unequal(LatencyProfile, Mutex<Vec<Vec<u8>>>);

    impl Executor for Unequal {
        fn execute(&self, _: &[u8], _: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
            Ok(vec![])
        }

        fn emulated_profile(&self) -> Option<&LatencyProfile> {
            Some(&self.0)
        }

        fn emulated_latency(&self, tasks: usize, inputs: &[u8]) -> Option<Span> {
            assert_eq!(inputs.len(), tasks);
            self.1.lock().unwrap().push(inputs.to_vec());
            Some(Span::from_millis(i64::from(*inputs.iter().max()?)))
        }
    }

    let clock = Clock::start();
    let region = Region::allocate(400).unwrap();
    region.write(0, &[9, 2]);
    region.write(8, &[5]);
    let executor = Arc::new(Unequal(LatencyProfile::linear(1.0, 1.0, 8).unwrap(), Mutex::default()));
    let mut batch = single(&(Arc::clone(&executor) as Arc<dyn Executor>), 8);
    batch.runs.push(core::Run { tasks: 2, input_offset: 0, input_bytes: 1, output_offset: 100 });
    let endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
    let job = Job { session: 1, batch, staged: Arc::new(Staged::unpinned(region)), waker: endpoint.waker() };
    // Of an earlier batch, which was larger.
    let mut scratch = Scratch { inputs: vec![0xaa; 50], outputs: vec![] };
    let ahead = Ahead::default();
    let execution = run_job(clock, &job, &mut scratch, (0, &ahead));
    let Execution::Done { started_at, finished_at, .. } = execution else { panic!("{execution:?}") };
    assert!(finished_at - started_at >= Span::from_millis(9));
    let alone = scratch.run_alone(clock, &job.batch, 2, (0, &ahead)).unwrap();
    assert!(alone >= Span::from_millis(2));
    assert_eq!(*executor.1.lock().unwrap(), [vec![5, 9, 2], vec![2]]);
}

/// A batch of one task, whose input and output lie at these offsets.
fn single(executor: &Arc<dyn Executor>, offset: usize) -> core::Job {
    core::Job {
        model: ModelId(0),
        executor: Arc::clone(executor),
        shape: ModelShape { input_bytes: 1, output_bytes: 1, batch_max: 8, records: Records::default() },
        runs: vec![core::Run { tasks: 1, input_offset: offset, input_bytes: 1, output_offset: 100 + offset }],
        exec_at: Timestamp::PAST,
        latest: Timestamp::NEVER,
        sample: None,
        offset: ClockOffset::default(),
        ahead: None,
    }
}

/// Waits at each batch until it is told to go on; is down after 13, and fails on what comes then.
struct Gated {
    began: Sender<u8>,
    go_on: Receiver<()>,
    is_up: std::sync::atomic::AtomicBool,
}

impl Executor for Gated {
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.began.send(inputs[0]).unwrap();
        self.go_on.recv().unwrap();
        outputs.copy_from_slice(inputs);
        if inputs == [13] {
            self.is_up.store(false, std::sync::atomic::Ordering::Relaxed);
        }
        if self.is_up() { Ok(vec![]) } else { Err(ExecutorError("it is down".into())) }
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        None
    }

    fn is_up(&self) -> bool {
        self.is_up.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// What an executor waits for goes before its thread is waited for.
struct Bench {
    began: Receiver<u8>,
    go_on: Sender<()>,
    clock: Clock,
    gpus: Gpus,
    endpoint: Endpoint,
    staged: Arc<Staged>,
    executor: Arc<dyn Executor>,
}

impl Bench {
    fn new(inputs: &[u8]) -> Self {
        let clock = Clock::start();
        let region = Region::allocate(200).unwrap();
        region.write(0, inputs);
        let ((began, has_begun), (go_on, goes_on)) = (crossbeam_channel::unbounded(), crossbeam_channel::unbounded());
        let executor = Arc::new(Gated { began, go_on: goes_on, is_up: true.into() });
        Self {
            clock,
            gpus: Gpus::start(clock, 1, false).unwrap(),
            endpoint: Endpoint::open(EndpointConfig::default()).unwrap(),
            staged: Arc::new(Staged::unpinned(region)),
            executor,
            began: has_begun,
            go_on,
        }
    }

    /// Gives the GPU the task whose input is there.
    fn post(&self, session: u64, offset: usize) {
        self.post_in_window(session, offset, (Timestamp::PAST, Timestamp::NEVER));
    }

    /// The same, to start in this window.
    fn post_in_window(&self, session: u64, offset: usize, (exec_at, latest): (Timestamp, Timestamp)) {
        let batch = core::Job { exec_at, latest, ..single(&self.executor, offset) };
        let staged = Arc::clone(&self.staged);
        self.gpus.post(0, Job { session, batch, staged, waker: self.endpoint.waker() });
    }

    fn ends(&mut self) -> (u64, Execution) {
        loop {
            match self.gpus.poll_finished() {
                Some(Finished { session, end: End::Batch(execution), .. }) => return (session, execution),
                Some(_) => panic!("nothing is run again"),
                None => self.endpoint.wait(self.clock.now(), Timestamp::NEVER),
            }
        }
    }
}

#[test]
fn a_batch_begins_behind_another_without_anybodys_word() {
    let mut bench = Bench::new(&[1, 2]);
    bench.post(1, 0);
    bench.post(1, 1);
    for input in [1, 2] {
        assert_eq!(bench.began.recv(), Ok(input), "nobody has looked at the end of the one before");
        bench.go_on.send(()).unwrap();
    }
    let ends = [bench.ends(), bench.ends()].map(|(_, execution)| match execution {
        Execution::Done { started_at, finished_at, .. } => (started_at, finished_at),
        other => panic!("{other:?}"),
    });
    assert!(ends[0].1 <= ends[1].0, "one after the other: {ends:?}");
}

#[test]
fn a_batch_behind_one_that_ends_early_or_late_keeps_its_window() {
    let mut bench = Bench::new(&[1, 2, 3]);
    let opens_at = bench.clock.now() + Span::from_millis(40);
    bench.post(1, 0);
    bench.post_in_window(1, 1, (opens_at, Timestamp::NEVER));
    assert_eq!(bench.began.recv(), Ok(1));
    bench.go_on.send(()).unwrap();
    assert!(matches!(bench.ends().1, Execution::Done { .. }));
    assert_eq!(bench.began.recv(), Ok(2));
    // The next one's window ends while this one runs.
    let latest = bench.clock.now();
    bench.post_in_window(1, 2, (Timestamp::PAST, latest));
    bench.go_on.send(()).unwrap();
    let Execution::Done { started_at, .. } = bench.ends().1 else { panic!("it has begun") };
    assert!(started_at >= opens_at, "{started_at:?} is before {opens_at:?}");
    let Execution::WindowMissed { rejected_at } = bench.ends().1 else { panic!("it came too late") };
    assert!(rejected_at > latest);
    assert!(bench.began.is_empty());
}

#[test]
fn what_has_not_begun_is_taken_back_alone_or_with_its_session() {
    let mut bench = Bench::new(&[1, 2, 3]);
    bench.post(1, 0);
    assert_eq!(bench.began.recv(), Ok(1));
    assert!(!bench.gpus.take_back(0, 1), "it has begun");
    bench.post(1, 1);
    assert!(!bench.gpus.take_back(0, 2), "that is another session");
    assert!(bench.gpus.take_back(0, 1));
    bench.post(1, 1);
    bench.gpus.end_session(1);
    // The next session's first batch waits behind that of the one before, and is not asked back.
    bench.post(2, 2);
    bench.post(2, 1);
    assert!(bench.gpus.take_back(0, 2));
    bench.go_on.send(()).unwrap();
    assert_eq!(bench.began.recv(), Ok(3), "the second one was never begun");
    bench.go_on.send(()).unwrap();
    assert_eq!([bench.ends().0, bench.ends().0], [1, 2]);
    assert!(bench.began.is_empty());
}

#[test]
fn what_waits_for_its_window_is_taken_back_although_nothing_executes() {
    let mut bench = Bench::new(&[1, 2]);
    let opens_at = bench.clock.now() + Span::from_millis(3_600_000);
    bench.post(1, 0);
    bench.post_in_window(1, 1, (opens_at, Timestamp::NEVER));
    bench.go_on.send(()).unwrap();
    assert!(matches!(bench.ends(), (1, Execution::Done { .. })));
    assert!(bench.gpus.take_back(0, 1));
    bench.post(1, 1);
    bench.go_on.send(()).unwrap();
    assert!(matches!(bench.ends(), (1, Execution::Done { .. })), "what is there instead is run");
}

#[test]
fn what_is_behind_one_that_lost_the_executor_is_not_run() {
    let mut bench = Bench::new(&[13, 2]);
    bench.post(1, 0);
    bench.post(1, 1);
    assert_eq!(bench.began.recv(), Ok(13));
    bench.go_on.send(()).unwrap();
    assert!(matches!(bench.ends(), (1, Execution::Lost { .. })));
    assert!(matches!(bench.ends(), (1, Execution::Skipped { .. })));
    assert!(bench.began.is_empty());
    // What comes later is told what is wrong.
    bench.post(1, 1);
    assert_eq!(bench.began.recv(), Ok(2));
    bench.go_on.send(()).unwrap();
    assert!(matches!(bench.ends(), (1, Execution::Lost { .. })));
}

#[test]
fn what_is_behind_one_that_panics_is_run() {
    let mut bench = Bench::new(&[1, 2]);
    let executor: Arc<dyn Executor> = Arc::new(Doubling(None));
    bench.staged.region().write(2, &[13]);
    for (executor, offset) in [(&bench.executor, 0), (&executor, 2), (&bench.executor, 1)] {
        let (batch, staged) = (single(executor, offset), Arc::clone(&bench.staged));
        bench.gpus.post(0, Job { session: 1, batch, staged, waker: bench.endpoint.waker() });
    }
    (0..2).for_each(|_| bench.go_on.send(()).unwrap());
    assert!(matches!(bench.ends().1, Execution::Done { .. }));
    assert!(matches!(bench.ends().1, Execution::Panicked { .. }));
    assert!(matches!(bench.ends().1, Execution::Done { .. }));
}

#[test]
fn an_executor_that_fails_or_panics_fails_its_batch_only() {
    let (execution, _) = run(&[1, 13], Timestamp::NEVER, None);
    assert!(matches!(execution, Execution::Panicked { .. }));
    let (execution, _) = run(&[1, 14], Timestamp::NEVER, None);
    assert!(matches!(execution, Execution::Failed { reason, .. } if reason == "out of luck"));
}
