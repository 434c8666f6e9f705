//! What is known of models that no member can tell: it goes along when a model moves, with what waits for it, and to
//! who is the primary next.

use super::*;
use crate::dynamic::APPLICATIONS_MAX;

impl Shard {
    pub(super) fn on_released(&mut self, released: Released<Ride>) {
        let Released { model, tasks, averages, samples } = released;
        for task in &tasks {
            self.end_tasks(task.id.frontend(), 1);
        }
        let learned = Learned { averages, ..self.learned(model) };
        let applications = self.models.remove(&model).map(|entry| entry.applications).unwrap_or_default();
        self.estimates.remove(model);
        let moved = Moved { model, tasks, learned, applications, samples };
        self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Released(Box::new(moved))));
    }

    /// What is hosted, the budget and offers came before.
    pub(super) fn on_adopted(&mut self, now: Timestamp, moved: Moved) {
        let Moved { model, tasks, learned, applications, samples } = moved;
        self.on_learned(now, model, &learned);
        // By the numbers of this thread what came for it before goes already.
        let numbers = self.models.get_mut(&model).map(|entry| entry.applications.adopt(&applications));
        let numbers = numbers.unwrap_or([0; APPLICATIONS_MAX]);
        if let Some(mut samples) = samples {
            samples.renumber(&numbers);
            self.planner.handle_samples(now, model, samples);
        }
        for mut task in tasks {
            task.application = numbers[usize::from(task.application)];
            self.on_forwarded(now, model, task);
        }
    }

    /// What is known of a model that no member can tell.
    pub(super) fn learned(&self, model: ModelId) -> Learned {
        let data = self.models.get(&model).and_then(|entry| entry.data.learned());
        Learned { factors: self.estimates.learned(model), data, averages: self.planner.learned(model) }
    }

    pub(super) fn tell_learned(&mut self) {
        let models = self.models.keys().map(|&model| (model, self.learned(model)));
        let models = models.filter(|(_, learned)| *learned != Learned::default()).collect();
        self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Learned(self.ctrl.learned(), models)));
    }

    /// What whoever planned a model before has learned of it is better than what was configured and offered.
    pub(super) fn on_learned(&mut self, now: Timestamp, model: ModelId, learned: &Learned) {
        let Some(entry) = self.models.get_mut(&model) else { return };
        if learned.data.is_some_and(|data| entry.data.handle_learned(now, data)) {
            self.on_budget(now, model);
        }
        self.estimates.handle_learned(now, model, &learned.factors);
        self.follow_estimates(now);
        if let Some(averages) = &learned.averages {
            self.planner.handle_learned(now, model, averages);
        }
    }

    pub(super) fn on_forwarded(&mut self, now: Timestamp, model: ModelId, task: Task<Ride>) {
        let Some(member) = self.frontends.get_mut(&task.id.frontend()) else { return };
        member.tasks += 1;
        let is_served = member.is_served;
        self.on_input(now, model, task.length);
        match self.models.get(&model).map(|entry| entry.hosted) {
            Some(Ok(())) if is_served => self.planner.handle_submit(now, model, task),
            Some(Err(reason)) => self.drop_task(task.id, reason),
            _ => self.drop_task(task.id, DropReason::NoBackend),
        }
    }
}
