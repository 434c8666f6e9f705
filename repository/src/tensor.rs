//! What a model takes and gives: tensors, their types and shapes.

use std::fmt;

use crate::cell;

/// A tensor of one task: the batch dimension is not part of its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// As clients name it.
    pub name: String,
    /// Its element type.
    pub datatype: DataType,
    /// Its shape without the batch dimension, every dimension positive; of one that requests choose, the longest.
    pub shape: Vec<usize>,
    /// The shape that the model itself takes or gives instead, if that is another one with as many elements.
    pub reshape: Option<Vec<usize>>,
    /// What requests choose of it; it is a [`cell`] then. `None` if it has the same size in all of them.
    pub variable: Option<Variable>,
}

/// What differs from request to request of a tensor; nothing but its strings if `dims` is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Which dimensions of `shape` have the length that a request chooses, ascending (-1 in the configuration).
    pub dims: Vec<usize>,
    /// The same of `reshape`, in the same order.
    pub reshape_dims: Vec<usize>,
    /// Its elements have this many bytes at most.
    pub bytes_max: usize,
    /// Requests may leave it out.
    pub is_optional: bool,
    /// It has as many dimensions as it has: what a file notes of an output need not be so.
    pub any_rank: bool,
}

/// Dimensions of a tensor that may have any number of them.
pub(crate) const RANK_MAX: usize = 16;

impl Tensor {
    /// A tensor whose shape is the same for clients and for the model, and in all requests.
    #[must_use]
    pub fn new(name: impl Into<String>, datatype: DataType, shape: Vec<usize>) -> Self {
        Self { name: name.into(), datatype, shape, reshape: None, variable: None }
    }

    /// Its shape for the model itself, without the batch dimension; with the longest of what requests choose.
    #[must_use]
    pub fn model_shape(&self) -> &[usize] {
        self.reshape.as_deref().unwrap_or(&self.shape)
    }

    /// Which dimensions of [`Self::model_shape`] have the length that a request chooses, ascending.
    #[must_use]
    pub fn model_variable_dims(&self) -> &[usize] {
        match &self.variable {
            Some(variable) if self.reshape.is_some() => &variable.reshape_dims,
            Some(variable) => &variable.dims,
            None => &[],
        }
    }

    /// The shape that the model itself has where clients have `shape`, which [`Self::accepts`].
    #[must_use]
    pub fn model_shape_of(&self, shape: &[usize]) -> Vec<usize> {
        let (Some(reshape), Some(variable)) = (&self.reshape, &self.variable) else {
            return self.reshape.clone().unwrap_or_else(|| shape.to_vec());
        };
        let mut model_shape = reshape.clone();
        for (&at, &dim) in variable.reshape_dims.iter().zip(&variable.dims) {
            model_shape[at] = shape[dim];
        }
        model_shape
    }

    /// The shape that clients have where the model itself has `found`; the reverse of [`Self::model_shape_of`].
    /// Lengths of one do not matter: convolutions leave some at the end, and configurations name them or not. `None` if
    /// it is none of its shapes.
    #[must_use]
    pub fn client_shape_of(&self, found: &[usize]) -> Option<Vec<usize>> {
        let own = self.model_shape();
        if self.variable.is_none() {
            let lengths = |shape: &[usize]| shape.iter().copied().filter(|&length| length != 1).collect::<Vec<_>>();
            return (lengths(found) == lengths(own)).then(|| self.shape.clone());
        }
        if self.variable.as_ref().is_some_and(|variable| variable.any_rank) {
            return self.accepts(found).then(|| found.to_vec());
        }
        let is_whole = found.len() >= own.len() && found[own.len()..].iter().all(|&length| length == 1);
        let found = &found[..own.len().min(found.len())];
        let mut shape = self.shape.clone();
        if let Some(variable) = &self.variable {
            let dims = self.model_variable_dims();
            variable.dims.iter().zip(dims).for_each(|(&dim, &at)| shape[dim] = found.get(at).copied().unwrap_or(0));
        }
        (is_whole && self.model_shape_of(&shape) == found && self.accepts(&shape)).then_some(shape)
    }

    /// Whether requests may choose this shape, the batch dimension left out.
    #[must_use]
    pub fn accepts(&self, shape: &[usize]) -> bool {
        let Some(variable) = &self.variable else {
            // Triton's clients give a number as a vector of one.
            return self.shape == shape || self.shape.is_empty() && shape == [1];
        };
        if variable.any_rank {
            let bytes = elements(shape).and_then(|elements| elements.checked_mul(self.datatype.bytes()));
            return shape.len() <= RANK_MAX && bytes.is_some_and(|bytes| bytes <= variable.bytes_max);
        }
        let is_length = |(dim, (found, own)): (usize, (&usize, &usize))| {
            found == own || (found < own && variable.dims.contains(&dim))
        };
        shape.len() == self.shape.len()
            && shape.iter().zip(&self.shape).enumerate().all(is_length)
            && elements(shape).and_then(|elements| elements.checked_mul(self.datatype.bytes()))
                <= Some(variable.bytes_max)
            && elements(shape).is_some()
    }

    /// Its shape as the configuration has it: without the batch dimension, -1 for what requests choose.
    pub fn dims(&self) -> impl Iterator<Item = i64> {
        let is_variable = |dim: usize| self.variable.as_ref().is_some_and(|variable| variable.dims.contains(&dim));
        self.shape.iter().enumerate().map(move |(dim, &length)| if is_variable(dim) { -1 } else { length as i64 })
    }

    /// Whether requests may leave it out.
    #[must_use]
    pub fn is_optional(&self) -> bool {
        self.variable.as_ref().is_some_and(|variable| variable.is_optional)
    }

    /// Elements of one task's tensor, at most.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of one task's tensor; of a [`cell`], at most.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.variable {
            None => self.elements() * self.datatype.bytes(),
            Some(variable) => {
                let dims = if variable.any_rank { 1 + RANK_MAX } else { self.shape.len() };
                cell::HEAD_BYTES + dims * cell::DIM_BYTES + variable.bytes_max
            }
        }
    }
}

/// Elements of a tensor of this shape; `None` if they cannot be counted.
#[must_use]
pub fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length))
}

/// Element types of the Open Inference Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DataType {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    Bf16,
    /// Strings of any bytes.
    Bytes,
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl DataType {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::Uint8,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Fp32,
        Self::Fp64,
        Self::Bf16,
        Self::Bytes,
    ];

    /// As the Open Inference Protocol spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Uint8 => "UINT8",
            Self::Uint16 => "UINT16",
            Self::Uint32 => "UINT32",
            Self::Uint64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
            Self::Bf16 => "BF16",
            Self::Bytes => "BYTES",
        }
    }

    /// As Triton's configuration spells it (`DataType` of model_config.proto).
    #[must_use]
    pub fn config_name(self) -> String {
        format!("TYPE_{}", if self == Self::Bytes { "STRING" } else { self.name() })
    }

    /// The type of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name)
    }

    /// Whether its elements are floating-point numbers.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::Fp16 | Self::Fp32 | Self::Fp64 | Self::Bf16)
    }

    /// Bytes of one element; of a string the least, which are those of its length.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => 2,
            Self::Uint32 | Self::Int32 | Self::Fp32 | Self::Bytes => 4,
            Self::Uint64 | Self::Int64 | Self::Fp64 => 8,
        }
    }
}
