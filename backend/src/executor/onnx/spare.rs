//! Memory of inputs that have been computed with, for the next batch of this thread. Fresh memory costs a page fault
//! for each of its pages: with a picture of a megabyte a tenth of what YOLOv8n takes.

use std::cell::RefCell;

use super::tensor::Tensor;

/// Tensors whose memory a thread keeps: those of a model with many inputs.
const TENSORS_MAX: usize = 8;
/// Words of eight bytes that are kept of one: 16 MiB.
const WORDS_MAX: usize = 2 << 20;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// Memory for so many bytes or a few more, with whatever is in it.
pub(super) fn take(bytes: usize) -> Vec<u64> {
    let words = bytes.div_ceil(8);
    let mut taken = SPARE.with_borrow_mut(|spare| {
        let fits = spare.iter().rposition(|memory| memory.len() >= words);
        fits.map(|at| spare.remove(at)).unwrap_or_default()
    });
    if taken.len() < words {
        taken.resize(words, 0);
    }
    taken
}

/// Keeps what these had.
pub(super) fn give(tensors: Vec<Tensor>) {
    SPARE.with_borrow_mut(|spare| {
        let given = tensors.into_iter().filter_map(Tensor::into_memory);
        spare.extend(given.filter(|memory| memory.len() <= WORDS_MAX));
        // The largest serve any that comes.
        spare.sort_unstable_by_key(|memory| std::cmp::Reverse(memory.len()));
        spare.truncate(TENSORS_MAX);
    });
}

#[cfg(test)]
mod tests {
    use repository::DataType;

    use super::*;

    #[test]
    fn memory_is_taken_again_by_what_fits_and_is_bounded() {
        let of = |bytes: usize| Tensor::in_memory(take(bytes), DataType::Uint8, &[bytes]);
        let tensor = of(100);
        let place = tensor.bytes().as_ptr();
        give(vec![tensor]);
        let other = of(105);
        assert_ne!(other.bytes().as_ptr(), place, "it is too small");
        let again = of(60);
        assert_eq!((again.bytes().as_ptr(), again.bytes().len()), (place, 60));
        give((0..2 * TENSORS_MAX).map(|_| of(8)).chain([again, other]).collect());
        let kept: Vec<usize> = SPARE.with_borrow(|spare| spare.iter().map(Vec::len).collect());
        assert_eq!(kept, [14, 13, 1, 1, 1, 1, 1, 1]);
        SPARE.with_borrow_mut(Vec::clear);
        give(vec![Tensor::in_memory(vec![0; WORDS_MAX + 1], DataType::Uint64, &[WORDS_MAX + 1])]);
        assert_eq!(SPARE.with_borrow(Vec::len), 0);
    }
}
