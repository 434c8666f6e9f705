//! Our own kernels (`cuda/kernels/*.cu`): which one does a step, in how many blocks, with what parameters. It is
//! decided when a plan is prepared, and nothing of it touches a GPU: a [`Call`] runs as it is on the emulation of
//! `cuda/kernels/host`, where tests compare it with what [`lowering::interpret`] says that the step means.
//!
//! A kernel takes one struct, which [`Parameters`] lays out as C++ does.

mod attention;
mod call;
mod images;
mod pointwise;
mod rows;
#[cfg(test)]
mod tests;

pub(crate) use call::Call;
use call::refused;
use lowering::Step;

use crate::driver::{Bases, DriverError};

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
