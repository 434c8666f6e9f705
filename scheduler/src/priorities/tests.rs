use std::collections::BTreeMap;

use proptest::prelude::*;
use proto::{GpuId, LatencyProfile, ModelId, Span, TaskId, Timestamp};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::lead;
use crate::{
    ModelConfig, NetworkBudget, PlannerOutput, Policy, Task,
    policy::{Gathered, View},
    task_queue::{Queued, TaskQueue},
};

/// How many tasks of each priority.
fn served<'a>(tasks: impl IntoIterator<Item = &'a Queued>, priorities: &[u8]) -> Vec<usize> {
    let tasks: Vec<_> = tasks.into_iter().collect();
    priorities.iter().map(|&priority| tasks.iter().filter(|key| key.priority == priority).count()).collect()
}

proptest! {
    /// The oracle tries every set of tasks that one batch could finish in time.
    #[test]
    fn no_other_batch_serves_more_of_the_most_important_tasks(
        tasks in proptest::collection::vec((0i64..30, 1u8..4), 1..9),
        free_at in 0i64..12,
        passed_over in 0usize..9,
    ) {
        let profile = LatencyProfile::from_table((1..=5).map(|batch| Span(2 * batch + 3)).collect()).unwrap();
        let lead_times = NetworkBudget::default().lead_times(&profile);
        let mut queue = TaskQueue::new(10);
        for (id, &(deadline, priority)) in (0..).zip(&tasks) {
            let deadline = Timestamp(deadline);
            let key = Queued { id: TaskId(id), deadline, queued_at: Timestamp(0), priority, application: 0, length: 0 };
            queue.push(key, ()).unwrap();
        }
        let keys = queue.keys().clone();
        let view = View {
            now: Timestamp(0),
            free_at: Timestamp(free_at),
            queue: &keys,
            profile: &profile,
            lead_times: &lead_times,
            jitter: Span::ZERO,
            price: crate::Price::default(),
        };
        let fits = |batch: &[&Queued]| {
            let first = batch.iter().map(|key| key.deadline).min();
            batch.len() <= 5 && first.is_some_and(|first| view.earliest_end(batch.len()) <= first)
        };
        let mut priorities: Vec<u8> = keys.iter().filter(|key| fits(&[key])).map(|key| key.priority).collect();
        priorities.sort_unstable();
        priorities.dedup();
        priorities.pop();
        let sets = (1u32..1 << keys.len())
            .map(|set| {
                let of_set = keys.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1);
                of_set.map(|(_, key)| key).collect::<Vec<_>>()
            });
        let best = sets.filter(|set| fits(set)).map(|set| served(set, &priorities)).max();

        let skip = (0..keys.len()).find(|&skip| view.longest_batch(skip) > 0).unwrap_or(keys.len());
        let skip = (skip + passed_over).min(keys.len() - 1).max(skip);
        let by_policy = Gathered { skip, size: view.longest_batch(skip) };
        let batch = lead(&view, by_policy);
        prop_assert_eq!(batch.size > 0, best.is_some());
        if let Some(best) = best {
            let taken: Vec<Queued> = queue.take_best(batch.skip, batch.size).into_iter().map(|(key, ())| key).collect();
            prop_assert!(fits(&taken.iter().collect::<Vec<_>>()), "{:?}", taken);
            prop_assert_eq!(served(&taken, &priorities), best.clone());
            // The policy's own choice stays if it serves as many.
            let size = by_policy.size;
            let mut same = TaskQueue::new(10);
            keys.iter().for_each(|&key| same.push(key, ()).unwrap());
            let by_policy_taken: Vec<Queued> = same.take_best(skip, size).into_iter().map(|(key, ())| key).collect();
            prop_assert!(served(&by_policy_taken, &priorities) < best || batch == by_policy);
        }
    }
}

const MODEL: ModelId = ModelId(0);

/// What became of tasks, by priority.
#[derive(Debug, Default, Clone, PartialEq)]
struct Outcome {
    served: BTreeMap<u8, u32>,
    lost: BTreeMap<u8, u32>,
    /// Tasks of each batch, and its start.
    batches: Vec<(Timestamp, Vec<TaskId>)>,
}

impl Outcome {
    fn served_part(&self, priority: u8) -> f64 {
        let of = |counts: &BTreeMap<u8, u32>| f64::from(*counts.get(&priority).unwrap_or(&0));
        of(&self.served) / (of(&self.served) + of(&self.lost))
    }
}

/// Ten seconds of one model, l(b) = b + 5 ms and an SLO of 25 ms, on two GPUs: Poisson arrivals, of which 30 % are of
/// the first of two priorities and the rest of the second. 12 ms for 7 tasks: two GPUs serve some 1,150 a second.
fn run(policy: &str, rate_rps: f64, priorities: [u8; 2]) -> Outcome {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut planner = policy.parse::<Policy>().unwrap().planner::<()>(NetworkBudget::default());
    let profile = LatencyProfile::linear(1.0, 5.0, 32).unwrap();
    let config = ModelConfig::new(profile.clone(), 1000);
    planner.handle_model(Timestamp(0), MODEL, config);
    (0..2).for_each(|gpu| planner.handle_gpu_joined(Timestamp(0), GpuId(gpu), vec![MODEL], None));
    let (mut outcome, mut arrives_at, mut id) = (Outcome::default(), Timestamp(0), 0);
    let mut running: Vec<(Timestamp, GpuId)> = Vec::new();
    while arrives_at < Timestamp(10_000_000_000) {
        let ends_at = running.iter().map(|&(at, _)| at).min();
        let now = [Some(arrives_at), ends_at, planner.poll_timeout()].into_iter().flatten().min().unwrap();
        for (at, gpu) in running.extract_if(.., |&mut (at, _)| at <= now) {
            planner.handle_finished(gpu, at);
        }
        if now == arrives_at {
            let priority = priorities[usize::from(random.random_bool(0.7))];
            let deadline = now + Span::from_millis(25);
            planner.handle_submit(
                now,
                MODEL,
                Task { id: TaskId(id), deadline, priority, application: 0, length: 0, payload: () },
            );
            id += 1;
            arrives_at += Span::from_secs_f64(-random.random::<f64>().max(1e-12).ln() / rate_rps);
        }
        planner.handle_timeout(now);
        while let Some(output) = planner.poll_output() {
            match output {
                PlannerOutput::Batch(batch) => {
                    let ends_at = batch.exec_at + profile.latency(batch.tasks.len());
                    running.push((ends_at, batch.gpu));
                    for (key, ()) in &batch.tasks {
                        assert!(ends_at <= key.deadline, "{key:?} ends at {ends_at:?}");
                        *outcome.served.entry(key.priority).or_default() += 1;
                    }
                    let ids = batch.tasks.iter().map(|(key, ())| key.id).collect();
                    outcome.batches.push((batch.exec_at, ids));
                }
                PlannerOutput::Dropped { task, .. } => *outcome.lost.entry(task.priority).or_default() += 1,
                PlannerOutput::Preempt(_) => unreachable!("no policy of windows preempts"),
                PlannerOutput::Load { .. } | PlannerOutput::Unload { .. } => {
                    unreachable!("all weights are in memory")
                }
            }
        }
    }
    outcome
}

#[test]
fn under_overload_the_least_important_tasks_are_lost() {
    for policy in ["downbeat", "deferred", "eager"] {
        let (with, without) = (run(policy, 2000.0, [1, 2]), run(policy, 2000.0, [2, 2]));
        assert!(without.served_part(2) < 0.8, "{policy}: no overload");
        assert!(with.served_part(1) > 0.98, "{policy}: {}", with.served_part(1));
        let total = |outcome: &Outcome| outcome.served.values().sum::<u32>();
        assert!(10 * total(&with) > 9 * total(&without), "{policy}: {} of {}", total(&with), total(&without));
    }
}

#[test]
fn priorities_change_nothing_while_no_task_is_lost() {
    for policy in ["downbeat", "deferred", "eager"] {
        let (with, without) = (run(policy, 300.0, [1, 2]), run(policy, 300.0, [2, 2]));
        assert_eq!(without.lost.values().sum::<u32>(), 0, "{policy}");
        assert_eq!(with.batches, without.batches, "{policy}");
    }
}
