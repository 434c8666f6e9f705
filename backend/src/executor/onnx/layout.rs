//! Tensors that are copied into larger ones, and out of them again.

/// Copies what two tensors of the same number of dimensions have in common: all elements whose places both have.
/// Elements have so many bytes each and lie in row-major order.
pub(super) fn copy_common(from: (&[u8], &[usize]), into: (&mut [u8], &[usize]), element_bytes: usize) {
    let ((from, from_shape), (into, into_shape)) = (from, into);
    let (Some((_, from_rest)), Some((_, into_rest))) = (from_shape.split_first(), into_shape.split_first()) else {
        return into.copy_from_slice(from);
    };
    if from_rest == into_rest {
        let common = from.len().min(into.len());
        return into[..common].copy_from_slice(&from[..common]);
    }
    let bytes = |rest: &[usize]| rest.iter().product::<usize>() * element_bytes;
    let (from_bytes, into_bytes) = (bytes(from_rest), bytes(into_rest));
    if from_bytes == 0 || into_bytes == 0 {
        return;
    }
    for (from, into) in from.chunks_exact(from_bytes).zip(into.chunks_exact_mut(into_bytes)) {
        copy_common((from, from_rest), (into, into_rest), element_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The place of an element.
    fn place(shape: &[usize], mut index: usize) -> Vec<usize> {
        let mut place: Vec<usize> = shape
            .iter()
            .rev()
            .map(|&length| {
                let at = index % length;
                index /= length;
                at
            })
            .collect();
        place.reverse();
        place
    }

    proptest! {
        #[test]
        fn what_both_have_is_copied_and_nothing_else(
            shapes in proptest::collection::vec((0usize..5, 0usize..5, any::<bool>()), 0..4),
            bytes in 1usize..4,
        ) {
            let from_shape: Vec<usize> = shapes.iter().map(|shape| shape.0).collect();
            let into_shape: Vec<usize> =
                shapes.iter().map(|&(from, into, same)| if same { from } else { into }).collect();
            let count = |shape: &[usize]| shape.iter().product::<usize>();
            let from: Vec<u8> = (0..count(&from_shape) * bytes).map(|byte| byte as u8).collect();
            let mut found = vec![0xff; count(&into_shape) * bytes];
            copy_common((&from, &from_shape), (&mut found, &into_shape), bytes);
            for (index, element) in found.chunks_exact(bytes).enumerate() {
                let place = place(&into_shape, index);
                let is_common = place.iter().zip(&from_shape).all(|(at, length)| at < length);
                let at = place.iter().zip(&from_shape).fold(0, |at, (place, length)| at * length + place);
                let expected = if is_common { &from[at * bytes..][..bytes] } else { &vec![0xff; bytes] };
                prop_assert_eq!(element, expected, "{:?} of {:?} into {:?}", place, from_shape, into_shape);
            }
        }
    }
}
