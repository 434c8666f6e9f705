use lowering::plan::{Activation, Conv, Pool, PoolKind, Resize, ResizeKind};

use super::{
    emulated::{Bench, tolerance},
    *,
};

const FLOATS: [Type; 2] = [Type::F32, Type::F16];

/// A window over an image, and the output's size.
struct Window {
    size: [usize; 2],
    out: [usize; 2],
    kernel: [usize; 2],
    strides: [usize; 2],
    dilations: [usize; 2],
    pads: [usize; 2],
}

fn window(bench: &mut Bench) -> Window {
    let mut pair = |most: usize| [bench.length(most), bench.length(most)];
    let (kernel, strides, dilations, padded) = (pair(3), pair(2), pair(2), pair(3));
    let extent = [0, 1].map(|i| (kernel[i] - 1) * dilations[i] + 1);
    let size = [0, 1].map(|i| extent[i] + bench.below(6));
    let pads = [0, 1].map(|i| (padded[i] - 1).min(extent[i] - 1));
    // The end is padded by as much as the begin, or by nothing.
    let end = [0, 1].map(|i| if bench.is() { pads[i] } else { 0 });
    let out = [0, 1].map(|i| (size[i] + pads[i] + end[i] - extent[i]) / strides[i] + 1);
    Window { size, out, kernel, strides, dilations, pads }
}

#[test]
fn random_pools() {
    for seed in 0..60 {
        let mut bench = Bench::new(seed);
        let ty = bench.one_of(&FLOATS);
        let Window { size, out, kernel, strides, dilations, pads } = window(&mut bench);
        let n = bench.length(2);
        let c = if bench.is() { bench.length(12) } else { 4 * bench.length(4) };
        let step = Pool {
            input: bench.input(ty, n * size[0] * size[1] * c),
            output: bench.output(ty, n * out[0] * out[1] * c),
            kind: bench.one_of(&[PoolKind::Max, PoolKind::Average, PoolKind::AveragePadded]),
            n,
            size,
            c,
            out,
            kernel,
            strides,
            dilations,
            pads,
        };
        bench.check(&format!("pool, seed {seed}"), &Step::Pool(step), ty, tolerance(ty));
    }
}

#[test]
fn random_grouped_convolutions() {
    for seed in 0..90 {
        let mut bench = Bench::new(seed);
        let ty = bench.one_of(&FLOATS);
        let Window { size, out, kernel, strides, dilations, pads } = window(&mut bench);
        // Depthwise of a multiple of four channels, depthwise with several filters a channel, grouped.
        let groups = bench.length(6);
        let (groups, c, k) = match seed % 3 {
            0 => (4 * groups, 4 * groups, 4 * groups),
            1 => (groups, groups, groups * bench.length(3)),
            _ => (groups, groups * bench.length(5), groups * bench.length(4)),
        };
        let n = bench.length(2);
        let outputs = n * out[0] * out[1] * k;
        let step = Conv {
            input: bench.input(ty, n * size[0] * size[1] * c),
            weights: bench.input(ty, k * kernel[0] * kernel[1] * (c / groups)),
            bias: bench.optional(ty, k),
            residual: bench.optional(ty, outputs),
            output: bench.output(ty, outputs),
            activation: bench.one_of(&[Activation::None, Activation::Relu]),
            n,
            size,
            c,
            k,
            out,
            kernel,
            strides,
            dilations,
            pads,
            groups,
        };
        bench.check(&format!("convolution, seed {seed}"), &Step::Conv(step), ty, 4. * tolerance(ty));
    }
}

#[test]
fn random_resizings() {
    const KINDS: [ResizeKind; 5] =
        [ResizeKind::Floor, ResizeKind::Ceil, ResizeKind::NearestLow, ResizeKind::NearestHigh, ResizeKind::Linear];
    for seed in 0..60 {
        let mut bench = Bench::new(seed);
        let ty = bench.one_of(&FLOATS);
        let (n, c) = (bench.length(2), bench.length(7));
        let size = [bench.length(6), bench.length(6)];
        let out = [bench.length(9), bench.length(9)];
        let half = if bench.is() { 0.5 } else { 0.0 };
        let step = Resize {
            input: bench.input(ty, n * size[0] * size[1] * c),
            output: bench.output(ty, n * out[0] * out[1] * c),
            kind: KINDS[seed as usize % KINDS.len()],
            n,
            size,
            c,
            out,
            offset: [half; 2],
            scale: [0, 1].map(|i| size[i] as f32 / out[i] as f32),
            shift: [half; 2],
        };
        bench.check(&format!("resizing, seed {seed}"), &Step::Resize(step), ty, tolerance(ty));
    }
}
