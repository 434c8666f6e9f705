//! One walk over the graph for one batch size: each node becomes a value, which is in memory, or an expression that is
//! computed where it is used, or a step that waits for what may become a part of it.

use std::collections::{HashMap, HashSet};

use tract_onnx::{
    prelude::*,
    tract_core::internal::DimLike,
    tract_core::ops::{
        Downsample,
        array::{Gather, MultiBroadcastTo, Pad, Slice, Tile, TypedConcat},
        change_axes::AxisOp,
        cnn::{Conv, Deconv, MaxPool, SumPool},
        einsum::EinSum,
        identity::Identity,
        nn::{NearestUpsample, Reduce, Resize, RmsNorm, Softmax},
        source::TypedSource,
    },
};

use super::{
    LowerError,
    expression::{Expression, Lazy},
    image,
    joints::Joints,
    layout::Layout,
    patterns::Patterns,
    pending::Pending,
    siblings::Siblings,
    tensors::{Builder, natural_order},
};
use crate::{
    lower::{
        expression::is_elementwise,
        stored::{Base, Stored},
    },
    plan::Type,
};

/// What is known of a tensor of the model.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Stored(Stored),
    Lazy(Lazy),
    Pending(Box<Pending>),
}

impl From<Pending> for Value {
    fn from(pending: Pending) -> Self {
        Self::Pending(Box::new(pending))
    }
}

/// The walk.
pub(super) struct Walk<'a> {
    pub(super) graph: &'a TypedModel,
    pub(super) builder: Builder<'a>,
    pub(super) patterns: Patterns,
    pub(super) joints: Joints,
    pub(super) siblings: Siblings,
    values: HashMap<OutletId, Value>,
    /// Tensors that more than one step will read.
    shared: HashSet<OutletId>,
    /// Tensors that have been copied into another order.
    copies: HashMap<(OutletId, Vec<usize>, Type), Stored>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(graph: &'a TypedModel, builder: Builder<'a>) -> Result<Self, LowerError> {
        let (patterns, shared) = (Patterns::find(graph)?, shared(graph)?);
        Ok(Self {
            graph,
            builder,
            siblings: Siblings::of(graph, &patterns),
            patterns,
            joints: Joints::of(graph),
            shared,
            values: HashMap::new(),
            copies: HashMap::new(),
        })
    }

    /// Lowers all nodes. What no output needs is never computed.
    pub(super) fn run(&mut self) -> Result<(), LowerError> {
        for id in self.graph.eval_order().map_err(|cause| LowerError::Graph(format!("{cause:#}")))? {
            let node = self.graph.node(id);
            if node.op_is::<TypedSource>() || self.patterns.is_inner(id) {
                continue;
            }
            self.builder.node = (node.name.clone(), node.op().name().to_string());
            for (slot, output) in node.outputs.iter().enumerate() {
                if let Some(tensor) = &output.fact.konst {
                    let value = self.constant(tensor, &node.name)?;
                    self.values.insert(OutletId::new(id, slot), value);
                }
            }
            if node.outputs.iter().all(|output| output.fact.konst.is_some()) {
                continue;
            }
            let value = match self.folded(node)? {
                Some(value) => value,
                None => self.node(node)?,
            };
            self.values.insert(id.into(), value);
        }
        Ok(())
    }

    fn node(&mut self, node: &TypedNode) -> Result<Value, LowerError> {
        if let Some(attention) = self.patterns.attention(node.id) {
            return self.attention(&attention, &self.shape_of(node.id.into())?);
        }
        if let Some(norm) = self.patterns.norm(node.id) {
            return self.norm(&norm);
        }
        if is_elementwise(node) {
            return self.elementwise(node);
        }
        if let Some(op) = node.op_as::<AxisOp>() {
            return self.axis(node, op);
        }
        if let Some(op) = node.op_as::<Conv>() {
            return self.convolution(node, op);
        }
        if let Some(op) = node.op_as::<EinSum>() {
            return self.product(node, op);
        }
        if let Some(op) = node.op_as::<Deconv>() {
            return self.deconvolution(node, op);
        }
        if let Some(op) = node.op_as::<MaxPool>() {
            return self.max_pool(node, op);
        }
        if let Some(op) = node.op_as::<SumPool>() {
            return self.sum_pool(node, op);
        }
        if let Some(op) = node.op_as::<Reduce>() {
            return self.reduce(node, op);
        }
        if let Some(op) = node.op_as::<Softmax>() {
            return self.softmax(node, op);
        }
        if let Some(op) = node.op_as::<RmsNorm>() {
            return self.rms_norm(node, op);
        }
        if let Some(op) = node.op_as::<Gather>() {
            return self.gather(node, op.axis);
        }
        if let Some(op) = node.op_as::<TypedConcat>() {
            return self.concat(node, op.axis);
        }
        if let Some(op) = node.op_as::<Pad>() {
            return self.pad(node, op);
        }
        if let Some(op) = node.op_as::<Resize>() {
            return self.resize(node, op);
        }
        if let Some(op) = node.op_as::<tract_onnx_opl::resize::Resize>() {
            return self.resize_of_onnx(node, op);
        }
        if let Some(op) = node.op_as::<tract_onnx_opl::lrn::Lrn>() {
            return self.response(node, op);
        }
        self.viewed(node)
    }

    /// Operators that only look at a tensor in another way.
    fn viewed(&mut self, node: &TypedNode) -> Result<Value, LowerError> {
        let shape = self.shape_of(node.id.into())?;
        if let Some(op) = node.op_as::<Slice>() {
            let start = op.start.to_usize().map_err(|_| self.builder.unsupported("its start is not a number"))?;
            return self.stored_view(node, &|layout| Some(layout.sliced(op.axis, start, shape[op.axis], 1)));
        }
        if let Some(op) = node.op_as::<Downsample>() {
            let step = i64::try_from(op.stride).map_err(|_| self.builder.unsupported("its step is too long"))?;
            let length = self.shape_of(node.inputs[0])?[op.axis];
            let start = if step < 0 { length - 1 - op.modulo } else { op.modulo };
            return self.stored_view(node, &|layout| Some(layout.sliced(op.axis, start, shape[op.axis], step)));
        }
        if node.op_is::<MultiBroadcastTo>() {
            return self.stored_view(node, &|layout| Some(layout.broadcast(&shape)));
        }
        if let Some(op) = node.op_as::<Tile>() {
            return self.tile(node, op);
        }
        if let Some(op) = node.op_as::<NearestUpsample>() {
            return self.upsample(node, op);
        }
        if node.op_is::<Identity>() {
            return self.view(node, &|layout| Some(layout.clone()));
        }
        Err(self.missing(node))
    }

    /// The error for an operator that there is nothing for.
    pub(super) fn missing(&self, node: &TypedNode) -> LowerError {
        self.missing_operator(&node.op().name())
    }

    pub(super) fn missing_operator(&self, operator: &str) -> LowerError {
        LowerError::Operator { node: self.builder.node.0.clone(), operator: operator.to_owned() }
    }

    pub(super) fn fact(&self, outlet: OutletId) -> Result<&'a TypedFact, LowerError> {
        self.graph.outlet_fact(outlet).map_err(|cause| LowerError::Graph(format!("{cause:#}")))
    }

    /// The shape of a tensor, of numbers.
    pub(super) fn shape_of(&self, outlet: OutletId) -> Result<Vec<usize>, LowerError> {
        let fact = self.fact(outlet)?;
        let tensor = || self.graph.node(outlet.node).name.clone();
        let length = |(dimension, length): (usize, &TDim)| {
            length.to_usize().map_err(|_| LowerError::Dimension {
                tensor: tensor(),
                dimension,
                found: length.to_string(),
            })
        };
        fact.shape.iter().enumerate().map(length).collect()
    }

    pub(super) fn insert(&mut self, outlet: OutletId, stored: Stored) {
        self.values.insert(outlet, Value::Stored(stored));
    }

    fn constant(&self, tensor: &Arc<Tensor>, name: &str) -> Result<Value, LowerError> {
        let ty = self.builder.type_of(tensor.datum_type())?;
        let base = Base::Constant(tensor.clone(), name.into());
        Ok(Value::Stored(Stored { base, ty, layout: Layout::dense(tensor.shape()) }))
    }

    /// The result of a node of nothing but constants.
    fn folded(&mut self, node: &TypedNode) -> Result<Option<Value>, LowerError> {
        let is_view = node.op_is::<AxisOp>() || node.op_is::<MultiBroadcastTo>();
        if is_view || node.inputs.is_empty() || node.outputs.len() != 1 {
            return Ok(None);
        }
        let mut inputs = TVec::new();
        for input in &node.inputs {
            let Some(Value::Stored(stored)) = self.values.get(input) else { return Ok(None) };
            let Some(tensor) = stored.constant().and_then(|(tensor, _)| spread(tensor, &stored.layout)) else {
                return Ok(None);
            };
            inputs.push(tensor.into_tvalue());
        }
        match node.op().eval_out_of_plan(inputs) {
            Ok(Some(results)) => Ok(Some(self.constant(&results[0].clone().into_arc_tensor(), &node.name)?)),
            _ => Ok(None),
        }
    }

    /// Whether a tensor is still a step that waits, for this reader alone.
    pub(super) fn is_pending(&self, outlet: OutletId) -> bool {
        matches!(self.values.get(&outlet), Some(Value::Pending(_))) && self.readers(outlet) == 1
    }

    /// The step that a tensor still is, for this reader alone.
    pub(super) fn take_pending(&mut self, outlet: OutletId) -> Result<Option<Box<Pending>>, LowerError> {
        if !self.is_pending(outlet) {
            return Ok(None);
        }
        let Value::Pending(pending) = self.take(outlet)? else { return Ok(None) };
        Ok(Some(pending))
    }

    /// The order of a tensor's dimensions in memory, as far as it is known.
    pub(super) fn order_of(&self, outlet: OutletId) -> Option<Vec<usize>> {
        Some(match self.values.get(&outlet)? {
            Value::Stored(stored) => stored.layout.order(),
            Value::Lazy(lazy) => natural_order(lazy),
            Value::Pending(pending) => pending.target.layout.order(),
        })
    }

    fn readers(&self, outlet: OutletId) -> usize {
        let outputs = self.graph.outputs.iter().filter(|&&output| output == outlet).count();
        self.graph.outlet_successors(outlet).len() + outputs
    }

    pub(super) fn put_back(&mut self, outlet: OutletId, value: Value) {
        self.values.insert(outlet, value);
    }

    /// A tensor for a reader. What several steps read is in memory from then on.
    pub(super) fn take(&mut self, outlet: OutletId) -> Result<Value, LowerError> {
        let Some(value) = self.values.remove(&outlet) else {
            let name = &self.graph.node(outlet.node).name;
            return Err(LowerError::Graph(format!("node {name} is read before it is computed")));
        };
        let value = match value {
            Value::Pending(pending) if self.readers(outlet) > 1 => Value::Stored(pending.flush(&mut self.builder)?),
            Value::Lazy(lazy) if self.shared.contains(&outlet) && !is_trivial(&lazy) => {
                Value::Stored(self.builder.store_natural(&lazy)?)
            }
            value => value,
        };
        if !matches!(value, Value::Pending(_)) {
            self.values.insert(outlet, value.clone());
        }
        Ok(value)
    }

    /// A tensor as an expression.
    pub(super) fn lazy(&mut self, outlet: OutletId) -> Result<Lazy, LowerError> {
        match self.take(outlet)? {
            Value::Lazy(lazy) => Ok(lazy),
            Value::Stored(stored) => {
                let number = stored.constant().filter(|_| stored.layout.is_uniform()).and_then(|(tensor, _)| {
                    let at = usize::try_from(stored.layout.offset).ok()?;
                    #[allow(clippy::cast_precision_loss, reason = "integers that stand for no end stay so")]
                    match stored.ty.is_float() {
                        true => image::floats(tensor).ok()?.get(at).map(|&value| f64::from(value)),
                        false => image::integers(tensor).ok()?.get(at).map(|&value| value as f64),
                    }
                });
                let lazy = Lazy::leaf(stored);
                Ok(match number {
                    Some(number) => Lazy { expression: Expression::Number(number).into(), ..lazy },
                    None => lazy,
                })
            }
            Value::Pending(pending) => {
                let stored = pending.flush(&mut self.builder)?;
                self.insert(outlet, stored.clone());
                Ok(Lazy::leaf(stored))
            }
        }
    }

    /// A tensor as an expression of this shape.
    pub(super) fn broadcast(&mut self, outlet: OutletId, shape: &[usize]) -> Result<Lazy, LowerError> {
        let lazy = self.lazy(outlet)?;
        if lazy.shape == shape {
            return Ok(lazy);
        }
        let mapped = lazy.mapped(shape, &|layout| Some(layout.broadcast(shape)));
        mapped.ok_or_else(|| self.builder.unsupported("its operands do not fit each other"))
    }

    /// A tensor in memory, however it lies there.
    pub(super) fn stored(&mut self, outlet: OutletId) -> Result<Stored, LowerError> {
        let stored = match self.take(outlet)? {
            Value::Stored(stored) => return Ok(stored),
            Value::Pending(pending) => pending.flush(&mut self.builder)?,
            Value::Lazy(lazy) => match &*lazy.expression {
                Expression::Leaf(stored) if stored.ty == lazy.ty => stored.clone(),
                _ => self.builder.store_natural(&lazy)?,
            },
        };
        self.insert(outlet, stored.clone());
        Ok(stored)
    }

    /// A tensor packed in this order of dimensions.
    pub(super) fn packed(&mut self, outlet: OutletId, order: &[usize], ty: Type) -> Result<Stored, LowerError> {
        let value = self.take(outlet)?;
        let is_open = |lazy: &Lazy| lazy.ty == ty && !matches!(&*lazy.expression, Expression::Leaf(_));
        if let Value::Lazy(lazy) = &value
            && is_open(lazy)
        {
            let stored = self.builder.store(lazy, order, ty)?;
            self.insert(outlet, stored.clone());
            return Ok(stored);
        }
        if let Value::Pending(pending) = value {
            let stored = pending.flush(&mut self.builder)?;
            self.insert(outlet, stored);
        }
        let stored = self.stored(outlet)?;
        let key = (outlet, order.to_vec(), ty);
        if let Some(copy) = self.copies.get(&key) {
            return Ok(copy.clone());
        }
        let copy = self.builder.packed(&stored, order, ty)?;
        if stored.ty == ty {
            self.copies.insert(key, copy.clone());
        } else {
            // An input of the model, in the type that all others have: nobody needs to convert it again.
            self.insert(outlet, copy.clone());
        }
        Ok(copy)
    }

    /// The node's first input in another layout, whatever it is; copied into the model's order if strides cannot say
    /// that.
    pub(super) fn view(
        &mut self,
        node: &TypedNode,
        map: &dyn Fn(&Layout) -> Option<Layout>,
    ) -> Result<Value, LowerError> {
        if let Some(pending) = self.take_pending(node.inputs[0])? {
            if let Some(mapped) = pending.mapped(map) {
                return Ok(mapped.into());
            }
            self.put_back(node.inputs[0], Value::Pending(pending));
        }
        self.stored_view(node, map)
    }

    /// The same for layouts that leave elements out, or repeat them.
    pub(super) fn stored_view(
        &mut self,
        node: &TypedNode,
        map: &dyn Fn(&Layout) -> Option<Layout>,
    ) -> Result<Value, LowerError> {
        let shape = self.shape_of(node.id.into())?;
        let input = node.inputs[0];
        let stored = match self.take(input)? {
            Value::Lazy(lazy) => match lazy.mapped(&shape, map) {
                Some(mapped) => return Ok(Value::Lazy(mapped)),
                None => self.builder.store(&lazy, &(0..lazy.shape.len()).collect::<Vec<_>>(), lazy.ty)?,
            },
            Value::Stored(stored) => stored,
            Value::Pending(pending) => pending.flush(&mut self.builder)?,
        };
        self.insert(input, stored.clone());
        if let Some(layout) = map(&stored.layout) {
            return Ok(Value::Stored(Stored { layout, ..stored }));
        }
        let order: Vec<usize> = (0..stored.layout.rank()).collect();
        let copy = self.builder.packed(&stored, &order, stored.ty)?;
        match map(&copy.layout) {
            Some(layout) => Ok(Value::Stored(Stored { layout, ..copy })),
            None => Err(self.builder.unsupported("its shape does not fit its input")),
        }
    }
}

/// Whether reading it again costs nothing.
fn is_trivial(lazy: &Lazy) -> bool {
    matches!(&*lazy.expression, Expression::Leaf(_) | Expression::Number(_))
}

/// A constant's elements as this layout has them.
pub(super) fn spread(tensor: &Arc<Tensor>, layout: &Layout) -> Option<Tensor> {
    if layout.offset == 0 && *layout == Layout::dense(tensor.shape()) {
        return Some(Tensor::clone(tensor));
    }
    let bytes = tensor.as_bytes();
    let size = tensor.datum_type().size_of();
    if tensor.datum_type() == DatumType::TDim || tensor.datum_type() == DatumType::String {
        return None;
    }
    let starts: Vec<usize> = (0..tensor.len()).collect();
    let mut made = Tensor::zero_dt(tensor.datum_type(), &layout.shape).ok()?;
    for (to, from) in made.as_bytes_mut().chunks_exact_mut(size).zip(layout.read(&starts)) {
        to.copy_from_slice(&bytes[from * size..][..size]);
    }
    Some(made)
}

/// The tensors that more than one step reads: those whose readers are not all parts of one expression.
fn shared(graph: &TypedModel) -> Result<HashSet<OutletId>, LowerError> {
    let order = graph.eval_order().map_err(|cause| LowerError::Graph(format!("{cause:#}")))?;
    // For each node the last one of the expression that it is a part of.
    let mut ends: HashMap<usize, usize> = HashMap::new();
    let mut shared = HashSet::new();
    for &id in order.iter().rev() {
        let node = graph.node(id);
        let mut common = None;
        for slot in 0..node.outputs.len() {
            let outlet = OutletId::new(id, slot);
            let readers =
                graph.outlet_successors(outlet).iter().map(|inlet| *ends.get(&inlet.node).unwrap_or(&inlet.node));
            let outputs = graph.outputs.iter().filter(|&&output| output == outlet).map(|_| usize::MAX);
            let mut readers: Vec<usize> = readers.chain(outputs).collect();
            readers.sort_unstable();
            readers.dedup();
            if readers.len() > 1 {
                shared.insert(outlet);
            } else if slot == 0 {
                common = readers.first().copied().filter(|&reader| reader != usize::MAX);
            }
        }
        let is_inner = is_elementwise(node) || node.op_is::<AxisOp>() || node.op_is::<MultiBroadcastTo>();
        let joins = |reader: &usize| {
            let reader = graph.node(*reader);
            is_elementwise(reader) || reader.op_is::<AxisOp>() || reader.op_is::<MultiBroadcastTo>()
        };
        ends.insert(id, common.filter(joins).filter(|_| is_inner).unwrap_or(id));
    }
    Ok(shared)
}
