//! Our own kernels (`cuda/kernels/*.cu`): which one does a step, in how many blocks, with what parameters. It is
//! decided when a plan is prepared, and nothing of it touches a GPU: a [`Call`] runs as it is on the emulation of
//! `cuda/kernels/host`, where tests compare it with what [`lowering::interpret`] says that the step means.
//!
//! A kernel takes one struct, which [`Parameters`] lays out as C++ does.

mod attention;
mod images;
mod pointwise;
mod rows;
#[cfg(test)]
mod tests;

use lowering::{
    Place, Step, Type,
    plan::{Operand, View},
};

use crate::driver::{Address, Bases, DriverError};

/// What `cuda/kernels/compile` made, by the names of the files.
pub(crate) const MODULES: [(&str, &str); 5] = [
    ("attention", include_str!("../kernels/ptx/attention.ptx")),
    ("gather", include_str!("../kernels/ptx/gather.ptx")),
    ("images", include_str!("../kernels/ptx/images.ptx")),
    ("pointwise", include_str!("../kernels/ptx/pointwise.ptx")),
    ("rows", include_str!("../kernels/ptx/rows.ptx")),
];

/// All kernels, and the index in [`MODULES`] of the module that has them.
pub(crate) const KERNELS: [(&str, usize); 22] = [
    ("attention_f16_128", 0),
    ("attention_f16_64", 0),
    ("attention_f32", 0),
    ("conv_depthwise_f16", 2),
    ("conv_depthwise_f32", 2),
    ("conv_grouped_f16", 2),
    ("conv_grouped_f32", 2),
    ("gather", 1),
    ("norm_rows", 4),
    ("norm_rows_dense", 4),
    ("pointwise_float", 3),
    ("pointwise_float_dense", 3),
    ("pointwise_integer", 3),
    ("pointwise_tiled", 3),
    ("pool", 2),
    ("pool_dense", 2),
    ("reduce_columns_float", 4),
    ("reduce_columns_integer", 4),
    ("reduce_rows_float", 4),
    ("reduce_rows_integer", 4),
    ("resize", 2),
    ("softmax_rows", 4),
];

/// Threads of a block, of all kernels but attention's of binary16.
const THREADS: u32 = 256;
/// Elements that a thread of the dense kernels has.
const GROUP: usize = 4;

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

/// What runs a step of a plan whose faults lie at `faults` of the arena: nothing if it has no elements.
///
/// # Errors
/// If no kernel of ours can.
pub(crate) fn calls(step: &Step, faults: Option<usize>, at: Bases) -> Result<Vec<Call>, DriverError> {
    let call = match step {
        Step::Conv(step) => images::conv(step, at),
        Step::Matmul(_) => Err(refused("a matrix product", "there is no kernel of ours for it")),
        Step::Pointwise(step) => pointwise::pointwise(step, at),
        Step::Reduce(step) => rows::reduce(step, at),
        Step::Softmax(step) => rows::softmax(step, at),
        Step::Norm(step) => rows::norm(step, at),
        Step::Attention(step) => attention::attention(step, at),
        Step::Pool(step) => images::pool(step, at),
        Step::Gather(step) => rows::gather(step, faults, at),
        Step::Resize(step) => images::resize(step, at),
    };
    Ok(call?.into_iter().collect())
}

fn refused(what: &str, why: &str) -> DriverError {
    DriverError(format!("{what} cannot run on the GPU: {why}"))
}

/// So many threads that each have a number of 31 bits, in blocks of [`THREADS`].
fn spread(kernel: &'static str, threads: u32, parameters: Parameters) -> Call {
    Call { kernel, grid: threads.div_ceil(THREADS), threads: THREADS, parameters: parameters.finish() }
}

/// The product of lengths.
///
/// # Errors
/// If kernels, which count in 32 bits, cannot count so far.
fn elements(what: &str, lengths: &[usize]) -> Result<u32, DriverError> {
    let product = lengths.iter().try_fold(1usize, |product, &length| product.checked_mul(length));
    product.and_then(|product| i32::try_from(product).ok()).map(|product| product as u32).ok_or_else(|| {
        refused(what, &format!("lengths {lengths:?} make 2^31 elements or more; smaller batches make fewer"))
    })
}

/// A number that a kernel has in 32 bits with a sign.
fn small(what: &str, number: i64) -> Result<i32, DriverError> {
    i32::try_from(number).map_err(|_| refused(what, &format!("{number} does not fit 32 bits")))
}

fn smalls<const N: usize>(what: &str, numbers: [usize; N]) -> Result<[i32; N], DriverError> {
    let mut small = [0; N];
    for (to, number) in small.iter_mut().zip(numbers) {
        *to = self::small(what, i64::try_from(number).unwrap_or(i64::MAX))?;
    }
    Ok(small)
}

fn address(operand: Operand, at: Bases) -> Address {
    match operand.place {
        Place::Arena(offset) => at.arena.plus(offset as u64),
        Place::Weights(offset) => at.weights.plus(offset as u64),
    }
}

/// That of an operand that may be missing: then it is null.
fn optional_address(operand: Option<Operand>, at: Bases) -> Address {
    operand.map_or(Address(0), |operand| address(operand, at))
}

/// Whether groups of so many elements, from the operand's first on, lie at multiples of their size.
fn is_aligned(operand: Operand, elements: usize, at: Bases) -> bool {
    address(operand, at).0.is_multiple_of((elements * operand.ty.bytes()) as u64)
}

/// Whether threads can have groups of [`GROUP`] elements of rows of so many.
fn is_grouped(row: usize, operands: &[Option<Operand>], at: Bases) -> bool {
    row.is_multiple_of(GROUP) && operands.iter().flatten().all(|&operand| is_aligned(operand, GROUP, at))
}

/// Their common type, which is a floating-point one.
fn float_type(what: &str, operands: &[Option<Operand>]) -> Result<Type, DriverError> {
    let mut types = operands.iter().flatten().map(|operand| operand.ty);
    let ty = types.next().filter(|ty| ty.is_float() && types.all(|other| other == *ty));
    ty.ok_or_else(|| refused(what, "its tensors must have one floating-point type"))
}

/// As `enum Type` of `common.h`.
fn type_number(ty: Type) -> u32 {
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
struct Parameters(Vec<u8>);

impl Parameters {
    fn address(mut self, address: Address) -> Self {
        self.pad(8);
        self.0.extend(address.0.to_le_bytes());
        self
    }

    fn i64(mut self, number: i64) -> Self {
        self.pad(8);
        self.0.extend(number.to_le_bytes());
        self
    }

    fn u32(mut self, number: u32) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn i32(self, number: i32) -> Self {
        self.u32(number.cast_unsigned())
    }

    fn i32s(self, numbers: &[i32]) -> Self {
        numbers.iter().fold(self, |parameters, &number| parameters.i32(number))
    }

    fn f32(self, number: f32) -> Self {
        self.u32(number.to_bits())
    }

    fn flag(self, is_set: bool) -> Self {
        self.u32(u32::from(is_set))
    }

    fn ty(self, operand: Operand) -> Self {
        self.u32(type_number(operand.ty))
    }

    /// A `Divisor`: division by it is a multiplication (Granlund and Montgomery, figure 4.1), of numbers below 2^31.
    fn divisor(self, divisor: u32) -> Self {
        let shift = divisor.next_power_of_two().trailing_zeros();
        let multiplier = ((1u64 << 32) * ((1u64 << shift) - u64::from(divisor))) / u64::from(divisor) + 1;
        self.u32(divisor).u32(multiplier as u32).u32(shift)
    }

    fn pad(&mut self, alignment: usize) {
        let bytes = self.0.len().next_multiple_of(alignment);
        self.0.resize(bytes, 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.pad(8);
        self.0
    }
}

/// The step's strides, if it has as many as it should.
fn strides<const N: usize>(what: &str, view: &View) -> Result<[i64; N], DriverError> {
    let strides = view.strides.as_slice().try_into();
    strides.map_err(|_| refused(what, &format!("a tensor has {} strides instead of {N}", view.strides.len())))
}
