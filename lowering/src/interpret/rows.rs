//! Reductions, softmax, normalisation, gathering.

use crate::{
    interpret::Memory,
    plan::{Gather, Norm, Place, Reduce, Reduction, Softmax},
};

pub(super) fn reduce(step: &Reduce, memory: &mut Memory<'_>) {
    let (count, results) = (step.outer * step.length * step.inner, step.outer * step.inner);
    let at = |result: usize, j: usize| {
        let (outer, inner) = (result / step.inner, result % step.inner);
        (outer * step.length + j) * step.inner + inner
    };
    if step.input.ty.is_float() {
        let input = memory.floats(step.input, 0, count);
        let line = |result| (0..step.length).map(|j| f64::from(input[at(result, j)])).collect::<Vec<_>>();
        if matches!(step.reduction, Reduction::ArgMax | Reduction::ArgMin) {
            let indexes: Vec<i64> = (0..results).map(|result| first_of(&line(result), step.reduction)).collect();
            memory.put_integers(step.output, 0, &indexes);
        } else {
            let values: Vec<f32> = (0..results).map(|result| reduced(&line(result), step.reduction) as f32).collect();
            memory.put_floats(step.output, 0, &values);
        }
    } else {
        let input = memory.integers(step.input, 0, count);
        let line = |result| (0..step.length).map(|j| input[at(result, j)]).collect::<Vec<_>>();
        let values: Vec<i64> = (0..results).map(|result| reduced_integers(&line(result), step.reduction)).collect();
        memory.put_integers(step.output, 0, &values);
    }
}

/// The first index of the largest or the smallest.
fn first_of<T: PartialOrd + Copy>(line: &[T], reduction: Reduction) -> i64 {
    let mut best = 0;
    for (index, value) in line.iter().enumerate() {
        let is_better = if reduction == Reduction::ArgMax { *value > line[best] } else { *value < line[best] };
        if is_better {
            best = index;
        }
    }
    best as i64
}

fn reduced(line: &[f64], reduction: Reduction) -> f64 {
    match reduction {
        Reduction::Sum => line.iter().sum(),
        Reduction::Mean => line.iter().sum::<f64>() / line.len() as f64,
        Reduction::MeanOfSquares => line.iter().map(|x| x * x).sum::<f64>() / line.len() as f64,
        Reduction::Product => line.iter().product(),
        Reduction::Max => line.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        Reduction::Min => line.iter().copied().fold(f64::INFINITY, f64::min),
        Reduction::ArgMax | Reduction::ArgMin => first_of(line, reduction) as f64,
    }
}

/// Sums and products wrap; means are towards zero.
fn reduced_integers(line: &[i64], reduction: Reduction) -> i64 {
    let sum = |values: &mut dyn Iterator<Item = i64>| values.fold(0i64, i64::wrapping_add);
    match reduction {
        Reduction::Sum => sum(&mut line.iter().copied()),
        Reduction::Mean => sum(&mut line.iter().copied()) / line.len() as i64,
        Reduction::MeanOfSquares => sum(&mut line.iter().map(|x| x.wrapping_mul(*x))) / line.len() as i64,
        Reduction::Product => line.iter().fold(1, |product, x| product.wrapping_mul(*x)),
        Reduction::Max => line.iter().copied().max().expect("at least one"),
        Reduction::Min => line.iter().copied().min().expect("at least one"),
        Reduction::ArgMax | Reduction::ArgMin => first_of(line, reduction),
    }
}

/// All zeros if nothing is larger than negative infinity.
pub(super) fn softmax_of(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return vec![0.0; scores.len()];
    }
    let powers: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

pub(super) fn softmax(step: &Softmax, memory: &mut Memory<'_>) {
    for row in 0..step.rows {
        let first = (row * step.columns) as i64;
        let input = memory.floats(step.input, first, step.columns);
        let scores: Vec<f64> = input.iter().map(|&x| f64::from(step.scale) * f64::from(x)).collect();
        let values: Vec<f32> = if step.is_log {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            let log = |score: &f64| if largest == f64::NEG_INFINITY { *score } else { score - largest - sum.ln() };
            scores.iter().map(|score| log(score) as f32).collect()
        } else {
            softmax_of(&scores).into_iter().map(|share| share as f32).collect()
        };
        memory.put_floats(step.output, first, &values);
    }
}

pub(super) fn norm(step: &Norm, memory: &mut Memory<'_>) {
    let columns = step.columns;
    let scale = memory.optional_floats(step.scale, 0, columns);
    let shift = memory.optional_floats(step.shift, 0, columns);
    for row in 0..step.rows {
        let first = (row * columns) as i64;
        let mut x = memory.floats(step.input, first, columns);
        if let Some(residual) = memory.optional_floats(step.residual, first, columns) {
            x.iter_mut().zip(residual).for_each(|(x, residual)| *x += residual);
            if let Some(sum) = step.sum {
                memory.put_floats(sum, first, &x);
            }
        }
        let average = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / columns as f64;
        let mean = if step.is_rms { 0.0 } else { average(&mut x.iter().map(|&x| f64::from(x))) };
        let variance = average(&mut x.iter().map(|&x| (f64::from(x) - mean).powi(2)));
        let factor = (variance + f64::from(step.epsilon)).sqrt().recip();
        let values: Vec<f32> = (0..columns)
            .map(|column| {
                let scale = scale.as_ref().map_or(1.0, |scale| f64::from(scale[column]));
                let shift = shift.as_ref().map_or(0.0, |shift| f64::from(shift[column]));
                ((f64::from(x[column]) - mean) * factor * scale + shift) as f32
            })
            .collect();
        memory.put_floats(step.output, first, &values);
    }
}

pub(super) fn gather(step: &Gather, faults: Option<usize>, memory: &mut Memory<'_>) {
    let indices = memory.integers(step.indices, 0, step.count);
    let length = step.length as i64;
    for (j, &index) in indices.iter().enumerate() {
        let index = if index < 0 { index.saturating_add(length) } else { index };
        let is_in_range = (0..length).contains(&index);
        for outer in 0..step.outer {
            let to = ((outer * step.count + j) * step.inner) as i64;
            let from = (outer as i64 * length + index.clamp(0, length)) * step.inner as i64;
            if is_in_range {
                let row = memory.bytes(step.input, from, step.inner).to_vec();
                memory.bytes_mut(step.output, to, step.inner).copy_from_slice(&row);
            } else {
                memory.bytes_mut(step.output, to, step.inner).fill(0);
            }
        }
        if let (false, Some(faults), Some(task)) = (is_in_range, faults, j.checked_div(step.indices_per_task)) {
            let fault = crate::plan::Operand { place: Place::Arena(faults), ty: crate::plan::Type::I32 };
            memory.put_integers(fault, task as i64, &[1]);
        }
    }
}
