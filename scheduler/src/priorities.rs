//! Step 4, Step 6.
//! Which tasks of a model give way while it cannot serve them all.
//!
//! A task's `priority` is Triton's: the smaller, the more important. Deadlines alone form batches as long as every task
//! can be met. A lost task says that not all can: from then on, for as long as that task was given, batches serve as
//! many of the most important tasks as they can, then as many of the next most, and so on; what is equally important
//! goes by deadline, and the policy chooses where it still can. So priorities never make a task late while none is
//! lost, and a model whose tasks are all equally important never comes here.

use crate::policy::{Gathered, View};

/// The batch that the policy's choice becomes: led by a head with which most of the most important tasks are served,
/// of these one with which most of the next important ones are, and so on; of these the one nearest to the policy's.
///
/// A head leads what fits its own deadline, at most [`View::longest_batch`] tasks from it on. Later heads leave more
/// time and fewer tasks, so what is served first grows and then shrinks, and the best heads stand side by side.
pub(crate) fn lead(view: &View<'_>, by_policy: Gathered) -> Gathered {
    let sizes: Vec<usize> = (0..view.queue.len()).map(|skip| view.longest_batch(skip)).collect();
    let Some(mut first) = sizes.iter().position(|&size| size > 0) else { return by_policy };
    let mut last = sizes.len() - 1;
    let mut priorities: Vec<u8> = view.queue.range(first..).map(|key| key.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    // The least important ones fill what is left: how many there are is the policy's to choose.
    priorities.pop();
    for priority in priorities {
        let mut waiting = view.queue.range(last + 1..).filter(|key| key.priority <= priority).count();
        let mut most = 0;
        let (mut from, mut to) = (last, last);
        for skip in (first..=last).rev() {
            waiting += usize::from(view.queue[skip].priority <= priority);
            let served = waiting.min(sizes[skip]);
            if served > most {
                (most, to) = (served, skip);
            }
            if served == most {
                from = skip;
            }
        }
        (first, last) = (from, to);
    }
    let skip = by_policy.skip.clamp(first, last);
    Gathered { skip, size: sizes[skip] }
}

#[cfg(test)]
mod tests;
