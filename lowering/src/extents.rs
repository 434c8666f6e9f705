//! Which bytes a step reads and writes: what is dealt places in the arena, and what plans are checked by.

use crate::plan::{Factor, Operand, Place, Step, View};

/// Bytes from a place on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first one.
    pub place: Place,
    /// So many; a view that leaves some out has them counted, too.
    pub bytes: usize,
}

fn dense(operand: Operand, elements: usize) -> Extent {
    Extent { place: operand.place, bytes: elements * operand.ty.bytes() }
}

fn viewed(view: &View, shape: &[usize]) -> Extent {
    let bytes = view.base.ty.bytes();
    let reach = |is_forward: bool| -> usize {
        let strides = view.strides.iter().zip(shape).filter(|(stride, _)| (**stride > 0) == is_forward);
        strides
            .map(|(stride, length)| usize::try_from(stride.unsigned_abs()).unwrap_or(usize::MAX) * (length - 1))
            .sum()
    };
    let (before, after) = (reach(false) * bytes, reach(true) * bytes);
    let place = match view.base.place {
        Place::Arena(at) => Place::Arena(at - before),
        Place::Weights(at) => Place::Weights(at - before),
    };
    Extent { place, bytes: before + after + bytes }
}

fn factor(factor: &Factor, (rows, columns): (usize, usize), batches: usize) -> Extent {
    let (rows, columns) = if factor.transposed { (columns, rows) } else { (rows, columns) };
    dense(factor.base, (batches - 1) * factor.batch_stride + (rows - 1) * factor.row_stride + columns)
}

impl Step {
    /// What it reads.
    #[must_use]
    pub fn reads(&self) -> Vec<Extent> {
        let some = |operand: Option<Operand>, elements| operand.map(|operand| dense(operand, elements));
        match self {
            Self::Conv(conv) => {
                let output = conv.n * conv.out[0] * conv.out[1] * conv.k;
                let weights = conv.k * conv.kernel[0] * conv.kernel[1] * (conv.c / conv.groups);
                let input = dense(conv.input, conv.n * conv.size[0] * conv.size[1] * conv.c);
                let rest = [some(conv.bias, conv.k), some(conv.residual, output)];
                [input, dense(conv.weights, weights)].into_iter().chain(rest.into_iter().flatten()).collect()
            }
            Self::Matmul(product) => {
                let (a, b) = ((product.m, product.k), (product.k, product.n));
                let residual = product.residual.map(|base| Factor { base, ..product.output });
                let residual = residual.map(|it| factor(&it, (product.m, product.n), product.batches));
                [factor(&product.a, a, product.batches), factor(&product.b, b, product.batches)]
                    .into_iter()
                    .chain(some(product.bias, product.n))
                    .chain(residual)
                    .collect()
            }
            Self::Pointwise(step) => step.inputs.iter().map(|view| viewed(view, &step.shape)).collect(),
            Self::Reduce(step) => vec![dense(step.input, step.outer * step.length * step.inner)],
            Self::Softmax(step) => vec![dense(step.input, step.rows * step.columns)],
            Self::Norm(step) => {
                let whole = step.rows * step.columns;
                let rest = [some(step.residual, whole), some(step.scale, step.columns), some(step.shift, step.columns)];
                std::iter::once(dense(step.input, whole)).chain(rest.into_iter().flatten()).collect()
            }
            Self::Attention(step) => {
                let keys = [step.batch, step.heads, step.keys, step.width];
                let mut extents = vec![vectors(&step.query, [step.batch, step.heads, step.queries, step.width])];
                extents.extend([vectors(&step.key, keys), vectors(&step.value, keys)]);
                let shape = [step.batch, step.heads, step.queries, step.keys];
                extents.extend(step.mask.as_ref().map(|mask| viewed(mask, &shape)));
                extents
            }
            Self::Pool(step) => vec![dense(step.input, step.n * step.size[0] * step.size[1] * step.c)],
            Self::Gather(step) => {
                let input = dense(step.input, step.outer * step.length * step.inner);
                vec![input, dense(step.indices, step.count)]
            }
            Self::Resize(step) => vec![dense(step.input, step.n * step.size[0] * step.size[1] * step.c)],
        }
    }

    /// What it writes, faults left out.
    #[must_use]
    pub fn writes(&self) -> Vec<Extent> {
        match self {
            Self::Conv(conv) => vec![dense(conv.output, conv.n * conv.out[0] * conv.out[1] * conv.k)],
            Self::Matmul(product) => vec![factor(&product.output, (product.m, product.n), product.batches)],
            Self::Pointwise(step) => vec![viewed(&step.output, &step.shape)],
            Self::Reduce(step) => vec![dense(step.output, step.outer * step.inner)],
            Self::Softmax(step) => vec![dense(step.output, step.rows * step.columns)],
            Self::Norm(step) => {
                let whole = step.rows * step.columns;
                let sum = step.sum.map(|sum| dense(sum, whole));
                std::iter::once(dense(step.output, whole)).chain(sum).collect()
            }
            Self::Attention(step) => {
                vec![vectors(&step.output, [step.batch, step.heads, step.queries, step.width])]
            }
            Self::Pool(step) => vec![dense(step.output, step.n * step.out[0] * step.out[1] * step.c)],
            Self::Gather(step) => vec![dense(step.output, step.outer * step.count * step.inner)],
            Self::Resize(step) => vec![dense(step.output, step.n * step.out[0] * step.out[1] * step.c)],
        }
    }

    /// All places that it names.
    pub fn places_mut(&mut self) -> Vec<&mut Place> {
        fn all<'a, const N: usize>(
            some: [&'a mut Operand; N],
            optional: impl IntoIterator<Item = &'a mut Option<Operand>>,
        ) -> Vec<&'a mut Place> {
            let optional = optional.into_iter().flatten();
            some.into_iter().chain(optional).map(|operand| &mut operand.place).collect()
        }
        match self {
            Self::Conv(it) => all([&mut it.input, &mut it.weights, &mut it.output], [&mut it.bias, &mut it.residual]),
            Self::Matmul(it) => {
                let factors = [&mut it.a.base, &mut it.b.base, &mut it.output.base];
                all(factors, [&mut it.bias, &mut it.residual])
            }
            Self::Pointwise(it) => {
                let views = it.inputs.iter_mut().chain([&mut it.output]);
                views.map(|view| &mut view.base.place).collect()
            }
            Self::Reduce(it) => all([&mut it.input, &mut it.output], []),
            Self::Softmax(it) => all([&mut it.input, &mut it.output], []),
            Self::Norm(it) => {
                let optional = [&mut it.residual, &mut it.sum, &mut it.scale, &mut it.shift];
                all([&mut it.input, &mut it.output], optional)
            }
            Self::Attention(it) => {
                let views = [&mut it.query, &mut it.key, &mut it.value, &mut it.output].into_iter();
                views.chain(&mut it.mask).map(|view| &mut view.base.place).collect()
            }
            Self::Pool(it) => all([&mut it.input, &mut it.output], []),
            Self::Gather(it) => all([&mut it.input, &mut it.indices, &mut it.output], []),
            Self::Resize(it) => all([&mut it.input, &mut it.output], []),
        }
    }
}

/// Vectors of an attention: dense, with strides over all but their elements.
fn vectors(view: &View, shape: [usize; 4]) -> Extent {
    let strides = view.strides.iter().copied().chain([1]).collect();
    viewed(&View { base: view.base, strides }, &shape)
}
