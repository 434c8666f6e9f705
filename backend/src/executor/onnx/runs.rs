//! Which tasks of a batch run together, and how long they are then: those of equal lengths; those of one bucket; or
//! those that are next to each other in size, so that none is padded to more than twice its own, unless all are small.
//! No run has more elements than the configuration says, unless one task alone has.

use repository::{BatchLengths, Batching};

/// Elements of a run whose padding is not worth a run of its own, however little of it is real.
const SMALL_ELEMENTS: usize = 1 << 12;

/// What a task brings.
#[derive(Debug, Clone, Default)]
pub(super) struct Size {
    /// The lengths that its request chose.
    pub(super) lengths: Vec<usize>,
    /// Elements of its inputs that are joined.
    pub(super) joined: usize,
}

/// Tasks that run together.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Their indexes.
    pub(super) tasks: Vec<usize>,
    /// Each length that requests choose, padding included.
    pub(super) lengths: Vec<usize>,
}

/// Deals tasks to runs. `elements` counts those of all inputs of one task of such lengths that are not joined.
pub(super) fn deal(
    tasks: &[Size],
    batching: &Batching,
    is_batched: bool,
    elements: impl Fn(&[usize]) -> usize,
) -> Vec<Run> {
    let how = &batching.lengths;
    let sizes: Vec<usize> = tasks.iter().map(|task| elements(&task.lengths)).collect();
    let kinds: Vec<Vec<usize>> = tasks.iter().map(|task| kind(&task.lengths, how)).collect();
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by(|&a, &b| kinds[a].cmp(&kinds[b]).then(sizes[b].cmp(&sizes[a])));
    let mut runs: Vec<Run> = Vec::new();
    // Of the last run.
    let mut joined = 0usize;
    for task in order {
        let own = if *how == BatchLengths::Padded { &tasks[task].lengths } else { &kinds[task] };
        if let Some(run) = runs.last_mut().filter(|run| is_batched && kinds[run.tasks[0]] == kinds[task]) {
            let lengths: Vec<usize> = run.lengths.iter().zip(own).map(|(&run, &own)| run.max(own)).collect();
            let each = elements(&lengths);
            let padded = each.saturating_mul(run.tasks.len() + 1);
            let both = joined.saturating_add(tasks[task].joined);
            // It is the smallest so far, so this holds for the others, too.
            let is_alike = each <= sizes[task].saturating_mul(2) || padded <= SMALL_ELEMENTS;
            let has_room = padded.saturating_add(both) <= batching.elements_max;
            if has_room && (*how != BatchLengths::Padded || is_alike) {
                run.tasks.push(task);
                (run.lengths, joined) = (lengths, both);
                continue;
            }
        }
        runs.push(Run { tasks: vec![task], lengths: own.clone() });
        joined = tasks[task].joined;
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

    fn tasks() -> impl Strategy<Value = Vec<Size>> {
        let length = prop_oneof![1 => Just(0), 4 => 1usize..10, 4 => 1usize..256, 1 => 1usize..8192];
        let task = (proptest::collection::vec(length, 2), prop_oneof![Just(0), 0usize..10_000]);
        proptest::collection::vec(task.prop_map(|(lengths, joined)| Size { lengths, joined }), 0..256)
    }

    fn batching(lengths: BatchLengths, elements_max: usize) -> Batching {
        Batching { lengths, elements_max, ..Batching::equal(0, 0) }
    }

    fn sizes(lengths: impl IntoIterator<Item = usize>) -> Vec<Size> {
        lengths.into_iter().map(|length| Size { lengths: vec![length], joined: 0 }).collect()
    }

    fn first(lengths: &[usize]) -> usize {
        lengths[0]
    }

    /// That each task is in one run, which has room for it and no more than that.
    fn check(tasks: &[Size], runs: &[Run], elements_max: usize) -> Result<(), TestCaseError> {
        let mut dealt: Vec<usize> = runs.iter().flat_map(|run| run.tasks.iter().copied()).collect();
        dealt.sort_unstable();
        prop_assert_eq!(dealt, (0..tasks.len()).collect::<Vec<_>>(), "each once");
        for run in runs {
            let joined: usize = run.tasks.iter().map(|&task| tasks[task].joined).sum();
            let padded = elements(&run.lengths) * run.tasks.len();
            prop_assert!(run.tasks.len() == 1 || padded + joined <= elements_max, "{padded} and {joined} in {run:?}");
            for &task in &run.tasks {
                let mut both = tasks[task].lengths.iter().zip(&run.lengths);
                prop_assert!(both.all(|(own, run)| own <= run && (*own > 0) == (*run > 0)), "{:?}", run);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn tasks_are_padded_to_the_longest_of_their_run_and_by_little(tasks in tasks(), room in 1usize..1 << 20) {
            let batching = batching(BatchLengths::Padded, room);
            let runs = deal(&tasks, &batching, true, elements);
            check(&tasks, &runs, room)?;
            for run in &runs {
                for (at, &length) in run.lengths.iter().enumerate() {
                    prop_assert_eq!(Some(length), run.tasks.iter().map(|&task| tasks[task].lengths[at]).max());
                }
                let padded = elements(&run.lengths);
                let own = run.tasks.iter().map(|&task| elements(&tasks[task].lengths)).min().unwrap();
                let is_small = run.tasks.len() == 1 || padded * run.tasks.len() <= SMALL_ELEMENTS;
                prop_assert!(is_small || padded <= 2 * own, "{own} to {padded} in {run:?}");
            }
            prop_assert!(deal(&tasks, &batching, false, elements).iter().all(|run| run.tasks.len() == 1));
        }

        #[test]
        fn a_bucket_is_one_run_of_its_bound_while_there_is_room(tasks in tasks(), room in 1usize..1 << 30) {
            let bounds = vec![4, 16, 64, 256, 8192];
            let runs = deal(&tasks, &batching(BatchLengths::Bucketed(bounds.clone()), room), true, elements);
            check(&tasks, &runs, room)?;
            for run in &runs {
                prop_assert!(run.lengths.iter().all(|length| *length == 0 || bounds.contains(length)), "{:?}", run);
                for (at, &length) in run.lengths.iter().enumerate() {
                    let below = bounds.iter().rev().find(|&&bound| bound < length).copied().unwrap_or(0);
                    let is_next = run.tasks.iter().all(|&task| tasks[task].lengths[at] > below || length == 0);
                    prop_assert!(is_next, "{:?}", run);
                }
            }
        }

        #[test]
        fn equal_tasks_are_one_run_however_many(tasks in tasks()) {
            let mut distinct: Vec<&[usize]> = tasks.iter().map(|task| &task.lengths[..]).collect();
            distinct.sort_unstable();
            distinct.dedup();
            let runs = deal(&tasks, &batching(BatchLengths::Equal, usize::MAX), true, elements);
            prop_assert_eq!(runs.len(), distinct.len());
            prop_assert!(runs.iter().all(|run| run.tasks.iter().all(|&task| tasks[task].lengths == run.lengths)));
        }
    }

    #[test]
    fn a_long_task_runs_alone_and_the_short_ones_together() {
        let mut tasks = sizes([1; 255]);
        tasks.insert(100, Size { lengths: vec![8_192], joined: 0 });
        let padded = batching(BatchLengths::Padded, usize::MAX);
        let shapes = |runs: Vec<Run>| runs.iter().map(|run| (run.tasks.len(), run.lengths[0])).collect::<Vec<_>>();
        assert_eq!(shapes(deal(&tasks, &padded, true, first)), [(1, 8_192), (255, 1)]);
        let runs = deal(&sizes(1..=256), &padded, true, first);
        assert_eq!(shapes(runs), [(129, 256), (64, 127), (63, 63)]);
        let bucketed = batching(BatchLengths::Bucketed(vec![1 << 20]), 1 << 22);
        assert_eq!(shapes(deal(&sizes([1; 10]), &bucketed, true, first)), [(4, 1 << 20), (4, 1 << 20), (2, 1 << 20)]);
    }

    #[test]
    fn joined_tasks_stay_in_their_order_and_within_their_bound() {
        let tasks = [3, 4, 2, 9, 1].map(|joined| Size { lengths: vec![], joined });
        let runs = deal(&tasks, &batching(BatchLengths::Equal, 8), true, |_| 0);
        let found: Vec<Vec<usize>> = runs.into_iter().map(|run| run.tasks).collect();
        assert_eq!(found, [vec![0, 1], vec![2], vec![3], vec![4]]);
    }
}
