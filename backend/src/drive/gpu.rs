//! Step 8: a thread for each GPU, which runs one batch at a time, and one that sends the inputs of the next ahead.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, Builder, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender};
use cuda::{Part, Slot};
use proto::{PlanId, Span, Timestamp};
use transport::{Clock, Region, Waker};

use repository::cell;

use super::{ahead::Ahead, pinned::Staged};
use crate::{
    core,
    executor::{Executor, ExecutorError, OnGpus, TaskError},
    staging::ModelShape,
    worker::{Execution, Outputs},
};

/// A GPU has one batch at a time; a second waits only while one of a lost session ends.
const JOBS_MAX: usize = 2;
/// Sleeping ends up to this late, so the rest of a wait is spent awake.
const SLEEP_ERROR: Span = Span::from_micros(80);

/// A batch to run.
pub(super) struct Job {
    /// Comes back with the result.
    pub(super) session: u64,
    pub(super) batch: core::Job,
    /// Staging memory.
    pub(super) staged: Arc<Staged>,
    /// Whom to wake when it has ended.
    pub(super) waker: Waker,
}

/// A batch whose inputs go ahead.
pub(super) struct JobAhead {
    /// Whose number it is.
    pub(super) session: u64,
    pub(super) number: u64,
    pub(super) executor: Arc<dyn Executor>,
    pub(super) runs: Vec<core::Run>,
    /// Staging memory.
    pub(super) staged: Arc<Staged>,
}

/// How a job ended.
pub(super) struct Finished {
    pub(super) session: u64,
    pub(super) gpu: usize,
    pub(super) end: End,
}

/// Of a job that has a sample there may be both, the batch's first.
pub(super) enum End {
    /// Its stamps are on the scheduler's clock.
    Batch(Execution),
    /// The sample of this plan was run again, and took so long.
    Alone(PlanId, Span),
}

/// The threads.
pub(super) struct Gpus {
    jobs: Vec<Sender<Job>>,
    ahead: Vec<Sender<JobAhead>>,
    finished: Option<Receiver<Finished>>,
    threads: Vec<JoinHandle<()>>,
}

impl Gpus {
    /// `sends_ahead`: whether some of them have memory of their own.
    pub(super) fn start(clock: Clock, count: usize, sends_ahead: bool) -> io::Result<Self> {
        let (finished_sender, finished) = crossbeam_channel::bounded(count * (JOBS_MAX + 1));
        let (jobs, ahead, threads) = (Vec::new(), Vec::new(), Vec::new());
        let mut gpus = Self { jobs, ahead, finished: Some(finished), threads };
        for gpu in 0..count {
            let (sender, jobs) = crossbeam_channel::bounded(JOBS_MAX);
            let finished = finished_sender.clone();
            let went = Arc::new(Ahead::default());
            let thread = Builder::new().name(format!("gpu-{gpu}"));
            let of_jobs = Arc::clone(&went);
            gpus.threads.push(thread.spawn(move || run_jobs(clock, (gpu, &of_jobs), &jobs, &finished))?);
            gpus.jobs.push(sender);
            if sends_ahead {
                let (sender, jobs) = crossbeam_channel::bounded(JOBS_MAX);
                let thread = Builder::new().name(format!("inputs-{gpu}"));
                gpus.threads.push(thread.spawn(move || send_ahead(gpu, &went, &jobs))?);
                gpus.ahead.push(sender);
            }
        }
        Ok(gpus)
    }

    /// Gives a GPU its next batch; false if it still has too many of lost sessions.
    pub(super) fn post(&self, gpu: usize, job: Job) -> bool {
        self.jobs[gpu].try_send(job).is_ok()
    }

    /// Gives a GPU the inputs of the batch after the one that it runs, if it can take them now.
    pub(super) fn post_ahead(&self, gpu: usize, job: JobAhead) {
        let _ = self.ahead.get(gpu).map(|ahead| ahead.try_send(job));
    }

    /// The next batch that has ended.
    pub(super) fn poll_finished(&self) -> Option<Finished> {
        self.finished.as_ref()?.try_recv().ok()
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        // Without a receiver and without senders, threads end after the batch that they run.
        self.finished = None;
        self.jobs.clear();
        self.ahead.clear();
        for thread in self.threads.drain(..) {
            thread.join().expect("panics of executors are caught");
        }
    }
}

fn send_ahead(gpu: usize, ahead: &Ahead, jobs: &Receiver<JobAhead>) {
    for JobAhead { session, number, executor, runs, staged } in jobs {
        if let Some(model) = executor.on_gpus() {
            let send = || ahead.send((session, number), (model, gpu), (&staged, &runs));
            if catch_unwind(AssertUnwindSafe(send)).is_err() {
                tracing::error!(gpu, "sending inputs ahead panicked; they are sent once more");
            }
        }
    }
}

fn run_jobs(clock: Clock, (gpu, ahead): (usize, &Ahead), jobs: &Receiver<Job>, finished: &Sender<Finished>) {
    super::reduce_timer_slack();
    let mut scratch = Scratch::default();
    for job in jobs {
        let on_gpus = job.batch.executor.on_gpus();
        let execution = match on_gpus {
            Some(model) if model.takes_inputs_ahead() => run_on_gpu(clock, &job, &mut scratch, (model, gpu, ahead)),
            _ => run_job(clock, &job, &mut scratch, (gpu, ahead)),
        };
        let sample = job.batch.sample.filter(|_| matches!(execution, Execution::Done { .. }));
        if finished.send(Finished { session: job.session, gpu, end: End::Batch(execution) }).is_err() {
            return;
        }
        job.waker.wake();
        // Whoever waits comes first.
        let is_idle = jobs.is_empty() && on_gpus.is_none_or(|model| !model.takes_inputs_ahead());
        let Some((place, plan)) = sample.filter(|_| is_idle) else { continue };
        if let Some(took) = scratch.run_alone(clock, &job.batch, place, (gpu, ahead)) {
            let end = End::Alone(plan, took);
            // It is worth less than the room that a batch's end needs.
            if finished.try_send(Finished { session: job.session, gpu, end }).is_ok() {
                job.waker.wake();
            }
        }
    }
}

/// A batch's inputs and outputs, contiguous; kept from batch to batch, so that memory is mapped only once.
#[derive(Default)]
struct Scratch {
    inputs: Vec<u8>,
    outputs: Vec<u8>,
}

/// Runs what the batch's executor runs, by way of this thread's memory.
fn execute(
    executor: &dyn Executor,
    (gpu, ahead): (usize, &Ahead),
    (inputs, outputs): (&[u8], &mut [u8]),
) -> Result<Vec<TaskError>, ExecutorError> {
    match executor.on_gpus() {
        Some(model) => model.run_records(gpu, ahead.own(), inputs, outputs),
        None => executor.execute(inputs, outputs),
    }
}

fn run_job(clock: Clock, job: &Job, scratch: &mut Scratch, on: (usize, &Ahead)) -> Execution {
    let executor = &job.batch.executor;
    let is_up = || executor.on_gpus().map_or_else(|| executor.is_up(), |model| model.on(on.0).gpu().is_up());
    in_window(clock, job, is_up, || {
        let started_at = clock.now();
        let result = catch_unwind(AssertUnwindSafe(|| scratch.run(job, on)));
        if let Some(profile) = executor.emulated_profile() {
            sleep_until(|| clock.now(), started_at + profile.latency(job.batch.tasks()));
        }
        result
    })
}

/// Inputs are on their way before the window opens, whether they went ahead or not.
fn run_on_gpu(
    clock: Clock,
    job: &Job,
    scratch: &mut Scratch,
    (model, gpu, ahead): (&OnGpus, usize, &Ahead),
) -> Execution {
    let Job { session, batch, staged, .. } = job;
    let take = || ahead.take((*session, batch.ahead), (model, gpu), (staged, &batch.runs));
    let taken = catch_unwind(AssertUnwindSafe(take));
    let is_up = || model.on(gpu).gpu().is_up();
    in_window(clock, job, is_up, || {
        let run = |slot| scratch.run_on_gpu(job, (model, gpu), slot);
        catch_unwind(AssertUnwindSafe(|| taken.map(|slot| slot.and_then(run)))).flatten()
    })
}

/// Runs a batch when its window has opened, and unless that has ended.
fn in_window(
    clock: Clock,
    job: &Job,
    is_up: impl FnOnce() -> bool,
    run: impl FnOnce() -> thread::Result<Result<Outputs, ExecutorError>>,
) -> Execution {
    // Before the scheduler has answered, clocks are taken as equal; no plan has a task that can run then.
    let scheduler_now = || job.batch.offset.to_scheduler(clock.now()).unwrap_or(clock.now());
    sleep_until(scheduler_now, job.batch.exec_at);
    let started_at = scheduler_now();
    // Clockwork, section 4.4: what cannot start in its window is cancelled, so that one delay does not spread.
    if started_at > job.batch.latest {
        return Execution::WindowMissed { rejected_at: started_at };
    }
    let result = run();
    let finished_at = scheduler_now();
    match result {
        Ok(Ok(outputs)) => Execution::Done { started_at, finished_at, outputs },
        Ok(Err(ExecutorError(reason))) if !is_up() => Execution::Lost { started_at, finished_at, reason },
        Ok(Err(ExecutorError(reason))) => Execution::Failed { started_at, finished_at, reason },
        Err(_) => Execution::Panicked { started_at, finished_at },
    }
}

/// Where the inputs of runs lie.
pub(super) fn parts<'a>(region: &'a Region, runs: &[core::Run]) -> Vec<Part<'a>> {
    let part = |run: &core::Run| Part { region, offset: run.input_offset, bytes: run.tasks * run.input_bytes };
    runs.iter().map(part).collect()
}

impl Scratch {
    fn run(&mut self, job: &Job, on: (usize, &Ahead)) -> Result<Outputs, ExecutorError> {
        let batch = &job.batch;
        let ModelShape { output_bytes, records, .. } = batch.shape;
        let inputs_bytes = batch.runs.iter().map(|run| run.tasks * run.input_bytes).sum();
        // They do not shrink, so that nothing is cleared that is overwritten anyway.
        self.inputs.resize(self.inputs.len().max(inputs_bytes), 0);
        self.outputs.resize(self.outputs.len().max(batch.tasks() * output_bytes), 0);
        let (inputs, outputs) = (&mut self.inputs[..inputs_bytes], &mut self.outputs[..batch.tasks() * output_bytes]);
        let mut rest = &mut *inputs;
        for run in &batch.runs {
            let into = rest.split_off_mut(..run.tasks * run.input_bytes).expect("there is room for all tasks");
            job.staged.region().read(run.input_offset, into);
            if records.inputs {
                // How long they are is what was planned with, whatever the frontend has written there.
                into.chunks_exact_mut(run.input_bytes).for_each(cell::set_record_bytes);
            }
        }
        let failed = execute(batch.executor.as_ref(), on, (inputs, &mut *outputs))?;
        if failed.is_empty() && !records.outputs {
            let mut outputs = &*outputs;
            for run in &batch.runs {
                let from = outputs.split_off(..run.tasks * output_bytes).expect("there are outputs of all tasks");
                job.staged.region().write(run.output_offset, from);
            }
            return Ok(Outputs::default());
        }
        put_apart(job, failed, outputs)
    }

    /// Runs one task of the batch that was run last again, alone. How long that took; `None` if it failed.
    fn run_alone(&mut self, clock: Clock, batch: &core::Job, place: usize, on: (usize, &Ahead)) -> Option<Span> {
        // As they were gathered.
        let lengths = batch.runs.iter().flat_map(|run| std::iter::repeat_n(run.input_bytes, run.tasks));
        let input_bytes = lengths.clone().nth(place)?;
        let offset: usize = lengths.take(place).sum();
        let input = self.inputs.get(offset..offset + input_bytes)?;
        let output = self.outputs.get_mut(..batch.shape.output_bytes)?;
        let started_at = clock.now();
        let ran = catch_unwind(AssertUnwindSafe(|| execute(batch.executor.as_ref(), on, (input, output))));
        let took = clock.now() - started_at;
        matches!(ran, Ok(Ok(failed)) if failed.is_empty()).then_some(took)
    }

    /// Runs what is in a slot of the GPU's memory; outputs come to staging memory by themselves.
    fn run_on_gpu(&mut self, job: &Job, (model, gpu): (&OnGpus, usize), slot: Slot) -> Result<Outputs, ExecutorError> {
        let batch = &job.batch;
        let (region, output_bytes) = (job.staged.region(), batch.shape.output_bytes);
        let part = |run: &core::Run| Part { region, offset: run.output_offset, bytes: run.tasks * output_bytes };
        let rooms: Vec<Part<'_>> = batch.runs.iter().map(part).collect();
        let failed = model.run(gpu, slot, batch.tasks(), &rooms)?;
        if failed.is_empty() {
            return Ok(Outputs::default());
        }
        self.outputs.resize(self.outputs.len().max(batch.tasks() * output_bytes), 0);
        let outputs = &mut self.outputs[..batch.tasks() * output_bytes];
        let mut rest = &mut *outputs;
        for room in rooms {
            region.read(room.offset, rest.split_off_mut(..room.bytes).expect("there is room for all tasks"));
        }
        put_apart(job, failed, outputs)
    }
}

/// Puts outputs where they belong that are not all there, or not all of one length.
fn put_apart(job: &Job, failed: Vec<TaskError>, outputs: &[u8]) -> Result<Outputs, ExecutorError> {
    let ModelShape { output_bytes, records, .. } = job.batch.shape;
    // What lies in the room of a task that has no output says nothing.
    let mut without = failed.iter().map(|failure| failure.task).peekable();
    let length = |(task, room)| match without.next_if_eq(&task) {
        Some(_) => Ok(0),
        None => output_length(room, records.outputs),
    };
    let bytes = outputs.chunks_exact(output_bytes).enumerate().map(length).collect::<Result<_, _>>()?;
    let outcome = Outputs { bytes, failed };
    scatter(job, &outcome, outputs);
    Ok(outcome)
}

/// Bytes of a task's output at the front of its room.
fn output_length(room: &[u8], is_record: bool) -> Result<u32, ExecutorError> {
    let length = if is_record { cell::record_bytes(room) } else { Some(room.len()) };
    let length = length.filter(|&length| length <= room.len());
    let wrong = || ExecutorError(format!("the executor's outputs have no length within {} bytes", room.len()));
    length.map(|length| length as u32).ok_or_else(wrong)
}

/// Puts outputs where their answers are: those of a run one after another, or each by itself if any has failed.
fn scatter(job: &Job, outcome: &Outputs, outputs: &[u8]) {
    let shape = job.batch.shape;
    let mut outputs = outputs.chunks_exact(shape.output_bytes).zip(&outcome.bytes);
    for run in &job.batch.runs {
        let mut packed = run.output_offset;
        for (index, (room, &bytes)) in outputs.by_ref().take(run.tasks).enumerate() {
            let own = run.output_offset + index * shape.answer_stride();
            let at = if outcome.failed.is_empty() { packed } else { own };
            job.staged.region().write(at, &room[..bytes as usize]);
            packed += bytes as usize;
        }
    }
}

/// Sleeps while there is time to oversleep, then yields until `at`.
pub(super) fn sleep_until(now: impl Fn() -> Timestamp, at: Timestamp) {
    loop {
        let left = at - now();
        if left <= Span::ZERO {
            return;
        }
        if left > SLEEP_ERROR {
            thread::sleep((left - SLEEP_ERROR).to_duration());
        } else {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert!(gpus.post(
            0,
            Job { session: 1, batch, staged: Arc::new(Staged::unpinned(region.clone())), waker: endpoint.waker() }
        ));
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
        let run = |tasks, input_offset, input_bytes, output_offset| core::Run {
            tasks,
            input_offset,
            input_bytes,
            output_offset,
        };
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
        let job =
            Job { session: 1, batch, staged: Arc::new(Staged::unpinned(region.clone())), waker: endpoint.waker() };
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
    fn an_executor_that_fails_or_panics_fails_its_batch_only() {
        let (execution, _) = run(&[1, 13], Timestamp::NEVER, None);
        assert!(matches!(execution, Execution::Panicked { .. }));
        let (execution, _) = run(&[1, 14], Timestamp::NEVER, None);
        assert!(matches!(execution, Execution::Failed { reason, .. } if reason == "out of luck"));
    }
}
