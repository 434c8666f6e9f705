//! Pooling and resizing.

use crate::{
    interpret::{Memory, memory::inside},
    plan::{Pool, PoolKind, Resize, ResizeKind},
};

pub(super) fn pool(step: &Pool, memory: &mut Memory<'_>) {
    let ([height, width], [out_height, out_width]) = (step.size, step.out);
    let input = memory.floats(step.input, 0, step.n * height * width * step.c);
    let mut output = Vec::with_capacity(step.n * out_height * out_width * step.c);
    for position in 0..step.n * out_height * out_width {
        let (n, y, x) = (position / (out_height * out_width), position / out_width % out_height, position % out_width);
        let pixels = window(step, y, x);
        for c in 0..step.c {
            let values = pixels.iter().map(|&[y, x]| input[((n * height + y) * width + x) * step.c + c]);
            output.push(match step.kind {
                PoolKind::Max => values.fold(f32::NEG_INFINITY, f32::max),
                PoolKind::Average => mean(values, pixels.len()),
                PoolKind::AveragePadded => mean(values, step.kernel[0] * step.kernel[1]),
            });
        }
    }
    memory.put_floats(step.output, 0, &output);
}

/// The pixels of the image that lie in a window.
fn window(step: &Pool, y: usize, x: usize) -> Vec<[usize; 2]> {
    let mut pixels = Vec::new();
    for r in 0..step.kernel[0] {
        let y = inside(y * step.strides[0] + r * step.dilations[0], step.pads[0], step.size[0]);
        for s in 0..step.kernel[1] {
            let x = inside(x * step.strides[1] + s * step.dilations[1], step.pads[1], step.size[1]);
            pixels.extend(y.zip(x).map(|(y, x)| [y, x]));
        }
    }
    pixels
}

/// 0 of none.
fn mean(values: impl Iterator<Item = f32>, count: usize) -> f32 {
    let sum: f64 = values.map(f64::from).sum();
    (sum / count.max(1) as f64) as f32
}

pub(super) fn resize(step: &Resize, memory: &mut Memory<'_>) {
    let ([height, width], [out_height, out_width]) = (step.size, step.out);
    let input = memory.floats(step.input, 0, step.n * height * width * step.c);
    let mut output = Vec::with_capacity(step.n * out_height * out_width * step.c);
    for position in 0..step.n * out_height * out_width {
        let (n, y, x) = (position / (out_height * out_width), position / out_width % out_height, position % out_width);
        let ([top, bottom], down) = neighbours(step, 0, y);
        let ([left, right], across) = neighbours(step, 1, x);
        for c in 0..step.c {
            let pixel = |y: usize, x: usize| input[((n * height + y) * width + x) * step.c + c];
            let row = |y: usize| pixel(y, left) * (1.0 - across) + pixel(y, right) * across;
            output.push(match step.kind {
                ResizeKind::Linear => row(top) * (1.0 - down) + row(bottom) * down,
                _ => pixel(top, left),
            });
        }
    }
    memory.put_floats(step.output, 0, &output);
}

/// Which two positions of the input one of the output is made of, and the share of the second.
fn neighbours(step: &Resize, dimension: usize, index: usize) -> ([usize; 2], f32) {
    let last = step.size[dimension] - 1;
    let position = (index as f32 + step.offset[dimension]) * step.scale[dimension] - step.shift[dimension];
    let position = position.clamp(0.0, last as f32);
    let first = match step.kind {
        ResizeKind::Floor | ResizeKind::Linear => position.floor(),
        ResizeKind::Ceil => position.ceil(),
        ResizeKind::NearestLow => (position - 0.5).ceil(),
        ResizeKind::NearestHigh => (position + 0.5).floor(),
    };
    let first = first.clamp(0.0, last as f32);
    ([first as usize, (first as usize + 1).min(last)], position - first)
}
