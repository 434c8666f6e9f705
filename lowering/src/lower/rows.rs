//! Reductions, softmax and normalisation.

use tract_onnx::{
    prelude::*,
    tract_core::ops::nn::{Reduce as ReduceOp, Reducer, RmsNorm, Softmax as SoftmaxOp, SoftmaxKind},
};

use super::{
    LowerError, image,
    patterns::NormPattern,
    pending::{Kind, Pending},
    shapes::run_in,
    walk::{Value, Walk},
};
use crate::{
    lower::stored::Stored,
    plan::{Norm, Reduce, Reduction, Softmax, Step},
};

impl Walk<'_> {
    pub(super) fn reduce(&mut self, node: &TypedNode, op: &ReduceOp) -> Result<Value, LowerError> {
        let reduction = match op.reducer {
            Reducer::Sum => Reduction::Sum,
            Reducer::Prod => Reduction::Product,
            Reducer::Max => Reduction::Max,
            Reducer::Min => Reduction::Min,
            Reducer::MeanOfSquares => Reduction::MeanOfSquares,
            Reducer::ArgMax(false) => Reduction::ArgMax,
            Reducer::ArgMin(false) => Reduction::ArgMin,
            other => return Err(self.missing_operator(&format!("Reduce<{other:?}>"))),
        };
        let stored = self.stored(node.inputs[0])?;
        let mut order = stored.layout.order();
        if run_in(&stored.layout, &order, &op.axes).is_none() || !stored.layout.is_packed(&order) {
            order.retain(|dim| !op.axes.contains(dim));
            order.extend(stored.layout.by_stride(&op.axes));
        }
        let input_type = if stored.ty.is_float() { self.builder.float() } else { stored.ty };
        let input = self.packed(node.inputs[0], &order, input_type)?;
        let ty = self.builder.type_of(node.outputs[0].fact.datum_type)?;
        let mut shape = input.layout.shape.clone();
        op.axes.iter().for_each(|&dim| shape[dim] = 1);
        let target = self.builder.tensor(&shape, &order, ty);
        let real: Vec<usize> = order.iter().copied().filter(|&dim| input.layout.shape[dim] != 1).collect();
        let Some(first) = run_in(&input.layout, &order, &op.axes) else { return Err(self.missing(node)) };
        let count = real.iter().filter(|dim| op.axes.contains(dim)).count();
        let product = |dims: &[usize]| dims.iter().map(|&dim| input.layout.shape[dim]).product::<usize>();
        let step = Reduce {
            input: self.builder.operand(&input)?,
            output: self.builder.operand(&target)?,
            reduction,
            outer: product(&real[..first]),
            length: product(&real[first..first + count]),
            inner: product(&real[first + count..]),
        };
        Ok(Pending::new(target, Kind::Reduce(step), 1).into())
    }

    /// A tensor packed with these dimensions as its innermost ones: its rows, and their length.
    fn rows(&mut self, outlet: OutletId, axes: &[usize]) -> Result<(Stored, Vec<usize>, usize), LowerError> {
        let stored = self.stored(outlet)?;
        let mut order: Vec<usize> = stored.layout.order().into_iter().filter(|dim| !axes.contains(dim)).collect();
        order.extend(stored.layout.by_stride(axes));
        let packed = self.packed(outlet, &order, self.builder.float())?;
        let columns = axes.iter().map(|&dim| packed.layout.shape[dim]).product();
        Ok((packed, order, columns))
    }

    pub(super) fn softmax(&mut self, node: &TypedNode, op: &SoftmaxOp) -> Result<Value, LowerError> {
        if op.quant_output_dt.is_some() {
            return Err(self.missing(node));
        }
        let (input, order, columns) = self.rows(node.inputs[0], &op.axes)?;
        let target = self.builder.tensor(&input.layout.shape, &order, input.ty);
        let step = Softmax {
            input: self.builder.operand(&input)?,
            output: self.builder.operand(&target)?,
            rows: input.layout.elements() / columns,
            columns,
            scale: 1.0,
            is_log: op.kind == SoftmaxKind::LogSoftmax,
        };
        self.builder.steps.push(Step::Softmax(step));
        Ok(Value::Stored(target))
    }

    pub(super) fn rms_norm(&mut self, node: &TypedNode, op: &RmsNorm) -> Result<Value, LowerError> {
        let epsilon = image::floats(&op.eps)?[0];
        let (input, axes) = (node.inputs[0], vec![op.axis]);
        self.norm(&NormPattern { input, axes, epsilon, is_rms: true })
    }

    pub(super) fn norm(&mut self, pattern: &NormPattern) -> Result<Value, LowerError> {
        let (input, order, columns) = self.rows(pattern.input, &pattern.axes)?;
        let target = self.builder.tensor(&input.layout.shape, &order, input.ty);
        let step = Norm {
            input: self.builder.operand(&input)?,
            residual: None,
            sum: None,
            scale: None,
            shift: None,
            output: self.builder.operand(&target)?,
            rows: input.layout.elements() / columns,
            columns,
            epsilon: pattern.epsilon,
            is_rms: pattern.is_rms,
        };
        Ok(Pending::new(target, Kind::Norm(step), columns).into())
    }
}
