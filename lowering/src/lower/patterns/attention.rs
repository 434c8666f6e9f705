//! Attention: two products, with a softmax of the first one's result between them.

use tract_onnx::{
    prelude::*,
    tract_core::{
        internal::{DimLike, InOut},
        ops::{
            einsum::EinSum,
            logic::Iff,
            nn::{Softmax, SoftmaxKind},
        },
    },
};

use super::{AttentionPattern, Change, Finder};
use crate::plan::ATTENTION_WIDTH_MAX;

/// The two products, and where keys and weights are among their operands.
struct Products<'a> {
    first: &'a TypedNode,
    second: &'a TypedNode,
    /// The operand of the first that has the keys.
    keys: usize,
    /// The operand of the second that the softmax is.
    weights: usize,
    /// The dimension of the scores that the softmax goes over.
    key_dim: usize,
}

/// What one dimension of a product is in its operands and in its result; of a diagonal nothing is known.
fn dims_of(node: &TypedNode, io: InOut, dim: usize) -> Option<[Option<usize>; 3]> {
    let axis = node.op_as::<EinSum>()?.axes.axis((io, dim)).ok()?;
    let one = |dims: &TVec<usize>| if dims.len() > 1 { None } else { Some(dims.first().copied()) };
    Some([one(&axis.inputs[0])?, one(&axis.inputs[1])?, one(&axis.outputs[0])?])
}

impl<'a> Finder<'a> {
    pub(super) fn attention(&mut self, last: usize) -> Option<AttentionPattern> {
        let second = self.graph.node(last);
        second.op_as::<EinSum>().filter(|_| second.inputs.len() == 2)?;
        let weights = (0..2).find(|&slot| self.node(second.inputs[slot]).op_is::<Softmax>())?;
        let softmax_node = self.node(second.inputs[weights]);
        let softmax = softmax_node.op_as::<Softmax>().filter(|op| op.kind == SoftmaxKind::Softmax)?;
        let [key_dim] = softmax.axes[..] else { return None };
        let mut changes = Vec::new();
        let scores = self.scores(softmax_node.inputs[0], &mut changes, 0)?;
        changes.reverse();
        let first = self.node(scores);
        let keys = (0..2).find(|&slot| {
            let dims = dims_of(first, InOut::Out(0), key_dim);
            dims.is_some_and(|dims| dims[slot].is_some() && dims[1 - slot].is_none())
        })?;
        let pattern = self.matched(&Products { first, second, keys, weights, key_dim }, changes)?;
        self.inner.extend([softmax_node.id, first.id]);
        self.fits(&pattern).then_some(pattern)
    }

    /// The dimensions of all tensors, if they are those of attention.
    fn matched(&self, products: &Products<'a>, changes: Vec<Change>) -> Option<AttentionPattern> {
        let &Products { first, second, keys, weights, key_dim } = products;
        let scores = OutletId::from(first.id);
        let (mut query, mut key, mut value) = (Vec::new(), Vec::new(), Vec::new());
        let (mut output, mut batches, mut queries) = (Vec::new(), Vec::new(), Vec::new());
        for position in 0..self.graph.outlet_fact(scores).ok()?.rank() {
            let before = dims_of(first, InOut::Out(0), position)?;
            let after = dims_of(second, InOut::In(weights), position)?;
            match (before[1 - keys], before[keys], after[1 - weights], after[2]) {
                (Some(q), Some(k), Some(v), Some(o)) => {
                    for (dims, dim) in [(&mut query, q), (&mut key, k), (&mut value, v), (&mut output, o)] {
                        dims.push(dim);
                    }
                    batches.push(position);
                }
                (Some(q), None, None, Some(o)) => queries.push((position, q, o)),
                (None, Some(_), Some(_), None) if position == key_dim => {}
                _ => return None,
            }
        }
        let [(query_position, query_dim, output_dim)] = queries[..] else { return None };
        query.push(query_dim);
        output.push(output_dim);
        key.push(dims_of(first, InOut::Out(0), key_dim)?[keys]?);
        value.push(dims_of(second, InOut::In(weights), key_dim)?[1 - weights]?);
        batches.extend([query_position, key_dim]);
        let outlets = [first.inputs[1 - keys], first.inputs[keys], second.inputs[1 - weights], second.id.into()];
        let all = [&mut query, &mut key, &mut value, &mut output];
        for (outlet, dims) in outlets.into_iter().zip(all) {
            dims.push(self.rest(outlet, dims)?);
        }
        // The last dimensions of queries and keys are summed over, those of values stay.
        let summed = dims_of(first, InOut::In(1 - keys), *query.last()?)?;
        let kept = dims_of(second, InOut::In(1 - weights), *value.last()?)?;
        let is_attention =
            summed[keys] == key.last().copied() && summed[2].is_none() && kept[2] == output.last().copied();
        is_attention.then_some(AttentionPattern {
            query: (outlets[0], query),
            key: (outlets[1], key),
            value: (outlets[2], value),
            output,
            scores: (scores, batches),
            changes,
        })
    }

    /// Whether there is a step for it: vectors are not too long, and nothing is repeated for several heads.
    fn fits(&self, pattern: &AttentionPattern) -> bool {
        let length = |outlet: OutletId, dim: usize| self.graph.outlet_fact(outlet).ok()?.shape[dim].to_usize().ok();
        let AttentionPattern { query, key, value, scores, .. } = pattern;
        let count = query.1.len() - 2;
        let is_whole = |at: usize| {
            let whole = length(scores.0, scores.1[at]);
            [query, key, value].into_iter().all(|(outlet, dims)| length(*outlet, dims[at]) == whole)
        };
        let width = length(query.0, query.1[count + 1]);
        count <= 2
            && (0..count).all(is_whole)
            && width.is_some_and(|width| width <= ATTENTION_WIDTH_MAX)
            && width == length(value.0, value.1[count + 1])
    }

    /// The one dimension that is not among these.
    fn rest(&self, outlet: OutletId, dims: &[usize]) -> Option<usize> {
        let rank = self.graph.outlet_fact(outlet).ok()?.rank();
        let rest: Vec<usize> = (0..rank).filter(|dim| !dims.contains(dim)).collect();
        if let [rest] = rest[..] { Some(rest) } else { None }
    }

    /// The product that a tensor of scores comes from, and what was done with it, the last thing first.
    fn scores(&mut self, outlet: OutletId, changes: &mut Vec<Change>, depth: usize) -> Option<OutletId> {
        let node = self.node(outlet);
        let fact = |outlet| self.graph.outlet_fact(outlet).ok();
        if let Some(op) = node.op_as::<EinSum>() {
            let variable = node.inputs.iter().all(|&input| fact(input).is_some_and(|fact| fact.konst.is_none()));
            return (op.axes.input_count() == 2 && variable).then_some(outlet);
        }
        if depth > 6 || fact(outlet)?.konst.is_some() {
            return None;
        }
        let (before, known) = (self.inner.clone(), changes.len());
        let shape = fact(outlet)?.shape.clone();
        let candidates: Vec<(OutletId, Change)> = if let Some((x, divisor)) = self.with_scalar(outlet, "Div") {
            vec![(x, Change::Scale(1.0 / divisor))]
        } else if let Some((x, factor)) = self.with_scalar(outlet, "Mul") {
            vec![(x, Change::Scale(factor))]
        } else if let Some((a, b)) = self.binary(outlet, "Add") {
            vec![(a, Change::Add(b)), (b, Change::Add(a))]
        } else if node.op_is::<Iff>() {
            let [condition, a, b] = node.inputs[..] else { return None };
            // What takes the place of scores is far below all others, or the sum with them would not do.
            let far = |outlet| self.scalar(outlet).is_some_and(|value| value <= -1e4);
            let kept = far(b).then_some((a, Change::Replace { condition, by: b, is_kept: true }));
            let replaced = far(a).then_some((b, Change::Replace { condition, by: a, is_kept: false }));
            kept.into_iter().chain(replaced).collect()
        } else {
            return None;
        };
        for (x, change) in candidates {
            if fact(x)?.shape != shape {
                continue;
            }
            self.inner.insert(node.id);
            changes.push(change);
            if let Some(scores) = self.scores(x, changes, depth + 1) {
                return Some(scores);
            }
            changes.truncate(known);
            self.inner.clone_from(&before);
        }
        None
    }
}
