//! Products and convolutions of all kinds.

use cuda::DriverError;
use lowering::{
    Step, Type,
    plan::{Activation, Conv, Factor, Matmul, Operand, Precision},
};

use super::rig::{Layout, Made, Rig, say};

/// What comes after the sum.
#[derive(Debug, Clone, Copy)]
struct After {
    bias: bool,
    residual: bool,
    relu: bool,
}

const ALL: [After; 5] = [
    After { bias: false, residual: false, relu: false },
    After { bias: true, residual: false, relu: false },
    After { bias: true, residual: false, relu: true },
    After { bias: true, residual: true, relu: true },
    After { bias: false, residual: true, relu: false },
];

impl After {
    fn activation(self) -> Activation {
        if self.relu { Activation::Relu } else { Activation::None }
    }

    fn name(self) -> String {
        let parts = [(self.bias, " bias"), (self.residual, " residual"), (self.relu, " relu")];
        parts.into_iter().filter(|part| part.0).map(|part| part.1).collect()
    }
}

/// Memory's type, how it is multiplied, and what error is allowed of the largest number.
const KINDS: [(Type, Precision, f64); 3] =
    [(Type::F16, Precision::Fp16, 2e-3), (Type::F32, Precision::Fp32, 1e-5), (Type::F32, Precision::Tf32, 2e-3)];

/// How many failed.
pub(crate) fn run(rig: &Rig) -> usize {
    let mut failed = 0;
    for (ty, precision, tolerance) in KINDS {
        for (name, made) in matmuls(ty).into_iter().chain(convs(ty)) {
            failed += usize::from(!say(&format!("{precision:?} {name}"), rig.compare(made, precision, tolerance)));
        }
    }
    // What binary32 is held to would be noticed: TF32 fails it.
    let after = ALL[1];
    for (name, made) in [matmul(SQUARE, after, Type::F32, Type::F32, 1.0), conv(IMAGE, after, Type::F32)] {
        let result = match rig.compare(made, Precision::Tf32, KINDS[1].2) {
            Ok(()) => Err(DriverError("it is as exact as binary32".to_owned())),
            Err(_) => Ok(()),
        };
        failed += usize::from(!say(&format!("Tf32 is rounded: {name}"), result));
    }
    for (name, made) in matmuls_into_f32() {
        failed += usize::from(!say(&name, rig.compare(made, Precision::Fp16, 1e-3)));
    }
    failed
}

/// Sizes of a product.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batches: usize,
    m: usize,
    n: usize,
    k: usize,
    /// Elements between rows that belong to none.
    gap: usize,
    a_transposed: bool,
    b_transposed: bool,
    /// Whether all products have the same b.
    shared: bool,
}

const SQUARE: Sizes =
    Sizes { batches: 1, m: 64, n: 64, k: 64, gap: 0, a_transposed: false, b_transposed: false, shared: false };

fn matmuls(ty: Type) -> Vec<(String, Made)> {
    let mut sizes = Vec::new();
    for (a_transposed, b_transposed) in [(false, false), (false, true), (true, false), (true, true)] {
        sizes.push(Sizes { m: 33, n: 65, k: 127, a_transposed, b_transposed, ..SQUARE });
        sizes.push(Sizes { batches: 5, m: 24, n: 40, k: 56, gap: 8, a_transposed, b_transposed, ..SQUARE });
    }
    sizes.push(Sizes { m: 1, n: 250, k: 1024, b_transposed: true, ..SQUARE });
    sizes.push(Sizes { m: 48, n: 192, k: 384, ..SQUARE });
    sizes.push(Sizes { batches: 3, m: 16, n: 48, k: 32, shared: true, ..SQUARE });
    sizes.push(Sizes { m: 7, n: 1, k: 100, gap: 3, ..SQUARE });
    sizes.push(Sizes { m: 9, n: 5, k: 1, ..SQUARE });
    let mut made = Vec::new();
    for (i, sizes) in sizes.into_iter().enumerate() {
        for after in if i < 8 { &ALL[..] } else { &ALL[3..] } {
            made.push(matmul(sizes, *after, ty, ty, if i % 2 == 0 { 1.0 } else { 0.125 }));
        }
    }
    made
}

fn matmuls_into_f32() -> Vec<(String, Made)> {
    ALL.into_iter().map(|after| matmul(Sizes { m: 96, ..SQUARE }, after, Type::F16, Type::F32, 1.0)).collect()
}

fn matmul(sizes: Sizes, after: After, ty: Type, to: Type, alpha: f32) -> (String, Made) {
    let Sizes { batches, m, n, k, gap, a_transposed, b_transposed, shared } = sizes;
    let mut layout = Layout::default();
    let mut factor = |rows: usize, columns: usize, transposed: bool, ty: Type, batches: usize| {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let row_stride = columns + gap;
        let base = layout.arena(ty, batches.max(1) * rows * row_stride);
        Factor { base, row_stride, batch_stride: if batches == 0 { 0 } else { rows * row_stride }, transposed }
    };
    let a = factor(m, k, a_transposed, ty, batches);
    let b = factor(k, n, b_transposed, ty, if shared { 0 } else { batches });
    let output = factor(m, n, false, to, batches);
    let residual = after.residual.then(|| factor(m, n, false, to, batches).base);
    let bias = after.bias.then(|| layout.weights(to, n));
    let activation = after.activation();
    let step = Matmul { a, b, bias, residual, output, alpha, activation, batches, m, n, k };
    let name = format!("{sizes:?}{} into {to:?}", after.name());
    let elements = batches * m * output.row_stride;
    // Between rows of the output nothing is written, and both sides have what was there.
    (name, Made { step: Step::Matmul(step), output: output.base, elements, layout })
}

/// A convolution's sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Image {
    pub(crate) n: usize,
    pub(crate) size: [usize; 2],
    pub(crate) c: usize,
    pub(crate) k: usize,
    pub(crate) kernel: [usize; 2],
    pub(crate) strides: [usize; 2],
    pub(crate) dilations: [usize; 2],
    /// Before and behind, of both dimensions.
    pub(crate) pads: ([usize; 2], [usize; 2]),
    pub(crate) groups: usize,
}

const IMAGE: Image = Image {
    n: 2,
    size: [14, 14],
    c: 32,
    k: 64,
    kernel: [3, 3],
    strides: [1, 1],
    dilations: [1, 1],
    pads: ([1, 1], [1, 1]),
    groups: 1,
};

fn convs(ty: Type) -> Vec<(String, Made)> {
    let images = [
        IMAGE,
        Image { strides: [2, 2], ..IMAGE },
        Image { size: [15, 9], strides: [2, 2], pads: ([0, 0], [1, 1]), ..IMAGE },
        Image { size: [15, 9], strides: [2, 1], pads: ([1, 0], [0, 2]), kernel: [3, 5], ..IMAGE },
        Image { size: [32, 32], c: 3, kernel: [7, 7], strides: [2, 2], pads: ([3, 3], [3, 3]), ..IMAGE },
        Image { dilations: [2, 2], pads: ([2, 2], [2, 2]), ..IMAGE },
        Image { kernel: [1, 1], pads: ([0, 0], [0, 0]), ..IMAGE },
        Image { kernel: [1, 1], pads: ([0, 0], [0, 0]), strides: [2, 2], ..IMAGE },
        Image { c: 5, k: 7, ..IMAGE },
        Image { n: 1, size: [1, 50], c: 16, k: 24, kernel: [1, 9], pads: ([0, 4], [0, 4]), ..IMAGE },
        Image { n: 3, c: 64, k: 64, groups: 4, ..IMAGE },
        Image { c: 32, k: 32, groups: 32, ..IMAGE },
    ];
    let mut made = Vec::new();
    for (i, image) in images.into_iter().enumerate() {
        // What may come after the sum is all tried in one type, and some of it in the others.
        for after in if i == 0 || ty == Type::F16 { &ALL[..] } else { &ALL[3..4] } {
            made.push(conv(image, *after, ty));
        }
    }
    made
}

fn conv(image: Image, after: After, ty: Type) -> (String, Made) {
    let made = make(image, ty, [after.bias, after.residual, after.relu]);
    (format!("{image:?}{}", after.name()), made)
}

/// A convolution with or without bias, residual and activation.
pub(crate) fn make(image: Image, ty: Type, [bias, residual, relu]: [bool; 3]) -> Made {
    let Image { n, size, c, k, kernel, strides, dilations, pads, groups } = image;
    let out: [usize; 2] = std::array::from_fn(|i| {
        (size[i] + pads.0[i] + pads.1[i] - (kernel[i] - 1) * dilations[i] - 1) / strides[i] + 1
    });
    let mut layout = Layout::default();
    let elements = n * out[0] * out[1] * k;
    let input = layout.arena(ty, n * size[0] * size[1] * c);
    let output: Operand = layout.arena(ty, elements);
    let residual = residual.then(|| layout.arena(ty, elements));
    let weights = layout.weights(ty, k * kernel[0] * kernel[1] * (c / groups));
    let bias = bias.then(|| layout.weights(ty, k));
    let activation = if relu { Activation::Relu } else { Activation::None };
    let step = Step::Conv(Conv {
        input,
        weights,
        bias,
        residual,
        output,
        activation,
        n,
        size,
        c,
        k,
        out,
        kernel,
        strides,
        dilations,
        pads: pads.0,
        groups,
    });
    Made { step, output, elements, layout }
}
