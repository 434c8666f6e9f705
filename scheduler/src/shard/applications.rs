//! Which workloads a dynamic model's tasks are of, and which tasks are run again alone to learn what those take (Orloj,
//! section 3.2).
//!
//! Clients name workloads, so names are bounded: the first ones have a number each, and all others share the last one.
//! Of so many tasks of each one is a sample. One that was in no other's company has run alone already; another one is
//! run again by its backend, if that has nothing else to do.

use std::collections::BTreeMap;

use proto::{Application, BackendId, ModelId, PlanId, Span, Timestamp, request_times::RequestTimes};

use super::{Shard, plans::Done};
use crate::dynamic::{APPLICATIONS_MAX, KnownTimes};

/// Of so many tasks of a workload one is a sample ...
const TASKS_A_SAMPLE: u32 = 8;
/// ... and of so many, while others wait: they wait longer for it.
const TASKS_A_SAMPLE_BUSY: u32 = 64;
/// Samples that a backend may still run; those of the oldest plans are forgotten.
const PENDING_MAX: usize = 1024;

/// One model's workloads.
#[derive(Debug, Default)]
pub struct Applications {
    /// The number of each is its place, and one more: 0 is that of tasks without a name.
    names: Vec<Application>,
    /// Tasks in batches since the last sample, of each number.
    since: [u32; APPLICATIONS_MAX],
}

impl Applications {
    /// The workload of a number; `None`: it is shared.
    fn name(&self, number: u8) -> Option<Application> {
        match usize::from(number) {
            0 => Some(Application::NONE),
            place => self.names.get(place - 1).copied().filter(|_| place < APPLICATIONS_MAX - 1),
        }
    }

    /// The number of a task's workload, below [`APPLICATIONS_MAX`].
    pub(super) fn number(&mut self, name: Application) -> u8 {
        if name == Application::NONE {
            return 0;
        }
        let known = self.names.iter().position(|known| *known == name);
        let place = known.unwrap_or_else(|| {
            if self.names.len() < APPLICATIONS_MAX - 2 {
                self.names.push(name);
                self.names.len() - 1
            } else {
                APPLICATIONS_MAX - 2
            }
        });
        place as u8 + 1
    }

    /// Takes over the workloads that another thread has named. Yields the number here of each number there.
    pub(super) fn adopt(&mut self, others: &Self) -> [u8; APPLICATIONS_MAX] {
        let mut numbers = [0; APPLICATIONS_MAX];
        for (place, &name) in others.names.iter().enumerate() {
            numbers[place + 1] = self.number(name);
        }
        numbers[APPLICATIONS_MAX - 1] = APPLICATIONS_MAX as u8 - 1;
        numbers
    }

    /// Which of the tasks of a batch, whose numbers these are, is a sample, if any; fewer are if others wait that are
    /// delayed by it. Of several that are due it is one of the workload that was so for longest.
    pub(super) fn sample(&mut self, batch: &[u8], others_wait: impl FnOnce() -> bool) -> Option<usize> {
        let mut due: Option<(u32, usize)> = None;
        for (index, &number) in batch.iter().enumerate() {
            let since = &mut self.since[usize::from(number)];
            *since += 1;
            if *since >= TASKS_A_SAMPLE && due.is_none_or(|(longest, _)| *since > longest) {
                due = Some((*since, index));
            }
        }
        let (since, index) = due?;
        // One that is alone in its batch delays nobody.
        let enough = if batch.len() > 1 && others_wait() { TASKS_A_SAMPLE_BUSY } else { TASKS_A_SAMPLE };
        if since < enough {
            return None;
        }
        // Those of one batch that had to wait for the next are not counted up.
        let number = usize::from(batch[index]);
        self.since[number] = (self.since[number] - enough).min(TASKS_A_SAMPLE);
        Some(index)
    }
}

/// Samples that may be run again.
#[derive(Debug, Default)]
pub(super) struct Samples(BTreeMap<(PlanId, BackendId), Pending>);

/// A sample, and since when it may be running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pending {
    model: ModelId,
    of: (u8, u32),
    since: Timestamp,
}

impl Samples {
    /// A task of this workload and length may be run again when the plan has ended.
    pub(super) fn insert(&mut self, plan: (PlanId, BackendId), sample: Pending) {
        self.0.insert(plan, sample);
        // Plans of one thread count up.
        if self.0.len() > PENDING_MAX {
            self.0.pop_first();
        }
    }

    /// It was.
    pub(super) fn remove(&mut self, plan: (PlanId, BackendId)) -> Option<Pending> {
        self.0.remove(&plan)
    }

    /// The backend is gone.
    pub(super) fn remove_backend(&mut self, backend: BackendId) {
        self.0.retain(|(_, of), _| *of != backend);
    }
}

impl Shard {
    /// The number of a task's workload. All of a model whose batches take what their size says are of one.
    pub(super) fn application(&mut self, model: ModelId, name: Application) -> u8 {
        let entry = self.models.get_mut(&model).filter(|entry| entry.cost.is_some());
        entry.map_or(0, |entry| entry.applications.number(name))
    }

    /// What tasks of dynamic models take, of those models that more is known of than when this was asked for last.
    pub(super) fn take_request_times(&mut self) -> Vec<(ModelId, RequestTimes)> {
        let mut news = Vec::new();
        for (&model, entry) in self.models.iter_mut().filter(|(_, entry)| entry.cost.is_some()) {
            let tables = self.planner.tables_made(model);
            if std::mem::replace(&mut entry.told_tables, tables) == tables {
                continue;
            }
            let Some(KnownTimes { cost, applications, lengths }) = self.planner.request_times(model) else { continue };
            let named = |(number, times)| (entry.applications.name(number), times);
            news.push((
                model,
                RequestTimes { cost, applications: applications.into_iter().map(named).collect(), lengths },
            ));
        }
        news
    }

    /// Whether a model is planned by what its requests take.
    pub(super) fn is_dynamic(&self, model: ModelId) -> bool {
        self.planner.wants_samples() && self.models.get(&model).is_some_and(|entry| entry.cost.is_some())
    }

    /// A batch of a dynamic model that is here has been executed, which took so long.
    pub(super) fn on_sampled(&mut self, now: Timestamp, plan: (PlanId, BackendId), done: &Done, execution: Span) {
        match done.sample {
            Some(sample) if done.size == 1 => self.planner.handle_alone(now, done.model, sample, execution),
            Some(of) => self.samples.insert(plan, Pending { model: done.model, of, since: now }),
            None => {}
        }
        let (plan, backend) = plan;
        // Of a GPU that has left nothing is kept in mind.
        if self.gpus.contains_key(&done.gpu)
            && let Some(tasks) = self.plans.whole(backend, plan)
        {
            let tasks: Vec<_> = tasks.iter().map(|task| (task.application, task.slot.input_bytes)).collect();
            self.planner.handle_executed(now, done.model, done.gpu, &tasks, execution);
        }
    }

    /// A backend has run a sample again, which took so long.
    pub(super) fn on_ran_alone(&mut self, now: Timestamp, plan: (PlanId, BackendId), took: Span) {
        if let Some(Pending { model, of, since }) = self.samples.remove(plan) {
            // Whatever it says.
            self.planner.handle_alone(now, model, of, took.min(now - since).max(Span(1)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_what_is_too_many_shares_a_number() {
        let mut applications = Applications::default();
        assert_eq!(applications.number(Application::NONE), 0);
        for round in 0..2 {
            for name in 1..=100 {
                let expected = (name as usize).min(APPLICATIONS_MAX - 1);
                assert_eq!(usize::from(applications.number(Application(name))), expected, "{name}, round {round}");
            }
        }
        assert_eq!(applications.names.len(), APPLICATIONS_MAX - 2);
        let named = [0, 1, 30, 31, 255].map(|number| applications.name(number));
        assert_eq!(named, [Some(Application::NONE), Some(Application(1)), Some(Application(30)), None, None]);
    }

    #[test]
    fn workloads_keep_their_numbers_where_a_model_comes_to() {
        let [mut here, mut there] = [Applications::default(), Applications::default()];
        for name in [7, 8, 9] {
            there.number(Application(name));
        }
        for name in [9, 5] {
            here.number(Application(name));
        }
        let numbers = here.adopt(&there);
        assert_eq!((numbers[..4].to_vec(), numbers[31]), (vec![0, 3, 4, 1], 31));
        assert_eq!([9, 5, 7, 8].map(|name| here.number(Application(name))), [1, 2, 3, 4]);
    }

    #[test]
    fn a_workload_that_always_comes_behind_another_one_has_samples_too() {
        let (mut applications, mut samples) = (Applications::default(), [0; 2]);
        for _ in 0..100 {
            let batch: Vec<u8> = [[0; 8], [1; 8]].concat();
            samples[usize::from(batch[applications.sample(&batch, || false).unwrap()])] += 1;
        }
        assert!(samples.iter().all(|&samples| samples >= 49), "{samples:?}");
    }

    #[test]
    fn one_task_in_eight_of_each_workload_is_a_sample_whatever_batches_it_comes_in() {
        for size in [1, 3, 5, 8] {
            let mut applications = Applications::default();
            let tasks: Vec<u8> = (0..960).map(|task| [0, 1, 1, 31][task % 4]).collect();
            let mut samples = [0; APPLICATIONS_MAX];
            for batch in tasks.chunks(size) {
                let sample = applications.sample(batch, || false);
                sample.into_iter().for_each(|sample| samples[usize::from(batch[sample])] += 1);
            }
            let near = |number: usize, expected: i32| (samples[number] - expected).abs() <= 1;
            assert!(near(0, 30) && near(1, 60) && near(31, 30), "batches of {size}: {samples:?}");
        }
        // One sample of a batch at most.
        assert_eq!(Applications::default().sample(&[0; 256], || false), Some(255));
    }

    #[test]
    fn while_others_wait_only_tasks_that_run_alone_anyway_are_samples_as_often() {
        let samples = |size: usize| {
            let mut applications = Applications::default();
            let is_sample = |_: &usize| applications.sample(&vec![0; size], || true).is_some();
            (0..1024 / size).filter(is_sample).count()
        };
        assert_eq!([1, 2, 8].map(samples), [128, 16, 16]);
    }

    #[test]
    fn samples_that_never_come_are_forgotten() {
        let mut samples = Samples::default();
        let sample = Pending { model: ModelId(0), of: (1, 40), since: Timestamp(7) };
        for plan in 0..2 * PENDING_MAX as u64 {
            samples.insert((PlanId(plan), BackendId(plan as u32 % 2)), sample);
        }
        assert_eq!(samples.0.len(), PENDING_MAX);
        assert_eq!(samples.remove((PlanId(0), BackendId(0))), None);
        samples.remove_backend(BackendId(0));
        assert_eq!(samples.0.len(), PENDING_MAX / 2);
        assert_eq!(samples.remove((PlanId(PENDING_MAX as u64 + 1), BackendId(1))), Some(sample));
    }
}
