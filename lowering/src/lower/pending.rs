//! Steps that are held back while what follows them may become a part of them: a scale, a bias, what is added, ReLU.

use super::{
    LowerError,
    expression::{Expression, Lazy},
    image,
    layout::{Layout, signed},
    siblings::Columns,
    tensors::Builder,
};
use crate::{
    lower::stored::Stored,
    plan::{Activation, Binary, Conv, Matmul, Norm, Operand, Place, Reduce, Reduction, Step},
};

/// A step that has not been added to the plan.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    /// Where its result will be.
    pub(super) target: Stored,
    pub(super) kind: Kind,
    /// Elements of the result's innermost dimension, over which scales and biases go.
    pub(super) columns: usize,
    /// One number for all columns, or one for each.
    scale: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    residual: Option<Stored>,
    is_relu: bool,
    /// If it is one of several products of the same input: its columns.
    part: Option<Columns>,
}

/// Which step.
#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// Its weights are this constant, of shape `[k, r, s, c / groups]`.
    Conv(Conv, Stored),
    /// Its b is this constant, of shape `[n, k]`; with a flag that says whether the step knows how that lies.
    Weighted(Matmul, Stored, bool),
    Matmul(Matmul),
    Norm(Norm),
    Reduce(Reduce),
}

/// An operand that nobody reads before it is set.
pub(super) const UNSET: Place = Place::Weights(0);

impl Pending {
    pub(super) fn new(target: Stored, kind: Kind, columns: usize) -> Self {
        Self { target, kind, columns, scale: None, bias: None, residual: None, is_relu: false, part: None }
    }

    /// As a part of what it and its siblings are together.
    pub(super) fn with_siblings(self, part: Option<Columns>) -> Self {
        Self { part, ..self }
    }

    pub(super) fn with_bias(mut self, bias: Vec<f32>) -> Self {
        if bias.iter().any(|&value| value != 0.0) {
            self.bias = Some(bias);
        }
        self
    }

    /// The numbers that a constant has for each column, or the one that it has for all.
    fn columns_of(&self, other: &Lazy) -> Option<Vec<f32>> {
        #[allow(clippy::cast_possible_truncation, reason = "it computes with these")]
        if let Some(number) = other.number() {
            return Some(vec![number as f32]);
        }
        let Expression::Leaf(stored) = &*other.expression else { return None };
        let (tensor, _) = stored.constant()?;
        let (own, layout) = (&self.target.layout, &stored.layout);
        let columns = signed(self.columns);
        let varies = |dim: &usize| layout.shape[*dim] > 1 && layout.strides[*dim] != 0;
        let dims: Vec<usize> = (0..layout.rank()).filter(varies).collect();
        // What a reshaped result is combined with may repeat otherwise than its columns do.
        let repeats = |&dim: &usize| columns.checked_rem(own.strides[dim] * signed(own.shape[dim])) == Some(0);
        if !dims.iter().all(repeats) {
            return None;
        }
        let values = image::floats(tensor).ok()?;
        let value = |column: i64| {
            let along = |&dim: &usize| column / own.strides[dim] % signed(own.shape[dim]) * layout.strides[dim];
            usize::try_from(layout.offset + dims.iter().map(along).sum::<i64>()).map(|at| values[at])
        };
        (0..columns).map(|column| value(column).ok()).collect()
    }

    /// Makes `binary` of its result and `other` a part of the step, and says whether it could. With `is_reversed`, the
    /// result is the second operand.
    pub(super) fn absorb(&mut self, binary: Binary, other: &Lazy, is_reversed: bool) -> bool {
        if self.is_relu {
            return false;
        }
        if let Kind::Reduce(step) = &mut self.kind {
            #[allow(clippy::cast_precision_loss, reason = "a length is compared with a rounded one")]
            let mean = 1.0 / step.length as f64;
            let factor = other.number().map(|number| if binary == Binary::Div { 1.0 / number } else { number });
            let is_mean = matches!(binary, Binary::Mul | Binary::Div)
                && !(is_reversed && binary == Binary::Div)
                && step.reduction == Reduction::Sum
                && step.input.ty.is_float()
                && factor.is_some_and(|factor| (factor - mean).abs() <= mean * 1e-6);
            if is_mean {
                step.reduction = Reduction::Mean;
            }
            return is_mean;
        }
        match binary {
            Binary::Max if other.number() == Some(0.0) && !matches!(self.kind, Kind::Norm(_)) => {
                self.is_relu = true;
                true
            }
            Binary::Add | Binary::Sub => self.absorb_sum(binary, other, is_reversed),
            Binary::Mul => self.columns_of(other).is_some_and(|scale| self.absorb_scale(&scale)),
            Binary::Div if !is_reversed => self
                .columns_of(other)
                .is_some_and(|divisor| self.absorb_scale(&divisor.iter().map(|value| 1.0 / value).collect::<Vec<_>>())),
            _ => false,
        }
    }

    fn absorb_sum(&mut self, binary: Binary, other: &Lazy, is_reversed: bool) -> bool {
        if let Some(mut bias) = self.columns_of(other) {
            if binary == Binary::Sub && is_reversed {
                if !self.absorb_scale(&[-1.0]) {
                    return false;
                }
            } else if binary == Binary::Sub {
                bias.iter_mut().for_each(|value| *value = -*value);
            }
            self.bias = Some(zipped(self.bias.take(), &bias, |a, b| a + b, 0.0));
            return true;
        }
        let Expression::Leaf(stored) = &*other.expression else { return false };
        let fits = binary == Binary::Add
            && self.residual.is_none()
            && matches!(self.kind, Kind::Conv(..) | Kind::Weighted(..) | Kind::Matmul(_))
            && stored.ty == self.target.ty
            && stored.layout.offset == 0
            && stored.constant().is_none()
            && stored.layout.is_like(&self.target.layout);
        if fits {
            self.residual = Some(stored.clone());
        }
        fits
    }

    fn absorb_scale(&mut self, scale: &[f32]) -> bool {
        if self.residual.is_some() || (scale.len() > 1 && matches!(self.kind, Kind::Matmul(_))) {
            return false;
        }
        self.scale = Some(zipped(self.scale.take(), scale, |a, b| a * b, 1.0));
        if let Some(bias) = self.bias.take() {
            self.bias = Some(zipped(Some(bias), scale, |a, b| a * b, 1.0));
        }
        true
    }

    /// Another layout of the result, if `map` knows one.
    pub(super) fn mapped(&self, map: &dyn Fn(&Layout) -> Option<Layout>) -> Option<Self> {
        let target = Stored { layout: map(&self.target.layout)?, ..self.target.clone() };
        // What is added lies as the result does in memory, whatever its dimensions are called.
        Some(Self { target, ..self.clone() })
    }

    /// Has a product write its rows into a part of another tensor, and says whether it can.
    pub(super) fn redirect(&mut self, builder: &mut Builder<'_>, part: &Stored) -> Result<bool, LowerError> {
        let (Kind::Weighted(step, ..) | Kind::Matmul(step)) = &mut self.kind else { return Ok(false) };
        let (own, there, columns) = (&self.target.layout, &part.layout, signed(self.columns));
        let real: Vec<usize> = (0..own.rank()).filter(|&dim| own.shape[dim] > 1).collect();
        let (rows, inner): (Vec<usize>, Vec<usize>) = real.into_iter().partition(|&dim| own.strides[dim] >= columns);
        let row_stride = rows.last().map_or(columns, |&dim| there.strides[dim] * columns / own.strides[dim]);
        let fits = own.shape == there.shape
            && self.part.is_none()
            && step.batches == 1
            && self.residual.is_none()
            && self.target.ty == part.ty
            && builder.is_aligned(part, 16)
            && row_stride >= columns
            && inner.iter().all(|&dim| own.strides[dim] == there.strides[dim])
            && rows.iter().all(|&dim| there.strides[dim] * columns == own.strides[dim] * row_stride);
        if let Some(row_stride) = usize::try_from(row_stride).ok().filter(|_| fits) {
            step.output.base = builder.operand(part)?;
            step.output.row_stride = row_stride;
            self.target = part.clone();
        }
        Ok(fits)
    }

    /// Adds the step to the plan.
    pub(super) fn flush(mut self, builder: &mut Builder<'_>) -> Result<Stored, LowerError> {
        let whole = |numbers: &[f32]| numbers.iter().copied().cycle().take(self.columns).collect::<Vec<_>>();
        let (scale, ty) = (self.scale.take(), self.target.ty);
        let bias_of = |builder: &mut Builder<'_>| -> Result<Option<Operand>, LowerError> {
            self.bias.as_deref().map(|bias| builder.vector(&whole(bias), ty)).transpose()
        };
        let residual = self.residual.as_ref().map(|stored| builder.operand(stored)).transpose()?;
        let activation = if self.is_relu { Activation::Relu } else { Activation::None };
        let step = match self.kind {
            Kind::Conv(step, kernel) => {
                let inner = step.kernel[0] * step.kernel[1] * (step.c / step.groups);
                let weights = weights(builder, &kernel, scale.as_deref(), inner)?;
                Step::Conv(Conv { weights, bias: bias_of(builder)?, residual, activation, ..step })
            }
            Kind::Weighted(mut step, constant, is_as_it_lies) => {
                if let Some([alpha]) = scale.as_deref() {
                    step.alpha *= alpha;
                }
                if let Some(part) = self.part {
                    let scale = scale.filter(|scale| scale.len() > 1);
                    let bias = self.bias.as_deref().map(whole);
                    builder.defer(Matmul { residual, activation, ..step }, part, (constant, scale, bias));
                    return Ok(self.target);
                }
                let columns = scale.as_deref().filter(|scale| scale.len() > 1);
                if is_as_it_lies && columns.is_none() {
                    step.b.base = builder.operand(&constant)?;
                } else {
                    step.b.base = weights(builder, &constant, columns, step.k)?;
                    (step.b.transposed, step.b.row_stride) = (true, step.k);
                }
                Step::Matmul(Matmul { bias: bias_of(builder)?, residual, activation, ..step })
            }
            Kind::Matmul(mut step) => {
                step.alpha *= scale.map_or(1.0, |scale| scale[0]);
                Step::Matmul(Matmul { bias: bias_of(builder)?, residual, activation, ..step })
            }
            Kind::Norm(step) => {
                let scale = scale.map(|scale| builder.vector(&whole(&scale), ty)).transpose()?;
                Step::Norm(Norm { scale, shift: bias_of(builder)?, ..step })
            }
            Kind::Reduce(step) => Step::Reduce(step),
        };
        builder.steps.push(step);
        Ok(self.target)
    }
}

/// The operand of weights whose rows of `inner` elements are scaled.
fn weights(
    builder: &mut Builder<'_>,
    kernel: &Stored,
    scale: Option<&[f32]>,
    inner: usize,
) -> Result<Operand, LowerError> {
    let constant = kernel.constant().expect("weights are constants");
    let offset = match scale {
        Some(scale) => builder.image.scaled(constant, kernel.ty, &kernel.layout, (scale, inner))?,
        None => builder.image.constant(constant, kernel.ty, Some(&kernel.layout))?,
    };
    Ok(Operand { place: Place::Weights(offset), ty: kernel.ty })
}

/// Two vectors number by number, where one number stands for any length.
fn zipped(a: Option<Vec<f32>>, b: &[f32], function: impl Fn(f32, f32) -> f32, neutral: f32) -> Vec<f32> {
    let a = a.unwrap_or_else(|| vec![neutral]);
    (0..a.len().max(b.len())).map(|index| function(a[index % a.len()], b[index % b.len()])).collect()
}
