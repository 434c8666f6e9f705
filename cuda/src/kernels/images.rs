//! Pooling, resizing, and convolutions of many groups.

use lowering::plan::{Activation, Conv, Pool, PoolKind, Resize, ResizeKind, Type};

use crate::{
    driver::{Bases, DriverError},
    kernels::call::{
        Call, GROUP, Parameters, address, elements, float_type, is_grouped, optional_address, smalls, spread,
        type_number,
    },
};

/// Threads for the positions of an output, and the struct `Positions`: a thread has so many channels.
fn positions(parameters: Parameters, [height, width]: [usize; 2], channels: usize, threads: u32) -> Parameters {
    parameters.divisor(channels as u32).divisor(width as u32).divisor(height as u32).u32(threads)
}

/// A window's size, strides, dilations and pads, as pools and convolutions have them.
fn window(
    what: &str,
    parameters: Parameters,
    [size, kernel, strides, dilations, pads]: [[usize; 2]; 5],
) -> Result<Parameters, DriverError> {
    let mut parameters = parameters;
    for pair in [size, kernel, strides, dilations, pads] {
        parameters = parameters.i32s(&smalls(what, pair)?);
    }
    Ok(parameters)
}

pub(super) fn pool(step: &Pool, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a pooling";
    float_type(what, &[Some(step.input), Some(step.output)])?;
    elements(what, &[step.n, step.size[0], step.size[1], step.c])?;
    let is_dense = is_grouped(step.c, &[Some(step.input), Some(step.output)], at);
    let channels = if is_dense { step.c / GROUP } else { step.c };
    let threads = elements(what, &[step.n, step.out[0], step.out[1], channels])?;
    if threads == 0 {
        return Ok(None);
    }
    let kind = match step.kind {
        PoolKind::Max => 0,
        PoolKind::Average => 1,
        PoolKind::AveragePadded => 2,
    };
    let parameters = Parameters::default()
        .address(address(step.input, at))
        .address(address(step.output, at))
        .ty(step.input)
        .u32(kind)
        .u32(step.c as u32);
    let of_window = [step.size, step.kernel, step.strides, step.dilations, step.pads];
    let parameters = positions(window(what, parameters, of_window)?, step.out, channels, threads);
    Ok(Some(spread(if is_dense { "pool_dense" } else { "pool" }, threads, parameters)))
}

pub(super) fn resize(step: &Resize, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a resizing";
    let ty = float_type(what, &[Some(step.input), Some(step.output)])?;
    elements(what, &[step.n, step.size[0], step.size[1], step.c])?;
    let threads = elements(what, &[step.n, step.out[0], step.out[1], step.c])?;
    if threads == 0 {
        return Ok(None);
    }
    let kind = match step.kind {
        ResizeKind::Floor => 0,
        ResizeKind::Ceil => 1,
        ResizeKind::NearestLow => 2,
        ResizeKind::NearestHigh => 3,
        ResizeKind::Linear => 4,
    };
    let parameters = Parameters::default()
        .address(address(step.input, at))
        .address(address(step.output, at))
        .u32(type_number(ty))
        .u32(kind)
        .u32(step.c as u32)
        .i32s(&smalls(what, step.size)?);
    let numbers = [step.offset, step.scale, step.shift].concat();
    let parameters = numbers.into_iter().fold(parameters, Parameters::f32);
    Ok(Some(spread("resize", threads, positions(parameters, step.out, step.c, threads))))
}

pub(super) fn conv(step: &Conv, at: Bases) -> Result<Option<Call>, DriverError> {
    let what = "a convolution";
    let operands = [Some(step.input), Some(step.output), step.bias, step.residual];
    let ty = float_type(what, &[&operands[..], &[Some(step.weights)]].concat())?;
    elements(what, &[step.n, step.size[0], step.size[1], step.c])?;
    elements(what, &[step.k, step.kernel[0], step.kernel[1], step.c / step.groups])?;
    let is_depthwise = step.groups == step.c && step.c == step.k && is_grouped(step.c, &operands, at);
    let channels = if is_depthwise { step.k / GROUP } else { step.k };
    let threads = elements(what, &[step.n, step.out[0], step.out[1], channels])?;
    if threads == 0 {
        return Ok(None);
    }
    let parameters = Parameters::default()
        .address(address(step.input, at))
        .address(address(step.weights, at))
        .address(optional_address(step.bias, at))
        .address(optional_address(step.residual, at))
        .address(address(step.output, at))
        .flag(step.activation == Activation::Relu)
        .u32(step.c as u32)
        .u32((step.c / step.groups) as u32)
        .u32((step.k / step.groups) as u32);
    let of_window = [step.size, step.kernel, step.strides, step.dilations, step.pads];
    let parameters = positions(window(what, parameters, of_window)?, step.out, channels, threads);
    let kernel = match (is_depthwise, ty) {
        (true, Type::F16) => "conv_depthwise_f16",
        (true, _) => "conv_depthwise_f32",
        (false, Type::F16) => "conv_grouped_f16",
        (false, _) => "conv_grouped_f32",
    };
    Ok(Some(spread(kernel, threads, parameters)))
}
