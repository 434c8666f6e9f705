//! Step 8: a thread for each GPU, which runs one batch at a time.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::{Builder, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender};
use proto::{Span, Timestamp};
use transport::{Clock, Region, Waker};

use crate::{core, executor::ExecutorError, staging::ModelShape, worker::Execution};

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
    pub(super) region: Region,
    /// Whom to wake when it has ended.
    pub(super) waker: Waker,
}

/// How a job ended.
pub(super) struct Finished {
    pub(super) session: u64,
    pub(super) gpu: usize,
    /// Its stamps are on the scheduler's clock.
    pub(super) execution: Execution,
}

/// The threads.
pub(super) struct Gpus {
    jobs: Vec<Sender<Job>>,
    finished: Option<Receiver<Finished>>,
    threads: Vec<JoinHandle<()>>,
}

impl Gpus {
    pub(super) fn start(clock: Clock, count: usize) -> io::Result<Self> {
        let (finished_sender, finished) = crossbeam_channel::bounded(count * (JOBS_MAX + 1));
        let mut gpus = Self { jobs: Vec::new(), finished: Some(finished), threads: Vec::new() };
        for gpu in 0..count {
            let (sender, jobs) = crossbeam_channel::bounded(JOBS_MAX);
            let finished = finished_sender.clone();
            let thread = Builder::new().name(format!("gpu-{gpu}"));
            gpus.threads.push(thread.spawn(move || run_jobs(clock, gpu, &jobs, &finished))?);
            gpus.jobs.push(sender);
        }
        Ok(gpus)
    }

    /// Gives a GPU its next batch; false if it still has too many of lost sessions.
    pub(super) fn post(&self, gpu: usize, job: Job) -> bool {
        self.jobs[gpu].try_send(job).is_ok()
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
        for thread in self.threads.drain(..) {
            thread.join().expect("panics of executors are caught");
        }
    }
}

fn run_jobs(clock: Clock, gpu: usize, jobs: &Receiver<Job>, finished: &Sender<Finished>) {
    super::reduce_timer_slack();
    let mut scratch = Scratch::default();
    for job in jobs {
        let execution = run_job(clock, &job, &mut scratch);
        if finished.send(Finished { session: job.session, gpu, execution }).is_err() {
            return;
        }
        job.waker.wake();
    }
}

/// A batch's inputs and outputs, contiguous; kept from batch to batch, so that memory is mapped only once.
#[derive(Default)]
struct Scratch {
    inputs: Vec<u8>,
    outputs: Vec<u8>,
}

fn run_job(clock: Clock, job: &Job, scratch: &mut Scratch) -> Execution {
    // Before the scheduler has answered, clocks are taken as equal; no plan has a task that can run then.
    let scheduler_now = || job.batch.offset.to_scheduler(clock.now()).unwrap_or(clock.now());
    sleep_until(scheduler_now, job.batch.exec_at);
    let started_at = scheduler_now();
    // Clockwork, section 4.4: what cannot start in its window is cancelled, so that one delay does not spread.
    if started_at > job.batch.latest {
        return Execution::WindowMissed { rejected_at: started_at };
    }
    let result = catch_unwind(AssertUnwindSafe(|| scratch.run(job)));
    if let Some(profile) = job.batch.executor.emulated_profile() {
        sleep_until(scheduler_now, started_at + profile.latency(job.batch.tasks()));
    }
    let finished_at = scheduler_now();
    match result {
        Ok(Ok(())) => Execution::Done { started_at, finished_at },
        Ok(Err(ExecutorError(reason))) => Execution::Failed { started_at, finished_at, reason },
        Err(_) => Execution::Panicked { started_at, finished_at },
    }
}

impl Scratch {
    fn run(&mut self, job: &Job) -> Result<(), ExecutorError> {
        let batch = &job.batch;
        let ModelShape { input_bytes, output_bytes, .. } = batch.shape;
        self.inputs.resize(batch.tasks() * input_bytes, 0);
        self.outputs.resize(batch.tasks() * output_bytes, 0);
        let mut inputs = &mut self.inputs[..];
        for run in &batch.runs {
            let into = inputs.split_off_mut(..run.tasks * input_bytes).expect("there is room for all tasks");
            job.region.read(run.input_offset, into);
        }
        batch.executor.execute(&self.inputs, &mut self.outputs)?;
        let mut outputs = &self.outputs[..];
        for run in &batch.runs {
            let from = outputs.split_off(..run.tasks * output_bytes).expect("there are outputs of all tasks");
            job.region.write(run.output_offset, from);
        }
        Ok(())
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
            std::thread::sleep((left - SLEEP_ERROR).to_duration());
        } else {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::executor::Executor;
    use proto::{LatencyProfile, ModelId, clock::ClockOffset};
    use transport::{Endpoint, EndpointConfig};

    /// Doubles every byte; panics on 13, fails on 14.
    struct Doubling(Option<LatencyProfile>);

    impl Executor for Doubling {
        fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<(), ExecutorError> {
            assert!(!inputs.contains(&13), "this panic is part of the test");
            if inputs.contains(&14) {
                return Err(ExecutorError("out of luck".into()));
            }
            outputs.iter_mut().zip(inputs).for_each(|(output, input)| *output = input * 2);
            Ok(())
        }

        fn emulated_profile(&self) -> Option<&LatencyProfile> {
            self.0.as_ref()
        }
    }

    /// Runs one batch whose inputs lie in two runs in the region.
    fn run(inputs: &[u8], latest: Timestamp, profile: Option<LatencyProfile>) -> (Execution, Vec<u8>) {
        let clock = Clock::start();
        let gpus = Gpus::start(clock, 1).unwrap();
        let mut endpoint = Endpoint::open(EndpointConfig::default()).unwrap();
        let region = Region::allocate(200).unwrap();
        // The last task's input lies first, those of the others behind it.
        let (last, others) = inputs.split_last().unwrap();
        region.write(0, &[*last]);
        region.write(1, others);
        let others = core::Run { tasks: others.len(), input_offset: 1, output_offset: 100 };
        let last = core::Run { tasks: 1, input_offset: 0, output_offset: 100 + others.tasks };
        let batch = core::Job {
            model: ModelId(0),
            executor: Arc::new(Doubling(profile)),
            shape: ModelShape { input_bytes: 1, output_bytes: 1, batch_max: 8 },
            runs: vec![others, last],
            exec_at: Timestamp::PAST,
            latest,
            offset: ClockOffset::default(),
        };
        assert!(gpus.post(0, Job { session: 1, batch, region: region.clone(), waker: endpoint.waker() }));
        let finished = loop {
            match gpus.poll_finished() {
                Some(finished) => break finished,
                None => endpoint.wait(clock.now(), Timestamp::NEVER),
            }
        };
        assert_eq!((finished.session, finished.gpu), (1, 0));
        let mut outputs = vec![0; inputs.len()];
        region.read(100, &mut outputs);
        (finished.execution, outputs)
    }

    #[test]
    fn a_batch_is_gathered_executed_and_scattered() {
        let (execution, outputs) = run(&[1, 2, 3], Timestamp::NEVER, None);
        assert!(matches!(execution, Execution::Done { started_at, finished_at } if started_at <= finished_at));
        assert_eq!(outputs, [2, 4, 6]);
    }

    #[test]
    fn an_emulated_batch_lasts_as_long_as_its_profile_says() {
        let profile = LatencyProfile::linear(1.0, 5.0, 8).unwrap();
        let (execution, _) = run(&[1, 2, 3], Timestamp::NEVER, Some(profile));
        let Execution::Done { started_at, finished_at } = execution else { panic!("{execution:?}") };
        assert!(finished_at - started_at >= Span::from_millis(8));
    }

    #[test]
    fn a_batch_that_is_taken_in_too_late_is_not_run() {
        let (execution, outputs) = run(&[1, 2, 3], Timestamp::PAST, None);
        assert!(matches!(execution, Execution::WindowMissed { .. }));
        assert_eq!(outputs, [0, 0, 0]);
    }

    #[test]
    fn an_executor_that_fails_or_panics_fails_its_batch_only() {
        let (execution, _) = run(&[1, 13], Timestamp::NEVER, None);
        assert!(matches!(execution, Execution::Panicked { .. }));
        let (execution, _) = run(&[1, 14], Timestamp::NEVER, None);
        assert!(matches!(execution, Execution::Failed { reason, .. } if reason == "out of luck"));
    }
}
