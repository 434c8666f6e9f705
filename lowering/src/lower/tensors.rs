//! Tensors while a plan is made: in buffers whose places are dealt when all steps are known ([`crate::arena`]), until
//! then at addresses of their own that no two of them share.

use tract_onnx::prelude::*;

use super::{
    LowerError,
    expression::{Lazy, compile, numbers_of},
    image::Image,
    layout::{Layout, signed},
    siblings::Deferred,
};
use crate::{
    arena::Buffer,
    lower::stored::{Base, Stored},
    plan::{ALIGNMENT, DIMS_MAX, Operand, Place, Pointwise, Precision, Step, Type, View},
};

/// Steps and tensors of one plan.
pub(super) struct Builder<'a> {
    pub(super) image: &'a mut Image,
    pub(super) precision: Precision,
    pub(super) batch: usize,
    pub(super) steps: Vec<Step>,
    pub(super) buffers: Vec<Buffer>,
    /// Products among the steps whose weights have no place yet.
    pub(super) deferred: Vec<Deferred>,
    /// Whether a step may find faults.
    pub(super) has_faults: bool,
    /// The node at hand and its operator, for errors.
    pub(super) node: (String, String),
    next: usize,
}

impl<'a> Builder<'a> {
    pub(super) fn new(image: &'a mut Image, precision: Precision, batch: usize) -> Self {
        let (steps, buffers, deferred, node) = (Vec::new(), Vec::new(), Vec::new(), Default::default());
        Self { image, precision, batch, steps, buffers, deferred, has_faults: false, node, next: 0 }
    }

    /// What a tensor of the model is kept as.
    pub(super) fn type_of(&self, found: DatumType) -> Result<Type, LowerError> {
        Ok(match found {
            DatumType::F16 | DatumType::F32 | DatumType::F64 => self.float(),
            DatumType::I64 | DatumType::TDim | DatumType::U32 | DatumType::U64 => Type::I64,
            DatumType::I32 | DatumType::I16 | DatumType::U16 | DatumType::I8 => Type::I32,
            DatumType::U8 => Type::U8,
            DatumType::Bool => Type::Bool,
            other => return Err(self.unsupported(&format!("tensors of type {other:?} are for the CPU's executor"))),
        })
    }

    /// What numbers with fractions are kept as.
    pub(super) fn float(&self) -> Type {
        if self.precision == Precision::Fp16 { Type::F16 } else { Type::F32 }
    }

    pub(super) fn unsupported(&self, reason: &str) -> LowerError {
        let (node, operator) = self.node.clone();
        LowerError::Unsupported { node, operator, reason: reason.to_owned() }
    }

    /// A buffer for so many elements.
    pub(super) fn allocate(&mut self, elements: usize, ty: Type) -> Base {
        let bytes = elements * ty.bytes();
        let start = self.next;
        self.next += bytes.max(1).next_multiple_of(ALIGNMENT);
        self.buffers.push(Buffer { start, bytes, is_input: false, is_output: false });
        Base::Buffer(self.buffers.len() - 1, start)
    }

    /// A new tensor, packed in this order of dimensions.
    pub(super) fn tensor(&mut self, shape: &[usize], order: &[usize], ty: Type) -> Stored {
        let layout = Layout::ordered(shape, order);
        Stored { base: self.allocate(layout.elements(), ty), ty, layout }
    }

    /// The operand at a tensor's first element. Constants are put into the image as they lie.
    pub(super) fn operand(&mut self, stored: &Stored) -> Result<Operand, LowerError> {
        let shift = usize::try_from(stored.layout.offset).expect("layouts start inside their tensors");
        let (place, ty) = match &stored.base {
            Base::Buffer(_, start) => (Place::Arena(start + shift * stored.ty.bytes()), stored.ty),
            Base::Constant(tensor, name) => {
                let (offset, ty) = (self.image.constant((tensor, name), stored.ty, None)?, stored.ty);
                (Place::Weights(offset + shift * ty.bytes()), ty)
            }
        };
        Ok(Operand { place, ty })
    }

    /// As a step of kernels that convert sees it: what does not fit binary16 is kept as binary32.
    fn convertible(&mut self, stored: &Stored) -> Result<Operand, LowerError> {
        match self.operand(stored) {
            Err(LowerError::Overflow { .. }) => self.operand(&Stored { ty: Type::F32, ..stored.clone() }),
            other => other,
        }
    }

    /// A tensor as a step walks it that converts what it loads.
    pub(super) fn view(&mut self, stored: &Stored) -> Result<View, LowerError> {
        Ok(View { base: self.convertible(stored)?, strides: stored.layout.strides.clone() })
    }

    /// Computes a tensor into where `target` lies, whose type it is stored as.
    pub(super) fn compute(&mut self, lazy: &Lazy, target: &Stored) -> Result<(), LowerError> {
        let Some((code, inputs)) = compile(lazy) else {
            return Err(self.unsupported("this expression is too long for a step: report it with the model"));
        };
        let numbers = numbers_of(lazy);
        let output = self.view(target)?;
        let inputs = inputs.iter().map(|input| self.view(input)).collect::<Result<Vec<_>, _>>()?;
        self.walk(Pointwise { shape: lazy.shape.clone(), inputs, output, numbers, code });
        Ok(())
    }

    /// Adds a step with as few dimensions as it can have; more than a step has are unrolled.
    fn walk(&mut self, step: Pointwise) {
        if step.shape.contains(&0) {
            return;
        }
        let step = coalesced(step);
        if step.shape.len() <= DIMS_MAX {
            self.steps.push(Step::Pointwise(step));
            return;
        }
        for index in 0..step.shape[0] {
            let mut part = step.clone();
            part.shape.remove(0);
            for view in part.inputs.iter_mut().chain([&mut part.output]) {
                let shift = view.strides.remove(0) * signed(index) * signed(view.base.ty.bytes());
                view.base.place = shifted(view.base.place, shift);
            }
            self.walk(part);
        }
    }

    /// Stores a tensor, packed in this order of dimensions.
    pub(super) fn store(&mut self, lazy: &Lazy, order: &[usize], ty: Type) -> Result<Stored, LowerError> {
        let target = self.tensor(&lazy.shape, order, ty);
        self.compute(lazy, &target)?;
        Ok(target)
    }

    /// Stores a tensor in the order that most of what it reads has.
    pub(super) fn store_natural(&mut self, lazy: &Lazy) -> Result<Stored, LowerError> {
        self.store(lazy, &natural_order(lazy), lazy.ty)
    }

    /// The tensor packed in this order of dimensions and of this type, from an aligned address on: itself, or a copy.
    pub(super) fn packed(&mut self, stored: &Stored, order: &[usize], ty: Type) -> Result<Stored, LowerError> {
        if stored.layout.is_packed(order) && stored.ty == ty && self.is_aligned(stored, ALIGNMENT) {
            return Ok(stored.clone());
        }
        if let Base::Constant(tensor, name) = &stored.base {
            // It is laid out so among the weights; here it looks as if it had been from the start.
            let shape: Vec<usize> = order.iter().map(|&dim| stored.layout.shape[dim]).collect();
            let strides = order.iter().map(|&dim| stored.layout.strides[dim]).collect();
            let walked = Layout { shape: shape.clone(), strides, offset: stored.layout.offset };
            let values = walked.read(&super::image::floats(tensor)?);
            let made = tract_onnx::prelude::Tensor::from_shape(&shape, &values)
                .map_err(|cause| LowerError::Graph(format!("{cause:#}")))?;
            let layout = Layout::ordered(&stored.layout.shape, order);
            return Ok(Stored { base: Base::Constant(made.into_arc_tensor(), name.clone()), ty, layout });
        }
        self.store(&Lazy { ty, ..Lazy::leaf(stored.clone()) }, order, ty)
    }

    /// Whether its first element's address is a multiple of so many bytes.
    pub(super) fn is_aligned(&self, stored: &Stored, to: usize) -> bool {
        usize::try_from(stored.layout.offset).is_ok_and(|offset| (offset * stored.ty.bytes()).is_multiple_of(to))
    }

    /// The operand of a vector of numbers.
    pub(super) fn vector(&mut self, values: &[f32], ty: Type) -> Result<Operand, LowerError> {
        let name = format!("of node {}", self.node.0);
        Ok(Operand { place: Place::Weights(self.image.vector(values, ty, &name)?), ty })
    }
}

/// A place so many bytes further on.
fn shifted(place: Place, bytes: i64) -> Place {
    let shift = |at: usize| usize::try_from(signed(at) + bytes).expect("a view stays inside its tensor");
    match place {
        Place::Arena(at) => Place::Arena(shift(at)),
        Place::Weights(at) => Place::Weights(shift(at)),
    }
}

/// The order of dimensions of the largest tensor that is read.
pub(super) fn natural_order(lazy: &Lazy) -> Vec<usize> {
    let weight = |stored: &Stored| {
        let own = (0..stored.layout.rank()).filter(|&dim| stored.layout.strides[dim] != 0);
        (own.map(|dim| stored.layout.shape[dim]).product::<usize>(), stored.constant().is_none())
    };
    let leaves = lazy.leaves();
    // Of equals the first.
    let largest = leaves.iter().rev().max_by_key(|stored| weight(stored));
    largest.map_or_else(|| (0..lazy.shape.len()).collect(), |stored| stored.layout.order())
}

/// The same step with its dimensions in the order of its output's memory, and neighbours that can be one as one.
fn coalesced(step: Pointwise) -> Pointwise {
    let mut dims: Vec<usize> = (0..step.shape.len()).filter(|&dim| step.shape[dim] != 1).collect();
    dims.sort_by_key(|&dim| std::cmp::Reverse(step.output.strides[dim].abs()));
    let views: Vec<&View> = step.inputs.iter().chain([&step.output]).collect();
    // Of each dimension that remains its length and the one whose strides are its.
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for dim in dims {
        let length = step.shape[dim];
        if let Some(last) = merged.last_mut() {
            let fits = |view: &&View| view.strides[last.1] == view.strides[dim] * signed(length);
            if views.iter().all(fits) {
                *last = (last.0 * length, dim);
                continue;
            }
        }
        merged.push((length, dim));
    }
    let strided = |view: &View| match merged.is_empty() {
        true => vec![0],
        false => merged.iter().map(|&(_, dim)| view.strides[dim]).collect(),
    };
    let shape = if merged.is_empty() { vec![1] } else { merged.iter().map(|&(length, _)| length).collect() };
    Pointwise {
        shape,
        inputs: step.inputs.iter().map(|view| View { base: view.base, strides: strided(view) }).collect(),
        output: View { base: step.output.base, strides: strided(&step.output) },
        ..step
    }
}
