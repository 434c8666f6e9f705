//! The model's weights as one image, which the plans of all batch sizes share: equal bytes lie there once.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use half::f16;
use tract_onnx::prelude::*;

use super::{LowerError, layout::Layout};
use crate::plan::{ALIGNMENT, Type};

/// What has been put into the image under which name, and what is there.
#[derive(Default)]
pub(super) struct Image {
    pub(super) bytes: Vec<u8>,
    by_content: HashMap<u64, Vec<(usize, usize)>>,
    by_key: HashMap<Vec<Key>, usize>,
    /// Tensors that keys name by address, so that no other gets that address.
    kept: Vec<Arc<Tensor>>,
}

/// What rows are multiplied by, and their length.
type Scale<'a> = Option<(&'a [f32], usize)>;

/// A matrix that is a part of a longer one: some of its rows.
pub(super) struct Part<'a> {
    pub(super) tensor: (&'a Arc<Tensor>, &'a str),
    pub(super) layout: &'a Layout,
    pub(super) scale: Scale<'a>,
}

/// What a weight is made of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    tensor: usize,
    layout: Option<Layout>,
    ty: Type,
    /// A digest of what its elements are multiplied by.
    scales: u64,
}

impl Image {
    /// The offset of a tensor of this type; as it lies, or read through a layout.
    pub(super) fn constant(
        &mut self,
        (tensor, name): (&Arc<Tensor>, &str),
        ty: Type,
        layout: Option<&Layout>,
    ) -> Result<usize, LowerError> {
        self.keyed(vec![key(tensor, (layout, ty, None))], std::iter::once(tensor), || match ty.is_float() {
            true => {
                let values = floats(tensor)?;
                encode(&layout.map_or_else(|| values.clone(), |layout| layout.read(&values)), ty, name)
            }
            false => {
                let values = integers(tensor)?;
                let values = layout.map_or_else(|| values.clone(), |layout| layout.read(&values));
                Ok(values.iter().flat_map(|value| value.to_le_bytes()[..ty.bytes()].to_vec()).collect())
            }
        })
    }

    /// The offset of a matrix of weights, read through a layout, whose rows or columns are multiplied by `scales`:
    /// the element at index i by that of `i / inner % scales.len()`.
    pub(super) fn scaled(
        &mut self,
        (tensor, name): (&Arc<Tensor>, &str),
        ty: Type,
        layout: &Layout,
        (scales, inner): (&[f32], usize),
    ) -> Result<usize, LowerError> {
        self.joined(&[Part { tensor: (tensor, name), layout, scale: Some((scales, inner)) }], ty)
    }

    /// The offset of matrices of weights that lie one after another.
    pub(super) fn joined(&mut self, parts: &[Part<'_>], ty: Type) -> Result<usize, LowerError> {
        let key = |part: &Part<'_>| key(part.tensor.0, (Some(part.layout), ty, part.scale));
        let tensors = parts.iter().map(|part| part.tensor.0);
        self.keyed(parts.iter().map(key).collect(), tensors, || {
            let mut bytes = Vec::new();
            for Part { tensor: (tensor, name), layout, scale } in parts {
                let mut values = layout.read(&floats(tensor)?);
                for (index, value) in values.iter_mut().enumerate() {
                    *value *= scale.map_or(1.0, |(scales, inner)| scales[index / inner % scales.len()]);
                }
                bytes.extend(encode(&values, ty, name)?);
            }
            Ok(bytes)
        })
    }

    /// The offset of numbers that no tensor of the model holds.
    pub(super) fn vector(&mut self, values: &[f32], ty: Type, name: &str) -> Result<usize, LowerError> {
        Ok(self.put(encode(values, ty, name)?))
    }

    /// Forgets what was put behind so many bytes.
    pub(super) fn cut(&mut self, bytes: usize) {
        self.bytes.truncate(bytes);
        self.by_key.retain(|_, offset| *offset < bytes);
        self.by_content.values_mut().for_each(|alike| alike.retain(|&(offset, _)| offset < bytes));
    }

    fn keyed<'a>(
        &mut self,
        key: Vec<Key>,
        tensors: impl Iterator<Item = &'a Arc<Tensor>>,
        make: impl FnOnce() -> Result<Vec<u8>, LowerError>,
    ) -> Result<usize, LowerError> {
        if let Some(&offset) = self.by_key.get(&key) {
            return Ok(offset);
        }
        let offset = self.put(make()?);
        self.by_key.insert(key, offset);
        self.kept.extend(tensors.cloned());
        Ok(offset)
    }

    fn put(&mut self, bytes: Vec<u8>) -> usize {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let alike = self.by_content.entry(hasher.finish()).or_default();
        let is_there = |&&(offset, length): &&(usize, usize)| self.bytes[offset..offset + length] == bytes[..];
        if let Some(&(offset, _)) = alike.iter().find(is_there) {
            return offset;
        }
        let offset = self.bytes.len().next_multiple_of(ALIGNMENT);
        alike.push((offset, bytes.len()));
        self.bytes.resize(offset, 0);
        self.bytes.extend_from_slice(&bytes);
        offset
    }
}

fn key(tensor: &Arc<Tensor>, (layout, ty, scale): (Option<&Layout>, Type, Scale<'_>)) -> Key {
    let scales = scale.map_or(0, |(scales, inner)| {
        let mut hasher = DefaultHasher::new();
        (scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>(), inner).hash(&mut hasher);
        hasher.finish()
    });
    Key { tensor: Arc::as_ptr(tensor) as usize, layout: layout.cloned(), ty, scales }
}

fn unreadable(cause: TractError) -> LowerError {
    LowerError::Graph(format!("{cause:#}"))
}

/// A tensor's numbers, as binary32.
pub(super) fn floats(tensor: &Tensor) -> Result<Vec<f32>, LowerError> {
    let tensor = tensor.cast_to::<f32>().map_err(unreadable)?;
    let plain = tensor.try_as_plain_ram().map_err(unreadable)?;
    Ok(plain.as_slice::<f32>().map_err(unreadable)?.to_vec())
}

/// A tensor's numbers, as integers.
pub(super) fn integers(tensor: &Tensor) -> Result<Vec<i64>, LowerError> {
    let tensor = tensor.cast_to::<i64>().map_err(unreadable)?;
    let plain = tensor.try_as_plain_ram().map_err(unreadable)?;
    Ok(plain.as_slice::<i64>().map_err(unreadable)?.to_vec())
}

fn encode(values: &[f32], ty: Type, name: &str) -> Result<Vec<u8>, LowerError> {
    if ty != Type::F16 {
        return Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect());
    }
    let mut bytes = Vec::with_capacity(values.len() * 2);
    for &value in values {
        let half = f16::from_f32(value);
        if value.is_finite() && half.is_infinite() {
            return Err(LowerError::Overflow { tensor: name.to_owned(), value: value.to_string() });
        }
        bytes.extend_from_slice(&half.to_le_bytes());
    }
    Ok(bytes)
}
