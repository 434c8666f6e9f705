use proptest::prelude::*;

use super::*;

/// Of a thousand requests so many try the first variant; all others the second.
fn tried(fallback: &mut Fallback) -> usize {
    (0..1000).filter(|_| fallback.first() == 0).count()
}

#[test]
fn all_try_the_best_until_it_loses_some() {
    let mut fallback = Fallback::new(2);
    assert_eq!((tried(&mut fallback), fallback.weights()), (1000, vec![1.0, 0.0]));
    for _ in 0..20 {
        fallback.handle_ended(&[0], true);
    }
    let part = 1.0 - 20.0 * (IN_VAIN - GAIN);
    assert!((fallback.weights()[0] - part).abs() < 1e-9);
    assert!(tried(&mut fallback).abs_diff((1000.0 * part) as usize) <= 1, "as evenly as can be");
    fallback.handle_ended(&[0, 1], false);
    assert!((fallback.weights()[0] - (part - IN_VAIN - UNANSWERED)).abs() < 1e-9);
    for _ in 0..100 {
        fallback.handle_ended(&[1], false);
    }
    assert_eq!(fallback.weights()[0], PART_MIN);
    for _ in 0..40_000 {
        fallback.handle_ended(&[], true);
    }
    assert_eq!(fallback.weights(), [1.0, 0.0], "it is as it was");
    // What has failed otherwise is nobody's load.
    fallback.handle_ended(&[], false);
    assert_eq!(fallback.weights(), [1.0, 0.0]);
}

#[test]
fn one_alone_is_always_tried() {
    let mut fallback = Fallback::new(1);
    fallback.handle_ended(&[0], false);
    assert_eq!((fallback.first(), fallback.weights()), (0, vec![1.0]));
    assert_eq!(Fallback::new(0).weights(), [1.0]);
}

proptest! {
    /// Whatever becomes of requests: parts are within their bounds, weights make 1, and which variants are tried agrees
    /// with them, counted naively.
    #[test]
    fn tries_follow_the_weights(
        variants in 1..5usize,
        ends in proptest::collection::vec((proptest::collection::vec(0..5usize, 0..3), any::<bool>()), 0..200),
    ) {
        let mut fallback = Fallback::new(variants);
        for (in_vain, is_answered) in &ends {
            prop_assert!(fallback.first() < variants);
            fallback.handle_ended(in_vain, *is_answered);
        }
        let weights = fallback.weights();
        prop_assert_eq!(weights.len(), variants);
        prop_assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-9 && weights.iter().all(|weight| *weight >= 0.0));
        let mut counts = vec![0.0; variants];
        (0..4000).for_each(|_| counts[fallback.first()] += 1.0 / 4000.0);
        let off = counts.iter().zip(&weights).map(|(count, weight)| (count - weight).abs()).fold(0.0, f64::max);
        prop_assert!(off < 2e-3, "{counts:?} for {weights:?}");
    }
}
