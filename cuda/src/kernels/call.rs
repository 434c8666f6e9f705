//! One launch of a kernel, and its parameters.

use lowering::{
    Place, Type,
    plan::{Operand, View},
};

use crate::driver::{Address, Bases, DriverError};

/// Threads of a block, of all kernels but attention's of binary16.
pub(super) const THREADS: u32 = 256;

/// Elements that a thread of the dense kernels has.
pub(super) const GROUP: usize = 4;

/// One launch of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// Its name, one of [`KERNELS`].
    pub(crate) kernel: &'static str,
    /// Blocks, in one dimension.
    pub(crate) grid: u32,
    /// Threads of a block, likewise.
    pub(crate) threads: u32,
    /// Its only parameter.
    pub(crate) parameters: Vec<u8>,
}

pub(super) fn refused(what: &str, why: &str) -> DriverError {
    DriverError(format!("{what} cannot run on the GPU: {why}"))
}

/// So many threads that each have a number of 31 bits, in blocks of [`THREADS`].
pub(super) fn spread(kernel: &'static str, threads: u32, parameters: Parameters) -> Call {
    Call { kernel, grid: threads.div_ceil(THREADS), threads: THREADS, parameters: parameters.finish() }
}

/// The product of lengths.
///
/// # Errors
/// If kernels, which count in 32 bits, cannot count so far.
pub(super) fn elements(what: &str, lengths: &[usize]) -> Result<u32, DriverError> {
    let product = lengths.iter().try_fold(1usize, |product, &length| product.checked_mul(length));
    product.and_then(|product| i32::try_from(product).ok()).map(|product| product as u32).ok_or_else(|| {
        refused(what, &format!("lengths {lengths:?} make 2^31 elements or more; smaller batches make fewer"))
    })
}

/// A number that a kernel has in 32 bits with a sign.
pub(super) fn small(what: &str, number: i64) -> Result<i32, DriverError> {
    i32::try_from(number).map_err(|_| refused(what, &format!("{number} does not fit 32 bits")))
}

pub(super) fn smalls<const N: usize>(what: &str, numbers: [usize; N]) -> Result<[i32; N], DriverError> {
    let mut small = [0; N];
    for (to, number) in small.iter_mut().zip(numbers) {
        *to = self::small(what, i64::try_from(number).unwrap_or(i64::MAX))?;
    }
    Ok(small)
}

pub(super) fn address(operand: Operand, at: Bases) -> Address {
    match operand.place {
        Place::Arena(offset) => at.arena.plus(offset as u64),
        Place::Weights(offset) => at.weights.plus(offset as u64),
    }
}

/// That of an operand that may be missing: then it is null.
pub(super) fn optional_address(operand: Option<Operand>, at: Bases) -> Address {
    operand.map_or(Address(0), |operand| address(operand, at))
}

/// Whether groups of so many elements, from the operand's first on, lie at multiples of their size.
pub(super) fn is_aligned(operand: Operand, elements: usize, at: Bases) -> bool {
    address(operand, at).0.is_multiple_of((elements * operand.ty.bytes()) as u64)
}

/// Whether threads can have groups of [`GROUP`] elements of rows of so many.
pub(super) fn is_grouped(row: usize, operands: &[Option<Operand>], at: Bases) -> bool {
    row.is_multiple_of(GROUP) && operands.iter().flatten().all(|&operand| is_aligned(operand, GROUP, at))
}

/// Their common type, which is a floating-point one.
pub(super) fn float_type(what: &str, operands: &[Option<Operand>]) -> Result<Type, DriverError> {
    let mut types = operands.iter().flatten().map(|operand| operand.ty);
    let ty = types.next().filter(|ty| ty.is_float() && types.all(|other| other == *ty));
    ty.ok_or_else(|| refused(what, "its tensors must have one floating-point type"))
}

/// As `enum Type` of `common.h`.
pub(super) fn type_number(ty: Type) -> u32 {
    match ty {
        Type::F32 => 0,
        Type::F16 => 1,
        Type::I64 => 2,
        Type::I32 => 3,
        Type::U8 => 4,
        Type::Bool => 5,
    }
}

/// The bytes of a C++ struct whose alignment is 8, written member by member.
#[derive(Debug, Default)]
pub(super) struct Parameters(pub(super) Vec<u8>);

impl Parameters {
    pub(super) fn address(mut self, address: Address) -> Self {
        self.pad(8);
        self.0.extend(address.0.to_le_bytes());
        self
    }

    pub(super) fn i64(mut self, number: i64) -> Self {
        self.pad(8);
        self.0.extend(number.to_le_bytes());
        self
    }

    pub(super) fn u32(mut self, number: u32) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    pub(super) fn i32(self, number: i32) -> Self {
        self.u32(number.cast_unsigned())
    }

    pub(super) fn i32s(self, numbers: &[i32]) -> Self {
        numbers.iter().fold(self, |parameters, &number| parameters.i32(number))
    }

    pub(super) fn f32(self, number: f32) -> Self {
        self.u32(number.to_bits())
    }

    pub(super) fn flag(self, is_set: bool) -> Self {
        self.u32(u32::from(is_set))
    }

    pub(super) fn ty(self, operand: Operand) -> Self {
        self.u32(type_number(operand.ty))
    }

    /// A `Divisor`: division by it is a multiplication (Granlund and Montgomery, figure 4.1), of numbers below 2^31.
    pub(super) fn divisor(self, divisor: u32) -> Self {
        let shift = divisor.next_power_of_two().trailing_zeros();
        let multiplier = ((1u64 << 32) * ((1u64 << shift) - u64::from(divisor))) / u64::from(divisor) + 1;
        self.u32(divisor).u32(multiplier as u32).u32(shift)
    }

    pub(super) fn pad(&mut self, alignment: usize) {
        let bytes = self.0.len().next_multiple_of(alignment);
        self.0.resize(bytes, 0);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.pad(8);
        self.0
    }
}

/// The step's strides, if it has as many as it should.
pub(super) fn strides<const N: usize>(what: &str, view: &View) -> Result<[i64; N], DriverError> {
    let strides = view.strides.as_slice().try_into();
    strides.map_err(|_| refused(what, &format!("a tensor has {} strides instead of {N}", view.strides.len())))
}
