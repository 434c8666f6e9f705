//! Matrix products, whatever tensors they are written with.

use tract_onnx::{prelude::*, tract_core::ops::einsum::EinSum};

use super::{
    LowerError,
    layout::{Layout, signed},
    pending::{Kind, Pending, UNSET},
    siblings::Columns,
    walk::{Value, Walk},
};
use crate::{
    lower::stored::{Base, Stored},
    plan::{Activation, Conv, Factor, Matmul, Operand, Type},
};

/// An operand whose place is set when its step is added to the plan.
const UNSET_OPERAND: Operand = Operand { place: UNSET, ty: Type::F32 };

/// The dimensions of an einsum's operands: of those that both have and the result, too, pairs; of those of the first
/// or the second alone; and pairs that are summed over.
#[derive(Debug, Default)]
struct Roles {
    batches: Vec<(usize, usize)>,
    rows: Vec<usize>,
    columns: Vec<usize>,
    summed: Vec<(usize, usize)>,
    /// Dimensions of the result, for batches, rows and columns in the order above.
    output: [Vec<usize>; 3],
}

/// The same from the outermost to the innermost, as they lie in memory; where both operands have them, for each.
struct Dims {
    batches: (Vec<usize>, Vec<usize>),
    rows: Vec<usize>,
    columns: Vec<usize>,
    summed: (Vec<usize>, Vec<usize>),
}

impl Dims {
    fn of(roles: &Roles, a: &Layout, b: &Layout) -> Self {
        let pick = |pairs: &[(usize, usize)]| -> (Vec<usize>, Vec<usize>) {
            let order = a.by_stride(&pairs.iter().map(|pair| pair.0).collect::<Vec<_>>());
            let partner = |dim: &usize| pairs.iter().find(|pair| pair.0 == *dim).map_or(0, |pair| pair.1);
            (order.clone(), order.iter().map(partner).collect())
        };
        Self {
            batches: pick(&roles.batches),
            rows: a.by_stride(&roles.rows),
            columns: b.by_stride(&roles.columns),
            summed: pick(&roles.summed),
        }
    }

    /// The order of the result's dimensions.
    fn output(&self, roles: &Roles) -> Vec<usize> {
        let batches: Vec<usize> = roles.batches.iter().map(|pair| pair.0).collect();
        let groups = [(&self.batches.0, &batches), (&self.rows, &roles.rows), (&self.columns, &roles.columns)];
        let positions = groups.into_iter().zip(&roles.output).flat_map(|((dims, own), output)| {
            dims.iter().map(|dim| own.iter().position(|it| it == dim).map_or(0, |at| output[at]))
        });
        positions.collect()
    }
}

/// The operands of a product.
struct Factors {
    a: Stored,
    b: Stored,
    a_factor: Factor,
    b_factor: Factor,
    /// Whether the second is a constant that all batches have, and its factor what that is in memory.
    is_weight: bool,
    is_as_it_lies: bool,
}

impl Walk<'_> {
    pub(super) fn product(&mut self, node: &TypedNode, op: &EinSum) -> Result<Value, LowerError> {
        if op.q_params.is_some() || node.inputs.len() != 2 {
            return Err(self.missing(node));
        }
        let ty = self.builder.type_of(node.outputs[0].fact.datum_type)?;
        if !ty.is_float() {
            return Err(self.builder.unsupported("products of integers are for the CPU's executor"));
        }
        let (mut a, mut b) = (self.factor(node.inputs[0], ty)?, self.factor(node.inputs[1], ty)?);
        let mut slots = [0, 1];
        let mut roles = self.roles(op, slots, [&a.layout.shape, &b.layout.shape])?;
        if self.is_swapped((&a, &b), &roles) {
            std::mem::swap(&mut a, &mut b);
            slots = [1, 0];
            roles = self.roles(op, slots, [&a.layout.shape, &b.layout.shape])?;
        }
        let shape = self.shape_of(node.id.into())?;
        // Dimensions of one operand that the other has once.
        for (a_dim, b_dim) in roles.batches.iter().chain(&roles.summed).copied() {
            let length = a.layout.shape[a_dim].max(b.layout.shape[b_dim]);
            for (stored, dim) in [(&mut a, a_dim), (&mut b, b_dim)] {
                let mut whole = stored.layout.shape.clone();
                whole[dim] = length;
                stored.layout = stored.layout.broadcast(&whole);
            }
        }
        if let Some(value) = self.strided_convolution((&a, &b), &roles, &shape)? {
            return Ok(value);
        }
        self.matmul((node.id, a, b), &roles, (&shape, ty))
    }

    /// An operand in memory, of the type that is multiplied.
    fn factor(&mut self, outlet: OutletId, ty: Type) -> Result<Stored, LowerError> {
        let stored = self.stored(outlet)?;
        if stored.ty == ty && (stored.constant().is_some() || self.builder.is_aligned(&stored, 16)) {
            return Ok(stored);
        }
        let order = stored.layout.order();
        self.packed(outlet, &order, ty)
    }

    fn roles(&self, op: &EinSum, [a, b]: [usize; 2], shapes: [&[usize]; 2]) -> Result<Roles, LowerError> {
        let mut roles = Roles::default();
        for axis in op.axes.iter_all_axes() {
            let one = |dims: &TVec<usize>| dims.first().copied();
            if axis.inputs.iter().chain(&axis.outputs).any(|dims| dims.len() > 1) {
                return Err(self.builder.unsupported("a product that takes a diagonal is for the CPU's executor"));
            }
            match (one(&axis.inputs[a]), one(&axis.inputs[b]), one(&axis.outputs[0])) {
                (Some(a), Some(b), Some(out)) => {
                    roles.batches.push((a, b));
                    roles.output[0].push(out);
                }
                (Some(a), None, Some(out)) => {
                    roles.rows.push(a);
                    roles.output[1].push(out);
                }
                (None, Some(b), Some(out)) => {
                    roles.columns.push(b);
                    roles.output[2].push(out);
                }
                (Some(a), Some(b), None) => roles.summed.push((a, b)),
                // tract leaves lengths of one where a batch is one.
                (None, None, _) => {}
                (Some(dim), None, None) if shapes[0][dim] == 1 => {}
                (None, Some(dim), None) if shapes[1][dim] == 1 => {}
                _ => return Err(self.builder.unsupported("a sum over one operand alone is for the CPU's executor")),
            }
        }
        Ok(roles)
    }

    /// Whether the operands change places, so that a constant, or what comes last in the result, has the columns.
    fn is_swapped(&self, (a, b): (&Stored, &Stored), roles: &Roles) -> bool {
        match (a.constant().is_some(), b.constant().is_some()) {
            (true, false) => true,
            (false, true) => false,
            _ => roles.output[1].iter().max() > roles.output[2].iter().max(),
        }
    }

    fn matmul(
        &mut self,
        (node, a, b): (usize, Stored, Stored),
        roles: &Roles,
        (shape, ty): (&[usize], Type),
    ) -> Result<Value, LowerError> {
        let dims = Dims::of(roles, &a.layout, &b.layout);
        let Factors { a, b, a_factor, b_factor, is_weight, is_as_it_lies } = self.factors((a, b), &dims, ty)?;
        let product = |layout: &Layout, dims: &[usize]| dims.iter().map(|&dim| layout.shape[dim]).product::<usize>();
        let (m, n) = (product(&a.layout, &dims.rows), product(&b.layout, &dims.columns));
        let batches = product(&a.layout, &dims.batches.0);
        let order = dims.output(roles);
        let part = if is_weight && batches == 1 { self.part(node, &dims.columns, (shape, &order, ty))? } else { None };
        let (part, target, row_stride) = match part {
            Some((part, target, row_stride)) => (Some(part), target, row_stride),
            None => (None, self.builder.tensor(shape, &order, ty), n),
        };
        let output =
            Factor { base: self.builder.operand(&target)?, row_stride, batch_stride: m * n, transposed: false };
        let a_base = self.builder.operand(&a)?;
        let mut step = Matmul {
            a: Factor { base: a_base, ..a_factor },
            b: b_factor,
            bias: None,
            residual: None,
            output,
            alpha: 1.0,
            activation: Activation::None,
            batches,
            m,
            n,
            k: product(&a.layout, &dims.summed.0),
        };
        if is_weight {
            let weights = b_as(&b, Self::weights(&b, &dims.columns, &dims.summed.1));
            let kind = Kind::Weighted(step, weights, is_as_it_lies);
            return Ok(Pending::new(target, kind, n).with_siblings(part).into());
        }
        step.b.base = self.builder.operand(&b)?;
        Ok(Pending::new(target, Kind::Matmul(step), n).into())
    }

    /// The columns of a product among those of its siblings: which they are, its result there, and how long rows are.
    fn part(
        &mut self,
        node: usize,
        columns: &[usize],
        (shape, order, ty): (&[usize], &[usize], Type),
    ) -> Result<Option<(Columns, Stored, usize)>, LowerError> {
        let Some((weights, own)) = self.siblings.weights(node) else { return Ok(None) };
        let count = |&outlet: &OutletId| {
            let shape = self.shape_of(outlet)?;
            Ok(columns.iter().map(|&dim| shape[dim]).product::<usize>())
        };
        let counts = weights.iter().map(count).collect::<Result<Vec<_>, LowerError>>()?;
        let all: usize = counts.iter().sum();
        let rows = shape.iter().product::<usize>() / counts[own].max(1);
        let builder = &mut self.builder;
        let Some((part, whole)) = self.siblings.part(node, &counts, |all| builder.tensor(&[rows, all], &[0, 1], ty))
        else {
            return Ok(None);
        };
        let mut layout = Layout::ordered(shape, order);
        let apart = |stride: &mut i64| *stride = *stride / signed(counts[own]) * signed(all);
        layout.strides.iter_mut().filter(|stride| **stride >= signed(counts[own])).for_each(apart);
        layout.offset = signed(counts[..own].iter().sum::<usize>());
        Ok(Some((part, Stored { layout, ..whole }, all)))
    }

    /// The operands as matrices, copied where they are none.
    fn factors(&mut self, (mut a, mut b): (Stored, Stored), dims: &Dims, ty: Type) -> Result<Factors, LowerError> {
        let Dims { batches, rows, columns, summed } = dims;
        let a_factor = match matrix(&a.layout, &batches.0, rows, &summed.0) {
            Some(factor) => factor,
            None => {
                a = self.builder.packed(&a, &[&batches.0[..], rows, &summed.0].concat(), ty)?;
                let again = matrix(&a.layout, &batches.0, rows, &summed.0);
                again.ok_or_else(|| self.builder.unsupported("its first operand cannot be a matrix"))?
            }
        };
        let is_weight = b.constant().is_some() && batches.1.iter().all(|&dim| b.layout.shape[dim] == 1);
        let found = matrix(&b.layout, &batches.1, &summed.1, columns);
        let is_as_it_lies = found.is_some();
        let b_factor = match found {
            Some(factor) => factor,
            None if is_weight => Factor { base: UNSET_OPERAND, row_stride: 0, batch_stride: 0, transposed: true },
            None => {
                b = self.builder.packed(&b, &[&batches.1[..], columns, &summed.1].concat(), ty)?;
                let again = matrix(&b.layout, &batches.1, &summed.1, columns);
                again.ok_or_else(|| self.builder.unsupported("its second operand cannot be a matrix"))?
            }
        };
        Ok(Factors { a, b, a_factor, b_factor, is_weight, is_as_it_lies })
    }

    /// A constant as rows of its columns.
    fn weights(b: &Stored, columns: &[usize], summed: &[usize]) -> Layout {
        let dims = [columns, summed].concat();
        Layout {
            shape: dims.iter().map(|&dim| b.layout.shape[dim]).collect(),
            strides: dims.iter().map(|&dim| b.layout.strides[dim]).collect(),
            offset: b.layout.offset,
        }
    }

    /// What tract has made of a convolution with filters of one element and strides: an image that leaves rows and
    /// columns out, multiplied by a matrix.
    fn strided_convolution(
        &mut self,
        (a, b): (&Stored, &Stored),
        roles: &Roles,
        shape: &[usize],
    ) -> Result<Option<Value>, LowerError> {
        let ([(channel, b_channel)], [column], true) =
            (&roles.summed[..], &roles.columns[..], roles.batches.is_empty())
        else {
            return Ok(None);
        };
        let Some(image) = Strided::of(a, *channel, &roles.rows) else { return Ok(None) };
        if b.constant().is_none() {
            return Ok(None);
        }
        let position = |dim: usize| roles.rows.iter().position(|&row| row == dim).map_or(0, |at| roles.output[1][at]);
        let order: Vec<usize> = image.dims.iter().map(|&dim| position(dim)).chain([roles.output[2][0]]).collect();
        let target = self.builder.tensor(shape, &order, a.ty);
        let k = b.layout.shape[*column];
        let step = Conv {
            input: self.builder.operand(a)?,
            weights: Operand { place: UNSET, ty: a.ty },
            bias: None,
            residual: None,
            output: self.builder.operand(&target)?,
            activation: Activation::None,
            n: a.layout.shape[image.dims[0]],
            size: image.size,
            c: a.layout.shape[*channel],
            k,
            out: [a.layout.shape[image.dims[1]], a.layout.shape[image.dims[2]]],
            kernel: [1, 1],
            strides: [image.step, image.step],
            dilations: [1, 1],
            pads: [0, 0],
            groups: 1,
        };
        let weights = Self::weights(b, &[*column], &[*b_channel]);
        Ok(Some(Pending::new(target, Kind::Conv(step, b_as(b, weights)), k).into()))
    }
}

/// The same constant in another layout.
fn b_as(stored: &Stored, layout: Layout) -> Stored {
    Stored { layout, ..stored.clone() }
}

/// An image of which every `step`th row and column is left.
struct Strided {
    /// Its dimensions for images, rows and columns.
    dims: [usize; 3],
    /// Height and width of the whole image.
    size: [usize; 2],
    step: usize,
}

impl Strided {
    fn of(stored: &Stored, channel: usize, rows: &[usize]) -> Option<Self> {
        let Base::Buffer(..) = stored.base else { return None };
        let layout = &stored.layout;
        let mut spatial: Vec<usize> = rows.iter().copied().filter(|&dim| layout.shape[dim] > 1).collect();
        spatial = layout.by_stride(&spatial);
        let c = signed(layout.shape[channel]);
        let [images, height, width] = match (&spatial[..], rows.len()) {
            (&[images, height, width], 3) => [images, height, width],
            (&[height, width], 3) => [rows.iter().copied().find(|dim| layout.shape[*dim] == 1)?, height, width],
            _ => return None,
        };
        let step = layout.strides[width] / c;
        let line = layout.strides[height] / step.max(1);
        let fits = layout.offset == 0
            && layout.strides[channel] == 1
            && step > 1
            && layout.strides[width] == step * c
            && line % c == 0
            && layout.strides[height] == step * line;
        if !fits {
            return None;
        }
        let out = [layout.shape[height], layout.shape[width]];
        let step = usize::try_from(step).ok()?;
        let least = |out: usize| (out - 1) * step + 1;
        let w = usize::try_from(line / c).ok()?;
        // With one image nobody says how high it is, and nobody needs more than this.
        let h = match layout.shape[images] {
            1 => least(out[0]),
            _ if layout.strides[images] % line == 0 => usize::try_from(layout.strides[images] / line).ok()?,
            _ => return None,
        };
        let is_whole = |size: usize, out: usize| size >= least(out) && (size - 1) / step + 1 == out;
        (is_whole(h, out[0]) && is_whole(w, out[1])).then_some(Self {
            dims: [images, height, width],
            size: [h, w],
            step,
        })
    }
}

/// How a tensor is a matrix for each batch, if it is one; its place is set later.
fn matrix(layout: &Layout, batches: &[usize], rows: &[usize], columns: &[usize]) -> Option<Factor> {
    let (batch_count, batch_stride) = layout.merged(batches)?;
    let (row_count, row_stride) = layout.merged(rows)?;
    let (column_count, column_stride) = layout.merged(columns)?;
    let stride = |stride: i64| usize::try_from(stride).ok();
    let batch_stride = if batch_count == 1 { 0 } else { stride(batch_stride)? };
    let of = |count: usize, own: i64, length: usize, transposed: bool| -> Option<Factor> {
        let row_stride = if count == 1 { length } else { stride(own)? };
        (row_stride >= length).then_some(Factor { base: UNSET_OPERAND, row_stride, batch_stride, transposed })
    };
    let is_dense = column_count == 1 || column_stride == 1;
    if let Some(factor) = of(row_count, row_stride, column_count, false).filter(|_| is_dense) {
        return Some(factor);
    }
    if row_count == 1 || row_stride == 1 {
        return of(column_count, column_stride, row_count, true);
    }
    None
}
