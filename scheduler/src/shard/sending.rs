//! Step 6: a final batch leaves as a plan for its GPU's backend.

use super::*;
use crate::task_queue::Queued;

impl Shard {
    /// Step 6: a final batch becomes a plan.
    pub(super) fn on_batch(&mut self, now: Timestamp, batch: Batch<Ride>) {
        let predicted = batch.predicted();
        let Batch { model, gpu, due_at, timer_at, exec_at, latest, tasks, .. } = batch;
        self.on_late(now, now - timer_at);
        let UsedGpu { backend, index: gpu_index, .. } = self.gpus[&gpu];
        let sample = self.sample(model, &tasks);
        let sampled = sample.map(|index| (tasks[index].0.application, tasks[index].0.length));
        let running = tasks.iter().map(|(key, ride)| RunningTask {
            id: key.id,
            model,
            deadline: key.deadline,
            priority: key.priority,
            application: key.application,
            attempt: ride.attempt,
            losses: ride.losses,
            slot: ride.slot,
        });
        let is_unequal = self.models.get(&model).is_some_and(|entry| entry.cost.is_some());
        let times = PlanTimes { sent_at: now, exec_at, latest, predicted, is_unequal };
        let plan = self.plans.insert(SentPlan::new((backend, gpu_index), gpu, (running.collect(), sampled), times));
        let planned = tasks.iter().map(|(key, ride)| PlannedTask {
            task: key.id,
            attempt: ride.attempt,
            slot: ride.slot,
            stamps: SchedulerStamps {
                queued_at: key.queued_at,
                due_at: due_at.max(key.queued_at).min(now),
                granted_at: now,
            },
        });
        // One that is alone in its batch tells by that.
        let sample = sample.filter(|_| tasks.len() > 1).map(|index| index as u16);
        let plan = BatchPlan { plan, gpu_index, model, exec_at, latest, tasks: planned.collect(), sample };
        self.outputs.push_back(ShardOutput::ToBackend(backend, SchedulerToBackend::Plan(plan)));
    }

    /// Which task of a dynamic model's batch is run again alone. That takes its GPU from whatever waits here, of any
    /// model.
    fn sample(&mut self, model: ModelId, tasks: &[(Queued, Ride)]) -> Option<usize> {
        if !self.is_dynamic(model) {
            return None;
        }
        let numbers: Vec<u8> = tasks.iter().map(|(key, _)| key.application).collect();
        let waits = |id: &ModelId| self.planner.queue_length(*id) > 0;
        let mut applications = std::mem::take(&mut self.models.get_mut(&model)?.applications);
        let sample = applications.sample(&numbers, || self.models.keys().any(waits));
        self.models.get_mut(&model)?.applications = applications;
        sample
    }
}
