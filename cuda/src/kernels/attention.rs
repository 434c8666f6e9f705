//! Attention: which kernel, by type and width.

use lowering::plan::{ATTENTION_WIDTH_MAX, Attention, Operand, Place, Type, View};

use crate::{
    driver::{Address, Bases, DriverError},
    kernels::call::{self, Call, Parameters, address, elements, float_type, refused, strides},
};

const WHAT: &str = "an attention";
/// Elements of binary16 that are loaded at once.
const VECTOR: usize = 8;

pub(super) fn attention(step: &Attention, at: Bases) -> Result<Option<Call>, DriverError> {
    let views = [&step.query, &step.key, &step.value, &step.output];
    let ty = float_type(WHAT, &views.map(|view| Some(view.base)))?;
    if step.width > ATTENTION_WIDTH_MAX {
        let why = format!("its vectors have {} elements, and kernels take {ATTENTION_WIDTH_MAX} at most", step.width);
        return Err(refused(WHAT, &why));
    }
    if elements(WHAT, &[step.batch, step.heads, step.queries, step.width])? == 0 {
        return Ok(None);
    }
    elements(WHAT, &[step.keys])?;
    // Queries of a block, and its threads, as the kernels have them.
    let (kernel, queries, threads) = match ty {
        Type::F16 if step.width <= 64 => ("attention_f16_64", 64, 128),
        Type::F16 => ("attention_f16_128", 64, 128),
        _ => ("attention_f32", 8, 256),
    };
    let tiles = step.queries.div_ceil(queries);
    let grid = elements(WHAT, &[step.batch, step.heads, tiles])?;
    let mut is_aligned = step.width.is_multiple_of(VECTOR);
    for view in [&step.key, &step.value] {
        is_aligned &= call::is_aligned(view.base, VECTOR, at);
        is_aligned &= view.strides.iter().all(|stride| stride % VECTOR as i64 == 0);
    }
    let mut parameters = Parameters::default();
    for view in views {
        parameters = parameters.address(address(view.base, at));
        parameters = strides::<3>(WHAT, view)?.into_iter().fold(parameters, Parameters::i64);
    }
    let parameters = mask(parameters, step.mask.as_ref(), at)?
        .u32(step.heads as u32)
        .u32(step.queries as u32)
        .u32(step.keys as u32)
        .u32(step.width as u32)
        .f32(step.scale)
        .flag(step.is_causal)
        .u32(tiles as u32)
        .flag(is_aligned);
    Ok(Some(Call { kernel, grid, threads, parameters: parameters.finish() }))
}

/// Its address, strides and type.
fn mask(parameters: Parameters, mask: Option<&View>, at: Bases) -> Result<Parameters, DriverError> {
    let Some(mask) = mask else {
        let none = Operand { place: Place::Arena(0), ty: Type::F32 };
        return Ok([0; 4].into_iter().fold(parameters.address(Address(0)), Parameters::i64).ty(none));
    };
    float_type("the mask of an attention", &[Some(mask.base)])?;
    let parameters = parameters.address(address(mask.base, at));
    Ok(strides::<4>(WHAT, mask)?.into_iter().fold(parameters, Parameters::i64).ty(mask.base))
}
