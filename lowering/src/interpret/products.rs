//! Convolution, matrix product, attention.

use super::rows::softmax_of;
use crate::{
    interpret::{
        Memory,
        memory::{activate, inside},
    },
    plan::{Attention, Conv, Factor, Matmul, View},
};

/// In four sums of binary64, which the compiler makes vectors of.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; 4];
    let (a_chunks, b_chunks) = (a.chunks_exact(4), b.chunks_exact(4));
    for (x, y) in a_chunks.remainder().iter().zip(b_chunks.remainder()) {
        sums[0] += f64::from(*x) * f64::from(*y);
    }
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..4 {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    sums.iter().sum()
}

pub(super) fn conv(step: &Conv, memory: &mut Memory<'_>) {
    let ([height, width], [out_height, out_width]) = (step.size, step.out);
    let positions = step.n * out_height * out_width;
    let filter = step.kernel[0] * step.kernel[1] * (step.c / step.groups);
    let input = memory.floats(step.input, 0, step.n * height * width * step.c);
    let weights = memory.floats(step.weights, 0, step.k * filter);
    let bias = memory.optional_floats(step.bias, 0, step.k);
    let residual = memory.optional_floats(step.residual, 0, positions * step.k);
    let mut output = vec![0.0; positions * step.k];
    for position in 0..positions {
        let (n, y, x) = (position / (out_height * out_width), position / out_width % out_height, position % out_width);
        let image = &input[n * height * width * step.c..][..height * width * step.c];
        let sums = filtered(step, image, &weights, y, x);
        for (k, sum) in sums.iter().enumerate() {
            let at = position * step.k + k;
            let value = sum + of(&bias, k) + of(&residual, at);
            output[at] = activate(step.activation, value as f32);
        }
    }
    memory.put_floats(step.output, 0, &output);
}

fn of(values: &Option<Vec<f32>>, index: usize) -> f64 {
    values.as_ref().map_or(0.0, |values| f64::from(values[index]))
}

/// The sums of one position of the output, for each of its channels.
fn filtered(step: &Conv, image: &[f32], weights: &[f32], y: usize, x: usize) -> Vec<f64> {
    let (c, k) = (step.c / step.groups, step.k / step.groups);
    let [rows, columns] = step.kernel;
    let mut sums = vec![0.0; step.k];
    for r in 0..rows {
        let Some(y) = inside(y * step.strides[0] + r * step.dilations[0], step.pads[0], step.size[0]) else { continue };
        for s in 0..columns {
            let x = x * step.strides[1] + s * step.dilations[1];
            let Some(x) = inside(x, step.pads[1], step.size[1]) else { continue };
            let pixel = &image[(y * step.size[1] + x) * step.c..][..step.c];
            for (channel, sum) in sums.iter_mut().enumerate() {
                let weights = &weights[((channel * rows + r) * columns + s) * c..][..c];
                *sum += dot(&pixel[channel / k * c..][..c], weights);
            }
        }
    }
    sums
}

/// One batch of a factor, of that many rows and columns; transposed if `is_turned`.
fn matrix(memory: &Memory<'_>, factor: &Factor, batch: usize, size: [usize; 2], is_turned: bool) -> Vec<f32> {
    let [rows, columns] = size;
    let lies = if factor.transposed { [columns, rows] } else { [rows, columns] };
    let mut values = Vec::with_capacity(rows * columns);
    for row in 0..lies[0] {
        let first = batch * factor.batch_stride + row * factor.row_stride;
        values.extend(memory.floats(factor.base, first as i64, lies[1]));
    }
    if factor.transposed == is_turned {
        return values;
    }
    let mut turned = Vec::with_capacity(values.len());
    for column in 0..lies[1] {
        turned.extend((0..lies[0]).map(|row| values[row * lies[1] + column]));
    }
    turned
}

pub(super) fn matmul(step: &Matmul, memory: &mut Memory<'_>) {
    let (m, n, k) = (step.m, step.n, step.k);
    let bias = memory.optional_floats(step.bias, 0, n);
    for batch in 0..step.batches {
        let a = matrix(memory, &step.a, batch, [m, k], false);
        let b = matrix(memory, &step.b, batch, [k, n], true);
        for row in 0..m {
            let first = (batch * step.output.batch_stride + row * step.output.row_stride) as i64;
            let residual = memory.optional_floats(step.residual, first, n);
            let values: Vec<f32> = (0..n)
                .map(|column| {
                    let product = dot(&a[row * k..][..k], &b[column * k..][..k]);
                    let value = f64::from(step.alpha) * product + of(&bias, column) + of(&residual, column);
                    activate(step.activation, value as f32)
                })
                .collect();
            memory.put_floats(step.output.base, first, &values);
        }
    }
}

fn element(view: &View, index: &[usize]) -> i64 {
    view.strides.iter().zip(index).map(|(stride, &index)| stride * index as i64).sum()
}

pub(super) fn attention(step: &Attention, memory: &mut Memory<'_>) {
    for batch in 0..step.batch {
        for head in 0..step.heads {
            let vectors = |view: &View, count: usize, memory: &Memory<'_>| -> Vec<Vec<f32>> {
                let vector = |position| memory.floats(view.base, element(view, &[batch, head, position]), step.width);
                (0..count).map(vector).collect()
            };
            let queries = vectors(&step.query, step.queries, memory);
            let keys = vectors(&step.key, step.keys, memory);
            let values = vectors(&step.value, step.keys, memory);
            for (query, vector) in queries.iter().enumerate() {
                let scores: Vec<f64> = (0..step.keys)
                    .map(|key| {
                        let mask = step.mask.as_ref().map_or(0.0, |mask| {
                            memory.floats(mask.base, element(mask, &[batch, head, query, key]), 1)[0]
                        });
                        let is_seen = !step.is_causal || key + step.queries <= query + step.keys;
                        let score = f64::from(step.scale) * dot(vector, &keys[key]) + f64::from(mask);
                        if is_seen { score } else { f64::NEG_INFINITY }
                    })
                    .collect();
                let shares = softmax_of(&scores);
                let sum = |i: usize| -> f64 { shares.iter().zip(&values).map(|(s, v)| s * f64::from(v[i])).sum() };
                let sums: Vec<f32> = (0..step.width).map(|i| sum(i) as f32).collect();
                memory.put_floats(step.output.base, element(&step.output, &[batch, head, query]), &sums);
            }
        }
    }
}
