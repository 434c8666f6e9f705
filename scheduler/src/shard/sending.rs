//! Step 6: a final batch leaves as a plan for its GPU's backend.

use super::*;

impl Shard {
    /// Step 6: a final batch becomes a plan.
    pub(super) fn on_batch(&mut self, now: Timestamp, batch: Batch<Ride>) {
        let predicted = batch.predicted();
        let Batch { model, gpu, due_at, exec_at, latest, tasks, .. } = batch;
        let UsedGpu { backend, index: gpu_index, .. } = self.gpus[&gpu];
        let wants_samples = self.planner.wants_samples();
        let entry = self.models.get_mut(&model).filter(|entry| wants_samples && entry.cost.is_some());
        let numbers = tasks.iter().map(|(key, _)| key.application);
        let sample = entry.and_then(|entry| entry.applications.sample(numbers, self.planner.queue_length(model) > 0));
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
        let times = PlanTimes { sent_at: now, latest, predicted };
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
}
