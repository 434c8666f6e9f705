//! One run: arrivals, the scheduler's cores and GPUs under one clock.
//!
//! At each instant: batches that end are reported, requests that arrive are submitted, then timers fire, and what the
//! two threads tell each other is delivered until both are silent.

use std::{cmp::Reverse, collections::BinaryHeap};

use proto::{GpuId, ModelId, Span, Timestamp};
use scheduler::{Batch, GpuUpdate, ModelConfig, ModelThread, Policy, RankThread, Task, model_thread::Output};

use crate::{
    arrivals::Arrivals,
    checker::{Checker, Violation},
    report::{Recorder, Report},
    trace::Event,
    workload::Workload,
};

/// Tasks that may wait for one model.
const QUEUE_MAX: usize = 16_384;

/// What to run a workload with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The policy of every model.
    pub policy: Policy,
    /// Aggregate rate in requests a second; above 0.
    pub rate_rps: f64,
    /// Simulated span in seconds; its first tenth warms up.
    pub seconds: f64,
    /// Seeds the arrivals.
    pub seed: u64,
}

/// Runs a workload. `observe` is told all events in the order of decisions; `progress` once a simulated second how many
/// have passed.
///
/// # Errors
/// If an invariant is broken.
pub fn run(
    workload: &Workload,
    options: &Options,
    observe: &mut dyn FnMut(Event),
    progress: &mut dyn FnMut(f64),
) -> Result<Report, Violation> {
    let end = Timestamp::ZERO + Span::from_secs_f64(options.seconds);
    let arrivals = Arrivals::random(workload, options.rate_rps, options.seed, end);
    run_arrivals(workload, options, arrivals, observe, progress)
}

/// As [`run`], with requests that come as given; the options' rate and seed only name the run.
///
/// # Errors
/// If an invariant is broken.
pub fn run_arrivals(
    workload: &Workload,
    options: &Options,
    arrivals: Arrivals,
    observe: &mut dyn FnMut(Event),
    progress: &mut dyn FnMut(f64),
) -> Result<Report, Violation> {
    let end = Timestamp::ZERO + Span::from_secs_f64(options.seconds);
    let warm = Timestamp::ZERO + Span::from_secs_f64(options.seconds / 10.0);
    let mut cluster = Cluster::new(workload, options.policy, (warm, end), observe);
    for gpu in 0..workload.gpus {
        cluster.add_gpu(Timestamp::ZERO, GpuId(gpu));
    }
    cluster.run(arrivals, progress)?;
    let names: Vec<_> = workload.models.iter().map(|model| model.name.as_str()).collect();
    let policy = options.policy.to_string();
    let identity = (workload.name.clone(), policy, options.rate_rps, options.seconds, options.seed);
    Ok(cluster.recorder.report(&names, identity))
}

pub(crate) struct Cluster<'a> {
    workload: &'a Workload,
    model_thread: ModelThread<()>,
    rank_thread: RankThread,
    /// Batches that run, by when the scheduler learns that they ended.
    reports: BinaryHeap<Reverse<(Timestamp, GpuId, Timestamp)>>,
    checker: Checker,
    recorder: Recorder,
    observe: &'a mut dyn FnMut(Event),
}

impl<'a> Cluster<'a> {
    /// Without GPUs. Requests that arrive in `measured`, half open, count.
    pub(crate) fn new(
        workload: &'a Workload,
        policy: Policy,
        measured: (Timestamp, Timestamp),
        observe: &'a mut dyn FnMut(Event),
    ) -> Self {
        let mut model_thread = ModelThread::new(workload.network, policy);
        for (id, model) in (0..).zip(&workload.models) {
            let config = ModelConfig { profile: model.profile.clone(), queue_max: QUEUE_MAX, budget: None };
            model_thread.handle_model(Timestamp::ZERO, ModelId(id), config);
        }
        let slos = workload.models.iter().map(|model| model.slo);
        Self {
            workload,
            model_thread,
            rank_thread: RankThread::new(workload.network),
            reports: BinaryHeap::new(),
            checker: Checker::new(workload.gpus as usize),
            recorder: Recorder::new(measured, slos, workload.gpus as usize),
            observe,
        }
    }

    pub(crate) fn add_gpu(&mut self, free_at: Timestamp, gpu: GpuId) {
        let models = (0..self.workload.models.len() as u32).map(ModelId).collect();
        self.rank_thread.handle_gpu_joined(free_at, gpu, models);
    }

    /// Until nothing is left to happen.
    pub(crate) fn run(&mut self, mut arrivals: Arrivals, progress: &mut dyn FnMut(f64)) -> Result<(), Violation> {
        let mut next_progress = Timestamp::ZERO;
        loop {
            let report_at = self.reports.peek().map(|Reverse((at, ..))| *at);
            let timers = [self.model_thread.poll_timeout(), self.rank_thread.poll_timeout()];
            let Some(now) = timers.into_iter().chain([arrivals.peek(), report_at]).flatten().min() else { break };
            if now >= next_progress {
                progress((now - Timestamp::ZERO).as_secs_f64());
                next_progress = now + Span::from_millis(1000);
            }
            while let Some(&Reverse((at, gpu, finished_at))) = self.reports.peek()
                && at <= now
            {
                self.reports.pop();
                self.rank_thread.handle_gpu(gpu, GpuUpdate::Finished { finished_at });
            }
            while arrivals.peek().is_some_and(|at| at <= now) {
                let (at, model) = arrivals.pop().expect("just peeked");
                self.submit(at, ModelId(model))?;
            }
            self.model_thread.handle_timeout(now);
            self.settle(now)?;
        }
        self.checker.finish()
    }

    fn submit(&mut self, now: Timestamp, model: ModelId) -> Result<(), Violation> {
        let index = model.0 as usize;
        self.recorder.arrived(index, now);
        let deadline = now + self.workload.models[index].slo - self.workload.response;
        let task = Task { id: self.checker.submit(), deadline, payload: () };
        self.model_thread.handle_submit(now, model, task);
        match self.model_thread.queue_length(model) {
            0..=QUEUE_MAX => Ok(()),
            found => Err(Violation::Unbounded { what: "a model's queue", found, bound: QUEUE_MAX }),
        }
    }

    /// Delivers what the threads have for each other, and fires the RankThread's timers, until nothing is left.
    fn settle(&mut self, now: Timestamp) -> Result<(), Violation> {
        loop {
            while let Some(output) = self.model_thread.poll_output() {
                self.on_output(now, output)?;
            }
            self.rank_thread.handle_timeout(now);
            let mut is_silent = true;
            while let Some(grant) = self.rank_thread.poll_grant() {
                self.model_thread.handle_grant(now, grant);
                is_silent = false;
            }
            if is_silent {
                return Ok(());
            }
        }
    }

    fn on_output(&mut self, now: Timestamp, output: Output<()>) -> Result<(), Violation> {
        match output {
            Output::Candidate(model, candidate) => self.rank_thread.handle_candidate(now, model, candidate),
            Output::Gpu(gpu, update) => self.rank_thread.handle_gpu(gpu, update),
            Output::Batch(batch) => self.on_batch(&batch)?,
            Output::Dropped { model, task, .. } => {
                self.checker.end(task.id)?;
                let slo = self.workload.models[model.0 as usize].slo;
                let arrived_at = task.deadline + self.workload.response - slo;
                self.recorder.dropped(model.0 as usize, arrived_at);
                (self.observe)(Event::Drop { model: model.0, arrived_at, dropped_at: now });
            }
        }
        Ok(())
    }

    /// The GPU starts the batch as soon as it may.
    fn on_batch(&mut self, batch: &Batch<()>) -> Result<(), Violation> {
        let model = batch.model.0 as usize;
        let size = batch.tasks.len();
        let started_at = batch.exec_at;
        let finished_at = started_at + self.workload.models[model].profile.latency(size);
        self.checker.execute(batch.gpu.0, (batch.exec_at, batch.latest), started_at, finished_at)?;
        for (task, ()) in &batch.tasks {
            self.checker.end(task.id)?;
            if finished_at > task.deadline {
                return Err(Violation::PlannedLate { task: task.id, late: finished_at - task.deadline });
            }
            self.recorder.answered(model, task.queued_at, started_at, finished_at + self.workload.response);
        }
        self.recorder.executed(model, batch.gpu.0 as usize, size, started_at, finished_at);
        let (gpu, model) = (batch.gpu.0, batch.model.0);
        (self.observe)(Event::Batch { gpu, model, size: size as u32, started_at, finished_at });
        // The report of its end takes the way that the plan took.
        self.reports.push(Reverse((finished_at + self.workload.network.ctrl, batch.gpu, finished_at)));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
