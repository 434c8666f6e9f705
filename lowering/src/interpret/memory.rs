//! The memory of an interpreted plan, and its elements.

use half::f16;

use crate::plan::{Activation, Operand, Place, Type};

/// What a plan runs on.
#[derive(Debug)]
pub struct Memory<'a> {
    /// At least the plan's `arena_bytes`.
    pub arena: &'a mut [u8],
    /// The model's.
    pub weights: &'a [u8],
}

impl Memory<'_> {
    /// The bytes of `count` elements from the element `first` on.
    pub(super) fn bytes(&self, operand: Operand, first: i64, count: usize) -> &[u8] {
        let width = operand.ty.bytes();
        let (memory, place) = match operand.place {
            Place::Arena(at) => (&*self.arena, at),
            Place::Weights(at) => (self.weights, at),
        };
        let start = byte_of(place, first, width);
        &memory[start..start + count * width]
    }

    pub(super) fn bytes_mut(&mut self, operand: Operand, first: i64, count: usize) -> &mut [u8] {
        let width = operand.ty.bytes();
        let Place::Arena(place) = operand.place else { panic!("a step writes to weights") };
        let start = byte_of(place, first, width);
        &mut self.arena[start..start + count * width]
    }

    pub(super) fn floats(&self, operand: Operand, first: i64, count: usize) -> Vec<f32> {
        let bytes = self.bytes(operand, first, count);
        bytes.chunks_exact(operand.ty.bytes()).map(|element| float_of(operand.ty, element)).collect()
    }

    /// Those of an operand that may be missing.
    pub(super) fn optional_floats(&self, operand: Option<Operand>, first: i64, count: usize) -> Option<Vec<f32>> {
        operand.map(|operand| self.floats(operand, first, count))
    }

    pub(super) fn integers(&self, operand: Operand, first: i64, count: usize) -> Vec<i64> {
        let bytes = self.bytes(operand, first, count);
        bytes.chunks_exact(operand.ty.bytes()).map(|element| integer_of(operand.ty, element)).collect()
    }

    pub(super) fn put_floats(&mut self, operand: Operand, first: i64, values: &[f32]) {
        let bytes = self.bytes_mut(operand, first, values.len());
        for (element, &value) in bytes.chunks_exact_mut(operand.ty.bytes()).zip(values) {
            put_float(operand.ty, value, element);
        }
    }

    pub(super) fn put_integers(&mut self, operand: Operand, first: i64, values: &[i64]) {
        let bytes = self.bytes_mut(operand, first, values.len());
        for (element, &value) in bytes.chunks_exact_mut(operand.ty.bytes()).zip(values) {
            put_integer(operand.ty, value, element);
        }
    }
}

pub(super) fn byte_of(place: usize, element: i64, width: usize) -> usize {
    let at = place as i64 + element * width as i64;
    usize::try_from(at).expect("an element lies before the memory's begin")
}

pub(super) fn float_of(ty: Type, element: &[u8]) -> f32 {
    match ty {
        Type::F32 => f32::from_le_bytes(element.try_into().expect("four bytes")),
        Type::F16 => f16::from_le_bytes(element.try_into().expect("two bytes")).to_f32(),
        _ => integer_of(ty, element) as f32,
    }
}

pub(super) fn integer_of(ty: Type, element: &[u8]) -> i64 {
    match ty {
        Type::I64 => i64::from_le_bytes(element.try_into().expect("eight bytes")),
        Type::I32 => i64::from(i32::from_le_bytes(element.try_into().expect("four bytes"))),
        Type::U8 => i64::from(element[0]),
        Type::Bool => i64::from(element[0] != 0),
        Type::F32 | Type::F16 => float_of(ty, element) as i64,
    }
}

/// Truncates to integers; what is out of range becomes the nearest that is in it, and NaN becomes 0.
pub(super) fn put_float(ty: Type, value: f32, element: &mut [u8]) {
    match ty {
        Type::F32 => element.copy_from_slice(&value.to_le_bytes()),
        Type::F16 => element.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        Type::I64 => element.copy_from_slice(&(value as i64).to_le_bytes()),
        Type::I32 => element.copy_from_slice(&(value as i32).to_le_bytes()),
        Type::U8 => element[0] = value as u8,
        Type::Bool => element[0] = u8::from(value != 0.0),
    }
}

/// Wraps in narrower integers.
pub(super) fn put_integer(ty: Type, value: i64, element: &mut [u8]) {
    match ty {
        Type::F32 | Type::F16 => put_float(ty, value as f32, element),
        Type::I64 => element.copy_from_slice(&value.to_le_bytes()),
        Type::I32 => element.copy_from_slice(&(value as i32).to_le_bytes()),
        Type::U8 => element[0] = value as u8,
        Type::Bool => element[0] = u8::from(value != 0),
    }
}

/// The position `index` of a dimension whose first `pad` positions lie before the image, if it is inside.
pub(super) fn inside(index: usize, pad: usize, size: usize) -> Option<usize> {
    index.checked_sub(pad).filter(|&position| position < size)
}

pub(super) fn activate(activation: Activation, value: f32) -> f32 {
    match activation {
        Activation::None => value,
        Activation::Relu => value.max(0.0),
    }
}
