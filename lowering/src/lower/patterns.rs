//! What several nodes say together that one step computes: layer normalisation and attention. The nodes inside such a
//! pattern have no other readers, and are not lowered themselves.

use std::collections::{HashMap, HashSet};

use tract_onnx::{
    prelude::*,
    tract_core::{
        internal::DimLike,
        ops::{
            binary::TypedBinOp,
            element_wise::ElementWiseOp,
            math::PowConst,
            nn::{Reduce, Reducer, RmsNorm},
        },
    },
};

use super::{LowerError, image};

mod attention;

/// A normalisation of rows.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NormPattern {
    pub(super) input: OutletId,
    pub(super) axes: Vec<usize>,
    pub(super) epsilon: f32,
    pub(super) is_rms: bool,
}

/// `softmax(f(query . key)) . value`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AttentionPattern {
    /// With its dimensions for batches, positions and elements.
    pub(super) query: (OutletId, Vec<usize>),
    pub(super) key: (OutletId, Vec<usize>),
    pub(super) value: (OutletId, Vec<usize>),
    /// The same dimensions of the result.
    pub(super) output: Vec<usize>,
    /// The scores, with their dimensions for batches, queries and keys.
    pub(super) scores: (OutletId, Vec<usize>),
    /// What is done with scores before the softmax, in order.
    pub(super) changes: Vec<Change>,
}

/// Something that is done with scores.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    Scale(f32),
    Add(OutletId),
    /// Where the first is not `is_kept`, the second takes their place.
    Replace {
        condition: OutletId,
        by: OutletId,
        is_kept: bool,
    },
}

/// The patterns of a graph, by their last nodes.
#[derive(Debug, Default)]
pub(super) struct Patterns {
    norms: HashMap<usize, NormPattern>,
    attentions: HashMap<usize, AttentionPattern>,
    inner: HashSet<usize>,
}

impl Patterns {
    pub(super) fn find(graph: &TypedModel) -> Result<Self, LowerError> {
        let mut patterns = Self::default();
        for id in graph.eval_order().map_err(|cause| LowerError::Graph(format!("{cause:#}")))? {
            let mut finder = Finder { graph, inner: HashSet::new() };
            if let Some(norm) = finder.norm(id).filter(|_| finder.is_closed(id)) {
                patterns.norms.insert(id, norm);
                patterns.inner.extend(&finder.inner);
            }
            let mut finder = Finder { graph, inner: HashSet::new() };
            if let Some(attention) = finder.attention(id).filter(|_| finder.is_closed(id)) {
                patterns.attentions.insert(id, attention);
                patterns.inner.extend(&finder.inner);
            }
        }
        Ok(patterns)
    }

    /// Whether it is a part of a pattern, but not its last node.
    pub(super) fn is_inner(&self, node: usize) -> bool {
        self.inner.contains(&node)
    }

    /// Whether it is the queries, keys or values of an attention.
    pub(super) fn is_attended(&self, outlet: OutletId) -> bool {
        self.attentions.values().any(|it| [it.query.0, it.key.0, it.value.0].contains(&outlet))
    }

    pub(super) fn norm(&self, node: usize) -> Option<NormPattern> {
        self.norms.get(&node).cloned()
    }

    pub(super) fn attention(&self, node: usize) -> Option<AttentionPattern> {
        self.attentions.get(&node).cloned()
    }
}

struct Finder<'a> {
    graph: &'a TypedModel,
    inner: HashSet<usize>,
}

impl<'a> Finder<'a> {
    /// Whether nobody but the pattern reads what is inside.
    fn is_closed(&self, last: usize) -> bool {
        let inside = |node: usize| node == last || self.inner.contains(&node);
        let is_closed = |&node: &usize| {
            let readers = self.graph.node(node).outputs.iter().flat_map(|output| &output.successors);
            let is_output = self.graph.outputs.iter().any(|output| output.node == node);
            !is_output && readers.into_iter().all(|inlet| inside(inlet.node))
        };
        self.inner.iter().all(is_closed)
    }

    fn node(&self, outlet: OutletId) -> &'a TypedNode {
        self.graph.node(outlet.node)
    }

    fn scalar(&self, outlet: OutletId) -> Option<f32> {
        let tensor = self.graph.outlet_fact(outlet).ok()?.konst.clone()?;
        if tensor.len() == 1 { image::floats(&tensor).ok()?.first().copied() } else { None }
    }

    fn binary(&self, outlet: OutletId, name: &str) -> Option<(OutletId, OutletId)> {
        let node = self.node(outlet);
        let op = node.op_as::<TypedBinOp>()?;
        (op.0.name() == name).then(|| (node.inputs[0], node.inputs[1]))
    }

    fn unary(&mut self, outlet: OutletId, name: &str) -> Option<OutletId> {
        let node = self.node(outlet);
        let op = node.op_as::<ElementWiseOp>()?;
        (op.0.name() == name).then(|| {
            self.inner.insert(node.id);
            node.inputs[0]
        })
    }

    /// A tensor and a number that a binary operator has as its operands.
    fn with_scalar(&mut self, outlet: OutletId, name: &str) -> Option<(OutletId, f32)> {
        let (a, b) = self.binary(outlet, name)?;
        let found = self.scalar(b).map(|number| (a, number));
        let found = found.or_else(|| self.scalar(a).filter(|_| name != "Div").map(|number| (b, number)))?;
        self.inner.insert(outlet.node);
        Some(found)
    }

    /// Of what a tensor is the mean, and over which dimensions.
    fn mean(&mut self, outlet: OutletId) -> Option<(OutletId, Vec<usize>)> {
        let divided = self.with_scalar(outlet, "Div").map(|(sum, length)| (sum, 1.0 / length));
        let (sum, factor) = divided.or_else(|| self.with_scalar(outlet, "Mul"))?;
        let node = self.node(sum);
        let op = node.op_as::<Reduce>().filter(|op| op.reducer == Reducer::Sum)?;
        let fact = self.graph.outlet_fact(node.inputs[0]).ok()?;
        let lengths: Option<Vec<usize>> = op.axes.iter().map(|&axis| fact.shape[axis].to_usize().ok()).collect();
        #[allow(clippy::cast_precision_loss, reason = "a length is compared with a rounded one")]
        let length = lengths?.iter().product::<usize>() as f32;
        if (factor * length - 1.0).abs() > 1e-5 {
            return None;
        }
        self.inner.insert(node.id);
        Some((node.inputs[0], op.axes.to_vec()))
    }

    fn mean_of_squares(&mut self, outlet: OutletId) -> Option<(OutletId, Vec<usize>)> {
        let node = self.node(outlet);
        if let Some(op) = node.op_as::<Reduce>().filter(|op| op.reducer == Reducer::MeanOfSquares) {
            self.inner.insert(node.id);
            return Some((node.inputs[0], op.axes.to_vec()));
        }
        let (square, axes) = self.mean(outlet)?;
        let node = self.node(square);
        let is_power = node.op_as::<ElementWiseOp>().and_then(|op| op.0.downcast_ref::<PowConst>());
        let base = if is_power.is_some_and(|op| op.exponent == 2.0) {
            Some(node.inputs[0])
        } else if let Some((base, power)) = self.binary(square, "Pow") {
            self.scalar(power).filter(|&power| power == 2.0).map(|_| base)
        } else if let Some((a, b)) = self.binary(square, "Mul") {
            (a == b).then_some(a)
        } else {
            self.unary(square, "Square")
        };
        self.inner.insert(node.id);
        Some((base?, axes))
    }

    fn norm(&mut self, last: usize) -> Option<NormPattern> {
        let node = self.graph.node(last);
        let (input, axes, epsilon) = match node.op_as::<RmsNorm>() {
            Some(op) => (node.inputs[0], vec![op.axis], *image::floats(&op.eps).ok()?.first()?),
            None => self.divided_by_deviation(last.into())?,
        };
        let (x, found) = match self.centred(input, &axes) {
            Some(x) => (x, true),
            None => (input, false),
        };
        let is_plain = node.op_is::<RmsNorm>() && !found;
        (!is_plain).then_some(NormPattern { input: x, axes, epsilon, is_rms: !found })
    }

    /// What is divided by the root of its mean square, over which dimensions, and what is added to that.
    fn divided_by_deviation(&mut self, outlet: OutletId) -> Option<(OutletId, Vec<usize>, f32)> {
        let candidates = match (self.binary(outlet, "Div"), self.binary(outlet, "Mul")) {
            (Some((input, root)), _) => vec![(input, root, true)],
            (None, Some((a, b))) => vec![(a, b, false), (b, a, false)],
            (None, None) => return None,
        };
        for (input, factor, is_divisor) in candidates {
            let before = self.inner.clone();
            if let Some((axes, epsilon)) = self.deviation(input, factor, is_divisor) {
                return Some((input, axes, epsilon));
            }
            self.inner = before;
        }
        None
    }

    fn deviation(&mut self, input: OutletId, factor: OutletId, is_divisor: bool) -> Option<(Vec<usize>, f32)> {
        let sum = if is_divisor {
            self.unary(factor, "Sqrt")?
        } else if let Some(root) = self.unary(factor, "Recip") {
            self.unary(root, "Sqrt")?
        } else {
            self.unary(factor, "Rsqrt")?
        };
        let (squares, epsilon) = self.with_scalar(sum, "Add")?;
        let (of, axes) = self.mean_of_squares(squares)?;
        (of == input).then_some((axes, epsilon))
    }

    /// What a tensor is, less its mean.
    fn centred(&mut self, outlet: OutletId, axes: &[usize]) -> Option<OutletId> {
        let before = self.inner.clone();
        let found = (|| {
            let (x, mean) = self.binary(outlet, "Sub")?;
            let (of, over) = self.mean(mean)?;
            self.inner.insert(outlet.node);
            (of == x && over == axes).then_some(x)
        })();
        let is_closed = found.is_some() && {
            // Its only other readers are in what has been found before.
            let readers = self.node(outlet).outputs[0].successors.iter();
            let last = |node: usize| self.graph.node(node).op_is::<RmsNorm>() || self.is_last(node, outlet);
            readers.map(|inlet| inlet.node).all(|node| self.inner.contains(&node) || last(node))
        };
        if !is_closed {
            self.inner = before;
            return None;
        }
        found
    }

    fn is_last(&self, node: usize, outlet: OutletId) -> bool {
        ["Div", "Mul"].iter().any(|name| {
            self.binary(node.into(), name).is_some_and(|(a, b)| {
                (a == outlet && self.inner.contains(&b.node)) || (b == outlet && self.inner.contains(&a.node))
            })
        })
    }
}
