//! Step 8: a thread for each GPU, which runs one batch after another, and one that sends the inputs of the next ahead.
//! A thread that has its next batch begins it without anybody's word; one that is waiting, for the one before or for
//! its window, can be taken back.

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

use super::{
    ahead::Ahead,
    pinned::Staged,
    queue::Queue,
    timers::{reduce_timer_slack, sleep_until},
};
use crate::{
    core::{self, HANDOVER},
    error::{ExecutorError, TaskError},
    executor::{Executor, OnGpus},
    staging::ModelShape,
    worker::{Execution, HANDED_MAX, Outputs},
};

/// Batches that one session gives a GPU. Those that wait of a lost session are taken back when it ends, so that no more
/// than one is in the way of the next session's.
const JOBS_MAX: usize = HANDED_MAX;

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
    jobs: Vec<Arc<Queue<Job>>>,
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
            let jobs = Arc::new(Queue::default());
            gpus.jobs.push(Arc::clone(&jobs));
            let finished = finished_sender.clone();
            let went = Arc::new(Ahead::default());
            let thread = Builder::new().name(format!("gpu-{gpu}"));
            let of_jobs = Arc::clone(&went);
            gpus.threads.push(thread.spawn(move || run_jobs(clock, (gpu, &of_jobs), &jobs, &finished))?);
            if sends_ahead {
                let (sender, jobs) = crossbeam_channel::bounded(JOBS_MAX);
                let thread = Builder::new().name(format!("inputs-{gpu}"));
                gpus.threads.push(thread.spawn(move || send_ahead(gpu, &went, &jobs))?);
                gpus.ahead.push(sender);
            }
        }
        Ok(gpus)
    }

    /// Gives a GPU another batch, to run after those that it has: [`HANDED_MAX`] of a session at most.
    pub(super) fn post(&self, gpu: usize, job: Job) {
        self.jobs[gpu].push(job);
    }

    /// Takes back the last batch that a GPU was given by this session, if it is not running and not about to. Whether
    /// that was so.
    pub(super) fn take_back(&self, gpu: usize, session: u64) -> bool {
        self.jobs[gpu].take_back(|job| job.session == session).is_some()
    }

    /// Takes back what no GPU has begun of a session that ends.
    pub(super) fn end_session(&self, session: u64) {
        for jobs in &self.jobs {
            jobs.remove(|job| job.session == session);
        }
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
        // Without a receiver, and with nothing to take in, threads end after the batch that they run.
        self.finished = None;
        self.jobs.iter().for_each(|jobs| jobs.close());
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

fn run_jobs(clock: Clock, (gpu, ahead): (usize, &Ahead), jobs: &Queue<Job>, finished: &Sender<Finished>) {
    reduce_timer_slack();
    let mut scratch = Scratch::default();
    let mut next = None;
    while let Some(job) = next.take().or_else(|| jobs.pop(|job| job.left(clock))) {
        let on_gpus = job.batch.executor.on_gpus();
        let execution = match on_gpus {
            Some(model) if model.takes_inputs_ahead() => run_on_gpu(clock, &job, &mut scratch, (model, gpu, ahead)),
            _ => run_job(clock, &job, &mut scratch, (gpu, ahead)),
        };
        // What is there before anybody has heard of the end was put behind this batch.
        if matches!(execution, Execution::Lost { .. }) {
            next = jobs.try_pop();
        }
        let sample = job.batch.sample.filter(|_| matches!(execution, Execution::Done { .. }));
        if finished.send(Finished { session: job.session, gpu, end: End::Batch(execution) }).is_err() {
            return;
        }
        job.waker.wake();
        if let Some(behind) = next.take_if(|next| !is_up(gpu, &*next.batch.executor)) {
            let end = End::Batch(Execution::Skipped { rejected_at: behind.now(clock) });
            if finished.send(Finished { session: behind.session, gpu, end }).is_err() {
                return;
            }
            behind.waker.wake();
        }
        // Whoever waits comes first.
        let is_idle = next.is_none() && jobs.is_empty() && on_gpus.is_none_or(|model| !model.takes_inputs_ahead());
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

/// Whether batches can be run now.
fn is_up(gpu: usize, executor: &dyn Executor) -> bool {
    executor.on_gpus().map_or_else(|| executor.is_up(), |model| model.on(gpu).gpu().is_up())
}

impl Job {
    /// Now, on the clock of its window. Before the scheduler has answered, clocks are taken as equal; no plan has a
    /// task that can run then.
    fn now(&self, clock: Clock) -> Timestamp {
        self.batch.offset.to_scheduler(clock.now()).unwrap_or(clock.now())
    }

    /// How long it can be taken back yet: until it would be handed to a GPU that has nothing else.
    fn left(&self, clock: Clock) -> Span {
        self.batch.exec_at - HANDOVER - self.now(clock)
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
        None => executor.execute_on(gpu, inputs, outputs),
    }
}

fn run_job(clock: Clock, job: &Job, scratch: &mut Scratch, on: (usize, &Ahead)) -> Execution {
    let executor = &*job.batch.executor;
    in_window(clock, on.0, job, || {
        let started_at = clock.now();
        let result = catch_unwind(AssertUnwindSafe(|| scratch.run(job, on)));
        let inputs = scratch.inputs.get(..inputs_bytes(&job.batch)).unwrap_or_default();
        if let Some(takes) = executor.emulated_latency(job.batch.tasks(), inputs) {
            sleep_until(|| clock.now(), started_at + takes);
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
    in_window(clock, gpu, job, || {
        let run = |slot| scratch.run_on_gpu(job, (model, gpu), slot);
        catch_unwind(AssertUnwindSafe(|| taken.map(|slot| slot.and_then(run)))).flatten()
    })
}

/// Runs a batch when its window has opened, and unless that has ended.
fn in_window(
    clock: Clock,
    gpu: usize,
    job: &Job,
    run: impl FnOnce() -> thread::Result<Result<Outputs, ExecutorError>>,
) -> Execution {
    let scheduler_now = || job.now(clock);
    let is_up = || is_up(gpu, &*job.batch.executor);
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

/// Bytes of all inputs of a batch.
fn inputs_bytes(batch: &core::Job) -> usize {
    batch.runs.iter().map(|run| run.tasks * run.input_bytes).sum()
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
        let inputs_bytes = inputs_bytes(batch);
        // They do not shrink, so that nothing is cleared that is overwritten anyway.
        self.inputs.resize(self.inputs.len().max(inputs_bytes), 0);
        make_room(&mut self.outputs, batch.tasks() * output_bytes);
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
        if let Some(takes) = batch.executor.emulated_latency(1, input) {
            sleep_until(|| clock.now(), started_at + takes);
        }
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
        make_room(&mut self.outputs, batch.tasks() * output_bytes);
        let outputs = &mut self.outputs[..batch.tasks() * output_bytes];
        let mut rest = &mut *outputs;
        for room in rooms {
            region.read(room.offset, rest.split_off_mut(..room.bytes).expect("there is room for all tasks"));
        }
        put_apart(job, failed, outputs)
    }
}

/// What is cleared here would be overwritten anyway, and room for the longest is mostly not used: the system clears
/// what is touched first.
fn make_room(outputs: &mut Vec<u8>, bytes: usize) {
    if outputs.len() < bytes {
        *outputs = Vec::new();
        *outputs = vec![0; bytes];
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

#[cfg(test)]
mod tests;
