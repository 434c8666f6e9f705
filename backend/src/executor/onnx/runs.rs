//! Which tasks of a batch run together, and how long they are then: those of equal lengths; those of one bucket; or
//! those that are next to each other in size, so that none is padded to more than twice its own, unless all are small.

use repository::BatchLengths;

/// Elements of a run whose padding is not worth a run of its own, however little of it is real.
const SMALL_ELEMENTS: usize = 1 << 12;
/// The same where the configuration's bounds say what is padded to what: this bounds memory only.
const BUCKET_ELEMENTS: usize = 1 << 22;

/// Tasks that run together.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Their indexes.
    pub(super) tasks: Vec<usize>,
    /// Each length that requests choose, padding included.
    pub(super) lengths: Vec<usize>,
}

/// Deals tasks to runs. `tasks` are the lengths of each; `elements` counts those of all inputs of one task of such
/// lengths.
pub(super) fn deal(
    tasks: &[Vec<usize>],
    how: &BatchLengths,
    is_batched: bool,
    elements: impl Fn(&[usize]) -> usize,
) -> Vec<Run> {
    let sizes: Vec<usize> = tasks.iter().map(|lengths| elements(lengths)).collect();
    let kinds: Vec<Vec<usize>> = tasks.iter().map(|lengths| kind(lengths, how)).collect();
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by(|&a, &b| kinds[a].cmp(&kinds[b]).then(sizes[b].cmp(&sizes[a])));
    let small = if *how == BatchLengths::Padded { SMALL_ELEMENTS } else { BUCKET_ELEMENTS };
    let mut runs: Vec<Run> = Vec::new();
    for task in order {
        let own = if *how == BatchLengths::Padded { &tasks[task] } else { &kinds[task] };
        if let Some(run) = runs.last_mut().filter(|run| is_batched && kinds[run.tasks[0]] == kinds[task]) {
            let lengths: Vec<usize> = run.lengths.iter().zip(own).map(|(&run, &own)| run.max(own)).collect();
            let padded = elements(&lengths);
            let is_small = padded.saturating_mul(run.tasks.len() + 1) <= small;
            // It is the smallest so far, so this holds for the others, too.
            if *how == BatchLengths::Equal || padded <= sizes[task].saturating_mul(2) || is_small {
                run.tasks.push(task);
                run.lengths = lengths;
                continue;
            }
        }
        runs.push(Run { tasks: vec![task], lengths: own.clone() });
    }
    runs
}

/// What tasks of one run have in common. A length of none is never padded: what a model makes of nothing but padding is
/// not what it makes of nothing.
fn kind(lengths: &[usize], how: &BatchLengths) -> Vec<usize> {
    let next = |&length: &usize| match how {
        BatchLengths::Equal => length,
        BatchLengths::Padded => usize::from(length > 0),
        _ if length == 0 => 0,
        // Requests have no length above the last bound: it is that of their tensors.
        BatchLengths::Bucketed(bounds) => bounds.iter().copied().find(|&bound| bound >= length).unwrap_or(length),
    };
    lengths.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As many elements as two inputs have: one of the first length and sixteen, one of both lengths.
    fn elements(lengths: &[usize]) -> usize {
        lengths[0] * 16 + lengths[0] * lengths[1]
    }

    fn lengths() -> impl Strategy<Value = Vec<Vec<usize>>> {
        let length = prop_oneof![1 => Just(0), 4 => 1usize..10, 4 => 1usize..256, 1 => 1usize..8192];
        proptest::collection::vec(proptest::collection::vec(length, 2), 0..256)
    }

    fn check(tasks: &[Vec<usize>], runs: &[Run], small: usize) -> Result<(), TestCaseError> {
        let mut dealt: Vec<usize> = runs.iter().flat_map(|run| run.tasks.iter().copied()).collect();
        dealt.sort_unstable();
        prop_assert_eq!(dealt, (0..tasks.len()).collect::<Vec<_>>(), "each once");
        for run in runs {
            let padded = elements(&run.lengths);
            let own = run.tasks.iter().map(|&task| elements(&tasks[task])).min().unwrap();
            let is_small = run.tasks.len() == 1 || padded * run.tasks.len() <= small;
            prop_assert!(is_small || padded <= 2 * own, "{own} to {padded} in {run:?}");
            for &task in &run.tasks {
                let fits =
                    tasks[task].iter().zip(&run.lengths).all(|(own, run)| own <= run && (*own > 0) == (*run > 0));
                prop_assert!(fits, "{:?} in {:?}", tasks[task], run);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn tasks_are_padded_to_the_longest_of_their_run_and_by_little(tasks in lengths()) {
            let runs = deal(&tasks, &BatchLengths::Padded, true, elements);
            check(&tasks, &runs, SMALL_ELEMENTS)?;
            for run in &runs {
                for (at, &length) in run.lengths.iter().enumerate() {
                    prop_assert_eq!(Some(length), run.tasks.iter().map(|&task| tasks[task][at]).max());
                }
            }
            prop_assert!(deal(&tasks, &BatchLengths::Padded, false, elements).iter().all(|run| run.tasks.len() == 1));
        }

        #[test]
        fn a_bucket_is_one_run_of_its_bound(tasks in lengths()) {
            let bounds = vec![4, 16, 64, 256, 8192];
            let runs = deal(&tasks, &BatchLengths::Bucketed(bounds.clone()), true, elements);
            check(&tasks, &runs, BUCKET_ELEMENTS)?;
            for run in &runs {
                prop_assert!(run.lengths.iter().all(|length| *length == 0 || bounds.contains(length)), "{:?}", run);
                for (at, &length) in run.lengths.iter().enumerate() {
                    let below = bounds.iter().rev().find(|&&bound| bound < length).copied().unwrap_or(0);
                    let is_next = run.tasks.iter().all(|&task| tasks[task][at] > below || length == 0);
                    prop_assert!(is_next, "{:?}", run);
                }
            }
        }

        #[test]
        fn equal_tasks_are_one_run_however_many(tasks in lengths()) {
            let mut distinct = tasks.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let runs = deal(&tasks, &BatchLengths::Equal, true, elements);
            prop_assert_eq!(runs.len(), distinct.len());
            prop_assert!(runs.iter().all(|run| run.tasks.iter().all(|&task| tasks[task] == run.lengths)));
        }
    }

    #[test]
    fn a_long_task_runs_alone_and_the_short_ones_together() {
        let mut tasks = vec![vec![1]; 255];
        tasks.insert(100, vec![8_192]);
        let runs = deal(&tasks, &BatchLengths::Padded, true, |lengths| lengths[0]);
        let shapes: Vec<_> = runs.iter().map(|run| (run.tasks.len(), run.lengths[0])).collect();
        assert_eq!(shapes, [(1, 8_192), (255, 1)]);
        let tasks: Vec<Vec<usize>> = (1..=256).map(|length| vec![length]).collect();
        let runs = deal(&tasks, &BatchLengths::Padded, true, |lengths| lengths[0]);
        let longest: Vec<_> = runs.iter().map(|run| run.lengths[0]).collect();
        assert_eq!(longest, [256, 127, 63]);
        // 64 bounds of 1,048,576 elements each are not held at once.
        let tasks = vec![vec![1]; 64];
        let runs = deal(&tasks, &BatchLengths::Bucketed(vec![1 << 20]), true, |lengths| lengths[0]);
        assert_eq!(runs.len(), 16);
    }
}
