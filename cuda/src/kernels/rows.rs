//! Reductions, softmax, normalisation, gathering.

use lowering::plan::{Gather, Norm, Operand, Reduce, Reduction, Softmax, Type};

use crate::{
    driver::{Address, Bases, DriverError},
    kernels::call::{
        Call, GROUP, Parameters, THREADS, address, elements, float_type, is_grouped, optional_address, refused, small,
        spread,
    },
};

/// Threads of a warp.
const WARP: usize = 32;
/// Columns that a warp does by itself: so many that a block would wait for its barriers rather than for memory.
const WARP_COLUMNS_MAX: usize = 1024;

/// How many threads have a row.
fn threads_of(columns: usize) -> u32 {
    if columns <= WARP_COLUMNS_MAX { WARP as u32 } else { THREADS }
}

/// One launch in which so many rows have so many threads each.
fn by_row(
    what: &str,
    kernel: &'static str,
    rows: usize,
    threads: u32,
    parameters: Parameters,
) -> Result<Call, DriverError> {
    Ok(spread(kernel, elements(what, &[rows, threads as usize])?, parameters))
}

/// As `enum Reduction` of `rows.cu`.
fn reduction_number(reduction: Reduction) -> u32 {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Mean => 1,
        Reduction::MeanOfSquares => 2,
        Reduction::Product => 3,
        Reduction::Max => 4,
        Reduction::Min => 5,
        Reduction::ArgMax => 6,
        Reduction::ArgMin => 7,
    }
}

pub(super) fn reduce(step: &Reduce, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a reduction";
    if elements(what, &[step.outer, step.length, step.inner])? == 0 {
        return Ok(None);
    }
    let threads = threads_of(step.length);
    let parameters = Parameters::default()
        .address(address(step.input, at))
        .address(address(step.output, at))
        .ty(step.input)
        .ty(step.output)
        .u32(reduction_number(step.reduction))
        .u32(threads)
        .u32(step.outer as u32)
        .u32(step.length as u32)
        .u32(step.inner as u32);
    let is_float = step.input.ty.is_float();
    if step.inner == 1 {
        let kernel = if is_float { "reduce_rows_float" } else { "reduce_rows_integer" };
        return by_row(what, kernel, step.outer, threads, parameters).map(Some);
    }
    let kernel = if is_float { "reduce_columns_float" } else { "reduce_columns_integer" };
    let grid = elements(what, &[step.outer, step.inner.div_ceil(WARP)])?;
    Ok(Some(Call { kernel, grid, threads: THREADS, parameters: parameters.finish() }))
}

pub(super) fn softmax(step: &Softmax, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a softmax";
    float_type(what, &[Some(step.input), Some(step.output)])?;
    if elements(what, &[step.rows, step.columns])? == 0 {
        return Ok(None);
    }
    let threads = threads_of(step.columns);
    let parameters = Parameters::default()
        .address(address(step.input, at))
        .address(address(step.output, at))
        .ty(step.input)
        .u32(threads)
        .u32(step.rows as u32)
        .u32(step.columns as u32)
        .f32(step.scale)
        .flag(step.is_log);
    by_row(what, "softmax_rows", step.rows, threads, parameters).map(Some)
}

pub(super) fn norm(step: &Norm, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a normalisation";
    float_type(what, &[Some(step.input), step.residual, step.sum, Some(step.output)])?;
    if elements(what, &[step.rows, step.columns])? == 0 {
        return Ok(None);
    }
    let vector = |operand: Option<Operand>| operand.unwrap_or(step.input);
    let tensors = [Some(step.input), step.residual, step.scale, step.shift, step.sum, Some(step.output)];
    let is_dense = is_grouped(step.columns, &tensors, at);
    let threads = threads_of(if is_dense { step.columns / GROUP } else { step.columns });
    let parameters = Parameters::default()
        .address(address(step.input, at))
        .address(optional_address(step.residual, at))
        .address(optional_address(step.scale, at))
        .address(optional_address(step.shift, at))
        .address(optional_address(step.sum.filter(|_| step.residual.is_some()), at))
        .address(address(step.output, at))
        .ty(step.input)
        .ty(vector(step.scale))
        .ty(vector(step.shift))
        .u32(threads)
        .u32(step.rows as u32)
        .u32(step.columns as u32)
        .f32(step.epsilon)
        .flag(step.is_rms);
    let kernel = if is_dense { "norm_rows_dense" } else { "norm_rows" };
    by_row(what, kernel, step.rows, threads, parameters).map(Some)
}

pub(super) fn gather(step: &Gather, faults: Option<usize>, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a gathering";
    if !matches!(step.indices.ty, Type::I64 | Type::I32) || step.input.ty != step.output.ty {
        return Err(refused(what, "its indices must be I64 or I32, and its rows of one type"));
    }
    let row_bytes = step.inner * step.input.ty.bytes();
    let (input, output) = (address(step.input, at), address(step.output, at));
    // The largest power of two that all of them are multiples of.
    let unit =
        (16 | row_bytes as u64 | input.0 | output.0) & (16 | row_bytes as u64 | input.0 | output.0).wrapping_neg();
    let units = row_bytes / unit as usize;
    let threads = elements(what, &[step.outer, step.count, units])?;
    if threads == 0 {
        return Ok(None);
    }
    small(what, i64::try_from(step.length).unwrap_or(i64::MAX))?;
    let has_faults = step.indices_per_task > 0;
    let faults = faults.filter(|_| has_faults).map_or(Address(0), |faults| at.arena.plus(faults as u64));
    let parameters = Parameters::default()
        .address(input)
        .address(address(step.indices, at))
        .address(output)
        .address(faults)
        .ty(step.indices)
        .u32(unit as u32)
        .u32(step.length as u32)
        .u32(step.indices_per_task as u32)
        .divisor(units as u32)
        .divisor(step.count as u32)
        .u32(threads);
    Ok(Some(spread("gather", threads, parameters)))
}
