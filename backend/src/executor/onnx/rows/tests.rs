//! Of models that are none: what a batch gives is a function of ours.

use super::*;
use crate::executor::onnx::tests::{FP32, graph, in_repository, node};

/// Numbers of a row.
const WIDTH: usize = 4;
type Numbers = [f32; WIDTH];

/// What is found of a model of so many rows at most.
fn judged_within(max_batch: usize, of_batch: &mut dyn FnMut(&[Numbers]) -> Vec<Numbers>) -> Option<String> {
    let same = graph(
        &[("x", FP32, &[-1, WIDTH as i64])],
        vec![node("Identity", &["x"], "y", &[])],
        &[("y", FP32, &[-1, WIDTH as i64])],
    );
    let judge = |model: &Model, _: &std::path::Path| {
        let run: &mut RunOnce<'_> = &mut |inputs, outputs| {
            let numbers: Vec<f32> = inputs.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let answers = of_batch(numbers.as_chunks().0);
            let bytes: Vec<u8> = answers.iter().flatten().flat_map(|number| number.to_le_bytes()).collect();
            if bytes.len() != outputs.len() {
                return Err(ExecutorError(format!("found {} rows", answers.len())));
            }
            outputs.copy_from_slice(&bytes);
            Ok(())
        };
        Ok(why_apart(model, &vec![0; model.input_bytes()], run))
    };
    in_repository(&format!("max_batch_size: {max_batch}"), same, judge).unwrap()
}

fn judged(mut of_batch: impl FnMut(&[Numbers]) -> Vec<Numbers>) -> Option<String> {
    let found = [4, 3].map(|max_batch| judged_within(max_batch, &mut of_batch));
    assert_eq!(found[0].is_some(), found[1].is_some(), "{found:?}");
    let [found, _] = found;
    found
}

fn rows(batch: &[Numbers], number: impl Fn(usize, f32) -> f32) -> Vec<Numbers> {
    batch.iter().enumerate().map(|(row, numbers)| numbers.map(|own| number(row, own))).collect()
}

#[test]
fn rows_of_their_own_run_together() {
    assert_eq!(judged(|batch| rows(batch, |_, own| (3.0 * own + 1.0).tanh())), None);
    assert_eq!(judged(|batch| rows(batch, |_, own| own / own.abs())), None, "that of zeros is no number");
    // Sums of other sizes add in another order.
    assert_eq!(judged(|batch| rows(batch, |_, own| own * (1.0 + 0.001 * batch.len() as f32))), None);
}

#[test]
fn rows_that_influence_each_other_are_found_out() {
    let influence = Some("they influence each other".to_owned());
    let largest = |batch: &[Numbers]| batch.iter().flatten().copied().fold(f32::MIN, f32::max);
    assert_eq!(judged(|batch| rows(batch, |_, own| own - largest(batch))), influence);
    // A quiet row is lifted to what a loud one leaves, as where sound has so many decibels at most.
    let decibels =
        |batch: &[Numbers], own: f32| own.abs().max(1e-8).log10().max(largest(batch).max(1e-8).log10() - 6.0);
    assert_eq!(judged(|batch| rows(batch, |_, own| decibels(batch, own))), influence);
    // One scale for all, in steps.
    let step = |batch: &[Numbers]| largest(batch).max(1e-6) / 127.0;
    assert_eq!(judged(|batch| rows(batch, |_, own| (own / step(batch)).round() * step(batch))), influence);
    // Of the row before, and of the row behind.
    assert_eq!(judged(|batch| rows(batch, |row, own| own + batch[row.saturating_sub(1)][0])), influence);
    assert_eq!(judged(|batch| rows(batch, |row, own| own + batch[(row + 1).min(batch.len() - 1)][0])), influence);
}

#[test]
fn what_changes_with_the_size_or_at_random_or_fails_together_runs_apart() {
    let found = judged(|batch| rows(batch, |_, own| (own + 1.0) / batch.len() as f32));
    assert_eq!(found.as_deref(), Some("how many they are changes what comes out"));
    // As boxes that suppress each other.
    let is_first = |batch: &[Numbers], row: usize| batch.iter().position(|other| *other == batch[row]) == Some(row);
    let found = judged(|batch| rows(batch, |row, own| if is_first(batch, row) { own } else { 0.0 }));
    assert_eq!(found.as_deref(), Some("how many they are changes what comes out"));
    let mut random = 0.0;
    let found = judged(|batch| {
        random += 1.0;
        rows(batch, |_, own| own + random)
    });
    assert_eq!(found.as_deref(), Some("the same input is answered otherwise when it is run again"));
    let found = judged(|batch| rows(&batch[..1], |_, own| own));
    assert_eq!(found.as_deref(), Some("a batch of 4 fails: found 1 rows"));
    let found = judged(|batch| if batch == [[0.0; WIDTH]] { rows(batch, |_, own| own) } else { Vec::new() });
    assert_eq!(found.as_deref(), Some("no two samples run that differ"));
}

proptest::proptest! {
    /// Each row with a part of each other one's.
    #[test]
    fn any_part_of_another_row_is_found(part in 0.1f32..1.0, from in 0usize..3, to in 0usize..3) {
        let mixed = |batch: &[Numbers]| rows(batch, |row, own| {
            let other = batch.get(from).filter(|_| row == to && from != to);
            own + part * other.map_or(0.0, |other| other[0] + other[1])
        });
        let is_found = judged_within(4, &mut |batch| mixed(batch)).is_some();
        // The row in the middle is of zeros.
        proptest::prop_assert_eq!(is_found, from != to && from != 1);
    }
}

#[test]
fn tensors_are_compared_as_their_types_are_exact() {
    let near = |datatype, found: &[f64], expected: &[f64], sizes| {
        let [found, expected] =
            [found, expected].map(|numbers| Tensor::of_numbers(datatype, &[numbers.len()], numbers));
        are_near(datatype, (found.bytes(), expected.bytes()), sizes)
    };
    for (datatype, step, two) in [
        (DataType::Int64, 1.0, false),
        (DataType::Uint8, 1.0, true),
        (DataType::Uint8, 2.0, false),
        (DataType::Bool, 1.0, false),
        (DataType::Fp32, 0.01, true),
        (DataType::Fp64, 0.03, false),
    ] {
        let numbers = [0.0, step];
        assert!(near(datatype, &numbers, &numbers, Sizes::One), "{datatype}");
        let sizes = [Sizes::One, Sizes::Two].map(|sizes| near(datatype, &[1.0, step], &[1.0, 0.0], sizes));
        assert_eq!(sizes, [false, two], "{datatype} {step}");
    }
    assert!(near(DataType::Fp16, &[1.005], &[1.0], Sizes::One) && !near(DataType::Fp16, &[1.05], &[1.0], Sizes::Two));
    assert!(near(DataType::Fp32, &[f64::NAN, 1.0], &[f64::NAN, 1.0], Sizes::One));
    assert!(!near(DataType::Fp32, &[f64::NAN, 1.0], &[0.0, 1.0], Sizes::Two));
    assert!(!are_near(DataType::Bytes, (b"\x01\0\0\0a", b"\x01\0\0\0b"), Sizes::Two));
}
