//! What a model loses, apart for tasks that are in a hurry and for those with longer SLOs.
//!
//! The clients of one model may ask for different SLOs. Queues are in the order of deadlines, so a task in a hurry that
//! has just come stands before those that have waited for long, and cuts the batch down to what runs within its time. A
//! policy that gives such heads up for the batch's sake serves the model well and those clients badly.

use proto::{Span, scheduler_to_scheduler::LearnedClass};

use super::Tuning;
use crate::task_queue::Queued;

/// Averages over the tasks of a model.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Mean SLO of served tasks, in nanoseconds.
    slo_ns: f64,
    /// Tasks that are in a hurry, of those that were served.
    hurried_part: f64,
    /// Tasks with a longer SLO, and those in a hurry. Models with one SLO have only the former.
    classes: [Class; 2],
    /// Tasks that were lost of late, of all.
    late_part: f64,
}

/// What one class loses.
#[derive(Debug, Default)]
struct Class {
    /// Tasks seen; the first ones weigh alike.
    tasks: u32,
    /// Tasks that were lost, of all.
    lost_part: f64,
}

impl Class {
    /// A new model is taken to have served a few tasks and lost none.
    fn weight(&self, tuning: &Tuning) -> f64 {
        (1.0 / (f64::from(self.tasks) + tuning.little / tuning.task_weight)).max(tuning.task_weight)
    }

    fn handle_lost(&mut self, tuning: &Tuning) {
        self.tasks = self.tasks.saturating_add(1);
        self.lost_part += self.weight(tuning) * (1.0 - self.lost_part);
    }

    fn handle_served(&mut self, tuning: &Tuning, count: u32) {
        self.tasks = self.tasks.saturating_add(count);
        self.lost_part *= (1.0 - self.weight(tuning)).powi(count as i32);
    }
}

/// The time that a task's client gave it, less the way back.
pub(super) fn slo(task: &Queued) -> Span {
    task.deadline - task.queued_at
}

impl Losses {
    /// Mean SLO, the part that is in a hurry, and what each class loses.
    pub(super) fn learned(&self) -> (f64, f64, [LearnedClass; 2]) {
        let classes = self.classes.each_ref().map(|&Class { tasks, lost_part }| LearnedClass { tasks, lost_part });
        (self.slo_ns, self.hurried_part, classes)
    }

    /// The same as another one had learned it, unless a part is none.
    pub(super) fn told(slo_ns: f64, hurried_part: f64, classes: [LearnedClass; 2]) -> Option<Self> {
        let parts = [hurried_part, classes[0].lost_part, classes[1].lost_part];
        let classes = classes.map(|LearnedClass { tasks, lost_part }| Class { tasks, lost_part });
        parts.iter().all(|part| (0.0..=1.0).contains(part)).then_some(Self {
            slo_ns,
            hurried_part,
            classes,
            late_part: 0.0,
        })
    }

    /// 1 if the task is in a hurry.
    fn class(&self, tuning: &Tuning, task: &Queued) -> usize {
        usize::from((slo(task).as_nanos() as f64) < (1.0 - tuning.little) * self.slo_ns)
    }

    /// A task was given up.
    pub(super) fn handle_lost(&mut self, tuning: &Tuning, task: &Queued) {
        let class = self.class(tuning, task);
        self.classes[class].handle_lost(tuning);
        self.late_part += tuning.late_weight * (1.0 - self.late_part);
    }

    /// A batch was served.
    pub(super) fn handle_served<'a>(&mut self, tuning: &Tuning, tasks: impl Iterator<Item = &'a Queued>) {
        let (mut slos_ns, mut counts) = (0.0, [0; 2]);
        for task in tasks {
            // Clients choose deadlines, so a sum of integers could overflow.
            slos_ns += slo(task).as_nanos() as f64;
            counts[self.class(tuning, task)] += 1;
        }
        for (class, &count) in self.classes.iter_mut().zip(&counts) {
            class.handle_served(tuning, count);
        }
        self.late_part *= (1.0 - tuning.late_weight).powi((counts[0] + counts[1]) as i32);
        let size = f64::from(counts[0] + counts[1]);
        self.slo_ns += tuning.gap_weight * (slos_ns / size - self.slo_ns);
        self.hurried_part += tuning.gap_weight * (f64::from(counts[1]) / size - self.hurried_part);
    }

    /// The mean SLO of tasks that were served.
    pub(super) fn usual_slo(&self) -> Span {
        Span(self.slo_ns as i64)
    }

    /// The part of all tasks that was lost of late.
    pub(super) fn late_part(&self) -> f64 {
        self.late_part
    }

    /// The part of its tasks that the class loses that fares worse.
    pub(super) fn worst(&self) -> f64 {
        self.classes[0].lost_part.max(self.classes[1].lost_part)
    }

    /// There are two classes, and that of `task` fares worse.
    pub(super) fn is_worse_off(&self, tuning: &Tuning, task: &Queued) -> bool {
        let class = self.class(tuning, task);
        let are_two = self.hurried_part.min(1.0 - self.hurried_part) >= tuning.little;
        are_two && self.classes[class].lost_part > self.classes[1 - class].lost_part
    }
}

#[cfg(test)]
mod tests {
    use proto::{TaskId, Timestamp};

    use super::*;

    fn task(slo_ns: i64) -> Queued {
        Queued {
            id: TaskId(0),
            deadline: Timestamp(7 + slo_ns),
            queued_at: Timestamp(7),
            priority: 0,
            application: 0,
            length: 0,
        }
    }

    #[test]
    fn one_slo_is_one_class_that_is_never_worse_off() {
        let mut losses = Losses::default();
        for batch in 0..10_000 {
            losses.handle_served(&Tuning::default(), [task(100), task(100)].iter());
            if batch % 50 == 0 {
                losses.handle_lost(&Tuning::default(), &task(100));
            }
            assert!(!losses.is_worse_off(&Tuning::default(), &task(100)));
        }
        assert!((losses.worst() - 0.0099).abs() < 0.001, "{losses:?}");
    }

    #[test]
    fn the_class_that_loses_more_is_worse_off() {
        let (hurried, patient) = (task(25), task(50));
        let mut losses = Losses::default();
        for batch in 0..100_000 {
            losses.handle_served(&Tuning::default(), [hurried, patient, patient, patient].iter());
            if batch % 50 == 0 {
                losses.handle_lost(&Tuning::default(), &hurried);
                losses.handle_lost(&Tuning::default(), &patient);
            }
        }
        // Each class lost one: of fifty, and of a hundred and fifty.
        assert!((losses.worst() - 0.0196).abs() < 0.002, "{losses:?}");
        assert_eq!(
            (losses.is_worse_off(&Tuning::default(), &hurried), losses.is_worse_off(&Tuning::default(), &patient)),
            (true, false)
        );
        for _ in 0..400 {
            losses.handle_lost(&Tuning::default(), &patient);
        }
        assert_eq!(
            (losses.is_worse_off(&Tuning::default(), &hurried), losses.is_worse_off(&Tuning::default(), &patient)),
            (false, true)
        );
    }

    #[test]
    fn a_new_model_is_thought_well_of() {
        let mut losses = Losses::default();
        losses.handle_lost(&Tuning::default(), &task(100));
        assert!(losses.worst() < 0.001, "{losses:?}");
        for _ in 0..999 {
            losses.handle_lost(&Tuning::default(), &task(100));
        }
        assert!((losses.worst() - 0.5).abs() < 0.001, "a thousand of two thousand: {losses:?}");
    }
}
