//! Attention as one step, with views into the projections that it reads.

use tract_onnx::prelude::*;

use super::{
    LowerError,
    expression::{Expression, Lazy},
    image,
    layout::Layout,
    patterns::{AttentionPattern, Change},
    walk::{Value, Walk, spread},
};
use crate::{
    lower::stored::Stored,
    plan::{Attention, Binary, Numbers, Step, View},
};

impl Walk<'_> {
    pub(super) fn attention(&mut self, pattern: &AttentionPattern, shape: &[usize]) -> Result<Value, LowerError> {
        let query = self.vectors(&pattern.query)?;
        let key = self.vectors(&pattern.key)?;
        let value = self.vectors(&pattern.value)?;
        let mut scores = Scores { scale: 1.0, mask: None, is_causal: false };
        for change in &pattern.changes {
            self.change(change, pattern, &mut scores)?;
        }
        let mask = match &scores.mask {
            Some(mask) => Some(self.mask(mask, pattern)?),
            None => None,
        };
        let dims = &pattern.output;
        // Positions lie outside of heads, so that heads are merged where they lie.
        let order: Vec<usize> = match dims[..] {
            [batch, head, position, width] => vec![batch, position, head, width],
            _ => dims.clone(),
        };
        let target = self.builder.tensor(shape, &order, query.ty);
        let length =
            |stored: &Stored, dims: &[usize], from_last: usize| stored.layout.shape[dims[dims.len() - from_last]];
        let (query_dims, key_dims) = (&pattern.query.1, &pattern.key.1);
        let batches: Vec<usize> =
            query_dims[..query_dims.len() - 2].iter().map(|&dim| query.layout.shape[dim]).collect();
        let step = Attention {
            query: self.vector_view(&query, query_dims)?,
            key: self.vector_view(&key, key_dims)?,
            value: self.vector_view(&value, &pattern.value.1)?,
            mask,
            output: self.vector_view(&target, dims)?,
            batch: batches.first().copied().unwrap_or(1),
            heads: batches.get(1).copied().unwrap_or(1),
            queries: length(&query, query_dims, 2),
            keys: length(&key, key_dims, 2),
            width: length(&query, query_dims, 1),
            scale: scores.scale,
            is_causal: scores.is_causal,
        };
        self.builder.steps.push(Step::Attention(step));
        Ok(Value::Stored(target))
    }

    /// A tensor whose vectors are dense.
    fn vectors(&mut self, (outlet, dims): &(OutletId, Vec<usize>)) -> Result<Stored, LowerError> {
        let stored = self.stored(*outlet)?;
        let width = dims[dims.len() - 1];
        let ty = self.builder.float();
        let is_dense = stored.layout.strides[width] == 1 || stored.layout.shape[width] == 1;
        if is_dense && stored.ty == ty && stored.constant().is_none() && self.builder.is_aligned(&stored, 16) {
            return Ok(stored);
        }
        let mut order: Vec<usize> = stored.layout.order().into_iter().filter(|&dim| dim != width).collect();
        order.push(width);
        self.packed(*outlet, &order, ty)
    }

    /// Strides over batch, head and position.
    fn vector_view(&mut self, stored: &Stored, dims: &[usize]) -> Result<View, LowerError> {
        let stride = |dim: usize| stored.layout.strides[dim];
        let strides = match dims[..] {
            [batch, head, position, _] => vec![stride(batch), stride(head), stride(position)],
            [batch, position, _] => vec![stride(batch), 0, stride(position)],
            _ => vec![0, 0, stride(dims[0])],
        };
        Ok(View { base: self.builder.operand(stored)?, strides })
    }

    /// The mask over batch, head, query and key.
    fn mask(&mut self, mask: &Lazy, pattern: &AttentionPattern) -> Result<View, LowerError> {
        let stored = match &*mask.expression {
            Expression::Leaf(stored) => stored.clone(),
            _ => self.builder.store_natural(mask)?,
        };
        let shape = self.shape_of(pattern.scores.0)?;
        let layout = stored.layout.broadcast(&shape);
        let view = self.builder.view(&Stored { layout, ..stored })?;
        let strides = match pattern.scores.1[..] {
            [batch, head, query, key] => [batch, head, query, key].map(|dim| view.strides[dim]).to_vec(),
            [batch, query, key] => vec![view.strides[batch], 0, view.strides[query], view.strides[key]],
            ref dims => vec![0, 0, view.strides[dims[0]], view.strides[dims[1]]],
        };
        Ok(View { strides, ..view })
    }

    fn change(&mut self, change: &Change, pattern: &AttentionPattern, scores: &mut Scores) -> Result<(), LowerError> {
        match *change {
            Change::Scale(factor) => {
                scores.scale *= factor;
                if let Some(mask) = scores.mask.take() {
                    let factor = Lazy { expression: Expression::Number(f64::from(factor)).into(), ..mask.clone() };
                    scores.mask = Some(combined(Binary::Mul, &mask, &factor));
                }
            }
            Change::Add(outlet) => {
                if self.is_causal(outlet, pattern, &|value| value <= -1e4, &|value| value == 0.0)? {
                    scores.is_causal = true;
                    return Ok(());
                }
                let added = self.lazy(outlet)?;
                scores.mask = Some(match scores.mask.take() {
                    Some(mask) => combined(Binary::Add, &mask, &added),
                    None => added,
                });
            }
            Change::Replace { condition, by, is_kept } => {
                let (hidden, seen) = if is_kept { (0.0, 1.0) } else { (1.0, 0.0) };
                if self.is_causal(condition, pattern, &|value| value == hidden, &|value| value == seen)? {
                    scores.is_causal = true;
                    return Ok(());
                }
                let (condition, by) = (self.condition(condition)?, self.lazy(by)?);
                let none = Lazy { expression: Expression::Number(0.0).into(), numbers: None, ..by.clone() };
                let before = scores.mask.take().unwrap_or(none);
                let shape = common(&common(&condition.shape, &before.shape), &by.shape);
                let [condition, before, by] = [&condition, &before, &by].map(|it| widened(it, &shape).expression);
                let (first, second) = if is_kept { (before, by) } else { (by, before) };
                let expression = Expression::Select(condition, first, second).into();
                let ty = self.builder.float();
                scores.mask = Some(Lazy { shape, expression, numbers: Some(Numbers::Float), ty });
            }
        }
        Ok(())
    }

    /// A condition that floating-point numbers can be chosen by.
    fn condition(&mut self, outlet: OutletId) -> Result<Lazy, LowerError> {
        let lazy = self.lazy(outlet)?;
        if lazy.numbers == Some(Numbers::Integer) {
            let stored = self.builder.store_natural(&lazy)?;
            self.insert(outlet, stored.clone());
            return Ok(Lazy::leaf(stored));
        }
        Ok(lazy)
    }

    /// Whether a constant hides exactly those keys that come after their query.
    fn is_causal(
        &mut self,
        outlet: OutletId,
        pattern: &AttentionPattern,
        is_hidden: &dyn Fn(f32) -> bool,
        is_seen: &dyn Fn(f32) -> bool,
    ) -> Result<bool, LowerError> {
        let shape = self.shape_of(pattern.scores.0)?;
        let found = self.shape_of(outlet)?;
        let &[.., query, key] = &pattern.scores.1[..] else { return Ok(false) };
        let is_square =
            (0..shape.len()).all(|dim| found[dim] == if dim == query || dim == key { shape[dim] } else { 1 });
        let Value::Stored(stored) = self.take(outlet)? else { return Ok(false) };
        let Some((tensor, _)) = stored.constant().filter(|_| is_square && shape[query] <= shape[key]) else {
            return Ok(false);
        };
        let layout = Layout {
            shape: vec![shape[query], shape[key]],
            strides: vec![stored.layout.strides[query], stored.layout.strides[key]],
            offset: stored.layout.offset,
        };
        let Some(tensor) = spread(tensor, &layout) else { return Ok(false) };
        let values = image::floats(&tensor)?;
        let more = shape[key] - shape[query];
        let rows = values.chunks_exact(shape[key]).enumerate();
        Ok(rows.into_iter().all(|(row, values)| {
            values
                .iter()
                .enumerate()
                .all(|(at, &value)| if at <= row + more { is_seen(value) } else { is_hidden(value) })
        }))
    }
}

/// What becomes of scores before their softmax.
struct Scores {
    scale: f32,
    mask: Option<Lazy>,
    is_causal: bool,
}

fn common(a: &[usize], b: &[usize]) -> Vec<usize> {
    a.iter().zip(b).map(|(&a, &b)| a.max(b)).collect()
}

fn widened(lazy: &Lazy, shape: &[usize]) -> Lazy {
    lazy.mapped(shape, &|layout| Some(layout.broadcast(shape))).expect("any layout can be repeated")
}

fn combined(binary: Binary, a: &Lazy, b: &Lazy) -> Lazy {
    let shape = common(&a.shape, &b.shape);
    let (first, second) = (widened(a, &shape).expression, widened(b, &shape).expression);
    Lazy {
        shape,
        expression: Expression::Binary(binary, first, second).into(),
        numbers: Some(Numbers::Float),
        ty: a.ty,
    }
}
