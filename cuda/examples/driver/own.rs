//! Our own kernels: a case or two for each, and how fast those are that models spend their time in.

use std::sync::Arc;

use cuda::{Driver, DriverError};
use lowering::{
    Step, Type,
    plan::{
        Activation, Attention, Binary, Conv, Gather, Instruction, Norm, Numbers, Operand, Pointwise, Pool, PoolKind,
        Precision, Reduce, Reduction, Resize, ResizeKind, Softmax, Unary, Value, View,
    },
};

use super::rig::{Layout, Made, Rig, plan, say};

const LOAD: Instruction = Instruction::Load(Value::Input(0));

/// How many failed.
pub(crate) fn cases(rig: &Rig) -> usize {
    let mut failed = 0;
    for (ty, precision, tolerance) in [(Type::F32, Precision::Fp32, 1e-5), (Type::F16, Precision::Fp16, 2e-3)] {
        let made = [
            ("add and relu", add_relu(&[3, 4, 20], ty)),
            ("gelu", gelu(1001, ty)),
            ("transposition", to_nhwc([2, 40, 5, 9], ty, ty)),
            ("image", to_nhwc([2, 3, 5, 9], Type::F32, ty)),
            ("rows reduced", reduce([5, 1300, 1], ty)),
            ("columns reduced", reduce([3, 49, 70], ty)),
            ("softmax", softmax(7, 130, ty)),
            ("long softmax", softmax(3, 3000, ty)),
            ("norm", norm(9, 768, ty)),
            ("long norm", norm(2, 2100, ty)),
            ("narrow attention", attention([2, 3, 70, 40], ty)),
            ("wide attention", attention([1, 2, 130, 128], ty)),
            ("pool", pool([2, 9, 7, 16], ty)),
            ("odd pool", pool([1, 8, 8, 5], ty)),
            ("depthwise", depthwise([2, 9, 8, 12], ty)),
            ("odd depthwise", depthwise([1, 7, 5, 6], ty)),
            ("gather", gather(50, 24, ty)),
            ("resize", resize([1, 5, 7, 6], ty)),
        ];
        for (name, made) in made {
            failed += usize::from(!say(&format!("{ty:?} {name}"), rig.compare(made, precision, tolerance)));
        }
    }
    failed
}

/// Microseconds of each, and the memory that it reads and writes at least, as gigabytes in a second.
pub(crate) fn speed(rig: &Rig) -> Result<(), DriverError> {
    let ty = Type::F16;
    let mebi = |elements: usize| elements as f64 / 1e9;
    let measured = [
        ("add and relu of 32 x 56 x 56 x 256", add_relu(&[32, 56 * 56, 256], ty), 6. * mebi(32 * 56 * 56 * 256)),
        ("gelu of 1024 x 3072", gelu(1024 * 3072, ty), 4. * mebi(1024 * 3072)),
        ("image 32 x 3 x 224 x 224", to_nhwc([32, 3, 224, 224], Type::F32, ty), 6. * mebi(32 * 3 * 224 * 224)),
        ("softmax of 12288 x 128", softmax(12288, 128, ty), 4. * mebi(12288 * 128)),
        ("norm of 1024 x 768", norm(1024, 768, ty), 8. * mebi(1024 * 768)),
        ("attention of 8 x 12 x 128 x 64", attention([8, 12, 128, 64], ty), 8. * mebi(8 * 12 * 128 * 64)),
        ("pool of 32 x 112 x 112 x 64", pool([32, 112, 112, 64], ty), 2.5 * mebi(32 * 112 * 112 * 64)),
        ("depthwise of 32 x 112 x 112 x 96", depthwise([32, 112, 112, 96], ty), 4. * mebi(32 * 112 * 112 * 96)),
    ];
    for (name, made, gigabytes) in measured {
        let plan = Arc::new(plan(made.step, Precision::Fp16, 0));
        let prepared = rig.cuda.prepare(&plan, rig.bases)?;
        let us = rig.time(prepared, 20)?;
        rig.cuda.forget(prepared);
        let rate = gigabytes / us * 1e6;
        println!("{{\"kernel\": \"{name}\", \"us\": {us:.1}, \"gb_per_s\": {rate:.0}}}");
    }
    Ok(())
}

fn made(step: Step, output: Operand, elements: usize, layout: Layout) -> Made {
    Made { step, output, elements, layout }
}

/// Strides of a tensor without gaps.
fn dense(shape: &[usize]) -> Vec<i64> {
    (0..shape.len()).map(|dimension| shape[dimension + 1..].iter().product::<usize>() as i64).collect()
}

fn pointwise(layout: Layout, shape: &[usize], inputs: Vec<View>, base: Operand, code: &[Instruction]) -> Made {
    let output = View { base, strides: dense(shape) };
    let step = Pointwise { shape: shape.to_vec(), inputs, output, numbers: Numbers::Float, code: code.to_vec() };
    made(Step::Pointwise(step), base, shape.iter().product(), layout)
}

/// Two tensors and a row.
fn add_relu(shape: &[usize], ty: Type) -> Made {
    let mut layout = Layout::default();
    let count = shape.iter().product();
    let [first, second, output] = [(); 3].map(|()| layout.arena(ty, count));
    let row = layout.weights(ty, shape[shape.len() - 1]);
    let mut repeated = vec![0; shape.len()];
    repeated[shape.len() - 1] = 1;
    let view = |base| View { base, strides: dense(shape) };
    let inputs = vec![view(first), view(second), View { base: row, strides: repeated }];
    let code = [
        LOAD,
        Instruction::Binary(Binary::Add, Value::Input(1)),
        Instruction::Binary(Binary::Add, Value::Input(2)),
        Instruction::Binary(Binary::Max, Value::Float(0.)),
    ];
    pointwise(layout, shape, inputs, output, &code)
}

/// `x * (erf(x / sqrt(2)) + 1) / 2`.
fn gelu(count: usize, ty: Type) -> Made {
    let mut layout = Layout::default();
    let [input, output] = [(); 2].map(|()| layout.arena(ty, count));
    let code = [
        LOAD,
        Instruction::Binary(Binary::Mul, Value::Float(std::f32::consts::FRAC_1_SQRT_2)),
        Instruction::Unary(Unary::Erf),
        Instruction::Binary(Binary::Add, Value::Float(1.)),
        Instruction::Binary(Binary::Mul, Value::Input(0)),
        Instruction::Binary(Binary::Mul, Value::Float(0.5)),
    ];
    pointwise(layout, &[count], vec![View { base: input, strides: vec![1] }], output, &code)
}

/// Of `[n, c, h, w]`.
fn to_nhwc([n, c, h, w]: [usize; 4], from: Type, to: Type) -> Made {
    let mut layout = Layout::default();
    let (input, output) = (layout.arena(from, n * c * h * w), layout.arena(to, n * c * h * w));
    let strides = vec![(c * h * w) as i64, 1, (h * w) as i64];
    pointwise(layout, &[n, h * w, c], vec![View { base: input, strides }], output, &[LOAD])
}

fn reduce([outer, length, inner]: [usize; 3], ty: Type) -> Made {
    let mut layout = Layout::default();
    let (input, output) = (layout.arena(ty, outer * length * inner), layout.arena(ty, outer * inner));
    let step = Reduce { input, output, reduction: Reduction::Mean, outer, length, inner };
    made(Step::Reduce(step), output, outer * inner, layout)
}

fn softmax(rows: usize, columns: usize, ty: Type) -> Made {
    let mut layout = Layout::default();
    let [input, output] = [(); 2].map(|()| layout.arena(ty, rows * columns));
    let step = Softmax { input, output, rows, columns, scale: 4., is_log: false };
    made(Step::Softmax(step), output, rows * columns, layout)
}

fn norm(rows: usize, columns: usize, ty: Type) -> Made {
    let mut layout = Layout::default();
    let [input, residual, sum, output] = [(); 4].map(|()| layout.arena(ty, rows * columns));
    let [scale, shift] = [(); 2].map(|()| layout.weights(ty, columns));
    let step = Norm {
        input,
        residual: Some(residual),
        sum: Some(sum),
        scale: Some(scale),
        shift: Some(shift),
        output,
        rows,
        columns,
        epsilon: 1e-5,
        is_rms: false,
    };
    made(Step::Norm(step), output, rows * columns, layout)
}

/// Causal, with a mask of the keys, on views `[batch, position, head, width]`.
fn attention([batch, heads, positions, width]: [usize; 4], ty: Type) -> Made {
    let mut layout = Layout::default();
    let count = batch * heads * positions * width;
    let strides = vec![(positions * heads * width) as i64, width as i64, (heads * width) as i64];
    let [query, key, value, output] =
        [(); 4].map(|()| View { base: layout.arena(ty, count), strides: strides.clone() });
    let mask = View { base: layout.arena(ty, batch * positions), strides: vec![positions as i64, 0, 0, 1] };
    let at = output.base;
    let step = Attention {
        query,
        key,
        value,
        mask: Some(mask),
        output,
        batch,
        heads,
        queries: positions,
        keys: positions,
        width,
        scale: 1. / (width as f32).sqrt(),
        is_causal: true,
    };
    made(Step::Attention(step), at, count, layout)
}

/// Of `[n, h, w, c]`, 3 x 3 at every second position.
fn pool([n, h, w, c]: [usize; 4], ty: Type) -> Made {
    let mut layout = Layout::default();
    let out = [h.div_ceil(2), w.div_ceil(2)];
    let count = n * out[0] * out[1] * c;
    let step = Pool {
        input: layout.arena(ty, n * h * w * c),
        output: layout.arena(ty, count),
        kind: PoolKind::Max,
        n,
        size: [h, w],
        c,
        out,
        kernel: [3, 3],
        strides: [2, 2],
        dilations: [1, 1],
        pads: [1, 1],
    };
    let output = step.output;
    made(Step::Pool(step), output, count, layout)
}

/// Of `[n, h, w, c]`, 3 x 3.
fn depthwise([n, h, w, c]: [usize; 4], ty: Type) -> Made {
    let mut layout = Layout::default();
    let count = n * h * w * c;
    let step = Conv {
        input: layout.arena(ty, count),
        weights: layout.weights(ty, c * 9),
        bias: Some(layout.weights(ty, c)),
        residual: None,
        output: layout.arena(ty, count),
        activation: Activation::Relu,
        n,
        size: [h, w],
        c,
        k: c,
        out: [h, w],
        kernel: [3, 3],
        strides: [1, 1],
        dilations: [1, 1],
        pads: [1, 1],
        groups: c,
    };
    let output = step.output;
    made(Step::Conv(step), output, count, layout)
}

fn gather(count: usize, inner: usize, ty: Type) -> Made {
    let mut layout = Layout::default();
    let step = Gather {
        input: layout.weights(ty, 8 * inner),
        indices: layout.arena(Type::I64, count),
        output: layout.arena(ty, count * inner),
        outer: 1,
        length: 8,
        inner,
        count,
        indices_per_task: 0,
    };
    let output = step.output;
    made(Step::Gather(step), output, count * inner, layout)
}

/// Of `[n, h, w, c]`, to twice the height and thrice the width.
fn resize([n, h, w, c]: [usize; 4], ty: Type) -> Made {
    let mut layout = Layout::default();
    let out = [2 * h, 3 * w];
    let count = n * out[0] * out[1] * c;
    let step = Resize {
        input: layout.arena(ty, n * h * w * c),
        output: layout.arena(ty, count),
        kind: ResizeKind::Linear,
        n,
        size: [h, w],
        c,
        out,
        offset: [0.5; 2],
        scale: [0.5, 1. / 3.],
        shift: [0.5; 2],
    };
    let output = step.output;
    made(Step::Resize(step), output, count, layout)
}
