//! What is known of models that no member can tell: it goes along when a model moves, and to who is the primary next.

use super::*;

impl Shard {
    pub(super) fn on_released(&mut self, Released { model, tasks, averages }: Released<Ride>) {
        for task in &tasks {
            self.end_tasks(task.id.frontend(), 1);
        }
        let learned = Learned { averages, ..self.learned(model) };
        self.models.remove(&model);
        self.estimates.remove(model);
        let moved = Moved { model, tasks, learned };
        self.outputs.push_back(ShardOutput::ToControl(ShardToControl::Released(Box::new(moved))));
    }

    /// What is hosted, the budget and offers came before.
    pub(super) fn on_adopted(&mut self, now: Timestamp, Moved { model, tasks, learned }: Moved) {
        self.on_learned(now, model, &learned);
        for task in tasks {
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
}
