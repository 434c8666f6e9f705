//! Products that share their input, as those for queries, keys and values do, or a layer and its gate: their weights
//! become one matrix, and each product a part of the columns of one result. Steps are made as for any product, each of
//! which writes its own columns; when all are known, those that stand next to each other and do the same become one
//! ([`Builder::join`]). What each element is a sum of does not change.

use std::collections::HashMap;

use tract_onnx::{
    prelude::*,
    tract_core::ops::{binary::TypedBinOp, change_axes::AxisOp, einsum::EinSum},
};

use super::{LowerError, image::Part, patterns::Patterns, tensors::Builder};
use crate::{
    lower::{expression::is_elementwise, stored::Stored},
    plan::{Factor, Matmul, Operand, Place, Step},
};

/// Columns of a part are a multiple of this, so that all begin where kernels want vectors to begin.
const COLUMNS_MULTIPLE: usize = 8;
/// Products of a family at most: what they make stays until the last of them has been read.
const MEMBERS_MAX: usize = 4;
/// How far readers of a product are looked at.
const DEPTH_MAX: usize = 8;

/// The products of a graph that share their inputs.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    /// Of each product its family, and its place there.
    places: HashMap<usize, (usize, usize)>,
    families: Vec<Family>,
}

#[derive(Debug)]
struct Family {
    /// The constants that are multiplied with, of each product.
    weights: Vec<OutletId>,
    /// The result of all, once one of them is made.
    result: Option<Stored>,
}

/// Where a product's result is among those of its siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Columns {
    family: usize,
    /// The first of its columns.
    first: usize,
}

/// A product whose weights are put among the model's when all its siblings are known.
#[derive(Debug)]
pub(super) struct Deferred {
    /// Its index among the steps.
    step: usize,
    columns: Columns,
    weights: Stored,
    scale: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

impl Siblings {
    pub(super) fn of(graph: &TypedModel, patterns: &Patterns) -> Self {
        let mut alike: Vec<(&EinSum, OutletId, usize, Vec<usize>)> = Vec::new();
        for node in &graph.nodes {
            let Some((op, input, slot)) = weighted(graph, node) else { continue };
            if !takes_columns(graph, patterns, node.id.into(), 0) {
                continue;
            }
            let same = alike.iter_mut().find(|(other, of, at, _)| (*of, *at) == (input, slot) && other.axes == op.axes);
            match same {
                Some((.., members)) => members.push(node.id),
                None => alike.push((op, input, slot, vec![node.id])),
            }
        }
        let mut siblings = Self::default();
        let families = alike.iter().flat_map(|(_, _, slot, all)| all.chunks(MEMBERS_MAX).map(move |some| (slot, some)));
        for (slot, members) in families.filter(|(_, members)| members.len() > 1) {
            let family = siblings.families.len();
            siblings.places.extend(members.iter().enumerate().map(|(place, &node)| (node, (family, place))));
            let weights = members.iter().map(|&node| graph.node(node).inputs[1 - slot]).collect();
            siblings.families.push(Family { weights, result: None });
        }
        siblings
    }

    /// The constants of a product and all its siblings, and which of them is its own.
    pub(super) fn weights(&self, node: usize) -> Option<(Vec<OutletId>, usize)> {
        let &(family, place) = self.places.get(&node)?;
        Some((self.families[family].weights.clone(), place))
    }

    /// Where a product's columns are, of a family of which each has so many, in the result that `make` makes for the
    /// first; `None` if they do not go together after all.
    pub(super) fn part(
        &mut self,
        node: usize,
        columns: &[usize],
        make: impl FnOnce(usize) -> Stored,
    ) -> Option<(Columns, Stored)> {
        if columns.iter().any(|columns| !columns.is_multiple_of(COLUMNS_MULTIPLE)) {
            return None;
        }
        let &(family, place) = self.places.get(&node)?;
        let first = columns[..place].iter().sum();
        let result = self.families[family].result.get_or_insert_with(|| make(columns.iter().sum()));
        Some((Columns { family, first }, result.clone()))
    }
}

/// A product of a tensor, in this slot, with a constant.
fn weighted<'a>(graph: &'a TypedModel, node: &'a TypedNode) -> Option<(&'a EinSum, OutletId, usize)> {
    let op = node.op_as::<EinSum>().filter(|op| op.q_params.is_none() && node.inputs.len() == 2)?;
    let is_constant = |slot: usize| graph.outlet_fact(node.inputs[slot]).is_ok_and(|fact| fact.konst.is_some());
    let slot = (0..2).find(|&slot| !is_constant(slot) && is_constant(1 - slot))?;
    Some((op, node.inputs[slot], slot))
}

/// Whether all readers of a tensor can take one whose rows lie apart: attention, and expressions that have more of such
/// tensors, but for sums, which are a part of one product then.
fn takes_columns(graph: &TypedModel, patterns: &Patterns, outlet: OutletId, depth: usize) -> bool {
    let readers = graph.outlet_successors(outlet);
    let is_taken = |reader: &InletId| {
        let node = graph.node(reader.node);
        if patterns.is_attended(outlet) {
            return true;
        }
        let is_constant = |&input: &OutletId| graph.outlet_fact(input).is_ok_and(|fact| fact.konst.is_some());
        let is_alone = node.inputs.iter().filter(|input| **input != outlet).all(is_constant);
        let is_sum = node.op_as::<TypedBinOp>().is_some_and(|op| ["Add", "Sub"].contains(&op.0.name()));
        let goes_on = is_elementwise(node) || node.op_is::<AxisOp>();
        goes_on
            && !patterns.is_inner(node.id)
            && if is_alone { takes_columns(graph, patterns, node.id.into(), depth + 1) } else { !is_sum }
    };
    depth < DEPTH_MAX && !readers.is_empty() && !graph.outputs.contains(&outlet) && readers.iter().all(is_taken)
}

impl Builder<'_> {
    /// Adds a product whose weights follow.
    pub(super) fn defer(
        &mut self,
        step: Matmul,
        columns: Columns,
        (weights, scale, bias): (Stored, Option<Vec<f32>>, Option<Vec<f32>>),
    ) {
        self.deferred.push(Deferred { step: self.steps.len(), columns, weights, scale, bias });
        self.steps.push(Step::Matmul(step));
    }

    /// Puts the weights of deferred products among the model's, those of siblings as one matrix where they do the same:
    /// the first of them computes for all, and there are no others.
    pub(super) fn join(&mut self) -> Result<(), LowerError> {
        let mut deferred = std::mem::take(&mut self.deferred);
        deferred.sort_by_key(|it| (it.columns.family, it.columns.first));
        let mut gone = Vec::new();
        let mut rest = &deferred[..];
        while let Some(first) = rest.first() {
            let goes_on = |pair: &[Deferred]| self.is_continued(&pair[0], &pair[1]);
            let count = 1 + rest.windows(2).take_while(|pair| goes_on(pair)).count();
            let (run, after) = rest.split_at(count);
            self.name(first);
            let at = run.iter().map(|it| it.step).min().unwrap_or(first.step);
            let joined = self.joined(run)?;
            gone.extend(run.iter().map(|it| it.step).filter(|&step| step != at));
            self.steps[at] = Step::Matmul(joined);
            rest = after;
        }
        let mut index = 0;
        self.steps.retain(|_| {
            index += 1;
            !gone.contains(&(index - 1))
        });
        Ok(())
    }

    fn name(&mut self, deferred: &Deferred) {
        if let Some((_, name)) = deferred.weights.constant() {
            self.node.0 = name.to_owned();
        }
    }

    fn product(&self, deferred: &Deferred) -> &Matmul {
        let Step::Matmul(step) = &self.steps[deferred.step] else { unreachable!("only products are deferred") };
        step
    }

    /// Whether the second computes the columns behind those of the first, in the same way.
    fn is_continued(&self, first: &Deferred, second: &Deferred) -> bool {
        let (a, b) = (self.product(first), self.product(second));
        let same = |a: &Matmul, b: &Matmul| {
            (a.a, a.batches, a.m, a.k, a.alpha.to_bits()) == (b.a, b.batches, b.m, b.k, b.alpha.to_bits())
                && a.activation == b.activation
                && a.output.row_stride == b.output.row_stride
        };
        first.columns.family == second.columns.family
            && first.columns.first + a.n == second.columns.first
            && first.weights.ty == second.weights.ty
            && a.residual.is_none()
            && b.residual.is_none()
            && same(a, b)
    }

    /// One product for those whose columns follow each other.
    fn joined(&mut self, run: &[Deferred]) -> Result<Matmul, LowerError> {
        let first = self.product(&run[0]).clone();
        let n: usize = run.iter().map(|it| self.product(it).n).sum();
        let mut parts = Vec::new();
        let mut bias = Vec::new();
        for it in run {
            let tensor = it.weights.constant().expect("weights are constants");
            let layout = &it.weights.layout;
            parts.push(Part { tensor, layout, scale: it.scale.as_deref().map(|scale| (scale, first.k)) });
            // What has none adds nothing, not even to the sign of a zero.
            let none = || vec![-0.0; self.product(it).n];
            bias.extend(it.bias.clone().unwrap_or_else(none));
        }
        let ty = run[0].weights.ty;
        let offset = self.image.joined(&parts, ty)?;
        let base = Operand { place: Place::Weights(offset), ty };
        let has_bias = run.iter().any(|it| it.bias.is_some());
        let bias = if has_bias { Some(self.vector(&bias, first.output.base.ty)?) } else { None };
        let b = Factor { base, row_stride: first.k, batch_stride: 0, transposed: true };
        Ok(Matmul { b, bias, n, ..first })
    }
}
