//! Operators that move elements: other views of a tensor where strides can say it, otherwise copies.

use tract_onnx::{
    prelude::*,
    tract_core::internal::DimLike,
    tract_core::ops::{
        array::{Pad, PadMode, Tile},
        change_axes::AxisOp,
        nn::NearestUpsample,
    },
};

use super::{
    LowerError,
    expression::{Expression, Lazy},
    image,
    layout::{Layout, signed},
    tensors::natural_order,
    walk::{Value, Walk},
};
use crate::{
    lower::stored::Stored,
    plan::{Gather, Step, Type},
};

impl Walk<'_> {
    pub(super) fn axis(&mut self, node: &TypedNode, op: &AxisOp) -> Result<Value, LowerError> {
        let shape = self.shape_of(node.id.into())?;
        match op {
            AxisOp::Add(at) => self.view(node, &|layout| Some(layout.with_dim(*at))),
            AxisOp::Rm(at) => self.view(node, &|layout| Some(layout.without_dim(*at))),
            AxisOp::Move(from, to) => self.view(node, &|layout| Some(layout.moved(*from, *to))),
            AxisOp::Reshape(..) => self.view(node, &|layout| layout.reshaped(&shape)),
        }
    }

    /// The whole tensor again and again.
    pub(super) fn tile(&mut self, node: &TypedNode, op: &Tile) -> Result<Value, LowerError> {
        let times: Result<Vec<usize>, _> = op.multipliers.iter().map(DimLike::to_usize).collect();
        let times = times.map_err(|_| self.builder.unsupported("its repeats are not numbers"))?;
        self.repeated(node, &times, false)
    }

    /// Each element again and again.
    pub(super) fn upsample(&mut self, node: &TypedNode, op: &NearestUpsample) -> Result<Value, LowerError> {
        self.repeated(node, &op.scales, true)
    }

    /// Repeats are dimensions of their own, outside of those that they repeat or inside, and then one with them.
    fn repeated(&mut self, node: &TypedNode, times: &[usize], is_inside: bool) -> Result<Value, LowerError> {
        let shape = self.shape_of(node.id.into())?;
        let lazy = self.lazy(node.inputs[0])?;
        let pair = |repeat: usize, length: usize| if is_inside { [length, repeat] } else { [repeat, length] };
        let lengths = times.iter().zip(&lazy.shape);
        let spread: Vec<usize> = lengths.flat_map(|(&times, &length)| pair(times, length)).collect();
        let mapped = lazy.mapped(&spread, &|layout| {
            let apart: Vec<usize> = layout.shape.iter().flat_map(|&length| pair(1, length)).collect();
            Some(layout.reshaped(&apart)?.broadcast(&spread))
        });
        let Some(mapped) = mapped else { return Err(self.missing(node)) };
        let order: Vec<usize> = natural_order(&lazy).into_iter().flat_map(|dim| [2 * dim, 2 * dim + 1]).collect();
        let stored = self.builder.store(&mapped, &order, lazy.ty)?;
        let Some(layout) = stored.layout.reshaped(&shape) else { return Err(self.missing(node)) };
        Ok(Value::Stored(Stored { layout, ..stored }))
    }

    /// Parts next to each other. Each is written where it will be, and once: what begins as a longer one does is a part
    /// of that, as in DenseNet.
    pub(super) fn concat(&mut self, node: &TypedNode, axis: usize) -> Result<Value, LowerError> {
        let leader = self.joints.leader(node.id);
        let (target, written) = match self.joints.known(leader) {
            Some(known) => known,
            None => (self.joint(leader, axis)?, 0),
        };
        let mut start = 0;
        for (index, &input) in node.inputs.iter().enumerate() {
            let length = self.shape_of(input)?[axis];
            if index >= written {
                let layout = target.layout.sliced(axis, start, length, 1);
                self.write(input, &Stored { layout, ..target.clone() })?;
            }
            start += length;
        }
        self.joints.remember(leader, target.clone(), node.inputs.len().max(written));
        let layout = target.layout.sliced(axis, 0, start, 1);
        Ok(Value::Stored(Stored { layout, ..target }))
    }

    /// Memory for the longest of the joints that begin alike.
    fn joint(&mut self, leader: usize, axis: usize) -> Result<Stored, LowerError> {
        let node = self.graph.node(leader);
        let shape = self.shape_of(leader.into())?;
        let ty = self.builder.type_of(node.outputs[0].fact.datum_type)?;
        let mut order: Vec<usize> = (0..shape.len()).collect();
        let mut longest = 0;
        for &input in &node.inputs {
            let length = self.shape_of(input)?[axis];
            if let Some(found) = self.order_of(input).filter(|_| length > longest) {
                (order, longest) = (found, length);
            }
        }
        Ok(self.builder.tensor(&shape, &order, ty))
    }

    /// Writes a tensor to where it is a part of another one; products do so themselves.
    fn write(&mut self, input: OutletId, part: &Stored) -> Result<(), LowerError> {
        if let Some(mut pending) = self.take_pending(input)? {
            if pending.redirect(&mut self.builder, part)? {
                return pending.flush(&mut self.builder).map(|_| ());
            }
            self.put_back(input, Value::Pending(pending));
        }
        let lazy = self.lazy(input)?;
        self.builder.compute(&lazy, part)
    }

    pub(super) fn pad(&mut self, node: &TypedNode, op: &Pad) -> Result<Value, LowerError> {
        // tract keeps negative ones as what they are in unsigned numbers.
        if op.pads.iter().any(|&(before, after)| i64::try_from(before.max(after)).is_err()) {
            return Err(self.builder.unsupported("its pads are negative: slice the tensor instead"));
        }
        let lazy = self.lazy(node.inputs[0])?;
        let ty = self.builder.type_of(node.outputs[0].fact.datum_type)?;
        match &op.mode {
            PadMode::Constant(value) => {
                let value = image::floats(value)?.first().copied().unwrap_or(0.0);
                self.pad_constant(&lazy, op, (ty, f64::from(value)))
            }
            mode => {
                let mut stored = match &*lazy.expression {
                    Expression::Leaf(stored) => stored.clone(),
                    _ => self.builder.store_natural(&lazy)?,
                };
                let is_edge = matches!(mode, PadMode::Edge);
                for (dim, &pads) in op.pads.iter().enumerate().filter(|(_, pads)| **pads != (0, 0)) {
                    stored = self.pad_mirrored(&stored, dim, pads, is_edge)?;
                }
                Ok(Value::Stored(stored))
            }
        }
    }

    fn pad_constant(&mut self, lazy: &Lazy, op: &Pad, (ty, value): (Type, f64)) -> Result<Value, LowerError> {
        let shape: Vec<usize> = lazy.shape.iter().zip(&op.pads).map(|(length, (a, b))| a + length + b).collect();
        let target = self.builder.tensor(&shape, &natural_order(lazy), ty);
        let fill = Expression::Number(value).into();
        self.builder.compute(&Lazy { shape, expression: fill, numbers: None, ty }, &target)?;
        let mut layout = target.layout.clone();
        for (dim, &(before, _)) in op.pads.iter().enumerate() {
            layout = layout.sliced(dim, before, lazy.shape[dim], 1);
        }
        self.builder.compute(lazy, &Stored { layout, ..target.clone() })?;
        Ok(Value::Stored(target))
    }

    /// One dimension longer on both sides by its last elements again and again, or by those before them backwards.
    fn pad_mirrored(
        &mut self,
        stored: &Stored,
        dim: usize,
        (before, after): (usize, usize),
        is_edge: bool,
    ) -> Result<Stored, LowerError> {
        let length = stored.layout.shape[dim];
        if !is_edge && before.max(after) >= length {
            return Err(self.builder.unsupported("a pad that mirrors is longer than what it mirrors"));
        }
        let mut shape = stored.layout.shape.clone();
        shape[dim] += before + after;
        let target = self.builder.tensor(&shape, &stored.layout.order(), stored.ty);
        let step = if is_edge { 0 } else { -1 };
        let (head, tail) = if is_edge { (0, length - 1) } else { (before, length.saturating_sub(2)) };
        let parts = [(head, before, step, 0), (0, length, 1, before), (tail, after, step, before + length)];
        for (from, count, step, to) in parts.into_iter().filter(|part| part.1 > 0) {
            let source = Stored { layout: stored.layout.sliced(dim, from, count, step), ..stored.clone() };
            let part = Stored { layout: target.layout.sliced(dim, to, count, 1), ..target.clone() };
            self.builder.compute(&Lazy::leaf(source), &part)?;
        }
        Ok(target)
    }

    /// Rows by their indexes; by one that is known, a slice.
    pub(super) fn gather(&mut self, node: &TypedNode, axis: usize) -> Result<Value, LowerError> {
        let (data, indices) = (node.inputs[0], node.inputs[1]);
        let (shape, indices_shape) = (self.shape_of(data)?, self.shape_of(indices)?);
        let output_shape = self.shape_of(node.id.into())?;
        let index = self.lazy(indices)?;
        if let Some(number) = index.number().filter(|_| index.shape.iter().product::<usize>() == 1) {
            #[allow(clippy::cast_possible_truncation, reason = "it was an integer")]
            let at = if number < 0.0 { number as i64 + signed(shape[axis]) } else { number as i64 };
            let at = usize::try_from(at).ok().filter(|&at| at < shape[axis]);
            let at = at.ok_or_else(|| self.builder.unsupported("its index is out of range"))?;
            return self.stored_view(node, &|layout| layout.sliced(axis, at, 1, 1).reshaped(&output_shape));
        }
        let index_type = if index.ty == Type::I32 { Type::I32 } else { Type::I64 };
        let order: Vec<usize> = (0..indices_shape.len()).collect();
        let is_constant = matches!(&*index.expression, Expression::Leaf(stored) if stored.constant().is_some());
        let index = self.packed(indices, &order, index_type)?;
        let count = indices_shape.iter().product::<usize>();
        let indices_per_task = if is_constant { 0 } else { self.indices_per_task(&indices_shape)? };
        let order: Vec<usize> = (0..shape.len()).collect();
        let ty = self.builder.type_of(self.fact(data)?.datum_type)?;
        let input = self.packed(data, &order, ty)?;
        let target = self.builder.tensor(&output_shape, &(0..output_shape.len()).collect::<Vec<_>>(), ty);
        let step = Gather {
            input: self.builder.operand(&input)?,
            indices: self.builder.operand(&index)?,
            output: self.builder.operand(&target)?,
            outer: shape[..axis].iter().product(),
            length: shape[axis],
            inner: shape[axis + 1..].iter().product(),
            count,
            indices_per_task,
        };
        self.builder.has_faults |= indices_per_task > 0;
        self.builder.steps.push(Step::Gather(step));
        Ok(Value::Stored(target))
    }

    /// How many indexes in a row are of one task.
    fn indices_per_task(&self, shape: &[usize]) -> Result<usize, LowerError> {
        let batch = self.builder.batch;
        let count = shape.iter().product::<usize>();
        if batch == 1 || shape.first().is_some_and(|first| first % batch == 0) {
            return Ok(count / batch);
        }
        Err(self.builder.unsupported("its indexes do not have the batch as their first dimension"))
    }
}

/// The position in `order` of the first of some dimensions, and whether they follow each other there, lengths of one
/// left out.
pub(super) fn run_in(layout: &Layout, order: &[usize], dims: &[usize]) -> Option<usize> {
    let real: Vec<usize> = order.iter().copied().filter(|&dim| layout.shape[dim] != 1).collect();
    let inside = |dim: &usize| dims.contains(dim);
    let first = real.iter().position(inside).unwrap_or(real.len());
    let count = real.iter().filter(|dim| inside(dim)).count();
    real[first..].iter().take(count).all(inside).then_some(first)
}
