//! Deals models to ModelThreads by load: a model moves from the thread that has most to do to the one that has least,
//! if that leaves both more alike.
//!
//! What counts is tasks: a ModelThread's work for each is about the same, whatever its model. Threads report twice a
//! second; a decision is made of whole rounds, at most one model moves in each, and then a round is left out, in which
//! both threads work off what the move left behind.

use std::collections::BTreeMap;

use proto::{ModelId, ModelThreadId};

/// The busiest thread has at least so many times the tasks of the laziest before a model moves.
const IMBALANCE_MIN: f64 = 1.25;
/// A thread with fewer tasks in a round keeps up whatever it owns.
const TASKS_MIN: u64 = 10_000;

/// Watches the threads' loads.
#[derive(Debug)]
pub(super) struct Balance {
    threads: usize,
    /// Of this round, by thread.
    reported: BTreeMap<ModelThreadId, BTreeMap<ModelId, u64>>,
    /// The next round tells nothing: it began before the last move had ended.
    is_settling: bool,
}

impl Balance {
    pub(super) fn new(threads: u16) -> Self {
        Self { threads: threads.into(), reported: BTreeMap::new(), is_settling: false }
    }

    /// A thread reports the tasks that came, by model. Yields what is to move where.
    pub(super) fn handle_load(
        &mut self,
        thread: ModelThreadId,
        tasks: &[(ModelId, u64)],
        owner: impl Fn(ModelId) -> Option<ModelThreadId>,
    ) -> Option<(ModelId, ModelThreadId)> {
        let mine = tasks.iter().copied().filter(|(model, _)| owner(*model) == Some(thread));
        self.reported.insert(thread, mine.collect());
        if self.threads < 2 || self.reported.len() < self.threads {
            return None;
        }
        let round = std::mem::take(&mut self.reported);
        if std::mem::take(&mut self.is_settling) {
            return None;
        }
        let shift = shift(&round);
        self.is_settling = shift.is_some();
        shift
    }
}

/// The model whose move leaves the busiest and the laziest thread most alike.
fn shift(round: &BTreeMap<ModelThreadId, BTreeMap<ModelId, u64>>) -> Option<(ModelId, ModelThreadId)> {
    let sum = |models: &BTreeMap<ModelId, u64>| models.values().sum::<u64>();
    let (_, busiest) = round.iter().max_by_key(|(_, models)| sum(models))?;
    let (&laziest, idle) = round.iter().min_by_key(|(_, models)| sum(models))?;
    let (most, least) = (sum(busiest), sum(idle));
    if most < TASKS_MIN || (most as f64) < IMBALANCE_MIN * least as f64 {
        return None;
    }
    // Moving `tasks` leaves a difference of |most - least - 2 tasks|.
    let left = |tasks: u64| (most - least).abs_diff(2 * tasks);
    let (&model, &tasks) = busiest.iter().min_by_key(|(_, tasks)| left(**tasks))?;
    (left(tasks) < most - least).then_some((model, laziest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports of all threads, each with its models' tasks in thousands.
    fn round(balance: &mut Balance, threads: &[&[(u32, u64)]]) -> Option<(u32, u16)> {
        let mut shift = None;
        for (thread, models) in (0..).map(ModelThreadId).zip(threads) {
            let tasks: Vec<_> = models.iter().map(|&(model, tasks)| (ModelId(model), 1000 * tasks)).collect();
            assert_eq!(shift, None, "before the round was whole");
            shift = balance.handle_load(thread, &tasks, |_| Some(thread));
        }
        shift.map(|(model, thread)| (model.0, thread.0))
    }

    #[test]
    fn the_model_moves_that_leaves_threads_most_alike() {
        let mut balance = Balance::new(3);
        assert_eq!(round(&mut balance, &[&[(0, 60), (1, 25), (2, 9)], &[(3, 50)], &[(4, 40)]]), Some((1, 2)));
        assert_eq!(round(&mut balance, &[&[(0, 90)], &[(3, 1), (4, 1)], &[]]), None, "the last move is settling");
        assert_eq!(round(&mut balance, &[&[(0, 90)], &[(3, 1), (4, 1)], &[]]), None, "one model cannot be split");
        assert_eq!(round(&mut balance, &[&[(0, 23), (1, 1)], &[(3, 20)], &[(4, 21)]]), None, "alike enough");
        assert_eq!(round(&mut balance, &[&[(0, 4), (1, 4)], &[], &[]]), None, "too little to matter");
    }

    #[test]
    fn moves_end_with_threads_that_are_alike() {
        let mut balance = Balance::new(2);
        // Shares as by Zipf's law, all on one thread.
        let mut threads = [(0..20u32).map(|model| (model, 600 / (u64::from(model) + 1))).collect::<Vec<_>>(), vec![]];
        let mut moves = 0;
        for _ in 0..100 {
            if let Some((model, to)) = round(&mut balance, &[&threads[0], &threads[1]]) {
                let from = 1 - usize::from(to);
                let at = threads[from].iter().position(|(other, _)| *other == model).unwrap();
                let model = threads[from].remove(at);
                threads[usize::from(to)].push(model);
                moves += 1;
            }
        }
        let [one, other] = threads.map(|models| models.iter().map(|(_, tasks)| tasks).sum::<u64>());
        assert!(one.max(other) < one.min(other) * 5 / 4 && moves < 20, "{one} {other} after {moves}");
    }
}
