//! Copies between shared words and ordinary memory: relaxed loads and stores of whole words, several at once where the
//! CPU can.
//!
//! An atomic load or store of the language moves eight bytes, and what lies in caches is then copied at a third less
//! speed than the CPU's. The language has no atomic vectors, so those loops are assembly: what a block does is what the
//! loop over words does, in another order, and no order is promised. No x86 core splits an aligned word, which lies in
//! one cache line; the vectors are aligned on the shared side. Other targets, CPUs without AVX, and Miri loop over
//! words.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use super::WORD;

/// What a turn of the assembly moves.
const BLOCK_WORDS: usize = 8;
/// The alignment of a vector.
const VECTOR_BYTES: usize = 32;
/// Less is copied as fast word by word.
const VECTOR_WORDS_MIN: usize = 32;

/// Copies out; both are equally long.
pub(super) fn load(words: &[AtomicU64], into: &mut [[u8; WORD]]) {
    assert_eq!(words.len(), into.len(), "a place for each word");
    let Range { start, end } = vector_part(words);
    load_words(&words[..start], &mut into[..start]);
    vector::load(&words[start..end], &mut into[start..end]);
    load_words(&words[end..], &mut into[end..]);
}

/// Copies in; both are equally long.
pub(super) fn store(words: &[AtomicU64], from: &[[u8; WORD]]) {
    assert_eq!(words.len(), from.len(), "a value for each word");
    let Range { start, end } = vector_part(words);
    store_words(&words[..start], &from[..start]);
    vector::store(&words[start..end], &from[start..end]);
    store_words(&words[end..], &from[end..]);
}

/// What vectors can move: whole blocks, the first of them aligned.
fn vector_part(words: &[AtomicU64]) -> Range<usize> {
    if words.len() < VECTOR_WORDS_MIN || !vector::are_there() {
        return 0..0;
    }
    let start = words.as_ptr().align_offset(VECTOR_BYTES).min(words.len());
    start..start + (words.len() - start) / BLOCK_WORDS * BLOCK_WORDS
}

fn load_words(words: &[AtomicU64], into: &mut [[u8; WORD]]) {
    for (word, place) in words.iter().zip(into) {
        *place = word.load(Ordering::Relaxed).to_ne_bytes();
    }
}

fn store_words(words: &[AtomicU64], from: &[[u8; WORD]]) {
    for (word, value) in words.iter().zip(from) {
        word.store(u64::from_ne_bytes(*value), Ordering::Relaxed);
    }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
mod vector {
    pub(super) use super::{load_words as load, store_words as store};

    pub(super) const fn are_there() -> bool {
        false
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod vector {
    use std::{arch::asm, sync::atomic::AtomicU64};

    use super::{BLOCK_WORDS, WORD};

    const _: () = assert!(BLOCK_WORDS * WORD == 64, "what a turn of the loops moves");

    pub(super) fn are_there() -> bool {
        std::arch::is_x86_feature_detected!("avx")
    }

    /// Whole blocks, aligned to a vector on the side of the words; the CPU must have them.
    pub(super) fn load(words: &[AtomicU64], into: &mut [[u8; WORD]]) {
        if words.is_empty() {
            return;
        }
        // SAFETY: reads `words` and writes `into`, equally long and multiples of 64 bytes, from their starts to their
        // ends and no further; other threads may store to the words meanwhile as they may while `load_words` runs.
        // `vector_part` has looked for AVX and aligned the words. Whatever vector registers hold is given up.
        unsafe {
            asm!(
                "2:",
                "vmovdqa ymm0, [rsi]",
                "vmovdqa ymm1, [rsi + 32]",
                "vmovdqu [rdi], ymm0",
                "vmovdqu [rdi + 32], ymm1",
                "add rsi, 64",
                "add rdi, 64",
                "sub rcx, 64",
                "jnz 2b",
                "vzeroupper",
                inout("rsi") words.as_ptr() => _,
                inout("rdi") into.as_mut_ptr() => _,
                inout("rcx") size_of_val(words) => _,
                clobber_abi("sysv64"),
                options(nostack),
            );
        }
    }

    /// Whole blocks, aligned to a vector on the side of the words; the CPU must have them.
    pub(super) fn store(words: &[AtomicU64], from: &[[u8; WORD]]) {
        if words.is_empty() {
            return;
        }
        // The lines that the next turns write are asked for early: a large object's are in no near cache, and where one
        // packet's page ends the CPU does not look ahead by itself.
        // SAFETY: as in `load`, with reader and writer exchanged. The words are behind a shared reference, but as all
        // atomics they may be written through it. A prefetch beyond the end of the words changes nothing and cannot
        // fail.
        unsafe {
            asm!(
                "2:",
                "prefetchw [rdi + 1024]",
                "vmovdqu ymm0, [rsi]",
                "vmovdqu ymm1, [rsi + 32]",
                "vmovdqa [rdi], ymm0",
                "vmovdqa [rdi + 32], ymm1",
                "add rsi, 64",
                "add rdi, 64",
                "sub rcx, 64",
                "jnz 2b",
                "vzeroupper",
                inout("rsi") from.as_ptr() => _,
                inout("rdi") words.as_ptr() => _,
                inout("rcx") size_of_val(words) => _,
                clobber_abi("sysv64"),
                options(nostack),
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "two threads meet")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORDS: usize = 700;

    fn shared() -> Vec<AtomicU64> {
        (0..WORDS as u64).map(|at| AtomicU64::new(at.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
    }

    fn values(words: &[AtomicU64]) -> Vec<[u8; WORD]> {
        words.iter().map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }

    proptest! {
        /// Against the loops over words, at every alignment of both sides and every length: also what lies around the
        /// copy stays as it was.
        #[test]
        fn vectors_copy_what_words_would(
            (at, count) in (0..WORDS).prop_flat_map(|at| (Just(at), 0..=WORDS - at)),
            shift in 0..VECTOR_BYTES,
        ) {
            let words = shared();
            let mut ordinary = vec![0xee; VECTOR_BYTES + WORDS * WORD + VECTOR_BYTES];
            let place = shift..shift + count * WORD;
            let mut oracle = ordinary.clone();
            load_words(&words[at..at + count], oracle[place.clone()].as_chunks_mut().0);
            load(&words[at..at + count], ordinary[place.clone()].as_chunks_mut().0);
            prop_assert_eq!(&ordinary, &oracle);

            let (stored, expected) = (shared(), shared());
            let from: Vec<u8> = (0..ordinary.len()).map(|at| (at * 7 + at / 251) as u8).collect();
            let from = from[place].as_chunks().0;
            store_words(&expected[at..at + count], from);
            store(&stored[at..at + count], from);
            prop_assert_eq!(values(&stored), values(&expected));
        }
    }

    /// A word is never seen half old and half new, however it is copied.
    #[test]
    fn words_are_copied_whole_while_others_write() {
        let (words, done) = (shared(), std::sync::atomic::AtomicBool::new(false));
        let pattern = |round: u8| vec![[round; WORD]; WORDS];
        store(&words, &pattern(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..=255).cycle().take(20_000).for_each(|round| store(&words, &pattern(round)));
                done.store(true, Ordering::Relaxed);
            });
            let mut found = pattern(0);
            while !done.load(Ordering::Relaxed) {
                load(&words, &mut found);
                assert!(found.iter().all(|word| word.iter().all(|byte| *byte == word[0])));
            }
        });
    }
}
