//! A workload in real time, on threads that stand for the parts of a cluster: one generates requests, one is the
//! scheduler as in production (a planner with the clock), one runs the emulated GPUs.
//!
//! What virtual time leaves out is what is measured here: the scheduler's work takes time, timers are late, threads
//! wait for cores. The scheduler plans with what a hand-over between threads takes, as it does with a network's, so
//! that a GPU has its next batch when it becomes free; the GPUs keep their own time, as devices do. Deadlines count
//! from the instant a request was to be generated, so lateness of the generator counts too. A generator that falls far
//! behind ends the run: whatever came out would be another rate's result. This is a driver: it owns threads and reads
//! the clock.
#![allow(clippy::disallowed_methods)]

use std::{thread, time::Instant};

use cli::CommandError;
use crossbeam_channel::{Receiver, RecvTimeoutError, SendError, Sender};
use proto::{GpuId, ModelId, Span, TaskId, Timestamp};
use scheduler::{
    Batch, ModelConfig, NetworkBudget, Planner, PlannerOutput, Task, predictions::Action, task_queue::Queued,
};
use sim::{
    Options, Report, Workload,
    arrivals::{Arrivals, Request},
    checker::{Checker, Violation},
    faults::FaultSource,
    gpus::{GpuEvent, Gpus},
    report::Recorder,
};

/// Tasks that may wait for one model.
const QUEUE_MAX: usize = 16_384;
/// Messages on their way to the scheduler. What goes to the GPUs is bounded by the planner's bound on each GPU's
/// batches.
const MESSAGES_MAX: usize = 65_536;
/// Messages that the scheduler takes in before it decides.
const TURN_MAX: usize = 256;
/// A generator that is so far behind does not generate the rate.
const BEHIND_MAX: Span = Span::from_millis(200);
/// From a grant to the GPUs' thread: the scheduler's timer is late, and so is the thread that it wakes. Planned with,
/// in addition to the workload's network.
const HAND_OVER: Span = Span::from_micros(250);
/// The longest sleep.
const SLEEP_MAX: Span = Span::from_millis(100);

#[derive(Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn now(self) -> Timestamp {
        Timestamp::ZERO + Span::from(self.0.elapsed())
    }
}

enum ToScheduler {
    Request(Request),
    Ended(GpuEvent),
    Killed {
        batch: Batch<Request>,
        started_at: Option<Timestamp>,
        killed_at: Timestamp,
    },
    /// The last request was sent, or the generator gave up, so far behind.
    Generated {
        behind: Span,
    },
}

enum ToGpus {
    Batch(Batch<Request>),
    Preempt(GpuId),
}

/// Runs a workload for `options.seconds` of real time. `progress` is told how many seconds have passed.
///
/// # Errors
/// If the rate cannot be generated, GPUs are to fail or profiles to be estimated anew (only virtual time has that), or
/// an invariant is broken.
pub fn run(workload: &Workload, options: &Options, progress: &mut dyn FnMut(f64)) -> Result<Report, CommandError> {
    let virtual_only = [
        ("faults.gpu_up_s", workload.faults.up_mean > Span::ZERO),
        ("applications", workload.is_dynamic()),
        ("reestimate", workload.reestimate),
    ];
    if let Some((key, _)) = virtual_only.iter().find(|(_, is_set)| *is_set) {
        return Err(CommandError::Flag {
            flag: "--real-time",
            expected: format!("a workload without {key}"),
            found: workload.name.clone(),
        });
    }
    let end = Timestamp::ZERO + Span::from_secs_f64(options.seconds);
    let arrivals = Arrivals::random(workload, options.rate_rps, options.seed, end);
    let faults = FaultSource::new(workload.faults, workload.gpus, options.seed);
    let (to_scheduler, inbox) = crossbeam_channel::bounded(MESSAGES_MAX);
    let (to_gpus, batches) = crossbeam_channel::unbounded();
    let clock = Clock(Instant::now());
    let (checker, recorder) = thread::scope(|scope| {
        // They end with this closure, and with them the threads that wait at their other ends.
        let (inbox, to_gpus) = (inbox, to_gpus);
        let from_generator = to_scheduler.clone();
        scope.spawn(move || generate(clock, arrivals, &from_generator));
        scope.spawn(move || run_gpus(clock, workload, faults, &batches, &to_scheduler));
        let mut scheduler = Scheduler::new(workload, options, to_gpus);
        scheduler.run(clock, &inbox, progress)?;
        Ok::<_, CommandError>((scheduler.checker, scheduler.recorder))
    })?;
    checker.finish()?;
    Ok(recorder.report(workload, options))
}

/// Sends every request when its time has come.
fn generate(clock: Clock, mut arrivals: Arrivals, to_scheduler: &Sender<ToScheduler>) {
    let mut behind = Span::ZERO;
    while let Some(at) = arrivals.peek()
        && behind <= BEHIND_MAX
    {
        let now = clock.now();
        if at > now {
            thread::sleep((at - now).to_duration());
            continue;
        }
        behind = now - at;
        let request = arrivals.pop().expect("just peeked");
        if to_scheduler.send(ToScheduler::Request(request)).is_err() {
            return;
        }
    }
    // Nobody listens once the run has failed.
    let _ = to_scheduler.send(ToScheduler::Generated { behind });
}

/// Waits for a message until `due`.
fn receive<T>(clock: Clock, inbox: &Receiver<T>, due: Option<Timestamp>) -> Result<Option<T>, RecvTimeoutError> {
    let left = due.map_or(SLEEP_MAX, |due| due - clock.now());
    match inbox.recv_timeout(left.min(SLEEP_MAX).max(Span::ZERO).to_duration()) {
        Ok(message) => Ok(Some(message)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The emulated GPUs, until the scheduler hangs up.
fn run_gpus(
    clock: Clock,
    workload: &Workload,
    mut faults: FaultSource,
    batches: &Receiver<ToGpus>,
    to_scheduler: &Sender<ToScheduler>,
) {
    let mut gpus = Gpus::new(workload.gpus as usize);
    let mut duration = |started_at, batch: &Batch<Request>| faults.duration(started_at, workload, batch);
    while let Ok(message) = receive(clock, batches, gpus.poll_timeout()) {
        let now = clock.now();
        // First what ends by now: a batch that has ended cannot be killed.
        gpus.handle_timeout(now, &mut duration);
        let killed = match message {
            Some(ToGpus::Batch(batch)) => {
                gpus.handle_batch(now, batch, &mut duration);
                None
            }
            Some(ToGpus::Preempt(gpu)) => gpus.handle_preempt(now, gpu),
            None => None,
        };
        let ended = std::iter::from_fn(|| gpus.poll_event()).map(ToScheduler::Ended).collect::<Vec<_>>();
        let killed = killed.map(|(batch, started_at)| ToScheduler::Killed { batch, started_at, killed_at: now });
        if ended.into_iter().chain(killed).try_for_each(|event| to_scheduler.send(event)).is_err() {
            return;
        }
    }
}

/// The scheduler's thread: its planner, and what became of every request.
struct Scheduler<'a> {
    workload: &'a Workload,
    rate_rps: f64,
    planner: Box<dyn Planner<Request>>,
    to_gpus: Sender<ToGpus>,
    checker: Checker,
    recorder: Recorder,
    submitted: u64,
    ended: u64,
    is_generated: bool,
}

impl<'a> Scheduler<'a> {
    fn new(workload: &'a Workload, options: &Options, to_gpus: Sender<ToGpus>) -> Self {
        let budget = NetworkBudget { ctrl: workload.network.ctrl + HAND_OVER, ..workload.network };
        let mut planner = options.policy.planner(budget);
        let models: Vec<_> = (0..workload.models.len() as u32).map(ModelId).collect();
        for (&id, model) in models.iter().zip(&workload.models) {
            let config = ModelConfig::new(model.profile.clone(), QUEUE_MAX);
            planner.handle_model(Timestamp::ZERO, id, config);
        }
        for gpu in (0..workload.gpus).map(GpuId) {
            let kind = workload.kind_of(gpu.0);
            for (&id, model) in models.iter().zip(&workload.models) {
                let own = Some(&model.offers[kind]).filter(|offer| **offer != model.profile);
                planner.handle_gpu_profile(id, gpu, own.cloned());
            }
            planner.handle_gpu_joined(Timestamp::ZERO, gpu, models.clone(), None);
        }
        let instant = |seconds| Timestamp::ZERO + Span::from_secs_f64(seconds);
        let measured = (instant(options.seconds / 10.0), instant(options.seconds));
        Self {
            workload,
            rate_rps: options.rate_rps,
            planner,
            to_gpus,
            checker: Checker::new(workload.gpus as usize),
            recorder: Recorder::new(measured, workload),
            submitted: 0,
            ended: 0,
            is_generated: false,
        }
    }

    fn run(
        &mut self,
        clock: Clock,
        inbox: &Receiver<ToScheduler>,
        progress: &mut dyn FnMut(f64),
    ) -> Result<(), CommandError> {
        while !self.is_generated || self.ended < self.submitted {
            let first = receive(clock, inbox, self.planner.poll_timeout()).expect("both threads send until the end");
            let now = clock.now();
            for message in first.into_iter().chain(inbox.try_iter().take(TURN_MAX)) {
                self.on_message(now, message)?;
            }
            self.planner.handle_timeout(now);
            while let Some(output) = self.planner.poll_output() {
                self.on_output(output)?;
            }
            progress((now - Timestamp::ZERO).as_secs_f64());
        }
        Ok(())
    }

    fn on_message(&mut self, now: Timestamp, message: ToScheduler) -> Result<(), CommandError> {
        match message {
            ToScheduler::Request(request) => {
                self.recorder.arrived(request, false);
                self.submitted += 1;
                let (id, deadline) = (self.checker.submit(), self.workload.deadline(request));
                self.planner.handle_submit(
                    now,
                    request.model,
                    Task { id, deadline, priority: 0, application: 0, length: 0, payload: request },
                );
            }
            ToScheduler::Ended(GpuEvent::Finished { batch, started_at, finished_at }) => {
                self.on_ran(&batch, started_at, finished_at)?;
                let answered_at = finished_at + self.workload.response;
                self.recorder.executed(batch.model.0 as usize, batch.tasks.len(), started_at);
                self.recorder.predicted(Action::Infer, batch.predicted(), (started_at, finished_at));
                for &(key, request) in &batch.tasks {
                    self.end(key.id)?;
                    self.recorder.answered(request, Some(started_at), answered_at);
                }
            }
            ToScheduler::Ended(GpuEvent::Rejected { batch, rejected_at }) => {
                self.planner.handle_finished(batch.gpu, rejected_at);
                for (key, request) in batch.tasks {
                    self.on_dropped(key.id, request)?;
                }
            }
            ToScheduler::Killed { batch, started_at, killed_at } => {
                match started_at {
                    Some(started_at) => self.on_ran(&batch, started_at, killed_at)?,
                    None => self.planner.handle_finished(batch.gpu, killed_at),
                }
                for (Queued { id, deadline, priority, application, length, .. }, payload) in batch.tasks {
                    self.planner.handle_submit(
                        now,
                        batch.model,
                        Task { id, deadline, priority, application, length, payload },
                    );
                }
            }
            ToScheduler::Generated { behind } if behind > BEHIND_MAX => {
                return Err(CommandError::Flag {
                    flag: "--real-time",
                    expected: "a rate that this machine can generate".into(),
                    found: format!("{:.0} requests/s, with which it fell {behind} behind", self.rate_rps),
                });
            }
            ToScheduler::Generated { .. } => self.is_generated = true,
        }
        Ok(())
    }

    fn on_output(&mut self, output: PlannerOutput<Request>) -> Result<(), CommandError> {
        let sent = match output {
            PlannerOutput::Batch(batch) => self.to_gpus.send(ToGpus::Batch(batch)),
            PlannerOutput::Preempt(gpu) => self.to_gpus.send(ToGpus::Preempt(gpu)),
            PlannerOutput::Load { .. } | PlannerOutput::Unload { .. } => unreachable!("all weights are in memory"),
            PlannerOutput::Dropped { task, .. } => return self.on_dropped(task.id, task.payload),
        };
        let Ok(()): Result<(), SendError<ToGpus>> = sent else { unreachable!("the GPUs run until this side hangs up") };
        Ok(())
    }

    /// A batch left its GPU, whole or killed.
    fn on_ran(&mut self, batch: &Batch<Request>, started_at: Timestamp, ended_at: Timestamp) -> Result<(), Violation> {
        self.checker.execute(batch.gpu.0, (batch.exec_at, batch.latest), started_at, ended_at)?;
        self.recorder.busy(batch.gpu.0 as usize, started_at, ended_at);
        self.planner.handle_finished(batch.gpu, ended_at);
        Ok(())
    }

    fn on_dropped(&mut self, id: TaskId, request: Request) -> Result<(), CommandError> {
        self.end(id)?;
        self.recorder.dropped(request);
        Ok(())
    }

    fn end(&mut self, id: TaskId) -> Result<(), Violation> {
        self.ended += 1;
        self.checker.end(id)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn run_at(workload: &str, policy: &str, rate_rps: f64) -> Result<Report, CommandError> {
        let workload = Workload::parse(workload, "test", "test", Path::new(".")).unwrap();
        let options = Options { policy: policy.parse().unwrap(), rate_rps, seconds: 0.5, seed: 1 };
        run(&workload, &options, &mut |_| ())
    }

    /// Whatever the machine does, each request ends once: the checker runs within `run`.
    #[test]
    fn every_policy_runs_and_every_request_ends() {
        let workload = "gpus = 4\nfaults = { execution_jitter = 0.05 }\n\
                        [[model]]\nname = \"m\"\nalpha_ms = 1\nbeta_ms = 5\nslo_ms = 60\ncount = 2\n";
        for policy in ["downbeat", "deferred", "eager", "clockwork", "nexus", "shepherd", "clipper"] {
            // A machine that is too busy for real time says so; another try may find it less so.
            let is_busy = |result: &Result<Report, CommandError>| matches!(result, Err(CommandError::Flag { .. }));
            let mut tries = (0..20).map(|_| run_at(workload, policy, 500.0)).skip_while(is_busy);
            let report = tries.next().expect("a machine that can generate 500 requests/s").unwrap();
            assert!(report.totals.offered_rps > 0.0, "{report:?}");
            let ended = report.totals.served_rps * 0.45 + report.totals.dropped as f64;
            assert!((ended - report.totals.offered_rps * 0.45).abs() < 1e-6, "{report:?}");
        }
    }

    #[test]
    fn what_cannot_be_measured_says_so() {
        let model = "[[model]]\nname = \"m\"\nalpha_ms = 0.001\nbeta_ms = 0.1\nslo_ms = 60\n";
        let error = |text: &str, rate| run_at(text, "eager", rate).unwrap_err().to_string();
        let expected = "--real-time: expected a rate that this machine can generate, found 1000000000 requests/s, with";
        assert!(error(&format!("gpus = 1\n{model}"), 1e9).starts_with(expected));
        assert_eq!(
            error(&format!("gpus = 1\nfaults = {{ gpu_up_s = 9, gpu_down_s = 1 }}\n{model}"), 10.0),
            "--real-time: expected a workload without faults.gpu_up_s, found test"
        );
        assert_eq!(
            error(&format!("gpus = 1\nreestimate = true\n{model}"), 10.0),
            "--real-time: expected a workload without reestimate, found test"
        );
    }
}
