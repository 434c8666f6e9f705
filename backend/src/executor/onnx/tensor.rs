//! Tensors of a batch on their way to what computes a graph and back, and what is known of their lengths before.

use std::fmt;

use repository::DataType;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::ExecutorError;

/// A tensor with its elements in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::executor) struct Tensor {
    pub(in crate::executor) datatype: DataType,
    pub(in crate::executor) shape: Vec<usize>,
    elements: Owned,
}

#[derive(Debug, Clone, PartialEq)]
enum Owned {
    /// In memory that is aligned for any type; zeros may follow the last of them.
    Numbers(Vec<u64>),
    Strings(Vec<String>),
}

/// The elements of a tensor.
pub(in crate::executor) enum Elements<'a> {
    /// As they are in memory.
    Numbers(&'a [u8]),
    Strings(&'a [String]),
}

impl Tensor {
    /// Numbers that are all 0.
    pub(in crate::executor) fn zeros(datatype: DataType, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * datatype.bytes();
        Self { datatype, shape: shape.to_vec(), elements: Owned::Numbers(vec![0; bytes.div_ceil(8)]) }
    }

    /// Numbers in this memory, which holds as many or a few more; they are whatever is in it.
    pub(super) fn in_memory(memory: Vec<u64>, datatype: DataType, shape: &[usize]) -> Self {
        debug_assert!(memory.len() * 8 >= shape.iter().product::<usize>() * datatype.bytes());
        Self { datatype, shape: shape.to_vec(), elements: Owned::Numbers(memory) }
    }

    /// What its numbers are in.
    pub(super) fn into_memory(self) -> Option<Vec<u64>> {
        match self.elements {
            Owned::Numbers(memory) => Some(memory),
            Owned::Strings(_) => None,
        }
    }

    /// As many strings as the shape has elements.
    pub(super) fn of_strings(shape: Vec<usize>, strings: Vec<String>) -> Self {
        debug_assert_eq!(strings.len(), shape.iter().product::<usize>());
        Self { datatype: DataType::Bytes, shape, elements: Owned::Strings(strings) }
    }

    /// These numbers as elements of this type, as casts have it.
    pub(super) fn of_numbers(datatype: DataType, shape: &[usize], numbers: &[f64]) -> Self {
        let mut tensor = Self::zeros(datatype, shape);
        let elements = tensor.bytes_mut().chunks_exact_mut(datatype.bytes());
        for (element, &number) in elements.zip(numbers) {
            write_number(datatype, number, element);
        }
        tensor
    }

    /// Fills it with the same number.
    pub(super) fn fill(&mut self, number: f64) {
        let datatype = self.datatype;
        let mut element = [0; 8];
        let element = &mut element[..datatype.bytes()];
        write_number(datatype, number, element);
        self.bytes_mut().chunks_exact_mut(element.len()).for_each(|into| into.copy_from_slice(element));
    }

    pub(in crate::executor) fn elements(&self) -> Elements<'_> {
        match &self.elements {
            Owned::Numbers(_) => Elements::Numbers(self.bytes()),
            Owned::Strings(strings) => Elements::Strings(strings),
        }
    }

    /// Its numbers as they are in memory; none of strings.
    pub(in crate::executor) fn bytes(&self) -> &[u8] {
        match &self.elements {
            Owned::Numbers(words) => &words.as_bytes()[..self.size()],
            Owned::Strings(_) => &[],
        }
    }

    pub(in crate::executor) fn bytes_mut(&mut self) -> &mut [u8] {
        let size = self.size();
        match &mut self.elements {
            Owned::Numbers(words) => &mut words.as_mut_bytes()[..size],
            Owned::Strings(_) => &mut [],
        }
    }

    fn size(&self) -> usize {
        self.shape.iter().product::<usize>() * self.datatype.bytes()
    }

    /// Its numbers as those of a type that has as many bytes as its own.
    pub(super) fn numbers<T: FromBytes + Immutable + KnownLayout>(&self) -> &[T] {
        <[T]>::ref_from_bytes(self.bytes()).expect("memory is aligned, and holds whole elements")
    }

    /// One row of its first dimension, which stays, and is one long.
    pub(super) fn row(&self, at: usize) -> Self {
        let mut shape = self.shape.clone();
        shape[0] = 1;
        let elements = shape.iter().product::<usize>();
        match &self.elements {
            Owned::Strings(strings) => Self::of_strings(shape, strings[at * elements..][..elements].to_vec()),
            Owned::Numbers(_) => {
                let mut row = Self::zeros(self.datatype, &shape);
                let bytes = elements * self.datatype.bytes();
                row.bytes_mut().copy_from_slice(&self.bytes()[at * bytes..][..bytes]);
                row
            }
        }
    }
}

impl Tensor {
    /// Rows one after another.
    ///
    /// # Errors
    /// If they are not of one shape.
    pub(super) fn stack<'a>(rows: impl ExactSizeIterator<Item = &'a Self>) -> Result<Self, ExecutorError> {
        let (count, mut rows) = (rows.len(), rows.peekable());
        let Some(first) = rows.peek() else { return Ok(Self::zeros(DataType::Uint8, &[0])) };
        let (datatype, own) = (first.datatype, first.shape.clone());
        if own.first() != Some(&1) {
            return Err(ExecutorError(format!("an output has shape {own:?} for one task, expected one row")));
        }
        let mut shape = own.clone();
        shape[0] = count;
        let mut stacked = Self::zeros(datatype, &shape);
        let mut rest = stacked.bytes_mut();
        for row in rows {
            if row.shape != own {
                let other = &row.shape;
                return Err(ExecutorError(format!(
                    "an output has shape {own:?} for one task and {other:?} for another"
                )));
            }
            rest.split_off_mut(..row.bytes().len()).expect("these were counted").copy_from_slice(row.bytes());
        }
        Ok(stacked)
    }
}

fn write_number(datatype: DataType, number: f64, into: &mut [u8]) {
    match datatype {
        DataType::Bool => into[0] = u8::from(number != 0.0),
        DataType::Uint8 => into.copy_from_slice(&(number as u8).to_le_bytes()),
        DataType::Uint16 => into.copy_from_slice(&(number as u16).to_le_bytes()),
        DataType::Uint32 => into.copy_from_slice(&(number as u32).to_le_bytes()),
        DataType::Uint64 => into.copy_from_slice(&(number as u64).to_le_bytes()),
        DataType::Int8 => into.copy_from_slice(&(number as i8).to_le_bytes()),
        DataType::Int16 => into.copy_from_slice(&(number as i16).to_le_bytes()),
        DataType::Int32 => into.copy_from_slice(&(number as i32).to_le_bytes()),
        DataType::Int64 => into.copy_from_slice(&(number as i64).to_le_bytes()),
        DataType::Fp16 => into.copy_from_slice(&half::f16::from_f64(number).to_le_bytes()),
        DataType::Bf16 => into.copy_from_slice(&half::bf16::from_f64(number).to_le_bytes()),
        DataType::Fp32 => into.copy_from_slice(&(number as f32).to_le_bytes()),
        DataType::Fp64 => into.copy_from_slice(&number.to_le_bytes()),
        DataType::Bytes => {}
    }
}

/// Clients choose these bytes, but a `bool` other than 0 or 1 is undefined.
pub(super) fn clean(datatype: DataType, bytes: &mut [u8]) {
    if datatype == DataType::Bool {
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
}

/// A length of a graph's tensor, as far as it is known before the graph runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::executor) enum Length {
    Fixed(usize),
    /// What the file calls it: lengths of one name are equal.
    Named(String),
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => length.fmt(f),
            Self::Named(name) => name.fmt(f),
        }
    }
}

impl Length {
    pub(super) fn fixed(&self) -> Option<usize> {
        match self {
            Self::Fixed(length) => Some(*length),
            Self::Named(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_of_any_type_and_rows_are_cut_out() {
        for datatype in DataType::ALL.into_iter().filter(|&datatype| datatype != DataType::Bytes) {
            let mut tensor = Tensor::of_numbers(datatype, &[3, 1], &[0.0, 1.0, 1.0]);
            let own = datatype.bytes();
            assert_eq!(tensor.bytes().len(), 3 * own, "{datatype}");
            assert_eq!(tensor.row(1), Tensor::of_numbers(datatype, &[1, 1], &[1.0]), "{datatype}");
            assert_eq!(tensor.row(0).bytes(), vec![0; own], "{datatype}");
            tensor.fill(1.0);
            assert_eq!(tensor.row(0).bytes(), tensor.row(2).bytes(), "{datatype}");
        }
        let halves = Tensor::of_numbers(DataType::Fp16, &[1], &[-2.5]);
        assert_eq!(halves.bytes(), half::f16::from_f32(-2.5).to_le_bytes());
        assert_eq!(Tensor::of_numbers(DataType::Int64, &[1], &[-7.0]).numbers::<i64>(), [-7]);
        let strings = Tensor::of_strings(vec![2, 1], vec!["a".to_owned(), "b".to_owned()]);
        assert!(matches!(strings.row(1).elements(), Elements::Strings([b]) if b == "b"));
        assert!(strings.bytes().is_empty() && Tensor::zeros(DataType::Fp32, &[0, 4]).bytes().is_empty());
    }
}
