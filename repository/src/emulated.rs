//! What an emulated model answers: a digest of every byte of its input, so that whoever knows the input can check
//! that it crossed the network whole and in order; or its inputs, if its outputs are like them.

mod times;

use crate::tensor::Tensor;

pub use times::{Alone, Normal, TIME_MAX, UnequalTimes};

/// The name of an emulated model's only output, UINT64 `[2]`.
pub const OUTPUT: &str = "digest";
/// Elements of that output.
pub const OUTPUT_ELEMENTS: usize = 2;

/// Whether each input comes back as the output of its place: it has the same type and dims, and is in every request.
#[must_use]
pub fn is_echo(inputs: &[Tensor], outputs: &[Tensor]) -> bool {
    let is_like = |(input, output): (&Tensor, &Tensor)| {
        let output = Tensor { name: input.name.clone(), ..output.clone() };
        *input == output && !input.is_optional()
    };
    inputs.len() == outputs.len() && inputs.iter().zip(outputs).all(is_like)
}

/// Odd, so that multiplying by it loses nothing.
const PRIME: u64 = 0x0000_0100_0000_01b3;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// Two independent 64-bit hashes of `input` and its length, eight bytes a step (FNV-1a, over words instead of bytes).
///
/// Each step is a bijection of the hash for a given word and of the word for a given hash, so any change of a single
/// word shows; so do swapped words and a changed length. Not a defence against an adversary.
#[must_use]
pub fn digest(input: &[u8]) -> [u64; OUTPUT_ELEMENTS] {
    let (mut first, mut second) = (BASIS, GOLDEN);
    let mut step = |word: u64| {
        first = (first ^ word).wrapping_mul(PRIME);
        second = (second.rotate_left(29) ^ word).wrapping_mul(GOLDEN);
    };
    let (words, tail) = input.as_chunks::<8>();
    words.iter().for_each(|word| step(u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    step(u64::from_le_bytes(last));
    step(input.len() as u64);
    [finish(first), finish(second)]
}

/// Multiplication only carries upwards; folding the upper half down makes the lower half depend on every bit too.
fn finish(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 32)).wrapping_mul(GOLDEN);
    hash ^ (hash >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition is part of the protocol between emulated backends and whoever checks their answers.
    #[test]
    fn the_definition_stays() {
        assert_eq!(digest(b""), GOLDEN_DIGESTS[0]);
        assert_eq!(digest(b"downbeat"), GOLDEN_DIGESTS[1]);
        assert_eq!(digest(&(0..=255).collect::<Vec<u8>>()), GOLDEN_DIGESTS[2]);
    }

    const GOLDEN_DIGESTS: [[u64; 2]; 3] = [
        [0x0651cb401b570433, 0x743955306bb338ad],
        [0xb7d0afa3605fd592, 0x006a2f59307b6cd2],
        [0x82af83fccebaa186, 0x85d9e0da27348e82],
    ];

    #[test]
    fn length_counts_even_if_the_bytes_are_zero() {
        let digests: std::collections::BTreeSet<_> = (0..40).map(|length| digest(&vec![0; length])).collect();
        assert_eq!(digests.len(), 40);
    }

    proptest! {
        #[test]
        fn any_changed_byte_shows_in_both_words(
            input in proptest::collection::vec(any::<u8>(), 1..300),
            at: prop::sample::Index,
            flip in 1u8..,
        ) {
            let mut changed = input.clone();
            changed[at.index(input.len())] ^= flip;
            let (before, after) = (digest(&input), digest(&changed));
            prop_assert!(before[0] != after[0] && before[1] != after[1]);
        }

        #[test]
        fn order_shows(
            words in proptest::collection::vec(any::<[u8; 8]>(), 2..40),
            a: prop::sample::Index,
            b: prop::sample::Index,
        ) {
            let mut swapped = words.clone();
            swapped.swap(a.index(words.len()), b.index(words.len()));
            prop_assume!(words != swapped);
            prop_assert_ne!(digest(words.as_flattened()), digest(swapped.as_flattened()));
        }
    }
}
