//! Step 8: batches on their way to GPUs' threads and back.

use proto::{PlanId, Span, Timestamp, backend_to_scheduler::BackendToModelThread};

use super::{Core, Job, Loaded, Output};
use crate::worker::{Action, Execution};

impl Core {
    /// A worker wants a batch executed.
    pub(super) fn execute(&mut self, now: Timestamp, gpu: usize, execute: Action) {
        let Action::Execute { buffer, model, runs, exec_at, latest, sample, ahead } = execute else { return };
        if !self.has_weights(gpu, model) {
            let rejected_at = self.scheduler_now(now);
            return self.hosting.workers[gpu].handle_executed(rejected_at, Execution::WindowMissed { rejected_at });
        }
        let runs = self.runs((gpu, buffer), model, runs);
        let Loaded { shape, executor, .. } = &**self.loaded(model);
        let (executor, shape, offset) = (executor.clone(), *shape, self.membership.clock().clone());
        let job = Job { model, executor, shape, runs, exec_at, latest, sample, offset, ahead };
        let input_bytes = job.runs.iter().map(|run| run.input_bytes).max().unwrap_or(0);
        self.watchdog.handle_started(gpu, latest, self.loaded(model).longest(job.tasks(), input_bytes));
        self.outputs.push_back(Output::Execute { gpu, job });
    }

    /// A batch goes behind the one that executes, if its weights are there already: they may be on their way.
    pub(super) fn hand_over_next(&mut self, now: Timestamp, gpu: usize) {
        let scheduler_now = self.scheduler_now(now);
        let next = self.hosting.workers[gpu].next_model(scheduler_now);
        if next.is_none_or(|model| !self.memories.has_weights(gpu, model)) {
            return;
        }
        self.hosting.workers[gpu].hand_over_next(scheduler_now);
        while let Some(action) = self.hosting.workers[gpu].poll_action() {
            self.perform(now, gpu, action);
        }
    }

    /// An execution that [`Output::Execute`] asked for has ended: of those that a GPU has, the one that was asked for
    /// first.
    pub fn handle_executed(&mut self, now: Timestamp, gpu: usize, execution: Execution) {
        if self.ended.is_none() {
            let scheduler_now = self.scheduler_now(now);
            self.watchdog.handle_ended(scheduler_now, gpu, &execution);
            if matches!(execution, Execution::Lost { .. }) && self.hosting.is_alone(gpu) {
                self.watchdog.handle_lost(scheduler_now, gpu);
            }
            self.memories.handle_ran(scheduler_now, gpu);
            // What was to be given back executes now, and whatever comes behind that was not asked for. Nor is it what
            // was to be ended.
            let concerns = |output: &Output| match output {
                Output::TakeBack { gpu: of } | Output::Interrupt { gpu: of } => *of == gpu,
                _ => false,
            };
            self.outputs.retain(|output| !concerns(output));
            self.hosting.workers[gpu].handle_executed(scheduler_now, execution);
            self.settle(now);
        }
    }

    /// A GPU gave back the batch that [`Output::TakeBack`] asked for. That must be said before anything else is.
    pub fn handle_taken_back(&mut self, now: Timestamp, gpu: usize) {
        if self.ended.is_none() {
            let scheduler_now = self.scheduler_now(now);
            self.watchdog.handle_taken_back(gpu);
            self.memories.handle_taken_back(scheduler_now, gpu);
            self.hosting.workers[gpu].handle_taken_back(scheduler_now);
            self.settle(now);
        }
    }

    /// A sample that [`Output::Execute`] asked for has been run again.
    pub fn handle_ran_alone(&mut self, now: Timestamp, plan: PlanId, took: Span) {
        if self.ended.is_none() {
            self.report_to_thread(now, BackendToModelThread::RanAlone { plan, took });
            self.settle(now);
        }
    }
}
