//! The sizes of batches that executors prepare for, and the tasks of a batch.

use repository::{Tensor, cell};

/// 1, 2, 3, 4, 6, 8, 12, 16, ...: powers of two, the middles between them, and the largest.
pub(crate) fn few_sizes(batch_max: usize) -> Vec<usize> {
    let powers = (0..usize::BITS).map(|power| 1usize << power).take_while(|&size| size <= batch_max);
    let mut sizes: Vec<usize> = powers.flat_map(|power| [power, power + power / 2]).collect();
    sizes.push(batch_max);
    sizes.retain(|&size| size <= batch_max);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The inputs of each task of a batch, as [`Executor::execute`] gets them.
pub(crate) fn tasks<'a>(tensors: &[Tensor], mut inputs: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    std::iter::from_fn(move || {
        let (task, rest) = cell::split_first(tensors, inputs)?;
        inputs = rest;
        Some(task)
    })
}
